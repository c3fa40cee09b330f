"""A linear layer that is also fast for a single token.

With few input rows, the time of a matrix product is that of reading the weights. On a CPU, torch's product of a row and
a matrix reaches about two thirds of the memory bandwidth. Computed as a batch of products, one for each thread with its
part of the weights, it comes close to the full bandwidth.

Shape suffixes: X rows, I input width, O output width (of one part if Y precedes it), Y parts of the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

_MAX_ROWS = 32  # maximum number of rows for which weights are read in parts


class FewRowsLinear(nn.Linear):
    """torch's Linear, except for few rows on a CPU without gradients, where each thread reads a part of the weights."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Return (..., O) for an input of shape (..., I)."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not self._few_rows(input):
            return super().forward(input)
        num_parts = torch.get_num_threads()
        if num_parts == 1 or self.out_features % num_parts:
            return super().forward(input)
        x_XI = input.reshape(-1, self.in_features)
        weight_YIO = self.weight.view(num_parts, -1, self.in_features).mT
        out_YXO = torch.bmm(x_XI.expand(num_parts, -1, -1), weight_YIO)
        out = out_YXO.transpose(0, 1).reshape(*input.shape[:-1], self.out_features)
        return out if self.bias is None else out.add_(self.bias)

    def _few_rows(self, input: Tensor) -> bool:
        return (
            0 < input.numel() <= _MAX_ROWS * self.in_features
            and input.device.type == "cpu"
            and input.dtype == self.weight.dtype in (torch.float32, torch.float64)
            and not torch.is_autocast_enabled("cpu")
        )
