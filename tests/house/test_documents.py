"""Checks of the documents: commands parse, imports, paths and make targets exist, no path is of one machine."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import CycloptsError

from transformer_xl.cli.main import COMMANDS, build_app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def code_blocks(text: str, label: str = r"\w*") -> list[str]:
    """Return the contents of fenced code blocks whose opening fence has the label."""
    return re.findall(rf"^```{label}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def txl_lines(text: str) -> Iterator[list[str]]:
    """Yield the arguments of each `txl` command line in a code block, up to a pipe or redirection."""
    for block in code_blocks(text):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.match(r"(?:\$ )?(?:\S*/)?txl(?: (.*))?$", line.strip())
            if found:
                words = shlex.split(found[1] or "", comments=True)
                shell = [index for index, word in enumerate(words) if word in ("|", ">", "2>", "<", "&&", ";")]
                yield words[: shell[0]] if shell else words


def refused(words: list[str]) -> str | None:
    """Return why the command line refuses these arguments; None: it does not. Nothing is run."""
    try:
        build_app().parse_args(words, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        return str(error)
    return None


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_line_parses(document: Path) -> None:
    lines = list(txl_lines(document.read_text(encoding="utf-8")))
    assert {shlex.join(words): why for words in lines if (why := refused(words))} == {}


def setting_spans(text: str) -> list[list[str]]:
    """Return the words of each code span that begins with a setting of a run and gives its value."""
    spans = (span.split() for span in re.findall(r"`(--(?:model|train|evaluation)\.[^`\n]+)`", text))
    return [words for words in spans if len(words) > 1]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_setting_in_running_text_parses(document: Path) -> None:
    spans = setting_spans(document.read_text(encoding="utf-8"))
    assert {shlex.join(words): why for words in spans if (why := refused(["train", "small", *words]))} == {}


def test_a_wrong_setting_in_running_text_is_found() -> None:
    text = "| `--pre_lnorm` | `--model.final-norm false` | `--model.no-final-norm` `--train.max-steps 5` |"
    wrong, right = setting_spans(text)
    assert "false" in (refused(["train", "small", *wrong]) or "")
    assert refused(["train", "small", *right]) is None


def test_the_readme_shows_how_to_use_it() -> None:
    """Otherwise the tests above would pass for a README without command lines."""
    assert {words[0] for words in txl_lines(README)} >= {"prepare", "train", "evaluate", "generate"}


def test_every_command_is_there() -> None:
    assert {name: why for name in COMMANDS if (why := refused([name, "--help"]))} == {}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("txl train --corpus a --run b --model.layer 6", "Unknown option: --model.layer"),
        ("txl trian --corpus a", "Unknown command"),
        ("$ .venv/bin/txl evaluate runs/a --splitt test | head", "Unknown option: --splitt"),
        ("txl prepare a.txt --out \\\n  # a remark\n", "--out"),
        ("txl generate runs/a --max-new-tokens many  # a remark", "many"),
    ],
)
def test_a_wrong_command_line_is_found(line: str, why: str) -> None:
    (words,) = txl_lines(f"Text\n\n```sh\n{line}\n```\n")
    assert why in (refused(words) or "")


def test_command_lines_are_read_as_a_shell_would() -> None:
    text = "```\ntxl generate a \\\n  --prompt 'x | y' > out.txt\n# txl none\nls txl x\n```\n\ntxl outside\n"
    assert list(txl_lines(text)) == [["generate", "a", "--prompt", "x | y"]]


def wrong_imports(text: str) -> list[str]:
    """Return the names that Python blocks import from this package and that it does not have."""
    nodes = [node for block in code_blocks(text, "python") for node in ast.walk(ast.parse(block))]
    return [
        f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "transformer_xl"
        for alias in node.names
        if not hasattr(importlib.import_module(node.module or ""), alias.name)
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_imports_what_exists(document: Path) -> None:
    assert wrong_imports(document.read_text(encoding="utf-8")) == []


def test_a_wrong_import_in_python_is_found() -> None:
    assert wrong_imports("```python\nfrom transformer_xl import load, Sampler\n```\n") == ["transformer_xl.Sampler"]


def make_targets(makefile: str) -> set[str]:
    return set(re.findall(r"^([a-z]+):", makefile, flags=re.MULTILINE))


def make_words(text: str) -> set[str]:
    """Return X of every `make X` in code."""
    code = "\n".join([*code_blocks(text), *(span for span in re.findall(r"`([^`\n]+)`", text))])
    return set(re.findall(r"^(?:\$ )?make ([a-z]+)", code, flags=re.MULTILINE))


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CONTRIBUTING.md"], ids=lambda path: path.name)
def test_every_make_target_exists(document: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert make_words(document.read_text(encoding="utf-8")) <= make_targets(makefile)


def test_the_readme_names_the_two_targets() -> None:
    assert make_words(README) >= {"demo", "test"}
    assert make_words("`make all` or\n\n```\n$ make it\n```\nand make that") == {"all", "it"}
    assert make_targets("A := b\ndemo: x\n\tmake y: z\ntest:\n") == {"demo", "test"}


def project_texts() -> Iterator[tuple[str, str]]:
    """Yield the path and content of every text file of the project."""
    found = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in (".ci", "src", "tests", "benchmarks", "docs"):
        found += [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    for path in sorted(found):
        content = path.read_bytes()
        if b"\0" not in content:
            yield path.relative_to(ROOT).as_posix(), content.decode("utf-8")


def machine_paths(text: str) -> list[str]:
    """Return absolute paths that only one machine has."""
    return re.findall(r"(?<![\w./-])/(?:work|root|home|tmp)\b[\w./-]*", text)


def test_no_path_is_of_one_machine() -> None:
    texts = dict(project_texts())
    assert {"README.md", ".ci/run", "src/transformer_xl/config/run.py", "tests/house/test_documents.py"} <= texts.keys()
    assert {path: found for path, text in texts.items() if (found := machine_paths(text))} == {}


def test_a_path_of_one_machine_is_found() -> None:
    slash = "/"
    assert machine_paths(f"cd {slash}home/me/x; ls '{slash}tmp'") == [f"{slash}home/me/x", f"{slash}tmp"]
    assert machine_paths(f"a{slash}work, .{slash}tmp, {slash}homely, {slash}usr/bin/env, {slash}{slash}root") == []


def test_broken_links_of_the_site_are_found(tmp_path: Path) -> None:
    specification = importlib.util.spec_from_file_location("build", ROOT / "docs" / "build.py")
    assert specification is not None
    assert specification.loader is not None
    build = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(build)
    (tmp_path / "a.svg").touch()
    (tmp_path / "b.html").write_text('<h1 id="title">b</h1><a href="#title"></a><a href="a.html"></a>')
    right = '<a href="b.html#title"></a><img src="a.svg"><a href="https://host/none"></a>'
    (tmp_path / "a.html").write_text(right)
    assert build.broken_links(tmp_path) == []
    (tmp_path / "a.html").write_text(f'{right}<a href="c.html"></a><img src="b.svg"><a href="b.html#none"></a>')
    assert build.broken_links(tmp_path) == ["a.html: c.html", "a.html: b.svg", "a.html: b.html#none"]
