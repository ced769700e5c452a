# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""A prefill and a decode server, as processes, have the answers of one server, bit for bit."""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "msgspec", "prometheus_client", "jinja2", "httpx"):
    pytest.importorskip(name)

import disaggregated_churn
import httpx
from server_pairs import (
    Router,
    ServerProcess,
    adapted,
    bodies,
    choices_of,
    free_port,
    of_ranks,
    one_server,
    pair_options,
    servers,
    wait_until_idle,
)
from serving import Served, wait_for

# Two more peers of the decode server: tests listen at one port, and the other is closed.
PROXY_PORT, CLOSED_PORT = free_port(), free_port()
ALSO = f"127.0.0.1:{PROXY_PORT},127.0.0.1:{CLOSED_PORT}"


@pytest.fixture(scope="module")
def pair(mtp_model: Path) -> Iterator[list[ServerProcess]]:
    with servers(*pair_options(mtp_model, "--kv-lease-seconds", "20", also=ALSO)) as started:
        yield started


@pytest.mark.fast("20")
@pytest.mark.parametrize("count", [20, 500])
def test_prefill_and_decode_servers_answer_like_one_server(
    pair: list[ServerProcess], reference_server: Served, count: int
) -> None:
    prefill, decode = pair
    requests = bodies(count, seed=count)
    router = Router(prefill.url, decode.url)
    hits = decode.gauge("prefix_cache_hits_total")
    assert router.run(requests) == choices_of(reference_server, requests)
    assert router.num_transfers == count and set(router.answers.values()) == {1}
    # All full pages of each prompt were transferred, since the prompts are new.
    pages = sum((len(body["prompt"]) - 1) // 16 for body in requests)
    assert decode.gauge("prefix_cache_hits_total") - hits >= 16 * pages
    for one in pair:
        wait_until_idle(one)


@pytest.mark.ci
def test_adapters_of_a_pair_answer_like_one_server(mtp_model: Path, tmp_path: Path) -> None:
    requests, paths, flags = adapted(mtp_model, tmp_path)
    with one_server(mtp_model, lora_modules=list(paths.items())) as one:
        expected = choices_of(one, requests)
    with servers(*pair_options(mtp_model, *flags)) as (prefill, decode):
        assert Router(prefill.url, decode.url).run(requests) == expected
        pages = sum((len(body["prompt"]) - 1) // 16 for body in requests)
        assert decode.gauge("prefix_cache_hits_total") >= 16 * pages


@pytest.mark.fast("20-decode")
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("count", [20, 200])
@pytest.mark.ci
def test_killed_server_loses_no_request(
    pair: list[ServerProcess], reference_server: Served, side: str, count: int
) -> None:
    """Every request is answered once, with the bits of one server."""
    prefill, decode = pair
    requests = bodies(count, seed=count + 1)
    router = Router(prefill.url, decode.url)
    answers = answers_with_a_kill(router, prefill if side == "prefill" else decode, requests)
    assert answers == choices_of(reference_server, requests)
    assert [router.answers[place] for place in range(count)] == [1] * count


def answers_with_a_kill(
    router: Router, victim: ServerProcess, requests: list[dict[str, Any]]
) -> list[Any]:
    """Run requests, and kill and restart a server when a quarter of them is answered."""
    begun = router.answers.total()

    def kill() -> None:
        while router.answers.total() < begun + len(requests) // 4:
            time.sleep(0.005)
        victim.kill()
        victim.start()

    killer = threading.Thread(target=kill)
    killer.start()
    answers = router.run(requests)
    killer.join()
    victim.wait()
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_stalled_server_loses_no_request(
    pair: list[ServerProcess], reference_server: Served, side: str
) -> None:
    """The stall is longer than the transfer timeout and the lease."""
    prefill, decode = pair
    requests, seconds = bodies(200, seed=202), 35.0
    router = Router(prefill.url, decode.url)
    victim = prefill if side == "prefill" else decode

    def stall() -> None:
        while router.answers.total() < 50:
            time.sleep(0.005)
        victim.stall(seconds)

    with ThreadPoolExecutor(1) as pool:
        stalled = pool.submit(stall)
        answers = router.run(requests, at_once=24)
        stalled.result()
    assert answers == choices_of(reference_server, requests)
    assert [router.answers[place] for place in range(200)] == [1] * 200


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2), (2, 1), (1, 2), (4, 2)], ids=str)
def test_ranks_transfer_their_shards(mtp_model: Path, sizes: tuple[int, int]) -> None:
    """The answers have the bits of one process with as many virtual TP ranks.

    This also holds when the prefill ranks are killed.
    """
    roles, requests = of_ranks(mtp_model, sizes), bodies(40, seed=3)
    with servers(*roles) as both, one_server(mtp_model, exact_across_tp=max(sizes)) as one:
        router = Router(both[0].url, both[1].url)
        assert router.run(requests) == choices_of(one, requests)
        pages = sum((len(body["prompt"]) - 1) // 16 for body in requests)
        assert both[1].gauge("prefix_cache_hits_total") >= 16 * pages
        for server in both:
            wait_until_idle(server)
        requests = bodies(40, seed=4)
        assert answers_with_a_kill(router, both[0], requests) == choices_of(one, requests)
        assert set(router.answers.values()) == {2}


@pytest.mark.slow
def test_churn_leaks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert disaggregated_churn.main(["--rounds", "3"]) == 0
    assert "120 requests, 0 differ, 12 given up; all pages are back" in capsys.readouterr().out


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    (
        "prefill",
        {"do_remote_prefill": True},
        {},
        "requires a server with --role decode or mixed, got",
    ),
    (
        "decode",
        {"do_remote_decode": True},
        {},
        "requires a server with --role prefill or mixed, got",
    ),
    ("prefill", {"do_remote_decode": True}, {"prompt": ["a", "b"]}, "requires exactly one prompt"),
    ("prefill", {"do_remote_decode": True}, {"stream": True}, "must be absent when stream"),
    ("decode", {"remote_port": 0}, {}, "remote_port"),
    *(
        ("decode", {"do_remote_prefill": True, **fields}, {}, message)
        for fields, message in (
            ({"remote_request_id": "0" * 31}, "remote_request_id must have 32 hexadecimal digits"),
            ({"remote_request_id": "0" * 33}, "remote_request_id must have 32 hexadecimal digits"),
            ({"remote_request_id": f"{'0' * 32}\n"}, "remote_request_id must have 32 hexadecimal"),
            ({"remote_request_id": "x\r\nset a 0 0 1\r\n"}, "must have 32 hexadecimal digits"),
            ({"remote_host": "a" * 256}, "remote_host must have 1 to 255 characters, got 256"),
            ({"remote_ports": [1] * 1025}, "remote_ports must hold at most 1024 ports, got 1025"),
        )
    ),
    ("decode", {"remote_planet": 1}, {}, "remote_planet"),
]


