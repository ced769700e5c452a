# SPDX-License-Identifier: Apache-2.0
"""An HTTP server with OpenAI's and Anthropic's APIs: its routes, middleware and main loop.

Handlers run on the event loop. They pass jobs to `Dispatch`, which submits them to the engine, and
answer with the outputs. If a client disconnects at any point, its job is aborted.
"""

import asyncio
import contextlib
import errno
import functools
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import Scope

import specops
from specops.api.tokenizer import Tokenizer
from specops.server.adapters import AdapterChanges, LoadAdapterRequest, UnloadAdapterRequest
from specops.server.admission import Admission, ClientPermits
from specops.server.answers import ChatAnswer, TextAnswer
from specops.server.anthropic_messages import (
    CountTokensRequest,
    MessagesRequest,
    begin_message,
    error_body,
)
from specops.server.api_error import ApiError, server_error, shutting_down
from specops.server.audits import AuditReply, AuditRequest
from specops.server.chat import ChatFormat
from specops.server.clients import Clients
from specops.server.connections import bounded_protocol, connections_within_files
from specops.server.dispatch import Dispatch
from specops.server.generation import Generation
from specops.server.hosts import Access, AllowedHosts, Forwarded
from specops.server.metrics import Metrics
from specops.server.metrics_port import add_metrics, metrics_served
from specops.server.openai_responses import (
    OF_A_RESPONSE,
    OF_ITEMS,
    Responses,
    ResponsesRequest,
)
from specops.server.openapi import describe, operation_id, with_body, without_body
from specops.server.page import add_page
from specops.server.protocol import ChatCompletionRequest, CompletionRequest
from specops.server.replies import (
    AdapterReply,
    ChatCompletion,
    Contract,
    DeletedResponse,
    Health,
    InputItems,
    MessageReply,
    MessagesError,
    Model,
    ModelList,
    ResponsesReply,
    TextCompletion,
    TextReply,
    TokenCount,
    TokensReply,
    Version,
)
from specops.server.requests import Requests, note
from specops.server.scores import ScoreReply, ScoreRequest
from specops.server.streaming import dumped
from specops.server.tokens import DetokenizeRequest, TokenizeRequest
from specops.server.unread import Unread
from specops.server.unsupported import HEADER, IgnoredFields, Policy
from specops.server.updates import (
    OF_PAUSE,
    Paused,
    Status,
    Updated,
    UpdateRequest,
    WeightUpdates,
)
from specops.service.client import EngineClient
from specops.service.garbage import raise_gc_thresholds

if TYPE_CHECKING:
    from specops.server.tracing import Tracing

R = TypeVar("R", CompletionRequest, ChatCompletionRequest)
A = TypeVar("A", TextAnswer, ChatAnswer)

# Time after which a thread must yield Python's lock to the event loop, so that a thread that parses
# a request, or runs the engine with --in-process, does not delay streams. Python's default is ten
# times as long.
_SWITCH_SECONDS = 0.0005

# Connections accepted per round of the event loop, which may last a millisecond; libuv accepts only
# one from each listener. If one client opened connections faster than the server accepts them,
# thousands of its connections would wait ahead of other clients' connections.
_ACCEPTED_AT_ONCE = 8

# Chat templates that are part of specops, by their names as `chat_template`.
_TEMPLATES = {"tools": Path(__file__).with_name("tools.jinja")}

# Errors below this path have Anthropic's format.
_ANTHROPIC = "/v1/messages"

_NO_UPDATES = ": adapters are loaded at run time only with --runtime-lora-dir"

# Routes that clients may call but this server lacks, with the reason in the 404 error.
_ABSENT = {
    "/v1/embeddings": ": embeddings are not supported",
    "/metrics": ": metrics are on the port of --metrics-port",
    "/v1/load_lora_adapter": _NO_UPDATES,
    "/v1/unload_lora_adapter": _NO_UPDATES,
    **dict.fromkeys(
        ("/pause", "/resume", "/is_paused", "/update_weights"),
        ": weights can only be updated with --weight-update-dir",
    ),
}

_READ = ["GET", "HEAD"]
_OF_A_MODEL = {"model": {"type": "string", "description": "the model, or a LoRA adapter"}}
_HEALTH: dict[str, Any] = without_body(Health)
_HEALTH["responses"][503] = {
    "model": Health,
    "description": "the engine fails or hangs, is being restarted, or has stopped",
}


