"""Tests of tables, archives and rows in memory as corpora: every container of the same texts gives the same corpus."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import pickle
import re
import signal
import sqlite3
import stat
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from text_sources import make_files, tar_of, zip_of

from transformer_xl import Corpus, prepare
from transformer_xl.config import UserError
from transformer_xl.evaluation.score import texts_by_name
from transformer_xl.text import corpus_writer

# quotation marks, separators, line ends, an empty text, characters beyond the first plane, one long row
TEXTS = [f'row {index}: "a,b";\tcaf\u00e9 \U0001f600\r\nand a line\n' for index in range(61)] + ["", "x y " * 20011]
ROWS: list[dict[str, Any]] = [{"id": index, "text": text, "score": 0.5} for index, text in enumerate(TEXTS)]
LINES = "".join(f"{json.dumps(row)}\n" for row in ROWS).encode()


def as_csv(delimiter: str = ",") -> bytes:
    """The rows as a table with a header."""
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, list(ROWS[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return table.getvalue().encode()


def as_arrow(kind: str) -> bytes:
    """The rows as pyarrow writes them."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table, sink = pyarrow.Table.from_pylist(ROWS), io.BytesIO()
    if kind == "parquet":
        parquet.write_table(table, sink, row_group_size=17)
    else:
        new = pyarrow.ipc.new_file if kind == "file" else pyarrow.ipc.new_stream
        with new(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=13)
    return sink.getvalue()