@pytest.mark.parametrize("role,transfer_params,more,message", REFUSED, ids=str)
def test_requests_for_another_role_are_refused(
    pair: list[ServerProcess],
    role: str,
    transfer_params: dict[str, Any],
    more: dict[str, Any],
    message: str,
) -> None:
    url = pair[role == "decode"].url
    body = {"prompt": "a", "max_tokens": 1, "kv_transfer_params": transfer_params, **more}
    answer = httpx.post(f"{url}/v1/completions", json=body)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_pages_that_cannot_be_fetched_are_computed(
    pair: list[ServerProcess], reference_server: Served
) -> None:
    """Leases are expired, peers are closed or unknown, or the address is missing."""
    prefill, decode = pair
    (body,) = bodies(1, seed=9)
    first = {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    transfer_params = httpx.post(f"{prefill.url}/v1/completions", json=first).json()[
        "kv_transfer_params"
    ]
    (expected,) = choices_of(reference_server, [body])
    stranger = socket.create_server(("127.0.0.1", 0))
    stranger.setblocking(False)
    for change in (
        {"remote_port": stranger.getsockname()[1]},
        {"remote_request_id": "0" * 32},
        {"remote_port": CLOSED_PORT},
        {"remote_port": 1},
        {"remote_host": "192.0.2.1"},
        {"remote_host": None},
        {},
        {},  # the previous request released the lease
    ):
        changed = {**body, "kv_transfer_params": {**transfer_params, **change}}
        answer = httpx.post(f"{decode.url}/v1/completions", json=changed, timeout=30)
        assert answer.json()["choices"] == expected, change
    with stranger, pytest.raises(BlockingIOError):  # the decode server must not connect to it
        stranger.accept()


@contextlib.contextmanager
def flip_a_bit(port: int, place: int) -> Iterator[None]:
    """Forward a fetch from `PROXY_PORT` to the prefill server, and flip a bit of the answer.

    Args:
        port: port of the prefill server.
        place: offset of the byte with the bit, from the first byte of the pages.
    """

    def forward(source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                to.sendall(data)

    def serve() -> None:
        listener.settimeout(60)
        reader, _ = listener.accept()
        reader.settimeout(60)
        with reader, socket.create_connection(("127.0.0.1", port)) as there:
            asking = threading.Thread(target=forward, args=(reader, there))
            asking.start()
            stream = there.makefile("rb")
            prefix = stream.read(8)
            begin = struct.unpack("<I", prefix[:4])[0] + 8
            head = bytearray(prefix + stream.read(begin + max(place, 0) + 1 - 8))
            head[begin + place] ^= 4
            reader.sendall(head)
            with contextlib.suppress(OSError):
                while data := stream.read1():
                    reader.sendall(data)
            asking.join()

    with socket.create_server(("127.0.0.1", PROXY_PORT)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join()


@pytest.mark.parametrize("place", [-40, 0, 1500])
def test_flipped_bit_changes_no_answer(
    pair: list[ServerProcess], reference_server: Served, place: int
) -> None:
    """The bit is in the header or in the pages; a later request is correct, too."""
    prefill, decode = pair
    prompt = [place % 97 + 100, *range(3, 103)]  # a prompt that no other case sends
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0.0, "logprobs": 2, "seed": 1}
    first = {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    transfer_params = httpx.post(f"{prefill.url}/v1/completions", json=first).json()[
        "kv_transfer_params"
    ]
    (expected,) = choices_of(reference_server, [body])
    damaged = decode.gauge("kv_transfer_corrupt_pages_total")
    changed = {**body, "kv_transfer_params": {**transfer_params, "remote_port": PROXY_PORT}}
    with flip_a_bit(transfer_params["remote_port"], place):
        answer = httpx.post(f"{decode.url}/v1/completions", json=changed, timeout=60).json()
    assert answer["choices"] == expected
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    num_pages = (len(prompt) - 1) // 16
    wait_for(lambda: decode.gauge("kv_transfer_corrupt_pages_total") == damaged + num_pages)
    later = httpx.post(f"{decode.url}/v1/completions", json=body, timeout=60).json()
    assert later["choices"] == expected
    assert later["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    for one in pair:
        wait_until_idle(one)


def test_server_without_a_role_refuses_transfers(reference_server: Served) -> None:
    body = {"prompt": "a", "kv_transfer_params": {"do_remote_decode": True}}
    answer = httpx.post(f"{reference_server.url}/v1/completions", json=body)
    assert answer.status_code == 400
    assert "--role prefill or mixed, got none" in answer.json()["error"]["message"]
