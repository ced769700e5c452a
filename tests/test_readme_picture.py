# SPDX-License-Identifier: Apache-2.0
"""The README's picture shows committed figures."""

import json
import re
from pathlib import Path

import pytest

from bench.plot_readme import PICTURE, SYSTEMS, complete_results, drawn, panels


def test_the_committed_picture_is_that_of_committed_results() -> None:
    committed = PICTURE.read_text()
    assert committed in [drawn(path) for path in complete_results()], (
        "python -m bench.plot_readme draws it anew"
    )


def test_the_readme_states_the_texts_that_the_picture_shows() -> None:
    readme = (PICTURE.parent.parent / "README.md").read_text()
    shown = re.findall(
        r"^\| (?:\*\*)?([\w.]+)(?:\*\*)? \| (\d+) \| (\d+) \|$", readme, re.MULTILINE
    )
    stated = {name: int(edits) + int(completions) for name, edits, completions in shown}
    assert list(stated) == list(SYSTEMS.values())
    committed = PICTURE.read_text()
    (values,) = [panels(path)[0].values for path in complete_results() if drawn(path) == committed]
    assert stated == values


def test_a_file_without_a_figure_makes_no_picture(tmp_path: Path) -> None:
    results = json.loads(complete_results()[0].read_text())
    results["figures"] = [f for f in results["figures"] if f["id"] != "lossless.edits.openvino"]
    partial = tmp_path / "partial.json"
    partial.write_text(json.dumps(results))
    with pytest.raises(KeyError, match=r"lossless\.edits\.openvino"):
        drawn(partial)
