"""Reads text in chunks from files, plain or compressed (gzip, bzip2, xz, zstd), in any encoding; opens archives."""

from __future__ import annotations

import bz2
import codecs
import gzip
import hashlib
import io
import lzma
import os
import stat
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal, TextIO, cast

from typing_extensions import override

from transformer_xl.config import UserError
from transformer_xl.config.extras import missing_extra
from transformer_xl.files import as_user_error, atomic_folder
from transformer_xl.text.text_config import BINARY

CHUNK_BYTES = 2**20
COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
_MAGIC = {"gzip": b"\x1f\x8b\x08", "bzip2": b"BZh", "xz": b"\xfd7zXZ\0", "zstd": b"\x28\xb5\x2f\xfd"}
_BY_SUFFIX = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
_BY_SUFFIX |= {".tgz": "gzip", ".tbz2": "bzip2", ".txz": "xz", ".tzst": "zstd"}
BYTE_ORDER_MARK = "\ufeff"
"""A character at the start of a file that tells its encoding, and is no part of its text."""
_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32",  # before UTF-16, with whose mark it begins
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}

# A RuntimeError is raised for an encrypted member of a zip archive, and for an unsupported compression.
_DECOMPRESSION_ERRORS = (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError, RuntimeError)

Progress = Callable[[str, int, int], None]
"""Called with the name of a stage (such as `download enwik8.zip`), the bytes processed so far, and the total (0 if
unknown).
"""


def no_progress(stage: str, done: int, total: int) -> None:
    """Ignore progress."""


def archive_of(head: bytes, name: str) -> Literal["zip", "tar"] | None:
    """Return which archive begins with these decompressed bytes, or has the suffix of one; or None."""
    if head.startswith((b"PK\3\4", b"PK\5\6")) or name.lower().endswith(".zip"):
        return "zip"
    has_suffix = without_compression(name).lower().endswith(".tar")
    return "tar" if head[257:262] == b"ustar" or has_suffix else None


def without_compression(name: str) -> str:
    """Return the name of a file without the suffix of compression; .tgz and the like become .tar."""
    stem, suffix = os.path.splitext(name)
    if suffix.lower() not in _BY_SUFFIX:
        return name
    return stem if suffix.lower() in COMPRESSED_SUFFIXES else f"{stem}.tar"


