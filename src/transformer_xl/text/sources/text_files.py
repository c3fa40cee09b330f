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
    BINARY,
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
from transformer_xl.text.sources.splitting import SplitMethod, TextRange, split_at_end, split_at_random
from transformer_xl.text.tokenizers.tokenizer_config import TokenizerConfig

DEFAULT_SPLIT_SEED = 1
"""Default seed of a random split."""


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
    tokenizer = _default_tokenizer([text for texts in splits.values() for text in texts], kind)
    return TextSource(
        name,
        description,
        {split: [Document(text.name, text, text.known_num_bytes) for text in texts] for split, texts in splits.items()},
        tokenizer=tokenizer,
        # The vocabulary of an integer tokenizer must contain the integers of all splits.
        tokenizer_splits=SPLITS if tokenizer.kind == "integer" else ("train",),
        notes=notes,
    )


def split_text(
    texts: Sequence[TextRange],
    fractions: Mapping[SplitName, float],
    *,
    method: SplitMethod,
    seed: int,
    root: Path,
    kind: str | None,
) -> tuple[dict[SplitName, list[TextRange]], str]:
    """Split texts into train, valid and test, at random or at the end (see `splitting`).

    Args:
        texts: the texts, from `texts_of_paths` or in memory.
        fractions: fractions of all text for valid and test, in [0, 1); the rest is train.
        method: random, or end for the end of the concatenated texts.
        seed: seed of a random split.
        root: folder to which the names of texts are relative that a random split depends on.
        kind: as in `source_of_splits`.

    Returns:
        The texts of each split that has text, and a description of the split.

    Raises:
        UserError: a text is not for this kind of tokenizer, or is too short; or a fraction is out of range.
    """
    for split, fraction in fractions.items():
        if not 0 <= fraction < 1:
            raise UserError(f"--{split}-fraction {fraction:g} is out of range; must be 0 <= fraction < 1")
    if sum(fractions.values()) >= 1:
        raise UserError(
            f"--valid-fraction {fractions['valid']:g} and --test-fraction {fractions['test']:g} leave nothing to train "
            "on; their sum must be below 1"
        )
    whole_lines = _default_tokenizer(texts, kind).kind == "integer"
    arrays = [text for text in texts if isinstance(text, ArrayRange)]
    if arrays and len(arrays) < len(texts):
        raise UserError(
            f"{arrays[0].path} is an array and other files are text, so they cannot be joined and split; use --train, "
            "--valid and --test instead"
        )
    # compressed files are measured only once; empty ones have nothing to split
    measured = [replace(text, stop=text.size()) for text in texts]
    measured = [text for text in measured if text.size()]
    if method == "end":
        splits, how = split_at_end(measured, fractions, whole_lines=whole_lines)
    else:
        names = [Path(os.path.relpath(text.path, root)).as_posix() for text in measured]
        what = "documents" if any(isinstance(text, BytesRange) for text in measured) else "files"
        splits, how = split_at_random(measured, names, fractions, seed=seed, whole_lines=whole_lines, unit=what)
    size, unit = sum(text.size() for text in measured), "values" if arrays else "bytes"
    for split in SPLITS:
        if not splits.get(split) and (split == "train" or fractions[split]):
            raise UserError(
                f"the text is too short to split: {size:,} {unit} leave {split} empty; pass more text, or change "
                "--valid-fraction and --test-fraction (0 for none)"
            )
    return {split: splits[split] for split in SPLITS if splits.get(split)}, how


def _default_tokenizer(texts: Sequence[TextRange], kind: str | None) -> TokenizerConfig:
    """Return the default settings for these texts, after checking that arrays get an integer tokenizer."""
    arrays = [text for text in texts if isinstance(text, ArrayRange)]
    if not arrays:
        return TokenizerConfig(kind="integer" if kind == "integer" else "byte")
    if kind not in (None, "integer") or (kind is None and len(arrays) < len(texts)):
        raise UserError(
            f"{arrays[0].path} contains integers, not text; give --tokenizer integer, or leave it out (--exclude "
            "'*.npy' leaves out such files of a folder)"
        )
    return TokenizerConfig(kind="integer")


@dataclass(frozen=True)
class FileSelection:
    """Which files of folders and patterns are read, and in which encoding all files are."""

    include: Sequence[str] = ()
    """Glob patterns; if there are any, files that match none of them are left out (see `folders.matches`)."""
    exclude: Sequence[str] = ()
    """Glob patterns; files that match one of them are left out."""
    encoding: str = "utf-8"
    """A text encoding of Python; or binary, which takes the bytes of any file as they are."""
    codec: FileCodec | None = None
    """Reads all files, or None if they are text."""
    used: set[str] = field(default_factory=set, compare=False)
    """Patterns that a file matched so far."""

    def selects(self, file: Path, folder: Path) -> bool:
        """Return whether a file of a folder is read, and remember which patterns it matches."""
        matching = {pattern for pattern in (*self.include, *self.exclude) if matches(file, folder, pattern)}
        self.used.update(matching)
        return not matching.intersection(self.exclude) and (
            not self.include or bool(matching.intersection(self.include))
        )

    @property
    def unused(self) -> list[str]:
        """The patterns that no file matched so far."""
        return [pattern for pattern in (*self.include, *self.exclude) if pattern not in self.used]

    def check(self) -> None:
        """Check that the encoding exists.

        Raises:
            UserError: it does not, or is not one of text.
        """
        if self.encoding != BINARY:
            try:
                b"a".decode(self.encoding)
            except UnicodeDecodeError:  # utf-16 needs more bytes
                pass
            except (LookupError, ValueError):
                raise UserError(
                    f"--encoding {self.encoding} is no encoding of text; give one such as utf-8, latin-1, cp1252 or "
                    f"utf-16, or {BINARY} for the bytes as they are"
                ) from None


