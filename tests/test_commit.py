# SPDX-License-Identifier: Apache-2.0
"""commit: every rule, every pair of rules at one token, any split of the tokens into steps."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling_cases import by_field
from shared_fixtures import expect_fault
from specops import reference, sampling
from specops.sampling import EmittedTokens, FinishReason, RequestStatus, TokenCounts
from torch import Tensor

pytestmark = pytest.mark.no_bf16

POISON = 3  # a token id that these rules would act on, in entries that must not be read


def commit(device: str, arguments: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the op's arguments after the call, after comparing them with the reference's."""
    want = by_field(reference.commit)(**arguments)
    wide = torch.full(
        (arguments["token_ids"].shape[0], arguments["token_ids"].shape[1] + 5), -7
    ).int()
    wide[:, :-5] = arguments["token_ids"]
    got = {name: tensor.clone().to(device) for name, tensor in arguments.items()}
    wide = wide.to(device)
    got["token_ids"] = wide[:, :-5]
    assert by_field(sampling.commit)(**got) == (got["token_ids"], got["lens"])
    assert bool((wide[:, -5:] == -7).all())  # the slack of strided rows is unchanged
    for name, tensor in want.items():
        assert torch.equal(got[name].cpu(), tensor), name
    return want


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# ---- a whole batch against the reference ----


def random_batch(batch: int, k: int, vocab_size: int = 6) -> dict[str, Tensor]:
    """Return a batch with all rules on few ids, so that they coincide, and poison elsewhere."""
    num_slots, width = batch + 3, 3 * k + 12
    prompt_lens = torch.randint(0, 4, (num_slots,))
    lens = prompt_lens + torch.randint(0, k + 5, (num_slots,))
    token_ids = torch.randint(0, vocab_size, (num_slots, width))
    emitted = torch.randint(0, vocab_size, (batch, k + 1))
    emitted[torch.arange(batch), torch.randint(0, k + 2, (batch,)).clamp(max=k)] = -1
    emitted[::3, 0] = emitted[::3, 0].clamp(min=0)
    slots = torch.randperm(num_slots)[:batch]
    slots[::7] = -1

    def padded(*shape: int) -> Tensor:
        ids = torch.randint(0, vocab_size, shape)
        counts = torch.randint(0, shape[-1] + 1, shape[:-1])
        places = torch.arange(shape[-1]).expand(shape)
        return torch.where(places < counts[..., None], ids, -1).int()

    def maybe(low: int, high: int) -> Tensor:
        return torch.where(
            torch.rand(num_slots) < 0.5, torch.randint(low, high, (num_slots,)), -1
        ).int()

    counted = torch.full((num_slots, vocab_size), -1, dtype=torch.int32)
    counts = torch.zeros_like(counted)
    for s in range(num_slots):
        sampling.count_tokens(
            token_ids[s, : lens[s]].int(),
            int(prompt_lens[s]),
            counted_token_ids=counted[s],
            token_counts=counts[s],
        )
    for s in range(num_slots):
        token_ids[s, lens[s] :] = POISON
    inject = padded(num_slots, 3)
    return {
        "output_token_ids": emitted.int(),
        "slots": slots.int(),
        "token_ids": token_ids.int(),
        "lens": lens.int(),
        "logprobs": -torch.rand(batch, k + 1),
        "ranks": torch.randint(1, 9, (batch, k + 1)).int(),
        "prompt_lens": prompt_lens.int(),
        "max_lens": torch.where(maybe(0, 9) < 0, -1, lens + maybe(0, k + 4)).int(),
        "min_tokens": torch.randint(0, k + 4, (num_slots,)).int(),
        "stop_token_ids": torch.where(torch.rand(num_slots, 1) < 0.3, -1, padded(num_slots, 2)),
        "stop_sequences": padded(num_slots, 3, 3),
        "counted_token_ids": counted,
        "token_counts": counts,
        "think_end_token_id": maybe(0, vocab_size),
        "thinking_budget": maybe(0, k + 5),
        "reply_budget": maybe(0, 4),
        "inject_token_ids": inject,
        "thinking_state": torch.randint(-1, 6, (num_slots,)).int(),
        "finish_reasons": torch.randint(-8, 4, (num_slots,)).clamp(min=0).int(),
        "stop_indices": torch.full((num_slots,), 55).int(),
        "num_committed_tokens": torch.full((batch,), 55).int(),
    }


