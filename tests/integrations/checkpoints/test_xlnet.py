"""XLNet's checkpoints: folders of transformers both ways, the authors' TensorFlow files, and what is refused.

Shape suffixes: B batch rows, T tokens, V vocabulary, D model width.
"""

from __future__ import annotations

import json
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.checkpoints.bundles import write_tensors
from library_tokenizers import LINES, xlnet_model
from refusals import assert_refused, txl
from safetensors.torch import load_file
from small_runs import make_run
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, XLNetConfig, XLNetForSequenceClassification, XLNetLMHeadModel

from transformer_xl import load
from transformer_xl.config import UserError
from transformer_xl.integrations.checkpoints.convert import convert
from transformer_xl.model.memory import ContextLimits, HiddenMemory
from transformer_xl.text.tokenizers.library import LibraryTokenizer
from transformer_xl.xlnet.two_streams import XLNet, visible_in_order

Capture = pytest.CaptureFixture[str]
SIZES = {"d_model": 8, "n_layer": 2, "n_head": 2, "d_head": 4, "d_inner": 11}
SPIECE = xlnet_model()
VOCAB_SIZE = 99
TEXT = "".join(LINES) + "``1,000, caf\u00e9s''  in 1912, \u4e2d\u6587 \U0001f600"


def their_model(model_class: Any = XLNetLMHeadModel, **settings: Any) -> Any:
    """Return a model of transformers with random weights, large enough that each affects the results."""
    defaults = {"vocab_size": VOCAB_SIZE, "ff_activation": "gelu_new", "mem_len": None}
    config = XLNetConfig(**SIZES, **{**defaults, **settings})
    torch.manual_seed(5)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def hub_folder(folder: Path, model: Any, *, as_bin: bool = False) -> Path:
    """Write a model as on the Hub: config.json, weights, spiece.model."""
    model.save_pretrained(folder)
    if as_bin:
        (folder / "model.safetensors").unlink()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")  # with lm_loss.weight, which is tied
    (folder / "spiece.model").write_bytes(SPIECE)
    return folder


