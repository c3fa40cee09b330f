"""Finds out what a file holds, and reads the rows of tables: CSV and TSV, JSON lines and lists, Parquet and Arrow.

A row is a mapping from columns to values. A text that stands alone in JSON is a row with the column text. Rows are read
one after another, in little memory, whatever the size of the file.
"""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path, PurePath
from tempfile import TemporaryFile
from typing import IO, Any

from transformer_xl.config import UserError
from transformer_xl.config.extras import missing_extra
from transformer_xl.files import parse_json
from transformer_xl.text.sources.archives import NotTextError, archive_of, utf8_chunks, without_compression
from transformer_xl.text.text_config import InputFormat

HEAD_BYTES = 2**16
"""Length of the start of a file that says what it holds."""

_SUFFIXES: dict[str, InputFormat] = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
_NOT_TEXT = {  # by the first bytes, where a text could be suspected; all others are no valid text
    b"%PDF-": "a PDF document",
    b"{\\rtf": "a document in RTF",
    b"SQLite format 3\0": "an SQLite database",
    b"\xd0\xcf\x11\xe0": "an old Office document",
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
    b"GIF8": "a picture",
    b"\x93NUMPY": "a NumPy array",
    b"GGUF": "a GGUF model",
}
_OF_ZIP = {"[Content_Types].xml": "an Office document", "mimetype": "an OpenDocument or EPUB file"}
_JSON_START = re.compile(r'\{\s*"(?:[^"\\]|\\.)*"\s*:|\[\s*\{\s*"')
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_TEXTS_START = re.compile(r'\[\s*"(?:[^"\\]|\\.)*"\s*,')
_SPACE = re.compile(r"[ \t\n\r]*")
_AS_TEXT = "input_format=text reads the file as it is"
_BATCH_ROWS = 256


def format_of(name: str, head: bytes) -> InputFormat:
    """Return what a file holds: JSON, Parquet and Arrow by content, CSV and TSV by suffix; text if it is none of these.

    Args:
        name: its name; of a suffix of compression nothing is made.
        head: its first bytes, decompressed, `HEAD_BYTES` of them if it has so many.

    Raises:
        NotTextError: it is neither text nor a table, but something known.
    """
    what = next((what for magic, what in _NOT_TEXT.items() if head.startswith(magic)), None)
    is_pickle = head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5")
    if is_pickle or name.lower().endswith((".pkl", ".pickle")):  # protocol 0 is letters alone
        what = "a Python pickle"
    if head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < 2**32:
        what = "a safetensors file"
    what = "an archive" if archive_of(head, name) else what
    if what:
        raise _not_text(name, what)
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith((b"ARROW1\0\0", b"\xff\xff\xff\xff")):
        return "arrow"
    stem = without_compression(name).lower()
    by_suffix = next((kind for suffix, kind in _SUFFIXES.items() if stem.endswith(suffix)), None)
    if by_suffix in ("parquet", "arrow") and head:
        raise UserError(f"{name}: damaged: it does not begin as {by_suffix} does; get it again")
    if by_suffix not in (None, "jsonl"):
        return by_suffix
    return _json_format(head, PurePath(stem)) or by_suffix or ("json" if stem.endswith(".json") else "text")


def _json_format(head: bytes, name: PurePath) -> InputFormat | None:
    """Return the format of JSON that has rows, by its first two values, or None for anything else.

    A list of texts, or a text in quotation marks (which may be dialogue), is JSON only where a name says nothing.
    """
    is_named = bool(name.suffix)  # unlike standard input
    is_cut, text = len(head) >= HEAD_BYTES, head[:HEAD_BYTES].decode(errors="ignore").lstrip("\ufeff \t\r\n")
    values, ends = list[Any](), [0]
    with suppress(ValueError, RecursionError):
        while len(values) < 2 and (start := _after_space(text, ends[-1])) < len(text):
            value, end = json.JSONDecoder().raw_decode(text, start)
            values.append(value)
            ends.append(end)
    if not values:  # a long one, or a damaged one
        if not (_JSON_START.match(text) or (not is_named and _TEXTS_START.match(text))):
            return None
        return "jsonl" if is_cut and "\n" not in text and text[0] == "{" else "json"
    lists = [value for value in values if isinstance(value, list)]
    row = values[0][0] if values[0] and lists[:1] == values[:1] else values[0]
    if isinstance(row, str):
        is_all = len(values) == 2 or _after_space(text, ends[1]) == len(text)
        if not is_all or (is_named and len(lists) < 2):
            return None
        return "json" if len(lists) == 1 else "jsonl"
    rest = text[_after_space(text, ends[1]) :]
    # another text may begin with an example of JSON; a second row may be cut, or damaged
    is_example = len(values) == 1 and rest and rest[0] != "{" and not _JSON_START.match(rest)
    if not isinstance(row, dict) or not row or (is_example and name.suffix not in ("", ".json", ".jsonl", ".ndjson")):
        return None
    is_line = "\n" not in text[: ends[1]] and text[ends[1] :].lstrip(" \t\r")[:1] in ("", "\n")
    return "jsonl" if is_line and not lists and (is_cut or len(values) == 2 or name.suffix != ".json") else "json"


