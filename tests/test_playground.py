# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where a package is missing, nothing else is imported)
"""The page at `/` in a real browser; test_page_access.py tests its accessibility."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "prometheus_client", "jinja2", "playwright"):
    pytest.importorskip(name)

from browsing import (
    choose,
    connected,
    done,
    fact,
    fill,
    needs_chromium,
    opened,
    run,
    stop_the_clock,
    text_of,
)
from fake_engine import FakeEngine
from playwright.sync_api import Browser, Page, Route, expect
from serving import Served, serving, wait_for
from specops.engine import Engine, EngineConfig, RequestOutput, SpeculativeConfig
from specops.server.chat import ChatFormat

pytestmark = pytest.mark.ci

FOLDER = Path(__file__).parents[1] / "python/specops/server/playground"
FILES = sorted(path for path in FOLDER.iterdir() if path.suffix in (".html", ".css", ".js"))


NONE = "\N{EN DASH}"
SPREAD = r"[\d.]+\u00d7 to [\d.]+\u00d7"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(FakeEngine(step_seconds=0.003)) as served:
        yield served


@pytest.fixture(scope="module")
def bundled() -> Iterator[Served]:
    """Serve the bundled model."""
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    with serving(Engine(EngineConfig(speculative_config=config, max_num_seqs=4))) as served:
        yield served


def sent_by(page: Page) -> list[Any]:
    """Return a list that receives the bodies of the page's further requests."""
    sent: list[Any] = []
    page.on("request", lambda one: sent.extend([one.post_data_json] * bool(one.post_data)))
    return sent


# ---- the race ----


@needs_chromium
@pytest.mark.parametrize("method", ["ngram", "mtp"])
def test_race_of_the_bundled_model_ends_in_the_same_bits(
    bundled: Served, browser: Browser, method: str
) -> None:
    with opened(browser, bundled) as page:
        connected(page)
        assert page.locator("input[name=mode]:checked").input_value() == "race"
        page.locator("#method").select_option(method)
        fill(page, tokens="60", temperature="0.7", seed="5")
        run(page)
        expect(page.locator("#identical")).to_have_text(
            "Same bits: 60 of 60 tokens, 60 of 60 logprobs"
        )
        expect(page.locator("#identical")).to_have_class("identical same")
        assert text_of(page, 0) == text_of(page, 1) != ""
        factor = page.locator("#factor").inner_text()
        found = re.fullmatch(r"(?:at most )?(\d+\.\d\d)\u00d7 as fast as plain", factor)
        per_step = page.locator("#per-step").inner_text()
        assert found is not None and 0 < float(found[1]) <= float(per_step)
        assert per_step == fact(page, "per step", lane=1)
        expect(page.locator("#spread")).to_have_text(
            re.compile(rf"^\((one timed pair|(middle half of )?\d timed pairs: {SPREAD})\)$")
        )
        expect(page.locator("#verdict-note")).to_have_text("Seed 5.")
        expect(page.locator(".speed").nth(1)).to_have_text(re.compile(r"^[\d,]+ tokens/s alone$"))
        assert page.locator(".lane").nth(0).locator(".from-target").count() == 60
        assert page.locator(".lane").nth(1).locator(f".from-{method}").count() > 0
        expect(page.locator("#timeline svg")).to_have_attribute(
            "aria-label", re.compile("^Plain decoding: 60 tokens in 60 steps; With .* 60 tokens in")
        )
        expect(page.locator("#chat-mode")).to_be_hidden()


@needs_chromium
def test_race_reports_different_tokens(browser: Browser) -> None:
    with serving(FakeEngine(flaw=5)) as served, opened(browser, served) as page:
        connected(page)
        fill(page, prompt="abcdefgh", tokens="9")
        run(page)
        expect(page.locator("#identical")).to_have_text("DIFFERENT: 8 of 9 tokens, 9 of 9 logprobs")
        expect(page.locator("#identical")).to_have_class("identical differs")
        marked = page.locator(".token.differs")
        assert marked.all_text_contents() == ["f", "g"], "in both texts, at the same place"
        expect(page.locator("#status")).to_contain_text("DIFFERENT")


@needs_chromium
def test_race_reports_a_logprob_with_another_last_bit(served: Served, browser: Browser) -> None:
    with opened(browser, served) as page:
        connected(page)

        def change(route: Route) -> None:
            response = route.fetch()
            is_plain = route.request.post_data_json["speculative_config"]["method"] == "naive"
            text = response.text()
            if is_plain:
                text = text.replace(
                    '"token_logprobs":[-0.5]', '"token_logprobs":[-0.5000000596]', 1
                )
            route.fulfill(response=response, body=text)

        page.route("**/v1/completions", change)
        fill(page, prompt="abc", tokens="9")
        page.locator("#alone").evaluate("box => { box.checked = false; }")
        run(page)
        expect(page.locator("#identical")).to_have_text("DIFFERENT: 9 of 9 tokens, 8 of 9 logprobs")


