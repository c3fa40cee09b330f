"""Publish the folder of an exported model in a repository of the Hub, by huggingface_hub."""

from __future__ import annotations

import re
from pathlib import Path

from transformer_xl.config import UserError
from transformer_xl.config.extras import missing_extra
from transformer_xl.files import as_path, quoted

_FILES = ("*.json", "*.safetensors", "*.jinja", "*.py", "*.txt", "*.model", "README.md")
"""What a repository of a model has; other files of the folder stay here."""


def push(folder: Path | str, repository: str, *, private: bool = True, message: str = "Add the model") -> str:
    """Publish a folder that `convert` wrote for transformers, and return its address.

    The repository is made if there is none. The account is that of `hf auth login`, or of the variable HF_TOKEN.

    Args:
        folder: the folder, with README.md.
        repository: its name on the Hub, such as "me/mine".
        private: whether a new repository is private.
        message: message of the commit.

    Raises:
        UserError: the folder is no exported model, the name is none of a repository, huggingface_hub is not installed,
            or the Hub refuses or cannot be reached; then nothing is changed there, or the same call goes on.
    """
    path = as_path(folder, "folder", "give a folder that convert wrote")
    if not re.fullmatch(r"[\w.\-]+/[\w.\-]+", repository):
        raise UserError(f"repository {repository!r}: give a name such as me/mine")
    if not (path / "config.json").is_file() or not (path / "model.safetensors").is_file():
        is_run = (path / "config.yaml").is_file()
        advice = f"export it first: txl convert {quoted(path)} DIR --to huggingface" if is_run else "give one"
        raise UserError(f"{path} is no exported model (no config.json and model.safetensors); {advice}")
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HTTPError, LocalTokenNotFoundError  # the first: of its library for HTTP
    except ImportError as error:
        raise missing_extra("huggingface_hub", "transformers") from error
    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository, folder_path=path, commit_message=message, allow_patterns=list(_FILES)
        )
    except LocalTokenNotFoundError:
        raise UserError("there is no account; log in first: hf auth login, or set HF_TOKEN") from None
    except (HTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"publishing {path} as {repository}: {reason}; nothing here was changed, try again") from None
    return str(commit.repo_url)