def _after_space(text: str, position: int) -> int:
    return _SPACE.match(text, position).end()  # pyrefly: ignore[missing-attribute]


def _not_text(name: str, what: str) -> NotTextError:
    return NotTextError(f"{name} is {what}, not text; save its text as a file, or leave it out", what)


def check_zip(path: Path) -> None:
    """Check that an archive, if its suffix or content is that of zip, is whole and no document of an office program.

    Raises:
        NotTextError: it is not.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        what = next((what for name, what in _OF_ZIP.items() if name in names), None)
        what = "a PyTorch file" if any(name.endswith("/data.pkl") for name in names) else what
        if what:
            raise _not_text(str(path), what)
    elif path.suffix.lower() == ".zip":
        raise NotTextError(
            f"{path} is no zip archive, or a damaged one; get it again, or leave it out", "a damaged zip"
        )


def looks_like_table(head: bytes) -> bool:
    """Return whether a text might be CSV or TSV: three lines or more with as many columns as a header of names."""
    text = head.removeprefix(b"\xef\xbb\xbf").decode("utf-8", errors="replace")
    lines = text.splitlines()[:-1][:20]  # the last may be cut
    if len(lines) < 3:
        return False
    with suppress(csv.Error):
        header, *rows = csv.reader(lines, delimiter=_delimiter(lines[0]))
        named = len(set(header)) == len(header) > 1 and all(re.fullmatch(r"\w.{0,60}", cell) for cell in header)
        complete = rows[:-1] if len(rows) > 1 else rows  # the last may go on in the next line
        return named and all(len(row) == len(header) for row in complete)
    return False


def read_rows(
    name: str,
    content: bytes | IO[bytes],
    kind: InputFormat | None = None,
    encoding: str = "utf-8",
    choose: Callable[[Sequence[Mapping[str, Any]]], list[str]] | None = None,
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield where each row of a table is, and its values by column.

    Args:
        name: name of the file, for messages.
        content: its content, decompressed: bytes, or an open file, which need not be able to seek.
        kind: its format, or None for what its content or suffix says.
        encoding: its encoding, unless it is Parquet or Arrow.
        choose: called with the first rows of Parquet or Arrow, returns the columns that are read; None for all.

    Raises:
        UserError: it is no such table, is damaged, or a library that reads it is missing.
    """
    file = io.BytesIO(content) if isinstance(content, bytes) else content
    kind = kind or format_of(name, content if isinstance(content, bytes) else b"")
    if kind in ("parquet", "arrow"):
        return _arrow_rows(name, file, kind, choose)
    chunks = utf8_chunks(file, encoding, name)
    if kind == "json":
        return _json_values(name, chunks)
    if kind == "jsonl":
        return json_rows(name, _lines(chunks))
    # a carriage return alone ends a line too
    lines = (line.decode() for block in line_blocks(chunks) for line in block.splitlines(keepends=True))
    return csv_rows(name, lines, default="\t" if kind == "tsv" else ",")


