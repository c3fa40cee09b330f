"""Names that the project has retired stay retired: in code, settings, flags and in the code of documents.

A name is refused only where the syntax says what it is (a setting of a group, a definition, a flag), because many of
these words are right elsewhere: a layer has a kernel, a batch has rows.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = [
    path
    for folder in ("src", "tests", "benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path != Path(__file__)
]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HISTORY = {"docs/log.md"}  # tells what names were then

SETTINGS = {
    "model": {
        *("kind", "encoding", "vocabulary_size", "layers", "width", "heads", "head_width", "feedforward"),
        *("embedding_width", "norm", "norm_epsilon", "tie_weights", "tie_position_biases", "project_equal_width"),
        *("learned_positions", "intermediate_losses", "second_target", "qrnn_window", "window", "kernel", "memory"),
    },
    "train": {
        *("rows", "chunks", "segment", "memory", "first_segment", "length_warmup", "steps", "recompute", "clip"),
        *("schedule", "warmup", "decay", "final_rate", "average", "average_decay", "average_from", "order", "parallel"),
        *("log_every", "evaluate_every", "save_every", "evaluate_tokens", "momentum", "precision"),
    },
    "evaluation": {"segment", "memory", "window", "clamp", "rows", "warmup", "documents", "precision"},
}
# attributes of a model or of its training that are no settings
ATTRIBUTES = {"model": {"layers", "norm", "memory"}, "train": set[str](), "evaluation": set[str]()}
UNMISTAKABLE = {
    *("vocabulary_size", "embedding_width", "norm_epsilon", "tie_position_biases", "project_equal_width"),
    *("learned_positions", "intermediate_losses", "second_target", "qrnn_window", "first_segment", "length_warmup"),
    *("final_rate", "average_from", "evaluate_every", "save_every", "log_every", "evaluate_tokens"),
    *("log_probability", "log_probabilities", "step_flops", "step_bytes", "gradient_norm", "head_size"),
    *("writing_memory", "training_nats", "encode_piece", "start_id", "end_ids", "run_side_by_side"),
}
KEYS = {"place", "vocabulary.json"}  # of JSON
CONFIGS = {
    **dict.fromkeys(("TransformerXLConfig", "ShawConfig", "VaswaniConfig", "AlRfouConfig"), "model"),
    **dict.fromkeys(("LSTMConfig", "QRNNConfig", "model_config"), "model"),
    "TrainConfig": "train",
    "EvaluationConfig": "evaluation",
    "ContextLimits": "evaluation",
}
DEFINITIONS = {
    *("Reach", "Sight", "Past", "Join", "Writer", "Made", "Writing", "Plan", "How", "Side", "Vocabulary", "Embedding"),
    *("Softmax", "Linear", "Dropout", "World", "Learner", "Outcome", "Reporter", "Dynamic", "MovingWindow", "Workshop"),
    *("initialise", "top", "complete", "search", "explained", "side_by_side", "circumstances"),
}
FLAGS = {
    *("segment", "memory", "window", "clamp", "precision", "rows", "warmup", "documents", "per-token", "weights"),
    *("sweep-memory", "sweep-window", "tokens", "min-tokens", "samples", "beams", "context", "log-probabilities"),
    *("until-line-end", "repetition-window", "vocabulary", "min-count", "max-size", "values", "words-file"),
    *("punctuation", "end-of-line", "source", "splitting", "lengths", "segments", "rounds", "back", "text", "longest"),
    *("step", "positions", "picture", "speed-of"),
}


def retired_in_code(source: str) -> Iterator[str]:
    """Retired names in Python, as `line: name`."""
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        for name in _names(node):
            yield f"{line}: {name}"


def _names(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) if name in DEFINITIONS:
            yield name
        case ast.Name(id=name) | ast.arg(arg=name) | ast.keyword(arg=name) if name in UNMISTAKABLE:
            yield name
        case ast.Attribute(value=ast.Name(id=group) | ast.Attribute(attr=group), attr=name) if group in SETTINGS:
            if name in SETTINGS[group] - ATTRIBUTES[group]:
                yield f"{group}.{name}"
        case ast.Attribute(attr=name) if name in UNMISTAKABLE:
            yield name
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), keywords=keywords) if name in CONFIGS:
            yield from (f"{name}({k.arg}=)" for k in keywords if k.arg in SETTINGS[CONFIGS[name]])
        case ast.Dict():
            yield from _names_in_dict(node)
        case ast.Constant(value=str(text)):
            yield from retired_flags(text)


def _names_in_dict(node: ast.Dict) -> Iterator[str]:
    for key, value in zip(node.keys, node.values, strict=True):
        if not isinstance(key, ast.Constant):
            continue
        if key.value in UNMISTAKABLE | KEYS:
            yield str(key.value)
        if key.value in SETTINGS and isinstance(value, ast.Dict):
            inner = [one.value for one in value.keys if isinstance(one, ast.Constant)]
            yield from (f"{key.value}.{name}" for name in inner if name in SETTINGS[key.value])


def retired_flags(text: str) -> Iterator[str]:
    """Retired settings written as flags or with dots; bare flags only where a command of txl is typed."""
    for group, name in re.findall(r"(?<![\w.])(?:--)?(model|train|evaluation)\.([a-z_-]+)(?![\w(])", text):
        if name.replace("-", "_") in SETTINGS[group] - ATTRIBUTES[group]:
            yield f"{group}.{name}"
    for line in text.splitlines():
        if re.search(r"\btxl \w|^(?:train|evaluate|score|generate|prepare|convert|analyze|reproduce|demo) ", line):
            yield from (f"--{name}" for name in re.findall(r"(?<![\w-])--([a-z-]+)(?![\w.-])", line) if name in FLAGS)


def retired_in_document(text: str) -> Iterator[str]:
    """Retired names in the code of a Markdown document: in fenced blocks and between backticks."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```\w*\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    for code in [*blocks, *spans]:
        yield from retired_flags(code)
        yield from (word for word in re.findall(r"[A-Za-z_]\w*", code) if word in UNMISTAKABLE)
    for block in blocks:  # YAML: the keys below a group
        for group, body in re.findall(r"^(model|train|evaluation):\n((?:[ ]+.*\n)+)", block, flags=re.MULTILINE):
            names = re.findall(r"^ +(\w+):", body, flags=re.MULTILINE)
            yield from (f"{group}.{name}" for name in names if name in SETTINGS[group])


