# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the packages are missing, nothing else is imported)
"""KV events: a subscriber rebuilds the contents of the prefix cache from vLLM's messages."""

import contextlib
import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

msgspec = pytest.importorskip("msgspec")
zmq = pytest.importorskip("zmq")

from checkpoints import write_config
from msgspec import structs
from specops.api.messages import Batch
from specops.disaggregated import kv_events
from specops.disaggregated.kv_events import BlockStored, KvEvents, PrefixEvents
from specops.engine import Engine, EngineConfig, SamplingParams
from specops.service.snapshot import status_of
from specops.service.wire import KvEventSettings
from zmq.utils.monitor import parse_monitor_message

SIZE = 16
SHORT = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


class Subscriber:
    """The set of cached blocks, rebuilt as vLLM's consumers do: from MessagePack, by hash.

    Attributes:
        tokens: Tokens of each block and of the blocks before it, by hash.
        cleared: Number of times that all blocks were cleared.
        removed: Number of blocks that were removed one by one.
    """

    def __init__(self) -> None:
        self.tokens: dict[int, tuple[int, ...]] = {}
        self.cleared = self.removed = 0
        self._next = 0

    def take(self, number: int, data: bytes) -> None:
        assert number == self._next
        self._next += 1
        _, events, rank = msgspec.msgpack.decode(data)
        assert rank == 1
        for event in events:
            name = event["type"]
            if name == "BlockStored":
                (own,), parent = event["block_hashes"], event["parent_block_hash"]
                token_ids = event["token_ids"]
                assert len(token_ids) == event["block_size"] == SIZE and event["medium"] == "GPU"
                assert event["lora_id"] is event["lora_name"] is None
                before = () if parent is None else self.tokens[parent]
                assert own not in self.tokens
                self.tokens[own] = (*before, *token_ids)
            elif name == "BlockRemoved":
                for one in event["block_hashes"]:
                    del self.tokens[one]
                    self.removed += 1
            else:
                assert event == {"type": "AllBlocksCleared"}
                self.tokens.clear()
                self.cleared += 1


def cached(engine: Engine) -> set[tuple[int, ...]]:
    """Return the prefixes in the pool."""
    found: set[tuple[int, ...]] = set()
    waiting: list[tuple[Any, tuple[int, ...]]] = [
        (root, ()) for root in engine._pool._roots.values()
    ]
    while waiting:
        prefix, before = waiting.pop()
        for data, child in prefix.children.items():
            tokens = (*before, *memoryview(data).cast("i"))
            found.add(tokens)
            waiting.append((child, tokens))
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(
        tmp_path_factory.mktemp("model"), num_hidden_layers=2, num_nextn_predict_layers=1
    )


@pytest.fixture
def recorder() -> PrefixEvents:
    return PrefixEvents()


@pytest.fixture
def engine(model: Path, recorder: PrefixEvents) -> Engine:
    settings = {
        "model": str(model),
        "load_format": "dummy",
        "device": "cpu",
        "speculative_config": '{"method": "mtp", "num_speculative_tokens": 2}',
        "page_size": SIZE,
        "num_pages": 24,
        "max_model_len": 160,
        "num_threads": 1,
    }
    return Engine(EngineConfig.from_plain(settings), on_prefix=recorder)


def batch_of(engine: Engine) -> Batch:
    return Batch(0.0, "ok", status_of(engine), None, {}, [])


@pytest.fixture
def settings(tmp_path: Path) -> KvEventSettings:
    return KvEventSettings(f"ipc://{tmp_path}/events", "kv", f"ipc://{tmp_path}/replay")


@pytest.fixture
def events(recorder: PrefixEvents, settings: KvEventSettings) -> Iterator[KvEvents]:
    with KvEvents(recorder, settings, 1, lambda batch: None) as made:
        yield made


def run(engine: Engine, events: KvEvents, count: int) -> None:
    """Run requests with and without drafts whose prompts share beginnings; far more than fit."""
    draw = random.Random(count)
    for number in range(count):
        start = [draw.randint(3, 5)] * draw.choice([16, 32])
        prompt = start + draw.choices(range(3, 150), k=draw.randint(1, 90))
        method = {"speculative_config": {"method": "naive"}} if number % 3 == 0 else {}
        name = engine.add_request(prompt, SHORT, **method)
        while engine.has_unfinished():
            engine.step()
            events.send(batch_of(engine))
        engine.completion(name)


def replayed(settings: KvEventSettings, first: int) -> dict[int, bytes]:
    """Return the messages from a number on, requested as vLLM's consumers do."""
    messages: dict[int, bytes] = {}
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(settings.replay)
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        while True:
            assert socket.poll(300_000), "there is no answer"
            _, topic, number, data = socket.recv_multipart()
            if int.from_bytes(number, "big", signed=True) == -1:
                return messages
            assert topic == b"kv"
            messages[int.from_bytes(number, "big")] = data