def make_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    *,
    chat_format: ChatFormat | None = None,
    api_keys: Sequence[str] = (),
    max_body_bytes: int = 4 << 20,
    body_timeout: float = 60.0,
    max_unread_bytes: int = 64 << 20,
    metrics_apart: bool = False,
    tool_call_parser: str | None = None,
    reasoning_parser: str = "auto",
    chat_template: str | Path | None = None,
    access: Access | None = None,
    sampling_defaults: Mapping[str, Any] = MappingProxyType({}),
    cache_scope: Literal["key", "server"] = "key",
    tracing: "Tracing | None" = None,
    model_aliases: Sequence[str] = (),
    unsupported_fields: Policy = "error",
    runtime_lora_dir: str | Path | None = None,
    weight_update_dir: str | Path | None = None,
) -> FastAPI:
    """Return the application that serves an engine.

    Args:
        client: connection to an engine that nothing else uses; it starts and stops with the
            application.
        tokenizer: tokenizer of the engine's model.
        chat_format: converts chats to prompts; overrides the next three arguments about chats.
            By default it is made from them.
        api_keys: keys, one of which clients must send as bearer token to all routes below /v1; if
            empty, no key is needed. All requests with the same key belong to one client; without
            keys, all from the same address. Slots and rows of steps are shared equally among
            clients.
        max_body_bytes: maximum length of a request's body.
        body_timeout: seconds within which a body must arrive.
        max_unread_bytes: bytes of output that may wait for one client to read them.
        metrics_apart: omit /metrics, since `serve` has another port for it.
        tool_call_parser: format in which the model writes tool calls, of `CALL_PARSERS`; by
            default detected from its chat template.
        reasoning_parser: format of the model's reasoning, of `REASONING_PARSERS`; "auto": detected
            from its chat template; "none": reasoning is content.
        chat_template: path of a template to use instead of the model's, or a name of `_TEMPLATES`.
        access: allowed host names, web page origins and proxies; by default any host name, no
            other origin and no proxy.
        sampling_defaults: sampling parameters of requests that do not set them, by name; see
            `sampling_defaults`.
        cache_scope: "key": requests of different keys share no pages of the prefix cache and no
            earlier responses to draft from; "server": they share both.
        tracing: exports a span per request below /v1; None: no traces.
        model_aliases: further names that requests may use for the model.
        unsupported_fields: "error": refuse a request with unknown fields, or with unsupported ones
            that would change the output; "warn": ignore the fields, log them and name them in the
            answer's header `x-ignored-fields`; "ignore": ignore them.
        runtime_lora_dir: folder of the LoRA adapters that clients may load; None: the routes for
            that do not exist.
        weight_update_dir: directory below which /update_weights may load models; None: there are
            no routes for updates.

    Raises:
        ValueError: the chat template cannot be read, a key is empty, the parser is unknown, or an
            adapter has a name of the model.
    """
    if not all(key.strip() for key in api_keys):
        raise ValueError("api_keys must hold keys of at least one character, got an empty key")
    parsers = {"tool_call_parser": tool_call_parser, "reasoning_parser": reasoning_parser}
    chat_format = chat_format or _chat_format(client, tokenizer, chat_template, parsers)
    metrics = Metrics(client)
    num_clients = len(set(api_keys))
    dispatch = Dispatch(client, metrics, num_clients, max_unread_bytes=max_unread_bytes)
    lifespan = functools.partial(_running, dispatch)
    app = FastAPI(lifespan=lifespan, openapi_url=None, generate_unique_id_function=operation_id)
    access = access or Access()
    app.state.metrics = metrics
    app.state.allowed_hosts = access.allowed_hosts
    app.state.client = client
    _add_own_routes(app, client, has_metrics=not metrics_apart)
    if not metrics_apart:
        add_metrics(app, metrics)
    clients = Clients(api_keys, cache_scope)
    generation = Generation(
        dispatch,
        tokenizer,
        chat_format,
        max_body_bytes=max_body_bytes,
        body_timeout=body_timeout,
        sampling_defaults=sampling_defaults,
        shares_caches=clients.shares_caches,
        model_aliases=model_aliases,
        unsupported_fields=unsupported_fields,
    )
    if repeated := set(client.status.adapters).intersection(generation.model_names):
        raise ValueError(f"lora_modules must not have a name of the model, got {min(repeated)!r}")
    changes = None
    if runtime_lora_dir is not None:
        changes = AdapterChanges(runtime_lora_dir, dispatch, generation.model_names)
    api = _openai_routes(generation, changes)
    if weight_update_dir is not None:
        _add_update_routes(api, WeightUpdates(generation, dispatch, Path(weight_update_dir)))
    app.include_router(api)
    _add_description(app, api if api_keys else None, has_chats=chat_format.has_template)
    _add_error_handlers(app, api)
    _add_middleware(app, access, metrics, clients, dispatch.unread, tracing)
    return app


