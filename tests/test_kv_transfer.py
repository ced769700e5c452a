# SPDX-License-Identifier: Apache-2.0

"""KV transfer between engines: tokens and logprobs equal those of one engine, bit for bit."""

import contextlib
import json
import logging
import math
import queue
import random
import socket
import struct
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("msgspec")

from checkpoints import write_config
from engine_campaign import FAMILIES
from msgspec import structs
from ranks import on_ranks
from serving import wait_for
from specops.api.messages import (
    Batch,
    Command,
    End,
    Fetched,
    KvTransfer,
    Output,
    Submit,
)
from specops.api.outputs import SpeculativeStats
from specops.disaggregated import transport as transports
from specops.disaggregated.fair_threads import FairThreads
from specops.disaggregated.page_transfer import PageTransfer
from specops.disaggregated.pages import Header, KvTransferError, Layout, Pages, cut, joined, sources
from specops.disaggregated.peers import Peers
from specops.disaggregated.transfer_inbox import KvTransferInbox
from specops.disaggregated.transport import Address, Leases, TcpTransport
from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.engine.memory.kv_cache import adapted_salt
from specops.engine.parallel.ranks import Ranks
from specops.service.snapshot import status_of
from specops.service.wire import Peer
from test_lora import engine as lora_engine

NAIVE = {"method": "naive"}
METHODS: dict[str, dict[str, Any]] = {
    "naive": NAIVE,
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 4},
    "mtp": {"method": "mtp", "num_speculative_tokens": 3},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 3},
}
CACHES = {"auto": {}, "int8": {"kv_cache_dtype": "int8"}, "fp8": {"kv_cache_dtype": "fp8_e4m3"}}
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, logprobs=2, seed=1)
SEEDED = replace(GREEDY, temperature=0.9, top_p=0.9, seed=7)
# Layers with pages and states; ranks share its one group of heads.
MAMBA = {
    "architectures": ["FalconH1ForCausalLM"],
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_state": 32,
    "max_position_embeddings": 192,
}
LENGTHS = (5, 16, 17, 33, 48, 70)
PROMPTS = [random.Random(n).choices(range(3, 150), k=n) for n in LENGTHS]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    common = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    return {
        "heads": write_config(
            tmp_path_factory.mktemp("heads"), max_position_embeddings=192, **common
        ),
        "latents": write_config(
            tmp_path_factory.mktemp("latents"), **FAMILIES["deepseek_v3"], **common
        ),
        "states": write_config(
            tmp_path_factory.mktemp("states"),
            max_position_embeddings=192,
            **FAMILIES["qwen3_5"],
            **common,
        ),
        "mamba": write_config(tmp_path_factory.mktemp("mamba"), **MAMBA, **common),
        "nemotron": write_config(
            tmp_path_factory.mktemp("nemotron"),
            max_position_embeddings=192,
            **{**common, **FAMILIES["nemotron_h"]},
        ),
        "shared": write_config(
            tmp_path_factory.mktemp("shared"),
            **{**FAMILIES["gemma4"], "max_position_embeddings": 192},
        ),
    }


def make(method: dict[str, Any], ranks: Ranks | None = None, **more: Any) -> Engine:
    settings: dict[str, Any] = {
        "device": "cpu",
        "load_format": "dummy",
        "speculative_config": json.dumps(method),
        "page_size": 16,
        "num_pages": 64,
        "num_threads": 1,
        "seed": 3,
    }
    return Engine(EngineConfig.from_plain(settings | more), ranks)


def run(engine: Engine, params: SamplingParams = GREEDY) -> list[Any]:
    """Generate all prompts together; return their tokens, logprobs and texts."""
    done = engine.generate(PROMPTS, params)
    return [(one.token_ids, one.logprobs, one.text) for one in done]


def method_of(models: dict[str, Path], method: str) -> dict[str, Any]:
    """Return the configuration of a method; its draft model is the one with states."""
    own = {"model": str(models["states"])} if method == "draft_model" else {}
    return METHODS[method] | own


def transfer_prompts(prefill: Engine, decode: Engine, params: SamplingParams) -> list[int]:
    """Compute all prompts on one engine, and transfer their pages to another; return the counts."""
    prefill.generate(PROMPTS, replace(params, max_tokens=1))
    moved = []
    for prompt in PROMPTS:
        pages = PageTransfer(prefill).take(prompt, params)
        expected = PageTransfer(decode).expected(prompt, params)
        moved.append(PageTransfer(decode).give(pages, expected, params.cache_salt))
    return moved


