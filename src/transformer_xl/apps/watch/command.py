"""`txl watch`: the surprisal of the lines of a log or another text while it is written."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from transformer_xl.cli.flags import check_flags, optional_flags
from transformer_xl.cli.options import DEFAULT_DEVICE, DeviceFlags, JsonLines
from transformer_xl.cli.output import load_and_say, print_json, printable, say_memory_length
from transformer_xl.config import EvaluationConfig, UserError
from transformer_xl.progress import say

if TYPE_CHECKING:
    from transformer_xl.apps.watch.line_surprisal import LineSurprisal
    from transformer_xl.apps.watch.live import LiveText
    from transformer_xl.run import Run

_Score = Literal["mean", "sum", "max"]

StreamFlags = optional_flags(
    "stream", EvaluationConfig.model_fields, "batch_size", "warmup_tokens", "reset_memory", "dynamic"
)


@dataclass(frozen=True)
class WatchOptions:
    """The text, and which of its lines are printed.

    Attributes:
        file: File to follow as it grows, also when it is rotated or truncated. [default: standard input, until
            its end]
        from_end: Begin at the end of --file, not at its beginning.
        socket: Path of a Unix socket to create, or a local HOST:PORT, to which programs write lines.
        threshold: Print lines whose score is above this, in bits.
        calibrate: File of normal text, which is read first; the threshold is the lowest that --false-alarms of
            its lines exceed.
        false_alarms: Fraction of the lines of --calibrate that may be above the threshold. [default: 0.001]
        score: Score of a line that is compared: the mean or the sum over its tokens, or its most surprising
            token. [default: mean]
        state: File that the state is saved to at the end, and read from if it exists, so that the next command
            continues, with the same threshold unless it gives another. The end of standard input then ends no
            line.
        max_delay: Seconds that a whole line waits for more text before it is scored.
    """

    file: Path | None = None
    from_end: Annotated[bool, Parameter(negative=())] = False
    socket: str | None = None
    threshold: float | None = None
    calibrate: Path | None = None
    false_alarms: float | None = None
    score: _Score | None = None
    state: Path | None = None
    max_delay: float = 0.2

    def check(self) -> None:
        """Check that the options agree, and that the state can be written at the end.

        Raises:
            UserError: they do not, or it cannot.
        """
        state = self.state
        if self.file is not None and self.socket is not None:
            raise UserError("--file and --socket were both given; use one of them")
        if self.from_end and self.file is None:
            raise UserError("--from-end is for --file; give a file, or leave it out")
        if self.threshold is not None and not math.isfinite(self.threshold):
            raise UserError(f"--threshold {self.threshold:g} is no number of bits; leave it out to print every line")
        if self.threshold is not None and self.calibrate is not None:
            raise UserError("--threshold and --calibrate were both given; use one of them")
        if self.false_alarms is not None and self.calibrate is None:
            raise UserError("--false-alarms needs --calibrate FILE, with normal text")
        if state is not None and not os.access(state.absolute().parent, os.W_OK):
            advice = f"folder {state.parent} is missing or cannot be written to; give another path"
            raise UserError(f"--state {state}: {advice}")
        if not 0 <= self.max_delay <= 3600:
            raise UserError(f"--max-delay {self.max_delay:g} is out of range; give seconds from 0 to 3600, such as 0.2")

    def open(self) -> LiveText:
        """Open the text."""
        from transformer_xl.apps.watch.live import FollowedFile, PipedText, SocketText
        from transformer_xl.text.sources.archives import standard_input

        if self.file is not None:
            return FollowedFile(self.file, from_end=self.from_end)
        if self.socket is not None:
            source = SocketText(self.socket)
            say(f"listening at {source.name}")
            return source
        text = standard_input("give --file or --socket")
        if text.isatty():
            say("reading what is typed, until Ctrl-D; a log is read with txl watch RUN < FILE, or --file FILE")
        return PipedText(text.fileno())


_DEFAULTS = WatchOptions()


def watch(
    run: Path,
    /,
    *,
    options: Annotated[WatchOptions, Parameter(name="*")] = _DEFAULTS,
    settings: Annotated[StreamFlags | None, Parameter(name="*")] = None,
    checkpoint: Literal["best", "last"] = "best",
    device_options: DeviceFlags = DEFAULT_DEVICE,
    json: JsonLines = False,
) -> int:
    """Read a text as it is written, and print the lines that surprise a run, with their surprisal in bits.

    Memory continues from line to line, and the surprisal is that of txl score for the whole text. Without a threshold,
    every line is printed. Ctrl-C or SIGTERM ends the command with status 130 or 143.

    Parameters
    ----------
    run
        Folder of a run, trained on text of the same kind.
    options
        The text, and which of its lines are printed.
    settings
        How the text is read.
    checkpoint
        best: the weights with the lowest validation loss; last: those of the last checkpoint.
    """
    options.check()
    config = check_flags(EvaluationConfig, settings)
    from transformer_xl.apps.watch.line_surprisal import LineStream, watch_lines
    from transformer_xl.evaluation.stream import SurprisalStream

    loaded = load_and_say(run, device_options.choose(), checkpoint)
    saved, state = dict[str, Any](), options.state
    if state is not None and (state.exists() or state.is_symlink()):
        stream, saved = SurprisalStream.load(loaded, state, config)
    else:
        stream = SurprisalStream(loaded, config)
    say_memory_length(loaded, stream.plan)
    lines = LineStream(stream, saved.get("lines", {}) if saved else None)
    name, limit = _alarm(loaded, config, options, saved)
    source = options.open()
    position = saved.get("position")
    if options.file is not None and isinstance(position, dict) and position:  # empty: it was no file
        source.begin_at(position)
    num_lines = num_printed = 0
    start, num_tokens = time.perf_counter(), stream.num_tokens
    try:
        with _stopped_by_signals() as stop:
            is_end = state is None
            delay = options.max_delay
            for line in watch_lines(lines, source, max_delay=delay, is_stopped=lambda: stop.number > 0, finish=is_end):
                num_lines += 1
                if limit is None or line.score(name) > limit:
                    num_printed += 1
                    stop.is_printing = True
                    _print(line, name, limit, as_json=json)
                    stop.is_printing = False
    finally:  # also where standard output was closed
        if state is not None:
            if received := source.rest():  # which comes first next time
                with suppress(UserError):  # what cannot be encoded must not keep the state from being saved
                    next(lines.report(lines.read(received)), None)
            alarm = {"score": name, "threshold": limit}
            stream.save(state, {"lines": lines.state(), "position": source.position(), **alarm})
        source.close()
    above = "" if limit is None else f", {num_printed:,} of them above {limit:.4g} bits ({name})"
    seconds = time.perf_counter() - start
    say(f"{num_lines:,} lines{above}; {stream.num_tokens - num_tokens:,} tokens in {seconds:,.1f} s")
    return 128 + stop.number if stop.number else 0


def _alarm(
    run: Run, config: EvaluationConfig, options: WatchOptions, saved: dict[str, Any]
) -> tuple[_Score, float | None]:
    """Return the score that is compared, and the threshold: given, from normal text, or that of the saved state."""
    from transformer_xl.apps.watch.line_surprisal import LineStream
    from transformer_xl.apps.watch.line_surprisal import calibrate as calibrate_lines
    from transformer_xl.evaluation.stream import SurprisalStream
    from transformer_xl.text.sources.archives import FileRange

    calibrate, score = options.calibrate, options.score
    saved_score, saved_threshold = saved.get("score"), saved.get("threshold")
    is_saved = saved_score in ("mean", "sum", "max") and isinstance(saved_threshold, float)
    if options.threshold is None and calibrate is None and is_saved and score in (None, saved_score):
        return saved_score, saved_threshold  # pyrefly: ignore[bad-return]
    if options.threshold is None and calibrate is None and is_saved:
        raise UserError(
            f"the state has a threshold of {saved_threshold:g} for score {saved_score}, not for {score}; give "
            "--threshold or --calibrate too, or leave --score out"
        )
    name = score or "mean"
    if calibrate is None:
        return name, options.threshold
    rate = 0.001 if options.false_alarms is None else options.false_alarms
    lines = LineStream(SurprisalStream(run, config))

    def normal_lines() -> Iterator[LineSurprisal]:
        for chunk in FileRange(calibrate):
            yield from lines.read(chunk)
        yield from lines.finish()

    found = calibrate_lines(normal_lines(), name, rate)
    say(f"threshold {found.threshold:.4g} bits ({name}): {found.alarms:,} of {found.lines:,} normal lines are above it")
    return name, found.threshold


@dataclass
class _Stop:
    """What SIGINT and SIGTERM ask for: to stop, and if there are two, at once where nobody reads what is printed."""

    number: int = 0
    """The first signal, or 0."""
    is_printing: bool = False

    def on_signal(self, number: int, _: object) -> None:
        """Remember the signal; while a block is read, a second one waits too, else lines of it would be lost."""
        if self.number and self.is_printing:
            raise KeyboardInterrupt
        self.number = self.number or number


@contextmanager
def _stopped_by_signals() -> Iterator[_Stop]:
    stop = _Stop()
    previous = {number: signal.signal(number, stop.on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _print(line: LineSurprisal, name: _Score, threshold: float | None, *, as_json: bool) -> None:
    if as_json:
        score = {"score": line.score(name), "threshold": threshold}
        print_json({**asdict(line), "bits_per_token": line.bits_per_token, **score}, indent=None)
    else:
        text = printable(line.text)
        part = f" (part {line.part})" if line.part else ""
        bits = f"{line.bits_per_token:.2f} bits/token, {line.bits:.1f} bits, max {line.max_bits:.2f}"
        print(f"line {line.line}{part}: {bits}: {text}")
    sys.stdout.flush()