@contextlib.asynccontextmanager
async def _running(dispatch: Dispatch, app: FastAPI) -> AsyncIterator[None]:
    await dispatch.start()
    yield
    await dispatch.stop()


def _add_middleware(
    app: FastAPI,
    access: Access,
    metrics: Metrics,
    clients: Clients,
    unread: Unread,
    tracing: "Tracing | None",
) -> None:
    """Add the middleware; each one wraps those added before it."""
    if access.allowed_hosts is not None:
        app.add_middleware(AllowedHosts, hosts=access.allowed_hosts)
    if access.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=access.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", HEADER],
        )
    app.add_middleware(IgnoredFields)
    app.add_middleware(
        Admission, clients=clients, permits=ClientPermits(), unread=unread, cancelled=_cancelled
    )
    app.add_middleware(Requests, count=metrics.answer, failed=_failed, tracing=tracing)
    if access.forwarded_allow_ips:
        app.add_middleware(Forwarded, proxies=access.forwarded_allow_ips)


def _chat_format(
    client: EngineClient,
    tokenizer: Tokenizer,
    chat_template: str | Path | None,
    parsers: Mapping[str, Any],
) -> ChatFormat:
    """Load the chat template from the model's directory, or the one that `chat_template` names."""
    special = tokenizer.special_tokens
    if chat_template is None:
        return ChatFormat.from_dir(client.capabilities.model_dir, special, **parsers)
    try:
        file = _TEMPLATES.get(str(chat_template), Path(chat_template))
        text = file.read_text(encoding="utf-8")
        chat_format = ChatFormat(text, special, **parsers)
    except (OSError, ValueError) as error:
        raise ValueError(f"chat_template {chat_template} cannot be used: {error}") from None
    return chat_format


def _add_own_routes(app: FastAPI, client: EngineClient, *, has_metrics: bool) -> None:
    """Add the web page and the routes for operators: /health, /version, /metrics."""
    add_page(app, has_metrics=has_metrics)

    @app.api_route("/health", methods=_READ, **_HEALTH)
    async def health() -> Response:
        """Return whether the engine works; 503 if it does not."""
        status = client.health
        answer: dict[str, Any] = {"status": status}
        counts = client.status.stats.drafter_failures
        if failures := {method: count for method, count in counts.items() if count}:
            answer["drafter_failures"] = failures
        if warnings := client.status.stats.drafter_warnings:
            answer["drafter_warnings"] = list(warnings)
        return JSONResponse(answer, 200 if status == "ok" else 503)

    @app.api_route("/version", methods=_READ, **without_body(Version))
    async def version() -> Response:
        """Return the version of specops."""
        return JSONResponse({"version": specops.__version__})


def _add_description(app: FastAPI, keyed: APIRouter | None, *, has_chats: bool) -> None:
    """Add /openapi.json; it marks the routes of `keyed` as needing a key."""
    routes = keyed.routes if keyed is not None else ()
    paths = frozenset(route.path_format for route in routes if isinstance(route, APIRoute))

    @functools.cache
    def description() -> bytes:
        return dumped(describe(app, keyed=paths, has_chats=has_chats))

    @app.api_route("/openapi.json", methods=_READ, include_in_schema=False)
    async def openapi() -> Response:
        # Built at the first request, which takes a seventh of a second, so that it delays no start;
        # built in a thread, so that streams continue meanwhile.
        return Response(await asyncio.to_thread(description), media_type="application/json")


