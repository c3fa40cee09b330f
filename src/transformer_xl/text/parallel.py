"""A map over several processes that keeps the order and holds only a few items at a time.

Each worker process has a thread here that hands it one item after another and waits for the results, so that workers
stay busy while the results are being used. Workers are spawned, never forked: a fork copies locks that threads hold.
A worker ends when its pipe closes, and so does not outlive this process, however this process ends.
"""

from __future__ import annotations

import signal
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from transformer_xl.config import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")

FEW = 3
"""Items that are not worth the half second in which processes start."""


def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], *, workers: int
) -> Generator[Result, None, None]:
    """The results of `function` for each item, in the order of the items.

    With `workers` 1, or no more than `FEW` items, all is done in this process. No more than 2 x `workers` items are
    drawn whose results are not yet taken. Closing the generator ends the workers.

    Args:
        function: what to do; it is pickled once for each worker, as are items and results on their way.
        items: may be endless.
        workers: processes to use, at least 1.

    Raises:
        UserError: a worker was ended from outside.
        Exception: what `function` raised, as itself, in the place of the result.
    """
    assert workers >= 1
    rest = iter(items)
    first = list(islice(rest, FEW + 1)) if workers > 1 else []
    if len(first) <= FEW:
        yield from map(function, chain(first, rest))
        return
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(workers))
        idle: SimpleQueue[_Worker[Item, Result]] = SimpleQueue()
        with _interrupts_kept_out():
            for _ in range(workers):
                idle.put(stack.enter_context(_Worker(function)))
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        running: deque[Future[Result]] = deque()
        for item in chain(first, rest):
            running.append(threads.submit(_ask_one, idle, item))
            if len(running) == 2 * workers:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


class _Worker(Generic[Item, Result]):
    """A process that answers items with results, killed when its block ends: it holds nothing that could be lost."""

    def __init__(self, function: Callable[[Item], Result]) -> None:
        context = get_context("spawn")
        self._function: Callable[[Item], Result] | None = function
        self._pipe, far_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(far_end,), daemon=True)
        self._process.start()
        far_end.close()

    def __enter__(self) -> _Worker[Item, Result]:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()  # which wakes the thread that waits for a result
        self._process.join()

    def ask(self, item: Item) -> Result:
        try:
            if self._function is not None:
                self._pipe.send(self._function)
                self._function = None
            self._pipe.send(item)
            returned, value = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            raise UserError(
                f"a worker process was ended from outside (exit status {self._process.exitcode}; perhaps memory ran "
                "out); try again with fewer --workers"
            ) from None
        if not returned:
            raise value
        return value


def _ask_one(idle: SimpleQueue[_Worker[Item, Result]], item: Item) -> Result:
    worker = idle.get()  # there is one for each thread
    try:
        return worker.ask(item)
    finally:
        idle.put(worker)


def _serve(pipe: Connection[Any, Any]) -> None:
    """What a worker does all its life."""
    try:
        function = pipe.recv()
        while True:
            item = pipe.recv()
            try:
                answer = True, function(item)
            except Exception as error:
                error.add_note(f"In a worker process:\n{traceback.format_exc()}")
                answer = False, error
            pipe.send(answer)
    except (EOFError, OSError):
        pass  # nobody waits for an answer any more


@contextmanager
def _interrupts_kept_out() -> Iterator[None]:
    """Processes started in this block never see Ctrl-C, which reaches all of a terminal: they are ended from here."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # started with the first process otherwise, which lets interrupts in again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
