"""Write the page of `txl analyze attention`: one HTML file with every attention term of every head over a text.

Terms (a) and (b) of each query and key are stored as 16-bit integers between the minimum and maximum of their head, and
terms (c) by key and (d) by distance in float32; the script of the page computes their sum. A value of (a) or (b) is
therefore off by at most half a quantization step, which is 1/131070 of the range of its head, and the relative error of
a probability is about the sum of the errors of (a) and (b). `attention_maps.py` defines the terms.

Shape suffixes: L layers, N heads, Q tokens as queries and as keys, X pairs of a query and a key at or before it, C the
two terms (a) and (b).
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib import resources
from itertools import accumulate
from string import Template
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from matplotlib import colormaps

from transformer_xl.apps.analyze.attention_maps import TermMaps, pluralize
from transformer_xl.config import UserError
from transformer_xl.text.tokenizers import Tokenizer

MAX_BYTES = 8 * 2**20
"""Maximum size of terms (a) and (b) in a page, in bytes before base64, which makes them a third larger."""
DEFAULT_TOKENS = 192
"""Number of tokens on a page by default, if they fit."""

_MAX_LEVEL = 2**16 - 1  # the largest 16-bit integer
_MAX_NAME = 60  # characters, enough to recognize a token
_SYMBOLS = {" ": "\u00b7", "\n": "\u21b5", "\t": "\u21e5"}  # a middle dot and two arrows


@dataclass(frozen=True)
class TokenText:
    """How a token is displayed."""

    shown: str
    """How it is displayed within the text; a newline is a symbol and a line break, so that the text keeps its lines."""
    name: str
    """How it is displayed in tables and plots: on one line, with symbols for whitespace, truncated."""
    odd: bool
    """Whether the token is empty or has bytes that are not whole characters; the page shows it in italics."""


def token_texts(tokenizer: Tokenizer, ids_Q: npt.NDArray[Any]) -> list[TokenText]:
    """Return how to display each token; bytes that are only part of a character are displayed in hexadecimal."""
    return [_token_text(tokenizer.decode_bytes([token])) for token in ids_Q.tolist()]


def _token_text(content: bytes) -> TokenText:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        digits = content.hex(" ").upper()
        return TokenText(digits, truncate(list(f"bytes {digits}"), _MAX_NAME), odd=True)
    if not text:
        # a token that decodes to no bytes at all; \u2205 is the sign for the empty set
        return TokenText("\u2205", "nothing", odd=True)
    # characters that cannot be printed become escapes, such as \x00
    parts = [part if part.isprintable() or part in _SYMBOLS else repr(part)[1:-1] for part in text]
    shown = "".join(parts).translate(str.maketrans({"\n": _SYMBOLS["\n"] + "\n", "\t": _SYMBOLS["\t"]}))
    return TokenText(shown, truncate([_SYMBOLS.get(part, part) for part in parts], _MAX_NAME), odd=False)


def truncate(parts: Sequence[str], max_length: int) -> str:
    """Join parts of text, truncated to at most `max_length` characters, with ... at the end; no part is split."""
    ends = list(accumulate(map(len, parts)))
    if not ends or ends[-1] <= max_length:
        return "".join(parts)
    return "".join(part for part, end in zip(parts, ends, strict=True) if end <= max_length - 3) + "..."


def choose_page_tokens(shape: tuple[int, int], num_tokens: int, requested: int | None) -> int:
    """Return the number of tokens on the page: `requested`, or by default as many as fit, at most `DEFAULT_TOKENS`.

    Args:
        shape: L and N.
        num_tokens: length of the text.
        requested: the number that the user asks for, or None for the default.

    Raises:
        UserError: `requested` is more than the text has, or than fit into a page.
    """
    max_pairs = MAX_BYTES // (2 * 2 * math.prod(shape))  # of each head two terms, with 2 bytes each
    max_tokens = (math.isqrt(8 * max_pairs + 1) - 1) // 2  # the largest Q with Q (Q + 1) / 2 <= max_pairs
    if requested is None:
        return max(1, min(max_tokens, DEFAULT_TOKENS, num_tokens))
    if requested > min(num_tokens, max_tokens):
        raise UserError(
            f"page_tokens {requested:,}: the text has {pluralize(num_tokens)}, and a page has room for {max_tokens:,} "
            f"with {shape[0]} x {shape[1]} heads; give fewer"
        )
    return requested


def attention_page(maps: TermMaps, tokens: Sequence[TokenText], title: str, about: str, *, spaced: bool) -> str:
    """Return the page as HTML.

    Args:
        maps: all terms.
        tokens: how each token is displayed.
        title: title of the page.
        about: a sentence on the text and the settings.
        spaced: whether to put spaces between tokens (words) or not (bytes, characters, subwords).
    """
    n_layers, n_heads = maps.shape
    levels_LNCX, ranges = _quantize(maps)
    data = {
        "n_layers": n_layers,
        "n_heads": n_heads,
        "tokens": [asdict(token) for token in tokens],
        "spaced": spaced,
        "terms": [{"name": name, "title": term_title} for name, term_title in maps.terms.items()],
        "first_seen": maps.first_seen_Q.tolist(),
        "colours": (colormaps["viridis"](np.arange(256))[:, :3] * 255).round().astype(int).tolist(),
        "levels": _base64(levels_LNCX, "<u2"),
        "ranges": _base64(ranges, "<f8"),
        "content_bias": _base64(maps.content_bias_LNQ.numpy(), "<f4"),
        "position_bias": _base64(maps.position_bias_LNQ.numpy(), "<f4"),
        "log_denominator": _base64(maps.log_denominator_LNQ.numpy(), "<f4"),
    }
    contents = {
        "title": escape(title),
        "about": escape(about),
        "style": _asset("css"),
        "script": _asset("js"),
        # < is escaped, so that nothing in the text can end the script element
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }
    return Template(_asset("html")).substitute(contents)


def _asset(suffix: str) -> str:
    return (resources.files("transformer_xl.apps.analyze") / f"attention_page.{suffix}").read_text(encoding="utf-8")


def _quantize(maps: TermMaps) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.float64]]:
    """Quantize terms (a) and (b): levels (L, N, C, X), and the minimum and the step of each head (L, N, C, 2).

    Pairs of which the query does not see the key have level 0, which the page ignores.
    """
    query_X, key_X = np.tril_indices(maps.num_tokens)
    seen_X = maps.seen_QQ.numpy()[query_X, key_X]
    terms_LNCQQ = torch.stack([maps.content_LNQQ, maps.position_LNQQ], dim=2).numpy()
    seen_terms = terms_LNCQQ[..., query_X[seen_X], key_X[seen_X]].astype(np.float64)
    min_LNC = seen_terms.min(-1)
    step_LNC = (seen_terms.max(-1) - min_LNC) / _MAX_LEVEL
    divisor_LNC = np.where(step_LNC > 0, step_LNC, 1)
    levels_LNCX = np.zeros((*min_LNC.shape, len(query_X)), dtype=np.uint16)
    levels_LNCX[..., seen_X] = np.round((seen_terms - min_LNC[..., None]) / divisor_LNC[..., None])
    return levels_LNCX, np.stack([min_LNC, step_LNC], axis=-1)


def _base64(values: npt.NDArray[Any], dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype=dtype).tobytes()).decode("ascii")
