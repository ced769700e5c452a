# SPDX-License-Identifier: Apache-2.0
"""The one thread that owns the engine and works off the jobs of a server's event loop.

Commands travel through one queue; results come back in one callback per step, so a step costs the
event loop one wake-up however many requests it served.
"""

import asyncio
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specops.engine.engine import Engine
from specops.engine.errors import EngineError, QueueFull
from specops.engine.outputs import RequestOutput
from specops.engine.sampling_params import SamplingParams
from specops.server.jobs import ChoiceOutput, Job, JobFailed, Span, StepSeconds
from specops.server.metrics import Metrics
from specops.server.outbox import Event, Outbox

logger = logging.getLogger(__name__)

# Drawn seeds stay exact in JavaScript, so that a browser can send back the one it was told.
_SEED_BITS = 53
# Failed steps in a row after which the engine counts as failing. One alone may be the fault of a
# single request.
_FAILING = 3
_STEP_FAILED = "a step of the engine failed; the server's log says why"
_REQUEST_FAILED = "the request failed within the engine; the server's log says why"
_NOT_ADDED = "the engine could not take the request; the server's log says why"
# Between two saves of what drafters learnt, which wait for a moment without requests.
_SAVE_SECONDS = 300.0


@dataclass(eq=False)
class _Choice:
    """A choice inside the engine thread."""

    job: Job
    index: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    # Choices that wait for this one's prefill, to find its pages in the prefix cache.
    siblings: "list[_Choice]"
    added_at: float = 0.0  # when the engine got it
    first_time: float = 0.0  # when its first tokens arrived; 0 before
    num_first: int = 0  # how many these were
    last_time: float = 0.0  # when its last tokens arrived; 0 before the first
    steps_at_first: StepSeconds | None = None  # of all the engine's until then


