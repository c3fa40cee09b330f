"""The files of a named corpus: downloaded, or found among files that the user already has, and checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

from transformer_xl.config import UserError
from transformer_xl.files import as_user_error, atomic_file
from transformer_xl.text.sources.archives import (
    PACKED,
    FilePart,
    Progress,
    checksum,
    is_archive,
    no_progress,
    raw_chunks,
    unpack_tar,
    with_progress,
    zip_members,
)
from transformer_xl.text.sources.download import RemoteFile, cache_folder, download_file


@dataclass(frozen=True)
class TextFile:
    """One text of a named corpus."""

    path: str
    """Where it is in the archive; its last name is what it is called elsewhere."""
    num_bytes: int | None = None
    """None: not known."""
    checksum: str | None = None
    """Algorithm and hex digits; none: not known."""
    also: tuple[str, ...] = ()
    """Other names it goes by."""
    urls: tuple[str, ...] = ()
    """Where it is to be had by itself; none: in the archive only."""

    @property
    def name(self) -> str:
        """The last part of its path."""
        return PurePosixPath(self.path).name

    @property
    def remote(self) -> RemoteFile | None:
        """What to download to have it by itself."""
        if not self.urls:
            return None
        assert self.num_bytes is not None
        assert self.checksum is not None
        return RemoteFile(self.name, self.urls, self.num_bytes, self.checksum)


@dataclass(frozen=True)
class Origin:
    """From where a named corpus is taken, and who is told how far that is."""

    source: Path | None = None
    """A file or folder of the user's; none: the network, and what was downloaded before."""
    progress: Progress = no_progress


ANYWHERE = Origin()


def find_files(
    corpus: str, archive: RemoteFile | None, texts: Sequence[TextFile], origin: Origin = ANYWHERE
) -> dict[TextFile, FilePart]:
    """Each text of a corpus, whole, where it can be read.

    Args:
        corpus: its name, for messages.
        archive: the archive it is distributed in.
        texts: what is wanted of it.
        origin: from where.

    Raises:
        UserError: one is missing, damaged, another than it should be, or cannot be downloaded.
    """
    if origin.source is None:
        return _downloaded(corpus, archive, texts, origin.progress)
    return _Search(corpus, archive, tuple(texts), origin.source, origin.progress).run()


