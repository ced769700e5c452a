# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the op tests: the device, the instruction set, the seed, and the error rule."""

import gc
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
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
from fake_gpu import OP_MODULES, FakeGpu
from rounding import assert_error_at_most, distance, rounding_errors
from specops import _C
from torch import Tensor

# Threads for the references' torch ops: if they share a core, barriers cost more than they save.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Run the first and last case of every op test on DEVICE only.

    DEVICE:first and DEVICE:last select one of the two.
    """
    parser.addoption("--smoke", metavar="DEVICE", help=pytest_addoption.__doc__)


def pytest_configure(config: pytest.Config) -> None:
    """Limit a worker to one thread, since other workers use the other cores."""
    exercised.in_worker = hasattr(config, "workerinput")
    if exercised.in_worker:
        specops.set_num_threads(1)


def keep_smoke(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Apply --smoke: keep few cases, for tools that slow every kernel a hundred times."""
    if not config.getoption("--smoke"):
        return
    device_name, _, which = config.getoption("--smoke").partition(":")
    ends = {"first": (0,), "last": (-1,), "": (0, -1)}[which]
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        callspec = getattr(item, "callspec", None)
        on_device = callspec is not None and callspec.params.get("device") == device_name
        if on_device and item.get_closest_marker("slow") is None:
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    kept_ids = {id(of_test[end]) for of_test in cases.values() for end in ends}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept_ids])
    items[:] = [item for item in items if id(item) in kept_ids]


# Ops with separate kernels for instruction sets with bf16 products (SPECOPS_BF16_KERNELS in
# CMakeLists.txt).
BF16_OPS = frozenset({"append_attention", "linear", "moe_linear", "pack_weight"})


def split_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases that `fast` leaves to CI or to `make prove`.

    The marker's arguments are patterns of case ids (`*`, `?`) that `make test` runs; each must
    match some case. `ci` has the patterns of the cases that CI adds; all others are marked `slow`.
    """
    unmatched: dict[str, set[str]] = {}
    for item in items:
        marker, callspec = item.get_closest_marker("fast"), getattr(item, "callspec", None)
        if marker is None or callspec is None:
            continue
        test = item.nodeid.split("[")[0]
        ci_patterns = marker.kwargs.get("ci", ())
        matched = {one for one in (*marker.args, *ci_patterns) if fnmatchcase(callspec.id, one)}
        unmatched[test] = unmatched.get(test, {*marker.args, *ci_patterns}) - matched
        # A GPU has time for all cases.
        if matched.isdisjoint(marker.args) and callspec.params.get("device") != "cuda":
            item.add_marker("ci" if matched else "slow")
    for test, patterns in unmatched.items():
        if patterns and not any("[" in arg for arg in config.args):
            raise pytest.UsageError(f"{test}: no case is called {', '.join(sorted(patterns))}")


def pairwise_cases(cases: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Return a subset of the cases that contains every pair of values found in any case.

    A case is one index per parameter. The result is small, but not minimal: a greedy selection in a
    fixed random order.
    """
    index_pairs = list(combinations_with_replacement(range(len(cases[0])), 2))
    uncovered = {(i, case[i], j, case[j]) for case in cases for i, j in index_pairs}
    shuffled, chosen = random.Random(0).sample(cases, len(cases)), set()
    for required in range(len(index_pairs), 0, -1):
        for case in shuffled:
            new = {(i, case[i], j, case[j]) for i, j in index_pairs} & uncovered
            if len(new) >= required:
                chosen.add(case)
                uncovered -= new
    return chosen


