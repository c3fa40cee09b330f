"""The losses of one text without documents, as many tests want them."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from transformer_xl.evaluation.evaluate import losses_in_order
from transformer_xl.evaluation.plan import EvaluationPlan, TokenizedText
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.text.token_store import Tokens


def token_nats(model: LanguageModel, tokens_K: Tokens, bos_token_id: int, plan: EvaluationPlan) -> npt.NDArray[Any]:
    return losses_in_order(model, TokenizedText(tokens_K, bos_token_id), plan)
