"""Finds a user's text for `prepare`: files, folders and glob patterns, or texts in memory.

The user names the files of each split (`source_of_splits`), or one text that `split_text` splits into train, valid and
test by fractions. Files of folders and patterns that are not text are left out, with a note.
"""

from __future__ import annotations

import codecs
import glob
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from typing_extensions import override

from transformer_xl.config import UserError, nearest
from transformer_xl.files import as_user_error
from transformer_xl.text.documents import SPLITS, Document, SplitName, TextSource
from transformer_xl.text.sources.archives import (
    FileRange,
    NotTextError,
    Progress,
    archive_of,
    check_text,
    no_progress,
    open_decompressed,
    without_compression,
)
from transformer_xl.text.sources.arrays import ArrayRange
from transformer_xl.text.sources.file_codec import MIDI_SUFFIXES, FileCodec, FileCodecError
from transformer_xl.text.sources.folders import glob_files, list_files, matches, pattern_root
from transformer_xl.text.sources.named_datasets import DATASET_NAMES
from transformer_xl.text.sources.rows import DocumentRows, RowFile, RowSource
from transformer_xl.text.sources.splitting import TextRange, split_at_end, split_at_random
from transformer_xl.text.sources.tables import HEAD_BYTES, check_zip, format_of, looks_like_table
from transformer_xl.text.text_config import BINARY, TextConfig
from transformer_xl.text.tokenizers.storage import read_json_object
from transformer_xl.text.tokenizers.tokenizer_config import TokenizerConfig

STANDARD_INPUT = "standard-input"
"""Name of the file that keeps standard input while it is read."""


@dataclass(frozen=True)
class BytesRange(FileRange):
    """The bytes from `start` to `stop` of a text in memory; `path` is only a name for messages."""

    content: bytes = b""

    @property
    @override
    def is_compressed(self) -> bool:
        return False

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


def source_of_rows(
    splits: Mapping[SplitName | None, Sequence[TextRange | RowFile]],
    config: TextConfig,
    *,
    name: str,
    description: str,
    kind: str | None,
    notes: tuple[str, ...] = (),
) -> RowSource:
    """Return a text source with the rows of these files, and with the texts beside them, each a row.

    Args:
        splits: the files and texts of each split, or of None if all are to be split.
        config: which column has the text, and how rows are split.
        name: as in `source_of_splits`, like all others.
        description: where the text comes from.
        kind: the kind of tokenizer, or None.
        notes: warnings for the user.

    Raises:
        UserError: there is an array among them.
    """
    files: list[RowFile] = []
    for split, of_split in splits.items():
        for file in of_split:
            if isinstance(file, ArrayRange):
                raise UserError(f"{file.path}: arrays and files of rows cannot be joined; leave one kind out")
            row_file = file if isinstance(file, RowFile) else RowFile(file.path, config, "text")
            files.append(replace(row_file, split=split))
    tables = [file for file in files if file.kind != "text"]
    if tables:
        what = ", ".join(dict.fromkeys(file.kind or "archive" for file in tables))
        could_be_text = {"csv", "tsv", "json", "jsonl"} & {file.kind for file in tables}
        advice = "; input_format=text reads files as they are" if could_be_text else ""
        columns = dict.fromkeys(file.column for file in tables if file.column not in (None, "text"))
        what += "".join(f", column {column}" for column in columns)
        notes = (*notes, f"rows are documents: {first_few([str(file.path) for file in tables])} ({what}){advice}")
    is_integer = kind == "integer"
    return RowSource(
        name,
        description,
        tokenizer=TokenizerConfig(kind="integer" if is_integer else "byte"),
        tokenizer_splits=SPLITS if is_integer else ("train",),
        notes=notes,
        rows=DocumentRows(tuple(files), config),
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
    like_tables: list[str] = field(default_factory=list, compare=False)
    """Texts that look like tables."""

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
) -> tuple[list[TextRange | RowFile], tuple[str, ...]]:
    """Return the files that match the paths, folders and glob patterns, in order, after reading them to check them.

    Args:
        paths: the paths.
        option: prefix of each error message, such as `train: `.
        selection: which files of folders and patterns are read, and how.
        progress: called with the stage `check` while the files are read.

    Returns:
        The texts, and a note if files of folders or patterns were left out because they are not text.

    Raises:
        UserError: a file is missing, unreadable, empty or not a regular file; a file that was named itself is neither
            text nor has rows with text; or nothing is left.
    """
    found = [_files(path, option, selection) for path in paths]
    with as_user_error(f"{option}reading the files"):
        total = sum(file.stat().st_size for files in found for file in files)
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress("check", done, max(total, done))

    texts: list[TextRange | RowFile] = []
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
            except UserError as error:
                if Path(path).is_file():
                    raise
                raise UserError(f"{error}; or leave it out with exclude='{file.name}'") from None
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
        return f"is {selection.codec.kind}: {first_few(skipped)}"
    advice = "; name the column of the text with text_column" if any("no column" in name for name in skipped) else ""
    if any("byte" in name or "codec" in name or "BOM" in name for name in skipped):
        advice += f"; give their encoding if they are text in another one, {BINARY} to take any bytes"
    return f"is text: {first_few(skipped)}{advice}"