def tensorflow_folder(folder: Path, changes: dict[str, Tensor | None], *, untie_r: bool = True) -> Path:
    """Write the weights of `their_model` as the authors' code does, with these changes (None removes a variable)."""
    weights = {name.replace(".", "/"): value.detach() for name, value in their_model().state_dict().items()}
    layers = range(SIZES["n_layer"])
    variables = {
        "word_embedding/lookup_table": weights["transformer/word_embedding/weight"],
        "mask_emb/mask_emb": weights["transformer/mask_emb"],
    }
    for name in ("r_w_bias", "r_r_bias", "r_s_bias", "seg_embed"):
        each = [weights[f"transformer/layer/{index}/rel_attn/{name}"] for index in layers]
        variables[name] = torch.stack(each) if untie_r else each[0]
    for index in layers:
        theirs, prefix = f"transformer/layer/{index}/", f"layer_{index}/"
        for name in "qkvro":
            variables[f"{prefix}rel_attn/{name}/kernel"] = weights[f"{theirs}rel_attn/{name}"]
        for name in ("layer_1", "layer_2"):
            variables[f"{prefix}ff/{name}/kernel"] = weights[f"{theirs}ff/{name}/weight"].T
            variables[f"{prefix}ff/{name}/bias"] = weights[f"{theirs}ff/{name}/bias"]
        for part in ("rel_attn", "ff"):
            variables[f"{prefix}{part}/LayerNorm/gamma"] = weights[f"{theirs}{part}/layer_norm/weight"]
            variables[f"{prefix}{part}/LayerNorm/beta"] = weights[f"{theirs}{part}/layer_norm/bias"]
    tensors = {f"model/transformer/{name}": value for name, value in variables.items()}
    tensors |= {"model/lm_loss/bias": weights["lm_loss/bias"], "global_step": torch.tensor(7.0)}
    tensors |= {f"{name}/Adam": torch.zeros(1) for name in tensors if name.startswith("model/")}
    folder.mkdir()
    write_tensors(folder / "xlnet_model.ckpt", {k: v for k, v in (tensors | changes).items() if v is not None})
    sizes = {**SIZES, "n_token": VOCAB_SIZE, "ff_activation": "gelu", "untie_r": untie_r}
    (folder / "xlnet_config.json").write_text(json.dumps(sizes))
    (folder / "spiece.model").write_bytes(SPIECE)
    return folder


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("as_bin", [False, True], ids=["safetensors", "bin"])
def test_folders_go_both_ways_bit_for_bit(as_bin: bool, is_tied: bool, tmp_path: Path) -> None:
    model = their_model(clamp_len=5, mem_len=7, dropout=0.2, tie_word_embeddings=is_tied)
    folder = hub_folder(tmp_path / "hub", model, as_bin=as_bin)
    converted = txl("convert", folder, tmp_path / "run", "--json")
    assert (converted.status, converted.object["notes"]) == (0, [])
    assert txl("convert", tmp_path / "run", tmp_path / "back", "--to", "huggingface").status == 0
    theirs, back = model.state_dict(), load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == theirs.keys() - ({"lm_loss.weight"} if is_tied else set())
    assert all(torch.equal(back[name], theirs[name]) for name in back)
    assert (tmp_path / "back" / "spiece.model").read_bytes() == SPIECE
    config, again = (json.loads((one / "config.json").read_text()) for one in (folder, tmp_path / "back"))
    assert {name: value for name, value in again.items() if config.get(name) != value} == {}


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5, 6], [4, 1, 6, 0, 3, 2, 5]], ids=["left to right", "permuted"])
def test_both_streams_are_those_of_transformers(order: list[int], tmp_path: Path) -> None:
    """With memory and two segments."""
    model, generator = their_model(), torch.Generator().manual_seed(3)
    hub_folder(tmp_path / "hub", model)
    assert txl("convert", tmp_path / "hub", tmp_path / "run").status == 0
    run = load(tmp_path / "run")
    assert isinstance(run.model, XLNet)
    tokens_BT = torch.randint(VOCAB_SIZE, (3, len(order)), generator=generator)
    segments_BT = torch.randint(2, (3, len(order)), generator=generator)
    memory_LBMD = torch.randn(2, 3, 5, 8, generator=generator)
    rank_BT = torch.tensor(order).argsort().expand(3, -1)
    may_see_BTT = visible_in_order(rank_BT)
    memory = run.model.initial_memory(3, ContextLimits(5))
    assert isinstance(memory, HiddenMemory)
    filled = {"hidden": memory_LBMD.transpose(0, 1), "valid": torch.full((3,), 5), "position": torch.full((3,), 5)}
    targets_BT = torch.arange(len(order)).expand(3, -1)
    with torch.no_grad():
        ours = run.model.two_streams(
            tokens_BT, memory.with_stacked(filled), visible=may_see_BTT, targets=targets_BT, segments=segments_BT
        )
        *_, content_BTD, query_BTD = model.transformer(
            tokens_BT, mems=[*memory_LBMD.transpose(1, 2)], perm_mask=(~may_see_BTT).float(), use_mems=True,
            target_mapping=torch.eye(len(order)).expand(3, -1, -1), token_type_ids=segments_BT,
            output_hidden_states=True,
        ).hidden_states  # fmt: skip
    torch.testing.assert_close((ours.content_BTD, ours.query_BQD), (content_BTD, query_BTD), atol=1e-5, rtol=0)


def test_transformers_opens_what_is_written(tmp_path: Path) -> None:
    """Its own classes do, with the same logits, and the same ids but where XLNet's code splits a number twice."""
    hub_folder(tmp_path / "hub", their_model())
    assert txl("convert", tmp_path / "hub", tmp_path / "run").status == 0
    assert txl("convert", tmp_path / "run", tmp_path / "back", "--to", "huggingface").status == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "back")
    run = load(tmp_path / "run")
    ids = run.tokenizer.encode(TEXT).tolist()
    assert (type(tokenizer).__name__, tokenizer.padding_side) == ("XLNetTokenizer", "left")
    assert tokenizer("".join(LINES))["input_ids"] == [*run.tokenizer.encode("".join(LINES)).tolist(), 4, 3]
    model, tokens_BT = XLNetLMHeadModel.from_pretrained(tmp_path / "back"), torch.tensor([ids])
    with torch.no_grad():
        assert torch.equal(model(tokens_BT).logits, their_model()(tokens_BT).logits)
    assert type(AutoModel.from_pretrained(tmp_path / "back")).__name__ == "XLNetModel"


