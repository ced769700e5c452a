# SPDX-License-Identifier: Apache-2.0
"""The loop that owns an engine: it takes commands between two steps and sends each step's results.

It is independent of event loops, threads and sockets: an inbox supplies commands, and a callback
takes batches of results.
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from specops.api.errors import ContextOverflow, EngineError, QueueFull, UnknownAdapter
from specops.api.messages import (
    Abort,
    Accepted,
    AdapterChange,
    Batch,
    Begin,
    Command,
    End,
    Event,
    Failed,
    Fetched,
    Health,
    LoadAdapter,
    Output,
    Overdue,
    Progress,
    Refused,
    Stop,
    Submit,
    UnloadAdapter,
)
from specops.api.outputs import RequestOutput, without_rejected
from specops.api.sampling_params import SamplingParams
from specops.api.speculative_config import SpeculativeConfig
from specops.engine.engine import Engine
from specops.engine.models.adapters import Adapter
from specops.engine.structured import Grammar
from specops.service.snapshot import status_of

logger = logging.getLogger(__name__)

# Width of drawn seeds: JavaScript represents them exactly, so a browser can send one back.
_SEED_BITS = 53
# Failed steps in a row after which the engine counts as failing. A single failure may be caused by
# one request.
_FAILING = 3
# Failures in a row to take commands, for example for lack of memory, after which the loop ends
# instead of retrying forever.
_MAX_INBOX_FAILURES = 10
_FAILURE_SECONDS = 0.1  # pause after each of them
# Seconds between batches of an idle loop, which show the server that the loop does not hang.
_BEAT_SECONDS = 1.0
_STEP_FAILED = "a step of the engine failed; the server's log says why"
_REQUEST_FAILED = "the request failed within the engine; the server's log says why"
_NOT_ADDED = "the engine could not take the request; the server's log says why"
# Minimum seconds between two saves of drafters' state, which happen only while the loop is idle.
_SAVE_SECONDS = 300.0
_COMPILING_THREADS = 2  # threads that compile grammars; few, since the loop's work is more urgent
_MAX_COMPILING = 64  # maximum number of grammars that wait for compilation


@dataclass(frozen=True)
class Compiled:
    """Compiled grammar of a job, or the error of its compilation."""

    job: int
    grammar: "Future[Grammar]"


class Inbox(Protocol):
    """Source of the loop's commands."""

    def take(self, seconds: float | None) -> Sequence[Command | Compiled]:
        """Return the available commands; wait up to `seconds` (None: forever) for one."""

    def put(self, command: Compiled | Fetched | Overdue) -> None:
        """Add a command, from any thread."""


@dataclass(eq=False)
class _Choice:
    """Choice of a job."""

    job: Submit
    index: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    speculative: SpeculativeConfig
    # Other choices of the prompt, added to the engine after this choice's prefill, so that they
    # find its pages in the prefix cache.
    siblings: "list[_Choice]"
    adapter: Adapter | None  # of the job; kept, since it may be unloaded before siblings start
    added_at: float = 0.0  # time when it was added to the engine
    has_tokens: bool = False


