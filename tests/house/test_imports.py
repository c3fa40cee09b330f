"""Imports point one way, and nothing heavy is imported before it is needed."""

from __future__ import annotations

import ast
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import transformer_xl

SRC = Path(__file__).parents[2] / "src" / "transformer_xl"

# From the bottom up. A module imports from lower ranks and from its own folder, never from its neighbours.
RANKS = (
    {"config"},
    {"files", "progress"},
    {"device", "tensor_file"},
    {"text", "model"},
    {"run_folder"},
    {"evaluation"},
    {"training", "generation"},
    {"analysis"},
    {"interop"},
    {"reproduction"},
    {"cli"},
    {"__main__"},
)
# Parts that may import less than their rank allows.
_BOTTOM = {"config", "files", "progress", "device", "tensor_file"}
NARROW = {"model": _BOTTOM, "text": {"config", "files"}}

HEAVY = {"torch", "numpy", "matplotlib", "pydantic"}


def rank(part: str) -> int:
    found = [place for place, parts in enumerate(RANKS) if part in parts]
    assert found, f"'{part}' has no place in RANKS; give it one, in docs/design.md too"
    return found[0]


def imported_parts(source: str) -> Iterator[str]:
    """The parts of the package that a file imports, wherever in it; TYPE_CHECKING makes no difference."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield "a relative import"
            continue
        elif isinstance(node, ast.ImportFrom) and node.module == "transformer_xl":
            # `from transformer_xl import model`; dunder names stand in the package's own file, below all others
            names = [f"transformer_xl.{alias.name}" for alias in node.names if not alias.name.startswith("__")]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "transformer_xl":
                yield name.split(".")[1] if "." in name else "everything"


def upward_imports(part: str, source: str) -> list[str]:
    """What a file of this part imports and must not."""
    known = {name for parts in RANKS for name in parts}
    allowed = NARROW.get(part, {name for name in known if rank(name) < rank(part)}) | {part}
    return [other for other in imported_parts(source) if other not in allowed]


def part_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def test_imports_point_one_way() -> None:
    paths = [path for path in sorted(SRC.rglob("*.py")) if path != SRC / "__init__.py"]  # its table leads everywhere
    found = {path: upward_imports(part_of(path), path.read_text(encoding="utf-8")) for path in paths}
    assert {path.relative_to(SRC).as_posix(): parts for path, parts in found.items() if parts} == {}


@pytest.mark.parametrize(
    ("part", "source", "found"),
    [
        ("model", "from transformer_xl.run_folder import load", ["run_folder"]),
        ("text", "from transformer_xl.device import autocast", ["device"]),
        ("model", "def f():\n    import transformer_xl.text.segments", ["text"]),
        ("text", "from transformer_xl.model.memory import Memory", ["model"]),
        (
            "run_folder",
            "if TYPE_CHECKING:\n    from transformer_xl.evaluation.plan import EvaluationPlan",
            ["evaluation"],
        ),
        ("training", "from transformer_xl.generation.generate import generate", ["generation"]),
        ("generation", "from transformer_xl.cli.output import print_json", ["cli"]),
        ("device", "from transformer_xl import files, load, __version__", ["load"]),
        ("device", "import transformer_xl", ["everything"]),
        ("text", "from .vocabulary import Vocabulary", ["a relative import"]),
        ("cli", "from transformer_xl.training.trainer import Trainer\nimport torch", []),
        (
            "model",
            "from transformer_xl.model import kernels\nfrom transformer_xl.config import TransformerXLConfig",
            [],
        ),
    ],
)
def test_a_wrong_import_is_found(part: str, source: str, found: list[str]) -> None:
    assert upward_imports(part, source) == found


def test_a_part_without_a_place_is_found() -> None:
    with pytest.raises(AssertionError, match="'utils' has no place"):
        upward_imports("utils", "")


def run_python(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SRC.parent)}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True, env=environment)


def heavy_imports(*words: str) -> set[str]:
    """Which of the heavy packages Python imports when run like this."""
    errors = run_python("-X", "importtime", *words).stderr
    imported = set(re.findall(r"^import time:.*\| *([\w.]+)$", errors, flags=re.MULTILINE))
    assert "encodings" in imported, "the list of imports could not be read"
    return HEAVY & imported


def test_help_imports_nothing_heavy() -> None:
    assert heavy_imports("-m", "transformer_xl", "--help") == set()


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert heavy_imports("-c", "import transformer_xl") == set()


def test_a_heavy_import_is_found() -> None:
    assert heavy_imports("-c", "from transformer_xl import UserError") == {"pydantic"}


def test_help_answers_in_half_a_second() -> None:
    """In processor time, which other processes on the machine change least."""
    taken = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert "evaluate" in run_python("-m", "transformer_xl", "--help").stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if taken[-1] < 0.5:
            return
    pytest.fail(f"seconds: {taken}")


@pytest.mark.parametrize("name", transformer_xl.__all__)
def test_every_public_name_is_there(name: str) -> None:
    value = getattr(transformer_xl, name)
    assert name == "ModelConfig" or value.__name__ == name  # which is a union, and has no name of its own


def test_type_checkers_see_the_same_public_names_as_the_interpreter() -> None:
    tree = ast.parse((SRC / "__init__.py").read_text(encoding="utf-8"))
    homes = {
        alias.name: (node.module or "").removeprefix("transformer_xl.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformer_xl.")
        for alias in node.names
    }
    assert homes == transformer_xl._HOMES


def test_a_name_that_is_not_there_is_refused() -> None:
    with pytest.raises(AttributeError, match="module 'transformer_xl' has no attribute 'Transformer'"):
        _ = transformer_xl.Transformer
