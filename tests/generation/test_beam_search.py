"""Beam search: beside an exhaustive search, and beside a slow one that reads everything again for every beam."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from scripted import TEXT, Watched, full_pass
from tensors import assert_same_tensors, copied_tensors

from transformer_xl.config import UserError
from transformer_xl.generation.beam_search import Hypothesis, search_token_ids
from transformer_xl.generation.config import GenerationConfig
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import ContextLimits

LIMITS = ContextLimits(53)
PROMPT = [2, 0, 1]


def config_of(num_beams: int, max_new_tokens: int, **settings: Any) -> GenerationConfig:
    return GenerationConfig(num_beams=num_beams, max_new_tokens=max_new_tokens, **settings)


def found_by(model: Any, config: GenerationConfig, prompt: list[int], logits_processor: Any = None) -> list[Hypothesis]:
    return search_token_ids(model, prompt, config, model.inference_memory(1, LIMITS), logits_processor)


def logprobs_of(model: LanguageModel, prompt: list[int], tokens: list[int]) -> list[float]:
    """The log-probability of each token after the prompt, from one pass over the whole."""
    logits_TV, _ = full_pass(model, [*prompt, *tokens], ContextLimits(0))
    logprobs_TV = logits_TV.log_softmax(-1)
    return [float(logprobs_TV[len(prompt) - 1 + index, token]) for index, token in enumerate(tokens)]


def exhaustive(model: LanguageModel, config: GenerationConfig, prompt: list[int]) -> dict[tuple[int, ...], list[float]]:
    """Every possible continuation with the log-probability of each token, from one pass over all, best first."""
    every = list(product(range(model.config.vocab_size), repeat=config.max_new_tokens))
    with torch.no_grad():
        hidden_BTD, _ = model(torch.tensor([[*prompt, *tokens] for tokens in every]))
        logprobs_BTV = model.logits(hidden_BTD).log_softmax(-1)[:, len(prompt) - 1 : -1]
    found: dict[tuple[int, ...], list[float]] = {}
    for tokens, each in zip(
        every, logprobs_BTV.gather(-1, torch.tensor(every)[..., None])[..., 0].tolist(), strict=True
    ):
        stops = [index for index, token in enumerate(tokens) if token in config.eos_token_ids]
        length = stops[0] + 1 if stops else len(tokens)
        if length > config.min_new_tokens or not stops:
            found[tokens[:length]] = each[:length]
    by_score = sorted(found, key=lambda tokens: -sum(found[tokens]) / len(tokens) ** config.length_penalty)
    return {tokens: found[tokens] for tokens in by_score}


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -0.7, 2.0])
@pytest.mark.parametrize(("eos_token_ids", "min_new_tokens"), [((), 0), ((3,), 0), ((1, 3), 0), ((3,), 2)])
@pytest.mark.parametrize("cutoffs", [(), (2,)])
def test_with_enough_beams_it_is_exhaustive(
    make_model, length_penalty: float, eos_token_ids: tuple[int, ...], min_new_tokens: int, cutoffs: tuple[int, ...]
) -> None:
    model = make_model(vocab_size=5, cutoffs=cutoffs, tie_word_embeddings=False)
    config = config_of(
        125, 3, length_penalty=length_penalty, eos_token_ids=eos_token_ids, min_new_tokens=min_new_tokens
    )
    found, wanted = found_by(model, config, PROMPT), exhaustive(model, config, PROMPT)
    assert [one.token_ids for one in found] == list(wanted)
    for one, (tokens, each) in zip(found, wanted.items(), strict=True):
        assert list(one.logprobs) == pytest.approx(each, abs=1e-9)
        assert one.logprob == pytest.approx(sum(each), abs=1e-9)
        assert one.score == pytest.approx(sum(each) / len(tokens) ** length_penalty, abs=1e-9)
        assert one.is_finished == (tokens[-1] in eos_token_ids)


def by_hand(model: LanguageModel, config: GenerationConfig, prompt: list[int]) -> list[tuple[int, ...]]:
    """The search without memory, without a shortcut: at each length the best unfinished ones, of all there are."""
    live, done = {(): 0.0}, {}
    for length in range(1, config.max_new_tokens + 1):
        every = {}
        for tokens, total in live.items():
            logprobs_V = full_pass(model, [*prompt, *tokens], ContextLimits(0))[0][-1].log_softmax(-1)
            every |= {(*tokens, token): total + float(logprob) for token, logprob in enumerate(logprobs_V)}
        live = {}
        for tokens in sorted(every, key=every.__getitem__, reverse=True):
            if tokens[-1] in config.eos_token_ids:
                done[tokens] = every[tokens] / length**config.length_penalty
            else:
                live[tokens] = every[tokens]
            if len(live) == config.num_beams:
                break
    done |= {tokens: total / config.max_new_tokens**config.length_penalty for tokens, total in live.items()}
    return sorted(done, key=done.__getitem__, reverse=True)[: config.num_beams]


@pytest.mark.parametrize("num_beams", [1, 2, 5])
@pytest.mark.parametrize("eos_token_ids", [(), (3, 8, 20)])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
@pytest.mark.parametrize("seed", [7, 11])
def test_each_beam_has_its_own_memory(
    make_model, num_beams: int, eos_token_ids, length_penalty: float, seed: int
) -> None:
    model = make_model(seed=seed)
    config = config_of(num_beams, 9, length_penalty=length_penalty, eos_token_ids=eos_token_ids)
    found = found_by(model, config, TEXT[:4])
    assert [one.token_ids for one in found] == by_hand(model, config, TEXT[:4])
    for one in found:
        each = logprobs_of(model, TEXT[:4], list(one.token_ids))
        assert list(one.logprobs) == pytest.approx(each, abs=1e-9)


def test_the_beams_of_the_test_above_cross(make_model) -> None:
    """Without beams that change rows, a memory that is not selected with them would go unnoticed."""
    model, taken = make_model(), []
    memory = model.inference_memory(1, LIMITS)
    select = type(memory).select

    def watched(self, rows):
        taken.append(list(rows))
        return select(self, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(memory), "select", watched)
        search_token_ids(model, TEXT[:4], config_of(5, 9), memory)
    assert any(rows not in ([0] * 5, [0, 1, 2, 3, 4]) for rows in taken)


def test_it_ends_once_nothing_can_score_better(make_model) -> None:
    watched = Watched(make_model())
    with torch.no_grad():
        watched.model.softmax.bias[3] = 30.0
    found = found_by(watched, config_of(2, 200, eos_token_ids=(3,), length_penalty=0.0), TEXT[:4])
    assert found[0].token_ids == (3,)
    assert len(watched.lengths) < 5


def test_a_longer_hypothesis_may_still_score_better(make_model) -> None:
    """The finished one has -0.22; the other begins with -1.61, which is -0.18 a token after nine tokens."""

    def force(token_ids_BT: torch.Tensor, logits_BV: torch.Tensor) -> torch.Tensor:
        probabilities_V = torch.full((23,), 1e-12)
        probabilities_V[[3, 5]] = torch.tensor([1e-9, 1.0] if token_ids_BT.shape[1] else [0.8, 0.2])
        return probabilities_V.log().expand_as(logits_BV)

    (found,) = found_by(make_model(), config_of(1, 9, eos_token_ids=(3,)), TEXT[:4], force)
    assert (found.token_ids, found.score) == ((5,) * 9, pytest.approx(math.log(0.2) / 9, abs=1e-6))
    (found,) = found_by(make_model(), config_of(1, 7, eos_token_ids=(3,)), TEXT[:4], force)
    assert (found.token_ids, found.score) == ((3,), pytest.approx(math.log(0.8), abs=1e-6))


def test_the_prompt_is_read_once_and_the_memory_given_stays(make_model) -> None:
    model = make_model()
    with torch.no_grad():
        _, memory = model(torch.tensor([TEXT[:7]]), model.inference_memory(1, LIMITS))
    before = copied_tensors(memory)
    watched = Watched(model)
    found = search_token_ids(watched, TEXT[7:11], config_of(3, 5), memory)
    assert watched.lengths == [4, 1, 1, 1, 1]
    assert_same_tensors(memory, before)
    assert [one.token_ids for one in found] == [one.token_ids for one in found_by(model, config_of(3, 5), TEXT[:11])]


def test_the_logits_processor_changes_what_is_found(make_model) -> None:
    """Log-probabilities are those of the changed logits."""
    model, seen = make_model(vocab_size=5), []

    def without_2(token_ids_BT: torch.Tensor, logits_BV: torch.Tensor) -> torch.Tensor:
        seen.append(token_ids_BT.tolist())
        return logits_BV.index_fill(-1, torch.tensor(2), -1e9)

    found = found_by(model, config_of(64, 2), PROMPT, without_2)
    assert len(found) == 16 + 9  # the impossible is still there, last
    assert all(2 not in one.token_ids for one in found[:16])
    assert math.fsum(math.exp(one.logprob) for one in found) == pytest.approx(1)
    assert seen[0] == [[]]
    assert sorted(seen[1]) == [[0], [1], [2], [3], [4]]


def test_what_cannot_be_searched_is_refused(make_model) -> None:
    model, config = make_model(), config_of(4, 9)
    for prompt, settings, message in (
        ([], {}, "the prompt is empty"),
        ([23], {}, "token id 23"),
        ([1], {"eos_token_ids": (23,)}, "eos token id 23"),
        ([1], {"eos_token_ids": tuple(range(23)), "min_new_tokens": 1}, "no token is left"),
    ):
        with pytest.raises(UserError, match=message):
            search_token_ids(model, prompt, config_of(4, 9, **settings))
    with pytest.raises(UserError, match=r"memory of .*2 .* 1"):
        search_token_ids(model, [1], config, model.inference_memory(2))
    with pytest.raises(UserError, match="training mode"):
        search_token_ids(make_model().train(), [1], config)
    with torch.no_grad():
        model.softmax.bias[5] = float("nan")
    with pytest.raises(UserError, match="not finite"):
        search_token_ids(model, [1], config)
