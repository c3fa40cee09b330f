"""Helpers of the importers' tests: folders as other programs write them, and the outputs of a model.

Shape suffixes: B batch rows, T tokens, V vocabulary, D model width, K the most likely tokens.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from transformer_xl.model.language_model import LanguageModel

FIXTURES = Path(__file__).parent / "fixtures"
# the vocabulary of those models in these tests that have 23 tokens: the word of each token id
WORDS = ["<eos>", "the", ",", ".", "of", "and", "in", "<unk>", *(f"word{number}" for number in range(15))]
# as in WikiText-103: @-@, @,@ and @.@ stand for -, , and . within a word or number
HUB_WORDS = [
    "<eos>", "the", ",", ".", "<unk>", "@-@", "@,@", "@.@", "cat", "sat", "on", "mat", "well", "known", "'s", "1", "80",
    "23", "000", "(", ")", "Hello", "dog",
]  # fmt: skip


def golden(name: str) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Return config.json and weights of a TransfoXL model, and the outputs that transformers 4.37.2 computed with it.

    golden_huggingface.py made these files; `name` is a key of its CASES.
    """
    with safe_open(FIXTURES / f"{name}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
        config = json.loads(file.metadata()["config"])
    weights = {key.removeprefix("weights."): value for key, value in tensors.items() if key.startswith("weights.")}
    return config, weights, {key: value for key, value in tensors.items() if not key.startswith("weights.")}


def hugging_face_folder(
    folder: Path, config: dict[str, Any], weights: dict[str, Tensor], words: list[str] | None = None
) -> Path:
    """Write a model as save_pretrained of transformers does, and its vocabulary to vocab.json.

    Args:
        folder: the folder to create.
        config: contents of config.json.
        weights: the weights by the names of transformers.
        words: the word of each token id, or None for the first words of WORDS.
    """
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: weight.clone() for name, weight in weights.items()}, folder / "model.safetensors")
    words = WORDS[: config["vocab_size"]] if words is None else words
    (folder / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(words)}))
    return folder


def hub_folder(folder: Path, vocabulary: str) -> Path:
    """Write a folder as on Hugging Face's Hub: config.json, pytorch_model.bin, and the pickled tokenizer."""
    config, weights, _ = golden("tied-biases")
    hugging_face_folder(folder, config, weights)
    (folder / "vocab.json").unlink()
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    attributes = {
        "counter": Counter({word: 50 - index for index, word in enumerate(HUB_WORDS)}), "special": ["<eos>"],
        "min_freq": 0, "max_size": None, "lower_case": False, "delimiter": None, "vocab_file": None,
        "never_split": None, "idx2sym": HUB_WORDS, "eos_idx": 0,
        "sym2idx": OrderedDict((word, index) for index, word in enumerate(HUB_WORDS)),
    }  # fmt: skip
    if vocabulary == "vocab.pkl":
        (folder / vocabulary).write_bytes(pickle.dumps(attributes, 3))
    else:
        torch.save(attributes, folder / vocabulary, _use_new_zipfile_serialization=False)
    return folder


@torch.no_grad()
def log_probs_of(model: LanguageModel, tokens_BT: Tensor, segments: tuple[int, ...]) -> tuple[Tensor, Any]:
    """Return the log-probabilities (B, T, V) of the token after each position, and the memory after the last segment.

    Args:
        model: the model.
        tokens_BT: token ids.
        segments: lengths of the segments, whose sum is T.
    """
    memory = model.initial_memory(len(tokens_BT))
    parts = []
    for segment_BT in tokens_BT.split(segments, dim=1):
        hidden_BTD, memory = model(segment_BT, memory)
        parts.append(model.logits(hidden_BTD).log_softmax(-1))
    return torch.cat(parts, 1), memory


@torch.no_grad()
def generate_greedily(model: LanguageModel, prompt_T: Tensor, num_tokens: int) -> Tensor:
    """Return the prompt and the `num_tokens` most likely tokens after it, each given those before, (T + num_tokens,).

    If the model has no memory, it reads the whole text again for each new token, as transformers does.
    """
    memory, text = model.initial_memory(1), prompt_T.tolist()
    new_BT = prompt_T[None]
    for _ in range(num_tokens):
        hidden_BTD, memory = model(new_BT, memory)
        _, ids_BTK = model.topk(hidden_BTD[:, -1:], 1)
        text.append(int(ids_BTK))
        new_BT = torch.tensor([text[-1:] if memory.length else text])
    return torch.tensor(text)
