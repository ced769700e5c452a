# SPDX-License-Identifier: Apache-2.0
"""Settings that the plug-in for vLLM reads from the environment and from sampling parameters.

vLLM is not needed: `Params` has the fields and defaults of its SamplingParams. Results of the ops
are compared with plain torch edits of the logits in vLLM's order.
"""

import copy
from typing import Any

import pytest
import torch
from specops import sampling
from specops.integrations.vllm.request_parameters import (
    PREDICTION,
    BatchParameters,
    check,
    seed_of,
)
from specops.integrations.vllm.settings import PARTS, parts_of, strategy_of
from specops.integrations.vllm.step_requests import Row

msgspec = pytest.importorskip("msgspec")

VOCAB = 50


class Params(msgspec.Struct):
    """Stand-in for vLLM's SamplingParams, with the fields that sampling reads and others."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    _bad_words_token_ids: list[list[int]] | None = None
    allowed_token_ids: list[int] | None = None
    min_tokens: int = 0
    _all_stop_token_ids: set[int] = msgspec.field(default_factory=set)
    extra_args: dict[str, Any] | None = None
    max_tokens: int | None = 16
    logprob_token_ids: list[int] | None = None
    new_in_vllm: float = 1.5

    @property
    def bad_words_token_ids(self) -> list[list[int]] | None:
        """Value under the name that vLLM's class has."""
        return self._bad_words_token_ids

    @property
    def all_stop_token_ids(self) -> set[int]:
        """Value under the name that vLLM's class has."""
        return self._all_stop_token_ids


TEXTS = torch.tensor([[3, 4, 5, 5, 6, 0], [9, 8, 7, 7, 7, 1], [1, 2, 0, 0, 0, 0]]).int()
POSITIONS = torch.tensor([5, 6, 2], dtype=torch.int32)


def of(*every: Params) -> BatchParameters:
    return BatchParameters.of(rows_of(*every), 0, VOCAB)


def rows_of(*every: Params) -> list[Row]:
    return [Row(f"r{index}", 2, params) for index, params in enumerate(every)]


@pytest.mark.parametrize(
    "text, parts",
    [
        (None, set()),
        ("", set()),
        (" , ", set()),
        ("exact", set(PARTS)),
        ("attention", {"attention"}),
        ("attention, linear", {"attention", "linear"}),
        ("exact,linear", set(PARTS)),
    ],
)
def test_parts_are_read_from_the_environment(text: str | None, parts: set[str]) -> None:
    assert parts_of({} if text is None else {"SPECOPS_VLLM": text}) == parts


@pytest.mark.parametrize("text", ["1", "Exact", "attention;linear", "attention,norms"])
def test_unknown_parts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="SPECOPS_VLLM must be exact or a list of norm, "):
        parts_of({"SPECOPS_VLLM": text})


@pytest.mark.parametrize("text", [None, "", "target_match", "rejection", " block "])
def test_strategy_is_read_from_the_environment(text: str | None) -> None:
    environment = {"SPECOPS_VLLM": "exact"} | (
        {} if text is None else {"SPECOPS_VLLM_VERIFY": text}
    )
    assert strategy_of(environment) == ((text or "").strip() or "target_match")


