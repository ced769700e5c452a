# SPDX-License-Identifier: Apache-2.0
"""Run a step under its time limit and report how it ended."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tools.cuda_toolkit import ROOT
from tools.gpu_check.steps import Step

LOGS = ROOT / "build" / "gpu-check"


@dataclass(frozen=True)
class Outcome:
    """Result of a step: `ok`, `failed`, `timed out`, or `not run` with the reason as summary."""

    step: str
    status: str
    seconds: float
    summary: str


def run(step: Step, limit_s: float) -> Outcome:
    """Run a step and its child processes in a process group, which is killed at the limit."""
    if not step.command:
        return Outcome(step.name, "not run", 0.0, step.missing)
    if limit_s < min(10.0, step.limit_s):
        return Outcome(step.name, "not run", 0.0, "no time left")
    print(f"== {step.name}", flush=True)
    log = LOGS / f"{step.name.replace(' ', '-')}.log"
    begun = time.monotonic()
    code = _ended(step, limit_s, log)
    text = log.read_text(errors="replace")
    seconds = time.monotonic() - begun
    status, summary = judge(step, code, text)
    lines = text.splitlines()
    # The output of a benchmark is its result; of other steps, print the end of a failure.
    is_result = step.name.startswith(("bench", "numerics"))
    shown = lines if is_result else [] if status == "ok" else lines[-40:]
    print("\n".join(shown), flush=True)
    return Outcome(step.name, status, seconds, summary)


def _ended(step: Step, limit_s: float, log: Path) -> int | None:
    """Return the exit status; None if the time limit was reached."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PYTHONUNBUFFERED": "1",
        **step.env,
    }
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
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None


def judge(step: Step, code: int | None, text: str) -> tuple[str, str]:
    """Return status and summary of an ended step; code None means that it timed out."""
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    summary = last[:90] if step.name != "build" else last[:300]
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
    # compute-sanitizer prints what it finds immediately.
    reports = re.findall(
        r"^=+ (Invalid .*|Uninitialized .*|Error: (?:Race|.*hazard).*)$", text, re.M
    )
    if code is None:
        if reports:
            return "failed", f"its time was up; {len(reports)} reports, first: {reports[0][:60]}"
        return "timed out", summary
    return ("ok" if code == 0 else "failed"), summary
