"""`relative_attention` on plain tensors equals loops over queries and keys, in outputs and gradients.

Shape suffixes: B batch size, T queries, M memory slots, S = M + T keys, P distances, N heads, H head width.
"""

import math
import random

import numpy as np
import pytest
import torch
from native_operators import NATIVE
from tensors import assert_same_tensors, named_gradients
from torch._subclasses.fake_tensor import FakeTensorMode

from transformer_xl.config import UserError
from transformer_xl.ops import SegmentTerm, relative_attention
from transformer_xl.ops.kernels import KERNELS, AttentionInputs, AttentionMask
from transformer_xl.ops.native import operators

NUM_CASES = 400
with pytest.MonkeyPatch.context() as patch:
    if not torch.cuda.is_available():
        patch.setenv("TRITON_INTERPRET", "1")  # Triton's interpreter runs on the CPU; where there is a GPU, it compiles
    ON_CPU = [
        NATIVE if name == "native" else name
        for name, kernel in KERNELS.items()
        if name == "native" or kernel.fits(torch.device("cpu"), torch.float64)
    ]


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def random_case(seed: int) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """Return tensors by name, and the other arguments."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, queries, memory = draw.randint(1, 3), draw.randint(1, 9), draw.choice([0, 0, 1, 4, 7])
    heads, width, keys = draw.randint(1, 2), draw.randint(1, 5), queries + memory
    options: dict[str, object] = {"causal": draw.random() < 0.3}
    shapes = {
        "q": (batch, queries, heads, width), "k": (batch, keys, heads, width), "v": (batch, keys, heads, width),
        "r": (keys + (0 if options["causal"] else queries - 1), heads, width),
        "content_bias": (heads, width), "position_bias": (heads, width),
    }  # fmt: skip
    integer = np.int64 if seed % 2 else int
    if draw.random() < 0.5:
        sides = draw.choice([None, 0, 1, 3, 20]), draw.choice([None, 0, 1, 2, 20])
        options["window"] = tuple(None if side is None else integer(side) for side in sides)
    if draw.random() < 0.3:
        options["chunk_size"] = integer(draw.randint(1, 6))
    if draw.random() < 0.5:
        # by another generator, so that the other arguments of a seed are those they were
        name = random.Random(seed + NUM_CASES).choice(["lengths", "lengths", "key_lengths"])
        options[name] = torch.tensor([draw.randint(0, queries) for _ in range(batch)])
    if draw.random() < 0.3:
        sizes = (draw.choice([1, batch]), draw.choice([1, heads]), queries, keys)
        options["mask"] = torch.rand(sizes, generator=generator) < 0.6
    if draw.random() < 0.3:
        options["scale"] = draw.choice([1.0, 0.3])
    tensors = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for name, shape in shapes.items()
    }
    if draw.random() < 0.3:
        sizes = {"embedding": (2, heads, width), "bias": (heads, width)}
        for name, shape in sizes.items():
            tensors[name] = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        ids = torch.randint(3, (batch, keys), generator=generator)
        options["ids"] = ids
    return tensors, options


def attended_keys(options, row, head, query, num_queries, num_memory):
    """Return the keys that a query attends to."""
    place, keys = num_memory + query, []
    left, right = options.get("window", (None, None))
    lengths = options.get("lengths", options.get("key_lengths"))
    length = num_queries if lengths is None else int(lengths[row])
    if "lengths" in options and query >= length:
        return []
    chunk = options.get("chunk_size")
    low = high = place
    if chunk:
        low = num_memory + query // chunk * chunk
        high = low + chunk - 1
    for key in range(num_memory + length):
        if options["causal"] and key > place:
            continue
        if (left is not None and key < low - left) or (right is not None and key > high + right):
            continue
        if "mask" in options:
            mask = options["mask"]
            if not mask[row % mask.shape[0], head % mask.shape[1], query, key]:
                continue
        keys.append(key)
    return keys


def by_loops(tensors, options, kept=None):
    """Return the output (B, T, N, H); `kept` is 0 or 1 / (1 - dropout) for each probability (B, N, T, S)."""
    q, k, v, r, u, w = (tensors[name] for name in ("q", "k", "v", "r", "content_bias", "position_bias"))
    (batch, queries, heads, width), keys = q.shape, k.shape[1]
    scale = options.get("scale", 1 / math.sqrt(width))
    rows = []
    for row in range(batch):
        for query in range(queries):
            for head in range(heads):
                scores, places = [], attended_keys(options, row, head, query, queries, keys - queries)
                for key in places:
                    position = r[keys - 1 - (keys - queries + query - key), head]  # of distance keys - 1 first
                    score = (q[row, query, head] + u[head]) @ k[row, key, head]
                    score = score + (q[row, query, head] + w[head]) @ position
                    if "ids" in options:
                        ids = options["ids"][row]
                        other = int(ids[keys - queries + query] != ids[key])
                        score = (
                            score + (q[row, query, head] + tensors["bias"][head]) @ tensors["embedding"][other, head]
                        )
                    scores.append(score * scale)
                out = torch.zeros(width, dtype=torch.float64)
                if scores:
                    p = torch.stack(scores).exp()
                    p = p / p.sum()
                    if kept is not None:
                        p = p * kept[row, head, query, places]
                    out = p @ v[row, places, head]
                rows.append(out)
    return torch.stack(rows).view(batch, queries, heads, width)


def by_kernel(tensors, options, name, dropout=0.0):
    given = {key: value for key, value in options.items() if key != "ids"}
    if "ids" in options:
        num_queries = tensors["q"].shape[1]
        ids = options["ids"]
        given["segments"] = SegmentTerm(
            ids[:, ids.shape[1] - num_queries :], ids, tensors["embedding"], tensors["bias"]
        )
    names = ("q", "k", "v", "r", "content_bias", "position_bias")
    return relative_attention(*(tensors[name] for name in names), **given, dropout=dropout, implementation=name)


def kernels_of(seed):
    """Return the names of the kernels that compute a case; Triton's interpreter is slow, so it has one of 14."""
    names = [name if isinstance(name, str) else "native" for name in ON_CPU]
    return [
        name for name in names if (name != "native" or operators() is not None) and (name != "triton" or not seed % 14)
    ]


