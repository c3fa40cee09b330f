"""`txl info`: show the hardware, and the contents of a corpus or the settings and results of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from transformer_xl import __version__
from transformer_xl.cli.options import DEFAULT_DEVICE, DeviceFlags, Json
from transformer_xl.cli.output import print_json, print_table
from transformer_xl.config import UserError
from transformer_xl.files import as_user_error
from transformer_xl.progress import say

if TYPE_CHECKING:
    import torch

    from transformer_xl.run_folder import RunFolder
    from transformer_xl.text.token_store import Corpus


def info(
    path: Path | None = None,
    /,
    *,
    verify: Annotated[bool, Parameter(negative=())] = False,
    build_native: Annotated[bool, Parameter(negative=())] = False,
    measure: Annotated[bool, Parameter(negative=())] = False,
    device_options: DeviceFlags = DEFAULT_DEVICE,
    json: Json = False,
) -> None:
    """Show the hardware, a run or a corpus.

    Parameters
    ----------
    path
        Folder of a run or of a corpus. [default: only the hardware]
    verify
        Read every file and compare its checksum.
    build_native
        First compile the native operators, which make a CPU faster; it needs a C++ compiler and about a minute.
    measure
        Also measure how fast matrices are multiplied, which takes seconds and should be alone on the machine.
    """
    if build_native:
        from transformer_xl.ops.native.build import build

        say(build())
    from transformer_xl.ops.machine import machine_facts, product_speeds

    device = device_options.choose()
    sections = {"machine": {"transformer_xl": __version__, **machine_facts(device)}}
    if measure:
        sections["gflops"] = product_speeds(device)
    if path is not None:
        sections |= _folder_facts(path, verify, device)
    elif verify:
        raise UserError("--verify needs the folder of a run or a corpus")
    if json:
        print_json(sections)
        return
    if "run" in sections:  # each group of settings is a table of its own
        facts = sections.pop("run")
        sections["run"] = {name: value for name, value in facts.items() if not isinstance(value, dict)}
        sections |= {name: value for name, value in facts.items() if isinstance(value, dict)}
    for title, facts in sections.items():
        print_table(title.replace("_", " "), ["", "value"], _rows(facts))


def _folder_facts(path: Path, verify: bool, device: torch.device) -> dict[str, Any]:
    """Return what a corpus or a run contains, with "corpus" or "run" as the only key."""
    from transformer_xl.run_folder import RunFolder
    from transformer_xl.text.token_store import Corpus

    with as_user_error(f"reading {path}"):
        is_corpus = (path / "corpus.json").exists()
    folder = Corpus.open(path) if is_corpus else RunFolder.open(path)
    notes = folder.verify() if verify else None
    facts = _corpus_facts(folder) if isinstance(folder, Corpus) else _run_facts(folder, device)
    facts["checksums"] = "; ".join(["valid", *(notes or [])]) if verify else "not checked; use --verify"
    return {"corpus" if is_corpus else "run": facts}


def _corpus_facts(corpus: Corpus) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "name": corpus.name,
        "source": corpus.source,
        "tokenizer": f"{corpus.tokenizer.kind}, {corpus.tokenizer.vocab_size:,} tokens",
    }
    for name, split in corpus.record.splits.items():
        facts[name] = {"tokens": split.num_tokens, "bytes": split.num_bytes}
        facts[name] |= {"num_unknown": split.num_unknown, "documents": split.num_documents}
    return facts


def _run_facts(folder: RunFolder, device: torch.device) -> dict[str, Any]:
    import torch

    from transformer_xl.architectures import build_model
    from transformer_xl.ops.kernels import choose
    from transformer_xl.run_folder import read_last_start

    config, newest, metrics = folder.config, folder.latest_checkpoint(), folder.metrics()
    with torch.device("meta"):  # parameters without storage
        parameters = build_model(config.model).num_parameters()
    attn_implementation = None
    if config.model.attention_kernel is not None:
        attn_implementation = choose(config.model.attention_kernel, device, torch.float32).name
    weights = folder.choose_weights() if newest or (folder.path / "model.safetensors").exists() else None
    lengths = weights.used.memory_lengths if weights else None
    return {
        "path": str(folder.path),
        "corpus": config.corpus.path if config.corpus else None,
        "tokenizer": f"{folder.tokenizer.kind}, {folder.tokenizer.vocab_size:,} tokens",
        "parameters": parameters,
        "attn_implementation": attn_implementation,
        **config.model_dump(exclude={"corpus": True, "model": {"attn_implementation", "vocab_size"}}),
        **(weights.as_dict() if weights else {"checkpoint": None, "other_checkpoints": []}),
        "memory_lengths": lengths.model_dump(mode="json") if lengths else None,
        "newest_checkpoint": newest.name if newest else None,
        "last_start": read_last_start(folder.path),
        "last_train": next((line for line in reversed(metrics) if line["split"] == "train"), None),
    }


def _rows(facts: dict[str, Any], group: str = "") -> list[list[str]]:
    """Return names and values, those of a group with its name before them."""
    rows: list[list[str]] = []
    for name, value in facts.items():
        title = f"{group}{name.replace('_', ' ')}"
        rows += _rows(value, f"{title}: ") if isinstance(value, dict) else [[title, _format(value)]]
    return rows


def _format(value: Any) -> str:
    """Return the text of a value in a table cell."""
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {_format(inner)}" for name, inner in value.items())
    if isinstance(value, (list, tuple)):
        separator = "; " if value and isinstance(value[0], dict) else ", "
        return separator.join(map(_format, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    return "none" if value is None else str(value)