@pytest.mark.parametrize("untie_r", [True, False])
@pytest.mark.parametrize("place", ["folder", "prefix", "zip"])
def test_the_authors_checkpoint_has_the_same_weights(place: str, untie_r: bool, tmp_path: Path) -> None:
    folder = tensorflow_folder(tmp_path / "xlnet_cased", {}, untie_r=untie_r)
    source = {"folder": folder, "prefix": folder / "xlnet_model.ckpt", "zip": tmp_path / "xlnet_cased.zip"}[place]
    if place == "zip":
        shutil.make_archive(str(folder), "zip", tmp_path, folder.name)
        shutil.rmtree(folder)
    converted = txl("convert", source, tmp_path / "run", "--json")
    assert (converted.status, converted.object["format"]) == (0, "tensorflow")
    hub_folder(tmp_path / "hub", their_model())
    assert txl("convert", tmp_path / "hub", tmp_path / "other").status == 0
    ours, other = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "other"))
    assert ours.keys() == other.keys()
    for name, value in ours.items():
        is_shared = not untie_r and ("bias" in name or name == "segment_embedding") and value.ndim > 2
        assert torch.equal(value, other[name][:1].expand_as(value) if is_shared else other[name])
    run = load(tmp_path / "run")
    assert (run.config.train.memory_length, run.tokenizer) == (384, load(tmp_path / "other").tokenizer)


def test_heads_are_left_out_with_a_note_and_a_classifier_is_refused(tmp_path: Path, capfd: Capture) -> None:
    language_model, classifier = their_model(ff_activation="gelu"), their_model(XLNetForSequenceClassification)
    both = {**classifier.state_dict(), **language_model.state_dict()}
    language_model.save_pretrained(tmp_path / "hub", state_dict=both)
    (tmp_path / "hub" / "spiece.model").write_bytes(SPIECE)
    notes = txl("convert", tmp_path / "hub", tmp_path / "run", "--json").object["notes"]
    assert notes[0] == "left out what predicts no tokens: logits_proj, sequence_summary"
    assert "gelu_new" in notes[1]
    hub_folder(tmp_path / "class", classifier)
    command = f"convert {tmp_path / 'class'} {tmp_path / 'no'}"
    assert_refused(tmp_path, command, r"no softmax \(lm_loss\).* but logits_proj, sequence_summary; convert the", capfd)


class _Code:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("executed"),)


def _cut(file: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:-9])


def _settings(file: str, **changes: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_text(json.dumps({**json.loads((folder / file).read_text()), **changes}))


HUB_FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "fewer layers": (_settings("config.json", n_layer=1), "unknown weight 'transformer.layer.1"),
    "more layers": (_settings("config.json", n_layer=3), "no weight 'transformer.layer.2"),
    "other width": (_settings("config.json", d_inner=12), "ff.layer_1.weight' is 11 x 8, but its settings need 12 x 8"),
    "activation": (_settings("config.json", ff_activation="relu"), "ff_activation 'relu' cannot be converted; only"),
    "one-sided": (_settings("config.json", attn_type="uni"), "attn_type 'uni' cannot be converted; only bi"),
    "no number": (_settings("config.json", d_model="8"), "d_model is '8'; expected an integer"),
    "lowercased": (
        lambda folder: (folder / "tokenizer_config.json").write_text('{"do_lower_case": true}'),
        "do_lower_case cannot be converted",
    ),
    "softmax of its own": (
        lambda folder: (
            torch.save(
                their_model().state_dict() | {"lm_loss.weight": torch.ones(VOCAB_SIZE, 8)}, folder / "pytorch_model.bin"
            )
            or (folder / "model.safetensors").unlink()
        ),
        "lm_loss.weight differs from the embedding, but tie_word_embeddings is true in config.json",
    ),
    "cut": (_cut("model.safetensors"), "model.safetensors is damaged"),
    "tokenizer": (_cut("spiece.model"), "spiece.model: not a valid library tokenizer"),
    "code": (
        lambda folder: (
            (folder / "model.safetensors").unlink(),
            (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": _Code()})),
        ),
        "pytorch_model.bin names pathlib.* does not belong",
    ),
}
TENSORFLOW_FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "index cut": (_cut("xlnet_model.ckpt.index"), "damaged or not a TensorFlow checkpoint"),
    "data cut": (_cut("xlnet_model.ckpt.data-00000-of-00001"), "ends at byte"),
    "no data": (lambda folder: (folder / "xlnet_model.ckpt.data-00000-of-00001").unlink(), "no such file"),
    "settings cut": (_cut("xlnet_config.json"), "xlnet_config.json: damaged, not readable as JSON"),
    "other sizes": (
        _settings("xlnet_config.json", n_head=4, d_head=2),
        "r_w_bias' is 2 x 4, but its settings need 4 x 2",
    ),
    "no layers": (_settings("xlnet_config.json", n_layer="2"), "n_layer is '2'; expected an integer"),
}


@pytest.mark.parametrize("name", HUB_FAULTS)
def test_wrong_folder_is_refused(name: str, tmp_path: Path, capfd: Capture) -> None:
    change, message = HUB_FAULTS[name]
    change(hub_folder(tmp_path / "hub", their_model()))
    assert_refused(tmp_path, f"convert {tmp_path / 'hub'} {tmp_path / 'run'}", message, capfd)


