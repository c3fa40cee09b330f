"""The Triton kernels equal the oracle: compiled on a GPU, otherwise interpreted in Python by Triton on the CPU.

The interpreter uses tiles of 16 and is slow, so lengths are just large enough for two or three tiles. On a GPU lengths
are four times as large, and tensors are float32. The oracle is `attention` of tests/reference.py. The third argument of
a kernel's `attend` is the dropout rate of the attention probabilities.

Shape suffixes: B batch size, T queries, S = memory slots + T keys, P distances, N heads, H head width.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from reference import KeyMask, attention
from tensors import assert_same_tensors, named_gradients

from transformer_xl.config import TransformerXLConfig, UserError
from transformer_xl.model.memory import last_starts
from transformer_xl.ops.kernels import KERNELS, AttentionInputs, AttentionMask, choose
from transformer_xl.ops.kernels.reference import attention_terms
from transformer_xl.ops.kernels.triton import attend, fits
from transformer_xl.training.cost import step_cost

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# SCALE: factor of the lengths in CASES
DTYPE, SCALE, TOLERANCE = (torch.float32, 4, 2e-5) if ON_GPU else (torch.float64, 1, 1e-11)

pytest.importorskip("triton")
with pytest.MonkeyPatch.context() as patch:  # Triton reads the variable when the kernels are imported
    if not ON_GPU:
        patch.setenv("TRITON_INTERPRET", "1")
    from transformer_xl.ops.kernels import triton, triton_kernels

REFERENCE = KERNELS["reference"].attend

# T new tokens, M memory slots, valid slots of each batch row, attention window, number of heads
CASES = {
    "memory as long as the segment": (17, 17, [17, 17], None, 1),
    "no memory": (19, 0, [0, 0], None, 1),
    "one query": (1, 37, [37, 37], None, 2),
    "one query, no memory": (1, 0, [0, 0], None, 2),
    "memory longer than the segment": (5, 43, [43, 43], None, 1),
    "partly valid": (17, 23, [0, 19], None, 1),
    "window across the memory": (17, 19, [19, 19], 18, 1),
    "window of one: only itself": (17, 7, [7, 7], 1, 1),
    "window and partly valid": (7, 23, [2, 23], 14, 2),
    "one tile": (5, 7, [4, 7], 9, 1),
}


@pytest.fixture(params=["atomic", "deterministic"])
def summation(request):
    """Run the test with each way to sum the gradients of position keys."""
    torch.use_deterministic_algorithms(request.param == "deterministic")
    yield request.param
    torch.use_deterministic_algorithms(False)


def random_case(case, width=5, dtype=DTYPE):
    """Return the inputs of a case with this head width, its mask, and a weight for each element of the output.

    A single head has a sink.
    """
    num_queries, num_memory, valid, window, heads = CASES[case]
    num_queries, num_memory, batch_size = num_queries * SCALE, num_memory * SCALE, len(valid)
    num_keys = num_queries + num_memory
    num_distances = min(num_keys, (window or num_keys) * SCALE)
    shapes = [  # in the order of the fields of AttentionInputs, then the weight
        (batch_size, num_queries, heads, width), (batch_size, num_keys, heads, width),
        (batch_size, num_keys, heads, width), (num_distances, heads, width), (heads, width), (heads, width),
        (batch_size, num_queries, heads, width),
    ]  # fmt: skip
    generator = torch.Generator().manual_seed(11)
    *tensors, weight = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    tensors += [torch.randn(heads, generator=generator, dtype=torch.float64)] * (heads == 1)
    inputs = AttentionInputs(*(tensor.to(DEVICE, dtype).requires_grad_() for tensor in tensors))
    return inputs, AttentionMask(torch.tensor(valid, device=DEVICE) * SCALE), weight.to(DEVICE, dtype)


def with_gradients(out, inputs, weight):
    """Return the output, and the gradients of its weighted sum, by name."""
    return {"output": out.detach(), **named_gradients((out * weight).sum(), vars(inputs))}


def results(attend, inputs, mask, weight):
    return with_gradients(attend(inputs, mask, 0.0), inputs, weight)


def assert_close(actual, expected, tolerance=TOLERANCE):
    """Compare results; the tolerance is relative to the largest element if that is above 1."""
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name], tensor, rtol=0, atol=tolerance * max(1.0, tensor.abs().max().item()),
            msg=lambda text, name=name: f"{name}: {text}",
        )  # fmt: skip


def oracle(inputs, mask, _dropout):
    """Compute attention by the loops of tests/reference.py, or on a GPU (larger lengths) by the reference kernel."""
    if ON_GPU:
        return REFERENCE(inputs, mask, 0.0)
    return attention(*inputs.tensors(), KeyMask(mask.valid_B.tolist(), len(inputs.position_key_PNH)), inputs.sink_N)


@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_oracle(case):
    inputs, mask, weight = random_case(case)
    assert_close(results(attend, inputs, mask, weight), results(oracle, inputs, mask, weight))


# `valid`: filled memory slots of each batch row; -n means that the first n new tokens are padding.
# `num_clamped`: number of attended distances that share the position key of the largest distance
@pytest.mark.parametrize(("valid", "num_clamped"), [([-3, 19], 3), ([-17, 4], 0)])
def test_padding_and_clamped_distances(summation, valid, num_clamped):
    """Padding queries attend to nothing: their output is meaningless but finite, and has no effect on gradients."""
    inputs, _, weight = random_case("partly valid")
    mask = AttentionMask(torch.tensor(valid, device=DEVICE) * SCALE, num_clamped)
    is_token_BT = torch.arange(inputs.q_BTNH.shape[1], device=DEVICE) >= -mask.valid_B[:, None]
    weight = weight * is_token_BT[..., None, None]
    actual, expected = (results(kernel, inputs, mask, weight) for kernel in (attend, REFERENCE))
    assert actual["output"].isfinite().all()
    for result in (actual, expected):
        result["output"] = result["output"][is_token_BT]
    assert_close(actual, expected)


@pytest.mark.parametrize("case", ["partly valid", "window across the memory"])
def test_no_key_before_the_start_of_an_episode_is_attended(summation, case):
    """Episodes start at some queries of each batch row, and the keys before them lie in several tiles."""
    inputs, mask, weight = random_case(case)
    num_queries, num_memory = inputs.q_BTNH.shape[1], inputs.k_BSNH.shape[1] - inputs.q_BTNH.shape[1]
    starts = torch.zeros(2, num_queries, dtype=torch.bool, device=DEVICE)
    starts[0, [0, num_queries - 1]] = starts[1, [2, num_queries // 2]] = True
    last_start_BT = last_starts(starts)
    mask = replace(mask, first_key_BT=torch.where(last_start_BT < 0, 0, num_memory + last_start_BT))
    assert_close(results(attend, inputs, mask, weight), results(REFERENCE, inputs, mask, weight))


# T, M, smallest and largest distance, size of chunks, lengths of the batch rows (padding is behind them), summation
RANGES = {
    "both sides, memory": (21, 17, -20, 37, None, None, "atomic"),
    "both sides, lengths": (37, 0, -36, 36, None, [37, 17], "deterministic"),
    "narrow band": (53, 15, -2, 1, None, None, "deterministic"),
    "band after, lengths": (53, 0, -19, 0, None, [53, 20], "atomic"),
    "chunks of two tiles": (61, 16, -31, 31, 32, None, "deterministic"),
    "chunks and keys before them, lengths": (61, 7, -18, 35, 19, [45, 1], "atomic"),
    "causal, lengths": (37, 0, 0, 36, None, [20], "deterministic"),
}


def ranges_case(case):
    """Return inputs, mask and weight of the output, which is 0 for padding; queries of a chunk have the same keys."""
    num_queries, num_memory, least, most, chunk, lengths, _ = RANGES[case]
    num_keys, batch_size = num_queries + num_memory, len(lengths or [0])
    shapes = [
        (batch_size, num_queries, 1, 5), (batch_size, num_keys, 1, 5), (batch_size, num_keys, 1, 5),
        (most - least + 1, 1, 5), (1, 5), (1, 5), (batch_size, num_queries, 1, 5),
    ]  # fmt: skip
    generator = torch.Generator().manual_seed(17)
    *tensors, weight = (torch.randn(s, generator=generator, dtype=torch.float64).to(DEVICE, DTYPE) for s in shapes)
    query_T, first_key_BT, stop_key_BT = torch.arange(num_queries, device=DEVICE), None, None
    if chunk:
        start_T = num_memory + query_T - query_T % chunk
        first_key_BT = (start_T + chunk - 1 - most).clamp(min=0).expand(batch_size, -1)
        stop_key_BT = (start_T + chunk).expand(batch_size, -1)  # of the last chunk above S
    if lengths:
        end_B1 = num_memory + torch.tensor(lengths, device=DEVICE)[:, None]
        is_token_BT = num_memory + query_T < end_B1
        stop_key_BT = torch.where(is_token_BT, end_B1 if stop_key_BT is None else stop_key_BT.minimum(end_B1), 0)
        weight = weight * is_token_BT[..., None, None]
    inputs = AttentionInputs(*(tensor.requires_grad_() for tensor in tensors))
    return inputs, AttentionMask(None, 0, first_key_BT, -least, stop_key_BT), weight


@pytest.mark.parametrize("case", RANGES)
def test_ranges_on_both_sides(case, monkeypatch):
    """The results equal the reference, and tiles of queries and keys without an attended pair are skipped."""
    deterministic = RANGES[case][-1] == "deterministic"
    num_tiles, launched = Counter(), []
    launch, over_keys = triton_kernels.launch, triton_kernels.over_keys

    def recorded_launch(kernel, *arguments):
        launched.append(kernel.__name__.removesuffix("_kernel"))
        launch(kernel, *arguments)

    def counted_over_keys(*arguments):  # is called once for each tile
        num_tiles[launched[-1]] += 1
        return over_keys(*arguments)

    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    monkeypatch.setattr(triton_kernels, "launch", recorded_launch)
    if not ON_GPU:
        monkeypatch.setattr(triton_kernels, "over_keys", counted_over_keys)
    inputs, mask, weight = ranges_case(case)
    actual, expected = (results(kernel, inputs, mask, weight) for kernel in (attend, REFERENCE))
    for result in (actual, expected):
        result["output"] = result["output"] * (weight != 0)
    assert_close(actual, expected)
    if ON_GPU:
        return
    num_queries, num_keys = inputs.q_BTNH.shape[1], inputs.k_BSNH.shape[1]
    attended_BTS = mask.attended(num_queries, num_keys, len(inputs.position_key_PNH), DEVICE)
    attended_BTS = attended_BTS.expand(len(weight), -1, -1)
    b, i, j = attended_BTS.nonzero().unbind(1)
    place = num_keys - num_queries + mask.num_later
    block = (place + i - j - place % 16).div(16, rounding_mode="floor")  # of distances
    of_keys, of_distances = (len(torch.stack([b, i // 16, other]).unique(dim=1).T) for other in (j // 16, block))
    assert num_tiles["forward"] == num_tiles["queries"] == num_tiles["keys"] == of_keys
    if deterministic:  # the first and the last block are in part of distances that do not exist
        assert of_distances <= num_tiles["distances"] <= of_distances + 2 * len(weight)


def test_deterministic_summation_gives_the_same_bits_twice(monkeypatch):
    inputs, mask, weight = random_case("window and partly valid")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert_same_tensors(*(results(attend, inputs, mask, weight) for _ in range(2)))
    monkeypatch.setattr(triton, "_MAX_PROGRAMS", 1)  # both batch rows in one partial sum
    assert_close(results(attend, inputs, mask, weight), results(REFERENCE, inputs, mask, weight))


def test_kernels_launched_for_each_summation_are_configured_for_the_tensors_device(summation, monkeypatch):
    launched, devices = [], []
    launch, choose_config = triton_kernels.launch, triton_kernels.choose_config

    def recorded_launch(kernel, num_programs, config, *arguments):
        launched.append((kernel.__name__, config.atomic))
        launch(kernel, num_programs, config, *arguments)

    def recorded_config(*args, **kwargs):
        devices.append(kwargs["device"])
        return choose_config(*args, **kwargs)

    monkeypatch.setattr(triton_kernels, "launch", recorded_launch)
    monkeypatch.setattr(triton_kernels, "choose_config", recorded_config)
    inputs, mask, weight = random_case("one query, no memory")
    results(attend, inputs, mask, weight)
    atomic = summation == "atomic"
    last = [] if atomic else [("distances_kernel", False)]
    assert launched == [("forward_kernel", False), ("queries_kernel", atomic), ("keys_kernel", False), *last]
    # configurations of the forward kernel and of three backward kernels, whether launched or not
    assert devices == [inputs.q_BTNH.device] * 4


@pytest.mark.parametrize("width", [1, 38, 80])
def test_kernels_equal_the_reference_for_other_head_widths(width):
    inputs, mask, weight = random_case("one tile", width, torch.float32)
    assert_close(results(attend, inputs, mask, weight), results(REFERENCE, inputs, mask, weight), tolerance=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_error_is_at_most_twice_that_of_the_reference_kernel(dtype):
    """The error of output and gradients, compared with float64; inputs are doubled, for peaked attention."""
    exact_inputs, mask, exact_weight = random_case("memory as long as the segment", dtype=torch.float64)
    inputs, exact_inputs = (
        AttentionInputs(*((2 * t.detach()).to(to).requires_grad_() for t in exact_inputs.tensors()))
        for to in (dtype, torch.float64)
    )
    actual, reference = (results(kernel, inputs, mask, exact_weight.to(dtype)) for kernel in (attend, REFERENCE))
    for name, exact in results(REFERENCE, exact_inputs, mask, exact_weight).items():
        assert actual[name].dtype == dtype
        assert (actual[name].double() - exact).norm() <= 2 * (reference[name].double() - exact).norm(), name


def test_strided_inputs_and_expanded_gradients():
    """Tensors that are slices of larger ones, with the batch second, and a gradient that is one expanded element."""
    inputs, mask, _ = random_case("one tile")
    strided = AttentionInputs(*(
        torch.cat([t, t], -1).transpose(0, 1).contiguous().transpose(0, 1)[..., : t.shape[-1]].detach().requires_grad_()
        for t in inputs.tensors()
    ), inputs.sink_N)  # fmt: skip
    one = torch.ones((), dtype=DTYPE, device=DEVICE)
    assert_close(results(attend, strided, mask, one), results(REFERENCE, inputs, mask, one))


def test_dropout_mask_is_the_same_in_both_passes(summation):
    """One-hot values reveal which probabilities are kept; the reference with this mask must give the same results."""
    num_queries, num_keys, dropout = 17, 29, 0.375
    generator = torch.Generator().manual_seed(3)
    # of queries, keys, position keys and the two biases; the head width is 29, so that values can be one-hot vectors
    shapes = (2, num_queries, 1, 29), (2, num_keys, 1, 29), (num_keys, 1, 29), (1, 29), (1, 29)
    q, k, r, u, w = (torch.randn(s, generator=generator, dtype=DTYPE) / 3 for s in shapes)
    v = torch.eye(num_keys, dtype=DTYPE)[None, :, None].repeat(2, 1, 1, 1)
    weight = torch.randn(2, num_queries, 1, 29, generator=generator, dtype=DTYPE).to(DEVICE)
    inputs = AttentionInputs(*(tensor.to(DEVICE).requires_grad_() for tensor in (q, k, v, r, u, w)))
    mask = AttentionMask(None)
    if summation == "deterministic":  # four later keys, and no keys after the 26th
        mask = replace(mask, num_later=4, stop_key_BT=torch.full((2, num_queries), 26, device=DEVICE))
    outputs = []
    for seed in (5, 5, 6):  # the same seed twice, and another
        torch.manual_seed(seed)
        outputs.append(attend(inputs, mask, dropout))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    p_BNTS = attention_terms(inputs, mask).probabilities_BNTS
    is_kept_BNTS = (outputs[0].detach() != 0).transpose(1, 2)
    assert not torch.equal(is_kept_BNTS[0], is_kept_BNTS[1])
    attended = p_BNTS.detach() != 0
    # the fraction that is kept may differ from the probability by four standard deviations
    fraction = is_kept_BNTS[attended].double().mean().item()
    assert abs(fraction - (1 - dropout)) < 4 * (dropout * (1 - dropout) / attended.sum().item()) ** 0.5
    expected = torch.einsum("bnts,bsnh->btnh", p_BNTS * is_kept_BNTS / (1 - dropout), inputs.v_BSNH)
    assert_close(*(with_gradients(out, inputs, weight) for out in (outputs[0], expected)))


def test_no_matrix_of_queries_times_keys_is_stored(summation, monkeypatch):
    """No such matrix is saved for the backward pass or passed to a kernel (every passed tensor has fewer elements)."""
    inputs, mask = random_case("memory longer than the segment", width=2)[:2]
    size = inputs.q_BTNH.shape[1] * inputs.k_BSNH.shape[1]
    saved, passed, launch = [], [], triton_kernels.launch

    def recorded_launch(kernel, num_programs, config, *arguments):
        passed.extend(tensor_sizes(arguments))
        launch(kernel, num_programs, config, *arguments)

    def tensor_sizes(argument):
        if isinstance(argument, torch.Tensor):
            yield argument.numel()
        for part in argument if isinstance(argument, tuple) else ():
            yield from tensor_sizes(part)

    monkeypatch.setattr(triton_kernels, "launch", recorded_launch)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        out = attend(inputs, mask, 0.0)
    out.sum().backward()
    valid, log_sum = len(mask.valid_B), out[..., 0].numel()  # numbers of elements of these two tensors
    given = (tensor.numel() for tensor in vars(inputs).values())
    assert sorted(saved) == sorted([*given, valid, out.numel(), log_sum])
    assert max(passed, default=size) < size


def test_custom_operators_satisfy_torch_s_checks():
    """torch's fourth check, test_aot_dispatch_dynamic, is replaced by `test_compiles_without_graph_breaks`."""
    inputs, mask, _ = random_case("one query, no memory")
    seed, num_later, dropout = torch.tensor([3], device=DEVICE), 0, 0.5
    sink_N = torch.ones(2, dtype=DTYPE, device=DEVICE, requires_grad=True)
    arguments = inputs.tensors(), sink_N, mask.valid_B, None, None, seed, num_later, dropout
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(triton.relative_attention, arguments, test_utils=checks)


