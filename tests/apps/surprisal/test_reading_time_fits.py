"""Fits to reading times: what the model sees in each, the regressions, and simulated readers whose memory is found.

Shape suffixes: N readings, P predictors.
"""

from __future__ import annotations

import copy
import csv
import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_configs import small_model
from refusals import assert_refused, txl
from scipy.optimize import minimize
from scipy.stats import chi2, norm
from small_runs import make_run

from transformer_xl import load, surprisal
from transformer_xl.apps.surprisal.plot import draw_fits
from transformer_xl.apps.surprisal.reading_time_config import ReadingTimeSweep
from transformer_xl.apps.surprisal.reading_time_fits import ReadingTimeFits, _add_intervals, fit_reading_times
from transformer_xl.apps.surprisal.reading_times import ReadingTimes, read_reading_times
from transformer_xl.config import EvaluationConfig, EvaluationMethod, RunConfig, TrainConfig, UserError
from transformer_xl.run import Run
from transformer_xl.text.tokenizers import ByteTokenizer

NGRAMS = {"max_ngram": 3, "ngram_buckets": 101, "d_ngram": 7}


def texts(num_texts: int, num_words: int) -> dict[str, list[str]]:
    """Return texts of words drawn from 60, some of them often."""
    rng = np.random.default_rng(5)
    known = ["".join(rng.choice(list("abcdefgh"), rng.integers(1, 8))) for _ in range(60)]
    chance = 1 / np.arange(1.0, 61)
    return {
        f"t{number}": [known[index] for index in rng.choice(60, num_words, p=chance / chance.sum())]
        for number in range(num_texts)
    }


def simulated(
    run: Run, of_texts: dict[str, list[str]], memory_length: int, *, readers: int = 4, noise: float = 5.0
) -> ReadingTimes:
    """Return the times of readers who need 3 ms for each bit at this memory length, and have a pace of their own."""
    rng = np.random.default_rng(11)
    exact = EvaluationConfig(attention_window=memory_length + 1)  # whatever the position in the segment
    by_name = {name: " ".join(words) for name, words in of_texts.items()}
    rows = surprisal(run, by_name, exact if run.model.limits_visible else None, memory_lengths=[memory_length])
    bits = {(row["item"], row["word_number"]): row for row in rows if row["word"]}
    item_N, word_N, reader_N, time_N = list[int](), list[int](), list[int](), list[float]()
    for reader in range(readers):
        pace = rng.normal(0, 20)
        for (item, number), row in bits.items():
            item_N.append(list(of_texts).index(item))
            word_N.append(number - 1)
            reader_N.append(reader)
            time_N.append(300 + pace + 3 * row["surprisal_bits_alone"] + 2 * len(row["word"]) + rng.normal(0, noise))
    arrays = (np.array(values) for values in (item_N, word_N, reader_N, time_N))
    return ReadingTimes(of_texts, [f"r{reader}" for reader in range(readers)], *arrays, left_out={})


def counts(of_texts: dict[str, list[str]]) -> dict[str, int]:
    words = [word for text in of_texts.values() for word in text]
    return {word: words.count(word) for word in set(words)}


SMALL = texts(2, 30)


def fit(run: Run, times: ReadingTimes, config: EvaluationConfig | None = None, **sweep: Any) -> ReadingTimeFits:
    return fit_reading_times(run, times, counts(times.texts), ReadingTimeSweep(**sweep), config)


# what the model sees


def column(fits: ReadingTimeFits, name: str) -> dict[str, float]:
    return dict(zip(fits.observations["word_id"].tolist(), fits.observations[name].tolist(), strict=True))


def bits_of(run: Run, length: int, **settings: int) -> dict[str, float]:
    """Return the surprisal of all words, each text alone, read with this memory."""
    rows = surprisal(run, {name: " ".join(words) for name, words in SMALL.items()}, memory_lengths=[length], **settings)
    return {f"{row['item']}.{row['word_number']}": row["surprisal_bits_alone"] for row in rows if row["word"]}


