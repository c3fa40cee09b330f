"""Transformer-XL's recurrence with the relative encoding of Shaw et al. 2018 in place of its own.

    score[i, j] = ( q_i . k_j + q_i . r[d] ) / sqrt(H)      r[d]: learned, for each layer, head and distance d up to
                                                            the farthest, which all farther ones share

Of Transformer-XL's four terms these are (a) and (b); there are no u and w, and no WkR: the learned vector stands where
WkR R[d] does, and all else is Transformer-XL, kernels and memories included. Memory 0 makes it the model without
recurrence. Where we differ from Shaw et al.: they add learned vectors to the values too.

Letters: B rows, P distances, N heads, H head width, D model width, F farthest: distances with a vector of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

from transformer_xl.config import ShawConfig, UserError
from transformer_xl.model.attention import Layer, RelativeAttention
from transformer_xl.model.memory import Memory
from transformer_xl.model.transformer_xl import TransformerXL

_WEIGHT_STD = 0.02


class ShawAttention(RelativeAttention):
    """Relative attention whose position keys are learned as they are."""

    def __init__(self, config: ShawConfig) -> None:
        super().__init__(config)
        assert config.max_relative_positions is not None
        del self.r_proj
        self.distance_keys = nn.Parameter(torch.empty(config.max_relative_positions, *self.head_shape))

    @override
    def project_positions(self, encoding_PD: Tensor) -> Tensor:
        """Position keys (P, N, H) of the distances P - 1, ..., 1, 0, farthest first; how they are encoded is ignored.

        Products of keys and queries go in one format, which autocast sets where it is on.
        """
        keys_PNH = self.distance_keys[: len(encoding_PD)].flip(0)
        kind = keys_PNH.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            keys_PNH = keys_PNH.to(torch.get_autocast_dtype(kind))
        return keys_PNH


class ShawTransformer(TransformerXL):
    """Transformer-XL with learned vectors for distances."""

    config_class = ShawConfig

    def __init__(self, config: ShawConfig, *, memory_length: int = 128) -> None:
        """Builds the model with first weights drawn from torch's global random state.

        Raises:
            UserError: the settings do not say how many distances have a vector, or name no known attention kernel.
        """
        if config.max_relative_positions is None:
            raise UserError("shaw needs max_relative_positions, the number of distances with a vector; give a number")
        super().__init__(config, memory_length=memory_length)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.attention = ShawAttention(config)
        # in place of u and w: zeros that nobody trains or keeps
        nothing_1NH = torch.zeros_like(self.content_bias[:1]).detach()
        del self.content_bias, self.position_bias
        self.register_buffer("content_bias", nothing_1NH, persistent=False)
        self.register_buffer("position_bias", nothing_1NH.clone(), persistent=False)
        self.init_weights()

    @override
    def init_weights(self) -> None:
        super().init_weights()
        for module in self.modules():
            if isinstance(module, ShawAttention):
                nn.init.normal_(module.distance_keys, 0.0, _WEIGHT_STD)
        for bias_1NH in self.buffers(recurse=False):
            nn.init.zeros_(bias_1NH)

    @override
    def _distances(self, memory: Memory, num_new: int) -> tuple[int, int]:
        seen, told_apart = super()._distances(memory, num_new)
        assert isinstance(self.config, ShawConfig)
        assert self.config.max_relative_positions is not None
        return seen, min(told_apart, self.config.max_relative_positions)
