"""`txl score --per word` prints and writes what `surprisal` computes, for text, CSV and JSON lines."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import sys
from pathlib import Path

import pytest
from refusals import FULL, assert_refused, full_after, txl
from small_runs import make_run

from transformer_xl import ItemColumns, load, surprisal
from transformer_xl.cli.main import run as run_command
from transformer_xl.text.tokenizers.word import WordTokenizer

SENTENCES = ['He said "no, $5".', "Caf\u00e9 \u2603 NA null", "The dog\tran."]
TEXT = "\r\n".join([*SENTENCES[:2], "", SENTENCES[2]]) + "\n"
TABLE = "sent,cond,text,doc\n" + "".join(
    f'{number},{"ab"[number % 2]},"{text.replace(chr(34), chr(34) * 2)}",d{number // 2}\n'
    for number, text in enumerate(SENTENCES)
)
LINES = "".join(json.dumps({"item": f"s{number}", "text": text}) + "\n\n" for number, text in enumerate(SENTENCES))
COLUMNS = ["--text-column", "text", "--item-columns", "sent,cond", "--document-column", "doc"]
FILES = {
    "text.txt": TEXT,
    "plain.txt": "one two  three\n\ncaf\u00e9 NA\n",
    "items.csv": TABLE,
    "items.tsv": TABLE.replace(",", "\t").replace("no\t $5", "no, $5"),
    "items.jsonl": LINES,
    "empty.txt": "\n \n",
    "header.csv": "item,text\n",
    "twice.csv": "item,item,text\n1,2,a\n",
    "same.csv": "item,text\n1,a\n1,b\n",
    "ragged.csv": "item,text\n1,a\n2,one, two\n",
    "quotes.csv": 'item,text\n1,"a\n2,b\n',
    "blank.csv": "item,text\n1,a\n2,\n",
    "unnamed.csv": "item,text\n,a\n",
    "mixed.csv": "item,text,doc\n1,a,x\n2,b,y\n3,c,x\n",
    "broken.jsonl": '{"item": 1, "text": "a"}\n{"item": 2\n',
    "list.jsonl": "[1]\n",
    "number.jsonl": '{"item": 1, "text": 5}\n',
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two runs of random weights, one with words as tokens, and texts."""
    folder = tmp_path_factory.mktemp("surprisal") / "folder"
    folder.mkdir(parents=True)
    make_run(folder / "run", dropout=0.0)
    words = WordTokenizer(("<eos>", "<unk>", "The", "dog"), eos_token="<eos>", unk_token="<unk>")
    make_run(folder / "words", tokenizer=words, dropout=0.0)
    for name, content in FILES.items():
        (folder / name).write_bytes(content.encode())
    (folder / "latin.csv").write_bytes(b"item,text\n1,caf\xe9\n")
    (folder / "marked.csv.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + TABLE.encode()))
    return folder


@pytest.fixture(autouse=True)
def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def rows_of(*words: str) -> list[dict[str, str]]:
    """Run `txl score` with CSV on standard output, and return its rows."""
    result = txl("score", "run", *words, "--per", "word", "--out", "-")
    assert (result.status, result.warnings) == (0, "")
    return list(csv.DictReader(io.StringIO(result.out)))


def test_csv_equals_the_library(folder: Path) -> None:
    run = load("run", device="cpu")
    options = ["--sweep-memory-length", "3,11", "--whitespace", "trailing"]
    rows = [dict(zip(("sent", "cond", "text", "doc"), row, strict=True)) for row in csv.reader(io.StringIO(TABLE))][1:]
    columns = ItemColumns(labels=("sent", "cond"), document="doc")
    expected = surprisal(run, rows, columns=columns, memory_lengths=[3, 11], whitespace="trailing")
    for file in ("items.csv", "items.tsv", "marked.csv.gz"):
        found = rows_of(file, *COLUMNS, *options)
        assert list(found[0]) == ["file", *expected.column_names]
        assert [{name: str(row[name]) for name in row} for row in expected] == [
            {name: row[name] for name in row if name != "file"} for row in found
        ]
    assert {row["file"] for row in found} == {"marked.csv.gz"}


def test_lines_and_json_lines_are_items() -> None:
    """A text's item is the number of its line; an empty line has no words, and a carriage return is no part of one."""
    found = rows_of("text.txt", "items.jsonl", "--memory-length", "5")
    words = [(row["file"], row["item"], row["word"]) for row in found]
    by_line = {"1": SENTENCES[0], "2": SENTENCES[1], "3": "", "4": SENTENCES[2]}
    by_item = {f"s{number}": text for number, text in enumerate(SENTENCES)}
    assert words == [
        (file, item, word)
        for file, texts in (("text.txt", by_line), ("items.jsonl", by_item))
        for item, text in texts.items()
        for word in [*text.split(), ""]
    ]
    assert list(found[0])[-1] == "surprisal_bits_memory_5"


def test_words_add_up_to_the_lines_of_per_line() -> None:
    """In float32 too, as both read the same text with the same memory."""
    found = rows_of("plain.txt", "--memory-length", "5")
    lines = txl("score", "run", "plain.txt", "--per", "line", "--json", "--memory-length", "5").out.splitlines()
    assert len(lines) == 3
    for number, line in enumerate(map(json.loads, lines), start=1):
        bits = math.fsum(float(row["surprisal_bits_memory_5"]) for row in found if row["item"] == str(number))
        assert bits == pytest.approx(-line["logprob"] / math.log(2), abs=1e-9)


def test_output_is_a_table_json_lines_or_a_file(tmp_path: Path) -> None:
    printed = txl("score", "run", "text.txt", "--per", "word", "--out", "-").out
    result = txl("score", "run", "text.txt", "--per", "word", "--out", tmp_path / "a.csv", "--plot", tmp_path / "a.svg")
    assert (result.status, result.out, result.warnings) == (0, "", "")
    assert (tmp_path / "a.csv").read_text(encoding="utf-8") == printed
    assert "Caf\u00e9" in (tmp_path / "a.svg").read_text(encoding="utf-8") or (tmp_path / "a.svg").stat().st_size > 1000
    lines = [json.loads(line) for line in txl("score", "run", "text.txt", "--per", "word", "--json").out.splitlines()]
    rows = list(csv.DictReader(io.StringIO(printed)))
    assert [{name: str(line[name]) for name in rows[0]} for line in lines] == rows
    table = txl("score", "run", "text.txt", "--per", "word").out
    assert "surprisal in bits, by word; spaces: leading" in table
    assert f"{lines[0]['surprisal_bits_alone']:.3f}" in table
    (tmp_path / "red.txt").write_text("a\x1b[31mred\n")  # no text may change the terminal
    assert r"a\x1b[31mred" in txl("score", "run", tmp_path / "red.txt", "--per", "word").out


def test_unknown_words_are_noted_and_counted() -> None:
    result = txl("score", "words", "text.txt", "--per", "word", "--json")
    assert "not in the vocabulary, and read as <unk>: 'He', 'said', '\"no,', '$5\".', 'Caf\u00e9', ..." in result.err
    rows = [json.loads(line) for line in result.out.splitlines()]
    assert [row["word"] for row in rows if not row["num_unknown"]] == ["", "", "", "The", "dog", ""]


def test_plot_of_many_items_says_so(tmp_path: Path) -> None:
    (tmp_path / "many.txt").write_text("a b\n" * 14)
    result = txl("score", "run", tmp_path / "many.txt", "--per", "word", "--plot", tmp_path / "a.png")
    assert result.warnings == "note: the plot shows the first 12 of 14 items; for others, score a file of them alone\n"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


REFUSED = [
    ("none text.txt", "none: no such folder"),
    ("run none.csv", "reading none.csv: no such file or folder"),
    ("run items.csv", "items.csv: line 2: no column 'item'; the columns are sent, cond, text, doc; name yours"),
    ("run items.csv --item-columns sent --text-column txt", "no column 'txt'; .*name yours with --text-column"),
    ("run items.csv --item-columns sent --document-column d", "no column 'd'; .*name yours with --document-column"),
    ("run items.csv --item-columns sent,cond,file", "no column 'file'|a column 'file' of its own"),
    ("run empty.txt", "empty.txt: the text is empty; give at least one line or row with a text"),
    ("run header.csv", "header.csv: the text is empty"),
    ("run twice.csv", "twice.csv: two columns have the same name; rename one of item, item, text"),
    ("run same.csv", r"two items have the same labels \(file same.csv, item 1\); .*item-columns item,condition"),
    ("run ragged.csv", "ragged.csv: line 3: not one value for each of the columns item, text; put a text with a comma"),
    ("run quotes.csv", "quotes.csv: line 3: not CSV .*check its quotation marks"),
    ("run blank.csv", r"blank.csv: line 3: the text \(column 'text'\) is empty"),
    ("run unnamed.csv", "unnamed.csv: line 2: column 'item' holds ''; expected text or an integer"),
    ("run mixed.csv --document-column doc", "the items of document x of mixed.csv do not follow each other"),
    ("run broken.jsonl", "broken.jsonl: line 2: expected a JSON object"),
    ("run list.jsonl", "list.jsonl: line 1: expected a JSON object"),
    ("run number.jsonl", r"number.jsonl: line 1: the text \(column 'text'\) is empty or no text"),
    ("run latin.csv", "latin.csv: byte 15: not UTF-8"),
    (
        "run text.txt --text-column text",
        "text.txt: columns were named, but a text has none; give --input-format of a table",
    ),
    ("run text.txt --whitespace both", "whitespace"),
    ("run text.txt --sweep-memory-length 1,x", "--sweep-memory-length 1,x: must be integers of at least 0"),
    ("run text.txt --sweep-memory-length 1 --memory-length 2", "--memory-length and --sweep-memory-length were both"),
    ("run text.txt --out text.txt", "text.txt exists already"),
    ("run text.txt --out none/a.csv", "none/a.csv: folder none does not exist"),
    ("run text.txt --out a.png --plot a.png", "a.png was given for --out and --plot"),
    ("run text.txt --plot a.pdf", "a.pdf: the name of a plot must end in .svg or .png"),
    ("run text.txt --json --out -", "--json and --out - were both given"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[words for words, _ in REFUSED])
def test_invalid_commands_are_refused(
    folder: Path, words: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert_refused(folder, f"score {words} --per word", message, capfd)


@pytest.mark.parametrize("flag", ["--whitespace trailing", "--plot a.png", "--sweep-memory-length 1"])
def test_options_of_words_are_refused_elsewhere(folder: Path, flag: str, capfd: pytest.CaptureFixture[str]) -> None:
    message = f"{flag.split()[0]} is an option of --per word, not of --per line; add --per word"
    assert_refused(folder, f"score run text.txt {flag}", message, capfd)


def test_a_plot_in_a_read_only_folder_is_refused_before_the_table_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Root may write to any folder, so the answer of the system is replaced."""
    (folder / "kept").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != folder / "kept")
    words = "score run text.txt --per word --out a.csv --plot kept/a.svg"
    assert_refused(folder, words, "kept/a.svg: folder kept is read-only; choose another path", capfd)


def test_a_full_disk_leaves_no_file(folder: Path, monkeypatch, capfd: pytest.CaptureFixture[str]) -> None:
    with monkeypatch.context() as patch:
        full_after(0, patch)
        assert_refused(folder, "score run text.txt --per word --out a.csv", f"writing a.csv: {FULL}", capfd)


def test_what_standard_output_gets_is_utf8(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where the terminal has another encoding, and a label of JSON has half a surrogate, as files get it."""
    stream, half = io.BytesIO(), tmp_path / "half.jsonl"
    half.write_text('{"item": "\\ud800", "text": "one"}\n')
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", io.TextIOWrapper(stream, encoding="ascii", errors="replace", newline="\r\n"))
        for file, out in (("text.txt", "-"), (half, "-"), (half, tmp_path / "a.csv")):
            assert run_command(["score", "run", str(file), "--per", "word", "--out", str(out)]) == 0
        sys.stdout.flush()
        content = stream.getvalue()
    assert "Caf\u00e9".encode() in content
    assert b"\r" not in content
    assert content.endswith((tmp_path / "a.csv").read_bytes())
    assert rb"half.jsonl,\ud800,1,one," in content