def first_few(names: Sequence[str]) -> str:
    """Return the first three names as a list."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")


def _text_of_file(path: Path, selection: FileSelection, progress: Callable[[int], None]) -> TextRange | RowFile:
    """Return a whole file: a text with its end, or rows.

    Raises:
        NotTextError: it is no text in this encoding and has no rows with texts; or it is not a file of the codec.
    """
    if selection.codec is not None:
        text = BytesRange(path, content=" ".join(map(str, codec_ids(selection.codec, path))).encode() + b"\n")
        progress(path.stat().st_size)
        return text
    config = selection.config
    encoding = config.encoding
    if path.suffix.lower() in MIDI_SUFFIXES and encoding != BINARY:
        raise NotTextError(f"{path} is a MIDI file; give tokenizer=midi, or leave it out", "a MIDI file")
    if path.suffix.lower() == ".npy":
        return ArrayRange.whole(path)
    with open_decompressed(path) as file:
        head = file.read(HEAD_BYTES)
    try:
        kind = config.input_format or format_of(str(path), head)
        if archive_of(head, path.name):
            raise NotTextError(str(path), "an archive")
    except NotTextError as error:
        if error.reason == "an archive":
            check_zip(path)
            progress(path.stat().st_size)
            return RowFile(path, config)
        if encoding != BINARY:
            raise
        kind = "text"
    if kind != "text":
        rows = RowFile(path, config, kind)
        with closing(rows.batches()) as batches:
            first = next(batches, None)  # has a column with texts
        progress(path.stat().st_size)
        return replace(rows, column=None if first is None else first.column)
    if config.input_format is None and looks_like_table(head):
        selection.like_tables.append(str(path))
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
            files = _without_metadata(list_files(path) if path.is_dir() and source else glob_files(source))
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


def _without_metadata(files: Sequence[Path]) -> list[Path]:
    """Return the files without those beside the tables of a folder that the library `datasets` has saved."""
    states = {file.parent: file for file in files if file.name == "state.json"}
    listed: dict[Path, set[str]] = {}
    for folder, file in states.items():
        with suppress(UserError, KeyError, TypeError):
            listed[folder] = {entry["filename"] for entry in read_json_object(file)["_data_files"]}
    return [
        file
        for file in files
        if file.name != "dataset_dict.json" and (file.parent not in listed or file.name in listed[file.parent])
    ]


def saved_splits(paths: Sequence[str]) -> tuple[dict[SplitName, list[str]], tuple[str, ...]]:
    """Return the folders of the splits in a folder that `DatasetDict.save_to_disk` has made, and a note on the others.

    Both are empty if the paths are anything else.
    """
    if len(paths) != 1:
        return {}, ()
    with as_user_error(f"reading {paths[0]}"):
        if not (file := Path(paths[0], "dataset_dict.json")).is_file():
            return {}, ()
    names = [str(name) for name in read_json_object(file).get("splits", [])]
    splits, others = dict[SplitName, list[str]](), list[str]()
    for name in names:
        split = split_named(name)
        if split is None or split in splits:  # validation and dev are one
            others.append(name)
        else:
            splits[split] = [str(Path(paths[0], name))]
    return splits, (f"left out the splits {', '.join(others)} of {paths[0]}",) if others else ()


def split_named(name: str) -> SplitName | None:
    """Return the split that others call validation or dev, or that has this name; or None."""
    return cast("SplitName", name) if name in SPLITS else "valid" if name in ("validation", "dev") else None


def _folder_of(source: str) -> Path:
    """Return the folder to which the files of a path, folder or glob pattern are relative."""
    path = Path(source)
    if path.is_dir():
        return path
    return path.parent if path.exists() else pattern_root(source)


def common_folder(paths: Sequence[str]) -> Path:
    """Return the folder that contains the files of all paths, folders and patterns; moving it renames none of them."""
    return Path(os.path.commonpath([os.path.abspath(_folder_of(path)) for path in paths]))


def note_repeated_files(texts: Mapping[Any, Sequence[TextRange | RowFile]]) -> tuple[str, ...]:
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
    return Path(without_compression(path.name)).stem


def describe_paths(paths: Sequence[str]) -> str:
    """Return the first few paths, absolute, as a comma-separated list."""
    names = [os.path.abspath(path) for path in paths]
    return first_few(["standard input" if Path(name).name == STANDARD_INPUT else name for name in names])
