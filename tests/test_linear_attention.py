# SPDX-License-Identifier: Apache-2.0
"""Linear attention ops equal their references, however a text is split into steps."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import specops
import torch
from shared_fixtures import assert_all_close, assert_close, expect_fault
from specops import linear_attention, reference
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUM_SLOTS, TAPS, WINDOW = 7, 4, 6  # positions per slot: WINDOW of states, TAPS more of inputs
CHANNELS = 70


class Rows(NamedTuple):
    """The rows of one request in a step."""

    slot: int
    begin: int
    count: int


# Ragged requests: without rows, without a slot, from the beginning of a text and from within.
STEP = [Rows(3, 0, 1), Rows(1, 5, 0), Rows(6, 2, 9), Rows(-1, 4, 2), Rows(0, 0, 12), Rows(2, 30, 3)]
SPARE = 3  # rows without a request


def indices(step: Sequence[Rows], device: str) -> dict[str, Tensor]:
    ends = torch.tensor([0, *(one.count for one in step)]).cumsum(0)
    ints = {
        "slots": torch.tensor([one.slot for one in step]),
        "qo_indptr": ends,
        "kv_lens": torch.tensor([one.begin + one.count for one in step]),
    }
    return {name: values.int().to(device) for name, values in ints.items()}


def poisoned(step: Sequence[Rows], shape: tuple[int, ...], back: int, dtype: torch.dtype) -> Tensor:
    """Return states of NaN, except at the `back` positions before the rows of each request."""
    states = torch.full(shape, torch.nan, dtype=dtype)
    for slot, begin, _ in step:
        for position in range(max(begin - back, 0), begin) if slot >= 0 else ():
            states[slot, position % shape[1]] = torch.randn(shape[2:]).to(dtype)
    return states


DELTA, SPACE = "gated_delta_rule", "selective_state_update"


class Heads(NamedTuple):
    """Op with one state per head, and its sizes; keys are groups of the state space."""

    op: str
    keys: int
    values: int
    key_dim: int
    value_dim: int
    has_channels: bool = False  # whether each key channel has its own decay

    @property
    def num_row_inputs(self) -> int:
        """Number of arguments with one entry per row."""
        return {DELTA: 5, SPACE: 4}[self.op]

    def run(self, *args: Tensor, **options: Any) -> Tensor:
        """Call the op."""
        out: Tensor = getattr(linear_attention, self.op)(*args, **options)
        return out

    def reference(self, *args: Tensor) -> tuple[Tensor, Tensor]:
        """Call the op's reference."""
        out: tuple[Tensor, Tensor] = getattr(reference, self.op)(*args)
        return out

    def inputs(self, rows: int, dtype: torch.dtype, device: str) -> list[Tensor]:
        """Return the inputs of rows with poison between the rows, then those of heads."""
        keys, values, each = (
            (self.keys, self.key_dim),
            (self.values, self.value_dim),
            (self.values,),
        )
        decays = (self.values, self.key_dim) if self.has_channels else each
        shapes: dict[str, tuple[tuple[int, ...], ...]] = {
            DELTA: (keys, keys, values, decays, each),
            SPACE: (values, each, keys, keys),
        }
        made = []
        for shape in shapes[self.op]:
            size = torch.Size(shape).numel()
            wide = torch.full((rows, size + 5), torch.nan, dtype=dtype)
            wide[:, 2 : 2 + size] = torch.randn(rows, size).to(dtype)
            made.append(wide.to(device)[:, 2 : 2 + size].unflatten(1, shape))
        a_log = torch.rand(self.values).mul(4).log().to(device)
        others = [torch.randn(decays).to(device) for _ in range(6 - self.num_row_inputs)]
        return [*made, a_log, *others]

    @property
    def states(self) -> tuple[int, ...]:
        """Shape of the states."""
        return (NUM_SLOTS, WINDOW, self.values, self.key_dim, self.value_dim)


