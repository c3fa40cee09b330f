"""Transformer-XL's recurrence with the relative encoding of Shaw et al. 2018 in place of its own.

    score[i, j] = ( q_i . k_j + q_i . r[d] ) / sqrt(H)      r[d]: learned, for each layer, head and distance d up to
                                                            the largest, which all larger ones share

Of Transformer-XL's four terms these are (a) and (b); there are no content and position biases, and no r_proj: the
learned vector takes the place of W_{k,R} R[d]. All else is Transformer-XL, kernels and memories included. With
memory_length 0 it is the model without recurrence. Where we differ from Shaw et al.: they add learned vectors to the
values too.

Letters: P distances, N heads, H head width, D model width.
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
    """Relative attention whose position keys are learned vectors."""

    def __init__(self, config: ShawConfig) -> None:
        super().__init__(config)
        assert config.max_relative_positions is not None
        del self.r_proj
        self.distance_keys = nn.Parameter(torch.empty(config.max_relative_positions, *self.head_shape))

    @override
    def project_positions(self, encoding_PD: Tensor) -> Tensor:
        """Return the position keys (P, N, H) of the distances P - 1, ..., 1, 0; of their encodings only P is used.

        Under autocast they have its dtype, as the queries have that they are multiplied with.
        """
        keys_PNH = self.distance_keys[: len(encoding_PD)].flip(0)
        kind = keys_PNH.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            keys_PNH = keys_PNH.to(torch.get_autocast_dtype(kind))
        return keys_PNH


class ShawTransformer(TransformerXL):
    """Transformer-XL with a learned vector for each distance."""

    config_class = ShawConfig

    def __init__(self, config: ShawConfig, *, memory_length: int = 128) -> None:
        """Builds the model with initial weights drawn from torch's global random state.

        Raises:
            UserError: the settings do not say how many distances have a vector, or name no known attention kernel.
        """
        if config.max_relative_positions is None:
            raise UserError("shaw needs max_relative_positions, the number of distances with a vector; give a number")
        super().__init__(config, memory_length=memory_length)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.attention = ShawAttention(config)
        # in place of the biases: zeros that are neither trained nor saved
        zeros_1NH = torch.zeros_like(self.content_bias[:1]).detach()
        del self.content_bias, self.position_bias
        self.register_buffer("content_bias", zeros_1NH, persistent=False)
        self.register_buffer("position_bias", zeros_1NH.clone(), persistent=False)
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
    def _num_distances(self, memory: Memory, num_new: int) -> tuple[int, int]:
        num_seen, num_encoded = super()._num_distances(memory, num_new)
        assert isinstance(self.config, ShawConfig)
        assert self.config.max_relative_positions is not None
        return num_seen, min(num_encoded, self.config.max_relative_positions)
