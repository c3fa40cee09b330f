"""Fuzz a reader of foreign bytes under atheris.

    python tests/fuzz/run.py                            list the targets
    python tests/fuzz/run.py TARGET SECONDS             search; needs pip install atheris
    python tests/fuzz/run.py TARGET --keep FOLDER       keep the smallest inputs of a search for the test

Only this package and the parsers in Python that it uses are instrumented. Inputs that raise anything but a UserError,
or take longer than SLOW_SECONDS, are written to a folder, once for each place, and the search goes on.
"""

from __future__ import annotations

import base64
import random
import re
import resource
import sys
import tempfile
import time
import traceback
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

SLOW_SECONDS, MAX_BYTES, MAX_INPUT = 3.0, 2**30, 2**14
MAX_KEPT, NUM_KEPT = 3000, 20  # characters of an input that is kept, and inputs of a target
_INSTRUMENTED = ("transformer_xl", "pickletools", "yaml", "zipfile", "csv", "gzip", "bz2", "lzma")


def keep(name: str, folder: Path) -> None:
    """Write the smallest input of each outcome (it is read, or a kind of message) to the corpus of the test."""
    from fuzz.targets import CORPUS, TARGETS, survive

    target, smallest = TARGETS[name], dict[str, bytes]()
    with tempfile.TemporaryDirectory() as place:
        seeds, check = target.prepare(Path(place))
        for content in sorted((file.read_bytes() for file in folder.iterdir()), key=len):
            message = str(survive(check, content) or "").replace(place, "")
            outcome = re.sub(r"'[^']*'|\([^)]*\)|\w*\d\w*", "", message)[:60]
            if content not in seeds:
                smallest.setdefault(outcome, content)
    lines = [base64.b64encode(zlib.compress(content, 9)) for content in smallest.values()]
    CORPUS.mkdir(exist_ok=True)
    lines = [line for line in sorted(lines, key=len) if len(line) < MAX_KEPT][:NUM_KEPT]
    (CORPUS / f"{name}.txt").write_bytes(b"".join(line + b"\n" for line in lines))


def main() -> None:
    """Do what the command line says."""
    if sys.argv[2:3] == ["--keep"]:
        keep(sys.argv[1], Path(sys.argv[3]))
        return
    import atheris
    import fastapi  # noqa: F401  what is not to be instrumented is imported before
    import numpy  # noqa: F401
    import torch

    for name in _INSTRUMENTED[1:]:  # which torch has imported already
        sys.modules.pop(name, None)
    torch.set_num_threads(1)
    with atheris.instrument_imports(include=list(_INSTRUMENTED)):
        from fuzz.targets import TARGETS, kept_inputs, survive

        if len(sys.argv) < 3:
            print(*TARGETS, sep="\n")
            return
        target, seconds = TARGETS[sys.argv[1]], int(sys.argv[2])
        work = Path(tempfile.mkdtemp(prefix="txl-fuzz-"))
        out = work / "found"
        print(f"{target.name}: the corpus and what is found are in {work}")
        for folder in (out, work / "target", work / "corpus"):
            folder.mkdir(parents=True, exist_ok=True)
        seeds, check = target.prepare(work / "target")
        for seed in seeds:  # within the block: what is imported when it is needed is instrumented too
            survive(check, seed)
    for index, content in enumerate([*seeds, *kept_inputs(target.name)]):
        (work / "corpus" / str(index)).write_bytes(content)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2 * MAX_BYTES, resource.RLIM_INFINITY))
    found = set[tuple[str, ...]]()

    def report(kind: str, place: str, content: bytes) -> None:
        if (kind, place) not in found:
            found.add((kind, place))
            (out / f"{target.name}-{len(found)}").write_bytes(content)
            print(f"FOUND {kind} at {place}: {out / f'{target.name}-{len(found)}'}", file=sys.stderr, flush=True)

    def test_one_input(content: bytes) -> None:
        start = time.monotonic()
        try:
            survive(check, content)
        except BaseException as error:  # a panic of a library in Rust is no Exception
            frames = [
                frame for frame in traceback.extract_tb(error.__traceback__) if "transformer_xl" in frame.filename
            ]
            place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "the target"
            report(f"{type(error).__name__} ({str(error)[:80]})", place, content)
        if time.monotonic() - start > SLOW_SECONDS:
            report("slow", f"{time.monotonic() - start:.0f} s", content)

    def mutated(content: bytes, max_size: int, seed: int) -> bytes:
        draw = random.Random(seed)
        if draw.random() < 0.3:
            return atheris.Mutate(content, max_size)
        return target.mutate(draw, content)[:max_size]

    options = [f"-max_total_time={seconds}", f"-max_len={MAX_INPUT}", "-timeout=120", "-print_final_stats=1"]
    options += ["-rss_limit_mb=6000", "-verbosity=1", f"-artifact_prefix={out}/{target.name}-"]
    atheris.Setup([sys.argv[0], *options, str(work / "corpus")], test_one_input, custom_mutator=mutated)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
