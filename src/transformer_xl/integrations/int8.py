"""Linear layers with 8-bit weights, by torchao."""

from __future__ import annotations

from dataclasses import replace

from transformer_xl.config import UserError
from transformer_xl.inference.int8 import with_int8_weights
from transformer_xl.run import Run, check_run


def to_int8(run: Run) -> Run:
    """Return a run whose linear layers have 8-bit weights, with a scale for each row; the given run is unchanged.

    The copy is for inference. Embedding and softmax stay as they are. `save` writes it as a run folder, which `load`
    opens with the same weights.

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
    return replace(run, model=with_int8_weights(run.model))
