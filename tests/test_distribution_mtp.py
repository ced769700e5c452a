# SPDX-License-Identifier: Apache-2.0
"""Distribution of whole texts whose drafts are drawn by MTP modules.

`test_distribution.py` checks the ops. These tests check the engine between them: the rows of
draft_probs, the buffers that a step overwrites, and the random numbers of steps. Thousands of short
texts with seeds of their own are compared with the exact probabilities of their tokens, computed
from the target's logits over the finished texts.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from mtp_checkpoints import Tiny
from specops import reference, sampling
from specops.engine import Completion, Engine, SamplingParams, SpeculativeConfig
from specops.engine.models import Transformer, load_model
from specops.sampling import Purpose, VerifyStrategy
from test_lossless_mtp import bits, make_engine, make_tiny
from test_models import Runner
from torch import Tensor

VOCAB = 20
FILTERS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
# A p-value below this is a fault. `make test` computes some hundred p-values, and logits differ by
# CPU: on one machine of ten thousand, a correct engine fails.
MIN_P_VALUE = 1e-6


@pytest.fixture(scope="module")
def tinies(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Tiny]:
    """Return tiny models by their number of MTP modules."""
    return {
        n: make_tiny(
            tmp_path_factory.mktemp(f"modules{n}"),
            n,
            vocab_size=VOCAB,
            max_position_embeddings=64,
        )
        for n in (1, 2)
    }


# ---- texts against probabilities ----


class Texts(NamedTuple):
    """Prompts, and the engine's output for each."""

    prompts: list[list[int]]
    outputs: list[list[int]]


def target_probs(logits: Tensor, filters: dict[str, Any]) -> Tensor:
    """Compute `reference.target_probs` of many rows at once."""
    arguments = {**FILTERS, **filters}
    ordered, ids = (logits.double() / arguments["temperature"]).sort(descending=True, stable=True)
    weights = (ordered - ordered[:, :1]).exp()
    if arguments["top_k"]:
        weights[:, arguments["top_k"] :] = 0
    before = weights.cumsum(1) - weights
    weights[before >= arguments["top_p"] * weights.sum(1, keepdim=True)] = 0
    weights[weights < arguments["min_p"]] = 0
    weights /= weights.sum(1, keepdim=True)
    return torch.zeros_like(weights).scatter(1, ids, weights)


def changed_logits(rows: Tensor, texts: Texts, filters: dict[str, Any]) -> Tensor:
    """Return the logits of every token of the outputs with the changes of `CHANGED` applied."""
    rows = rows.double()
    for token, bias in filters.get("logit_bias", {}).items():
        rows[:, token] += bias
    if penalty := filters.get("repetition_penalty"):
        places = (
            prompt + output[:place]
            for prompt, output in zip(texts.prompts, texts.outputs, strict=True)
            for place in range(len(output))
        )
        for row, known in zip(rows, places, strict=True):
            ids = sorted(set(known))
            row[ids] = torch.where(row[ids] > 0, row[ids] / penalty, row[ids] * penalty)
    if allowed := filters.get("allowed_token_ids"):
        is_allowed = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, torch.tensor(allowed), True)
        rows.masked_fill_(~is_allowed, -torch.inf)
    return rows


