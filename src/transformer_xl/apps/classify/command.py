"""`txl embed` and `txl classify`, and what `txl finetune --task classification` does."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from cyclopts import Parameter

from transformer_xl.cli.flags import ScoreFlags, check_flags
from transformer_xl.cli.options import (
    DEFAULT_DEVICE,
    NO_DOCUMENT_OPTIONS,
    ClassifierOptions,
    DeviceFlags,
    DocumentFlags,
    DocumentOptions,
    Integer,
    Json,
)
from transformer_xl.cli.output import (
    check_outputs,
    load_and_say,
    print_json,
    print_table,
    printed_before_files,
    say_unknown,
)
from transformer_xl.config import EvaluationConfig, UserError
from transformer_xl.config.extras import missing_extra
from transformer_xl.files import atomic_file, csv_text, npy_bytes, quoted, write_text
from transformer_xl.progress import ProgressBar, say

if TYPE_CHECKING:
    from transformer_xl.training.train import TrainResult


def read_documents(
    files: Sequence[Path], options: DocumentOptions, labels: str | None = None
) -> tuple[dict[str, str | bytes], list[str]]:
    """Return the documents of all files by their names, and their labels where a column has them.

    Raises:
        UserError: there is no file, one is damaged or lacks a column, or a text file should have labels.
    """
    from transformer_xl.text.sources.archives import read_text_file
    from transformer_xl.text.sources.items import ItemColumns, read_items
    from transformer_xl.text.sources.tables import format_of

    documents, given = dict[str, str | bytes](), list[str]()
    for file in files:
        content = read_text_file(file)
        input_format = options.input_format or format_of(str(file), content)
        per = options.per or ("file" if input_format == "text" else "row")
        if (input_format == "text" or per == "file") and (labels is not None or options.text_column is not None):
            advice = (
                "give a table, such as CSV or JSON lines, or --input-format"
                if options.per is None
                else "leave --per out"
            )
            raise UserError(f"{file}: a text has no columns; {advice}")
        if per == "file":
            documents[str(file)] = content
            continue
        columns = ItemColumns(
            options.text_column or "text", () if labels is None else (labels,), labels_setting="--labels"
        )
        for number, item in enumerate(read_items(str(file), content, input_format, columns), start=1):
            documents[f"{file}: {'line' if input_format == 'text' else 'row'} {number:,}"] = item.text
            given += [] if labels is None else [str(item.labels[labels])]
    if not files or len(set(files)) < len(files):
        raise UserError(f"{'a file was given twice' if files else 'there is no document'}; give files after the run")
    return documents, given


def embed(
    run: Path,
    /,
    *files: Path,
    out: Path,
    pooling: Literal["last", "mean"] = "last",
    layer: Annotated[int | None, Integer] = None,
    documents: DocumentFlags = NO_DOCUMENT_OPTIONS,
    settings: Annotated[ScoreFlags | None, Parameter(name="*")] = None,
    checkpoint: Literal["best", "last"] = "best",
    device_options: DeviceFlags = DEFAULT_DEVICE,
    json: Json = False,
) -> None:
    """Write a vector for each document: hidden states of a run, which reads it with memory, whatever its length.

    Parameters
    ----------
    run
        Folder of a run.
    files
        Texts or tables (CSV, TSV, JSON, JSON lines, Parquet, Arrow), which may be compressed.
    out
        New file: .npy, an array of float32 with a row for each document in their order, or .parquet, with their names.
    pooling
        The hidden state of the last token, or the mean of those of all tokens.
    layer
        0 for the input of the first layer, up to the output of the last. [default: the last, after the final norm]
    documents
        What is a document.
    settings
        How the documents are read.
    checkpoint
        best: the weights with the lowest validation loss; last: those of the last checkpoint.
    """
    from transformer_xl.apps.classify import embedding

    if out.suffix not in (".npy", ".parquet"):
        raise UserError(f"--out {out}: the name must end in .npy or .parquet")
    check_outputs(out, None)
    if out.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise missing_extra("pyarrow", "parquet")
    texts, _ = read_documents(files, documents)
    config = check_flags(EvaluationConfig, settings)
    loaded = load_and_say(run, device_options.choose(), checkpoint)
    say_unknown(loaded.tokenizer, texts.values())
    num_tokens = sum(map(len, embedding.encode_documents(loaded, texts)))
    with ProgressBar("embed", num_tokens, "tokens") as bar:
        vectors_ND = embedding.embed(loaded, texts, pooling=pooling, layer=layer, config=config, progress=bar.advance)
    with atomic_file(out) as temporary, temporary.open("wb") as stream:
        if out.suffix == ".npy":
            stream.write(npy_bytes(vectors_ND))
        else:
            _write_parquet(stream, list(texts), vectors_ND)
    facts = {"out": str(out), "num_documents": len(vectors_ND), "d_model": vectors_ND.shape[1]}
    if json:
        print_json(facts | loaded.weights_values)
    else:
        print(f"{out}: {len(vectors_ND):,} vectors of {vectors_ND.shape[1]:,} numbers")


def _write_parquet(stream: Any, names: list[str], vectors_ND: npt.NDArray[np.float32]) -> None:
    """Write a table with the columns document and embedding."""
    import pyarrow
    from pyarrow.parquet import write_table

    numbers = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(vectors_ND.reshape(-1)), vectors_ND.shape[1])
    write_table(pyarrow.table({"document": names, "embedding": numbers}), stream)


def classify(
    classifier: Path,
    /,
    *files: Path,
    labels: str | None = None,
    documents: DocumentFlags = NO_DOCUMENT_OPTIONS,
    settings: Annotated[ScoreFlags | None, Parameter(name="*")] = None,
    out: Path | None = None,
    device_options: DeviceFlags = DEFAULT_DEVICE,
    json: Json = False,
) -> None:
    """Predict the label of each document, and with true labels print accuracy, F1 and a confusion table.

    Parameters
    ----------
    classifier
        Folder of a classifier, made by 'txl finetune --task classification'.
    files
        Texts or tables (CSV, TSV, JSON, JSON lines, Parquet, Arrow), which may be compressed.
    labels
        Column of the true labels in a table.
    documents
        What is a document.
    settings
        How the documents are read. The lengths are those of training unless they are given.
    out
        New CSV file with the probability of each label for each document.
    """
    from transformer_xl.apps.classify import classifier as library
    from transformer_xl.apps.classify.embedding import encode_documents

    check_outputs(out, None)
    texts, given = read_documents(files, documents, labels)
    config, device = check_flags(EvaluationConfig, settings), device_options.choose()
    loaded = library.load_classifier(classifier, device=str(device))
    say_unknown(loaded.run.tokenizer, texts.values())
    num_tokens = sum(map(len, encode_documents(loaded.run, texts)))
    true_labels = None if labels is None else given
    with ProgressBar("classify", num_tokens, "tokens") as bar:
        result = library.classify(loaded, texts, true_labels, config=config, progress=bar.advance)
    columns = [f"probability_{label}" for label in result.labels]
    rows = [
        {"document": name, "label": label, "predicted": predicted, **dict(zip(columns, numbers, strict=True))}
        for name, label, predicted, numbers in zip(
            texts, true_labels or [""] * len(texts), result.predicted, result.probabilities_NC.tolist(), strict=True
        )
    ]
    metrics = result.metrics()
    with printed_before_files():
        if json:
            print_json({**metrics, "documents": rows})
        else:
            if out is None:
                shown = [[row[name] for name in ("document", "label", "predicted")] for row in rows]
                cells = [[*row, f"{p:.3f}"] for row, p in zip(shown, result.probabilities_NC.max(-1), strict=True)]
                print_table("predicted labels", ["document", "label", "predicted", "probability"], cells)
            if metrics:
                title = f"{len(rows):,} documents: accuracy {result.accuracy:.4f}, macro F1 {result.macro_f1:.4f}"
                f1, counts_CC = metrics["f1"], metrics["confusion"]
                cells = [
                    [label, *map(str, counts_C), f"{f1[label]:.4f}" if label in f1 else "-"]
                    for label, counts_C in zip(result.labels, counts_CC, strict=True)
                ]
                print_table(
                    f"{title}; rows: true labels", ["label", *(f"as {one}" for one in result.labels), "F1"], cells
                )
    if out is not None:
        write_text(out, csv_text(list(rows[0]), rows))


def finetune_classifier(
    base: Path, files: Sequence[Path], options: ClassifierOptions, documents: DocumentOptions, **arguments: Any
) -> int:
    """Train a classifier for `txl finetune --task classification`, print how good it is, and return the exit status.

    Args:
        base: folder of the run to begin with.
        files: tables with documents and labels.
        options: options of classification alone.
        documents: what is a document.
        arguments: further arguments of the library's function, and `json`.
    """
    from transformer_xl.apps.classify import training
    from transformer_xl.run_folder import RunFolder

    if options.labels is None:
        raise UserError("a classifier needs --labels COLUMN, the column of the labels in a table")
    as_json = arguments.pop("json")
    texts, labels = read_documents(files, documents, options.labels)
    say_unknown(RunFolder.open(base).tokenizer, texts.values())
    run = arguments.pop("run") or Path("runs", f"{files[0].name.split('.')[0]}-{base.resolve().name}")
    given = {"valid_fraction": options.valid_fraction, "loss_segments": options.loss_segments}
    arguments |= {name: value for name, value in given.items() if value is not None}
    if options.valid:
        if set(files) & set(options.valid):
            raise UserError("a file was given to train and to validate with; leave --valid out to hold documents out")
        if options.valid_fraction is not None:
            raise UserError("--valid and --valid-fraction were both given; use one of them")
        arguments["valid"] = read_documents(options.valid, documents, options.labels)
    pooling = options.pooling or "last"
    return print_result(training.finetune_classifier(base, texts, labels, run, pooling=pooling, **arguments), as_json)


def resume_classifier(path: Path, **arguments: Any) -> int:
    """Resume a classifier for `txl train --resume`, print how good it is, and return the exit status."""
    from transformer_xl.apps.classify import training

    as_json = arguments.pop("json")
    return print_result(training.resume_classifier(path, **arguments), as_json)


def print_result(result: TrainResult, as_json: bool) -> int:
    """Print what the training of a classifier ended with and what to type next, and return the exit status."""
    from transformer_xl.apps.classify.classifier import read_record

    best = read_record(result.path).best
    if not result.finished:
        say(f"stopped and saved at step {result.step:,}; resume with: txl train --resume {quoted(result.path)}")
    if as_json:
        facts = {"run": str(result.path), "finished": result.finished, "step": result.step}
        facts |= {"max_steps": result.max_steps, "seconds": result.seconds}
        print_json(facts | {"best_validation": best and best.model_dump(mode="json")})
    elif result.finished and best is not None:
        print(
            f"{result.path}: {result.step:,} steps in {result.seconds:,.0f} s; at step {best.step:,} validation loss "
            f"{best.loss:.4f} nats per document, accuracy {best.accuracy:.4f}"
        )
        print(f"next: txl classify {quoted(result.path)} FILES")
    return 0 if result.finished else 128 + (result.stop_signal or signal.SIGTERM)
