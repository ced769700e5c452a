# SPDX-License-Identifier: Apache-2.0
"""Messages between a server and its engine, all of them plain data."""

from typing import Any, Literal

from msgspec import Struct

from specops.api.outputs import (
    EngineStats,
    PromptLogprobs,
    SpeculativeStats,
    StepDrafts,
    TokenLogprob,
)
from specops.api.sampling_params import SamplingParams

Health = Literal["ok", "failing", "stalled", "failed", "restarting", "disconnected"]


class Capabilities(Struct, frozen=True):
    """Constant properties of an engine.

    Attributes:
        model_name: the model's name for clients.
        model_dir: directory of its tokenizer and chat template.
        device: "cpu" or "cuda:N".
        max_model_len: maximum length of prompt and output together, in tokens.
        vocab_size: size of the model's vocabulary.
        max_num_drafts: maximum number of drafts of a request in a step.
        num_pages: number of KV pages.
        page_size: number of tokens of a page.
        enable_prefix_caching: whether requests share the pages of equal prefixes.
        times_drafting: whether `EngineStats` times drafting and verification separately.
        methods: drafting methods that a request may name.
        drafters: description of every drafting method, from the method itself.
        drafter_gauges: descriptions of the numbers in `Status.drafter_gauges`, by name.
        speculative_config: default for requests without their own, without the server's paths.
        contract: everything that the bits of outputs depend on (service/contract.py).
        role: "prefill", "decode" or "mixed" for an engine with KV transfer; empty for others.
        has_sessions: whether requests may name a session.
    """

    model_name: str
    model_dir: str
    device: str
    max_model_len: int
    vocab_size: int
    max_num_drafts: int
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
    has_sessions: bool = False


class Status(Struct):
    """State of an engine, and its counters.

    Attributes:
        num_running: number of choices that hold a slot.
        num_waiting: number of choices that wait for a slot, or for another choice of their prompt.
        num_free_pages: number of KV pages that no request holds.
        stats: counters since the engine's start.
        drafter_gauges: sizes of the data that drafters store, by the name of a metric.
        adapters: digests of the loaded LoRA adapters, by name.
    """

    num_running: int
    num_waiting: int
    num_free_pages: int
    stats: EngineStats
    drafter_gauges: dict[str, int]
    adapters: dict[str, str] = {}


# ---- to the engine ----


class Begin(Struct, tag=True, array_like=True):
    """First command of the server.

    Attributes:
        num_clients: number of clients with API keys; at most 1 if the server has no keys.
    """

    num_clients: int


class KvTransfer(Struct, omit_defaults=True):
    """vLLM's `kv_transfer_params`: source or destination of a prompt's KV pages.

    Attributes:
        do_remote_prefill: fetch the pages: another engine has computed the prompt and leased them.
        do_remote_decode: lease the prompt's pages: another engine will continue from them.
        remote_engine_id: digest of the other engine's contract.
        remote_request_id: name of the lease.
        remote_block_ids: indices of the leased pages within the prompt.
        remote_host, remote_port: address of the transport that has the lease.
        remote_ports: ports of the other engine's ranks, in order; None if it has a single rank.
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
    """Submission of a job: all choices of one call, accepted or refused as a whole.

    Attributes:
        job: unique number of the job, chosen by the caller.
        client: name of the client; slots and queue capacity are shared fairly among clients.
        prompts: token ids of each prompt, within the vocabulary.
        params: sampling parameters of all prompts; each has `n` choices.
        speculative_config: JSON of the request's `speculative_config`; None uses the engine's.
        streaming: whether to report every step; otherwise only the end of each choice.
        kv_transfer: request to fetch the prompt's pages from another engine, or lease them to one.
        session: name of the session that the job resumes and is saved to; None: none.
        adapter: name and digest of the LoRA adapter; None: the model alone.
        choice_index: index of each prompt's first choice, which keys its random numbers.
    """

    job: int
    client: str
    prompts: list[list[int]]
    params: SamplingParams
    speculative_config: str | None
    streaming: bool
    kv_transfer: KvTransfer | None = None
    session: str | None = None
    adapter: tuple[str, str] | None = None
    choice_index: int = 0


class Abort(Struct, tag=True, array_like=True):
    """Request to abort a job's unfinished choices; no effect on a finished job."""

    job: int


