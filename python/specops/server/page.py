# SPDX-License-Identifier: Apache-2.0
"""The web pages `/` and `/docs`: files in the package, and the headers that restrict browsers."""

from pathlib import Path

from fastapi import FastAPI, Response

_FOLDER = Path(__file__).parent / "playground"
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    # Content security policy: only files of the page, no inline code and no other host. Trusted
    # Types enforces that model output is shown as text, never as markup.
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; "
    "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_METRICS = b' <a href="metrics">Metrics</a>'


def add_page(app: FastAPI, *, has_metrics: bool) -> None:
    """Add the pages to an application, and their files below `/page/`.

    Args:
        app: the application.
        has_metrics: whether the application serves /metrics; otherwise the page has no link to it,
            because metrics on another port may be closed to the page's readers.
    """
    for path in sorted(_FOLDER.iterdir()):
        if path.suffix in _TYPES:
            # Browsers ask for /favicon.ico beside answers that are no page, such as /metrics.
            own = {"index.html": "/", "docs.html": "/docs", "favicon.svg": "/favicon.ico"}
            route = own.get(path.name, f"/page/{path.name}")
            _add_file(app, route, path, without=None if has_metrics else _METRICS)


def _add_file(app: FastAPI, route: str, path: Path, *, without: bytes | None) -> None:
    @app.api_route(route, methods=["GET", "HEAD"], include_in_schema=False)
    async def file() -> Response:
        text = path.read_bytes()
        if without is not None:
            text = text.replace(without, b"")
        return Response(text, headers=_HEADERS, media_type=_TYPES[path.suffix])
