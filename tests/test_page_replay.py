# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where a package is missing, nothing else is imported)
"""Replays on the page at `/`: the recorded race, slow motion, single steps and clicks."""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "prometheus_client", "jinja2", "playwright"):
    pytest.importorskip(name)

from browsing import (
    HELD_CLOCK,
    advance,
    choose,
    connected,
    fact,
    fill,
    needs_chromium,
    opened,
    run,
)
from fake_engine import FakeEngine
from playwright.sync_api import Browser, Page, Route, expect
from serving import Served, serving
from test_playground import FOLDER

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(FakeEngine(step_seconds=0.003, most_accepted=2)) as served:
        yield served


def shown(page: Page) -> list[int]:
    """Return the number of tokens that each lane shows."""
    lanes = page.locator(".lane").all()
    return [lane.locator(".token:not([hidden])").count() for lane in lanes]


def in_even_steps(route: Route) -> None:
    """Answer as the server does, but with 20 ms for each step by its clock."""
    response, ends = route.fetch(), itertools.count(1)
    text = re.sub(
        r'"seconds":[\d.e-]+', lambda _: f'"seconds":{0.02 * next(ends):.2f}', response.text()
    )
    route.fulfill(response=response, body=text)


def race(page: Page) -> None:
    """Run a race of 12 tokens: the first, and four steps of three, three, three and two."""
    page.route("**/v1/completions", in_even_steps)
    page.locator("#alone").evaluate("box => { box.checked = false; }")
    fill(page, prompt="abcdefgh", tokens="12")
    run(page)


# ---- the recorded race ----


def recorded() -> Any:
    return json.loads((FOLDER / "recorded.json").read_text(encoding="utf-8"))


def test_recorded_race_has_the_same_bits_in_fewer_steps() -> None:
    plain, fast = (
        [one for event in run["events"] for one in event["choices"]] for run in recorded()["runs"]
    )
    tokens, logprobs = (
        [[value for one in lane for value in read(one)] for lane in (plain, fast)]
        for read in (
            lambda one: one["step"]["token_ids"] if one["step"] else [],
            lambda one: one["logprobs"].get("token_logprobs", []),
        )
    )
    assert tokens[0] == tokens[1] and logprobs[0] == logprobs[1]
    assert len(tokens[0]) == len(logprobs[0]) >= 64
    assert 2 * sum(one["step"] is not None for one in fast) < len(plain)
    assert any(one["step"] and one["step"]["drafts"] for one in fast)


@needs_chromium
def test_first_visit_plays_a_recorded_race(served: Served, browser: Browser) -> None:
    with opened(browser, served, script=HELD_CLOCK) as page:
        connected(page)
        note = page.locator("#verdict-note")
        expect(note).to_contain_text("A recorded race: the bundled model on")
        expect(page.locator("#identical")).to_have_text(
            re.compile(r"^Same bits: (\d+) of \1 tokens")
        )
        expect(page.locator("#play")).to_have_text("Pause")
        expect(page.locator("#moment")).to_have_text("0 ms")
        page.locator("#slower").select_option("20")
        advance(page, 1000)
        expect(page.locator("#moment")).to_have_text("50 ms")
        expect(page.locator("#play")).to_have_text("Pause")
        expect(page.locator(".badge")).to_have_text(["Recorded demo"] * 2)
        race(page)
        expect(note).not_to_contain_text("recorded")
        expect(page.locator(".badge")).to_have_count(0)
        page.reload()
        connected(page)
        expect(page.locator("#idle")).to_be_visible()
        expect(page.locator("#replay")).to_be_hidden()


@needs_chromium
def test_reduced_motion_stops_animations(served: Served, browser: Browser) -> None:
    with opened(browser, served, reduced_motion="reduce") as page:
        connected(page)
        expect(page.locator("#play")).to_have_text("Replay")
        # "Replay" is also the button's first text: only the lanes say that the race is drawn.
        expect(page.locator("#verdict-note")).to_contain_text("A recorded race")
        expect(page.locator(".lane .token").first).to_be_visible()
        assert sum(shown(page)) == page.locator(".lane .token").count() > 0
        race(page)
        page.locator("#time").focus()
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowRight")
        expect(page.locator(".flying").first).to_be_hidden()


@needs_chromium
def test_results_are_above_the_fold(served: Served, browser: Browser) -> None:
    with opened(browser, served, viewport={"width": 1280, "height": 900}) as page:
        connected(page)
        race(page)
        for selector in ("#per-step", "#identical", "#replay"):
            expect(page.locator(selector)).to_be_in_viewport(ratio=1)
        tops = page.locator(".pane").evaluate_all(
            "panes => panes.map(pane => pane.getBoundingClientRect().top)"
        )
        assert max(tops) < 650
        page.locator("#prompt").focus()
        expect(page.locator("#form")).not_to_have_class("folded")


