"""Files of tensors: what `tests/training/test_checkpoint.py` does not ask about them."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from transformer_xl import tensor_file
from transformer_xl.config import UserError
from transformer_xl.tensor_file import save_tensors, write_safetensors


def test_others_may_read_them_as_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    save_tensors(tmp_path / "ours", {"a": torch.zeros(2)})
    write_safetensors(tmp_path / "bare", {"a": torch.zeros(2)}, {"format": "pt"})
    modes = {path.name: oct(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert set(modes.values()) == {modes["plain"]}, modes


def test_what_the_system_refuses_is_said_in_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(tensor_file, "save_file", full)
    with pytest.raises(OSError, match="os error 28") as error:
        write_safetensors(tmp_path / "bare", {}, {})
    assert error.value.errno == errno.ENOSPC
    with pytest.raises(UserError, match="no space left"):
        save_tensors(tmp_path / "ours", {})
    assert not (tmp_path / "ours").exists()
