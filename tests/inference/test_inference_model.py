"""A prepared model computes what the model computes, shares its weights, and alone continues its KV caches.

Shape suffixes: B batch size, T tokens, D model width.
"""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from tensors import assert_same_tensors, copied_tensors, run_parts
from torch import Tensor

from transformer_xl import Backbone, BackboneConfig, TransformerXLConfig, UserError, generate, score, stream
from transformer_xl.config import LoraConfig, RunConfig
from transformer_xl.inference import InferenceModel, prepare_inference
from transformer_xl.model.lora import add_lora, merge_lora
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.ops.linear import PackedLinear, packed_weights, packs
from transformer_xl.run import Run
from transformer_xl.text.tokenizers import ByteTokenizer

REFUSED = "keys and values of another model, or of other weights"


def wide_model() -> TransformerXL:
    """A model whose matrices are large enough to be packed."""
    torch.manual_seed(3)
    config = TransformerXLConfig(vocab_size=23, n_layers=2, d_model=512, n_heads=4, d_ff=520, dropout=0.1)
    return TransformerXL(config, memory_length=11)


def read(model: InferenceModel, text_BT: Tensor) -> Tensor:
    return run_parts(model, model.initial_memory(len(text_BT)), *text_BT.split(3, dim=1))[0]


def packed_layers(model: torch.nn.Module) -> list[PackedLinear]:
    return [module for module in model.modules() if isinstance(module, PackedLinear) and module.packed is not None]


def test_results_are_those_of_the_model_which_stays_as_it_is(tokens):
    model = wide_model().train()
    before, text_BT = copied_tensors(model), tokens(2, 20)
    prepared = prepare_inference(model)
    assert bool(packed_layers(prepared.model)) == packs(torch.float32)
    assert model.training
    assert not packed_layers(model)
    expected_BTD, _ = run_parts(model.eval(), model.initial_memory(2), *text_BT.split(3, dim=1))
    torch.testing.assert_close(read(prepared, text_BT), expected_BTD, rtol=0, atol=1e-4)
    assert_same_tensors(model, before)
    own, shared = dict(prepared.model.named_parameters()), dict(model.named_parameters())
    assert all(own[name].data_ptr() == weight.data_ptr() for name, weight in shared.items())  # no second copy
    for method in (model.logits, model.nats, model.topk):
        arguments = (expected_BTD, *{"nats": [text_BT], "topk": [2]}.get(method.__name__, []))
        actual, expected = getattr(prepared, method.__name__)(*arguments), method(*arguments)
        torch.testing.assert_close(actual, expected, rtol=2e-6, atol=1e-5)  # sums in another order


@pytest.mark.parametrize("make", [wide_model, None], ids=["packed", "small"])
def test_bfloat16_is_that_of_autocast_bit_for_bit(make_model, tokens, make):
    model, text_BT = make() if make else make_model().float(), tokens(2, 14)
    low, plain = prepare_inference(model, "bfloat16"), prepare_inference(model)
    assert low.model.layers[0].attention.k_proj.weight.dtype == torch.bfloat16
    for layer in packed_layers(plain.model):
        layer.packed = None
        layer.pack(torch.bfloat16)
    plain.dtype = "bfloat16"  # float32 weights, which autocast converts each time
    hidden_BTD = read(low, text_BT)
    assert torch.equal(hidden_BTD, read(plain, text_BT))
    assert torch.equal(low.nats(hidden_BTD, text_BT), plain.nats(hidden_BTD, text_BT))


@pytest.mark.parametrize("weights", [torch.float64, torch.float16, torch.bfloat16])
def test_auto_keeps_weights_that_bfloat16_is_not_for(make_model, monkeypatch, weights):
    monkeypatch.setattr("transformer_xl.device.has_bfloat16", lambda _: True)
    run = Run(make_model(vocab_size=256).to(weights), ByteTokenizer(), RunConfig())
    settings = {"max_new_tokens": 5, "greedy": True}
    is_low = weights == torch.bfloat16
    assert run.inference("auto").dtype == ("bfloat16" if is_low else "float32")
    expected = "bfloat16" if is_low else "float32"
    assert generate(run, "hello", dtype="auto", **settings) == generate(run, "hello", dtype=expected, **settings)
    (actual,), (same,) = score(run, "hello", dtype="auto"), score(run, "hello", dtype=expected)
    assert actual.nats_K.tolist() == same.nats_K.tolist()
    if not is_low:
        for call in (generate, score):
            with pytest.raises(UserError, match=rf"bfloat16 is not for weights of {weights}; give auto"):
                call(run, "hello", dtype="bfloat16")


def test_two_dtypes_side_by_side_do_not_take_each_others_memory(make_model, tokens):
    model, text_BT = make_model().float(), tokens(2, 8)
    single, low = prepare_inference(model), prepare_inference(model, "bfloat16")
    alone = [read(one, text_BT) for one in (single, low)]
    for _ in range(2):
        assert all(map(torch.equal, alone, [read(one, text_BT) for one in (single, low)]))
    _, memory = single(text_BT)
    for other in (low, model, prepare_inference(model)):
        with pytest.raises(UserError, match=REFUSED):
            other(text_BT, memory)
    continued, _ = single(text_BT, memory)
    assert torch.equal(single(text_BT, copy.deepcopy(memory))[0], continued)  # as users keep a prefix


