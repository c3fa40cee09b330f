"""The page of attention: one HTML file, which needs nothing beside it, with every term of every head over a text.

What it holds: terms (a) and (b) of every query and key as whole numbers of 16 bits between the least and the greatest
of their head, and terms (c) by key and (d) by distance in float32. The page adds them up. So a number of (a) or (b) is
off by half a step at most, 1/131070 of the head's range, and a probability by that share of itself twice over.

Letters: L layers, N heads, Q tokens as queries and as keys, X pairs of a query and a key that is not after it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib import resources
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps

from transformer_xl.analysis.attention_maps import TermMaps, number_of
from transformer_xl.config import UserError
from transformer_xl.text.tokenizers import Tokenizer

MOST_BYTES = 8 * 2**20
"""Of terms (a) and (b) in a page; as text they take a third more."""
USUAL_TOKENS = 192
"""Tokens of a page unless told otherwise, where they fit."""

_LEVELS = 2**16 - 1
_LONGEST_NAME = 60  # letters; enough to know a token by
_SPACE, _LINE_END, _TAB = "\u00b7", "\u21b5", "\u21e5"


@dataclass(frozen=True)
class TokenText:
    """How a token is shown."""

    shown: str
    """In the text; a line end is a sign and a line end."""
    name: str
    """By itself, in one line, a long one cut."""
    odd: bool
    """Whether it is bytes that are no characters."""


def token_texts(tokenizer: Tokenizer, ids_Q: npt.NDArray[Any]) -> list[TokenText]:
    """How the tokens of a text are shown one by one; bytes that are part of a character as hexadecimal numbers."""
    return [_token_text(tokenizer.decode_bytes([token])) for token in ids_Q.tolist()]


def _token_text(content: bytes) -> TokenText:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        digits = content.hex(" ").upper()
        return TokenText(digits, cut(list(f"bytes {digits}"), _LONGEST_NAME), True)
    if not text:
        return TokenText("\u2205", "nothing", True)
    # the sign, then the line end itself, so that the text keeps its lines
    shown = "".join({"\n": _LINE_END + "\n", "\t": _TAB}.get(letter) or _visible(letter) for letter in text)
    marks = {"\n": _LINE_END, "\t": _TAB, " ": _SPACE}
    return TokenText(shown, cut([marks.get(letter) or _visible(letter) for letter in text], _LONGEST_NAME), False)


def _visible(letter: str) -> str:
    return letter if letter.isprintable() else repr(letter)[1:-1]


def cut(pieces: Sequence[str], most: int) -> str:
    """Pieces of text as one, or as many of the first as leave room for dots; no piece is cut in two."""
    ends = list(accumulate(map(len, pieces)))
    if not ends or ends[-1] <= most:
        return "".join(pieces)
    return "".join(piece for piece, end in zip(pieces, ends, strict=True) if end <= most - 3) + "..."


def num_bytes(shape: tuple[int, int], num_tokens: int) -> int:
    """What terms (a) and (b) of L x N heads over so many tokens take in a page."""
    layers, heads = shape
    return layers * heads * num_tokens * (num_tokens + 1) // 2 * 2 * np.dtype(np.uint16).itemsize


def fitting_tokens(shape: tuple[int, int], num_tokens: int, wanted: int | None) -> int:
    """How many tokens the page shows: those wanted, or as many as is usual and fit.

    Args:
        shape: L and N.
        num_tokens: of the text.
        wanted: what the user asks for; none: leaves it to us.

    Raises:
        UserError: more are wanted than the text has, or than fit into a page.
    """
    most = int(np.sqrt(MOST_BYTES / num_bytes(shape, 1)) * 2**0.5)
    while num_bytes(shape, most) > MOST_BYTES:
        most -= 1
    if wanted is None:
        return max(1, min(most, USUAL_TOKENS, num_tokens))
    if wanted > num_tokens:
        raise UserError(f"--page-tokens {wanted:,}: the text has {number_of(num_tokens)}; give that many at most")
    if wanted > most:
        size = f"{num_bytes(shape, wanted) / 2**20:,.0f} MiB"
        raise UserError(
            f"--page-tokens {wanted:,}: the terms of {shape[0]} x {shape[1]} heads would take {size} of the page; give "
            f"{most:,} at most"
        )
    return wanted


def attention_page(maps: TermMaps, tokens: Sequence[TokenText], title: str, about: str, *, apart: bool) -> str:
    """The page as HTML.

    Args:
        maps: all terms.
        tokens: how each is shown.
        title: of the page.
        about: a sentence on what was read and how.
        apart: whether there is space between tokens (words), or none (bytes, characters, pieces).
    """
    layers, heads = maps.shape
    levels, ranges = _quantised(maps)
    data = {
        "n_layers": layers,
        "n_heads": heads,
        "tokens": [asdict(token) for token in tokens],
        "apart": apart,
        "terms": [{"name": name, "words": words} for name, words in maps.terms.items()],
        "first_seen": maps.first_seen_Q.tolist(),
        "colours": (colormaps["viridis"](np.arange(256))[:, :3] * 255).round().astype(int).tolist(),
        "levels": _as_text(levels, "<u2"),
        "ranges": _as_text(ranges, "<f8"),
        "content_bias": _as_text(maps.content_bias_LNQ.numpy(), "<f4"),
        "position_bias": _as_text(maps.position_bias_LNQ.numpy(), "<f4"),
        "log_total": _as_text(maps.log_total_LNQ.numpy(), "<f4"),
    }
    # nothing in the text can end the script element: < is written as an escape that JSON knows
    encoded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    filled = {
        "title": escape(title),
        "about": escape(about),
        "style": _part("css"),
        "script": _part("js"),
        "data": encoded,
    }
    pieces = _part("html").split("@")
    assert set(pieces[1::2]) == filled.keys()
    return "".join(filled[piece] if place % 2 else piece for place, piece in enumerate(pieces))


def _part(kind: str) -> str:
    return (resources.files("transformer_xl.analysis") / f"attention_page.{kind}").read_text(encoding="utf-8")


def _quantised(maps: TermMaps) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.float64]]:
    """Levels (L, N, 2, X) of terms (a) and (b), and (L, N, 2, 2): the least number of each and the step of a level.

    A key that is not seen has level 0, which means nothing.
    """
    query_X, key_X = np.tril_indices(maps.num_tokens)
    seen_X = maps.seen_QQ.numpy()[query_X, key_X]
    levels = np.zeros((*maps.shape, 2, len(query_X)), dtype=np.uint16)
    ranges = np.zeros((*maps.shape, 2, 2))
    for layer, head in np.ndindex(maps.shape):
        for number, term_QQ in enumerate((maps.content_LNQQ[layer, head], maps.position_LNQQ[layer, head])):
            found = term_QQ.numpy()[query_X, key_X][seen_X].astype(np.float64)
            low, step = found.min(), (found.max() - found.min()) / _LEVELS
            ranges[layer, head, number] = low, step
            if step:
                levels[layer, head, number, seen_X] = np.round((found - low) / step)
    return levels, ranges


def _as_text(numbers: npt.NDArray[Any], dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(numbers, dtype=dtype).tobytes()).decode("ascii")
