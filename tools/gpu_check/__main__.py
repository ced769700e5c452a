# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.gpu_check`: run the steps and save what they find.

`--preset` runs one of three calls for half an hour on a GPU. `--part` runs some parts (each begins
with the build, which is quick when nothing changed); `--only` restricts the benchmarks to some
families; `--prebuilt` uses prebuilt modules; `--rehearsal` runs the same on the CPU with small
sizes, to find errors in this program rather than in the kernels.
"""

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.common import commit
from tools.cuda_toolkit import ROOT, find_nvcc, gpu_names
from tools.gpu_check import report, results, runner, steps
from tools.gpu_check.runner import Outcome

REQUIRED = "torch numpy pybind11 cmake ninja pytest hypothesis safetensors tokenizers jinja2"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; return 0 if everything that ran passed."""
    asked = _parsed(arguments)
    begun = time.monotonic()
    if problem := requirements_problem(asked.rehearsal, bool(asked.prebuilt)):
        print(f"gpu-check cannot run here: {problem}")
        return 1
    path = results.results_path(asked.rehearsal)
    plan = planned(asked, path)
    shutil.rmtree(runner.LOGS, ignore_errors=True)
    runner.LOGS.mkdir(parents=True)
    outcomes: list[Outcome] = []
    print(f"{commit()} on {' '.join(gpu_names()) or 'no GPU'}", flush=True)
    for step in steps.all_steps(plan):
        left = asked.budget - (time.monotonic() - begun) if asked.budget else step.limit_s
        outcomes.append(runner.run(step, min(step.limit_s, left)))
        results.keep(outcomes[-1], path)
        report.write(path)
        if asked.out:
            copy_out(Path(asked.out), path)
        if step.name == "build" and outcomes[-1].status != "ok":
            break
    report.print_goals(path)
    report.print_table(outcomes)
    return int(any(outcome.status in ("failed", "timed out") for outcome in outcomes))


def planned(asked: argparse.Namespace, path: Path) -> steps.Plan:
    """Return the plan of the arguments; its figures go to `path`."""
    prebuilt = Path(asked.prebuilt).resolve() if asked.prebuilt else None
    if asked.preset:
        out = Path(asked.out).resolve() if asked.out else ROOT / "build"
        return steps.PRESETS[asked.preset].plan(
            path, rehearsal=asked.rehearsal, prebuilt=prebuilt, build_to=out / "pre"
        )
    return steps.Plan(
        parts=tuple(asked.part),
        only=tuple(name for name in asked.only.split(",") if name),
        results=path,
        rehearsal=asked.rehearsal,
        prebuilt=prebuilt,
    )


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check", description=__doc__)
    parser.add_argument(
        "--preset",
        default="",
        choices=list(steps.PRESETS),
        help="; ".join(f"{name}: {preset.what}" for name, preset in steps.PRESETS.items()),
    )
    parser.add_argument("--part", default="", help=f"comma-separated: {', '.join(steps.PARTS)}")
    parser.add_argument("--only", default="", help="bench families, comma-separated")
    parser.add_argument("--budget", type=float, default=0, help="seconds for all of it; 0: no end")
    parser.add_argument("--out", default="", help="folder that gets a copy of results and logs")
    parser.add_argument("--prebuilt", default="", help="folder of tools.gpu_check.prebuilt")
    parser.add_argument("--rehearsal", action="store_true")
    asked = parser.parse_args(arguments)
    if asked.preset and (asked.part or asked.only):
        parser.error("--preset sets --part and --only itself: leave them out")
    if asked.preset and not asked.budget:
        asked.budget = steps.PRESETS[asked.preset].budget_s
    asked.part = [name for name in asked.part.split(",") if name]
    if unknown := set(asked.part) - set(steps.PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; one of {', '.join(steps.PARTS)}")
    return asked


def requirements_problem(rehearsal: bool, is_prebuilt: bool = False) -> str:
    """Return what this machine lacks, in words; empty if nothing."""
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
    if not rehearsal and not is_prebuilt and find_nvcc() is None:
        return "nvcc is not in CUDA_HOME, on the PATH, or among the installed wheels"
    return ""


def copy_out(folder: Path, path: Path) -> None:
    """Copy the results, the report, and all logs (joined into one file) to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in (path, path.with_suffix(".md")):
        if file.exists():
            shutil.copy(file, folder)
    with (folder / "gpu-check.log").open("w") as joined:
        for log in sorted(runner.LOGS.glob("*.log"), key=lambda log: log.stat().st_mtime):
            joined.write(f"===== {log.stem}\n{log.read_text(errors='replace')}\n")


if __name__ == "__main__":
    sys.exit(main())
