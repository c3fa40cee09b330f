"""Token after token: read the prompt into memory, then read each chosen token back in.

Shape suffixes: B rows, T new tokens, D model width, R candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from transformer_xl.config import UserError
from transformer_xl.evaluation.scoring import Plan
from transformer_xl.generation.sampling import Sampler
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import Memory
from transformer_xl.run_folder import Run
from transformer_xl.text.vocabulary import Vocabulary

# tokens of a prompt read at once: bounds the work space; changes no number beyond rounding where memory holds the
# prompt or the window, else it bounds what the prompt's tokens see of one another
_PROMPT_SEGMENT = 512


def read_prompt(model: LanguageModel, tokens_BT: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
    """Reads a prompt of any length; gives its last hidden row (B, 1, D), before the next token, and the memory."""
    hidden_BTD = None
    for part_BT in tokens_BT.split(_PROMPT_SEGMENT, dim=1):
        hidden_BTD, memory = model(part_BT, memory)
    assert hidden_BTD is not None
    return hidden_BTD[:, -1:], memory


def choose_token(model: LanguageModel, hidden_B1D: Tensor, sampler: Sampler, generator: torch.Generator) -> Tensor:
    """The next token of each row, (B,); scores no more of the vocabulary than the sampler needs."""
    if sampler.candidates is None:
        return sampler.choose(model.logits(hidden_B1D)[:, 0], generator)
    scores_B1R, ids_B1R = model.top(hidden_B1D, sampler.candidates)
    place_B = sampler.choose(scores_B1R[:, 0], generator)
    return ids_B1R[:, 0].gather(-1, place_B[:, None])[:, 0]


def generate_tokens(
    model: LanguageModel,
    prompt: Sequence[int],
    sampler: Sampler,
    generator: torch.Generator,
    memory: Memory | None = None,
) -> Iterator[int]:
    """Yields tokens without end, after a prompt of one or more tokens; stop by no longer asking.

    Args:
        model: any language model, in evaluation mode.
        prompt: token numbers, one or more; longer than the memory is fine, attention then sees its end.
        sampler: how a token is chosen.
        generator: random state drawn from (a CPU generator).
        memory: of one row, what was read before the prompt; none: nothing.

    Raises:
        UserError: the prompt is empty.
    """
    if not len(prompt):
        raise UserError("the prompt is empty; give at least one token")
    device = next(model.parameters()).device
    memory = memory or model.initial_memory(1)
    tokens_BT = torch.tensor([list(prompt)], device=device)
    while True:
        with torch.inference_mode():
            hidden_B1D, memory = read_prompt(model, tokens_BT, memory)
            token = int(choose_token(model, hidden_B1D, sampler, generator))
        yield token
        tokens_BT = torch.tensor([[token]], device=device)


def generate(
    run: Run,
    prompt: str | bytes | None = None,
    *,
    tokens: int = 500,
    sampler: Sampler | None = None,
    seed: int = 0,
    memory: int | None = None,
) -> Iterator[str]:
    """Yields text as it is made; a character is given once all its bytes are there.

    Args:
        run: a loaded run.
        prompt: text to go on from; none: the beginning of a text.
        tokens: how many tokens to make.
        sampler: how tokens are chosen; none: the paper's (the 40 likeliest).
        seed: of the random choices.
        memory: memory slots, in tokens; none: the run's evaluation memory.

    Raises:
        UserError: an empty prompt, tokens below 1, or a seed out of range.
    """
    if tokens < 1:
        raise UserError(f"{tokens} tokens wanted; give 1 or more")
    if not 0 <= seed < 2**63:
        raise UserError(f"seed {seed}: wanted 0 or more, below 2**63")
    if prompt is not None and not len(prompt):
        raise UserError("the prompt is empty; give some text, or no prompt at all to begin a new text")
    start = [run.vocabulary.start_id]
    ids = start if prompt is None else [*start, *run.vocabulary.encode(prompt).tolist()]
    generator = torch.Generator().manual_seed(seed)
    empty = run.model.initial_memory(1, Plan.of(run.config, memory=memory).reach)
    made = generate_tokens(run.model, ids, sampler or Sampler(top_k=40), generator, empty)
    return _continuation(islice(made, tokens), run.vocabulary, ids)


def _continuation(made: Iterator[int], vocabulary: Vocabulary, prompt: list[int]) -> Iterator[str]:
    """The text of the tokens made, as it goes on from the prompt: with the space between two words, say."""
    decoder = vocabulary.stream_decoder()
    certain = "".join(map(decoder.push, prompt))
    # what the decoder holds back of the prompt comes with the first token, but was said; not so half a character
    held = vocabulary.decode(prompt).removeprefix(certain).rstrip("\ufffd")
    for token in made:
        if text := decoder.push(token).removeprefix(held):
            held = ""
            yield text
    if text := decoder.finish().removeprefix(held):
        yield text
