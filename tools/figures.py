# SPDX-License-Identifier: Apache-2.0
"""Keep measured figures in the documents equal to bench/results.

`python -m tools.figures --check` compares (part of `make lint`), `--write` updates the documents:

* A comment behind a figure says where it comes from: `1.93<!--= zen4.ratio("ngram.b", 2) -->`.
* A table has its Jinja template above it: `<!-- figures TEMPLATE -->`, table, `<!-- /figures -->`.
* In Python, a comment `# figures: TEMPLATE` stands above the line with the string.
* `<!-- quoted -->` to `<!-- /quoted -->` holds figures of others; a row with one links its source.

Templates know the results files as `zen4`, `zen5` and `xeon` (`Results` has the functions), and
bench/results/notes.json as `notes`: figures that were measured once, by hand or on another machine.
No other figure may stand outside code blocks; `ALLOWED` has the exceptions.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from math import floor, log10
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, TemplateError

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
FILES = {
    "zen4": "amd-epyc-family-25.json",
    "zen5": "amd-epyc-family-26.json",
    "xeon": "intel-xeon-processor-family-6.json",
}
PYTHON = "python/specops/cli/models.py"

INLINE = re.compile(r"(?P<shown>[-+]?\d[\d,]*(?:\.\d+)?)(?P<mark><!--=(?P<template>.*?)-->)", re.S)
BLOCK = re.compile(
    r"(?P<mark><!-- figures\n(?P<template>.*?)\n-->)(?P<shown>.*?)(?P<end><!-- /figures -->)",
    re.S,
)
CODE = re.compile(
    r'(?P<mark># figures: (?P<template>.*(?:\n# .*)*)\n.*?")(?P<shown>[^"\n]*)(?P<end>")'
)
FENCED = re.compile(r"^```.*?^```", re.S | re.M)
QUOTED = re.compile(r"<!-- quoted -->.*?<!-- /quoted -->", re.S)

NUMBER = r"\d[\d,]*(?:\.\d+)?"
UNIT = (
    r"x\b|\s?%|[\s-]times\s(?:as|faster|slower|the)\b|\s+of\s+(?:the\s+)?\d[\d,]*\s+"
    r"(?:\w+\s+)?(?:texts|outputs|tokens|drafts|prompts)|"
    r"\s+(?:tokens?(?:/s|\s+per\s+(?:second|step))|[KMG]B/s|GFLOP/s|[num]?s|seconds|minutes)\b"
)
FIGURE = re.compile(  # also a cell with decimals, and the lower end of a range with a source
    rf"(?<![\w.,]){NUMBER}(?:(?:\s+to\s+{NUMBER})?(?:{UNIT})|\s+(?:to|and)\s+(?=#))|"
    rf"\| {NUMBER}(?<=\.\d)\d* (?=\|)"
)
SOURCE = re.compile(r"\]\(|\[[A-Z]\d+\]")

# Figures that are no measurements: page, pattern, reason.
ALLOWED: tuple[tuple[str, str, str], ...] = (
    ("docs/commands.md", r"^(5|10|50) ms$", "times that a test server or the command fixes"),
    ("docs/cuda.md", r" s$", "time limits of commands"),
    ("docs/design.md", r"^(20|50) us|^(0\.1|5|50) ms|^3 %$", "constants of the code"),
    ("docs/design.md", r"^3\.4 times", "follows from two widths"),
    ("docs/disaggregated.md", r" s$", "time limits"),
    ("docs/drafters.md", r"^2 %$|^8 tokens", "constants of the code"),
    ("docs/engine.md", r"^85 %$|^2 ms$", "constants of the code"),
    ("docs/vllm.md", r"^128 tokens", "a setting"),
    ("docs/server.md", r" (ms|s|seconds)$|^(4|32|200) times", "time limits and constants"),
)


class Results:
    """The figures of one results file, for templates."""

    def __init__(self, path: Path) -> None:
        self._path = path
        results = json.loads(path.read_text())
        self._runs = results["runs"]
        self._figures = {row["id"]: row for row in results["figures"]}

    def value(self, ids: str, digits: int | None = None, of: Any = None, scale: float = 1) -> Any:
        """Return the value of a figure.

        `ids` may be a pattern with `*`; `of` (`min`, `max`, `sum` or `mean`) then makes one number
        of all that it matches. Without `digits`, return the number and not its text.
        """
        return self._shown(ids, "value", digits, of, scale)

    def ratio(self, ids: str, digits: int | None = None, of: Any = None, scale: float = 1) -> Any:
        """Return the ratio of a figure."""
        return self._shown(ids, "ratio", digits, of, scale)

    def peer(self, ids: str, digits: int | None = None, of: Any = None, scale: float = 1) -> Any:
        """Return the peer's value of a figure."""
        return self._shown(ids, "peer_value", digits, of, scale)

    def read(self, ids: str, digits: int | None = None, of: Any = None, scale: float = 1) -> Any:
        """Return the read bandwidth beside a figure, in GB/s."""
        return self._shown(ids, "read_gb_s", digits, of, scale)

    def said(self, ids: str, pattern: str, digits: int | None = None, of: Any = None) -> Any:
        """Return the number in a figure's description that a regular expression's group finds."""
        numbers = []
        for row in self._rows(ids):
            found = re.search(pattern, row["what"])
            if found is None:
                raise KeyError(f"{row['id']} does not say {pattern}")
            numbers.append(float(found[1].replace(",", "")))
        return _one(ids, numbers, digits, of, 1)

    def has(self, one: str) -> bool:
        """Return whether there is a figure with this id."""
        return one in self._figures

    def version(self, family: str, package: str) -> str:
        """Return the version of a package in the run of a family."""
        return str(self._runs[family]["versions"][package])

    def _shown(self, ids: str, name: str, digits: int | None, of: Any, scale: float) -> Any:
        numbers = [row[name] for row in self._rows(ids)]
        if None in numbers:
            raise KeyError(f"{ids} has no {name}")
        return _one(ids, numbers, digits, of, scale)

    def _rows(self, ids: str) -> list[dict[str, Any]]:
        if "*" not in ids and ids in self._figures:
            return [self._figures[ids]]
        rows = [row for name, row in self._figures.items() if fnmatchcase(name, ids)]
        if not rows:
            raise KeyError(f"{self._path.name} has no figure {ids}")
        return rows


