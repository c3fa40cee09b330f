"""The demo scores the test text and several memory lengths; its report has them, and what they depend on."""

from __future__ import annotations

import os
import re
from datetime import datetime
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from refusals import CommandResult, txl

from transformer_xl import Corpus
from transformer_xl.apps.analyze.attention_maps import TermMaps, trace_attention
from transformer_xl.apps.reproduce import demo
from transformer_xl.config import UserError
from transformer_xl.device import environment
from transformer_xl.evaluation.plan import EvaluationPlan
from transformer_xl.files import lock_folder
from transformer_xl.text.prepare import prepare
from transformer_xl.text.tokenizers import ByteTokenizer

RECIPE = {
    "model": {"vocab_size": 256, "n_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 16},
    "train": {"segment_length": 8, "memory_length": 8, "batch_size": 2, "max_steps": 3, "learning_rate": 0.002,
              "warmup_steps": 1, "eval_interval": 3, "eval_tokens": 64},
    "evaluation": {"memory_length": 4, "attention_window": 16},
}  # fmt: skip


@pytest.fixture(scope="module", params=[256, 300, "lstm"])
def report(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[dict[str, Any], Path]:
    """The JSON output and the report of a demo on a small text, of bytes and of byte-pair tokens, and of an LSTM."""
    folder = tmp_path_factory.mktemp("demo")
    recipe = {**RECIPE, "model": {**RECIPE["model"], "vocab_size": request.param}}
    if request.param == "lstm":
        recipe |= {"model": {"architecture": "lstm", "vocab_size": 256, "n_layers": 1, "d_model": 16}}
        recipe["evaluation"] = {"memory_length": 4}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    lines = (f"<line {number}>\n" + "\n" * (number % 5 == 4) for number in range(400))
    (folder / "text.txt").write_text("".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            demo, "prepare", lambda _, out, tokenizer: prepare(folder / "text.txt", out, tokenizer=tokenizer or "byte")
        )
        patch.setattr(demo, "_PROMPT_LINES", 3)
        words = ["demo", "--recipe", folder / "recipe.yaml", "--out", folder / "out", "--max-tokens=100", "--json"]
        result = txl(*words, "--device=cpu")
    assert result.status == 0, result.err
    return result.object, folder / "out" / "report.html"


def test_report_has_parameters_settings_machine_and_date(report: tuple[dict[str, Any], Path]) -> None:
    values, file = report
    page = file.read_text()
    machine = environment(torch.device("cpu"))
    assert abs((datetime.now().astimezone() - datetime.fromisoformat(values["date"])).total_seconds()) < 1000
    assert (values["processor"], values["cores"] >= 1) == (machine["processor"], True)
    facts = dict(re.findall(r'<tr><th scope="row">(.*?)</th><td>(.*?)</td></tr>', page))
    assert facts["parameters"] == f"{values['parameters']:,}"
    assert facts["date"] == values["date"]
    assert re.search("vocabulary of (256 bytes|300 byte-pair tokens)", facts["model"])
    assert facts["training"].startswith("3 steps of 2 x 8 tokens, ")
    assert ", learning rate 0.002 (cosine), " in facts["training"]
    assert unescape(facts["processor"]).startswith(
        f"{machine['processor']} ({machine['machine']}); cores: {values['cores']}, "
    )
    assert f"torch {torch.__version__}, Python" in facts["software"]
    assert "  warmup_steps: 1\n" in page  # the whole config.yaml


def test_results_are_of_the_test_text_and_of_each_memory_length(report: tuple[dict[str, Any], Path]) -> None:
    """The model was trained with a memory of 8, and its recipe has one of 4 for evaluation."""
    values, file = report
    whole, curve = values["test"], {scores["memory_length"]: scores for scores in values["by_memory_length"]}
    assert list(curve) == [0, 2, 4, 8, 16, 32]
    assert [scores["tokens"] for scores in (whole, *curve.values())] == [100] * 7
    assert whole["memory_length"] == 4
    assert "with memory length 4 (evaluation.memory_length of the run)" in file.read_text()
    assert whole["bits_per_byte"] == curve[4]["bits_per_byte"]
    assert curve[16]["bits_per_byte"] == curve[32]["bits_per_byte"]
    test_table, curve_table = (
        [re.findall(r"<td.*?>(.*?)</td>", row) for row in re.findall(r"<tr>(<td.*?)</tr>", table)]
        for table in re.findall(r"<table><thead>.*?</table>", file.read_text(), flags=re.DOTALL)[:2]
    )
    first, *packers = [row[0] for row in test_table]
    assert first == f"Transformer-XL, memory {whole['memory_length']}"
    assert [row.split()[0] for row in packers] == ["gzip", "xz"]
    assert [row[0] for row in curve_table] == ["0 (none)", "2", "4", "8 (as trained)", "16", "32"]
    assert [row[1] for row in curve_table] == [f"{scores['bits_per_byte']:.3f}" for scores in curve.values()]


def test_end_of_the_prompt_is_marked_in_a_sample_at_each_temperature(report: tuple[dict[str, Any], Path]) -> None:
    """The prompt is the test text up to its last blank line among the scored tokens."""
    values, file = report
    corpus = Corpus.open(file.parent / "corpus")
    scored = corpus.tokenizer.decode(corpus.split("test").tokens[:100])
    assert values["prompt"] == scored[: scored.rindex("\n\n") + 2]
    # not read_text, which would change a carriage return in the sample
    marked = re.findall(r"<pre><mark>(.*?)</mark>(.*?)</pre>", file.read_bytes().decode(), flags=re.DOTALL)
    assert list(values["samples"]) == ["0.9", "1"]
    assert [tuple(map(unescape, parts)) for parts in marked] == [
        ("".join(values["prompt"].splitlines(keepends=True)[-3:]), text) for text in values["samples"].values()
    ]


def test_differences_within_the_spread_are_called_none(report: tuple[dict[str, Any], Path]) -> None:
    curve = {scores["memory_length"]: scores for scores in report[0]["by_memory_length"]}
    assert (curve[8]["difference"], curve[8]["difference_spread"]) == (0, 0)
    for scores in curve.values():
        difference = scores["bits_per_byte"] - curve[8]["bits_per_byte"]
        assert scores["difference"] == pytest.approx(difference, abs=1e-5)
    none = {"difference": 0.3, "difference_spread": 0.002}
    longest = {"memory_length": 32, "difference": 0.001, "difference_spread": 0.002}
    assert demo._verdict({"by_memory_length": [none, longest]}).endswith(
        "no memory +0.300 ± 0.002 bits per byte (worse) and a memory of 32 +0.001 ± 0.002 bits per byte "
        "(no difference beyond the spread)."
    )


def test_attention_is_that_of_one_pass_over_the_text(run_of: Any) -> None:
    """The maps are of all inputs from the first on; with segments of 7, that of byte 200 begins with the 197th."""
    text, run = bytes(range(32, 127)) * 3, run_of(ByteTokenizer(), max_ngram=3, ngram_buckets=31, d_ngram=5)
    said, shown = map(unescape, demo._attention(run, np.frombuffer(text, np.uint8), 200))
    share, head, layer = map(int, re.search(r"got (\d+)% of the attention of head (\d+) of layer (\d+)", said).groups())
    assert "follows these 16. The first 11 of them were in memory" in said
    spans = re.findall(r'title="([\d.]+)%" style.*?>(.)', shown)
    assert "".join(character for _, character in spans) == text[184:200].decode()  # 11 of memory, 5 of the segment
    plan = EvaluationPlan.resolve(run.config)
    inputs_K = np.frombuffer(bytes([run.tokenizer.bos_token_id]) + text[:200], dtype=np.uint8)
    maps = TermMaps(run.model, plan, len(inputs_K))
    trace_attention(run.model, inputs_K, plan, [maps.add])
    heads = np.array([maps.map_QQ("probability", *divmod(number, 2))[-1, -16:] for number in range(6)])
    p_LNK = heads.reshape(3, 2, 16)
    assert np.unravel_index(p_LNK[..., :11].max(-1).argmax(), (3, 2)) == (layer, head)
    percents = 100 * p_LNK[layer, head]
    assert [float(percent) for percent, _ in spans] == pytest.approx(percents, abs=0.006)
    assert share == round(percents[:11].sum())
    assert demo._attention(run, np.frombuffer(text, np.uint8), 5) == []  # no memory yet


def test_report_fits_the_screen_of_a_phone(report: tuple[dict[str, Any], Path], browser: Any) -> None:
    tab = browser.new_page(viewport={"width": 390, "height": 844}, is_mobile=True)
    tab.goto(report[1].as_uri())
    tab.locator("summary").click()
    assert tab.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [390, 390]
    charts = tab.locator("svg").evaluate_all(
        "all => all.map(svg => [svg.getBoundingClientRect().width, svg.viewBox.baseVal.width])"
    )
    assert len(charts) == 2
    assert all(width <= 390 and width >= natural for width, natural in charts)  # labels of ten points stay readable
    tab.close()


@pytest.mark.skipif(os.name != "posix", reason="folders are locked on POSIX only")
def test_a_demo_does_not_replace_one_that_is_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor a run that another command trains."""
    words = ["demo", "--out", tmp_path / "demo", "--device=cpu"]
    results: list[CommandResult | None] = []

    def prepare_while_another_begins(_: str, out: Path, **__: Any) -> None:
        (out.parent / "run").mkdir()
        if not results:
            results.append(None)
            results[0] = txl(*words)
            assert (out.parent / "run").exists()
        raise UserError("enough")

    monkeypatch.setattr(demo, "prepare", prepare_while_another_begins)
    assert "enough" in txl(*words).err
    assert results[0] is not None
    assert f"{tmp_path / 'demo'} is in use by another txl command" in results[0].err
    with lock_folder(tmp_path / "demo" / "run"):
        assert f"{tmp_path / 'demo' / 'run'} is in use by another txl command" in txl(*words).err
    assert (tmp_path / "demo" / "run").exists()


def test_refused_recipe_leaves_the_earlier_demo(report: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    recipe = {**RECIPE, "model": {**RECIPE["model"], "vocab_size": 20_000_000}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    result = txl("demo", "--recipe", tmp_path / "recipe.yaml", "--out", report[1].parent)
    assert result.status == 2
    assert "vocab_size 20,000,000 is too large" in result.err
    assert report[1].exists()
