"""The wheel holds the whole package, and its metadata agree with the other files that state them."""

from __future__ import annotations

import re
import zipfile
from email.message import Message
from email.parser import BytesParser
from pathlib import Path

import pytest

import transformer_xl

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    builders = pytest.importorskip("hatchling.builders.wheel", reason="needs hatchling, of the extra dev")
    folder = tmp_path_factory.mktemp("dist")
    (path,) = builders.WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(path) as opened:
        yield opened


def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return BytesParser().parsebytes(wheel.read(name))


def test_wheel_holds_every_file_of_the_package_and_the_license(wheel):
    source = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "transformer_xl").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {Path(name).suffix for name in source} >= {".py", ".yaml", ".css", ".js", ".html", ".typed"}
    shipped = set(wheel.namelist())
    license_file = f"transformer_xl-{transformer_xl.__version__}.dist-info/licenses/LICENSE"
    assert {name for name in shipped if ".dist-info/" not in name} == source
    assert license_file in shipped
    assert wheel.read(license_file) == (ROOT / "LICENSE").read_bytes()


def test_metadata_name_extras_that_messages_and_documents_tell_users_to_install(wheel):
    extras = metadata(wheel).get_all("Provides-Extra") or []
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    named = {
        extra.strip()
        for path in files
        for group in re.findall(r"transformer-xl\[([\w, -]+)\]", path.read_text(encoding="utf-8"))
        for extra in group.split(",")
    }
    assert "triton" in named
    assert named <= set(extras)


def test_citation_has_the_version_and_license_of_the_package(wheel):
    cited = dict(re.findall(r"^(version|license): (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M))
    stated = metadata(wheel)
    assert cited == {"version": stated["Version"], "license": stated["License-Expression"]}
    assert stated["Version"] == transformer_xl.__version__