SMALL = [
    Heads(DELTA, 1, 1, 16, 16),
    Heads(DELTA, 1, 1, 16, 16, has_channels=True),
    Heads(SPACE, 1, 1, 16, 16),
]
HEADS = [
    *SMALL,
    Heads(DELTA, 2, 6, 48, 80),
    Heads(DELTA, 2, 6, 48, 80, has_channels=True),
    Heads(SPACE, 2, 6, 48, 80),
]
WIDE = [
    Heads(DELTA, 2, 2, 128, 32),
    Heads(DELTA, 2, 2, 128, 32, has_channels=True),
    Heads(SPACE, 1, 2, 128, 64),
    Heads(SPACE, 1, 2, 208, 32),
]


def check_states(got: Tensor, want: Tensor, before: Tensor) -> None:
    """Check that a step wrote the elements that the reference writes, and no other bit."""
    untouched = torch.equal(want.nan_to_num(9), before.nan_to_num(9))
    assert not untouched and torch.equal(got.isnan(), want.isnan())
    unchanged = want.nan_to_num(9) == before.nan_to_num(9)
    assert torch.equal(got.nan_to_num(9)[unchanged], before.nan_to_num(9)[unchanged])


@pytest.mark.no_bf16
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "taps,channels,has_bias",
    [(TAPS, CHANNELS, False), (TAPS, CHANNELS, True), (1, 16, True), (8, 130, False)],
)
@pytest.mark.pairwise
def test_causal_conv1d(
    device: str, isa: str, dtype: torch.dtype, taps: int, channels: int, has_bias: bool
) -> None:
    rows = sum(one.count for one in STEP) + SPARE
    wide = torch.full((rows, channels + 6), torch.nan, dtype=dtype)
    wide[:, 3:-3] = torch.randn(rows, channels).to(dtype)
    weight = torch.randn(taps, channels).to(dtype)
    bias = torch.randn(channels).to(dtype) if has_bias else None
    before = poisoned(STEP, (NUM_SLOTS, WINDOW + taps, channels), taps - 1, dtype)
    arguments = indices(STEP, "cpu")
    given = (*arguments.values(), bias)
    want, want_states = reference.causal_conv1d(wide[:, 3:-3], weight, before, *given)
    states = before.clone().to(device)
    got = linear_attention.causal_conv1d(
        wide.to(device)[:, 3:-3],
        weight.to(device),
        states,
        **indices(STEP, device),
        bias=None if bias is None else bias.to(device),
    )
    assert torch.equal(states.cpu().nan_to_num(9), want_states.nan_to_num(9))
    unowned = [*range(10, 12), *range(rows - SPARE, rows)]
    assert (got[unowned] == 0).all() and (want[unowned] == 0).all()

    def op(x: Tensor, weight: Tensor, states: Tensor) -> Tensor:
        return reference.causal_conv1d(x, weight, states, *given)[0]

    assert_close(op, got.cpu(), wide[:, 3:-3], weight, before)


@pytest.mark.no_bf16
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [*HEADS, *WIDE])
@pytest.mark.pairwise
def test_states_of_heads(device: str, isa: str, dtype: torch.dtype, heads: Heads) -> None:
    rows = sum(one.count for one in STEP) + SPARE
    inputs = heads.inputs(rows, dtype, "cpu")
    before = poisoned(STEP, heads.states, 1, torch.float32)
    arguments = indices(STEP, "cpu")
    want, want_states = heads.reference(*inputs, before, *arguments.values())
    states = before.clone().to(device)
    moved = [one.to(device) for one in inputs]
    got = heads.run(*moved, states, **indices(STEP, device))
    check_states(states.cpu(), want_states, before)
    unowned = [*range(10, 12), *range(rows - SPARE, rows)]
    assert (got[unowned] == 0).all() and (want[unowned] == 0).all()

    def op(*args: Tensor) -> list[Tensor]:
        out, new_states = heads.reference(*args, *arguments.values())
        return [out, new_states.nan_to_num(0)]

    assert_all_close(op, [got.cpu(), states.cpu().nan_to_num(0)], *inputs, before)


