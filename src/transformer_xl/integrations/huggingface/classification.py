"""Our models as classifiers of transformers 5: of texts of any length, and of each of their tokens.

Shape suffixes: B batch rows, T columns of the input, P columns of a step, D model width, C labels, K predictions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_outputs import SequenceClassifierOutputWithPast, TokenClassifierOutput
from typing_extensions import override

from transformer_xl.config import UserError
from transformer_xl.evaluation.pooling import PooledStates
from transformer_xl.integrations.huggingface.base_model import TransformerXLPreTrainedModel
from transformer_xl.integrations.huggingface.configuration import PretrainedTransformerXLConfig
from transformer_xl.integrations.huggingface.padding import Step


class TransformerXLForSequenceClassification(TransformerXLPreTrainedModel):
    """One of our models, and a linear layer `score` on what it makes of a text (an XLNet, of both sides of its tokens).

    A text is read in segments with memory. Outside training only the vector that represents it is kept of the hidden
    states, so what is needed beside the token ids does not grow with its length.
    """

    accepts_loss_kwargs = False
    reads_documents = True

    def __init__(self, config: PretrainedTransformerXLConfig) -> None:
        """Build the model with initial weights."""
        super().__init__(config)
        self.num_labels = _checked_num_labels(config)
        self.score = nn.Linear(config.d_model, self.num_labels, bias=False)
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
        return_dict: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast | tuple[Any, ...]:
        """Return the scores of the labels for each text.

        The vector of a text is the last hidden state of its last token (the configuration's `classifier_pooling`
        "last"), or the mean over its tokens ("mean"), on whichever side it is padded.

        In training a text is read segment by segment, as by the language model. Its label is predicted at the end of
        each of the last `classifier_segments` segments, from what was read up to there, and the loss is the mean of
        these predictions (of texts with fewer segments, of all they have). Only those segments are under gradients,
        which end at their borders.

        Args:
            input_ids: token ids (B, T).
            attention_mask: 1 for tokens and 0 for padding (B, T), which is on the left or on the right. Without it,
                padding is what has the configuration's `pad_token_id` at the end of a row, else at its beginning.
            inputs_embeds: embeddings (B, T, D) as `get_input_embeddings()` returns them, in place of `input_ids`.
            past_key_values: as for `TransformerXLForCausalLM`; the mean is over the new tokens only.
            labels: of each text, as transformers has them: numbers of labels (B,), one of num_labels; for several
                labels at once 0.0 or 1.0 for each (B, num_labels); values (B,) for num_labels 1 (regression), or
                (B, num_labels) with `problem_type` "regression".
            use_cache: whether to return the memory; None means only if `past_key_values` is passed.
            output_hidden_states: whether to return the hidden states of all layers, which grow with the text.
            return_dict: whether to return a SequenceClassifierOutputWithPast; otherwise a tuple.
            output_attentions: as for `TransformerXLModel`.
            kwargs: must be None, since they mean nothing here.

        Returns:
            loss, logits (B, num_labels), past_key_values, hidden_states and attentions, each None where it was not
            asked for.

        Raises:
            UserError: as by `TransformerXLForCausalLM`; or a row has no token, or a label is none of num_labels.
        """
        use_cache = False if use_cache is None and past_key_values is None else use_cache
        wanted = (output_hidden_states, output_attentions)
        reading = self.begin_reading(
            input_ids, attention_mask, inputs_embeds, kwargs, wanted, past_key_values, use_cache
        )
        if reading.padding is not None and 0 in reading.padding.lengths:
            raise UserError(f"row {reading.padding.lengths.index(0)} has no token, only padding; leave empty texts out")
        is_training, num_last = self.model.training and torch.is_grad_enabled(), None
        if is_training:
            num_last = self.config.classifier_segments
        states, steps = PooledStates(self.config.classifier_pooling), list[Step]()
        kept_BD = list[Tensor]()  # the vectors at the end of the last steps, of rows that have begun
        kept_rows = list[Tensor]()
        for step in reading.steps(padding=reading.padding, ends_together=True, num_last=num_last):
            if reading.has_states:
                steps.append(step)
            vector_BD = states.add(step.hidden_BPX[..., -self.config.d_model :], step.lengths)
            kept_BD.append(vector_BD.to(self.score.weight.dtype))
            kept_rows.append(torch.tensor(step.lengths).nonzero()[:, 0])
            del kept_BD[: -(num_last or 1)], kept_rows[: -(num_last or 1)]
        if reading.has_states:
            reading.join(steps)
        logits_BC, loss = self.score(kept_BD[-1]), None
        if labels is not None:
            if self.config.problem_type in (None, "single_label_classification") and self.num_labels > 1:
                _check_labels(labels, self.num_labels)
            logits_KC = logits_BC
            if is_training and len(kept_BD) > 1:
                rows_K = torch.cat(kept_rows).to(logits_BC.device)
                kept = zip(kept_BD, kept_rows, strict=True)
                logits_KC = self.score(torch.cat([one_BD[rows.to(one_BD.device)] for one_BD, rows in kept]))
                labels = labels.to(rows_K.device)[rows_K]
            loss = self.loss_function(labels=labels, pooled_logits=logits_KC, config=self.config)
        return self.output(SequenceClassifierOutputWithPast, reading, return_dict, loss=loss, logits=logits_BC)

    @override
    def mask_of_ids(self, input_ids: Tensor) -> Tensor | None:
        pad = self.config.pad_token_id
        if pad is None or pad >= self.model.config.vocab_size:
            return super().mask_of_ids(input_ids)
        is_pad_BT = (input_ids == pad).int()
        at_end_BT = is_pad_BT.flip(1).cumprod(1).flip(1).bool()
        return ~(at_end_BT if bool(at_end_BT.any()) else is_pad_BT.cumprod(1).bool())


class TransformerXLForTokenClassification(TransformerXLPreTrainedModel):
    """One of our models, and a linear layer `score` on the last hidden state of each token."""

    accepts_loss_kwargs = False
    reads_documents = True

    def __init__(self, config: PretrainedTransformerXLConfig) -> None:
        """Build the model with initial weights."""
        super().__init__(config)
        self.num_labels = _checked_num_labels(config)
        self.score = nn.Linear(config.d_model, self.num_labels)
        self.post_init()

    @override
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput | tuple[Any, ...]:
        """Return the scores of the labels for each token, which sees the text before it and itself, and in an XLNet
        what follows it in its segment.

        Args:
            input_ids: token ids (B, T).
            attention_mask: 1 for tokens and 0 for padding (B, T), which is on the left or on the right.
            inputs_embeds: embeddings (B, T, D) as `get_input_embeddings()` returns them, in place of `input_ids`.
            labels: the number of the label of each token (B, T); -100 is not scored.
            output_hidden_states: whether to return the hidden states of all layers; None means as configured.
            return_dict: whether to return a TokenClassifierOutput; otherwise a tuple.
            output_attentions: as for `TransformerXLModel`.
            kwargs: must be None or False, since they mean nothing here.

        Returns:
            loss, logits (B, T, num_labels), hidden_states and attentions, each None where it was not asked for.

        Raises:
            UserError: as by `TransformerXLForCausalLM`; or a label is none of num_labels.
        """
        wanted = (output_hidden_states, output_attentions)
        reading = self.begin_reading(input_ids, attention_mask, inputs_embeds, kwargs, wanted)
        reading.check_token_labels(labels)
        logits_BTC, loss = reading.columns(self.score), None
        if labels is not None:
            _check_labels(labels, self.num_labels)
            loss = self.loss_function(logits_BTC, labels, self.config)
        return self.output(TokenClassifierOutput, reading, return_dict, loss=loss, logits=logits_BTC)


def _checked_num_labels(config: PretrainedTransformerXLConfig) -> int:
    """Return the number of labels.

    Raises:
        UserError: there is none.
    """
    if not config.num_labels:
        raise UserError("num_labels is below 1 or id2label is empty; give 1 (regression) or more")
    return config.num_labels


def _check_labels(labels: Tensor, num_labels: int) -> None:
    """Check the numbers of labels, where that needs no waiting for the device.

    Raises:
        UserError: one is none of num_labels.
    """
    if labels.is_floating_point() or labels.device.type != "cpu":
        return
    unknown = labels[(labels >= num_labels) | (labels < 0) & (labels != -100)]
    if len(unknown):
        advice = "correct it" if int(unknown.max()) < 0 else f"open the model with num_labels={int(unknown.max()) + 1}"
        raise UserError(f"label {int(unknown[0])} is none of {num_labels} labels, 0 to {num_labels - 1}; {advice}")
