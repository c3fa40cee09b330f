"""Make the files in fixtures/ with transformers 4.37.2, in an environment of its own:

    python -m venv peers && peers/bin/pip install torch==2.13.0 transformers==4.37.2 sacremoses
    peers/bin/python tests/integrations/checkpoints/golden_huggingface.py

Each file contains a small TransfoXL model (its weights, and its configuration as metadata) and what transformers
computes with it in float32: log-probabilities of three segments with memory, the memory itself, the loss, and the
greedily generated tokens.

Shape suffixes: B batch rows, T tokens, V vocabulary, L layers, M memory slots, D model width.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FIXTURES = Path(__file__).parent / "fixtures"
# Settings by the names of TransfoXLConfig. Cutoffs are the first token id of each tail cluster of the adaptive softmax.
SMALL = {
    "vocab_size": 23, "cutoffs": [5, 11], "d_model": 8, "d_embed": 8, "n_head": 2, "d_head": 3, "d_inner": 7,
    "n_layer": 2, "mem_len": 9, "clamp_len": 6, "div_val": 1, "same_length": True, "untie_r": True,
}  # fmt: skip
# name of a fixture file, and the settings in which its model differs from SMALL
CASES: dict[str, dict[str, Any]] = {
    "clusters": {},
    "narrow-tails": {"div_val": 2},
    "narrower-tails": {"cutoffs": [5, 11, 17], "div_val": 4, "d_embed": 64, "n_layer": 1},
    "tied-biases": {"div_val": 2, "untie_r": False, "proj_share_all_but_first": False},
    # without clusters; then also with a softmax whose weights are not tied to the embedding
    "one-softmax": {"cutoffs": [], "same_length": False, "clamp_len": -1},
    "own-softmax": {"cutoffs": [], "tie_word_embeddings": False, "d_embed": 10, "layer_norm_epsilon": 0.1},
    "pre-norm": {"pre_lnorm": True, "d_embed": 6, "untie_r": False},
    "without-memory": {"mem_len": 0, "same_length": False},
}
# the same for classes without a softmax: the name of the class, and settings
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "base": ("TransfoXLModel", {"div_val": 2, "untie_r": False}),
    "classifier": ("TransfoXLForSequenceClassification", {"div_val": 2, "num_labels": 3, "pad_token_id": 22}),
    "regression": ("TransfoXLForSequenceClassification", {"num_labels": 1, "mem_len": 0, "same_length": False}),
}
SEGMENTS = (7, 7, 5)  # the tokens are read in three segments of these lengths
PACKAGE = "transformers.models.deprecated.transfo_xl"


def make(name: str, settings: dict[str, Any]) -> None:
    """Write fixtures/NAME.safetensors for a model with random weights and tokens."""
    config, model = random_model(name, "TransfoXLLMHeadModel", settings)
    model.generation_config.eos_token_id = None  # generation does not stop at the end-of-line token
    tokens_BT = torch.randint(0, config.vocab_size, (2, sum(SEGMENTS)))
    mems, scores = None, []
    with torch.no_grad():
        for segment_BT in tokens_BT.split(SEGMENTS, dim=1):
            output = model(segment_BT, mems=mems)
            scores.append(output.prediction_scores)
            mems = output.mems
        loss = model(tokens_BT, labels=tokens_BT.clone()).loss
        greedy_T = model.generate(tokens_BT[:1, :4], do_sample=False, max_new_tokens=17)[0]
    expected = {"tokens_BT": tokens_BT, "scores_BTV": torch.cat(scores, 1), "loss": loss, "greedy_T": greedy_T}
    if mems is not None:
        expected["memory_LMBD"] = torch.stack(mems)
    save(name, model, expected)


def make_head(name: str, class_name: str, settings: dict[str, Any]) -> None:
    """Write fixtures/NAME.safetensors for a model without a softmax: all hidden states, or scores of padded rows."""
    config, model = random_model(name, class_name, settings)
    tokens_BT = torch.randint(0, config.vocab_size - 1, (2, sum(SEGMENTS)))
    expected = {"tokens_BT": tokens_BT}
    with torch.no_grad():
        if class_name == "TransfoXLModel":
            output = model(tokens_BT, output_hidden_states=True, output_attentions=True)
            expected["hidden_LBTD"] = torch.stack(output.hidden_states)
            expected["attentions_LBNTS"] = torch.stack(output.attentions)
        else:
            if config.pad_token_id is None:
                expected["tokens_BT"] = tokens_BT = tokens_BT[:1]
            else:
                tokens_BT[1, 9:] = config.pad_token_id
            expected["scores_BC"] = model(tokens_BT).logits
    save(name, model, expected)


def random_model(name: str, class_name: str, settings: dict[str, Any]) -> tuple[Any, Any]:
    """Return the configuration and a model with random weights."""
    config = import_module(f"{PACKAGE}.configuration_transfo_xl").TransfoXLConfig(**{**SMALL, **settings})
    torch.manual_seed(sum(map(ord, name)))
    model = getattr(import_module(f"{PACKAGE}.modeling_transfo_xl"), class_name)(config).eval()
    with torch.no_grad():
        # larger than at initialization, so that attention is far from uniform; less so with wide embeddings
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.4 * min(1, 16 / config.d_embed))
    return config, model


def save(name: str, model: Any, expected: dict[str, torch.Tensor]) -> None:
    """Write fixtures/NAME.safetensors: the weights, what was computed, and config.json as transformers writes it."""
    model.save_pretrained("saved", safe_serialization=True)
    weights = {f"weights.{key}": value for key, value in load_file("saved/model.safetensors").items()}
    # config.to_dict() has attributes that save_pretrained leaves out, so only the names in its config.json are kept
    saved_settings = set(json.loads(Path("saved/config.json").read_text()))
    values = {key: value for key, value in model.config.to_dict().items() if key in saved_settings}
    save_file({**weights, **expected}, FIXTURES / f"{name}.safetensors", metadata={"config": json.dumps(values)})


if __name__ == "__main__":
    FIXTURES.mkdir(exist_ok=True)
    for case, changes in CASES.items():
        make(case, changes)
    for head, (class_of_head, changes) in HEADS.items():
        make_head(head, class_of_head, changes)