@pytest.mark.parametrize("architecture", ["transformer-xl", "lstm", "attends to empty memory"])
def test_memory_is_exact_at_any_segment_length(tmp_path: Path, architecture: str) -> None:
    """Every token sees as many before it as with segments of one token; with a segment length, as that says."""
    run = make_run(tmp_path / "run", architecture, noise=0.3, dropout=0.0)
    times = simulated(run, SMALL, 3)
    fits = fit(run, times, memory_lengths=(3, 6))
    for length in (3, 6):
        expected = bits_of(run, length, segment_length=1)
        found = column(fits, f"memory_{length}")
        assert found == pytest.approx({name: expected[name] for name in found}, abs=1e-3)
        assert len(found) == 2 * 29  # all but the first words
        before = column(fits, f"previous_memory_{length}")
        assert before["t1.7"] == found["t1.6"]
    segments = fit(run, times, EvaluationConfig(segment_length=5), memory_lengths=(3,))
    expected, found = bits_of(run, 3, segment_length=5), column(segments, "memory_3")
    assert found == pytest.approx({name: expected[name] for name in found}, abs=1e-3)


@pytest.mark.parametrize("method", ["dynamic", "sliding-window"])
def test_memories_are_compared_whatever_method_the_run_records(run_of, method: EvaluationMethod) -> None:
    run = run_of(ByteTokenizer())
    times, evaluation = simulated(run, SMALL, 3), EvaluationConfig(method=method)
    recorded = replace(run, config=run.config.model_copy(update={"evaluation": evaluation}))
    found, expected = (column(fit(one, times, memory_lengths=(3,)), "memory_3") for one in (recorded, run))
    assert found == expected


def test_a_window_is_all_that_a_token_is_predicted_from(run_of) -> None:
    run = run_of(ByteTokenizer())
    found = column(fit(run, simulated(run, SMALL, 3), memory_lengths=(), attention_windows=(4,)), "window_4")
    with torch.inference_mode():
        for name, words in SMALL.items():
            ids = [run.tokenizer.bos_token_id, *run.tokenizer.encode(" ".join(words)).tolist()]
            nats = []
            for end in range(1, len(ids)):
                window = torch.tensor([ids[max(0, end - 4) : end]])
                hidden_BTD, _ = run.model(window, run.model.initial_memory(1))
                nats.append(run.model.nats(hidden_BTD[:, -1:], torch.tensor([[ids[end]]])).item())
            number = np.cumsum([0, *(token == ord(" ") for token in ids[1:])])[1:]  # a space leads the word after it
            bits = np.bincount(number, nats) / math.log(2)
            expected = {f"{name}.{index}": value for index, value in enumerate(bits, start=1) if index > 1}
            assert {key: found[key] for key in expected} == pytest.approx(expected, abs=1e-6)


def test_ngram_orders_leave_out_the_terms_of_longer_ngrams(run_of) -> None:
    run = run_of(ByteTokenizer(), **NGRAMS)
    times = simulated(run, SMALL, 3)
    fits = fit(run, times, memory_lengths=(5,), ngram_orders=(1, 2, 3))
    names = [row["setting"] for row in fits.rows]
    assert names == ["memory_5_ngram_1", "memory_5_ngram_2", "memory_5_ngram_3"]
    assert [row["ngram_order"] for row in fits.rows] == [1, 2, 3]
    whole = column(fit(run, times, memory_lengths=(5,)), "memory_5")
    assert column(fits, names[2]) == whole
    for order, name in ((1, names[0]), (2, names[1])):
        less = copy.deepcopy(run.model)
        with torch.no_grad():
            for table in list(less.ngrams.tables)[order - 1 :]:
                table.zero_()
        found = column(fits, name)
        assert found == pytest.approx(
            column(fit(Run(less, run.tokenizer, run.config), times, memory_lengths=(5,)), "memory_5")
        )
        assert found != pytest.approx(whole, abs=0.01)


# the regressions


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> ReadingTimeFits:
    run = make_run(tmp_path_factory.mktemp("fits") / "run", noise=0.3, dropout=0.0)
    return fit(run, simulated(run, SMALL, 3, noise=30.0), memory_lengths=(1, 3), spillover=2)


