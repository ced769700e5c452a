# SPDX-License-Identifier: Apache-2.0
"""`python -m specops.integrations.dynamo`: an engine behind NVIDIA Dynamo's frontend and router.

Dynamo handles HTTP, chat templates, tokenization, text, discovery and routing. This module
implements Dynamo's "unified backend" (`dynamo.common.backend`, ai-dynamo 1.4.2): a worker that
receives and returns token ids. As with our server, the engine runs in a separate process and every
token has the bits of plain decoding. With `--role prefill` and `--role decode`, Dynamo's router
passes the location of a prompt's pages from one worker to the other.
"""

import argparse
import asyncio
import itertools
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from dynamo.common.backend import EngineConfig as Registration
from dynamo.common.backend import LLMEngine, LlmRegistration, Worker, WorkerConfig
from dynamo.common.backend.publisher import ComponentSnapshot, KvEventSource, ZmqSource
from dynamo.common.constants import DisaggregationMode
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument

from specops.api.config import EngineConfig
from specops.api.messages import Batch, Event, Failed, KvTransfer, Output, Refused, Submit
from specops.api.outputs import TokenLogprob
from specops.api.sampling_params import SamplingParams
from specops.api.structured import StructuredOutput
from specops.api.tokenizer import Tokenizer, read_json_object
from specops.cli.options import add_engine_options, plain_settings
from specops.cli.roles import (
    add_kv_event_options,
    add_role_options,
    kv_event_settings,
    role_settings,
)
from specops.service.file_lock import FileLock
from specops.service.process import EngineProcess, ProcessClient
from specops.service.wire import Setup

_MODES = {
    "": DisaggregationMode.AGGREGATED,
    "prefill": DisaggregationMode.PREFILL,
    "decode": DisaggregationMode.DECODE,
}
_PENALTIES = ("repetition", "presence", "frequency")
# Field of a Dynamo request -> our sampling parameter.
_FIELDS = {
    "sampling_options": {
        **{name: name for name in ("temperature", "top_p", "min_p", "seed")},
        **{f"{name}_penalty": f"{name}_penalty" for name in _PENALTIES},
    },
    "stop_conditions": {
        **{name: name for name in ("max_tokens", "min_tokens", "ignore_eos", "stop")},
        "max_thinking_tokens": "reasoning_max_tokens",
    },
    "output_options": {"logprobs": "logprobs"},
}
_STOP_TOKENS = ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden")
# Fields that this module handles separately, or that Dynamo's frontend handles.
_OTHERS = {
    "n",
    "top_k",
    "guided_decoding",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "formatted_prompt",
    "return_tokens_as_token_ids",
    *_STOP_TOKENS,
}
_FORMS = {"json": "json_schema"}  # form of guided decoding -> its other name in specops


