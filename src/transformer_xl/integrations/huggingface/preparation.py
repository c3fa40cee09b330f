"""A model that was prepared for inference, for as long as its weights stay the same.

In transformers others change the weights: optimizers, adapters, `load_state_dict`. So nobody can be told to prepare the
model again; each cache keeps what it was begun with, and the weights are compared before it is continued.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from transformer_xl.inference import InferenceModel, prepare_inference
from transformer_xl.inference.fingerprint import Fingerprint
from transformer_xl.model.language_model import LanguageModel

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Preparation:
    """A prepared model, and the weights that it was made from."""

    inference: InferenceModel
    _fingerprint: Fingerprint

    @staticmethod
    def of(model: LanguageModel, dtype: Dtype) -> Preparation | None:
        """Prepare a model, or return None if its weights are elsewhere: sharded over processes, or not loaded.

        Args:
            model: the model, in evaluation mode.
            dtype: as for `prepare_inference`.
        """
        for parameter in model.parameters():
            if parameter.is_meta or hasattr(parameter.data, "placements"):  # a DTensor
                return None
        return Preparation(prepare_inference(model, dtype), Fingerprint(model))

    def is_current(self, model: LanguageModel) -> bool:
        """Return whether it is of this model as it is now."""
        return self._fingerprint.matches(model)


def preparable_dtype(model: LanguageModel) -> Dtype | None:
    """Return the dtype to prepare a model for, or None if its own modules are needed.

    They are in training mode, which has dropout, with torch.compile, and under autocast to float16.
    """
    if model.training or torch.compiler.is_compiling():
        return None
    if not torch.is_autocast_enabled(model.device.type):
        return "float32"
    return "bfloat16" if torch.get_autocast_dtype(model.device.type) == torch.bfloat16 else None
