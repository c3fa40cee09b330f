"""LoRA adapters (Hu et al. 2021, arXiv 2106.09685), by the library peft.

    y_O = W_OI x_I + alpha / rank * B_OR A_RI x_I        W stays as it is; A begins at random, B with zeros

An adapter is A and B of each adapted linear layer. In files they have peft's names, so that peft reads them too.

Shape suffixes: I input width, O output width, R rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from transformer_xl.config import LoraConfig, UserError, nearest
from transformer_xl.config.extras import missing_extra
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.progress import without_library_warnings

ADAPTER_FILE, PEFT_CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
"""Names of the files of an adapter, which are peft's."""

_NAME = "default"  # peft's name of an adapter that has no other
_PREFIX = "base_model.model.model."  # of names in files: our model as peft sees it in the wrapper for transformers


def require_peft() -> None:
    """Check that peft is installed.

    Raises:
        UserError: it is not.
    """
    if find_spec("peft") is None:
        raise missing_extra("peft", "lora")


def lora_targets(model: LanguageModel) -> list[str]:
    """Return the last names of all linear layers inside the model's layers, such as q_proj, in order."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name, _ in _linear_layers(model)))


def check_lora(model: LanguageModel, lora: LoraConfig) -> None:
    """Check that a model can have an adapter, before any of it is allocated.

    Raises:
        UserError: it has no such layers, or the rank is larger than a side of their weights.
    """
    known = lora_targets(model)
    if not known:
        raise UserError(
            f"a model of {model.config.architecture} has no linear layers that LoRA adapts; leave out lora_rank"
        )
    for target in lora.targets:
        if target not in known:
            raise UserError(f"no linear layer '{target}' to adapt{nearest(target, known)}; known: {', '.join(known)}")
    for name, linear in _linear_layers(model):
        if name.rpartition(".")[2] in lora.targets and lora.rank > min(linear.in_features, linear.out_features):
            raise UserError(
                f"lora_rank {lora.rank} is above the smaller side of {name} ({linear.out_features} x "
                f"{linear.in_features}); give {min(linear.in_features, linear.out_features)} at most"
            )


def add_lora(model: LanguageModel, lora: LoraConfig) -> None:
    """Add a new adapter to a model, drawn from torch's global random state; nothing else is trainable afterwards.

    Raises:
        UserError: peft is not installed, or for the reasons of `check_lora`.
    """
    peft = _peft()
    check_lora(model, lora)
    holder = nn.Module()  # peft would read the model's config as one of transformers
    holder.layers = model.layers
    model.requires_grad_(False)
    peft.inject_adapter_in_model(_peft_config(lora), holder, adapter_name=_NAME)


def merge_lora(model: LanguageModel) -> None:
    """Add the adapter to the weights it belongs to and remove it; all weights are trainable afterwards."""
    layer = _peft().tuners.tuners_utils.BaseTunerLayer
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, layer):
                child.merge()
                setattr(module, name, child.get_base_layer())
    model.requires_grad_(True)


def saved_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what is saved of a model's state dict, by the names in files: the adapter if there is one, else all."""
    adapter = {_PREFIX + name.replace(f".{_NAME}.", "."): weights[name] for name in weights if ".lora_" in name}
    return adapter or dict(weights)


def state_names(model: LanguageModel) -> dict[str, str]:
    """Return the names in the state dict by the names in files, of what `saved_weights` saves."""
    state = model.state_dict()
    names = {id(tensor): name for name, tensor in state.items()}
    return {saved: names[id(tensor)] for saved, tensor in saved_weights(state).items()}


def peft_config_text(lora: LoraConfig) -> str:
    """Return the contents of peft's adapter_config.json; it names no base, whose checksum is in config.yaml.

    Raises:
        UserError: peft is not installed.
    """
    values = _peft_config(lora).to_dict()
    return json.dumps(values, indent=2, sort_keys=True, default=sorted) + "\n"  # peft has names in sets


def refuse_pickled_adapter(folder: Path) -> None:
    """Refuse the folder of an adapter that is stored as a pickle.

    Raises:
        UserError: it is.
    """
    if (folder / "adapter_model.bin").exists() and not (folder / ADAPTER_FILE).exists():
        raise UserError(f"{folder / 'adapter_model.bin'} is a pickle, which is never read; save it as {ADAPTER_FILE}")


def _peft() -> Any:
    """Import peft.

    Raises:
        UserError: it is not installed.
    """
    require_peft()
    with without_library_warnings():  # it imports transformers, which imports torchao
        import peft.tuners.tuners_utils
    return peft


def _linear_layers(model: LanguageModel) -> list[tuple[str, nn.Linear]]:
    modules = model.layers.named_modules()
    return [(f"layers.{name}", module) for name, module in modules if isinstance(module, nn.Linear)]


def _peft_config(lora: LoraConfig) -> Any:
    alpha = lora.alpha
    return _peft().LoraConfig(
        r=lora.rank,
        lora_alpha=int(alpha) if alpha.is_integer() else alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets),
        task_type="CAUSAL_LM",
    )
