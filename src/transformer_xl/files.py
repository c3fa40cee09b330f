"""Atomic writes of files and folders, locks on folders, and conversion of OSErrors to UserErrors.

An atomic write uses a temporary name, flushes to disk, and renames, so that a file is complete or absent.
"""

from __future__ import annotations

import csv
import errno
import glob
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from transformer_xl.config import UserError, check_type

_MESSAGES = {  # by error number of the operating system
    errno.ENOSPC: "no space left on the device; free some or choose another path",
    errno.EDQUOT: "disk quota used up; free some or choose another path",
    errno.EFBIG: "file too large for this file system; choose another path",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EROFS: "read-only file system; choose another path",
    errno.ENOENT: "no such file or folder",
    errno.EEXIST: "part of the path is a file, not a folder",
    errno.ENOTDIR: "part of the path is a file, not a folder",
    errno.EISDIR: "is a folder, must be a file",
}

_MAX_NESTING = 100  # of JSON; our files have less than ten


@contextmanager
def as_user_error(action: str) -> Iterator[None]:
    """Convert an OSError to a UserError with a one-line message.

    Args:
        action: the action of the block, such as `writing runs/a`; the message begins with it.

    Raises:
        UserError: the block raised an OSError.
    """
    try:
        yield
    except OSError as error:
        message = _MESSAGES.get(error.errno or 0, error.strerror or str(error))
        raise UserError(final_names(f"{action}: {message}")) from error
    except ValueError as error:  # what Python says of a name, which a damaged file can contain
        if not isinstance(error, UnicodeEncodeError) and str(error) != "embedded null byte":
            raise
        raise UserError(f"{action}: no file can have this name ({error}); give another") from error


def final_names(text: str) -> str:
    """Return a text in which temporary files and folders have the names that they get when they are complete."""
    # a name begins where no other character of a file name precedes it: v1.5 keeps its dot
    return re.sub(r"(?<![^\s/'\"(])\.((?:(?!\.partial-)[^/])+)\.partial-(?:\d+|new|old)\b", r"\1", text)


def quoted(path: Path) -> str:
    """Return a path as it is typed in a shell, for commands in messages."""
    return shlex.quote(str(path))


def as_path(path: Path | str | os.PathLike[str], name: str, advice: str = "give the path of a folder") -> Path:
    """Return an argument of a public function as a path.

    Args:
        path: the argument.
        name: name of the argument, with which the message begins.
        advice: what to give instead if it is no path.

    Raises:
        UserError: it is of another type.
    """
    check_type(path, (str, os.PathLike), name, advice)
    return Path(path)


