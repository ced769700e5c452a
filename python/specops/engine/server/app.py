# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible HTTP server over the engine.

Handlers run on the event loop and never touch the engine: they give jobs to `EngineThread` and
spell what comes back. A client that goes away, at whatever point, takes its job with it.
"""

import asyncio
import contextlib
import hmac
import json
import logging
import secrets
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

import specops
from specops.engine.engine import Engine
from specops.engine.errors import ContextOverflow, QueueFull
from specops.engine.outputs import Completion, SpeculativeStats
from specops.engine.server import protocol
from specops.engine.server.chat import ChatFormat
from specops.engine.server.engine_thread import ChoiceOutput, EngineThread, Job, JobFailed
from specops.engine.server.metrics import Metrics
from specops.engine.server.protocol import (
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    LegacyLogprobs,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R", CompletionRequest, ChatCompletionRequest)

_PLAYGROUND = Path(__file__).parent / "playground" / "index.html"
_PLAYGROUND_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}
# Texts shorter than this are tokenised on the event loop: a thread would cost more.
_SHORT_TEXT = 4096


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


def make_app(
    engine: Engine,
    *,
    chat_format: ChatFormat | None = None,
    api_key: str | None = None,
    max_body_bytes: int = 4 << 20,
) -> FastAPI:
    """The application that serves an engine. The engine is the application's from now on.

    Args:
        engine: an engine that nobody else uses.
        chat_format: how the messages of a chat become a prompt; by default as the directory of the
            engine's model says.
        api_key: what clients must send as bearer token to everything below /v1.
        max_body_bytes: longer bodies are refused.

    Raises:
        ValueError: the model's chat template is broken.
    """
    if chat_format is None:
        directory = engine.config.model_dir
        chat_format = ChatFormat.from_dir(directory, engine.tokenizer.special_tokens)
    metrics = Metrics(engine)
    thread = EngineThread(engine, metrics)
    metrics.count_waiting(lambda: thread.num_waiting)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        thread.start()
        yield
        thread.stop()

    app = FastAPI(title="specops", lifespan=lifespan, openapi_url=None)
    server = _Server(engine, thread, chat_format, max_body_bytes)

    async def check_key(request: Request) -> None:
        sent = request.headers.get("authorization", "")
        if api_key is not None and not hmac.compare_digest(
            sent.encode(), f"Bearer {api_key}".encode()
        ):
            raise ApiError(
                401,
                "the API key is missing or wrong: send it as Authorization: Bearer KEY",
                type="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    @app.get("/")
    async def playground() -> Response:
        return HTMLResponse(_PLAYGROUND.read_bytes(), headers=_PLAYGROUND_HEADERS)

    @app.get("/health")
    async def health() -> Response:
        status = thread.health
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    api = APIRouter(prefix="/v1", dependencies=[Depends(check_key)])

    @api.get("/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [server.model_card()]})

    @api.get("/models/{name:path}")
    async def model(name: str) -> Response:
        server.check_model(name)
        return JSONResponse(server.model_card())

    @api.post("/completions")
    async def completions(request: Request) -> Response:
        return await server.answer(request, CompletionRequest, _Text)

    @api.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await server.answer(request, ChatCompletionRequest, _Chat)

    app.include_router(api)

    @app.exception_handler(ApiError)
    async def refuse(request: Request, error: ApiError) -> Response:
        # In ASCII, since a message may quote half a surrogate pair, which UTF-8 cannot spell.
        body = json.dumps(error.body)
        return Response(body, error.status, error.headers, media_type="application/json")

    @app.exception_handler(HTTPException)
    async def no_such_route(request: Request, error: HTTPException) -> Response:
        message = f"{error.detail}: {request.method} {request.url.path}"
        return await refuse(request, ApiError(error.status_code, message, headers=error.headers))

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        return await refuse(request, _server_error("internal error; the server's log says more"))

    return app


def serve(app: FastAPI, *, host: str, port: int, drain_timeout: int, log_level: str) -> None:
    """Serves until SIGTERM or SIGINT, then lets running requests finish for `drain_timeout` s."""
    # uvicorn raises the signal again once it has drained; that is no reason to die of it.
    signal.signal(signal.SIGTERM, lambda *_: None)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level=log_level,
        timeout_graceful_shutdown=drain_timeout,
        server_header=False,
        lifespan="on",
        ws="none",
    )
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run()


class _Server:
    """What the two generating endpoints share."""

    def __init__(
        self, engine: Engine, thread: EngineThread, chat_format: ChatFormat, max_body_bytes: int
    ) -> None:
        # Only what never changes is read from the engine here; the rest is its thread's.
        self.tokenizer = engine.tokenizer
        self.model_name = engine.model_name
        self._engine = engine
        self._thread = thread
        self._chat_format = chat_format
        self._max_body_bytes = max_body_bytes
        self._created = int(time.time())
        # A longer text cannot fit, and tokenising it for nothing would take seconds. The factor is
        # for tokenizers that shorten texts before they read them.
        self._max_characters = 4 * engine.max_model_len * engine.tokenizer.longest_token()

    def model_card(self) -> dict[str, Any]:
        """The model as /v1/models lists it, with what a client may choose."""
        speculative = asdict(self._engine.config.speculative_config)
        for path in ("model", "draft_vocab"):
            del speculative[path]
        return {
            "id": self.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "specops",
            "max_model_len": self._engine.max_model_len,
            "methods": list(self._engine.runnable_methods),
            "speculative_config": speculative,
        }

    def check_model(self, name: str | None) -> None:
        """Refuses a model that is not the one served."""
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this server has {self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    async def answer(
        self, http: Request, body_type: type[R], answer_type: "type[_Answer[R]]"
    ) -> Response:
        """Serves one request, from its body to its answer or the stream of it."""
        request: Any = protocol.parse(body_type, await self._read_body(http))
        self.check_model(request.model)
        params = request.sampling_params()
        most = self._engine.vocab_size
        if params.logprobs is not None and params.logprobs > most:
            raise ApiError(400, f"there are no more than {most} logprobs", param="logprobs")
        try:
            speculative = self._engine.config.speculative_for(
                request.speculative_config,
                self._engine.runnable_methods,
                self._engine.missing_methods,
            )
        except ValueError as error:
            raise ApiError(
                400, str(error), param="speculative_config", code="invalid_value"
            ) from None

        prompts = await self._tokenize(request)
        job = Job(prompts, params, request.speculative_config, streaming=request.stream)
        answer = answer_type(self, request, job, speculative.num_speculative_tokens)
        try:
            await until_gone(self._thread.submit(job), http.receive)
            if request.stream:
                return _EventStream(answer.chunks(), lambda: self._thread.abort(job))
            return JSONResponse(await until_gone(answer.whole(), http.receive))
        except ContextOverflow as error:
            raise _too_long(str(error), request.prompt_field) from None
        except QueueFull as error:
            raise ApiError(
                429,
                f"the server is busy: {error}",
                type="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": "1"},
            ) from None
        except ValueError as error:
            raise protocol.bad_value(error, body_type) from None
        except JobFailed as error:
            raise _server_error(str(error)) from None
        except asyncio.CancelledError:  # the time for draining is over
            raise _shutting_down() from None
        except ClientGone:
            return Response(status_code=499)  # for the access log: nobody reads it
        finally:
            if not request.stream:
                self._thread.abort(job)  # nothing to do if it is finished

    async def _read_body(self, http: Request) -> bytes:
        """The body, up to the limit."""
        kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # Also keeps web pages of other origins out, which can send any other type unasked.
            raise ApiError(415, f"Content-Type must be application/json, got {kind or 'none'}")
        chunks: list[bytes] = []
        size = 0
        async for chunk in http.stream():
            size += len(chunk)
            if size <= self._max_body_bytes:
                chunks.append(chunk)
            elif size > 16 * self._max_body_bytes:
                break  # a client that still sends then may miss the answer
        if size > self._max_body_bytes:
            raise ApiError(
                413,
                f"the body must be at most {self._max_body_bytes} bytes long",
                code="body_too_large",
            )
        return b"".join(chunks)

    async def _tokenize(
        self, request: CompletionRequest | ChatCompletionRequest
    ) -> list[list[int]]:
        if isinstance(request, ChatCompletionRequest):
            try:
                messages = [message.for_template() for message in request.messages]
                text = self._chat_format.render(messages)
            except ValueError as error:
                raise ApiError(400, str(error), param="messages", code="invalid_value") from None
            prompts: list[str | list[int]] = [text]
        else:
            prompts = request.prompts()
        for prompt in prompts:
            if isinstance(prompt, str) and len(prompt) > self._max_characters:
                raise _too_long(
                    f"a prompt of {len(prompt)} characters exceeds the context of "
                    f"{self._engine.max_model_len} tokens",
                    request.prompt_field,
                )
        is_plain = isinstance(request, CompletionRequest)  # a template writes special tokens itself

        def encode() -> list[list[int]]:
            return [
                self.tokenizer.encode(prompt, add_special_tokens=is_plain)
                if isinstance(prompt, str)
                else prompt
                for prompt in prompts
            ]

        try:
            if sum(map(len, prompts)) < _SHORT_TEXT:
                return encode()
            return await asyncio.to_thread(encode)
        except ValueError as error:
            raise ApiError(
                400, str(error), param=request.prompt_field, code="invalid_value"
            ) from None


async def until_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Does the work unless the client goes away first.

    Raises:
        ClientGone: it did; the work has been cancelled.
    """

    async def wait_for_end() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_end())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class _EventStream(Response):
    """Server-sent events; `close` runs when the stream ends, for whatever reason."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the chunks as they come."""
        try:
            await until_gone(self._send(send), receive)
        except ClientGone:
            logger.debug("a client left in the middle of its stream")
        except asyncio.CancelledError:  # the time for draining is over
            body = _event(_shutting_down().body)
            await send({"type": "http.response.body", "body": body, "more_body": False})
        finally:
            self._close()

    async def _send(self, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Answer(Generic[R]):
    """Collects the choices of a job and spells them; one per request."""

    id_prefix: str
    object_name: str
    chunk_name: str

    def __init__(self, server: _Server, request: R, job: Job, num_speculative_tokens: int) -> None:
        self.tokenizer = server.tokenizer
        self.request: R = request
        self.job = job
        self._num_speculative_tokens = num_speculative_tokens
        self._frame = {
            "id": self.id_prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": server.model_name,
            "system_fingerprint": f"specops-{specops.__version__}",
        }
        self._completions: dict[int, Completion] = {}

    async def whole(self) -> dict[str, Any]:
        """Waits for all choices: the answer that is not streamed."""
        choices: dict[int, dict[str, Any]] = {}
        while self.job.num_unfinished:
            for output in await self.job.next_outputs():
                if output.completion is not None:
                    self._completions[output.index] = output.completion
                    choices[output.index] = self.choice(output, output.completion)
        return {
            **self._frame,
            "object": self.object_name,
            "choices": [choices[index] for index in sorted(choices)],
            **self._totals(),
        }

    async def chunks(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events."""
        options = self.request.stream_options or protocol.StreamOptions()
        prompt_tokens = sum(map(len, self.job.prompts))
        num_tokens = 0

        def chunk(choices: list[dict[str, Any]], **more: Any) -> bytes:
            body = {**self._frame, "object": self.chunk_name, "choices": choices}
            if options.continuous_usage_stats:
                body["usage"] = {
                    "prompt_tokens": prompt_tokens,
                    "completion_tokens": num_tokens,
                    "total_tokens": prompt_tokens + num_tokens,
                }
            elif options.include_usage:
                body["usage"] = None
            return _event(body | more)

        try:
            for index in range(self.job.num_unfinished):
                for first in self.first(index):
                    yield chunk([first])
            while self.job.num_unfinished:
                for output in await self.job.next_outputs():
                    num_tokens += len(output.output.token_ids)
                    if output.output.text or output.output.logprobs:
                        yield chunk([self.delta(output)])
                    if output.completion is None:
                        continue
                    self._completions[output.index] = output.completion
                    last = len(self._completions) == len(self.job.prompts) * self.job.params.n
                    # With include_usage the counts come in a chunk of their own.
                    more = {} if options.include_usage or not last else self._metrics()
                    yield chunk([self.last(output, output.completion)], **more)
            if options.include_usage:
                yield chunk([], **self._totals())
        except JobFailed as error:
            yield _event(_server_error(str(error)).body)
        yield b"data: [DONE]\n\n"

    def first(self, index: int) -> list[dict[str, Any]]:
        """What a choice's stream begins with."""
        raise NotImplementedError

    def delta(self, output: ChoiceOutput) -> dict[str, Any]:
        """What a step added to a choice."""
        raise NotImplementedError

    def last(self, output: ChoiceOutput, completion: Completion) -> dict[str, Any]:
        """What a choice's stream ends with."""
        raise NotImplementedError

    def choice(self, output: ChoiceOutput, completion: Completion) -> dict[str, Any]:
        """A finished choice as a whole."""
        raise NotImplementedError

    def _totals(self) -> dict[str, Any]:
        n = self.job.params.n
        completions = self._completions
        return {
            "usage": protocol.usage(
                prompt_tokens=sum(map(len, self.job.prompts)),
                completion_tokens=sum(len(one.token_ids) for one in completions.values()),
                # A prompt counts once, so its hits do, too: those of its first choice.
                cached_tokens=sum(
                    completions[index].num_cached_tokens for index in sorted(completions)[::n]
                ),
                stats=self._stats(),
            ),
            **self._metrics(),
        }

    def _stats(self) -> SpeculativeStats:
        return protocol.add_stats(list(self._completions.values()))

    def _metrics(self) -> dict[str, Any]:
        return {"metrics": protocol.metrics(self._stats(), self._num_speculative_tokens)}


class _Chat(_Answer[ChatCompletionRequest]):
    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def first(self, index: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def delta(self, output: ChoiceOutput) -> dict[str, Any]:
        logprobs = None
        if self.request.logprobs:
            logprobs = protocol.chat_logprobs(self.tokenizer, output.output.logprobs)
        return {
            "index": output.index,
            "delta": {"content": output.output.text},
            "logprobs": logprobs,
            "finish_reason": None,
        }

    def last(self, output: ChoiceOutput, completion: Completion) -> dict[str, Any]:
        return {
            "index": output.index,
            "delta": {},
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "seed": output.seed,
        }

    def choice(self, output: ChoiceOutput, completion: Completion) -> dict[str, Any]:
        logprobs = None
        if self.request.logprobs:
            logprobs = protocol.chat_logprobs(self.tokenizer, completion.logprobs)
        return {
            "index": output.index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "seed": output.seed,
        }


class _Text(_Answer[CompletionRequest]):
    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._logprobs: dict[int, LegacyLogprobs] = {}  # by choice: their offsets go on

    def first(self, index: int) -> list[dict[str, Any]]:
        echo = self._echo(index)
        return [self._spell(index, echo, None, None)] if echo else []

    def delta(self, output: ChoiceOutput) -> dict[str, Any]:
        logprobs = None
        if self.request.logprobs is not None:
            builder = self._logprobs.setdefault(output.index, LegacyLogprobs(self.tokenizer))
            logprobs = builder.build(output.output.logprobs)
        return self._spell(output.index, output.output.text, logprobs, None)

    def last(self, output: ChoiceOutput, completion: Completion) -> dict[str, Any]:
        choice = self._spell(output.index, "", None, completion.finish_reason)
        return {**choice, "stop_reason": completion.stop_reason, "seed": output.seed}

    def choice(self, output: ChoiceOutput, completion: Completion) -> dict[str, Any]:
        logprobs = None
        if self.request.logprobs is not None:
            logprobs = LegacyLogprobs(self.tokenizer).build(completion.logprobs)
        text = self._echo(output.index) + completion.text
        choice = self._spell(output.index, text, logprobs, completion.finish_reason)
        return {**choice, "stop_reason": completion.stop_reason, "seed": output.seed}

    def _echo(self, index: int) -> str:
        if not self.request.echo:
            return ""
        prompt = self.request.prompts()[index // self.job.params.n]
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)

    @staticmethod
    def _spell(index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _event(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def _too_long(message: str, param: str) -> ApiError:
    return ApiError(413, message, param=param, code="context_length_exceeded")


def _shutting_down() -> ApiError:
    message = "the server is shutting down"
    return ApiError(503, message, type="service_unavailable", code="shutting_down")


def _server_error(message: str) -> ApiError:
    return ApiError(500, message, type="server_error", code="internal_error")
