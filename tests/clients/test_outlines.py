"""outlines on exported models: texts that follow a pattern."""

from __future__ import annotations

import re
from pathlib import Path

import outlines
import pytest
from clients.texts import TOKENIZERS
from refusals import do
from small_runs import make_run
from transformers import AutoModelForCausalLM, AutoTokenizer

import transformer_xl.integrations.huggingface  # noqa: F401 (registers our models)


@pytest.mark.client("outlines")
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_text_follows_a_pattern(kind: str, tmp_path: Path) -> None:
    """Of tokens with a newline, which ends the text; the words of these tests have no digits."""
    make_run(tmp_path / "run", tokenizer=TOKENIZERS[kind], noise=0.3)
    do(f"convert {tmp_path / 'run'} {tmp_path / 'hub'} --to huggingface --eos-token \\n")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hub")
    write = outlines.Generator(outlines.from_transformers(model, tokenizer), outlines.regex(r"[0-9]{3}-[a-z]{2}x"))
    text = write("the offer", max_new_tokens=20)
    assert re.fullmatch(r"[0-9]{3}-[a-z]{2}x\n?", text), text
