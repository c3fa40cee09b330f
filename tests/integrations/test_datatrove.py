"""Steps of datatrove: many tasks give the corpus, the losses and the labels that one process gives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from labelled import OPTIONS, TRAIN, documents
from library_tokenizers import byte_level
from refusals import txl
from small_runs import make_run

from transformer_xl import (
    UserError,
    classify,
    finetune_classifier,
    join_ranks,
    load,
    load_classifier,
    prepare,
    score,
)
from transformer_xl.text.documents import Document as TextDocument
from transformer_xl.text.sources.splitting import hash_fraction
from transformer_xl.text.token_store import Corpus
from transformer_xl.text.tokenizers.bpe import BPETokenizer
from transformer_xl.text.tokenizers.storage import save_tokenizer
from transformer_xl.text.tokenizers.tokenizer_config import TokenizerConfig
from transformer_xl.text.tokenizers.training import train_tokenizer

pytest.importorskip("datatrove")

from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.filters import LambdaFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter

from transformer_xl.apps.classify.datatrove import DocumentClassifier
from transformer_xl.integrations.datatrove import CorpusTokenizer, DocumentScorer

PROGRAM = Path(__file__).with_name("trove_pipeline.py")
NUM_FILES, NUM_RANKS = 7, 4
FEW_STEPS = {**TRAIN, "max_steps": 2, "warmup_steps": 1, "eval_interval": 2}


def write_text(folder: Path, first: str = "") -> list[dict[str, Any]]:
    """Write files of JSON lines, and return their rows in the order of the ranks that read them."""
    folder.mkdir()
    files: list[list[dict[str, Any]]] = []
    texts, _ = documents(91, longest=90)
    texts[0] = first + texts[0]
    for number in range(NUM_FILES):
        rows = [
            {"text": f"{text}\n", "id": f"{number}-{index}", "split": ("train", "validation", "test")[index % 7 // 3]}
            for index, text in enumerate(texts[number::NUM_FILES])
        ]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files.append(rows)
    return [row for rank in range(NUM_RANKS) for rows in files[rank::NUM_RANKS] for row in rows]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "corpus.json"}


def test_a_killed_pipeline_of_four_ranks_gives_the_corpus_of_one_process(tmp_path: Path) -> None:
    rows = write_text(tmp_path / "text", first="\ufeff")  # a byte order mark is no text
    tokenizer = BPETokenizer.of_library(byte_level())
    (tmp_path / "tokenizer").mkdir()
    save_tokenizer(tokenizer, tmp_path / "tokenizer" / "txl_tokenizer.json")
    (tmp_path / "hold").touch()
    command = [sys.executable, str(PROGRAM), str(tmp_path)]
    options: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    killed = subprocess.Popen(command, **options, start_new_session=True)
    completed = tmp_path / "logs" / "completions"
    until = time.monotonic() + 120
    while not ((tmp_path / "held").exists() and completed.exists() and len(list(completed.iterdir())) == 3):
        assert killed.poll() is None, killed.communicate()[1].decode()
        assert time.monotonic() < until
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    ranks = tmp_path / "ranks"
    assert sorted(path.name[:5] for path in ranks.glob("0*")) == ["00000", "00001", "00003"]
    with pytest.raises(UserError, match=r"1 of 4 ranks are missing in .*: 2; run the pipeline again"):
        join_ranks(ranks, tmp_path / "joined")
    before = {path: path.stat().st_mtime_ns for path in ranks.glob("0*/*")}
    (tmp_path / "hold").unlink()
    subprocess.run(command, check=True, **options)
    assert {path: path.stat().st_mtime_ns for path in before} == before  # complete tasks are not run again
    joined = join_ranks(ranks, tmp_path / "joined")
    joined.verify()

    names = {"train": "train", "valid": "validation", "test": "test"}
    texts = {split: [row["text"] for row in rows if row["split"] == name] for split, name in names.items()}
    whole = prepare(out=tmp_path / "whole", documents=texts, tokenizer=tokenizer)  # pyrefly: ignore
    assert files_of(joined.path) == files_of(whole.path)
    assert joined.record.splits == whole.record.splits
    assert joined.source == "documents of a datatrove pipeline; split by their split"


def test_tasks_give_the_losses_and_labels_of_one_process(tmp_path: Path) -> None:
    rows = write_text(tmp_path / "text")
    run = make_run(tmp_path / "run", noise=0.3)
    finetune_classifier(run.path, *documents(40), tmp_path / "topics", train=FEW_STEPS, **OPTIONS)  # pyrefly: ignore
    settings: dict[str, Any] = {"device": "cpu", "memory_length": 13, "documents_per_batch": 8}
    pipeline = [
        JsonlReader(str(tmp_path / "text")),
        DocumentScorer(tmp_path / "run", token_writer=JsonlWriter(str(tmp_path / "tokens")), **settings),
        DocumentClassifier(tmp_path / "topics", **settings),
        JsonlWriter(str(tmp_path / "out"), compression=None),
        LambdaFilter(lambda document: document.metadata["txl_tokens"] > 40),
        CorpusTokenizer(tmp_path / "ranks", tmp_path / "run"),
    ]
    LocalPipelineExecutor(pipeline, tasks=NUM_RANKS, workers=2, logging_dir=str(tmp_path / "logs")).run()

    texts = {row["id"]: row["text"] for row in rows}
    loaded = load(tmp_path / "run", device="cpu")
    expected = {one.name: one for one in score(loaded, texts, memory_length=13)}
    classifier = load_classifier(tmp_path / "topics", device="cpu")
    labelled = classify(classifier, texts, memory_length=13)
    probabilities = dict(zip(texts, labelled.probabilities_NC, strict=True))
    found = [
        json.loads(line) for file in sorted((tmp_path / "out").iterdir()) for line in file.read_text().splitlines()
    ]
    assert [row["id"] for row in found] == list(texts)
    for row in found:
        values, one = row["metadata"], expected[row["id"]]
        assert values["txl_tokens"] == len(one.ids_K)
        assert values["txl_nats"] == pytest.approx(one.nats_K.sum(), rel=1e-6)
        assert values["txl_bits_per_byte"] == pytest.approx(one.sums.bits_per_byte, rel=1e-6)
        assert values["txl_token_perplexity"] == pytest.approx(one.sums.token_perplexity, rel=1e-6)
        assert list(values["txl_probabilities"]) == ["x", "y", "z"]
        assert [*values["txl_probabilities"].values()] == pytest.approx(probabilities[row["id"]], abs=1e-6)
        assert values["txl_label"] == "xyz"[probabilities[row["id"]].argmax()]
    reader = JsonlReader(str(tmp_path / "tokens"))
    by_token = {document.id: document.metadata for document in reader.run()}
    assert by_token.keys() == texts.keys()
    for name, values in by_token.items():
        assert values["ids"] == expected[name].ids_K.tolist()
        # within rounding, as batches differ: losses are up to 8, of which 1e-6 is two units in the last place
        np.testing.assert_allclose(values["nats"], expected[name].nats_K, rtol=1e-6, atol=1e-6)
    # what the filter kept, in the splits that the ids decide
    kept = [name for name, text in texts.items() if len(text) > 40]
    assert 5 < len(kept) < len(texts) - 5
    corpus = join_ranks(tmp_path / "ranks", tmp_path / "corpus")
    drawn = {name: hash_fraction("1", name) for name in kept}
    train = "".join(texts[name] for name in kept if drawn[name] >= 0.1)
    valid = "".join(texts[name] for name in kept if drawn[name] < 0.05)
    assert corpus.split("train").tokens[:].tobytes().decode() == train
    assert valid == "" or corpus.split("valid").tokens[:].tobytes().decode() == valid


def one_task(*steps: Any) -> list[Document]:
    """Run steps on one another's documents, as a task does."""
    data: Any = None
    for step in steps:
        data = step if isinstance(step, list) else step(data, 0, 1)
    return list(data or ())


