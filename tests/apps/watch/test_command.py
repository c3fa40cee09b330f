"""`txl watch` prints what `score` computes, for text that is being written, and survives what happens to logs."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import assert_refused, txl
from small_runs import make_run

from transformer_xl import load
from transformer_xl.apps.watch import live
from transformer_xl.apps.watch.live import SocketText
from transformer_xl.cli.main import run
from transformer_xl.evaluation.score import score
from transformer_xl.evaluation.stream import ScoredTokens, SurprisalStream
from transformer_xl.text.tokenizers.integer import IntegerTokenizer

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch

LOG = "".join(
    f"{number % 7} request {number:03d} caf\u00e9 {'ok' if number % 5 else 'failed'}\n" for number in range(40)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with runs of random weights and texts."""
    folder = tmp_path_factory.mktemp("watch") / "folder"
    folder.mkdir(parents=True)
    make_run(folder / "run")
    make_run(folder / "integers", tokenizer=IntegerTokenizer(255, add_eos=False))
    (folder / "log").write_text(LOG)
    (folder / "empty").touch()
    (folder / "taken").mkdir()
    return folder


@pytest.fixture(autouse=True)
def in_folder(folder: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(folder)


@pytest.fixture
def piped(monkeypatch: Patch) -> Iterator[Callable[[list[bytes]], None]]:
    """A function that lets a thread write chunks to standard input, which then ends."""
    read_end, write_end = os.pipe()
    threads: list[threading.Thread] = []

    def write(chunks: list[bytes]) -> None:
        with open(write_end, "wb", buffering=0) as pipe:
            for chunk in chunks:
                pipe.write(chunk)

    def begin(chunks: list[bytes]) -> None:
        threads.append(threading.Thread(target=write, args=(chunks,)))
        threads[0].start()

    with open(read_end, "rb", buffering=0) as stdin:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(stdin))
        yield begin
        threads[0].join()


def expected_bits(text: bytes) -> list[float]:
    """Return the surprisal of each line by `score`."""
    (whole,) = score(load("run", device="cpu"), text)
    return [line.nats / math.log(2) for line in whole.lines()]


