# SPDX-License-Identifier: Apache-2.0
"""The pictures in docs/ show the committed figures."""

import json
from pathlib import Path

import pytest

from tools.plot_docs import COMPARISON, PICTURES, Picture


@pytest.mark.parametrize("picture", PICTURES, ids=lambda one: one.name)
def test_a_committed_picture_is_that_of_committed_results(picture: Picture) -> None:
    committed = picture.path.read_text()
    assert committed in [picture.drawn(path) for path in picture.complete_results()], (
        "python -m tools.plot_docs draws it anew"
    )


def test_a_file_without_a_figure_makes_no_picture(tmp_path: Path) -> None:
    results = json.loads(COMPARISON.complete_results()[0].read_text())
    results["figures"] = [f for f in results["figures"] if f["id"] != "lossless.edits.openvino"]
    partial = tmp_path / "partial.json"
    partial.write_text(json.dumps(results))
    with pytest.raises(KeyError, match=r"lossless\.edits\.openvino"):
        COMPARISON.drawn(partial)
