"""Tests of a user's own text: which files are read, in which order, where the text is split, and every error."""

from __future__ import annotations

import bz2
import gzip
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_sources import make_files, names_of, text_of

from transformer_xl.config import UserError
from transformer_xl.text.documents import SPLITS, SplitName, TextSource
from transformer_xl.text.prepare import find_text
from transformer_xl.text.sources import archives, splitting
from transformer_xl.text.text_config import TextConfig

# Fractions that leave the whole text to train.
ONLY_TRAIN: Mapping[SplitName, float] = {"valid": 0, "test": 0}


def find(
    *sources: str | Path,
    splits: Mapping[SplitName, Sequence[str]] | None = None,
    documents: Sequence[str | bytes] | None = None,
    fractions: Mapping[SplitName, float] | None = None,
    kind: str | None = None,
    method: str | None = None,
    **settings: Any,
) -> TextSource:
    """The text of files and folders, or of documents; `settings` has fields of TextConfig."""
    settings |= {f"{split}_fraction": fraction for split, fraction in (fractions or {}).items()}
    settings |= {"split_method": method} if method else {}
    config = TextConfig(**settings)
    return find_text([str(source) for source in sources], documents=documents, splits=splits, kind=kind, config=config)


def texts_of(source: TextSource) -> list[bytes]:
    return [text_of(source.splits[split]) for split in SPLITS if split in source.splits]


def best_boundary(texts: list[bytes], position: int, tolerance: int) -> int:
    """The split boundary by the documented rule, checked position by position."""
    whole = b"".join(texts)
    text_ends = [sum(map(len, texts[:number])) for number in range(len(texts) + 1)]
    if position in text_ends:
        return position
    end = min(text_end for text_end in text_ends if text_end >= position)
    for is_good in (
        lambda position: whole[position - 1 : position] == b"\n",
        lambda position: position == end,
        lambda position: whole[position - 1 : position].isspace(),
    ):
        for candidate in range(position, min(position + tolerance, end) + 1):
            if is_good(candidate):
                return candidate
    for candidate in range(position, min(position + 3, end) + 1):
        if candidate == end or not 0x80 <= whole[candidate] < 0xC0:  # not inside a UTF-8 character
            return candidate
    return position


