"""Filling of blanks in a text, given what is on both sides of them, with a model of two streams (XLNet).

    infill(run, "The capital of ___ is Paris.", num_tokens=1)

Blanks are filled from left to right, and the tokens of a blank too; each is sampled given the text, what was sampled
before it, and the places of what is still blank, whose tokens nothing sees. The text around a blank is read as one
block of the model's `perm_size` tokens, the blank near its middle, and what is before the block with memory.

Shape suffixes: B samples, T tokens of the block, K tokens of the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Unpack, override

from transformer_xl.config import EvaluationConfig, UserError, check_type
from transformer_xl.device import autocast
from transformer_xl.display import Displayed
from transformer_xl.evaluation.plan import EvaluationPlan
from transformer_xl.generation.generate import resolve_config
from transformer_xl.generation.generation_config import GenerationConfig
from transformer_xl.generation.sampling import sample
from transformer_xl.run import Run, check_run
from transformer_xl.text.tokenizers import Tokenizer, document_errors, to_bytes
from transformer_xl.xlnet.two_streams import XLNet, visible_in_order

if TYPE_CHECKING:
    from transformer_xl.config.typed_settings import GenerationSettings

BLANK = "___"


@dataclass(frozen=True, repr=False)
class Infilling(Displayed):
    """A text whose blanks are filled."""

    text: str
    """The whole text."""
    filled: tuple[str, ...]
    """The text in each blank."""
    token_ids: tuple[int, ...]
    """The tokens of the whole text."""
    logprob: float
    """Natural log-probability of all that was filled in, under the model, before any processing of the logits."""

    @override
    def summary(self) -> dict[str, Any]:
        return self.details()

    @override
    def details(self) -> dict[str, Any]:
        return {"text": self.text, "filled": list(self.filled), "logprob": self.logprob}


@torch.no_grad()
def infill(
    run: Run,
    text: str | bytes,
    config: GenerationConfig | None = None,
    *,
    num_tokens: int = 8,
    blank: str = BLANK,
    **overrides: Unpack[GenerationSettings],
) -> list[Infilling]:
    """Sample what stands in the blanks of a text.

    Args:
        run: a loaded run of architecture xlnet.
        text: the text, with a mark at each blank.
        config: settings of sampling (temperature, top_k, top_p, min_p, greedy, seed, num_samples), memory_length and
            dtype; others have no effect.
        num_tokens: number of tokens in each blank.
        blank: the mark.
        overrides: settings by name, which override those of `config`.

    Returns:
        `num_samples` texts.

    Raises:
        UserError: the model does not read to both sides, the text has no blank or cannot be encoded, or a blank is
            longer than a block.
    """
    check_run(run)
    check_type(text, (str, bytes), "text", "give a text with blanks")
    check_type(num_tokens, int, "num_tokens", "give the number of tokens in each blank")
    config, tokenizer, model = resolve_config(run.tokenizer, config, overrides), run.tokenizer, run.model
    reading: dict[str, Any] = {"attention_window": None}  # one of the run is for reading from left to right
    reading |= {} if config.memory_length is None else {"memory_length": config.memory_length}
    plan = EvaluationPlan.of_run(run, EvaluationConfig(method="both-sides", dtype=config.dtype, **reading))
    assert isinstance(model, XLNet)  # the plan is of such a model
    block, content, mark = model.config.perm_size, to_bytes(text), to_bytes(blank)
    if not mark or mark not in content:
        raise UserError(f"the text has no blank; write {blank or BLANK} where something is missing")
    if not 1 <= num_tokens <= block:
        raise UserError(f"num_tokens {num_tokens}: must be 1 to {block:,}, a block of the model (perm_size)")
    parts = [_encode(tokenizer, part) for part in content.split(mark)]
    starts = list(accumulate(len(part) + num_tokens for part in parts[:-1]))
    blanks = [range(stop - num_tokens, stop) for stop in starts]
    ids_K = [token for part in parts for token in [*part, *[0] * num_tokens]][:-num_tokens]
    ids_BK = torch.tensor([ids_K]).repeat(config.num_samples, 1)
    generators = [np.random.default_rng(config.seed + index) for index in range(config.num_samples)]
    logprob_B = torch.zeros(config.num_samples, dtype=torch.float64)
    with ExitStack() as stack:
        stack.callback(model.train, model.training)
        model.eval()
        stack.enter_context(autocast(model.device, plan.dtype))
        for number, places in enumerate(blanks):
            hidden = [place for one in blanks[number:] for place in one]
            for place, logits_BV in _predictions(model, plan, ids_BK, places, hidden):
                token_B = sample(logits_BV, config, generators).cpu()
                ids_BK[:, place] = token_B
                logprob_BV = logits_BV.double().log_softmax(-1).cpu()
                logprob_B += logprob_BV.gather(1, token_B[:, None])[:, 0]
    return [
        Infilling(
            text=tokenizer.decode(ids_T),
            filled=tuple(tokenizer.decode(ids_T[one.start : one.stop]) for one in blanks),
            token_ids=tuple(ids_T),
            logprob=logprob,
        )
        for ids_T, logprob in zip(ids_BK.tolist(), logprob_B.tolist(), strict=True)
    ]


def _predictions(
    model: XLNet, plan: EvaluationPlan, ids_BK: Tensor, places: range, hidden: list[int]
) -> Iterator[tuple[int, Tensor]]:
    """Yield each place of a blank with its logits (B, V); the caller fills it in `ids_BK` before the next one.

    Args:
        model: the model.
        plan: how the text is read.
        ids_BK: the tokens; those of blanks that are not filled yet may be any.
        places: those of the blank.
        hidden: the places of this blank and of those after it, in order.
    """
    block = model.config.perm_size
    start = max(0, min(places.start - (block - len(places)) // 2, ids_BK.shape[1] - block))
    read = range(start, min(ids_BK.shape[1], start + block))
    limits = plan.context_limits
    if not model.config.attends_empty_slots:
        limits = replace(limits, memory_length=min(limits.memory_length, start))
    memory = model.initial_memory(len(ids_BK), limits)
    for first in range(0, start, block):
        memory = model.two_streams(ids_BK[:, first : min(first + block, start)], memory).memory
    rank_K = torch.full((ids_BK.shape[1],), -1)
    rank_K[hidden] = torch.arange(len(hidden))
    visible_1TT = visible_in_order(rank_K[None, read.start : read.stop])
    for place in places:
        targets_B1 = torch.full((len(ids_BK), 1), place - start)
        streams = model.two_streams(
            ids_BK[:, read.start : read.stop],
            memory,
            visible=visible_1TT.expand(len(ids_BK), -1, -1),
            targets=targets_B1,
        )
        yield place, model.logits(streams.query_BQD)[:, 0]


def _encode(tokenizer: Tokenizer, content: bytes) -> list[int]:
    if not content:
        return []
    with document_errors("the text"):
        return tokenizer.encode_chunk(content).ids.tolist()
