"""`txl demo`: the main job on real text found on any machine, end to end in minutes."""

from __future__ import annotations

import gzip
import lzma
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer_xl.cli.options import ANY_MACHINE, Json, Machine, MachineOptions
from transformer_xl.cli.output import print_json, print_table
from transformer_xl.config import EvaluationConfig, UserError, load_recipe
from transformer_xl.files import as_user_error, write_text
from transformer_xl.progress import ProgressBar, say

if TYPE_CHECKING:
    from transformer_xl.reproduction.demo_page import DemoResults
    from transformer_xl.run_folder import Run, RunFolder
    from transformer_xl.text.token_store import Corpus

_MARK = ".txl-demo"  # says that an earlier demo made this folder


def demo(
    *,
    out: Path = Path("runs/demo"),
    recipe: str = "demo",
    tokens: int = 131_072,
    machine: MachineOptions = ANY_MACHINE,
    json: Json = False,
) -> int:
    """Prepare, train, evaluate at several memory lengths beside gzip and xz, generate, and write a report.

    The text is the source of Python's own standard library. Takes minutes on two CPU cores.

    Parameters
    ----------
    out
        Folder for corpus, run and report.html; an earlier demo there is replaced.
    recipe
        Settings of the model and its training.
    tokens
        Test tokens scored, from the start of the test text.
    """
    from transformer_xl.reproduction.demo_page import demo_page

    began = time.perf_counter()
    load_recipe(recipe)
    machine.choose()
    if tokens < 1:
        raise UserError(f"--tokens {tokens}: wanted 1 or more")
    _clear(out)
    folder, corpus, status = _train(out, recipe, machine)
    if status:
        return status
    results = _examine(folder, corpus, machine, tokens, began)
    report = out / "report.html"
    write_text(report, demo_page(folder, corpus.source, results))
    _show(folder, report, results, json)
    return 0


def _clear(out: Path) -> None:
    """Makes room for a new demo: deletes what an earlier one made, and nothing else."""
    with as_user_error(f"writing {out}"):
        if out.exists() and not (out / _MARK).exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{out} exists and is not an earlier demo; choose another --out or delete it first")
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / _MARK, "made by txl demo, which replaces corpus, run and report.html in this folder\n")
        for made in ("corpus", "run"):
            if (out / made).exists():
                shutil.rmtree(out / made)
        (out / "report.html").unlink(missing_ok=True)


def _train(out: Path, recipe: str, machine: Machine) -> tuple[RunFolder, Corpus, int]:
    from transformer_xl.device import keep_freed_memory
    from transformer_xl.run_folder import RunFolder
    from transformer_xl.text.prepare import prepare
    from transformer_xl.training import train as training

    corpus = prepare("python-stdlib", out / "corpus")
    train = corpus.split("train")
    say(f"text: {corpus.source}; {train.num_bytes:,} bytes in {train.num_documents:,} files to learn from")
    keep_freed_memory()  # a training step reuses the buffers of the one before
    run, device, threads = out / "run", machine.device, machine.threads
    result = training.train(recipe, corpus, run, device=device, threads=threads, handle_signals=True)
    if not result.finished:
        say(f"stopped at step {result.step:,}; 'txl demo' starts over")
    return RunFolder.open(run), corpus, 0 if result.finished else 128 + (result.stop_signal or 2)


def _examine(folder: RunFolder, corpus: Corpus, machine: Machine, tokens: int, began: float) -> DemoResults:
    from transformer_xl.generation.generate import generate
    from transformer_xl.reproduction.demo_page import DemoResults
    from transformer_xl.run_folder import load

    run = load(folder.path, device=str(machine.choose()))
    test = corpus.split("test")
    text = run.tokenizer.decode_bytes(test.tokens[:tokens])
    trained = folder.config.train.memory_length
    swept = sorted({0, trained // 2, trained, trained * 4})
    lengths = {length: _scored(run, corpus, length, tokens) for length in swept}
    prompt = "class Queue:\n    def __init__(self"
    sample = generate(run, prompt, max_new_tokens=400, temperature=0.7, seed=1).text
    return DemoResults(
        lengths,
        {
            "gzip -9": 8 * len(gzip.compress(text, 9)) / len(text),
            "xz -9": 8 * len(lzma.compress(text, preset=9)) / len(text),
        },
        prompt,
        sample,
        time.perf_counter() - began,
    )


def _scored(run: Run, corpus: Corpus, length: int, tokens: int) -> dict[str, Any]:
    from transformer_xl.evaluation.evaluate import evaluate

    test = corpus.split("test")
    with ProgressBar(f"test, memory {length:,}", min(tokens, test.num_tokens), "tokens") as bar:
        config = EvaluationConfig(memory_length=length)
        return evaluate(run, test, config, max_tokens=tokens, progress=bar.advance).as_dict()


def _show(folder: RunFolder, report: Path, results: DemoResults, json: bool) -> None:
    from transformer_xl.reproduction.demo_page import COLUMNS, result_rows

    if json:
        print_json(
            {
                "run": str(folder.path),
                "report": str(report),
                "results": list(results.lengths.values()),
                "gzip_bits_per_byte": results.packers["gzip -9"],
                "xz_bits_per_byte": results.packers["xz -9"],
                "prompt": results.prompt,
                "sample": results.sample,
                "seconds": results.seconds,
            }
        )
        return
    print(f"\nA sample, going on from {results.prompt!r}:\n\n{results.prompt}{results.sample}\n")
    title = f"Test: the first {results.num_bytes:,} bytes of files never seen in training"
    print_table(title, COLUMNS, result_rows(folder, results))
    print(f"report: {report}   ({results.seconds:,.0f} s in all)")
