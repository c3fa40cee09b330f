"""Every kernel gives the oracle's numbers, outputs and gradients alike."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from reference import Case, attention
from tensors import assert_same_tensors, named_gradients

from transformer_xl.config import UserError
from transformer_xl.model.kernels import KERNELS, AttentionInputs, AttentionMask, choose
from transformer_xl.model.kernels.reference import attention_terms, weighted_values

ROWS, HEADS, WIDTH = 2, 3, 5
ON_CPU = [name for name, kernel in KERNELS.items() if kernel.fits(torch.device("cpu"), torch.float64)]

# T, M, valid slots of each row, window
CASES = {
    "memory as long as the segment": (5, 5, [5, 5], None),
    "no memory": (7, 0, [0, 0], None),
    "one query": (1, 7, [7, 7], None),
    "one query, no memory": (1, 0, [0, 0], None),
    "memory shorter than the segment": (7, 3, [3, 3], None),
    "memory longer than the segment": (3, 11, [11, 11], None),
    "partly valid": (5, 7, [0, 4], None),
    "window within the segment": (7, 5, [5, 5], 3),
    "window across the memory": (5, 7, [7, 7], 6),
    "window of one: only itself": (5, 3, [3, 3], 1),
    "window beyond all keys": (5, 3, [3, 3], 100),
    "window and partly valid": (5, 7, [2, 7], 4),
}


def draw(num_queries: int, num_memory: int, window: int | None) -> AttentionInputs:
    generator = torch.Generator().manual_seed(11)
    num_keys = num_queries + num_memory
    num_distances = min(num_keys, window or num_keys)
    shapes = [
        (ROWS, num_queries, HEADS, WIDTH), (ROWS, num_keys, HEADS, WIDTH), (ROWS, num_keys, HEADS, WIDTH),
        (num_distances, HEADS, WIDTH), (HEADS, WIDTH), (HEADS, WIDTH),
    ]  # fmt: skip
    return AttentionInputs(*(torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes))


def by_name(inputs: AttentionInputs) -> dict[str, torch.Tensor]:
    return {name: getattr(inputs, name) for name in AttentionInputs.__dataclass_fields__}


def with_gradients(out_BTNH: torch.Tensor, inputs: AttentionInputs, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output, and the gradients of the loss by the inputs' names."""
    return {"output": out_BTNH, **named_gradients(loss, by_name(inputs))}


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_oracle(name, case):
    num_queries, num_memory, valid, window = CASES[case]
    inputs = draw(num_queries, num_memory, window)
    mask = AttentionMask(torch.tensor(valid))
    weight = torch.randn(ROWS, num_queries, HEADS, WIDTH, dtype=torch.float64)

    wanted = attention(*by_name(inputs).values(), Case(valid, window))
    found = KERNELS[name].attend(inputs, mask, 0.0)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    grads = (named_gradients((out * weight).sum(), by_name(inputs)) for out in (found, wanted))
    assert_same_tensors(*grads, atol=1e-11)


@pytest.mark.parametrize("valid", [None, [0, 4], [7, 1]])
@pytest.mark.parametrize("window", [None, 4, 1])
@pytest.mark.parametrize(
    "sizes", [{"_BLOCK_QUERIES": 2}, {"_BLOCK_QUERIES": 3, "_BUFFER_BYTES": 1}, {"_BUFFER_BYTES": 1}]
)
def test_cpu_kernel_in_blocks(monkeypatch, valid, window, sizes):
    """Rows, heads and queries share buffers: nothing of one block may show in the next."""
    inputs, mask = draw(5, 7, window), AttentionMask(None if valid is None else torch.tensor(valid))
    weight_BTNH = torch.randn(ROWS, 5, HEADS, WIDTH, dtype=torch.float64)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    for name, size in sizes.items():
        monkeypatch.setattr(f"transformer_xl.model.kernels.cpu.{name}", size)
    results = []
    for name in ("cpu", "reference"):
        out_BTNH = KERNELS[name].attend(inputs, mask, 0.0)
        results.append(with_gradients(out_BTNH, inputs, (out_BTNH * weight_BTNH).sum()))
    assert_same_tensors(*results, atol=1e-11)


