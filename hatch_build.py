"""Adds the native operators to the wheel where TXL_NATIVE_WHEEL=1 asks for it; all other builds compile nothing.

    TXL_NATIVE_WHEEL=1 python -m hatchling build     source distribution and wheel, in dist/

The operators use torch's stable interface, and Python only through torch, so one wheel is for every Python and every
torch from 2.11 on. They are compiled in this environment, which needs g++, torch and the package's dependencies: an
isolated build would download another torch.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

TAG = "py3-none-manylinux_2_28_x86_64"
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
"""Versions of symbols that this tag allows; torch needs as new ones."""


class NativeBuildHook(BuildHookInterface):
    """Compiles the operators for a wheel that is to be given to others."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the library and the tag of its platform to a standard wheel."""
        if version != "standard" or os.environ.get("TXL_NATIVE_WHEEL") != "1":
            return
        sys.path.insert(0, str(Path(self.root, "src")))
        try:
            from transformer_xl.ops.native import build
        except ImportError as error:
            raise SystemExit(f"{error}: TXL_NATIVE_WHEEL=1 needs torch; use `python -m hatchling build`") from None
        finally:
            sys.path.pop(0)
        content = build.compile_for_wheel()
        check_symbols(content)
        self.folder = tempfile.TemporaryDirectory()
        library = Path(self.folder.name, build.IN_WHEEL.name)
        library.write_bytes(content)
        build_data["force_include"][str(library)] = "transformer_xl/ops/native/" + library.name
        build_data["tag"] = TAG
        build_data["pure_python"] = False

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Delete the compiled library, which is in the wheel now."""
        if hasattr(self, "folder"):
            self.folder.cleanup()


def check_symbols(library: bytes) -> None:
    """Refuse a library with symbols that computers of this tag may lack."""
    for name, digits in set(re.findall(rb"\0(GLIBC|GLIBCXX|CXXABI)_([\d.]+)(?=\0)", library)):
        if tuple(map(int, digits.split(b"."))) > NEWEST[name.decode()]:
            raise SystemExit(f"the library needs {name.decode()}_{digits.decode()}, which {TAG} does not allow")