def _openai_routes(generation: Generation, changes: AdapterChanges | None) -> APIRouter:
    """Return the routes that need an API key, if the server has keys."""

    async def check_key(request: Request) -> None:
        if not request.state.is_authorized:
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as Authorization: Bearer KEY, or as "
                "x-api-key: KEY",
                type="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    api = APIRouter(dependencies=[Depends(check_key)], generate_unique_id_function=operation_id)

    @api.api_route("/v1/models", methods=_READ, **without_body(ModelList))
    async def models() -> Response:
        """List the names of the model and its LoRA adapters, with the methods of requests."""
        return JSONResponse({"object": "list", "data": generation.model_cards()})

    @api.api_route("/v1/models/{name:path}", methods=_READ, **without_body(Model, 404))
    async def model(name: str) -> Response:
        """Return the entry of the model or of a LoRA adapter; 404 for another name."""
        return JSONResponse(generation.model_card(name))

    @api.api_route("/v1/contract", methods=_READ, **without_body(Contract, 404, query=_OF_A_MODEL))
    async def contract(request: Request) -> Response:
        """Return the execution contract: everything that output bits depend on, and its digest."""
        return JSONResponse(generation.contract_of(request.query_params.get("model")))

    @api.post("/v1/audit", **with_body(AuditRequest, AuditReply, generates=True))
    async def audit(request: Request) -> Response:
        """Derive recorded answers again, and say where one differs."""
        return await generation.audit(request)

    @api.post("/v1/score", **with_body(ScoreRequest, ScoreReply, generates=True))
    async def score(request: Request) -> Response:
        """Return the log-probabilities of continuations of a prompt."""
        return await generation.score(request)

    @api.post("/v1/completions", **with_body(CompletionRequest, TextCompletion, streams=True))
    async def completions(request: Request) -> Response:
        """Complete a prompt, in OpenAI's format."""
        return await generation.answer(request, CompletionRequest, _unconverted(TextAnswer))

    @api.post(
        "/v1/chat/completions", **with_body(ChatCompletionRequest, ChatCompletion, streams=True)
    )
    async def chat_completions(request: Request) -> Response:
        """Answer a chat, in OpenAI's format."""
        return await generation.answer(request, ChatCompletionRequest, _unconverted(ChatAnswer))

    @api.post("/tokenize", **with_body(TokenizeRequest, TokensReply))
    async def tokenize(request: Request) -> Response:
        """Return the tokens of a text, or of a chat's prompt."""
        return await generation.tokenize(request)

    @api.post("/detokenize", **with_body(DetokenizeRequest, TextReply))
    async def detokenize(request: Request) -> Response:
        """Return the text of tokens."""
        return await generation.detokenize(request)

    _add_blocks_routes(api, generation)
    if changes is not None:
        _add_adapter_routes(api, generation, changes)
    return api


def _add_adapter_routes(api: APIRouter, generation: Generation, changes: AdapterChanges) -> None:
    """Add vLLM's routes that load and unload LoRA adapters."""

    @api.post("/v1/load_lora_adapter", **with_body(LoadAdapterRequest, AdapterReply))
    async def load_lora_adapter(request: Request) -> Response:
        """Load a LoRA adapter, which requests may then name as their model."""
        body = await generation.read(request, LoadAdapterRequest)
        return JSONResponse({"message": await changes.load(body)})

    @api.post("/v1/unload_lora_adapter", **with_body(UnloadAdapterRequest, AdapterReply))
    async def unload_lora_adapter(request: Request) -> Response:
        """Unload a LoRA adapter; requests that use it finish."""
        body = await generation.read(request, UnloadAdapterRequest)
        return JSONResponse({"message": await changes.unload(body)})


def _add_update_routes(api: APIRouter, updates: WeightUpdates) -> None:
    """Add the routes that replace the engine's weights."""

    @api.post("/pause", **without_body(Status, 400, 403, query=OF_PAUSE))
    async def pause(request: Request) -> Response:
        """Hold new requests, and answer once no request runs."""
        return await updates.pause(request)

    @api.post("/resume", **without_body(Status, 400, 403))
    async def resume(request: Request) -> Response:
        """Run the requests that wait since /pause."""
        return await updates.resume(request)

    @api.api_route("/is_paused", methods=_READ, **without_body(Paused))
    async def is_paused() -> Response:
        """Return whether requests wait for /resume."""
        return updates.state()

    @api.post("/update_weights", **with_body(UpdateRequest, Updated))
    async def update_weights(request: Request) -> Response:
        """Load the weights of another directory."""
        return await updates.update(request)


