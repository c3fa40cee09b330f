"""Batched generation of token ids: read the prompts, then run one decode step for each token.

    generator = BatchGenerator(run.inference(), [prompt_ids], config)
    while generator.active:
        for token in generator.step(): ...

No tokenizer is needed. Sequences of a batch do not affect each other, and a finished sequence is removed from the
batch.

Shape suffixes: B batch size, T tokens, D model width, V vocabulary, R most likely tokens (candidates for
sampling), K earlier tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from transformer_xl.config import UserError
from transformer_xl.generation.generation_config import GenerationConfig
from transformer_xl.generation.sampling import (
    LogitsProcessor,
    apply_repetition_penalty,
    mask_tokens,
    process_logits,
    sample,
)
from transformer_xl.generation.speculative import SpeculativeModel
from transformer_xl.inference import TokenModel
from transformer_xl.model.memory import Memory
from transformer_xl.reader import STRIDE, Reader


@dataclass(frozen=True)
class GeneratedToken:
    """One new token of one sequence."""

    sequence: int
    """Index of the sequence, counting from 0 and including finished ones."""
    token_id: int
    logprob: float | None
    """Log-probability under the model, before any processing of the logits, or None if `logprobs` is off."""
    is_eos: bool
    """Whether the token is one of `eos_token_ids`, so that its sequence is finished."""


class BatchGenerator:
    """Generates several sequences at once; holds their memory and random state."""

    def __init__(
        self,
        model: TokenModel,
        prompts: Sequence[Sequence[int]],
        config: GenerationConfig | None = None,
        *,
        segment_length: int = STRIDE,
        logits_processor: LogitsProcessor | None = None,
        memory: Memory | None = None,
    ) -> None:
        """Read the prompts.

        Args:
            model: a prepared model (`run.inference()`), or any language model in evaluation mode.
            prompts: token ids of each prompt, at least one; prompts may differ in length. A prompt may be longer than
                the memory; generated tokens then attend only to the end of it.
            config: how tokens are sampled, `min_new_tokens`, `eos_token_ids` and `logprobs`. Stop strings and
                `max_new_tokens` are left to the caller, who calls `finish`. Sequence i belongs to prompt
                i // num_samples and has a random generator of its own, seeded with seed + i, so it does not depend on
                the rest of the batch.
            segment_length: tokens of a segment of the prompts, which are read as evaluation reads a text: each token
                sees the memory before its segment, and its segment. It matters only to prompts that the memory does
                not hold.
            logits_processor: changes the logits before each choice, after the repetition penalty.
            memory: the memory of earlier tokens, whose batch row i is that of prompt i, or None if there are none. It
                is not changed.

        Raises:
            UserError: an empty prompt, token ids out of range, a memory of another batch size, a model in training
                mode, or `prompt_lookup_num_tokens` with several sequences or without a KV cache.
        """
        self._model, self._config, self._logits_processor = model, config or GenerationConfig(), logits_processor
        check_inputs(model, prompts, self._config.eos_token_ids)
        num_samples = self._config.num_samples
        with torch.inference_mode():
            hidden_B1D, self._memory = read_prompts(model, prompts, memory, segment_length, num_samples)
        self._hidden_B1D, self._read_next, max_draft = hidden_B1D, model, self._config.prompt_lookup_num_tokens
        if max_draft is not None:
            self._read_next = SpeculativeModel(model, prompts, self._memory, max_draft)
        self.active = list(range(len(prompts) * num_samples))
        """Indices of the sequences that are not finished: the rows of the batch."""
        self._num_generated = 0
        self._finished: dict[int, tuple[Memory, Tensor]] = {}  # memory and newest token (1, 1) of removed rows
        self._generators = [np.random.default_rng(self._config.seed + index) for index in self.active]
        # earlier tokens are kept only where they are needed: for the logits processor and for the repetition penalty
        self._generated_BT = torch.empty(len(self.active), 0, dtype=torch.int64, device=hidden_B1D.device)
        latest_BK = _latest_tokens(prompts, self._config.repetition_penalty_window)
        self._latest_BK = latest_BK.repeat_interleave(num_samples, 0).to(hidden_B1D.device)
        self._newest_B1 = self._generated_BT  # the newest token of each sequence; the memory does not include it yet

    def step(self) -> list[GeneratedToken]:
        """Generate one more token for each active sequence, in the order of `active`.

        Raises:
            UserError: the model's logits are not finite, or the logits processor left no token to choose.
        """
        assert self.active
        with torch.inference_mode():
            hidden_B1D, memory = self._hidden_B1D, self._memory
            if self._num_generated:
                hidden_B1D, memory = self._read_next(self._newest_B1, memory)
            token_B = self._choose(hidden_B1D)
            token_ids = token_B.tolist()
            nats: list[float | None] = [None] * len(token_ids)
            if self._config.logprobs:
                nats = self._model.nats(hidden_B1D, token_B[:, None].cpu())[:, 0].tolist()
            # from here on: until a token is chosen, an error or Ctrl-C leaves the state as it was
            self._hidden_B1D, self._memory, self._newest_B1 = hidden_B1D, memory, token_B[:, None]
            if self._logits_processor is not None:
                self._generated_BT = torch.cat([self._generated_BT, self._newest_B1], 1)
            if self._config.repetition_penalty != 1:
                window = self._config.repetition_penalty_window
                self._latest_BK = torch.cat([self._latest_BK, self._newest_B1], 1)[:, -window:]
        self._num_generated += 1
        tokens = [
            GeneratedToken(index, token_id, None if loss is None else -loss, token_id in self._config.eos_token_ids)
            for index, token_id, loss in zip(self.active, token_ids, nats, strict=True)
        ]
        self.finish([token.sequence for token in tokens if token.is_eos])
        return tokens

    def finish(self, sequences: Collection[int]) -> None:
        """Remove these sequences from the batch; `memory` still returns their memory."""
        finished_rows = [row for row, index in enumerate(self.active) if index in sequences]
        if not finished_rows:
            return
        assert self._num_generated, "a sequence has at least one token when it finishes"
        rows = [row for row, index in enumerate(self.active) if index not in sequences]
        if not rows:  # the rows stay as they are: a copy would double the peak memory
            self.active = []
            return
        with torch.inference_mode():
            self._finished |= {self.active[row]: self._memory_of_row(row) for row in finished_rows}
            self._memory, self._newest_B1 = self._memory.select(rows), self._newest_B1[rows]
            self._hidden_B1D, self._latest_BK = self._hidden_B1D[rows], self._latest_BK[rows]
            self._generated_BT = self._generated_BT[rows]
        self.active = [self.active[row] for row in rows]
        self._generators = [self._generators[row] for row in rows]

    def memory(self) -> Memory:
        """Return the memory of all sequences in order, finished or not, after all tokens so far.

        It can be passed to the next BatchGenerator, as in a conversation; this generator can still continue. Each call
        runs the model on the latest tokens.
        """
        if not self._num_generated:
            return self._memory
        with torch.inference_mode():
            memory, newest_B1 = self._memory, self._newest_B1
            if self._finished:
                # the batch still contains the sequences that finished last
                in_batch = sorted(set(range(len(self._finished) + len(newest_B1))) - self._finished.keys())
                parts = self._finished | {index: self._memory_of_row(row) for row, index in enumerate(in_batch)}
                memories, newest = zip(*(parts[index] for index in range(len(parts))), strict=True)
                memory, newest_B1 = Memory.concatenate(memories), torch.cat(newest)
            _, memory = self._model(newest_B1, memory)
        return memory

    def _memory_of_row(self, row: int) -> tuple[Memory, Tensor]:
        """Return the memory of a batch row and its latest token, (1, 1), which the memory does not include yet."""
        return self._memory.select([row]), self._newest_B1[row : row + 1]

    def _choose(self, hidden_B1D: Tensor) -> Tensor:
        """Choose the next token of each row, (B,); logits of the whole vocabulary are computed only if needed."""
        config, ids_BR = self._config, None
        banned = config.eos_token_ids if self._num_generated < config.min_new_tokens else ()
        # banned tokens may be among the most likely ones
        count = None if config.num_candidates is None else config.num_candidates + len(set(banned))
        if self._logits_processor is None and config.repetition_penalty == 1 and count is not None:
            logits_B1R, ids_B1R = self._model.topk(hidden_B1D, count)
            logits_BR, ids_BR = logits_B1R[:, 0], ids_B1R[:, 0]
        else:
            logits_BR = self._model.logits(hidden_B1D)[:, 0]
            if config.repetition_penalty != 1:
                logits_BR = apply_repetition_penalty(logits_BR, self._latest_BK, config.repetition_penalty)
            if self._logits_processor is not None:
                logits_BR = process_logits(self._logits_processor, self._generated_BT, logits_BR)
            if count is not None:
                logits_BR, ids_BR = logits_BR.topk(min(count, logits_BR.shape[-1]))
        if banned:
            logits_BR = mask_tokens(banned, logits_BR, ids_BR)
        index_B = sample(logits_BR, config, self._generators)
        return index_B if ids_BR is None else ids_BR.gather(-1, index_B[:, None])[:, 0]


def read_prompts(
    model: TokenModel,
    prompts: Sequence[Sequence[int]],
    memory: Memory | None,
    segment_length: int,
    num_samples: int = 1,
) -> tuple[Tensor, Memory]:
    """Read prompts of any lengths; return the last hidden state of each, (B, 1, D), and the memory.

    Args:
        model: as for a BatchGenerator.
        prompts: as for a BatchGenerator.
        memory: as for a BatchGenerator.
        segment_length: as for a BatchGenerator.
        num_samples: the number of batch rows that each prompt gets in the results.

    Raises:
        UserError: the memory is of another batch size or model.
    """
    if memory is None:
        memory = model.initial_memory(len(prompts))
    if memory.batch_size != len(prompts):
        raise UserError(
            f"memory of batch size {memory.batch_size} for {len(prompts)} prompts; give one row for each, or none"
        )
    reader = Reader(model, memory, segment_length=segment_length)
    for _ in reader.read(prompts):
        pass
    if num_samples > 1:
        reader = reader.select([row for row in range(len(prompts)) for _ in range(num_samples)])
    assert reader.last_hidden_B1D is not None
    return reader.last_hidden_B1D, reader.memory


def check_inputs(model: TokenModel, prompts: Sequence[Sequence[int]], eos_token_ids: Collection[int]) -> None:
    """Check that a model can generate from these prompts.

    Raises:
        UserError: the model is in training mode, there is no prompt, a prompt is empty, or a token id is out of range.
    """
    if model.training:
        raise UserError("the model is in training mode, where dropout is active; call model.eval() first")
    if not len(prompts):
        raise UserError("no prompt was given; give at least one")
    if not all(len(prompt) for prompt in prompts):
        raise UserError("the prompt is empty; give at least one token")
    if not all(isinstance(token, Integral) for prompt in prompts for token in prompt):
        raise UserError("a prompt contains values that are not token ids; give integers")
    vocab_size = model.config.vocab_size
    for name, ids in (("token id", [token for prompt in prompts for token in prompt]), ("eos token id", eos_token_ids)):
        if wrong := [token_id for token_id in ids if not 0 <= token_id < vocab_size]:
            raise UserError(f"{name} {wrong[0]} is not in the vocabulary of {vocab_size:,}; give 0 to {vocab_size - 1}")


def _latest_tokens(prompts: Sequence[Sequence[int]], window: int) -> Tensor:
    """Return the last tokens of each prompt, (B, K).

    Short prompts are padded with their own last token. This changes nothing: the penalty applies once to each token.
    """
    width = min(window, max(map(len, prompts)))
    rows = [list(prompt[-width:]) for prompt in prompts]
    return torch.tensor([[row[-1]] * (width - len(row)) + row for row in rows])
