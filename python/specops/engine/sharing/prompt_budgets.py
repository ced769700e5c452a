# SPDX-License-Identifier: Apache-2.0
"""Budgets of a step's time for the prompts of each client.

A single client gets all of the time. Several clients with prompts get equal shares, so that a short
prompt does not wait for all long prompts of another client. Requests of other clients that decode
in the step get their tokens only when the step ends. So a client's prompts may take only as much
time as the decoding rows of the other clients. Long prompts are limited in the same way if the step
completes another client's short prompt. A row with prompt log-probabilities takes more time, so
such a prompt gets fewer rows. Budgets only decide when a token is computed; they never change a
token.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from specops.engine.request import Request
from specops.engine.sharing.row_costs import RowCosts

_EPSILON = 1e-6  # rows; makes up for the rounding of quotients


class PromptBudgets:
    """Time that the prompts of each client may still take in one step.

    Args:
        prompts: requests that may get rows, in scheduling order.
        costs: costs of steps and rows.
        decoding: decode rows of the step, by client.
        max_rows: maximum number of prompt rows of the step.
        max_rows_beside: the same limit for a step from which another client gets tokens, in rows
            without log-probabilities; None: `max_rows`.
    """

    def __init__(
        self,
        prompts: Iterable[Request],
        *,
        costs: RowCosts,
        decoding: Mapping[str, int],
        max_rows: int,
        max_rows_beside: int | None,
    ) -> None:
        self._costs = costs
        needed: Counter[str] = Counter()  # rows by client
        time: dict[str, float] = {}  # time of these rows
        least: dict[str, float] = {}  # time of one of these rows, at most
        for request in prompts:
            client, row = client_of(request), costs.of_prompt_row(request)
            rows = len(request.token_ids) - request.num_computed
            needed[client] += rows
            time[client] = time.get(client, 0.0) + rows * row
            least[client] = max(least.get(client, 0.0), row)
        most = max_rows * costs.row
        ending = {one for one in needed if time[one] <= most / len(needed)}
        beside = [one for one in needed if set(decoding) - {one} or (ending and one not in ending)]
        bounds = {one: time[one] for one in beside}
        shared = most
        if max_rows_beside is not None:
            shared = min(max_rows_beside * costs.row, most)
            of_others = Counter(decoding) + Counter({one: needed[one] for one in ending})
            for one in beside:
                others = of_others.total() - of_others[one]
                bounds[one] = min(time[one], costs.of_step(others))
        self._left = _shared(shared, bounds, least)
        rest = {one: time[one] for one in needed if one not in beside}
        self._left |= _shared(most - sum(self._left.values()), rest, least)

    def left(self, request: Request) -> int:
        """Return the number of rows that a prompt may still get."""
        time = self._left.get(client_of(request), 0.0)
        return int(time / self._costs.of_prompt_row(request) + _EPSILON)

    def take(self, request: Request, rows: int) -> None:
        """Deduct the time of `rows` rows of a prompt from its client's share."""
        self._left[client_of(request)] -= rows * self._costs.of_prompt_row(request)


def client_of(request: Request) -> str:
    """Return the outermost owner of a request; requests without an owner count as one client."""
    return request.owners[0] if request.owners else ""


def _shared(
    time: float, needed: Mapping[str, float], least: Mapping[str, float]
) -> dict[str, float]:
    """Divide time equally among clients, with at least `least` for each.

    Time that a client does not need goes to the others.
    """
    parts = {}
    for count, client in zip(
        range(len(needed), 0, -1), sorted(needed, key=lambda one: needed[one]), strict=True
    ):
        parts[client] = min(max(time / count, least[client]), needed[client])
        time -= parts[client]
    return parts