def test_compiles_without_graph_breaks():
    inputs, mask, weight = random_case("one query, no memory")
    mask = replace(mask, stop_key_BT=torch.ones(2, SCALE, dtype=torch.int64, device=DEVICE))
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    assert_close(results(compiled, inputs, mask, weight), results(attend, inputs, mask, weight))


def test_saved_activations_can_be_counted_without_a_gpu():
    saved_bytes = {}
    for kernel in ("triton", "sdpa"):
        config = TransformerXLConfig(
            vocab_size=13, n_layers=2, d_model=8, n_heads=2, d_ff=7, dropout=0.0, attn_implementation=kernel
        )
        cost = step_cost(config, batch_size=2, segment_length=64, memory_length=64)
        saved_bytes[kernel] = cost.activation_bytes
    assert saved_bytes["triton"] < saved_bytes["sdpa"] / 2


def test_kernels_fit_cuda_and_the_interpreter(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert fits(cuda, torch.bfloat16)
    assert not fits(cuda, torch.float64)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not fits(cpu, torch.float32)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert fits(cpu, torch.float64)
    assert choose("auto", cpu, torch.float32).name in ("native", "cpu")


def test_each_gpu_gets_a_kernel_and_tiles_for_its_capability(monkeypatch):
    majors = {0: 7, 1: 8, 2: 9}  # major compute capability of each GPU, by its index
    devices = [torch.device("cuda", index) for index in majors]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda one: SimpleNamespace(major=majors[one.index]))
    assert [choose("auto", one, torch.bfloat16).name for one in devices] == ["sdpa", "triton", "triton"]
    assert fits(torch.device("meta"), torch.bfloat16)
    with pytest.raises(UserError, match=r"'triton' does not work with torch.bfloat16 on cuda:0; use auto"):
        choose("triton", devices[0], torch.bfloat16)
    monkeypatch.setattr(triton_kernels, "INTERPRETED", False)
    configs = (triton_kernels.choose_config("keys", 64, torch.bfloat16, 0.0, device=one) for one in devices)
    assert [config.tile for config in configs] == [32, 32, 64]  # Hopper (9.0) has more shared memory


