# SPDX-License-Identifier: Apache-2.0
"""Shared prefixes found in page lists: groups, saved bytes, and unchanged bits."""

import random
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import simt
import specops
import torch
from checkpoints import BASE, write_config
from fake_gpu import FakeGpu
from specops import attention, batching, reference
from specops.attention import PagedBatch, PagedKv, PrefixTensors
from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.engine.memory.kv_cache import PagePool
from specops.engine.plan import Part, Plan
from specops.engine.sharing.prefixes import PrefixFinder
from test_lossless import bits
from torch import Tensor

Lists = list[list[int]]


def random_lists(seed: int, size: int, most_pages: int) -> Lists:
    """Return page lists whose common beginnings form a random tree.

    Every page has one list of pages before it.
    """
    draw = random.Random(seed)
    ids = iter(draw.sample(range(100 * most_pages * size), 2 * most_pages * size))
    lists: Lists = [[]]
    for _ in range(size):
        like = draw.choice(lists)
        common = like[: draw.randint(0, len(like))]
        lists.append(
            [*common, *(next(ids) for _ in range(draw.randint(0, most_pages)))][:most_pages]
        )
    lists = lists[1:]
    draw.shuffle(lists)
    return lists


def find(lists: Lists, page_size: int, leaf: int, **limits: int) -> batching.SharedPrefixes:
    """Return the shared prefixes of the lists, after comparing them with the reference."""
    lengths = [len(pages) for pages in lists]
    kv_indptr = torch.tensor([0, *np.cumsum(lengths, dtype=int)], dtype=torch.int32)
    kv_indices = torch.tensor([*(page for pages in lists for page in pages), -7], dtype=torch.int32)
    sizes: dict[str, Any] = {"page_size": page_size, "leaf_tokens": leaf, **limits}
    found = batching.find_shared_prefixes(kv_indptr, kv_indices, **sizes)
    want = reference.find_shared_prefixes(kv_indptr, kv_indices, **sizes)
    again = batching.SharedPrefixes.empty(len(lists), max_levels=limits.get("max_levels", 8))
    again.order.fill_(-9), again.prefix_leaders.fill_(-9), again.prefix_lens.fill_(-9)
    batching.find_shared_prefixes(kv_indptr, kv_indices, **sizes, out=again)
    levels = again.num_levels
    assert len(found.prefix_leaders) == len(found.prefix_lens) == levels
    for name, value in vars(found).items():
        assert np.array_equal(value, want[name]), name
    assert torch.equal(again.order, found.order)
    assert torch.equal(again.prefix_leaders[:levels], found.prefix_leaders)
    assert torch.equal(again.prefix_lens[:levels], found.prefix_lens)
    return found


def shared_leaves(found: batching.SharedPrefixes, a: int, b: int, leaf: int) -> int:
    """Return the number of leaves that two requests share according to the groups."""
    shared = 0
    for leaders, lens in zip(found.prefix_leaders, found.prefix_lens, strict=True):
        if leaders[a] == leaders[b]:
            assert lens[a] == lens[b] and lens[a] % leaf == 0
            shared = int(lens[a]) // leaf
    return shared


