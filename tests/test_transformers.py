# SPDX-License-Identifier: Apache-2.0
"""Attention by specops in transformers: equal tokens, and rows that do not depend on others."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")

from specops.attention import PagedBatch, PagedKv  # noqa: E402
from specops.integrations import transformers as adapter  # noqa: E402
from transformers.masking_utils import (  # noqa: E402
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

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
    """Return prompts with padding on the left."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 128, (len(lens), max(lens)), generator=draw)
    mask = torch.arange(max(lens)) >= max(lens) - torch.tensor(lens)[:, None]
    return {"input_ids": torch.where(mask, ids, 0), "attention_mask": mask.long()}


@pytest.mark.parametrize("cache", ["paged", "dynamic", "static"])
@pytest.mark.parametrize("lens", [[30], [50, 50], [7, 70, 33]], ids=str)
@pytest.mark.pairwise
def test_generates_the_tokens_of_eager_attention(model: Any, lens: list[int], cache: str) -> None:
    inputs = padded(lens)
    want = generated(model, "eager", inputs)
    options: dict[str, Any] = {"cache_implementation": cache}
    if cache == "paged":
        options = {"past_key_values": adapter.PagedCache()}
    got = generated(model, "specops", inputs, **options)
    assert torch.equal(got.sequences, want.sequences)
    for ours, theirs in zip(got.logits, want.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 4}, {"assistant": True}], ids=str
)
@pytest.mark.parametrize("paged", [True, False], ids=["paged", "dynamic"])
@pytest.mark.pairwise
def test_beams_and_drafts_give_the_tokens_of_eager_attention(
    model: Any, options: dict[str, Any], paged: bool
) -> None:
    """Beams reorder caches, and drafts crop them."""
    inputs = padded([40])
    inputs["input_ids"][:, 20:] = inputs["input_ids"][:, :20]
    options = dict(options)
    if options.pop("assistant", False):
        options["assistant_model"] = transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 1}),
            attn_implementation="specops",
        ).eval()
    want = generated(model, "eager", inputs, **options)
    cache = adapter.PagedCache() if paged else None
    got = generated(model, "specops", inputs, past_key_values=cache, **options)
    assert torch.equal(got.sequences, want.sequences)


