"""Prepares a corpus for training (the command `txl prepare`).

Finds the text, trains or loads the tokenizer, and writes the tokens.
"""

from __future__ import annotations

import codecs
import inspect
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from typing_extensions import Unpack

from transformer_xl.config import UserError, check_settings, check_type, nearest
from transformer_xl.files import as_user_error, atomic_folder, check_is_new, json_digest
from transformer_xl.text.corpus_writer import UNFINISHED, Unfinished, fill_corpus, is_unfinished
from transformer_xl.text.documents import SPLITS, Document, SplitName, TextSource
from transformer_xl.text.sources.archives import CHUNK_BYTES, Progress, no_progress, standard_input
from transformer_xl.text.sources.file_codec import FileCodec, find_codec
from transformer_xl.text.sources.named_datasets import DATASET_NAMES, DOWNLOADABLE, PYTHON_STDLIB, python_stdlib
from transformer_xl.text.sources.rows import RowFile, RowSource, rows_in_memory
from transformer_xl.text.sources.splitting import TextRange
from transformer_xl.text.sources.text_files import (
    STANDARD_INPUT,
    BytesRange,
    FileSelection,
    common_folder,
    describe_paths,
    first_few,
    name_of_paths,
    note_repeated_files,
    saved_splits,
    source_of_rows,
    source_of_splits,
    split_named,
    split_text,
    texts_of_paths,
)
from transformer_xl.text.text_config import TextConfig
from transformer_xl.text.token_store import Corpus
from transformer_xl.text.tokenizers import Tokenizer, fingerprint, load_tokenizer, to_bytes
from transformer_xl.text.tokenizers.integer import IntegerTokenizer
from transformer_xl.text.tokenizers.tokenizer_config import TOKENIZER_KINDS, TokenizerConfig, TokenizerKind

if TYPE_CHECKING:
    from transformer_xl.config.typed_settings import PrepareSettings

StrPath = str | os.PathLike[str]
Texts = Iterable[str | bytes] | Iterable[Mapping[str, Any]] | Any
"""Documents in memory, each a whole text: texts, rows (mappings), a DataFrame, or a data set of `datasets`."""

_PARENT_FOLDER = Path("corpora")  # contains the output folder, unless the user names one
_STANDARD_INPUT = frozenset({"-", "/dev/stdin"})
_TEXT_SETTINGS = TextConfig.model_fields
_TOKENIZER_SETTINGS = TokenizerConfig.model_fields.keys() - {"kind", "eos_token", "unk_token", "byte_fallback"}


