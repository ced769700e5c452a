# SPDX-License-Identifier: Apache-2.0
"""One request to an OpenAI-compatible server: its streamed answer, with arrival times."""

import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from specops.cli.load.drafts import counts_in
from specops.cli.load.replies import error_message

Clock = Callable[[], float]


@dataclass
class Answer:
    """The answer to one request, with times by one clock.

    Attributes:
        due: when it was to be sent, from which its latencies count.
        sent: when it was.
        first: when the first text came; None: none did.
        last: when the last text came.
        end: when the answer was over.
        prompt_tokens: as the server counts them; None: not reported.
        completion_tokens: the same for the text; if not reported, the pieces of text.
        pieces: of text that came.
        num_drafts: steps of the server with drafts; None, like the next two: not reported.
        num_draft_tokens: that these steps verified.
        num_accepted_tokens: of them.
        timings: seconds by the server's clock, as specops reports them; empty: not reported.
        error: why there is no answer; None: there is one.
    """

    due: float
    sent: float = 0.0
    first: float | None = None
    last: float | None = None
    end: float = 0.0
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    pieces: int = 0
    num_drafts: int | None = None
    num_draft_tokens: int | None = None
    num_accepted_tokens: int | None = None
    timings: Mapping[str, float | None] | None = None
    error: str | None = None

    @property
    def seconds_to_first(self) -> float | None:
        """Until the first text."""
        return None if self.first is None else self.first - self.due

    @property
    def seconds_per_token(self) -> float | None:
        """Between the first text and the last, for each token but one."""
        if self.first is None or self.last is None or self.completion_tokens < 2:
            return None
        return (self.last - self.first) / (self.completion_tokens - 1)

    @property
    def seconds(self) -> float:
        """Until the answer was over."""
        return self.end - self.due


async def ask(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, Any], due: float, clock: Clock
) -> Answer:
    """Sends a request and reads its answer to the end.

    Args:
        session: keeps connections.
        url: of the endpoint.
        body: of the request, with `stream`.
        due: when it should be sent; that is now, or a little ago.
        clock: of all times.

    Returns:
        The answer. A failure is in its `error` and raises nothing.
    """
    answer = Answer(due, sent=clock())
    try:
        async with session.post(url, json=body) as response:
            if response.status == 200:
                await _read(answer, response, clock)
            else:
                answer.error = f"{response.status}: {error_message(await response.text())}"
    except (aiohttp.ClientError, TimeoutError) as error:
        answer.error = reason(error)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        answer.error = f"the stream is not OpenAI's: {error!r}"
    answer.end = answer.end or clock()
    return answer


def reason(error: Exception) -> str:
    """Why a server was not reached or stopped answering, in the system's words if it has some."""
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        return f"cannot connect: {os.strerror(number)}" if number else "cannot connect"
    return f"{type(error).__name__}: {error}".rstrip(": ")


async def _read(answer: Answer, response: aiohttp.ClientResponse, clock: Clock) -> None:
    async for data in _events(response):
        if answer.end:  # to the end of the body, or the connection could not serve another
            continue
        if data == b"[DONE]":
            answer.end = clock()
            continue
        event = json.loads(data)
        if event.get("error"):
            answer.error = str(event["error"].get("message", event["error"]))
            answer.end = clock()
            continue
        if any(_text(choice) for choice in event.get("choices", ())):
            answer.last = clock()
            answer.first = answer.last if answer.first is None else answer.first
            answer.pieces += 1
            if answer.prompt_tokens is None:
                answer.completion_tokens = answer.pieces
        _take_counts(answer, event)
    if not answer.end:
        answer.error = "the stream ended before [DONE]"


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of server-sent events."""
    rest = b""
    async for piece in response.content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _text(choice: Mapping[str, Any]) -> str:
    """Of a completion's choice or a chat's; thinking and calls are text, too."""
    if "delta" not in choice:
        return str(choice.get("text") or "")
    delta = choice["delta"] or {}
    parts = (delta.get("content"), delta.get("reasoning_content"), delta.get("reasoning"))
    return "".join(str(part) for part in (*parts, delta.get("tool_calls")) if part)


def _take_counts(answer: Answer, event: Mapping[str, Any]) -> None:
    """Takes over the fields next to the choices, most of them in the last event."""
    usage = event.get("usage")
    if usage:
        answer.prompt_tokens = int(usage["prompt_tokens"])
        answer.completion_tokens = int(usage["completion_tokens"])
    counts = counts_in(event)
    if counts is not None:
        answer.num_drafts = counts.num_drafts
        answer.num_draft_tokens = counts.num_draft_tokens
        answer.num_accepted_tokens = counts.num_accepted_tokens
    if event.get("timings"):
        answer.timings = event["timings"]
