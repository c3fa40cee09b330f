"""Conversion of weight matrices to the dtype of matrix products, so that autocast need not convert them each time."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn

from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.linear import Int8Linear

AnyModel = TypeVar("AnyModel", bound=LanguageModel)


def with_matrices_in(model: AnyModel, dtype: torch.dtype) -> AnyModel:
    """Return a copy of a model with the matrices of its linear layers in `dtype`, for inference under autocast to it.

    Autocast converts weights each time they are used, which for a few tokens takes longer than the products. Here they
    are converted once, with the same results. The copy shares all other parameters with the model, which is unchanged,
    and continues its memories. After a change of the weights, make another copy.
    """
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) and type(m) is not Int8Linear]
    matrices = {id(linear.weight): linear.weight for linear in linears}
    shared = {id(parameter): parameter for parameter in model.parameters()}
    converted = {key: nn.Parameter(matrix.detach().to(dtype), requires_grad=False) for key, matrix in matrices.items()}
    result = copy.deepcopy(model, {**shared, **converted})  # deepcopy's memo: it uses these objects instead of copies
    result.adopt_weights_version(model)
    return result
