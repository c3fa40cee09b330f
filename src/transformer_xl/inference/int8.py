"""Linear layers with 8-bit weights, by torchao: made of a model, and in a file.

In a file, such a weight of name `x` is the integers `x` (O, I) and the scales of its rows `x_scale` (O, 1).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from transformer_xl.config import UserError
from transformer_xl.config.extras import missing_extra
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.ops.linear import Int8Linear
from transformer_xl.progress import without_library_warnings
from transformer_xl.tensor_file import SCALE, load_tensors


def with_int8_weights(model: LanguageModel, stored: Mapping[str, Tensor] | None = None) -> LanguageModel:
    """Return a copy of a model for evaluation, whose linear layers have 8-bit weights, with a scale for each row.

    Args:
        model: the model.
        stored: all weights as `int8_tensors` returns them, or None to round those of the model.

    Raises:
        UserError: torchao is not installed.
    """
    if find_spec("torchao") is None:
        raise missing_extra("torchao", "torchao")
    with without_library_warnings():  # torchao warns of each of its libraries for other processors
        from torchao.quantization import Int8Tensor, Int8WeightOnlyConfig, quantize_
    result = copy.deepcopy(model).requires_grad_(False)
    for path, parent in list(result.named_modules()):
        for name, child in parent.named_children():
            if not isinstance(child, nn.Linear):
                continue
            plain = Int8Linear(child.in_features, child.out_features, bias=child.bias is not None, device="meta")
            plain.weight, plain.bias = child.weight, child.bias
            setattr(parent, name, plain)
            if stored is not None:
                key = f"{path}.{name}.weight".removeprefix(".")
                rows = [1, child.in_features]
                weight = Int8Tensor(stored[key], stored[key + SCALE], rows, child.weight.dtype)
                plain.weight = nn.Parameter(weight, requires_grad=False)
    if stored is None:
        quantize_(result, Int8WeightOnlyConfig())
    else:
        of_rows = {name.removesuffix(SCALE) for name in stored if name.endswith(SCALE)}
        others = {name: tensor for name, tensor in stored.items() if name.removesuffix(SCALE) not in of_rows}
        result.load_state_dict(others, strict=False)
    return result.eval()


def int8_tensors(model: LanguageModel) -> dict[str, Tensor]:
    """Return all weights as plain tensors: of 8-bit weights, the integers and the scales."""
    tensors = dict[str, Tensor]()
    for name, weight in model.state_dict().items():
        scales = getattr(weight, "scale", None)
        tensors |= {name: weight} if scales is None else {name: weight.qdata, name + SCALE: scales}
    return tensors


def load_int8(model: LanguageModel, file: Path) -> LanguageModel:
    """Return a copy of a model with the weights of a file, which has 8-bit ones.

    Raises:
        UserError: the file is damaged, its weights are of another model, or torchao is not installed.
    """
    tensors, _ = load_tensors(file)
    expected = {name: (tuple(weight.shape), weight.dtype) for name, weight in model.state_dict().items()}
    for name in [name.removesuffix(SCALE) for name in tensors if name.endswith(SCALE)]:
        shape = expected.get(name, ((0, 0), None))[0]
        expected |= {name: (shape, torch.int8), name + SCALE: ((shape[0], 1), torch.float32)}
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    if wrong := sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)):
        raise UserError(f"{file} does not fit the settings in config.yaml (at {wrong[0]}); copy the whole run again")
    return with_int8_weights(model, tensors)
