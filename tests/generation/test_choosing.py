"""Between the model's scores and the sampler: candidates, the penalty, the hook, ends, log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scripted import CLOSE, TEXT, Scripted, whole
from torch import Tensor

from transformer_xl.config import UserError
from transformer_xl.generation.sampling import Sampler
from transformer_xl.generation.writer import BatchGenerator
from transformer_xl.model.memory import ContextLimits

CUTOFFS = [(), (5, 11)]
REACH = ContextLimits(53)


def write(model: Any, sampler: Sampler, tokens: int = 13, **settings: Any) -> list[int]:
    memory = model.inference_memory(1, REACH)
    writer = BatchGenerator(model, [TEXT[:5]], sampler, memory=memory, **settings)
    return [made.token for _ in range(tokens) if writer.rows for made in writer.step()]


@pytest.mark.parametrize("cutoffs", CUTOFFS)
@pytest.mark.parametrize(
    "sampler",
    [Sampler(0), Sampler(top_k=3), Sampler(0.7, top_k=7), Sampler(top_k=13, top_p=0.6), Sampler(top_k=9, min_p=0.2)],
)
def test_candidates_are_drawn_as_from_the_whole_vocabulary(make_model, sampler: Sampler, cutoffs) -> None:
    """Greedy and top-k score no more than they need, and give each token the probability it has among all."""
    model = make_model(cutoffs=cutoffs, tie_word_embeddings=False)
    with torch.no_grad():
        hidden_BTD, _ = model(torch.tensor([TEXT[:5], TEXT[2:7]]))
        logits_BV = model.logits(hidden_BTD[:, -1:])[:, 0]
        assert sampler.candidates is not None
        scores_B1R, ids_B1R = model.top(hidden_BTD[:, -1:], sampler.candidates)
    if sampler.temperature:
        wanted_BV = sampler.probabilities(logits_BV)
        found_BV = torch.zeros_like(wanted_BV).scatter(-1, ids_B1R[:, 0], sampler.probabilities(scores_B1R[:, 0]))
        torch.testing.assert_close(found_BV, wanted_BV)
    greedy_BV = logits_BV == logits_BV.amax(-1, True)
    allowed_BV = (sampler.probabilities(logits_BV) if sampler.temperature else greedy_BV) > 0
    for row, prompt in enumerate([TEXT[:5], TEXT[2:7]]):
        drawn = {BatchGenerator(model, [prompt], sampler, seed=seed).step()[0].token for seed in range(30)}
        assert drawn <= set(allowed_BV[row].nonzero()[:, 0].tolist())


def test_the_whole_vocabulary_is_scored_only_where_needed(make_model, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    monkeypatch.setattr(model, "logits", lambda hidden: pytest.fail("the whole vocabulary was scored"))
    assert len(write(model, Sampler(top_k=5), end_ids=[3], min_tokens=7)) >= 7
    assert len(write(model, Sampler(0))) == 13
    for sampler in (Sampler(), Sampler(top_k=5, repetition_penalty=1.1)):
        with pytest.raises(pytest.fail.Exception, match="the whole vocabulary"):
            write(model, sampler)
    with pytest.raises(pytest.fail.Exception, match="the whole vocabulary"):
        write(model, Sampler(0), adjust=lambda made_BT, logits_BV: logits_BV)


@pytest.mark.parametrize("window", [3, 8, 1024])
@pytest.mark.parametrize("cutoffs", CUTOFFS)
def test_the_penalty_sees_the_last_tokens_of_prompt_and_text(make_model, window: int, cutoffs) -> None:
    """Greedy with a penalty, done by hand: each token that stood in the window once, by CTRL's formula."""
    model = make_model(cutoffs=cutoffs, tie_word_embeddings=False)
    found = write(model, Sampler(0, repetition_penalty=2.5, repetition_window=window))
    tokens = TEXT[:5]
    for token in found:
        scores = whole(model, tokens, ContextLimits(0))[0][-1].tolist()
        for earlier in set(tokens[-window:]):
            scores[earlier] = scores[earlier] / 2.5 if scores[earlier] > 0 else scores[earlier] * 2.5
        assert token == max(range(23), key=scores.__getitem__)
        tokens = [*tokens, token]
    assert found != write(model, Sampler(0))


def test_the_penalty_goes_with_its_row(make_model) -> None:
    """When a row leaves, the others are judged by their own past as before."""
    model, sampler = make_model(), Sampler(0, repetition_penalty=4.0)
    prompts = [[1, 5], list(range(11)), list(range(9, 23))]
    writer = BatchGenerator(model, prompts, sampler)
    found = [made.token for made in writer.step() if made.row > 0]
    writer.stop([0])
    found += [made.token for _ in range(8) for made in writer.step()]
    for place, prompt in enumerate(prompts[1:]):
        alone = BatchGenerator(model, [prompt], sampler)
        assert found[place::2] == [alone.step()[0].token for _ in range(9)]


@pytest.mark.parametrize("window", [2, 9, 1024])
def test_the_penalty_of_unequal_prompts(make_model, window: int) -> None:
    """Each row is judged by its own past alone: the penalised scores are those it has by itself."""
    model, sampler = make_model(), Scripted([8, 3, 8, 11, 3])
    for name, value in (("repetition_penalty", 4.0), ("repetition_window", window)):
        object.__setattr__(sampler, name, value)
    prompts = [[7], list(range(1, 15)), [9, 4, 9]]

    def judged(rows: list[list[int]]) -> Tensor:
        seen: list[Tensor] = []
        object.__setattr__(sampler, "script", [8, 3, 8, 11, 3])
        writer = BatchGenerator(
            model, rows, sampler, adjust=lambda made_BT, logits_BV: seen.append(logits_BV) or logits_BV
        )
        for _ in range(5):
            writer.step()
        return torch.stack(seen)

    together = judged(prompts)
    for row, prompt in enumerate(prompts):
        torch.testing.assert_close(together[:, row : row + 1], judged([prompt]), **CLOSE)


