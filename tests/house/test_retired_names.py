"""Old names of settings, flags, classes, functions and JSON keys must not return, in code or in documents.

Many old names are correct elsewhere, so most are refused only where the context shows what they name: `train.rows` is a
setting that was renamed, `rows` alone may be anything.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [
    *(path for folder in ("src", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")),
    ROOT / "README.md",
    *(path for path in (ROOT / "docs").glob("*.md") if path.name != "log.md"),  # the log quotes names of its time
]
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
DEFINITIONS = """Reach Sight Past Join Writer Made Writing Plan How Side Vocabulary Embedding Softmax Linear Dropout
    World Learner Outcome Reporter Dynamic MovingWindow Workshop initialise top complete explained side_by_side
    circumstances"""
ANYWHERE = """vocabulary_size embedding_width norm_epsilon tie_position_biases project_equal_width learned_positions
    intermediate_losses second_target qrnn_window first_segment length_warmup final_rate average_from evaluate_every
    save_every log_every evaluate_tokens log_probability log_probabilities step_flops step_bytes gradient_norm head_size
    writing_memory training_nats encode_piece start_id end_ids run_side_by_side"""
FLAGS = """segment memory window clamp precision rows warmup documents per-token weights sweep-memory sweep-window
    tokens min-tokens samples beams context log-probabilities until-line-end repetition-window vocabulary min-count
    max-size values words-file punctuation end-of-line source splitting lengths segments rounds back text longest step
    positions picture speed-of"""
COMMAND = r"\btxl \w|[\"'`](?:train|evaluate|score|generate|prepare|convert|analyze|reproduce|demo) "


def any_of(names: str) -> str:
    return f"({'|'.join(names.split())})"


def retired_names(text: str) -> list[str]:
    """Return the retired names in Python code or a Markdown document."""
    retired = re.findall(rf"\b{any_of(ANYWHERE)}\b", text)
    retired += re.findall(rf"^ *(?:class|def) {any_of(DEFINITIONS)}\b", text, flags=re.MULTILINE)
    retired += re.findall(r"[\"'](place|vocabulary\.json)[\"']:", text)
    for group, names in SETTINGS.items():
        spellings = f"{names} {names.replace('_', '-')}"
        retired += re.findall(rf"(?<![\w.])({group}\.{any_of(spellings)})(?![\w(-])", text)
        for section in re.findall(rf"^{group}:\n((?: +.*\n)+)", text, flags=re.MULTILINE):  # YAML
            retired += re.findall(rf"^ +({any_of(names)}):", section, flags=re.MULTILINE)
    for line in text.splitlines():
        if re.search(COMMAND, line):
            retired += re.findall(rf"(?<![\w-])--{any_of(FLAGS)}(?![\w.-])", line)
    return [match if isinstance(match, str) else match[0] for match in retired]


def test_no_retired_name_in_code_and_documents() -> None:
    found = {path: retired_names(path.read_text(encoding="utf-8")) for path in FILES if path != Path(__file__)}
    assert {path.relative_to(ROOT).as_posix(): names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("class Reach: ...", ["Reach"]),
        ("    def initialise(self): ...", ["initialise"]),
        ("f(vocabulary_size=3)", ["vocabulary_size"]),
        ("say(f'lower --train.rows {n}')", ["train.rows"]),
        ("start(train.final-rate)", ["train.final-rate"]),
        ("x = {'place': 3}", ["place"]),
        ("model:\n  width: 3\ntrain:\n  max_steps: 3\n  rows: 2\n", ["width", "rows"]),
        ("txl score runs/a --window 3\ndo('generate runs/a --beams 3')", ["window", "beams"]),
        ("rows, steps = [1], model.layers[0].norm(x); nn.Linear(3, 4); subprocess.run(['ruff', '--source'])", []),
        ("from transformer_xl.evaluation.memory import evaluate; x = {'rows': 3}; model.window_length", []),
    ],
)
def test_retired_names_are_found_in_their_context_only(text: str, names: list[str]) -> None:
    assert retired_names(text) == names
