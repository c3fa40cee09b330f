"""Transformers with absolute positions, which keep nothing of earlier segments.

Vaswani et al. 2017: sinusoids of the position are added to the embedding. Al-Rfou et al. 2018: each layer has a learned
vector for every position, which is added to its input.

    x = x + position vectors     a = softmax(q k^T / sqrt(H), causal) v     then as Transformer-XL's layer

So a token is predicted from the tokens of its own segment at most. To give each as much context as fits, a window
slides over the text token by token, and all of it is computed again.

Auxiliary losses (Al-Rfou et al. 2018, in training only): every layer predicts the next token with a linear layer of
its own, the l-th of L until l / (2 L) of training is done; and each position also predicts the token after the next, at
half the weight. Where we differ: until then a layer's loss counts in full (the paper leaves the weight open).

Letters: B batch rows, T tokens of a segment, P tokens read again, M memory slots, D model width, N heads, H head width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from transformer_xl.config import AbsoluteConfig, AlRfouConfig, UserError
from transformer_xl.model.attention import FeedForward, encode_distances, make_final_norm
from transformer_xl.model.baselines.token_memory import TokenMemory
from transformer_xl.model.cross_entropy import linear_cross_entropy
from transformer_xl.model.dropout import FastDropout
from transformer_xl.model.memory import ContextLimits, HiddenMemory, Memory
from transformer_xl.model.token_model import WEIGHT_STD, TokenModel

_SECOND_TARGET_WEIGHT = 0.5


class SelfAttention(nn.Module):
    """Multi-head attention of a segment over itself, with its residual sum."""

    def __init__(self, config: AbsoluteConfig) -> None:
        super().__init__()
        inner = config.n_heads * config.head_dim
        self.head_shape = (config.n_heads, config.head_dim)
        self.norm_first, self.attention_dropout = config.norm_first, config.attention_dropout
        self.q_proj = nn.Linear(config.d_model, inner, bias=False)
        self.k_proj = nn.Linear(config.d_model, inner, bias=False)
        self.v_proj = nn.Linear(config.d_model, inner, bias=False)
        self.o_proj = nn.Linear(inner, config.d_model, bias=False)
        self.norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.dropout = FastDropout(config.dropout)

    @override
    def forward(self, x_BTD: Tensor, mask_B1TT: Tensor | None) -> Tensor:
        """Attend within the segment.

        Args:
            x_BTD: the layer's input.
            mask_B1TT: which position attends to which (bool, B or 1); none: each to itself and all before it.

        Returns:
            the sum of input and attention, (B, T, D).
        """
        new_BTD = self.norm(x_BTD) if self.norm_first else x_BTD
        q_BNTH, k_BNTH, v_BNTH = (
            projection(new_BTD).unflatten(-1, self.head_shape).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out_BNTH = F.scaled_dot_product_attention(
            q_BNTH,
            k_BNTH,
            v_BNTH,
            attn_mask=mask_B1TT,
            dropout_p=self.attention_dropout if self.training else 0.0,
            is_causal=mask_B1TT is None,
        )
        sum_BTD = x_BTD + self.dropout(self.o_proj(out_BNTH.transpose(1, 2).flatten(-2)))
        return sum_BTD if self.norm_first else self.norm(sum_BTD)


class AbsoluteLayer(nn.Module):
    """Self-attention, then feed-forward."""

    def __init__(self, config: AbsoluteConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.feed_forward = FeedForward(config)

    @override
    def forward(self, x_BTD: Tensor, mask_B1TT: Tensor | None) -> Tensor:
        """Return the next layer's input (B, T, D); arguments as for `SelfAttention`."""
        return self.feed_forward(self.attention(x_BTD, mask_B1TT))


