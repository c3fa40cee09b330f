"""What computes surprisal and perplexity of exported models: minicons, `evaluate` and `surprisal`.

Shape suffixes: T tokens, V vocabulary.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from pathlib import Path

import evaluate
import pytest
import torch
from clients.texts import SENTENCES, TOKENIZERS
from minicons import scorer
from refusals import do
from small_runs import make_run
from surprisal import AutoHuggingFaceModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from transformer_xl import score, surprisal
from transformer_xl.integrations.checkpoints.convert import convert
from transformer_xl.integrations.huggingface import from_run
from transformer_xl.run import Run

PAGE = (Path(__file__).parents[2] / "docs" / "surprisal.md").read_text(encoding="utf-8").split("## With minicons")[1]
# a folder with `perplexity/perplexity.py` of a checkout of huggingface/evaluate, where the Hub cannot be reached
METRICS = Path(os.environ.get("EVALUATE_METRICS", "")).resolve()
each_tokenizer = pytest.mark.parametrize("kind", TOKENIZERS)
of_minicons, of_evaluate = pytest.mark.client("minicons"), pytest.mark.client("evaluate")


@pytest.fixture
def run(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run, exported to hub/ptb in the current folder."""
    monkeypatch.chdir(tmp_path)
    made = make_run(tmp_path / "runs" / "ptb", tokenizer=TOKENIZERS[kind], noise=0.3, evaluation={"memory_length": 32})
    do("convert runs/ptb hub/ptb --to huggingface")
    return made


def own_bits(run: Run) -> list[list[float]]:
    """Return the surprisal of each word of each sentence."""
    rows = [row for row in surprisal(run, SENTENCES, memory_lengths=[32]) if row["word"]]
    return [
        [row["surprisal_bits_alone"] for row in rows if row["item"] == item]
        for item in dict.fromkeys(row["item"] for row in rows)
    ]


@of_minicons
@each_tokenizer
def test_minicons_has_our_surprisal(run: Run) -> None:
    """As docs/surprisal.md does it, and with bos_token=True; sentences of different lengths in one batch."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    names: dict = {}
    exec(compile(code, "surprisal.md", "exec"), names)
    plain = scorer.IncrementalLMScorer(
        AutoModelForCausalLM.from_pretrained("hub/ptb", evaluation_memory_length=32),
        "cpu",
        tokenizer=AutoTokenizer.from_pretrained("hub/ptb"),
    )
    asked = {"surprisal": True, "base_two": True}
    for model, given in ((names["lm"], {}), (plain, {"bos_token": True})):
        theirs = model.word_score_tokenized(SENTENCES, str.split, **asked, **given)
        assert [[word for word, _ in words] for words in theirs] == [text.split() for text in SENTENCES]
        for words, expected in zip(theirs, own_bits(run), strict=True):
            assert [bits for _, bits in words] == pytest.approx(expected, abs=1e-4)


@of_minicons
@each_tokenizer
def test_minicons_scores_words_in_context(run: Run) -> None:
    """`conditional_score`, the sum of our rows in context, as the page says."""
    before, after = SENTENCES[:2]
    rows = surprisal(run, SENTENCES[:2], memory_lengths=[32])
    expected = sum(row["surprisal_bits_memory_32"] for row in rows)
    expected -= sum(row["surprisal_bits_memory_32"] for row in rows[: len(before.split())])
    expected -= rows[-1]["surprisal_bits_memory_32"]  # the end of the last item
    lm = scorer.IncrementalLMScorer(
        AutoModelForCausalLM.from_pretrained("hub/ptb", evaluation_memory_length=32),
        "cpu",
        tokenizer=AutoTokenizer.from_pretrained("hub/ptb", add_bos_token=True),
    )
    (theirs,) = lm.conditional_score(
        [before], [after], separator="\n", reduction=lambda x: -x.sum().item(), base_two=True
    )
    assert theirs == pytest.approx(expected, rel=1e-6)


def perplexity_metric() -> evaluate.Metric:
    """Return the metric, which `evaluate` downloads when it is asked for."""
    try:
        own = METRICS / "perplexity"
        return evaluate.load(str(own) if (own / "perplexity.py").is_file() else "perplexity", module_type="metric")
    except (OSError, ConnectionError) as error:
        pytest.skip(f"its metric perplexity cannot be downloaded here ({type(error).__name__})")


def own_perplexity(run: Run, text: str) -> float:
    """Return the perplexity of a text without the end of its line, after the token that begins a text."""
    (losses,) = score(run, text)
    ids = run.tokenizer.encode(text)
    return math.exp(losses.nats_K[: len(ids)].mean())


@of_evaluate
@each_tokenizer
def test_perplexity_of_one_text(run: Run) -> None:
    metric = perplexity_metric()
    for text in SENTENCES:
        result = metric.compute(model_id="hub/ptb", predictions=[text], device="cpu")
        assert result["mean_perplexity"] == pytest.approx(own_perplexity(run, text), rel=1e-5)


@of_evaluate
@each_tokenizer
def test_perplexity_of_several_texts(run: Run, kind: str) -> None:
    """It pads them, and wants padding on the right, inside the logits: as docs/transformers.md sets the folder."""
    metric = perplexity_metric()
    if kind == "words":
        shutil.rmtree("hub/ptb")
        do("convert runs/ptb hub/ptb --to huggingface --eos-token <eos>")
    AutoTokenizer.from_pretrained("hub/ptb", padding_side="right").save_pretrained("hub/ptb")
    result = metric.compute(model_id="hub/ptb", predictions=SENTENCES, device="cpu")
    assert result["perplexities"] == pytest.approx([own_perplexity(run, text) for text in SENTENCES], rel=1e-5)


@pytest.mark.client("surprisal")
@each_tokenizer
def test_surprisal_with_a_token_that_ends_texts(run: Run, kind: str) -> None:
    """It gives that token, with which it pads, probability 0; then ours are its numbers, of texts in one batch too."""
    eos_token = "<eos>" if kind == "words" else "\n"
    shutil.rmtree("hub/ptb")
    convert("runs/ptb", "hub/ptb", to="huggingface", eos_token=eos_token)
    theirs = AutoHuggingFaceModel.from_pretrained("hub/ptb", model_class="gpt").surprise(SENTENCES)
    model, tokenizer = from_run(run, eos_token=eos_token)
    for text, one in zip(SENTENCES, theirs, strict=True):
        ids = run.tokenizer.encode(text).tolist()
        with torch.no_grad():
            logits_TV = model(torch.tensor([[run.tokenizer.bos_token_id, *ids[:-1]]])).logits[0]
        logits_TV[:, tokenizer.eos_token_id] = -torch.inf
        expected = -logits_TV.log_softmax(-1)[torch.arange(len(ids)), ids]
        assert one.surprisals[: len(ids)] == pytest.approx(expected.numpy(), abs=1e-4)
