"""Transformer-XL's recurrence with the relative position encoding of Shaw et al. 2018.

    score[i, j] = ( q_i . k_j + q_i . r[d] ) / sqrt(H)      r[d]: a learned vector for each layer, head and distance d;
                                                            distances above the largest share its vector

Of Transformer-XL's four attention terms these are (a), content, and (b), position; there are no content and position
biases and no r_proj, because the learned vector replaces the projected encoding W_{k,R} R[d]. Everything else is that
of Transformer-XL, kernels and memories included; with memory_length 0 it has no recurrence, as in Shaw et al. Where we
differ from Shaw et al.: they also add learned vectors to the values.

Shape suffixes: P distances, N heads, H head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

from transformer_xl.config import RelativeLayerConfig, ShawConfig, UserError
from transformer_xl.model.attention import AttentionContext, RelativeAttention
from transformer_xl.model.model_with_memory import WEIGHT_STD
from transformer_xl.model.transformer_xl import RelativeLanguageModel


class ShawAttention(RelativeAttention):
    """Relative attention whose position keys are learned vectors."""

    def __init__(self, config: RelativeLayerConfig) -> None:
        super().__init__(config)
        if config.max_vectors is None:
            raise UserError("shaw needs max_relative_positions, the number of distances with a vector; give a number")
        self.distance_keys = nn.Parameter(torch.empty(config.max_vectors, *self.head_shape))

    @override
    def position_keys(self, context: AttentionContext) -> Tensor:
        """Return the position keys (P, N, H) of the distances P - 1, ..., 1, 0.

        Under autocast the keys have its dtype, like the queries that they are multiplied with.
        """
        keys_PNH = self.distance_keys[: context.num_distances].flip(0)
        device_type = keys_PNH.device.type
        if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
            keys_PNH = keys_PNH.to(torch.get_autocast_dtype(device_type))
        return keys_PNH


class ShawTransformer(RelativeLanguageModel):
    """Transformer-XL with a learned vector for each distance, and without content and position biases."""

    config_class = ShawConfig
    attention_class = ShawAttention

    @override
    def init_weights(self) -> None:
        super().init_weights()
        for module in self.modules():
            if isinstance(module, ShawAttention):
                nn.init.normal_(module.distance_keys, 0.0, WEIGHT_STD)
