"""All layers for few new tokens by one native operator give the results of the modules.

A model prepared with the native operators is compared with one of the same weights whose attention kernel is `cpu`,
which never takes the operator; a counter shows which segments took it.

Shape suffixes: B batch size, T tokens.
"""

from __future__ import annotations

import math
import threading
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from native_operators import needs_native
from torch import nn

from transformer_xl.config import LoraConfig, TransformerXLConfig
from transformer_xl.inference import InferenceModel, prepare_inference
from transformer_xl.inference.decode import DecodeTables
from transformer_xl.integrations.int8 import with_int8_weights
from transformer_xl.model.lora import add_lora
from transformer_xl.model.memory import ContextLimits, Memory
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.ops.native import status

pytestmark = needs_native

LIMITS = ContextLimits(9)
INT8_TOLERANCE = 1e-3
MODELS: dict[str, dict[str, Any]] = {
    "post-norm": {},
    "pre-norm": {"norm_first": True},
    "qk_norm": {"qk_norm": True},
    "pre-norm, qk_norm": {"norm_first": True, "qk_norm": True},
    "biases of each layer": {"tie_attention_biases": False},
    "tied key projections": {"tie_key_projections": True},
    "sizes that fill no block": {"d_model": 22, "n_heads": 3, "d_head": 7, "d_ff": 37},
    "wide": {"d_model": 72, "n_heads": 2, "d_head": 33, "d_ff": 130},
    "adaptive softmax": {"cutoffs": (6, 12), "div_val": 2},
    "value embeddings, pre-norm, qk_norm": {"value_embeddings": True, "norm_first": True, "qk_norm": True},
    "key offset, sinks": {"key_offset": True, "attention_sinks": True},
    "key offset, sinks, pre-norm, qk_norm, odd heads": {
        "key_offset": True,
        "attention_sinks": True,
        "norm_first": True,
        "qk_norm": True,
        "d_head": 5,
    },
}


def make_pair(dtype: torch.dtype = torch.float64, **settings: Any) -> tuple[TransformerXL, TransformerXL]:
    """Return a model that uses the native operators and one of the same random weights that uses none."""
    torch.manual_seed(5)
    sizes: dict[str, Any] = {"vocab_size": 20, "n_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 40, "dropout": 0.1}
    model = TransformerXL(TransformerXLConfig(**{**sizes, **settings})).to(dtype).eval()
    for parameter in model.parameters():  # biases too, and norms that are not 1
        nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.3)
    return set_kernels(model, deepcopy(model))


def make_int8_models(
    pair: tuple[TransformerXL, TransformerXL] | None = None, **settings: Any
) -> tuple[TransformerXL, TransformerXL, TransformerXL]:
    """Return a pair with matrices of 8 bits, and a model in float64 with the weights that their integers stand for."""
    pair = pair or make_pair(torch.float32, **settings)
    native, other = map(with_int8_weights, pair)
    exact = deepcopy(pair[1]).double()
    weights = {name: one.dequantize() if hasattr(one, "qdata") else one for name, one in other.named_parameters()}
    exact.load_state_dict(weights, strict=False)
    return *set_kernels(native, other), exact


