"""The server as a process: its settings, the socket, and how it stops.

    serve([Path("runs/mine")], ServerConfig(port=8000))

SIGTERM or Ctrl-C: no new connections are accepted, requests that run are finished within `shutdown_seconds` or else
answered with an error, and what a session's last completed request left is already saved. If the thread that runs the
models dies, the server ends.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Literal

import uvicorn
from typing_extensions import override

from transformer_xl.apps.serve.app import build_app
from transformer_xl.apps.serve.config import ServerConfig
from transformer_xl.apps.serve.connections import IDLE_SECONDS, BoundedProtocol
from transformer_xl.apps.serve.engine import Engine
from transformer_xl.apps.serve.guard import LOOPBACK_HOSTS, Guard, GuardSettings
from transformer_xl.apps.serve.requests import RequestRunner
from transformer_xl.apps.serve.served_model import ServedModel
from transformer_xl.config import UserError
from transformer_xl.files import as_user_error, lock_folder, read_bytes
from transformer_xl.progress import note, say
from transformer_xl.run import load

KEY_VARIABLE = "TXL_API_KEY"
_MIN_KEY_CHARACTERS = 16
_LOOPBACK_ADDRESSES = ("127.0.0.1", "::1", "localhost")
_ANSWER_SECONDS = 5  # to send what requests get that are not finished in time


def serve(
    runs: Sequence[Path],
    config: ServerConfig | None = None,
    *,
    device: str = "auto",
    checkpoint: Literal["best", "last"] = "best",
) -> int:
    """Serve runs over HTTP until SIGTERM or Ctrl-C.

    Args:
        runs: folders of runs; the name of each folder is the name of its model.
        config: settings of the server.
        device: auto, cuda, mps or cpu.
        checkpoint: the weights with the lowest validation loss (best), or those of the newest checkpoint (last).

    Returns:
        the exit status: 1 if the thread that runs the models has died.

    Raises:
        UserError: a run cannot be loaded, two have the same name, a setting is out of range, or the port or the folder
            of sessions is taken.
    """
    config = config or ServerConfig()
    names = [Path(os.path.abspath(run)).name for run in runs]
    if double := next((name for index, name in enumerate(names) if name in names[:index]), None):
        raise UserError(f"two runs have the name {double}, by which requests choose one; rename a folder")
    guard, listener = guard_settings(config), _listen(config)

    def loaded_runner() -> RequestRunner:
        loaded = (load(run, device=device, checkpoint=checkpoint) for run in runs)
        return RequestRunner([ServedModel(*pair, config) for pair in zip(names, loaded, strict=True)], config)

    with ExitStack() as stack:
        stack.enter_context(listener)
        if config.sessions is not None:
            stack.enter_context(_locked_sessions(Path(config.sessions)))
        # A thread that computes in parallel keeps its OpenMP threads until it ends. While there are more of them than
        # cores, all of them sleep between two operators, and a step takes up to twice the time.
        with ThreadPoolExecutor(1) as executor:
            runner = executor.submit(loaded_runner).result()
        gc.collect()
        gc.freeze()  # modules and models stay, so no collection need look at them again, for which all texts would wait
        return run_server(runner, guard, config, listener)


def _locked_sessions(folder: Path) -> AbstractContextManager[object]:
    """Return a lock of the folder of sessions, which is made if needed: two servers would delete each other's files."""
    with as_user_error(f"--sessions {folder}"):
        folder.mkdir(0o700, parents=True, exist_ok=True)
    return lock_folder(folder)


def guarded_app(runner: RequestRunner, guard: GuardSettings) -> Guard:
    """Return the application with the checks before it."""
    guard = replace(guard, max_import_bytes=runner.sessions.max_file_bytes)
    return Guard(build_app(runner), guard, runner.metrics)


def uvicorn_settings(app: Guard, config: ServerConfig) -> uvicorn.Config:
    """Return how uvicorn serves the application; the number of connections is bounded in `connections.py` alone."""
    return uvicorn.Config(
        app,
        http=BoundedProtocol,
        log_level="error",  # its warnings are a line for each malformed request
        access_log=False,
        server_header=False,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=config.shutdown_seconds + _ANSWER_SECONDS,
        h11_max_incomplete_event_size=2**16,
    )


def run_server(runner: RequestRunner, guard: GuardSettings, config: ServerConfig, listener: socket.socket) -> int:
    """Answer requests on a socket until a signal, or until the thread that runs the models dies."""
    server = _Server(uvicorn_settings(guarded_app(runner, guard), config), runner.engine, config.shutdown_seconds)

    def on_death() -> None:
        server.should_exit = True

    runner.engine.on_death = on_death
    runner.engine.start()
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    say(f"serving {', '.join(runner.engine.models)} on http://{shown}:{port} (Ctrl-C stops)")
    try:
        server.run(sockets=[listener])
    finally:
        runner.engine.stop()
    if runner.engine.error is not None:
        note("the thread that runs the models has died; its traceback is above")
        return 1
    return 0


class _Server(uvicorn.Server):
    """Lets requests that do not finish in time fail with a clear answer, before uvicorn would cut their connections."""

    def __init__(self, settings: uvicorn.Config, engine: Engine, seconds: int) -> None:
        super().__init__(settings)
        self._engine, self._seconds = engine, seconds

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(self._seconds, lambda: self._engine.stop(wait=False))
        await super().shutdown(sockets)
        timer.cancel()


def guard_settings(config: ServerConfig) -> GuardSettings:
    """Return who gets in.

    Raises:
        UserError: the file of keys cannot be read, a key is too short, or other computers could connect without a key.
    """
    keys: list[str] = []
    if config.api_key_file is not None:
        content = read_bytes(Path(config.api_key_file)).decode("utf-8", "replace")
        keys = [line.strip() for line in content.splitlines() if line.strip()]
        if Path(config.api_key_file).stat().st_mode & stat.S_IROTH:
            note(f"--api-key-file {config.api_key_file} can be read by every user of this machine; chmod o-r it")
        if not keys:
            raise UserError(f"--api-key-file {config.api_key_file} has no key; write one in each line")
    elif os.environ.get(KEY_VARIABLE):
        keys = [os.environ[KEY_VARIABLE].strip()]  # secrets that were written by echo end in a newline
    if any(len(key) < _MIN_KEY_CHARACTERS or not key.isascii() for key in keys):
        raise UserError(f"an API key must have at least {_MIN_KEY_CHARACTERS} ASCII characters; choose another")
    if not keys and config.host not in _LOOPBACK_ADDRESSES:
        raise UserError(
            f"--host {config.host} lets other computers connect, which needs an API key: give --api-key-file, or set "
            f"{KEY_VARIABLE}"
        )
    hosts = {*LOOPBACK_HOSTS, *(name.lower() for name in config.allowed_host)}
    if config.host not in ("0.0.0.0", "::"):
        hosts.add(f"[{config.host}]" if ":" in config.host else config.host.lower())
    return GuardSettings(hosts, keys)


def _listen(config: ServerConfig) -> socket.socket:
    """Return a socket that listens; taken before the runs are loaded, so that a port in use is said at once."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family, backlog=2048)
        # of its connections too: else the second part of an answer waits 40 ms for the client to confirm the first
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"cannot listen on {config.host} port {config.port}: {reason}; choose another --port") from None
