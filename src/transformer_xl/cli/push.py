"""`txl push`: publish an exported model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from transformer_xl.cli.options import Json
from transformer_xl.cli.output import print_json


def push(
    folder: Path,
    repository: str,
    /,
    *,
    public: Annotated[bool, Parameter(negative=())] = False,
    message: str = "Add the model",
    json: Json = False,
) -> None:
    """Publish an exported model, with its model card, in a repository of the Hub, which is made if there is none.

    The account is that of 'hf auth login', or of the variable HF_TOKEN.

    Parameters
    ----------
    folder
        Folder made by 'txl convert RUN FOLDER --to huggingface'.
    repository
        Its name, such as me/mine.
    public
        Make a new repository public; otherwise it is private.
    message
        Message of the commit.
    """
    from transformer_xl.integrations.hub import push as publish

    address = publish(folder, repository, private=not public, message=message)
    print_json({"folder": str(folder), "address": address}) if json else print(f"{folder}: {address}")
