"""Reading text from files: plain, compressed (gzip, bzip2, xz), or in a zip or tar archive; in chunks, never whole."""

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
"""Called with the name of a stage (such as `download enwik8.zip`), its bytes done so far, and their total (0: unknown).
"""


def no_progress(stage: str, done: int, total: int) -> None:
    """Ignore progress."""


def is_archive(path: Path) -> bool:
    """Return whether the name is that of a zip or tar archive."""
    return path.name.lower().endswith((".zip", *_TAR_SUFFIXES))


@dataclass(frozen=True)
class FileRange:
    """The bytes `start` to `stop` of a text in a file, iterated in chunks; the file is open only while iterated.

    The text is the file, decompressed if its suffix is one of `COMPRESSED_SUFFIXES`, or a member of a zip archive.
    Positions count decompressed bytes.
    """

    path: Path
    start: int = 0
    stop: int | None = None
    """None: the end of the text."""
    member: str = ""
    """Member of the zip archive at `path`; empty: the file itself."""

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
        """Length in bytes; 0 if the file would have to be decompressed to find out."""
        return 0 if self.is_compressed and self.stop is None else self.size()

    def __iter__(self) -> Iterator[bytes]:
        """Read the chunks.

        Raises:
            UserError: the file cannot be read, is damaged, or became shorter.
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
        """Return the length in bytes; a compressed file is read to find out.

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
    """Open a file, decompressed as its suffix says, or a member of a zip archive.

    Raises:
        UserError: it cannot be read, or is damaged.
    """
    with refuse_damaged(path), ExitStack() as stack:
        if not member:
            yield stack.enter_context(_open(path))
            return
        archive = stack.enter_context(zipfile.ZipFile(path))
        try:
            file = archive.open(member)
        except RuntimeError as error:  # encrypted, or compressed in a way that Python does not support
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
    """Turn errors of reading and decompressing a file into one line for the user.

    Raises:
        UserError: in place of any error of the operating system or of decompression.
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
    return UserError(f"{path}: damaged or cut short ({error}); get it again")


def zip_members(path: Path) -> list[str]:
    """Return the names of the files in a zip archive.

    Raises:
        UserError: it cannot be read, or is damaged.
    """
    with refuse_damaged(path), zipfile.ZipFile(path) as archive:
        return [entry.filename for entry in archive.infolist() if not entry.is_dir()]


def extract_from_tar(path: Path, wanted: Collection[str], folder: Path, progress: Progress = no_progress) -> None:
    """Extract the wanted files of a tar archive into a new folder, under their last names; atomically.

    Nothing else of the archive is written: no link, no folder, no other name.

    Args:
        path: the archive, compressed or not.
        wanted: paths in the archive; a file at another path counts too, if its last name is the same.
        folder: must not exist; it is created even if the archive has none of the files.
        progress: called with how much of the archive has been read.

    Raises:
        UserError: the archive is damaged or cannot be read, or the folder cannot be written.
    """
    names = {PurePosixPath(name).name for name in wanted}
    with atomic_folder(folder) as temporary, refuse_damaged(path), path.open("rb") as compressed:
        total = path.stat().st_size
        # Decompressed here, because tarfile does not read to the checksums of gzip.
        decompressed = _decompressed(compressed)
        with decompressed, tarfile.open(fileobj=decompressed, mode="r|") as archive:
            for entry in archive:
                target = temporary / PurePosixPath(entry.name).name
                exact = entry.name.removeprefix("./") in wanted
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
    """The file decompressed as its first bytes say."""
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
    with refuse_damaged(path):
        return content.read(CHUNK_BYTES)


def checksum(chunks: Iterable[bytes], like: str) -> str:
    """Return the checksum of these bytes, in the form of `like`: the algorithm, a colon, hex digits."""
    algorithm = like.partition(":")[0]
    digest = hashlib.new(algorithm, usedforsecurity=False)
    for chunk in chunks:
        digest.update(chunk)
    return f"{algorithm}:{digest.hexdigest()}"


def file_checksum(path: Path, like: str, progress: Progress = no_progress, name: str = "") -> str:
    """Return the checksum of a file as it is on disk, in the form of `like`.

    Args:
        path: the file.
        like: begins with the algorithm and a colon.
        progress: called with the bytes read so far.
        name: what the file is called in progress; its own name if empty.

    Raises:
        UserError: it cannot be read.
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
