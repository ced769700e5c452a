# SPDX-License-Identifier: Apache-2.0
"""The HTTP server of an engine: an OpenAI-compatible API, metrics, and a web page."""

from specops.server.app import listen, make_app, serve
from specops.server.hosts import Access, default_hosts
from specops.server.sampling_defaults import sampling_defaults

__all__ = ["Access", "default_hosts", "listen", "make_app", "sampling_defaults", "serve"]
