# SPDX-License-Identifier: Apache-2.0
"""Attention by torch and by FlashInfer: the same sums, in an engine that says it is not exact."""

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_flashinfer
import pytest
import torch
from checkpoints import write_config
from serving import serving
from specops import attention, reference
from specops.cli.serve import main
from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.engine.contract import contract_of
from specops.engine.models import load_model
from specops.engine.models.attention_backends import (
    BACKENDS,
    ByFlashInfer,
    backend_of,
    by_specops,
    by_torch,
)
from specops.engine.models.transformer import LayerBatch, LayerKv
from test_attention import Batch, random_batch
from test_attention_8bit import quantized
from torch import Tensor
from twin_device import TwinDevice

CPU = torch.device("cpu")
NAIVE = SpeculativeConfig(method="naive")
PROMPTS = ["def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n", "import os\nimport "]


def attended(backend: Any, batch: Batch, window: int | None, **scales: Tensor) -> Tensor:
    """Every row, those of no request too."""
    out = torch.full_like(batch.q, torch.nan)
    rows = torch.zeros(len(batch.q), dtype=torch.int32)
    layers = LayerBatch(
        positions=rows,
        cache_slots=rows.long(),
        qo_indptr=batch.qo_indptr,
        kv_indptr=batch.kv_indptr,
        kv_indices=batch.kv_indices,
        kv_lens=batch.kv_lens,
    )
    cache = LayerKv(batch.k_cache, batch.v_cache, **scales)
    backend(batch.q, cache, layers, sm_scale=0.1, sliding_window=window, out=out)
    return out


def padded_batch(dtype: torch.dtype) -> Batch:
    """With idle requests, whose lengths may be anything, and rows that are nobody's."""
    batch = random_batch([1, 17, 130, 40, 600], [1, 0, 3, 40, 5], dtype)
    batch.q = torch.cat([batch.q, torch.full_like(batch.q[:3], torch.nan)])
    batch.kv_lens[1] = -9
    return batch


def flashinfer_of_the_tests() -> ByFlashInfer:
    return ByFlashInfer(fake_flashinfer.modules()["flashinfer"], CPU)


@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make", [lambda: by_specops, lambda: by_torch, flashinfer_of_the_tests], ids=BACKENDS
)
def test_backends_agree(make: Callable[[], Any], dtype: torch.dtype, window: int | None) -> None:
    batch = padded_batch(dtype)
    got = attended(make(), batch, window)
    used = int(batch.qo_indptr[-1])
    assert (got[used:] == 0).all()
    want, _ = reference.append_attention(*batch.tensors(), sm_scale=0.1, sliding_window=window)
    near = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got[:used], want[:used], rtol=near, atol=near)


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_torch_widens_8_bit_caches(cache_dtype: torch.dtype) -> None:
    batch, scales = quantized(random_batch([300, 40], [4, 1], torch.float32), cache_dtype)
    want = attention.append_attention(*batch.tensors(), sm_scale=0.1, **scales)
    assert isinstance(want, Tensor)
    torch.testing.assert_close(
        attended(by_torch, batch, None, **scales), want, rtol=1e-4, atol=1e-5
    )


