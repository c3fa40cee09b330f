"""One's own text: which files, in which order, cut where; and what is said when there is nothing to read."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.config import UserError
from transformer_xl.text.documents import SPLITS, Document, SplitName, TextSource
from transformer_xl.text.prepare import find_text
from transformer_xl.text.sources import text_files

needs_permissions = pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
WHOLE: Mapping[SplitName, float] = {"valid": 0, "test": 0}


def find(
    *sources: str | Path,
    given: Mapping[SplitName, Sequence[str]] | None = None,
    fractions: Mapping[SplitName, float | None] | None = None,
    kind: str | None = None,
) -> TextSource:
    return find_text([str(source) for source in sources], splits=given, fractions=fractions, kind=kind)


def text_of(documents: Iterable[Document]) -> bytes:
    return b"".join(chunk for document in documents for chunk in document.chunks)


def texts_of(source: TextSource) -> list[bytes]:
    return [text_of(source.splits[split]) for split in SPLITS if split in source.splits]


def names_of(documents: Iterable[Document]) -> list[str]:
    return [Path(document.name).name for document in documents]


def make(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def best_cut(texts: list[bytes], position: int, most: int) -> int:
    """The boundary by the documented rule, checked position by position."""
    whole = b"".join(texts)
    edges = [sum(map(len, texts[:number])) for number in range(len(texts) + 1)]
    end = min(edge for edge in edges if edge >= position)
    near = range(position, min(position + most, end) + 1)
    for good in (
        lambda position: whole[position - 1 : position] == b"\n",
        lambda position: position == end,
        lambda position: whole[position - 1 : position].isspace(),
        lambda position: position in edges,
    ):
        for candidate in near:
            if candidate in (0, len(whole)) or position in edges or good(candidate):
                return candidate
    for candidate in range(position, min(position + 3, end) + 1):
        if candidate == end or not 0x80 <= whole[candidate] < 0xC0:
            return candidate
    return position


@settings(deadline=None, max_examples=150)
@given(
    texts=st.lists(
        st.one_of(
            st.binary(min_size=1, max_size=31),
            st.text("ab\n", min_size=1, max_size=47).map(str.encode),
            st.text("ab ", min_size=1, max_size=47).map(str.encode),
            st.text("aé漢😀\t\n", min_size=1, max_size=23).map(str.encode),
        ),
        min_size=1,
        max_size=5,
    ),
    ending=st.sampled_from(["in memory", "txt", "gz"]),
    valid=st.sampled_from([0.0, 0.05, 0.23, 0.5]),
    test=st.sampled_from([0.0, 0.07, 0.31, 0.49]),
    near=st.sampled_from([0, 3, 7, 1000]),
)
def test_cut_text_joins_to_the_whole(
    tmp_path_factory: pytest.TempPathFactory, texts: list[bytes], ending: str, valid: float, test: float, near: int
) -> None:
    fractions: Mapping[SplitName, float] = {"valid": valid, "test": test}
    if ending == "in memory":
        find_source = partial(find_text, documents=texts, fractions=fractions)
    else:
        files = {
            f"{index}.{ending}": gzip.compress(text, 1) if ending == "gz" else text for index, text in enumerate(texts)
        }
        folder = make(tmp_path_factory.mktemp("cut"), files)
        find_source = partial(find_text, [str(folder / name) for name in files], fractions=fractions)
    whole = b"".join(texts)
    lengths = {"valid": round(len(whole) * valid), "test": round(len(whole) * test)}
    first = len(whole) - sum(lengths.values())
    first_cut = best_cut(texts, first, min(near, (lengths["valid"] or lengths["test"]) // 2))
    second_cut = max(first_cut, best_cut(texts, first + lengths["valid"], min(near, lengths["test"] // 2)))
    wanted = {"train": whole[:first_cut], "valid": whole[first_cut:second_cut], "test": whole[second_cut:]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "SPLIT_TOLERANCE_BYTES", near)
        if not all(wanted[split] for split, share in (("train", 1), ("valid", valid), ("test", test)) if share):
            with pytest.raises(UserError, match=f"short to split: {len(whole)} bytes leave (train|valid|test) empty"):
                find_source()
            return
        source = find_source()
    found = {split: text_of(documents) for split, documents in source.splits.items()}
    assert found == {split: text for split, text in wanted.items() if text}
    # Twice, because training a tokenizer reads the text too.
    assert b"".join(texts_of(source)) == b"".join(texts_of(source)) == whole


def test_cuts_fall_between_lines_words_and_characters(tmp_path: Path) -> None:
    fractions: Mapping[SplitName, float] = {"valid": 0.1, "test": 0.1}
    lines = b"".join(b"line %d\n" % index for index in range(1009))
    words = b" ".join(b"word%d" % index for index in range(1009))
    characters = "漢字".encode() * 503
    for name, text, last in (("lines", lines, b"\n"), ("words", words, b" "), ("characters", characters, b"")):
        make(tmp_path, {name: text})
        train, valid, test = texts_of(find(tmp_path / name, fractions=fractions))
        assert train + valid + test == text
        assert abs(len(test) - len(text) * 0.1) < 12
        assert train.endswith(last)
        assert valid.endswith(last)
        assert [part.decode() for part in (train, valid, test)]


def test_a_line_end_that_is_far_is_not_waited_for(tmp_path: Path) -> None:
    text = b"a" * 1_000_003 + b"\n" + b"b" * 70_001 + b"\n"
    make(tmp_path, {"a": text})
    train, valid, test = texts_of(find(tmp_path / "a", fractions={"valid": 0.25, "test": 0.25}))
    assert [len(train), len(valid), len(test)] == [535_002, 267_502, 267_502]


def test_default_is_ninety_five_five(tmp_path: Path) -> None:
    text = bytes(range(56, 256))
    (tmp_path / "a.txt").write_bytes(text)
    source = find(tmp_path / "a.txt")
    assert texts_of(source) == [text[:180], text[180:190], text[190:]]
    assert source.name == "a"
    assert str(tmp_path / "a.txt") in source.description
    assert source.tokenizer.kind == "byte"


def test_a_part_says_where_it_begins(tmp_path: Path) -> None:
    make(tmp_path, {"a": b"a\n" * 5000})
    splits = find(tmp_path / "a").splits
    assert [document.name for of in splits.values() for document in of] == [
        f"{tmp_path}/a", f"{tmp_path}/a, from byte 9,000 on", f"{tmp_path}/a, from byte 9,500 on"
    ]  # fmt: skip
    assert [document.num_bytes for of in splits.values() for document in of] == [9000, 500, 500]


def test_files_keep_the_order_given_and_folders_are_sorted(tmp_path: Path) -> None:
    make(
        tmp_path / "folder",
        {"b/x": b"3", "a": b"1", "a.d/z": b"2", "c": b"4", ".hidden": b"-", ".git/x": b"-", "empty": b"", "b/.y": b"-"},
    )
    make(tmp_path, {"second": b"second", ".first": b"first"})
    source = find(tmp_path / ".first", tmp_path / "folder", tmp_path / "second", fractions=WHOLE)
    assert list(source.splits) == ["train"]
    assert text_of(source.splits["train"]) == b"first1234second"
    assert names_of(source.splits["train"]) == [".first", "a", "z", "x", "c", "second"]


def test_patterns_are_sorted_and_go_into_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, {"d/b/x.txt": b"3", "d/a.txt": b"1", "d/a.md": b"-", "d/b.txt/c.txt": b"2", "d/empty.txt": b"",
                    "d/.h.txt": b"-", "d/[1].txt": b"4"})  # fmt: skip
    monkeypatch.chdir(tmp_path)
    source = find("d/**/*.txt", fractions=WHOLE)
    assert names_of(source.splits["train"]) == ["[1].txt", "a.txt", "c.txt", "x.txt"]
    assert source.name == "d"
    assert names_of(find("d/[1].txt", fractions=WHOLE).splits["train"]) == ["[1].txt"]  # a file before a pattern
    assert names_of(find(given={"train": ["d/?.txt"]}).splits["train"]) == ["a.txt"]
    for words, option in ((["d/*.text"], ""), ([], "--train: ")):
        with pytest.raises(UserError, match=rf"^{option}no file with text matches the pattern 'd/\*.text'; check"):
            find(*words, given={} if words else {"train": ["d/*.text"]})


def test_links_do_not_loop(tmp_path: Path) -> None:
    folder = make(tmp_path / "folder", {"a": b"a", "sub/b": b"b"})
    (folder / "sub" / "up").symlink_to(folder)
    (folder / "self").symlink_to(folder / "self")
    (folder / "gone").symlink_to(tmp_path / "nowhere")
    (folder / "linked").symlink_to(folder / "a")
    source = find(folder, fractions=WHOLE)
    assert names_of(source.splits["train"]) == ["a", "linked", "b"]
    assert source.name == "folder"


def test_files_given_twice_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path, {"a": b"a" * 97, "b": b"b" * 97, "d/c": b"c" * 97, "d/e": b"c" * 97})
    Path("link").symlink_to("a")
    Path("hard").hardlink_to("b")
    for files, note in (
        ({"train": ["a", "d"], "valid": ["b"]}, ()),
        ({"train": ["a"], "valid": ["a"]}, ("a is in train and valid",)),
        ({"train": ["a"], "valid": ["b"], "test": ["link"]}, ("a (also given as link) is in train and test",)),
        ({"train": ["b", "hard", "b"]}, ("b (also given as hard) is in train 3 times",)),
        ({"train": ["d"], "test": ["d/*"]}, ("d/c is in train and test; files given more than once: 2",)),
    ):
        assert find(given=files).notes == note
    assert find("a", "b").notes == ()
    assert find("a", "d", "./a").notes == ("a is in the text 2 times",)


def test_given_splits_are_kept_whole(tmp_path: Path) -> None:
    make(tmp_path, {"a": b"a", "b": b"b", "v/1": b"v", "v/2": b"w"})
    source = find(given={"test": [], "valid": [f"{tmp_path}/v"], "train": [f"{tmp_path}/b", f"{tmp_path}/a"]})
    assert list(source.splits) == ["train", "valid"]
    assert text_of(source.splits["train"]) == b"ba"
    assert [text_of([document]) for document in source.splits["valid"]] == [b"v", b"w"]


def test_compressed_files_are_read_decompressed(tmp_path: Path) -> None:
    make(tmp_path, {"a.txt.gz": gzip.compress(b"1\n"), "b.bz2": bz2.compress(b"2\n"), "c.xz": lzma.compress(b"3\n"),
                    "d": b"4\n"})  # fmt: skip
    source = find(tmp_path, fractions=WHOLE)
    assert text_of(source.splits["train"]) == b"1\n2\n3\n4\n"
    source = find(given={"train": [f"{tmp_path}/a.txt.gz"]})
    assert (text_of(source.splits["train"]), source.name) == (b"1\n", "a")


def test_reading_is_lazy_and_in_chunks(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(3 * 2**20 + 7))
    (document,) = find(path, fractions=WHOLE).splits["train"]
    assert [len(chunk) for chunk in document.chunks] == [2**20, 2**20, 2**20, 7]
    path.write_bytes(b"short")
    with pytest.raises(UserError, match=r"a became shorter while it was read"):
        text_of([document])
    path.unlink()
    with pytest.raises(UserError, match=r"reading .*a: no such file or folder"):
        text_of([document])


@given(lengths=st.lists(st.integers(1, 13), min_size=3, max_size=29), share=st.sampled_from([0.1, 0.25, 0.45]))
@settings(deadline=None)
def test_integers_are_cut_between_lines(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], share: float
) -> None:
    lines = [b" ".join(b"%d" % (index * length) for index in range(length)) + b"\n" for length in lengths]
    path = make(tmp_path_factory.mktemp("numbers"), {"a": b"".join(lines)}) / "a"
    whole = b"".join(lines)
    if whole.find(b"\n", len(whole) - round(len(whole) * share) - 1) == len(whole) - 1:
        with pytest.raises(UserError, match="leave valid empty"):
            find(path, fractions={"valid": share, "test": 0}, kind="integer")
        return
    source = find(path, fractions={"valid": share, "test": 0}, kind="integer")
    train, valid = texts_of(source)
    assert train + valid == whole
    assert train.endswith(b"\n")
    assert source.tokenizer_splits == SPLITS


def test_arrays_are_cut_between_rows(tmp_path: Path) -> None:
    rows = np.arange(101 * 7).reshape(101, 7)
    np.save(tmp_path / "a.npy", rows)
    source = find(tmp_path / "a.npy", fractions={"valid": 0.1, "test": 0.05})
    found = [np.array([line.split() for line in text.splitlines()], int) for text in texts_of(source)]
    assert [len(part) for part in found] == [86, 10, 5]
    assert np.array_equal(np.concatenate(found), rows)
    assert (source.tokenizer.kind, source.name) == ("integer", "a")


def test_one_sequence_is_cut_between_numbers(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(1000, dtype=np.uint16))
    found = [np.array(text.split(), int) for text in texts_of(find(tmp_path / "a.npy"))]
    assert [len(part) for part in found] == [900, 50, 50]
    assert np.array_equal(np.concatenate(found), np.arange(1000))


def test_arrays_are_for_integers(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(100))
    make(tmp_path, {"b.txt": b"1 2\n" * 97})
    message = r"a.npy contains integers, not text; give --tokenizer integer, or leave it out \(a pattern such as"
    for words, kind in (([tmp_path / "a.npy"], "byte"), ([tmp_path], None), ([tmp_path], "word")):
        with pytest.raises(UserError, match=message):
            find(*words, kind=kind)
    with pytest.raises(UserError, match=r"a.npy is an array and other files are text, .* cannot be joined"):
        find(tmp_path, kind="integer")
    given: Mapping[SplitName, Sequence[str]] = {"train": [f"{tmp_path}/a.npy"], "valid": [f"{tmp_path}/b.txt"]}
    assert find(given=given, kind="integer").tokenizer.kind == "integer"


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (
            ["gone.txt"],
            r"'gone.txt' is neither a file nor a folder nor a known data set; check the .*: enwik8, text8, ",
        ),
        (["python-stdlb"], r"nor a known data set \(did you mean 'python-stdlib'\?\); check the spelling"),
        ([], r"no text was given; name files, folders, --train FILE, or a data set \(enwik8, .*python-stdlib\)"),
        (["empty"], r"the file empty is empty; leave it out"),
        (["nothing"], r"the folder nothing contains no text \(hidden and empty files are ignored\); name another"),
        (["pipe"], r"pipe is not a regular file; write its text to a file and name that"),
        (["a.tar.gz"], r"^a.tar.gz is an archive; extract it first, or leave it out \(a pattern such as"),
        (["packed"], r"^packed/b/c.zip is an archive; extract it first, or leave it out"),
        (["packed/**/*.*"], r"^packed/b/c.zip is an archive; extract it first, or leave it out"),
        (["short", "gone.txt"], "'gone.txt' is neither"),
        (["short"], r"too short to split: 3 bytes leave valid empty; pass more text, or change --valid-fraction"),
        (["empty.gz"], r"too short to split: 0 bytes leave train empty"),
        (["bad.gz"], r"bad.gz: damaged or truncated \(.*\); get it again"),
        (
            ["python-stdlib", "short"],
            r"python-stdlib cannot be combined with others, but 2 sources were given; omit .* ./python-stdlib",
        ),
        (["x" * 300], "File name too long"),
        (["short/x"], "'short/x' is neither"),
        ([""], r"the path is empty; name a file or folder"),
    ],
)
def test_wrong_sources_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: list[str], message: str
) -> None:
    make(tmp_path, {"empty": b"", "short": b"abc", "nothing/empty": b"", "nothing/.hidden": b"x", "a.tar.gz": b"x",
                    "packed/a.txt": b"x" * 97, "packed/b/c.zip": b"PK",
                    "empty.gz": gzip.compress(b""), "bad.gz": gzip.compress(b"abc" * 97)[:20]})  # fmt: skip
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        find(*sources)


@pytest.mark.parametrize(
    ("valid", "test", "message"),
    [
        (1.0, 0.05, r"--valid-fraction 1 is out of range; must be 0 <= fraction < 1"),
        (-0.1, 0.05, r"--valid-fraction -0.1 is out of range"),
        (float("nan"), 0.05, r"--valid-fraction nan is out of range"),
        (0.05, 5, r"--test-fraction 5 is out of range"),
        (
            0.6,
            0.4,
            r"--valid-fraction 0.6 and --test-fraction 0.4 leave nothing to train on; their sum must be below 1",
        ),
    ],
)
def test_wrong_fractions_are_refused(tmp_path: Path, valid: float, test: float, message: str) -> None:
    make(tmp_path, {"a": bytes(100)})
    with pytest.raises(UserError, match=message):
        find(tmp_path / "a", fractions={"valid": valid, "test": test})


@needs_permissions
def test_unreadable_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "folder", {"a": b"a", "sub/b": b"b"})
    (tmp_path / "folder" / "sub").chmod(0)
    try:
        with pytest.raises(UserError, match=r"reading .*sub: permission denied"):
            find(tmp_path / "folder")
    finally:
        (tmp_path / "folder" / "sub").chmod(0o700)
    (tmp_path / "folder" / "a").chmod(0)
    with pytest.raises(UserError, match=r"reading .*a: permission denied"):
        text_of(find(tmp_path / "folder" / "a", fractions=WHOLE).splits["train"])
