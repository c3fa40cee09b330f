"""Speculative decoding: with drafts from the text so far, generation gives what it gives without them.

The fixture make_inference (tests/conftest.py) prepares a small float64 model with random weights and a vocabulary of
23. TEXT is a list of ids of that vocabulary, and RecordedModel.lengths has the number of tokens of each call.

Shape suffixes: B batch size, T tokens, V vocabulary, X pairs of tokens.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import pytest
import torch
from forced_tokens import TEXT, RecordedModel, assert_same_memory
from model_configs import small_model
from tensors import assert_same_tensors, copied_tensors
from torch import Tensor

from transformer_xl.config import RunConfig, TrainConfig, UserError
from transformer_xl.generation.batch import BatchGenerator, GeneratedToken
from transformer_xl.generation.generate import stream
from transformer_xl.generation.generation_config import GenerationConfig
from transformer_xl.generation.speculative import PromptLookup, SpeculativeModel
from transformer_xl.model.memory import ContextLimits, Memory
from transformer_xl.run import Run
from transformer_xl.text.tokenizers import ByteTokenizer

REPETITIVE = TEXT[:9] * 4
MODELS: dict[str, dict[str, Any]] = {
    "paper": {},
    "n-grams and norms": {"max_ngram": 4, "ngram_buckets": 29, "d_ngram": 5, "qk_norm": True, "norm_first": True},
    "empty slots attended": {"attend_empty_memory": True},
    "value embeddings": {"value_embeddings": True},
    "key offset": {"key_offset": True, "attention_sinks": True},
}
LIMITS = [ContextLimits(31), ContextLimits(5), ContextLimits(13, attention_window=6), ContextLimits(9, clamp_length=4)]
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"greedy": True},
    "sampled": {"top_p": 0.9, "repetition_penalty": 1.3, "repetition_penalty_window": 7, "eos_token_ids": [4, 9]},
}


def without_last(token_ids_BT: Tensor, logits_BV: Tensor) -> Tensor:
    """A logits processor for which the generated tokens matter: the last one is not repeated."""
    return logits_BV.scatter(-1, token_ids_BT[:, -1:], -torch.inf)


def generated(
    model: Any, steps: int, limits: ContextLimits, prompt: list[int] = REPETITIVE, **settings: Any
) -> tuple[list[GeneratedToken], list[Memory]]:
    """Return the tokens, and the memory after each third of them."""
    settings = {"min_new_tokens": 20, "logprobs": True, **settings}
    processor = None if settings.get("greedy") else without_last
    memory = model.initial_memory(1, limits)
    generator = BatchGenerator(model, [prompt], GenerationConfig(**settings), memory=memory, logits_processor=processor)
    tokens, memories = list[GeneratedToken](), list[Memory]()
    while generator.active and len(tokens) < steps:
        tokens += generator.step()
        if len(tokens) % 3 == 0:
            memories.append(generator.memory())
    return tokens, memories


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_partly_right_drafts_do_not_change_tokens_logprobs_and_memory(
    make_inference, monkeypatch: pytest.MonkeyPatch, name: str, limits: ContextLimits, settings: dict[str, Any]
) -> None:
    """The drafts are the tokens that are generated without them, some replaced, so all lengths of them are accepted."""
    model, draw, accepted = make_inference(**MODELS[name]), random.Random(5), Counter[int]()
    expected, expected_memories = generated(model, 30, limits, **settings)
    truth = [*REPETITIVE, *(token.token_id for token in expected)]

    def predict(lookup: PromptLookup, number: int) -> list[int]:
        known = (truth + TEXT)[len(lookup._tokens) :][:number]
        return [token if draw.random() < 0.7 else (token + 1) % 23 for token in known]

    def read(speculative: SpeculativeModel, token: int, memory: Memory) -> None:
        accepted[speculative._num_used] += 1
        original_read(speculative, token, memory)

    original_read = SpeculativeModel._read
    monkeypatch.setattr(SpeculativeModel, "_read", read)
    monkeypatch.setattr(SpeculativeModel, "_num_drafted", lambda _: draw.randrange(6))
    monkeypatch.setattr(PromptLookup, "predict", predict)
    actual, memories = generated(model, 30, limits, prompt_lookup_num_tokens=5, **settings)
    assert [token.token_id for token in actual] == [token.token_id for token in expected]
    assert [token.logprob for token in actual] == pytest.approx([token.logprob for token in expected], abs=1e-10)
    assert accepted.keys() >= {1, 2, 3}
    for memory, expected_memory in zip(memories, expected_memories, strict=True):
        assert_same_memory(memory, expected_memory)


@pytest.mark.parametrize("power", [0.1, 1.5])
def test_drafts_are_read_only_where_they_pay(make_inference, monkeypatch: pytest.MonkeyPatch, power: float) -> None:
    """A greedy text that repeats itself needs a call for several tokens, unless a segment takes longer than they do."""
    recorded = RecordedModel(make_inference())
    monkeypatch.setattr(time, "perf_counter", lambda: sum(length**power for length in recorded.lengths))
    limits, settings = ContextLimits(11), {"greedy": True, "min_new_tokens": 0}
    expected, _ = generated(recorded.recorded, 300, limits, **settings)
    memory = recorded.initial_memory(1, limits)
    config = GenerationConfig(greedy=True, prompt_lookup_num_tokens=8)
    generator = BatchGenerator(recorded, [REPETITIVE], config, memory=memory)
    recorded.lengths.clear()
    actual = [token.token_id for _ in range(300) for token in generator.step()]
    assert actual == [token.token_id for token in expected]
    if power > 1:
        assert sum(length > 1 for length in recorded.lengths) < 6
    else:
        assert len(recorded.lengths) < 150


def test_distribution_is_that_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chi-square of 20,000 sampled tokens.

    With one layer and one memory slot, the probabilities depend on the last two tokens alone.
    """
    model = small_model(vocab_size=3, n_layers=1)
    limits, temperature = ContextLimits(1), 1.7
    pairs_X2 = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    with torch.inference_mode():
        hidden_X2D, _ = model(pairs_X2, model.initial_memory(9, limits))
        expected_XV = (model.logits(hidden_X2D)[:, -1] / temperature).softmax(-1)
    inference = Run(model, ByteTokenizer(), RunConfig(train=TrainConfig())).inference()
    monkeypatch.setattr(SpeculativeModel, "_num_drafted", lambda _: 2)
    config = GenerationConfig(temperature=temperature, top_k=None, prompt_lookup_num_tokens=2, seed=11)
    recorded = RecordedModel(inference)
    generator = BatchGenerator(recorded, [[0, 1]], config, memory=inference.initial_memory(1, limits))
    text = [0, 1, *(token.token_id for _ in range(20_000) for token in generator.step())]
    assert len(recorded.lengths) < 16_000, "drafts were accepted"
    counts = Counter(zip(text, text[1:], text[2:], strict=False))
    counts_XV = torch.tensor(
        [[counts[first, second, third] for third in range(3)] for first, second in pairs_X2.tolist()]
    )
    expected_counts_XV = counts_XV.sum(-1, keepdim=True) * expected_XV
    chi_square = float(((counts_XV - expected_counts_XV).square() / expected_counts_XV).sum())
    assert chi_square < 42.3, "18 degrees of freedom: 0.1% of samples are above"


