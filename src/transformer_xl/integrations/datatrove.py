"""Steps of datatrove's pipelines: `CorpusTokenizer` writes a corpus, `DocumentScorer` adds losses to documents.

datatrove runs a pipeline as many tasks, on one machine, with Slurm or with Ray; each task (rank) reads its part of the
documents. Only paths and settings are sent to the tasks, so all machines need the same file system. The step that
classifies documents is `transformer_xl.apps.classify.datatrove.DocumentClassifier`.
"""

from __future__ import annotations

import codecs
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import Unpack, override

from transformer_xl.config import EvaluationConfig, UserError, check_settings
from transformer_xl.config.extras import missing_extra
from transformer_xl.files import as_path
from transformer_xl.text.corpus_writer import write_corpus
from transformer_xl.text.documents import Document as TextDocument
from transformer_xl.text.documents import DocumentUnit, SplitName
from transformer_xl.text.ranks import new_rank
from transformer_xl.text.sources.splitting import hash_fraction
from transformer_xl.text.text_config import TextConfig
from transformer_xl.text.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer, to_bytes

try:
    from datatrove.data import Document
    from datatrove.pipeline.base import PipelineStep
except ImportError as error:
    raise missing_extra("datatrove", "datatrove") from error

if TYPE_CHECKING:
    from datatrove.data import DocumentsPipeline
    from datatrove.pipeline.writers.disk_base import DiskWriter

    from transformer_xl.config.typed_settings import EvaluationSettings

_SPLITS: dict[str, SplitName] = {"train": "train", "valid": "valid", "validation": "valid", "test": "test"}


class CorpusTokenizer(PipelineStep):
    """The last step of a pipeline that makes a corpus: each task writes the tokens of its documents to a folder.

    When all tasks are complete, `txl join` (or `join_ranks`) makes the corpus of their folders. A task that is run
    again, because it was killed, replaces its folder.
    """

    name = "Corpus of transformer_xl"
    type = "TOKENIZER"

    def __init__(
        self,
        folder: str | Path,
        tokenizer: str | Path,
        *,
        split_key: str | None = None,
        valid_fraction: float | None = None,
        test_fraction: float | None = None,
        seed: int | None = None,
        document_unit: DocumentUnit = "file",
    ) -> None:
        """Check the settings and the tokenizer.

        Args:
            folder: the folder of all ranks, on a file system that all tasks can write to.
            tokenizer: byte, or a trained one: the folder of a corpus or run, its txl_tokenizer.json, or a
                tokenizer.json or .model of another library.
            split_key: the metadata of each document that is its split: train, valid (or validation) or test. None:
                splits are drawn.
            valid_fraction: fraction of the documents that become valid, drawn by a hash of their ids, so the same in
                each task; by default 0.05, as for `prepare`.
            test_fraction: the same for test.
            seed: another seed draws other documents; by default 1.
            document_unit: what becomes a document of the corpus: each document (file), or each line (line).

        Raises:
            UserError: there is no such tokenizer, or a setting is out of range or has no effect.
        """
        super().__init__()
        given = {"valid_fraction": valid_fraction, "test_fraction": test_fraction, "seed": seed}
        given = {name: value for name, value in given.items() if value is not None}
        if split_key is not None and given:
            raise UserError(f"{', '.join(given)} cannot be used with split_key, which says the splits; leave one out")
        config = check_settings(TextConfig, {**given, "document_unit": document_unit})
        # absolute, since tasks may run in other folders
        self.folder = as_path(folder, "folder").absolute()
        self.tokenizer = "byte" if tokenizer == "byte" else str(as_path(tokenizer, "tokenizer").absolute())
        self._load_tokenizer()
        self.split_key, self.document_unit, self.seed = split_key, document_unit, str(config.seed)
        self.ends: dict[SplitName, float] = {"valid": config.valid_fraction}
        self.ends |= {"test": config.valid_fraction + config.test_fraction, "train": 1.0}
        fractions = f"valid {config.valid_fraction:g} and test {config.test_fraction:g} of them"
        how = f"{fractions}, drawn by a hash of their ids with seed {config.seed}"
        how = how if split_key is None else f"split by their {split_key}"
        lines = "; each line is a document" if document_unit == "line" else ""
        self.source = f"documents of a datatrove pipeline; {how}{lines}"

    def _load_tokenizer(self) -> Tokenizer:
        return ByteTokenizer() if self.tokenizer == "byte" else load_tokenizer(self.tokenizer)

    def _split_of(self, document: Document) -> SplitName:
        if self.split_key is None:
            fraction = hash_fraction(self.seed, document.id)
            return next(split for split, end in self.ends.items() if fraction < end)
        given = document.metadata.get(self.split_key)
        if given not in _SPLITS:
            problem = f"{document.id}: its {self.split_key} is {given!r}, must be train, valid or test"
            raise UserError(f"{problem}; set it, such as by the reader's default_metadata")
        return _SPLITS[given]

    @override
    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> None:
        """Write the documents of a task; arguments are those of `PipelineStep`.

        Raises:
            UserError: the folder cannot be written, or a document cannot be encoded; the message has its id.
        """

        def documents() -> Iterator[tuple[SplitName, TextDocument]]:
            for document in data or ():
                self.stat_update("documents")
                content = content_of(document).removeprefix(codecs.BOM_UTF8)
                yield self._split_of(document), TextDocument(document.id, [content])

        path, tokenizer = new_rank(self.folder, rank, world_size), self._load_tokenizer()
        options = {"name": path.name, "source": self.source, "document_unit": self.document_unit}
        corpus = write_corpus(path, documents(), tokenizer=tokenizer, **options)
        for split, record in corpus.record.splits.items():
            self.stat_update(f"tokens_{split}", value=record.num_tokens, unit="task")


