"""Permissions and errors of safetensors files: `save_tensors` adds a checksum, `write_safetensors` does not."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from transformer_xl import tensor_file
from transformer_xl.config import UserError
from transformer_xl.tensor_file import save_tensors, write_safetensors


def test_files_have_the_permissions_of_new_files(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    save_tensors(tmp_path / "checked", {"a": torch.zeros(2)})
    write_safetensors(tmp_path / "bare", {"a": torch.zeros(2)}, {"format": "pt"})
    modes = {path.name: oct(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert set(modes.values()) == {modes["empty"]}, modes


def test_errors_of_safetensors_become_os_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )  # ENOSPC on Linux

    monkeypatch.setattr(tensor_file, "save_file", full)
    with pytest.raises(OSError, match="os error 28") as error:
        write_safetensors(tmp_path / "bare", {}, {})
    assert error.value.errno == errno.ENOSPC
    with pytest.raises(UserError, match="no space left"):
        save_tensors(tmp_path / "checked", {})
    assert not (tmp_path / "checked").exists()
