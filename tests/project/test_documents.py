"""Checks of the documents: command lines parse; imports, make targets and links exist; no path is of one machine."""

from __future__ import annotations

import ast
import importlib
import json
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cyclopts import CycloptsError

from transformer_xl.cli.main import COMMANDS, build_app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# "documents" are the README and the pages of the documentation
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
for_each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def code_blocks(text: str, label: str = r"\w*") -> list[str]:
    """Return the contents of fenced code blocks whose opening fence has the label."""
    return re.findall(rf"^```{label}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def wide_lines(text: str) -> list[str]:
    """Return the lines of code blocks that are wider than the site's column in a window of 1,280 pixels."""
    blocks = re.findall(r"^( *)```\w*\n(.*?)^\1```$", text, flags=re.MULTILINE | re.DOTALL)
    return [line for indent, block in blocks for line in block.splitlines() if len(line) - len(indent) > 98]


@pytest.mark.parametrize("document", DOCUMENTS[1:], ids=lambda path: path.name)
def test_code_fits_the_column(document: Path) -> None:
    assert wide_lines(document.read_text(encoding="utf-8")) == []
    assert wide_lines(f"```sh\n{'x' * 99}\n```\n") == ["x" * 99]


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 90


def txl_arguments(text: str) -> Iterator[list[str]]:
    """Yield the arguments of each `txl` command line in a code block, up to a pipe or redirection."""
    for block in code_blocks(text):
        for line in block.replace("\\\n", " ").splitlines():
            match = re.match(r"(?:\$ )?(?:\S*/)?txl(?: (.*))?$", line.strip())
            if match:
                words = shlex.split(match[1] or "", comments=True)
                shell = [index for index, word in enumerate(words) if word in ("|", ">", "2>", "<", "&&", ";")]
                yield words[: shell[0]] if shell else words


def parse_error(arguments: list[str]) -> str | None:
    """Return the error of parsing the arguments of `txl`, or None if they are valid; no command is run."""
    try:
        build_app().parse_args(arguments, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        return str(error)
    return None


@for_each_document
def test_command_lines_parse(document: Path) -> None:
    lines = list(txl_arguments(document.read_text(encoding="utf-8")))
    assert {shlex.join(line): error for line in lines if (error := parse_error(line))} == {}


def inline_settings(text: str) -> list[list[str]]:
    """Return the words of each inline code span with a setting of a run and its value, such as `--model.d-ff 64`."""
    spans = (span.split() for span in re.findall(r"`(--(?:model|train|evaluation)\.[^`\n]+)`", text))
    return [words for words in spans if len(words) > 1]


@for_each_document
def test_settings_in_running_text_parse(document: Path) -> None:
    spans = inline_settings(document.read_text(encoding="utf-8"))
    assert {shlex.join(words): error for words in spans if (error := parse_error(["train", "small", *words]))} == {}


def test_readme_shows_the_main_commands() -> None:
    """Without command lines in the README, the tests above would pass as well."""
    assert {arguments[0] for arguments in txl_arguments(README)} >= {"prepare", "train", "evaluate", "generate"}


def test_help_of_every_command_parses() -> None:
    assert {name: error for name in COMMANDS if (error := parse_error([name, "--help"]))} == {}


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("txl train --corpus a --run b --model.layer 6", "Unknown option: --model.layer"),
        ("txl trian --corpus a", "Unknown command"),
        ("$ .venv/bin/txl evaluate runs/a --splitt test | head", "Unknown option: --splitt"),
        ("txl prepare a.txt --out \\\n  # a comment\n", "--out"),
        ("txl generate runs/a --max-new-tokens many  # a comment", "many"),
    ],
)
def test_wrong_command_lines_are_found(line: str, error: str) -> None:
    (arguments,) = txl_arguments(f"Text\n\n```sh\n{line}\n```\n")
    assert error in (parse_error(arguments) or "")


def missing_imports(text: str) -> list[str]:
    """Return the names that Python blocks import from this package although it does not have them."""
    nodes = [node for block in code_blocks(text, "python") for node in ast.walk(ast.parse(block))]
    return [
        f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "transformer_xl"
        for alias in node.names
        if not hasattr(importlib.import_module(node.module or ""), alias.name)
    ]


@for_each_document
def test_imports_of_python_blocks_exist(document: Path) -> None:
    assert missing_imports(document.read_text(encoding="utf-8")) == []


def test_missing_imports_are_found() -> None:
    assert missing_imports("```python\nfrom transformer_xl import load, Sampler\n```\n") == ["transformer_xl.Sampler"]


