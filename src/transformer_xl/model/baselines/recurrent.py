"""LSTM and QRNN language models: each layer goes on from a state of fixed size, however much was read.

LSTM (Hochreiter & Schmidhuber 1997, with forget gates by Gers et al. 2000):

    i, f, z, o = gates(W x_t + U h_(t-1) + b)     c_t = f * c_(t-1) + i * z     h_t = o * tanh(c_t)

QRNN with fo-pooling (Bradbury et al. 2017), whose gates see inputs alone, this one or the one before as well:

    z, f, o = gates(W [x_(t-1) ; x_t] + b)        c_t = f * c_(t-1) + (1 - f) * z     h_t = o * c_t

z is a tanh, the others are sigmoids. All of a QRNN but a linear recurrence happens for all places at once, and that
recurrence without a loop (`scan.py`). Zoneout (Krueger et al. 2017) lets f be 1 here and there in training.

Where we differ: an LSTM has one bias where torch has two that only ever add up; forget gates begin with bias 1, so that
a new model remembers. Dropout is the plain one, on the embedding and on the output of every layer. No LayerNorm brings
small numbers back to size here, so first weights do not make them small: numbers that go in have variance 1, and gates
get that from them. With Transformer-XL's first weights three layers took several times as long to begin to learn.

Letters: B rows, T new tokens, D model width, X rows of a state: h and c of an LSTM; c of a QRNN and the inputs that its
gates still need; W inputs that the gates of a QRNN see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from typing_extensions import override

from transformer_xl.config import QRNNConfig, RecurrentConfig, UserError
from transformer_xl.model.baselines.scan import linear_recurrence
from transformer_xl.model.memory import ContextLimits, Memory, counts_on
from transformer_xl.model.token_model import TokenModel

_FORGET_BIAS = 1.0  # Jozefowicz et al. 2015


@dataclass(frozen=True, eq=False)
class RecurrentMemory(Memory):
    """The state of every layer after the last token of each row, without gradient.

    A state has no slots: it may hold something of all that was read. So any length above 0 means the same, and 0 means
    that nothing goes from one segment to the next.
    """

    states_BXD: tuple[Tensor, ...]
    """One tensor a layer; zeros where nothing was read."""

    @staticmethod
    def empty(state_shape: tuple[int, int, int, int], context_limits: ContextLimits, like: Tensor) -> RecurrentMemory:
        """A memory of nothing, on the device and in the dtype of `like`; `state_shape` is L, B, X, D."""
        num_layers, batch_size, *state = state_shape
        counts_B = torch.zeros(batch_size, dtype=torch.int64, device=like.device)
        # not like.new_zeros: `like` may be shared out over processes, and memory never is
        empty = {"dtype": like.dtype, "device": like.device}
        states = tuple(torch.zeros(batch_size, *state, **empty) for _ in range(num_layers))
        return RecurrentMemory(
            states, valid_B=counts_B, position_B=counts_B.clone(), context_limits=context_limits, least_valid=0
        )

    def after(self, states_BXD: Sequence[Tensor], num_new: int, lengths_B: Tensor | None) -> RecurrentMemory:
        """The memory once each layer has gone through T new tokens; of padded rows, through `lengths_B` of them."""
        if not self.length:
            states_BXD = [torch.zeros_like(state) for state in self.states_BXD]
        states = tuple(new.detach().to(old.dtype) for old, new in zip(self.states_BXD, states_BXD, strict=True))
        return replace(self._counted(num_new, lengths_B), states_BXD=states)

    @override
    def _emptied(self, rows_B: Tensor) -> RecurrentMemory:
        return replace(self, states_BXD=tuple(state.masked_fill(rows_B[:, None, None], 0) for state in self.states_BXD))

    @override
    def _taken(self, index_B: Tensor) -> RecurrentMemory:
        return replace(self, states_BXD=tuple(state[index_B] for state in self.states_BXD))

    @override
    def _joined(self, memories: Sequence[RecurrentMemory]) -> RecurrentMemory:
        states = zip(*(memory.states_BXD for memory in memories), strict=True)
        return replace(self, states_BXD=tuple(torch.cat(parts) for parts in states))

    @override
    def resized(self, length: int) -> RecurrentMemory:
        states = self.states_BXD if length else tuple(torch.zeros_like(state) for state in self.states_BXD)
        return replace(self._resized_counts(length), states_BXD=states)

    @override
    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> RecurrentMemory:
        states = tuple(state.to(device=device, dtype=dtype) for state in self.states_BXD)
        return replace(self, states_BXD=states, **counts_on(self, device))

    @override
    def tensors(self) -> dict[str, Tensor]:
        named = {f"layer_{index}": state for index, state in enumerate(self.states_BXD)}
        return {**named, "valid": self.valid_B, "position": self.position_B}

    @override
    def with_tensors(self, tensors: Mapping[str, Tensor]) -> RecurrentMemory:
        fitting = self._fitting(tensors)
        states = tuple(fitting[f"layer_{index}"] for index in range(len(self.states_BXD)))
        counts = {"valid_B": fitting["valid"], "position_B": fitting["position"]}
        return replace(self, states_BXD=states, least_valid=0, **counts)


class LSTMLayer(nn.Module):
    """One layer of an LSTM; weights stand in torch's order of gates: i, f, z, o."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.input_weight = nn.Parameter(torch.empty(4 * config.d_model, config.d_model))
        self.recurrent_weight = nn.Parameter(torch.empty(4 * config.d_model, config.d_model))
        self.bias = nn.Parameter(torch.empty(4 * config.d_model))

    def init_weights(self) -> None:
        """Draws first weights: uniform of variance 1 / D, recurrent ones of a third; biases 0, forget gates' 1."""
        bound = self.input_weight.shape[1] ** -0.5
        nn.init.uniform_(self.input_weight, -(3**0.5) * bound, 3**0.5 * bound)
        nn.init.uniform_(self.recurrent_weight, -bound, bound)
        nn.init.zeros_(self.bias)
        _, forget, _, _ = self.bias.data.chunk(4)
        forget.fill_(_FORGET_BIAS)

    @override
    def forward(self, x_BTD: Tensor, state_BXD: Tensor, lengths_B: Tensor | None) -> tuple[Tensor, Tensor]:
        """Gives h of every place (B, T, D), and h and c after the last one (B, 2, D)."""
        with _where_torch_can(x_BTD.device):
            return self._gone_through(x_BTD.to(self.bias.dtype), state_BXD, lengths_B)

    def _gone_through(self, x_BTD: Tensor, state_BXD: Tensor, lengths_B: Tensor | None) -> tuple[Tensor, Tensor]:
        first = tuple(row_BD[None].contiguous() for row_BD in state_BXD.to(x_BTD.dtype).unbind(1))
        weights = [self.input_weight, self.recurrent_weight, self.bias, torch.zeros_like(self.bias)]
        if lengths_B is None:
            hidden_BTD, *last = torch.lstm(x_BTD, first, weights, True, 1, 0.0, self.training, False, True)
            return hidden_BTD, torch.stack([row[0] for row in last], dim=1)
        # torch wants padding last, and rows of one token at least: what a row without any gave is not taken
        num_new = x_BTD.shape[1]
        padding_B = num_new - lengths_B
        packed = pack_padded_sequence(
            _rolled(x_BTD, padding_B), lengths_B.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False
        )
        order_B, back_B = packed.sorted_indices, packed.unsorted_indices
        assert order_B is not None
        assert back_B is not None
        first = tuple(row.index_select(1, order_B) for row in first)
        data, *last = torch.lstm(packed.data, packed.batch_sizes, first, weights, True, 1, 0.0, self.training, False)
        hidden_BTD, _ = pad_packed_sequence(packed._replace(data=data), batch_first=True, total_length=num_new)
        state = torch.stack([row[0].index_select(0, back_B) for row in last], dim=1)
        return _rolled(hidden_BTD, -padding_B), torch.where(lengths_B[:, None, None] > 0, state, state_BXD)


