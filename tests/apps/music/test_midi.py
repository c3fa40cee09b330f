"""MIDI files become tokens and back without a change; damaged, hostile and endless files give one line and no crash."""

from __future__ import annotations

import json
import os
import random
import signal
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from melodies import MELODIES, TICKS, melody, notes_of

from transformer_xl.apps.music.midi import MidiCodec, MidiError, MidiLimits, midi_codec
from transformer_xl.config import UserError
from transformer_xl.text.tokenizers import load_tokenizer, save_tokenizer
from transformer_xl.text.tokenizers.integer import IntegerTokenizer

symusic: Any = pytest.importorskip("symusic")
pytest.importorskip("miditok")

END = b"\x00\xff\x2f\x00"
LAST = b"\xff\xff\xff\x7f"  # the longest time between two events, 2^28 - 1 ticks
NOTE = b"\x00\x90\x3c\x40\x01\x80\x3c\x00"


@pytest.fixture(scope="module")
def codec() -> MidiCodec:
    return midi_codec()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "piece.mid").write_bytes(melody())
    return tmp_path / "piece.mid"


def one_track(events: bytes, ticks: int = TICKS, num_tracks: int = 1) -> bytes:
    header = b"MThd" + struct.pack(">IHHH", 6, int(num_tracks > 1), num_tracks, ticks)
    return header + (b"MTrk" + struct.pack(">I", len(events)) + events) * num_tracks


def notes_in(content: bytes) -> list[tuple[float, float, int]]:
    """Return start and length, in quarter notes, and pitch of the notes of a MIDI file."""
    score = symusic.Score.from_midi(content)
    ticks = score.ticks_per_quarter
    notes = [(note.time / ticks, note.duration / ticks, note.pitch) for track in score.tracks for note in track.notes]
    return sorted(notes)


@pytest.mark.parametrize("name", MELODIES)
def test_notes_and_tokens_survive_a_round_trip(codec: MidiCodec, tmp_path: Path, name: str) -> None:
    path = tmp_path / "piece.mid"
    path.write_bytes(melody(name))
    ids = codec.encode_file(path)
    content, num_notes = codec.decode([*ids, codec.tokenizer.num_values])  # with the end-of-sequence token
    expected = [(start / TICKS, length / TICKS, pitch) for start, length, pitch in notes_of(MELODIES[name][1])]
    assert notes_in(content) == expected
    assert num_notes == len(expected)
    path.write_bytes(content)
    assert codec.encode_file(path) == ids


@pytest.mark.parametrize("signature", [(5, 8), (7, 8), (9, 8), (13, 16), (2, 2), (3, 2), (7, 4), (12, 8), (4, 4)])
def test_bars_have_the_length_of_their_time_signature(codec: MidiCodec, path: Path, signature: tuple[int, int]) -> None:
    """MidiTok's defaults take 5/8 and others for 4/4, in silence."""
    path.write_bytes(bars_in(*signature))
    names = json.loads(codec.tokenizer.midi)["tokens"]
    ids = codec.encode_file(path)
    of_bar = ["Bar_None", f"TimeSig_{signature[0]}/{signature[1]}", "Position_0"]
    assert [names[index] for index in ids if names[index].startswith(("Bar", "TimeSig", "Position"))] == of_bar * 3
    (written,) = symusic.Score.from_midi(codec.decode(ids)[0]).time_signatures
    assert (written.numerator, written.denominator) == signature


def test_a_time_signature_without_a_token_is_refused(codec: MidiCodec, path: Path) -> None:
    path.write_bytes(bars_in(17, 16))
    with pytest.raises(MidiError, match="has the time signature 17/16, for which there is no token"):
        codec.encode_file(path)


