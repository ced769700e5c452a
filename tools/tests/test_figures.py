# SPDX-License-Identifier: Apache-2.0
"""The documents state the figures of bench/results, and no others."""

import json
from pathlib import Path

import pytest

from tools import figures
from tools.figures import Pages, Results, problems

FILE = "amd-epyc-family-26.json"
MARKED = 'of 100<!--= zen5.value("gemma_greedy.llama_cpp.lookup.differ", 0) --> texts'
TABLE = """<!-- figures
| batch | ms |
| --- | --- |
{% for batch in [1, 8] %}
| {{ batch }} | {{ short(zen5.value("gemma.step.b" ~ batch ~ ".rows1")) }} |
{% endfor %}
-->

| batch | ms |

<!-- /figures -->
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    return tmp_path / "docs" / "a.md"


def values() -> dict[str, float]:
    rows = json.loads((figures.RESULTS / FILE).read_text())["figures"]
    return {row["id"]: row["value"] for row in rows}


def test_documents_state_the_figures_of_the_results() -> None:
    assert problems(Pages()) == []


def test_marked_figures_and_tables_follow_the_results(page: Path) -> None:
    page.write_text(f"{MARKED}\n\n{TABLE}")
    changed = f"{values()['gemma_greedy.llama_cpp.lookup.differ']:.0f}"
    lines = Pages(page.parent.parent).updated(page).splitlines()
    assert lines[0] == MARKED.replace("100", changed, 1)
    times = [figures.short(values()[f"gemma.step.b{batch}.rows1"]) for batch in (1, 8)]
    assert lines[-4:-2] == [f"| 1 | {times[0]} |", f"| 8 | {times[1]} |"]


def test_a_new_table_leaves_the_rest_of_the_page_alone(page: Path) -> None:
    empty = "<!-- figures\n| {{ 1 + 1 }} |\n-->\n<!-- /figures -->\n"
    page.write_text(f"{empty}\nA sentence.\n\n{empty}")
    table = "<!-- figures\n| {{ 1 + 1 }} |\n-->\n\n| 2 |\n\n<!-- /figures -->\n"
    assert Pages(page.parent.parent).updated(page) == f"{table}\nA sentence.\n\n{table}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It is 1.9x as fast.", "1.9x"),
        ("It is 1.8 to 1.9 times\nas fast.", "1.8 to 1.9 times as"),
        ("It makes 131\n  tokens per second.", "131 tokens per second"),
        ("It takes 0.3 ms.", "0.3 ms"),
        ("It reads 45 GB/s.", "45 GB/s"),
        ("It changes 4 of 40 greedy texts.", "4 of 40 greedy texts"),
        ("It costs 3 %.", "3 %"),
        ("| batch | 7.27 | b |", "7.27"),
        (MARKED.replace("100", "1.8 to 100"), "1.8 to"),
        ("<!-- quoted -->\n| A | 2x |\n<!-- /quoted -->", "2x"),
        (MARKED, None),
        (TABLE, None),
        ("```\nprint(1.9x)\n```", None),
        ("<!-- quoted -->\n| A | 2x | [it](https://it) |\n<!-- /quoted -->", None),
        ("at most 4 drafts, 64 KiB, Python 3.10, k = 3", None),
    ],
)
def test_figures_without_a_source_are_found(page: Path, text: str, found: str | None) -> None:
    page.write_text(text)
    lines = list(Pages(page.parent.parent).unowned(page))
    assert [line.partition(": ")[2] for line in lines] == ([found] if found else [])


def test_an_unknown_figure_names_page_and_line(page: Path) -> None:
    page.write_text('\n\n1<!--= zen5.value("nothing", 0) -->')
    with pytest.raises(SystemExit, match=rf"docs/a\.md:3: .*{FILE} has no figure nothing"):
        Pages(page.parent.parent).updated(page)


def test_a_pattern_of_several_figures_needs_an_aggregate() -> None:
    results = Results(figures.RESULTS / FILE)
    shown = [value for name, value in values().items() if name.startswith("gemma.step.")]
    assert results.value("gemma.step.*", of=max) == max(shown)
    with pytest.raises(KeyError, match=r"matches 4 figures: name min, max, sum or mean"):
        results.value("gemma.step.*")


def test_every_note_names_its_machine() -> None:
    notes = json.loads((figures.RESULTS / "notes.json").read_text())["notes"]
    for name, note in notes.items():
        assert note["machine"], name
        assert set(note) - {"rows", "values"} <= {"what", "machine", "commit", "date", "command"}
        assert {"rows", "values"} & set(note), name
