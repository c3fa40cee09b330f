"""Preparing a corpus: find the text, train or load the tokenizer, write the tokens."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from glob import has_magic
from pathlib import Path
from typing import Any, cast

from transformer_xl.config import UserError, check_settings, nearest
from transformer_xl.files import as_user_error
from transformer_xl.text.corpus_writer import write_corpus
from transformer_xl.text.documents import SPLITS, Document, DocumentUnit, SplitName, TextSource
from transformer_xl.text.sources.archives import Progress, no_progress
from transformer_xl.text.sources.arrays import limit_numbers
from transformer_xl.text.sources.named_datasets import DATASET_NAMES, DISTRIBUTED, open_dataset
from transformer_xl.text.sources.text_files import (
    BytesRange,
    check_fractions,
    cut_into_splits,
    describe_paths,
    name_of_paths,
    source_of_splits,
    texts_of_paths,
)
from transformer_xl.text.token_store import Corpus
from transformer_xl.text.tokenizers import (
    TOKENIZER_KINDS,
    Tokenizer,
    TokenizerConfig,
    TokenizerKind,
    load_tokenizer,
    to_bytes,
)

StrPath = str | os.PathLike[str]
Texts = Iterable[str | bytes]

DEFAULT_FRACTION = 0.05
"""Fraction of a text that becomes valid, and as much test, by default."""
_PARENT_FOLDER = Path("corpora")


def prepare(
    source: StrPath | Sequence[StrPath] | None = None,
    out: StrPath | None = None,
    *,
    documents: Texts | Mapping[SplitName, Texts] | None = None,
    train: StrPath | Sequence[StrPath] | None = None,
    valid: StrPath | Sequence[StrPath] | None = None,
    test: StrPath | Sequence[StrPath] | None = None,
    valid_fraction: float | None = None,
    test_fraction: float | None = None,
    tokenizer: StrPath | Tokenizer | TokenizerConfig | None = None,
    vocab_size: int | None = None,
    min_frequency: int | None = None,
    lowercase: bool | None = None,
    split_punctuation: bool | None = None,
    add_eos: bool | None = None,
    vocab_file: StrPath | None = None,
    document_unit: DocumentUnit | None = None,
    data_dir: StrPath | None = None,
    num_workers: int = 1,
    progress: Progress = no_progress,
) -> Corpus:
    """Turn text into a corpus: token ids on disk that a model can be trained on.

        prepare("enwik8")
        prepare("novels/**/*.txt", "corpora/novels", tokenizer="bpe", vocab_size=4096)
        prepare(out="corpora/notes", documents={"train": notes, "valid": more_notes})

    The text is one of: `source`, `documents`, or files for each split (`train`, `valid`, `test`).

    Args:
        source: the name of a data set (enwik8, text8, wikitext-103, wikitext-2, ptb, lm1b, python-stdlib); or paths of
            files and folders, and glob patterns, whose joined text is cut into train, valid and test.
        out: the folder to create; it must not exist. None: corpora/NAME.
        documents: texts in memory, to be joined and cut into splits; or a mapping from each split to its texts.
        train: files, folders and glob patterns of the train split.
        valid: those of the valid split.
        test: those of the test split.
        valid_fraction: fraction of the joined text that becomes valid. None: 0.05.
        test_fraction: fraction, at the end of the joined text, that becomes test. None: 0.05.
        tokenizer: byte, char, word, bpe or integer; settings of one to train; or a trained tokenizer, or its path (as
            in `load_tokenizer`). None: the data set's own; for other text integer if it is .npy files, else byte.
        vocab_size: as in `TokenizerConfig`, like the next five; None: the data set's setting, or the default.
        min_frequency: see `TokenizerConfig`.
        lowercase: see `TokenizerConfig`.
        split_punctuation: see `TokenizerConfig`.
        add_eos: see `TokenizerConfig`.
        vocab_file: see `TokenizerConfig`.
        document_unit: whether each file (or text in memory) or each line is a document. None: the data set's own, else
            file.
        data_dir: file or folder that has the files of the named data set. None: they are downloaded.
        num_workers: processes that train the tokenizer and encode. With more than 1, scripts need the usual
            `if __name__ == "__main__":`.
        progress: called with the name of a stage (`train tokenizer`, `write`, `download ...`), the bytes done, and
            their total (0 if unknown).

    Returns:
        The corpus. Its `notes` say what may not be as intended, such as a file in two splits.

    Raises:
        UserError: the text is missing, unreadable, empty, cannot be downloaded or cannot be encoded; settings that
            contradict each other; or the folder exists or cannot be written. Nothing is left behind.
    """
    if out is not None and not os.fspath(out):
        raise UserError("--out: an empty path was given; name a folder to create, or leave --out out for corpora/NAME")
    if num_workers < 1:
        raise UserError(f"--num-workers {num_workers}: wanted 1 or more")
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "min_frequency": min_frequency,
        "lowercase": lowercase,
        "split_punctuation": split_punctuation,
        "add_eos": add_eos,
        "vocab_file": None if vocab_file is None else os.fspath(vocab_file),
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    paths = _paths(source)
    given = _loaded(tokenizer, settings)
    _refuse_early(paths, None if out is None else Path(out), given, settings)
    kind = given if isinstance(given, str) else given.kind if given else None
    text = find_text(
        paths,
        documents=documents,
        splits={"train": _paths(train), "valid": _paths(valid), "test": _paths(test)},
        fractions={"valid": valid_fraction, "test": test_fraction},
        kind=kind,
        data_dir=None if data_dir is None else Path(data_dir),
        progress=progress,
    )
    folder = _PARENT_FOLDER / text.name if out is None else Path(out)
    _refuse_existing(folder)
    notes = [*text.notes]
    if isinstance(given, Tokenizer):
        chosen = given
    else:
        config = _tokenizer_config(given, text.tokenizer, settings)
        chosen = _train_tokenizer(text, config, num_workers, progress)
        notes += _note_attached_punctuation(chosen, config)
    splits = text.splits
    if not chosen.is_text:  # the last id is the end-of-sequence token
        splits = {split: limit_numbers(of_split, chosen.vocab_size - 1) for split, of_split in splits.items()}
    corpus = write_corpus(
        folder,
        _report_reading(splits, "write", progress),
        name=text.name if documents is None else folder.name,
        source=text.description,
        tokenizer=chosen,
        document_unit=document_unit or text.document_unit,
        num_workers=num_workers,
    )
    if given is None and not settings and document_unit is None:
        notes += _note_unexpected_lengths(corpus, text)
    return replace(corpus, notes=tuple(notes))


def find_text(
    paths: Sequence[str] = (),
    *,
    documents: Texts | Mapping[SplitName, Texts] | None = None,
    splits: Mapping[SplitName, Sequence[str]] | None = None,
    fractions: Mapping[SplitName, float | None] | None = None,
    kind: str | None = None,
    data_dir: Path | None = None,
    progress: Progress = no_progress,
) -> TextSource:
    """Find the text that the arguments of `prepare` mean.

    Args:
        paths: one of `DATASET_NAMES`, or files, folders and glob patterns.
        documents: texts in memory.
        splits: files, folders and glob patterns of each split.
        fractions: of the joined text, in [0, 1), for valid and test; None: `DEFAULT_FRACTION`.
        kind: the kind of tokenizer that will encode the text; None: its default tokenizer.
        data_dir: file or folder that has the files of a named data set.
        progress: called while these are downloaded, extracted and checked.

    Raises:
        UserError: something is missing, unreadable, empty, unknown, out of range or contradictory.
    """
    given: dict[SplitName, Sequence[str]] = {split: of for split in SPLITS if splits and (of := splits.get(split))}
    asked = {split: fraction for split, fraction in (fractions or {}).items() if fraction is not None}
    dataset = next((path for path in paths if path in DATASET_NAMES), None)
    _refuse_contradictions(paths, given, documents, dataset, data_dir)
    if asked and (given or dataset or isinstance(documents, Mapping)):
        fixed = (
            f"the splits of {dataset} are fixed"
            if dataset
            else "fractions cut a text into splits, but splits are given"
        )
        raise UserError(f"{fixed}; leave the fractions out")
    if given:
        texts = {split: texts_of_paths(of_split, f"--{split}: ") for split, of_split in given.items()}
        description = "; ".join(f"{split}: {describe_paths(of_split)}" for split, of_split in given.items())
        return source_of_splits(texts, name=name_of_paths(given["train"]), description=description, kind=kind)
    if isinstance(documents, Mapping):
        texts = _splits_in_memory(cast("Mapping[SplitName, Texts]", documents))
        return source_of_splits(texts, name="documents", description=_IN_MEMORY, kind=kind)
    if dataset:
        return open_dataset(dataset, data_dir, progress, kind=kind)
    shares: dict[SplitName, float] = {"valid": DEFAULT_FRACTION, "test": DEFAULT_FRACTION, **asked}
    check_fractions(shares)
    if documents is not None:
        texts_in_memory = _in_memory(documents, "document")
        return cut_into_splits(texts_in_memory, shares, name="documents", description=_IN_MEMORY, kind=kind)
    _refuse_unknown_names(paths)
    name, description = name_of_paths(paths), describe_paths(paths)
    return cut_into_splits(texts_of_paths(paths), shares, name=name, description=description, kind=kind)


def _refuse_contradictions(
    paths: Sequence[str],
    splits: Mapping[SplitName, Sequence[str]],
    documents: Texts | Mapping[SplitName, Texts] | None,
    dataset: str | None,
    data_dir: Path | None,
) -> None:
    if paths and splits:
        raise UserError(
            f"both text to cut ({describe_paths(paths)}) and --{next(iter(splits))} were given; write --train before "
            "the files to train on, or leave the split options out"
        )
    if documents is not None and (paths or splits):
        raise UserError("both documents and files were given; leave one of them out")
    if not paths and not splits and documents is None:
        raise UserError(
            f"no text was given; name files, folders, --train FILE, or a data set ({', '.join(DATASET_NAMES)})"
        )
    if splits and "train" not in splits:
        raise UserError(f"--{next(iter(splits))} was given without --train; add --train with the files to train on")
    if dataset and len(paths) > 1:
        raise UserError(
            f"the data set {dataset} cannot be joined with others, but {len(paths)} sources were given; leave the "
            f"others out, or write ./{dataset} for a file of that name"
        )
    if data_dir and not dataset:
        raise UserError(
            f"--data-dir {data_dir} is for a data set known by name ({', '.join(DATASET_NAMES)}); your own files are "
            "given without it"
        )


_IN_MEMORY = "documents in memory"


def _paths(given: StrPath | Sequence[StrPath] | None) -> list[str]:
    if given is None:
        return []
    paths = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    return [os.fspath(path) for path in paths]


def _in_memory(texts: Texts, name: str) -> list[BytesRange]:
    texts = [texts] if isinstance(texts, str | bytes) else texts
    return [BytesRange(f"{name} {index}", to_bytes(text)) for index, text in enumerate(texts)]


def _splits_in_memory(documents: Mapping[SplitName, Texts]) -> dict[SplitName, list[BytesRange]]:
    unknown = [split for split in documents if split not in SPLITS]
    if unknown:
        raise UserError(
            f"documents has a split '{unknown[0]}'{nearest(unknown[0], SPLITS)}; wanted {', '.join(SPLITS)}"
        )
    if "train" not in documents:
        raise UserError("documents has no split 'train'; add it")
    return {split: _in_memory(texts, f"{split} document") for split, texts in documents.items()}


def _refuse_unknown_names(paths: Sequence[str]) -> None:
    """Refuse what is not a path, and offer the nearest name of a data set."""
    for path in paths:
        with as_user_error(f"reading {path}"):
            found = not path or Path(path).exists() or has_magic(path)
        if not found:
            raise UserError(
                f"'{path}' is neither a file nor a folder nor a known data set{nearest(path, DATASET_NAMES)}; check "
                f"the spelling (known data sets: {', '.join(DATASET_NAMES)})"
            )


def _loaded(
    tokenizer: StrPath | Tokenizer | TokenizerConfig | None, settings: Mapping[str, Any]
) -> Tokenizer | TokenizerConfig | TokenizerKind | None:
    """The tokenizer that was given, loaded if it is a path; settings and kinds are returned as they are."""
    if tokenizer is None or isinstance(tokenizer, TokenizerConfig):
        return tokenizer
    for kind in TOKENIZER_KINDS:
        if tokenizer == kind:
            return kind
    if settings:
        flags = ", ".join(f"--{'no-' if value is False else ''}{name}" for name, value in settings.items())
        which = tokenizer.kind if isinstance(tokenizer, Tokenizer) else tokenizer
        raise UserError(
            f"--tokenizer {which} is trained already; leave {flags.replace('_', '-')} out, or name a kind "
            f"({', '.join(TOKENIZER_KINDS)})"
        )
    return tokenizer if isinstance(tokenizer, Tokenizer) else load_tokenizer(os.fspath(tokenizer))


def _refuse_early(
    paths: Sequence[str],
    out: Path | None,
    given: Tokenizer | TokenizerConfig | TokenizerKind | None,
    settings: Mapping[str, Any],
) -> None:
    """Refuse what is known to be wrong before anything is downloaded or read."""
    dataset = paths[0] if paths and paths[0] in DATASET_NAMES else None
    if out or dataset:
        _refuse_existing(out or _PARENT_FOLDER / paths[0])
    if not isinstance(given, Tokenizer) and (given or dataset):
        default = DISTRIBUTED[dataset].tokenizer if dataset in DISTRIBUTED else TokenizerConfig()
        _tokenizer_config(given, default, settings)


def _refuse_existing(out: Path) -> None:
    with as_user_error(f"writing {out}"):
        exists = out.exists()
    if exists:
        raise UserError(f"{out} exists already; choose another folder or delete it first")


def _tokenizer_config(
    given: TokenizerConfig | TokenizerKind | None, default: TokenizerConfig, settings: Mapping[str, Any]
) -> TokenizerConfig:
    """The settings of the tokenizer to train: the default's if the kind is the same, changed by those given."""
    if isinstance(given, TokenizerConfig):
        base = given
    else:
        base = default if given is None or given == default.kind else TokenizerConfig(kind=given)
    values = {**base.model_dump(exclude_unset=True), "kind": base.kind, **settings}
    return check_settings(TokenizerConfig, values, f"--tokenizer {base.kind}")


