"""Compiled training gives the same losses as eager training; a missing compiler is reported."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from tensors import assert_same_tensors
from torch._dynamo.utils import counters
from training_runs import CPU, letters_corpus, start
from typing_extensions import override

from transformer_xl.config import UserError
from transformer_xl.model.memory import ContextLimits
from transformer_xl.training.callbacks import Callback, Metrics
from transformer_xl.training.compiling import compile_layers
from transformer_xl.training.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("default")  # torch's compiler ignores its own warnings, unless they are errors


def test_compiled_layers_share_a_mask_between_tokens(make_model, tokens) -> None:
    """With dropout of one mask for all tokens and an extended context, compiled layers give finite gradients; without
    dropout, those of eager layers."""
    regularised = {"learned_attention_biases": False, "tie_key_projections": True, "activation_penalty": 0.2}
    dropout = {"dropout": 0.2, "qkv_dropout": 0.5, "variational_dropout": True}
    for settings in ({}, dropout):
        results = []
        for mode in ("none", "layers"):
            model = make_model(**regularised, **settings).train()
            compile_layers(model, CPU, mode)
            memory = model.initial_memory(3, ContextLimits(0))
            nats_BT, penalties_BT, _ = model.training_losses(tokens(3, 9), tokens(3, 5), memory, progress=0.0)
            (nats_BT + penalties_BT).mean().backward()
            results.append({name: weight.grad for name, weight in model.named_parameters()})
        if settings:
            assert all(grad.isfinite().all() for grad in results[1].values())
        else:
            assert_same_tensors(*results, rtol=1e-9, atol=1e-9)


def test_compiled_training_equals_eager_training(tmp_path: Path) -> None:
    """Forward, backward, memory and validation; each combination of shapes and mode is compiled once.

    torch._dynamo counts the graphs that it has compiled in `unique_graphs`, and the places where it could not compile
    in `graph_break`.
    """
    corpus = letters_corpus(tmp_path / "corpus", num_train=127, num_valid=42)
    settings = {"max_steps": 9, "eval_interval": 3, "segment_length": 7, "memory_length": 7}
    eager = start(tmp_path / "eager", corpus, **settings)
    eager.run()
    compiled = start(tmp_path / "compiled", corpus, compile="layers", **settings)
    assert list(compiled.model.state_dict()) == list(eager.model.state_dict())
    graphs: list[int] = [counters["stats"]["unique_graphs"]]

    class CountGraphs(Callback):
        @override
        def on_metrics(self, trainer: Trainer, metrics: Metrics) -> None:
            graphs.append(counters["stats"]["unique_graphs"])

    compiled.callbacks.append(CountGraphs())
    compiled.run()
    actual, expected = compiled.folder.metrics(), eager.folder.metrics()
    assert [line["split"] for line in actual] == [line["split"] for line in expected]
    for name, tolerance in (("nats_per_token", 1e-5), ("grad_norm", 1e-4)):
        pairs = [(one[name], other[name]) for one, other in zip(actual, expected, strict=True) if name in one]
        assert len(pairs) == (12 if name == "nats_per_token" else 9)  # 9 steps, and for the loss 3 validations
        assert all(one == pytest.approx(other, rel=tolerance) for one, other in pairs)
    # Graphs are counted after each line of metrics. The first validation, at step 3, compiles the last new graph, so
    # the last 8 counts are equal.
    assert graphs[0] < graphs[1] < graphs[-1]
    assert len(set(graphs[-8:])) == 1
    assert counters["graph_break"] == {}


def test_copy_of_a_compiled_model_uses_its_own_weights(make_model) -> None:
    model, tokens = make_model(), torch.arange(10).view(2, 5)
    eager = copy.deepcopy(model)
    compile_layers(model, CPU, "layers")
    with torch.no_grad():
        expected = model(tokens)[0]
        copied = copy.deepcopy(model)
        assert torch.equal(copied(tokens)[0], expected)
        for one, other in zip(copied.layers.parameters(), eager.layers.parameters(), strict=True):
            one.mul_(2)
            other.mul_(2)
        torch.testing.assert_close(copied(tokens)[0], eager(tokens)[0])
        assert torch.equal(model(tokens)[0], expected)
    assert all(layer.forward.layer is layer for layer in copied.layers)


def test_cuda_graphs_need_cuda(make_model) -> None:
    with pytest.raises(UserError, match=r"needs CUDA.*cpu; set train.compile=layers"):
        compile_layers(make_model(), CPU, "cudagraphs")


def test_missing_compiler_is_reported(make_model, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise FileNotFoundError("no such file: g++\nand much more")

    torch.compiler.reset()  # discards the code that earlier tests compiled
    monkeypatch.setattr(torch._inductor.cpp_builder, "get_cpp_compiler", refuse)
    with torch._inductor.utils.fresh_cache(), pytest.raises(UserError) as raised:
        compile_layers(make_model(), CPU, "layers")
    assert "\n" not in str(raised.value)
    assert re.search(r"no such file: g\+\+.*install a C\+\+ compiler.*train.compile=none", str(raised.value))
