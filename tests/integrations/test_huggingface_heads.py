"""Our models in transformers without a head, and as classifiers.

Shape suffixes: B batch rows, T tokens, D model width, V vocabulary, C labels, N heads, S keys.
"""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from integrations.checkpoints.checkpoints import golden, hugging_face_folder
from integrations.runs import opened
from small_runs import MEMORY, MODELS, SEGMENT, ids, make_run
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    pipeline,
)

from transformer_xl import convert
from transformer_xl.config import UserError
from transformer_xl.integrations.huggingface import (
    PretrainedTransformerXLConfig,
    TransformerXLForSequenceClassification,
    TransformerXLForTokenClassification,
    TransformerXLModel,
    from_run,
)
from transformer_xl.run import Run

CLOSE = {"rtol": 0, "atol": 1e-12}  # in float64
LONG = 75 * SEGMENT + 2  # more than is computed at once
each_model = pytest.mark.parametrize("name", MODELS)


def hub_folder(path: Path, name: str = "transformer-xl", **arguments: Any) -> Path:
    """Write a run, and the folder for transformers that is made of it."""
    make_run(path / "run", name, **arguments)
    convert(path / "run", path / "hub", to="huggingface")
    return path / "hub"


def own_hidden(run: Run, ids_BT: Tensor, *, of_documents: bool = False) -> Tensor:
    """Return the hidden states (B, T, D) of the run's model, which reads segment by segment."""
    memory, parts = run.model.initial_memory(len(ids_BT)), []
    model = run.model.for_documents() if of_documents else run.model
    for part_BT in ids_BT.split(SEGMENT, dim=1):
        hidden_BTD, memory = model(part_BT, memory)
        parts.append(hidden_BTD)
    return torch.cat(parts, dim=1)


# The model without a head


@each_model
@torch.no_grad()
def test_hidden_states_are_those_of_the_language_model(name: str, tmp_path: Path) -> None:
    ids_BT = ids(2, 3 * SEGMENT + 2)
    run, language_model, _ = opened(tmp_path / "double", name)
    expected_BTD = own_hidden(run, ids_BT)
    torch.testing.assert_close(language_model.base_model(ids_BT).last_hidden_state, expected_BTD, **CLOSE)
    if name == "xlnet":
        return  # transformers' own class opens its folder
    base, loading = AutoModel.from_pretrained(hub_folder(tmp_path, name), output_loading_info=True)
    assert isinstance(base, TransformerXLModel)
    assert not any(loading.values())
    assert not any("softmax" in key for key in base.state_dict())
    torch.testing.assert_close(base(ids_BT).last_hidden_state, expected_BTD.float(), rtol=0, atol=1e-5)
    if run.config.model.has_memory and run.model.limits_visible:
        first = base(ids_BT[:, :SEGMENT], use_cache=True)
        again = base(ids_BT[:, SEGMENT:], past_key_values=first.past_key_values, output_hidden_states=True)
        torch.testing.assert_close(again.hidden_states[-1], expected_BTD[:, SEGMENT:].float(), rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_language_model_is_its_base_model_and_a_matrix(tmp_path: Path) -> None:
    """As TRL takes it apart, for the pads of which it has labels -100."""
    for settings in ({}, {"tie_word_embeddings": False}):
        _, model, _ = opened(tmp_path / f"run{len(settings)}", **settings)
        ids_BT = ids(2, 2 * SEGMENT + 3)
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        logits_BTV = model.base_model(input_ids=ids_BT).last_hidden_state @ head.weight.T + head.bias
        torch.testing.assert_close(logits_BTV, model(ids_BT).logits, **CLOSE)
        torch.testing.assert_close(head(model.base_model(ids_BT)[0]), logits_BTV, **CLOSE)
        torch.testing.assert_close(embedding.weight[ids_BT], embedding(ids_BT), **CLOSE)
        assert (head.weight is embedding.weight) == (not settings)
        assert model.base_model is model.base_model
    _, adaptive, _ = opened(tmp_path / "adaptive", "adaptive")
    assert adaptive.get_output_embeddings() is None
    assert not hasattr(adaptive.get_input_embeddings(), "weight")


def test_classes_open_the_folders_of_each_other(tmp_path: Path) -> None:
    """A language model made of a base model has a new softmax, and says so; a run is not made of it."""
    folder = hub_folder(tmp_path)
    base = AutoModel.from_pretrained(folder)
    base.save_pretrained(tmp_path / "base")
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=3)
    classifier.save_pretrained(tmp_path / "classifier")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier")
    ids_BT = ids(2, 9)
    with torch.no_grad():
        torch.testing.assert_close(again(ids_BT).logits, classifier(ids_BT).logits)
        hidden_BTD = AutoModel.from_pretrained(tmp_path / "classifier")(ids_BT).last_hidden_state
        torch.testing.assert_close(hidden_BTD, base(ids_BT).last_hidden_state)
    _, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert loading["missing_keys"] == {"model.softmax.bias"}
    for name, message in (("base", "a model without a head.*with AutoModel of"), ("classifier", "has a classifier")):
        (tmp_path / name / "txl_tokenizer.json").write_bytes((folder / "txl_tokenizer.json").read_bytes())
        with pytest.raises(UserError, match=message):
            convert(tmp_path / name, tmp_path / "back")


