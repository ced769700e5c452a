# SPDX-License-Identifier: Apache-2.0
"""Client of a server with OpenAI's API: supported request fields, and answers."""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

from specops.cli.load.drafts import DraftCounts, read_counters
from specops.cli.load.replies import error_message, model_cards
from specops.cli.lossless.answers import Answer, read_answer
from specops.cli.lossless.texts import Text

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_ALTERNATIVES = 5
# Fields that request details of every token, the most detailed first; the first set of fields that
# the server accepts is used. vLLM reports token ids on request; llama.cpp always does; others
# ignore or refuse the field.
_DETAIL_FIELDS: dict[str, tuple[dict[str, Any], ...]] = {
    COMPLETIONS: (
        {"logprobs": _ALTERNATIVES, "return_token_ids": True},
        {"logprobs": _ALTERNATIVES},
        {"return_token_ids": True},
        {},
    ),
    CHAT: (
        {"logprobs": True, "top_logprobs": _ALTERNATIVES, "return_token_ids": True},
        {"logprobs": True, "top_logprobs": _ALTERNATIVES},
        {"logprobs": True},
        {"return_token_ids": True},
        {},
    ),
}
# No proxy is used: 127.0.0.1 must not go through one, and `specops bench` uses none either.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Unreachable(Exception):
    """Error: no answer was received; the message is the OS's reason."""


@dataclass
class Server:
    """A server and the requests that it supports.

    Attributes:
        url: base URL without /v1.
        key: bearer token, or None.
        timeout: seconds without a byte after which a request has failed.
        model: model name in requests; "": the first that the server lists.
        card: the model's entry in /v1/models.
        fields: endpoint -> fields added to its requests; only endpoints that accept requests.
        refusals: endpoint -> why it refuses requests, or requests with logprobs.
    """

    url: str
    key: str | None
    timeout: float
    model: str = ""
    card: Mapping[str, Any] = field(default_factory=dict)
    fields: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)

    @property
    def methods(self) -> list[str]:
        """Draft methods that requests can choose by `speculative_config`, from specops' card.

        Methods that draft from a parameter of the request are left out, since requests here do not
        set it.
        """
        if "speculative_config" not in self.card:
            return []
        needing_parameter = {
            drafter["name"]
            for drafter in self.card.get("drafters") or ()
            if drafter.get("parameter")
        }
        return [name for name in self.card.get("methods") or () if name not in needing_parameter]

    def connect(self) -> None:
        """Find the model, and the most detailed request that each endpoint accepts.

        Raises:
            ValueError: it is not an OpenAI-compatible server, or it refuses every request.
        """
        try:
            status, text = self._call("/v1/models")
            if status != 200:
                raise ValueError(f"{status}: {error_message(text)}")
            cards = model_cards(text)
        except (Unreachable, ValueError) as error:
            raise ValueError(f"no OpenAI-compatible server at {self.url}: {error}") from None
        self.model = self.model or cards[0]["id"]
        self.card = next((card for card in cards if card["id"] == self.model), {})
        for endpoint, options in _DETAIL_FIELDS.items():
            for fields in options:
                answer = self._send(endpoint, Text("", "Hello"), {**fields, "max_tokens": 1})
                if answer.error is None:
                    self.fields[endpoint] = fields
                    break
                if "logprobs" in fields or not fields:
                    self.refusals[endpoint] = answer.error
        if not self.fields:
            raise ValueError(
                f"the server at {self.url} refuses requests: {self.refusals[COMPLETIONS]}"
            )

    def send(self, text: Text, further: Mapping[str, Any]) -> Answer:
        """Return the answer to a text; a failure is recorded in its `error`, not raised."""
        endpoint = CHAT if text.kind == "chat" else COMPLETIONS
        if endpoint not in self.fields:
            (endpoint,) = self.fields
        return self._send(endpoint, text, {**self.fields[endpoint], **further})

    def _send(self, endpoint: str, text: Text, further: Mapping[str, Any]) -> Answer:
        body: dict[str, Any] = {"model": self.model, "prompt": text.prompt, **further}
        if endpoint == CHAT:
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        try:
            status, reply = self._call(endpoint, body)
            if status != 200:
                return Answer(error=f"{status}: {error_message(reply)}")
            return read_answer(json.loads(reply))
        except Unreachable as error:
            return Answer(error=str(error))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            return Answer(error=f"the answer is not in OpenAI's format: {error!r}")

    def counters(self) -> DraftCounts | None:
        """Return the draft counts of all requests so far; None if there are no such metrics."""
        try:
            status, text = self._call("/metrics")
            return read_counters(text) if status == 200 else None
        except (Unreachable, ValueError):
            return None

    def _call(self, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, str]:
        """Return the status and the text of a reply.

        Raises:
            Unreachable: there was no reply.
        """
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            try:
                with _OPENER.open(request, timeout=self.timeout) as reply:
                    return reply.status, reply.read().decode("utf-8", "replace")
            except urllib.error.HTTPError as error:
                return error.code, error.read().decode("utf-8", "replace")
        except urllib.error.URLError as error:
            raise Unreachable(f"cannot connect: {_reason(error.reason)}") from None
        except (OSError, HTTPException) as error:
            raise Unreachable(f"the connection was closed: {_reason(error)}") from None


def _reason(error: object) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