def set_kernels(native: TransformerXL, other: TransformerXL) -> tuple[TransformerXL, TransformerXL]:
    native.attn_implementation, other.attn_implementation = "native", "cpu"
    return native, other


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch size of each segment that the operator computed."""
    sizes: list[int] = []
    decode = DecodeTables.decode

    def counted(self: DecodeTables, x_BTD: torch.Tensor, *rest: Any) -> Any:
        sizes.append(len(x_BTD))
        return decode(self, x_BTD, *rest)

    monkeypatch.setattr(DecodeTables, "decode", counted)
    return sizes


def run(model: InferenceModel, tokens_BT: torch.Tensor, memory: Memory, size: int = 1) -> tuple[torch.Tensor, Memory]:
    """Return the hidden states of tokens that are read `size` at a time, and the memory after them."""
    states = []
    with torch.inference_mode():
        for segment_BT in tokens_BT.split(size, dim=1):
            hidden_BTD, memory = model(segment_BT, memory)
            states.append(hidden_BTD)
    return torch.cat(states, dim=1), memory


def read(
    model: TransformerXL,
    tokens_BT: torch.Tensor,
    limits: ContextLimits = LIMITS,
    dtype: str = "float32",
    size: int = 1,
) -> tuple[torch.Tensor, Memory]:
    """Prepare a model, and return what `run` returns for it, from an empty memory."""
    prepared = prepare_inference(model, dtype)
    return run(prepared, tokens_BT, prepared.initial_memory(len(tokens_BT), limits), size)


def random_tokens(batch_size: int, length: int) -> torch.Tensor:
    return torch.randint(20, (batch_size, length), generator=torch.Generator().manual_seed(3))


def assert_equal(
    models: tuple[TransformerXL, TransformerXL],
    tokens_BT: torch.Tensor,
    limits: ContextLimits = LIMITS,
    atol: float = 1e-10,
    size: int = 1,
) -> None:
    """Hidden states and caches of both are the same while the memory fills, and when it is full."""
    results = [read(model, tokens_BT, limits, size=size) for model in models]
    (actual, memory), (expected, other) = results
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)
    for name, tensor in memory.tensors().items():
        torch.testing.assert_close(tensor, other.tensors()[name], rtol=0, atol=atol)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("batch_size", "size"), [(1, 1), (3, 1), (17, 1), (1, 3), (5, 7), (2, 16), (1, 35)])
def test_results_are_those_of_modules(name, batch_size, size, calls):
    """Long enough that the storage of a cache is copied, which happens after 64 tokens."""
    assert_equal(make_pair(**MODELS[name]), random_tokens(batch_size, 70), size=size)
    assert calls == [batch_size] * math.ceil(70 / size)


@pytest.mark.parametrize(
    "limits",
    [
        ContextLimits(9, clamp_length=4),
        ContextLimits(9, attention_window=5),
        ContextLimits(9, attention_window=7, clamp_length=3),
        ContextLimits(0),
        ContextLimits(1),
        ContextLimits(700),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [1, 4, 14])
def test_limits_of_context(limits, size, calls):
    assert_equal(make_pair(), random_tokens(2, 14), limits, size=size)
    assert len(calls) == math.ceil(14 / size)


def test_empty_slots_that_are_attended(calls):
    assert_equal(make_pair(attend_empty_memory=True), random_tokens(2, 6))
    assert len(calls) == 6


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("num_rows", [2, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_low_precision_is_as_near_to_float64_as_modules(dtype, num_rows, norm_first, calls):
    """bfloat16 is that of matrices under autocast; all else is float32."""
    native, other = make_pair(torch.float32, d_model=128, norm_first=norm_first, qk_norm=True)
    tokens_BT, exact = random_tokens(num_rows, 12), deepcopy(other).double()
    expected, _ = read(exact, tokens_BT)
    errors = []
    for model in (native, other):
        actual, _ = read(model, tokens_BT, dtype=str(dtype).removeprefix("torch."))
        errors.append((actual.double() - expected).square().mean().sqrt())
    assert len(calls) == 12
    assert errors[0] < 1.1 * errors[1]


def test_gates_of_value_embeddings_are_rounded_as_modules_round_them(calls):
    """Numbers of bfloat16 make this gate 1 everywhere, those of float32 up to 2."""
    pair = make_pair(torch.float32, value_embeddings=True, n_layers=1)
    for model in pair:
        gate, embeddings = model.layers[0].attention.value_embedding.gate, model.embedding.tables[0]
        nn.init.zeros_(gate)
        gate.data[:, 0], gate.data[:, 1], embeddings.data[:, 1] = 128.5, -128.0, embeddings.data[:, 0]
    actual, expected = (read(model, random_tokens(2, 12), dtype="bfloat16")[0] for model in pair)
    assert len(calls) == 12
    torch.testing.assert_close(actual, expected, rtol=0, atol=0.05)


@pytest.mark.parametrize("batch_size", [1, 3, 20])
@pytest.mark.parametrize("name", ["post-norm", "pre-norm, qk_norm", "sizes that fill no block"])
def test_int8_weights(name, batch_size, calls):
    """Results are those of the weights that the integers stand for, but that inputs of products have 16 bits."""
    native, _, exact = make_int8_models(**MODELS[name])
    (expected, memory), (actual, other) = [read(model, random_tokens(batch_size, 12)) for model in (exact, native)]
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=INT8_TOLERANCE)
    for key, tensor in memory.tensors().items():
        torch.testing.assert_close(other.tensors()[key].to(tensor.dtype), tensor, rtol=0, atol=INT8_TOLERANCE)
    assert calls == [batch_size] * 12


def test_int8_weights_with_keys_in_bfloat16_are_as_near_to_float64_as_modules(calls):
    native, other, exact = make_int8_models(d_model=128, d_ff=520)
    tokens_BT = random_tokens(2, 12)
    expected, _ = read(exact, tokens_BT)
    errors = []
    for model in (native, other):
        actual, memory = read(model, tokens_BT, dtype="bfloat16")
        assert {one.dtype for one in memory.tensors().values() if one.is_floating_point()} == {torch.bfloat16}
        errors.append((actual.double() - expected).square().mean().sqrt())
    assert len(calls) == 12
    assert errors[0] < 1.1 * errors[1]


def test_largest_sums_of_int8_weights(calls):
    """Sums of products of integers are integers of 32 bits, and these are the largest that there can be."""
    pair = make_pair(torch.float32, d_ff=1100)
    for model in pair:
        for layer in model.layers:
            nn.init.zeros_(layer.feed_forward.up_proj.weight)
            nn.init.ones_(layer.feed_forward.up_proj.bias)
            nn.init.constant_(layer.feed_forward.down_proj.weight, -0.01)
    native, _, exact = make_int8_models(pair)
    (expected, _), (actual, _) = [read(model, random_tokens(1, 3)) for model in (exact, native)]
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=INT8_TOLERANCE)
    assert len(calls) == 3


def test_inputs_of_int8_weights_that_are_not_finite(calls):
    native, _, _ = make_int8_models()
    for value in (float("nan"), float("inf")):
        nn.init.constant_(native.layers[0].feed_forward.up_proj.bias, value)
        states, _ = read(native, random_tokens(1, 1))
        assert states.isnan().all()
    assert len(calls) == 2


def test_other_int8_weights_are_computed_by_their_modules(calls):
    """Here integers with a zero point."""
    native, other, _ = make_int8_models()
    for model in (native, other):
        model.layers[1].feed_forward.up_proj.weight.zero_point.add_(1)
    assert_equal((native, other), random_tokens(1, 2), atol=1e-4)
    assert not calls


def test_reset_rows_are_filled_differently(calls):
    native, other = make_pair()
    results = []
    for model in map(prepare_inference, (native, other)):
        _, memory = run(model, random_tokens(3, 6), model.initial_memory(3, LIMITS))
        results.append(run(model, random_tokens(3, 5), memory.reset([1]), 2)[0])
    torch.testing.assert_close(*results, rtol=0, atol=1e-10)
    assert len(calls) == 9


def test_branches_of_a_memory_do_not_change_each_other(calls):
    """A memory stays what it was, although two others continue it and the first has written after its end."""
    native, other = map(prepare_inference, make_pair())
    _, memory = run(native, random_tokens(1, 6), native.initial_memory(1, LIMITS))
    _, reference = run(other, random_tokens(1, 6), other.initial_memory(1, LIMITS))
    before = {name: tensor.clone() for name, tensor in memory.tensors().items()}
    branches = [torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 6]])]
    memories = [run(native, tokens_BT[:, :1], memory)[1] for tokens_BT in branches]
    for tokens_BT, branch in zip(branches, memories, strict=True):
        expected, _ = run(other, tokens_BT, reference)
        actual, _ = run(native, tokens_BT[:, 1:], branch)
        torch.testing.assert_close(actual, expected[:, 1:], rtol=0, atol=1e-10)
    for name, tensor in memory.tensors().items():
        assert torch.equal(tensor, before[name])
    assert len(calls) == 12


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_row_depends_neither_on_other_rows_nor_on_threads(weights, calls):
    make = make_int8_models if weights == "int8" else partial(make_pair, torch.float32)
    native = make(d_model=192, n_heads=3, d_ff=300)[0]
    tokens_BT, threads = random_tokens(8, 12), torch.get_num_threads()
    expected, _ = read(native, tokens_BT)
    for rows in (slice(1), slice(7, 8), slice(3)):
        fewer, _ = read(native, tokens_BT[rows])
        assert torch.equal(fewer, expected[rows])
    try:
        torch.set_num_threads(3)
        several, _ = read(native, tokens_BT)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(several, expected)
    assert len(calls) == 12 * 5


def test_threads_wait_for_each_other(calls):
    native, _ = make_pair(torch.float32, d_model=192, n_heads=3, d_ff=300)
    tokens_BT, threads = random_tokens(64, 60), torch.get_num_threads()
    results = []
    try:
        for number in (1, 4):
            torch.set_num_threads(number)
            results.append(read(native, tokens_BT)[0])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)
    assert len(calls) == 60 * 2


@pytest.mark.skipif(
    "bfloat16 products" not in status().text or "in float32" in status().text, reason="oneDNN multiplies no bfloat16"
)
def test_failed_task_ends_the_step_in_all_threads(calls):
    """oneDNN, switched off, refuses to multiply; a thread that waited for that product for ever would block Python."""
    # sizes of which one thread gets all of the first product
    model, _ = make_pair(torch.float32, d_model=32, n_heads=1, d_head=16, d_ff=4096)
    prepared, threads = prepare_inference(model, "bfloat16"), torch.get_num_threads()
    raised: list[BaseException] = []

    def step() -> None:
        torch.set_num_threads(2)
        try:
            run(prepared, random_tokens(16, 1), prepared.initial_memory(16, LIMITS))
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=step, daemon=True)
    try:
        torch._C._set_mkldnn_enabled(False)  # `torch.backends.mkldnn.flags` warns of TF32
        thread.start()
        thread.join(timeout=60)
    finally:
        torch._C._set_mkldnn_enabled(True)
        torch.set_num_threads(threads)
    assert len(raised) == 1
    assert calls == [16]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_row_of_many_does_not_depend_on_their_number(dtype, calls):
    native, _ = make_pair(torch.float32, d_model=192, n_heads=3, d_ff=300)
    tokens_BT = random_tokens(70, 5)
    expected, _ = read(native, tokens_BT, dtype=dtype)
    for rows in (slice(16), slice(30, 70)):
        fewer, _ = read(native, tokens_BT[rows], dtype=dtype)
        assert torch.equal(fewer, expected[rows])
    assert len(calls) == 5 * 3


def add_hook(model: TransformerXL) -> None:
    model.layers[0].attention.k_proj.register_forward_hook(lambda _m, _i, out: out * 2)


def add_layer_pre_hook(model: TransformerXL) -> None:
    model.layers[0].feed_forward.register_forward_pre_hook(lambda _m, inputs: (inputs[0] * 2,))


def replace_forward(model: TransformerXL) -> None:
    norm = model.layers[0].feed_forward.norm
    norm.forward = lambda x: x * 2


def replace_module(model: TransformerXL) -> None:
    model.layers[0].attention.v_proj = nn.Identity()


def parametrize(model: TransformerXL) -> None:
    nn.utils.parametrizations.weight_norm(model.layers[0].attention.o_proj)


@pytest.mark.parametrize("alter", [add_hook, add_layer_pre_hook, replace_forward, replace_module, parametrize])
def test_altered_layers_are_computed_by_their_modules(alter, calls):
    models = make_pair()
    for model in models:
        alter(model)
    assert_equal(models, random_tokens(1, 5))
    assert not calls


def test_layers_of_two_dtypes_are_left_to_the_modules(calls):
    native, _ = make_pair(torch.float32)
    read(native.double(), random_tokens(1, 3))
    assert len(calls) == 3
    native.final_norm = nn.LayerNorm(16)
    native.layers[1].attention.norm.float()
    with pytest.raises(RuntimeError, match="dtype"):  # as the modules say
        read(native, random_tokens(1, 1))


def test_inputs_of_another_dtype_are_left_to_the_modules(calls):
    """Under autocast, a narrow embedding is projected to bfloat16."""
    native, other = make_pair(torch.float32, d_embed=6)
    (actual, _), (expected, _) = [read(model, random_tokens(1, 3), dtype="bfloat16") for model in (native, other)]
    assert (actual - expected).square().mean().sqrt() < 0.05
    assert not calls


def test_lora_is_computed_by_its_modules(calls):
    pytest.importorskip("peft")
    models = make_pair()
    for model in models:
        torch.manual_seed(2)
        add_lora(model, LoraConfig(rank=2, alpha=2.0, targets=["q_proj"]))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter)
    assert_equal(models, random_tokens(1, 4))
    assert not calls


def test_other_calls_take_the_modules(calls):
    """Many tokens of a row, of all rows, padding, and hidden memory."""
    native = prepare_inference(make_pair(torch.float32)[0])
    memory = native.initial_memory(1, LIMITS)
    native(random_tokens(15, 17), native.initial_memory(15, ContextLimits(20)))
    native(random_tokens(129, 2), native.initial_memory(129, LIMITS))
    native(random_tokens(1, 1), memory, lengths=torch.tensor([1]))
    native(random_tokens(1, 1), memory, visible=torch.tensor([[4]]))
    native.model.owner = None
    native(random_tokens(1, 1), native.model.initial_memory(1, LIMITS))
    assert not calls


def test_a_model_with_attention_of_its_own_does_not_use_the_operator(calls) -> None:
    class Own(TransformerXL):
        def attention_context(self, *arguments: Any, **settings: Any) -> Any:
            return super().attention_context(*arguments, **settings)

    model, _ = make_pair()
    model.__class__ = Own
    read(model, random_tokens(1, 3))
    assert calls == []
