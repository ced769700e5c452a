# SPDX-License-Identifier: Apache-2.0
"""Queue of jobs in Redis that many frontends write to and many engines read from.

Every node has a frontend and an engine. A job that arrives at a node's frontend goes into a stream,
and the first node to read it runs it: a node of role prefill computes only the prompt, leases its
pages and writes the job to the next stream; a node of role decode or mixed computes the rest.
Events of its steps go to the stream of the node where the job arrived.

No job is lost if nodes or keys are lost. The heartbeat of a node that dies stops, and another node
writes the jobs that it had read to the stream again. If Redis has lost keys, the nodes resubmit the
jobs that they wait for. Such a job is computed again with the same bits, because its seed was drawn
at the frontend. The frontend counts the tokens that it has passed on, so that none is repeated. A
node that was presumed dead but is alive does no harm: its runs are only duplicates.

An error in handling a job or a message ends that job. After a connection error the node reconnects.
Any other error that repeats ends the process.

Keys in Redis begin with the topic and the digest of the execution contract, so that engines with
different bits never share jobs. For the same reason, servers with LoRA adapters add a digest of
them. All values are MessagePack.
"""

import asyncio
import contextlib
import hashlib
import itertools
import logging
import re
import secrets
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Struct, structs
from redis.exceptions import DataError, RedisError, ResponseError

from specops.api.messages import (
    Abort,
    Batch,
    Command,
    Event,
    Failed,
    Health,
    KvTransfer,
    Output,
    Refused,
    Submit,
)
from specops.disaggregated.waiting import RunEvents, Waiting
from specops.service.client import EngineClient
from specops.service.wire import encoded, packed, to_process, unpacked

logger = logging.getLogger(__name__)

_GROUP = "nodes"
_BEAT_SECONDS = 0.3
_DEAD_SECONDS = 2.0  # a node without a heartbeat for this long counts as dead
_BLOCK_MILLISECONDS = 500
_AWAY_SECONDS = 0.2  # pause before reconnecting to Redis
# Streams of jobs that each role reads. If all readers of a stream are dead, other roles read it.
_READS = {"prefill": {"prefill"}, "decode": {"decode"}, "mixed": {"prefill", "decode"}}
# Write a node's heartbeat, and create missing keys: the groups of the two job streams and of the
# node's own stream (KEYS 1 to 3), and the epoch. If a job stream was missing, the epoch is
# replaced, and all nodes then resubmit their jobs. The own stream has a group only to detect its
# loss: if a sender re-creates the stream, it has no group. EXPIRE comes first, because a script
# that has already written may continue when Redis is out of memory, and jobs must be read to free
# memory.
_BEAT = """
local streams, epoch, alive = {KEYS[1], KEYS[2], KEYS[3]}, KEYS[4], KEYS[5]
local group, new_epoch, node, heartbeat, seconds = unpack(ARGV)
local function has_group(key)
  if redis.call('EXISTS', key) == 0 then return false end
  for _, one in ipairs(redis.call('XINFO', 'GROUPS', key)) do
    if one[2] == group then return true end
  end
  return false
end
redis.call('EXPIRE', alive, seconds)
local made = {}
for i, key in ipairs(streams) do
  if not has_group(key) then
    redis.call('XGROUP', 'CREATE', key, group, '0', 'MKSTREAM')
    made[i] = true
  end
  redis.call('EXPIRE', key, seconds)
end
if made[1] or made[2] or redis.call('EXISTS', epoch) == 0 then
  redis.call('SET', epoch, new_epoch)
end
if heartbeat == '' then
  redis.call('HDEL', alive, node)
else
  redis.call('HSET', alive, node, heartbeat)
end
redis.call('EXPIRE', epoch, seconds)
redis.call('EXPIRE', alive, seconds)
return {redis.call('GET', epoch), made[3] and 1 or 0}
"""
_MIN_TTL_SECONDS = 60  # minimum time to live of keys; each heartbeat renews it
# Delete a dead consumer, unless it has read a job since it was checked: that job would be lost.
_FORGET = """
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) == 0 then
  redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
end
"""
_MAX_RUNS = 32  # jobs of all nodes that this node runs at a time
_MAX_ATTEMPTS = 5  # maximum runs of a job whose nodes die, since the job may be the cause
_BRIDGED_SECONDS = 2.0  # new jobs wait this long while Redis is unreachable
_OUTAGE_SECONDS = 30.0  # if Redis is unreachable for longer, waiting jobs fail
_MAX_FAILURES = 10  # failures of `_work` in a row, each after less than _WELL_SECONDS
_WELL_SECONDS = 10.0
_STOP_SECONDS = 2.0  # time to return jobs to their streams at a stop
_FRAME = 4  # size of the length prefix of a message from `encoded`
_ACCEPTING = ("ok", "failing")  # health of an engine that accepts jobs
_CODE = re.compile("(?!ERR )[A-Z]+ ")
_ERRORS = (RedisError, OSError, asyncio.TimeoutError)
# Errors of decoding a malformed value from another node; a retry cannot succeed.
_MALFORMED = (KeyError, TypeError, ValueError, RecursionError, msgspec.MsgspecError)


