"""Errors of `txl prepare`: one line on standard error, exit status 2, and no file is created or changed."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from refusals import assert_refused, do, error_of

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch

# 401 lines, 3,499 bytes
TEXT = b"".join(b"line %d\n" % i for i in range(401))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    """The working directory, with valid, empty, damaged and wrong files."""
    folder = tmp_path / "w"
    folder.mkdir()
    gz = gzip.compress(TEXT)
    contents = {
        "text.txt": TEXT, "short.txt": b"abc", "empty.txt": b"", "empty.gz": gzip.compress(b""),
        "latin.txt": TEXT + b"caf\xe9\n", "truncated.gz": gz[:-9],
        "numbers.txt": b"1 2 3\n4 x 5\n", "large.txt": b"1 2\n" * 99 + b"7 99\n",
        "ptb/ptb.train.txt": TEXT, "ptb/ptb.valid.txt": TEXT, "ptb/ptb.test.txt": TEXT,
        "zip/enwik8.zip": bytes(194), "words.txt": b"a\na\n", "table.csv": b"id,text\n1,gr\xf6n\n",
    }  # fmt: skip
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "folder").mkdir()
    np.save(folder / "music.npy", np.arange(97))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TXL_CACHE", str(tmp_path / "cache"))
    return folder


# a command line of txl, and a pattern of the message; misspelled names are meant to be so
BAD_COMMANDS = [
    # the text
    ("prepare --out new", "give the text in one way: files and folders to split, a data set .*, --train FILE with"),
    ("prepare textt8.txt", r"'textt8.txt' is no file, .* python-stdlib.*\.$"),
    ("prepare python-stdlb", r"Known data sets: .* \(did you mean 'python-stdlib'\?\)"),
    ("prepare gone.txt", "'gone.txt' is no file, folder or pattern with text .*: enwik8, text8, "),
    ("prepare empty.txt", "'empty.txt' is no file, folder or pattern with text"),
    ("prepare short.txt", "the text is too short to split: 3 bytes .* leave valid empty"),
    ("prepare truncated.gz", r"truncated.gz: .*damaged or truncated \(.*\); get it again"),
    ("prepare --train empty.gz", "train.* has no text|train.*empty"),
    ("prepare --valid text.txt", "give the text in one way: .*--train FILE with valid"),
    ("prepare text.txt --test text.txt", "give the text in one way"),
    ("prepare text.txt --test-fraction 1", "--test-fraction: Input should be less than 1"),
    ("prepare text.txt --valid-fraction nan", "--valid-fraction: Input should be"),
    ("prepare text.txt --valid-fraction -0.1", "--valid-fraction: Input should be greater than or equal to 0"),
    ("prepare text.txt --valid-fraction 0.6 --test-fraction 0.4", "leave nothing to train on; their sum must be below"),
    ("prepare ptb --test-fraction 0.1", "--test-fraction 0.1 cannot be used with the data set ptb; leave it out"),
    ("prepare --train text.txt --test-fraction 0", "--test-fraction 0.0 cannot be used with these files; leave it out"),
    ("prepare python-stdlib --seed 2", "--seed 2 cannot be used with the data set python-stdlib"),
    ("prepare text.txt --seed 1.5", "--seed: Input should be a valid integer"),
    ("prepare text.txt --seed 2 --split-method end", "--seed 2 is for --split-method random"),
    ("prepare text.txt --encoding utf9", "--encoding utf9 is no encoding of text; give one such as utf-8"),
    ("prepare text.txt --encoding base64", "--encoding base64 is no encoding of text"),
    ("prepare text.txt --encoding utf-16", r"text.txt: not text in utf-16: .*BOM; .*--encoding binary"),
    (
        "prepare table.csv",
        r"table.csv: not text in utf-8: .*--encoding binary .and --input-format text if it is a table",
    ),
    ("prepare table.csv --encoding binary", "table.csv: --encoding binary takes bytes, .*also --input-format text"),
    ("prepare python-stdlib --exclude x", "--exclude .*x.* cannot be used with the data set python-stdlib"),
    ("prepare ptb --include *.md --data-dir ptb", "--include .* cannot be used with the data set ptb"),
    ("prepare folder zip --exclude *", "'folder' is no file, folder or pattern with text"),
    ("prepare zip --exclude *.zip", "--exclude .*zip.* leave no file of zip"),
    # the folder to create
    ("prepare text.txt --out folder", "folder exists already; choose another path or delete it first"),
    ("prepare enwik8 --out folder", "folder exists already"),
    ("prepare text.txt --out=", "--out: the path is empty"),
    ("prepare text.txt --out text.txt/new", "writing text.txt/new: part of the path is a file, not a folder"),
    # files of a named data set
    ("prepare ptb --data-dir gone", "reading gone: no such file or folder"),
    ("prepare ptb --data-dir folder", "--data-dir folder: no simple-examples.tgz or ptb.train.txt, ptb.valid.txt,"),
    ("prepare lm1b --data-dir folder", "no 1-billion-.*news.en-00001-of-00100, news.en-00002-of-00100, .* and 99 more"),
    ("prepare ptb --data-dir ptb", "ptb.train.txt: 3,499 bytes, .*expected 5,101,618 .*; .* txl prepare --train FILE"),
    ("prepare enwik8 --data-dir zip", "zip/enwik8.zip: 194 bytes, .* expected 36,445,475 bytes, .*; get it again"),
    ("prepare text.txt --data-dir folder", "--data-dir folder cannot be used with these files"),
    # tokenizers
    ("prepare text.txt --tokenizer bytes", r"no tokenizer at bytes \(did you mean 'byte'\?\)"),
    ("prepare text.txt --tokenizer text.txt", "text.txt: .*JSON"),
    ("prepare text.txt --min-frequency 2", "min-frequency is for word and char tokenizers, not for byte"),
    ("prepare text.txt --tokenizer word --min-frequency 0", r"min-frequency: .*greater than 0 \(given: 0"),
    ("prepare text.txt --tokenizer word --vocab-file words.txt --vocab-size 5", "leave --vocab-size and --min-freq"),
    ("prepare text.txt --tokenizer word --vocab-file gone", "gone: no such file"),
    ("prepare text.txt --tokenizer word --vocab-file words.txt", "words.txt: .*'a'"),
    ("prepare text.txt --document-unit pages", "pages"),
    ("prepare text.txt --num-workers 0", "--num-workers 0: must be 1 or more"),
    # text that a tokenizer cannot encode
    # the byte 0xe9 of latin.txt, which is not UTF-8, comes after TEXT and the three letters caf
    ("prepare --train latin.txt --tokenizer word", "--train: latin.txt: not text in utf-8: byte 3,502 is 0xe9"),
    ("prepare latin.txt --tokenizer word", "error: latin.txt: not text in utf-8: byte 3,502 is 0xe9; .*--encoding"),
    ("prepare --train numbers.txt --tokenizer integer", r"numbers.txt: byte 8.*x"),
    ("prepare large.txt --tokenizer integer --vocab-size 10", r"large.txt, from byte \d+ on: byte \d+.*99"),
    ("prepare --train text.txt --valid music.npy", "music.npy contains integers, not text; give --tokenizer integer"),
    ("prepare music.npy --tokenizer word", "music.npy contains integers, not text; give --tokenizer integer"),
    # of 90 ids, the last is for the EOS token
    ("prepare music.npy --vocab-size 90", r"music.npy, .*: byte \d+: '89' is not an integer from 0 to 88"),
    ("prepare music.npy numbers.txt --tokenizer integer", "arrays and text files cannot be joined and split"),
]


@pytest.mark.parametrize(("words", "message"), BAD_COMMANDS, ids=[words[:60] for words, _ in BAD_COMMANDS])
def test_bad_command_is_refused(folder: Path, words: str, message: str, capfd: Capture) -> None:
    assert_refused(folder, words, message, capfd)


def test_settings_of_a_trained_tokenizer_cannot_change(folder: Path, capfd: Capture) -> None:
    do("prepare text.txt --tokenizer word")
    words = "prepare text.txt --out new --tokenizer corpora/text"
    message = "corpora/text is trained already; leave --vocab-size 7, --lowercase False out, or name a kind"
    assert_refused(folder, f"{words} --no-lowercase --vocab-size 7", message, capfd)
    assert_refused(folder, "prepare text.txt", "corpora/text exists already", capfd)
    (folder / "corpora/text/txl_tokenizer.json").write_bytes(b"{")
    assert_refused(folder, words, "txl_tokenizer.json: damaged, not readable as JSON", capfd)


def test_failed_download_is_refused(folder: Path, monkeypatch: Patch, capfd: Capture) -> None:
    """The error explains how to download the file by hand."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("socket.getaddrinfo", Mock(side_effect=OSError(101, "Network is unreachable")))
    message = error_of("prepare wikitext-2", capfd)
    assert re.search(
        r"wikitext-2-v1.zip \(4,475,746 bytes, sha256 92675f1d\w+\) cannot be downloaded \[wikitext.smerity.com: .*\]; "
        r"try again later, or download it yourself into .*cache, or name the folder .* --data-dir DIR",
        message,
    )
    assert not (folder / "corpora").exists()
