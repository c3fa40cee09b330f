"""Reads text in chunks from files: plain, compressed (gzip, bzip2, xz), or in a zip or tar archive."""

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
COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz")
_TAR_SUFFIXES = (".tar", ".tgz", ".tbz2", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz")

Progress = Callable[[str, int, int], None]
"""Called with the name of a stage (such as `download enwik8.zip`), the bytes processed so far, and the total (0 if
unknown).
"""


def no_progress(stage: str, done: int, total: int) -> None:
    """Ignore progress."""


def is_archive(path: Path) -> bool:
    """Return whether the file name has the suffix of a zip or tar archive."""
    return path.name.lower().endswith((".zip", *_TAR_SUFFIXES))


@dataclass(frozen=True)
class FileRange:
    """The bytes from `start` to `stop` of a text in a file, iterated in chunks; the file is open only while iterated.

    The text is the file, decompressed if its suffix is one of `COMPRESSED_SUFFIXES`, or a member of a zip archive.
    Positions count decompressed bytes.
    """

    path: Path
    start: int = 0
    stop: int | None = None
    """End position, or None for the end of the text."""
    member: str = ""
    """Member of the zip archive at `path`, or empty for the file itself."""

    @property
    def name(self) -> str:
        """Path, member and start, for messages."""
        text = f"{self.path} ({self.member})" if self.member else str(self.path)
        return f"{text}, from byte {self.start:,} on" if self.start else text

    @property
    def is_compressed(self) -> bool:
        """Whether positions in the text differ from positions in the file."""
        return bool(self.member) or self.path.suffix.lower() in COMPRESSED_SUFFIXES

    @property
    def known_num_bytes(self) -> int:
        """Length in bytes, or 0 if computing it would require decompressing the file."""
        return 0 if self.is_compressed and self.stop is None else self.size()

    def __iter__(self) -> Iterator[bytes]:
        """Read the chunks.

        Raises:
            UserError: the file cannot be read, is damaged, or was truncated meanwhile.
        """
        left = None if self.stop is None else self.stop - self.start
        with open_text(self.path, self.member) as file:
            file.seek(self.start)
            while left is None or left:
                chunk = file.read(CHUNK_BYTES if left is None else min(left, CHUNK_BYTES))
                if not chunk:
                    if left is None:
                        return
                    raise UserError(f"{self.path} became shorter while it was read; try again once it is complete")
                left = None if left is None else left - len(chunk)
                yield chunk

    def size(self) -> int:
        """Return the length in bytes; a compressed file is decompressed to compute it.

        Raises:
            UserError: the file cannot be read, or is damaged.
        """
        if self.stop is not None:
            return self.stop - self.start
        if self.is_compressed:
            return sum(map(len, self))
        with as_user_error(f"reading {self.path}"):
            return self.path.stat().st_size - self.start


@contextmanager
def open_text(path: Path, member: str = "") -> Iterator[IO[bytes]]:
    """Open a file, decompressed according to its suffix, or a member of a zip archive.

    Raises:
        UserError: the file cannot be read, or is damaged.
    """
    with refuse_damaged(path), ExitStack() as stack:
        if not member:
            yield stack.enter_context(_open(path))
            return
        archive = stack.enter_context(zipfile.ZipFile(path))
        try:
            file = archive.open(member)
        except RuntimeError as error:  # encrypted, or compressed by a method that Python does not support
            raise UserError(f"{path}: {member} cannot be extracted ({error}); extract it with another tool") from None
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
def refuse_damaged(path: Path) -> Iterator[None]:
    """Convert errors of reading and decompressing a file to one-line user errors.

    Raises:
        UserError: replaces any error of the operating system or of decompression.
    """
    with as_user_error(f"reading {path}"):
        try:
            yield
        except (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError) as error:
            raise _damaged(path, error) from None
        except OSError as error:
            if error.errno is None:  # gzip and bz2 raise OSError for wrong contents
                raise _damaged(path, error) from None
            raise


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"{path}: damaged or truncated ({error}); get it again")