def prepare(
    source: StrPath | Sequence[StrPath] | None = None,
    out: StrPath | None = None,
    *,
    documents: Texts | Mapping[SplitName, Texts] | None = None,
    train: StrPath | Sequence[StrPath] | None = None,
    valid: StrPath | Sequence[StrPath] | None = None,
    test: StrPath | Sequence[StrPath] | None = None,
    tokenizer: StrPath | Tokenizer | TokenizerConfig | None = None,
    data_dir: StrPath | None = None,
    num_workers: int = 1,
    progress: Progress = no_progress,
    **settings: Unpack[PrepareSettings],
) -> Corpus:
    """Turn text into a corpus: token ids on disk that a model can be trained on.

        prepare("enwik8")
        prepare("novels/**/*.txt", "corpora/novels", tokenizer="bpe", vocab_size=4096)
        prepare(out="corpora/notes", documents={"train": notes, "valid": more_notes})

    The text is one of: `source`, `documents`, or files for each split (`train`, `valid`, `test`).

    Args:
        source: the name of a data set (enwik8, text8, wikitext-103, wikitext-2, ptb, lm1b, python-stdlib); or paths of
            files and folders, and glob patterns, whose text is split into train, valid and test; `-` is standard input.
            Files with a document in each row, compressed files and archives are recognized by their content.
        out: the folder to create, which must not exist, or None for corpora/NAME. If a process that was killed has
            begun it from the same files with the same settings, it is continued.
        documents: texts in memory, to be split; or a mapping from each split to its texts. Instead of texts, a
            DataFrame, a data set of `datasets` or mappings, whose column `text_column` has the texts.
        train: files, folders and glob patterns of the train split.
        valid: the same for the valid split.
        test: the same for the test split.
        tokenizer: byte, char, word, bpe or integer; midi, which makes a corpus of integers from MIDI files (extra
            `music`); the settings of a tokenizer to train; a trained tokenizer; or its path (as in `load_tokenizer`).
            None means the data set's default; for other text, integer if the files are .npy, else byte.
        data_dir: file or folder with the files of the named data set, or None to download them.
        num_workers: number of processes that train the tokenizer and encode. With more than 1, a script must call
            `prepare` under `if __name__ == "__main__":`, since the processes import the script.
        progress: called with the name of a stage (`train tokenizer`, `write`, `download ...`), the number of bytes
            processed, and the total (0 if unknown).
        settings: of `TextConfig` (which files are read and how they are split, such as `valid_fraction`) and of
            `TokenizerConfig` (how a tokenizer is trained, such as `vocab_size`), by name; None is as if left out. The
            default is that of the named data set, else that of these classes.

    Returns:
        The corpus. Its `notes` warn about likely mistakes, such as a file in two splits.

    Raises:
        UserError: the text is missing, unreadable, empty, cannot be downloaded or cannot be encoded; settings
            contradict each other; or the folder exists or cannot be written. No partial corpus is left behind, but
            what took longer than some seconds stays in a hidden folder beside `out` until the same call ends.
    """
    check_type(out, (str, os.PathLike, type(None)), "out", "give the path of a new folder")
    known = (str, os.PathLike, Tokenizer, TokenizerConfig, type(None))
    check_type(tokenizer, known, "tokenizer", "give a kind such as 'word', a path, a Tokenizer or a TokenizerConfig")
    if not callable(progress):
        raise UserError(f"progress is of type {type(progress).__name__}; give a function")
    check_type(num_workers, int, "num_workers", "give an integer")
    if out is not None and not os.fspath(out):
        raise UserError("out: the path is empty; name a folder to create, or leave it out for corpora/NAME")
    if num_workers < 1:
        raise UserError(f"num_workers={num_workers}: must be 1 or more")
    given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    if unknown := next((name for name in given if name not in {*_TEXT_SETTINGS, *_TOKENIZER_SETTINGS}), None):
        names = [*_TEXT_SETTINGS, *_TOKENIZER_SETTINGS, *inspect.signature(prepare).parameters]
        raise UserError(f"prepare has no argument '{unknown}'{nearest(unknown, names)}")
    if "vocab_file" in given:
        given["vocab_file"] = os.fspath(given["vocab_file"])
    text_config = check_settings(TextConfig, {name: given[name] for name in given if name in _TEXT_SETTINGS})
    tokenizer_settings = {name: given[name] for name in given if name in _TOKENIZER_SETTINGS}
    paths = _paths(source)
    sources = {
        "source": paths,
        **{split: _paths(files) for split, files in (("train", train), ("valid", valid), ("test", test))},
    }
    if not _STANDARD_INPUT.isdisjoint(path for of_split in sources.values() for path in of_split):
        with TemporaryDirectory(prefix="txl-") as kept:  # it is read more than once
            file = Path(kept, STANDARD_INPUT)
            with as_user_error(f"writing {file}"), file.open("wb") as stream:
                shutil.copyfileobj(standard_input().buffer, stream, 2**20)
            replaced: dict[str, Any] = {
                name: [str(file) if path in _STANDARD_INPUT else path for path in of_split]
                for name, of_split in sources.items()
            }
            others: dict[str, Any] = {"documents": documents, "tokenizer": tokenizer, "data_dir": data_dir, **settings}
            try:
                corpus = prepare(out=out, **replaced, **others, num_workers=num_workers, progress=progress)
            except UserError as error:
                raise UserError(str(error).replace(str(file), "standard input")) from None
            return replace(corpus, notes=tuple(text.replace(str(file), "standard input") for text in corpus.notes))
    dataset = _dataset(paths)
    codec = find_codec(tokenizer) if isinstance(tokenizer, str) else None
    given_tokenizer = _resolve_tokenizer(codec.tokenizer if codec else tokenizer, tokenizer_settings)
    if codec is None and isinstance(given_tokenizer, IntegerTokenizer) and given_tokenizer.midi:
        codec = find_codec("midi", given_tokenizer)
    # Check the output folder and the settings before anything is downloaded or read.
    folder = Path(out) if out is not None else _PARENT_FOLDER / dataset if dataset else None
    if folder:
        check_is_new(folder)
    if not isinstance(given_tokenizer, Tokenizer) and (given_tokenizer or dataset):
        default = DOWNLOADABLE[dataset].tokenizer if dataset in DOWNLOADABLE else TokenizerConfig()
        _tokenizer_config(given_tokenizer, default, tokenizer_settings)
    text = find_text(
        paths,
        documents=documents,
        splits=cast("dict[SplitName, list[str]]", {split: sources[split] for split in SPLITS}),
        config=text_config,
        codec=codec,
        kind=given_tokenizer.kind if isinstance(given_tokenizer, Tokenizer | TokenizerConfig) else given_tokenizer,
        data_dir=None if data_dir is None else Path(data_dir),
        progress=progress,
    )
    if folder is None:
        folder = _PARENT_FOLDER / text.name
        check_is_new(folder)
    document_unit = text_config.document_unit or text.document_unit
    tokenizer_config, ready = None, given_tokenizer
    if not isinstance(given_tokenizer, Tokenizer):
        tokenizer_config = _tokenizer_config(given_tokenizer, text.tokenizer, tokenizer_settings)
        if tokenizer_config.vocab_file is not None:  # nothing is trained, and a corpus goes on only with these words
            tokenizer_config, ready = None, _train_tokenizer(text, tokenizer_config, num_workers, progress)
    what = tokenizer_config.model_dump() if tokenizer_config else fingerprint(cast(Tokenizer, ready))
    key = None if documents is not None else _key(text, text_config, what, document_unit)
    notes = [*text.notes]

    def goes_on(found: Path) -> bool:
        is_same = is_unfinished(found, str(key))
        if not is_same and (found / UNFINISHED).exists():
            notes.append("began anew: an earlier process had begun with another text or other settings")
        return is_same

    with atomic_folder(folder, goes_on=None if key is None else goes_on) as temporary:
        unfinished = Unfinished(temporary, key)
        if unfinished.found:
            notes.append("went on with what an earlier process had begun")
        rows, description = None, text.description
        if isinstance(text, RowSource):
            measures = unfinished.values.get("measures", {})
            if not measures.get("whole"):

                def save(values: Callable[[], dict[str, Any]]) -> None:
                    unfinished.save(lambda: {"measures": values()})

                measures = text.rows.measure(measures, workers=num_workers, progress=progress, save=save)
                unfinished.values["measures"] = measures
            rows, how, unequal = text.rows.measured(measures)
            notes += [unequal] * bool(unequal)
            description = f"{description}; {how}" if how else description
            if left_out := measures["left_out"]:
                notes.append(f"left out files of archives: {first_few(left_out)}")
            text = replace(text, rows=rows)
        if tokenizer_config is None:
            encoder = cast(Tokenizer, ready)
        elif "tokenizer" in unfinished.values:
            encoder = load_tokenizer(temporary / "txl_tokenizer.json")
        else:
            unfinished.save(dict)  # the measures
            encoder = _train_tokenizer(text, tokenizer_config, num_workers, progress)
            unfinished.values["tokenizer"] = fingerprint(encoder)
        fill_corpus(
            unfinished,
            rows or _with_progress(text.splits, "write", progress),
            name=text.name if documents is None else folder.name,
            source=description,
            tokenizer=encoder,
            document_unit=document_unit,
            num_workers=num_workers,
            progress=progress,
        )
    corpus = Corpus.open(folder)
    if given_tokenizer is None and not tokenizer_settings and text_config.document_unit is None:
        notes += _note_unexpected_lengths(corpus, text)
    return replace(corpus, notes=tuple(notes))


