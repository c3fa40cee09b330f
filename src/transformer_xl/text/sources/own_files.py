"""A user's own text: files, folders and patterns, given for each split or cut into splits."""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformer_xl.config import UserError
from transformer_xl.files import as_user_error
from transformer_xl.text.documents import SPLITS, Document, SplitName
from transformer_xl.text.sources.archives import PACKED, FilePart, is_archive
from transformer_xl.text.sources.arrays import ArrayPart
from transformer_xl.text.sources.folders import glob_files, list_files
from transformer_xl.text.sources.text_source import AS_BYTES, TextSource
from transformer_xl.text.tokenizers import TokenizerConfig

SPLIT_TOLERANCE_BYTES = 2**16
"""How far a cut is moved to fall between lines."""

Part = FilePart | ArrayPart

_SPACE = re.compile(rb"[ \t\n\v\f\r]")
_CONTINUATION = range(0x80, 0xC0)  # bytes of a UTF-8 character after its first


def given_splits(given: Mapping[SplitName, Sequence[str]], kind: str | None) -> TextSource:
    """Text whose splits are named one by one.

    Args:
        given: files, folders and patterns of each split.
        kind: the kind of vocabulary that will read it; none: numbers for .npy files, bytes for others.

    Raises:
        UserError: something is missing, unreadable, empty, or not for this kind of vocabulary.
    """
    if "train" not in given:
        raise UserError(f"--{next(iter(given))} was given without --train; add --train with the files to train on")
    parts = {split: parts_of(sources, f"--{split}: ") for split, sources in given.items()}
    tokenizer = _normal_vocabulary([part for of in parts.values() for part in of], kind)
    notes = _repeated({str(split): of for split, of in parts.items()})
    return TextSource(
        _name_of(given["train"]),
        "; ".join(f"{split}: {list_texts(sources)}" for split, sources in given.items()),
        {split: _documents(of) for split, of in parts.items()},
        tokenizer=tokenizer,
        counted=_counted(tokenizer),
        notes=notes,
    )


def cut_splits(sources: Sequence[str], fractions: Mapping[SplitName, float], kind: str | None) -> TextSource:
    """Text that is joined in the order given and cut into train, valid and test.

    A cut falls behind a line end where one is near, else behind white space, else between characters; for the
    vocabulary of integers always between sequences.

    Args:
        sources: files, folders and patterns.
        fractions: of the joined text, for valid and test, in [0, 1); what is left is train.
        kind: as `given_splits` has it.

    Raises:
        UserError: something is missing, unreadable, empty, out of range, or not for this kind of vocabulary; or the
            text is too short.
    """
    for name, fraction in fractions.items():
        if not 0 <= fraction < 1:
            raise UserError(f"--{name}-fraction {fraction:g} is not a share of the text; wanted 0 up to, not with, 1")
    if sum(fractions.values()) >= 1:
        raise UserError(
            f"--valid-fraction {fractions['valid']:g} and --test-fraction {fractions['test']:g} leave nothing to train "
            "on; wanted a sum below 1"
        )
    parts = parts_of(sources, "")
    tokenizer = _normal_vocabulary(parts, kind)
    arrays = [part for part in parts if isinstance(part, ArrayPart)]
    if arrays and len(arrays) < len(parts):
        raise UserError(
            f"{arrays[0].path} is an array, other files are text: together they cannot be cut; give --train, --valid "
            "and --test"
        )
    notes = _repeated({"the text": parts})
    text = _Joined.of(parts)
    splits: dict[SplitName, list[Document]] = {}
    start = 0
    for split, stop in text.cuts(fractions, whole_lines=tokenizer.kind == "integer").items():
        if start < stop:
            splits[split] = _documents(text.between(start, stop))
        elif split == "train" or fractions[split]:
            raise UserError(
                f"the text is too short to split: {text.size:,} {text.unit} leave {split} empty; give more text, or "
                "other --valid-fraction and --test-fraction (0 for none)"
            )
        start = stop
    shares = f"valid {fractions['valid']:g} and test {fractions['test']:g} of its {text.unit} cut from its end"
    return TextSource(
        _name_of(sources),
        f"{list_texts(sources)}; {shares}",
        splits,
        tokenizer=tokenizer,
        counted=_counted(tokenizer),
        notes=notes,
    )


