"""Linear layers with 8-bit weights, by torchao."""

from __future__ import annotations

import copy
from dataclasses import replace
from importlib.util import find_spec

from torch import nn

from transformer_xl.config import UserError
from transformer_xl.config.extras import missing_extra
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.ops.linear import Int8Linear
from transformer_xl.progress import without_library_warnings
from transformer_xl.run import Run, check_run


def to_int8(run: Run) -> Run:
    """Return a run whose linear layers have 8-bit weights, with a scale for each row; the given run is unchanged.

    The copy is for inference. Embedding and softmax stay as they are. The copy cannot be saved as a run.

    Raises:
        UserError: torchao is not installed, the weights have 8 bits already, or the model is one of nn.LSTM, which has
            no such layers.
    """
    check_run(run)
    run.model.check_plain("quantized")
    if run.config.model.architecture == "lstm":
        raise UserError(
            "the weights of an lstm stay in float32, as torchao has no 8-bit LSTM; take another architecture"
        )
    if find_spec("torchao") is None:
        raise missing_extra("torchao", "torchao")
    return replace(run, model=with_int8_weights(run.model))


def with_int8_weights(model: LanguageModel) -> LanguageModel:
    """Return a copy of a model for evaluation, whose linear layers have 8-bit weights, with a scale for each row."""
    with without_library_warnings():  # torchao warns of each of its libraries for other processors
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    result = copy.deepcopy(model)
    for parent in list(result.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                plain = Int8Linear(child.in_features, child.out_features, bias=child.bias is not None, device="meta")
                plain.weight, plain.bias = child.weight, child.bias
                setattr(parent, name, plain)
    quantize_(result.requires_grad_(False), Int8WeightOnlyConfig())
    return result.eval()
