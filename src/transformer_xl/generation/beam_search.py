"""Beam search: the most likely continuations of one prompt.

Shape suffixes: B beams, T generated tokens, D model width, V vocabulary, R most likely next tokens of a
beam (candidates).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from transformer_xl.config import UserError
from transformer_xl.generation.batch import GeneratedToken, check_inputs, read_prompts
from transformer_xl.generation.completion import Completion, CompletionBuilder, Prompt
from transformer_xl.generation.generate import encode_prompt, prepare_generation, prompt_text, resolve_config
from transformer_xl.generation.generation_config import GenerationConfig
from transformer_xl.generation.sampling import LogitsProcessor, check_logits, mask_tokens, process_logits
from transformer_xl.inference import TokenModel
from transformer_xl.model.memory import Memory
from transformer_xl.reader import STRIDE
from transformer_xl.run import Run, check_run

if TYPE_CHECKING:
    from transformer_xl.config.typed_settings import GenerationSettings

_DEFAULT_NUM_BEAMS = 4


@dataclass(frozen=True)
class Hypothesis:
    """A continuation of the prompt, finished or not."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural log-probability of each token."""
    score: float
    """The log-probability with the length penalty, by which hypotheses are ranked."""
    is_finished: bool
    """Whether its last token is one of `eos_token_ids`."""
    beam: int
    """Index of the beam that it extends by its last token."""

    @property
    def logprob(self) -> float:
        """Log-probability of all tokens together."""
        return sum(self.logprobs)


def beam_search(
    run: Run,
    prompt: Prompt = None,
    config: GenerationConfig | None = None,
    *,
    logits_processor: LogitsProcessor | None = None,
    memory: Memory | None = None,
    **overrides: Unpack[GenerationSettings],
) -> list[Completion]:
    """Find the most likely continuations of a prompt.

    Args:
        run: a loaded run.
        prompt: text or token ids to continue, or None to begin a new text.
        config: `num_beams` (4 if not set), `length_penalty`, and other settings that have an effect without sampling.
        logits_processor: changes the logits before each step; log-probabilities are those of the changed logits.
        memory: a memory of batch size 1, which the prompt continues. It is not changed.
        overrides: settings by name, which override those of `config`.

    Returns:
        `num_beams` completions with log-probabilities, best first.

    Raises:
        UserError: a setting that is out of range or concerns sampling, or a prompt that is empty or cannot be encoded.
    """
    check_run(run)
    config = resolve_config(run.tokenizer, config, overrides, num_beams=_DEFAULT_NUM_BEAMS)
    if config.num_beams is None:
        raise UserError("beam_search needs num_beams; give a number, or leave it out")
    prompt_ids = encode_prompt(run.tokenizer, prompt, config, continued=memory is not None)
    model, memory, segment_length = prepare_generation(run, config, memory, 1)
    hypotheses = search_token_ids(model, prompt_ids, config, memory, logits_processor, segment_length=segment_length)
    completions: list[Completion] = []
    for hypothesis in hypotheses:
        builder = CompletionBuilder(run.tokenizer, prompt_ids, config)
        for token_id, logprob in zip(hypothesis.token_ids, hypothesis.logprobs, strict=True):
            # 0: index of the sequence; each builder has only one
            builder.add(GeneratedToken(0, token_id, logprob, is_eos=token_id in config.eos_token_ids))
        completions.append(builder.completion(prompt_text(run.tokenizer, prompt)))
    return completions


