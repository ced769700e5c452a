# SPDX-License-Identifier: Apache-2.0
"""Replacements of the Triton kernels of vLLM's V2 model runner, without vLLM.

The state holds four requests in rows 0 to 3; the step has requests 2, 0 and 3, in this order.
"""

import pytest
import torch
from specops.integrations.vllm import v2_kernels as kernels
from torch import Tensor

STEP = torch.tensor([2, 0, 3])
STARTS = torch.tensor([0, 3, 4, 8])  # rows of the step: 3, 1 and 4
COMPUTED = torch.tensor([7, 0, 2, 10])
TEXTS = torch.arange(4 * 20, dtype=torch.int32).view(4, 20)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_positions_continue_each_request() -> None:
    positions, lens = torch.full((10,), -7), torch.full((5,), 99, dtype=torch.int32)
    kernels.prepare_pos_seq_lens(positions, lens, STEP, STARTS, COMPUTED, 5, 1024)
    assert positions.tolist() == [2, 3, 4, 7, 10, 11, 12, 13, -7, -7]
    assert lens.tolist() == [5, 8, 14, 0, 0]


def test_prompts_are_copied_and_decoding_requests_are_left_alone() -> None:
    inputs, ahead = torch.full((10,), -7, dtype=torch.int32), torch.full((2, 4), -7)
    lens = ints(7, 0, 6, 16)  # request 0 has its whole prompt
    kernels.prepare_prefill_inputs(
        inputs, ahead, 4, 2, STEP, STARTS, TEXTS, 20, lens, COMPUTED, 1024, 2
    )
    assert inputs.tolist() == [42, 43, 44, -7, 70, 71, 72, 73, -7, -7]
    assert ahead.T.tolist() == [[-7, -7], [-7, -7], [45, 0], [74, 75]]


def test_last_tokens_and_drafts_follow_the_prompts() -> None:
    """Request 2 is in its prompt, request 0 has no drafts, request 3 has three."""
    inputs = torch.full((8,), -7, dtype=torch.int32)
    indices = torch.full((6,), -7)
    last, drafts = torch.tensor([[5], [6], [7], [8]]), torch.arange(16).view(4, 4)
    kernels.combine_sampled_and_draft_tokens(
        inputs,
        STEP,
        last,
        STARTS,
        ints(5, 8, 14),
        ints(7, 0, 9, 10),
        drafts,
        4,
        torch.tensor([0, 1, 2, 6]),
        indices,
        8,
    )
    assert inputs.tolist() == [-7, -7, -7, 5, 8, 12, 13, 14]
    assert indices.tolist() == [2, 3, 4, 5, 6, 7]


def test_sampled_tokens_are_appended() -> None:
    computed, last, texts = COMPUTED.clone(), torch.zeros(4, 1, dtype=torch.int64), TEXTS.clone()
    total = ints(8, 0, 9, 11)
    sampled = torch.tensor([[1, -1, -1, -1], [2, -1, -1, -1], [3, 4, -1, -1]])
    kernels.post_update(
        STEP,
        computed,
        last,
        None,
        0,
        sampled,
        4,
        ints(0, 1, 2),
        ints(0, 0, 2),
        STARTS,
        texts,
        20,
        total,
    )
    assert computed.tolist() == [8, 0, 5, 12]
    assert last[:, 0].tolist() == [2, 0, 0, 4]
    assert total.tolist() == [9, 0, 9, 13]
    assert texts[0, 7:10].tolist() == [7, 2, 9] and texts[3, 10:14].tolist() == [70, 3, 4, 73]
    assert torch.equal(texts[1:3], TEXTS[1:3])


def test_rows_of_logits_name_their_request() -> None:
    rows, local = torch.full((6,), -7), torch.full((6,), -7, dtype=torch.int32)
    kernels.expand_idx_mapping(STEP, rows, local, torch.tensor([0, 1, 2, 6]), 8)
    assert rows.tolist() == [2, 0, 3, 3, 3, 3]
    assert local.tolist() == [0, 0, 0, 1, 2, 3]


