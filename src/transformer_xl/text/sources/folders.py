"""Which files a folder or a pattern means: sorted by path, nothing hidden or empty, no link to a folder followed."""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from transformer_xl.files import as_user_error

_ANY = ("**", "*")


def walk(folder: Path, parts: Sequence[str] = _ANY, skip: frozenset[str] = frozenset()) -> list[Path]:
    """The files in a folder that hold anything and whose path below it fits, sorted by path.

    Nothing hidden is found unless a part itself begins with a dot, and no link to a folder is followed.

    Args:
        folder: where to begin; may itself be a link.
        parts: patterns of the folders' names, then of the file's; `**` stands for any number of folders.
        skip: names of folders that are left out.

    Raises:
        UserError: a folder or file cannot be read.
    """
    # Not by glob, which follows links to folders, round in circles too.
    with as_user_error(f"reading {folder}"):
        if not folder.is_dir():
            return []
    if parts[-1] == "**":
        parts = (*parts, "*")
    return sorted(_fitting(folder, parts, skip), key=lambda path: path.relative_to(folder).as_posix())


def matches(pattern: str) -> list[Path]:
    """The files that fit a pattern, as `walk` has it; links in front of its first wildcard are followed."""
    parts = Path(pattern).parts
    fixed = next(place for place, part in enumerate(parts) if glob.has_magic(part))
    return walk(Path(*parts[:fixed]), parts[fixed:])


def _fitting(folder: Path, parts: Sequence[str], skip: frozenset[str]) -> Iterator[Path]:
    left = [(folder, frozenset({0}))]  # with the places in `parts` from which a path must go on there
    while left:
        inside, places = left.pop()
        with as_user_error(f"reading {inside}"), os.scandir(inside) as entries:
            found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for name, is_folder in found:
            after = _after(name, parts, places)
            path = inside / name
            if is_folder:
                further = after - {len(parts)}
                if further and name not in skip:
                    left.append((path, further))
            elif len(parts) in after:
                with as_user_error(f"reading {path}"):
                    holds = path.is_file() and path.stat().st_size > 0
                if holds:
                    yield path


def _after(name: str, parts: Sequence[str], places: frozenset[int]) -> frozenset[int]:
    """Where in `parts` one may be behind this name."""
    after: set[int] = set()
    for place in places:
        while parts[place] == "**":  # no folder at all, or one more
            if not name.startswith("."):
                after.add(place)
            place += 1
        if fnmatch.fnmatch(name, parts[place]) and (parts[place].startswith(".") or not name.startswith(".")):
            after.add(place + 1)
    return frozenset(after)
