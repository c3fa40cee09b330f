"""Measured values of the server in the text format of Prometheus."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_STATM = Path("/proc/self/statm")


class Histogram:
    """Counts of durations in seconds, by upper bounds; used in the event loop alone."""

    def __init__(self) -> None:
        self._counts, self._sum = [0] * (len(_BUCKETS) + 1), 0.0

    def add(self, seconds: float) -> None:
        """Add a duration."""
        self._counts[bisect_left(_BUCKETS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> list[str]:
        """Return the lines of the format."""
        lines, total = [f"# TYPE {name} histogram"], 0
        for bound, count in zip((*map(str, _BUCKETS), "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self._sum}", f"{name}_count {total}"]


class Metrics:
    """What is counted while requests are answered."""

    def __init__(self) -> None:
        self.responses: Counter[tuple[str, int]] = Counter()
        """Number of answers by path and status."""
        self.first_token_seconds = Histogram()
        """Time from a request to its first token."""
        self.request_seconds = Histogram()
        """Time from a request to its end."""

    def text(self, counters: Mapping[str, float], gauges: Mapping[str, float]) -> str:
        """Return all values; `counters` and `gauges` are further ones by name, without the prefix."""
        lines = ["# TYPE txl_responses_total counter"]
        for (path, status), count in sorted(self.responses.items()):
            lines.append(f'txl_responses_total{{path="{path}",status="{status}"}} {count}')
        for kind, values in (("counter", counters), ("gauge", gauges)):
            for name, value in values.items():
                lines += [f"# TYPE txl_{name} {kind}", f"txl_{name} {value}"]
        lines += self.first_token_seconds.lines("txl_time_to_first_token_seconds")
        lines += self.request_seconds.lines("txl_request_seconds")
        return "\n".join(lines) + "\n"


def resident_bytes() -> int:
    """Return the memory that this process has in RAM, or 0 where it is unknown."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return 0
