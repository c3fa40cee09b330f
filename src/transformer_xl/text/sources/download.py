"""Finds the files of a named data set among the user's files, or downloads them into a cache folder; verifies them.

A download tries several mirrors, and is resumed. One process at a time downloads into a cache folder or extracts there.

The transfer uses the standard library. The package pooch verifies checksums but has neither mirrors nor resuming (the
HTTP header `Range`), so almost all of this code would remain.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path, PurePosixPath
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from transformer_xl import __version__
from transformer_xl.config import UserError
from transformer_xl.files import as_user_error, cache_folder, lock_folder
from transformer_xl.text.sources.archives import (
    COMPRESSED_SUFFIXES,
    FileDigest,
    FileRange,
    Progress,
    compute_digest,
    extract,
    no_progress,
    raw_chunks,
)

OWN_FILES_COMMAND = "txl prepare --train FILE --valid FILE --test FILE"
"""How to use files that are not those of a named data set, for messages."""

_TIMEOUT_SECONDS = 60.0  # to connect, and between two reads
_ATTEMPTS = 5  # per mirror; each resumes the previous one
_CHUNK_BYTES = 2**18
_WAIT_SECONDS = 3600.0  # for another process
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class RemoteFile:
    """A file that can be downloaded from several URLs."""

    name: str
    """File name in the cache."""
    urls: tuple[str, ...]
    """Mirrors, tried in this order."""
    digest: FileDigest
    """Expected length and checksum."""


@dataclass(frozen=True)
class TextFile:
    """One text of a named data set."""

    path: str
    """Path in the archive; outside the archive, the file has the base name of this path."""
    digest: FileDigest | None = None
    """Length and checksum, or None if unknown."""
    other_names: tuple[str, ...] = ()
    """Other common file names for this text."""
    urls: tuple[str, ...] = ()
    """URLs that serve this file alone; empty if only the archive can be downloaded."""

    @property
    def name(self) -> str:
        """Base name of the path."""
        return PurePosixPath(self.path).name

    @property
    def remote(self) -> RemoteFile | None:
        """The separate download of this file, or None if only the archive can be downloaded."""
        return RemoteFile(self.name, self.urls, self.digest) if self.urls and self.digest else None


def find_files(
    dataset: str,
    archive: RemoteFile,
    texts: Sequence[TextFile],
    data_dir: Path | None = None,
    progress: Progress = no_progress,
) -> dict[TextFile, FileRange]:
    """Find or download the texts of a data set, and verify them.

    Args:
        dataset: name of the data set, for messages.
        archive: the archive in which the data set is distributed.
        texts: the texts to find.
        data_dir: a file or folder that contains the texts, or None to use earlier downloads or the network.
        progress: called while files are downloaded, extracted and checked.

    Returns:
        The range of each text, which covers the whole text.

    Raises:
        UserError: a file is missing, damaged, has the wrong checksum, or cannot be downloaded.
    """
    if data_dir is not None:
        return _search(dataset, archive, texts, data_dir, progress)
    found = {text: FileRange(download_file(text.remote, cache_folder(), progress)) for text in texts if text.remote}
    archived = [text for text in texts if text not in found]
    if archived:
        path = download_file(archive, cache_folder(), progress)
        found |= _texts_in_archive(path, archived, dataset, archive, progress)
    assert found.keys() == set(texts), "the archive lacks a text"
    return found


def _texts_in_archive(
    path: Path, texts: Iterable[TextFile], dataset: str, archive: RemoteFile, progress: Progress
) -> dict[TextFile, FileRange]:
    """Return those of the texts that a verified archive contains; they are extracted into the cache once.

    Args:
        path: the archive.
        texts: the texts to look for, by their path or else their base name.
        dataset: name of the data set, for the folder in the cache.
        archive: the archive as it is distributed.
        progress: called while the archive is extracted.
    """
    folder = cache_folder() / "unpacked" / f"{dataset}-{archive.digest.checksum.partition(':')[2][:16]}"
    if not folder.exists():
        with _alone(cache_folder(), progress):
            if not folder.exists():
                extract(path, [text.path for text in texts], folder, progress)
    return {text: FileRange(folder / text.name) for text in texts if (folder / text.name).exists()}


def _search(
    dataset: str, archive: RemoteFile, texts: Sequence[TextFile], data_dir: Path, progress: Progress
) -> dict[TextFile, FileRange]:
    """Find texts in `data_dir`, as files or in the distributed archive, and verify their contents."""

    def verify(chunks: Iterable[bytes], expected: FileDigest, path: Path) -> None:
        actual = compute_digest(chunks, expected, path.name, progress)
        if actual != expected:
            raise UserError(
                f"{path}: {actual}, expected {expected} for {dataset}; get it again, or use its texts as your own: "
                f"{OWN_FILES_COMMAND}"
            )

    with as_user_error(f"reading {data_dir}"):
        files = [data_dir] if data_dir.is_file() else sorted(data_dir.iterdir())
        found = {text: FileRange(path) for text in texts if (path := _loose_file(text, data_dir))}
    for text, content in found.items():
        if text.digest:
            verify(content, text.digest, content.path)
    missing = [text for text in texts if text not in found]
    for path in files if missing else ():
        if path.name == archive.name:
            verify(raw_chunks(path), archive.digest, path)
            found |= _texts_in_archive(path, missing, dataset, archive, progress)
    if missing := [text.name for text in texts if text not in found]:
        names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        archive_or = f"{archive.name} or " if len(missing) == len(texts) else ""
        raise UserError(
            f"data_dir={data_dir}: no {archive_or}{names} there for {dataset} (nor compressed); name the "
            "folder that contains them, or leave data_dir out to download"
        )
    return found


def _loose_file(text: TextFile, data_dir: Path) -> Path | None:
    """Return the file, compressed or not, that has one of the names of a text, if `data_dir` is or contains one."""
    parts = PurePosixPath(text.path).parts
    tails = ["/".join(parts[start:]) for start in range(len(parts))]  # such as a/b/c, b/c and c
    names = [name + suffix for suffix in ("", *COMPRESSED_SUFFIXES) for name in (*tails, *text.other_names)]
    if data_dir.is_file():
        return data_dir if data_dir.name in names else None
    return next((path for name in names if (path := data_dir / name).is_file()), None)


class _MirrorError(Exception):
    """A mirror could not provide the file, or its transfer ended early; the message is the reason."""


def download_file(file: RemoteFile, folder: Path, progress: Progress = no_progress) -> Path:
    """Download a file into a folder unless it exists there; the checksum is verified in both cases.

    An interrupted download is resumed, by this call or a later one, if the server supports it. The file gets its final
    name only after its checksum was verified.

    Args:
        file: the file to download.
        folder: destination, created if needed.
        progress: called with the number of bytes downloaded so far.

    Returns:
        The path of the file.

    Raises:
        UserError: no mirror provided the file, or it cannot be written.
    """
    target, partial = folder / file.name, folder / f".{file.name}.part"

    def found() -> FileDigest | None:
        return compute_digest(raw_chunks(target), file.digest, file.name, progress) if target.is_file() else None

    if found() == file.digest:
        return target
    with as_user_error(f"writing {target}"), _alone(folder, progress):
        actual = found()  # perhaps what another process has downloaded meanwhile
        if actual == file.digest:
            return target
        failures = [] if actual is None else [f"{target} is another file, {actual}"]
        for url in file.urls:
            try:
                _complete(url, file, partial, progress)
            except _MirrorError as error:
                failures.append(f"{urlsplit(url).netloc}: {error}")
            else:
                return partial.replace(target)
    raise UserError(
        f"{file.name} ({file.digest}) cannot be downloaded [{'; '.join(failures)}]; try again later, or download it "
        f"yourself into {folder}, or name the folder that contains it with data_dir=DIR; if the published file has "
        f"changed, use its texts as your own: {OWN_FILES_COMMAND}"
    )


@contextmanager
def _alone(folder: Path, progress: Progress) -> Iterator[None]:
    """Lock a folder, created if needed, while the block runs; another process that has locked it is waited for.

    Raises:
        UserError: that takes too long, or the file system refuses.
    """
    with as_user_error(f"writing {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    end, is_locked = time.monotonic() + _WAIT_SECONDS, False
    with ExitStack() as stack:
        while not is_locked:
            try:
                stack.enter_context(lock_folder(folder))
                is_locked = True
            except UserError as error:
                if error.__cause__ is not None or time.monotonic() > end:  # the cause: an error of the file system
                    raise
                progress("wait for another txl command", 0, 0)
                time.sleep(_POLL_SECONDS)
        yield


def _complete(url: str, file: RemoteFile, partial: Path, progress: Progress) -> None:
    """Download the missing part of the file at `partial` from one mirror, and verify the file.

    Raises:
        _MirrorError: the mirror does not answer, sends another file, or breaks the connection too often.
    """
    for _ in range(_ATTEMPTS):
        size_before = _size(partial)
        try:
            if size_before != file.digest.num_bytes:
                _resume(url, file, partial, progress)
        except _MirrorError:
            if _size(partial) <= size_before:
                raise
            continue
        actual = compute_digest(raw_chunks(partial), file.digest, file.name, progress)
        if actual == file.digest:
            return
        partial.unlink()
        if not size_before:  # else the damage may be in the part from an earlier attempt
            raise _MirrorError(f"sends another file, {actual}")
    raise _MirrorError(f"the connection was broken {_ATTEMPTS} times")


def _resume(url: str, file: RemoteFile, partial: Path, progress: Progress) -> None:
    """Append the missing bytes to the partial file, or restart it if the server does not support ranges."""
    start = _size(partial)
    headers = {"User-Agent": f"transformer-xl/{__version__}"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        response = urlopen(Request(url, headers=headers), timeout=_TIMEOUT_SECONDS)
    except HTTPError as error:
        error.close()
        if error.code == 416:  # range not satisfiable: the partial file is longer than the file, so it is wrong
            partial.unlink(missing_ok=True)
        raise _MirrorError(f"answers {error.code} {error.reason}".rstrip()) from None
    except (OSError, HTTPException) as error:
        raise _MirrorError(str(error)) from None
    with response:
        resumed = response.status == 206  # partial content: the server supports ranges
        if resumed and not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            raise _MirrorError("answers with another part of the file than was requested")
        done = start if resumed else 0
        with partial.open("ab" if resumed else "wb") as output:
            while done <= file.digest.num_bytes and (chunk := _read(response)):
                output.write(chunk)
                done += len(chunk)
                progress(f"download {file.name}", done, file.digest.num_bytes)
    if response.length and done < file.digest.num_bytes:  # the response was truncated
        raise _MirrorError("the connection was broken")


def _read(response: HTTPResponse) -> bytes:
    """Return the next bytes, or b"" at the end; errors of the network, not those of writing, are the mirror's."""
    try:
        return response.read1(_CHUNK_BYTES)
    except (OSError, HTTPException) as error:
        raise _MirrorError(str(error)) from None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
