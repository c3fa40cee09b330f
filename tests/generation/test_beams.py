"""Beam search: beside an exhaustive search, and beside a slow one that reads everything again for every beam."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from scripted import TEXT, Watched, whole

from transformer_xl.config import UserError
from transformer_xl.generation.beams import Beams, Hypothesis, beam_search
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import ContextLimits

REACH = ContextLimits(53)
PROMPT = [2, 0, 1]


def found_by(model: Any, settings: Beams, prompt: list[int]) -> list[Hypothesis]:
    return beam_search(model, prompt, settings, model.inference_memory(1, REACH))


def log_probabilities_of(model: LanguageModel, prompt: list[int], tokens: list[int]) -> list[float]:
    """Of each token after the prompt, by one pass over the whole."""
    logits_TV, _ = whole(model, [*prompt, *tokens], ContextLimits(0))
    shares_TV = logits_TV.log_softmax(-1)
    return [float(shares_TV[len(prompt) - 1 + place, token]) for place, token in enumerate(tokens)]


def exhaustive(model: LanguageModel, settings: Beams, prompt: list[int]) -> dict[tuple[int, ...], list[float]]:
    """Every continuation there is, with the log-probability of each token, from one pass over all; best first."""
    every = list(product(range(model.config.vocab_size), repeat=settings.tokens))
    with torch.no_grad():
        hidden_BTD, _ = model(torch.tensor([[*prompt, *tokens] for tokens in every]))
        shares_BTV = model.logits(hidden_BTD).log_softmax(-1)[:, len(prompt) - 1 : -1]
    found: dict[tuple[int, ...], list[float]] = {}
    for tokens, each in zip(every, shares_BTV.gather(-1, torch.tensor(every)[..., None])[..., 0].tolist(), strict=True):
        stops = [place for place, token in enumerate(tokens) if token in settings.end_ids]
        length = stops[0] + 1 if stops else len(tokens)
        if length > settings.min_tokens or not stops:
            found[tokens[:length]] = each[:length]
    by_score = sorted(found, key=lambda tokens: -sum(found[tokens]) / len(tokens) ** settings.length_penalty)
    return {tokens: found[tokens] for tokens in by_score}


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -0.7, 2.0])
@pytest.mark.parametrize(("end_ids", "min_tokens"), [((), 0), ((3,), 0), ((1, 3), 0), ((3,), 2)])
@pytest.mark.parametrize("cutoffs", [(), (2,)])
def test_with_beams_enough_it_is_exhaustive(
    make_model, length_penalty: float, end_ids: tuple[int, ...], min_tokens: int, cutoffs: tuple[int, ...]
) -> None:
    model = make_model(vocab_size=5, cutoffs=cutoffs, tie_word_embeddings=False)
    settings = Beams(125, 3, length_penalty, end_ids, min_tokens)
    found, wanted = found_by(model, settings, PROMPT), exhaustive(model, settings, PROMPT)
    assert [one.tokens for one in found] == list(wanted)
    for one, (tokens, each) in zip(found, wanted.items(), strict=True):
        assert list(one.logprobs) == pytest.approx(each, abs=1e-9)
        assert one.logprob == pytest.approx(sum(each), abs=1e-9)
        assert one.score == pytest.approx(sum(each) / len(tokens) ** length_penalty, abs=1e-9)
        assert one.ended == (tokens[-1] in end_ids)


def by_hand(model: LanguageModel, settings: Beams, prompt: list[int]) -> list[tuple[int, ...]]:
    """The search without memory, without a shortcut: at each length the best that go on, from all there are."""
    live, done = {(): 0.0}, {}
    for length in range(1, settings.tokens + 1):
        every = {}
        for tokens, total in live.items():
            shares_V = whole(model, [*prompt, *tokens], ContextLimits(0))[0][-1].log_softmax(-1)
            every |= {(*tokens, token): total + float(share) for token, share in enumerate(shares_V)}
        live = {}
        for tokens in sorted(every, key=every.__getitem__, reverse=True):
            if tokens[-1] in settings.end_ids:
                done[tokens] = every[tokens] / length**settings.length_penalty
            else:
                live[tokens] = every[tokens]
            if len(live) == settings.beams:
                break
    done |= {tokens: total / settings.tokens**settings.length_penalty for tokens, total in live.items()}
    return sorted(done, key=done.__getitem__, reverse=True)[: settings.beams]


@pytest.mark.parametrize("beams", [1, 2, 5])
@pytest.mark.parametrize("end_ids", [(), (3, 8, 20)])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
@pytest.mark.parametrize("seed", [7, 11])
def test_each_beam_has_its_own_memory(make_model, beams: int, end_ids, length_penalty: float, seed: int) -> None:
    model = make_model(seed=seed)
    settings = Beams(beams, 9, length_penalty, end_ids)
    found = found_by(model, settings, TEXT[:4])
    assert [one.tokens for one in found] == by_hand(model, settings, TEXT[:4])
    for one in found:
        each = log_probabilities_of(model, TEXT[:4], list(one.tokens))
        assert list(one.logprobs) == pytest.approx(each, abs=1e-9)


def test_the_beams_of_the_test_above_cross(make_model) -> None:
    """Without beams that change places, a memory that stays behind would not be seen."""
    model, taken = make_model(), []
    memory = model.inference_memory(1, REACH)
    select = type(memory).select

    def watched(self, rows):
        taken.append(list(rows))
        return select(self, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(memory), "select", watched)
        beam_search(model, TEXT[:4], Beams(5, 9), memory)
    assert any(rows not in ([0] * 5, [0, 1, 2, 3, 4]) for rows in taken)


def test_one_beam_is_greedy(make_model) -> None:
    model = make_model()
    (found,) = found_by(model, Beams(1, 11), TEXT[:4])
    tokens = TEXT[:4]
    for token in found.tokens:
        assert token == int(whole(model, tokens, ContextLimits(0))[0][-1].argmax())
        tokens = [*tokens, token]


def test_it_ends_once_nothing_better_can_come(make_model) -> None:
    watched = Watched(make_model())
    with torch.no_grad():
        watched.model.softmax.bias[3] = 30.0
    found = found_by(watched, Beams(2, 200, end_ids=(3,), length_penalty=0.0), TEXT[:4])
    assert found[0].tokens == (3,)
    assert len(watched.lengths) < 5


def test_a_long_one_may_still_overtake(make_model) -> None:
    """One that ended has -0.22; the other begins with -1.61, and after nine tokens that is -0.18 for each of them."""

    def scores(made_BT: torch.Tensor, logits_BV: torch.Tensor) -> torch.Tensor:
        shares_V = torch.full((23,), 1e-12)
        shares_V[[3, 5]] = torch.tensor([1e-9, 1.0] if made_BT.shape[1] else [0.8, 0.2])
        return shares_V.log().expand_as(logits_BV)

    (found,) = found_by(make_model(), Beams(1, 9, 1.0, (3,), adjust=scores), TEXT[:4])
    assert (found.tokens, found.score) == ((5,) * 9, pytest.approx(math.log(0.2) / 9, abs=1e-6))
    (found,) = found_by(make_model(), Beams(1, 7, 1.0, (3,), adjust=scores), TEXT[:4])
    assert (found.tokens, found.score) == ((3,), pytest.approx(math.log(0.8), abs=1e-6))


def test_the_prompt_is_read_once_and_the_memory_given_stays(make_model) -> None:
    model = make_model()
    with torch.no_grad():
        _, memory = model(torch.tensor([TEXT[:7]]), model.inference_memory(1, REACH))
    before = {name: tensor.clone() for name, tensor in memory.tensors().items()}
    watched = Watched(model)
    found = beam_search(watched, TEXT[7:11], Beams(3, 5), memory)
    assert watched.lengths == [4, 1, 1, 1, 1]
    assert all(torch.equal(tensor, before[name]) for name, tensor in memory.tensors().items())
    assert [one.tokens for one in found] == [one.tokens for one in found_by(model, Beams(3, 5), TEXT[:11])]


def test_the_hook_changes_what_is_found(make_model) -> None:
    """Log-probabilities are those of the changed scores."""
    model = make_model(vocab_size=5)
    found = found_by(
        model, Beams(64, 2, adjust=lambda made_BT, logits_BV: logits_BV.index_fill(-1, torch.tensor(2), -1e9)), PROMPT
    )
    assert len(found) == 16 + 9  # the impossible is still there, last
    assert all(2 not in one.tokens for one in found[:16])
    assert math.fsum(math.exp(one.logprob) for one in found) == pytest.approx(1)
    seen = []

    def watch(made_BT, logits_BV):
        seen.append(made_BT.tolist())
        return logits_BV

    assert [one.tokens for one in found_by(model, Beams(3, 4, adjust=watch), PROMPT)] == [
        one.tokens for one in found_by(model, Beams(3, 4), PROMPT)
    ]
    assert [len(made[0]) for made in seen] == [0, 1, 2, 3]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"beams": 0}, "0 beams wanted; give 1 or more"),
    ({"tokens": 0}, "0 tokens wanted; give 1 or more"),
    ({"length_penalty": math.nan}, "length penalty nan: wanted a number"),
    ({"length_penalty": math.inf}, "length penalty inf: wanted a number"),
    ({"length_penalty": 1e308}, r"length penalty 1e\+308: wanted -97 to 97 with these tokens"),
    ({"length_penalty": -98.0}, "length penalty -98.0: wanted -97 to 97 with these tokens"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Beams(**settings)


def test_what_cannot_be_searched_is_refused(make_model) -> None:
    model = make_model()
    for prompt, settings, message in (
        ([], Beams(), "the prompt is empty"),
        ([23], Beams(), "token 23 is not one of the 23"),
        ([1], Beams(end_ids=(23,)), "end id 23 is not one of the 23"),
        ([1], Beams(end_ids=tuple(range(23)), min_tokens=1), "no token is left to choose from"),
    ):
        with pytest.raises(UserError, match=message):
            beam_search(model, prompt, settings)
    with pytest.raises(UserError, match="memory of 2 rows beside 1 rows of input"):
        beam_search(model, [1], Beams(), model.inference_memory(2))
    with pytest.raises(UserError, match="the model is in training mode"):
        beam_search(make_model().train(), [1], Beams())
    with torch.no_grad():
        model.softmax.bias[5] = float("nan")
    with pytest.raises(UserError, match="scores are not numbers"):
        beam_search(model, [1], Beams())


def test_the_largest_penalties_still_rank() -> None:
    for penalty in (96.0, -96.0):
        assert math.isfinite(Beams(length_penalty=penalty).score(-1e4, 500))
    assert Beams(tokens=1, length_penalty=1e308).score(-2.0, 1) == -2.0