@pytest.mark.parametrize(("name", "on", "off"), [("fp32_precision", "tf32", "ieee"), ("allow_tf32", True, False)])
def test_float32_products_follow_torch_s_setting(name, on, off):
    """The setting has a newer name and an older one; float64 and low precision do not depend on it."""
    backend = torch.backends.cuda.matmul
    before, precisions = backend.fp32_precision, []
    try:
        for value in (on, off):
            setattr(backend, name, value)
            dtypes = (torch.float32, torch.bfloat16, torch.float64)
            precisions.append([triton_kernels.choose_config("keys", 5, d, 0.0).input_precision for d in dtypes])
    finally:
        backend.fp32_precision = before
    assert precisions == [["tf32", "ieee", "ieee"], ["ieee"] * 3]


def test_without_triton_the_error_names_the_package_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert choose("auto", torch.device("cuda"), torch.float32).name == "sdpa"
    with pytest.raises(UserError, match=r"needs Triton: pip install '.+\[triton\]', or use auto"):
        choose("triton", torch.device("cuda"), torch.float32)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Triton has a compiler on Linux only")
@pytest.mark.parametrize(
    ("capability", "sides", "width", "tile"),
    [
        *((80, "causal", 9, 32), (90, "ranges", 9, 16), (100, "both", 9, 16)),  # small tiles compile quickly
        *(
            (80, "both", 64, 0),
            (90, "causal", 64, 0),
            (100, "causal", 64, 0),
            (100, "ranges", 64, 0),
            (120, "both", 64, 0),
        ),
    ],
    ids=str,
)
def test_kernels_compile_without_a_gpu(tmp_path, capability, sides, width, tile):
    """The compiler is stricter than the interpreter, and goes another way for each capability and tile."""
    script = Path(__file__).parents[1] / "triton_compiled.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    settings = [str(width), "bfloat16", "0.1", str(tile), str(capability), sides]  # head width, dtype, dropout, tile
    command = [sys.executable, str(script), *settings]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    kernels = [json.loads(line) for line in printed.splitlines()]
    assert [kernel["kernel"] for kernel in kernels] == ["forward", "queries", "keys", "distances"]
    if tile:  # those of the launch may want more registers than there are
        assert all(kernel["spilled_bytes"] == 0 for kernel in kernels)
    memory = 227 if capability in (90, 100) else 99  # KiB of shared memory of a program
    assert all(kernel["shared_bytes"] <= memory * 1024 for kernel in kernels)
