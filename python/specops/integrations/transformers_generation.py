# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding in Hugging Face transformers that changes no bit of the logits.

    from specops.integrations import transformers_generation

    transformers_generation.make_exact(model)
    model.generate(**inputs, custom_generate=transformers_generation.generate, num_drafts=4)

`generate` verifies drafts of the n-gram drafter for whole batches of padded prompts. In an ordinary
model, the logits of a row depend on how many rows a call has, so drafts may change tokens.
`make_exact` replaces the layers for which that is so: attention, products with weights and
activations.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.activations import ACT2FN

from specops import dense
from specops.integrations import transformers as adapter
from specops.ngram import ngram_propose
from specops.sampling import SamplingTensors, sample

_PROBE_TOKENS = 9
# torch computes fewer elements than this in one thread, and whole vectors of them alike.
_SERIAL_ELEMENTS = 32768
_VECTOR = 64


def make_exact(model: Any) -> None:
    """Replace layers of a model, so that its logits do not depend on the other rows of a call.

    Args:
        model: decoder-only model of transformers, on the CPU, for inference; changed IN PLACE.

    Raises:
        ValueError: some other layer still depends on other rows; the model is changed nevertheless.
    """
    adapter.register()
    model.set_attn_implementation("specops")
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                setattr(parent, name, _RowLinear(child))
            elif isinstance(child, _ACTIVATIONS):
                setattr(parent, name, _RowActivation(child))
    _check_rows(model)


# Classes of the activations that dense models use.
_ACTIVATIONS = tuple({type(ACT2FN[name]) for name in ("silu", "gelu", "gelu_pytorch_tanh", "relu")})


