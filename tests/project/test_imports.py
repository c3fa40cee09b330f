"""Modules import only lower layers, slow packages are imported late, and the public names can be imported."""

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

DESIGN = (Path(__file__).parents[2] / "docs" / "design.md").read_text(encoding="utf-8")
# rows of the table in docs/design.md, from the bottom up: the parts, and what they import if it is not all below
ROWS = [
    (re.findall(r"`([\w.]+)`", parts), re.findall(r"`(\w+)`", only))
    for parts, only in re.findall(r"^\| (`[^|]*) \| [^|]* \| ([^|]*) ?\|$", DESIGN, flags=re.MULTILINE)
][::-1]
RANK_OF = {part: rank for rank, (parts, _) in enumerate(ROWS) for part in parts}
ONLY = {part: set(only) for parts, only in ROWS if only for part in parts}
APPS = re.search(r"each with its command: ([\w, ]+) \|", DESIGN)[1].split(", ")  # pyrefly: ignore

SLOW_PACKAGES = {"torch", "numpy", "matplotlib", "pydantic"}


def imported_parts(source: str) -> Iterator[str]:
    """Yield the parts of the package that a source imports, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(source)):
        modules: list[str] = []
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(level=level) if level:
                yield "a relative import"
            case ast.ImportFrom(module="transformer_xl", names=names):
                # dunder names such as __version__ are in the package's __init__.py, which every part may import
                modules = [f"transformer_xl.{alias.name}" for alias in names if not alias.name.startswith("__")]
            case ast.ImportFrom(module=str(module)):
                modules = [module]
        for module in modules:
            package, _, name = module.partition(".")
            if package == "transformer_xl":
                yield part_of(name) or "everything"


def forbidden_imports(part: str, source: str) -> list[str]:
    """Return the parts that a file of this part imports although it must not."""
    assert part in RANK_OF, f"'{part}' is not in the table of docs/design.md; add it there"
    lower = {other for other, rank in RANK_OF.items() if rank < RANK_OF[part]}
    allowed = ONLY.get(part, lower) | {part}
    return [other for other in imported_parts(source) if other not in allowed]


def part_of(module: str) -> str:
    """Return the part of a module, whose name is without that of the package."""
    two = ".".join(module.split(".")[:2])
    return two if two in RANK_OF else module.split(".")[0]


MODULES = {
    ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__"): path.read_text(encoding="utf-8")
    for path in sorted(SRC.rglob("*.py"))
    if path.parent != SRC or path.name not in ("__init__.py", "__main__.py")  # which import from everywhere
}


def test_modules_import_only_lower_parts() -> None:
    found = {module: forbidden_imports(part_of(module), source) for module, source in MODULES.items()}
    assert {module: parts for module, parts in found.items() if parts} == {}


def test_apps_import_apps_of_their_order() -> None:
    """Those to the right in the table; deleting any leaves the others whole, but `reproduce` needs `analyze`."""
    folders = {module.split(".")[1] for module in MODULES if module.startswith("apps.")}
    assert sorted(folders - set(APPS)) == [], "add these to the row `apps` of the table in docs/design.md"
    found = {
        module: set(re.findall(r"transformer_xl\.apps\.(\w+)", source)) - set(APPS[APPS.index(module.split(".")[1]) :])
        for module, source in MODULES.items()
        if module.startswith("apps.")
    }
    assert {module: apps for module, apps in found.items() if apps} == {}


def test_no_two_files_of_the_core_have_one_name() -> None:
    core = [module for module in MODULES if part_of(module).split(".")[0] not in ("cli", "apps", "integrations")]
    names = [module.split(".")[-1] for module in core if f"{module}." not in " ".join(core)]
    assert sorted({name for name in names if names.count(name) > 1}) == []


@pytest.mark.parametrize(
    ("part", "source", "forbidden"),
    [
        ("text", "from transformer_xl.device import autocast", ["device"]),
        ("model", "def f():\n    import transformer_xl.text.segments", ["text"]),
        ("device", "from transformer_xl import files, load, __version__", ["load"]),
        ("text", "from .vocabulary import Vocabulary", ["a relative import"]),
        ("model", "from transformer_xl.model import kernels", []),
    ],
)
def test_forbidden_imports_are_found(part: str, source: str, forbidden: list[str]) -> None:
    assert forbidden_imports(part, source) == forbidden


def imported_modules(source: str, known: set[str]) -> set[str]:
    """Return the modules of the package that a source imports, also inside functions and under TYPE_CHECKING."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & known


def circles(imports: dict[str, set[str]]) -> list[str]:
    """Return the modules that import themselves through others."""
    reached = {module: set(direct) for module, direct in imports.items()}
    for middle in imports:
        for module in imports:
            if middle in reached[module]:
                reached[module] |= reached[middle]
    return sorted(module for module in imports if module in reached[module])


def test_no_module_imports_itself_through_others() -> None:
    paths = [path for path in SRC.rglob("*.py") if path.name != "__init__.py"]
    sources = {".".join(path.relative_to(SRC.parent).with_suffix("").parts): path.read_text("utf-8") for path in paths}
    imports = {module: imported_modules(source, set(sources)) for module, source in sources.items()}
    assert sum(map(len, imports.values())) > 500
    assert circles(imports) == []


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c"]
    source = "if TYPE_CHECKING:\n    from transformer_xl.training import trainer\ndef f():\n    import transformer_xl.b"
    known = {"transformer_xl.training.trainer", "transformer_xl.b", "transformer_xl.c"}
    assert imported_modules(source, known) == {"transformer_xl.training.trainer", "transformer_xl.b"}


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SRC.parent)}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True, env=environment)


@pytest.mark.parametrize(
    ("arguments", "slow"),
    [
        (["-m", "transformer_xl", "--help"], set()),
        (["-c", "import transformer_xl"], set()),
        (["-c", "from transformer_xl import UserError"], {"pydantic"}),
    ],
)
def test_slow_packages_are_imported_late(arguments: list[str], slow: set[str]) -> None:
    import_times = run_python("-X", "importtime", *arguments).stderr
    imported = set(re.findall(r"^import time:.*\| *([\w.]+)$", import_times, flags=re.MULTILINE))
    assert "encodings" in imported  # the output has the expected format
    assert imported & SLOW_PACKAGES == slow


def test_help_takes_half_a_second() -> None:
    """CPU time, which depends less on other processes than wall time does; the fastest of up to five attempts."""
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert "evaluate" in run_python("-m", "transformer_xl", "--help").stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if seconds[-1] < 0.5:
            return
    pytest.fail(f"seconds: {seconds}")


def test_public_names_can_be_imported() -> None:
    for name in transformer_xl.__all__:
        value = getattr(transformer_xl, name)
        assert name == "ModelConfig" or value.__name__ == name  # ModelConfig is a union, which has no name
    with pytest.raises(AttributeError, match="module 'transformer_xl' has no attribute 'Transformer'"):
        _ = transformer_xl.Transformer
