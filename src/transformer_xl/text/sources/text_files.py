"""Finds a user's text for `prepare`: files, folders and glob patterns, or texts in memory.

The user names the files of each split (`source_of_splits`), or one text that `split_text` splits into train, valid and
test by fractions. Files of folders and patterns that are not text are left out, with a note.
"""

from __future__ import annotations

import codecs
import glob
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from transformer_xl.config import UserError, nearest
from transformer_xl.files import as_user_error
from transformer_xl.text.documents import SPLITS, Document, SplitName, TextSource
from transformer_xl.text.sources.archives import (
    COMPRESSED_SUFFIXES,
    FileRange,
    NotTextError,
    Progress,
    check_text,
    is_archive,
    no_progress,
)
from transformer_xl.text.sources.arrays import ArrayRange
from transformer_xl.text.sources.file_codec import MIDI_SUFFIXES, FileCodec, FileCodecError
from transformer_xl.text.sources.folders import glob_files, list_files, matches, pattern_root
from transformer_xl.text.sources.named_datasets import DATASET_NAMES
from transformer_xl.text.sources.splitting import TextRange, split_at_end, split_at_random
from transformer_xl.text.text_config import BINARY, TextConfig
from transformer_xl.text.tokenizers.tokenizer_config import TokenizerConfig


@dataclass(frozen=True)
class BytesRange(FileRange):
    """The bytes from `start` to `stop` of a text in memory; `path` is only a name for messages."""

    content: bytes = b""

    @override
    def __iter__(self) -> Generator[bytes]:
        yield self.content[self.start : self.stop]

    @override
    def size(self) -> int:
        return (len(self.content) if self.stop is None else self.stop) - self.start


def source_of_splits(
    splits: Mapping[SplitName, Sequence[TextRange]],
    *,
    name: str,
    description: str,
    kind: str | None,
    notes: tuple[str, ...] = (),
) -> TextSource:
    """Return a text source with these splits.

    Args:
        splits: the texts of each split, from `texts_of_paths` or in memory; must include train.
        name: default name of the corpus.
        description: where the text comes from.
        kind: the kind of tokenizer that will encode it, or None for integer with .npy files and byte with others.
        notes: warnings for the user.

    Raises:
        UserError: a text is not for this kind of tokenizer.
    """
    is_integer = _has_integers([text for texts in splits.values() for text in texts], kind)
    return TextSource(
        name,
        description,
        {split: [Document(text.name, text, text.size()) for text in texts] for split, texts in splits.items()},
        tokenizer=TokenizerConfig(kind="integer" if is_integer else "byte"),
        # The vocabulary of an integer tokenizer must contain the integers of all splits.
        tokenizer_splits=SPLITS if is_integer else ("train",),
        notes=notes,
    )


def split_text(
    texts: Sequence[TextRange], config: TextConfig, *, root: Path, kind: str | None
) -> tuple[dict[SplitName, list[TextRange]], str]:
    """Split texts into train, valid and test, at random or at the end (see `splitting`).

    Args:
        texts: the texts, from `texts_of_paths` or in memory.
        config: fractions of all text for valid and test, method and seed.
        root: folder to which the names of texts are relative that a random split depends on.
        kind: as in `source_of_splits`.

    Returns:
        The texts of each split that has text, and a description of the split.

    Raises:
        UserError: a text is not for this kind of tokenizer, or is too short.
    """
    fractions: dict[SplitName, float] = {"valid": config.valid_fraction, "test": config.test_fraction}
    whole_lines = _has_integers(texts, kind)
    if len({isinstance(text, ArrayRange) for text in texts}) > 1:
        raise UserError("arrays and text files cannot be joined and split; use train, valid and test instead")
    texts = [text for text in texts if text.size()]  # empty ones have nothing to split
    if config.split_method == "end":
        splits, how = split_at_end(texts, fractions, whole_lines=whole_lines)
    else:
        names = [Path(os.path.relpath(text.path, root)).as_posix() for text in texts]
        what = "documents" if any(isinstance(text, BytesRange) for text in texts) else "files"
        splits, how = split_at_random(texts, names, fractions, seed=config.seed, whole_lines=whole_lines, unit=what)
    for split in SPLITS:
        if not splits.get(split) and (split == "train" or fractions[split]):
            raise UserError(
                f"the text is too short to split: {sum(text.size() for text in texts):,} bytes or integers leave "
                f"{split} empty; pass more text, or change valid_fraction and test_fraction (0 for none)"
            )
    return {split: splits[split] for split in SPLITS if splits.get(split)}, how


