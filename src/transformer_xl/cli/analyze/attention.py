"""`txl analyze attention`: pictures of what heads attend to, a page to try it token by token, and the loss by place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from transformer_xl.cli.flags import LengthFlags, evaluation_config
from transformer_xl.cli.options import ANY_MACHINE, Json, MachineOptions
from transformer_xl.cli.output import command_line, print_json, print_table, say_unknown
from transformer_xl.config import INT32_MAX, RelativeConfig, UserError
from transformer_xl.files import as_user_error, atomic_folder
from transformer_xl.progress import ProgressBar, say

if TYPE_CHECKING:
    from transformer_xl.analysis.attention_maps import AttentionMeans, TermMaps
    from transformer_xl.analysis.attention_pictures import Head
    from transformer_xl.analysis.loss_by_distance import LossByDistance
    from transformer_xl.config import EvaluationConfig, RunConfig
    from transformer_xl.evaluation.evaluate import EvaluationPlan
    from transformer_xl.evaluation.method import TokenizedText
    from transformer_xl.model.transformer_xl import TransformerXL
    from transformer_xl.run_folder import RunFolder

_PAPERS_BACK = 640
_USUAL_TOKENS = 8192
_MOST_HEADS = 24  # lines that can be told apart


@dataclass(frozen=True)
class Source:
    """Which text is read."""

    prompt: str | None = None
    """A text."""
    text: Path | None = None
    """File of a text."""
    corpus: Path | None = None
    """Corpus with the run's vocabulary. [default: the one it was trained on]"""
    split: str | None = None
    """train, valid or test, where it is a corpus. [default: test]"""
    tokens: int | None = None
    """Read only so many tokens, from the start. [default: 8192]"""


@dataclass(frozen=True)
class Pictures:
    """What is drawn."""

    back: int | None = None
    """Means over so many tokens back; memory is at least that, unless it is given. [default: as far as memory goes, 640
    at most]"""
    heads: str | None = None
    """Heads drawn by themselves: layer:head, both from 0, with commas between, such as 0:3,7:1. [default: of the
    first, middle and last layer the head that looks farthest back]"""
    page_tokens: int | None = None
    """Tokens on the page and in the pictures of single heads, from the start of the text. [default: 192, or as many as
    there are or fit]"""
    out: Path | None = None
    """New folder for pictures, page and figures. [default: beside the run, its name and -attention]"""
    weights: Literal["best", "last"] = "best"
    """The best weights on the validation text, or the last ones."""


_TEST_TEXT, _THE_USUAL = Source(), Pictures()


def attention(
    run: Path,
    /,
    *,
    source: Annotated[Source, Parameter(name="*")] = _TEST_TEXT,
    lengths: Annotated[LengthFlags | None, Parameter(name="*")] = None,
    pictures: Annotated[Pictures, Parameter(name="*")] = _THE_USUAL,
    machine: MachineOptions = ANY_MACHINE,
    json: Json = False,
) -> None:
    """Draw what heads attend to, term by term, and how the loss falls from a document's start.

    Parameters
    ----------
    run
        Folder of a run of encoding relative or shaw.
    source
        Which text is read.
    lengths
        How far attention looks.
    pictures
        What is drawn.
    """
    _check_words(source, pictures)
    from transformer_xl.analysis.attention_album import Album
    from transformer_xl.analysis.attention_maps import with_terms
    from transformer_xl.analysis.attention_page import token_texts
    from transformer_xl.run_folder import RunFolder

    device = machine.choose()
    folder = RunFolder.open(run)
    out = pictures.out or run.resolve().parent / f"{run.resolve().name}-attention"
    if out.exists():
        raise UserError(f"{out} exists already; choose another --out or delete it first")
    chosen = None if pictures.heads is None else _heads(pictures.heads, folder.config)
    plan = _plan(folder.config, evaluation_config(lengths), pictures.back)
    model = with_terms(folder.load_model(device, pictures.weights))
    text = _text(source, folder)
    for remark in plan.remarks(device):
        say(f"remark: {remark}")
    back = _back(plan, pictures.back, len(text.tokens_K))
    with atomic_folder(out) as aside:
        means, maps = _looked(model, text, plan, pictures.page_tokens)
        losses, stretch = _losses(model, text, plan)
        figures: dict[str, Any] = {
            "command": command_line(),
            "run": str(run),
            "folder": str(out),
            **_read(text, plan),
            "counted_tokens": means.num_queries,
            "back": back,
            "page_tokens": maps.num_tokens,
            "drawn_heads": [list(head) for head in chosen or _farthest(means)],
            "heads": _by_head(means),
            "stretch": stretch,
            "loss": {name: loss.as_dicts() for name, loss in losses.items()},
        }
        names = token_texts(folder.tokenizer, text.tokens_K[: maps.num_tokens])
        album = Album(aside, figures, apart=not folder.tokenizer.is_lossless)
        figures["files"] = album.fill(means.mean_LNP(back), maps, names, losses)
    print_json(figures) if json else _show(figures, means)


