"""Minimal pairs: how often a model finds the acceptable sentence of a pair more probable than the other one.

A pair is an object of JSON lines as in BLiMP (Warstadt et al. 2020), with `sentence_good` and `sentence_bad`. The score
of a sentence is its log-probability, the sum over its tokens, as lm_eval's task computes it: from an empty memory, or
after a context, which the memory then holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Unpack

from transformer_xl.apps.surprisal.surprisal import encode_item
from transformer_xl.config import EvaluationConfig, UserError, check_type
from transformer_xl.evaluation.evaluate import override_config
from transformer_xl.evaluation.plan import EvaluationPlan, ProgressCallback, check_progress
from transformer_xl.files import as_path, csv_text, write_text
from transformer_xl.integrations.lm_eval.continuations import Continuation, score_continuations
from transformer_xl.run import Run, check_run
from transformer_xl.text.sources.items import TextItem, decode_table
from transformer_xl.text.sources.tables import json_rows

if TYPE_CHECKING:
    from transformer_xl.config.typed_settings import EvaluationSettings

_GROUPS = ("UID", "linguistics_term", "field")


@dataclass(frozen=True)
class MinimalPair:
    """Two sentences, of which only one is acceptable."""

    good: str
    bad: str
    context: str = ""
    """Text before both; it ends with a line."""
    groups: dict[str, str] = field(default_factory=dict)
    """What the pair belongs to, by the kind of group: `file`, `UID`, `linguistics_term`, `field`."""
    source: str = ""
    """Path of the file that it was read from, which its group `file` is called by where several have one name."""


class MinimalPairScores(list[dict[str, Any]]):
    """A row for each pair: its groups, `logprob_good` and `logprob_bad` in nats, and `is_correct`: good is greater."""

    def accuracies(self) -> list[dict[str, Any]]:
        """Return for each group, and for all pairs, its kind, name, number of pairs and accuracy."""
        groups = dict[tuple[str, str], list[bool]]({("all", ""): []})
        for row in self:
            for key in [("all", ""), *((kind, row[kind]) for kind in ("file", *_GROUPS) if row.get(kind))]:
                groups.setdefault(key, []).append(row["is_correct"])
        order = ["file", *_GROUPS, "all"]
        return [
            {"group": kind, "name": name, "pairs": len(correct), "accuracy": sum(correct) / len(correct)}
            for (kind, name), correct in sorted(groups.items(), key=lambda group: order.index(group[0][0]))
        ]

    def to_csv(self, file: Path | str | None = None) -> str:
        """Return the rows as CSV, and write them to a file unless that is None.

        Raises:
            UserError: the file system refuses.
        """
        text = csv_text(list(dict.fromkeys(name for row in self for name in row)), self)
        if file is not None:
            write_text(as_path(file, "file", "give the path of a .csv file"), text)
        return text


def read_minimal_pairs(name: str, content: bytes, *, context_field: str | None = None) -> list[MinimalPair]:
    """Read pairs from JSON lines with `sentence_good` and `sentence_bad`; `UID`, `linguistics_term` and `field` group.

    Args:
        name: path of the file; its name without suffix is that of the group `file`.
        content: its content in UTF-8.
        context_field: name of what holds the text before both sentences, or None if there is none.

    Raises:
        UserError: a line is no JSON object, lacks a sentence or the context, or has the same sentence twice; or there
            are no pairs.
    """
    pairs = list[MinimalPair]()
    for place, row in json_rows(name, decode_table(name, content).split("\n")):
        wanted = ["sentence_good", "sentence_bad", *([context_field] if context_field else [])]
        for key in wanted:
            if not isinstance(row.get(key), str) or not (row[key].strip() or key == context_field):
                raise UserError(f"{place}: '{key}' is missing, empty or no text; the line has {', '.join(row)}")
        good, bad, *context = (row[key] for key in wanted)
        if good == bad:
            raise UserError(f"{place}: sentence_good and sentence_bad are the same: {good!r}; correct one of them")
        groups = {"file": Path(name).stem, **{kind: str(row[kind]) for kind in _GROUPS if row.get(kind)}}
        pairs.append(MinimalPair(good, bad, *context, groups=groups, source=name))
    if not pairs:
        raise UserError(f"{name}: there are no pairs; give JSON lines with sentence_good and sentence_bad")
    return pairs


def minimal_pairs(
    run: Run,
    pairs: Sequence[MinimalPair],
    config: EvaluationConfig | None = None,
    *,
    context: str = "",
    progress: ProgressCallback | None = None,
    **overrides: Unpack[EvaluationSettings],
) -> MinimalPairScores:
    """Return the log-probabilities of both sentences of each pair.

        pairs = read_minimal_pairs("pairs.jsonl", Path("pairs.jsonl").read_bytes())
        minimal_pairs(run, pairs).accuracies()

    Args:
        run: a loaded run.
        pairs: the pairs.
        config: settings that override individual evaluation settings of the run, such as `memory_length`.
        context: text before every sentence, and before the context of its pair; a context is read once where several
            sentences share it.
        progress: called with the number of sentences scored since the last call.
        overrides: settings by name, which override those of `config`.

    Raises:
        UserError: there are no pairs, settings contradict each other, or a sentence cannot be encoded.
    """
    check_run(run)
    plan = EvaluationPlan.for_reading(run, override_config(config, overrides, "pairs", "context", "progress"))
    check_progress(progress)
    check_type(context, str, "context", "give a text")
    check_type(pairs, Sequence, "pairs", "give a list of MinimalPair")
    for number, pair in enumerate(pairs, start=1):
        check_type(pair, MinimalPair, f"pair {number}", "give MinimalPair(good, bad)")
        if not (pair.good and pair.bad):
            raise UserError(f"pair {number} has an empty sentence; give two that are not")
    if not pairs or plan.method != "memory":
        raise UserError("there are no pairs; give at least one" if not pairs else "minimal pairs need method memory")
    plan.refuse_extended_context("minimal pairs")
    continuations = list[Continuation]()
    contexts = dict[str, tuple[int, ...]]()
    for number, pair in enumerate(pairs, start=1):
        before = "\n".join(text.removesuffix("\n") for text in (context, pair.context) if text)
        if before not in contexts:
            ids = encode_item(run.tokenizer, TextItem({"context of pair": number}, before))[1] if before else ()
            contexts[before] = (run.tokenizer.bos_token_id, *map(int, ids))
        for text in (pair.good, pair.bad):
            continuations.append(Continuation(contexts[before], tuple(run.tokenizer.encode(text).tolist())))
    model = run.inference(plan.dtype)
    scores = iter(score_continuations(model, continuations, plan, progress or (lambda _: None)))
    result = MinimalPairScores()
    files = {(pair.groups["file"], pair.source) for pair in pairs if "file" in pair.groups}
    num_files = Counter(name for name, _ in files)
    for pair, good, bad in zip(pairs, scores, scores, strict=True):
        row = {**pair.groups, "logprob_good": -good.nats, "logprob_bad": -bad.nats, "is_correct": good.nats < bad.nats}
        if num_files[pair.groups.get("file", "")] > 1:
            row["file"] = pair.source or row["file"]
        result.append(row)
    return result
