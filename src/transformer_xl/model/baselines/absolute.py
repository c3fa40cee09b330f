"""Transformers that know places in the segment alone, and keep nothing of earlier segments.

Sinusoidal (Vaswani et al. 2017): sinusoids of the place are added to the embedding. Learned (Al-Rfou et al. 2018): each
layer has a learned vector for every place, which is added to its input.

    x = x + place vectors     a = softmax(q k^T / sqrt(H), places up to one's own) v     then as Transformer-XL's layer

A token is therefore predicted from the tokens of its own segment at most. To give each as much context as fits, a
window moves over the text token by token, and all of it is computed again.

Auxiliary losses (Al-Rfou et al. 2018, for training alone): every layer predicts the next token with a linear map of
its own, the l-th of L until l / (2 L) of training is done; and each place also predicts the token after the next, at
half the weight. Where we differ: within its time a layer's loss counts in full (the paper leaves the weight open).

Letters: B rows, T tokens of a segment, P tokens read again, M memory slots, D model width, N heads, H head width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from transformer_xl.config import AbsoluteConfig, AlRfouConfig, UserError
from transformer_xl.model.attention import FeedForward, encode_distances
from transformer_xl.model.baselines.token_memory import TokenMemory
from transformer_xl.model.cross_entropy import linear_cross_entropy
from transformer_xl.model.dropout import Dropout
from transformer_xl.model.memory import ContextLimits, HiddenMemory, Memory
from transformer_xl.model.token_model import WEIGHT_STD, TokenModel

_SECOND_WEIGHT = 0.5  # of the loss of the token after the next


class SelfAttention(nn.Module):
    """Multi-head attention of a segment over itself, with its residual sum."""

    def __init__(self, config: AbsoluteConfig) -> None:
        super().__init__()
        inner = config.n_heads * config.head_dim
        self.head_shape = (config.n_heads, config.head_dim)
        self.pre_norm, self.share_dropped = config.norm_first, config.attention_dropout
        self.q_proj = nn.Linear(config.d_model, inner, bias=False)
        self.k_proj = nn.Linear(config.d_model, inner, bias=False)
        self.v_proj = nn.Linear(config.d_model, inner, bias=False)
        self.o_proj = nn.Linear(inner, config.d_model, bias=False)
        self.norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.dropout = Dropout(config.dropout)

    @override
    def forward(self, x_BTD: Tensor, seen_B1TT: Tensor | None) -> Tensor:
        """Gives (B, T, D); `seen_B1TT`: which place sees which (bool); none: all up to its own."""
        new_BTD = self.norm(x_BTD) if self.pre_norm else x_BTD
        q_BNTH, k_BNTH, v_BNTH = (
            projection(new_BTD).unflatten(-1, self.head_shape).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out_BNTH = F.scaled_dot_product_attention(
            q_BNTH,
            k_BNTH,
            v_BNTH,
            attn_mask=seen_B1TT,
            dropout_p=self.share_dropped if self.training else 0.0,
            is_causal=seen_B1TT is None,
        )
        sum_BTD = x_BTD + self.dropout(self.o_proj(out_BNTH.transpose(1, 2).flatten(-2)))
        return sum_BTD if self.pre_norm else self.norm(sum_BTD)


class AbsoluteLayer(nn.Module):
    """Attention, then feed-forward."""

    def __init__(self, config: AbsoluteConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.feedforward = FeedForward(config)

    @override
    def forward(self, x_BTD: Tensor, seen_B1TT: Tensor | None) -> Tensor:
        """Gives the next layer's input (B, T, D)."""
        return self.feedforward(self.attention(x_BTD, seen_B1TT))


