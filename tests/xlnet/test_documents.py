"""Features, classifiers and blanks of an XLNet, which reads documents to both sides.

Shape suffixes: N documents, D model width, T tokens, K tokens of a text.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import make_run
from torch.nn.utils.rnn import pad_sequence

from transformer_xl.apps.classify.classifier import classify, load_classifier
from transformer_xl.apps.classify.embedding import embed
from transformer_xl.apps.classify.training import finetune_classifier
from transformer_xl.cli.main import run as command
from transformer_xl.config import EvaluationConfig, UserError
from transformer_xl.evaluation.evaluate import losses_in_order
from transformer_xl.evaluation.plan import EvaluationPlan, TokenizedText
from transformer_xl.evaluation.score import score
from transformer_xl.generation.infill import infill
from transformer_xl.integrations.checkpoints.convert import convert
from transformer_xl.integrations.checkpoints.pretrained import config_values
from transformer_xl.integrations.huggingface import (
    PretrainedTransformerXLConfig,
    TransformerXLForSequenceClassification,
    TransformerXLForTokenClassification,
)
from transformer_xl.model.memory import ContextLimits
from transformer_xl.run import Run
from transformer_xl.xlnet.two_streams import XLNet


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("runs") / "xlnet", architecture="xlnet", perm_size=16, max_gram=3)


@torch.no_grad()
def test_features_of_documents_of_other_lengths_read_at_once(run: Run) -> None:
    # the last segment of the second, with memory before it, is read beside a whole one of the first
    documents = ["A somewhat longer document, of four segments.", "A shorter document."]
    assert isinstance(run.model, XLNet)
    for pooling in ("last", "mean"):
        vectors_ND = embed(run, documents, pooling=pooling, memory_length=20, segment_length=12)
        for document, vector_D in zip(documents, vectors_ND, strict=True):
            ids, memory, states = list(document.encode()), run.model.initial_memory(1, ContextLimits(20)), []
            for start in range(0, len(ids), 12):
                streams = run.model.two_streams([ids[start : start + 12]], memory)
                memory = streams.memory
                states.append(streams.content_BTD[0])
            states_TD = torch.cat(states)
            wanted_D = states_TD[-1] if pooling == "last" else states_TD.mean(0)
            np.testing.assert_allclose(vector_D, wanted_D, atol=1e-5)
    first_ND, last_ND = (embed(run, documents, layer=layer) for layer in (0, None))
    np.testing.assert_allclose(last_ND, embed(run, documents), atol=1e-6)
    assert np.abs(first_ND - last_ND).max() > 1e-2


def test_a_classifier_learns_what_stands_before_and_after(run: Run, tmp_path: Path) -> None:
    """In transformers it reads documents to both sides too, on whichever side they are padded."""
    documents = [f"{'abcd'[i % 4] * 9}{'xy'[i % 2]}{'efgh'[i % 3] * (i % 13)}" for i in range(36)]
    labels = ["odd" if i % 2 else "even" for i in range(36)]
    settings = {"max_steps": 20, "eval_interval": 20, "learning_rate": 2e-2, "warmup_steps": 0}
    path = tmp_path / "classifier"
    finetune_classifier(run, documents, labels, path, pooling="mean", train=settings, progress=False)
    found = classify(load_classifier(path), documents, labels)
    assert found.accuracy > 0.9
    convert(path, tmp_path / "folder", to="huggingface")
    model = TransformerXLForSequenceClassification.from_pretrained(tmp_path / "folder").eval()
    ids = [torch.tensor(list(document.encode())) for document in documents]
    for side in ("left", "right"):
        ids_BT = pad_sequence(ids, batch_first=True, padding_value=256, padding_side=side)
        with torch.no_grad():
            logits_BC = model(ids_BT, attention_mask=(ids_BT != 256).long()).logits
        np.testing.assert_allclose(logits_BC.softmax(-1), found.probabilities_NC, atol=1e-5)


@torch.no_grad()
def test_labels_of_tokens_come_from_both_sides(run: Run) -> None:
    """Of a row padded on the right as of the row alone; also where inputs are given in place of tokens."""
    torch.manual_seed(1)
    config = PretrainedTransformerXLConfig(**{**config_values(run.config, None), "evaluation_segment_length": 12})
    model = TransformerXLForTokenClassification(config).eval()
    text = list(b"A text of more segments than one.")
    ids_BT = torch.tensor([text, text[:20] + [0] * 13])
    logits_BTC = model(ids_BT, attention_mask=torch.tensor([[1] * 33, [1] * 20 + [0] * 13])).logits
    torch.testing.assert_close(logits_BTC[1, :20], model(ids_BT[1:, :20]).logits[0], atol=1e-5, rtol=0)
    assert not torch.allclose(logits_BTC[0, 19], logits_BTC[1, 19], atol=1e-4)  # what follows it counts
    inputs_BTD = model.get_input_embeddings()(ids_BT)
    torch.testing.assert_close(model(inputs_embeds=inputs_BTD).logits[0], logits_BTC[0], atol=1e-5, rtol=0)


def test_blanks_are_filled_from_both_sides(run: Run) -> None:
    text = "What is before the first blank: ___, and after it; then ___."
    found = infill(run, text, num_tokens=3, num_samples=2, memory_length=8)
    assert found == infill(run, text, num_tokens=3, num_samples=2, memory_length=8)
    (alone,) = infill(run, text, num_tokens=3, memory_length=8)  # the first sample, in a batch of its own
    assert alone.filled == found[0].filled
    assert alone.logprob == pytest.approx(found[0].logprob, abs=1e-4)
    assert found[0].filled != found[1].filled
    assert found[0].text.startswith("What is before the first blank: ")
    (before,) = infill(run, text, num_tokens=3, greedy=True)
    (most,) = infill(run, text, num_tokens=3, greedy=True, memory_length=2**31 - 1)  # of which the text fills few slots
    assert most.filled == infill(run, text, num_tokens=3, greedy=True, memory_length=100)[0].filled
    (after,) = infill(run, text.replace("and after", "AND AFTER"), num_tokens=3, greedy=True)
    assert before.logprob != pytest.approx(after.logprob, abs=1e-6)  # what stands after a blank counts


def test_the_probability_of_what_is_filled_in_is_its_score(run: Run) -> None:
    (found,) = infill(run, "before___after", num_tokens=4)  # a text of one block
    span_K = np.array([*range(6), *[6] * 4, *range(7, 12)])
    plan = EvaluationPlan.of_run(run, EvaluationConfig(method="both-sides", segment_length=16))
    text = TokenizedText(np.array(found.token_ids), 0, span_K=span_K)
    nats_K = losses_in_order(plan.model_of(run), text, plan)
    assert nats_K[6:10].sum() == pytest.approx(-found.logprob, abs=1e-4)


@pytest.mark.parametrize(
    ("text", "num_tokens", "message"),
    [("no blank", 2, "has no blank"), ("a ___ b", 17, "must be 1 to 16"), ("a ___ b", 0, "must be 1 to 16")],
)
def test_what_cannot_be_filled_is_refused(run: Run, text: str, num_tokens: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        infill(run, text, num_tokens=num_tokens)


def test_an_empty_mark_is_refused(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["infill", str(run.path), "--text", "a ___ b", "--blank", ""]) == 2
    assert "the text has no blank; write ___ where something is missing" in capsys.readouterr().err


def test_settings_of_reading_to_the_left_are_refused(run: Run) -> None:
    with pytest.raises(UserError, match="attention_window 5 limits reading from left to right"):
        embed(run, "a text", attention_window=5)
    for settings, message in (
        ({"attention_window": 5}, "attention_window 5 limits"),
        ({"extended_context_length": 3, "memory_length": 0}, "method both-sides cannot read the extended context"),
        ({"num_orders": 1001}, "less than or equal to 1000"),
    ):
        with pytest.raises(UserError, match=message):
            score(run, "a text", method="both-sides", **settings)


def test_blanks_are_filled_whatever_the_window_of_evaluation(run: Run, tmp_path: Path) -> None:
    settings = {"architecture": "xlnet", "perm_size": 16, "max_gram": 3}
    other = make_run(tmp_path / "run", evaluation={"attention_window": 5}, **settings)
    assert infill(other, "a ___ b", num_tokens=2) == infill(run, "a ___ b", num_tokens=2)


def test_a_model_that_reads_to_the_left_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs a model that reads to both sides, and this is transformer-xl"):
        infill(make_run(tmp_path / "run"), "a ___ b")
