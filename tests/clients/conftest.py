"""What the programs of `make clients` are run against: a server process, and exported models; at the end, what ran.

Models are small, with random weights. Nothing is downloaded but the metric of `evaluate`, where there is a network.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from small_runs import make_run

from transformer_xl.run import Run


@dataclass(frozen=True)
class Server:
    """A running server."""

    run: Run
    """The run that it serves, under the name `mine`."""
    address: str

    @property
    def base_url(self) -> str:
        """What clients of OpenAI's API are given."""
        return f"{self.address}/v1"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`txl serve` of a run, on a free port, with the plain chat template."""
    run = make_run(tmp_path_factory.mktemp("runs") / "mine", noise=0.3)
    command = [Path(sys.executable).parent / "txl", "serve", run.path, "--port", "0", "--chat-template", "plain"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    killer = threading.Timer(120, process.kill)  # ends the wait for a server that never says its address
    killer.start()
    lines: list[str] = []
    try:
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"serving mine on (http://\S+)", line):
                break
        else:
            pytest.fail(f"the server did not start: {''.join(lines)}")
        killer.cancel()
        threading.Thread(target=process.stderr.read, daemon=True).start()  # so that it never waits to write
        yield Server(run, found[1])
    finally:
        killer.cancel()
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


# What ran

RAN, LEFT_OUT = pytest.StashKey[Counter[tuple[str, str]]](), pytest.StashKey[dict[str, None]]()


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", "client(name, version): the program that a test is about")
    config.stash[RAN], config.stash[LEFT_OUT] = Counter(), {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    """Count the outcomes of each client, and keep why tests were skipped."""
    report = yield
    marker = item.get_closest_marker("client")
    if marker is None:
        return report
    name, version = marker.args if len(marker.args) == 2 else (marker.args[0], metadata.version(marker.args[0]))
    is_expected = hasattr(report, "wasxfail") and report.skipped
    if report.skipped and not is_expected:
        item.config.stash[LEFT_OUT][f"{name}: {report.longrepr[2].removeprefix('Skipped: ')}"] = None
    elif report.when == "call" or report.failed:
        item.config.stash[RAN][f"{name} {version}", "failed as expected" if is_expected else report.outcome] += 1
    return report


def pytest_unconfigure(config: pytest.Config) -> None:
    """Print as the last line which clients ran, in which versions, and what was left out."""
    ran, left_out = config.stash.get(RAN, Counter()), config.stash.get(LEFT_OUT, {})
    if ran or left_out:
        names = dict.fromkeys(name for name, _ in ran)
        counts = {
            name: [f"{count} {outcome}" for (one, outcome), count in ran.items() if one == name] for name in names
        }
        lines = [f"{name} ({', '.join(counts[name])})" for name in names] + [f"left out: {why}" for why in left_out]
        print("clients:", "; ".join(lines))
