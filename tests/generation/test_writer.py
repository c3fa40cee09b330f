"""Writing tokens: one by one equals one pass over the whole; rows side by side equal each row alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from scripted import CLOSE, TEXT, Scripted, Watched, assert_same_memory, whole
from torch import Tensor

from transformer_xl.config import UserError
from transformer_xl.generation import writer as writer_module
from transformer_xl.generation.sampling import Sampler
from transformer_xl.generation.writer import BatchGenerator, GeneratedToken, read_prompts
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import ContextLimits, Memory


def written(writer: BatchGenerator, tokens: int) -> list[list[int]]:
    """Makes so many tokens in each row; gives the tokens of each."""
    rows: list[list[int]] = [[] for _ in writer.rows]
    for _ in range(tokens):
        for made in writer.step() if writer.rows else []:
            rows[made.row].append(made.token)
    return rows


def decode(
    model: LanguageModel, prompt: list[int], script: list[int], memory: Memory | None = None
) -> tuple[Tensor, Watched, BatchGenerator]:
    """The scores before each token of the script, the model, and what wrote it."""
    sampler, watched = Scripted(script), Watched(model)
    writer = BatchGenerator(watched, [prompt], sampler, memory=memory)
    assert written(writer, len(script)) == [script]
    assert watched.lengths[-len(script) + 1 :] == [1] * (len(script) - 1)
    return torch.cat(sampler.seen), watched, writer


REACHES = {
    "all of it kept": ContextLimits(31),
    "exactly kept": ContextLimits(28),
    "all kept, distances clamped": ContextLimits(31, clamp_length=5),
    "memory shorter than the prompt, with its window": ContextLimits(5, attention_window=6),
    "memory longer than the window": ContextLimits(13, attention_window=6),
    "one key": ContextLimits(1, attention_window=2),
}


@pytest.mark.parametrize("style", [{}, {"norm_first": True}, {"kernel": "reference"}])
@pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES)
@pytest.mark.parametrize("prompt_length", [1, 4, 17])
def test_token_by_token_equals_one_pass(make_model, style, context_limits: ContextLimits, prompt_length: int) -> None:
    """Where memory holds all that a query sees: all there was, or a window. Scores and memory."""
    model = make_model(**style)
    memory = model.inference_memory(1, context_limits)
    found, watched, writer = decode(model, TEXT[:prompt_length], TEXT[prompt_length:], memory)
    wanted, _ = whole(model, TEXT[:-1], replace(context_limits, memory=0))
    torch.testing.assert_close(found, wanted[prompt_length - 1 :], **CLOSE)
    assert_same_memory(watched.memory, whole(model, TEXT[:-1], context_limits)[1])
    assert_same_memory(writer.memory(), whole(model, TEXT, context_limits)[1])


def test_a_prompt_longer_than_memory_is_read_whole(make_model) -> None:
    """Without a window the prompt sees all of itself, and what is made sees memory: its end."""
    model = make_model()
    found, _, _ = decode(model, TEXT[:17], TEXT[17:], model.inference_memory(1, ContextLimits(5)))
    prompt, memory = whole(model, TEXT[:17], ContextLimits(5))
    torch.testing.assert_close(found[0], prompt[-1], **CLOSE)
    with torch.no_grad():
        for place in range(17, len(TEXT) - 1):
            hidden_BTD, memory = model(torch.tensor([[TEXT[place]]]), memory)
            torch.testing.assert_close(found[place - 16], model.logits(hidden_BTD)[0, 0], **CLOSE)


@pytest.mark.parametrize("part", [1, 3, 5, 16, 17, 18])
@pytest.mark.parametrize("reach", [ContextLimits(31), ContextLimits(5, attention_window=6)])
def test_the_size_of_the_parts_of_a_prompt_changes_nothing(
    make_model, monkeypatch: pytest.MonkeyPatch, part: int, context_limits: ContextLimits
) -> None:
    model = make_model()
    with torch.inference_mode():
        wanted, kept = read_prompts(model, [TEXT[:17]] * 2, model.inference_memory(2, context_limits))
        monkeypatch.setattr(writer_module, "_PROMPT_SEGMENT", part)
        watched = Watched(model)
        found, memory = read_prompts(watched, [TEXT[:17]] * 2, model.inference_memory(2, context_limits))
    assert watched.lengths == ([17 % part] if 17 % part else []) + [part] * (17 // part)
    torch.testing.assert_close(found, wanted, **CLOSE)
    assert_same_memory(memory, kept)


def test_parts_are_large(make_model) -> None:
    watched = Watched(make_model())
    with torch.inference_mode():
        read_prompts(watched, [[0] * 1100], None)
    assert watched.lengths == [76, 512, 512]


# Rows side by side.

PROMPTS = [TEXT[:4], TEXT[3:20], TEXT[5:6], TEXT[11:24], TEXT[2:6]]


@pytest.mark.parametrize("part", [3, 512])
@pytest.mark.parametrize("reach", [ContextLimits(31), ContextLimits(5, attention_window=6), ContextLimits(5)])
@pytest.mark.parametrize("settings", [{"sampler": Sampler(0)}, {"sampler": Sampler(1.3, repetition_penalty=1.7)}])
def test_unequal_prompts_side_by_side_are_each_alone(
    make_model, monkeypatch: pytest.MonkeyPatch, part: int, context_limits: ContextLimits, settings: dict[str, Any]
) -> None:
    """The same tokens, log-probabilities and memory, though row by row the texts end at different lengths."""
    monkeypatch.setattr(writer_module, "_PROMPT_SEGMENT", part)
    model = make_model()
    settings = {**settings, "end_ids": [2, 7], "scored": True}
    memory = model.inference_memory(len(PROMPTS), context_limits)
    together = BatchGenerator(model, PROMPTS, seed=5, memory=memory, **settings)
    found: list[list[GeneratedToken]] = [[] for _ in PROMPTS]
    for _ in range(23):
        for made in together.step() if together.rows else []:
            found[made.row].append(made)
    memories = []
    for row, prompt in enumerate(PROMPTS):
        alone = BatchGenerator(
            model, [prompt], seed=5 + row, memory=model.inference_memory(1, context_limits), **settings
        )
        wanted = [made for _ in range(23) if alone.rows for made in alone.step()]
        assert [made.token for made in found[row]] == [made.token for made in wanted]
        assert [made.ended for made in found[row]] == [made.ended for made in wanted]
        for one, other in zip(found[row], wanted, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-10)
        memories.append(alone.memory())
    assert_same_memory(together.memory(), Memory.concatenate(memories))
    if settings["sampler"].temperature:
        assert len({len(made) for made in found}) > 1, "all rows end at the same length: they show too little"


def test_padding_is_told(make_model) -> None:
    """Or the test above would hold of prompts of equal lengths alone."""
    watched = Watched(make_model())
    BatchGenerator(watched, PROMPTS)
    assert watched.own == [[4, 17, 1, 13, 4]]


def test_samples_read_the_prompt_once(make_model) -> None:
    """Sample r is what seed + r gives alone."""
    model = make_model()
    watched = Watched(model)
    together = BatchGenerator(watched, PROMPTS[:2], Sampler(top_k=9), seed=3, samples=3)
    assert len(watched.lengths) == 1
    found = written(together, 11)
    for row in range(6):
        assert written(BatchGenerator(model, [PROMPTS[row // 3]], Sampler(top_k=9), seed=3 + row), 11) == [found[row]]
    assert len({tuple(row) for row in found}) == 6


def test_rows_that_end_leave(make_model) -> None:
    watched = Watched(make_model())
    writer = BatchGenerator(watched, [TEXT[:3]], Scripted([4] * 9), samples=5)
    writer.step()
    writer.stop([1, 3])
    assert writer.rows == [0, 2, 4]
    assert [made.row for made in writer.step()] == [0, 2, 4]
    writer.stop([0, 2, 4])
    assert writer.rows == []
    assert writer.memory().position_B.tolist() == [5, 4, 5, 4, 5]


@pytest.mark.parametrize("reach", [ContextLimits(31), ContextLimits(5, attention_window=6)])
@pytest.mark.parametrize("first", [3, 7, 16])
@pytest.mark.parametrize("kind", ["initial_memory", "inference_memory"])
def test_memory_goes_on_with_what_was_read_before(
    make_model, context_limits: ContextLimits, first: int, kind: str
) -> None:
    """A then B from the memory of A, as in a conversation, is A and B in one; and the memory of A stays as it was."""
    model = make_model()
    wanted, _, _ = decode(model, TEXT[:17], TEXT[17:], model.inference_memory(1, context_limits))
    with torch.no_grad():
        _, memory = model(torch.tensor([TEXT[:first]]), getattr(model, kind)(1, context_limits))
    before = {name: tensor.clone() for name, tensor in memory.tensors().items()}
    found, _, _ = decode(model, TEXT[first:17], TEXT[17:], memory)
    torch.testing.assert_close(found, wanted, **CLOSE)
    assert all(torch.equal(tensor, before[name]) for name, tensor in memory.tensors().items())
    forgetful, _, _ = decode(model, TEXT[first:17], TEXT[17:], model.inference_memory(1, context_limits))
    assert (forgetful[0] - wanted[0]).abs().max() > 1e-6


def test_a_memory_taken_on_the_way_stays_as_it_was(make_model) -> None:
    """Of all that a writer gives away nothing changes when it goes on, nor does it go on differently."""
    model = make_model()
    writer, undisturbed = (BatchGenerator(model, PROMPTS[:2], Sampler(), seed=1) for _ in range(2))
    written(writer, 3)
    memory = writer.memory()
    before = {name: tensor.clone() for name, tensor in memory.tensors().items()}
    after = written(writer, 5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in memory.tensors().items())
    assert [row[3:] for row in written(undisturbed, 8)] == after
    assert not torch.equal(writer.memory().position_B, memory.position_B)


def test_inputs_stay_as_they_were(make_model) -> None:
    prompts, ends = [list(prompt) for prompt in PROMPTS], [2]
    BatchGenerator(make_model(), prompts, Sampler(repetition_penalty=1.3), end_ids=ends, samples=2).step()
    assert (prompts, ends) == (PROMPTS, [2])


def test_no_mode_is_left_switched_on(make_model) -> None:
    writer = BatchGenerator(make_model(), [TEXT[:3]])
    writer.step()
    assert (torch.is_inference_mode_enabled(), torch.is_grad_enabled()) == (False, True)


def test_without_memory_given_it_is_the_models_own(make_model) -> None:
    model = make_model(memory_length=5)
    found, watched, _ = decode(model, TEXT[:4], TEXT[4:])
    wanted, _, _ = decode(model, TEXT[:4], TEXT[4:], model.inference_memory(1, ContextLimits(5)))
    assert torch.equal(found, wanted)
    assert watched.memory.context_limits == ContextLimits(5)


def test_greedy_is_the_argmax_of_one_pass(make_model) -> None:
    model = make_model()
    (made,) = written(
        BatchGenerator(model, [TEXT[:3]], Sampler(0), memory=model.inference_memory(1, ContextLimits(31))), 19
    )
    tokens = list(TEXT[:3])
    for token in made:
        logits_TV, _ = whole(model, tokens, ContextLimits(0))
        assert token == int(logits_TV[-1].argmax())
        tokens.append(token)
    assert len(set(tokens)) > 3


def test_memory_does_not_grow(make_model) -> None:
    """However much is written, what is held stays as it is."""
    model = make_model()
    writer = BatchGenerator(model, [TEXT[:3]], Sampler(repetition_penalty=1.2, repetition_window=7), memory=None)
    written(writer, 40)
    sizes = {name: tensor.shape for name, tensor in writer._memory.tensors().items()}
    assert writer._earlier_BK.shape == (1, 7)
    written(writer, 200)
    assert {name: tensor.shape for name, tensor in writer._memory.tensors().items()} == sizes
    assert (writer._earlier_BK.shape, writer._made_BT.shape) == ((1, 7), (1, 0))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompts": [[]]}, "the prompt is empty; give at least one token"),
    ({"prompts": [[1], []]}, "the prompt is empty"),
    ({"prompts": []}, "no prompt was given; give at least one"),
    ({"prompts": [[1, 23]]}, "token 23 is not one of the 23 the model knows; give 0 to 22"),
    ({"prompts": [[1, -1]]}, "token -1 is not one of the 23"),
    ({"end_ids": [23]}, "end id 23 is not one of the 23"),
    ({"samples": 0}, "0 samples wanted; give 1 or more"),
    ({"seed": -1}, r"seed -1: wanted 0 or more, below 2\*\*63"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_wrong_words_are_refused(make_model, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        BatchGenerator(make_model(), **{"prompts": [[1]], **settings})


def test_a_memory_of_other_rows_is_refused(make_model) -> None:
    model = make_model()
    with pytest.raises(UserError, match="memory of 2 rows beside 1 rows of input; use memory"):
        BatchGenerator(model, [[1]], memory=model.inference_memory(2))


def test_a_model_in_training_is_refused(make_model) -> None:
    with pytest.raises(UserError, match=r"training mode, where dropout disturbs it; call model.eval\(\) first"):
        BatchGenerator(make_model().train(), [[1]])


@pytest.mark.parametrize("sampler", [Sampler(0), Sampler(), Sampler(top_k=3), Sampler(top_p=0.5, min_p=0.1)])
def test_weights_that_are_not_numbers_are_refused(make_model, sampler: Sampler) -> None:
    model = make_model()
    with torch.no_grad():
        model.softmax.bias[5] = float("nan")
    with pytest.raises(UserError, match="scores are not numbers: its weights are damaged, or its training diverged"):
        BatchGenerator(model, [[1]], sampler).step()