def zip_members(path: Path) -> list[str]:
    """Return the names of the files in a zip archive.

    Raises:
        UserError: the file cannot be read, or is damaged.
    """
    with refuse_damaged(path), zipfile.ZipFile(path) as archive:
        return [entry.filename for entry in archive.infolist() if not entry.is_dir()]


def extract_from_tar(path: Path, members: Collection[str], folder: Path, progress: Progress = no_progress) -> None:
    """Extract some files of a tar archive atomically into a new flat folder, each under its base name.

    Nothing else in the archive is extracted: no links, no folders, no other files.

    Args:
        path: the archive, compressed or not.
        members: paths in the archive; a file at another path is extracted if it has the same base name.
        folder: folder to create, which must not exist; it is created even if the archive contains none of the files.
        progress: called with the number of compressed bytes read.

    Raises:
        UserError: the archive is damaged or cannot be read, or the folder cannot be written.
    """
    names = {PurePosixPath(member).name for member in members}
    with atomic_folder(folder) as temporary, refuse_damaged(path), path.open("rb") as compressed:
        total = path.stat().st_size
        # Decompress here, since tarfile stops before the gzip checksum at the end of the stream.
        decompressed = _decompressed(compressed)
        with decompressed, tarfile.open(fileobj=decompressed, mode="r|") as archive:
            for entry in archive:
                target = temporary / PurePosixPath(entry.name).name
                exact = entry.name.removeprefix("./") in members
                content = archive.extractfile(entry) if entry.isreg() and target.name in names else None
                if content is None or (target.exists() and not exact):
                    continue
                with as_user_error(f"writing {folder}"), target.open("wb") as file:
                    while chunk := _read(content, path):
                        file.write(chunk)
                        progress(f"extract {path.name}", compressed.tell(), total)
            while decompressed.read(CHUNK_BYTES):
                pass


def _decompressed(file: IO[bytes]) -> IO[bytes]:
    """Return the file decompressed according to its magic number."""
    magic = file.read(6)
    file.seek(0)
    if magic.startswith(b"\x1f\x8b"):
        return cast(IO[bytes], gzip.GzipFile(fileobj=file))
    if magic.startswith(b"BZh"):
        return bz2.BZ2File(file)
    if magic == b"\xfd7zXZ\x00":
        return lzma.LZMAFile(file)
    return file


def _read(content: IO[bytes], path: Path) -> bytes:
    with refuse_damaged(path):
        return content.read(CHUNK_BYTES)


def checksum(chunks: Iterable[bytes], like: str) -> str:
    """Return the checksum of these bytes as algorithm, colon and hex digits, with the algorithm of `like`."""
    algorithm = like.partition(":")[0]
    digest = hashlib.new(algorithm, usedforsecurity=False)
    for chunk in chunks:
        digest.update(chunk)
    return f"{algorithm}:{digest.hexdigest()}"


def file_checksum(path: Path, like: str, progress: Progress = no_progress, name: str = "") -> str:
    """Return the checksum of a file on disk, without decompressing it, with the algorithm of `like`.

    Args:
        path: the file.
        like: a checksum, or any string that begins with the algorithm and a colon.
        progress: called with the bytes read so far.
        name: name of the file in progress messages, or empty for its file name.

    Raises:
        UserError: the file cannot be read.
    """
    with as_user_error(f"reading {path}"), path.open("rb", buffering=0) as file:
        chunks = iter(lambda: file.read(CHUNK_BYTES), b"")
        return checksum(with_progress(chunks, progress, f"check {name or path.name}", path.stat().st_size), like)


def with_progress(chunks: Iterable[bytes], progress: Progress, stage: str, total: int) -> Iterator[bytes]:
    """Yield the same chunks, reporting progress after each."""
    done = 0
    for chunk in chunks:
        yield chunk
        done += len(chunk)
        progress(stage, done, total)
