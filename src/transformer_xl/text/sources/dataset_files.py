"""Downloads the files of a named data set, or finds them among the user's files, and verifies them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from transformer_xl.config import UserError
from transformer_xl.files import as_user_error, cache_folder
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
from transformer_xl.text.sources.download import OWN_FILES_COMMAND, RemoteFile, download_file


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
    archive: RemoteFile | None,
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
        assert archive is not None
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
        extract(path, [text.path for text in texts], folder, progress)
    return {text: FileRange(folder / text.name) for text in texts if (folder / text.name).exists()}


def _search(
    dataset: str, archive: RemoteFile | None, texts: Sequence[TextFile], data_dir: Path, progress: Progress
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
    for path in files if archive and missing else ():
        if archive and path.name == archive.name:
            verify(raw_chunks(path), archive.digest, path)
            found |= _texts_in_archive(path, missing, dataset, archive, progress)
    if missing := [text.name for text in texts if text not in found]:
        names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        archive_or = f"{archive.name} or " if archive and len(missing) == len(texts) else ""
        raise UserError(
            f"data_dir={data_dir}: no {archive_or}{names} there for {dataset} (nor with .gz, .bz2 or .xz); name the "
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