def _key(text: TextSource, config: TextConfig, tokenizer: object, document_unit: str) -> str:
    """Return what identifies a corpus: another one for other settings, or files that were changed."""
    if isinstance(text, RowSource):
        parts = [(str(file.path), file.kind, file.split, file.path) for file in text.rows.files]
    else:
        documents = [(split, document) for split, of_split in text.splits.items() for document in of_split]
        parts = [(one.name, one.num_bytes, split, getattr(one.chunks, "path", None)) for split, one in documents]
    files = list[object]()
    for *what, path in parts:
        status = path.stat() if path is not None and path.exists() else None
        files.append([*what, status and [status.st_size, status.st_mtime_ns]])
    settings = {
        "config": config.model_dump(mode="json"),
        "tokenizer": tokenizer,
        "unit": document_unit,
        "chunk": CHUNK_BYTES,
    }
    return json_digest({**settings, "name": text.name, "source": text.description, "files": files})


def find_text(
    paths: Sequence[str] = (),
    *,
    documents: Texts | Mapping[SplitName, Texts] | None = None,
    splits: Mapping[SplitName, Sequence[str]] | None = None,
    config: TextConfig | None = None,
    codec: FileCodec | None = None,
    kind: str | None = None,
    data_dir: Path | None = None,
    progress: Progress = no_progress,
) -> TextSource:
    """Find the text that the arguments of `prepare` specify, and download it if it is a named data set.

    Args:
        paths: one of `DATASET_NAMES`, or files, folders and glob patterns.
        documents: texts in memory.
        splits: files, folders and glob patterns of each split.
        config: which files of folders and patterns are read, and how their text is split.
        codec: reads the files, or None if they are text.
        kind: the kind of tokenizer that will encode the text, or None for the default tokenizer.
        data_dir: file or folder with the files of a named data set.
        progress: called while files are downloaded, extracted and checked.

    Raises:
        UserError: something is missing, unreadable, empty, unknown or contradictory.
    """
    config = config or TextConfig()
    split_paths = {split: files for split, files in (splits or {}).items() if files}
    dataset = _dataset(paths)
    ways = [bool(paths), bool(split_paths), documents is not None]
    if sum(ways) != 1 or (split_paths and "train" not in split_paths) or (dataset and len(paths) > 1):
        raise UserError(
            f"give the text in one way: files and folders to split, a data set ({', '.join(DATASET_NAMES)}; a file of "
            "that name is ./NAME), train=FILE with valid and test, or documents in memory"
        )
    _refuse_unused(config, dataset, documents, split_paths, codec, data_dir)
    if dataset == PYTHON_STDLIB:
        return python_stdlib()
    if dataset:
        return DOWNLOADABLE[dataset].open(data_dir, progress, kind=kind)
    if documents is not None:
        return _in_memory(documents, config, kind)
    selection = FileSelection(config, codec)
    saved, notes = saved_splits(paths)
    if split_paths := split_paths or saved:
        found = {
            split: texts_of_paths(files, f"{split}: ", selection, progress) for split, files in split_paths.items()
        }
        name = name_of_paths(paths or split_paths["train"])
        description = "; ".join(f"{split}: {describe_paths(files)}" for split, files in split_paths.items())
    else:
        found = {None: texts_of_paths(paths, "", selection, progress)}
        name, description = name_of_paths(paths), describe_paths(paths)
    files = {split: texts for split, (texts, _) in found.items()}
    notes = (*notes, *(note for _, of_split in found.values() for note in of_split))
    repeated = note_repeated_files({split or "the text": texts for split, texts in files.items()})
    if selection.like_tables:
        notes = (*notes, f"read as text, but like CSV: {first_few(selection.like_tables)}; input_format=csv reads rows")
    if selection.unused:
        repeated = (*repeated, f"no file of the folders and patterns matches {', '.join(selection.unused)}")
    if any(isinstance(file, RowFile) for texts in files.values() for file in texts):
        return source_of_rows(files, config, name=name, description=description, kind=kind, notes=(*notes, *repeated))
    if config.text_column is not None:
        raise UserError(f"text_column={config.text_column}: none of the files has rows; leave it out")
    texts = cast("dict[SplitName | None, list[TextRange]]", files)
    if None in texts:
        texts, how = split_text(texts[None], config, root=common_folder(paths), kind=kind)
        description = f"{description}; {how}"
    splits_of_text = cast("dict[SplitName, list[TextRange]]", texts)
    return source_of_splits(splits_of_text, name=name, description=description, kind=kind, notes=(*notes, *repeated))


