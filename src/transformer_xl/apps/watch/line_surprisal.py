"""Surprisal of the lines of a stream, and a threshold for what is surprising, from text that is known to be normal.

Each line has three scores, in bits: the mean and the sum over its tokens, its newline included, and the maximum, that
of its most surprising token. Which one tells anomalies from normal lines depends on the text: the sum grows with the
length of a line, the mean with the share of it that is surprising, and the maximum shows a single token that should
not be there.
"""

from __future__ import annotations

import codecs
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from transformer_xl.apps.watch.live import BLOCK_BYTES, LiveText
from transformer_xl.config import UserError
from transformer_xl.evaluation.stream import ScoredTokens, SurprisalStream

LineScoreName = Literal["mean", "sum", "max"]

MAX_LINE_TOKENS = 2**16
"""A longer line is reported in parts of about this length."""
_MAX_TEXT_BYTES = 1000  # of a line, which are kept to show it
_NATS_PER_BIT = math.log(2)
_IDLE_SECONDS = 0.2  # between two looks at whether to stop


@dataclass(frozen=True)
class LineSurprisal:
    """The surprisal of a line, or of a part of a long one."""

    line: int
    """Line number, from 1."""
    part: int
    """0 for a whole line; the parts of a long one are numbered from 1."""
    tokens: int
    """Number of tokens, with the newline."""
    bits: float
    """Sum of the surprisal of all tokens, in bits."""
    max_bits: float
    """Surprisal of the most surprising token, in bits."""
    text: str = ""
    """The first 1,000 bytes of the line, without its newline; what is not UTF-8 as U+FFFD."""

    @property
    def bits_per_token(self) -> float:
        """Mean surprisal of a token, in bits."""
        return self.bits / self.tokens

    def score(self, name: LineScoreName) -> float:
        """Return the mean, the sum or the maximum over the tokens, in bits."""
        return {"mean": self.bits_per_token, "sum": self.bits, "max": self.max_bits}[name]


_Count = Annotated[int, Field(ge=0, lt=2**62)]
_Start = Annotated[bytes, Field(max_length=_MAX_TEXT_BYTES)]


@dataclass
class _State:
    """What a LineStream holds: the line whose tokens are being read, and the first bytes of lines that have arrived."""

    __pydantic_config__ = ConfigDict(strict=True, allow_inf_nan=False, ser_json_bytes="hex", val_json_bytes="hex")

    line: _Count
    part: _Count
    tokens: _Count
    bits: float
    max_bits: float
    starts: Annotated[list[_Start], Field(min_length=1)]
    """The first bytes of lines that are not reported, of which the last is arriving."""
    mark: _Start | None
    """What may be a byte order mark, which is no text; None after it."""
    unreported: list[tuple[_Count, _Count, Annotated[int, Field(ge=1, lt=2**62)], float, float, str]] = field(
        default_factory=list
    )
    """The values of lines that `report` has yet to yield, or has yielded last."""


_JSON = TypeAdapter(_State)