def mark_pairwise(items: list[pytest.Item]) -> None:
    """Mark as `slow` the cases that `pairwise` drops, for each device separately.

    Cases that are `slow` for another reason do not count. The marker's arguments are patterns of
    case ids that the test skips; such cases stay unmarked and do not count either.
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
        # Parameters of one `parametrize`, and the device, count as one.
        values = zip(*([repr(x) for x in i.callspec.params.values()] for i in of_test), strict=True)
        columns = dict.fromkeys(tuple(map(column.index, column)) for column in values)
        cases = list(zip(*columns, strict=True))
        chosen = pairwise_cases(cases)
        for item, case in zip(of_test, cases, strict=True):
            if case not in chosen:
                item.add_marker(pytest.mark.slow)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run an op test on cpu, under every instruction set if requested, on simt, and on a GPU."""
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
    """Disable the garbage collector during collection, which creates millions of permanent objects.

    Garbage collections would take a quarter of the time of test collection. At the default
    threshold of 700 objects, they would also take a tenth of the time of the tests.
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
    """Select the tests, note which files run whole, and move `at_the_end` tests to the end."""
    collected = list(items)
    split_cases(config, items)
    mark_pairwise(items)
    keep_smoke(config, items)
    yield
    chosen = set(items)
    for item in collected:
        exercised.whole_files.add(item.path.name)
    for item in collected:
        is_partial = any("::" in arg and item.path.name in arg for arg in config.args)
        is_deferred = any(item.get_closest_marker(mark) for mark in ("slow", "ci"))
        if is_partial or (item not in chosen and not is_deferred):
            exercised.whole_files.discard(item.path.name)
    items.sort(key=lambda item: item.get_closest_marker("at_the_end") is not None)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Report a worker's calls to the controller, which checks that nothing is missing."""
    if exercised.in_worker:
        session.config.workeroutput["exercised"] = exercised.packed()  # type: ignore[attr-defined]
        return
    if not _ended_workers:
        return
    from test_devices import lacking

    _lacking.extend(lacking())
    if _lacking and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


_ended_workers: list[str] = []  # workers that have ended
_lacking: list[str] = []


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Merge the report of an ended worker; a crashed one reports nothing, but its tests failed."""
    if report := getattr(node, "workeroutput", {}).get("exercised"):
        _ended_workers.append(node.gateway.id)
        exercised.merge(report)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Report why tests were skipped, and what the controller found."""
    for line in skips.summary(terminalreporter.stats.get("skipped", [])):
        terminalreporter.write_line(line, yellow=True)
    for line in _lacking:
        terminalreporter.write_line(f"FAILED every op is tested on every device: {line}", red=True)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """End a worker whose GPU no longer answers; another worker takes over its remaining tests."""
    callspec = getattr(item, "callspec", None)
    if callspec is None or callspec.params.get("device") != "cuda":
        return
    if exercised.in_worker and torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError:  # an illegal access ends a process's use of the device
            os._exit(1)


@pytest.fixture(autouse=True)
def restored_runtime_settings() -> Iterator[None]:
    """Restore the instruction set and the number of threads, which engines of a test may change."""
    isa, threads = specops.get_isa(), specops.runtime.get_num_threads()
    yield
    if specops.get_isa() != isa:
        specops.set_isa(isa)
    if specops.runtime.get_num_threads() != threads:
        specops.set_num_threads(threads)


@pytest.fixture
def empty_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the machine's disk, which may be so full that the weight cache stores nothing."""
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=usage.total))


@pytest.fixture(scope="session", autouse=True)
def repeatable_seeds() -> Iterator[None]:
    """Give requests without a seed the same seeds in every run.

    Otherwise a request that can end at its first token would do so in a few runs only.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random, "SystemRandom", lambda: random.Random(0))
        yield


@pytest.fixture(scope="session", autouse=True)
def patient_clients() -> None:
    """Let httpx wait five minutes unless a test sets a timeout.

    The default of httpx, five seconds, is too short for a server on a busy machine.
    """
    try:
        from httpx._config import DEFAULT_TIMEOUT_CONFIG
    except ImportError:  # without httpx, no test uses a server
        return
    for phase in ("connect", "read", "write", "pool"):
        setattr(DEFAULT_TIMEOUT_CONFIG, phase, 300.0)


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the tensor device of an op test: cpu (for the interpreter too) or cuda."""
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
    """Return whether CUDA kernels run, in the interpreter or on a GPU."""
    return request.node.callspec.params["device"] != "cpu"