@needs_chromium
def test_race_without_logprobs_compares_tokens(page: Page) -> None:
    page.locator(".more summary").click()
    page.locator("#alternatives").select_option("")
    page.locator("#alone").uncheck()
    fill(page, prompt="abc", tokens="20")
    run(page)
    expect(page.locator("#identical")).to_have_text("Same bits: 20 of 20 tokens")
    expect(page.locator("#factor")).to_have_text("")
    expect(page.locator(".speed").nth(1)).to_contain_text("tokens/s, both at once")


class Watched(FakeEngine):
    """A fake engine that records its maximum number of concurrent requests."""

    most = 0

    def step(self) -> list[RequestOutput]:
        self.most = max(self.most, self.num_running + self.num_waiting)
        return super().step()


@needs_chromium
def test_both_runs_of_a_race_share_time_and_seed(browser: Browser) -> None:
    engine = Watched(step_seconds=0.003)
    with serving(engine) as served, opened(browser, served) as page:
        connected(page)
        sent = sent_by(page)
        fill(page, prompt="abc", tokens="40")
        page.locator("#alone").evaluate("box => { box.checked = false; }")
        with served.holding(20):
            page.locator("#run").click()
            wait_for(lambda: engine.most == 2)
        done(page)
        assert [one["speculative_config"]["method"] for one in sent] == ["naive", "ngram"]
        assert len({one["seed"] for one in sent}) == len({one["prompt"] for one in sent}) == 1
        page.locator("#alone").evaluate("box => { box.checked = true; }")
        stop_the_clock(page)
        run(page)
        methods = [one["speculative_config"]["method"] for one in sent[2:]]
        orders = [["ngram", "naive"], ["naive", "ngram"]]
        alone = [method for number in range(7) for method in orders[number % 2]]
        assert methods == ["naive", "ngram", *alone], "then each alone, in seven pairs"


def timed(page: Page, **speeds: list[float]) -> None:
    """Make the server report these speeds: of each method's first run, its next one, and so on.

    The page's clock stands still, so there is time for all repetitions.
    """
    stop_the_clock(page)

    def report(route: Route) -> None:
        method = route.request.post_data_json["speculative_config"]["method"]
        response = route.fetch()
        speed = speeds[method].pop(0) if len(speeds[method]) > 1 else speeds[method][0]
        reported = f'"tokens_per_second":{speed}'
        text = re.sub(r'"tokens_per_second":[\d.e-]+', reported, response.text())
        route.fulfill(response=response, body=text)

    page.route("**/v1/completions", report)


@needs_chromium
def test_speed_up_is_the_median_of_pairs(page: Page) -> None:
    """The race itself is not one of the pairs."""
    timed(page, naive=[100.0], ngram=[9000.0, 170.0, 120.0, 180.0, 200.0, 190.0, 160.0, 819.0])
    fill(page, prompt="abc", tokens="25")
    run(page)
    expect(page.locator("#per-step")).to_have_text("4.00")
    expect(page.locator("#factor")).to_have_text("1.80\u00d7 as fast as plain")
    expect(page.locator("#spread")).to_have_text(
        "(middle half of 7 timed pairs: 1.65\u00d7 to 1.95\u00d7)"
    )
    expect(page.locator("#disturbed")).to_be_hidden()
    speeds = page.locator(".speed").all_inner_texts()
    assert [" ".join(one.split()) for one in speeds] == ["100 tokens/s alone", "180 tokens/s alone"]


@needs_chromium
def test_speed_up_is_at_most_the_tokens_of_a_step(page: Page) -> None:
    timed(page, naive=[100.0], ngram=[650.0])
    fill(page, prompt="abc", tokens="25")
    run(page)
    expect(page.locator("#per-step")).to_have_text("4.00")
    expect(page.locator("#factor")).to_have_text("at most 4.00\u00d7 as fast as plain")
    expect(page.locator("#spread")).to_contain_text("7 timed pairs: 4.00\u00d7 to 4.00\u00d7")
    choose(page, "compare")
    expect(page.locator("#disturbed")).to_be_hidden()
    run(page)
    cell = page.locator("#table tbody tr").nth(1).locator("td").nth(3)
    expect(cell).to_contain_text("at most 4.00\u00d7")
    assert "6.50" not in page.locator("main").inner_text()


