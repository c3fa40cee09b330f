"""How well surprisal predicts reading times, by how much of the text before a word the model sees.

For each setting (a memory length or attention window, and an order of n-grams) two regressions are compared: a baseline
of length, log-frequency and position of the word, with length and log-frequency of those before it (spill-over), and
the same with the surprisal of all these words. The measure is the difference of their log-likelihood per reading, in
nats (Goodkind and Bicknell 2018; Wilcox et al. 2020).

- Ordinary regression is cross-validated: each unit, a text or a part of one, is predicted from others, so the
  difference can be negative. Intervals are of a bootstrap over units, the same ones drawn for all settings, which so
  can be compared in pairs.
- The mixed model has random intercepts of readers and of words (crossed), and is fitted by maximum likelihood to all
  readings: a likelihood ratio test, and a Wald interval of the coefficient.

Shape suffixes: N readings, W words of all texts, P predictors, R readers, U units, S settings, B bootstrap samples;
C columns: predictors, time, and readers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from transformer_xl.apps.surprisal.reading_time_config import ReadingTimeSweep
from transformer_xl.apps.surprisal.reading_times import ReadingTimes, bare
from transformer_xl.apps.surprisal.surprisal import Whitespace, WordTokens, check_whitespace
from transformer_xl.config import EvaluationConfig, UserError, check_type
from transformer_xl.config.extras import missing_extra
from transformer_xl.evaluation.evaluate import check_token_ids, override_config
from transformer_xl.evaluation.metrics import bootstrap_means
from transformer_xl.evaluation.plan import EvaluationPlan, ProgressCallback, check_progress
from transformer_xl.files import as_path, csv_text, write_text
from transformer_xl.inference import TokenModel, prepare_inference
from transformer_xl.run import Run, check_run
from transformer_xl.text.sources.items import TextItem

Floats = npt.NDArray[np.float64]
_MIN_UNITS = 10


@dataclass(frozen=True, eq=False)
class ReadingTimeFits:
    """The fit of each setting, and the readings with all predictors."""

    rows: list[dict[str, Any]]
    """For each setting: its name and limits; `surprisal_bits`, the mean per reading; `delta_nats`, the difference of
    held-out log-likelihood per reading, and `behind_nats`, how much less it is than that of the best setting;
    `per_bit`, by how much a bit of the word's surprisal changes the time, and `previous_per_bit`, the same of the words
    before. Of mixed models: `mixed_delta_nats`, `mixed_p` and `mixed_per_bit`. Names with `_low` and `_high` are ends
    of intervals of 95%."""
    observations: dict[str, npt.NDArray[Any]]
    """Columns of the readings that were fitted, by name."""
    units: str
    """What was held out and resampled."""
    left_out: dict[str, int]
    """Number of rows of the table that were not fitted, by the reason."""
    formula: str
    """The mixed model of the best setting for R's lme4."""

    @property
    def best(self) -> dict[str, Any]:
        """The row of the setting with the largest difference."""
        return max(self.rows, key=lambda row: row["delta_nats"])

    def as_dict(self) -> dict[str, Any]:
        """Return all but the readings, for JSON."""
        counts = {"readings": len(self.observations["time"]), "units": self.units, "left_out": self.left_out}
        return {**counts, "best": self.best["setting"], "settings": self.rows, "formula": self.formula}

    def to_csv(self, file: Path | str | None = None) -> str:
        """Return the readings with all predictors as CSV, for R, and write them to a file unless that is None.

        Raises:
            UserError: the file system refuses.
        """
        names, columns = list(self.observations), [values.tolist() for values in self.observations.values()]
        text = csv_text(names, (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)))
        if file is not None:
            write_text(as_path(file, "file", "give the path of a .csv file"), text)
        return text


