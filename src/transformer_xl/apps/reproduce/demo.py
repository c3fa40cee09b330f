"""`txl demo`: prepare a corpus, train on it, evaluate, generate, and write a report, in minutes on any computer.

The text is the source of Python's own standard library, which needs no download.

Shape suffixes: K tokens of the text, B batch size (1), L layers, N heads, P distances.
"""

from __future__ import annotations

import gzip
import lzma
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from transformer_xl import __version__
from transformer_xl.config import EvaluationConfig, UserError, load_recipe
from transformer_xl.device import choose_device, environment, resolve_dtype
from transformer_xl.display import tokens_html
from transformer_xl.evaluation.attention_by_distance import attention_of_last
from transformer_xl.evaluation.evaluate import check_max_tokens, evaluate
from transformer_xl.evaluation.plan import EvaluationPlan
from transformer_xl.files import as_path, as_user_error, lock_folder, quoted, write_text
from transformer_xl.generation.generate import generate
from transformer_xl.model.transformer_xl import RelativeLanguageModel
from transformer_xl.plots import Line, draw
from transformer_xl.progress import ProgressBar, say
from transformer_xl.report_page import details, facts, heading, page, paragraph, sample, table, verbatim
from transformer_xl.run import Run
from transformer_xl.run_folder import RunFolder, config_text
from transformer_xl.text.parallel import num_cores
from transformer_xl.text.prepare import prepare
from transformer_xl.text.token_store import Corpus
from transformer_xl.text.tokenizers.tokenizer_config import TokenizerConfig
from transformer_xl.training.train import TrainResult, train

COLUMNS = ["model or command", "bits per byte", "tokens/s"]
"""Columns of the table of results."""
CURVE_COLUMNS = ["memory length", "bits per byte", "against as trained", "tokens/s"]
"""Columns of the table of results by memory length."""
_CURVE_TOKENS = 65_536  # test tokens scored with each memory length, from the start of the text
_BATCH_SIZE = 8  # parts of the test text that are read at once, which is faster and changes no result
_PARTS = 16  # of that text, whose differences give the spread
_PROMPT_BYTES = 4096  # of the test text at most, up to a blank line; from a line or two small models repeat themselves
_PROMPT_LINES = 12  # that are shown, its last ones
_TEMPERATURES = (0.9, 1.0)
_PENALTY = 1.1  # without it models that have learnt to copy repeat themselves
_PASSAGE = 200  # tokens that are shown with what memory gained
_STRONG_ATTENTION = 20  # percent that have the strongest color

_NUM_BYTES = 256  # a recipe with a larger vocabulary gets tokens of byte-pair encoding
_MARKER = ".txl-demo"  # a file of this name marks a folder as made by a demo


def prompt_end(values: Mapping[str, Any]) -> str:
    """Return the last lines of the prompt, from the values of `run_demo`."""
    return "".join(values["prompt"].splitlines(keepends=True)[-_PROMPT_LINES:])


