"""MIDI files as integers, with the library MidiTok (its representation REMI: bars, positions, pitches, durations).

Files are read and written by another process (`midi_process.py`), since the parser is C++ and the files may come from
anyone: a file that is not valid, too large, takes too long or makes that process crash is an error in one line. The
process is started when it is first needed, and again after a crash.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformer_xl.config import UserError
from transformer_xl.config.extras import missing_extra
from transformer_xl.files import as_user_error, check_new_file
from transformer_xl.text.sources.file_codec import MIDI_SUFFIXES, FileCodecError
from transformer_xl.text.tokenizers.integer import IntegerTokenizer

_MAX_START_SECONDS = 120.0  # importing MidiTok
_MAX_ANSWER_BYTES = 2**26


@dataclass(frozen=True)
class MidiLimits:
    """Bounds of one MIDI file, far above those of real pieces."""

    max_bytes: int = 10 * 2**20
    """Size of the file."""
    max_events: int = 100_000
    """Number of notes, tempos and time signatures."""
    max_quarters: int = 100_000
    """Length in quarter notes, 14 hours at 120 in a minute."""
    max_seconds: float = 30.0
    """Time to read or write it."""
    max_memory_bytes: int = 2**30
    """Memory to read or write it, besides that of the libraries."""


class MidiError(FileCodecError):
    """A file that cannot be read as MIDI, or tokens that cannot be written."""


class MidiCodec:
    """Reads MIDI files to token ids, and writes token ids as MIDI files."""

    kind = "MIDI"

    def __init__(self, tokenizer: IntegerTokenizer | None = None, *, limits: MidiLimits | None = None) -> None:
        """Prepare to read and write.

        Args:
            tokenizer: the tokenizer of a corpus or run of MIDI files, or None for a new one.
            limits: bounds of one file, or None for the defaults.

        Raises:
            UserError: MidiTok is not installed, or the tokenizer is not one of MIDI files.
        """
        if tokenizer is not None and not tokenizer.midi:
            raise UserError(
                "the integers of this tokenizer are not music; make a corpus with txl prepare --tokenizer midi"
            )
        if find_spec("miditok") is None:
            raise missing_extra("miditok", "music")
        self._tokenizer, self._limits = tokenizer, limits or MidiLimits()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def tokenizer(self) -> IntegerTokenizer:
        """The tokenizer, which contains the settings and the name of each token."""
        if self._tokenizer is None:
            self._start()
        assert self._tokenizer is not None
        return self._tokenizer

    def encode_file(self, path: Path) -> list[int]:
        """Return the token ids of a MIDI file.

        Raises:
            MidiError: it is no MIDI file, has no notes, or exceeds a bound.
            UserError: it cannot be read.
        """
        with as_user_error(f"reading {path}"), path.open("rb") as file:
            content = file.read(self._limits.max_bytes + 1)
        if len(content) > self._limits.max_bytes:
            raise MidiError(f"larger than {self._limits.max_bytes:,} bytes, which no MIDI file of one piece is")
        if not content.startswith(b"MThd"):
            raise MidiError("not a MIDI file, which begins with MThd")
        return self._ask({"encode": base64.b64encode(content).decode()})["ids"]

    def decode(self, token_ids: Iterable[int]) -> tuple[bytes, int]:
        """Return the content of a MIDI file with these tokens, and its number of notes.

        Tokens that are out of place, as those of a model with little training can be, are left out.

        Raises:
            MidiError: it exceeds a bound.
        """
        ids = [int(token) for token in token_ids if token < self.tokenizer.num_values]
        answer = self._ask({"decode": ids})
        return base64.b64decode(answer["midi"]), answer["num_notes"]

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            _end(self._process)
            self._process = None

    def _start(self) -> None:
        # -P: a file in the working directory is not taken for a library
        command = [sys.executable, "-P", "-m", "transformer_xl.apps.music.midi_process"]
        with as_user_error("starting the process that reads MIDI files"):
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            )
        weakref.finalize(self, _end, self._process)
        given = json.loads(self._tokenizer.midi) if self._tokenizer else None
        description = self._exchange({"begin": given, "limits": asdict(self._limits)}, _MAX_START_SECONDS)
        if "error" in description:
            self.close()
            raise UserError(f"the MIDI tokens of this tokenizer cannot be made: {description['error']}")
        if self._tokenizer is None:
            self._tokenizer = IntegerTokenizer(len(description["tokens"]), midi=json.dumps(description, sort_keys=True))

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._process is None:
            self._start()
        answer = self._exchange(request, self._limits.max_seconds)
        if "error" in answer:
            raise MidiError(answer["error"])
        return answer

    def _exchange(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request, and return the answer; a process that does not answer is ended."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        deadline, watchdog = time.monotonic() + seconds, threading.Timer(seconds, process.kill)
        watchdog.start()
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline(_MAX_ANSWER_BYTES)
        except OSError:
            answer = b""
        except BaseException:  # Ctrl-C: the answer must not be taken for that of another request
            self.close()
            raise
        finally:
            watchdog.cancel()
        if time.monotonic() >= deadline:
            self.close()
            return {"error": f"took longer than {seconds:g} s"}
        if not answer.endswith(b"\n"):
            self.close()
            return {"error": "the parser crashed or needed too much memory, so the file is damaged"}
        return json.loads(answer)


@lru_cache(maxsize=2)
def midi_codec(tokenizer: IntegerTokenizer | None = None) -> MidiCodec:
    """Return the codec of a tokenizer, or of a new one; always the same, so that its process is started once.

    Raises:
        UserError: as `MidiCodec`.
    """
    return MidiCodec(tokenizer)


def check_midi_path(path: Path) -> None:
    """Check that a MIDI file can be created at a path.

    Raises:
        UserError: its name does not end in .mid or .midi, or `check_new_file` refuses it.
    """
    if path.suffix.lower() not in MIDI_SUFFIXES:
        raise UserError(f"{path}: the name of a MIDI file must end in {' or '.join(MIDI_SUFFIXES)}")
    check_new_file(path)


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError), process:  # which closes the pipes; what was not sent cannot be
        process.kill()
