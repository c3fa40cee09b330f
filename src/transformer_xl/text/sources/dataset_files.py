"""Downloads the files of a named data set, or finds them among the user's files, and verifies them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

from transformer_xl.config import UserError
from transformer_xl.files import as_user_error, atomic_file
from transformer_xl.text.sources.archives import (
    COMPRESSED_SUFFIXES,
    FileRange,
    Progress,
    checksum,
    extract_from_tar,
    file_checksum,
    is_archive,
    no_progress,
    with_progress,
    zip_members,
)
from transformer_xl.text.sources.download import RemoteFile, cache_folder, download_file


@dataclass(frozen=True)
class TextFile:
    """One text of a named data set."""

    path: str
    """Path in the archive; the base name is the file name elsewhere."""
    num_bytes: int | None = None
    """Length in bytes, or None if unknown."""
    checksum: str | None = None
    """Algorithm, colon and hex digits, or None if unknown."""
    other_names: tuple[str, ...] = ()
    """Other common file names for this text."""
    urls: tuple[str, ...] = ()
    """URLs of the file outside the archive; empty if only the archive can be downloaded."""

    @property
    def name(self) -> str:
        """Base name of the path."""
        return PurePosixPath(self.path).name

    @property
    def remote(self) -> RemoteFile | None:
        """The separate download of this file, or None if only the archive can be downloaded."""
        if not self.urls:
            return None
        assert self.num_bytes is not None
        assert self.checksum is not None
        return RemoteFile(self.name, self.urls, self.num_bytes, self.checksum)


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
    if data_dir is None:
        return _download(dataset, archive, texts, progress)
    return _Search(dataset, archive, tuple(texts), data_dir, progress).run()


def plain_file(text: FileRange, name: str) -> Path:
    """Return the path of a text as a plain file; a compressed one is decompressed into the cache as `name`.

    Raises:
        UserError: a file cannot be read or written.
    """
    if not text.is_compressed:
        return text.path
    target = _extracted_folder() / name
    with as_user_error(f"writing {target}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(target) as temporary, temporary.open("wb") as file:
            for chunk in text:
                file.write(chunk)
    return target


def _extracted_folder() -> Path:
    return cache_folder() / "unpacked"


def _download(
    dataset: str, archive: RemoteFile | None, texts: Iterable[TextFile], progress: Progress
) -> dict[TextFile, FileRange]:
    found: dict[TextFile, FileRange] = {}
    archived: list[TextFile] = []
    for text in texts:
        if text.remote:
            found[text] = FileRange(download_file(text.remote, cache_folder(), progress))
        else:
            archived.append(text)
    if archived:
        assert archive is not None
        path = download_file(archive, cache_folder(), progress)
        in_archive = _Archive(dataset, path, tuple(archived), progress, archive.checksum).found
        assert len(in_archive) == len(archived), "the archive lacks a text"
        found |= in_archive
    return found


@dataclass(frozen=True)
class _Archive:
    """A zip or tar archive that is searched for texts."""

    dataset: str
    path: Path
    texts: tuple[TextFile, ...]
    progress: Progress
    known_checksum: str | None = None

    @cached_property
    def found(self) -> dict[TextFile, FileRange]:
        """The texts in the archive; those of a tar archive are extracted into the cache once."""
        if self.path.suffix.lower() == ".zip":
            members = zip_members(self.path)
            member_of = {text: _best_member(text, members) for text in self.texts}
            return {text: FileRange(self.path, member=member) for text, member in member_of.items() if member}
        digest = self.known_checksum or file_checksum(self.path, "sha256:", self.progress)
        folder = _extracted_folder() / f"{self.dataset}-{digest.partition(':')[2][:16]}"
        if not folder.exists():
            extract_from_tar(self.path, [text.path for text in self.texts], folder, self.progress)
        return {text: FileRange(folder / text.name) for text in self.texts if (folder / text.name).exists()}


def _best_member(text: TextFile, members: Iterable[str]) -> str | None:
    """Return the member with the path of this text, else one with its base name, or None."""
    candidates = [member for member in members if PurePosixPath(member).name == text.name]
    return min(candidates, key=lambda member: member != text.path, default=None)


@dataclass(frozen=True)
class _Search:
    """Searches `data_dir` for texts: as files, in the distributed archive, and in any other archive there."""

    dataset: str
    archive: RemoteFile | None
    texts: tuple[TextFile, ...]
    data_dir: Path
    progress: Progress
    found: dict[TextFile, FileRange] = field(default_factory=dict)

    def run(self) -> dict[TextFile, FileRange]:
        """Return each text, after verifying its size and checksum where they are known."""
        with as_user_error(f"reading {self.data_dir}"):
            if not self.data_dir.exists():
                raise UserError(
                    f"--data-dir {self.data_dir}: no such file or folder; name the one that contains {self.dataset}"
                )
            entries = [self.data_dir] if self.data_dir.is_file() else sorted(self.data_dir.iterdir())
        self.found.update(self._loose_files(entries))
        checked: set[TextFile] = set()
        for path in sorted(filter(is_archive, entries), key=lambda path: not self._is_distributed(path)):
            missing = tuple(text for text in self.texts if text not in self.found)
            if missing:
                known = self._check_archive(path)
                in_archive = _Archive(self.dataset, path, missing, self.progress, known).found
                self.found.update(in_archive)
                checked |= in_archive.keys() if known else set()
        self._refuse_missing()
        for text in self.texts:
            if text not in checked:
                self._check(text, self.found[text])
        return self.found

    def _is_distributed(self, path: Path) -> bool:
        return self.archive is not None and path.name == self.archive.name

    def _loose_files(self, entries: Sequence[Path]) -> Iterator[tuple[TextFile, FileRange]]:
        names = {path.name: path for path in entries}
        for text in self.texts:
            if self.data_dir.is_file():
                paths = [names[name] for name in _with_suffixes((text.name, *text.other_names)) if name in names]
            else:
                parts = PurePosixPath(text.path).parts
                tails = ["/".join(parts[start:]) for start in range(len(parts))]
                paths = [self.data_dir / name for name in _with_suffixes((*tails, *text.other_names))]
            with as_user_error(f"reading {self.data_dir}"):
                path = next((path for path in paths if path.is_file()), None)
            if path:
                yield text, FileRange(path)

    def _check_archive(self, path: Path) -> str | None:
        """Return the verified checksum of the distributed archive, or None for another archive."""
        if self.archive is None or not self._is_distributed(path):
            return None
        with as_user_error(f"reading {path}"):
            size = path.stat().st_size
        if size != self.archive.num_bytes:
            raise UserError(f"{path}: {size:,} bytes long, expected {self.archive.num_bytes:,}; get it again")
        actual = file_checksum(path, self.archive.checksum, self.progress)
        if actual != self.archive.checksum:
            raise UserError(
                f"{path}: {_with_space(actual)}, expected {_with_space(self.archive.checksum)}; get it again, or use "
                "its contents as your own text: extract it, and run 'txl prepare --train FILE --valid FILE --test FILE'"
            )
        return actual

    def _refuse_missing(self) -> None:
        missing = [text.name for text in self.texts if text not in self.found]
        if not missing:
            return
        names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        archive = f"{self.archive.name} or " if self.archive and len(missing) == len(self.texts) else ""
        raise UserError(
            f"--data-dir {self.data_dir}: no {archive}{names} there for {self.dataset} (nor with .gz, .bz2 or .xz, nor "
            "in a zip or tar archive); name the folder that contains them, or leave --data-dir out to download"
        )

    def _check(self, text: TextFile, content: FileRange) -> None:
        if text.num_bytes is None and text.checksum is None:
            return
        size = 0

        def measured_chunks() -> Iterator[bytes]:
            nonlocal size
            for chunk in content:
                size += len(chunk)
                yield chunk

        chunks = with_progress(measured_chunks(), self.progress, f"check {text.name}", text.num_bytes or 0)
        actual = checksum(chunks, text.checksum or "sha256:")
        if text.num_bytes is not None and size != text.num_bytes:
            problem = f"{size:,} bytes long, expected {text.num_bytes:,}"
        elif text.checksum is not None and actual != text.checksum:
            problem = f"{_with_space(actual)}, expected {_with_space(text.checksum)}"
        else:
            return
        decompressed = " decompressed" if content.is_compressed else ""
        command = (
            "extract it, and txl prepare --train FILE" if content.member else f"txl prepare --train {content.path}"
        )
        raise UserError(
            f"{content.name}:{decompressed} {problem} for {self.dataset}; get it again, or use it as your own text: "
            f"{command}"
        )


def _with_suffixes(names: Iterable[str]) -> list[str]:
    """Return the names, followed by the names with each suffix of compressed files."""
    return [name + suffix for suffix in ("", *COMPRESSED_SUFFIXES) for name in names]


def _with_space(checksum: str) -> str:
    return checksum.replace(":", " ")
