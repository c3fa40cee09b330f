"""Sampling the next token from the model's logits.

Shape suffixes: B batch rows, V vocabulary (or candidates from it), K earlier tokens (in `mask_tokens`: banned tokens),
T generated tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from transformer_xl.config import UserError
from transformer_xl.generation.generation_config import GenerationConfig

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
"""Changes the logits before each token is chosen: `process(token_ids_BT, logits_BV) -> logits_BV`.

Called with the tokens generated so far (T is 0 at first; the prompt is not among them) and the logits of the next one,
for the sequences that are not finished (`BatchGenerator.active`). A token with logit -inf is never chosen. Neither
tensor may be changed in place.
"""


def sample(logits_BV: Tensor, config: GenerationConfig, generators: Sequence[np.random.Generator]) -> Tensor:
    """Choose one index into the last dimension of each row.

    The repetition penalty is not applied here, as it needs the logits of the whole vocabulary.

    Args:
        logits_BV: logits of the whole vocabulary, or of the candidates that `LanguageModel.topk` returned.
        config: temperature, greedy, top_k, top_p and min_p.
        generators: one for each row. Sampling happens on the CPU, so that a seed gives the same text on
            every device that computes the same logits.

    Returns:
        int64 indices (B,).

    Raises:
        UserError: logits that are not finite, or a row without any token to choose.
    """
    if config.is_greedy:
        best_B, index_B = logits_BV.max(-1)
        check_logits(best_B)
        return index_B
    probability_BV = sampling_probabilities(logits_BV, config).cpu()
    if bool(probability_BV.isnan().any()):
        check_logits(logits_BV.amax(-1))
    # the least of these draws, each divided by its probability, is at an index drawn with these probabilities
    drawn = np.empty(probability_BV.shape)
    for row, generator in zip(drawn, generators, strict=True):
        generator.standard_exponential(out=row)
    draw_BV = torch.from_numpy(drawn).clamp_(min=torch.finfo(torch.float64).tiny)  # 0 / 0 would be chosen
    return (probability_BV / draw_BV).argmax(-1).to(logits_BV.device)


def sampling_probabilities(logits_BV: Tensor, config: GenerationConfig) -> Tensor:
    """Return the distribution that is sampled from, float32 (B, V): temperature, then top-k, top-p and min-p."""
    assert not config.is_greedy
    logits_BV = logits_BV.float()
    # subtracting the maximum and bounding the divisor keeps every temperature from overflowing to nan
    logits_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)) / max(config.temperature, 1e-30)
    top_k = config.effective_top_k  # top_k with "auto" resolved, or None for no limit
    if top_k is not None and top_k < logits_BV.shape[-1]:
        # stable: among equal logits the first are kept
        rank_BV = logits_BV.argsort(descending=True, stable=True).argsort()
        logits_BV = logits_BV.masked_fill(rank_BV >= top_k, -torch.inf)
    if config.top_p is not None:
        sorted_BV, order_BV = logits_BV.sort(descending=True, stable=True)
        probability_BV = sorted_BV.softmax(-1)
        # a token is kept while those before it have not reached top_p
        beyond_BV = probability_BV.cumsum(-1) - probability_BV >= config.top_p
        beyond_BV[..., 0] = False  # the most likely token is always kept, also if top_p is 0 in float32
        logits_BV = logits_BV.masked_fill(beyond_BV.gather(-1, order_BV.argsort()), -torch.inf)
    probability_BV = logits_BV.softmax(-1)
    if config.min_p is None:
        return probability_BV
    threshold_B1 = config.min_p * probability_BV.amax(-1, keepdim=True)
    probability_BV = probability_BV.masked_fill(probability_BV < threshold_B1, 0)
    return probability_BV / probability_BV.sum(-1, keepdim=True)


def apply_repetition_penalty(logits_BV: Tensor, earlier_BK: Tensor, penalty: float) -> Tensor:
    """Divide the logits of earlier tokens by the penalty, or multiply them where negative; once for each token, however
    often it occurred.

    CTRL (Keskar et al. 2019, section 4.1) divides only; negative logits are multiplied as by transformers'
    RepetitionPenaltyLogitsProcessor.
    """
    logit_BK = logits_BV.gather(-1, earlier_BK)
    logit_BK = torch.where(logit_BK > 0, logit_BK / penalty, logit_BK * penalty)
    return logits_BV.scatter(-1, earlier_BK, logit_BK)


def process_logits(process: LogitsProcessor, token_ids_BT: Tensor, logits_BV: Tensor) -> Tensor:
    """Call a logits processor and check the shape of what it returns.

    Raises:
        UserError: the processor did not return logits of the same shape.
    """
    processed_BV = process(token_ids_BT, logits_BV)
    if not isinstance(processed_BV, Tensor) or processed_BV.shape != logits_BV.shape:
        result = tuple(processed_BV.shape) if isinstance(processed_BV, Tensor) else type(processed_BV).__name__
        raise UserError(
            f"logits_processor returned {result}; expected logits of the same shape, {tuple(logits_BV.shape)}"
        )
    return processed_BV


def mask_tokens(banned: Collection[int], logits_BV: Tensor, ids_BV: Tensor | None) -> Tensor:
    """Set the logits of banned tokens to -inf.

    Args:
        banned: token ids.
        logits_BV: logits, or log-probabilities.
        ids_BV: the token id of each logit, or None if the logits are those of the whole vocabulary.
    """
    banned_K = torch.tensor(sorted(banned), device=logits_BV.device)
    if ids_BV is None:
        return logits_BV.index_fill(-1, banned_K, -torch.inf)
    return logits_BV.masked_fill(torch.isin(ids_BV, banned_K), -torch.inf)


def check_logits(max_B: Tensor) -> None:
    """Check that every row has a token to choose, given the highest logit of each.

    Raises:
        UserError: a row has no token left, or its logits are not finite.
    """
    if bool((max_B == -torch.inf).any()):
        raise UserError("no token is left to choose from; logits_processor and eos_token_ids must leave at least one")
    if not bool(max_B.isfinite().all()):
        raise UserError(
            "the model's logits are not finite numbers: its weights are damaged, or its training diverged; "
            "use other weights (checkpoint=best or checkpoint=last)"
        )