def _refuse_unused(
    config: TextConfig,
    dataset: str | None,
    documents: object,
    split_paths: object,
    codec: FileCodec | None,
    data_dir: Path | None,
) -> None:
    """Refuse settings that were given and change nothing in this text."""
    text = f"the data set {dataset}" if dataset else "texts in memory" if documents is not None else "these files"
    unused = set[str]()
    if dataset or split_paths or isinstance(documents, Mapping):
        unused |= {"valid_fraction", "test_fraction", "split_method", "seed"}  # the splits are fixed
    if dataset or documents is not None:
        unused |= {"include", "exclude", "encoding", "input_format"}
    if dataset or codec:
        unused |= {"encoding", "input_format", "text_column"}
    given = [f"{name}={getattr(config, name)!r}" for name in sorted(unused & config.model_fields_set)]
    if data_dir and dataset not in DOWNLOADABLE:
        given.append(f"data_dir={data_dir}")
    if given:
        raise UserError(f"{', '.join(given)} cannot be used with {text}; leave it out")


def _dataset(paths: Sequence[str]) -> str | None:
    """Return the first path that is the name of a data set, or None."""
    return next((path for path in paths if path in DATASET_NAMES), None)


def _paths(source: StrPath | Sequence[StrPath] | None) -> list[str]:
    """Return one path, several or none as a list of strings."""
    if source is None:
        return []
    paths = source if isinstance(source, Sequence) and not isinstance(source, str) else [source]
    for path in paths:
        check_type(path, (str, os.PathLike), "the text", "give paths or the name of a data set, or texts as documents=")
    return [os.fspath(path) for path in paths]