def params_of(request: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters of a Dynamo request.

    Args:
        request: the request, with `sampling_options`, `stop_conditions` and `output_options`;
            options that are not set are null.

    Raises:
        ValueError: an option is not supported here, or has a wrong value.
    """
    values: dict[str, Any] = {"max_tokens": None, "cache_salt": _cache_salt(request)}
    for group, names in _FIELDS.items():
        for name, value in (request.get(group) or {}).items():
            if value is None or name in _OTHERS:
                continue
            if name not in names:
                raise ValueError(
                    f"{name} must be absent, since specops does not support it, got {value!r}"
                )
            values[names[name]] = value
    sampling = request.get("sampling_options") or {}
    stops = request.get("stop_conditions") or {}
    if (sampling.get("n") or 1) > 1:  # Dynamo's frontend would end all at the first end
        raise ValueError(f"n must be 1 with Dynamo, got {sampling['n']}")
    values["top_k"] = max(sampling.get("top_k") or 0, 0)  # Dynamo's -1 means all tokens
    values["stop_token_ids"] = sorted(
        {token_id for name in _STOP_TOKENS for token_id in stops.get(name) or ()}
    )
    form = {
        _FORMS.get(name, name): value
        for name, value in (sampling.get("guided_decoding") or {}).items()
        if value is not None
    }
    try:
        if form:
            values["structured_output"] = StructuredOutput(**form)
        return SamplingParams(**values)
    except TypeError as error:  # an unknown form of guided decoding
        raise ValueError(f"guided_decoding: {error}") from None


def _cache_salt(request: Mapping[str, Any]) -> str | None:
    """Return the cache salt that Dynamo's frontend resolved; None if it is absent or empty."""
    extra = request.get("extra_args") or {}
    for place in (request.get("routing"), request.get("nvext"), extra.get("nvext")):
        if isinstance(place, Mapping) and place.get("cache_salt"):
            return str(place["cache_salt"])
    return None


class SpecopsBackend(LLMEngine):  # type: ignore[misc]
    """Implementation of Dynamo's engine interface by our engine in its own process.

    Args:
        setup: setup of the engine process.
        model_dir: model directory, from which Dynamo loads the tokenizer.
    """

    def __init__(self, setup: Setup, model_dir: Path) -> None:
        self._setup = setup
        self._model_dir = model_dir
        self._role = "" if setup.role is None else setup.role.role
        self._tokenizer = Tokenizer.from_dir(model_dir)
        self._client: ProcessClient | None = None
        self._jobs: dict[int, asyncio.Queue[Event | None]] = {}  # None: the client disconnected
        self._running: dict[str, int] = {}  # job numbers by Dynamo's request id
        self._numbers = itertools.count()
        self._publisher: Any = None
        self._has_ended = False
        file = setup.settings.get("suffix_cache")
        self._lock = None if file is None else FileLock("suffix_cache", file)

    @classmethod
    async def from_args(
        cls, argv: Sequence[str] | None = None
    ) -> "tuple[SpecopsBackend, WorkerConfig]":
        """Create the backend from the command line, without starting the engine.

        Raises:
            ValueError: an option is invalid.
        """
        args = _parser().parse_args(argv)
        if len(names := args.served_model_name or ()) > 1:
            raise ValueError(f"served_model_name must be one name with Dynamo, got {len(names)}")
        settings = plain_settings(args)
        role = role_settings(args, clients_name_peers=False)  # the router passes addresses
        events = kv_event_settings(args)
        kind = "" if role is None else role.role
        if kind not in _MODES:
            raise ValueError(f"role must be prefill, decode or absent with Dynamo, got {kind}")
        config = EngineConfig.from_plain(settings)
        if not (config.model_dir / "tokenizer.json").is_file():
            raise ValueError(
                f"model must be a directory with the tokenizer.json that Dynamo reads, got "
                f"{config.model_dir}"
            )
        setup = Setup(settings, args.log_level, role=role, kv_events=events)
        return cls(setup, config.model_dir), WorkerConfig(
            namespace=args.namespace,
            component=args.component or ("prefill" if kind == "prefill" else "backend"),
            model_name=str(config.model_dir),
            served_model_name=config.model_name,
            # Dynamo rejects a model that declares chat but has no template.
            endpoint_types="chat,completions" if _has_chats(config.model_dir) else "completions",
            discovery_backend=args.discovery_backend,
            request_plane=args.request_plane,
            event_plane=args.event_plane,
            enable_local_indexer=events is not None,
            disaggregation_mode=_MODES[kind],
        )

    async def start(self, worker_id: int) -> Registration:
        """Start the engine process and wait until its engine is ready.

        Raises:
            ValueError: the engine cannot start; the message says why.
        """
        self._client = await asyncio.to_thread(lambda: ProcessClient(EngineProcess(self._setup)))
        await self._client.start(self._receive, self._fail_all, num_clients=1)
        capabilities = self._client.capabilities
        return Registration(
            model=str(self._model_dir),
            served_model_name=capabilities.model_name,
            llm=LlmRegistration(
                context_length=capabilities.max_model_len,
                kv_cache_block_size=capabilities.page_size,
                total_kv_blocks=capabilities.num_pages,
            ),
        )

    async def generate(
        self, request: Mapping[str, Any], context: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the tokens of a request as steps emit them.

        Raises:
            InvalidArgument: the engine does not support the request.
            EngineShutdown: the engine has died; a new one is being started.
        """
        assert self._client is not None, "start() precedes generate()"
        if self._client.health in ("restarting", "failed"):
            raise EngineShutdown(f"the engine is {self._client.health}")
        job = self._job_of(request)
        has_ended = False
        events = self._jobs[job.job] = asyncio.Queue()
        self._running[context.id()] = job.job
        try:
            self._client.submit(job)
            while not has_ended and (event := await events.get()) is not None:
                if isinstance(event, Refused):
                    raise InvalidArgument(event.message)
                if isinstance(event, Failed):
                    raise EngineShutdown(event.message)
                if isinstance(event, Output) and (event.token_ids or event.end is not None):
                    has_ended = event.end is not None
                    yield self._chunk(event, job)
        finally:
            del self._jobs[job.job], self._running[context.id()]
            if not has_ended:
                self._client.abort(job.job)

    async def abort(self, context: Any) -> None:
        """End the request of a client that disconnected, without waiting for its next output."""
        if (job := self._running.get(context.id())) is not None:
            self._jobs[job].put_nowait(None)

    def _job_of(self, request: Mapping[str, Any]) -> Submit:
        try:
            params = params_of(request)
            transfer = None
            if self._role == "prefill":
                params = params.for_prompt()  # prefill ends with the first token
                transfer = KvTransfer(do_remote_decode=True)
            elif self._role == "decode":
                result = request.get("prefill_result") or {}
                prefill = result.get("disaggregated_params") or {}
                transfer = msgspec.convert(prefill.get("kv_transfer_params"), KvTransfer | None)
        except ValueError as error:
            raise InvalidArgument(str(error)) from None
        return Submit(
            next(self._numbers),
            "",
            [list(request["token_ids"])],
            params,
            None,
            self._role != "prefill",
            transfer,
        )

    def _chunk(self, output: Output, job: Submit) -> dict[str, Any]:
        chunk: dict[str, Any] = {"token_ids": output.token_ids, "index": output.index}
        if job.params.logprobs is not None:
            chunk["log_probs"] = [token.logprob for token in output.logprobs]
            chunk["top_logprobs"] = [self._top(token) for token in output.logprobs]
        if (end := output.end) is not None:
            length = len(job.prompts[0])
            chunk["finish_reason"] = end.finish_reason
            chunk["completion_usage"] = {
                "prompt_tokens": length,
                "completion_tokens": end.num_tokens,
                "total_tokens": length + end.num_tokens,
                "prompt_tokens_details": {"cached_tokens": end.num_cached_tokens},
            }
            if self._role == "prefill":
                transfer = end.kv_transfer and msgspec.structs.asdict(end.kv_transfer)
                chunk["disaggregated_params"] = {"kv_transfer_params": transfer}
        return chunk

    def _top(self, token: TokenLogprob) -> list[dict[str, Any]]:
        """Return the most probable alternatives of a token, in Dynamo's format."""
        entries = []
        for place, (token_id, logprob) in enumerate(token.alternatives, 1):
            data = self._tokenizer.token_bytes(token_id)
            text = data.decode("utf-8", "replace")
            entry = {"rank": place, "token_id": token_id, "token": text, "logprob": logprob}
            entries.append({**entry, "bytes": list(data)})
        return entries

    def _receive(self, batch: Batch) -> None:
        for event in batch.events:
            if (events := self._jobs.get(event.job)) is not None:
                events.put_nowait(event)
        if self._publisher is not None:
            self._publish(batch)

    def _fail_all(self, message: str) -> None:
        for job, events in self._jobs.items():
            events.put_nowait(Failed(job, message))

    async def cleanup(self) -> None:
        """End the engine process, if there is one."""
        if self._client is not None and not self._has_ended:
            self._has_ended = True
            await self._client.stop()

    async def kv_event_sources(self) -> list[KvEventSource]:
        """Return the sources of KV events, from which Dynamo's router tracks the prefix cache."""
        settings = self._setup.kv_events
        if settings is None:
            return []
        return [ZmqSource(endpoint=settings.endpoint, topic=settings.topic)]

    def component_metrics_dp_ranks(self) -> list[int]:
        """Return the data-parallel ranks that report their load: rank 0, the only engine."""
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Store the publisher that receives load snapshots."""
        self._publisher = publisher

    def _publish(self, batch: Batch) -> None:
        assert self._client is not None, "start() precedes batches"
        total = self._client.capabilities.num_pages
        stats = batch.status.stats
        used = total - batch.status.num_free_pages
        queries = stats.prefix_cache_queries
        self._publisher.publish(
            0,
            ComponentSnapshot(
                kv_used_blocks=used,
                kv_total_blocks=total,
                gpu_cache_usage=used / total,
                dp_rank=0,
                kv_cache_hit_rate=stats.prefix_cache_hits / queries if queries else None,
            ),
        )


def _has_chats(model_dir: Path) -> bool:
    """Return whether Dynamo finds a chat template; it requires a tokenizer_config.json."""
    config = read_json_object(model_dir / "tokenizer_config.json")
    has_file = (model_dir / "chat_template.jinja").is_file()
    return bool(config) and ("chat_template" in config or has_file)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m specops.integrations.dynamo",
        allow_abbrev=False,
        description="Run an engine as a worker of NVIDIA Dynamo, behind `python -m "
        "dynamo.frontend`.",
    )
    add_engine_options(parser)
    add_role_options(parser)
    add_kv_event_options(parser)
    add = parser.add_argument
    add("--namespace", default="dynamo", help="Dynamo namespace (default: %(default)s)")
    add("--component", help="Dynamo component (default: prefill for that role, else backend)")
    add(
        "--discovery-backend",
        default="file",
        choices=("file", "etcd", "kubernetes", "mem"),
        help="service discovery of workers and frontends, equal for all; file uses the directory "
        "DYN_FILE_KV (default: %(default)s)",
    )
    add(
        "--request-plane",
        default="tcp",
        choices=("tcp", "nats"),
        help="transport of requests (default: %(default)s)",
    )
    add(
        "--event-plane",
        default="zmq",
        choices=("zmq", "nats"),
        help="transport of events (default: %(default)s)",
    )
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    # Defaults of server options that shared helpers read but a Dynamo worker does not offer.
    parser.set_defaults(in_process=False, data_parallel_size=1)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a stop signal, and return the exit code: 2 for invalid arguments."""
    try:
        backend_and_config = asyncio.run(SpecopsBackend.from_args(arguments))
    except ValueError as error:
        print(f"specops: {error}", file=sys.stderr)
        return 2
    uvloop.run(Worker(*backend_and_config).run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