@needs_chromium
@pytest.mark.parametrize("disturbed", [[650.0], [110.0, 190.0]], ids=["impossible", "uneven"])
@pytest.mark.parametrize("mode", ["race", "compare"])
def test_disturbed_timing_is_repeated(page: Page, mode: str, disturbed: list[float]) -> None:
    speeds = [*disturbed * 10]
    timed(page, naive=[100.0], ngram=speeds)
    choose(page, mode)
    fill(page, prompt="abc", tokens="25")
    run(page)
    expect(page.locator("#disturbed")).to_be_visible()
    expect(page.locator("#results")).to_have_class("doubtful")
    texts = [text_of(page, lane) for lane in range(page.locator(".lane").count())]
    num_runs = page.locator("#runs li").count()
    speeds[:] = [180.0]
    page.locator("#again").click()
    expect(page.locator("#disturbed")).to_be_hidden()
    done(page)
    cell = page.locator("#table tbody tr").nth(1).locator("td").nth(3)
    expect(cell if mode == "compare" else page.locator("#factor")).to_contain_text("1.80\u00d7")
    expect(page.locator("#results")).not_to_have_class("doubtful")
    expect(page.locator("#run")).to_be_focused()
    assert texts == [text_of(page, lane) for lane in range(page.locator(".lane").count())]
    assert page.locator("#runs li").count() == num_runs, "it is the same run"


@needs_chromium
def test_learning_method_is_not_timed_alone(browser: Browser) -> None:
    engine = FakeEngine(methods=("naive", "ngram", "suffix"))
    with serving(engine) as served, opened(browser, served) as page:
        connected(page)
        page.locator("#method").select_option("suffix")
        fill(page, prompt="abc", tokens="20")
        run(page)
        expect(page.locator("#verdict-note")).to_contain_text("Not timed alone")


@needs_chromium
def test_speeds_are_measured_by_the_server(page: Page) -> None:
    """All tokens arrive at once here, which does not matter."""

    def slow(route: Route) -> None:
        response = route.fetch()
        text = re.sub(r'"tokens_per_second":[\d.e-]+', '"tokens_per_second":612.4', response.text())
        route.fulfill(response=response, body=text)

    page.route("**/v1/completions", slow)
    choose(page, "write")
    fill(page, prompt="abc", tokens="20")
    run(page)
    expect(page.locator(".speed b")).to_have_text("612")


# ---- one completion ----


@needs_chromium
def test_completion_shows_text_and_counts(page: Page) -> None:
    assert page.locator("#method").input_value() == "ngram", "the server's own method"
    assert page.locator("#k").input_value() == "3"
    choose(page, "write")
    fill(page, prompt="wörd 🙂 ", tokens="33", seed="9007199254740993")
    run(page)
    assert text_of(page) == "wörd 🙂 " * 3
    expect(page.locator(".before")).to_have_text("wörd 🙂 ")
    # The prompt's step, and 8 of 4 tokens: 24 accepted drafts.
    counts = {name: fact(page, name) for name in ("tokens", "per step", "accepted", "seed")}
    assert counts == {
        "tokens": "33",
        "per step": "4.00",
        "accepted": "24 of 24",
        "seed": "9007199254740993",
    }
    assert page.locator(".pane .from-ngram").count() == 24
    assert re.fullmatch(r"[\d,]+", page.locator(".speed b").inner_text())
    expect(page.locator("#acceptance svg")).to_have_attribute(
        "aria-label",
        "Accepted drafts by position, in percent. position 1: 8 of 8; position 2: 8 of 8; "
        "position 3: 8 of 8.",
    )


@needs_chromium
@pytest.mark.parametrize("tint", ["source", "probability", ""])
def test_end_token_is_not_shown(page: Page, tint: str) -> None:
    choose(page, "write")
    fill(page, prompt="ab<|end|>", tokens="30")
    page.locator("#prompt").press("Control+Enter")
    done(page)
    page.locator("#tint").select_option(tint)
    assert fact(page, "tokens") == "3"
    assert text_of(page) == "ab"


@needs_chromium
def test_markup_of_the_model_is_shown_as_text(page: Page) -> None:
    choose(page, "write")
    prompt = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    fill(page, prompt=prompt, tokens=str(len(prompt)))
    run(page)
    assert text_of(page) == prompt
    assert page.locator(".pane img, .pane script").count() == 0


@needs_chromium
def test_end_of_the_prompt_is_visible(page: Page) -> None:
    lines = "\n".join(f"l {i}" for i in range(40))
    fill(page, prompt=lines, tokens="8")
    at = "field => field.scrollHeight - field.clientHeight - field.scrollTop"
    assert page.locator("#prompt").evaluate(at) < 4, "the field is scrolled to its end"
    cut = "field => field.scrollTop % parseFloat(getComputedStyle(field).lineHeight)"
    assert page.locator("#prompt").evaluate(cut) == 0, "the first line is whole"
    choose(page, "write")
    run(page)
    expect(page.locator(".before")).to_have_text("…\nl 38\nl 39")


