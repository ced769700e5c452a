# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where a package is missing, nothing else is imported)
"""The page in Debian's Firefox, by WebDriver BiDi, because Playwright cannot drive it."""

import asyncio
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "prometheus_client", "jinja2", "aiohttp"):
    pytest.importorskip(name)

import aiohttp
from fake_engine import FakeEngine
from serving import serving

pytestmark = pytest.mark.ci

FIREFOX = shutil.which("firefox-esr") or shutil.which("firefox")

# Without these preferences, Firefox contacts its maker's hosts.
_PREFERENCES = (
    "app.normandy.enabled",
    "network.captive-portal-service.enabled",
    "network.connectivity-service.enabled",
    "datareporting.healthreport.uploadEnabled",
)


class Page:
    """A page, and the errors in its console."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._number = socket, 0
        self._context = ""
        self.errors: list[str] = []

    async def begin(self) -> None:
        """Begin a session with the one open page."""
        await self.send("session.new", capabilities={})
        await self.send("session.subscribe", events=["log.entryAdded"])
        tree = await self.send("browsingContext.getTree")
        self._context = tree["contexts"][0]["context"]

    async def send(self, method: str, **params: Any) -> Any:
        """Return a command's result, and record errors that are logged meanwhile."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            reply = await self._socket.receive_json()
            if reply.get("method") == "log.entryAdded" and reply["params"]["level"] == "error":
                self.errors.append(reply["params"]["text"])
            if reply.get("id") == self._number:
                assert reply["type"] == "success", reply
                return reply["result"]

    async def open(self, url: str) -> None:
        await self.send("browsingContext.navigate", context=self._context, url=url, wait="complete")

    async def evaluate(self, expression: str) -> Any:
        target = {"context": self._context}
        reply = await self.send(
            "script.evaluate", expression=expression, target=target, awaitPromise=True
        )
        assert reply["type"] == "success", reply
        return reply["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true, for at most two minutes."""
        for _ in range(2400):
            if await self.evaluate(f"Boolean({expression})"):
                return
            await asyncio.sleep(0.05)
        state = await self.evaluate(
            'document.body.dataset.state + ": " + document.querySelector("main").innerText'
        )
        raise AssertionError(f"{expression}; {self.errors}; {state}")


@asynccontextmanager
async def firefox(profile: Path) -> AsyncIterator[Page]:
    """Run a Firefox without a window until the block ends."""
    assert FIREFOX is not None
    (profile / "user.js").write_text(
        "".join(f'user_pref("{one}", false);\n' for one in _PREFERENCES)
    )
    command = [FIREFOX, "--headless", "--no-remote", "--profile", str(profile)]
    process = subprocess.Popen(
        [*command, "--remote-debugging-port=0"], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        found = (re.search(r"BiDi listening on (ws://\S+)", line) for line in process.stderr)
        (url,) = next(one for one in found if one).groups()
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{url}/session", max_msg_size=0) as socket,
        ):
            page = Page(socket)
            await page.begin()
            yield page
    finally:
        process.kill()
        process.communicate()


def text(name: str) -> str:
    return f'document.getElementById("{name}").textContent'


async def use(url: str, profile: Path) -> None:
    """Visit the page for the first time, run a race and every method, and open the API page."""
    async with firefox(profile) as page:
        await page.open(url)
        await page.until(f'{text("model")}.includes("context of")')
        await page.until(f'{text("verdict-note")}.startsWith("A recorded race")')
        await page.until(f'{text("moment")} !== "0 ms"')
        for mode, result in (("race", "#identical.same"), ("compare", "#table tbody tr td")):
            await page.evaluate(f"document.querySelector('input[value={mode}]').click()")
            for field, value in (("prompt", "abcdefgh"), ("tokens", "12")):
                await page.evaluate(f'document.getElementById("{field}").value = "{value}"')
            await page.evaluate('document.getElementById("run").click()')
            await page.until('document.body.dataset.state === "done"')
            await page.until(f'document.querySelector("{result}")')
        await page.open(f"{url}/docs")
        await page.until('document.querySelectorAll(".route").length > 10')
        assert page.errors == []


@pytest.mark.skipif(FIREFOX is None, reason="Firefox is not installed (apt install firefox-esr)")
def test_page_works_in_firefox(tmp_path: Path) -> None:
    with serving(FakeEngine(step_seconds=0.002, most_accepted=2)) as served:
        run: Coroutine[Any, Any, None] = use(served.url, tmp_path)
        asyncio.run(asyncio.wait_for(run, 300))
