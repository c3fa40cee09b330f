"""Compiled training against plain training, and machines that cannot compile."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from training_runs import CPU, letters, make_corpus, start
from typing_extensions import override

from transformer_xl.config import UserError
from transformer_xl.training.callbacks import Callback, Metrics
from transformer_xl.training.compiling import compile_layers
from transformer_xl.training.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("default")  # torch's compiler hides warnings of its own, not if they are errors


def test_compiled_training_is_plain_training(tmp_path: Path) -> None:
    """Forward, backward, memory and validation; each state of the layers is compiled once and never again."""
    corpus = make_corpus(tmp_path / "corpus", letters(127, seed=1), letters(42, seed=2))
    settings = {"max_steps": 9, "eval_interval": 3, "segment_length": 7, "memory_length": 7}
    plain = start(tmp_path / "plain", corpus, **settings)
    plain.run()
    compiled = start(tmp_path / "compiled", corpus, compile="layers", **settings)
    assert list(compiled.model.state_dict()) == list(plain.model.state_dict())
    graphs: list[int] = [counters["stats"]["unique_graphs"]]

    class CountGraphs(Callback):
        @override
        def on_metrics(self, trainer: Trainer, metrics: Metrics) -> None:
            graphs.append(counters["stats"]["unique_graphs"])

    compiled.callbacks.append(CountGraphs())
    compiled.run()
    found, wanted = compiled.folder.metrics(), plain.folder.metrics()
    assert [line["split"] for line in found] == [line["split"] for line in wanted]
    for name, closeness in (("nats_per_token", 1e-5), ("grad_norm", 1e-4)):
        pairs = [(one[name], other[name]) for one, other in zip(found, wanted, strict=True) if name in one]
        assert len(pairs) == (12 if name == "nats_per_token" else 9)
        assert all(one == pytest.approx(other, rel=closeness) for one, other in pairs)
    # before the first step, after it, and in the end: by the first validation each kind of pass was compiled
    assert graphs[0] < graphs[1] < graphs[-1]
    assert len(set(graphs[-8:])) == 1
    assert counters["graph_break"] == {}


def test_a_copy_of_a_compiled_model_has_weights_of_its_own(make_model) -> None:
    model, tokens = make_model(), torch.arange(10).view(2, 5)
    plain = copy.deepcopy(model)
    compile_layers(model, CPU, "layers")
    with torch.no_grad():
        wanted = model(tokens)[0]
        twin = copy.deepcopy(model)
        assert torch.equal(twin(tokens)[0], wanted)
        for one, other in zip(twin.layers.parameters(), plain.layers.parameters(), strict=True):
            one.mul_(2)
            other.mul_(2)
        torch.testing.assert_close(twin(tokens)[0], plain(tokens)[0])
        assert torch.equal(model(tokens)[0], wanted)
    assert all(layer.forward.layer is layer for layer in twin.layers)


def test_graphs_need_cuda(make_model) -> None:
    with pytest.raises(UserError, match=r"needs CUDA.*cpu; set --train.compile to layers"):
        compile_layers(make_model(), CPU, "cudagraphs")


def test_a_machine_without_a_compiler_is_told(make_model, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise FileNotFoundError("no such file: g++\nand much more")

    torch.compiler.reset()  # or what an earlier test compiled would do
    monkeypatch.setattr(torch._inductor.cpp_builder, "get_cpp_compiler", refuse)
    with torch._inductor.utils.fresh_cache(), pytest.raises(UserError) as told:
        compile_layers(make_model(), CPU, "layers")
    assert "\n" not in str(told.value)
    assert re.search(r"no such file: g\+\+.*install a C\+\+ compiler.*--train.compile none", str(told.value))
