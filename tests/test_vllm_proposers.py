# SPDX-License-Identifier: Apache-2.0
"""The drafters for vLLM without vLLM: rows that move, requests that return, and the drafts."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from specops import SuffixCache
from specops.integrations.vllm import NgramProposer, PredictedOutputs, SuffixProposer, step_requests
from specops.integrations.vllm.followed_texts import FollowedTexts
from specops.integrations.vllm.proposers import SUFFIX_FILE, Proposer
from specops.predicted_text import PredictedText

MAX_LEN = 64
VOCAB = 8_000


def config(k: int = 4, **fields: Any) -> Any:
    """Return what the drafters read of vLLM's configuration, with its defaults."""
    speculative = {
        "num_speculative_tokens": k,
        "prompt_lookup_min": 0,
        "prompt_lookup_max": 0,
        "suffix_decoding_max_tree_depth": 24,
        "suffix_decoding_max_cached_requests": 10_000,
        "suffix_decoding_max_spec_factor": 1.0,
        "suffix_decoding_min_token_prob": 0.1,
    }
    return SimpleNamespace(
        speculative_config=SimpleNamespace(**(speculative | fields)),
        model_config=SimpleNamespace(
            max_model_len=MAX_LEN, tokenizer="a tokenizer", get_vocab_size=lambda: VOCAB
        ),
    )


def propose(
    proposer: Any, rows: list[tuple[list[int], int]], as_tensor: bool = False
) -> list[list[int]]:
    """Make one call with a row per (text, number of its new tokens)."""
    token_ids = np.full((8, MAX_LEN), 7_777, dtype=np.int32)
    lens = np.zeros(8, dtype=np.int32)
    for row, (text, _) in enumerate(rows):
        token_ids[row, : len(text)] = text
        lens[row] = len(text)
    drafts: list[list[int]] = proposer.propose(
        sampled_token_ids=[text[len(text) - new :] for text, new in rows],
        num_tokens_no_spec=lens,
        token_ids_cpu=torch.from_numpy(token_ids) if as_tensor else token_ids,
        slot_mappings=None,
    )
    assert len(drafts) == len(rows)
    return drafts


def encode(*texts: list[int]) -> list[bytes]:
    return [np.array(text, dtype=np.int32).tobytes() for text in texts]


def test_request_is_found_in_its_row_and_after_a_move() -> None:
    texts = FollowedTexts()
    first = texts.follow(encode([1, 2, 3], [4, 5, 6]), [1, 1])
    assert first.numbers == [0, 1] and first.started == {0, 1}
    stayed = texts.follow(encode([1, 2, 3, 9], [4, 5, 6, 9, 9]), [1, 2])
    assert stayed.numbers == [0, 1] and not stayed.started
    swapped = texts.follow(encode([4, 5, 6, 9, 9, 1], [1, 2, 3, 9, 8]), [1, 1])
    assert swapped.numbers == [1, 0] and not swapped.started


def test_reused_row_is_another_request() -> None:
    texts = FollowedTexts()
    texts.follow(encode([1, 2, 3]), [1])
    other = texts.follow(encode([1, 5, 6]), [1])
    assert other.numbers == [1] and other.started == {0}


def test_preempted_request_is_recognized_when_it_returns() -> None:
    texts = FollowedTexts()
    texts.follow(encode([1, 2, 3], [4, 5, 6]), [1, 1])
    texts.follow(encode([4, 5, 6, 7]), [1])
    again = texts.follow(encode([4, 5, 6, 7, 8], [1, 2, 3, 4]), [1, 1])
    assert again.numbers == [1, 0] and not again.started


def test_chunked_prompt_is_followed_once_it_is_complete() -> None:
    texts = FollowedTexts()
    chunk = texts.follow(encode([1, 2, 3]), [0])
    assert chunk.numbers == [None] and not chunk.started and len(texts) == 0
    assert texts.follow(encode([1, 2, 3, 4]), [1]).started == {0}


def test_next_turn_of_a_conversation_is_another_request() -> None:
    texts = FollowedTexts()
    texts.follow(encode([1, 2, 3]), [1])
    turn = texts.follow(encode([1, 2, 3, 50, 51, 4]), [1])
    assert turn.numbers == [1] and turn.started == {0}


def test_equal_texts_are_two_requests() -> None:
    texts = FollowedTexts()
    assert texts.follow(encode([1, 2], [1, 2]), [1, 1]).numbers == [0, 1]
    both = texts.follow(encode([1, 2, 3], [1, 2, 3]), [1, 1])
    assert both.numbers == [0, 1]
    apart = texts.follow(encode([1, 2, 3, 4], [1, 2, 3, 5]), [1, 1])
    assert set(apart.numbers) == {0, 1} and not apart.started