@dataclass(frozen=True)
class _Setting:
    """How the texts are read for one fit."""

    name: str
    """Such as memory_64 or memory_64_ngram_2."""
    plan: EvaluationPlan
    ngram_order: int | None
    """The longest n-grams whose embeddings are added, or None for all."""

    def model_of(self, run: Run) -> TokenModel:
        """Return the model of a run that reads the texts."""
        if self.ngram_order is None:
            return self.plan.model_of(run)
        assert run.model.ngrams is not None
        # a copy with the same parameters, but zeros as the projections of longer n-grams, so that these add nothing
        longer = list(run.model.ngrams.projections)[self.ngram_order - 1 :]
        parameters = {id(parameter): parameter for parameter in run.model.parameters()}
        parameters |= {id(one): nn.Parameter(torch.zeros_like(one), requires_grad=False) for one in longer}
        return prepare_inference(copy.deepcopy(run.model, parameters), self.plan.dtype)


def _settings(run: Run, sweep: ReadingTimeSweep, config: EvaluationConfig | None) -> list[_Setting]:
    """Return how `fit_reading_times` reads the texts; arguments as there."""
    given, model = config or EvaluationConfig(), run.model.config
    if fixed := given.model_fields_set & {"memory_length", "attention_window", "method"}:
        raise UserError(f"{min(fixed)} is what is compared; give memory_lengths or attention_windows")
    if wrong := [n for n in sweep.ngram_orders if run.model.ngrams is None or n > model.max_ngram]:
        has = "no n-gram embeddings; leave ngram_orders out" if run.model.ngrams is None else ""
        raise UserError(f"ngram_orders {wrong[0]}: the model has {has or f'n-grams of 1 to {model.max_ngram} tokens'}")
    limits, own_window = dict[str, dict[str, Any]](), model.limit("attention_window")
    for length in sweep.memory_lengths:
        limits[f"memory_{length}"] = {"memory_length": length}
        if given.segment_length is None and run.model.limits_visible and not model.attends_empty_slots:
            # as many keys for each token, wherever it is in its segment
            limits[f"memory_{length}"] |= {"attention_window": min(length + 1, own_window or length + 1)}
        elif given.segment_length is None:
            limits[f"memory_{length}"] |= {"segment_length": 1}
    for length in sweep.attention_windows:
        limits[f"window_{length}"] = {"method": "sliding-window", "memory_length": 0, "attention_window": length}
    settings = list[_Setting]()
    for name, limit in limits.items():
        plan = EvaluationPlan.for_texts(run, override_config(given, limit))
        plan = plan if "reset_memory" in given.model_fields_set else replace(plan, reset_memory=True)
        settings += [_Setting(f"{name}_ngram_{n}" if n else name, plan, n) for n in sweep.ngram_orders or [None]]
    if not settings:
        raise UserError("memory_lengths and attention_windows are empty; give at least one length")
    return settings


