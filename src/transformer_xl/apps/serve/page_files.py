"""The page of the server, at `/`: its files, with headers by which it can load nothing from elsewhere.

The page is static and needs no API key; it asks for one, and sends it with the requests that it makes.
"""

from __future__ import annotations

from importlib import resources

from fastapi import FastAPI, Response

PAGE_PREFIX = "/page/"
"""Beginning of the paths of the page's files, besides `/`."""

_TYPES = {"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
_FILES = (
    "index.html",
    "page.css",
    "page.js",
    "editor.js",
    "examples.js",
    "panels.js",
    "reading.js",
    "server.js",
    "work.js",
)
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Add the paths of the page to the application."""
    folder = resources.files("transformer_xl.apps.serve") / "page"
    for name in _FILES:
        content, kind = (folder / name).read_bytes(), _TYPES[name.rpartition(".")[2]]
        path = "/" if name == "index.html" else f"{PAGE_PREFIX}{name}"
        app.add_api_route(path, _answer(content, kind), methods=["GET"], include_in_schema=False)


def _answer(content: bytes, media_type: str):
    async def answer() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return answer
