"""Rules for the code itself: names that say shapes, einsum letters, no pickle."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "transformer_xl"
SOURCES = sorted(SRC.rglob("*.py"))


def broken(paths: list[Path], check: Callable[[str], Collection[str]]) -> dict[str, Collection[str]]:
    """What the check finds in each file, by its path; files without faults are left out."""
    found = {path.relative_to(ROOT).as_posix(): check(path.read_text(encoding="utf-8")) for path in paths}
    return {path: faults for path, faults in found.items() if faults}


def suffix(name: str) -> str | None:
    """BTD of `hidden_BTD`; nothing where a name says no shape."""
    found = re.fullmatch(r"_*[a-z][a-z0-9_]*_([A-Z][A-Z0-9]*)", name)
    return found[1] if found else None


def named(node: ast.expr) -> str | None:
    """The last word of `x_BT` and `inputs.x_BT`."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


def einsum_faults(source: str) -> list[str]:
    """Where the letters of an einsum are not those of the names it takes and gives."""
    tree = ast.parse(source)
    targets: dict[ast.expr, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets[node.value] = node.targets
        elif isinstance(node, ast.AnnAssign) and node.value:
            targets[node.value] = [node.target]
    faults: list[str] = []
    for call in ast.walk(tree):
        if not (isinstance(call, ast.Call) and named(call.func) == "einsum"):
            continue
        given = [target for target in targets.get(call, []) if isinstance(target, ast.Name)]
        faults += [f"line {call.lineno}: {fault}" for fault in one_einsum_faults(call, given)]
    return faults


def one_einsum_faults(call: ast.Call, targets: list[ast.Name]) -> Iterator[str]:
    first = call.args[0] if call.args else None
    words = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""
    found = re.fullmatch(r"([a-z0-9,]+)->([a-z0-9]*)", words)
    if not found:
        yield f"letters written out as 'bt,ts->bs' are wanted, found {ast.unparse(first) if first else 'nothing'}"
        return
    operands = found[1].split(",")
    if len(operands) != len(call.args) - 1:
        yield f"{len(operands)} operands in '{words}', {len(call.args) - 1} given"
    for letters, node in [*zip(operands, call.args[1:], strict=False), *((found[2], target) for target in targets)]:
        shape = suffix(named(node) or "")
        if shape is None or shape.lower() != letters:
            yield f"'{letters}' in '{words}' stands for {ast.unparse(node)}"


def test_einsum_letters_are_the_suffixes() -> None:
    assert broken(SOURCES, einsum_faults) == {}
    # or it would hold of no einsum at all
    assert (SRC / "model" / "kernels" / "reference.py").read_text(encoding="utf-8").count("torch.einsum(") >= 5


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("x_BNTS = torch.einsum('btnh,bsnh->bnts', a.q_BTNH, k_BSNH)", []),
        ("x = torch.einsum('nh,bsnh->bns', u_NH, k_BSNH)[0]", []),
        ("f(torch.einsum('bt,ts->bs', a_BT, b_TS))", []),
        ("x_BS = einsum('bt,ts->bs', a_BS, b_TS)", ["line 1: 'bt' in 'bt,ts->bs' stands for a_BS"]),
        ("x_BS = torch.einsum('bt,ts->bs', a.b_BT, a.c_ST)", ["line 1: 'ts' in 'bt,ts->bs' stands for a.c_ST"]),
        ("x_SB: Tensor = torch.einsum('bt,ts->bs', a_BT, b_TS)", ["line 1: 'bs' in 'bt,ts->bs' stands for x_SB"]),
        ("x_BS = y_SB = torch.einsum('bt,ts->bs', a_BT, b_TS)", ["line 1: 'bs' in 'bt,ts->bs' stands for y_SB"]),
        ("x = torch.einsum('bt,ts->bs', a_BT, b_TS)", ["line 1: 'bs' in 'bt,ts->bs' stands for x"]),
        ("f(torch.einsum('bt,ts->bs', a_BT * 2, b_TS))", ["line 1: 'bt' in 'bt,ts->bs' stands for a_BT * 2"]),
        ("f(torch.einsum('bt,ts->bs', a_BT))", ["line 1: 2 operands in 'bt,ts->bs', 1 given"]),
        ("f(torch.einsum('...t,ts', a_BT, b_TS))", ["line 1: letters written out as 'bt,ts->bs' are wanted, found "
                                                     "'...t,ts'"]),
    ],
)  # fmt: skip
def test_wrong_einsum_letters_are_found(source: str, found: list[str]) -> None:
    assert einsum_faults(source) == found


def letters_without_legend(source: str) -> set[str]:
    """Letters of name suffixes that the legend in the file's docstring does not explain."""
    tree = ast.parse(source)
    names = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used = {letter for name in names for letter in suffix(name) or "" if letter.isalpha()}
    legend = re.search(r"(Letters|Shape suffixes):(.*?)(\n\n|$)", ast.get_docstring(tree) or "", flags=re.DOTALL)
    return used - set(re.findall(r"\b[A-Z]\b", legend[2] if legend else ""))


def test_every_shape_letter_is_in_the_legend() -> None:
    assert broken(sorted((SRC / "model").rglob("*.py")), letters_without_legend) == {}


def test_a_missing_legend_is_found() -> None:
    legend = '"""What it is.\n\nLetters: B rows, T new\ntokens, D width.\n\nMore: S.\n"""\n'
    assert letters_without_legend(legend + "x_BTD = f(_STD, WIDE_X, y_B1T)") == set()
    assert letters_without_legend(legend + "def f(x_BSD): ...") == {"S"}
    assert letters_without_legend(legend + "class A:\n    x_BV: Tensor") == {"V"}
    assert letters_without_legend("x_BT = 1") == {"B", "T"}
    assert letters_without_legend('"""Shape suffixes: B rows."""\nx.y_B') == set()


PICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}


def pickles(source: str) -> list[str]:
    """Where pickle comes in: by import, through torch, or through numpy."""
    faults = []
    for node in ast.walk(ast.parse(source)):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        faults += [f"imports {name}" for name in modules if name.split(".")[0] in PICKLERS]
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            faults += [f"imports torch.{alias.name}" for alias in node.names if alias.name in ("load", "save")]
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            faults += [f"calls {called}"] if called in ("torch.load", "torch.save") else []
            allowed = [word.value for word in node.keywords if word.arg == "allow_pickle"]
            if any(not (isinstance(value, ast.Constant) and value.value is False) for value in allowed):
                faults.append(f"calls {called} with pickle")
    return faults


def test_nothing_is_pickled() -> None:
    assert broken(SOURCES, pickles) == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import os, pickle", ["imports pickle"]),
        ("def f():\n    from pickle import load", ["imports pickle"]),
        ("from torch import nn, save", ["imports torch.save"]),
        ("x = torch.load(path, weights_only=True)", ["calls torch.load"]),
        ("np.load(path, allow_pickle=True)", ["calls np.load with pickle"]),
        ("np.load(path, allow_pickle=False); np.load(path); model.load(path); folder.save(x)", []),
    ],
)
def test_pickle_is_found(source: str, found: list[str]) -> None:
    assert pickles(source) == found