def fit_reading_times(
    run: Run,
    times: ReadingTimes,
    word_counts: Mapping[str, int],
    sweep: ReadingTimeSweep | None = None,
    config: EvaluationConfig | None = None,
    *,
    whitespace: Whitespace = "leading",
    progress: ProgressCallback | None = None,
) -> ReadingTimeFits:
    """Fit reading times by surprisal at several memory lengths, attention windows and orders of n-grams.

        times = read_reading_times("times.csv", Path("times.csv").read_bytes())
        fits = fit_reading_times(
            run, times, corpus_word_counts(run.open_corpus()), ReadingTimeSweep(memory_lengths=(4, 16, 64))
        )

    Args:
        run: a loaded run.
        times: the reading times.
        word_counts: how often each word, as `bare` has it, occurs; its log-frequency is log(count + 1).
        sweep: what is compared and fitted, or None for `ReadingTimeSweep()`.
        config: settings that override individual evaluation settings of the run, such as `dtype`; memory is empty at
            the start of each text unless `reset_memory` is False.
        whitespace: as for `surprisal`.
        progress: called with the number of tokens read since the last call.

    Raises:
        UserError: settings contradict each other, a text cannot be encoded, too few readings are left, they are all
            in one unit, or a mixed model is asked for with one reader or without scipy.
    """
    check_run(run)
    check_progress(progress)
    check_whitespace(whitespace, run.tokenizer)
    check_type(times, ReadingTimes, "times", "give read_reading_times(...)")
    check_type(word_counts, Mapping, "word_counts", "give a mapping from words to counts")
    check_type(sweep, (ReadingTimeSweep, type(None)), "sweep", "give ReadingTimeSweep(...)")
    config = override_config(config, {})
    sweep = sweep or ReadingTimeSweep()
    settings = _settings(run, sweep, config)
    if sweep.mixed and len(times.readers) < 2:
        raise UserError("mixed needs two readers or more; name their column with reader_column, or leave it out")
    items = [TextItem({"item": name}, " ".join(words), document=name) for name, words in times.texts.items()]
    words = WordTokens.of_items(run.tokenizer, items)
    check_token_ids(words.tokens_K, run.model.config.vocab_size)
    readings = _Readings(times, [row for row in words.rows if row["word"]], sweep.spillover)
    is_word_R = np.array([bool(row["word"]) for row in words.rows])
    names = [bare(row["word"]) for row in words.rows if row["word"]]
    baseline = readings.add("length", np.array(list(map(len, names))))
    baseline += readings.add("log_frequency", np.log([word_counts.get(name, 0) + 1.0 for name in names]))
    baseline += ["position"]
    time_N = np.log(readings.columns["time"]) if sweep.log_times else readings.columns["time"]
    if len(time_N) < 10 * len(baseline):
        raise UserError(f"{len(time_N)} readings are left, too few for a regression; not fitted: {readings.left_out}")
    if not readings.columns["unit"].any():
        raise UserError(
            f"all {len(time_N)} readings are in one text, or one part of it, so nothing can be held out; give readings "
            "of more texts, or this text only as far as it was read"
        )
    if not time_N.var() > 1e-18 * np.square(time_N).mean():
        raise UserError("all reading times are the same, so there is nothing to fit; name another time_column")
    base_nats_N, _ = readings.held_out(baseline, time_N)
    base_mixed_nats = readings.mixed(baseline, time_N)[0] if sweep.mixed else 0.0
    rows, deltas, predictors = list[dict[str, Any]](), list[Floats](), dict[str, list[str]]()
    for setting in settings:
        name, limits, model = setting.name, setting.plan.context_limits, setting.model_of(run)
        bits_R = words.surprisal_bits(model, setting.plan, words.start_I, whitespace=whitespace, progress=progress)
        surprisals = readings.add(name, bits_R[is_word_R])
        predictors[name] = surprisals + baseline
        nats_N, coefficients_P = readings.held_out(predictors[name], time_N)
        deltas.append(nats_N - base_nats_N)
        is_window = setting.plan.method == "sliding-window"
        row: dict[str, Any] = {"setting": name, "memory_length": None if is_window else limits.memory_length}
        row |= {"attention_window": limits.attention_window, "ngram_order": setting.ngram_order}
        row |= {"surprisal_bits": float(readings.columns[name].mean()), "per_bit": float(coefficients_P[0])}
        row["previous_per_bit"] = float(coefficients_P[1 : len(surprisals)].sum())
        if sweep.mixed:
            from scipy.stats import chi2

            nats, coefficient, error = readings.mixed(predictors[name], time_N)
            row |= {"mixed_delta_nats": (nats - base_mixed_nats) / len(time_N), "mixed_per_bit": coefficient}
            row |= {"mixed_per_bit_low": coefficient - 1.96 * error, "mixed_per_bit_high": coefficient + 1.96 * error}
            row["mixed_p"] = float(chi2.sf(2 * (nats - base_mixed_nats), len(surprisals)))
        rows.append(row)
    _add_intervals(rows, np.array(deltas), readings.columns["unit"])
    best = max(rows, key=lambda row: row["delta_nats"])["setting"]
    fixed = f"{'log(time)' if sweep.log_times else 'time'} ~ {' + '.join(predictors[best])}"
    formula = f"lmer({fixed} + (1 | reader) + (1 | word_id), data = readings, REML = FALSE)"
    return ReadingTimeFits(rows, readings.columns, readings.units, readings.left_out, formula)


