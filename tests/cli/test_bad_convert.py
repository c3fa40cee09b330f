"""Errors of `txl convert`: one line on standard error, exit status 2, nothing new or changed on disk."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.checkpoints.checkpoints import golden, hugging_face_folder
from integrations.checkpoints.old_modules import OldConfig, nvidia_checkpoint, old_corpus, old_model, old_modules
from refusals import FULL, assert_refused, full_after, no_file_larger_than

from transformer_xl.cli.main import run
from transformer_xl.config import UserError
from transformer_xl.integrations.checkpoints.huggingface import write
from transformer_xl.run_folder import RunFolder

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch
# the vocabulary of the small checkpoints of these tests, whose settings and weights `golden` and `old_model` return
WORDS = [f"word{index}" for index in range(23)]
# name of the input embedding in the checkpoint
TABLE = "transformer.word_emb.emb_layers.0.weight"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    """Change to a folder with one valid checkpoint of each format, and return it."""
    folder = tmp_path / "checkpoints"
    for name in ("official", "nvidia", "empty"):
        (folder / name).mkdir(parents=True)
    monkeypatch.chdir(folder)
    config, weights, _ = golden("clusters")
    hugging_face_folder(Path("hub"), config, weights, WORDS)
    with old_modules():
        torch.save(old_model(OldConfig()), "official/model.pt")
        torch.save(old_corpus(WORDS), "official/cache.pt")
        model = old_model(OldConfig(nvidia=True))
        torch.save(nvidia_checkpoint(OldConfig(), model, WORDS), "nvidia/checkpoint_best.pt")
    return folder


def change_config(**changes: Any) -> None:
    file = Path("hub/config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def change_weights(changes: dict[str, Any]) -> None:
    """Change weights of the Hugging Face folder, or remove those that are None; the file becomes pytorch_model.bin."""
    weights = {**golden("clusters")[1], **changes}
    Path("hub/model.safetensors").unlink()
    torch.save({name: weight for name, weight in weights.items() if weight is not None}, "hub/pytorch_model.bin")


def change_module(**attributes: Any) -> None:
    """Replace model.pt, a pickled module of the authors' code, by one with changed attributes."""
    model = old_model(OldConfig())
    for name, value in attributes.items():
        setattr(model, name, value)
    with old_modules():
        torch.save(model, "official/model.pt")


def truncate(file: str, fraction: float) -> None:
    content = Path(file).read_bytes()
    Path(file).write_bytes(content[: round(len(content) * fraction)])


def replace_file(old: str, new: str, content: bytes) -> None:
    Path(old).unlink()
    Path(new).write_bytes(content)


def write_repeated_layers(count: int) -> None:
    """Give the weights of the first layer, in half precision, to many layers; torch.save stores them once."""
    change_config(n_layer=count)
    weights = {name: weight.half() for name, weight in golden("clusters")[1].items()}
    first = {name: weight for name, weight in weights.items() if name.startswith("transformer.layers.0.")}
    change_weights(weights | {
        name.replace(".0.", f".{layer}.", 1): weight for layer in range(count) for name, weight in first.items()
    })  # fmt: skip


# changes of config.json (of a model with 2 layers, d_model 8 and a vocabulary of 23), and a pattern of the message
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, r"config.json: a model of type 'gpt2'; only 'transfo-xl'"),
        ({"model_type": "x" * 9999}, r"of type 'x{59}; only"),  # messages truncate long values
        ({"attn_type": 2}, r"attn_type 2 cannot be converted; only 0, the paper's"),
        ({"ext_len": 4}, r"ext_len 4 cannot be converted; only 0, no extended context"),
        ({"sample_softmax": 5}, r"sample_softmax 5 cannot be converted; only -1, the full softmax"),
        ({"div_val": 2, "tie_projs": [True, False, True]}, r"tie_projs \[True, False, True\] cannot be"),
        ({"mem_len": 0}, r"same_length with mem_len 0 leaves no key"),
        ({"d_model": "8"}, r"config.json: d_model is '8'; expected an integer"),
        ({"pre_lnorm": 1}, r"config.json: pre_lnorm is 1; expected true or false"),
        ({"cutoffs": [5, "x"]}, r"cutoffs is \[5, 'x'\]; expected a list of integers"),
        ({"cutoffs": [[5]]}, r"cutoffs is of type list; expected a list of integers"),
        ({"cutoffs": [11, 5]}, r"config.json: cutoffs 11, 5 must increase"),
        ({"d_inner": 9}, r"CoreNet.0.weight' is 7 x 8, but its settings need 9 x 8"),
        ({"vocab_size": 24}, rf"'{TABLE}' is 23 x 8, but its settings need 24 x 8"),
        ({"n_layer": 3}, r"no weight 'transformer.layers.2.dec_attn.r_w_bias', which its settings need"),
        ({"n_layer": 2**31 - 1}, r"config.json: 2,147,483,647 layers; a model with 1,000 at most can be converted"),
        ({"cutoffs": [*range(1, 1000)]}, r"config.json: 999 cutoffs; a model with 100 at most can be converted"),
        ({"d_model": 7}, r"config.json: d_model: .*multiple of 2"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], message: str, folder: Path, capfd: Capture) -> None:
    change_config(**changes)
    assert_refused(folder, "convert hub run", message, capfd)