def cache_folder() -> Path:
    """Return the folder for downloads and libraries: TXL_CACHE, else transformer-xl in XDG_CACHE_HOME or ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("TXL_CACHE") or Path(home, "transformer-xl"))


def check_private(path: Path) -> None:
    """Check that nobody else can put a library into a folder, which would run as this user.

    Raises:
        UserError: another user owns it or can write to it, or could replace one of the folders that it is in.
    """
    with as_user_error(f"reading {path}"):
        for place in (path, *path.resolve().parents):
            info = place.stat()
            others = stat.S_IWOTH | (stat.S_IWGRP if place == path else 0)
            # in a shared folder with the sticky bit, others cannot replace what they do not own
            shared = info.st_mode & others and not (place != path and info.st_mode & stat.S_ISVTX)
            if shared or info.st_uid not in ((os.getuid(),) if place == path else (os.getuid(), 0)):
                fault = "others can write to it" if shared else "it belongs to another user"
                raise UserError(
                    f"{path} is no safe place for libraries ({place}: {fault}); set TXL_CACHE to a folder of your own"
                )


def check_is_new(path: Path) -> None:
    """Check that nothing exists at a path yet, not even a link to a missing file.

    Raises:
        UserError: something exists there, or the file system refuses to look.
    """
    with as_user_error(f"writing {path}"):
        if path.exists() or path.is_symlink():
            raise UserError(f"{path} exists already; choose another path or delete it first")


def check_new_file(path: Path) -> None:
    """Check that a file can be created at a path, before its contents are computed.

    Raises:
        UserError: something exists there, its folder does not exist or is read-only, or the file system refuses to
            look.
    """
    check_is_new(path)
    if not path.absolute().parent.is_dir():
        raise UserError(f"{path}: folder {path.parent} does not exist; create it, or choose another path")
    if not os.access(path.absolute().parent, os.W_OK):
        raise UserError(f"{path}: folder {path.parent} is read-only; choose another path")


@contextmanager
def atomic_folder(path: Path, *, goes_on: Callable[[Path], bool] | None = None) -> Iterator[Path]:
    """Yield a new temporary folder next to `path`; it is renamed to `path` if the block ends without an error.

    Args:
        path: the folder to create.
        goes_on: returns whether the block can go on with a temporary folder. The one that a killed process has left is
            then yielded again, and one whose block ends with an error is left. Without it both are deleted.

    Raises:
        UserError: `path` exists, or the file system refuses (full, read-only, no permission); nothing is created.
    """
    check_is_new(path)
    with as_user_error(f"writing {path}"):
        new_parents = [parent for parent in path.parents if not parent.exists()]
        found = _remove_abandoned(path, goes_on)
        try:
            with _renamed_into_place(path, found, goes_on) as temporary:
                temporary.mkdir(parents=True, exist_ok=found is not None)
                yield temporary
        except BaseException:
            for parent in new_parents:
                with suppress(OSError):
                    parent.rmdir()
            raise


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; the file written there replaces `path` if the block ends without an error.

    Raises:
        UserError: the file system refuses (a file at `path` is unchanged), or `path` is a folder, a device or a pipe
            (checked before the block runs).
    """
    with as_user_error(f"writing {path}"):
        if path.is_dir():
            raise UserError(f"writing {path}: {_MESSAGES[errno.EISDIR]}")
        if path.exists() and not path.is_file():
            raise UserError(f"writing {path}: is a device or a pipe, must be a file")
        with _renamed_into_place(path) as temporary:
            yield temporary


@contextmanager
def _renamed_into_place(
    path: Path, found: Path | None = None, goes_on: Callable[[Path], bool] | None = None
) -> Iterator[Path]:
    """Yield a temporary path; flush it and rename it to `path` after the block.

    If anything of that fails, it is deleted unless `goes_on`, and what was at `path` is there again.
    """
    temporary, previous = (path.parent / f".{path.name}.partial-{which}" for which in (os.getpid(), "old"))
    if found != temporary:
        _remove(temporary)  # left by a killed process that had the same process id
        if found is not None:
            found.rename(temporary)
    try:
        yield temporary
        # Folders are flushed too; otherwise a power failure can lose the names of the files in them.
        for item in [*temporary.rglob("*"), temporary]:
            if item.is_file() or item.is_dir():
                _flush(item)
        _remove(previous)  # left by a killed process too
        is_new = not path.exists()
        with suppress(OSError):  # a second name of what is there; some file systems have none
            os.link(path, previous)
        try:
            temporary.rename(path)
            _flush(path.parent)
        except OSError:  # else the command would fail, and yet what it wrote would be there
            if previous.exists():
                previous.rename(path)
            elif is_new and path.exists():
                path.rename(temporary)
            raise
        finally:
            with suppress(OSError):
                previous.unlink(missing_ok=True)
    except BaseException as error:
        if goes_on is None or not goes_on(temporary):
            _remove(temporary)
        if isinstance(error, UserError):
            raise UserError(final_names(str(error))) from error.__cause__
        raise


