"""The attention page: one self-contained HTML file with every attention term of every head over a text.

Terms (a) and (b) of each query and key are stored as 16-bit integers between the minimum and maximum of their head, and
terms (c) by key and (d) by distance in float32; the page adds them up. So a value of (a) or (b) is off by half a
quantization step at most, 1/131070 of the head's range, and a probability by twice that share of its own value.

Shape suffixes: L layers, N heads, Q tokens as queries and as keys, X pairs of a query and a key that is not after it.
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

from transformer_xl.analysis.attention_maps import TermMaps, pluralize
from transformer_xl.config import UserError
from transformer_xl.text.tokenizers import Tokenizer

MAX_BYTES = 8 * 2**20
"""Most bytes of terms (a) and (b) in a page; base64 makes them a third larger."""
DEFAULT_TOKENS = 192
"""Tokens on a page by default, if they fit."""

_LEVELS = 2**16 - 1
_MAX_NAME = 60  # characters, enough to recognize a token
_SPACE, _LINE_END, _TAB = "\u00b7", "\u21b5", "\u21e5"


@dataclass(frozen=True)
class TokenText:
    """How a token is shown."""

    shown: str
    """Within the text; a newline is shown as a sign and a newline."""
    name: str
    """On its own, in one line and truncated."""
    odd: bool
    """Whether it is bytes that are not whole characters."""


def token_texts(tokenizer: Tokenizer, ids_Q: npt.NDArray[Any]) -> list[TokenText]:
    """Return how each token of a text is shown; bytes that are part of a character are shown in hexadecimal."""
    return [_token_text(tokenizer.decode_bytes([token])) for token in ids_Q.tolist()]


def _token_text(content: bytes) -> TokenText:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        digits = content.hex(" ").upper()
        return TokenText(digits, truncate(list(f"bytes {digits}"), _MAX_NAME), True)
    if not text:
        return TokenText("\u2205", "nothing", True)
    # the sign, then the newline itself, so that the text keeps its lines
    shown = "".join({"\n": _LINE_END + "\n", "\t": _TAB}.get(letter) or _visible(letter) for letter in text)
    marks = {"\n": _LINE_END, "\t": _TAB, " ": _SPACE}
    return TokenText(shown, truncate([marks.get(letter) or _visible(letter) for letter in text], _MAX_NAME), False)


def _visible(letter: str) -> str:
    return letter if letter.isprintable() else repr(letter)[1:-1]


def truncate(parts: Sequence[str], max_length: int) -> str:
    """Join parts of text, truncated with dots to at most `max_length` characters; no part is split."""
    ends = list(accumulate(map(len, parts)))
    if not ends or ends[-1] <= max_length:
        return "".join(parts)
    return "".join(part for part, end in zip(parts, ends, strict=True) if end <= max_length - 3) + "..."


def num_bytes(shape: tuple[int, int], num_tokens: int) -> int:
    """Return the bytes of terms (a) and (b) of L x N heads over `num_tokens` tokens."""
    layers, heads = shape
    return layers * heads * num_tokens * (num_tokens + 1) // 2 * 2 * np.dtype(np.uint16).itemsize


def fitting_tokens(shape: tuple[int, int], num_tokens: int, wanted: int | None) -> int:
    """Return the number of tokens on the page: those wanted, or by default as many as fit, at most `DEFAULT_TOKENS`.

    Args:
        shape: L and N.
        num_tokens: length of the text.
        wanted: the number that the user asks for; None: the default.

    Raises:
        UserError: more are wanted than the text has, or than fit into a page.
    """
    most = int(np.sqrt(MAX_BYTES / num_bytes(shape, 1)) * 2**0.5)
    while num_bytes(shape, most) > MAX_BYTES:
        most -= 1
    if wanted is None:
        return max(1, min(most, DEFAULT_TOKENS, num_tokens))
    if wanted > num_tokens:
        raise UserError(f"page_tokens {wanted:,}: the text has {pluralize(num_tokens)}; give that many at most")
    if wanted > most:
        size = f"{num_bytes(shape, wanted) / 2**20:,.0f} MiB"
        raise UserError(
            f"page_tokens {wanted:,}: the terms of {shape[0]} x {shape[1]} heads would take {size} of the page; give "
            f"{most:,} at most"
        )
    return wanted


def attention_page(maps: TermMaps, tokens: Sequence[TokenText], title: str, about: str, *, apart: bool) -> str:
    """Return the page as HTML.

    Args:
        maps: all terms.
        tokens: how each token is shown.
        title: title of the page.
        about: a sentence on what was read and how.
        apart: whether to put spaces between tokens (words) or not (bytes, characters, subwords).
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
        "levels": _base64(levels, "<u2"),
        "ranges": _base64(ranges, "<f8"),
        "content_bias": _base64(maps.content_bias_LNQ.numpy(), "<f4"),
        "position_bias": _base64(maps.position_bias_LNQ.numpy(), "<f4"),
        "log_total": _base64(maps.log_total_LNQ.numpy(), "<f4"),
    }
    # < is escaped, so that nothing in the text can end the script element
    encoded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    filled = {
        "title": escape(title),
        "about": escape(about),
        "style": _part("css"),
        "script": _part("js"),
        "data": encoded,
    }
    parts = _part("html").split("@")
    assert set(parts[1::2]) == filled.keys()
    return "".join(filled[part] if index % 2 else part for index, part in enumerate(parts))


def _part(kind: str) -> str:
    return (resources.files("transformer_xl.analysis") / f"attention_page.{kind}").read_text(encoding="utf-8")


def _quantised(maps: TermMaps) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.float64]]:
    """Quantize terms (a) and (b): levels (L, N, 2, X), and the minimum and the step of each head (L, N, 2, 2).

    Keys that are not seen have level 0, without meaning.
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


def _base64(numbers: npt.NDArray[Any], dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(numbers, dtype=dtype).tobytes()).decode("ascii")
