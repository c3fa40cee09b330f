"""Connections of the server: those on which nothing happens are closed, so that they keep nobody else out.

A connection is idle from its beginning, or from the end of an answer, until the headers of a request are there. It may
be idle for `IDLE_SECONDS`; and when there are as many connections as the process may have, the one that has been idle,
or has waited for the rest of a request, for longest makes room for a new one. A client that reads nothing of its answer
for `SEND_SECONDS` is left.
"""

from __future__ import annotations

import asyncio

from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

IDLE_SECONDS = 30
SEND_SECONDS = 60
_MAX_CONNECTIONS = 4096


def max_connections() -> int:
    """Return the number of connections at once: three quarters of the files that the process may have open."""
    try:
        import resource
    except ImportError:  # Windows
        return 512
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_CONNECTIONS if limit == resource.RLIM_INFINITY else min(_MAX_CONNECTIONS, max(8, limit * 3 // 4))


class BoundedProtocol(H11Protocol):
    """A connection that ends when it is idle, or when nothing of an answer is read, for too long."""

    _idle: asyncio.TimerHandle | None = None
    _sending: asyncio.TimerHandle | None = None
    _since = 0.0  # when it became idle, or the headers of its request were there

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._watch()
        if len(self.connections) > max_connections():
            waiting = [one for one in self.connections if isinstance(one, BoundedProtocol) and one._waits_for_client]
            min(waiting, key=lambda one: one._since).transport.abort()

    @override
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._check_sending()

    @override
    def resume_writing(self) -> None:
        super().resume_writing()
        if self._sending is not None:
            self._sending.cancel()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._idle, self._sending):
            if timer is not None:
                timer.cancel()

    @property
    def _waits_for_client(self) -> bool:
        return self._idle is not None or self.cycle.more_body

    def _watch(self) -> None:
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle != (self._idle is not None):
            self._since = self.loop.time()
        if is_idle and self._idle is None:
            self._idle = self.loop.call_later(IDLE_SECONDS, self._end_idle)
        elif not is_idle and self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _end_idle(self) -> None:
        if self.flow.write_paused:  # a long answer is still being read
            self.transport.close()
        else:
            self.transport.abort()

    def _check_sending(self, unsent: int | None = None) -> None:
        left = self.transport.get_write_buffer_size()
        if unsent is not None and left >= unsent:
            self.transport.abort()
        else:
            self._sending = self.loop.call_later(SEND_SECONDS, self._check_sending, left)
