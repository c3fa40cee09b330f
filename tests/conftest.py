"""What several tests share: small models whose dimensions are distinct primes (twice one where even is needed)."""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from transformer_xl.config import TransformerXLConfig
from transformer_xl.model.transformer_xl import TransformerXL

# Triton looks when it is imported whether to interpret kernels, and torch imports it in passing here and there.
if find_spec("triton") and not torch.cuda.is_available():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        import_module("triton.experimental.gluon")  # else imported by the first kernel that runs

# jobs in the background ignore Ctrl-C, and so would the processes that tests start to be stopped by it
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # the tests run side by side, a process for each core


@pytest.fixture
def make_model():
    """Builds a float64 model without dropout; settings as keywords."""

    def make(seed: int = 7, memory_length: int = 11, **settings) -> TransformerXL:
        torch.manual_seed(seed)
        small = {
            "vocab_size": 23, "n_layers": 3, "d_model": 14, "n_heads": 2, "d_head": 5,
            "d_ff": 19, "dropout": 0.0,
        }  # fmt: skip
        model = TransformerXL(TransformerXLConfig(**{**small, **settings}), memory_length=memory_length).double()
        with torch.no_grad():
            for parameter in model.parameters():  # larger than at the start, so that attention is far from uniform
                parameter.add_(torch.randn_like(parameter) * 0.3)
        return model.eval()

    return make


@pytest.fixture
def tokens():
    """Draws token numbers of the small models' vocabulary."""

    def draw(rows: int, length: int, seed: int = 3) -> torch.Tensor:
        return torch.randint(0, 23, (rows, length), generator=torch.Generator().manual_seed(seed))

    return draw