class DocumentStep(PipelineStep):
    """A step that adds to the metadata of documents what a model says of them, several documents at a time."""

    type = "ANNOTATOR"

    def __init__(
        self,
        model: str | Path,
        *,
        device: str = "auto",
        documents_per_batch: int = 64,
        prefix: str = "txl",
        **settings: Unpack[EvaluationSettings],
    ) -> None:
        """Check the settings; each task loads the model.

        Args:
            model: folder of a run or, to classify, of a classifier.
            device: auto, cuda, mps or cpu.
            documents_per_batch: number of documents that are read together; changes no result but its last digits.
            prefix: beginning of the names in the metadata; of two models in a pipeline, one needs another.
            settings: settings of evaluation, such as memory_length.

        Raises:
            UserError: it is not the folder of a run, or a setting is unknown or out of range.
        """
        from transformer_xl.run_folder import RunFolder

        super().__init__()
        if documents_per_batch < 1:
            raise UserError(f"documents_per_batch={documents_per_batch}: must be 1 or more")
        self.config = check_settings(EvaluationConfig, settings)
        self.model, self.device = str(RunFolder.open(model).path.absolute()), device
        self.documents_per_batch, self.prefix = documents_per_batch, prefix

    @abstractmethod
    def open(self, rank: int) -> Callable[[dict[str, bytes]], Iterable[dict[str, Any]]]:
        """Load the model for a task, and return the function from texts by their ids to what is said of each."""

    @override
    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents of a task with more metadata; arguments are those of `PipelineStep`.

        Raises:
            UserError: a document is empty or cannot be encoded; the message has its id.
        """
        read = self.open(rank)
        batch: dict[str, Document] = {}
        for document in chain(data or (), [None]):
            if batch and (document is None or len(batch) == self.documents_per_batch or document.id in batch):
                with self.track_time("batch"):
                    texts = {name: content_of(one) for name, one in batch.items()}
                    for one, values in zip(batch.values(), read(texts), strict=True):
                        one.metadata |= {f"{self.prefix}_{name}": value for name, value in values.items()}
                yield from batch.values()
                batch = {}
            if document is not None:
                batch[document.id] = document


class DocumentScorer(DocumentStep):
    """Adds the loss of each document, read by itself with memory, to its metadata; no document is dropped.

    With the prefix txl, the metadata are `txl_nats`, `txl_tokens`, `txl_token_perplexity` and `txl_bits_per_byte`,
    which filters of datatrove can use.
    """

    name = "Losses of a transformer_xl model"

    def __init__(
        self,
        model: str | Path,
        *,
        checkpoint: Literal["best", "last"] = "best",
        token_writer: DiskWriter | None = None,
        **options: Any,
    ) -> None:
        """Check the settings; each task loads the model.

        Args:
            model: folder of a run.
            checkpoint: the weights with the lowest validation loss (best), or those of the newest checkpoint (last).
            token_writer: a writer of datatrove, such as JsonlWriter, for the tokens of each document and their losses:
                it gets a document of the same id with the metadata `ids` and `nats`, in the order of the text.
            options: the other arguments of `DocumentStep`.

        Raises:
            UserError: as for `DocumentStep`.
        """
        super().__init__(model, **options)
        self.checkpoint, self.token_writer = checkpoint, token_writer

    @override
    def open(self, rank: int) -> Callable[[dict[str, bytes]], Iterable[dict[str, Any]]]:
        from transformer_xl.evaluation.score import score  # torch, which CorpusTokenizer does not need
        from transformer_xl.run import load

        run = load(self.model, device=self.device, checkpoint=self.checkpoint)

        def read(texts: dict[str, bytes]) -> Iterator[dict[str, Any]]:
            for one in score(run, texts, self.config):
                if self.token_writer is not None:
                    by_token = {"ids": one.ids_K.tolist(), "nats": one.nats_K.tolist()}
                    self.token_writer.write(Document(texts[one.name].decode(), one.name, metadata=by_token), rank)
                names = ("nats", "tokens", "token_perplexity", "bits_per_byte")
                yield {name: getattr(one.sums, name) for name in names}

        return read

    @override
    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        with self.token_writer or nullcontext():
            yield from super().run(data, rank, world_size)


def content_of(document: Document) -> bytes:
    """Return the text of a document as UTF-8.

    Raises:
        UserError: it cannot be encoded; the message has the id of the document.
    """
    try:
        return to_bytes(document.text)
    except UserError as error:
        raise UserError(f"{document.id}: {error}") from None
