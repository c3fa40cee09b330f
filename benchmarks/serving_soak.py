"""A server under load for long: is its memory flat, is a text ever wrong, is a saved session ever lost?

    python benchmarks/serving_soak.py RUN --seconds 1800 [--clients 16] [--drop 0.2] [--kills 4]

RUN is the folder of a run. The texts that the requests must get are computed before: each request is sent alone. Then
clients send these requests, at random and all at once: completions, and sessions of several turns. A share of the
requests is given up after the first tokens. In the first third of the time the server is ended, by SIGTERM and SIGKILL
in turns, and started again with its saved sessions; then one server runs to the end, and its memory is compared
between the first and the last quarter of its time.

A client that was cut off looks at its session: it must be as it was before the request, or as it is after, and the text
must go on from there.

Rounding depends on the batch size, so once in some hundred thousand tokens two tokens of a draw are equal up to
rounding. Where a text differs, the draw is repeated: a difference counts as a tie if the two tokens differ by less than
1e-4 in it, and as wrong otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from environment import command, commit, cpu_features, cpu_model, positive, results_file, say, write
from serving import request, resident_bytes

_TURNS = 3  # of a session
_TIE = 1e-4
_SETTLE_SECONDS = 600.0  # a busy computer takes minutes to start the server again


@dataclass
class Expected:
    """A request, and what it gets alone."""

    body: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    num_read: int = 0
    """Tokens of its session afterwards; 0 without a session."""


class Answer:
    """The stream of a request, as it arrives."""

    def __init__(self, drop_after: int | None = None) -> None:
        self._drop_after = drop_after
        self.tokens: list[int] = []
        self.text = ""
        self.session: str | None = None
        self.error: str | None = None
        self.is_complete = False

    def add(self, chunk: dict[str, Any]) -> bool:
        """Take a chunk; return whether to go on."""
        if "error" in chunk:
            self.error = chunk["error"]["message"]
            return False
        self.session = chunk.get("session")
        for choice in chunk["choices"]:
            self.text += choice["text"]
            self.tokens += [int(name.removeprefix("token_id:")) for name in choice["logprobs"]["tokens"]]
        self.is_complete = chunk.get("usage") is not None
        return self._drop_after is None or len(self.tokens) < self._drop_after


def conversations(model: str, number: int, vocab_size: int) -> list[list[Expected]]:
    """Return the requests: every third entry is a session of several turns, the others are single requests."""
    made: list[list[Expected]] = []
    for index in range(number):
        draw = random.Random(index)
        turns = []
        for turn in range(_TURNS if index % 3 == 0 else 1):
            length = draw.choice([1, 9, 40, 90, 300])
            prompt = [draw.randrange(97, 123) % vocab_size for _ in range(length)]
            body = {"model": model, "prompt": prompt, "max_tokens": draw.randint(8, 96), "seed": 1000 * index + turn}
            turns.append(Expected({**body, "logprobs": 0, "return_tokens_as_token_ids": True}))
        made.append(turns)
    return made


class Server:
    """The process of the server, which is ended and started again at the same address."""

    def __init__(self, run: Path, sessions: Path, args: argparse.Namespace) -> None:
        self._words = [sys.executable, "-m", "transformer_xl", "serve", str(run), "--sessions", str(sessions)]
        self._words += ["--max-batch", str(args.max_batch), "--threads", str(args.threads)]
        self._words += ["--session-bytes", str(args.session_bytes), "--max-waiting", "1000"]
        self._log = (sessions.parent / "server.log").open("ab")
        self.log_path = sessions.parent / "server.log"
        self.url = ""
        self.process = self._start("0")

    def _start(self, port: str) -> subprocess.Popen[str]:
        begin = self.log_path.stat().st_size
        process = subprocess.Popen([*self._words, "--port", port], stderr=self._log, text=True)
        while process.poll() is None:
            if match := re.search(rb"on (http://\S+) ", self.log_path.read_bytes()[begin:]):
                self.url = match[1].decode()
                return process
            time.sleep(0.05)
        raise SystemExit(f"the server did not start: {self.log_path.read_text()[-2000:]}")

    def end(self, number: signal.Signals) -> int:
        """End the process with a signal, and return its status."""
        self.process.send_signal(number)
        return self.process.wait()

    def restart(self) -> None:
        """Start the process again."""
        self.process = self._start(self.url.rpartition(":")[2])

    def session_tokens(self, session: str) -> int | None:
        """Return how many tokens a session has read, or None if there is no such session."""
        try:
            with urllib.request.urlopen(f"{self.url}/v1/sessions/{session}", timeout=30) as answer:
                return json.load(answer)["tokens"]
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise


class Soak:
    """The clients, and what they saw."""

    def __init__(self, server: Server, texts: list[list[Expected]], args: argparse.Namespace) -> None:
        self.server, self._texts, self._args = server, texts, args
        self.counts: Counter[str] = Counter()
        self.wrong: list[dict[str, Any]] = []
        self.different: list[tuple[list[Expected], int, Answer]] = []
        """Texts that are not those of the same request alone: the requests of a session, which one, and the answer."""

    async def expect(self) -> None:
        """Send each request alone, and keep what it gets."""
        for turns in self._texts:
            session = "new"
            for one in turns:
                answer = Answer()
                body = {**one.body, "session": session} if len(turns) > 1 else one.body
                status = await request(self.server.url, body, answer.add)
                assert status == 200, status
                assert answer.is_complete, answer.error
                one.tokens, one.text = answer.tokens, answer.text
                if answer.session is not None:
                    session = answer.session
                    one.num_read = self.server.session_tokens(session) or 0

    async def clients(self, end: float) -> None:
        """Let all clients send requests until the time is up."""
        await asyncio.gather(*(self._client(index, end) for index in range(self._args.clients)))

    async def _client(self, index: int, end: float) -> None:
        draw = random.Random(f"client {index}")
        while time.monotonic() < end:
            await self._converse(draw.choice(self._texts), draw, end)

    async def _converse(self, turns: list[Expected], draw: random.Random, end: float) -> None:
        """Go through the turns of a session, or send a single request; again after each interruption."""
        session: str | None = None
        turn = 0
        while turn < len(turns) and time.monotonic() < end:
            one = turns[turn]
            drops = draw.random() < self._args.drop
            answer = Answer(draw.randint(1, 5) if drops else None)
            body = {**one.body, "session": session or "new"} if len(turns) > 1 else one.body
            try:
                status = await request(self.server.url, body, answer.add)
            except (OSError, ValueError, IndexError):
                status = 0
            if status == 200 and answer.is_complete and answer.error is None:
                self.counts["complete"] += 1
                self.counts["tokens"] += len(answer.tokens)
                if (answer.tokens, answer.text) != (one.tokens, one.text):
                    self.different.append((turns, turn, answer))
                    return  # its session has another text from here on
                session, turn = answer.session, turn + 1
                continue
            names = {200: "cut off", 0: "no connection", None: "dropped"}
            self.counts[names.get(status, f"status {status}")] += 1
            if answer.error is not None:
                self.counts[f"error: {answer.error}"] += 1
            await asyncio.sleep(0.2)
            if len(turns) > 1 and (session or answer.session):
                known = session or answer.session
                # a new session is not there until its first request has ended
                is_done = await self._settled(known, one, turns[turn - 1].num_read if turn else None)
                if is_done is None:
                    return
                session, turn = known if turn + is_done else None, turn + is_done

    async def _settled(self, session: str, one: Expected, before: int | None) -> bool | None:
        """Return whether a request that was cut off has changed its session, or None if the session is lost."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < deadline:
            try:
                num_read = await asyncio.to_thread(self.server.session_tokens, session)
            except OSError:  # the server starts again
                await asyncio.sleep(0.2)
                continue
            if num_read in (before, one.num_read):
                self.counts["sessions looked at again"] += 1
                return num_read == one.num_read
            self.wrong.append({"session": session, "tokens": num_read, "expected": [before, one.num_read]})
            return None
        self.wrong.append({"session": session, "error": "the server did not come back"})
        return None

    async def sort_differences(self) -> None:
        """Repeat the draws where texts differ: ties are counted, other differences are wrong."""
        for turns, turn, answer in self.different:
            one = turns[turn]
            pairs = zip(one.tokens, answer.tokens, strict=False)
            place = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
            gap = math.inf if place is None else await self._gap(turns[: turn + 1], place, answer.tokens[place])
            if gap < _TIE:
                self.counts["ties"] += 1
            else:
                self.wrong.append({"body": one.body, "expected": one.tokens, "got": answer.tokens, "gap": gap})

    async def _gap(self, turns: list[Expected], place: int, other: int) -> float:
        """Return by how much two tokens differ in a draw: the log of p / q of each, with q drawn as by multinomial."""
        session, chunks = "new", list[dict[str, Any]]()
        for one in turns:
            body = {**one.body, **({"max_tokens": place + 1, "logprobs": 20} if one is turns[-1] else {})}
            if one.num_read:
                body["session"] = session
            chunks.clear()
            await request(self.server.url, body, lambda chunk: chunks.append(chunk) or True)
            session = chunks[-1].get("session")
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]["tokens"]]
        top = choices[-1]["logprobs"]["top_logprobs"][-1]
        names = [f"token_id:{token}" for token in (turns[-1].tokens[place], other)]
        if any(name not in top for name in names):
            return math.inf
        generator = torch.Generator().manual_seed(turns[-1].body["seed"])
        for _ in range(place + 1):
            drawn = torch.empty(1, self._args.vocab_size).exponential_(generator=generator)
        first, second = (top[name] - math.log(drawn[0, int(name.partition(":")[2])]) for name in names)
        return abs(first - second)


