"""Sources of text: which files, in which order, cut where; and what is said when there is nothing to read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.config import UserError
from transformer_xl.text.corpora import CORPORA, FilePart, TextSource, find_text
from transformer_xl.text.token_store import Document, SplitName

needs_permissions = pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")


def find(
    *sources: str | Path, given: Mapping[SplitName, Sequence[str]] | None = None, **fractions: float
) -> TextSource:
    return find_text([str(source) for source in sources], given=given or {}, **fractions)


def text_of(documents: Iterable[Document]) -> bytes:
    return b"".join(chunk for document in documents for chunk in document.chunks)


def names_of(documents: Iterable[Document]) -> list[str]:
    return [Path(document.name).name for document in documents]


def sha256_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def make(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@settings(deadline=None)
@given(
    texts=st.lists(st.binary(min_size=1, max_size=31), min_size=1, max_size=5),
    valid=st.sampled_from([0.0, 0.05, 0.23, 0.5]),
    test=st.sampled_from([0.0, 0.07, 0.31, 0.49]),
)
def test_cut_text_joins_to_the_whole(
    tmp_path_factory: pytest.TempPathFactory, texts: list[bytes], valid: float, test: float
) -> None:
    folder = make(tmp_path_factory.mktemp("cut"), {f"{place}.txt": text for place, text in enumerate(texts)})
    files = [folder / f"{place}.txt" for place in range(len(texts))]
    whole = b"".join(texts)
    lengths = {"valid": round(len(whole) * valid), "test": round(len(whole) * test)}
    wanted = {"train": len(whole) - sum(lengths.values()), **lengths}
    if not all(wanted[split] for split, share in (("train", 1), ("valid", valid), ("test", test)) if share):
        with pytest.raises(UserError, match=f"too short to split: {len(whole)} bytes leave (train|valid|test) empty"):
            find(*files, valid_fraction=valid, test_fraction=test)
        return
    splits = find(*files, valid_fraction=valid, test_fraction=test).splits
    assert {split: len(text_of(documents)) for split, documents in splits.items()} == {
        split: length for split, length in wanted.items() if length
    }
    assert b"".join(text_of(splits[split]) for split in ("train", "valid", "test") if split in splits) == whole
    # Again, since a vocabulary that learns from the text goes through it twice.
    assert b"".join(text_of(splits[split]) for split in ("train", "valid", "test") if split in splits) == whole


def test_default_is_ninety_five_five(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(200)))
    source = find(tmp_path / "a.txt")
    assert {split: text_of(documents) for split, documents in source.splits.items()} == {
        "train": bytes(range(180)),
        "valid": bytes(range(180, 190)),
        "test": bytes(range(190, 200)),
    }
    assert source.name == "a"
    assert str(tmp_path / "a.txt") in source.description


def test_files_keep_the_order_given_and_folders_are_sorted(tmp_path: Path) -> None:
    make(
        tmp_path / "folder",
        {"b/x": b"3", "a": b"1", "a.d/z": b"2", "c": b"4", ".hidden": b"-", ".git/x": b"-", "empty": b"", "b/.y": b"-"},
    )
    make(tmp_path, {"second": b"second", ".first": b"first"})
    source = find(tmp_path / ".first", tmp_path / "folder", tmp_path / "second", valid_fraction=0, test_fraction=0)
    assert list(source.splits) == ["train"]
    assert text_of(source.splits["train"]) == b"first1234second"
    assert names_of(source.splits["train"]) == [".first", "a", "z", "x", "c", "second"]


def test_links_do_not_loop(tmp_path: Path) -> None:
    folder = make(tmp_path / "folder", {"a": b"a", "sub/b": b"b"})
    (folder / "sub" / "up").symlink_to(folder)
    (folder / "self").symlink_to(folder / "self")
    (folder / "gone").symlink_to(tmp_path / "nowhere")
    (folder / "linked").symlink_to(folder / "a")
    source = find(folder, valid_fraction=0, test_fraction=0)
    assert names_of(source.splits["train"]) == ["a", "linked", "b"]
    assert source.name == "folder"


def test_given_splits_are_kept_whole(tmp_path: Path) -> None:
    make(tmp_path, {"a": b"a", "b": b"b", "v/1": b"v", "v/2": b"w"})
    source = find(given={"test": [], "valid": [f"{tmp_path}/v"], "train": [f"{tmp_path}/b", f"{tmp_path}/a"]})
    assert list(source.splits) == ["train", "valid"]
    assert text_of(source.splits["train"]) == b"ba"
    assert [text_of([document]) for document in source.splits["valid"]] == [b"v", b"w"]


def test_reading_is_lazy_and_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(3 * 2**20 + 7))
    (document,) = find(path, valid_fraction=0, test_fraction=0).splits["train"]
    assert [len(chunk) for chunk in document.chunks] == [2**20, 2**20, 2**20, 7]
    path.write_bytes(b"short")
    with pytest.raises(UserError, match=r"a became shorter while it was read; try again once it no longer changes"):
        text_of([document])
    path.unlink()
    with pytest.raises(UserError, match=r"reading .*a: no such file or folder"):
        text_of([document])


def test_part_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"0123456789")
    assert b"".join(FilePart(path, 3, 7)) == b"3456"


def test_standard_library_has_no_tests_and_no_overlap() -> None:
    source = find("python-stdlib")
    names = {split: [document.name for document in documents] for split, documents in source.splits.items()}
    everything = [name for of in names.values() for name in of]
    assert source.name == "python-stdlib"
    assert all(of == sorted(of, key=sha256_of) for of in names.values())
    assert all(of != sorted(of) for of in names.values())
    assert len(everything) == len(set(everything)) > 300
    assert "argparse.py" in everything
    assert "json/decoder.py" in everything
    folders = {folder for name in everything for folder in Path(name).parts[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    assert len(names["train"]) > 8 * len(names["valid"]) > 0
    assert len(names["train"]) > 8 * len(names["test"]) > 0
    assert text_of(source.splits["test"])


def test_standard_library_split_is_drawn_from_the_path_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned by hand with sha256sum: first 16 hex digits below e666... are train, below f333... valid, others test.

    Within a split the order is that of the same digits.
    """
    files = {f"m{place}.py": b"x" for place in range(40)}
    make(tmp_path, {**files, "test/t.py": b"x", "a/tests/t.py": b"x", "a/readme.txt": b"x", "empty.py": b""})
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    splits = find("python-stdlib").splits
    assert names_of(splits["valid"]) == ["m27.py", "m12.py", "m4.py", "m18.py"]
    assert names_of(splits["test"]) == ["m11.py", "m9.py", "m28.py"]
    assert len(names_of(splits["train"])) == 40 - 4 - 3