def test_cache_is_read_in_place(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op reads the memory of the cache, not a copy."""
    cache, read = adapter.PagedCache(), []

    def recorded(q: Tensor, cache: PagedKv, *args: Any, **options: Any) -> Any:
        assert cache.v is not None
        read.append((cache.k.data_ptr(), cache.v.data_ptr()))
        return append_attention(q, cache, *args, **options)

    append_attention = adapter.append_attention
    monkeypatch.setattr(adapter, "append_attention", recorded)
    generated(model, "specops", padded([30, 30]), past_key_values=cache)
    layers = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]
    assert read[-len(layers) :] == layers


class NoWaiting(TorchDispatchMode):
    """Dispatch mode that fails where the host would wait for a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        waits = name in ("nonzero", "_local_scalar_dense", "equal", "masked_select", "item")
        if name.startswith("index") and len(args) > 1 and isinstance(args[1], (list, tuple)):
            waits |= any(x is not None and x.dtype == torch.bool for x in args[1])
        assert not waits, name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("lens", [[30, 30], [7, 30]], ids=["whole", "padded"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.pairwise
def test_layers_share_indices_without_synchronization(
    model: Any, monkeypatch: pytest.MonkeyPatch, lens: list[int], cache: str
) -> None:
    indices: list[tuple[Tensor, ...]] = []

    def recorded(q: Tensor, cache: PagedKv, batch: PagedBatch, **options: Any) -> Any:
        indices.append((*batch, options["sliding_window"]))
        return append_attention(q, cache, batch, **options)

    def watched(*args: Any, **options: Any) -> Any:
        with NoWaiting():
            return attend(*args, **options)

    append_attention, attend = adapter.append_attention, adapter.attention
    monkeypatch.setattr(adapter, "append_attention", recorded)
    model.set_attn_implementation("specops")
    transformers.AttentionInterface.register("specops", watched)
    try:
        generated(model, "specops", padded(lens), cache_implementation=cache)
    finally:
        adapter.register()
    layers = SIZES["num_hidden_layers"]
    assert len(indices) == 40 * layers
    for step in range(0, len(indices), layers):
        for window in (None, 24):
            of_kind = [args for *args, of in indices[step : step + layers] if of == window]
            assert len({tuple(map(id, args)) for args in of_kind}) <= 1


def test_static_cache_is_read_up_to_its_length(model: Any) -> None:
    ids = padded([10])["input_ids"]
    logits = {}
    for attention in ("eager", "specops"):
        model.set_attn_implementation(attention)
        cache = transformers.StaticCache(config=model.config, max_cache_len=40)
        parts = [model(part, past_key_values=cache).logits for part in ids.split([6, 1, 3], 1)]
        logits[attention] = torch.cat(parts, 1)
    torch.testing.assert_close(logits["specops"], logits["eager"], atol=1e-4, rtol=1e-4)


@pytest.mark.ci
def test_compiled_model_may_use_a_static_cache() -> None:
    """On a GPU, `generate` compiles the model by itself."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 2})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    compiled = transformers.generation.CompileConfig(backend="eager", mode=None)
    compiled._compile_all_devices = True
    want = generated(model, "eager", padded([20]))
    got = generated(
        model, "specops", padded([20]), cache_implementation="static", compile_config=compiled
    )
    assert torch.equal(got.sequences, want.sequences)


@pytest.mark.parametrize("batch", [1, 2])
def test_packed_sequences_do_not_see_each_other(model: Any, batch: int) -> None:
    """Sequences may be packed only without a cache and without a mask."""
    lens = [[40, 3, 30], [1, 70, 2]][:batch]
    ids = torch.randint(1, 128, (batch, 73), generator=torch.Generator().manual_seed(3))
    position_ids = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lens])
    logits = {}
    for attention in ("eager", "specops"):
        model.set_attn_implementation(attention)
        logits[attention] = model(ids, position_ids=position_ids, use_cache=False).logits
    torch.testing.assert_close(logits["specops"], logits["eager"], atol=1e-4, rtol=1e-4)
    if model.config.model_type == "gpt_oss":
        return  # transformers makes no packed mask for it
    alone = [
        torch.cat([model(part[None], use_cache=False).logits[0] for part in row.split(parts)])
        for row, parts in zip(ids, lens, strict=True)
    ]
    torch.testing.assert_close(logits["specops"], torch.stack(alone), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("cached", [False, True])
def test_padding_is_ignored_anywhere(model: Any, cached: bool) -> None:
    """Padding is on the right and between two turns. Only rows of text are compared."""
    if model.config.model_type in ("mistral", "gpt_oss"):
        pytest.skip("a window counts the padding between turns, which is refused")
    mask = torch.ones(3, 30, dtype=torch.long)
    mask[0, 20:], mask[1, 5:9], mask[2, :4], mask[2, 28:] = 0, 0, 0, 0
    ids = torch.randint(1, 128, (3, 30), generator=torch.Generator().manual_seed(4))
    logits = {}
    for attention in ("eager", "specops"):
        model.set_attn_implementation(attention)
        cache, parts = transformers.DynamicCache(config=model.config), []
        for begin, end in [(0, 12), (12, 30)] if cached else [(0, 30)]:
            part = {"input_ids": ids[:, begin:end], "attention_mask": mask[:, :end]}
            parts.append(model(**part, past_key_values=cache).logits)
        logits[attention] = torch.cat(parts, 1)[mask.bool()]
    torch.testing.assert_close(logits["specops"], logits["eager"], atol=1e-4, rtol=1e-4)


def test_sequence_of_padding_alone_affects_no_other(model: Any) -> None:
    inputs = padded([10, 10])
    inputs["attention_mask"][1] = 0
    model.set_attn_implementation("specops")
    got = model(**inputs).logits
    torch.testing.assert_close(got[0], model(inputs["input_ids"][:1]).logits[0])
    inputs["attention_mask"][0] = 0
    assert model(**inputs).logits.isfinite().all()


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    batch, _, rows, _ = q.shape
    window = options.get("sliding_window")
    sees = sliding_window_causal_mask_function(window) if window else causal_mask_function
    step = adapter.make_mask(
        batch,
        rows,
        k.shape[2],
        q_offset=k.shape[2] - rows,
        mask_function=sees,
        attention_mask=mask,
    )
    return adapter.attention(causal(), q, k, v, step, **options)[0]


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_keep_their_bits(dtype: torch.dtype, window: int | None) -> None:
    """Vary the other rows, the batch, the padding and the cache."""
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


def test_chunks_are_packed_sequences_until_one_is_continued() -> None:
    """Layers do not know the chunk size and see chunks in the mask only."""
    chunked = chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64))
    mask = adapter.make_mask(1, 10, 10, mask_function=chunked)
    assert mask.qo_indptr.tolist() == [0, 4, 8, 10] and mask.kv_lens.tolist() == [4, 4, 2]
    assert adapter.make_mask(1, 1, 4, q_offset=3, mask_function=chunked).window is None
    later = adapter.make_mask(1, 1, 11, q_offset=10, mask_function=chunked)
    x = torch.zeros(1, 1, 11, 64)
    with pytest.raises(ValueError, match="sliding_window of None, got one of 3 tokens"):
        adapter.attention(causal(), x[:, :, :1], x, x, later)


UNSUPPORTED = {
    "later rows": or_masks(causal_mask_function, lambda b, h, q, kv: kv < 12),
    "all rows": bidirectional_mask_function,
    "every second": and_masks(causal_mask_function, lambda b, h, q, kv: (q - kv) % 2 == 0),
    "two windows": and_masks(causal_mask_function, lambda b, h, q, kv: q - kv < 2 + q % 2),
    "none": and_masks(causal_mask_function, lambda b, h, q, kv: q != kv),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
@pytest.mark.parametrize("offset", [0, 7])
def test_unsupported_masks_are_refused(name: str, offset: int) -> None:
    with pytest.raises(ValueError, match="packed sequences, got a mask of another kind"):
        adapter.make_mask(1, 9, 9 + offset, q_offset=offset, mask_function=UNSUPPORTED[name])


def test_window_over_padding_between_turns_is_refused() -> None:
    """The window counts the padding, but `append_attention` has none to count."""
    mask = torch.ones(1, 30, dtype=torch.bool)
    mask[0, 12:15] = False
    window = sliding_window_causal_mask_function(8)
    with pytest.raises(ValueError, match="got a mask of another kind"):
        adapter.make_mask(1, 30, 30, mask_function=window, attention_mask=mask)


def causal() -> torch.nn.Module:
    module = torch.nn.Module()
    module.is_causal = True  # type: ignore[assignment]
    return module


@pytest.mark.parametrize(
    "options,message",
    [
        ({"dropout": 0.1}, "does not support dropout, got 0.1"),
        ({"softcap": 50.0}, "does not support softcap, got 50.0"),
        (
            {"position_bias": torch.zeros(1, 4, 4)},
            r"does not support position_bias, got a tensor \[1, 4, 4\]",
        ),
        ({"cache": object()}, "does not support cache, got"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 4])},
            r"does not support cu_seq_lens_q, got a tensor \[2\]",
        ),
        ({"output_attentions": True}, "does not support output_attentions, got True"),
        ({"is_causal": False}, "supports only causal attention"),
    ],
)
def test_unsupported_options_are_refused(options: dict[str, Any], message: str) -> None:
    x = torch.zeros(1, 1, 4, 64)
    with pytest.raises(ValueError, match="^attn_implementation 'specops' " + message):
        attend(x, x, x, **options)
    nothing = dict.fromkeys(options, None) | {"dropout": 0.0}
    assert attend(x, x, x, **nothing).shape == (1, 4, 1, 64)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_of_four_dimensions_are_refused(model: Any, dtype: torch.dtype) -> None:
    model.set_attn_implementation("specops")
    mask = torch.ones(1, 1, 5, 5).tril().to(dtype)
    with pytest.raises(
        ValueError, match=r"attention_mask to have shape \[batch, tokens\].*\[1, 1, 5, 5\]"
    ):
        model(torch.ones(1, 5, dtype=torch.int64), attention_mask=mask)


def test_gradients_are_refused(model: Any) -> None:
    """Otherwise, all layers before attention would silently get no gradient."""
    model.set_attn_implementation("specops")
    ids = torch.ones(1, 5, dtype=torch.int64)
    with torch.enable_grad():
        with pytest.raises(ValueError, match=r"computes no gradients, .*torch\.no_grad"):
            model(ids, labels=ids)
        with torch.inference_mode():
            model(ids)
        model.requires_grad_(False)
        assert model(ids, labels=ids).loss > 0  # nothing needs gradients


@pytest.mark.parametrize(
    "name,more,message",
    [
        ("Gemma2Config", {}, "does not support softcap, got 50.0"),
        ("LlamaConfig", {"head_dim": 80}, "head_dim must be 64, 96, 128, 256 or 512, got 80"),
    ],
)
def test_models_with_unsupported_attention_are_refused(
    name: str, more: dict[str, int], message: str
) -> None:
    config = getattr(transformers, name)(**{**SIZES, **more})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="specops")
    with pytest.raises(ValueError, match=message):
        model.eval()(torch.ones(1, 5, dtype=torch.int64))


def test_documented_examples_run() -> None:
    text = (Path(__file__).resolve().parent.parent / "docs" / "ops.md").read_text()
    section = text.split("## In transformers")[1].split("\n## ")[0]
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", section, re.S):
        exec(compile(code, "docs/ops.md", "exec"), names)
    assert names["tokens"].shape == (1, 13)
