# SPDX-License-Identifier: Apache-2.0
"""Numeric checks of the GPU check, run in the interpreter: correct results and planted faults."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from specops import attention, dense, sampling
from torch import Tensor

from tools.gpu_check.numerics import __main__ as numerics
from tools.gpu_check.numerics import cases, checks, machines, replays, trials
from tools.gpu_check.numerics.cases import APPROXIMATE, CHOICES, OPS, Op
from tools.gpu_check.numerics.machines import Machine
from tools.gpu_check.numerics.trials import EQUAL, Found, Limits, Trial

pytestmark = pytest.mark.ci


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Restore the interpreter's default settings after each test."""
    before = [module._C for module in machines.OP_MODULES]
    yield
    machines.interpreter().set_accumulation("fma")
    machines.interpreter().set_schedule("in_order", 0)
    assert [module._C for module in machines.OP_MODULES] == before


def machine(name: str = "again") -> Machine:
    return Machine(name, "cpu", ("random", 1))


def found_by(made: Iterator[Trial], of: str = "") -> dict[str, Found]:
    """Return the results by subject, for subjects that begin with `of`."""
    return {trial.subject: trial.found() for trial in made if trial.subject.startswith(of)}


def rehearse(path: Path, *more: str) -> dict[str, Any]:
    """Return the results that a rehearsal writes, and check its exit code."""
    ended = numerics.main(["--rehearsal", "--results", str(path), *more])
    found: dict[str, Any] = json.loads(path.read_text())["numerics"]
    assert ended == int(not all(row["passed"] for row in found.values()))
    return found


