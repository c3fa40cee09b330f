"""Exported graphs give this package's numbers, for any number of new tokens, with memory as inputs and outputs."""

from __future__ import annotations

import re
import runpy
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from model_configs import model_config
from refusals import txl
from tensors import assert_same_tensors

from transformer_xl import (
    RunConfig,
    TrainConfig,
    UserError,
    build_model,
    convert,
    finetune,
    generate,
    load,
    save,
    score,
)
from transformer_xl.inference.int8 import int8_tensors
from transformer_xl.integrations.export import export, export_onnx
from transformer_xl.integrations.huggingface import from_run
from transformer_xl.integrations.int8 import to_int8
from transformer_xl.model.memory import ContextLimits
from transformer_xl.run import Run
from transformer_xl.tensor_file import load_tensors, save_tensors
from transformer_xl.text.tokenizers import ByteTokenizer

ROOT = Path(__file__).parents[2]
SIZES = {"vocab_size": 256, "n_layers": 2, "d_model": 14, "n_heads": 2, "d_head": 5, "d_ff": 19}
LENGTHS = (1, 7, 3, 30, 11, 1)  # of segments: shorter than the memory, as long as it, and longer
EXACT = {"rtol": 1e-6, "atol": 1e-6}

MODELS: dict[str, dict[str, Any]] = {
    "transformer-xl": {},
    "n-grams, adaptive": {"max_ngram": 4, "d_ngram": 5, "ngram_buckets": 31, "cutoffs": (31, 97), "div_val": 2},
    "as fast-small": {
        "max_ngram": 3, "d_ngram": 5, "ngram_buckets": 31, "value_embeddings": True, "key_offset": True,
        "attention_sinks": True,
        "norm_first": True, "qk_norm": True, "clamp_length": 6,
    },
    "limits, pre-norm": {"attention_window": 9, "clamp_length": 6, "norm_first": True, "qk_norm": True},
    "xlnet": {"architecture": "xlnet", "perm_size": 8},
    "shaw, empty memory attended": {"architecture": "shaw", "max_relative_positions": 6, "attend_empty_memory": True},
}  # fmt: skip


def make_run(memory_length: int = 11, **settings) -> Run:
    torch.manual_seed(7)
    model = model_config(**SIZES | settings)
    network = build_model(model, memory_length=memory_length).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    config = RunConfig(model=model, train=TrainConfig(segment_length=7, memory_length=memory_length))
    return Run(network, ByteTokenizer(), config)


def segments(batch_size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 256, (batch_size, length), generator=generator) for length in LENGTHS]


def logits_of(run: Run, limits: ContextLimits, tokens: list[torch.Tensor]) -> list[torch.Tensor]:
    """Our own logits of each segment, with the memory for inference."""
    model, results = run.inference(), []
    memory = model.initial_memory(len(tokens[0]), limits)
    with torch.inference_mode():
        for tokens_BT in tokens:
            hidden_BTD, memory = model(tokens_BT, memory)
            results.append(model.logits(hidden_BTD))
    return results


@pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning")  # torch's own
@pytest.mark.parametrize("name", MODELS)
def test_graph_of_torch_export(name: str, tmp_path: Path) -> None:
    """Also after it was saved and loaded."""
    run = make_run(**MODELS[name])
    exported = export(run, batch_size=2)
    torch.export.save(exported.program, tmp_path / "model.pt2")
    call = torch.export.load(tmp_path / "model.pt2").module()
    limits = ContextLimits(11, run.config.model.limit("attention_window"), run.config.model.limit("clamp_length"))
    memory = tuple(exported.memory.values())
    for tokens_BT, expected_BTV in zip(segments(2), logits_of(run, limits, segments(2)), strict=True):
        logits_BTV, *memory = call(tokens_BT, *memory)
        torch.testing.assert_close(logits_BTV, expected_BTV, **EXACT)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # torch's and onnx's own
@pytest.mark.parametrize("name", ["transformer-xl", "n-grams, adaptive", "as fast-small"])
def test_onnx_file(name: str, tmp_path: Path) -> None:
    run = make_run(**MODELS[name])
    path = export_onnx(run, tmp_path / "model.onnx", batch_size=2, memory_length=13)
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    session = onnxruntime.InferenceSession(path)
    inputs = {item.name: item for item in session.get_inputs()}
    assert next(iter(inputs)) == "tokens"
    assert [name for name in inputs if name.startswith("hidden")] == ["hidden_0", "hidden_1"]
    types = {"tensor(float)": np.float32, "tensor(int64)": np.int64}
    memory = {name: np.zeros(item.shape, types[item.type]) for name, item in inputs.items() if name != "tokens"}
    limits = ContextLimits(13, clamp_length=run.config.model.limit("clamp_length"))
    for tokens_BT, expected_BTV in zip(segments(2), logits_of(run, limits, segments(2)), strict=True):
        logits_BTV, *after = session.run(None, {"tokens": tokens_BT.numpy(), **memory})
        np.testing.assert_allclose(logits_BTV, expected_BTV, **EXACT)
        memory = dict(zip(memory, after, strict=True))


