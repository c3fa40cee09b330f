"""Adapters: only they are trained and stored, and with their base they are runs like all others.

Shape suffixes: B batch rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from processes import adapter_job, run_processes
from refusals import txl
from safetensors.torch import load_file, save_file
from tensors import assert_same_tensors
from training_runs import OPTIONS, SHORT, StopAt, make_base, new_corpus

from transformer_xl import UserError, convert, evaluate, finetune, generate, load, load_adapter, resume, save
from transformer_xl.inference import prepare_inference
from transformer_xl.integrations.export import export
from transformer_xl.integrations.int8 import to_int8
from transformer_xl.model.lora import merge_lora
from transformer_xl.run import Run
from transformer_xl.run_folder import RunFolder
from transformer_xl.tensor_file import load_tensors, save_tensors

_HEADER = json.dumps({"__metadata__": {"transformer_xl": "[" * 50_000}}).encode()
NESTED = len(_HEADER).to_bytes(8, "little") + _HEADER
"""A safetensors file whose metadata is nested too deeply for a JSON parser."""
IDS_BT = torch.tensor([[97, 98, 99, 97, 98], [99, 97, 98, 99, 97]])


def make_adapter(folder: Path, name: str = "tuned", **arguments: Any) -> Path:
    """Train an adapter for a few steps on a run, and return its folder."""
    base = folder / "base" if (folder / "base").exists() else make_base(folder, n_heads=2)
    corpus = folder / "new" if (folder / "new").exists() else new_corpus(folder)
    arguments = {"lora_rank": 3, "train": SHORT, **OPTIONS, **arguments}
    return finetune(base, corpus, folder / name, **arguments).path


@torch.no_grad()
def logits(run: Run, ids_BT: torch.Tensor = IDS_BT) -> torch.Tensor:
    model = prepare_inference(run.model)
    memory = model.initial_memory(len(ids_BT))
    parts = []
    for part_BT in ids_BT.split(2, dim=1):
        hidden_BTD, memory = model(part_BT, memory)
        parts.append(model.logits(hidden_BTD))
    return torch.cat(parts, 1)


def changed_settings(run: Path, **values: Any) -> None:
    """Change settings of the adapter in config.yaml."""
    settings = yaml.safe_load((run / "config.yaml").read_text())
    for name, value in values.items():
        group = settings["finetune"] if name.startswith("base") else settings["finetune"]["lora"]
        group[name] = value
    (run / "config.yaml").write_text(yaml.safe_dump(settings))


@pytest.mark.parametrize("architecture", ["transformer-xl", "shaw", "vaswani", "al-rfou", "qrnn"])
def test_only_the_adapter_is_trained_and_stored(architecture: str, tmp_path: Path) -> None:
    base = make_base(tmp_path, architecture=architecture)
    before = {file: file.read_bytes() for file in base.rglob("*") if file.is_file()}
    run = make_adapter(tmp_path, train={**SHORT, "weight_average": "ema"})
    assert {file: file.read_bytes() for file in base.rglob("*") if file.is_file()} == before
    assert not list(run.rglob("model.safetensors"))
    for file in run.rglob("adapter_model.safetensors"):
        assert all(name.rpartition(".lora_")[2] in ("A.weight", "B.weight") for name in load_tensors(file)[0])
    names = {name for file in run.rglob("training/*.safetensors") for name in load_file(file)}
    assert all(".lora_" in name for name in names if name.startswith(("optimizer/", "average/0", "average/l")))
    weights, whole = load(run, device="cpu").model.state_dict(), load(base, device="cpu").model.state_dict()
    changed = {name for name in whole if not torch.equal(whole[name], weights[name])}
    linear = ("_proj.weight", "gates.weight")
    assert changed == {name for name in whole if name.startswith("layers.") and name.endswith(linear)}


def test_losses_are_those_of_evaluate_and_of_the_command(tmp_path: Path) -> None:
    base, corpus = make_base(tmp_path), new_corpus(tmp_path)
    result = finetune(base, corpus, tmp_path / "tuned", lora_rank=3, train=SHORT, **OPTIONS)
    assert result.losses[0].before == evaluate(load(base, device="cpu"), corpus.split("valid")).nats_per_token
    assert result.losses[0].after == evaluate(load(result.path), corpus.split("valid")).nats_per_token
    assert result.losses[0].after < result.losses[0].before
    words = [str(result.path), "--corpus", str(corpus.path), "--split", "valid", "--device", "cpu", "--json"]
    assert json.loads(txl("evaluate", *words).out)["nats_per_token"] == result.losses[0].after
    assert result.run.config.finetune.lora.alpha == 6
    assert set(result.run.config.finetune.lora.targets) == {
        *("q_proj", "k_proj", "v_proj", "r_proj", "o_proj", "up_proj", "down_proj")
    }


@pytest.mark.parametrize("model", [{}, {"max_ngram": 3, "value_embeddings": True, "key_offset": True}])
def test_merged_adapter_equals_the_one_beside_the_weights(model: dict[str, Any], tmp_path: Path) -> None:
    """In float64; and what `convert` and `save` write equals what `load` gives, bit for bit."""
    make_base(tmp_path, n_heads=2, **model)
    run = make_adapter(tmp_path)
    folder = RunFolder.open(run)
    network = folder.build_model().double().eval()
    assert folder.config.lora is not None
    tensors, _ = load_tensors(run / "adapter_model.safetensors")
    prefix = "base_model.model.model."
    state = {
        name.removeprefix(prefix).replace(".weight", ".default.weight"): tensor for name, tensor in tensors.items()
    }
    assert not network.load_state_dict(state, strict=False).unexpected_keys
    beside = Run(network, folder.tokenizer, folder.config)
    expected_BTV = logits(beside)
    merge_lora(network)
    torch.testing.assert_close(logits(beside), expected_BTV, rtol=0, atol=1e-10)
    loaded = load(run, device="cpu")
    torch.testing.assert_close(logits(loaded).double(), expected_BTV, rtol=0, atol=1e-5)
    base = load(tmp_path / "base", device="cpu")
    assert not torch.allclose(logits(base).double(), expected_BTV, atol=1e-3)
    torch.testing.assert_close(logits(load_adapter(base, run)), logits(loaded), rtol=0, atol=1e-5)
    convert(run, tmp_path / "whole")
    save(loaded, tmp_path / "saved")
    shutil.rmtree(tmp_path / "base")
    for path in ("whole", "saved"):
        whole = load(tmp_path / path, device="cpu")
        assert_same_tensors(whole.model, loaded.model)
        assert whole.config.lora is None
        assert whole.config.finetune.base == str(tmp_path / "base")


def test_weights_of_an_adapter_are_fine_tuned_at_a_low_rate(tmp_path: Path) -> None:
    """That of the adapter is meant for two small matrices."""
    adapter = make_adapter(tmp_path)
    convert(adapter, tmp_path / "whole")
    for base in (adapter, tmp_path / "whole"):
        result = finetune(base, tmp_path / "new", tmp_path / f"{base.name}-again", train=SHORT, **OPTIONS)
        assert result.run.config.train.learning_rate == 1e-4


def test_stopped_adapter_resumes_bit_for_bit(tmp_path: Path) -> None:
    options = {"lora_dropout": 0.3, "lora_targets": ["q_proj", "down_proj"], "freeze": ["layers.0.*"]}
    whole = make_adapter(tmp_path, "whole", **options)
    make_adapter(tmp_path, "parts", callbacks=[StopAt(4)], **options)
    resumed = resume(tmp_path / "parts", **OPTIONS)
    assert resumed.finished
    assert [loss.text for loss in resumed.losses] == ["new", "old"]
    assert resumed.losses == resume(tmp_path / "whole", **OPTIONS).losses
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "parts" / name).read_bytes() == (whole / name).read_bytes()
    changed = {
        name
        for name, tensor in load_tensors(whole / "adapter_model.safetensors")[0].items()
        if "lora_B" in name and tensor.any()
    }
    assert changed == {
        *("base_model.model.model.layers.1.attention.q_proj.lora_B.weight",),
        *("base_model.model.model.layers.1.feed_forward.down_proj.lora_B.weight",),
    }


def test_several_adapters_share_the_weights_of_one_base(tmp_path: Path) -> None:
    first, second = make_adapter(tmp_path, "first"), make_adapter(tmp_path, "second", lora_rank=2, lora_alpha=9.0)
    base = load(tmp_path / "base", device="cpu")
    expected = {run: logits(load(run, device="cpu")) for run in (first, second, tmp_path / "base")}
    adapted = {run: load_adapter(base, run) for run in (first, second)}
    for run, loaded in (*adapted.items(), (tmp_path / "base", base)):
        torch.testing.assert_close(logits(loaded), expected[run], rtol=0, atol=1e-5)
        parameters = dict(base.model.named_parameters())
        for name, parameter in loaded.model.named_parameters():
            if ".lora_" not in name:
                assert parameter is parameters[name.replace(".base_layer.", ".")]
                assert parameter.requires_grad
    assert not torch.allclose(expected[first], expected[second], atol=1e-3)
    _, memory = adapted[first].inference()(IDS_BT)
    for other in (adapted[second], base):
        with pytest.raises(UserError, match="keys and values of another model"):
            other.inference()(IDS_BT, memory)
    options: dict[str, Any] = {"max_new_tokens": 9, "temperature": 0}
    assert generate(adapted[first], "abc", **options).text == generate(load(first), "abc", **options).text
    bfloat16 = {"temperature": 0, "max_new_tokens": 9, "dtype": "bfloat16"}
    assert generate(adapted[first], "abc", **bfloat16).text == generate(load(first), "abc", **bfloat16).text
    for use in (lambda run: save(run, tmp_path / "no"), to_int8, export):
        with pytest.raises(UserError, match=r"adapter beside its weights cannot be .*; load\(PATH\) .* merges it"):
            use(adapted[first])
    with pytest.raises(UserError, match="the base is no whole run from a folder"):
        load_adapter(adapted[first], second)
    with pytest.raises(UserError, match="is a whole run, not an adapter; use load"):
        load_adapter(base, tmp_path / "base")
    with torch.no_grad():
        base.model.softmax.bias.add_(1)
    with pytest.raises(
        UserError, match=r"base has other weights than .*first was trained on \(at softmax.bias\): they changed"
    ):
        load_adapter(base, first)


def test_peft_reads_the_folder(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformer_xl.integrations.huggingface import from_run

    run = make_adapter(tmp_path, lora_targets=["v_proj", "up_proj"])
    model, _ = from_run(tmp_path / "base")
    adapted = peft.PeftModel.from_pretrained(model, str(run)).eval()
    with torch.no_grad():
        logits_BTV = adapted(input_ids=IDS_BT).logits
    expected_BTV = from_run(run)[0](input_ids=IDS_BT).logits
    torch.testing.assert_close(logits_BTV, expected_BTV, rtol=0, atol=1e-5)
    with torch.no_grad():
        cache = adapted(input_ids=IDS_BT).past_key_values
    with adapted.disable_adapter(), pytest.raises(UserError, match="keys and values of other weights"):
        adapted(input_ids=IDS_BT, past_key_values=cache)
    assert json.loads((run / "adapter_config.json").read_text())["base_model_name_or_path"] is None


def test_base_is_found_where_it_moved_and_must_be_unaltered(tmp_path: Path) -> None:
    run = make_adapter(tmp_path)
    expected_BTV, base = logits(load(run, device="cpu")), tmp_path / "base"
    shutil.copytree(tmp_path, tmp_path / "copy", ignore=shutil.ignore_patterns("copy"))
    base.rename(tmp_path / "moved")
    assert torch.equal(logits(load(tmp_path / "copy" / "tuned", device="cpu")), expected_BTV)  # beside it
    convert_it = ["convert", str(run), str(tmp_path / "whole")]
    missing = txl(*convert_it)
    assert (missing.status, missing.out) == (2, "")
    assert f"is an adapter of {base}, which is no run here; give the base's new folder" in missing.err
    assert txl(*convert_it, "--base", str(tmp_path / "moved")).status == 0
    assert torch.equal(logits(load(tmp_path / "whole", device="cpu")), expected_BTV)
    assert torch.equal(logits(load(run, device="cpu", base=tmp_path / "moved")), expected_BTV)
    resume(run, base=tmp_path / "moved", train={"max_steps": 7}, **OPTIONS)
    load(run, device="cpu")
    weights, metadata = load_tensors(tmp_path / "moved" / "model.safetensors")
    shutil.rmtree(tmp_path / "moved" / "checkpoints")  # one of them has the same weights
    save_tensors(
        tmp_path / "moved" / "model.safetensors", {**weights, "softmax.bias": weights["softmax.bias"] + 1}, metadata
    )
    for words in (
        ["evaluate", str(run), "--split", "valid"],
        ["generate", str(run)],
        ["train", "--resume", str(run), "--train.max-steps", "9"],
    ):
        result = txl(*words)
        assert (result.status, result.out) == (2, "")
        assert "is not what" in result.err
        assert "its checksum is another" in result.err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 2000}, r"rank.*1024"),
        ({"rank": 11}, r"lora_rank 11 is above the smaller side of layers.0.attention.q_proj \(10 x 14\); give 10"),
        ({"rank": 4}, "does not fit the settings"),
        ({"alpha": 1e308}, "alpha"),
        ({"targets": ["embedding"]}, "no linear layer 'embedding' to adapt; known: q_proj"),
        ({"targets": ["q_proj"]}, "does not fit the settings"),
        ({"base": "https://huggingface.co/someone/model"}, "which is no run here"),
        ({"base_sha256": "0" * 64}, "its checksum is another"),
        ({"file": "adapter_model.bin"}, "is a pickle, which is never read"),
        (
            {"tensors": {"base_model.model.model.layers.0.attention.q_proj.lora_A.weight": torch.zeros(1)}},
            "does not fit",
        ),
        ({"tensors": {"another": torch.zeros(1)}}, "does not fit the settings"),
        ({"bytes": b"no header"}, "not a complete safetensors file"),
        ({"bytes": NESTED}, "not a complete safetensors file"),
        ({"pipe": "adapter_model.safetensors"}, "is not a file"),
        ({"pipe": "txl_tokenizer.json"}, "is not a file"),
        ({"base_step": 10**400}, "base_step"),
        ({"alpha": 3.5}, "was trained with another base, rank, alpha or targets than those in"),
        ({"values": torch.nan}, r"weights that are not finite \(at .*lora_A"),
        ({"dtype": torch.complex64}, r"weights of torch.complex64 \(at .*lora_A"),
    ],
)
def test_hostile_folder_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    run = make_adapter(tmp_path)
    shutil.rmtree(run / "checkpoints")
    file = run / "adapter_model.safetensors"
    match change:
        case {"file": name}:
            file.rename(run / name)
        case {"tensors": tensors}:
            weights, metadata = load_tensors(file)
            save_tensors(file, weights | tensors, metadata)
        case {"bytes": content}:
            file.write_bytes(content)
        case {"pipe": name}:
            (run / name).unlink()
            os.mkfifo(run / name)
        case {"values": value}:
            weights, metadata = load_tensors(file)
            save_tensors(file, {name: tensor.fill_(value) for name, tensor in weights.items()}, metadata)
        case {"dtype": dtype}:
            weights, metadata = load_tensors(file)
            save_tensors(file, {name: tensor.to(dtype) for name, tensor in weights.items()}, metadata)
        case _:
            if "base" in change:
                shutil.move(tmp_path / "base", tmp_path / "elsewhere")
            changed_settings(run, **change)
    with pytest.raises(UserError, match=message):
        load(run, device="cpu")


def test_folder_of_peft_without_a_checksum_is_refused(tmp_path: Path) -> None:
    base = load(make_base(tmp_path), device="cpu")
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft" / "adapter_config.json").write_text("{}")
    for path in (tmp_path / "peft", "someone/adapter"):
        with pytest.raises(UserError, match=r"not the folder of a run|no such folder"):
            load_adapter(base, path)
    save_file({"a": torch.zeros(1)}, tmp_path / "peft" / "other.safetensors")
    (tmp_path / "peft" / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="is a pickle, which is never read"):
        load_adapter(base, tmp_path / "peft")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lora_rank": 1025}, "^lora_rank: "),
        ({"lora_rank": 11}, "lora_rank 11 is above the smaller side"),
        ({"lora_rank": "8"}, "lora_rank is of type str"),
        ({"lora_alpha": 0.0}, "^lora_alpha: "),
        ({"lora_dropout": 1.0}, "^lora_dropout: "),
        ({"lora_targets": ["q_prj"]}, r"no linear layer 'q_prj' to adapt \(did you mean 'q_proj'\?\)"),
        ({"lora_targets": "q_proj"}, r"give a list of names such as \['q_proj', 'v_proj'\]"),
        ({"lora_rank": None, "lora_alpha": 4.0}, "lora_alpha has no effect without lora_rank"),
        ({"freeze": ["layers.*"]}, "leaves no parameter to train"),
    ],
)
def test_wrong_arguments_leave_no_folder(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        make_adapter(tmp_path, **arguments)
    assert not (tmp_path / "tuned").exists()


def test_base_must_be_whole_and_have_linear_layers(tmp_path: Path) -> None:
    numbers = {"lora_rank": np.int64(3), "threads": np.int64(torch.get_num_threads())}
    run, corpus = make_adapter(tmp_path, **numbers), new_corpus(tmp_path / "more")
    with pytest.raises(UserError, match=r"tuned is an adapter itself; merge it first \(txl convert .* RUN\)"):
        finetune(run, corpus, tmp_path / "no", lora_rank=2, **OPTIONS)
    whole = finetune(run, corpus, tmp_path / "whole", train=SHORT, **OPTIONS)  # all weights, from the merged ones
    assert whole.run.config.lora is None
    lstm = make_base(tmp_path / "lstm", architecture="lstm")
    with pytest.raises(UserError, match="a model of lstm has no linear layers that LoRA adapts"):
        finetune(lstm, corpus, tmp_path / "no", lora_rank=2, **OPTIONS)
    assert not (tmp_path / "no").exists()


def test_missing_peft_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, corpus = make_base(tmp_path), new_corpus(tmp_path)
    monkeypatch.setattr("transformer_xl.model.lora.find_spec", lambda name: None)
    words = ["finetune", str(base), "--corpus", str(corpus.path), "--run", str(tmp_path / "tuned"), "--lora-rank", "2"]
    result = txl(*words)
    assert (result.status, result.out) == (2, "")
    assert "peft is not installed; install it: pip install " in result.err
    assert not (tmp_path / "tuned").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="as the other tests of several processes")
def test_results_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    """In float64, of a sharded adapter that one process resumes."""
    make_base(tmp_path), new_corpus(tmp_path)
    assert run_processes(2, adapter_job, tmp_path, "fsdp") == [0, 0]
    try:
        adapter_job(tmp_path, "ddp")
        assert resume(tmp_path / "fsdp", **OPTIONS).finished
    finally:
        torch.set_default_dtype(torch.float32)
    expected, _ = load_tensors(tmp_path / "ddp" / "adapter_model.safetensors")
    tensors, _ = load_tensors(tmp_path / "fsdp" / "adapter_model.safetensors")
    assert_same_tensors(tensors, expected, atol=1e-9)


@pytest.mark.filterwarnings("default")  # torch's compiler ignores its own warnings, unless they are errors
def test_compiled_and_recomputed_training_equals_eager_training(tmp_path: Path) -> None:
    settings = {"eager": {}, "compiled": {"compile": "layers"}, "recomputed": {"activation_checkpointing": True}}
    adapters = {
        name: load_tensors(make_adapter(tmp_path, name, train={**SHORT, **train}) / "adapter_model.safetensors")[0]
        for name, train in settings.items()
    }
    for name in ("compiled", "recomputed"):
        assert_same_tensors(adapters[name], adapters["eager"], atol=1e-4)
