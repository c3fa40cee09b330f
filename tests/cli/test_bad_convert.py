"""What can go wrong with `txl convert`: one line on standard error, exit status 2, nothing new or changed on disk."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interop.checkpoints import golden, hugging_face_folder
from interop.old_modules import Old, nvidia_checkpoint, old_corpus, old_model, old_modules
from refusals import FULL, assert_refused, full_after, no_file_larger_than

from transformer_xl.cli.main import run

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch
WORDS = [f"word{place}" for place in range(23)]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A folder to stand in, with a good folder of each kind."""
    place = tmp_path / "w"
    place.mkdir()
    monkeypatch.chdir(place)
    config, weights, _ = golden("clusters")
    hugging_face_folder(Path("hub"), config, weights, WORDS)
    Path("official").mkdir()
    Path("nvidia").mkdir()
    Path("weights").mkdir()
    with old_modules():
        torch.save(old_model(Old()), "official/model.pt")
        torch.save(old_corpus(WORDS), "official/cache.pt")
        torch.save(nvidia_checkpoint(Old(), old_model(Old(nvidia=True)), WORDS), "nvidia/checkpoint_best.pt")
    return place


def change_config(**changes: Any) -> Callable[[], None]:
    def change() -> None:
        file = Path("hub/config.json")
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def change_weights(change: Callable[[dict[str, Any]], object], *, safe: bool = False) -> Callable[[], None]:
    """As pytorch_model.bin, or as model.safetensors."""

    def write() -> None:
        config, weights, _ = golden("clusters")
        change(weights)
        if safe:
            hugging_face_folder(Path("new"), config, weights, WORDS)
            Path("new/model.safetensors").replace("hub/model.safetensors")
            return
        Path("hub/model.safetensors").unlink()
        torch.save(weights, "hub/pytorch_model.bin")

    return write


def change_module(**attributes: Any) -> Callable[[], None]:
    def change() -> None:
        model = old_model(Old())
        for name, value in attributes.items():
            setattr(model, name, value)
        with old_modules():
            torch.save(model, "official/model.pt")

    return change


def change_nvidia(**changes: Any) -> Callable[[], None]:
    def change() -> None:
        with old_modules():
            made = nvidia_checkpoint(Old(), old_model(Old(nvidia=True)), WORDS)
            made["model_config"] |= changes
            torch.save(made, "nvidia/checkpoint_best.pt")

    return change


def cut(file: str, share: float) -> Callable[[], None]:
    def change() -> None:
        content = Path(file).read_bytes()
        Path(file).write_bytes(content[: round(len(content) * share)])

    return change


def written(file: str, content: str | bytes) -> Callable[[], None]:
    def change() -> None:
        Path(file).write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def both(*steps: Callable[[], object]) -> Callable[[], None]:
    def change() -> None:
        for step in steps:
            step()

    return change


def moved(old: str, new: str) -> Callable[[], None]:
    return lambda: Path(old).rename(new) and None


def gone(name: str) -> Callable[[], None]:
    return lambda: Path(name).unlink()