@pytest.mark.parametrize("kind", ["heads", "states"])
def test_transferred_pages_are_found_only_with_their_cache_salt(
    models: dict[str, Path], kind: str
) -> None:
    prefill, decode = (make(NAIVE, model=str(models[kind])) for _ in range(2))
    salted = replace(GREEDY, cache_salt="a")
    moved = transfer_prompts(prefill, decode, salted)
    assert sum(moved) > 0
    for other in (GREEDY, replace(GREEDY, cache_salt="b")):
        assert PageTransfer(prefill).take(PROMPTS[-1], other).header.num_pages == 0
        found = decode.generate(PROMPTS[-1:], other)[0]
        assert found.num_cached_tokens == 0
        assert found.token_ids == decode.generate(PROMPTS[-1:], salted)[0].token_ids
    assert decode.generate(PROMPTS[-1:], salted)[0].num_cached_tokens >= 16 * moved[-1]


CASES = [
    ("heads", "auto", "naive"),
    ("heads", "auto", "ngram"),
    ("heads", "auto", "suffix"),
    ("heads", "auto", "mtp"),
    ("heads", "int8", "mtp"),
    ("heads", "fp8", "mtp"),
    ("latents", "auto", "mtp"),
    ("states", "auto", "naive"),
    ("states", "auto", "suffix"),
    ("states", "int8", "mtp"),
    ("states", "auto", "draft_model"),
    ("mamba", "auto", "suffix"),
    ("nemotron", "auto", "mtp"),
    ("heads", "auto", "draft_model"),
    ("shared", "auto", "ngram"),
    ("shared", "int8", "suffix"),
]


