"""TRL's trainers on our models: two steps each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from refusals import do
from small_runs import ids, make_run
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

import transformer_xl.integrations.huggingface  # noqa: F401 (registers our models)
from transformer_xl.config import UserError

pytestmark = pytest.mark.client("trl")
PROMPTS, ANSWERS, OTHERS = ["the cat", "a dog that"] * 4, [" sat on the mat", " ran"] * 4, [" x", " zzzz"] * 4


def folder(path: Path, name: str) -> str:
    """Write a run, and the folder for transformers that is made of it."""
    make_run(path / "run", name, dropout=0.0)
    do(f"convert {path / 'run'} {path / 'hub'} --to huggingface")
    return str(path / "hub")


def length_of(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, one)) % 7) for one in completions]


def settings(path: Path, kind: Callable[..., Any], **arguments: Any) -> Any:
    """Return the settings of two steps, without files."""
    return kind(
        output_dir=str(path / "out"), max_steps=2, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1,
        report_to=[], use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True, seed=1, **arguments,
    )  # fmt: skip


def trainer_of(method: str, path: Path, name: str = "transformer-xl", **arguments: Any) -> Any:
    """Return a trainer; the tokens of bytes have no end of a text, for which TRL wants a name, here the line's end."""
    hub = folder(path, name)
    tokenizer = AutoTokenizer.from_pretrained(hub)
    if tokenizer.eos_token is None:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(10)
    if method == "reward":
        model: Any = AutoModelForSequenceClassification.from_pretrained(hub, num_labels=1)
    else:
        model = AutoModelForCausalLM.from_pretrained(hub)
    lora = arguments.pop("peft_config", None)
    kinds, columns, others = {
        "sft": ((SFTTrainer, SFTConfig), {"text": [a + b for a, b in zip(PROMPTS, ANSWERS, strict=True)]}, {}),
        "dpo": ((DPOTrainer, DPOConfig), {"prompt": PROMPTS, "chosen": ANSWERS, "rejected": OTHERS}, {}),
        "grpo": ((GRPOTrainer, GRPOConfig), {"prompt": PROMPTS}, {"reward_funcs": length_of}),
        "reward": ((RewardTrainer, RewardConfig), {"chosen": ANSWERS, "rejected": OTHERS}, {}),
    }[method]
    if method == "grpo":
        arguments |= {"num_generations": 2, "max_completion_length": 8, "temperature": 3.0}
    trainer_class, config_class = kinds
    made = settings(path, config_class, **arguments)
    data = Dataset.from_dict(columns)
    return trainer_class(model, args=made, train_dataset=data, processing_class=tokenizer, peft_config=lora, **others)


@pytest.mark.parametrize("name", ["transformer-xl", "pre-norm"])
@pytest.mark.parametrize("method", ["sft", "dpo", "grpo", "reward"])
def test_two_steps_change_the_weights(method: str, name: str, tmp_path: Path) -> None:
    trainer = trainer_of(method, tmp_path, name)
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    trainer.train()
    assert [line["step"] for line in trainer.state.log_history if "loss" in line] == [1, 2]
    changed = [key for key, value in trainer.model.state_dict().items() if not torch.equal(value, before[key])]
    assert len(changed) > len(before) // 2


def test_losses_of_sft_are_those_of_the_model(tmp_path: Path) -> None:
    """It multiplies hidden states of the base model by the weight of the softmax."""
    trainer = trainer_of("sft", tmp_path)
    ids_BT = ids(2, 23)
    batch = {"input_ids": ids_BT, "attention_mask": torch.ones_like(ids_BT), "labels": ids_BT}
    model = trainer.model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(**batch, fused_lm_head=True).loss, model(**batch).loss)


def test_an_adapter_is_trained(tmp_path: Path) -> None:
    lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"])
    trainer = trainer_of("dpo", tmp_path, peft_config=lora)
    trainer.train()
    moved = [key for key, value in trainer.model.named_parameters() if "lora_B" in key and bool(value.any())]
    assert len(moved) == 4


@pytest.mark.parametrize("arguments", [{"packing": True, "max_length": 32}, {"padding_free": True, "max_length": None}])
def test_several_texts_in_a_row_are_refused(arguments: dict[str, Any], tmp_path: Path) -> None:
    """They would see each other, since positions are relative."""
    trainer = trainer_of("sft", tmp_path, **arguments)
    with pytest.raises(UserError, match=r"packing, padding_free.* give each text a row"):
        trainer.train()


def test_an_adaptive_softmax_is_refused(tmp_path: Path) -> None:
    """It has no matrix of all tokens."""
    trainer = trainer_of("sft", tmp_path, "adaptive")
    with pytest.raises(AttributeError):
        trainer.train()
