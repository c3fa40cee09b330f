"""Files and folders that appear whole or not at all: written aside, flushed to disk, renamed into place."""

from __future__ import annotations

import errno
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from transformer_xl.config import UserError

_MEANINGS = {
    errno.ENOSPC: "no space left on the device; free some or choose another place",
    errno.EDQUOT: "disk quota used up; free some or choose another place",
    errno.EFBIG: "file too large for this place; choose another",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EROFS: "read-only file system; choose another place",
    errno.ENOENT: "no such file or folder",
    errno.EEXIST: "part of the path is a file, not a folder",
    errno.ENOTDIR: "part of the path is a file, not a folder",
    errno.EISDIR: "is a folder, wanted a file",
}


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turns what the operating system refuses into one clear line.

    Args:
        doing: what was being done, such as `writing runs/a`.

    Raises:
        UserError: in place of any OSError.
    """
    try:
        yield
    except OSError as error:
        meaning = _MEANINGS.get(error.errno or 0, error.strerror or str(error))
        raise UserError(f"{doing}: {meaning}") from error


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Gives a folder beside `path` to fill; it takes the place of `path` only when the block ends without an error.

    Raises:
        UserError: `path` exists, or the file system refuses (full, read-only, no permission); nothing is left behind.
    """
    with explained(f"writing {path}"):
        if path.exists():
            raise UserError(f"{path} exists already; choose another place or delete it first")
        new_parents = [parent for parent in path.parents if not parent.exists()]
        aside = path.parent / f".{path.name}.partial-{os.getpid()}"
        shutil.rmtree(aside, ignore_errors=True)
        _remove_abandoned(path)
        try:
            aside.mkdir(parents=True)
            yield aside
            for item in aside.rglob("*"):
                if item.is_file() or item.is_dir():  # a folder too: else its files may have no names after a power cut
                    _flush(item)
            _flush(aside)
            aside.rename(path)
            _flush(path.parent)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            for parent in new_parents:
                with suppress(OSError):
                    parent.rmdir()
            raise


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Gives a path beside `path` to write to; it replaces `path` only when the block ends without an error.

    Raises:
        UserError: the file system refuses; what stood at `path` stays. A folder, a device or a pipe there is no file
            to be replaced, and is refused at once, not when all is written.
    """
    with explained(f"writing {path}"):
        if path.is_dir():
            raise UserError(f"writing {path}: {_MEANINGS[errno.EISDIR]}")
        if path.exists() and not path.is_file():
            raise UserError(f"writing {path}: is a device or a pipe, wanted a file")
        aside = path.parent / f".{path.name}.partial-{os.getpid()}"
        try:
            yield aside
            _flush(aside)
            aside.rename(path)
            _flush(path.parent)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise


@contextmanager
def held(folder: Path, doing: str) -> Iterator[None]:
    """Keeps a folder from other commands that hold it too, until the block or the process ends.

    Nothing is written for it. Where the system cannot hold folders (not POSIX, some network file systems), none is.

    Args:
        folder: which.
        doing: what whoever holds it does, such as `trained`.

    Raises:
        UserError: another holds it.
    """
    if os.name != "posix":
        yield
        return
    import fcntl

    with explained(f"reading {folder}"):
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"{folder} is being {doing} by another command; wait until it has ended, or stop it"
                ) from None
        yield
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Writes a text file (UTF-8) whole or not at all."""
    with whole_file(path) as aside:
        aside.write_text(text, encoding="utf-8")


def remove_leftovers(folder: Path) -> None:
    """Deletes what killed writers left aside in `folder`."""
    for item in folder.glob(".*.partial-*"):
        if item.is_dir():
            shutil.rmtree(item, ignore_errors=True)
        else:
            item.unlink(missing_ok=True)


def _remove_abandoned(path: Path) -> None:
    """Deletes what killed writers of `path` left beside it: large, when it was a corpus."""
    if os.name != "posix":  # elsewhere there is no asking whether a process lives
        return
    for item in path.parent.glob(f".{glob.escape(path.name)}.partial-*"):
        number = item.name.rpartition("-")[2]
        try:
            os.kill(int(number), 0)
        except ProcessLookupError:
            shutil.rmtree(item, ignore_errors=True)
        except (OSError, ValueError, OverflowError):  # it lives, or the name is not one of ours
            continue


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