@pytest.mark.parametrize("kind,cache,method", CASES, ids=lambda one: one)
def test_transferred_prompt_continues_with_the_same_bits(
    models: dict[str, Path], kind: str, cache: str, method: str
) -> None:
    """The transferred pages of each prompt are as many as a prefix cache would hold."""
    settings = {**CACHES[cache], "model": str(models[kind])}
    alone = make(NAIVE, **settings)
    prefill, decode = (make(method_of(models, method), **settings) for _ in range(2))
    lookahead = 1 if method == "mtp" else 0
    for params in (GREEDY, SEEDED):
        moved = transfer_prompts(prefill, decode, params)
        assert moved == [(length - max(1, lookahead)) // 16 for length in LENGTHS]
        hits = decode.stats.prefix_cache_hits
        assert run(decode, params) == run(alone, params)
        assert decode.stats.prefix_cache_hits - hits >= 16 * sum(moved)
        assert decode.num_free_pages == decode.num_pages
        assert prefill.num_free_pages == prefill.num_pages
    if (kind, method) == ("states", "draft_model"):  # the draft model is the target
        spec = decode.stats.speculative
        assert spec.num_accepted_tokens == spec.num_draft_tokens > 50


def test_engine_without_drafter_takes_only_pages_without_draft_kv(models: dict[str, Path]) -> None:
    """The prefill engine can leave out the draft KV."""
    settings = {"model": str(models["heads"])}
    prompt = PROMPTS[-1]
    prefill, decode = make(METHODS["mtp"], **settings), make(NAIVE, **settings)
    prefill.generate([prompt], replace(GREEDY, max_tokens=1))
    pages = PageTransfer(prefill).take(prompt, GREEDY)
    with pytest.raises(KvTransferError, match="owner must be '', got 'mtp'"):
        PageTransfer(decode).give(pages, PageTransfer(decode).expected(prompt, GREEDY))
    plain = PageTransfer(prefill).take(prompt, GREEDY, NAIVE)
    assert PageTransfer(decode).give(plain, PageTransfer(decode).expected(prompt, GREEDY)) == 4


@pytest.fixture(scope="module")
def pair(models: dict[str, Path]) -> tuple[Engine, Engine, Pages]:
    settings = {"model": str(models["heads"])}
    prefill, decode = make(NAIVE, **settings), make(NAIVE, **settings)
    prefill.generate([PROMPTS[-1]], replace(GREEDY, max_tokens=1))
    return prefill, decode, PageTransfer(prefill).take(PROMPTS[-1], GREEDY)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "version": ({"version": 1}, "version must be 5, got 1"),
    "exact_across_tp": ({"exact_across_tp": 2}, "exact_across_tp must be 1, got 2"),
    "contract": ({"contract": "0" * 16}, "contract must be '.*', got '0000000000000000'"),
    "ranks": ({"num_ranks": 2}, "num_ranks must be 1, got 2"),
    "rank": ({"rank": 1}, "rank must be 0, got 1"),
    "readers": ({"num_readers": 2}, "num_readers must be 1, got 2"),
    "reader": ({"reader": 1}, "reader must be 0, got 1"),
    "page_size": ({"page_size": 32}, "page_size must be 16, got 32"),
    "model": ({"model": []}, r"model must be \[Layout.*, got \[\]"),
    "prompt": ({"token_ids": [1]}, "token_ids must be the request's prompt"),
    "draft": ({"lookahead": 3}, "lookahead must be 0, got 3"),
    "count": ({"num_pages": 5}, r"num_pages must be in \[0, 4\], got 5"),
    "bytes": ({"num_pages": 3}, "data must have .* bytes, got"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mismatched_headers_are_refused(pair: tuple[Engine, Engine, Pages], name: str) -> None:
    _, decode, pages = pair
    changes, message = WRONG[name]
    wrong = Pages(structs.replace(pages.header, **changes), pages.data)
    with pytest.raises(KvTransferError, match=message):
        PageTransfer(decode).give(wrong, PageTransfer(decode).expected(PROMPTS[-1], GREEDY))
    assert decode.num_free_pages == decode.num_pages


def test_transferred_pages_are_read(pair: tuple[Engine, Engine, Pages]) -> None:
    """Pages with other bytes give other logprobs."""
    prefill, decode, pages = pair
    zeros = Pages(pages.header, bytearray(len(pages.data)))
    PageTransfer(decode).give(zeros, PageTransfer(decode).expected(PROMPTS[-1], GREEDY))
    (right,), (wrong,) = (one.generate([PROMPTS[-1]], GREEDY) for one in (prefill, decode))
    assert right.logprobs != wrong.logprobs


def test_pages_are_not_stored_without_free_pages(models: dict[str, Path]) -> None:
    settings = {"model": str(models["heads"])}
    prefill = make(NAIVE, **settings)
    prefill.generate([PROMPTS[-1]], replace(GREEDY, max_tokens=1))
    decode = make(NAIVE, **settings, num_pages=3, max_model_len=48)
    pages = PageTransfer(prefill).take(PROMPTS[-1][:40], GREEDY)
    short = PageTransfer(decode).expected(PROMPTS[-1][:40], replace(GREEDY, max_tokens=8))
    assert pages.header.num_pages == 2
    held = decode._pool.allocate(2)
    assert held is not None and PageTransfer(decode).give(pages, short) == 0
    decode._pool.release(held)
    assert PageTransfer(decode).give(pages, short) == 2 and decode.num_free_pages == 3


def test_states_are_computed_when_the_state_cache_is_full(models: dict[str, Path]) -> None:
    """An older entry is evicted, unless a running request has reserved it."""
    settings = {"model": str(models["states"]), "max_model_len": 128}
    prefill, decode = make(NAIVE, **settings), make(NAIVE, **settings, state_cache_bytes=20_000)
    states = decode._scheduler.states
    assert decode._runner.parts.cache.capacity.num_prefix_states == 1
    for has_room, prompt in zip((True, True, False), PROMPTS[3:], strict=True):
        (want,) = prefill.generate([prompt], GREEDY)
        pages, expected = (
            PageTransfer(prefill).take(prompt, GREEDY),
            PageTransfer(decode).expected(prompt, GREEDY),
        )
        if not has_room:
            states._entry_of.clear()
        count = (len(prompt) - 1) // 16 if has_room else 0
        assert PageTransfer(decode).give(pages, expected) == count
        (done,) = decode.generate([prompt], GREEDY)
        assert done.logprobs == want.logprobs and done.num_cached_tokens == 16 * count


def test_pages_of_adapters_are_used_by_their_requests_only() -> None:
    names = (None, "lora0", "lora1")
    alone, prefill, decode = (
        lora_engine(["lora0", "lora1"], speculative_config=SpeculativeConfig.from_dict(NAIVE))
        for _ in range(3)
    )
    keys = {name: None if name is None else (name, alone.adapters[name]) for name in names}
    prompt, params = PROMPTS[-1], replace(SEEDED, max_tokens=8)
    for name, key in keys.items():
        (expected,) = alone.generate([prompt], params, adapter=name)
        prefill.generate([prompt], replace(params, max_tokens=1), adapter=name)
        pages = PageTransfer(prefill).take(prompt, params, adapter=key)
        for other in keys.values():
            header = PageTransfer(decode).expected(prompt, params, adapter=other)
            salt = adapted_salt(params.cache_salt, other)
            if other == key:
                assert PageTransfer(decode).give(pages, header, salt) == 4
            else:
                with pytest.raises(KvTransferError, match="contract must be"):
                    PageTransfer(decode).give(pages, header, salt)
        (done,) = decode.generate([prompt], params, adapter=name)
        assert (done.token_ids, done.logprobs) == (expected.token_ids, expected.logprobs)
        assert done.num_cached_tokens == 64
        assert decode.generate([prompt], params, adapter=name)[0].logprobs == expected.logprobs


def test_role_requires_a_prefix_cache(models: dict[str, Path]) -> None:
    with pytest.raises(
        ValueError, match="enable_prefix_caching must be on for a server with a role"
    ):
        PageTransfer(make(NAIVE, model=str(models["heads"]), enable_prefix_caching=False))


# ---- ranks ----


class Commands:
    """An inbox that holds its commands from the start."""

    def __init__(self, *commands: Command) -> None:
        self.commands = list(commands)
        self.was_notified = threading.Event()

    def put(self, command: Any) -> None:
        assert command == Fetched(JOB.job)
        self.was_notified.set()

    def take(self, seconds: float | None) -> list[Any]:
        return [self.commands.pop(0)] if self.commands else []


JOB = Submit(4, "", [PROMPTS[-1]], GREEDY, None, False)
LEASING = structs.replace(JOB, kv_transfer=KvTransfer(do_remote_decode=True))
ENDED = Output(4, 0, [1], "", [], end=End("length", None, 1, 1, 0, 0.0, SpeculativeStats()))


def exchange(engine: Engine, *commands: Command) -> tuple[KvTransferInbox, Commands, Leases]:
    leases, inbox = Leases(60, 1 << 30), Commands(*commands)
    transport = TcpTransport("127.0.0.1", 0, leases, [Peer("127.0.0.1", 1, 65535)])
    return KvTransferInbox(engine, transport, inbox, lambda batch: None), inbox, leases


def offered(engine: Engine) -> tuple[KvTransferInbox, Leases, KvTransfer]:
    """Lease the pages of `JOB` on one rank; return them and what the reply says about them."""
    leasing, _, leases = exchange(engine, LEASING)
    leasing.take(0.0)
    engine.generate(JOB.prompts, replace(GREEDY, max_tokens=1))
    output = structs.replace(ENDED, end=structs.replace(ENDED.end))
    leasing.send(Batch(0.0, "ok", status_of(engine), None, {}, [output]))
    assert output.end is not None and output.end.kv_transfer is not None
    return leasing, leases, output.end.kv_transfer


# ---- damaged messages ----


class Stream:
    """Recorded bytes of a transfer from another engine."""

    def __init__(self, engine: Engine, prompt: list[int]) -> None:
        leases = Leases(60, 1 << 30)
        leases.add(LEASE, PageTransfer(engine).take(prompt, GREEDY))
        there = TcpTransport("127.0.0.1", 0, leases, [])
        request, limit = transports.Fetch(LEASE, "tcp", 1, 0), transports.Deadline(60)
        with socket.create_connection((there.host, there.port), timeout=60) as reader:
            transports.send(reader, request, limit)
            reader.shutdown(socket.SHUT_WR)  # so that the sender does not wait for `Release`
            self.data = b"".join(iter(lambda: reader.recv(1 << 16), b""))
        there.close()
        self.offer_end = struct.unpack_from("<I", self.data)[0] + 8

    def damaged(self, kind: str, draw: random.Random, other: "Stream") -> bytes:
        """Return the bytes with one kind of damage, in the header or in the pages."""
        data = bytearray(self.data)
        end = draw.choice([self.offer_end, len(data)])
        if kind == "flips":
            for place in draw.choices(range(end), k=draw.choice([1, 1, 2, 20])):
                data[place] ^= 1 << draw.randrange(8)
        elif kind == "zeros":
            begin = draw.randrange(end)
            data[begin : begin + 64] = bytes(len(data[begin : begin + 64]))
        elif kind == "truncated":
            del data[draw.randrange(end) :]
        elif kind == "missing":
            begin = draw.randrange(end)
            del data[begin : begin + draw.randint(1, 40)]
        elif kind == "inserted":
            begin = draw.randrange(end)
            data[begin:begin] = draw.randbytes(draw.randint(1, 40))
        elif kind == "longer":
            data += draw.randbytes(draw.randint(1, 40))
        elif kind == "header of another":
            data[: self.offer_end] = other.data[: other.offer_end]
        elif kind == "spliced":
            data[draw.randrange(end) :] = other.data[draw.randrange(len(other.data)) :]
        return bytes(data)


LEASE = "0123456789abcdef" * 2
DAMAGE = [
    "flips",
    "zeros",
    "truncated",
    "missing",
    "inserted",
    "longer",
    "header of another",
    "spliced",
]


@pytest.mark.parametrize("kind,method", [("heads", "mtp"), ("states", "naive")])
def test_damaged_messages_are_never_used(
    models: dict[str, Path],
    kind: str,
    method: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """1,000 messages with pages of a model, of a drafter and states, damaged in header or body."""
    caplog.set_level(logging.CRITICAL)
    settings = {"model": str(models[kind])}
    prefill, decode = (make(METHODS[method], **settings) for _ in range(2))
    prompt, similar = PROMPTS[-1], [*PROMPTS[-1][:-1], 2]
    (alone,) = prefill.generate([prompt], GREEDY)
    prefill.generate([similar], GREEDY)
    stream, other = Stream(prefill, prompt), Stream(prefill, similar)
    right, stored = PageTransfer(prefill).take(prompt, GREEDY).data, list[bytearray]()
    monkeypatch.setattr(PageTransfer, "give", lambda self, pages, *_: stored.append(pages.data))
    seconds, on_the_wire = iter(range(0, 10_000_000, 1000)), stream.data

    def connect(address: Any, timeout: float) -> socket.socket:
        ours, theirs = socket.socketpair()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 21)
        theirs.sendall(on_the_wire)
        theirs.shutdown(socket.SHUT_WR)
        open_ends.append(theirs)
        return ours

    open_ends: list[socket.socket] = []
    monkeypatch.setattr(socket, "create_connection", connect)
    transfer = KvTransfer(do_remote_prefill=True, remote_request_id=LEASE)
    transfer.remote_host, transfer.remote_port = "127.0.0.1", 1
    fetch_job = structs.replace(JOB, kv_transfer=transfer)
    peers = [Peer("127.0.0.1", 1, 1)]
    transport = TcpTransport("127.0.0.1", 0, Leases(60, 1), peers, lambda: next(seconds))
    inbox = Commands()
    draw = random.Random(1)
    with KvTransferInbox(decode, transport, inbox, lambda batch: None) as fetching:

        def fetch(data: bytes) -> int:
            nonlocal on_the_wire
            on_the_wire = data
            inbox.was_notified.clear()
            inbox.commands += [fetch_job, Fetched(JOB.job)]
            assert fetching.take(0.0) == []
            assert inbox.was_notified.wait(60)
            assert fetching.take(0.0) == [fetch_job]
            open_ends.pop().close()
            assert decode.num_free_pages == decode.num_pages
            return decode.stats.num_damaged_kv_pages

        for count in range(1000):
            damage = DAMAGE[count % len(DAMAGE)]
            before, data = decode.stats.num_damaged_kv_pages, stream.damaged(damage, draw, other)
            num_new = fetch(data) - before
            if data[: len(stream.data)] == stream.data:  # the pages are intact
                assert stored.pop() == right and num_new == 0
            assert stored == []
            if damage == "flips" and data[:4] == stream.data[:4]:  # otherwise the length is wrong
                assert num_new == 4
        assert fetch(stream.data) and stored.pop() == right
    (done,) = decode.generate([prompt], GREEDY)
    assert (done.token_ids, done.logprobs) == (alone.token_ids, alone.logprobs)


def test_oversized_message_closes_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "SECONDS", 600.0)  # waiting for the bytes would be too slow
    transport = TcpTransport("127.0.0.1", 0, Leases(60, 1 << 30), [])
    with socket.create_connection((transport.host, transport.port), timeout=300) as reader:
        reader.sendall(struct.pack("<II", 60 << 20, 0))
        assert reader.recv(1) == b""
    transport.close()


def test_time_limit_covers_the_whole_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that sends one byte every three seconds does not extend the limit."""
    now = [0.0]
    monkeypatch.setattr(transports.time, "monotonic", lambda: now[0])

    class Drip:
        def settimeout(self, seconds: float) -> None:
            assert 0 < seconds <= 10 - now[0]

        def recv_into(self, view: memoryview) -> int:
            now[0] += 3
            return 1

    with pytest.raises(TimeoutError, match="the peer did not answer in time"):
        transports.received(Drip(), transports.Fetch, transports.Deadline(10))  # type: ignore[arg-type]
    assert now == [12.0]


def test_idle_connections_do_not_displace_readers(
    pair: tuple[Engine, Engine, Pages], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the limit of four connections, the oldest one that named no lease is closed."""
    monkeypatch.setattr(transports, "_MAX_CONNECTIONS", 4)
    _, decode, pages = pair
    leases, expected = Leases(60, 1 << 30), PageTransfer(decode).expected(PROMPTS[-1], GREEDY)
    leases.add(LEASE, pages)
    leases.add("f" * 32, pages)
    there = TcpTransport("127.0.0.1", 0, leases, [Peer("127.0.0.1", 1, 65535)])
    address, limit = (there.host, there.port), transports.Deadline(60)
    with contextlib.ExitStack() as stack:

        def connect() -> socket.socket:
            return stack.enter_context(socket.create_connection(address, timeout=60))

        reader = connect()
        transports.send(reader, transports.Fetch(LEASE, "tcp", 1, 0), limit)
        offer = transports.received(reader, transports.Offer, limit)
        strangers = [connect() for _ in range(20)]
        assert [one.recv(1) for one in strangers[:17]] == [b""] * 17
        assert there.fetch(Address("f" * 32, *address), expected).data == pages.data
        assert transports._exactly(reader, offer.header.num_bytes, limit) == pages.data
        transports.send(reader, transports.Release(), limit)
        assert reader.recv(1) == b""
        wait_for(lambda: not leases.num_bytes)  # fetch() returns before its release arrives
    there.close()


def test_the_host_with_the_most_connections_loses_its_oldest() -> None:
    with contextlib.ExitStack() as stack:

        def ends() -> tuple[socket.socket, socket.socket]:
            one, other = socket.socketpair()
            other.setblocking(False)
            return stack.enter_context(one), stack.enter_context(other)

        both = {name: ends() for name in ("a1", "b1", "b2", "c1", "a2", "b3")}
        connections = transports._Connections(4)
        closed = []
        for name, (own, _) in both.items():
            connections.add(own, name[0])
            if name == "b1":
                connections.mark_reader(own)
            for one, (_, peer) in both.items():
                with contextlib.suppress(BlockingIOError):
                    if peer.recv(1) == b"" and one not in closed:
                        closed.append(one)
        assert closed == ["a1", "b2"]


@pytest.mark.parametrize("fault", [ConnectionError, TimeoutError])
def test_unresponsive_peer_is_retried_with_backoff(fault: type[OSError]) -> None:
    """One request retries after 1, 2, 4 .. 30 s until the peer answers; others fail at once."""
    now = [100.0]
    peers = Peers([Peer("a", 5, 6)], 10.0, lambda: now[0])

    def attempt(port: int = 5, error: Exception | None = None, seconds: float = 0.0) -> str:
        try:
            with peers.attempt("a", port):
                now[0] += seconds
                if error is not None:
                    raise error
        except (KvTransferError, OSError) as found:
            return str(found)
        return "answered"

    with peers.attempt("a", 5):  # an earlier attempt, which succeeds at the end
        assert attempt(error=fault("away"), seconds=10.0) == "away"
        for pause in (1, 2, 4, 8, 16, 30, 30):
            assert (
                attempt()
                == f"KV transfer: a:5 did not answer recently; the next attempt is in {pause}.0 s"
            )
            assert attempt(port=6) == "answered"
            now[0] += pause
            with contextlib.suppress(fault), peers.attempt("a", 5):
                assert "did not answer recently" in attempt()
                raise fault("away")
        now[0] += 30
        assert attempt(error=KvTransferError("the lease is over")) == "the lease is over"
        assert attempt() == "answered"
    assert attempt() == "answered"
    with contextlib.ExitStack() as stack:  # concurrent failures count as one
        for _ in range(5):
            stack.enter_context(contextlib.suppress(fault))
            stack.enter_context(peers.attempt("a", 5))
        raise fault("away")
    with contextlib.suppress(fault), peers.attempt("a", 6):
        raise fault("away")
    now[0] += 1
    assert attempt() == attempt(port=6) == "answered"


@pytest.mark.parametrize("host,port", [("b", 5), ("a", 4), ("a", 7), ("A", 5), ("", 5)])
def test_addresses_outside_kv_peers_are_refused(host: str, port: int) -> None:
    with pytest.raises(
        KvTransferError, match="remote_host and remote_port must be one of kv_peers"
    ):
        Peers([Peer("a", 5, 6)], 10.0).require(host, port)


def test_threads_are_divided_fairly_among_clients() -> None:
    """With four threads, the first client gets two and the next two clients one each."""
    threads, begun = FairThreads[str](4, "test"), queue.SimpleQueue[str]()
    gates = {name: threading.Event() for name in ("a0", "a1", "a2", "a3", "b0", "b1", "c0", "d0")}

    def work(name: str) -> str:
        begun.put(name)
        assert gates[name].wait(60)
        return name

    futures = {name: threads.submit(name[0], partial(work, name)) for name in gates}
    assert {begun.get(timeout=60) for _ in range(4)} == {"a0", "a1", "b0", "c0"}
    for ended, then in (("c0", "d0"), ("d0", None), ("b0", "b1"), ("a0", "a2"), ("a2", "a3")):
        gates[ended].set()
        assert futures[ended].result(60) == ended
        if then is not None:
            assert begun.get(timeout=60) == then
    assert begun.empty()
    for gate in gates.values():
        gate.set()
    assert [future.result(60) for future in futures.values()] == list(gates)
    threads.shutdown()


@pytest.mark.parametrize("kind", ["heads", "states"])
@pytest.mark.parametrize("missing", [None, 0, -1])
@pytest.mark.parametrize("senders,readers", [(2, 2), (2, 1), (1, 2)])
@pytest.mark.fast("2-1-None-heads", "1-2-0-states", ci=("*-heads", "2-2-*-states", "2-1-0-states"))
def test_ranks_fetch_their_shards(
    models: dict[str, Path], kind: str, missing: int | None, senders: int, readers: int
) -> None:
    """If the pages of one rank are missing, all ranks compute the prompt."""
    settings = {"model": str(models[kind]), "exact_across_tp": 2}
    (alone,) = make(NAIVE, **settings).generate([PROMPTS[-1]], GREEDY)

    def engine(ranks: Ranks) -> Engine:
        return make(METHODS["mtp"], ranks, **settings, tensor_parallel_size=ranks.size)

    def continue_jobs(ranks: Ranks) -> Any:
        decode = engine(ranks)
        fetching, inbox, _ = exchange(decode, fetch_job, Fetched(JOB.job))
        with fetching:
            assert fetching.take(0.0) == []
            if ranks.rank == 0:
                assert inbox.was_notified.wait(300)
            assert fetching.take(0.0) == [fetch_job]
        (done,) = decode.generate(JOB.prompts, GREEDY)
        return done.token_ids, done.logprobs, decode.stats.prefix_cache_hits

    leased = on_ranks(senders, lambda ranks: offered(engine(ranks)), num_virtual_ranks=2)
    transfer = leased[0][2]
    assert [one for _, _, one in leased] == [
        transfer
    ] * senders and transfer.remote_port is not None
    ports = transfer.remote_ports or [transfer.remote_port]
    assert len(set(ports)) == senders
    if missing is not None:
        ports[missing] = 1
    fetch_job = structs.replace(JOB, kv_transfer=structs.replace(transfer, remote_ports=ports))
    hits = 64 if missing is None else 0
    outputs = on_ranks(readers, continue_jobs, num_virtual_ranks=2)
    assert outputs == [(alone.token_ids, alone.logprobs, hits)] * readers
    for leasing, leases, _ in leased:
        with leasing:
            if missing is None:  # until the last reader has released it
                wait_for(lambda leases=leases: not leases.num_bytes)  # type: ignore[misc]


def test_a_lease_ends_with_its_last_reader(pair: tuple[Engine, Engine, Pages]) -> None:
    leases = Leases(60, 1 << 30)
    leases.add("a", pair[2])
    for reader in (0, 2, 2, 1):
        leases.release("a", 4, reader)
        assert leases.get("a") is pair[2]
    leases.release("a", 4, 3)
    assert leases.get("a") is None and leases.num_bytes == 0


def test_rank_counts_that_do_not_divide_are_refused(
    models: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """The prompt is then computed at once."""
    transfer = KvTransfer(
        do_remote_prefill=True,
        remote_request_id="0" * 32,
        remote_host="127.0.0.1",
        remote_port=1,
        remote_ports=[1, 2, 3],
    )
    fetch_job = structs.replace(JOB, kv_transfer=transfer)

    def take(ranks: Ranks) -> list[Any]:
        engine = make(NAIVE, ranks, model=str(models["heads"]), tensor_parallel_size=2)
        fetching, _, _ = exchange(engine, fetch_job)
        with fetching:
            return list(fetching.take(0.0))

    assert on_ranks(2, take) == [[fetch_job]] * 2
    assert "tensor_parallel_size of one engine must divide the other's, got 3 and 2" in caplog.text


# Model, cache, method, ranks of the prefill engine, ranks of the decode engine.
WITH_RANKS = [
    ("heads", "auto", "naive", 2, 1),
    ("heads", "auto", "ngram", 1, 2),
    ("heads", "auto", "mtp", 2, 1),
    ("heads", "int8", "mtp", 1, 2),
    ("heads", "fp8", "mtp", 2, 4),
    ("heads", "auto", "suffix", 4, 1),
    ("heads", "int8", "mtp", 4, 2),
    ("latents", "auto", "mtp", 2, 1),
    ("latents", "auto", "mtp", 1, 2),
    ("states", "auto", "naive", 1, 2),
    ("states", "int8", "mtp", 2, 1),
    ("states", "auto", "draft_model", 2, 1),
    ("mamba", "auto", "suffix", 2, 1),
    ("mamba", "auto", "naive", 1, 2),
    ("shared", "auto", "ngram", 2, 1),
]


@pytest.mark.parametrize("kind,cache,method,senders,readers", WITH_RANKS)
def test_any_rank_counts_keep_the_bits_of_one_engine(
    models: dict[str, Path],
    kind: str,
    cache: str,
    method: str,
    senders: int,
    readers: int,
) -> None:
    """The one engine has as many virtual TP ranks, and does not speculate."""
    virtual_ranks = max(senders, readers)
    settings = {**CACHES[cache], "model": str(models[kind]), "exact_across_tp": virtual_ranks}
    lookahead = 1 if method == "mtp" else 0

    def engine(ranks: Ranks) -> Engine:
        own = method_of(models, method)
        return make(own, ranks, **settings, tensor_parallel_size=ranks.size)

    def compute(ranks: Ranks) -> list[Pages]:
        prefill = engine(ranks)
        prefill.generate(PROMPTS, replace(SEEDED, max_tokens=1))
        return [PageTransfer(prefill).take(prompt, SEEDED) for prompt in PROMPTS]

    def continue_jobs(ranks: Ranks) -> Any:
        decode, moved = engine(ranks), []
        own = [computed[one] for one in sources(senders, ranks.size, ranks.rank)]
        for prompt, *parts in zip(PROMPTS, *own, strict=True):
            expected = PageTransfer(decode).expected(prompt, SEEDED)
            parts = [cut(part, ranks.size, ranks.rank) for part in parts]
            moved.append(PageTransfer(decode).give(joined(parts, expected), expected))
        assert moved == [(length - max(1, lookahead)) // 16 for length in LENGTHS]
        outputs = run(decode, SEEDED)
        assert decode.stats.prefix_cache_hits >= 16 * sum(moved)
        if method == "draft_model":
            spec = decode.stats.speculative
            assert spec.num_accepted_tokens == spec.num_draft_tokens > 50
        return outputs

    computed = on_ranks(senders, compute, num_virtual_ranks=virtual_ranks)
    assert (
        on_ranks(readers, continue_jobs, num_virtual_ranks=virtual_ranks)
        == [run(make(NAIVE, **settings), SEEDED)] * readers
    )


def test_pages_of_another_exact_across_tp_are_refused(models: dict[str, Path]) -> None:
    """Their bits differ from those that this engine would compute."""
    settings = {"model": str(models["heads"])}
    prefill, decode = make(NAIVE, **settings, exact_across_tp=2), make(NAIVE, **settings)
    prefill.generate([PROMPTS[-1]], replace(GREEDY, max_tokens=1))
    pages = PageTransfer(prefill).take(PROMPTS[-1], GREEDY)
    expected = PageTransfer(decode).expected(PROMPTS[-1], GREEDY)
    with pytest.raises(KvTransferError, match="exact_across_tp must be 1, got 2"):
        PageTransfer(decode).give(pages, expected)


COUNTS = (1, 2, 4, 8)


@pytest.mark.parametrize("senders", COUNTS)
@pytest.mark.parametrize("readers", COUNTS)
def test_every_head_is_transferred_once(senders: int, readers: int) -> None:
    """Each decode rank gets its own heads, and every prefill rank sends some."""
    widths = (3, 1)
    layouts = [Layout("int16", (2, 4 * heads, 5), widths) for heads in (1, 2, 4, 8, 16)]

    def header(size: int, rank: int) -> Header:
        return Header(
            4,
            8,
            "",
            size,
            rank,
            size,
            rank,
            16,
            [1],
            3,
            "",
            0,
            layouts[1:],
            layouts[:1],
            [layouts[-1]],
        )

    def pages(own: Header) -> Pages:
        """Return pages of distinct numbers per tensor, page, row, column and element."""
        data = b""
        for number, (layout, count) in enumerate(own.tensors):
            heads = layout.num_heads
            shape = (count, *layout.shape)
            whole = torch.arange(math.prod(shape), dtype=torch.int16).view(shape) + 1000 * number
            begin = own.rank * heads // own.num_ranks
            end = begin + max(heads // own.num_ranks, 1)
            first, second = whole[:, :, : 3 * heads], whole[:, :, 3 * heads :]
            part = torch.cat([first[:, :, 3 * begin : 3 * end], second[:, :, begin:end]], 2)
            data += part.numpy().tobytes()
        return Pages(own, bytearray(data))

    sent = [pages(header(senders, rank)) for rank in range(senders)]
    for reader in range(readers):
        ranks = sources(senders, readers, reader)
        parts = [cut(sent[rank], readers, reader) for rank in ranks]
        expected = header(readers, reader)
        assert sum(len(part.data) for part in parts) == expected.num_bytes
        assert joined(parts, expected) == pages(expected)
        for rank in set(range(senders)) - set(ranks):
            with pytest.raises(KvTransferError, match=f"shares no heads with rank {rank} of"):
                cut(sent[rank], readers, reader)
    assert {one for i in range(readers) for one in sources(senders, readers, i)} == set(
        range(senders)
    )