class _RowLinear(nn.Module):
    """A linear layer computed by `dense.linear`."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias  # models read dtypes and devices of both
        self._packed = dense.pack_weight(layer.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        """Multiply each row with the weight."""
        rows = x.reshape(-1, self.in_features)
        bias = None if self.bias is None else self.bias.detach()
        return dense.linear(rows, self._packed, bias).view(*x.shape[:-1], self.out_features)


class _RowActivation(nn.Module):
    """An activation computed for few rows at a time, so that all elements take torch's vector path.

    A thread of torch computes the last elements of its part one by one, and may round them in
    another way. Where parts end depends on the number of rows.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations."""
        rows = x.reshape(-1, x.shape[-1])
        width = -(-rows.shape[1] // _VECTOR) * _VECTOR
        whole = nn.functional.pad(rows, (0, width - rows.shape[1]))
        parts = torch.split(whole, max(1, (_SERIAL_ELEMENTS - 1) // width))
        out: Tensor = torch.cat([self._layer(part) for part in parts])
        return out[:, : rows.shape[1]].reshape(x.shape)


def _check_rows(model: Any) -> None:
    """Raise ValueError if the logits of a prompt differ from those of its tokens one by one."""
    ids = torch.randint(
        model.config.get_text_config().vocab_size,
        (1, _PROBE_TOKENS),
        generator=torch.Generator().manual_seed(0),
    )
    with torch.no_grad():
        whole = model(ids).logits[0]
        cache = adapter.PagedCache()
        alone = [model(ids[:, i : i + 1], past_key_values=cache) for i in range(_PROBE_TOKENS)]
    if not torch.equal(whole, torch.cat([one.logits[0] for one in alone])):
        raise ValueError(
            f"make_exact: the logits of {type(model).__name__} still depend on the number of rows "
            "per call; dense models of nn.Linear layers are supported"
        )


@dataclass
class _Row:
    """A sequence of the batch.

    Attributes:
        number: its number in the batch.
        batch: number of sequences in the batch.
        begin: number of padding tokens before the prompt.
        ids: padding, prompt and output.
        seed: seed of its sampled tokens; None: greedy.
        drafts: drafts of the current step.
        is_done: whether the sequence has ended.
    """

    number: int
    batch: int
    begin: int
    ids: list[int]
    seed: int | None
    drafts: list[int] = field(default_factory=list)
    is_done: bool = False

    def verify(
        self, logits: Tensor, processors: LogitsProcessorList, is_end: StoppingCriteriaList
    ) -> int:
        """Append tokens up to the first that differs from its draft.

        Args:
            logits: [rows, vocab_size], after the last token and after each draft.
            processors: processors of logits.
            is_end: criteria that end the sequence.

        Returns:
            The number of accepted drafts.
        """
        for place, draft in enumerate([*self.drafts, None]):
            token = self._choose(logits[place : place + 1].float(), processors)
            self.ids.append(token)
            self.is_done = bool(is_end(self._batch_of_ids(), logits)[self.number])
            if self.is_done or token != draft:
                return place
        return len(self.drafts)

    def _choose(self, logits: Tensor, processors: LogitsProcessorList) -> int:
        if processors:
            whole = processors(self._batch_of_ids(), logits.repeat(self.batch, 1))
            logits = whole[self.number : self.number + 1]
        sampling = None
        if self.seed is not None:
            sampling = SamplingTensors(1.0, seeds=torch.tensor([self.seed]))
        position = torch.tensor([len(self.ids) - self.begin], dtype=torch.int32)
        return int(sample(logits.contiguous(), position, sampling=sampling))

    def _batch_of_ids(self) -> Tensor:
        """Return the sequence once per sequence of the batch.

        Some processors of transformers know the size of the batch; the lengths of its sequences
        differ.
        """
        return torch.tensor(self.ids).expand(self.batch, -1)


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    num_drafts: int = 4,
    seed: int = 0,
    **model_kwargs: Any,
) -> Tensor:
    """Generate tokens with drafts of the n-gram drafter; `custom_generate` of transformers.

    The tokens are those of `num_drafts=0`, which is plain decoding, and those of each sequence
    alone. A sampled token is drawn by `sampling.sample` at its position. transformers passes no
    streamer to such functions.

    Args:
        model: model that `make_exact` changed.
        input_ids: [batch, tokens], int64, padded on the left.
        logits_processor: called for one sequence at a time, with its padding, as if the batch
            consisted of copies of it.
        stopping_criteria: called like `logits_processor`, after each token.
        generation_config: do_sample and pad_token_id are read; transformers makes
            `logits_processor` and `stopping_criteria` from the other fields.
        num_drafts: maximum number of drafts per step.
        seed: seed of sampled tokens; sequence i of the batch uses seed + i.
        model_kwargs: attention_mask [batch, tokens], 0 for padding, is read; transformers prepares
            the others for its own loops.

    Returns:
        [batch, tokens], int64: prompts and outputs, padded on the right.

    Raises:
        ValueError: an option or the model's sliding window is not supported.
    """
    _check_options(model, generation_config)
    mask = model_kwargs.get("attention_mask")
    if mask is None:
        mask = torch.ones_like(input_ids)
    rows = [
        _Row(
            number,
            len(input_ids),
            len(ids) - num_tokens,
            ids,
            seed + number if generation_config.do_sample else None,
        )
        for number, (ids, num_tokens) in enumerate(
            zip(input_ids.tolist(), mask.sum(1).tolist(), strict=True)
        )
    ]
    cache = adapter.PagedCache()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    while True:
        is_prompt = input_ids.shape[1] == mask.shape[1]
        logits = model(
            input_ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1 if is_prompt else 0,
        ).logits
        begin = mask.shape[1] - input_ids.shape[1] + 1  # column of the first draft
        for number, row in enumerate(rows):
            if not row.is_done:
                num_accepted = row.verify(logits[number], logits_processor, stopping_criteria)
                mask[number, begin + num_accepted : begin + len(row.drafts)] = 0
        running = [row for row in rows if not row.is_done]
        if not running:
            break
        _draft(running, num_drafts)
        input_ids, positions, new = _next_columns(rows)
        mask = torch.cat([mask, new], 1)
    longest = max(len(row.ids) for row in rows)
    pad = generation_config.pad_token_id or 0
    return torch.tensor([row.ids + [pad] * (longest - len(row.ids)) for row in rows])


def _check_options(model: Any, config: GenerationConfig) -> None:
    """Raise ValueError for options that `generate` does not support."""
    refused = {"num_beams": 1, "return_dict_in_generate": False}
    for name, only in refused.items():
        value = getattr(config, name)
        if value not in (None, only):
            raise ValueError(f"generate supports only {name}={only}, got {value}")
    text = model.config.get_text_config()
    window = getattr(text, "sliding_window", None)
    if window is not None and getattr(text, "use_sliding_window", True):
        # transformers counts rejected drafts as tokens of a window.
        raise ValueError(f"generate supports no sliding window, got a model with one of {window}")


def _draft(rows: list[_Row], num_drafts: int) -> None:
    """Write the drafts of each row's next step."""
    texts = [row.ids[row.begin :] for row in rows]
    lens = torch.tensor([len(text) for text in texts], dtype=torch.int32)
    ids = torch.zeros(len(rows), int(lens.max()), dtype=torch.int32)
    for own, text in zip(ids, texts, strict=True):
        own[: len(text)] = torch.tensor(text)
    drafts, counts = ngram_propose(
        ids,
        lens,
        torch.full_like(lens, num_drafts),
        draft_token_ids=torch.empty(len(rows), max(num_drafts, 1), dtype=torch.int32),
    )
    for row, own, count in zip(rows, drafts.tolist(), counts.tolist(), strict=True):
        row.drafts = own[:count]


def _next_columns(rows: list[_Row]) -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids, positions and mask [batch, columns]: each last token and its drafts."""
    running = [row for row in rows if not row.is_done]
    width = 1 + max(len(row.drafts) for row in running)
    ids, positions, mask = torch.zeros(3, len(rows), width, dtype=torch.int64)
    for number, row in enumerate(rows):
        if not row.is_done:
            tokens = [row.ids[-1], *row.drafts]
            position = len(row.ids) - 1 - row.begin
            ids[number, : len(tokens)] = torch.tensor(tokens)
            positions[number, : len(tokens)] = position + torch.arange(len(tokens))
            mask[number, : len(tokens)] = 1
    return ids, positions, mask