def rows(values: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of the table of results, under COLUMNS, from the values of `run_demo`."""
    test = values["test"]
    name = f"Transformer-XL, memory {test['memory_length']:,}"
    return [
        [name, f"{test['bits_per_byte']:.3f}", f"{test['tokens_per_second']:,.0f}"],
        *([f"{name} (Python's), level 9", f"{values[f'{name}_bits_per_byte']:.3f}", ""] for name in ("gzip", "xz")),
    ]


def curve_rows(values: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of the table of results by memory length, under CURVE_COLUMNS, from the values of `run_demo`."""
    notes = {0: " (none)", RunFolder.open(values["run"]).config.train.memory_length: " (as trained)"}
    return [
        [
            f"{scores['memory_length']:,}{notes.get(scores['memory_length'], '')}",
            f"{scores['bits_per_byte']:.3f}",
            _difference(scores),
            f"{scores['tokens_per_second']:,.0f}",
        ]
        for scores in values["by_memory_length"]
    ]


def _difference(scores: Mapping[str, Any]) -> str:
    return f"{round(scores['difference'], 3) + 0.0:+.3f} ± {scores['difference_spread']:.3f}"


def _verdict(values: Mapping[str, Any]) -> str:
    """Return a sentence on no memory and on the longest, each beside the length of training."""
    none, longest = values["by_memory_length"][0], values["by_memory_length"][-1]
    said = []
    for scores, name in ((none, "no memory"), (longest, f"a memory of {longest['memory_length']:,}")):
        is_noise = abs(scores["difference"]) <= max(scores["difference_spread"], 0.0005)  # shown as 0.000
        kind = "no difference beyond the spread" if is_noise else "worse" if scores["difference"] > 0 else "better"
        said.append(f"{name} {_difference(scores)} bits per byte ({kind})")
    return f"Against the length of training, {' and '.join(said)}."


def run_demo(
    out: Path,
    *,
    recipe: str = "demo",
    max_tokens: int | None = None,
    device: str = "auto",
    threads: int | None = None,
    handle_signals: bool = False,
) -> tuple[TrainResult, dict[str, Any]]:
    """Train a small model on the Python standard library, evaluate it at several memory lengths, and generate.

    Args:
        out: folder for corpus, run and report.html; an earlier demo there is replaced.
        recipe: name or path of the recipe with the settings of the model and its training.
        max_tokens: number of test tokens to score, from the start of the test split, or None for all.
        device: cuda, mps, cpu, or auto for the fastest of these that is available.
        threads: CPU threads of one operation, or None for torch's default.
        handle_signals: whether Ctrl-C and SIGTERM save a checkpoint and stop training.

    Returns:
        The training; and the results as plain values for JSON, empty if training was stopped: `test` is
        `EvaluationResult.as_dict` of the test text, with the memory length that `evaluate` takes by itself, and
        `by_memory_length` has those of the first part of the test text, with several memory lengths.

    Raises:
        UserError: the recipe or device does not exist, the folder contains anything but an earlier demo, or another
            command uses it.
    """
    start, date = time.perf_counter(), datetime.now().astimezone().isoformat(sep=" ", timespec="minutes")
    out = as_path(out, "out")
    vocab_size = load_recipe(recipe).model.get("vocab_size") or _NUM_BYTES
    choose_device(device)
    check_max_tokens(max_tokens)
    tokens = TokenizerConfig(kind="bpe", vocab_size=vocab_size) if vocab_size > _NUM_BYTES else None
    with _cleared(out):
        corpus = prepare("python-stdlib", out / "corpus", tokenizer=tokens)
        split = corpus.split("train")
        say(f"text: {corpus.source}; {split.num_bytes:,} bytes in {split.num_documents:,} files to train on")
        trained = train(recipe, corpus, out / "run", device=device, threads=threads, handle_signals=handle_signals)
        return trained, _report(trained, corpus, out, max_tokens, start, date) if trained.finished else {}


def _report(
    trained: TrainResult, corpus: Corpus, out: Path, max_tokens: int | None, start: float, date: str
) -> dict[str, Any]:
    """Evaluate and generate, write the report, and return the results, for a demo that began at a time on a date."""
    run, test, report = trained.run, corpus.split("test"), out / "report.html"
    trained_length = run.config.train.memory_length
    num_tokens = test.num_tokens if max_tokens is None else min(max_tokens, test.num_tokens)
    batch_size = 1 if run.config.model.is_recurrent else _BATCH_SIZE  # whose state depends on all earlier tokens

    losses = out / "losses.npy"

    def scores(name: str, number: int, config: EvaluationConfig) -> dict[str, Any]:
        with ProgressBar(name, number, "tokens") as bar:
            result = evaluate(run, test, config, max_tokens=number, progress=bar.advance, token_losses=losses)
        nats_by_length[config.memory_length] = np.load(losses)
        losses.unlink()
        return result.as_dict()

    nats_by_length: dict[int | None, Any] = {}
    whole = scores("test text", num_tokens, EvaluationConfig(batch_size=batch_size))
    curve = [
        scores(
            f"memory {length:,}",
            min(num_tokens, _CURVE_TOKENS),
            EvaluationConfig(method="memory", batch_size=batch_size, memory_length=length),
        )
        for length in sorted({0, *(trained_length * factor // 4 for factor in (1, 2, 4, 8, 16))})
    ]
    for one in curve:
        nats_K = nats_by_length[one["memory_length"]] - nats_by_length[trained_length]
        difference_K = nats_K / math.log(2) * one["tokens"] / one["bytes"]  # their mean is in bits per byte
        means = [part.mean() for part in np.array_split(difference_K, min(_PARTS, len(difference_K)))]
        one["difference"] = float(difference_K.mean())
        one["difference_spread"] = 2 * float(np.std(means, ddof=1)) / math.sqrt(len(means)) if means[1:] else 0.0
    ids_K = np.asarray(test.tokens[:num_tokens])
    content = run.tokenizer.decode_bytes(ids_K)
    beginning = content[:_PROMPT_BYTES]
    prompt = (b"".join(beginning.rpartition(b"\n\n")[:2]) or beginning).decode(errors="replace")
    values = {
        "run": str(trained.path),
        "report": str(report),
        "test": whole,
        "by_memory_length": curve,
        "gzip_bits_per_byte": 8 * len(gzip.compress(content, 9)) / len(content),
        "xz_bits_per_byte": 8 * len(lzma.compress(content, preset=9)) / len(content),
        "prompt": prompt,
        "samples": {
            f"{temperature:g}": generate(
                run, prompt, max_new_tokens=300, temperature=temperature, repetition_penalty=_PENALTY, seed=1
            ).text
            for temperature in _TEMPERATURES
        },
        "seconds": time.perf_counter() - start,
        "parameters": run.model.num_parameters(),
        "date": date,
        **environment(choose_device(trained.device)),
        "cores": num_cores(),
    }
    gained_K = nats_by_length[0] - nats_by_length[trained_length]
    passage = _passage(gained_K)
    most = passage.start + int(gained_K[passage].argmax())
    shown = [_gains(_pieces(run, ids_K[passage]), gained_K[passage]), *_attention(run, ids_K, most)]
    write_text(report, demo_page(trained, values, corpus.source, shown))
    return values


@contextmanager
def _cleared(out: Path) -> Iterator[None]:
    """Delete the files of an earlier demo in the folder, and nothing else, and lock the folder while the block runs."""
    with as_user_error(f"writing {out}"):
        if out.exists() and not (out / _MARKER).exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{out} exists and is not an earlier demo; choose another out or delete it first")
        out.mkdir(parents=True, exist_ok=True)
    with lock_folder(out):
        with as_user_error(f"writing {out}"):
            write_text(out / _MARKER, "made by txl demo, which replaces corpus, run and report.html in this folder\n")
            for name in ("run", "corpus"):
                if (out / name).exists():
                    with lock_folder(out / name):  # another command may train the run further
                        shutil.rmtree(out / name)
            (out / "report.html").unlink(missing_ok=True)
        yield


def _passage(gained_K: Any) -> slice:
    """Return the passage in which memory gained most."""
    sums_K = np.concatenate([[0.0], np.cumsum(gained_K, dtype=np.float64)])
    length = min(_PASSAGE, len(gained_K))
    start = int(np.argmax(sums_K[length:] - sums_K[:-length]))
    return slice(start, start + length)


def _pieces(run: Run, ids_K: Any) -> list[str]:
    """Return the text of each token, with a character for each byte."""
    return [run.tokenizer.decode_bytes([token_id]).decode("ascii", "replace") for token_id in ids_K.tolist()]


def _gains(pieces: Sequence[str], gained_K: Any) -> str:
    """Return tokens as HTML, each colored by the nats that memory gained."""
    shown = zip(pieces, gained_K.tolist(), strict=True)
    return tokens_html([(text, f"{gain:+.2f} nats", gain) for text, gain in shown], quantity="gain by memory")


def _attention(run: Run, ids_K: Any, position: int) -> list[str]:
    """Return what a head attends to where it predicts the token at a position, as HTML.

    It is the head that gives most to one token of memory. Nothing is returned for a model without attention terms, and
    where there is no memory yet.
    """
    model, lengths = run.model, run.config.train
    if not isinstance(model, RelativeLanguageModel):
        return []
    plan = EvaluationPlan.resolve(run.config, EvaluationConfig(method="memory", memory_length=lengths.memory_length))
    size, limits = plan.segment_length, plan.context_limits
    # the inputs are one behind the text: the last one, which predicts the token, is that before it
    inputs_K = np.concatenate([[run.tokenizer.bos_token_id], ids_K[:position]]).astype(np.int64)
    inputs_BK = torch.from_numpy(inputs_K[None]).to(next(model.parameters()).device)
    first = position // size * size
    reach = (model.config.n_layers + 1) * (-(-limits.memory_length // size) + 1) * size  # nothing before it matters
    memory = model.initial_memory(1, limits)
    with torch.inference_mode():
        for start in range(max(0, first - reach), first, size):
            _, memory = model(inputs_BK[:, start : start + size], memory)
        p_LNP = attention_of_last(model, inputs_BK[:, first:], memory)
    num_new = position + 1 - first
    if p_LNP.shape[-1] <= num_new:
        return []
    layer, head = divmod(int(p_LNP[..., num_new:].amax(-1).argmax()), p_LNP.shape[1])
    p_P = p_LNP[layer, head, :position]  # without the token before the text
    percents = (100 * p_P.flip(0)).tolist()
    *before, predicted = _pieces(run, ids_K[position - len(p_P) : position + 1])
    return [
        paragraph(
            f"There memory gained most for token {position:,}, {predicted!r}, which "
            f"follows these {len(p_P)}. The first {len(p_P) - num_new} of them were in memory, and got "
            f"{100 * float(p_P[num_new:].sum()):.0f}% of the attention of head {head} of layer {layer}, of all heads "
            "the one that gave most to one token there:"
        ),
        tokens_html(
            [(text, f"{percent:.2f}%", percent) for text, percent in zip(before, percents, strict=True)],
            quantity="attention",
            strongest=_STRONG_ATTENTION,
            unit="%",
        ),
    ]


def demo_page(training: TrainResult, values: Mapping[str, Any], source: str, passage: Sequence[str]) -> str:
    """Return the report on a demo as HTML.

    Args:
        training: what the demo trained.
        values: what it measured, as returned by `run_demo`.
        source: description of the text.
        passage: HTML of a passage with what memory gained, and of what was attended to.
    """
    folder, test, curve = RunFolder.open(training.path), values["test"], values["by_memory_length"]
    model, train_config = folder.config.model, folder.config.train
    return page(
        "Transformer-XL, trained on this computer",
        [
            paragraph(
                f"A model of {model.n_layers} layers with d_model {model.d_model} was trained on {_unit(folder)} "
                f"({source}) for {train_config.max_steps:,} steps of {train_config.batch_size} x "
                f"{train_config.segment_length} tokens. The whole demo took {values['seconds']:,.0f} seconds. "
                f"The table scores {test['bytes']:,} bytes of files that the model never saw, with memory "
                f"length {test['memory_length']:,} ({test['memory_length_reason']}); "
                f"it needs {test['bits_per_byte']:.2f} bits per byte."
            ),
            table(COLUMNS, rows(values)),
            heading("Model, training and machine"),
            facts(_facts(training, values, folder)),
            details("All settings of the run (config.yaml)", config_text(folder.config)),
            heading("Training"),
            _training_chart(folder),
            heading("Does memory help?"),
            paragraph(
                f"The same weights, evaluated with different memory lengths on the first {curve[0]['bytes']:,} "
                f"bytes. Lower is better. {_verdict(values)} The spread is two standard errors of the mean over "
                f"{_PARTS} parts of this text; one training says nothing about other seeds."
            ),
            _memory_chart(curve),
            table(CURVE_COLUMNS, curve_rows(values)),
            paragraph(
                f"The {min(_PASSAGE, curve[0]['tokens'])} tokens of this text in which memory gained most, "
                "colored by how much more likely each "
                "became than without memory:"
            ),
            *passage,
            heading("Samples"),
            paragraph(
                f"The prompt is the first {len(values['prompt']):,} characters of the test text; its last lines are "
                f"marked. The model generated the rest (top-k 40, repetition penalty {_PENALTY}, seed 1)."
            ),
            *(
                element
                for temperature, text in values["samples"].items()
                for element in (paragraph(f"Temperature {temperature}:"), sample(prompt_end(values), text))
            ),
            heading("What to try next"),
            verbatim(
                "# how surprising each line of your file is to it\n"
                f"txl score {quoted(folder.path)} YOUR-FILE.py --per line\n\n"
                f"# other prompts, best of a page or more\n"
                f"txl generate {quoted(folder.path)} --prompt-file YOUR-FILE.py --temperature 0.9 \\\n"
                f"  --repetition-penalty {_PENALTY}\n\n"
                f"# what its heads look at\ntxl analyze attention {quoted(folder.path)}\n\n"
                "# a model of your own text, in about five minutes\n"
                "txl prepare YOUR-FILES --out my-corpus\ntxl train --corpus my-corpus --run my-run\n\n"
                "# a larger model of this text, in an hour or less\n"
                "txl demo --recipe fast-base --out hour"
            ),
        ],
    )


def _unit(folder: RunFolder) -> str:
    return "bytes" if folder.config.model.vocab_size == _NUM_BYTES else "byte-pair tokens"


def _facts(training: TrainResult, values: Mapping[str, Any], folder: RunFolder) -> dict[str, str]:
    """Return what the figures depend on: model, training, machine and date."""
    model, train_config = folder.config.model, folder.config.train
    dtype = resolve_dtype(choose_device(training.device), train_config.dtype)
    return {
        "parameters": f"{values['parameters']:,}",
        "model": f"{model.architecture}, {model.n_layers} layers, d_model {model.d_model}, vocabulary of "
        f"{model.vocab_size:,} {_unit(folder)}",
        "training": f"{train_config.max_steps:,} steps of {train_config.batch_size} x {train_config.segment_length} "
        f"tokens, memory length {train_config.memory_length}, {train_config.optimizer}, learning rate "
        f"{train_config.learning_rate:g} ({train_config.lr_schedule}), {dtype}, seed {train_config.seed}",
        "training time": f"{training.seconds:,.0f} seconds",
        "device": values["device"],
        "processor": f"{values['processor']} ({values['machine']}); cores: {values['cores']}, threads: "
        f"{values['threads']}",
        "software": f"transformer-xl {__version__}, torch {values['torch']}, Python {values['python']}",
        "date": values["date"],
    }


def _training_chart(folder: RunFolder) -> str:
    metrics, lines = folder.metrics(), list[Line]()
    for split, label, style in (("train", "training text", "-"), ("valid", "validation text", "o-")):
        points = [(entry["step"], entry["bits_per_byte"]) for entry in metrics if entry["split"] == split]
        lines.append(Line(label, [step for step, _ in points], [bits for _, bits in points], style))
    return draw("Bits per byte while training", "step", "bits per byte", lines, width=4.9)


def _memory_chart(curve: Sequence[Mapping[str, Any]]) -> str:
    lengths, bits = ([scores[name] for scores in curve] for name in ("memory_length", "bits_per_byte"))
    line = Line("test text", lengths, bits, "o-", spread=[scores["difference_spread"] for scores in curve])
    title = "Test bits per byte by memory length"
    return draw(title, "memory length (tokens)", "bits per byte", [line], log_x=True, width=4.9)
