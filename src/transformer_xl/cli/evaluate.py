"""`txl evaluate`: score a split of a corpus with a run, at any memory length and attention window.

The methods are memory, sliding-window, dynamic and both-sides; the modules of `transformer_xl.evaluation` explain them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from transformer_xl.cli.flags import EvaluationFlags, check_flags
from transformer_xl.cli.options import DEFAULT_DEVICE, DeviceFlags, Int8, Integer, Json, parse_integers
from transformer_xl.cli.output import load_and_say, perplexity_titles, print_json, print_table, say_memory_length
from transformer_xl.config import WITHOUT_MEMORY, EvaluationConfig, RunConfig, UserError
from transformer_xl.files import check_new_file
from transformer_xl.progress import ProgressBar, note

if TYPE_CHECKING:
    from transformer_xl.text.tokenizers import Tokenizer


def evaluate(
    run: Path,
    /,
    *,
    corpus: Path | None = None,
    split: str = "test",
    max_tokens: Annotated[int | None, Integer] = None,
    settings: Annotated[EvaluationFlags | None, Parameter(name="*")] = None,
    sweep_memory_length: str | None = None,
    sweep_attention_window: str | None = None,
    token_losses: Path | None = None,
    checkpoint: Literal["best", "last"] = "best",
    int8: Int8 = False,
    device_options: DeviceFlags = DEFAULT_DEVICE,
    json: Json = False,
) -> None:
    """Score a text, every token once: bits per byte, and perplexity per word (line ends included) and per token.

    Parameters
    ----------
    run
        Folder of a run.
    corpus
        Corpus made with the run's tokenizer. [default: the one it was trained on]
    split
        train, valid or test.
    max_tokens
        Score only this many tokens, from the start of the split.
    settings
        How the text is scored.
    sweep_memory_length
        Several memory lengths, such as 0,64,512; each gives one line of results.
    sweep_attention_window
        Several attention windows, such as 64,128,512, each with the memory that fills it (window - 1 slots) unless
        --memory-length is given; each gives one line of results.
    token_losses
        New file to write the loss of every token to, in nats and text order: a numpy array (.npy) of float32.
    checkpoint
        best: the weights with the lowest validation loss; last: those of the last checkpoint.
    """
    config = check_flags(EvaluationConfig, settings)
    from transformer_xl.run_folder import RunFolder

    folder = RunFolder.open(run)
    configs = _configs(config, folder.config, sweep_memory_length, sweep_attention_window)
    if token_losses is not None and len(configs) > 1:
        raise UserError("--token-losses and a sweep were both given; a file contains the losses of one evaluation")
    if token_losses is not None:
        check_new_file(token_losses)
    from transformer_xl.evaluation.evaluate import evaluate as evaluate_split
    from transformer_xl.evaluation.plan import EvaluationPlan

    device = device_options.choose()
    opened_corpus = folder.open_corpus(corpus)
    text = opened_corpus.split(split, verify=True)
    loaded = load_and_say(run, device, checkpoint, int8=int8)
    plans = [EvaluationPlan.of_run(loaded, config) for config in configs]
    train_split = opened_corpus.split("train", verify=True) if plans[0].needs_train_split else None
    say_memory_length(loaded, plans[0])
    for warning in dict.fromkeys(warning for plan in plans for warning in plan.warnings(device)):
        note(warning)
    num_tokens = min(text.num_tokens, max_tokens or text.num_tokens)
    results: list[dict[str, Any]] = []
    for config, plan in zip(configs, plans, strict=True):
        window = plan.context_limits.attention_window
        title = f"memory {plan.context_limits.memory_length:,}" + (f", window {window:,}" if window else "")
        with ProgressBar(title, num_tokens, "tokens") as bar:
            result = evaluate_split(
                loaded,
                text,
                config,
                max_tokens=max_tokens,
                train_split=train_split,
                progress=bar.advance,
                token_losses=token_losses,
            )
        results.append(result.as_dict())
    if json:
        head = {"run": str(run), **loaded.weights_values, "split": split}
        print_json({**head, "sweep": results} if sweep_memory_length or sweep_attention_window else head | results[0])
    else:
        _print_results(f"{run}, {split}", results, folder.tokenizer)


def _configs(
    config: EvaluationConfig, run: RunConfig, memory_lengths: str | None, windows: str | None
) -> list[EvaluationConfig]:
    """Return the settings of each evaluation: one for each length of a sweep, or only `config` without a sweep."""
    sweeps = {"memory_length": memory_lengths, "attention_window": windows}
    given = [name for name, sweep in sweeps.items() if sweep is not None]
    if len(given) > 1 or config.model_fields_set & set(given):
        raise UserError(
            "give one of --sweep-memory-length and --sweep-attention-window, and not the setting that it sweeps"
        )
    if memory_lengths is not None:
        lengths = parse_integers("--sweep-memory-length", memory_lengths, minimum=0)
        return [config.model_copy(update={"memory_length": length}) for length in lengths]
    if windows is None:
        return [config]
    method = config.method if "method" in config.model_fields_set else run.evaluation.method
    fill_window = config.memory_length is None and run.model.has_memory and method not in WITHOUT_MEMORY
    return [
        # a query sees itself too, so a memory of window - 1 fills the window at every position of a segment
        config.model_copy(update={"attention_window": window} | ({"memory_length": window - 1} if fill_window else {}))
        for window in parse_integers("--sweep-attention-window", windows)
    ]


def _print_results(name: str, results: list[dict[str, Any]], tokenizer: Tokenizer) -> None:
    first = results[0]
    columns = {  # by name of the result: title of the column and number format
        "memory_length": ("memory", ","),
        "segment_length": ("segment", ","),
        "attention_window": ("window", ","),
        "clamp_length": ("clamp", ","),
        "bits_per_byte": ("bits/byte", ".4f"),
        "bits_per_character": ("bits/char", ".4f"),
        **{name: (title, ",.3f") for name, title in perplexity_titles(tokenizer).items()},
        "nats_per_token": ("nats/token", ".4f"),
        "tokens_per_second": ("tokens/s", ",.0f"),
    }
    if first["characters"] in (None, first["bytes"]):
        del columns["bits_per_character"]
    # None is an attention window or clamp length without limit, or the perplexity of a text without words
    missing = dict.fromkeys(perplexity_titles(tokenizer), "-")
    rows = [
        [
            missing.get(name, "all") if result[name] is None else format(result[name], spec)
            for name, (_, spec) in columns.items()
        ]
        for result in results
    ]
    unit = "words and newlines" if tokenizer.kind == "word" and tokenizer.adds_final_newline else "tokens"
    tokens, num_unknown = first["tokens"], first["num_unknown"]
    words = f", {first['words'] + first['line_ends']:,} words and newlines" if tokenizer.kind == "bpe" else ""
    unknown = f" ({num_unknown:,} of them unknown words, {num_unknown / tokens:.1%})" if num_unknown else ""
    reset = ", memory reset at each document" if first["reset_memory"] else ""
    title = f"{name}: {tokens:,} {unit}{unknown}{words}, {first['bytes']:,} bytes, method {first['method']}{reset}"
    print_table(title, [title for title, _ in columns.values()], rows)
