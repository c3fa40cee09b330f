"""Token-by-token generation equals one pass over all tokens; each sequence of a batch equals the sequence alone.

The fixture make_inference (tests/conftest.py) prepares a small model with random weights and a vocabulary of 23. TEXT
is a list of ids of that vocabulary. The logits processor ForcedTokens makes the model generate given tokens,
`full_pass` reads tokens in one call, and RecordedModel.lengths has the number of tokens of each call of the model. The
first argument of ContextLimits is the memory length.

Shape suffixes: B batch size, T tokens, D d_model, V vocabulary, K earlier tokens.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from forced_tokens import CLOSE, TEXT, ForcedTokens, RecordedModel, assert_same_memory, full_pass
from tensors import assert_same_tensors, copied_tensors
from torch import Tensor

from transformer_xl import reader
from transformer_xl.config import UserError
from transformer_xl.generation.batch import BatchGenerator, GeneratedToken
from transformer_xl.generation.generation_config import GenerationConfig
from transformer_xl.inference import TokenModel, prepare_inference
from transformer_xl.model.memory import ContextLimits, Memory


def run_steps(generator: BatchGenerator, steps: int) -> list[list[GeneratedToken]]:
    """Run steps until all sequences are finished, and return the tokens of each sequence."""
    sequences: list[list[GeneratedToken]] = [[] for _ in generator.active]
    for _ in range(steps):
        for token in generator.step() if generator.active else []:
            sequences[token.sequence].append(token)
    return sequences


def ids_of(sequence: list[GeneratedToken]) -> list[int]:
    return [token.token_id for token in sequence]


def generate_forced(
    model: TokenModel, prompt: list[int], token_ids: list[int], memory: Memory | None = None
) -> tuple[Tensor, RecordedModel, BatchGenerator]:
    """Return the logits before each forced token, the model with its recorded calls, and the generator."""
    forced, recorded = ForcedTokens(token_ids), RecordedModel(model)
    generator = BatchGenerator(recorded, [prompt], memory=memory, logits_processor=forced)
    assert ids_of(run_steps(generator, len(token_ids))[0]) == token_ids
    # the prompt is read before; the last token is generated but not read
    assert recorded.lengths[-len(token_ids) + 1 :] == [1] * (len(token_ids) - 1)
    return torch.cat(forced.recorded_logits), recorded, generator


LIMITS = {
    "all tokens in memory": ContextLimits(31),
    "distances clamped": ContextLimits(31, clamp_length=5),
    "memory shorter than the prompt, and the window that it fills": ContextLimits(5, attention_window=6),
    "memory longer than the window": ContextLimits(13, attention_window=6),
}


@pytest.mark.parametrize("context_limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("prompt_length", [1, 4, 17])
def test_token_by_token_equals_one_pass(make_inference, context_limits: ContextLimits, prompt_length: int) -> None:
    """Both logits and memory are equal if the memory holds all that a query attends to."""
    model = make_inference()
    memory = model.initial_memory(1, context_limits)
    logits_TV, recorded, generator = generate_forced(model, TEXT[:prompt_length], TEXT[prompt_length:], memory)
    expected_TV, _ = full_pass(model, TEXT[:-1], replace(context_limits, memory_length=0))
    torch.testing.assert_close(logits_TV, expected_TV[prompt_length - 1 :], **CLOSE)
    assert_same_memory(recorded.memory, full_pass(model, TEXT[:-1], context_limits)[1])
    assert_same_memory(generator.memory(), full_pass(model, TEXT, context_limits)[1])


@pytest.mark.parametrize("stride", [512, 14])
@pytest.mark.parametrize("prompt_length", [1, 7, 12, 20, 28])
def test_prompt_longer_than_memory_is_read_in_segments_from_its_start(
    make_inference, monkeypatch: pytest.MonkeyPatch, prompt_length: int, stride: int
) -> None:
    """Each token sees the memory before its segment and its segment; later tokens see the memory, the prompt's end."""
    monkeypatch.setattr(reader, "STRIDE", stride)
    model, prompt = make_inference(), TEXT[:prompt_length]
    generator = BatchGenerator(model, [prompt], segment_length=7, memory=model.initial_memory(1, ContextLimits(5)))
    memory = model.initial_memory(1, ContextLimits(5))
    for start in range(0, prompt_length, 7):
        hidden_BTD, memory = model(torch.tensor([prompt[start : min(start + 7, prompt_length)]]), memory)
    assert_same_memory(generator.memory(), memory)
    for _ in range(5):
        expected_V = model.logits(hidden_BTD)[0, -1].log_softmax(-1)
        (token,) = generator.step()
        torch.testing.assert_close(model.logits(generator._hidden_B1D)[0, 0].log_softmax(-1), expected_V, **CLOSE)
        hidden_BTD, memory = model(torch.tensor([[token.token_id]]), memory)


