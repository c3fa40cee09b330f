"""What attention looks at: how far back each head looks on average, and every term over a text (paper, appendix D).

A text is read with memory, segment by segment, and layer after layer within it. Each layer's numbers are taken when it
shows them and then let go, so that means over a long text need no more memory than over a short one.

Where we differ: the paper averages over 640 tokens back that every query sees. Here what is seen is what the run is
evaluated with, and each distance is divided by the number of queries that had it in sight.

Letters: B rows, T queries of a segment, M memory slots, S = M + T keys, P distances, N heads, L layers, D model width,
K tokens of the text, Q tokens that are shown, as queries and as keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from transformer_xl.config import AbsoluteConfig, ShawConfig, UserError
from transformer_xl.evaluation.evaluate import EvaluationPlan, check_weights
from transformer_xl.evaluation.memory import memory_slots
from transformer_xl.evaluation.method import ProgressCallback, compute_context
from transformer_xl.model.kernels import AttentionTerms
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import LayerCache
from transformer_xl.model.transformer_xl import LayerTrace, TransformerXL
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
"""What can be shown of a head, in words."""


def terms_of(model: TransformerXL) -> dict[Term, str]:
    """What can be shown of this model: Shaw's encoding has no global terms."""
    missing = ("content_bias", "position_bias") if isinstance(model.config, ShawConfig) else ()
    return {term: words for term, words in TERMS.items() if term not in missing}


def number_of(count: int, name: str = "token") -> str:
    """A count and what is counted: 1 token, 2,048 tokens."""
    return f"{count:,} {name}" if count == 1 else f"{count:,} {name}s"


def with_terms(model: LanguageModel) -> TransformerXL:
    """The model, if its attention can be taken apart.

    Raises:
        UserError: it does not attend, or attends by the place in the segment, without terms and without memory.
    """
    if isinstance(model, TransformerXL):
        return model
    lacks = (
        "attends without memory and without terms" if isinstance(model.config, AbsoluteConfig) else "does not attend"
    )
    raise UserError(
        f"{model.config.architecture} {lacks}, so there is no picture of it; give a run of transformer-xl or shaw"
    )


@dataclass(frozen=True)
class LayerView:
    """What one layer looked at in one segment."""

    layer: int
    begin: int
    """Place in the text of the first query."""
    valid: int
    """Memory slots that hold something, the last ones."""
    terms: AttentionTerms
    """Of one row (B = 1)."""


Taker = Callable[[LayerView], None]
"""Takes what it needs of a layer; the layer's numbers are let go when it returns."""


def look(
    model: TransformerXL,
    tokens_K: Tokens,
    plan: EvaluationPlan,
    takers: Sequence[Taker],
    progress: ProgressCallback | None = None,
) -> None:
    """Reads a text from an empty memory on and shows every layer of every segment to the takers, in order.

    Args:
        model: in evaluation mode.
        tokens_K: what is read, each token once; the vocabulary's start token is not put before it.
        plan: segment and reach; the rest of it has no meaning here.
        takers: are given each layer once.
        progress: told how many tokens were read.

    Raises:
        UserError: a weight that is not a number, or weights so large that what a layer computes is none.
    """
    assert not model.training
    check_weights(model)
    device, context_limits = next(model.parameters()).device, plan.context_limits
    # slots that the text never fills change nothing, unless they are attended
    slots = memory_slots(model, len(tokens_K), plan)
    memory = model.initial_memory(1, replace(context_limits, memory_length=slots))
    for begin in range(0, len(tokens_K), plan.segment_length):
        ids_T = np.asarray(tokens_K[begin : begin + plan.segment_length], dtype=np.int64)
        with compute_context(device, "float32"):
            tokens_BT = torch.from_numpy(ids_T)[None].to(device)
            caches: list[LayerCache] = []
            for layer, trace in enumerate(model.trace(tokens_BT, memory)):
                _check_finite(trace, layer)
                view = LayerView(layer, begin, min(begin, context_limits.memory_length), trace.terms)
                for take in takers:
                    take(view)
                caches.append(trace.cache)
            memory = memory.advance(caches, len(ids_T))
        if progress:
            progress(len(ids_T))


def _check_finite(trace: LayerTrace, layer: int) -> None:
    shown = (trace.output_BTD, trace.terms.content_BNTS, trace.terms.position_BNTS)
    if not torch.stack([numbers.isfinite().all() for numbers in shown]).all():
        raise UserError(
            f"layer {layer} computes numbers that are infinite or not numbers: the weights are too large; train again "
            "with a lower learning rate, or take other weights (--weights best or last)"
        )


