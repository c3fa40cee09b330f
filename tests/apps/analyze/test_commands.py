"""`txl analyze`: tables, JSON and files; an error prints one line, exits with status 2 and writes nothing.

Shape suffixes: L layers, N heads, P distances, K tokens of a text, G groups of distances.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import NO_RECIPE, assert_refused, do, error_of, files, no_file_larger_than, txl

from transformer_xl import Corpus, EvaluationPlan, load
from transformer_xl.apps.analyze.attention import loss_by_distance, with_documents
from transformer_xl.apps.analyze.attention_maps import AttentionMeans, trace_attention
from transformer_xl.evaluation.attention_by_distance import require_attention_terms
from transformer_xl.evaluation.plan import TokenizedText
from transformer_xl.model.memory import ContextLimits

Capture = pytest.CaptureFixture[str]
# settings of tiny models, and of a training of two steps
SMALL = "--model.n-layers 2 --model.d-model 14 --model.n-heads 2 --model.d-ff 19"
SHORT = "--train.segment-length 7 --train.batch-size 3 --train.max-steps 2 --train.warmup-steps 0 --train.dtype float32"
# flags of `txl analyze context`: contexts of 5, 10, 15 and 20 tokens at 11 positions
CONTEXT = "--split train --context-step 5 --max-context 20 --num-positions 11 --device cpu"
SPEED = "tiny --attention-windows 8,16 --segment-lengths 4 --repeats 1 --dtype float32"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with corpora of bytes, characters and words, and runs of several architectures on them."""
    folder = tmp_path_factory.mktemp("analyze") / "data"
    folder.mkdir()
    (folder / "text.txt").write_bytes(b"".join(b"line %d\n" % number for number in range(199)))
    (folder / "words.txt").write_bytes(b"the cat sat on the mat and the cat ran\n" * 99)
    (folder / "empty.txt").write_bytes(b"")
    (folder / "existing.json").write_text("{}")
    do(f"prepare {folder}/text.txt --out {folder}/corpus")
    do(f"prepare {folder}/text.txt --out {folder}/chars --tokenizer char")
    do(f"prepare {folder}/words.txt --out {folder}/words --tokenizer word")
    three_layers = "--model.architecture shaw --model.n-layers 3 --train.memory-length 11"
    for run, corpus, options in (
        ("xl", "corpus", f"{SMALL} --train.memory-length 11"),
        ("other", "chars", SMALL),
        ("shaw", "words", f"{SMALL.replace('--model.n-layers 2', '')} {three_layers}"),
        ("learned", "corpus", f"{SMALL} --model.architecture al-rfou"),
        ("lstm", "corpus", "--model.architecture lstm --model.d-model 14 --model.n-layers 2"),
    ):
        do(f"train {NO_RECIPE} --corpus {folder}/{corpus} --run {folder}/{run} {options} {SHORT}")
    # a run without weights
    (folder / "empty" / "checkpoints").mkdir(parents=True)
    for file in ("config.yaml", "txl_tokenizer.json"):
        shutil.copy(folder / "xl" / file, folder / "empty" / file)
    return folder