def test_python_without_source_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(UserError, match=r"too little source to split \(0 files in .*give files of your own"):
        find("python-stdlib")


def test_named_corpora_are_listed() -> None:
    assert "python-stdlib" in CORPORA


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (["gone.txt"], r"'gone.txt' is neither a file nor a folder nor a known corpus; check the .*: python-stdlib"),
        (["python-stdlb"], r"nor a known corpus \(did you mean 'python-stdlib'\?\); check the spelling"),
        ([], r"no text was given; name files, folders, --train FILE, or a corpus \(python-stdlib\)"),
        (["empty"], r"the file empty is empty; leave it out, or name one that holds text"),
        (["nothing"], r"the folder nothing holds no text \(hidden and empty files are left out\); name another"),
        (["pipe"], r"pipe is not a regular file; write its text to a file and name that"),
        (["short", "gone.txt"], "'gone.txt' is neither"),
        (["short"], r"too short to split: 3 bytes leave valid empty; give more text, or other --valid-fraction"),
        (["python-stdlib", "short"], r"python-stdlib stands alone, but 2 sources were given; leave .* ./python-stdlib"),
        (["x" * 300], "File name too long"),
        (["short/x"], "'short/x' is neither"),
    ],
)
def test_wrong_sources_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: list[str], message: str
) -> None:
    make(tmp_path, {"empty": b"", "short": b"abc", "nothing/empty": b"", "nothing/.hidden": b"x"})
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        find(*sources)


@pytest.mark.parametrize(
    ("valid", "test", "message"),
    [
        (1.0, 0.05, r"--valid-fraction 1 is not a share of the text; wanted 0 up to, not with, 1"),
        (-0.1, 0.05, r"--valid-fraction -0.1 is not a share"),
        (float("nan"), 0.05, r"--valid-fraction nan is not a share"),
        (0.05, 5, r"--test-fraction 5 is not a share"),
        (0.6, 0.4, r"--valid-fraction 0.6 and --test-fraction 0.4 leave nothing to train on; wanted a sum below 1"),
    ],
)
def test_wrong_fractions_are_refused(tmp_path: Path, valid: float, test: float, message: str) -> None:
    make(tmp_path, {"a": bytes(100)})
    with pytest.raises(UserError, match=message):
        find(tmp_path / "a", valid_fraction=valid, test_fraction=test)


def test_contradictions_are_refused(tmp_path: Path) -> None:
    file = str(make(tmp_path, {"a": bytes(100)}) / "a")
    with pytest.raises(UserError, match=r"both files to cut \(.*a\) and --test were given; write --train before"):
        find(file, given={"test": [file]})
    with pytest.raises(UserError, match=r"--valid was given without --train; add --train with the files to train on"):
        find(given={"valid": [file]})
    with pytest.raises(UserError, match="the splits are given; leave the fractions out"):
        find(given={"train": [file]}, test_fraction=0.0)
    with pytest.raises(UserError, match="the splits of python-stdlib are fixed; leave the fractions out"):
        find("python-stdlib", valid_fraction=0.1)
    with pytest.raises(UserError, match=r"--valid: 'gone' is neither a file nor a folder; check the spelling"):
        find(given={"train": [file], "valid": ["gone"]})


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
        text_of(find(tmp_path / "folder" / "a", valid_fraction=0, test_fraction=0).splits["train"])