@pytest.mark.parametrize("name", ["transformer-xl", "pre-norm", "window", "shaw", "attends to empty memory"])
def test_attention_is_returned_for_a_segment(name: str, tmp_path: Path) -> None:
    """With the hidden states of other kernels; probabilities of the memory's slots and of the tokens."""
    run, model, _ = opened(tmp_path / "run", name)
    ids_BT, length = ids(2, SEGMENT), MEMORY if name == "attends to empty memory" else 0
    with torch.no_grad():
        plain = model(ids_BT, output_hidden_states=True)
        traced = model(ids_BT, output_attentions=True, output_hidden_states=True, use_cache=True)
        torch.testing.assert_close(traced.logits, plain.logits, **CLOSE)
        for state_BTD, expected_BTD in zip(traced.hidden_states, plain.hidden_states, strict=True):
            torch.testing.assert_close(state_BTD, expected_BTD, **CLOSE)
        assert [one.shape for one in traced.attentions] == [(2, 2, SEGMENT, length + SEGMENT)] * 2
        torch.testing.assert_close(traced.attentions[0].sum(-1), torch.ones(2, 2, SEGMENT).double(), **CLOSE)
        second_BT = ids(2, 4, seed=5)
        after = model(second_BT, past_key_values=traced.past_key_values, output_attentions=True)
        memory = run.model(ids_BT, run.model.initial_memory(2))[1]
        expected = [trace.terms.probabilities_BNTS for trace in run.model.trace(second_BT, memory)]
        for found_BNTS, expected_BNTS in zip(after.attentions, expected, strict=True):
            torch.testing.assert_close(found_BNTS, expected_BNTS, **CLOSE)
        assert model(ids_BT, output_attentions=True).past_key_values is None
    output = model.train()(ids_BT, output_attentions=True, output_hidden_states=True)
    made = torch.autograd.grad(output.logits[0, -1].max(), [output.attentions[1], output.hidden_states[1]])
    assert all(bool(one.any()) for one in made)  # of what was computed with, not of copies


def test_attention_that_cannot_be_returned_is_refused(tmp_path: Path) -> None:
    model, tokenizer = from_run(make_run(tmp_path / "run"))
    for name, message in (("lstm", "lstm returns no attention"), ("vaswani", "vaswani returns no attention")):
        with pytest.raises(UserError, match=message):
            from_run(make_run(tmp_path / name, name))[0](ids(1, 3), output_attentions=True)
    with pytest.raises(UserError, match=rf"one segment, here of {SEGMENT}, .* evaluation_segment_length=8"):
        model(ids(1, SEGMENT + 1), output_attentions=True)
    inputs = tokenizer(["a", "bcd"], return_tensors="pt", padding=True)
    with pytest.raises(UserError, match="output_attentions is for rows without padding"):
        model(**inputs, output_attentions=True)


# Folders of transformers 4.37.2


@torch.no_grad()
def test_old_base_model_has_the_hidden_states_and_attention_that_it_had(tmp_path: Path) -> None:
    config, weights, expected = golden("base")
    folder = hugging_face_folder(tmp_path / "hub", config, weights)
    model, loading = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values())
    output = model(expected["tokens_BT"], output_hidden_states=True, output_attentions=True)
    torch.testing.assert_close(torch.stack(output.hidden_states), expected["hidden_LBTD"], rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.stack(output.attentions), expected["attentions_LBNTS"], rtol=0, atol=1e-5)
    output = model(expected["tokens_BT"])
    torch.testing.assert_close(output.last_hidden_state, expected["hidden_LBTD"][-1], rtol=0, atol=1e-5)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModel.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(again(expected["tokens_BT"]).last_hidden_state, output.last_hidden_state)
    with pytest.raises(UserError, match=r"has a model without a head, and a run needs a softmax \(crit"):
        convert(folder, tmp_path / "run")