def _unconverted(answer_type: type[A]) -> Callable[[R, str], tuple[R, type[A]]]:
    """Return the `begin` argument of `Generation.answer` for bodies that need no conversion."""
    return lambda body, client: (body, answer_type)


def _add_blocks_routes(api: APIRouter, generation: Generation) -> None:
    """Add the routes of OpenAI's Responses API and Anthropic's Messages API."""
    responses = Responses()

    @api.post("/v1/responses", **with_body(ResponsesRequest, ResponsesReply, streams=True))
    async def create_response(request: Request) -> Response:
        """Answer a chat, in the format of OpenAI's Responses API."""
        return await generation.answer(request, ResponsesRequest, responses.begin)

    path = "/v1/responses/{response_id}"

    @api.api_route(
        path, methods=_READ, **without_body(ResponsesReply, 400, 404, query=OF_A_RESPONSE)
    )
    async def response(request: Request, response_id: str) -> Response:
        """Return a stored response as it was answered."""
        body = responses.retrieve(request.state.client, response_id, request.query_params)
        return Response(body, media_type="application/json")

    @api.delete(path, **without_body(DeletedResponse, 404))
    async def delete_response(request: Request, response_id: str) -> Response:
        """Delete a stored response."""
        return JSONResponse(responses.delete(request.state.client, response_id))

    items = f"{path}/input_items"

    @api.api_route(items, methods=_READ, **without_body(InputItems, 400, 404, query=OF_ITEMS))
    async def input_items(request: Request, response_id: str) -> Response:
        """Return the input items of the request that created a stored response."""
        page = responses.input_items(request.state.client, response_id, request.query_params)
        return Response(dumped(page), media_type="application/json")

    error = MessagesError

    @api.post(_ANTHROPIC, **with_body(MessagesRequest, MessageReply, streams=True, error=error))
    async def create_message(request: Request) -> Response:
        """Answer a chat, in Anthropic's format."""
        return await generation.answer(request, MessagesRequest, begin_message)

    @api.post(
        f"{_ANTHROPIC}/count_tokens", **with_body(CountTokensRequest, TokenCount, error=error)
    )
    async def count_tokens(request: Request) -> Response:
        """Return the number of tokens of a chat's prompt."""
        count = await generation.count(request, CountTokensRequest, CountTokensRequest.as_chat)
        return JSONResponse({"input_tokens": count})


def _methods_of(app: FastAPI, api: APIRouter, path: str) -> list[str]:
    """Return the HTTP methods of a path, in alphabetical order."""
    routes = (route for route in [*app.routes, *api.routes] if isinstance(route, APIRoute))
    return sorted(
        {
            method
            for route in routes
            if route.path_regex.match(path)
            for method in route.methods or ()
        }
    )


def _nearby(app: FastAPI, api: APIRouter, path: str) -> str:
    """Return "; did you mean PATH?" if the path lacks /v1, or has it twice; "" otherwise."""
    nearby = path.removeprefix("/v1") if path.startswith("/v1/v1/") else f"/v1{path}"
    return f"; did you mean {nearby}?" if _methods_of(app, api, nearby) else ""


def _error_response(error: ApiError, scope: Scope) -> Response:
    """Record an error, and return it in the format of the API that the path belongs to."""
    note(scope, error)
    # JSON in ASCII, since a message may quote half a surrogate pair, which UTF-8 cannot encode.
    body = json.dumps(error_body(error) if scope["path"].startswith(_ANTHROPIC) else error.body)
    return Response(body, error.status, error.headers, media_type="application/json")


def _cancelled(scope: Scope) -> Response:
    """Return the response to a request that is still waiting when `drain_timeout` has passed."""
    return _error_response(shutting_down(), scope)


def _failed(scope: Scope) -> Response:
    """Return the response to a request that raised an exception."""
    return _error_response(server_error("internal error; see the server's log"), scope)


def _add_error_handlers(app: FastAPI, api: APIRouter) -> None:
    """Add handlers that return every error in the format of the requested API."""

    @app.exception_handler(ApiError)
    async def refuse(request: Request, error: ApiError) -> Response:
        return _error_response(error, request.scope)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # for the access log only: the client has left

    @app.exception_handler(HTTPException)
    async def no_such_route(request: Request, error: HTTPException) -> Response:
        message = f"{error.detail}: {request.method} {request.url.path}"
        message += _ABSENT.get(request.url.path, "")
        if error.status_code == 404:
            message += _nearby(app, api, request.url.path)
        code = "unknown_url" if error.status_code == 404 else None  # OpenAI's code
        headers = {**(error.headers or {})}
        if error.status_code == 405:  # Starlette lists the methods of only one of the path's routes
            headers["Allow"] = ", ".join(_methods_of(app, api, request.url.path))
        refusal = ApiError(error.status_code, message, code=code, headers=headers)
        return await refuse(request, refusal)