class AbsoluteTransformer(TokenModel):
    """Embedding, layers with absolute positions, softmax."""

    config: AbsoluteConfig  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, config: AbsoluteConfig, *, memory_length: int = 0) -> None:
        """Builds the model with initial weights drawn from torch's global random state.

        Raises:
            UserError: the positions are learned and max_position_embeddings is none, or a memory is asked for.
        """
        super().__init__(config, memory_length=memory_length)
        config.check_context_limits(memory_length=memory_length)
        self.position_embeddings: nn.Parameter | None = None
        if isinstance(config, AlRfouConfig):
            longest = config.max_position_embeddings
            if longest is None:
                raise UserError("al-rfou needs max_position_embeddings, the longest segment; give a number")
            self.position_embeddings = nn.Parameter(torch.empty(config.n_layers, longest, config.d_model))
        self.layers = nn.ModuleList(AbsoluteLayer(config) for _ in range(config.n_layers))
        self.final_norm = make_final_norm(config)
        intermediate = range(1, config.n_layers) if config.intermediate_layer_losses else ()
        two_targets = [*intermediate, config.n_layers] if config.num_targets > 1 else []
        self.next_heads = nn.ModuleDict({str(layer): _head(config) for layer in intermediate})
        self.second_heads = nn.ModuleDict({str(layer): _head(config) for layer in two_targets})
        self.init_weights()

    @override
    def init_weights(self) -> None:
        super().init_weights()
        if self.position_embeddings is not None:
            nn.init.normal_(self.position_embeddings, 0.0, WEIGHT_STD)

    @override
    def initial_memory(self, batch_size: int, context_limits: ContextLimits | None = None) -> HiddenMemory:
        """Return a memory that holds nothing and counts what was read.

        Raises:
            UserError: a memory length or a clamp length is given.
        """
        limits, device = self.check_limits(context_limits), next(self.layers.parameters()).device
        return HiddenMemory.of_layers((), batch_size, limits, device)

    @override
    def generation_memory(
        self, batch_size: int, context_limits: ContextLimits | None = None, *, segment_length: int
    ) -> TokenMemory:
        limits, device = self.check_limits(context_limits), next(self.layers.parameters()).device
        segment_length = min(segment_length, self.config.limit("max_position_embeddings") or segment_length)
        return TokenMemory.empty(batch_size, ContextLimits(segment_length - 1, limits.attention_window), device)

    @override
    def forward(
        self,
        tokens_BT: Tensor | None = None,
        memory: Memory | None = None,
        *,
        inputs_BTD: Tensor | None = None,
        lengths_B: Tensor | None = None,
    ) -> tuple[Tensor, Memory]:
        """Read a segment of T tokens, each batch row's first at position 0 (see `LanguageModel.forward`).

        With a `TokenMemory`, its tokens come before the new ones as far as a segment goes.

        Raises:
            UserError: not exactly one kind of input, a wrong shape, a segment longer than the learned positions, or a
                memory of another batch or model.
        """
        if isinstance(memory, TokenMemory):
            return self._read_again(tokens_BT, memory, lengths_B)
        x_BTD = self.embed_inputs(tokens_BT, inputs_BTD)
        memory = self.check_memory(memory, x_BTD, lengths_B)
        *_, last_BTD = self._layer_outputs(x_BTD, memory, lengths_B)
        return self._final(last_BTD), memory.advance((), x_BTD.shape[1], lengths_B)

    @override
    def training_losses(
        self, tokens_BT: Tensor, targets_BT: Tensor, memory: Memory, *, progress: float
    ) -> tuple[Tensor, Tensor, Memory]:
        x_BTD = self.embed_inputs(tokens_BT, None)
        memory = self.check_memory(memory, x_BTD, None)
        outputs_BTD = list(self._layer_outputs(x_BTD, memory, None))
        last_BTD = self._final(outputs_BTD[-1])
        nats_BT = self.nats(last_BTD, targets_BT)
        extra_BT, num_layers = torch.zeros_like(nats_BT), len(outputs_BTD)
        targets_BT = targets_BT.to(x_BTD.device)
        for number, output_BTD in enumerate(outputs_BTD, start=1):
            # a layer whose losses have stopped computes them of an empty batch: gradients of zeros, not none
            predicts = number == num_layers or progress < number / (2 * num_layers)
            hidden_BTD = last_BTD if number == num_layers else self._final(output_BTD)
            hidden_BTD = hidden_BTD if predicts else hidden_BTD[:0]
            if str(number) in self.next_heads:
                extra_BT = extra_BT + _loss(self.next_heads[str(number)], hidden_BTD, targets_BT, ahead=0)
            if str(number) in self.second_heads:
                second_BT = _loss(self.second_heads[str(number)], hidden_BTD, targets_BT, ahead=1)
                extra_BT = extra_BT + _SECOND_TARGET_WEIGHT * second_BT
        return nats_BT, extra_BT, memory.advance((), x_BTD.shape[1])

    @override
    def check_memory(self, memory: Memory | None, x_BTD: Tensor, lengths_B: Tensor | None) -> HiddenMemory:
        memory = super().check_memory(memory, x_BTD, lengths_B)
        if not isinstance(memory, HiddenMemory) or memory.layers or memory.length:
            raise UserError(f"{self.config.architecture} has no memory; start with initial_memory")
        return memory

    def _read_again(
        self, tokens_BT: Tensor | None, memory: TokenMemory, lengths_B: Tensor | None
    ) -> tuple[Tensor, TokenMemory]:
        if tokens_BT is None or tokens_BT.ndim != 2 or len(tokens_BT) != memory.batch_size:
            given = "no tokens" if tokens_BT is None else f"tokens of shape {tuple(tokens_BT.shape)}"
            raise UserError(f"{given} for a memory of batch size {memory.batch_size}; give tokens of the same batch")
        parts_BTD: list[Tensor] = []
        empty = self.initial_memory(len(tokens_BT), ContextLimits(0, memory.context_limits.attention_window))
        num_left = tokens_BT.shape[1]
        for part_BT in tokens_BT.split(memory.length + 1, dim=1):
            num_left -= part_BT.shape[1]
            # padding comes first, so the last parts of a batch row are without it
            part_B = None if lengths_B is None else (lengths_B - num_left).clamp(0, part_BT.shape[1])
            segment_BP, own_B, memory = memory.append(part_BT, part_B)
            hidden_BPD, _ = self(segment_BP, empty, lengths_B=own_B)
            parts_BTD.append(hidden_BPD[:, -part_BT.shape[1] :])
        return torch.cat(parts_BTD, dim=1), memory

    def _final(self, x_BTD: Tensor) -> Tensor:
        return self.dropout(self.final_norm(x_BTD))

    def _layer_outputs(self, x_BTD: Tensor, memory: Memory, lengths_B: Tensor | None) -> Iterator[Tensor]:
        """The output (B, T, D) of one layer after the other."""
        num_new, width = x_BTD.shape[1:]
        self.config.check_context_limits(segment_length=num_new)
        index_T = torch.arange(num_new, device=x_BTD.device)
        position_BT = index_T[None] if lengths_B is None else index_T - (num_new - lengths_B)[:, None]
        known_BT = position_BT.clamp(min=0)  # padding has negative positions
        if self.position_embeddings is None:
            sinusoids_TD = encode_distances(num_new, width, like=x_BTD).flip(0)  # it counts down
            x_BTD = x_BTD + sinusoids_TD.to(x_BTD.dtype)[known_BT]
        x_BTD = self.dropout(x_BTD)
        mask_B1TT = _attention_mask(position_BT, memory.context_limits.attention_window, padded=lengths_B is not None)
        for index, layer in enumerate(self.layers):
            if self.position_embeddings is not None:
                x_BTD = x_BTD + self.position_embeddings[index, :num_new].to(x_BTD.dtype)[known_BT]
            x_BTD = self.run_layer(layer, x_BTD, mask_B1TT)
            yield x_BTD