class Notes:
    """Figures that were measured once, for templates."""

    def __init__(self, notes: dict[str, dict[str, Any]]) -> None:
        self._notes = notes
        self.used: set[str] = set()

    def __call__(self, name: str, key: str) -> Any:
        """Return a value of a note."""
        self.used.add(name)
        return self._notes[name]["values"][key]

    def rows(self, name: str) -> list[list[str]]:
        """Return the rows of a note's table; the first is the header."""
        self.used.add(name)
        return list(self._notes[name]["rows"])

    def table(self, name: str) -> str:
        """Return the table of a note."""
        head, *rows = self.rows(name)
        return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])

    def unused(self) -> list[str]:
        """Return the notes that no document shows."""
        return sorted(set(self._notes) - self.used)


def number(value: float, digits: int = 0) -> str:
    """Return the text of a number."""
    return f"{value:,.{digits}f}"


def short(value: float, significant: int = 3) -> str:
    """Return the text of a number with so many significant digits."""
    return number(value, max(0, significant - 1 - floor(log10(value))))


def _one(ids: str, numbers: Sequence[float], digits: int | None, of: Any, scale: float) -> Any:
    if of is None and len(numbers) != 1:
        raise KeyError(f"{ids} matches {len(numbers)} figures: name min, max, sum or mean")
    one = scale * (numbers[0] if of is None else of(numbers))
    return one if digits is None else number(one, digits)


def mean(numbers: Sequence[float]) -> float:
    """Return the arithmetic mean."""
    return sum(numbers) / len(numbers)


