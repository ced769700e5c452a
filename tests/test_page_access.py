# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where a package is missing, nothing else is imported)
"""Accessibility of the page at `/`: keyboard, phones, dark mode and screen readers."""

import re
from collections.abc import Iterator

import pytest

for name in (
    "fastapi",
    "uvicorn",
    "pydantic",
    "prometheus_client",
    "jinja2",
    "playwright",
    "axe_playwright_python",
):
    pytest.importorskip(name)

import httpx
from axe_playwright_python.sync_playwright import Axe
from browsing import (
    choose,
    connected,
    done,
    fill,
    needs_chromium,
    opened,
    run,
)
from fake_engine import FakeEngine
from playwright.sync_api import Browser, Page, expect
from serving import Served, serving
from specops.engine import EngineConfig
from specops.server.chat import ChatFormat

pytestmark = pytest.mark.ci

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    methods = ("naive", "ngram", "suffix", "mtp")
    with serving(FakeEngine(step_seconds=0.002, methods=methods, most_accepted=2)) as served:
        yield served


def focused(page: Page) -> str:
    """Return the id of the focused element, or its class."""
    return str(page.evaluate("document.activeElement.id || document.activeElement.className"))


def tab_to(page: Page, name: str) -> None:
    """Press Tab until an element has the focus."""
    for _ in range(40):
        if focused(page) == name:
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"the Tab key never reaches {name}")


# ---- the keyboard ----


@needs_chromium
def test_race_works_by_keyboard_alone(served: Served, browser: Browser) -> None:
    with opened(browser, served) as page:
        connected(page)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.value") == "race", "the first tab stop"
        page.keyboard.press("ArrowRight")
        expect(page.locator("#results")).to_have_attribute("data-mode", "write")
        page.keyboard.press("ArrowLeft")
        tab_to(page, "prompt")
        page.keyboard.press("Control+A")
        page.keyboard.type("abcdef")
        tab_to(page, "tokens")
        page.keyboard.press("Control+A")
        page.keyboard.type("24")
        tab_to(page, "run")
        page.keyboard.press("Enter")
        done(page)
        assert focused(page) == "run", "the focus stays where it was"
        page.keyboard.press("Tab")
        assert focused(page) == "stop", "beside the button that starts"
        expect(page.locator("#identical")).to_contain_text("Same bits: 24 of 24 tokens")
        token = page.locator(".lane").nth(1).locator(".token")
        for _ in range(10):
            page.keyboard.press("Tab")
            if token.first.evaluate("one => one === document.activeElement"):
                break
        expect(token.first).to_be_focused()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        expect(token.nth(2)).to_be_focused()
        card = page.locator("#card")
        expect(card).to_contain_text("Proposed by: n-gram look-up. Accepted by the target model.")
        expect(card).to_contain_text("Step 2: 2 of 3 drafts accepted.")
        assert token.nth(2).get_attribute("aria-describedby") == "card"
        page.keyboard.press("ArrowRight")
        expect(card).to_contain_text("Chosen by the target model instead of “e”.")
        alternatives = card.locator("li")
        assert alternatives.count() == 5 and "61 %" in alternatives.first.inner_text()
        page.keyboard.press("Escape")
        expect(card).to_be_hidden()
        page.keyboard.press("End")
        expect(token.last).to_be_focused()
        page.keyboard.press("Home")
        expect(token.first).to_be_focused()


@needs_chromium
def test_escape_stops_and_keeps_the_focus(served: Served, browser: Browser) -> None:
    with opened(browser, served) as page, served.holding(5):
        connected(page)
        page.locator("#method").select_option("naive")
        fill(page, prompt="abc", tokens="250")
        page.locator("#prompt").press("Control+Enter")
        expect(page.locator(".lane .token").first).to_be_visible()
        page.keyboard.press("Escape")
        done(page, "stopped")
        assert focused(page) == "prompt"
        served.wait_until_idle()
        page.locator("#prompt").press("Control+Enter")
        expect(page.locator(".lane .token").first).to_be_visible()
        page.locator("#stop").focus()
        page.keyboard.press("Space")
        done(page, "stopped")
        assert focused(page) == "stop"
        served.wait_until_idle()


@needs_chromium
def test_card_is_shown_on_hover(served: Served, browser: Browser) -> None:
    with opened(browser, served) as page:
        connected(page)
        choose(page, "write")
        fill(page, prompt="abcdef", tokens="12")
        run(page)
        page.locator(".token").nth(1).hover()
        expect(page.locator("#card")).to_contain_text("b token 99, probability 61 %")
        page.locator("h1").hover()
        expect(page.locator("#card")).to_be_hidden()
        page.locator(".token").nth(2).focus()
        page.locator(".token").nth(1).hover()
        page.locator("h1").hover()
        expect(page.locator("#card")).to_contain_text("c token 100")  # it has the focus


