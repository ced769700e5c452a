# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser, for tests: Debian's Chromium, driven by Playwright."""

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

# A loaded machine is slow: what is there is seen at once, however long one would wait for it.
_MILLISECONDS = 120_000
expect.set_options(timeout=_MILLISECONDS)

# Chromium asks its maker's hosts for updates otherwise.
_QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync")


@contextlib.contextmanager
def running_browser() -> Iterator[Browser]:
    """A browser, until the block ends."""
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has none for root
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
    """The page in a profile of its own.

    At the end of the block it must have had no errors, no blocked content, and no other hosts.

    Args:
        browser: to open it in.
        served: its server.
        fragment: of the address.
        script: run in every document before its own scripts.
        expects: texts in messages of the console that are no errors of the page.
        options: of the browser's context, such as viewport.
    """
    context = browser.new_context(**{"viewport": {"width": 1180, "height": 900}, **options})
    context.set_default_timeout(_MILLISECONDS)
    context.add_init_script(script)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.extend([said.text] * (said.type == "error")))
    page.on(
        "request",
        lambda asked: problems.extend([asked.url] * (not asked.url.startswith(served.url))),
    )
    page.goto(f"{served.url}/{fragment}")
    yield page
    context.close()
    problems = [one for one in problems if not any(text in one for text in expects)]
    assert problems == []


def connected(page: Page) -> Page:
    """The page, once it knows the server's model."""
    expect(page.locator("#model")).to_contain_text("context of")
    return page


def choose(page: Page, mode: str) -> None:
    """Chooses what to do: race, write, compare or chat."""
    page.locator(f"input[name=mode][value={mode}]").check()


def fill(page: Page, **fields: str) -> None:
    """Fills fields of the form, and has the page notice."""
    for name, value in fields.items():
        page.locator(f"#{name}").fill(value)


def done(page: Page, state: str = "done") -> None:
    """Waits for the end of a run."""
    expect(page.locator("body")).to_have_attribute("data-state", state)


def run(page: Page, state: str = "done") -> None:
    """Presses the button and waits for the end."""
    page.locator("#run").click()
    expect(page.locator("body")).not_to_have_attribute("data-state", "idle")
    done(page, state)


def stop_the_clock(page: Page) -> None:
    """Has the page's clock stand still: of what it repeats while there is time, it does all."""
    page.evaluate("performance.now = () => 0")


# A clock of the page's animations, which stands still until a test sets `window.at`.
HELD_CLOCK = """(() => {
  window.at = 0;
  performance.now = () => window.at;
  const request = window.requestAnimationFrame.bind(window);
  window.requestAnimationFrame = (call) => request(() => call(window.at));
})()"""


def advance(page: Page, milliseconds: float) -> None:
    """Set the held clock of a page forward."""
    page.evaluate(f"window.at += {milliseconds}")


def fact(page: Page, name: str, lane: int = 0) -> str:
    """What stands beside a name under a lane's heading."""
    facts = page.locator(".lane").nth(lane).locator(".facts div")
    found = facts.filter(has=page.locator("dt", has_text=re.compile(f"^{name}$")))
    return found.locator("dd").inner_text()


def text_of(page: Page, lane: int = 0) -> str:
    """The generated text of a lane, as it is there."""
    tokens = page.locator(".lane").nth(lane).locator(".token").all_text_contents()
    return "".join(tokens)
