# SPDX-License-Identifier: Apache-2.0
"""Exact distribution of emitted tokens: the real ops, with their random numbers integrated out.

Every uniform that an op draws (one per distinct Philox key) is a coordinate of a box of 24-bit
numbers. If the lowest and highest corners of a box have the same outcome, the box is one piece of
the distribution, since every decision compares one uniform with bounds in one direction. Any other
box is split where the outcome changes, to the last bit. No knowledge of a strategy is used.

Many plays run at once, as requests of one batch. The outcome of a play must not depend on the other
plays, or the distribution could not be integrated: that is checked as well.
"""

import importlib.util
import inspect
import math
import re
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from sampling_cases import by_field
from specops import reference, sampling
from specops.sampling import VerifyStrategy
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
LATTICE = 2**24  # number of values of a uniform
OWN = 99  # purpose of the games' own uniforms; no op uses it

Key = tuple[int, int, int, int, int]  # position, purpose, choice_index, sub_index, anchor


class NewKeysError(Exception):
    """Error: a uniform was requested that is not a coordinate yet."""


class Coins:
    """The uniforms of many plays at once: row i of the table belongs to the request of seed i."""

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self.values = torch.zeros(0, 0)

    def of_seed(
        self, seed: int, position: int, purpose: int, choice: int, sub_index: int, anchor: int
    ) -> float:
        """Return the uniform of a key, for the reference."""
        return float(self.column((position, purpose, choice, sub_index, anchor))[seed])

    def column(self, key: Key) -> Tensor:
        if key not in self.keys:
            self.keys.append(key)
        index = self.keys.index(key)
        values = self.values
        return values[:, index] if index < values.shape[1] else values.new_zeros(len(values))