@settings(deadline=None, max_examples=150)
@given(
    texts=st.lists(
        st.one_of(
            st.binary(max_size=30).map(b"a".__add__),  # so that it begins as no other kind of file does
            st.text("ab\n", min_size=1, max_size=47).map(str.encode),
            st.text("ab ", min_size=1, max_size=47).map(str.encode),
            st.text("aé漢😀\t\n", min_size=1, max_size=23).map(str.encode),
        ),
        min_size=1,
        max_size=5,
    ),
    form=st.sampled_from(["in memory", "txt", "gz"]),
    valid=st.sampled_from([0.0, 0.05, 0.23, 0.5]),
    test=st.sampled_from([0.0, 0.07, 0.31, 0.49]),
    tolerance=st.sampled_from([0, 3, 7, 1000]),
)
def test_splits_end_at_the_best_boundaries_and_join_to_the_whole_text(
    tmp_path_factory: pytest.TempPathFactory, texts: list[bytes], form: str, valid: float, test: float, tolerance: int
) -> None:
    fractions: Mapping[SplitName, float] = {"valid": valid, "test": test}
    if form == "in memory":
        find_source = partial(find, documents=texts, fractions=fractions, method="end")
    else:
        files = {
            f"{index}.{form}": gzip.compress(text, 1) if form == "gz" else text for index, text in enumerate(texts)
        }
        folder = make_files(tmp_path_factory.mktemp("files"), files)
        paths = [folder / name for name in files]
        find_source = partial(find, *paths, fractions=fractions, method="end", encoding="binary")
    whole = b"".join(texts)
    valid_length, test_length = round(len(whole) * valid), round(len(whole) * test)
    position = len(whole) - valid_length - test_length
    first = best_boundary(texts, position, min(tolerance, (valid_length or test_length) // 2))
    second = max(first, best_boundary(texts, position + valid_length, min(tolerance, test_length // 2)))
    expected = {"train": whole[:first], "valid": whole[first:second], "test": whole[second:]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splitting, "SPLIT_TOLERANCE_BYTES", tolerance)
        if not all(expected[split] for split, fraction in (("train", 1), ("valid", valid), ("test", test)) if fraction):
            with pytest.raises(
                UserError, match=f"short to split: {len(whole)} bytes .* leave (train|valid|test) empty"
            ):
                find_source()
            return
        source = find_source()
    for _ in range(2):  # training a tokenizer reads the text once before it is written
        splits = {split: text_of(documents) for split, documents in source.splits.items()}
        assert splits == {split: text for split, text in expected.items() if text}


def test_boundary_does_not_move_to_a_distant_newline(tmp_path: Path) -> None:
    """The newlines after the boundaries are further away than SPLIT_TOLERANCE_BYTES (65,536), so that the parts are
    1/2, 1/4 and 1/4 of the 1,070,006 bytes.
    """
    make_files(tmp_path, {"a": b"a" * 1_000_003 + b"\n" + b"b" * 70_001 + b"\n"})
    train, valid, test = texts_of(find(tmp_path / "a", fractions={"valid": 0.25, "test": 0.25}, method="end"))
    assert [len(train), len(valid), len(test)] == [535_002, 267_502, 267_502]


def test_default_fractions_are_five_percent_and_document_names_have_the_start_byte(tmp_path: Path) -> None:
    make_files(tmp_path, {"a.txt": b"a\n" * 5000})
    source = find(tmp_path / "a.txt", method="end")
    assert (source.name, source.tokenizer.kind) == ("a", "byte")
    assert str(tmp_path / "a.txt") in source.description
    documents = [document for split_documents in source.splits.values() for document in split_documents]
    assert [(document.name.removeprefix(f"{tmp_path}/"), document.num_bytes) for document in documents] == [
        ("a.txt", 9000), ("a.txt, from byte 9,000 on", 500), ("a.txt, from byte 9,500 on", 500)
    ]  # fmt: skip


def test_files_keep_their_order_and_folders_are_sorted(tmp_path: Path) -> None:
    make_files(
        tmp_path / "folder",
        {"b/x": b"3", "a": b"1", "a.d/z": b"2", "c": b"4", ".hidden": b"-", ".git/x": b"-", "empty": b"", "b/.y": b"-"},
    )
    make_files(tmp_path, {"second": b"second", ".first": b"first"})
    source = find(tmp_path / ".first", tmp_path / "folder", tmp_path / "second", fractions=ONLY_TRAIN)
    assert list(source.splits) == ["train"]
    assert text_of(source.splits["train"]) == b"first1234second"
    assert names_of(source.splits["train"]) == [".first", "a", "z", "x", "c", "second"]


def test_patterns_match_files_in_nested_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_files(tmp_path, {"d/b/x.txt": b"3", "d/a.txt": b"1", "d/a.md": b"-", "d/[1].txt": b"4"})
    monkeypatch.chdir(tmp_path)
    source = find("d/**/*.txt", fractions=ONLY_TRAIN)
    assert names_of(source.splits["train"]) == ["[1].txt", "a.txt", "x.txt"]
    assert source.name == "d"
    assert names_of(find("d/[1].txt", fractions=ONLY_TRAIN).splits["train"]) == ["[1].txt"]  # an existing file
    assert names_of(find(splits={"train": ["d/?.txt"]}).splits["train"]) == ["a.txt"]


@pytest.mark.parametrize(
    ("splits", "note"),
    [
        ({"train": ["a", "d"], "valid": ["b"]}, None),
        ({"train": ["a"], "valid": ["b"], "test": ["link"]}, "a in train, link in test"),
        ({"train": ["b", "hard", "b"]}, "b in train, hard in train, b in train"),
        ({"train": ["d"], "test": ["d/*"]}, "d/c in train, d/c in test, and 1 more files"),
    ],
)
def test_files_given_more_than_once_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, splits: dict[SplitName, list[str]], note: str | None
) -> None:
    monkeypatch.chdir(make_files(tmp_path, {"a": b"a" * 97, "b": b"b" * 97, "d/c": b"c" * 97, "d/e": b"c" * 97}))
    Path("link").symlink_to("a")
    Path("hard").hardlink_to("b")
    assert find(splits=splits).notes == ((f"the same file was given more than once: {note}",) if note else ())
    assert find("a", "b").notes == ()
    assert find("a", "d", "./a").notes == ("the same file was given more than once: a in the text, a in the text",)


def test_compressed_file_is_decompressed_and_its_name_has_no_suffix(tmp_path: Path) -> None:
    make_files(tmp_path, {"a.txt.bz2": bz2.compress(b"1\n")})
    source = find(splits={"train": [f"{tmp_path}/a.txt.bz2"]})
    assert (text_of(source.splits["train"]), source.name) == (b"1\n", "a")


def test_files_are_read_in_chunks_when_iterated(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(3 * 2**20 + 7))
    (document,) = find(path, fractions=ONLY_TRAIN, encoding="binary").splits["train"]
    assert [len(chunk) for chunk in document.chunks] == [2**20, 2**20, 2**20, 7]
    path.write_bytes(b"short")
    with pytest.raises(UserError, match=r"a became shorter while it was read"):
        text_of([document])
    path.unlink()
    with pytest.raises(UserError, match=r"reading .*a: no such file or folder"):
        text_of([document])


@given(lengths=st.lists(st.integers(1, 13), min_size=3, max_size=29), fraction=st.sampled_from([0.1, 0.25, 0.45]))
@settings(deadline=None)
def test_integer_text_is_split_between_lines(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], fraction: float
) -> None:
    whole = b"".join(b" ".join(b"%d" % (index * length) for index in range(length)) + b"\n" for length in lengths)
    path = make_files(tmp_path_factory.mktemp("numbers"), {"a": whole}) / "a"
    fractions: dict[SplitName, float] = {"valid": fraction, "test": 0}
    # If the boundary falls in the last line, no line is left for valid.
    if whole.find(b"\n", len(whole) - round(len(whole) * fraction) - 1) == len(whole) - 1:
        with pytest.raises(UserError, match="leave valid empty"):
            find(path, fractions=fractions, kind="integer", method="end")
        return
    source = find(path, fractions=fractions, kind="integer", method="end")
    train, valid = texts_of(source)
    assert train + valid == whole
    assert train.endswith(b"\n")
    assert source.tokenizer_splits == SPLITS


@pytest.mark.parametrize(
    ("array", "lengths"),
    # 707 values in rows of 7: the boundaries at 601 and 672 move to the ends of rows, 602 = 86 * 7 and 672 = 96 * 7.
    [(np.arange(101 * 7).reshape(101, 7), [86, 10, 5]), (np.arange(100, dtype=np.uint16), [85, 10, 5])],
    ids=["2-D", "1-D"],
)
def test_arrays_are_split_between_rows_or_values(tmp_path: Path, array: np.ndarray, lengths: list[int]) -> None:
    np.save(tmp_path / "a.npy", array)
    source = find(tmp_path / "a.npy", fractions={"valid": 0.1, "test": 0.05}, method="end")
    parts = [np.array(text.split(), int).reshape(-1, *array.shape[1:]) for text in texts_of(source)]
    assert [len(part) for part in parts] == lengths
    assert np.array_equal(np.concatenate(parts), array)
    assert (source.tokenizer.kind, source.name) == ("integer", "a")


def test_arrays_need_the_integer_tokenizer(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(100))
    make_files(tmp_path, {"b.txt": b"1 2\n" * 97})
    with pytest.raises(UserError, match=r"a.npy contains integers, not text; .*leave it out \(exclude='\*.npy'"):
        find(tmp_path)
    splits: Mapping[SplitName, Sequence[str]] = {"train": [f"{tmp_path}/a.npy"], "valid": [f"{tmp_path}/b.txt"]}
    assert find(splits=splits, kind="integer").tokenizer.kind == "integer"


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (["nothing"], r"^'nothing' is no file, folder or pattern with text \(empty and hidden files are left out"),
        (["d/*.txt"], r"^'d/\*.txt' is no file, folder or pattern with text .*; check the spelling. Known data sets: "),
        (["pipe"], r"^'pipe' is no file, folder or pattern with text"),
        (["packed/b/c.zip"], r"^packed/b/c.zip is no zip archive, or a damaged one; get it again, or leave it out"),
        (["packed/b"], r"^no file of packed/b is text: packed/b/c.zip \(a damaged zip\)$"),
        (["empty.gz"], r"too short to split: 0 bytes .* leave train empty"),
        (["python-stdlib", "short"], r"give the text in one way: .*a file of that name is ./NAME"),
        (["x" * 300], "File name too long"),  # file systems allow 255 bytes
        (["short/x"], "'short/x' is no file"),
        ([""], r"^'' is no file"),
    ],
)
def test_invalid_sources_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: list[str], message: str
) -> None:
    make_files(tmp_path, {"short": b"abc", "nothing/empty": b"", "nothing/.hidden": b"x",
                          "packed/a.txt": b"x" * 97, "packed/b/c.zip": b"PK",
                          "empty.gz": gzip.compress(b"")})  # fmt: skip
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        find(*sources)
    if sources == ["d/*.txt"]:
        with pytest.raises(UserError, match=r"^train: 'd/.* is no file, .*check the spelling.$"):
            find(splits={"train": sources})