@needs_chromium
def test_rejected_drafts_are_shown_on_demand(browser: Browser) -> None:
    with serving(FakeEngine(most_accepted=1)) as served, opened(browser, served) as page:
        connected(page)
        choose(page, "write")
        fill(page, prompt="abcdefgh", tokens="5")
        run(page)
        dels = page.locator(".pane del")
        assert dels.all_text_contents() == ["d", "e", "f", "g"], "two of three, of two steps"
        expect(dels.first).to_be_hidden()
        page.locator("#rejected").check()
        expect(dels.first).to_be_visible()
        assert dels.first.evaluate("one => getComputedStyle(one).textDecorationLine") == (
            "line-through"
        )
        assert fact(page, "accepted") == "2 of 6"
        label = page.locator("#drafts svg").get_attribute("aria-label")
        assert label == "Drafts: d accepted, f rejected, g rejected."


@needs_chromium
def test_drafts_of_a_step_are_drawn(bundled: Served, browser: Browser) -> None:
    with opened(browser, bundled, viewport={"width": 680, "height": 900}) as page:
        connected(page)
        choose(page, "write")
        page.locator("#method").select_option("mtp")
        fill(page, k="6", tokens="24", temperature="0")
        run(page)
        page.locator(".token").nth(3).hover()
        expect(page.locator("#drafts-caption")).to_have_text(re.compile(r"^Drafts of step \d$"))
        # The script's own numbers: hovering moves and scales a box on the screen.
        columns = {box.get_attribute("x") for box in page.locator("#drafts .draft rect").all()}
        assert len(columns) == 6
        drafts = page.locator("#drafts")
        expect(drafts).to_have_class(re.compile("continues"))
        drafts.evaluate("one => { one.scrollLeft = one.scrollWidth; }")
        expect(drafts).not_to_have_class(re.compile("continues"))
        assert "accepted" in (page.locator("#drafts svg").get_attribute("aria-label") or "")


STEP = {
    "seconds": 0.2,
    "token_ids": [1, 2],
    "bytes": [[99], [120]],
    "sources": ["mtp", "target"],
    "drafts": {
        "token_ids": [1, 5, 4],
        "bytes": [[99], [100], [98]],
        "sources": ["mtp"] * 3,
        "num_accepted": 1,
    },
}


@needs_chromium
def test_card_names_the_draft_that_a_token_replaces(page: Page) -> None:
    choice = {"index": 0, "text": "cx", "finish_reason": "length", "step": STEP}
    body = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"
    page.route("**/v1/completions", lambda route: route.fulfill(status=200, body=body))
    choose(page, "write")
    fill(page, prompt="abc")
    run(page)
    card = page.locator("#card")
    page.locator(".token").nth(1).hover()
    expect(card).to_contain_text("Chosen by the target model instead of “d”.")
    expect(card).to_contain_text("Step 1: 1 of 3 drafts accepted.")
    page.locator(".token").nth(0).hover()
    expect(card).to_contain_text("Proposed by: MTP module. Accepted by the target model.")
    positions = "position 1: 1 of 1; position 2: 0 of 1; position 3: 0 of 1."
    label = f"Accepted drafts by position, in percent. {positions}"
    expect(page.locator("#acceptance svg")).to_have_attribute("aria-label", label)


# ---- all methods ----


@needs_chromium
def test_table_compares_methods(page: Page) -> None:
    choose(page, "compare")
    fill(page, prompt="abc", tokens="24", temperature="0.8")
    stop_the_clock(page)
    run(page)
    rows = [row.split("\t") for row in page.locator("#table tbody tr").all_inner_texts()]
    assert [row[0] for row in rows] == ["naive", "ngram"]
    cells = [row[1:3] + row[5:] for row in rows]
    assert cells == [["1.00", NONE, NONE], ["3.83", "100 %", "identical"]]
    assert rows[0][4] == NONE
    spread = rf"(at most )?[\d.]+\u00d7\s+middle half of 7 timed pairs: {SPREAD}\s*"
    assert re.fullmatch(spread, rows[1][4])
    assert "seen" not in page.locator("#table caption").inner_text(), "nothing learns here"


@needs_chromium
def test_table_has_medians_of_rounds(page: Page) -> None:
    # A warm-up, the run that is drawn, and seven timed runs.
    timed(
        page, naive=[1.0, 9.0, 100.0], ngram=[5.0, 110.0, 120.0, 130.0, 140.0, 150.0, 160.0, 170.0]
    )
    choose(page, "compare")
    fill(page, prompt="abc", tokens="25")
    run(page)
    rows = [row.split("\t") for row in page.locator("#table tbody tr").all_inner_texts()]
    assert [row[3] for row in rows] == ["100", "140"]
    assert rows[1][4].split("\n")[:2] == [
        "1.40\u00d7",
        "middle half of 7 timed pairs: 1.25\u00d7 to 1.55\u00d7",
    ]
    expect(page.locator("#status")).to_have_text("Done: ngram was fastest, all identical.")