async def watch(soak: Soak, start: float, end: float, samples: list[dict[str, Any]]) -> None:
    """Write down the memory of the server, sixty times."""
    while time.monotonic() < end:
        try:
            now, _ = resident_bytes(soak.server.process)
        except (OSError, TypeError):
            now = 0  # it is starting again
        sample = {"seconds": round(time.monotonic() - start, 1), "pid": soak.server.process.pid, "resident_bytes": now}
        samples.append({**sample, "complete": soak.counts["complete"]})
        say(f"{sample['seconds']:8.1f} s  {now / 2**20:8.1f} MiB  {dict(soak.counts)}")
        await asyncio.sleep(soak._args.seconds / 60)


async def kill(soak: Soak, start: float) -> list[int]:
    """End the server some times in the first third, and start it again; return the statuses it ended with."""
    statuses: list[int] = []
    for index in range(soak._args.kills):
        await asyncio.sleep(
            max(0.0, start + (index + 1) * soak._args.seconds / 3 / soak._args.kills - time.monotonic())
        )
        number = (signal.SIGTERM, signal.SIGKILL)[index % 2]
        statuses.append(await asyncio.to_thread(soak.server.end, number))
        say(f"ended by {number.name}: status {statuses[-1]}")
        await asyncio.to_thread(soak.server.restart)
    return statuses


