"""Between the model's logits and the sampling: candidates, penalty, logits processor, banned eos, log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from forced_tokens import CLOSE, TEXT, Scripted, full_pass
from torch import Tensor

from transformer_xl.config import UserError
from transformer_xl.generation.batch import BatchGenerator
from transformer_xl.generation.config import GenerationConfig
from transformer_xl.generation.sampling import apply_repetition_penalty, sampling_probabilities
from transformer_xl.model.memory import ContextLimits

CUTOFFS = [(), (5, 11)]
GREEDY, WHOLE = {"greedy": True}, {"top_k": None}


def new_tokens(model: Any, steps: int = 13, logits_processor: Any = None, **settings: Any) -> list[int]:
    """Generate after the first five tokens of TEXT, with a memory that holds everything."""
    memory, config = model.inference_memory(1, ContextLimits(53)), GenerationConfig(**settings)
    generator = BatchGenerator(model, [TEXT[:5]], config, memory=memory, logits_processor=logits_processor)
    return [token.token_id for _ in range(steps) if generator.active for token in generator.step()]


@pytest.mark.parametrize("cutoffs", CUTOFFS)
@pytest.mark.parametrize(
    "settings",
    [GREEDY, {"top_k": 3}, {"temperature": 0.7, "top_k": 7}, {"top_k": 13, "top_p": 0.6}, {"top_k": 9, "min_p": 0.2}],
)
def test_candidates_have_the_probabilities_of_the_whole_vocabulary(
    make_model, settings: dict[str, Any], cutoffs
) -> None:
    """Greedy and top-k compute no more logits than they need."""
    model, config = make_model(cutoffs=cutoffs, tie_word_embeddings=False), GenerationConfig(**settings)
    prompts = [TEXT[:5], TEXT[2:7]]
    assert config.num_candidates is not None
    with torch.no_grad():
        hidden_BTD, _ = model(torch.tensor(prompts))
        logits_BV = model.logits(hidden_BTD[:, -1:])[:, 0]
        logits_B1R, ids_B1R = model.topk(hidden_BTD[:, -1:], config.num_candidates)
    allowed_BV = logits_BV == logits_BV.amax(-1, True)
    if not config.is_greedy:
        wanted_BV = sampling_probabilities(logits_BV, config)
        found_BR = sampling_probabilities(logits_B1R[:, 0], config)
        torch.testing.assert_close(torch.zeros_like(wanted_BV).scatter(-1, ids_B1R[:, 0], found_BR), wanted_BV)
        allowed_BV = wanted_BV > 0
    for row, prompt in enumerate(prompts):
        configs = [GenerationConfig(seed=seed, **settings) for seed in range(30)]
        sampled = {BatchGenerator(model, [prompt], one).step()[0].token_id for one in configs}
        assert sampled <= set(allowed_BV[row].nonzero()[:, 0].tolist())


def test_the_whole_vocabulary_is_scored_only_where_needed(make_model, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    monkeypatch.setattr(model, "logits", lambda hidden: pytest.fail("the whole vocabulary was scored"))
    assert len(new_tokens(model, top_k=5, eos_token_ids=[3], min_new_tokens=7)) >= 7
    assert len(new_tokens(model, greedy=True)) == 13
    for settings in (
        WHOLE,
        {"top_k": 5, "repetition_penalty": 1.1},
        {"greedy": True, "logits_processor": lambda token_ids_BT, logits_BV: logits_BV},
    ):
        with pytest.raises(pytest.fail.Exception, match="the whole vocabulary"):
            new_tokens(model, **settings)


@pytest.mark.parametrize("window", [3, 8, 1024])
@pytest.mark.parametrize("cutoffs", CUTOFFS)
def test_the_penalty_sees_the_latest_tokens_of_prompt_and_text(make_model, window: int, cutoffs) -> None:
    """Greedy with a penalty, by hand: each token in the window once, by CTRL's formula."""
    model = make_model(cutoffs=cutoffs, tie_word_embeddings=False)
    found = new_tokens(model, greedy=True, repetition_penalty=2.5, repetition_penalty_window=window)
    tokens = TEXT[:5]
    for token in found:
        logits = full_pass(model, tokens, ContextLimits(0))[0][-1].tolist()
        for earlier in set(tokens[-window:]):
            logits[earlier] = logits[earlier] / 2.5 if logits[earlier] > 0 else logits[earlier] * 2.5
        assert token == max(range(23), key=logits.__getitem__)
        tokens = [*tokens, token]
    assert found != new_tokens(model, greedy=True)


