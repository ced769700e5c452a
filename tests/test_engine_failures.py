# SPDX-License-Identifier: Apache-2.0
"""An exception in the bookkeeping of one request neither ends nor changes other requests.

Exceptions are planted in every hook of the drafter protocol, and in every function that handles one
request, before or after the function's work. A hook that is missing from the tables fails a test.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_config
from fake_gpu import FakeGpu
from pages import check_pages
from row_costs import set_row_cost
from specops.api.outputs import PromptLogprobs
from specops.api.tokenizer import TextStream
from specops.engine import (
    Completion,
    Engine,
    EngineConfig,
    EngineError,
    RequestOutput,
    SamplingParams,
    SpeculativeConfig,
    SpeculativeStats,
    StructuredOutput,
)
from specops.engine.drafters.base import Drafter, DrafterStep
from specops.engine.drafters.drafting import Drafting
from specops.engine.drafters.ngram import _NgramStep
from specops.engine.drafters.recurrent import RecurrentStep
from specops.engine.drafters.suffix import SuffixDrafter
from specops.engine.models import Transformer
from specops.engine.plan import Plan
from specops.engine.prompt_logprobs import PromptScorer
from specops.engine.request import Request
from specops.engine.scheduling.scheduler import Scheduler
from specops.engine.steps.runner import Runner
from specops.engine.steps.slot_tables import SlotTables
from specops.engine.structured import GrammarState, masks
from test_lossless import bits

NO_DRAFTS: dict[str, Any] = {"method": "naive"}
NAIVE = SpeculativeConfig.from_dict(NO_DRAFTS)
VOCAB = 64
NUM = 8
VICTIM = 1  # index of the failing request, in tests with a single failing request

# Hooks of the drafter protocol, by how often an engine calls them.
OF_A_REQUEST = {"draft_kv", "start", "stop", "leave"}
OF_A_STEP = {"plan", "new_step", "finish"}
OF_A_LAUNCH = {"fill", "launch", "read"}  # hooks of `DrafterStep`
# Called when an engine starts or is idle; `kv_tensors` only in an engine with a role.
AT_REST = {"allocate", "drafts_common_text", "forget"}
AT_REST |= {"gauges", "is_unsaved", "kv_tensors", "learn", "problem", "save"}

METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "min_ngram_size": 1},
    "suffix": {"method": "suffix", "num_speculative_tokens": 6},
    "mtp": {"method": "mtp", "num_speculative_tokens": 3, "verify_strategy": "target_match"},
    "mtp+suffix": {
        "method": "mtp+suffix",
        "num_model_steps": 2,
        "num_speculative_tokens": 5,
    },
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(
        tmp_path_factory.mktemp("model"),
        num_hidden_layers=2,
        vocab_size=VOCAB,
        max_position_embeddings=160,
        num_nextn_predict_layers=1,
    )


def make(model_dir: Path, speculative: SpeculativeConfig, **config: Any) -> Engine:
    limits = {"max_num_seqs": 4, "num_pages": 14, "max_num_batched_tokens": 64} | config
    settings = {"device": "cpu", "model": str(model_dir), "load_format": "dummy"}
    settings["methods"] = ("all",)
    return Engine(EngineConfig(speculative_config=speculative, **settings, **limits))


def prompt_of(index: int) -> list[int]:
    return ([7 + index, 8, 9] * 7)[: 14 + index]


def params_of(index: int) -> SamplingParams:
    """Return different parameters for each request."""
    options: list[dict[str, Any]] = [
        {"prompt_logprobs": 1},
        {
            "prompt_logprobs": 2,
            "stop": ("zz", "qqq"),
            "structured_output": StructuredOutput(regex="[0-9]{1,9}(-[0-9A-F]{2,20})*"),
            "logit_bias": {5: 1.0},
            "bad_words_token_ids": ((3,),),
            "repetition_penalty": 1.1,
        },
        {"logit_bias": {9: -1.0}, "presence_penalty": 0.3},
        {"structured_output": StructuredOutput(regex="[0-9]{4}(-[0-9]{3})*")},
        {"stop": ("xyz",), "min_tokens": 3},
    ]
    return SamplingParams(
        max_tokens=36 - 2 * index,
        temperature=(0.0, 0.8, 0.0)[index % 3],
        seed=index,
        logprobs=(0, 1, 2)[index % 3],
        ignore_eos=True,
        **options[index % len(options)],
    )


@dataclass
class Run:
    """Results of the requests, by index."""

    done: list[Completion]
    outputs: list[list[RequestOutput]]
    failures: list[EngineError] = field(default_factory=list)  # errors of steps


def run(engine: Engine, methods: Callable[[int], dict[str, Any]], *, forgets: bool = True) -> Run:
    """Run all requests, half of them later. Another request is added with each and later aborted.

    At the end, the engine must have no state of the requests. Only if `forgets` is false may
    drafters have state of them.
    """
    numbers: dict[str, int] = {}
    found = Run([], [[] for _ in range(NUM)])
    waiting, leaving, steps = list(range(NUM)), [], 0
    while waiting or engine.has_unfinished():
        if waiting and (steps % 3 == 0 or waiting[0] < NUM // 2):
            index = waiting.pop(0)
            own = {"speculative_config": methods(index)}
            name = engine.add_request(prompt_of(index), params_of(index), **own)
            numbers[name] = index
            leaving.append((steps + 7, engine.add_request([9, 8, 7], params_of(0), **own)))
        while leaving and leaving[0][0] <= steps:
            engine.abort(leaving.pop(0)[1])
        try:
            outputs = engine.step()
        except EngineError as error:
            found.failures.append(error)
            outputs = list(error.outputs)
        for output in outputs:
            if output.request_id in numbers:
                found.outputs[numbers[output.request_id]].append(output)
        steps += 1
    for _, name in leaving:
        engine.abort(name)
    found.done = [engine.completion(name) for name in numbers if name in engine._requests]
    assert_nothing_is_left(engine, forgets=forgets)
    return found


def assert_nothing_is_left(engine: Engine, *, forgets: bool = True) -> None:
    assert not engine._requests and not engine.has_unfinished()
    assert engine.num_free_pages == engine.num_pages and not engine._scheduler._borrowers
    check_pages(engine._pool)
    assert sorted(engine._scheduler._free_slots) == list(range(engine.config.max_num_seqs))
    drafting = engine._drafting
    assert not any(drafting._requests.values()) and not drafting._acceptance
    assert not drafting.proposals.counts.any()
    if not forgets:
        return
    suffix, mtp = drafting.drafters["suffix"], drafting.drafters["mtp"]
    assert isinstance(suffix, SuffixDrafter) and not suffix._requests and not suffix._started
    assert suffix.cache.running_requests == [] and (suffix._numbers == -1).all()
    assert not suffix.cache.check_integrity()
    assert not mtp._progress and not drafting._companions[0]._requests  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def plain(model_dir: Path) -> list[Completion]:
    engine = make(model_dir, NAIVE, max_num_seqs=1, enable_prefix_caching=False)
    return run(engine, lambda index: NO_DRAFTS).done


class Planted:
    """Replacement of a function that raises an exception.

    Args:
        function: replaced function, with `self` as its first argument.
        when: whether a call may raise.
        at: index of the first of these calls that raises.
        times: number of calls that raise.
        after: whether the function runs before the exception.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        when: Callable[..., bool] = lambda *_, **__: True,
        *,
        at: int = 0,
        times: int = 1,
        after: bool = False,
    ) -> None:
        self.function, self.when, self.after = function, when, after
        self.left, self.at, self.num_raised = times, at, 0

    def __get__(self, owner: Any, _: type) -> Any:
        return partial(self, owner)

    def __call__(self, *args: Any, **options: Any) -> Any:
        if not self.left or not self.when(*args, **options):
            return self.function(*args, **options)
        if self.at:
            self.at -= 1
            return self.function(*args, **options)
        self.left -= 1
        self.num_raised += 1
        if self.after:
            self.function(*args, **options)
        raise ZeroDivisionError("planted")


