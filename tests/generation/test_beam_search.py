"""Beam search equals an exhaustive search, and a slow search that reads all tokens again for every beam.

The fixture make_inference (tests/conftest.py) prepares a small model with random weights, by default with a vocabulary
of 23. TEXT is a list of ids of that vocabulary, `full_pass` reads tokens in one call, and RecordedModel.lengths has the
number of tokens of each call of the model.

Shape suffixes: B sequences, T tokens, D d_model, V vocabulary.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from forced_tokens import TEXT, RecordedModel, full_pass
from tensors import assert_same_tensors, copied_tensors

from transformer_xl.config import UserError
from transformer_xl.generation.beam_search import Hypothesis, search_token_ids
from transformer_xl.generation.generation_config import GenerationConfig
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import ContextLimits

LIMITS = ContextLimits(memory_length=53)  # longer than all texts of these tests
PROMPT = [2, 0, 1]


def config_of(num_beams: int, max_new_tokens: int, **settings: Any) -> GenerationConfig:
    return GenerationConfig(num_beams=num_beams, max_new_tokens=max_new_tokens, **settings)


def run_beam_search(
    model: Any, config: GenerationConfig, prompt: list[int], logits_processor: Any = None
) -> list[Hypothesis]:
    return search_token_ids(model, prompt, config, model.initial_memory(1, LIMITS), logits_processor)


def exhaustive_search(
    model: LanguageModel, config: GenerationConfig, prompt: list[int]
) -> dict[tuple[int, ...], list[float]]:
    """Return every possible continuation with the log-probability of each token, best first."""
    all_tokens = list(product(range(model.config.vocab_size), repeat=config.max_new_tokens))
    with torch.no_grad():
        hidden_BTD, _ = model(torch.tensor([[*prompt, *tokens] for tokens in all_tokens]))
        logprobs_BTV = model.logits(hidden_BTD).log_softmax(-1)[:, len(prompt) - 1 : -1]
    logprobs_BT = logprobs_BTV.gather(-1, torch.tensor(all_tokens)[..., None])[..., 0].tolist()
    continuations: dict[tuple[int, ...], list[float]] = {}
    for tokens, logprobs in zip(all_tokens, logprobs_BT, strict=True):
        eos_positions = [index for index, token in enumerate(tokens) if token in config.eos_token_ids]
        length = eos_positions[0] + 1 if eos_positions else len(tokens)
        if length > config.min_new_tokens or not eos_positions:
            continuations[tokens[:length]] = logprobs[:length]

    def score(tokens: tuple[int, ...]) -> float:
        return sum(continuations[tokens]) / len(tokens) ** config.length_penalty

    return {tokens: continuations[tokens] for tokens in sorted(continuations, key=score, reverse=True)}


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -0.7])
@pytest.mark.parametrize(("eos_token_ids", "min_new_tokens"), [((), 0), ((1, 3), 0), ((3,), 2)])
@pytest.mark.parametrize("cutoffs", [(), (2,)])
def test_with_enough_beams_equals_exhaustive_search(
    make_inference, length_penalty: float, eos_token_ids: tuple[int, ...], min_new_tokens: int, cutoffs: tuple[int, ...]
) -> None:
    model = make_inference(vocab_size=5, cutoffs=cutoffs, tie_word_embeddings=False)
    settings = {"length_penalty": length_penalty, "eos_token_ids": eos_token_ids, "min_new_tokens": min_new_tokens}
    config = config_of(num_beams=125, max_new_tokens=3, **settings)  # there are 5**3 = 125 continuations
    hypotheses, expected = run_beam_search(model, config, PROMPT), exhaustive_search(model, config, PROMPT)
    assert [hypothesis.token_ids for hypothesis in hypotheses] == list(expected)
    for hypothesis, (tokens, logprobs) in zip(hypotheses, expected.items(), strict=True):
        assert list(hypothesis.logprobs) == pytest.approx(logprobs, abs=1e-9)
        assert hypothesis.logprob == pytest.approx(sum(logprobs), abs=1e-9)
        assert hypothesis.score == pytest.approx(sum(logprobs) / len(tokens) ** length_penalty, abs=1e-9)
        assert hypothesis.is_finished == (tokens[-1] in eos_token_ids)


def reference_search(model: LanguageModel, config: GenerationConfig, prompt: list[int]) -> list[tuple[int, ...]]:
    """Search without memory and without ending early: at each length keep the best of all unfinished sequences."""
    live, finished = {(): 0.0}, {}
    for length in range(1, config.max_new_tokens + 1):
        extended = {}
        for tokens, total in live.items():
            logprobs_V = full_pass(model, [*prompt, *tokens], ContextLimits(0))[0][-1].log_softmax(-1)
            extended |= {(*tokens, token): total + float(logprob) for token, logprob in enumerate(logprobs_V)}
        live = {}
        for tokens in sorted(extended, key=extended.__getitem__, reverse=True):
            if tokens[-1] in config.eos_token_ids:
                finished[tokens] = extended[tokens] / length**config.length_penalty
            else:
                live[tokens] = extended[tokens]
            if len(live) == config.num_beams:
                break
    finished |= {tokens: total / config.max_new_tokens**config.length_penalty for tokens, total in live.items()}
    return sorted(finished, key=finished.__getitem__, reverse=True)[: config.num_beams]


@pytest.mark.parametrize("num_beams", [1, 2, 5])
@pytest.mark.parametrize("eos_token_ids", [(), (3, 8, 20)])
@pytest.mark.parametrize(("length_penalty", "seed"), [(0.0, 7), (1.0, 7), (1.0, 11)])
def test_few_beams_equal_the_reference_search(
    make_inference, num_beams: int, eos_token_ids, length_penalty: float, seed: int
) -> None:
    model = make_inference(seed=seed)
    config = config_of(num_beams, 9, length_penalty=length_penalty, eos_token_ids=eos_token_ids)
    hypotheses = run_beam_search(model, config, TEXT[:4])
    assert [hypothesis.token_ids for hypothesis in hypotheses] == reference_search(model, config, TEXT[:4])


def test_search_ends_once_no_beam_can_score_better(make_inference) -> None:
    recorded = RecordedModel(make_inference())
    with torch.no_grad():
        recorded.model.softmax.bias[3] = 30.0
    # token 3, an EOS token, is by far the most likely one
    hypotheses = run_beam_search(recorded, config_of(2, 200, eos_token_ids=(3,), length_penalty=0.0), TEXT[:4])
    assert hypotheses[0].token_ids == (3,)
    assert len(recorded.lengths) < 5


def test_search_continues_if_a_longer_hypothesis_may_score_better(make_inference) -> None:
    """Token 3 ends a sequence. The finished hypothesis (3,) scores log(0.8) = -0.22; the other one begins with token 5
    and log(0.2) = -1.61, which is -0.18 per token after nine tokens and -0.23 after seven."""

    def force(token_ids_BT: torch.Tensor, logits_BV: torch.Tensor) -> torch.Tensor:
        probabilities_V = torch.full((23,), 1e-12)
        probabilities_V[[3, 5]] = torch.tensor([1e-9, 1.0] if token_ids_BT.shape[1] else [0.8, 0.2])
        return probabilities_V.log().expand_as(logits_BV)

    (best,) = run_beam_search(make_inference(), config_of(1, 9, eos_token_ids=(3,)), TEXT[:4], force)
    assert (best.token_ids, best.score) == ((5,) * 9, pytest.approx(math.log(0.2) / 9, abs=1e-6))
    (best,) = run_beam_search(make_inference(), config_of(1, 7, eos_token_ids=(3,)), TEXT[:4], force)
    assert (best.token_ids, best.score) == ((3,), pytest.approx(math.log(0.8), abs=1e-6))


def test_memory_is_continued_and_not_changed(make_inference) -> None:
    model = make_inference()
    with torch.no_grad():
        _, memory = model(torch.tensor([TEXT[:7]]), model.initial_memory(1, LIMITS))
    before, recorded = copied_tensors(memory), RecordedModel(model)
    hypotheses = search_token_ids(recorded, TEXT[7:11], config_of(3, 5), memory)
    assert recorded.lengths == [4, 1, 1, 1, 1]
    assert_same_tensors(memory, before)
    expected = run_beam_search(model, config_of(3, 5), TEXT[:11])
    assert [hypothesis.token_ids for hypothesis in hypotheses] == [hypothesis.token_ids for hypothesis in expected]


def test_logprobs_are_those_of_the_processed_logits(make_inference) -> None:
    model, received_ids = make_inference(vocab_size=5), []

    def without_2(token_ids_BT: torch.Tensor, logits_BV: torch.Tensor) -> torch.Tensor:
        received_ids.append(token_ids_BT.tolist())
        return logits_BV.index_fill(-1, torch.tensor(2), -1e9)

    hypotheses = run_beam_search(model, config_of(num_beams=64, max_new_tokens=2), PROMPT, without_2)
    # 4 * 4 continuations without token 2, and 9 with it, which are nearly impossible, and so the last ones
    assert len(hypotheses) == 16 + 9
    assert all(2 not in hypothesis.token_ids for hypothesis in hypotheses[:16])
    assert math.fsum(math.exp(hypothesis.logprob) for hypothesis in hypotheses) == pytest.approx(1)
    assert received_ids[0] == [[]]
    assert sorted(received_ids[1]) == [[0], [1], [2], [3], [4]]


def test_unusable_prompts_and_logits_are_refused(make_inference) -> None:
    model, every_token = make_inference(), tuple(range(23))
    with pytest.raises(UserError, match="token id 23"):
        search_token_ids(model, [23], config_of(4, 9))
    with pytest.raises(UserError, match="no token is left"):
        search_token_ids(model, [1], config_of(4, 9, eos_token_ids=every_token, min_new_tokens=1))
    with torch.no_grad():
        model.model.softmax.bias[5] = float("nan")
    with pytest.raises(UserError, match="not finite"):
        search_token_ids(model, [1], config_of(4, 9))
