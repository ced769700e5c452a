# SPDX-License-Identifier: Apache-2.0
"""What crosses the door between a server and its engine, all of it plain data."""

from typing import Any, Literal

from msgspec import Struct

from specops.engine.outputs import (
    EngineStats,
    PromptLogprobs,
    SpeculativeStats,
    StepDrafts,
    TokenLogprob,
)
from specops.engine.sampling_params import SamplingParams

Health = Literal["ok", "failing", "stalled", "failed", "restarting", "disconnected"]


class Capabilities(Struct, frozen=True):
    """What never changes about an engine.

    Attributes:
        model_name: the name clients use.
        model_dir: where its tokenizer and chat template are.
        device: "cpu" or "cuda:N".
        max_model_len: longest prompt and output together, in tokens.
        vocab_size: of the model.
        num_pages: KV pages.
        page_size: tokens of each.
        enable_prefix_caching: whether requests share the pages of equal prefixes.
        times_drafting: whether `EngineStats` has a step's time by its parts.
        methods: the drafting methods that a request may name.
        drafters: what every method that there is says of itself.
        drafter_gauges: what the numbers of `Status.drafter_gauges` are, by name.
        speculative_config: of requests that do not choose, without the server's paths.
        contract: what the bits of outputs depend on (service/contract.py).
        role: "prefill", "decode" or "mixed" of an engine that hands prompts over; empty: none.
    """

    model_name: str
    model_dir: str
    device: str
    max_model_len: int
    vocab_size: int
    num_pages: int
    page_size: int
    enable_prefix_caching: bool
    times_drafting: bool
    methods: list[str]
    drafters: list[dict[str, Any]]
    drafter_gauges: dict[str, str]
    speculative_config: dict[str, Any]
    contract: dict[str, Any]
    role: str = ""


class Status(Struct):
    """What an engine is doing, and its counters.

    Attributes:
        num_running: choices that hold a slot.
        num_waiting: choices that wait for one, or for another choice of their prompt.
        num_free_pages: KV pages that no request holds.
        stats: since the engine's start.
        drafter_gauges: sizes of what drafters keep, by the name of a metric.
    """

    num_running: int
    num_waiting: int
    num_free_pages: int
    stats: EngineStats
    drafter_gauges: dict[str, int]


# ---- to the engine ----


class Begin(Struct, tag=True, array_like=True):
    """Comes first.

    Attributes:
        num_clients: clients that have keys, who may all come; at most 1 where there are no keys.
    """

    num_clients: int


class KvTransfer(Struct, omit_defaults=True):
    """vLLM's `kv_transfer_params`: where a prompt's pages are, or are to go.

    Attributes:
        do_remote_prefill: another engine has computed the prompt, and has leased its pages.
        do_remote_decode: another engine is to go on with the prompt: lease its pages.
        remote_engine_id: the digest of that engine's contract.
        remote_request_id: the name of the lease.
        remote_block_ids: the leased pages, counted from the prompt's first.
        remote_host, remote_port: of the transport that has the lease.
        remote_ports: of that engine's ranks, in order; None: it has one.
    """

    do_remote_prefill: bool = False
    do_remote_decode: bool = False
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_block_ids: list[int] | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_ports: list[int] | None = None


class Submit(Struct, tag=True, array_like=True, eq=False):
    """A job: the choices that one call asks for. They are taken, or refused, as a whole.

    Attributes:
        job: its number; the caller's, and of no other job.
        client: who asks; slots and room to wait are shared among clients.
        prompts: token ids of the vocabulary.
        params: of all prompts; `n` choices of each.
        speculative_config: the job's own, as JSON; None: the engine's.
        streaming: report every step; else only the end of each choice.
        kv_transfer: the prompt's pages come from another engine, or are for one.
    """

    job: int
    client: str
    prompts: list[list[int]]
    params: SamplingParams
    speculative_config: str | None
    streaming: bool
    kv_transfer: KvTransfer | None = None