class AbsoluteTransformer(TokenModel):
    """Embedding, layers with absolute places, softmax."""

    config: AbsoluteConfig  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, config: AbsoluteConfig, *, memory_length: int = 0) -> None:
        """Builds the model with first weights drawn from torch's global random state.

        Raises:
            UserError: the positions are learned and max_position_embeddings is none, or a memory is asked for.
        """
        super().__init__(config, memory_length=memory_length)
        config.check_context_limits(memory_length=memory_length)
        self.place_vectors: nn.Parameter | None = None
        if isinstance(config, AlRfouConfig):
            longest = config.max_position_embeddings
            if longest is None:
                raise UserError("al-rfou needs max_position_embeddings, the longest segment; give a number")
            self.place_vectors = nn.Parameter(torch.empty(config.n_layers, longest, config.d_model))
        self.layers = nn.ModuleList(AbsoluteLayer(config) for _ in range(config.n_layers))
        final = config.norm_first and config.final_norm
        self.final_norm = nn.LayerNorm(config.d_model, eps=config.norm_eps) if final else nn.Identity()
        predicting = range(1, config.n_layers) if config.intermediate_layer_losses else ()
        both = [*predicting, config.n_layers] if config.num_targets > 1 else []
        self.next_heads = nn.ModuleDict({str(layer): _head(config) for layer in predicting})
        self.second_heads = nn.ModuleDict({str(layer): _head(config) for layer in both})
        self.init_weights()

    @override
    def init_weights(self) -> None:
        super().init_weights()
        if self.place_vectors is not None:
            nn.init.normal_(self.place_vectors, 0.0, WEIGHT_STD)

    @override
    def initial_memory(self, batch_size: int, context_limits: ContextLimits | None = None) -> HiddenMemory:
        """Rows without a slot.

        Raises:
            UserError: memory or a clamp is asked for.
        """
        like = next(self.layers.parameters())
        return HiddenMemory.empty(1, batch_size, self.config.d_model, self.checked(context_limits), like)

    @override
    def generation_memory(
        self, batch_size: int, context_limits: ContextLimits | None = None, *, segment: int
    ) -> TokenMemory:
        context_limits = self.checked(context_limits)
        segment = min(segment, self.config.limit("max_position_embeddings") or segment)
        device = next(self.layers.parameters()).device
        return TokenMemory.empty(batch_size, ContextLimits(segment - 1, context_limits.attention_window), device)

    @override
    def forward(
        self,
        tokens_BT: Tensor | None = None,
        memory: Memory | None = None,
        *,
        inputs_BTD: Tensor | None = None,
        lengths_B: Tensor | None = None,
    ) -> tuple[Tensor, Memory]:
        """Reads a segment of T tokens, each row's first at place 0 (see `LanguageModel.forward`).

        With a memory of tokens, those come before the new ones as far as a segment goes.

        Raises:
            UserError: not exactly one kind of input, a wrong shape, a segment longer than the learned places, or a
                memory of another batch or model.
        """
        if isinstance(memory, TokenMemory):
            return self._read_again(tokens_BT, memory, lengths_B)
        x_BTD = self.first_input(tokens_BT, inputs_BTD)
        memory = self.matching(memory, x_BTD, lengths_B)
        *_, last_BTD = self._outputs(x_BTD, memory, lengths_B)
        return self._finished(last_BTD), self._after(memory, x_BTD, lengths_B)

    @override
    def training_losses(
        self, tokens_BT: Tensor, targets_BT: Tensor, memory: Memory, *, done: float
    ) -> tuple[Tensor, Tensor, Memory]:
        x_BTD = self.first_input(tokens_BT, None)
        memory = self.matching(memory, x_BTD, None)
        outputs_BTD = list(self._outputs(x_BTD, memory, None))
        last_BTD = self._finished(outputs_BTD[-1])
        nats_BT = self.nats(last_BTD, targets_BT)
        extra_BT, num_layers = torch.zeros_like(nats_BT), len(outputs_BTD)
        targets_BT = targets_BT.to(x_BTD.device)
        for number, output_BTD in enumerate(outputs_BTD, start=1):
            # a layer whose time is over goes through its maps with no row: gradients of zeros, not none
            counts = number == num_layers or done < number / (2 * num_layers)
            hidden_BTD = last_BTD if number == num_layers else self._finished(output_BTD)
            hidden_BTD = hidden_BTD if counts else hidden_BTD[:0]
            if str(number) in self.next_heads:
                extra_BT = extra_BT + _loss(self.next_heads[str(number)], hidden_BTD, targets_BT, ahead=0)
            if str(number) in self.second_heads:
                second_BT = _loss(self.second_heads[str(number)], hidden_BTD, targets_BT, ahead=1)
                extra_BT = extra_BT + _SECOND_WEIGHT * second_BT
        return nats_BT, extra_BT, self._after(memory, x_BTD, None)

    @override
    def matching(self, memory: Memory | None, x_BTD: Tensor, lengths_B: Tensor | None) -> HiddenMemory:
        memory = super().matching(memory, x_BTD, lengths_B)
        if not isinstance(memory, HiddenMemory) or len(memory.layers_BMD) != 1 or memory.length:
            raise UserError(f"{self.config.architecture} has no memory; start with initial_memory")
        return memory

    def _read_again(
        self, tokens_BT: Tensor | None, memory: TokenMemory, lengths_B: Tensor | None
    ) -> tuple[Tensor, TokenMemory]:
        if tokens_BT is None or tokens_BT.ndim != 2 or len(tokens_BT) != memory.batch_size:
            given = "no tokens" if tokens_BT is None else f"tokens of shape {tuple(tokens_BT.shape)}"
            raise UserError(f"{given} beside a memory of {memory.batch_size} rows of tokens; give tokens of those rows")
        parts_BTD: list[Tensor] = []
        fresh, num_left = (
            self.initial_memory(len(tokens_BT), ContextLimits(0, memory.context_limits.attention_window)),
            tokens_BT.shape[1],
        )
        for part_BT in tokens_BT.split(memory.length + 1, dim=1):
            num_left -= part_BT.shape[1]
            # padding stands first, so the last parts of a row are its own
            part_B = None if lengths_B is None else (lengths_B - num_left).clamp(0, part_BT.shape[1])
            read_BP, own_B, memory = memory.with_new(part_BT, part_B)
            hidden_BPD, _ = self(read_BP, fresh, lengths_B=own_B)
            parts_BTD.append(hidden_BPD[:, -part_BT.shape[1] :])
        return torch.cat(parts_BTD, dim=1), memory

    def _after(self, memory: HiddenMemory, x_BTD: Tensor, lengths_B: Tensor | None) -> HiddenMemory:
        return memory.after([x_BTD], lengths_B)

    def _finished(self, x_BTD: Tensor) -> Tensor:
        return self.dropout(self.final_norm(x_BTD))

    def _outputs(self, x_BTD: Tensor, memory: Memory, lengths_B: Tensor | None) -> Iterator[Tensor]:
        """The output (B, T, D) of one layer after the other."""
        num_new, width = x_BTD.shape[1:]
        self.config.check_context_limits(segment_length=num_new)
        place_T = torch.arange(num_new, device=x_BTD.device)
        place_BT = place_T[None] if lengths_B is None else place_T - (num_new - lengths_B)[:, None]
        own_BT = place_BT.clamp(min=0)
        if self.place_vectors is None:
            sinusoids = encode_distances(num_new, width, like=x_BTD).flip(0)  # which counts down
            x_BTD = x_BTD + sinusoids.to(x_BTD.dtype)[own_BT]
        x_BTD = self.dropout(x_BTD)
        seen_B1TT = _seen(place_BT, memory.context_limits.attention_window, padded=lengths_B is not None)
        for index, layer in enumerate(self.layers):
            if self.place_vectors is not None:
                x_BTD = x_BTD + self.place_vectors[index, :num_new].to(x_BTD.dtype)[own_BT]
            x_BTD = self.through(layer, x_BTD, seen_B1TT)
            yield x_BTD


