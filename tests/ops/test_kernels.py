"""Every attention kernel equals the oracle, `attention` of tests/reference.py, in outputs and gradients.

The third argument of a kernel's `attend` is the dropout rate of the attention probabilities.

Constants of the CPU kernel that some tests change: `_BLOCK_QUERIES` is the number of queries computed at once,
`_BUFFER_BYTES` the size that a buffer may have (with 1, as few heads are computed at once as possible), and
`_MIN_BLOCK_SCORES` the number of scores below which a pass without gradient computes no blocks.

The native kernel is tested where it is built (`txl info --build-native`).

Shape suffixes: B batch size, T queries, S = memory slots + T keys, P distances, N heads, H head width, X any length.
"""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from native_operators import NATIVE, needs_native
from reference import KeyMask, attention
from tensors import assert_same_tensors, named_gradients

from transformer_xl.config import UserError
from transformer_xl.ops.kernels import KERNELS, AttentionInputs, AttentionMask, choose
from transformer_xl.ops.kernels.reference import attention_terms, weighted_values
from transformer_xl.ops.native import build, operators

BATCH, HEADS, WIDTH = 2, 3, 5  # WIDTH: H
ON_CPU = [
    NATIVE if name == "native" else name
    for name, kernel in KERNELS.items()
    if name == "native" or kernel.fits(torch.device("cpu"), torch.float64)
]

# T new tokens, M memory slots, valid slots of each batch row, attention window
CASES = {
    "memory as long as the segment": (5, 5, [5, 5], None),
    "no memory": (7, 0, [0, 0], None),
    "one query": (1, 7, [7, 7], None),
    "one query, no memory": (1, 0, [0, 0], None),
    "memory shorter than the segment": (7, 3, [3, 3], None),
    "partly valid": (5, 11, [0, 4], None),
    "window within the segment": (7, 5, [5, 5], 3),
    "window across the memory": (5, 7, [7, 7], 6),
    "window of one: only itself": (5, 3, [3, 3], 1),
    "window and partly valid": (5, 7, [2, 7], 4),
}


def random_inputs(num_queries: int, num_memory: int, window: int | None, sinks: bool = False) -> AttentionInputs:
    """Return inputs with one position key for each distance within the window."""
    generator = torch.Generator().manual_seed(11)
    num_keys = num_queries + num_memory
    num_distances = min(num_keys, window or num_keys)
    shapes = [  # in the order of the fields of AttentionInputs
        (BATCH, num_queries, HEADS, WIDTH), (BATCH, num_keys, HEADS, WIDTH), (BATCH, num_keys, HEADS, WIDTH),
        (num_distances, HEADS, WIDTH), (HEADS, WIDTH), (HEADS, WIDTH), *[(HEADS,)] * sinks,
    ]  # fmt: skip
    return AttentionInputs(*(torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes))


