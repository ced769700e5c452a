# SPDX-License-Identifier: Apache-2.0
"""The engine behind HTTP: an OpenAI-compatible API, metrics, and a page for the browser."""

from specops.server.app import listen, make_app, serve
from specops.server.hosts import Access, default_hosts

__all__ = ["Access", "default_hosts", "listen", "make_app", "serve"]
