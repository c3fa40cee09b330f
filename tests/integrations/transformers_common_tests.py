"""Run transformers' own common tests of models and of generation on ours; not a part of `make check`.

    python tests/integrations/transformers_common_tests.py [--tests DIR]

The tests are those of the installed version: its source distribution, which pip downloads, has ModelTesterMixin.
GenerationTesterMixin is only in the repository: with --tests, the folder `tests` of a checkout (best of the same tag),
files that the distribution lacks are taken from there. They need the package `parameterized`. Nothing is kept. The exit
status is 1 if a test fails that is not in EXPECTED_FAILURES, or if one of these passes.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib import metadata
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"

_NO_LAYER_CLASS = "it looks for transformers' GradientCheckpointingLayer; our layers recompute by themselves"
_NO_MEMORY = "a model without memory reads its last token ids again, so it has no hidden states and no embeddings there"
_SLOTS = "attention weights have a key for each memory slot, also for empty ones"
# Tests that fail, and why: of all architectures, or of one. Every other one passes, or skips itself.
EXPECTED_FAILURES = {
    "test_model_get_set_embeddings": "the embedding may have several tables; it is no nn.Embedding and cannot be set",
    "test_gradient_checkpointing_enable_disable": _NO_LAYER_CLASS,
    "test_training_gradient_checkpointing": _NO_LAYER_CLASS,
    "test_training_gradient_checkpointing_use_reentrant_false": _NO_LAYER_CLASS,
    "test_training_gradient_checkpointing_use_reentrant_true": _NO_LAYER_CLASS,
    "transformer-xl::test_beam_search_generate_dict_outputs_use_cache": _SLOTS,
    "transformer-xl::test_greedy_generate_dict_outputs_use_cache": _SLOTS,
    "shaw::test_beam_search_generate_dict_outputs_use_cache": _SLOTS,
    "shaw::test_greedy_generate_dict_outputs_use_cache": _SLOTS,
    "vaswani::test_beam_search_generate_dict_outputs_use_cache": _NO_MEMORY,
    "vaswani::test_generate_continue_from_inputs_embeds": _NO_MEMORY,
    "vaswani::test_generate_from_inputs_embeds_0_greedy": _NO_MEMORY,
    "vaswani::test_generate_from_inputs_embeds_1_beam_search": _NO_MEMORY,
    "vaswani::test_generate_from_random_inputs_embeds": _NO_MEMORY,
    "vaswani::test_greedy_generate_dict_outputs_use_cache": _NO_MEMORY,
}
ARCHITECTURES = ("transformer-xl", "shaw", "lstm", "qrnn", "vaswani")

_TESTS = '''
import unittest
from pathlib import Path

import torch

import transformer_xl.integrations.huggingface as integration
from transformer_xl.config import ARCHITECTURES
from tests import test_modeling_common
from tests.generation import test_utils
from tests.generation.test_utils import GenerationTesterMixin
from tests.test_modeling_common import ModelTesterMixin, ids_tensor

# it sets norm_eps to 1, which no model has
for module in (test_modeling_common, test_utils):
    module.set_config_for_less_flaky_test = lambda config: None


class Tester:
    """Makes a configuration and inputs, with the attributes that the tests expect."""

    batch_size, seq_length, is_training = 13, 7, True
    vocab_size, hidden_size, num_hidden_layers, num_attention_heads = 99, 32, 2, 4
    bos_token_id, eos_token_id, pad_token_id = 1, 2, 98

    def __init__(self, architecture):
        self.architecture = architecture

    def get_config(self):
        settings = {"n_layers": 2, "d_model": 32, "n_heads": 4, "d_ff": 37, "vocab_size": 99, "dropout": 0.1}
        settings |= {"max_relative_positions": 60}
        known = ARCHITECTURES[self.architecture].model_fields
        settings = {name: value for name, value in settings.items() if name in known}
        return integration.PretrainedTransformerXLConfig(
            architecture=self.architecture, segment_length=20, memory_length=40 if has_memory(self) else 0, **settings
        )

    def prepare_config_and_inputs_for_common(self):
        inputs = {"input_ids": ids_tensor([13, 7], 99), "attention_mask": torch.ones(13, 7, dtype=torch.long)}
        return self.get_config(), inputs


def has_memory(tester):
    return ARCHITECTURES[tester.architecture].has_memory


class Base(ModelTesterMixin, GenerationTesterMixin):
    all_model_classes = (
        integration.TransformerXLModel,
        integration.TransformerXLForCausalLM,
        integration.TransformerXLForSequenceClassification,
        integration.TransformerXLForTokenClassification,
    )
    test_resize_embeddings = False

    def setUp(self):
        self.model_tester = Tester(self.architecture)
        self.has_attentions = self.architecture in ("transformer-xl", "shaw")

    def _check_caches_are_equal(self, first, second, *args, **kwargs):
        assert first.num_columns == second.num_columns
        for name, tensor in first.memory.tensors().items():
            torch.testing.assert_close(tensor, second.memory.tensors()[name], rtol=1e-4, atol=1e-5)

    _check_past_key_values_for_generate = lambda self, *args, **kwargs: None  # they are no keys and values


for architecture in ARCHITECTURES_TO_TEST:
    globals()[architecture] = type(architecture, (Base, unittest.TestCase), {"architecture": architecture})
'''
# in place of modules that are neither in the source distribution nor in --tests
_MISSING = {
    "exporters/test_export.py": "class ExportTesterMixin: ...\nclass ExportGenerateTesterMixin: ...\n",
    "generation/test_utils.py": "class GenerationTesterMixin: ...\n",
}


def copy_tests(folder: Path, version: str, others: Path | None) -> None:
    """Put the tests of transformers into folder/tests."""
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            *("--no-binary", "transformers", f"transformers=={version}", "--dest", str(folder)),
        ],
        check=True,
    )
    (archive,) = folder.glob("transformers-*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder / "source", filter="data")
    tests = folder / "tests"
    if others is not None:
        shutil.copytree(others, tests, ignore=shutil.ignore_patterns("models", "fixtures", "__pycache__"))
    shutil.copytree(folder / "source" / f"transformers-{version}" / "tests", tests, dirs_exist_ok=True)
    for name, source in _MISSING.items():
        file = tests / name
        if not file.exists():
            print(f"{name} is missing: its tests are not run; give --tests, a checkout of v{version}")
            file.parent.mkdir(exist_ok=True)
            file.write_text(source)
        (file.parent / "__init__.py").touch()
    (tests / "__init__.py").touch()
    (tests / "test_ours.py").write_text(_TESTS.replace("ARCHITECTURES_TO_TEST", repr(ARCHITECTURES)))


def main() -> int:
    """Run the tests, print what is unexpected, and return the exit status."""
    parser = argparse.ArgumentParser(description="Run transformers' common tests on our models.")
    parser.add_argument("--tests", type=Path, help="the folder tests of a checkout of transformers")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    options = parser.parse_args()
    version = metadata.version("transformers")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_tests(folder, version, options.tests and options.tests.resolve())
        paths = os.pathsep.join([str(folder), str(SRC)])
        command = [
            *(sys.executable, "-m", "pytest", "tests/test_ours.py", "-q", "-W", "ignore", "--tb=short", "-rf"),
            *("-p", "no:cacheprovider", *options.pytest),
        ]
        environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
        result = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    print(result.stdout)
    failed = re.findall(r"^(?:SUB)?FAILED\S* tests/test_ours\.py::(\S+?)::(\w+)", result.stdout, flags=re.MULTILINE)
    names = {f"{architecture}::{test}": test for architecture, test in failed}
    unexpected = sorted(full for full, test in names.items() if not {full, test} & EXPECTED_FAILURES.keys())
    has_failed = names.keys() | set(names.values())
    passing = sorted(EXPECTED_FAILURES.keys() - has_failed) if not options.pytest else []
    if options.tests is None:  # those of generation are not run
        passing = [name for name in passing if "generate" not in name]
    print(f"transformers {version}: {result.stdout.splitlines()[-1] if result.stdout else 'no tests'}")
    print(f"expected failures: {len(names) - len(unexpected)}; unexpected: {unexpected}; now passing: {passing}")
    return int(bool(unexpected or passing or not result.stdout))


if __name__ == "__main__":
    sys.exit(main())