@dataclass
class _Transaction:
    """Commands for Redis that are executed in one transaction.

    Attributes:
        commands: the commands.
        job: the job of this node that ends if Redis refuses them.
    """

    commands: tuple[tuple[Any, ...], ...]
    job: int | None = None


class Ticket(Struct, array_like=True):
    """A job in a stream.

    Attributes:
        node: node where the job arrived.
        job: its number at that node.
        submit: the job, encoded as for an engine's socket.
        attempt: number of earlier runs that were lost with their nodes.
        kv_transfer: location of the pages of its prompt; None: there are none.
    """

    node: str
    job: int
    submit: bytes
    attempt: Annotated[int, msgspec.Meta(ge=0)] = 0
    kv_transfer: KvTransfer | None = None


class Drop(Struct, tag=True, array_like=True):
    """Message: no client waits for this run any more, so it may stop."""

    run: str


_ticket = msgspec.msgpack.Decoder(Ticket)
_heartbeat = msgspec.msgpack.Decoder(tuple[int, Literal["prefill", "decode", "mixed"]])
_message = msgspec.msgpack.Decoder(RunEvents | Drop, dec_hook=unpacked)
_encode = msgspec.msgpack.Encoder(enc_hook=packed).encode


@dataclass
class _Run:
    """A job of any node that this node's engine runs."""

    ticket: Ticket
    stream: str
    entry: bytes
    name: str
    num_left: int  # choices that have not ended
    is_prefill: bool
    place: int = 0


