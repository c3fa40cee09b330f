"""Tables of reading times are joined with their texts by item, number and word, or refused with the place."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from library_tokenizers import word_piece

from transformer_xl.apps.surprisal.reading_time_config import TableLayout
from transformer_xl.apps.surprisal.reading_times import (
    ReadingTimes,
    bare,
    corpus_word_counts,
    read_reading_times,
    read_word_counts,
)
from transformer_xl.config import UserError
from transformer_xl.evaluation import metrics
from transformer_xl.text.corpus_writer import write_corpus
from transformer_xl.text.documents import Document
from transformer_xl.text.sources.items import TextItem
from transformer_xl.text.tokenizers import ByteTokenizer, Tokenizer
from transformer_xl.text.tokenizers.library import LibraryTokenizer
from transformer_xl.text.tokenizers.pre_tokenizer import PreTokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer

HEADER = "reader,item,word_number,word,time"
# two readers; item 1 has a word twice and punctuation; b has read a part, and a word of item 2 that a skipped
ROWS = [
    *("a,1,1,The,300", 'a,1,2,"dog,",310.5', "a,1,3,the,290", "a,1,4,dog.,NA"),
    *("a,2,1,Caf\u00e9,400", "a,2,2,NA,350", "b,1,3,the,280", "b,1,1,The,0", "b,2,2,NA,360", "b,2,3,null,."),
]
TEXTS = {"1": ["The", "dog,", "the", "dog."], "2": ["Caf\u00e9", "NA", "null"]}
READINGS = {
    *(("a", "1", 0, 300.0), ("a", "1", 1, 310.5), ("a", "1", 2, 290.0), ("a", "2", 0, 400.0), ("a", "2", 1, 350.0)),
    *(("b", "1", 2, 280.0), ("b", "2", 1, 360.0)),
}


def table(*rows: str, header: str = HEADER) -> bytes:
    return "\n".join([header, *rows]).encode() + b"\n"


def read(content: bytes, texts: dict[str, str] | None = None, **layout: object) -> ReadingTimes:
    items = None if texts is None else [TextItem({"item": name}, text) for name, text in texts.items()]
    return read_reading_times("t.csv", content, TableLayout.model_validate(layout), items)


def readings(times: ReadingTimes) -> set[tuple[str, str, int, float]]:
    items = list(times.texts)
    columns = zip(
        times.reader_N.tolist(), times.item_N.tolist(), times.word_N.tolist(), times.time_N.tolist(), strict=True
    )
    return {(times.readers[reader], items[item], word, time) for reader, item, word, time in columns}


def test_rows_are_joined_in_any_order() -> None:
    for seed in range(4):
        shuffled = [ROWS[index] for index in np.random.default_rng(seed).permutation(len(ROWS))]
        for texts in (None, {name: " ".join(words) for name, words in TEXTS.items()}):
            times = read(table(*shuffled), texts)
            assert times.texts == TEXTS
            assert readings(times) == READINGS
            assert times.left_out == {"no time": 2, "0 ms (not read)": 1}


@pytest.mark.parametrize(
    ("content", "layout"),
    [
        (b"\xef\xbb\xbf" + table(*ROWS), {}),
        (table(*ROWS).replace(b"\n", b"\r\n"), {}),
        (table(*ROWS).replace(b'"dog,"', b"dog@").replace(b",", b"\t").replace(b"@", b","), {}),
        (table(*ROWS).replace(b'"dog,"', b"dog@").replace(b",", b";").replace(b"310.5", b"310,5").replace(b"@", b","),
         {"decimal": "comma"}),
        (table(*(f'"{number}",{row}' for number, row in enumerate(ROWS)), header=f'"",{HEADER}'), {}),  # of write.csv
        (table(*(row.replace(",1,", ",1.0,") for row in ROWS)).replace(b",1.0,", b",1,", 1), {"item_column": "item"}),
        (table(*ROWS, header="WorkerId,story,zone,w,RT"), {"reader_column": "WorkerId", "item_column": "story",
         "word_number_column": "zone", "word_column": "w", "time_column": "RT"}),
        (table(*ROWS, "a,,,,", "a,NA,NA,NA,200"), {}),
    ],
    ids=["mark", "CRLF", "tabs", "semicolons", "row names", "1.0", "other columns", "rows without a place"],
)  # fmt: skip
def test_layouts(content: bytes, layout: dict[str, str]) -> None:
    if b",1.0," in content:  # as programs write the whole numbers of a column with gaps, in the word's number
        content = table(*ROWS).replace(b",1,The", b",1.0,The").replace(b",3,the", b",3.0,the")
    assert readings(read(content, **layout)) == READINGS


def test_quotation_marks_can_belong_to_words() -> None:
    content = table('a\t1\t1\t"If\t200', 'a\t1\t2\tyou"\t210', header=HEADER.replace(",", "\t"))
    assert read(content, quotes=False).texts == {"1": ['"If', 'you"']}


def test_numbers_of_words_can_begin_elsewhere() -> None:
    content = table("a,1,2,dog,200", "a,1,3,ran,210")
    assert readings(read(content, first_word_number=2)) == {("a", "1", 0, 200.0), ("a", "1", 1, 210.0)}
    assert readings(read(content, {"1": "The dog ran", "2": "No"})) == {("a", "1", 1, 200.0), ("a", "1", 2, 210.0)}


def test_words_can_match_by_letters() -> None:
    content = table("a,1,1,\u201cThe,200", "a,1,2,DOG,210", "b,1,2,dog.,220")
    assert read(content, {"1": "the dog,"}, match="letters").texts == {"1": ["the", "dog,"]}


def test_one_reader_and_limits_of_time() -> None:
    content = table("1,1,The,99", "1,2,dog,3001", "1,3,ran,300", header="item,word_number,word,time")
    times = read(content, reader_column=None, min_time=100, max_time=3000)
    assert (times.time_N.tolist(), times.readers) == ([300.0], [""])
    assert times.left_out == {"shorter than min_time": 1, "longer than max_time": 1}


BAD = {
    "other word in the text": (("a,1,1,The,300", "a,1,2,cat,310"), {"1": "The dog"}, {},
        "t.csv: line 3: item 1, word 2: 'cat' in the table and 'dog' in the text.*first_word_number.*match=letters"),
    "punctuation": (("a,1,1,The,300", 'a,1,2,"dog,",310'), {"1": "The dog"}, {}, "word 2: 'dog,' in .* 'dog' in"),
    "letters differ": (("a,1,1,Thee,300",), {"1": "The"}, {"match": "letters"}, "word 1: 'Thee' .*'The' in the text"),
    "shifted": (("a,1,0,The,300", "a,1,1,dog,310"), {"1": "The dog"}, {}, "word 0: 'The' .*words 1 to 2; .*first_"),
    "after the end": (("a,1,3,ran,300",), {"1": "The dog"}, {}, "item 1, word 3: 'ran' .* the text has words 1 to 2"),
    "no such text": (("a,7,1,The,300",), {"1": "The"}, {}, "line 2: item 7 is not among the texts, which are 1"),
    "readers disagree": (("a,1,1,The,300", "b,1,1,the,310"), None, {},
        "line 3: item 1, word 1: 'the' here and 'The' in t.csv: line 2"),
    "missing word": (("a,1,1,The,300", "b,1,3,ran,310"), None, {}, "item 1: no row has word 2, .*give the texts"),
    "begins late": (("a,1,2,dog,300",), None, {}, "item 1: no row has word 1"),
    "begins early": (("a,1,0,The,1", "a,1,1,dog,3"), None, {}, "its first word has number 0, .*first_word_number"),
    "no word": (("a,1,1,,300",), None, {}, "line 2: item 1, word 1 is ''; expected one word"),
    "two words": (("a,1,1,the dog,300",), None, {}, "word 1 is 'the dog'; expected one word, without a space"),
    "second row": (("a,1,1,The,300", "b,1,1,The,301", "a,1,1,The,NA"), None, {},
        "line 4: item 1, word 1: a second row of reader a; the first is t.csv: line 2"),
    "negative": (("a,1,1,The,-5",), None, {}, "line 2: item 1, word 1: the time is -5 ms"),
    "infinite": (("a,1,1,The,1e999",), None, {}, "the time is 1e999 ms"),
    "no number": (("a,1,1,The,fast",), None, {}, "word 1: the time 'fast' is no number; leave it empty"),
    "underscore": (("a,1,1,The,1_000",), None, {}, "the time '1_000' is no number"),
    "decimal comma": (('a,1,1,The,"312,5"',), None, {}, "the time '312,5' is no number; .*decimal=comma"),
    "decimal point": (("a,1,1,The,312.5",), None, {"decimal": "comma"}, "the time '312.5' is no number"),
    "number of the word": (("a,1,first,The,300",), None, {}, "column 'word_number' holds 'first'; expected a whole"),
    "half a word": (("a,1,1.5,The,300",), None, {}, "holds '1.5'; expected a whole number"),
    "no times": (("a,1,1,The,NA", "b,1,1,The,0"), None, {}, "no reading time is left in column 'time'; .*time_column"),
    "no rows": ((), None, {}, "no reading time is left"),
    "ragged": (("a,1,1,a,dog,300",), None, {}, "line 2: not one value for each of the columns"),
    "column": (("a,1,1,The,300",), None, {"time_column": "RT"}, "no column 'RT'; the columns are .*time_column"),
    "reader": (("a,1,1,The,300",), None, {"reader_column": "who"}, "no column 'who'.*reader_column, none if all rows"),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "texts", "layout", "message"), BAD.values(), ids=BAD)
def test_bad_tables_are_refused(rows, texts, layout, message: str) -> None:
    content = table(*rows)
    with pytest.raises(UserError, match=message):
        read(content, texts, **layout)


def test_texts_of_the_same_name_are_refused() -> None:
    twice = [TextItem({"item": 1}, "The"), TextItem({"item": "1"}, "A")]
    with pytest.raises(UserError, match="two texts are called 1; give each its own item"):
        read_reading_times("t.csv", table(*ROWS), None, twice)


def test_bytes_that_are_not_utf8_are_refused() -> None:
    with pytest.raises(UserError, match=r"byte 43: not UTF-8 .*save it as UTF-8"):
        read(table("a,1,1,caf@,300").replace(b"@", b"\xe9"))


WORDS = ("<eos>", "<unk>", "The", "the", "dog,", "dog", ",")
WORD = WordTokenizer(WORDS, eos_token="<eos>", unk_token="<unk>")
MOSES = replace(WORD, pre_tokenizer=PreTokenizer("moses"))
WORD_PIECE = LibraryTokenizer("tokenizers", json.dumps(word_piece()))


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), WORD, MOSES], ids=["byte", "word", "moses"])
def test_words_of_a_corpus_are_counted(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is read at once; without case and punctuation at the ends. No word goes on in the next document."""
    texts = [b"The dog, the\n\ndog,", b"the The", b"dog,"]
    splits = {"train": [Document("train", [text]) for text in texts]}
    corpus = write_corpus(tmp_path / "corpus", splits, name="tiny", source="a test", tokenizer=tokenizer)
    for size in (1, 2, 7, 1000):
        monkeypatch.setattr(metrics, "_TOKENS_PER_CHUNK", size)
        assert corpus_word_counts(corpus) == {"the": 4, "dog": 3}