def search_token_ids(
    model: TokenModel,
    prompt: Sequence[int],
    config: GenerationConfig,
    memory: Memory | None = None,
    logits_processor: LogitsProcessor | None = None,
    *,
    segment_length: int = STRIDE,
) -> list[Hypothesis]:
    """Find the most likely continuations of a prompt of token ids.

    With as many beams as there are possible continuations the search is exhaustive. It ends early once no beam can
    still score better than the worst of `num_beams` finished hypotheses.

    Args:
        model: as for a BatchGenerator.
        prompt: token ids, one or more.
        config: settings, of which `num_beams` and `max_new_tokens` must not be None.
        memory: a memory of batch size 1, or None for an empty one. It is not changed.
        logits_processor: as for `beam_search`.
        segment_length: as for a BatchGenerator.

    Returns:
        at most `num_beams` hypotheses, best first.

    Raises:
        UserError: a prompt, memory or model that cannot be used, or logits that are not finite.
    """
    assert config.num_beams is not None
    assert config.max_new_tokens is not None
    check_inputs(model, [prompt], config.eos_token_ids)
    live = [Hypothesis((), (), 0.0, is_finished=False, beam=0)]
    finished: list[Hypothesis] = []
    with torch.inference_mode():
        hidden_B1D, memory = read_prompts(model, [prompt], memory, segment_length)
        for length in range(1, config.max_new_tokens + 1):
            logprobs_BR, ids_BR = _candidates(model, hidden_B1D, live, config, logits_processor)
            extended = _extend(config, live, logprobs_BR, ids_BR)
            finished = _best([*finished, *(hypothesis for hypothesis in extended if hypothesis.is_finished)], config)
            live = [hypothesis for hypothesis in extended if not hypothesis.is_finished]
            if not live or length == config.max_new_tokens:
                break
            # upper bound of the scores of continuations: appending tokens never increases the (negative)
            # log-probability, and the divisor is largest at max_new_tokens if the length penalty is positive, else at
            # the next length
            final_length = config.max_new_tokens if config.length_penalty > 0 else length + 1
            bound = max(_score(hypothesis.logprob, final_length, config) for hypothesis in live)
            if len(finished) == config.num_beams and finished[-1].score >= bound:
                return finished
            beams = [hypothesis.beam for hypothesis in live]
            if beams != list(range(memory.batch_size)):
                memory = memory.select(beams)
            last_B1 = torch.tensor([[hypothesis.token_ids[-1]] for hypothesis in live], device=hidden_B1D.device)
            hidden_B1D, memory = model(last_B1, memory)
    return _best([*finished, *live], config)


def _candidates(
    model: TokenModel,
    hidden_B1D: Tensor,
    live: list[Hypothesis],
    config: GenerationConfig,
    logits_processor: LogitsProcessor | None,
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities and ids of the most likely next tokens of each beam, (B, R) each, best first."""
    assert config.num_beams is not None
    count = min(config.num_beams + len(config.eos_token_ids), model.config.vocab_size)
    if logits_processor is None:
        logits_B1R, ids_B1R = model.topk(hidden_B1D, count)
        # topk's logits differ from log-probabilities by a constant, computed here from the loss of the first token
        shift_B1 = logits_B1R[..., 0].double() + model.nats(hidden_B1D, ids_B1R[..., 0].cpu().contiguous()).double()
        logprobs_BR, ids_BR = logits_B1R[:, 0].double() - shift_B1, ids_B1R[:, 0]
    else:
        generated_BT = torch.tensor(
            [hypothesis.token_ids for hypothesis in live], dtype=torch.int64, device=hidden_B1D.device
        )
        logits_BV = process_logits(logits_processor, generated_BT, model.logits(hidden_B1D)[:, 0])
        check_logits(logits_BV.amax(-1))
        logprobs_BR, ids_BR = F.log_softmax(logits_BV.double(), -1).topk(count)
    if config.eos_token_ids and len(live[0].token_ids) < config.min_new_tokens:
        logprobs_BR = mask_tokens(config.eos_token_ids, logprobs_BR, ids_BR)
    check_logits(logprobs_BR.amax(-1))
    return logprobs_BR, ids_BR


def _extend(config: GenerationConfig, live: list[Hypothesis], logprobs_BR: Tensor, ids_BR: Tensor) -> list[Hypothesis]:
    """Extend the beams by the candidates, best first, until `num_beams` of the extended ones are unfinished."""
    sums_B1 = torch.tensor(
        [[hypothesis.logprob] for hypothesis in live], dtype=torch.float64, device=logprobs_BR.device
    )
    order = (sums_B1 + logprobs_BR).flatten().argsort(descending=True, stable=True).tolist()
    candidate_logprobs, candidate_ids = logprobs_BR.tolist(), ids_BR.tolist()
    extended: list[Hypothesis] = []
    num_unfinished = 0
    for index in order:
        beam, candidate = divmod(index, logprobs_BR.shape[1])
        token_id, logprob = candidate_ids[beam][candidate], candidate_logprobs[beam][candidate]
        if logprob == -float("inf") or num_unfinished == config.num_beams:
            break
        token_ids, logprobs = (*live[beam].token_ids, token_id), (*live[beam].logprobs, logprob)
        score, is_finished = _score(sum(logprobs), len(logprobs), config), token_id in config.eos_token_ids
        extended.append(Hypothesis(token_ids, logprobs, score, is_finished, beam))
        num_unfinished += not is_finished
    return extended


def _score(logprob: float, length: int, config: GenerationConfig) -> float:
    """Return the score of a hypothesis: as in Wu et al. 2016, section 7, but divided by length ** length_penalty.

    They divide by ((5 + length) / 6) ** length_penalty. The length counts the generated tokens, including an EOS token.
    """
    return logprob / length**config.length_penalty


def _best(hypotheses: Collection[Hypothesis], config: GenerationConfig) -> list[Hypothesis]:
    return sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)[: config.num_beams]
