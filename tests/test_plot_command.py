# SPDX-License-Identifier: Apache-2.0
"""`specops plot`: a bar for every run and figure, with a length proportional to the figure."""

import json
import re
import xml.dom.minidom
from pathlib import Path
from typing import Any

import pytest
from specops.cli import main
from specops.cli.bar_charts import Panel, picture

pytestmark = pytest.mark.ci


def spread(value: float) -> dict[str, float]:
    return {name: value * (2 if name == "p99" else 1) for name in ("mean", "p50", "p99", "max")}


def run(name: str, scale: float, *, accepted: float | None) -> dict[str, Any]:
    """Return results of `specops bench` with figures of their own."""
    return {
        "kind": "specops bench",
        "version": 1,
        "name": name,
        "figures": {
            "output_tokens_per_s": 1000 * scale,
            "requests_per_s": 10 * scale,
            "acceptance": None if accepted is None else {"rate": accepted},
            "first_token_ms": spread(20 / scale),
            "per_output_token_ms": spread(3 / scale),
            "whole_ms": None,
        },
    }


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    runs = [run("drafts <4>", 2.0, accepted=0.75), run("plain", 1.0, accepted=None)]
    paths = [tmp_path / f"{index}.json" for index in range(2)]
    for path, one in zip(paths, runs, strict=True):
        path.write_text(json.dumps(one))
    return [str(path) for path in paths]


def test_runs_are_drawn_side_by_side(files: list[str], tmp_path: Path) -> None:
    out = tmp_path / "runs.svg"
    assert main(["plot", *files, "--out", str(out), "--highlight", "drafts <4>"]) == 0
    svg = out.read_text()
    xml.dom.minidom.parseString(svg)
    titles = re.findall(r'class="title">([^<]*)<', svg)
    assert titles[:5] == [
        "Runs of specops bench",
        "Output tokens a second",
        "Requests a second",
        "Drafts accepted, %",
        "First token, ms",
    ]
    assert len(titles) == 10
    assert svg.count("drafts &lt;4&gt;</text>") == svg.count(">plain</text>") == 10, (
        "only the names of these runs are known"
    )
    # Both runs are in six panels, one is in that of drafts, and none in those of whole answers.
    bars = re.findall(r'width="([\d.]+)" height="18" rx="2" fill="(#\w+)"/>', svg)
    assert len(bars) == 2 * 6 + 1
    (ours, green), (theirs, grey) = bars[:2]
    assert float(ours) == pytest.approx(2 * float(theirs), abs=0.2) and green != grey
    for shown in ("2,000", "1,000", "75", "10", "20", "40", "1.5", "6"):
        assert f">{shown}</text>" in svg, shown


def test_plot_shows_the_conditions_and_the_spread(tmp_path: Path) -> None:
    closed, open_ = run("drafts", 2.0, accepted=0.75), run("plain", 1.0, accepted=None)
    common = {"url": "http://127.0.0.1:8000", "requests": 200, "max_tokens": 64}
    closed |= {"model": "m", "started": "2026-11-24T10:05:00+00:00"}
    closed["client"] = "2 CPUs of AMD EPYC family 26"
    closed["options"] = common | {"concurrency": 16, "rate": None}
    open_ |= {"model": "m", "options": common | {"concurrency": None, "rate": 2.5}}
    closed["figures"]["first_token_ms"]["p90"] = 30.0
    paths = [tmp_path / "closed.json", tmp_path / "open.json"]
    for path, one in zip(paths, (closed, open_), strict=True):
        path.write_text(json.dumps(one))
    out = tmp_path / "runs.svg"
    assert main(["plot", *map(str, paths), "--out", str(out), "--title", "On a <laptop>"]) == 0
    svg = out.read_text()
    xml.dom.minidom.parseString(svg)
    assert '<text x="18" y="30" class="title">On a &lt;laptop&gt;</text>' in svg
    where = "m at http://127.0.0.1:8000"
    amount = "200 requests of up to 64 tokens"
    client = f"client on {closed['client']}"
    assert f">drafts: {where}, {client}, 16 at a time, {amount}, 2026-11-24 10:05 UTC</text>" in svg
    assert f">plain: {where}, 2.5 requests a second, {amount}</text>" in svg
    # The bar of 10 ms has a line to 30 ms, three times as far.
    (bar,) = re.findall(
        r'<rect x="(\d+)" y="\d+" width="([\d.]+)" height="18"[^/]*/>\n *<line x1', svg
    )
    (line,) = re.findall(
        r'<line x1="([\d.]+)" x2="([\d.]+)" y1="\d+" y2="\d+" stroke="#\w+"/>', svg
    )
    left, width = map(float, bar)
    assert float(line[0]) == pytest.approx(left + width, abs=0.2)
    assert float(line[1]) - left == pytest.approx(3 * width, abs=0.5)


def test_picture_size_follows_its_names_and_panels() -> None:
    def size(names: list[str], panels: int) -> tuple[int, int]:
        panel = Panel("t", ("a", "b"), {name: 1.0 for name in names})
        found = re.search(
            r'viewBox="0 0 (\d+) (\d+)"', picture([panel] * panels, "p", highlighted=())
        )
        assert found is not None
        return int(found[1]), int(found[2])

    assert size(["a"], 1) == (308, 116)
    assert size(["a"], 3) == (900, 116) and size(["a"], 4) == (900, 232)
    assert size(["a", "b"], 1) == (308, 144)
    assert size(["a" * 30], 1)[0] == 308 + 7 * 30 + 8 - 94


def test_invalid_arguments_are_refused(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, newer = tmp_path / "other.json", tmp_path / "newer.json"
    other.write_text("[1]")
    newer.write_text(json.dumps({"kind": "specops bench", "version": 2}))
    for arguments, message in (
        ([files[0], files[0]], "runs must have different names, got drafts <4> twice"),
        (["/nowhere"], "/nowhere cannot be read: No such file"),
        ([str(other)], "must be a file written by specops bench --json, got other JSON"),
        ([str(newer)], "must be results of version 1, got version 2"),
        ([*files, "--highlight", "x"], "--highlight must name a run of drafts <4>, plain, got x"),
        ([*files, "--out", "/nowhere/a.svg"], "--out must be a file to write, got /nowhere/a.svg"),
    ):
        assert main(["plot", *arguments]) == 2
        assert message in capsys.readouterr().err