def test_requests_without_a_row_are_forgotten() -> None:
    texts = FollowedTexts(forget_after=3)
    texts.follow(encode([1, 2]), [1])
    forgotten = [texts.follow(encode([9, step]), [1]).forgotten for step in range(6)]
    assert forgotten == [[], [], [0], [1], [2], [3]]
    assert texts.follow(encode([1, 2, 3]), [1]).started == {0}


@pytest.mark.parametrize("seed", range(3))
def test_random_requests_are_never_confused(seed: int) -> None:
    """Rows move, and requests wait, finish and return. Each number stays with one text."""
    rng = random.Random(seed)
    texts = FollowedTexts(forget_after=10)
    running = [[rng.randrange(3)] for _ in range(6)]
    owner: dict[int, list[int]] = {}
    recognized = 0
    for _ in range(400):
        if rng.random() < 0.1:
            running[rng.randrange(6)] = [rng.randrange(3)]
        rows = rng.sample(running, rng.randrange(1, 6))
        new = [rng.choice([0, 1, 1, 2]) for _ in rows]
        for text, count in zip(rows, new, strict=True):
            text.extend(rng.randrange(3) for _ in range(count))
        step = texts.follow(encode(*rows), new)
        assert len({n for n in step.numbers if n is not None}) == sum(count > 0 for count in new)
        for row, (number, count) in enumerate(zip(step.numbers, new, strict=True)):
            assert (number is None) == (count == 0)
            if number is None:
                continue
            before = rows[row][: len(rows[row]) - count]
            if row in step.started:
                assert number not in owner
            else:
                assert owner[number] == before
                recognized += 1
            owner[number] = list(rows[row])
        for number in step.forgotten:
            owner.pop(number)
    assert recognized > 300


def test_suffix_drafts_what_followed_elsewhere() -> None:
    proposer = SuffixProposer(config())
    story = [11, 12, 13, 14, 15, 16, 17, 18]
    for length in range(1, len(story) + 1):
        propose(proposer, [([1, *story[:length]], 1)])
    assert propose(proposer, [([2, 11, 12], 1)]) == [[13, 14]]  # as many as match
    assert propose(proposer, [([2, 11, 12, 13, 14], 2)]) == [[15, 16, 17, 18]]
    assert proposer.cache.check_integrity() == ""


@pytest.mark.parametrize("seed", range(3))
def test_suffix_drafts_equal_those_of_a_cache_with_request_names(seed: int) -> None:
    """Rows move and wait. The other SuffixCache is driven by the names of the requests."""
    rng = random.Random(seed)
    proposer, known = SuffixProposer(config()), SuffixCache(max_tree_depth=24)
    texts = {name: [name, 100 + name] for name in range(5)}
    started: set[int] = set()
    drafted = 0
    for _ in range(50):
        names = rng.sample(sorted(texts), rng.randrange(1, 6))
        rows = []
        for name in names:
            new = [rng.randrange(3)]
            if name not in started:
                known.start(name, texts[name])
                started.add(name)
            texts[name] += new
            rows.append((texts[name], len(new)))
        expected = []
        for name in names:
            known.extend(name, texts[name][-1:])
            most = min(4, MAX_LEN - len(texts[name]))
            expected.append(known.speculate(name, most).token_ids)
        assert propose(proposer, rows) == expected
        drafted += sum(map(len, expected))
    assert drafted > 100
    assert len(proposer.cache.running_requests) == len(started)


def test_suffix_drops_finished_requests_and_keeps_their_texts() -> None:
    proposer = SuffixProposer(config())
    propose(proposer, [([1, 21, 22], 2)])
    for step in range(70):
        propose(proposer, [([2, *range(30, 31 + step % 30)], 1)])
    assert proposer.cache.count([21, 22]) == 1
    assert len(proposer.cache.running_requests) < 70


def test_suffix_keeps_its_tree_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tree"
    monkeypatch.setenv(SUFFIX_FILE, str(file))
    at_exit: list[Any] = []
    monkeypatch.setattr("atexit.register", lambda *a, **k: at_exit.append((a, k)))
    first = SuffixProposer(config())
    propose(first, [([1, 2, 3], 1)])
    propose(first, [([1, 2, 3, 41, 42, 43, 44], 4)])
    (save, *arguments), named = at_exit[0]
    save(*arguments, **named)
    again = SuffixProposer(config())
    assert propose(again, [([9, 41, 42], 2)]) == [[43, 44]]
    other = config()
    other.model_config.tokenizer = "another"
    with pytest.raises(ValueError, match=f"{SUFFIX_FILE} must name a file of 'vllm another'"):
        SuffixProposer(other)


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("kind", [SuffixProposer, NgramProposer])
def test_rows_may_be_arrays_or_tensors(kind: type[Proposer], as_tensor: bool) -> None:
    text = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    drafts = propose(kind(config()), [(text, 1), (text, 0), ([1, 2], 1)], as_tensor)
    assert drafts[0][:3] == [4, 5, 6] and drafts[1:] == [[], []]