# a change of the files, the folder to convert, a pattern of the message
Case = tuple[Callable[[], object], str, str]
DAMAGED_FILES: dict[str, Case] = {
    "half of model.safetensors": (
        lambda: truncate("hub/model.safetensors", 0.5), "hub", r"model.safetensors is damaged \(not a complete"),
    "empty pytorch_model.bin": (
        lambda: replace_file("hub/model.safetensors", "hub/pytorch_model.bin", b""), "hub", r"bin is empty"),
    "end of model.pt": (
        lambda: truncate("official/model.pt", 0.999), "official", r"model.pt is damaged.*not a complete archive"),
    "config.json not JSON": (lambda: Path("hub/config.json").write_text("{"), "hub", r"config.json: .*as JSON"),
    "config.json a list": (lambda: Path("hub/config.json").write_text("[1]"), "hub", r"a model of type 'list'"),
    "no weights": (lambda: Path("hub/model.safetensors").unlink(), "hub", r"hub has no weights; expected model.saf"),
    "unknown weight": (
        lambda: change_weights({"x" * 9999: torch.zeros(3)}), "hub", r"unknown weight 'x{120}'"),
    "no softmax": (
        lambda: change_weights({name: None for name in golden("clusters")[1] if name.startswith("crit.")}), "hub",
        r"a model without a head, and a run needs a softmax \(crit.\*\).* open it with AutoModel of"),
    "nan": (
        lambda: change_weights({"crit.cluster_bias": torch.full((2,), float("nan"))}), "hub",
        r"cluster_bias' contains nan"),
    "list as weight": (lambda: change_weights({TABLE: [1.0]}), "hub", r"a tensor was expected, found list"),
    "shard outside the folder": (
        lambda: replace_file("hub/model.safetensors", "hub/model.safetensors.index.json",
                             b'{"weight_map": {"a": "../a.safetensors"}}'), "hub", r"files of weights in its folder"),
    "index with a name that no file can have": (
        lambda: replace_file("hub/model.safetensors", "hub/model.safetensors.index.json",
                             b'{"weight_map": {"a": "a\\u0000.safetensors"}}'), "hub",
        r"reading hub/a.*: no file can have this name"),
    "index that names itself": (
        lambda: replace_file("hub/model.safetensors", "hub/model.safetensors.index.json",
                             b'{"weight_map": {"a": "model.safetensors.index.json"}}'), "hub",
        r"files of weights in its folder"),
    # files that are small, but would take a lot of memory or time
    "half-precision weights for many layers": (
        lambda: write_repeated_layers(9), "hub", r"pytorch_model.bin stores 1,280 bytes, too few for the"),
    "large header of safetensors": (
        lambda: Path("hub/model.safetensors").write_bytes(struct.pack("<Q", 2**25)), "hub", r"header has 33,554,432 b"),
    "names of one tensor": (
        lambda: change_weights(dict.fromkeys(map(str, range(100_001)), torch.zeros(1))), "hub",
        r"damaged \(it has 100,0\d\d names of tensors"),
    "empty objects": (
        lambda: Path("hub/vocab.json").write_text("[" + "{}," * 1_000_000 + "{}]"), "hub", r"too many lists"),
    "nested lists": (
        lambda: Path("hub/config.json").write_text("[" * 100_000), "hub", r"config.json: damaged, not readable"),
    "large text": (
        lambda: (replace_file("hub/vocab.json", "hub/vocab.txt", b""), os.truncate("hub/vocab.txt", 2**26 + 1)), "hub",
        r"vocab.txt has 67,108,865 bytes, too many for settings or a vocabulary"),
    "too few words": (
        lambda: Path("hub/vocab.json").write_text('["a", "b"]'), "hub", r"has 2 tokens, but the model has 23"),
    "number as vocabulary": (lambda: Path("hub/vocab.json").write_text("7"), "hub", r"vocab.json.* words"),
    "attn_type of another module": (lambda: change_module(attn_type=3), "official", r"attn_type 3 cannot be converted"),
    "other module": (
        lambda: torch.save(torch.nn.Linear(2, 2), "official/model.pt"), "official",
        r"contains torch.nn.modules.linear.Linear; expected the authors' MemTransformerLM"),
    "other dictionary": (
        lambda: torch.save({"a": 1}, "nvidia/checkpoint_best.pt"), "nvidia", r"is not a checkpoint of NVIDIA's train"),
}  # fmt: skip
# arguments of txl convert, and a pattern of the message
WRONG_ARGUMENTS: dict[str, str] = {
    "nowhere run": r"nowhere: no such file or folder; expected checkpoint_best.pt of NV",
    "empty run": r"empty is not recognized; expected .*; --source-format NAME",
    "hub/config.json run": r"is one file of a checkpoint; pass its folder, hub$",
    "hub/model.safetensors run --source-format huggingface": r"is one file of a checkpoint; pass its folder, hub$",
    "hub run --source-format nvidia": r"hub: is a folder|hub.*no checkpoint",
    "hub run --tokenizer nowhere": r"nowhere",
    "hub run --to huggingface --source-format nvidia": r"--source-format .*cannot be combined with --to huggingface",
    "hub run --to huggingface": r"hub: not the folder of a run",
    "hub official": r"official exists already; choose another path",
    "hub link": r"link exists already; choose another path",
}


