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

BYTES = pytest.param("bytes", marks=pytest.mark.xfail(reason="the id of padding is beyond the logits", strict=False))


@pytest.mark.client("outlines")
@pytest.mark.parametrize("kind", ["bpe", BYTES])
def test_a_text_follows_a_pattern(kind: str, tmp_path: Path) -> None:
    """Of tokens with a newline, which ends the text; the words of these tests have no digits."""
    run = make_run(tmp_path / "run", tokenizer=TOKENIZERS[kind], noise=0.3)
    do(f"convert {tmp_path / 'run'} {tmp_path / 'hub'} --to huggingface")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hub")
    newline = run.tokenizer.encode("\n").tolist()[0]
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(newline)
    model.generation_config.eos_token_id = newline
    write = outlines.Generator(outlines.from_transformers(model, tokenizer), outlines.regex(r"[0-9]{3}-[a-z]{2}x"))
    text = write("the offer", max_new_tokens=20)
    assert re.fullmatch(r"[0-9]{3}-[a-z]{2}x\n?", text), text
