"""The Triton kernels give the oracle's numbers: on a GPU as compiled, elsewhere by Triton's interpreter in Python.

The interpreter has tiles of 16 and is slow, so lengths are just large enough for two or three tiles. On a GPU they are
four times as large, and numbers float32.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from reference import Case, attention

from transformer_xl.config import TransformerXLConfig, UserError
from transformer_xl.model.cost import step_cost
from transformer_xl.model.kernels import KERNELS, AttentionInputs, AttentionMask, choose
from transformer_xl.model.kernels.triton import attend, fits
from transformer_xl.model.transformer_xl import TransformerXL

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
EXACT, TIMES, NEAR = (torch.float32, 4, 2e-5) if ON_GPU else (torch.float64, 1, 1e-11)

pytest.importorskip("triton")
with pytest.MonkeyPatch.context() as patch:  # as conftest.py does: it is the import that counts, nothing stays behind
    if not ON_GPU:
        patch.setenv("TRITON_INTERPRET", "1")
    from transformer_xl.model.kernels import triton, triton_kernels

_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
FIELDS = tuple(AttentionInputs.__dataclass_fields__)

# T, M, valid slots of each row, window, heads
CASES = {
    "memory as long as the segment": (17, 17, [17, 17], None, 1),
    "no memory": (19, 0, [0, 0], None, 1),
    "one query": (1, 37, [37, 37], None, 2),
    "one query, no memory": (1, 0, [0, 0], None, 2),
    "memory longer than the segment": (5, 43, [43, 43], None, 1),
    "partly valid": (17, 23, [0, 19], None, 1),
    "window within the segment": (19, 5, [5, 5], 3, 1),
    "window across the memory": (17, 19, [19, 19], 18, 1),
    "window of one: only itself": (17, 7, [7, 7], 1, 1),
    "window and partly valid": (7, 23, [2, 23], 14, 2),
    "one tile": (5, 7, [4, 7], 9, 1),
}


@pytest.fixture(params=["atomic", "deterministic"])
def order(request):
    """Both ways to sum the gradients of position keys."""
    torch.use_deterministic_algorithms(request.param == "deterministic")
    yield request.param
    torch.use_deterministic_algorithms(False)


def draw(case, width=5, dtype=EXACT):
    """Inputs of a case, its mask, and a weight for each number of the output."""
    num_queries, num_memory, valid, window, heads = CASES[case]
    num_queries, num_memory = num_queries * TIMES, num_memory * TIMES
    num_keys = num_queries + num_memory
    num_distances = min(num_keys, (window or num_keys) * TIMES)
    rows = len(valid)
    shapes = [
        (rows, num_queries, heads, width), (rows, num_keys, heads, width), (rows, num_keys, heads, width),
        (num_distances, heads, width), (heads, width), (heads, width), (rows, num_queries, heads, width),
    ]  # fmt: skip
    generator = torch.Generator().manual_seed(11)
    *tensors, weight = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    inputs = AttentionInputs(*(tensor.to(DEVICE, dtype).requires_grad_() for tensor in tensors))
    return inputs, AttentionMask(torch.tensor(valid, device=DEVICE) * TIMES), weight.to(DEVICE, dtype)


def as_list(inputs):
    return [getattr(inputs, name) for name in FIELDS]


def numbers(attend, inputs, mask, weight):
    """Output and gradients."""
    out = attend(inputs, mask, 0.0)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), as_list(inputs), materialize_grads=True)]


def assert_same(found, wanted, within=NEAR):
    for field, one, other in zip(("output", *FIELDS), found, wanted, strict=True):
        torch.testing.assert_close(
            one, other, rtol=0, atol=within * max(1.0, other.abs().max().item()),
            msg=lambda text, field=field: f"{field}: {text}",
        )  # fmt: skip


def oracle(inputs, mask, _dropout):
    """The loops of tests/reference.py; too slow for the sizes of a GPU, where the reference kernel stands in."""
    if ON_GPU:
        return KERNELS["reference"].attend(inputs, mask, 0.0)
    return attention(*as_list(inputs), Case(mask.valid_B.tolist(), len(inputs.position_key_PNH)))


@pytest.mark.parametrize("case", CASES)
def test_equals_the_oracle(case):
    inputs, mask, weight = draw(case)
    assert_same(numbers(attend, inputs, mask, weight), numbers(oracle, inputs, mask, weight))


@pytest.mark.parametrize("beyond", [0, 3])
@pytest.mark.parametrize("valid", [[-3, 19], [-17, 4]])
def test_padding_and_shared_distances(order, valid, beyond):
    """Queries of padding see nothing: what they give means nothing, but is finite, and has no part in gradients."""
    inputs, mask, weight = draw("partly valid")
    mask = AttentionMask(torch.tensor(valid, device=DEVICE) * TIMES, beyond)
    own_BT = torch.arange(inputs.q_BTNH.shape[1], device=DEVICE) >= -mask.valid_B[:, None]
    found, wanted = (
        numbers(one, inputs, mask, weight * own_BT[..., None, None]) for one in (attend, KERNELS["reference"].attend)
    )
    assert found[0].isfinite().all()
    assert_same([found[0][own_BT], *found[1:]], [wanted[0][own_BT], *wanted[1:]])


@pytest.mark.parametrize("case", ["partly valid", "window and partly valid"])
def test_a_fixed_order_gives_the_same_gradients_twice(case):
    inputs, mask, weight = draw(case)
    torch.use_deterministic_algorithms(True)
    try:
        found, again = (numbers(attend, inputs, mask, weight) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    assert_same(found, numbers(KERNELS["reference"].attend, inputs, mask, weight))


def test_the_order_of_sums_follows_the_setting(order, monkeypatch):
    launched, launch = [], triton_kernels.launch

    def watched(kernel, programs, config, *arguments):
        launched.append((kernel.__name__, config.atomic))
        launch(kernel, programs, config, *arguments)

    monkeypatch.setattr(triton_kernels, "launch", watched)
    numbers(attend, *draw("one query, no memory"))
    atomic = order == "atomic"
    fixed = [] if atomic else [("distances_kernel", False)]
    assert launched == [("forward_kernel", False), ("queries_kernel", atomic), ("keys_kernel", False), *fixed]


def test_rows_of_the_batch_are_summed_in_groups(monkeypatch):
    """Few enough that partial sums stay small: here both rows in one."""
    inputs, mask, weight = draw("one tile")
    monkeypatch.setattr(triton, "_MAX_PROGRAMS", 1)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert_same(numbers(attend, inputs, mask, weight), numbers(KERNELS["reference"].attend, inputs, mask, weight))


@pytest.mark.parametrize("width", [1, 16, 38, 41, 80])
def test_head_widths(width):
    inputs, mask, weight = draw("one tile", width, torch.float32)
    wanted = numbers(KERNELS["reference"].attend, inputs, mask, weight)
    assert_same(numbers(attend, inputs, mask, weight), wanted, within=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_exact_as_plain(dtype):
    """The error of output and gradients against float64 is at most twice that of the reference in the same format."""
    case = "memory as long as the segment"
    exact_inputs, mask, exact_weight = draw(case, 5, torch.float64)
    low = AttentionInputs(*((2 * t.detach()).to(dtype).requires_grad_() for t in as_list(exact_inputs)))
    exact_inputs = AttentionInputs(*((2 * t.detach()).requires_grad_() for t in as_list(exact_inputs)))
    weight = exact_weight.to(dtype)
    found = numbers(attend, low, mask, weight)
    plain = numbers(KERNELS["reference"].attend, low, mask, weight)
    exact = numbers(KERNELS["reference"].attend, exact_inputs, mask, exact_weight)
    for field, one, other, right in zip(("output", *FIELDS), found, plain, exact, strict=True):
        assert one.dtype == dtype
        assert (one.double() - right).norm() <= 2 * (other.double() - right).norm(), field


def test_strides_and_expanded_gradients():
    """Tensors as slices of larger ones, batch second, and a gradient that is one number seen everywhere."""
    inputs, mask, _ = draw("one tile")
    odd = [
        torch.cat([t, t], -1).transpose(0, 1).contiguous().transpose(0, 1)[..., : t.shape[-1]] for t in as_list(inputs)
    ]
    odd = AttentionInputs(*(t.detach().requires_grad_() for t in odd))
    one = torch.ones((), dtype=EXACT, device=DEVICE)
    assert_same(numbers(attend, odd, mask, one), numbers(KERNELS["reference"].attend, inputs, mask, one))


def test_all_valid_needs_no_mask():
    inputs, _, weight = draw("one tile")
    mask = AttentionMask(torch.tensor([7 * TIMES] * 2, device=DEVICE))
    assert_same(numbers(attend, inputs, AttentionMask(None), weight), numbers(attend, inputs, mask, weight))


def test_dropout_is_the_same_in_both_passes(order):
    """Values that are the identity read the kept probabilities out; with them the plain way gives the same."""
    num_queries, num_keys, dropout = 17, 29, 0.375
    generator = torch.Generator().manual_seed(3)
    shapes = (2, num_queries, 1, 29), (2, num_keys, 1, 29), (num_keys, 1, 29), (1, 29), (1, 29)
    q, k, r, u, w = (torch.randn(s, generator=generator, dtype=EXACT) / 3 for s in shapes)
    v = torch.eye(num_keys, dtype=EXACT)[None, :, None].repeat(2, 1, 1, 1)
    weight = torch.randn(2, num_queries, 1, 29, generator=generator, dtype=EXACT).to(DEVICE)
    inputs = AttentionInputs(*(tensor.to(DEVICE).requires_grad_() for tensor in (q, k, v, r, u, w)))
    torch.manual_seed(5)
    out = attend(inputs, AttentionMask(None), dropout)
    gradients = torch.autograd.grad((out * weight).sum(), as_list(inputs))

    plain = KERNELS["reference"].attend(inputs, AttentionMask(None), 0.0)
    kept = (out.detach() != 0).to(EXACT) / (1 - dropout)
    torch.testing.assert_close(out, plain * kept, rtol=0, atol=NEAR)
    seen = plain.detach() != 0
    share = (out.detach() != 0)[seen].double().mean().item()
    assert abs(share - (1 - dropout)) < 4 * (dropout * (1 - dropout) / seen.sum().item()) ** 0.5
    assert not torch.equal(kept[0], kept[1])
    probabilities = KERNELS["reference"].attend(
        AttentionInputs(*(t if n != "v_BSNH" else t.detach() for n, t in zip(FIELDS, as_list(inputs), strict=True))),
        AttentionMask(None), 0.0,
    )  # fmt: skip
    wanted = torch.einsum("btns,bsnh->btnh", probabilities * kept, inputs.v_BSNH)
    assert_same([out, *gradients], [wanted, *torch.autograd.grad((wanted * weight).sum(), as_list(inputs))])


def test_dropout_depends_on_the_random_state_alone():
    inputs, mask, _ = draw("one tile")
    results = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        with torch.no_grad():
            results.append(attend(inputs, mask, 0.5))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_nothing_of_queries_times_keys_is_stored(order, monkeypatch):
    """Neither kept for the backward pass nor handed to a kernel."""
    inputs, mask = draw("memory longer than the segment", width=2)[:2]
    size = inputs.q_BTNH.shape[1] * inputs.k_BSNH.shape[1]
    kept, handed, launch = [], [], triton_kernels.launch

    def watched(kernel, programs, config, *arguments):
        handed.extend(tensors(arguments))
        launch(kernel, programs, config, *arguments)

    def tensors(value):
        if isinstance(value, torch.Tensor):
            yield value.numel()
        for part in value if isinstance(value, tuple) else ():
            yield from tensors(part)

    monkeypatch.setattr(triton_kernels, "launch", watched)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        out = attend(inputs, mask, 0.0)
    out.sum().backward()
    num_statistics = out[..., 0].numel()
    wanted = [tensor.numel() for tensor in as_list(inputs)] + [2, out.numel(), num_statistics]
    assert sorted(kept) == sorted(wanted)
    assert max(handed, default=size) < size


def test_without_gradient_nothing_is_kept():
    inputs, mask, _ = draw("one query, no memory")
    with torch.no_grad():
        out = attend(inputs, mask, 0.0)
    assert out.grad_fn is None
    assert torch.equal(out, attend(inputs, mask, 0.0))


def test_operations_are_what_torch_wants_of_them():
    inputs, mask, _ = draw("one query, no memory")
    seed = torch.tensor([3], device=DEVICE)
    torch.library.opcheck(triton.relative_attention, (as_list(inputs), mask.valid_B, seed, 0.5), test_utils=_CHECKS)


def test_compiles_without_a_break():
    inputs, mask, weight = draw("one query, no memory")
    whole = torch.compile(attend, backend="aot_eager", fullgraph=True)
    assert_same(numbers(whole, inputs, mask, weight), numbers(attend, inputs, mask, weight))


def test_a_model_trains_with_it(monkeypatch):
    """A whole model with the kernel asked for by name."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    config = TransformerXLConfig(
        vocab_size=13, n_layers=2, d_model=6, n_heads=2, d_ff=7, dropout=0.0, attn_implementation="triton"
    )
    losses = []
    for kernel in ("triton", "reference"):
        torch.manual_seed(3)
        model = TransformerXL(config.model_copy(update={"attn_implementation": kernel})).to(DEVICE)
        tokens = torch.arange(10).view(2, 5).to(DEVICE)
        nats = model.nats(model(tokens)[0], tokens)
        nats.sum().backward()
        losses.append([nats.detach(), *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(*losses, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_what_it_keeps_can_be_counted():
    config = TransformerXLConfig(
        vocab_size=13, n_layers=2, d_model=8, n_heads=2, d_ff=7, dropout=0.0, attn_implementation="triton"
    )
    kept = {
        kernel: step_cost(
            config.model_copy(update={"attn_implementation": kernel}), batch_size=2, segment_length=64, memory_length=64
        ).activation_bytes
        for kernel in ("triton", "sdpa")
    }
    assert kept["triton"] < kept["sdpa"] / 2


def test_where_it_fits(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert fits(cuda, torch.bfloat16)
    assert not fits(cuda, torch.float64)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not fits(cpu, torch.float32)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert fits(cpu, torch.float64)
    assert choose("auto", cuda, torch.float32).name == "triton"
    assert choose("auto", cpu, torch.float32).name == "cpu"


def test_old_gpus_are_left_to_others(monkeypatch):
    """Each GPU is asked for itself."""
    majors = {0: 7, 1: 8, 2: 9}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda one: SimpleNamespace(major=majors[one.index]))
    kernels = [choose("auto", torch.device("cuda", index), torch.bfloat16).name for index in majors]
    assert kernels == ["sdpa", "triton", "triton"]
    assert fits(torch.device("meta"), torch.bfloat16)
    with pytest.raises(UserError, match=r"'triton' does not work with torch.bfloat16 on cuda:0; use auto"):
        choose("triton", torch.device("cuda", 0), torch.bfloat16)
    monkeypatch.setattr(triton_kernels, "INTERPRETED", False)
    configs = (
        triton_kernels.choose_config("keys", 64, torch.bfloat16, 0.0, device=torch.device("cuda", index))
        for index in majors
    )
    assert [config.tile for config in configs] == [32, 32, 64]


def test_tiles_are_chosen_for_the_device_of_the_tensors(monkeypatch):
    devices, config = [], triton_kernels.choose_config

    def watched(*given, **named):
        devices.append(named.get("device"))
        return config(*given, **named)

    monkeypatch.setattr(triton_kernels, "choose_config", watched)
    inputs, mask, weight = draw("one query, no memory")
    numbers(attend, inputs, mask, weight)
    assert devices == [inputs.q_BTNH.device] * 4


@pytest.mark.parametrize(("name", "on", "off"), [("fp32_precision", "tf32", "ieee"), ("allow_tf32", True, False)])
def test_float32_is_multiplied_as_torch_is_told(name, on, off):
    """By the newer name or the older; float64 and low precision do not care."""
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    found = []
    try:
        for value in (on, off):
            setattr(products, name, value)
            configs = [
                triton_kernels.choose_config("keys", 5, dtype, 0.0)
                for dtype in (torch.float32, torch.bfloat16, torch.float64)
            ]
            found.append([config.input_precision for config in configs])
    finally:
        products.fp32_precision = before
    assert found == [["tf32", "ieee", "ieee"], ["ieee"] * 3]


def test_what_to_install_is_said(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert choose("auto", torch.device("cuda"), torch.float32).name == "sdpa"
    with pytest.raises(UserError, match=r"needs Triton: pip install 'transformer-xl\[triton\]', or use auto"):
        choose("triton", torch.device("cuda"), torch.float32)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Triton has a compiler on Linux only")
def test_compiles_for_a_gpu_that_is_not_there(tmp_path):
    """The compiler is stricter than the interpreter; small tiles compile quickly."""
    script = Path(__file__).parents[1] / "triton_compiled.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, str(script), "9", "bfloat16", "0.1", "16"]
    said = subprocess.run(words, capture_output=True, text=True, check=True, env=environment).stdout
    found = [json.loads(line) for line in said.splitlines()]
    assert [one["kernel"] for one in found] == ["forward", "queries", "keys", "distances"]
    assert all(one["spilled_bytes"] == 0 for one in found)