@pytest.mark.parametrize("tenth", range(10))
def test_equals_loops(tenth, interpreted):
    """All kernels, as the loops take longest."""
    for seed in range(tenth * NUM_CASES // 10, (tenth + 1) * NUM_CASES // 10):
        tensors, options = random_case(seed)
        expected = by_loops(tensors, options)
        weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        has_gradients = expected.requires_grad  # none if nothing is attended
        gradients = named_gradients((expected * weight).sum(), tensors) if has_gradients else {}
        for name in kernels_of(seed):
            what = f"{name}, seed {seed}: {options}"
            actual = by_kernel(tensors, options, name)
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12, msg=lambda text, w=what: f"{text}\n{w}")
            with torch.inference_mode():
                torch.testing.assert_close(by_kernel(tensors, options, name), expected.detach(), rtol=0, atol=1e-12)
            if not has_gradients:
                assert not actual.any(), what
                continue
            assert_same_tensors(named_gradients((actual * weight).sum(), tensors), gradients, atol=1e-11)


@pytest.mark.parametrize("name", [name for name in ON_CPU if name != "triton"])  # test_triton.py does it in tiles
def test_dropout_is_that_of_one_mask_in_both_passes(name):
    """One-hot values reveal the mask, because the output is linear in the values."""
    for seed in range(40):
        tensors, options = random_case(seed)
        num_keys, width = tensors["k"].shape[1], tensors["q"].shape[-1]

        def attend(values, seed=seed, tensors=tensors, options=options):
            torch.manual_seed(seed)
            return by_kernel({**tensors, "v": values}, options, name, dropout=0.4)

        columns = []
        for key in range(num_keys):
            one_hot = torch.zeros_like(tensors["v"])
            one_hot[:, key] = 1
            columns.append(attend(one_hot)[..., 0].transpose(1, 2).detach())
        dropped = torch.stack(columns, -1)
        eye = torch.eye(num_keys, dtype=torch.float64)
        whole = []
        for key in range(num_keys):
            values = eye[key][None, :, None, None].expand(tensors["v"].shape)
            whole.append(by_loops({**tensors, "v": values}, options)[..., 0].transpose(1, 2).detach())
        p = torch.stack(whole, -1)
        kept = torch.where(p > 0, dropped / p.where(p > 0, 1), 0)
        torch.testing.assert_close(kept * 0.6, (kept * 0.6).round(), rtol=0, atol=1e-8)
        expected, actual = by_loops(tensors, options, kept), attend(tensors["v"])
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)
        if expected.requires_grad:
            weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            gradients = (named_gradients((out * weight).sum(), tensors) for out in (actual, expected))
            assert_same_tensors(*gradients, atol=1e-10)
        assert width