def test_blocks_and_slots_are_those_of_the_request() -> None:
    tables = [torch.arange(100, 140, dtype=torch.int32).view(4, 10) for _ in range(2)]
    copies = [torch.zeros(4, 10, dtype=torch.int32) for _ in range(2)]
    addresses = torch.tensor([table.data_ptr() for table in tables], dtype=torch.uint64)
    of_copies = torch.tensor([table.data_ptr() for table in copies], dtype=torch.uint64)
    widths = torch.tensor([10, 10])
    counts = torch.tensor([[3, 0, 2, 4], [1, 0, 2, 0]], dtype=torch.int32)
    kernels.gather_block_tables(STEP, addresses, of_copies, widths, counts, 4, 3, 1024)
    assert copies[0][:3, :4].tolist() == [
        [120, 121, 0, 0],
        [100, 101, 102, 0],
        [130, 131, 132, 133],
    ]
    assert copies[1][:3, :2].tolist() == [[120, 121], [100, 0], [0, 0]]
    slots = torch.full((2, 10), -7)
    positions = torch.tensor([2, 3, 4, 7, 10, 11, 12, 13])
    sizes = ints(4, 16)
    on = torch.tensor([True, False])
    given = (STEP, STARTS, positions, addresses, widths, sizes, on, on, slots, 10, 0)
    kernels.compute_slot_mappings(10, *given, 1, 1, -1, 1024)
    assert slots[0].tolist() == [482, 483, 484, 407, 530, 531, 532, 533, -1, -1]
    assert slots[1].tolist() == [-1] * 10


@pytest.mark.parametrize("kind", ["one row", "rows", "tables"])
def test_staged_pieces_are_written(kind: str) -> None:
    """Two tokens go to row 2 and one to row 0, in a table of each group or in one."""
    shape = (12,) if kind == "one row" else (3, 4)
    tables = [torch.zeros(shape, dtype=torch.int32) for _ in range(2)]
    pieces = (ints(2, 0), ints(1, 0), ints(5, 6, 7), ints(2, 3))
    if kind == "tables":
        addresses = torch.tensor([table.data_ptr() for table in tables], dtype=torch.uint64)
        strides = torch.tensor([4, 4])
        kernels.apply_write(addresses, strides, *pieces, ints(1, 0), 1024, True)
        assert tables[1].tolist() == [[0] * 4, [0] * 4, [0, 5, 6, 0]]
        assert tables[0].tolist() == [[7, 0, 0, 0], [0] * 4, [0] * 4]
    else:
        kernels.apply_write(tables[0], tables[0].stride(0), *pieces, None, 1024, False)
        expected = [[7, 0, 0, 5, 6], [7, 0, 0, 0, 0, 0, 0, 0, 0, 5, 6]][kind == "rows"]
        flat = tables[0].flatten().tolist()
        assert flat[: len(expected)] == expected and not any(flat[len(expected) :])


def test_grammar_forbids_tokens_of_its_own_rows() -> None:
    """Request 1 of the step has two rows, and masks of three positions."""
    logits = torch.zeros(3, 40)
    masks = torch.tensor([[-1, 0], [2, 1], [0, 0]], dtype=torch.int32)
    starts = torch.tensor([0, 1, 3])
    kernels.apply_grammar_bitmask(logits, 40, ints(3, 4, 5), starts, masks, 2, 40, 3, 8192)
    assert torch.isfinite(logits[0]).all()
    assert torch.isfinite(logits[1]).nonzero()[:, 0].tolist() == list(range(32))
    assert torch.isfinite(logits[2]).nonzero()[:, 0].tolist() == [1, 32]


def test_logprobs_of_a_row_do_not_depend_on_others() -> None:
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(1)).bfloat16()
    ids = logits.topk(3).indices
    whole, alone = torch.empty(5, 3), torch.empty(1, 3)
    kernels.topk_log_softmax(whole, logits, 1000, ids, 3, 3, 1000, 1024, 4)
    for row in range(5):
        kernels.topk_log_softmax(
            alone, logits[row : row + 1], 1000, ids[row : row + 1], 3, 3, 1000, 1, 1
        )
        assert torch.equal(alone[0], whole[row])
    torch.testing.assert_close(whole, logits.float().log_softmax(-1).gather(1, ids))
    found = torch.empty(5, dtype=torch.int64)
    kernels.ranks(found, logits, 1000, ids[:, 1].contiguous(), 1000, 1024)
    assert found.tolist() == (logits >= logits.gather(1, ids[:, 1:2])).sum(1).tolist()
