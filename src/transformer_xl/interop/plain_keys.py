"""What may be a key of a dictionary that a pickle asks for: what a hostile file cannot make slow or deep to hash."""

from __future__ import annotations

from typing import Any

_LARGEST = 2**61 - 2  # above it, whole numbers share their hashes, and a dictionary of such takes hours


class Damaged(Exception):
    """Not a whole pickle, or not one that a checkpoint has."""


def check_key(key: object) -> None:
    """Lets only plain keys through: hashing a tuple goes as deep as the file likes, past the end of the C stack.

    Raises:
        Damaged: another key, or a very large number.
    """
    if not isinstance(key, str | bytes | int | float | None):
        raise Damaged
    if isinstance(key, int) and abs(key) > _LARGEST:
        raise Damaged


def dictionary_of(arguments: tuple[Any, ...]) -> dict[Any, Any]:
    """The dictionary that a call with a dictionary, a list of pairs, or nothing makes.

    Raises:
        Damaged: the call has something else, or a key that cannot be.
    """
    if not arguments:
        return {}
    (given,) = arguments
    if isinstance(given, dict):
        return dict(given)
    if not isinstance(given, (list, tuple)) or not all(isinstance(pair, (list, tuple)) for pair in given):
        raise Damaged
    for key, _ in given:
        check_key(key)
    return dict(given)
