"""What the tests of evaluation share: random token ids, and the losses in nats of one text or of several documents.

Shape suffixes: K tokens of a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from transformer_xl.evaluation.evaluate import losses_in_order
from transformer_xl.evaluation.plan import EvaluationPlan, TokenizedText
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.text.token_store import Tokens

BOS = 10  # input before the first token: the newline of ByteTokenizer
CLOSE = {"rtol": 0, "atol": 1e-10}  # tolerance of comparisons in float64


def random_tokens(length: int, vocab_size: int = 23, seed: int = 3) -> npt.NDArray[Any]:
    return np.random.default_rng(seed).integers(0, vocab_size, length).astype(np.uint8)


def token_nats(model: LanguageModel, tokens_K: Tokens, bos_token_id: int, plan: EvaluationPlan) -> npt.NDArray[Any]:
    """Return the loss of every token of a text that is one document."""
    return losses_in_order(model, TokenizedText(tokens_K, bos_token_id), plan)


def nats_of_documents(
    model: LanguageModel, tokens_K: Tokens, document_starts: Sequence[int], plan: EvaluationPlan
) -> npt.NDArray[Any]:
    """Return the losses of a text when each of its documents is scored as a text of its own."""
    edges = sorted({*document_starts, len(tokens_K)})
    return np.concatenate([token_nats(model, tokens_K[start:end], BOS, plan) for start, end in pairwise(edges)])
