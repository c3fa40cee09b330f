"""Applies a function to many items in worker processes, in order, holding only a few items at a time."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import chain, islice
from multiprocessing import get_context, parent_process, resource_tracker
from typing import Any, TypeVar

from transformer_xl.config import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_SERIAL_ITEMS = 3
"""Up to this many items are processed without workers, since starting workers takes half a second."""


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], *, workers: int
) -> Generator[Result, None, None]:
    """Yield the results of `function` for each item, in the order of the items.

    No process is started if `workers` is 1 or there are at most `MAX_SERIAL_ITEMS` items. At most 2 x `workers` items
    are in flight: taken from `items`, but without a yielded result. Closing the generator stops each worker after its
    current item.

    Args:
        function: applied to each item; pickled once for each worker, and items and results are pickled too.
        items: the items; may be infinite.
        workers: number of processes, at least 1.

    Raises:
        UserError: a worker process was killed.
        Exception: whatever `function` raised for an item.
    """
    assert workers >= 1
    remaining = iter(items)
    first_items = list(islice(remaining, MAX_SERIAL_ITEMS + 1)) if workers > 1 else []
    if len(first_items) <= MAX_SERIAL_ITEMS:
        yield from map(function, chain(first_items, remaining))
        return
    # Spawn instead of fork, which would copy locks that other threads hold.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (function,))
    pending: deque[Future[Result]] = deque()
    try:
        for item in chain(first_items, remaining):
            with _sigint_blocked():
                pending.append(pool.submit(_call, item))
            if len(pending) == 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            "a worker process was killed, perhaps because memory ran out; try again with a smaller num_workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_function: Callable[[Any], Any]
"""The function of a worker process, set when the worker starts."""


def _start_worker(function: Callable[[Any], Any]) -> None:
    """Store the function, and exit when the parent does: a killed parent cannot stop its workers."""
    global _function
    _function = function
    parent = parent_process()
    assert parent is not None

    def exit_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


def _call(item: Any) -> Any:
    return _function(item)


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Make processes started in this block ignore Ctrl-C, which a terminal sends to all; the parent stops them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # otherwise the first worker starts it, which unblocks SIGINT
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