@needs_chromium
def test_table_times_a_learning_method_once(browser: Browser) -> None:
    engine = FakeEngine(methods=("naive", "suffix"))
    with serving(engine) as served, opened(browser, served) as page:
        connected(page)
        timed(page, naive=[1.0, 50.0, 100.0], suffix=[90.0, 300.0])
        choose(page, "compare")
        fill(page, prompt="abc", tokens="25")
        run(page)
        cells = page.locator("#table tbody tr").nth(1).locator("td").all_inner_texts()
        assert cells[2] == "90" and cells[3].split("\n")[:2] == ["1.80\u00d7", "one timed pair"]
        expect(page.locator("#table caption")).to_contain_text("so it is timed once")


@needs_chromium
def test_mtp_and_its_hybrids_can_be_chosen(browser: Browser) -> None:
    config = EngineConfig(
        served_model_name="fake",
        max_model_len=256,
        speculative_config=SpeculativeConfig(
            method="mtp+ngram", num_speculative_tokens=5, num_model_steps=2
        ),
    )
    every = ["naive", "suffix", "mtp", "mtp + ngram", "mtp + suffix"]
    with (
        serving(FakeEngine(config, methods=("naive", "suffix", "mtp"))) as served,
        opened(browser, served, expects=("400",)) as page,
    ):
        connected(page)
        sent = sent_by(page)
        assert page.locator("#method option").all_inner_texts() == every
        own = [page.locator(f"#{name}").input_value() for name in ("method", "k", "steps")]
        assert own == ["mtp + ngram", "5", "2"], "the server's own"
        choose(page, "write")
        fill(page, prompt="abc", tokens="9")
        mtp = {"method": "mtp", "num_speculative_tokens": 5}
        for choice, steps, expected in (
            ("mtp + ngram", "2", mtp | {"method": "mtp+ngram", "num_model_steps": 2}),
            ("mtp + suffix", "", mtp | {"method": "mtp+suffix", "num_model_steps": None}),
            ("mtp", "4", mtp | {"num_model_steps": 4}),
        ):
            page.locator("#method").select_option(choice)
            placeholder = page.locator("#steps").get_attribute("placeholder")
            assert placeholder == ("all" if choice == "mtp" else "1")
            fill(page, steps=steps)
            run(page)
            assert sent[-1]["speculative_config"] == expected
        fill(page, steps="6")
        run(page, "failed")
        expect(page.locator("#error")).to_have_text(
            "“Of these by MTP” must be at most “Drafts per step” = 5, got 6."
        )
        fill(page, steps="")
        choose(page, "compare")
        run(page)
        heads = page.locator("#table tbody th").all_inner_texts()
        assert heads == every
        expect(page.locator("#table caption")).to_contain_text("In the second method with it")


# ---- chats ----


@needs_chromium
def test_chat_continues_and_is_stored(page: Page) -> None:
    sent = sent_by(page)
    choose(page, "chat")
    expect(page.locator("#lanes")).to_contain_text("Send a message to begin.")
    page.locator(".more summary").click()
    fill(page, tokens="20", system="be kind", message="héllo<|end|>")
    run(page)
    expect(page.locator("#message")).to_have_value("")
    assert text_of(page) == "be kind", "the fake engine repeats the prompt"
    fill(page, message="<b>more</b>")
    page.locator("#message").press("Enter")
    expect(page.locator("article .prose")).to_have_count(2)
    done(page)
    messages = sent[-1]["messages"]
    assert [one["role"] for one in messages] == ["system", "user", "assistant", "user"]
    assert messages[2]["content"] == "be kind" and messages[3]["content"] == "<b>more</b>"
    page.reload()
    connected(page)
    expect(page.locator(".message")).to_have_text(["You: héllo<|end|>", "You: <b>more</b>"])
    page.locator("#new-chat").click()
    expect(page.locator(".message")).to_have_count(0)


@needs_chromium
def test_tabs_share_one_chat(browser: Browser) -> None:
    with serving(FakeEngine()) as served, opened(browser, served) as page:
        connected(page)
        other = page.context.new_page()
        other.goto(f"{served.url}/")
        connected(other)
        for tab in (page, other):
            fill(tab, tokens="3")
            choose(tab, "chat")
        fill(page, message="one")
        run(page)
        expect(other.locator(".message")).to_have_text(["You: one"])
        fill(other, message="two")
        run(other)
        expect(page.locator(".message")).to_have_text(["You: one", "You: two"])
        # Messages of the other tab during an answer are not lost.
        fill(other, message="three")
        page.locator(".more summary").click()
        page.locator("#method").select_option("naive")
        fill(page, message="four", tokens="70", system="repeated" * 10)
        with served.holding(30):
            page.locator("#run").click()
            expect(page.locator("body")).to_have_attribute("data-state", "running")
            run(other)
            wait_for(lambda: "three" in page.evaluate("localStorage.getItem('specops-chats')"))
        done(page)
        messages = ["You: one", "You: two", "You: three", "You: four"]
        for tab in (page, other):
            expect(tab.locator(".message")).to_have_text(messages)
            expect(tab.locator("article")).to_have_count(4)
        (stored,) = json.loads(page.evaluate("localStorage.getItem('specops-chats')"))
        contents = [one["content"] for one in stored["messages"]]
        assert contents[::2] == ["one", "two", "three", "four"]
        other.locator("#new-chat").click()
        expect(other.locator(".message")).to_have_count(0)
        expect(page.locator(".message")).to_have_count(4)


