"""Tests of which files a folder or a glob pattern selects."""

from __future__ import annotations

import glob
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.config import UserError
from transformer_xl.text.sources.folders import glob_files, list_files


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nested folders that contain files of the same names at every level; no links."""
    tree = tmp_path_factory.mktemp("tree")
    for outer in ("d", "e.txt", ".g"):
        for inner in ("d", "f", ".g"):
            folder = tree / outer / inner
            folder.mkdir(parents=True)
            for name in ("a", "b.txt", ".h", "[x]"):
                for parent in (tree, tree / outer, folder):
                    (parent / name).write_bytes(b"x")
            (folder / "empty.txt").write_bytes(b"")
    return tree


# "[[]x]" matches the file "[x]", since [[] is the character [.
PARTS = st.sampled_from(["**", "*", "d", "?", "*.txt", "[a-e]*", ".*", "f", "a", "e.txt", "[[]x]"])


@given(parts=st.lists(PARTS, min_size=1, max_size=4))
@settings(deadline=None, max_examples=100)
def test_files_without_links_equal_those_of_glob(tree: Path, parts: list[str]) -> None:
    pattern = f"{tree}/{'/'.join(parts)}"
    if not glob.has_magic(pattern):
        return
    # For a file f, glob returns f/ for the pattern f/**.
    glob_paths = {Path(name) for name in glob.iglob(pattern, recursive=True) if not name.endswith("/")}
    expected = sorted((path for path in glob_paths if path.is_file() and path.stat().st_size), key=Path.as_posix)
    assert glob_files(pattern) == expected


def test_links_to_folders_are_followed_only_before_the_first_wildcard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sl/sub").mkdir(parents=True)
    Path("sl/sub/a.txt").write_bytes(b"x")
    Path("sl/sub/loop").symlink_to("..")
    Path("sl/linkdir").symlink_to("sub")
    Path("sl/self.txt").symlink_to("self.txt")  # a link to itself, so not a file
    Path("sl/one.txt").symlink_to("sub/a.txt")
    # One file, which three links lead to: the link to the file matches, but links to folders are not followed.
    names = ["sl/one.txt", "sl/sub/a.txt"]
    assert [str(path) for path in glob_files("sl/**/*.txt")] == names
    assert [str(path) for path in glob_files("sl/**")] == [str(path) for path in list_files(Path("sl"))] == names
    assert [str(path) for path in glob_files("sl/*/a.txt")] == ["sl/sub/a.txt"]
    assert [str(path) for path in glob_files("sl/linkdir/*.txt")] == ["sl/linkdir/a.txt"]
    assert glob_files("gone/*.txt") == glob_files("sl/one.txt/*") == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir(mode=0)
    with pytest.raises(UserError, match=r"reading .*sub: permission denied"):
        glob_files(f"{tmp_path}/**/*.txt")
