"""Beam search: the likeliest continuations of one prompt, several kept side by side, each with its own memory.

Shape suffixes: B beams, T tokens made, D model width, R candidates.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_xl.config import UserError
from transformer_xl.generation.sampling import check_scores
from transformer_xl.generation.writer import Adjust, adjusted, check_tokens, read_prompts, without
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import Memory

_MOST_LOG = 600  # of length ** length_penalty, so that it is a number


@dataclass(frozen=True)
class Beams:
    """How far and how wide the search goes."""

    beams: int = 4
    """How many continuations are kept at each length, and given back."""
    tokens: int = 500
    """Most tokens of one."""
    length_penalty: float = 1.0
    """Continuations are ranked by log-probability / length ** length_penalty: above 0 favours long ones, 0 is the plain
    log-probability."""
    end_ids: tuple[int, ...] = ()
    """Tokens that end a continuation."""
    min_tokens: int = 0
    """So many tokens are made before one that ends it may be."""
    adjust: Adjust | None = None
    """Changes the scores before each step; log-probabilities are then those of the changed scores."""

    def __post_init__(self) -> None:
        if self.beams < 1:
            raise UserError(f"{self.beams} beams wanted; give 1 or more")
        if self.tokens < 1:
            raise UserError(f"{self.tokens} tokens wanted; give 1 or more")
        if not -float("inf") < self.length_penalty < float("inf"):
            raise UserError(f"length penalty {self.length_penalty}: wanted a number")
        if abs(self.length_penalty) * math.log(self.tokens) > _MOST_LOG:
            most = _MOST_LOG / math.log(self.tokens)
            raise UserError(f"length penalty {self.length_penalty}: wanted {-most:.0f} to {most:.0f} with these tokens")

    def score(self, logprob: float, length: int) -> float:
        """What continuations are ranked by (as in Wu et al. 2016, section 7, with the length itself)."""
        return logprob / length**self.length_penalty

    def best_to_come(self, logprob: float, length: int) -> float:
        """The best score that one of so many tokens can still reach, as a log-probability never rises."""
        return self.score(logprob, self.tokens if self.length_penalty > 0 else length + 1)


@dataclass(frozen=True)
class Hypothesis:
    """A continuation that was found."""

    tokens: tuple[int, ...]
    """With the one that ended it."""
    logprobs: tuple[float, ...]
    """Of each token, natural logarithms."""
    score: float
    """What it is ranked by."""
    ended: bool
    """Whether one of the ids that end a text ended it, or the number of tokens."""

    @property
    def logprob(self) -> float:
        """Of all its tokens together."""
        return sum(self.logprobs)


_EMPTY = Hypothesis((), (), 0.0, ended=False)


def beam_search(
    model: LanguageModel, prompt: Sequence[int], settings: Beams, memory: Memory | None = None
) -> list[Hypothesis]:
    """The best continuations that were found, best first; at most `settings.beams`.

    With as many beams as there are continuations the search is exhaustive. It ends once no beam can still do better
    than the worst of the continuations that ended.

    Args:
        model: any language model, in evaluation mode.
        prompt: token numbers, one or more.
        settings: how far and how wide.
        memory: of one row, what was read before the prompt; none: nothing. It is not changed.

    Raises:
        UserError: an empty prompt, token numbers the model does not know, a memory of other rows, scores that are not
            numbers, or a model in training mode.
    """
    if model.training:
        raise UserError("the model is in training mode, where dropout disturbs it; call model.eval() first")
    check_tokens(model, [prompt], settings.end_ids)
    live: list[Hypothesis] = [_EMPTY]
    found: list[Hypothesis] = []
    with torch.inference_mode():
        hidden_B1D, memory = read_prompts(model, [prompt], memory)
        for length in range(1, settings.tokens + 1):
            ended, live, parents = _extended(settings, live, *_likeliest(model, hidden_B1D, live, settings))
            found = _ranked([*found, *ended])[: settings.beams]
            if not live or length == settings.tokens:
                break
            best = max(settings.best_to_come(one.logprob, length) for one in live)
            if len(found) == settings.beams and found[-1].score >= best:
                live = []
                break
            if parents != list(range(memory.batch_size)):
                memory = memory.select(parents)
            last_B1 = torch.tensor([[one.tokens[-1]] for one in live], device=hidden_B1D.device)
            hidden_B1D, memory = model(last_B1, memory)
    return _ranked([*found, *live])[: settings.beams]


def _likeliest(
    model: LanguageModel, hidden_B1D: Tensor, live: list[Hypothesis], settings: Beams
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and ids of enough tokens after each beam: (B, R) each, the likeliest first."""
    barred = settings.end_ids if len(live[0].tokens) < settings.min_tokens else ()
    count = min(settings.beams + len(settings.end_ids), model.config.vocab_size)
    if settings.adjust is None:
        scores_B1R, ids_B1R = model.topk(hidden_B1D, count)
        # scores differ from log-probabilities by a constant, found from the likeliest token
        shift_B1 = scores_B1R[..., 0].double() + model.nats(hidden_B1D, ids_B1R[..., 0].cpu().contiguous()).double()
        found_BR, ids_BR = scores_B1R[:, 0].double() - shift_B1, ids_B1R[:, 0]
    else:
        made_BT = torch.tensor([one.tokens for one in live], dtype=torch.int64, device=hidden_B1D.device)
        logits_BV = adjusted(settings.adjust, made_BT, model.logits(hidden_B1D)[:, 0])
        check_scores(logits_BV.amax(-1))
        found_BR, ids_BR = F.log_softmax(logits_BV.double(), -1).topk(count)
    if barred:
        found_BR = without(barred, found_BR, ids_BR)
    check_scores(found_BR.amax(-1))
    return found_BR, ids_BR


def _extended(
    settings: Beams, live: list[Hypothesis], found_BR: Tensor, ids_BR: Tensor
) -> tuple[list[Hypothesis], list[Hypothesis], list[int]]:
    """Each beam with each candidate, the likeliest first, until there are enough that go on.

    Returns:
        those that ended on the way, those that go on, and which beam each of these came from.
    """
    sums_B1 = torch.tensor([[one.logprob] for one in live], dtype=torch.float64, device=found_BR.device)
    order = (sums_B1 + found_BR).flatten().argsort(descending=True, stable=True).tolist()
    each, ids = found_BR.tolist(), ids_BR.tolist()
    ended: list[Hypothesis] = []
    going_on: list[Hypothesis] = []
    parents: list[int] = []
    for place in order:
        beam, candidate = divmod(place, found_BR.shape[1])
        token, logprob = ids[beam][candidate], each[beam][candidate]
        if logprob == -float("inf"):
            break
        one = _with(live[beam], token, logprob, settings)
        if one.ended:
            ended.append(one)
        else:
            going_on.append(one)
            parents.append(beam)
        if len(going_on) == settings.beams:
            break
    return ended, going_on, parents


def _with(one: Hypothesis, token: int, logprob: float, settings: Beams) -> Hypothesis:
    logprobs = (*one.logprobs, logprob)
    return replace(
        one,
        tokens=(*one.tokens, token),
        logprobs=logprobs,
        score=settings.score(sum(logprobs), len(logprobs)),
        ended=token in settings.end_ids,
    )


def _ranked(hypotheses: Collection[Hypothesis]) -> list[Hypothesis]:
    return sorted(hypotheses, key=lambda one: -one.score)
