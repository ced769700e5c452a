# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where a package is missing, nothing else is imported)
"""The page at `/`, in a real browser."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "prometheus_client", "jinja2", "playwright"):
    pytest.importorskip(name)

from fake_engine import FakeEngine
from playwright.sync_api import Page, expect, sync_playwright
from serving import Served, serving
from specops.engine import EngineConfig, SpeculativeConfig

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PAGE = Path(__file__).parents[1] / "python/specops/engine/server/playground/index.html"

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(FakeEngine(step_seconds=0.003)) as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as playwright:
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        yield browser
        browser.close()


@pytest.fixture
def page(served: Served, browser: Any) -> Iterator[Page]:
    page = browser.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))

    def check(url: str) -> None:
        if not url.startswith(served.url):
            problems.append(f"asked for {url}")

    page.on("console", lambda said: problems.extend([said.text] * (said.type == "error")))
    page.on("request", lambda asked: check(asked.url))
    page.goto(served.url)
    expect(page.locator("#model")).to_contain_text("fake")
    yield page
    page.close()
    assert problems == []


def fill(page: Page, **fields: str) -> None:
    for name, value in fields.items():
        page.locator(f"#{name}").fill(value)


def done(page: Page, state: str = "done") -> None:
    expect(page.locator("body")).to_have_attribute("data-state", state)


@needs_chromium
def test_completes_and_counts(page: Page) -> None:
    assert page.locator("#method").input_value() == "ngram", "the server's own method"
    assert page.locator("#k").input_value() == "3"
    fill(page, prompt="wörd 🙂 ", tokens="33", seed="9007199254740993")
    page.locator("#run").click()
    done(page)
    expect(page.locator("#output")).to_have_text("wörd 🙂 " * 4)
    expect(page.locator("#count")).to_have_text("33")
    # 1 + 8 steps of 4 tokens: 24 accepted drafts.
    expect(page.locator("#accepted")).to_have_text("24 of 24")
    expect(page.locator("#length")).to_have_text("3.67")
    expect(page.locator("#used-seed")).to_have_text("9007199254740993")
    assert page.locator("#output .accepted").count() == 24
    assert re.fullmatch(r"\d+", page.locator("#speed").inner_text())


@needs_chromium
@pytest.mark.parametrize("colour", ["accepted", "probability", ""])
def test_the_end_token_does_not_show(page: Page, served: Served, colour: str) -> None:
    page.locator("#colour").select_option(colour)
    fill(page, prompt="ab<|end|>", tokens="30")
    page.locator("#prompt").press("Control+Enter")
    done(page)
    expect(page.locator("#count")).to_have_text("3")
    expect(page.locator("#output")).to_have_text("ab<|end|>ab")


@needs_chromium
def test_compares_methods(page: Page) -> None:
    fill(page, prompt="abc", tokens="24", temperature="0.8")
    page.locator("#compare").click()
    done(page)
    rows = page.locator("#runs tbody tr")
    assert [row.split("\t")[0] for row in rows.all_inner_texts()] == ["naive", "ngram"]
    assert rows.nth(0).inner_text().split("\t")[2:5] == ["1.00", "0", "0"]
    expect(rows.nth(1).locator("td").last).to_have_text("identical")
    assert page.locator("#note").is_hidden(), "nothing learns here"


@needs_chromium
def test_mtp_and_what_continues_it(browser: Any) -> None:
    config = EngineConfig(
        served_model_name="fake",
        max_model_len=256,
        speculative_config=SpeculativeConfig(
            method="mtp", mtp_strategy="with_ngram", num_speculative_tokens=5, num_model_steps=2
        ),
    )
    with serving(FakeEngine(config, methods=("naive", "suffix", "mtp"))) as served:
        page = browser.new_page()
        sent: list[Any] = []
        page.on(
            "request", lambda asked: sent.extend([asked.post_data_json] * bool(asked.post_data))
        )
        page.goto(served.url)
        expect(page.locator("#model")).to_contain_text("fake")
        assert page.locator("#method option").all_inner_texts() == [
            "naive", "suffix", "mtp", "mtp + ngram", "mtp + suffix",
        ]  # fmt: skip
        assert page.locator("#method").input_value() == "mtp + ngram", "the server's own"
        assert (page.locator("#k").input_value(), page.locator("#steps").input_value()) == (
            "5",
            "2",
        )
        fill(page, prompt="abc", tokens="9")
        own = {"method": "mtp", "num_speculative_tokens": 5}
        for choice, steps, expected in (
            ("mtp + ngram", "2", own | {"mtp_strategy": "with_ngram", "num_model_steps": 2}),
            ("mtp + suffix", "", own | {"mtp_strategy": "with_suffix", "num_model_steps": None}),
            ("mtp", "4", own | {"mtp_strategy": "default", "num_model_steps": 4}),
        ):
            page.locator("#method").select_option(choice)
            assert page.locator("#steps").get_attribute("placeholder") == (
                "all" if choice == "mtp" else "1"
            )
            fill(page, steps=steps)
            page.locator("#run").click()
            done(page)
            assert sent[-1]["speculative_config"] == expected
        fill(page, steps="6")
        page.locator("#run").click()
        done(page, "failed")
        expect(page.locator("#error")).to_have_text(
            "num_model_steps must be at most num_speculative_tokens = 5, got 6"
        )
        fill(page, steps="")
        page.locator("#compare").click()
        done(page)
        rows = page.locator("#runs tbody tr").all_inner_texts()
        assert [row.split("\t")[0] for row in rows] == [
            "naive", "suffix", "mtp", "mtp + ngram", "mtp + suffix",
        ]  # fmt: skip
        expect(page.locator("#note")).to_contain_text("the second method with it")
        for method in ("naive", "suffix"):
            page.locator("#method").select_option(method)
            assert page.locator("#steps").is_hidden()
        page.close()


@needs_chromium
def test_stop_frees_the_engine(page: Page, served: Served) -> None:
    fill(page, prompt="abc", tokens="250")
    page.locator("#method").select_option("naive")
    assert page.locator("#k").is_disabled()
    page.locator("#run").click()
    expect(page.locator("#count")).to_have_text(re.compile(r"\d+"))
    page.locator("#stop").click()
    done(page, "stopped")
    served.wait_until_idle()


@needs_chromium
def test_errors_are_shown(served: Served, browser: Any) -> None:
    page = browser.new_page()
    page.goto(served.url)
    fill(page, prompt="abc", tokens="100000")
    page.locator("#run").click()
    done(page, "failed")
    expect(page.locator("#error")).to_contain_text("exceeds the context")
    page.close()


@needs_chromium
def test_asks_for_the_key(browser: Any) -> None:
    with serving(FakeEngine(), api_keys=["geheim"]) as served:
        page = browser.new_page()
        page.goto(served.url)
        expect(page.locator("#error")).to_contain_text("API key")
        fill(page, key="geheim", prompt="abc", tokens="6")
        page.locator("#run").click()
        done(page)
        expect(page.locator("#output")).to_have_text("abcabcabc")
        page.close()


def test_the_page_needs_nothing_else() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert not re.search(r"https?://|src=|@import|url\(", text)