# T, M, H, options; several blocks of queries, of which some attend to nothing
LARGE = {
    "all": (131, 0, 7, {}),
    "all, memory": (300, 70, 8, {"lengths": [300, 64, 1]}),
    "all, smaller blocks": (70, 2100, 4, {"lengths": [70, 0, 33]}),
    "band": (300, 0, 8, {"window": (37, 90)}),
    "band, memory, lengths": (131, 257, 6, {"window": (70, 3), "lengths": [130, 1, 65]}),
    "narrow band": (300, 0, 5, {"window": (2, 1), "lengths": [3, 300, 200]}),
    "band after": (131, 5, 8, {"window": (0, 100)}),
    "chunks": (300, 20, 8, {"window": (60, 0), "chunk_size": 50}),
    "chunks, lengths": (131, 0, 3, {"window": (None, 7), "chunk_size": 17, "lengths": [131, 20, 64]}),
    "causal, lengths": (131, 90, 8, {"causal": True, "lengths": [131, 0, 100]}),
}


def results_of(case, name, dtype, dropout=0.0, move=0.0):
    """Return the output and the gradients of a weighted sum of it, in float64, and the derivative in a direction.

    Inputs are moved in that direction by `move`; numbers fit bfloat16, for the same in each dtype, unless moved.
    """
    num_queries, num_memory, width, options = LARGE[case]
    num_keys, generator = num_queries + num_memory, torch.Generator().manual_seed(3)
    after = 0 if options.get("causal") else num_queries - 1
    shapes = {
        "q": (3, num_queries, 2, width), "k": (3, num_keys, 2, width), "v": (3, num_keys, 2, width),
        "r": (num_keys + after, 2, width), "content_bias": (2, width), "position_bias": (2, width),
    }  # fmt: skip
    tensors, directions = (
        {key: torch.randn(shape, generator=generator).bfloat16().double() for key, shape in shapes.items()}
        for _ in range(2)
    )
    weight = torch.randn(shapes["q"], generator=generator).bfloat16().to(dtype)
    moved = {key: (tensor + move * directions[key]).to(dtype).requires_grad_() for key, tensor in tensors.items()}
    torch.manual_seed(5)
    out = by_kernel(moved, {"causal": False, **options}, name, dropout)
    results = {"output": out, **named_gradients((out * weight).sum(), moved)}
    results = {key: tensor.detach().double() for key, tensor in results.items()}
    return results, (results["output"] * weight).sum(), sum((results[key] * directions[key]).sum() for key in shapes)


@pytest.mark.parametrize("name", [NATIVE, "cpu"])
@pytest.mark.parametrize("case", LARGE)
def test_several_blocks_equal_the_reference_kernel(case, name):
    """Relative errors: rounding in float64, 1e-5 in float32, in bfloat16 a rounding and twice the reference's."""
    expected = results_of(case, "reference", torch.float64)[0]
    in_bfloat16 = results_of(case, "reference", torch.bfloat16)[0]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for key, tensor in results_of(case, name, dtype)[0].items():
            error, size = (tensor - expected[key]).norm(), expected[key].norm()
            if dtype == torch.bfloat16:
                assert error <= 2 * (in_bfloat16[key] - expected[key]).norm() + size / 256, key
            else:
                assert error <= (1e-13 if dtype == torch.float64 else 1e-5) * size, (key, dtype)


@pytest.mark.parametrize("name", [NATIVE, "cpu"])
@pytest.mark.parametrize("case", LARGE)
def test_gradients_with_dropout_are_those_of_finite_differences_over_several_blocks(case, name):
    (_, below, _), (_, above, _) = (results_of(case, name, torch.float64, 0.3, move) for move in (-1e-5, 1e-5))
    _, value, derivative = results_of(case, name, torch.float64, 0.3)
    assert float(above - below) / 2e-5 == pytest.approx(float(derivative), rel=1e-6)
    assert value != results_of(case, name, torch.float64)[1]


