"""Tables of reading times: how long each reader took for each word, joined with the words of the texts.

A row is a reading: a reader, an item (a text), the number of a word in it, the word, and the time. Rows may come in any
order, and readers may have read different items. Words are compared with those of the texts, so that a table whose
numbers are shifted is refused, not fitted.

Shape suffixes: N readings.
"""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from transformer_xl.apps.surprisal.reading_time_config import TableLayout
from transformer_xl.config import UserError, check_type
from transformer_xl.evaluation.metrics import chunks
from transformer_xl.text.sources.items import TextItem, decode_table
from transformer_xl.text.sources.tables import csv_rows
from transformer_xl.text.token_store import Corpus
from transformer_xl.text.tokenizers import to_bytes

_SPACES = " \t\n\r\v\f"
_MISSING = {"", ".", "-", "na", "n/a", "nan", "null", "none"}  # times, in lower case; a word can be any of them
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?")


@dataclass(frozen=True, eq=False)
class ReadingTimes:
    """Reading times, joined with the words of their texts."""

    texts: dict[str, list[str]]
    """The words of each item, by its name."""
    readers: list[str]
    item_N: npt.NDArray[np.int64]
    """Index of the item of each reading, in the order of `texts`."""
    word_N: npt.NDArray[np.int64]
    """Index of its word in the item, from 0."""
    reader_N: npt.NDArray[np.int64]
    time_N: npt.NDArray[np.float64]
    """In milliseconds."""
    left_out: dict[str, int]
    """Number of rows without a reading, by the reason."""


def read_reading_times(
    name: str, content: bytes, layout: TableLayout | None = None, texts: Sequence[TextItem] | None = None
) -> ReadingTimes:
    """Read a table of reading times: CSV with a header, separated by commas, semicolons or tabs.

    Rows without a time (empty, NA and the like, or 0, as eye trackers write for a skipped word) are left out and
    counted, as are those that name no item or no word number.

    Args:
        name: name of the file, for messages.
        content: its content in UTF-8.
        layout: its columns, or None for `TableLayout()`.
        texts: the texts, each with its name as the only label, or None to take the words of the table in the order of
            their numbers.

    Raises:
        UserError: the table is damaged or lacks a column; a word does not match that of the text or of another row, or
            is missing where the text is taken from the table; a time is negative or no number; or a reader has two rows
            for one word. The message names the item, the number of the word, and what each has.
    """
    check_type(layout, (TableLayout, type(None)), "layout", "give TableLayout(...)")
    check_type(texts, (Sequence, type(None)), "texts", "give a list of TextItem")
    layout = layout or TableLayout()
    columns = [layout.item_column, layout.word_number_column, layout.word_column, layout.time_column]
    columns += [] if layout.reader_column is None else [layout.reader_column]
    words, readers, left_out = dict[tuple[str, int], tuple[str, str]](), dict[str, int](), Counter[str]()
    readings, places = list[tuple[str, int, int, float]](), list[str]()
    for place, (item, number_text, word, time, *reader) in _rows(name, content, columns, layout):
        if not item or not number_text or "NA" in (item, number_text):
            left_out["no item or word number"] += 1
            continue
        number = _whole_number(number_text, f"{place}: column '{layout.word_number_column}'")
        where = f"{place}: item {item}, word {number}"
        known, known_place = words.setdefault((item, number), (word, place))
        if not _matches(known, word, layout):
            raise UserError(f"{where}: '{word}' here and '{known}' in {known_place}; correct one of them{_or(layout)}")
        reader_index = readers.setdefault(reader[0] if reader else "", len(readers))
        readings.append((item, number, reader_index, _milliseconds(time, where, layout)))
        places.append(place)
    of_items = _own_texts(name, words, layout) if texts is None else _checked_texts(words, texts, layout)
    index_of = {item: index for index, item in enumerate(of_items)}
    first = layout.first_word_number
    reading_N4 = np.array([(index_of[item], number - first, *rest) for item, number, *rest in readings]).reshape(-1, 4)
    item_N, word_N, reader_N = reading_N4[:, :3].astype(np.int64).T
    order_N = np.lexsort((word_N, item_N, reader_N))
    if (same := np.flatnonzero(~np.diff(reading_N4[order_N, :3], axis=0).any(axis=1))).size:
        one, other = sorted(order_N[same[0] : same[0] + 2].tolist())
        item, number, reader_index, _ = readings[other]
        who = f" of reader {list(readers)[reader_index]}" if layout.reader_column else ""
        raise UserError(f"{places[other]}: item {item}, word {number}: a second row{who}; the first is {places[one]}")
    time_N = reading_N4[:, 3]
    left_out["no time"], left_out["0 ms (not read)"] = np.isnan(time_N).sum(), (time_N == 0).sum()
    left_out["shorter than min_time"] = ((time_N > 0) & (time_N < layout.min_time)).sum()
    max_time = layout.max_time or math.inf
    left_out["longer than max_time"] = (time_N > max_time).sum()
    kept_N = (time_N > 0) & (time_N >= layout.min_time) & (time_N <= max_time)
    if not kept_N.any():
        raise UserError(f"{name}: no reading time is left in column '{layout.time_column}'; name another time_column")
    arrays = (array_N[kept_N] for array_N in (item_N, word_N, reader_N, time_N))
    return ReadingTimes(of_items, list(readers), *arrays, left_out={why: int(n) for why, n in left_out.items() if n})


