# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""MTP options of a server or a request take effect, or are refused in one sentence."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

for name in ("fastapi", "uvicorn", "pydantic", "prometheus_client", "httpx"):
    pytest.importorskip(name)

import httpx
from checkpoints import write_tokenizer
from mtp_checkpoints import Tiny, make_mtp_checkpoint, save_checkpoint
from safetensors.torch import load_file, save_file
from serving import serving
from specops.api.config import BUNDLED_MODEL
from specops.api.errors import ModelError
from specops.cli.serve import main
from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.engine.drafters import mtp as drafters_mtp

LAYERS = 3  # layers of the target


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Return a target with one module."""
    tiny = make_mtp_checkpoint(tmp_path_factory.mktemp("whole"), "deepseek_v3")
    write_tokenizer(tiny.directory)
    return tiny


@pytest.fixture(scope="module")
def bare(whole: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same target without its module."""
    directory = tmp_path_factory.mktemp("bare")
    config = {k: v for k, v in whole.config.items() if k != "num_nextn_predict_layers"}
    own = f"model.layers.{LAYERS}."
    save_checkpoint(
        directory, config, {k: v for k, v in whole.tensors.items() if not k.startswith(own)}
    )
    write_tokenizer(directory)
    return directory


def draft_directory(whole: Tiny, directory: Path, **changes: Any) -> Path:
    """Write the module alone, with a config.json of its own."""
    directory.mkdir()
    own = f"model.layers.{LAYERS}."
    tensors = {k: v for k, v in whole.tensors.items() if k.startswith(own)}
    save_checkpoint(directory, whole.config | changes, tensors)
    return directory


