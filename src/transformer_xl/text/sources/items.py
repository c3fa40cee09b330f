"""The texts of an experiment, such as sentences, from lines, CSV or JSON lines, each with labels that identify it.

In a text file each line is an item, and its label is the number of the line. In CSV and JSON lines each row or object
is an item; one of its columns is the text, and others are its labels.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

from transformer_xl.config import UserError
from transformer_xl.files import parse_json

InputFormat = Literal["text", "csv", "tsv", "jsonl"]
_SUFFIXES: dict[str, InputFormat] = {".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl"}


@dataclass(frozen=True)
class ItemColumns:
    """Which columns of a table hold what."""

    text: str = "text"
    labels: tuple[str, ...] = ("item",)
    """Columns that together identify an item, such as item and condition; they are copied to the results."""
    document: str | None = None
    """Column with the document that an item belongs to, or None if all items of a file are one document."""


@dataclass(frozen=True)
class TextItem:
    """One text of an experiment."""

    labels: Mapping[str, str | int]
    """Names and values that identify it."""
    text: str
    document: str | int = ""
    """Items of the same document follow each other, and each is read after those before it."""

    @property
    def name(self) -> str:
        """The labels, for messages."""
        return ", ".join(f"{name} {value}" for name, value in self.labels.items())


def format_of(name: str) -> InputFormat:
    """Return the format that the suffix of a file name says, that of compression aside; text for any other."""
    stem = name.lower()
    for compression in (".gz", ".bz2", ".xz"):
        stem = stem.removesuffix(compression)
    return next((kind for suffix, kind in _SUFFIXES.items() if stem.endswith(suffix)), "text")


def read_items(
    name: str, content: bytes, input_format: InputFormat, columns: ItemColumns | None = None
) -> list[TextItem]:
    """Return the items of a file, in order.

    Args:
        name: name of the file, for messages.
        content: its content in UTF-8.
        input_format: its format.
        columns: columns of CSV and JSON lines.

    Raises:
        UserError: the file is not UTF-8, is empty or damaged, lacks a column, or has an item without text or labels.
    """
    text = decode_table(name, content)
    if input_format == "text":
        lines = text.removesuffix("\n").split("\n") if text else []
        items = [TextItem({"item": number}, line.removesuffix("\r")) for number, line in enumerate(lines, start=1)]
    else:
        delimiter = "\t" if input_format == "tsv" else ","
        rows = json_rows(name, text) if input_format == "jsonl" else csv_rows(name, text, delimiter)
        items = [item_of(row, columns or ItemColumns(), place) for place, row in rows]
    if not any(item.text.split() for item in items):
        raise UserError(f"{name}: the text is empty; give at least one line or row with a text")
    return items


def decode_table(name: str, content: bytes) -> str:
    """Return the content of a file as text, without a byte order mark.

    Raises:
        UserError: it is not UTF-8.
    """
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        place = f"{name}: byte {error.start:,}: not UTF-8 (byte 0x{content[error.start]:02x})"
        raise UserError(f"{place}; save it as UTF-8") from None


def item_of(row: Mapping[str, Any], columns: ItemColumns, place: str) -> TextItem:
    """Return the item of a row.

    Args:
        row: values by the name of the column.
        columns: which columns to use.
        place: where the row is, for messages.

    Raises:
        UserError: a column is missing, the text is empty, or a label or document is neither text nor an integer.
    """
    named = [("text_column", columns.text), *(("item_columns", label) for label in columns.labels)]
    if columns.document is not None:
        named.append(("document_column", columns.document))
    for setting, column in named:
        if column not in row:
            known = ", ".join(map(str, row))
            raise UserError(f"{place}: no column '{column}'; the columns are {known}; name yours with {setting}")
    text = row[columns.text]
    if not isinstance(text, str) or not text.strip():
        raise UserError(
            f"{place}: the text (column '{columns.text}') is empty or no text; give it, or leave the row out"
        )
    labels = {label: _label(row[label], label, place) for label in columns.labels}
    document = "" if columns.document is None else _label(row[columns.document], columns.document, place)
    return TextItem(labels, text, document)


def _label(value: Any, column: str, place: str) -> str | int:
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, str) and value.strip():
        return value
    raise UserError(f"{place}: column '{column}' holds {value!r}; expected text or an integer that names the item")


def csv_rows(name: str, text: str, delimiter: str, *, quotes: bool = True) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield where each row of a table with a header is, and its values by column.

    Args:
        name: name of the file, for messages.
        text: its content.
        delimiter: what separates columns.
        quotes: whether quotation marks enclose values; otherwise they belong to them.

    Raises:
        UserError: it is no such table.
    """
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a field may be a long document
    quoting = csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True, quoting=quoting)
    try:
        header = reader.fieldnames or ()
        other = [mark for mark in ";\t," if len(header) == 1 and mark != delimiter and mark in header[0]]
        if other:
            advice = "replace them by commas" if other == [";"] else "give input_format tsv, or csv for commas"
            raise UserError(f"{name}: columns seem to be separated by {other[0]!r}, not by {delimiter!r}; {advice}")
        if len(set(header)) < len(header):
            raise UserError(f"{name}: two columns have the same name; rename one of {', '.join(header)}")
        for row in reader:
            place = f"{name}: line {reader.line_num:,}"
            if None in row or None in row.values():
                raise UserError(
                    f"{place}: not one value for each of the columns {', '.join(header)}; put a text with a comma, tab "
                    "or quotation mark in quotation marks, and double those inside"
                )
            yield place, row
    except csv.Error as error:
        raise UserError(
            f"{name}: line {reader.reader.line_num:,}: not CSV ({error}); check its quotation marks"
        ) from None


def json_rows(name: str, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield where each object of JSON lines is, and the object.

    Raises:
        UserError: a line is no JSON object.
    """
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{name}: line {number:,}"
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise UserError(f'{place}: expected a JSON object, such as {{"item": 1, "text": "A sentence."}}')
        yield place, row


def check_items(items: Iterable[TextItem]) -> None:
    """Check that no two items have the same labels, and that the items of each document follow each other.

    Raises:
        UserError: they do not.
    """
    seen, documents, last = set[tuple[Any, ...]](), set[str | int](), None
    for item in items:
        key = tuple(item.labels.items())
        if key in seen:
            raise UserError(
                f"two items have the same labels ({item.name}); give each its own, or name the columns that together "
                "identify an item, such as item_columns=item,condition"
            )
        seen.add(key)
        if item.document != last and item.document in documents:
            raise UserError(f"the items of document {item.document} do not follow each other; sort them by document")
        documents.add(item.document)
        last = item.document
