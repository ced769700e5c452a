# SPDX-License-Identifier: Apache-2.0
"""Suffix drafts over HTTP, for an engine in another process or language: POST /v1/draft.

    python -m specops.integrations.draft_server --port 8600

The request is that of TensorRT-LLM's HTTP drafter (`ExternalAPIConfig(endpoint=...)`):

    {"request_id": 7, "prefix": [1, 2, 3], "end_id": 0, "max_sequence_length": 4096}

and the answer {"draft_tokens": [4, 5]}. The engine verifies the drafts, so that no answer can
change its text. Texts of earlier requests are drafted from as well.
"""

import argparse
import json
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from specops.suffix_tree import SuffixCache

PATH = "/v1/draft"
_FIELDS = ("request_id", "prefix", "end_id", "max_sequence_length", "max_draft_tokens")
_MAX_BODY = 64 << 20  # bytes
_MAX_TOKEN = 2**31 - 1


class Drafts:
    """Suffix drafts of requests that an engine names.

    Args:
        max_draft_tokens: maximum number of drafts of a call.
        max_requests: requests that may run at once; the one that waited longest ends first.
        max_tree_depth: as in `SuffixCache`.
    """

    def __init__(
        self, max_draft_tokens: int = 16, max_requests: int = 256, max_tree_depth: int = 64
    ) -> None:
        self._max_draft_tokens = max_draft_tokens
        self._max_requests = max_requests
        self._cache = SuffixCache(max_tree_depth=max_tree_depth)
        self._texts: OrderedDict[int | str, list[int]] = OrderedDict()
        self._lock = threading.Lock()

    def draft(self, body: Any) -> list[int]:
        """Return the drafts for a request.

        Args:
            body: the parsed JSON. `prefix` is the request's whole text; a text that does not extend
                the one of the last call begins a new request.

        Raises:
            ValueError: the body is not as documented.
        """
        request_id, prefix, end_id, count = self._read(body)
        with self._lock:
            before = self._texts.pop(request_id, None)
            if before is not None and prefix[: len(before)] != before:
                self._cache.stop(request_id)
                before = None
            if before is None:
                self._cache.start(request_id, prefix)
            else:
                self._cache.extend(request_id, prefix[len(before) :])
            self._texts[request_id] = prefix
            if len(self._texts) > self._max_requests:
                self._cache.stop(self._texts.popitem(last=False)[0])
            drafts: list[int] = list(self._cache.speculate(request_id, count).token_ids)
        return drafts[: drafts.index(end_id) + 1] if end_id in drafts else drafts

    def _read(self, body: Any) -> tuple[int | str, list[int], int | None, int]:
        """Return the id, the text, the token that ends a text, and the maximum number of drafts."""
        if not isinstance(body, dict):
            raise ValueError(f"the body must be an object, got {json.dumps(body)[:80]}")
        unknown = [name for name in body if name not in _FIELDS]
        if unknown:
            raise ValueError(f"fields must be of {', '.join(_FIELDS)}, got {', '.join(unknown)}")
        request_id, prefix = body.get("request_id"), body.get("prefix")
        if not isinstance(request_id, int | str) or isinstance(request_id, bool):
            raise ValueError(f"request_id must be an integer or a string, got {request_id!r}")
        if not isinstance(prefix, list) or not all(map(_is_token, prefix)):
            raise ValueError("prefix must be a list of token ids")
        end_id = body.get("end_id")
        if end_id is not None and (type(end_id) is not int):
            raise ValueError(f"end_id must be an integer or null, got {end_id!r}")
        count = self._max_draft_tokens
        for name, limit in (("max_draft_tokens", 0), ("max_sequence_length", len(prefix))):
            value = body.get(name)
            if value is None:
                continue
            if type(value) is not int or value < 0:
                raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")
            count = max(0, min(count, value - limit))
        return request_id, prefix, end_id, count


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_TOKEN


def make_server(drafts: Drafts, host: str, port: int) -> ThreadingHTTPServer:
    """Return a server of POST /v1/draft that is bound to an address.

    Raises:
        OSError: the address is in use or unknown.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            """Answer one request."""
            if self.path != PATH:
                self._answer(404, {"error": f"the path must be {PATH}, got {self.path}"})
                return
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal() or int(length) > _MAX_BODY:
                self.close_connection = True
                error = f"Content-Length must be at most {_MAX_BODY}, got {length!r}"
                self._answer(400, {"error": error})
                return
            try:
                found = drafts.draft(json.loads(self.rfile.read(int(length))))
            except (ValueError, RecursionError) as error:
                self._answer(400, {"error": str(error)})
                return
            self._answer(200, {"draft_tokens": found})

        def _answer(self, status: int, body: dict[str, Any]) -> None:
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing: there is a request per step."""

    return ThreadingHTTPServer((host, port), Handler)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until interrupted; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m specops.integrations.draft_server",
        description="Serve suffix drafts at POST /v1/draft.",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8600)
    parser.add_argument("--max-draft-tokens", type=int, default=16, metavar="K")
    args = parser.parse_args(arguments)
    try:
        server = make_server(Drafts(args.max_draft_tokens), args.host, args.port)
    except (OSError, OverflowError) as error:
        print(f"cannot serve at {args.host}:{args.port}: {error}", file=sys.stderr)
        return 2
    print(f"POST http://{args.host}:{server.server_address[1]}{PATH}", flush=True)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
