"""Counts what a training step keeps for the backward pass, tensor by tensor.

    python benchmarks/saved_tensors.py [--recipe enwik8-12l] [--batch-size 4] [--segment-length 512] [--dtype bfloat16]

Each tensor that autograd saves is counted once, at the first operation that saves it, with the module that computed
then; views of one storage are one tensor, and parameters are none. The memory of earlier segments is full.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from environment import command, commit, cpu_features, cpu_model, positive, results_file, say, write
from torch import Tensor, nn

from transformer_xl.architectures import build_model
from transformer_xl.config import UserError, run_settings
from transformer_xl.config.run_config import load_recipe, merge_recipe

MIB = 2**20


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[tuple[str, Tensor]]]:
    """Record the module and the tensor of everything that autograd saves."""
    stack: list[str] = [""]
    saved: list[tuple[str, Tensor]] = []
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda _m, _i, name=name: stack.append(name)))
        handles.append(module.register_forward_hook(lambda _m, _i, _o: stack.pop() and None))

    def pack(tensor: Tensor) -> Tensor:
        saved.append((stack[-1], tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
    for handle in handles:
        handle.remove()


def count(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each kind of saved tensor: module with its layer left out, shape, dtype, number and MiB."""
    changes = {
        "model": {"vocab_size": 204},
        "train": {"batch_size": args.batch_size, "segment_length": args.segment_length, "memory_length": args.memory},
    }
    settings = run_settings(merge_recipe(load_recipe(args.recipe), changes), args.recipe)
    assert settings.train is not None
    model = build_model(settings.model, memory_length=args.memory).train()
    is_bfloat16 = args.dtype == "bfloat16"
    with torch.autocast("cpu", torch.bfloat16, enabled=is_bfloat16):
        memory = model.initial_memory(args.batch_size)
        tokens_BT = torch.randint(204, (args.batch_size, args.segment_length))
        while not memory.all_valid:
            _, _, memory = model.training_losses(tokens_BT, tokens_BT, memory, progress=0.0)
        parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        with recorded(model) as saved:
            model.training_losses(tokens_BT, tokens_BT, memory, progress=0.0)
    kinds: Counter[tuple[str, tuple[int, ...], str]] = Counter()
    sizes: Counter[tuple[str, tuple[int, ...], str]] = Counter()
    seen = set(parameters)
    for name, tensor in saved:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen:
            continue
        seen.add(storage.data_ptr())
        parts = [part for part in name.split(".") if not part.isdigit()]
        kind = (".".join(parts), tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        kinds[kind] += 1
        sizes[kind] += storage.nbytes()
    return [
        {"module": kind[0], "shape": list(kind[1]), "dtype": kind[2], "number": kinds[kind], "mib": size / MIB}
        for kind, size in sizes.most_common()
    ]


def main() -> None:
    """Count, print a table, and write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="enwik8-12l")
    parser.add_argument("--batch-size", type=positive, default=4)
    parser.add_argument("--segment-length", type=positive, default=512)
    parser.add_argument("--memory", type=int, default=512)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    try:
        rows = count(args)
    except UserError as error:
        parser.error(str(error))
    for row in rows:
        if row["mib"] >= 1:
            say(f"{row['mib']:8.1f} MiB  {row['number']:3}  {row['dtype']:9}{row['shape']!s:24} {row['module']}")
    say(f"{sum(row['mib'] for row in rows):8.1f} MiB in all")
    machine = {"cpu": cpu_model(), "instructions": cpu_features()}
    results = {"command": command(), "commit": commit(), "torch": torch.__version__, "machine": machine, "saved": rows}
    write(results, args.out or results_file(f"saved-tensors-{args.dtype}"))


if __name__ == "__main__":
    main()
