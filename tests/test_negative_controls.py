"""Tests of equality see a difference of a bit, a token or a slot that is planted in the package.

Each fault is planted in a process of its own, which runs one test of the suite; that test must fail, and pass without.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import multiprocessing
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

TESTS = Path(__file__).parent


def next_bit(tensor: Tensor) -> Tensor:
    """Return the next larger numbers: one bit of each is another."""
    return torch.nextafter(tensor, torch.full_like(tensor, torch.inf)) if tensor.is_floating_point() else tensor


def one_bit_of_loaded_weights(load: Callable[..., Any], stepper: Any, *arguments: Any, **settings: Any) -> Any:
    result = load(stepper, *arguments, **settings)
    weight = next(iter(stepper.model.parameters()))
    weight.data.copy_(next_bit(weight.data))
    return result


def one_bit_of_a_matrix(convert: Callable[..., Any], model: Any, dtype: torch.dtype) -> Any:
    prepared = convert(model, dtype)
    matrix = next(module.weight for module in prepared.modules() if isinstance(module, torch.nn.Linear))
    matrix.data.copy_(next_bit(matrix.data) if dtype == torch.bfloat16 else matrix.data)
    return prepared


def is_low(model: Any) -> bool:
    return model.model.layers[0].attention.k_proj.weight.dtype == torch.bfloat16


def without_oldest(append: Callable[..., Any], cache: Any, *arguments: Any) -> Any:
    after = append(cache, *arguments)
    hidden_BMD = after.hidden_BMD.clone()
    hidden_BMD[:, :1] = 0
    return replace(after, hidden_BMD=hidden_BMD)


def one_bit_of_tensors(restore: Callable[..., Any], cache: Any, tensors: dict[str, Tensor]) -> Any:
    return restore(cache, {name: next_bit(tensor) for name, tensor in tensors.items()})


# by name: what is replaced; by what, which is given the original; and the test that must see it
FAULTS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "a distance too many": (
        "ops.kernels.sdpa:shifted",
        lambda shifted, *arguments, **settings: shifted(*arguments, **settings).roll(1, -1),
        "ops/test_kernels.py::test_kernel_equals_oracle",
    ),
    "a token sees one key too few": (
        "reader:Reader._visible",
        lambda visible, *arguments: (visible(*arguments) - 1).clamp(min=1),
        "test_reader.py::test_every_stride_gives_what_single_segments_give",
    ),
    "a memory without its oldest slot": (
        "model.memory:HiddenCache.append",
        without_oldest,
        "model/test_transformer_xl.py::test_segments_equal_oracle",
    ),
    "a loss of another bit": (
        "inference.inference_model:InferenceModel.nats",
        lambda nats, model, *arguments: next_bit(nats(model, *arguments)) if is_low(model) else nats(model, *arguments),
        "inference/test_inference_model.py::test_bfloat16_is_that_of_autocast_bit_for_bit",
    ),
    "a weight of another bit": (
        "inference.inference_model:with_matrices_in",
        one_bit_of_a_matrix,
        "inference/test_inference_model.py::test_bfloat16_is_that_of_autocast_bit_for_bit",
    ),
    "a resumed weight of another bit": (
        "training.stepper:Stepper.load_state_dict",
        one_bit_of_loaded_weights,
        "training/test_checkpoint.py::test_resumed_run_equals_uninterrupted",
    ),
    "a restored cache of another bit": (
        "model.key_values:KeyValueCache.with_tensors",
        one_bit_of_tensors,
        "evaluation/test_stream.py::test_saved_streams_continue_bit_for_bit",
    ),
    "a warm-up that is too short": (
        "evaluation.with_memory:warmup_length",
        lambda warmup, *arguments: (length := warmup(*arguments)) and length // 2,
        "evaluation/test_with_memory.py::test_batch_size_does_not_change_losses",
    ),
    "a prompt without its first token": (
        "generation.batch:read_prompts",
        lambda read, model, prompts, *rest: read(model, [prompt[1:] or prompt for prompt in prompts], *rest),
        "generation/test_batch.py::test_token_by_token_equals_one_pass",
    ),
    "another token in one chunk": (
        "text.corpus_writer:SplitWriter._add_tokens",
        lambda add, writer, ids: add(writer, ids[::-1].copy() if writer._max_shard_tokens == 4999 else ids),
        "text/test_corpus_writer.py::test_processes_and_shards_change_no_token",
    ),
}


class Messages:
    """Collects what tests fail with."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.messages.append(report.longrepr.reprcrash.message)


def run_test(fault: str, results: Any) -> None:
    """Plant a fault in this process, run its test, and put what the test fails with into the queue."""
    target, change, test = FAULTS[fault]
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(f"transformer_xl.{module}")
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    original = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **settings: change(original, *arguments, **settings))
    seen = Messages()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        pytest.main(["-x", "-n0", "-p", "no:cacheprovider", "--capture=no", str(TESTS / test)], plugins=[seen])
    results.put(seen.messages)


@pytest.fixture(scope="module")
def context() -> Any:
    """Starts processes that have imported the package."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["pytest", "transformer_xl.training.train", "transformer_xl.evaluation.evaluate"])
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_seen(fault: str, context: Any) -> None:
    results = context.SimpleQueue()
    process = context.Process(target=run_test, args=(fault, results))
    process.start()
    process.join(300)
    assert process.exitcode == 0
    (message,) = results.get()
    assert re.match(r"assert|AssertionError|\s*Not equal|Tensor-likes", message), message