def _where_torch_can(device: torch.device) -> AbstractContextManager[object]:
    """Products in the format that autocast says, unless torch then fails: its LSTM has no bfloat16 on older CPUs."""
    fails = device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.autocast("cpu", enabled=False) if fails else nullcontext()


def _rolled(x_BTD: Tensor, by_B: Tensor) -> Tensor:
    """Each row moved forward by so many places, what falls out at the front coming in at the end."""
    place_BT = torch.arange(x_BTD.shape[1], device=x_BTD.device) + by_B[:, None]
    return x_BTD.gather(1, place_BT.remainder(x_BTD.shape[1])[..., None].expand_as(x_BTD))


class QRNNLayer(nn.Module):
    """One layer of a QRNN with fo-pooling."""

    def __init__(self, config: QRNNConfig) -> None:
        super().__init__()
        self.window, self.zoneout = config.qrnn_kernel_size, config.zoneout
        self.gates = nn.Linear(self.window * config.d_model, 3 * config.d_model)

    def init_weights(self) -> None:
        """Draws first weights: uniform of variance 1 / (W D), biases 0 and of forget gates 1."""
        bound = (3 / self.gates.in_features) ** 0.5
        nn.init.uniform_(self.gates.weight, -bound, bound)
        nn.init.zeros_(self.gates.bias)
        _, forget, _ = self.gates.bias.data.chunk(3)
        forget.fill_(_FORGET_BIAS)

    @override
    def forward(self, x_BTD: Tensor, state_BXD: Tensor, lengths_B: Tensor | None) -> tuple[Tensor, Tensor]:
        """Gives h of every place (B, T, D), and after the last one c and its inputs that are needed still (B, W, D)."""
        before_BXD = state_BXD[:, 1:].to(x_BTD.dtype)
        padding_BT1 = None
        if lengths_B is not None:
            place_T = torch.arange(x_BTD.shape[1], device=x_BTD.device)
            padding_BT1 = (place_T < (x_BTD.shape[1] - lengths_B)[:, None])[..., None]
            # the first token of its own then sees before itself what the row read last
            x_BTD = torch.where(padding_BT1, before_BXD[:, -1:] if self.window > 1 else 0.0, x_BTD)
        seen_BXD = torch.cat([before_BXD, x_BTD], dim=1)
        num_new = x_BTD.shape[1]
        wide = torch.cat([seen_BXD[:, start : start + num_new] for start in range(self.window)], dim=-1)
        z_BTD, forget_BTD, output_BTD = self.gates(wide).chunk(3, dim=-1)
        # the state is summed up over all of the text
        sums = torch.promote_types(forget_BTD.dtype, torch.float32)
        keep_BTD = forget_BTD.to(sums).sigmoid()
        if self.training and self.zoneout:
            keep_BTD = torch.where(torch.rand_like(keep_BTD) < self.zoneout, 1.0, keep_BTD)
        if padding_BT1 is not None:
            keep_BTD = torch.where(padding_BT1, 1.0, keep_BTD)
        added_BTD = (1 - keep_BTD) * z_BTD.to(sums).tanh()
        c_BTD = linear_recurrence(keep_BTD, added_BTD, state_BXD[:, 0].to(sums))
        hidden_BTD = (output_BTD.sigmoid() * c_BTD).to(x_BTD.dtype)
        kept_BXD = seen_BXD[:, num_new:].to(state_BXD.dtype)
        return hidden_BTD, torch.cat([c_BTD[:, -1:].to(state_BXD.dtype), kept_BXD], dim=1)


