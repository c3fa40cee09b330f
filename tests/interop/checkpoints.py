"""What the tests of the importers share: folders as other programs leave them, and a model's answers compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from transformer_xl.model.language_model import LanguageModel
from transformer_xl.text.tokenizers import save_tokenizer
from transformer_xl.text.tokenizers.integer import IntegerTokenizer

FIXTURES = Path(__file__).parent / "fixtures"
CASES = sorted(path.stem for path in FIXTURES.glob("*.safetensors"))
WORDS = ["<eos>", "the", ",", ".", "of", "and", "in", "<unk>", *(f"word{number}" for number in range(15))]


def golden(name: str) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Configuration, weights, and what transformers 4.37.2 made of them."""
    with safe_open(FIXTURES / f"{name}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
        config = json.loads(file.metadata()["config"])
    weights = {key.removeprefix("weights."): value for key, value in tensors.items() if key.startswith("weights.")}
    return config, weights, {key: value for key, value in tensors.items() if not key.startswith("weights.")}


def hugging_face_folder(
    folder: Path, config: dict[str, Any], weights: dict[str, Tensor], words: list[str] | None = None
) -> Path:
    """As save_pretrained of the model, and vocab.json beside it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: weight.clone() for name, weight in weights.items()}, folder / "model.safetensors")
    words = WORDS[: config["vocab_size"]] if words is None else words
    (folder / "vocab.json").write_text(json.dumps({word: place for place, word in enumerate(words)}))
    return folder


def number_vocabulary(folder: Path, size: int) -> Path:
    """A vocabulary of `size` tokens that mean nothing."""
    save_tokenizer(IntegerTokenizer(size - 1), folder / "numbers.json")
    return folder / "numbers.json"


@torch.no_grad()
def scores_of(model: LanguageModel, tokens_BT: Tensor, segments: tuple[int, ...]) -> tuple[Tensor, Any]:
    """Log-probabilities (B, T, V) of the tokens after each place, segment by segment, and the memory at the end."""
    memory = model.initial_memory(len(tokens_BT))
    parts = []
    for segment_BT in tokens_BT.split(segments, dim=1):
        hidden_BTD, memory = model(segment_BT, memory)
        parts.append(model.logits(hidden_BTD).log_softmax(-1))
    return torch.cat(parts, 1), memory


@torch.no_grad()
def greedy(model: LanguageModel, prompt_T: Tensor, count: int) -> Tensor:
    """The prompt and the `count` likeliest tokens one after another, (T + count,).

    Without memory all that was written is read again for each token, as transformers does.
    """
    memory, written = model.inference_memory(1), prompt_T.tolist()
    new_BT = prompt_T[None]
    for _ in range(count):
        hidden_BTD, memory = model(new_BT, memory)
        _, ids_BTR = model.topk(hidden_BTD[:, -1:], 1)
        new_BT = ids_BTR[:, :, 0]
        written.append(int(new_BT))
        if not memory.length:
            new_BT = torch.tensor([written])
    return torch.tensor(written)