def line_blocks(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield a text in blocks of whole lines."""
    parts: list[bytes] = []
    for chunk in chunks:
        end = chunk.rfind(b"\n") + 1
        if end:
            yield b"".join([*parts, chunk[:end]])
            parts.clear()
        parts.append(chunk[end:])
    if last := b"".join(parts):
        yield last


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a text with their ends."""
    for block in line_blocks(chunks):
        yield from io.BytesIO(block)


def csv_rows(
    name: str, lines: Iterable[str], *, quotes: bool = True, default: str = ","
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield where each row of a table with a header is, and its values by column.

    Args:
        name: name of the file, for messages.
        lines: its lines with their ends. What separates columns is found in the first.
        quotes: whether quotation marks enclose values; otherwise they belong to them.
        default: what separates columns if the first line, of one column, does not say it.

    Raises:
        UserError: it is no such table.
    """
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a field may be a long document
    rest, num_before = iter(lines), 0
    first = next(rest, "")
    delimiter = _delimiter(first, default)
    if by_excel := re.fullmatch(r"sep=(.)\s*", first):  # a line that Excel writes before the header
        delimiter, first, num_before = by_excel[1], next(rest, ""), 1
    quoting = csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE
    reader = csv.reader(chain([first], rest), delimiter=delimiter, strict=True, quoting=quoting)
    try:
        header: list[str] = next(reader, [])
        if len(set(header)) < len(header):
            raise UserError(f"{name}: two columns have the same name; rename one of {', '.join(header)}")
        records: Iterable[tuple[int, list[str]]] = ((reader.line_num, values) for values in reader)
        if delimiter == "\t" and quotes:
            records = _tsv_records(rest, len(header), reader.line_num)
        for line_number, values in records:
            if not values:
                continue
            place = f"{name}: line {line_number + num_before:,}"
            if len(values) != len(header):
                raise UserError(
                    f"{place}: not one value for each of the columns {', '.join(header)}; put a text with a comma, tab "
                    "or quotation mark in quotation marks, and double those inside; a text of several lines needs "
                    f"commas between columns, not tabs; {_AS_TEXT}"
                )
            yield place, dict(zip(header, values, strict=True))
    except csv.Error as error:
        raise UserError(
            f"{name}: line {reader.line_num + num_before:,}: not CSV ({error}); check its quotation marks; {_AS_TEXT}"
        ) from None


def _tsv_records(lines: Iterator[str], count: int, number: int) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the last line of each record of TSV, and its values.

    Many programs write TSV without a thought of quotation marks, so one that would join lines which are complete, with
    a value for each column, is part of its value.

    Args:
        lines: the lines behind the header, with their ends.
        count: number of columns.
        number: number of lines before them.
    """
    held: list[str] = []

    def held_lines() -> Iterator[str]:
        for line in lines:
            held.append(line)
            yield line

    while True:
        held.clear()
        problem: csv.Error | None = None
        values: list[str] = []
        try:
            values = next(csv.reader(held_lines(), delimiter="\t", strict=True), values)
        except csv.Error as error:
            problem = error
        if not held:
            return
        of_lines = [line.rstrip("\r\n").split("\t") for line in held]
        if (problem or len(held) > 1) and all(len(of_line) == count for of_line in of_lines):
            yield from enumerate(of_lines, start=number + 1)
        elif problem:
            raise problem
        else:
            yield number + len(held), values
        number += len(held)


def _delimiter(header: str, default: str = ",") -> str:
    """Return what separates the columns of a header; the default if nothing does."""
    return max(f"{default},\t;|", key=re.sub(r'"[^"]*"', "", header).count)


def json_rows(name: str, lines: Iterable[str | bytes], first: int = 1) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield where each object of JSON lines is, and the object; a line that is a text is an object with a text.

    Args:
        name: name of the file, for messages.
        lines: its lines.
        first: number of the first of these.

    Raises:
        UserError: a line is no JSON object.
    """
    for number, line in enumerate(lines, start=first):
        if not line.strip():
            continue
        place = f"{name}: line {number:,}"
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        yield place, _json_row(place, row, is_first=number == 1)


def _json_row(place: str, row: Any, *, is_first: bool) -> dict[str, Any]:
    if isinstance(row, str):
        return {"text": row}
    if not isinstance(row, dict):
        message = f'{place}: expected a JSON object, such as {{"item": 1, "text": "A sentence."}}; {_AS_TEXT}'
        # a fault in a later row is one of a table, which must not be left out with a note
        raise NotTextError(message, "JSON without rows") if is_first else UserError(message)
    return row


def _json_values(name: str, chunks: Iterator[bytes]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield where each row of JSON is, and the row: objects one after another, or in lists.

    The file is read as far as the next row needs.
    """
    text, position, number = "", 0, 0
    expected = "row"  # in a list: "row or ]", then ", or ]", and after a comma "item"
    while True:
        position = _after_space(text, position)
        if position == len(text):
            text, position = next(chunks, b"").decode(), 0
            if text:
                continue
            if expected != "row":
                raise UserError(f"{name}: not JSON: its end is missing; get the file again")
            return
        place, sign = f"{name}: row {number + 1:,}", text[position]
        if sign == "[" and expected == "row":
            expected, position = "row or ]", position + 1
        elif sign == "]" and "]" in expected:
            expected, position = "row", position + 1
        elif sign == "," and "," in expected:
            expected, position = "item", position + 1
        else:
            try:
                row, end = json.JSONDecoder().raw_decode(text, position)
            except RecursionError:
                raise UserError(f"{place}: nested too deeply; {_AS_TEXT}") from None
            except ValueError as error:
                if not isinstance(error, json.JSONDecodeError):  # a number of thousands of digits
                    raise UserError(f"{place}: not readable ({error}); correct it; {_AS_TEXT}") from None
                # as much again as there is, so that a long row is not read in many small steps
                more = b"".join(islice(chunks, 1 + (len(text) - position) // 2**20)).decode()
                is_cut = error.msg.startswith("Unterminated string") or error.pos > len(text) - 16
                if not more or not is_cut:
                    message = f"{place}: not JSON ({error.msg}); correct it, or get it again; {_AS_TEXT}"
                    # where even the first is not, it may be a file of settings with comments
                    raise (UserError(message) if number else NotTextError(message, f"not JSON: {error.msg}")) from None
                text, position = text[position:] + more, 0
                continue
            if "," in expected:
                raise UserError(f"{place}: not JSON (no comma before it); correct it; {_AS_TEXT}")
            position, expected = end, "row" if expected == "row" else ", or ]"
            yield place, _json_row(place, row, is_first=not number)
            number += 1


def _arrow_rows(
    name: str, file: IO[bytes], kind: InputFormat, choose: Callable[[Sequence[Mapping[str, Any]]], list[str]] | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield where each row of a Parquet or Arrow file is, and its values by column."""
    try:
        import pyarrow
        from pyarrow import ipc, parquet
    except ImportError:
        raise missing_extra("pyarrow", "parquet") from None
    with TemporaryFile() as whole:
        if not isinstance(file, (io.BytesIO, io.FileIO)):  # compressed, or of an archive; Parquet's index is at its end
            shutil.copyfileobj(file, whole, HEAD_BYTES)
            file = whole

        def batches(columns: list[str] | None) -> Iterator[Any]:
            file.seek(0)
            is_stream = file.read(4) == b"\xff\xff\xff\xff"
            file.seek(0)
            if kind == "parquet":
                table = parquet.ParquetFile(file, page_checksum_verification=True)
                names = table.schema_arrow.names
                if len(set(names)) < len(names):
                    raise pyarrow.ArrowInvalid(f"two columns have the same name: {', '.join(names)}")
                yield from table.iter_batches(_BATCH_ROWS, columns=columns)
                return
            reader = ipc.open_stream(file) if is_stream else ipc.open_file(file)
            all_batches = reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))
            for batch in all_batches:
                yield batch if columns is None else batch.select(columns)
            if is_stream:
                read = file.tell()
                file.seek(max(0, read - len(_END_OF_STREAM)))
                if file.read() != _END_OF_STREAM:
                    raise pyarrow.ArrowInvalid("its end is missing, or something follows it")

        number, columns = 0, None
        try:
            if choose is not None:
                first = next((batch for batch in batches(None) if batch.num_rows), None)
                columns = None if first is None else choose(first.slice(0, _BATCH_ROWS).to_pylist())
            for batch in batches(columns):
                for start in range(0, batch.num_rows, _BATCH_ROWS):
                    for row in batch.slice(start, _BATCH_ROWS).to_pylist():
                        number += 1
                        yield f"{name}: row {number:,}", row
        except (pyarrow.ArrowException, OSError) as error:
            problem = str(error).splitlines()[0]
            raise UserError(f"{name}: not readable, perhaps damaged or truncated ({problem}); get it again") from None
