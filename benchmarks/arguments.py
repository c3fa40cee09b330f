"""Parsers of the benchmarks' command-line arguments; argparse says what is wrong and ends with status 2."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Collection
from typing import TypeVar

T = TypeVar("T")


def positive(text: str) -> int:
    """Parse a command-line argument that is an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer of at least 1")
    return int(text)


def above_zero(text: str) -> float:
    """Parse a command-line argument that is a number above 0, such as a time in seconds."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return number


def natural(text: str) -> int:
    """Parse a command-line argument that is an integer of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no integer of at least 0")
    return int(text)


def one_of(names: Collection[str]) -> Callable[[str], str]:
    """Return a parser of command-line arguments that are one of some names."""

    def parsed(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
        return text

    return parsed


def listed(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return a parser of command-line arguments that are values with commas, each of which `parse` reads."""
    return lambda text: [parse(word) for word in text.split(",")]
