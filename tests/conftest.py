# SPDX-License-Identifier: Apache-2.0
"""Fixtures every op test takes: the device, the instruction set, the seed, and the error rule."""

import gc
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import exercised
import pytest
import simt
import skips
import specops
import torch
from rounding import assert_error_at_most, distance, rounding_errors
from specops import (
    _C,
    attention,
    batching,
    dense,
    linear_attention,
    moe,
    ngram,
    runtime,
    sampling,
)
from torch import Tensor

# The references' torch ops: a barrier among threads that share a core costs more than they save.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """--smoke DEVICE: the first and the last case of every op test on that device, no others;
    DEVICE:first, DEVICE:last: only that one.
    """
    parser.addoption("--smoke", metavar="DEVICE", help=pytest_addoption.__doc__)


def pytest_configure(config: pytest.Config) -> None:
    """A worker has one core: the others are the other workers'. test_threads.py takes more."""
    exercised.in_worker = hasattr(config, "workerinput")
    if exercised.in_worker:
        specops.set_num_threads(1)


def keep_smoke(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Applies --smoke: enough for tools that make every kernel a hundred times slower."""
    if not config.getoption("--smoke"):
        return
    wanted, _, which = config.getoption("--smoke").partition(":")
    ends = {"first": (0,), "last": (-1,), "": (0, -1)}[which]
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        callspec = getattr(item, "callspec", None)
        on_device = callspec is not None and callspec.params.get("device") == wanted
        if on_device and item.get_closest_marker("slow") is None:
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    kept = {id(of_test[end]) for of_test in cases.values() for end in ends}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


# What sets with bf16 products have kernels of their own for (SPECOPS_BF16_KERNELS, CMakeLists.txt).
BF16_OPS = frozenset({"append_attention", "linear", "moe_linear", "pack_weight"})

OP_MODULES = [attention, batching, dense, linear_attention, moe, ngram, runtime, sampling]


def split_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases that `fast` leaves to CI or to `make prove`.

    Its arguments are patterns of case ids (`*`, `?`) that `make test` runs, each of which some case
    must match. `ci` has the patterns of those that CI adds; all others are marked `slow`.
    """
    unmatched: dict[str, set[str]] = {}
    for item in items:
        marker, callspec = item.get_closest_marker("fast"), getattr(item, "callspec", None)
        if marker is None or callspec is None:
            continue
        test = item.nodeid.split("[")[0]
        of_ci = marker.kwargs.get("ci", ())
        matched = {one for one in (*marker.args, *of_ci) if fnmatchcase(callspec.id, one)}
        unmatched[test] = unmatched.get(test, {*marker.args, *of_ci}) - matched
        # A GPU has time for all.
        if matched.isdisjoint(marker.args) and callspec.params.get("device") != "cuda":
            item.add_marker("ci" if matched else "slow")
    for test, patterns in unmatched.items():
        if patterns and not any("[" in arg for arg in config.args):
            raise pytest.UsageError(f"{test}: no case is called {', '.join(sorted(patterns))}")


def pairs(cases: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Some of the cases, such that every two values that are in one case are in one of these.

    A case is one index per parameter. Few, but not the fewest: the best of them first, in an order
    that is random and always the same.
    """
    two = list(combinations_with_replacement(range(len(cases[0])), 2))
    left = {(i, case[i], j, case[j]) for case in cases for i, j in two}
    mixed, kept = random.Random(0).sample(cases, len(cases)), set()
    for least in range(len(two), 0, -1):
        for case in mixed:
            new = {(i, case[i], j, case[j]) for i, j in two} & left
            if len(new) >= least:
                kept.add(case)
                left -= new
    return kept


def keep_pairs(items: list[pytest.Item]) -> None:
    """Mark as `slow` the cases that `pairwise` leaves out, for each device on its own.

    Cases that are `slow` anyway do not count.

    Its arguments are patterns of case ids that the test skips: they stay, and do not count, either.
    """
    found: dict[tuple[str, str], list[Any]] = {}
    for item in items:
        marker, callspec = item.get_closest_marker("pairwise"), getattr(item, "callspec", None)
        if marker is None or callspec is None or callspec.params.get("device") == "cuda":
            continue
        is_skipped = any(fnmatchcase(callspec.id, pattern) for pattern in marker.args)
        if not is_skipped and item.get_closest_marker("slow") is None:
            key = item.nodeid.split("[")[0], str(callspec.params.get("device"))
            found.setdefault(key, []).append(item)
    for of_test in found.values():
        # What is parametrized together, and the device, is one parameter.
        values = zip(*([repr(x) for x in i.callspec.params.values()] for i in of_test), strict=True)
        columns = dict.fromkeys(tuple(map(column.index, column)) for column in values)
        cases = list(zip(*columns, strict=True))
        kept = pairs(cases)
        for item, case in zip(of_test, cases, strict=True):
            if case not in kept:
                item.add_marker(pytest.mark.slow)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run an op test on cpu, under every instruction set if it asks, on simt, and on a GPU."""
    isas = specops.supported_isas()
    if metafunc.definition.get_closest_marker("no_bf16"):
        isas = [isa for isa in isas if f"{isa}_bf16" not in isas and isa != "amx"]
    if "device" not in metafunc.fixturenames:
        if "isa" in metafunc.fixturenames:
            metafunc.parametrize("isa", isas, indirect=True)
        return
    if "isa" not in metafunc.fixturenames:
        metafunc.parametrize("device", exercised.DEVICES, indirect=True, scope="function")
        return
    others = exercised.DEVICES[1:]
    metafunc.parametrize(
        ("device", "isa"),
        [*(("cpu", isa) for isa in isas), *((device, device) for device in others)],
        indirect=True,
        ids=[*(f"cpu-{isa}" for isa in isas), *others],
        scope="function",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Reads the tests, which makes millions of objects that stay.

    To look for garbage among them again and again would take a quarter of the time; and among what
    tests make, at every 700 objects, a tenth of theirs.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000)
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """Notes which files run whole, and leaves the look at what they called to the end."""
    everything = list(items)
    split_cases(config, items)
    keep_pairs(items)
    keep_smoke(config, items)
    yield
    chosen = set(items)
    for item in everything:
        exercised.whole_files.add(item.path.name)
    for item in everything:
        in_part = any("::" in arg and item.path.name in arg for arg in config.args)
        is_left = any(item.get_closest_marker(mark) for mark in ("slow", "ci"))
        if in_part or (item not in chosen and not is_left):
            exercised.whole_files.discard(item.path.name)
    items.sort(key=lambda item: item.get_closest_marker("at_the_end") is not None)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells what it called; the controller of workers asks whether anything lacks."""
    if exercised.in_worker:
        session.config.workeroutput["exercised"] = exercised.packed()  # type: ignore[attr-defined]
        return
    if not _told:
        return
    from test_devices import lacking

    _lacking.extend(lacking())
    if _lacking and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


_told: list[str] = []  # workers that have ended
_lacking: list[str] = []


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A worker has ended; one that crashed tells nothing, and its tests are reported already."""
    if told := getattr(node, "workeroutput", {}).get("exercised"):
        _told.append(node.gateway.id)
        exercised.merge(told)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Report why tests were skipped, and what the controller found."""
    for line in skips.summary(terminalreporter.stats.get("skipped", [])):
        terminalreporter.write_line(line, yellow=True)
    for line in _lacking:
        terminalreporter.write_line(f"FAILED every op is tested on every device: {line}", red=True)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Ends a worker process whose GPU no longer answers; another one takes the tests left over."""
    callspec = getattr(item, "callspec", None)
    if callspec is None or callspec.params.get("device") != "cuda":
        return
    if exercised.in_worker and torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError:  # an illegal access ends a process's use of the device
            os._exit(1)


@pytest.fixture(scope="session", autouse=True)
def repeatable_seeds() -> Iterator[None]:
    """Engines give requests without a seed the same ones in every run: what may end at its first
    token would do so in one run of many.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random, "SystemRandom", lambda: random.Random(0))
        yield


@pytest.fixture(scope="session", autouse=True)
def patient_clients() -> None:
    """httpx waits five minutes where a test does not say how long: its own five seconds are little
    for a server on a busy machine.
    """
    try:
        from httpx._config import DEFAULT_TIMEOUT_CONFIG
    except ImportError:  # nothing is served without it
        return
    for phase in ("connect", "read", "write", "pool"):
        setattr(DEFAULT_TIMEOUT_CONFIG, phase, 300.0)


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the tensors of an op test live: cpu (for the interpreter too) or cuda."""
    module: Any = simt.UnderEverySchedule(simt.load()) if request.param == "simt" else _C
    marked = request.node.get_closest_marker("no_bf16") is not None
    module = exercised.Recorded(
        module, request.path.name, request.param, BF16_OPS if marked else frozenset()
    )
    for op_module in OP_MODULES:
        monkeypatch.setattr(op_module, "_C", module)
    return "cpu" if request.param == "simt" else str(request.param)


@pytest.fixture
def on_cuda(request: pytest.FixtureRequest, device: str) -> bool:
    """Whether CUDA kernels run, in the interpreter or on a GPU."""
    return request.node.callspec.params["device"] != "cpu"


@pytest.fixture
def place(request: pytest.FixtureRequest, device: str) -> Iterator[Callable[[int, int], None]]:
    """Moves the calls that follow to a machine of so many SMs, or to so many CPU threads."""

    def move(sms: int, threads: int) -> None:
        specops.set_num_threads(threads)
        if request.node.callspec.params["device"] == "simt":
            simt.load().set_num_sms(sms)

    yield move
    move(4, 1)


@pytest.fixture(
    params=[*simt.ACCUMULATIONS[:2], pytest.param(simt.ACCUMULATIONS[2], marks=pytest.mark.slow)]
)
def accumulation(request: pytest.FixtureRequest, device: str) -> Iterator[str]:
    """Runs the test under each rounding rule of mma; once where the hardware has its own."""
    if request.node.callspec.params["device"] != "simt":
        if request.param != simt.ACCUMULATIONS[0]:
            pytest.skip("only the interpreter has a choice of rounding rules")
        yield request.param
        return
    with simt.accumulation(request.param):
        yield request.param


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once per instruction set, the portable path included."""
    before = specops.get_isa()
    if request.param in specops.supported_isas():
        specops.set_isa(request.param)
    yield request.param
    specops.set_isa(before)


@contextmanager
def expect_fault(on_cuda: bool, match: str) -> Iterator[None]:
    """Wrong data inside the block: raises at once on cpu, is reported afterwards by CUDA."""
    if not on_cuda:
        with pytest.raises(ValueError, match=match):
            yield
        return
    yield
    with pytest.raises(ValueError, match=match):
        specops.check_errors()
    specops.check_errors()  # a fault is told once


@pytest.fixture(autouse=True)
def _seed_and_threads() -> Iterator[None]:
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # without the stack trace that torch keeps for a GPU that may come
        torch.default_generator.manual_seed(0)
    before = specops.get_num_threads()
    yield
    specops.set_num_threads(before)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium."""
    from browsing import running_browser

    with running_browser() as browser:
        yield browser


@pytest.fixture
def page(served: Any, browser: Any) -> Iterator[Any]:
    """The page of the server `served` of the test's file."""
    from browsing import connected, opened

    with opened(browser, served) as page:
        yield connected(page)


@pytest.fixture(scope="module")
def mtp_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with an MTP module."""
    from mtp_checkpoints import make_mtp_model

    return make_mtp_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def together(mtp_model: Path) -> Iterator[Any]:
    """One server of that model, which answers what several together should answer, too."""
    from server_pairs import one_server

    with one_server(mtp_model) as one:
        yield one


def assert_close(op: Callable[..., Tensor], got: Tensor, *inputs: Tensor) -> None:
    """The error of `got` is at most twice what rounding alone makes of the reference's.

    `op` is the reference; it is run on float64 inputs (the truth), and in the op's own dtype with
    torch's rounding and with random rounding (rounding.py).
    """
    truth = op(*(x.double() if x.is_floating_point() else x for x in inputs))
    (allowed,) = rounding_errors(lambda: [op(*inputs)], [truth])
    assert_error_at_most(distance(got, truth), allowed)


def every_isa() -> Iterator[str]:
    """Goes through the instruction sets, for a test whose other half needs no repetition."""
    before = specops.get_isa()
    try:
        for name in specops.supported_isas():
            specops.set_isa(name)
            yield name
    finally:
        specops.set_isa(before)
