"""`txl prepare`: turn text into a corpus, a folder of token ids that `txl train` reads."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from transformer_xl.cli.flags import TextFlags, TokenizerFlags, given_settings
from transformer_xl.cli.options import Integer, Json
from transformer_xl.cli.output import print_json, print_table
from transformer_xl.config import DEFAULT_RECIPE, load_recipe
from transformer_xl.files import quoted
from transformer_xl.progress import StageBars, note

if TYPE_CHECKING:
    from transformer_xl.text.token_store import Corpus

Files = Annotated[list[str] | None, Parameter(consume_multiple=True, negative=())]


def prepare(
    *sources: str,
    out: str | None = None,
    train: Files = None,
    valid: Files = None,
    test: Files = None,
    text: Annotated[TextFlags | None, Parameter(name="*", negative=(), group="Text")] = None,
    tokenizer: str | None = None,
    data_dir: Path | None = None,
    settings: Annotated[TokenizerFlags | None, Parameter(name="*", group="Tokenizer")] = None,
    num_workers: Annotated[int | None, Integer] = None,
    json: Json = False,
) -> None:
    """Turn text into a corpus that `txl train` trains on.

    Args:
        sources: Files, folders and quoted patterns, whose text is split into train, valid and test (- is standard
            input); or the name of a data set: enwik8, text8, wikitext-103, wikitext-2, ptb, lm1b, python-stdlib. Texts,
            tables with a text in each row (JSON lines, CSV, Parquet and so on), and archives of these.
        out: Folder to create; it must not exist. A command that was killed is typed again to go on.
            [default: corpora/NAME]
        train: Files, folders and patterns to train on, instead of splitting one text.
        valid: Files, folders and patterns to validate on.
        test: Files, folders and patterns to test on.
        text: Which files are read and how their text is split.
        tokenizer: byte, char, word, bpe or integer; midi, for MIDI files; or a trained one: the folder of a
            corpus or run, its txl_tokenizer.json, or a tokenizer.json or .model of another library. [default: that
            of the data set, else byte]
        data_dir: File or folder that has the files of the named data set. [default: download them]
        settings: How the tokenizer is trained.
        num_workers: Processes that encode. [default: one for each core]
        json: Print one JSON object and nothing else on standard output.
    """
    from transformer_xl.text.parallel import num_cores
    from transformer_xl.text.prepare import prepare as prepare_corpus

    start, workers = time.perf_counter(), num_cores() if num_workers is None else num_workers
    given = given_settings(text=text, tokenizer=settings)
    options: dict[str, Any] = {"train": train, "valid": valid, "test": test, "tokenizer": tokenizer}
    options |= {"data_dir": data_dir, **given.get("text", {}), **given.get("tokenizer", {})}
    with StageBars() as bars:
        corpus = prepare_corpus(sources, out, **options, num_workers=workers, progress=bars)
    print_corpus(corpus, time.perf_counter() - start, as_json=json)
    for line in corpus.notes:
        note(line)


def print_corpus(corpus: Corpus, seconds: float, *, as_json: bool) -> None:
    """Print what a corpus has and what to type next, or one JSON object."""
    count_names = ("num_tokens", "num_bytes", "num_words", "num_unknown", "num_documents")
    splits = {split: corpus.record.splits[split].model_dump(include=set(count_names)) for split in corpus.splits}
    tokenizer = corpus.tokenizer
    if as_json:
        facts = {
            "name": corpus.name,
            "source": corpus.source,
            "tokenizer": tokenizer.kind,
            "vocab_size": tokenizer.vocab_size,
            "splits": splits,
            "seconds": seconds,
            "out": str(corpus.path),
        }
        print_json(facts)
        return
    rows: list[list[str]] = []
    for split, counts in splits.items():
        cells = {name: f"{counts[name]:,}" for name in count_names}
        if counts["num_unknown"]:
            cells["num_unknown"] += f" ({counts['num_unknown'] / counts['num_tokens']:.2%})"
        rows.append([split, *cells.values()])
    title = f"{corpus.name}: {tokenizer.kind} tokenizer, vocabulary of {tokenizer.vocab_size:,}, in {corpus.path}"
    columns = ["split", "tokens", "bytes", "words", "unknown words", "documents"]
    print_table(f"{title} ({seconds:.1f} s)", columns, rows)
    print(f"text: {corpus.source}")
    default = load_recipe(DEFAULT_RECIPE).train  # suggest `tiny` if the text does not fill a batch of the default
    fits = splits["train"]["num_tokens"] >= default["batch_size"] * default["segment_length"]
    print(f"next: {'txl train' if fits else 'txl train tiny'} --corpus {quoted(corpus.path)}")