@pytest.mark.parametrize("name", ON_CPU)
def test_queries_without_keys_spoil_nothing(name, interpreted):
    """Whose stop lies before their band: the output is finite, and all gradients are those of the other queries."""
    generator, results = torch.Generator().manual_seed(3), []
    shapes = [*[(1, 300, 2, 5)] * 3, (3, 2, 5), (2, 5), (2, 5)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    mask = AttentionMask(None, num_later=1, stop_key_BT=torch.full((1, 300), 3))
    for kernel in (name, "reference"):
        out_BTNH = KERNELS[kernel].attend(AttentionInputs(*tensors), mask, 0.0)
        assert out_BTNH.isfinite().all()
        results.append(torch.autograd.grad(out_BTNH[:, :4].square().sum(), tensors))
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


GOOD = {
    "q": (2, 5, 3, 4), "k": (2, 7, 3, 4), "v": (2, 7, 3, 4), "r": (11, 3, 4), "content_bias": (3, 4),
    "position_bias": (3, 4),
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({"r": (7, 3, 4)}, {}, r"r has shape \(7, 3, 4\); give .* P = 11: .* from 6 down to -4"),
        ({"r": (11, 3, 4)}, {"causal": True}, r"P = 7: "),
        ({"r": (8, 3, 4)}, {"window": (3, 2)}, r"P = 11 or 6: .* within the window, from 3 to -2"),
        ({"k": (2, 4, 3, 4), "v": (2, 4, 3, 4)}, {}, "4 keys for 5 queries"),
        ({"v": (2, 6, 3, 4)}, {}, r"v has shape \(2, 6, 3, 4\); q and k need \(2, 7, 3, 4\)"),
        ({"content_bias": (4, 3)}, {}, r"content_bias has shape \(4, 3\)"),
        ({"q": (2, 5, 12)}, {}, r"q is \(2, 5, 12\); give a tensor \(B, T, N, H\)"),
        ({}, {"lengths": [5, 6]}, r"lengths=\[5, 6\]: must be from 0 to the number of queries, 5"),
        ({}, {"lengths": [5]}, "lengths are torch.int64 .1,.; give an integer for each batch row"),
        ({}, {"lengths": [5.0, 5.0]}, "lengths are torch.float32"),
        ({}, {"lengths": [None, 5]}, r"lengths=\[None, 5\]: give an integer for each batch row"),
        ({}, {"lengths": torch.tensor([5, 6], dtype=torch.uint16)}, r"lengths=\[5, 6\]: must be from 0"),
        ({}, {"key_lengths": [5, 6]}, r"key_lengths=\[5, 6\]: must be from 0"),
        ({}, {"key_lengths": [5, 5], "lengths": [5, 5]}, "lengths and key_lengths: give one"),
        ({}, {"mask": torch.ones(2, 7, 5, dtype=torch.bool)}, r"mask is torch.bool \(2, 7, 5\).* \(2, 3, 5, 7\)"),
        ({}, {"mask": torch.zeros(5, 7)}, "mask is torch.float32"),
        ({}, {"mask": [[True]]}, "mask is a list; give a bool tensor"),
        ({}, {"window": (-1, 2)}, "-1 keys before a query would leave it nothing"),
        ({}, {"window": (2, -1)}, "-1 keys after a query would leave it nothing"),
        ({}, {"window": (2,)}, r"window=\(2,\): give two integers"),
        ({}, {"window": 2}, "window=2: give two integers"),
        ({}, {"window": (1.5, 2)}, r"window=\(1.5, 2\): give two integers"),
        ({}, {"chunk_size": 0}, "chunk_size=0: must be an integer, 1 or more"),
        ({}, {"window": (True, 2)}, r"window=\(True, 2\): give two integers"),
        ({}, {"chunk_size": True}, "chunk_size=True: must be an integer"),
        ({}, {"chunk_size": 2.0}, "chunk_size=2.0: must be an integer"),
        ({}, {"dropout": 1.0}, "dropout=1: give a probability"),
        ({}, {"scale": float("nan")}, "scale=nan: give a finite number"),
        ({}, {"implementation": "spda"}, "did you mean 'sdpa'"),
    ],
)
def test_bad_input_gets_one_clear_line(changed, options, message):
    tensors = [torch.randn(shape) for shape in (GOOD | changed).values()]
    with pytest.raises(UserError, match=message):
        relative_attention(*tensors, **{"causal": False, **options})


def test_other_dtype_is_refused():
    tensors = [torch.randn(shape) for shape in GOOD.values()]
    tensors[3] = tensors[3].double()
    with pytest.raises(UserError, match=r"r is torch\.float64 on cpu, but q torch\.float32 on cpu"):
        relative_attention(*tensors, causal=False)


@pytest.mark.parametrize("name", ["sdpa", "reference"])
def test_output_has_the_dtype_of_q_under_autocast(name):
    tensors = [torch.randn(shape) for shape in GOOD.values()]
    with torch.autocast("cpu", torch.bfloat16):
        assert relative_attention(*tensors, causal=False, implementation=name).dtype == torch.float32


@pytest.mark.parametrize("mode", [torch.device("meta"), FakeTensorMode()], ids=["meta", "fake"])
def test_lengths_without_values(mode):
    with mode:
        tensors = [torch.empty(shape) for shape in GOOD.values()]
        for lengths in ([5, 3], torch.empty(2, dtype=torch.int64)):
            out = relative_attention(*tensors, causal=False, lengths=lengths)
            assert out.shape == tensors[0].shape
            assert out.device == tensors[0].device
