"""Documents that are rows: of tables, of archives (whose texts are documents too), and of tables in memory.

A file of rows is read one batch after another, by any number of processes. Valid and test are drawn by the hash of each
row's text: rows with the same text are never in two splits, and what is drawn depends neither on the format of the file
nor on its name.
"""

from __future__ import annotations

import hashlib
import io
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain, islice
from pathlib import Path, PurePosixPath
from typing import Any, cast

from transformer_xl.config import UserError
from transformer_xl.files import as_user_error
from transformer_xl.text.documents import SPLITS, Document, SplitName, TextSource, batched
from transformer_xl.text.parallel import ordered_map
from transformer_xl.text.sources.archives import (
    NotTextError,
    Progress,
    damage_as_user_error,
    decompressed,
    no_progress,
    open_members,
    utf8_chunks,
)
from transformer_xl.text.sources.splitting import draw_buckets
from transformer_xl.text.sources.tables import HEAD_BYTES, format_of, json_rows, line_blocks, read_rows
from transformer_xl.text.text_config import BINARY, InputFormat, TextConfig

CHOICE_ROWS = 100
"""Number of the first rows that say which column has the texts."""
NUM_BUCKETS = 2**16
"""Number of parts, by the hash of their texts, that rows are drawn in."""


@dataclass(frozen=True)
class TextBatch:
    """Some consecutive rows of a file, which a process reads."""

    name: str
    """Of the file, for messages."""
    first: int
    """Number of the first line in the file."""
    document: int
    """Number of lines or rows before it, of all files."""
    column: str
    split: SplitName | None
    """Split of the rows, or None if they are to be split."""
    content: bytes | tuple[tuple[str, bytes], ...]
    """JSON lines; or texts, each with its place."""
    raw: int = 0
    """Bytes of the file that were read, for the progress display."""
    num_bytes: int | None = None
    """Bytes of its texts, once they were measured."""

    def texts(self) -> Iterator[tuple[str, bytes]]:
        """Yield the place and the text of each row."""
        if isinstance(self.content, tuple):
            yield from self.content
            return
        for place, row in json_rows(self.name, self.content.split(b"\n"), self.first):
            yield place, text_of_row(row, self.column, place)


@dataclass(frozen=True)
class RowFile:
    """A table, an archive or (beside these) a text, whose rows are documents; or such rows in memory."""

    path: Path
    config: TextConfig
    kind: InputFormat | None = None
    """What it holds, or None for an archive."""
    split: SplitName | None = None
    column: str | None = None
    """The column that has the texts, where it is known."""
    rows: Iterable[Any] | None = None
    """Rows in memory; `path` is then only a name for messages."""
    left_out: list[str] = field(default_factory=list, compare=False)
    """Files of an archive that are not text, once it was read."""

    def size(self) -> int:
        """Return the length of the file in bytes."""
        return 0 if self.rows is not None else self.path.stat().st_size

    def batches(self) -> Generator[TextBatch]:
        """Yield the rows in batches of about 1 MiB.

        Raises:
            UserError: the file cannot be read, is damaged, or has a row without text.
        """
        if self.rows is not None:
            places = ((f"{self.path}: row {number:,}", row) for number, row in enumerate(self.rows, start=1))
            yield from self._of_rows(str(self.path), places)
            return
        self.left_out.clear()
        with (
            as_user_error(f"reading {self.path}"),
            damage_as_user_error(self.path),
            self.path.open("rb", buffering=0) as file,
        ):
            for name, content, kind in self._contents(file):
                is_begun = False
                try:
                    for batch in self._of_content(name, content, kind):
                        is_begun = True
                        yield replace(batch, raw=0 if file.closed else file.tell())
                except NotTextError as error:
                    if self.kind is not None or is_begun:
                        raise
                    self.left_out.append(f"{name} ({error.reason})")

    def _contents(self, file: io.FileIO) -> Iterator[tuple[str, Any, InputFormat | None]]:
        """Yield name, content and format of the file, or of each file of the archive."""
        if self.kind is not None:
            yield str(self.path), decompressed(file, self.path.name), self.kind
            return
        with closing(open_members(file, self.path, _is_visible)) as found:
            for member, stored in found:
                if stored is None:
                    self.left_out.append(f"{self.path}/{member} (a link to another file)")
                    continue
                plain: Any = decompressed(io.BufferedReader(cast(Any, stored), HEAD_BYTES), member)
                content = io.BufferedReader(plain, HEAD_BYTES)
                if content.peek(1):
                    yield f"{self.path}/{member}", content, self.config.input_format

    def _of_content(self, name: str, content: Any, kind: InputFormat | None) -> Iterator[TextBatch]:
        kind = kind or format_of(name, content.peek(HEAD_BYTES))
        encoding = self.config.encoding
        if kind == "text":
            text = content.read() if encoding == BINARY else b"".join(utf8_chunks(content, encoding, name))
            yield TextBatch(name, 1, 1, "", self.split, ((name, text),))
            return
        if encoding == BINARY and kind not in ("parquet", "arrow"):
            raise UserError(
                f"{name}: encoding={BINARY} takes bytes, and rows of {kind} are text; give encoding=NAME (such as "
                "cp1252), or also input_format=text to take all files as they are"
            )
        if kind != "jsonl":
            column: list[str] = []

            def choose(rows: Sequence[Mapping[str, Any]]) -> list[str]:
                column.append(choose_column(rows, name, self.config.text_column))
                return column

            rows = read_rows(name, content, kind, encoding, choose)
            if kind == "json" and self.config.text_column is None:
                rows = _unless_settings(name, rows)
            yield from self._of_rows(name, rows)
            return
        chosen, first = "", 1
        for block in line_blocks(utf8_chunks(content, encoding, name)):
            if not chosen:
                rows = [row for _, row in islice(json_rows(name, block.split(b"\n"), first), CHOICE_ROWS)]
                chosen = choose_column(rows, name, self.config.text_column) if rows else ""
            num_lines = block.count(b"\n")
            yield TextBatch(name, first, num_lines + 1, chosen, self.split, block)
            first += num_lines

    def _of_rows(self, name: str, rows: Iterable[tuple[str, Any]]) -> Iterator[TextBatch]:
        """Yield the texts of rows, or texts, in batches; `document` is their number."""
        wanted, rest = self.config.text_column, iter(rows)
        first = list(islice(rest, CHOICE_ROWS))
        mappings = [row for _, row in first if isinstance(row, Mapping)]
        column = choose_column(mappings, name, wanted) if mappings else wanted or "text"
        texts = (
            (place, text_of_row(row if isinstance(row, Mapping) else {column: row}, column, place))
            for place, row in chain(first, rest)
        )
        for batch in batched(texts, lambda text: len(text[1])):
            yield TextBatch(name, 1, len(batch), column, self.split, tuple(batch))