class LineStream:
    """Reads a text in bytes chunk by chunk, and returns the surprisal of each line once it is known."""

    def __init__(self, stream: SurprisalStream, state: Mapping[str, Any] | None = None) -> None:
        """Begin at the first line, or where an earlier LineStream of the same stream was.

        Args:
            stream: the stream of the tokens, which must be read through this object alone.
            state: the value of `state` of the earlier one, or None.

        Raises:
            UserError: the tokenizer has no token for the end of a line, or the state is not one.
        """
        self.stream = stream
        self._is_newline_V = stream.run.tokenizer.is_newline_V
        if not self._is_newline_V.any():
            raise UserError("the run's tokenizer has no token for the end of a line, so lines have no surprisal")
        new = _State(line=1, part=0, tokens=0, bits=0.0, max_bits=0.0, starts=[b""], mark=b"")
        try:
            self._state = new if state is None else _JSON.validate_json(json.dumps(state))
        except ValidationError:
            raise UserError("the saved state has no lines, or other ones than can be; give another file") from None

    @property
    def has_waiting_lines(self) -> bool:
        """Whether whole lines have arrived that `flush` would report."""
        return len(self._state.starts) > 1

    def read(self, text: bytes) -> list[LineSurprisal]:
        """Read more of the text, and return the lines whose surprisal is known now.

        Raises:
            UserError: the tokenizer cannot encode the text; nothing was read.
        """
        state = self._state
        if state.mark is not None:
            text = state.mark + text
            if len(text) < len(codecs.BOM_UTF8) and codecs.BOM_UTF8.startswith(text):
                state.mark = text
                return []
            text = text.removeprefix(codecs.BOM_UTF8)
        tokens = self.stream.read(text)
        state.mark = None
        first, *others = text.split(b"\n")
        state.starts[-1] += first[: _MAX_TEXT_BYTES - len(state.starts[-1])]
        state.starts += [start[:_MAX_TEXT_BYTES] for start in others]
        return list(self._lines(tokens))

    def flush(self) -> list[LineSurprisal]:
        """Return all lines that have arrived whole."""
        return list(self._lines(self.stream.flush()))

    def finish(self) -> list[LineSurprisal]:
        """End the text, and return the last lines, also one without a newline."""
        begun, self._state.mark = self._state.mark, None
        lines = self.read(begun or b"")
        lines += self._lines(self.stream.finish())
        if self._state.tokens:
            lines.append(self._end_line())
        self._state.starts = [b""]
        return lines

    def report(self, lines: list[LineSurprisal]) -> Iterator[LineSurprisal]:
        """Yield lines after those that were left; until the next one is asked for, a line stays in the state."""
        unreported = self._state.unreported
        unreported += map(astuple, lines)
        while unreported:
            yield LineSurprisal(*unreported[0])
            del unreported[0]

    def state(self) -> dict[str, Any]:
        """Return what this object holds, as JSON values."""
        return _JSON.dump_python(self._state, mode="json")

    def _lines(self, tokens: ScoredTokens) -> Iterator[LineSurprisal]:
        bits_K, state = tokens.nats_K / _NATS_PER_BIT, self._state
        is_newline_K = self._is_newline_V[tokens.ids_K]
        for start, end in pairwise([0, *(np.flatnonzero(is_newline_K) + 1).tolist(), len(tokens)]):
            if start == end:
                continue
            state.tokens += end - start
            state.bits += float(bits_K[start:end].sum())
            state.max_bits = max(state.max_bits, float(bits_K[start:end].max()))
            if is_newline_K[end - 1]:
                yield self._end_line()
            elif state.tokens >= MAX_LINE_TOKENS:
                yield self._end_part(state.starts[0], state.part + 1)

    def _end_line(self) -> LineSurprisal:
        state = self._state
        start = state.starts.pop(0) if self.has_waiting_lines else state.starts[0]
        line = self._end_part(start, state.part + 1 if state.part else 0)
        state.line, state.part = state.line + 1, 0
        return line

    def _end_part(self, start: bytes, part: int) -> LineSurprisal:
        """Return what is known of the line as a whole or as a part of it, and begin the next part."""
        state, text = self._state, start.removesuffix(b"\r").decode("utf-8", errors="replace")
        line = LineSurprisal(state.line, part, state.tokens, state.bits, state.max_bits, text)
        state.part, state.tokens, state.bits, state.max_bits = part, 0, 0.0, 0.0
        return line


@dataclass(frozen=True)
class Calibration:
    """A threshold, and the lines that it is from."""

    threshold: float
    """Lines with a score above this are surprising, in bits."""
    lines: int
    """Number of lines of the normal text."""
    alarms: int
    """How many of them are above the threshold."""


def calibrate(lines: Iterable[LineSurprisal], score: LineScoreName, false_alarms: float) -> Calibration:
    """Return the lowest threshold that at most a fraction of normal lines exceed.

    Args:
        lines: lines of text that is known to be normal.
        score: which score of the lines is compared.
        false_alarms: the fraction, in [0, 1).

    Raises:
        UserError: there are no lines.
    """
    if not 0 <= false_alarms < 1:
        raise UserError(f"false_alarms {false_alarms:g} is out of range; must be 0 <= fraction < 1, such as 0.001")
    scores = np.sort([line.score(score) for line in lines])[::-1]
    if not len(scores):
        raise UserError("there are no lines to calibrate with; give a file of normal text")
    threshold = float(scores[int(false_alarms * len(scores))])
    return Calibration(threshold, len(scores), int((scores > threshold).sum()))


def watch_lines(
    lines: LineStream, source: LiveText, *, max_delay: float, is_stopped: Callable[[], bool], finish: bool = True
) -> Iterator[LineSurprisal]:
    """Yield the surprisal of the lines of a text that is being written, until its end or until it is stopped.

    While text comes faster than it is read, whole segments are read. When it comes slowly, the whole lines that have
    arrived are reported after `max_delay`. What was not asked for stays in the state of `lines`, and comes first later.

    Args:
        lines: reads the text.
        source: the text.
        max_delay: seconds that a whole line waits for the end of its segment.
        is_stopped: returns whether to stop; it is called between blocks.
        finish: whether the end of the text ends its last line; otherwise a line without an end stays in the state.
    """
    yield from lines.report([])
    waiting_since: float | None = None
    while not is_stopped():
        left = _IDLE_SECONDS if waiting_since is None else waiting_since + max_delay - time.monotonic()
        block = source.read(min(max(0.0, left), _IDLE_SECONDS))
        if block is None:
            yield from lines.report(lines.finish() if finish else lines.flush())
            return
        if block:
            yield from lines.report(lines.read(block))
        if not lines.has_waiting_lines:
            waiting_since = None
        elif waiting_since is None:
            waiting_since = time.monotonic()
        # after a full block more is there, and the lines are reported with the next segments
        elif len(block) < BLOCK_BYTES and time.monotonic() - waiting_since >= max_delay:
            yield from lines.report(lines.flush())
            waiting_since = None
    yield from lines.report(lines.read(source.rest()) + lines.flush())