class SplitwiseClient(EngineClient):
    """Client of a node: sends its frontend's jobs to Redis, and jobs from Redis to its engine.

    Args:
        engine: engine of this node, which leases and fetches pages.
        role: "prefill", "decode" or "mixed".
        topic: prefix of the names in Redis.
        ttl: seconds after which unread entries are dropped, and jobs without an answer fail.
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
        # Clients must not send kv_transfer_params here: the nodes transfer KV themselves.
        super().__init__(structs.replace(engine.capabilities, role=""), engine.status)
        self._engine = engine
        self._role = role
        self._ttl = ttl
        self._connect = connect
        self._seconds = max(int(ttl), _MIN_TTL_SECONDS)  # time to live of keys
        self.node = secrets.token_hex(8)
        prefix = f"{topic}:{engine.capabilities.contract['digest']}"
        if adapters := sorted(engine.status.adapters.items()):
            prefix += f":{hashlib.sha256(repr(adapters).encode()).hexdigest()[:16]}"
        self._prefix = prefix
        self._own_stream = f"{prefix}:node:{self.node}"
        self._alive = f"{prefix}:alive"
        self._streams = {name: f"{prefix}:{name}" for name in ("prefill", "decode")}
        self._numbers = itertools.count()  # the engine's numbers of runs
        self._waiting: dict[int, Waiting] = {}
        self._runs: dict[int, _Run] = {}
        self._outbox: deque[_Transaction] = deque()
        self._has_commands = asyncio.Event()
        self._roles: set[str] = set()  # roles of live nodes
        self._identity: tuple[str, bytes] | None = None  # Redis' run id and the epoch
        self._has_lost_stream = False  # whether the stream of messages to this node was lost
        self._last = b"0"  # id of the last message that was read
        self._away_since: float | None = None  # time since when there is no connection
        self._refused_since: float | None = None  # time since when commands are refused
        self._has_failed = False
        self._is_stopping = False
        self._has_stopped_reading = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def health(self) -> Health:
        """Health of the queue and of this node's engine.

        "disconnected" if Redis has been unreachable for longer than new jobs wait. A restarting
        engine counts as "ok": its node still accepts jobs, which wait for this engine or run on
        another node.
        """
        if self._has_failed:
            return "failed"
        if self._seconds_away() > _BRIDGED_SECONDS:
            return "disconnected"
        return "ok" if self._engine.health == "restarting" else self._engine.health

    @health.setter
    def health(self, value: Health) -> None:
        """Ignore the value: the getter derives the health from the queue and the engine."""

    def _seconds_away(self) -> float:
        """Return for how long Redis has been unreachable, or has refused commands."""
        begins = [since for since in (self._away_since, self._refused_since) if since is not None]
        return time.monotonic() - min(begins) if begins else 0.0

    @property
    def is_behind(self) -> bool:
        """True if the engine has too much unread input for another job to be submitted."""
        return self._engine.is_behind

    async def start(
        self, receive: Callable[[Batch], None], lost: Callable[[str], None], num_clients: int
    ) -> None:
        """Start the node; called once, on the event loop."""
        await super().start(receive, lost, num_clients)
        await self._engine.start(self._from_engine, self._engine_lost, num_clients)
        self._task = asyncio.ensure_future(self._work())

    async def stop(self) -> None:
        """Requeue the jobs that run here, drop those that arrived here, and end the engine."""
        self._is_stopping = True
        for job in list(self._waiting):
            self._forget(job)
        runs = self._runs
        self._runs = {}
        for number, run in runs.items():
            self._engine.abort(number)
            self._requeue(run.stream, run.entry, run.ticket)
        if self._task is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._all_written(), _STOP_SECONDS)
            await _cancelled([self._task])
        await self._engine.stop()

    async def _all_written(self) -> None:
        """Wait until reading has stopped and Redis has received all commands."""
        await self._has_stopped_reading.wait()
        self._post(("HDEL", self._alive, self.node))
        while self._outbox:
            await asyncio.sleep(0.01)

    # ---- jobs of this node's frontend ----

    def _send(self, command: Command) -> None:
        if isinstance(command, Submit):
            if command.params.seed is None:  # all runs of the job must draw the same random numbers
                seeded = replace(command.params, seed=secrets.randbits(53))
                command = structs.replace(command, params=seeded)
            self._enqueue(command)
            self._waiting[command.job] = Waiting(command, time.monotonic())
        elif isinstance(command, Abort):
            self._forget(command.job)

    def _enqueue(self, job: Submit) -> None:
        """Write a job to the prefill stream, or the decode stream if no prefill node may run it."""
        params = job.params
        has_prefill = bool(self._roles & {"prefill"}) and len(job.prompts) == 1
        wants_rows = params.prompt_logprobs is not None or params.max_tokens == 0
        # A job that exceeds the context goes to a decode engine, which refuses it at once.
        length = len(job.prompts[0]) + (1 if params.max_tokens is None else params.max_tokens)
        fits = length <= self.capabilities.max_model_len
        name = "prefill" if has_prefill and fits and not wants_rows else "decode"
        ticket = Ticket(self.node, job.job, encoded(job)[_FRAME:])
        self._post(("XADD", self._streams[name], "*", "t", _encode(ticket)), job=job.job)

    def _submit_again(self, waiting: Waiting) -> None:
        """Submit a job again after its messages or entry were lost; its tokens stay the same."""
        for node, run in waiting.abandon_runs():
            self._post(*self._message_commands(node, Drop(run)))
        self._enqueue(waiting.job)

    def _take_events(self, message: RunEvents) -> None:
        waiting = self._waiting.get(message.job)
        if waiting is None:
            return self._post(*self._message_commands(message.node, Drop(message.run)))
        waiting.since = time.monotonic()
        events = waiting.new_events(message)
        if events is None:
            if waiting.num_gaps >= _MAX_ATTEMPTS:
                sentence = f"messages were lost in {_MAX_ATTEMPTS} attempts to run the request"
                return self._give_up(Failed(message.job, sentence))
            logger.warning("messages of job %d were lost; submitting the job again", message.job)
            return self._submit_again(waiting)
        if not events:
            return
        if any(isinstance(event, (Refused, Failed)) for event in events) or (
            len(waiting.ended) == len(waiting.job.prompts) * waiting.job.params.n
        ):
            if waiting.abandoned:  # nodes may have written the job to a stream again
                self._forget(message.job)
            else:
                del self._waiting[message.job]
        self._notify_frontend(events)

    def _notify_frontend(self, events: list[Event]) -> None:
        now = time.perf_counter()
        self._handle_batch(Batch(now, "ok", self._engine.status, None, {}, events))

    def _fail_old(self) -> None:
        """End jobs that have waited too long."""
        if self._seconds_away() > _OUTAGE_SECONDS:
            for number in list(self._waiting):
                sentence = f"Redis has been unreachable for {_OUTAGE_SECONDS:g} seconds"
                self._give_up(Refused(number, "away", sentence))
        now = time.monotonic()
        for number, waiting in list(self._waiting.items()):
            if now - waiting.since > self._ttl:
                self._give_up(Failed(number, f"no node has answered in {self._ttl:g} seconds"))

    def _give_up(self, event: Failed | Refused) -> None:
        """End a job of this node for its client and on all other nodes."""
        self._forget(event.job)
        self._notify_frontend([event])

    def _forget(self, job: int) -> None:
        """Stop waiting for a job, and make other nodes stop or drop it."""
        waiting = self._waiting.pop(job, None)
        if waiting is None:
            return
        key = f"{self._prefix}:gone:{self.node}:{job}"
        self._post(("SET", key, b"1", "EX", self._seconds))
        if waiting.runner is not None:
            node, run = waiting.runner
            self._post(*self._message_commands(node, Drop(run)))

    # ---- jobs of all nodes, on this node's engine ----

    def _begin(self, stream: str, entry: bytes, ticket: Ticket, submit: Submit) -> None:
        """Submit a job that was read from a stream to this node's engine.

        Raises:
            Exception: the job cannot be run; the engine has not received it.
        """
        if self._is_stopping:
            return self._requeue(stream, entry, ticket)
        if self._engine.health not in _ACCEPTING:
            return self._requeue_lost(stream, entry, ticket)
        number = next(self._numbers)
        is_prefill = stream == self._streams["prefill"] and self._role == "prefill"
        if is_prefill:
            submit = structs.replace(
                submit,
                params=submit.params.for_prompt(),
                streaming=False,
                kv_transfer=KvTransfer(do_remote_decode=True),
            )
        else:
            submit = structs.replace(submit, kv_transfer=ticket.kv_transfer)
        count = len(submit.prompts) * submit.params.n
        run = _Run(ticket, stream, entry, secrets.token_hex(8), count, is_prefill)
        self._engine.submit(structs.replace(submit, job=number))
        self._runs[number] = run

    def _from_engine(self, batch: Batch) -> None:
        """Pass on the events of a step of this node's engine."""
        by_run: dict[int, list[Event]] = {}
        for event in batch.events:
            if event.job in self._runs:
                by_run.setdefault(event.job, []).append(event)
        for number, events in by_run.items():
            run = self._runs[number]
            try:
                self._forward(number, run, events)
            except Exception as error:
                if self._runs.pop(number, None) is not None:
                    self._engine.abort(number)
                self._refuse(run.stream, run.entry, run.ticket, error)
        self._handle_batch(structs.replace(batch, full=None, events=[]))

    def _forward(self, number: int, run: _Run, events: list[Event]) -> None:
        """Send the events of one run to the node that waits for them."""
        run.num_left -= sum(isinstance(event, Output) and event.end is not None for event in events)
        is_over = not run.num_left or any(isinstance(event, (Refused, Failed)) for event in events)
        if is_over:
            del self._runs[number]
        if run.is_prefill:
            if is_over:
                self._transfer(run, events)
            return
        message = RunEvents(run.ticket.job, self.node, run.name, run.place, events)
        commands = self._message_commands(run.ticket.node, message)
        run.place += 1
        self._post(*commands, *self._done(run.stream, run.entry, is_over))

    def _transfer(self, run: _Run, events: Iterable[Event]) -> None:
        """Write a prefilled job to the decode stream, with the location of its pages if any."""
        transfers = [
            event.end.kv_transfer for event in events if isinstance(event, Output) and event.end
        ]
        ticket = structs.replace(run.ticket, kv_transfer=transfers[0] if transfers else None)
        added = ("XADD", self._streams["decode"], "*", "t", _encode(ticket))
        self._post(added, *self._done(run.stream, run.entry, True))

    def _engine_lost(self, message: str) -> None:
        """Write all running jobs to their streams again, for other nodes or the next engine."""
        runs = self._runs
        self._runs = {}
        for run in runs.values():
            self._requeue_lost(run.stream, run.entry, run.ticket)

    def _requeue_lost(self, stream: str, entry: bytes, ticket: Ticket) -> None:
        """Return a job to its stream after its run was lost; fail it after too many runs."""
        if ticket.attempt + 1 >= _MAX_ATTEMPTS:
            sentence = f"the request was lost with its node {_MAX_ATTEMPTS} times"
            return self._fail(stream, entry, ticket, sentence)
        self._requeue(stream, entry, structs.replace(ticket, attempt=ticket.attempt + 1))

    def _requeue(self, stream: str, entry: bytes, ticket: Ticket) -> None:
        """Write a job to its stream again, for another node."""
        added = ("XADD", stream, "*", "t", _encode(ticket))
        self._post(added, *self._done(stream, entry, True))

    def _refuse(self, stream: str, entry: bytes, ticket: Ticket, error: Exception) -> None:
        """End a job whose handling failed, so that no other node runs into the same error."""
        is_malformed = isinstance(error, _MALFORMED)
        why = str(error) if is_malformed else "internal error"
        log_error = None if is_malformed else error
        logger.error("cannot run a job in %s; ending it: %s", stream, why, exc_info=log_error)
        self._fail(stream, entry, ticket, f"a node could not run the request: {why}")

    def _fail(self, stream: str, entry: bytes, ticket: Ticket, sentence: str) -> None:
        """End a job with an error for its client."""
        event = Failed(ticket.job, sentence.encode("utf-8", "replace").decode())
        message = RunEvents(ticket.job, self.node, secrets.token_hex(8), 0, [event])
        self._post(*self._message_commands(ticket.node, message), *self._done(stream, entry, True))

    # ---- Redis ----

    def _message_commands(self, node: str, message: RunEvents | Drop) -> list[tuple[Any, ...]]:
        stream = f"{self._prefix}:node:{node}"
        # The expiration removes the stream of a dead node, which does not renew it.
        return [("XADD", stream, "*", "m", _encode(message)), self._expiring(stream)]

    def _expiring(self, stream: str) -> tuple[Any, ...]:
        return "EXPIRE", stream, self._seconds

    def _done(self, stream: str, entry: bytes, is_over: bool) -> list[tuple[Any, ...]]:
        if not is_over:
            return []
        return [("XACK", stream, _GROUP, entry), ("XDEL", stream, entry)]

    def _post(self, *commands: tuple[Any, ...], job: int | None = None) -> None:
        self._outbox.append(_Transaction(commands, job))
        self._has_commands.set()

    async def _work(self) -> None:
        """Read from and write to Redis; reconnect whenever the connection is lost."""
        num_failures = 0
        while True:
            client = self._connect()
            begin = time.monotonic()
            has_keys = False
            identity = self._identity
            try:
                await self._restore_keys(client)
                has_keys = True
                if self._identity != identity:  # Redis lost its keys, so do not count the failure
                    num_failures = 0
                parts = (self._beat, self._write, self._read, self._listen, self._recover_jobs)
                tasks = [asyncio.ensure_future(part(client)) for part in parts]
                try:
                    await asyncio.gather(*tasks)
                finally:
                    await _cancelled(tasks)
            except Exception as error:
                is_away = isinstance(error, _ERRORS)
                if not is_away:
                    logger.exception("the queue failed; restarting its work")
                elif self._away_since is None:
                    logger.warning("Redis is unreachable or has lost keys: %s", error)
                if time.monotonic() - begin > _WELL_SECONDS:
                    num_failures = 0
                # If Redis refuses even the heartbeat, waiting is right.
                num_failures += not is_away or (has_keys and isinstance(error, ResponseError))
                if num_failures >= _MAX_FAILURES:
                    return self._end_process()
                if self._away_since is None:
                    self._away_since = time.monotonic()
                self._fail_old()
                await asyncio.sleep(_AWAY_SECONDS)
            finally:
                await client.aclose()

    def _end_process(self) -> None:
        """End the server, so that its supervisor restarts it, because `_work` keeps failing."""
        sentence = f"the queue failed {_MAX_FAILURES} times in a row"
        logger.critical("%s; stopping the server", sentence)
        self._has_failed = True
        self._lost(sentence)
        signal.raise_signal(signal.SIGTERM)

    async def _restore_keys(self, client: Any) -> None:
        """Create missing keys; if Redis has lost keys, submit jobs again that may be lost."""
        last = self._identity
        identity = await self._beat_once(client)
        if last is not None and identity != last:
            # The latest writes may be lost, so stop all runs here; they start again on the nodes
            # that read the jobs again.
            for number in self._runs:
                self._engine.abort(number)
            self._runs.clear()
            self._outbox.clear()
        if last is not None and (identity != last or self._has_lost_stream):
            self._last = b"0"
            for waiting in self._waiting.values():
                self._submit_again(waiting)
        self._identity = identity
        self._has_lost_stream = False

    async def _beat(self, client: Any) -> None:
        """Write heartbeats regularly; raise ConnectionError if Redis has lost keys."""
        while True:
            await asyncio.sleep(_BEAT_SECONDS)
            if await self._beat_once(client) != self._identity or self._has_lost_stream:
                raise ConnectionError("Redis has lost keys")
            if self._away_since is not None:
                logger.warning("Redis is reachable again")
                self._away_since = None
            self._fail_old()

    async def _beat_once(self, client: Any) -> tuple[str, bytes]:
        """Write the heartbeat of this node, create what Redis lacks, and read other heartbeats.

        A node writes no heartbeat while its engine accepts no jobs, so that other nodes run its
        jobs.

        Returns:
            Redis' run id and the epoch; either changes if Redis has lost keys.
        """
        now, _ = await client.time()
        is_accepting = self._engine.health in _ACCEPTING and not self._is_stopping
        heartbeat = _encode([now, self._role]) if is_accepting else b""
        keys = (*self._streams.values(), self._own_stream, f"{self._prefix}:epoch", self._alive)
        arguments = (_GROUP, secrets.token_hex(8), self.node, heartbeat, self._seconds)
        epoch, is_new = await client.eval(_BEAT, len(keys), *keys, *arguments)
        self._has_lost_stream |= bool(is_new) and self._identity is not None
        run = (await client.info("server"))["run_id"]
        self._roles = set((await self._nodes(client)).values())
        return run, epoch

    async def _nodes(self, client: Any) -> Mapping[bytes, str]:
        """Return the live nodes and their roles; a node with an unreadable heartbeat is dead."""
        now, _ = await client.time()
        alive = {}
        for node, value in (await client.hgetall(self._alive)).items():
            with contextlib.suppress(*_MALFORMED):
                since, role = _heartbeat.decode(value)
                if abs(now - since) <= _DEAD_SECONDS + 1:
                    alive[node] = role
        return alive

    async def _write(self, client: Any) -> None:
        """Execute the commands of the outbox, in order.

        A command that Redis always refuses is dropped. While Redis refuses all commands, for
        example because it is out of memory, reading continues: it frees memory.
        """
        while True:
            await self._has_commands.wait()
            while self._outbox:
                transaction = self._outbox[0]
                error = await _executed(client, transaction.commands)
                if error is not None and not _is_final(error):
                    if self._refused_since is None:
                        logger.warning("Redis refuses commands; retrying: %s", error)
                        self._refused_since = time.monotonic()
                    await asyncio.sleep(_AWAY_SECONDS)
                    continue
                if self._outbox and self._outbox[0] is transaction:
                    self._outbox.popleft()
                self._refused_since = None
                if error is not None:
                    logger.error("Redis refuses a command; dropping it: %s", error)
                    if transaction.job in self._waiting:
                        self._give_up(Failed(transaction.job, "Redis refused to store the request"))
            self._refused_since = None
            self._has_commands.clear()

    async def _read(self, client: Any) -> None:
        """Read jobs while the engine can take more."""
        running = {run.entry for run in self._runs.values()}
        for stream in self._streams.values():  # entries left over from a lost connection
            for _, entries in await client.xreadgroup(_GROUP, self.node, {stream: "0"}, count=1000):
                for entry, fields in entries:
                    if entry not in running and fields:
                        await self._accept(client, stream, entry, fields)
        while not self._is_stopping:
            capacity = _MAX_RUNS - len(self._runs)
            if capacity <= 0 or self._engine.health not in _ACCEPTING:
                await asyncio.sleep(0.02)
                continue
            answer = await client.xreadgroup(
                _GROUP,
                self.node,
                dict.fromkeys(self._readable(), ">"),
                count=min(capacity, 4),
                block=_BLOCK_MILLISECONDS,
            )
            for stream, entries in answer:
                for entry, fields in entries:
                    await self._accept(client, stream.decode(), entry, fields)
        self._has_stopped_reading.set()

    def _readable(self) -> list[str]:
        """Return the streams to read now: that of this node's role, and those without a reader."""
        live_roles = set[str]().union(*(_READS[role] for role in self._roles))
        own_roles = _READS[self._role]
        return [
            stream
            for name, stream in self._streams.items()
            if name in own_roles or name not in live_roles
        ]

    async def _accept(
        self, client: Any, stream: str, entry: bytes, fields: Mapping[bytes, Any]
    ) -> None:
        """Begin a job that was read, unless its client has disconnected."""
        ticket = self._ticket_of(stream, entry, fields)
        if ticket is None:
            return
        if await client.exists(f"{self._prefix}:gone:{ticket.node}:{ticket.job}"):
            return self._post(*self._done(stream, entry, True))
        try:
            self._begin(stream, entry, ticket, _job_of(ticket))
        except Exception as error:
            self._refuse(stream, entry, ticket, error)

    def _ticket_of(self, stream: str, entry: bytes, fields: Mapping[bytes, Any]) -> Ticket | None:
        """Return the ticket of an entry. Drop an unreadable entry, since its client is unknown."""
        try:
            return _ticket.decode(fields[b"t"])
        except _MALFORMED:
            logger.error("cannot decode a job in %s; dropping it", stream)
            self._post(*self._done(stream, entry, True))
            return None

    async def _listen(self, client: Any) -> None:
        """Read messages that other nodes send to this node."""
        stream = self._own_stream
        while True:
            answer = await client.xread({stream: self._last}, count=256, block=_BLOCK_MILLISECONDS)
            for _, entries in answer:
                for entry, fields in entries:
                    self._last = entry
                    self._take_message(fields)
                await client.xdel(stream, *[entry for entry, _ in entries])

    def _take_message(self, fields: Mapping[bytes, Any]) -> None:
        """Handle one message. An error ends the job that the message names, and nothing else."""
        message = None
        try:
            message = _message.decode(fields[b"m"])
            if isinstance(message, RunEvents):
                self._take_events(message)
            else:
                self._drop(message.run)
        except Exception as error:
            log_error = None if isinstance(error, _MALFORMED) else error
            logger.error("cannot handle a message from another node: %s", error, exc_info=log_error)
            if isinstance(message, RunEvents) and message.job in self._waiting:
                self._give_up(Failed(message.job, "the answer of another node cannot be decoded"))

    def _drop(self, name: str) -> None:
        for number, run in list(self._runs.items()):
            if run.name == name:
                self._engine.abort(number)
                del self._runs[number]
                self._post(*self._done(run.stream, run.entry, True))

    async def _recover_jobs(self, client: Any) -> None:
        """Write jobs that dead nodes had read to the streams again."""
        while True:
            begin = time.monotonic()
            await asyncio.sleep(_DEAD_SECONDS / 2)
            alive = {*await self._nodes(client), self.node.encode()}
            if time.monotonic() - begin > _DEAD_SECONDS:
                continue  # this node or Redis was suspended, so other nodes may be alive
            for stream in self._streams.values():
                for consumer in await client.xinfo_consumers(stream, _GROUP):
                    if consumer["name"] not in alive:
                        await self._claim_jobs(client, stream, consumer["name"])
            for node in await client.hkeys(self._alive):
                if node not in alive:
                    await client.hdel(self._alive, node)

    async def _claim_jobs(self, client: Any, stream: str, dead: bytes) -> None:
        pending = await client.xpending_range(stream, _GROUP, "-", "+", 1000, consumername=dead)
        if not pending:
            await client.eval(_FORGET, 1, stream, _GROUP, dead)
            return
        ids = [item["message_id"] for item in pending]
        # Only the first node that claims an entry gets it: a claimed entry is no longer idle.
        idle = int(_DEAD_SECONDS * 500)
        for entry, fields in await client.xclaim(stream, _GROUP, self.node, idle, ids):
            if fields and (ticket := self._ticket_of(stream, entry, fields)) is not None:
                self._requeue_lost(stream, entry, ticket)