class _Readings:
    """The readings that are fitted: those whose word, and the words before it, have all predictors.

    Args:
        times: the readings of the table.
        words: the rows of all words.
        spillover: number of words before each.
    """

    def __init__(self, times: ReadingTimes, words: list[dict[str, Any]], spillover: int) -> None:
        sizes_I = np.array([len(text) for text in times.texts.values()])
        word_N = np.cumsum([0, *sizes_I[:-1]])[times.item_N] + times.word_N
        is_unknown_W = np.array([row["num_unknown"] > 0 for row in words])
        is_first_N = times.word_N < spillover
        is_unknown_N = ~is_first_N & np.any(
            [is_unknown_W[np.maximum(word_N - lag, 0)] for lag in range(spillover + 1)], axis=0
        )
        counts = {"first words of texts": int(is_first_N.sum()), "unknown words": int(is_unknown_N.sum())}
        self.left_out = {**times.left_out, **{why: count for why, count in counts.items() if count}}
        kept_N = ~is_first_N & ~is_unknown_N
        self._lags, self._word_N, self._reader_N = range(spillover + 1), word_N[kept_N], times.reader_N[kept_N]
        parts = math.ceil(_MIN_UNITS / len(sizes_I))  # of each text
        unit_N = times.item_N * parts + times.word_N * parts // sizes_I[times.item_N]
        unit_N = np.unique(unit_N[kept_N], return_inverse=True)[1]
        self.units = f"{unit_N.max(initial=-1) + 1} {'texts' if parts == 1 else 'parts of texts'}"
        rows = [words[index] for index in self._word_N]
        columns: dict[str, Any] = {"reader": [times.readers[index] for index in self._reader_N]}
        columns |= {"item": [row["item"] for row in rows], "position": [row["word_number"] for row in rows]}
        columns["word_id"] = [f"{row['item']}.{row['word_number']}" for row in rows]
        columns |= {"word": [row["word"] for row in rows], "unit": unit_N, "time": times.time_N[kept_N]}
        self.columns = {name: np.asarray(values) for name, values in columns.items()}

    def add(self, name: str, values_W: npt.NDArray[Any]) -> list[str]:
        """Add a property of words as columns, one for the word of each reading and one for each before it.

        Returns:
            the names of the columns.
        """
        names = [name, f"previous_{name}", *(f"previous_{lag}_{name}" for lag in self._lags[2:])][: len(self._lags)]
        self.columns |= {one: values_W[self._word_N - lag] for lag, one in enumerate(names)}
        return names

    def _matrix(self, predictors: Sequence[str]) -> tuple[Floats, Floats]:
        """Return standardized predictors and ones, (N, P + 1), and the scale of each predictor, (P,)."""
        x_NP = np.column_stack([self.columns[name] for name in predictors]).astype(float)
        scale_P = np.where(x_NP.std(0) > 0, x_NP.std(0), 1)
        return np.column_stack([(x_NP - x_NP.mean(0)) / scale_P, np.ones(len(x_NP))]), scale_P

    def held_out(self, predictors: Sequence[str], time_N: Floats) -> tuple[Floats, Floats]:
        """Return the held-out log-likelihood of each time in nats, (N,), and the coefficients of all data, (P,).

        Each fold is of whole units, and is predicted by the regression on the other folds.
        """
        (x_NP, scale_P), fold_N = self._matrix(predictors), self.columns["unit"] % _MIN_UNITS
        nats_N = np.empty(len(time_N))
        for fold in np.unique(fold_N):
            is_out_N = fold_N == fold
            coefficients_P = np.linalg.lstsq(x_NP[~is_out_N], time_N[~is_out_N])[0]
            squared_N = np.square(time_N - x_NP @ coefficients_P)
            variance = max(squared_N[~is_out_N].mean(), 1e-12 * time_N.var())  # for times that predictors give exactly
            nats_N[is_out_N] = -0.5 * (math.log(2 * math.pi * variance) + squared_N[is_out_N] / variance)
        return nats_N, np.linalg.lstsq(x_NP, time_N)[0][:-1] / scale_P

    def mixed(self, predictors: Sequence[str], time_N: Floats) -> tuple[float, float, float]:
        """Fit a linear model with crossed random intercepts of readers and words by maximum likelihood.

        With variances a and c of readers and words, relative to that of the residuals, the covariance of the times is
        V = I + a Z Z' + c Y Y', with the indicators Z of readers and Y of words. Y'Y is diagonal, so all products with
        the inverse of V follow from sums by word and a matrix as large as there are readers (Woodbury's identity); a
        and c are searched for. lme4 maximizes the same likelihood; statsmodels needs dense matrices of readings by
        words.

        Returns:
            the log-likelihood in nats, and the coefficient of the first predictor with its standard error.

        Raises:
            UserError: scipy is not installed.
        """
        try:
            from scipy.optimize import minimize
        except ImportError as error:
            raise missing_extra("scipy", "stats") from error
        x_NP, scale_P = self._matrix(predictors)
        x_NP, reader_N = np.column_stack([x_NP, time_N - time_N.mean()]), self._reader_N
        word_N = np.unique(self._word_N, return_inverse=True)[1]
        num, num_words, num_readers = x_NP.shape[1], word_N.max() + 1, reader_N.max() + 1
        size_W = np.bincount(word_N).astype(float)
        counts_WR = np.bincount(word_N * num_readers + reader_N, minlength=num_words * num_readers)
        sums_WP = np.column_stack([np.bincount(word_N, column_N) for column_N in x_NP.T])
        sums_RP = np.column_stack([np.bincount(reader_N, column_N, num_readers) for column_N in x_NP.T])
        sums_WC = np.column_stack([sums_WP, counts_WR.reshape(num_words, num_readers)])
        products_CC = np.block([[x_NP.T @ x_NP, sums_RP.T], [sums_RP, np.diag(np.bincount(reader_N))]])

        def solve(log_ratios: Floats) -> tuple[float, float, float]:
            """Return the results at the logarithms of a and c; the log-likelihood with its sign changed."""
            of_readers, of_words = np.exp(log_ratios)
            within_CC = products_CC - sums_WC.T @ (sums_WC / (size_W + 1 / of_words)[:, None])
            readers_RR = within_CC[num:, num:] + np.eye(num_readers) / of_readers
            x_PP = within_CC[:num, :num] - within_CC[:num, num:] @ np.linalg.solve(readers_RR, within_CC[num:, :num])
            inverse_PP = np.linalg.pinv(x_PP[:-1, :-1], hermitian=True)
            coefficients_P = inverse_PP @ x_PP[:-1, -1]
            variance = (x_PP[-1, -1] - x_PP[:-1, -1] @ coefficients_P) / len(time_N)
            variance = max(variance, 1e-12 * time_N.var())
            log_det = np.log1p(of_words * size_W).sum() + np.linalg.slogdet(readers_RR)[1]
            log_det += num_readers * math.log(of_readers)
            loss = 0.5 * (len(time_N) * (math.log(2 * math.pi * variance) + 1) + log_det)
            error = math.sqrt(variance * inverse_PP[0, 0]) / scale_P[0]
            return float(loss), float(coefficients_P[0] / scale_P[0]), error

        def loss_of(log_ratios: Floats) -> float:
            return solve(log_ratios)[0]

        options = {"xatol": 1e-4, "fatol": 1e-6}
        start, bounds = np.array([-2.0, -3.0]), [(-20, 10)] * 2
        found = minimize(loss_of, start, method="Nelder-Mead", bounds=bounds, options=options)
        loss, coefficient, error = solve(found.x)
        return -loss, coefficient, error


def _add_intervals(rows: list[dict[str, Any]], delta_SN: Floats, unit_N: npt.NDArray[np.int64]) -> None:
    """Add to each row its difference, and how far it is behind the best, with intervals of a bootstrap over units."""
    sum_SU, size_U = np.array([np.bincount(unit_N, delta_N) for delta_N in delta_SN]), np.bincount(unit_N)
    delta_SB, mean_S = bootstrap_means(sum_SU, size_U), delta_SN.mean(1)
    best = mean_S.argmax()
    behind_S, behind_SB = mean_S[best] - mean_S, delta_SB[best] - delta_SB
    for name, values_S, samples_SB in (("delta", mean_S, delta_SB), ("behind", behind_S, behind_SB)):
        low_S, high_S = np.percentile(samples_SB, [2.5, 97.5], axis=1)
        for row, *values in zip(rows, values_S.tolist(), low_S.tolist(), high_S.tolist(), strict=True):
            row |= dict(zip((f"{name}_nats", f"{name}_low", f"{name}_high"), values, strict=True))
