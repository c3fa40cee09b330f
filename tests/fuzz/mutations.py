"""Changes of inputs that keep some of their structure, so that most of them get past the first check of a reader.

Everything is drawn from a `random.Random`, so that an input follows from a seed.
"""

from __future__ import annotations

import io
import pickletools
import random
import re
from collections.abc import Callable

from random_input import damage

Mutation = Callable[[random.Random, bytes], bytes]

# what json.dumps cannot write, or only from values that exhaust the stack
_ODD_LITERALS = [
    b'"\\ud800"', b"NaN", b"Infinity", b"-1e400", b"1" * 5000, b"2147483647", b"4294967296", b"9223372036854775807",
    b"-9223372036854775808", b"1e18", b"-0.0", b'"' + b"x" * 3000 + b'"', b'"\\u0000"', b'"a\\nb"',
    b"[" * 3000 + b"]" * 3000, b'{"a":' * 3000 + b"1" + b"}" * 3000, b'"../x"', b"null", b"true", b'""', b"{}", b"[]",
]  # fmt: skip
_SHORT_LITERALS = [literal for literal in _ODD_LITERALS if len(literal) < 100]
_SCALAR = re.compile(rb'"(?:[^"\\\n]|\\.)*"|-?\d[\d.eE+-]*|true|false|null')
_YAML = [
    b"&a [*a]", b"&a {b: *a}", b"!!int ''", b"!!float '_'", b"!!bool x", b"!!timestamp x", b"0001-01-01 00:00:00 +1",
    b"2001-99-99", b"!!binary '*'", b"!!set {a, b}", b"!!omap [a: 1]", b"!!pairs [a: 1]", b"{[1]: 2}", b"? [a]",
    b"!!python/name:os.system x", b"1:2:3", b"1_000", b"0x", b"0b", b".inf", b".nan", b"<<: 1", b"{<<: [1]}", b"1e3",
    b"!!str [a]", b"!!int [a]", b"!!map 1", b"!!null x", b"\x00", b"%YAML 9.9", b"--- a", b"'\\ud800'", b"|2\n   x",
    b"\"\\ud800\"", b"!!value {=: 1}", b"=", b"[" * 150, b"{a: " * 150,
]  # fmt: skip


def of_bytes(draw: random.Random, content: bytes) -> bytes:
    """Return other bytes."""
    return damage(draw, content)


def of_json(draw: random.Random, content: bytes) -> bytes:
    """Return JSON, or lines of JSON, with another value somewhere; sometimes other bytes."""
    kind = draw.random()
    scalars = list(_SCALAR.finditer(content))
    if kind < 0.4 and scalars:
        place = draw.choice(scalars)
        return content[: place.start()] + draw.choice(_ODD_LITERALS) + content[place.end() :]
    if kind < 0.5 and scalars:
        one, other = draw.choice(scalars), draw.choice(scalars)
        return content[: one.start()] + other[0] + content[one.end() :]
    try:
        return damage(draw, content, is_json=kind < 0.95)
    except (ValueError, IndexError, RecursionError):
        return damage(draw, content)


def of_yaml(draw: random.Random, content: bytes) -> bytes:
    """Return YAML with another value, tag or line somewhere."""
    kind, lines = draw.random(), content.splitlines(keepends=True) or [b""]
    index = draw.randrange(len(lines))
    name, colon, _ = lines[index].partition(b":")
    if kind < 0.6:
        lines[index] = name + colon + b" " + draw.choice([*_YAML, *_SHORT_LITERALS]) + b"\n"
    elif kind < 0.7:
        lines.insert(index, draw.choice(lines))
    elif kind < 0.8:
        del lines[index]
    else:
        return damage(draw, content)
    return b"".join(lines)


def of_pickle(draw: random.Random, content: bytes) -> bytes:
    """Return a pickle with opcodes left out, doubled, exchanged, or drawn with an argument of any length."""
    starts = [0]
    try:
        starts = [position for _, _, position in pickletools.genops(io.BytesIO(content)) if position is not None]
    except Exception:
        return damage(draw, content)
    steps = [content[start:end] for start, end in zip(starts, [*starts[1:], len(content)], strict=True)]
    for _ in range(draw.choice([1, 1, 2, 5])):
        index, kind = draw.randrange(len(steps)), draw.random()
        if kind < 0.2 and len(steps) > 1:
            del steps[index]
        elif kind < 0.4:
            steps.insert(index, draw.choice(steps))
        elif kind < 0.55:
            other = draw.randrange(len(steps))
            steps[index], steps[other] = steps[other], steps[index]
        elif kind < 0.85:
            steps[index] = _opcode(draw)
        else:
            steps[index] = damage(draw, steps[index])
    return b"".join(steps)


def _opcode(draw: random.Random) -> bytes:
    opcode = draw.choice(pickletools.opcodes)
    code, kind = opcode.code.encode("latin-1"), opcode.arg
    if kind is None:
        return code
    if kind.n >= 0:
        return code + draw.choice(
            [bytes(kind.n), b"\xff" * kind.n, b"\x01" + bytes(kind.n)[1:], draw.randbytes(kind.n)]
        )
    if kind.n == pickletools.UP_TO_NEWLINE:
        lines = [b"0", b"-1", b"9" * 40, b"x", b"'x'", b"torch", b"collections", b"1.5", b"nan", b"01", b"\\ud800"]
        return code + draw.choice(lines) + b"\n" + (draw.choice(lines) + b"\n" if "pair" in kind.name else b"")
    width = {pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT8U: 8}.get(kind.n, 4)
    size = draw.choice([0, 1, 3, 200])
    claimed = draw.choice([size, size, size, 2 ** (8 * width - 1) - 1, 255])
    return code + claimed.to_bytes(width, "little") + draw.randbytes(size)


def of_midi(draw: random.Random, content: bytes) -> bytes:
    """Return a MIDI file whose chunks have the lengths that their heads say, with other bytes in one of them."""
    chunks, position = list[tuple[bytes, bytes]](), 0
    while position + 8 <= len(content):
        length = int.from_bytes(content[position + 4 : position + 8])
        chunks.append((content[position : position + 4], content[position + 8 : position + 8 + length]))
        position += 8 + length
    if not chunks or draw.random() < 0.2:
        return damage(draw, content)
    index = draw.randrange(len(chunks))
    chunks[index] = (chunks[index][0], damage(draw, chunks[index][1]))
    if draw.random() < 0.2:
        chunks.append(draw.choice(chunks))
    return b"".join(kind + len(body).to_bytes(4) + body for kind, body in chunks)


def of_request(draw: random.Random, content: bytes) -> bytes:
    """Return a line with method and path, and the body after it, with another body; sometimes another path."""
    head, _, body = content.partition(b"\n")
    return (damage(draw, head) if draw.random() < 0.05 else head) + b"\n" + of_json(draw, body)
