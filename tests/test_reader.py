"""What a token sees does not depend on who reads it, nor on how much is computed at once.

Shape suffixes: T tokens of a text, D model width.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from transformer_xl.inference import prepare_inference
from transformer_xl.model.memory import ContextLimits
from transformer_xl.ops.kernels import KERNELS
from transformer_xl.reader import Reader

SEGMENT, MEMORY = 7, 11
LENGTHS = (40, 5, 23, 31)
SETTINGS = {
    "plain": {},
    "norm first": {"norm_first": True, "qk_norm": True},
    "n-grams longer than the memory": {"max_ngram": 5, "ngram_buckets": 97, "d_ngram": 3},
    "value embeddings": {"value_embeddings": True},
    "key offset": {"key_offset": True, "attention_sinks": True},
}
LIMITS = {
    "plain": ContextLimits(MEMORY),
    "window and clamp": ContextLimits(MEMORY, attention_window=14, clamp_length=9),
    "short memory": ContextLimits(2),
    "no memory": ContextLimits(0),
}


def read_alone(model, text: list[int], limits: ContextLimits) -> Tensor:
    """Return the hidden states (T, D) of a text that is read alone, segment by segment, with hidden memory."""
    memory, parts = model.initial_memory(1, limits), []
    for start in range(0, len(text), SEGMENT):
        hidden_BTD, memory = model(torch.tensor([text[start : start + SEGMENT]]), memory)
        parts.append(hidden_BTD[0])
    return torch.cat(parts)


def read_together(reader: Reader, texts: list[list[int]], stride: int | None) -> list[Tensor]:
    """Return the hidden states (T, D) of each text."""
    parts: list[list[Tensor]] = [[] for _ in texts]
    for hidden_BTD, lengths in reader.read(texts, stride=stride):
        for row, length in enumerate(lengths):
            parts[row].append(hidden_BTD[row, hidden_BTD.shape[1] - length :])
    return [torch.cat(row) for row in parts]


@pytest.fixture
def texts(tokens) -> list[list[int]]:
    return [tokens(1, length, seed=length)[0].tolist() for length in LENGTHS]


@pytest.mark.parametrize("prepared", [False, True], ids=["hidden memory", "KV cache"])
@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS.keys())
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@torch.no_grad()
def test_every_stride_gives_what_single_segments_give(make_model, texts, settings, limits, prepared):
    model = make_model(**settings)
    expected = [read_alone(model, text, limits) for text in texts]
    reading = prepare_inference(model) if prepared else model
    for stride in (None, 3, SEGMENT, 13, 64):
        partial = stride is not None and stride % SEGMENT > 0
        reader = Reader.begin(reading, len(texts), limits, segment_length=SEGMENT, partial=partial)
        for actual, hidden_TD in zip(read_together(reader, texts, stride), expected, strict=True):
            torch.testing.assert_close(actual, hidden_TD, rtol=1e-10, atol=1e-10)
        assert reader.num_read == list(LENGTHS)
        last_BD = torch.stack([hidden_TD[-1] for hidden_TD in expected])
        torch.testing.assert_close(reader.last_hidden_B1D[:, 0], last_BD, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kernel", [name for name in KERNELS if name != "triton"])
@torch.no_grad()
def test_limits_of_single_queries_work_with_padding_in_each_kernel(make_model, texts, kernel):
    if not KERNELS[kernel].fits(torch.device("cpu"), torch.float64):
        pytest.skip(f"{kernel} is not available")
    model = make_model(attn_implementation=kernel)
    expected = [read_alone(model, text, LIMITS["plain"]) for text in texts]
    reader = Reader.begin(model, len(texts), LIMITS["plain"], segment_length=SEGMENT, partial=True)
    for actual, hidden_TD in zip(read_together(reader, texts, 17), expected, strict=True):
        torch.testing.assert_close(actual, hidden_TD, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_rows_go_on_inside_their_segments_and_can_be_selected(make_model, texts):
    model = prepare_inference(make_model())
    whole = [read_alone(model.model, text, LIMITS["plain"]) for text in texts]
    reader = Reader.begin(model, len(texts), LIMITS["plain"], segment_length=SEGMENT, partial=True, max_tokens=40)
    starts = [10, 3, 0, 17]
    for _ in reader.read([text[:start] for text, start in zip(texts, starts, strict=True)]):
        pass
    rows = [3, 0, 0, 1]
    chosen = reader.select(rows)
    rest = read_together(chosen, [texts[row][starts[row] :] for row in rows], None)
    for row, hidden_TD in zip(rows, rest, strict=True):
        torch.testing.assert_close(hidden_TD, whole[row][starts[row] :], rtol=1e-10, atol=1e-10)
    assert reader.num_read == starts  # the rows that others were selected from are as they were


@pytest.mark.parametrize("prepared", [False, True], ids=["hidden memory", "KV cache"])
@pytest.mark.parametrize("limits", [LIMITS["plain"], LIMITS["no memory"]], ids=["plain", "no memory"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@torch.no_grad()
def test_memory_that_is_handed_on_has_its_own_slots(make_model, texts, settings, limits, prepared):
    """After a text, the memory is that of a reader of whole segments, and a continuation begins a segment."""
    model = prepare_inference(make_model(**settings)) if prepared else make_model(**settings)
    readers = [Reader.begin(model, 1, limits, segment_length=SEGMENT, partial=partial) for partial in (False, True)]
    memories = []
    for reader, stride in zip(readers, (SEGMENT, 5), strict=True):
        read_together(reader, texts[:1], stride)
        memories.append(reader.memory)
    for name, tensor in memories[0].tensors().items():
        torch.testing.assert_close(memories[1].tensors()[name], tensor, rtol=1e-10, atol=1e-10)
    assert memories[1].context_limits == limits
    nexts = [Reader(model, memory, segment_length=SEGMENT, partial=True) for memory in memories]
    first, second = (read_together(reader, texts[1:2], None)[0] for reader in nexts)
    torch.testing.assert_close(first, second, rtol=1e-10, atol=1e-10)
    whole = read_together(Reader(model, memories[0], segment_length=SEGMENT), texts[2:3], None)[0]
    for stride in (1, 3, 5, SEGMENT, 2 * SEGMENT):
        reader = Reader(model, memories[0], segment_length=SEGMENT, partial=True)
        torch.testing.assert_close(read_together(reader, texts[2:3], stride)[0], whole, rtol=1e-10, atol=1e-10)
