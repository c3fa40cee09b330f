"""A user's own text: files, folders and glob patterns, or texts in memory; given for each split, or cut into splits."""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformer_xl.config import UserError
from transformer_xl.files import as_user_error
from transformer_xl.text.documents import SPLITS, Document, SplitName, TextSource
from transformer_xl.text.sources.archives import COMPRESSED_SUFFIXES, FileRange, is_archive
from transformer_xl.text.sources.arrays import ArrayRange
from transformer_xl.text.sources.folders import glob_files, list_files
from transformer_xl.text.tokenizers.config import TokenizerConfig

SPLIT_TOLERANCE_BYTES = 2**16
"""How far a split boundary is moved to fall between lines."""

_SPACE = re.compile(rb"[ \t\n\v\f\r]")
_UTF8_CONTINUATION = range(0x80, 0xC0)  # bytes of a character after its first


@dataclass(frozen=True)
class BytesRange:
    """The bytes `start` to `stop` of a text in memory."""

    text_name: str
    text: bytes
    start: int = 0
    stop: int | None = None

    is_compressed = False

    @property
    def name(self) -> str:
        """Name of the text and start, for messages."""
        return f"{self.text_name}, from byte {self.start:,} on" if self.start else self.text_name

    @property
    def known_num_bytes(self) -> int:
        """Length in bytes."""
        return self.size()

    def __iter__(self) -> Iterator[bytes]:
        """Yield the text, as one chunk."""
        yield self.text[self.start : self.stop]

    def size(self) -> int:
        """Return the length in bytes."""
        return (len(self.text) if self.stop is None else self.stop) - self.start


TextRange = FileRange | ArrayRange | BytesRange
"""Part of a text, iterated in chunks of bytes; `size()` is in the unit of `start` and `stop`: bytes, or numbers."""


def source_of_splits(
    splits: Mapping[SplitName, Sequence[TextRange]], *, name: str, description: str, kind: str | None
) -> TextSource:
    """Return text whose splits are given.

    Args:
        splits: the texts of each split, from `texts_of_paths` or in memory; there must be train.
        name: default name of the corpus.
        description: where the text comes from.
        kind: the kind of tokenizer that will encode it; None: integer for .npy files, byte for others.

    Raises:
        UserError: a text is not for this kind of tokenizer.
    """
    tokenizer = _default_tokenizer([text for texts in splits.values() for text in texts], kind)
    return TextSource(
        name,
        description,
        {split: _documents(texts) for split, texts in splits.items()},
        tokenizer=tokenizer,
        tokenizer_splits=_tokenizer_splits(tokenizer),
        notes=_note_repeated_files({str(split): texts for split, texts in splits.items()}),
    )


def cut_into_splits(
    texts: Sequence[TextRange], fractions: Mapping[SplitName, float], *, name: str, description: str, kind: str | None
) -> TextSource:
    """Join texts in the order given and cut the result into train, valid and test.

    A boundary falls after a newline if one is near, else after white space, else between characters; for an integer
    tokenizer always between sequences.

    Args:
        texts: the texts, from `texts_of_paths` or in memory.
        fractions: of the joined text, for valid and test, in [0, 1); the rest is train.
        name: default name of the corpus.
        description: where the text comes from.
        kind: as in `source_of_splits`.

    Raises:
        UserError: a text is not for this kind of tokenizer; fractions out of range; or the text is too short.
    """
    tokenizer = _default_tokenizer(texts, kind)
    arrays = [text for text in texts if isinstance(text, ArrayRange)]
    if arrays and len(arrays) < len(texts):
        raise UserError(
            f"{arrays[0].path} is an array and other files are text, so they cannot be joined and cut; give --train, "
            "--valid and --test"
        )
    notes = _note_repeated_files({"the text": texts})
    joined = _JoinedText.of(texts)
    splits: dict[SplitName, list[Document]] = {}
    start = 0
    for split, stop in joined.boundaries(fractions, whole_lines=tokenizer.kind == "integer").items():
        if start < stop:
            splits[split] = _documents(joined.between(start, stop))
        elif split == "train" or fractions[split]:
            raise UserError(
                f"the text is too short to split: {joined.size:,} {joined.unit} leave {split} empty; give more text, "
                "or other --valid-fraction and --test-fraction (0 for none)"
            )
        start = stop
    shares = f"valid {fractions['valid']:g} and test {fractions['test']:g} of its {joined.unit} cut from its end"
    return TextSource(
        name,
        f"{description}; {shares}",
        splits,
        tokenizer=tokenizer,
        tokenizer_splits=_tokenizer_splits(tokenizer),
        notes=notes,
    )


