"""The demo: prepare a corpus, train on it, evaluate, generate, and write a report, in minutes on any machine.

The text is the source of Python's own standard library, which needs no download.
"""

from __future__ import annotations

import gzip
import lzma
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer_xl.analysis.plots import Chart, Line, draw
from transformer_xl.analysis.report import Page, heading, paragraph, table, verbatim
from transformer_xl.config import EvaluationConfig, UserError, load_recipe
from transformer_xl.device import choose_device
from transformer_xl.evaluation.evaluate import evaluate
from transformer_xl.files import as_user_error, write_text
from transformer_xl.generation.generate import generate
from transformer_xl.progress import ProgressBar, say
from transformer_xl.run_folder import Run, RunFolder
from transformer_xl.text.prepare import prepare
from transformer_xl.text.token_store import Corpus
from transformer_xl.training.train import TrainResult, train

COLUMNS = ["on the same test bytes", "bits per byte", "bytes/s"]

_MARKER = ".txl-demo"  # in each folder that a demo made
_PROMPT = "class Queue:\n    def __init__(self"


@dataclass(frozen=True)
class DemoResult:
    """What the demo trained and measured."""

    training: TrainResult
    """How training ended; nothing was measured if it was stopped."""
    report: Path
    evaluations: dict[int, dict[str, Any]]
    """`EvaluationResult.as_dict` of the test text, by memory length."""
    compressors: dict[str, float]
    """Bits per byte of gzip and xz on the same bytes."""
    prompt: str
    sample: str
    """What the model generated after the prompt."""
    seconds: float
    """Time that the whole demo took."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes that were scored."""
        return next(iter(self.evaluations.values()))["bytes"]

    def rows(self) -> list[list[str]]:
        """Return the rows of a table of results, under COLUMNS."""
        trained = RunFolder.open(self.training.path).config.train.memory_length
        notes = {0: " (none)", trained: " (as trained)"}
        rows = [
            [
                f"Transformer-XL, memory {length:,}{notes.get(length, '')}",
                f"{result['bits_per_byte']:.3f}",
                f"{result['tokens_per_second']:,.0f}",
            ]
            for length, result in self.evaluations.items()
        ]
        return rows + [[name, f"{bits:.3f}", ""] for name, bits in self.compressors.items()]