class EngineThread:
    """Runs an engine in a thread of its own.

    What fails in the engine ends the jobs that it says; the thread goes on with the others. Where
    it says nothing, every job ends, and the thread goes on unless the engine keeps a request or a
    page.
    """

    def __init__(self, engine: Engine, metrics: Metrics, num_clients: int = 1) -> None:
        self._engine = engine
        self._num_clients = num_clients  # that have keys
        self._metrics = metrics
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outbox: Outbox | None = None  # belongs to the event loop
        self._commands: queue.SimpleQueue[tuple[str, Job | None]] = queue.SimpleQueue()
        self._has_ended = False  # belongs to the event loop
        self._thread = threading.Thread(target=self._run, name="specops-engine", daemon=True)
        # Everything below belongs to the thread.
        self._choices: dict[str, _Choice] = {}  # in the engine, by request id
        self._seen: set[str] = set()  # clients, two at most: then room to wait is shared
        # Clients whose share of the room to wait is full, and what they are told. Others only read.
        self._full: dict[str, str] = {}
        self._held: list[_Choice] = []  # ready to be added, but the engine's queue is full
        self._events: list[Event] = []
        self._num_requests = 0
        self._num_failures = 0  # steps that failed since the last one that succeeded
        self._saved_at = time.monotonic()  # what drafters learnt, the last time

    def start(self) -> None:
        """Starts the thread; called on the event loop that will get the results."""
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox(self._loop)
        self._thread.start()

    def stop(self) -> None:
        """Drops what is left and waits for the thread to end."""
        self._commands.put(("stop", None))
        self._thread.join()

    @property
    def health(self) -> str:
        """How the engine is: "ok"; "failing", its last steps failed; "failed", it runs no more."""
        if not self._thread.is_alive():
            return "failed"
        return "ok" if self._num_failures < _FAILING else "failing"

    def require_room(self, client: str) -> None:
        """Refuses a client whose share of the room to wait is known to be full.

        Raises:
            QueueFull: it is.
        """
        if (reason := self._full.get(client)) is not None:
            raise QueueFull(reason)

    async def submit(self, job: Job) -> None:
        """Queues a job.

        Raises:
            QueueFull, ValueError: the engine refuses it, wholly.
            JobFailed: the engine has failed.
        """
        if self._has_ended:
            raise JobFailed("the engine has stopped")
        self._commands.put(("add", job))
        try:
            await job.accepted
        except asyncio.CancelledError:
            self.abort(job)
            raise

    def abort(self, job: Job) -> None:
        """Drops what is unfinished of a job and frees its pages; harmless for a finished one."""
        self._commands.put(("abort", job))

    def _run(self) -> None:
        while True:
            try:
                if not self._take_commands():
                    break
                if self._engine.has_unfinished():
                    self._step()
            except Exception:
                self._num_failures += 1
                logger.exception("a step failed; every request ends with an error")
                self._give_up("error", _STEP_FAILED)
                if not self._is_empty():
                    logger.critical("the engine does not recover; its thread ends")
                    break
            self._look_for_room()
            self._deliver()
        self._give_up("abort", "the engine has stopped")
        self._deliver()
        self._on_loop(self._end)
        if self._engine.has_unsaved_drafters:
            self._save_drafters()

    def _end(self) -> None:
        """Called on the event loop: refuses the jobs that came too late for the thread."""
        self._has_ended = True
        while not self._commands.empty():
            _, job = self._commands.get_nowait()
            if job is not None:
                job.put(JobFailed("the engine has stopped"))

    def _seconds_to_save(self) -> float | None:
        """How long a thread with nothing to do waits before it saves; None if there is no need."""
        if not self._engine.has_unsaved_drafters:
            return None
        return max(self._saved_at + _SAVE_SECONDS - time.monotonic(), 0.0)

    def _save_drafters(self) -> None:
        self._saved_at = time.monotonic()
        try:
            self._engine.save_drafters()
        except ValueError as error:
            logger.error("%s", error)
        except Exception:
            logger.exception("what drafters learnt could not be saved")

    def _take_commands(self) -> bool:
        """Carries out what is queued, waiting for it when there is nothing else to do."""
        wait = not self._engine.has_unfinished() and not self._held
        while wait or not self._commands.empty():
            try:
                command, job = self._commands.get(timeout=self._seconds_to_save())
            except queue.Empty:
                self._save_drafters()
                continue
            wait = False
            if job is None:
                return False
            if command == "add":
                self._add_job(job)
            else:
                self._abort_job(job)
        if self._held:
            self._add_held()
        return True

    def _add_job(self, job: Job) -> None:
        total = len(job.prompts) * job.params.n
        limit = self._engine.config.max_waiting
        if len(self._seen) < 2:
            self._seen.add(job.client)
        if self._has_several_clients:
            limit = max(limit // 2, 1)
        added: list[str] = []
        try:
            if total > limit:
                raise ValueError(
                    f"n and the number of prompts make {total} choices, more than the {limit} "
                    "that may wait"
                )
            self._engine.require_room(total + self._num_outside)
            self._require_share(job.client, total)
            for position, prompt in enumerate(job.prompts):
                added.append(self._add_choice(self._first_choice(job, position, prompt)))
                siblings = self._choices[added[-1]].siblings
                config = self._engine.config
                # Nothing is shared without a full page, but what is told of the prompt.
                shares = config.enable_prefix_caching and len(prompt) > config.page_size
                if not shares and job.params.prompt_logprobs is None:
                    added += [self._add_choice(sibling) for sibling in siblings]
                    siblings.clear()
        except Exception as error:
            for request_id in added:
                self._engine.abort(request_id)
                del self._choices[request_id]
            if not isinstance(error, (ValueError, QueueFull)):
                logger.exception("a request could not be added")
                error = JobFailed(_NOT_ADDED)
            self._events.append((job, error))
        else:
            self._events.append((job, None))

    def _require_share(self, client: str, total: int) -> None:
        """Leaves room for those who come later: a client gets half of what others leave free.

        Raises:
            QueueFull: it has too many waiting already.
        """
        if not self._has_several_clients:
            return
        own, most = self._waiting_of(client, self._count_waiting())
        if own + total > most:
            whose = "API key" if self._num_clients > 1 else "address"
            reason = f"{own} requests of this {whose} are waiting already"
            if own >= most:  # one more would be too many, whatever it asks for
                self._full[client] = reason
            raise QueueFull(reason)

    def _count_waiting(self) -> Counter[str]:
        """How many choices of each client have no tokens yet."""
        waiting: Counter[str] = Counter(choice.job.client for choice in self._held)
        for choice in self._choices.values():
            waiting[choice.job.client] += (not choice.last_time) + len(choice.siblings)
        return waiting

    def _waiting_of(self, client: str, waiting: Counter[str]) -> tuple[int, int]:
        """How many choices of a client wait, and how many may."""
        own = waiting[client]
        most = (self._engine.config.max_waiting - waiting.total() + own) // 2
        return own, max(most, 1)

    def _look_for_room(self) -> None:
        """Finds out who has room to wait again."""
        if self._full:
            waiting = self._count_waiting()
            for client in list(self._full):
                own, most = self._waiting_of(client, waiting)
                if own < most:
                    del self._full[client]

    @property
    def _has_several_clients(self) -> bool:
        """Whether room is to be left: for other keys, or for addresses, of which two have come."""
        return self._num_clients > 1 or len(self._seen) > 1

    def _first_choice(self, job: Job, position: int, prompt: list[int]) -> _Choice:
        """The first choice of a prompt, with the others as its siblings."""
        params = job.params
        seed = self._engine.draw_seed(_SEED_BITS) if params.seed is None else params.seed
        # The choices of a prompt share the seed: their index tells their random numbers apart.
        params = replace(params, seed=seed)
        first = _Choice(job, position * params.n, prompt, params, seed, siblings=[])
        others = replace(params, prompt_logprobs=None)  # the first one's are all choices'
        first.siblings = [
            _Choice(job, first.index + i, prompt, others, seed, siblings=[])
            for i in range(1, params.n)
        ]
        return first

    def _add_choice(self, choice: _Choice) -> str:
        request_id = self._engine.add_request(
            choice.prompt,
            choice.params,
            request_id=f"http-{self._num_requests}",
            choice_index=choice.index % choice.params.n,
            speculative_config=choice.job.speculative_config,
            owners=(choice.job.client, f"call-{id(choice.job)}"),
        )
        choice.added_at = time.perf_counter()
        self._num_requests += 1
        self._choices[request_id] = choice
        return request_id

    def _add_held(self) -> None:
        while self._held:
            try:
                self._add_choice(self._held[0])
            except QueueFull:  # its place was taken by preempted requests: try after the next step
                return
            except Exception:
                logger.exception("a choice could not be added")
                self._fail_job(self._held[0].job, _NOT_ADDED)
                return
            self._held.pop(0)

    def _abort_job(self, job: Job, finish_reason: str = "abort") -> None:
        self._held = [choice for choice in self._held if choice.job is not job]
        for request_id in [name for name, one in self._choices.items() if one.job is job]:
            self._engine.abort(request_id)
            del self._choices[request_id]
            self._metrics.finished(finish_reason)

    def _fail_job(self, job: Job, message: str) -> None:
        """Ends a job with an error: all of its choices, since an answer has all or none."""
        self._abort_job(job, "error")
        self._events.append((job, JobFailed(message)))

    def _step(self) -> None:
        num_rows = self._engine.stats.num_rows
        outputs: Sequence[RequestOutput]
        reason = _REQUEST_FAILED
        try:
            outputs = self._engine.step()
            self._num_failures = 0
        except EngineError as error:
            if not error.outputs:
                raise
            self._num_failures += 1
            logger.exception("a step failed; its requests end with an error")
            outputs, reason = error.outputs, _STEP_FAILED
        now, stats = time.perf_counter(), self._engine.stats
        self._metrics.step(stats.num_rows - num_rows)
        steps = None
        if self._engine.times_drafting:
            steps = StepSeconds(stats.verify_seconds, stats.draft_seconds)
        for output in outputs:
            choice = self._choices.get(output.request_id)
            if choice is None:
                continue
            job = choice.job
            if output.finish_reason == "error":
                self._fail_job(job, reason)
                continue
            if choice.siblings:
                self._held += choice.siblings
                choice.siblings = []
            if output.token_ids:
                self._metrics.tokens(
                    len(output.token_ids),
                    now,
                    choice.last_time or job.arrival,
                    first=not choice.last_time,
                )
                choice.last_time = now
                if not choice.num_first:
                    choice.first_time, choice.num_first = now, len(output.token_ids)
                    choice.steps_at_first = steps
            completion, span = None, None
            if output.finish_reason is not None:
                completion = self._engine.completion(output.request_id)
                del self._choices[output.request_id]
                # A sibling waits for its turn outside the engine, too.
                queued = choice.added_at - job.arrival + completion.queue_seconds
                seconds = now - job.arrival
                if not choice.num_first:
                    choice.first_time, choice.steps_at_first = now, steps
                first = choice.first_time - job.arrival
                at_first = choice.steps_at_first
                span = Span(queued, first, seconds, choice.num_first, at_first, steps)
                self._metrics.finished(output.finish_reason, completion, span)
            if job.streaming or completion is not None:
                seconds = now - job.arrival
                event = ChoiceOutput(choice.index, output, completion, choice.seed, seconds, span)
                self._events.append((job, event))
        if self._num_failures and not self._engine.has_unfinished() and not self._is_empty():
            raise RuntimeError("a step that failed has left the engine fewer pages than it had")

    def _give_up(self, finish_reason: str, message: str) -> None:
        """Fails every job, and drops what the engine still knows of it."""
        for request_id in self._choices:
            try:
                self._engine.abort(request_id)
            except Exception:
                logger.exception("request %s could not be dropped", request_id)
            self._metrics.finished(finish_reason)
        jobs = {id(one.job): one.job for one in (*self._choices.values(), *self._held)}
        self._events += [(job, JobFailed(message)) for job in jobs.values()]
        self._choices.clear()
        self._held.clear()

    def _is_empty(self) -> bool:
        """Whether the engine has nothing left, neither a request nor a page that one held."""
        engine = self._engine
        return not engine.has_unfinished() and engine.num_free_pages == engine.num_pages

    def _deliver(self) -> None:
        if not self._events:
            return
        events, self._events = self._events, []
        outbox = self._outbox
        assert outbox is not None, "the thread has been started"
        self._on_loop(lambda: outbox.add(events))

    def _on_loop(self, work: Callable[[], None]) -> None:
        assert self._loop is not None, "the thread has been started"
        try:
            self._loop.call_soon_threadsafe(work)
        except RuntimeError:  # the event loop has ended: nobody waits for this
            logger.debug("results after the end of the event loop", exc_info=True)

    @property
    def num_waiting(self) -> int:
        """Choices that wait, in the engine's queue or for a sibling."""
        return self._engine.num_waiting + self._num_outside

    @property
    def _num_outside(self) -> int:
        """Choices that the engine does not have yet: they wait for a sibling, or for room."""
        siblings = sum(len(choice.siblings) for choice in list(self._choices.values()))
        return len(self._held) + siblings