def test_the_hook_sees_what_was_made_and_says_what_comes(make_model) -> None:
    """First the penalty, then the hook, then top-k: a token that it favours is the only one left."""
    model, seen = make_model(), []

    def alternate(made_BT: Tensor, logits_BV: Tensor) -> Tensor:
        seen.append((made_BT.tolist(), logits_BV.clone()))
        return logits_BV.index_fill(-1, torch.tensor([made_BT.shape[1] % 2]), 1e9)

    assert write(model, Sampler(top_k=4, repetition_penalty=1.5), tokens=5, adjust=alternate) == [0, 1, 0, 1, 0]
    assert [made for made, _ in seen] == [[[]], [[0]], [[0, 1]], [[0, 1, 0]], [[0, 1, 0, 1]]]
    wanted = Sampler(repetition_penalty=1.5).penalised(
        whole(model, TEXT[:5], ContextLimits(0))[0][-1:], torch.tensor([TEXT[:5]])
    )
    torch.testing.assert_close(seen[0][1], wanted, **CLOSE)


def test_the_hook_sees_the_rows_that_are_being_written(make_model) -> None:
    seen: list[tuple[list[int], list[list[int]]]] = []

    def watch(made_BT: Tensor, logits_BV: Tensor) -> Tensor:
        seen.append((list(writer.rows), made_BT.tolist()))
        return logits_BV

    writer = BatchGenerator(make_model(), [TEXT[:3]] * 3, Scripted([5, 6, 7]), adjust=watch)
    writer.step()
    writer.stop([1])
    writer.step()
    assert seen == [([0, 1, 2], [[], [], []]), ([0, 2], [[5], [5]])]


@pytest.mark.parametrize(
    ("adjust", "message"),
    [
        (
            lambda made, logits: logits[:, :5],
            r"adjust gave \(1, 5\); wanted scores of the shape it was given, \(1, 23\)",
        ),
        (lambda made, logits: None, "adjust gave NoneType; wanted scores"),
        (lambda made, logits: logits * float("-inf"), "scores are not numbers"),
        (lambda made, logits: torch.full_like(logits, float("-inf")), "no token is left to choose from; let `adjust`"),
    ],
)
@pytest.mark.parametrize("sampler", [Sampler(0), Sampler(), Sampler(top_k=3)])
def test_a_hook_that_gives_no_scores_is_refused(make_model, adjust: Any, message: str, sampler: Sampler) -> None:
    with pytest.raises(UserError, match=message):
        write(make_model(), sampler, adjust=adjust)


@pytest.mark.parametrize("sampler", [Sampler(0), Sampler(), Sampler(top_k=2), Sampler(0, repetition_penalty=1.01)])
def test_no_end_before_so_many_tokens(make_model, sampler: Sampler) -> None:
    """Half of the vocabulary ends a text; until then the others are chosen as if those did not exist."""
    model, ends = make_model(), list(range(0, 23, 2))
    found = write(model, sampler, tokens=40, end_ids=ends, min_tokens=7)
    assert len(found) >= 7
    assert all(token % 2 for token in found[:7])
    assert found[-1] in ends
    assert len(write(model, sampler, tokens=40, end_ids=ends)) < 7
    if not sampler.temperature and sampler.repetition_penalty == 1:
        for place, token in enumerate(found[:7]):
            scores_V = whole(model, TEXT[:5] + found[:place], ContextLimits(0))[0][-1]
            assert token == 2 * int(scores_V[1::2].argmax()) + 1


def test_an_end_right_after_so_many_tokens(make_model) -> None:
    """All but one token end the text: just so many times that one is made, and then the likeliest of all."""
    model = make_model()
    found = write(model, Sampler(0), tokens=40, end_ids=[token for token in range(23) if token != 11], min_tokens=7)
    likeliest = int(whole(model, TEXT[:5] + [11] * 7, ContextLimits(0))[0][-1].argmax())
    assert likeliest != 11
    assert found == [*[11] * 7, likeliest]


def test_nothing_left_before_an_end_is_refused(make_model) -> None:
    with pytest.raises(UserError, match="no token is left to choose from"):
        write(make_model(), Sampler(top_k=3), end_ids=range(23), min_tokens=2)


@pytest.mark.parametrize("cutoffs", CUTOFFS)
@pytest.mark.parametrize("sampler", [Sampler(0), Sampler(0.5, top_k=3), Sampler(2.0, repetition_penalty=3)])
def test_log_probabilities_are_the_models_own(make_model, cutoffs, sampler: Sampler) -> None:
    """From one pass over the whole, before temperature, limits and penalty."""
    model = make_model(cutoffs=cutoffs, tie_word_embeddings=False)
    writer = BatchGenerator(model, [TEXT[:5]], sampler, memory=model.inference_memory(1, REACH), scored=True)
    made = [writer.step()[0] for _ in range(9)]
    tokens = [one.token for one in made]
    logits_TV, _ = whole(model, TEXT[:5] + tokens, ContextLimits(0))
    wanted_T = logits_TV.log_softmax(-1)[4:-1].gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    found_T = torch.tensor([one.logprob for one in made], dtype=torch.float64)
    torch.testing.assert_close(found_T, wanted_T, **CLOSE)
    unscored = BatchGenerator(model, [TEXT[:5]], sampler)
    assert unscored.step()[0].logprob is None
