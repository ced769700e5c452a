# SPDX-License-Identifier: Apache-2.0
"""Thread pool with fair scheduling among clients."""

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")
_Work = Callable[[], T]


class FairThreads(Generic[T]):
    """Thread pool that no single client can fill.

    A client may use half (rounded up) of the threads that other clients leave free. Clients are
    served in round-robin order.

    Args:
        num_threads: number of threads.
        name: prefix of the threads' names.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._waiting: OrderedDict[str, deque[tuple[Future[T], _Work[T]]]] = OrderedDict()
        self._running: Counter[str] = Counter()  # by client
        self._is_closed = False
        self._lock = threading.Lock()

    def submit(self, client: str, work: _Work[T]) -> "Future[T]":
        """Queue a client's work; it runs as soon as the client may use a thread."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.setdefault(client, deque()).append((future, work))
            self._start()
        return future

    def shutdown(self) -> None:
        """Cancel work that has not begun, and do not wait for running work."""
        with self._lock:
            self._is_closed = True
            waiting = [future for queue in self._waiting.values() for future, _ in queue]
            self._waiting.clear()
        for future in waiting:
            future.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        """Start all work that may begin; the caller holds the lock."""
        while not self._is_closed and self._running.total() < self._num_threads:
            client = next(filter(self._may_run, self._waiting), None)
            if client is None:
                return
            queue = self._waiting.pop(client)
            future, work = queue.popleft()
            if queue:
                self._waiting[client] = queue  # moved to the end of the queue of clients
            self._running[client] += 1
            self._threads.submit(self._run, client, future, work)

    def _may_run(self, client: str) -> bool:
        num_own = self._running[client]
        free_of_others = self._num_threads - (self._running.total() - num_own)
        return num_own < (free_of_others + 1) // 2

    def _run(self, client: str, future: "Future[T]", work: _Work[T]) -> None:
        try:
            if future.set_running_or_notify_cancel():
                try:
                    result = work()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
        finally:
            with self._lock:
                self._running -= Counter([client])  # drops counts of 0
                self._start()
