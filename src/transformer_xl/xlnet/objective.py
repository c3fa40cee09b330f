"""What XLNet learns from: segments whose tokens are predicted in random orders, a part of them (Yang et al. 2019).

    reuse_length tokens of text            | A              SEP  B             SEP  CLS
    0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0   0 0 0 0 0 0 0 0   1 1 1 1 1 1 1 1    2       segments

The first part continues the memory, which keeps it alone, and does not see the second; the second sees all of the
first. The next segment begins where the second part does, so that each text is read twice, and predicted as either
part. In each part spans are drawn (`draw_targets`), and blocks of `perm_size` tokens at most get a random order
(`draw_order`). Tokens that are not predicted are seen by all. SEP and CLS are in the order, as what is predicted is,
but are not predicted themselves (as in the authors' code, `_local_perm`).

Where the settings name no SEP and CLS, the second part is the text after the first. With `bi_data`, rows 1, 3, ... are
the texts of rows 0, 2, ..., read backward. What differs from the authors' code: spans may begin inside a word, each
block has an order of its own, the number of predicted tokens is exact, spans of backward rows are drawn in the order of
reading, and A ends anywhere, as a corpus has documents and no sentences.

Everything follows from seed, epoch, segment and row, so nothing but the position is saved.

Shape suffixes: B batch rows, T tokens of a segment, K spans, X tokens of a part.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from transformer_xl.config import UserError, XLNetConfig
from transformer_xl.text.segments import Batch, DatasetPosition, TokenDataset


def draw_targets(
    can_predict: npt.NDArray[np.bool_], num_predict: int, config: XLNetConfig, generator: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Draw the tokens of a part to predict: spans in contexts, and single tokens if there is no place for more spans.

    Args:
        can_predict: which tokens may be predicted (X,).
        num_predict: number of tokens to predict.
        config: settings of the spans: `max_gram`, `mask_alpha` and `mask_beta`.
        generator: source of randomness.

    Returns:
        a mask (X,) of `num_predict` tokens.

    Raises:
        UserError: there are fewer tokens that may be predicted.
    """
    if num_predict > can_predict.sum():
        raise UserError(
            f"num_predict {num_predict:,} is more than the {can_predict.sum():,} tokens of a part of the segment that "
            "can be predicted; lower it, or give longer segments"
        )
    grams = np.arange(1, config.max_gram + 1)
    lengths_K = generator.choice(grams, size=num_predict, p=(1 / grams) / (1 / grams).sum())
    lengths_K = np.diff(np.minimum(np.cumsum(lengths_K), num_predict), prepend=0)  # the last is cut, to the number
    contexts_K = lengths_K * config.mask_alpha // config.mask_beta
    before_K = (generator.random(num_predict) * contexts_K).astype(np.int64)
    starts_K = np.cumsum(lengths_K + contexts_K) - lengths_K - contexts_K + before_K
    fits_K = starts_K + lengths_K < len(can_predict)  # one that ends with the part is left out there too
    chosen_X = np.zeros(len(can_predict), np.bool_)
    for start, length in zip(starts_K[fits_K], lengths_K[fits_K], strict=True):
        chosen_X[start : start + length] = True
    chosen_X &= can_predict
    others = np.flatnonzero(can_predict & ~chosen_X)
    chosen_X[generator.choice(others, num_predict - chosen_X.sum(), replace=False)] = True
    return chosen_X


