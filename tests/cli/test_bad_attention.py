"""`txl analyze attention`: what it leaves and says, and what cannot be: one line, exit status 2, nothing on disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import assert_refused, do, error_of, files, no_file_larger_than, txl

from transformer_xl import Corpus, EvaluationPlan, load
from transformer_xl.analysis.attention_maps import AttentionMeans, require_attention_terms, trace_attention
from transformer_xl.analysis.loss_by_distance import loss_by_distance, with_documents
from transformer_xl.evaluation.plan import TokenizedText
from transformer_xl.model.memory import ContextLimits

Capture = pytest.CaptureFixture[str]
SMALL = "--model.n-layers 2 --model.d-model 14 --model.n-heads 2 --model.d-ff 19"
SHORT = (
    "--train.segment-length 7 --train.memory-length 11 --train.batch-size 3 --train.max-steps 2 --train.warmup-steps 0 "
    "--train.dtype float32"
)
QUICK = ["--max-tokens", "61", "--page-tokens", "9"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of bytes and one of words, and a run on each; runs of other systems."""
    place = tmp_path_factory.mktemp("attention") / "w"
    place.mkdir()
    (place / "text.txt").write_bytes(b"".join(b"line %d\n" % number for number in range(199)))
    (place / "words.txt").write_bytes(b"the cat sat on the mat and the cat ran\n" * 99)
    (place / "empty.txt").write_bytes(b"")
    do(f"prepare {place}/text.txt --out {place}/corpus")
    do(f"prepare {place}/words.txt --out {place}/words --tokenizer word")
    do(f"train --corpus {place}/corpus --run {place}/run {SMALL} {SHORT}")
    deep = SMALL.replace("layers 2", "layers 5")
    do(f"train --corpus {place}/words --run {place}/shaw {deep} {SHORT} --model.architecture shaw")
    without = SHORT.replace("--train.memory-length 11 ", "")
    do(f"train --corpus {place}/corpus --run {place}/learned {SMALL} {without} --model.architecture al-rfou")
    do(f"train --corpus {place}/corpus --run {place}/lstm {SHORT} --model.architecture lstm --model.d-model 14")
    return place


