# SPDX-License-Identifier: Apache-2.0
"""The digest of the execution contract changes exactly with options that change bits."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import specops
from serving import serving
from shared_fixtures import every_isa
from specops.api.config import BUNDLED_MODEL
from specops.api.errors import ModelError
from specops.cli.serve import main
from specops.engine import Engine, EngineConfig, SpeculativeConfig
from specops.engine.machine import LEAF_TOKENS
from specops.engine.models import weight_cache
from specops.service import contract
from specops.service.contract import _SAMPLING_LEAF_TOKENS, contract_of


def digest(**config: Any) -> str:
    config = {"device": "cpu", "num_threads": 1, **config}
    return str(contract_of(Engine(EngineConfig(**config)))["digest"])


@pytest.fixture(scope="module")
def default_digest() -> str:
    return digest()


@pytest.mark.parametrize(
    "config",
    [
        {"speculative_config": SpeculativeConfig(method="mtp", num_speculative_tokens=3)},
        {"max_num_seqs": 3, "max_num_batched_tokens": 64, "page_size": 32, "num_pages": 90},
        {"enable_prefix_caching": False, "enable_cascade_attention": False, "seed": 4},
        {"max_model_len": 100, "served_model_name": "other"},
        {"model": str(BUNDLED_MODEL)},
        {"num_threads": 2},
    ],
    ids=lambda config: ", ".join(config),
)
def test_options_without_effect_on_bits_keep_the_digest(
    default_digest: str, config: dict[str, Any]
) -> None:
    assert digest(**config) == default_digest


def test_options_that_change_bits_change_the_digest(default_digest: str, tmp_path: Path) -> None:
    found = [default_digest, digest(dtype="float32"), digest(logprobs_mode="processed_logprobs")]
    found.append(digest(json_whitespace="none"))
    found.append(digest(kv_cache_dtype="int8"))
    for name in ("config.json", "model.safetensors"):
        copy = tmp_path / name
        shutil.copytree(BUNDLED_MODEL, copy, ignore=shutil.ignore_patterns("*.py"))
        data = bytearray((copy / name).read_bytes())
        if name == "config.json":
            changed = {**json.loads(data), "rms_norm_eps": 2e-6}
            data = bytearray(json.dumps(changed).encode())
        else:
            data[-1] ^= 1  # flips a bit of the last weight
        (copy / name).write_bytes(data)
        found.append(digest(model=str(copy)))
    assert len(set(found)) == len(found)
    isa_digests = {digest() for _ in every_isa()}
    others = set(specops.supported_isas()) - set(specops.portable_isas())
    assert default_digest in isa_digests and len(isa_digests) == 1 + len(others)


def test_cached_digests_are_not_computed_again(
    default_digest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computing them again would double the start time of a large model."""
    monkeypatch.setattr(weight_cache, "_SETTLED_SECONDS", -1.0)
    config = {"weight_cache": str(tmp_path)}
    assert digest(**config) == default_digest
    read: list[str] = []
    monkeypatch.setattr(contract, "digest_of_bytes", lambda file: read.append(file.name) or "")
    assert digest(**config) != default_digest and read == ["config.json"]


def test_random_weights_have_a_stable_digest(default_digest: str) -> None:
    made = digest(load_format="dummy")
    assert made == digest(load_format="dummy") != default_digest


def test_contract_states_kernels_device_and_model() -> None:
    contract = contract_of(Engine(EngineConfig(device="cpu")))
    facts = specops.runtime.build_facts()
    assert contract["kernels"] == facts and len(facts["source_digest"]) == 16
    assert contract["device"]["kind"] == "cpu"
    assert contract["device"]["numerics"] in ("portable", specops.get_isa())
    assert contract["model"]["dtype"] == "bfloat16"
    assert contract["attention_leaf_tokens"] == 64 and contract["sampling_leaf_tokens"] == 1024


@pytest.mark.parametrize(
    ("sizes", "kind", "header", "constant", "unit"),
    [
        (LEAF_TOKENS, "cpu", "attention/append_attention/append_attention.h", "kAttentionLeaf", 1),
        (LEAF_TOKENS, "cuda", "attention/append_attention/cuda/plan.cuh", "kLeafTokens", 1),
        (_SAMPLING_LEAF_TOKENS, "cpu", "sampling/row/cpu/leaf.h", "kLeaf", 1),
        (_SAMPLING_LEAF_TOKENS, "cuda", "sampling/row/cuda/row_logits.cuh", "kLeafBytes", 4),
    ],
)
def test_leaf_sizes_match_the_kernels(
    sizes: dict[str, int], kind: str, header: str, constant: str, unit: int
) -> None:
    text = (Path(__file__).parent.parent / "csrc" / header).read_text()
    (size,) = re.findall(rf"constexpr int(?:64_t)? {constant} = (\d+);", text)
    assert int(size) == sizes[kind] * unit


def test_command_line_reports_the_contract(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, default_digest: str
) -> None:
    assert main(["contract", "--device", "cpu", "--num-threads", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["digest"] == default_digest
    assert main(["contract", "--model", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err
    file = tmp_path / "found.json"
    command = ["verify-exactness", "--device", "cpu", "--prompts", "1", "--max-tokens", "4"]
    assert main([*command, "--method", "ngram", "--temperature", "0", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["contract"]["digest"] == default_digest
    (comparison,) = found["comparisons"]
    assert comparison["method"] == "ngram" and comparison["num_different"] == 0
    output = capsys.readouterr()
    assert "tokens/step" in output.out
    # With --json -, standard output has only the report.
    assert main([*command, "--method", "ngram", "--temperature", "0", "--json", "-"]) == 0
    piped = capsys.readouterr()
    assert json.loads(piped.out) == found and piped.err == output.out


def test_answers_contain_the_digest() -> None:
    with serving(Engine(EngineConfig(device="cpu"))) as served:
        import httpx

        contract = httpx.get(f"{served.url}/v1/contract").json()
        body = {"prompt": "a", "max_tokens": 1}
        answer = httpx.post(f"{served.url}/v1/completions", json=body).json()
    expected = f"specops-{specops.__version__}-{contract['digest']}"
    assert answer["system_fingerprint"] == expected
    assert contract == contract_of(served.engine)


def test_missing_weights_are_reported(tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(BUNDLED_MODEL, copy)
    engine = Engine(EngineConfig(device="cpu", model=str(copy)))
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        contract_of(engine)
