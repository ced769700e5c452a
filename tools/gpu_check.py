# SPDX-License-Identifier: Apache-2.0
"""`make gpu-check`: everything that needs an NVIDIA GPU, on any machine with torch and nvcc.

Builds for the GPU that is there, runs the op and engine tests on it, a smoke set under
compute-sanitizer, and the benches, each family in a process of its own. Asks for no network and no
git (COMMIT says what is measured). Every step is bounded in time and a failed one stops no other;
a table of all of them comes last. What is measured and what passed goes to
bench/results/<gpu>-<date>.json, which a later part of the same day adds to.

`--part` runs one part (each begins with the build, which is quick when nothing changed); `--only`
restricts the benches to some families; `--rehearsal` runs the same on the CPU with small sizes, to
find what is wrong with this program rather than with the kernels.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from bench.common import commit, gpu_results
from tools.cuda_toolkit import ROOT, find_nvcc, gpu_names, toolkit_root

LOGS = ROOT / "build" / "gpu-check"
PARTS = ("tests", "sanitize", "bench")
REQUIRED = "torch numpy pybind11 cmake ninja pytest hypothesis safetensors tokenizers jinja2"
OP_TESTS = tuple(
    f"tests/test_{name}.py"
    for name in ("attention", "batching", "dense", "ngram", "sampling", "torch_ops")
)
TOOLS = ("memcheck", "racecheck", "initcheck")
# Seconds that each family may take; FlashInfer compiles itself at first use.
BENCH_LIMITS = {
    "facts": 60,
    "ablations": 90,
    "attention": 120,
    "sampling": 90,
    "recorded": 60,
    "linear": 150,
    "cascade": 120,
    "binding": 60,
    "elementwise": 60,
    "sweeps": 150,
    "attention_peers": 300,
    "sampling_peers": 240,
    "exactness": 300,
    "bundled": 150,
    "qwen8": 150,
}
SANITIZER_ERROR = 9


@dataclass(frozen=True)
class Step:
    """One command. `limit_s` bounds it; `tests` says that its last line counts passed tests."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    env: dict[str, str] = field(default_factory=dict)
    tests: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a step ended: `ok`, `failed`, `timed out`, or `not run` with the reason as summary."""

    step: str
    status: str
    seconds: float
    summary: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts; the exit status says whether all that ran passed."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check")
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--only", default="", help="bench families, comma-separated")
    parser.add_argument("--budget", type=float, default=0, help="seconds for all of it; 0: no end")
    parser.add_argument("--out", default="", help="folder that gets a copy of results and logs")
    parser.add_argument("--rehearsal", action="store_true")
    asked = parser.parse_args(arguments)
    begun = time.monotonic()
    if problem := requirements_problem(asked.rehearsal):
        print(f"gpu-check cannot run here: {problem}")
        return 1
    results = results_path(asked.rehearsal)
    steps = all_steps(asked.part, asked.only, results, asked.rehearsal)
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    outcomes: list[Outcome] = []
    print(f"{commit()} on {' '.join(gpu_names()) or 'no GPU'}", flush=True)
    for step in steps:
        left = asked.budget - (time.monotonic() - begun) if asked.budget else step.limit_s
        outcomes.append(run(step, min(step.limit_s, left)))
        keep(outcomes[-1], step, results)
        if step.name == "build" and outcomes[-1].status != "ok":
            break
    print_goals(results)
    print_table(outcomes)
    if asked.out:
        copy_out(Path(asked.out), results)
    return int(any(outcome.status in ("failed", "timed out") for outcome in outcomes))


def results_path(rehearsal: bool) -> Path:
    """Where the run's figures and outcomes go."""
    if rehearsal:
        return LOGS / "rehearsal.json"
    return gpu_results(datetime.now(timezone.utc).strftime("%Y-%m-%d"))


