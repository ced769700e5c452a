# SPDX-License-Identifier: Apache-2.0
"""Peers from which pages may be fetched, and a pause for those that do not answer."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from specops.disaggregated.pages import KvTransferError
from specops.service.wire import Peer

_FIRST_PAUSE = 1.0  # seconds after the first failure; each further failure doubles the pause
_LONGEST_PAUSE = 30.0
_MAX_OUTAGES = 1024  # maximum number of recorded outages; the oldest is dropped


@dataclass
class _Outage:
    """Outage of a peer that did not answer.

    Attributes:
        count: failed attempts in a row; attempts that ran at the same time count as one.
        noted_at: time of the last of these failures.
        next_at: time from which the peer may be tried again.
    """

    count: int
    noted_at: float
    next_at: float


class Peers:
    """Configured peers. Methods may be called from any thread.

    A peer that did not answer is not tried again for one second; requests fail at once meanwhile.
    Then a single request tries the peer. Each further failure doubles the pause, up to 30 s.

    Args:
        allowed: the addresses that the operator has configured.
        attempt_seconds: time limit of an attempt after a failure; no other request tries the peer
            meanwhile.
        clock: clock in seconds.
    """

    def __init__(
        self,
        allowed: Sequence[Peer],
        attempt_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._allowed = allowed
        self._attempt_seconds = attempt_seconds
        self._clock = clock
        self._outages: dict[tuple[str, int], _Outage] = {}  # oldest first
        self._lock = threading.Lock()

    def require(self, host: str, port: int) -> None:
        """Refuse an address that is not configured.

        Raises:
            KvTransferError: the address is not configured.
        """
        if not any(peer.host == host and peer.first <= port <= peer.last for peer in self._allowed):
            raise KvTransferError(
                "KV transfer: remote_host and remote_port must be one of kv_peers, got "
                f"{host!r} and {port}"
            )

    @contextlib.contextmanager
    def attempt(self, host: str, port: int) -> Iterator[None]:
        """Run a `with` block that connects to a peer; an OSError in it marks the peer as away.

        Raises:
            KvTransferError: the peer is not configured, or did not answer recently.
        """
        self.require(host, port)
        begin = self._begin(host, port)
        try:
            yield
        except OSError:
            self._note_failure(host, port, begin)
            raise
        except KvTransferError:  # not an outage: the peer answered
            self._note_answer(host, port)
            raise
        self._note_answer(host, port)

    def _begin(self, host: str, port: int) -> float:
        """Return the current time, or raise KvTransferError if the peer must not be tried yet."""
        with self._lock:
            now = self._clock()
            outage = self._outages.get((host, port))
            if outage is not None:
                if now < outage.next_at:
                    raise KvTransferError(
                        f"KV transfer: {host}:{port} did not answer recently; "
                        f"the next attempt is in {outage.next_at - now:.1f} s"
                    )
                outage.next_at = now + self._attempt_seconds
            return now

    def _note_failure(self, host: str, port: int, begin: float) -> None:
        with self._lock:
            now = self._clock()
            outage = self._outages.pop((host, port), None)
            if outage is None:
                outage = _Outage(0, begin, now)
            if begin >= outage.noted_at:
                outage.count += 1
                pause = min(_FIRST_PAUSE * 2 ** min(outage.count - 1, 10), _LONGEST_PAUSE)
                outage.noted_at = now
                outage.next_at = now + pause
            self._outages[host, port] = outage
            if len(self._outages) > _MAX_OUTAGES:
                del self._outages[next(iter(self._outages))]

    def _note_answer(self, host: str, port: int) -> None:
        with self._lock:
            self._outages.pop((host, port), None)
