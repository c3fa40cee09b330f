"""The authors' TensorFlow checkpoints: the very losses that their own code gives, and the vocabulary beside them."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from transformer_xl.config import TransformerXLConfig, UserError, load_recipe, run_settings
from transformer_xl.interop import tensorflow
from transformer_xl.interop.convert import convert
from transformer_xl.interop.imported import ImportedModel
from transformer_xl.interop.tokenizers import bytes_from_decimal_words
from transformer_xl.model.memory import ContextLimits
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.text.tokenizers.char import CharTokenizer
from transformer_xl.text.tokenizers.pre_tokenizer import PreTokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer

GOLDEN = Path(__file__).parent / "golden" / "tensorflow"
KINDS = {
    "bytes": {"cutoffs": (), "tie_attention_biases": True, "tie_projections": "all"},
    "words": {
        "cutoffs": (13, 29, 40),
        "div_val": 2,
        "tie_projections": "all_but_first",
        "tie_attention_biases": False,
        "project_same_width": True,
    },
    "sentences": {
        "cutoffs": (13, 29),
        "div_val": 3,
        "tie_projections": "none",
        "tie_attention_biases": False,
        "project_same_width": False,
    },
    "narrow": {"cutoffs": (13, 29), "div_val": 1, "tie_projections": "all_but_first", "d_embed": 7},
}
SIZES = {"vocab_size": 61, "n_layers": 2, "d_model": 10, "n_heads": 3, "d_head": 2, "d_ff": 11}


def expected(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / name / "expected.json").read_text())


def model_of(imported: ImportedModel) -> TransformerXL:
    model = TransformerXL(TransformerXLConfig(**imported.model))
    model.load_state_dict(imported.weights)
    return model.double().eval()


def nats_of(model: TransformerXL, values: dict[str, Any], tokens_BT: torch.Tensor) -> torch.Tensor:
    """The losses in segments as the authors', with the memory and the keys they give each query."""
    memory = model.initial_memory(
        len(tokens_BT), ContextLimits(values["memory"], values["memory"] + 1, values["clamp"])
    )
    found = []
    with torch.no_grad():
        for start in range(0, tokens_BT.shape[1] - 1, values["segment"]):
            stop = start + values["segment"]
            hidden_BTD, memory = model(tokens_BT[:, start:stop], memory)
            found.append(model.nats(hidden_BTD, tokens_BT[:, start + 1 : stop + 1]))
    return torch.cat(found, 1)


@pytest.mark.parametrize("name", KINDS)
def test_losses_are_those_of_the_authors_code(name: str) -> None:
    """Theirs were computed in float32, from zeros that are attended on."""
    imported, values = tensorflow.read(GOLDEN / name), expected(name)
    assert {**imported.model, **SIZES, **KINDS[name]} == imported.model
    nats_BT = nats_of(model_of(imported), values, torch.tensor(values["tokens"]))
    np.testing.assert_allclose(nats_BT, values["nats"], atol=3e-6)


@pytest.mark.parametrize("ending", ["", ".index", ".data-00000-of-00001", ".meta"])
def test_every_way_to_name_a_checkpoint(ending: str, tmp_path: Path) -> None:
    folder = tmp_path / "tf_enwik8" / "model"
    shutil.copytree(GOLDEN / "bytes", folder)
    for path in (folder / f"model.ckpt-17{ending}", folder, folder.parent, folder / "checkpoint"):
        assert tensorflow.recognizes(path)
        assert tensorflow.read(path).model["n_layers"] == 2


def test_the_newest_of_several_is_taken(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "bytes", tmp_path, dirs_exist_ok=True)
    for part in ("index", "data-00000-of-00001"):
        shutil.copy(GOLDEN / "words" / f"model.ckpt-17.{part}", tmp_path / f"model.ckpt-9.{part}")
    assert tensorflow.read(tmp_path).model["cutoffs"] == ()
    assert tensorflow.read(tmp_path / "model.ckpt-9").model["cutoffs"] == (13, 29, 40)
    (tmp_path / "checkpoint").unlink()
    with pytest.raises(UserError, match=r"2 checkpoints; pass one of them, such as .*model.ckpt-9"):
        tensorflow.read(tmp_path)


