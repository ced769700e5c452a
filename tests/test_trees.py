# SPDX-License-Identifier: Apache-2.0
"""Trees of drafts: every row of a tree has the bits of the row in plain decoding."""

import random
from typing import Any

import numpy as np
import pytest
import specops
import torch
from shared_fixtures import expect_fault
from specops import attention, batching, reference
from specops.attention import PagedBatch, PagedKv, PrefixTensors
from specops.batching import BatchIndices, TreeChains, num_spare_pages
from torch import Tensor

CHAIN = [-1, 0, 1, 2, 3]


def ints(values: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def random_tree(draw: random.Random, nodes: int, reach: int | None = None) -> list[int]:
    """Return random parents, with the nodes in an order in which a drafter might add them."""
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
    """Return the nodes on the path from the root to a node; -1 is the root."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


# ---- the order of nodes ----


def num_chains(parents: list[int]) -> int:
    """Count the chains that a tree in preorder is verified as."""
    return 1 + sum(parent != node - 1 for node, parent in enumerate(parents))


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
def test_preorder_refuses_invalid_trees(
    parents: list[int], nodes: list[int] | None, message: str
) -> None:
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


# ---- trees as chains ----


def tree_batch(
    draw: random.Random, trees: list[list[int]], texts: list[int], page_size: int
) -> dict[str, Any]:
    """Return requests whose rows are a root and its nodes; without nodes, up to six rows."""
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
    """Return output arrays with `more` elements beyond the required ones."""
    sizes = {name: len(tensor) for name, tensor in want.items()}
    return TreeChains.empty(
        sizes["chain_indptr"] - 1,
        chains=sizes["qo_lens"] + more,
        pages=sizes["kv_indices"] + more,
        copies=sizes["from_slots"] + more,
    )


@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
def test_tree_chains(device: str, page_size: int) -> None:
    """The arrays are on the host for every device."""
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
    """All spare pages are written to, and with one page less there are too few."""
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
    # The root is at position 10. Node 2 is at 13 on the request's page, and at 11 on the chain's.
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
def test_tree_chains_refuses_invalid_arguments(
    argument: str, index: int | tuple[int, int], value: int, message: str
) -> None:
    """No output is written."""
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
def test_tree_chains_names_the_output_that_is_too_small(
    change: dict[str, Any], message: str
) -> None:
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
    from_slots[3], to_slots[3] = 2**40, -1  # negative: nothing is copied
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
def test_copy_kv_reports_invalid_data(
    device: str, on_cuda: bool, argument: str, value: int, message: str
) -> None:
    """The CPU writes nothing; CUDA makes the valid copies."""
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


# ---- rows of a tree equal rows of plain decoding ----


class TreeStep:
    """Ragged step of trees, chains, chunks and idle requests over a poisoned cache."""

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
        # Keys and values of each request: its text, then its rows in order.
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
        """Compute attention over the chains, with or without declaring shared prefixes."""
        chains = {name: one.to(self.device) for name, one in vars(self.chains).items()}
        attention.copy_kv(*self.cache, chains["from_slots"], chains["to_slots"])
        indices = batching.prepare_batch(
            chains["qo_lens"],
            chains["kv_lens"],
            torch.zeros_like(chains["qo_lens"]),
            chains["kv_indptr"],
            chains["kv_indices"],
            page_size=self.page_size,
            out=BatchIndices.empty(
                len(chains["qo_lens"]),
                total_rows=len(self.q),
                num_output_rows=0,
                device=self.device,
            ),
        )
        self.check_positions(indices)
        prefixes = None
        if shared:
            leaders = np.arange(len(chains["qo_lens"]))
            lens = np.zeros_like(leaders)
            for b, text in enumerate(self.texts):
                begin, end = self.chains.chain_indptr[b : b + 2].tolist()
                if end - begin > 1:
                    leaders[begin:end], lens[begin:end] = begin, text // 256 * 256
            prefixes = PrefixTensors(
                ints(leaders.tolist(), self.device)[None], ints(lens.tolist(), self.device)[None]
            )
        got = attention.append_attention(
            self.q.to(self.device),
            PagedKv(*self.cache),
            PagedBatch(
                indices.qo_indptr, chains["kv_indptr"], chains["kv_indices"], chains["kv_lens"]
            ),
            sliding_window=window,
            return_lse=True,
            prefixes=prefixes,
        )
        return tuple(one.cpu() for one in got)

    def check_positions(self, indices: BatchIndices) -> None:
        want = []
        for tree, text, rows in zip(self.trees, self.texts, self.qo_lens, strict=True):
            first = text + 1 + len(tree) - rows
            want += [text + d for d in [0, *depths(tree)]] if tree else range(first, text + 1)
        assert indices.positions.tolist() == want

    def plain(self, window: int | None) -> tuple[Tensor, ...]:
        """Compute attention for each row alone, over exactly the tokens that it follows."""
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
                    PagedKv(*cache.to(self.device)),
                    PagedBatch(
                        ints([0, 1], self.device),
                        ints([0, pages], self.device),
                        ints([*range(pages)], self.device),
                        ints([len(tokens)], self.device),
                    ),
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
    """Trees, chains, chunks and idle requests run in one step, with and without shared prefixes."""
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
def test_cache_after_compaction_equals_plain_decoding(
    device: str, isa: str, page_size: int
) -> None:
    """Any path may be accepted; the spare pages of chains are not used afterwards."""
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
    """Hidden states are compacted as pages of one token; rows after the path may hold anything."""
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
            rows_of_request = states[indptr[b] : indptr[b + 1]]
            want = rows_of_request[[0, *(1 + node for node in path)]]
            assert torch.equal(reads.cpu()[indptr[b] : indptr[b] + len(want)], want)
    assert any(path != list(range(len(path))) for path in paths)
