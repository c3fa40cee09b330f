"""XLNet (Yang et al. 2019, arXiv 1906.08237): two streams through layers with relative attention to both sides.

    streams = model.two_streams(tokens_BT, memory, visible=visible_in_order(rank_BT), targets=targets_BQ)
    losses_BQ = model.nats(streams.query_BQD, tokens_BT.gather(1, targets_BQ))
    hidden_BTD, memory = model(tokens_BT, memory)                   from left to right, as of any language model

The content stream h reads the tokens; the query stream g, which begins with one learned vector, knows the place that it
predicts but not the token there. Both have the same weights, and keys and values of both come from h (section 2.3):

    g_i = attention(queries of g_i, to memory and h_j for all j that come before i in an order)
    h_i = attention(queries of h_i, to memory and h_j for those j and for i itself)
    score[i, j] = ((q_i + u) . k_j + (q_i + w) . r[M + i - j] + (q_i + s) . e[segments of i and j]) / sqrt(H)

All of memory is in segment 0. From left to right the distances of the query stream are one larger than those of the
content stream: query i predicts the token after token i, and sees the keys that content i sees. All tokens are of one
segment then, so the last term is the same for all keys and is left out.

Shape suffixes: B batch size, T new tokens, Q predicted tokens, M memory slots, S = M + T keys, P distances, D model
width, L layers, N heads, H head width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from transformer_xl.config import UserError, XLNetConfig, check_type
from transformer_xl.device import to_device
from transformer_xl.model.attention import (
    AttentionContext,
    Biases,
    FeedForward,
    RelativeAttention,
    as_multiplied,
    encode_distances,
)
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import HiddenCache, LayerCache, Memory
from transformer_xl.model.model_with_memory import WEIGHT_STD
from transformer_xl.model.relative import RelativeModel
from transformer_xl.model.token_ids import TokenIds, as_token_ids
from transformer_xl.ops.dropout import FastDropout
from transformer_xl.ops.kernels import AttentionInputs, AttentionMask, choose
from transformer_xl.ops.relative_attention import SegmentTerm, relative_attention


class Streams(NamedTuple):
    """The last hidden states of both streams, and the next memory."""

    content_BTD: Tensor
    """Of the content stream, for every token."""
    query_BQD: Tensor
    """Of the query stream, for the predicted tokens; `LanguageModel.nats` and `logits` take them."""
    memory: Memory
    contents_BTD: list[Tensor]
    """The inputs of all layers of the content stream, and the result of the last one, without dropout."""


def visible_in_order(rank: Tensor) -> Tensor:
    """Return which tokens each token may see, by their places in an order.

    Args:
        rank: place of each token (B, T), integers, different within a row; below 0 for tokens that all may see.

    Returns:
        whether token i may see token j (B, T, T), as `XLNet.two_streams` takes it.

    Raises:
        UserError: places of a row are equal, or it is no tensor of integers (B, T).
    """
    check_type(rank, Tensor, "rank", "give a tensor of places in the order")
    if rank.ndim != 2 or rank.is_floating_point() or rank.dtype == torch.bool:
        raise UserError(f"rank is {rank.dtype} {tuple(rank.shape)}; give integers (batch, tokens)")
    sorted_BT = rank.sort(dim=1).values
    is_known = rank.device.type == "cpu"  # without waiting for the device
    if is_known and ((sorted_BT[:, 1:] == sorted_BT[:, :-1]) & (sorted_BT[:, 1:] >= 0)).any():
        raise UserError("rank is no order: two tokens of a row have the same place; give each its own, or -1")
    return (rank[:, None] < 0) | (rank[:, :, None] > rank[:, None])


@dataclass(frozen=True)
class _BothSides:
    """What all layers need besides `AttentionContext`, to attend to both sides."""

    targets_BQ: Tensor
    content_mask_B1TS: Tensor
    query_mask_B1TS: Tensor
    segments_BT: Tensor
    key_segments_BS: Tensor
    bi_data: bool
    """Whether every second row is read backward."""
    num_kept: int
    """Number of tokens that memory keeps."""
    kernel: str

    def attend(
        self, inputs: AttentionInputs, mask_B1TS: Tensor, embedding_2NH: Tensor, bias_NH: Tensor, dropout: float
    ) -> Tensor:
        """Return the attended values (B, T, N, H) of one stream."""
        if not self.bi_data:
            return self._attend_rows(slice(None), inputs, mask_B1TS, embedding_2NH, bias_NH, dropout)
        r_PNH, reversed_PNH = inputs.position_key_PNH.chunk(2)
        parts = (
            self._attend_rows(slice(first, None, 2), replace(inputs, position_key_PNH=keys_PNH), mask_B1TS,
                              embedding_2NH, bias_NH, dropout)
            for first, keys_PNH in enumerate((r_PNH, reversed_PNH))
        )  # fmt: skip
        return torch.stack(tuple(parts), dim=1).flatten(0, 1)

    def _attend_rows(
        self,
        rows: slice,
        inputs: AttentionInputs,
        mask_B1TS: Tensor,
        embedding_2NH: Tensor,
        bias_NH: Tensor,
        dropout: float,
    ) -> Tensor:
        q_BTNH, k_BSNH, v_BSNH, r_PNH, content_bias_NH, position_bias_NH = inputs.tensors()
        own, all_keys, dtype = self.segments_BT[rows], self.key_segments_BS[rows], q_BTNH.dtype
        segments = SegmentTerm(own, all_keys, embedding_2NH.to(dtype), bias_NH.to(dtype))
        return relative_attention(
            *(q_BTNH[rows], k_BSNH[rows], v_BSNH[rows], r_PNH, content_bias_NH, position_bias_NH),
            causal=False,
            mask=mask_B1TS[rows],
            segments=segments,
            dropout=dropout,
            implementation=self.kernel if self.kernel in ("sdpa", "reference") else "auto",  # those with masks
        )


class _GeluDropout(FastDropout):
    """GELU in its tanh form, then dropout."""

    @override
    def forward(self, x: Tensor, token_dim: int = 1) -> Tensor:
        return super().forward(F.gelu(x, approximate="tanh"), token_dim)


class TwoStreamLayer(nn.Module):
    """One layer for both streams: relative attention, then feed-forward with GELU."""

    def __init__(self, config: XLNetConfig, attention_class: type[RelativeAttention]) -> None:
        super().__init__()
        self.attention = attention_class(config)
        self.feed_forward = FeedForward(config)
        variational = config.regularization.variational_dropout
        self.feed_forward.relu_dropout = _GeluDropout(config.dropout, variational=variational)

    @override
    def forward(
        self,
        content_BTD: Tensor,
        query_BQD: Tensor,
        cache: LayerCache,
        context: AttentionContext,
        both_sides: _BothSides | None,
        biases: Biases,
        segment_embedding_2NH: Tensor,
        segment_bias_NH: Tensor,
    ) -> tuple[Tensor, Tensor, LayerCache]:
        """Return the next layer's inputs of both streams, and the next cache.

        Args:
            content_BTD: the layer's input of the content stream.
            query_BQD: that of the query stream; from left to right, Q is T.
            cache: the layer's cache of earlier tokens.
            context: inputs that all layers share.
            both_sides: further ones, or None to read from left to right.
            biases: content and position bias of this layer.
            segment_embedding_2NH: what queries multiply for a key of their own segment, and for one of another.
            segment_bias_NH: added to these queries.
        """
        attention, old = self.attention, cache
        inputs, cache = attention.attention_inputs(content_BTD, cache, context, biases)
        query_BQNH = attention.q_proj(as_multiplied(query_BQD)).unflatten(-1, attention.head_shape)
        query_BQNH = attention.qkv_dropout(attention.q_norm(query_BQNH))
        if both_sides is None:
            r_PNH, rate = inputs.position_key_PNH, context.dropout
            attended_BTNH = context.attend(replace(inputs, position_key_PNH=r_PNH[1:]), context.mask, rate)
            ahead = replace(inputs, q_BTNH=query_BQNH, position_key_PNH=r_PNH[:-1])
            attended_BQNH = context.attend(ahead, context.mask, rate)
        else:
            segment = segment_embedding_2NH, segment_bias_NH
            attended_BTNH = both_sides.attend(inputs, both_sides.content_mask_B1TS, *segment, context.dropout)
            attended_BQNH = query_BQNH
            if query_BQNH.shape[1]:
                index_BQNH = both_sides.targets_BQ[..., None, None].expand_as(query_BQNH)
                # at their places, as distances count from there; other queries are computed for nothing
                placed_BTNH = torch.zeros_like(inputs.q_BTNH).scatter(1, index_BQNH, query_BQNH)
                placed = replace(inputs, q_BTNH=placed_BTNH)
                placed_BTNH = both_sides.attend(placed, both_sides.query_mask_B1TS, *segment, context.dropout)
                attended_BQNH = placed_BTNH.gather(1, index_BQNH)
            if both_sides.num_kept < content_BTD.shape[1]:
                assert isinstance(old, HiddenCache)
                cache = old.append(content_BTD[:, : both_sides.num_kept])
        content_BTD = self.feed_forward(attention.output(content_BTD, attended_BTNH))
        return content_BTD, self.feed_forward(attention.output(query_BQD, attended_BQNH)), cache


class XLNet(RelativeModel, LanguageModel):
    """Embedding without a factor, layers of two streams with memory, a softmax.

    `forward` returns the query stream of the tokens that follow, each predicted from all before it. `hidden_states`
    returns the inputs of the content stream in all layers, and the result of `forward`.
    """

    config: XLNetConfig  # pyrefly: ignore[bad-override-mutable-attribute]
    num_ahead: ClassVar[int] = 1

    def __init__(self, config: XLNetConfig, *, memory_length: int = 128) -> None:
        """Build the model with initial weights drawn from torch's global random state.

        Args:
            config: settings of the model.
            memory_length: M, the default number of memory slots of `initial_memory`.

        Raises:
            UserError: the settings are those of another architecture, or the attention kernel is unknown.
        """
        super().__init__(config, memory_length=memory_length)
        if not isinstance(config, XLNetConfig):
            raise UserError(f"XLNet is not the model of {config.architecture}; use build_model")
        self.make_layers(RelativeAttention, TwoStreamLayer)
        heads = config.n_heads, config.head_dim
        self.mask_embedding = nn.Parameter(torch.empty(config.d_model))
        self.segment_bias = nn.Parameter(torch.empty(config.n_layers, *heads))
        self.segment_embedding = nn.Parameter(torch.empty(config.n_layers, 2, *heads))
        self.init_weights()

    @override
    def init_weights(self) -> None:
        super().init_weights()
        self.init_biases()
        for vectors in (self.mask_embedding, self.segment_bias, self.segment_embedding):
            nn.init.normal_(vectors, 0.0, WEIGHT_STD)

    @property
    @override
    def limits_visible(self) -> bool:
        return not self.config.attends_empty_slots

    @override
    def for_documents(self) -> BothSides:
        return BothSides(self)

    @override
    def run_layers(
        self, x_BTD: Tensor, memory: Memory, lengths_B: Tensor | None = None, visible_BT: Tensor | None = None
    ) -> tuple[list[Tensor], Memory]:
        context = self.attention_context(x_BTD, memory, lengths_B, visible_BT=visible_BT)
        query_BTD = self.mask_embedding.to(x_BTD.dtype).expand_as(x_BTD)
        contents_BTD, query_BTD, caches = self._run(x_BTD, query_BTD, memory, context, None)
        return [*contents_BTD[:-1], query_BTD], memory.advance(caches, x_BTD.shape[1], lengths_B)

    def two_streams(
        self,
        tokens: TokenIds | None,
        memory: Memory | None = None,
        *,
        inputs: Tensor | None = None,
        visible: Tensor | None = None,
        targets: Tensor | None = None,
        segments: Tensor | None = None,
        lengths: Tensor | None = None,
        bi_data: bool = False,
        num_kept: int | None = None,
    ) -> Streams:
        """Read tokens that may see later ones, and predict some of them.

        Args:
            tokens: as for `forward`.
            memory: as for `forward`; all may see it, and it is in segment 0. Without an attention window.
            inputs: as for `forward`.
            visible: whether token i may see token j (B, T, T), bool, such as `visible_in_order` returns; in the content
                stream each token sees itself besides. None: each sees all others.
            targets: positions of the tokens to predict (B, Q), 0 to T - 1, or None for none.
            segments: segment of each token (B, T), integers, or None if all are in segment 0.
            lengths: as for `forward`, or None if there is no padding; not together with `visible` or `num_kept`.
            bi_data: whether rows 1, 3, ... are texts that were reversed: their distances are negated.
            num_kept: number of tokens, the first ones, that the next memory keeps; None for all. Not with a KV cache.

        Returns:
            both streams, and the memory.

        Raises:
            UserError: a shape or dtype is wrong, a position does not exist, bi_data with an odd number of rows, or as
                by `forward`.
        """
        x_BTD, memory = self.embed(tokens, memory, inputs, lengths)
        batch_size, num_new = x_BTD.shape[:2]
        check_type(num_kept, (int, type(None)), "num_kept", "give a number of tokens")
        if (window := memory.context_limits.attention_window) is not None:
            raise UserError(f"attention_window {window:,} limits reading from left to right; to both sides, give none")
        num_kept, device = num_new if num_kept is None else num_kept, x_BTD.device
        itself_TT = torch.eye(num_new, dtype=torch.bool, device=device)
        visible_BTT = ~itself_TT.expand(batch_size, -1, -1)
        if visible is not None:
            visible_BTT = _checked("visible", visible, (batch_size, num_new, num_new), torch.bool)
        targets_BQ = torch.zeros(batch_size, 0, dtype=torch.int64, device=device)
        if targets is not None:
            num_targets = targets.shape[-1] if isinstance(targets, Tensor) and targets.ndim == 2 else num_new
            targets_BQ = _checked("targets", targets, (batch_size, num_targets))
            if targets_BQ.device.type == "cpu" and ((targets_BQ < 0) | (targets_BQ >= num_new)).any():
                raise UserError(f"targets has positions outside of 0 to {num_new - 1}; the segment has no others")
        segments_BT = torch.zeros(batch_size, num_new, dtype=torch.int64, device=device)
        if segments is not None:
            segments_BT = _checked("segments", segments, (batch_size, num_new))
        if not 0 <= num_kept <= num_new or (num_kept < num_new and self.owner is not None):
            raise UserError(f"num_kept {num_kept}: must be from 0 to {num_new}, or None, which it is with a KV cache")
        if lengths is not None and (visible is not None or num_kept < num_new):
            other = "visible" if visible is not None else "num_kept"
            raise UserError(f"lengths and {other} were both given; leave padding out, or mask it in visible")
        if bi_data and batch_size % 2:
            raise UserError(f"bi_data reverses every second row, and the batch has {batch_size}; give an even number")
        visible_BTT, targets_BQ, segments_BT = (to_device(x, device) for x in (visible_BTT, targets_BQ, segments_BT))

        num_slots, config = memory.length, self.config
        valid_B = torch.full_like(memory.valid_B, num_slots) if config.attends_empty_slots else memory.valid_B
        num_padding_B1 = torch.zeros_like(valid_B)[:, None]
        if lengths is not None:
            lengths = to_device(lengths, device)
            num_padding_B1 = num_new - lengths[:, None]
        # padding, which is moved before the memory as by `padding_first`, and empty slots come first
        is_read_BS = torch.arange(num_slots + num_new, device=device) >= num_slots + num_padding_B1 - valid_B[:, None]

        def with_memory(visible_BTT: Tensor) -> Tensor:
            return F.pad(visible_BTT, (num_slots, 0), value=True)[:, None] & is_read_BS[:, None, None]

        both_sides = _BothSides(
            targets_BQ=targets_BQ,
            content_mask_B1TS=with_memory(visible_BTT | itself_TT),
            query_mask_B1TS=with_memory(visible_BTT),
            segments_BT=segments_BT,
            key_segments_BS=torch.cat([segments_BT.new_zeros(batch_size, num_slots), segments_BT], dim=1),
            bi_data=bi_data,
            num_kept=num_kept,
            kernel=self.attn_implementation or "auto",
        )
        limits, positions = memory.context_limits, (num_slots + num_new, config.d_model, self.like)
        encoding_PD = encode_distances(*positions, num_later=num_new - 1, clamp=limits.clamp_length)
        if bi_data:
            sines_PK, cosines_PK = encoding_PD.chunk(2, dim=1)
            encoding_PD = torch.cat([encoding_PD, torch.cat([-sines_PK, cosines_PK], dim=1)])
        context = AttentionContext(
            num_distances=len(encoding_PD),
            encoding_PD=self.input_dropout(encoding_PD.to(self.like.dtype), token_dim=0),
            zero_distance_D=None,
            mask=AttentionMask(None, num_later=num_new - 1),
            lengths_B=lengths,
            attend=choose(self.attn_implementation or "auto", device, x_BTD.dtype).attend,
            dropout=config.attention_dropout if self.training else 0.0,
        )
        query_BQD = self.mask_embedding.to(x_BTD.dtype).expand(*targets_BQ.shape, -1)
        contents_BTD, query_BQD, caches = self._run(x_BTD, query_BQD, memory, context, both_sides)
        streams = self.output_dropout(contents_BTD[-1]), self.output_dropout(query_BQD)
        return Streams(*streams, memory.advance(caches, num_kept, lengths), contents_BTD)

    @override
    def training_losses(
        self, tokens: TokenIds, targets: TokenIds, memory: Memory, *, progress: float, order: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Memory]:
        """Return the losses of one training step; those of tokens that are not predicted have no meaning.

        Args:
            tokens: token ids (B, T).
            targets: the same.
            memory: as for `forward`; the next one keeps `reuse_length` tokens.
            progress: without effect.
            order: as for `LanguageModel.training_losses`; it is needed.

        Raises:
            UserError: as by `two_streams`, or there is no order.
        """
        targets_BT = as_token_ids(targets, self.config.vocab_size, "targets")
        check_type(order, Tensor, "order", "give the places and segments of the tokens, those of PermutedDataset")
        assert order is not None
        rank_BT, segments_BT = order.unbind(1)
        targets_BT = to_device(targets_BT, rank_BT.device)
        own = self.config.resolved(targets_BT.shape[1])
        assert own.reuse_length is not None
        is_predicted_BT = rank_BT >= 0
        for index in self.config.functional_ids:
            is_predicted_BT = is_predicted_BT & (targets_BT != index)
        # a number that is known without waiting for the device; a row with fewer has further places, without weight
        places_BQ = is_predicted_BT.int().argsort(dim=1, descending=True, stable=True)[:, : own.num_predict]
        visible_BTT = visible_in_order(rank_BT)
        visible_BTT[:, : own.reuse_length, own.reuse_length :] = False
        visible_BTT[:, own.reuse_length :, : own.reuse_length] = True
        streams = self.two_streams(
            *(tokens, memory),
            visible=visible_BTT,
            targets=places_BQ,
            segments=segments_BT,
            bi_data=self.config.bi_data,
            num_kept=own.reuse_length,
        )
        losses_BQ = self.nats(streams.query_BQD, targets_BT.gather(1, places_BQ))
        losses_BT = losses_BQ.new_zeros(rank_BT.shape).scatter(1, places_BQ, losses_BQ)
        return losses_BT, torch.zeros_like(losses_BT), streams.memory

    def _run(
        self,
        content_BTD: Tensor,
        query_BQD: Tensor,
        memory: Memory,
        context: AttentionContext,
        both_sides: _BothSides | None,
    ) -> tuple[list[Tensor], Tensor, list[LayerCache]]:
        """Return the inputs of all layers and the last content states, the last query states, and the caches."""
        content_BTD, query_BQD = self.input_dropout(content_BTD), self.input_dropout(query_BQD)
        contents_BTD, caches = [content_BTD], list[LayerCache]()
        segments = zip(self.segment_embedding, self.segment_bias, strict=True)
        for layer, cache, biases, segment in zip(
            self.layers, memory.layers, self.layer_biases(), segments, strict=True
        ):
            content_BTD, query_BQD, cache = self.run_layer(
                layer, content_BTD, query_BQD, cache, context, both_sides, biases, *segment
            )
            contents_BTD.append(content_BTD)
            caches.append(cache)
        return contents_BTD, query_BQD, caches


class BothSides:
    """An XLNet whose tokens see their whole segment: for features of documents, and not to predict tokens."""

    limits_visible = False
    """As of a model: a step is one segment."""

    def __init__(self, model: XLNet) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, tokens: TokenIds | None, memory: Memory, **arguments: Any) -> tuple[Tensor, Memory]:
        """Return the content stream (B, T, D) and the next memory; arguments as for `XLNet.forward`."""
        states_BTD, memory = self.hidden_states(tokens, memory, **arguments)
        return states_BTD[-1], memory

    def hidden_states(self, tokens: TokenIds | None, memory: Memory, **arguments: Any) -> tuple[list[Tensor], Memory]:
        """Return the content stream at all layers, as `LanguageModel.hidden_states`, and the next memory."""
        streams = self._model.two_streams(tokens, memory, **arguments)
        return [*streams.contents_BTD[:-1], streams.content_BTD], streams.memory


def _checked(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """Return the tensor, of this shape and dtype (None: integers, returned as int64).

    Raises:
        UserError: it is not.
    """
    check_type(tensor, Tensor, name, f"give a tensor {shape}")
    is_integer = not tensor.is_floating_point() and tensor.dtype != torch.bool
    if tensor.shape != shape or (tensor.dtype != dtype if dtype else not is_integer):
        raise UserError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; give {dtype or 'integers'} {shape}")
    return tensor if dtype else tensor.long()
