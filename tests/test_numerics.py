# SPDX-License-Identifier: Apache-2.0
"""The numbers that the GPU check asks a GPU for, asked of the interpreter."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from specops import attention, dense
from torch import Tensor

from tools.gpu_check.numerics import __main__ as numerics
from tools.gpu_check.numerics import checks, machines
from tools.gpu_check.numerics.cases import APPROXIMATE, OPS, Op
from tools.gpu_check.numerics.machines import Machine


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """The interpreter's own, as other tests expect them."""
    before = [module._C for module in machines.OP_MODULES]
    yield
    machines.interpreter().set_accumulation("fma")
    machines.interpreter().set_schedule("in_order", 0)
    assert [module._C for module in machines.OP_MODULES] == before


def test_a_rehearsal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two schedules of the interpreter give the same bits in every check of every op."""
    path = tmp_path / "results.json"
    assert numerics.main(["--rehearsal", "--results", str(path)]) == 0
    found = json.loads(path.read_text())["numerics"]
    assert all(row["passed"] and row["equal"] == row["cases"] > 0 for row in found.values())
    for check in ("interpreter", "graph = eager"):
        assert {row["subject"] for row in found.values() if row["check"] == check} == set(OPS)
    launched = {row["subject"] for row in found.values() if row["check"] == "launch"}
    assert {"append_attention float32 256, no workspace", "linear float16 M=200"} <= launched
    assert "0 not as they should be" in capsys.readouterr().out.splitlines()[-1]


def test_when_time_is_up_the_rest_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    assert numerics.main(["--rehearsal", "--results", str(path), "--seconds", "0"]) == 0
    assert len(json.loads(path.read_text())["numerics"]) == 1
    assert "time was up in launch" in capsys.readouterr().out


def machine(name: str = "again") -> Machine:
    return Machine(name, "cpu", ("random", 1))


def found_with(monkeypatch: pytest.MonkeyPatch, op: Op) -> checks.Found:
    monkeypatch.setattr(checks, "OPS", {"op": op})
    (found,) = checks.against_the_interpreter(machine(), machine("interpreter"), 4)
    return found


def differing_op(by: float, **judged: float) -> Op:
    """An op that gives something else every second time that it is computed."""
    turns = iter([0, 1] * 8)

    def make(generator: torch.Generator, move: machines.Callable) -> machines.Callable:
        x = torch.ones(1000)
        return lambda: [move(x + by if next(turns) else x)]

    return Op(make, **judged)


def test_a_bit_too_many_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = found_with(monkeypatch, differing_op(1e-6))
    assert (found.passed, found.equal, found.cases) == (False, 0, 4) and 0 < found.worst < 2e-6
    found = found_with(monkeypatch, differing_op(1e-6, most=APPROXIMATE))
    assert found.passed and found.equal == 0
    assert not found_with(monkeypatch, differing_op(0.1, most=APPROXIMATE)).passed
    assert not found_with(monkeypatch, differing_op(float("nan"), most=APPROXIMATE)).passed
    assert not found_with(monkeypatch, differing_op(1.0, differing=0.5)).passed
    assert found_with(monkeypatch, differing_op(0.0)).passed


def test_approximate_functions_may_differ_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two units in the last place of ex2 and its like, as the interpreter can have them."""
    other, device = machine("interpreter"), machine()
    run = device.run

    def fuzzed(call: machines.Callable) -> list[Tensor]:
        machines.interpreter().set_fuzz(7)
        try:
            return run(call)
        finally:
            machines.interpreter().set_fuzz(0)

    monkeypatch.setattr(device, "run", fuzzed)
    found = {one.subject: one for one in checks.against_the_interpreter(device, other, 3)}
    assert all(one.passed for one in found.values())
    equal = {name for name, one in found.items() if one.equal == one.cases}
    assert {"embedding", "gather_output_rows", "prepare_batch", "ngram_propose", "linear"} <= equal
    assert "append_attention" not in equal


def test_rows_that_depend_on_their_place_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, append = dense.linear, attention.append_attention

    def places(x: Tensor, weight: dense.PackedWeight) -> Tensor:
        return linear(x, weight) + torch.arange(x.shape[0])[:, None].bfloat16()

    def crowded(*args: Tensor, **keywords: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = append(*args, **keywords)
        return out + out.shape[0], lse

    monkeypatch.setattr(dense, "linear", places)
    monkeypatch.setattr(attention, "append_attention", crowded)
    found = list(checks.rows_stand_anywhere(machine(), 1))
    assert [one.subject for one in found] == ["linear", "append_attention"]
    assert not any(one.passed for one in found)


def test_a_schedule_that_changes_bits_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    append = attention.append_attention

    def careless(*args: Tensor, workspace: Tensor, **keywords: bool) -> tuple[Tensor, Tensor]:
        out, lse = append(*args, workspace=workspace, **keywords)
        return out + (workspace.numel() > 1000), lse

    monkeypatch.setattr(attention, "append_attention", careless)
    (found,) = checks.schedules_agree(machine(), 1)
    assert not found.passed and found.equal < found.cases


def test_a_form_that_cannot_be_launched_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    append = attention.append_attention

    def small(q: Tensor, *args: Tensor, **keywords: Tensor) -> tuple[Tensor, Tensor]:
        if q.shape[2] == 128 and q.dtype == torch.bfloat16:
            raise RuntimeError("specops: launch: invalid argument")
        return append(q, *args, **keywords)

    monkeypatch.setattr(attention, "append_attention", small)
    wrong = [one for one in checks.launches(machine(), is_small=True) if not one.passed]
    assert {one.subject for one in wrong} == {
        f"append_attention {form}"
        for form in (
            *("bfloat16 128", "bfloat16 128, prefixes", "bfloat16 128, no workspace"),
            *("int8 128", "float8_e4m3fn 128"),
        )
    }
    assert all(one.remark == "specops: launch: invalid argument" for one in wrong)
