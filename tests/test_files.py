"""Atomic writes flush to disk (fsync) before they rename, and refuse paths that cannot be replaced."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from transformer_xl.config import UserError
from transformer_xl.files import as_user_error, atomic_file, atomic_folder, final_names, parse_json


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/fd")
def test_folder_is_flushed_with_all_its_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[Path] = []
    fsync = os.fsync

    def record_fsync(descriptor: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record_fsync)
    with atomic_folder(tmp_path / "whole") as temporary:
        (temporary / "below" / "further").mkdir(parents=True)
        for name in ("one", "below/two", "below/further/three"):
            (temporary / name).write_text("text")
        assert flushed == []
    expected = {temporary / name for name in ("", "one", "below", "below/two", "below/further", "below/further/three")}
    assert set(flushed) == expected | {tmp_path}
    assert flushed[-1] == tmp_path  # last, after the rename


@pytest.mark.parametrize("has_links", [True, False])
def test_what_cannot_be_flushed_after_the_rename_is_not_there(
    has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that fails and has written all the same would do its work twice when it is repeated."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def fsync(descriptor: int) -> None:
        if os.fstat(descriptor).st_ino == tmp_path.stat().st_ino:
            refuse()

    (tmp_path / "old").write_text("old")
    monkeypatch.setattr(os, "fsync", fsync)
    if not has_links:  # as on some file systems
        monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(UserError, match="Input/output error"), atomic_folder(tmp_path / "folder") as folder:
        (folder / "file").touch()
    for name in ("new", "old"):
        with pytest.raises(UserError, match="Input/output error"), atomic_file(tmp_path / name) as file:
            file.write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_text() == ("old" if has_links else "new")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_paths_that_are_no_files_are_refused_before_writing(tmp_path: Path) -> None:
    """Otherwise the error would come after the work is done, or the rename would replace a device. Symbolic
    links are followed."""
    os.mkfifo(tmp_path / "pipe")
    for path, what in ((tmp_path, "a folder"), (tmp_path / "pipe", "a device or a pipe"), (Path("."), "a folder")):
        with pytest.raises(UserError, match=f"is {what}, must be a file"), atomic_file(path):
            pytest.fail("the block must not run")
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with atomic_file(tmp_path / "link") as temporary:
        temporary.write_text("text")
    assert (tmp_path / "link").read_text() == "text"


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_names_that_no_file_can_have_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="no file can have this name"), as_user_error("reading it"):
        (tmp_path / name).read_bytes()
    with pytest.raises(ValueError, match="other"), as_user_error("reading it"):
        raise ValueError("other")


@pytest.mark.parametrize("content", ["[" * 200 + "]" * 200, '{"a":' * 200 + "1" + "}" * 200, "[" * 100_000, "["])
def test_json_too_deep_for_those_who_use_it_is_refused(content: str) -> None:
    with pytest.raises(ValueError, match=r"nested too deeply|Expecting value"):
        parse_json(content)
    assert parse_json('[{"a": [[[[1]]]]}, "[[[["]') == [{"a": [[[[1]]]]}, "[[[["]


def test_messages_have_final_names_and_keep_other_dots() -> None:
    text = "reading a.pt: '.my run.partial-12' to '/v1.5/.b.partial-new/x.json'"
    assert final_names(text) == "reading a.pt: 'my run' to '/v1.5/b/x.json'"
