# SPDX-License-Identifier: Apache-2.0
"""vLLM's sampling parameters as arrays and tables for specops' sampling ops."""

import functools
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specops.integrations.vllm.step_requests import Row
from specops.sampling import LogitsProcessors, SamplingTensors, count_tokens

# vLLM decodes greedily below this temperature.
_GREEDY_BELOW = 1e-5
# Penalty -> value that disables it.
_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_WORD_BITS = 32
# vLLM appends a hyphen and eight random characters to the id of a request, unless this is set.
_NOT_RANDOM = "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"
_NUM_RANDOM = 9
# Parameters that the ops, or vLLM's processor, scheduler and frontend apply. Any other parameter
# must have its default, since nothing would apply it.
_OF_THE_OPS = (
    "temperature top_k top_p min_p seed repetition_penalty presence_penalty frequency_penalty "
    "logit_bias bad_words _bad_words_token_ids allowed_token_ids min_tokens stop_token_ids "
    "_all_stop_token_ids logprobs"
)
_OF_VLLM = (
    "n stop ignore_eos _eos_token_id max_tokens repetition_detection structured_outputs "
    "prompt_logprobs flat_logprobs detokenize skip_special_tokens spaces_between_special_tokens "
    "include_stop_str_in_output output_kind stream_interval output_text_buffer_length skip_clone "
    "extra_args skip_reading_prefix_cache watermarking _watermarking_skipped "
    "routed_experts_prompt_start"
)
_KNOWN = frozenset(f"{_OF_THE_OPS} {_OF_VLLM}".split())
_MAX_TEXT_LEN = 2**31 - 1
# Key in `extra_args` of a request's predicted output.
PREDICTION = "prediction_token_ids"


def seed_of(request_id: str, params: Any, engine_seed: int) -> int:
    """Return the seed of a request: its own, or one derived from its id and the engine's seed.

    The random characters that vLLM appends to the id are ignored. The seed is the same on every
    rank of a distributed engine, and differs between requests.
    """
    if params.seed is not None:
        return int(params.seed)
    if not int(os.environ.get(_NOT_RANDOM, "0")):
        request_id = request_id[:-_NUM_RANDOM]
    text = f"{engine_seed}/{request_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def check(params: Any) -> None:
    """Refuse parameters that vLLM accepts and specops cannot apply.

    Args:
        params: vLLM's SamplingParams.

    Raises:
        ValueError: an unknown parameter is not at its default, or a value is not supported.
    """
    _check_names(params)
    penalty = float(torch.tensor(params.repetition_penalty, dtype=torch.float32))
    if not 0 < penalty < float("inf"):
        raise ValueError(
            "specops: repetition_penalty must be finite and above 0 in float32, got "
            f"{params.repetition_penalty}"
        )
    prediction_of(params)


def _check_names(params: Any) -> None:
    kind: Any = type(params)
    defaults = _unknown_of(kind)
    unsupported = [
        name for name, off in defaults.items() if not _is_same(getattr(params, name), off)
    ]
    if unsupported:
        raise ValueError(f"specops: sampling does not support {', '.join(unsupported)}")


def prediction_of(params: Any) -> list[int]:
    """Return the predicted output in the `extra_args` of a request; empty if it has none.

    Raises:
        ValueError: it is not a list of token ids.
    """
    prediction = (params.extra_args or {}).get(PREDICTION, [])
    if not isinstance(prediction, list) or not all(
        isinstance(token, int) and token >= 0 for token in prediction
    ):
        raise ValueError(f"specops: {PREDICTION} must be a list of token ids, got {prediction!r}")
    return prediction


@functools.cache
def _unknown_of(kind: type) -> dict[str, Any]:
    """Return the parameters that neither the ops nor vLLM apply, with their defaults."""
    defaults: Any = kind()
    unknown = [name for name in defaults.__struct_fields__ if name not in _KNOWN]
    return {name: getattr(defaults, name) for name in unknown}


def _is_same(value: Any, off: Any) -> bool:
    return value is off or (type(value) is type(off) and bool(value == off))


@dataclass
class BatchParameters:
    """The sampling parameters of a batch, one row per request.

    Attributes:
        is_greedy: whether every row is greedy; the next five fields are then ignored.
        temperature: [batch], float32.
        top_k: [batch], int32; None if no row sets it, like top_p and min_p.
        top_p: [batch], float32.
        min_p: [batch], float32.
        seeds: [batch], int64.
        processors: logits processors; None if there are none. Texts, token counts and mask rows
            change with each step, so `processors_of` adds them.
        penalized: indices of the rows with a penalty.
    """

    is_greedy: bool
    temperature: Tensor
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    seeds: Tensor
    processors: LogitsProcessors | None
    penalized: list[int]

    @classmethod
    def of(cls, rows: Sequence[Row], engine_seed: int, vocab_size: int) -> "BatchParameters":
        """Read the parameters of every row, whose values `check` has accepted.

        Args:
            rows: the requests.
            engine_seed: source of seeds for requests without one.
            vocab_size: columns of the logits.

        Raises:
            ValueError: an unknown parameter is not at its default.
        """
        every = [row.sampling_params for row in rows]
        for params in every:
            _check_names(params)
        temperature = [
            0.0 if params.temperature < _GREEDY_BELOW else params.temperature for params in every
        ]
        top_k = [0 if params.top_k < 1 else min(params.top_k, vocab_size) for params in every]
        seeds = [seed_of(row.request_id, row.sampling_params, engine_seed) for row in rows]
        return cls(
            not any(temperature),
            torch.tensor(temperature, dtype=torch.float32),
            torch.tensor(top_k, dtype=torch.int32) if any(top_k) else None,
            _filter([params.top_p for params in every], 1.0),
            _filter([params.min_p for params in every], 0.0),
            torch.tensor([_signed(seed) for seed in seeds], dtype=torch.int64),
            _processors(rows, vocab_size),
            [index for index, params in enumerate(every) if _is_penalized(params)],
        )

    def sampling(self) -> SamplingTensors | None:
        """Return the sampling parameters as the ops take them; None if all rows are greedy."""
        if self.is_greedy:
            return None
        return SamplingTensors(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seeds=self.seeds,
        )

    def processors_of(
        self,
        rows: Sequence[Row],
        positions: Tensor,
        num_logits: Sequence[int],
        token_ids: Tensor,
    ) -> LogitsProcessors | None:
        """Return the logits processors for one step; None if there are none.

        Args:
            rows: the requests.
            positions: [batch], int32. Number of tokens of each request.
            num_logits: number of logits rows of each request.
            token_ids: [at least batch, max_len], int32. Text of each request.
        """
        processors = self.processors
        if processors is None:
            return None
        processors = processors._replace(token_ids=token_ids[: len(rows)])
        if self.penalized:
            processors = _with_counts(processors, rows, positions, self.penalized)
        if processors.allowed_token_mask is not None:
            assert processors.slots is not None
            masked = torch.tensor(
                [
                    row if params.sampling_params.allowed_token_ids else -1
                    for row, params in enumerate(rows)
                ],
                dtype=torch.int32,
            )
            indices = masked.repeat_interleave(torch.tensor(num_logits))
            processors = processors._replace(mask_indices=indices)
        return processors