def test_the_text_file_alone_is_refused(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "bytes" / "checkpoint", tmp_path)
    for path in (tmp_path, tmp_path / "checkpoint"):
        assert tensorflow.recognizes(path)
        with pytest.raises(UserError, match="names a checkpoint, but contains no weights; expected a"):
            tensorflow.read(path)


def test_other_things_are_not_recognised(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_bytes(b"\x00PK")
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "model.safetensors.index.json").touch()
    for path in (tmp_path, tmp_path / "model.safetensors", tmp_path / "checkpoint", tmp_path / "none", Path("x\0y")):
        assert not tensorflow.recognizes(path)
    with pytest.raises(UserError, match="none: no TensorFlow checkpoint; expected"):
        tensorflow.read(tmp_path / "none")


def old_pickle(value: Any) -> bytes:
    """Plain values and `("module name", attributes)` as the pickle of Python 2 writes them, protocol 2."""
    if isinstance(value, tuple):
        module, name = value[0].split()
        return f"c{module}\n{name}\n)".encode() + b"\x81" + old_pickle(value[1]) + b"b"
    if isinstance(value, dict):
        return b"}(" + b"".join(map(old_pickle, (part for item in value.items() for part in item))) + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(map(old_pickle, value)) + b"e"
    if isinstance(value, np.ndarray):
        dtype = b"cnumpy\ndtype\n(U\x02i8K\x00K\x01tR(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        made = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
        content = value.astype("<i8").tobytes()
        state = b"(K\x01(K" + bytes([len(value)]) + b"t" + dtype + b"\x89T" + struct.pack("<i", len(content)) + content
        return made + state + b"tb"
    if isinstance(value, str):
        return b"U" + bytes([len(value.encode())]) + value.encode()
    return (
        {None: b"N", True: b"\x88", False: b"\x89"}[value]
        if type(value) is not int
        else b"M" + struct.pack("<H", value)
    )


def with_corpus(folder: Path, name: str, dataset: str, words: list[str], **attributes: Any) -> Path:
    """A checkpoint and the data beside it, as the authors published them."""
    shutil.copytree(GOLDEN / name, folder / "model")
    (folder / "data").mkdir()
    cutoffs = [0, *KINDS[name]["cutoffs"], 61]
    info = {"vocab_size": 61, "cutoffs": cutoffs if len(cutoffs) > 2 else [], "dataset": dataset}
    (folder / "data" / "corpus-info.json").write_text(json.dumps(info))
    tokenizer = {"idx2sym": words, "sym2idx": {word: place for place, word in enumerate(words)}, **attributes}
    corpus = {"dataset": dataset, "vocab": ("vocabulary Vocab", tokenizer), "cutoffs": [], "train": np.arange(200)}
    (folder / "data" / "cache.pkl").write_bytes(b"\x80\x02" + old_pickle(("data_utils Corpus", corpus)) + b".")
    return folder


WORDS = ["<eos>", "the", "<unk>", "na\u00efve", "\u4e2d", *(f"w{place}" for place in range(56))]


def test_words_come_with_their_vocabulary(tmp_path: Path) -> None:
    imported = tensorflow.read(with_corpus(tmp_path, "words", "wt103", WORDS, lower_case=False))
    assert isinstance(imported.tokenizer, WordTokenizer)
    assert imported.tokenizer.words == tuple(WORDS)
    assert (imported.tokenizer.eos_token, imported.tokenizer.unk_token) == ("<eos>", "<unk>")
    assert imported.tokenizer.pre_tokenizer == PreTokenizer()
    assert imported.tokenizer.encode("the na\u00efve \u4e2d cat\n").tolist() == [1, 3, 4, 2, 0]


