"""Transformers with absolute positions, which have no memory of earlier segments.

Vaswani et al. 2017: sinusoids of the position are added to the embedding. Al-Rfou et al. 2018: each layer has a learned
vector for every position, which is added to the layer's input.

    x = x + position vectors     a = softmax(q k^T / sqrt(H), causal) v     then as in Transformer-XL's layer

A token is predicted from the earlier tokens of its own segment only. To give each token the longest context that fits a
segment, generation slides a window over the text token by token and recomputes all of it (`token_memory.py`).

Auxiliary losses (Al-Rfou et al. 2018, in training only): each layer below the last predicts the next token with its own
linear layer; the loss of layer l of L is used until the fraction l / (2 L) of training. Also, each position predicts
the token after the next with another linear layer, at half the weight. Where we differ: the loss of a layer below the
last has weight 1 (the paper does not state the weight).

Shape suffixes: B batch size, T tokens of a segment, M cached tokens, P = M + 1 tokens of a recomputed segment, D model
width, N heads, H head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from transformer_xl.baselines.token_memory import TokenCache, TokenMemory
from transformer_xl.config import AbsoluteConfig, UserError
from transformer_xl.model.attention import FeedForward, encode_distances, make_final_norm
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import ContextLimits, HiddenMemory, Memory
from transformer_xl.model.model_with_memory import WEIGHT_STD
from transformer_xl.model.token_ids import TokenIds, as_token_ids
from transformer_xl.ops.cross_entropy import linear_cross_entropy
from transformer_xl.ops.dropout import FastDropout

_SECOND_TARGET_WEIGHT = 0.5  # of the loss of predicting the token after the next


class SelfAttention(nn.Module):
    """Multi-head attention within a segment, with the residual connection."""

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
        self.dropout = FastDropout(config.dropout, variational=config.regularization.variational_dropout)

    @override
    def forward(self, x_BTD: Tensor, mask_B1TT: Tensor | None) -> Tensor:
        """Attend within the segment.

        Args:
            x_BTD: the layer's input.
            mask_B1TT: whether a position attends to another (bool, the first dimension B or 1), or None if each
                attends to itself and all before it.

        Returns:
            the sum of input and attention, (B, T, D).
        """
        new_BTD = self.norm(x_BTD) if self.norm_first else x_BTD
        q_BNTH, k_BNTH, v_BNTH = (
            projection(new_BTD).unflatten(-1, self.head_shape).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        dropout = self.attention_dropout if self.training else 0.0
        attended_BNTH = F.scaled_dot_product_attention(
            q_BNTH, k_BNTH, v_BNTH, attn_mask=mask_B1TT, dropout_p=dropout, is_causal=mask_B1TT is None
        )
        sum_BTD = x_BTD + self.dropout(self.o_proj(attended_BNTH.transpose(1, 2).flatten(-2)))
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


class AbsoluteTransformer(LanguageModel):
    """Token embedding times sqrt(D), layers with absolute positions, softmax."""

    config: AbsoluteConfig  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, config: AbsoluteConfig, *, memory_length: int = 0) -> None:
        """Build the model with initial weights drawn from torch's global random state.

        Raises:
            UserError: max_position_embeddings is missing for learned positions, or memory_length is not 0.
        """
        super().__init__(config, memory_length=memory_length)
        config.check_context_limits(memory_length=memory_length)
        self.cache_shapes = {}
        self.position_embeddings: nn.Parameter | None = None
        if config.learns_positions:
            num_positions = config.limit("max_position_embeddings")
            if num_positions is None:
                raise UserError("al-rfou needs max_position_embeddings; give the longest segment length in tokens")
            self.position_embeddings = nn.Parameter(torch.empty(config.n_layers, num_positions, config.d_model))
        self.layers = nn.ModuleList(AbsoluteLayer(config) for _ in range(config.n_layers))
        self.final_norm = make_final_norm(config)
        intermediate = range(1, config.n_layers) if config.intermediate_layer_losses else ()
        second_target_layers = [*intermediate, config.n_layers] if config.num_targets > 1 else []
        sizes = config.d_model, config.vocab_size
        # linear layers of the auxiliary losses, by the number of the layer whose output they use (1 to L): they predict
        # the next token, and the token after the next
        self.next_heads = nn.ModuleDict({str(layer): nn.Linear(*sizes) for layer in intermediate})
        self.second_heads = nn.ModuleDict({str(layer): nn.Linear(*sizes) for layer in second_target_layers})
        self.init_weights()

    @override
    def init_weights(self) -> None:
        super().init_weights()
        if self.position_embeddings is not None:
            nn.init.normal_(self.position_embeddings, 0.0, WEIGHT_STD)

    @override
    def initial_memory(self, batch_size: int, context_limits: ContextLimits | None = None) -> HiddenMemory:
        """Return a memory without caches, which only counts the tokens.

        Raises:
            UserError: memory_length is not 0, or there is a clamp_length.
        """
        limits = self.check_limits(context_limits)
        return HiddenMemory.empty((), batch_size, limits, self.device, num_recent=self.num_recent)

    @override
    def generation_memory(
        self, batch_size: int, context_limits: ContextLimits | None = None, *, segment_length: int
    ) -> TokenMemory:
        window, device = self.check_limits(context_limits).attention_window, self.softmax.bias.device
        segment_length = min(segment_length, self.config.limit("max_position_embeddings") or segment_length)
        tokens_BM = torch.zeros(batch_size, segment_length - 1, dtype=torch.int64, device=device)
        return TokenMemory.empty([TokenCache(tokens_BM)], batch_size, ContextLimits(segment_length - 1, window), device)

    @override
    def forward(
        self,
        tokens: TokenIds | None = None,
        memory: Memory | None = None,
        *,
        inputs: Tensor | None = None,
        lengths: Tensor | None = None,
        visible: Tensor | None = None,
    ) -> tuple[Tensor, Memory]:
        """Process a segment of T tokens; the first token of each batch row has position 0.

        With a `TokenMemory`, as many of its tokens as fit a segment come before the new ones. Arguments, results and
        errors are those of `LanguageModel.forward`; a segment longer than the learned positions is an error too.
        """
        if isinstance(memory, TokenMemory):
            return self._recompute(tokens, memory, lengths)
        return super().forward(tokens, memory, inputs=inputs, lengths=lengths, visible=visible)

    def _recompute(
        self, tokens: TokenIds | None, memory: TokenMemory, lengths_B: Tensor | None
    ) -> tuple[Tensor, TokenMemory]:
        """Return the hidden states of the new tokens (B, T, D), each after the cached tokens that fit its segment."""
        if tokens is None:
            raise UserError("inputs for a memory of token ids; give tokens")
        tokens_BT = as_token_ids(tokens, self.config.vocab_size, "tokens").to(memory.valid_B.device)
        if len(tokens_BT) != memory.batch_size:
            raise UserError(
                f"tokens of shape {tuple(tokens_BT.shape)} for a memory of batch size {memory.batch_size}; give tokens "
                "of the same batch"
            )
        parts_BTD: list[Tensor] = []
        no_memory = self.initial_memory(len(tokens_BT), ContextLimits(0, memory.context_limits.attention_window))
        num_remaining = tokens_BT.shape[1]
        for part_BT in tokens_BT.split(memory.length + 1, dim=1):
            num_new = part_BT.shape[1]
            num_remaining -= num_new
            # padding comes first in a batch row, so only its first parts contain padding
            part_lengths_B = None if lengths_B is None else (lengths_B - num_remaining).clamp(0, num_new)
            segment_BP, segment_lengths_B, memory = memory.append(part_BT, part_lengths_B)
            hidden_BPD, _ = self(segment_BP, no_memory, lengths=segment_lengths_B)
            parts_BTD.append(hidden_BPD[:, -num_new:])
        return torch.cat(parts_BTD, dim=1), memory

    @override
    def run_layers(
        self, x_BTD: Tensor, memory: Memory, lengths_B: Tensor | None = None, visible_BT: Tensor | None = None
    ) -> tuple[list[Tensor], Memory]:
        num_new = x_BTD.shape[1]
        self.config.check_context_limits(segment_length=num_new)
        index_T = torch.arange(num_new, device=x_BTD.device)
        position_BT = index_T[None] if lengths_B is None else index_T - (num_new - lengths_B)[:, None]
        row_BT = position_BT.clamp(min=0)  # of a table of position vectors; padding has negative positions
        if self.position_embeddings is None:
            # flipped, because encode_distances returns encodings in descending order
            sinusoids_TD = encode_distances(num_new, x_BTD.shape[2], like=x_BTD).flip(0)
            x_BTD = x_BTD + sinusoids_TD.to(x_BTD.dtype)[row_BT]
        x_BTD = self.input_dropout(x_BTD)
        mask_B1TT = _attention_mask(position_BT, memory.context_limits.attention_window, padded=lengths_B is not None)
        states_BTD = [x_BTD]
        for index, layer in enumerate(self.layers):
            if self.position_embeddings is not None:
                x_BTD = x_BTD + self.position_embeddings[index, :num_new].to(x_BTD.dtype)[row_BT]
            x_BTD = self.run_layer(layer, x_BTD, mask_B1TT)
            states_BTD.append(x_BTD)
        states_BTD[-1] = self.final_norm(x_BTD)
        return states_BTD, memory.advance((), num_new, lengths_B)

    @override
    def add_auxiliary_losses(
        self, auxiliary_BT: Tensor, states_BTD: list[Tensor], targets_BT: Tensor, progress: float
    ) -> Tensor:
        num_layers, targets_BT = len(self.layers), targets_BT.to(auxiliary_BT.device)
        for number, hidden_BTD in enumerate(states_BTD[1:], start=1):
            if number < num_layers:
                hidden_BTD = self.output_dropout(self.final_norm(hidden_BTD))
                if progress >= number / (2 * num_layers):
                    hidden_BTD = hidden_BTD[:0]  # an empty batch, whose loss has gradients of zero instead of None
            for heads, weight, offset in ((self.next_heads, 1.0, 0), (self.second_heads, _SECOND_TARGET_WEIGHT, 1)):
                if str(number) in heads:
                    auxiliary_BT = auxiliary_BT + weight * _loss(heads[str(number)], hidden_BTD, targets_BT, offset)
        return auxiliary_BT


def _attention_mask(position_BT: Tensor, window: int | None, *, padded: bool) -> Tensor | None:
    """Return whether a position attends to another, bool (B or 1, 1, T, T), or None for a plain causal mask.

    Padding attends to itself, because a softmax over no keys would be NaN.
    """
    if window is None and not padded:
        return None
    distance_BTT = position_BT[:, :, None] - position_BT[:, None, :]
    attended_BTT = (distance_BTT >= 0) & (position_BT >= 0)[:, None, :]
    if window is not None:
        attended_BTT = attended_BTT & (distance_BTT < window)
    return (attended_BTT | (distance_BTT == 0))[:, None]


def _loss(head: nn.Module, hidden_BTD: Tensor, targets_BT: Tensor, offset: int) -> Tensor:
    """Return the losses in nats (B, T) of predicting the token `offset` positions after the next token.

    Each loss is at the position where its token is the target, so the first `offset` positions have 0. For an empty
    batch the result is a zero with gradients.
    """
    assert isinstance(head, nn.Linear)
    targets_BT = targets_BT[: len(hidden_BTD), offset:]
    hidden_BTD = hidden_BTD[:, : hidden_BTD.shape[1] - offset]
    losses = linear_cross_entropy(hidden_BTD.flatten(0, 1), head.weight, head.bias, targets_BT.flatten())
    losses_BT = F.pad(losses.view(targets_BT.shape), (offset, 0))
    return losses_BT if len(hidden_BTD) else losses_BT.sum()