def test_subscriber_rebuilds_the_set_of_cached_blocks(
    engine: Engine, events: KvEvents, settings: KvEventSettings
) -> None:
    """The subscriber requests the messages that were sent before it subscribed."""
    run(engine, events, 2)
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.linger = 0
        socket.connect(settings.endpoint)
        socket.subscribe(b"k")
        count = 2
        while not socket.poll(0):  # messages are dropped until the subscription arrives
            count += 1  # other prompts than before
            run(engine, events, count)
        run(engine, events, 30)
        last = max(replayed(settings, 0))
        received: dict[int, bytes] = {}
        while last not in received:
            assert socket.poll(300_000), "a message is lost"
            topic, number, data = socket.recv_multipart()
            assert topic == b"kv"
            received[int.from_bytes(number, "big")] = data
    missed = replayed(settings, 0)
    assert received.items() <= missed.items() and received.keys() == set(
        range(min(received), last + 1)
    )
    assert replayed(settings, last) == {last: received[last]}
    subscriber = Subscriber()
    for place, data in sorted((missed | received).items()):
        subscriber.take(place, data)
    assert subscriber.cleared == 1 and subscriber.removed > 20
    assert set(subscriber.tokens.values()) == cached(engine) and len(subscriber.tokens) > 10


def test_failing_publisher_does_not_affect_the_engine(
    engine: Engine,
    recorder: PrefixEvents,
    settings: KvEventSettings,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine continues, the log has one traceback, and no queue grows."""

    def failing(value: int) -> bytes:
        raise MemoryError

    monkeypatch.setattr(kv_events, "_number", failing)
    batches: list[Batch] = []
    with KvEvents(recorder, settings, 1, batches.append) as events:
        events.send(batch_of(engine))  # all blocks are cleared
        events._thread.join(60)
        assert not events._thread.is_alive()
        run(engine, events, 3)
        assert events._queue.empty() and len(batches) > 3
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_transferred_pages_are_published(engine: Engine, recorder: PrefixEvents) -> None:
    """The pool publishes every registered page."""
    pool = engine._pool
    pages = pool.allocate(2)
    assert pages is not None
    first = pool.register(pages[0], None, range(SIZE), b"a")
    pool.register(pages[1], first, range(SIZE), b"b")
    duplicate = pool.allocate(1)
    assert duplicate is not None
    pool.register(duplicate[0], None, range(SIZE), b"c")  # the first prefix again
    assert [type(one).__name__ for one in recorder.events] == [
        "AllBlocksCleared",
        "BlockStored",
        "BlockStored",
    ]
    one, other = recorder.events[1:]
    assert isinstance(one, BlockStored) and isinstance(other, BlockStored)
    assert other.parent_block_hash == one.block_hashes[0] != other.block_hashes[0]


def test_hashes_depend_on_the_salt(engine: Engine, recorder: PrefixEvents) -> None:
    """Under another salt, a block of equal tokens and all blocks behind it have other hashes."""
    pool = engine._pool
    before = len(recorder.events)
    for salt in (None, "a", "b"):
        pages = pool.allocate(2)
        assert pages is not None
        first = pool.register(pages[0], None, range(SIZE), None, salt)
        pool.register(pages[1], first, range(SIZE), None, salt)
        pool.release(pages)
    stored = recorder.events[before:]
    hashes = [one.block_hashes[0] for one in stored if isinstance(one, BlockStored)]
    assert len(stored) == 6 == len(set(hashes))


@pytest.mark.parametrize("name", ["endpoint", "replay"])
def test_invalid_endpoint_is_refused(
    engine: Engine, recorder: PrefixEvents, settings: KvEventSettings, name: str
) -> None:
    wrong = structs.replace(settings, **{name: "tcp://nowhere"})
    with pytest.raises(ValueError, match=f"kv_events_{name} must be an endpoint to bind"):
        KvEvents(recorder, wrong, 1, lambda batch: None)


@pytest.fixture
def busy_publisher(
    engine: Engine,
    recorder: PrefixEvents,
    settings: KvEventSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[KvEvents]:
    """Yield a publisher that has sent 400 messages of the largest size."""
    all_sent, add = threading.Event(), kv_events._RetainedMessages.add

    def signaling(log: kv_events._RetainedMessages, data: bytes) -> int:
        if (number := add(log, data)) == 399:
            all_sent.set()
        return number

    monkeypatch.setattr(kv_events._RetainedMessages, "add", signaling)
    with KvEvents(recorder, settings, 1, lambda batch: None) as made:
        block = BlockStored([1 << 63], 1 << 63, [(1 << 31) - 1] * 64, 64, None, "GPU", None)
        recorder.events = [block] * (32 * 399 + 1)
        made.send(batch_of(engine))
        assert all_sent.wait(60)
        yield made


def requester(context: Any, settings: KvEventSettings) -> Any:
    socket = context.socket(zmq.DEALER)
    socket.linger, socket.rcvhwm = 0, 1
    socket.connect(settings.replay)
    return socket


def test_size_of_messages_is_limited(busy_publisher: KvEvents, settings: KvEventSettings) -> None:
    """The limit bounds the queue of a subscriber that does not read."""
    messages = replayed(settings, 0)
    assert sorted(messages) == list(range(400))
    assert 12_000 < max(map(len, messages.values())) < 16 << 10
    assert busy_publisher._publisher is not None and busy_publisher._replayer is not None
    assert busy_publisher._publisher.sndhwm == 2048 and busy_publisher._replayer.sndhwm == 64


def test_clients_that_do_not_read_replays_do_not_block_others(
    busy_publisher: KvEvents, settings: KvEventSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some clients do not read what they request. A client that reads gets all messages."""
    monkeypatch.setattr(kv_events, "_MAX_REPLAYS", 4)
    sent: Counter[bytes] = Counter()
    assert busy_publisher._replayer is not None
    send = busy_publisher._replayer.send_multipart

    def counting(parts: Any, flags: int) -> None:
        send(parts, flags)
        sent[parts[0]] += 1

    monkeypatch.setattr(busy_publisher._replayer, "send_multipart", counting, raising=False)
    with zmq.Context() as context:
        idle = [requester(context, settings) for _ in range(3)]
        for socket in idle:
            for _ in range(50):
                socket.send_multipart((b"", bytes(8)))
        assert all(socket.poll(20_000) for socket in idle)
        assert sorted(replayed(settings, 0)) == list(range(400))
        context.destroy(linger=0)
    *unread, read = sorted(sent.values())
    assert read == 401 and len(unread) == 3
    assert max(unread) < 200  # 64, and as many as fit into the buffers of the sockets


def test_number_of_clients_is_limited(
    engine: Engine,
    recorder: PrefixEvents,
    settings: KvEventSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A host may use half of what others leave free; silent connections do not count.

    A refused client is admitted as soon as another client leaves.
    """
    monkeypatch.setattr(kv_events, "_MAX_CLIENTS", 6)
    monkeypatch.setattr(kv_events, "_HANDSHAKE_SECONDS", 1)
    with (
        KvEvents(recorder, settings, 1, lambda batch: None),
        contextlib.ExitStack() as stack,
        zmq.Context() as context,
    ):
        for _ in range(20):
            silent = stack.enter_context(socket.socket(socket.AF_UNIX))
            silent.connect(settings.replay.removeprefix("ipc://"))

        def client(*events: int) -> tuple[Any, Any]:
            made = context.socket(zmq.DEALER)
            monitor = made.get_monitor_socket(sum(events))
            made.connect(settings.replay)
            assert monitor.poll(20_000)
            return made, monitor

        admitted = [client(zmq.EVENT_HANDSHAKE_SUCCEEDED) for _ in range(3)]
        waiting, refused = client(zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED)
        event = parse_monitor_message(refused.recv_multipart())["event"]
        assert event == zmq.EVENT_DISCONNECTED
        admitted[0][0].close()
        while event != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            assert refused.poll(20_000)
            event = parse_monitor_message(refused.recv_multipart())["event"]
        waiting.close()
        context.destroy(linger=0)


@pytest.mark.parametrize("hosts,admitted", [("aaaaaaaa", 4), ("aaaaabbbcc", 7), ("aaabcdefgh", 8)])
def test_number_of_clients_per_host_is_limited(
    hosts: str, admitted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "_MAX_CLIENTS", 8)
    clients = kv_events._Clients(None)  # type: ignore[arg-type]
    clients._host_of = dict(enumerate(hosts))
    assert sum(map(clients.admits, hosts)) == admitted


def test_oversized_request_closes_the_connection(
    busy_publisher: KvEvents, settings: KvEventSettings
) -> None:
    with zmq.Context() as context, requester(context, settings) as socket:
        socket.send_multipart((b"", bytes(1 << 20)))
        assert sorted(replayed(settings, 390)) == list(range(390, 400))
        assert not socket.poll(0)


def test_only_the_latest_messages_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number and the bytes of stored messages are limited; the numbering continues."""
    monkeypatch.setattr(kv_events, "_MAX_RETAINED", 3)
    monkeypatch.setattr(kv_events, "_MAX_RETAINED_BYTES", 10)
    log = kv_events._RetainedMessages()
    assert [log.add(data) for data in (b"1", b"2", b"3", b"4")] == [0, 1, 2, 3]
    assert log.data == {1: b"2", 2: b"3", 3: b"4"} and (log.first, log.end) == (1, 4)
    assert log.add(b"123456789") == 4 and log.data == {3: b"4", 4: b"123456789"}