def test_files_that_are_not_text_are_left_out_of_a_folder_and_refused_by_name(tmp_path: Path) -> None:
    odd = {
        "a.png": b"\x89PNG\r\n", "b.pyc": b"a\0b", "c.txt": "caf\u00e9\n".encode("latin-1"), "d.zip": b"PK",
        "e.txt": "hi\n".encode("utf-16"), "f.txt.gz": gzip.compress(b"a" * 2**20 + b"\xe9"),
    }  # fmt: skip
    make_files(tmp_path, {**odd, "good.txt": "caf\u00e9\n".encode(), "packed.txt.gz": gzip.compress(b"packed\n")})
    source = find(tmp_path, fractions=ONLY_TRAIN)
    assert texts_of(source) == ["caf\u00e9\npacked\n".encode()]
    assert source.notes == (
        f"left out 6 of 8 files: none is text: {tmp_path}/a.png (a picture), {tmp_path}/b.pyc (it has a NUL "
        f"byte), {tmp_path}/c.txt (byte 3 is 0xe9) and 3 more; give their encoding if they are text in another "
        "one, binary to take any bytes",
    )
    assert find(splits={"train": [f"{tmp_path}/*.txt"]}).notes[0].startswith("train: left out 2 of 3 files")
    reasons = {
        "b.pyc": "it has a NUL byte", "c.txt": "byte 3 is 0xe9",
        "e.txt": "it begins with the byte order mark of utf-16", "f.txt.gz": "byte 1,048,576 is 0xe9",
    }  # fmt: skip
    for name, reason in reasons.items():
        with pytest.raises(UserError, match=rf"{name}: not text in utf-8: {reason}; .*encoding=binary .* to take its"):
            find(tmp_path / name)
    binary = find(tmp_path, fractions=ONLY_TRAIN, encoding="binary", exclude=["*.zip", "*.gz"])
    assert texts_of(binary) == [
        b"".join(odd[name] for name in ("a.png", "b.pyc", "c.txt", "e.txt")) + "caf\u00e9\n".encode()
    ]
    assert binary.notes == ()


