"""Reads text in chunks from files: plain, compressed (gzip, bzip2, xz), or in a zip or tar archive."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, cast

from transformer_xl.config import UserError
from transformer_xl.files import as_user_error, atomic_folder

CHUNK_BYTES = 2**20
COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz")
_TAR_SUFFIXES = (".tar", ".tgz", ".tbz2", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz")

_DECOMPRESSION_ERRORS = (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError)

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
class FileDigest:
    """Length and checksum of the contents of a file, which identify them."""

    num_bytes: int
    checksum: str
    """Algorithm, colon and hex digits, such as sha256:2b49..."""

    def __str__(self) -> str:
        """Length, algorithm and hex digits, for messages."""
        return f"{self.num_bytes:,} bytes, {self.checksum.replace(':', ' ')}"


def compute_digest(
    chunks: Iterable[bytes], like: FileDigest, name: str, progress: Progress = no_progress
) -> FileDigest:
    """Return the length and checksum of these bytes.

    Args:
        chunks: the bytes.
        like: the expected digest: its algorithm is used, and its length is the total in progress messages.
        name: name of the file in progress messages.
        progress: called with the stage `check NAME`.
    """
    algorithm = like.checksum.partition(":")[0]
    digest, num_bytes = hashlib.new(algorithm, usedforsecurity=False), 0
    for chunk in chunks:
        digest.update(chunk)
        num_bytes += len(chunk)
        progress(f"check {name}", num_bytes, like.num_bytes)
    return FileDigest(num_bytes, f"{algorithm}:{digest.hexdigest()}")


def raw_chunks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file on disk in chunks, without decompressing it.

    Raises:
        UserError: the file cannot be read.
    """
    with as_user_error(f"reading {path}"), path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


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
        num_left = sys.maxsize if self.stop is None else self.stop - self.start
        with _open_text(self.path, self.member) as file:
            file.seek(self.start)
            while num_left and (chunk := file.read(min(num_left, CHUNK_BYTES))):
                num_left -= len(chunk)
                yield chunk
        if num_left and self.stop is not None:
            raise UserError(f"{self.path} became shorter while it was read; try again once it is complete")

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


def read_text_file(path: Path) -> bytes:
    """Return the whole content of a text file, decompressed if its suffix is one of `COMPRESSED_SUFFIXES`.

    Raises:
        UserError: the file cannot be read, or is damaged.
    """
    with _open_text(path, "") as file:
        return file.read()


@contextmanager
def _open_text(path: Path, member: str) -> Iterator[IO[bytes]]:
    """Open a file, decompressed according to its suffix, or a member of a zip archive."""
    with _damage_as_user_error(path), path.open("rb", buffering=0) as file, _decompressed(file, path, member) as text:
        yield text


def _decompressed(file: IO[bytes], path: Path, member: str = "") -> IO[bytes]:
    """Return the decompressed contents according to the suffix of `path`, or those of a member of a zip archive."""
    if member:
        with _damage_as_user_error(path, RuntimeError), zipfile.ZipFile(file) as archive:
            return archive.open(member)
    match path.suffix.lower():
        case ".gz" | ".tgz":
            return cast(IO[bytes], gzip.open(file))
        case ".bz2" | ".tbz2":
            return bz2.open(file)
        case ".xz" | ".txz":
            return lzma.open(file)
    return file


@contextmanager
def _damage_as_user_error(path: Path, *unsupported: type[Exception]) -> Iterator[None]:
    """Convert errors of reading and decompressing a file to one-line user errors.

    Args:
        path: the file, for messages.
        unsupported: what else is converted; zipfile raises RuntimeError if a member is encrypted, and its subclass
            NotImplementedError for a compression method or version that Python does not support.
    """
    with as_user_error(f"reading {path}"):
        try:
            yield
        except (*_DECOMPRESSION_ERRORS, *unsupported, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # gzip and bz2 raise OSError for wrong contents
                raise
            raise UserError(f"{path}: not readable, perhaps damaged or truncated ({error}); get it again") from None


def zip_members(path: Path) -> list[str]:
    """Return the names of the files in a zip archive.

    Raises:
        UserError: the file cannot be read, or is damaged.
    """
    with _damage_as_user_error(path, RuntimeError), zipfile.ZipFile(path) as archive:
        return [entry.filename for entry in archive.infolist() if not entry.is_dir()]


def extract_from_tar(path: Path, members: Collection[str], folder: Path, progress: Progress = no_progress) -> None:
    """Extract some files of a tar archive atomically into a new flat folder, each under its base name.

    Nothing else in the archive is extracted: no links, no folders, no other files.

    Args:
        path: the archive, decompressed according to its suffix.
        members: paths in the archive; a file at another path is extracted if it has the same base name.
        folder: folder to create, which must not exist; it is created even if the archive contains none of the files.
        progress: called with the number of compressed bytes read.

    Raises:
        UserError: the archive is damaged or cannot be read, or the folder cannot be written.
    """
    names = {PurePosixPath(member).name for member in members}
    with atomic_folder(folder) as temporary, _damage_as_user_error(path), path.open("rb") as file:
        total = path.stat().st_size
        # Decompress here, since tarfile stops before the gzip checksum at the end of the stream.
        with _decompressed(file, path) as decompressed, tarfile.open(fileobj=decompressed, mode="r|") as archive:
            for entry in archive:
                target = temporary / PurePosixPath(entry.name).name
                # A file at a requested path replaces one that only has the same base name.
                is_exact = entry.name.removeprefix("./") in members
                content = archive.extractfile(entry) if entry.isreg() and target.name in names else None
                if content is None or (target.exists() and not is_exact):
                    continue
                with as_user_error(f"writing {folder}"), target.open("wb") as output:
                    while chunk := _read_chunk(content, path):
                        output.write(chunk)
                        progress(f"extract {path.name}", file.tell(), total)
            while decompressed.read(CHUNK_BYTES):
                pass


def _read_chunk(content: IO[bytes], path: Path) -> bytes:
    """Read a chunk; errors name the archive at `path` even in a block that converts errors of writing."""
    with _damage_as_user_error(path):
        return content.read(CHUNK_BYTES)