def test_text_and_stop_of_a_stream(make_model) -> None:
    run = Run(make_model(vocab_size=256), ByteTokenizer(), RunConfig(train=TrainConfig(memory_length=11)))
    settings: dict[str, Any] = {"greedy": True, "max_new_tokens": 60, "min_new_tokens": 30}
    free = "".join(stream(run, "abcabcabc", **settings))
    for stop in ((), (free[40:43],)):
        expected = stream(run, "abcabcabc", stop=stop, **settings)
        actual = stream(run, "abcabcabc", stop=stop, prompt_lookup_num_tokens=10, **settings)
        assert list(actual) == list(expected)
        assert (actual.finish_reason, actual.token_ids) == (expected.finish_reason, expected.token_ids)
        assert_same_memory(actual.memory(), expected.memory())


def test_memory_taken_from_a_generator_stays_as_it_is(make_inference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpeculativeModel, "_num_drafted", lambda _: 3)
    model = make_inference()
    generator = BatchGenerator(model, [REPETITIVE], GenerationConfig(prompt_lookup_num_tokens=3, top_k=None))
    taken = list[tuple[Memory, dict[str, Tensor]]]()
    for _ in range(30):
        generator.step()
        memory = generator.memory()
        taken.append((memory, copied_tensors(memory.tensors())))
    for memory, tensors in taken:
        assert_same_tensors(memory.tensors(), tensors)


def test_long_texts_are_looked_up_in_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_xl.generation.speculative._TEXT_LENGTH", 20)
    lookup = PromptLookup([*range(100, 200), 1, 2, 3, 4, 5])
    for token in (9, 3, 4):
        lookup.add(token)
    assert lookup.predict(3) == [5, 9, 3]
    for token in range(300, 400):
        lookup.add(token)
    assert not lookup.predict(1)
    assert len(lookup._tokens) <= 40
    lookup.add(398)
    lookup.add(399)
    assert lookup.predict(5) == [398, 399] * 2 + [398]


def test_what_cannot_be_drafted_is_refused(make_inference, make_model) -> None:
    config = GenerationConfig(prompt_lookup_num_tokens=4)
    with pytest.raises(UserError, match="one text at a time, not 2; leave it out"):
        BatchGenerator(make_inference(), [[1], [2]], config)
    with pytest.raises(UserError, match="needs a KV cache"):
        BatchGenerator(make_model(architecture="lstm"), [[1]], config)
    model = make_inference(max_ngram=5, ngram_buckets=97, d_ngram=3)
    with pytest.raises(
        UserError, match="needs a memory_length of 4 or more with this model's n-gram embeddings, not 3"
    ):
        BatchGenerator(model, [[1]], config, memory=model.initial_memory(1, ContextLimits(3)))
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens or num_beams"):
        GenerationConfig(prompt_lookup_num_tokens=4, num_beams=2)
