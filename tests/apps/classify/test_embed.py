"""A document has the hidden states that the model has when it reads the document alone, segment by segment.

Shape suffixes: T tokens, D model width, L layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import MEMORY, MODELS, SEGMENT, ids, make_run

from transformer_xl import Run, SurprisalStream, UserError, embed, generate
from transformer_xl.evaluation.plan import EvaluationPlan
from transformer_xl.integrations.checkpoints.pretrained import config_values
from transformer_xl.model.memory import ContextLimits
from transformer_xl.text.tokenizers.word import WordTokenizer

LENGTHS = (20, 1, SEGMENT, 61, SEGMENT + 1, 2 * SEGMENT, MEMORY + SEGMENT, 8 * SEGMENT + 3, 2)
DOCUMENTS = [bytes(ids(1, length, seed=length)[0].tolist()) for length in LENGTHS]


@torch.no_grad()
def states_of(run: Run, document: bytes, segment_length: int, limits: ContextLimits) -> torch.Tensor:
    """Return the hidden states of all layers (L + 1, T, D), by the model as it is, of a single row."""
    memory, parts = run.model.initial_memory(1, limits), []
    for part in torch.tensor(list(document)).split(segment_length):
        states_BTD, memory = run.model.hidden_states(part[None], memory)
        parts.append(torch.cat(states_BTD))
    return torch.cat(parts, dim=1)


# XLNet reads documents to both sides: tests/xlnet/test_documents.py
@pytest.mark.parametrize("name", [name for name in MODELS if name != "xlnet"])
def test_vectors_are_hidden_states_of_the_document_read_alone(name: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", name)
    plan = EvaluationPlan.resolve(run.config)
    assert plan.segment_length == SEGMENT
    last, mean = embed(run, DOCUMENTS), embed(run, DOCUMENTS, pooling="mean", layer=1)
    assert last.dtype == mean.dtype == np.float32
    for index, document in enumerate(DOCUMENTS):
        states_LTD = states_of(run, document, SEGMENT, plan.context_limits)
        torch.testing.assert_close(torch.from_numpy(last[index]), states_LTD[-1, -1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.from_numpy(mean[index]), states_LTD[1].mean(0), rtol=1e-4, atol=1e-5)


def test_last_line_gets_no_token_for_its_end(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tokenizer=WordTokenizer(("<eos>", "a", "b"), eos_token="<eos>"))
    limits = EvaluationPlan.resolve(run.config).context_limits
    for document, token_ids in (("a b", (1, 2)), ("a b\n", (1, 2, 0)), ("a\nb", (1, 0, 2)), ("\n", (0,))):
        expected_TD = states_of(run, bytes(token_ids), SEGMENT, limits)[-1]
        for pooling, vector_D in (("last", expected_TD[-1]), ("mean", expected_TD.mean(0))):
            actual_D = torch.from_numpy(embed(run, document, pooling=pooling)[0])
            torch.testing.assert_close(actual_D, vector_D, rtol=1e-4, atol=1e-5)


def test_lengths_layer_and_batch_size_can_be_chosen(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for layer in range(3):
        given = embed(run, DOCUMENTS, layer=layer, segment_length=5, memory_length=40, batch_size=3)
        for vector, document in zip(given, DOCUMENTS, strict=True):
            expected = states_of(run, document, 5, ContextLimits(40))[layer, -1]
            torch.testing.assert_close(torch.from_numpy(vector), expected, rtol=1e-4, atol=1e-5)
    assert np.abs(embed(run, DOCUMENTS, memory_length=0) - embed(run, DOCUMENTS)).max() > 1e-2


def test_steps_hold_no_more_of_a_longer_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest memory and step of a document of 40,000 tokens are those of one of 4,000."""
    run, sizes = make_run(tmp_path / "run"), list[tuple[int, int]]()
    model = run.inference("float32").model
    run_layers = model.run_layers

    def record(x_BTD, memory, *rest):
        sizes.append((memory.length, x_BTD.shape[1]))
        return run_layers(x_BTD, memory, *rest)

    monkeypatch.setattr(model, "run_layers", record)
    largest = []
    for length in (4_000, 40_000):
        sizes.clear()
        tokens: list[int] = []
        embed(run, "a" * length, pooling="mean", segment_length=64, memory_length=100, progress=tokens.append)
        assert sum(tokens) == length
        largest.append((max(slots for slots, _ in sizes), max(new for _, new in sizes)))
    assert largest[0] == largest[1] == (100, 512)


@pytest.mark.parametrize(
    ("name", "evaluation"),
    [
        ("transformer-xl", {"method": "sliding-window"}),
        ("xlnet", {"method": "both-sides", "num_orders": 3}),
    ],
)
def test_what_only_reads_takes_no_method_from_the_run(name: str, evaluation: dict[str, Any], tmp_path: Path) -> None:
    run, plain = make_run(tmp_path / "run", name, evaluation=evaluation), make_run(tmp_path / "plain", name)
    np.testing.assert_array_equal(embed(run, ["a text"]), embed(plain, ["a text"]))
    scored, wanted = (SurprisalStream(which).read(b"a text") for which in (run, plain))
    np.testing.assert_array_equal(scored.nats_K, wanted.nats_K)
    completion, wanted_completion = (generate(which, "a text", max_new_tokens=4, seed=1) for which in (run, plain))
    assert completion.token_ids == wanted_completion.token_ids
    if name == "transformer-xl":
        assert config_values(run.config, None) == config_values(plain.config, None)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for documents, settings, message in (
        ([], {}, "no document; give at least one"),
        (["a", ""], {}, "text 2: the text is empty"),
        ({"first": ""}, {}, "first: the text is empty"),
        (["a"], {"layer": 3}, r"layer 3: must be 0 .* to 2"),
        (["a"], {"pooling": "max"}, "no pooling 'max'; give last or mean"),
        (["a"], {"method": "sliding-window", "attention_window": 9}, "method is sliding-window; give method memory"),
        (["a"], {"layers": 1}, "no argument 'layers'.*layer"),
        (["a"], {"segment_length": 0}, "segment_length"),
    ):
        with pytest.raises(UserError, match=message):
            embed(run, documents, **settings)
    words = make_run(tmp_path / "words", tokenizer=WordTokenizer(("<eos>", "a", "b"), eos_token="<eos>"))
    with pytest.raises(UserError, match=r"text 2.*'c'"):
        embed(words, ["a b", "a c"])
    with pytest.raises(UserError, match="text 2: the text is empty"):
        embed(words, ["a b", " "])
