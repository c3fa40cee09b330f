"""The command that installs an extra works as it is printed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from transformer_xl.config import extras


@pytest.mark.parametrize("is_known", [True, False])
def test_extras_are_installed_from_where_the_package_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """It is in no registry: a clone, whose folder pip writes down, or the reader's own."""
    clone = tmp_path / "a clone"
    clone.mkdir()
    (clone / "pyproject.toml").touch()
    origin = json.dumps({"url": clone.as_uri()}) if is_known else None
    monkeypatch.setattr(extras, "distribution", lambda name: SimpleNamespace(read_text=lambda file: origin))
    assert extras.install_command("serve") == f"pip install '{clone if is_known else '.'}[serve]'"
    monkeypatch.chdir(clone)
    assert extras.install_command("serve") == "pip install '.[serve]'"
