"""Write melodies in the public domain as MIDI files, in several keys and tempos, to train a small music model on.

    python examples/melodies.py melodies/

Each file has a melody and a bass that plays the root of each bar, if the melody says it. The melodies are folk songs
and pieces by composers who died before 1800 or in 1827.
"""

from __future__ import annotations

import random
import struct
import sys
from pathlib import Path

TICKS = 480  # of a quarter note

# name: notes per bar, and the melody as notes of `PITCH/LENGTH`, lengths in eighths, r for a rest; | is a bar line
MELODIES = {
    # L. van Beethoven (1770-1827), theme of the ninth symphony
    "ode-to-joy": (4, "e5/2 e5/2 f5/2 g5/2 | g5/2 f5/2 e5/2 d5/2 | c5/2 c5/2 d5/2 e5/2 | e5/3 d5/1 d5/4 | "
                      "e5/2 e5/2 f5/2 g5/2 | g5/2 f5/2 e5/2 d5/2 | c5/2 c5/2 d5/2 e5/2 | d5/3 c5/1 c5/4 | "
                      "d5/2 d5/2 e5/2 c5/2 | d5/2 e5/1 f5/1 e5/2 c5/2 | d5/2 e5/1 f5/1 e5/2 d5/2 | c5/2 d5/2 g4/4"),
    # C. Petzold (1677-1733), minuet in the notebook for Anna Magdalena Bach
    "minuet": (3, "d5/2 g4/1 a4/1 b4/1 c5/1 | d5/2 g4/2 g4/2 | e5/2 c5/1 d5/1 e5/1 f#5/1 | g5/2 g4/2 g4/2 | "
                  "c5/2 d5/1 c5/1 b4/1 a4/1 | b4/2 c5/1 b4/1 a4/1 g4/1 | f#4/2 g4/1 a4/1 b4/1 g4/1 | a4/6"),
    "frere-jacques": (4, "c5/2 d5/2 e5/2 c5/2 | c5/2 d5/2 e5/2 c5/2 | e5/2 f5/2 g5/4 | e5/2 f5/2 g5/4 | "
                         "g5/1 a5/1 g5/1 f5/1 e5/2 c5/2 | g5/1 a5/1 g5/1 f5/1 e5/2 c5/2 | c5/2 g4/2 c5/4 | "
                         "c5/2 g4/2 c5/4"),
    "ah-vous-dirai-je": (4, "c5/2 c5/2 g5/2 g5/2 | a5/2 a5/2 g5/4 | f5/2 f5/2 e5/2 e5/2 | d5/2 d5/2 c5/4 | "
                            "g5/2 g5/2 f5/2 f5/2 | e5/2 e5/2 d5/4 | g5/2 g5/2 f5/2 f5/2 | e5/2 e5/2 d5/4"),
    "au-clair-de-la-lune": (4, "c5/2 c5/2 c5/2 d5/2 | e5/4 d5/4 | c5/2 e5/2 d5/2 d5/2 | c5/8 | "
                               "d5/2 d5/2 d5/2 d5/2 | a4/4 a4/4 | d5/2 c5/2 b4/2 a4/2 | g4/8"),
    "london-bridge": (4, "g5/3 a5/1 g5/2 f5/2 | e5/2 f5/2 g5/4 | d5/2 e5/2 f5/4 | e5/2 f5/2 g5/4 | "
                         "g5/3 a5/1 g5/2 f5/2 | e5/2 f5/2 g5/4 | d5/4 g5/4 | e5/2 c5/6"),
}  # fmt: skip
_STEPS = {"c": 0, "d": 2, "e": 4, "f": 5, "g": 7, "a": 9, "b": 11}

Note = tuple[int, int, int]
"""Start and length in ticks, and pitch."""


def notes_of(melody: str) -> list[Note]:
    """Return the notes of a melody."""
    notes, start = list[Note](), 0
    for word in melody.replace("|", " ").split():
        name, _, eighths = word.partition("/")
        length = int(eighths) * TICKS // 2
        if name != "r":
            notes.append((start, length, 12 * (int(name[-1]) + 1) + _STEPS[name[0]] + ("#" in name)))
        start += length
    return notes


def midi_file(notes: list[Note], *, beats_per_bar: int, quarters_per_minute: int, velocity: int = 80) -> bytes:
    """Return a MIDI file of one track."""
    events = [(start, 1, bytes([0x90, pitch, velocity])) for start, _, pitch in notes]
    events += [(start + length, 0, bytes([0x80, pitch, 0])) for start, length, pitch in notes]
    tempo = (60_000_000 // quarters_per_minute).to_bytes(3, "big")
    track = b"\x00\xff\x51\x03" + tempo + b"\x00\xff\x58\x04" + bytes([beats_per_bar, 2, 24, 8])
    time = 0
    for start, _, message in sorted(events):
        track += _variable_length(start - time) + message
        time = start
    track += b"\x00\xff\x2f\x00"
    return b"MThd" + struct.pack(">IHHH", 6, 0, 1, TICKS) + b"MTrk" + struct.pack(">I", len(track)) + track


def _variable_length(number: int) -> bytes:
    """Return a number in groups of seven bits, as MIDI has times."""
    groups = [number & 0x7F]
    while number := number >> 7:
        groups.append(number & 0x7F | 0x80)
    return bytes(reversed(groups))


def variations(name: str, generator: random.Random) -> list[tuple[str, bytes]]:
    """Return a melody in twelve keys, with a bass in half of them, as names and MIDI files."""
    beats, melody = MELODIES[name]
    files: list[tuple[str, bytes]] = []
    for shift in range(-6, 6):
        notes = [(start, length, pitch + shift) for start, length, pitch in notes_of(melody)]
        if generator.random() < 0.5:
            bar = beats * TICKS
            ends = max(start + length for start, length, _ in notes)
            firsts = [next(note for note in notes if note[0] >= start) for start in range(0, ends, bar)]
            notes += [(index * bar, bar, note[2] - 24) for index, note in enumerate(firsts)]
        content = midi_file(notes, beats_per_bar=beats, quarters_per_minute=generator.randrange(80, 140))
        files.append((f"{name}{shift:+d}.mid", content))
    return files


def main(folder: Path) -> None:
    """Write all melodies in all keys into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(1)
    for name in MELODIES:
        for file, content in variations(name, generator):
            (folder / file).write_bytes(content)
    print(f"{len(MELODIES) * 12} files in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "melodies"))