def _attention_mask(position_BT: Tensor, window: int | None, *, padded: bool) -> Tensor | None:
    """Which position attends to which, as bool (B or 1, 1, T, T); none: plain causal. Padding attends to itself."""
    if window is None and not padded:
        return None
    distance_BTT = position_BT[:, :, None] - position_BT[:, None, :]
    attended_BTT = (distance_BTT >= 0) & (position_BT >= 0)[:, None, :]
    if window is not None:
        attended_BTT = attended_BTT & (distance_BTT < window)
    return (attended_BTT | (distance_BTT == 0))[:, None]


def _head(config: AbsoluteConfig) -> nn.Linear:
    return nn.Linear(config.d_model, config.vocab_size)


def _loss(head: nn.Module, hidden_BTD: Tensor, targets_BT: Tensor, *, ahead: int) -> Tensor:
    """Nats of predicting the token `ahead` positions after the next, at the position where it is the target: (B, T).

    The first `ahead` positions have 0. Of an empty batch the loss is a zero with gradients.
    """
    assert isinstance(head, nn.Linear)
    wanted_BT = targets_BT[: len(hidden_BTD), ahead:]
    hidden_BTD = hidden_BTD[:, : hidden_BTD.shape[1] - ahead]
    nats = linear_cross_entropy(hidden_BTD.flatten(0, 1), head.weight, head.bias, wanted_BT.flatten())
    nats_BT = F.pad(nats.view(wanted_BT.shape), (ahead, 0))
    return nats_BT if len(hidden_BTD) else nats_BT.sum()