@contextmanager
def lock_folder(folder: Path) -> Iterator[tuple[int, ...]]:
    """Lock a folder while the block runs, so that only one txl command at a time writes to it.

    The lock is an flock of the folder itself: it leaves no file, and ends with the last process that has the
    descriptor open. Where folders cannot be locked (on Windows, on some network file systems) there is no lock.

    Args:
        folder: the folder, which must exist.

    Yields:
        Descriptors for `pass_fds` of subprocess.Popen: child processes that inherit them hold the lock too, even
        after this process has ended. Empty if folders cannot be locked.

    Raises:
        UserError: another process holds the lock.
    """
    if os.name != "posix":
        yield ()
        return
    import fcntl

    with as_user_error(f"reading {folder}"):
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder} is in use by another txl command; wait until it has ended, or stop it") from None
        except OSError:  # this file system has no locks
            pass
        yield (descriptor,)
    finally:
        os.close(descriptor)


def check_not_special(path: Path, advice: str = "put the file there") -> None:
    """Check that a path is no pipe, socket or device, whose reading might never end; it may be missing.

    Args:
        path: the path.
        advice: what to do if it is one.

    Raises:
        UserError: it is one, or the file system refuses to look.
    """
    with as_user_error(f"reading {path}"):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UserError(f"{path} is not a file; {advice}")


def read_bytes(path: Path) -> bytes:
    """Return the content of a file.

    Raises:
        UserError: the file cannot be read.
    """
    with as_user_error(f"reading {path}"):
        return path.read_bytes()


def parse_json(content: str | bytes) -> Any:
    """Return the values of JSON, whose nesting exhausts the stack neither here nor where they are used.

    Raises:
        ValueError: it is not JSON, or is nested too deeply.
    """
    try:
        values = json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    level = [[values]]
    for _ in range(_MAX_NESTING):
        inner = [part for part in level for part in (part.values() if isinstance(part, dict) else part)]
        level = [part for part in inner if isinstance(part, (dict, list))]
        if not level:
            return values
    raise ValueError("nested too deeply")


def write_text(path: Path, text: str) -> None:
    """Write a text file (UTF-8) atomically; half a surrogate, which UTF-8 lacks, becomes an escape."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def npy_bytes(array: Any) -> bytes:
    """Return an array in float32 as the content of an .npy file; `numpy.save` to a file ignores a full disk."""
    import numpy as np

    content = io.BytesIO()
    np.save(content, np.asarray(array, dtype=np.float32), allow_pickle=False)
    return content.getvalue()


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as CSV with a header; a value that a row lacks is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file atomically, with each value on its own line."""
    write_text(path, json.dumps(values, indent=1) + "\n")


def json_digest(values: Mapping[str, Any]) -> str:
    """Return the sha256 of JSON values, which does not depend on the order of their names in a file."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files and folders in `folder`, which killed processes left behind."""
    for item in [*folder.glob(".*.partial-*"), *folder.glob(".tmp??????")]:  # the latter are of safetensors
        _remove(item)


def _remove_abandoned(path: Path, goes_on: Callable[[Path], bool] | None) -> Path | None:
    """Delete temporary folders of `path` whose processes were killed; that of a corpus can take many gigabytes.

    Returns:
        One that `goes_on` wants, which stays, or None.
    """
    found = None
    if os.name != "posix":  # on other systems, os.kill cannot check whether a process is alive
        return found
    for item in path.parent.glob(f".{glob.escape(path.name)}.partial-*"):
        process = item.name.rpartition("-")[2]
        try:
            if int(process) != os.getpid():  # in a container, a later process often has the same id
                os.kill(int(process), 0)  # sends no signal, only checks that the process exists
                continue
        except ProcessLookupError:
            pass
        except (OSError, ValueError, OverflowError):  # the process is alive, or the name has no process id
            continue
        if found is None and goes_on is not None and goes_on(item):
            found = item
        else:
            _remove(item)
    return found


def _remove(item: Path) -> None:
    if item.is_dir():
        shutil.rmtree(item, ignore_errors=True)
    else:
        item.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
