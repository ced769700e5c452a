# SPDX-License-Identifier: Apache-2.0
"""Dispatch of jobs to the engine, and of the engine's results back to the jobs.

All code in this module runs on the event loop.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from specops.api.errors import ContextOverflow, QueueFull, UnknownAdapter
from specops.api.messages import (
    Accepted,
    AdapterChange,
    Batch,
    Capabilities,
    Failed,
    Output,
    Progress,
    Refused,
    Submit,
)
from specops.server.jobs import (
    BadSpeculation,
    ChoiceOutput,
    EngineAway,
    Job,
    JobFailed,
    OutputNotRead,
    QueueAway,
    Span,
    StepSeconds,
)
from specops.server.metrics import Metrics
from specops.server.outbox import Event, Outbox
from specops.server.unread import Stream, Unread
from specops.service.client import EngineClient

logger = logging.getLogger(__name__)

_REFUSALS: dict[str, type[Exception]] = {
    "context": ContextOverflow,
    "full": QueueFull,
    "speculative_config": BadSpeculation,
    "value": ValueError,
    "adapter": UnknownAdapter,
    "away": QueueAway,
}


class Dispatch:
    """Submission of jobs to an engine, and a table of the unfinished ones.

    Args:
        client: connection to the engine.
        metrics: the server's metrics.
        num_clients: number of clients with API keys; at most 1 if the server has no keys.
        max_unread_bytes: bytes of output that may wait for one client to read them.

    Attributes:
        metrics: the argument.
        unread: output that clients have not read yet.
    """

    def __init__(
        self,
        client: EngineClient,
        metrics: Metrics,
        num_clients: int = 1,
        *,
        max_unread_bytes: int = 64 << 20,
    ) -> None:
        self._client = client
        self.metrics = metrics
        self._num_clients = num_clients
        self._jobs: dict[int, Job] = {}  # unfinished jobs by number
        self._changes: dict[int, asyncio.Future[None]] = {}  # of adapters, by number
        self._outbox: Outbox | None = None
        self._is_open = asyncio.Event()  # whether jobs are submitted; cleared by `pause`
        self._is_open.set()
        self._is_idle = asyncio.Event()  # whether no job is unfinished
        self._is_idle.set()
        self._num_rows = client.status.stats.num_rows
        self.unread = Unread(max_unread_bytes, self._end_unread)
        metrics.watch(self.unread)

    async def start(self) -> None:
        """Start the engine client on the running event loop, which all jobs must share."""
        self._outbox = Outbox(asyncio.get_running_loop())
        await self._client.start(self._receive, self._fail_all, self._num_clients)

    async def stop(self) -> None:
        """Stop the engine client, drop the remaining jobs and wait for the engine to end."""
        await self._client.stop()

    def require_capacity(self, client: str) -> None:
        """Check that a client may submit another request now.

        Raises:
            QueueFull: the client has its share of waiting requests, or too much unread output.
        """
        if (reason := self._client.full.get(client)) is not None:
            raise QueueFull(reason)
        if (size := self.unread.of(client)) > self.unread.max_bytes:
            raise QueueFull(
                f"the client has not read {size} bytes of earlier answers; read them first"
            )

    @property
    def capabilities(self) -> Capabilities:
        """Properties of the engine, which change if its weights are updated."""
        return self._client.capabilities

    @property
    def is_paused(self) -> bool:
        """True if jobs wait for `resume`."""
        return not self._is_open.is_set()

    async def pause(self, *, aborts: bool) -> None:
        """Hold all jobs that come from now on, and wait for the end of the unfinished ones.

        Args:
            aborts: end the unfinished jobs with an error, rather than wait for them.
        """
        self._is_open.clear()
        for job in list(self._jobs.values()) if aborts else ():
            self._remove(job.number)
            self._client.abort(job.number)
            self._deliver([(job, JobFailed("the request was aborted by /pause"))])
        await self._is_idle.wait()

    async def until_resumed(self) -> None:
        """Wait until jobs are submitted."""
        await self._is_open.wait()

    def resume(self) -> None:
        """Submit the jobs that wait, and those that come."""
        self._is_open.set()

    async def update(self, settings: Mapping[str, Any]) -> None:
        """Replace the engine while this object is paused; see `EngineClient.update`.

        Raises:
            ValueError: jobs run, or the new engine cannot be made; the old one continues.
        """
        if not self.is_paused or not self._is_idle.is_set():
            raise ValueError("requests may run; call /pause first")
        await self._client.update(settings)
        self._num_rows = 0  # a new engine counts from zero
        self._fail_changes("the engine was replaced while its adapters changed")

    def _remove(self, number: int) -> Job | None:
        """Remove an unfinished job from the table, and return it if it is there."""
        job = self._jobs.pop(number, None)
        if not self._jobs:
            self._is_idle.set()
        return job

    async def submit(self, job: Job) -> None:
        """Submit a job to the engine and wait until the engine accepts it.

        While jobs are held, wait for `resume` first.

        Raises:
            QueueFull: the engine's queue is full, or the engine has not read earlier submissions.
            ValueError: the engine refuses the job because one of its values is invalid.
            JobFailed: the engine has failed, does not respond, is being restarted, or cannot be
                reached.
        """
        await self.until_resumed()
        self._require_engine()
        self._client.submit(
            Submit(
                job.number,
                job.client,
                job.prompts,
                job.params,
                job.speculative_config,
                job.streaming,
                job.kv_transfer,
                job.session,
                job.adapter,
                job.choice_index,
            )
        )
        self._jobs[job.number] = job
        self._is_idle.clear()
        try:
            await job.until_accepted()
        except asyncio.CancelledError:
            self.abort(job)
            raise

    async def change_adapters(self, change: AdapterChange) -> None:
        """Load or unload a LoRA adapter, and wait for the engine.

        Raises:
            QueueFull: the engine has not read earlier submissions.
            UnknownAdapter: the adapter to unload is not loaded.
            ValueError: the engine refuses the adapter.
            JobFailed: as for `submit`.
        """
        self._require_engine()
        done = asyncio.get_running_loop().create_future()
        self._changes[change.job] = done
        try:
            self._client.change_adapters(change)
            await done
        finally:
            del self._changes[change.job]
        self._client.keep_adapter_change(change)

    def _require_engine(self) -> None:
        """Raise if the engine cannot take a command now."""
        if self._client.health == "failed":
            raise JobFailed("the engine has stopped")
        if self._client.health == "restarting":
            raise EngineAway("the engine is being restarted")
        if self._client.health == "disconnected":
            raise QueueAway("the queue of requests cannot be reached")
        if self._client.health == "stalled":
            raise EngineAway("the engine does not respond")
        if self._client.is_behind:
            raise QueueFull("the engine has not read earlier requests yet")

    @property
    def adapters(self) -> Mapping[str, str]:
        """Digests of the engine's LoRA adapters, by name."""
        return self._client.status.adapters

    def abort(self, job: Job) -> None:
        """Abort a job, drop its output, and free its pages; no-op if the job has finished."""
        job.close()
        if self._remove(job.number) is not None:
            self._client.abort(job.number)

    def _end_unread(self, stream: Stream) -> None:
        """End the stream of a client that has left too much output unread."""
        assert isinstance(stream, Job)
        logger.warning("ending a stream, since its client %s does not read it", stream.client)
        if self._remove(stream.number) is not None:
            self._client.abort(stream.number)
        stream.fail(
            OutputNotRead(
                f"the client left more than {self.unread.max_bytes} bytes of output unread"
            )
        )

    def _receive(self, batch: Batch) -> None:
        stats = batch.status.stats
        self.metrics.step(stats.num_rows - self._num_rows)
        self._num_rows = stats.num_rows
        for reason, count in batch.dropped.items():
            self.metrics.dropped(reason, count)
        steps = None
        if self._client.capabilities.times_drafting:
            steps = StepSeconds(stats.verify_seconds, stats.draft_seconds)
        events: list[Event] = []
        for event in batch.events:
            if (change := self._changes.get(event.job)) is not None:
                self._end_change(change, event)
            job = self._jobs.get(event.job)
            if job is None:
                continue
            if isinstance(event, Progress):
                self._note_tokens(job, event.index, event.num_tokens, batch.now, steps)
            elif isinstance(event, Output):
                events.append((job, self._output(job, event, batch.now, steps)))
            elif isinstance(event, Accepted):
                events.append((job, event))
            else:
                self._remove(job.number)
                events.append((job, _error(event, job)))
        self._deliver(events)

    @staticmethod
    def _end_change(change: "asyncio.Future[None]", event: object) -> None:
        """Pass the engine's answer to `change_adapters`, unless that was cancelled."""
        if change.done():
            return
        if isinstance(event, Accepted):
            change.set_result(None)
        elif isinstance(event, Refused):
            change.set_exception(_REFUSALS[event.kind](event.message))
        elif isinstance(event, Failed):
            change.set_exception(JobFailed(event.message))

    def _deliver(self, events: list[Event]) -> None:
        assert self._outbox is not None, "it has been started"
        self._outbox.add(events)

    def _note_tokens(
        self, job: Job, index: int, count: int, now: float, steps: StepSeconds | None
    ) -> None:
        times = job.times[index]
        before = times.last or job.arrival
        self.metrics.tokens(count, now - before, first=not times.last)
        times.last = now
        if not times.num_first:
            times.first = now
            times.num_first = count
            times.steps_at_first = steps

    def _output(
        self, job: Job, output: Output, now: float, steps: StepSeconds | None
    ) -> ChoiceOutput:
        if job.streaming and output.token_ids:
            self._note_tokens(job, output.index, len(output.token_ids), now, steps)
        seconds = now - job.arrival
        end = output.end
        if end is None:
            return ChoiceOutput(output, seconds)
        times = job.times[output.index]
        if not times.num_first:
            times.first = now
            times.steps_at_first = steps
        span = Span(
            begin=end.begun - job.arrival,
            first=times.first - job.arrival,
            last=seconds,
            num_first=times.num_first,
            steps_at_first=times.steps_at_first,
            steps_at_last=steps,
        )
        num_prompt = len(job.prompts[output.index // job.params.n])
        self.metrics.finished(end.finish_reason, num_prompt, end.num_tokens, span)
        job.num_running -= 1
        if not job.num_running:
            self._remove(job.number)
        return ChoiceOutput(output, seconds, span)

    def _fail_all(self, message: str) -> None:
        """Fail every job after the engine has ended."""
        jobs = self._jobs
        self._jobs = {}
        self._is_idle.set()
        self._num_rows = 0  # a new engine counts from zero
        self._fail_changes(message)
        for job in jobs.values():
            self.metrics.dropped("error", job.num_running)
        self._deliver([(job, _loss_error(message, job)) for job in jobs.values()])

    def _fail_changes(self, message: str) -> None:
        """Fail the changes of adapters that an engine has not answered before it ended."""
        for change in self._changes.values():
            if not change.done():
                change.set_exception(EngineAway(message))


def _loss_error(message: str, job: Job) -> JobFailed:
    """Return the error of a job after its engine ended. The client may retry an unaccepted job."""
    return JobFailed(message) if job.is_accepted else EngineAway(message)


def _error(event: Refused | Failed, job: Job) -> Exception:
    if isinstance(event, Failed):
        return _loss_error(event.message, job) if event.is_lost else JobFailed(event.message)
    return _REFUSALS[event.kind](event.message)
