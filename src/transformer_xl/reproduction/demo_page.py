"""The page `txl demo` leaves: what was learnt, whether memory helps, and a sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformer_xl.analysis.plots import Chart, Line, draw
from transformer_xl.analysis.report import Page, heading, paragraph, table, verbatim
from transformer_xl.run_folder import RunFolder

COLUMNS = ["on the same test bytes", "bits per byte", "bytes/s"]


@dataclass(frozen=True)
class DemoResults:
    """What the demo found out."""

    lengths: dict[int, dict[str, Any]]
    """Figures by memory length."""
    packers: dict[str, float]
    """Bits per byte of other compressors on the same bytes."""
    prompt: str
    sample: str
    seconds: float

    @property
    def num_bytes(self) -> int:
        """Bytes of text all figures are about."""
        return next(iter(self.lengths.values()))["bytes"]

    @property
    def best(self) -> float:
        """Lowest bits per byte at any memory length."""
        return min(figures["bits_per_byte"] for figures in self.lengths.values())


def result_rows(folder: RunFolder, results: DemoResults) -> list[list[str]]:
    """Rows of the results, under COLUMNS."""
    trained = folder.config.train.memory_length
    notes = {0: " (none)", trained: " (as trained)"}
    rows = [
        [
            f"Transformer-XL, memory {length:,}{notes.get(length, '')}",
            f"{figures['bits_per_byte']:.3f}",
            f"{figures['tokens_per_second']:,.0f}",
        ]
        for length, figures in results.lengths.items()
    ]
    return rows + [[name, f"{bits:.3f}", ""] for name, bits in results.packers.items()]


def demo_page(folder: RunFolder, source: str, results: DemoResults) -> str:
    """The page as HTML; `source` says what text was read."""
    model, train = folder.config.model, folder.config.train
    return Page(
        "Transformer-XL, trained here and now",
        [
            paragraph(
                f"A model of {model.n_layers} layers, {model.d_model} wide, read plain bytes ({source}): {train.max_steps:,} "
                f"steps of {train.batch_size} x {train.segment_length} bytes. All on this page took {results.seconds:,.0f} seconds. "
                f"The table scores the first {results.num_bytes:,} bytes of files the model never saw; at best it "
                f"needs {results.best:.2f} bits for a byte."
            ),
            table(COLUMNS, result_rows(folder, results)),
            heading("Learning"),
            draw(_learning(folder)),
            heading("Does memory help?"),
            paragraph("The same weights, scored with memory of different lengths. Lower is better."),
            draw(_sweep(results)),
            heading("A sample"),
            paragraph(
                f"The first {len(results.prompt)} characters were given, the rest is the model's (temperature 0.7, the "
                "40 likeliest bytes)."
            ),
            verbatim(results.prompt + results.sample),
            heading("Go on from here"),
            verbatim(
                f"txl evaluate {folder.path} --sweep-memory-length 0,64,256,1024\n"
                f"txl generate {folder.path} --prompt 'def '\n"
                "txl prepare YOUR-FILES --out my-corpus\n"
                "txl train --corpus my-corpus --run my-run"
            ),
        ],
    ).html()


def _learning(folder: RunFolder) -> Chart:
    lines: list[Line] = []
    figures = folder.metrics()
    for split, label, style in (("train", "training text", "-"), ("valid", "validation text", "o-")):
        seen = [line for line in figures if line["split"] == split]
        lines.append(Line(label, [line["step"] for line in seen], [line["bits_per_byte"] for line in seen], style))
    return Chart("Bits per byte while training", "step", "bits per byte", lines)


def _sweep(results: DemoResults) -> Chart:
    line = Line("test text", list(results.lengths), [f["bits_per_byte"] for f in results.lengths.values()], "o-")
    title = "Test bits per byte by memory length"
    return Chart(title, "memory (bytes)", "bits per byte", [line], results.packers, logarithmic=True)