@pytest.mark.parametrize("case", ["classifier", "regression"])
@torch.no_grad()
def test_old_classifier_has_the_scores_that_it_had(case: str, tmp_path: Path) -> None:
    """Rows are padded with the id of a token of the vocabulary, without a mask, which the old class did not take."""
    config, weights, expected = golden(case)
    folder = hugging_face_folder(tmp_path / "hub", config, weights)
    model, loading = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values())
    torch.testing.assert_close(model(expected["tokens_BT"]).logits, expected["scores_BC"], rtol=0, atol=1e-5)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(again(expected["tokens_BT"]).logits, expected["scores_BC"], rtol=0, atol=1e-5)
    with pytest.raises(UserError, match="has a classifier, and a run needs a softmax"):
        convert(folder, tmp_path / "run")


def test_old_language_model_opens_as_a_classifier(tmp_path: Path) -> None:
    config, weights, _ = golden("clusters")
    folder = hugging_face_folder(tmp_path / "hub", config, weights)
    model, loading = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=5, output_loading_info=True)
    assert loading["missing_keys"] == {"score.weight"}
    assert not loading["unexpected_keys"]
    assert model(ids(2, 9, vocab_size=23)).logits.shape == (2, 5)
    direct = TransformerXLForSequenceClassification.from_pretrained(folder, num_labels=4)
    assert direct.score.weight.shape == (4, 8)


# Classifiers of texts


def classifier(run: Run, **settings: Any) -> TransformerXLForSequenceClassification:
    """Return a classifier that shares the weights of a run's model, in their dtype and in evaluation mode."""
    config = from_run(run)[0].config
    config.update({"num_labels": 3} | settings)
    torch.manual_seed(5)
    model = TransformerXLForSequenceClassification(config)
    model.model = run.model
    torch.nn.init.normal_(model.score.weight)
    return model.to(run.model.device, run.model.like.dtype).eval()


def padded(rows: list[Tensor], side: str) -> dict[str, Tensor]:
    """Return rows of unequal lengths as a batch, with its mask."""
    width = max(map(len, rows))
    pads = [torch.full((width - len(row),), 256) for row in rows]
    pairs = zip(rows, pads, strict=True)
    ids_BT = torch.stack([torch.cat([pad, row] if side == "left" else [row, pad]) for row, pad in pairs])
    return {"input_ids": ids_BT, "attention_mask": (ids_BT != 256).long()}


