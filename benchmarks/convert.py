"""Memory of `txl convert` at the true sizes of transfo-xl-wt103, with random weights.

    python benchmarks/convert.py [--folder DIR] [--out FILE]

A folder as on the Hub is written (285 million parameters, 267,735 words, 1.14 GB), as safetensors and as
pytorch_model.bin with a pickled vocabulary; each is converted by a process of its own, the first also back. Memory is
the peak of what was resident, mapped files included. About 5 GB of disk are used for as long as it runs.
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
from transformer_xl.config import TransformerXLConfig
from transformer_xl.interop.weight_names import HUGGING_FACE, weight_mappings

CONFIG = {
    "model_type": "transfo-xl", "adaptive": True, "attn_type": 0, "clamp_len": 1000, "cutoffs": [20000, 40000, 200000],
    "d_embed": 1024, "d_head": 64, "d_inner": 4096, "d_model": 1024, "div_val": 4, "dropatt": 0.0, "dropout": 0.1,
    "eos_token_id": 0, "ext_len": 0, "layer_norm_epsilon": 1e-5, "mem_len": 1600, "n_head": 16, "n_layer": 18,
    "pre_lnorm": False, "same_length": True, "sample_softmax": -1, "tgt_len": 128, "untie_r": True,
    "tie_projs": [False, True, True, True], "tie_weight": True, "vocab_size": 267735,
}  # fmt: skip
MODEL = TransformerXLConfig(
    vocab_size=267_735, n_layers=18, d_model=1024, n_heads=16, d_ff=4096, cutoffs=(20_000, 40_000, 200_000),
    div_val=4, d_embed=1024, tie_projections="all_but_first", tie_attention_biases=False,
)  # fmt: skip


def write_folder(folder: Path, *, safe: bool) -> None:
    """Configuration, random weights and words."""
    folder.mkdir()
    torch.manual_seed(1)
    parts = [part for mapping in weight_mappings(MODEL, HUGGING_FACE) for part in mapping.theirs]
    weights = {name: torch.randn(shape) * 0.02 for name, shape in parts}
    words = ["<eos>", "<unk>", *(f"word{number}" for number in range(MODEL.vocab_size - 2))]
    numbered = {word: number for number, word in enumerate(words)}
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if safe:
        save_file(weights, folder / "model.safetensors")
        (folder / "vocab.json").write_text(json.dumps(numbered))
    else:
        torch.save(weights, folder / "pytorch_model.bin")
        torch.save({"idx2sym": words, "sym2idx": numbered, "lower_case": False}, folder / "vocab.bin")


def converted(*words: str | Path) -> dict[str, Any]:
    """Peak memory of one `txl convert`, as a process of its own."""
    line = [sys.executable, str(Path(__file__)), "--convert", *map(str, words)]
    peak = subprocess.run(line, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    return {"peak_gib": round(int(peak) / 2**20, 2)}


def convert(words: list[str]) -> None:
    """Converts in this process, and prints the peak of its memory in KiB."""
    from transformer_xl.cli.main import run

    status = run(["convert", *words])
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    sys.exit(status)


def main() -> None:
    """Measures, prints the figures and writes them to a file."""
    if sys.argv[1:2] == ["--convert"]:
        convert(sys.argv[2:])
    parser = argparse.ArgumentParser(description="Memory of txl convert at true sizes.")
    parser.add_argument("--folder", type=Path, help="where the files go while it runs (default: the system's)")
    parser.add_argument("--out", type=Path, default=RESULTS / "convert.json", help="default convert.json in results/")
    given = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        place = Path(name)
        for kind in ("safetensors", "pickled"):
            write_folder(place / kind, safe=kind == "safetensors")
            figures[kind] = converted(place / kind, place / f"{kind}-run")
        figures["back"] = converted(place / "safetensors-run", place / "back", "--to", "huggingface")
    for kind, of in figures.items():
        print(f"{kind}: at most {of['peak_gib']} GiB resident")
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
    write({**environment, **figures}, given.out)


if __name__ == "__main__":
    main()