class ReferenceOps:
    """The ops in plain PyTorch, with parts of their source text replaced."""

    probs_dtype = torch.float64

    def __init__(self, *replaced: tuple[str, str]) -> None:
        # Both modules are joined, so that a replacement applies to both.
        source = inspect.getsource(reference.distribution) + re.sub(
            r"from specops\.reference\.distribution import \([^)]*\)",
            "",
            inspect.getsource(reference.sampling),
        )
        for old, new in replaced:
            assert source.count(old) == 1, f"not in the reference, or not once: {old}"
            source = source.replace(old, new)
        self.module = types.ModuleType("reference_of_a_test")
        exec(compile(source, reference.sampling.__file__, "exec"), self.module.__dict__)
        self.target_probs, self.cache = self.module.target_probs, {}
        self.module.target_probs = self._remembered

    def _remembered(self, row: Tensor, *filters: Any, **named: Any) -> Tensor:
        """Cache target distributions: a game has few distinct rows, and repeats them often."""
        key = (row.numpy().tobytes(), filters, *named.items())
        if key not in self.cache:
            self.cache[key] = self.target_probs(row, *filters, **named)
        return self.cache[key]

    @contextmanager
    def using(self, coins: Coins) -> Iterator[None]:
        self.uniform = coins.of_seed
        yield

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.sample(*args, **kwargs, uniform=self.uniform)

    def verify(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.verify(*args, **kwargs, uniform=self.uniform)


@cache
def scripted(name: str) -> ModuleType:
    """Load the production ops compiled with a table in place of the random generator."""
    found = sorted((ROOT / "build" / "scripted").glob(f"{name}.*so"))
    if not found:
        raise RuntimeError(f"the module {name} is not built: run `make -C tools simt`")
    spec = importlib.util.spec_from_file_location(name, found[0])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class ProductionOps:
    """`specops.sampling` over a scripted module."""

    probs_dtype = torch.float32

    def __init__(self, name: str) -> None:
        self.module = scripted(name)

    @contextmanager
    def using(self, coins: Coins) -> Iterator[None]:
        table = coins.values.float().contiguous()
        self.module.set_uniforms(coins.keys, table.data_ptr(), len(table))
        before = sampling._C
        sampling._C = self.module  # type: ignore[assignment]
        try:
            yield
        finally:
            sampling._C = before
            requested = [tuple(key) for key in self.module.asked_keys()]
            coins.keys += [key for key in requested if key not in coins.keys]

    def __getattr__(self, name: str) -> Any:
        return getattr(sampling, name)


class Distribution(NamedTuple):
    outcomes: Tensor  # [pieces, ...]
    masses: Tensor  # [pieces], float64
    keys: set[Key]  # keys of the uniforms that affect outcomes


def integrate(ops: Any, play: Callable[[Coins, int], Tensor]) -> Distribution:
    """Integrate `play(coins, n)`, which returns the outcomes of n plays, one per table row."""
    coins = Coins()
    while True:
        try:
            return _integrate(ops, play, coins)
        except NewKeysError:
            continue


def _integrate(ops: Any, play: Callable[[Coins, int], Tensor], coins: Coins) -> Distribution:
    count = len(coins.keys)

    def outcomes(points: Tensor) -> Tensor:
        coins.values = points.double() / LATTICE
        with ops.using(coins):
            result = play(coins, len(points))
        if len(coins.keys) > count:
            raise NewKeysError
        return result

    # Plays at random points meet most keys before any work is done.
    outcomes(torch.randint(LATTICE, (64, count)))
    low = torch.zeros(1, count, dtype=torch.int64)
    high = torch.full((1, count), LATTICE - 1)
    pieces: list[Tensor] = []
    masses: list[Tensor] = []
    decisive: set[Key] = set()
    while len(low):
        lowest = outcomes(low)
        others = outcomes(low.flip(0)).flip(0)
        assert torch.equal(others, lowest), "a request's tokens depend on its place in the batch"
        same = _equal(lowest, outcomes(high))
        pieces.append(lowest[same])
        masses.append(((high - low + 1)[same].double() / LATTICE).prod(dim=1))
        low, high, lowest = low[~same], high[~same], lowest[~same]
        if not len(low):
            break
        axis, last = _split_points(low, high, lowest, outcomes)
        decisive.update(coins.keys[i] for i in axis.tolist())
        at = torch.arange(len(low))
        below, above = high.clone(), low.clone()
        below[at, axis], above[at, axis] = last, last + 1
        low, high = torch.cat([low, above]), torch.cat([below, high])
    return Distribution(torch.cat(pieces), torch.cat(masses), decisive)


def _split_points(
    low: Tensor, high: Tensor, lowest: Tensor, outcomes: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return where to split each box: a coordinate, and its last value with the lowest outcome.

    The coordinate is the first that changes the outcome on the way to the highest corner.
    """
    order, at = torch.arange(low.shape[1]), torch.arange(len(low))

    def corner(steps: Tensor) -> Tensor:
        return torch.where(order < steps[:, None], high, low)

    none = torch.zeros(len(low), dtype=torch.int64)
    axis = _bisect(none, none + low.shape[1], lambda steps: _equal(lowest, outcomes(corner(steps))))
    before = corner(axis)

    def moved(x: Tensor) -> Tensor:
        points = before.clone()
        points[at, axis] = x
        return points

    last = _bisect(low[at, axis], high[at, axis], lambda x: _equal(lowest, outcomes(moved(x))))
    return axis, last


def with_all_coins(ops: Any, value: float, n: int, call: Callable[[], Any]) -> Any:
    """Return the result of a call of n requests in which every uniform is `value`."""
    coins = Coins()
    while True:
        known = len(coins.keys)
        coins.values = torch.full((n, known), value)
        with ops.using(coins):
            result = call()
        if len(coins.keys) == known:
            return result


def _equal(a: Tensor, b: Tensor) -> Tensor:
    return (a == b).flatten(1).all(1)


def _bisect(low: Tensor, high: Tensor, holds: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the last point at which `holds`, which is true at `low` and false at `high`."""
    while bool((high - low > 1).any()):
        middle = (low + high) // 2
        good = holds(middle)
        low, high = torch.where(good, middle, low), torch.where(good, high, middle)
    return low


# ---- a small world: every prefix has its own target and draft distribution ----

START = 5  # position of the first token of a game


class World(NamedTuple):
    """Tables by prefix: the empty prefix is row 0; prefix s and then token x is s * V + 1 + x."""

    target_logits: Tensor  # [prefixes, V]
    draft_logits: Tensor  # [prefixes, V]
    target: Tensor  # [prefixes, V], float64: the expected distribution
    draft: Tensor  # [prefixes, V], float64
    length: int


def num_prefixes(vocab: int, length: int) -> int:
    return sum(vocab**n for n in range(length + 1))


def make_world(
    vocab: int,
    length: int,
    seed: int = 0,
    filters: dict[str, Any] | None = None,
    processors_of: Callable[[Tensor, Tensor], Any] | None = None,
) -> World:
    """Return random logits; some draft logits equal the target's, and some tokens have no mass."""
    generator = torch.Generator().manual_seed(seed)
    size = num_prefixes(vocab, length)
    target_logits = torch.randn(size, vocab, generator=generator)
    draft_logits = torch.randn(size, vocab, generator=generator)
    rows = torch.arange(size)
    if vocab > 2:
        target_logits[rows % 4 == 1, 0] = -torch.inf
        draft_logits[rows % 5 == 2, vocab - 1] = -torch.inf
        draft_logits[rows % 7 == 3] = target_logits[rows % 7 == 3]
    plain = target_logits
    if processors_of is not None:  # one prefix at a time, with no drafts
        depths = torch.tensor([len(tokens_of(s, vocab)) for s in range(size)])
        plain = reference.process_logits(target_logits, processors_of(rows, rows), START + depths)
    return World(
        target_logits,
        draft_logits,
        torch.stack([reference.target_probs(row, **{**WARM, **(filters or {})}) for row in plain]),
        torch.stack([reference.target_probs(row, 1.0) for row in draft_logits]),
        length,
    )


WARM = {"temperature": 1.0}


def tokens_of(prefix: int, vocab: int) -> list[int]:
    return [] if prefix == 0 else [*tokens_of((prefix - 1) // vocab, vocab), (prefix - 1) % vocab]


PROMPT = [0, 1, 1, 0, 0]  # its length is START


def every_processor(vocab: int, length: int) -> Callable[[Tensor, Tensor], Any]:
    """Return all processors at once; the tables have a slot for each prefix."""
    size = num_prefixes(vocab, length)
    known = [PROMPT + tokens_of(s, vocab) for s in range(size)]
    distinct = [sorted(set(tokens)) for tokens in known]
    packed = [
        [2 * tokens[START:].count(t) + (t in PROMPT) for t in ids]
        for tokens, ids in zip(known, distinct, strict=True)
    ]

    def table(rows: list[list[int]]) -> Tensor:
        width = max(len(row) for row in rows)
        return torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int32)

    tables = sampling.LogitsProcessors(
        token_ids=table(known),
        prompt_lens=column(START, size, torch.int32),
        counted_token_ids=table(distinct),
        token_counts=table(packed),
        repetition_penalty=column(1.4, size, torch.float32),
        presence_penalty=column(0.3, size, torch.float32),
        frequency_penalty=column(0.5, size, torch.float32),
        logit_bias_token_ids=column(1, size, torch.int32)[:, None].contiguous(),
        logit_bias=column(0.7, size, torch.float32)[:, None].contiguous(),
        bad_words=torch.tensor([[[0, 1, -1], [1, 1, 2]]], dtype=torch.int32)
        .expand(size, -1, -1)
        .contiguous(),
        stop_token_ids=column(vocab - 1, size, torch.int32)[:, None].contiguous(),
        min_tokens=column(2, size, torch.int32),
        allowed_token_mask=torch.tensor([[2**vocab - 1 - 4], [2**vocab - 2]], dtype=torch.int32),
    )

    def of(prefixes: Tensor, rows: Tensor) -> Any:
        mask_indices = (rows % 5 - 3).clamp(min=-1).int()
        return tables._replace(slots=prefixes.int(), mask_indices=mask_indices)

    return of


def extended(world: World, prefixes: Tensor, masses: Tensor) -> Tensor:
    """Return the distribution of the first `length` tokens if each prefix continues plainly."""
    distribution = world.target
    vocab = distribution.shape[1]
    mass = torch.zeros(num_prefixes(vocab, world.length), dtype=torch.float64)
    mass.index_add_(0, prefixes, masses)
    inner = num_prefixes(vocab, world.length - 1)
    for s in range(inner):
        mass[s * vocab + 1 : (s + 1) * vocab + 1] += mass[s] * distribution[s]
    return mass[inner:]


def target_distribution(world: World) -> Tensor:
    return extended(world, torch.tensor([0]), torch.ones(1, dtype=torch.float64))


def append(world: World, prefixes: Tensor, tokens: Tensor) -> Tensor:
    """Return the prefixes after one more token each; -1 appends nothing."""
    vocab = world.target.shape[1]
    return torch.where(tokens >= 0, prefixes * vocab + 1 + tokens, prefixes)


def column(value: float, n: int, dtype: torch.dtype) -> Tensor:
    return torch.full((n,), value, dtype=dtype)


# ---- games: steps of drafting and verification ----


class Game(NamedTuple):
    """Steps of one request that are played repeatedly, and their sampling parameters."""

    world: World
    k: int
    strategy: int
    steps: int = 1
    policy: int = 0
    draft_form: str = "dense"  # or sparse, rows, one_hot
    ragged: bool = False  # whether some prefixes have fewer drafts than k, or none
    anchored: bool = True  # whether the drafts of block verification use the step's anchor
    accept_rates: tuple[float, ...] = ()
    filters: dict[str, Any] = {}  # noqa: RUF012
    processors_of: Callable[[Tensor, Tensor], Any] | None = None  # (start of step, of each row)


def play_chain(ops: Any, game: Game) -> Callable[[Coins, int], Tensor]:
    """Play drafting by the production sampler and verification; the outcome is the whole trace.

    Its first column is the final prefix, its second the number of accepted drafts.
    """

    def play(coins: Coins, n: int) -> Tensor:
        prefixes = torch.zeros(n, dtype=torch.int64)
        positions = column(START, n, torch.int32)
        total = torch.zeros(n, dtype=torch.int64)
        trace: list[Tensor] = []
        for _ in range(game.steps):
            drafts, probs, visited = draft_chain(ops, game, prefixes, positions)
            tokens, accepted = verify_chain(ops, game, drafts, probs, visited, positions)
            for token in tokens.long().unbind(1):
                prefixes = append(game.world, prefixes, token)
            positions = positions + 1 + accepted
            total += accepted
            trace += [drafts.long(), tokens.long()]
        return torch.cat([prefixes[:, None], total[:, None], *trace], dim=1)

    return play


def draft_chain(
    ops: Any, game: Game, prefixes: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the drafts, their distributions and the prefix of every row."""
    n, vocab = len(prefixes), game.world.draft.shape[1]
    drafts, probs, visited = [], [], [prefixes]
    anchors = positions + 1 if game.strategy == VerifyStrategy.BLOCK and game.anchored else None
    more = {} if anchors is None else {"anchors": anchors}
    for j in range(game.k):
        probs.append(torch.empty(n, vocab))
        drafts.append(
            by_field(ops.sample)(
                game.world.draft_logits[visited[-1]],
                positions + j,
                temperature=torch.ones(n),
                seeds=torch.arange(n),
                purpose=reference.DRAFT,
                probs=probs[-1],
                **more,
            )
        )
        visited.append(append(game.world, visited[-1], drafts[-1].long()))
    if game.k == 0:
        return torch.empty(n, 0, dtype=torch.int32), torch.empty(n, 0, vocab), prefixes[:, None]
    return torch.stack(drafts, 1), torch.stack(probs, 1), torch.stack(visited, 1)


def draft_form(game: Game, probs: Tensor, prefixes: Tensor) -> dict[str, Any]:
    """Return the draft arguments of verify; the sparse form is unordered, with a hole at the end.

    The `rows` form reverses the requests and adds an unused row. It has no distribution for the
    last of several drafts, and no distributions for odd-numbered prefixes. A draft without a
    distribution counts as certain, which is allowed for any draft.
    """
    if game.draft_form == "one_hot":
        return {}
    if game.draft_form == "dense":
        return {"draft_probs": probs}
    n, k, vocab = probs.shape
    if game.draft_form == "rows":
        rows = torch.where(prefixes % 2 == 0, torch.arange(n, 0, -1), -1)
        table = probs.new_full((n + 1, max(k - 1, 1), vocab), math.nan)
        table[rows[rows >= 0]] = probs[rows >= 0, : max(k - 1, 1)]
        return {"draft_probs": table, "draft_prob_rows": rows.int()}
    ids = (torch.arange(vocab + 1) * (vocab - 1)) % vocab
    token_ids = ids.int().expand(*probs.shape[:-1], -1).clone()
    token_ids[..., vocab] = -1
    shuffled = probs[..., ids].clone()
    shuffled[..., vocab] = 7.0
    return {"draft_probs": shuffled, "draft_prob_token_ids": token_ids}


def verify_chain(
    ops: Any, game: Game, drafts: Tensor, probs: Tensor, visited: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    n, k = drafts.shape
    num_rows = visited[:, 0] % (k + 1) + 1 if game.ragged else column(k + 1, n, torch.int64)
    exists = torch.arange(k + 1) < num_rows[:, None]
    output_indptr = torch.zeros(n + 1, dtype=torch.int32)
    output_indptr[1:] = num_rows.cumsum(0)
    more = draft_form(game, probs, visited[:, 0])
    if game.accept_rates:
        more["accept_rates"] = torch.tensor(game.accept_rates).expand(n, -1).contiguous()
    if game.processors_of is not None:
        more["processors"] = game.processors_of(visited[:, 0], visited[exists])
    parameters = {**WARM, **game.filters}
    for name, value in parameters.items():
        dtype = torch.int32 if name == "top_k" else torch.float32
        more[name] = column(value, n, dtype)
    tokens, accepted = by_field(ops.verify)(
        game.world.target_logits[visited[exists]],
        output_indptr,
        drafts,
        positions=positions,
        strategy=column(game.strategy, n, torch.int32),
        policy=column(game.policy, n, torch.int32),
        seeds=torch.arange(n),
        **more,
    )
    return tokens, accepted


def play_tree(ops: Any, game: Game, parents: list[int]) -> Callable[[Coins, int], Tensor]:
    """Play a tree: each node's token is drawn independently from its prefix's distribution."""

    def play(coins: Coins, n: int) -> Tensor:
        nodes, vocab = len(parents), game.world.draft.shape[1]
        visited = [torch.zeros(n, dtype=torch.int64)]
        drafts = []
        for node, parent in enumerate(parents):
            prefix = visited[parent + 1]
            u = coins.column((node, OWN, 0, 0, 0))
            running = game.world.draft[prefix].cumsum(1)
            token = (running <= (u[:, None] * running[:, -1:]).expand(n, 1)).sum(1)
            drafts.append(token.clamp(max=vocab - 1))
            visited.append(append(game.world, prefix, drafts[-1]))
        rows = torch.stack(visited, 1)
        more = draft_form(game, game.world.draft[rows[:, :nodes]].float(), visited[0])
        if game.processors_of is not None:
            more["processors"] = game.processors_of(rows[:, 0], rows.flatten())
        walked = torch.empty(n, nodes, dtype=torch.int32)
        tokens, accepted = by_field(ops.verify)(
            game.world.target_logits[rows.flatten()],
            torch.arange(0, n * (nodes + 1) + 1, nodes + 1, dtype=torch.int32),
            torch.stack(drafts, 1).int(),
            positions=column(START, n, torch.int32),
            parents=torch.tensor(parents, dtype=torch.int32).expand(n, -1).contiguous(),
            strategy=column(game.strategy, n, torch.int32),
            policy=column(game.policy, n, torch.int32),
            temperature=torch.ones(n),
            seeds=torch.arange(n),
            accepted_nodes=walked,
            **more,
        )
        prefixes = visited[0]
        for token in tokens.long().unbind(1):
            prefixes = append(game.world, prefixes, token)
        ends = [prefixes[:, None], accepted[:, None].long()]
        return torch.cat([*ends, torch.stack(drafts, 1), tokens.long(), walked.long()], 1)

    return play


def distribution_error(
    distribution: Distribution, world: World, expected: Tensor | None = None
) -> float:
    """Return the largest error of any sequence's probability."""
    assert abs(float(distribution.masses.sum()) - 1) < 1e-9
    got = extended(world, distribution.outcomes[:, 0], distribution.masses)
    return float((got - (target_distribution(world) if expected is None else expected)).abs().max())


def mean_accepted(distribution: Distribution) -> float:
    return float((distribution.outcomes[:, 1] * distribution.masses).sum())


def closed_form(game: Game, acceptance: Callable[[int, int], Tensor | float]) -> Tensor:
    """Return the distribution if row r accepts draft x with probability acceptance(prefix, r)[x].

    A row that accepts no draft samples its own token.
    """
    world, vocab = game.world, game.world.target.shape[1]
    mass = torch.zeros(num_prefixes(vocab, world.length), dtype=torch.float64)

    def go(s: int, weight: float, step: int, row: int) -> None:
        if weight == 0:
            return
        if step == game.steps:
            mass[s] += weight
            return
        accepted = torch.zeros(vocab, dtype=torch.float64)
        if row < game.k:
            accepted = world.draft[s] * acceptance(s, row)
        rest = (1 - accepted.sum()) * world.target[s]
        for x in range(vocab):
            child = s * vocab + 1 + x
            go(child, weight * float(accepted[x]), step, row + 1)
            go(child, weight * float(rest[x]), step + 1, 0)

    go(0, 1.0, 0, 0)
    return extended(world, torch.arange(len(mass)), mass)
