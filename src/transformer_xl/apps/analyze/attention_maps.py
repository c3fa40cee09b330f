"""Attention of each head: means by distance, and each term of the attention scores (paper appendix D).

The score of a query q and a key k is the sum of four terms (paper section 3.3), here divided by sqrt(d_head):

    (a) content          q . k
    (b) position         q . r, with r the key of the distance between query and key
    (c) content_bias     u . k, with u a parameter of the head
    (d) position_bias    v . r, with v a parameter of the head

A text is processed with memory, segment by segment and layer by layer. The attention of each layer is passed to
callbacks and then discarded, so that memory use does not depend on the length of the text.

Difference from the paper: in the paper, every query sees 640 preceding tokens, and the mean is over all queries. In
this module the evaluation settings determine the context, and the sum at each distance is divided by the number of
queries that saw that distance.

Shape suffixes: B batch size, T queries of a segment, M memory slots, S = M + T keys, P distances (0 to P - 1), N heads,
L layers, D d_model, K tokens of the text, Q tokens in the maps, as queries and as keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from transformer_xl.config import UserError
from transformer_xl.device import require_memory
from transformer_xl.evaluation.attention_by_distance import by_distance
from transformer_xl.evaluation.evaluate import check_weights
from transformer_xl.evaluation.plan import EvaluationPlan, ProgressCallback
from transformer_xl.evaluation.with_memory import memory_slots
from transformer_xl.model.memory import LayerCache
from transformer_xl.model.transformer_xl import RelativeLanguageModel
from transformer_xl.ops.kernels import AttentionTerms
from transformer_xl.text.token_store import Tokens

Term = Literal["probability", "score", "content", "position", "content_bias", "position_bias"]

TERMS: dict[Term, str] = {
    "probability": "attention (probability)",
    "score": "score (sum of the terms)",
    "content": "(a) content",
    "position": "(b) content-dependent position",
    "content_bias": "(c) global content",
    "position_bias": "(d) global position",
}
"""Every map that is drawn for a head, with its title: the terms, their sum, and the softmax of the sum."""


def pluralize(count: int, noun: str = "token") -> str:
    """Return a count with its noun: 1 token, 2,048 tokens."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


@dataclass(frozen=True)
class LayerAttention:
    """The attention of one layer in one segment."""

    layer: int
    start: int
    """Position of the first query in the text."""
    num_valid: int
    """Number of memory slots that hold tokens; they are the last slots."""
    terms: AttentionTerms
    """Scores and probabilities, with batch size 1."""


LayerCallback = Callable[[LayerAttention], None]
"""Called with the attention of a layer, which is discarded when the callback returns."""


def trace_attention(
    model: RelativeLanguageModel,
    tokens_K: Tokens,
    plan: EvaluationPlan,
    callbacks: Sequence[LayerCallback],
    progress: ProgressCallback | None = None,
) -> None:
    """Process a text, starting with empty memory, and pass the attention of each layer and segment to the callbacks.

    Args:
        model: in evaluation mode.
        tokens_K: the text; each token is an input once, without a BOS token before the first.
        plan: only its segment length and context limits are used.
        callbacks: each is called with every layer of every segment, in order.
        progress: called with the number of tokens processed since the last call.

    Raises:
        UserError: weights are not finite, or so large that a layer's output is not finite.
    """
    assert not model.training
    check_weights(model)
    device, memory_length = next(model.parameters()).device, plan.context_limits.memory_length
    # memory slots that the text never fills are omitted, unless queries attend to empty slots (attend_empty_memory)
    num_slots = memory_slots(model, len(tokens_K), plan)
    num_new = min(plan.segment_length, len(tokens_K))
    num_keys, config = num_slots + num_new, model.config
    # a position key for each pair; the terms before and after masking, the score and the probabilities
    num_bytes = 4 * config.n_heads * num_new * num_keys * (config.head_dim + 9)
    task = f"attention of {config.n_heads:,} heads, {num_new:,} queries and {num_keys:,} keys"
    require_memory(task, num_bytes, device, "lower segment_length, memory_length or max_tokens")
    memory = model.initial_memory(1, replace(plan.context_limits, memory_length=num_slots))
    for start in range(0, len(tokens_K), plan.segment_length):
        ids_T = np.asarray(tokens_K[start : start + plan.segment_length], dtype=np.int64)
        with torch.inference_mode():
            tokens_BT = torch.from_numpy(ids_T)[None].to(device)
            _, next_memory = model.embed(tokens_BT, memory, None, None)  # which has the tokens for n-gram embeddings
            caches: list[LayerCache] = []
            for layer, trace in enumerate(model.trace(tokens_BT, memory)):
                tensors = (trace.output_BTD, trace.terms.content_BNTS, trace.terms.position_BNTS)
                if not torch.stack([tensor.isfinite().all() for tensor in tensors]).all():
                    raise UserError(
                        f"layer {layer} computes values that are not finite: its weights are too large; train again "
                        "with a lower learning rate, or use the other checkpoint (checkpoint=best or checkpoint=last)"
                    )
                for callback in callbacks:
                    callback(LayerAttention(layer, start, min(start, memory_length), trace.terms))
                caches.append(trace.cache)
            memory = next_memory.advance(caches, len(ids_T))
        if progress:
            progress(len(ids_T))


