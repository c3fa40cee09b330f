"""Compares the time of a step of `Backbone` with torch's GRU and LSTM, alone and as modules of TorchRL.

    python benchmarks/backbone.py [--threads 1] [--rounds 15] [--out FILE]

Two uses: `act`, one step of all environments without gradients, and `update`, forward and backward through a window.
All systems of a size take turns, and the result is the median of all rounds. They have the same width, number of layers
and, in TorchRL, the same episode starts (one step in 50). A GRU does much less than a Transformer-XL layer: the
parameters are in the results too. torch's GRU and LSTM know no episode starts. With a KV cache, keys and values of the
memory are kept instead of hidden states, which is for acting with weights that do not change.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from arguments import listed, one_of, positive
from environment import command, commit, cpu_features, cpu_model, results_file, say, warn_if_busy, write
from tensordict import TensorDict
from torch import nn
from torchrl.modules import GRUModule, LSTMModule, set_recurrent_mode

from transformer_xl import Backbone, BackboneConfig, Memory
from transformer_xl.apps.rl.torchrl import BackboneModule
from transformer_xl.inference import InferenceModel, prepare_inference

TARGET_SECONDS = 0.2  # of a round

System = tuple[nn.Module, Callable[[], Any], Callable[[], Any] | None]
"""A module, the call of `act`, and the forward pass of `update`, if it can be trained in this way."""

Systems = dict[str, System]


@dataclass
class Size:
    """The sizes of a comparison."""

    environments: int
    window: int
    memory_length: int
    width: int
    n_layers: int


SIZES = {"small": Size(64, 16, 32, 64, 2), "medium": Size(32, 64, 128, 256, 4)}


def backbone_of(size: Size) -> Backbone:
    """Return a backbone with GRU gates, as GTrXL."""
    config = BackboneConfig(
        n_layers=size.n_layers,
        d_model=size.width,
        n_heads=4,
        d_ff=2 * size.width,
        attention_window=size.memory_length + 1,
    )
    return Backbone(config, memory_length=size.memory_length)


def plain_systems(size: Size) -> Systems:
    """Return the systems that are called with tensors."""
    inputs_BTD = torch.randn(size.environments, size.window, size.width)
    step_B1D = inputs_BTD[:, :1].contiguous()
    starts_BT = torch.rand(size.environments, size.window) < 0.02
    starts_BT[:, 0] = False  # a memory that stays full
    backbone = backbone_of(size)
    prepared = prepare_inference(backbone)
    memory, kv_cache = (one.initial_memory(size.environments) for one in (backbone, prepared))
    with torch.no_grad():
        for _ in range(-(-size.memory_length // size.window)):  # a full memory
            _, memory = backbone(inputs_BTD, memory)
            _, kv_cache = prepared(inputs_BTD, kv_cache)

    def act(memory: Memory, acting: Backbone | InferenceModel = backbone) -> Callable[[], None]:
        def step() -> None:
            nonlocal memory
            _, memory = acting(step_B1D, memory, starts=starts_BT[:, :1])

        return step

    systems: Systems = {
        "Backbone": (backbone, act(memory), lambda: backbone(inputs_BTD, memory, starts=starts_BT)[0]),
        "Backbone, KV cache": (backbone, act(kv_cache, prepared), None),
    }
    for name, cls in (("nn.GRU", nn.GRU), ("nn.LSTM", nn.LSTM)):
        rnn = cls(size.width, size.width, size.n_layers, batch_first=True)
        state = rnn(inputs_BTD)[1]
        state = state.detach() if isinstance(state, torch.Tensor) else tuple(part.detach() for part in state)
        systems[name] = (
            rnn,
            lambda rnn=rnn, state=state: rnn(step_B1D, state),
            lambda rnn=rnn, state=state: rnn(inputs_BTD, state)[0],
        )
    return systems


def torchrl_systems(size: Size) -> Systems:
    """Return the modules of TorchRL, which are called with a tensordict."""
    shape = size.environments, size.window
    window = TensorDict(
        {"x": torch.randn(*shape, size.width), "is_init": torch.rand(*shape, 1) < 0.02}, batch_size=shape
    )
    step = window[:, 0].clone()
    common = {"in_key": "x", "out_key": "y"}
    sizes = {"input_size": size.width, "hidden_size": size.width, "num_layers": size.n_layers}
    modules = {
        "BackboneModule": BackboneModule(backbone_of(size), **common),
        "GRUModule": GRUModule(**sizes, in_keys=["x", "h", "is_init"], out_keys=["y", ("next", "h")]),
        "LSTMModule": LSTMModule(
            **sizes, in_keys=["x", "h", "c", "is_init"], out_keys=["y", ("next", "h"), ("next", "c")]
        ),
    }
    states = {"BackboneModule": ("memory", "memory_valid"), "GRUModule": ("h",), "LSTMModule": ("h", "c")}
    systems: Systems = {}
    for name, module in modules.items():
        keys = states[name]
        with torch.no_grad():
            state = step.clone()
            for _ in range(size.memory_length if name == "BackboneModule" else 1):
                after = module(state)
                for key in keys:
                    state[key] = after["next", key].clone()
                state.pop("next", None)
        whole = window.clone()
        for key in keys:  # the module reads the memory at the first step
            whole[key] = state[key][:, None].expand(*shape, *state[key].shape[1:])

        def update(module: nn.Module = module, whole: TensorDict = whole) -> torch.Tensor:
            with set_recurrent_mode(True):
                return module(whole.clone(recurse=False))["y"]

        systems[name] = (
            module,
            lambda module=module, state=state: module(state.clone(recurse=False)),
            update,
        )
    return systems


def measured(systems: Systems, rounds: int) -> dict[str, Any]:
    """Return the medians in milliseconds of both uses of each system, which take turns."""

    def act(system: System) -> None:
        with torch.no_grad():
            system[1]()

    def update(system: System) -> None:
        module, _, forward = system
        assert forward is not None
        forward().square().mean().backward()
        module.zero_grad()

    results: dict[str, Any] = {
        name: {"parameters": sum(p.numel() for p in system[0].parameters())} for name, system in systems.items()
    }
    for use, run in (("act", act), ("update", update)):
        used = {name: system for name, system in systems.items() if use == "act" or system[2] is not None}
        repeats, times = {}, {name: list[float]() for name in used}
        for name, system in used.items():
            run(system)
            start = time.perf_counter()
            run(system)
            repeats[name] = max(1, round(TARGET_SECONDS / (time.perf_counter() - start)))
        for _ in range(rounds):
            for name, system in used.items():
                start = time.perf_counter()
                for _ in range(repeats[name]):
                    run(system)
                times[name].append((time.perf_counter() - start) / repeats[name])
        for name, values in times.items():
            results[name][f"{use}_ms"] = round(1e3 * statistics.median(values), 3)
            say(f"{name}, {use}: {results[name][f'{use}_ms']} ms")
    return results


def main() -> None:
    """Measure, print a line for each system, and write the results to a file."""
    parser = argparse.ArgumentParser(description="Compares the time of a step of Backbone with recurrent networks.")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=positive, default=15)
    parser.add_argument(
        "--sizes", type=listed(one_of(SIZES)), default=",".join(SIZES), help=f"sizes to compare ({','.join(SIZES)})"
    )
    parser.add_argument("--out", type=Path, default=results_file("backbone"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    busy, results = warn_if_busy(), {}
    for name in args.sizes:
        size = SIZES[name]
        say(f"{name}: {size}")
        results[name] = {
            "size": asdict(size),
            "plain": measured(plain_systems(size), args.rounds),
            "torchrl": measured(torchrl_systems(size), args.rounds),
        }
    values = {
        "command": command(),
        "commit": commit(),
        "cpu": cpu_model(),
        "cpu_features": cpu_features(),
        "torch": torch.__version__,
        "threads": args.threads,
        "busy": busy,
        "results": results,
    }
    write(values, args.out)


if __name__ == "__main__":
    main()