# Ways to split a text of 24 positions into steps: accepted rows, and rejected ones behind them.
LENGTH = 24
SPLITS: dict[str, list[tuple[int, int]]] = {
    "one by one": [(1, 0)] * LENGTH,
    "chunks": [(7, 0), (1, 0), (13, 0), (3, 0)],
    # Every number of 5 drafts is accepted; steps without drafts follow rejections and acceptances.
    "drafts": [
        (4, 0),
        (1, 5),
        (1, 0),
        (2, 4),
        (3, 3),
        (1, 0),
        (4, 2),
        (5, 1),
        (1, 0),
        (1, 3),
        (1, 0),
    ],
    "five by five": [(5, 0)] * 4 + [(4, 1)],
}

Op = Callable[[list[Tensor], dict[str, Tensor]], Tensor]


def run_in_steps(op: Op, text: list[Tensor], junk: list[Tensor], split: str, other: int) -> Tensor:
    """Compute the rows of a text step by step, beside another request if `other` is above 0."""
    parts, begin = [], 0
    for accepted, rejected in SPLITS[split]:
        end = begin + accepted
        neighbors = [Rows(5, other, 2)] * (other > 0)
        step = [*neighbors, Rows(2, begin, accepted + rejected)]
        rows = [
            torch.cat([own[:2]] * (other > 0) + [one[begin:end], own[:rejected]])
            for one, own in zip(text, junk, strict=True)
        ]
        out = op(rows, indices(step, str(rows[0].device)))
        first = 2 * (other > 0)
        parts.append(out[first : first + accepted])
        begin = end
    assert begin == LENGTH
    return torch.cat(parts)


def check_bits(
    make: Callable[[], Op], text: list[Tensor], junk: list[Tensor], on_cuda: bool
) -> None:
    want = make()(text, indices([Rows(2, 0, LENGTH)], str(text[0].device)))
    for threads in (1,) if on_cuda else (1, 2, 3):
        specops.set_num_threads(threads)
        for split in SPLITS:
            assert torch.equal(run_in_steps(make(), text, junk, split, 0), want)
    assert torch.equal(run_in_steps(make(), text, junk, "drafts", 9), want)


@pytest.mark.no_bf16
@pytest.mark.parametrize("dtype", DTYPES)
def test_convolved_rows_keep_their_bits(
    device: str, isa: str, on_cuda: bool, dtype: torch.dtype
) -> None:
    """Rows are equal in any split into steps, behind rejected drafts and beside other requests."""
    weight = torch.randn(TAPS, CHANNELS).to(dtype).to(device)

    def make() -> Op:
        shape = (NUM_SLOTS, WINDOW - 1 + TAPS - 1, CHANNELS)
        states = torch.full(shape, 3.0, dtype=dtype, device=device)

        def op(rows: list[Tensor], arguments: dict[str, Tensor]) -> Tensor:
            return linear_attention.causal_conv1d(rows[0], weight, states, **arguments)

        return op

    text, junk = ([torch.randn(rows, CHANNELS).to(dtype).to(device)] for rows in (LENGTH, WINDOW))
    check_bits(make, text, junk, on_cuda)


@pytest.mark.no_bf16
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.pairwise
def test_rows_of_states_keep_their_bits(
    device: str, isa: str, on_cuda: bool, dtype: torch.dtype, heads: Heads
) -> None:
    """Rows are equal in any split into steps, behind rejected drafts and beside other requests."""
    inputs, count = heads.inputs(LENGTH, dtype, device), heads.num_row_inputs
    text, of_heads = inputs[:count], inputs[count:]
    junk = heads.inputs(WINDOW, dtype, device)[:count]

    def make() -> Op:
        states = torch.full(heads.states, 3.0, device=device)

        def op(rows: list[Tensor], arguments: dict[str, Tensor]) -> Tensor:
            return heads.run(*rows, *of_heads, states, **arguments)

        return op

    check_bits(make, text, junk, on_cuda)