def _in_memory(documents: Texts | Mapping[SplitName, Texts], config: TextConfig, kind: str | None) -> TextSource:
    """Return texts, or rows, in memory."""
    given: dict[Any, Any] = {None: documents}
    if isinstance(documents, Mapping):
        given = {}
        for name, texts in documents.items():
            split = split_named(str(name)) or name
            if split in given:
                raise UserError(
                    f"documents has {', '.join(map(str, documents))}, of which two are the {split} split; give one"
                )
            given[split] = texts
    if None not in given and not {"train"} <= set(given) <= set(SPLITS):
        raise UserError(f"documents has {', '.join(map(str, given))}; give train, and valid and test if you have them")
    given = {split: list(texts) if isinstance(texts, Iterator) else texts for split, texts in given.items()}
    rows = {split: rows_in_memory(texts, config) for split, texts in given.items()}
    names: dict[str, Any] = {"name": "documents", "description": "documents in memory", "kind": kind}
    if any(rows.values()):
        texts_config = config.model_copy(update={"text_column": None})
        files = {
            split: [of_split or RowFile(Path("the texts"), texts_config, "text", rows=given[split])]
            for split, of_split in rows.items()
        }
        return source_of_rows(files, config, **names)
    if config.text_column is not None:
        raise UserError(f"text_column={config.text_column}: documents has no columns; leave it out")
    if None in given:
        texts, how = split_text(_texts(given[None], "document"), config, root=Path(), kind=kind)
        return source_of_splits(texts, **names | {"description": f"documents in memory; {how}"})
    return source_of_splits({split: _texts(texts, f"{split} document") for split, texts in given.items()}, **names)


