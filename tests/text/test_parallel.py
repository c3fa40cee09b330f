"""Tests of `ordered_map`: results, errors and memory use as in one process, and no process is left running."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from transformer_xl.config import UserError
from transformer_xl.text.parallel import MAX_SERIAL_ITEMS, ordered_map
from transformer_xl.text.tokenizers.base import EncodingError


def square(item: int) -> tuple[int, int]:
    """The square, and the id of the process that computed it; 7 raises an error, and 11 kills the process."""
    if item == 7:
        raise EncodingError(item, "seven")
    if item == 11:
        os.kill(os.getpid(), signal.SIGKILL)
    return item * item, os.getpid()


def recorded_items(items: list[int], stop: int) -> Iterator[int]:
    """Yield 0 to 4 over and over, `stop` items in all, and append the number of each yielded item to `items`."""
    for number in range(stop):
        items.append(number)
        yield number % 5


def has_ended(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


def test_several_processes_keep_the_order_with_few_items_in_flight_until_closed() -> None:
    items: list[int] = []
    results = ordered_map(square, recorded_items(items, stop=10**9), workers=2)
    processes = set()
    for number, (result, process) in enumerate(results):
        assert result == (number % 5) ** 2
        assert number < len(items) <= number + 4  # at most 2 x workers items are in flight
        processes.add(process)
        if number > 97 and len(processes) == 2:  # the second may start late
            break
    assert os.getpid() not in processes
    results.close()
    assert all(has_ended(process) for process in processes)
    assert multiprocessing.active_children() == []


def test_error_of_a_worker_is_raised_unchanged_after_the_results_before_it() -> None:
    results = ordered_map(square, range(8), workers=2)
    assert [next(results)[0] for _ in range(7)] == [0, 1, 4, 9, 16, 25, 36]
    with pytest.raises(EncodingError, match="seven") as caught:
        next(results)
    assert (caught.value.position, caught.value.reason) == (7, "seven")
    assert multiprocessing.active_children() == []


def test_killed_worker_raises_a_user_error() -> None:
    with pytest.raises(UserError, match=r"worker process was killed.* smaller num_workers"):
        list(ordered_map(square, [1, 11, 2, 3, 4, 5], workers=2))
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(("num_items", "workers"), [(MAX_SERIAL_ITEMS, 5), (97, 1)])
def test_few_items_or_one_worker_start_no_process(num_items: int, workers: int) -> None:
    items: list[int] = []
    results = ordered_map(square, recorded_items(items, stop=num_items), workers=workers)
    assert next(results) == (0, os.getpid())
    assert len(items) == (1 if workers == 1 else MAX_SERIAL_ITEMS)
    assert list(results) == [((number % 5) ** 2, os.getpid()) for number in range(1, num_items)]


PROGRAM = """if True:
    import itertools, multiprocessing, os, signal
    from transformer_xl.text.parallel import ordered_map
    for number, result in enumerate(ordered_map(abs, itertools.count(), workers=2)):
        if number == 17:
            print(len(multiprocessing.active_children()), flush=True)
            {end}
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.killpg(os.getpgrp(), signal.SIGINT)", -signal.SIGINT),  # Ctrl-C reaches the whole process group
    ],
)
def test_workers_end_with_the_process_however_it_ends(end: str, status: int) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROGRAM.format(end=end)]
    # run() returns only after the workers, too, have closed the output pipe, which they share with the process
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, start_new_session=True, timeout=300
    )
    assert ended.returncode == status
    assert ended.stdout == "2\n"  # the workers that were running
    # KeyboardInterrupt has a traceback in the process, and none in its workers.
    assert ended.stderr.count("Traceback") == (status == -signal.SIGINT)