# ---- phones ----


@needs_chromium
@pytest.mark.parametrize("mode", ["race", "compare", "chat"])
def test_page_fits_on_a_phone(served: Served, browser: Browser, mode: str) -> None:
    with opened(browser, served, **PHONE) as page:
        connected(page)
        choose(page, mode)
        page.locator(".more summary").click()
        text = "averylongwordwithoutaspace" * 6
        fill(page, tokens="60", **{"message" if mode == "chat" else "prompt": text})
        run(page)
        if mode == "chat":
            page.locator(".inside summary").click()
        page.locator("#rejected").check()
        page.locator("#history summary").click()
        widths = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert widths == [390, 390]
        for table in page.locator("table").all():
            box = table.bounding_box()
            assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 390
        small = page.evaluate(TOO_SMALL)
        assert small == [], "touch targets are at least 44 pixels high and wide"


# Check boxes and modes are touched at their labels.
TOO_SMALL = """() => [...document.querySelectorAll("button, select, input, textarea, summary")]
  .map(one => one.closest("label.check, .modes label") ?? one)
  .filter(one => one.offsetParent !== null)
  .filter(one => one.getBoundingClientRect().height < 44 || one.getBoundingClientRect().width < 44)
  .map(one => one.outerHTML.slice(0, 80))"""


@needs_chromium
def test_phone_shows_the_race_and_can_stop_it(served: Served, browser: Browser) -> None:
    with opened(browser, served, **PHONE) as page, served.holding(5):
        connected(page)
        page.locator(".more summary").tap()
        page.locator("#method").select_option("naive")
        fill(page, prompt="abc", tokens="250")
        page.locator(".more summary").tap()
        page.locator("#run").tap()
        expect(page.locator(".lane .token").first).to_be_visible()
        for selector in ("#verdict", ".lane >> nth=0", ".lane >> nth=1"):
            expect(page.locator(selector)).to_be_in_viewport(ratio=1)
        expect(page.locator("#stop")).to_be_in_viewport(ratio=1)
        page.locator("#stop").tap()
        done(page, "stopped")
        served.wait_until_idle()
        page.locator(".token").first.tap()
        expect(page.locator("#card")).to_be_in_viewport(ratio=1)


# ---- dark mode and screen readers ----


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_color_scheme_is_that_of_the_system(served: Served, browser: Browser, scheme: str) -> None:
    with opened(browser, served, color_scheme=scheme) as page:
        connected(page)
        color = page.evaluate("getComputedStyle(document.body).backgroundColor")
        levels = [int(level) for level in re.findall(r"\d+", color)]
        assert max(levels) < 60 if scheme == "dark" else min(levels) > 200


def findings(page: Page) -> list[str]:
    """Return the findings of axe-core under its default rules."""
    violations = Axe().run(page).response["violations"]
    return [
        f"{one['id']}: {node['html'][:120]} {node.get('failureSummary', '')[:300]}"
        for one in violations
        for node in one["nodes"]
    ]


@needs_chromium
@pytest.mark.parametrize(
    "options",
    [{}, {"color_scheme": "dark"}, PHONE],
    ids=["light", "dark", "phone"],
)
def test_axe_finds_nothing(served: Served, browser: Browser, options: dict[str, object]) -> None:
    calm = {"reduced_motion": "reduce"}  # colors change during animations
    with opened(browser, served, expects=("400",), **calm, **options) as page:
        connected(page)
        page.locator(".more summary").click()
        expect(page.locator("#replay")).to_be_visible()
        assert findings(page) == [], "the recorded race"
        page.locator("#method").select_option("mtp + suffix")
        fill(page, prompt="abcdef", tokens="30", k="5", steps="2")
        run(page)
        page.locator("#rejected").check()
        page.locator("#history summary").click()
        page.locator(".lane").nth(1).locator(".token").nth(3).focus()
        expect(page.locator("#card")).to_be_visible()
        assert findings(page) == [], "after a race, with a token's card"
        if options:  # only colors and sizes differ under these options
            return
        page.locator("#tint").select_option("probability")
        assert findings(page) == [], "tinted by probability"
        choose(page, "compare")
        run(page)
        assert findings(page) == [], "a table of methods"
        choose(page, "chat")
        fill(page, message="# a\n* `b`\n```\nc\n```")
        run(page)
        page.locator("#chats summary").click()
        page.locator("#as-code").click()
        fill(page, message="x", tokens="100000")
        run(page, "failed")
        assert findings(page) == [], "a chat, and an error"


