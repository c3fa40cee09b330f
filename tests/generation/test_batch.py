"""Generating token by token equals one pass over the whole; sequences side by side equal each one alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from scripted import CLOSE, TEXT, Scripted, Watched, assert_same_memory, full_pass
from tensors import assert_same_tensors, copied_tensors
from torch import Tensor

from transformer_xl.config import UserError
from transformer_xl.generation import batch
from transformer_xl.generation.batch import BatchGenerator, GeneratedToken, prefill
from transformer_xl.generation.config import GenerationConfig
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import ContextLimits, Memory


def generated(generator: BatchGenerator, steps: int) -> list[list[GeneratedToken]]:
    """Return the tokens of each sequence after so many steps."""
    sequences: list[list[GeneratedToken]] = [[] for _ in generator.active]
    for _ in range(steps):
        for token in generator.step() if generator.active else []:
            sequences[token.sequence].append(token)
    return sequences


def ids_of(sequence: list[GeneratedToken]) -> list[int]:
    return [token.token_id for token in sequence]


def decode(
    model: LanguageModel, prompt: list[int], script: list[int], memory: Memory | None = None
) -> tuple[Tensor, Watched, BatchGenerator]:
    """Return the logits before each token of the script, the model with its calls, and the generator."""
    scripted, watched = Scripted(script), Watched(model)
    generator = BatchGenerator(watched, [prompt], memory=memory, logits_processor=scripted)
    assert ids_of(generated(generator, len(script))[0]) == script
    assert watched.lengths[-len(script) + 1 :] == [1] * (len(script) - 1)
    return torch.cat(scripted.seen), watched, generator


LIMITS = {
    "all of it kept": ContextLimits(31),
    "exactly kept": ContextLimits(28),
    "all kept, distances clamped": ContextLimits(31, clamp_length=5),
    "memory shorter than the prompt, with its window": ContextLimits(5, attention_window=6),
    "memory longer than the window": ContextLimits(13, attention_window=6),
    "one key": ContextLimits(1, attention_window=2),
}


@pytest.mark.parametrize("style", [{}, {"norm_first": True}, {"attn_implementation": "reference"}])
@pytest.mark.parametrize("context_limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("prompt_length", [1, 4, 17])
def test_token_by_token_equals_one_pass(make_model, style, context_limits: ContextLimits, prompt_length: int) -> None:
    """Logits and memory, where memory holds all that a query attends to."""
    model = make_model(**style)
    memory = model.inference_memory(1, context_limits)
    found, watched, generator = decode(model, TEXT[:prompt_length], TEXT[prompt_length:], memory)
    wanted, _ = full_pass(model, TEXT[:-1], replace(context_limits, memory_length=0))
    torch.testing.assert_close(found, wanted[prompt_length - 1 :], **CLOSE)
    assert_same_memory(watched.memory, full_pass(model, TEXT[:-1], context_limits)[1])
    assert_same_memory(generator.memory(), full_pass(model, TEXT, context_limits)[1])


def test_a_prompt_longer_than_memory_is_read_whole(make_model) -> None:
    """Without a window the prompt attends to all of itself, and later tokens to memory: its end."""
    model = make_model()
    found, _, _ = decode(model, TEXT[:17], TEXT[17:], model.inference_memory(1, ContextLimits(5)))
    logits_TV, memory = full_pass(model, TEXT[:17], ContextLimits(5))
    torch.testing.assert_close(found[0], logits_TV[-1], **CLOSE)
    with torch.no_grad():
        for position in range(17, len(TEXT) - 1):
            hidden_BTD, memory = model(torch.tensor([[TEXT[position]]]), memory)
            torch.testing.assert_close(found[position - 16], model.logits(hidden_BTD)[0, 0], **CLOSE)


@pytest.mark.parametrize("segment", [1, 3, 16, 17, 18])
@pytest.mark.parametrize("context_limits", [ContextLimits(31), ContextLimits(5, attention_window=6)])
def test_the_prefill_segment_changes_nothing(
    make_model, monkeypatch: pytest.MonkeyPatch, segment: int, context_limits: ContextLimits
) -> None:
    model = make_model()
    with torch.inference_mode():
        wanted, wanted_memory = prefill(model, [TEXT[:17]] * 2, model.inference_memory(2, context_limits))
        monkeypatch.setattr(batch, "_PREFILL_SEGMENT", segment)
        watched = Watched(model)
        found, memory = prefill(watched, [TEXT[:17]] * 2, model.inference_memory(2, context_limits))
    assert watched.lengths == ([17 % segment] if 17 % segment else []) + [segment] * (17 // segment)
    torch.testing.assert_close(found, wanted, **CLOSE)
    assert_same_memory(memory, wanted_memory)


# Sequences side by side.

PROMPTS = [TEXT[:4], TEXT[3:20], TEXT[5:6], TEXT[11:24], TEXT[2:6]]


@pytest.mark.parametrize("segment", [3, 512])
@pytest.mark.parametrize("context_limits", [ContextLimits(31), ContextLimits(5, attention_window=6), ContextLimits(5)])
@pytest.mark.parametrize("settings", [{"greedy": True}, {"temperature": 1.3, "repetition_penalty": 1.7, "top_k": None}])
def test_unequal_prompts_side_by_side_are_each_alone(
    make_model, monkeypatch: pytest.MonkeyPatch, segment: int, context_limits: ContextLimits, settings: dict[str, Any]
) -> None:
    """The same tokens, log-probabilities and memory, though the sequences end at different lengths."""
    monkeypatch.setattr(batch, "_PREFILL_SEGMENT", segment)
    model = make_model()
    settings = {**settings, "eos_token_ids": [2, 7], "logprobs": True}
    memory = model.inference_memory(len(PROMPTS), context_limits)
    together = BatchGenerator(model, PROMPTS, GenerationConfig(seed=5, **settings), memory=memory)
    found = generated(together, 23)
    memories = []
    for row, prompt in enumerate(PROMPTS):
        memory = model.inference_memory(1, context_limits)
        alone = BatchGenerator(model, [prompt], GenerationConfig(seed=5 + row, **settings), memory=memory)
        (wanted,) = generated(alone, 23)
        assert ids_of(found[row]) == ids_of(wanted)
        assert [token.is_eos for token in found[row]] == [token.is_eos for token in wanted]
        for one, other in zip(found[row], wanted, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-10)
        memories.append(alone.memory())
    assert_same_memory(together.memory(), Memory.concatenate(memories))
    if "temperature" in settings:
        assert len({len(sequence) for sequence in found}) > 1, "all end at the same length: this shows too little"


def test_padding_is_marked(make_model) -> None:
    """Otherwise the test above would hold for prompts of equal lengths alone."""
    watched = Watched(make_model())
    BatchGenerator(watched, PROMPTS)
    assert watched.unpadded == [[4, 17, 1, 13, 4]]


def test_samples_read_the_prompt_once(make_model) -> None:
    """Sample i is what seed + i gives alone."""
    model = make_model()
    watched = Watched(model)
    together = BatchGenerator(watched, PROMPTS[:2], GenerationConfig(top_k=9, seed=3, num_samples=3))
    assert len(watched.lengths) == 1
    found = [ids_of(sequence) for sequence in generated(together, 11)]
    for row in range(6):
        alone = BatchGenerator(model, [PROMPTS[row // 3]], GenerationConfig(top_k=9, seed=3 + row))
        assert ids_of(generated(alone, 11)[0]) == found[row]
    assert len({tuple(sequence) for sequence in found}) == 6


def test_finished_sequences_leave_the_batch(make_model) -> None:
    config = GenerationConfig(num_samples=5)
    generator = BatchGenerator(make_model(), [TEXT[:3]], config, logits_processor=Scripted([4] * 9))
    generator.step()
    generator.finish([1, 3])
    assert [token.sequence for token in generator.step()] == generator.active == [0, 2, 4]
    generator.finish([0, 2, 4])
    assert generator.active == []
    assert generator.memory().position_B.tolist() == [5, 4, 5, 4, 5]


@pytest.mark.parametrize("context_limits", [ContextLimits(31), ContextLimits(5, attention_window=6)])
@pytest.mark.parametrize("first", [3, 7, 16])
@pytest.mark.parametrize("kind", ["initial_memory", "inference_memory"])
def test_memory_continues_what_was_read_before(
    make_model, context_limits: ContextLimits, first: int, kind: str
) -> None:
    """A, then B from the memory of A, as in a conversation, is A and B in one; the memory of A stays as it was."""
    model = make_model()
    wanted, _, _ = decode(model, TEXT[:17], TEXT[17:], model.inference_memory(1, context_limits))
    with torch.no_grad():
        _, memory = model(torch.tensor([TEXT[:first]]), getattr(model, kind)(1, context_limits))
    before = copied_tensors(memory)
    found, _, _ = decode(model, TEXT[first:17], TEXT[17:], memory)
    torch.testing.assert_close(found, wanted, **CLOSE)
    assert_same_tensors(memory, before)
    without, _, _ = decode(model, TEXT[first:17], TEXT[17:], model.inference_memory(1, context_limits))
    assert (without[0] - wanted[0]).abs().max() > 1e-6


def test_a_memory_taken_on_the_way_stays_as_it_was(make_model) -> None:
    """Nothing that a generator hands out changes when it goes on, nor does it go on differently."""
    model = make_model()
    config = GenerationConfig(top_k=None, seed=1)
    generator, undisturbed = (BatchGenerator(model, PROMPTS[:2], config) for _ in range(2))
    generated(generator, 3)
    memory = generator.memory()
    before = copied_tensors(memory)
    after = generated(generator, 5)
    assert_same_tensors(memory, before)
    assert [sequence[3:] for sequence in generated(undisturbed, 8)] == after
    assert not torch.equal(generator.memory().position_B, memory.position_B)


def test_inputs_and_modes_stay_as_they_were(make_model) -> None:
    prompts = [list(prompt) for prompt in PROMPTS]
    BatchGenerator(make_model(), prompts, GenerationConfig(repetition_penalty=1.3, num_samples=2)).step()
    assert prompts == PROMPTS
    assert (torch.is_inference_mode_enabled(), torch.is_grad_enabled()) == (False, True)


def test_without_a_memory_it_is_the_models_own(make_model) -> None:
    model = make_model(memory_length=5)
    found, watched, _ = decode(model, TEXT[:4], TEXT[4:])
    wanted, _, _ = decode(model, TEXT[:4], TEXT[4:], model.inference_memory(1, ContextLimits(5)))
    assert torch.equal(found, wanted)
    assert watched.memory.context_limits == ContextLimits(5)


def test_what_is_held_does_not_grow(make_model) -> None:
    config = GenerationConfig(repetition_penalty=1.2, repetition_penalty_window=7)
    generator = BatchGenerator(make_model(), [TEXT[:3]], config)
    generated(generator, 40)
    sizes = {name: tensor.shape for name, tensor in generator._memory.tensors().items()}
    generated(generator, 100)
    assert {name: tensor.shape for name, tensor in generator._memory.tensors().items()} == sizes
    assert (generator._latest_BK.shape, generator._generated_BT.shape) == ((1, 7), (1, 0))


@pytest.mark.parametrize(
    ("prompts", "eos_token_ids", "message"),
    [
        ([[]], (), "prompt is empty"),
        ([[1], []], (), "prompt is empty"),
        ([], (), "no prompt was given"),
        ([[1, 23]], (), "token id 23.*vocabulary of 23.*0 to 22"),
        ([[1, -1]], (), "token id -1"),
        ([[1.5]], (), "integers"),
        ([[1]], (23,), "eos token id 23.*0 to 22"),
    ],
)
def test_wrong_inputs_are_refused(make_model, prompts: Any, eos_token_ids: tuple[int, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        BatchGenerator(make_model(), prompts, GenerationConfig(eos_token_ids=eos_token_ids))


def test_wrong_models_and_memories_are_refused(make_model) -> None:
    model = make_model()
    with pytest.raises(UserError, match=r"memory of .*2 .* 1"):
        BatchGenerator(model, [[1]], memory=model.inference_memory(2))
    with pytest.raises(UserError, match=r"training mode.*model\.eval\(\)"):
        BatchGenerator(make_model().train(), [[1]])
    with torch.no_grad():
        model.softmax.bias[5] = float("nan")
    for settings in ({"greedy": True}, {"top_k": None}, {"top_k": 3}):
        with pytest.raises(UserError, match="not finite"):
            BatchGenerator(model, [[1]], GenerationConfig(**settings)).step()
