"""Runs of small models with random weights, opened by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from small_runs import make_run

from transformer_xl.integrations.huggingface import TransformerXLForCausalLM, from_run
from transformer_xl.run import Run


def opened(path: Path, name: str = "transformer-xl", **arguments: Any) -> tuple[Run, TransformerXLForCausalLM, Any]:
    """Write a run with `make_run`; return it with its model and tokenizer for transformers, in float64."""
    run = make_run(path, name, **arguments)
    run.model.double()
    return run, *from_run(run)
