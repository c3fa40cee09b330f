"""A backbone as a recurrent module of TorchRL, beside its LSTMModule and GRUModule, and replay of whole windows.

    module = BackboneModule(backbone, in_key="observation", out_key="features")
    env = TransformedEnv(env, Compose(InitTracker(), module.make_tensordict_primer()))
    buffer.extend(to_windows(data, window_length))
    batch = as_steps(buffer.sample())

The memory is in the tensordict: hidden states `memory` (..., L, M, D), and `memory_valid` (...), the number of filled
slots. What the module writes for the next step is under ("next", key), as with TorchRL's own modules. Where policy and
value have a backbone each, give one of them another `memory_key`, and both keys to `to_windows` and `as_steps`.

Shape suffixes: B batch size, T steps, L layers, M memory slots, D width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from typing_extensions import override

from transformer_xl.config import UserError, check_type
from transformer_xl.config.extras import missing_extra
from transformer_xl.model.backbone import Backbone
from transformer_xl.model.memory import HiddenMemory

try:
    from tensordict import NestedKey, TensorDict, TensorDictBase
    from tensordict.nn import TensorDictModuleBase, dispatch
    from torchrl.data import Unbounded
    from torchrl.envs.transforms import TensorDictPrimer
    from torchrl.modules import recurrent_mode
except ImportError as error:
    raise missing_extra("torchrl", "rl") from error

MEMORY_KEY = "memory"


def _tensor_keys(memory_keys: Iterable[str]) -> list[str]:
    """Return the keys of all tensors of these memories."""
    check_type(memory_keys, (list, tuple), "memory_keys", "give the memory_key of each module, such as ['memory']")
    for key in memory_keys:
        check_type(key, str, "memory_key", "give a name, such as 'memory'")
    return [name for key in memory_keys for name in (key, f"{key}_valid")]


class BackboneModule(TensorDictModuleBase):
    """Reads one step of each batch row, or in recurrent mode (`set_recurrent_mode`) a window of steps.

    Single steps: the step follows the memory in the tensordict, which is empty where `is_init` is true, and the next
    memory is written. A collector runs the module in this way.

    Windows: time is the last dimension of the tensordict. A window continues the memory that is stored at its first
    step, also if `is_init` is true there, as samplers mark the start of each slice in that way; a later `is_init`
    starts an episode, with empty memory. Memories at the other steps are not read, and none is written. TorchRL's
    losses and value estimators run the module in this way.
    """

    def __init__(
        self,
        backbone: Backbone,
        *,
        in_key: NestedKey,
        out_key: NestedKey,
        memory_key: str = MEMORY_KEY,
    ) -> None:
        """Build the module.

        Args:
            backbone: the layers.
            in_key: key of their inputs.
            out_key: key of their outputs.
            memory_key: key of the hidden states in memory; the number of filled slots is under `<memory_key>_valid`.

        Raises:
            UserError: the attention window is not limited to memory_length + 1 or less, so that a window would give
                other results than its single steps, and a policy's update would begin with another policy.
        """
        super().__init__()
        check_type(backbone, Backbone, "backbone", "give a transformer_xl.Backbone")
        window, longest = backbone.context_limits.attention_window, backbone.context_limits.memory_length + 1
        if window is None or window > longest:
            raise UserError(
                f"attention_window {'none' if window is None else window} would let the steps of a window attend to "
                f"more than single steps can; give BackboneConfig(attention_window={longest}) or less"
            )
        self.backbone = backbone
        self._memory_keys = _tensor_keys([memory_key])
        self.in_keys = [in_key, *self._memory_keys, "is_init"]  # pyrefly: ignore[bad-argument-type]
        self.out_keys = [out_key, *(("next", key) for key in self._memory_keys)]  # pyrefly: ignore[bad-argument-type]

    @property
    def recurrent_mode(self) -> bool:
        """Whether windows are read instead of single steps."""
        return bool(recurrent_mode())

    def make_tensordict_primer(self) -> TensorDictPrimer:
        """Return the transform that puts an empty memory into an environment's tensordict at each reset."""
        stacked = self._empty_memory(1).stacked()
        specs = {
            key: Unbounded(shape=stacked[name].shape[1:], dtype=stacked[name].dtype)
            for key, name in zip(self._memory_keys, ("hidden", "valid"), strict=True)
        }
        return TensorDictPrimer(specs, expand_specs=True)

    def _empty_memory(self, batch_size: int) -> HiddenMemory:
        memory = self.backbone.initial_memory(batch_size)
        assert isinstance(memory, HiddenMemory)
        return memory

    @dispatch
    @override
    def forward(  # pyrefly: ignore[bad-override-mutable-attribute]
        self, tensordict: TensorDictBase
    ) -> TensorDictBase:
        """Write the outputs, and after single steps the next memory, into the tensordict and return it.

        Raises:
            UserError: the memory has another shape than the backbone's, or a window has no dimension of time.
        """
        in_key, out_key, is_windows = self.in_keys[0], self.out_keys[0], self.recurrent_mode
        if is_windows and not tensordict.ndim:
            raise UserError("in recurrent mode the last dimension of a tensordict is time, and this one has none")
        num_steps = tensordict.shape[-1] if is_windows else 1
        num_dims = tensordict.ndim

        def as_rows(key: NestedKey) -> torch.Tensor | None:
            """Return a tensor with its batch dimensions as (B, T)."""
            value = tensordict.get(key, default=None)
            return None if value is None else value.reshape(-1, num_steps, *value.shape[num_dims:])

        inputs_BTD, is_init = as_rows(in_key), as_rows("is_init")
        if inputs_BTD is None or is_init is None:
            missing = in_key if inputs_BTD is None else "is_init"
            raise UserError(
                f"the tensordict has no {missing}; InitTracker() writes is_init, the environment the inputs"
            )
        starts_BT = is_init.reshape(inputs_BTD.shape[:2])
        if is_windows:
            starts_BT = starts_BT.clone()
            starts_BT[:, 0] = False
        memory = self._empty_memory(len(inputs_BTD))
        hidden_BTLMD, valid_BT = map(as_rows, self._memory_keys)
        if (hidden_BTLMD is None) != (valid_BT is None):
            raise UserError(f"the tensordict has only one of {' and '.join(self._memory_keys)}; give both, or none")
        if hidden_BTLMD is not None and valid_BT is not None:
            valid_B = valid_BT[:, 0].reshape(-1)
            memory = memory.with_stacked({"hidden": hidden_BTLMD[:, 0], "valid": valid_B, "position": valid_B})
        out_BTD, memory = self.backbone(inputs_BTD, memory, starts=starts_BT)
        tensordict.set(out_key, out_BTD.reshape(*tensordict.shape, -1))
        if not is_windows:
            stacked = memory.stacked()
            for key, name in zip(self.out_keys[1:], ("hidden", "valid"), strict=True):
                tensordict.set(key, stacked[name].reshape((*tensordict.shape, *stacked[name].shape[1:])))
        return tensordict


