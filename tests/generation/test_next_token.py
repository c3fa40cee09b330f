"""From the model's logits to the next token: candidates, repetition penalty, logits processor, EOS tokens before
min_new_tokens, logprobs.

The fixture make_inference (tests/conftest.py) prepares a small model with random weights and a vocabulary of 23. TEXT
is a list of ids of that vocabulary, and `full_pass` returns the logits (T, V) after each token of one call.

Shape suffixes: B batch size, T tokens, D d_model, V vocabulary, R candidates (the most likely tokens).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from forced_tokens import CLOSE, TEXT, full_pass
from torch import Tensor

from transformer_xl.config import UserError
from transformer_xl.generation.batch import BatchGenerator
from transformer_xl.generation.generation_config import GenerationConfig
from transformer_xl.generation.sampling import apply_repetition_penalty, sampling_probabilities
from transformer_xl.model.memory import ContextLimits

CUTOFFS = [(), (5, 11)]  # one softmax over all tokens, and an adaptive softmax with clusters 0-4, 5-10 and 11-22
GREEDY, WHOLE_VOCABULARY = {"greedy": True}, {"top_k": None}


def new_tokens(model: Any, steps: int = 13, logits_processor: Any = None, **settings: Any) -> list[int]:
    """Generate after the first five tokens of TEXT, with a memory that holds all tokens."""
    memory, config = model.initial_memory(1, ContextLimits(53)), GenerationConfig(**settings)
    generator = BatchGenerator(model, [TEXT[:5]], config, memory=memory, logits_processor=logits_processor)
    return [token.token_id for _ in range(steps) if generator.active for token in generator.step()]


@pytest.mark.parametrize("cutoffs", CUTOFFS)
@pytest.mark.parametrize("settings", [GREEDY, {"temperature": 0.7, "top_k": 7}, {"top_k": 13, "top_p": 0.6}])
def test_candidates_have_the_probabilities_of_the_whole_vocabulary(
    make_inference, settings: dict[str, Any], cutoffs
) -> None:
    """Greedy and top-k sampling compute only the logits of the candidates, and choose allowed tokens with 30 seeds."""
    model, config = make_inference(cutoffs=cutoffs, tie_word_embeddings=False), GenerationConfig(**settings)
    assert config.num_candidates is not None
    with torch.no_grad():
        hidden_BTD, _ = model(torch.tensor([TEXT[:5]]))
        logits_BV = model.logits(hidden_BTD[:, -1:])[:, 0]
        logits_B1R, ids_B1R = model.topk(hidden_BTD[:, -1:], config.num_candidates)
    allowed_BV = logits_BV == logits_BV.amax(-1, True)
    if not config.is_greedy:
        expected_BV = sampling_probabilities(logits_BV, config)
        probability_BR = sampling_probabilities(logits_B1R[:, 0], config)
        probability_BV = torch.zeros_like(expected_BV).scatter(-1, ids_B1R[:, 0], probability_BR)
        torch.testing.assert_close(probability_BV, expected_BV)
        allowed_BV = expected_BV > 0
    configs = [GenerationConfig(seed=seed, **settings) for seed in range(30)]
    sampled = {BatchGenerator(model, [TEXT[:5]], config).step()[0].token_id for config in configs}
    assert sampled <= set(allowed_BV[0].nonzero()[:, 0].tolist())


def test_logits_of_the_whole_vocabulary_are_computed_only_if_needed(
    make_inference, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_inference()
    monkeypatch.setattr(model, "logits", lambda hidden: pytest.fail("the whole vocabulary was scored"))
    assert len(new_tokens(model, top_k=5, eos_token_ids=[3], min_new_tokens=7)) >= 7
    assert len(new_tokens(model, greedy=True)) == 13
    for settings in (
        WHOLE_VOCABULARY,
        {"top_k": 5, "repetition_penalty": 1.1},
        {"greedy": True, "logits_processor": lambda token_ids_BT, logits_BV: logits_BV},
    ):
        with pytest.raises(pytest.fail.Exception, match="the whole vocabulary"):
            new_tokens(model, **settings)


@pytest.mark.parametrize("window", [3, 8, 1024])
@pytest.mark.parametrize("cutoffs", CUTOFFS)
def test_repetition_penalty_applies_to_the_latest_tokens_of_prompt_and_text(
    make_inference, window: int, cutoffs
) -> None:
    """Greedy, against CTRL's formula, which applies once to each token in the window."""
    model = make_inference(cutoffs=cutoffs, tie_word_embeddings=False)
    generated = new_tokens(model, greedy=True, repetition_penalty=2.5, repetition_penalty_window=window)
    tokens = TEXT[:5]
    for token in generated:
        logits = full_pass(model, tokens, ContextLimits(0))[0][-1].tolist()
        for earlier in set(tokens[-window:]):
            logits[earlier] = logits[earlier] / 2.5 if logits[earlier] > 0 else logits[earlier] * 2.5
        assert token == max(range(23), key=logits.__getitem__)
        tokens = [*tokens, token]
    assert generated != new_tokens(model, greedy=True)