def _train_tokenizer(text: TextSource, config: TokenizerConfig, num_workers: int, progress: Progress) -> Tokenizer:
    from transformer_xl.text.tokenizers.training import train_tokenizer

    used = text.tokenizer_splits if config.kind == text.tokenizer.kind else ("train",)
    documents = [document for split in used for document in text.splits.get(split, ())]
    reported = _report_reading({"train": documents}, "train tokenizer", progress)["train"]
    return train_tokenizer(config, reported, num_workers=num_workers)


def _report_reading(
    splits: Mapping[SplitName, Sequence[Document]], stage: str, progress: Progress
) -> dict[SplitName, list[Document]]:
    """The documents, to be read once, reporting progress over all of them."""
    total = sum(document.num_bytes for documents in splits.values() for document in documents)
    done = 0

    def report(chunks: Iterable[bytes]) -> Iterator[bytes]:
        nonlocal done
        for chunk in chunks:
            yield chunk
            done += len(chunk)
            progress(stage, done, max(total, done))

    return {
        split: [replace(document, chunks=report(document.chunks)) for document in documents]
        for split, documents in splits.items()
    }


def _note_unexpected_lengths(corpus: Corpus, text: TextSource) -> list[str]:
    """Notes on splits of a known data set that do not have the published number of tokens."""
    found = {split: corpus.record.splits[split].num_tokens for split in text.expected_num_tokens}
    return [
        f"{split} has {found[split]:,} tokens, but {text.name} is known to have {expected:,}; is it that text?"
        for split, expected in text.expected_num_tokens.items()
        if found[split] != expected
    ]


_WORD_WITH_PUNCTUATION = re.compile(r"\w+[,;:!?]")
_WORDS_EXAMINED, _MAX_ATTACHED = 2000, 0.03


def _note_attached_punctuation(tokenizer: Tokenizer, config: TokenizerConfig) -> list[str]:
    """A note if many frequent words end in punctuation, which split_punctuation would split off."""
    if tokenizer.kind != "word" or "split_punctuation" in config.model_fields_set:
        return []
    examined = min(_WORDS_EXAMINED, tokenizer.vocab_size)
    words = [tokenizer.decode([index]).strip() for index in range(examined)]
    attached = [word for word in words if _WORD_WITH_PUNCTUATION.fullmatch(word)]
    if len(attached) < _MAX_ATTACHED * examined:
        return []
    return [
        f"{len(attached):,} of the {examined:,} most frequent words end in punctuation ({', '.join(attached[:3])}); "
        "with --split-punctuation it is split off, and fewer words are unknown"
    ]