def rows_of(model: Transformer, texts: Texts, filters: dict[str, Any]) -> Tensor:
    """Return the target's distributions of all output tokens, one text after another."""
    logits = []
    for first in range(0, len(texts.prompts), 512):
        pairs = list(zip(texts.prompts, texts.outputs, strict=True))[first : first + 512]
        each = Runner(model).run([a + b for a, b in pairs], [[len(a + b) for a, b in pairs]])
        logits += [rows[len(a) - 1 : -1] for (a, _), rows in zip(pairs, each, strict=True)]
    rows = changed_logits(torch.cat(logits), texts, filters)
    probs = target_probs(rows, filters)
    own = {name: value for name, value in filters.items() if name not in CHANGED}
    for row in range(0, len(rows), 1 + len(rows) // 20):
        expected = reference.target_probs(rows[row], **{**FILTERS, **own})
        assert torch.allclose(probs[row], expected, rtol=1e-9, atol=1e-12)
    return probs


def p_value(tokens: Tensor, probs: Tensor, groups: Tensor) -> float:
    """Return the probability of counts at least this far from the expected ones.

    Tokens are counted per group. Given its prefix, a token has the probabilities of its row, so the
    excess of the counts is a martingale with a known covariance. It is chi-square in every
    direction that varies enough for the limit to hold.
    """
    statistic, freedom = 0.0, 0
    for group in groups.unique().tolist():
        mine = groups == group
        rows = probs[mine]
        excess = torch.bincount(tokens[mine], minlength=VOCAB) - rows.sum(0)
        variances, directions = torch.linalg.eigh(rows.sum(0).diag() - rows.T @ rows)
        wide = variances > 10
        statistic += float(((excess @ directions)[wide].square() / variances[wide]).sum())
        freedom += int(wide.sum())
    assert freedom > 0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def p_values(model: Transformer, texts: Texts, filters: dict[str, Any]) -> dict[str, float]:
    """Return p-values of the tokens for several groupings: by position, by the tokens before."""
    probs = rows_of(model, texts, filters)
    tokens = torch.tensor([token for output in texts.outputs for token in output])
    assert (probs[torch.arange(len(tokens)), tokens] > 0).all(), "a token that the filters exclude"
    before: dict[str, list[int]] = {"place": [], "token": [], "two": [], "all": []}
    for prompt, output in zip(texts.prompts, texts.outputs, strict=True):
        for place in range(len(output)):
            known = prompt + output[:place]
            before["place"].append(place)
            before["token"].append(known[-1])
            before["two"].append(known[-2])
            before["all"].append(hash(tuple(known)) % 16)
    found = {name: p_value(tokens, probs, torch.tensor(of)) for name, of in before.items()}
    # Most faults change how often likely tokens are emitted.
    surprise = -probs.clamp(min=1e-300).log()
    mean = (probs * surprise).sum(1)
    variance = (probs * surprise.square()).sum(1) - mean.square()
    far = (surprise[torch.arange(len(tokens)), tokens] - mean).sum() / variance.sum().sqrt()
    return {**found, "surprise": float(torch.special.erfc(far.abs() / 2**0.5))}


# ---- the engine ----


def prompt(index: int) -> list[int]:
    """Return a prompt; most prompts end just before a page does."""
    rng = random.Random(index % 30)
    return [rng.randrange(1, VOCAB) for _ in range((5, 11, 12, 13, 14, 27)[index % 6])]


def params(index: int, filters: dict[str, Any], **more: Any) -> SamplingParams:
    return SamplingParams(
        seed=index * 0x9E3779B97F4A7C15 % 2**64,
        ignore_eos=True,
        **{"max_tokens": random.Random(index).randrange(2, 13), **FILTERS, **filters, **more},
    )


def run(
    engine: Engine,
    indices: Sequence[int],
    params_of: Callable[[int], SamplingParams],
    own: Callable[[int], dict[str, Any] | None] = lambda index: None,
) -> dict[int, Completion]:
    """Run requests that arrive while others run and end."""
    rng = random.Random(len(indices))
    left, names = list(indices), {}
    while left or engine.has_unfinished():
        for _ in range(min(rng.randrange(40), len(left), 200 - engine.num_waiting)):
            index = left.pop()
            names[index] = engine.add_request(
                prompt(index), params_of(index), speculative_config=own(index)
            )
        engine.step()
    assert engine.num_free_pages == engine.num_pages
    return {index: engine.completion(name) for index, name in names.items()}


@dataclass
class Drafts:
    """Drafts that `verify` received, their distributions, and earlier drafts of the same positions.

    Both strategies need drafts that follow their draft_probs, independent of earlier drafts:
    `rejection` uses each position's draft once, `block` also uses some that are drafted again.
    """

    tokens: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)
    # Half of the vocabulary that contains the position's earlier draft, or -1.
    before: list[int] = field(default_factory=list)
    _last: dict[tuple[int, int], int] = field(default_factory=dict)

    def note(self, arguments: dict[str, Any]) -> None:
        """Record a call."""
        indptr, drafts, _ = arguments["drafts"]
        table, listed, sources = arguments["draft_probs"]
        table = table.double()
        if listed is not None:  # the head has a reduced vocabulary
            of_tokens = torch.zeros(*table.shape[:2], VOCAB, dtype=torch.float64)
            table = of_tokens.scatter_add_(2, listed.long().clamp(min=0), table * (listed >= 0))
        columns = (indptr.diff(), sources, arguments["sampling"].seeds, arguments["positions"])
        strategies = arguments["strategy"].tolist()
        for index, (rows, source, seed, position) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            if source < 0:
                continue
            for place, token in enumerate(drafts[index, : rows - 1].tolist()):
                key = seed, position + place
                if key in self._last and strategies[index] == VerifyStrategy.REJECTION:
                    continue  # drawn again with the same uniform, which decided nothing
                self.tokens.append(token)
                self.probs.append(table[source, place])
                # Halves suffice, because small uniforms draw small ids; -1: none.
                self.before.append(2 * self._last.get(key, -VOCAB // 2) // VOCAB)
                self._last[key] = token

    def p_value(self) -> float:
        """Return the p-value of the drafts under their draft_probs."""
        probs = torch.stack(self.probs)
        assert torch.allclose(probs.sum(1), torch.ones(len(probs), dtype=torch.float64))
        return p_value(torch.tensor(self.tokens), probs, torch.tensor(self.before))


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Drafts:
    """Record the calls of `verify`."""
    noted, verify = Drafts(), sampling.verify

    def verifying(logits: Tensor, **arguments: Any) -> Any:
        if arguments.get("draft_probs") is not None:
            noted.note(arguments)
        return verify(logits, **arguments)

    monkeypatch.setattr(sampling, "verify", verifying)
    return noted


class Trial(NamedTuple):
    modules: int
    k: int
    strategy: str
    filters: dict[str, Any]
    limits: dict[str, Any]


def p_values_of(tiny: Tiny, trial: Trial, count: int) -> dict[str, float]:
    """Return the p-values of the texts of `count` requests."""
    speculative = SpeculativeConfig(
        method="mtp", num_speculative_tokens=trial.k, verify_strategy=trial.strategy
    )
    engine = make_engine(tiny, speculative, **{"max_num_seqs": 64, **trial.limits})
    done = run(engine, range(count), lambda index: params(index, trial.filters))
    spec = engine.stats.speculative
    assert spec.num_accepted_tokens > spec.num_draft_tokens / 20
    assert (engine.stats.num_preemptions > 0) == ("num_pages" in trial.limits)
    return p_values(model_of(tiny), texts_of(done), trial.filters)


def model_of(tiny: Tiny) -> Transformer:
    return load_model(tiny.directory, dtype="float32")


def texts_of(done: dict[int, Completion]) -> Texts:
    return Texts([prompt(index) for index in done], [one.token_ids for one in done.values()])


FEW_PAGES = {"num_pages": 12, "max_num_seqs": 20}
FEW_ROWS = {"max_num_batched_tokens": 40, "max_num_seqs": 30}
WARM, COOL = {"temperature": 1.3, "top_k": 8}, {"temperature": 0.7, "top_p": 0.9}
CHANGED = {
    "logit_bias": {3: 1.5, 9: -2.0},
    "repetition_penalty": 1.4,
    "allowed_token_ids": [token for token in range(VOCAB) if token % 7 != 2],
}
TRIALS = [
    Trial(1, 1, "rejection", {}, {}),
    Trial(1, 2, "rejection", COOL, {}),
    Trial(1, 3, "rejection", WARM, FEW_PAGES),
    Trial(2, 1, "rejection", {"min_p": 0.1}, {}),
    Trial(2, 3, "rejection", {}, FEW_ROWS),
    Trial(1, 1, "block", WARM, {}),
    Trial(1, 3, "block", {}, {}),
    Trial(2, 2, "block", {"top_k": 6, "top_p": 0.95}, FEW_PAGES),
    Trial(2, 3, "block", COOL, FEW_ROWS),
    Trial(2, 3, "rejection", CHANGED, FEW_PAGES),
]


@pytest.mark.parametrize("trial", TRIALS, ids=str)
@pytest.mark.fast("*modules=2, k=3, *'rejection'*")
def test_texts_follow_the_target(tinies: dict[int, Tiny], trial: Trial, drafts: Drafts) -> None:
    found = p_values_of(tinies[trial.modules], trial, 1200)
    found["drafts"] = drafts.p_value()
    assert min(found.values()) > MIN_P_VALUE, found


@pytest.mark.slow
@pytest.mark.parametrize("filters", [{}, WARM, COOL, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("strategy", ["rejection", "block"])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("modules", [1, 2])
def test_more_texts_follow_the_target(
    tinies: dict[int, Tiny],
    modules: int,
    k: int,
    strategy: str,
    filters: dict[str, Any],
    drafts: Drafts,
) -> None:
    limits = ({}, FEW_PAGES, FEW_ROWS)[(modules + k + len(filters)) % 3]
    trial = Trial(modules, k, strategy, filters, limits)
    found = p_values_of(tinies[modules], trial, 3000)
    found["drafts"] = drafts.p_value()
    assert min(found.values()) > MIN_P_VALUE, found


# ---- faults ----


class Fault(NamedTuple):
    name: str
    trials: Sequence[Trial]
    verify: Callable[[dict[str, Any]], None] = lambda arguments: None
    sample: Callable[[dict[str, Any]], None] = lambda arguments: None


def of_other_rows(rows: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Any]], None]:
    def change(arguments: dict[str, Any]) -> None:
        known = arguments["draft_probs"].rows
        changed = torch.where(known >= 0, rows(known).int(), known)
        arguments["draft_probs"] = arguments["draft_probs"]._replace(rows=changed)

    return change


def with_probs(arguments: dict[str, Any], probs: Tensor) -> None:
    arguments["draft_probs"] = arguments["draft_probs"]._replace(probs=probs)


class Stale:
    """Fault: `verify` gets the draft_probs of its previous call."""

    def __init__(self) -> None:
        self.last: Tensor | None = None

    def __call__(self, arguments: dict[str, Any]) -> None:
        now = arguments["draft_probs"].probs.clone()
        with_probs(arguments, now if self.last is None else self.last)
        self.last = now


def of_other_places(arguments: dict[str, Any]) -> None:
    with_probs(arguments, arguments["draft_probs"].probs.roll(1, dims=1))


def without_anchors(arguments: dict[str, Any]) -> None:
    arguments["anchors"] = None


def with_target_numbers(arguments: dict[str, Any]) -> None:
    arguments["purpose"] = Purpose.TARGET


def taken_as_certain(arguments: dict[str, Any]) -> None:
    rows = torch.full_like(arguments["draft_probs"].rows, -1)
    arguments["draft_probs"] = arguments["draft_probs"]._replace(rows=rows)


def another_temperature(arguments: dict[str, Any]) -> None:
    probs = arguments["draft_probs"].probs.sqrt()
    with_probs(arguments, probs / probs.sum(-1, keepdim=True).clamp(min=1e-30))


def no_probabilities(arguments: dict[str, Any]) -> None:
    with_probs(arguments, torch.zeros_like(arguments["draft_probs"].probs))


BOTH = [Trial(1, 3, "rejection", {}, {}), Trial(2, 3, "block", {}, {})]
FAULTS = [
    Fault("rows shifted by one", BOTH, of_other_rows(lambda rows: (rows + 1) % len(rows))),
    Fault("rows of this step", BOTH, of_other_rows(lambda rows: torch.arange(len(rows)))),
    Fault("stale draft_probs", BOTH, Stale()),
    Fault("draft_probs of another place", BOTH, of_other_places),
    Fault("draft_probs of another temperature", BOTH, another_temperature),
    Fault("draft_probs lost", BOTH, no_probabilities),
    Fault("block without anchors", BOTH[1:], sample=without_anchors),
]
NO_FAULTS = [
    Fault("drafts drawn with the target's numbers", BOTH, sample=with_target_numbers),
    Fault("drafts taken as certain", BOTH, taken_as_certain),
    Fault("rejection without anchors", BOTH[:1], sample=without_anchors),
]


def p_values_with(
    tiny: Tiny, trial: Trial, fault: Fault, count: int, monkeypatch: pytest.MonkeyPatch
) -> dict[str, float]:
    noted, verify, sample = Drafts(), sampling.verify, sampling.sample

    def verifying(logits: Tensor, **arguments: Any) -> Any:
        if arguments.get("draft_probs") is not None:
            noted.note(arguments)
            fault.verify(arguments)
        return verify(logits, **arguments)

    def sampling_(*args: Any, **arguments: Any) -> Any:
        if arguments.get("purpose") == Purpose.DRAFT:
            fault.sample(arguments)
        return sample(*args, **arguments)

    monkeypatch.setattr(sampling, "verify", verifying)
    monkeypatch.setattr(sampling, "sample", sampling_)
    return {**p_values_of(tiny, trial, count), "drafts": noted.p_value()}


def cases(faults: Sequence[Fault]) -> list[Any]:
    """Return each fault with each of its trials; all but one trial per fault are marked slow."""
    return [
        pytest.param(
            fault,
            trial,
            id=f"{fault.name}-{trial.strategy}",
            marks=[] if place == number % len(fault.trials) else [pytest.mark.slow],
        )
        for number, fault in enumerate(faults)
        for place, trial in enumerate(fault.trials)
    ]


@pytest.mark.parametrize(("fault", "trial"), cases(FAULTS))
@pytest.mark.slow
def test_planted_faults_are_noticed(
    tinies: dict[int, Tiny], fault: Fault, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = p_values_with(tinies[trial.modules], trial, fault, 1000, monkeypatch)
    assert min(found.values()) < MIN_P_VALUE, found


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "trial"), cases(NO_FAULTS))
def test_harmless_changes_keep_the_distribution(
    tinies: dict[int, Tiny], fault: Fault, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such changes can only reduce the number of accepted drafts.

    No uniform decides twice: a text has either the draft or the target's own token at a position. A
    draft d may be treated as one-hot: accepting it with probability p(d), and otherwise drawing
    from p without d, gives p.
    """
    found = p_values_with(tinies[trial.modules], trial, fault, 3000, monkeypatch)
    del found["drafts"]
    assert min(found.values()) > MIN_P_VALUE, found


# ---- in batches ----


def test_text_does_not_depend_on_other_requests(tinies: dict[int, Tiny]) -> None:
    """Each request has its own strategy and number of drafts."""

    def own(index: int) -> dict[str, Any]:
        return {
            "verify_strategy": ("rejection", "block")[index % 2],
            "num_speculative_tokens": 1 + index % 3,
        }

    texts = []
    for seqs in (1, 40):
        engine = make_engine(tinies[2], SpeculativeConfig(method="mtp"), max_num_seqs=seqs)
        done = run(engine, range(100), lambda index: params(index, {}), own)
        texts.append({index: one.token_ids for index, one in sorted(done.items())})
    assert texts[0] == texts[1]


@pytest.mark.parametrize("strategy", ["rejection", "target_match"])
def test_newcomer_with_more_drafts_changes_no_text(tinies: dict[int, Tiny], strategy: str) -> None:
    """The draft_probs of the previous step remain valid when the number of drafts grows."""
    texts: list[list[list[int]]] = []
    late = {"num_speculative_tokens": 3, "verify_strategy": strategy}
    for has_late in (False, True):
        speculative = SpeculativeConfig(method="mtp", verify_strategy="rejection")
        engine = make_engine(tinies[1], speculative, max_num_seqs=64)
        requests = [params(index, {}, max_tokens=6) for index in range(60)]
        names = [engine.add_request(prompt(0), one) for one in requests]
        for _ in range(2):
            engine.step()
        if has_late:
            engine.add_request(prompt(1), params(1, {}), speculative_config=late)
        while engine.has_unfinished():
            engine.step()
        texts.append([engine.completion(name).token_ids for name in names])
    assert texts[0] == texts[1]


MIXED: list[tuple[str, dict[str, Any]]] = [
    ("mtp rejection", {"num_speculative_tokens": 3, "verify_strategy": "rejection"}),
    ("mtp block", {"num_speculative_tokens": 2, "verify_strategy": "block"}),
    ("mtp target_match", {"num_speculative_tokens": 3}),
    ("mtp greedy", {"num_speculative_tokens": 2, "verify_strategy": "greedy"}),
    ("mtp topp", {"num_speculative_tokens": 2, "verify_strategy": "topp"}),
    (
        "mtp with_ngram",
        {
            "method": "mtp+ngram",
            "num_speculative_tokens": 4,
            "num_model_steps": 2,
            "verify_strategy": "rejection",
            "min_ngram_size": 1,
        },
    ),
    (
        "ngram",
        {
            "method": "ngram",
            "num_speculative_tokens": 2,
            "verify_strategy": "rejection",
            "min_ngram_size": 1,
        },
    ),
    (
        "suffix",
        {"method": "suffix", "num_speculative_tokens": 3, "verify_strategy": "block"},
    ),
]


@pytest.mark.parametrize(
    ("modules", "limits"), [(1, FEW_PAGES), (2, {"max_num_seqs": 64})], ids=str
)
@pytest.mark.slow
def test_mixed_methods_keep_their_distributions(
    tinies: dict[int, Tiny], modules: int, limits: dict[str, Any]
) -> None:
    tiny, size, model = tinies[modules], len(MIXED), model_of(tinies[modules])

    def method(index: int) -> int:
        return index // 6 % size  # every method gets every prompt

    def own_params(index: int) -> SamplingParams:
        return params(index, COOL, logprobs=1 if "match" in MIXED[method(index)][0] else None)

    engine = make_engine(tiny, SpeculativeConfig(method="mtp"), **limits)
    done = run(engine, range(1920), own_params, lambda index: MIXED[method(index)][1])
    assert (engine.stats.num_preemptions > 0) == ("num_pages" in limits)
    for number, (name, _) in enumerate(MIXED):
        mine = {index: one for index, one in done.items() if method(index) == number}
        drafts = sum(one.stats.num_draft_tokens for one in mine.values())
        accepted = sum(one.stats.num_accepted_tokens for one in mine.values())
        assert accepted > drafts / 20, name
        if name in ("mtp target_match", "mtp greedy"):
            is_greedy = name == "mtp greedy"
            plain_params = [
                params(i, {"temperature": 0.0} if is_greedy else COOL, logprobs=1) for i in mine
            ]
            plain = make_engine(tiny).generate([prompt(i) for i in mine], plain_params)
            assert [one.token_ids for one in plain] == [one.token_ids for one in mine.values()]
            if not is_greedy:
                assert list(map(bits, plain)) == list(map(bits, mine.values()))
            continue
        found = p_values(model, texts_of(mine), COOL)  # checks the filters, too
        if name == "mtp topp":
            assert min(found.values()) < MIN_P_VALUE, found
        else:
            assert min(found.values()) > MIN_P_VALUE, (name, found)