def check_fractions(fractions: Mapping[SplitName, float]) -> None:
    """Check the fractions of valid and test.

    Raises:
        UserError: one is not in [0, 1), or they leave nothing for train.
    """
    for name, fraction in fractions.items():
        if not 0 <= fraction < 1:
            raise UserError(f"--{name}-fraction {fraction:g} is not a fraction of the text; wanted 0 <= fraction < 1")
    if sum(fractions.values()) >= 1:
        raise UserError(
            f"--valid-fraction {fractions['valid']:g} and --test-fraction {fractions['test']:g} leave nothing to train "
            "on; wanted a sum below 1"
        )


@dataclass(frozen=True)
class _JoinedText:
    """Whole texts one after another; positions count bytes, or numbers if they are arrays."""

    texts: list[TextRange]
    size: int

    @classmethod
    def of(cls, texts: Sequence[TextRange]) -> _JoinedText:
        measured: list[TextRange] = [replace(text, stop=text.size()) for text in texts]
        return cls(measured, sum(text.size() for text in measured))

    @property
    def unit(self) -> str:
        return "numbers" if self.texts and isinstance(self.texts[0], ArrayRange) else "bytes"

    def boundaries(self, fractions: Mapping[SplitName, float], *, whole_lines: bool) -> dict[SplitName, int]:
        """Where each split ends."""
        lengths = {split: round(self.size * fractions[split]) for split in ("valid", "test")}
        train = self.size - sum(lengths.values())
        # A boundary moves by less than half of the split after it, so that no split is lost.
        first = self._boundary(train, (lengths["valid"] or lengths["test"]) // 2, whole_lines)
        second = self._boundary(train + lengths["valid"], lengths["test"] // 2, whole_lines)
        return {"train": first, "valid": max(first, second), "test": self.size}

    def _boundary(self, position: int, tolerance: int, whole_lines: bool) -> int:
        """The first good boundary from `position` on, not much more than `tolerance` after it."""
        offset = 0
        for text in self.texts:
            inside = position - offset
            if 0 < inside < text.size():
                if isinstance(text, ArrayRange):
                    return offset + text.row_end(inside)
                if whole_lines:
                    return offset + _line_end(text, inside)
                return offset + _boundary_near(text, inside, min(tolerance, SPLIT_TOLERANCE_BYTES))
            offset += text.size()
        return position

    def between(self, start: int, stop: int) -> list[TextRange]:
        """The texts between two positions."""
        found: list[TextRange] = []
        offset = 0
        for text in self.texts:
            first, last = max(start - offset, 0), min(stop - offset, text.size())
            if first < last:
                found.append(replace(text, start=first, stop=last))
            offset += text.size()
        return found


def _line_end(text: FileRange | BytesRange, position: int) -> int:
    """The first position from `position` on that follows a newline, or the end of the text."""
    done = position - 1
    for chunk in replace(text, start=done):
        found = chunk.find(b"\n")
        if found >= 0:
            return done + found + 1
        done += len(chunk)
    return text.size()


def _boundary_near(text: FileRange | BytesRange, position: int, tolerance: int) -> int:
    """The best boundary from `position` to `position + tolerance`, or the end of the character it falls into."""
    stop = min(position + max(tolerance, 4), text.size())
    content = b"".join(replace(text, start=position - 1, stop=stop))
    near = content[: tolerance + 1]
    line = near.find(b"\n")
    if line >= 0:
        return position + line
    if position + tolerance >= text.size():
        return text.size()
    space = _SPACE.search(near)
    if space:
        return position + space.start()
    for offset in range(4):
        if position + offset == text.size() or content[1 + offset] not in _UTF8_CONTINUATION:
            return position + offset
    return position  # not UTF-8


def _default_tokenizer(texts: Sequence[TextRange], kind: str | None) -> TokenizerConfig:
    arrays = [text for text in texts if isinstance(text, ArrayRange)]
    if not arrays:
        return TokenizerConfig(kind="integer" if kind == "integer" else "byte")
    if kind not in (None, "integer") or (kind is None and len(arrays) < len(texts)):
        raise UserError(
            f"{arrays[0].path} holds numbers, not text; give --tokenizer integer, or leave it out (a pattern such as "
            "'folder/**/*.txt' takes some files only)"
        )
    return TokenizerConfig(kind="integer")


def _tokenizer_splits(tokenizer: TokenizerConfig) -> tuple[SplitName, ...]:
    """The range of integers is that of all splits; other tokenizers are trained on train alone."""
    return SPLITS if tokenizer.kind == "integer" else ("train",)


def _documents(texts: Iterable[TextRange]) -> list[Document]:
    return [Document(text.name, text, text.known_num_bytes) for text in texts]


def texts_of_paths(paths: Sequence[str], option: str = "") -> list[TextRange]:
    """Return the files that paths, folders and glob patterns mean, in order.

    Args:
        paths: the paths.
        option: the beginning of each message, such as `--train: `.

    Raises:
        UserError: one is missing, unreadable, empty, an archive or not a file.
    """
    return [_text_of_file(file, option) for path in paths for file in _files(path, option)]


def _text_of_file(path: Path, option: str) -> TextRange:
    if is_archive(path):
        raise UserError(
            f"{option}{path} is an archive; extract it first, or leave it out (a pattern such as 'folder/**/*.txt' "
            "takes some files only)"
        )
    if path.suffix.lower() == ".npy":
        return ArrayRange.whole(path)
    text = FileRange(path)
    return text if text.is_compressed else replace(text, stop=text.size())


def _files(source: str, option: str) -> list[Path]:
    if not source:
        raise UserError(f"{option}an empty path was given; name a file or folder ('.' is the current one)")
    path = Path(source)
    with as_user_error(f"{option}reading {source}"):
        if not path.exists():
            return _files_of_pattern(source, option)
        status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        files = list_files(path)
        if not files:
            raise UserError(
                f"{option}the folder {source} has no text (hidden and empty files are left out); name another"
            )
        return files
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{option}{source} is not a regular file; write its text to a file and name that")
    if not status.st_size:
        raise UserError(f"{option}the file {source} is empty; leave it out, or name one that has text")
    return [path]


def _files_of_pattern(pattern: str, option: str) -> list[Path]:
    if not glob.has_magic(pattern):
        raise UserError(f"{option}'{pattern}' is neither a file nor a folder; check the spelling")
    files = glob_files(pattern)
    if not files:
        raise UserError(f"{option}no file with text matches the pattern '{pattern}'; check it ('**' is any folder)")
    return files


def _note_repeated_files(texts: Mapping[str, Sequence[TextRange]]) -> tuple[str, ...]:
    """A note about files that are given more than once, under any path; `texts` has them by split."""
    seen: dict[tuple[int, int], list[tuple[str, Path]]] = {}
    for split, of_split in texts.items():
        for text in of_split:
            if isinstance(text, BytesRange):
                continue
            with as_user_error(f"reading {text.path}"):
                status = text.path.stat()
            seen.setdefault((status.st_dev, status.st_ino), []).append((split, text.path))
    repeated = [found for found in seen.values() if len(found) > 1]
    if not repeated:
        return ()
    splits = list(dict.fromkeys(split for split, _ in repeated[0]))
    path, *others = dict.fromkeys(path for _, path in repeated[0])
    also = f" (also given as {others[0]})" if others else ""
    where = " and ".join(splits) if len(splits) > 1 else f"{splits[0]} {len(repeated[0])} times"
    more = f"; files given more than once: {len(repeated):,}" if len(repeated) > 1 else ""
    return (f"{path}{also} is in {where}{more}",)


def name_of_paths(paths: Sequence[str]) -> str:
    """Return a name for a corpus of these paths: that of the first folder, or of the first file without suffixes."""
    path = Path(os.path.abspath(paths[0]))
    if glob.has_magic(path.name) and not path.exists():
        path = next(parent for parent in path.parents if not glob.has_magic(parent.name))
    if path.is_dir():
        return path.name or "text"
    return Path(path.stem).stem if path.suffix.lower() in COMPRESSED_SUFFIXES else path.stem


def describe_paths(paths: Sequence[str]) -> str:
    """Return the first few paths, absolute, as a list in words."""
    rest = f" and {len(paths) - 3:,} more" if len(paths) > 3 else ""
    return ", ".join(os.path.abspath(path) for path in paths[:3]) + rest