@pytest.mark.parametrize("pooling", ["last", "mean"])
@each_model
@torch.no_grad()
def test_scores_are_of_the_pooled_hidden_states(name: str, pooling: str, tmp_path: Path) -> None:
    """On whichever side a row is padded, also where it is shorter than a segment and longer than is read at once."""
    run, _, _ = opened(tmp_path / "run", name)
    model = classifier(run, classifier_pooling=pooling)
    for width in (SEGMENT, LONG):
        rows = [ids(1, length, seed=length)[0] for length in (width, width - 3, 1, width // 2 + 1)]
        hidden = [own_hidden(run, row_T[None], of_documents=True)[0] for row_T in rows]
        expected_BC = model.score(
            torch.stack([one_TD[-1] if pooling == "last" else one_TD.mean(0) for one_TD in hidden])
        )
        for side in ("left", "right"):
            batch = padded(rows, side)
            torch.testing.assert_close(model(**batch).logits, expected_BC, **CLOSE)
            torch.testing.assert_close(model(batch["input_ids"]).logits, expected_BC, **CLOSE)
            output = model(**batch, output_hidden_states=True)
            torch.testing.assert_close(output.logits, expected_BC, **CLOSE)
            for row_TD, is_token_T, found_TD in zip(
                hidden, batch["attention_mask"], output.hidden_states[-1], strict=True
            ):
                torch.testing.assert_close(found_TD[is_token_T == 1], row_TD, **CLOSE)
        torch.testing.assert_close(model(rows[1][None]).logits, expected_BC[1:2], **CLOSE)


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("segments", [1, 2, 9])
def test_training_predicts_at_the_ends_of_the_last_segments(segments: int, pooling: str, tmp_path: Path) -> None:
    """Loss and gradients are those of the same computed by hand, row by row; earlier segments get no gradient."""
    run, _, _ = opened(tmp_path / "run", dropout=0.0)
    model = classifier(run, classifier_pooling=pooling, classifier_segments=segments).train()
    rows = [ids(1, length, seed=length)[0] for length in (4 * SEGMENT + 2, SEGMENT, 2 * SEGMENT + 1)]
    labels = torch.tensor([2, 0, 1])
    losses, parameters = [], [*model.parameters()]
    for row_T, label in zip(rows, labels, strict=True):
        memory, total_D, parts = run.model.initial_memory(1), 0.0, row_T.split(SEGMENT)
        for index, part_T in enumerate(parts):
            is_last = index >= len(parts) - segments
            with torch.set_grad_enabled(is_last):
                hidden_BTD, memory = run.model(part_T[None], memory)
            total_D = total_D + hidden_BTD[0].sum(0)
            num_read = index * SEGMENT + len(part_T)
            vector_D = hidden_BTD[0, -1] if pooling == "last" else total_D / num_read
            if is_last:
                losses.append(F.cross_entropy(model.score(vector_D), label))
    expected = torch.stack(losses).mean()
    expected_gradients = torch.autograd.grad(expected, parameters, allow_unused=True)
    for side in ("left", "right"):
        output = model(**padded(rows, side), labels=labels)
        torch.testing.assert_close(output.loss, expected, **CLOSE)
        gradients = torch.autograd.grad(output.loss, parameters, allow_unused=True)
        for found, wanted in zip(gradients, expected_gradients, strict=True):
            assert (found is None) == (wanted is None)
            if found is not None:
                torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    model.model.requires_grad_(False)
    output = model(**padded(rows, "left"), labels=labels)
    torch.testing.assert_close(output.loss, expected, **CLOSE)
    (found,) = torch.autograd.grad(output.loss, model.score.weight)
    pairs = zip(parameters, expected_gradients, strict=True)
    (wanted,) = (one for parameter, one in pairs if parameter is model.score.weight)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    with torch.no_grad():  # validation while training
        assert model(**padded(rows, "left"), labels=labels).logits.shape == (3, 3)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operators have made and that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self._seen:
                    self._seen.add(key)
                    self.now += size
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._free, key, size)
        return result

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_memory_does_not_grow_with_the_length_of_a_text(mode: str, tmp_path: Path) -> None:
    """But for the token ids themselves: they are given, and copied twice, with a mask."""
    run = make_run(tmp_path / "run", "transformer-xl", d_model=64, evaluation={"segment_length": 64})
    model, peaks = classifier(run), []
    for length in (256, 1024) if mode == "training" else (1024, 8192):
        ids_BT = ids(1, length)
        with LiveBytes() as live, torch.set_grad_enabled(mode == "training"):
            model.train(mode == "training")(ids_BT, attention_mask=torch.ones_like(ids_BT), labels=torch.tensor([1]))
        peaks.append(live.peak - 3 * ids_BT.nbytes)
    assert peaks[1] < 1.1 * peaks[0]
    assert peaks[0] > 64 * 64 * 4


@pytest.mark.parametrize(
    ("num_labels", "problem", "labels", "expected"),
    [
        (3, None, torch.tensor([2, 0]), lambda logits, labels: F.cross_entropy(logits, labels)),
        (1, None, torch.tensor([0.5, -1.0]), lambda logits, labels: F.mse_loss(logits[:, 0], labels)),
        (2, "regression", torch.randn(2, 2), lambda logits, labels: F.mse_loss(logits, labels)),
        (
            *(3, None, torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])),
            lambda logits, labels: F.binary_cross_entropy_with_logits(logits, labels),
        ),
    ],
)
def test_losses_are_those_of_transformers(
    num_labels: int, problem: Any, labels: Tensor, expected: Any, tmp_path: Path
) -> None:
    model = classifier(make_run(tmp_path / "run"), num_labels=num_labels, problem_type=problem)
    output = model(ids(2, 9), labels=labels)
    torch.testing.assert_close(output.loss, expected(output.logits, labels))