def records(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_lines_are_those_of_score_whatever_the_chunks(piped) -> None:
    """With a byte order mark, CRLF, bytes that are not UTF-8, and a last line without an end."""
    text = LOG.replace("\n", "\r\n", 3).encode() + b"\xff\xfe bad \xc3\n\n\nlast"
    generator = np.random.default_rng(3)
    cuts = [0, 1, 2, *sorted(generator.integers(3, len(text), 50).tolist()), len(text) + 3]
    marked = codecs.BOM_UTF8 + text
    piped([marked[start:end] for start, end in pairwise(cuts)])
    result = txl("watch", "run", "--json")
    assert (result.status, result.warnings[:9]) == (0, "44 lines;")
    found = records(result.out)
    bits = expected_bits(text)
    assert [record["bits"] for record in found] == pytest.approx(bits, rel=1e-5)
    assert [record["line"] for record in found] == list(range(1, len(bits) + 1))
    assert found[0]["text"] == "0 request 000 caf\u00e9 failed"
    assert [record["text"] for record in found[-4:]] == ["\ufffd\ufffd bad \ufffd", "", "", "last"]
    assert all(record["score"] == record["bits_per_token"] == record["bits"] / record["tokens"] for record in found)
    assert all(record["max_bits"] <= record["bits"] * (1 + 1e-9) for record in found)
    assert sum(record["tokens"] for record in found) == len(text)


def test_threshold_from_normal_text(piped) -> None:
    """At most the given fraction of the normal lines is above it, and the next lower one would let more through."""
    piped([LOG.encode()])
    result = txl("watch", "run", "--calibrate", "log", "--false-alarms", "0.1", "--score", "sum", "--json")
    bits = sorted(expected_bits(LOG.encode()))
    found = records(result.out)
    assert re.search(r"threshold \S+ bits \(sum\): 4 of 40 normal lines are above it", result.err)
    assert re.search(r"40 lines, 4 of them above \S+ bits \(sum\); \d+ tokens in", result.err)
    assert [record["threshold"] for record in found] == pytest.approx([bits[-5]] * 4, rel=1e-5)
    assert sorted(record["score"] for record in found) == pytest.approx(bits[-4:], rel=1e-5)


def test_lines_of_people(piped) -> None:
    piped([b"a\tb\n" + b"\x1b[0m\n"])
    result = txl("watch", "run", "--threshold", "1", "--score", "max")
    number = r"\d+\.\d+"
    line = rf"line 1: {number} bits/token, {number} bits, max {number}: a\\tb\nline 2: .*: \\x1b\[0m\n"
    assert re.fullmatch(line, result.out)


def test_state_continues_the_text(piped, tmp_path: Path, monkeypatch: Patch) -> None:
    """Also within a line, with the threshold that was found before; every line is reported once."""
    text, state = LOG.encode(), tmp_path / "state"
    piped([text[:501]])
    words = ["watch", "run", "--json", "--state", state]
    first = txl(*words, "--calibrate", "log", "--false-alarms", "0.4")
    monkeypatch.setattr("sys.stdin", open("log", "rb"))  # noqa: SIM115
    sys.stdin.seek(501)
    second = txl(*words)
    sys.stdin.close()
    found = records(first.out) + records(second.out)
    bits = [line / len(content) for line, content in zip(expected_bits(text), text.splitlines(True), strict=True)]
    threshold = sorted(bits)[-17]
    assert {record["threshold"] for record in found} == {found[0]["threshold"]}
    assert found[0]["threshold"] == pytest.approx(threshold, rel=1e-5)
    expected = [number for number, line in enumerate(bits, start=1) if line > threshold * (1 + 1e-6)]
    assert [record["line"] for record in found] == expected


def test_state_of_a_pipe_has_no_place_in_a_file_and_its_threshold_one_score(piped, tmp_path: Path) -> None:
    state, log = tmp_path / "state", tmp_path / "new.log"
    log.write_text(LOG)
    piped([LOG.encode()])
    assert txl("watch", "run", "--state", state, "--threshold", "5").status == 0
    refused = txl("watch", "run", "--state", state, "--file", log, "--score", "max")
    assert refused.status == 2
    assert "the state has a threshold of 5 for score mean, not for max; give --threshold" in refused.err
    watch = Watch("--file", log, "--state", state, "--threshold", "-1")
    assert [line["text"] for line in watch.lines(2)] == LOG.splitlines()[:2]
    _, err = watch.stop()
    assert "replaced" not in err


def test_long_lines_are_reported_in_parts(piped, monkeypatch: Patch) -> None:
    """A line without an end does not fill the memory; its parts add up."""
    monkeypatch.setattr("transformer_xl.apps.watch.line_surprisal.MAX_LINE_TOKENS", 1000)
    text = b"xy" * 5_000 + b"\nshort\n"
    piped([text])
    found = records(txl("watch", "run", "--json", "--segment-length", "500").out)
    (long, short) = [[record for record in found if record["line"] == line] for line in (1, 2)]
    assert [record["part"] for record in long] == list(range(1, len(long) + 1))
    assert sum(record["tokens"] for record in long) == 10_001
    assert {len(record["text"]) for record in long} == {1000}
    assert 2 <= len(long) <= 11
    assert [(record["part"], record["text"]) for record in short] == [(0, "short")]


class Watch:
    """A `txl watch` command in a process of its own, whose lines are collected."""

    def __init__(self, *words: str | Path, stdin: int | None = None) -> None:
        command = [sys.executable, "-m", "transformer_xl", "watch", "run", "--json", *map(str, words)]
        self.process = subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def lines(self, number: int) -> list[dict[str, Any]]:
        """Return the next lines."""
        assert self.process.stdout is not None
        return [json.loads(self.process.stdout.readline()) for _ in range(number)]

    def stop(self, number: int = signal.SIGINT) -> tuple[int, str]:
        """Send a signal, and return the exit status and what was printed to standard error."""
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=60)
        return self.process.returncode, err


