# SPDX-License-Identifier: Apache-2.0
"""Arrival times of requests: at a fixed rate, or with a fixed number in flight."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence

from specops.cli.load.answers import Answer, Clock

Send = Callable[[int, float], Awaitable[Answer]]  # index of the request, and when it is due
Sleep = Callable[[float], Awaitable[None]]


def due_times(count: int, rate: float, *, even: bool, seed: int) -> list[float]:
    """Return the times at which to send requests, in seconds from the beginning.

    Args:
        count: number of requests.
        rate: requests per second.
        even: True for equal gaps; False for a Poisson process, like requests of many independent
            clients.
        seed: seed of the random gaps.
    """
    numbers = random.Random(seed)
    times = []
    now = 0.0
    for _ in range(count):
        times.append(now)
        now += 1 / rate if even else numbers.expovariate(rate)
    return times


async def send_at(times: Sequence[float], send: Send, clock: Clock, sleep: Sleep) -> list[Answer]:
    """Send each request when it is due, whether or not earlier ones are answered.

    Latencies count from the due time even if a request could not be sent in time. Otherwise a
    server that stalls would look faster, because fewer requests would see the stall.
    """
    begin = clock()
    tasks = []
    for index, time in enumerate(times):
        while (wait := begin + time - clock()) > 0:
            await sleep(wait)
        tasks.append(asyncio.ensure_future(send(index, begin + time)))
    return list(await asyncio.gather(*tasks))


async def keep_busy(count: int, concurrency: int, send: Send, clock: Clock) -> list[Answer]:
    """Keep `concurrency` requests in flight: each answer triggers the next request."""
    indices = iter(range(count))

    async def client(indices: Iterator[int]) -> list[Answer]:
        return [await send(index, clock()) for index in indices]

    of_clients = await asyncio.gather(*(client(indices) for _ in range(concurrency)))
    return [answer for answers in of_clients for answer in answers]
