# SPDX-License-Identifier: Apache-2.0
"""Fake server with OpenAI's API, whose speculation has a flaw that the test chooses."""

import contextlib
import json
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = [f" w{number}" for number in range(50)]
CARD = {
    "id": "m",
    "methods": ["naive", "ngram", "prediction"],
    "drafters": [{"name": "ngram"}, {"name": "prediction", "parameter": "prediction"}],
    "speculative_config": {"method": "ngram"},
}
AT = 3  # index of the wrong token

# Requests of the command with four prompts: capability probes, and one pass of a mode.
_PROBES, _BATCH = 4, 8
_COUNTING = threading.Lock()


@dataclass
class Lossy:
    """Behavior of the server, and the requests that it received.

    Attributes:
        flaw: "text", "token", "logprob", "alternative" or "ending" of requests with drafts is
            wrong; None for nothing.
        in_batch: the flaw affects only requests in a batch, which is answered once all have
            arrived.
        seeded: the flaw affects only requests with a seed.
        plain: the flaw also affects requests without drafts.
        speculates: whether requests without a speculative_config have drafts.
        card: card of its model.
        shape: shape of logprobs: "completions", "chat" in both endpoints, or None to refuse them.
        has_ids: whether it reports token ids on request.
        counts: where it reports drafts: "metrics", "usage", "timings", "counters", or None.
        accepts: accepted drafts per request.
        refused: endpoints that it does not have.
        failing: number of the first request that fails, with status 500.
        hangs_up: close the connection instead of answering 500.
        bodies: received bodies.
        keys: API keys of these requests.
        url: address of the server.
    """

    flaw: str | None = None
    in_batch: bool = False
    seeded: bool = False
    plain: bool = False
    speculates: bool = True
    card: dict[str, Any] = field(default_factory=lambda: CARD)
    shape: str | None = "completions"
    has_ids: bool = False
    counts: str | None = "metrics"
    accepts: int = 2
    refused: tuple[str, ...] = ()
    failing: int | None = None
    hangs_up: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    url: str = ""
    meeting: threading.Barrier = field(default_factory=lambda: threading.Barrier(_BATCH))
    drafted: int = 0

    def drafts(self, body: dict[str, Any]) -> bool:
        """Return whether the request has drafts."""
        config = body.get("speculative_config")
        return self.speculates if config is None else config["method"] != "naive"

    def is_beside(self, number: int) -> bool:
        """Return whether a request belongs to a batch, from the order in which requests come.

        After the probes come the expected outputs, one by one, and for each mode first the requests
        alone, then beside others.
        """
        place = (number - _PROBES) // _BATCH
        return self.in_batch and place >= 2 and place % 2 == 0

    def reply(self, body: dict[str, Any], is_beside: bool) -> dict[str, Any]:
        """Return the answer to a request."""
        is_chat = "messages" in body
        prompt = body["messages"][0]["content"] if is_chat else body["prompt"]
        seed = body["seed"] if body.get("temperature") else None
        number = zlib.crc32(f"{prompt} {seed}".encode())
        ids = [(number >> place) % 50 for place in range(body["max_tokens"])]
        logprobs = [-0.5 - one / 128 for one in ids]
        tops = [
            {WORDS[one]: p, WORDS[(one + 1) % 50]: p - 1.0}
            for one, p in zip(ids, logprobs, strict=True)
        ]
        ending = "length"
        flaw = self.flaw if self._is_wrong(body, is_beside) and len(ids) > AT else None
        if flaw == "token":
            ids[AT] = (ids[AT] + 1) % 50
            logprobs[AT] -= 1.0
        if flaw == "logprob":
            logprobs[AT] = tops[AT][WORDS[ids[AT]]] = logprobs[AT] + 2.0**-24
        if flaw == "alternative":
            tops[AT][WORDS[(ids[AT] + 1) % 50]] += 2.0**-24
        if flaw == "ending":
            ending = "stop"
        words = [WORDS[one] for one in ids]
        text = "".join(words)[: -1 if flaw == "text" else None]
        choice: dict[str, Any] = {"finish_reason": ending}
        choice |= {"message": {"content": text}} if is_chat else {"text": text}
        choice["logprobs"] = None
        if "logprobs" in body and (self.shape == "chat" or is_chat):
            choice["logprobs"] = {
                "content": [
                    {
                        "token": word,
                        "logprob": p,
                        "top_logprobs": [{"token": t, "logprob": q} for t, q in top.items()],
                    }
                    for word, p, top in zip(words, logprobs, tops, strict=True)
                ]
            }
        elif "logprobs" in body:
            names = ("tokens", "token_logprobs", "top_logprobs")
            choice["logprobs"] = dict(zip(names, (words, logprobs, tops), strict=True))
        if self.has_ids and body.get("return_token_ids"):
            choice["token_ids"] = ids
        return {"choices": [choice], **self._counts(body)}

    def _is_wrong(self, body: dict[str, Any], is_beside: bool) -> bool:
        return (
            (self.plain or self.drafts(body))
            and (not self.in_batch or is_beside)
            and (not self.seeded or "seed" in body)
        )

    def _counts(self, body: dict[str, Any]) -> dict[str, Any]:
        accepted = self.accepts if self.drafts(body) else 0
        rejected = 1 if self.drafts(body) else 0
        self.drafted += accepted
        names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
        values = (1, accepted + rejected, accepted)
        predictions = {"accepted_prediction_tokens": accepted}
        predictions["rejected_prediction_tokens"] = rejected
        reports: dict[str | None, dict[str, Any]] = {
            "metrics": {"metrics": {"speculative_decoding": dict(zip(names, values, strict=True))}},
            "usage": {"usage": {"completion_tokens_details": predictions}},
            "timings": {"timings": {"draft_n": values[1], "draft_n_accepted": accepted}},
        }
        return reports.get(self.counts, {})


class _Handler(BaseHTTPRequestHandler):
    lossy: Lossy

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._send(200, json.dumps({"data": [self.lossy.card]}))
        elif self.path == "/metrics" and self.lossy.counts == "counters":
            count = self.lossy.drafted
            names = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
            lines = [f'vllm:{name}_total{{model="m"}} {count}.0' for name in names]
            self._send(200, "\n".join(lines))
        else:
            self._send(404, "nothing here")

    def do_POST(self) -> None:
        lossy = self.lossy
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with _COUNTING:
            number = len(lossy.bodies)
            lossy.bodies.append(body)
        lossy.keys.append(self.headers["Authorization"])
        if self.path in lossy.refused:
            self._send(404, "no such path")
        elif lossy.shape is None and "logprobs" in body:
            self._send(400, json.dumps({"error": {"message": "logprobs are not for you"}}))
        elif not lossy.has_ids and "return_token_ids" in body:
            self._send(400, json.dumps({"error": {"message": "return_token_ids is unknown"}}))
        elif lossy.failing is not None and len(lossy.bodies) > lossy.failing:
            if not lossy.hangs_up:
                self._send(500, json.dumps({"error": {"message": "broken"}}))
        else:
            if is_beside := lossy.is_beside(number):
                lossy.meeting.wait(300)
            self._send(200, json.dumps(lossy.reply(body, is_beside)))

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def lossy_server(lossy: Lossy) -> Iterator[Lossy]:
    """Serve until the block ends."""
    handler = type("Handler", (_Handler,), {"lossy": lossy})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    lossy.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield lossy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
