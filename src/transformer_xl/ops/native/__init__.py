"""Operators in C++ for CPUs: attention of a layer, and of few queries, all layers of few tokens, dropout, RMSNorm and
rows for n-grams.

    native.operators()     torch.ops.transformer_xl_native, or None where they are not used
    native.takes(kind)     whether dropout, RMSNorm or n-grams are computed by them here
    native.build.build()   compiles them; only `txl info --build-native` does

The package works whole without them: `ops/kernels/cpu.py` and torch compute the same. They are loaded once in a
process, when first asked for: those built on this computer, else those of the wheel. TXL_NATIVE=0 in the environment
switches them off.

`tensors` are those of `AttentionInputs`, in that order. Shape suffixes: B batch size, T queries, N heads, H head width.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock
from typing import Any, Literal

import torch
from torch import Tensor

from transformer_xl.config import UserError
from transformer_xl.ops.native import build


@dataclass(frozen=True)
class NativeStatus:
    """Whether the operators are used in this process."""

    operators: Any
    """torch.ops.transformer_xl_native, or None."""
    text: str
    """The instructions that they use, or why they are not used and what to do."""


_status: NativeStatus | None = None  # a functools.cache would make torch.compile warn
_loading = Lock()


def status() -> NativeStatus:
    """Load the operators if they were built for this torch or came in the wheel; nothing is compiled."""
    global _status
    if _status is None:
        with _loading:
            _status = _status or _load()
    return _status


def _load() -> NativeStatus:
    if os.environ.get("TXL_NATIVE") == "0":
        return NativeStatus(None, "switched off by TXL_NATIVE=0")
    if reason := build.unsupported():
        return NativeStatus(None, f"not used: {reason}")
    try:
        record = build.find_record()
        if record is not None and record.library is not None:
            library = build.library_path(record)
        elif build.IN_WHEEL.exists():
            library = build.IN_WHEEL
        elif record is None:
            return NativeStatus(None, f"not built; faster with: {build.COMMAND}")
        else:
            return NativeStatus(None, f"the build failed ({record.failure}); to try again: {build.COMMAND}")
        torch.ops.load_library(str(library))
        operators = torch.ops.transformer_xl_native
        description = operators.prepare(build.has_avx512(), True)
        if library == build.IN_WHEEL:
            description += ", from the wheel"
    except (UserError, RuntimeError) as error:
        return NativeStatus(None, f"not used: {error}")
    except OSError as error:  # torch names the file, and the linker's error, its cause, says what is missing
        return NativeStatus(None, f"not used: {error.__cause__ or error}; to build another: {build.COMMAND}")
    _register()
    return NativeStatus(operators, description)


def operators() -> Any:
    """Return torch.ops.transformer_xl_native, or None where the operators are not used."""
    return status().operators


DTYPES = (torch.float64, torch.float32, torch.bfloat16)
"""Dtypes of tensors that the operators compute with."""
NativeOrTorch = Literal["native", "torch"]
"""What computes an operator on a CPU."""

_chosen = ContextVar[dict[str, NativeOrTorch]]("chosen", default={})  # noqa: B039, never changed in place


def fastest() -> NativeOrTorch:
    """Return what is faster on this computer."""
    return "torch" if operators() is None else "native"


@contextmanager
def chosen(**kinds: NativeOrTorch) -> Iterator[None]:
    """Within this context compute `dropout`, `norm` or `ngrams` with these, if there, in place of the fastest."""
    token = _chosen.set({**_chosen.get(), **kinds})
    try:
        yield
    finally:
        _chosen.reset(token)


def takes(kind: str) -> bool:
    """Return whether the native operators compute `dropout`, `norm` or `ngrams`."""
    return _chosen.get().get(kind) != "torch" and operators() is not None


def _register() -> None:
    """Tell torch the shapes of the results, for the meta device and torch.compile, and the gradients of attention."""
    library, name = torch.library, "transformer_xl_native::attention"
    library.register_fake(name, _attention_shapes)
    library.register_fake(f"{name}_backward", _gradient_shapes)
    library.register_fake(f"{name}_decode", _like)
    library.register_fake("transformer_xl_native::dropout", _same_shape)
    library.register_fake("transformer_xl_native::ngram_rows", _rows)
    library.register_fake("transformer_xl_native::rms_norm", _normalized_shapes)
    library.register_fake("transformer_xl_native::rms_norm_backward", _norm_gradient_shapes)
    library.register_fake("transformer_xl_native::decode_layers", _states)
    library.register_autograd(name, _backward, setup_context=_save)
    library.register_autograd(f"{name}_backward", _refuse_second_derivative)


def _like(tensors: Sequence[Tensor], *_: Any) -> Tensor:
    return tensors[0].new_empty(tensors[0].shape)


def _same_shape(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _rows(ids_BS: Tensor, num_new: int, tables: Sequence[Tensor], _: float) -> Tensor:
    return tables[0].new_empty(len(ids_BS), num_new, len(tables) * tables[0].shape[1])


def _normalized_shapes(x_XH: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(x_XH.dtype, torch.float32)
    return x_XH.new_empty(x_XH.shape), x_XH.new_empty(x_XH.shape[:-1].numel(), dtype=dtype)


def _norm_gradient_shapes(_dout: Tensor, x_XH: Tensor, weight_H: Tensor, _factor: Tensor) -> tuple[Tensor, Tensor]:
    return x_XH.new_empty(x_XH.shape), weight_H.new_empty(weight_H.shape)


def _states(x_BTD: Tensor, *arguments: Any) -> Tensor:
    keys = arguments[4]
    return x_BTD.new_empty(len(keys), *x_BTD.shape)


def _attention_shapes(tensors: Sequence[Tensor], *_: Any) -> tuple[Tensor, Tensor]:
    batch_size, num_queries, num_heads, _d_head = tensors[0].shape
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return _like(tensors), tensors[0].new_empty(batch_size, num_heads, num_queries, dtype=dtype)


def _gradient_shapes(_dout: Tensor, _lse: Tensor, tensors: Sequence[Tensor], *_: Any) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in tensors]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, sink_N, *masks_and_seed, ctx.dropout, ctx.num_clamped, ctx.num_later = inputs
    out_BTNH = None if sink_N is None else output[0]
    ctx.save_for_backward(sink_N, out_BTNH, output[1], *masks_and_seed, *tensors)


def sink_gradient(sink_N: Tensor, lse_BNT: Tensor, out_BTNH: Tensor, dout_BTNH: Tensor) -> Tensor:
    """Return the gradient of sinks, whose exponentials are in the sums that `lse_BNT` is the logarithm of."""
    delta_BNT = (out_BTNH.to(sink_N.dtype) * dout_BTNH.to(sink_N.dtype)).sum(-1).transpose(1, 2)
    return -((sink_N[:, None] - lse_BNT).exp() * delta_BNT).sum((0, 2))


def _refuse_second_derivative(*_: Any) -> None:
    raise RuntimeError("native attention has no second derivative; use 'reference' or 'sdpa' as implementation")


def _backward(ctx: Any, dout_BTNH: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    sink_N, out_BTNH, lse_BNT, valid_B, first_key_BT, stop_key_BT, seed, *tensors = ctx.saved_tensors
    numbers = (ctx.dropout, ctx.num_clamped, ctx.num_later)
    arguments = (dout_BTNH, lse_BNT, tensors, valid_B, first_key_BT, stop_key_BT, seed, *numbers)
    dsink_N = None if sink_N is None else sink_gradient(sink_N, lse_BNT, out_BTNH, dout_BTNH)
    return torch.ops.transformer_xl_native.attention_backward(*arguments), dsink_N, *[None] * 7