@pytest.mark.parametrize("name", DAMAGED_FILES)
def test_wrong_file_is_refused(name: str, folder: Path, capfd: Capture) -> None:
    change, source, message = DAMAGED_FILES[name]
    change()
    assert_refused(folder, f"convert {source} run", message, capfd)


@pytest.mark.parametrize("arguments", WRONG_ARGUMENTS)
def test_wrong_arguments_are_refused(arguments: str, folder: Path, capfd: Capture) -> None:
    Path("link").symlink_to("nowhere")
    assert_refused(folder, f"convert {arguments}", WRONG_ARGUMENTS[arguments], capfd)


class MakeFolder:
    """An object whose pickle asks the unpickler to create a folder."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


@pytest.mark.parametrize(
    "file",
    [
        "hub/vocab.pkl", "hub/vocab.bin", "hub/pytorch_model.bin", "official/model.pt", "official/cache.pt",
        "nvidia/checkpoint_best.pt",
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_archive", [True, False], ids=["zip archive", "pickle stream"])
def test_malicious_pickle_is_refused_and_not_executed(
    is_archive: bool, file: str, folder: Path, capfd: Capture, monkeypatch: Patch
) -> None:
    """Neither environment variable allows it. The second file calls a function of transformers, as a malicious file on
    the Hugging Face Hub did."""
    for name in ("TRUST_REMOTE_CODE", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"):
        monkeypatch.setenv(name, "1")
    if file.startswith("hub"):
        Path("hub/vocab.json" if "vocab" in file else "hub/model.safetensors").unlink()
    command = f"convert {Path(file).parent} run"
    torch.save({"idx2sym": WORDS, "a": MakeFolder()}, file, _use_new_zipfile_serialization=is_archive)
    assert_refused(folder, command, rf"{file} names {os.name}.mkdir, which does not belong", capfd)
    assert not Path("harm").exists()
    # protocol 2 stores the module and the name of a function as text, on a line each
    content = pickle.dumps({"idx2sym": WORDS, "a": MakeFolder()}, 2)
    function = b"transformers.models.auto.auto_factory\ngetattribute_from_module"
    Path(file).write_bytes(content.replace(f"{os.name}\nmkdir".encode(), function))
    message = rf"{file} names transformers.models.auto.auto_factory.getattribute_from_module, which does not belong"
    assert_refused(folder, command, message, capfd)


def test_run_that_hugging_face_cannot_express_is_refused(folder: Path, capfd: Capture) -> None:
    assert run(["convert", "hub", "run"]) == 0
    assert_refused(folder, "convert run new", "run is a run already; add --to huggingface", capfd)
    config = Path("run/config.yaml").read_text()
    for old, new, message in (
        ("  attention_window: 9\n", "  attention_window: 5\n", "attention_window 5 with memory_length 9"),
        ("norm_first: false\n  final_norm: false", "norm_first: true\n  final_norm: true", "final_norm"),
    ):
        assert old in config
        Path("run/config.yaml").write_text(config.replace(old, new))
        assert_refused(folder, "convert run back --to huggingface-4.37", message, capfd)


@pytest.mark.parametrize(("setting", "value"), [("qk_norm", True), ("max_ngram", 3)])
def test_parts_that_hugging_face_cannot_express_are_refused(folder: Path, setting: str, value: object) -> None:
    assert run(["convert", "hub", "run"]) == 0
    source = RunFolder.open(Path("run"))
    config = source.config.model_copy(update={"model": source.config.model.model_copy(update={setting: value})})
    with pytest.raises(UserError, match=f"cannot express a model with {setting} {str(value).lower()}"):
        write(Path("back"), config, {}, source.tokenizer)
    assert not Path("back").exists()


def test_full_disk_leaves_nothing(folder: Path, capfd: Capture, monkeypatch: Patch) -> None:
    for num_writes in (0, 2):  # number of writes that succeed before the disk is full
        with monkeypatch.context() as patch:
            full_after(num_writes, patch)
            assert_refused(folder, "convert hub run", FULL, capfd)
    with no_file_larger_than(4096):
        assert_refused(folder, "convert hub run", "file too large|No space|File too large", capfd)
    assert run(["convert", "hub", "run"]) == 0