class Abort(Struct, tag=True, array_like=True):
    """Drops what is unfinished of a job; nothing if it is finished."""

    job: int


class Stop(Struct, tag=True, array_like=True):
    """Drops everything and ends the engine."""


class Fetched(Struct, tag=True, array_like=True):
    """From a thread of the engine's process: a job's pages have come, or will not come."""

    job: int


class Overdue(Struct, tag=True, array_like=True):
    """From a thread of the engine's process: compiling the grammar of a job takes too long."""

    job: int


Command = Begin | Submit | Abort | Fetched | Overdue | Stop


# ---- from the engine ----


class Accepted(Struct, tag=True, array_like=True):
    """The job will be run.

    Attributes:
        job: its number.
        num_speculative_tokens: drafts of its steps, as its configuration says.
    """

    job: int
    num_speculative_tokens: int


class Refused(Struct, tag=True, array_like=True):
    """The job will not be run.

    Attributes:
        job: its number.
        kind: "context", it is too long; "full", too many wait; "speculative_config" or "value",
            something in it is wrong; "away", the queue that it waited in cannot be reached.
        message: a sentence.
    """

    job: int
    kind: Literal["context", "full", "speculative_config", "value", "away"]
    message: str


class Failed(Struct, tag=True, array_like=True):
    """The job ends with an error that is not its own, whether it was accepted or not.

    Attributes:
        job: its number.
        message: a sentence.
        is_lost: its engine has ended, and another one may take the job.
    """

    job: int
    message: str
    is_lost: bool = False


class Progress(Struct, tag=True, array_like=True):
    """A step added to a choice of a job that does not stream."""

    job: int
    index: int
    num_tokens: int


class End(Struct, array_like=True):
    """How a choice ended.

    Attributes:
        finish_reason: "stop", "length" or "abort".
        stop_reason: as in `Completion`.
        seed: as it was sent or drawn.
        num_tokens: generated.
        num_cached_tokens: of the prompt, found in the prefix cache.
        begun: when it got its slot, by `time.perf_counter`, one clock for all processes.
        stats: of its drafts.
        kv_transfer: where the pages of its prompt wait, if they are for another engine.
    """

    finish_reason: str
    stop_reason: int | str | tuple[int, ...] | None
    seed: int
    num_tokens: int
    num_cached_tokens: int
    begun: float
    stats: SpeculativeStats
    kv_transfer: KvTransfer | None = None


class Output(Struct, tag=True, array_like=True):
    """What was added to a choice: by a step, or by all steps where the job does not stream.

    Attributes:
        job: the job's number.
        index: of the choice over all prompts: prompt index * n + choice index.
        token_ids: emitted, in order.
        text: released.
        logprobs: one per token when the job asked for them.
        drafts: that a step verified, when the job asked for them.
        prompt_logprobs: with a choice's first output, when the job asked for them.
        end: with the last output.
    """

    job: int
    index: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob]
    drafts: StepDrafts | None = None
    prompt_logprobs: PromptLogprobs | None = None
    end: End | None = None


Event = Accepted | Refused | Failed | Progress | Output


class Batch(Struct, tag=True):
    """All that a step, or the commands before it, brought.

    Attributes:
        now: when, by `time.perf_counter`.
        health: of the engine; "failed" in the last batch, after which the loop ends.
        status: at the end of it.
        full: clients whose share of the room to wait is full, and what they are told; None: the
            same as before.
        dropped: choices that did not come to their end, by reason.
        events: of jobs, in order.
    """

    now: float
    health: Health
    status: Status
    full: dict[str, str] | None
    dropped: dict[str, int]
    events: list[Event]


class Hello(Struct, tag=True):
    """The engine is there."""

    capabilities: Capabilities
    status: Status


class NoEngine(Struct, tag=True):
    """There is none: its configuration or its model cannot be used."""

    message: str
