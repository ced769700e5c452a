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
    """The answer to one request; all times are seconds of the same clock.

    Attributes:
        due: when the request should have been sent; latencies count from here.
        sent: when the request was sent.
        first: when the first text arrived; None if no text arrived.
        last: when the last text arrived.
        end: when the answer was complete.
        prompt_tokens: as reported by the server; None if not reported.
        completion_tokens: as reported by the server; otherwise the number of pieces of text.
        pieces: number of events with text.
        num_drafts: number of the server's steps with drafts; None if not reported, like the next
            two.
        num_draft_tokens: drafts that were verified.
        num_accepted_tokens: drafts that were accepted.
        timings: seconds by the server's clock, as specops reports them; None if not reported.
        error: reason why there is no answer; None on success.
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
        """Seconds from `due` to the first text; None if no text arrived."""
        return None if self.first is None else self.first - self.due

    @property
    def seconds_per_token(self) -> float | None:
        """Mean seconds per token after the first text; None for fewer than two tokens."""
        if self.first is None or self.last is None or self.completion_tokens < 2:
            return None
        return (self.last - self.first) / (self.completion_tokens - 1)

    @property
    def seconds(self) -> float:
        """Seconds from `due` to the end of the answer."""
        return self.end - self.due


async def ask(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, Any], due: float, clock: Clock
) -> Answer:
    """Send a request and read its answer to the end.

    Args:
        session: session that keeps connections open.
        url: URL of the endpoint.
        body: JSON body of the request, with `stream`.
        due: when the request should be sent: now, or shortly before.
        clock: clock of all times.

    Returns:
        The answer. A failure is recorded in its `error`; nothing is raised.
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
        answer.error = f"the stream is not in OpenAI's format: {error!r}"
    answer.end = answer.end or clock()
    return answer


def reason(error: Exception) -> str:
    """Return the reason of a failed connection, as the OS's error message if possible."""
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        return f"cannot connect: {os.strerror(number)}" if number else "cannot connect"
    return f"{type(error).__name__}: {error}".rstrip(": ")


async def _read(answer: Answer, response: aiohttp.ClientResponse, clock: Clock) -> None:
    async for data in _events(response):
        if answer.end:  # only read the rest of the body, so that the connection can be reused
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
    """Yield the data of server-sent events."""
    rest = b""
    async for piece in response.content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _text(choice: Mapping[str, Any]) -> str:
    """Return the new text of a choice; in a chat, reasoning and tool calls count as text."""
    if "delta" not in choice:
        return str(choice.get("text") or "")
    delta = choice["delta"] or {}
    parts = (delta.get("content"), delta.get("reasoning_content"), delta.get("reasoning"))
    return "".join(str(part) for part in (*parts, delta.get("tool_calls")) if part)


def _take_counts(answer: Answer, event: Mapping[str, Any]) -> None:
    """Copy counts and timings of an event to the answer; most are in the last event."""
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