class AttentionMeans:
    """Mean attention of each head by distance, over the queries of a text that see a full memory.

    Queries before the memory is full are excluded, because they see fewer keys and attend more to each; if the text is
    too short to fill the memory, all queries are included. Later queries of a segment see farther than its first, so
    the sum at each distance is divided by the number of included queries that saw that distance.
    """

    def __init__(self, model: RelativeLanguageModel, plan: EvaluationPlan, num_tokens: int) -> None:
        """Initialize all sums with zero.

        Args:
            model: the model passed to `trace_attention`.
            plan: the plan passed to `trace_attention`.
            num_tokens: length of the text.
        """
        num_distances = min(num_visible_distances(plan), num_tokens)
        shape = (model.config.n_layers, model.config.n_heads)
        memory_length = plan.context_limits.memory_length
        # memory fills in whole segments
        self.fills_memory = num_tokens > -(-memory_length // plan.segment_length) * plan.segment_length
        """Whether the text is long enough that some queries see a full memory."""
        self._min_valid = memory_length if self.fills_memory else 0
        self.num_queries = 0
        """Number of included queries."""
        self.count_P = torch.zeros(num_distances, dtype=torch.int64)
        """Number of included queries that saw each distance."""
        self._sum_LNP = torch.zeros(*shape, num_distances, dtype=torch.float64)
        self._has_sinks = model.config.has_attention_sinks
        self._entropy_sum_LN = torch.zeros(shape, dtype=torch.float64)

    def add(self, attention: LayerAttention) -> None:
        """Add the attention of a layer in a segment; a callback of `trace_attention`."""
        if attention.num_valid < self._min_valid:
            return
        p_BNTS = attention.terms.probabilities_BNTS
        num_queries = p_BNTS.shape[2]
        seen_TP = torch.arange(len(self.count_P)) <= attention.num_valid + torch.arange(num_queries)[:, None]
        if attention.layer == 0:
            self.num_queries += num_queries
            self.count_P += seen_TP.sum(0)
        p_NTP = by_distance(p_BNTS, len(self.count_P)).masked_fill(~seen_TP.to(p_BNTS.device), 0)
        # some devices have no float64, so each segment is summed there, and the sums are added on the CPU
        self._sum_LNP[attention.layer] += p_NTP.sum(1).cpu().double()
        p_NTS = p_BNTS[0]
        if self._has_sinks:
            p_NTS = p_NTS / p_NTS.sum(-1, keepdim=True).clamp(min=torch.finfo(p_NTS.dtype).tiny)
        self._entropy_sum_LN[attention.layer] += torch.special.entr(p_NTS).sum((-1, -2)).cpu().double()

    def mean_LNP(self, max_distance: int) -> npt.NDArray[np.float64]:
        """Return the mean probability at distances 0 to `max_distance`; nan where no query saw a distance."""
        mean_LNP = self._sum_LNP / self.count_P.double().where(self.count_P > 0, torch.nan)
        return mean_LNP[..., : max_distance + 1].numpy()

    @property
    def distance_LN(self) -> npt.NDArray[np.float64]:
        """Mean distance that each head attends to, in tokens: the expectation under its probabilities.

        With attention sinks, which take a part of each query's attention, queries count by the rest.
        """
        distance_P = torch.arange(len(self.count_P), dtype=torch.float64)
        sum_LN = self._sum_LNP.sum(-1).clamp(min=1e-30) if self._has_sinks else self.num_queries
        return ((self._sum_LNP * distance_P).sum(-1) / sum_LN).numpy()

    @property
    def entropy_LN(self) -> npt.NDArray[np.float64]:
        """Mean entropy of each head's attention, in nats: 0 for a single key, ln(n) for n equally probable keys.

        With attention sinks it is that of the keys' probabilities divided by their sum.
        """
        return (self._entropy_sum_LN / self.num_queries).numpy()


def num_visible_distances(plan: EvaluationPlan) -> int:
    """Return P: the number of distances, 0 included, that the last query of a segment sees with a full memory."""
    num_keys = plan.context_limits.memory_length + plan.segment_length
    return min(num_keys, plan.context_limits.attention_window or num_keys)


class TermMaps:
    """Every attention term of every head over the first Q tokens of a text.

    Terms (c) and (d) are stored by key and by distance, which is all they depend on. Probabilities are computed from
    scores on request, with the softmax denominator of each query. The denominator includes memory slots that no token
    has filled yet if the model has the setting `attend_empty_memory`.
    """

    def __init__(self, model: RelativeLanguageModel, plan: EvaluationPlan, num_tokens: int) -> None:
        """Allocate the maps.

        Args:
            model: the model passed to `trace_attention`.
            plan: the plan passed to `trace_attention`.
            num_tokens: Q.
        """
        self.num_tokens = num_tokens
        self.shape = shape = (model.config.n_layers, model.config.n_heads)
        """(L, N)."""
        # Shaw's relative positions have no terms (c) and (d)
        missing = ("content_bias", "position_bias") if model.config.position_keys == "learned" else ()
        self.terms = {term: title for term, title in TERMS.items() if term not in missing}
        """The maps that this model has, with their titles."""
        self._attention_window = plan.context_limits.attention_window
        dtype = next(model.parameters()).dtype
        self.content_LNQQ = torch.zeros(*shape, num_tokens, num_tokens, dtype=dtype)
        """Term (a), by query and key."""
        self.position_LNQQ = torch.zeros_like(self.content_LNQQ)
        """Term (b), by query and key."""
        self.content_bias_LNQ = torch.zeros(*shape, num_tokens, dtype=dtype)
        """Term (c), by key."""
        self.position_bias_LNQ = torch.zeros_like(self.content_bias_LNQ)
        """Term (d), by distance."""
        self.log_denominator_LNQ = torch.zeros_like(self.content_bias_LNQ)
        """Log of each query's softmax denominator."""
        self.first_seen_Q = torch.zeros(num_tokens, dtype=torch.int64)
        """Position of the first token that each query sees."""

    def add(self, attention: LayerAttention) -> None:
        """Copy the terms of a layer in a segment, up to the Qth token of the text; a callback of `trace_attention`."""
        layer, start, terms, window = attention.layer, attention.start, attention.terms, self._attention_window
        segment_length, num_keys = terms.content_BNTS.shape[-2:]
        num_queries, num_memory = min(segment_length, self.num_tokens - start), num_keys - segment_length
        if num_queries <= 0:
            return
        first_key, stop = start - attention.num_valid, start + num_queries
        queries, keys = slice(start, stop), slice(first_key, stop)
        slots = slice(num_memory - attention.num_valid, num_memory + num_queries)  # where the terms have these keys
        self.content_LNQQ[layer, :, queries, keys] = terms.content_BNTS[0, :, :num_queries, slots].cpu()
        self.position_LNQQ[layer, :, queries, keys] = terms.position_BNTS[0, :, :num_queries, slots].cpu()
        bias_NT = terms.content_bias_BNTS[0].diagonal(num_memory, -2, -1)  # each query's own key, which it always sees
        self.content_bias_LNQ[layer, :, queries] = bias_NT[:, :num_queries].cpu()
        num_seen = min(attention.num_valid + num_queries, window or num_keys)  # keys that the last query sees
        last_NS = terms.position_bias_BNTS[0, :, num_queries - 1, : num_memory + num_queries]
        self.position_bias_LNQ[layer, :, :num_seen] = last_NS[:, -num_seen:].flip(-1).cpu()
        self.log_denominator_LNQ[layer, :, queries] = _log_denominator(terms)[:, :num_queries].cpu()
        self.first_seen_Q[queries] = (torch.arange(start, stop) + 1 - (window or num_keys)).clamp(min=first_key)

    @property
    def seen_QQ(self) -> Tensor:
        """Whether each query (first dimension) sees each key (second)."""
        position_Q = torch.arange(self.num_tokens)
        return (position_Q <= position_Q[:, None]) & (position_Q >= self.first_seen_Q[:, None])

    def map_QQ(self, term: Term, layer: int, head: int) -> npt.NDArray[np.floating]:
        """Return a map of a head by query and key; nan where the query does not see the key."""
        position_Q = torch.arange(self.num_tokens)
        maps = {
            "content": self.content_LNQQ[layer, head],
            "position": self.position_LNQQ[layer, head],
            "content_bias": self.content_bias_LNQ[layer, head].expand(self.num_tokens, -1),
            "position_bias": self.position_bias_LNQ[layer, head][(position_Q[:, None] - position_Q).clamp(min=0)],
        }
        maps["score"] = maps["content"] + maps["position"] + maps["content_bias"] + maps["position_bias"]
        maps["probability"] = (maps["score"] - self.log_denominator_LNQ[layer, head, :, None]).exp()
        return maps[term].masked_fill(~self.seen_QQ, torch.nan).numpy()


def _log_denominator(terms: AttentionTerms) -> Tensor:
    """Return the log of each query's softmax denominator: score - log(probability) of its most probable key; (N, T)."""
    score_BNTS = terms.content_BNTS + terms.position_BNTS + terms.content_bias_BNTS + terms.position_bias_BNTS
    max_p_BNT, key_BNT = terms.probabilities_BNTS.max(-1)
    return (score_BNTS.gather(-1, key_BNT[..., None])[..., 0] - max_p_BNT.log())[0]
