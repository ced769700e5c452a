# SPDX-License-Identifier: Apache-2.0
"""Results file of a run, and the functions that extend and read it.

It is one JSON object. The benchmarks (bench/common.py) write `machine`, `runs` and `figures`, and
`notes` on what is missing and why; this module writes `numerics` and `checks` (how steps ended).
"""

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench.common import commit, gpu_results, write_whole
from tools.gpu_check import runner
from tools.gpu_check.runner import Outcome


def results_path(rehearsal: bool) -> Path:
    """Return the path of the run's figures and outcomes."""
    if rehearsal:
        return runner.LOGS / "rehearsal.json"
    return gpu_results(datetime.now(timezone.utc).strftime("%Y-%m-%d"))


def read(path: Path) -> dict[str, Any]:
    """Return the content of the file; empty if the file does not exist."""
    saved: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return saved


def add(path: Path, section: str, key: str, value: dict[str, Any]) -> None:
    """Add one entry to a section, stamped with commit and time."""
    saved = read(path)
    stamp = {
        "commit": commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }
    saved.setdefault(section, {})[key] = {**value, **stamp}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(saved, indent=1) + "\n")


def keep(outcome: Outcome, path: Path) -> None:
    """Record how a step ended."""
    ended = {
        "status": outcome.status,
        "seconds": round(outcome.seconds, 1),
        "summary": outcome.summary,
    }
    add(path, "checks", outcome.step, ended)