def bars_in(beats: int, unit: int) -> bytes:
    """Return a MIDI file with a note at the beginning of each of three bars."""
    score, track = symusic.Score(TICKS), symusic.Track(program=0)
    score.time_signatures.append(symusic.TimeSignature(0, beats, unit))
    for bar in range(3):
        track.notes.append(symusic.Note(bar * beats * 4 * TICKS // unit, TICKS // 4, 60 + bar, 80))
    score.tracks.append(track)
    return score.dumps_midi()


def test_the_saved_vocabulary_decides_what_the_tokens_mean(codec: MidiCodec, path: Path) -> None:
    ids = codec.encode_file(path)
    save_tokenizer(codec.tokenizer, path.parent / "txl_tokenizer.json")
    loaded = load_tokenizer(path.parent)
    assert isinstance(loaded, IntegerTokenizer)
    assert loaded == codec.tokenizer
    # the same tokens, numbered in another order
    values = json.loads(loaded.midi)
    values["tokens"].reverse()
    reverse = MidiCodec(replace(loaded, midi=json.dumps(values)))
    assert reverse.encode_file(path) == [loaded.num_values - 1 - token for token in ids]
    assert reverse.decode(reverse.encode_file(path)) == codec.decode(ids)
    values["tokens"][3] = "Pitch_Unknown"
    with pytest.raises(UserError, match="MidiTok makes other tokens than"):
        MidiCodec(replace(loaded, midi=json.dumps(values))).encode_file(path)
    with pytest.raises(UserError, match="integers of this tokenizer are not music"):
        MidiCodec(IntegerTokenizer(23))


def test_any_tokens_can_be_written(codec: MidiCodec) -> None:
    draw = random.Random(5)
    for length in (0, 1, 7, 997):
        content, num_notes = codec.decode(draw.choices(range(codec.tokenizer.vocab_size), k=length))
        assert len(notes_in(content)) == num_notes


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        (b"", "not a MIDI file, which begins with MThd"),
        (b"notes\n", "not a MIDI file, which begins with MThd"),
        (melody()[:-9], "not a valid MIDI file"),
        (one_track(END), "a MIDI file without notes"),
        (one_track(NOTE + END, ticks=0), "no number of ticks of a quarter note"),
        (one_track(NOTE + END, ticks=0x8000 | 25), "not a valid MIDI file .*Division type"),
        (one_track(LAST + NOTE[1:] + END), "longer than the 100,000 quarter notes"),
        (one_track((LAST + NOTE[1:]) * 97 + END), "longer than|not a valid MIDI file"),  # overflows 32 bits
        (one_track(NOTE * 100_001 + END), "has 100,001 notes and tempos, and at most 100,000"),
        (one_track(b"\x01\xff\x51\x03\x07\xa1\x20" * 200_003 + NOTE + END), r"has 200,00\d notes and tempos"),
        (one_track(b"\x00\xf0" + LAST + END), "not a valid MIDI file"),
        (melody() + bytes(10 * 2**20), "larger than 10,485,760 bytes"),
    ],
)
def test_bad_files_give_one_line(codec: MidiCodec, path: Path, content: bytes, pattern: str) -> None:
    bad = path.with_name("bad.mid")
    bad.write_bytes(content)
    with pytest.raises(MidiError, match=pattern) as raised:
        codec.encode_file(bad)
    assert "\n" not in str(raised.value)
    assert codec.encode_file(path)  # the next file is read


def test_damaged_files_are_read_or_refused(codec: MidiCodec, path: Path) -> None:
    draw, content = random.Random(3), melody()
    for _ in range(97):
        damaged = bytearray(content)
        for _ in range(draw.randrange(1, 5)):
            start = draw.randrange(len(damaged))
            damaged[start : start + draw.randrange(5)] = draw.choice([b"", b"\xff", LAST, draw.randbytes(3)])
        path.write_bytes(damaged)
        try:
            ids = codec.encode_file(path)
        except MidiError:
            continue
        assert all(0 <= token < codec.tokenizer.num_values for token in ids)


def test_a_file_that_takes_too_long_or_too_much_memory_or_crashes_the_parser_is_refused(path: Path) -> None:
    large = path.with_name("large.mid")
    large.write_bytes(one_track(NOTE * 50_000 + END))
    hurried = MidiCodec(limits=MidiLimits(max_seconds=0.0))
    with pytest.raises(MidiError, match="took longer than 0 s"):
        hurried.encode_file(large)
    small = MidiCodec(limits=MidiLimits(max_memory_bytes=2**24))
    with pytest.raises(
        MidiError, match=r"needs more than 16,777,216 bytes of memory|crashed or needed too much memory"
    ):
        small.encode_file(large)
    assert small.encode_file(path)
    assert small._process is not None
    os.kill(small._process.pid, signal.SIGSEGV)
    with pytest.raises(MidiError, match="the parser crashed"):
        small.encode_file(path)
    assert small.encode_file(path)  # by a new process


def test_a_tokenizer_file_cannot_exhaust_memory(codec: MidiCodec, path: Path) -> None:
    values = json.loads(codec.tokenizer.midi)
    values["settings"]["beat_res"] = {"0_100000": 100_000}
    hostile = MidiCodec(replace(codec.tokenizer, midi=json.dumps(values)), limits=MidiLimits(max_memory_bytes=2**26))
    with pytest.raises(UserError, match="the MIDI tokens of this tokenizer cannot be made"):
        hostile.encode_file(path)


def test_without_miditok_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_xl.apps.music.midi.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"miditok is not installed; install it: pip install "):
        MidiCodec()


def test_instruments_are_kept(codec: MidiCodec, path: Path) -> None:
    violin = b"\x00\xc0\x28" + NOTE.replace(b"\x01\x80", b"\x83\x60\x80")
    path.write_bytes(one_track(violin + END))
    content, num_notes = codec.decode(codec.encode_file(path))
    score = symusic.Score.from_midi(content)
    assert (num_notes, [track.program for track in score.tracks]) == (1, [40])
