"""`txl prepare`: text becomes a corpus of tokens."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from transformer_xl.cli.options import Json
from transformer_xl.cli.output import ProgressBar, print_json, print_table

if TYPE_CHECKING:
    from transformer_xl.text.corpora import TextSource
    from transformer_xl.text.token_store import Corpus, Document

_FILES = Parameter(consume_multiple=True, negative=())


@dataclass(frozen=True)
class Splits:
    """How the text is split into train, valid and test."""

    train: Annotated[list[str] | None, _FILES] = None
    """Files and folders to train on, instead of cutting one text."""
    valid: Annotated[list[str] | None, _FILES] = None
    """Files and folders to validate on."""
    test: Annotated[list[str] | None, _FILES] = None
    """Files and folders to test on."""
    valid_fraction: float | None = None
    """Share of the bytes of the joined text that becomes valid; 0.05 unless given."""
    test_fraction: float | None = None
    """Share of the bytes, at the end of the joined text, that becomes test; 0.05 unless given."""


_AS_GIVEN = Splits()


def prepare(
    *sources: str,
    out: Path,
    splits: Annotated[Splits, Parameter(name="*")] = _AS_GIVEN,
    vocabulary: str = "bytes",
    json: Json = False,
) -> None:
    """Turn text into a corpus that `txl train` learns from.

    Args:
        sources: Files and folders, whose joined text is cut into train, valid and test; or the name of a corpus:
            python-stdlib.
        out: Folder to make; it must not exist.
        splits: How the text is split.
        vocabulary: Kind of vocabulary: bytes.
        json: Print one JSON object and nothing else on standard output.
    """
    from transformer_xl.text.corpora import find_text
    from transformer_xl.text.token_store import write_corpus
    from transformer_xl.text.vocabulary import build_vocabulary

    began = time.perf_counter()
    kind = build_vocabulary(vocabulary)
    text = find_text(
        sources,
        given={"train": splits.train or [], "valid": splits.valid or [], "test": splits.test or []},
        valid_fraction=splits.valid_fraction,
        test_fraction=splits.test_fraction,
    )
    with ProgressBar("prepare", _num_bytes(text), "bytes") as bar:
        splits_read = {split: [_watched(document, bar) for document in of] for split, of in text.splits.items()}
        corpus = write_corpus(out, splits_read, name=text.name, source=text.description, vocabulary=kind)
    _show(corpus, time.perf_counter() - began, as_json=json)


def _num_bytes(text: TextSource) -> int:
    return sum(document.num_bytes for of in text.splits.values() for document in of)


def _watched(document: Document, bar: ProgressBar) -> Document:
    """The document, moving the bar on as it is read."""
    return replace(document, chunks=_Watched(document.chunks, bar))


@dataclass(frozen=True)
class _Watched:
    chunks: Iterable[bytes]
    bar: ProgressBar

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self.chunks:
            yield chunk
            self.bar.advance(len(chunk))


def _show(corpus: Corpus, seconds: float, *, as_json: bool) -> None:
    counted = ("tokens", "bytes", "words", "documents")
    counts = {split: corpus.record.splits[split].model_dump(include=set(counted)) for split in corpus.splits}
    if as_json:
        values: dict[str, Any] = {
            "name": corpus.name,
            "source": corpus.source,
            "vocabulary": corpus.vocabulary.kind,
            "vocabulary_size": corpus.vocabulary.size,
            "splits": counts,
            "seconds": seconds,
            "out": str(corpus.path),
        }
        print_json(values)
        return
    print_table(
        f"{corpus.name}: {corpus.vocabulary.kind} vocabulary of {corpus.vocabulary.size}, in {corpus.path} "
        f"({seconds:.1f} s)",
        ["split", *counted],
        [[split, *(f"{counts[split][name]:,}" for name in counted)] for split in corpus.splits],
    )