@pytest.mark.parametrize(
    "batch,k", [(1, 0), (3, 4), (60, 1), (40, 7), (5, 40), (0, 3), (1500, 3), (4, 300)]
)
def test_all_rules_together_match_the_reference(
    device: str, isa: str, on_cuda: bool, batch: int, k: int
) -> None:
    arguments = random_batch(min(batch, 200) if on_cuda else batch, k)
    after = commit(device, arguments)
    if batch * (k + 1) >= 300 and batch > 5:  # large batches reach every rule
        ran = (arguments["finish_reasons"] == 0) & (after["lens"] > arguments["lens"])
        assert set(after["finish_reasons"][ran].tolist()) == {0, 1, 2, 3}
        assert bool((after["ranks"] == 1).any())


@pytest.mark.parametrize("batch,k", [(1, 0), (3, 4), (40, 70), (0, 3)])
def test_required_arguments_append_tokens(device: str, batch: int, k: int) -> None:
    arguments = random_batch(batch, k, 1000)
    few = {name: arguments[name] for name in ("output_token_ids", "slots", "token_ids", "lens")}
    after = commit(device, few)
    for b, slot in enumerate(few["slots"].tolist()):
        if slot >= 0:
            emitted = few["output_token_ids"][b].tolist()
            emitted = emitted[: emitted.index(-1)] if -1 in emitted else emitted
            begin, end = int(few["lens"][slot]), int(after["lens"][slot])
            assert after["token_ids"][slot, begin:end].tolist() == emitted


def test_every_optional_argument_can_be_omitted(device: str) -> None:
    arguments = random_batch(12, 4)
    required = {"output_token_ids", "slots", "token_ids", "lens"}
    # Other arguments require prompt_lens, thinking_state, finish_reasons and the tables.
    needed = {"prompt_lens", "thinking_state", "finish_reasons"}
    needed |= {"counted_token_ids", "token_counts"}
    for name in arguments:
        if name not in required | needed:
            commit(device, {key: value for key, value in arguments.items() if key != name})
    for group in (
        {"counted_token_ids", "token_counts"},
        {"stop_token_ids", "stop_sequences", "max_lens", "reply_budget", "finish_reasons"},
        {"stop_sequences", "min_tokens", "thinking_budget", "prompt_lens"},
        {name for name in arguments if "think" in name or name[:6] in ("reply_", "inject")},
    ):
        commit(device, {key: value for key, value in arguments.items() if key not in group})


# ---- each rule ----

END, EOS = 90, 91  # of thinking; of the text
RUNNING, STOP_TOKEN, STOP_SEQUENCE, LENGTH = (int(reason) for reason in FinishReason)


def commit_one(
    device: str, emitted: list[int], output: list[int], **options: Any
) -> dict[str, Any]:
    """Commit tokens to one request with the prompt 7, 7, 7 and return the result."""
    row = [7, 7, 7, *output]
    state = {
        "output_token_ids": ints([[*emitted, -1, POISON]]),
        "slots": ints([1]),
        "token_ids": ints([[POISON] * 30, row + [POISON] * (30 - len(row))]),
        "lens": ints([0, len(row)]),
        "logprobs": torch.full((1, len(emitted) + 2), -0.5),
        "ranks": ints([[4] * (len(emitted) + 2)]),
        "prompt_lens": ints([0, 3]),
        "finish_reasons": ints([0, 0]),
        "stop_indices": ints([-1, -1]),
        "num_committed_tokens": ints([9]),
    }
    tables = {name: ints([value, value]) for name, value in options.items()}
    after = commit(device, {**state, **tables})
    count = int(after["num_committed_tokens"])
    assert int(after["lens"][1]) == len(row) + count
    assert bool((after["output_token_ids"][0, count:] == -1).all())
    assert not after["logprobs"][0, count:].any() and not after["ranks"][0, count:].any()
    return {
        "tokens": after["output_token_ids"][0, :count].tolist(),
        "ranks": after["ranks"][0, :count].tolist(),
        "state": int(after["thinking_state"][1]) if "thinking_state" in after else None,
        "finish": (int(after["finish_reasons"][1]), int(after["stop_indices"][1])),
    }