TABLE = "transformer.word_emb.emb_layers.0.weight"
SETTINGS = {
    "an unknown architecture": ({"model_type": "gpt2"}, r"config.json: a model of type 'gpt2'; only 'transfo-xl'"),
    "attention of another kind": ({"attn_type": 2}, r"attn_type 2 cannot be expressed here; only 0, the paper's"),
    "an extended context": ({"ext_len": 4}, r"ext_len 4 cannot be expressed here; only 0, no extended context"),
    "a sampled softmax": ({"sample_softmax": 5}, r"sample_softmax 5 cannot be expressed here; only a full"),
    "an odd tie": ({"div_val": 2, "tie_projs": [True, False, True]}, r"tie_projs \[True, False, True\] cannot be"),
    "a window of nothing": ({"mem_len": 0}, r"same_length with mem_len 0 lets no query see a key"),
    "a word for a number": ({"d_model": "8"}, r"config.json: d_model is '8'; wanted an integer"),
    "a number for a flag": ({"pre_lnorm": 1}, r"config.json: pre_lnorm is 1; wanted true or false"),
    "cutoffs that are none": ({"cutoffs": [5, "x"]}, r"cutoffs is \[5, 'x'\]; wanted a list of integers"),
    "cutoffs one in the other": ({"cutoffs": [[5]]}, r"cutoffs is of type list; wanted a list of integers"),
    "cutoffs that fall": ({"cutoffs": [11, 5]}, r"config.json: cutoffs 11, 5 must increase"),
    "other sizes": ({"d_inner": 9}, r"CoreNet.0.weight' is 7 x 8, and the settings ask for 9 x 8; do the two belong"),
    "another vocabulary size": ({"vocab_size": 24}, rf"'{TABLE}' is 23 x 8, and the settings ask for 24 x 8"),
    "more layers": ({"n_layer": 3}, r"no weight 'transformer.layers.2.dec_attn.r_w_bias', which its settings ask for"),
    "very many layers": ({"n_layer": 2**31 - 1}, r"has 31 weights, and its settings ask for 2,147,483,647 layers"),
    "fewer layers": ({"n_layer": 1}, r"has a weight 'transformer.layers.1.[\w.]*' that this model does not"),
    "an odd width": ({"d_model": 7}, r"config.json: d_model: .*multiple of 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_cannot_be(name: str, place: Path, capfd: Capture) -> None:
    changes, message = SETTINGS[name]
    change_config(**changes)()
    assert_refused(place, "convert hub run", message, capfd)


FILES: dict[str, tuple[Callable[[], Any], str, str]] = {
    # half a checkpoint
    "half safetensors": (cut("hub/model.safetensors", 0.5), "hub", r"model.safetensors is damaged \(not a whole"),
    "its header": (cut("hub/model.safetensors", 0.001), "hub", r"model.safetensors is damaged \(not a whole"),
    "an empty bin": (both(gone("hub/model.safetensors"), written("hub/pytorch_model.bin", b"")), "hub", "bin is empty"),
    "half a model": (cut("official/model.pt", 0.5), "official", r"model.pt is damaged.*not a complete archive"),
    "a model's end": (cut("official/model.pt", 0.999), "official", r"model.pt is damaged.*not a complete archive"),
    "half a checkpoint": (cut("nvidia/checkpoint_best.pt", 0.7), "nvidia", r"best.pt is damaged.*complete archive"),
    "half a cache": (cut("official/cache.pt", 0.4), "official", r"cache.pt is damaged"),
    "no JSON": (written("hub/config.json", "{"), "hub", r"config.json: .*not readable as JSON"),
    "JSON of a list": (written("hub/config.json", "[1]"), "hub", r"config.json: a model of type 'list'"),
    "no weights": (gone("hub/model.safetensors"), "hub", r"hub has no weights; wanted model.safetensors or "),
    # weights
    "a weight of another shape": (
        change_weights(lambda w: w.update({TABLE: torch.zeros(23, 7)})), "hub", rf"'{TABLE}' is 23 x 7, and the"),
    "a weight of a long name": (
        change_weights(lambda w: w.update({"x" * 9999: torch.zeros(3)})), "hub", r"a weight 'x{120}' that this"),
    "a type of a long name": (change_config(model_type="x" * 9999), "hub", r"of type 'x{59}; only"),
    "a weight too few": (
        change_weights(lambda w: w.pop("crit.cluster_bias"), safe=True), "hub", r"no weight 'crit.cluster_bias'"),
    "a weight too many": (
        change_weights(lambda w: w.update({"score.weight": torch.zeros(3)})), "hub", r"a weight 'score.weight' that"),
    "no softmax": (
        change_weights(lambda w: [w.pop(name) for name in list(w) if name.startswith("crit.")]), "hub",
        r"has no softmax \(crit.\*\): a TransfoXLModel or a classifier; wanted a TransfoXLLMHeadModel"),
    "no number": (
        change_weights(lambda w: w["crit.cluster_bias"].fill_(float("nan"))), "hub", r"cluster_bias' is not finite"),
    "no tensor": (change_weights(lambda w: w.update({TABLE: [1.0]})), "hub", r"a tensor was expected, found list"),
    "a file outside": (
        both(moved("hub/model.safetensors", "weights/a.safetensors"),
             written("hub/model.safetensors.index.json", '{"weight_map": {"a": "../weights/a.safetensors"}}')),
        "hub", r"names a file outside its folder"),
    # vocabularies
    "words too few": (written("hub/vocab.json", '{"a": 0, "b": 1}'), "hub", r"has 2 tokens and the model 23; the two"),
    "a word twice": (written("hub/vocab.json", json.dumps(["a"] * 23)), "hub", r"word 'a' twice; get it again"),
    "a letter twice": (written("hub/vocab.json", json.dumps(["_", *"a" * 22])), "hub", r"word 'a' twice; get it again"),
    "numbers missing": (written("hub/vocab.json", '{"a": 0, "b": 2}'), "hub", r"its 2 words are not 0 up to 1"),
    "no words": (written("hub/vocab.json", "7"), "hub", r"vocab.json holds no words"),
    "no vocabulary": (gone("official/cache.pt"), "official", r"without a tokenizer .* 23 tokens; give --tokenizer"),
    "half a pickled vocabulary": (
        both(gone("hub/vocab.json"), written("hub/vocab.pkl", pickle.dumps({"idx2sym": WORDS})[:99])), "hub",
        r"vocab.pkl is damaged, or not a pickle \(at byte"),
    "an empty vocabulary": (
        both(gone("hub/vocab.json"), written("hub/vocab.pkl", pickle.dumps({"a": 1}))), "hub", r"holds no words"),
    # what cannot be expressed
    "attention of another kind": (change_module(attn_type=3), "official", r"attn_type 3 cannot be expressed here"),
    "an extended context": (change_module(ext_len=2), "official", r"ext_len 2 cannot be expressed here"),
    "a sampled softmax": (change_nvidia(sample_softmax=3), "nvidia", r"sample_softmax 3 cannot be expressed here"),
    "another module": (
        lambda: torch.save(torch.nn.Linear(2, 2), "official/model.pt"), "official",
        r"holds torch.nn.modules.linear.Linear; wanted the authors' MemTransformerLM"),
    "no checkpoint": (
        lambda: torch.save({"a": 1}, "nvidia/checkpoint_best.pt"), "nvidia", r"is no checkpoint of NVIDIA's train.py"),
    # what is given
    "nothing there": (lambda: None, "nowhere", r"nowhere: no such file or folder; wanted checkpoint_best.pt of NV"),
    "an empty folder": (lambda: None, "weights", r"weights is not recognised; wanted .*; --source-format NAME"),
    "checkpoint alone": (
        written("weights/checkpoint", 'model_checkpoint_path: "model.ckpt-0"\n'), "weights", r"contains no weights"),
    "an archive of others": (
        lambda: zipfile.ZipFile("official/model.pt", "w").writestr("a.txt", "b"), "official", r"complete archive"),
    "a file of the folder": (lambda: None, "hub/config.json", r"not recognised alone; give its folder, hub$"),
    "another file of it": (
        lambda: None, "hub/model.safetensors --source-format huggingface",
        r"not recognised alone; give its folder, hub$"),
    "another format": (lambda: None, "hub --source-format nvidia", r"hub: is a folder|hub.*no checkpoint"),
    "no vocabulary there": (lambda: None, "hub --tokenizer nowhere", r"nowhere"),
    "options of the other way": (
        lambda: None, "hub --to huggingface --source-format nvidia",
        r"--source-format: only for checkpoints of other programs; leave out"),
    "no run": (lambda: None, "hub --to huggingface", r"hub: not the folder of a run"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files_that_cannot_be(name: str, place: Path, capfd: Capture) -> None:
    change, source, message = FILES[name]
    change()
    first, *options = source.split()
    assert_refused(place, " ".join(["convert", first, "run", *options]), message, capfd)


class Harm:
    """Unpickled, it makes a folder."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


class Hidden:
    """Unpickled, it fetches what it likes through a name of transformers."""

    def __reduce__(self) -> Any:
        return Namespace, ()


def hidden(content: bytes) -> bytes:
    """The same with a function of transformers in place of Namespace, as a file on the Hub had it."""
    name = b"transformers.models.auto.auto_factory\ngetattribute_from_module"
    assert b"cargparse\nNamespace" in content
    return content.replace(b"cargparse\nNamespace", b"c" + name)


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("hub", "hub/vocab.pkl"), ("hub", "hub/vocab.bin"), ("hub", "hub/pytorch_model.bin"),
        ("official", "official/model.pt"), ("official", "official/cache.pt"), ("nvidia", "nvidia/checkpoint_best.pt"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("older", [True, False])
def test_a_pickle_that_means_harm_is_refused(
    kind: str, file: str, older: bool, place: Path, capfd: Capture, monkeypatch: Patch
) -> None:
    """Test 11: whatever the file and the form; no variable of the environment lets it through."""
    for name in ("TRUST_REMOTE_CODE", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"):
        monkeypatch.setenv(name, "1")
    if kind == "hub":
        Path("hub/vocab.json" if "vocab" in file else "hub/model.safetensors").unlink()
    value = {"idx2sym": WORDS, "a": Harm()}
    torch.save(value, file, _use_new_zipfile_serialization=not older)
    assert_refused(place, f"convert {kind} run", rf"{file} names {os.name}.mkdir, which has no place", capfd)
    assert not Path("harm").exists()
    Path(file).write_bytes(hidden(pickle.dumps({"idx2sym": WORDS, "a": Hidden()}, 2)))
    message = rf"{file} names transformers.models.auto.auto_factory.getattribute_from_module, which has no place"
    assert_refused(place, f"convert {kind} run", message, capfd)


def test_what_stands_there_already(place: Path, capfd: Capture) -> None:
    assert_refused(place, "convert hub official", "official exists already; choose another folder", capfd)
    assert run(["convert", "hub", "run"]) == 0
    assert_refused(place, "convert run new", "run is a run already; 'txl convert run TO --to huggingface'", capfd)
    assert_refused(place, "convert run hub --to huggingface", "hub exists already; choose another folder", capfd)


def test_a_link_to_nothing_is_in_the_way(place: Path, capfd: Capture) -> None:
    Path("link").symlink_to("nowhere")
    assert_refused(place, "convert hub link", "link exists already; choose another folder", capfd)


def test_a_model_that_hugging_face_cannot_express(place: Path, capfd: Capture) -> None:
    assert run(["convert", "hub", "run"]) == 0
    config = Path("run/config.yaml").read_text()
    Path("run/config.yaml").write_text(config.replace("  attention_window: 9\n", "  attention_window: 5\n"))
    assert_refused(
        place, "convert run back --to huggingface", "attention_window 5 with memory_length 9 has no form", capfd
    )
    Path("run/config.yaml").write_text(
        config.replace("norm_first: false", "norm_first: true").replace("final_norm: false", "final_norm: true")
    )
    assert_refused(place, "convert run back --to huggingface", "final_norm|final LayerNorm", capfd)


def test_a_full_disk_leaves_nothing(place: Path, capfd: Capture, monkeypatch: Patch) -> None:
    for writes in (0, 2):
        with monkeypatch.context() as patch:
            full_after(writes, patch)
            assert_refused(place, "convert hub run", FULL, capfd)
    with no_file_larger_than(4096):
        assert_refused(place, "convert hub run", "file too large|No space|File too large", capfd)
    assert run(["convert", "hub", "run"]) == 0