@pytest.fixture
def place(request: pytest.FixtureRequest, device: str) -> Iterator[Callable[[int, int], None]]:
    """Return a function that sets the number of SMs or CPU threads for the calls that follow."""

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
    """Run the test under each rounding rule of mma; on a GPU only once, under the GPU's rule."""
    if request.node.callspec.params["device"] != "simt":
        if request.param != simt.ACCUMULATIONS[0]:
            pytest.skip("only the interpreter has a choice of rounding rules")
        yield request.param
        return
    with simt.accumulation(request.param):
        yield request.param


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once per instruction set, including the portable path."""
    before = specops.get_isa()
    if request.param in specops.supported_isas():
        specops.set_isa(request.param)
    yield request.param
    specops.set_isa(before)


@contextmanager
def expect_fault(on_cuda: bool, match: str) -> Iterator[None]:
    """Expect an error from wrong data: cpu raises at once, CUDA reports it afterwards."""
    if not on_cuda:
        with pytest.raises(ValueError, match=match):
            yield
        return
    yield
    with pytest.raises(ValueError, match=match):
        specops.check_errors()
    specops.check_errors()  # a fault is reported once


@pytest.fixture(autouse=True)
def _seed_and_threads() -> Iterator[None]:
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # avoids the stack trace that torch records to seed a GPU later
        torch.default_generator.manual_seed(0)
    before = specops.get_num_threads()
    yield
    specops.set_num_threads(before)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start Chromium."""
    from browsing import running_browser

    with running_browser() as browser:
        yield browser


@pytest.fixture
def page(served: Any, browser: Any) -> Iterator[Any]:
    """Open the page of the server fixture `served` of the test's file."""
    from browsing import connected, opened

    with opened(browser, served) as page:
        yield connected(page)


@pytest.fixture(scope="module")
def mtp_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a small model with an MTP module."""
    from mtp_checkpoints import make_mtp_model

    return make_mtp_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def fake() -> Iterator[Any]:
    """Serve an engine without a model."""
    from fake_engine import FakeEngine
    from serving import serving

    with serving(FakeEngine(step_seconds=0.0005)) as served:
        yield served


@pytest.fixture(scope="module")
def reference_server(mtp_model: Path) -> Iterator[Any]:
    """Start one server of `mtp_model`, the reference for the answers of several servers."""
    from server_pairs import one_server

    with one_server(mtp_model) as one:
        yield one


@pytest.fixture
def use_fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeGpu]:
    """Return a function that replaces the device of later engines by a fake GPU."""

    def make(**arguments: Any) -> FakeGpu:
        device = FakeGpu(**arguments)
        monkeypatch.setattr("specops.engine.engine.open_device", lambda *_, **__: device)
        return device

    return make


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the CPU kernels by the CUDA kernels in the interpreter."""
    module = simt.load()
    module.set_schedule("in_order", 0)
    module.set_landing("late")
    for op_module in OP_MODULES:
        monkeypatch.setattr(op_module, "_C", module)


def assert_close(op: Callable[..., Tensor], got: Tensor, *inputs: Tensor) -> None:
    """Check that the error of `got` is at most twice that of the reference's own rounding.

    `op` is the reference; it is run on float64 inputs (the truth), and in the op's own dtype with
    torch's rounding and with random rounding (rounding.py).
    """
    assert_all_close(lambda *args: [op(*args)], [got], *inputs)


def assert_all_close(
    op: Callable[..., Sequence[Tensor]], got: Sequence[Tensor], *inputs: Tensor
) -> None:
    """Check the results of an op that has several, each as in `assert_close`."""
    truth = op(*(x.double() if x.is_floating_point() else x for x in inputs))
    allowed = rounding_errors(lambda: op(*inputs), truth)
    for one, true, error in zip(got, truth, allowed, strict=True):
        assert_error_at_most(distance(one, true), error)


def every_isa() -> Iterator[str]:
    """Iterate over the instruction sets, for a test whose setup need not be repeated."""
    before = specops.get_isa()
    try:
        for name in specops.supported_isas():
            specops.set_isa(name)
            yield name
    finally:
        specops.set_isa(before)
