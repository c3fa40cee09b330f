"""The types of settings that public functions take as keyword arguments or dictionaries, for editors and type checkers.

`python tests/config/test_typed_settings.py` writes `src/transformer_xl/config/typed_settings.pyi` from the classes.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

import transformer_xl
from transformer_xl.config import (
    ARCHITECTURES,
    DynamicConfig,
    EvaluationConfig,
    RegularizationConfig,
    Settings,
    TrainConfig,
)
from transformer_xl.generation.generation_config import GenerationConfig
from transformer_xl.text.text_config import TextConfig
from transformer_xl.text.tokenizers.tokenizer_config import TokenizerConfig

STUB = Path(transformer_xl.__file__).parent / "config" / "typed_settings.pyi"
HEAD = '''"""Settings as dictionaries and keyword arguments; written by tests/config/test_typed_settings.py."""

from collections.abc import Sequence
from typing import Literal, TypedDict

from transformer_xl.config import DynamicConfig, RegularizationConfig

'''
GROUPS: dict[str, dict[str, list[FieldInfo]]] = {
    "RegularizationSettings": {name: [field] for name, field in RegularizationConfig.model_fields.items()},
    "ModelSettings": {
        name: [kind.model_fields[name] for kind in ARCHITECTURES.values() if name in kind.model_fields]
        for name in dict.fromkeys(name for kind in ARCHITECTURES.values() for name in kind.model_fields)
    },
    "TrainSettings": {name: [field] for name, field in TrainConfig.model_fields.items()},
    "DynamicSettings": {name: [field] for name, field in DynamicConfig.model_fields.items()},
    "EvaluationSettings": {name: [field] for name, field in EvaluationConfig.model_fields.items()},
    "PrepareSettings": {
        name: [field]
        for kind in (TextConfig, TokenizerConfig)
        for name, field in kind.model_fields.items()
        if name not in ("kind", "eos_token", "unk_token", "byte_fallback")
    },
    "GenerationSettings": {name: [field] for name, field in GenerationConfig.model_fields.items()},
}


def type_text(annotation: Any) -> list[str]:
    """Return the members of the union that an annotation is, as source text."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return [text for argument in arguments for text in type_text(argument)]
    if origin is Literal:
        return [f"Literal[{', '.join(map(repr, arguments))}]"]
    if origin is tuple:
        return [f"Sequence[{' | '.join(type_text(arguments[0]))}]"]
    if annotation is type(None):
        return ["None"]
    if issubclass(annotation, Settings):
        return [re.sub("Config$", "Settings", annotation.__name__), annotation.__name__]
    return [annotation.__name__]


def stub_text() -> str:
    lines = [HEAD]
    for group, fields in GROUPS.items():
        lines.append(f"class {group}(TypedDict, total=False):")
        for name, kinds in fields.items():
            members = dict.fromkeys(text for field in kinds for text in type_text(field.annotation))
            if all(member.startswith("Literal") for member in members):  # the names of the architectures
                members = {f"Literal[{', '.join(member[8:-1] for member in members)}]": None}
            lines.append(f"    {name}: {' | '.join(members)}")
        lines.append("")
    return subprocess.run(
        [sys.executable, "-m", "ruff", "format", "-", "--stdin-filename", "x.pyi"],
        input="\n".join(lines), capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip


def test_types_are_those_of_the_settings() -> None:
    assert STUB.read_text(encoding="utf-8") == stub_text(), "run: python tests/config/test_typed_settings.py"


CALLS = """
from transformer_xl import LSTMConfig, Run, TrainConfig, evaluate, finetune, generate, train
def calls(run: Run) -> None:
    generate(run, "a", temperature=0.5, max_new_tokens=None)
    train("tiny", "corpus", model={"cutoffs": [10], "regularization": {"output_dropout": 0.1}})
    finetune("run", "corpus", model={"dropout": 0.1}, train={"max_steps": 2})
    train("tiny", "corpus", model=LSTMConfig(d_model=8), train=TrainConfig(max_steps=2))
    generate(run, "a", tempratur=0.5)  # wrong
    evaluate(run, memory_length="long")  # wrong
    train("tiny", "corpus", train={"learning_rat": 0.1})  # wrong
"""


def test_type_checker_finds_wrong_settings(tmp_path: Path) -> None:
    file = tmp_path / "calls.py"
    file.write_text(CALLS, encoding="utf-8")
    options = ["--preset", "default", "--search-path", str(STUB.parents[2])]
    command = [sys.executable, "-m", "pyrefly", "check", *options, "--python-interpreter-path", sys.executable, file]
    found = subprocess.run(command, capture_output=True, text=True).stdout
    wrong = {number for number, line in enumerate(CALLS.splitlines(), start=1) if line.endswith("# wrong")}
    assert {int(number) for number in re.findall(r"calls\.py:(\d+):", found)} == wrong, found


if __name__ == "__main__":
    STUB.write_text(stub_text(), encoding="utf-8")