def with_gradients(out_BTNH: torch.Tensor, inputs: AttentionInputs, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the output, and the gradients of the loss by the inputs' names."""
    return {"output": out_BTNH, **named_gradients(loss, vars(inputs))}


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("case", CASES)
def test_kernel_equals_oracle(name, case, sinks):
    """With and without gradients, and if all slots are valid also with `AttentionMask(None)`."""
    num_queries, num_memory, valid, window = CASES[case]
    inputs = random_inputs(num_queries, num_memory, window, sinks)
    masks = [AttentionMask(torch.tensor(valid))] + [AttentionMask(None)] * (valid == [num_memory] * BATCH)
    weight = torch.randn(BATCH, num_queries, HEADS, WIDTH, dtype=torch.float64)
    expected = attention(*inputs.tensors(), KeyMask(valid, window), inputs.sink_N)
    expected_gradients = named_gradients((expected * weight).sum(), vars(inputs))
    for mask in masks:
        out = KERNELS[name].attend(inputs, mask, 0.0)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        assert_same_tensors(named_gradients((out * weight).sum(), vars(inputs)), expected_gradients, atol=1e-11)
        with torch.no_grad():
            torch.testing.assert_close(KERNELS[name].attend(inputs, mask, 0.0), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("kernel", "sizes"),
    [("cpu", {}), ("cpu", {"_BLOCK_QUERIES": 2, "_BUFFER_BYTES": 1}), pytest.param("native", {}, marks=needs_native)],
)
def test_one_dropout_mask_is_used_in_both_passes(monkeypatch, kernel, sizes):
    """One-hot values reveal the mask, because the output is linear in the values; output and gradients must then be
    those of a softmax times that mask."""
    for name, size in sizes.items():
        monkeypatch.setattr(f"transformer_xl.ops.kernels.cpu.{name}", size)
    dropout, num_queries, num_keys = 0.4, 5, 12
    inputs = random_inputs(num_queries, num_keys - num_queries, None, sinks=True)
    weight_BTNH = torch.randn(BATCH, num_queries, HEADS, WIDTH, dtype=torch.float64)

    def attend(attention_inputs, seed):
        torch.manual_seed(seed)
        return KERNELS[kernel].attend(attention_inputs, AttentionMask(None), dropout)

    weight_BNTS = torch.zeros(BATCH, HEADS, num_queries, num_keys, dtype=torch.float64)
    for key in range(num_keys):
        v_BSNH = torch.zeros_like(inputs.v_BSNH)
        v_BSNH[:, key] = 1
        weight_BNTS[..., key] = attend(replace(inputs, v_BSNH=v_BSNH), 3)[..., 0].transpose(1, 2).detach()
    p_BNTS = attention_terms(inputs, AttentionMask(None)).probabilities_BNTS
    attended_BNTS = p_BNTS > 0
    mask_BNTS = (weight_BNTS / p_BNTS.where(attended_BNTS, 1.0) * (1 - dropout)).detach()
    torch.testing.assert_close(mask_BNTS, mask_BNTS.round(), rtol=0, atol=1e-9)
    assert 0.45 < mask_BNTS[attended_BNTS].mean() < 0.75  # about 1 - dropout
    expected = torch.einsum("bnts,bsnh->btnh", p_BNTS * mask_BNTS.round() / (1 - dropout), inputs.v_BSNH)
    actual = attend(inputs, 3)
    results = (with_gradients(out, inputs, (out * weight_BTNH).sum()) for out in (actual, expected))
    assert_same_tensors(*results, atol=1e-11)
    assert not torch.equal(attend(inputs, 4), actual)


def test_cpu_kernel_saves_only_its_inputs():
    """Nothing of size T x S is saved for the backward pass, even with dropout."""
    inputs, saved = random_inputs(5, 200, None), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        KERNELS["cpu"].attend(inputs, AttentionMask(None), 0.1).sum()
    assert sum(t.numel() for t in saved) == sum(t.numel() for t in inputs.tensors()) + 1  # the seed


@pytest.mark.parametrize("name", ON_CPU)
def test_bfloat16_error_is_at_most_twice_that_of_the_reference_kernel(name):
    """The error of output and gradients, compared with float64."""
    exact = results_in("reference", torch.float64)
    reference, actual = results_in("reference", torch.bfloat16), results_in(name, torch.bfloat16)
    for field, expected in exact.items():
        assert (actual[field] - expected).norm() <= 2 * (reference[field] - expected).norm(), field


def results_in(kernel: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return float64 copies of a kernel's output and gradients in a dtype; inputs are times 2, for peaked attention."""
    tensors = vars(random_inputs(num_queries=17, num_memory=31, window=None, sinks=True)).values()
    inputs = AttentionInputs(*((2 * tensor.detach()).to(dtype).requires_grad_() for tensor in tensors))
    out_BTNH = KERNELS[kernel].attend(inputs, AttentionMask(torch.tensor([31, 5])), 0.0)
    weight_BTNH = torch.randn(out_BTNH.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    results = with_gradients(out_BTNH, inputs, (out_BTNH * weight_BTNH).sum())
    return {name: tensor.detach().double() for name, tensor in results.items()}


@pytest.mark.parametrize("name", ON_CPU)
def test_dropout_zeroes_probabilities_and_preserves_the_mean(name):
    inputs, mask = random_inputs(5, 7, None), AttentionMask(None)
    repeated = replace(  # 3,000 copies of a batch row, whose mean is close to the result without dropout
        inputs, **{name: getattr(inputs, name)[:1].repeat(3000, 1, 1, 1) for name in ("q_BTNH", "k_BSNH", "v_BSNH")}
    )
    torch.manual_seed(5)
    with torch.no_grad():
        dropped_BTNH = KERNELS[name].attend(repeated, mask, 0.5)
        # 0.12 is more than twice the largest standard error of the mean of 3,000 copies
        torch.testing.assert_close(dropped_BTNH.mean(0), KERNELS[name].attend(inputs, mask, 0.0)[0], rtol=0, atol=0.12)
        assert not torch.equal(dropped_BTNH[0], dropped_BTNH[1])


def test_terms_add_up_and_probabilities_sum_to_one():
    inputs, mask = random_inputs(5, 7, None), AttentionMask(torch.tensor([3, 7]))
    terms = attention_terms(inputs, mask)
    assert (terms.probabilities_BNTS[0, :, :, :4] == 0).all()  # 3 of the 7 slots of row 0 are valid: the last
    torch.testing.assert_close(terms.probabilities_BNTS.sum(-1), torch.ones(BATCH, HEADS, 5, dtype=torch.float64))
    score_BNTS = terms.content_BNTS + terms.position_BNTS + terms.content_bias_BNTS + terms.position_bias_BNTS
    attended_BNTS = terms.probabilities_BNTS > 0
    softmax_BNTS = score_BNTS.masked_fill(~attended_BNTS, -torch.inf).softmax(-1)
    torch.testing.assert_close(softmax_BNTS, terms.probabilities_BNTS)
    attended_BTNH = weighted_values(terms, inputs.v_BSNH)
    torch.testing.assert_close(attended_BTNH, KERNELS["sdpa"].attend(inputs, mask, 0.0))


def test_choose_returns_the_fastest_kernel_that_fits():
    cpu = torch.device("cpu")
    assert choose("auto", cpu, torch.float32).name == ("native" if operators() else "cpu")
    assert choose("auto", cpu, torch.float16).name == "cpu"
    assert choose("auto", torch.device("cuda"), torch.bfloat16).name == ("triton" if find_spec("triton") else "sdpa")
    assert choose("auto", torch.device("cuda"), torch.float32).name == "sdpa"  # faster there
    assert choose("auto", torch.device("cuda"), torch.float64).name == "sdpa"
    assert choose("auto", cpu, torch.complex64).name == "reference"  # the only kernel for every dtype
    assert choose("reference", cpu, torch.float32).name == "reference"
    with pytest.raises(UserError, match="did you mean 'sdpa'"):
        choose("spda", cpu, torch.float32)
    with pytest.raises(UserError, match=r"does not work with torch\.complex64"):
        choose("sdpa", cpu, torch.complex64)
    with pytest.raises(UserError, match=r"'triton' (does not work with torch\.float32 on cpu|needs Triton)"):
        choose("triton", cpu, torch.float32)


# mask, number of position keys (None: one for each distance); T = 5, M = 7. The num_clamped longest distances share the
# position key of the next one, so a query attends to so many keys more. A negative number of valid slots means padding.
# first_key_BT: index of the first key of each query's episode, 7 or more if the episode starts among the new tokens.
MASKS = {
    "three clamped distances": (AttentionMask(None, num_clamped=3), 5),
    "padding": (AttentionMask(torch.tensor([4, -3])), None),
    "padding and window": (AttentionMask(torch.tensor([-5, 2])), 4),
    "clamped distances, partly valid": (AttentionMask(torch.tensor([1, 6]), num_clamped=4), 3),
    "all distances clamped": (AttentionMask(None, num_clamped=11), 1),
    "episode starts": (AttentionMask(None, first_key_BT=torch.tensor([[7, 7, 7, 10, 10], [0, 0, 0, 0, 11]])), None),
    "episode starts, partly valid, window": (
        AttentionMask(torch.tensor([0, 4]), first_key_BT=torch.tensor([[0, 8, 9, 9, 9], [0, 0, 0, 10, 10]])), 6
    ),
    "episode starts, clamped distances": (
        AttentionMask(None, num_clamped=5, first_key_BT=torch.tensor([[0, 0, 9, 9, 9], [7, 8, 9, 10, 11]])), 3
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("case", MASKS)
@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        ("rows", {}),
        ("heads", {"_BLOCK_QUERIES": 2, "_MIN_BLOCK_SCORES": 0}),
        ("columns", {"_BLOCK_QUERIES": 3, "_BUFFER_BYTES": 1, "_MIN_BLOCK_SCORES": 0}),
        ("rows", {"_BUFFER_BYTES": 1, "_MIN_BLOCK_SCORES": 0}),
    ],
)
def test_clamping_padding_and_memory_layouts_equal_oracle(monkeypatch, name, case, layout, sizes):
    """Outputs with and without gradients, for blocks of the CPU kernel of several sizes.

    `layout` is how keys, values and position keys are stored (`LAYOUTS`). The oracle computes each query separately,
    with one position key for each distance, and counts the new tokens before the query as valid memory slots.
    """
    mask, window = MASKS[case]
    for constant, size in sizes.items():
        monkeypatch.setattr(f"transformer_xl.ops.kernels.cpu.{constant}", size)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    monkeypatch.setattr("transformer_xl.ops.kernels.native._DECODE_QUERIES", 5)  # used without gradients
    inputs = random_inputs(5, 7, window, sinks="_BUFFER_BYTES" in sizes)
    valid = [7, 7] if mask.valid_B is None else mask.valid_B.tolist()
    is_token_BT = torch.tensor([[query >= -count for query in range(5)] for count in valid])
    first_key_BT = torch.zeros(2, 5).long() if mask.first_key_BT is None else mask.first_key_BT
    expanded = torch.cat([inputs.position_key_PNH[:1].expand(mask.num_clamped, -1, -1), inputs.position_key_PNH])
    expanded_inputs = replace(inputs, position_key_PNH=expanded)
    expected = torch.stack([
        attention(
            *one_query(expanded_inputs, row, query),
            KeyMask([min(valid[row] + query, 7 + query, 7 + query - int(first_key_BT[row, query]))]),
            inputs.sink_N,
        )[0, 0]
        for row, query in is_token_BT.nonzero().tolist()
    ])  # fmt: skip
    stored = replace(inputs, **{key: LAYOUTS[layout](getattr(inputs, key)) for key in ("k_BSNH", "v_BSNH")})
    stored = replace(stored, position_key_PNH=LAYOUTS[layout](inputs.position_key_PNH[None])[0])
    with torch.inference_mode():
        without_gradient = KERNELS[name].attend(stored, mask, 0.0)
    out = KERNELS[name].attend(stored, mask, 0.0)
    for result in (without_gradient.clone(), out):
        assert result.isfinite().all()
        torch.testing.assert_close(result[is_token_BT], expected, rtol=0, atol=1e-12)
    gradients = (named_gradients((result**2).sum(), vars(inputs)) for result in (out[is_token_BT], expected))
    assert_same_tensors(*gradients, atol=1e-11)


# a tensor (B, X, N, H) stored in this order, head by head (B, N, X, H), or head by head transposed (B, N, H, X)
LAYOUTS = {
    "rows": lambda x_BXNH: x_BXNH,
    "heads": lambda x_BXNH: x_BXNH.transpose(1, 2).contiguous().transpose(1, 2),
    "columns": lambda x_BXNH: x_BXNH.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
}


def one_query(inputs: AttentionInputs, row: int, query: int) -> list[torch.Tensor]:
    """Return the tensors of one query of one batch row, with the keys up to its own that are within the window.

    There are 7 memory slots, so the query with index 0 has 8 keys.
    """
    num_keys, num_distances = 7 + query + 1, len(inputs.position_key_PNH)
    first = max(num_keys - num_distances, 0)
    rows, keys = slice(row, row + 1), slice(first, num_keys)
    return [
        inputs.q_BTNH[rows, query : query + 1], inputs.k_BSNH[rows, keys], inputs.v_BSNH[rows, keys],
        inputs.position_key_PNH[num_distances - (num_keys - first) :], inputs.content_bias_NH, inputs.position_bias_NH,
    ]  # fmt: skip


def test_cpu_kernel_draws_the_same_dropout_mask_with_any_number_of_threads(monkeypatch):
    """The number of threads determines how many heads are computed at once; it may change between the passes."""
    inputs, results = random_inputs(5, 7, None), []
    monkeypatch.setattr("transformer_xl.ops.kernels.cpu._BUFFER_BYTES", 1)
    for forward, backward in ((1, 1), (3, 3), (1, 3)):  # numbers of threads in each pass
        monkeypatch.setattr("torch.get_num_threads", lambda threads=forward: threads)
        torch.manual_seed(3)
        out_BTNH = KERNELS["cpu"].attend(inputs, AttentionMask(None), 0.4)
        monkeypatch.setattr("torch.get_num_threads", lambda threads=backward: threads)
        results.append(with_gradients(out_BTNH, inputs, out_BTNH.pow(2).sum()))
    for other in results[1:]:
        assert_same_tensors(other, results[0], atol=1e-12)


# T, M, H, window, num_clamped, valid slots of each batch row; several blocks of queries and chunks of keys
LARGE = {
    "one block": (64, 64, 8, None, 0, None),
    "odd sizes": (131, 257, 7, None, 0, None),
    "window": (131, 257, 8, 101, 0, None),
    "window, clamped, padding": (131, 400, 6, 301, 170, [10, -50, 400]),
    "many clamped": (70, 700, 41, None, 500, None),
    "long memory, smaller blocks": (33, 2100, 4, 2000, 500, None),
    "episode starts, window": (131, 257, 8, 201, 0, [257, -3, 100]),
}


@needs_native
@pytest.mark.parametrize("case", LARGE)
def test_native_kernel_equals_the_reference_kernel_over_several_blocks(case):
    """In float64 to rounding; in float32 with a relative error of 1e-5 at most, the goal of this kernel."""
    num_queries, num_memory, width, window, num_clamped, valid = LARGE[case]
    num_keys, generator = num_queries + num_memory, torch.Generator().manual_seed(3)
    num_distances = min(num_keys, window or num_keys) - num_clamped
    shapes = [
        (3, num_queries, 2, width), (3, num_keys, 2, width), (3, num_keys, 2, width), (num_distances, 2, width),
        (2, width), (2, width), (2,), (3, num_queries, 2, width),
    ]  # fmt: skip
    *tensors, weight_BTNH = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    valid_B = None if valid is None else torch.tensor(valid)
    first_key_BT = None
    if "episode" in case:
        query_T = torch.arange(num_queries)
        first_key_BT = torch.stack([torch.where(query_T < at, 0, num_memory + at) for at in (1, 64, 100)])
    mask = AttentionMask(valid_B, num_clamped, first_key_BT)
    if valid is not None:  # outputs of padding are meaningless
        for row, count in enumerate(valid):
            weight_BTNH[row, : max(0, -count)] = 0
    results = {}
    for kernel, dtype in (("reference", torch.float64), ("native", torch.float64), ("native", torch.float32)):
        inputs = AttentionInputs(*(tensor.to(dtype).requires_grad_() for tensor in tensors))
        out_BTNH = KERNELS[kernel].attend(inputs, mask, 0.0) * (weight_BTNH != 0)
        results[kernel, dtype] = with_gradients(out_BTNH, inputs, (out_BTNH * weight_BTNH.to(dtype)).sum())
    expected = results["reference", torch.float64]
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-5)):
        for name, tensor in results["native", dtype].items():
            assert (tensor - expected[name]).norm() <= tolerance * expected[name].norm(), (name, dtype)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_native_kernel_has_the_same_numbers_with_any_number_of_threads(dtype, dropout):
    """Bit for bit, also if the number changes between the passes."""
    tensors, results, before = random_inputs(70, 90, None).tensors(), [], torch.get_num_threads()
    try:
        for forward, backward in ((1, 1), (3, 3), (1, 3), (5, 2)):  # numbers of threads in each pass
            inputs = AttentionInputs(*(tensor.detach().to(dtype).requires_grad_() for tensor in tensors))
            torch.manual_seed(3)
            torch.set_num_threads(forward)
            out_BTNH = KERNELS["native"].attend(inputs, AttentionMask(torch.tensor([90, 17])), dropout)
            torch.set_num_threads(backward)
            results.append(with_gradients(out_BTNH, inputs, out_BTNH.float().pow(2).sum()))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert_same_tensors(other, results[0], atol=0)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_kernel_computes_the_same_where_torch_does_not_have_onednn_s_products(dtype):
    """They are outside torch's stable interface, so a later torch may not have them."""
    tensors, results = random_inputs(70, 91, None).tensors(), []
    try:
        for with_onednn in (False, True):
            description = operators().prepare(build.has_avx512(), with_onednn)
            assert ("without oneDNN" in description) is not with_onednn
            inputs = AttentionInputs(*(tensor.detach().to(dtype).requires_grad_() for tensor in tensors))
            out_BTNH = KERNELS["native"].attend(inputs, AttentionMask(torch.tensor([90, 17])), 0.0)
            results.append(with_gradients(out_BTNH, inputs, out_BTNH.float().pow(2).sum()))
    finally:
        operators().prepare(build.has_avx512(), True)
    for name, tensor in results[0].items():
        error = (tensor - results[1][name]).float().norm() / results[1][name].float().norm()
        assert error < (1e-6 if dtype == torch.float32 else 1e-2), name


@needs_native
def test_native_dropout_drops_the_given_share_and_differs_between_queries():
    """Values of one, so that an output is the sum of what is kept; equal scores, so that each probability is 1 / S."""
    inputs = AttentionInputs(*(torch.zeros_like(tensor) for tensor in random_inputs(50, 950, None).tensors()))
    inputs = replace(inputs, v_BSNH=torch.ones_like(inputs.v_BSNH))
    torch.manual_seed(1)
    out_BTNH = KERNELS["native"].attend(inputs, AttentionMask(None), 0.25)
    kept_BTN = out_BTNH[..., 0] * torch.arange(951, 1001)[:, None] * 0.75
    torch.testing.assert_close(kept_BTN, kept_BTN.round(), rtol=0, atol=1e-6)
    assert kept_BTN.sum() / kept_BTN.numel() == pytest.approx(0.75 * 975.5, rel=0.01)
    assert kept_BTN.std() == pytest.approx((975.5 * 0.75 * 0.25) ** 0.5, rel=0.25)  # that of independent draws


@needs_native
def test_native_operators_pass_torch_s_checks():
    """Schemas, shapes on the meta device, autograd and torch.compile's dispatch."""
    tensors = [tensor.detach().float().requires_grad_() for tensor in random_inputs(5, 7, None).tensors()]
    valid_B, stop_key_BT, seed = torch.tensor([3, 7]), torch.full((2, 5), 11), torch.tensor(5)
    arguments, sink_N = (None, stop_key_BT, seed, 0.2, 0, 1), torch.ones(HEADS, requires_grad=True)
    torch.library.opcheck(operators().attention.default, (tensors, sink_N, valid_B, *arguments))
    detached = [tensor.detach() for tensor in tensors]
    out_BTNH, lse_BNT = operators().attention(detached, None, valid_B, *arguments)
    checks = ("test_schema", "test_faketensor")  # these have no gradients
    backward = (out_BTNH, lse_BNT, detached, valid_B, *arguments)
    torch.library.opcheck(operators().attention_backward.default, backward, test_utils=checks)
    torch.library.opcheck(operators().attention_decode.default, (detached, None, valid_B, None, 0), test_utils=checks)
    dropped = (detached[0], seed, 0.2, True, None)
    torch.library.opcheck(operators().dropout.default, dropped, test_utils=checks)


@needs_native
def test_native_kernel_refuses_a_second_derivative():
    """It would be 0 without an error, as the operator of the backward pass has no gradient."""
    inputs = random_inputs(5, 7, None)
    out_BTNH = KERNELS["native"].attend(inputs, AttentionMask(None), 0.0)
    (first,) = torch.autograd.grad(out_BTNH.square().sum(), inputs.v_BSNH, create_graph=True)
    with pytest.raises(RuntimeError, match="native attention has no second derivative"):
        first.square().sum().backward()