@pytest.mark.parametrize("segment", [1, 3, 16, 17, 18])
@pytest.mark.parametrize("context_limits", [ContextLimits(31), ContextLimits(5, attention_window=6)])
def test_segments_of_a_prompt_that_memory_or_window_holds_do_not_matter(
    make_inference, monkeypatch: pytest.MonkeyPatch, segment: int, context_limits: ContextLimits
) -> None:
    """Nor does the number of tokens that are read at once: as many whole segments as fit STRIDE."""
    recorded = RecordedModel(make_inference())
    expected = BatchGenerator(recorded.recorded, [TEXT[:17]] * 2, memory=recorded.initial_memory(2, context_limits))
    monkeypatch.setattr(reader, "STRIDE", 7)
    memory = recorded.initial_memory(2, context_limits)
    actual = BatchGenerator(recorded, [TEXT[:17]] * 2, segment_length=segment, memory=memory)
    assert recorded.lengths == {1: [7, 7, 3], 3: [6, 6, 5], 16: [16, 1], 17: [17], 18: [17]}[segment]
    torch.testing.assert_close(actual._hidden_B1D, expected._hidden_B1D, **CLOSE)
    assert_same_memory(actual.memory(), expected.memory())


# Several sequences in a batch

# parts of TEXT of different lengths
PROMPTS = [TEXT[:4], TEXT[3:20], TEXT[5:6], TEXT[11:24], TEXT[2:6]]


@pytest.mark.parametrize("stride", [6, 512])
@pytest.mark.parametrize("context_limits", [ContextLimits(31), ContextLimits(5, attention_window=6), ContextLimits(5)])
@pytest.mark.parametrize("settings", [{"greedy": True}, {"temperature": 1.3, "repetition_penalty": 1.7, "top_k": None}])
def test_prompts_of_different_lengths_equal_each_prompt_alone(
    make_inference,
    monkeypatch: pytest.MonkeyPatch,
    stride: int,
    context_limits: ContextLimits,
    settings: dict[str, Any],
) -> None:
    """The same tokens, log-probabilities and memory, though the sequences end at different lengths."""
    monkeypatch.setattr(reader, "STRIDE", stride)
    model = make_inference()
    settings = {**settings, "eos_token_ids": [2, 7], "logprobs": True}
    memory = model.initial_memory(len(PROMPTS), context_limits)
    together = BatchGenerator(model, PROMPTS, GenerationConfig(seed=5, **settings), segment_length=3, memory=memory)
    sequences, memories = run_steps(together, 23), []
    for row, prompt in enumerate(PROMPTS):
        memory = model.initial_memory(1, context_limits)
        config = GenerationConfig(seed=5 + row, **settings)
        alone = BatchGenerator(model, [prompt], config, segment_length=3, memory=memory)
        (expected,) = run_steps(alone, 23)
        assert [(token.token_id, token.is_eos) for token in sequences[row]] == [
            (token.token_id, token.is_eos) for token in expected
        ]
        logprobs = [token.logprob for token in sequences[row]]
        assert logprobs == pytest.approx([token.logprob for token in expected], abs=1e-10)
        memories.append(alone.memory())
    assert_same_memory(together.memory(), Memory.concatenate(memories))
    if "temperature" in settings:
        assert len({len(sequence) for sequence in sequences}) > 1, "all sequences have the same length"