def _unless_settings(
    name: str, rows: Iterator[tuple[str, Mapping[str, Any]]]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of JSON, unless they are one object without a text: the settings of some program.

    Raises:
        NotTextError: they are.
    """
    first = list(islice(rows, 2))
    if len(first) == 1 and "text" not in first[0][1]:
        reason = "JSON, but no list of rows"
        raise NotTextError(
            f"{name} is {reason}; leave it out, name the column of its text with text_column, or give "
            "input_format=text to read it as it is",
            reason,
        )
    yield from chain(first, rows)


def _is_visible(member: str) -> bool:
    """Return whether a file of an archive is read: not one that is hidden, or that macOS adds."""
    return not any(part.startswith(".") or part == "__MACOSX" for part in PurePosixPath(member).parts if part != ".")


def choose_column(rows: Sequence[Mapping[str, Any]], name: str, wanted: str | None) -> str:
    """Return the column that has the texts: the one that is wanted, else text, else the only one with a text.

    Args:
        rows: the first rows.
        name: of the file, for messages.
        wanted: the column that has the texts, or None.

    Raises:
        NotTextError: there is no such column, or several.
    """
    columns = dict.fromkeys(str(column) for row in rows for column in row)
    column = "text" if wanted is None else wanted
    if column in columns:
        return column
    texts = {
        column
        for row in rows
        for column, value in row.items()
        if isinstance(value, str) and value and not _is_number(value)
    }
    if wanted is None and len(texts) == 1:
        return texts.pop()
    missing, known = f"no column '{column}'", ", ".join(columns)
    raise NotTextError(
        f"{name}: {missing}; the columns are {known}; name that of the text with text_column", f"{missing}, but {known}"
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def text_of_row(row: Mapping[str, Any], column: str, place: str) -> bytes:
    """Return the text of a row as UTF-8.

    Raises:
        UserError: it has no such column, or that holds no text.
    """
    value = row.get(column)
    if not isinstance(value, str):
        columns = ", ".join(map(str, row))
        held = f"holds {value!r:.40}, which is no text" if column in row else f"is missing; the columns are {columns}"
        raise UserError(f"{place}: column '{column}' {held}; correct the row or leave it out, or name another column")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{place}: the text has half a character, {value[error.start]!r}, at index {error.start}; remove it"
        ) from None


@dataclass(frozen=True)
class SplitChoice:
    """Which split each row is in, unless that of its file is given."""

    seed: int
    splits: bytes = b""
    """Index in `SPLITS` for each bucket, or empty if rows are split by their positions."""
    ends: tuple[float, ...] = ()
    """Where train, valid and test end, in bytes of all texts."""

    def read(self, batch: tuple[TextBatch, int]) -> list[tuple[SplitName, int, Document]]:
        """Return for each row of a batch, with so many bytes of text before it, its split, its number and the row.

        Raises:
            UserError: a row is damaged or has no text, or the rows are not those that were measured.
        """
        rows, position = list[tuple[SplitName, int, Document]](), batch[1]
        for number, (place, text) in enumerate(batch[0].texts(), start=batch[0].document):
            if batch[0].split is not None:
                split = batch[0].split
            elif self.splits:
                split = SPLITS[self.splits[bucket_of(self.seed, text)]]
            else:
                split = SPLITS[min(bisect_right(self.ends, position), len(SPLITS) - 1)]
            rows.append((split, number, Document(place, [text], len(text))))
            position += len(text)
        if batch[0].num_bytes not in (None, position - batch[1]):
            raise _changed(batch[0].name)
        return rows


def _changed(name: str) -> UserError:
    return UserError(f"{name} changed while it was read; try again once it is complete")


def bucket_of(seed: int, text: bytes) -> int:
    """Return a number below `NUM_BUCKETS` that depends on the text and the seed."""
    return int.from_bytes(hashlib.sha256(b"%d\0" % seed + text).digest()[:2], "big")


def _measure(seed: int, batch: TextBatch) -> tuple[int, list[tuple[int, int]], int]:
    """Return the bytes of a batch, those of each row with its bucket, and the bytes of the file read so far."""
    sizes = [(0 if batch.split else bucket_of(seed, text), len(text)) for _, text in batch.texts()]
    return sum(size for _, size in sizes), [] if batch.split else sizes, batch.raw


@dataclass(frozen=True)
class DocumentRows:
    """All rows of a corpus, in their order."""

    files: tuple[RowFile, ...]
    config: TextConfig
    sizes: tuple[int, ...] = ()
    """Bytes of text of each batch, once they were measured."""
    choice: SplitChoice = field(default_factory=lambda: SplitChoice(1))

    @property
    def num_bytes(self) -> int:
        """Bytes of text, once they were measured."""
        return sum(self.sizes)

    @property
    def splits(self) -> tuple[SplitName, ...]:
        """The splits that the rows are in."""
        given = {file.split for file in self.files}
        fractions = {"train": 1.0, "valid": self.config.valid_fraction, "test": self.config.test_fraction}
        return tuple(split for split in SPLITS if (fractions[split] if given == {None} else split in given))

    def batches(self) -> Iterator[tuple[TextBatch, int]]:
        """Yield all rows in batches, each with the number of bytes of text before it."""
        sizes, position, document = iter(self.sizes), 0, 0
        for file in self.files:
            for batch in file.batches():
                size = next(sizes, -1) if self.sizes else None  # -1: no batch has it
                yield replace(batch, document=document, num_bytes=size), position
                position, document = position + (size or 0), document + batch.document
        if next(sizes, None) is not None:
            raise _changed(str(self.files[-1].path))

    def documents(self, splits: Sequence[SplitName]) -> Iterator[Document]:
        """Yield the rows of some splits as documents."""
        for batch in self.batches():
            yield from (row for split, _, row in self.choice.read(batch) if split in splits)

    def measure(
        self,
        found: Mapping[str, Any],
        *,
        workers: int = 1,
        progress: Progress = no_progress,
        save: Callable[[Callable[[], dict[str, Any]]], None],
    ) -> dict[str, Any]:
        """Read all rows to check and measure them, and return what `measured` takes, as JSON values.

        Args:
            found: what was saved before, or nothing.
            workers: number of processes.
            progress: called with the stage `read rows`.
            save: called now and then with a function that returns the measures so far.
        """
        sizes, buckets = list[int](found.get("sizes", ())), Counter[int](dict(found.get("buckets", ())))
        total, before, last = sum(file.size() for file in self.files), 0, 0
        batches = (batch for batch, _ in islice(self.batches(), len(sizes), None))

        def values() -> dict[str, Any]:
            left_out = [name for file in self.files for name in file.left_out]
            return {"sizes": sizes, "buckets": sorted(buckets.items()), "left_out": left_out, "whole": False}

        with closing(ordered_map(partial(_measure, self.config.seed), batches, workers=workers)) as results:
            for size, of_rows, raw in results:
                sizes.append(size)
                for bucket, length in of_rows:
                    buckets[bucket] += length
                before, last = before + last if raw < last else before, raw
                progress("read rows", before + raw, max(total, before + raw))
                save(values)
        return values() | {"whole": True}

    def measured(self, measures: Mapping[str, Any]) -> tuple[DocumentRows, str, str]:
        """Return the rows with the split that follows from their measures, a description of it, and a note or nothing.

        Raises:
            UserError: a split would be empty.
        """
        config, sizes = self.config, tuple(measures["sizes"])
        if not sum(sizes):
            names = ", ".join(measures["left_out"][:3]) or ", ".join(str(file.path) for file in self.files[:3])
            raise UserError(f"there is no text in {names}; give files with texts")
        if all(file.split for file in self.files):
            return replace(self, sizes=sizes), "", ""
        fractions, unequal = {"valid": config.valid_fraction, "test": config.test_fraction}, ""
        if config.split_method == "end":
            ends = tuple(accumulate((1 - sum(fractions.values()), *fractions.values())))
            choice = SplitChoice(config.seed, ends=tuple(sum(sizes) * end for end in ends))
            how = f"valid {fractions['valid']:g} and test {fractions['test']:g} of it, split off at the end"
        else:
            buckets = {bucket: size for bucket, size in measures["buckets"] if size}
            drawn = draw_buckets(buckets, cast(Any, fractions))
            if any(not drawn[split] for split in SPLITS if split == "train" or fractions[split]):
                advice = "; unpack archives to split the text of their files" * any(not one.kind for one in self.files)
                if any(one.kind in ("json", "jsonl", "csv", "tsv") for one in self.files):
                    advice = "; input_format=text takes the files for text"
                raise UserError(
                    f"{len(buckets):,} different documents cannot be split into train, valid and test; give more, or "
                    f"change valid_fraction and test_fraction (0 for none), or give train, valid and test alone{advice}"
                )
            parts = {split: sum(buckets[one] for one in drawn[cast(Any, split)]) / sum(sizes) for split in fractions}
            if any(abs(parts[split] - asked) > 0.5 * asked for split, asked in fractions.items()):
                found = " and ".join(f"{split} has {part:.1%}" for split, part in parts.items())
                unequal = f"{found} of the text, as rows with the same text are in one split, and none is divided"
            table = bytearray(NUM_BUCKETS)
            for split in SPLITS:
                for bucket in drawn[split]:
                    table[bucket] = SPLITS.index(split)
            choice = SplitChoice(config.seed, bytes(table))
            how = f"rows drawn at random by their text with seed {config.seed}"
        return replace(self, sizes=sizes, choice=choice), how, unequal


@dataclass(frozen=True)
class RowSource(TextSource):
    """A text source of rows, whose `splits` are empty."""

    rows: DocumentRows = field(kw_only=True)


def rows_in_memory(texts: object, config: TextConfig | None = None) -> RowFile | None:
    """Return the rows of a DataFrame, of a data set of `datasets`, or of mappings; None if these are no rows.

    Args:
        texts: what may have rows; no iterator, since it is iterated more than once.
        config: which column has the text.

    Raises:
        UserError: no column has the texts, or several do.
    """
    config, table = config or TextConfig(), cast(Any, texts)
    if hasattr(texts, "to_pylist") and hasattr(texts, "column_names"):  # of pyarrow
        texts = table = table.to_pylist()
    columns = getattr(texts, "columns", None)
    if columns is not None and hasattr(texts, "shape"):  # a DataFrame: its iterator yields the names of columns
        names = {str(name): name for name in columns}
        if len(names) < len(columns):
            raise UserError(f"the table has two columns of one name; rename one of {', '.join(map(str, columns))}")
        heads = [[(name, value) for value in islice(table[names[name]], CHOICE_ROWS)] for name in names]
        column = choose_column([dict(row) for row in zip(*heads, strict=True)], "the table", config.text_column)
        table = table[names[column]]
    else:
        if isinstance(texts, str | bytes | Mapping) or not isinstance(texts, Iterable):  # pyrefly: ignore[implicit-any-type-argument]
            return None
        first = list(islice(table, CHOICE_ROWS))
        if not first or not all(isinstance(row, Mapping) for row in first):
            return None
        column = choose_column(first, "the rows", config.text_column)
        if hasattr(table, "select_columns"):  # a data set, which then decodes no pictures
            table = table.select_columns([column])
    return RowFile(Path("the table"), config.model_copy(update={"text_column": column}), "text", rows=table)
