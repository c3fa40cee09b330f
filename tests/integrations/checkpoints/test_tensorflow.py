"""Checkpoints of the authors' TensorFlow code: the losses that this code computes, and the vocabulary stored with them.

golden/make_tensorflow.py made the checkpoints: bytes, words and sentences are small models as for enwik8, WikiText-103
(wt103) and One Billion Word (lm1b), and narrow has embeddings narrower than the model. Each has 61 tokens.

Shape suffixes: B batch rows, T tokens, D model width.
"""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from integrations.checkpoints.old_modules import old_corpus, old_modules

from transformer_xl.config import TransformerXLConfig, UserError, load_recipe
from transformer_xl.integrations.checkpoints import tensorflow
from transformer_xl.integrations.checkpoints.convert import convert
from transformer_xl.integrations.checkpoints.source_config import ImportedModel
from transformer_xl.model.memory import ContextLimits
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.text.tokenizers.pre_tokenizer import PreTokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer

GOLDEN = Path(__file__).parent / "golden" / "tensorflow"
# sizes of these models; see COMMON in golden/make_tensorflow.py
SIZES = {"vocab_size": 61, "n_layers": 2, "d_model": 10, "n_heads": 3, "d_head": 2, "d_ff": 11}
WORDS = ["<eos>", "the", "<unk>", "na\u00efve", "\u4e2d", *(f"w{number}" for number in range(56))]


def expected(name: str) -> dict[str, Any]:
    """Return the tokens, their losses in nats, and the segment, memory and clamp lengths used to compute these."""
    return json.loads((GOLDEN / name / "expected.json").read_text())


def model_of(imported: ImportedModel) -> TransformerXL:
    model = TransformerXL(TransformerXLConfig(**imported.model))
    model.load_state_dict(imported.weights)
    return model.double().eval()


@torch.no_grad()
def nats_of(model: TransformerXL, values: dict[str, Any], tokens_BT: torch.Tensor) -> torch.Tensor:
    """Return the losses with the segments, memory and keys for each query that the authors' code used.

    With the authors' same_length, each query attends to one key more than there are memory slots.
    """
    limits = ContextLimits(values["memory"], attention_window=values["memory"] + 1, clamp_length=values["clamp"])
    memory = model.initial_memory(len(tokens_BT), limits)
    parts = []
    for start in range(0, tokens_BT.shape[1] - 1, values["segment"]):
        stop = start + values["segment"]
        hidden_BTD, memory = model(tokens_BT[:, start:stop], memory)
        parts.append(model.nats(hidden_BTD, tokens_BT[:, start + 1 : stop + 1]))
    return torch.cat(parts, 1)


@pytest.mark.parametrize("name", ["bytes", "words", "sentences", "narrow"])
def test_losses_equal_those_of_the_authors_code(name: str) -> None:
    """The authors' code computed them in float32, hence the tolerance."""
    imported, values = tensorflow.read(GOLDEN / name), expected(name)
    nats_BT = nats_of(model_of(imported), values, torch.tensor(values["tokens"]))
    np.testing.assert_allclose(nats_BT, values["nats"], atol=3e-6)


def test_checkpoint_is_found_by_folder_prefix_or_file(tmp_path: Path) -> None:
    folder = tmp_path / "tf_enwik8" / "model"
    shutil.copytree(GOLDEN / "bytes", folder)
    files = ["checkpoint", *(f"model.ckpt-17{suffix}" for suffix in ("", ".index", ".data-00000-of-00001", ".meta"))]
    for path in (folder, folder.parent, *(folder / file for file in files)):
        assert tensorflow.recognizes(path)
        assert tensorflow.read(path).model["n_layers"] == 2


def test_newest_of_several_checkpoints_is_read(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "bytes", tmp_path, dirs_exist_ok=True)
    for suffix in ("index", "data-00000-of-00001"):
        shutil.copy(GOLDEN / "words" / f"model.ckpt-17.{suffix}", tmp_path / f"model.ckpt-9.{suffix}")
    assert tensorflow.read(tmp_path).model["cutoffs"] == ()  # those of the checkpoint `bytes`
    assert tensorflow.read(tmp_path / "model.ckpt-9").model["cutoffs"] == (13, 29, 40)  # those of `words`
    (tmp_path / "model").mkdir()
    for file in tmp_path.glob("model.ckpt-*"):
        file.rename(tmp_path / "model" / file.name)
    assert tensorflow.read(tmp_path).model["cutoffs"] == ()  # `checkpoint` names a file of the subfolder
    (tmp_path / "model" / "model.ckpt-17.index").rename(tmp_path / "model.ckpt-17.index")
    (tmp_path / "model" / "model.ckpt-17.data-00000-of-00001").rename(tmp_path / "model.ckpt-17.data-00000-of-00001")
    assert tensorflow.read(tmp_path).model["cutoffs"] == ()  # the newest one, not the one of the subfolder
    (tmp_path / "checkpoint").unlink()  # a text file that names the newest checkpoint
    with pytest.raises(UserError, match=r"2 checkpoints; pass one of them, such as .*model.ckpt-9"):
        tensorflow.read(tmp_path)


