"""The layers of Transformer-XL for continuous inputs: a backbone with memory, as in reinforcement learning.

    hidden_BTD, memory = backbone(inputs_BTD, memory, starts=starts_BT)

There is no embedding and no softmax. An episode may start at any of the T steps; no step attends to what was before the
start of its episode. By default the layers are those of GTrXL (Parisotto et al. 2019, arXiv 1910.06764).

Shape suffixes: B batch size, T new steps, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

from transformer_xl.config import BackboneConfig, UserError, check_type
from transformer_xl.model.attention import RelativeAttention
from transformer_xl.model.gate import GRUGate
from transformer_xl.model.memory import ContextLimits, Memory, last_starts
from transformer_xl.model.model_with_memory import init_weights
from transformer_xl.model.relative import RelativeModel
from transformer_xl.model.transformer_xl import run_layers
from transformer_xl.ops.dropout import FastDropout


class Backbone(RelativeModel):
    """An input projection if the inputs have a width of their own, and L layers with memory."""

    config: BackboneConfig  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, config: BackboneConfig, *, memory_length: int = 128) -> None:
        """Build the backbone with initial weights drawn from torch's global random state.

        Those of the input projection are as in torch's Linear.

        Args:
            config: settings of the layers.
            memory_length: M, the default number of memory slots of `initial_memory`.

        Raises:
            UserError: these are no settings of a backbone, or the attention kernel is unknown.
        """
        super().__init__()
        check_type(config, BackboneConfig, "config", "give the settings of the backbone, such as BackboneConfig()")
        self.config = config
        self.context_limits = ContextLimits(memory_length, config.attention_window, config.clamp_length)
        self.input_dropout = FastDropout(config.dropout, variational=config.regularization.variational_dropout)
        self.input_proj = nn.Identity() if config.d_input is None else nn.Linear(config.d_input, config.d_model)
        self.make_layers(RelativeAttention)
        self.init_weights()

    def init_weights(self) -> None:
        """Draw initial weights: normal with a variance of 1 / input width; the rest as in the language models.

        Their fixed standard deviation of 0.02 fits widths of some hundreds. In a narrow layer all attention scores
        would begin near 0, and one step among many would hardly be seen.
        """
        init_weights(self.final_norm)
        for name, module in self.layers.named_modules():
            init_weights(module)
            if isinstance(module, nn.Linear) and ".gate." not in name:  # gates begin with their biases
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if isinstance(module, GRUGate):
                nn.init.constant_(module.bias, module.initial_bias)
        self.init_biases()
        if isinstance(self.input_proj, nn.Linear):
            self.input_proj.reset_parameters()

    @override
    def forward(
        self, inputs: Tensor, memory: Memory | None = None, *, starts: Tensor | None = None
    ) -> tuple[Tensor, Memory]:
        """Process T steps of each batch row, which continue the steps in `memory`.

        A window of T steps and T single steps give the same results, up to rounding, if a query attends to the same
        keys in both: with an attention_window of memory_length + 1 at most, and with the same weights.

        Args:
            inputs: the inputs (B, T, d_input), of width d_input (d_model if that is None).
            memory: the memory of earlier steps, or None if there are none. It is not changed.
            starts: whether each step is the first of an episode (B, T), bool. What was before the last start is neither
                attended nor valid in the next memory. None: all steps continue those before them.

        Returns:
            hidden states (B, T, D), and the memory to pass in with the next steps of the same batch rows.

        Raises:
            UserError: a shape or dtype is wrong, or the memory is of another batch size, backbone or weights.
        """
        x_BTD, memory = self.embed(inputs, memory)
        self._check_starts(starts, inputs)
        states_BTD, memory = self.run_layers(x_BTD, memory, starts)
        return states_BTD[-1], memory

    def embed(self, inputs_BTD: Tensor, memory: Memory | None = None) -> tuple[Tensor, Memory]:
        """Return the projected inputs (B, T, D), and the memory, or an empty one if it is None.

        Raises:
            UserError: the shape of the inputs is wrong, or the memory is of another batch size, backbone or weights.
        """
        check_type(inputs_BTD, Tensor, "inputs", "give a tensor of shape (batch, steps, d_input)")
        width = self.config.d_input or self.config.d_model
        if inputs_BTD.ndim != 3 or inputs_BTD.shape[-1] != width or not inputs_BTD.shape[1]:
            actual = f"inputs of shape {tuple(inputs_BTD.shape)}"
            raise UserError(f"{actual}; expected (batch, steps, {width}), with one step or more")
        self.check_dtype(inputs_BTD)
        memory = self.check_memory(memory, len(inputs_BTD))
        return self.input_proj(inputs_BTD), memory

    def run_layers(self, x_BTD: Tensor, memory: Memory, starts_BT: Tensor | None = None) -> tuple[list[Tensor], Memory]:
        """Return the inputs of all layers and the last hidden states, and the next memory."""
        return run_layers(self, x_BTD, memory, last_start_BT=None if starts_BT is None else last_starts(starts_BT))

    @property
    @override
    def like(self) -> Tensor:
        norm = self.layers[0].get_submodule("feed_forward.norm")
        assert isinstance(norm, nn.LayerNorm)
        return norm.weight

    def _check_starts(self, starts_BT: Tensor | None, inputs_BTD: Tensor) -> None:
        check_type(starts_BT, (Tensor, type(None)), "starts", "give a tensor with true where an episode starts")
        if starts_BT is None:
            return
        if starts_BT.dtype != torch.bool:
            raise UserError(f"starts has dtype {starts_BT.dtype}; give torch.bool, true where an episode starts")
        if starts_BT.shape != inputs_BTD.shape[:2]:
            raise UserError(
                f"starts of shape {tuple(starts_BT.shape)} for inputs of shape {tuple(inputs_BTD.shape)}; "
                f"expected {tuple(inputs_BTD.shape[:2])}, one for each step"
            )