def hooks_of(protocol: type) -> set[str]:
    """Return the methods and properties that an engine may call."""
    return {
        name
        for name, value in vars(protocol).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, property))
    }


def test_every_hook_of_the_protocol_is_tested() -> None:
    assert hooks_of(Drafter) == OF_A_REQUEST | OF_A_STEP | AT_REST
    assert hooks_of(DrafterStep) == OF_A_LAUNCH


# ---- drafters ----


def is_victim(_: Any, request: Request, *others: Any) -> bool:
    return request.seed == VICTIM and request.arrival > 0


def drafting_engine(model_dir: Path) -> Engine:
    """Return an engine with adaptive verification, in which rows cost nothing."""
    engine = make(model_dir, NAIVE)
    set_row_cost(engine)
    return engine


def classes_with(hook: str, method: str) -> list[type]:
    """Return the classes, or names of drafters, of a method that have a hook."""
    steps = {"ngram": _NgramStep, "mtp": RecurrentStep}
    names = method.split("+")
    if hook in OF_A_LAUNCH:
        return [steps[name] for name in names if name in steps]
    if hook in {"plan", "new_step"}:
        names = [name for name in names if name != "suffix"]  # suffix runs on the host only
    return names  # type: ignore[return-value]


def assert_equal(got: list[Completion], plain: list[Completion], but: tuple[int, ...] = ()) -> None:
    left = [one for index, one in enumerate(plain) if index not in but]
    assert [i for i, (a, b) in enumerate(zip(got, left, strict=True)) if bits(a) != bits(b)] == []
    for a, b in zip(got, left, strict=True):
        same = [None if p is None else list(p) for p in (a.prompt_logprobs, b.prompt_logprobs)]
        assert same[0] == same[1]