@pytest.mark.parametrize("sizes", [{}, {"_BLOCK_QUERIES": 2, "_BUFFER_BYTES": 1}])
def test_cpu_kernel_drops_the_same_in_both_passes(monkeypatch, sizes):
    """What is dropped is read out, as the output is linear in the values; output and gradients are then those of a
    softmax times that mask."""
    for name, size in sizes.items():
        monkeypatch.setattr(f"transformer_xl.model.kernels.cpu.{name}", size)
    share, num_queries, num_keys = 0.4, 5, 12
    inputs = draw(num_queries, num_keys - num_queries, None)
    weight_BTNH = torch.randn(ROWS, num_queries, HEADS, WIDTH, dtype=torch.float64)

    def attend(given, seed):
        torch.manual_seed(seed)
        return KERNELS["cpu"].attend(given, AttentionMask(None), share)

    kept_BNTS = torch.zeros(ROWS, HEADS, num_queries, num_keys, dtype=torch.float64)
    for key in range(num_keys):
        v_BSNH = torch.zeros_like(inputs.v_BSNH)
        v_BSNH[:, key] = 1
        kept_BNTS[..., key] = attend(replace(inputs, v_BSNH=v_BSNH), 3)[..., 0].transpose(1, 2).detach()
    p_BNTS = attention_terms(inputs, AttentionMask(None)).probabilities_BNTS
    seen_BNTS = p_BNTS > 0
    mask_BNTS = (kept_BNTS / p_BNTS.where(seen_BNTS, 1.0) * (1 - share)).detach()
    torch.testing.assert_close(mask_BNTS, mask_BNTS.round(), rtol=0, atol=1e-9)
    assert 0.45 < mask_BNTS[seen_BNTS].mean() < 0.75
    wanted = torch.einsum("bnts,bsnh->btnh", p_BNTS * mask_BNTS.round() / (1 - share), inputs.v_BSNH)
    found = attend(inputs, 3)
    results = (with_gradients(out, inputs, (out * weight_BTNH).sum()) for out in (found, wanted))
    assert_same_tensors(*results, atol=1e-11)
    assert not torch.equal(attend(inputs, 4), found)


def test_cpu_kernel_keeps_its_inputs_only():
    """Nothing of size T x S is kept for the backward pass, with dropout neither."""
    inputs, kept = draw(5, 200, None), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        KERNELS["cpu"].attend(inputs, AttentionMask(None), 0.1).sum()
    assert sum(t.numel() for t in kept) == sum(t.numel() for t in by_name(inputs).values()) + 1  # and the seed


@pytest.mark.parametrize("name", ON_CPU)
def test_all_valid_needs_no_mask(name):
    inputs = draw(5, 7, None)
    masked = KERNELS[name].attend(inputs, AttentionMask(torch.tensor([7, 7])), 0.0)
    unmasked = KERNELS[name].attend(inputs, AttentionMask(None), 0.0)
    torch.testing.assert_close(masked, unmasked, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ON_CPU)
def test_without_gradient_the_numbers_are_the_same(name):
    """Without a gradient torch takes another, fused, path."""
    inputs, mask = draw(5, 7, 9), AttentionMask(torch.tensor([2, 7]))
    wanted = KERNELS[name].attend(inputs, mask, 0.0)
    with torch.no_grad():
        torch.testing.assert_close(KERNELS[name].attend(inputs, mask, 0.0), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ON_CPU)
def test_bfloat16_is_as_exact_as_plain_bfloat16(name):
    """The error of output and gradients against float64 is at most twice that of the reference in bfloat16."""
    exact = low_numbers("reference", torch.float64)
    plain = low_numbers("reference", torch.bfloat16)
    found = low_numbers(name, torch.bfloat16)
    for field, right in exact.items():
        assert (found[field] - right).norm() <= 2 * (plain[field] - right).norm(), field