class LoadAdapter(Struct, tag=True, array_like=True):
    """Request to load a LoRA adapter, answered with `Accepted`, `Refused` or `Failed`.

    Attributes:
        job: unique number of the request, among those of jobs.
        name: name by which jobs choose the adapter.
        path: its directory.
    """

    job: int
    name: str
    path: str


class UnloadAdapter(Struct, tag=True, array_like=True):
    """Request to unload a LoRA adapter, answered like `LoadAdapter`; its running jobs finish."""

    job: int
    name: str


class Stop(Struct, tag=True, array_like=True):
    """Request to drop all jobs and end the engine."""


class Fetched(Struct, tag=True, array_like=True):
    """Notice of a thread in the engine's process: a job's pages were fetched or read, or not."""

    job: int


class Overdue(Struct, tag=True, array_like=True):
    """Notice of a thread in the engine's process: compiling a job's grammar takes too long."""

    job: int


AdapterChange = LoadAdapter | UnloadAdapter
Command = Begin | Submit | Abort | LoadAdapter | UnloadAdapter | Fetched | Overdue | Stop


# ---- from the engine ----


class Accepted(Struct, tag=True, array_like=True):
    """Acceptance of a job.

    Attributes:
        job: the job's number.
        num_speculative_tokens: maximum number of drafts per step in its configuration.
        verify_strategy, accept_policy: how its drafts are verified.
    """

    job: int
    num_speculative_tokens: int
    verify_strategy: str = "target_match"
    accept_policy: str = "normal"


class Refused(Struct, tag=True, array_like=True):
    """Refusal of a job.

    Attributes:
        job: the job's number.
        kind: "context": a prompt is too long; "full": too many requests wait; "speculative_config"
            or "value": a value of the job is invalid; "adapter": its LoRA adapter is not loaded;
            "away": the queue of jobs cannot be reached.
        message: reason, as a sentence.
    """

    job: int
    kind: Literal["context", "full", "speculative_config", "value", "adapter", "away"]
    message: str


class Failed(Struct, tag=True, array_like=True):
    """Failure of a job, accepted or not, for a reason outside the job.

    Attributes:
        job: the job's number.
        message: reason, as a sentence.
        is_lost: whether its engine has ended, so that another engine may run the job.
    """

    job: int
    message: str
    is_lost: bool = False


class Progress(Struct, tag=True, array_like=True):
    """Report of how many tokens a step added to a choice of a job that does not stream."""

    job: int
    index: int
    num_tokens: int


class End(Struct, array_like=True):
    """End of a choice.

    Attributes:
        finish_reason: "stop", "length" or "abort".
        stop_reason: as in `Completion`.
        seed: the seed that was sent or drawn.
        num_tokens: number of generated tokens.
        num_cached_tokens: number of prompt tokens found in the prefix cache.
        begun: time when the choice got its slot, by `time.perf_counter`, which all processes of a
            machine share.
        stats: statistics of its drafts.
        kv_transfer: location of the prompt's pages, if they wait for another engine.
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
    """Addition to a choice: by one step, or by all steps if the job does not stream.

    Attributes:
        job: the job's number.
        index: index of the choice over all prompts: prompt index * n + choice index.
        token_ids: emitted token ids, in order.
        text: released text.
        logprobs: one entry per token if the job requested them.
        drafts: drafts that the step verified, if the job requested them.
        prompt_logprobs: set in a prompt's first output, if the job requested them.
        end: set in a choice's last output.
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
    """Results of a step and of the commands before it.

    Attributes:
        now: time of the batch, by `time.perf_counter`.
        health: the engine's health; "failed" in the last batch, after which the loop ends.
        status: the engine's state after the step.
        full: error message for each client whose share of the queue is full; None if unchanged.
        dropped: numbers of choices that ended early, by reason.
        events: events of jobs, in order.
    """

    now: float
    health: Health
    status: Status
    full: dict[str, str] | None
    dropped: dict[str, int]
    events: list[Event]


class Hello(Struct, tag=True):
    """First message of an engine, which reports that it is loaded."""

    capabilities: Capabilities
    status: Status


class NoEngine(Struct, tag=True):
    """Failure to make an engine: its configuration or its model cannot be used."""

    message: str
