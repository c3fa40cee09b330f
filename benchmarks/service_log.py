"""A synthetic log of a service, and anomalies in it, for benchmarks/anomalies.py and benchmarks/streams.py.

Several sessions run at a time, and their lines are interleaved. In a session, a login is followed by requests, and a
logout ends it. A request is sent to a shard and has a number; the reply that follows has the same number and shard, and
names the file that the request named. So the lines of a session depend on earlier lines, with the lines of others in
between. Session ids, users and durations are random.

All kinds of anomalies and their seed were fixed before anything was measured.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

KINDS = ("rare template", "wrong order", "changed parameter", "corrupted bytes", "truncated line")
ANOMALY_SEED = 20_261_123

_SHARDS = [f"shard-{name}" for name in ("north", "south", "east", "west", "core", "edge")]
_FILES = ["orders.db", "users.db", "carts.db", "stock.db", "prices.db", "events.db"]
_RARE = [
    "ERROR checksum mismatch in block {} of the journal",
    "WARN  clock moved backwards by {} ms, waiting",
    "ERROR certificate of peer {} expired",
    "ERROR out of file descriptors after {} connections",
    "WARN  configuration reloaded by operator {}",
]


@dataclass(frozen=True)
class LogLine:
    """A line of the log, without its newline."""

    text: str
    session: str
    """Id of its session."""
    kind: str = ""
    """The kind of anomaly; empty for a normal line."""


def service_log(num_lines: int, seed: int, *, num_sessions: int = 4) -> list[LogLine]:
    """Return a normal log.

    Args:
        num_lines: number of lines.
        seed: seed of everything random.
        num_sessions: how many sessions run at a time.
    """
    generator, seconds = random.Random(seed), 0.0
    sessions = [_session(generator) for _ in range(num_sessions)]
    lines: list[LogLine] = []
    while len(lines) < num_lines:
        index = generator.randrange(num_sessions)
        line = next(sessions[index], None)
        if line is None:
            sessions[index] = _session(generator)
            continue
        seconds += generator.expovariate(4)
        minutes, second = divmod(seconds, 60)
        time = f"{int(minutes) // 60 % 24:02}:{int(minutes) % 60:02}:{second:06.3f}"
        lines.append(LogLine(f"{time} {line.text}", line.session))
    return lines


def _session(generator: random.Random) -> Iterator[LogLine]:
    name, user = f"{generator.randrange(16**4):04x}", f"user{generator.randrange(200)}"

    def line(level: str, text: str) -> LogLine:
        return LogLine(f"{level} [{name}] {text}", name)

    yield line("INFO ", f"login of {user} from 10.0.{generator.randrange(4)}.{generator.randrange(256)}")
    for number in range(1, generator.randrange(2, 8)):
        shard, file = generator.choice(_SHARDS), generator.choice(_FILES)
        verb = generator.choice(["read", "read", "read", "write"])
        yield line("INFO ", f"request {number}: {verb} {file} sent to {shard}")
        if generator.random() < 0.2:
            yield line("DEBUG", f"request {number}: cache miss for {file}")
        if generator.random() < 0.05:
            yield line("WARN ", f"request {number}: {shard} is slow, waiting")
        yield line("INFO ", f"request {number}: {file} from {shard} in {generator.uniform(1, 90):.1f} ms")
    yield line("INFO ", f"logout of {user}")


def with_anomalies(lines: list[LogLine], fraction: float, seed: int = ANOMALY_SEED) -> list[LogLine]:
    """Return a log with anomalies, the same number of each kind; a wrong order makes two lines anomalous.

    Args:
        lines: a normal log.
        fraction: number of anomalies, as a fraction of the lines.
        seed: seed of what becomes anomalous, and how.
    """
    generator, lines = random.Random(seed), list(lines)
    number = max(1, round(len(lines) * fraction / len(KINDS)))
    slots = list(range(100, len(lines) - 20, 10)) or [0]
    generator.shuffle(slots)
    for kind in KINDS:
        done = 0
        while done < number and slots:
            done += _make_anomalous(lines, slots.pop(), kind, generator)
    return lines


def _make_anomalous(lines: list[LogLine], index: int, kind: str, generator: random.Random) -> bool:
    """Change a line near `index`; return whether that kind is possible there."""
    line = lines[index]
    if line.kind:
        return False
    head = line.text.index("]") + 2  # after time, level and session
    if kind == "rare template":
        level, _, rest = generator.choice(_RARE).partition(" ")
        prefix = f"{line.text[:13]}{level:5} [{line.session}] "
        lines[index] = LogLine(prefix + rest.strip().format(generator.randrange(10, 1000)), line.session, kind)
        return True
    if kind == "corrupted bytes":
        text = list(line.text)
        for position in generator.sample(range(head, len(text)), 2):
            text[position] = chr(generator.randrange(33, 127))
        lines[index] = LogLine("".join(text), line.session, kind)
        return "".join(text) != line.text
    if kind == "truncated line":
        lines[index] = LogLine(line.text[: generator.randrange(head + 2, len(line.text) - 2)], line.session, kind)
        return True
    for near in range(index, index + 10):
        line = lines[near]
        if line.kind or " sent to " not in line.text:
            continue
        request = line.text.split("] ")[1].split(":")[0] + ":"
        replies = [
            later
            for later in range(near + 1, min(near + 40, len(lines)))
            if lines[later].session == line.session and re.search(f"{request} .* from shard", lines[later].text)
        ]
        reply = replies[0] if replies else None
        if reply is None or lines[reply].kind:
            continue
        if kind == "changed parameter":  # the reply comes from another shard than the request was sent to
            text = lines[reply].text
            shard = next(name for name in _SHARDS if name in text)
            other = generator.choice([name for name in _SHARDS if name != shard])
            lines[reply] = LogLine(text.replace(shard, other), line.session, kind)
        else:  # the reply comes before the request; each line keeps its time
            first, second = line.text, lines[reply].text
            lines[near] = LogLine(first[:13] + second[13:], line.session, kind)
            lines[reply] = LogLine(second[:13] + first[13:], line.session, kind)
        return True
    return False


def as_bytes(lines: list[LogLine]) -> bytes:
    """Return the log as text."""
    return "".join(f"{line.text}\n" for line in lines).encode()
