"""`txl prepare`: text becomes a corpus of tokens."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from transformer_xl.cli.options import Json, num_cores
from transformer_xl.cli.output import print_json, print_table
from transformer_xl.config import UserError, check_settings
from transformer_xl.files import as_user_error
from transformer_xl.progress import ProgressBar, say

if TYPE_CHECKING:
    from transformer_xl.text.documents import Document, SplitName
    from transformer_xl.text.sources.text_source import TextSource
    from transformer_xl.text.token_store import Corpus
    from transformer_xl.text.tokenizers import Tokenizer, TokenizerConfig

_FILES = Parameter(consume_multiple=True, negative=())
_CORPORA = Path("corpora")
_SECONDS_BEFORE_BAR = 2.0


@dataclass(frozen=True)
class Splits:
    """How the text is split into train, valid and test."""

    train: Annotated[list[str] | None, _FILES] = None
    """Files, folders and patterns to train on, instead of cutting one text."""
    valid: Annotated[list[str] | None, _FILES] = None
    """Files, folders and patterns to validate on."""
    test: Annotated[list[str] | None, _FILES] = None
    """Files, folders and patterns to test on."""
    valid_fraction: float | None = None
    """Share of the joined text that becomes valid; 0.05 unless given."""
    test_fraction: float | None = None
    """Share, at the end of the joined text, that becomes test; 0.05 unless given."""

    @property
    def given(self) -> dict[SplitName, Sequence[str]]:
        """What stands in each split."""
        return {"train": self.train or [], "valid": self.valid or [], "test": self.test or []}

    @property
    def fractions(self) -> dict[SplitName, float | None]:
        """Shares of valid and test; none where not typed."""
        return {"valid": self.valid_fraction, "test": self.test_fraction}


@dataclass(frozen=True)
class TokenizerFlags:
    """How the tokenizer is trained; what is not given is as the corpus normally has it."""

    vocab_size: int | None = None
    """Tokens of the vocabulary, special tokens and bytes included. integer: the numbers below it, less one."""
    min_frequency: int | None = None
    """word, char: leave out what occurs less often."""
    lowercase: bool | None = None
    """word: lowercase the text."""
    split_punctuation: bool | None = None
    """word: split punctuation from words, as WikiText has it."""
    add_eos: bool | None = None
    """word: each newline becomes a token (the default); without, it is white space."""
    vocab_file: Path | None = None
    """word: take the words from this file, one a line, instead of training."""

    @property
    def typed(self) -> dict[str, Any]:
        """What was given."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: str(value) if isinstance(value, Path) else value for name, value in found.items() if value is not None
        }

    @property
    def names(self) -> str:
        """What was given, as it is typed."""
        return ", ".join(
            f"--{'no-' if value is False else ''}{name.replace('_', '-')}" for name, value in self.typed.items()
        )

    def change(self, config: TokenizerConfig) -> TokenizerConfig:
        """The settings with what was given.

        Raises:
            UserError: a value that cannot be, or that does not apply to this kind.
        """
        return check_settings(
            type(config), {**config.model_dump(exclude_unset=True), **self.typed}, f"--tokenizer {config.kind}"
        )


_AS_GIVEN, _AS_NORMAL = Splits(), TokenizerFlags()