def requirements_problem(rehearsal: bool) -> str:
    """What this machine lacks, in words; empty if nothing."""
    code = f"""
import importlib.util
names = {REQUIRED.split()!r}
missing = [name for name in names if importlib.util.find_spec(name) is None]
if missing:
    raise SystemExit("this Python lacks " + ", ".join(missing))
import torch
if not {rehearsal} and not torch.cuda.is_available():
    raise SystemExit(f"torch {{torch.__version__}} sees no CUDA device")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or ["python failed"])[-1]
    if not rehearsal and find_nvcc() is None:
        return "nvcc is not in CUDA_HOME, on the PATH, or among the installed wheels"
    return ""


def all_steps(part: str | None, only: str, results: Path, rehearsal: bool) -> list[Step]:
    """The steps of a part, or of all."""
    python = sys.executable
    steps = []
    if not rehearsal:
        # The host compiler is whatever is there, and may warn of what ours does not.
        env = {"SPECOPS_CUDA": "ON", "SPECOPS_CMAKE_ARGS": "-DSPECOPS_WERROR=OFF"}
        command = (python, "setup.py", "build_ext", "--inplace")
        steps.append(Step("build", command, 420, env))
    device = "cpu" if rehearsal else "cuda"
    if part in (None, "tests"):
        smoke = ("--smoke", device) if rehearsal else ("-m", "not prove", "-k", device)
        pytest = (python, "-m", "pytest", *_pytest_plugins(), *smoke)
        steps.append(Step("op tests", (*pytest, *OP_TESTS), 300, tests=True))
        rest = [f"--ignore={path}" for path in OP_TESTS]
        if not rehearsal:
            steps.append(Step("engine tests", (*pytest, *rest, "tests"), 240, tests=True))
    if part in (None, "sanitize"):
        for tool in TOOLS:
            steps.append(_sanitizer_step(tool, device))
    if part in (None, "bench"):
        for family in [name for name in only.split(",") if name] or list(BENCH_LIMITS):
            where = "rehearsal" if rehearsal else "cuda"
            command = (python, "-m", "bench", "--device", where, "--only", family)
            limit = BENCH_LIMITS.get(family, 120)
            command = (*command, "--results", str(results))
            steps.append(Step(f"bench {family}", command, limit, {"SPECOPS_CUDA": "ON"}))
    return steps


def _pytest_plugins() -> tuple[str, ...]:
    """Test processes side by side, and a limit for each test, where the plugins are installed."""
    code = "import importlib.util as u; print(*(bool(u.find_spec(n)) for n in {names}))"
    names = ("xdist", "pytest_timeout")
    command = [sys.executable, "-c", code.format(names=names)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    cores = len(os.sched_getaffinity(0))
    workers = ("-n", str(min(6, cores))) if told[0] == "True" else ()
    limit = ("--timeout", "120", "--timeout-method", "thread") if told[1] == "True" else ()
    return workers + limit


def _sanitizer_step(tool: str, device: str) -> Step:
    """The smoke set: of every op test the first and the last case on the device."""
    sanitizer = find_sanitizer()
    if sanitizer is None:
        return Step(tool, (), 0)
    command = (
        *(str(sanitizer), "--tool", tool, "--kernel-name", "kns=specops", "--print-limit", "20"),
        *("--error-exitcode", str(SANITIZER_ERROR), "--require-cuda-init", "no"),
        *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--smoke", device, *OP_TESTS),
    )
    # A tensor from a pool has neighbours that hide where it ends, and contents from before.
    return Step(tool, command, 170, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, tests=True)


def find_sanitizer() -> Path | None:
    """On the PATH, beside nvcc, or among installed wheels."""
    nvcc = find_nvcc()
    folders = [Path(found).parent] if (found := shutil.which("compute-sanitizer")) else []
    if nvcc is not None:
        root = toolkit_root(nvcc)
        folders += [nvcc.parent, root / "bin", root / "compute-sanitizer"]
    folders += [Path(site) / "nvidia" / "cu13" / "bin" for site in sys.path]
    return next((f / "compute-sanitizer" for f in folders if _runs(f / "compute-sanitizer")), None)


def _runs(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def run(step: Step, limit_s: float) -> Outcome:
    """Runs a step and all it starts in a process group of its own, which ends at the limit."""
    if not step.command:
        return Outcome(step.name, "not run", 0.0, "compute-sanitizer is not installed")
    if limit_s < min(10.0, step.limit_s):
        return Outcome(step.name, "not run", 0.0, "no time left")
    print(f"== {step.name}", flush=True)
    log = LOGS / f"{step.name.replace(' ', '-')}.log"
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PYTHONUNBUFFERED": "1",
        **step.env,
    }
    begun = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            step.command,
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = log.read_text(errors="replace")
    seconds = time.monotonic() - begun
    status, summary = judge(step, code, text)
    lines = text.splitlines()
    # What a bench prints is its result; of the rest, the end of what went wrong.
    shown = lines if step.name.startswith("bench") else [] if status == "ok" else lines[-40:]
    print("\n".join(shown), flush=True)
    return Outcome(step.name, status, seconds, summary)


def judge(step: Step, code: int | None, text: str) -> tuple[str, str]:
    """Status and summary of an ended step; code None means that its time was up."""
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    summary = last[:90]
    if step.tests:
        ended = re.findall(r"^.*\b\d+ \w+.* in [\d.]+s.*$", text, re.MULTILINE)
        counts = re.findall(r"\d+ (?:passed|failed|errors?|skipped)", ended[-1] if ended else "")
        summary = ", ".join(counts) or summary
        if found := re.findall(r"ERROR SUMMARY: [^\n]+|RACECHECK SUMMARY: [^\n]+", text):
            summary = f"{summary}; {found[-1]}"
        if "Device not supported" in text:
            return "not run", "compute-sanitizer does not support this machine"
        if code == 0 and not re.search(r"[1-9]\d* passed", summary):
            return "failed", f"nothing passed: {summary}"
    elif found := re.findall(r"^\d+ figures in .*", text, re.MULTILINE):
        summary = found[-1]
    # compute-sanitizer says at once what it finds.
    reports = re.findall(
        r"^=+ (Invalid .*|Uninitialized .*|Error: (?:Race|.*hazard).*)$", text, re.M
    )
    if code is None:
        if reports:
            return "failed", f"its time was up; {len(reports)} reports, first: {reports[0][:60]}"
        return "timed out", summary
    return ("ok" if code == 0 else "failed"), summary


def keep(outcome: Outcome, step: Step, results: Path) -> None:
    """Writes an outcome into the results, beside the figures."""
    saved = json.loads(results.read_text()) if results.exists() else {}
    checks = saved.setdefault("checks", {})
    checks[step.name] = {
        "status": outcome.status,
        "seconds": round(outcome.seconds, 1),
        "summary": outcome.summary,
        "commit": commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(saved, indent=1) + "\n")


def print_goals(results: Path) -> None:
    """The figures that have a bar: what was asked for, and what was measured."""
    saved = json.loads(results.read_text()) if results.exists() else {}
    goals = [row for row in saved.get("figures", []) if row["bar"]]
    if not goals:
        return
    print(f"\n{'goal':44} {'bar':16} {'value':>10} {'unit':6} {'ratio':>7}  met")
    for row in goals:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
        met = "yes" if row["met"] else "NO"
        print(
            f"{row['id']:44} {row['bar']:16} {row['value']:10.4g} {row['unit']:6} {ratio:>7}  {met}"
        )
    print(f"{sum(bool(row['met']) for row in goals)} of {len(goals)} goals met")


def print_table(outcomes: Sequence[Outcome]) -> None:
    """A line per step."""
    print(f"\n{'step':24} {'status':10} {'s':>6}  summary")
    for outcome in outcomes:
        print(f"{outcome.step:24} {outcome.status:10} {outcome.seconds:6.1f}  {outcome.summary}")


def copy_out(folder: Path, results: Path) -> None:
    """The results, and all logs in one file."""
    folder.mkdir(parents=True, exist_ok=True)
    if results.exists():
        shutil.copy(results, folder)
    with (folder / "gpu-check.log").open("w") as file:
        for log in sorted(LOGS.glob("*.log"), key=lambda path: path.stat().st_mtime):
            file.write(f"===== {log.stem}\n{log.read_text(errors='replace')}\n")


if __name__ == "__main__":
    sys.exit(main())
