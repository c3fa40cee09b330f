"""Runs compared: the settings that differ, and the losses on one text with intervals of their differences.

Runs with one tokenizer are compared token by token: the text is cut into segments of as many tokens. With different
tokenizers they are compared by byte, in documents, or in lines where there are few documents. The interval of 95% is of
a paired bootstrap: segments (or groups of consecutive documents or lines) are drawn with replacement, the same for all
runs, so what makes a text hard for all of them does not widen it.

Shape suffixes: K tokens of the text, U units (segments, or groups of documents or lines), N documents or lines, B
bootstrap samples.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from transformer_xl.apps.runs.records import RunRecord
from transformer_xl.config import UserError, check_type, flatten
from transformer_xl.display import Displayed
from transformer_xl.evaluation.evaluate import check_max_tokens, check_token_ids, losses_in_order
from transformer_xl.evaluation.metrics import Sums, bootstrap_means
from transformer_xl.evaluation.plan import EvaluationPlan, ProgressCallback, TokenizedText
from transformer_xl.evaluation.score import encode_part
from transformer_xl.files import as_path
from transformer_xl.run import Run, load
from transformer_xl.run_folder import RunFolder
from transformer_xl.text.sources.archives import read_text_file
from transformer_xl.text.token_store import Corpus, Tokens
from transformer_xl.text.tokenizers import describe_difference

Floats = npt.NDArray[np.float64]
_MAX_UNITS, _MIN_UNITS = 1000, 10
_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
_MIN_TOKENS, _MIN_BYTES = 128, 512  # of a unit: neighbouring tokens are surprising together


@dataclass(frozen=True, repr=False)
class RunComparison(Displayed):
    """The differences of runs."""

    runs: Mapping[str, RunRecord]
    """The runs by name: that of the folder, or its path if two have one name."""
    settings: Mapping[str, list[Any]]
    """The settings that differ, by name, with the value of each run (None where it has no such setting)."""
    losses: list[dict[str, Any]]
    """For each run `nats_per_token`, `bits_per_byte`, number of tokens and method, and the `difference` from the first
    one in `measure`, with the ends of its interval, `difference_low` and `difference_high` (None if the text is too
    short for one). Empty if no text was given."""
    measure: str | None = None
    """What differences are in: nats_per_token, or bits_per_byte if tokenizers differ."""
    text: str | None = None
    """What was scored, and the units that were resampled."""

    def as_dict(self) -> dict[str, Any]:
        """Return all values, for JSON."""
        rows = [{"name": name, **run.as_dict()} for name, run in self.runs.items()]
        scored = {"text": self.text, "measure": self.measure, "losses": self.losses}
        return {"runs": rows, "settings": dict(self.settings), **scored}


@dataclass(frozen=True, eq=False)
class CommonText:
    """A text that several runs can read: as tokens of their one tokenizer, or as bytes."""

    name: str
    num_bytes: float
    is_one_tokenizer: bool
    """Whether all runs have the same tokenizer."""
    pieces: Sequence[bytes] = ()
    """Documents, or lines where there are few; empty if there are tokens."""
    starts: Sequence[int] = ()
    """Of each document, the index of its first token or piece."""
    tokens_K: Tokens | None = None

    @staticmethod
    def open(
        runs: Sequence[RunRecord],
        *,
        on: Path | str | None = None,
        corpus: Path | str | None = None,
        split: str = "valid",
        max_tokens: int | None = None,
    ) -> CommonText:
        """Open a text for runs.

        Args:
            runs: the runs.
            on: a file with a text, or None for a corpus.
            corpus: folder of a corpus, or None for the one that all runs were trained on.
            split: its split.
            max_tokens: number of tokens of a corpus, from the start of the split; None: all.

        Raises:
            UserError: `max_tokens` is below 1, the runs have no corpus in common, the file or split cannot be read, or
                the tokenizers of runs and corpus differ, and that of the corpus does not give back its text exactly.
        """
        check_max_tokens(max_tokens)
        for run in runs:
            check_type(run, RunRecord, "a run", "give RunRecord.read('runs/mine')")
        tokenizers = [RunFolder.open(run.path).tokenizer for run in runs]
        is_one = not any(describe_difference(tokenizer, tokenizers[0]) for tokenizer in tokenizers)
        if on is not None:
            if corpus is not None:
                raise UserError("on=FILE and corpus=DIR were both given; leave one of them out")
            content = read_text_file(as_path(on, "on", "give the path of a text"))
            return CommonText(str(on), len(content), is_one, [content] if is_one else _LINE.findall(content), [0])
        found = {run.config.corpus.path if run.config.corpus else None for run in runs}
        if corpus is None and (len(found) > 1 or None in found):
            names = " and ".join(sorted(name or "a corpus that is not recorded" for name in found))
            raise UserError(f"the runs were trained on {names}, so no text is common; give on=FILE or corpus=DIR")
        opened = Corpus.open(corpus or next(iter(found)) or "")
        text = opened.split(split, verify=True)
        tokens_K, name = text.first(max_tokens), f"{opened.path}, {text.name}"
        starts = [start for start in text.document_starts.tolist() if start < len(tokens_K)]
        if is_one and not describe_difference(opened.tokenizer, tokenizers[0]):
            num_bytes = Sums.of_split(0.0, opened.tokenizer, text, tokens_K).bytes
            return CommonText(name, num_bytes, is_one, (), starts, tokens_K)
        if not opened.tokenizer.is_lossless:
            raise UserError(
                f"the tokenizer of {opened.path} is not that of all runs, and does not give back the text exactly; "
                "give the text itself: on=FILE"
            )
        documents = [opened.tokenizer.decode_bytes(tokens_K[a:b]) for a, b in pairwise([*starts, len(tokens_K)])]
        if len(tokens_K) < text.num_tokens:  # the last one may end within a character
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            decoder.decode(documents[-1])
            documents[-1] = documents[-1][: len(documents[-1]) - len(decoder.getstate()[0])]
        parts = [_LINE.findall(one) if len(documents) < _MIN_UNITS else [one] for one in documents]
        first = np.cumsum([0, *map(len, parts[:-1])]).tolist()
        return CommonText(name, sum(map(len, documents)), is_one, [piece for part in parts for piece in part], first)

    def read_by(self, run: Run, progress: ProgressCallback | None = None) -> tuple[Floats, Floats, EvaluationPlan]:
        """Return the losses in nats of tokens and of pieces, and how the run reads the text: with `for_texts`.

        A piece without tokens, such as an empty line, has a loss of 0.

        Raises:
            UserError: the run cannot encode the text, or has no tokens for it.
        """
        tokens_K, starts_N = self.tokens_K, np.array(self.starts)
        piece_K = np.zeros(0, dtype=np.int64)  # of each token, if there are pieces
        if tokens_K is None:
            parts = [encode_part(run.tokenizer, self.name, content) for content in self.pieces]
            tokens_K = np.concatenate(parts or [np.zeros(0, dtype=np.uint8)])
            piece_K = np.repeat(np.arange(len(parts)), list(map(len, parts)))
            starts_N = np.searchsorted(piece_K, starts_N)
            if not len(tokens_K):
                raise UserError(f"{self.name}: the text is empty; give one with at least one token")
        check_token_ids(tokens_K, run.model.config.vocab_size)
        plan, bytes_per_token = EvaluationPlan.for_texts(run), self.num_bytes / len(tokens_K)

        def advance(num_tokens: int) -> None:
            if progress:
                progress(round(num_tokens * bytes_per_token))

        text = TokenizedText(tokens_K, run.tokenizer.bos_token_id, starts_N)
        nats_K = losses_in_order(plan.model_of(run), text, plan, advance)
        nats_N = np.zeros(len(self.pieces))
        np.add.at(nats_N, piece_K, nats_K[: len(piece_K)])
        return nats_K, nats_N, plan


def compare_runs(
    runs: Sequence[Path | str],
    text: CommonText | None = None,
    *,
    device: str = "auto",
    progress: ProgressCallback | None = None,
) -> RunComparison:
    """Compare runs: the settings that differ, and, if a text is given, their losses on it.

        runs = ["runs/a", "runs/b"]
        compare_runs(runs, CommonText.open([RunRecord.read(run) for run in runs], on="page.txt")).losses

    Args:
        runs: folders of two runs or more.
        text: a text that all can read, or None to load no weights. Each run reads it as `evaluate` does, with its own
            settings of evaluation and the memory length that was measured for it, but with memory in place of method
            dynamic.
        device: as for `load`.
        progress: called with the number of bytes scored since the last call.

    Raises:
        UserError: fewer than two runs were given, one is no run or is given twice, or for the reasons of `load` and
            `evaluate`.
    """
    check_type(text, (CommonText, type(None)), "text", "give CommonText.open(...)")
    records = named_records(runs)
    if len(records) < 2:
        raise UserError("a comparison needs two runs or more; give their folders, such as runs/a runs/b")
    flat = [flatten(run.config.model_dump(mode="json")) for run in records.values()]
    for values, run in zip(flat, records.values(), strict=True):
        values["history"] = [str(change) for change in run.config.history]
    names = dict.fromkeys(name for values in flat for name in values)
    settings = {name: [values.get(name) for values in flat] for name in names}
    differ = {name for name, values in settings.items() if len(set(map(json.dumps, values))) > 1}
    settings = {name: settings[name] for name in settings if name in differ and not name.endswith("_sha256")}
    if text is None:
        return RunComparison(records, settings, [])
    read = list[tuple[Floats, Floats, EvaluationPlan]]()
    for record in records.values():
        run = load(record.path, device=device)
        read.append(text.read_by(run, progress))
        del run  # so that one model at a time is in memory
    losses = [
        {
            "run": name,
            "tokens": len(nats_K),
            "nats_per_token": float(nats_K.mean()),
            "bits_per_byte": float(nats_K.sum()) / math.log(2) / text.num_bytes,
            "memory_length": plan.context_limits.memory_length,
            "method": plan.method,
        }
        for name, (nats_K, _, plan) in zip(records, read, strict=True)
    ]
    measure = "nats_per_token" if text.is_one_tokenizer else "bits_per_byte"
    units = _add_differences(losses, read, text, measure)
    return RunComparison(records, settings, losses, measure, f"{text.name}; {units}")


def named_records(runs: Sequence[Path | str]) -> dict[str, RunRecord]:
    """Read the records of runs, by the name of the folder, or its path where two have one name.

    Raises:
        UserError: one is no run, is damaged, or is given twice; or they are one folder, not a list.
    """
    if isinstance(runs, str | Path):
        raise UserError(f"runs is one folder, {str(runs)!r}; give a list of them, such as ['runs/a', 'runs/b']")
    paths = [as_path(run, "run", "give the folder of a run") for run in runs]
    names = [path.resolve().name for path in paths]
    names = [str(path) if names.count(name) > 1 else name for path, name in zip(paths, names, strict=True)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{twice} was given twice; list each run once")
    return {name: RunRecord.read(path) for name, path in zip(names, paths, strict=True)}


def _add_differences(
    losses: list[dict[str, Any]], read: list[tuple[Floats, Floats, EvaluationPlan]], text: CommonText, measure: str
) -> str:
    """Add to the rows the differences from the first, with intervals; return what was resampled."""
    if text.is_one_tokenizer:
        units, nats_SN, scale, least = "segments of {} tokens", [nats_K for nats_K, _, _ in read], 1.0, _MIN_TOKENS
        size_N = np.ones(len(nats_SN[0]))
    else:
        name = "lines" if len(text.pieces) > len(text.starts) else "documents"
        units, nats_SN, scale, least = (
            f"groups of {name} of {{}} bytes",
            [one[1] for one in read],
            1 / math.log(2),
            _MIN_BYTES,
        )
        size_N = np.array([len(piece) for piece in text.pieces], dtype=np.float64)
    # consecutive ones form units of about one size
    num_units = min(_MAX_UNITS, len(size_N), int(size_N.sum() / least))
    unit_N = ((size_N.cumsum() - size_N) * max(1, num_units) / size_N.sum()).astype(np.int64)
    size_U = np.bincount(unit_N, size_N)
    delta_SU = np.array([np.bincount(unit_N, nats_N - nats_SN[0]) for nats_N in nats_SN])[:, size_U > 0]
    size_U = size_U[size_U > 0]
    has_interval = len(size_U) >= _MIN_UNITS
    means_SB = scale * bootstrap_means(delta_SU, size_U) if has_interval else np.zeros((len(read), 1))
    for row, (low, high) in list(zip(losses, np.percentile(means_SB, [2.5, 97.5], axis=1).T.tolist(), strict=True))[1:]:
        row["difference"] = row[measure] - losses[0][measure]
        row["difference_low"], row["difference_high"] = (low, high) if has_interval else (None, None)
    over = (
        f"paired bootstrap over {len(size_U):,}" if has_interval else f"no interval, as it has fewer than {_MIN_UNITS}"
    )
    return f"{over} {units.format(least)} or more"