@needs_chromium
def test_prompt_and_message_are_separate(page: Page) -> None:
    fill(page, prompt="a prompt", tokens="4")
    choose(page, "chat")
    expect(page.locator("#message")).to_have_value("")
    fill(page, message="one")
    run(page)
    fill(page, message="two")
    choose(page, "race")
    expect(page.locator("#prompt")).to_have_value("a prompt")
    page.locator("#share").click()
    assert "prompt=a+prompt" in page.url and "two" not in page.url
    other = page.context.new_page()
    other.goto(page.url.split("#")[0])
    connected(other)
    expect(other.locator("#prompt")).to_have_value("a prompt")
    choose(other, "chat")
    expect(other.locator("#message")).to_have_value("")
    choose(page, "chat")
    expect(page.locator("#message")).to_have_value("two")


@needs_chromium
def test_newest_message_is_above_the_form(served: Served, browser: Browser) -> None:
    with opened(browser, served, viewport={"width": 900, "height": 600}) as page:
        fill(connected(page), tokens="30")
        choose(page, "chat")
        for text in ("one", "two", "three"):
            fill(page, message=f"{text}\n\n" * 9)
            run(page)
        expect(page.locator("#run")).to_be_in_viewport(ratio=1)
        end = "one => one.getBoundingClientRect().bottom"
        newest, top = page.locator("article").last, "one => one.getBoundingClientRect().top"
        assert newest.evaluate(end) <= page.locator("#form").evaluate(top)
        page.reload()
        expect(connected(page).locator("article")).to_have_count(3)
        assert newest.evaluate(end) <= page.locator("#form").evaluate(top)
        choose(page, "race")
        assert page.locator("#form").evaluate(top) < page.locator("#results").evaluate(top)


@needs_chromium
def test_no_chat_without_a_template(browser: Browser) -> None:
    with (
        serving(FakeEngine(), chat_format=ChatFormat(None)) as served,
        opened(browser, served) as page,
    ):
        connected(page)
        expect(page.get_by_text("Chat", exact=True)).to_be_hidden()


# ---- stored settings ----


@needs_chromium
def test_settings_history_and_links_restore_a_run(browser: Browser) -> None:
    with (
        serving(FakeEngine(), api_keys=["geheim"]) as served,
        opened(browser, served, expects=("401",)) as page,
    ):
        expect(page.locator("#error")).to_have_text("This server needs an API key.")
        expect(page.locator("#error")).to_have_class("error asks")
        expect(page.locator("#key")).to_be_focused()
        fill(page, key="wrong")
        page.locator("#prompt").focus()
        expect(page.locator("#error")).to_have_text("The server does not accept this API key.")
        fill(page, key="geheim", prompt="abc", tokens="6")
        run(page)
        choose(page, "write")
        fill(page, prompt="x & y", tokens="7", temperature="0.5", seed="11")
        run(page)
        page.locator("#share").click()
        expect(page.locator("#status")).to_contain_text("link")
        link = page.url
        page.reload()
        fill(page, key="geheim")
        runs = page.locator("#runs button")
        page.locator("#history summary").click()
        assert "write, ngram" in runs.nth(0).inner_text() and "race" in runs.nth(1).inner_text()
        runs.nth(1).click()
        assert page.locator("#prompt").input_value() == "abc"
        assert page.locator("#seed").input_value() != "", "the seed that was drawn"
        assert page.locator("input[name=mode]:checked").input_value() == "race"
        stored = page.evaluate("JSON.stringify(localStorage)")
        assert "abc" in stored and "geheim" not in stored + link
        with opened(browser, served, fragment=link.split("/")[-1], expects=("401",)) as other:
            fill(other, key="geheim", k="2")
            other.locator("#run").click()
            done(other)
            assert other.locator("#prompt").input_value() == "x & y"
            values = [other.locator(f"#{name}").input_value() for name in ("tokens", "seed")]
            assert values == ["7", "11"]
            assert fact(other, "tokens") == "7"
        page.locator("#forget").click()
        expect(runs).to_have_count(0)
        assert page.evaluate("localStorage.getItem('specops-history')") is None


