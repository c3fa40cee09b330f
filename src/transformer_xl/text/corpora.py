"""Where text comes from: corpora known by name, and one's own files and folders.

Each gives a `TextSource`: per split the documents, named and measured at once, but read only when gone through. A
further named corpus is a function that returns a `TextSource`, and a line in `CORPORA`.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformer_xl.config import UserError, nearest
from transformer_xl.files import explained
from transformer_xl.text.token_store import SPLITS, Document, SplitName

DEFAULT_FRACTION = 0.05
"""Share of one's own text kept for valid, and as much for test, unless told otherwise."""

_CHUNK_BYTES = 2**20
_STDLIB_SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class TextSource:
    """Text ready to be turned into a corpus."""

    name: str
    """What to call the corpus."""
    description: str
    """Where the text comes from and how it was split, in words."""
    splits: Mapping[SplitName, Iterable[Document]]
    """Documents of each split; what is not given is not there."""


def find_text(
    sources: Sequence[str],
    *,
    given: Mapping[SplitName, Sequence[str]],
    valid_fraction: float | None = None,
    test_fraction: float | None = None,
) -> TextSource:
    """The text that a command line names.

    Args:
        sources: one name of `CORPORA`, or files and folders whose joined text is cut into the three splits, in order.
        given: files and folders of each split, instead of `sources`.
        valid_fraction: share of the joined text, in [0, 1), that becomes valid; none: `DEFAULT_FRACTION`.
        test_fraction: the same for test, the end of the text.

    Raises:
        UserError: something is missing, unreadable, empty, unknown, out of range or contradictory.
    """
    given = {split: given[split] for split in SPLITS if given.get(split)}
    fractions = (valid_fraction, test_fraction) != (None, None)
    if sources and given:
        raise UserError(
            f"both files to cut ({_listed(sources)}) and --{next(iter(given))} were given; "
            "write --train before the files to train on, or leave the split options out"
        )
    if given:
        if fractions:
            raise UserError("fractions cut one text into splits, but the splits are given; leave the fractions out")
        return _from_splits(given)
    if not sources:
        raise UserError(f"no text was given; name files, folders, --train FILE, or a corpus ({', '.join(CORPORA)})")
    named = [source for source in sources if source in CORPORA]
    if not named:
        return _from_cut(
            sources,
            DEFAULT_FRACTION if valid_fraction is None else valid_fraction,
            DEFAULT_FRACTION if test_fraction is None else test_fraction,
        )
    if len(sources) > 1:
        raise UserError(
            f"the corpus {named[0]} stands alone, but {len(sources)} sources were given; leave the others out, or "
            f"write ./{named[0]} for a file of that name"
        )
    if fractions:
        raise UserError(f"the splits of {named[0]} are fixed; leave the fractions out")
    return CORPORA[named[0]]()


