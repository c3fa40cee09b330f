"""Files from the network: several addresses, partial files gone on with, checksums, and one place that keeps them."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from transformer_xl import __version__
from transformer_xl.config import UserError
from transformer_xl.files import as_user_error
from transformer_xl.text.sources.archives import Progress, checksum, no_progress, raw_chunks, with_progress

if TYPE_CHECKING:
    import requests

_TIMEOUT_SECONDS = (15.0, 60.0)  # to connect; without a byte
_TRIES = 5  # at one address, each going on from where the one before was cut off
_CHUNK_BYTES = 2**18


@dataclass(frozen=True)
class RemoteFile:
    """A file that is the same at each of its addresses."""

    name: str
    """What it is kept as."""
    addresses: tuple[str, ...]
    """Tried in this order."""
    num_bytes: int
    checksum: str
    """Algorithm and hex digits, such as sha256:2b49..."""

    def __str__(self) -> str:
        """Name, size and checksum, in words."""
        return f"{self.name} ({self.num_bytes:,} bytes, {self.checksum.replace(':', ' ')})"


class _Refused(Exception):
    """Why an address did not give the file, in a few words."""


def cache_folder() -> Path:
    """Where downloads are kept: the environment variable TXL_CACHE, or else a place in the user's cache folder."""
    given = os.environ.get("TXL_CACHE")
    if given:
        return Path(given)
    import pooch

    return Path(pooch.os_cache("transformer-xl"))


def fetch(file: RemoteFile, folder: Path, progress: Progress = no_progress) -> Path:
    """The file in `folder`, downloaded unless it is there, its checksum checked each time.

    A download that was cut off is gone on with, by this call or a later one, where the server can. Nothing appears
    under the file's name before its checksum was right.

    Args:
        file: what to get.
        folder: where it is kept; made if need be.
        progress: told the bytes there are so far.

    Raises:
        UserError: no address gave it, or it cannot be written.
    """
    target = folder / file.name
    refusals: list[str] = []
    if target.is_file():
        found = _checksum_of(target, file, progress)
        if found == file.checksum:
            return target
        refusals.append(f"{target} is another file, {found.replace(':', ' ')}")
    import pooch

    pooch.get_logger().setLevel(logging.WARNING)  # it announces every download
    downloader: Any = _Mirrors(file, folder, progress, refusals)
    with as_user_error(f"writing {target}"):
        folder.mkdir(parents=True, exist_ok=True)
        pooch.retrieve(
            file.addresses[0],
            known_hash=file.checksum,
            fname=file.name,
            path=folder,
            downloader=downloader,
        )
    return target


@dataclass(frozen=True)
class _Mirrors:
    """What pooch calls to get the file: each address in turn, until one gives it."""

    file: RemoteFile
    folder: Path
    progress: Progress
    refusals: list[str]

    def __call__(self, url: str, output_file: str, pooch: object) -> None:
        partial = self.folder / f".{self.file.name}.part"
        for address in self.file.addresses:
            try:
                self._from(address, partial)
            except _Refused as refusal:
                self.refusals.append(f"{urlsplit(address).netloc}: {refusal}")
            else:
                partial.replace(output_file)
                return
        raise UserError(
            f"{self.file} cannot be downloaded [{'; '.join(self.refusals)}]; try again later, get it some other way "
            f"and put it into {self.folder}, or name the folder it is in with --source DIR"
        )

    def _from(self, address: str, partial: Path) -> None:
        """Gets the whole file, checked, from one address, going on with what there is of it."""
        for _ in range(_TRIES):
            before = _size(partial)
            cut_off = self._more_from(address, partial, before) if before != self.file.num_bytes else ""
            if cut_off:
                if _size(partial) <= before:
                    raise _Refused(cut_off)
                continue
            found = _checksum_of(partial, self.file, self.progress)
            if found == self.file.checksum:
                return
            size = _size(partial)
            partial.unlink()
            if not before:  # else what there was before may be what was wrong
                raise _Refused(f"gives another file, {size:,} bytes, {found.replace(':', ' ')}")
        raise _Refused(f"the connection was cut {_TRIES} times")

    def _more_from(self, address: str, partial: Path, start: int) -> str:
        """Gets what is missing; gives why the connection ended early, or nothing."""
        import requests
        import urllib3

        headers = {"User-Agent": f"transformer-xl/{__version__}", "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        try:
            with requests.get(address, headers=headers, timeout=_TIMEOUT_SECONDS, stream=True) as answer:
                self._keep(answer, partial, start)
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            return _reason(error)
        return ""

    def _keep(self, answer: requests.Response, partial: Path, start: int) -> None:
        if not answer.ok:
            if answer.status_code == 416:  # there is no such part: what there is cannot be the beginning
                partial.unlink(missing_ok=True)
            raise _Refused(f"answers {answer.status_code} {answer.reason}".rstrip())
        goes_on = answer.status_code == 206
        if goes_on and not answer.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            raise _Refused("answers with another part of the file than was asked for")
        done = start if goes_on else 0
        with partial.open("ab" if goes_on else "wb") as file:
            # Not decoded: a server may call a .gz file gzip-encoded, and decoded it would be another file.
            for chunk in answer.raw.stream(_CHUNK_BYTES, decode_content=False):
                file.write(chunk)
                done += len(chunk)
                self.progress(f"download {self.file.name}", done, self.file.num_bytes)
                if done > self.file.num_bytes:
                    return


def _reason(error: Exception) -> str:
    """What went wrong, without the nested names of three libraries."""
    words = str(error)
    for sign, meaning in (
        ("resolve", "no such host, or no network"),
        ("refused", "connection refused"),
        ("unreachable", "network unreachable"),
        ("certificate", "its certificate is not trusted"),
        ("proxy", "the proxy refuses"),
        ("timed out", "no answer in time"),
        ("incompleteread", "the connection was cut"),
        ("connection broken", "the connection was cut"),
        ("reset", "the connection was cut"),
    ):
        if sign in words.lower():
            return meaning
    return f"no connection ({type(error).__name__})"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _checksum_of(path: Path, file: RemoteFile, progress: Progress) -> str:
    chunks = with_progress(raw_chunks(path), progress, f"check {file.name}", _size(path))
    return checksum(chunks, file.checksum)