@needs_chromium
@pytest.mark.parametrize("mode", ["race", "write", "compare"])
def test_link_carries_the_drawn_seed(page: Page, mode: str) -> None:
    sent = sent_by(page)
    choose(page, mode)
    fill(page, prompt="abc", tokens="5")
    run(page)
    assert page.locator("#seed").input_value() == "", "the next run has another"
    page.locator("#share").click()
    expect(page.locator("#status")).to_contain_text("link")
    assert f"seed={sent[-1]['seed']}" in page.url.split("#")[1].split("&")
    first = {one["seed"] for one in sent}
    run(page)
    assert len(first) == 1 and {one["seed"] for one in sent} > first
    choose(page, "write" if mode == "race" else "race")  # clears the screen
    page.locator("#share").click()
    expect(page.locator("#status")).to_contain_text("link")
    assert "seed=" not in page.url


@needs_chromium
def test_seed_is_shown_where_it_matters(page: Page) -> None:
    fill(page, prompt="abc", tokens="5", temperature="0")
    run(page)
    expect(page.locator("#verdict-note")).to_have_text("")
    choose(page, "write")
    run(page)
    expect(page.locator(".facts")).not_to_contain_text("seed")
    fill(page, temperature="0.1")
    run(page)
    expect(page.locator(".facts")).to_contain_text("seed")


# ---- failures ----


@needs_chromium
def test_failed_start_clears_earlier_results(served: Served, browser: Browser) -> None:
    with opened(browser, served, expects=("400", "Failed to load")) as page:
        connected(page)
        for mode in ("race", "write", "compare"):
            choose(page, mode)
            fill(page, prompt="abc", tokens="5")
            run(page)
            fill(page, tokens="100000")
            run(page, "failed")
            expect(page.locator("#error")).to_contain_text("exceeds the context")
            for selector in ("#verdict", "#charts", "#table table", ".lane"):
                assert page.locator(selector).locator("visible=true").count() == 0, selector
            expect(page.locator("#idle")).to_be_visible()


@needs_chromium
def test_bars_are_proportional_to_texts(page: Page, served: Served) -> None:
    page.locator("#method").select_option("naive")
    fill(page, prompt="abc", tokens="250")
    with served.holding(5):
        page.locator("#run").click()
        expect(page.locator(".lane .token").first).to_be_visible()
        page.locator("#stop").click()
        done(page, "stopped")
    served.wait_until_idle()
    fraction = page.locator(".lane progress").first.evaluate("bar => bar.value / bar.max")
    assert fraction == pytest.approx(int(fact(page, "tokens")) / 250) and fraction < 1
    fill(page, prompt="ab<|end|>")
    run(page)
    fractions = "bars => bars.map(bar => bar.value / bar.max)"
    assert page.locator(".lane progress").evaluate_all(fractions) == [1, 1], "complete, if short"


STOP_AT = """words => new MutationObserver((_, observer) => {
  if (!document.getElementById("verdict-note").textContent.includes(words)) return;
  observer.disconnect();
  document.getElementById("stop").click();
}).observe(document.getElementById("verdict-note"), {childList: true})"""


@needs_chromium
def test_stopped_timing_shows_what_was_timed(page: Page, served: Served) -> None:
    timed(page, naive=[90.0, 100.0], ngram=[80.0, 70.0, 300.0])
    fill(page, prompt="abc", tokens="60", seed="7")
    page.evaluate(STOP_AT, "Timing each alone, pair 1.")
    run(page, "stopped")
    served.wait_until_idle()
    expect(page.locator("#factor")).to_have_text("not timed")
    expect(page.locator("#verdict-note")).to_have_text("Seed 7.")
    expect(page.locator(".speed").first).to_have_text("90 tokens/s, both at once")
    expect(page.locator("#identical")).to_contain_text("Same bits: 60 of 60 tokens")
    page.evaluate(STOP_AT, "Timing each alone, pair 2.")
    page.locator("#run").click()
    expect(page.locator("#spread")).to_have_text("(one timed pair)")
    done(page, "stopped")
    served.wait_until_idle()
    expect(page.locator("#factor")).to_have_text("3.00\u00d7 as fast as plain")
    assert [one.split()[0] for one in page.locator(".speed").all_inner_texts()] == ["100", "300"]
    expect(page.locator("#verdict-note")).to_have_text("Seed 7.")


@needs_chromium
def test_empty_fields_mean_their_placeholders(page: Page) -> None:
    sent = sent_by(page)
    choose(page, "write")
    page.locator(".more summary").click()
    shown = {"k": "3", "tokens": "160", "temperature": "0.5", "top_p": "1"}
    fill(page, prompt="abc", **dict.fromkeys(shown, ""))
    for name, value in shown.items():
        assert page.locator(f"#{name}").get_attribute("placeholder") == value
    run(page)
    body = sent[-1]
    assert body["speculative_config"]["num_speculative_tokens"] == 3
    assert (body["max_tokens"], body["temperature"], body["top_p"]) == (160, 0.5, 1)
    for name, value in shown.items():
        assert page.locator(f"#{name}").input_value() == value, "filled in by the run"