def python_stdlib() -> TextSource:
    """The source of Python's own standard library, its tests left out: real text found on any machine.

    Each file goes whole to a split drawn from the sha256 of its path (train 90%, valid 5%, test 5%), so that a file
    stays in its split from one Python version to the next. Within a split files stand in the order of that hash: in
    the order of paths, hundreds of look-alike files (encodings, idlelib) would follow one another, and rows of a
    short training would see little else.

    Raises:
        UserError: this Python came without its library's source.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    parts = [part for part in _walk(folder, skip=_STDLIB_SKIPPED) if part.path.suffix == ".py"]
    splits: dict[SplitName, list[Document]] = {split: [] for split in SPLITS}
    documents = (Document(part.path.relative_to(folder).as_posix(), part, part.stop - part.start) for part in parts)
    for document in sorted(documents, key=lambda document: _drawn(document.name)):
        splits[_split_of(_drawn(document.name))].append(document)
    if not all(splits.values()):
        raise UserError(
            f"this Python's library holds too little source to split ({len(parts)} files in {folder}); give files of "
            "your own to 'txl prepare'"
        )
    return TextSource(
        "python-stdlib",
        f"standard library of Python {platform.python_version()} without its tests, split by the sha256 of each path",
        splits,
    )


CORPORA: dict[str, Callable[[], TextSource]] = {"python-stdlib": python_stdlib}


@dataclass(frozen=True)
class FilePart:
    """The bytes `start` to `stop` of a file, in pieces; the file is opened only while they are gone through."""

    path: Path
    start: int
    stop: int

    def __iter__(self) -> Iterator[bytes]:
        """Reads the part.

        Raises:
            UserError: the file cannot be read, or has become shorter.
        """
        with explained(f"reading {self.path}"), self.path.open("rb", buffering=0) as file:
            file.seek(self.start)
            left = self.stop - self.start
            while left:
                chunk = file.read(min(left, _CHUNK_BYTES))
                if not chunk:
                    raise UserError(
                        f"{self.path} became shorter while it was read; try again once it no longer changes"
                    )
                left -= len(chunk)
                yield chunk


def _from_splits(given: Mapping[SplitName, Sequence[str]]) -> TextSource:
    if "train" not in given:
        raise UserError(f"--{next(iter(given))} was given without --train; add --train with the files to train on")
    parts = {split: _parts_of(sources, f"--{split}: ") for split, sources in given.items()}
    return TextSource(
        _name_of(given["train"]),
        "; ".join(f"{split}: {_listed(sources)}" for split, sources in given.items()),
        {split: _documents(of) for split, of in parts.items()},
    )


def _from_cut(sources: Sequence[str], valid_fraction: float, test_fraction: float) -> TextSource:
    for name, fraction in (("valid", valid_fraction), ("test", test_fraction)):
        if not 0 <= fraction < 1:
            raise UserError(f"--{name}-fraction {fraction:g} is not a share of the text; wanted 0 up to, not with, 1")
    if valid_fraction + test_fraction >= 1:
        raise UserError(
            f"--valid-fraction {valid_fraction:g} and --test-fraction {test_fraction:g} leave nothing to train on; "
            "wanted a sum below 1"
        )
    parts = _parts_of(sources, "")
    total = sum(part.stop for part in parts)
    lengths: dict[SplitName, int] = {"valid": round(total * valid_fraction), "test": round(total * test_fraction)}
    lengths["train"] = total - lengths["valid"] - lengths["test"]
    wanted = {"train": 1.0, "valid": valid_fraction, "test": test_fraction}
    splits: dict[SplitName, list[Document]] = {}
    start = 0
    for split in SPLITS:
        if wanted[split] and lengths[split] <= 0:
            raise UserError(
                f"the text is too short to split: {total:,} bytes leave {split} empty; give more text, or other "
                "--valid-fraction and --test-fraction (0 for none)"
            )
        if lengths[split]:
            splits[split] = _documents(_between(parts, start, start + lengths[split]))
        start += lengths[split]
    shares = f"valid {valid_fraction:g} and test {test_fraction:g} of its bytes cut from its end"
    return TextSource(_name_of(sources), f"{_listed(sources)}; {shares}", splits)


def _between(parts: Iterable[FilePart], start: int, stop: int) -> Iterator[FilePart]:
    """What lies between two places of the joined text of whole files."""
    offset = 0
    for part in parts:
        first, last = max(start - offset, 0), min(stop - offset, part.stop)
        if first < last:
            yield replace(part, start=first, stop=last)
        offset += part.stop


def _documents(parts: Iterable[FilePart]) -> list[Document]:
    return [Document(str(part.path), part, part.stop - part.start) for part in parts]


def _parts_of(sources: Sequence[str], option: str) -> list[FilePart]:
    return [part for source in sources for part in _parts_of_one(source, option)]


def _parts_of_one(source: str, option: str) -> list[FilePart]:
    if not source:
        raise UserError(f"{option}an empty name was given; name a file or folder ('.' is the current one)")
    path = Path(source)
    with explained(f"{option}reading {source}"):
        if not path.exists():
            known = "" if option else f" nor a known corpus{nearest(source, CORPORA)}"
            raise UserError(
                f"{option}'{source}' is neither a file nor a folder{known}; check the spelling (known corpora: "
                f"{', '.join(CORPORA)})"
            )
        status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        parts = _walk(path)
        if not parts:
            raise UserError(
                f"{option}the folder {source} holds no text (hidden and empty files are left out); name another"
            )
        return parts
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{option}{source} is not a regular file; write its text to a file and name that")
    if not status.st_size:
        raise UserError(f"{option}the file {source} is empty; leave it out, or name one that holds text")
    return [FilePart(path, 0, status.st_size)]


def _walk(folder: Path, skip: frozenset[str] = frozenset()) -> list[FilePart]:
    """The files in a folder that hold anything, sorted by path; nothing hidden, and no link to a folder is followed."""
    found: list[tuple[str, FilePart]] = []
    with explained(f"reading {folder}"):
        for place, folders, files in os.walk(folder, onerror=_refuse):
            # os.walk goes only where this list still leads.
            folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
            for name in files:
                path = Path(place, name)
                if not name.startswith(".") and path.is_file() and (size := path.stat().st_size):
                    found.append((path.relative_to(folder).as_posix(), FilePart(path, 0, size)))
    return [part for _, part in sorted(found, key=lambda item: item[0])]


def _refuse(error: OSError) -> None:
    with explained(f"reading {error.filename}"):
        raise error


def _drawn(name: str) -> float:
    """A number from 0 to 1 that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "big") / 2**64


def _split_of(drawn: float) -> SplitName:
    return "train" if drawn < 0.9 else "valid" if drawn < 0.95 else "test"


def _name_of(sources: Sequence[str]) -> str:
    path = Path(os.path.abspath(sources[0]))
    return path.name if path.is_dir() else path.stem


def _listed(sources: Sequence[str]) -> str:
    rest = f" and {len(sources) - 3:,} more" if len(sources) > 3 else ""
    return ", ".join(os.path.abspath(source) for source in sources[:3]) + rest