THINKING = {"think_end_token_id": END, "thinking_state": 0}
# Emitted tokens, earlier output, options, committed tokens, finish reason and stop index.
CASES: dict[str, tuple[list[int], list[int], dict[str, Any], list[int], tuple[int, int]]] = {
    "no rule applies": ([1, 2], [], {}, [1, 2], (RUNNING, -1)),
    "nothing is emitted": ([], [1], {"max_lens": 4}, [], (RUNNING, -1)),
    "a stop token": ([1, 5, 2], [], {"stop_token_ids": [4, 5]}, [1, 5], (STOP_TOKEN, 1)),
    "stop token listed twice": ([5], [], {"stop_token_ids": [5, 5]}, [5], (STOP_TOKEN, 0)),
    "padding is no stop token": ([1], [], {"stop_token_ids": [-1, 1]}, [1], (RUNNING, -1)),
    "a stop token too early": (
        [5, 5, 5],
        [1],
        {"stop_token_ids": [5], "min_tokens": 3},
        [5, 5],
        (STOP_TOKEN, 0),
    ),
    "a stop sequence": ([1, 2, 3], [], {"stop_sequences": [[1, 2]]}, [1, 2], (STOP_SEQUENCE, 0)),
    "a stop sequence of one": ([1, 2], [], {"stop_sequences": [[1, -1]]}, [1], (STOP_SEQUENCE, 0)),
    "a stop sequence over steps": (
        [3, 9],
        [1, 2],
        {"stop_sequences": [[-1, -1, -1], [1, 2, 3]]},
        [3],
        (STOP_SEQUENCE, 1),
    ),
    "sequence begun in the prompt": (
        [1, 7, 7, 1],
        [],
        {"stop_sequences": [[7, 1], [7, 7]]},
        [1, 7, 7],
        (STOP_SEQUENCE, 1),
    ),
    "sequence begun in earlier output": (
        [2],
        [1],
        {"stop_sequences": [[1, 2]]},
        [2],
        (STOP_SEQUENCE, 0),
    ),
    "a stop sequence too early": (
        [1, 2, 1, 2],
        [],
        {"stop_sequences": [[1, 2]], "min_tokens": 3},
        [1, 2, 1, 2],
        (STOP_SEQUENCE, 0),
    ),
    "completed too early, not again": (
        [1, 2, 3],
        [],
        {"stop_sequences": [[1, 2]], "min_tokens": 3},
        [1, 2, 3],
        (RUNNING, -1),
    ),
    "two sequences end together": (
        [1, 2, 3],
        [],
        {"stop_sequences": [[9, 2], [2, -1], [1, 2]]},
        [1, 2],
        (STOP_SEQUENCE, 1),
    ),
    "the first to end wins": (
        [1, 2, 3],
        [],
        {"stop_sequences": [[2, 3], [1, 2]]},
        [1, 2],
        (STOP_SEQUENCE, 1),
    ),
    "a sequence that overlaps itself": (
        [1, 1, 1, 2],
        [],
        {"stop_sequences": [[1, 1, 2]]},
        [1, 1, 1, 2],
        (STOP_SEQUENCE, 0),
    ),
    "maximum length": ([1, 2, 3], [1], {"max_lens": 6}, [1, 2], (LENGTH, -1)),
    "beyond the maximum length": ([1, 2], [1, 1], {"max_lens": 2}, [1], (LENGTH, -1)),
    "token and sequence": (
        [1, 2],
        [],
        {"stop_token_ids": [2], "stop_sequences": [[1, 2]]},
        [1, 2],
        (STOP_TOKEN, 0),
    ),
    "token and length": (
        [1, 2],
        [],
        {"stop_token_ids": [2], "max_lens": 5},
        [1, 2],
        (STOP_TOKEN, 0),
    ),
    "sequence and length": (
        [1, 2],
        [],
        {"stop_sequences": [[1, 2]], "max_lens": 5},
        [1, 2],
        (STOP_SEQUENCE, 0),
    ),
    "length before a stop token": (
        [1, 2],
        [],
        {"stop_token_ids": [2], "max_lens": 4},
        [1],
        (LENGTH, -1),
    ),
    "length does not wait for min_tokens": (
        [5, 5],
        [],
        {"stop_token_ids": [5], "max_lens": 4, "min_tokens": 3},
        [5],
        (LENGTH, -1),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_stop_rules_end_a_request(device: str, name: str) -> None:
    emitted, output, options, tokens, finish = CASES[name]
    after = commit_one(device, emitted, output, **options)
    assert (after["tokens"], after["finish"]) == (tokens, finish)
    assert after["ranks"] == [4] * len(tokens)


INJECT = {**THINKING, "inject_token_ids": [60, 61]}  # done is state 3
# Fields as in CASES, then the thinking state afterwards; rank 1 marks an injected token.
THINKING_CASES: dict[str, tuple[list[int], list[int], dict[str, Any], list[int], int, Any]] = {
    "still thinking": ([1, 2], [], INJECT, [1, 2], 0, RUNNING),
    "thinking ends by itself": ([1, END, 2, 3], [], INJECT, [1, END, 2, 3], 5, RUNNING),
    "thinking ends, nothing to inject": ([END, 2], [], THINKING, [END, 2], 2, RUNNING),
    "no thinking": (
        [END, 2, 3],
        [],
        {**INJECT, "thinking_state": -1, "thinking_budget": 0},
        [END, 2, 3],
        -1,
        RUNNING,
    ),
    "no thinking, no reply": (
        [END, 2, 3],
        [],
        {**INJECT, "thinking_state": -1, "reply_budget": 0},
        [END, 2, 3],
        -1,
        RUNNING,
    ),
    "within the budget": (
        [1, 2],
        [1],
        {**INJECT, "thinking_budget": 3},
        [1, 2],
        0,
        RUNNING,
    ),
    "the budget is used up": (
        [1, 2, 3, 4],
        [1],
        {**INJECT, "thinking_budget": 3},
        [1, 2, 60],
        2,
        RUNNING,
    ),
    "second injected token": (
        [4, 5],
        [60],
        {**INJECT, "thinking_state": 2, "thinking_budget": 0},
        [61],
        3,
        RUNNING,
    ),
    "all injected": (
        [4, 5],
        [60, 61],
        {**INJECT, "thinking_state": 3, "thinking_budget": 0},
        [4, 5],
        5,
        RUNNING,
    ),
    "no budget at all": ([1], [], {**INJECT, "thinking_budget": 0}, [60], 2, RUNNING),
    "an end at the budget": (
        [END, 4],
        [1],
        {**INJECT, "thinking_budget": 1},
        [END, 4],
        4,
        RUNNING,
    ),
    "a budget and nothing to inject": (
        [1, 2, 3],
        [],
        {**THINKING, "thinking_budget": 2},
        [1, 2, 3],
        2,
        RUNNING,  # the third is the reply's first
    ),
    "a later end is of the reply": (
        [1, END, 3],
        [],
        {**THINKING, "thinking_budget": 0},
        [1, END, 3],
        4,
        RUNNING,
    ),
    "eos while thinking": (
        [1, EOS, 3],
        [],
        {**INJECT, "stop_token_ids": [EOS]},
        [1, 60],
        2,
        RUNNING,
    ),
    "eos in the reply": (
        [END, EOS, 3],
        [],
        {**INJECT, "stop_token_ids": [EOS]},
        [END, EOS],
        4,
        STOP_TOKEN,
    ),
    "eos and nothing to inject": (
        [1, EOS],
        [],
        {**THINKING, "stop_token_ids": [EOS]},
        [1, EOS],
        0,
        STOP_TOKEN,
    ),
    "eos too early": (
        [EOS, 2],
        [],
        {**INJECT, "stop_token_ids": [EOS], "min_tokens": 2},
        [EOS, 2],
        0,
        RUNNING,
    ),
    "eos while injecting": (
        [EOS],
        [60],
        {**INJECT, "thinking_state": 2, "stop_token_ids": [EOS]},
        [61],
        3,
        RUNNING,
    ),
    "the end is a stop token": (
        [1, END],
        [],
        {**INJECT, "stop_token_ids": [END]},
        [1, END],
        3,
        STOP_TOKEN,
    ),
    "injected stop token": (
        [1, 2],
        [],
        {**INJECT, "thinking_budget": 1, "stop_token_ids": [60]},
        [1, 60],
        2,
        STOP_TOKEN,
    ),
    "injected token completes a sequence": (
        [1, 2],
        [],
        {**INJECT, "thinking_budget": 1, "stop_sequences": [[1, 60]]},
        [1, 60],
        2,
        STOP_SEQUENCE,
    ),
    "replaced token completes no sequence": (
        [1, 2],
        [],
        {**INJECT, "thinking_budget": 1, "stop_sequences": [[1, 2]]},
        [1, 60],
        2,
        RUNNING,
    ),
    "injected token reaches the maximum length": (
        [1, 2],
        [],
        {**INJECT, "thinking_budget": 1, "max_lens": 5},
        [1, 60],
        2,
        LENGTH,
    ),
    "the reply's budget": (
        [END, 2, 3, 4],
        [],
        {**INJECT, "reply_budget": 2},
        [END, 2, 3],
        5,
        LENGTH,
    ),
    "the reply's budget over steps": (
        [4, 5],
        [END, 2, 3],
        {**INJECT, "thinking_state": 5, "reply_budget": 3},
        [4],
        6,
        LENGTH,
    ),
    "reply budget of zero": ([1, END, 2], [], {**INJECT, "reply_budget": 0}, [1, END], 3, LENGTH),
    "reply budget of zero, injected": (
        [1],
        [60],
        {**INJECT, "thinking_state": 2, "reply_budget": 0},
        [61],
        3,
        LENGTH,
    ),
    "last token of the reply is a stop token": (
        [END, EOS],
        [],
        {**INJECT, "reply_budget": 1, "stop_token_ids": [EOS]},
        [END, EOS],
        4,
        STOP_TOKEN,
    ),
}


@pytest.mark.parametrize("name", THINKING_CASES)
def test_thinking_rules_apply(device: str, name: str) -> None:
    emitted, output, options, tokens, state, reason = THINKING_CASES[name]
    after = commit_one(device, emitted, output, **options)
    assert (after["tokens"], after["state"], after["finish"][0]) == (tokens, state, reason)
    injected = [token in (60, 61) for token in tokens]
    assert after["ranks"] == [1 if was else 4 for was in injected]
    assert not any(injected[:-1])


def test_finished_requests_and_idle_slots_are_unchanged(device: str) -> None:
    after = commit(
        device,
        {
            "output_token_ids": ints([[1, 2], [3, -1], [4, 5]]),
            "slots": ints([2, 0, -1]),
            "token_ids": ints([[7] * 4] * 3),
            "lens": ints([1, 9, 2]),
            "logprobs": torch.ones(3, 2),
            "finish_reasons": ints([0, 0, 2]),
            "stop_indices": ints([5, 5, 5]),
            "num_committed_tokens": ints([8, 8, 8]),
        },
    )
    assert after["output_token_ids"].tolist() == [[-1, -1], [3, -1], [4, 5]]
    assert after["logprobs"].tolist() == [[0, 0], [1, 0], [1, 1]]
    assert after["lens"].tolist() == [2, 9, 2]
    assert after["finish_reasons"].tolist() == [0, 0, 2]
    assert after["stop_indices"].tolist() == [-1, 5, 5]
    assert after["num_committed_tokens"].tolist() == [0, 1, 0]


# ---- any split into steps ----

OFF = st.just(-1)
RARE = st.integers(-1, 14)  # above 4: never emitted, though it may be injected
OPTIONS = {
    "max_lens": OFF | st.integers(0, 20),
    "min_tokens": st.integers(0, 8),
    "stop_token_ids": st.lists(RARE, min_size=2, max_size=2),
    "stop_sequences": st.lists(
        st.lists(st.integers(-1, 5), min_size=3, max_size=3), min_size=2, max_size=2
    ),
    "think_end_token_id": OFF | st.integers(0, 4),
    "thinking_budget": OFF | st.integers(0, 8),
    "reply_budget": OFF | st.integers(0, 8),
    "inject_token_ids": st.lists(RARE, min_size=3, max_size=3),
    "thinking_state": st.sampled_from([0, 0, 0, -1]),
}


def next_token(history: list[int], salt: int) -> int:
    """Return the next token of a deterministic model with five tokens.

    An injected token changes all later tokens.
    """
    value = salt
    for token in history[-6:]:
        value = (value * 31 + token + len(history)) * 0x9E3779B1 % 2**32
    return (value >> 16) % 5


def generate(
    device: str, options: dict[str, Any], prompt: list[int], salt: int, step_sizes: list[int]
) -> dict[str, Any]:
    """Run steps of `step_sizes` tokens until the request ends or has 16 tokens."""
    most = max(step_sizes)
    counted = torch.full((1, 16), -1, dtype=torch.int32)
    state = {
        "token_ids": ints([prompt + [POISON] * (20 + most)]),
        "lens": ints([len(prompt)]),
        "slots": ints([0]),
        "prompt_lens": ints([len(prompt)]),
        "counted_token_ids": counted,
        "token_counts": torch.zeros_like(counted),
        "finish_reasons": ints([0]),
        "stop_indices": ints([-1]),
        "num_committed_tokens": ints([0]),
        **{name: ints([value]) for name, value in options.items()},
    }
    sampling.count_tokens(
        state["token_ids"][0, : len(prompt)].int(),
        len(prompt),
        counted_token_ids=counted[0],
        token_counts=state["token_counts"][0],
    )
    emitted_tokens: list[int] = []
    step = 0
    while int(state["finish_reasons"]) == 0 and int(state["lens"]) < len(prompt) + 16:
        history = state["token_ids"][0, : int(state["lens"])].tolist()
        emitted: list[int] = []
        left = len(prompt) + 16 - len(history)
        for _ in range(min(step_sizes[step % len(step_sizes)], left)):
            emitted.append(next_token(history + emitted, salt))
        padded = emitted + [-1] * (most - len(emitted))
        state = commit(device, {"output_token_ids": ints([padded]), **state})
        emitted_tokens += state.pop("output_token_ids")[0, : int(state["num_committed_tokens"])]
        step += 1
    count = int(state["lens"])
    assert [int(token) for token in emitted_tokens] == state["token_ids"][
        0, len(prompt) : count
    ].tolist()
    again, counts = torch.full((16,), -1).int(), torch.zeros(16).int()
    tokens = state["token_ids"][0, :count].int()
    sampling.count_tokens(tokens, len(prompt), counted_token_ids=again, token_counts=counts)
    assert torch.equal(state["counted_token_ids"][0], again)
    assert torch.equal(state["token_counts"][0], counts)
    result = {name: state[name].tolist() for name in ("lens", "finish_reasons", "stop_indices")}
    return {
        **result,
        "thinking_state": state["thinking_state"].tolist(),
        "history": state["token_ids"][0, :count].tolist(),
    }


@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    options=st.fixed_dictionaries(OPTIONS),
    prompt=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    salt=st.integers(0, 2**20),
    step_sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
)
def test_split_into_steps_does_not_matter(
    device: str, options: dict[str, Any], prompt: list[int], salt: int, step_sizes: list[int]
) -> None:
    plain = generate(device, options, prompt, salt, [1])
    assert generate(device, options, prompt, salt, step_sizes) == plain


# ---- the counts ----


@pytest.mark.parametrize("k", [0, 3, 140, 300])
@pytest.mark.parametrize("width", [0, 150])
def test_token_counts_support_many_tokens(device: str, isa: str, k: int, width: int) -> None:
    """Rows are wider than a thread block, and steps have more tokens than threads."""
    prompts = torch.randint(0, 2**31 - 1, (3, width)).int()
    capacity = width + 2 * k + 2
    emitted = torch.randint(0, 2**31 - 1, (3, k + 1)).int()
    for b in range(3):  # some tokens are in the prompt, some are emitted twice
        places = torch.rand(k + 1) < 0.4
        if width:
            emitted[b, places] = prompts[b, torch.randint(0, width, (int(places.sum()),))]
        emitted[b, k // 2 :: 3] = emitted[b, 0]
    token_ids = torch.cat([prompts, torch.zeros(3, k + 1, dtype=torch.int32)], dim=1)
    tables = {
        "counted_token_ids": torch.full((3, capacity), -1, dtype=torch.int32),
        "token_counts": torch.zeros(3, capacity, dtype=torch.int32),
    }
    expected = {name: table.clone() for name, table in tables.items()}
    for b in range(3):
        sampling.count_tokens(prompts[b].int(), width, **{name: t[b] for name, t in tables.items()})
        whole = torch.cat([prompts[b], emitted[b]]).int()
        sampling.count_tokens(whole, width, **{name: t[b] for name, t in expected.items()})
    after = commit(
        device,
        {
            "output_token_ids": emitted,
            "slots": ints([0, 1, 2]),
            "token_ids": token_ids,
            "lens": ints([width] * 3),
            **tables,
        },
    )
    for name, table in expected.items():
        assert torch.equal(after[name], table), name


def test_count_tokens_counts_and_refuses_small_tables(device: str) -> None:
    ids, counts = ints([9] * 6).to(device), ints([9] * 6).to(device)
    sampling.count_tokens(
        ints([5, 2, 5, 7, 2, 2]).to(device), 3, counted_token_ids=ids, token_counts=counts
    )
    assert ids.tolist() == [2, 5, 7, -1, -1, -1] and counts.tolist() == [5, 1, 2, 0, 0, 0]
    with pytest.raises(
        ValueError, match=r"count_tokens: counted_token_ids must .* at least 7 elements.*got 6"
    ):
        sampling.count_tokens(
            torch.arange(7).int().to(device), 0, counted_token_ids=ids, token_counts=counts
        )
    with pytest.raises(
        ValueError, match=r"count_tokens: prompt_len must be within \[0, 2\], got 3"
    ):
        sampling.count_tokens(
            ints([1, 2]).to(device), 3, counted_token_ids=ids, token_counts=counts
        )
    sampling.count_tokens(ints([]).to(device), 0, counted_token_ids=ids, token_counts=counts)
    assert ids.tolist() == [-1] * 6 and not counts.any()


def test_count_tokens_writes_nothing_for_invalid_arguments(device: str) -> None:
    good = {
        "token_ids": ints([5, 2, 5]).to(device),
        "prompt_len": 1,
        "counted_token_ids": ints([9] * 6).to(device),
        "token_counts": ints([9] * 6).to(device),
    }
    rows = ("token_ids", "counted_token_ids", "token_counts")
    cases: list[tuple[str, Any, str]] = [
        *(
            (name, good[name].to(t), rf"int32 \[\w\], got {str(t)[6:]} \[")
            for name in rows
            for t in TYPES
        ),
        *((name, good[name][None], r"int32 \[\w\], got int32 \[1, ") for name in rows),
        *((name, good[name].tolist(), r"int32 \[\w\], got list") for name in rows),
        *((name, good[name].repeat(2)[::2], r"contiguous, got strides \[2\]") for name in rows),
        ("token_counts", ints([9] * 5).to(device), r"int32 \[m=6\], got int32 \[5\]"),
        ("token_counts", ints([9] * 6).to("meta"), "on .* like token_ids, got on meta"),
        ("token_ids", ints([5, -1, 2]).to(device), "of ids of at least 0, got -1"),
        ("prompt_len", 4, r"within \[0, 3\], got 4"),
        *(("prompt_len", wrong, "an int32 of at least 0, got") for wrong in (-1, 1.0, True, "1")),
    ]
    for name, wrong, message in cases:
        with pytest.raises(ValueError, match=f"^count_tokens: {name} must be {message}"):
            sampling.count_tokens(**{**good, name: wrong})
        for table in ("counted_token_ids", "token_counts"):
            assert good[table].tolist() == [9] * 6


TYPES = (torch.float32, torch.int64, torch.uint8, torch.bool)


# ---- invalid data ----

SLOTS = "commit: slots.* must be -1 or .*, got"
ROOM = "commit: lens.* must .*room.*, got"
COUNTED = r"commit: counts\.counted_token_ids.* must .*room.*, got"


@pytest.mark.parametrize(
    "slots,lens,counted,message",
    [
        ([0, 3], [0, 0, 0], [-1, -1, -1], SLOTS),
        ([0, -2], [0, 0, 0], [-1, -1, -1], SLOTS),
        ([1, 0], [5, 0, 0], [-1, -1, -1], ROOM),
        ([1, 0], [6, 0, 0], [-1, -1, -1], ROOM),
        ([1, 0], [7, 0, 0], [-1, -1, -1], ROOM),
        ([1, 0], [-1, 0, 0], [-1, -1, -1], ROOM),
        ([1, 0], [0, 0, 0], [0, 7, -1], COUNTED),
        ([1, 0], [0, 0, 0], [0, 2, 7], COUNTED),
    ],
)
def test_invalid_data_is_reported(
    device: str,
    on_cuda: bool,
    slots: list[int],
    lens: list[int],
    counted: list[int],
    message: str,
) -> None:
    emitted = ints([[1, -1], [2, 3]]).to(device)
    token_ids = torch.zeros(3, 6, dtype=torch.int32, device=device)
    counts = ints(lens).to(device)
    table = ints([counted, [-1] * 3, [-1] * 3]).to(device)
    count_tables = {"counted_token_ids": table, "token_counts": torch.zeros_like(table)}
    committed = ints([8, 8]).to(device)
    with expect_fault(on_cuda, message):
        by_field(sampling.commit)(
            EmittedTokens(emitted),
            ints(slots).to(device),
            token_ids,
            counts,
            **count_tables,
            num_committed_tokens=committed,
        )
    # The invalid request is unchanged. CUDA commits the other one; the CPU writes nothing.
    assert not token_ids[0].any() or slots[0] == 0
    assert emitted.tolist() == [[1, -1], [2, 3]]
    assert table[0].tolist() == counted or slots[0] == 0
    assert committed.tolist() == ([1, 0] if on_cuda else [8, 8])
    if not on_cuda:
        assert not token_ids.any() and counts.tolist() == lens


def test_duplicate_slots_are_refused_on_cpu() -> None:
    """CUDA does not check this, and stays within the row."""
    wide = torch.zeros(1, 16, dtype=torch.int32)
    lens = ints([6])
    with pytest.raises(ValueError, match=r"commit: slots\[1\] must be of no other request, got 0"):
        sampling.commit(EmittedTokens(ints([[1, 2], [3, 4]])), ints([0, 0]), wide[:, :8], lens)
    assert not wide.any() and lens.tolist() == [6]


def test_empty_count_table_is_reported_as_full(device: str, on_cuda: bool) -> None:
    table = torch.zeros(1, 0, dtype=torch.int32, device=device)
    tokens, *rest = (ints(rows).to(device) for rows in ([[5]], [0], [[7, 7]], [1]))
    with expect_fault(on_cuda, COUNTED):
        counts = TokenCounts(table, table.clone())
        sampling.commit(EmittedTokens(tokens), *rest, counts=counts)


def test_reply_length_does_not_overflow() -> None:
    state = ints([2**31 - 1])
    rest = EmittedTokens(ints([[5]])), ints([0]), ints([[7, 7]]), ints([1])
    sampling.commit(*rest, status=RequestStatus(thinking_state=state))
    assert state.tolist() == [2**31 - 1]


def test_tokens_after_the_end_need_no_space(device: str) -> None:
    after = commit(
        device,
        {
            "output_token_ids": ints([[2, 2, 3]]),
            "slots": ints([0]),
            "token_ids": ints([[7, 7, 7]]),
            "lens": ints([1]),
            "counted_token_ids": ints([[2, 7]]),
            "token_counts": ints([[1, 1]]),
            "max_lens": ints([2]),
            "stop_token_ids": ints([[2]]),
            "prompt_lens": ints([1]),
            "finish_reasons": ints([0]),
        },
    )
    assert after["token_ids"].tolist() == [[7, 2, 7]]
    assert after["token_counts"].tolist() == [[3, 1]]


@pytest.mark.parametrize(
    "absent,present,message",
    [
        ("counts.token_counts", ["counted_token_ids"], "int32 .*, got None"),
        ("counts.counted_token_ids", ["token_counts"], "int32 .*, got None"),
        ("prompt_lens", ["min_tokens"], "given with rules.min_tokens, got None"),
        ("prompt_lens", ["stop_sequences", "finish_reasons"], "given with rules.stop_sequences"),
        ("prompt_lens", ["thinking_budget", "thinking_state"], "given with rules.thinking_budget"),
        ("status.thinking_state", ["think_end_token_id"], "given with any thinking rule"),
        ("status.thinking_state", ["inject_token_ids"], "given with any thinking rule"),
        ("status.finish_reasons", ["stop_token_ids"], "given with any rule that ends a request"),
        ("status.finish_reasons", ["max_lens"], "given with any rule that ends a request"),
    ],
)
def test_rules_require_their_arguments(
    device: str, absent: str, present: list[str], message: str
) -> None:
    arguments = random_batch(2, 2)
    names = ["output_token_ids", "slots", "token_ids", "lens", *present]
    with pytest.raises(ValueError, match=f"^commit: {absent} must be {message}"):
        by_field(sampling.commit)(**{name: arguments[name].to(device) for name in names})


def test_documented_loop_runs() -> None:
    text = (Path(__file__).resolve().parent.parent / "docs" / "ops.md").read_text()
    (code,) = [
        block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "commit" in block
    ]
    exec(compile(code, "docs/ops.md", "exec"), {})
