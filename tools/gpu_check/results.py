# SPDX-License-Identifier: Apache-2.0
"""The file of a run's results: what each program adds to it, and who reads it.

One JSON object: `machine`, `runs` and `figures` by the benches (bench/common.py), `notes` of what
is not there and why, `numerics` and `checks` (how steps ended) from here.
"""

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench.common import commit, gpu_results, write_whole
from tools.gpu_check import runner
from tools.gpu_check.runner import Outcome


def results_path(rehearsal: bool) -> Path:
    """Where the run's figures and outcomes go."""
    if rehearsal:
        return runner.LOGS / "rehearsal.json"
    return gpu_results(datetime.now(timezone.utc).strftime("%Y-%m-%d"))


def read(path: Path) -> dict[str, Any]:
    """All that is in the file; nothing, if there is none."""
    saved: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return saved


def add(path: Path, section: str, key: str, value: dict[str, Any]) -> None:
    """Puts one entry into a section, stamped with commit and time."""
    saved = read(path)
    stamp = {
        "commit": commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }
    saved.setdefault(section, {})[key] = {**value, **stamp}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(saved, indent=1) + "\n")


def keep(outcome: Outcome, path: Path) -> None:
    """Adds how a step ended."""
    ended = {
        "status": outcome.status,
        "seconds": round(outcome.seconds, 1),
        "summary": outcome.summary,
    }
    add(path, "checks", outcome.step, ended)
