"""Serve exported models by `transformers serve`, which finds model classes only by their names in its own package.

    pip install 'transformers[serving]'
    python examples/transformers_serve.py serve --device cpu      # arguments are those of `transformers`

Requests name the folder of a model as `model`. `txl serve` does more (docs/serving.md).
"""

from __future__ import annotations

import transformers
from transformers.cli.transformers import app

from transformer_xl.integrations.huggingface import TransformerXLForCausalLM

if __name__ == "__main__":
    transformers.TransformerXLForCausalLM = TransformerXLForCausalLM
    app()
