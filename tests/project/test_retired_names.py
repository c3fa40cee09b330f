"""Old names of settings, flags, classes, functions and JSON keys must not return, in code or in documents.

Many old names are correct elsewhere (a batch has rows, a layer has a kernel), so most are refused only where the syntax
tree of the code, the YAML of a recipe or the spelling of a flag shows what they name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PYTHON = [path for folder in ("src", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
DOCUMENTS = [
    ROOT / "README.md",
    *(path for path in (ROOT / "docs").glob("*.md") if path.name != "log.md"),  # the log quotes names of its time
]
RECIPES = list((ROOT / "src").rglob("*.yaml"))
# settings that were renamed or removed, by group; a model and its training have other attributes of some of these names
SETTINGS = {
    "model": """kind encoding vocabulary_size width heads head_width feedforward embedding_width norm_epsilon
        tie_weights tie_position_biases project_equal_width learned_positions intermediate_losses second_target
        qrnn_window window kernel""",
    "train": """rows chunks segment memory first_segment length_warmup steps recompute clip schedule warmup decay
        final_rate average average_decay average_from order parallel log_every evaluate_every save_every
        evaluate_tokens momentum precision""",
    "evaluation": "segment memory window clamp rows warmup documents precision",
}
# classes and functions
DEFINITIONS = """Reach Sight Past Join Writer Made Writing Plan How Side Vocabulary Embedding Softmax Linear Dropout
    World Learner Outcome Reporter Dynamic MovingWindow Workshop initialise top complete search explained side_by_side
    circumstances TrainStep DivergenceDetector check_trainable"""
# names that are refused wherever they occur, because nothing else has such a name
ANYWHERE = """vocabulary_size embedding_width norm_epsilon tie_position_biases project_equal_width learned_positions
    intermediate_losses second_target qrnn_window first_segment length_warmup final_rate average_from evaluate_every
    save_every log_every evaluate_tokens log_probability log_probabilities step_flops step_bytes gradient_norm head_size
    writing_memory training_nats encode_piece start_id end_ids run_side_by_side word_perplexity"""
# keys of dictionary literals
JSON_KEYS = "place vocabulary.json"
# flags without a group, which are refused in command lines of txl
FLAGS = """segment memory window clamp precision rows warmup documents per-token weights sweep-memory sweep-window
    tokens min-tokens samples beams context log-probabilities until-line-end repetition-window vocabulary min-count
    max-size values words-file punctuation end-of-line source splitting lengths segments rounds back text longest step
    positions picture speed-of"""
UNIQUE = set(ANYWHERE.split())
# matches lines that contain a command line of txl, or begin with one of its commands
COMMAND = r"\btxl \w|^(?:train|evaluate|score|generate|prepare|convert|analyze|reproduce|demo) "
# the group in SETTINGS of the keyword arguments of these classes
CONFIG_CLASSES = {
    **dict.fromkeys(
        ["TransformerXLConfig", "ShawConfig", "VaswaniConfig", "AlRfouConfig", "LSTMConfig", "QRNNConfig"], "model"
    ),
    "TrainConfig": "train",
    "EvaluationConfig": "evaluation",
    "ContextLimits": "evaluation",
}


def retired_in_code(source: str) -> Iterator[str]:
    """Yield the retired names in the syntax tree and in the strings of Python code."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) if name in DEFINITIONS.split():
                yield name
            case ast.Attribute(value=ast.Name(id=group) | ast.Attribute(attr=group), attr=name) if group in SETTINGS:
                yield from retired_settings({group: {name: None}})
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called)) if called in CONFIG_CLASSES:
                yield from retired_settings({CONFIG_CLASSES[called]: {keyword.arg: None for keyword in node.keywords}})
            case ast.Dict(keys=keys) if any(isinstance(k, ast.Constant) and k.value in JSON_KEYS.split() for k in keys):
                yield "JSON key"
            case ast.Constant(value=str(text)):
                yield from retired_in_text(text)
        names = [getattr(node, field, None) for field in ("id", "attr", "arg", "name")]
        yield from (name for name in names if name in UNIQUE)


def retired_settings(settings: object) -> Iterator[str]:
    """Yield the retired names in a mapping of a group such as `train` to its settings."""
    for group, values in settings.items() if isinstance(settings, dict) else ():
        if group in SETTINGS and isinstance(values, dict):
            yield from (f"{group}.{name}" for name in values if name in SETTINGS[group].split())


def retired_in_text(text: str) -> Iterator[str]:
    """Yield the retired names in a string or the code of a document: settings with their group, flags, unique names."""
    for group, name in re.findall(r"(?<![\w.])(model|train|evaluation)\.([a-z_-]+)(?![\w(-])", text):
        yield from retired_settings({group: {name.replace("-", "_"): None}})
    yield from (word for word in re.findall(r"\w+", text) if word in UNIQUE)
    for line in text.splitlines():
        if re.search(COMMAND, line):
            yield from (flag for flag in re.findall(r"(?<![\w-])--([a-z-]+)(?![\w.-])", line) if flag in FLAGS.split())


def retired_in_document(text: str) -> Iterator[str]:
    """Yield the retired names in the fenced blocks and between the backticks of a Markdown document."""
    blocks = r"^```(\w*)\n(.*?)^```$"
    for language, block in re.findall(blocks, text, flags=re.MULTILINE | re.DOTALL):
        yield from retired_settings(yaml.safe_load(block)) if language == "yaml" else retired_in_text(block)
    prose = re.sub(blocks, "", text, flags=re.MULTILINE | re.DOTALL)
    yield from (name for code in re.findall(r"`([^`\n]+)`", prose) for name in retired_in_text(code))


def test_no_retired_name_in_code_recipes_and_documents() -> None:
    found = {path: list(retired_in_code(path.read_text(encoding="utf-8"))) for path in PYTHON if path != Path(__file__)}
    found |= {path: list(retired_in_document(path.read_text(encoding="utf-8"))) for path in DOCUMENTS}
    found |= {path: list(retired_settings(yaml.safe_load(path.read_text(encoding="utf-8")))) for path in RECIPES}
    assert {path.relative_to(ROOT).as_posix(): names for path, names in found.items() if names} == {}
    assert len(RECIPES) > 10
    assert len(DOCUMENTS) > 10


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("class Reach: ...", ["Reach"]),
        ("def initialise(): ...", ["initialise"]),
        ("rows = config.train.rows", ["train.rows"]),
        ("TrainConfig(max_steps=1, rows=3); config.ShawConfig(width=3)", ["train.rows", "model.width"]),
        ("x = {'place': 3}", ["JSON key"]),
        ("f(vocabulary_size=3)", ["vocabulary_size"]),
        ("say(f'lower --train.rows {n}'); do('generate runs/a --beams 3')", ["train.rows", "beams"]),
        ("model.train(); model.layers[0].norm(x); nn.Linear(3, 4); x = {'rows': 3}; run(['ruff', '--source'])", []),
    ],
)
def test_retired_names_in_code_are_found_where_syntax_shows_what_they_name(source: str, names: list[str]) -> None:
    assert sorted(retired_in_code(source)) == sorted(names)


def test_retired_names_in_documents_are_found_in_yaml_commands_and_backticks() -> None:
    text = "`train.rows` model.kind\n\n```yaml\nmodel:\n  width: 3\n```\n\n```sh\ntxl score a --window 3\n```\n"
    assert list(retired_in_document(text)) == ["model.width", "window", "train.rows"]