# ---- slow motion ----


@needs_chromium
def test_race_is_replayed_step_by_step(page: Page) -> None:
    page.evaluate(HELD_CLOCK)
    race(page)
    assert shown(page) == [12, 12]
    assert [fact(page, "done", lane) for lane in (0, 1)] == ["at 240 ms", "first, at 100 ms"]
    page.locator("#time").focus()
    page.keyboard.press("ArrowLeft")
    assert shown(page) == [11, 12], "before the last step of plain decoding"
    expect(page.locator("#play")).to_have_text("Play")
    page.locator("#time").evaluate(
        "slider => { slider.value = 0; slider.dispatchEvent(new Event('input')); }"
    )
    assert shown(page) == [0, 0]
    assert [fact(page, "tokens", lane) for lane in (0, 1)] == ["0", "0"]
    expect(page.locator(".speed b")).to_have_text(["\N{EN DASH}"] * 2)
    seen = []
    for _ in range(30):
        page.keyboard.press("ArrowRight")
        seen.append(shown(page)[1])
        if page.locator(".flying").count():
            break
    assert seen == [1, 4]
    expect(page.locator(".flying").first).to_be_visible()
    assert page.locator("#drafts .unfolds").count() >= 2, "drafts come by depth"
    label = page.locator("#time").get_attribute("aria-valuetext")
    assert label == page.locator("#moment").inner_text() and re.fullmatch(r"\d+ ms", label)
    counts = [fact(page, name, lane=1) for name in ("tokens", "per step", "accepted")]
    assert counts == ["4", "3.00", "2 of 3"]
    assert page.locator(".facts dt", has_text="done").count() == 0
    page.locator("#back").click()
    assert shown(page) == [1, 1]
    page.locator("#slower").select_option("1")
    page.locator("#play").click()
    expect(page.locator("#play")).to_have_text("Pause")
    advance(page, 1000)
    expect(page.locator("#play")).to_have_text("Replay")
    assert shown(page) == [12, 12]
    page.locator("#slower").select_option("200")
    page.locator("#play").click()
    expect(page.locator("#play")).to_have_text("Pause")
    assert min(shown(page)) < 12
    page.locator("#play").click()
    expect(page.locator("#play")).to_have_text("Play")


@needs_chromium
def test_click_in_the_timeline_goes_to_its_step(page: Page) -> None:
    race(page)
    box = page.locator("#timeline svg").bounding_box()
    assert box is not None
    page.locator("#timeline svg").click(position={"x": 10, "y": box["height"] - 12})
    token = page.locator(".lane").nth(1).locator(".token").first
    expect(token).to_be_focused()
    expect(page.locator("#card")).to_contain_text("Step 1")
    expect(page.locator("#drafts-caption")).to_have_text("Drafts of step 1")
    assert shown(page) == [1, 1], "the replay shows this step, too"


TITLES_AND_BARS = """async () => {
  const {timeline} = await import("/page/charts.js");
  const step = {seconds: 0.1, first: 0, count: 33};
  const tokens = Array(33).fill({source: "ngram"});
  const drawn = timeline([{steps: [step], tokens, seconds: 0.1}], ["title"], 400, () => {});
  document.body.append(drawn);
  const [title, bars] = ["text", ".step"].map(one => drawn.querySelector(one).getBBox());
  return [title.y + title.height, bars.y];
}"""


@needs_chromium
def test_bars_of_long_steps_are_below_the_title(page: Page) -> None:
    end, begin = page.evaluate(TITLES_AND_BARS)
    assert end <= begin


# ---- the table of all methods ----


@needs_chromium
def test_click_on_a_row_shows_its_text(page: Page) -> None:
    choose(page, "compare")
    fill(page, prompt="abcd", tokens="9")
    run(page)
    rows = page.locator("#table tbody tr")
    for place, title in ((0, "Plain decoding"), (1, "With n-gram drafts")):
        rows.nth(place).locator("td").first.click()
        expect(page.locator(".lane h2")).to_have_text([title])
        expect(rows.nth(place).locator("button")).to_have_attribute("aria-pressed", "true")
        expect(page.locator("#replay")).to_be_visible()
        assert shown(page) == [9]
    rows.nth(0).locator("button").press("Enter")
    expect(page.locator(".lane h2")).to_have_text(["Plain decoding"])
