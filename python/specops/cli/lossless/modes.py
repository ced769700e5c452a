# SPDX-License-Identifier: Apache-2.0
"""Modes of requests: plain or with speculation, greedy or seeded."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from specops.cli.load.drafts import DraftCounts
from specops.cli.lossless.server import Server
from specops.cli.lossless.texts import Text

ALONE, BESIDE = "alone", "beside others"
GREEDY, SEEDED = "greedy", "seeded"
_PLAIN = "naive"  # specops' name for decoding without drafts


class Request(NamedTuple):
    """A request: GREEDY or SEEDED, its text, and the sampling fields."""

    sampling: str
    text: Text
    fields: dict[str, Any]


@dataclass
class Mode:
    """A way of decoding that is compared.

    Attributes:
        name: "plain", or the name of the kind of speculation.
        is_drafted: whether it speculates.
        server: server that receives the requests.
        fields: fields added to the requests of this mode.
        drafts: counts of the drafts that this mode verified; None if not reported.
    """

    name: str
    is_drafted: bool
    server: Server
    fields: Mapping[str, Any]
    drafts: DraftCounts | None = None


def requests_of(
    texts: Sequence[Text], *, max_tokens: int, temperature: float, seed: int
) -> list[Request]:
    """Return a greedy and a seeded request per text, in turn, so that a batch has both.

    At temperature 0, return greedy requests only.
    """
    requests = []
    for index, text in enumerate(texts):
        greedy = {"max_tokens": max_tokens, "temperature": 0}
        seeded = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed + index}
        requests.append(Request(GREEDY, text, greedy))
        if temperature > 0:
            requests.append(Request(SEEDED, text, seeded))
    return requests


def modes_of(
    server: Server,
    baseline: Server | None,
    plain_body: dict[str, Any] | None,
    drafted_bodies: Sequence[dict[str, Any]],
) -> list[Mode]:
    """Return plain decoding, then every mode with speculation.

    Without a way to turn speculation off, plain decoding is the only mode.

    Args:
        server: the server that speculates.
        baseline: a server that does not speculate; None: use `server`.
        plain_body: fields that turn speculation off; None: specops' field, on a specops server.
        drafted_bodies: fields that turn it on; if empty, one mode per method on a specops server,
            else one mode without further fields.

    Raises:
        ValueError: a server does not answer, or the two have no endpoint in common.
    """
    of_plain = server if baseline is None else baseline
    for each_server in {
        id(each_server): each_server for each_server in (server, of_plain)
    }.values():
        each_server.connect()
    common = [endpoint for endpoint in server.fields if endpoint in of_plain.fields]
    if not common:
        raise ValueError(
            f"--url {server.url} and --baseline-url {of_plain.url} support no common endpoint"
        )
    for each_server in (server, of_plain):
        each_server.fields = {endpoint: each_server.fields[endpoint] for endpoint in common}
    turns_off = plain_body
    if turns_off is None and of_plain.methods:
        turns_off = {"speculative_config": {"method": _PLAIN}}
    plain = Mode("plain", False, of_plain, turns_off or {})
    if turns_off is None and baseline is None:
        return [plain]
    bodies: list[tuple[str, dict[str, Any]]] = [(json.dumps(body), body) for body in drafted_bodies]
    if not bodies:
        # By default specops does not verify drafts that would save no time; make it verify all.
        bodies = [
            (name, {"speculative_config": {"method": name, "adaptive_verification": False}})
            for name in server.methods
            if name != _PLAIN
        ]
    return [plain, *(Mode(name, True, server, body) for name, body in bodies or [("drafts", {})])]