@pytest.mark.parametrize("suffix", ["txt", "gz"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "latin-1", "cp1252", "shift-jis"])
def test_other_encodings_become_utf8_without_byte_order_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, suffix: str
) -> None:
    """Chunks of 7 bytes end inside characters."""
    monkeypatch.setattr(archives, "CHUNK_BYTES", 7)
    text = "caf\u00e9\n" * 23 if encoding != "shift-jis" else "\u65e5\u672ca\n" * 23
    content = text.encode(encoding)
    make_files(tmp_path, {f"a.{suffix}": gzip.compress(content) if suffix == "gz" else content})
    source = find(tmp_path, fractions=ONLY_TRAIN, encoding="utf-8" if encoding == "utf-8-sig" else encoding)
    assert texts_of(source) == [text.encode()]
    split = find(tmp_path, fractions={"valid": 0.2, "test": 0.2}, encoding=encoding)
    assert sorted(b"".join(texts_of(split)).splitlines()) == sorted(text.encode().splitlines())


@pytest.mark.parametrize(
    ("encoding", "content", "reason"),
    [
        ("utf-8", b"a" * 9 + b"\xc3", "byte 9 is 0xc3"),
        ("shift-jis", b"a" * 9 + b"\x81\0", "byte 9 is 0x81"),
        ("cp1252", b"a" * 9 + b"\x81", "byte 9 is 0x81"),
        ("utf-16", b"a" * 9, "UTF-16 stream does not start with BOM"),
        ("utf-16-le", b"a" * 9, "byte 8 is 0x61"),
        ("latin-1", b"a" * 9 + b"\0", "it has a NUL byte"),
        ("latin-1", "text".encode("utf-8-sig"), "it begins with the byte order mark of utf-8"),
        ("utf-7", b"+2AA-", "'utf-8' codec can't encode"),
        ("utf-8", "text".encode("utf-32"), "it begins with the byte order mark of utf-32"),
    ],
)
def test_file_in_another_encoding_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, content: bytes, reason: str
) -> None:
    monkeypatch.setattr(archives, "CHUNK_BYTES", 7)
    make_files(tmp_path, {"a.txt": content})
    with pytest.raises(UserError, match=rf"a.txt: not text in {encoding}: {reason}.*; leave it out, or give"):
        find(tmp_path / "a.txt", encoding=encoding)


