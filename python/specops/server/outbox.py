# SPDX-License-Identifier: Apache-2.0
"""What steps have brought, on its way to those who wait for it: a few for each client at a time.

Each result wakes a task that writes an answer, or a piece of it. All of a step's at once would keep
the event loop from everything else for as long as they take, those who were refused most of all.
"""

import asyncio
from collections import deque
from collections.abc import Iterable

from specops.server.jobs import ChoiceOutput, Job
from specops.service.messages import Accepted

Event = tuple[Job, ChoiceOutput | Accepted | Exception]

# Of each client, before the event loop looks for other work. To look costs about as much as to wake
# a task, so that with many clients or few it is a small part.
_AT_ONCE = 8


class Outbox:
    """Results by client, in order. Lives on the event loop.

    Args:
        loop: the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queues: dict[str, deque[Event]] = {}  # none is empty
        self._is_due = False  # to hand out more

    def add(self, events: Iterable[Event]) -> None:
        """Takes results, and hands out the first of them unless others are before them."""
        for job, event in events:
            self._queues.setdefault(job.client, deque()).append((job, event))
        if not self._is_due:
            self._hand_out()

    def _hand_out(self) -> None:
        # Tasks run in the order in which they are woken: those of clients with few are first.
        for client, waiting in sorted(self._queues.items(), key=lambda item: len(item[1])):
            for _ in range(min(_AT_ONCE, len(waiting))):
                job, event = waiting.popleft()
                job.put(event)
            if not waiting:
                del self._queues[client]
        self._is_due = bool(self._queues)
        if self._is_due:
            self._loop.call_soon(self._hand_out)