def test_marks_and_case_of_other_data_sets(tmp_path: Path) -> None:
    words = ["<UNK>", "<S>", *(f"w{place}" for place in range(59))]
    imported = tensorflow.read(with_corpus(tmp_path / "a", "sentences", "lm1b", words, lower_case=False))
    assert isinstance(imported.tokenizer, WordTokenizer)
    assert (imported.tokenizer.eos_token, imported.tokenizer.unk_token) == ("<S>", "<UNK>")
    words[:2] = ["<eos>", "n"]
    imported = tensorflow.read(with_corpus(tmp_path / "b", "bytes", "ptb", words, lower_case=True))
    assert isinstance(imported.tokenizer, WordTokenizer)
    assert (imported.tokenizer.eos_token, imported.tokenizer.unk_token) == ("<eos>", None)
    assert imported.tokenizer.pre_tokenizer == PreTokenizer(lowercase=True)


def test_bytes_of_enwik8_are_put_in_their_order(tmp_path: Path) -> None:
    """Theirs are numbered by how often they stand in the text; the other bytes have no probability."""
    order = np.random.default_rng(5).permutation([*range(32, 127)])[:61]
    imported = bytes_from_decimal_words(
        tensorflow.read(with_corpus(tmp_path, "bytes", "enwik8", [str(byte) for byte in order]))
    )
    assert imported.tokenizer is not None
    assert (imported.tokenizer.kind, imported.model["vocab_size"]) == ("byte", 256)
    assert "tr -d" in imported.remarks[0]
    model, values = model_of(imported), expected("bytes")
    tokens_BT = torch.tensor(order)[torch.tensor(values["tokens"])]
    np.testing.assert_allclose(nats_of(model, values, tokens_BT), values["nats"], atol=3e-6)
    with torch.no_grad():
        chances_V = model.logits(model(tokens_BT)[0]).softmax(-1)[0, -1]
    assert chances_V[order].sum() == pytest.approx(1, abs=1e-12)
    assert int((chances_V == 0).sum()) == 256 - 61


def test_letters_of_text8_are_characters(tmp_path: Path) -> None:
    letters = ["_", *(chr(place) for place in range(97, 97 + 60))]
    imported = tensorflow.read(with_corpus(tmp_path, "bytes", "text8", letters))
    assert isinstance(imported.tokenizer, CharTokenizer)
    assert imported.tokenizer.encode("a b").tolist() == [1, 0, 2]
    assert not imported.tokenizer.byte_fallback


def test_what_shapes_do_not_tell_comes_from_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = with_corpus(tmp_path, "words", "wt103", WORDS)
    unknown = tensorflow.read(folder)
    assert (unknown.train, unknown.evaluation) == ({}, {})
    assert "do not contain the segment, memory and clamp lengths" in unknown.remarks[-1]
    recipe = load_recipe("wikitext-103-large")
    small = recipe.model_copy(update={"model": {**recipe.model, **SIZES}})
    monkeypatch.setattr(tensorflow, "load_recipe", {"wikitext-103-large": small}.__getitem__)
    imported = tensorflow.read(folder)
    assert imported.remarks == ()
    assert (imported.train, imported.model["dropout"]) == ({"segment_length": 384, "memory_length": 384}, 0.2)
    assert imported.evaluation == {
        "segment_length": 128,
        "memory_length": 1600,
        "attention_window": 1601,
        "clamp_length": 1000,
    }
    run = run_settings(
        {"model": imported.model, "train": imported.train, "evaluation": imported.evaluation}, "imported"
    )
    assert (run.model.attend_empty_memory, run.model.norm_eps) == (True, 1e-12)


def spoilt(folder: Path, old: bytes, new: bytes) -> None:
    path = folder / "data" / "cache.pkl"
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b"cvocabulary\nVocab", b"cos\nsystem", r"cache.pkl names os.system, which has no place"),
        (b"U\x02w5", b"U\x02w4", r"cache.pkl: .* word 'w4' twice"),
        (b"U\x07idx2sym", b"U\x07idx2abc", r"cache.pkl: the ids of its 61 words are not 0 up to 60"),
        (b"U\x02w5", b"U\x05w5", r"cache.pkl is damaged, or not a pickle"),
    ],
)
def test_a_wrong_corpus_is_refused(old: bytes, new: bytes, said: str, tmp_path: Path) -> None:
    folder = with_corpus(tmp_path, "words", "wt103", WORDS)
    path = folder / "data" / "cache.pkl"
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new).replace(struct.pack("<H", 60) + b"u", struct.pack("<H", 61) + b"u"))
    with pytest.raises(UserError, match=said):
        tensorflow.read(folder)