@pytest.mark.parametrize("name", TENSORFLOW_FAULTS)
def test_wrong_tensorflow_files_are_refused(name: str, tmp_path: Path, capfd: Capture) -> None:
    change, message = TENSORFLOW_FAULTS[name]
    change(tensorflow_folder(tmp_path / "tf", {}))
    assert_refused(tmp_path, f"convert {tmp_path / 'tf'} {tmp_path / 'run'}", message, capfd)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("model/transformer/layer_1/rel_attn/q/kernel", None, "no weight 'transformer.layer.1.rel_attn.q'"),
        ("model/transformer/r_s_bias", torch.zeros(3, 2, 4), "unknown weight 'transformer.layer.2.rel_attn.r_s_bias'"),
        ("model/transformer/mask_emb/mask_emb", torch.zeros(1, 8), "mask_emb' is 1 x 8, but its settings need 1 x 1"),
        ("model/transformer/gate/kernel", torch.zeros(3), "unknown weight 'transformer.gate.kernel'"),
        ("model/lm_loss/bias", None, r"no softmax \(lm_loss\), which predicts tokens, but no head"),
        ("model/lm_loss/bias", torch.full((VOCAB_SIZE,), torch.nan), "softmax.bias' contains nan"),
    ],
)
def test_other_variables_are_refused(
    variable: str, value: Tensor | None, message: str, tmp_path: Path, capfd: Capture
) -> None:
    folder = tensorflow_folder(tmp_path / "tf", {variable: value})
    assert_refused(tmp_path, f"convert {folder} {tmp_path / 'run'}", message, capfd)


def test_damaged_archive_is_refused(tmp_path: Path, capfd: Capture) -> None:
    folder, archive = tensorflow_folder(tmp_path / "tf", {}), tmp_path / "xlnet.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for name in ("xlnet_config.json", "xlnet_model.ckpt.index"):
            file.write(folder / name, f"xlnet/{name}")
    assert_refused(tmp_path, f"convert {archive} {tmp_path / 'run'}", "xlnet.zip/xlnet_model.ckpt: no such file", capfd)
    content = bytearray(archive.read_bytes())
    content[70] ^= 1  # in the settings
    archive.write_bytes(content)
    assert_refused(tmp_path, f"convert {archive} {tmp_path / 'run'}", "xlnet.zip: not readable, perhaps damaged", capfd)


def test_a_run_with_other_tokens_is_written_with_them(tmp_path: Path) -> None:
    hub_folder(tmp_path / "hub", their_model(vocab_size=256))
    assert txl("convert", tmp_path / "hub", tmp_path / "run", "--tokenizer", "byte").status == 0
    assert txl("convert", tmp_path / "run", tmp_path / "back", "--to", "huggingface").status == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "back")(TEXT)["input_ids"] == [*TEXT.encode()]
    config = XLNetLMHeadModel.from_pretrained(tmp_path / "back").config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (10, None, 255)
    assert txl("convert", tmp_path / "back", tmp_path / "again").status == 0
    for name in ("model.safetensors", "txl_tokenizer.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "run" / name).read_bytes()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"qk_norm": True}, "qk_norm true"),
        ({"cutoffs": (50, 120)}, "cutoffs"),
        ({"d_embed": 10}, "d_embed 10"),
        ({"attend_empty_memory": True}, "attend_empty_memory true"),
        ({"d_head": 5}, "n_heads 2 of d_head 5"),
    ],
)
def test_what_transformers_lacks_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", **{"architecture": "xlnet", "d_head": 7, **settings})
    assert run.path is not None
    with pytest.raises(UserError, match=f"transformers' XLNet has no {message}"):
        convert(run.path, tmp_path / "folder", to="huggingface")
    assert not (tmp_path / "folder").exists()


def test_a_folder_with_only_a_tokenizer_json_keeps_it(tmp_path: Path) -> None:
    hub_folder(tmp_path / "hub", their_model())
    assert txl("convert", tmp_path / "hub", tmp_path / "run").status == 0
    assert txl("convert", tmp_path / "run", tmp_path / "fast", "--to", "huggingface").status == 0
    (tmp_path / "fast" / "spiece.model").unlink()
    assert txl("convert", tmp_path / "fast", tmp_path / "again").status == 0
    tokenizer = load(tmp_path / "again").tokenizer
    assert isinstance(tokenizer, LibraryTokenizer)
    assert tokenizer.library == "tokenizers"
    assert tokenizer.encode("".join(LINES)).tolist() == load(tmp_path / "run").tokenizer.encode("".join(LINES)).tolist()