@pytest.mark.parametrize("kind", [SuffixProposer, NgramProposer])
def test_no_draft_exceeds_the_maximum_length(kind: type[Proposer]) -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8] * 8
    for length, most in ((MAX_LEN - 5, 4), (MAX_LEN - 2, 2), (MAX_LEN - 1, 1), (MAX_LEN, 0)):
        assert len(propose(kind(config()), [(text[:length], 1)])[0]) == most


def test_ngram_sizes_follow_the_configuration() -> None:
    """V2's method `ngram` sets them; for custom_class, vLLM sets them to 0."""
    text = [1, 2, 3, 4, 9, 3, 4]
    assert propose(NgramProposer(config()), [(text, 1)]) == [[9, 3, 4]]
    proposer = NgramProposer(config(prompt_lookup_min=3, prompt_lookup_max=3))
    assert propose(proposer, [(text, 1)]) == [[]]
    assert NgramProposer(config(prompt_lookup_max=1)).min_ngram_size == 1


def note(*predictions: Any) -> None:
    """Note the rows of a step as the plug-in does, each with a prompt of two tokens."""
    step_requests.note(
        [
            step_requests.Row(
                f"r{row}",
                2,
                SimpleNamespace(
                    extra_args=None if given is None else {"prediction_token_ids": given}
                ),
            )
            for row, given in enumerate(predictions)
        ]
    )


def test_predicted_outputs_follow_their_prediction() -> None:
    proposer = PredictedOutputs(config())
    given = [10, 11, 12, 13, 14, 15]
    note(given, None)
    assert propose(proposer, [([1, 2, 10], 1), ([1, 2, 10], 1)]) == [[11, 12, 13, 14], []]
    note(given, None)
    assert propose(proposer, [([1, 2, 10, 11, 12], 2), ([1, 2, 10, 11], 1)]) == [[13, 14, 15], []]


def test_predicted_outputs_need_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_requests, "_rows", None)
    with pytest.raises(
        RuntimeError, match=r"requires the part sampling, .* add it to SPECOPS_VLLM"
    ):
        propose(PredictedOutputs(config()), [([1, 2, 10], 1)])


def test_prediction_ends_before_an_id_that_is_not_in_the_vocabulary() -> None:
    note([10, VOCAB - 1, VOCAB, 11], [1 << 70])
    proposer = PredictedOutputs(config())
    assert propose(proposer, [([1, 2, 10], 1), ([1, 2, 10], 1)]) == [[VOCAB - 1], []]


def test_prediction_is_found_again_after_other_tokens() -> None:
    text = PredictedText([10, 11, 12, 13, 14, 15], 1)
    assert text.draft([0], 2) == [10, 11]
    assert text.draft([0, 10, 11], 9) == [12, 13, 14, 15]
    assert text.draft([0, 10, 11, 50], 9) == []
    assert text.draft([0, 10, 11, 50, 13], 9) == []  # one token does not match
    assert text.draft([0, 10, 11, 50, 13, 14], 9) == [15]
    assert text.draft([0, 10, 11, 50, 13, 14, 15], 9) == []
    assert text.draft([0, 10, 11, 50, 13, 14, 15, 11, 12], 1) == [13]


def test_longest_match_comes_before_the_next_place() -> None:
    prediction = [1, 2, 3, 4, 2, 3, 5, 9, 2, 3, 6]
    output = [7, 2, 3]
    assert PredictedText(prediction, 0).draft(output, 1) == [4]  # the first after the start
    later = PredictedText(prediction, 0)
    assert later.draft([1, 2, 3, 4, 7, 2, 3], 1) == [5]  # the first after the last place
    longest = PredictedText(prediction, 0)
    assert longest.draft([7, 9, 2, 3], 1) == [6]


def test_prediction_gives_the_same_drafts_in_any_steps() -> None:
    rng = random.Random(5)
    for _ in range(100):
        prediction = [rng.randrange(4) for _ in range(20)]
        text = [rng.randrange(4) for _ in range(20)]
        steps = PredictedText(prediction, 3)
        for end in range(3, 21):
            at_once = PredictedText(prediction, 3)
            assert steps.draft(text[:end], 4) == at_once.draft(text[:end], 4)