@pytest.mark.slow
def test_a_rehearsal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two schedules of the interpreter give the same bits in every check of every op."""
    found = rehearse(tmp_path / "results.json")
    assert all(row["passed"] and row["equal"] == row["cases"] > 0 for row in found.values())
    for check in ("interpreter", "graph = eager", "first call"):
        assert {row["subject"] for row in found.values() if row["check"] == check} == set(OPS)
    launched = {row["subject"] for row in found.values() if row["check"] == "launch"}
    assert {"append_attention float32 256, no workspace", "linear float16 M=200"} <= launched
    assert next(iter(found.values()))["check"] == "first call"  # any later call is not a first one
    assert "0 not as they should be" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.slow
def test_a_rehearsal_of_forty_seeds(tmp_path: Path) -> None:
    found = rehearse(tmp_path / "results.json", "--cases", "40", "--seconds", "3600")
    assert all(row["passed"] for row in found.values())
    equal = {
        row["subject"]: row["equal"] for row in found.values() if row["check"] == "interpreter"
    }
    assert equal == dict.fromkeys(OPS, 40)


@pytest.mark.parametrize("name", OPS)
def test_every_op_takes_what_it_is_given(name: str) -> None:
    """Each op accepts the random cases of forty seeds; slow ops use fewer seeds."""
    device = machine()
    for seed in range(3 if "latents" in name else 10 if name.startswith("append") else 40):
        generator = torch.Generator().manual_seed(seed)
        assert device.run(device.prepared(OPS[name].make, generator))


def test_when_time_is_up_the_rest_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(rehearse(tmp_path / "results.json", "--seconds", "0")) == 1
    assert "time was up in first call" in capsys.readouterr().out


def test_verification_is_compared_before_the_long_checks() -> None:
    device, other = numerics.machines(True)
    order = [
        (trial.check, trial.subject) for trial in numerics.all_trials(device, other, rehearsal=True)
    ]
    compared = [subject for check, subject in order if check == "interpreter"]
    assert sorted(compared) == sorted(OPS) and compared[:2] == ["verify", "sample"]
    places = [order.index(("interpreter", name)) for name in checks.VERIFICATION]
    assert max(places) < min(i for i, (check, _) in enumerate(order) if check == "replays")


def test_blocks_meet_in_what_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """With these sizes, several blocks share a row of logits, and the leaves of a `linear` tile."""
    for sizes in (checks.REAL, checks.REHEARSED):
        assert max(sizes.inputs) > 512 and max(sizes.rows) > 64
    assert {1200, 4608} <= set(checks.REAL.inputs) and checks.REAL.vocab == 128_256
    module = machines.interpreter()
    launched = []
    for rows in (1, checks.REHEARSED.crowd):
        logits = torch.zeros(rows, checks.REHEARSED.vocab)
        call = lambda x=logits: [  # noqa: E731
            sampling.sample(x, torch.zeros(x.shape[0], dtype=torch.int32))
        ]
        before = module.counters()["blocks"]
        machine().run(call)
        launched.append(module.counters()["blocks"] - before)
    assert launched == [3, checks.REHEARSED.crowd]


# Differences that the check notices


def found_with(monkeypatch: pytest.MonkeyPatch, op: Op) -> Found:
    monkeypatch.setattr(checks, "OPS", {"op": op})
    made = checks.against_the_interpreter(
        machine(), machine("interpreter"), checks.Sizes(4, 6.0, 1, (), 0, (), 0, 0)
    )
    return found_by(made)["op"]


def differing_op(
    change: Callable[[Tensor], Tensor], limits: Limits = EQUAL, dtype: torch.dtype = torch.float32
) -> Op:
    """Return an op whose result is changed in every second call."""
    turns = iter([0, 1] * 8)

    def make(generator: torch.Generator, move: machines.Callable) -> machines.Callable:
        x = torch.ones(100, 1000, dtype=dtype)
        return lambda: [change(x.clone()) if next(turns) else x]

    return Op(make, limits)


def test_a_bit_too_many_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = found_with(monkeypatch, differing_op(lambda x: x + 1e-6))
    assert (found.passed, found.equal, found.cases) == (False, 0, 4) and 0 < found.worst < 2e-6
    found = found_with(monkeypatch, differing_op(lambda x: x + 1e-6, APPROXIMATE))
    assert found.passed and found.equal == 0 and 7 < found.ulps < 9
    for by in (0.1, float("nan")):
        op = differing_op(lambda x, by=by: x + by, APPROXIMATE)
        assert not found_with(monkeypatch, op).passed
    half = Limits(differing=0.5)
    assert not found_with(monkeypatch, differing_op(lambda x: x + 1, half)).passed
    assert found_with(monkeypatch, differing_op(lambda x: x)).passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_wrong_element_of_many_is_noticed(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """One wrong element of 10^5 is noticed although the root mean square hardly changes."""

    def wrong(x: Tensor) -> Tensor:
        x[70, 300] += 0.25
        return x

    found = found_with(monkeypatch, differing_op(wrong, APPROXIMATE, dtype))
    assert found.worst < APPROXIMATE.most and not found.passed and found.ulps >= 0.25 * 2**7


def test_a_rounding_is_one_unit_wherever_it_falls() -> None:
    small, large = torch.full((1, 64), 0.01).bfloat16(), torch.full((1, 64), 100.0).bfloat16()
    x = torch.cat([small, large])
    up = torch.nextafter(x, torch.tensor(1e9).bfloat16())
    assert trials.ulps_apart([x], [up]) == 1.0
    x[0, 0] = 40.0  # the other elements of its row are far below the row's root mean square
    other = x.clone()
    other[0, 1] += 2.0**-7
    assert trials.ulps_apart([x], [other]) < 1.0
    assert trials.ulps_apart([x], [x * float("nan")]) == float("inf")
    assert trials.ulps_apart([torch.tensor([3])], [torch.tensor([4])]) == 0.0
    apart = ([torch.tensor([3])], [torch.tensor([4])])
    assert not trials.is_within(APPROXIMATE, *apart)


@pytest.mark.slow
def test_approximate_functions_may_differ_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions such as ex2 may differ by two units in the last place, as the fuzzer makes them."""
    other, device = machine("interpreter"), machine()
    run = device.run

    def fuzzed(call: machines.Callable) -> list[Tensor]:
        machines.interpreter().set_fuzz(7)
        try:
            return run(call)
        finally:
            machines.interpreter().set_fuzz(0)

    monkeypatch.setattr(device, "run", fuzzed)
    sizes = replace(checks.REHEARSED, cases=6)
    found = found_by(checks.against_the_interpreter(device, other, sizes))
    assert all(one.passed for one in found.values())
    equal = {name for name, one in found.items() if one.equal == one.cases}
    assert {"embedding", "gather_output_rows", "prepare_batch", "ngram_propose"} <= equal
    assert equal.isdisjoint({"append_attention", "moe_route", "silu_mul"})


