"""The wheel contains the whole package, and its metadata agree with CITATION.cff, the messages and the documents."""

from __future__ import annotations

import re
import tomllib
import zipfile
from email.message import Message
from email.parser import BytesParser
from pathlib import Path

import pytest

import transformer_xl
from transformer_xl.ops.native import build

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from the working tree and opened."""
    builders = pytest.importorskip("hatchling.builders.wheel", reason="needs hatchling, of the extra dev")
    folder = tmp_path_factory.mktemp("dist")
    (path,) = builders.WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(path) as archive:
        yield archive


def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return BytesParser().parsebytes(wheel.read(name))


def test_wheel_contains_every_file_of_the_package_and_the_license(wheel):
    sources = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "transformer_xl").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {Path(name).suffix for name in sources} >= {".py", ".yaml", ".css", ".js", ".html", ".typed", ".cpp", ".h"}
    names = set(wheel.namelist())
    license_file = f"transformer_xl-{transformer_xl.__version__}.dist-info/licenses/LICENSE"
    assert {name for name in names if ".dist-info/" not in name} == sources
    assert license_file in names
    assert wheel.read(license_file) == (ROOT / "LICENSE").read_bytes()


def test_extras_named_in_messages_and_documents_exist(wheel):
    """Under the folder of the clone, since the package is in no registry."""
    extras = metadata(wheel).get_all("Provides-Extra") or []
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    named_extras = {
        extra.strip()
        for path in files
        for pattern in (
            r"pip install '\.\[([\w, -]+)\]'",
            r"(?:missing_extra|install_command)\([^()]*['\"]([\w-]+)['\"]\)",
        )
        for group in re.findall(pattern, path.read_text(encoding="utf-8"))
        for extra in group.split(",")
    }
    assert {"triton", "serve", "onnx"} <= named_extras  # the patterns match
    assert named_extras <= set(extras)


def test_citation_has_the_version_and_license_of_the_wheel(wheel):
    citation = dict(re.findall(r"^(version|license): (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M))
    expected = metadata(wheel)
    assert citation == {"version": expected["Version"], "license": expected["License-Expression"]}
    assert expected["Version"] == transformer_xl.__version__


def test_version_is_written_once_and_no_address_of_the_repository_is_invented(wheel):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "version" not in project
    assert project["dynamic"] == ["version"]
    expected = [f"{name}, {address}" for name, address in project["urls"].items()]
    assert metadata(wheel).get_all("Project-URL") == expected
    assert set(project["urls"]) <= {"Paper", "Repository"}


@pytest.mark.parametrize("symbol", [b"GLIBC_2.27", b"GLIBC_2.29", b"GLIBCXX_3.4.29"])
def test_wheel_with_operators_is_for_a_platform_that_has_their_symbols(symbol, tmp_path, monkeypatch):
    """The library is none; `python -m hatchling build` compiles one."""
    builders = pytest.importorskip("hatchling.builders.wheel", reason="needs hatchling, of the extra dev")
    library = b"\x7fELF\0GLIBC_2.2.5\0GLIBCXX_3.4.21\0" + symbol + b"\0"
    monkeypatch.setenv("TXL_NATIVE_WHEEL", "1")
    monkeypatch.setattr(build, "compile_for_wheel", lambda: library)
    built = builders.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    if symbol != b"GLIBC_2.27":
        with pytest.raises(SystemExit, match=f"needs {symbol.decode()}, which py3-none-manylinux_2_28_x86_64 does not"):
            next(built)
        return
    (path,) = built
    assert Path(path).name == f"transformer_xl-{transformer_xl.__version__}-py3-none-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path) as archive:
        assert archive.read("transformer_xl/ops/native/operators.so") == library