@needs_chromium
@pytest.mark.parametrize("mode", ["chat", "write", "compare"])
def test_changing_the_mode_stops_the_run(page: Page, served: Served, mode: str) -> None:
    page.locator("#method").select_option("naive")
    fill(page, prompt="abc", tokens="250")
    with served.holding(5):
        page.locator("#run").click()
        expect(page.locator(".lane .token").first).to_be_visible()
        choose(page, mode)
        done(page, "stopped")
        served.wait_until_idle()
    expect(page.locator("#results")).to_have_attribute("data-mode", mode)
    expect(page.locator(".lane")).to_have_count(0)
    assert page.locator("#idle").is_visible() == (mode != "chat")
    if mode == "chat":
        fill(page, message="abc")
    else:
        fill(page, prompt="abc", tokens="4")
    run(page)
    expect(page.locator("#error")).to_have_text("")


@needs_chromium
def test_opening_an_earlier_run_keeps_the_results(page: Page) -> None:
    fill(page, tokens="4")
    choose(page, "chat")
    fill(page, message="abc")
    run(page)
    choose(page, "race")
    fill(page, prompt="abc")
    run(page)
    page.locator("#history summary").click()
    page.locator("#runs button").nth(1).click()  # run of the chat
    tops = "lanes => lanes.map(lane => lane.getBoundingClientRect().top)"
    left, right = page.locator(".lane").evaluate_all(tops)
    assert left == right, "still side by side"
    run(page)
    expect(page.locator(".message")).to_have_count(2)
    expect(page.locator("article")).to_have_count(2)


@needs_chromium
def test_stop_frees_the_engine(page: Page, served: Served) -> None:
    fill(page, prompt="abc", tokens="250")
    page.locator("#method").select_option("naive")
    assert page.locator("#k").is_disabled()
    with served.holding(5):
        page.locator("#run").click()
        expect(page.locator(".lane .token").first).to_be_visible()
        page.locator("#stop").click()
        done(page, "stopped")
        served.wait_until_idle()
    expect(page.locator("#status")).to_have_text("Stopped.")
    assert 0 < int(fact(page, "tokens")) < 250
    run(page)  # another run can begin
    assert fact(page, "tokens") == "250"


@needs_chromium
def test_errors_are_shown_as_sentences(served: Served, browser: Browser) -> None:
    with opened(browser, served, expects=("400", "Failed to load")) as page:
        connected(page)
        fill(page, prompt="abc", tokens="100000")
        run(page, "failed")
        expect(page.locator("#error")).to_have_text("A prompt of 3 tokens exceeds the context.")
        assert page.locator("#error").get_attribute("role") == "alert"
        fill(page, tokens="5")
        page.route("**/v1/completions", lambda route: route.abort())
        run(page, "failed")
        expect(page.locator("#error")).to_have_text(
            "The server does not answer; is it still running?"
        )
        expect(page.locator("#model")).to_have_text("not connected")
        page.unroute("**/v1/completions")
        busy = {"error": {"message": "the server is busy: 9 requests are waiting already"}}
        page.route(
            "**/v1/completions",
            lambda route: route.fulfill(
                status=429, headers={"Retry-After": "1"}, body=json.dumps(busy)
            ),
        )
        run(page, "failed")
        expect(page.locator("#error")).to_have_text(
            "The server is busy: 9 requests are waiting already. Try again in 1 s."
        )
        page.unroute("**/v1/completions")
        page.route("**/v1/completions", lambda route: route.fulfill(status=200, body="data: "))
        run(page, "failed")
        expect(page.locator("#error")).to_have_text(
            "The connection ended before the answer was complete."
        )
        page.unroute("**/v1/completions")
        run(page)
        expect(page.locator("#error")).to_have_text("")


@needs_chromium
def test_failing_engine_is_reported(browser: Browser) -> None:
    engine = FakeEngine()
    with serving(engine) as served, opened(browser, served) as page:
        connected(page)
        choose(page, "write")
        fill(page, prompt="abc")
        engine.num_failures = 1
        run(page, "failed")
        expect(page.locator("#error")).to_have_text(
            "A step of the engine failed; the server's log says why."
        )


# ---- the files ----


def test_page_loads_only_its_own_files() -> None:
    for path in FILES:
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|@import|url\(", text), path.name
        assert "SPDX-License-Identifier: Apache-2.0" in text[:120], path.name
        names = re.findall(r'<(?:script|link)[^>]*(?:src|href)="([^"]*)"', text)
        for name in names + re.findall(r' from "(.*)";', text):
            if name != "favicon.ico":  # favicon.svg under the name that browsers ask for
                assert (FOLDER / name.removeprefix("page/").removeprefix("./")).is_file(), name


def test_page_turns_no_text_into_markup() -> None:
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(|srcdoc"
    for path in FILES:
        assert not re.search(forbidden, path.read_text(encoding="utf-8")), path.name
    html = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"\bstyle=|<style|\son\w+=", html), "the policy forbids it"