@pytest.mark.parametrize(
    "environment, sentence",
    [
        (
            {"SPECOPS_VLLM": "exact", "SPECOPS_VLLM_VERIFY": "standard"},
            "SPECOPS_VLLM_VERIFY must be one of target_match, rejection, block, got 'standard'",
        ),
        (
            {"SPECOPS_VLLM": "linear,norm", "SPECOPS_VLLM_VERIFY": "block"},
            "SPECOPS_VLLM_VERIFY=block requires the part sampling in SPECOPS_VLLM, got linear,norm",
        ),
    ],
)
def test_unsupported_strategies_are_refused(environment: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        strategy_of(environment)


def test_seed_is_that_of_the_request_or_derived_from_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert seed_of("a-01234567", Params(seed=5), 0) == 5
    made = {seed_of(f"{name}-01234567", Params(), engine) for name in "abc" for engine in (0, 1)}
    assert len(made) == 6
    seed = seed_of("a-01234567", Params(), 0)
    assert seed == seed_of("a-89abcdef", Params(temperature=0.0), 0)
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    assert seed == seed_of("a", Params(), 0)
    assert all(-(1 << 63) <= seed < 1 << 63 for seed in made)
    assert of(Params(seed=(1 << 64) - 1)).seeds.tolist() == [-1]


def test_unused_filters_are_left_out() -> None:
    assert of(Params(temperature=0.0), Params(temperature=1e-6)).sampling() is None
    one = of(Params(), Params(top_k=-1))
    assert one.top_k is None and one.top_p is None and one.min_p is None
    mixed = of(Params(top_k=100), Params(top_p=0.5), Params(temperature=0.0, min_p=0.25))
    given = mixed.sampling()
    assert given is not None and given.typical_p is None and given.choice_index is None
    assert all(getattr(given, name) is getattr(mixed, name) for name in ("top_k", "seeds"))
    assert mixed.temperature.tolist() == [1.0, 1.0, 0.0]
    assert mixed.top_k is not None and mixed.top_k.tolist() == [VOCAB, 0, 0]
    assert mixed.top_p is not None and mixed.top_p.tolist() == [1.0, 0.5, 1.0]
    assert mixed.min_p is not None and mixed.min_p.tolist() == [0.0, 0.0, 0.25]
    assert mixed.processors is None


@pytest.mark.parametrize(
    "params, names",
    [
        (Params(max_tokens=3, temperature=0.5, extra_args={"a": 1}, _all_stop_token_ids={1}), None),
        (Params(logprob_token_ids=[5]), "logprob_token_ids"),
        (Params(new_in_vllm=1.5), None),
        (Params(new_in_vllm=2), "new_in_vllm"),
        (Params(logprob_token_ids=[], new_in_vllm=0.0), "logprob_token_ids, new_in_vllm"),
    ],
)
def test_unknown_parameters_are_refused_unless_they_have_defaults(
    params: Params, names: str | None
) -> None:
    if names is None:
        check(params)
        of(params)
        return
    for refuse in (check, of):
        with pytest.raises(ValueError, match=f"sampling does not support {names}"):
            refuse(params)


@pytest.mark.parametrize(
    "params, sentence",
    [
        (Params(repetition_penalty=1e39), "repetition_penalty must be .* in float32, got 1e\\+39"),
        (Params(repetition_penalty=1e-46), "repetition_penalty must be .* in float32, got 1e-46"),
        (Params(extra_args={PREDICTION: "text"}), "must be a list of token ids, got 'text'"),
        (Params(extra_args={PREDICTION: [1, -1]}), "must be a list of token ids, got \\[1, -1\\]"),
    ],
)
def test_values_that_the_ops_do_not_support_are_refused(params: Params, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check(params)


def test_minimum_lengths_fit_the_ops() -> None:
    processors = of(Params(min_tokens=1 << 40)).processors
    assert processors is not None and processors.min_tokens is not None
    assert processors.min_tokens.tolist() == [(1 << 31) - 1]


def edited(logits: torch.Tensor, row: int, params: Params) -> torch.Tensor:
    """Return one row of logits as vLLM edits it: mask, bad words, minimum, bias, then penalties."""
    text = TEXTS[row, : int(POSITIONS[row])].tolist()
    x = logits.clone()
    if params.allowed_token_ids:
        keep = torch.zeros(VOCAB, dtype=torch.bool)
        keep[params.allowed_token_ids] = True
        x[~keep] = -torch.inf
    for word in params.bad_words_token_ids or []:
        if len(word) == 1 or text[-(len(word) - 1) :] == word[:-1]:
            x[word[-1]] = -torch.inf
    if len(text) - 2 < params.min_tokens:
        x[sorted(params.all_stop_token_ids)] = -torch.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in set(text):
        r = params.repetition_penalty
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token in set(text[2:]):
        x[token] -= params.frequency_penalty * text[2:].count(token)
        x[token] -= params.presence_penalty
    return x


CASES = {
    "penalties": [
        Params(repetition_penalty=1.3, frequency_penalty=0.5),
        Params(presence_penalty=1.5),
        Params(),
    ],
    "bias": [Params(logit_bias={3: 40.0, 1: -2.0}), Params(), Params(logit_bias={49: 40.0})],
    "bad words": [
        Params(_bad_words_token_ids=[[5, 6, 9], [11]]),
        Params(_bad_words_token_ids=[[7, 1, 2]]),
        Params(),
    ],
    "minimum": [
        Params(min_tokens=9, _all_stop_token_ids={4, 2}),
        Params(min_tokens=4, _all_stop_token_ids={5}),
        Params(min_tokens=1, _all_stop_token_ids=set()),
    ],
    "allowed": [Params(), Params(allowed_token_ids=[0, 31, 32, 49]), Params()],
    "mixed": [
        Params(allowed_token_ids=list(range(0, 50, 2)), repetition_penalty=0.7),
        Params(logit_bias={8: 3.0}, _bad_words_token_ids=[[1, 4]], presence_penalty=-1.0),
        Params(min_tokens=3, _all_stop_token_ids={1}, frequency_penalty=2.0, min_p=0.1, top_k=9),
    ],
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_sampling_applies_the_edits_of_vllm(name: str, temperature: float) -> None:
    """A single draw need not show an edit, so many logits are sampled."""
    every = [copy.copy(params) for params in CASES[name]]
    for params in every:
        params.temperature = temperature
    rows, batch = rows_of(*every), of(*every)
    processors = batch.processors_of(rows, POSITIONS, [1, 1, 1], TEXTS)
    assert processors is not None
    generator = torch.Generator().manual_seed(3)
    changed = 0
    for _ in range(60):
        logits = 3 * torch.randn(3, VOCAB, generator=generator)
        logits[:, :12] += 4  # the tokens that the cases edit
        expected = torch.stack(
            [edited(logits[row], row, params) for row, params in enumerate(every)]
        )
        given: dict[str, Any] = {"sampling": batch.sampling()}
        got = sampling.sample(logits, POSITIONS, processors=processors, **given)
        want = sampling.sample(expected, POSITIONS, **given)
        assert got.tolist() == want.tolist()
        changed += got.tolist() != sampling.sample(logits, POSITIONS, **given).tolist()
    assert changed > 5


@pytest.mark.parametrize("name", CASES)
def test_drafts_change_no_token(name: str) -> None:
    """The tokens of one call of `verify` equal those of three calls of `sample`, one per step."""
    every = CASES[name]
    rows, batch = rows_of(*every), of(*every)
    logits = 3 * torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(1))
    drafts = torch.empty((3, 2), dtype=torch.int32)
    texts, positions = TEXTS.clone(), POSITIONS.clone()
    texts = torch.cat([texts, torch.zeros(3, 4, dtype=torch.int32)], dim=1)
    plain = []
    for step in range(3):
        now = BatchParameters.of(rows, 0, VOCAB)
        token = sampling.sample(
            logits[step::3].contiguous(),
            positions,
            processors=now.processors_of(rows, positions, [1, 1, 1], texts),
            sampling=now.sampling(),
        )
        plain.append(token)
        if step < 2:
            drafts[:, step] = token
        texts[torch.arange(3), positions.long()] = token
        positions = positions + 1
    output, accepted = sampling.verify(
        logits,
        sampling.Drafts(torch.tensor([0, 3, 6, 9], dtype=torch.int32), drafts),
        POSITIONS,
        sampling=batch.sampling(),
        processors=batch.processors_of(rows, POSITIONS, [3, 3, 3], TEXTS),
    )
    assert accepted.tolist() == [2, 2, 2]
    assert torch.equal(output, torch.stack(plain, dim=1))