def _has_integers(texts: Sequence[TextRange], kind: str | None) -> bool:
    """Return whether the tokenizer of these texts is one of integers, after checking that arrays get such a one."""
    arrays = [text for text in texts if isinstance(text, ArrayRange)]
    if arrays and kind != "integer" and (kind is not None or len(arrays) < len(texts)):
        raise UserError(
            f"{arrays[0].path} contains integers, not text; give tokenizer=integer, or leave it out (exclude='*.npy' "
            "leaves out such files of a folder)"
        )
    return bool(arrays) or kind == "integer"


@dataclass(frozen=True)
class FileSelection:
    """Which files of folders and patterns are read, and how."""

    config: TextConfig
    codec: FileCodec | None = None
    """Reads all files, or None if they are text."""
    used: set[str] = field(default_factory=set, compare=False)
    """Patterns that a file matched so far."""

    def selects(self, file: Path, folder: Path) -> bool:
        """Return whether a file of a folder is read, and remember which patterns it matches."""
        include, exclude = self.config.include, self.config.exclude
        matching = {pattern for pattern in (*include, *exclude) if matches(file, folder, pattern)}
        self.used.update(matching)
        return not matching.intersection(exclude) and (not include or bool(matching.intersection(include)))

    @property
    def unused(self) -> list[str]:
        """The patterns that no file matched so far."""
        return [pattern for pattern in (*self.config.include, *self.config.exclude) if pattern not in self.used]


def texts_of_paths(
    paths: Sequence[str], option: str, selection: FileSelection, progress: Progress = no_progress
) -> tuple[list[TextRange], tuple[str, ...]]:
    """Return the files that match the paths, folders and glob patterns, in order, after reading them to check them.

    Args:
        paths: the paths.
        option: prefix of each error message, such as `train: `.
        selection: which files of folders and patterns are read, and how.
        progress: called with the stage `check` while the files are read.

    Returns:
        The texts, and a note if files of folders or patterns were left out because they are not text.

    Raises:
        UserError: a file is missing, unreadable, empty or not a regular file; a file that was named itself is an
            archive or not text; or nothing is left.
    """
    found = [_files(path, option, selection) for path in paths]
    with as_user_error(f"{option}reading the files"):
        total = sum(file.stat().st_size for files in found for file in files)
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress("check", done, max(total, done))

    texts: list[TextRange] = []
    skipped: list[str] = []
    for path, files in zip(paths, found, strict=True):
        num_before = len(texts)
        for file in files:
            try:
                texts.append(_text_of_file(file, selection, advance))
            except NotTextError as error:
                # a shell writes out patterns, so some of many files may be of another kind where the kind is given
                if Path(path).is_file() and (selection.codec is None or len(paths) == 1):
                    raise UserError(f"{option}{error}") from None
                skipped.append(f"{file} ({error.reason})")
        if len(texts) == num_before and not Path(path).is_file():
            raise UserError(f"{option}no file of {path} {_not_read(skipped, selection)}")
    if not texts:
        raise UserError(f"{option}none of the files {_not_read(skipped, selection)}")
    if not skipped:
        return texts, ()
    num_files = sum(map(len, found))
    return texts, (f"{option}left out {len(skipped):,} of {num_files:,} files: none {_not_read(skipped, selection)}",)


def _not_read(skipped: Sequence[str], selection: FileSelection) -> str:
    """Return what these files are not, and what to do if they are."""
    if selection.codec is not None:
        return f"is {selection.codec.kind}: {_first_few(skipped)}"
    advice = f"give their encoding if they are text in another one, {BINARY} to take any bytes"
    return f"is text: {_first_few(skipped)}; {advice}"


