"""What to type where a library that only some need is missing."""

from __future__ import annotations

import json
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from shlex import quote
from urllib.parse import unquote, urlsplit

from transformer_xl.config.settings import UserError


def missing_extra(library: str, extra: str) -> UserError:
    """Return the error that a library is not installed, with the command that installs it.

    Args:
        library: what is missing, such as `onnx`.
        extra: the extra of this package that has it.
    """
    return UserError(f"{library} is not installed; install it: {install_command(extra)}")


def install_command(extra: str) -> str:
    """Return the command that installs an extra from the folder that this package was installed from.

    The package is not in a registry, so its name alone would not do. Where that folder is unknown, it is that of the
    reader: the command is for a clone of the repository.
    """
    source = "."
    with suppress(PackageNotFoundError, ValueError, KeyError):
        url = urlsplit(json.loads(distribution("transformer-xl").read_text("direct_url.json") or "{}")["url"])
        folder = Path(unquote(url.path))
        if url.scheme == "file" and (folder / "pyproject.toml").is_file():
            source = "." if folder == Path.cwd() else str(folder)
    return f"pip install {quote(f'{source}[{extra}]')}"