def test_hidden_memory_outlives_a_change_of_weights_and_a_new_preparation_has_them(make_model, tokens):
    """As in training, where keys are computed in each step."""
    model, text_BT = make_model(), tokens(2, 8)
    _, hidden_memory = model(text_BT, model.initial_memory(2))
    before_BTD = read(prepare_inference(model), text_BT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model.nats(model(text_BT)[0], text_BT).mean().backward()
    optimizer.step()
    model(text_BT, hidden_memory)
    expected_BTD, _ = run_parts(model, model.initial_memory(2), *text_BT.split(3, dim=1))
    assert not torch.allclose(before_BTD, expected_BTD, atol=1e-3)
    torch.testing.assert_close(read(prepare_inference(model), text_BT), expected_BTD, rtol=0, atol=1e-10)


def test_adapters_are_computed_as_they_were_when_the_model_was_prepared(make_model, tokens):
    pytest.importorskip("peft")
    model, text_BT = make_model(), tokens(2, 8)
    plain_BTD = read(prepare_inference(model), text_BT)
    add_lora(model, LoraConfig(rank=3, alpha=5, targets=("k_proj", "r_proj", "up_proj")))
    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    for layer in layers:
        torch.nn.init.normal_(layer.lora_B["default"].weight)
    model.eval()
    adapted = prepare_inference(model)
    adapted_BTD = read(adapted, text_BT)
    assert not torch.allclose(plain_BTD, adapted_BTD, atol=1e-3)
    for layer in layers:
        layer.enable_adapters(False)
    torch.testing.assert_close(read(prepare_inference(model), text_BT), plain_BTD, rtol=0, atol=1e-10)
    torch.testing.assert_close(read(adapted, text_BT), adapted_BTD, rtol=0, atol=0)
    for layer in layers:
        layer.enable_adapters(True)
    merge_lora(model)
    torch.testing.assert_close(read(prepare_inference(model), text_BT), adapted_BTD, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "settings", [{"n_layers": 2}, {"gating": "none", "residual_relu": False, "d_input": 5}], ids=str
)
def test_backbone_acts_step_by_step_with_keys_and_values(settings):
    torch.manual_seed(4)
    backbone = Backbone(BackboneConfig(**{"d_model": 14, "n_heads": 2, "d_ff": 19, **settings}), memory_length=11)
    inputs_BTD = torch.randn(3, 17, settings.get("d_input", 14))
    starts_BT = torch.rand(3, 17) < 0.2
    expected, actual, prepared = [], [], prepare_inference(backbone)
    hidden_memory, memory = backbone.initial_memory(3), prepared.initial_memory(3)
    for step in range(17):
        out_B1D, hidden_memory = backbone(
            inputs_BTD[:, step : step + 1], hidden_memory, starts=starts_BT[:, step, None]
        )
        expected.append(out_B1D.detach())
        starts = {"starts": starts_BT[:, step, None]} if starts_BT[:, step].any() else {}
        out_B1D, memory = prepared(inputs_BTD[:, step : step + 1], memory, **starts)
        actual.append(out_B1D)
    torch.testing.assert_close(torch.cat(actual, 1), torch.cat(expected, 1), rtol=0, atol=1e-5)


@pytest.mark.skipif(not packs(torch.float32), reason="oneDNN packs no weights here")
def test_weights_are_packed_within_a_context_and_dropped_after_it(tokens):
    model, text_BT = wide_model().eval(), tokens(2, 9)
    with torch.no_grad():
        expected_BTD, _ = model(text_BT)
        with packed_weights(model, torch.float32):
            assert packed_layers(model)
            torch.testing.assert_close(model(text_BT)[0], expected_BTD, rtol=0, atol=1e-4)
        assert not packed_layers(model)
        assert torch.equal(model(text_BT)[0], expected_BTD)


def test_threads_that_use_a_run_first_continue_their_memories(make_model, monkeypatch):
    both_are_here, both_began = threading.Barrier(2), threading.Barrier(2)

    def slow(*arguments):
        with suppress(threading.BrokenBarrierError):  # of one thread alone
            both_are_here.wait(timeout=0.3)
        return prepare_inference(*arguments)

    monkeypatch.setattr("transformer_xl.run.prepare_inference", slow)
    run = Run(make_model(vocab_size=256).float(), ByteTokenizer(), RunConfig())

    def continued(_: int) -> str:
        first = stream(run, "hello", max_new_tokens=3)
        list(first)
        both_began.wait(timeout=60)
        return "".join(stream(run, "world", max_new_tokens=3, memory=first.memory()))

    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(continued, range(2)))
    assert texts[0] == texts[1]


def test_a_run_prepares_again_after_changes_and_a_copy_of_it_has_no_prepared_models(make_model):
    run = Run(make_model().float(), ByteTokenizer(), RunConfig())
    single, low = run.inference(), run.inference("bfloat16")
    assert (run.inference(), run.inference("bfloat16")) == (single, low)
    calls: list[int] = []
    handle = run.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    run.inference()(torch.tensor([[1, 2, 3]]))
    assert calls == [1]  # the hook itself, in a model that was prepared again
    assert run.inference("bfloat16") is not low
    handle.remove()
    with torch.no_grad():
        run.model.layers[0].attention.norm.bias.add_(1)
    assert run.inference() is not single
    assert not copy.deepcopy(run)._prepared
    assert not pickle.loads(pickle.dumps(run))._prepared
