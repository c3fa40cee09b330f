"""Downloads the files of named data sets into a cache folder: tries several mirrors, resumes and verifies checksums.

The transfer uses the standard library. The package pooch verifies checksums but has neither mirrors nor resuming (the
HTTP header `Range`), so almost all of this code would remain.
"""

from __future__ import annotations

from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from transformer_xl import __version__
from transformer_xl.config import UserError
from transformer_xl.files import as_user_error
from transformer_xl.text.sources.archives import FileDigest, Progress, compute_digest, no_progress, raw_chunks

OWN_FILES_COMMAND = "txl prepare --train FILE --valid FILE --test FILE"
"""How to use files that are not those of a named data set, for messages."""

_TIMEOUT_SECONDS = 60.0  # to connect, and between two reads
_ATTEMPTS = 5  # per mirror; each resumes the previous one
_CHUNK_BYTES = 2**18


@dataclass(frozen=True)
class RemoteFile:
    """A file that can be downloaded from several URLs."""

    name: str
    """File name in the cache."""
    urls: tuple[str, ...]
    """Mirrors, tried in this order."""
    digest: FileDigest
    """Expected length and checksum."""


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
    failures: list[str] = []
    if target.is_file():
        actual = compute_digest(raw_chunks(target), file.digest, file.name, progress)
        if actual == file.digest:
            return target
        failures.append(f"{target} is another file, {actual}")
    with as_user_error(f"writing {target}"):
        folder.mkdir(parents=True, exist_ok=True)
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