def _filter(values: Sequence[float], off: float) -> Tensor | None:
    if all(value == off for value in values):
        return None
    return torch.tensor(values, dtype=torch.float32)


def _signed(seed: int) -> int:
    """Reinterpret an unsigned 64-bit seed as int64."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def _is_penalized(params: Any) -> bool:
    return any(getattr(params, name) != off for name, off in _PENALTIES.items())


def _processors(rows: Sequence[Row], vocab_size: int) -> LogitsProcessors | None:
    """Return logits processors, without parts that change every step; None if not needed."""
    every = [row.sampling_params for row in rows]
    tensors: dict[str, Tensor] = {}
    for name, off in _PENALTIES.items():
        values = _filter([getattr(params, name) for params in every], off)
        if values is not None:
            tensors[name] = values
    if any(params.logit_bias for params in every):
        biases = [sorted((params.logit_bias or {}).items()) for params in every]
        tensors["logit_bias_token_ids"] = _table([[token for token, _ in one] for one in biases])
        tensors["logit_bias"] = _table([[bias for _, bias in one] for one in biases], 0.0)
    if any(params.bad_words_token_ids for params in every):
        tensors["bad_words"] = _table_of_lists(
            [params.bad_words_token_ids or [] for params in every]
        )
    if any(params.min_tokens for params in every):
        least = [min(one.min_tokens, _MAX_TEXT_LEN) for one in every]
        tensors["min_tokens"] = torch.tensor(least, dtype=torch.int32)
        tensors["stop_token_ids"] = _table([sorted(one.all_stop_token_ids) for one in every])
        tensors["prompt_lens"] = torch.tensor(
            [row.num_prompt_tokens for row in rows], dtype=torch.int32
        )
    if any(params.allowed_token_ids for params in every):
        tensors["allowed_token_mask"] = _masks([one.allowed_token_ids for one in every], vocab_size)
    if not tensors:
        return None
    slots = torch.arange(len(rows), dtype=torch.int32)
    return LogitsProcessors(slots=slots, **tensors)


def _with_counts(
    processors: LogitsProcessors, rows: Sequence[Row], positions: Tensor, penalized: Sequence[int]
) -> LogitsProcessors:
    """Add token counts of the rows with a penalty to the logits processors."""
    assert processors.token_ids is not None
    lens = positions.tolist()
    shape = (len(rows), max(lens))
    counted = torch.full(shape, -1, dtype=torch.int32)
    counts = torch.zeros(shape, dtype=torch.int32)
    for row in penalized:
        count_tokens(
            processors.token_ids[row, : lens[row]],
            min(rows[row].num_prompt_tokens, lens[row]),
            counted_token_ids=counted[row],
            token_counts=counts[row],
        )
    return processors._replace(counted_token_ids=counted, token_counts=counts)


def _table(rows: Sequence[Sequence[float]], off: float = -1) -> Tensor:
    """Return rows as a tensor, padded with `off`; int32 unless `off` is a float."""
    width = max(1, *(len(row) for row in rows))
    dtype = torch.float32 if isinstance(off, float) else torch.int32
    return torch.tensor([[*row, *[off] * (width - len(row))] for row in rows], dtype=dtype)


def _table_of_lists(rows: Sequence[Sequence[Sequence[int]]]) -> Tensor:
    """Return lists of lists as an int32 tensor, padded with -1."""
    count = max(1, *(len(row) for row in rows))
    width = max(1, *(len(values) for row in rows for values in row))
    return torch.tensor(
        [
            [
                [*values, *[-1] * (width - len(values))]
                for values in [*row, *[[] for _ in range(count - len(row))]]
            ]
            for row in rows
        ],
        dtype=torch.int32,
    )


def _masks(allowed: Sequence[Sequence[int] | None], vocab_size: int) -> Tensor:
    """Return bit masks, one row per list: the bits of allowed tokens; no bits set for None."""
    bits = torch.zeros((len(allowed), -(-vocab_size // _WORD_BITS) * _WORD_BITS), dtype=torch.int64)
    for row, token_ids in enumerate(allowed):
        if token_ids:
            bits[row, torch.tensor(token_ids)] = 1
    words = bits.view(len(allowed), -1, _WORD_BITS) << torch.arange(_WORD_BITS)
    total = words.sum(dim=2)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)
