"""`txl info`: show the hardware, and the contents of a corpus or the settings and results of a run."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from transformer_xl import __version__
from transformer_xl.cli.options import DEFAULT_DEVICE, DeviceFlags, DeviceOptions, Json
from transformer_xl.cli.output import print_json, print_table
from transformer_xl.config import UserError
from transformer_xl.files import as_user_error
from transformer_xl.progress import say

if TYPE_CHECKING:
    from transformer_xl.run_folder import RunFolder
    from transformer_xl.text.token_store import Corpus

_MEASURED = {
    "large": (2048, 2048, 2048),
    "2,048 tokens": (2048, 512, 2048),
    "64 tokens": (64, 512, 2048),
    "1 token": (1, 512, 2048),
}
"""Rows and widths of the products that `--measure` times: a large one, which shows what the processor reaches at best,
and those of a feed-forward layer in training, in serving and in generation.

Shape suffixes: R rows, I input width.
"""


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
    sections = {"machine": _hardware_facts(device_options)}
    if measure:
        sections["gflops"] = _product_speeds(device_options)
    if path is not None:
        sections |= _folder_facts(path, verify, device_options)
    elif verify:
        raise UserError("--verify needs the folder of a run or a corpus")
    if json:
        print_json(sections)
        return
    for title, facts in sections.items():
        print_table(title, ["", "value"], [[name.replace("_", " "), _format(value)] for name, value in facts.items()])


def _hardware_facts(device_options: DeviceOptions) -> dict[str, Any]:
    """Return versions, devices, and the values that settings with `auto` resolve to on this hardware."""
    import torch

    from transformer_xl.device import available_devices, resolve_dtype
    from transformer_xl.ops.kernels import KERNELS, choose
    from transformer_xl.ops.linear import fastest_matmul_library
    from transformer_xl.ops.native import status

    device = device_options.choose()
    return {
        "transformer_xl": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": str(device),
        "devices": available_devices(),
        "threads": torch.get_num_threads(),
        "dtype_auto": resolve_dtype(device, "auto"),
        **({"training_matmul_library": fastest_matmul_library()} if device.type == "cpu" else {}),
        "native_operators": status().text,
        "attn_implementation_auto": choose("auto", device, torch.float32).name,
        "attn_implementations": [name for name, kernel in KERNELS.items() if kernel.fits(device, torch.float32)],
    }


def _product_speeds(device_options: DeviceOptions) -> dict[str, Any]:
    """Return GFLOP/s of products by dtype and size: of torch's Linear, and on a CPU of those that the layers use too.

    These are the products of training, and those with packed weights, where no gradients are computed.
    """
    import torch
    from torch.utils.benchmark import Timer

    from transformer_xl.device import has_bfloat16
    from transformer_xl.ops.linear import PackedLinear

    device, speeds = device_options.choose(), dict[str, Any]()
    ways: dict[str, tuple[type[torch.nn.Linear], bool]] = {"torch": (torch.nn.Linear, False)}
    if device.type == "cpu":
        ways |= {"training": (PackedLinear, True), "packed": (PackedLinear, False)}
    for dtype in [torch.float32, *([torch.bfloat16] if has_bfloat16(device) else [])]:
        for name, (rows, width_in, width_out) in _MEASURED.items():
            x_RI = torch.randn(rows, width_in, device=device, dtype=dtype)
            speeds[f"{str(dtype).removeprefix('torch.')}, {name}"] = found = dict[str, float]()
            for way, (layer_class, with_gradients) in ways.items():
                layer = layer_class(width_in, width_out, bias=False, device=device, dtype=dtype)
                if isinstance(layer, PackedLinear) and not with_gradients:
                    layer.pack(dtype)
                timer = Timer("layer(x)", globals={"layer": layer, "x": x_RI}, num_threads=torch.get_num_threads())
                with torch.set_grad_enabled(with_gradients):
                    seconds = min(timer.blocked_autorange(min_run_time=0.25).times)
                found[way] = round(2e-9 * rows * width_in * width_out / seconds, 1)
    return speeds


def _folder_facts(path: Path, verify: bool, device_options: DeviceOptions) -> dict[str, Any]:
    """Return what a corpus or a run contains, with "corpus" or "run" as the only key."""
    from transformer_xl.run_folder import RunFolder
    from transformer_xl.text.token_store import Corpus

    with as_user_error(f"reading {path}"):
        is_corpus = (path / "corpus.json").exists()
    folder = Corpus.open(path) if is_corpus else RunFolder.open(path)
    notes = folder.verify() if verify else None
    facts = _corpus_facts(folder) if isinstance(folder, Corpus) else _run_facts(folder, device_options)
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


def _run_facts(folder: RunFolder, device_options: DeviceOptions) -> dict[str, Any]:
    import torch

    from transformer_xl.architectures import build_model
    from transformer_xl.ops.kernels import choose

    config, newest, metrics = folder.config, folder.latest_checkpoint(), folder.metrics()
    with torch.device("meta"):  # parameters without storage
        parameters = build_model(config.model).num_parameters()
    attn_implementation = None
    if config.model.attention_kernel is not None:
        attn_implementation = choose(config.model.attention_kernel, device_options.choose(), torch.float32).name
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
        "last_train": next((line for line in reversed(metrics) if line["split"] == "train"), None),
    }


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
