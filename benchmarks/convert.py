"""Measure the memory of `txl convert` for a model as large as transfo-xl-wt103, with random weights.

    python benchmarks/convert.py [--folder DIR] [--out FILE]

The benchmark writes the model (285 million parameters, 267,735 words, 1.14 GB) as folders like those on Hugging Face's
Hub, once with safetensors, once with pytorch_model.bin and a pickled vocabulary. A new process converts each folder to
a run, and the first run back. The result is the peak resident memory of each process in GiB, memory-mapped files
included. The files take about 5 GB of disk space and are deleted afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from environment import RESULTS, command, commit, cpu_model, write
from safetensors.torch import save_file

from transformer_xl import __version__
from transformer_xl.integrations.checkpoints.source_config import SourceConfig
from transformer_xl.integrations.checkpoints.weight_names import HUGGING_FACE, weight_mappings

CONFIG = {
    "model_type": "transfo-xl", "adaptive": True, "attn_type": 0, "clamp_len": 1000, "cutoffs": [20000, 40000, 200000],
    "d_embed": 1024, "d_head": 64, "d_inner": 4096, "d_model": 1024, "div_val": 4, "dropatt": 0.0, "dropout": 0.1,
    "eos_token_id": 0, "ext_len": 0, "layer_norm_epsilon": 1e-5, "mem_len": 1600, "n_head": 16, "n_layer": 18,
    "pre_lnorm": False, "same_length": True, "sample_softmax": -1, "tgt_len": 128, "untie_r": True,
    "tie_projs": [False, True, True, True], "tie_weight": True, "vocab_size": 267735,
}  # fmt: skip
"""config.json of transfo-xl-wt103."""


def write_folder(folder: Path, *, safetensors: bool) -> None:
    """Write config.json, random weights and the vocabulary, as safetensors and JSON or pickled."""
    folder.mkdir()
    torch.manual_seed(1)
    mappings = weight_mappings(SourceConfig(CONFIG, "config.json").model_config(), HUGGING_FACE)
    shapes = {name: shape for mapping in mappings for name, shape in mapping.theirs.items()}
    weights = {name: torch.randn(shape) * 0.02 for name, shape in shapes.items()}
    words = ["<eos>", "<unk>", *(f"word{number}" for number in range(CONFIG["vocab_size"] - 2))]
    id_of_word = {word: word_id for word_id, word in enumerate(words)}
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if safetensors:
        save_file(weights, folder / "model.safetensors")
        (folder / "vocab.json").write_text(json.dumps(id_of_word))
    else:
        torch.save(weights, folder / "pytorch_model.bin")
        torch.save({"idx2sym": words, "sym2idx": id_of_word, "lower_case": False}, folder / "vocab.bin")


def measure(*arguments: str | Path) -> dict[str, Any]:
    """Run `txl convert` with these arguments in a new process, and return its peak memory."""
    command_line = [sys.executable, str(Path(__file__)), "--convert", *map(str, arguments)]
    peak = subprocess.run(command_line, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    return {"peak_gib": round(int(peak) / 2**20, 2)}


def convert(arguments: list[str]) -> None:
    """Run `txl convert` in this process, and print the process's peak resident memory in KiB."""
    from transformer_xl.cli.main import run

    status = run(["convert", *arguments])
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    sys.exit(status)


def main() -> None:
    """Measure, print the results and write them to a file."""
    if sys.argv[1:2] == ["--convert"]:
        convert(sys.argv[2:])
    parser = argparse.ArgumentParser(description="Measure the memory of txl convert.")
    parser.add_argument("--folder", type=Path, help="folder for the models (default: the system's temporary one)")
    parser.add_argument("--out", type=Path, default=RESULTS / "convert.json", help="default: results/convert.json")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        for kind in ("safetensors", "pickled"):
            write_folder(folder / kind, safetensors=kind == "safetensors")
            results[kind] = measure(folder / kind, folder / f"{kind}-run")
        results["back"] = measure(folder / "safetensors-run", folder / "back", "--to", "huggingface-4.37")
    for kind, result in results.items():
        print(f"{kind}: at most {result['peak_gib']} GiB resident")
    environment = {
        "command": command(),
        "commit": commit(),
        "versions": {
            "transformer_xl": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count()},
    }
    write({**environment, **results}, options.out)


if __name__ == "__main__":
    main()