def test_what_it_leaves(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = txl("analyze", "attention", place / "run", *QUICK, "--heads", "1:0", "--out", out, "--json")
    assert said.status == 0
    found = said.object
    assert (
        found["tokens"],
        found["memory_length"],
        found["segment_length"],
        found["max_distance"],
        found["page_tokens"],
    ) == (61, 11, 7, 11, 9)
    assert found["counted_tokens"] == 61 - 14  # memory is full from the third segment on
    assert (found["documents"], found["chunk_length"]) == (1, 7)
    written = {name for names in found["files"].values() for name in names}
    assert {path.name for path in out.iterdir()} == written
    assert {"mean-attention.png", "terms-layer-1-head-0.svg", "loss.svg"} <= written
    assert json.loads((out / "figures.json").read_text()) == found
    means = np.load(out / "mean-attention.npy", allow_pickle=False)
    assert means.shape == (2, 2, 12)
    check_numbers(place, found, means)
    assert [(head["layer"], head["head"]) for head in found["heads"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    # nearly no training: attention is nearly even over the 12 to 18 keys in sight
    assert all(4 < head["mean_distance"] < 9 for head in found["heads"])
    assert "line" in (out / "attention.html").read_text(encoding="utf-8")


def check_numbers(place: Path, found: dict[str, Any], means: np.ndarray) -> None:
    """The means and both losses are those of the same text, computed in Python."""
    run, plan = load(place / "run"), EvaluationPlan(7, ContextLimits(11))
    model, tokens_K = require_attention_terms(run.model), Corpus.open(place / "corpus").split("test").first(61)
    computed = AttentionMeans(model, plan, 61)
    trace_attention(model, tokens_K, plan, [computed.add])
    np.testing.assert_allclose(means, computed.mean_LNP(11), rtol=1e-6)
    cut, _ = with_documents(TokenizedText(tokens_K, run.tokenizer.bos_token_id), plan)
    assert found["loss"].keys() == {"reset", "continue"}
    for documents in ("reset", "continue"):
        wanted = loss_by_distance(model, cut, plan, reset_memory=documents == "reset")
        nats = [group["nats_per_token"] for group in found["loss"][documents]]
        assert nats == pytest.approx(wanted.nats_G.tolist(), abs=1e-7)
        assert [group["tokens"] for group in found["loss"][documents]] == wanted.count_G.tolist()
    assert found["loss"]["reset"] != found["loss"]["continue"]


def test_for_people_beside_the_run(place: Path) -> None:
    """A short text, one word of which is not known, on Shaw's encoding."""
    said = txl("analyze", "attention", place / "shaw", "--prompt", "the dog sat on the mat", "--max-distance", "3")
    assert said.status == 0
    assert "mean distance in tokens that each head attends to" in said.out
    assert "warning: not in the vocabulary, and read as <unk>: 'dog'\n" in said.err
    assert "warning: a text of 7 tokens does not fill a memory of 11" in said.err
    assert f"written: {place}/shaw-attention" in said.err
    figures = json.loads((place / "shaw-attention" / "figures.json").read_text())
    distance_LN = np.array([head["mean_distance"] for head in figures["heads"]]).reshape(5, 2)
    assert figures["plotted_heads"] == [[layer, int(distance_LN[layer].argmax())] for layer in (0, 2, 4)]
    assert figures["memory_length"] == 11
    page = (place / "shaw-attention" / "attention.html").read_text(encoding="utf-8")
    assert "(b) content-dependent position" in page
    assert "(c) global content" not in page
    assert '"apart":true' in page


def test_from_inside_the_run_and_with_a_single_token(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written into the run."""
    run = place / "run"
    before = files(run)
    monkeypatch.chdir(run)
    said = txl("analyze", "attention", ".", "--prompt", "l")
    assert said.status == 0
    assert files(run) == before
    assert "warning: a text of 1 token does not fill" in said.err
    assert "1 queries averaged, memory length 11" in said.out
    assert "The first 1 token of a text" in (place / "run-attention" / "attention.html").read_text(encoding="utf-8")
    shutil.rmtree(place / "run-attention")  # what is refused next does not find it in its way


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("{}/lstm", "lstm has no attention to show; use a run of transformer-xl or shaw"),
        ("{}/learned", "al-rfou has no attention terms and memory"),
        ("{}/none", "no such folder; expected a folder made by"),
        ("{}/run --heads 2:0", "heads 2:0: layer 2 does not exist; valid are 0 to 1"),
        ("{}/run --heads 0:0,1:2", "heads 1:2: head 2 does not exist; valid are 0 to 1"),
        ("{}/run --heads 1", "--heads 1: must be layer:head, both from 0, separated by commas, such as 0:3,7:1"),
        ("{}/run --heads 0:-1", "--heads 0:-1: must be layer:head"),
        ("{}/run --text-file {}/empty.txt", "the text is empty"),
        ("{}/run --text-file {}/absent.txt", "reading .*absent.txt: no such file or folder"),
        ("{}/run --prompt a --text-file {}/text.txt", "--prompt and --text-file were both given; use one of them"),
        ("{}/run --prompt a --split valid", "--split valid and --prompt were both given; --split needs a corpus"),
        ("{}/run --split tset", "has no split 'tset'.*'test'"),
        ("{}/run --max-tokens 0", "max_tokens 0: must be"),
        ("{}/run --max-distance 0", "max_distance 0: must be"),
        ("{}/run --page-tokens 0", "page_tokens 0: must be"),
        ("{}/run --page-tokens 99999 --split train", "page_tokens 99,999: the text has"),
        ("{}/run --page-tokens 1400 --split train", "2 x 2 heads would take 15 MiB of the page; give 1,023 at most"),
        (
            "{}/run --prompt line --max-distance 4",
            "max_distance 4: the text has 4 tokens; use a longer text or a smaller",
        ),
        (
            "{}/run --max-distance 18 --memory-length 11",
            "max_distance 18: with memory length 11 no token sees farther than 17 back; set memory length 18",
        ),
        (
            "{}/run --max-distance 9 --attention-window 9",
            "max_distance 9: with attention window 9 no token sees farther than 8 .*attention window 10 or none",
        ),
        ("{}/run --corpus {}/words", "tokenizer|vocabulary"),
        ("{}/run --memory-length 99999999999", "memory_length.*less than or equal to 2147483647"),
        ("{}/run --out {}/corpus", "corpus exists already; choose another out or delete it first"),
        ("{}/run --out {}/text.txt/new", "part of the path is a file, not a folder"),
    ],
)
def test_wrong_words(place: Path, capfd: Capture, words: str, message: str) -> None:
    assert_refused(place, "analyze attention " + words.replace("{}", str(place)), message, capfd)


def test_a_picture_that_cannot_be_written_leaves_nothing(place: Path, capfd: Capture) -> None:
    before = files(place)
    words = f"--prompt line-5-line-6-line-7 --heads 0:0 --out {place}/new/pictures"
    with no_file_larger_than(9000):
        assert "file too large" in error_of(f"analyze attention {place}/run {words}", capfd)
    assert files(place) == before
