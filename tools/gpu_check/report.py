# SPDX-License-Identifier: Apache-2.0
"""Markdown report of a run: goals beside predictions, and what limits each figure."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.common import write_whole
from tools.gpu_check import held_back, results
from tools.gpu_check.goals import GOALS, Figures, Verdict, verdict
from tools.gpu_check.predictions import Prediction, read_predictions
from tools.gpu_check.runner import Outcome

Predicted = Sequence[tuple[Prediction, float]]  # values for the GPU that produced the results


def write(path: Path) -> None:
    """Write the report of a results file beside it."""
    saved = results.read(path)
    text = "\n".join(lines(saved, read_predictions())) + "\n"
    write_whole(path.with_suffix(".md"), text)


def figures_of(saved: Mapping[str, Any]) -> Figures:
    """Return the figures by id."""
    return {row["id"]: row for row in saved.get("figures", [])}


def verdicts(saved: Mapping[str, Any]) -> list[Verdict]:
    """Return for every goal whether the results reach it."""
    figures, notes = figures_of(saved), saved.get("notes", {})
    gpu = str(saved.get("machine", {}).get("gpu", ""))
    return [verdict(goal, figures, notes, gpu) for goal in GOALS]


def lines(saved: Mapping[str, Any], predictions: Sequence[Prediction]) -> Iterator[str]:
    """Yield the lines of the report, section by section."""
    machine = saved.get("machine", {})
    yield f"# GPU check: {machine.get('gpu', 'unknown GPU')}"
    yield ""
    yield ", ".join(f"{name} {value}" for name, value in machine.items() if name != "gpu")
    figures = figures_of(saved)
    gpu = str(machine.get("gpu", ""))
    predicted = [(said, value) for said in predictions if (value := said.value_on(gpu)) is not None]
    yield from _goals(saved, figures, predicted)
    yield from _predicted(figures, predicted)
    yield from _facts(figures)
    yield from _ablations(figures)
    yield from _numerics(saved.get("numerics", {}))
    yield from _bars(saved)
    yield from _left_out(saved.get("notes", {}))
    yield from _steps(saved.get("checks", {}))


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    if not rows:
        return
    yield from ("", f"## {title}", "")
    yield "| " + " | ".join(heads) + " |"
    yield "| " + " | ".join("---" for _ in heads) + " |"
    for row in rows:
        yield "| " + " | ".join(str(cell).replace("|", "/") for cell in row) + " |"


def _goals(saved: Mapping[str, Any], figures: Figures, predicted: Predicted) -> Iterator[str]:
    rows = []
    for said in verdicts(saved):
        reached = {True: "reached", False: "NOT reached", None: "not decided"}[said.reached]
        value = "" if said.value is None else f"{said.value:.3g}"
        why = said.reason or held_back.of_figure(figures, said.decisive)
        goal = said.goal
        case = f"{said.decisive}{_beside(figures, said.decisive, predicted)}"
        rows.append((goal.id, goal.what, goal.wanted, value, reached, case, why))
    heads = ("goal", "what", "wanted", "measured", "", "decided by", "held back by")
    yield from _table("Goals", heads, rows)


def _beside(figures: Figures, id: str, predicted: Predicted) -> str:
    """Return the prediction for a figure beside its measured value; empty if there is none."""
    for said, value in predicted:
        if said.figure == id and figures[id].get(said.unit) is not None:
            return f" ({figures[id][said.unit]:.3g} {said.unit}, predicted {value:.3g})"
    return ""


def _predicted(figures: Figures, predicted: Predicted) -> Iterator[str]:
    rows = []
    for said, value in predicted:
        row = figures.get(said.figure)
        measured = None if row is None else row.get(said.unit)
        cells = ("", "") if measured is None else (f"{measured:.3g}", f"{measured / value:.2f}")
        rows.append((said.goal, said.figure, said.unit, f"{value:.3g}", *cells))
    heads = ("goal", "figure", "unit", "predicted", "measured", "measured / predicted")
    yield from _table("Predictions (tools/gpu_check/predictions.md)", heads, rows)


def _facts(figures: Figures) -> Iterator[str]:
    rows = [
        (row["what"], f"{row['value']:.4g}", row["unit"])
        for id, row in figures.items()
        if id.startswith("facts.")
    ]
    yield from _table("Facts of the machine", ("what", "value", "unit"), rows)


def _ablations(figures: Figures) -> Iterator[str]:
    cases: dict[str, dict[str, Mapping[str, Any]]] = {}
    for id, row in figures.items():
        if id.startswith("ablations.") and not id.startswith("ablations.verify"):
            case, _, name = id.removeprefix("ablations.").rpartition(".")
            cases.setdefault(case, {})[name] = row
    names = ("hot", "no_mma", "launch", "unsplit", *held_back.PHASES)
    rows = []
    for case, found in cases.items():
        shares = [f"{found[n]['ratio']:.2f}" if n in found else "" for n in names]
        whole = f"{found['whole']['us']:.1f}" if "whole" in found else ""
        rows.append((case, whole, *shares, held_back.of_figure(figures, f"attention.{case}")))
    heads = ("append_attention", "us", *names, "held back by")
    yield from _table("Ablations and phases: shares of the whole call", heads, rows)
    of_verify = [
        (row["what"], f"{row['us']:.1f}", f"{row['ratio']:.2f}", held_back.of_figure(figures, id))
        for id, row in figures.items()
        if id.startswith("ablations.verify")
    ]
    heads = ("verify", "us", "share of the whole call", "held back by")
    yield from _table("Ablations of verify", heads, of_verify)


def _numerics(found: Mapping[str, Any]) -> Iterator[str]:
    wrong = [(name, row) for name, row in found.items() if not row["passed"]]
    checks = sorted({row["check"] for row in found.values()})
    rows = []
    for check in checks:
        of_check = [row for row in found.values() if row["check"] == check]
        worst = max(row["worst"] for row in of_check)
        passed = sum(row["passed"] for row in of_check)
        equal, cases = (sum(row[key] for row in of_check) for key in ("equal", "cases"))
        rows.append((check, f"{passed} of {len(of_check)}", f"{equal} of {cases}", f"{worst:.1e}"))
    heads = ("check", "as they should be", "cases with equal bits", "largest difference")
    yield from _table("Numbers that hardware decides", heads, rows)
    named = [
        (name, f"{row['equal']} of {row['cases']}", f"{row['worst']:.1e}", row["remark"])
        for name, row in wrong
    ]
    yield from _table("Numbers that are wrong", ("check", "equal", "difference", "remark"), named)


def _bars(saved: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        (
            row["id"],
            row["bar"],
            f"{row['value']:.4g} {row['unit']}",
            _number(row["ratio"]),
            _met(row),
        )
        for row in saved.get("figures", [])
        if row["bar"]
    ]
    yield from _table("Figures with a bar", ("figure", "bar", "value", "ratio", "met"), rows)


def _left_out(notes: Mapping[str, str]) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for id, note in notes.items():
        reasons.setdefault(note, []).append(id)
    rows = [
        (note, ids[0] if len(ids) == 1 else f"{ids[0]} and {len(ids) - 1} more")
        for note, ids in reasons.items()
    ]
    yield from _table("What was left out, and why", ("reason", "case"), rows)


def _steps(checks: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        (name, row["status"], row["seconds"], row["commit"], row["summary"])
        for name, row in checks.items()
    ]
    yield from _table("Steps", ("step", "status", "s", "commit", "summary"), rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _met(row: Mapping[str, Any]) -> str:
    return "yes" if row["met"] else "NO"


def print_goals(path: Path) -> None:
    """Print the verdict on every goal, and how many bars are met."""
    saved = results.read(path)
    print(f"\n{'goal':5} {'wanted':28} {'measured':>9}  ")
    for said in verdicts(saved):
        reached = {True: "reached", False: "NOT reached", None: "not decided"}[said.reached]
        value = "" if said.value is None else f"{said.value:.3g}"
        print(
            f"{said.goal.id:5} {said.goal.wanted:28} {value:>9}  {reached} {said.reason}".rstrip()
        )
    bars = [row for row in saved.get("figures", []) if row["bar"]]
    print(f"{sum(bool(row['met']) for row in bars)} of {len(bars)} bars met; see {path.stem}.md")


def print_table(outcomes: Sequence[Outcome]) -> None:
    """Print one line per step."""
    print(f"\n{'step':24} {'status':10} {'s':>6}  summary")
    for outcome in outcomes:
        print(f"{outcome.step:24} {outcome.status:10} {outcome.seconds:6.1f}  {outcome.summary}")
