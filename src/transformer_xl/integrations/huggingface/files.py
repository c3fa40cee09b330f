"""Old TransfoXL folders, on this machine or on the Hub."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import snapshot_download
from transformers import PreTrainedConfig

from transformer_xl.integrations.checkpoints import huggingface as transfo_xl

# arguments of `from_pretrained` that say where a repository of the Hub is, and how to get it
HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision")


def is_transfo_xl(path: str | os.PathLike[str], arguments: Mapping[str, Any]) -> bool:
    """Return whether a folder, or a repository of the Hub, has the old model type.

    Args:
        path: the first argument of `from_pretrained`.
        arguments: its keyword arguments.
    """
    hub = {name: arguments[name] for name in (*HUB_ARGUMENTS, "subfolder") if name in arguments}
    try:
        values, _ = PreTrainedConfig.get_config_dict(path, **hub)
    except OSError:  # no config.json: transformers says what is missing
        return False
    return values.get("model_type") == transfo_xl.MODEL_TYPE


def local_folder(path: str | os.PathLike[str], arguments: Mapping[str, Any]) -> Path:
    """Return the folder, or a copy of the repository of the Hub; arguments are those of `is_transfo_xl`."""
    if not Path(path).is_dir():
        hub = {name: arguments[name] for name in HUB_ARGUMENTS if arguments.get(name) is not None}
        names = ["config.json", "tokenizer_config.json", *transfo_xl.WEIGHT_FILES, *transfo_xl.VOCABULARIES]
        names += ["model-*.safetensors", "pytorch_model-*.bin"]  # the parts that an index lists
        patterns = [str(PurePosixPath(arguments.get("subfolder") or "") / name) for name in names]
        path = snapshot_download(str(path), allow_patterns=patterns, **hub)
    return Path(path) / (arguments.get("subfolder") or "")