def test_pages_before_the_window_may_be_gone() -> None:
    batch = random_batch([300], [3], torch.float32)
    expected = attended(by_torch, batch, 100)
    batch.kv_indices[: (297 - 99) // 16] = -1
    assert torch.equal(attended(by_torch, batch, 100), expected)


# ---- through the engine ----


def engine_of(backend: str, **config: Any) -> Engine:
    return Engine(EngineConfig(device="cpu", attention_backend=backend, **config))


def texts(engine: Engine, **config: Any) -> list[tuple[list[int], list[float]]]:
    params = SamplingParams(max_tokens=40, temperature=0.0, logprobs=1)
    made = engine.generate(PROMPTS, params, **config)
    return [(one.token_ids, [token.logprob for token in one.logprobs]) for one in made]


@pytest.mark.parametrize("method", ["naive", "ngram", "suffix", "mtp"])
def test_greedy_text_is_that_of_ours(method: str) -> None:
    """In fp32, where ties are as good as never: tokens are equal and logprobs near."""
    config = {"dtype": "float32", "max_num_batched_tokens": 48, "max_num_seqs": 4}
    drafts = {"num_speculative_tokens": 3, "adaptive_verification": False}
    speculative = NAIVE if method == "naive" else SpeculativeConfig(method=method, **drafts)
    own = {"speculative_config": speculative, **config}
    want, engine = texts(engine_of("specops", **own)), engine_of("torch", **own)
    for (tokens, logprobs), (ours, our_logprobs) in zip(texts(engine), want, strict=True):
        assert tokens == ours
        torch.testing.assert_close(
            torch.tensor(logprobs), torch.tensor(our_logprobs), rtol=1e-3, atol=1e-3
        )
    assert (engine.stats.speculative.num_accepted_tokens > 0) == (method != "naive")


def test_trees_and_padded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: two memories, poison in what nobody wrote, idle requests beside others."""
    tree = SpeculativeConfig(
        method="mtp", num_speculative_tokens=4, tree=True, adaptive_verification=False
    )
    config = {"dtype": "float32", "max_num_seqs": 4, "speculative_config": tree}
    want = texts(engine_of("specops", **config))
    for captures in (False, True):
        device = TwinDevice(captures=captures, poison=0xFF)
        monkeypatch.setattr(
            "specops.engine.engine.open_device",
            lambda _, *, graphs, device=device: _with(device, captures=device.captures and graphs),
        )
        engine = engine_of("torch", **config)
        assert [one[0] for one in texts(engine)] == [one[0] for one in want]
        assert engine.num_captures == 0 and engine.stats.speculative.num_accepted_tokens > 0


def _with(device: TwinDevice, *, captures: bool) -> TwinDevice:
    device.captures = captures
    return device


def test_windows_and_8_bit_caches(tmp_path: Path) -> None:
    directory = write_config(
        tmp_path, num_hidden_layers=2, max_position_embeddings=192, sliding_window=20,
        model_type="mistral", architectures=["MistralForCausalLM"],
    )  # fmt: skip
    rows = torch.arange(90, dtype=torch.int32) % 64
    logits = []
    for backend in ("specops", "torch"):
        model = load_model(
            directory,
            dtype="float32",
            load_format="dummy",
            kv_cache_dtype="int8",
            attention_backend=backend,
        )
        cache = model.new_kv_cache(6, 16)
        logits.append(model.logits(model.forward(one_request(rows), cache)))
    torch.testing.assert_close(*logits, rtol=1e-2, atol=1e-2)
    assert not torch.equal(*logits)


def one_request(token_ids: Tensor) -> Any:
    from specops.engine.models import StepBatch

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    count = len(token_ids)
    return StepBatch(
        token_ids=token_ids,
        positions=torch.arange(count, dtype=torch.int32),
        cache_slots=torch.arange(count),
        qo_indptr=ints(0, count),
        kv_indptr=ints(0, 6),
        kv_indices=torch.arange(6, dtype=torch.int32),
        kv_lens=ints(count),
    )


def test_it_calls_itself_not_exact(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = (contract_of(engine_of(name)) for name in ("specops", "torch"))
    assert ours["exact"] is True and ours["attention_backend"] == "specops"
    assert theirs["exact"] is False and theirs["attention_backend"] == "torch"
    assert theirs["attention_leaf_tokens"] is None and ours["digest"] != theirs["digest"]
    with serving(engine_of("torch")) as served:
        import httpx

        assert httpx.get(f"{served.url}/v1/contract").json() == theirs
        body = {"prompt": "a", "max_tokens": 1}
        answer = httpx.post(f"{served.url}/v1/completions", json=body).json()
    assert answer["system_fingerprint"].endswith(theirs["digest"])

    monkeypatch.setattr("specops.server.serve", lambda *_, **__: None)
    for backend, said in (("torch", 1), ("specops", 0)):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            command = ["--device", "cpu", "--port", "0", "--attention-backend", backend]
            assert main(command) == 0
        found = [one.getMessage() for one in caplog.records if "not exact" in one.getMessage()]
        assert len(found) == said and all("attention by torch" in one for one in found)


def test_verify_exactness_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["verify-exactness", "--device", "cpu", "--prompts", "1", "--max-tokens", "8"]
    code = main([*command, "--method", "ngram", "--attention-backend", "torch"])
    said = capsys.readouterr().out
    assert "attention by torch: 1 prompts" in said and "not exact: differences are" in said
    assert (code == 0) == ("No difference" in said)


def test_shared_prefixes_are_not_declared() -> None:
    """Nothing would be spared, so nothing may be counted."""
    engine = engine_of("torch", max_num_seqs=4, speculative_config=NAIVE)
    prompt = list(range(2, 200))
    params = SamplingParams(max_tokens=4, temperature=0.0, n=3, seed=1)
    engine.generate([prompt], params)
    assert engine.stats.cascade_saved_bytes == 0


def test_what_cannot_be_used_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="attention_backend must be specops, torch or flashinfer"):
        EngineConfig(attention_backend="xformers")
    with pytest.raises(ValueError, match="flashinfer needs a GPU, got device cpu"):
        engine_of("flashinfer")
    cuda = torch.device("cuda", 0)
    with pytest.raises(ValueError, match="flashinfer needs a kv_cache_dtype of auto"):
        backend_of("flashinfer", cuda, has_8_bit_cache=True)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ValueError, match="flashinfer, which is not installed: pip install"):
        backend_of("flashinfer", cuda, has_8_bit_cache=False)


def test_modules_of_flashinfer_are_those_that_are_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[ModuleType, torch.device]] = []
    module = fake_flashinfer.modules()["flashinfer"]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(ByFlashInfer, "__init__", lambda self, *given: made.append(given))
    backend_of("flashinfer", torch.device("cuda", 1), has_8_bit_cache=False)
    assert made == [(module, torch.device("cuda", 1))]
