"""The map over processes: order, errors and memory as without processes, and none left over."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from transformer_xl.config import UserError
from transformer_xl.text.parallel import FEW, ordered_map
from transformer_xl.text.tokenizers import EncodingError


def square_of(item: int) -> tuple[int, int]:
    if item == 7:
        raise EncodingError(item, "seven")
    if item == 11:
        os.kill(os.getpid(), signal.SIGKILL)
    return item * item, os.getpid()


def counting(drawn: list[int], until: int) -> Iterator[int]:
    for item in range(until):
        drawn.append(item)
        yield item % 5


def gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


def test_order_bound_and_end_of_several_processes() -> None:
    """In one test, for starting processes takes long."""
    drawn: list[int] = []
    results = ordered_map(square_of, counting(drawn, 10**9), workers=2)
    processes = set()
    for number, (square, process) in enumerate(results):
        assert square == (number % 5) ** 2
        assert number < len(drawn) <= number + 4
        processes.add(process)
        if number > 97 and len(processes) == 2:  # the second may start late
            break
    assert os.getpid() not in processes
    results.close()
    assert all(gone(process) for process in processes)
    assert multiprocessing.active_children() == []


def test_errors_of_workers_come_back_as_themselves_in_their_place() -> None:
    results = ordered_map(square_of, range(8), workers=2)
    assert [next(results)[0] for _ in range(7)] == [0, 1, 4, 9, 16, 25, 36]
    with pytest.raises(EncodingError, match="seven") as caught:
        next(results)
    assert (caught.value.position, caught.value.reason) == (7, "seven")
    assert "square_of" in str(caught.value.__cause__)  # where it was raised
    assert multiprocessing.active_children() == []


def test_a_killed_worker_is_told_of() -> None:
    with pytest.raises(UserError, match=r"worker process was killed.* fewer --num-workers"):
        list(ordered_map(square_of, [1, 11, 2, 3, 4, 5], workers=2))
    assert multiprocessing.active_children() == []


def test_errors_of_the_items_come_through() -> None:
    def broken() -> Iterator[int]:
        yield from range(6)
        raise UserError("no more items")

    with pytest.raises(UserError, match="no more items"):
        list(ordered_map(square_of, broken(), workers=2))
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(("items", "workers"), [(FEW, 5), (97, 1)])
def test_little_work_and_one_worker_stay_in_this_process(items: int, workers: int) -> None:
    drawn: list[int] = []
    results = ordered_map(square_of, counting(drawn, items), workers=workers)
    assert next(results) == (0, os.getpid())
    assert len(drawn) == (1 if workers == 1 else FEW)
    assert list(results) == [((item % 5) ** 2, os.getpid()) for item in range(1, items)]
    assert list(ordered_map(square_of, [], workers=workers)) == []


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
        ("os.killpg(os.getpgrp(), signal.SIGINT)", -signal.SIGINT),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    ],
)
def test_workers_do_not_outlive_the_process(end: str, status: int) -> None:
    """However it ends: killed, by Ctrl-C (which reaches its whole group), or asked to."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", PROGRAM.format(end=end)]
    # ends only once the workers, too, have closed the output that they share
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, start_new_session=True, timeout=300)
    assert ended.returncode == status
    assert ended.stdout == "2\n"
    assert ended.stderr.count("Traceback") == (status == -signal.SIGINT)