def test_byte_order_marks_of_texts_in_memory_are_no_text() -> None:
    documents = ["\ufeffone\n", b"\xef\xbb\xbftwo\n"]
    assert texts_of(find(documents=documents, fractions=ONLY_TRAIN)) == [b"one\ntwo\n"]


@pytest.mark.parametrize(
    ("include", "exclude", "names"),
    [
        (["*.txt"], [], ["a.txt", "b.txt", "c.txt"]),
        (["*.txt", "*.md"], ["old"], ["a.txt", "b.txt", "r.md"]),
        ([], ["d/old", "*.md"], ["a.txt", "b.txt"]),
        (["**/old/*"], [], ["c.txt"]),
        ([], ["d/*.txt"], ["a.txt", "c.txt", "r.md"]),
        ([], ["t/d"], ["a.txt", "r.md"]),  # as a shell completes it
    ],
)
def test_include_and_exclude_select_files_of_folders_and_patterns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, include: list[str], exclude: list[str], names: list[str]
) -> None:
    files = dict.fromkeys(("t/a.txt", "t/d/b.txt", "t/d/old/c.txt", "t/r.md"), b"text\n")
    monkeypatch.chdir(make_files(tmp_path, files))
    for source in ("t", "t/**"):
        found = find(source, fractions=ONLY_TRAIN, include=include, exclude=exclude)
        assert names_of(found.splits["train"]) == names
    assert names_of(find("t/r.md", include=["*.txt"], fractions=ONLY_TRAIN).splits["train"]) == ["r.md"]


# sources that are alphabetically far apart, and files of unequal size
MANY = {
    f"{source}/{index}.txt": f"{source}{index}\n".encode() * (37 + index)
    for source in "abcdefgh"
    for index in range(40)
}


def test_random_split_draws_whole_files_from_all_sources(tmp_path: Path) -> None:
    folder = make_files(tmp_path / "one", MANY)
    source = find(folder)
    splits = {split: names_of(documents) for split, documents in source.splits.items()}
    texts = dict(zip(SPLITS, texts_of(source), strict=True))
    size = sum(map(len, MANY.values()))
    for split in ("valid", "test"):
        assert len(texts[split]) == pytest.approx(0.05 * size, rel=0.1)
        assert len({Path(document.name).parent for document in source.splits[split]}) > 4  # of 8
    assert sum(map(len, splits.values())) == len(MANY)
    train, valid, test = map(len, splits.values())
    assert source.description.endswith(f"files drawn at random with seed 1: {train} train, {valid} valid, {test} test")
    # neither the place of the folder nor the order and form of the paths matters, only the seed
    copy = make_files(tmp_path / "moved" / "two", MANY)
    by_parts = find(*[copy / name for name in "hgfedcba"])
    for other in (find(copy), by_parts, find(f"{copy}/*/*.txt")):
        assert {split: set(text_of(docs).splitlines()) for split, docs in other.splits.items()} == {
            split: set(text.splitlines()) for split, text in texts.items()
        }
    assert texts_of(find(folder, seed=2))[1:] != texts_of(source)[1:]


def test_random_split_draws_blocks_of_a_file_that_holds_much_of_the_text(tmp_path: Path) -> None:
    """Without them, valid and test would have none of the text that the model is mostly trained on."""
    files = {f"{index}.txt": b"small\n" * 500 for index in range(300)}
    folder = make_files(tmp_path, {**files, "large.txt": b"large\n" * 100_000})
    source = find(folder)
    assert "; blocks of" in source.description
    for split in ("valid", "test"):
        text = text_of(source.splits[split])
        assert len(text) == pytest.approx(0.05 * 1_500_000, rel=0.25)
        assert text.count(b"large\n") > 0


