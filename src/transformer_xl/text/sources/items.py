"""The texts of an experiment, such as sentences, from lines or the rows of a table, with labels that identify them.

In a text file each line is an item, and its label is the number of the line. In a table each row is an item; one of its
columns is the text, and others are its labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from transformer_xl.config import UserError, check_type
from transformer_xl.text.sources.tables import format_of, read_rows
from transformer_xl.text.text_config import InputFormat


@dataclass(frozen=True)
class ItemColumns:
    """Which columns of a table hold what."""

    text: str = "text"
    labels: tuple[str, ...] = ("item",)
    """Columns that together identify an item, such as item and condition; they are copied to the results."""
    document: str | None = None
    """Column with the document that an item belongs to, or None if all items of a file are one document."""
    labels_setting: str = "item_columns"
    """The setting that names the columns of labels, for messages."""


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


def read_items(
    name: str, content: bytes, input_format: InputFormat | None = None, columns: ItemColumns | None = None
) -> list[TextItem]:
    """Return the items of a file, in order.

    Args:
        name: name of the file, for messages.
        content: its content, decompressed.
        input_format: its format, or None for what its content or suffix says.
        columns: columns of a table.

    Raises:
        UserError: the file is not UTF-8, is empty or damaged, lacks a column, or has an item without text or labels.
    """
    kind = input_format or format_of(name, content)
    text = "" if kind in ("parquet", "arrow") else decode_table(name, content)
    if kind == "text":
        lines = text.removesuffix("\n").split("\n") if text else []
        items = [TextItem({"item": number}, line.removesuffix("\r")) for number, line in enumerate(lines, start=1)]
    else:
        items = [item_of(row, columns or ItemColumns(), place) for place, row in read_rows(name, content, kind)]
    if not any(item.text.split() for item in items):
        raise UserError(f"{name}: the text is empty; give at least one line or row with a text")
    return items


def decode_table(name: str, content: bytes) -> str:
    """Return the content of a file as text, without a byte order mark.

    Raises:
        UserError: it is not UTF-8.
    """
    check_type(content, bytes, "content", "give the content of a file, such as Path(...).read_bytes()")
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
    named = [("text_column", columns.text), *((columns.labels_setting, label) for label in columns.labels)]
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