def error_of(capsys: pytest.CaptureFixture[str], target: Path, **config: Any) -> str:
    """Return the error of the command about a configuration, after checking its form."""
    arguments = ["--model", str(target), "--device", "cpu", "--in-process"]
    assert main([*arguments, "--speculative-config", json.dumps(config)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("specops: ") and message.count("\n") == 1, message
    return message.removeprefix("specops: ").removesuffix("\n")


PROMPTS = ["def read_lines(path):\n", "import os\nimport "]
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


def outcome(engine: Engine, **own: Any) -> list[tuple[list[int], int, int]]:
    """Return tokens, number of drafts and number of accepted drafts of each prompt."""
    done = engine.generate(PROMPTS, GREEDY, speculative_config=own)
    stats = [(one.stats.num_draft_tokens, one.stats.num_accepted_tokens) for one in done]
    return [(one.token_ids, *counts) for one, counts in zip(done, stats, strict=True)]


def test_drafts_do_not_depend_on_where_modules_and_options_come_from(tmp_path: Path) -> None:
    """Modules come from the checkpoint or a directory, and options from the server or a request."""
    config = json.loads((BUNDLED_MODEL / "config.json").read_text())
    tensors = load_file(BUNDLED_MODEL / "model.safetensors")
    module = f"model.layers.{config['num_hidden_layers']}."
    drafts, target = tmp_path / "drafts", tmp_path / "target"
    for directory, is_draft in ((drafts, True), (target, False)):
        directory.mkdir()
        parts = {k: v for k, v in tensors.items() if k.startswith(module) == is_draft}
        save_checkpoint(directory, config, parts)
    shutil.copy(BUNDLED_MODEL / "tokenizer.json", target)
    own = {"method": "mtp", "num_speculative_tokens": 3}
    whole = tiny_engine(BUNDLED_MODEL)
    expected = outcome(whole, **own)
    assert all(0 < accepted < count for _, count, accepted in expected)
    assert outcome(whole, method="naive") == [(token_ids, 0, 0) for token_ids, *_ in expected]
    for engine in (
        tiny_engine(BUNDLED_MODEL, **own),
        tiny_engine(target, method="MTP", num_speculative_tokens=3, model=str(drafts)),
        tiny_engine(target, method="suffix", num_speculative_tokens=9, model=str(drafts)),
    ):
        assert engine.runnable_methods == ("naive", "ngram", "suffix", "mtp", "prediction")
        assert "mtp" not in engine.missing_methods
        assert outcome(engine, **own) == expected


def test_draft_vocabulary_changes_no_text(tmp_path: Path) -> None:
    """A draft vocabulary only restricts the drafts."""
    path = tmp_path / "vocab.safetensors"
    save_file({"d2t": torch.zeros(500, dtype=torch.int64)}, path)
    own = {"method": "mtp", "num_speculative_tokens": 3}
    expected = outcome(tiny_engine(BUNDLED_MODEL), **own)
    for method in ("mtp", "ngram"):
        got = outcome(tiny_engine(BUNDLED_MODEL, method=method, draft_vocab=str(path)), **own)
        assert [tokens for tokens, *_ in got] == [tokens for tokens, *_ in expected]
        accepted, of_all = (sum(one[2] for one in each) for each in (got, expected))
        assert 0 < accepted < of_all


@pytest.mark.parametrize("method", ["mtp", "suffix"])
def test_max_total_draft_tokens_limits_the_drafts_of_a_step(whole: Tiny, method: str) -> None:
    engine = tiny_engine(
        whole.directory, method=method, num_speculative_tokens=4, max_total_draft_tokens=3
    )
    for prompt in ([5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9], [3] * 9, [1, 1, 1]):
        engine.add_request(prompt, GREEDY)
    before, most = 0, 0
    while engine.has_unfinished():
        engine.step()
        drafts = engine.stats.speculative.num_draft_tokens
        before, most = drafts, max(most, drafts - before)
    assert most == 3


def test_model_without_modules_is_refused(capsys: pytest.CaptureFixture[str], bare: Path) -> None:
    message = error_of(capsys, bare, method="mtp", num_speculative_tokens=3)
    assert message.startswith(
        f"{bare}: the checkpoint holds no MTP weights; looked for tensors named"
    )


@pytest.mark.parametrize("method", ["mtp", "MTP"])
def test_more_model_steps_than_drafts_are_refused(
    capsys: pytest.CaptureFixture[str], whole: Tiny, method: str
) -> None:
    message = error_of(
        capsys, whole.directory, method=method, num_speculative_tokens=2, num_model_steps=3
    )
    assert message == "num_model_steps must be at most num_speculative_tokens = 2, got 3"


@pytest.mark.parametrize("method", ["mtp", "ngram"])
@pytest.mark.parametrize("field,value", [("hidden_size", 128), ("vocab_size", 200)])
def test_draft_directory_of_another_model_is_refused(
    capsys: pytest.CaptureFixture[str],
    whole: Tiny,
    bare: Path,
    tmp_path: Path,
    method: str,
    field: str,
    value: int,
) -> None:
    drafts = draft_directory(whole, tmp_path / "drafts", **{field: value})
    assert error_of(capsys, bare, method=method, model=str(drafts)) == (
        f"{drafts / 'config.json'}: {field} is {value}, but the target in {bare} has "
        f"{whole.config[field]}"
    )


def test_draft_directory_of_other_shapes_is_refused(
    capsys: pytest.CaptureFixture[str], whole: Tiny, bare: Path, tmp_path: Path
) -> None:
    """The directory's config.json is right, but its tensors are not."""
    drafts = draft_directory(whole, tmp_path / "drafts")
    own = f"model.layers.{LAYERS}."
    halved = {k: v[..., :64] for k, v in whole.tensors.items() if k.startswith(own)}
    save_checkpoint(drafts, whole.config, halved)
    message = error_of(capsys, bare, method="mtp", model=str(drafts))
    assert message == f"{drafts}: tensor {own}eh_proj.weight must be [64, 128], got [64, 64]"


@pytest.mark.parametrize("method", ["mtp", "naive"])
def test_missing_draft_directory_is_refused(
    capsys: pytest.CaptureFixture[str], bare: Path, tmp_path: Path, method: str
) -> None:
    nowhere = tmp_path / "nowhere"
    assert error_of(capsys, bare, method=method, model=str(nowhere)) == (
        f"{nowhere}: no such directory"
    )


@pytest.mark.parametrize(
    "file,content,words",
    [
        ("config.json", None, "config.json"),
        ("config.json", b"{", "config.json"),
        ("model.safetensors", None, "safetensors"),
        ("model.safetensors", b"no tensors", "safetensors"),
    ],
)
def test_damaged_draft_directory_is_refused(
    capsys: pytest.CaptureFixture[str],
    whole: Tiny,
    bare: Path,
    tmp_path: Path,
    file: str,
    content: bytes | None,
    words: str,
) -> None:
    drafts = draft_directory(whole, tmp_path / "drafts")
    if content is None:
        (drafts / file).unlink()
    else:
        (drafts / file).write_bytes(content)
    message = error_of(capsys, bare, method="mtp", model=str(drafts))
    assert message.startswith(str(drafts)) and words in message


@pytest.mark.parametrize("method", ["mtp", "suffix"])
def test_invalid_draft_vocabularies_are_refused(
    capsys: pytest.CaptureFixture[str], whole: Tiny, tmp_path: Path, method: str
) -> None:
    path = tmp_path / "vocab.safetensors"

    def vocabulary_error() -> str:
        message = error_of(capsys, whole.directory, method=method, draft_vocab=str(path))
        assert message.startswith(f"{path}: ")
        return message.removeprefix(f"{path}: ")

    assert vocabulary_error() == "no such file; expected a safetensors file with the tensor d2t"
    path.write_bytes(b"d2t")
    assert vocabulary_error().startswith("not a safetensors file")
    save_file({"t2d": torch.zeros(4, dtype=torch.int64)}, path)
    assert vocabulary_error() == "tensor d2t is missing"
    for d2t, words in (
        (torch.zeros(4), "d2t must be int64"),
        (torch.zeros(0, dtype=torch.int64), "d2t must be int64"),
        (torch.zeros(2, 2, dtype=torch.int64), "d2t must be int64"),
        (torch.tensor([0, -1]), "ascending token ids in [0, 160)"),
        (torch.tensor([0, 159]), "ascending token ids in [0, 160)"),
        (torch.tensor([-1, 0]), "ascending token ids in [0, 160)"),
    ):
        save_file({"d2t": d2t}, path)
        assert words in vocabulary_error()
    path.unlink()
    path.mkdir()
    assert vocabulary_error() == "no such file; expected a safetensors file with the tensor d2t"


def test_draft_vocabulary_without_modules_is_refused(
    capsys: pytest.CaptureFixture[str], bare: Path, tmp_path: Path
) -> None:
    """The refusal does not depend on whether the server's method needs modules."""
    path = tmp_path / "vocab.safetensors"
    save_file({"d2t": torch.zeros(8, dtype=torch.int64)}, path)
    message = error_of(capsys, bare, method="ngram", draft_vocab=str(path))
    assert message.startswith(f"{bare}: the checkpoint holds no MTP weights")


def test_request_for_missing_modules_is_refused(bare: Path) -> None:
    """The error gives the reason, but no path of the server."""
    engine = tiny_engine(bare, methods=("all",))
    assert engine.runnable_methods == ("naive", "ngram", "suffix", "prediction")
    with pytest.raises(ValueError, match="the checkpoint holds no MTP weights"):
        engine.add_request([1], SamplingParams(), speculative_config={"method": "mtp"})
    with serving(engine) as served:
        for own in ({"method": "mtp"}, {"method": "mtp+suffix"}):
            for stream in (False, True):
                body = {"prompt": "a", "max_tokens": 2, "speculative_config": own, "stream": stream}
                answer = httpx.post(f"{served.url}/v1/completions", json=body)
                assert answer.status_code == 400
                error = answer.json()["error"]
                assert error["param"] == "speculative_config"
                assert error["message"].startswith(
                    'method "mtp" cannot run in this engine, which has naive, ngram, suffix, '
                    "prediction: the checkpoint holds no MTP weights"
                )
                assert str(bare) not in error["message"]
        card = httpx.get(f"{served.url}/v1/models").json()["data"][0]
        assert card["methods"] == ["naive", "ngram", "suffix", "prediction"]


def test_unsupported_modules_are_refused_on_request(whole: Tiny, tmp_path: Path) -> None:
    """The target runs without them."""
    expert = f"model.layers.{LAYERS}.mlp.experts.0.up_proj.weight"
    save_checkpoint(tmp_path, whole.config, whole.tensors | {expert: torch.zeros(2)})
    write_tokenizer(tmp_path)
    engine = tiny_engine(tmp_path, methods=("all",))
    assert "mtp" not in engine.runnable_methods
    with pytest.raises(ValueError, match="mixture of experts") as error:
        engine.add_request([1], SamplingParams(), speculative_config={"method": "mtp"})
    assert str(tmp_path) not in str(error.value)
    with pytest.raises(ModelError, match="mixture of experts"):
        tiny_engine(tmp_path, method="mtp")


def test_verify_exactness_compares_the_methods_of_the_model(
    capsys: pytest.CaptureFixture[str], whole: Tiny, bare: Path, tmp_path: Path
) -> None:
    """Another method is refused."""
    command = ["verify-exactness", "--model", str(bare), "--device", "cpu", "--max-tokens", "4"]
    command += ["--prompts", "2", "--temperature", "0"]
    assert main(command) == 0
    assert "mtp" not in capsys.readouterr().out
    assert main([*command, "--method", "mtp"]) == 2
    message = capsys.readouterr()
    assert message.out == "" and message.err.startswith(
        'specops: method "mtp" cannot run in this engine'
    )
    drafts = draft_directory(whole, tmp_path / "drafts")
    assert main([*command, "--speculative-config", json.dumps({"model": str(drafts)})]) == 0
    assert "mtp+suffix" in capsys.readouterr().out


@pytest.mark.parametrize(
    "own,message",
    [
        (
            {"num_model_steps": 4},
            "num_model_steps must be at most num_speculative_tokens = 3, got 4",
        ),
        ({"mtp_strategy": "both"}, "mtp_strategy must be one of default, with_ngram, with_suffix"),
        ({"method": "ngram", "mtp_strategy": "with_ngram"}, "needs method"),
        (
            {"num_speculative_tokens": 17, "num_model_steps": 17},
            "num_model_steps must be at most 16 on this server, got 17",
        ),
        ({"model": "/etc"}, "speculative_config.model can only be set by the server"),
        ({"draft_vocab": "/etc/passwd"}, "draft_vocab can only be set by the server"),
    ],
)
def test_invalid_requests_to_an_engine_with_modules_are_refused(
    whole: Tiny, own: dict[str, Any], message: str
) -> None:
    with serving(tiny_engine(whole.directory, method="mtp", num_speculative_tokens=3)) as served:
        body = {"prompt": "a", "max_tokens": 2, "speculative_config": own}
        answer = httpx.post(f"{served.url}/v1/completions", json=body)
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "methods,own,is_loaded",
    [
        (None, {"method": "ngram", "num_speculative_tokens": 3}, False),
        ((), {}, False),
        (("ngram",), {}, False),
        (("mtp",), {}, True),
        (("all",), {"method": "suffix"}, True),
        (None, {"method": "mtp"}, True),
        (None, {"method": "mtp+ngram"}, True),
    ],
)
def test_modules_are_loaded_only_for_named_methods(
    whole: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    methods: tuple[str, ...] | None,
    own: dict[str, Any],
    is_loaded: bool,
) -> None:
    """Other engines have no weights or pages of modules, and their error says how to get them."""
    loaded: list[object] = []
    load = drafters_mtp.load_mtp
    monkeypatch.setattr(drafters_mtp, "load_mtp", lambda *a, **b: loaded.append(a) or load(*a, **b))
    engine = tiny_engine(whole.directory, methods=methods, **own)
    assert len(loaded) == is_loaded
    assert ("mtp" in engine.runnable_methods) == is_loaded == ("mtp" in engine.drafters)
    assert (engine._drafting.kv_bytes.per_token > 0) == is_loaded
    requested = {"method": "mtp", "num_speculative_tokens": 2}
    if is_loaded:
        assert len(outcome(engine, **requested)) == len(PROMPTS)
        return
    with pytest.raises(ValueError, match=r'method "mtp" cannot run .* methods$'):
        engine.add_request([1], SamplingParams(), speculative_config=requested)


def test_named_methods_must_run(bare: Path) -> None:
    """A method that only "all" includes need not run."""
    with pytest.raises(ModelError, match="the checkpoint holds no MTP weights"):
        tiny_engine(bare, methods=("mtp",))
    assert "mtp" not in tiny_engine(bare, methods=("all",)).runnable_methods
    with pytest.raises(ValueError, match=r"methods must be one of all, ngram, .* got 'falcon'"):
        EngineConfig(methods=("falcon",))
    with pytest.raises(ValueError, match=r"methods must be a list of names, got 'mtp'"):
        EngineConfig(methods="mtp")  # type: ignore[arg-type]


def tiny_engine(target: Path, methods: tuple[str, ...] | None = None, **speculative: Any) -> Engine:
    config = SpeculativeConfig.from_dict(speculative)
    return Engine(
        EngineConfig(model=str(target), device="cpu", speculative_config=config, methods=methods)
    )
