"""Lists the files of a folder or glob pattern that `prepare` reads: not hidden, not empty, selected, and sorted."""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from transformer_xl.files import as_user_error


def list_files(folder: Path, pattern: Sequence[str] = ("**", "*"), skip: frozenset[str] = frozenset()) -> list[Path]:
    """List the non-empty files of a folder whose relative path matches the pattern, sorted by path.

    Hidden files and folders are skipped unless a part of the pattern begins with a dot. Symbolic links to folders are
    not followed. `glob` and `Path.glob` follow some links and ignore unreadable folders, so they are not used.

    Args:
        folder: root of the search; may itself be a link.
        pattern: the parts of the path, as in a glob pattern; `**` matches any number of folders.
        skip: names of folders to skip.

    Raises:
        UserError: a folder or file cannot be read.
    """
    if pattern[-1] == "**":
        pattern = (*pattern, "*")
    matches: list[Path] = []
    for current, folders, files in os.walk(folder, onerror=_raise_user_error):
        parents = Path(current).relative_to(folder).parts
        folders[:] = [name for name in folders if name not in skip and _matches((*parents, name), pattern, prefix=True)]
        matches += [Path(current, file) for file in files if _matches((*parents, file), pattern)]
    with as_user_error(f"reading {folder}"):
        non_empty = [path for path in matches if path.is_file() and path.stat().st_size]
    return sorted(non_empty, key=lambda path: path.relative_to(folder).as_posix())


def glob_files(pattern: str) -> list[Path]:
    """List the files that match a pattern, as `list_files` does; links before its first wildcard are followed."""
    folder = pattern_root(pattern)
    with as_user_error(f"reading {folder}"):
        parts = Path(pattern).parts[len(folder.parts) :]
        return list_files(folder, parts) if parts and folder.is_dir() else []


def pattern_root(pattern: str) -> Path:
    """Return the folder before the first wildcard of a pattern."""
    return Path(*takewhile(lambda part: not glob.has_magic(part), Path(pattern).parts))


def matches(file: Path, folder: Path, pattern: str) -> bool:
    """Return whether a file of a folder, or a folder on the way to it, matches a pattern.

    A pattern without / is compared with each name in the file's path from the folder on; one with / with that path and
    with the path as it was given and from the root, and with those of the folders in them.
    """
    names = file.relative_to(folder).parts
    paths = [(name,) for name in names]
    if "/" in pattern:
        paths = [
            parts[:length]
            for parts in (names, file.parts, file.absolute().parts)
            for length in range(1, len(parts) + 1)
        ]
    return any(_matches(path, Path(pattern).parts) for path in paths)


def _raise_user_error(error: OSError) -> None:
    with as_user_error(f"reading {error.filename}"):
        raise error


def _matches(path: Sequence[str], pattern: Sequence[str], *, prefix: bool = False) -> bool:
    """Return whether a path matches, or, if `prefix`, whether some path in this folder can match."""
    if not path or not pattern:
        return not path and bool(pattern) == prefix
    visible = not path[0].startswith(".")
    if pattern[0] == "**":
        return _matches(path, pattern[1:], prefix=prefix) or (visible and _matches(path[1:], pattern, prefix=prefix))
    part_matches = fnmatch.fnmatch(path[0], pattern[0]) and (visible or pattern[0].startswith("."))
    return part_matches and _matches(path[1:], pattern[1:], prefix=prefix)