def draw_order(
    in_order: npt.NDArray[np.bool_], part_lengths: Collection[int], perm_size: int, generator: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Draw the place of each token in the order of prediction: block after block, at random within a block.

    Args:
        in_order: which tokens have a place (T,); the others may be seen by all.
        part_lengths: lengths of the parts of the segment, which no block goes across.
        perm_size: longest block, in tokens.
        generator: source of randomness.

    Returns:
        places (T,), different ones from 0 to T - 1; -1 for tokens without.
    """
    rank_T = np.empty(len(in_order), np.int64)
    starts = np.cumsum([0, *part_lengths]).tolist()
    for start, stop in pairwise(starts):
        for first in range(start, stop, perm_size):
            last = min(first + perm_size, stop)
            rank_T[first:last] = first + generator.permutation(last - first)
    return np.where(in_order, rank_T, -1)


@dataclass(frozen=True, eq=False)
class PermutedDataset(TokenDataset):
    """A text as segments in the order of the text, each with the tokens to predict and their order.

    Raises:
        UserError: as in `TokenDataset`.
    """

    document_starts: npt.NDArray[np.uint64]
    """Ascending positions in `tokens`, where text from elsewhere may begin."""
    _: KW_ONLY
    seed: int
    """Of all draws; the same in all shards."""
    model: XLNetConfig

    @property
    def _num_rows(self) -> int:
        """Number of parts of the text; with bi_data two rows read each."""
        return self.batch_size // 2 if self.model.bi_data else self.batch_size

    @override
    def segments_in(self, epoch: int) -> int:
        length = len(self.tokens) // self._num_rows
        return max(0, length - self.segment_length) // self.model.part_lengths(self.segment_length)[0] + 1

    @override
    def read(self, position: DatasetPosition, *, num_segments: int = 1, context_length: int = 0) -> Batch:
        batch = self._padding(position, num_segments, context_length)
        order_B2T = np.zeros((self.local_batch_size, 2, self.segment_length), np.int64)
        for index, row in enumerate(self.shard.batch_rows(self.batch_size)):
            key = position.epoch, position.segment_index, row
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(self.seed, spawn_key=key)))
            ids, order_B2T[index, 1] = self._segment(row, position.segment_index, generator)
            batch.inputs_BX[index] = batch.targets_BT[index] = ids
            is_functional = np.isin(ids, self.model.functional_ids)
            own, first = self.model.resolved(self.segment_length), self.model.part_lengths(self.segment_length)[0]
            assert own.num_predict is not None
            numbers = own.num_predict - own.num_predict // 2, own.num_predict // 2
            targets = [
                draw_targets(~part, min(number, int((~part).sum())), own, generator)
                for part, number in zip(np.split(is_functional, [first]), numbers, strict=True)
            ]
            batch.loss_mask_BT[index] = np.concatenate(targets)
            lengths = first, self.segment_length - first
            in_order = batch.loss_mask_BT[index] | is_functional
            order_B2T[index, 0] = draw_order(in_order, lengths, own.perm_size, generator)
        return replace(batch, order_B2T=order_B2T)

    def _segment(
        self, row: int, index: int, generator: np.random.Generator
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return ids and segments of the tokens (T,) of a row."""
        is_backward = self.model.bi_data and row % 2 == 1
        part, (first, second) = row // (2 if self.model.bi_data else 1), self.model.part_lengths(self.segment_length)
        size = len(self.tokens)
        edges = [edge * size // self._num_rows for edge in (part, part + 1)]

        def text(start: int, length: int) -> npt.NDArray[np.int64]:  # positions count from where reading begins
            span = slice(size - start - length, size - start) if is_backward else slice(start, start + length)
            ids = self.tokens[span].astype(np.int64)
            return ids[::-1] if is_backward else ids

        start = (size - edges[1] if is_backward else edges[0]) + index * first
        if not self.model.functional_ids:
            return text(start, first + second), np.zeros(first + second, np.int64)
        (sep, cls), length_a = self.model.functional_ids, int(generator.integers(1, second))
        length_b, start_b = second - length_a, start + first + length_a
        if generator.random() < 0.5:
            begin = int(generator.choice(self.document_starts))
            start_b = min(size - begin if is_backward else begin, size - length_b)
        ids = np.concatenate([text(start, first + length_a), [sep], text(start_b, length_b), [sep, cls]])
        return ids, np.repeat([0, 1, 2], [first + length_a + 1, length_b + 1, 1])