def prepare(
    *sources: str,
    out: str | None = None,
    source: Path | None = None,
    splits: Annotated[Splits, Parameter(name="*")] = _AS_GIVEN,
    tokenizer: str | None = None,
    flags: Annotated[TokenizerFlags, Parameter(name="*")] = _AS_NORMAL,
    documents: Literal["files", "lines"] | None = None,
    workers: int | None = None,
    json: Json = False,
) -> None:
    """Turn text into a corpus that `txl train` learns from.

    Args:
        sources: Files, folders and quoted patterns, whose joined text is cut into train, valid and test; or the name
            of a corpus: enwik8, text8, wikitext-103, wikitext-2, ptb, lm1b, python-stdlib.
        out: Folder to make; it must not exist. [default: corpora/NAME]
        source: File or folder that holds the files of the named corpus; without, they are downloaded.
        splits: How the text is split.
        tokenizer: byte, char, word, bpe or integer; or a trained one: the folder of a corpus or run, its
            txl_tokenizer.json, or a tokenizer.json of the library tokenizers. [default: the named corpus's
            own, else byte]
        flags: How the vocabulary is learned.
        documents: Whether each file or each line is a document. [default: the named corpus's own, else files]
        workers: Processes that encode. [default: one for each core]
        json: Print one JSON object and nothing else on standard output.
    """
    from transformer_xl.text.corpus_writer import CorpusLayout, write_corpus
    from transformer_xl.text.sources.corpora import find_text
    from transformer_xl.text.sources.source_files import Origin

    began = time.perf_counter()
    workers = _processes(workers)
    existing = _existing(tokenizer, flags)
    kind = existing.kind if existing else tokenizer
    asked = _asked(out)
    _refuse_early(asked, sources, kind, flags)
    with _Bars() as bars:
        text = find_text(
            sources, given=splits.given, fractions=splits.fractions, kind=kind, origin=Origin(source, bars)
        )
        place = asked or _CORPORA / text.name
        _refuse_existing(place)
        for note in text.notes:
            say(f"note: {note}")
        learned = existing is None
        if existing is None:
            existing = _learn(text, flags.change(_normal_options(text, kind)), bars, workers)
        corpus = write_corpus(
            place,
            _watched(_in_range(text, existing), bars, "write"),
            name=text.name,
            source=text.description,
            tokenizer=existing,
            layout=CorpusLayout(documents=documents or text.documents, workers=workers),
        )
    _show(corpus, time.perf_counter() - began, as_json=json)
    if tokenizer is None and not flags.typed and documents is None:
        _compare(corpus, text)
    _advise(corpus, flags, learned=learned)


def _asked(out: str | None) -> Path | None:
    if out == "":
        raise UserError("--out: an empty name was given; name a folder to make, or leave --out out for corpora/NAME")
    return None if out is None else Path(out)


def _processes(asked: int | None) -> int:
    if asked is not None and asked < 1:
        raise UserError(f"--workers {asked}: wanted 1 or more")
    return asked or num_cores()


def _existing(tokenizer: str | None, flags: TokenizerFlags) -> Tokenizer | None:
    """The vocabulary that stands at a path; none where a kind was named, or nothing."""
    from transformer_xl.text.tokenizers import TOKENIZER_KINDS, load_tokenizer

    if tokenizer is None or tokenizer in TOKENIZER_KINDS:
        return None
    if flags.typed:
        raise UserError(
            f"--tokenizer {tokenizer} is trained already; leave {flags.names} out, or name a kind "
            f"({', '.join(TOKENIZER_KINDS)})"
        )
    return load_tokenizer(tokenizer)


def _refuse_early(out: Path | None, sources: Sequence[str], kind: str | None, flags: TokenizerFlags) -> None:
    """Refuses what can be seen to be wrong before anything is downloaded or read."""
    from transformer_xl.text.sources.named_corpora import CORPUS_NAMES, DISTRIBUTED
    from transformer_xl.text.tokenizers import TokenizerConfig

    named = sources[0] if sources and sources[0] in CORPUS_NAMES else None
    if out or named:
        _refuse_existing(out or _CORPORA / sources[0])
    if kind is None and named in DISTRIBUTED:
        kind = DISTRIBUTED[named].tokenizer.kind
    if kind:
        flags.change(check_settings(TokenizerConfig, {"kind": kind}, "--tokenizer"))


def _refuse_existing(out: Path) -> None:
    with as_user_error(f"writing {out}"):
        there = out.exists()
    if there:
        raise UserError(f"{out} exists already; choose another place or delete it first")


def _normal_options(text: TextSource, kind: str | None) -> TokenizerConfig:
    from transformer_xl.text.tokenizers import TokenizerConfig

    if kind in (None, text.tokenizer.kind):
        return text.tokenizer
    return check_settings(TokenizerConfig, {"kind": kind}, "--tokenizer")


def _learn(text: TextSource, options: TokenizerConfig, bars: _Bars, workers: int) -> Tokenizer:
    from transformer_xl.text.tokenizers.training import train_tokenizer

    counted = text.counted if options.kind == text.tokenizer.kind else ("train",)
    read = [document for split in counted for document in text.splits.get(split, ())]
    return train_tokenizer(options, _watched({"train": read}, bars, "learn")["train"], num_workers=workers)


def _in_range(text: TextSource, tokenizer: Tokenizer) -> Mapping[SplitName, Sequence[Document]]:
    """The documents; where they are arrays, a number the vocabulary lacks is named by its place in the array."""
    from transformer_xl.text.sources.arrays import limited

    if tokenizer.is_text:
        return text.splits
    numbers = tokenizer.vocab_size - 1  # the last id is the mark
    return {split: limited(documents, numbers) for split, documents in text.splits.items()}