# Faults of kernels


@pytest.mark.slow
def test_rows_that_depend_on_their_place_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, append, sample = dense.linear, attention.append_attention, sampling.sample

    def places(x: Tensor, weight: dense.PackedWeight) -> Tensor:
        return linear(x, weight) + torch.arange(x.shape[0])[:, None].to(x.dtype)

    def crowded(*args: Tensor, **keywords: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = append(*args, **keywords)
        return out + out.shape[0], lse

    def ranked(
        logits: Tensor, *args: Tensor, outputs: sampling.SampleOutputs, **keywords: Any
    ) -> Tensor:
        tokens = sample(logits, *args, outputs=outputs, **keywords)
        assert outputs.ranks is not None
        outputs.ranks.add_(int(logits.shape[0] > 1))
        return tokens

    monkeypatch.setattr(dense, "linear", places)
    monkeypatch.setattr(attention, "append_attention", crowded)
    monkeypatch.setattr(sampling, "sample", ranked)
    found = found_by(checks.rows_stand_anywhere(machine(), checks.REHEARSED))
    assert len(found) == 3 + 1 + 2
    assert not any(one.passed for one in found.values())


@pytest.mark.slow
def test_a_kernel_with_other_sums_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel has other bits, as if it split its sums elsewhere; only its rows fail."""
    force, linear, forced = dense.set_linear_kernel, dense.linear, [""]

    def remember(kernel: str | None) -> None:
        forced[0] = kernel or ""
        force(kernel)

    def other(x: Tensor, weight: dense.PackedWeight) -> Tensor:
        out = linear(x, weight)
        return torch.nextafter(out, out + 1) if forced[0] == "tile_128x64" else out

    monkeypatch.setattr(dense, "set_linear_kernel", remember)
    monkeypatch.setattr(dense, "linear", other)
    found = found_by(checks.rows_stand_anywhere(machine(), checks.REHEARSED), "linear")
    wrong = [one for one in found.values() if not one.passed]
    assert [one.subject for one in wrong] == [
        f"linear {dtype}, 1040 inputs" for dtype in ("bfloat16", "float16")
    ]
    assert all(one.cases - one.equal == len(checks.REHEARSED.rows) for one in wrong)


@pytest.mark.slow
def test_a_schedule_that_changes_bits_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    append = attention.append_attention

    def careless(*args: Tensor, workspace: Tensor, **keywords: bool) -> tuple[Tensor, Tensor]:
        out, lse = append(*args, workspace=workspace, **keywords)
        return out + (workspace.numel() > 1000), lse

    monkeypatch.setattr(attention, "append_attention", careless)
    (found,) = found_by(checks.schedules_agree(machine(), checks.REHEARSED)).values()
    assert not found.passed and found.equal < found.cases


@pytest.mark.slow
@pytest.mark.parametrize("which", ["k", "v"])
def test_flushed_subnormal_codes_are_noticed(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    """Subnormal fp8 values are read as zero, as by hardware that flushes them."""
    append = attention.append_attention

    def flushed(q: Tensor, cache: attention.PagedKv, *rest: Any, **keywords: Any) -> Any:
        if cache.k.dtype == torch.float8_e4m3fn:
            small = lambda x: torch.where(x.float().abs() < 2.0**-6, 0.0, x.float()).to(x.dtype)  # noqa: E731
            cache = cache._replace(**{which: small(getattr(cache, which))})
        return append(q, cache, *rest, **keywords)

    monkeypatch.setattr(attention, "append_attention", flushed)
    found = found_by(checks.codes_are_exact(machine()))
    assert found["int8"].passed and not found["float8_e4m3fn"].passed
    # No other check notices this fault.
    (op,) = found_by(
        checks.against_the_interpreter(machine(), machine("i"), checks.REHEARSED),
        "append_attention 8-bit",
    ).values()
    assert op.passed


@pytest.mark.slow
@pytest.mark.parametrize("op", ["append_attention", "linear", "sample"])
def test_a_lost_arrival_is_noticed(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """A counter of arrivals is one too high before one of many calls.

    A block that is not the last to arrive then completes the result too early.
    """
    module: Any = {"append_attention": attention, "linear": dense, "sample": sampling}[op]
    inner, calls = getattr(module, op), [0]

    def lost(*args: Any, workspace: Tensor, **keywords: Any) -> Any:
        counters = workspace[: COUNTER_BYTES[op] // workspace.element_size()].view(torch.int32)
        calls[0] += 1
        if calls[0] == 7:  # after two reference calls and two calls that are not compared
            counters += 1
        result = inner(*args, workspace=workspace, **keywords)
        if calls[0] == 7:
            assert counters.any()
            counters.zero_()
        return result

    monkeypatch.setattr(module, op, lost)
    (found,) = found_by(replays.replays(machine(), replays.REHEARSED), op).values()
    assert not found.passed and found.equal == found.cases - 1


COUNTER_BYTES = {"append_attention": 512, "linear": 512, "sample": 4}


@pytest.mark.slow
def test_a_form_that_cannot_be_launched_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    append = attention.append_attention

    def small(q: Tensor, *args: Tensor, **keywords: Tensor) -> tuple[Tensor, Tensor]:
        if q.shape[2] == 128 and q.dtype == torch.bfloat16:
            raise RuntimeError("specops: launch: invalid argument")
        return append(q, *args, **keywords)

    monkeypatch.setattr(attention, "append_attention", small)
    found = found_by(checks.launches(machine(), is_small=True), "append_attention")
    wrong = {name: one for name, one in found.items() if not one.passed}
    assert set(wrong) == {
        f"append_attention {form}"
        for form in (
            "bfloat16 128",
            "bfloat16 128, prefixes",
            "bfloat16 128, no workspace",
            "int8 128",
            "float8_e4m3fn 128",
        )
    }
    told = {one.remark for one in wrong.values()}
    assert told == {"RuntimeError: specops: launch: invalid argument"}


def test_what_is_not_finite_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "linear", lambda x, w: torch.full((2, 2), float("nan")))
    found = found_by(checks.launches(machine(), is_small=True), "linear")
    assert len(found) == 15 and not any(one.passed for one in found.values())


# Faults of the check


@pytest.fixture
def few_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the checks to those that run for each op, and to four ops."""
    few = {name: OPS[name] for name in ("embedding", "sample", "verify", "silu_mul")}
    monkeypatch.setattr(checks, "OPS", few)
    for name in ("launches", "codes_are_exact", "rows_stand_anywhere", "schedules_agree"):
        monkeypatch.setattr(checks, name, lambda *_, **__: iter(()))
    monkeypatch.setattr(replays, "replays", lambda *_: iter(()))


def test_a_type_that_an_op_refuses_ends_its_trial_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_ops: None
) -> None:
    """The random cases include float16 logits, which the ops refuse."""
    monkeypatch.setattr(cases, "LOGITS_DTYPES", (torch.float16, torch.float16))
    found = rehearse(tmp_path / "results.json")
    assert len(found) == 3 * 4  # each op in each check
    wrong = {row["subject"] for row in found.values() if not row["passed"]}
    assert wrong == {"sample", "verify"}
    remarks = {row["remark"] for row in found.values() if not row["passed"]}
    assert all("ValueError" in remark and "logits" in remark for remark in remarks)