def _first_few(names: Sequence[str]) -> str:
    """Return the first three names as a list."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")


def _text_of_file(path: Path, selection: FileSelection, progress: Callable[[int], None]) -> TextRange:
    """Return a whole file, with its end.

    Raises:
        NotTextError: it is an archive, or not text in this encoding; or not a file of the codec.
    """
    if selection.codec is not None:
        text = BytesRange(path, content=" ".join(map(str, codec_ids(selection.codec, path))).encode() + b"\n")
        progress(path.stat().st_size)
        return text
    encoding = selection.config.encoding
    if path.suffix.lower() in MIDI_SUFFIXES and encoding != BINARY:
        raise NotTextError(f"{path} is a MIDI file; give tokenizer=midi, or leave it out", "a MIDI file")
    if is_archive(path):
        raise NotTextError(f"{path} is an archive; extract it first, or leave it out", "an archive")
    if path.suffix.lower() == ".npy":
        return ArrayRange.whole(path)
    if encoding != BINARY:
        # another spelling, such as UTF8, must not make another split
        encoding = "utf-8" if codecs.lookup(encoding).name in ("utf-8", "utf-8-sig") else encoding
        return check_text(FileRange(path, encoding=encoding), progress)
    return replace(FileRange(path), stop=FileRange(path).size())


def codec_ids(codec: FileCodec, path: Path) -> list[int]:
    """Return the integers of a file.

    Raises:
        NotTextError: the codec cannot read it.
    """
    try:
        return codec.encode_file(path)
    except FileCodecError as error:
        raise NotTextError(f"{path}: {error}; leave it out, or save it as {codec.kind} again", str(error)) from None


def _files(source: str, option: str, selection: FileSelection) -> list[Path]:
    """Return the files that a path, folder or glob pattern selects."""
    path = Path(source)
    with as_user_error(f"{option}reading {source}"):
        if path.is_file():
            files = [path] if path.stat().st_size else []
        else:
            files = list_files(path) if path.is_dir() and source else glob_files(source)
    if not files:
        meant = "" if path.suffix else nearest(source, DATASET_NAMES)  # nothere.txt is no misspelt text8
        known = "" if option else f" Known data sets: {', '.join(DATASET_NAMES)}{meant}."
        raise UserError(
            f"{option}'{source}' is no file, folder or pattern with text (empty and hidden files are left out, '**' "
            f"matches any number of folders); check the spelling.{known}"
        )
    folder = _folder_of(source)
    selected = [file for file in files if file == path or selection.selects(file, folder)]
    if not selected:
        raise UserError(
            f"{option}include={selection.config.include} and exclude={selection.config.exclude} leave no file of "
            f"{source}; change the patterns, which are names, or paths from {folder}"
        )
    return selected


def _folder_of(source: str) -> Path:
    """Return the folder to which the files of a path, folder or glob pattern are relative."""
    path = Path(source)
    if path.is_dir():
        return path
    return path.parent if path.exists() else pattern_root(source)


def common_folder(paths: Sequence[str]) -> Path:
    """Return the folder that contains the files of all paths, folders and patterns; moving it renames none of them."""
    return Path(os.path.commonpath([os.path.abspath(_folder_of(path)) for path in paths]))


def note_repeated_files(texts: Mapping[Any, Sequence[TextRange]]) -> tuple[str, ...]:
    """Return a warning if a file occurs more than once, under any path; the message contains the keys."""
    occurrences: dict[tuple[int, int], list[str]] = {}
    for split, split_texts in texts.items():
        for text in split_texts:
            if not isinstance(text, BytesRange):
                with as_user_error(f"reading {text.path}"):
                    status = text.path.stat()
                occurrences.setdefault((status.st_dev, status.st_ino), []).append(f"{text.path} in {split}")
    repeated = [places for places in occurrences.values() if len(places) > 1]
    more = f", and {len(repeated) - 1:,} more files" if len(repeated) > 1 else ""
    return (f"the same file was given more than once: {', '.join(repeated[0])}{more}",) if repeated else ()


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
    return _first_few([os.path.abspath(path) for path in paths])