def test_pipeline_classifies_texts(tmp_path: Path) -> None:
    folder = hub_folder(tmp_path)
    names = {"id2label": {0: "good", 1: "bad"}, "label2id": {"good": 0, "bad": 1}}
    model = AutoModelForSequenceClassification.from_pretrained(folder, **names)
    model.save_pretrained(tmp_path / "classifier")
    from_run(tmp_path / "run")[1].save_pretrained(tmp_path / "classifier")
    judge = pipeline("text-classification", model=str(tmp_path / "classifier"))
    texts = ["a text", "a text that is much longer than a segment", "b"]
    single, together = [judge(text)[0] for text in texts], judge(texts, batch_size=3)
    assert [one["label"] for one in together] == [one["label"] for one in single]
    assert [one["score"] for one in together] == pytest.approx([one["score"] for one in single], abs=1e-6)
    vectors = pipeline("feature-extraction", model=str(tmp_path / "hub"))("a text")
    assert len(vectors[0]) == len("a text")


def test_padding_without_a_mask_is_known_in_an_exported_folder(tmp_path: Path) -> None:
    """It is a byte of the vocabulary there, so the configuration has to name it."""
    folder = hub_folder(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3).eval()
    for side in ("left", "right"):
        batch = AutoTokenizer.from_pretrained(folder, padding_side=side)(
            ["a text", "b"], padding=True, return_tensors="pt"
        )
        with torch.no_grad():
            logits_BC = model(**batch).logits
            torch.testing.assert_close(model(batch["input_ids"]).logits, logits_BC)


def test_wrong_labels_texts_and_settings_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    model = classifier(run)
    for number in (0, -1):
        with pytest.raises(UserError, match="num_labels is below 1 or id2label is empty; give 1"):
            classifier(run, num_labels=number)
    with pytest.raises(UserError, match=r"label 7 is none of 3 labels, 0 to 2; open the model with num_labels=8"):
        model(ids(2, 5), labels=torch.tensor([1, 7]))
    with pytest.raises(UserError, match=r"label -1 is none of 3 labels, 0 to 2; correct it"):
        model(ids(2, 5), labels=torch.tensor([1, -1]))
    with pytest.raises(UserError, match="row 1 has no token, only padding; leave empty texts out"):
        model(ids(2, 5), attention_mask=torch.tensor([[1] * 5, [0] * 5]))
    for name, value in (("classifier_pooling", "first"), ("classifier_segments", 0)):
        with pytest.raises(UserError, match=name):
            PretrainedTransformerXLConfig(**{name: value})
        changed = PretrainedTransformerXLConfig()
        setattr(changed, name, value)
        with pytest.raises(UserError, match=name):
            AutoModelForSequenceClassification.from_config(changed)


# Classifiers of tokens


@each_model
def test_each_token_is_classified(name: str, tmp_path: Path) -> None:
    run, _, _ = opened(tmp_path / "run", name)
    config = from_run(run)[0].config
    config.update({"num_labels": 5})
    model = TransformerXLForTokenClassification(config).double().eval()
    model.model = run.model
    rows = [ids(1, length, seed=length)[0] for length in (LONG, 3, SEGMENT + 1)]
    with torch.no_grad():
        for side in ("left", "right"):
            batch = padded(rows, side)
            logits_BTC = model(**batch).logits
            for row_T, is_token_T, found_TC in zip(rows, batch["attention_mask"], logits_BTC, strict=True):
                expected_TC = model.score(own_hidden(run, row_T[None], of_documents=True)[0])
                torch.testing.assert_close(found_TC[is_token_T == 1], expected_TC, **CLOSE)
    labels = torch.randint(0, 5, (2, 9)).index_fill(1, torch.tensor(0), -100)
    output = model.train()(ids(2, 9), labels=labels)
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits.flatten(0, 1).float(), labels.flatten()))
    output.loss.backward()
    with pytest.raises(UserError, match="a label for each token"):
        model(ids(2, 9), labels=labels[:, 1:])


def test_folder_of_a_token_classifier_opens(tmp_path: Path) -> None:
    model = AutoModelForTokenClassification.from_pretrained(hub_folder(tmp_path), num_labels=5)
    with pytest.raises(UserError, match="label 5 is none of 5 labels, 0 to 4; open the model with num_labels=6"):
        model(ids(1, 2), labels=torch.tensor([[0, 5]]))
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForTokenClassification.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(again(ids(2, 9)).logits, model(ids(2, 9)).logits)
    values = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert len(values["id2label"]) == 5
    assert not {"num_attention_heads", "num_key_value_heads", "head_dim"} & values.keys()
