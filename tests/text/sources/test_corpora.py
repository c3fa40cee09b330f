"""What a command line names: a corpus by its name, splits, or text to cut; and contradictions."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformer_xl.text.sources.corpora import find_text

from transformer_xl.config import UserError
from transformer_xl.text.sources.source_files import Origin


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "a").write_bytes(bytes(100))
    return str(tmp_path / "a")


def test_a_name_splits_or_files(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_text(["python-stdlib"], given={}).name == "python-stdlib"
    assert list(find_text([file], given={}).splits) == ["train", "valid", "test"]
    assert list(find_text([], given={"train": [file]}).splits) == ["train"]
    monkeypatch.chdir(Path(file).parent)
    Path("ptb").write_bytes(bytes(100))
    assert find_text(["./ptb"], given={}).name == "ptb"
    assert find_text(["./ptb"], given={}).description.endswith("cut from its end")


def test_one_fraction_leaves_the_other(file: str) -> None:
    splits = find_text([file], given={}, fractions={"valid": 0.2, "test": None}).splits
    assert {split: sum(document.num_bytes for document in of) for split, of in splits.items()} == {
        "train": 75, "valid": 20, "test": 5
    }  # fmt: skip


def test_contradictions_are_refused(file: str) -> None:
    with pytest.raises(UserError, match=r"both text to cut \(.*a\) and --test were given; write --train before"):
        find_text([file], given={"test": [file]})
    with pytest.raises(UserError, match=r"--valid was given without --train; add --train with the files to train on"):
        find_text([], given={"valid": [file]})
    with pytest.raises(UserError, match="the splits are given; leave the fractions out"):
        find_text([], given={"train": [file]}, fractions={"test": 0.0})
    with pytest.raises(UserError, match="the splits of python-stdlib are fixed; leave the fractions out"):
        find_text(["python-stdlib"], given={}, fractions={"valid": 0.1})
    with pytest.raises(UserError, match=r"--valid: 'gone' is neither a file nor a folder; check the spelling"):
        find_text([], given={"train": [file], "valid": ["gone"]})


def test_a_source_is_for_named_corpora(file: str) -> None:
    origin = Origin(Path(file))
    for sources, given in (([file], {}), ([], {"train": [file]})):
        with pytest.raises(
            UserError, match=r"--source .*a is for a corpus known by name \(enwik8, .*\); files of your"
        ):
            find_text(sources, given=given, origin=origin)
    with pytest.raises(UserError, match="python-stdlib is read from this machine's Python; leave --source out"):
        find_text(["python-stdlib"], given={}, origin=origin)
