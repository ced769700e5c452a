# SPDX-License-Identifier: Apache-2.0
"""Run requests of all kinds on a prefill and a decode server for minutes, and check for leaks.

`python tests/disaggregated_churn.py --minutes N`. Some clients disconnect in the middle, and some
leases are never fetched. Every answer is compared with that of one server. At the end, both servers
must have all pages free and no more sockets open than at the beginning. Their memory grows while
caches fill (suffix decoding keeps few answers here): the mean memory of the last third of the
minutes must be within 3 % of that of the middle third.
"""

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import httpx
from mtp_checkpoints import make_mtp_model
from server_pairs import (
    MTP,
    Router,
    ServerProcess,
    bodies,
    choices_of,
    one_server,
    pair_options,
    servers,
    wait_until_idle,
)

LEASE_SECONDS = 2
_CLOSING_SECONDS = 15.0
_AT_ONCE = 40  # requests per round
FLAT = 0.03
_CONFIG = json.dumps({**json.loads(MTP), "suffix_decoding_max_cached_bytes": 1 << 20})


def processes_of(server: ServerProcess) -> list[int]:
    """Return the process ids of the server and its engine."""
    return [server.pid, *server.engines]


def num_sockets(server: ServerProcess) -> int:
    """Return the number of open sockets of both processes."""
    count = 0
    for pid in processes_of(server):
        for name in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                count += os.readlink(name).startswith("socket:")
    return count


def memory(server: ServerProcess) -> float:
    """Return the resident MiB of both processes."""
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in processes_of(server)]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20


def wait_for_sockets(server: ServerProcess, count: int) -> int:
    """Wait a few seconds until at most `count` sockets are open; return their number."""
    end = time.monotonic() + _CLOSING_SECONDS
    while (now := num_sockets(server)) > count and time.monotonic() < end:
        time.sleep(0.2)
    return now


def growth(sizes: Sequence[float]) -> float:
    """Return the growth of the mean from the middle third to the last third, as a fraction."""
    third = max(len(sizes) // 3, 1)
    return mean(sizes[-third:]) / mean(sizes[-2 * third : -third] or sizes) - 1


def leave(pair: Sequence[ServerProcess], draw: random.Random, found: Counter[str]) -> None:
    """Leave a lease unfetched or a stream unread, and abandon a prompt."""
    (body,) = bodies(1, draw.randrange(1 << 30))
    leasing = {**body, "n": 1, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    url = f"{pair[0].url}/v1/completions"
    transfer_params = httpx.post(url, json=leasing, timeout=300).json()["kv_transfer_params"]
    if draw.random() < 0.5:
        request = {**body, "stream": True, "kv_transfer_params": transfer_params}
        other = f"{pair[1].url}/v1/completions"
        with httpx.stream("POST", other, json=request, timeout=300) as answer:
            next(answer.iter_raw())
    with contextlib.suppress(httpx.TimeoutException):
        httpx.post(url, json=leasing, timeout=0.001)
    found["given up"] += 1


def run_round(
    pair: Sequence[ServerProcess], one: Any, draw: random.Random, found: Counter[str]
) -> None:
    """Run the same requests on the pair and on one server."""
    requests = bodies(_AT_ONCE, draw.randrange(1 << 30))
    with contextlib.closing(Router(pair[0].url, pair[1].url)) as router:
        answers = router.run(requests)
    for _ in range(4):
        leave(pair, draw, found)
    expected = choices_of(one, requests)
    found["requests"] += len(requests)
    found["differ"] += sum(a != b for a, b in zip(answers, expected, strict=True))


def main(arguments: list[str] | None = None) -> int:
    """Run the churn; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--rounds", type=int, help="number of rounds, instead of minutes")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    draw, found, number = random.Random(options.seed), Counter[str](), 0
    with contextlib.ExitStack() as stack:
        model = make_mtp_model(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        more = ("--kv-lease-seconds", str(LEASE_SECONDS))
        roles = pair_options(model, *more, speculative_config=_CONFIG)
        pair = stack.enter_context(servers(*roles))
        one = stack.enter_context(one_server(model, speculative_config=_CONFIG))
        run_round(pair, one, draw, Counter())  # allocates everything that is allocated once
        sockets = [wait_for_sockets(server, 0) for server in pair]
        sizes = [[memory(server)] for server in pair]
        end = time.monotonic() + 60 * options.minutes
        while number < options.rounds if options.rounds else time.monotonic() < end:
            run_round(pair, one, draw, found)
            number += 1
            for server, of_server in zip(pair, sizes, strict=True):
                of_server.append(memory(server))
        for server in pair:
            wait_until_idle(server)
        left = [
            wait_for_sockets(server, count) - count
            for server, count in zip(pair, sockets, strict=True)
        ]
    grown = [of_server[-1] - of_server[0] for of_server in sizes]
    late = [growth(of_server) for of_server in sizes]
    print(
        f"{number} rounds: {found['requests']:,} requests, {found['differ']} differ, "
        f"{found['given up']} given up; all pages are back; sockets more than before: "
        f"{left[0]} and {left[1]}; memory: {grown[0]:+.1f} and {grown[1]:+.1f} MiB, in the last "
        f"third {late[0]:+.1%} and {late[1]:+.1%}"
    )
    is_flat = options.rounds is not None or max(late) <= FLAT
    return int(found["differ"] > 0 or max(left) > 0 or not is_flat)


if __name__ == "__main__":
    sys.exit(main())
