"""sentence-transformers on our models: vectors of texts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from clients.texts import SENTENCES, TOKENIZERS
from refusals import do
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from small_runs import make_run
from transformers import AutoModel, AutoTokenizer

import transformer_xl.integrations.huggingface  # noqa: F401 (registers our models)

pytestmark = pytest.mark.client("sentence-transformers")


@pytest.mark.parametrize("pooling", ["lasttoken", "mean"])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_vectors_are_pooled_hidden_states(kind: str, pooling: str, tmp_path: Path) -> None:
    """Of texts of unequal lengths in one batch; saved and opened again."""
    make_run(tmp_path / "run", tokenizer=TOKENIZERS[kind], noise=0.3)
    do(f"convert {tmp_path / 'run'} {tmp_path / 'hub'} --to huggingface")
    reader = Transformer(str(tmp_path / "hub"))
    model = SentenceTransformer(modules=[reader, Pooling(reader.get_embedding_dimension(), pooling_mode=pooling)])
    vectors = model.encode(SENTENCES, convert_to_tensor=True)
    base, tokenizer = AutoModel.from_pretrained(tmp_path / "hub"), AutoTokenizer.from_pretrained(tmp_path / "hub")
    with torch.no_grad():
        for text, vector_D in zip(SENTENCES, vectors, strict=True):
            (hidden_TD,) = base(**tokenizer(text, return_tensors="pt")).last_hidden_state
            expected_D = hidden_TD[-1] if pooling == "lasttoken" else hidden_TD.mean(0)
            torch.testing.assert_close(vector_D, expected_D, rtol=0, atol=1e-5)
    model.save(str(tmp_path / "saved"))
    again = SentenceTransformer(str(tmp_path / "saved")).encode(SENTENCES, convert_to_tensor=True)
    torch.testing.assert_close(again, vectors)