def test_prompt_of_several_samples_is_read_once(make_inference) -> None:
    """Sample i equals a sequence generated alone with seed + i."""
    model = make_inference()
    recorded = RecordedModel(model)
    together = BatchGenerator(recorded, PROMPTS[:2], GenerationConfig(top_k=9, seed=3, num_samples=3))
    assert len(recorded.lengths) == 1
    samples = [ids_of(sequence) for sequence in run_steps(together, 11)]
    for row in range(6):
        alone = BatchGenerator(model, [PROMPTS[row // 3]], GenerationConfig(top_k=9, seed=3 + row))
        assert ids_of(run_steps(alone, 11)[0]) == samples[row]
    assert len({tuple(sample) for sample in samples}) == 6


def test_finished_sequences_leave_the_batch(make_inference) -> None:
    config = GenerationConfig(num_samples=5)
    generator = BatchGenerator(make_inference(), [TEXT[:3]], config, logits_processor=ForcedTokens([4] * 9))
    generator.step()
    generator.finish([1, 3])
    assert [token.sequence for token in generator.step()] == generator.active == [0, 2, 4]
    generator.finish([0, 2, 4])
    assert generator.active == []
    # tokens read: 3 of the prompt, and 2 generated ones, or 1 where the sequence was finished after the first
    assert generator.memory().position_B.tolist() == [5, 4, 5, 4, 5]


@pytest.mark.parametrize("max_draft", [None, 3])
def test_error_while_a_token_is_chosen_leaves_the_state(make_inference, max_draft: int | None) -> None:
    """As Ctrl-C does in a notebook, whose next cell goes on: no token is read twice."""
    model, calls = make_inference(), list[int]()

    def interrupted(_ids_BT: Tensor, logits_BV: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) in (1, 4, 6):
            raise KeyboardInterrupt
        return logits_BV

    config = GenerationConfig(greedy=True, prompt_lookup_num_tokens=max_draft)
    expected = BatchGenerator(model, [TEXT[:9] * 2], config)
    tokens = run_steps(expected, 9)
    generator, found = BatchGenerator(model, [TEXT[:9] * 2], config, logits_processor=interrupted), list[Any]()
    while len(found) < 9:
        with suppress(KeyboardInterrupt):
            found += generator.step()
            continue
        assert generator.memory().position_B.tolist() == [18 + len(found)]
    assert ids_of(found) == ids_of(tokens[0])
    assert_same_memory(generator.memory(), expected.memory())


@pytest.mark.parametrize("settings", [{}, {"key_offset": True}])
@pytest.mark.parametrize("context_limits", [ContextLimits(31), ContextLimits(5, attention_window=6)])
@pytest.mark.parametrize(("first", "prepared"), [(3, True), (16, True), (7, False)])
def test_generation_continues_a_memory(
    make_model, context_limits: ContextLimits, first: int, prepared: bool, settings: dict[str, Any]
) -> None:
    """A prompt read in two parts, of which the first has `first` tokens, equals the prompt read at once; the memory of
    the first part is not changed, whether it holds keys and values or (of a model that is not prepared) hidden
    states."""
    plain = make_model(**settings)
    model = prepare_inference(plain) if prepared else plain
    expected_TV, _, _ = generate_forced(model, TEXT[:17], TEXT[17:], model.initial_memory(1, context_limits))
    with torch.no_grad():
        _, memory = model(torch.tensor([TEXT[:first]]), model.initial_memory(1, context_limits))
    before = copied_tensors(memory)
    logits_TV, _, _ = generate_forced(model, TEXT[first:17], TEXT[17:], memory)
    torch.testing.assert_close(logits_TV, expected_TV, **CLOSE)
    assert_same_tensors(memory, before)


def test_memory_and_later_steps_of_a_generator_do_not_affect_each_other(make_inference) -> None:
    """Asking for the memory changes neither it nor the tokens that follow; prompts are not changed either."""
    model, config, prompts = (
        make_inference(),
        GenerationConfig(top_k=None, seed=1),
        [list(prompt) for prompt in PROMPTS],
    )
    generator, undisturbed = (BatchGenerator(model, prompts, config) for _ in range(2))
    run_steps(generator, 3)
    memory = generator.memory()
    before = copied_tensors(memory)
    later = run_steps(generator, 5)
    assert_same_tensors(memory, before)
    assert [sequence[3:] for sequence in run_steps(undisturbed, 8)] == later
    assert prompts == PROMPTS
    assert (torch.is_inference_mode_enabled(), torch.is_grad_enabled()) == (False, True)


def test_default_memory_has_the_length_of_the_model(make_inference) -> None:
    generator = BatchGenerator(make_inference(memory_length=5), [TEXT[:4]])
    assert generator.memory().context_limits == ContextLimits(5)


def test_stored_tokens_do_not_grow(make_inference) -> None:
    """Only the latest 7 tokens are kept, for the repetition penalty, and none for a logits processor."""
    config = GenerationConfig(repetition_penalty=1.2, repetition_penalty_window=7)
    generator = BatchGenerator(make_inference(), [TEXT[:3]], config)
    run_steps(generator, 40)
    shapes = {name: tensor.shape for name, tensor in generator._memory.tensors().items()}
    run_steps(generator, 20)
    assert {name: tensor.shape for name, tensor in generator._memory.tensors().items()} == shapes
    assert (generator._latest_BK.shape, generator._generated_BT.shape) == ((1, 7), (1, 0))


@pytest.mark.parametrize(
    ("prompts", "eos_token_ids", "message"),
    [
        ([[1], []], (), "prompt is empty"),
        ([], (), "no prompt was given"),
        ([[1, 23]], (), "token id 23.*vocabulary of 23.*0 to 22"),
        ([[1, -1]], (), "token id -1"),
        ([[1.5]], (), "integers"),
        ([[1]], (23,), "eos token id 23.*0 to 22"),
    ],
)
def test_invalid_token_ids_are_refused(
    make_inference, prompts: Any, eos_token_ids: tuple[int, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        BatchGenerator(make_inference(), prompts, GenerationConfig(eos_token_ids=eos_token_ids))


def test_unsuitable_models_and_memories_are_refused(make_inference, make_model) -> None:
    model = make_inference()
    with pytest.raises(UserError, match=r"memory of .*2 .* 1"):
        BatchGenerator(model, [[1]], memory=model.initial_memory(2))
    with pytest.raises(UserError, match=r"training mode.*model\.eval\(\)"):
        BatchGenerator(make_model().train(), [[1]])
    with torch.no_grad():
        model.model.softmax.bias[5] = float("nan")
    for settings in ({"greedy": True}, {"top_k": None}, {"top_k": 3}):
        with pytest.raises(UserError, match="not finite"):
            BatchGenerator(model, [[1]], GenerationConfig(**settings)).step()
