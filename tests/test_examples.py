"""The example scripts run without errors, with fewer training steps."""

from __future__ import annotations

import json
import random
import re
import runpy
from pathlib import Path

import pytest
import torch
import training_runs

from transformer_xl import (
    ReadingTimeSweep,
    corpus_word_counts,
    fit_reading_times,
    list_runs,
    load,
    read_reading_times,
    train,
)
from transformer_xl.config import run_settings
from transformer_xl.text.corpus_writer import write_corpus
from transformer_xl.text.documents import Document
from transformer_xl.text.tokenizers import ByteTokenizer

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_train_example_stops_resumes_and_finishes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # a loss below 5.3 (uniform over bytes is 5.55) is reached by step 10 or 20, where metrics are computed; training
    # stops after the next step, during which they arrive
    runpy.run_path(str(EXAMPLES / "train.py"))["main"](tmp_path / "out", max_steps=24, stop_at=5.3)
    out = capsys.readouterr().out
    assert re.search(r"stopped at step (11|21) of 24", out)
    assert "finished: True" in out


def test_sweep_ends_poor_trials_early(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna")
    corpus = training_runs.letters_corpus(tmp_path / "corpus", 2000, 200)
    sweep = runpy.run_path(str(EXAMPLES / "sweep_optuna.py"))["main"]
    settings = {"max_steps": 6, "eval_interval": 2, "segment_length": 8, "memory_length": 8, "batch_size": 2}
    for trials in (5, 2):  # the second call goes on with the study
        study = sweep(corpus.path, tmp_path / "sweep", trials, settings=settings)
    assert len(study.trials) == 7
    rows = list_runs(tmp_path / "sweep", sort="valid_nats_per_token")
    assert f"best: {Path(rows[0]['run']).name}, " in capsys.readouterr().out
    assert study.best_value == rows[0]["valid_nats_per_token"]
    unfinished = [Path(row["run"]).name for row in rows if not row["finished"]]
    pruned = [trial.number for trial in study.trials if trial.state.name == "PRUNED"]
    assert sorted(unfinished) == [f"trial-{number:03}" for number in pruned]


def test_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    scale = {"STEPS = 600": "STEPS = 6", "[a-z]*.py": "[a-c]*.py", "=30_000": "=500", "=4096": "=300"}
    cells = json.loads((EXAMPLES / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for words, fewer in scale.items():
        assert source.count(words) == 1
        source = source.replace(words, fewer)
    exec(compile(source, "tour.ipynb", "exec"), {})
    assert len(re.findall(r"memory of +\d+ tokens: \d\.\d+ bits per byte", capsys.readouterr().out)) == 4


def test_ppo_example_trains_each_agent_and_draws_their_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example = runpy.run_path(str(EXAMPLES / "ppo_memory.py"))
    for agent in ("transformer-xl", "gru", "lstm", "none"):
        sizes = {"corridor": 5, "steps": 128, "window": 4, "memory_length": 6, "width": 8, "environments": 8}
        example["run"](example["Settings"](agent=agent, **sizes), tmp_path)
    example["plot"](list(tmp_path.glob("*.json")), tmp_path / "curves.svg")
    assert capsys.readouterr().out.count("\n| ") == 5
    assert (tmp_path / "curves.svg").read_text().count("</svg>") == 1


def test_corridor_shows_the_cue_once_and_pays_for_the_right_turn() -> None:
    example = runpy.run_path(str(EXAMPLES / "ppo_memory.py"))
    corridor = example["Corridor"](4, 3, torch.Generator().manual_seed(1))
    side_E = corridor.side_E.clone()
    first_EO = corridor.observe()
    assert first_EO[:, :2].argmax(-1).tolist() == (side_E - 1).tolist()
    for _ in range(3):
        reward_E, done_E, _ = corridor.step(torch.zeros(4, dtype=torch.long))
        assert not done_E.any()
        assert reward_E.tolist() == [0.0] * 4
        assert not corridor.observe()[:, :2].any()
    assert corridor.observe()[:, 2].all()
    turn_E = torch.where(torch.arange(4) < 2, side_E, 3 - side_E)
    reward_E, done_E, right_E = corridor.step(turn_E)
    assert done_E.all()
    assert reward_E.tolist() == [1.0, 1.0, -1.0, -1.0]
    assert right_E.tolist() == [True, True, False, False]


def test_simulated_readers_need_what_they_are_said_to(tmp_path: Path) -> None:
    """Without noise, times are an exact sum: a fit at their memory length finds the milliseconds for each bit."""
    text = "".join(f"the {word} saw a {word[::-1]} and then the other one\n" for word in "abcdefgh" * 12).encode()
    corpus = write_corpus(
        tmp_path / "corpus",
        {"train": [Document("train", [text])], "test": [Document("test", [text[::-1]])]},
        name="tiny",
        source="a test",
        tokenizer=ByteTokenizer(),
    )
    config = run_settings({"model": training_runs.MODEL, "train": training_runs.TRAIN}, "test")
    train(config, corpus, tmp_path / "run", **training_runs.OPTIONS)
    main = runpy.run_path(str(EXAMPLES / "simulated_readers.py"))["main"]
    quiet = {"noise": 0.0, "word_sd": 0.0, "readers": 1}
    main(tmp_path / "run", memory_length=3, out=tmp_path / "times.csv", texts=10, words=20, ms_per_bit=5.0, **quiet)
    times = read_reading_times("times.csv", (tmp_path / "times.csv").read_bytes())
    run = load(tmp_path / "run", device="cpu")
    fits = fit_reading_times(run, times, corpus_word_counts(corpus), ReadingTimeSweep(memory_lengths=(3,)))
    assert fits.rows[0]["per_bit"] == pytest.approx(5, abs=0.05)  # times have tenths of ms
    assert fits.rows[0]["previous_per_bit"] == pytest.approx(2.5, abs=0.05)


def test_planted_evidence_is_planted_and_its_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(EXAMPLES / "planted_evidence.py"))
    filler, rng = example["filler_words"](), random.Random(3)
    assert not {*example["NAMES"], *example["MARKERS"]} & set(filler)
    for task, words in (("name", "courier"), ("source", "reported by")):
        for place, near in (("beginning", 0), ("middle", 150), ("anywhere", None)):
            text, label = example["plant"](filler, 300, task, place, rng)
            assert len(text.split()) == 299  # and the end of the text
            assert text.count(f"{words} {label}") == 1
            index = len(text.split(f"{words} {label}")[0].split())
            assert near is None or near <= index < near + 16
    text, label = example["plant"](filler, 300, "order", "anywhere", rng)
    assert sorted(("harbour", "bridge"), key=text.index)[0] == label
    sizes = {"num_documents": 12, "train_lengths": (32, 64), "segment_length": 8, "memory_length": 16}
    sizes |= {"base_steps": 2, "max_steps": 2, "batch_size": 3, "lengths": (32, 64), "memory_lengths": (0, 64)}
    settings = example["Settings"](**sizes, places=("beginning", "anywhere"), num_words=64, min_documents=2)
    example["train"](settings, tmp_path)
    example["plot"]([example["sweep"](settings, tmp_path)], tmp_path / "planted.svg")
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [(row[0], row[1], row[2]) for row in rows[1:]] == [
        *[("| beginning", "32", "0"), ("| beginning", "64", "0"), ("| beginning", "64", "64")],
        *[("| anywhere", "32", "0"), ("| anywhere", "64", "0"), ("| anywhere", "64", "64")],
        ("| only the end is read", "64", "32"),
    ]
    assert (tmp_path / "planted.svg").read_text().count("</svg>") == 1