def matrix(fits: ReadingTimeFits, *surprisals: str, spillover: int = 2) -> np.ndarray:
    prefixes = ("", "previous_", "previous_2_")[: spillover + 1]
    names = [
        *surprisals,
        *(f"{prefix}{name}" for prefix in prefixes for name in ("length", "log_frequency")),
        "position",
    ]
    return np.column_stack([*(fits.observations[name] for name in names), np.ones(len(fits.observations["time"]))])


def test_gain_is_the_held_out_log_likelihood(fitted: ReadingTimeFits) -> None:
    """Of a regression for each part of a text, on all others; and coefficients are of all data."""
    time_N, unit_N = fitted.observations["time"], fitted.observations["unit"]
    assert fitted.units == "10 parts of texts"
    assert set(unit_N.tolist()) == set(range(10))
    surprisals = ["memory_3", "previous_memory_3", "previous_2_memory_3"]
    gains = np.zeros(len(time_N))
    for sign, x_NP in ((-1, matrix(fitted)), (1, matrix(fitted, *surprisals))):
        for fold in range(10):
            is_out_N = unit_N % 10 == fold
            weights = np.linalg.lstsq(x_NP[~is_out_N], time_N[~is_out_N])[0]
            error = np.sqrt(np.mean((time_N - x_NP @ weights)[~is_out_N] ** 2))
            gains[is_out_N] += sign * norm.logpdf(time_N[is_out_N], (x_NP @ weights)[is_out_N], error)
    row = fitted.rows[1]
    assert row["delta_nats"] == pytest.approx(gains.mean(), abs=1e-9)
    weights = np.linalg.lstsq(matrix(fitted, *surprisals), time_N)[0]
    assert row["per_bit"] == pytest.approx(weights[0], abs=1e-9)
    assert row["previous_per_bit"] == pytest.approx(weights[1] + weights[2], abs=1e-9)


def test_intervals_are_of_units_drawn_again_for_all_settings_together() -> None:
    """So a constant difference has no spread, however much the units differ; and more of a unit do not narrow it."""
    rng = np.random.default_rng(3)
    of_units = rng.normal(size=40)
    for repeats in (1, 5):
        unit_N, delta_N = np.repeat(np.arange(40), repeats), np.repeat(of_units, repeats)
        rows: list[dict[str, Any]] = [{}, {}]
        _add_intervals(rows, np.array([delta_N, delta_N + 0.5]), unit_N)
        assert [row["behind_nats"] for row in rows] == pytest.approx([0.5, 0])
        assert [row[end] for row in rows for end in ("behind_low", "behind_high")] == pytest.approx([0.5, 0.5, 0, 0])
        for row, mean in zip(rows, (of_units.mean(), of_units.mean() + 0.5), strict=True):
            half = 1.96 * of_units.std() / 40**0.5
            assert (row["delta_low"], row["delta_high"]) == pytest.approx((mean - half, mean + half), abs=0.15 * half)


