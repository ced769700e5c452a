# SPDX-License-Identifier: Apache-2.0
"""The exact distribution of emitted tokens, and samples of a hundred thousand tokens.

exact_distribution.py integrates the distribution. Verifiers with one planted bug each must fail
these checks.

A check is a function of the ops: the reference, the CPU kernels or the CUDA kernels in the
interpreter, the last two compiled with scripted uniforms.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from exact_distribution import (
    LATTICE,
    ROOT,
    START,
    WARM,
    Coins,
    Distribution,
    Game,
    ProductionOps,
    ReferenceOps,
    closed_form,
    column,
    distribution_error,
    every_processor,
    integrate,
    make_world,
    mean_accepted,
    play_chain,
    play_tree,
    tokens_of,
    with_all_coins,
)
from sampling_cases import by_field
from specops import reference, sampling
from specops.sampling import AcceptPolicy, LogitsProcessors, Purpose, VerifyStrategy
from torch import Tensor

GREEDY, TARGET_MATCH, REJECTION, BLOCK, TOPP = VerifyStrategy
TOLERANCE = 1e-6
FORMS = ["dense", "sparse", "one_hot"]
CHAIN_FORMS = [*FORMS, "rows"]
TREE = [-1, -1, 0]  # two siblings, and a child of the first

SEED = 7  # seed of a world in which every decision matters

world = cache(make_world)


def check_distribution(
    ops: Any, game: Game, expected: Tensor | None = None, parents: list[int] | None = None
) -> Distribution:
    """Check the distribution, and that every step emits one token more than accepted drafts."""
    play = play_chain(ops, game) if parents is None else play_tree(ops, game, parents)
    distribution = integrate(ops, play)
    vocab = game.world.target.shape[1]
    depths = torch.tensor([len(tokens_of(int(s), vocab)) for s in distribution.outcomes[:, 0]])
    assert torch.equal(depths, distribution.outcomes[:, 1] + game.steps)
    error = distribution_error(distribution, game.world, expected)
    assert error < TOLERANCE, f"a sequence is off by {error:.2e}"
    return distribution


# ---- the checks: distributions ----


def rejection(ops: Any, form: str, vocab: int = 4, k: int = 2) -> None:
    check_distribution(ops, Game(world(vocab, k + 1, SEED), k, REJECTION, draft_form=form))


def block(ops: Any, form: str, vocab: int = 4, k: int = 2) -> None:
    """Compare with rejection: block verification accepts more if two drafts were drawn."""
    game = Game(world(vocab, k + 1, SEED), k, BLOCK, draft_form=form)
    distribution = check_distribution(ops, game)
    other = check_distribution(ops, game._replace(strategy=REJECTION))
    assert mean_accepted(distribution) > mean_accepted(other) - 1e-6
    drawn = {"one_hot": 0, "rows": k - 1}.get(form, k)
    assert drawn < 2 or mean_accepted(distribution) > mean_accepted(other) + 1e-3


def target_match(ops: Any, vocab: int = 4, k: int = 2) -> None:
    check_distribution(ops, Game(world(vocab, k + 1, SEED), k, TARGET_MATCH))


def greedy(ops: Any) -> None:
    """Check that greedy verification ignores the temperature."""
    cold = make_world(3, 3, filters={"temperature": 0.0})
    distribution = check_distribution(ops, Game(cold, 2, GREEDY))
    assert 0.1 < mean_accepted(distribution) < 1.9


def topp(ops: Any) -> None:
    """Check the documented bias: any draft inside the nucleus is accepted."""
    filters = {"top_p": 0.7, "temperature": 0.8}
    game = Game(make_world(4, 3, filters=filters), 2, TOPP, filters=filters)
    expected = closed_form(game, lambda s, row: (game.world.target[s] > 0).double())
    check_distribution(ops, game, expected)
    unbiased = check_distribution(ops, game._replace(strategy=REJECTION))
    assert (
        distribution_error(unbiased, game.world)
        < TOLERANCE
        < distribution_error(integrate(ops, play_chain(ops, game)), game.world)
    )


def policies(ops: Any, strategy: int) -> None:
    """Check the accept policies, which replace the test of any strategy."""
    rates = (0.75, 0.3)
    game = Game(world(3, 3), 2, strategy, accept_rates=rates)
    if strategy == GREEDY:
        game = game._replace(world=make_world(3, 3, filters={"temperature": 0.0}))
    for policy, acceptance in (
        (AcceptPolicy.SYNTHETIC, lambda s, row: rates[row]),
        (AcceptPolicy.ACCEPT_ALL, lambda s, row: 1.0),
        (AcceptPolicy.REJECT_ALL, lambda s, row: 0.0),
    ):
        forced = game._replace(policy=policy)
        check_distribution(ops, forced, closed_form(forced, acceptance))


def filters(ops: Any, strategy: int) -> None:
    for some in (
        {"temperature": 0.6, "top_p": 0.8},
        {"top_k": 2},
        {"min_p": 0.4},
        {"typical_p": 0.6},
        {"temperature": 1.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.9},
    ):
        game = Game(make_world(4, 2, filters=some), 1, strategy, filters=some)
        distribution = check_distribution(ops, game)
        assert (game.world.target == 0).any() and 0 < mean_accepted(distribution) < 1


def processors(ops: Any, strategy: int) -> None:
    """Check that drafts in flight count as emitted tokens in all processors."""
    of = every_processor(4, 3)
    game = Game(make_world(4, 3, processors_of=of), 2, strategy, processors_of=of)
    distribution = check_distribution(ops, game)
    assert 0.1 < mean_accepted(distribution) < 1.9


def processors_over_steps(ops: Any) -> None:
    of = every_processor(3, 4)
    check_distribution(
        ops,
        Game(make_world(3, 4, processors_of=of), 1, REJECTION, steps=2, processors_of=of),
    )


def two_steps(ops: Any, strategy: int, seed: int = 1) -> None:
    """Check that no uniform of the first step biases the second."""
    check_distribution(ops, Game(world(2, 6, seed), 2, strategy, steps=2))


def ragged_steps(ops: Any, strategy: int) -> None:
    """Let some prefixes have fewer drafts than others, or none."""
    check_distribution(ops, Game(world(3, 4), 1, strategy, steps=2, ragged=True))


def steps_of_rows(ops: Any, strategy: int) -> None:
    """Let some prefixes have drafts with a distribution, and others one-hot drafts."""
    check_distribution(ops, Game(world(3, 4), 1, strategy, steps=2, draft_form="rows"))


def tree(ops: Any, strategy: int, form: str, parents: list[int] = TREE, vocab: int = 4) -> None:
    made = make_world(vocab, 3, SEED, filters={"temperature": 0.0} if strategy == GREEDY else None)
    check_distribution(ops, Game(made, 2, strategy, draft_form=form), parents=parents)


def tree_processors(ops: Any) -> None:
    """Check that a row counts the drafts on its path from the root, and no others."""
    of = every_processor(4, 3)
    game = Game(make_world(4, 3, processors_of=of), 2, REJECTION, processors_of=of)
    check_distribution(ops, game, parents=[-1, -1, 1, 0])


# ---- the checks: equalities, for bugs that do not change the distribution ----


def keys(ops: Any) -> None:
    """Check that the uniforms with the documented keys decide, and no others."""
    p, k = START, 2
    first = range(p, p + k)

    def of(purpose: Purpose, positions: Any, anchor: int = 0, sub: int = 0) -> set[Any]:
        return {(position, purpose.value, 0, sub, anchor) for position in positions}

    draft, accept, residual, own = (partial(of, purpose) for purpose in Purpose)
    expected = {
        GREEDY: draft(first),
        TARGET_MATCH: draft(first) | own(range(p, p + k + 1)),
        TOPP: draft(first) | own(range(p, p + k + 1)),
        REJECTION: draft(first) | accept(first) | residual(first) | own([p + k]),
        BLOCK: draft(first, p + 1)
        | accept(first, p + 1)
        | residual(first, p + 1)
        | own([p + k], p + 1),
    }
    for strategy in VerifyStrategy:
        some = {"top_p": 0.8} if strategy == TOPP else {}  # otherwise no draft is rejected
        game = Game(make_world(4, 3, SEED, filters=some), k, strategy, filters=some)
        assert integrate(ops, play_chain(ops, game)).keys == expected[strategy]
        none = integrate(ops, play_chain(ops, game._replace(k=0)))
        assert none.keys == (set() if strategy == GREEDY else own([p]))
    game = Game(world(4, 3, SEED), 2, REJECTION, draft_form="one_hot")
    got = integrate(ops, play_tree(ops, game, TREE)).keys
    expected_keys = accept(first) | accept([p], sub=1) | residual(first) | own([p + 1, p + 2])
    assert {key for key in got if key[1] in list(Purpose)} == expected_keys


def ties(ops: Any) -> None:
    """Check that every filter retains the lowest ids among equal logits."""
    row = torch.tensor([1.0, 3.0, 3.0, 3.0, 3.0, 1.0])
    for some, retained in (
        ({"temperature": 0.0}, [1]),
        ({"top_k": 3}, [1, 2, 3]),
        ({"top_p": 0.0}, [1]),
        ({"top_p": 0.4}, [1, 2]),
        ({"top_k": 4, "top_p": 0.5}, [1, 2]),
        ({"min_p": 1.0}, [1, 2, 3, 4]),
        ({"top_k": 4, "typical_p": 0.74}, [1, 2, 3]),
    ):

        def play(coins: Coins, n: int, some: dict[str, Any] = some) -> Tensor:
            parameters = {
                name: column(value, n, torch.int32 if name == "top_k" else torch.float32)
                for name, value in {**WARM, **some}.items()
            }
            positions, seeds = column(0, n, torch.int32), torch.arange(n)
            rows = row.expand(n, -1).contiguous()
            return by_field(ops.sample)(rows, positions, seeds=seeds, **parameters)[:, None].long()

        distribution = integrate(ops, play)
        got = torch.zeros(len(row), dtype=torch.float64)
        got.index_add_(0, distribution.outcomes[:, 0], distribution.masses)
        expected = torch.zeros(len(row), dtype=torch.float64)
        expected[retained] = 1 / len(retained)
        assert (got - expected).abs().max() < TOLERANCE, some


NAN, INF = torch.nan, torch.inf
HALVES = [-INF, 0.5, 0.5, -INF]
# (logits, draft_probs, draft, expected with one-hot drafts, with draft_probs) at coins of 0
EDGES = [
    ("no mass, where it was drafted", HALVES, [0.5, 0.5, 0, 0], 0, 1, 2),
    ("mass, where none was drafted", HALVES, [0.5, 0.5, 0, 0], 2, 2, 2),
    ("no mass on either side", HALVES, [0.5, 0.5, 0, 0], 3, 1, 2),
    ("one token each, the same", [-INF, 0, -INF, -INF], [0, 1, 0, 0], 1, 1, 1),
    ("one token each, another", [-INF, 0, -INF, -INF], [1, 0, 0, 0], 0, 1, 1),
    ("nothing finite", [-INF] * 4, [0.5, 0.5, 0, 0], 1, 0, 0),
    ("nothing but NaN", [NAN] * 4, [0, 0, 0.5, 0.5], 3, 0, 0),
    ("one number among NaN", [NAN, NAN, 1, NAN], [0.5, 0.5, 0, 0], 1, 2, 2),
    ("two infinities", [0, INF, 0, INF], [1, 0, 0, 0], 0, 1, 1),
    ("no draft", [-INF, 0, 0, 0], [0.5, 0.5, 0, 0], -1, 1, 1),
    ("draft_probs that are none", HALVES, [NAN, NAN, -1, -INF], 1, 1, 1),
]
COINS = [0.0, 0.5, 1 - 1 / LATTICE]


def edges(ops: Any) -> None:
    """Check extreme uniforms, probabilities and rows: no token of mass zero is emitted."""
    logits = torch.tensor([edge[1] for edge in EDGES])
    probs = torch.tensor([edge[2] for edge in EDGES])[:, None]
    drafts = torch.tensor([[edge[3]] for edge in EDGES], dtype=torch.int32)
    n = len(EDGES)
    rows = torch.stack([logits, torch.zeros_like(logits)], dim=1).flatten(0, 1)
    call = partial(
        by_field(ops.verify),
        rows,
        torch.arange(0, 2 * n + 1, 2, dtype=torch.int32),
        drafts,
        positions=torch.zeros(n, dtype=torch.int32),
        temperature=torch.ones(n),
        seeds=torch.arange(n),
    )
    target = torch.stack([reference.target_probs(row, 1.0) for row in logits])
    for strategy in (TARGET_MATCH, REJECTION, BLOCK, TOPP):
        for draft_probs in (None, probs):
            if draft_probs is not None and strategy in (TARGET_MATCH, TOPP):
                continue
            for value in COINS:
                run = partial(
                    call, strategy=column(strategy, n, torch.int32), draft_probs=draft_probs
                )
                tokens, accepted = with_all_coins(ops, value, n, run)
                first = tokens[:, :1].long()
                assert (target.gather(1, first) > 0).all(), (strategy.name, value)
                assert torch.equal(accepted, (first == drafts).int()[:, 0])
                assert torch.equal(tokens[:, 1] >= 0, accepted > 0)
                if value == 0 and strategy in (REJECTION, BLOCK):
                    expected = [edge[4 if draft_probs is None else 5] for edge in EDGES]
                    assert first[:, 0].tolist() == expected, strategy.name


def equal_distributions(ops: Any) -> None:
    """Check that drafts from the target's own distribution are accepted for any uniform.

    The largest tested uniform is a little below 1, to allow for rounding: block verification
    multiplies ratios of several rows.
    """
    torch.manual_seed(3)
    n, k, vocab = 64, 3, 50
    logits = 3 * torch.randn(n, k + 1, vocab)
    parameters = {"temperature": column(0.7, n, torch.float32), "seeds": torch.arange(n)}
    parameters["top_p"] = column(0.9, n, torch.float32)
    positions = column(START, n, torch.int32)
    for value in (0.0, 0.5, 1 - 2.0**-20):
        probs = torch.empty(n, k, vocab, dtype=ops.probs_dtype)
        drafts = torch.empty(n, k, dtype=torch.int32)
        for j in range(k):
            held = torch.empty(n, vocab, dtype=ops.probs_dtype)
            draw = partial(
                by_field(ops.sample), logits[:, j].contiguous(), positions + j, probs=held
            )
            # the sampled draft has a positive probability, whatever the uniform is
            coin = (value + 0.37 * j) % 1
            drafts[:, j] = with_all_coins(ops, coin, n, partial(draw, **parameters))
            probs[:, j] = held
        for strategy in (REJECTION, BLOCK, TOPP):
            run = partial(
                by_field(ops.verify),
                logits.flatten(0, 1),
                torch.arange(0, n * (k + 1) + 1, k + 1, dtype=torch.int32),
                drafts,
                positions=positions,
                strategy=column(strategy, n, torch.int32),
                draft_probs=probs,
                **parameters,
            )
            _, accepted = with_all_coins(ops, value, n, run)
            assert (accepted == k).all(), (strategy.name, value)


def sample_equality(ops: Any) -> None:
    """Check that the rows of target_match equal those of sample for any uniforms."""
    torch.manual_seed(4)
    n, k, vocab = 200, 2, 4
    logits = torch.randn(n, k + 1, vocab)
    drafts = torch.randint(vocab, (n, k), dtype=torch.int32)
    positions, seeds = torch.arange(n, dtype=torch.int32) % 3, torch.arange(n)
    coins = Coins()
    for _ in range(2):  # the first pass finds the keys
        coins.values = torch.randint(LATTICE, (n, len(coins.keys))).double() / LATTICE
        with ops.using(coins):
            tokens, accepted = ops.verify(
                logits.flatten(0, 1),
                sampling.Drafts(torch.arange(0, n * (k + 1) + 1, k + 1, dtype=torch.int32), drafts),
                positions=positions,
                sampling=sampling.SamplingTensors(temperature=torch.ones(n), seeds=seeds),
            )
            own = [
                ops.sample(
                    logits[:, j].contiguous(),
                    positions + j,
                    sampling=sampling.SamplingTensors(temperature=torch.ones(n), seeds=seeds),
                )
                for j in range(k + 1)
            ]
    emitted = tokens >= 0
    assert torch.equal(emitted.sum(1), accepted + 1) and accepted.max() == k
    assert torch.equal(tokens[emitted], torch.stack(own, 1)[emitted])


EQUALITIES: dict[str, Callable[[Any], None]] = {
    "keys": keys,
    "ties": ties,
    "edges": edges,
    "equal distributions": equal_distributions,
    "sample equality": sample_equality,
}
DISTRIBUTIONS: dict[str, Callable[[Any], None]] = {
    **{f"rejection {form}": partial(rejection, form=form) for form in CHAIN_FORMS},
    **{f"block {form}": partial(block, form=form) for form in CHAIN_FORMS},
    "target_match": target_match,
    "greedy": greedy,
    "topp": topp,
    **{f"policies {s.name}": partial(policies, strategy=s) for s in VerifyStrategy},
    **{f"filters {s.name}": partial(filters, strategy=s) for s in (TARGET_MATCH, REJECTION, BLOCK)},
    **{f"processors {s.name}": partial(processors, strategy=s) for s in (REJECTION, BLOCK)},
    "processors over steps": processors_over_steps,
    **{f"two steps {s.name}": partial(two_steps, strategy=s) for s in (REJECTION, BLOCK)},
    **{f"ragged steps {s.name}": partial(ragged_steps, strategy=s) for s in (REJECTION, BLOCK)},
    **{f"steps of rows {s.name}": partial(steps_of_rows, strategy=s) for s in (REJECTION, BLOCK)},
    **{f"tree REJECTION {form}": partial(tree, strategy=REJECTION, form=form) for form in FORMS},
    "tree TARGET_MATCH": partial(tree, strategy=TARGET_MATCH, form="one_hot"),
    "tree processors": tree_processors,
    "tree GREEDY": partial(tree, strategy=GREEDY, form="one_hot"),
}
# The same cases with three tokens take the interpreter a third of the time.
THREE_TOKENS: dict[str, Callable[[Any], None]] = {
    name: partial(DISTRIBUTIONS[name], vocab=3)
    for name in (
        *(f"rejection {form}" for form in CHAIN_FORMS),
        "block dense",
        "target_match",
        "tree REJECTION dense",
        "tree GREEDY",
    )
}
LARGER: dict[str, Callable[[Any], None]] = {
    **{f"rejection {form}": partial(rejection, form=form, vocab=5, k=3) for form in FORMS},
    **{f"block {form}": partial(block, form=form, vocab=5, k=3) for form in FORMS},
    "target_match": partial(target_match, vocab=4, k=3),
    "two steps BLOCK": partial(two_steps, strategy=BLOCK, seed=2),
    "tree REJECTION dense": partial(
        tree, strategy=REJECTION, form="dense", parents=[-1, -1, -1, 0, 0], vocab=4
    ),
    "tree REJECTION one_hot": partial(
        tree, strategy=REJECTION, form="one_hot", parents=[-1, -1, 1, 1], vocab=4
    ),
}


# ---- negative controls: bugs planted in the reference, and the checks that must fail ----


class Bug(NamedTuple):
    name: str
    old: str  # occurs once in the reference of sampling
    new: str
    checks: list[str]  # each of which fails


BUGS = [
    Bug(
        "the draft's own uniform accepts it",
        "if coin(ACCEPT, i) * given[token_id] < target[token_id]:",
        "if coin(DRAFT, i) * given[token_id] < target[token_id]:",
        ["rejection dense", "two steps REJECTION", "keys"],
    ),
    Bug(
        "<= for <",
        "if coin(ACCEPT, i) * given[token_id] < target[token_id]:",
        "if coin(ACCEPT, i) * given[token_id] <= target[token_id]:",
        ["edges"],
    ),
    Bug(
        "<= for < in block verification",
        "if coin(ACCEPT, i - 1) < bar:",
        "if coin(ACCEPT, i - 1) <= bar:",
        ["edges"],
    ),
    Bug(
        "the residual is not normalized",
        "return target if rest.sum() == 0 else rest / rest.sum()",
        "return target if rest.sum() == 0 else rest",
        ["tree REJECTION dense"],
    ),
    Bug(
        "the rejected token stays in the residual",
        "rest = (target - draft).clamp(min=0)",
        "rest = target",
        ["rejection dense", "rejection one_hot", "tree REJECTION dense"],
    ),
    Bug(
        "the residual is of the last row",
        "target, drafts, given[row], functools",
        "targets[-1], drafts, given[row], functools",
        ["rejection dense", "processors REJECTION"],
    ),
    Bug(
        "every row has the first row's draft distribution",
        "target, drafts, given[row], functools",
        "target, drafts, given[0], functools",
        ["rejection dense"],
    ),
    Bug(
        "every request has its own row of draft_probs",
        "else int(_of(draft_probs.rows, b, b))",
        "else b",
        ["rejection rows", "block rows", "steps of rows REJECTION"],
    ),
    Bug(
        "the residual is drawn with the uniform that rejected",
        "return _draw(target, coin(RESIDUAL))",
        "return _draw(target, coin(ACCEPT))",
        ["rejection dense", "rejection one_hot", "keys"],
    ),
    Bug(
        "siblings share a uniform",
        "if coin(ACCEPT, i) * given[token_id] < target[token_id]:",
        "if coin(ACCEPT, 0) * given[token_id] < target[token_id]:",
        ["tree REJECTION dense", "tree REJECTION one_hot", "keys"],
    ),
    Bug(
        "no bonus token",
        "for depth, (choice, node) in enumerate(walk):",
        "for depth, (choice, node) in enumerate(walk[: end - begin - 1] or walk):",
        ["rejection dense", "block dense", "target_match", "sample equality"],
    ),
    Bug(
        "penalties ignore the drafts before the row",
        "for token_id in in_flight:",
        "for token_id in []:",
        ["processors REJECTION", "processors BLOCK"],
    ),
    Bug(
        "bad words ignore the drafts before the row",
        "p.token_ids[slot, :position].tolist()) + in_flight",
        "p.token_ids[slot, :position].tolist())",
        ["processors REJECTION"],
    ),
    Bug(
        "min tokens ignore the drafts before the row",
        "output_len = position - int(p.prompt_lens[slot]) + len(in_flight)",
        "output_len = position - int(p.prompt_lens[slot])",
        ["processors REJECTION"],
    ),
    Bug(
        "the row's own token has the next position's uniform",
        "return _draw(target, coin(TARGET, position))",
        "return _draw(target, coin(TARGET, position + 1))",
        ["sample equality", "keys"],
    ),
    Bug(
        "every row has the first position's uniforms",
        "functools.partial(_at, coin, start + depth)",
        "functools.partial(_at, coin, start)",
        ["rejection dense", "keys"],
    ),
    Bug(
        "ties go to the highest id",
        "one_hot((x == x.max()).nonzero()[0, 0], len(x))",
        "one_hot((x == x.max()).nonzero()[-1, 0], len(x))",
        ["ties"],
    ),
    Bug(
        "ties at the edge of the nucleus go to the highest id",
        "    order = torch.sort(x, descending=True, stable=True).indices\n    weights",
        "    order = len(x) - 1 - torch.sort(x.flip(0), descending=True, stable=True).indices\n"
        "    weights",
        ["ties"],
    ),
    Bug(
        "block verification without its anchor",
        "lambda purpose, i: coin(purpose, start + i, 0, start + 1),",
        "lambda purpose, i: coin(purpose, start + i, 0, 0),",
        ["two steps BLOCK", "keys"],
    ),
    Bug(
        "block verification stops at the first rejection",
        "        if coin(ACCEPT, i - 1) < bar:\n            accepted = i",
        "        if coin(ACCEPT, i - 1) < bar and accepted == i - 1:\n            accepted = i",
        ["block dense"],
    ),
    Bug(
        "block verification with the products alone",
        "        if i < n:\n            left",
        "        if i < 0:\n            left",
        ["block dense"],
    ),
    Bug(
        "block verification with the plain residual",
        "rest = (weights[accepted] * targets[accepted] - given[accepted]).clamp(min=0)",
        "rest = (targets[accepted] - given[accepted]).clamp(min=0)",
        ["block dense"],
    ),
    Bug(
        "a draft outside the nucleus is accepted",
        "elif rule == TOPP and drafts and target[drafts[0]] > 0:",
        "elif rule == TOPP and drafts:",
        ["topp", "edges"],
    ),
    Bug(
        "verification forgets top_p",
        "[target_probs(row, **filters) for row in processed[begin:end]],",
        "[target_probs(row, **{**filters, 'top_p': 1.0}) for row in processed[begin:end]],",
        ["filters REJECTION", "topp"],
    ),
    Bug(
        "typical_p keeps one token too few",
        "kept[ids[order[short + 1 :]]] = False",
        "kept[ids[order[max(short, 1) :]]] = False",
        ["ties"],
    ),
    Bug(
        "synthetic rates of the previous row",
        "[*accept_rates, 0.0][row])",
        "[*accept_rates, 0.0][row - 1])",
        ["policies TARGET_MATCH"],
    ),
    Bug(
        "a rejected draft ends the walk only if it differs",
        "drafts, choice = [], _own(target, coin, start + depth)",
        "choice = _own(target, coin, start + depth)",
        ["policies TARGET_MATCH"],
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bug_fails_its_checks(bug: Bug) -> None:
    for name in bug.checks:
        with pytest.raises(AssertionError):
            CHECKS[name](ReferenceOps((bug.old, bug.new)))


def test_docs_list_the_planted_bugs() -> None:
    text = (ROOT / "docs" / "exactness.md").read_text()
    lines = [f"| {bug.name} | {', '.join(f'`{name}`' for name in bug.checks)} |" for bug in BUGS]
    assert "\n".join(lines) in text, "\n".join(lines)


def test_drafts_without_the_anchor_bias_the_distribution() -> None:
    """Without the anchor, drafts are not independent of the previous step."""
    game = Game(world(2, 6, 1), 2, BLOCK, steps=2, anchored=False)
    ops = ReferenceOps()
    assert distribution_error(integrate(ops, play_chain(ops, game)), game.world) > 1e-3


def ops_named(name: str) -> Any:
    return ReferenceOps() if name == "reference" else ProductionOps(name)


CHECKS = {**DISTRIBUTIONS, **EQUALITIES}

# Checks that are slow in the interpreter and covered there by another form or strategy.
LONG = {"keys", "block one_hot", "block rows", "tree REJECTION one_hot"}
LONG |= {"two steps REJECTION", "two steps BLOCK", "tree processors", "tree TARGET_MATCH"}
LONG |= {"block sparse", "tree REJECTION sparse", "filters REJECTION", "steps of rows REJECTION"}
LONG |= {"policies REJECTION", "policies TOPP", "policies TARGET_MATCH", "filters TARGET_MATCH"}


def cases() -> list[Any]:
    in_interpreter = LONG | set(THREE_TOKENS)
    slow = {"reference": set(CHECKS), "_scripted": set(), "_scripted_simt": in_interpreter}
    return [
        pytest.param(
            ops, name, id=f"{ops}-{name}", marks=[pytest.mark.slow] if name in names else []
        )
        for ops, names in slow.items()
        for name in CHECKS
    ]


@pytest.mark.parametrize(("ops", "name"), cases())
@pytest.mark.fast("_scripted-*")
def test_emitted_tokens_have_the_exact_distribution(ops: str, name: str) -> None:
    CHECKS[name](ops_named(ops))


@pytest.mark.parametrize("name", THREE_TOKENS)
@pytest.mark.slow
def test_emitted_tokens_have_the_exact_distribution_with_three_tokens(name: str) -> None:
    THREE_TOKENS[name](ProductionOps("_scripted_simt"))


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGER)
def test_emitted_tokens_have_the_exact_distribution_at_larger_sizes(name: str) -> None:
    LARGER[name](ProductionOps("_scripted"))


# ---- samples: the random generator, the drafter's own sampler, a real vocabulary ----

VOCAB = 4096


def chi_square_excess(counts: Tensor, expected: Tensor) -> float:
    """Return chi-square minus df + 10 sqrt(2 df); bins with an expectation below 5 are merged."""
    assert (counts[expected == 0] == 0).all()
    small = expected < 5
    observed = torch.cat([counts[~small], counts[small].sum()[None]])
    merged = torch.cat([expected[~small], expected[small].sum()[None]])
    observed, merged = observed[merged > 0], merged[merged > 0]
    freedom = len(merged) - 1
    assert freedom > 4
    statistic = float(((observed - merged) ** 2 / merged).sum())
    return statistic - (freedom + 10 * (2 * freedom) ** 0.5)


class Trials(NamedTuple):
    k: int
    temperature: float
    strategy: VerifyStrategy
    filters: dict[str, Any]
    penalized: bool = False
    form: str = "dense"  # or one_hot, or rows: several drafters, with some one-hot drafts
    has_wrong_probs: bool = False  # whether draft_probs are those of other tokens


def penalties(n: int) -> LogitsProcessors:
    """Return the penalties of n requests that have seen tokens 3 and 7."""
    return LogitsProcessors(
        slots=torch.zeros(n, dtype=torch.int32),
        counted_token_ids=torch.tensor([[3, 7]], dtype=torch.int32),
        token_counts=torch.tensor([[3, 4]], dtype=torch.int32),
        repetition_penalty=torch.tensor([1.5]),
        presence_penalty=torch.tensor([0.8]),
        frequency_penalty=torch.tensor([0.6]),
    )


def check_trials(device: str, trials: Trials, count: int) -> None:
    """Check that the tokens of each position that is reached follow its target distribution."""
    chunk, k = min(count, 1024), trials.k
    generator = torch.Generator().manual_seed(11)
    target_logits = 2.5 * torch.randn(k + 1, VOCAB, generator=generator)
    drafters = 3 if trials.form == "rows" else 1
    noise = torch.randn(drafters, k, VOCAB, generator=generator)
    draft_logits = (target_logits[:k] + 0.4 * noise).to(device)
    drafter = torch.arange(chunk, device=device) % drafters
    positions = torch.full((chunk,), 1000, dtype=torch.int32, device=device)
    warm = torch.full((chunk,), trials.temperature, device=device)
    filters = {
        name: column(value, chunk, torch.int32 if name == "top_k" else torch.float32).to(device)
        for name, value in trials.filters.items()
    }
    processors = penalties(chunk) if trials.penalized else LogitsProcessors()
    moved = LogitsProcessors(*(None if x is None else x.to(device) for x in processors))
    anchors = positions + 1 if trials.strategy == BLOCK else None
    # if no coin decides about the drafts, a drafter may even use the target's coins
    purpose = Purpose.TARGET if trials.strategy == TARGET_MATCH else Purpose.DRAFT
    emitted = []
    accepted_drafts = 0
    for first in range(0, count, chunk):
        seeds = torch.arange(first, first + chunk, device=device)
        drafts = torch.empty(chunk, k, dtype=torch.int32, device=device)
        probs = torch.empty(chunk, k, VOCAB, device=device)
        for j in range(k):
            drafts[:, j] = sampling.sample(
                draft_logits[drafter, j],
                positions + j,
                purpose=purpose,
                anchors=anchors,
                sampling=sampling.SamplingTensors(temperature=warm, seeds=seeds),
                outputs=sampling.SampleOutputs(probs=probs[:, j]),
            )
        if trials.has_wrong_probs:
            probs = probs.roll(1, dims=2)
        rows = None
        if trials.form == "rows":
            rows = torch.randperm(chunk, generator=generator, dtype=torch.int32).to(device)
            probs = probs[rows.argsort()]
            rows[::5] = -1
        tokens, accepted = by_field(sampling.verify)(
            target_logits.to(device).repeat(chunk, 1),
            torch.arange(0, chunk * (k + 1) + 1, k + 1, dtype=torch.int32, device=device),
            drafts,
            positions=positions,
            strategy=column(trials.strategy, chunk, torch.int32).to(device),
            temperature=warm,
            seeds=seeds,
            draft_probs=None if trials.form == "one_hot" else probs,
            draft_prob_rows=rows,
            processors=moved if trials.penalized else None,
            **filters,
        )
        emitted.append(tokens.cpu())
        accepted_drafts += int(accepted.sum())
    assert 0 < accepted_drafts < k * count
    all_tokens = torch.cat(emitted).long()
    for j in range(k + 1):
        reached = all_tokens[all_tokens[:, j] >= 0]
        if len(reached) < min(400, count // 20):  # few chains are accepted this far
            assert j > 1
            continue
        expected = torch.zeros(VOCAB, dtype=torch.float64)
        before, weights = reached[:1, :j], torch.tensor([len(reached)])
        if trials.penalized and j > 0:
            before, weights = reached[:, :j].unique(dim=0, return_counts=True)
        for prefix, weight in zip(before, weights.tolist(), strict=True):
            row = target_logits[None, j]
            if trials.penalized:
                row = reference.process_logits(
                    target_logits[j].expand(j + 1, -1),
                    penalties(1),
                    torch.zeros(1, dtype=torch.int32),
                    drafts=sampling.Drafts(
                        output_indptr=torch.tensor([0, j + 1]), token_ids=prefix[None]
                    ),
                )[j:]
            probs_of_row = reference.target_probs(row[0], trials.temperature, **trials.filters)
            expected += weight * probs_of_row
        counts = torch.bincount(reached[:, j], minlength=VOCAB).double()
        excess = chi_square_excess(counts, expected)
        assert excess < 0, f"position {j}: chi-square {excess:.0f} above the threshold"


@pytest.mark.parametrize("form", ["dense", "rows"])
@pytest.mark.parametrize("strategy", [REJECTION, BLOCK])
@pytest.mark.fast("cpu-*", ci=("simt-2-rows",))
def test_samples_follow_the_target(
    device: str, on_cuda: bool, strategy: VerifyStrategy, form: str
) -> None:
    trials = Trials(1, 0.6, strategy, {"top_p": 0.95}, form=form)
    check_trials(device, trials, 512 if on_cuda and device == "cpu" else 20 * 1024)


@pytest.mark.parametrize("strategy", [REJECTION, BLOCK])
@pytest.mark.ci
def test_samples_with_wrong_draft_probs_are_noticed(strategy: VerifyStrategy) -> None:
    with pytest.raises(AssertionError, match="chi-square"):
        check_trials("cpu", Trials(1, 1.0, strategy, {}, has_wrong_probs=True), 10 * VOCAB)


@pytest.mark.slow
@pytest.mark.parametrize("k,temperature", [(1, 1.0), (3, 0.6)])
@pytest.mark.parametrize("form", ["dense", "one_hot", "rows"])
@pytest.mark.parametrize("strategy", [TARGET_MATCH, REJECTION, BLOCK])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"min_p": 0.02}, {"top_k": 200}])
def test_many_samples_follow_the_target(
    device: str,
    on_cuda: bool,
    k: int,
    temperature: float,
    form: str,
    strategy: VerifyStrategy,
    filters: dict[str, Any],
) -> None:
    if on_cuda and device == "cpu":
        pytest.skip("the interpreter would take hours")
    check_trials(device, Trials(k, temperature, strategy, filters, form=form), 10 * VOCAB)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [TARGET_MATCH, REJECTION, BLOCK])
def test_many_samples_with_penalties_follow_the_target(
    device: str, on_cuda: bool, strategy: VerifyStrategy
) -> None:
    if on_cuda and device == "cpu":
        pytest.skip("the interpreter would take hours")
    check_trials(device, Trials(1, 1.0, strategy, {"top_p": 0.9}, penalized=True), 10 * VOCAB)
