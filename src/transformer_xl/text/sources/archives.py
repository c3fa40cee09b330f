"""Files as they lie: plain, packed (gzip, bzip2, xz), or inside a zip or tar archive; read in pieces, never whole."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, cast

from transformer_xl.config import UserError
from transformer_xl.files import as_user_error, atomic_folder

CHUNK_BYTES = 2**20
PACKED = (".gz", ".bz2", ".xz")
TARS = (".tar", ".tgz", ".tbz2", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz")

Progress = Callable[[str, int, int], None]
"""Told what is being done, how many bytes of it are done, and how many there are in all (0: not known)."""


def no_progress(what: str, done: int, total: int) -> None:
    """Shows nothing."""


def is_archive(path: Path) -> bool:
    """Whether the name is that of a zip or tar archive."""
    return path.name.lower().endswith((".zip", *TARS))


@dataclass(frozen=True)
class FilePart:
    """The bytes `start` to `stop` of a text, in pieces; the file is opened only while they are gone through.

    The text is the file, what is packed in it (`PACKED`), or a member of a zip archive. Places count unpacked bytes.
    """

    path: Path
    start: int = 0
    stop: int | None = None
    """None: to the end."""
    member: str = ""
    """Of a zip archive."""

    @property
    def name(self) -> str:
        """What to call it in messages."""
        text = f"{self.path} ({self.member})" if self.member else str(self.path)
        return f"{text}, from byte {self.start:,} on" if self.start else text

    @property
    def packed(self) -> bool:
        """Whether its places are not those of the file on disk."""
        return bool(self.member) or self.path.suffix.lower() in PACKED

    def __iter__(self) -> Iterator[bytes]:
        """Reads the part.

        Raises:
            UserError: the file cannot be read, is damaged, or has become shorter.
        """
        left = None if self.stop is None else self.stop - self.start
        with opened(self.path, self.member) as file:
            file.seek(self.start)
            while left is None or left:
                chunk = file.read(CHUNK_BYTES if left is None else min(left, CHUNK_BYTES))
                if not chunk:
                    if left is None:
                        return
                    raise UserError(
                        f"{self.path} became shorter while it was read; try again once it no longer changes"
                    )
                left = None if left is None else left - len(chunk)
                yield chunk

    def size(self) -> int:
        """Its length in bytes; a packed file is read through to know it.

        Raises:
            UserError: the file cannot be read, or is damaged.
        """
        if self.stop is not None:
            return self.stop - self.start
        if self.packed:
            return sum(map(len, self))
        with as_user_error(f"reading {self.path}"):
            return self.path.stat().st_size - self.start


@contextmanager
def opened(path: Path, member: str = "") -> Iterator[IO[bytes]]:
    """A file, unpacked as its name says, or a member of a zip archive, to read.

    Raises:
        UserError: it cannot be read, or is damaged.
    """
    with readable(path), ExitStack() as stack:
        if not member:
            yield stack.enter_context(_open(path))
            return
        archive = stack.enter_context(zipfile.ZipFile(path))
        try:
            file = archive.open(member)
        except RuntimeError as error:  # encrypted, or packed in a way that Python does not know
            raise UserError(f"{path}: {member} cannot be unpacked ({error}); unpack it some other way") from None
        yield stack.enter_context(file)


def _open(path: Path) -> IO[bytes]:
    match path.suffix.lower():
        case ".gz":
            return cast(IO[bytes], gzip.open(path))
        case ".bz2":
            return bz2.open(path)
        case ".xz":
            return lzma.open(path)
    return path.open("rb", buffering=0)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns what happens when a damaged archive is read into one clear line.

    Raises:
        UserError: in place of any error of the operating system, or of unpacking.
    """
    with as_user_error(f"reading {path}"):
        try:
            yield
        except (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError) as error:
            raise _damaged(path, error) from None
        except OSError as error:
            if error.errno is None:  # gzip and bz2 say so that the contents are wrong
                raise _damaged(path, error) from None
            raise


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"{path}: damaged or cut short ({error}); get it again")


def zip_members(path: Path) -> list[str]:
    """Names of the files in a zip archive.

    Raises:
        UserError: it cannot be read, or is damaged.
    """
    with readable(path), zipfile.ZipFile(path) as archive:
        return [entry.filename for entry in archive.infolist() if not entry.is_dir()]


def unpack_tar(path: Path, wanted: Collection[str], folder: Path, progress: Progress = no_progress) -> None:
    """Writes the wanted files of a tar archive into a new folder, under their last names; whole or not at all.

    Nothing else of the archive is written: no link, no folder, no other name.

    Args:
        path: the archive, packed or not.
        wanted: paths in the archive. A file elsewhere in it counts too, if its last name is the same.
        folder: where they go; must not exist. It is made even where the archive holds none of them.
        progress: told how much of the archive has been read.

    Raises:
        UserError: the archive is damaged or cannot be read, or the folder cannot be written.
    """
    names = {PurePosixPath(name).name for name in wanted}
    with atomic_folder(folder) as aside, readable(path), path.open("rb") as packed:
        total = path.stat().st_size
        # Unpacked here, because tarfile leaves the checksums of gzip unread.
        unpacked = _unpacker(packed)
        with unpacked, tarfile.open(fileobj=unpacked, mode="r|") as archive:
            for entry in archive:
                target = aside / PurePosixPath(entry.name).name
                exact = entry.name.removeprefix("./") in wanted
                content = archive.extractfile(entry) if entry.isreg() and target.name in names else None
                if content is None or (target.exists() and not exact):
                    continue
                with as_user_error(f"writing {folder}"), target.open("wb") as file:
                    while chunk := _read(content, path):
                        file.write(chunk)
                        progress(f"unpack {path.name}", packed.tell(), total)
            while unpacked.read(CHUNK_BYTES):
                pass


def _unpacker(file: IO[bytes]) -> IO[bytes]:
    """The file unpacked, as its first bytes say."""
    start = file.read(6)
    file.seek(0)
    if start.startswith(b"\x1f\x8b"):
        return cast(IO[bytes], gzip.GzipFile(fileobj=file))
    if start.startswith(b"BZh"):
        return bz2.BZ2File(file)
    if start == b"\xfd7zXZ\x00":
        return lzma.LZMAFile(file)
    return file


def _read(content: IO[bytes], path: Path) -> bytes:
    with readable(path):
        return content.read(CHUNK_BYTES)


def raw_chunks(path: Path) -> Iterator[bytes]:
    """The bytes of a file as they lie on disk, packed or not.

    Raises:
        UserError: it cannot be read.
    """
    with as_user_error(f"reading {path}"), path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def checksum(chunks: Iterable[bytes], like: str) -> str:
    """The checksum of these bytes, written as `like` is: the algorithm, a colon, hex digits."""
    algorithm = like.partition(":")[0]
    digest = hashlib.new(algorithm, usedforsecurity=False)
    for chunk in chunks:
        digest.update(chunk)
    return f"{algorithm}:{digest.hexdigest()}"


def with_progress(chunks: Iterable[bytes], progress: Progress, what: str, total: int) -> Iterator[bytes]:
    """The same bytes, telling how far they are."""
    done = 0
    for chunk in chunks:
        yield chunk
        done += len(chunk)
        progress(what, done, total)
