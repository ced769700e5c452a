# SPDX-License-Identifier: Apache-2.0
"""Take the screenshots of the page for docs/: `python -m tools.screenshots`.

The program also records the race (plain decoding against drafts) that the page replays on the first
visit.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from playwright.sync_api import Browser, Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
RECORDED = ROOT / "python/specops/server/playground/recorded.json"
RACE = {"mode": "race", "method": "ngram", "k": "4", "tokens": "96"}
RECORDED_RACES = 8
MOST_BYTES = 200_000  # maximum size of a picture
START_SECONDS = 120.0
SEED = "6"


def main() -> None:
    """Serve the bundled model, and take the screenshots."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("Chromium must be installed to take screenshots")
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium cannot sandbox as root
    with serving() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=sandbox)
        record(browser, url, RECORDED)
        race(browser, url, DOCS / "page.png")
        browser.close()


@contextmanager
def serving() -> Iterator[str]:
    """Run a server of the bundled model in its own process; yield its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "specops.engine", "--port", str(port), "--log-level", "error"]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}/"
    try:
        end = time.monotonic() + START_SECONDS
        while not answers(url):
            if process.poll() is not None or time.monotonic() > end:
                sys.exit("the server did not start")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def answers(url: str) -> bool:
    """Return whether the server is healthy."""
    try:
        urllib.request.urlopen(f"{url}health", timeout=5).close()
    except (urllib.error.URLError, OSError):
        return False
    return True


def run(page: Page, url: str, **settings: str) -> None:
    """Run the page twice with the settings of a link; the first run warms up caches."""
    page.goto(f"{url}#{urlencode({'seed': SEED, **settings})}")
    expect(page.locator("#model")).to_contain_text("context of")
    for _ in range(2):
        page.locator("#run").click()
        expect(page.locator("body")).not_to_have_attribute("data-state", "idle")
        expect(page.locator("body")).to_have_attribute("data-state", "done", timeout=60_000)
        expect(page.locator("#status")).to_contain_text("Done")


def save(page: Page, path: Path, *, above: str = "#history") -> None:
    """Save a screenshot of the page down to the element `above`, by default the results' end."""
    page.mouse.move(0, 0)
    end = page.locator(above).evaluate("one => one.getBoundingClientRect().top + scrollY")
    width = page.evaluate("innerWidth")
    clip: Any = {"x": 0, "y": 0, "width": width, "height": end}
    page.screenshot(path=path, full_page=True, clip=clip)
    size = path.stat().st_size
    if size > MOST_BYTES:
        sys.exit(f"{path.name} must be at most {MOST_BYTES} bytes large, got {size}")
    print(f"{path.name}: {size} bytes")


def machine() -> str:
    """Return a description of the CPUs that the server runs on."""
    names = re.findall(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{len(os.sched_getaffinity(0))} threads of {names[0] if names else 'this machine'}"


def events_of(body: str) -> list[Any]:
    """Return the step events in a stream's body, without fields that the page does not read."""
    events = []
    for frame in body.split("\n\n"):
        data = frame.removeprefix("data: ")
        if not data or data == "[DONE]":
            continue
        event = json.loads(data)
        choices = [
            {
                "step": one.get("step"),
                "logprobs": {
                    name: values
                    for name, values in (one["logprobs"] or {}).items()
                    if name in ("token_logprobs", "top_logprobs")
                },
                "finish_reason": one["finish_reason"],
            }
            for one in event["choices"]
        ]
        events += [{"choices": choices}] * bool(choices)
    return events


def last_second(events: list[Any]) -> float:
    """Return the time at which the last step of a stream ended, in seconds."""
    return float(
        max(one["step"]["seconds"] for event in events for one in event["choices"] if one["step"])
    )


def record(browser: Browser, url: str, path: Path) -> None:
    """Run several races of the page's first example, and write the fastest one to a JSON file.

    The file also holds the prompt and a description of the machine.
    """
    page = browser.new_page(viewport={"width": 1040, "height": 900})
    responses: list[Any] = []
    page.on("response", lambda one: responses.extend([one] * ("/v1/completions" in one.url)))
    for _ in range(RECORDED_RACES):
        run(page, url, alone="false", alternatives="3", **RACE)
    races = []
    for pair in zip(responses[::2], responses[1::2], strict=True):
        bodies = [one.request.post_data_json for one in pair]
        runs = [
            {"method": body["speculative_config"]["method"], "events": events_of(one.text())}
            for body, one in zip(bodies, pair, strict=True)
        ]
        races.append(sorted(runs, key=lambda one: one["method"] != "naive"))
    page.close()
    quickest = min(races, key=lambda runs: max(last_second(one["events"]) for one in runs))
    recording = {"prompt": bodies[0]["prompt"], "machine": machine(), "runs": quickest}
    path.write_text(json.dumps(recording, separators=(",", ":"), ensure_ascii=False) + "\n")
    print(f"{path.name}: {path.stat().st_size} bytes")


def race(browser: Browser, url: str, path: Path) -> None:
    """Take the README's screenshot: plain decoding against n-gram drafts, without the charts."""
    page = browser.new_page(viewport={"width": 1040, "height": 900})
    run(page, url, **RACE)
    page.evaluate("document.activeElement.blur()")
    save(page, path, above="#charts")
    page.close()


if __name__ == "__main__":
    main()