@pytest.mark.no_bf16
@pytest.mark.parametrize("heads", SMALL)
def test_new_request_ignores_the_states_of_its_slot(device: str, isa: str, heads: Heads) -> None:
    """NaN states of an earlier request have no effect."""
    inputs = heads.inputs(3, torch.float32, device)
    arguments = indices([Rows(1, 0, 3)], device)
    outs = []
    for value in (0.0, torch.nan):
        states = torch.full(heads.states, value, device=device)
        conv = torch.full((NUM_SLOTS, 3, 16), value, device=device)
        mixed = linear_attention.causal_conv1d(
            inputs[2].flatten(1), torch.ones(TAPS, 16, device=device), conv, **arguments
        )
        outs += [mixed, heads.run(*inputs, states, **arguments)]
    assert torch.equal(outs[0], outs[2]) and torch.equal(outs[1], outs[3])


@pytest.mark.no_bf16
@pytest.mark.parametrize("heads", SMALL)
@pytest.mark.parametrize("step,rows", [([], 0), ([], 2), ([Rows(0, 3, 0), Rows(1, 0, 0)], 0)])
def test_steps_without_rows_change_nothing(
    device: str, isa: str, step: list[Rows], rows: int, heads: Heads
) -> None:
    states = torch.ones(heads.states, device=device)
    conv = torch.ones(NUM_SLOTS, WINDOW, 16, device=device)
    inputs, arguments = heads.inputs(rows, torch.float32, device), indices(step, device)
    out = heads.run(*inputs, states, **arguments)
    x, weight = torch.ones(rows, 16, device=device), torch.ones(TAPS, 16, device=device)
    mixed = linear_attention.causal_conv1d(x, weight, conv, **arguments)
    assert out.shape == (rows, 1, 16) and mixed.shape == (rows, 16)
    assert not out.any() and not mixed.any() and (states == 1).all() and (conv == 1).all()


@pytest.mark.parametrize("has_channels", [False, True])
def test_decays_have_the_shape_of_their_bias(device: str, has_channels: bool) -> None:
    """`a` decides between a decay per head and one per key channel."""
    heads = Heads(DELTA, 1, 2, 16, 16, has_channels)
    inputs, states = heads.inputs(3, torch.float32, device), torch.ones(heads.states, device=device)
    inputs[6] = torch.zeros((2,) if has_channels else (2, 16), device=device)
    shape = r"\[num_value_heads=2, key_dim=16\]" if has_channels else r"\[num_value_heads=2\]"
    with pytest.raises(ValueError, match=f"dt_bias must be float32 {shape}, got"):
        heads.run(*inputs, states, **indices([Rows(1, 0, 3)], device))
    assert (states == 1).all()


FAULTS: dict[str, tuple[str, list[int], str]] = {
    "slot above the range": ("slots", [NUM_SLOTS, 1], r"slots.* must be -1 or a slot of states"),
    "slot below -1": ("slots", [-2, 1], r"slots.* must be -1 or a slot of states"),
    "negative entry": ("qo_indptr", [-1, 2, 4], r"qo_indptr.* must be non-decreasing from 0"),
    "falling entry": ("qo_indptr", [0, 3, 2], r"qo_indptr.* must be non-decreasing from 0"),
    "missing rows": ("qo_indptr", [0, 2, 5], r"qo_indptr.* at most the rows"),
    "fewer tokens than rows": ("kv_lens", [2, 1], r"kv_lens.* must be at least the request's"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_invalid_requests_are_reported(device: str, on_cuda: bool, fault: str) -> None:
    """On a CPU, no state changes."""
    name, values, words = FAULTS[fault]
    x, weight = torch.ones(4, 16, device=device), torch.ones(TAPS, 16, device=device)
    arguments = indices([Rows(0, 1, 2), Rows(1, 4, 2)], device)
    arguments[name] = torch.tensor(values, dtype=torch.int32, device=device)
    conv = torch.ones(NUM_SLOTS, WINDOW, 16, device=device)
    calls: list[tuple[str, Callable[..., Any], list[Tensor], Tensor]] = [
        ("causal_conv1d", linear_attention.causal_conv1d, [x, weight], conv),
    ]
    for heads in SMALL:
        inputs = heads.inputs(4, torch.float32, device)
        calls.append((heads.op, heads.run, inputs, torch.ones(heads.states, device=device)))
    for op, call, args, own in calls:
        with expect_fault(on_cuda, f"{op}: {words}"):
            call(*args, own, **arguments)
        if not on_cuda:
            assert (own == 1).all()