async def run(soak: Soak) -> dict[str, Any]:
    """Run the soak, and return the results."""
    say("the texts alone")
    await soak.expect()
    samples: list[dict[str, Any]] = []
    start = time.monotonic()
    end = start + soak._args.seconds
    _, statuses, _ = await asyncio.gather(soak.clients(end), kill(soak, start), watch(soak, start, end, samples))
    await soak.sort_differences()
    last = [sample["resident_bytes"] for sample in samples if sample["pid"] == soak.server.process.pid]
    last = [size for size in last if size]
    quarter = max(1, len(last) // 4)
    growth = statistics.mean(last[-quarter:]) - statistics.mean(last[:quarter])
    return {
        "counts": dict(soak.counts),
        "wrong": soak.wrong,
        "exit_statuses": statuses,
        "growth_bytes": round(growth),
        "tracebacks": soak.server.log_path.read_text().count("Traceback"),
        "samples": samples,
    }


def main() -> None:
    """Run the soak, and write the results to a file."""
    parser = argparse.ArgumentParser(description="A server under load for long.")
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--clients", type=positive, default=16)
    parser.add_argument("--texts", type=positive, default=60, help="number of requests and sessions")
    parser.add_argument("--drop", type=float, default=0.2, help="share of requests that are given up")
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--max-batch", type=positive, default=12)
    parser.add_argument("--session-bytes", type=positive, default=2**26)
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=results_file("serving-soak"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sessions = Path(folder) / "sessions"
        sessions.mkdir()
        server = Server(args.run, sessions, args)
        try:
            with urllib.request.urlopen(f"{server.url}/v1/models") as answer:
                (model,) = json.load(answer)["data"]
            args.vocab_size = model["vocab_size"]
            soak = Soak(server, conversations(model["id"], args.texts, args.vocab_size), args)
            results = asyncio.run(run(soak))
        finally:
            server.process.kill()
            server.process.wait()
        say(server.log_path.read_text()[-3000:])
    values = {"command": command(), "commit": commit(), "cpu": cpu_model(), "cpu_features": cpu_features()}
    write({**values, "torch": torch.__version__, "threads": args.threads, **results}, args.out)
    say(json.dumps({name: value for name, value in results.items() if name != "samples"}, indent=2))
    if results["wrong"] or results["tracebacks"]:
        raise SystemExit("texts or sessions were wrong, or the server failed")


if __name__ == "__main__":
    main()