def appended(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_a_followed_file_in_processes_that_are_stopped(tmp_path: Path) -> None:
    """Lines are reported soon, though no segment is complete; a signal and a closed pipe save the state."""
    log, state, words = tmp_path / "service.log", tmp_path / "state", ["--segment-length", "1000"]
    log.write_text("one\ntw")
    watch = Watch("--file", log, "--state", state, *words)
    assert [line["text"] for line in watch.lines(1)] == ["one"]
    appended(log, "o\nthree\ncut")
    assert [line["text"] for line in watch.lines(2)] == ["two", "three"]
    log.rename(tmp_path / "service.log.1")
    log.write_text("new\n")
    assert [line["text"] for line in watch.lines(2)] == ["cut", "new"]
    status, err = watch.stop()
    assert (status, "Traceback" in err) == (130, False)
    appended(log, "last\n")
    watch = Watch("--file", log, "--state", state, *words)
    (line,) = watch.lines(1)
    assert (line["line"], line["text"]) == (6, "last")
    (whole,) = score(load("run", device="cpu"), b"one\ntwo\nthree\ncut\nnew\nlast\n", segment_length=1000)
    assert line["bits"] == pytest.approx(list(whole.lines())[-1].nats / math.log(2), rel=1e-5)
    before = state.read_bytes()
    assert watch.process.stdout is not None
    assert watch.process.stderr is not None
    watch.process.stdout.close()
    unread = ["nobody reads this", "nor this", "nor that"]
    appended(log, "".join(f"{text}\n" for text in unread))
    assert "Traceback" not in watch.process.stderr.read()
    watch.process.stderr.close()
    assert watch.process.wait(60) == 0
    assert state.read_bytes() != before
    watch = Watch("--file", log, "--state", state, *words)
    assert [(line["line"], line["text"]) for line in watch.lines(3)] == list(enumerate(unread, start=7))
    watch.stop()


class StuckOutput(io.StringIO):
    """Standard output whose reader stops after two lines; the user then presses Ctrl-C twice."""

    def write(self, text: str) -> int:
        if self.getvalue().count("\n") == 2:
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
        return super().write(text)


def test_lines_that_a_second_signal_keeps_from_being_printed_are_in_the_state(
    piped, tmp_path: Path, monkeypatch: Patch
) -> None:
    piped([LOG.encode()])
    words = ["watch", "run", "--json", "--state", str(tmp_path / "state")]
    with contextlib.redirect_stdout(StuckOutput()) as output, pytest.raises(SystemExit, match="130"):
        run(words)
    with open(os.devnull) as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        second = txl(*words)
    found = records(output.getvalue()) + records(second.out)
    assert [record["bits"] for record in found] == pytest.approx(expected_bits(LOG.encode()), rel=1e-5)
    assert [record["text"] for record in found] == LOG.splitlines()


class FilledSocket(SocketText):
    """A socket to which programs have written more than is read at once."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        for line in (LOG * 20).splitlines(keepends=True):
            self._lines.put(line.encode())


def test_lines_that_a_socket_has_received_are_in_the_state(tmp_path: Path, monkeypatch: Patch) -> None:
    """Where nobody reads what is printed; programs will not write them again."""
    monkeypatch.setattr(live, "SocketText", FilledSocket)
    words = ["watch", "run", "--json", "--state", str(tmp_path / "state")]
    with contextlib.redirect_stdout(StuckOutput()) as output, pytest.raises(SystemExit, match="130"):
        run([*words, "--socket", str(tmp_path / "s")])
    with open(os.devnull) as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        second = txl(*words)
    found = records(output.getvalue()) + records(second.out)
    assert [record["text"] for record in found] == (LOG * 20).splitlines()
    assert [record["bits"] for record in found] == pytest.approx(expected_bits((LOG * 20).encode()), rel=1e-5)


def test_a_second_signal_does_not_interrupt_the_reading_of_a_block(tmp_path: Path, monkeypatch: Patch) -> None:
    read = SurprisalStream.read

    def read_with_signals(stream: SurprisalStream, text: bytes) -> ScoredTokens:
        tokens = read(stream, text)
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        return tokens

    monkeypatch.setattr(SurprisalStream, "read", read_with_signals)
    result = txl("watch", "run", "--json", "--file", "log", "--state", tmp_path / "state")
    assert (result.status, len(records(result.out))) == (130, 40)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("watch none", "none is not the folder of a run|none"),
        ("watch run --file none", "reading none: no such file"),
        ("watch run --file taken", "taken is not a regular file"),
        ("watch run --file log --socket s", "--file and --socket were both given; use one"),
        ("watch run --from-end", "--from-end is for --file"),
        ("watch run --threshold 1 --calibrate log", "--threshold and --calibrate were both given"),
        ("watch run --false-alarms 0.1", "--false-alarms needs --calibrate FILE"),
        ("watch run --calibrate log --false-alarms 1", "--false-alarms 1 is out of range"),
        ("watch run --calibrate empty", "there are no lines to calibrate with"),
        ("watch run --calibrate none", "reading none: no such file|none: no such file"),
        ("watch run --max-delay nan", "--max-delay nan is out of range"),
        ("watch run --socket 0.0.0.0:80", "not an address of this machine alone; give 127.0.0.1:PORT"),
        ("watch run --socket taken/none/s", "listening at taken/none/s: no such file"),
        ("watch run --socket log", "log exists already"),
        ("watch run --socket=", "'' is no address; give 127.0.0.1:PORT"),
        ("watch run --socket localhost:log", "'localhost:log' is no address; .* or a path such as ./a:b"),
        ("watch run --socket localhost:65536", "port up to 65535"),
        ("watch run --threshold nan", "--threshold nan is no number of bits; leave it out"),
        ("watch run --threshold=-inf", "--threshold -inf is no number of bits; leave it out"),
        ("watch run --state gone/state", "folder gone is missing or cannot be written to"),
        ("watch run --state log --file log", "log is damaged"),
        ("watch run --state taken --file log", "taken"),
        ("watch run --method sliding-window --attention-window 5", "method sliding-window cannot read a stream"),
        ("watch integers --file log", "no token for the end of a line"),
    ],
)
def test_wrong_use_is_refused(folder: Path, words: str, message: str, capfd: Capture) -> None:
    assert_refused(folder, words, message, capfd)


def test_a_closed_standard_input_is_refused(folder: Path, monkeypatch: Patch, capfd: Capture) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert_refused(folder, "watch run", "standard input is closed; give it a text, or give --file or --socket", capfd)
