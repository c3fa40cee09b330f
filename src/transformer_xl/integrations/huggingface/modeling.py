"""Our models as a causal language model of transformers 5.

Shape suffixes: B batch rows, T columns of the input, D model width, N heads, S keys, V vocabulary, K columns with
logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, GenerationMixin
from transformers.generation import GenerationConfig
from transformers.modeling_outputs import CausalLMOutputWithPast
from typing_extensions import override

from transformer_xl.checkpoint_record import CheckpointName
from transformer_xl.inference import TokenModel
from transformer_xl.integrations.checkpoints.pretrained import config_values, generation_values
from transformer_xl.integrations.huggingface.base_model import TransformerXLPreTrainedModel
from transformer_xl.integrations.huggingface.cache import MemoryCache
from transformer_xl.integrations.huggingface.configuration import PretrainedTransformerXLConfig
from transformer_xl.integrations.huggingface.padding import Padding, masked_padding
from transformer_xl.integrations.huggingface.stopping import StopStrings
from transformer_xl.integrations.huggingface.tokenization import (
    TransformerXLTokenizer,
    TransformerXLTokenizersBackend,
    transformers_tokenizer,
)
from transformer_xl.model.token_ids import as_token_ids
from transformer_xl.ops.cross_entropy import cross_entropy
from transformer_xl.run import Run, load

_IGNORED = -100  # the label that marks a position without a loss


class TransformerXLForCausalLM(TransformerXLPreTrainedModel, GenerationMixin):
    """Any of our models, in `model`; its memory is `past_key_values`, a `MemoryCache`."""

    predicts_tokens = True
    accepts_loss_kwargs = True

    def __init__(self, config: PretrainedTransformerXLConfig) -> None:
        """Build the model with initial weights."""
        super().__init__(config)
        self.post_init()

    @override
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Return the logits of the next token at every position.

        Rows longer than a segment are read in segments, and memory connects them; gradients stay within a segment. In
        evaluation mode without gradients a prepared model reads them, which is kept until the weights change.

        Args:
            input_ids: token ids (B, T).
            attention_mask: 1 for tokens and 0 for padding, (B, T), or with the columns of `past_key_values` before
                them. Padding is on the left, or without a cache on the right. A causal mask (B, T, T) says the same.
            inputs_embeds: embeddings (B, T, D) as `get_input_embeddings()` returns them, in place of `input_ids`.
            past_key_values: a `MemoryCache`, which holds the next memory afterwards, or None if there is nothing before
                these tokens. An empty one says that they are a text to continue, as `generate` does; a model without
                memory then keeps its newest tokens. A `DynamicCache` is a learned prefix of keys and values (PEFT).
            labels: the tokens themselves (B, T); each position is scored with the next one, and -100 is not scored.
            use_cache: whether to return the memory; None means the configuration's `use_cache` in evaluation mode, and
                no in training mode or if rows are padded on the right.
            output_hidden_states: whether to return the hidden states of all layers; None means as configured.
            logits_to_keep: number of last positions to compute logits for, 0 for all; or their indices.
            return_dict: whether to return a CausalLMOutputWithPast; otherwise a tuple.
            num_items_in_batch: what the sum of the losses is divided by; None means the number of scored labels.
            output_attentions: whether to return the attention probabilities of all layers, which the reference kernel
                computes, without dropout; None means as configured. For one segment, without padding on the left.
            kwargs: `shift_labels` in place of `labels`, the token after each position (B, T), of programs that shift
                labels themselves; others must be None, since they mean nothing here.

        Returns:
            loss, logits, past_key_values, hidden_states and attentions (as `TransformerXLModel` returns them), each
            None where it was not asked for. In training an adaptive softmax computes the loss without logits, which are
            None then.

        Raises:
            UserError: an argument that means nothing here or has another shape, a mask, cache or token id that the
                model cannot use, or an embedding that was replaced although the softmax shares its weights.
        """
        shift_labels = kwargs.pop("shift_labels", None)  # not in the signature, where Trainer looks for names of labels
        wanted = (output_hidden_states, output_attentions)
        reading = self.begin_reading(
            input_ids, attention_mask, inputs_embeds, kwargs, wanted, past_key_values, use_cache
        )
        reading.check_token_labels(labels if shift_labels is None else shift_labels)
        targets_BT = _targets(labels, reading.padding) if shift_labels is None else shift_labels
        hidden_BTD = reading.columns()
        loss, logits_BKV = self._head(reading.model, hidden_BTD, logits_to_keep, targets_BT, num_items_in_batch)
        return self.output(CausalLMOutputWithPast, reading, return_dict, loss=loss, logits=logits_BKV)

    def _head(
        self,
        model: TokenModel,
        hidden_BTD: Tensor,
        logits_to_keep: int | Tensor,
        targets_BT: Tensor | None,
        num_items: Tensor | int | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the loss and the logits."""
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        if targets_BT is None:
            return None, model.logits(hidden_BTD[:, kept])
        is_scored_BT = targets_BT != _IGNORED
        targets_BT = as_token_ids(targets_BT.masked_fill(~is_scored_BT, 0), self.model.config.vocab_size, "labels")
        # an adaptive softmax needs no logits for its loss, and those of all words would take more memory than all else
        logits_BKV = None
        if not (self.training and self.model.softmax.num_tails):
            logits_BKV = model.logits(hidden_BTD[:, kept])
        if logits_BKV is not None and not self.model.softmax.num_tails and logits_BKV.shape[1] == hidden_BTD.shape[1]:
            losses_BT = cross_entropy(logits_BKV.flatten(0, 1), targets_BT.flatten()).view(targets_BT.shape)
        else:
            losses_BT = model.nats(hidden_BTD, targets_BT)
        count = is_scored_BT.sum() if num_items is None else num_items
        if isinstance(count, Tensor):
            count = count.to(losses_BT.device)
        return (losses_BT * is_scored_BT).sum() / count, logits_BKV

    @override
    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the arguments of `forward` for the next step of `generate`."""
        kwargs.pop("tokenizer", None)  # for `stop_strings`; `generate` passes it on here too
        if is_first_iteration and past_key_values is None and kwargs.get("use_cache"):
            past_key_values = MemoryCache()
        if isinstance(past_key_values, MemoryCache):
            past_key_values.is_checked = not is_first_iteration
        return super().prepare_inputs_for_generation(  # pyrefly: ignore[bad-argument-type]
            cast(Any, input_ids),
            next_sequence_length=next_sequence_length,
            past_key_values=past_key_values,
            attention_mask=cast(Any, attention_mask),
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )

    @override
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as transformers does, but with our own criterion for the `stop_strings` of our tokenizers."""
        given = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
        configs = (one for one in (given, self.generation_config) if one is not None)
        strings = kwargs.get("stop_strings") or next((one.stop_strings for one in configs if one.stop_strings), None)
        tokenizer = kwargs.get("tokenizer")
        if strings is not None and isinstance(tokenizer, TransformerXLTokenizer | TransformerXLTokenizersBackend):
            criteria = kwargs.pop("stopping_criteria", None) or ()
            kwargs |= {"stop_strings": None, "stopping_criteria": [*criteria, StopStrings(tokenizer, strings)]}
        return super().generate(*args, **kwargs)  # pyrefly: ignore[bad-argument-type]

    @classmethod
    @override
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `prepare_inputs_for_generation` makes it


def from_run(
    run: Run | Path | str, *, checkpoint: CheckpointName = "best", eos_token: str | None = None
) -> tuple[TransformerXLForCausalLM, TransformerXLTokenizer | TransformerXLTokenizersBackend]:
    """Return a run's model and tokenizer for transformers, without writing a folder.

    Args:
        run: the folder of a run, or a loaded run, whose weights are shared.
        checkpoint: the weights with the lowest validation loss (best), or those of the newest checkpoint (last); not
            with a loaded run.
        eos_token: the token that ends a text, as for `convert`.

    Raises:
        UserError: it is not the folder of a run, it has no weights yet, its files are damaged, or its vocabulary has no
            such token.
    """
    if not isinstance(run, Run):
        run = load(run, device="cpu", checkpoint=checkpoint)
    config = PretrainedTransformerXLConfig(**config_values(run.config, run.memory_lengths))
    with torch.device("meta"):
        model = TransformerXLForCausalLM(config)
    model.model = run.model
    model.generation_config = GenerationConfig(**generation_values(run.tokenizer, eos_token))
    return model.eval(), transformers_tokenizer(run.tokenizer, eos_token)


def _targets(labels: Tensor | None, padding: Padding | None) -> Tensor | None:
    """Return the target of each position (B, T), -100 where it has none, or None without labels.

    The first token after padding on the left is not predicted, as the first token of a row without padding is not.
    """
    if labels is None:
        return None
    targets_BT = F.pad(labels[:, 1:], (0, 1), value=_IGNORED)
    if padding is None or padding.side == "right":
        return targets_BT
    return masked_padding(targets_BT, padding.lengths, _IGNORED)