class _Bars:
    """A progress bar for one thing after another, each shown once it has taken a while."""

    def __init__(self) -> None:
        self._what, self._began, self._done = "", 0.0, 0
        self._bar: ProgressBar | None = None

    def __enter__(self) -> _Bars:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def __call__(self, what: str, done: int, total: int) -> None:
        """So many bytes are done of what is being done."""
        if what != self._what:
            self._close()
            self._what, self._began = what, time.perf_counter()
        if self._bar:
            self._bar.advance(done - self._done)
        elif time.perf_counter() - self._began >= _SECONDS_BEFORE_BAR:
            self._bar = ProgressBar(what, max(total, done), "bytes").__enter__()
            self._bar.begin_at(done)
        self._done = done

    def _close(self) -> None:
        if self._bar:
            self._bar.__exit__()
        self._bar = None


def _watched(splits: Mapping[SplitName, Sequence[Document]], bars: _Bars, what: str) -> dict[SplitName, list[Document]]:
    """The documents, moving the bar on as they are read."""
    reading = _Reading(bars, what, sum(document.num_bytes for of in splits.values() for document in of))
    return {
        split: [replace(document, chunks=_Watched(document.chunks, reading)) for document in of]
        for split, of in splits.items()
    }


class _Reading:
    def __init__(self, bars: _Bars, what: str, total: int) -> None:
        self._bars, self._what, self._total, self._done = bars, what, total, 0

    def advance(self, amount: int) -> None:
        self._done += amount
        self._bars(self._what, self._done, max(self._total, self._done))


@dataclass(frozen=True)
class _Watched:
    chunks: Iterable[bytes]
    reading: _Reading

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self.chunks:
            yield chunk
            self.reading.advance(len(chunk))


_COUNTED = ("tokens", "bytes", "words", "num_unknown", "documents")


def _show(corpus: Corpus, seconds: float, *, as_json: bool) -> None:
    counts = {split: corpus.record.splits[split].model_dump(include=set(_COUNTED)) for split in corpus.splits}
    if as_json:
        values: dict[str, Any] = {
            "name": corpus.name,
            "source": corpus.source,
            "tokenizer": corpus.tokenizer.kind,
            "vocab_size": corpus.tokenizer.vocab_size,
            "splits": counts,
            "seconds": seconds,
            "out": str(corpus.path),
        }
        print_json(values)
        return
    columns = ["unknown words" if name == "num_unknown" else name for name in _COUNTED]
    rows = [
        [split, *(f"{of[name]:,}{_share(of) if name == 'num_unknown' else ''}" for name in _COUNTED)]
        for split, of in counts.items()
    ]
    title = f"{corpus.name}: {corpus.tokenizer.kind} vocabulary of {corpus.tokenizer.vocab_size:,}, in {corpus.path}"
    print_table(f"{title} ({seconds:.1f} s)", ["split", *columns], rows)
    print(f"next: txl train small --corpus {corpus.path}")


def _share(of: Mapping[str, int]) -> str:
    return f" ({of['num_unknown'] / of['tokens']:.2%})" if of["num_unknown"] else ""


def _compare(corpus: Corpus, text: TextSource) -> None:
    """Says so where a known corpus has not the known number of tokens."""
    for split, known in text.known_tokens.items():
        found = corpus.record.splits[split].tokens
        if found != known:
            say(f"note: {split} has {found:,} tokens, while {text.name} is known to have {known:,}; is it that text?")


_GLUED = re.compile(r"\w+[,;:!?]")
_LOOKED_AT, _GLUED_SHARE = 2000, 0.03


def _advise(corpus: Corpus, flags: TokenizerFlags, *, learned: bool) -> None:
    """Names --split-punctuation where many frequent words end in punctuation."""
    tokenizer = corpus.tokenizer
    if tokenizer.kind != "word" or not learned or flags.split_punctuation is not None:
        return
    number = min(_LOOKED_AT, tokenizer.vocab_size)
    glued = [word for place in range(number) if _GLUED.fullmatch(word := tokenizer.decode([place]).strip())]
    if len(glued) >= _GLUED_SHARE * number:
        say(
            f"note: {len(glued):,} of the {number:,} most frequent words end in punctuation ({', '.join(glued[:3])}); "
            "--split-punctuation takes it apart, and fewer words stay unknown"
        )