def to_windows(data: TensorDictBase, window_length: int, *, memory_keys: Sequence[str] = (MEMORY_KEY,)) -> TensorDict:
    """Return collected steps as windows for a replay buffer, each with the memory at its first step only.

    Args:
        data: steps, with time as the last dimension and any dimensions before it.
        window_length: number of steps of a window.
        memory_keys: the memory_key of each module.

    Returns:
        a tensordict whose elements are the windows; the tensors of steps are (windows, steps, ...), those of the memory
        (windows, L, M, D) and (windows,).

    Raises:
        UserError: the number of steps is not a multiple of the window length, or the data have no time or no memory.
    """
    check_type(window_length, int, "window_length", "give a number of steps")
    keys = _tensor_keys(memory_keys)
    if not data.ndim or any(data.get(key, default=None) is None for key in keys):
        raise UserError(f"expected collected steps with the keys {' and '.join(keys)}, and time as the last dimension")
    num_steps = data.shape[-1]
    if window_length < 1 or num_steps % window_length:
        raise UserError(
            f"{num_steps} steps are no whole number of windows of {window_length}; collect a multiple of "
            f"{window_length} steps of each environment"
        )
    rows = cast("TensorDictBase", data.reshape(-1, num_steps))
    firsts = {key: rows[key][:, ::window_length].flatten(0, 1) for key in keys}
    steps = rows.exclude(*keys, *(("next", key) for key in keys))
    windows = cast("TensorDictBase", steps.reshape(-1, window_length))
    tensors = dict(windows.items()) | firsts
    return TensorDict(tensors, batch_size=windows.shape[:1])  # pyrefly: ignore[bad-argument-type]


def as_steps(windows: TensorDictBase, *, memory_keys: Sequence[str] = (MEMORY_KEY,)) -> TensorDict:
    """Return windows of `to_windows`, such as a replay buffer samples, with the dimensions (windows, steps).

    Each step shows the memory of the first, and what else there is one of in a window, as views of one tensor.

    Args:
        windows: the sampled windows.
        memory_keys: those given to `to_windows`.
    """
    shape, keys = windows["is_init"].shape[:2], _tensor_keys(memory_keys)

    def with_steps(key: str, value: Any) -> Any:
        if isinstance(value, TensorDictBase):
            return TensorDict(dict(value.items()), batch_size=shape)
        if key not in keys and value.shape[:2] == shape:
            return value
        return value[:, None].expand(*shape, *value.shape[1:])

    return TensorDict({key: with_steps(key, value) for key, value in windows.items()}, batch_size=shape)
