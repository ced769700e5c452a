# SPDX-License-Identifier: Apache-2.0
"""A fake server of OpenAI's streams with known delays, for tests of the load generator."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DRAFTS = {"num_drafts": 5, "num_draft_tokens": 20, "num_accepted_tokens": 15}  # per request


@dataclass
class Known:
    """Behavior of the server, and the requests that it received.

    Attributes:
        first: seconds before the first text.
        gap: seconds between texts.
        pieces: number of texts.
        tokens: token count in `usage`; None to omit it.
        text: content of each text.
        prefix: prefix of its draft counters; None if it has no metrics.
        refuse: status for requests whose prompt is "no".
        cut: whether it ends the stream early.
        bodies: received bodies.
        keys: API keys of these requests.
        url: address of the server.
    """

    first: float = 0.0
    gap: float = 0.0
    pieces: int = 3
    tokens: int | None = 3
    text: str = "x"
    prefix: str | None = None
    refuse: int = 400
    cut: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    url: str = ""

    def metrics(self) -> str:
        """Return its counters, beside another model's."""
        lines = []
        for name, count in DRAFTS.items():
            full = f"{self.prefix}:spec_decode_{name}"
            lines.append(f"# TYPE {full} counter")
            lines.append(f'{full}_total{{model_name="m"}} {7000 + count * len(self.bodies)}.0')
        return "\n".join(lines) + "\n"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    known: Known

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._send(200, json.dumps({"data": [{"id": "m"}]}))
        elif self.path == "/metrics" and self.known.prefix is not None:
            self._send(200, self.known.metrics())
        else:
            self._send(404, "nothing here")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.known.bodies.append(body)
        self.known.keys.append(self.headers["Authorization"])
        if body.get("prompt") == "no":
            self._send(self.known.refuse, json.dumps({"error": {"message": "as you wished"}}))
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        time.sleep(self.known.first)
        for place in range(self.known.pieces):
            if place:
                time.sleep(self.known.gap)
            self._event({"choices": [{"text": self.known.text}]})
        if not self.known.cut:
            if self.known.tokens is not None:
                usage = {"prompt_tokens": 4, "completion_tokens": self.known.tokens}
                self._event({"choices": [], "usage": usage})
            self._chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, body: dict[str, Any]) -> None:
        self._chunk(f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def known_server(known: Known) -> Iterator[Known]:
    """Serve until the block ends."""
    handler = type("Handler", (_Handler,), {"known": known})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    known.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield known
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