class EngineLoop:
    """Loop that runs an engine until a `Stop` command.

    If the engine fails and reports the requests concerned, their jobs end and the others continue.
    Otherwise every job ends, and the loop continues unless the engine still holds a request or a
    page. The loop ends if it fails ten times in a row to take commands from the inbox.

    From `Begin` on, the loop sends a batch after every step, and once a second while it is idle.

    Args:
        engine: the engine, which only the loop may use from now on.
        inbox: source of commands, of which `Begin` is the first.
        send: called with every batch.
        step: runs a step; None: the engine's own `step`.
        barrier: called before each batch of an idle loop; returns when the loops of all ranks have
            called it. So if one rank hangs, the first rank's batches stop, which the server
            notices.
    """

    def __init__(
        self,
        engine: Engine,
        inbox: Inbox,
        send: Callable[[Batch], None],
        step: Callable[[], Sequence[RequestOutput]] | None = None,
        barrier: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._step_engine = step or (lambda: engine.step())
        self._inbox = inbox
        self._send = send
        self._barrier = barrier
        self._has_begun = False
        self._num_clients = 1  # clients with API keys
        self._choices: dict[str, _Choice] = {}  # in the engine, by request id
        self._held: list[_Choice] = []  # ready, but the engine's queue is full
        self._compiling: dict[int, Submit] = {}  # jobs that wait for their grammars, by number
        self._num_compiling = 0  # grammars in compilation, including those of dropped jobs
        self._threads = ThreadPoolExecutor(_COMPILING_THREADS, "specops-grammars")
        # The first two clients; from the second on, clients share the queue's capacity.
        self._seen: set[str] = set()
        # Error message of each client whose share of the queue is full.
        self._full: dict[str, str] = {}
        self._sent_full: dict[str, str] = {}  # `_full` as last sent in a batch
        self._events: list[Event] = []
        self._dropped: Counter[str] = Counter()
        self._has_changes = False  # whether to send a batch even without events
        self._num_requests = 0
        self._num_failures = 0  # failed steps since the last successful one
        self._num_inbox_failures = 0  # failures since commands were last taken
        self._saved_at = time.monotonic()  # time of the last save of drafters' state

    def run(self) -> None:
        """Work until a command stops the loop, or the engine does not recover."""
        while True:
            try:
                self._num_inbox_failures += 1
                if not self._take_commands():
                    break
                self._num_inbox_failures = 0
                if self._engine.has_unfinished():
                    self._step()
            except Exception:
                self._num_failures += 1
                logger.exception("a step failed; ending every request with an error")
                self._give_up("error", _STEP_FAILED)
                if not self._is_empty():
                    logger.critical(
                        "the engine holds requests or pages after a failed step; stopping it"
                    )
                    break
                if self._num_inbox_failures >= _MAX_INBOX_FAILURES:
                    logger.critical(
                        "the engine failed to take commands %d times in a row; stopping it",
                        self._num_inbox_failures,
                    )
                    break
                if self._num_inbox_failures:
                    time.sleep(_FAILURE_SECONDS)
            self._update_full()
            self._deliver(self._health)
        self._give_up("abort", "the engine has stopped")
        self._deliver("failed")
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._engine.has_unsaved_drafters:
            self._save_drafters()

    @property
    def _health(self) -> Health:
        return "ok" if self._num_failures < _FAILING else "failing"

    # ---- commands ----

    def _take_commands(self) -> bool:
        """Execute available commands; wait for some if idle. Return False after `Stop`."""
        is_idle = not self._engine.has_unfinished() and not self._held
        commands = self._inbox.take(self._seconds_to_wait() if is_idle else 0.0)
        while is_idle and not commands:
            if self._seconds_to_save() == 0.0:
                self._save_drafters()
            if self._has_begun:  # the server reads no batches before `Begin`
                self._barrier()
                self._has_changes = True
                self._deliver(self._health)
            commands = self._inbox.take(self._seconds_to_wait())
        for command in commands:
            if isinstance(command, Submit):
                try:
                    self._take_job(command)
                except Exception as error:
                    self._events.append(self._refusal(command, error))
            elif isinstance(command, Abort):
                self._abort_job(command.job)
            elif isinstance(command, (LoadAdapter, UnloadAdapter)):
                self._change_adapters(command)
            elif isinstance(command, Compiled):
                self._take_compiled(command)
            elif isinstance(command, Overdue):
                self._refuse_overdue(command.job)
            elif isinstance(command, Begin):
                self._num_clients = command.num_clients
                self._has_begun = True
            elif isinstance(command, Stop):
                return False
        if self._held:
            self._add_held()
        return True

    def _seconds_to_wait(self) -> float | None:
        """Return the seconds for which an idle loop waits for commands; None: forever."""
        seconds = self._seconds_to_save()
        if not self._has_begun:
            return seconds
        return _BEAT_SECONDS if seconds is None else min(seconds, _BEAT_SECONDS)

    def _seconds_to_save(self) -> float | None:
        """Return the seconds until an idle loop saves drafters' state; None if all is saved."""
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
            logger.exception("could not save the state of drafters")

    def _take_job(self, job: Submit) -> None:
        """Add a job; if it has a grammar, start compiling that first."""
        output_format = job.params.structured_output
        if output_format is None:
            return self._add_job(job)
        if self._num_compiling >= _MAX_COMPILING:
            reason = f"{self._num_compiling} grammars wait to be compiled already"
            self._events.append(Refused(job.job, "full", reason))
            return
        overdue = partial(self._inbox.put, Overdue(job.job))
        compiling = self._threads.submit(
            self._engine.compile_structured_output, output_format, overdue
        )
        self._num_compiling += 1
        self._compiling[job.job] = job
        compiling.add_done_callback(lambda done: self._inbox.put(Compiled(job.job, done)))

    def _refuse_overdue(self, number: int) -> None:
        """Refuse a job whose grammar takes too long to compile."""
        job = self._compiling.pop(number, None)
        if job is not None:
            assert job.params.structured_output is not None
            kind = job.params.structured_output.kind
            reason = f"structured_output: {kind} takes longer than 10 seconds to compile"
            self._events.append(Refused(number, "value", reason))

    def _take_compiled(self, compiled: Compiled) -> None:
        """Add a job whose grammar has been compiled; `compiled` keeps the grammar in memory."""
        self._num_compiling -= 1
        job = self._compiling.pop(compiled.job, None)
        if job is None or compiled.grammar.cancelled():
            return
        error = compiled.grammar.exception()
        try:
            if error is not None:
                raise error
            self._add_job(job)
        except Exception as failure:
            self._events.append(self._refusal(job, failure))

    def _change_adapters(self, change: AdapterChange) -> None:
        """Load or unload a LoRA adapter. Requests wait while its files are read."""
        try:
            if isinstance(change, LoadAdapter):
                self._engine.load_adapter(change.name, change.path)
            else:
                self._engine.unload_adapter(change.name)
        except Exception as error:
            logger.warning("an adapter is not changed: %r", str(error))
            self._events.append(self._refusal(change, error))
        else:
            self._events.append(Accepted(change.job, 0))

    def _refusal(self, job: Submit | AdapterChange, error: BaseException) -> Refused | Failed:
        """Return the event for a command that could not be executed."""
        if isinstance(error, ContextOverflow):
            return Refused(job.job, "context", _unicode(error))
        if isinstance(error, QueueFull):
            return Refused(job.job, "full", _unicode(error))
        if isinstance(error, UnknownAdapter):
            return Refused(job.job, "adapter", _unicode(error))
        if isinstance(error, ValueError):
            return Refused(job.job, "value", _unicode(error))
        logger.error("could not execute a command", exc_info=error)
        return Failed(job.job, _NOT_ADDED)

    def _add_job(self, job: Submit) -> None:
        engine = self._engine
        try:
            speculative = engine.config.speculative_for(
                None if job.speculative_config is None else json.loads(job.speculative_config),
                engine.runnable_methods,
                engine.missing_methods,
                job.params,
            )
        except ValueError as error:
            self._events.append(Refused(job.job, "speculative_config", _unicode(error)))
            return
        added: list[str] = []
        try:
            self._require_capacity(job)
            page_size, leader = engine.config.page_size, None
            for position, prompt in enumerate(job.prompts):
                first = self._first_choice(job, position, prompt, speculative)
                if leader is not None:
                    leader.siblings.append(first)
                    continue
                added.append(self._add_choice(first))
                # Choices share only full pages of the prompt, and the prompt's logprobs.
                shares_pages = engine.config.enable_prefix_caching
                shares_pages = shares_pages and len(prompt) > page_size
                # All prompts of a job that scores continuations begin with the same tokens.
                if shares_pages and job.params.prompt_logprobs_start > page_size:
                    leader = first
                if not shares_pages and job.params.prompt_logprobs is None:
                    added += [self._add_choice(sibling) for sibling in first.siblings]
                    first.siblings.clear()
        except Exception as error:
            for request_id in added:
                engine.abort(request_id)
                del self._choices[request_id]
            self._events.append(self._refusal(job, error))
        else:
            verification = speculative.verify_strategy, speculative.accept_policy
            self._events.append(
                Accepted(job.job, speculative.num_speculative_tokens, *verification)
            )

    def _first_choice(
        self, job: Submit, position: int, prompt: list[int], speculative: SpeculativeConfig
    ) -> _Choice:
        """Return the first choice of a prompt, which holds the other choices as its siblings."""
        params, adapter = job.params, None
        if job.adapter is not None:
            name, digest = job.adapter
            adapter = self._engine.adapter(name)
            if adapter.digest != digest:
                raise UnknownAdapter(f"adapter {name!r} has just been replaced; try again")
        seed = self._engine.draw_seed(_SEED_BITS) if params.seed is None else params.seed
        # The choices of a prompt share the seed; their random numbers differ by the choice's index.
        params = replace(params, seed=seed)
        first = _Choice(job, position * params.n, prompt, params, seed, speculative, [], adapter)
        # Only the first choice reports the prompt's logprobs.
        others = replace(params, prompt_logprobs=None, prompt_logprobs_start=0)
        first.siblings = [
            _Choice(job, first.index + i, prompt, others, seed, speculative, [], adapter)
            for i in range(1, params.n)
        ]
        return first

    def _add_choice(self, choice: _Choice) -> str:
        request_id = self._engine.add_request(
            choice.prompt,
            choice.params,
            request_id=f"http-{self._num_requests}",
            choice_index=choice.job.choice_index + choice.index % choice.params.n,
            speculative_config=choice.speculative,
            owners=(choice.job.client, f"call-{choice.job.job}"),
            adapter=choice.adapter,
        )
        choice.added_at = time.perf_counter()
        self._num_requests += 1
        self._choices[request_id] = choice
        return request_id

    def _add_held(self) -> None:
        while self._held:
            try:
                self._add_choice(self._held[0])
            except QueueFull:  # preempted requests filled the queue; try again after the next step
                return
            except Exception:
                logger.exception("could not add a choice")
                self._fail_job(self._held[0].job.job, _NOT_ADDED)
                return
            self._held.pop(0)

    # ---- queue capacity ----

    def _require_capacity(self, job: Submit) -> None:
        """Check that the queue has capacity for a job.

        Raises:
            QueueFull: too many choices wait.
            ValueError: the job has more choices than may ever wait.
        """
        total = len(job.prompts) * job.params.n
        limit = self._engine.config.max_waiting
        if len(self._seen) < 2:
            self._seen.add(job.client)
        if self._has_several_clients:
            limit = max(limit // 2, 1)
        if total > limit:
            raise ValueError(f"n times the number of prompts must be at most {limit}, got {total}")
        self._engine.require_room(total + self._num_outside)
        self._require_client_capacity(job.client, total)

    def _require_client_capacity(self, client: str, total: int) -> None:
        """Check a client's share of the queue.

        A client may use half of the capacity that other clients leave free; the rest remains for
        clients that come later.

        Raises:
            QueueFull: the client has too many waiting choices already.
        """
        if not self._has_several_clients:
            return
        num_waiting, limit = self._waiting_of(client, self._count_waiting())
        if num_waiting + total > limit:
            identity = "API key" if self._num_clients > 1 else "address"
            reason = f"{num_waiting} requests of this {identity} are waiting already"
            if num_waiting >= limit:  # any further job would be refused
                self._full[client] = reason
            raise QueueFull(reason)

    def _count_waiting(self) -> Counter[str]:
        """Return, by client, the number of choices that have no tokens yet."""
        waiting: Counter[str] = Counter(choice.job.client for choice in self._held)
        for choice in self._choices.values():
            waiting[choice.job.client] += (not choice.has_tokens) + len(choice.siblings)
        return waiting

    def _waiting_of(self, client: str, waiting: Counter[str]) -> tuple[int, int]:
        """Return the number of a client's waiting choices, and the maximum."""
        num_waiting = waiting[client]
        limit = (self._engine.config.max_waiting - waiting.total() + num_waiting) // 2
        return num_waiting, max(limit, 1)

    def _update_full(self) -> None:
        """Remove clients from `_full` whose share of the queue is no longer full."""
        if self._full:
            waiting = self._count_waiting()
            for client in list(self._full):
                num_waiting, limit = self._waiting_of(client, waiting)
                if num_waiting < limit:
                    del self._full[client]

    @property
    def _has_several_clients(self) -> bool:
        """True if clients must share the queue: there are several keys, or two clients so far."""
        return self._num_clients > 1 or len(self._seen) > 1

    @property
    def _num_outside(self) -> int:
        """Number of choices outside the engine, which wait for a sibling's prefill or capacity."""
        return len(self._held) + sum(len(choice.siblings) for choice in self._choices.values())

    # ---- steps ----

    def _step(self) -> None:
        outputs: Sequence[RequestOutput]
        reason = _REQUEST_FAILED
        try:
            outputs = self._step_engine()
            self._num_failures = 0
        except EngineError as error:
            if not error.outputs:
                raise
            self._num_failures += 1
            logger.exception("a step failed; ending its requests with an error")
            outputs = error.outputs
            reason = _STEP_FAILED
        self._has_changes = True
        for output in outputs:
            choice = self._choices.get(output.request_id)
            if choice is None:
                continue
            if output.finish_reason == "error":
                self._fail_job(choice.job.job, reason)
                continue
            if choice.siblings:
                self._held += choice.siblings
                choice.siblings = []
            self._queue_event(choice, output)
        if self._num_failures and not self._engine.has_unfinished() and not self._is_empty():
            raise RuntimeError("pages are missing after a failed step")

    def _queue_event(self, choice: _Choice, output: RequestOutput) -> None:
        """Queue the event for an output: `Output`, or `Progress` if the job does not stream."""
        job = choice.job
        index = choice.index
        if output.token_ids:
            choice.has_tokens = True
            if not job.streaming:
                self._events.append(Progress(job.job, index, len(output.token_ids)))
        if output.finish_reason is None and not job.streaming:
            return
        drafts = output.drafts
        if drafts is not None and (hidden := self._engine.drafters_of_common_text):
            drafts = without_rejected(drafts, hidden)
        event = Output(
            job.job,
            index,
            output.token_ids,
            output.text,
            output.logprobs,
            drafts=drafts,
            prompt_logprobs=output.prompt_logprobs,  # type: ignore[arg-type]
        )
        if output.finish_reason is not None:
            del self._choices[output.request_id]
            completion = self._engine.completion(output.request_id)
            if not job.streaming:
                event.token_ids = completion.token_ids
                event.text = completion.text
                event.logprobs = completion.logprobs
                event.prompt_logprobs = completion.prompt_logprobs  # type: ignore[assignment]
            event.end = End(
                finish_reason=completion.finish_reason,
                stop_reason=completion.stop_reason,
                seed=choice.seed,
                num_tokens=len(completion.token_ids),
                num_cached_tokens=completion.num_cached_tokens,
                begun=choice.added_at + completion.queue_seconds,
                stats=completion.stats,
            )
        self._events.append(event)

    # ---- ends ----

    def _abort_job(self, job: int, reason: str = "abort") -> None:
        self._compiling.pop(job, None)
        self._held = [choice for choice in self._held if choice.job.job != job]
        choices = self._choices.items()
        for request_id in [name for name, choice in choices if choice.job.job == job]:
            self._engine.abort(request_id)
            del self._choices[request_id]
            self._dropped[reason] += 1
            self._has_changes = True

    def _fail_job(self, job: int, message: str) -> None:
        """End all choices of a job with an error, since an answer has all choices or none."""
        self._abort_job(job, "error")
        self._events.append(Failed(job, message))

    def _give_up(self, reason: str, message: str) -> None:
        """Fail every job, and abort its requests in the engine."""
        for request_id in self._choices:
            try:
                self._engine.abort(request_id)
            except Exception:
                logger.exception("could not abort request %s", request_id)
            self._dropped[reason] += 1
        jobs = {choice.job.job for choice in self._choices.values()}
        jobs |= {choice.job.job for choice in self._held}
        jobs |= set(self._compiling)
        self._events += [Failed(job, message) for job in sorted(jobs)]
        self._choices.clear()
        self._held.clear()
        self._compiling.clear()
        self._has_changes = True

    def _is_empty(self) -> bool:
        """Return whether the engine holds no request and all pages are free."""
        engine = self._engine
        return not engine.has_unfinished() and engine.num_free_pages == engine.num_pages

    def _deliver(self, health: Health) -> None:
        if not self._events and not self._has_changes:
            return
        full = None
        if self._full != self._sent_full:
            full = self._sent_full = dict(self._full)
        status = status_of(self._engine, num_outside=self._num_outside)
        now = time.perf_counter()
        self._send(Batch(now, health, status, full, dict(self._dropped), self._events))
        self._events = []
        self._has_changes = False
        self._dropped.clear()


def _unicode(error: BaseException) -> str:
    """Return an error's message, with escapes where it quotes text that is invalid Unicode."""
    return str(error).encode("utf-8", "backslashreplace").decode()
