"""Makes the fixtures of test_huggingface.py with the model that people used, in an environment of its own:

    python -m venv peers && peers/bin/pip install torch==2.13.0 transformers==4.37.2 sacremoses
    peers/bin/python tests/interop/golden_huggingface.py

Each fixture is one file: small random weights by their names, the configuration as text, and what transformers makes of
them in float32: log-probabilities of three segments with memory handed on, the memory itself, its loss, and what it
writes greedily.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).parent / "fixtures"
SMALL = {
    "vocab_size": 23, "cutoffs": [5, 11], "d_model": 8, "d_embed": 8, "n_head": 2, "d_head": 3, "d_inner": 7,
    "n_layer": 2, "mem_len": 9, "clamp_len": 6, "div_val": 1, "same_length": True, "untie_r": True,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "clusters": {},
    "narrow-tails": {"div_val": 2},
    "narrower-tails": {"cutoffs": [5, 11, 17], "div_val": 4, "d_embed": 64, "n_layer": 1},
    "tied-biases": {"div_val": 2, "untie_r": False, "proj_share_all_but_first": False},
    "one-softmax": {"cutoffs": [], "same_length": False, "clamp_len": -1},
    "own-softmax": {"cutoffs": [], "tie_word_embeddings": False, "d_embed": 10, "layer_norm_epsilon": 0.1},
    "pre-norm": {"pre_lnorm": True, "d_embed": 6, "untie_r": False},
    "without-memory": {"mem_len": 0, "same_length": False},
}
SEGMENTS = (7, 7, 5)


def make(name: str, settings: dict[str, Any]) -> None:
    home = "transformers.models.deprecated.transfo_xl"
    config = import_module(f"{home}.configuration_transfo_xl").TransfoXLConfig(**{**SMALL, **settings})
    torch.manual_seed(sum(map(ord, name)))
    model = import_module(f"{home}.modeling_transfo_xl").TransfoXLLMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # larger than at the start, so that attention is far from uniform
            parameter.add_(torch.randn_like(parameter) * 0.4 * min(1, 16 / config.d_embed))
    model.generation_config.eos_token_id = None  # it goes on after a line end
    tokens_BT = torch.randint(0, config.vocab_size, (2, sum(SEGMENTS)))
    mems, scores = None, []
    with torch.no_grad():
        for segment_BT in tokens_BT.split(SEGMENTS, dim=1):
            out = model(segment_BT, mems=mems)
            scores.append(out.prediction_scores)
            mems = out.mems
        loss = model(tokens_BT, labels=tokens_BT.clone()).loss
        greedy_T = model.generate(tokens_BT[:1, :4], do_sample=False, max_new_tokens=17)[0]
    memory = {} if mems is None else {"memory_LMBD": torch.stack(mems)}
    model.save_pretrained("saved", safe_serialization=True)
    kept = set(json.loads(Path("saved/config.json").read_text()))
    weights = {f"weights.{key}": value.clone() for key, value in model.state_dict().items()}
    written = import_module("safetensors").safe_open("saved/model.safetensors", "pt")
    weights = {key: value for key, value in weights.items() if key.removeprefix("weights.") in set(written.keys())}
    expected = {
        "tokens_BT": tokens_BT,
        "scores_BTV": torch.cat(scores, 1),
        "loss": loss,
        "greedy_T": greedy_T,
        **memory,
    }
    values = {key: value for key, value in config.to_dict().items() if key in kept}
    save_file({**weights, **expected}, FOLDER / f"{name}.safetensors", metadata={"config": json.dumps(values)})


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for case, changes in CASES.items():
        make(case, changes)
