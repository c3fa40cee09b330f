"""The weights that a fine-tuned run begins with: those of its base, and with another tokenizer, rows by token.

Shape suffixes: V tokens of the new vocabulary (or of a cluster), E embedding width.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from transformer_xl.architectures import build_model
from transformer_xl.config import RunConfig
from transformer_xl.model.adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.run import Run
from transformer_xl.text.token_store import Corpus
from transformer_xl.text.tokenizers import describe_difference, shared_tokens

# Names of weights with a row for each token: the softmax's biases, the auxiliary losses of al-rfou, value embeddings.
_ONE_ROW_PER_TOKEN = re.compile(
    r"softmax\.bias|next_heads\.|second_heads\.|layers\.\d+\.attention\.value_embedding\.table\."
)


def old_ids(base: Run, corpus: Corpus) -> npt.NDArray[np.int64] | None:
    """Return for each token of a corpus its id in the base, or -1; None if the tokenizers are the same."""
    if describe_difference(corpus.tokenizer, base.tokenizer) is None:
        return None
    return shared_tokens(corpus.tokenizer, base.tokenizer)


def num_kept(base: Run, config: RunConfig, old_of_V: npt.NDArray[np.int64]) -> int:
    """Return the number of tokens that keep their embeddings.

    With div_val, those that stay in a cluster of the same width: the others begin with the mean of their new cluster.

    Args:
        base: the base.
        config: settings of the new run.
        old_of_V: for each token its id in the base, or -1.
    """
    is_kept_V = old_of_V >= 0
    if config.model.div_val != 1:
        edges, old_edges = config.model.cluster_boundaries, base.config.model.cluster_boundaries
        cluster_V = np.searchsorted(edges[1:-1], np.arange(len(old_of_V)), side="right")
        is_kept_V &= cluster_V == np.searchsorted(old_edges[1:-1], old_of_V, side="right")
    return int(is_kept_V.sum())


def first_weights(
    base: LanguageModel, old_of_V: npt.NDArray[np.int64] | None, config: RunConfig
) -> Mapping[str, Tensor]:
    """Return the weights to begin with, by name.

    Args:
        base: the model of the base.
        old_of_V: for each token its id in the base, or -1; None if the tokenizers are the same.
        config: settings of the new run, whose seed determines weights that the base lacks.
    """
    weights = {name: tensor.detach().cpu().clone() for name, tensor in base.state_dict().items()}
    if old_of_V is None:
        return weights
    torch.manual_seed(config.train.seed)
    model = build_model(config.model)
    new = model.state_dict()
    old_ids_V = torch.from_numpy(old_of_V)
    for name, tensor in new.items():
        if _ONE_ROW_PER_TOKEN.match(name):
            tensor.copy_(_rows_of_tokens(weights[name], old_ids_V))
        elif name in weights and not name.startswith(("embedding.tables.", "softmax.tables.", "ngrams.tables.")):
            # without some of the cutoffs, weights of the first clusters are left
            tensor.copy_(weights[name][: len(tensor)] if tensor.ndim else weights[name])
    for part, old_part in ((model.embedding, base.embedding), (model.softmax, base.softmax)):
        _copy_rows(part, old_part, old_ids_V)
    return new


def _rows_of_tokens(old: Tensor, old_ids_V: Tensor) -> Tensor:
    """Return the rows of the same tokens, and the mean of all for tokens that the base lacks."""
    is_known_V = old_ids_V >= 0
    is_known = is_known_V[:, None] if old.ndim > 1 else is_known_V
    return torch.where(is_known, old[old_ids_V.clamp(min=0)], old.mean(0))


@torch.no_grad()
def _copy_rows(
    part: AdaptiveEmbedding | AdaptiveSoftmax, old_part: AdaptiveEmbedding | AdaptiveSoftmax, old_ids_V: Tensor
) -> None:
    """Fill the tables of a part of the model with the rows of the same tokens, and their mean for others.

    A token that moves to a cluster of another width begins with the mean of its new cluster.
    """
    edges, old_edges = ((0, one.edges[-1]) if one.shared else one.edges for one in (part, old_part))
    for index, (start, stop) in enumerate(pairwise(edges)):
        if index >= len(part.tables):  # it uses the tables of the embedding
            return
        table_VE, old_table_VE = part.tables[index], old_part.tables[index]
        old_V = old_ids_V[start:stop] - old_edges[index]
        has_row_V = (old_V >= 0) & (old_V < len(old_table_VE)) & (old_ids_V[start:stop] >= 0)
        rows_VE = old_table_VE[old_V.clamp(0, len(old_table_VE) - 1)]
        table_VE.copy_(torch.where(has_row_V[:, None], rows_VE, old_table_VE.mean(0)))