def _texts(texts: Any, name: str) -> list[BytesRange]:
    """Return texts as ranges that messages call NAME 0, NAME 1 and so on."""
    texts = [texts] if isinstance(texts, str | bytes) else texts
    check_type(texts, Iterable, "documents", "give texts, or a mapping from splits to texts")
    return [
        BytesRange(Path(f"{name} {index}"), content=to_bytes(text).removeprefix(codecs.BOM_UTF8))
        for index, text in enumerate(texts)
    ]


def _resolve_tokenizer(
    tokenizer: StrPath | Tokenizer | TokenizerConfig | None, settings: Mapping[str, Any]
) -> Tokenizer | TokenizerConfig | TokenizerKind | None:
    """Load the tokenizer if it is a path; return a tokenizer, its settings or a kind unchanged."""
    if tokenizer is None or isinstance(tokenizer, TokenizerConfig):
        return tokenizer
    if tokenizer in TOKENIZER_KINDS:
        return cast(TokenizerKind, tokenizer)
    if settings:
        label = tokenizer.kind if isinstance(tokenizer, Tokenizer) else tokenizer
        given = ", ".join(f"{name}={value}" for name, value in settings.items())
        raise UserError(
            f"tokenizer={label} is trained already; leave {given} out, or name a kind ({', '.join(TOKENIZER_KINDS)})"
        )
    return tokenizer if isinstance(tokenizer, Tokenizer) else load_tokenizer(os.fspath(tokenizer))


def _tokenizer_config(
    config: TokenizerConfig | TokenizerKind | None, default: TokenizerConfig, settings: Mapping[str, Any]
) -> TokenizerConfig:
    """Return the settings of the tokenizer to train.

    Args:
        config: the settings, or only the kind, or None for `default`.
        default: the settings of the text's default tokenizer, used if `config` is its kind or None.
        settings: single settings that override the others.
    """
    if isinstance(config, TokenizerConfig):
        base = config
    else:
        base = default if config is None or config == default.kind else TokenizerConfig(kind=config)
    values = {**base.model_dump(exclude_unset=True), "kind": base.kind, **settings}
    return check_settings(TokenizerConfig, values)


def _train_tokenizer(text: TextSource, config: TokenizerConfig, num_workers: int, progress: Progress) -> Tokenizer:
    from transformer_xl.text.tokenizers.training import train_tokenizer

    splits = text.tokenizer_splits if config.kind == text.tokenizer.kind else ("train",)
    if isinstance(text, RowSource):
        documents = text.rows.documents(splits)
    else:
        of_splits = [document for split in splits for document in text.splits.get(split, ())]
        documents = _with_progress({"train": of_splits}, "train tokenizer", progress)["train"]
    return train_tokenizer(config, documents, num_workers=num_workers, progress=progress)


def _with_progress(
    splits: Mapping[SplitName, Sequence[Document]], stage: str, progress: Progress
) -> dict[SplitName, list[Document]]:
    """Return the documents with chunks that report the progress over all splits; the chunks can be read only once."""
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
    """Return a warning for each split of a named data set that does not have the published number of tokens."""
    return [
        f"{split} has {actual:,} tokens, but {text.name} should have {expected:,}; is this the right text?"
        for split, expected in text.expected_num_tokens.items()
        if (actual := corpus.record.splits[split].num_tokens) != expected
    ]
