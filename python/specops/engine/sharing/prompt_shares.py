# SPDX-License-Identifier: Apache-2.0
"""How many rows each client's prompts have in a step.

Whoever is alone has all of them. Several clients with prompts have equal parts, so that a short
prompt is not behind all of somebody's long ones. Beside another client's decoding requests, prompts
have fewer: those wait for the end of the step. So have long prompts beside another client's whose
equal part is enough for its end. They still have far more than decoding requests get of each
other's steps (turns.py), or a long prompt would never end.
None of this can change a token: it only decides when.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Set

from specops.engine.request import Request


class PromptShares:
    """The rows that clients' prompts may still have in one step.

    Args:
        prompts: requests that are to have such rows, in the order of their turn.
        decoding: clients of whom requests decode in the step.
        max_rows: that prompts may have in the step.
        max_beside: that they may have beside a client who gets tokens from it; None: all.
    """

    def __init__(
        self,
        prompts: Iterable[Request],
        *,
        decoding: Set[str],
        max_rows: int,
        max_beside: int | None,
    ) -> None:
        wanted: Counter[str] = Counter()
        for request in prompts:
            wanted[client_of(request)] += len(request.token_ids) - request.num_computed
        bound = max_rows if max_beside is None else min(max_beside, max_rows)
        ending = {one for one, rows in wanted.items() if rows <= max_rows // len(wanted)}
        beside = [one for one in wanted if decoding - {one} or (ending and one not in ending)]
        others = {client: rows for client, rows in wanted.items() if client not in beside}
        self._left = _shared(bound, {client: wanted[client] for client in beside})
        self._left |= _shared(max_rows - sum(self._left.values()), others)

    def left(self, request: Request) -> int:
        """How many rows a prompt may have."""
        return self._left.get(client_of(request), 0)

    def take(self, request: Request, rows: int) -> None:
        """Gives a prompt some of these rows."""
        self._left[client_of(request)] -= rows


def client_of(request: Request) -> str:
    """The widest owner of a request; all without one are one client."""
    return request.owners[0] if request.owners else ""


def _shared(rows: int, wanted: Mapping[str, int]) -> dict[str, int]:
    """Equal parts of some rows, at least one each; what one does not want, the others get."""
    parts = {}
    for count, client in zip(
        range(len(wanted), 0, -1), sorted(wanted, key=lambda one: wanted[one]), strict=True
    ):
        parts[client] = min(max(rows // count, 1), wanted[client])
        rows -= parts[client]
    return parts
