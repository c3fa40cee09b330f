"""Rules for the code itself: suffixes of tensor names, einsum letters, no pickle, one name for each class."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "transformer_xl"
SOURCES = sorted(SRC.rglob("*.py"))


def faults_by_file(paths: list[Path], check: Callable[[str], Collection[str]]) -> dict[str, Collection[str]]:
    """Apply `check`, which returns the faults of a source text, to each file, and return only files with faults."""
    faults = {path.relative_to(ROOT).as_posix(): check(path.read_text(encoding="utf-8")) for path in paths}
    return {path: found for path, found in faults.items() if found}


def shape_suffix(name: str) -> str | None:
    """Return BTD of `hidden_BTD`, or None if the name has no shape suffix."""
    match = re.fullmatch(r"_*[a-z][a-z0-9_]*_([A-Z][A-Z0-9]*)", name)
    return match[1] if match else None


def last_name(node: ast.AST) -> str:
    """Return x_BT of `x_BT` and of `inputs.x_BT`, and the empty string for any other expression."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def einsum_faults(source: str) -> list[str]:
    """Return where the letters of an einsum differ from the suffixes of its operands and of its result."""
    tree = ast.parse(source)
    targets_of: dict[ast.expr, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets_of[node.value] = node.targets
        elif isinstance(node, ast.AnnAssign) and node.value:
            targets_of[node.value] = [node.target]
    faults: list[str] = []
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and last_name(call.func) == "einsum":
            names = [target for target in targets_of.get(call, []) if isinstance(target, ast.Name)]
            faults += [f"line {call.lineno}: {fault}" for fault in call_faults(call, names)]
    return faults


def call_faults(call: ast.Call, targets: list[ast.Name]) -> Iterator[str]:
    """Yield the faults of one call of einsum, whose result is assigned to `targets`."""
    equation = ast.unparse(call.args[0]).strip("'") if call.args else "nothing"
    match = re.fullmatch(r"([a-z0-9,]+)->([a-z0-9]*)", equation)
    if not match:
        yield f"the equation must be like 'bt,ts->bs', found '{equation}'"
        return
    operands = match[1].split(",")
    if len(operands) != len(call.args) - 1:
        yield f"{len(operands)} operands in '{equation}', {len(call.args) - 1} passed"
    pairs = [*zip(operands, call.args[1:], strict=False), *((match[2], target) for target in targets)]
    for letters, node in pairs:
        if (shape_suffix(last_name(node)) or "").lower() != letters:
            yield f"'{letters}' in '{equation}' stands for {ast.unparse(node)}"


def test_einsum_letters_are_the_suffixes() -> None:
    assert faults_by_file(SOURCES, einsum_faults) == {}
    # the test would also pass if the sources contained no einsum; this file has at least five
    assert (SRC / "ops" / "kernels" / "reference.py").read_text(encoding="utf-8").count("torch.einsum(") >= 5


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        ("x_BNTS = torch.einsum('btnh,bsnh->bnts', a.q_BTNH, k_BSNH)", []),
        ("x_BS = torch.einsum('bt,ts->bs', a.b_BT, a.c_ST)", ["line 1: 'ts' in 'bt,ts->bs' stands for a.c_ST"]),
        ("x_SB: Tensor = einsum('bt,ts->bs', a_BT, b_TS)", ["line 1: 'bs' in 'bt,ts->bs' stands for x_SB"]),
        ("f(torch.einsum('bt,ts->bs', a_BT))", ["line 1: 2 operands in 'bt,ts->bs', 1 passed"]),
        ("f(einsum('...t,ts', a_BT, b_TS))", ["line 1: the equation must be like 'bt,ts->bs', found '...t,ts'"]),
    ],
)  # fmt: skip
def test_wrong_einsum_letters_are_found(source: str, faults: list[str]) -> None:
    assert einsum_faults(source) == faults


def letters_without_legend(source: str) -> set[str]:
    """Return the letters of shape suffixes that the paragraph `Shape suffixes:` of the module docstring lacks."""
    tree = ast.parse(source)
    names = {node.arg if isinstance(node, ast.arg) else last_name(node) for node in ast.walk(tree)}
    used = {letter for name in names for letter in shape_suffix(name) or "" if letter.isalpha()}
    legend = re.search(r"Shape suffixes:(.*?)(\n\n|$)", ast.get_docstring(tree) or "", flags=re.DOTALL)
    return used - set(re.findall(r"\b[A-Z]\b", legend[1] if legend else ""))


def test_legends_explain_every_letter_of_shape_suffixes() -> None:
    files = [*SRC.glob("model/*.py"), *SRC.glob("ops/*.py"), *SRC.glob("ops/kernels/*.py")]
    assert faults_by_file(files, letters_without_legend) == {}


def test_letters_without_legend_are_found() -> None:
    legend = '"""Attention.\n\nShape suffixes: B batch rows, T new\ntokens, D width.\n\nMore: S.\n"""\n'
    assert letters_without_legend(legend + "x_BTD = f(_STD, WIDE_X, y_B1T)") == set()
    assert letters_without_legend(legend + "def f(x_BSD): ...") == {"S"}
    assert letters_without_legend(legend + "class A:\n    x_BV: Tensor") == {"V"}
    assert letters_without_legend("x.y_BT = 1") == {"B", "T"}


PICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}


def pickle_faults(source: str) -> list[str]:
    """Return where a source pickles or unpickles: through an import, torch or numpy."""
    faults: list[str] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                faults += [f"imports {alias.name}" for alias in names if alias.name.split(".")[0] in PICKLERS]
            case ast.ImportFrom(module="torch", names=names):
                faults += [f"imports torch.{alias.name}" for alias in names if alias.name in ("load", "save")]
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in PICKLERS:
                faults.append(f"imports {module}")
            case ast.Call(func=function, keywords=keywords):
                called = ast.unparse(function)
                allowed = [ast.unparse(keyword.value) for keyword in keywords if keyword.arg == "allow_pickle"]
                if called in ("torch.load", "torch.save") or allowed not in ([], ["False"]):
                    faults.append(f"calls {called}")
    return faults


def test_nothing_is_pickled() -> None:
    assert faults_by_file(SOURCES, pickle_faults) == {}


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        ("import os, pickle", ["imports pickle"]),
        ("from torch import nn, save", ["imports torch.save"]),
        ("x = torch.load(path, weights_only=True)", ["calls torch.load"]),
        ("np.load(path, allow_pickle=True)", ["calls np.load"]),
        ("np.load(path, allow_pickle=False); np.load(path); model.load(path); folder.save(x)", []),
    ],
)
def test_pickle_is_found(source: str, faults: list[str]) -> None:
    assert pickle_faults(source) == faults


def test_public_classes_have_distinct_names() -> None:
    nodes = [node for path in SOURCES for node in ast.parse(path.read_text(encoding="utf-8")).body]
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_"))
    assert [name for name, count in names.items() if count > 1] == []


def test_commands_in_messages_quote_paths() -> None:
    """So that they can be pasted into a shell."""
    unquoted = re.compile(r"(?:txl [a-z]+ (?:--[a-z-]+ )?|--(?:resume|corpus|run) )\{(?!quoted\()")
    assert faults_by_file(SOURCES, unquoted.findall) == {}


def test_notes_are_printed_by_one_function() -> None:
    """`note` of progress.py, or with its NOTE, so that all begin alike."""
    prefixed = re.compile(r"[\"'](?:note|warning): ", re.IGNORECASE)
    assert faults_by_file(SOURCES, prefixed.findall) == {"src/transformer_xl/progress.py": ['"note: ']}