def test_random_split_has_its_fraction_where_little_is_left_to_train() -> None:
    source = find(documents=[b"text\n" * 400], fractions={"valid": 0.9, "test": 0.0})
    assert "; blocks of" in source.description
    assert [len(text) for text in texts_of(source)] == pytest.approx([200, 1800], abs=10)


@pytest.mark.parametrize("form", ["one file", "gz", "three files", "in memory", "npy"])
def test_random_split_draws_blocks_where_files_are_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """The blocks are from all over the text, end with a line, and together they are the whole text."""
    monkeypatch.setattr(splitting, "_MIN_BLOCK", 97)
    lines = [b"%d %d\n" % (index, index * index) for index in range(5003)]
    whole = b"".join(lines)
    if form == "npy":
        np.save(tmp_path / "a.npy", np.array([line.split() for line in lines], dtype=np.int64))
        source = find(tmp_path / "a.npy")
    elif form == "in memory":
        source = find(documents=[whole])
    elif form == "three files":
        parts = {
            str(part): b"".join(lines[part * 1667 : (part + 1) * 1667]) + b"x\n" * (part == 9) for part in range(4)
        }
        source = find(make_files(tmp_path, {name: text for name, text in parts.items() if text}))
    else:
        name = {"one file": "a.txt", "gz": "a.gz"}[form]
        source = find(make_files(tmp_path, {name: gzip.compress(whole) if form == "gz" else whole}) / name)
    counts = re.search(
        r"; blocks of about .* at random with seed 1: (\d+) train, (\d+) valid, (\d+) test$", source.description
    )
    assert counts
    num_train, num_valid, num_test = map(int, counts.groups())
    assert num_train > 17 * num_valid
    assert num_valid == num_test == {"gz": 4, "npy": 5}.get(form, 8)
    for split in ("valid", "test"):
        numbers = [int(line.split()[0]) for line in text_of(source.splits[split]).splitlines()]
        assert numbers == sorted(numbers)
        assert len(text_of(source.splits[split])) == pytest.approx(0.05 * len(whole), rel=0.2)
        assert max(numbers) - min(numbers) > 1500
        assert 2 <= len(source.splits[split]) <= num_valid
    documents = [text_of([document]) for split in source.splits.values() for document in split]
    assert all(document.endswith(b"\n") for document in documents)
    assert sorted(b"".join(documents).splitlines()) == sorted(whole.splitlines())
    # a document ends only where its text goes on in another split
    starts = sorted(
        (int(text_of([document]).split()[0]), split) for split in SPLITS for document in source.splits[split]
    )
    if form in ("one file", "gz"):
        assert all(first != second for (_, first), (_, second) in pairwise(starts))


@settings(deadline=None, max_examples=100)
@given(
    sizes=st.lists(st.integers(1, 997), min_size=1, max_size=40),
    valid=st.sampled_from([0.0, 0.05, 0.3]),
    test=st.sampled_from([0.0, 0.1, 0.49]),
    seed=st.integers(0, 5),
)
def test_random_split_loses_no_text_and_leaves_no_split_empty(
    sizes: list[int], valid: float, test: float, seed: int
) -> None:
    documents = [(b"%d abc\n" % index * size)[:size] for index, size in enumerate(sizes)]
    fractions: Mapping[SplitName, float] = {"valid": valid, "test": test}
    if any(fraction and round(sum(sizes) * fraction) == 0 for fraction in fractions.values()) or sum(sizes) <= sum(
        fraction > 0 for fraction in fractions.values()
    ):
        with pytest.raises(UserError, match="too short to split"):
            find(documents=documents, fractions=fractions, seed=seed)
        return
    source = find(documents=documents, fractions=fractions, seed=seed)
    pieces = [
        (document.chunks.path.name, document.chunks.start, text_of([document]))
        for docs in source.splits.values()
        for document in docs
    ]
    for index, document in enumerate(documents):
        own = sorted((start, text) for name, start, text in pieces if name == f"document {index}")
        assert b"".join(text for _, text in own) == document
    assert list(source.splits) == [split for split, fraction in (("train", 1), *fractions.items()) if fraction]
