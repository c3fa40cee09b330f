"""What joins a residual branch with its input in a backbone (Parisotto et al. 2019, sections 3.2 and 3.3).

Language models add the result of a branch to its input. TrXL-I applies ReLU to it first, and GTrXL replaces the sum by
a gate like that of a GRU, with the input x of the branch as its state and the result y as its input:

    r = sigmoid(W_r y + U_r x)
    z = sigmoid(W_z y + U_z x - b_g)        with a large b_g, the layer is nearly the identity at first
    h = tanh(W_g y + U_g (r * x))
    out = (1 - z) * x + z * h

Shape suffixes: B batch size, T new tokens, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

from transformer_xl.config import LayerConfig
from transformer_xl.ops.linear import PackedLinear


class GRUGate(nn.Module):
    """The GRU-type gate of GTrXL."""

    def __init__(self, d_model: int, bias: float) -> None:
        """Args: D, and the initial value of all elements of b_g."""
        super().__init__()
        self.initial_bias = bias
        self.y_proj = PackedLinear(d_model, 3 * d_model, bias=False)  # W_r, W_z, W_g
        self.x_proj = PackedLinear(d_model, 2 * d_model, bias=False)  # U_r, U_z
        self.reset_proj = PackedLinear(d_model, d_model, bias=False)  # U_g
        self.bias = nn.Parameter(torch.full((d_model,), bias))  # b_g

    @override
    def forward(self, x_BTD: Tensor, y_BTD: Tensor) -> Tensor:
        """Return what the gate passes on of a branch's input x and its result y, (B, T, D)."""
        y_reset_BTD, y_update_BTD, y_state_BTD = self.y_proj(y_BTD).chunk(3, dim=-1)
        x_reset_BTD, x_update_BTD = self.x_proj(x_BTD).chunk(2, dim=-1)
        reset_BTD = torch.sigmoid(y_reset_BTD + x_reset_BTD)
        update_BTD = torch.sigmoid(y_update_BTD + x_update_BTD - self.bias)
        state_BTD = torch.tanh(y_state_BTD + self.reset_proj(reset_BTD * x_BTD))
        return torch.lerp(x_BTD, state_BTD.to(x_BTD.dtype), update_BTD.to(x_BTD.dtype))


def make_gate(config: LayerConfig) -> GRUGate | None:
    """Return the gate of a residual branch, or None if its result is added to its input."""
    return None if config.gru_gate_bias is None else GRUGate(config.d_model, config.gru_gate_bias)