@pytest.mark.parametrize(
    ("settings", "arguments", "message"),
    [
        ({"architecture": "lstm"}, {}, "needs a model with relative attention, and this is lstm"),
        ({}, {"memory_length": 0}, "memory_length is 0; a graph has memory as inputs and outputs, so give 1 or more"),
        ({}, {"batch_size": -1}, "batch_size is -1; .* give 1 or more"),
        (
            {"architecture": "shaw", "max_relative_positions": 18},
            {},
            "max_relative_positions 18 is above memory_length 11.*give memory_length 18",
        ),
        ({"clamp_length": 29}, {}, "clamp_length 29 is above memory_length 11.*give memory_length 29 or more"),
    ],
)
def test_models_without_such_a_graph_are_refused(settings, arguments, message: str) -> None:
    with pytest.raises(UserError, match=message):
        export(make_run(**settings), **arguments)


@pytest.mark.parametrize(
    ("package", "call"),
    [("onnx", lambda run, path: export_onnx(run, path)), ("torchao", lambda run, path: to_int8(run))],
)
def test_a_missing_package_is_named(package: str, call, tmp_path: Path, monkeypatch) -> None:
    find = util.find_spec
    for module in ("integrations.export", "inference.int8"):
        monkeypatch.setattr(f"transformer_xl.{module}.find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(UserError, match=rf"{package} is not installed; .*pip install '.+\[{package}\]'"):
        call(make_run(), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("default")  # of torchao
@pytest.mark.parametrize("num_threads", [1, 2])
def test_int8(num_threads: int) -> None:
    """Losses change by little, the given run not at all, and text is generated."""
    run = make_run(n_heads=4, d_head=8, d_model=32, d_ff=64)
    weights = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    quantized = to_int8(run)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in run.model.state_dict().items())
    text = "Some text to score, longer than a segment."
    (expected,), (result,) = score(run, text), score(quantized, text)
    assert 0 < np.abs(result.nats_K - expected.nats_K).max() < 0.02
    torch.set_num_threads(num_threads)
    try:
        texts = [generate(each, text, max_new_tokens=5, greedy=True).text for each in (quantized, quantized)]
    finally:
        torch.set_num_threads(1)
    assert texts[0] == texts[1] != ""


@pytest.mark.filterwarnings("default")  # of torchao
@pytest.mark.parametrize("settings", list(MODELS.values()))
def test_int8_weights_are_saved_and_opened(settings: dict[str, Any], tmp_path: Path) -> None:
    """By save and by convert, as the same bytes: the opened model has the same integers, scales and losses."""
    run, text = make_run(**settings), "Some text to score, longer than a segment."
    save(run, tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "int8", to="int8")
    quantized = to_int8(load(tmp_path / "plain"))
    save(quantized, tmp_path / "saved")
    assert txl("info", tmp_path / "int8", "--verify").status == 0
    file = Path("model.safetensors")
    assert (tmp_path / "int8" / file).read_bytes() == (tmp_path / "saved" / file).read_bytes()
    opened = load(tmp_path / "int8")
    assert_same_tensors(int8_tensors(opened.model), int8_tensors(quantized.model))
    (expected,), (result,) = score(quantized, text), score(opened, text)
    np.testing.assert_array_equal(result.nats_K, expected.nats_K)
    assert generate(opened, text, max_new_tokens=5).text == generate(quantized, text, max_new_tokens=5).text
    with pytest.raises(UserError, match=r"8-bit weights .* cannot be fine-tuned"):
        finetune(opened, tmp_path / "corpus", tmp_path / "tuned")
    with pytest.raises(UserError, match=r"8-bit weights .* cannot be converted"):
        convert(tmp_path / "int8", tmp_path / "hub", to="huggingface")
    tensors, _ = load_tensors(tmp_path / "int8" / file)
    name = next(name for name in tensors if name.endswith("_scale"))
    for damaged in ({name: tensors[name].T.contiguous()}, {name.removesuffix("_scale"): tensors[name].repeat(1, 5)}):
        save_tensors(tmp_path / "int8" / file, tensors | damaged, {"step": "0"})
        with pytest.raises(UserError, match=rf"does not fit the settings in config.yaml \(at {name[:9]}"):
            load(tmp_path / "int8")


@pytest.mark.filterwarnings("default")  # of torchao
def test_int8_weights_are_for_inference(tmp_path: Path) -> None:
    quantized = to_int8(make_run())
    model, _ = from_run(quantized)
    for call in (
        lambda: model.save_pretrained(tmp_path / "model"),
        lambda: export(quantized),
        lambda: to_int8(quantized),
        lambda: score(quantized, "text", method="dynamic"),
    ):
        with pytest.raises(UserError, match=r"8-bit weights \(Int8Tensor\) .* cannot be .*; take the run"):
            call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("default")  # of the packages
def test_int8_of_an_lstm_is_refused() -> None:
    with pytest.raises(UserError, match="the weights of an lstm stay in float32"):
        to_int8(make_run(architecture="lstm"))


def test_examples_of_the_documentation_run(tmp_path: Path, monkeypatch) -> None:
    page = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    save(make_run(), tmp_path / "runs" / "mine")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    for index, block in enumerate(blocks):
        (tmp_path / f"block_{index}.py").write_text(block)
        runpy.run_path(str(tmp_path / f"block_{index}.py"))