def make_commands(text: str) -> set[str]:
    """Return X of every `make X` in code blocks and inline code."""
    code = "\n".join([*code_blocks(text), *re.findall(r"`([^`\n]+)`", text)])
    return set(re.findall(r"^(?:\$ )?make ([a-z]+)", code, flags=re.MULTILINE))


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CONTRIBUTING.md"], ids=lambda path: path.name)
def test_make_targets_exist(document: Path) -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert make_commands(document.read_text(encoding="utf-8")) <= set(targets)


def project_texts() -> Iterator[tuple[str, str]]:
    """Yield the path and content of every text file of the project."""
    files = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in (".ci", "src", "tests", "benchmarks", "docs"):
        files += [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    for path in sorted(files):
        content = path.read_bytes()
        if b"\0" not in content and path.name != ".git":  # of a second working tree
            yield path.relative_to(ROOT).as_posix(), content.decode("utf-8")


def local_paths(text: str) -> list[str]:
    """Return absolute paths that exist on one computer only."""
    return re.findall(r"(?<![\w./-])/(?:work|root|home|tmp)\b[\w./-]*", text)


def test_no_path_is_of_one_computer() -> None:
    texts = dict(project_texts())
    assert {"README.md", ".ci/run", "src/transformer_xl/device.py", "tests/project/test_documents.py"} <= texts.keys()
    assert {path: found for path, text in texts.items() if (found := local_paths(text))} == {}


@pytest.fixture(scope="module")
def build() -> Any:
    """The script that builds the site."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "build.py")))


def test_broken_links_of_the_site_are_found(build: Any, tmp_path: Path) -> None:
    (tmp_path / "a.svg").touch()
    (tmp_path / "b.html").write_text('<h1 id="title">b</h1><a href="#title"></a><a href="a.html"></a>')
    valid = '<a href="b.html#title"></a><img src="a.svg"><a href="https://host/none"></a>'
    (tmp_path / "a.html").write_text(valid)
    assert build.broken_links(tmp_path) == []
    (tmp_path / "a.html").write_text(f'{valid}<a href="c.html"></a><img src="b.svg"><a href="b.html#none"></a>')
    assert build.broken_links(tmp_path) == ["a.html: c.html", "a.html: b.svg", "a.html: b.html#none"]


def test_what_the_search_misses_is_found(build: Any, tmp_path: Path) -> None:
    items = [{"title": "Your own tokenizer", "text": "a custom one"}, {"title": "wandb", "text": ""}]
    (tmp_path / "search.json").write_text(json.dumps({"items": items}))
    assert build.not_found(tmp_path, ("custom tokenizer", "wandb", "custom wandb")) == ["custom wandb"]


# what documents name of other programs: files of the authors' code, functions of libraries
FOREIGN = {"tf/model.py", "eval.py", "len", "exp", "set_recurrent_mode", "conditional_score"}


def missing_names(text: str, files: list[str], functions: set[str]) -> set[str]:
    """Return the files and functions in inline code that are not in the project."""
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    paths = {
        path for span in spans for path in re.findall(r"(?<![\w./*-])([\w./-]+\.(?:py|cpp|h|md|toml|yml))\b", span)
    }
    known = {"/".join(file.split("/")[start:]) for file in files for start in range(file.count("/") + 1)}
    called = {name for span in spans for name in re.findall(r"(?<![\w.])([A-Za-z_]\w+)\(", span)}
    return (paths - known | called - functions) - FOREIGN


def test_files_and_functions_in_documents_exist() -> None:
    """A document keeps no name of what was moved or renamed, but for the log, whose names are of its time."""
    sources = [
        path for folder in ("src", "tests", "benchmarks", "docs", "examples") for path in (ROOT / folder).rglob("*")
    ]
    sources += [path for path in ROOT.iterdir() if path.is_file()]
    files = [path.relative_to(ROOT).as_posix() for path in sources]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sources if path.suffix == ".py"]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    functions = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, kinds)}
    documents = {path: path.read_text(encoding="utf-8") for path in [*DOCUMENTS, ROOT / "CONTRIBUTING.md"]}
    del documents[ROOT / "docs" / "log.md"]
    found = {path.name: missing_names(text, files, functions) for path, text in documents.items()}
    assert {name: names for name, names in found.items() if names} == {}
    assert missing_names("`gone.py` and `vanished(x)`, `reader.py`", files, functions) == {"gone.py", "vanished"}