CASES = [
    (hook, method)
    for hook in sorted(OF_A_REQUEST | OF_A_STEP | OF_A_LAUNCH)
    for method in METHODS
    if classes_with(hook, method)
]


@pytest.mark.fast("*-suffix")
@pytest.mark.parametrize("hook,method", CASES, ids=lambda value: value)
def test_drafter_error_changes_no_output(
    model_dir: Path,
    plain: list[Completion],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    hook: str,
    method: str,
) -> None:
    """The affected request continues without drafts, and later requests have drafts again."""
    own = METHODS[method] | {"adaptive_verification": False}
    for at, after in ((0, False), (2, False), (0, True), (2, True)):
        on_fake_gpu = hook in OF_A_LAUNCH | OF_A_STEP and after
        with monkeypatch.context() as patch:
            if on_fake_gpu:
                device = FakeGpu()
                patch.setattr("specops.engine.engine.open_device", lambda *_, d=device, **__: d)
            engine = drafting_engine(model_dir)
            planted = []
            for place in classes_with(hook, method):
                kind = type(engine.drafters[place]) if isinstance(place, str) else place
                when = is_victim if hook in OF_A_REQUEST else lambda *_: True
                planted.append(Planted(getattr(kind, hook), when, at=at, after=after))
                patch.setattr(kind, hook, planted[-1])
            caplog.clear()
            forgets = after or hook not in {"stop", "leave"}
            found = run(engine, lambda i: own if i % 4 else NO_DRAFTS, forgets=forgets)
            raised = sum(one.num_raised for one in planted)
            is_called_once = hook in {"draft_kv", "leave", "start", "stop"} and at
            assert raised or is_called_once, "the planted hook was never called"
            assert_equal(found.done, plain)
            errors = [one.message for one in caplog.records if one.levelno == logging.ERROR]
            assert sum(f"{hook} of drafter" in one for one in errors) == raised
            # A drafter that keeps its slots may fail again, which is counted but not logged.
            num_failures = engine._drafting.num_failures
            assert num_failures >= len(errors)
            assert num_failures == raised or not forgets
            before = engine.stats.speculative.num_draft_tokens
            again = run(engine, lambda index: own, forgets=forgets)
            assert_equal(again.done, plain)
            assert engine.stats.speculative.num_draft_tokens > before + 20