def test_mixed_model_maximizes_the_likelihood(tmp_path: Path) -> None:
    """The density of all times under dense covariance matrices, maximized over all parameters."""
    run = make_run(tmp_path / "run", noise=0.3, dropout=0.0)
    fits = fit(run, simulated(run, texts(1, 31), 3, noise=10.0), memory_lengths=(3,), mixed=True)
    time_N, observations = fits.observations["time"], fits.observations
    same_reader, same_word = (observations[name][:, None] == observations[name] for name in ("reader", "word_id"))

    def best(x_NP: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        def solve(logs: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
            of_readers, of_words, rest = np.exp(logs)
            covariance = of_readers * same_reader + of_words * same_word + rest * np.eye(len(time_N))
            inverse = np.linalg.inv(covariance)
            errors = np.linalg.inv(x_NP.T @ inverse @ x_NP)
            weights = errors @ x_NP.T @ inverse @ time_N
            rest_N = time_N - x_NP @ weights
            log_det = np.linalg.slogdet(2 * math.pi * covariance)[1]
            return -0.5 * (log_det + rest_N @ inverse @ rest_N), weights, np.sqrt(np.diag(errors))

        found = minimize(lambda logs: -solve(logs)[0], np.array([5.0, 2.0, 4.0]), method="Nelder-Mead")
        return solve(found.x)

    base, _, _ = best(matrix(fits, spillover=1))
    nats, weights, errors = best(matrix(fits, "memory_3", "previous_memory_3", spillover=1))
    (row,) = fits.rows
    assert row["mixed_delta_nats"] * len(time_N) == pytest.approx(nats - base, abs=1e-3)
    assert row["mixed_per_bit"] == pytest.approx(weights[0], rel=1e-2)
    assert row["mixed_per_bit_high"] - row["mixed_per_bit_low"] == pytest.approx(2 * 1.96 * errors[0], rel=1e-2)
    assert row["mixed_p"] == pytest.approx(chi2.sf(2 * (nats - base), 2), rel=1e-2)


@pytest.mark.parametrize("memory_length", [4, 16, 64])
def test_the_memory_of_simulated_readers_is_found(memory_length: int) -> None:
    """It is the best, and each other length is behind it with certainty."""
    config = RunConfig(train=TrainConfig(segment_length=64, memory_length=64))
    run = Run(small_model(vocab_size=256), ByteTokenizer(), config)
    fits = fit(run, simulated(run, texts(12, 120), memory_length), memory_lengths=(4, 16, 64))
    assert fits.best["memory_length"] == memory_length
    assert all(row["behind_low"] > 0 for row in fits.rows if row is not fits.best)
    assert fits.best["per_bit"] == pytest.approx(3, abs=0.3)
    assert fits.units == "12 texts"


# the command


TABLE = "reader,item,word_number,word,time\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run that was trained on a corpus, and a table of times."""
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    run = make_run(folder / "run", noise=0.3, dropout=0.0)
    times = simulated(run, SMALL, 3)
    rows = zip(times.reader_N, times.item_N, times.word_N, times.time_N, strict=True)
    items = list(SMALL)
    lines = [
        f"r{reader},{items[item]},{word + 1},{SMALL[items[item]][word]},{time}" for reader, item, word, time in rows
    ]
    Path("times.csv").write_text(TABLE + "\n".join([*lines, "r0,t0,7,NA,"][:-1]) + "\n")
    Path("texts.csv").write_text("item,words\n" + "".join(f"{name},{' '.join(text)}\n" for name, text in SMALL.items()))
    Path("frequencies.csv").write_text("word,count\n" + "".join(f"{word},{n}\n" for word, n in counts(SMALL).items()))
    return folder


BEHIND = ("behind_nats", "behind_low", "behind_high")
FLAGS = "--memory-lengths 1,3 --attention-windows 2 --frequencies frequencies.csv"


def test_the_command_prints_what_the_library_computes(folder: Path) -> None:
    result = txl(*f"reading-times run times.csv {FLAGS} --json --out o.csv --plot o.svg".split())
    assert result.status == 0, result.err
    assert "note: 8 rows are not fitted: first words of texts" in result.err
    times = read_reading_times("times.csv", Path("times.csv").read_bytes())
    fits = fit(load("run", device="cpu"), times, memory_lengths=(1, 3), attention_windows=(2,))
    assert {name: result.object[name] for name in fits.as_dict()} == fits.as_dict()
    assert [row["setting"] for row in fits.rows] == ["memory_1", "memory_3", "window_2"]
    rows = list(csv.DictReader(io.StringIO(Path("o.csv").read_text())))
    assert len(rows) == result.object["readings"] == 4 * 2 * 29
    assert float(rows[5]["previous_window_2"]) == fits.observations["previous_window_2"][5]
    formula = result.object["formula"]
    fixed = formula.removeprefix("lmer(time ~ ").partition(" + (1")[0].split(" + ")
    assert set(fixed) <= rows[0].keys()
    assert {"reader", "word_id"} <= rows[0].keys()
    assert "<svg" in Path("o.svg").read_text()
    table = txl(*f"reading-times run times.csv {FLAGS} --texts texts.csv --text-column words --mixed".split())
    assert "232 readings, 10 parts of texts held out in turn" in table.out
    assert "memory_3" in table.out
    assert "mixed models" in table.out
    words = (
        "reading-times run times.csv --memory-lengths none --attention-windows 2 --frequencies frequencies.csv --json"
    )
    # read in other batches, so up to rounding
    (row,) = txl(*words.split()).object["settings"]
    expected = {**fits.rows[2], **dict.fromkeys(BEHIND, 0.0)}
    assert row.keys() == expected.keys()
    for name, value in expected.items():
        near = pytest.approx(value, rel=1e-4, abs=1e-6) if isinstance(value, float) else value
        assert row[name] == near, name
    assert formula in table.err


def test_plot_shows_gains_and_differences(fitted: ReadingTimeFits) -> None:
    gains, behind = draw_fits(fitted).axes
    assert [text.get_text() for text in gains.get_legend().get_texts()] == ["memory length"]
    for axes, name in ((gains, "delta_nats"), (behind, "behind_nats")):
        (x, y) = axes.containers[0].lines[0].get_data()
        assert x.tolist() == [1, 3]
        assert y.tolist() == [1000 * row[name] for row in fitted.rows]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("times.csv --time-column RT", "no column 'RT'; .* name yours with --time-column"),
        ("times.csv --memory-length 4", "no option --memory-length"),
        ("times.csv --memory-lengths 4,x", "memory-lengths"),
        ("times.csv --ngram-orders 2 --frequencies frequencies.csv", "no n-gram embeddings; leave --ngram-orders out"),
        ("times.csv --out times.csv", "times.csv exists already"),
        ("times.csv --texts other.csv", "item t0, word 1: .* in the table and 'other' in the text"),
        ("times.csv", "does not record its corpus; pass --corpus DIR"),
        ("missing.csv", "missing.csv"),
        ("times.csv --texts other.csv --item-column text_id", "no column 'text_id'; .* name yours with --item-column$"),
        ("times.csv --frequencies frequencies.csv --spillover 90", "a regression; not fitted: {'first words"),
        ("times.csv --reader-column none --frequencies frequencies.csv", "a second row; the first is"),
        ("beginning.csv --texts long.csv --text-column words --frequencies frequencies.csv",
         "all 116 readings are in one text, or one part of it, so .* held out; give readings of more texts, or .* was"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(folder: Path, words: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    Path("other.csv").write_text("item,text\nt0,other words\n")
    Path("long.csv").write_text(f"item,words\nt0,{' '.join(SMALL['t0'] * 10)}\n")
    lines = [line for line in Path("times.csv").read_text().splitlines() if ",t1," not in line]
    Path("beginning.csv").write_text("\n".join(lines))
    assert_refused(folder, f"reading-times run {words}", message, capfd)


def test_settings_that_are_compared_and_too_few_readings_are_refused(folder: Path) -> None:
    run, times = load("run", device="cpu"), read_reading_times("times.csv", Path("times.csv").read_bytes())
    with pytest.raises(UserError, match="memory_length is what is compared; give memory_lengths"):
        fit(run, times, EvaluationConfig(memory_length=4))
    with pytest.raises(UserError, match="are empty; give at least one length"):
        fit(run, times, memory_lengths=())
    few = read_reading_times("t.csv", (TABLE + "a,1,1,b,300\na,1,2,b,300\na,1,3,b,310\n").encode())
    with pytest.raises(UserError, match=r"2 readings are left, too few .*first words of texts"):
        fit(run, few)
    same = replace(times, time_N=np.full_like(times.time_N, 250.0))
    for settings in ({"mixed": True}, {"log_times": True}):
        with pytest.raises(UserError, match="all reading times are the same"):
            fit(run, same, **settings)
    with pytest.raises(UserError, match="two readers or more"):
        fit(run, few, mixed=True)
