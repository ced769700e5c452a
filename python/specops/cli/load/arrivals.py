# SPDX-License-Identifier: Apache-2.0
"""When requests are sent: at a fixed rate, or with a fixed number running at once."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence

from specops.cli.load.answers import Answer, Clock

Send = Callable[[int, float], Awaitable[Answer]]  # which request, and when it is due
Sleep = Callable[[float], Awaitable[None]]


def due_times(count: int, rate: float, *, even: bool, seed: int) -> list[float]:
    """Seconds from the beginning at which requests are due.

    Args:
        count: of requests.
        rate: requests a second.
        even: the same time between any two; otherwise they come as a Poisson process has it, as
            those of many clients that know nothing of one another do.
        seed: of the random gaps.
    """
    numbers = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += 1 / rate if even else numbers.expovariate(rate)
    return times


async def send_at(times: Sequence[float], send: Send, clock: Clock, sleep: Sleep) -> list[Answer]:
    """Sends each request when it is due, whether or not others are answered.

    A request that could not be sent in time counts from when it was due: otherwise a server that
    stalls would seem the faster, the fewer requests come to see it.
    """
    begin = clock()
    tasks = []
    for index, time in enumerate(times):
        while (wait := begin + time - clock()) > 0:
            await sleep(wait)
        tasks.append(asyncio.ensure_future(send(index, begin + time)))
    return list(await asyncio.gather(*tasks))


async def keep_busy(count: int, concurrency: int, send: Send, clock: Clock) -> list[Answer]:
    """Keeps so many requests under way: the next is sent when one is answered."""
    indices = iter(range(count))

    async def client(indices: Iterator[int]) -> list[Answer]:
        return [await send(index, clock()) for index in indices]

    of_clients = await asyncio.gather(*(client(indices) for _ in range(concurrency)))
    return [answer for answers in of_clients for answer in answers]
