"""Old names that nothing else has must not return, in code, recipes or documents."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
RETIRED = """vocabulary_size embedding_width norm_epsilon tie_position_biases project_equal_width learned_positions
    intermediate_losses second_target qrnn_window first_segment length_warmup final_rate average_from evaluate_every
    save_every log_every evaluate_tokens log_probability log_probabilities step_flops step_bytes gradient_norm head_size
    writing_memory training_nats encode_piece start_id end_ids run_side_by_side word_perplexity"""


def test_no_retired_name_in_code_recipes_and_documents() -> None:
    paths = [path for folder in ("src", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
    paths += [*(ROOT / "src").rglob("*.yaml"), ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    retired = re.compile(rf"\b(?:{'|'.join(RETIRED.split())})\b")
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    del texts["tests/project/test_retired_names.py"], texts["docs/log.md"]  # which quotes names of its time
    assert {path: found for path, text in texts.items() if (found := retired.findall(text))} == {}
