# SPDX-License-Identifier: Apache-2.0
"""Many engines behind many doors: a queue of jobs in Redis.

Every node has a door and an engine. A job that comes in at one node's door goes into a stream, and
whichever node reads it first runs it: one of role prefill the prompt alone, whose pages it leases
and for which it writes the job to the next stream; one of role decode or mixed the rest. What the
steps bring goes to the stream of the node where the job came in.

Nothing that is lost loses a job. A node that dies stops its heartbeat, and another one writes what
it had read to the stream again. A Redis that has lost its memory is written everything again by
those who wait for it. The job is then computed anew, with the same bits, for its seed was drawn at
the door; and the door counts what it has passed on, so that no token comes twice. A node that was
taken for dead and goes on does no harm: its runs are some of several.

Names begin with the topic and the digest of the execution contract: engines with other bits never
meet. All values are MessagePack.
"""

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
from msgspec import Struct, structs
from redis.exceptions import RedisError, ResponseError

from specops.disaggregated.waiting import Told, Waiting
from specops.service.client import EngineClient
from specops.service.messages import (
    Abort,
    Batch,
    Command,
    Event,
    Failed,
    KvTransfer,
    Output,
    Refused,
    Submit,
)
from specops.service.wire import encoded, packed, to_process, unpacked

logger = logging.getLogger(__name__)

_GROUP = "nodes"
_BEAT_SECONDS = 0.3
_DEAD_SECONDS = 2.0  # without a heartbeat
_BLOCK_MILLISECONDS = 500
_AWAY_SECONDS = 0.2  # before Redis is tried again
# Who reads which jobs. Those of a stream whose readers are all dead are read by the others.
_READS = {"prefill": {"prefill"}, "decode": {"decode"}, "mixed": {"prefill", "decode"}}
# A consumer that has read something since it was looked at stays: its jobs would be nobody's.
_FORGET = """
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) == 0 then
  redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
end
"""
_MOST_RUNS = 32  # jobs of others that a node has at a time
_MOST_ATTEMPTS = 5  # of a job whose nodes die: it may be what they die of
_FRAME = 4  # bytes before a message that `encoded` writes
_TAKES = ("ok", "failing")  # an engine of such health takes jobs
_ERRORS = (RedisError, OSError, asyncio.TimeoutError)


class Ticket(Struct, array_like=True):
    """A job in a stream.

    Attributes:
        node: where it came in.
        job: its number there.
        submit: the job, as it goes over an engine's socket.
        attempt: how often it has been written to a stream before, as its node was lost.
        kv_transfer: where the pages of its prompt are; None: nowhere.
    """

    node: str
    job: int
    submit: bytes
    attempt: int = 0
    kv_transfer: KvTransfer | None = None


class Drop(Struct, tag=True, array_like=True):
    """Nobody waits for a run any more."""

    run: str


_ticket = msgspec.msgpack.Decoder(Ticket)
_heartbeat = msgspec.msgpack.Decoder(tuple[int, Literal["prefill", "decode", "mixed"]])
_message = msgspec.msgpack.Decoder(Told | Drop, dec_hook=unpacked)
_encode = msgspec.msgpack.Encoder(enc_hook=packed).encode


@dataclass
class _Run:
    """A job of some node that this node's engine runs."""

    ticket: Ticket
    stream: str
    entry: bytes
    name: str
    num_left: int  # choices that have not ended
    is_prefill: bool
    place: int = 0