def _rows(name: str, content: bytes, columns: list[str], layout: TableLayout) -> Iterator[tuple[str, list[str]]]:
    """Yield where each row of a table is, and its values in the columns."""
    text = decode_table(name, content)
    flags = {column: flag for flag, column in vars(layout).items() if flag.endswith("_column")}
    for place, row in csv_rows(name, io.StringIO(text, newline=""), quotes=layout.quotes):
        for column in columns:
            if column not in row:
                flag = flags.get(column, "")
                advice = f"name yours with {flag}" if flag else "rename yours"
                advice += ", none if all rows are of one reader" if flag == "reader_column" else ""
                raise UserError(f"{place}: no column '{column}'; the columns are {', '.join(row)}; {advice}")
        yield place, [row[column].strip(_SPACES) for column in columns]


def _whole_number(text: str, where: str) -> int:
    whole = re.sub(r"\.0*$", "", text)  # programs write the whole numbers of a column with gaps as 2.0
    if not (whole.isascii() and whole.isdecimal() and len(whole) < 10):
        raise UserError(f"{where} holds '{text}'; expected a whole number")
    return int(whole)


def _milliseconds(text: str, where: str, layout: TableLayout) -> float:
    """Return a time, NaN if there is none."""
    if text.lower() in _MISSING:
        return math.nan
    number = text.translate({ord(","): ".", ord("."): ","}) if layout.decimal == "comma" else text
    if not _NUMBER.fullmatch(number):
        is_comma = layout.decimal == "point" and "," in text
        advice = "for decimal commas give decimal=comma" if is_comma else "leave it empty if there is none"
        raise UserError(f"{where}: the time '{text}' is no number; {advice}")
    if (time := float(number)) < 0 or math.isinf(time):
        raise UserError(f"{where}: the time is {text} ms; correct it, or leave it empty if there is none")
    return time


def _matches(one: str, other: str, layout: TableLayout) -> bool:
    return one == other or (layout.match == "letters" and _letters(one) == _letters(other))


def _letters(word: str) -> str:
    return "".join(character for character in word.casefold() if character.isalnum())


def _or(layout: TableLayout) -> str:
    return "" if layout.match == "letters" else ", or give match=letters to compare letters and digits alone"


