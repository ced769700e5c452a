# SPDX-License-Identifier: Apache-2.0
"""The server's page in a real browser, for tests: Debian's Chromium, driven by Playwright."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from serving import Served

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="Chromium is not installed (apt install chromium)"
)

# A loaded machine is slow. A long limit costs nothing, because a match returns at once.
_MILLISECONDS = 120_000
expect.set_options(timeout=_MILLISECONDS)

# Without these options, Chromium contacts Google's hosts for updates.
_QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync")


@contextlib.contextmanager
def running_browser() -> Iterator[Browser]:
    """Run a browser until the block ends."""
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium cannot sandbox as root
    with sync_playwright() as playwright:
        args = [*sandbox, *_QUIET, "--no-first-run"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=args)
        yield browser
        browser.close()


@contextlib.contextmanager
def opened(
    browser: Browser,
    served: Served,
    *,
    fragment: str = "",
    script: str = "",
    expects: tuple[str, ...] = (),
    **options: Any,
) -> Iterator[Page]:
    """Open the page in a new browser context.

    At the end of the block the page must have had no errors, no blocked content, and no requests to
    other hosts.

    Args:
        browser: browser to open the page in.
        served: server of the page.
        fragment: fragment of the address.
        script: run in every document before its own scripts.
        expects: texts of console messages that do not count as errors.
        options: options of the browser's context, such as viewport.
    """
    context = browser.new_context(**{"viewport": {"width": 1180, "height": 900}, **options})
    context.set_default_timeout(_MILLISECONDS)
    context.add_init_script(script)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.extend([message.text] * (message.type == "error")))
    page.on(
        "request",
        lambda request: problems.extend([request.url] * (not request.url.startswith(served.url))),
    )
    page.goto(f"{served.url}/{fragment}")
    yield page
    context.close()
    problems = [problem for problem in problems if not any(text in problem for text in expects)]
    assert problems == []


def connected(page: Page) -> Page:
    """Return the page, once it knows the server's model."""
    expect(page.locator("#model")).to_contain_text("context of")
    return page


def choose(page: Page, mode: str) -> None:
    """Choose a mode of the page: race, write, compare or chat."""
    page.locator(f"input[name=mode][value={mode}]").check()


def fill(page: Page, **fields: str) -> None:
    """Fill fields of the form and dispatch their events."""
    for name, value in fields.items():
        page.locator(f"#{name}").fill(value)


def done(page: Page, state: str = "done") -> None:
    """Wait for the end of a run."""
    expect(page.locator("body")).to_have_attribute("data-state", state)


def run(page: Page, state: str = "done") -> None:
    """Press the button and wait for the end."""
    page.locator("#run").click()
    expect(page.locator("body")).not_to_have_attribute("data-state", "idle")
    done(page, state)


def stop_the_clock(page: Page) -> None:
    """Freeze the page's clock, so that work limited by time is always completed."""
    page.evaluate("performance.now = () => 0")


# A clock for the page's animations that stands still until a test sets `window.at`.
HELD_CLOCK = """(() => {
  window.at = 0;
  performance.now = () => window.at;
  const request = window.requestAnimationFrame.bind(window);
  window.requestAnimationFrame = (call) => request(() => call(window.at));
})()"""


def advance(page: Page, milliseconds: float) -> None:
    """Advance the frozen clock of a page."""
    page.evaluate(f"window.at += {milliseconds}")


def fact(page: Page, name: str, lane: int = 0) -> str:
    """Return the value beside a name under a lane's heading."""
    facts = page.locator(".lane").nth(lane).locator(".facts div")
    found = facts.filter(has=page.locator("dt", has_text=re.compile(f"^{name}$")))
    return found.locator("dd").inner_text()


def text_of(page: Page, lane: int = 0) -> str:
    """Return the generated text of a lane as displayed."""
    tokens = page.locator(".lane").nth(lane).locator(".token").all_text_contents()
    return "".join(tokens)
