# SPDX-License-Identifier: Apache-2.0
"""transformers with our attention: the tokens of its own, and rows that keep their bits."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from specops import transformers as adapter  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MODELS = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "window": ("MistralConfig", {"sliding_window": 24}),
    "sinks and windows": (
        "GptOssConfig",
        {"sliding_window": 24, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
}


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    adapter.register()


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    name, more = MODELS[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**SIZES, **more)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def generated(model: Any, attention: str, inputs: dict[str, Tensor], **options: Any) -> Any:
    model.set_attn_implementation(attention)
    return model.generate(
        **inputs, max_new_tokens=40, do_sample=False, return_dict_in_generate=True,
        output_logits=True, **options,
    )  # fmt: skip


def padded(lens: list[int]) -> dict[str, Tensor]:
    """Prompts with padding on the left."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 128, (len(lens), max(lens)), generator=draw)
    mask = torch.arange(max(lens)) >= max(lens) - torch.tensor(lens)[:, None]
    return {"input_ids": torch.where(mask, ids, 0), "attention_mask": mask.long()}


@pytest.mark.parametrize("paged", [True, False], ids=["paged", "their cache"])
@pytest.mark.parametrize("lens", [[30], [50, 50], [7, 70, 33]], ids=str)
def test_generates_what_eager_attention_does(model: Any, lens: list[int], paged: bool) -> None:
    inputs = padded(lens)
    want = generated(model, "eager", inputs)
    got = generated(
        model, "specops", inputs, past_key_values=adapter.PagedCache() if paged else None
    )
    assert torch.equal(got.sequences, want.sequences)
    for ours, theirs in zip(got.logits, want.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 4}], ids=str)
def test_beams_and_drafts(model: Any, options: dict[str, int]) -> None:
    """Caches are reordered and cropped."""
    inputs = padded([40])
    inputs["input_ids"][:, 20:] = inputs["input_ids"][:, :20]
    want = generated(model, "eager", inputs, **options)
    got = generated(model, "specops", inputs, past_key_values=adapter.PagedCache(), **options)
    assert torch.equal(got.sequences, want.sequences)


def test_the_cache_is_read_where_it_lies(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def gathered(*_: Any) -> Tensor:
        raise AssertionError("copied")

    monkeypatch.setattr(adapter, "_gathered", gathered)
    generated(model, "specops", padded([30, 30]), past_key_values=adapter.PagedCache())
    with pytest.raises(AssertionError, match="copied"):
        generated(model, "specops", padded([30, 30]))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    module = torch.nn.Module()
    module.is_causal = True  # type: ignore[assignment]
    return adapter.attention(module, q, k, v, mask, **options)[0]


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_keep_their_bits(dtype: torch.dtype, window: int | None) -> None:
    """Whatever the other rows, the batch, the padding and the cache."""
    draw = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, n, 200, 64, generator=draw).to(dtype) for n in (4, 2, 2))
    whole = attend(q, k, v, sliding_window=window)
    layer, begin = adapter._PagedLayer(), 0
    for rows in (130, 1, 5, 64):
        part = slice(begin, begin + rows)
        keys, values = layer.update(k[:, :, part], v[:, :, part])
        got = attend(q[:, :, part], keys, values, sliding_window=window)
        assert torch.equal(got, whole[:, part])
        begin += rows
    mask = torch.arange(260) >= torch.tensor([60, 250])[:, None]
    k2, v2 = (torch.full((2, 2, 260, 64), torch.nan, dtype=dtype) for _ in range(2))
    q2 = torch.full((2, 4, 260, 64), torch.nan, dtype=dtype)
    for of, source in ((q2, q), (k2, k), (v2, v)):
        of[0, :, 60:], of[1, :, 250:] = source[0], source[0, :, :10]
    got = attend(q2, k2, v2, mask, sliding_window=window)
    assert torch.equal(got[0, 60:], whole[0]) and torch.equal(got[1, 250:], whole[0, :10])
    assert not got[0, :60].any() and not got[1, :250].any()


@pytest.mark.parametrize(
    "options,said",
    [
        ({"dropout": 0.1}, "has no dropout, got 0.1"),
        ({"softcap": 50.0}, "has no softcap, got 50.0"),
        ({"is_causal": False}, "has no rows that see later ones"),
    ],
)
def test_refusals(options: dict[str, Any], said: str) -> None:
    x = torch.zeros(1, 1, 4, 64)
    with pytest.raises(ValueError, match=said):
        attend(x, x, x, **options)


def test_the_example_of_the_documentation() -> None:
    text = (Path(__file__).resolve().parent.parent / "docs" / "ops.md").read_text()
    section = text.split("## In transformers")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.S)
    exec(compile(code, "docs/ops.md", "exec"), {})
