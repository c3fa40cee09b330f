"""Builds the optimizers and their parameter groups: the paper's Adam, AdamW, or Muon for the matrices of the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from transformer_xl.config import TrainConfig
from transformer_xl.device import has_bfloat16
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.training.distributed import full_tensor

# parameters of the Newton-Schulz iteration that orthogonalizes updates (Jordan et al. 2024)
_MUON_COEFFICIENTS, _MUON_ITERATIONS, _MUON_MIN_NORM = (3.4445, -4.7750, 2.0315), 5, 1e-7


def build_optimizers(model: LanguageModel, config: TrainConfig) -> tuple[torch.optim.Optimizer, ...]:
    """Build the optimizers of the settings; every parameter is in exactly one group of one optimizer.

    Weight decay applies to matrices only, including the embedding: not to LayerNorms, biases and the attention biases
    (the paper's u and v).
    Muon updates the matrices of the layers (query, key and value projections are separate matrices, as Muon
    requires), and AdamW all other parameters.
    """
    adam = {"lr": config.learning_rate, "betas": (config.beta1, config.beta2), "fused": True}
    if config.optimizer == "adam":
        return (torch.optim.Adam(model.parameters(), **adam),)
    layer_matrices = list(_matrices(model.layers.parameters())) if config.optimizer == "muon" else []
    rest = [parameter for parameter in model.parameters() if not any(parameter is matrix for matrix in layer_matrices)]
    groups = [
        {"params": list(_matrices(rest)), "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in rest if parameter.ndim != 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, **adam)
    return (Muon(layer_matrices, config), adamw) if layer_matrices else (adamw,)


def _matrices(parameters: Iterable[nn.Parameter]) -> Iterable[nn.Parameter]:
    return (parameter for parameter in parameters if parameter.ndim == 2)


class Muon(torch.optim.Optimizer):
    """Momentum SGD with nearly orthogonalized updates of matrices (Jordan et al. 2024).

    The results are those of `torch.optim.Muon` with Nesterov momentum and `match_rms_adamw` (Liu et al. 2025): at the
    same learning rate its updates are about as large as AdamW's, though its best learning rate may differ. torch's Muon
    updates the matrices one by one, always in bfloat16, which is a hundred times slower on processors without
    bfloat16 instructions. Here matrices of equal shape are stacked, in bfloat16 if the device supports it, else in
    float32. If weights are sharded over processes, each process gathers the full matrices and keeps its shard of the
    update.
    """

    def __init__(self, matrices: Iterable[nn.Parameter], config: TrainConfig) -> None:
        defaults = {"lr": config.learning_rate, "momentum": config.muon_momentum, "weight_decay": config.weight_decay}
        super().__init__(matrices, defaults)

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyrefly: ignore[bad-override]
        """Update every matrix that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            updated = [parameter for parameter in group["params"] if parameter.grad is not None]
            directions = self._directions(updated, group["momentum"])
            if group["weight_decay"]:
                torch._foreach_mul_(updated, 1 - group["lr"] * group["weight_decay"])
            stacks: dict[tuple[int, ...], list[tuple[nn.Parameter, Tensor]]] = {}
            for parameter, direction in zip(updated, directions, strict=True):
                # tall matrices are transposed, so that they can be stacked with wide ones
                wide = direction if direction.shape[0] <= direction.shape[1] else direction.mT
                stacks.setdefault(tuple(wide.shape), []).append((parameter, wide))
            for (_, num_columns), members in stacks.items():
                rate = 0.2 * num_columns**0.5 * group["lr"]  # makes the RMS of the updates that of AdamW, about 0.2
                steps = orthogonalize(torch.stack([wide for _, wide in members])).to(members[0][0].dtype)
                for (parameter, _), wide in zip(members, steps, strict=True):
                    update = wide if wide.shape == parameter.shape else wide.mT
                    parameter.add_(_shard_like(parameter, update), alpha=-rate)

    def _directions(self, parameters: list[nn.Parameter], momentum: float) -> list[Tensor]:
        """Return the Nesterov momentum of the gradients, gathered from all processes if they are sharded."""
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for parameter, grad in zip(parameters, grads, strict=True):
            state: dict[str, Any] = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(grad)
        means = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_lerp_(means, grads, 1 - momentum)
        return [full_tensor(direction) for direction in torch._foreach_lerp(grads, means, momentum)]


def orthogonalize(matrices: Tensor) -> Tensor:
    """Set all singular values of wide matrices, shape (count, rows, columns), to about 1.

    Uses five Newton-Schulz iterations with a polynomial of degree 5; the singular values of the result are between 0.7
    and 1.2, which is sufficient for Muon.
    """
    a, b, c = _MUON_COEFFICIENTS
    fast_dtype = torch.bfloat16 if has_bfloat16(matrices.device) else torch.float32
    x = matrices.to(torch.float64 if matrices.dtype == torch.float64 else fast_dtype)
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_MUON_MIN_NORM)
    for _ in range(_MUON_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _shard_like(like: Tensor, tensor: Tensor) -> Tensor:
    """Return this process's shard of `tensor`, sharded as `like` is; every process has the whole `tensor`."""
    if not hasattr(like, "to_local"):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor  # slow to import

    assert isinstance(like, DTensor)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
