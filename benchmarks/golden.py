"""Golden numbers: what training, evaluation, generation and the server compute today, bit by bit.

    python benchmarks/golden.py                      compare with benchmarks/golden/KIND.json; exit 1 on a difference
    python benchmarks/golden.py --write              write that file, KIND being the kind of processor
    python benchmarks/golden.py --only train/shaw    only the entries whose names begin with this
    python benchmarks/golden.py --source DIR         of the package in DIR, the folder that contains transformer_xl

A change of the code that must not change a number is checked with it: the file is written before, and compared after.
Losses are exact, so the file holds for one kind of processor, one version of torch and one number of threads (--threads
2: KIND-2-threads.json); what it was written with is recorded, and mentioned if it differs. tests/test_earlier.py has
tolerances and runs everywhere.

golden_cases.py has the cases. With --write and --only, the other entries of the file stay.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from arguments import positive
from environment import commit, cpu_model, processor_kind, read, say
from golden_cases import CaseFolder, all_cases, make_corpora

GOLDEN = Path(__file__).parent / "golden"
_workshops: list[CaseFolder] = []  # of this process


def start_process(folder: Path, threads: int) -> None:
    """Prepare a process that computes cases."""
    import torch

    torch.set_num_threads(threads)
    _workshops.append(CaseFolder(folder, threads))


def compute(case: str) -> dict[str, Any]:
    """Return the entries of a case, or its error as its only entry."""
    try:
        return {f"{case}/{name}": value for name, value in all_cases()[case](_workshops[0])}
    except subprocess.CalledProcessError as error:
        return {f"{case}/failed": f"{error}: {error.stderr[-2000:].decode(errors='replace')}"}
    except Exception as error:
        return {f"{case}/failed": f"{type(error).__name__}: {error}"}


def compute_all(only: str, jobs: int, threads: int) -> dict[str, Any]:
    """Return all entries whose names begin with `only`, in the order of the cases."""
    cases = [case for case in all_cases() if case.startswith(only) or only.startswith(f"{case}/")]
    found: dict[str, dict[str, Any]] = {}
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        make_corpora(Path(folder))
        with ProcessPoolExecutor(jobs, spawn, start_process, (Path(folder), threads)) as pool:
            futures = {pool.submit(compute, case): case for case in cases}
            for number, future in enumerate(as_completed(futures), start=1):
                found[futures[future]] = future.result()
                if sys.stderr.isatty():
                    print(f"\r{number} of {len(cases)} cases", end="", file=sys.stderr, flush=True)
    ordered = {name: value for case in cases for name, value in found[case].items()}
    return {name: value for name, value in ordered.items() if name.startswith(only) or name.endswith("/failed")}


def machine(threads: int) -> dict[str, Any]:
    """Return what the numbers depend on besides the code."""
    words = [sys.executable, "-m", "transformer_xl", "info", "--json"]
    info = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)["machine"]
    kept = ("torch", "native_operators", "attn_implementation_auto", "training_matmul_library", "dtype_auto")
    return {"processor": cpu_model(), "threads": threads, **{name: info[name] for name in kept}}


def difference(expected: Any, actual: Any) -> str:
    """Return how two values differ, in words."""
    flat = [value for one in (expected, actual) for value in [list(flatten(one))]]
    if len(flat[0]) != len(flat[1]):
        return f"{len(flat[0])} values, now {len(flat[1])}"
    places = [place for place, pair in enumerate(zip(*flat, strict=True)) if pair[0] != pair[1]]
    first, second = (values[places[0]] for values in flat)
    text = f"value {places[0] + 1} of {len(flat[0])} is {second!r:.300}, was {first!r:.300}"
    pairs = [(flat[0][place], flat[1][place]) for place in places]
    if all(isinstance(value, int | float) for pair in pairs for value in pair):
        text += f"; {len(places)} differ, by {max(abs(one - other) for one, other in pairs):.3g} at most"
    return text


def flatten(value: Any) -> Iterator[Any]:
    """Yield the numbers and texts of a value."""
    if isinstance(value, list):
        for part in value:
            yield from flatten(part)
    else:
        yield value


def compare(expected: dict[str, Any], actual: dict[str, Any], only: str) -> int:
    """Print the differences of two sets of entries, and return their number."""
    wanted = {name: value for name, value in expected.items() if name.startswith(only)}
    lines = [f"{name}: {difference(wanted[name], actual[name])}" for name in wanted.keys() & actual.keys()
             if wanted[name] != actual[name]]  # fmt: skip
    lines += [f"{name}: is missing now" for name in wanted.keys() - actual.keys()]
    lines += [f"{name}: is new, {str(actual[name])[:1500]}" for name in actual.keys() - wanted.keys()]
    print("\n".join(sorted(lines) or [f"all {len(wanted)} entries are equal"]))
    return len(lines)


def main() -> None:
    """Write or compare the golden numbers of this kind of processor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="", metavar="PREFIX")
    parser.add_argument("--source", type=Path, help="folder that contains the package transformer_xl")
    parser.add_argument("--jobs", type=positive, default=2, help="processes that compute")
    parser.add_argument("--threads", type=positive, default=1, help="of each process")
    parser.add_argument("--file", type=Path, help="instead of that of this kind of processor and number of threads")
    args = parser.parse_args()
    name = processor_kind() + (f"-{args.threads}-threads" if args.threads > 1 else "")
    args.file = args.file or GOLDEN / f"{name}.json"
    if args.source:
        sys.path.insert(0, str(args.source.resolve()))
    import transformer_xl

    # the processes that are started use the same package
    os.environ |= {"PYTHONPATH": str(Path(transformer_xl.__file__).parents[1]), "OMP_NUM_THREADS": str(args.threads)}
    start, environment = time.monotonic(), machine(args.threads)
    entries = compute_all(args.only, args.jobs, args.threads)
    say(f"{len(entries)} entries in {time.monotonic() - start:.0f} s, of {transformer_xl.__file__}")
    known = read(args.file) if args.file.exists() else {"environment": environment, "entries": {}}
    if args.write:
        if failed := [f"{name}: {entries[name]}" for name in entries if name.endswith("/failed")]:
            raise SystemExit("\n".join(failed))
        kept = {name: value for name, value in known["entries"].items() if args.only and not name.startswith(args.only)}
        lines = [f"    {json.dumps(name)}: {json.dumps(value)}" for name, value in (kept | entries).items()]
        head = json.dumps({"commit": commit(), **environment})
        args.file.parent.mkdir(exist_ok=True)
        body = ",\n".join(lines)
        args.file.write_text(f'{{\n  "environment": {head},\n  "entries": {{\n{body}\n  }}\n}}\n')
        say(f"written: {args.file}")
        return
    if not known["entries"]:
        failed = "\n".join(f"{name}: {entries[name]}" for name in entries if name.endswith("/failed"))
        raise SystemExit(f"{failed}\nthere is no {args.file}; write it with the code before the change: --write")
    for name in environment:
        if environment[name] != known["environment"].get(name):
            say(f"note: {name} is {environment[name]}, was {known['environment'].get(name)}")
    raise SystemExit(1 if compare(known["entries"], entries, args.only) else 0)


if __name__ == "__main__":
    main()
