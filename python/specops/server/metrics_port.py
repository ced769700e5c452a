# SPDX-License-Identifier: Apache-2.0
"""Metrics on a separate port, which may be closed to the model's clients.

The port has its own thread and event loop, so that scrapes and answers do not wait for each other.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import uvicorn
from fastapi import FastAPI, Response
from fastapi.responses import PlainTextResponse

from specops.server.connections import bounded_protocol
from specops.server.hosts import AllowedHosts
from specops.server.metrics import Metrics

_MAX_CONNECTIONS = 64
_HEADER_TIMEOUT = 20.0
_WRITE_TIMEOUT = 20.0
_DRAIN_SECONDS = 1
_END_SECONDS = 3.0  # time that the thread may take to end


def add_metrics(app: FastAPI, metrics: Metrics) -> None:
    """Add the route /metrics."""

    @app.api_route("/metrics", methods=["GET", "HEAD"], response_class=PlainTextResponse)
    async def prometheus() -> Response:
        """Return metrics in Prometheus' text format."""
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


@contextlib.contextmanager
def metrics_served(
    metrics: Metrics,
    listener: socket.socket,
    allowed_hosts: Sequence[str] | None = None,
    tls: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[None]:
    """Serve /metrics, and nothing else, until the `with` block ends.

    Args:
        metrics: the metrics to serve.
        listener: socket from `listen`.
        allowed_hosts: host names that requests may use; None allows any.
        tls: uvicorn's options that begin with ssl_; empty serves HTTP without encryption.
    """
    app = FastAPI(openapi_url=None)
    add_metrics(app, metrics)
    if allowed_hosts is not None:
        app.add_middleware(AllowedHosts, hosts=allowed_hosts)
    config = uvicorn.Config(
        app,
        http=bounded_protocol(
            max_connections=_MAX_CONNECTIONS,
            header_timeout=_HEADER_TIMEOUT,
            write_timeout=_WRITE_TIMEOUT,
        ),
        loop="uvloop",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=_DRAIN_SECONDS,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        ws="none",
        **tls,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(
        target=server.run, args=([listener],), name="specops-metrics", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(_END_SECONDS)