def _check_words(source: Source, pictures: Pictures) -> None:
    """Refuses words that cannot be meant, before anything is opened."""
    given = [f"--{name}" for name in ("prompt", "text", "corpus") if getattr(source, name) is not None]
    if len(given) > 1:
        raise UserError(f"{given[0]} and {given[1]} were both given; use one of them")
    if source.split is not None and given not in ([], ["--corpus"]):
        raise UserError(f"--split {source.split} and {given[0]} were both given; a split is of a corpus")
    for flag, number in (
        ("--tokens", source.tokens),
        ("--back", pictures.back),
        ("--page-tokens", pictures.page_tokens),
    ):
        if number is not None and not 1 <= number <= INT32_MAX:
            raise UserError(f"{flag} {number:,}: wanted 1 or more, {INT32_MAX:,} at most")


def _heads(given: str, config: RunConfig) -> list[Head]:
    """Heads that were typed as one word, 0:3,7:1."""
    layers, heads = config.model.n_layers, config.model.n_heads if isinstance(config.model, RelativeConfig) else 0
    found: list[Head] = []
    for word in given.split(","):
        parts = [part.strip() for part in word.split(":")]
        if len(parts) != 2 or not all(part.isascii() and part.isdecimal() and len(part) < 12 for part in parts):
            raise UserError(f"--heads {given}: wanted layer:head, both from 0, with commas between, such as 0:3,7:1")
        layer, head = int(parts[0]), int(parts[1])
        for what, number, count in (("layer", layer, layers), ("head", head, heads)):
            if number >= count:
                raise UserError(f"--heads {given}: there is no {what} {number}; they are 0 to {count - 1}")
        found += [(layer, head)] if (layer, head) not in found else []
    if len(found) > _MOST_HEADS:
        raise UserError(f"--heads names {len(found)} heads; name {_MOST_HEADS} at most, the page has all")
    return found


def _plan(config: RunConfig, lengths: EvaluationConfig, back: int | None) -> EvaluationPlan:
    """The lengths, with memory for so many tokens back where none is given.

    Raises:
        UserError: no token sees so far.
    """
    from transformer_xl.analysis.attention_maps import distances_seen
    from transformer_xl.evaluation.evaluate import EvaluationPlan

    plan = EvaluationPlan.resolve(config, lengths)
    if back is None:
        return plan
    if lengths.memory_length is None and plan.context_limits.memory_length < back:
        plan = EvaluationPlan.resolve(config, lengths.model_copy(update={"memory_length": back}))
    farthest = distances_seen(plan) - 1
    if back > farthest:
        window = plan.context_limits.attention_window
        down_proj = window is not None and window <= back
        wanted = f"--attention-window {back + 1} or none" if down_proj else f"--memory-length {back}"
        because = f"with a window of {window:,}" if down_proj else f"with memory {plan.context_limits.memory_length:,}"
        raise UserError(f"--back {back:,}: {because} no token sees farther than {farthest:,} back; give {wanted}")
    return plan


def _back(plan: EvaluationPlan, wanted: int | None, num_tokens: int) -> int:
    """How many tokens back are drawn.

    Raises:
        UserError: more are wanted than the text has.
    """
    from transformer_xl.analysis.attention_maps import distances_seen, number_of

    if wanted is not None and wanted >= num_tokens:
        raise UserError(
            f"--back {wanted:,}: the text has {number_of(num_tokens)}; give a longer one, or fewer to --back"
        )
    farthest = distances_seen(plan) - 1
    usual = min(_PAPERS_BACK, farthest, num_tokens - 1, plan.context_limits.memory_length or farthest)
    return usual if wanted is None else wanted


