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

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from typing_extensions import override

from transformer_xl.config import ShawConfig, UserError
from transformer_xl.model.attention import AttentionContext, Biases, Layer, RelativeAttention, make_final_norm
from transformer_xl.model.model_with_memory import WEIGHT_STD
from transformer_xl.model.relative import layer_biases
from transformer_xl.model.transformer_xl import RelativeLanguageModel


class ShawAttention(RelativeAttention):
    """Relative attention whose position keys are learned vectors."""

    def __init__(self, config: ShawConfig) -> None:
        super().__init__(config)
        assert config.max_relative_positions is not None
        self.distance_keys = nn.Parameter(torch.empty(config.max_relative_positions, *self.head_shape))

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

    def __init__(self, config: ShawConfig, *, memory_length: int = 128) -> None:
        """Build the model with initial weights drawn from torch's global random state.

        Raises:
            UserError: max_relative_positions is missing, or the attention kernel is unknown.
        """
        if config.max_relative_positions is None:
            raise UserError("shaw needs max_relative_positions, the number of distances with a vector; give a number")
        super().__init__(config, memory_length=memory_length)
        self.layers = nn.ModuleList(Layer(config, ShawAttention(config)) for _ in range(config.n_layers))
        self.final_norm = make_final_norm(config)
        # biases of zeros, neither trained nor saved
        self.register_buffer("zero_bias_1NH", torch.zeros(1, config.n_heads, config.head_dim), persistent=False)
        self.init_weights()

    @override
    def init_weights(self) -> None:
        super().init_weights()
        for module in self.modules():
            if isinstance(module, ShawAttention):
                nn.init.normal_(module.distance_keys, 0.0, WEIGHT_STD)
        nn.init.zeros_(self.get_buffer("zero_bias_1NH"))

    @override
    def biases(self) -> Iterator[Biases | None]:
        zero_1NH = self.get_buffer("zero_bias_1NH")
        return layer_biases(zero_1NH, zero_1NH, self.config.n_layers)