@needs_chromium
@pytest.mark.parametrize("options", [{"color_scheme": "dark"}, PHONE], ids=["dark", "phone"])
def test_api_page_has_every_route_and_field(
    served: Served, browser: Browser, options: dict[str, object]
) -> None:
    described = httpx.get(f"{served.url}/openapi.json").json()
    routes = {
        f"{method.upper()} {path}"
        for path, item in described["paths"].items()
        for method in item.keys() - {"head"}
    }
    with opened(browser, served, fragment="docs#POST-v1-completions", **options) as page:
        here = page.locator("#POST-v1-completions")
        expect(here.locator("h2")).to_be_in_viewport()
        assert set(page.locator(".route h2").all_inner_texts()) == routes
        assert page.locator("#contents a").count() == len(routes)
        row = here.locator("tr", has=page.get_by_text("temperature", exact=True))
        cells = [one.strip() for one in row.locator("td").all_inner_texts()]
        assert (
            cells[:4] == ["temperature", "number", "0 to 1,000,000", "1"] and "greedy" in cells[4]
        )
        names = set(here.locator("td:first-child").all_inner_texts())
        fields = described["components"]["schemas"]["CompletionRequest"]["properties"]
        neutral = here.get_by_text("Supported only with values that have no effect").inner_text()
        assert all(one in names or f" {one}" in neutral for one in fields)
        for trial in page.locator(".trial").all():  # every example runs as it stands
            trial.locator("summary").click()
            trial.get_by_role("button").click()
            expect(trial.locator("pre")).to_have_text(re.compile(r"^(\{\s|# HELP)"))
        assert page.locator(".trial textarea").count() == 8
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert findings(page) == []


@needs_chromium
def test_api_page_sends_examples_with_the_key(browser: Browser) -> None:
    """A model without a chat template has no examples of chats."""
    engine = FakeEngine(EngineConfig(max_model_len=64))
    with (
        serving(engine, api_keys=("secret",), chat_format=ChatFormat(None)) as served,
        opened(browser, served, fragment="docs", expects=("401",)) as page,
    ):
        here = page.locator("#POST-v1-completions")
        here.locator("summary").click()
        for key, text in (("", "API key"), ("secret", '"object": "text_completion"')):
            page.get_by_label("API key").fill(key)
            here.get_by_role("button").click()
            expect(here.locator("pre")).to_contain_text(text)
        assert page.locator(".trial textarea").count() == 4
        chats = page.locator("#POST-v1-chat-completions")
        expect(chats).to_contain_text("No example: the model has no chat template.")


@needs_chromium
def test_page_has_landmarks_and_live_regions(served: Served, browser: Browser) -> None:
    with opened(browser, served) as page:
        connected(page)
        for role in ("banner", "main", "contentinfo", "form", "alert", "status"):
            assert page.get_by_role(role).count() == 1, role  # type: ignore[arg-type]
        unlabeled = page.evaluate(
            "[...document.querySelectorAll('input, select, textarea')]"
            ".filter(one => !one.labels.length).map(one => one.id)"
        )
        assert unlabeled == []
        fill(page, prompt="abc", tokens="12")
        run(page)
        expect(page.get_by_role("status")).to_have_text(
            re.compile(r"^Done: .* as fast as plain, same bits: 12 tokens\.$")
        )


# ---- the content security policy ----


def test_policy_allows_own_files_only(served: Served) -> None:
    for path in ("/", "/docs", "/page/main.js", "/page/style.css", "/favicon.ico"):
        response = httpx.get(f"{served.url}{path}")
        assert response.status_code == 200
        policy = dict(
            directive.strip().split(" ", 1)
            for directive in response.headers["content-security-policy"].split(";")
        )
        assert policy == {
            "default-src": "'none'",
            "style-src": "'self'",
            "script-src": "'self'",
            "connect-src": "'self'",
            "img-src": "'self'",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
            "require-trusted-types-for": "'script'",
            "trusted-types": "'none'",
        }
        assert response.headers["x-content-type-options"] == "nosniff"
    assert httpx.get(f"{served.url}/page/../app.py").status_code == 404
    assert httpx.get(f"{served.url}/page/none.js").status_code == 404


@needs_chromium
def test_browser_enforces_the_policy(served: Served, browser: Browser) -> None:
    """The other tests fail if the page itself violates the policy; here, other code tries to."""
    expected = ("Content Security Policy", "TrustedHTML", "Trusted", "trusted")
    with opened(browser, served, expects=expected) as page:
        connected(page)
        refused = page.evaluate(
            """() => {
              const script = document.createElement("script");
              const tries = [
                () => { document.body.innerHTML = "<b>x</b>"; },
                () => { script.text = "window.ran = true"; },
              ];
              return tries.map(one => {
                try { one(); return "done"; } catch (error) { return error.name; }
              });
            }"""
        )
        assert refused == ["TypeError", "TypeError"]
        answer = page.evaluate(
            "fetch('http://127.0.0.1:1/').then(() => 'asked', error => error.name)"
        )
        assert answer == "TypeError"