def compression_of(head: bytes, name: str) -> str | None:
    """Return how the file is compressed that begins with these bytes, or None.

    A file with a suffix of compression counts as compressed, whatever it begins with: it is damaged.
    """
    for kind, magic in _MAGIC.items():
        if head.startswith(magic) and (kind != "bzip2" or head[4:10] in (b"1AY&SY", b"\x17rE8P\x90")):
            return kind
    return _BY_SUFFIX.get(os.path.splitext(name)[1].lower())


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

    The text is the file, decompressed if it is compressed. Positions count decompressed
    bytes, and with an encoding those of the text as UTF-8.
    """

    path: Path
    start: int = 0
    stop: int | None = None
    """End position, or None for the end of the text."""
    encoding: str = BINARY
    """Encoding of the file, which is decoded and becomes UTF-8 without byte order mark; binary: bytes as they are."""

    @property
    def name(self) -> str:
        """Path and start, for messages."""
        return f"{self.path}, from byte {self.start:,} on" if self.start else str(self.path)

    @property
    def is_compressed(self) -> bool:
        """Whether the file has to be decompressed."""
        with as_user_error(f"reading {self.path}"), self.path.open("rb") as file:
            return compression_of(file.read(16), self.path.name) is not None

    @property
    def is_seekable(self) -> bool:
        """Whether a part of the text can be read without what is before it in the file."""
        return not self.is_compressed and self.encoding == BINARY

    def __iter__(self) -> Generator[bytes]:
        """Read the chunks.

        Raises:
            UserError: the file cannot be read, is damaged, was truncated meanwhile, or has another encoding.
        """
        num_left = sys.maxsize if self.stop is None else self.stop - self.start
        with open_decompressed(self.path) as file:
            if self.encoding == BINARY:
                file.seek(self.start)
                while num_left and (chunk := file.read(min(num_left, CHUNK_BYTES))):
                    num_left -= len(chunk)
                    yield chunk
            else:
                position = 0
                for chunk in utf8_chunks(file, self.encoding, str(self.path)):
                    wanted = chunk[max(self.start - position, 0) :][:num_left]
                    position += len(chunk)
                    if wanted:
                        num_left -= len(wanted)
                        yield wanted
                    if not num_left:
                        break
        if num_left and self.stop is not None:
            raise UserError(f"{self.path} became shorter while it was read; try again once it is complete")

    def size(self) -> int:
        """Return the length in bytes; a compressed or encoded file is read to compute it.

        Raises:
            UserError: the file cannot be read, is damaged, or has another encoding.
        """
        if self.stop is not None:
            return self.stop - self.start
        if not self.is_seekable:
            return sum(map(len, self))
        with as_user_error(f"reading {self.path}"):
            return self.path.stat().st_size - self.start


def read_text_file(path: Path) -> bytes:
    """Return the content of a file without byte order mark, decompressed if it is compressed.

    Raises:
        UserError: the file cannot be read, or is damaged.
    """
    with open_decompressed(path) as file:
        return file.read().removeprefix(codecs.BOM_UTF8)


def standard_input(otherwise: str = "name a file") -> TextIO:
    """Return standard input.

    Args:
        otherwise: what to do instead of giving it a text.

    Raises:
        UserError: it is closed.
    """
    if sys.stdin is None:
        raise UserError(f"standard input is closed; give it a text, or {otherwise}")
    return sys.stdin


@contextmanager
def open_decompressed(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, decompressed if it is compressed.

    Raises:
        UserError: it cannot be read, or is damaged.
    """
    with (
        as_user_error(f"reading {path}"),
        damage_as_user_error(path),
        path.open("rb", buffering=0) as file,
        decompressed(file, path.name) as text,
    ):
        yield text


def decompressed(file: IO[bytes], name: str) -> IO[bytes]:
    """Return the contents of an open file that can seek or peek, decompressed if it is compressed.

    Raises:
        UserError: the library that decompresses it is missing.
    """
    if isinstance(file, io.BufferedReader):
        head = file.peek(16)[:16]
    else:
        head = file.read(16)
        file.seek(0)
    match compression_of(head, name):
        case "gzip":
            return cast(IO[bytes], gzip.open(file))
        case "bzip2":
            return io.BufferedReader(_Streams(file, bz2.BZ2Decompressor))
        case "xz":
            return io.BufferedReader(_Streams(file, lzma.LZMADecompressor))
        case "zstd":
            return cast(IO[bytes], _zstd().open(file))
    return file


class _Streams(io.RawIOBase):
    """All streams of a bzip2 or xz file. Python's own readers take a damaged second one for the end of the file."""

    def __init__(self, file: IO[bytes], new: Callable[[], Any]) -> None:
        self._file, self._new, self._decoder, self._position = file, new, new(), 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = 0, /) -> int:
        if whence == io.SEEK_END:
            raise io.UnsupportedOperation("the end is not known")
        wanted = offset + (self._position if whence == io.SEEK_CUR else 0)
        if wanted < self._position:
            self._decoder, self._position = self._new(), 0
            self._file.seek(0)
        skipped = memoryview(bytearray(CHUNK_BYTES))
        while self._position < wanted and self.readinto(skipped[: wanted - self._position]):
            pass
        return self._position

    @override
    def readinto(self, buffer: Any, /) -> int:
        content = b""
        while not content:
            compressed = b""
            if self._decoder.eof:
                compressed = self._decoder.unused_data.lstrip(b"\0")  # xz files may be padded with zeros
                while not compressed and (more := self._file.read(CHUNK_BYTES)):
                    compressed = more.lstrip(b"\0")
                if not compressed:
                    return 0
                self._decoder = self._new()
            elif self._decoder.needs_input:
                compressed = self._file.read(CHUNK_BYTES)
                if not compressed:
                    raise EOFError("its end is missing")
            content = self._decoder.decompress(compressed, len(buffer))
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