def test_attention_writes_plots_page_and_values(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--max-tokens", "61", "--page-tokens", "9", "--heads", "1:0", "--out", out, "--json"]
    values = txl("analyze", "attention", folder / "xl", *options).object
    expected = {"tokens": 61, "memory_length": 11, "segment_length": 7, "max_distance": 11, "page_tokens": 9}
    assert values.items() >= expected.items()
    assert values["num_queries"] == 61 - 14  # memory is full from the third segment on
    # one document, which is split into at least eight chunks (61 // 8 = 7) to measure the loss by distance
    assert (values["documents"], values["chunk_length"]) == (1, 7)
    written = {name for names in values["files"].values() for name in names}
    assert {path.name for path in out.iterdir()} == written
    assert {"mean-attention.png", "terms-layer-1-head-0.svg", "loss.svg"} <= written
    assert json.loads((out / "results.json").read_text()) == values
    assert [(head["layer"], head["head"]) for head in values["heads"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    # after hardly any training, attention is nearly uniform over the 12 to 18 keys that a query sees
    assert all(4 < head["mean_distance"] < 9 for head in values["heads"])
    assert "line" in (out / "attention.html").read_text(encoding="utf-8")
    means = np.load(out / "mean-attention.npy", allow_pickle=False)
    assert (means.shape, means.dtype) == ((2, 2, 12), np.float32)
    check_against_library(folder, values, means)


def check_against_library(folder: Path, values: dict[str, Any], means: np.ndarray) -> None:
    """The means and both losses equal those of the same text, computed in Python."""
    run, plan = load(folder / "xl"), EvaluationPlan(segment_length=7, context_limits=ContextLimits(11))
    model, tokens_K = require_attention_terms(run.model), Corpus.open(folder / "corpus").split("test").first(61)
    computed = AttentionMeans(model, plan, 61)
    trace_attention(model, tokens_K, plan, [computed.add])
    np.testing.assert_allclose(means, computed.mean_LNP(11), rtol=1e-6)
    text, _ = with_documents(TokenizedText(tokens_K, run.tokenizer.bos_token_id), plan)
    assert values["loss"]["reset"] != values["loss"]["continue"]
    for name, groups in values["loss"].items():
        expected = loss_by_distance(model, text, plan, reset_memory=name == "reset")
        losses, expected_losses = ([group["nats_per_token"] for group in found] for found in (groups, expected))
        assert losses == pytest.approx(expected_losses, abs=1e-7)
        assert [group["tokens"] for group in groups] == [group["tokens"] for group in expected]


def test_attention_of_a_prompt_prints_a_table(folder: Path) -> None:
    """A short text with an unknown word, on Shaw's architecture."""
    result = txl("analyze", "attention", folder / "shaw", "--prompt", "the dog sat on the mat", "--max-distance", "3")
    assert result.status == 0
    assert "mean distance in tokens that each head attends to" in result.out
    for line in (
        "note: not in the vocabulary, and read as <unk>: 'dog'\n",
        "note: a text of 7 tokens does not fill a memory of 11",
        f"written: {folder}/shaw-attention",
    ):
        assert line in result.err
    values = json.loads((folder / "shaw-attention" / "results.json").read_text())
    # shape: layers and heads
    distance_LN = np.array([head["mean_distance"] for head in values["heads"]]).reshape(3, 2)
    assert values["plotted_heads"] == [[layer, int(distance_LN[layer].argmax())] for layer in (0, 1, 2)]
    assert values["memory_length"] == 11
    page = (folder / "shaw-attention" / "attention.html").read_text(encoding="utf-8")
    assert "(b) content-dependent position" in page
    assert "(c) global content" not in page
    assert '"spaced":true' in page  # tokens are words, shown with spaces between them


def test_attention_in_the_folder_of_the_run_leaves_it_unchanged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a prompt of a single token; the files are written to xl-attention, next to the folder of the run."""
    before = files(folder / "xl")
    monkeypatch.chdir(folder / "xl")
    result = txl("analyze", "attention", ".", "--prompt", "l", "--heads", "0:0")
    assert result.status == 0
    assert files(folder / "xl") == before
    assert "a text of 1 token does not fill" in result.err
    assert "over 1 queries, memory length 11" in result.out
    assert "The first 1 token of a text" in (folder / "xl-attention" / "attention.html").read_text(encoding="utf-8")
    shutil.rmtree(folder / "xl-attention")  # otherwise the commands below would refuse to replace it


def test_attention_leaves_nothing_if_a_plot_cannot_be_written(folder: Path, capfd: Capture) -> None:
    before = files(folder)
    words = f"--prompt line-5-line-6-line-7 --heads 0:0 --out {folder}/new/plots"
    with no_file_larger_than(9000):
        assert "file too large" in error_of(f"analyze attention {folder}/xl {words}", capfd)
    assert files(folder) == before


def test_context_prints_tables_and_writes_files(folder: Path, tmp_path: Path) -> None:
    out, plot = tmp_path / "results.json", tmp_path / "gains.svg"
    words = ["analyze", "context", folder / "xl", f"vanilla={folder}/learned", *CONTEXT.split()]
    result = txl(*words, "--out", out, "--plot", plot)
    assert result.status == 0
    assert "Relative effective context length in tokens, train: 11 positions" in result.out
    assert "r = 0.5" in result.out
    assert "Mean loss in nats per token" in result.out
    # without memory, a model sees at most the 7 tokens of a segment, though the contexts have 5, 10, 15 and 20 tokens
    # 11 positions: 11 * (5 + 10 + 15 + 20) and 11 * (5 + 7 + 7 + 7)
    assert "tokens to process: xl 550, vanilla 286\n" in result.err
    assert "<svg" in plot.read_text(encoding="utf-8")
    values = json.loads(out.read_text(encoding="utf-8"))
    assert values["runs"] == {"xl": f"{folder}/xl", "vanilla": f"{folder}/learned"}
    assert [model["memory_length"] for model in values["models"]] == [11, 0]
    result = txl(*words, "--json", "--threshold", "0.99")
    assert result.object.keys() == values.keys()
    assert "xl, vanilla: the gain is below the threshold already at --min-context" in result.err


def test_context_limits_apply_to_models_that_have_them(folder: Path) -> None:
    words = ["analyze", "context", folder / "xl", folder / "learned", *CONTEXT.split(), "--json"]
    xl, learned = txl(*words).object["models"]
    whole, same = txl(*words, "--memory-length", "all", "--clamp-length", "3").object["models"]
    near, _ = txl(*words, "--memory-length", "0", "--attention-window", "2").object["models"]
    assert (whole["memory_length"], whole["clamp_length"]) == (20, 3)
    assert (same["memory_length"], same["clamp_length"]) == (0, None)
    assert (near["attention_window"], near["max_visible_tokens"]) == (2, 7)
    assert same["nats_per_token"] == learned["nats_per_token"]
    assert whole["nats_per_token"][-1] != xl["nats_per_token"][-1]


def test_speed_prints_tables_and_writes_results(tmp_path: Path) -> None:
    out, words = tmp_path / "speed.json", ["analyze", "speed", *SPEED.split()]
    result = txl(*words, "--out", out)
    assert result.status == 0
    assert "attention scores stored" in result.out
    assert "fused causal attention" in result.out
    values = json.loads(out.read_text())
    assert [row["attention_window"] for row in values["rows"]] == [8, 16]
    assert values["dtype"] == "float32"
    assert txl(*words, "--json").object.keys() == values.keys()


# by subcommand: its arguments, where {} is the folder of the fixture, and a pattern of the message
REFUSED = {
    "attention": [
        ("{}/lstm", "lstm has no attention that can be shown; use transformer-xl or shaw"),
        ("{}/learned", "al-rfou has no attention terms and memory"),
        ("{}/xl --heads 2:0", "heads 2:0: layer 2 does not exist; valid are 0 to 1"),
        ("{}/xl --heads 0:0,1:2", "heads 1:2: head 2 does not exist"),
        ("{}/xl --heads 1", "--heads 1: must be layer:head, .* such as 0:3,7:1"),
        ("{}/xl --heads 0:-1", "--heads 0:-1: must be layer:head"),
        ("{}/xl --text-file {}/empty.txt", "the text is empty"),
        ("{}/xl --text-file {}/absent.txt", "reading .*absent.txt: no such file or folder"),
        ("{}/xl --prompt a --text-file {}/text.txt", "--prompt and --text-file were both given; use one of them"),
        ("{}/xl --prompt a --split valid", "--split valid and --prompt were both given; --split needs a corpus"),
        ("{}/xl --max-tokens 0", "--max-tokens 0: must be"),
        ("{}/xl --page-tokens 99999 --split train", "--page-tokens 99,999: the text has"),
        ("{}/xl --prompt line --max-distance 4", "--max-distance 4: the text has 4 tokens; use a longer text"),
        ("{}/xl --max-distance 18 --memory-length 11", "no token sees farther than 17 back; raise --memory-length"),
        ("{}/xl --max-distance 9 --attention-window 9", "farther than 8 back; raise .* --attention-window"),
        ("{}/xl --corpus {}/words", "tokenizer|vocabulary"),
        ("{}/xl --memory-length 99999999999", "--memory-length.*less than or equal to 2147483647"),
        ("{}/xl --out {}/corpus", "corpus exists already; choose another path or delete it first"),
    ],
    "context": [
        ("", "no run was given; name the folders of the runs"),
        ("{}/xl {}/xl", "two runs are called xl, .*: NAME=RUN"),
        ("a={}/xl a={}/learned", "two runs are called a"),
        ("={}/xl", "must be the folder of a run, or NAME=RUN"),
        ("{}/corpus", "not the folder of a run"),
        ("{}/xl {}/other", r"other has another tokenizer than .*xl \(char, .*\); give runs with the same"),
        ("{}/xl {}/empty " + CONTEXT, "empty has no weights yet"),
        ("{}/xl --split tset", r"has no split 'tset' \(did you mean 'test'\?\)"),
        ("{}/xl --max-context 100000", "which 0 have 100,000 before them, and --num-positions is 1,000"),
        ("{}/xl --context-step 0", "--context-step: .* greater than or equal to 1 .given: 0"),
        ("{}/xl --min-context 50 --max-context 60", "--max-context 60 leaves nothing .* --min-context 50; give .* 150"),
        ("{}/xl --threshold nan", "threshold: .* less than 1"),
        ("{}/xl --memory-length -1 " + CONTEXT, "--memory-length"),
        ("{}/xl --out {}/existing.json", "existing.json exists already; choose another path"),
        ("{}/xl --out {}/none/a.json", "folder .*none does not exist; create it, or choose another path"),
        ("{}/xl --plot {}/a.jpg", "a.jpg: .* must end in .svg or .png"),
        ("{}/xl --plot {}/a.svg --out {}/a.svg", "a.svg was given for --out and --plot; choose different files"),
    ],
    "speed": [
        ("tinny", "no recipe 'tinny'"),
        ("tiny --attention-windows 8,x", "--attention-windows: .* integer.* .given: 'x'"),
        ("tiny --segment-lengths 0", "--segment-lengths: .* greater than or equal to 1"),
        ("tiny --repeats 0", "repeats: .* greater than or equal to 1"),
        ("enwik8-al-rfou-12l", "is compared for Transformer-XL"),
        ("tiny --out {}/existing.json", "exists already; choose another path"),
        ("tiny --out {}/none/a.json", "folder .*none does not exist; create it, or choose another path"),
    ],
}


@pytest.mark.parametrize(
    ("words", "message"), [(f"{name} {words}", message) for name, cases in REFUSED.items() for words, message in cases]
)
def test_error_is_one_line(folder: Path, capfd: Capture, words: str, message: str) -> None:
    assert_refused(folder, f"analyze {words.replace('{}', str(folder))}", message, capfd)