def _seen(place_BT: Tensor, window: int | None, *, padded: bool) -> Tensor | None:
    """Which place sees which, as bool (B or 1, 1, T, T); none: each all up to its own. Padding sees itself."""
    if window is None and not padded:
        return None
    distance_BTT = place_BT[:, :, None] - place_BT[:, None, :]
    seen_BTT = (distance_BTT >= 0) & (place_BT >= 0)[:, None, :]
    if window is not None:
        seen_BTT = seen_BTT & (distance_BTT < window)
    return (seen_BTT | (distance_BTT == 0))[:, None]


def _head(config: AbsoluteConfig) -> nn.Linear:
    return nn.Linear(config.d_model, config.vocab_size)


def _loss(head: nn.Module, hidden_BTD: Tensor, targets_BT: Tensor, *, ahead: int) -> Tensor:
    """Nats of predicting so many tokens beyond the next, where the token stands as a target: (B, T), first ones 0.

    Hidden rows may be of no row at all: then the losses are zeros.
    """
    assert isinstance(head, nn.Linear)
    wanted_BT = targets_BT[: len(hidden_BTD), ahead:]
    rows_BTD = hidden_BTD[:, : hidden_BTD.shape[1] - ahead]
    nats = linear_cross_entropy(rows_BTD.flatten(0, 1), head.weight, head.bias, wanted_BT.flatten())
    nats_BT = F.pad(nats.view(wanted_BT.shape), (ahead, 0))
    return nats_BT if len(hidden_BTD) else nats_BT.sum()