def listen(host: str, port: int, *, name: str = "port") -> socket.socket:
    """Bind a socket to an address, so that an error in it is found before a model is loaded.

    Args:
        host: host name or address.
        port: port number; 0 chooses a free one.
        name: name of the port in error messages.

    Raises:
        ValueError: the address does not exist or is in use.
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"{name} must be in [0, 65535], got {port}")
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{name} {port} is in use; choose another with {option}") from None
        raise ValueError(
            f"cannot listen on host {host} and {name} {port}: {error.strerror}"
        ) from None
    return listener


def serve(
    app: FastAPI,
    listener: socket.socket,
    *,
    drain_timeout: int,
    log_level: str,
    max_connections: int = 1024,
    header_timeout: float = 20.0,
    write_timeout: float = 60.0,
    metrics_listener: socket.socket | None = None,
    tls: Mapping[str, Any] = MappingProxyType({}),
    tracing: "Tracing | None" = None,
) -> int:
    """Serve until SIGTERM or SIGINT, then let running requests finish for `drain_timeout` s.

    A server whose engine has failed for good ends in the same way.

    Args:
        app: from `make_app`.
        listener: from `listen`.
        drain_timeout: seconds for which running requests may continue.
        log_level: minimum severity of uvicorn's log lines.
        max_connections: maximum number of open connections. When it is exceeded, the address with
            the most connections loses the one that has waited longest for its client.
        header_timeout: seconds that a client may take to send the headers of a request.
        write_timeout: seconds that a client may take to read the contents of the write buffer.
        metrics_listener: from `listen`, for an application with `metrics_apart`.
        tls: uvicorn's options that begin with ssl_; empty serves HTTP without encryption.
        tracing: the argument of `make_app`, whose last spans are exported at the end.

    Returns:
        The exit code: 1 if the engine or the queue has failed for good, so that a supervisor starts
        another server; else 0.
    """
    raise_gc_thresholds()
    sys.setswitchinterval(_SWITCH_SECONDS)
    # uvicorn raises the signal again once it has drained; it must not kill the process then.
    signal.signal(signal.SIGTERM, lambda *_: None)
    config = uvicorn.Config(
        app,
        http=bounded_protocol(
            max_connections=connections_within_files(max_connections),
            header_timeout=header_timeout,
            write_timeout=write_timeout,
        ),
        loop="uvloop",
        log_config=None,  # specops.service.logs, which the caller has configured, applies
        log_level=log_level,
        access_log=False,  # `Requests` writes these lines
        timeout_graceful_shutdown=drain_timeout,
        server_header=False,
        proxy_headers=False,  # Forwarded, which make_app adds, handles them
        lifespan="on",
        ws="none",
        **tls,
    )
    with contextlib.ExitStack() as stack:
        if tracing is not None:
            stack.callback(tracing.close)
        stack.enter_context(contextlib.suppress(KeyboardInterrupt))
        if metrics_listener is not None:
            metrics, hosts = app.state.metrics, app.state.allowed_hosts
            stack.enter_context(metrics_served(metrics, metrics_listener, hosts, tls))
        listeners = [listener, *(listener.dup() for _ in range(_ACCEPTED_AT_ONCE - 1))]
        server = _Server(config, app.state.client)
        server.run(sockets=listeners)
    return 1 if server.has_failed or app.state.client.health == "failed" else 0


class _Server(uvicorn.Server):
    """Server that ends when its engine has failed for good.

    Args:
        config: the server's configuration.
        client: connection to the engine.

    Attributes:
        has_failed: whether the server ended for that reason.
    """

    def __init__(self, config: uvicorn.Config, client: EngineClient) -> None:
        super().__init__(config)
        self._client = client
        self.has_failed = False

    async def on_tick(self, counter: int) -> bool:
        """Return whether the server must end; uvicorn calls this ten times a second."""
        if self._client.health == "failed":
            self.has_failed = True
            return True
        return await super().on_tick(counter)
