"""The base class of all language models, which training, evaluation, generation and analysis use.

    memory = model.initial_memory(batch_size)
    hidden_BTD, memory = model(tokens_BT, memory)
    logits_BTV = model.logits(hidden_BTD)
    losses_BT = model.nats(hidden_BTD, targets_BT)
    logits_BTK, ids_BTK = model.topk(hidden_BTD, k)

It embeds the tokens and computes logits and losses; each subclass defines the layers between them, and their memory.

Shape suffixes: B batch size, T new tokens, D model width, L layers, V vocabulary, K most likely tokens,
R recent tokens, S = R + T; in training, C tokens of an extended context before the T targets, and X = C + T.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from transformer_xl.config import BaseModelConfig, UserError, check_type
from transformer_xl.device import to_device
from transformer_xl.model.adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from transformer_xl.model.memory import ContextLimits, Memory, padding_first
from transformer_xl.model.model_with_memory import ModelWithMemory, init_weights
from transformer_xl.model.ngrams import NgramEmbedding
from transformer_xl.model.token_ids import TokenIds, as_token_ids
from transformer_xl.ops.dropout import FastDropout, drop_vocabulary


class LanguageModel(ModelWithMemory):
    """Token embedding times sqrt(D), layers, and a softmax that by default shares the embedding's weights."""

    config: BaseModelConfig  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, config: BaseModelConfig, *, memory_length: int) -> None:
        super().__init__()
        check_type(config, BaseModelConfig, "config", "give the settings of a model, such as TransformerXLConfig()")
        self.config = config
        self.context_limits = ContextLimits(
            memory_length, config.limit("attention_window"), config.limit("clamp_length")
        )
        """The limits of a new memory if none are passed."""
        self.num_recent = config.num_recent
        self.embedding = AdaptiveEmbedding(config)
        self.softmax = AdaptiveSoftmax(config, self.embedding)
        self.ngrams = NgramEmbedding(config) if config.max_ngram > 1 else None
        self.input_dropout, self.output_dropout = (
            FastDropout(config.dropout if p is None else p, variational=config.regularization.variational_dropout)
            for p in (config.regularization.input_dropout, config.regularization.output_dropout)
        )

    def init_weights(self) -> None:
        """Draw initial weights as in the authors' code: normal with standard deviation 0.02.

        Their mean is 1 for LayerNorm, else 0. Biases are 0.
        """
        for module in self.modules():
            if isinstance(module, AdaptiveEmbedding | AdaptiveSoftmax | NgramEmbedding):
                module.init_weights()
            else:
                init_weights(module)

    def generation_memory(
        self, batch_size: int, context_limits: ContextLimits | None = None, *, segment_length: int
    ) -> Memory:
        """Return an empty memory for generating token after token.

        It is that of `initial_memory`, unless memory_length is 0. In that case each token would be predicted from
        the newest token only, so the memory has segment_length - 1 slots, which together with that token make one
        segment. A model without memory stores the ids of those tokens instead of hidden states, keys or values, and
        processes them again in each step.

        Args:
            batch_size: B.
            context_limits: how far back attention can look, or None for the model's `context_limits`.
            segment_length: the longest segment of training, in tokens.

        Raises:
            UserError: the model does not support these limits.
        """
        limits = context_limits or self.context_limits
        if not limits.memory_length:
            limits = replace(limits, memory_length=segment_length - 1)
        return self.initial_memory(batch_size, limits)

    @override
    def forward(
        self,
        tokens: TokenIds | None = None,
        memory: Memory | None = None,
        *,
        inputs: Tensor | None = None,
        lengths: Tensor | None = None,
        visible: Tensor | None = None,
    ) -> tuple[Tensor, Memory]:
        """Process T tokens of each batch row, which continue the tokens in `memory`.

        Args:
            tokens: token ids (B, T), 0 to V - 1, as a tensor, array or list of any integer dtype, on any device; of
                shape (T,) they are one batch row.
            memory: the memory of earlier tokens, or None if there are none. It is not changed.
            inputs: inputs to the first layer (B, T, D) in place of embedded tokens (for example features of speech).
            lengths: number of tokens (B,) of each batch row that are not padding, or None if there is no padding, which
                comes first and is neither attended nor cached; its hidden states are finite but meaningless.
            visible: number of keys (B, T) that each token attends to at most, counted back from its own, or None for
                all in memory and segment. So a memory of more slots than a text's tokens may see can be used, and
                several segments be read at once (`reader.py`). Only where `limits_visible` is true.

        Returns:
            hidden states (B, T, D), and the memory to pass in with the next tokens of the same batch rows.

        Raises:
            UserError: not exactly one of tokens and inputs is passed, a token id is outside the vocabulary (of ids on
                a GPU, the GPU reports it later), a shape is wrong, or the memory is of another batch size, model or
                weights.
        """
        states_BTD, memory = self.hidden_states(tokens, memory, inputs=inputs, lengths=lengths, visible=visible)
        return states_BTD[-1], memory

    def hidden_states(
        self,
        tokens: TokenIds | None = None,
        memory: Memory | None = None,
        *,
        inputs: Tensor | None = None,
        lengths: Tensor | None = None,
        visible: Tensor | None = None,
    ) -> tuple[list[Tensor], Memory]:
        """Process tokens as `forward` does, and return the hidden states of all layers.

        Returns:
            L + 1 tensors (B, T, D), the inputs of all layers and then the result of `forward`; and the next memory.
        """
        x_BTD, memory = self.embed(tokens, memory, inputs, lengths, visible)
        lengths_B = None if lengths is None else lengths.long()
        states_BTD, memory = self.run_layers(x_BTD, memory, lengths_B, visible)
        return [*states_BTD[:-1], self.output_dropout(states_BTD[-1])], memory

    @abstractmethod
    def run_layers(
        self, x_BTD: Tensor, memory: Memory, lengths_B: Tensor | None = None, visible_BT: Tensor | None = None
    ) -> tuple[list[Tensor], Memory]:
        """Return the results of `hidden_states`, the last hidden states before their dropout.

        Args:
            x_BTD: the embedded tokens, without dropout.
            memory: the memory of the tokens before them.
            lengths_B: `lengths` of `forward`.
            visible_BT: `visible` of `forward`; None where `limits_visible` is false.
        """

    def for_documents(self) -> Any:
        """Return what reads whole documents for features and classifiers: the model itself, or one of its contract."""
        return self

    def training_losses(
        self, tokens: TokenIds, targets: TokenIds, memory: Memory, *, progress: float, order: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Memory]:
        """Return the losses of one training step.

        Args:
            tokens: as for `forward`; there may be more tokens than targets, those of an extended context (B, X).
            targets: as for `nats`; targets (B, T) of the last T tokens.
            memory: as for `forward`.
            progress: fraction of the training steps that are done, from 0 to 1.
            order: for models whose settings have `orders`: place of each token in the order in which it is
                predicted, and its segment (B, 2, T).

        Returns:
            losses of the targets in nats (B, T); auxiliary losses in nats (B, T), which are added to the training loss
            but not reported, and are zero if the model has none; and the next memory.
        """
        targets_BT = as_token_ids(targets, self.config.vocab_size, "targets")
        x_BXD, memory = self.embed(tokens, memory)
        states_BTD, memory = self.run_layers(x_BXD, memory)
        if x_BXD.shape[1] > targets_BT.shape[1]:
            states_BTD = [state_BXD[:, -targets_BT.shape[1] :] for state_BXD in states_BTD]
        penalties_BT = self._activation_penalties(states_BTD[-1])
        states_BTD[-1] = self.output_dropout(states_BTD[-1])
        losses_BT = self.nats(states_BTD[-1], targets_BT)
        auxiliary_BT = torch.zeros_like(losses_BT) if penalties_BT is None else penalties_BT.to(losses_BT.dtype)
        return losses_BT, self.add_auxiliary_losses(auxiliary_BT, states_BTD, targets_BT, progress), memory

    def add_auxiliary_losses(
        self, auxiliary_BT: Tensor, states_BTD: list[Tensor], targets_BT: Tensor, progress: float
    ) -> Tensor:
        """Return the auxiliary losses with those of this architecture: none, unless a class overrides this.

        Args:
            auxiliary_BT: the other auxiliary losses.
            states_BTD: hidden states of all layers at the targets, as by `hidden_states`.
            targets_BT: targets of the last tokens, as a tensor on any device.
            progress: as for `training_losses`.
        """
        return auxiliary_BT

    def _activation_penalties(self, hidden_BTD: Tensor) -> Tensor | None:
        """Return the penalties of large and of changing hidden states, whose mean is added to the loss, or None.

        They are the activation and the temporal activation regularization of Merity et al. 2017 (arXiv 1708.01009). In
        theirs, the former is of the states after dropout; here, as in the authors' code, both are before dropout.
        """
        size, change = (
            self.config.regularization.activation_penalty,
            self.config.regularization.temporal_activation_penalty,
        )
        if not (size or change):
            return None
        hidden_BTD = hidden_BTD.to(torch.promote_types(hidden_BTD.dtype, torch.float32))
        penalties_BT, num_tokens = size * hidden_BTD.square().mean(-1), hidden_BTD.shape[1]
        if num_tokens == 1:
            return penalties_BT
        changes_BT = F.pad(hidden_BTD.diff(dim=1).square().mean(-1), (1, 0))
        # the mean over T tokens becomes that over T - 1 changes
        return penalties_BT + change * num_tokens / (num_tokens - 1) * changes_BT

    @property
    @override
    def like(self) -> Tensor:
        return self.softmax.bias

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the next-token logits, shape (B, T, V), for every position."""
        return self.softmax.logits(hidden)

    def nats(self, hidden: Tensor, targets: TokenIds, *, temperature: float = 1.0) -> Tensor:
        """Return the cross-entropy of each target.

        Args:
            hidden: hidden states (B, T, D) that `forward` returned.
            targets: token ids as for `forward`; on the CPU they avoid a synchronization with the device. No value
                marks a target as ignored: multiply its loss by 0.
            temperature: the logits are divided by this, with an adaptive softmax the log-probabilities of all tokens.

        Returns:
            losses in nats, float32 (or float64), shape (B, T), in input order and not averaged.

        Raises:
            UserError: a target is outside the vocabulary, the shapes do not match, or the temperature is not positive.
        """
        check_type(hidden, Tensor, "hidden", "give the hidden states that the model returned")
        if self.softmax.num_tails and isinstance(targets, Tensor):
            targets = targets.cpu()  # the targets of each tail are selected there
        targets_BT = as_token_ids(targets, self.config.vocab_size, "targets")
        if hidden.shape[:-1] != targets_BT.shape:
            raise UserError(
                f"targets of shape {tuple(targets_BT.shape)} for hidden of shape {tuple(hidden.shape)}; "
                "expected one target for each position"
            )
        if not temperature > 0:
            raise UserError(f"temperature must be above 0, not {temperature:g}")
        return self.softmax.nats(hidden, targets_BT, temperature)

    def topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k most likely next tokens at every position, or all V if there are fewer.

        With an adaptive softmax, the logits of tails that cannot contain them are not computed.

        Args:
            hidden: hidden states (B, T, D) that `forward` returned.
            k: number of tokens.

        Returns:
            their logits in descending order (with an adaptive softmax, log-probabilities), and their
            ids, each (B, T, K).

        Raises:
            UserError: k is below 1.
        """
        check_type(k, int, "k", "give an integer")
        if k < 1:
            raise UserError(f"k {k}: must be 1 or more")
        return self.softmax.topk(hidden, k)

    def num_parameters(self) -> int:
        """Return the number of parameters, trained or not; shared parameters are counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def check_not_quantized(self, what: str) -> None:
        """Check that the weights are ordinary tensors.

        Args:
            what: what cannot be done with others, such as "saved".

        Raises:
            UserError: they are of 8 bits, of `to_int8`.
        """
        for parameter in self.parameters():
            if type(parameter.data) is not Tensor:
                raise UserError(
                    f"a model with 8-bit weights ({type(parameter.data).__name__}) is for inference and cannot be "
                    f"{what}; take the run that it was made from"
                )

    def check_plain(self, what: str) -> None:
        """Check that the weights are ordinary tensors, without an adapter (of `load_adapter`) beside them.

        Raises:
            UserError: they are not.
        """
        self.check_not_quantized(what)
        self.check_without_adapter(what)

    def check_without_adapter(self, what: str) -> None:
        """Check that the weights have no adapter (of `load_adapter`) beside them; argument as of the methods above.

        Raises:
            UserError: they have.
        """
        if any(".lora_" in name for name, _ in self.named_parameters()):
            raise UserError(
                f"a model with an adapter beside its weights cannot be {what}; load(PATH) of the adapter's folder "
                "merges it"
            )

    def check_limits(self, context_limits: ContextLimits | None) -> ContextLimits:
        """Return the limits, or the model's `context_limits` if they are None.

        Raises:
            UserError: the model does not support these limits.
        """
        limits = context_limits or self.context_limits
        self.config.check_context_limits(**vars(limits))
        return limits

    def embed(
        self,
        tokens: TokenIds | None,
        memory: Memory | None,
        inputs_BTD: Tensor | None = None,
        lengths_B: Tensor | None = None,
        visible_BT: Tensor | None = None,
    ) -> tuple[Tensor, Memory]:
        """Return the inputs of the layers, and the memory, or an empty one if it is None.

        Arguments are those of `forward`.

        Returns:
            the scaled embeddings of the tokens with those of their n-grams, or the continuous inputs unchanged,
            (B, T, D), without dropout; and the memory, whose recent tokens are followed by the new ones.

        Raises:
            UserError: not exactly one of tokens and inputs is passed, a shape is wrong, or a token id on the CPU is
                outside the vocabulary; or the memory does not fit.
        """
        if (tokens is None) == (inputs_BTD is None):
            raise UserError("give either tokens or inputs")
        tokens_BT = None
        if tokens is not None:
            tokens_BT = to_device(as_token_ids(tokens, self.config.vocab_size, "tokens"), self.softmax.bias.device)
            embedded_BTD = self.embedding(tokens_BT) * self.config.embedding_scale
            if self.training and self.config.regularization.embedding_dropout:
                embedded_BTD = drop_vocabulary(
                    embedded_BTD, tokens_BT, self.config.regularization.embedding_dropout, self.config.vocab_size
                )
            inputs_BTD = embedded_BTD
        check_type(inputs_BTD, Tensor, "inputs", "give a tensor of shape (batch, tokens, d_model)")
        assert inputs_BTD is not None
        if inputs_BTD.ndim != 3 or inputs_BTD.shape[-1] != self.config.d_model or not inputs_BTD.shape[1]:
            actual = f"inputs of shape {tuple(inputs_BTD.shape)}"
            raise UserError(f"{actual}; expected (batch, tokens, {self.config.d_model}), with one token or more")
        check_type(lengths_B, (Tensor, type(None)), "lengths", "give a tensor with the length of each batch row")
        if lengths_B is not None and lengths_B.shape != inputs_BTD.shape[:1]:
            raise UserError(
                f"lengths of shape {tuple(lengths_B.shape)} for batch size {len(inputs_BTD)}; expected one for each row"
            )
        if lengths_B is not None and (lengths_B.is_floating_point() or lengths_B.dtype == torch.bool):
            raise UserError(f"lengths of dtype {lengths_B.dtype}; give integers, the number of tokens of each row")
        if visible_BT is not None:
            self._check_visible(visible_BT, inputs_BTD)
        lengths_B = None if lengths_B is None else lengths_B.long()  # small integers wrap around in sums
        if lengths_B is not None and lengths_B.device.type == "cpu" and not torch.compiler.is_compiling():
            num_new = inputs_BTD.shape[1]
            if ((lengths_B < 0) | (lengths_B > num_new)).any():
                raise UserError(f"lengths {lengths_B.tolist()}: each must be 0 to {num_new}, the tokens of a row")
        memory = self.check_memory(memory, len(inputs_BTD))
        if tokens_BT is None:
            self.check_dtype(inputs_BTD)
            if self.config.has_key_offset:
                raise UserError("a model with key_offset needs token ids, and cannot read continuous inputs")
        if not self.num_recent:
            return inputs_BTD, memory
        ids_BS = _ids_with_recent(tokens_BT, memory, inputs_BTD.shape[1], lengths_B)
        if self.ngrams is not None and tokens_BT is not None:
            inputs_BTD = inputs_BTD + self.ngrams(ids_BS, inputs_BTD.shape[1], visible_BT)
        return inputs_BTD, replace(memory, recent_BR=ids_BS)  # `Memory.advance` drops the oldest

    def _check_visible(self, visible_BT: Tensor, inputs_BTD: Tensor) -> None:
        check_type(visible_BT, Tensor, "visible", "give a tensor with a number of keys for each token")
        if not self.limits_visible:
            raise UserError("this model has no `visible`; leave it out")
        if visible_BT.shape != inputs_BTD.shape[:2] or visible_BT.is_floating_point():
            actual = f"visible of shape {tuple(visible_BT.shape)} and dtype {visible_BT.dtype}"
            raise UserError(f"{actual}; expected integers of shape {tuple(inputs_BTD.shape[:2])}, one for each token")


def _ids_with_recent(tokens_BT: Tensor | None, memory: Memory, num_new: int, lengths_B: Tensor | None) -> Tensor:
    """Return the recent tokens of the memory and then the new ones, as token id + 1, and 0 where there is no token.

    A memory with fewer slots than recent tokens passes on only as many as it has slots. The new ones are the last
    `num_new` columns; padding, which comes first among them, is moved before the recent tokens.
    """
    recent_BR = memory.seen_ids
    assert recent_BR is not None
    # continuous inputs have no ids
    new_BT = recent_BR.new_zeros(len(recent_BR), num_new) if tokens_BT is None else tokens_BT + 1
    ids_BS = torch.cat([recent_BR, new_BT], dim=1)
    return ids_BS if lengths_B is None else padding_first(ids_BS, num_new, lengths_B)
