"""What is renamed into place was flushed to disk before."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from transformer_xl.config import UserError
from transformer_xl.files import atomic_file, atomic_folder


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the names of open files")
def test_a_folder_is_flushed_with_all_below_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[Path] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    with atomic_folder(tmp_path / "whole") as aside:
        (aside / "below" / "further").mkdir(parents=True)
        for place in ("one", "below/two", "below/further/three"):
            (aside / place).write_text("text")
        assert flushed == []
    wanted = {aside / place for place in ("", "one", "below", "below/two", "below/further", "below/further/three")}
    assert set(flushed) == wanted | {tmp_path}
    assert flushed[-1] == tmp_path  # the new name last


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_what_is_no_file_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """It is known at once; a device would be replaced by a file, and hours of work end in a folder that is in the way.

    A link to a file is taken for a file.
    """
    os.mkfifo(tmp_path / "pipe")
    for path, what in ((tmp_path, "a folder"), (tmp_path / "pipe", "a device or a pipe"), (Path("."), "a folder")):
        with pytest.raises(UserError, match=f"is {what}, must be a file"), atomic_file(path):
            pytest.fail("was begun")
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with atomic_file(tmp_path / "link") as aside:
        aside.write_text("text")
    assert (tmp_path / "link").read_text() == "text"