class SplitwiseClient(EngineClient):
    """A node: the door's jobs to Redis, and Redis' jobs to the engine of this node.

    Args:
        engine: of this node; its exchange leases and fetches pages.
        role: "prefill", "decode" or "mixed".
        topic: what the names of streams begin with.
        ttl: seconds after which what nobody reads is dropped, and a job without an answer fails.
        connect: opens a connection to Redis.
    """

    def __init__(
        self,
        engine: EngineClient,
        *,
        role: str,
        topic: str,
        ttl: float,
        connect: Callable[[], Any],
    ) -> None:
        # Its own requests hand nothing over: the nodes do.
        super().__init__(structs.replace(engine.capabilities, role=""), engine.status)
        self._engine, self._role, self._ttl, self._connect = engine, role, ttl, connect
        self.node = secrets.token_hex(8)
        prefix = f"{topic}:{engine.capabilities.contract['digest']}"
        self._prefix = prefix
        self._streams = {name: f"{prefix}:{name}" for name in ("prefill", "decode")}
        self._numbers = itertools.count()  # of runs, for the engine
        self._waiting: dict[int, Waiting] = {}
        self._runs: dict[int, _Run] = {}
        # Commands for Redis, in order: all of one are carried out or none.
        self._outbox: deque[list[tuple[Any, ...]]] = deque()
        self._has_mail = asyncio.Event()
        self._roles: set[str] = set()  # of nodes that live
        self._redis_run = ""  # which Redis it was, the last time
        self._last = b"0"  # message that was read
        self._task: asyncio.Task[None] | None = None

    @property
    def is_behind(self) -> bool:
        """Whether the engine has not read so much that no further job may be handed over."""
        return self._engine.is_behind

    async def start(
        self, receive: Callable[[Batch], None], lost: Callable[[str], None], num_clients: int
    ) -> None:
        """Begins; called once, on the event loop."""
        await super().start(receive, lost, num_clients)
        await self._engine.start(self._from_engine, self._engine_lost, num_clients)
        self._task = asyncio.ensure_future(self._work())

    async def stop(self) -> None:
        """Drops what is left, and waits for the engine to end. Others go on with what it ran."""
        if self._task is not None:
            await _ended([self._task])
        await self._engine.stop()

    # ---- jobs of this node's door ----

    def _send(self, command: Command) -> None:
        if isinstance(command, Submit):
            if command.params.seed is None:  # every run has to draw the same
                seeded = replace(command.params, seed=secrets.randbits(53))
                command = structs.replace(command, params=seeded)
            self._waiting[command.job] = Waiting(command, time.monotonic())
            self._enqueue(command)
        elif isinstance(command, Abort):
            waiting = self._waiting.pop(command.job, None)
            if waiting is not None:
                gone = f"{self._prefix}:gone:{self.node}:{command.job}"
                self._post(("SET", gone, b"1", "EX", int(self._ttl) or 1))
                if waiting.runner is not None:
                    node, run = waiting.runner
                    self._post(*self._told(node, Drop(run)))

    def _enqueue(self, job: Submit) -> None:
        params = job.params
        has_prefill = bool(self._roles & {"prefill"}) and len(job.prompts) == 1
        wants_rows = params.prompt_logprobs is not None or params.max_tokens == 0
        name = "prefill" if has_prefill and not wants_rows else "decode"
        ticket = Ticket(self.node, job.job, encoded(job)[_FRAME:])
        self._post(("XADD", self._streams[name], "*", "t", _encode(ticket)))

    def _take_told(self, told: Told) -> None:
        waiting = self._waiting.get(told.job)
        if waiting is None:
            return self._post(*self._told(told.node, Drop(told.run)))
        waiting.since = time.monotonic()
        events = waiting.news(told)
        if not events:
            return
        if any(isinstance(event, (Refused, Failed)) for event in events) or (
            len(waiting.ended) == len(waiting.job.prompts) * waiting.job.params.n
        ):
            del self._waiting[told.job]
        self._tell_door(events)

    def _tell_door(self, events: list[Event]) -> None:
        now, status = time.perf_counter(), self._engine.status
        self._take(Batch(now, "ok", status, None, {}, events))

    def _fail_old(self) -> None:
        """Ends jobs that have waited too long."""
        now = time.monotonic()
        for number, waiting in list(self._waiting.items()):
            if now - waiting.since > self._ttl:
                del self._waiting[number]
                message = f"no node has answered in {self._ttl:g} seconds"
                self._tell_door([Failed(number, message)])

    # ---- jobs of all, on this node's engine ----

    def _begin(self, stream: str, entry: bytes, ticket: Ticket, submit: Submit) -> None:
        if self._engine.health not in _TAKES:
            return self._again(stream, entry, ticket)
        number = next(self._numbers)
        is_prefill = stream == self._streams["prefill"] and self._role == "prefill"
        if is_prefill:
            params = replace(
                submit.params, max_tokens=1, n=1, structured_output=None, logprobs=None, stop=()
            )
            submit = structs.replace(
                submit,
                params=params,
                streaming=False,
                kv_transfer=KvTransfer(do_remote_decode=True),
            )
        else:
            submit = structs.replace(submit, kv_transfer=ticket.kv_transfer)
        count = len(submit.prompts) * submit.params.n
        run = _Run(ticket, stream, entry, secrets.token_hex(8), count, is_prefill)
        self._runs[number] = run
        self._engine.submit(structs.replace(submit, job=number))

    def _from_engine(self, batch: Batch) -> None:
        """Passes on what a step of this node's engine has brought."""
        by_run: dict[int, list[Event]] = {}
        for event in batch.events:
            if event.job in self._runs:
                by_run.setdefault(event.job, []).append(event)
        for number, events in by_run.items():
            run = self._runs[number]
            run.num_left -= sum(isinstance(one, Output) and one.end is not None for one in events)
            is_over = not run.num_left or any(isinstance(one, (Refused, Failed)) for one in events)
            if is_over:
                del self._runs[number]
            if run.is_prefill:
                if is_over:
                    self._hand_over(run, events)
                continue
            message = Told(run.ticket.job, self.node, run.name, run.place, events)
            run.place += 1
            told = self._told(run.ticket.node, message)
            self._post(*told, *self._done(run.stream, run.entry, is_over))
        self._take(structs.replace(batch, full=None, events=[]))

    def _hand_over(self, run: _Run, events: Iterable[Event]) -> None:
        """Writes a job to the next stream; without pages where there are none."""
        found = [one.end.kv_transfer for one in events if isinstance(one, Output) and one.end]
        ticket = structs.replace(run.ticket, kv_transfer=found[0] if found else None)
        added = ("XADD", self._streams["decode"], "*", "t", _encode(ticket))
        self._post(added, *self._done(run.stream, run.entry, True))

    def _engine_lost(self, message: str) -> None:
        """The engine of this node is gone: its jobs are for others, or for the next one."""
        runs, self._runs = self._runs, {}
        for run in runs.values():
            self._again(run.stream, run.entry, run.ticket)

    def _again(self, stream: str, entry: bytes, ticket: Ticket) -> None:
        """Writes a job whose run is lost to its stream again."""
        if ticket.attempt + 1 >= _MOST_ATTEMPTS:
            sentence = f"{_MOST_ATTEMPTS} nodes were lost while they ran it"
            message = Told(
                ticket.job, self.node, secrets.token_hex(8), 0, [Failed(ticket.job, sentence)]
            )
            first = self._told(ticket.node, message)
        else:
            again = structs.replace(ticket, attempt=ticket.attempt + 1)
            first = [("XADD", stream, "*", "t", _encode(again))]
        self._post(*first, *self._done(stream, entry, True))

    # ---- Redis ----

    def _told(self, node: str, message: Told | Drop) -> list[tuple[Any, ...]]:
        stream = f"{self._prefix}:node:{node}"
        # A node that is dead would not let it expire.
        return [("XADD", stream, "*", "m", _encode(message)), self._expiring(stream)]

    def _expiring(self, stream: str) -> tuple[Any, ...]:
        return "EXPIRE", stream, int(self._ttl) or 1

    def _done(self, stream: str, entry: bytes, is_over: bool) -> list[tuple[Any, ...]]:
        if not is_over:
            return []
        return [("XACK", stream, _GROUP, entry), ("XDEL", stream, entry)]

    def _post(self, *commands: tuple[Any, ...]) -> None:
        self._outbox.append(list(commands))
        self._has_mail.set()

    async def _work(self) -> None:
        """Talks to Redis, and begins anew when it goes away."""
        is_away = False
        while True:
            client = self._connect()
            try:
                await self._meet(client)
                if is_away:
                    logger.warning("Redis is back")
                is_away = False
                parts = (self._beat, self._write, self._read, self._listen, self._mourn)
                tasks = [asyncio.ensure_future(part(client)) for part in parts]
                try:
                    await asyncio.gather(*tasks)
                finally:
                    await _ended(tasks)
            except Exception as error:
                if not isinstance(error, _ERRORS):
                    logger.exception("the queue's work failed, and begins anew")
                elif not is_away:
                    logger.warning("Redis is away: %s", error)
                is_away = True
                self._fail_old()
                await asyncio.sleep(_AWAY_SECONDS)
            finally:
                await client.aclose()

    async def _meet(self, client: Any) -> None:
        """Makes what has to be there; where Redis is another one, everything is written again."""
        info = await client.info("server")
        if self._redis_run and info["run_id"] != self._redis_run:
            # What was told last may be lost: the runs end, and begin again where they are read.
            for number in self._runs:
                self._engine.abort(number)
            self._runs.clear()
            self._outbox.clear()
            self._last = b"0"
            for waiting in self._waiting.values():
                self._enqueue(waiting.job)
        self._redis_run = info["run_id"]
        for stream in self._streams.values():
            try:
                await client.xgroup_create(stream, _GROUP, id="0", mkstream=True)
            except ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise
        await self._beat_once(client)

    async def _beat(self, client: Any) -> None:
        while True:
            if (await client.info("server"))["run_id"] != self._redis_run:
                raise ConnectionError("it is another one than before")
            await self._beat_once(client)
            self._fail_old()
            await asyncio.sleep(_BEAT_SECONDS)

    async def _beat_once(self, client: Any) -> None:
        """Says that this node lives, and finds out who does."""
        alive = f"{self._prefix}:alive"
        now, _ = await client.time()
        await client.hset(alive, self.node, _encode([now, self._role]))
        await client.execute_command(*self._expiring(f"{self._prefix}:node:{self.node}"))
        self._roles = set((await self._nodes(client)).values())

    async def _nodes(self, client: Any) -> Mapping[bytes, str]:
        """The nodes that live, and their roles. Whose heartbeat cannot be read does not."""
        now, _ = await client.time()
        alive = {}
        for node, value in (await client.hgetall(f"{self._prefix}:alive")).items():
            with contextlib.suppress(msgspec.DecodeError):
                since, role = _heartbeat.decode(value)
                if now - since <= _DEAD_SECONDS + 1:
                    alive[node] = role
        return alive

    async def _write(self, client: Any) -> None:
        while True:
            await self._has_mail.wait()
            while self._outbox:
                commands = self._outbox[0]
                async with client.pipeline(transaction=True) as pipe:
                    for command in commands:
                        pipe.execute_command(*command)
                    await pipe.execute()
                if self._outbox and self._outbox[0] is commands:
                    self._outbox.popleft()
            self._has_mail.clear()

    async def _read(self, client: Any) -> None:
        """Reads jobs while the engine may have more."""
        own = {run.entry for run in self._runs.values()}
        for stream in self._streams.values():  # read, but lost on the way
            for _, entries in await client.xreadgroup(_GROUP, self.node, {stream: "0"}, count=1000):
                for entry, fields in entries:
                    if entry not in own and fields:
                        await self._accept(client, stream, entry, fields)
        while True:
            room = _MOST_RUNS - len(self._runs)
            if room <= 0 or self._engine.health not in _TAKES:
                await asyncio.sleep(0.02)
                continue
            found = await client.xreadgroup(
                *(_GROUP, self.node, dict.fromkeys(self._readable(), ">")),
                count=min(room, 4),
                block=_BLOCK_MILLISECONDS,
            )
            for stream, entries in found:
                for entry, fields in entries:
                    await self._accept(client, stream.decode(), entry, fields)

    def _readable(self) -> list[str]:
        """The streams that this node reads now: its own, and those that nobody else reads."""
        others = set[str]().union(*(_READS[role] for role in self._roles))
        own = _READS[self._role]
        return [
            stream for name, stream in self._streams.items() if name in own or name not in others
        ]

    async def _accept(
        self, client: Any, stream: str, entry: bytes, fields: Mapping[bytes, Any]
    ) -> None:
        """Begins a job that was read, unless nobody waits for it."""
        try:
            ticket = _ticket.decode(fields[b"t"])
            submit = to_process(memoryview(ticket.submit))
        except (KeyError, ValueError, msgspec.DecodeError):
            logger.error("a job in %s cannot be read, and is dropped", stream)
            return self._post(*self._done(stream, entry, True))
        if await client.exists(f"{self._prefix}:gone:{ticket.node}:{ticket.job}"):
            return self._post(*self._done(stream, entry, True))
        self._begin(stream, entry, ticket, submit)

    async def _listen(self, client: Any) -> None:
        """Reads what nodes have to say to this one."""
        own = f"{self._prefix}:node:{self.node}"
        while True:
            found = await client.xread({own: self._last}, count=256, block=_BLOCK_MILLISECONDS)
            for _, entries in found:
                for entry, fields in entries:
                    self._last = entry
                    message = _message.decode(fields[b"m"])
                    if isinstance(message, Told):
                        self._take_told(message)
                    else:
                        self._drop(message.run)
                await client.xdel(own, *[entry for entry, _ in entries])

    def _drop(self, name: str) -> None:
        for number, run in list(self._runs.items()):
            if run.name == name:
                self._engine.abort(number)
                del self._runs[number]
                self._post(*self._done(run.stream, run.entry, True))

    async def _mourn(self, client: Any) -> None:
        """Writes to the streams again what dead nodes had read."""
        while True:
            begin = time.monotonic()
            await asyncio.sleep(_DEAD_SECONDS / 2)
            alive = {*await self._nodes(client), self.node.encode()}
            if time.monotonic() - begin > _DEAD_SECONDS:
                continue  # this node was stopped, or Redis was: so the others may live as well
            for stream in self._streams.values():
                for one in await client.xinfo_consumers(stream, _GROUP):
                    if one["name"] not in alive:
                        await self._inherit(client, stream, one["name"])
            for node in await client.hkeys(f"{self._prefix}:alive"):
                if node not in alive:
                    await client.hdel(f"{self._prefix}:alive", node)

    async def _inherit(self, client: Any, stream: str, dead: bytes) -> None:
        pending = await client.xpending_range(stream, _GROUP, "-", "+", 1000, consumername=dead)
        if not pending:
            await client.eval(_FORGET, 1, stream, _GROUP, dead)
            return
        ids = [one["message_id"] for one in pending]
        # Who claims first gets it: for the others it is no longer idle.
        idle = int(_DEAD_SECONDS * 500)
        for entry, fields in await client.xclaim(stream, _GROUP, self.node, idle, ids):
            if fields:
                self._again(stream, entry, _ticket.decode(fields[b"t"]))


async def _ended(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancels tasks until they have ended: a client of Redis sometimes swallows a cancellation."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_AWAY_SECONDS)