def plain_file(part: FilePart, text: TextFile) -> Path:
    """The path of a whole text that is read as a plain file: unpacked into the cache, if it is packed.

    Raises:
        UserError: it cannot be read or written.
    """
    if not part.packed:
        return part.path
    target = _unpacked_folder() / text.name
    with as_user_error(f"writing {target}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(target) as aside, aside.open("wb") as file:
            for chunk in part:
                file.write(chunk)
    return target


def _unpacked_folder() -> Path:
    return cache_folder() / "unpacked"


def _downloaded(
    corpus: str, archive: RemoteFile | None, texts: Iterable[TextFile], progress: Progress
) -> dict[TextFile, FilePart]:
    found: dict[TextFile, FilePart] = {}
    rest: list[TextFile] = []
    for text in texts:
        if text.remote:
            found[text] = FilePart(download_file(text.remote, cache_folder(), progress))
        else:
            rest.append(text)
    if rest:
        assert archive is not None
        path = download_file(archive, cache_folder(), progress)
        found |= _Archive(corpus, path, tuple(rest), progress, archive.checksum).parts
    assert len(found) == len(rest) + len([text for text in texts if text.remote]), "the archive lacks a text"
    return found


@dataclass(frozen=True)
class _Archive:
    """What a zip or tar archive holds of the wanted texts."""

    corpus: str
    path: Path
    texts: tuple[TextFile, ...]
    progress: Progress
    known_checksum: str | None = None

    @cached_property
    def parts(self) -> dict[TextFile, FilePart]:
        """The texts it holds; those of a tar are unpacked into the cache, once for each archive."""
        if self.path.suffix.lower() == ".zip":
            members = zip_members(self.path)
            chosen = {text: _best(text, members) for text in self.texts}
            return {text: FilePart(self.path, member=member) for text, member in chosen.items() if member}
        total = self.path.stat().st_size
        chunks = with_progress(raw_chunks(self.path), self.progress, f"check {self.path.name}", total)
        digits = (self.known_checksum or checksum(chunks, "sha256:")).partition(":")[2]
        folder = _unpacked_folder() / f"{self.corpus}-{digits[:16]}"
        if not folder.exists():
            unpack_tar(self.path, [text.path for text in self.texts], folder, self.progress)
        return {text: FilePart(folder / text.name) for text in self.texts if (folder / text.name).exists()}


def _best(text: TextFile, members: Iterable[str]) -> str | None:
    """The member that is this text: the one at its path, else one of its name."""
    named = [member for member in members if PurePosixPath(member).name == text.name]
    return min(named, key=lambda member: member != text.path, default=None)


@dataclass(frozen=True)
class _Search:
    """A search for texts among the user's files: by themselves, in their archive, in any archive beside."""

    corpus: str
    archive: RemoteFile | None
    texts: tuple[TextFile, ...]
    source: Path
    progress: Progress
    found: dict[TextFile, FilePart] = field(default_factory=dict)

    def run(self) -> dict[TextFile, FilePart]:
        """Each text, checked as far as its size and checksum are known."""
        with as_user_error(f"reading {self.source}"):
            if not self.source.exists():
                raise UserError(
                    f"--source {self.source}: no such file or folder; name the one that holds {self.corpus}"
                )
            beside = [self.source] if self.source.is_file() else sorted(self.source.iterdir())
        self.found.update(self._loose(beside))
        checked: set[TextFile] = set()
        for path in sorted(filter(is_archive, beside), key=lambda path: not self._is_distributed(path)):
            rest = tuple(text for text in self.texts if text not in self.found)
            if rest:
                known = self._check_archive(path)
                parts = _Archive(self.corpus, path, rest, self.progress, known).parts
                self.found.update(parts)
                checked |= parts.keys() if known else set()
        self._refuse_missing()
        for text in self.texts:
            if text not in checked:
                self._check(text, self.found[text])
        return self.found

    def _is_distributed(self, path: Path) -> bool:
        return self.archive is not None and path.name == self.archive.name

    def _loose(self, beside: Sequence[Path]) -> Iterator[tuple[TextFile, FilePart]]:
        names = {path.name: path for path in beside}
        for text in self.texts:
            if self.source.is_file():
                paths = [names[name] for name in _packed_names((text.name, *text.also)) if name in names]
            else:
                tails = ["/".join(PurePosixPath(text.path).parts[place:]) for place in range(text.path.count("/") + 1)]
                paths = [self.source / name for name in _packed_names((*tails, *text.also))]
            with as_user_error(f"reading {self.source}"):
                path = next((path for path in paths if path.is_file()), None)
            if path:
                yield text, FilePart(path)

    def _check_archive(self, path: Path) -> str | None:
        """The checksum of the distributed archive, once it has been found right; none: another archive."""
        if self.archive is None or not self._is_distributed(path):
            return None
        with as_user_error(f"reading {path}"):
            size = path.stat().st_size
        if size != self.archive.num_bytes:
            raise UserError(f"{path}: {size:,} bytes long, wanted {self.archive.num_bytes:,}; get it again")
        chunks = with_progress(raw_chunks(path), self.progress, f"check {path.name}", size)
        found = checksum(chunks, self.archive.checksum)
        if found != self.archive.checksum:
            raise UserError(
                f"{path}: {_words(found)}, wanted {_words(self.archive.checksum)}; get it again, or use what is in it "
                "as text of your own: unpack it, and 'txl prepare --train FILE --valid FILE --test FILE'"
            )
        return found

    def _refuse_missing(self) -> None:
        missing = [text.name for text in self.texts if text not in self.found]
        if not missing:
            return
        names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        archive = f"{self.archive.name} or " if self.archive and len(missing) == len(self.texts) else ""
        raise UserError(
            f"--source {self.source}: no {archive}{names} there for {self.corpus} (nor with .gz, .bz2 or .xz, nor in "
            "a zip or tar archive); name the folder that holds them, or leave --source out to download"
        )

    def _check(self, text: TextFile, part: FilePart) -> None:
        if text.num_bytes is None and text.checksum is None:
            return
        what = f"check {text.name}"
        size = 0
        like = text.checksum or "sha256:"

        def counted() -> Iterator[bytes]:
            nonlocal size
            for chunk in part:
                size += len(chunk)
                yield chunk

        found = checksum(with_progress(counted(), self.progress, what, text.num_bytes or 0), like)
        if text.num_bytes is not None and size != text.num_bytes:
            wrong = f"{size:,} bytes long, wanted {text.num_bytes:,}"
        elif text.checksum is not None and found != text.checksum:
            wrong = f"{_words(found)}, wanted {_words(text.checksum)}"
        else:
            return
        unpacked = " unpacked" if part.packed else ""
        own = "unpack it, and txl prepare --train FILE" if part.member else f"txl prepare --train {part.path}"
        raise UserError(
            f"{part.name}:{unpacked} {wrong} for {self.corpus}; get it again, or use it as text of your own: {own}"
        )


def _packed_names(names: Iterable[str]) -> list[str]:
    """Each name, then each as it is when packed."""
    return [name + ending for ending in ("", *PACKED) for name in names]


def _words(checksum: str) -> str:
    return checksum.replace(":", " ")