def by_distance(x_BNTS: Tensor, num_distances: int) -> Tensor:
    """Numbers of queries and keys of one row as those of queries and distances 0, 1, ...: (N, T, P).

    Places before the first key are 0.
    """
    num_queries, num_keys = x_BNTS.shape[-2:]
    query_T = torch.arange(num_queries, device=x_BNTS.device)
    distance_P = torch.arange(num_distances, device=x_BNTS.device)
    key_TP = num_keys - num_queries + query_T[:, None] - distance_P
    x_NTP = x_BNTS[0].gather(-1, key_TP.clamp(min=0).expand(x_BNTS.shape[1], -1, -1))
    return x_NTP.masked_fill(key_TP < 0, 0)


class AttentionMeans:
    """Mean attention of every head by distance, over all queries of a text that had their memory full.

    Queries of the segments that are read before the memory is full do not count, because they see fewer keys and give
    more to each; in a text too short to fill the memory, all count. A segment's later queries see further than its
    first, so each distance is divided by the number of counted queries that had it in sight.
    """

    def __init__(self, model: TransformerXL, plan: EvaluationPlan, num_tokens: int) -> None:
        num_distances = min(distances_seen(plan), num_tokens)
        shape = (model.config.n_layers, model.config.n_heads)
        before = -(-plan.context_limits.memory_length // plan.segment_length) * plan.segment_length
        self.fills_memory = num_tokens > before
        """Whether the text is long enough for queries that have their memory full."""
        self._least_valid = plan.context_limits.memory_length if self.fills_memory else 0
        self.num_queries = 0
        """How many counted."""
        self.count_P = torch.zeros(num_distances, dtype=torch.int64)
        """How many of them had each distance in sight."""
        self._sum_LNP = torch.zeros(*shape, num_distances, dtype=torch.float64)
        self._entropy_LN = torch.zeros(shape, dtype=torch.float64)

    def add(self, view: LayerView) -> None:
        """Takes a layer of a segment."""
        if view.valid < self._least_valid:
            return
        p_BNTS = view.terms.probabilities_BNTS
        num_queries = p_BNTS.shape[2]
        seen_TP = torch.arange(len(self.count_P)) <= view.valid + torch.arange(num_queries)[:, None]
        if view.layer == 0:
            self.num_queries += num_queries
            self.count_P += seen_TP.sum(0)
        p_NTP = by_distance(p_BNTS, len(self.count_P)).masked_fill(~seen_TP.to(p_BNTS.device), 0)
        # no float64 on some devices, so sums of a segment are made there and added up here
        self._sum_LNP[view.layer] += p_NTP.sum(1).cpu().double()
        self._entropy_LN[view.layer] += torch.special.entr(p_BNTS[0]).sum((-1, -2)).cpu().double()

    def mean_LNP(self, back: int) -> npt.NDArray[np.float64]:
        """Mean probability at distances 0 to `back`; not a number where no counted query had that distance in sight."""
        mean_LNP = self._sum_LNP / self.count_P.double().where(self.count_P > 0, torch.nan)
        return mean_LNP[..., : back + 1].numpy()

    @property
    def distance_LN(self) -> npt.NDArray[np.float64]:
        """How far back each head looks, in tokens: the mean of the distance under its probabilities."""
        distance_P = torch.arange(len(self.count_P), dtype=torch.float64)
        return ((self._sum_LNP * distance_P).sum(-1) / self.num_queries).numpy()

    @property
    def entropy_LN(self) -> npt.NDArray[np.float64]:
        """How spread each head's attention is, in nats: 0 for a single key, ln(n) for n keys alike."""
        return (self._entropy_LN / self.num_queries).numpy()


def distances_seen(plan: EvaluationPlan) -> int:
    """P: how many distances, 0 included, the last query of a segment sees beside a full memory."""
    num_keys = plan.context_limits.memory_length + plan.segment_length
    return min(num_keys, plan.context_limits.attention_window or num_keys)


class TermMaps:
    """Every term of every head over the first Q tokens of a text.

    Terms (c) and (d) are kept by key and by distance, which is all they depend on. Probabilities are made from scores
    when asked for, with the total that each query divides by: it may have seen empty memory slots too.
    """

    def __init__(self, model: TransformerXL, num_tokens: int) -> None:
        shape = (model.config.n_layers, model.config.n_heads)
        self.num_tokens = num_tokens
        self.shape = shape
        self.terms = terms_of(model)
        dtype = next(model.parameters()).dtype
        self.content_LNQQ, self.position_LNQQ = (
            torch.zeros(*shape, num_tokens, num_tokens, dtype=dtype) for _ in range(2)
        )
        """Terms (a) and (b), queries and keys."""
        self.content_bias_LNQ = torch.zeros(*shape, num_tokens, dtype=dtype)
        """Term (c), by key."""
        self.position_bias_LNQ = torch.zeros(*shape, num_tokens, dtype=dtype)
        """Term (d), by distance."""
        self.log_total_LNQ = torch.zeros(*shape, num_tokens, dtype=dtype)
        """What each query subtracts from its scores, so that exp gives probabilities."""
        self.first_seen_Q = torch.zeros(num_tokens, dtype=torch.int64)
        """The first token that each query sees."""
        self._window: int | None = None

    def taker(self, plan: EvaluationPlan) -> Taker:
        """What `look` is given, with that plan; views beyond the first Q tokens are passed over."""

        def take(view: LayerView) -> None:
            num = min(plan.segment_length, self.num_tokens - view.begin)
            if num > 0:
                self._add(view, num, plan.context_limits.attention_window)

        return take

    def _add(self, view: LayerView, num: int, window: int | None) -> None:
        layer, begin, terms = view.layer, view.begin, view.terms
        num_queries, num_keys = terms.content_BNTS.shape[-2:]
        num_memory = num_keys - num_queries
        queries, slots = slice(begin, begin + num), slice(num_memory - view.valid, num_memory + num)
        keys = slice(begin - view.valid, begin + num)
        self.content_LNQQ[layer, :, queries, keys] = terms.content_BNTS[0, :, :num, slots].cpu()
        self.position_LNQQ[layer, :, queries, keys] = terms.position_BNTS[0, :, :num, slots].cpu()
        own = terms.content_bias_BNTS[0].diagonal(num_memory, -2, -1)  # each query's own key, which it always sees
        self.content_bias_LNQ[layer, :, queries] = own[:, :num].cpu()
        seen = min(view.valid + num, window or num_keys)
        last_NS = terms.position_bias_BNTS[0, :, num - 1]
        self.position_bias_LNQ[layer, :, :seen] = last_NS[:, : num_memory + num][:, -seen:].flip(-1).cpu()
        self.log_total_LNQ[layer, :, queries] = _log_total(terms)[:, :num].cpu()
        place_T = torch.arange(begin, begin + num)
        nearest = torch.full_like(place_T, begin - view.valid)
        self.first_seen_Q[queries] = nearest if window is None else nearest.maximum(place_T - window + 1)

    @property
    def seen_QQ(self) -> Tensor:
        """Which token (second) each token (first) sees, as bool."""
        place_Q = torch.arange(self.num_tokens)
        return (place_Q <= place_Q[:, None]) & (place_Q >= self.first_seen_Q[:, None])

    def map_QQ(self, term: Term, layer: int, head: int) -> npt.NDArray[np.floating]:
        """A head's numbers of that name, queries and keys; not a number where a key is not seen."""
        place_Q = torch.arange(self.num_tokens)
        distance_QQ = (place_Q[:, None] - place_Q).clamp(min=0)
        parts = {
            "content": self.content_LNQQ[layer, head],
            "position": self.position_LNQQ[layer, head],
            "content_bias": self.content_bias_LNQ[layer, head].expand(self.num_tokens, -1),
            "position_bias": self.position_bias_LNQ[layer, head][distance_QQ],
        }
        if term in parts:
            found_QQ = parts[term]
        else:
            found_QQ = parts["content"] + parts["position"] + parts["content_bias"] + parts["position_bias"]
            if term == "probability":
                found_QQ = (found_QQ - self.log_total_LNQ[layer, head, :, None]).exp()
        return found_QQ.masked_fill(~self.seen_QQ, torch.nan).numpy()


def _log_total(terms: AttentionTerms) -> Tensor:
    """Log of the sum of the exponentials of all scores that a query sees, from its likeliest key: (N, T)."""
    score_BNTS = terms.content_BNTS + terms.position_BNTS + terms.content_bias_BNTS + terms.position_bias_BNTS
    highest_BNT, key_BNT = terms.probabilities_BNTS.max(-1)
    return (score_BNTS.gather(-1, key_BNT[..., None])[..., 0] - highest_BNT.log())[0]
