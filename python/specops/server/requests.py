# SPDX-License-Identifier: Apache-2.0
"""One record per HTTP request: its id, the count of its answer, its log line and its trace."""

import logging
import re
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastapi import Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specops.server.api_error import ApiError

if TYPE_CHECKING:
    from specops.server.answers import Answer
    from specops.server.tracing import Tracing

logger = logging.getLogger(__name__)

_HEADER = "x-request-id"
# Ids that are safe in a header and in a log line; another id is replaced, not refused.
_SAFE = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_POLLED = ("/health", "/metrics")  # successful requests to these paths are logged at level debug
_CLIENT_LEFT = 499  # status in the log of a request whose client left before its answer
_MAX_PATH = _MAX_REASON = 200  # characters in a log line

# Values in error messages that quote no input.
_PLAIN_VALUE = (
    r"[-+]?[\d.]+(e[-+]?\d+)?|none|null|neither|both|on|off|True|False|None"
    "|an? (string|list|number|integer|boolean|object)"
)
_VALUE = re.compile(rf", got (?!(?:{_PLAIN_VALUE})(?![\w.])).*", re.DOTALL)
_QUOTE = re.compile(r"'[^']*'|\"[^\"]*\"")
_NAME = re.compile(r"[\w.+/:\[\]-]{1,64}", re.ASCII)


class Record:
    """State of one request, for its log line, its trace and the metrics.

    Attributes:
        id: the request's id.
        began: time of arrival, by `time.time_ns`.
        status: status of the answer; 0 before the answer begins.
        error: the error that ended the request, if any.
        answer: the answer that is being generated, if any.
    """

    __slots__ = ("answer", "began", "error", "id", "status")

    def __init__(self, id: str) -> None:
        self.id = id
        self.began = time.time_ns()
        self.status = 0
        self.error: ApiError | None = None
        self.answer: Answer[Any] | None = None

    @property
    def failure(self) -> ApiError | None:
        """The error that ended the request, or the stream of its answer; None without one."""
        if self.error is None and self.answer is not None:
            return self.answer.error
        return self.error


def reason_of(error: ApiError) -> str:
    """Return an error's message in one line, cut, and without values that a client sent.

    The message may quote a part of a prompt. Names of fields and models, numbers and types remain.
    """
    text = error.message
    if error.param and not _NAME.fullmatch(error.param):
        text = text.replace(error.param, "...")
    text = _VALUE.sub(", got ...", text.partition("\n")[0])
    text = re.sub(r"(the chat template refused the messages): .*", r"\1", text)
    text = _QUOTE.sub(lambda quote: quote[0] if _NAME.fullmatch(quote[0][1:-1]) else "'...'", text)
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    return text if len(text) <= _MAX_REASON else text[:_MAX_REASON] + "..."


class Requests:
    """ASGI middleware that keeps a `Record` per request, in `state["record"]`.

    It adds x-request-id to every answer: the client's own id, or a new one. It counts the answer,
    answers a request that fails with an exception, and writes a log line when the request ends.

    Args:
        app: the application.
        count: called with the method, the route (such as "/v1/models/{name:path}") and the status
            of an answer that begins; method "any" and route "none" if no route has the path.
        failed: makes the answer to a request that raised an exception.
        tracing: exports a span per request; None: no traces.
    """

    def __init__(
        self,
        app: ASGIApp,
        count: Callable[[str, str, int], None],
        failed: Callable[[Scope], Response],
        tracing: "Tracing | None" = None,
    ) -> None:
        self._app = app
        self._count = count
        self._failed = failed
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        sent = Headers(scope=scope).get(_HEADER, "")
        record = Record(sent if _SAFE.fullmatch(sent) else f"req-{uuid.uuid4().hex}")
        state = scope.setdefault("state", {})
        state["record"] = record
        is_gone: Callable[[], bool] = state.setdefault("is_gone", lambda: False)

        async def recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)[_HEADER] = record.id
                # Unknown paths and methods share one label, so that clients cannot create time
                # series.
                route = getattr(scope.get("route"), "path", "none")
                self._count(scope["method"] if route != "none" else "any", route, record.status)
            await send(message)

        try:
            await self._app(scope, receive, recorded)
        except Exception:
            logger.exception("request %s failed", record.id)
            if record.status:  # uvicorn closes the connection, so the client sees the failure
                raise
            state["record"] = record  # `Admission` has cleared the state
            await self._failed(scope)(scope, receive, recorded)
        finally:
            self._log(scope, record, has_left=is_gone())
            if self._tracing is not None and scope["path"].startswith("/v1/"):
                self._tracing.export(scope, record)
            # The error's traceback refers to `recorded`, and so to the record. Breaking the cycle
            # frees the request's objects without garbage collection.
            record.error = record.answer = None

    def _log(self, scope: Scope, record: Record, *, has_left: bool) -> None:
        status = record.status or _CLIENT_LEFT
        level = logging.WARNING if status >= 500 else logging.INFO
        if status < 400 and scope["path"] in _POLLED:
            level = logging.DEBUG
        if not logger.isEnabledFor(level):
            return
        path = scope.get("raw_path", b"").decode("ascii", "backslashreplace")[:_MAX_PATH]
        client = scope["client"][0] if scope.get("client") else "unknown"
        seconds = (time.time_ns() - record.began) / 1e9
        reason = "the client disconnected" if has_left else ""
        if record.failure is not None:
            reason = reason_of(record.failure)
        fields = {
            "request_id": record.id,
            "client": client,
            "method": scope["method"],
            "path": path,
            "status": status,
            "seconds": round(seconds, 4),
        }
        if reason:
            fields["reason"] = reason
        logger.log(
            level,
            "%s %s %s %d %.3f s %s%s",
            client,
            scope["method"],
            path,
            status,
            seconds,
            record.id,
            reason and f": {reason}",
            extra={"fields": fields},
        )


def note(scope: Scope, error: ApiError) -> None:
    """Record the error that ends a request."""
    record = scope.get("state", {}).get("record")
    if record is not None:
        record.error = error
