"""Weights in the number format in which they are multiplied, so that it need not be changed with every product."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn

AnyModel = TypeVar("AnyModel", bound=nn.Module)


def with_matrices_in(model: AnyModel, dtype: torch.dtype) -> AnyModel:
    """The model with the matrices of its linear maps in another dtype, for inference under autocast to that dtype.

    Autocast rounds weights to the dtype each time they are used, which for a few tokens takes longer than the products.
    Here that is done once; the numbers are the same. All other parameters are shared with the given model, which stays
    as it is.
    """
    matrices = {id(module.weight): module.weight for module in model.modules() if isinstance(module, nn.Linear)}
    kept = {id(parameter): parameter for parameter in model.parameters()}
    rounded = {name: nn.Parameter(matrix.detach().to(dtype), requires_grad=False) for name, matrix in matrices.items()}
    return copy.deepcopy(model, {**kept, **rounded})