def _checked_texts(
    words: Mapping[tuple[str, int], tuple[str, str]], items: Sequence[TextItem], layout: TableLayout
) -> dict[str, list[str]]:
    """Return the words of the texts that the table has words of, after comparing all words."""
    texts, first = dict[str, list[str]](), layout.first_word_number
    for item in items:
        check_type(item, TextItem, "a text", "give TextItem({'item': name}, text)")
        (label,) = map(str, item.labels.values())
        if label in texts:
            raise UserError(f"two texts are called {label}; give each its own {layout.item_column}")
        texts[label] = [word.decode("utf-8", errors="surrogateescape") for word in to_bytes(item.text).split()]
    for (name, number), (word, place) in words.items():
        if name not in texts:
            known = ", ".join(list(texts)[:10]) + (", ..." if len(texts) > 10 else "")
            raise UserError(f"{place}: item {name} is not among the texts, which are {known}; give its text too")
        text, where = texts[name], f"{place}: item {name}, word {number}: '{word}' in the table"
        if not first <= number < first + len(text):
            has = f"the text has words {first} to {first + len(text) - 1}"
            raise UserError(f"{where}, and {has}; give the whole text, or another first_word_number")
        if not _matches(text[number - first], word, layout):
            advice = f"correct one of them, give first_word_number if all are shifted{_or(layout)}"
            raise UserError(f"{where} and '{text[number - first]}' in the text; {advice}")
    used = {name for name, _ in words}
    return {name: text for name, text in texts.items() if name in used}


def _own_texts(
    name: str, words: Mapping[tuple[str, int], tuple[str, str]], layout: TableLayout
) -> dict[str, list[str]]:
    """Return the texts that the words of a table make, in the order of their numbers."""
    numbers, first = dict[str, list[int]](), layout.first_word_number
    for (item, number), (word, place) in words.items():
        if not word or any(space in word for space in _SPACES):
            raise UserError(f"{place}: item {item}, word {number} is '{word}'; expected one word, without a space")
        numbers.setdefault(item, []).append(number)
    for item, found in numbers.items():
        found.sort()
        if wrong := [at for at, number in enumerate(found, start=first) if at != number]:
            what = f"no row has word {wrong[0]}" if found[0] >= first else f"its first word has number {found[0]}"
            advice = f"words are numbered from {first}; give the texts, or another first_word_number"
            raise UserError(f"{name}: item {item}: {what}, and {advice}")
    in_order = sorted(numbers, key=lambda item: (not item.isdecimal(), int(item) if item.isdecimal() else 0, item))
    return {item: [words[item, number][0] for number in numbers[item]] for item in in_order}


def bare(word: str) -> str:
    """Return a word without the punctuation at its ends, in lower case; punctuation alone is left as it is."""
    return re.sub(r"^\W+|\W+$", "", word).casefold() or word


def corpus_word_counts(corpus: Corpus) -> Counter[str]:
    """Count the words of the training text of a corpus, as `bare` has them.

    Raises:
        UserError: its tokens are no text.
    """
    check_type(corpus, Corpus, "corpus", "give run.open_corpus()")
    tokenizer, counts, rest = corpus.tokenizer, Counter[bytes](), b""
    if not tokenizer.is_text:
        raise UserError("the tokens of the corpus are no text, so words have no frequencies; give a table: frequencies")
    split, decoder = corpus.split("train"), tokenizer.stream_decoder()
    for chunk_K, is_start in chunks(split.tokens, split.document_starts):
        if is_start:
            rest, decoder = rest + decoder.finish().encode() + b" ", tokenizer.stream_decoder()
        if tokenizer.is_lossless:
            content = rest + tokenizer.decode_bytes(chunk_K)
        else:  # whether a token begins a word can depend on the tokens before it, which the chunk alone lacks
            content = rest + "".join(map(decoder.push, chunk_K.tolist())).encode()
        words = content.split()
        rest = words.pop() if words and not content[-1:].isspace() else b""
        counts.update(words)
    counts.update((rest + decoder.finish().encode()).split())
    return _bare_counts((word.decode("utf-8", errors="replace"), count) for word, count in counts.items())


def read_word_counts(name: str, content: bytes) -> Counter[str]:
    """Read a table of word frequencies, CSV with the columns `word` and `count`.

    Raises:
        UserError: the table is damaged, lacks a column, or has a count that is no number.
    """
    rows = _rows(name, content, ["word", "count"], TableLayout())
    return _bare_counts((word, _whole_number(count, f"{place}: column 'count'")) for place, (word, count) in rows)


def _bare_counts(counts: Iterable[tuple[str, int]]) -> Counter[str]:
    total = Counter[str]()
    for word, count in counts:
        total[bare(word)] += count
    return total
