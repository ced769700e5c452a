# SPDX-License-Identifier: Apache-2.0
"""Delivery of the engine's results to their jobs, a few for each client at a time.

Each result wakes a task that writes an answer or a piece of one. Delivering all results of a step
at once would block the event loop until all of these tasks have run.
"""

import asyncio
from collections import deque
from collections.abc import Iterable

from specops.api.messages import Accepted
from specops.server.jobs import ChoiceOutput, Job

Event = tuple[Job, ChoiceOutput | Accepted | Exception]

# Results delivered per client before the event loop looks for other work. Looking costs about as
# much as waking a task, so it remains a small part of the cost with any number of clients.
_AT_ONCE = 8


class Outbox:
    """Queues of results by client, in order. Use it on the event loop only.

    Args:
        loop: the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queues: dict[str, deque[Event]] = {}  # by client; no queue is empty
        self._is_due = False  # whether _hand_out is scheduled

    def add(self, events: Iterable[Event]) -> None:
        """Queue results, and deliver the first of them unless a delivery is already scheduled."""
        for job, event in events:
            self._queues.setdefault(job.client, deque()).append((job, event))
        if not self._is_due:
            self._hand_out()

    def _hand_out(self) -> None:
        # Tasks run in the order in which they are woken, so clients with few results come first.
        for client, waiting in sorted(self._queues.items(), key=lambda item: len(item[1])):
            for _ in range(min(_AT_ONCE, len(waiting))):
                job, event = waiting.popleft()
                job.put(event)
            if not waiting:
                del self._queues[client]
        self._is_due = bool(self._queues)
        if self._is_due:
            self._loop.call_soon(self._hand_out)