def test_other_files_are_not_recognized(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_bytes(b"\x00PK")
    (tmp_path / "model.safetensors.index.json").touch()
    for path in (tmp_path, tmp_path / "model.safetensors", tmp_path / "checkpoint", tmp_path / "none", Path("x\0y")):
        assert not tensorflow.recognizes(path)
    with pytest.raises(UserError, match="none: no TensorFlow checkpoint; pass a folder"):
        tensorflow.read(tmp_path / "none")


def with_corpus(folder: Path, name: str, dataset: str, words: list[str], *, lower_case: bool = False) -> Path:
    """Write a checkpoint with its corpus, as the authors' published archives contain them.

    Args:
        folder: the folder to create.
        name: name of the checkpoint in golden/tensorflow.
        dataset: the authors' name of the data set.
        words: the words of the vocabulary, in the order of their ids.
        lower_case: whether the vocabulary lowercases text.
    """
    shutil.copytree(GOLDEN / name, folder / "model")
    (folder / "data").mkdir()
    (folder / "data" / "corpus-info.json").write_text(json.dumps({"vocab_size": 61, "dataset": dataset}))
    corpus = old_corpus(words, lower_case=lower_case)
    corpus.__dict__.update(train=np.arange(200), valid=np.arange(7), test=np.arange(7))
    with old_modules():
        content = pickle.dumps(corpus, 2)  # the newest protocol of Python 2
    # the authors' TensorFlow code has the class in another module
    (folder / "data" / "cache.pkl").write_bytes(content.replace(b"cutils.vocabulary\n", b"cvocabulary\n"))
    return folder


def read_word_tokenizer(folder: Path) -> WordTokenizer:
    tokenizer = tensorflow.read(folder).tokenizer
    assert isinstance(tokenizer, WordTokenizer)
    return tokenizer


def test_tokenizer_is_read_from_the_corpus(tmp_path: Path) -> None:
    tokenizer = read_word_tokenizer(with_corpus(tmp_path / "wt103", "words", "wt103", WORDS))
    assert tokenizer.words == tuple(WORDS)
    assert (tokenizer.eos_token, tokenizer.unk_token) == ("<eos>", "<unk>")
    assert tokenizer.pre_tokenizer == PreTokenizer()
    # "cat" is not a word of the vocabulary, so it becomes <unk> (2); the newline becomes <eos> (0)
    assert tokenizer.encode("the na\u00efve \u4e2d cat\n").tolist() == [1, 3, 4, 2, 0]
    words = ["<UNK>", "<S>", "the", *WORDS[3:]]
    tokenizer = read_word_tokenizer(with_corpus(tmp_path / "lm1b", "sentences", "lm1b", words, lower_case=True))
    assert (tokenizer.eos_token, tokenizer.unk_token) == ("<S>", "<UNK>")
    assert tokenizer.pre_tokenizer == PreTokenizer(lowercase=True)


def test_lengths_and_dropout_of_published_model_come_from_its_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_corpus(tmp_path / "wt103", "words", "wt103", WORDS)
    unpublished = tensorflow.read(folder)
    assert (unpublished.train, unpublished.evaluation) == ({}, {})
    assert "do not contain the segment, memory and clamp lengths" in unpublished.notes[-1]
    # the authors' enwik8 has no newlines
    notes = tensorflow.read(with_corpus(tmp_path / "enwik8", "bytes", "enwik8", WORDS)).notes
    assert "removed all newlines" in notes[0]
    # with the sizes of the small checkpoint in the recipe, the checkpoint counts as the published model of that recipe
    recipe = load_recipe("wikitext-103-large")
    small = recipe.model_copy(update={"model": {**recipe.model, **SIZES}})
    monkeypatch.setattr(tensorflow, "load_recipe", {"wikitext-103-large": small}.__getitem__)
    imported = tensorflow.read(folder)
    assert imported.notes == ()
    assert convert(folder, tmp_path / "run").format == "tensorflow"
    assert (imported.train, imported.model["dropout"]) == ({"segment_length": 384, "memory_length": 384}, 0.2)
    lengths = {"segment_length": 128, "memory_length": 1600, "attention_window": 1601, "clamp_length": 1000}
    assert imported.evaluation == lengths
    assert (imported.model["attend_empty_memory"], imported.model["norm_eps"]) == (True, 1e-12)


def test_malicious_corpus_is_refused(tmp_path: Path) -> None:
    folder = with_corpus(tmp_path, "words", "wt103", WORDS)
    path = folder / "data" / "cache.pkl"
    path.write_bytes(path.read_bytes().replace(b"cvocabulary\nVocab", b"cos\nsystem"))
    with pytest.raises(UserError, match=r"cache.pkl names os.system, which does not belong in"):
        tensorflow.read(folder)


def test_files_of_different_models_are_refused(tmp_path: Path) -> None:
    folder = with_corpus(tmp_path / "old", "words", "wt103", WORDS[:-1])
    with pytest.raises(UserError, match="has 60 tokens, but the model has 61"):
        convert(folder, tmp_path / "run")
    (folder / "data" / "corpus-info.json").write_text('{"vocab_size": 267735}')
    with pytest.raises(UserError, match=r"corpus-info\.json has another vocab_size than the checkpoint"):
        convert(folder, tmp_path / "run")


Change = dict[str, tuple[int, ...] | None]
OTHER_MODELS: list[tuple[Change, str]] = [
    ({"r_w_bias": None}, "no variable 'transformer/r_w_bias'"),
    ({"r_w_bias": (3,)}, r"'transformer/r_w_bias' has the unexpected shape \(3,\)"),
    ({"r_w_bias": (3, 2)}, "'position_bias' is missing"),
    ({"layer_1/ff/layer_1/bias": None}, "no variable 'transformer/layer_1/ff/layer_1/bias'"),
    ({"layer_1/ff/layer_1/bias": (12,)}, "'layers.1.feed_forward.up_proj.bias' is missing, unknown or of another"),
    ({"layer_1/rel_attn/r/kernel": (60,)}, r"layer_1/rel_attn/r/kernel' has the unexpected shape \(60,\)"),
    ({"layer_1/rel_attn/qkv/kernel": (10, 17)}, "'layers.1.attention.* of another shape"),
    ({"layer_1/rel_attn/gate/kernel": (10, 6)}, "layer_1/rel_attn/gate/kernel' is not part of this model"),
    ({"layer_3/rel_attn/o/kernel": (6, 10)}, "layer_3/rel_attn/o/kernel' is not part of this model"),
    ({"adaptive_softmax/cutoff_2/proj": (2, 10)}, r"separate softmax projections for clusters \[0, 2\]"),
    ({"adaptive_softmax/cutoff_2/b": None}, "adaptive_softmax/cutoff_3/b' is not part of this model"),
    ({"adaptive_embed/cutoff_1/lookup_table": (0, 5)}, r"lookup_table' has the unexpected shape \(0, 5\)"),
    ({"adaptive_embed/cutoff_1/lookup_table": (16, 11)}, "model.div_val: Input should be greater than 0"),
]
"""Variables (without the prefix `transformer/`) with a shape that differs from that in the checkpoint `words`, or None
to remove them; and the error."""


@pytest.mark.parametrize(("changes", "message"), OTHER_MODELS)
def test_other_model_is_refused(changes: Change, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = tensorflow.TensorBundle(GOLDEN / "words" / "model.ckpt-17")
    tensors = {name: bundle.tensor(name) for name in bundle.shapes}
    folder = with_corpus(tmp_path, "words", "wt103", WORDS)
    for name, shape in changes.items():
        tensors.pop(f"transformer/{name}", None)
        if shape is not None:
            tensors[f"transformer/{name}"] = np.zeros(shape, np.float32)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    changed_bundle = SimpleNamespace(shapes=shapes, check_data=list, tensor=tensors.__getitem__)
    monkeypatch.setattr(tensorflow, "TensorBundle", lambda prefix: changed_bundle)
    with pytest.raises(UserError, match=message):
        convert(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()
