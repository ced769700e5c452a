# SPDX-License-Identifier: Apache-2.0
"""Scores of continuations: the logprob bits of decoding, with a prompt that is computed once."""

import math
from typing import Any

import pytest
from specops.engine import Engine, EngineConfig, SamplingParams
from specops.scoring import Score, score

PROMPTS = [list(range(5, 75)), [7, 8, 9] * 20, [5, 6]]


def engine_of(**settings: Any) -> Engine:
    return Engine(EngineConfig(device="cpu", max_num_seqs=4, num_threads=1, **settings))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_of()


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("caching", [True, False])
def test_scores_have_the_bits_of_decoding(mode: str, caching: bool) -> None:
    engine = engine_of(logprobs_mode=mode, enable_prefix_caching=caching, max_num_batched_tokens=48)
    params = SamplingParams(max_tokens=9, temperature=0.9, seed=3, n=3, logprobs=2, top_k=50)
    done = engine.generate(PROMPTS, params)
    answers = [done[3 * i : 3 * i + 3] for i in range(len(PROMPTS))]
    scores = score(
        engine,
        PROMPTS,
        [[one.token_ids for one in own] for own in answers],
        params,
        num_alternatives=2,
    )
    assert scores == [[Score(one.logprobs) for one in own] for own in answers]
    assert scores[0][1].token_ids == answers[0][1].token_ids


def test_continuations_share_the_pages_of_their_prompt(engine: Engine) -> None:
    before, page = engine.stats.num_rows, engine.config.page_size
    score(engine, [[9] * (10 * page)], [[[1], [2, 3], [4], [5, 6, 7]]])
    rows = [10 * page + 1, page + 2, page + 1, page + 3]  # the last page is computed again
    assert engine.stats.num_rows - before == sum(rows)


def test_texts_are_scored_like_their_tokens(engine: Engine) -> None:
    encode = engine.tokenizer.encode
    prompt, texts = "def add(a, b):", ["\n    return a + b", "x"]
    ids = [encode(text, add_special_tokens=False) for text in texts]
    scores = score(engine, [prompt], [texts])
    assert scores == score(engine, [encode(prompt)], [ids])
    first, second = scores[0]
    assert first.token_ids == ids[0] and first.total / len(ids[0]) > second.total
    assert second.total == math.fsum(one.logprob for one in second.logprobs)


@pytest.mark.parametrize(
    ("prompts", "continuations", "message"),
    [
        ([[5]], [], "one list for each of 1 prompts, got 0"),
        ([[5]], ["ab"], "must be a list for each prompt"),
        ([[5]], [[[]]], "at least one token each"),
        ([[]], [[[5]]], "prompts must have at least one token each"),
        ([[5]], [[[10**6]]], "token id 1000000 is outside the vocabulary"),
    ],
)
def test_invalid_continuations_are_refused(
    engine: Engine, prompts: Any, continuations: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        score(engine, prompts, continuations)


def test_start_of_logprobs_is_within_the_prompt(engine: Engine) -> None:
    with pytest.raises(ValueError, match="prompt_logprobs_start needs prompt_logprobs"):
        SamplingParams(prompt_logprobs_start=1)
    with pytest.raises(ValueError, match="below the number of tokens of the prompt, 3, got 3"):
        engine.generate([[5, 6, 7]], SamplingParams(prompt_logprobs=0, prompt_logprobs_start=3))
