"""Token after token: prompts are read into memory, then each chosen token is read back in.

    writer = Writer(model, [prompt])
    while writer.rows:
        for made in writer.step(): ...

It knows token numbers alone, so music and proteins need no vocabulary of text. A row is what is written after one
prompt; the rows of a batch do not see each other, and a row that has ended leaves the batch.

Shape suffixes: B rows, T tokens, D model width, R candidates, V vocabulary, K tokens that stood there before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral

import torch
from torch import Tensor

from transformer_xl.config import UserError
from transformer_xl.generation.sampling import Sampler
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import Memory

# tokens of a prompt read at once: bounds the work space; changes no number beyond rounding where memory holds the
# prompt or the window, else it bounds what the prompt's tokens see of one another
_PROMPT_SEGMENT = 512

Adjust = Callable[[Tensor, Tensor], Tensor]
"""A hook: tokens made so far (B, T), T from 0 on, and scores of the next one (B, V); gives the scores to choose by.

Rows are those still being written (`Writer.rows`). A token whose score is -inf is never chosen. Neither tensor is to
be changed in place.
"""


@dataclass(frozen=True)
class GeneratedToken:
    """One token of one row."""

    row: int
    """Which row, from 0 on, counting those that have ended."""
    token: int
    logprob: float | None
    """Natural logarithm of the probability that the model gives it, before anything of the sampler; none: not asked."""
    ended: bool
    """Whether it is one of the ids that end a text, so that its row is done."""


@dataclass(frozen=True)
class _Group:
    """Rows with a memory in common, and for each the token made last, which the memory has not read."""

    rows: list[int]
    memory: Memory
    unread_B1: Tensor


class BatchGenerator:
    """Writes several rows at once, and holds what that takes: their memory, and how each token is chosen."""

    def __init__(
        self,
        model: LanguageModel,
        prompts: Sequence[Sequence[int]],
        sampler: Sampler | None = None,
        *,
        seed: int = 0,
        samples: int = 1,
        memory: Memory | None = None,
        end_ids: Collection[int] = (),
        min_tokens: int = 0,
        adjust: Adjust | None = None,
        scored: bool = False,
    ) -> None:
        """Reads the prompts.

        Args:
            model: any language model, in evaluation mode.
            prompts: token numbers, one or more each, of any lengths; longer than the memory is fine, attention then
                sees the end of it.
            sampler: how a token is chosen; none: from the whole distribution.
            seed: of the random choices. Row r draws from a generator of its own with seed + r, so what it becomes does
                not hang on the rows beside it.
            samples: rows written after each prompt, which is read once; rows 0 to samples - 1 go on from the first.
            memory: a row for each prompt, what was read before it; none: nothing. It is not changed.
            end_ids: tokens that end a row.
            min_tokens: so many tokens are made before one that ends the row may be chosen.
            adjust: changes the scores before each choice, after the repetition penalty and before all else.
            scored: find each token's log-probability too (one more pass over the output weights).

        Raises:
            UserError: an empty prompt, token numbers the model does not know, a memory of other rows, a seed or a
                number out of range, or a model in training mode.
        """
        if model.training:
            raise UserError("the model is in training mode, where dropout disturbs it; call model.eval() first")
        if samples < 1:
            raise UserError(f"{samples} samples wanted; give 1 or more")
        if not 0 <= seed < 2**63:
            raise UserError(f"seed {seed}: wanted 0 or more, below 2**63")
        self._model, self._sampler = model, sampler or Sampler()
        self._end_ids, self._min_tokens = frozenset(end_ids), min_tokens
        self._adjust, self._scored = adjust, scored
        check_tokens(model, prompts, self._end_ids)
        with torch.inference_mode():
            hidden_B1D, memory = read_prompts(model, prompts, memory)
            if samples > 1:
                chosen_B = torch.arange(len(prompts), device=hidden_B1D.device).repeat_interleave(samples)
                hidden_B1D, memory = hidden_B1D[chosen_B], memory.select(chosen_B)
        self._hidden_B1D, self._memory = hidden_B1D, memory
        self.rows = list(range(len(prompts) * samples))
        """Rows that are still being written."""
        self._num_made = 0
        self._unread_B1: Tensor | None = None
        self._ended: list[_Group] = []
        self._generators = [torch.Generator().manual_seed(seed + row) for row in self.rows]
        # the hook sees all that was made, the penalty the last tokens of prompt and text
        self._made_BT = torch.empty(len(self.rows), 0, dtype=torch.int64, device=hidden_B1D.device)
        window = self._sampler.repetition_window
        self._earlier_BK = _ends_of(prompts, window).repeat_interleave(samples, 0).to(hidden_B1D.device)

    def step(self) -> list[GeneratedToken]:
        """Makes one more token in each row that has not ended, in the order of `rows`.

        Raises:
            UserError: the model's scores are not numbers, or the hook gave none to choose from.
        """
        assert self.rows
        with torch.inference_mode():
            if self._unread_B1 is not None:
                self._hidden_B1D, self._memory = self._model(self._unread_B1, self._memory)
            token_B = self._choose()
            self._unread_B1 = token_B[:, None]
            tokens = token_B.tolist()
            nats = [None] * len(tokens)
            if self._scored:
                nats = self._model.nats(self._hidden_B1D, self._unread_B1.cpu())[:, 0].tolist()
            self._remember(token_B)
        self._num_made += 1
        made = [
            GeneratedToken(row, token, None if loss is None else -loss, token in self._end_ids)
            for row, token, loss in zip(self.rows, tokens, nats, strict=True)
        ]
        if self._end_ids:
            self.stop([one.row for one in made if one.ended])
        return made

    def stop(self, rows: Collection[int]) -> None:
        """Lets these rows end here; they leave the batch, and their memory is kept for `memory`."""
        gone = [place for place, row in enumerate(self.rows) if row in rows]
        if not gone:
            return
        assert self._unread_B1 is not None, "a row ends with a token"
        stay = [place for place, row in enumerate(self.rows) if row not in rows]
        with torch.inference_mode():
            leaving = self._memory.select(gone) if stay else self._memory
            self._ended.append(_Group([self.rows[place] for place in gone], leaving, self._unread_B1[gone]))
            self.rows = [self.rows[place] for place in stay]
            if stay:
                self._memory = self._memory.select(stay)
            self._unread_B1, self._hidden_B1D = self._unread_B1[stay], self._hidden_B1D[stay]
            self._made_BT, self._earlier_BK = self._made_BT[stay], self._earlier_BK[stay]
        self._generators = [self._generators[place] for place in stay]

    def memory(self) -> Memory:
        """The memory of all rows in their order, ended or not, after all that was read and made; writing can go on.

        To be handed in with the next prompts, as in a conversation. Each call reads the token made last.
        """
        if self._unread_B1 is None:
            return self._memory
        groups = self._ended + ([_Group(self.rows, self._memory, self._unread_B1)] if self.rows else [])
        order = [row for group in groups for row in group.rows]
        with torch.inference_mode():
            memory, unread_B1 = groups[0].memory, groups[0].unread_B1
            if len(groups) > 1:
                memory = Memory.concatenate([group.memory for group in groups])
                unread_B1 = torch.cat([group.unread_B1 for group in groups])
            _, memory = self._model(unread_B1, memory)
            if order != sorted(order):
                memory = memory.select(sorted(range(len(order)), key=order.__getitem__))
        return memory

    def _choose(self) -> Tensor:
        """The next token of each row, (B,); scores no more of the vocabulary than is needed."""
        sampler, barred = self._sampler, self._end_ids if self._num_made < self._min_tokens else frozenset[int]()
        whole = self._adjust is not None or sampler.repetition_penalty != 1 or sampler.candidates is None
        if whole:
            scores_BR, ids_BR = self._adjusted(self._model.logits(self._hidden_B1D)[:, 0]), None
            if sampler.candidates is not None:
                most = min(sampler.candidates + len(barred), scores_BR.shape[-1])
                scores_BR, ids_BR = scores_BR.topk(most)
        else:
            assert sampler.candidates is not None
            scores_B1R, ids_B1R = self._model.topk(self._hidden_B1D, sampler.candidates + len(barred))
            scores_BR, ids_BR = scores_B1R[:, 0], ids_B1R[:, 0]
        if barred:
            scores_BR = without(barred, scores_BR, ids_BR)
        place_B = sampler.choose(scores_BR, *self._generators)
        return place_B if ids_BR is None else ids_BR.gather(-1, place_B[:, None])[:, 0]

    def _adjusted(self, logits_BV: Tensor) -> Tensor:
        if self._sampler.repetition_penalty != 1:
            logits_BV = self._sampler.penalised(logits_BV, self._earlier_BK)
        return logits_BV if self._adjust is None else adjusted(self._adjust, self._made_BT, logits_BV)

    def _remember(self, token_B: Tensor) -> None:
        if self._adjust is not None:
            self._made_BT = torch.cat([self._made_BT, token_B[:, None]], 1)
        if self._sampler.repetition_penalty != 1:
            window = self._sampler.repetition_window
            self._earlier_BK = torch.cat([self._earlier_BK, token_B[:, None]], 1)[:, -window:]


def read_prompts(
    model: LanguageModel, prompts: Sequence[Sequence[int]], memory: Memory | None
) -> tuple[Tensor, Memory]:
    """Reads prompts of any lengths; gives each row's last hidden row (B, 1, D), before the next token, and the memory.

    They end at the same place, with padding before the shorter ones. Parts are counted from the end, so that a prompt
    is cut at the same places whatever stands beside it.
    """
    if memory is None:
        memory = model.inference_memory(len(prompts))
    longest = max(map(len, prompts))
    tokens_BT = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row_T, prompt in zip(tokens_BT, prompts, strict=True):
        row_T[longest - len(prompt) :] = torch.tensor(list(prompt))
    tokens_BT = tokens_BT.to(next(model.parameters()).device)
    lengths_B = torch.tensor([len(prompt) for prompt in prompts])
    hidden_BTD = None
    for start, stop in pairwise(sorted({0, *range(longest, 0, -_PROMPT_SEGMENT)})):
        part_BT = tokens_BT[:, start:stop]
        own_B = (lengths_B - (longest - stop)).clamp(0, stop - start)
        if bool((own_B == stop - start).all()):
            hidden_BTD, memory = model(part_BT, memory)
        else:
            hidden_BTD, memory = model(part_BT, memory, lengths_B=own_B.to(tokens_BT.device))
    assert hidden_BTD is not None
    return hidden_BTD[:, -1:], memory


def check_tokens(model: LanguageModel, prompts: Sequence[Sequence[int]], end_ids: Collection[int]) -> None:
    """Refuses prompts and ids that end a text which the model cannot know.

    Raises:
        UserError: no prompt, an empty one, or a token number out of range.
    """
    if not len(prompts):
        raise UserError("no prompt was given; give at least one")
    if not all(len(prompt) for prompt in prompts):
        raise UserError("the prompt is empty; give at least one token")
    if not all(isinstance(token, Integral) for prompt in prompts for token in prompt):
        raise UserError("prompts are token numbers, and something else was given; give whole numbers")
    known = model.config.vocab_size
    for what, ids in [("token", max(map(max, prompts))), ("token", min(map(min, prompts))), *_ends(end_ids)]:
        if not 0 <= ids < known:
            raise UserError(f"{what} {ids} is not one of the {known:,} the model knows; give 0 to {known - 1}")


def _ends(end_ids: Collection[int]) -> list[tuple[str, int]]:
    return [("end id", one) for one in end_ids]


def without(barred: Collection[int], scores_BR: Tensor, ids_BR: Tensor | None) -> Tensor:
    """The scores with -inf for barred tokens; `ids_BR` says which token each score is of, none: it is its place."""
    barred_K = torch.tensor(sorted(barred), device=scores_BR.device)
    if ids_BR is None:
        return scores_BR.index_fill(-1, barred_K, -torch.inf)
    return scores_BR.masked_fill(torch.isin(ids_BR, barred_K), -torch.inf)


def adjusted(adjust: Adjust, made_BT: Tensor, logits_BV: Tensor) -> Tensor:
    """What the hook makes of the scores.

    Raises:
        UserError: it gives something else than scores of every token.
    """
    changed_BV = adjust(made_BT, logits_BV)
    if not isinstance(changed_BV, Tensor) or changed_BV.shape != logits_BV.shape:
        found = tuple(changed_BV.shape) if isinstance(changed_BV, Tensor) else type(changed_BV).__name__
        raise UserError(f"adjust gave {found}; wanted scores of the shape it was given, {tuple(logits_BV.shape)}")
    return changed_BV


def _ends_of(prompts: Sequence[Sequence[int]], window: int) -> Tensor:
    """The last tokens of each prompt (B, K); a short one is filled up in front with its own last token, which changes
    nothing, because that counts as having stood there anyway."""
    width = min(window, max(map(len, prompts)))
    rows = [list(prompt[-width:]) for prompt in prompts]
    return torch.tensor([[row[-1]] * (width - len(row)) + row for row in rows])
