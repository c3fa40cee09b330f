"""Splits a user's text into train, valid and test: at random, or at the end of the text.

A random split draws whole files, so that no file is in two splits. Where the files are too few or too unequal for the
fractions, or much of the text is in files too large to be drawn, it draws blocks of all files instead. What is drawn
follows from a hash of each file's name (and of the index of the block) and of a seed, so it does not depend on the
order of the files, nor on where they lie.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise

from transformer_xl.text.documents import SplitName
from transformer_xl.text.sources.archives import FileRange
from transformer_xl.text.sources.arrays import ArrayRange

TextRange = FileRange | ArrayRange
"""Part of a text, iterated in chunks of bytes. `size()`, `start` and `stop` count bytes, or integers in arrays."""

SPLIT_TOLERANCE_BYTES = 2**16
"""Maximum distance by which a split boundary is moved so that it falls between lines."""

_MIN_FILES = 5  # in valid and in test; with fewer, one unusual file would decide the result
_MAX_DEVIATION = 0.25  # of the size of valid and of test from what was asked for, as a fraction of it
_MAX_PART = 1.5  # size of the largest part of valid and of test, as a multiple of what was asked for
_MAX_LEFT_OUT = 0.25  # of the text, in files that are too large to be drawn
_ENOUGH = 0.9  # of what was asked for; with less, a part that is too large is passed over
_NUM_BLOCKS = 8  # in valid and in test, of a text that is neither short nor long
_NUM_SLOW_BLOCKS = 4  # the same where each block has to be read from the start of its file
_MIN_BLOCK, _MAX_BLOCK = 2**13, 2**20  # bytes or values; long enough for recurrence to matter

_WHITESPACE = re.compile(rb"[ \t\n\v\f\r]")
# UTF-8 bytes after the first byte of a character; no match where more than three follow, since that is not UTF-8.
_REST_OF_CHARACTER = re.compile(rb"[\x80-\xbf]{0,3}(?![\x80-\xbf])")


def hash_fraction(*names: str) -> float:
    """Return a number in [0, 1) that depends only on the names: the start of their sha256."""
    return int.from_bytes(hashlib.sha256(os.fsencode("\0".join(names))).digest()[:8], "big") / 2**64


@dataclass(frozen=True)
class _Part:
    """A file, or a block of a file, that is drawn as a whole."""

    text: int
    """Index of the file."""
    start: int
    stop: int
    """Where the part begins and ends in the file, before its ends are moved to the ends of lines."""

    @property
    def size(self) -> int:
        return self.stop - self.start


def split_at_random(
    texts: Sequence[TextRange],
    names: Sequence[str],
    fractions: Mapping[SplitName, float],
    *,
    seed: int,
    whole_lines: bool,
    unit: str = "files",
) -> tuple[dict[SplitName, list[TextRange]], str]:
    """Split texts into whole files or blocks, drawn by the hash of their names.

    A split keeps the order of the text. Blocks that follow each other in a file and are in the same split become one
    range, so that a range ends only where its text does.

    Args:
        texts: whole texts.
        names: the name of each text.
        fractions: fractions for valid and test.
        seed: another seed draws other files or blocks.
        whole_lines: whether blocks must end with a line (or, in arrays, a row).
        unit: what the texts are, for the description.

    Returns:
        The ranges of each split, which may be empty, and a description of the split.
    """
    size = sum(text.size() for text in texts)
    targets = {split: size * fraction for split, fraction in fractions.items() if round(size * fraction)}
    if not targets:
        return {"train": list(texts)}, "all of it train"
    parts = [_Part(index, 0, text.size()) for index, text in enumerate(texts)]
    drawn = _draw(parts, [hash_fraction(str(seed), name) for name in names], targets)
    left_out = sum(part.size for part in parts if part.size > _MAX_PART * max(targets.values()))
    splits = _ranges(texts, parts, drawn, whole_lines=whole_lines)
    if left_out > _MAX_LEFT_OUT * size or not all(_is_fair(drawn[split], target) for split, target in targets.items()):
        length = _block_length(texts, min(*targets.values(), size - sum(targets.values())))
        blocks = [part for index, text in enumerate(texts) for part in _blocks(index, text.size(), length)]
        keys = [hash_fraction(str(seed), names[part.text], str(part.start)) for part in blocks]
        drawn_blocks = _draw(blocks, keys, targets)
        of_blocks = _ranges(texts, blocks, drawn_blocks, whole_lines=whole_lines)
        # texts of one line each cannot be cut, and blocks of them may all move to their ends
        if all(of_blocks.values()) or not all(splits.values()):
            parts, drawn, splits = blocks, drawn_blocks, of_blocks
            unit = f"blocks of about {round(length):,} {'integers' if isinstance(texts[0], ArrayRange) else 'bytes'}"
    counts = {"train": len(parts) - sum(map(len, drawn.values())), **{split: len(drawn[split]) for split in targets}}
    numbers = ", ".join(f"{count:,} {split}" for split, count in counts.items())
    return splits, f"{unit} drawn at random with seed {seed}: {numbers}"


def _ranges(
    texts: Sequence[TextRange],
    parts: Sequence[_Part],
    drawn: Mapping[SplitName, Sequence[_Part]],
    *,
    whole_lines: bool,
) -> dict[SplitName, list[TextRange]]:
    """Return the ranges of each split, in the order of the texts; parts that nothing has drawn are for training."""
    split_of = {part: split for split, of_split in drawn.items() for part in of_split}
    splits: dict[SplitName, list[TextRange]] = {split: [] for split in ("train", *drawn)}
    for index, of_text in groupby(parts, key=lambda part: part.text):
        runs = [(split, list(run)) for split, run in groupby(of_text, key=lambda part: split_of.get(part, "train"))]
        starts = [0]
        for _, run in runs[1:]:
            tolerance = min(run[0].size // 2, SPLIT_TOLERANCE_BYTES)
            starts.append(max(starts[-1], _boundary(texts[index], run[0].start, tolerance, whole_lines)))
        for (split, _), start, stop in zip(runs, starts, [*starts[1:], texts[index].size()], strict=True):
            if start < stop:
                splits[split].append(replace(texts[index], start=start, stop=stop))
    return splits


def _draw(
    parts: Sequence[_Part], keys: Sequence[float], targets: Mapping[SplitName, float]
) -> dict[SplitName, list[_Part]]:
    """Draw parts in the order of their keys for each split until it has about its target size.

    Parts that are much larger than the target are left to train, unless there are no others: then one part is drawn, of
    the size that is nearest to the target.
    """
    order = [part for _, part in sorted(zip(keys, parts, strict=True), key=lambda pair: pair[0])]
    drawn: dict[SplitName, list[_Part]] = {}
    for index, (split, target) in enumerate(targets.items()):
        total, of_split = 0, list[_Part]()
        # leave one part for each split that follows, train the last
        for part in order[: len(order) - (len(targets) - index)]:
            if part.size <= _MAX_PART * target and (not total or total + part.size / 2 <= target):
                of_split.append(part)
                total += part.size
            elif total >= _ENOUGH * target:
                break
        # as a ratio, so that it is rather twice the target than a few bytes; of equal ones it is the first
        drawn[split] = of_split or sorted(order, key=lambda part: abs(math.log(max(1, part.size) / target)))[:1]
        taken = set(drawn[split])
        order = [part for part in order if part not in taken]
    return drawn


def draw_buckets(sizes: Mapping[int, int], fractions: Mapping[SplitName, float]) -> dict[SplitName, list[int]]:
    """Draw buckets of rows for valid and test, in the order of their numbers, which are hashes.

    Args:
        sizes: bytes of text of each bucket that is not empty.
        fractions: fractions for valid and test.

    Returns:
        The buckets of each split, which may be empty.
    """
    parts = [_Part(bucket, 0, size) for bucket, size in sizes.items()]
    total = sum(sizes.values())
    drawn = _draw(parts, list(sizes), {split: total * fraction for split, fraction in fractions.items() if fraction})
    buckets = {split: [part.text for part in of_split] for split, of_split in drawn.items()}
    taken = {bucket for of_split in buckets.values() for bucket in of_split}
    return {"train": [bucket for bucket in sizes if bucket not in taken], "valid": [], "test": [], **buckets}


def _is_fair(drawn: Sequence[_Part], target: float) -> bool:
    """Return whether there are enough files, and whether their size is near the target."""
    return len(drawn) >= _MIN_FILES and abs(sum(part.size for part in drawn) - target) <= _MAX_DEVIATION * target


def _block_length(texts: Sequence[TextRange], target: float) -> float:
    """Return the length of a block, of which a whole number makes the target size, that of the smallest split."""
    # Reading a part of a text that is compressed or decoded begins at the start of the file.
    if any(isinstance(text, FileRange) and not text.is_seekable for text in texts):
        most = _NUM_SLOW_BLOCKS
    else:
        most = max(_NUM_BLOCKS, math.ceil(target / _MAX_BLOCK))
    return target / max(1, min(most, target // _MIN_BLOCK))


def _blocks(text: int, size: int, length: float) -> list[_Part]:
    """Cut a text into blocks of equal size, as near to the length as possible."""
    count = min(max(1, round(size / length)), size)
    edges = [size * index // count for index in range(count + 1)]
    return [_Part(text, start, stop) for start, stop in pairwise(edges)]


def split_at_end(
    texts: Sequence[TextRange], fractions: Mapping[SplitName, float], *, whole_lines: bool
) -> tuple[dict[SplitName, list[TextRange]], str]:
    """Concatenate texts in the given order and split off valid and then test at the end of the result.

    A boundary falls after a newline if one is nearby, else after whitespace, else between characters.

    Args:
        texts: whole texts.
        fractions: fractions for valid and test.
        whole_lines: as in `split_at_random`.

    Returns:
        The ranges of each split, which may be empty, and a description of the split.
    """
    *offsets, size = accumulate((text.size() for text in texts), initial=0)
    placed_texts = list(zip(offsets, texts, strict=True))
    lengths = {split: round(size * fractions[split]) for split in ("valid", "test")}
    train = size - sum(lengths.values())
    # A boundary moves by at most half of the split after it, so that this split does not become empty.
    first = _placed_boundary(placed_texts, train, (lengths["valid"] or lengths["test"]) // 2, whole_lines)
    second = _placed_boundary(placed_texts, train + lengths["valid"], lengths["test"] // 2, whole_lines)
    ends: dict[SplitName, int] = {"train": first, "valid": max(first, second), "test": size}
    splits: dict[SplitName, list[TextRange]] = {}
    start = 0
    for split, stop in ends.items():
        splits[split] = [
            replace(text, start=max(start - offset, 0), stop=min(stop - offset, text.size()))
            for offset, text in placed_texts
            if max(start, offset) < min(stop, offset + text.size())
        ]
        start = stop
    return splits, f"valid {fractions['valid']:g} and test {fractions['test']:g} of it, split off at the end"


def _placed_boundary(texts: Sequence[tuple[int, TextRange]], position: int, tolerance: int, whole_lines: bool) -> int:
    """Return the best boundary at or after a position in the concatenated texts, each given with its offset there."""
    for offset, text in texts:
        if 0 < position - offset < text.size():
            limit = min(tolerance, SPLIT_TOLERANCE_BYTES)
            return offset + _boundary(text, position - offset, limit, whole_lines)
    return position


def _boundary(text: TextRange, position: int, tolerance: int, whole_lines: bool) -> int:
    """Return the best boundary at or after a position, usually within `tolerance` of it.

    In arrays it is the end of a row. With `whole_lines` it is the end of a line, however far that is. Otherwise, in
    order of preference: the first position after a newline, the end of the text, the first position after whitespace;
    and if the tolerance reaches none of them, the end of the character at `position`.
    """
    if isinstance(text, ArrayRange):
        return text.row_end(position)
    if whole_lines:
        return _line_end(text, position)
    # a UTF-8 character has up to 4 bytes
    content = b"".join(replace(text, start=position - 1, stop=min(position + max(tolerance, 4), text.size())))
    candidates = content[: tolerance + 1]  # for each possible boundary, the byte before it
    if (newline := candidates.find(b"\n")) >= 0:
        return position + newline
    if position + tolerance >= text.size():
        return text.size()
    if space := _WHITESPACE.search(candidates):
        return position + space.start()
    rest_of_character = _REST_OF_CHARACTER.match(content, 1)
    return position + (rest_of_character.end() - 1 if rest_of_character else 0)


def _line_end(text: FileRange, position: int) -> int:
    """Return the first position at or after `position` that follows a newline, or the end of the text."""
    chunk_start = position - 1
    for chunk in replace(text, start=chunk_start):
        if (newline := chunk.find(b"\n")) >= 0:
            return chunk_start + newline + 1
        chunk_start += len(chunk)
    return text.size()
