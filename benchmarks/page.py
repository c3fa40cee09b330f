"""Measure the server's page in headless Chromium with a long text: opening, repainting, scrolling, memory.

`python benchmarks/page.py runs/mine --characters 100000` serves a run, lets the page read a text, and opens it again.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

FRAMES = """async () => {
  const scroller = document.getElementById("scroller"), times = [];
  scroller.scrollTop = 0;
  for (let frame = 0; frame < 240; frame++) {
    times.push(await new Promise(requestAnimationFrame));
    scroller.scrollTop += 60;
  }
  return times.slice(1).map((time, index) => time - times[index]);
}"""
PAINTED = """() => new Promise((done) => {
  requestAnimationFrame(() => requestAnimationFrame(() => done(CSS.highlights.size)));
})"""
REPAINT = """() => new Promise((done) => {
  const slider = document.getElementById("memory"), start = performance.now();
  slider.value = slider.value === "0" ? slider.max : "0"; // both are read
  slider.dispatchEvent(new Event("input"));
  requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - start)));
})"""


def library_text(characters: int) -> str:
    """Return so much of the source of Python's standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(path.read_text("utf-8") for path in files[:60])
    return re.sub(r"[^\n -~]", "?", text)[:characters]


def main() -> None:
    """Serve, read, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--characters", type=int, default=100_000)
    args = parser.parse_args()
    server = subprocess.Popen(
        [sys.executable, "-m", "transformer_xl", "serve", args.run, "--port", "8137"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert server.stdout is not None
    while "serving" not in server.stdout.readline():
        assert server.poll() is None
    with sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--enable-precise-memory-info"]
        )
        tab = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
        tab.set_default_timeout(600_000)
        address, settled = "http://127.0.0.1:8137/", tab.locator("#text[aria-busy=false]")
        tab.goto(address)
        tab.locator("#model option").first.wait_for(state="attached")
        tab.focus("#text")
        start = time.perf_counter()
        tab.keyboard.insert_text(library_text(args.characters))
        print(f"shown after it was inserted: {time.perf_counter() - start:.2f} s")
        settled.wait_for()
        print(f"read with the run's memory length and without: {time.perf_counter() - start:.1f} s")
        opened = []
        for _ in range(5):
            start = time.perf_counter()
            tab.goto(address)
            tab.locator("#status", has_text=f"{args.characters:,} tokens; ").wait_for()
            settled.wait_for()
            assert tab.evaluate(PAINTED) > 1
            opened.append(time.perf_counter() - start)
        print(f"opened, scored: {statistics.median(opened):.2f} s (of 5: {', '.join(f'{one:.2f}' for one in opened)})")
        for paint in ("surprisal", "memory"):
            tab.check(f"#paints input[value={paint}]", force=True)
            frames = tab.evaluate(FRAMES)
            rate = 1000 / statistics.mean(frames)
            print(f"{paint}: scrolled at {rate:.0f} frames/s, the slowest frame {max(frames):.0f} ms")
            repaints = [tab.evaluate(REPAINT) for _ in range(6)]
            assert tab.evaluate(PAINTED) > 1
            print(f"{paint}: repainted with another memory length in {statistics.median(repaints):.0f} ms")
        session = tab.context.new_cdp_session(tab)
        session.send("HeapProfiler.collectGarbage")
        heap = tab.evaluate("performance.memory.usedJSHeapSize") / 2**20
        nodes = session.send("Memory.getDOMCounters")["nodes"]
        print(f"JavaScript heap {heap:.0f} MiB, {nodes:,} nodes in the document")
        browser.close()
    server.terminate()


if __name__ == "__main__":
    main()