def test_logits_processor_is_applied_after_the_penalty_and_before_top_k(make_inference) -> None:
    """It is called with the new tokens; a token that it favors is the only one left."""
    model, calls = make_inference(), []

    def alternate(token_ids_BT: Tensor, logits_BV: Tensor) -> Tensor:
        calls.append((token_ids_BT.tolist(), logits_BV.clone()))
        return logits_BV.index_fill(-1, torch.tensor([token_ids_BT.shape[1] % 2]), 1e9)

    generated = new_tokens(model, 5, alternate, top_k=4, repetition_penalty=1.5)
    assert generated == [0, 1, 0, 1, 0]
    assert [token_ids for token_ids, _ in calls] == [[generated[:step]] for step in range(5)]
    logits_1V = full_pass(model, TEXT[:5], ContextLimits(0))[0][-1:]
    expected_1V = apply_repetition_penalty(logits_1V, torch.tensor([TEXT[:5]]), 1.5)
    torch.testing.assert_close(calls[0][1], expected_1V, **CLOSE)


@pytest.mark.parametrize(
    ("logits_processor", "message"),
    [
        (lambda token_ids, logits: logits[:, :5], r"returned \(1, 5\).*\(1, 23\)"),
        (lambda token_ids, logits: None, "returned NoneType"),
        (lambda token_ids, logits: logits * float("-inf"), "not finite"),
        (lambda token_ids, logits: torch.full_like(logits, float("-inf")), "no token is left.*logits_processor"),
    ],
)
@pytest.mark.parametrize("settings", [GREEDY, WHOLE_VOCABULARY, {"top_k": 3}])
def test_logits_processor_with_invalid_result_is_refused(
    make_inference, logits_processor: Any, message: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=message):
        new_tokens(make_inference(), logits_processor=logits_processor, **settings)


@pytest.mark.parametrize(
    "settings", [GREEDY, WHOLE_VOCABULARY, {"top_k": 2}, {"greedy": True, "repetition_penalty": 1.01}]
)
def test_eos_is_not_chosen_before_min_new_tokens(make_inference, settings: dict[str, Any]) -> None:
    """Half of the vocabulary, the even ids, are EOS tokens."""
    model, settings = make_inference(), {**settings, "eos_token_ids": list(range(0, 23, 2))}
    generated = new_tokens(model, 40, min_new_tokens=7, **settings)
    assert len(generated) >= 7
    assert all(token % 2 for token in generated[:7])
    assert generated[-1] % 2 == 0
    assert len(new_tokens(model, 40, **settings)) < 7


def test_eos_can_be_chosen_right_after_min_new_tokens(make_inference) -> None:
    """All tokens but 11 are EOS tokens: 11 is generated 7 times, then the most likely token."""
    model, eos = make_inference(), [token for token in range(23) if token != 11]
    generated = new_tokens(model, 40, greedy=True, eos_token_ids=eos, min_new_tokens=7)
    most_likely = int(full_pass(model, TEXT[:5] + [11] * 7, ContextLimits(0))[0][-1].argmax())
    assert most_likely != 11
    assert generated == [*[11] * 7, most_likely]


@pytest.mark.parametrize("cutoffs", CUTOFFS)
@pytest.mark.parametrize(
    "settings", [GREEDY, {"temperature": 0.5, "top_k": 3}, {"temperature": 2.0, "repetition_penalty": 3}]
)
def test_logprobs_are_those_of_the_model(make_inference, cutoffs, settings: dict[str, Any]) -> None:
    """Equal to those of one pass over all tokens, without temperature, top-k and penalty."""
    model = make_inference(cutoffs=cutoffs, tie_word_embeddings=False)
    config = GenerationConfig(logprobs=True, **settings)
    generator = BatchGenerator(model, [TEXT[:5]], config, memory=model.initial_memory(1, ContextLimits(53)))
    tokens = [generator.step()[0] for _ in range(9)]
    ids = [token.token_id for token in tokens]
    logits_TV, _ = full_pass(model, TEXT[:5] + ids, ContextLimits(0))
    expected_T = logits_TV.log_softmax(-1)[4:-1].gather(-1, torch.tensor(ids)[:, None])[:, 0]
    logprob_T = torch.tensor([token.logprob for token in tokens], dtype=torch.float64)
    torch.testing.assert_close(logprob_T, expected_T, **CLOSE)
    assert BatchGenerator(model, [TEXT[:5]]).step()[0].logprob is None