def as_zstd() -> bytes:
    """The JSON lines in two frames."""
    zstd: Any = pytest.importorskip("backports.zstd")
    middle = LINES.index(b"\n", len(LINES) // 3) + 1
    return zstd.compress(LINES[:middle]) + zstd.compress(LINES[middle:])


CONTAINERS: dict[str, Callable[[], bytes]] = {
    "a.jsonl": lambda: LINES,
    "mark.jsonl": lambda: b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n"),
    "no-end.jsonl": lambda: LINES[:-1],
    "strings.jsonl": lambda: "".join(f"{json.dumps(text)}\n" for text in TEXTS).encode(),
    "a.json": lambda: json.dumps(ROWS, indent=1, ensure_ascii=False).encode(),
    "texts.json": lambda: json.dumps(TEXTS).encode(),
    "list": lambda: json.dumps(TEXTS).encode(),
    "strings": lambda: "".join(f"{json.dumps(text)}\n" for text in TEXTS).encode(),
    "a.csv": as_csv,
    "semicolons.csv": lambda: as_csv(";"),
    "a.tsv": lambda: as_csv("\t"),
    "excel.csv": lambda: b"sep=|\r\n" + as_csv("|"),
    "objects.txt": lambda: "\n".join(json.dumps(row, indent=2) for row in ROWS).encode(),
    "lists.json": lambda: "\n".join(json.dumps(ROWS[start : start + 9]) for start in range(0, len(ROWS), 9)).encode(),
    "indented": lambda: "\n".join(json.dumps(row, indent=2) for row in ROWS).encode(),
    "a.parquet": lambda: as_arrow("parquet"),
    "a.arrow": lambda: as_arrow("file"),
    "stream.arrow": lambda: as_arrow("stream"),
    "a.jsonl.gz": lambda: gzip.compress(LINES),
    "a.jsonl.bz2": lambda: bz2.compress(LINES),
    "a.json.xz": lambda: lzma.compress(json.dumps(ROWS).encode()),
    "a.jsonl.zst": as_zstd,
    "a.parquet.gz": lambda: gzip.compress(as_arrow("parquet")),
    "wrong-name.txt": lambda: gzip.compress(LINES),
    "a.zip": lambda: zip_of({"d/a.jsonl": LINES, "__MACOSX/a": b"x", "d/b.png": b"\x89PNG"}),
    "parquet.zip": lambda: zip_of({"a.parquet": as_arrow("parquet")}),
    "a.tar": lambda: tar_of({"a.jsonl.gz": gzip.compress(LINES)}, "w"),
    "a.tar.gz": lambda: tar_of({"a.csv": as_csv()}),
    "texts.tar.xz": lambda: tar_of({f"{index:02}.txt": text.encode() for index, text in enumerate(TEXTS)}, "w:xz"),
}  # fmt: skip


def contents(corpus: Corpus) -> dict[str, Any]:
    """The counts and checksums of each split."""
    return {split: record.model_dump() for split, record in corpus.record.splits.items()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The corpus of the rows in memory."""
    return contents(prepare(out=tmp_path_factory.mktemp("rows") / "c", documents=ROWS))


def test_rows_in_memory_are_whole_documents_split_by_their_texts(tmp_path: Path, expected: dict[str, Any]) -> None:
    assert sum(split["num_bytes"] for split in expected.values()) == len("".join(TEXTS).encode())
    assert sum(split["num_documents"] for split in expected.values()) == len(TEXTS) - 1
    corpus = prepare(out=tmp_path / "c", documents=ROWS * 2)
    assert [split["num_bytes"] for split in contents(corpus).values()] == [
        2 * split["num_bytes"] for split in expected.values()
    ]
    given = prepare(out=tmp_path / "d", documents={"train": ROWS, "validation": ({"text": f"{i}"} for i in range(3))})
    assert given.split("train").num_documents == len(TEXTS) - 1
    assert bytes(given.split("valid").tokens[:]) == b"012"
    plain = prepare(out=tmp_path / "e", documents={"train": TEXTS})  # texts are the documents that rows are
    assert contents(plain)["train"] == contents(given)["train"]


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_gives_the_same_corpus(tmp_path: Path, expected: dict[str, Any], name: str) -> None:
    make_files(tmp_path, {name: CONTAINERS[name]()})
    corpus = prepare(tmp_path / name, tmp_path / "c")
    assert contents(corpus) == expected
    assert any(note.startswith("rows are documents: ") for note in corpus.notes)


def test_data_sets_and_tables_of_other_libraries(tmp_path: Path, expected: dict[str, Any]) -> None:
    datasets, pandas = pytest.importorskip("datasets"), pytest.importorskip("pandas")
    datasets.disable_progress_bars()
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.save_to_disk(tmp_path / "saved", num_shards=2)
    splits = datasets.DatasetDict(train=dataset, validation=dataset.select(range(3)))
    splits.save_to_disk(tmp_path / "splits")
    frame = pandas.DataFrame(ROWS)
    table = pytest.importorskip("pyarrow").Table.from_pylist(ROWS)
    for number, documents in enumerate((dataset, dataset.to_iterable_dataset(), frame, table, iter(ROWS))):
        assert contents(prepare(out=tmp_path / f"{number}", documents=documents)) == expected
    assert contents(prepare(tmp_path / "saved", tmp_path / "s")) == expected
    in_memory = contents(prepare(out=tmp_path / "m", documents=splits))
    assert in_memory["valid"]["num_documents"] == 3
    assert contents(prepare(tmp_path / "splits", tmp_path / "t")) == in_memory
    for texts in (frame, dataset, ROWS):
        assert list(texts_by_name(texts).values()) == [text.encode() for text in TEXTS]
    with pytest.raises(UserError, match="the columns are a, b; name that of the text with text_column"):
        texts_by_name(pandas.DataFrame({"a": ["x"], "b": ["y"]}))


def test_a_second_split_for_validation_is_left_out_with_a_note(tmp_path: Path) -> None:
    """Of a folder of `save_to_disk`, here with other tables."""
    splits = ["train", "validation", "dev", "extra"]
    rows = {f"{split}/a.tsv": f"text\n{split}\n".encode() for split in splits}
    make_files(tmp_path / "s", {**rows, "dataset_dict.json": json.dumps({"splits": splits}).encode()})
    corpus = prepare(tmp_path / "s", tmp_path / "c")
    assert bytes(corpus.split("valid").tokens[:]) == b"validation"
    assert f"left out the splits dev, extra of {tmp_path}/s" in corpus.notes


def test_processes_tokenizers_and_the_end_of_a_text(tmp_path: Path) -> None:
    """With small batches, so that there is something to do for two processes."""
    make_files(tmp_path, {"a.jsonl": LINES * 40, "a.json": json.dumps(ROWS * 40).encode()})
    corpora = [
        prepare(tmp_path / name, tmp_path / f"{name}-{workers}", tokenizer="word", num_workers=workers,
                split_method="end", document_unit="line")
        for name, workers in (("a.jsonl", 1), ("a.jsonl", 2), ("a.json", 1))
    ]  # fmt: skip
    assert contents(corpora[0]) == contents(corpora[1]) == contents(corpora[2])
    last = prepare(tmp_path / "a.jsonl", tmp_path / "bytes", split_method="end").split("test").tokens[:]
    assert ("".join(TEXTS) * 40).encode().endswith(bytes(last))
    assert len(last) == pytest.approx(0.05 * 40 * len("".join(TEXTS).encode()), rel=0.5)


def test_mixed_folder_reads_each_file_by_its_own_format(tmp_path: Path) -> None:
    files = {
        "a.txt": b"a text\n", "b.jsonl": b'{"text":"row"}\n{"text":"row 2"}\n', "c.csv": b"x,y\n1,2\n",
        "d.csv": b"body,n\nfrom a table,1\n", "package.json": b'{\n "name": "x"}', "e.png": b"\x89PNG",
        "f.txt": b"id,name\n1,2\n3,4\n5,6\n", "g.zip": zip_of({"x.txt": b"in zip"}), "h.md": b'{"a": 1}\n\n# Notes\n',
    }  # fmt: skip
    make_files(tmp_path / "mixed", files)
    corpus = prepare(train=tmp_path / "mixed", out=tmp_path / "c")
    text = b"a text\nrowrow 2from a tableid,name\n1,2\n3,4\n5,6\nin zip" + files["h.md"]
    assert bytes(corpus.split("train").tokens[:]) == text
    assert corpus.split("train").num_documents == 7
    left_out, like_csv, rows = (note.replace(f"{tmp_path}/mixed/", "") for note in corpus.notes)
    assert left_out == (
        "train: left out 3 of 9 files: none is text: c.csv (no column 'text', but x, y), e.png (a picture), "
        "package.json (JSON, but no list of rows); name the column of the text with text_column"
    )
    assert like_csv == "read as text, but like CSV: f.txt; input_format=csv reads rows"
    assert rows.startswith(
        "rows are documents: b.jsonl, d.csv, g.zip (jsonl, csv, archive, column body); input_format=text"
    )
    raw = prepare(train=tmp_path / "mixed/b.jsonl", out=tmp_path / "d", input_format="text")
    assert bytes(raw.split("train").tokens[:]) == files["b.jsonl"]
    named = prepare(train=tmp_path / "mixed/c.csv", out=tmp_path / "e", text_column="y")
    assert bytes(named.split("train").tokens[:]) == b"2"


def test_json_with_comments_is_left_out_and_a_fault_of_another_file_says_how(tmp_path: Path) -> None:
    files = {
        "a.txt": b"a text\n",
        "b.csv": REFUSED["columns.csv"][0],
        "tsconfig.json": b'{\n // on\n "strict": true\n}\n',
    }
    folder = make_files(tmp_path / "project", files)
    with pytest.raises(UserError, match=r"b.csv: line 3: not one value .*; or leave it out with exclude='b.csv'"):
        prepare(train=folder, out=tmp_path / "c")
    corpus = prepare(train=folder, out=tmp_path / "c", exclude="b.csv")
    assert bytes(corpus.split("train").tokens[:]) == b"a text\n"
    assert re.search(r"left out 1 of 2 files: none is text: .*tsconfig.json \(not JSON: ", corpus.notes[0])
    with pytest.raises(
        UserError, match=r"tsconfig.json: row 1: not JSON .*; input_format=text reads the file as it is$"
    ):
        prepare(folder / "tsconfig.json", tmp_path / "d")


def database(path: Path) -> bytes:
    """A database of SQLite."""
    with sqlite3.connect(path) as connection:
        connection.execute("create table t(x)")
    connection.close()
    return path.read_bytes()


GOOD = b'{"text":"a"}\n'
REFUSED: dict[str, tuple[bytes, str]] = {
    "broken.jsonl": (GOOD * 2 + b'{"text":"c"\n' + GOOD, "broken.jsonl: line 3: expected a JSON object"),
    "null.jsonl": (GOOD + b'{"text":null}\n', "null.jsonl: line 2: column 'text' holds None, which is no text"),
    "number.jsonl": (GOOD + b'{"text":5}\n', "line 2: column 'text' holds 5, which is no text"),
    "nested.jsonl": (b'{"text":{"a":"b"}}\n', "line 1: column 'text' holds .*which is no text"),
    "lacks.jsonl": (GOOD + b'{"txt":"b"}\n', "line 2: column 'text' is missing; the columns are txt"),
    "half.jsonl": (b'{"text":"\\ud83d x"}\n', r"line 1: the text has half a character, '\\ud83d', at index 0"),
    "several.jsonl": (b'{"title":"a","body":"b"}\n', "no column 'text'; the columns are title, body; name that"),
    "blank.jsonl": (b"\n\n", "there is no text in .*blank.jsonl"),
    "cut.json": (b'[{"text":"a"},{"te', "cut.json: row 2: not JSON"),
    "lists.txt": (b'["a", 1]\n["b", 2]\n', "lists.txt: line 1: expected a JSON object, .*input_format=text"),
    "digits.json": (b'[{"text":"a","n":' + b"1" * 5000 + b"}]", "digits.json: row 1: not readable .*digits"),
    "commas.json": (b'[{"text":"a"},{"text":"b"},,]', "commas.json: row 3: not JSON"),
    "no-comma.json": (b'[{"text":"a"} {"text":"b"}]', "no-comma.json: row 2: not JSON .no comma before it"),
    "prose.json": (b'{"a": 1}\nand a text\n', "prose.json: row 2: not JSON .*input_format=text"),
    "prose": (b'{"a": 1}\nand a text\n', "prose: line 2: expected a JSON object.*input_format=text"),
    "inside.json": (b'{"data": [{"text": "a"}]}', "inside.json is JSON, but no list of rows"),
    "object.json": (b'{"a":\n1}', "object.json is JSON, but no list of rows; .*input_format=text"),
    "quotes.csv": (b'text\n"a\nb\n', "quotes.csv: line 3: not CSV"),
    "columns.csv": (b"text,id\na,1\nb,2,3\n", "columns.csv: line 3: not one value for each of the columns text, id"),
    "header.csv": (b"text\n", "there is no text in .*header.csv"),
    "cut.jsonl.gz": (gzip.compress(LINES)[:-9], "cut.jsonl.gz: not readable, perhaps damaged or truncated"),
    "fake.parquet": (b"some text\n", "fake.parquet: damaged: it does not begin as parquet does"),
    "a.pdf": (b"%PDF-1.4\nall letters", "a.pdf is a PDF document, not text"),
    "a.docx": (zip_of({"_rels/.rels": b"x", "[Content_Types].xml": b"x"}), "a.docx is an Office document, not text"),
    "a.pt": (zip_of({"a/data.pkl": b"x"}), "a.pt is a PyTorch file, not text"),
    "a.bin": (pickle.dumps([1]), "a.bin is a Python pickle, not text"),
    "letters.pkl": (pickle.dumps([1], 0), "letters.pkl is a Python pickle, not text"),
    "a.safetensors": (b"\x10\0\0\0\0\0\0\0" + b'{"a": 1}        ', "a.safetensors is a safetensors file, not text"),
    "pictures.zip": (zip_of({"a.png": b"\x89PNG"}), r"there is no text in .*pictures.zip/a.png \(a picture\)"),
    "one.jsonl": (GOOD * 9, "1 different documents cannot be split into train, valid and test; give more"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_texts_is_refused_by_name(tmp_path: Path, name: str) -> None:
    content, message = REFUSED[name]
    make_files(tmp_path, {name: content})
    with pytest.raises(UserError, match=message) as caught:
        prepare(tmp_path / name, tmp_path / "c")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]


FAULTS: dict[str, tuple[bytes, str]] = {
    "early.jsonl": (GOOD * 50 + b'{"text":"c"\n', "line 51: expected a JSON object"),
    "late.jsonl": (LINES * 40 + b'{"text":"caf\xe9"}\n', r"not text in utf-8: byte [\d,]+ is 0xe9"),
    "late.json": (json.dumps([*ROWS * 40, None]).encode(), "row 2,521: expected a JSON object"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("source", ["d/a.zip", "d"])
def test_a_fault_behind_good_rows_leaves_out_no_table(tmp_path: Path, name: str, source: str) -> None:
    content, message = FAULTS[name]
    files = {"good.txt": b"text\n" * 99, name: content}
    make_files(tmp_path / "d", {"a.zip": zip_of(files)} if source == "d/a.zip" else files)
    with pytest.raises(UserError, match=rf"{source}/{name}: {message}"):
        prepare(tmp_path / source, tmp_path / "c")
    assert not (tmp_path / "c").exists()


# a table, and its texts
TABLES: dict[str, tuple[bytes, list[bytes]]] = {
    "open-quotes.tsv": (b'a\tlabel\n"Oh no\t1\nsaid "yes"\t0\n"Oh\t1\n', [b'"Oh no', b'said "yes"', b'"Oh']),
    "lines.tsv": (b'id\tbody\n1\t"a\nb ""c"""\n2\td\n', [b'a\nb "c"', b"d"]),
    "column.tsv": (b'text\nhello, world\n\n"a "b"\n"d, e"\n', [b"hello, world", b'"a "b"', b"d, e"]),
    "number-first.csv": (b"stars,review\n5,7\n1,good\n", [b"7", b"good"]),
    "empty-first.csv": (b"id,review\n1,\n2,good\n", [b"good"]),
    "returns.csv": (b"id,review\r1,bad\r2,good\r", [b"bad", b"good"]),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_tables_as_programs_write_them(tmp_path: Path, name: str) -> None:
    content, texts = TABLES[name]
    make_files(tmp_path, {name: content})
    split = prepare(train=tmp_path / name, out=tmp_path / "c").split("train")
    starts = [*split.document_starts.tolist(), split.num_tokens]
    assert [bytes(split.tokens[start:end]) for start, end in pairwise(starts)] == texts


def test_repeated_texts_make_unequal_splits_with_a_note(tmp_path: Path) -> None:
    make_files(tmp_path, {"a.jsonl": GOOD * 60 + b"".join(b'{"text":"%d"}\n' % number for number in range(9))})
    notes = prepare(tmp_path / "a.jsonl", tmp_path / "c", valid_fraction=0.3, test_fraction=0.3).notes
    assert any("of the text, as rows with the same text are in one split" in note for note in notes)


@pytest.mark.parametrize("seed", range(1, 7))
def test_the_largest_of_few_unequal_texts_is_for_training(tmp_path: Path, seed: int) -> None:
    sizes = {"a.txt": 11_003, "b.txt": 59_009, "c.txt": 481_003}
    make_files(tmp_path, {"a.zip": zip_of({name: name.encode() * (size // 5) for name, size in sizes.items()})})
    corpus = prepare(tmp_path / "a.zip", tmp_path / "c", seed=seed)
    train, *others = (split["num_bytes"] // 5 for split in contents(corpus).values())
    assert (train, sorted(others)) == (96_200, [2_200, 11_801])


@pytest.mark.parametrize("kind", ["hard", "symbolic", "zip"])
def test_links_of_an_archive_are_named_in_a_note(tmp_path: Path, kind: str) -> None:
    make_files(tmp_path, {"one.txt": b"a text\n"})
    two, path = tmp_path / "two.txt", tmp_path / ("a.zip" if kind == "zip" else "a.tar.gz")
    if kind == "zip":
        link = zipfile.ZipInfo("two.txt")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        with zipfile.ZipFile(path, "w") as archive:
            archive.write(tmp_path / "one.txt", "one.txt")
            archive.writestr(link, "one.txt")
    else:
        two.hardlink_to(tmp_path / "one.txt") if kind == "hard" else two.symlink_to("one.txt")
        with tarfile.open(path, "w:gz") as archive:
            for name in ("one.txt", "two.txt"):
                archive.add(tmp_path / name, name)
    corpus = prepare(train=path, out=tmp_path / "c")
    assert corpus.split("train").num_documents == 1
    assert f"left out files of archives: {path}/two.txt (a link to another file)" in corpus.notes


def test_more_refusals(tmp_path: Path) -> None:
    make_files(tmp_path, {"a.db": database(tmp_path / "made"), "a.txt": b"text\n" * 99})
    with pytest.raises(UserError, match=r"a.db is an SQLite database, not text"):
        prepare(tmp_path / "a.db", tmp_path / "c")
    with pytest.raises(UserError, match="text_column=x: none of the files has rows"):
        prepare(tmp_path / "a.txt", tmp_path / "c", text_column="x")
    with pytest.raises(UserError, match="text_column=x: documents has no columns"):
        prepare(out=tmp_path / "c", documents=["a"], text_column="x")
    with pytest.raises(UserError, match="no column 'x'; the columns are text"):
        prepare(out=tmp_path / "c", documents=[{"text": "a"}], text_column="x")


def test_standard_input(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "transformer_xl", "prepare", "-", "--out", str(tmp_path / "c"), "--num-workers=1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, input=gzip.compress(as_csv()), env=environment, capture_output=True)
    assert done.returncode == 0
    assert b"read as text, but like CSV: standard input; --input-format csv reads rows" in done.stderr
    corpus = Corpus.open(tmp_path / "c")
    assert contents(corpus)["train"]["num_documents"] > 1
    assert corpus.record.source.startswith("standard input; ")


@pytest.mark.parametrize("kind", ["rows", "text"])
def test_killed_preparation_goes_on_and_gives_the_same_files(tmp_path: Path, kind: str) -> None:
    """Each process is killed once it has saved something more; then the source changes."""
    words = b" ".join(b"word%d" % number for number in range(9973)) + b"\n"
    lines = "".join(f"{json.dumps({'text': f'{index} {words.decode()}'})}\n" for index in range(53)).encode()
    source = tmp_path / ("a.jsonl" if kind == "rows" else "a.txt")
    source.write_bytes(lines if kind == "rows" else words * 149)
    tokenizer = "word" if kind == "rows" else "char"
    program = """if True:
        import os, sys, time
        from transformer_xl import prepare
        from transformer_xl.text import corpus_writer
        corpus_writer.SECONDS_BETWEEN_SAVES = 0.0
        saves, wanted = [0], int(sys.argv[4])
        write = corpus_writer.write_json
        def write_and_die(path, values):
            write(path, values)
            saves[0] += path.name == corpus_writer.UNFINISHED
            if saves[0] == wanted:
                os.kill(os.getpid(), 9)
        corpus_writer.write_json = write_and_die
        prepare(sys.argv[1], sys.argv[2], tokenizer=sys.argv[3])
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    whole = prepare(source, tmp_path / "whole", tokenizer=tokenizer)
    command = [sys.executable, "-c", program, str(source)]
    for wanted in (2, 7, 2) if kind == "rows" else (2, 1, 1):
        killed = subprocess.run([*command, str(tmp_path / "c"), tokenizer, str(wanted)], env=environment)
        assert killed.returncode == -signal.SIGKILL
        (unfinished,) = tmp_path.glob(".c.partial-*")
    assert json.loads((unfinished / corpus_writer.UNFINISHED).read_bytes())["batches"] > 1
    with (unfinished / "train-00000.tokens").open("ab") as tokens:
        tokens.write(b"more, which was not saved")
    corpus = prepare(source, tmp_path / "c", tokenizer=tokenizer)
    assert "went on with what an earlier process had begun" in corpus.notes
    assert contents(corpus) == contents(whole)
    names = sorted(path.name for path in whole.path.iterdir())
    assert sorted(path.name for path in corpus.path.iterdir()) == names
    for name in names:
        is_same = (corpus.path / name).read_bytes() == (whole.path / name).read_bytes()
        assert is_same, name
    assert not list(tmp_path.glob(".c.partial-*"))
    if kind == "rows":
        return
    subprocess.run([*command, str(tmp_path / "d"), tokenizer, "1"], env=environment)
    (unfinished,) = tmp_path.glob(".d.partial-*")
    source.write_bytes(source.read_bytes() + b"\n")
    anew = prepare(source, tmp_path / "d", tokenizer=tokenizer)
    assert any(note.startswith("began anew: an earlier process had begun with another text") for note in anew.notes)
    assert not unfinished.exists()


def test_preparation_begins_anew_with_another_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_writer, "SECONDS_BETWEEN_SAVES", 0.0)
    files = {"a.tsv": b"text\n" + (b"a b c " * 200 + b"\n") * 2000, "words.txt": b"<eos>\n<unk>\na\nb\n"}
    folder, stages = make_files(tmp_path / "files", files), list[str]()

    def progress(stage: str, *_: int) -> None:
        stages.append(stage)
        if stages.count("write") == 2:
            raise InterruptedError

    settings: dict[str, Any] = {"tokenizer": "word", "vocab_file": folder / "words.txt", "split_method": "end"}
    with pytest.raises(UserError):
        prepare(folder / "a.tsv", tmp_path / "c", progress=progress, **settings)
    make_files(folder, {"words.txt": b"<eos>\n<unk>\nc\na\n"})
    corpus = prepare(folder / "a.tsv", tmp_path / "c", **settings)
    assert corpus.tokenizer.decode(range(4)) == "\n<unk> c a"
    assert any(note.startswith("began anew") for note in corpus.notes)


def damaged_files() -> dict[str, bytes]:
    """Files that are cut, or whose second part is damaged, and what their readers would take for the end."""
    half = b"".join(b'{"text": "some text of row %d"}\n' % number for number in range(40))
    tar = tar_of({f"{number}.txt": b"text %d\n" % number * 40 for number in range(9)}, "w")
    archive = zip_of({"a.txt": b"text\n" * 40})
    files = {"cut.tar": tar[: 4 * 1024], "joined.tar": tar + tar, "joined.zip": archive + archive}
    for suffix, library in (("bz2", bz2), ("xz", lzma)):
        first, second = library.compress(half), library.compress(half)
        files |= {f"damaged.jsonl.{suffix}": first + b"\0a" + second[2:], f"more.jsonl.{suffix}": first + b"more"}
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"text": [f"some text of row {number}" for number in range(40)]})
    stream, pages = io.BytesIO(), io.BytesIO()
    with pyarrow.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    arrow = stream.getvalue()
    files |= {"cut.arrow": arrow[:-8], "joined.arrow": arrow + arrow}
    parquet.write_table(table, pages, write_page_checksum=True, compression="none", use_dictionary=False)
    return files | {"changed.parquet": pages.getvalue().replace(b"row 17", b"row 71", 1)}


def test_nothing_is_lost_in_silence(tmp_path: Path) -> None:
    for path in make_files(tmp_path / "files", damaged_files()).iterdir():
        with pytest.raises(UserError, match=rf"{path.name}: not readable, perhaps damaged or truncated \(.*\); get it"):
            prepare(path, out=tmp_path / "corpus")
        assert not (tmp_path / "corpus").exists()


@pytest.mark.parametrize("rows", [4000, 2201, 0])
@pytest.mark.parametrize("is_first", [False, True])
def test_a_table_that_changes_while_it_is_read_is_refused(tmp_path: Path, rows: int, is_first: bool) -> None:
    """Rows are measured, and then read again: those of a file that is still being written are others then."""
    row = b"x" * 999 + b"\n"
    files = make_files(tmp_path / "files", {"a.tsv": b"text\n" + row * 2200, "b.tsv": b"text\nother\n"})
    table, other = files / "a.tsv", files / "b.tsv"

    def progress(stage: str, *_: int) -> None:
        if stage == "write":
            table.write_bytes(b"text\n" + row * rows)

    paths = [table, other] if is_first else [other, table]
    with pytest.raises(UserError, match=r"a.tsv changed while it was read; try again once it is complete"):
        prepare(paths, tmp_path / "c", split_method="end", progress=progress)
    assert not (tmp_path / "c").exists()


def test_a_mark_hides_no_table_and_an_empty_value_no_column(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\ufeffid;the title (short);body\n" + '1;a;"b\nc"\n' * 9)
    corpus = prepare(tmp_path / "a.txt", out=tmp_path / "corpus")
    assert "read as text, but like CSV" in corpus.notes[0]
    (tmp_path / "c.csv").write_text("id,author\n" + "1,Bob\n2,Ann\n3,Eve\n" * 9)
    assert "c.csv (csv, column author); input_format" in prepare(tmp_path / "c.csv", out=tmp_path / "c").notes[0]
    (tmp_path / "b.jsonl").write_text('{"body": null, "author": "Bob"}\n' + '{"body": "text", "author": "Bob"}\n' * 9)
    with pytest.raises(UserError, match="no column 'text'; the columns are body, author"):
        prepare(tmp_path / "b.jsonl", out=tmp_path / "other")
