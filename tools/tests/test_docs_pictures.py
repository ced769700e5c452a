# SPDX-License-Identifier: Apache-2.0
"""The pictures in docs/ show the committed figures."""

import json
import re
from pathlib import Path

import pytest

from tools.plot_docs import CASCADE, COMPARISON, SYSTEMS, Picture, comparison, figures_of

pytestmark = pytest.mark.ci


@pytest.mark.parametrize("picture", [COMPARISON, CASCADE], ids=lambda one: one.name)
def test_a_committed_picture_is_that_of_committed_results(picture: Picture) -> None:
    committed = picture.path.read_text()
    assert committed in [picture.drawn(path) for path in picture.complete_results()], (
        "python -m tools.plot_docs draws it anew"
    )


def test_the_readme_states_the_texts_that_the_picture_shows() -> None:
    readme = (COMPARISON.path.parent.parent / "README.md").read_text()
    sentence = re.search(r"changes\s(none in .*?) \(\[docs", readme, re.DOTALL)
    assert sentence is not None
    shown = re.findall(r"(none|\d+) in ([\w.]+)", sentence[1])
    stated = {name: 0 if count == "none" else int(count) for count, name in shown}
    assert list(stated) == list(SYSTEMS.values())
    committed = COMPARISON.path.read_text()
    (values,) = [
        comparison(figures_of(path))[0].values
        for path in COMPARISON.complete_results()
        if COMPARISON.drawn(path) == committed
    ]
    assert stated == values


def test_a_file_without_a_figure_makes_no_picture(tmp_path: Path) -> None:
    results = json.loads(COMPARISON.complete_results()[0].read_text())
    results["figures"] = [f for f in results["figures"] if f["id"] != "lossless.edits.openvino"]
    partial = tmp_path / "partial.json"
    partial.write_text(json.dumps(results))
    with pytest.raises(KeyError, match=r"lossless\.edits\.openvino"):
        COMPARISON.drawn(partial)
