"""A user's text: files, folders and glob patterns, or texts in memory; split by the user or by fractions."""

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
"""Maximum distance by which a split boundary is moved so that it falls between lines."""

_SPACE = re.compile(rb"[ \t\n\v\f\r]")
_UTF8_CONTINUATION = range(0x80, 0xC0)  # values of the bytes after the first byte of a character


@dataclass(frozen=True)
class BytesRange:
    """The bytes from `start` to `stop` of a text in memory."""

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
"""Part of a text, iterated in chunks of bytes. `size()`, `start` and `stop` count bytes, or integers in arrays."""


def source_of_splits(
    splits: Mapping[SplitName, Sequence[TextRange]], *, name: str, description: str, kind: str | None
) -> TextSource:
    """Return a text source with these splits.

    Args:
        splits: the texts of each split, from `texts_of_paths` or in memory; must include train.
        name: default name of the corpus.
        description: where the text comes from.
        kind: the kind of tokenizer that will encode it, or None for integer with .npy files and byte with others.

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
    """Concatenate texts in the given order and split the result into train, valid and test.

    A boundary falls after a newline if one is nearby, else after whitespace, else between characters; for an integer
    tokenizer always between sequences.

    Args:
        texts: the texts, from `texts_of_paths` or in memory.
        fractions: fractions of the concatenated text for valid and test, in [0, 1); the rest is train.
        name: default name of the corpus.
        description: where the text comes from.
        kind: as in `source_of_splits`.

    Raises:
        UserError: a text is not for this kind of tokenizer, or is too short; or a fraction is out of range.
    """
    tokenizer = _default_tokenizer(texts, kind)
    arrays = [text for text in texts if isinstance(text, ArrayRange)]
    if arrays and len(arrays) < len(texts):
        raise UserError(
            f"{arrays[0].path} is an array and other files are text, so they cannot be joined and split; use --train, "
            "--valid and --test instead"
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
                f"the text is too short to split: {joined.size:,} {joined.unit} leave {split} empty; pass more text, "
                "or change --valid-fraction and --test-fraction (0 for none)"
            )
        start = stop
    shares = f"valid {fractions['valid']:g} and test {fractions['test']:g} of its {joined.unit}, split off at the end"
    return TextSource(
        name,
        f"{description}; {shares}",
        splits,
        tokenizer=tokenizer,
        tokenizer_splits=_tokenizer_splits(tokenizer),
        notes=notes,
    )


def check_fractions(fractions: Mapping[SplitName, float]) -> None:
    """Check the fractions for valid and test.

    Raises:
        UserError: one is not in [0, 1), or they leave nothing for train.
    """
    for name, fraction in fractions.items():
        if not 0 <= fraction < 1:
            raise UserError(f"--{name}-fraction {fraction:g} is out of range; must be 0 <= fraction < 1")
    if sum(fractions.values()) >= 1:
        raise UserError(
            f"--valid-fraction {fractions['valid']:g} and --test-fraction {fractions['test']:g} leave nothing to train "
            "on; their sum must be below 1"
        )


@dataclass(frozen=True)
class _JoinedText:
    """Concatenated whole texts; positions count bytes, or integers if the texts are arrays."""

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
        """Return the position where each split ends."""
        lengths = {split: round(self.size * fractions[split]) for split in ("valid", "test")}
        train = self.size - sum(lengths.values())
        # A boundary moves by less than half of the split after it, so that no split is lost.
        first = self._boundary(train, (lengths["valid"] or lengths["test"]) // 2, whole_lines)
        second = self._boundary(train + lengths["valid"], lengths["test"] // 2, whole_lines)
        return {"train": first, "valid": max(first, second), "test": self.size}

    def _boundary(self, position: int, tolerance: int, whole_lines: bool) -> int:
        """Return the best boundary at or after `position`, usually within `tolerance` of it."""
        offset = 0
        for text in self.texts:
            local_position = position - offset
            if 0 < local_position < text.size():
                if isinstance(text, ArrayRange):
                    return offset + text.row_end(local_position)
                if whole_lines:
                    return offset + _line_end(text, local_position)
                return offset + _boundary_near(text, local_position, min(tolerance, SPLIT_TOLERANCE_BYTES))
            offset += text.size()
        return position

    def between(self, start: int, stop: int) -> list[TextRange]:
        """Return the parts of the texts between two positions."""
        parts: list[TextRange] = []
        offset = 0
        for text in self.texts:
            first, last = max(start - offset, 0), min(stop - offset, text.size())
            if first < last:
                parts.append(replace(text, start=first, stop=last))
            offset += text.size()
        return parts


def _line_end(text: FileRange | BytesRange, position: int) -> int:
    """Return the first position at or after `position` that follows a newline, or the end of the text."""
    done = position - 1
    for chunk in replace(text, start=done):
        newline = chunk.find(b"\n")
        if newline >= 0:
            return done + newline + 1
        done += len(chunk)
    return text.size()


def _boundary_near(text: FileRange | BytesRange, position: int, tolerance: int) -> int:
    """Return the best boundary from `position` to `position + tolerance`, or else the end of the character there."""
    stop = min(position + max(tolerance, 4), text.size())  # a UTF-8 character has up to 4 bytes
    content = b"".join(replace(text, start=position - 1, stop=stop))
    near = content[: tolerance + 1]
    newline = near.find(b"\n")
    if newline >= 0:
        return position + newline
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
            f"{arrays[0].path} contains integers, not text; give --tokenizer integer, or leave it out (a pattern such "
            "as 'folder/**/*.txt' selects files by suffix)"
        )
    return TokenizerConfig(kind="integer")


def _tokenizer_splits(tokenizer: TokenizerConfig) -> tuple[SplitName, ...]:
    """Return the splits to train on: all for the range of integers, only train for other tokenizers."""
    return SPLITS if tokenizer.kind == "integer" else ("train",)


def _documents(texts: Iterable[TextRange]) -> list[Document]:
    return [Document(text.name, text, text.known_num_bytes) for text in texts]


def texts_of_paths(paths: Sequence[str], option: str = "") -> list[TextRange]:
    """Return the files that match the paths, folders and glob patterns, in order.

    Args:
        paths: the paths.
        option: prefix of each error message, such as `--train: `.

    Raises:
        UserError: a file is missing, unreadable, empty, an archive or not a regular file.
    """
    return [_text_of_file(file, option) for path in paths for file in _files(path, option)]


def _text_of_file(path: Path, option: str) -> TextRange:
    if is_archive(path):
        raise UserError(
            f"{option}{path} is an archive; extract it first, or leave it out (a pattern such as 'folder/**/*.txt' "
            "selects files by suffix)"
        )
    if path.suffix.lower() == ".npy":
        return ArrayRange.whole(path)
    text = FileRange(path)
    return text if text.is_compressed else replace(text, stop=text.size())


def _files(source: str, option: str) -> list[Path]:
    if not source:
        raise UserError(f"{option}the path is empty; name a file or folder ('.' is the current one)")
    path = Path(source)
    with as_user_error(f"{option}reading {source}"):
        if not path.exists():
            return _files_of_pattern(source, option)
        status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        files = list_files(path)
        if not files:
            raise UserError(
                f"{option}the folder {source} contains no text (hidden and empty files are ignored); name another"
            )
        return files
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{option}{source} is not a regular file; write its text to a file and name that")
    if not status.st_size:
        raise UserError(f"{option}the file {source} is empty; leave it out, or name one that contains text")
    return [path]


def _files_of_pattern(pattern: str, option: str) -> list[Path]:
    if not glob.has_magic(pattern):
        raise UserError(f"{option}'{pattern}' is neither a file nor a folder; check the spelling")
    files = glob_files(pattern)
    if not files:
        raise UserError(
            f"{option}no file with text matches the pattern '{pattern}'; check it ('**' matches any number of folders)"
        )
    return files


def _note_repeated_files(texts: Mapping[str, Sequence[TextRange]]) -> tuple[str, ...]:
    """Return a warning if a file occurs more than once, under any path; `texts` maps splits to texts."""
    seen: dict[tuple[int, int], list[tuple[str, Path]]] = {}
    for split, split_texts in texts.items():
        for text in split_texts:
            if isinstance(text, BytesRange):
                continue
            with as_user_error(f"reading {text.path}"):
                status = text.path.stat()
            seen.setdefault((status.st_dev, status.st_ino), []).append((split, text.path))
    repeated = [occurrences for occurrences in seen.values() if len(occurrences) > 1]
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
    """Return the first few paths, absolute, as a comma-separated list."""
    rest = f" and {len(paths) - 3:,} more" if len(paths) > 3 else ""
    return ", ".join(os.path.abspath(path) for path in paths[:3]) + rest
