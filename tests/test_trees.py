# SPDX-License-Identifier: Apache-2.0
"""Trees of drafts: every row of one is, to the bit, the row that plain decoding would compute."""

import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simt
import specops
import torch
from checkpoints import write_config
from fake_gpu import OP_MODULES, FakeGpu
from pages import check_pages
from shared_fixtures import expect_fault
from specops import attention, batching, reference
from specops.batching import BatchIndices, TreeChains, num_spare_pages
from specops.engine import Completion, Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.engine.drafters.base import Drafter, StepResults, stage_limit
from specops.engine.drafters.trees import (
    Branch,
    first_chain,
    join_chains,
    merge_trees,
    num_chains,
    paths_of,
)
from torch import Tensor

CHAIN = [-1, 0, 1, 2, 3]


def ints(values: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def random_tree(draw: random.Random, nodes: int, reach: int | None = None) -> list[int]:
    """Parents in the order in which a drafter might have thought of them."""
    reach = reach or draw.choice([1, 2, 3, 5, nodes + 1])
    return [max(draw.randrange(node - reach, node), -1) for node in range(nodes)]


def preorder(parents: list[int]) -> list[int]:
    return batching.preorder(parents).parents


def depths(parents: list[int]) -> list[int]:
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def path_to(parents: list[int], node: int) -> list[int]:
    """The nodes from the root down to one; -1 is the root itself."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


# ---- the order of nodes ----


def test_two_chains_make_a_tree() -> None:
    first, second = [5, 6, 7, 8], [5, 6, 9, 8]
    got = join_chains(first, second, 6, 0.5, 0.2)
    assert got == (
        [5, 6, 7, 8, 9, 8],
        [-1, 0, 1, 2, 1, 4],
        [0.5, 0.5, 0.5, 0.5, 0.2, 0.5],
    )
    assert join_chains(first, second, 5, 0.5, 0.4)[:2] == ([5, 6, 7, 9, 8], [-1, 0, 1, 1, 2])
    assert join_chains(first, second, 4, 0.5, 0.2)[:2] == (first, [-1, 0, 1, 2])
    assert join_chains([5], [5, 6], 4, 0.5, 0.2) == ([5, 6], [-1, 0], [0.5, 0.5])
    assert join_chains([5, 6], [5], 4, 0.5, 0.2) == ([5, 6], [-1, 0], [0.5, 0.5])
    assert join_chains([5, 6], [7], 4, 0.5, 0.2)[:2] == ([5, 6, 7], [-1, 0, -1])
    assert join_chains([], [], 4, 0.5, 0.2) == ([], [], [])


def test_random_chains_make_trees() -> None:
    draw = random.Random(2)
    for _ in range(500):
        first, second = ([draw.randrange(2) for _ in range(draw.randrange(9))] for _ in range(2))
        room, chance = draw.randrange(12), draw.random()
        tokens, parents, acceptance_probs = join_chains(first, second, room, chance, draw.random())
        assert len(tokens) == len(parents) == len(acceptance_probs) <= room
        assert all(parent < node for node, parent in enumerate(parents))
        paths = [[tokens[i] for i in path_to(parents, node)] for node in range(len(tokens))]
        assert all(path in (first[: len(path)], second[: len(path)]) for path in paths)
        assert len({tuple(path) for path in paths}) == len(paths)
        together = {tuple(one[: i + 1]) for one in (first, second) for i in range(len(one))}
        assert len(paths) == min(room, len(together))


def test_trees_are_merged() -> None:
    """What two agree on is there once, as sure as the surer one is."""
    first = [((5,), 0.6, 0), ((5, 6), 0.3, 0), ((7,), 0.2, 0)]
    second = [((5,), 0.5, 1), ((5, 6), 0.4, 1), ((5, 6, 8), 0.2, 1), ((9,), 0.2, 1)]
    branches = [Branch(*one) for one in first + second]
    tree, sources = merge_trees(branches, 4)
    assert tree.token_ids == [5, 6, 7, 9] and tree.parents == [-1, 0, -1, -1]
    assert tree.acceptance_probs == [0.6, 0.4 / 0.6, 0.2, 0.2] and sources == [0, 1, 0, 1]
    whole, sources = merge_trees(branches, 9)
    assert whole.token_ids[4:] == [8] and whole.parents[4:] == [1] and sources[4:] == [1]
    assert merge_trees([], 3) == (([], [], []), [])
    assert paths_of([1, 2, 3], [-1, 0, -1], (9,)) == [(9, 1), (9, 1, 2), (9, 3)]


def test_merged_trees_are_the_likeliest_paths() -> None:
    """Of all nodes, in any order of the trees; what a node hangs on is there."""
    draw = random.Random(4)
    for _ in range(300):
        trees = [_random_branches(draw, source) for source in range(draw.randint(1, 3))]
        branches = [one for of_tree in trees for one in of_tree]
        room = draw.randint(1, len(branches))
        tree, _ = merge_trees(branches, room)
        paths = paths_of(tree.token_ids, tree.parents)
        assert all(parent < node for node, parent in enumerate(tree.parents))
        surest: dict[tuple[int, ...], float] = {}
        for one in branches:
            surest[one.path] = max(one.chance, surest.get(one.path, 0.0))
        assert len(set(paths)) == len(paths) == min(room, len(surest))
        left = [chance for path, chance in surest.items() if path not in paths]
        assert max(left, default=0.0) <= min(surest[path] for path in paths)
        again = [one for of_tree in reversed(trees) for one in of_tree]
        assert merge_trees(again, room)[0] == tree


def _random_branches(draw: random.Random, source: int) -> list[Branch]:
    parents = random_tree(draw, draw.randint(1, 8))
    tokens = [10 * draw.randrange(3) + node for node in range(len(parents))]
    paths = paths_of(tokens, parents, behind=())
    acceptance_probs: list[float] = []
    for parent in parents:
        acceptance_probs.append(
            draw.choice([1.0, 0.5, 0.25]) * (acceptance_probs[parent] if parent >= 0 else 1.0)
        )
    return [
        Branch(path, chance, source) for path, chance in zip(paths, acceptance_probs, strict=True)
    ]


def test_preorder_keeps_families_together() -> None:
    tree = batching.preorder([-1, -1, 0, 0, 2, 1])
    assert tree.nodes == [0, 2, 4, 3, 1, 5] and tree.parents == [-1, 0, 1, 0, -1, 4]
    tree = batching.preorder([-1, -1, 0, 0, 2, 1], [0, 1, 3])
    assert tree.nodes == [0, 3, 1] and tree.parents == [-1, 0, -1]
    assert batching.preorder([]).nodes == []
    assert batching.preorder([-1, -1, 0]) == ([0, 2, 1], [-1, 0, -1])  # as documented


@pytest.mark.parametrize(
    "parents,nodes,message",
    [
        ([-1, 1], None, r"parents\[1\] must be -1 or a node before it that is kept, got 1"),
        ([-1, -2], None, r"parents\[1\] must be .*got -2"),
        ([-1, 0, 1], [0, 2], r"parents\[2\] must be .*got 1"),
        ([-1, 0], [1, 0], r"parents\[1\] must be .*got 0"),
        ([-1, -1], [1, 1], r"nodes must be ascending .*got 1 after 1"),
        ([-1, -1], [2], r"nodes must be .*below len\(parents\)=2, got 2 after -1"),
    ],
)
def test_what_preorder_refuses(parents: list[int], nodes: list[int] | None, message: str) -> None:
    with pytest.raises(ValueError, match="^preorder: " + message):
        batching.preorder(parents, nodes)


def test_preorder_of_random_trees() -> None:
    draw = random.Random(1)
    for _ in range(300):
        parents = random_tree(draw, draw.randrange(1, 40))
        tree = batching.preorder(parents)
        assert tree == reference.preorder(parents)
        assert sorted(tree.nodes) == list(range(len(parents)))
        for place, node in enumerate(tree.nodes):
            above = tree.parents[place]
            assert (tree.nodes[above] if above >= 0 else -1) == parents[node]
            below = [p for p in range(len(parents)) if place in path_to(tree.parents, p)]
            assert below == list(range(place, place + len(below)))
        chains = num_chains(tree.parents)
        leaves = set(range(len(parents))) - set(parents)
        assert chains == len(leaves)
        end = first_chain(tree.parents)
        assert tree.parents[:end] == list(range(-1, end - 1))


# ---- trees as chains ----


def tree_batch(
    draw: random.Random, trees: list[list[int]], texts: list[int], page_size: int
) -> dict[str, Any]:
    """Requests whose rows are a root and its nodes; a tree without nodes has up to six rows."""
    nodes = max([len(tree) for tree in trees], default=0)
    parents = torch.full((len(trees), nodes + 1), 2**30, dtype=torch.int32)
    qo_lens, kv_lens, indptr = [], [], [0]
    for b, (tree, text) in enumerate(zip(trees, texts, strict=True)):
        parents[b, : len(tree)] = ints(tree)
        qo_lens.append(1 + len(tree) if tree else min(draw.randrange(6), text + 1))
        kv_lens.append(text + 1 + len(tree))
        indptr.append(indptr[-1] + -(-kv_lens[-1] // page_size) + draw.randrange(2))
    spare = sum(
        num_spare_pages(tree, text + 1 + len(tree), page_size)
        for tree, text in zip(trees, texts, strict=True)
    )
    pages = draw.sample(range(indptr[-1] + spare + 3), indptr[-1] + spare)
    return {
        "parents": parents,
        "num_draft_tokens": ints([len(tree) for tree in trees]),
        "qo_lens": ints(qo_lens),
        "kv_lens": ints(kv_lens),
        "kv_indptr": ints(indptr),
        "kv_indices": ints(pages[: indptr[-1]]),
        "spare_pages": ints(pages[indptr[-1] :]),
        "page_size": page_size,
    }


def room(want: dict[str, Tensor], more: int) -> TreeChains:
    """Arrays with some more elements than are needed."""
    sizes = {name: len(tensor) for name, tensor in want.items()}
    return TreeChains.empty(
        sizes["chain_indptr"] - 1,
        chains=sizes["qo_lens"] + more,
        pages=sizes["kv_indices"] + more,
        copies=sizes["from_slots"] + more,
    )


@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
def test_tree_chains(device: str, page_size: int) -> None:
    """On the host, wherever the chains are computed."""
    draw = random.Random(page_size)
    for seed in range(60):
        count = draw.randrange(6)
        trees = [preorder(random_tree(draw, draw.choice([0, 1, 5, 30]))) for _ in range(count)]
        texts = [draw.choice([0, 3, 14, 15, 16, 90]) for _ in trees]
        case = tree_batch(draw, trees, texts, page_size)
        want = reference.tree_chains(**case)
        used = {name: tensor.clone() for name, tensor in case.items() if name != "page_size"}
        got = vars(batching.tree_chains(**case, out=room(want, more=seed % 3)))
        padding = {"kv_indptr": int(want["kv_indptr"][-1]), "from_slots": -1, "to_slots": -1}
        for name, tensor in want.items():
            assert torch.equal(got[name][: len(tensor)], tensor), name
            rest = got[name][len(tensor) :]
            assert (rest == padding.get(name, 0)).all() and len(rest) == (
                0 if name == "chain_indptr" else seed % 3
            )
        for name, tensor in used.items():
            assert torch.equal(case[name], tensor), name
        allocated = vars(batching.tree_chains(**case))
        for name, tensor in want.items():
            assert torch.equal(allocated[name][: len(tensor)], tensor), name
        if page_size > 1:
            assert len(case["spare_pages"]) <= sum(
                (num_chains(tree) - 1) * (1 + -(-max(depths(tree), default=0) // page_size))
                for tree in trees
            )


@pytest.mark.parametrize("page_size", [1, 7, 16])
def test_spare_pages_are_those_that_trees_take(page_size: int) -> None:
    """All of them are written to, and without one of them there are too few."""
    draw = random.Random(page_size)
    for _ in range(200):
        tree = preorder(random_tree(draw, draw.randrange(1, 30)))
        case = tree_batch(draw, [tree], [draw.choice([0, 3, 14, 15, 16, 90])], page_size)
        spare = case["spare_pages"]
        used = batching.tree_chains(**case).to_slots
        assert set((used[used >= 0] // page_size).tolist()) == set(spare.tolist())
        if len(spare):
            count = len(spare)
            with pytest.raises(ValueError, match=f"spare_pages must be at least {count}, got"):
                batching.tree_chains(**{**case, "spare_pages": spare[1:]})
    with pytest.raises(ValueError, match=r"^num_spare_pages: parents\[1\] must be .*got 1"):
        num_spare_pages([-1, 1], 5, page_size)


def test_tree_chains_example_of_the_docstring() -> None:
    got = batching.tree_chains(
        ints([-1, 0, -1]).view(1, 3),
        ints([3]),
        ints([4]),
        ints([14]),
        ints([0, 1]),
        ints([5]),
        ints([8]),
        page_size=16,
    )
    assert got.chain_indptr.tolist() == [0, 2]
    assert got.qo_lens[:2].tolist() == [3, 1] and got.kv_lens[:2].tolist() == [13, 12]
    assert got.kv_indptr[:3].tolist() == [0, 1, 2] and got.kv_indices[:2].tolist() == [5, 8]
    # The root is at 10; node 2 lies at 13 of the request's page, and at 11 of the chain's.
    assert got.from_slots[:12].tolist() == [5 * 16 + i for i in (*range(11), 13)]
    assert got.to_slots[:12].tolist() == [8 * 16 + i for i in range(12)]


@pytest.mark.parametrize(
    "argument,index,value,message",
    [
        ("parents", (1, 0), 0, r"parents\[1, 0\] must be -1, or the node before it, .*got 0"),
        ("parents", (1, 3), 1, r"parents\[1, 3\] must be .*preorder\), got 1"),
        ("parents", (1, 2), -2, r"parents\[1, 2\] must be .*preorder\), got -2"),
        ("num_draft_tokens", 1, -1, r"num_draft_tokens\[1\] must be at least 0 .*=5, got -1"),
        ("num_draft_tokens", 1, 6, r"num_draft_tokens\[1\] must be .*=5, got 6"),
        ("qo_lens", 1, 4, r"qo_lens\[1\] must be 0, or more than the request's nodes=4, got 4"),
        ("qo_lens", 0, -1, r"qo_lens\[0\] must be .*nodes=0, got -1"),
        ("kv_lens", 1, 4, r"kv_lens\[1\] must be at least the request's rows=5 .*got 4"),
        ("kv_lens", 1, 33, r"kv_lens\[1\] must be .*slots of its pages=32, got 33"),
        ("kv_indptr", 2, 4, r"kv_indptr\[2\] must be .*size of kv_indices=3, got 4"),
        ("kv_indptr", 1, -1, r"kv_indptr\[1\] must be at least the entry before it=0 .*got -1"),
    ],
)
def test_tree_chains_faults(
    argument: str, index: int | tuple[int, int], value: int, message: str
) -> None:
    """Nothing has been written then."""
    case = {
        "parents": ints([9, 9, 9, 9, 9, -1, 0, -1, 2, 9]).view(2, 5),
        "num_draft_tokens": ints([0, 4]),
        "qo_lens": ints([1, 5]),
        "kv_lens": ints([4, 20]),
        "kv_indptr": ints([0, 1, 3]),
        "kv_indices": ints([4, 2, 1]),
        "spare_pages": ints([7, 8]),
        "page_size": 16,
    }
    out = TreeChains.empty(2, chains=3, pages=5, copies=40)
    for tensor in vars(out).values():
        tensor.fill_(77)
    assert isinstance(case[argument], Tensor)
    case[argument][index] = value
    with pytest.raises(ValueError, match="^tree_chains: " + message):
        batching.tree_chains(**case, out=out)  # type: ignore[arg-type]
    assert all((tensor == 77).all() for tensor in vars(out).values())


@pytest.mark.parametrize(
    "change,message",
    [
        ({"spare_pages": ints([7])}, "spare_pages must be at least 2, got 1"),
        ({"chains": 2}, "chain_qo_lens must be of at least 3 elements, got 2"),
        ({"pages": 2}, "chain_kv_indices must be of at least 3 elements, got 2"),
        ({"copies": 3}, "from_slots must be of at least 32 elements, got 3"),
        ({"page_size": 0}, "page_size must be an int32 of at least 1, got 0"),
    ],
)
def test_tree_chains_says_what_is_too_small(change: dict[str, Any], message: str) -> None:
    case: dict[str, Any] = {
        "parents": ints([-1, -1, -1]).view(1, 3),
        "num_draft_tokens": ints([3]),
        "qo_lens": ints([4]),
        "kv_lens": ints([18]),
        "kv_indptr": ints([0, 2]),
        "kv_indices": ints([4, 2]),
        "spare_pages": ints([7, 8]),
        "page_size": 16,
    }
    sizes = {"chains": 3, "pages": 3, "copies": 32}
    for name, value in change.items():
        (sizes if name in sizes else case)[name] = value
    with pytest.raises(ValueError, match="^tree_chains: " + message):
        batching.tree_chains(**case, out=TreeChains.empty(1, **sizes))


# ---- copies ----


@pytest.mark.no_bf16
@pytest.mark.parametrize(
    "dtype,heads,head_dim",
    [
        (torch.float32, 2, 64),
        (torch.bfloat16, 8, 128),
        (torch.float16, 1, 80),
        (torch.bfloat16, 1, 13),
    ],
)
def test_copy_kv(device: str, isa: str, dtype: torch.dtype, heads: int, head_dim: int) -> None:
    slots = torch.randperm(12 * 16)
    from_slots, to_slots = slots[:70].clone(), slots[70:140].clone()
    from_slots[3], to_slots[3] = 2**40, -1  # no copy
    caches = [torch.randn(12, 16, heads, head_dim).to(dtype).to(device) for _ in range(2)]
    want = [cache.clone() for cache in caches]
    reference.copy_kv(want[0], want[1], from_slots.to(device), to_slots.to(device))
    for num_threads in (1, 3):
        specops.set_num_threads(num_threads)
        got = [cache.clone() for cache in caches]
        attention.copy_kv(got[0], got[1], from_slots.to(device), to_slots.to(device))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert not torch.equal(want[0], caches[0])
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    attention.copy_kv(caches[0], caches[1], nothing, nothing)


@pytest.mark.parametrize(
    "argument,value,message",
    [
        ("from_slots", -1, r"from_slots\[1\] must be in \[0, .*= 64\) .*got -1"),
        ("from_slots", 64, r"from_slots\[1\] must be .*got 64"),
        ("to_slots", -2, r"to_slots\[1\] must be -1 or below .*= 64, got -2"),
        ("to_slots", 64, r"to_slots\[1\] must be .*got 64"),
    ],
)
def test_copy_kv_faults(
    device: str, on_cuda: bool, argument: str, value: int, message: str
) -> None:
    """Cpu writes nothing; on CUDA the other copies are made."""
    slots = {"from_slots": torch.tensor([1, 2, 3]), "to_slots": torch.tensor([10, 20, 30])}
    k_cache, v_cache = torch.randn(2, 4, 16, 1, 8).to(device)
    want = [k_cache.clone(), v_cache.clone()]
    if on_cuda:
        good = {name: one[[0, 2]].to(device) for name, one in slots.items()}
        reference.copy_kv(want[0], want[1], **good)
        message = r"\w+ must "
    slots[argument][1] = value
    with expect_fault(on_cuda, "^copy_kv: " + message):
        attention.copy_kv(k_cache, v_cache, **{k: one.to(device) for k, one in slots.items()})
    assert torch.equal(k_cache, want[0]) and torch.equal(v_cache, want[1])


# ---- a tree's rows are those of plain decoding ----


class TreeStep:
    """A ragged step: trees, chains, chunks and idle requests over one poisoned cache."""

    def __init__(
        self,
        draw: random.Random,
        trees: list[list[int]],
        texts: list[int],
        *,
        page_size: int,
        dtype: torch.dtype,
        heads: tuple[int, int],
        device: str,
    ) -> None:
        self.trees, self.texts, self.page_size, self.device = trees, texts, page_size, device
        self.case = tree_batch(draw, trees, texts, page_size)
        num_pages = 3 + len(self.case["kv_indices"]) + len(self.case["spare_pages"])
        self.qo_lens = self.case["qo_lens"].tolist()
        rows = sum(self.qo_lens)
        self.q = torch.randn(rows, heads[0], 64).to(dtype)
        # What every request has said, then its rows in their order.
        self.kv = [
            torch.randn(2, kv_len, heads[1], 64).to(dtype) for kv_len in self.case["kv_lens"]
        ]
        self.cache = torch.full((2, num_pages, page_size, heads[1], 64), torch.nan).to(dtype)
        indptr = self.case["kv_indptr"].tolist()
        for b, kv in enumerate(self.kv):
            pages = self.case["kv_indices"][indptr[b] : indptr[b + 1]].long()
            token = torch.arange(kv.shape[1])
            self.cache[:, pages[token // page_size], token % page_size] = kv
        self.chains = batching.tree_chains(**self.case)
        self.count = int(self.chains.chain_indptr[-1])
        self.cache = self.cache.to(device)

    def requests(self) -> dict[str, Tensor]:
        names = ("qo_lens", "kv_lens", "kv_indptr", "kv_indices")
        return {name: self.case[name].to(self.device) for name in names}

    def attend(self, window: int | None, shared: bool) -> tuple[Tensor, ...]:
        """Attention over the chains, which may be told what they share."""
        chains = {name: one.to(self.device) for name, one in vars(self.chains).items()}
        attention.copy_kv(*self.cache, chains["from_slots"], chains["to_slots"])
        indices = batching.prepare_batch(
            chains["qo_lens"],
            chains["kv_lens"],
            torch.zeros_like(chains["qo_lens"]),
            chains["kv_indptr"],
            chains["kv_indices"],
            page_size=self.page_size,
            total_rows=len(self.q),
            num_output_rows=0,
            out=BatchIndices.empty(
                len(chains["qo_lens"]),
                total_rows=len(self.q),
                num_output_rows=0,
                device=self.device,
            ),
        )
        self.check_positions(indices)
        prefixes: dict[str, Tensor] = {}
        if shared:
            leaders = np.arange(len(chains["qo_lens"]))
            lens = np.zeros_like(leaders)
            for b, text in enumerate(self.texts):
                begin, end = self.chains.chain_indptr[b : b + 2].tolist()
                if end - begin > 1:
                    leaders[begin:end], lens[begin:end] = begin, text // 256 * 256
            prefixes = {
                "prefix_leaders": ints(leaders.tolist(), self.device)[None],
                "prefix_lens": ints(lens.tolist(), self.device)[None],
            }
        got = attention.append_attention(
            self.q.to(self.device),
            *self.cache,
            indices.qo_indptr,
            chains["kv_indptr"],
            chains["kv_indices"],
            chains["kv_lens"],
            sliding_window=window,
            return_lse=True,
            **prefixes,
        )
        return tuple(one.cpu() for one in got)

    def check_positions(self, indices: BatchIndices) -> None:
        want = []
        for tree, text, rows in zip(self.trees, self.texts, self.qo_lens, strict=True):
            first = text + 1 + len(tree) - rows
            want += [text + d for d in [0, *depths(tree)]] if tree else range(first, text + 1)
        assert indices.positions.tolist() == want

    def plain(self, window: int | None) -> tuple[Tensor, ...]:
        """Every row by itself, behind exactly the tokens that it follows."""
        outs, row = [], 0
        for kv, tree, text, rows in zip(self.kv, self.trees, self.texts, self.qo_lens, strict=True):
            for i in range(rows):
                tokens = [*range(text + 1 - (0 if tree else rows - 1 - i))]
                if tree:
                    tokens += [text + 1 + node for node in path_to(tree, i - 1)]
                pages = -(-len(tokens) // self.page_size)
                cache = torch.full((2, pages * self.page_size, *kv.shape[2:]), torch.nan)
                cache = cache.to(kv.dtype)
                cache[:, : len(tokens)] = kv[:, tokens]
                cache = cache.view(2, pages, self.page_size, *kv.shape[2:])
                got = attention.append_attention(
                    self.q[row : row + 1].to(self.device),
                    *cache.to(self.device),
                    ints([0, 1], self.device),
                    ints([0, pages], self.device),
                    ints([*range(pages)], self.device),
                    ints([len(tokens)], self.device),
                    sliding_window=window,
                    return_lse=True,
                )
                outs.append([one.cpu() for one in got])
                row += 1
        return tuple(torch.cat(parts) for parts in zip(*outs, strict=True))


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.pairwise
def test_a_node_is_a_row_of_plain_decoding(
    device: str, isa: str, on_cuda: bool, dtype: torch.dtype, page_size: int, window: int | None
) -> None:
    """Trees of up to 64 nodes beside chains, chunks and idle requests, told to share and not."""
    draw = random.Random(page_size + (window or 0))
    sizes = [64, 0, 9, 0, 24] if not on_cuda else [20, 0, 7, 0]
    trees = [preorder(random_tree(draw, size, reach=5)) for size in sizes] + [CHAIN]
    texts = [*[506, 5, 15, 70, 31][: len(sizes)], 47]
    step = TreeStep(
        draw, trees, texts, page_size=page_size, dtype=dtype, heads=(4, 2), device=device
    )
    assert step.count > 12
    want = step.plain(window)
    for shared in (False, True):
        for one, other in zip(step.attend(window, shared), want, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("page_size", [16, 32])
def test_after_compaction_the_cache_is_plain_decodings(
    device: str, isa: str, page_size: int
) -> None:
    """Whatever path was accepted, and the chains' own pages belong to nobody."""
    draw = random.Random(page_size)
    trees = [preorder(random_tree(draw, 30)) for _ in range(5)] + [CHAIN, []]
    texts = [3, 14, 15, 16, 100, 20, 7]
    step = TreeStep(
        draw, trees, texts, page_size=page_size, dtype=torch.bfloat16, heads=(2, 2), device=device
    )
    step.attend(None, shared=False)
    paths = [path_to(tree, draw.randrange(-1, len(tree))) for tree in trees]
    width = max(map(len, trees))
    nodes = ints([n for path in paths for n in [*path, *[-1] * (width - len(path))]], device)
    requests = step.requests()
    qo_lens = requests.pop("qo_lens")
    indptr = torch.cat([qo_lens.new_zeros(1), qo_lens.cumsum(0).int()])
    counts = ints([len(path) for path in paths], device)
    attention.compact_kv(*step.cache, nodes.view(-1, width), counts, indptr, **requests)
    begin = step.case["kv_indptr"].tolist()
    for b, (path, text, kv) in enumerate(zip(paths, texts, step.kv, strict=True)):
        pages = step.case["kv_indices"][begin[b] : begin[b + 1]].long()
        token = torch.arange(text + 1 + len(path))
        got = step.cache.cpu()[:, pages[token // page_size], token % page_size]
        want = kv[:, [*range(text + 1), *(text + 1 + node for node in path)]]
        assert torch.equal(got, want)
    assert any(path != list(range(len(path))) for path in paths)


@pytest.mark.no_bf16
@pytest.mark.parametrize("width", [64, 13])
def test_states_of_a_path_follow_the_roots(device: str, isa: str, width: int) -> None:
    """A step's rows, compacted as pages of one token; what is behind the path is nobody's."""
    draw = random.Random(width)
    trees = [preorder(random_tree(draw, 20)) for _ in range(4)] + [CHAIN, []]
    paths = [path_to(tree, draw.randrange(-1, len(tree))) for tree in trees]
    rows = [1 + len(tree) for tree in trees]
    indptr = [sum(rows[:b]) for b in range(len(rows) + 1)]
    states = torch.randn(indptr[-1], width).bfloat16()
    nodes = torch.full((len(trees), 20), -1, dtype=torch.int32)
    for b, path in enumerate(paths):
        nodes[b, : len(path)] = ints(path)
    got = states.clone().to(device)
    for one, reads in ((attention.compact_kv, got), (reference.compact_kv, states.clone())):
        one(
            reads.view(-1, 1, 1, width),
            None,
            nodes.to(device),
            ints([len(path) for path in paths], device),
            ints(indptr, device),
            ints(rows, device),
            ints(indptr, device),
            ints([*range(indptr[-1])], device),
        )
        for b, path in enumerate(paths):
            mine = states[indptr[b] : indptr[b + 1]]
            want = mine[[0, *(1 + node for node in path)]]
            assert torch.equal(reads.cpu()[indptr[b] : indptr[b] + len(want)], want)
    assert any(path != list(range(len(path))) for path in paths)


# ---- the engine ----

NAIVE = SpeculativeConfig(method="naive")
PROMPTS = [[7, 8, 9] * 6, [5, 6, 7, 5, 6, 7, 5], list(range(1, 50)), [3], [11, 12] * 20]
VOCAB = 64


class TreeDrafter(Drafter):
    """Knows what comes, and hides it in a random tree: up to some node of a random path.

    Args:
        truth: what each request will say, by its seed.
        seed: of the trees.
    """

    name = "ngram"  # in whose place it is put

    def __init__(self, truth: dict[int, list[int]], seed: int) -> None:
        self._truth, self._seed = truth, seed
        self.sizes: list[int] = []

    def finish(self, results: StepResults) -> None:
        for part in results.parts:
            request, limit = part.request, stage_limit(part, self.name)
            if self.name not in request.draft_stages:
                continue
            known = len(request.token_ids)
            draw = random.Random(hash((self._seed, request.seed, request.choice_index, known)))
            count = draw.choice([limit, limit, limit // 2, 0]) if limit else 0
            parents = random_tree(draw, count)
            tokens = [draw.randrange(VOCAB) for _ in parents]
            truth = self._truth[request.seed][known - request.prompt_len :]
            if parents and draw.random() < 0.9:
                for depth, node in enumerate(path_to(parents, draw.randrange(count))):
                    if depth < len(truth):
                        tokens[node] = truth[depth]
            slot, proposals = request.slot, results.proposals
            proposals.counts[slot] = count
            proposals.token_ids[slot, :count] = tokens
            proposals.parents[slot, :count] = parents
            proposals.confidences[slot, :count] = 0.5
            proposals.are_trees[slot] = True
            self.sizes.append(num_chains(preorder(parents)))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(
        tmp_path_factory.mktemp("model"),
        num_hidden_layers=2,
        vocab_size=VOCAB,
        max_position_embeddings=192,
        num_nextn_predict_layers=1,
    )


def make(model_dir: Path, speculative: SpeculativeConfig, **config: Any) -> Engine:
    config = {"device": "cpu", "methods": ("all",), **config}
    return Engine(
        EngineConfig(
            model=str(model_dir), load_format="dummy", speculative_config=speculative, **config
        )
    )


def params(index: int, everything: bool) -> SamplingParams:
    plain = SamplingParams(
        max_tokens=40 - 3 * index,
        temperature=(0.0, 0.8, 0.0, 0.5, 0.9)[index],
        top_p=(1.0, 1.0, 0.9)[index % 3],
        seed=index,
        ignore_eos=True,
        logprobs=(0, 2, 3, 1, 0)[index],
    )
    if not everything:
        return plain
    asked: dict[str, Any] = {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "typical_p": 0.95 if index % 2 else 1.0,
        "min_p": 0.02,
        "logit_bias": {index: 2.0, 9: -1.5},
        "bad_words_token_ids": [[7, 9], [8]],
        "min_tokens": 5,
        "stop_token_sequences": [[3, 4], [2, 40, 1]],
        "allowed_token_ids": list(range(1, 60)) if index == 3 else None,
    }
    known = {name: getattr(plain, name) for name in plain.__dataclass_fields__}
    return SamplingParams(**{**known, **asked})


def bits(done: list[Completion]) -> list[Any]:
    def pack(value: float) -> bytes:
        return struct.pack("<f", value)

    return [
        (
            one.token_ids,
            one.finish_reason,
            [
                (pack(p.logprob), p.rank, [(i, pack(value)) for i, value in p.alternatives])
                for p in one.logprobs
            ],
        )
        for one in done
    ]


def run(engine: Engine, everything: bool = False, count: int = len(PROMPTS)) -> list[Any]:
    done = engine.generate(PROMPTS[:count], [params(i, everything) for i in range(count)])
    assert engine.num_free_pages == engine.num_pages
    check_pages(engine._pool)
    return bits(done)


Scripted = Callable[..., tuple[Engine, TreeDrafter]]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    """Makes an engine that verifies random trees with what is right in them."""

    def make_scripted(
        model_dir: Path, expected: list[Any], k: int = 12, seed: int = 0, **config: Any
    ) -> tuple[Engine, TreeDrafter]:
        truth = {index: tokens for index, (tokens, *_) in enumerate(expected)}
        drafter = TreeDrafter(truth, seed)
        monkeypatch.setattr("specops.engine.drafters.ngram.load", lambda context: drafter)
        options = {
            name: config.pop(name)
            for name in ("verify_strategy", "accept_policy", "adaptive_verification")
            if name in config
        }
        options.setdefault("adaptive_verification", False)
        speculative = SpeculativeConfig.from_dict(
            {"method": "ngram", "num_speculative_tokens": k, **options}
        )
        return make(model_dir, speculative, **config), drafter

    return make_scripted


def count_steps(engine: Engine) -> list[int]:
    """Receives, of every step, how many chains it has more than requests."""
    found: list[int] = []
    launch = engine._runner.launch

    def watch(plan: Any, **options: Any) -> None:
        found.append(sum(part.num_chains - 1 for part in plan.parts))
        launch(plan, **options)

    engine._runner.launch = watch  # type: ignore[method-assign]
    return found


LIMITS: dict[str, dict[str, Any]] = {
    "at once": {"max_num_seqs": 8},
    "alone": {"max_num_seqs": 1, "page_size": 32},
    "chunks": {"max_num_seqs": 4, "max_num_batched_tokens": 48},
    "preempted": {"max_num_seqs": 5, "max_model_len": 96, "num_pages": 12},
    "not shared": {"max_num_seqs": 8, "enable_cascade_attention": False},
}


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> dict[tuple[bool, str], list[Any]]:
    """Plain decoding, one at a time."""
    return {
        (everything, mode): run(
            make(model_dir, NAIVE, max_num_seqs=1, logprobs_mode=mode), everything
        )
        for everything in (False, True)
        for mode in ("raw_logprobs", "processed_logprobs")
    }


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("everything", [False, True], ids=["plain", "everything"])
@pytest.mark.pairwise
def test_trees_change_no_bit(
    model_dir: Path,
    expected: dict[tuple[bool, str], list[Any]],
    scripted: Scripted,
    everything: bool,
    mode: str,
    limits: dict[str, Any],
) -> None:
    want = expected[everything, mode]
    for seed in range(2):
        engine, drafter = scripted(model_dir, want, seed=seed, logprobs_mode=mode, **limits)
        branches = count_steps(engine)
        assert run(engine, everything) == want
        stats = engine.stats.speculative
        assert 0.1 * stats.num_draft_tokens < stats.num_accepted_tokens < stats.num_draft_tokens
        assert max(branches) > 1 and max(drafter.sizes) > 2
        if "num_pages" in limits:
            assert engine.stats.num_preemptions > 0


def test_deep_and_wide_trees_change_no_bit(
    model_dir: Path, expected: dict[tuple[bool, str], list[Any]], scripted: Scripted
) -> None:
    """More nodes than a page has tokens."""
    want = expected[False, "raw_logprobs"]
    engine, _ = scripted(model_dir, want, k=64, max_num_seqs=8)
    branches = count_steps(engine)
    assert run(engine) == want
    assert max(branches) > 15


@pytest.mark.parametrize("strategy", ["target_match", "greedy", "rejection"])
@pytest.mark.parametrize("policy", ["normal", "reject_all"])
def test_trees_under_every_strategy_that_takes_them(
    model_dir: Path,
    scripted: Scripted,
    expected: dict[tuple[bool, str], list[Any]],
    strategy: str,
    policy: str,
) -> None:
    """`rejection` draws the same distribution, and greedy requests have the same tokens."""
    want = expected[False, "raw_logprobs"]
    engine, _ = scripted(
        model_dir, want, max_num_seqs=8, verify_strategy=strategy, accept_policy=policy
    )
    got = run(engine)
    equal = [a == b for a, b in zip(got, want, strict=True)]
    # Prompts 0 and 2 are greedy ones.
    assert all(equal) if strategy == "target_match" else equal[0] and equal[2]
    stats = engine.stats.speculative
    assert stats.num_draft_tokens > 50
    assert (stats.num_accepted_tokens > 0) == (policy == "normal")


def test_selection_verifies_parts_of_trees(
    model_dir: Path, expected: dict[tuple[bool, str], list[Any]], scripted: Scripted
) -> None:
    want = expected[False, "raw_logprobs"]
    engine, _ = scripted(model_dir, want, max_num_seqs=8, adaptive_verification=True)
    assert engine._drafting._selector is not None
    branches = count_steps(engine)
    assert run(engine) == want
    assert max(branches) > 0 and engine.stats.speculative.num_accepted_tokens > 0


ROOT_TEXT, BRANCH_TEXT = [7, 8, 9] * 22, [5, 6, 7, 1] * 17
SHARED = [
    [*ROOT_TEXT, 1, 2, 3],
    [*ROOT_TEXT, *BRANCH_TEXT, 4],
    [9, 4] * 40,  # alone
    [*ROOT_TEXT, *BRANCH_TEXT, 2, 2],
    [3, 1],  # not even a leaf
]


@pytest.mark.parametrize("page_size", [16, 64])
def test_trees_of_requests_that_share_prefixes(
    model_dir: Path, scripted: Scripted, page_size: int
) -> None:
    """On some levels and with some of the others only, or with nobody."""

    def decode(engine: Engine) -> list[Any]:
        asked = [params(index, False) for index in range(len(SHARED))]
        engine.add_request(
            ROOT_TEXT + BRANCH_TEXT,
            SamplingParams(max_tokens=1),
            speculative_config={"method": "naive"},
        )
        engine.step()
        return bits(engine.generate(SHARED, asked))

    want = decode(make(model_dir, NAIVE, max_num_seqs=1, enable_prefix_caching=False))
    engine, _ = scripted(model_dir, want, k=6, max_num_seqs=8, page_size=page_size)
    found = []
    launch = engine._runner.launch

    def watch(plan: Any, **options: Any) -> None:
        if plan.prefixes is not None:
            chains = [part.num_chains for part in plan.parts]
            found.append((len(plan.prefixes.lens), len(chains), max(chains)))
        launch(plan, **options)

    engine._runner.launch = watch  # type: ignore[method-assign]
    assert decode(engine) == want
    assert max(found) >= (3, 5, 2), "two levels of requests, and one of trees"
    assert engine.stats.speculative.num_accepted_tokens > 0


def test_where_others_cannot_verify_trees_their_first_path_is_left(
    model_dir: Path, expected: dict[tuple[bool, str], list[Any]], scripted: Scripted
) -> None:
    want = expected[False, "raw_logprobs"]
    engine, _ = scripted(model_dir, want, max_num_seqs=8)
    branches = count_steps(engine)
    other = engine.add_request(
        [1, 2, 3] * 5,
        SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, seed=0),
        speculative_config={"method": "ngram", "verify_strategy": "topp"},
    )
    names = [
        engine.add_request(prompt, params(index, False)) for index, prompt in enumerate(PROMPTS)
    ]
    lengths = []
    while engine.has_unfinished():
        engine.step()
        lengths.append(engine._requests[other].finish_reason is not None)
    assert bits([engine.completion(name) for name in names]) == want
    together = branches[: lengths.index(True) + 1]
    assert max(together) == 0 and max(branches) > 0


def test_too_few_pages_leave_the_first_path(
    model_dir: Path, expected: dict[tuple[bool, str], list[Any]], scripted: Scripted
) -> None:
    """A tree's other paths take nobody's pages: no request is preempted for them."""
    want = expected[False, "raw_logprobs"]
    engine, _ = scripted(model_dir, want, max_num_seqs=1, max_model_len=96, num_pages=6)
    branches = count_steps(engine)
    assert run(engine) == want
    assert 0 in branches and engine.stats.num_preemptions == 0


def test_requests_of_every_method_beside_trees(
    model_dir: Path, expected: dict[tuple[bool, str], list[Any]], scripted: Scripted
) -> None:
    """Modules read rows of their own requests, which stand as they do in a step without trees."""
    want = expected[False, "raw_logprobs"]
    engine, _ = scripted(model_dir, want, max_num_seqs=8)
    methods = ["ngram", "mtp", "ngram", "naive", "suffix"]
    names = [
        engine.add_request(
            prompt, params(index, False), speculative_config={"method": methods[index]}
        )
        for index, prompt in enumerate(PROMPTS)
    ]
    branches = count_steps(engine)
    while engine.has_unfinished():
        engine.step()
    assert bits([engine.completion(name) for name in names]) == want
    assert max(branches) > 0


SUFFIX_TREE = SpeculativeConfig.from_dict(
    {
        "method": "suffix",
        "num_speculative_tokens": 8,
        "tree": True,
        "adaptive_verification": False,
        "suffix_decoding_max_spec_factor": 4.0,
        "suffix_decoding_min_token_prob": 0.02,
    }
)


MTP_TREE = SpeculativeConfig(
    method="mtp",
    num_speculative_tokens=5,
    num_model_steps=4,
    tree=True,
    adaptive_verification=False,
)


NGRAM_TREE = SpeculativeConfig.from_dict(
    {
        "method": "ngram",
        "num_speculative_tokens": 6,
        "tree": True,
        "min_ngram_size": 1,
        "adaptive_verification": False,
    }
)

MERGED_TREE = SpeculativeConfig.from_dict(
    {
        "method": "mtp+suffix",
        "num_speculative_tokens": 7,
        "num_model_steps": 3,
        "tree": True,
        "adaptive_verification": False,
        "suffix_decoding_min_token_prob": 0.02,
    }
)

DRAFTERS = pytest.mark.parametrize(
    "speculative",
    [NGRAM_TREE, SUFFIX_TREE, MTP_TREE, MERGED_TREE],
    ids=["ngram", "suffix", "mtp", "merged"],
)


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@DRAFTERS
def test_trees_of_the_drafters_change_no_bit(
    model_dir: Path,
    expected: dict[tuple[bool, str], list[Any]],
    speculative: SpeculativeConfig,
    limits: dict[str, Any],
) -> None:
    engine = make(model_dir, speculative, **limits)
    branches = count_steps(engine)
    for _ in range(2):  # the second time, a shared tree has what was said
        assert run(engine) == expected[False, "raw_logprobs"]
    assert max(branches) > 0 and engine.stats.speculative.num_accepted_tokens > 0
    assert run(engine, everything=True) == expected[True, "raw_logprobs"]


def test_modules_see_states_of_the_path(
    model_dir: Path,
    expected: dict[tuple[bool, str], list[Any]],
    scripted: Scripted,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After any tree the modules draft what they draft after plain decoding."""
    want = expected[False, "raw_logprobs"]
    speculative = {"method": "mtp", "num_speculative_tokens": 3, "adaptive_verification": False}

    def drafts_of(others: bool) -> dict[tuple[int, int], list[int]]:
        engine, drafter = scripted(model_dir, want, max_num_seqs=8)
        names = [
            engine.add_request(prompt, params(i, False), speculative_config=speculative)
            for i, prompt in enumerate(PROMPTS)
        ]
        found: dict[tuple[int, int], list[int]] = {}
        finish, plant = engine.drafters["mtp"].finish, drafter.finish

        def watch(results: StepResults) -> None:
            finish(results)
            proposals = results.proposals
            for part in results.parts:
                slot, known = part.request.slot, len(part.request.token_ids)
                count = int(proposals.counts[slot])
                found[part.request.seed, known] = proposals.token_ids[slot, :count].tolist()
                proposals.counts[slot] = 0
                if others:  # a random tree takes the place of what they drafted
                    part.request.draft_stages = {**part.request.draft_stages, "ngram": 3}
            if others:
                plant(results)

        monkeypatch.setattr(engine.drafters["mtp"], "finish", watch)
        monkeypatch.setattr(drafter, "finish", lambda results: None)
        branches = count_steps(engine)
        while engine.has_unfinished():
            engine.step()
        assert bits([engine.completion(name) for name in names]) == want
        assert (max(branches) > 0) == others
        return found

    plain, after_trees = drafts_of(others=False), drafts_of(others=True)
    common = plain.keys() & after_trees.keys()
    assert len(common) > 40 and len(after_trees) < len(plain)
    for key in common:  # near its end a request may draft less; how much depends on the step
        count = min(len(plain[key]), len(after_trees[key]))
        assert plain[key][:count] == after_trees[key][:count], key
    assert sum(len(after_trees[key]) == 3 for key in common) > 40


@pytest.mark.parametrize("speculative", [NGRAM_TREE, SUFFIX_TREE], ids=["ngram", "suffix"])
def test_trees_beside_chains_of_the_same_method(
    model_dir: Path,
    expected: dict[tuple[bool, str], list[Any]],
    speculative: SpeculativeConfig,
) -> None:
    engine = make(model_dir, speculative, max_num_seqs=8)
    run(engine)
    branches = count_steps(engine)
    names = [
        engine.add_request(
            prompt, params(index, False), speculative_config={"tree": index % 2 == 0}
        )
        for index, prompt in enumerate(PROMPTS)
    ]
    while engine.has_unfinished():
        engine.step()
    done = [engine.completion(name) for name in names]
    assert bits(done) == expected[False, "raw_logprobs"]
    assert max(branches) > 0 and all(one.stats.num_draft_tokens for one in done)


@pytest.fixture
def twin(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeGpu]:
    """Makes the device of the next engine a twin."""

    def make_twin(**arguments: Any) -> FakeGpu:
        device = FakeGpu(**arguments)
        monkeypatch.setattr("specops.engine.engine.open_device", lambda *_, **__: device)
        return device

    return make_twin


@pytest.mark.parametrize("captures", [True, False], ids=["graphs", "eager"])
def test_trees_on_a_device_with_memory_of_its_own(
    model_dir: Path,
    expected: dict[tuple[bool, str], list[Any]],
    scripted: Scripted,
    twin: Callable[..., FakeGpu],
    captures: bool,
) -> None:
    """Padded shapes, poisoned memory, replayed graphs."""
    for everything in (False, True):
        want = expected[everything, "raw_logprobs"]
        for limits in LIMITS.values():
            twin(captures=captures, poison=0x7F)
            engine, _ = scripted(model_dir, want, k=4, **limits)
            branches = count_steps(engine)
            for _ in range(2):
                assert run(engine, everything) == want
            steps = engine._runner.memory._steps.items()
            replayed = [shape.trees is not None for shape, step in steps if step.replay]
            assert max(branches) > 0 and any(replayed) == captures


@DRAFTERS
def test_trees_of_the_drafters_on_such_a_device(
    model_dir: Path,
    expected: dict[tuple[bool, str], list[Any]],
    speculative: SpeculativeConfig,
    twin: Callable[..., FakeGpu],
) -> None:
    twin(captures=True, poison=0xFF)
    engine = make(model_dir, speculative, max_num_seqs=4)
    branches = count_steps(engine)
    for _ in range(2):
        assert run(engine) == expected[False, "raw_logprobs"]
    assert max(branches) > 0 and engine.num_captures > 0


def test_trees_in_the_interpreter(
    tmp_path: Path,
    scripted: Scripted,
    twin: Callable[..., FakeGpu],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The CUDA kernels."""
    model_dir = write_config(
        tmp_path,
        num_hidden_layers=1,
        vocab_size=VOCAB,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=96,
        num_nextn_predict_layers=1,
    )
    module = simt.load()
    module.set_schedule("in_order", 0)
    module.set_landing("late")
    for op_module in OP_MODULES:
        monkeypatch.setattr(op_module, "_C", module)
    twin()
    want = run(make(model_dir, NAIVE, max_num_seqs=1), count=2)
    for captures in (True, False):
        twin(captures=captures, poison=0xFF)
        if captures:
            engine, _ = scripted(model_dir, want, k=6, max_num_seqs=2)
        else:
            engine = make(model_dir, MTP_TREE, max_num_seqs=2)
        branches = count_steps(engine)
        assert run(engine, count=2) == want
        assert max(branches) > 0 and engine.stats.speculative.num_accepted_tokens > 0