@pytest.mark.parametrize("page_size,leaf", [(16, 64), (64, 64), (32, 256)])
def test_groups_are_the_common_prefixes_of_page_lists(page_size: int, leaf: int) -> None:
    depths = set()
    for seed in range(60):
        lists = random_lists(seed, size=1 + seed % 14, most_pages=40)
        found = find(lists, page_size, leaf)
        per_leaf = leaf // page_size
        starts = [
            tuple(pages[: end * per_leaf])
            for pages in lists
            for end in range(1, len(pages) // per_leaf + 1)
        ]
        assert found.num_saved_tokens == (len(starts) - len(set(starts))) * leaf
        assert (len(found.prefix_leaders) > 0) == (found.num_saved_tokens > 0)
        assert sorted(found.order.tolist()) == list(range(len(lists)))
        depths.add(len(found.prefix_leaders))
        ordered = [lists[index] for index in found.order]
        for a, left in enumerate(ordered):
            for b, right in enumerate(ordered[:a]):
                common = 0
                while left[: common + 1] == right[: common + 1] and common < len(left):
                    common += 1
                assert shared_leaves(found, a, b, leaf) == common // per_leaf
    assert depths >= {0, 1, 2, 3}


def test_number_of_levels_is_limited() -> None:
    """Ten groups are nested: with eight levels, deeper groups share what the eighth does."""
    ids = iter(range(1000))
    spine = [next(ids) for _ in range(11)]
    lists = [[*spine[: depth + 1], next(ids)] for depth in range(11)]
    for most in (8, 3, 0):
        found = find(lists, page_size=64, leaf=64, max_levels=most)
        assert found.prefix_leaders.shape == (most, 11)
        place = {index: at for at, index in enumerate(found.order.tolist())}
        for a in range(11):
            for b in range(a):
                got = shared_leaves(found, place[a], place[b], 64)
                assert got == min(b + 1, most)


def test_few_requests_and_empty_lists_equal_the_reference() -> None:
    cases: list[Lists] = [[], [[]], [[], []], [[3], []], [[3, 4]] * 3, [[5], [2], [5], [2]]]
    for lists in cases:
        find(lists, page_size=64, leaf=64)
        find(lists, page_size=64, leaf=128)


def test_docstring_example_of_find_shared_prefixes() -> None:
    found = find([[7, 8, 1], [7, 9], [7, 8, 2]], page_size=16, leaf=16)
    assert found.order.tolist() == [0, 2, 1]
    assert found.prefix_leaders.tolist() == [[0, 0, 0], [0, 0, 2]]
    assert found.prefix_lens.tolist() == [[16, 16, 16], [32, 32, 0]]


@pytest.mark.parametrize(
    "change,message",
    [
        ({"kv_indptr": [0, 2, 1]}, r"kv_indptr\[2\] must be in 2 .. 3, got 1"),
        ({"kv_indptr": [0, 2, 4]}, r"kv_indptr\[2\] must be in 2 .. 3, got 4"),
        ({"kv_indptr": [-1, 2, 3]}, r"kv_indptr\[0\] must be in 0 .. 3, got -1"),
        ({"page_size": 0}, "page_size must be an int32 of at least 1, got 0"),
        ({"leaf_tokens": 24}, "leaf_tokens must be a multiple of page_size=16, got 24"),
        ({"max_levels": -1}, "max_levels must be an int32 of at least 0, got -1"),
    ],
)
def test_find_shared_prefixes_refuses_invalid_arguments(
    change: dict[str, Any], message: str
) -> None:
    case: dict[str, Any] = {"kv_indptr": [0, 2, 3], "page_size": 16, "leaf_tokens": 64, **change}
    kv_indptr = torch.tensor(case.pop("kv_indptr"), dtype=torch.int32)
    with pytest.raises(ValueError, match=f"^find_shared_prefixes: {message}"):
        batching.find_shared_prefixes(kv_indptr, torch.tensor([4, 5, 6]).int(), **case)


def test_find_shared_prefixes_writes_into_out() -> None:
    kv_indptr, kv_indices = torch.tensor([0, 2, 4]).int(), torch.tensor([5, 1, 5, 2]).int()
    sizes: dict[str, Any] = {"page_size": 16, "leaf_tokens": 16}
    out = batching.SharedPrefixes.empty(2, max_levels=3)
    found = batching.find_shared_prefixes(kv_indptr, kv_indices, **sizes, max_levels=3, out=out)
    assert found is out and (out.num_levels, out.num_saved_tokens) == (1, 16)
    assert out.prefix_leaders[:1].tolist() == [[0, 0]] and out.prefix_lens[:1].tolist() == [
        [16, 16]
    ]
    wrong = [
        (3, 3, r"order must be int32 \[batch=2\], got int32 \[3\]"),
        (2, 2, r"prefix_leaders must be int32 \[max_levels=3, batch=2\], got int32 \[2, 2\]"),
    ]
    for batch, levels, message in wrong:
        other = batching.SharedPrefixes.empty(batch, max_levels=levels)
        with pytest.raises(ValueError, match=f"^find_shared_prefixes: {message}"):
            batching.find_shared_prefixes(kv_indptr, kv_indices, **sizes, max_levels=3, out=other)


def found_for(lists: Lists, page_size: int, leaf: int) -> tuple[Lists, PrefixTensors]:
    """Return the lists in the order of the groups, and the groups."""
    found = find(lists, page_size, leaf)
    return [lists[index] for index in found.order], found.tensors


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_shared_prefixes_change_no_bit_of_append_attention(
    device: str, isa: str, on_cuda: bool, page_size: int, seed: int
) -> None:
    """One call has single rows, verification and chunks; it equals each request alone."""
    if on_cuda and seed % 3:
        pytest.skip("one seed in three is enough for the interpreter")
    draw = random.Random(seed)
    lists = random_lists(seed, size=9, most_pages=1400 // page_size)
    lists, prefixes = found_for(lists, page_size, 256 if on_cuda else 64)
    dtype = (torch.bfloat16, torch.float32, torch.float16)[seed % 3]
    qo_lens = [draw.choice([0, 1, 1, 1, 5, 12]) for _ in lists]
    kv_lens = [len(pages) * page_size + count for pages, count in zip(lists, qo_lens, strict=True)]
    # Every request has its own page behind the complete ones; ids become dense.
    lists = [[*pages, -1 - b] for b, pages in enumerate(lists)]
    ids = {page: place for place, page in enumerate({page for pages in lists for page in pages})}
    lists = [[ids[page] for page in pages] for pages in lists]
    caches = [torch.randn(len(ids), page_size, 2, 64).to(dtype) for _ in range(2)]
    q = torch.randn(sum(qo_lens), 4, 64).to(dtype)

    def arguments(only: Sequence[int]) -> tuple[Tensor, PagedKv, PagedBatch]:
        def indptr(lengths: list[int]) -> Tensor:
            return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)

        begins = indptr(qo_lens).tolist()
        rows = torch.cat([torch.arange(begins[b], begins[b + 1]) for b in only])
        paged = (
            indptr([qo_lens[b] for b in only]),
            indptr([len(lists[b]) for b in only]),
            torch.tensor([page for b in only for page in lists[b]], dtype=torch.int32),
            torch.tensor([kv_lens[b] for b in only], dtype=torch.int32),
        )
        cache = PagedKv(*(one.to(device) for one in caches))
        return q[rows].to(device), cache, PagedBatch(*(one.to(device) for one in paged))

    whole_batch = arguments(range(len(lists)))
    prefixes = PrefixTensors(*(one.to(device) for one in prefixes))
    flat = attention.append_attention(*whole_batch, return_lse=True)
    for threads in (1, 3):
        specops.set_num_threads(threads)
        got = attention.append_attention(*whole_batch, return_lse=True, prefixes=prefixes)
        for one, other in zip(got, flat, strict=True):
            assert torch.equal(one, other)
    alone = [attention.append_attention(*arguments([b])) for b in range(len(lists)) if qo_lens[b]]
    assert torch.equal(torch.cat([x for x in alone if isinstance(x, Tensor)]), flat[0])


# ---- the engine ----

SYSTEM = [7, 8, 9, 10, 11] * 40  # 200 tokens
SHOTS = [SYSTEM + [20 + i, 21, 22] * 30 for i in range(2)]  # 290, of which 200 are shared
PROMPTS = [
    *[SHOTS[i % 2] + [40 + i, 41, 42] * 3 for i in range(6)],
    SYSTEM + [5, 6] * 9,
    [3, 4, 5] * 50,
]


def request_with(pages: "array[int]") -> Any:
    placement = SimpleNamespace(num_registered_pages=len(pages))
    return SimpleNamespace(pages=pages, placement=placement)


def test_equal_pages_after_different_ones_are_not_shared() -> None:
    """A text may begin on pages with and without draft KV, and continue on the same pages."""
    pool = PagePool(16, 16, enable_prefix_caching=True)
    held: list[Any] = []
    for first in (None, b"draft"):
        pages = pool.allocate(8) or []
        before = None
        for index, page in enumerate(pages):
            key = first if index == 0 else None
            before = pages[index] = pool.register(page, before, [index] * 16, key)
        held.append(request_with(array("i", pages)))
    assert held[0].pages[0] != held[1].pages[0] and held[0].pages[1:] == held[1].pages[1:]
    again = request_with(held[1].pages[:])
    pool.match_prefix([index for index in range(8) for _ in range(16)], 128)
    finder = PrefixFinder(pool, leaf_tokens=64)
    plan = Plan([Part(one, 0, 1, 0, True) for one in [*held, again]])
    finder.arrange(plan)
    found = plan.prefixes
    assert found is not None and found.num_saved_tokens == 128
    groups = {
        id(part.request): leader for part, leader in zip(plan.parts, found.leaders[0], strict=True)
    }
    assert groups[id(held[1])] == groups[id(again)] != groups[id(held[0])]


def params(index: int, max_tokens: int = 24) -> SamplingParams:
    return SamplingParams(
        n=2 if index % 3 == 0 else 1,
        max_tokens=max_tokens - index % 4,
        temperature=(0.0, 0.8, 0.0, 0.4)[index % 4],
        top_p=0.9 if index % 2 else 1.0,
        seed=index,
        ignore_eos=True,
        logprobs=1,
    )


class Watched:
    """An engine and its plans."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.plans: list[Plan] = []
        launch = engine._runner.launch

        def watch(plan: Plan, **options: Any) -> None:
            self.plans.append(plan)
            launch(plan, **options)

        engine._runner.launch = watch  # type: ignore[method-assign]

    def run(self) -> list[Any]:
        """Run all prompts twice; the second run finds them in the cache."""
        engine = self.engine
        many = [params(index) for index in range(len(PROMPTS))]
        done = engine.generate(PROMPTS, many) + engine.generate(PROMPTS, many)
        assert engine.num_free_pages == engine.num_pages
        return list(map(bits, done))

    @property
    def shared(self) -> list[Plan]:
        return [plan for plan in self.plans if plan.prefixes is not None]


NAIVE = SpeculativeConfig(method="naive")
METHODS = {
    "naive": NAIVE,
    "ngram": SpeculativeConfig.from_dict(
        {"method": "ngram", "num_speculative_tokens": 4, "min_ngram_size": 1}
    ),
    "suffix": SpeculativeConfig(method="suffix", num_speculative_tokens=6),
    "mtp": SpeculativeConfig(method="mtp", num_speculative_tokens=3),
}


def make(model_dir: Path, speculative: SpeculativeConfig = NAIVE, **config: Any) -> Watched:
    config.setdefault("device", "cpu")
    return Watched(
        Engine(
            EngineConfig(
                model=str(model_dir), load_format="dummy", speculative_config=speculative, **config
            )
        )
    )


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(
        tmp_path_factory.mktemp("model"),
        num_hidden_layers=2,
        max_position_embeddings=384,
        num_nextn_predict_layers=2,
    )


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[Any]:
    """Return the results of plain decoding without sharing."""
    watched = make(model_dir, enable_cascade_attention=False)
    got = watched.run()
    assert not watched.shared and watched.engine.stats.cascade_saved_bytes == 0
    return got


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "config",
    [
        {"max_num_seqs": 32},
        {"max_num_seqs": 7, "max_num_batched_tokens": 40, "page_size": 32},
        {"max_num_seqs": 12, "num_pages": 48, "max_num_batched_tokens": 128},
    ],
    ids=["at once", "chunks", "preempted"],
)
def test_sharing_changes_no_bit(
    model_dir: Path, expected: list[Any], method: str, config: dict[str, Any]
) -> None:
    watched = make(model_dir, METHODS[method], **config)
    assert watched.run() == expected
    stats = watched.engine.stats
    assert stats.cascade_saved_bytes > 0
    assert max(len(plan.prefixes.leaders) for plan in watched.shared if plan.prefixes) > 1
    if "num_pages" in config:
        assert stats.num_preemptions > 0
    if "max_num_batched_tokens" in config:
        mixed = [{part.emits for part in plan.parts} for plan in watched.shared]
        assert {True, False} in mixed, "chunks share with requests that decode"
    if method != "naive":
        assert stats.speculative.num_accepted_tokens > 0
        rows = [{part.num_drafts for part in plan.parts} for plan in watched.shared]
        assert any(len(counts) > 1 for counts in rows), "verification beside plain rows"


def test_small_savings_are_not_shared(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, expected: list[Any]
) -> None:
    """On a GPU, sharing costs launches."""
    found = make(model_dir, max_num_seqs=32)
    assert found.run() == expected
    saved = [plan.prefixes.num_saved_tokens for plan in found.shared if plan.prefixes]
    least = sorted(saved)[len(saved) // 2]
    layer_bytes = 2 * BASE["num_key_value_heads"] * BASE["head_dim"] * 2  # keys, values; bf16
    monkeypatch.setattr("specops.engine.machine._LEAST_SAVED_BYTES", {"cpu": least * layer_bytes})
    watched = make(model_dir, max_num_seqs=32)
    assert watched.run() == expected
    retained = [plan.prefixes.num_saved_tokens for plan in watched.shared if plan.prefixes]
    assert retained == [one for one in saved if one >= least] and len(retained) < len(saved)


def test_saved_bytes_are_those_of_layers_with_full_attention(tmp_path: Path) -> None:
    """Pages behind a window are not read. The metric equals the engine's count."""
    metrics = pytest.importorskip("specops.server.metrics")
    results = []
    for cascade in (True, False):
        (tmp_path / str(cascade)).mkdir()
        changes = {"architectures": ["MistralForCausalLM"], "sliding_window": 90}
        model_dir = write_config(tmp_path / str(cascade), max_position_embeddings=384, **changes)
        watched = make(model_dir, enable_cascade_attention=cascade)
        results.append(watched.run())
        assert bool(watched.shared) == cascade and watched.engine.stats.cascade_saved_bytes == 0
    assert results[0] == results[1]
    watched = make(write_config(tmp_path, max_position_embeddings=384))
    watched.run()
    saved = sum(plan.prefixes.num_saved_tokens for plan in watched.shared if plan.prefixes)
    token_bytes = 2 * BASE["num_key_value_heads"] * BASE["head_dim"] * 2
    num_bytes = saved * token_bytes * BASE["num_hidden_layers"]
    assert watched.engine.stats.cascade_saved_bytes == num_bytes > 0
    client = pytest.importorskip("specops.service.thread").ThreadClient(watched.engine)
    text = metrics.Metrics(client).render().decode()
    (line,) = [one for one in text.splitlines() if one.startswith("specops:cascade_saved_bytes_t")]
    assert float(line.split()[-1]) == num_bytes


@pytest.mark.parametrize("method", METHODS)
def test_captured_steps_share_prefixes(
    model_dir: Path, expected: list[Any], use_fake_gpu: Callable[..., FakeGpu], method: str
) -> None:
    """Groups and the number of levels change; a replay reads them from its input."""
    for limits in ({"max_num_seqs": 16}, {"max_num_seqs": 12, "num_pages": 48}):
        device = use_fake_gpu()
        watched = make(model_dir, METHODS[method], **limits)
        for _ in range(2):  # with drafts of many lengths, shapes repeat late
            assert watched.run() == expected
        assert "replay" in device.log
        steps = watched.engine._runner.memory._steps.items()
        levels = {shape.prefix_levels for shape, step in steps if step.replay}
        assert 2 in levels
        groups = {plan.prefixes.lens.tobytes() for plan in watched.shared if plan.prefixes}
        assert len(groups) > len(levels)
        assert (watched.engine.stats.num_preemptions > 0) == ("num_pages" in limits)


def test_cuda_kernels_share_prefixes(
    tmp_path: Path, use_fake_gpu: Callable[..., FakeGpu], interpreter: None
) -> None:
    """CUDA kernels share leaves of 256 tokens."""
    model_dir = write_config(
        tmp_path,
        num_hidden_layers=1,
        vocab_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=320,
    )
    module, results = simt.load(), []
    for cascade in (True, False):
        use_fake_gpu()
        watched = make(model_dir, METHODS["ngram"], enable_cascade_attention=cascade)
        engine = watched.engine
        long = [7, 8, 9, 10] * 66
        engine.generate([long], params(0, max_tokens=1))
        module.reset_counters()
        prompts = [[*long, 5, 6], [*long, 11, 12, 13]]
        done = engine.generate(prompts, [params(1), params(2)])
        read = module.counters()["copied_bytes"]
        assert engine.num_captures > 0 and bool(watched.shared) == cascade
        results.append((list(map(bits, done)), read))
    assert results[0][0] == results[1][0]
    assert results[0][1] < 0.9 * results[1][1]  # weights are read in both
