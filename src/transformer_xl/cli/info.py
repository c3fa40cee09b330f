"""`txl info`: show the hardware, a run or a corpus."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from transformer_xl import __version__
from transformer_xl.cli.options import ANY_MACHINE, Json, Machine, MachineOptions
from transformer_xl.cli.output import print_json, print_table
from transformer_xl.config import RelativeConfig, UserError
from transformer_xl.files import as_user_error


def info(
    path: Path | None = None,
    /,
    *,
    verify: Annotated[bool, Parameter(negative=())] = False,
    machine: MachineOptions = ANY_MACHINE,
    json: Json = False,
) -> None:
    """Show the hardware, a run or a corpus.

    Parameters
    ----------
    path
        Folder of a run or of a corpus. [default: only the hardware]
    verify
        Read every file and compare its checksum.
    """
    shown = {"machine": machine_facts(machine)}
    with as_user_error(f"reading {path}"):
        is_corpus = path is not None and (path / "corpus.json").exists()
    if path is not None and is_corpus:
        shown["corpus"] = _corpus(path, verify)
    elif path is not None:
        shown["run"] = _run(path, verify, machine)
    elif verify:
        raise UserError("--verify needs the folder of a run or a corpus")
    if json:
        print_json(shown)
        return
    for title, facts in shown.items():
        print_table(title, ["", "value"], [[name.replace("_", " "), _format(value)] for name, value in facts.items()])


def machine_facts(machine: Machine) -> dict[str, Any]:
    """Return versions, devices and the values that the automatic settings resolve to."""
    import torch

    from transformer_xl.device import available_devices, resolve_dtype
    from transformer_xl.model.kernels import KERNELS, choose

    chosen = machine.choose()
    return {
        "transformer_xl": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": str(chosen),
        "devices": available_devices(),
        "threads": torch.get_num_threads(),
        "dtype_auto": resolve_dtype(chosen, "auto"),
        "attn_implementation_auto": choose("auto", chosen, torch.float32).name,
        "attn_implementations": [name for name, kernel in KERNELS.items() if kernel.fits(chosen, torch.float32)],
    }


def _corpus(path: Path, verify: bool) -> dict[str, Any]:
    from transformer_xl.text.token_store import Corpus

    corpus = Corpus.open(path)
    if verify:
        corpus.verify()
    facts: dict[str, Any] = {
        "name": corpus.name,
        "source": corpus.source,
        "tokenizer": f"{corpus.tokenizer.kind}, {corpus.tokenizer.vocab_size:,} tokens",
    }
    for name in corpus.splits:
        split = corpus.split(name)
        facts[name] = {"tokens": split.num_tokens, "bytes": split.num_bytes}
        facts[name] |= {"num_unknown": split.num_unknown, "documents": split.num_documents}
    return {**facts, "checksums": "valid" if verify else "not checked; use --verify"}


def _run(path: Path, verify: bool, machine: Machine) -> dict[str, Any]:
    import torch

    from transformer_xl.model.build import build_model
    from transformer_xl.model.kernels import choose
    from transformer_xl.run_folder import CheckpointRecord, RunFolder

    folder = RunFolder.open(path)
    config = folder.config
    with torch.device("meta"):
        parameters = build_model(config.model).num_parameters()
    if verify:
        folder.verify()
    metrics = folder.metrics()
    valid = [line for line in metrics if line["split"] == "valid"]
    newest = folder.latest_checkpoint()
    best = (
        CheckpointRecord.read(newest).state.get("best_nats") if newest else None
    )  # after a change of corpus, the lines are of different texts
    lowest = [line for line in valid if line["nats_per_token"] == best] or valid
    return {
        "path": str(path),
        "recipe": config.recipe,
        "corpus": config.corpus.path if config.corpus else None,
        "tokenizer": f"{folder.tokenizer.kind}, {folder.tokenizer.vocab_size:,} tokens",
        "parameters": parameters,
        "attn_implementation": choose(config.model.attn_implementation, machine.choose(), torch.float32).name
        if isinstance(config.model, RelativeConfig)
        else None,
        "model": config.model.model_dump(exclude={"attn_implementation", "vocab_size"}),
        "train": config.train.model_dump(),
        "evaluation": config.evaluation.model_dump(),
        "newest_checkpoint": newest.name if newest else None,
        "last_train": next((line for line in reversed(metrics) if line["split"] == "train"), None),
        "best_valid": min(lowest, key=lambda line: line["nats_per_token"], default=None),
        "checksums": "valid" if verify else "not checked; use --verify",
    }


def _format(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {_format(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return ", ".join(_format(inner) for inner in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return "none" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
