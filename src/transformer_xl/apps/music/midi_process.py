"""The process that reads and writes MIDI files: python -m transformer_xl.apps.music.midi_process (see `midi.py`).

Each line of standard input is a request as JSON, and each line of standard output its answer. Memory and processor time
are limited by the system, so that no file can use more.
"""

from __future__ import annotations

import base64
import json
import os
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformer_xl.apps.music.midi import MidiLimits

_MAX_BEATS = {2: 4, 4: 12, 8: 16, 16: 16}  # of a bar, by their unit; MidiTok's default lacks 2/2, 5/8, 13/16


def main() -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    music: _Music | None = None
    limits = MidiLimits()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            if "begin" in request:
                limits = MidiLimits(**request["limits"])
                music = _Music(request["begin"], limits)
                answer = music.description
            else:
                assert music is not None
                _limit_time(limits.max_seconds)
                if "encode" in request:
                    answer = music.encode(base64.b64decode(request["encode"]))
                else:
                    answer = music.decode(request["decode"])
        except MemoryError:
            answer = {"error": f"needs more than {limits.max_memory_bytes:,} bytes of memory"}
        except Exception as error:  # the libraries raise plain RuntimeError, and others on damaged files
            message = " ".join(str(error).split()).removesuffix(": iostream error")[:200] or type(error).__name__
            what = "tokens that cannot be written" if "decode" in request else "not a valid MIDI file"
            answer = {"error": message if isinstance(error, _Refused) else f"{what} ({message})"}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


class _Refused(Exception):
    """A request that is refused for a reason which the message says."""


class _Music:
    """MidiTok's tokenizer, with the token ids of a corpus."""

    def __init__(self, given: dict[str, Any] | None, limits: MidiLimits) -> None:
        """Make the tokenizer.

        Args:
            given: the settings and tokens of a corpus, or None for new ones.
            limits: bounds of one file.
        """
        import miditok  # noqa: F401  its memory is not that of a file

        _limit_memory(limits.max_memory_bytes)
        self.limits = limits
        self._tokenizer, settings = _remi(given["settings"] if given else None)
        vocab: dict[str, int] = self._tokenizer.vocab
        tokens = given["tokens"] if given else sorted(vocab, key=vocab.__getitem__)
        if sorted(tokens) != sorted(vocab):
            raise _Refused("this version of MidiTok makes other tokens than the one that the corpus was made with")
        self.description = {"settings": settings, "tokens": tokens}
        # MidiTok may number the same tokens in another order
        self._own_ids = [vocab[token] for token in tokens]
        self._ids = {own_id: index for index, own_id in enumerate(self._own_ids)}

    def encode(self, content: bytes) -> dict[str, Any]:
        import symusic

        score: Any = symusic.Score.from_midi(content)  # its stubs have no methods of a Score that is in ticks
        limits = self.limits
        num_events = score.note_num() + len(score.tempos) + len(score.time_signatures)
        if not score.note_num():
            raise _Refused("a MIDI file without notes")
        if num_events > limits.max_events:
            raise _Refused(f"has {num_events:,} notes and tempos, and at most {limits.max_events:,} are read")
        if score.ticks_per_quarter <= 0:
            raise _Refused("has no number of ticks of a quarter note, so no bars")
        num_quarters = score.end() // score.ticks_per_quarter
        if not 0 <= num_quarters <= limits.max_quarters:  # below 0 where the parser's integers overflow
            raise _Refused(f"is longer than the {limits.max_quarters:,} quarter notes that are read")
        known = self._tokenizer.time_signatures  # MidiTok would take another one for 4/4, and move the bars
        signatures = [(one.numerator, one.denominator) for one in score.time_signatures]
        if unknown := [f"{num}/{denominator}" for num, denominator in signatures if (num, denominator) not in known]:
            raise _Refused(f"has the time signature {unknown[0]}, for which there is no token")
        return {"ids": [self._ids[token] for token in self._tokenizer.encode(score).ids]}

    def decode(self, ids: list[int]) -> dict[str, Any]:
        from miditok import TokSequence

        score = self._tokenizer.decode(TokSequence(ids=[self._own_ids[token] for token in ids]))
        return {"midi": base64.b64encode(score.dumps_midi()).decode(), "num_notes": score.note_num()}


def _remi(settings: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
    """Return MidiTok's tokenizer with these settings, or with ours, and its settings."""
    from miditok import REMI, TokenizerConfig

    with tempfile.TemporaryDirectory(prefix="txl-midi-") as folder:
        path = Path(folder) / "tokenizer.json"
        if settings is not None:
            path.write_text(json.dumps({"tokenization": "REMI", "config": settings}), encoding="utf-8")
            return REMI(params=path), settings
        config = TokenizerConfig(
            special_tokens=["PAD"],
            num_velocities=16,
            use_programs=True,
            one_token_stream_for_programs=True,
            use_tempos=True,
            use_time_signatures=True,
            time_signature_range={unit: list(range(1, most + 1)) for unit, most in _MAX_BEATS.items()},
        )
        tokenizer = REMI(config)
        tokenizer.save(path)
        return tokenizer, json.loads(path.read_text(encoding="utf-8"))["config"]


def _limit_memory(max_bytes: int) -> None:
    """Limit the memory of the process to what it has now, with its libraries, and this amount."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:
        limit = pages * resource.getpagesize() + max_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _limit_time(max_seconds: float) -> None:
    """Limit processor time, in case nobody is left who ends the process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime + max_seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


if __name__ == "__main__":
    main()