@dataclass(frozen=True)
class _Joined:
    """Whole files one after another; places count bytes, or numbers where the files are arrays."""

    parts: list[Part]
    size: int

    @classmethod
    def of(cls, parts: Sequence[Part]) -> _Joined:
        measured = [part if isinstance(part, ArrayPart) else replace(part, stop=part.size()) for part in parts]
        return cls(measured, sum(part.size() for part in measured))

    @property
    def unit(self) -> str:
        return "numbers" if isinstance(self.parts[0], ArrayPart) else "bytes"

    def cuts(self, fractions: Mapping[SplitName, float], *, whole_lines: bool) -> dict[SplitName, int]:
        """Where each split ends."""
        lengths = {split: round(self.size * fractions[split]) for split in ("valid", "test")}
        train = self.size - sum(lengths.values())
        # A cut moves less than half of what follows it, so that no split is lost.
        first = self._edge(train, (lengths["valid"] or lengths["test"]) // 2, whole_lines)
        second = self._edge(train + lengths["valid"], lengths["test"] // 2, whole_lines)
        return {"train": first, "valid": max(first, second), "test": self.size}

    def _edge(self, place: int, most: int, whole_lines: bool) -> int:
        """The first good place to cut from `place` on, not much more than `most` farther."""
        offset = 0
        for part in self.parts:
            inside = place - offset
            if 0 < inside < part.size():
                if isinstance(part, ArrayPart):
                    return offset + part.row_end(inside)
                if whole_lines:
                    return offset + _line_end(part, inside)
                return offset + _near_edge(part, inside, min(most, SPLIT_TOLERANCE_BYTES))
            offset += part.size()
        return place

    def between(self, start: int, stop: int) -> Iterator[Part]:
        """What lies between two places."""
        offset = 0
        for part in self.parts:
            first, last = max(start - offset, 0), min(stop - offset, part.size())
            if first < last:
                yield replace(part, start=first, stop=last)
            offset += part.size()


def _line_end(part: FilePart, place: int) -> int:
    """The first place from `place` on that is behind a line end, or the end of the file."""
    read = place - 1
    for chunk in replace(part, start=read):
        found = chunk.find(b"\n")
        if found >= 0:
            return read + found + 1
        read += len(chunk)
    return part.size()


def _near_edge(part: FilePart, place: int, most: int) -> int:
    """The best place to cut from `place` to `place + most`, or behind the character it falls into."""
    stop = min(place + max(most, 4), part.size())
    text = b"".join(replace(part, start=place - 1, stop=stop))
    near = text[: most + 1]
    line = near.find(b"\n")
    if line >= 0:
        return place + line
    if place + most >= part.size():
        return part.size()
    space = _SPACE.search(near)
    if space:
        return place + space.start()
    for behind in range(4):
        if place + behind == part.size() or text[1 + behind] not in _CONTINUATION:
            return place + behind
    return place  # not UTF-8


def _normal_vocabulary(parts: Sequence[Part], kind: str | None) -> TokenizerConfig:
    arrays = [part for part in parts if isinstance(part, ArrayPart)]
    if not arrays:
        return TokenizerConfig(kind="integer") if kind == "integer" else AS_BYTES
    if kind not in (None, "integer") or (kind is None and len(arrays) < len(parts)):
        raise UserError(
            f"{arrays[0].path} holds numbers, not text; give --tokenizer integer, or leave it out (a pattern such as "
            "'folder/**/*.txt' takes some files only)"
        )
    return TokenizerConfig(kind="integer")


def _counted(tokenizer: TokenizerConfig) -> tuple[SplitName, ...]:
    """The range of numbers is that of the whole text; words and characters are learned from train alone."""
    return SPLITS if tokenizer.kind == "integer" else ("train",)


def _documents(parts: Iterator[Part] | Sequence[Part]) -> list[Document]:
    return [Document(part.name, part, _num_bytes(part)) for part in parts]


def _num_bytes(part: Part) -> int:
    """0 where the text would have to be read to know it."""
    return 0 if isinstance(part, ArrayPart) or (part.packed and part.stop is None) else part.size()


def parts_of(sources: Sequence[str], option: str) -> list[Part]:
    """The files that are meant, in order; `option` begins each message.

    Raises:
        UserError: one is missing, unreadable, empty, an archive or not a file.
    """
    return [_part(path, option) for source in sources for path in _paths_of(source, option)]


def _part(path: Path, option: str) -> Part:
    if is_archive(path):
        raise UserError(
            f"{option}{path} is an archive; unpack it first, or leave it out (a pattern such as 'folder/**/*.txt' "
            "takes some files only)"
        )
    if path.suffix.lower() == ".npy":
        return ArrayPart.whole(path)
    if path.suffix.lower() in PACKED:
        return FilePart(path)
    part = FilePart(path)
    return replace(part, stop=part.size())


def _paths_of(source: str, option: str) -> list[Path]:
    if not source:
        raise UserError(f"{option}an empty name was given; name a file or folder ('.' is the current one)")
    path = Path(source)
    with as_user_error(f"{option}reading {source}"):
        if not path.exists():
            return _matches(source, option)
        status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        paths = list_files(path)
        if not paths:
            raise UserError(
                f"{option}the folder {source} holds no text (hidden and empty files are left out); name another"
            )
        return paths
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{option}{source} is not a regular file; write its text to a file and name that")
    if not status.st_size:
        raise UserError(f"{option}the file {source} is empty; leave it out, or name one that holds text")
    return [path]


def _matches(pattern: str, option: str) -> list[Path]:
    if not glob.has_magic(pattern):
        raise UserError(f"{option}'{pattern}' is neither a file nor a folder; check the spelling")
    paths = glob_files(pattern)
    if not paths:
        raise UserError(f"{option}no file that holds text fits the pattern '{pattern}'; check it ('**' is any folder)")
    return paths


def _repeated(parts: Mapping[str, Sequence[Part]]) -> tuple[str, ...]:
    """A note on the files that are meant more than once, under whatever path; `parts` has them by where they go."""
    met: dict[tuple[int, int], list[tuple[str, Path]]] = {}
    for place, of in parts.items():
        for part in of:
            with as_user_error(f"reading {part.path}"):
                status = part.path.stat()
            met.setdefault((status.st_dev, status.st_ino), []).append((place, part.path))
    several = [found for found in met.values() if len(found) > 1]
    if not several:
        return ()
    places = list(dict.fromkeys(place for place, _ in several[0]))
    path, *others = dict.fromkeys(path for _, path in several[0])
    also = f" (also given as {others[0]})" if others else ""
    where = " and ".join(places) if len(places) > 1 else f"{places[0]} {len(several[0])} times"
    more = f"; files given more than once: {len(several):,}" if len(several) > 1 else ""
    return (f"{path}{also} is in {where}{more}",)


def _name_of(sources: Sequence[str]) -> str:
    """What to call the corpus: the folder's name, or the file's without its endings."""
    path = Path(os.path.abspath(sources[0]))
    if glob.has_magic(path.name) and not path.exists():
        path = next(parent for parent in path.parents if not glob.has_magic(parent.name))
    if path.is_dir():
        return path.name or "text"
    return Path(path.stem).stem if path.suffix.lower() in PACKED else path.stem


def list_texts(sources: Sequence[str]) -> str:
    """The first few of the sources, as absolute paths."""
    rest = f" and {len(sources) - 3:,} more" if len(sources) > 3 else ""
    return ", ".join(os.path.abspath(source) for source in sources[:3]) + rest