def test_words_of_several_tokens_are_counted_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where what is read at once begins within a word, and the tokenizer of another library lost its spaces."""
    splits = {"train": [Document("train", [text]) for text in (b"the cats sat\ncats", b"cats here")]}
    corpus = write_corpus(tmp_path / "corpus", splits, name="tiny", source="a test", tokenizer=WORD_PIECE)
    for size in (1, 2, 7, 1000):
        monkeypatch.setattr(metrics, "_TOKENS_PER_CHUNK", size)
        assert corpus_word_counts(corpus) == {"the": 1, "cats": 3, "sat": 1, "here": 1}


def test_words_of_a_table_are_counted() -> None:
    assert [bare(word) for word in ("\u201cDon't!\u201d", "...", "U.S.,")] == ["don't", "...", "u.s"]
    assert read_word_counts("f.csv", b"word,count\nThe,3\nthe,4\n(dog),1\n") == {"the": 7, "dog": 1}
    with pytest.raises(UserError, match=r"f.csv: line 2: column 'count' holds '3.5'; expected a whole number"):
        read_word_counts("f.csv", b"word,count\nThe,3.5\n")


def test_times_are_exact() -> None:
    times = read(table("a,1,1,The,1e3", "a,1,2,dog,+250.", "a,1,3,ran,0.5"))
    assert times.time_N.tolist() == [1000.0, 250.0, 0.5]
    assert math.isclose(times.time_N.sum(), 1250.5)