class Pages:
    """The documents with figures, and what the results say about them."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self.notes = Notes(json.loads((RESULTS / "notes.json").read_text())["notes"])
        self._environment = Environment(
            undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False
        )
        self._environment.globals = {
            **{name: Results(RESULTS / file) for name, file in FILES.items()},
            **{one.__name__: one for one in (min, max, sum, mean, number, short, zip)},
            "notes": self.notes,
        }

    def paths(self) -> list[Path]:
        """Return the documents that may hold figures."""
        pages = [self._root / "README.md", self._root / "CONTRIBUTING.md", self._root / PYTHON]
        return [*pages, *sorted((self._root / "docs").glob("*.md"))]

    def updated(self, path: Path) -> str:
        """Return the text of a document with every figure as the results have it."""
        name = path.relative_to(self._root)

        def shown(match: re.Match[str]) -> str:
            text = self._rendered(match, name)
            groups = match.groupdict()
            if match.re is INLINE:
                return text + groups["mark"]
            border = "\n\n" if match.re is BLOCK else ""
            return groups["mark"] + border + text + border + groups["end"]

        text = path.read_text(encoding="utf-8")
        for pattern in (CODE,) if path.suffix == ".py" else (BLOCK, INLINE):
            text = pattern.sub(shown, text)
        return text

    def _rendered(self, match: re.Match[str], name: Path) -> str:
        template = match["template"]
        if match.re is INLINE:
            template = "{{" + " ".join(template.split()) + "}}"
        elif match.re is CODE:
            template = template.replace("\n#", "")
        try:
            text = self._environment.from_string(template).render().strip()
        except (TemplateError, KeyError, TypeError) as error:
            line = match.string.count("\n", 0, match.start()) + 1
            raise SystemExit(f"{name}:{line}: {error}") from error
        return re.sub(r"\|  +(?=\|)", "| ", text)

    def unowned(self, path: Path) -> Iterator[str]:
        """Yield the figures of a document that no results file, note or source owns."""
        name = str(path.relative_to(self._root))
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            text = _blanked(CODE, text)
        else:
            text = _blanked(BLOCK, _blanked(QUOTED, _blanked(FENCED, text), _unsourced))
            text = _blanked(INLINE, text, lambda _: "#")
        for found in FIGURE.finditer(text):
            figure = " ".join(found[0].strip("| ").split())
            if not any(page == name and re.search(one, figure) for page, one, _ in ALLOWED):
                yield f"{name}:{text.count(chr(10), 0, found.start()) + 1}: {figure}"


def _unsourced(block: str) -> str:
    """Return the lines of quoted figures that name no source; the others are blank."""
    return "\n".join("" if SOURCE.search(line) else line for line in block.split("\n"))


def _blanked(pattern: re.Pattern[str], text: str, kept: Callable[[str], str] = lambda _: "") -> str:
    """Return the text without what the pattern finds, with as many lines as before."""

    def blank(match: re.Match[str]) -> str:
        left = kept(match[0])
        return left + "\n" * (match[0].count("\n") - left.count("\n"))

    return pattern.sub(blank, text)


def problems(pages: Pages) -> list[str]:
    """Return what is wrong with the figures of the documents, a line each."""
    found = []
    for path in pages.paths():
        name = path.relative_to(ROOT)
        old, new = path.read_text(encoding="utf-8").splitlines(), pages.updated(path).splitlines()
        found += [
            f"{name}:{at}: {before.strip()}\n    results say: {after.strip()}"
            for at, (before, after) in enumerate(zip(old, new, strict=False), 1)
            if before != after
        ]
        if len(old) != len(new):
            found.append(f"{name}: a table has {len(old)} lines instead of {len(new)}")
        found += [f"{line} has no source in bench/results" for line in pages.unowned(path)]
    found += [f"notes.json: no document shows {name}" for name in pages.notes.unused()]
    return found


def main() -> None:
    """Check or write the figures of the documents."""
    parser = argparse.ArgumentParser(prog="python -m tools.figures", description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="fail if a figure is not the results'")
    action.add_argument("--write", action="store_true", help="update the documents")
    pages = Pages()
    if parser.parse_args().write:
        for path in pages.paths():
            path.write_text(pages.updated(path), encoding="utf-8")
    if found := problems(pages):
        sys.exit("\n".join([*found, "`python -m tools.figures --write` updates marked figures"]))


if __name__ == "__main__":
    main()
