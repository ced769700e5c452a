# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible HTTP server over the engine: its routes, and how it runs.

Handlers run on the event loop and never touch the engine: they give jobs to `EngineThread` and
answer with what comes back. A client that goes away, at whatever point, takes its job with it.
"""

import contextlib
import hmac
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException

from specops.engine.engine import Engine
from specops.engine.server.answers import ChatAnswer, TextAnswer
from specops.engine.server.api_error import ApiError, server_error
from specops.engine.server.chat import ChatFormat
from specops.engine.server.engine_thread import EngineThread
from specops.engine.server.generation import Generation
from specops.engine.server.metrics import Metrics
from specops.engine.server.protocol import ChatCompletionRequest, CompletionRequest

_PLAYGROUND = Path(__file__).parent / "playground" / "index.html"
_PLAYGROUND_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}


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
    _add_own_routes(app, thread, metrics)
    generation = Generation(engine, thread, chat_format, max_body_bytes)
    app.include_router(_openai_routes(generation, api_key))
    _add_error_handlers(app)
    return app


def _add_own_routes(app: FastAPI, thread: EngineThread, metrics: Metrics) -> None:
    """The page, and what operators look at."""

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


def _openai_routes(generation: Generation, api_key: str | None) -> APIRouter:
    """Everything below /v1, behind the key."""

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

    api = APIRouter(prefix="/v1", dependencies=[Depends(check_key)])

    @api.get("/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [generation.model_card()]})

    @api.get("/models/{name:path}")
    async def model(name: str) -> Response:
        generation.check_model(name)
        return JSONResponse(generation.model_card())

    @api.post("/completions")
    async def completions(request: Request) -> Response:
        return await generation.answer(request, CompletionRequest, TextAnswer)

    @api.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await generation.answer(request, ChatCompletionRequest, ChatAnswer)

    return api


def _add_error_handlers(app: FastAPI) -> None:
    """Every error leaves in OpenAI's shape."""

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
        return await refuse(request, server_error("internal error; the server's log says more"))


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