def test_an_exception_ends_its_trial_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_ops: None
) -> None:
    def broken(*_: Any) -> Tensor:
        raise KeyError("no such thing")

    monkeypatch.setattr(dense, "embedding", broken)
    found = rehearse(tmp_path / "results.json")
    assert len(found) == 3 * 4
    wrong = {name: row["remark"] for name, row in found.items() if not row["passed"]}
    assert set(wrong) == {f"{x}: embedding" for x in ("first call", "graph = eager", "interpreter")}
    assert set(wrong.values()) == {"KeyError: 'no such thing'"}


def test_a_first_call_that_cannot_be_captured_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake runtime refuses to capture a kernel that was not loaded by an earlier call."""
    device, loaded = machine(), set()
    run = device.run

    def replayed(call: machines.Callable, *, warm: bool = True) -> list[Tensor]:
        if call.__qualname__ not in loaded and not warm:
            raise RuntimeError("operation not permitted when stream is capturing")
        return run(call)

    def noted(call: machines.Callable) -> list[Tensor]:
        loaded.add(call.__qualname__)
        return run(call)

    monkeypatch.setattr(device, "replayed", replayed)
    monkeypatch.setattr(device, "run", noted)
    found = found_by(checks.first_calls(device))
    assert not any(one.passed for one in found.values())
    assert all("when stream is capturing" in one.remark for one in found.values())
    later = found_by(checks.graph_is_eager(device, checks.REHEARSED))
    assert all(one.passed for one in later.values())


def test_a_lost_device_leaves_the_rest_to_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_ops: None
) -> None:
    """After an illegal access, a new process continues the check."""
    answers = iter([True, True, False])
    monkeypatch.setattr(Machine, "answers", lambda _: next(answers))

    class Replaced(BaseException):
        pass

    def execv(program: str, arguments: list[str]) -> None:
        assert program == arguments[0] == sys.executable
        raise Replaced(arguments)

    monkeypatch.setattr(numerics.os, "execv", execv)
    path = str(tmp_path / "results.json")
    with pytest.raises(Replaced) as replaced:
        numerics.main(["--rehearsal", "--results", path, "--seconds", "50", "--cases", "1"])
    _, *arguments = replaced.value.args[0]
    assert arguments[:2] == ["-m", "tools.gpu_check.numerics"]
    assert arguments[arguments.index("--after") + 1] == "3"
    monkeypatch.setattr(Machine, "answers", lambda _: True)
    assert numerics.main(arguments[2:]) == 0
    assert len(json.loads(Path(path).read_text())["numerics"]) == 3 * 4


def test_a_call_that_reports_wrong_data_is_no_result() -> None:
    """A call with invalid arguments fails the check, although both sides fail equally."""
    logits, position = torch.randn(1, 100), torch.zeros(1, dtype=torch.int32)
    warm = sampling.SamplingTensors(temperature=1.0)
    faulty = lambda: [sampling.sample(logits, position, sampling=warm)]  # noqa: E731
    pairs = lambda: iter([(machine().run(faulty), machine().run(faulty))])  # noqa: E731
    found = Trial("check", "op", pairs).found()
    assert not found.passed and "ValueError: sample: sampling.seeds" in found.remark


def test_choices_may_differ_now_and_then() -> None:
    apart = ([torch.tensor([3])], [torch.tensor([4])])
    same = ([torch.tensor([3])], [torch.tensor([3])])
    few = Trial("c", "s", lambda: iter([apart, *[same] * 199]), CHOICES).found()
    many = Trial("c", "s", lambda: iter([apart] * 3 + [same] * 197), CHOICES).found()
    assert few.passed and not many.passed
    assert not Trial("c", "s", lambda: iter([])).found().passed  # nothing was tried
