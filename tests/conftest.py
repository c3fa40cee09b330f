"""Fixtures of many tests: small models whose dimensions are different primes (or twice a prime, if they must be even).

Distinct sizes make a confusion of two dimensions an error.
"""

from __future__ import annotations

import shutil
import signal
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from model_configs import small_model

from transformer_xl.config import RunConfig, TrainConfig
from transformer_xl.inference import InferenceModel, prepare_inference
from transformer_xl.run import Run
from transformer_xl.text.tokenizers import Tokenizer

# Triton reads this variable when it is imported, and some functions of torch import Triton.
if find_spec("triton") and not torch.cuda.is_available():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        import_module("triton.experimental.gluon")  # otherwise the first kernel imports it, without the variable

# a shell lets background jobs ignore SIGINT; processes that the tests start and interrupt must not inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # several processes run tests in parallel, one per core


@pytest.fixture
def make_model():
    """Returns the function that builds a small float64 model without dropout; keyword arguments are settings."""
    return small_model


@pytest.fixture
def run_of(make_model):
    """Returns a function that makes a run of a small model with a tokenizer; segments of 7, a memory of 11 tokens."""

    def make(tokenizer: Tokenizer, **settings) -> Run:
        config = RunConfig(train=TrainConfig(segment_length=7, memory_length=11))
        return Run(make_model(vocab_size=tokenizer.vocab_size, **settings), tokenizer, config)

    return make


@pytest.fixture
def make_inference(make_model):
    """Returns a function that prepares a model of `make_model` for inference; keyword arguments are settings."""

    def make(**settings) -> InferenceModel:
        return prepare_inference(make_model(**settings))

    return make


@pytest.fixture
def tokens():
    """Returns a function that draws random token ids (rows, length) of the small models' vocabulary, which has 23."""

    def draw(rows: int, length: int, seed: int = 3) -> torch.Tensor:
        return torch.randint(0, 23, (rows, length), generator=torch.Generator().manual_seed(seed))

    return draw


# run as any user, without a GPU, and request nothing from the network
BROWSER_FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium."""
    chromium = shutil.which("chromium")
    if chromium is None or find_spec("playwright") is None:
        pytest.skip("needs Chromium and playwright: apt-get install chromium, pip install -e '.[dev]'")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        opened = play.chromium.launch(executable_path=chromium, args=BROWSER_FLAGS)
        yield opened
        opened.close()