@pytest.mark.parametrize("path", PYTHON, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_retired_name_in_code(path: Path) -> None:
    found = list(retired_in_code(path.read_text(encoding="utf-8")))
    assert not found, ", ".join(found)


def class_names(source: str) -> list[str]:
    """The public classes that a module defines at its top level."""
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return [node.name for node in nodes if not node.name.startswith("_")]


def test_one_class_has_one_name() -> None:
    sources = [path.read_text(encoding="utf-8") for path in PYTHON if ROOT / "src" in path.parents]
    counted = Counter(name for source in sources for name in class_names(source))
    assert [name for name, count in counted.items() if count > 1] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_no_retired_name_in_the_code_of_documents(path: Path) -> None:
    if path.relative_to(ROOT).as_posix() not in HISTORY:
        found = list(retired_in_document(path.read_text(encoding="utf-8")))
        assert not found, ", ".join(found)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("class Reach: ...", "1: Reach"),
        ("def initialise(): ...", "1: initialise"),
        ("rows = config.train.rows", "1: train.rows"),
        ("x = run.config.model.kind", "1: model.kind"),
        ("TrainConfig(max_steps=1, rows=3)", "1: TrainConfig(rows=)"),
        ("config.ShawConfig(width=3)", "1: ShawConfig(width=)"),
        ("start({'train': {'steps': 3}})", "1: train.steps"),
        ("x = {'log_probability': 0.1}", "1: log_probability"),
        ("x = {'place': 3}", "1: place"),
        ("f(vocabulary_size=3)", "1: vocabulary_size"),
        ("say(f'lower --train.rows {n}')", "1: train.rows"),
        ("do('generate runs/a --log-probabilities')", "1: --log-probabilities"),
        ("raise UserError('give txl evaluate RUN --per-token')", "1: --per-token"),
    ],
)
def test_a_retired_name_in_code_is_found(source: str, found: str) -> None:
    assert list(retired_in_code(source)) == [found]


@pytest.mark.parametrize(
    "source",
    [
        "rows = [1]; steps, width, memory = 1, 2, model(x)[1]",
        "model.train(); model.layers[0].norm(x); memory.window",
        "nn.Linear(3, 4); F.dropout(x)",
        "x = {'rows': 3, 'kernel': 'cpu'}",
        "subprocess.run(['ruff', '--source'])",
    ],
)
def test_the_same_words_elsewhere_are_left_alone(source: str) -> None:
    assert list(retired_in_code(source)) == []


def test_a_retired_name_in_a_document_is_found() -> None:
    text = (
        "`train.rows` and\n\n```yaml\nmodel:\n  width: 3\ntrain:\n  max_steps: 3\n  rows: 2\n```\n\nmodel.kind, rows\n"
    )
    assert list(retired_in_document(text)) == ["train.rows", "model.width", "train.rows"]
    assert list(retired_in_document("```sh\ntxl score runs/a --window 3\n```\n")) == ["--window"]