def run_demo(
    out: Path,
    *,
    recipe: str = "demo",
    max_tokens: int = 131_072,
    device: str = "auto",
    threads: int | None = None,
    handle_signals: bool = False,
) -> DemoResult:
    """Train a small model on the Python standard library, evaluate it at several memory lengths, and generate.

    Args:
        out: folder for corpus, run and report.html; an earlier demo there is replaced.
        recipe: settings of the model and its training.
        max_tokens: test tokens to score, from the start of the test split.
        device: auto, cuda, mps or cpu.
        threads: CPU threads of one operation; None: torch's choice.
        handle_signals: as for `train`.

    Raises:
        UserError: no such recipe or device, or the folder holds something else than an earlier demo.
    """
    start = time.perf_counter()
    load_recipe(recipe)
    choose_device(device)
    if max_tokens < 1:
        raise UserError(f"max_tokens {max_tokens}: wanted 1 or more")
    _clear(out)
    corpus = prepare("python-stdlib", out / "corpus")
    split = corpus.split("train")
    say(f"text: {corpus.source}; {split.num_bytes:,} bytes in {split.num_documents:,} files to train on")
    trained = train(recipe, corpus, out / "run", device=device, threads=threads, handle_signals=handle_signals)
    report = out / "report.html"
    if not trained.finished:
        return DemoResult(trained, report, {}, {}, _PROMPT, "", time.perf_counter() - start)
    run, test = trained.run, corpus.split("test")
    memory_length = run.config.train.memory_length
    lengths = sorted({0, memory_length // 2, memory_length, memory_length * 4})
    evaluations = {length: _evaluate(run, corpus, length, max_tokens) for length in lengths}
    content = run.tokenizer.decode_bytes(test.tokens[:max_tokens])
    result = DemoResult(
        trained,
        report,
        evaluations,
        {
            "gzip -9": 8 * len(gzip.compress(content, 9)) / len(content),
            "xz -9": 8 * len(lzma.compress(content, preset=9)) / len(content),
        },
        _PROMPT,
        generate(run, _PROMPT, max_new_tokens=400, temperature=0.7, seed=1).text,
        time.perf_counter() - start,
    )
    write_text(report, demo_page(result, corpus.source))
    return result


def _clear(out: Path) -> None:
    """Delete what an earlier demo left in the folder, and nothing else."""
    with as_user_error(f"writing {out}"):
        if out.exists() and not (out / _MARKER).exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{out} exists and is not an earlier demo; choose another out or delete it first")
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / _MARKER, "made by txl demo, which replaces corpus, run and report.html in this folder\n")
        for name in ("corpus", "run"):
            if (out / name).exists():
                shutil.rmtree(out / name)
        (out / "report.html").unlink(missing_ok=True)


def _evaluate(run: Run, corpus: Corpus, memory_length: int, max_tokens: int) -> dict[str, Any]:
    test = corpus.split("test")
    with ProgressBar(f"test, memory {memory_length:,}", min(max_tokens, test.num_tokens), "tokens") as bar:
        config = EvaluationConfig(memory_length=memory_length)
        return evaluate(run, test, config, max_tokens=max_tokens, progress=bar.advance).as_dict()


def demo_page(result: DemoResult, source: str) -> str:
    """Return the report on a demo as HTML.

    Args:
        result: what the demo measured.
        source: description of its text.
    """
    folder = RunFolder.open(result.training.path)
    model, train_config = folder.config.model, folder.config.train
    best = min(evaluation["bits_per_byte"] for evaluation in result.evaluations.values())
    return Page(
        "Transformer-XL, trained here and now",
        [
            paragraph(
                f"A model of {model.n_layers} layers with d_model {model.d_model} was trained on bytes ({source}) "
                f"for {train_config.max_steps:,} steps of {train_config.batch_size} x {train_config.segment_length} "
                f"bytes. The whole demo took {result.seconds:,.0f} seconds. The table scores the first "
                f"{result.num_bytes:,} bytes of files that the model never saw; at best it needs {best:.2f} bits per "
                "byte."
            ),
            table(COLUMNS, result.rows()),
            heading("Training"),
            draw(_training_chart(folder)),
            heading("Does memory help?"),
            paragraph("The same weights, evaluated with different memory lengths. Lower is better."),
            draw(_memory_chart(result)),
            heading("A sample"),
            paragraph(
                f"The first {len(result.prompt)} characters are the prompt, the rest is generated (temperature 0.7, "
                "top-k 40)."
            ),
            verbatim(result.prompt + result.sample),
            heading("What to try next"),
            verbatim(
                f"txl evaluate {folder.path} --sweep-memory-length 0,64,256,1024\n"
                f"txl generate {folder.path} --prompt 'def '\n"
                "txl prepare YOUR-FILES --out my-corpus\n"
                "txl train --corpus my-corpus --run my-run"
            ),
        ],
    ).html()


def _training_chart(folder: RunFolder) -> Chart:
    metrics, lines = folder.metrics(), list[Line]()
    for split, label, style in (("train", "training text", "-"), ("valid", "validation text", "o-")):
        points = [(entry["step"], entry["bits_per_byte"]) for entry in metrics if entry["split"] == split]
        lines.append(Line(label, [step for step, _ in points], [bits for _, bits in points], style))
    return Chart("Bits per byte while training", "step", "bits per byte", lines)


def _memory_chart(result: DemoResult) -> Chart:
    bits = [evaluation["bits_per_byte"] for evaluation in result.evaluations.values()]
    line = Line("test text", list(result.evaluations), bits, "o-")
    title = "Test bits per byte by memory length"
    return Chart(title, "memory length (bytes)", "bits per byte", [line], result.compressors, logarithmic=True)