def test_what_no_step_can_use_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    ranks = tmp_path / "ranks"
    with pytest.raises(UserError, match=r"no tokenizer at .*bits; give one of the kinds"):
        CorpusTokenizer(ranks, "bits")
    with pytest.raises(UserError, match="seed cannot be used with split_key, which says the splits"):
        CorpusTokenizer(ranks, "byte", split_key="split", seed=2)
    with pytest.raises(UserError, match=r"valid_fraction=0.5 and test_fraction=0.5 leave nothing to train on"):
        CorpusTokenizer(ranks, "byte", valid_fraction=0.5, test_fraction=0.5)
    with pytest.raises(UserError, match=r"^b/1: its split is None, must be train, valid or test; set it"):
        one_task([Document("ab", "b/1")], CorpusTokenizer(ranks, "byte", split_key="split"))
    save_tokenizer(
        train_tokenizer(TokenizerConfig(kind="char", byte_fallback=False), [TextDocument("text", [b"aab"])]),
        tmp_path / "txl_tokenizer.json",
    )
    step = CorpusTokenizer(ranks, tmp_path / "txl_tokenizer.json", valid_fraction=0)
    with pytest.raises(UserError, match=r"^b/2: byte 1: .*'c'"):
        one_task([Document("ab", "b/1"), Document("acb", "b/2")], step)
    with pytest.raises(UserError, match=r"^b/3: the text has .* which UTF-8 cannot represent"):
        one_task([Document("a\ud800", "b/3")], step)
    assert not ranks.exists()  # nothing half written
    assert one_task([Document("ab", "b/1")], step) == []
    assert Corpus.open(ranks / "00000-of-00001").record.splits["train"].num_tokens == 2

    with pytest.raises(UserError, match=r"no such folder; expected a folder made by 'txl train"):
        DocumentScorer(tmp_path / "missing")
    with pytest.raises(UserError, match=r"memory_lenth.*memory_length"):
        DocumentScorer(tmp_path / "run", memory_lenth=3)  # pyrefly: ignore
    with pytest.raises(UserError, match="documents_per_batch=0: must be 1 or more"):
        DocumentScorer(tmp_path / "run", documents_per_batch=0)
    with pytest.raises(UserError, match="is not the folder of a classifier"):
        one_task([Document("ab", "b/1")], DocumentClassifier(tmp_path / "run"))
    scorer = DocumentScorer(tmp_path / "run", device="cpu")
    with pytest.raises(UserError, match=r"^b/2: the text is empty"):
        one_task([Document("ab", "b/1"), Document("", "b/2")], scorer)
    # documents of one id stay two
    twice = one_task([Document("ab", "b/1"), Document("abcd", "b/1")], DocumentScorer(tmp_path / "run", device="cpu"))
    assert [document.metadata["txl_tokens"] for document in twice] == [2, 4]
    assert one_task(DocumentScorer(tmp_path / "run", device="cpu")) == []
    assert run.path is not None
    assert txl("join", ranks, "--out", tmp_path / "joined").status == 0