def _text(source: Source, folder: RunFolder) -> TokenizedText:
    from transformer_xl.evaluation.evaluate import check_token_ids
    from transformer_xl.evaluation.method import TokenizedText
    from transformer_xl.evaluation.score import encode_text
    from transformer_xl.text.tokenizers import to_bytes

    limit, tokenizer = source.tokens or _USUAL_TOKENS, folder.tokenizer
    if source.prompt is None and source.text is None:
        opened, name = folder.open_corpus(source.corpus), source.split or "test"
        split = opened.split(name)
        opened.verify(name)
        check_token_ids(split.first(limit), tokenizer.vocab_size)
        return TokenizedText(split.first(limit), tokenizer.bos_token_id, split.document_starts)
    content, name = b"", "--prompt"
    if source.prompt is not None:
        content = to_bytes(source.prompt)
    elif source.text is not None:
        name = str(source.text)
        with as_user_error(f"reading {source.text}"):
            content = source.text.read_bytes()
    ids_K = encode_text(tokenizer, name, content)
    say_unknown(tokenizer, [content])
    return TokenizedText(ids_K[:limit], tokenizer.bos_token_id)


def _looked(
    model: TransformerXL, text: TokenizedText, plan: EvaluationPlan, page_tokens: int | None
) -> tuple[AttentionMeans, TermMaps]:
    from transformer_xl.analysis.attention_maps import AttentionMeans, TermMaps, look, number_of
    from transformer_xl.analysis.attention_page import fitting_tokens

    num_tokens, shape = len(text.tokens_K), (model.config.n_layers, model.config.n_heads)
    maps = TermMaps(model, fitting_tokens(shape, num_tokens, page_tokens))
    means = AttentionMeans(model, plan, num_tokens)
    if not means.fills_memory:
        say(
            f"remark: a text of {number_of(num_tokens)} does not fill a memory of "
            f"{plan.context_limits.memory_length:,}, so those "
            "count too that saw little; a longer text or a shorter --memory-length gives better means"
        )
    with ProgressBar("attention", num_tokens, "tokens") as bar:
        look(model, text.tokens_K, plan, [means.add, maps.taker(plan)], bar.advance)
    return means, maps


def _losses(
    model: TransformerXL, text: TokenizedText, plan: EvaluationPlan
) -> tuple[dict[str, LossByDistance], int | None]:
    """By how memory goes on, and the length of the stretches where the text has no documents."""
    from transformer_xl.analysis.loss_by_distance import in_stretches, loss_by_distance

    cut, stretch = in_stretches(text, plan)
    with ProgressBar("loss", 2 * len(text.tokens_K), "tokens") as bar:
        return {
            "reset": loss_by_distance(model, cut, plan, reset_memory=True, progress=bar.advance),
            "continue": loss_by_distance(model, cut, plan, reset_memory=False, progress=bar.advance),
        }, stretch


def _read(text: TokenizedText, plan: EvaluationPlan) -> dict[str, Any]:
    """What was read and how, by name."""
    return {
        "tokens": len(text.tokens_K),
        "documents": len(text.boundaries(reset_memory=True)) - 1,
        "segment_length": plan.segment_length,
        "memory_length": plan.context_limits.memory_length,
        "attention_window": plan.context_limits.attention_window,
        "clamp_length": plan.context_limits.clamp_length,
    }


def _farthest(means: AttentionMeans) -> list[Head]:
    """Of the first, middle and last layer the head that looks farthest back."""
    layers = len(means.distance_LN)
    return [(layer, int(means.distance_LN[layer].argmax())) for layer in sorted({0, layers // 2, layers - 1})]


def _by_head(means: AttentionMeans) -> list[dict[str, Any]]:
    return [
        {"layer": layer, "head": head, "mean_distance": float(distance), "entropy_nats": float(entropy)}
        for layer, pairs in enumerate(zip(means.distance_LN, means.entropy_LN, strict=True))
        for head, (distance, entropy) in enumerate(zip(*pairs, strict=True))
    ]


def _show(figures: dict[str, Any], means: AttentionMeans) -> None:
    from transformer_xl.analysis.attention_maps import number_of

    say(f"written: {figures['folder']}; open attention.html there in a browser")
    seen = f"memory {figures['memory_length']:,}, segment {figures['segment_length']:,}"
    counted = number_of(figures["counted_tokens"])
    title = f"{figures['run']}: how many tokens back each head looks, mean of {counted}, {seen}"
    columns = ["layer", *(f"head {head}" for head in range(means.distance_LN.shape[1]))]
    rows = [[str(layer), *(f"{mean:.1f}" for mean in row)] for layer, row in enumerate(means.distance_LN.tolist())]
    print_table(title, columns, rows)