class _Kept:
    """Reads a file, and keeps what was read last."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._last, self._position = file, b"", 0

    def read(self, size: int) -> bytes:
        content = self._file.read(size)
        self._last, self._position = (self._last + content)[-2 * tarfile.RECORDSIZE :], self._position + len(content)
        return content

    def since(self, position: int) -> bytes:
        """Return what was read from this position of the file on."""
        return self._last[len(self._last) - (self._position - position) :] if position < self._position else b""


def _zstd() -> Any:
    """Return Python's module for zstd, or for a Python before 3.14 its backport: others end at a cut without error."""
    try:
        return import_module("compression.zstd")
    except ImportError:
        try:
            return import_module("backports.zstd")
        except ImportError:
            raise missing_extra("backports.zstd", "zstd") from None


class NotTextError(UserError):
    """A file that is not text.

    Args:
        message: what is wrong, and how to fix it.
        reason: what shows that it is not text, in a few words.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def _not_text(name: str, encoding: str, reason: str) -> NotTextError:
    """Return the error for a file that cannot be decoded."""
    advice = (
        f"encoding=NAME (such as latin-1 or utf-16), or encoding={BINARY} (and input_format=text if it is a table) to "
        "take its bytes as they are"
    )
    return NotTextError(f"{name}: not text in {encoding}: {reason}; leave it out, or give {advice}", reason)


def utf8_chunks(file: IO[bytes], encoding: str, name: str) -> Iterator[bytes]:
    """Decode a file and yield it as UTF-8, without byte order mark.

    Raises:
        NotTextError: it is not text in this encoding, or has a NUL character, which only binary files have.
    """
    decoder = codecs.getincrementaldecoder(encoding)()
    num_read, at_start, is_last = 0, True, False
    while not is_last:
        content = file.read(CHUNK_BYTES)
        marked = None if num_read else next((one for mark, one in _MARKS.items() if content.startswith(mark)), None)
        # encodings of single bytes would take the mark for characters
        if marked and not codecs.lookup(encoding).name.startswith(marked):
            raise _not_text(name, encoding, f"it begins with the byte order mark of {marked}")
        num_read, is_last = num_read + len(content), not content
        try:
            text = decoder.decode(content, final=is_last)
            chunk = text.removeprefix(BYTE_ORDER_MARK if at_start else "").encode("utf-8")
        except UnicodeDecodeError as error:
            # the bytes of the error begin with those left undecoded at the end of the chunk before
            position = num_read - len(error.object) + error.start
            raise _not_text(name, encoding, f"byte {position:,} is 0x{error.object[error.start]:02x}") from None
        except UnicodeError as error:  # no byte order mark in UTF-16, or a surrogate, which UTF-8 lacks
            raise _not_text(name, encoding, " ".join(str(error).split())) from None
        if b"\0" in chunk:
            raise _not_text(name, encoding, "it has a NUL byte")
        at_start = at_start and not text
        if chunk:
            yield chunk


def check_text(text: FileRange, progress: Callable[[int], None]) -> FileRange:
    """Read a whole text to check that it is text in its encoding, and measure it.

    Args:
        text: the text.
        progress: called with the length of each chunk.

    Returns:
        The text with its end; if it is UTF-8 without byte order mark, its bytes as they are.

    Raises:
        NotTextError: it is not text in its encoding.
        UserError: the file cannot be read, or is damaged.
    """
    size = 0
    for chunk in text:
        size += len(chunk)
        progress(len(chunk))
    with closing(iter(replace(text, encoding=BINARY))) as chunks:
        has_mark = next(chunks, b"").startswith(codecs.BOM_UTF8)
    return replace(text, stop=size, encoding=text.encoding if has_mark or text.encoding != "utf-8" else BINARY)


@contextmanager
def damage_as_user_error(path: Path) -> Iterator[None]:
    """Convert errors of decompressing a file to a one-line user error."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # gzip and bz2 raise OSError for wrong contents; an xz file can ask for a dictionary of gigabytes
        is_damage = isinstance(error, (*_DECOMPRESSION_ERRORS, MemoryError)) or type(error).__name__ == "ZstdError"
        if not is_damage and not (isinstance(error, OSError) and error.errno is None):
            raise
        problem = str(error) or "it needs too much memory"
        raise UserError(f"{path}: not readable, perhaps damaged or truncated ({problem}); get it again") from None