def test_files_of_different_models_are_refused(tmp_path: Path) -> None:
    folder = with_corpus(tmp_path / "a", "words", "wt103", WORDS[:-1])
    with pytest.raises(UserError, match=r"cache.pkl has a vocabulary of 60 tokens, but the checkpoint has 61; use"):
        tensorflow.read(folder)
    folder = with_corpus(tmp_path / "b", "words", "wt103", WORDS)
    (folder / "data" / "corpus-info.json").write_text('{"vocab_size": 267735}')
    with pytest.raises(UserError, match=r"corpus-info.json has a vocabulary of 267735 tokens, but the checkpoint"):
        tensorflow.read(folder)


class Variables:
    """Other variables than TensorFlow wrote, through the same reader."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self.tensors = tensors
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}

    def tensor(self, name: str) -> np.ndarray:
        return self.tensors[name]


def changed(change: dict[str, tuple[int, ...] | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the next readings find other variables; none: no variable of that name."""
    bundle = tensorflow.TensorBundle.open(GOLDEN / "words" / "model.ckpt-17")
    tensors = {name: bundle.tensor(name) for name in bundle.shapes}
    for name, shape in change.items():
        tensors.pop(f"transformer/{name}", None)
        if shape is not None:
            tensors[f"transformer/{name}"] = np.zeros(shape, np.float32)
    monkeypatch.setattr(tensorflow.TensorBundle, "open", lambda prefix: Variables(tensors))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"r_w_bias": None}, "no variable 'transformer/r_w_bias'"),
        ({"r_w_bias": (3,)}, r"'transformer/r_w_bias' has the unexpected shape \(3,\)"),
        ({"layer_1/ff/layer_1/bias": None}, "no variable 'transformer/layer_1/ff/layer_1/bias'"),
        (
            {"layer_1/rel_attn/r/kernel": (60,)},
            r"'transformer/layer_1/rel_attn/r/kernel' has the unexpected shape \(60,\)",
        ),
        (
            {"layer_1/rel_attn/gate/kernel": (10, 6)},
            "'transformer/layer_1/rel_attn/gate/kernel' is not part of this mo",
        ),
        ({"layer_3/rel_attn/o/kernel": (6, 10)}, "'transformer/layer_3/rel_attn/o/kernel' is not part of this model"),
        ({"adaptive_softmax/cutoff_2/proj": (2, 10)}, r"separate projections only for the clusters \[0, 2\]"),
        ({"adaptive_softmax/cutoff_2/b": None}, "'transformer/adaptive_softmax/cutoff_3/b' is not part of this model"),
        ({"adaptive_embed/cutoff_1/lookup_table": (0, 5)}, r"lookup_table' has the unexpected shape \(0, 5\)"),
    ],
)
def test_another_model_is_refused(
    change: dict[str, tuple[int, ...] | None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(change, monkeypatch)
    with pytest.raises(UserError, match=said):
        tensorflow.read(GOLDEN / "words")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        (
            {"layer_1/ff/layer_1/bias": (12,)},
            "'layers.1.feed_forward.up_proj.bias' is .* of the wrong shape",
        ),
        ({"layer_1/rel_attn/qkv/kernel": (10, 17)}, "'layers.1.attention.* is .* of the wrong shape"),
        ({"adaptive_embed/cutoff_1/lookup_table": (16, 11)}, "model.div_val: Input should be greater than 0"),
        ({"r_w_bias": (3, 2)}, "'position_bias' is .* of the wrong shape"),
    ],
)
def test_converting(
    change: dict[str, tuple[int, ...] | None], said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_corpus(tmp_path, "words", "wt103", WORDS)
    changed(change, monkeypatch)
    if said is None:
        assert convert(folder, tmp_path / "run").format == "tensorflow"
        return
    with pytest.raises(UserError, match=said):
        convert(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()
