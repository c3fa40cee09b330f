"""What is renamed into place was flushed to disk before."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from transformer_xl.files import whole_folder


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the names of open files")
def test_a_folder_is_flushed_with_all_below_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[Path] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    with whole_folder(tmp_path / "whole") as aside:
        (aside / "below" / "further").mkdir(parents=True)
        for place in ("one", "below/two", "below/further/three"):
            (aside / place).write_text("text")
        assert flushed == []
    wanted = {aside / place for place in ("", "one", "below", "below/two", "below/further", "below/further/three")}
    assert set(flushed) == wanted | {tmp_path}
    assert flushed[-1] == tmp_path  # the new name last