def extract(path: Path, members: Collection[str], folder: Path, progress: Progress = no_progress) -> None:
    """Extract some files of a zip or tar archive atomically into a new flat folder, each under its base name.

    Nothing else in the archive is extracted: no links, no folders, no other files.

    Args:
        path: the archive.
        members: paths in the archive; a file at another path is extracted if it has the same base name.
        folder: folder to create, which must not exist; it is created even if the archive contains none of the files.
        progress: called with the number of compressed bytes read.

    Raises:
        UserError: the archive is damaged or cannot be read, or the folder cannot be written.
    """
    names = {PurePosixPath(member).name for member in members}
    with (
        as_user_error(f"reading {path}"),
        path.open("rb") as file,
        atomic_folder(folder) as temporary,
        damage_as_user_error(path),
    ):
        total = path.stat().st_size
        for member, content in open_members(file, path, lambda member: PurePosixPath(member).name in names):
            target = temporary / PurePosixPath(member).name
            # A file at a requested path replaces one that only has the same base name.
            if content is not None and (member.removeprefix("./") in members or not target.exists()):
                with target.open("wb") as output:
                    while chunk := content.read(CHUNK_BYTES):
                        output.write(chunk)
                        progress(f"extract {path.name}", file.tell(), total)


def open_members(file: IO[bytes], path: Path, wanted: Callable[[str], bool]) -> Generator[tuple[str, IO[bytes] | None]]:
    """Yield path and content of the files in an open archive whose path is wanted, each to be read before the next.

    A link has no content: it is that of another file, and the archive may be compressed.
    """
    with decompressed(file, path.name) as content:
        head = content.read(512)
        content.seek(0)
        if archive_of(head, path.name) == "zip":
            with zipfile.ZipFile(content) as archive:
                if min((member.header_offset for member in archive.infolist()), default=0):
                    raise zipfile.BadZipFile("something precedes it, perhaps another archive")
                for member in archive.infolist():
                    if not member.is_dir() and wanted(member.filename):
                        is_link = stat.S_ISLNK(member.external_attr >> 16)  # its content is a path
                        yield member.filename, None if is_link else archive.open(member)
            return
        # Decompressed here, since tarfile stops before the gzip checksum at the end of the stream.
        kept = _Kept(content)
        with tarfile.open(fileobj=cast(Any, kept), mode="r|") as archive:
            for entry in archive:
                if (entry.isreg() or entry.islnk() or entry.issym()) and wanted(entry.name):
                    yield entry.name, archive.extractfile(entry) if entry.isreg() else None
            # a missing or damaged header ends the loop too; the end is blocks of zeros, with nothing after them
            end = kept.since(archive.offset)
            if len(end) < tarfile.BLOCKSIZE or end.strip(b"\0"):
                raise tarfile.ReadError("its end is missing")
            while rest := content.read(CHUNK_BYTES):
                if rest.strip(b"\0"):
                    raise tarfile.ReadError("something follows its end")
