# SPDX-License-Identifier: Apache-2.0
"""Predicted outputs: their drafts, their selection by requests, and unchanged tokens."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from specops.api.methods import METHODS
from specops.engine import Completion, Engine, EngineConfig, SamplingParams, SpeculativeConfig
from test_lossless import bits, params, prompts

COUNT = 12


def make(method: str, **config: Any) -> Engine:
    limits = {
        name: config.pop(name) for name in list(config) if name in EngineConfig.__annotations__
    }
    speculative = SpeculativeConfig.from_dict({"method": method, **config})
    return Engine(EngineConfig(device="cpu", speculative_config=speculative, **limits))


@cache
def plain() -> tuple[Sequence[str], Sequence[SamplingParams], Sequence[Completion]]:
    """Return prompts, parameters with partly wrong predictions, and the outputs without drafts."""
    texts = prompts()[:COUNT]
    each = [replace(params(i, 0.8 * (i % 2)), max_tokens=64) for i in range(COUNT)]
    done = make("naive", max_num_seqs=COUNT).generate(texts, each)
    return texts, [replace(p, prediction=changed(d)) for p, d in zip(each, done, strict=True)], done


def changed(done: Completion) -> tuple[int, ...]:
    """Return an output in which some tokens are removed or replaced by random ones."""
    chance, tokens = random.Random(done.token_ids[0]), list(done.token_ids)
    for _ in range(3):
        place = chance.randrange(len(tokens))
        tokens[place : place + chance.randrange(3)] = [chance.randrange(4096)]
    return tuple(tokens)


BASES: dict[str, dict[str, Any]] = {
    "naive": {"method": "naive"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "min_ngram_size": 1},
    "mtp": {"method": "mtp", "num_speculative_tokens": 4},
    "mtp+ngram": {"method": "mtp+ngram", "num_speculative_tokens": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 5},
}
LIMITS: dict[str, dict[str, Any]] = {
    "wide": {"max_num_seqs": COUNT},
    "narrow": {"max_num_seqs": 5, "max_num_batched_tokens": 40, "num_pages": 60},
}


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.fast("mtp-wide", ci=("naive-narrow",))
def test_prediction_changes_no_token(base: str, limits: str) -> None:
    texts, each, expected = plain()
    engine = make(**BASES[base], **{"max_model_len": 900, **LIMITS[limits]})
    done = engine.generate(texts, each)
    assert list(map(bits, done)) == list(map(bits, expected))
    spec = engine.stats.speculative
    assert 0.5 * spec.num_draft_tokens < spec.num_accepted_tokens < spec.num_draft_tokens
    assert engine.num_free_pages == engine.num_pages
    assert not engine.drafters["prediction"]._texts  # type: ignore[attr-defined]


def test_drafts_from_predictions_do_not_depend_on_the_batch() -> None:
    """Each step has the same drafts, and so emits the same tokens, in any batch and chunks."""
    texts, each, _ = plain()
    reporting = [replace(one, report_drafts=True) for one in each]

    def drafts(order: Sequence[int], **limits: Any) -> dict[int, list[Any]]:
        engine = make("naive", **limits)
        names = {engine.add_request(texts[i], reporting[i]): i for i in order}
        found: dict[int, list[Any]] = {i: [] for i in order}
        while engine.has_unfinished():
            for one in engine.step():
                if one.drafts is not None:
                    found[names[one.request_id]].append(one.drafts)
        return found

    everyone = drafts(range(COUNT), max_num_seqs=COUNT)
    assert drafts(range(COUNT)[::-1], max_num_seqs=4, max_num_batched_tokens=70) == everyone
    assert {source for one in everyone.values() for d in one for source in d.sources} == {
        "prediction"
    }


def test_prediction_takes_precedence_over_the_servers_method() -> None:
    """This holds while the output follows the prediction; elsewhere the server's method drafts."""
    engine = make("ngram", num_speculative_tokens=3, max_num_seqs=2, adaptive_verification=False)
    text = [5, 6, 7, 8, 9, 10] * 4
    greedy = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, report_drafts=True)
    (plain_one,) = engine.generate([text], replace(greedy, report_drafts=False))
    # The prediction has only the first half of the output.
    engine.add_request(text, replace(greedy, prediction=tuple(plain_one.token_ids[:20])))
    sources: list[str] = []
    while engine.has_unfinished():
        for one in engine.step():
            sources += one.drafts.sources if one.drafts else ()
    assert sources[:2] == ["prediction", "prediction"] and sources[-1] == "ngram"


def test_prediction_parameter_adds_the_method() -> None:
    config = SpeculativeConfig(method="mtp", num_speculative_tokens=4)
    predicted, plain_params = SamplingParams(prediction="text"), SamplingParams()
    assert config.choices_of(plain_params, None, METHODS) is None
    own = {"num_speculative_tokens": 6}
    assert config.choices_of(plain_params, own, METHODS) is own
    chosen = config.override(config.choices_of(predicted, own, METHODS) or {})
    assert chosen.draft_stages == (("mtp", 4), ("prediction", 6))
    named = {"method": "ngram"}
    assert config.choices_of(predicted, named, METHODS) is named
    naive = SpeculativeConfig()
    alone = naive.override(naive.choices_of(predicted, None, METHODS) or {})
    assert alone.draft_stages == (("prediction", 8),)
    assert naive.choices_of(predicted, None, ("naive",)) is None
    again = SpeculativeConfig(method="ngram+prediction")
    assert again.choices_of(predicted, None, METHODS) is None
    assert SpeculativeConfig(method="mtp+prediction").stages == (
        "mtp",
        "prediction",
    )


@pytest.mark.parametrize(
    "prediction,message",
    [
        (7, "prediction must be a list of integers, or a text, got 7"),
        (["a"], "prediction must hold integers, got 'a'"),
        ([-1], "prediction must hold token ids from 0"),
        ([4096], "prediction must hold token ids of the vocabulary of 4096, got 4096"),
        ([1] * 65, "prediction must hold at most the context's 64 tokens, got 65"),
        ("x = 1\n" * 65, "prediction must hold at most the context's 64 tokens, got"),
    ],
)
def test_invalid_predictions_are_refused(prediction: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small().add_request([1, 2], SamplingParams(prediction=prediction))


@cache
def small() -> Engine:
    return make("naive", max_model_len=64, max_num_seqs=1)
