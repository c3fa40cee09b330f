"""Who gets in: the checks that every request passes before its body is read (ASGI middleware).

The host must be one of those that the server is known by, so that no page can reach it under a name of its own (DNS
rebinding); a page of another origin is refused; a body is JSON, which a form of another page cannot send, and has a
bound; and where there are API keys, one of them is needed.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from transformer_xl.apps.serve.answers import error_answer
from transformer_xl.apps.serve.metrics import Metrics
from transformer_xl.apps.serve.page_files import PAGE_PREFIX
from transformer_xl.apps.serve.protocol import ApiError

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")
_OPEN_PATHS = ("/", "/health")  # need no key: they say nothing about models or sessions
_MAX_BODY_BYTES = 2**23  # of a JSON body
_BODY_SECONDS = 30  # within which a body must have arrived
_DRAINED_BYTES = 2**26  # that are read and dropped of a body before an error is answered
_DRAIN_SECONDS = 1.0  # for which it waits for each part
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:]+)(:\d*)?")  # a name or an address, and a port


@dataclass(frozen=True)
class GuardSettings:
    """What the checks compare with."""

    hosts: Collection[str] = LOOPBACK_HOSTS
    """Names in the header Host, without a port."""
    keys: Sequence[str] = ()
    """API keys; empty: none is needed."""
    max_import_bytes: int = 2**23
    """Bound of the file of a session."""


def owner_of(key: str) -> str:
    """Return the name under which the sessions of an API key are kept; the key cannot be read from it."""
    return hashlib.sha256(f"transformer_xl session owner {key}".encode()).hexdigest()


class Guard:
    """Checks each request, and answers those that it refuses."""

    def __init__(self, app: ASGIApp, settings: GuardSettings, metrics: Metrics) -> None:
        """Guard an application; `metrics` counts the answers."""
        self._app, self._settings, self._metrics = app, settings, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        body = _Body(receive)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                if message["status"] >= 400 and not Headers(scope=scope).get("expect"):
                    await body.drain()
                # the path as it is declared, since ids in paths would be counted apart
                self._metrics.responses[getattr(scope.get("route"), "path", "other"), message["status"]] += 1
            await send(message)

        if scope["method"] == "HEAD":  # uvicorn leaves out the body
            scope = {**scope, "method": "GET"}
        try:
            headers = Headers(scope=scope)  # h11 refuses a second Host, and a Content-Length that is no number
            if "transfer-encoding" in headers and "content-length" in headers:  # proxies may take either
                message = "a request has either Content-Length or Transfer-Encoding"
                raise ApiError(400, message, headers={"connection": "close"})
            self._check_host(headers)
            scope.setdefault("state", {})["owner"] = self._owner(scope, headers)
            received = await self._checked_body(scope, headers, body)
        except ApiError as error:
            await error_answer(error)(scope, body.receive, counted)
            return
        with ExitStack() as scope["state"]["at_end"]:
            await self._app(scope, received, counted)

    def _check_host(self, headers: Headers) -> None:
        host = headers.get("host", "").lower()
        match = _HOST.fullmatch(host)
        if match is None or match[1] not in self._settings.hosts:
            raise ApiError(403, "this server is not known by that name; --allowed-host NAME allows one", code="host")
        origin = headers.get("origin")
        if origin is not None and origin.lower().partition("://")[2] != host:
            raise ApiError(403, "requests of pages from other origins are refused", code="origin")

    def _owner(self, scope: Scope, headers: Headers) -> str:
        """Return whose request it is.

        Raises:
            ApiError: a key is needed, and the request has none or a wrong one.
        """
        keys, path = self._settings.keys, scope["path"]
        if not keys:
            return owner_of("")
        is_open = path in _OPEN_PATHS or path.startswith(PAGE_PREFIX)
        scheme, _, given = headers.get("authorization", "").partition(" ")
        found = None
        for key in keys:  # all are compared, each in constant time
            if hmac.compare_digest(key.encode(), given.strip().encode("utf-8", "replace")):
                found = key
        if found is not None and scheme.lower() == "bearer":
            return owner_of(found)
        if is_open:
            return ""
        message = "an API key is needed: Authorization: Bearer KEY" if not given else "this API key is not known"
        raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    async def _checked_body(self, scope: Scope, headers: Headers, incoming: _Body) -> Receive:
        """Read the body, within its bounds; return what the application receives in place of it.

        The file of a session is left to the application, which reads no more of it than it must.
        """
        if scope["method"] not in ("POST", "PUT", "PATCH", "DELETE"):
            return incoming.receive
        is_import = scope["path"] == "/v1/sessions/import"
        limit = self._settings.max_import_bytes if is_import else _MAX_BODY_BYTES
        incoming.limit = limit
        if int(headers.get("content-length", 0)) > limit:
            raise incoming.too_large()
        if is_import:
            _check_type(headers, "application/octet-stream")
            return incoming.receive
        body = b""
        with suppress(ClientDisconnect):  # the application then answers what nobody reads
            body = await Request(scope, incoming.receive).body()
        if body or scope["method"] != "DELETE":
            _check_type(headers, "application/json")
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replayed() -> Message:
            return messages.pop() if messages else await incoming.receive()

        return replayed


def _check_type(headers: Headers, wanted: str) -> None:
    # a form of another page can send a body of other types, but not of these
    if headers.get("content-type", "").partition(";")[0].strip().lower() != wanted:
        raise ApiError(415, f"the header content-type must be {wanted}")


class _Body:
    """What arrives of a body, which has bounds in bytes and seconds, and then what comes."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self._size, self._is_whole = receive, 0, False
        self._end = asyncio.get_running_loop().time() + _BODY_SECONDS
        self.limit = _MAX_BODY_BYTES

    def too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self.limit:,} bytes")

    async def receive(self) -> Message:
        """Return the next message.

        Raises:
            ApiError: the body is beyond a bound.
        """
        if self._is_whole:
            return await self._receive()
        try:
            message = await self._next(self._end)
        except TimeoutError:
            text = f"the body did not arrive within {_BODY_SECONDS} seconds"
            raise ApiError(408, text, headers={"connection": "close"}) from None
        if self._size > self.limit:
            raise self.too_large()
        return message

    async def drain(self) -> None:
        """Drop what still arrives: a client that is sending when its connection is closed would lose the answer."""
        limit, loop = self._size + _DRAINED_BYTES, asyncio.get_running_loop()
        with suppress(TimeoutError):
            while not self._is_whole and self._size < limit:
                await self._next(min(self._end, loop.time() + _DRAIN_SECONDS))

    async def _next(self, end: float) -> Message:
        async with asyncio.timeout_at(end):
            message = await self._receive()
        self._size += len(message.get("body", b""))
        self._is_whole = not message.get("more_body")
        return message