def texts_of_paths(
    paths: Sequence[str], option: str = "", selection: FileSelection | None = None, progress: Progress = no_progress
) -> tuple[list[TextRange], tuple[str, ...]]:
    """Return the files that match the paths, folders and glob patterns, in order, after reading them to check them.

    Args:
        paths: the paths.
        option: prefix of each error message, such as `--train: `.
        selection: which files of folders and patterns are read, and their encoding.
        progress: called with the stage `check` while the files are read.

    Returns:
        The texts, and a note if files of folders or patterns were left out because they are not text.

    Raises:
        UserError: a file is missing, unreadable, empty or not a regular file; a file that was named itself is an
            archive or not text; or nothing is left.
    """
    selection = selection or FileSelection()
    found = [_files(path, option, selection) for path in paths]
    with as_user_error(f"{option}reading the files"):
        total = sum(file.stat().st_size for files, _ in found for file in files)
    done = 0
    advice = f", or {_ENCODING}" if selection.codec is None else ""

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress("check", done, max(total, done))

    texts: list[TextRange] = []
    skipped: list[str] = []
    for path, (files, is_named) in zip(paths, found, strict=True):
        of_path: list[TextRange] = []
        for file in files:
            try:
                of_path.append(_text_of_file(file, selection, advance))
            except NotTextError as error:
                if is_named:
                    raise UserError(f"{option}{error}") from None
                skipped.append(f"{file} ({error.reason})")
        if not of_path:
            what = "text" if selection.codec is None else f"a {selection.codec.kind} file"
            raise UserError(f"{option}no file of {path} is {what}: {_first_few(skipped)}; name another{advice}")
        texts += of_path
    if not skipped:
        return texts, ()
    if selection.codec is not None:
        kind = selection.codec.kind
        return texts, (f"{option}left out {len(skipped):,} files, which are not {kind}: {_first_few(skipped)}",)
    few = _first_few(skipped)
    num_files = sum(len(files) for files, _ in found)
    return texts, (f"{option}left out {len(skipped):,} of {num_files:,} files, which are not text: {few}; {_ENCODING}",)


_ENCODING = f"give --encoding NAME if they are text in another encoding, {BINARY} to take any bytes"


def _first_few(names: Sequence[str]) -> str:
    """Return the first three names as a list."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")


def _text_of_file(path: Path, selection: FileSelection, progress: Callable[[int], None]) -> TextRange:
    """Return a whole file.

    Raises:
        NotTextError: it is an archive, or not text in this encoding; or not a file of the codec.
    """
    if selection.codec is not None:
        text = BytesRange(path, content=" ".join(map(str, codec_ids(selection.codec, path))).encode() + b"\n")
        progress(path.stat().st_size)
        return text
    encoding = selection.encoding
    if path.suffix.lower() in MIDI_SUFFIXES and encoding != BINARY:
        raise NotTextError(f"{path} is a MIDI file; give --tokenizer midi, or leave it out", "a MIDI file")
    if is_archive(path):
        raise NotTextError(f"{path} is an archive; extract it first, or leave it out", "an archive")
    if path.suffix.lower() == ".npy":
        return ArrayRange.whole(path)
    if encoding != BINARY:
        # another spelling, such as UTF8, must not make another split
        encoding = "utf-8" if codecs.lookup(encoding).name in ("utf-8", "utf-8-sig") else encoding
        return check_text(FileRange(path, encoding=encoding), progress)
    text = FileRange(path)
    return text if text.is_compressed else replace(text, stop=text.size())


def codec_ids(codec: FileCodec, path: Path) -> list[int]:
    """Return the integers of a file.

    Raises:
        NotTextError: the codec cannot read it.
    """
    try:
        return codec.encode_file(path)
    except FileCodecError as error:
        raise NotTextError(f"{path}: {error}; leave it out, or save it as {codec.kind} again", str(error)) from None


def _files(source: str, option: str, selection: FileSelection) -> tuple[list[Path], bool]:
    """Return the files that a path, folder or glob pattern selects, and whether it is the path of one file."""
    if not source:
        raise UserError(f"{option}the path is empty; name a file or folder ('.' is the current one)")
    path, files = Path(source), list[Path]()
    with as_user_error(f"{option}reading {source}"):
        is_named = path.is_file()
        if is_named:
            files = [path] if path.stat().st_size else []
            problem = f"the file {source} is empty; leave it out, or name one that contains text"
        elif path.is_dir():
            files = list_files(path)
            problem = f"the folder {source} contains no text (hidden and empty files are ignored); name another"
        elif path.exists():
            problem = f"{source} is not a regular file; write its text to a file and name that"
        elif glob.has_magic(source):
            files = glob_files(source)
            problem = f"no file with text matches the pattern '{source}'; check it ('**' matches any number of folders)"
        else:
            data_set = "" if option else f" nor a known data set{nearest(source, DATASET_NAMES)}"
            known = "" if option else f" (known data sets: {', '.join(DATASET_NAMES)})"
            problem = f"'{source}' is neither a file nor a folder{data_set}; check the spelling{known}"
    if not files:
        raise UserError(f"{option}{problem}")
    if not is_named:
        folder = _folder_of(source)
        files = [file for file in files if selection.selects(file, folder)]
        if not files:
            raise UserError(
                f"{option}--include and --exclude leave no file of {source}; change their patterns, which are names, "
                f"or paths from {folder}"
            )
    return files, is_named


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