class RecurrentModel(TokenModel):
    """Embedding, layers of LSTM or QRNN, softmax."""

    config: RecurrentConfig  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, config: RecurrentConfig, *, memory_length: int = 128) -> None:
        """Builds the model with first weights drawn from torch's global random state."""
        super().__init__(config, memory_length=memory_length)
        self.layers = nn.ModuleList(
            QRNNLayer(config) if isinstance(config, QRNNConfig) else LSTMLayer(config) for _ in range(config.n_layers)
        )
        self.num_state_rows = config.qrnn_kernel_size if isinstance(config, QRNNConfig) else 2
        self.init_weights()

    @override
    def init_weights(self) -> None:
        super().init_weights()
        for part in (self.embedding, self.softmax):
            for table in part.tables:
                nn.init.normal_(table, 0.0, self.config.d_model**-0.5)
            for projection in part.projections.values():
                nn.init.normal_(projection, 0.0, projection.shape[1] ** -0.5)
        for layer in self.layers:
            assert isinstance(layer, LSTMLayer | QRNNLayer)
            layer.init_weights()

    @override
    def initial_memory(self, batch_size: int, context_limits: ContextLimits | None = None) -> RecurrentMemory:
        shape = (self.config.n_layers, batch_size, self.num_state_rows, self.config.d_model)
        # not like a layer's weights, which may be rounded (`precision.py`): a state is summed up over all of the text
        return RecurrentMemory.empty(shape, self.checked(context_limits), self.softmax.bias)

    @override
    def forward(
        self,
        tokens_BT: Tensor | None = None,
        memory: Memory | None = None,
        *,
        inputs_BTD: Tensor | None = None,
        lengths_B: Tensor | None = None,
    ) -> tuple[Tensor, Memory]:
        """Reads T tokens of each row after what `memory` holds (see `LanguageModel.forward`).

        Raises:
            UserError: not exactly one kind of input, a wrong shape, or a memory of another batch or model.
        """
        x_BTD = self.first_input(tokens_BT, inputs_BTD)
        memory = self.matching(memory, x_BTD, lengths_B)
        states: list[Tensor] = []
        x_BTD = self.dropout(x_BTD)
        for layer, state_BXD in zip(self.layers, memory.states_BXD, strict=True):
            x_BTD, state_BXD = self.through(layer, x_BTD, state_BXD, lengths_B)
            states.append(state_BXD)
            x_BTD = self.dropout(x_BTD)
        return x_BTD, memory.after(states, x_BTD.shape[1], lengths_B)

    @override
    def matching(self, memory: Memory | None, x_BTD: Tensor, lengths_B: Tensor | None) -> RecurrentMemory:
        memory = super().matching(memory, x_BTD, lengths_B)
        state = (self.num_state_rows, self.config.d_model)
        if (
            not isinstance(memory, RecurrentMemory)
            or len(memory.states_BXD) != self.config.n_layers
            or memory.states_BXD[0].shape[1:] != state
        ):
            raise UserError("this memory was made by another model; start with initial_memory")
        return memory
