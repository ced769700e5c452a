# SPDX-License-Identifier: Apache-2.0
"""Engines with an 8-bit KV cache: speculation changes no bit there, either."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_config
from fake_gpu import FakeGpu
from pages import check_pages
from specops.cli.serve import main
from specops.engine import Completion, Engine, EngineConfig, SamplingParams, SpeculativeConfig

NAIVE = SpeculativeConfig(method="naive")
PROMPTS = [[7, 8, 9] * 6, [5, 6, 7, 5, 6, 7, 5], list(range(1, 50)), [3], [11, 12] * 20]
VOCAB = 64
KINDS = ["int8", "fp8_e4m3"]
CHAINS = {"num_speculative_tokens": 4, "adaptive_verification": False}
METHODS = {
    "ngram": SpeculativeConfig.from_dict({"method": "ngram", "min_ngram_size": 1, **CHAINS}),
    "suffix": SpeculativeConfig.from_dict({"method": "suffix", **CHAINS}),
    "mtp": SpeculativeConfig.from_dict({"method": "mtp", **CHAINS}),
    "mtp+ngram": SpeculativeConfig.from_dict({"method": "mtp+ngram", **CHAINS}),
}
LIMITS: dict[str, dict[str, Any]] = {
    "at once": {"max_num_seqs": 8},
    "chunks": {"max_num_seqs": 4, "max_num_batched_tokens": 48, "page_size": 32},
    "preempted": {"max_num_seqs": 5, "max_model_len": 96, "num_pages": 12},
}


def make(model_dir: Path, speculative: SpeculativeConfig, **config: Any) -> Engine:
    config = {"device": "cpu", "methods": ("all",), **config}
    return Engine(
        EngineConfig(
            model=str(model_dir), load_format="dummy", speculative_config=speculative, **config
        )
    )


def params(index: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=40 - 3 * index,
        temperature=(0.0, 0.8, 0.0, 0.5, 0.9)[index],
        top_p=(1.0, 1.0, 0.9)[index % 3],
        seed=index,
        ignore_eos=True,
        logprobs=(0, 2, 3, 1, 0)[index],
    )


def bits(done: list[Completion]) -> list[Any]:
    def pack(value: float) -> bytes:
        return struct.pack("<f", value)

    return [
        (
            one.token_ids,
            one.finish_reason,
            [
                (pack(p.logprob), p.rank, [(i, pack(value)) for i, value in p.alternatives])
                for p in one.logprobs
            ],
        )
        for one in done
    ]


def run(engine: Engine, count: int = len(PROMPTS)) -> list[Any]:
    done = engine.generate(PROMPTS[:count], [params(i) for i in range(count)])
    assert engine.num_free_pages == engine.num_pages
    check_pages(engine._pool)
    return bits(done)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(
        tmp_path_factory.mktemp("model"),
        num_hidden_layers=2,
        vocab_size=VOCAB,
        max_position_embeddings=192,
        num_nextn_predict_layers=1,
    )


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> dict[str, list[Any]]:
    """Return the results of plain decoding, one request at a time."""
    return {
        kind: run(make(model_dir, NAIVE, max_num_seqs=1, kv_cache_dtype=kind))
        for kind in ("auto", *KINDS)
    }


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.fast("int8-*-at once", "fp8_e4m3-*-preempted", "fp8_e4m3-suffix-chunks")
def test_speculation_changes_no_bit(
    model_dir: Path,
    expected: dict[str, list[Any]],
    kind: str,
    method: str,
    limits: dict[str, Any],
) -> None:
    """Tokens and logprob bits are equal, also with the cached prefixes of a first run."""
    engine = make(model_dir, METHODS[method], kv_cache_dtype=kind, **limits)
    for _ in range(2):
        assert run(engine) == expected[kind]
    stats = engine.stats.speculative
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert engine.stats.num_preemptions > 0 or "num_pages" not in limits


def test_cache_dtypes_give_different_logprobs(expected: dict[str, list[Any]]) -> None:
    """Without a difference, the test above would not show that the dtype is used."""
    logprobs = [[one[2] for one in expected[kind]] for kind in ("auto", *KINDS)]
    assert all(logprobs[a] != logprobs[b] for a, b in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize("method", ["mtp+ngram", "suffix"])
@pytest.mark.parametrize("kind", KINDS)
def test_captured_steps_keep_the_bits(
    model_dir: Path,
    expected: dict[str, list[Any]],
    use_fake_gpu: Callable[..., FakeGpu],
    kind: str,
    method: str,
) -> None:
    """Shapes are padded, memory is poisoned and graphs are replayed."""
    use_fake_gpu(captures=True, poison=0xFF)
    engine = make(model_dir, METHODS[method], max_num_seqs=4, kv_cache_dtype=kind)
    for _ in range(2):
        assert run(engine) == expected[kind]
    assert engine.num_captures > 0 and engine.stats.speculative.num_accepted_tokens > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.fast("fp8_e4m3", ci=("int8",))
def test_cuda_kernels_keep_the_bits(
    tmp_path: Path, use_fake_gpu: Callable[..., FakeGpu], interpreter: None, kind: str
) -> None:

    model_dir = write_config(
        tmp_path,
        num_hidden_layers=1,
        vocab_size=VOCAB,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=96,
        num_nextn_predict_layers=1,
    )

    use_fake_gpu()
    want = run(make(model_dir, NAIVE, max_num_seqs=1, kv_cache_dtype=kind), count=2)
    for captures, speculative in ((True, METHODS["mtp"]), (False, METHODS["ngram"])):
        use_fake_gpu(captures=captures, poison=0xFF)
        engine = make(model_dir, speculative, max_num_seqs=2, kv_cache_dtype=kind)
        assert run(engine, count=2) == want
        assert engine.stats.speculative.num_draft_tokens > 0


def test_cache_bytes_determine_the_number_of_pages(model_dir: Path) -> None:
    config = {"kv_cache_bytes": 200_000, "max_model_len": 96, "max_num_seqs": 64}
    pages = {}
    for kind in ("auto", *KINDS):
        engine = make(model_dir, METHODS["mtp"], kv_cache_dtype=kind, **config)
        cache = engine._runner.parts.cache
        draft_cache = engine.drafters["mtp"].head.cache  # type: ignore[attr-defined]
        tensors = [*cache.tensors, *draft_cache.tensors]
        assert len(tensors) == (6 if kind == "auto" else 12)
        used = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        assert 0 <= 200_000 - used < used / engine.num_pages
        pages[kind] = engine.num_pages
    assert pages["int8"] == pages["fp8_e4m3"] > 1.7 * pages["auto"]


def test_other_cache_dtypes_are_refused() -> None:
    for wrong in ("fp8", "bfloat16", 8, None):
        with pytest.raises(ValueError, match="kv_cache_dtype must be auto, int8 or fp8_e4m3, got"):
            EngineConfig(kv_cache_dtype=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_verify_exactness_finds_no_difference(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["verify-exactness", "--device", "cpu", "--num-threads", "2", "--max-tokens", "24"]
    assert main([*command, "--prompts", "3", "--kv-cache-dtype", kind]) == 0
    assert "No difference in" in capsys.readouterr().out
