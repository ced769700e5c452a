# SPDX-License-Identifier: Apache-2.0
"""`make gpu-check` without a GPU: its steps, its arithmetic, its files, its benches rehearsed."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import common
from tools import gpu_check
from tools.gpu_check import Outcome, Step

ROOT = Path(__file__).resolve().parent.parent


def test_every_family_is_rehearsed() -> None:
    from bench.__main__ import CUDA_FAMILIES

    assert set(CUDA_FAMILIES) == set(gpu_check.BENCH_LIMITS)


def command(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_steps_end_as_they_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "LOGS", tmp_path)
    good = gpu_check.run(Step("good", command("print('fine')"), 60), 60)
    assert (good.status, good.summary) == ("ok", "fine")
    bad = gpu_check.run(Step("bad", command("raise SystemExit('no')"), 60), 60)
    assert (bad.status, bad.summary) == ("failed", "no")
    assert gpu_check.run(Step("tool", (), 60), 60).status == "not run"
    assert gpu_check.run(Step("late", command(""), 60), 3).summary == "no time left"


def test_a_step_and_all_it_started_end_at_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "LOGS", tmp_path)
    code = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
child.wait()
"""
    slow = gpu_check.run(Step("slow", command(code), 2), 2)
    assert slow.status == "timed out" and slow.seconds < 30
    state = Path(f"/proc/{slow.summary}/stat")
    for _ in range(100):
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] in "ZX":
            return
        time.sleep(0.1)
    pytest.fail("the child lives on")


@pytest.mark.parametrize(
    ("code", "text", "status", "summary"),
    [
        (0, "....\n12 passed, 3 skipped in 4.0s\n", "ok", "12 passed, 3 skipped"),
        (1, "1 failed, 12 passed in 4.0s\n", "failed", "1 failed, 12 passed"),
        (0, "12 skipped, 5 deselected in 1.0s\n", "failed", "nothing passed: 12 skipped"),
        (5, "no tests ran in 1.0s\n", "failed", "no tests ran in 1.0s"),
        (None, "....", "timed out", "...."),
        (
            None,
            "..\n========= Invalid __global__ read of size 4 bytes\n..",
            "failed",
            "its time was up; 1 reports, first: Invalid __global__ read of size 4 bytes",
        ),
        (
            9,
            "12 passed in 4.0s\n========= ERROR SUMMARY: 2 errors\n",
            "failed",
            "12 passed; ERROR SUMMARY: 2 errors",
        ),
        (1, "Device not supported\n", "not run", "compute-sanitizer does not support this machine"),
    ],
)
def test_what_a_test_run_amounts_to(code: int | None, text: str, status: str, summary: str) -> None:
    assert gpu_check.judge(Step("tests", ("x",), 1, tests=True), code, text) == (status, summary)


def test_the_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failed step stops no other, and everything is in the file, the table and the status."""
    results = tmp_path / "results" / "gpu.json"
    figures = [
        common.judged(common.Figure("x.a", "a", 1.0, "us", ratio=2.0, bar="ratio >= 1")),
        common.judged(common.Figure("x.b", "b", 9.0, "us", bar="value <= 8")),
    ]
    steps = [
        Step("first", command("raise SystemExit(3)"), 60),
        Step("second", command("print('done')"), 60),
    ]
    monkeypatch.setattr(gpu_check, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(gpu_check, "all_steps", lambda *_: steps)
    monkeypatch.setattr(gpu_check, "results_path", lambda _: results)
    monkeypatch.setattr(common, "commit", lambda: "abc")
    arguments = ["--rehearsal", "--out", str(tmp_path / "out")]
    assert gpu_check.main(arguments) == 1
    common.save(figures, family="x", minutes=0.1, versions={}, on={"gpu": "none"}, path=results)
    steps[0] = Step("first", command("print('better')"), 60)
    assert gpu_check.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "1 of 2 goals met" in printed and "second" in printed.splitlines()[-1]
    saved = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert saved["machine"] == {"gpu": "none"} and len(saved["figures"]) == 2
    assert saved["checks"]["first"]["status"] == "ok" and saved["runs"]["x"]["commit"] == "abc"
    assert "better" in (tmp_path / "out" / "gpu-check.log").read_text()


def test_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "find_sanitizer", lambda: Path("/x/compute-sanitizer"))
    results = Path("r.json")

    def names(part: str | None, only: str = "") -> list[str]:
        return [step.name for step in gpu_check.all_steps(part, only, results, False)]

    everything = names(None)
    assert everything[0] == "build"
    for part in gpu_check.PARTS:
        steps = gpu_check.all_steps(part, "", results, False)
        assert steps[0].name == "build" and {step.name for step in steps} < set(everything)
    assert names("bench", "linear,binding") == ["build", "bench linear", "bench binding"]
    assert "memcheck" in names("sanitize") and "engine tests" in names("tests")


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_check.print_table([Outcome("build", "ok", 1.0, "x")])
    assert capsys.readouterr().out.split() == [
        *("step", "status", "s", "summary", "build", "ok", "1.0", "x")
    ]


def test_where_results_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "gpu_names", lambda: ["NVIDIA H100 80GB HBM3"])
    path = common.gpu_results("2026-11-21")
    assert path == ROOT / "bench" / "results" / "nvidia-h100-80gb-hbm3-2026-11-21.json"
    monkeypatch.setenv("COMMIT", "abc")
    monkeypatch.setattr(common, "ROOT", Path("/"))
    assert common.commit() == "abc"


def test_smoke_takes_two_cases_of_a_test() -> None:
    arguments = ["-m", "pytest", "--collect-only", "--smoke", "cpu", "tests/test_dense.py"]
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    cases = [line for line in done.stdout.splitlines() if "::" in line]
    by_test = {case.split("[")[0] for case in cases}
    assert len(by_test) > 5 and len(by_test) <= len(cases) <= 2 * len(by_test)
    assert all("simt" not in case and "cuda" not in case for case in cases)
