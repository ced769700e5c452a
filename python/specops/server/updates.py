# SPDX-License-Identifier: Apache-2.0
"""Routes that replace the weights of a running server, with vLLM's names: for training loops.

An update starts an engine with the new weights in a process of its own, and then ends the old one.
So its bits are those of a fresh start, and nothing of the old model is left.
"""

import asyncio
import filecmp
from pathlib import Path
from typing import Any, Literal

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from specops.server.api_error import ApiError, bad_value
from specops.server.dispatch import Dispatch
from specops.server.generation import Generation
from specops.server.protocol import Body
from specops.server.strict import Strict

# Query parameters of POST /pause. An update drops all pages of the cache, and without one they stay
# valid, so `clear_cache` changes no answer.
OF_PAUSE: dict[str, dict[str, Any]] = {
    "mode": {"type": "string", "enum": ["abort", "wait"], "default": "abort"},
    "clear_cache": {"type": "boolean"},
}


class UpdateInfo(Strict):
    """Place of the new weights."""

    path: str


class UpdateRequest(Body):
    """Body of POST /update_weights: a directory with a model, below that of the server's option."""

    update_info: UpdateInfo


class Status(Strict):
    """New state of the server: whether it runs requests."""

    status: Literal["paused", "resumed"]


class Paused(Strict):
    """State of the server: whether requests wait for /resume."""

    is_paused: bool


class Updated(Strict):
    """Execution contract of the new weights, and the fingerprint that answers will have."""

    contract: str
    system_fingerprint: str


class WeightUpdates:
    """Handlers of the routes.

    Args:
        generation: reads bodies, and reports the contract.
        dispatch: holds requests while the server is paused.
        root: directory below which models may be loaded.
    """

    def __init__(self, generation: Generation, dispatch: Dispatch, root: Path) -> None:
        self._generation = generation
        self._dispatch = dispatch
        self._root = root.resolve()
        self._updating = asyncio.Lock()

    async def pause(self, http: Request) -> Response:
        """Serve /pause: hold new requests, and answer once no request runs."""
        _require_no_body(http)
        for name in http.query_params:
            if name not in OF_PAUSE:
                raise ApiError(400, f"unknown query parameter {name}", param=name)
        mode = http.query_params.get("mode", "abort")
        if mode not in OF_PAUSE["mode"]["enum"]:
            raise ApiError(400, f"mode must be abort or wait, got {mode!r}", param="mode")
        http.state.permit.release()  # /resume needs it
        await self._dispatch.pause(aborts=mode == "abort")
        return JSONResponse({"status": "paused"})

    async def resume(self, http: Request) -> Response:
        """Serve /resume: run the requests that wait."""
        _require_no_body(http)
        if self._updating.locked():
            raise ApiError(400, "weights are being updated; resume after that", code="busy")
        self._dispatch.resume()
        return JSONResponse({"status": "resumed"})

    def state(self) -> Response:
        """Return whether the server is paused."""
        return JSONResponse({"is_paused": self._dispatch.is_paused})

    async def update(self, http: Request) -> Response:
        """Serve /update_weights: load another model's weights in place of the present ones."""
        request = await self._generation.read(http, UpdateRequest)
        if self._updating.locked():
            raise ApiError(400, "weights are being updated already", code="busy")
        # The update goes on if its client leaves, since the server must have one engine.
        answer: dict[str, Any] = await asyncio.shield(self._updated(request.update_info.path))
        return JSONResponse(answer)

    async def _updated(self, path: str) -> dict[str, Any]:
        async with self._updating:
            try:
                directory = await asyncio.to_thread(self._directory, path)
                capabilities = self._dispatch.capabilities
                settings = {"model": str(directory), "served_model_name": capabilities.model_name}
                await self._dispatch.update(settings)
            except ValueError as error:
                raise bad_value(error, UpdateRequest, "update_info.path") from None
        contract = self._generation.contract["digest"]
        return {"contract": contract, "system_fingerprint": self._generation.fingerprint}

    def _directory(self, path: str) -> Path:
        """Return the directory of a model.

        Raises:
            ValueError: it is not below the root, or its tokenizer is another one.
        """
        try:
            directory = (self._root / path).resolve()
        except (OSError, ValueError, RuntimeError) as error:  # a NUL byte, or a loop of links
            raise ValueError(f"path must name a directory: {error}") from None
        if not directory.is_relative_to(self._root):
            raise ValueError("path must be below the directory of --weight-update-dir")
        if not directory.is_dir():
            raise ValueError(f"path must name a directory with a model, got {path}")
        served = Path(self._dispatch.capabilities.model_dir) / "tokenizer.json"
        own = directory / "tokenizer.json"
        if not (own.is_file() and served.is_file()) or not filecmp.cmp(own, served, shallow=False):
            raise ValueError("path must have the tokenizer.json of the served model")
        return directory


def _require_no_body(http: Request) -> None:
    """Refuse a body, which would have no effect, and requests of web pages.

    A browser lets any page send a request without a body, but names the page's origin.

    Raises:
        ApiError: the request has a body or an origin.
    """
    if "origin" in http.headers:
        raise ApiError(403, "web pages may not pause or resume the server")
    if int(http.headers.get("content-length", 0)) or "transfer-encoding" in http.headers:
        path = http.url.path
        raise ApiError(
            400, f"{path} has no body; mode is a query parameter, as in /pause?mode=wait"
        )