@pytest.mark.fast("*-suffix", "*-mtp")
@pytest.mark.parametrize("hook,method", CASES, ids=lambda value: value)
def test_repeated_drafter_errors_change_no_output(
    model_dir: Path,
    plain: list[Completion],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    hook: str,
    method: str,
) -> None:
    """Every failure is counted by method, and only some are logged."""
    engine = drafting_engine(model_dir)
    own = METHODS[method] | {"adaptive_verification": True}
    for place in classes_with(hook, method):
        kind = type(engine.drafters[place]) if isinstance(place, str) else place
        monkeypatch.setattr(kind, hook, Planted(getattr(kind, hook), times=10**9))
    forgets = hook not in {"stop", "leave"}
    assert_equal(run(engine, lambda index: own, forgets=forgets).done, plain)
    failures = engine._drafting.num_failures
    assert failures >= 1 and sum(engine.stats.drafter_failures.values()) == failures
    num_logged = Counter(
        one.args[0] for one in caplog.records if one.levelno == logging.ERROR and one.args
    )
    assert max(num_logged.values()) <= len(str(failures))  # the 1st, 10th, 100th and so on


def test_errors_in_idle_hooks_are_logged(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make(model_dir, NAIVE)
    kind = type(engine.drafters["ngram"])
    monkeypatch.setattr(kind, "is_unsaved", property(Planted(lambda self: True, times=10**9)))
    assert not engine.has_unsaved_drafters
    assert "is_unsaved of drafter ngram failed" in caplog.text
    monkeypatch.setattr(kind, "gauges", Planted(lambda self: {}, times=10**9))
    assert sorted(engine.drafter_gauges) == [
        f"suffix_cache_{what}" for what in ("bytes", "requests", "tokens")
    ]
    assert "gauges of drafter ngram failed" in caplog.text
    monkeypatch.setattr(
        kind, "drafts_common_text", property(Planted(lambda self: False, times=10**9))
    )
    assert engine.drafters_of_common_text == {"ngram"}
    assert "drafts_common_text of drafter ngram failed" in caplog.text


@pytest.mark.parametrize("strategy", ["rejection", "block"])
def test_drafter_error_is_harmless_with_sampled_drafts(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """Without the drafter, `draft_probs` has no row for the request."""
    engine = make(model_dir, NAIVE)
    kind = type(engine.drafters["mtp"])
    monkeypatch.setattr(kind, "start", Planted(kind.start))
    own = {"method": "mtp", "num_speculative_tokens": 3, "verify_strategy": strategy}
    found = run(engine, lambda index: own)
    assert not found.failures and all(one.error is None for one in found.done)
    assert engine.stats.speculative.num_draft_tokens > 50


# ---- errors in one request ----


def of_victim(get: Callable[[Request], Any]) -> Callable[..., bool]:
    """Return a predicate that is true for calls on an object of the victim."""
    mine: list[Any] = []

    def when(owner: Any, *_: Any, **__: Any) -> bool:
        return any(get(request) is owner for request in mine)

    when.mine = mine  # type: ignore[attr-defined]
    return when


@dataclass(frozen=True)
class Place:
    """A function of one request that may raise."""

    owner: type
    name: str
    get: Callable[[Request], Any] | None = None  # the request's object; None for no such object
    at: int = 0


def of_request(name: str) -> Callable[..., bool]:
    def when(_: Any, *args: Any, **__: Any) -> bool:
        request = getattr(args[0], "request", args[0])
        return bool(is_victim(None, request))

    return when


PLACES = [
    *(
        Place(GrammarState, name, lambda r: r.grammar, at)
        for name, at in (
            ("take", 0),
            ("take", 3),
            ("judge", 1),
            ("advance", 2),
            ("go_back", 1),
            ("allow", 0),
            ("allow", 4),
            ("forced", 0),
            ("forced", 2),
            ("compute_mask", 1),
            ("tried", 1),
            ("settle", 1),
            ("note_step", 1),
        )
    ),
    *(Place(TextStream, name, lambda r: r.stream, at) for name, at in (("push", 3), ("take", 0))),
    Place(TextStream, "finish", lambda r: r.stream),
    Place(TextStream, "_add", lambda r: r.stream, 4),
    Place(PromptLogprobs, "add", lambda r: r.prompt_logprobs),
    Place(SlotTables, "start"),
    Place(SlotTables, "_count"),
    Place(Runner, "start"),
    Place(Runner, "commit", at=2),
    Place(Request, "commit", lambda r: r, 1),
    Place(SpeculativeStats, "count", lambda r: r.output.stats, 1),
    Place(Engine, "_take_over", at=1),
    Place(Scheduler, "advance", at=1),
    Place(Scheduler, "register_full_pages", at=1),
]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place.name}-{place.at}")
@pytest.mark.fast("*-before", ci=("*",))
def test_error_in_one_request_ends_only_that_request(
    model_dir: Path,
    plain: list[Completion],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: Place,
    after: bool,
) -> None:
    engine = drafting_engine(model_dir)
    if place.get is None:
        when = of_request(place.name)
    else:
        when = of_victim(place.get)
        made = engine._admission.make

        def noting(*args: Any, **options: Any) -> Request:
            request = made(*args, **options)
            if is_victim(None, request):
                when.mine.append(request)  # type: ignore[attr-defined]
            return request

        monkeypatch.setattr(engine._admission, "make", noting)
    # The first failure in a batch of masks may be due to another request.
    times = 2 if place.name in {"allow", "compute_mask", "settle"} else 1
    function = getattr(place.owner, place.name)
    planted = Planted(function, when, at=place.at, times=times, after=after)
    monkeypatch.setattr(place.owner, place.name, planted)
    own = METHODS["suffix"]
    found = run(engine, lambda i: own if i % 4 else NO_DRAFTS)
    assert planted.num_raised == times and not found.failures
    failed = found.done.pop(VICTIM)
    assert_equal(found.done, plain, but=(VICTIM,))
    assert failed.finish_reason == "error" and failed.error == "ZeroDivisionError: planted"
    last = found.outputs[VICTIM][-1]
    assert (last.finish_reason, last.error, last.token_ids) == ("error", failed.error, [])
    assert [one.finish_reason for one in found.outputs[VICTIM][:-1]].count(None) == len(
        found.outputs[VICTIM][:-1]
    )
    token_ids_of_victim = [token for one in found.outputs[VICTIM] for token in one.token_ids]
    assert token_ids_of_victim == plain[VICTIM].token_ids[: len(token_ids_of_victim)]
    errors = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert len(errors) == 1 and errors[0].exc_info and "ends with an error" in errors[0].message
    assert_equal(run(engine, lambda index: own).done, plain)


def test_every_grammar_hook_is_tested() -> None:
    """Every hook of a grammar fails in a test, except for a few rare ones.

    The rare hooks run only after another failure, at the end of a text, or outside of steps.
    """
    rare = {"restart", "fits_end", "allow_all", "is_complete", "may_end", "note_limit", "is_slow"}
    rare.add("prepare")
    planted = {place.name for place in PLACES if place.owner is GrammarState}
    assert hooks_of(GrammarState) == planted | rare


def test_masks_are_computed_separately_after_an_error(
    model_dir: Path, plain: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(model_dir, NAIVE)
    fill = Planted(masks.MaskFiller.fill, lambda _, matchers, out: len(matchers) > 1, times=10**9)
    monkeypatch.setattr(masks.MaskFiller, "fill", fill)
    assert_equal(run(engine, lambda index: METHODS["suffix"]).done, plain)
    assert fill.num_raised > 0


def test_failing_prompt_logprobs_end_only_their_requests(
    model_dir: Path, plain: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(model_dir, NAIVE)
    scores = Planted(PromptScorer._scores, times=10**9)
    monkeypatch.setattr(PromptScorer, "_scores", scores)
    found = run(engine, lambda index: METHODS["ngram"])
    scored = [i for i in range(NUM) if params_of(i).prompt_logprobs is not None]
    assert [i for i, one in enumerate(found.done) if one.error is not None] == scored
    rest = [one for i, one in enumerate(found.done) if i not in scored]
    assert_equal(rest, plain, but=tuple(scored))


def test_failing_prompt_logprobs_of_one_request_spare_others(
    model_dir: Path, plain: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of other requests in the same tile are scored without those of the failing request."""
    engine = make(model_dir, NAIVE)
    shared: list[int] = []

    def has_victims(_: Any, tile: Any, *__: Any) -> bool:
        requests = [engine._requests[piece.request_id] for piece in tile]
        found = any(is_victim(None, request) for request in requests)
        shared.append(found * len(tile))
        return found

    scores = Planted(PromptScorer._scores, has_victims, times=10**9)
    monkeypatch.setattr(PromptScorer, "_scores", scores)
    found = run(engine, lambda index: METHODS["ngram"])
    assert max(shared) > 1 and not found.failures
    failed = found.done.pop(VICTIM)
    assert failed.error == "ZeroDivisionError: planted"
    assert_equal(found.done, plain, but=(VICTIM,))


def test_steps_with_replaced_tables_do_not_run_again(
    model_dir: Path, plain: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables are replaced while a request fails."""
    engine = make(model_dir, NAIVE)
    grow = Planted(SlotTables._grown, times=3, at=2, after=True)
    monkeypatch.setattr(SlotTables, "_grown", grow)
    found = run(engine, lambda index: NO_DRAFTS)
    assert grow.num_raised == 3
    failed = tuple(i for i, one in enumerate(found.done) if one.error is not None)
    assert failed
    assert_equal([one for one in found.done if one.error is None], plain, but=failed)
    assert_equal(run(engine, lambda index: NO_DRAFTS).done, plain)


# ---- errors that end a step ----


@pytest.mark.parametrize("error", [RuntimeError, ValueError, KeyError])
@pytest.mark.parametrize("method", METHODS)
def test_device_fault_ends_the_requests_of_its_step(
    model_dir: Path,
    plain: list[Completion],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    error: type[Exception],
) -> None:
    engine = make(model_dir, NAIVE)
    forward, num_calls = Transformer.forward, 0
    in_step: list[set[str]] = []
    launch = engine._runner.launch

    def launching(plan: Any, **options: Any) -> None:
        in_step.append({part.request.request_id for part in plan.parts})
        launch(plan, **options)

    def failing(self: Transformer, *args: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 9:
            raise error("the device is gone")
        return forward(self, *args, **options)

    monkeypatch.setattr(engine._runner, "launch", launching)
    monkeypatch.setattr(Transformer, "forward", failing)
    found = run(engine, lambda index: METHODS[method])
    (failure,) = found.failures
    assert "a step failed: " in str(failure) and "the device is gone" in str(failure)
    assert isinstance(failure.__cause__, error)
    ended = {one.request_id for one in failure.outputs}
    assert ended in in_step and len(ended) > 1
    assert {one.finish_reason for one in failure.outputs} == {"error"}
    failed = tuple(i for i in range(NUM) if found.outputs[i][-1].finish_reason == "error")
    assert 0 < len(failed) < NUM and len(found.done) == NUM - len(failed)
    assert_equal(found.done, plain, but=failed)
    assert_equal(run(engine, lambda index: METHODS[method]).done, plain)


PLANNERS = [(Scheduler, "decoding"), (Drafting, "select"), (Scheduler, "schedule")]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "owner,name", PLANNERS, ids=lambda value: getattr(value, "__name__", value)
)
def test_error_in_planning_ends_running_requests(
    model_dir: Path,
    plain: list[Completion],
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    after: bool,
) -> None:
    """Requests that the plan preempts end, too; waiting requests continue."""
    for at in (4, 9, 17):
        with monkeypatch.context() as patch:
            engine = make(model_dir, NAIVE)
            planted = Planted(getattr(owner, name), at=at, after=after)
            patch.setattr(owner, name, planted)
            found = run(engine, lambda index: METHODS["mtp+suffix"])
            (failure,) = found.failures
            assert planted.num_raised == 1 and "a step failed: ZeroDivision" in str(failure)
            assert isinstance(failure.__cause__, ZeroDivisionError) and failure.outputs
            assert {one.finish_reason for one in failure.outputs} == {"error"}
            failed = tuple(i for i in range(NUM) if found.outputs[i][-1].finish_reason == "error")
            assert 0 < len(failed) < NUM and len(found.done) == NUM - len(failed)
            assert_equal(found.done, plain, but=failed)
            assert_equal(run(engine, lambda index: METHODS["mtp+suffix"]).done, plain)


def test_error_in_planning_ends_preempted_requests(
    model_dir: Path,
    plain: list[Completion],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The plan fails before drafters learn about the preemption."""
    engine = make(model_dir, NAIVE, num_pages=10)
    schedule, raised = Scheduler.schedule, 0

    def failing(self: Scheduler) -> Plan:
        nonlocal raised
        plan = schedule(self)
        if plan.stopped and not raised:
            raised += 1
            raise ZeroDivisionError("planted")
        return plan

    monkeypatch.setattr(Scheduler, "schedule", failing)
    found = run(engine, lambda index: METHODS["mtp+suffix"])
    assert raised == len(found.failures) == 1
    failed = tuple(i for i in range(NUM) if found.outputs[i][-1].finish_reason == "error")
    assert 0 < len(failed) < NUM
    assert_equal(found.done, plain, but=failed)
    assert engine._drafting.num_failures == 0 and len(caplog.records) == 0


def test_interrupt_leaves_a_usable_engine(
    model_dir: Path, plain: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(model_dir, NAIVE)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for index in range(3):
        engine.add_request(prompt_of(index), params_of(index))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Transformer, "forward", interrupted)
        engine.step()
    assert_nothing_is_left(engine)
    assert_equal(run(engine, lambda index: METHODS["mtp"]).done, plain)


def test_generate_reports_failed_requests(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(model_dir, NAIVE)
    with monkeypatch.context() as patch:
        patch.setattr(TextStream, "push", Planted(TextStream.push))
        with pytest.raises(EngineError, match="a request failed: ZeroDivisionError: planted"):
            engine.generate([prompt_of(0), prompt_of(2)], SamplingParams(max_tokens=4))
    assert_nothing_is_left(engine)


# ---- responses that a budget of the shared tree has evicted ----


@pytest.fixture
def suffix_engine(model_dir: Path) -> Iterator[Callable[..., Engine]]:
    def made(**budgets: int) -> Engine:
        own = {f"suffix_decoding_max_cached_{name}": value for name, value in budgets.items()}
        limits = {"num_pages": 40, "max_num_batched_tokens": 16}
        return make(model_dir, SpeculativeConfig.from_dict({**METHODS["suffix"], **own}), **limits)

    yield made


@pytest.mark.parametrize("budget", ["requests", "tokens", "bytes"])
def test_request_without_output_leaves_no_cached_response(
    suffix_engine: Callable[..., Engine],
    plain: list[Completion],
    caplog: pytest.LogCaptureFixture,
    budget: str,
) -> None:
    """With a budget of 0, its response was never in the tree."""
    engine = suffix_engine(**{budget: 0})
    names = [engine.add_request(prompt_of(i), params_of(i)) for i in (2, 3)]
    engine.step()
    only = SamplingParams(max_tokens=0, prompt_logprobs=0)
    names.append(engine.add_request(prompt_of(5), only))
    while engine.has_unfinished():
        engine.step()
    done = [engine.completion(name) for name in names]
    assert_equal(done[:2], [plain[2], plain[3]])
    assert done[2].finish_reason == "length"
    assert_nothing_is_left(engine)
    assert not caplog.records and engine._drafting.num_failures == 0


def test_abort_after_eviction_of_the_response_is_clean(
    suffix_engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    """The long prompt of one client runs while four requests of another client finish."""
    engine = suffix_engine(requests=2)
    long = engine.add_request([5, 6, 7] * 40, SamplingParams(max_tokens=4), owners=("a",))
    short = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    engine._scheduler._free_rows = 1  # the long prompt gets few rows per step
    engine.step()
    request = engine._requests[long]
    for index in range(4):
        name = engine.add_request(prompt_of(index)[:4], short, owners=("b",))
        while engine._requests[name].output.finish_reason is None:
            engine.step()
        engine.completion(name)
    cached = engine.drafters["suffix"].cache.cached_requests  # type: ignore[attr-defined]
    assert not request.output_token_ids and request.slot >= 0
    assert len(cached) == 2 and not any(str(name).endswith("-0") for name in cached)
    assert engine.abort(long)
    assert_nothing_is_left(engine)
    assert not caplog.records and engine._drafting.num_failures == 0


# ---- empty plans ----


def test_empty_plan_reports_preempted_requests_to_drafters(
    model_dir: Path, plain: list[Completion]
) -> None:
    """The plan preempts its only request for a new request that still lacks pages."""
    every = {"max_spec_factor": 20.0, "min_token_prob": 0.0}  # any token has drafts
    own = {f"suffix_decoding_{name}": value for name, value in every.items()}
    suffix = SpeculativeConfig.from_dict({"method": "suffix", "num_speculative_tokens": 12, **own})
    engine = make(model_dir, suffix, num_pages=16, max_num_batched_tokens=128)
    text = [
        *range(VOCAB),
        *range(VOCAB),
        1,
        2,
    ]  # both requests share 8 pages and have one page each
    seeded = SamplingParams(max_tokens=20, temperature=0.9, seed=3, ignore_eos=True)

    def add(owners: tuple[str, ...], prompt: list[int], params: SamplingParams, **own: Any) -> str:
        return engine.add_request(prompt, params, owners=owners, **own)

    first = add(("a", "1"), text, seeded)
    while not engine._requests[first].is_decoding:
        engine.step()
    second = add(("a", "2"), text, seeded)
    while not engine._requests[second].is_decoding:
        engine.step()
    # With another client, only one request of the first client runs per step: first one, then two.
    add(("c", "1"), [9, 9, 9], SamplingParams(max_tokens=1), speculative_config={"method": "naive"})
    engine.step()
    stopped = engine._requests[second]
    slot = stopped.slot
    held = engine._pool.allocate(engine.num_free_pages)
    assert held is not None
    newcomer = add(
        ("b", "1"), [4] * 17, seeded
    )  # needs two pages, and preempting the second request frees one
    assert engine.step() == []
    assert engine.stats.num_preemptions == 1 and stopped.slot == -1
    drafter = engine.drafters["suffix"]
    assert isinstance(drafter, SuffixDrafter) and slot not in drafter._requests
    # A request without drafts gets the slot.
    engine.abort(second)
    engine.abort(newcomer)
    engine._pool.release(held)
    other = add(("b", "2"), prompt_of(0), params_of(0), speculative_config={"method": "naive"})
    while engine.has_unfinished():
        engine.step()
    assert engine._drafting.num_failures == 0
    assert_equal([engine.completion(other)], plain[:1])
    assert len(engine.completion(first).token_ids) == 20