def low_numbers(name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Output and gradients of a kernel in a dtype, as float64, on inputs that make attention sharp."""
    drawn = by_name(draw(17, 31, None)).values()
    inputs = AttentionInputs(*((2 * tensor.detach()).to(dtype).requires_grad_() for tensor in drawn))
    out_BTNH = KERNELS[name].attend(inputs, AttentionMask(torch.tensor([31, 5])), 0.0)
    weight_BTNH = torch.randn(out_BTNH.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    found = with_gradients(out_BTNH, inputs, (out_BTNH * weight_BTNH).sum())
    return {name: tensor.detach().double() for name, tensor in found.items()}


@pytest.mark.parametrize("name", ON_CPU)
def test_dropout_drops_probabilities_and_keeps_the_mean(name):
    inputs, mask = draw(5, 7, None), AttentionMask(None)
    many = replace(
        inputs, **{name: getattr(inputs, name)[:1].repeat(3000, 1, 1, 1) for name in ("q_BTNH", "k_BSNH", "v_BSNH")}
    )
    torch.manual_seed(5)
    with torch.no_grad():
        dropped_BTNH = KERNELS[name].attend(many, mask, 0.5)
        torch.testing.assert_close(dropped_BTNH.mean(0), KERNELS[name].attend(inputs, mask, 0.0)[0], rtol=0, atol=0.12)
        assert not torch.equal(dropped_BTNH[0], dropped_BTNH[1])


def test_terms_add_up_and_probabilities_sum_to_one():
    inputs, mask = draw(5, 7, None), AttentionMask(torch.tensor([3, 7]))
    terms = attention_terms(inputs, mask)
    assert (terms.probabilities_BNTS[0, :, :, :4] == 0).all()
    torch.testing.assert_close(terms.probabilities_BNTS.sum(-1), torch.ones(ROWS, HEADS, 5, dtype=torch.float64))
    score_BNTS = terms.content_BNTS + terms.position_BNTS + terms.content_bias_BNTS + terms.position_bias_BNTS
    seen_BNTS = terms.probabilities_BNTS > 0
    again_BNTS = score_BNTS.masked_fill(~seen_BNTS, -torch.inf).softmax(-1)
    torch.testing.assert_close(again_BNTS, terms.probabilities_BNTS)
    attended_BTNH = weighted_values(terms, inputs.v_BSNH)
    torch.testing.assert_close(attended_BTNH, KERNELS["sdpa"].attend(inputs, mask, 0.0))


def test_choice():
    cpu = torch.device("cpu")
    assert choose("auto", cpu, torch.float32).name == "cpu"
    assert choose("auto", torch.device("cuda"), torch.float32).name == ("triton" if find_spec("triton") else "sdpa")
    assert choose("auto", torch.device("cuda"), torch.float64).name == "sdpa"
    assert choose("auto", cpu, torch.complex64).name == "reference"
    assert choose("reference", cpu, torch.float32).name == "reference"
    with pytest.raises(UserError, match="did you mean 'sdpa'"):
        choose("spda", cpu, torch.float32)
    with pytest.raises(UserError, match=r"does not work with torch\.complex64"):
        choose("sdpa", cpu, torch.complex64)
    with pytest.raises(UserError, match=r"'triton' (does not work with torch\.float32 on cpu|needs Triton)"):
        choose("triton", cpu, torch.float32)


@pytest.mark.parametrize("valid", [None, [0, 4]])
@pytest.mark.parametrize("least", [0, 10**9])
def test_cpu_kernel_without_gradients(monkeypatch, valid, least):
    """Whichever way few scores go."""
    monkeypatch.setattr("transformer_xl.model.kernels.cpu._MIN_BLOCK_SCORES", least)
    inputs, mask = draw(5, 7, 6), AttentionMask(None if valid is None else torch.tensor(valid))
    with torch.inference_mode():
        found = KERNELS["cpu"].attend(inputs, mask, 0.0)
    torch.testing.assert_close(found.clone(), KERNELS["reference"].attend(inputs, mask, 0.0), rtol=0, atol=1e-12)
    KERNELS["cpu"].attend(inputs, mask, 0.0).sum().backward()  # buffers made in inference mode can still be written


MASKS = {
    "three share": (AttentionMask(None, 3), 5),
    "padding": (AttentionMask(torch.tensor([4, -3])), None),
    "padding and window": (AttentionMask(torch.tensor([-5, 2])), 4),
    "share, partly valid": (AttentionMask(torch.tensor([1, 6]), 4), 3),
    "all share": (AttentionMask(None, 11), 1),
}


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("case", MASKS)
@pytest.mark.parametrize("layout", ["rows", "heads", "columns"])
@pytest.mark.parametrize(
    "sizes", [{}, {"_BLOCK_QUERIES": 2, "_MIN_BLOCK_SCORES": 0}, {"_BUFFER_BYTES": 1, "_MIN_BLOCK_SCORES": 0}]
)
def test_shared_distances_padding_and_layouts(monkeypatch, name, case, layout, sizes):
    """Against every distance written out and every query by itself: outputs, and gradients where they are wanted."""
    mask, window = MASKS[case]
    for what, size in sizes.items():
        monkeypatch.setattr(f"transformer_xl.model.kernels.cpu.{what}", size)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    inputs = draw(5, 7, window)
    written = torch.cat([inputs.position_key_PNH[:1].expand(mask.beyond, -1, -1), inputs.position_key_PNH])
    valid = [7, 7] if mask.valid_B is None else mask.valid_B.tolist()
    own_BT = torch.tensor([[query >= -count for query in range(5)] for count in valid])
    given = replace(inputs, position_key_PNH=written)
    wanted = torch.stack(
        [
            torch.cat([
                attention(*row_of(given, row, query), Case([min(valid[row] + query, 7 + query)]))[0]
                if own_BT[row, query] else torch.zeros(1, HEADS, WIDTH, dtype=torch.float64)
                for query in range(5)
            ])
            for row in range(ROWS)
        ]
    )  # fmt: skip
    laid = replace(inputs, **{key: LAYOUTS[layout](getattr(inputs, key)) for key in ("k_BSNH", "v_BSNH")})
    laid = replace(laid, position_key_PNH=LAYOUTS[layout](inputs.position_key_PNH[None])[0])
    with torch.inference_mode():
        without = KERNELS[name].attend(laid, mask, 0.0)
    found = KERNELS[name].attend(laid, mask, 0.0)
    for out in (without.clone(), found):
        assert out.isfinite().all()
        torch.testing.assert_close(out[own_BT], wanted[own_BT], rtol=0, atol=1e-12)
    grads = (named_gradients((out[own_BT] ** 2).sum(), by_name(inputs)) for out in (found, wanted))
    assert_same_tensors(*grads, atol=1e-11)


LAYOUTS = {
    "rows": lambda x_BXNH: x_BXNH,
    "heads": lambda x_BXNH: x_BXNH.transpose(1, 2).contiguous().transpose(1, 2),
    "columns": lambda x_BXNH: x_BXNH.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
}


def row_of(inputs: AttentionInputs, row: int, query: int) -> list[torch.Tensor]:
    """One query of one row, with the keys up to its own that are not too far."""
    num_keys = 7 + query + 1
    farthest = len(inputs.position_key_PNH)
    seen = max(num_keys - farthest, 0)
    one = slice(row, row + 1)
    return [
        inputs.q_BTNH[one, query : query + 1], inputs.k_BSNH[one, seen:num_keys], inputs.v_BSNH[one, seen:num_keys],
        inputs.position_key_PNH[farthest - (num_keys - seen) :], inputs.content_bias_NH, inputs.position_bias_NH,
    ]  # fmt: skip


def test_cpu_kernel_drops_the_same_with_any_number_of_threads(monkeypatch):
    """Threads decide how many heads are worked on at once, also between the passes."""
    inputs, results = draw(5, 7, None), []
    monkeypatch.setattr("transformer_xl.model.kernels.cpu._BUFFER_BYTES", 1)
    for forward, backward in ((1, 1), (3, 3), (1, 3)):
        monkeypatch.setattr("torch.get_num_threads", lambda threads=forward: threads)
        torch.manual_seed(3)
        out_BTNH = KERNELS["cpu"].attend(inputs, AttentionMask(None), 0.4)
        monkeypatch.setattr("torch.get_num_threads", lambda threads=backward: threads)
        results.append(with_gradients(out_BTNH, inputs, out_BTNH.pow(2).sum()))
    for other in results[1:]:
        assert_same_tensors(other, results[0], atol=1e-12)
