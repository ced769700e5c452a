# SPDX-License-Identifier: Apache-2.0
"""Ragged batches and draft batches in plain PyTorch."""

from itertools import pairwise

import torch
from torch import Tensor


def prepare_batch(
    qo_lens: Tensor,
    kv_lens: Tensor,
    output_modes: Tensor,
    kv_indptr: Tensor | None = None,
    kv_indices: Tensor | None = None,
    *,
    page_size: int | None = None,
    total_rows: int,
    num_output_rows: int,
    max_seq_len: int | None = None,
) -> dict[str, Tensor]:
    """Return the arrays of `batching.BatchIndices` by name, built row by row."""
    row_to_request: list[int] = []
    positions: list[int] = []
    cache_slots: list[int] = []
    output_rows: list[int] = []
    output_row_to_request: list[int] = []
    output_padding_offset: list[int] = []
    output_cum_offsets: list[int] = []
    qo_indptr, output_indptr = [0], [0]
    for request, (qo_len, kv_len, mode) in enumerate(
        zip(qo_lens.tolist(), kv_lens.tolist(), output_modes.tolist(), strict=True)
    ):
        first_row = len(row_to_request)
        for position in range(kv_len - qo_len, kv_len):
            row_to_request.append(request)
            positions.append(position)
            if kv_indptr is None or kv_indices is None or page_size is None:
                cache_slots.append(-1)
                continue
            page = int(kv_indices[int(kv_indptr[request]) + position // page_size])
            cache_slots.append(page * page_size + position % page_size)
        rows = list(range(first_row, first_row + qo_len))
        rows = {0: [], 1: rows[-1:], 2: rows}[mode]
        padding = request * (max_seq_len or 0) - len(output_rows)
        output_cum_offsets.append(padding)
        output_rows += rows
        output_row_to_request += [request] * len(rows)
        output_padding_offset += [padding] * len(rows)
        qo_indptr.append(len(row_to_request))
        output_indptr.append(len(output_rows))

    def padded(values: list[int], size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values + [-1] * (size - len(values)), dtype=dtype)

    indices = {
        "qo_indptr": torch.tensor(qo_indptr, dtype=torch.int32),
        "row_to_request": padded(row_to_request, total_rows),
        "positions": padded(positions, total_rows),
        "cache_slots": padded(cache_slots, total_rows, torch.int64),
        "output_indptr": torch.tensor(output_indptr, dtype=torch.int32),
        "output_rows": padded(output_rows, num_output_rows),
        "output_row_to_request": padded(output_row_to_request, num_output_rows),
    }
    if max_seq_len is not None:
        indices["output_padding_offset"] = padded(output_padding_offset, num_output_rows)
        indices["output_cum_offsets"] = torch.tensor(output_cum_offsets, dtype=torch.int32)
    return indices


def gather_input_ids(
    row_to_request: Tensor,
    positions: Tensor,
    slots: Tensor,
    token_ids: Tensor,
    lens: Tensor,
    draft_token_ids: Tensor | None = None,
) -> Tensor:
    """Return `(text + drafts)[position]` row by row, with 0 for padding."""
    out = torch.zeros_like(positions)
    for row, request in enumerate(row_to_request.tolist()):
        if request < 0:
            continue
        slot = int(slots[request])
        tokens = token_ids[slot, : int(lens[slot])].tolist()
        if draft_token_ids is not None:
            tokens += draft_token_ids[request].tolist()
        out[row] = tokens[int(positions[row])]
    return out


def gather_output_rows(hidden: Tensor, output_rows: Tensor) -> Tensor:
    """Return `hidden[output_rows]`, with zeros where the index is -1."""
    padded = torch.cat([hidden, hidden.new_zeros(1, hidden.shape[1])])
    return padded[output_rows.long()]


def build_tree(parents: Tensor, num_draft_tokens: Tensor, positions: Tensor) -> dict[str, Tensor]:
    """Return the arrays of `batching.DraftTree` by name, from each node's path to the root."""
    batch, nodes = parents.shape
    tree = {
        "depths": torch.full((batch, nodes + 1), -1),
        "row_positions": torch.full((batch, nodes + 1), -1),
        "ancestor_mask": torch.zeros(batch, nodes + 1, nodes // 32 + 1).long(),
        "first_child": torch.full((batch, nodes + 1), -1),
        "next_sibling": torch.full((batch, nodes), -1),
        "sibling_index": torch.full((batch, nodes), -1),
    }
    for b, count in enumerate(num_draft_tokens.tolist()):
        above = parents[b, :count].tolist()
        for row in range(count + 1):
            path = [row]
            while path[-1] != 0:
                path.append(above[path[-1] - 1] + 1)
            tree["depths"][b, row] = len(path) - 1
            tree["row_positions"][b, row] = int(positions[b]) + len(path) - 1
            for ancestor in path:
                tree["ancestor_mask"][b, row, ancestor // 32] += 1 << ancestor % 32
            children = [node for node in range(count) if above[node] == row - 1]
            tree["first_child"][b, row] = children[0] if children else -1
            for index, child in enumerate(children):
                following = children[index + 1 :]
                tree["next_sibling"][b, child] = following[0] if following else -1
                tree["sibling_index"][b, child] = index
    return {name: values.int() for name, values in tree.items()}


def find_shared_prefixes(
    kv_indptr: Tensor,
    kv_indices: Tensor,
    *,
    page_size: int,
    leaf_tokens: int,
    max_levels: int = 8,
) -> dict[str, Tensor]:
    """Return the arrays of `batching.SharedPrefixes` by name, grouping by leaves level by level."""
    ends, per_leaf = kv_indptr.tolist(), leaf_tokens // page_size
    lists = [tuple(kv_indices[begin:end].tolist()) for begin, end in pairwise(ends)]
    order = sorted(range(len(lists)), key=lambda one: (lists[one], one))
    # starts[i]: for each leaf of request order[i], its pages up to the end of that leaf.
    starts = [
        [lists[b][:end] for end in range(per_leaf, len(lists[b]) + 1, per_leaf)] for b in order
    ]
    shared = [0] * len(order)  # leaves that each request's group shares
    leaders, lens, saved = [], [], 0
    for _ in range(max_levels):
        groups = [
            [
                b
                for b, other in enumerate(starts)
                if own[count : count + 1] == other[count : count + 1]
            ]
            if own[count:]
            else [a]
            for a, (own, count) in enumerate(zip(starts, shared, strict=True))
        ]
        if all(len(group) == 1 for group in groups):
            break
        for a, group in enumerate(groups):
            if len(group) > 1:
                common = len(set.intersection(*(set(starts[b]) for b in group)))
                saved += (common - shared[a]) * (a != group[0])
                shared[a] = common
        leaders.append([group[0] for group in groups])
        lens.append([count * len(group[1:2]) for count, group in zip(shared, groups, strict=True)])
    shape = (len(leaders), len(order))
    return {
        "order": torch.tensor(order, dtype=torch.int32),
        "prefix_leaders": torch.tensor(leaders, dtype=torch.int32).view(shape),
        "prefix_lens": torch.tensor(lens, dtype=torch.int32).view(shape) * leaf_tokens,
        "counts": torch.tensor([len(leaders), saved * leaf_tokens]),
    }


def preorder(parents: list[int]) -> tuple[list[int], list[int]]:
    """Return `batching.Preorder` of all nodes, by sorting their paths from the root."""
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    nodes = [path[-1] for path in sorted(paths)]
    return nodes, [nodes.index(parents[node]) if parents[node] >= 0 else -1 for node in nodes]


def tree_chains(
    parents: Tensor,
    num_draft_tokens: Tensor,
    qo_lens: Tensor,
    kv_lens: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    spare_pages: Tensor,
    *,
    page_size: int,
) -> dict[str, Tensor]:
    """Return the arrays of `batching.TreeChains` by name, from the root-to-leaf paths."""
    spare = iter(spare_pages.tolist())
    chain_indptr, qo, kv, pages_of, copies = [0], [], [], [], []
    for b, nodes in enumerate(num_draft_tokens.tolist()):
        above, pages = parents[b, :nodes].tolist(), kv_indices[int(kv_indptr[b]) :].tolist()
        root, rows, seen = int(kv_lens[b]) - nodes - 1, int(qo_lens[b]) - nodes, 0
        leaves = [node for node in range(nodes) if node not in above] if nodes else [-1]
        for leaf in leaves if int(qo_lens[b]) else []:
            path = [leaf] if nodes else []
            while path and above[path[0]] >= 0:
                path.insert(0, above[path[0]])
            tokens = [*range(root + 1), *(root + 1 + node for node in path)]
            moved = [place for place, token in enumerate(tokens) if place != token]
            first = moved[0] // page_size if moved else -(-len(tokens) // page_size)
            own = [next(spare) for _ in range(first, -(-len(tokens) // page_size))]
            pages_of.append(pages[:first] + own)
            for place in range(first * page_size, len(tokens)):
                for page_ids, token in ((pages, tokens[place]), (pages_of[-1], place)):
                    copies.append(page_ids[token // page_size] * page_size + token % page_size)
            qo.append(rows + sum(node >= seen for node in path))
            kv.append(len(tokens))
            rows, seen = 0, leaf + 1
        chain_indptr.append(len(qo))
    lengths = torch.tensor([0, *map(len, pages_of)])
    slots = torch.tensor(copies, dtype=torch.int64).view(-1, 2)
    return {
        "chain_indptr": torch.tensor(chain_indptr).int(),
        "qo_lens": torch.tensor(qo).int(),
        "kv_lens": torch.tensor(kv).int(),
        "kv_indptr": lengths.cumsum(0).int(),
        "kv_indices": torch.tensor([page for pages in pages_of for page in pages]).int(),
        "from_slots": slots[:, 0].contiguous(),
        "to_slots": slots[:, 1].contiguous(),
    }


def prepare_draft_batch(
    qo_indptr: Tensor,
    kv_lens: Tensor,
    slots: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    lens: Tensor,
    max_draft_tokens: Tensor,
    *,
    page_size: int,
    total_rows: int,
    redraft_lens: Tensor,
    window: int = 0,
) -> dict[str, Tensor]:
    """Return the arrays of `batching.DraftIndices` by name.

    There is a row for each position whose next token is known.
    """
    rows: list[tuple[int, int, int, int]] = []  # request, position, cache slot, source
    indptr, draft_kv_lens, last_rows, draft_positions = [0], [], [], []
    for b, slot in enumerate(slots.tolist()):
        first_row = int(qo_indptr[b])
        qo_len = int(qo_indptr[b + 1]) - first_row
        known = int(lens[slot]) if slot >= 0 and qo_len > 0 else 0
        begin, kv_len = int(kv_lens[b]) - qo_len, int(kv_lens[b])
        positions = range(begin - int(redraft_lens[b]), min(kv_len, known - 1))
        for position in positions:
            page = int(kv_indices[int(kv_indptr[b]) + position // page_size])
            source = first_row + position - begin
            if position < begin:
                source = -2 - (slot * window + position % window)
            rows.append((b, position, page * page_size + position % page_size, source))
        any_rows = len(positions) > 0
        drafts = any_rows and positions[-1] == known - 2 and int(max_draft_tokens[slot]) > 0
        draft_kv_lens.append(positions.stop if any_rows else 0)
        last_rows.append(len(rows) - 1 if drafts else -1)
        draft_positions.append(known if drafts else 0)
        indptr.append(len(rows))
    return _draft_indices(
        rows, indptr, draft_kv_lens, last_rows, draft_positions, total_rows=total_rows
    )


def advance_draft_batch(
    sampled_token_ids: Tensor,
    last_rows: Tensor,
    slots: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    lens: Tensor,
    max_draft_tokens: Tensor,
    *,
    page_size: int,
    step: int,
    ahead: int,
    draft_token_ids: Tensor,
    num_draft_tokens: Tensor,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return (drafts, draft counts, arrays of `batching.DraftIndices` of the next pass by name)."""
    drafts, counts = draft_token_ids.clone(), num_draft_tokens.clone()
    rows: list[tuple[int, int, int, int]] = []
    indptr, draft_kv_lens, next_last_rows, draft_positions = [0], [], [], []
    for b, slot in enumerate(slots.tolist()):
        source, position, page = int(last_rows[b]), -1, -1
        if slot >= 0 and step == 0:
            drafts[slot], counts[slot] = -1, 0
        if slot >= 0 and source >= 0 and step < int(max_draft_tokens[slot]):
            drafts[slot, step], counts[slot] = sampled_token_ids[b], step + 1
            if step + 1 < min(int(max_draft_tokens[slot]), drafts.shape[1]):
                position = int(lens[slot]) + step - ahead
                pages = kv_indices[int(kv_indptr[b]) : int(kv_indptr[b + 1])].tolist()
                page = (pages + [-1] * (position + 1))[position // page_size]
        if page >= 0:
            rows.append((b, position, page * page_size + position % page_size, source))
        draft_kv_lens.append(position + 1 if page >= 0 else 0)
        next_last_rows.append(len(rows) - 1 if page >= 0 else -1)
        draft_positions.append(int(lens[slot]) + step + 1 if page >= 0 else 0)
        indptr.append(len(rows))
    following = _draft_indices(
        rows, indptr, draft_kv_lens, next_last_rows, draft_positions, total_rows=len(slots)
    )
    return drafts, counts, following


def _draft_indices(
    rows: list[tuple[int, int, int, int]],
    indptr: list[int],
    kv_lens: list[int],
    last_rows: list[int],
    draft_positions: list[int],
    *,
    total_rows: int,
) -> dict[str, Tensor]:
    padded = torch.tensor(rows + [(-1,) * 4] * (total_rows - len(rows))).reshape(-1, 4)
    return {
        "qo_indptr": torch.tensor(indptr, dtype=torch.int32),
        "kv_lens": torch.tensor(kv_lens, dtype=torch.int32),
        "last_rows": torch.tensor(last_rows, dtype=torch.int32),
        "draft_positions": torch.tensor(draft_positions, dtype=torch.int32),
        "row_to_request": padded[:, 0].int(),
        "positions": padded[:, 1].int(),
        "cache_slots": padded[:, 2].long(),
        "source_rows": padded[:, 3].int(),
    }


def keep_hidden_rows(
    hidden: Tensor, slots: Tensor, qo_indptr: Tensor, kv_lens: Tensor, lens: Tensor, kept: Tensor
) -> Tensor:
    """Return a copy of `kept` after storing the hidden states of positions whose next is known."""
    kept = kept.clone()
    for b, slot in enumerate(slots.tolist()):
        first_row = int(qo_indptr[b])
        begin = int(kv_lens[b]) - (int(qo_indptr[b + 1]) - first_row)
        end = min(int(kv_lens[b]), int(lens[slot]) - 1) if slot >= 0 else begin
        for position in range(begin, end):
            kept[slot, position % kept.shape[1]] = hidden[first_row + position - begin]
    return kept
