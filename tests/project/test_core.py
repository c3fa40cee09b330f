"""The core works without the command line, the apps and the integrations, and can be read in an evening."""

from __future__ import annotations

import ast
import io
import os
import re
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path

import transformer_xl

SCRIPT = """
from pathlib import Path
import torch
import transformer_xl
from transformer_xl import evaluate, generate, load, prepare, save, score, stream, train

assert Path(transformer_xl.__file__).is_relative_to(Path.cwd())
for name in ("cli", "apps", "integrations"):
    assert not (Path(transformer_xl.__file__).parent / name).exists()
corpus = prepare(documents={"train": ["the cat sat on the mat. " * 60], "valid": ["a cat sat. " * 20]}, out="corpus")
model = {"n_layers": 2, "d_model": 16, "n_heads": 2, "d_head": 8, "d_ff": 16}
lengths = {"segment_length": 8, "memory_length": 8, "batch_size": 4}
run = train(None, corpus, "run", model=model, train={"max_steps": 3, **lengths}).run
save(load("run", device="cpu"), "copy")
state = torch.get_rng_state()
copy = load("copy", device="cpu")
assert torch.equal(torch.get_rng_state(), state), "load draws no random weights"
assert evaluate(copy, "valid").nats_per_token == evaluate(run, "valid").nats_per_token
assert score(copy, "the cat")[0].sums.nats > 0
assert generate(copy, "the", max_new_tokens=4, seed=1).text == "".join(stream(copy, "the", max_new_tokens=4, seed=1))
"""


def test_core_stands_alone(tmp_path: Path) -> None:
    outer = ("cli", "apps", "integrations", "__main__.py", "__pycache__")
    source = Path(transformer_xl.__file__).parent
    shutil.copytree(source, tmp_path / "transformer_xl", ignore=shutil.ignore_patterns(*outer))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment, check=True)


def num_code_lines(source: str) -> int:
    """Return the number of lines with code, without docstrings, comments and blank lines."""
    strings = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )
    documentation = {line for node in strings for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = (token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in layout)
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - documentation)


def test_evening_path_is_short() -> None:
    """The files that CONTRIBUTING lists: model, memory, reading, a training step, the loop, evaluation, generation."""
    source = Path(transformer_xl.__file__).parent
    guide = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    files = re.findall(r"^\d+\. `([\w/]+\.py)`:", guide, flags=re.MULTILINE)
    assert 15 <= len(files) <= 22
    assert sum(num_code_lines((source / file).read_text(encoding="utf-8")) for file in files) <= 3300


def test_code_lines_are_counted() -> None:
    assert num_code_lines('"""Doc."""\n\nx = [  # why\n    1,\n]\n\n\ndef f():\n    """Doc\n    more."""\n') == 4