def _job_of(ticket: Ticket) -> Submit:
    """Return a ticket's job after checking values that the engine does not check.

    Raises:
        Exception: the ticket holds no job that an engine could run.
    """
    job = to_process(memoryview(ticket.submit))
    if not isinstance(job, Submit):
        raise ValueError(f"a ticket must hold a Submit, got {type(job).__name__}")
    if not job.prompts:
        raise ValueError("prompts must hold at least one prompt, got none")
    if not isinstance(msgspec.json.decode(job.speculative_config or "null"), dict | None):
        raise ValueError(
            f"speculative_config must be a JSON object or absent, got {job.speculative_config}"
        )
    form = job.params.structured_output
    checked = None if form is None else replace(form)  # the constructor checks the values
    return structs.replace(job, params=replace(job.params, structured_output=checked))


async def _executed(client: Any, commands: Iterable[tuple[Any, ...]]) -> RedisError | None:
    """Send commands as one transaction; return the error if Redis refuses one of them."""
    async with client.pipeline(transaction=True) as pipe:
        for command in commands:
            pipe.execute_command(*command)
        try:
            answers = await pipe.execute(raise_on_error=False)
        except (ResponseError, DataError) as error:
            return error
    return next((answer for answer in answers if isinstance(answer, RedisError)), None)


def _is_final(error: RedisError) -> bool:
    """Return whether Redis would refuse the same command under any circumstances.

    Temporary refusals begin with a specific code, such as OOM or MISCONF.
    """
    if type(error) is not ResponseError:
        return isinstance(error, DataError)
    reason = str(error).rpartition("caused error: ")[2]
    return reason.startswith("WRONGTYPE ") or _CODE.match(reason) is None


async def _cancelled(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks repeatedly until they have ended: a Redis client may swallow a cancellation."""
    running = set(tasks)
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=_AWAY_SECONDS)