@pytest.mark.parametrize("window", [2, 9, 1024])
def test_the_penalty_of_unequal_prompts(make_model, window: int) -> None:
    """Each sequence is judged by its own tokens alone, also after another one has left the batch."""
    model, prompts = make_model(), [[7], list(range(1, 15)), [9, 4, 9]]
    config = GenerationConfig(repetition_penalty=4.0, repetition_penalty_window=window)

    def penalized(prompts: list[list[int]], leaving: int | None) -> list[Tensor]:
        script = Scripted([8, 3, 8, 11, 3])
        generator = BatchGenerator(model, prompts, config, logits_processor=script)
        for _ in range(5):
            generator.step()
            generator.finish([] if leaving is None else [leaving])
        return script.seen

    together = penalized(prompts, leaving=1)
    for row, prompt in ((0, prompts[0]), (2, prompts[2])):
        for step, alone_BV in enumerate(penalized([prompt], leaving=None)):
            torch.testing.assert_close(together[step][[row if step == 0 else row // 2]], alone_BV, **CLOSE)


def test_the_logits_processor_sees_the_new_tokens_and_decides(make_model) -> None:
    """It comes after the penalty and before top-k: a token that it favors is the only one left."""
    model, seen = make_model(), []

    def alternate(token_ids_BT: Tensor, logits_BV: Tensor) -> Tensor:
        seen.append((token_ids_BT.tolist(), logits_BV.clone()))
        return logits_BV.index_fill(-1, torch.tensor([token_ids_BT.shape[1] % 2]), 1e9)

    found = new_tokens(model, 5, alternate, top_k=4, repetition_penalty=1.5)
    assert found == [0, 1, 0, 1, 0]
    assert [token_ids for token_ids, _ in seen] == [[found[:step]] for step in range(5)]
    logits_1V = full_pass(model, TEXT[:5], ContextLimits(0))[0][-1:]
    torch.testing.assert_close(seen[0][1], apply_repetition_penalty(logits_1V, torch.tensor([TEXT[:5]]), 1.5), **CLOSE)


def test_the_logits_processor_sees_the_active_sequences(make_model) -> None:
    seen: list[tuple[list[int], list[list[int]]]] = []
    script = Scripted([5, 6])

    def watch(token_ids_BT: Tensor, logits_BV: Tensor) -> Tensor:
        seen.append((list(generator.active), token_ids_BT.tolist()))
        return script(token_ids_BT, logits_BV)

    generator = BatchGenerator(make_model(), [TEXT[:3]] * 3, logits_processor=watch)
    generator.step()
    generator.finish([1])
    generator.step()
    assert seen == [([0, 1, 2], [[], [], []]), ([0, 2], [[5], [5]])]


@pytest.mark.parametrize(
    ("logits_processor", "message"),
    [
        (lambda token_ids, logits: logits[:, :5], r"returned \(1, 5\).*\(1, 23\)"),
        (lambda token_ids, logits: None, "returned NoneType"),
        (lambda token_ids, logits: logits * float("-inf"), "not finite"),
        (lambda token_ids, logits: torch.full_like(logits, float("-inf")), "no token is left.*logits_processor"),
    ],
)
@pytest.mark.parametrize("settings", [GREEDY, WHOLE, {"top_k": 3}])
def test_a_logits_processor_that_returns_no_logits_is_refused(
    make_model, logits_processor: Any, message: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=message):
        new_tokens(make_model(), logits_processor=logits_processor, **settings)


@pytest.mark.parametrize("settings", [GREEDY, WHOLE, {"top_k": 2}, {"greedy": True, "repetition_penalty": 1.01}])
def test_no_eos_before_min_new_tokens(make_model, settings: dict[str, Any]) -> None:
    """Half of the vocabulary is eos; until then the others are chosen as if those did not exist."""
    model, settings = make_model(), {**settings, "eos_token_ids": list(range(0, 23, 2))}
    found = new_tokens(model, 40, min_new_tokens=7, **settings)
    assert len(found) >= 7
    assert all(token % 2 for token in found[:7])
    assert found[-1] % 2 == 0
    assert len(new_tokens(model, 40, **settings)) < 7
    if settings.get("greedy") and "repetition_penalty" not in settings:
        for step, token in enumerate(found[:7]):
            logits_V = full_pass(model, TEXT[:5] + found[:step], ContextLimits(0))[0][-1]
            assert token == 2 * int(logits_V[1::2].argmax()) + 1


def test_eos_right_after_min_new_tokens(make_model) -> None:
    """All tokens but one are eos: that one is generated just so many times, then the most likely of all."""
    model, eos = make_model(), [token for token in range(23) if token != 11]
    found = new_tokens(model, 40, greedy=True, eos_token_ids=eos, min_new_tokens=7)
    most_likely = int(full_pass(model, TEXT[:5] + [11] * 7, ContextLimits(0))[0][-1].argmax())
    assert most_likely != 11
    assert found == [*[11] * 7, most_likely]
    with pytest.raises(UserError, match="no token is left"):
        new_tokens(model, top_k=3, eos_token_ids=list(range(23)), min_new_tokens=2)


@pytest.mark.parametrize("cutoffs", CUTOFFS)
@pytest.mark.parametrize(
    "settings", [GREEDY, {"temperature": 0.5, "top_k": 3}, {"temperature": 2.0, "repetition_penalty": 3}]
)
def test_logprobs_are_the_models_own(make_model, cutoffs, settings: dict[str, Any]) -> None:
    """From one pass over the whole, before temperature, limits and penalty."""
    model = make_model(cutoffs=cutoffs, tie_word_embeddings=False)
    config = GenerationConfig(logprobs=True, **settings)
    generator = BatchGenerator(model, [TEXT[:5]], config, memory=model.inference_memory(1, ContextLimits(53)))
    new = [generator.step()[0] for _ in range(9)]
    ids = [token.token_id for token in new]
    logits_TV, _ = full_pass(model, TEXT[:5] + ids, ContextLimits(0))
    wanted_T = logits_TV.log_softmax(-1)[4:-1].gather(-1, torch.tensor(ids)[:, None])[:, 0]
    found_T = torch.tensor([token.logprob for token in new], dtype=torch.float64)
    torch.testing.assert_close(found_T, wanted_T, **CLOSE)
    assert BatchGenerator(model, [TEXT[:5]]).step()[0].logprob is None
