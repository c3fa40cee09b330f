"""Trainer, pipeline and PEFT with our models.

Shape suffixes: B batch rows, T tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from small_runs import SEGMENT, ids, make_run
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    pipeline,
)

from transformer_xl import UserError, convert, load
from transformer_xl.integrations.huggingface import TransformerXLForCausalLM, from_run
from transformer_xl.text.tokenizers.integer import IntegerTokenizer

ROWS = ["the cat sat on the mat", "the dog", "a cat and a dog sat on a mat\nand slept"]


class Rows(Dataset):
    """Encoded texts of unequal lengths."""

    def __init__(self, tokenizer: Any) -> None:
        self.encoded = [tokenizer(text) for text in ROWS * 4]

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, index: int) -> Any:
        return self.encoded[index]


def train(model: Any, tokenizer: Any, folder: Path, **arguments: Any) -> Trainer:
    """Train on the rows for three epochs of three steps, or as the arguments say."""
    settings = TrainingArguments(
        output_dir=str(folder), learning_rate=1e-2, logging_steps=1, report_to=[], use_cpu=True, save_strategy="no",
        seed=1, disable_tqdm=True, **{"num_train_epochs": 3, "per_device_train_batch_size": 4} | arguments,
    )  # fmt: skip
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer = Trainer(
        model, settings, data_collator=collator, train_dataset=Rows(tokenizer), processing_class=tokenizer
    )
    trainer.train()
    return trainer


def losses(trainer: Trainer) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("name", ["transformer-xl", "adaptive", "lstm", "vaswani"])
def test_trainer_lowers_the_loss(name: str, tmp_path: Path) -> None:
    make_run(tmp_path / "run", name, dropout=0.0)
    model, tokenizer = from_run(tmp_path / "run")
    trainer = train(model, tokenizer, tmp_path / "out")
    assert losses(trainer)[-1] < losses(trainer)[0] - 0.2
    evaluated = trainer.evaluate(Rows(tokenizer))
    assert evaluated["eval_loss"] < losses(trainer)[0]
    trainer.save_model(str(tmp_path / "saved"))
    convert(tmp_path / "saved", tmp_path / "trained")
    trained = load(tmp_path / "trained", device="cpu")
    ids_BT = ids(1, 2 * SEGMENT)
    with torch.no_grad():
        logits_BTV = from_run(trained)[0](ids_BT).logits
        torch.testing.assert_close(logits_BTV, model.eval()(ids_BT).logits)


def test_gradient_accumulation_changes_no_loss(tmp_path: Path) -> None:
    """The loss is divided by the number of targets of all parts, `num_items_in_batch`."""
    found = []
    for rows, parts in ((4, 1), (2, 2), (1, 4)):
        make_run(tmp_path / f"{rows}", dropout=0.0)
        model, tokenizer = from_run(tmp_path / f"{rows}")
        tokenizer.padding_side = "right"  # Trainer counts the first token after padding on the left as a target
        arguments = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": parts}
        arguments |= {"max_steps": 3, "activation_checkpointing": parts == 4}
        found.append(losses(train(model, tokenizer, tmp_path / "out", **arguments)))
    assert found[1] == pytest.approx(found[0], abs=1e-4)
    assert found[2] == pytest.approx(found[0], abs=1e-4)


@pytest.mark.parametrize("has_adapter", [False, True])
def test_smoothed_labels_are_the_next_tokens(has_adapter: bool, tmp_path: Path) -> None:
    make_run(tmp_path / "run", dropout=0.0)
    model: Any = from_run(tmp_path / "run")[0]
    if has_adapter:
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"]))
    settings = TrainingArguments(output_dir=str(tmp_path / "out"), label_smoothing_factor=0.1, use_cpu=True)
    ids_BT = ids(2, 9)
    with torch.no_grad():
        loss = Trainer(model, settings).compute_loss(model, {"input_ids": ids_BT, "labels": ids_BT})
        logits_BTV = model(ids_BT).logits[:, :-1]
    expected = F.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(loss, expected)


def test_pipeline_continues_texts(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "hub", to="huggingface")
    write = pipeline("text-generation", model=str(tmp_path / "hub"))
    prompts = ["the cat", "a"]
    for batch_size in (1, 2):
        made = write(prompts, max_new_tokens=9, do_sample=False, batch_size=batch_size)
        for prompt, (result,) in zip(prompts, made, strict=True):
            model, _ = from_run(run)
            expected_BT = model.generate(torch.tensor([list(prompt.encode())]), max_new_tokens=9)
            assert result["generated_text"] == run.tokenizer.decode(expected_BT[0])


def test_pipeline_continues_words_after_a_space(tmp_path: Path) -> None:
    make_run(tmp_path / "run", tokenizer=IntegerTokenizer(9))
    convert(tmp_path / "run", tmp_path / "hub", to="huggingface")
    write = pipeline("text-generation", model=str(tmp_path / "hub"))
    text = write("1 2 3 ", max_new_tokens=4, do_sample=False)[0]["generated_text"]
    expected_BT = write.model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False)
    assert text == write.tokenizer.decode(expected_BT[0])


def trained_adapter(folder: Path, **arguments: Any) -> tuple[Any, Any, dict[str, Tensor]]:
    """Train a LoRA of the run in `folder`; return it with its tokenizer and the weights before."""
    model, tokenizer = from_run(folder / "run")
    before = {name: weight.clone() for name, weight in model.model.state_dict().items()}
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=3, **arguments))
    train(adapted, tokenizer, folder / "out")
    return adapted, tokenizer, before


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("transformer-xl", ["q_proj", "v_proj"]),
        ("pre-norm", "all-linear"),
        ("vaswani", ["q_proj", "up_proj"]),
        ("qrnn", ["gates"]),
    ],
)
def test_lora_changes_only_its_weights(name: str, targets: Any, tmp_path: Path) -> None:
    """Trained, saved, loaded on the same model, and merged into it."""
    make_run(tmp_path / "run", name, dropout=0.0)
    convert(tmp_path / "run", tmp_path / "hub", to="huggingface")
    adapted, tokenizer, before = trained_adapter(tmp_path, target_modules=targets)
    after = {
        key.replace(".base_layer", ""): value for key, value in adapted.get_base_model().model.state_dict().items()
    }
    for key, weight in before.items():
        assert torch.equal(after[key], weight), key
    changed = [key for key, value in after.items() if "lora_B" in key and bool(value.any())]
    assert len(changed) == len([key for key in after if "lora_B" in key]) > 0
    adapted.eval()
    inputs = tokenizer(["the cat", "a"], return_tensors="pt", padding=True)
    with torch.no_grad():
        expected = adapted(**inputs).logits
        with adapted.disable_adapter():
            unchanged = adapted(**inputs).logits
    assert not torch.allclose(expected, unchanged, atol=1e-3)
    made = adapted.generate(**inputs, max_new_tokens=7)
    adapted.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(**inputs).logits, expected)
    merged = loaded.merge_and_unload()
    assert isinstance(merged, TransformerXLForCausalLM)
    with torch.no_grad():
        torch.testing.assert_close(merged(**inputs).logits, expected, rtol=0, atol=1e-4)
    assert torch.equal(merged.generate(**inputs, max_new_tokens=7), made)
    merged.save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(tmp_path / "hub").save_pretrained(tmp_path / "merged")
    convert(tmp_path / "merged", tmp_path / "merged run")
    with torch.no_grad():
        logits_BTV = from_run(tmp_path / "merged run")[0](**inputs).logits
        torch.testing.assert_close(logits_BTV, expected, rtol=0, atol=1e-4)


def test_folder_of_an_adapter_opens_by_itself(tmp_path: Path) -> None:
    make_run(tmp_path / "run", dropout=0.0)
    convert(tmp_path / "run", tmp_path / "hub", to="huggingface")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "lora_B" in key:
                parameter.normal_()
    adapted.save_pretrained(tmp_path / "adapter")
    ids_BT = ids(2, 11)
    with torch.no_grad():
        expected = adapted.eval()(input_ids=ids_BT).logits
        opened = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
        torch.testing.assert_close(opened(ids_BT).logits, expected)


@pytest.mark.parametrize("settings", [{}, {"tie_word_embeddings": False, "d_embed": 10}])
def test_an_embedding_is_not_trained_apart_from_the_softmax_that_shares_it(settings: Any, tmp_path: Path) -> None:
    """PEFT puts a copy in its place, and the softmax went on with the old tables, or the old projection."""
    model, _ = from_run(make_run(tmp_path / "run", **settings))
    arguments = {"target_modules": ["q_proj"], "modules_to_save": ["embedding"]}
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **arguments))
    with pytest.raises(UserError, match=r"softmax shares its weights.* leave embedding out \(of modules_to_save"):
        adapted(input_ids=ids(1, 5), labels=ids(1, 5))


def test_an_embedding_of_its_own_can_be_trained_beside_an_adapter(tmp_path: Path) -> None:
    model, _ = from_run(make_run(tmp_path / "run", tie_word_embeddings=False))
    arguments = {"target_modules": ["q_proj"], "modules_to_save": ["embedding"]}
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **arguments))
    before_BTV = adapted(input_ids=ids(1, 5)).logits
    with torch.no_grad():
        model.model.embedding.modules_to_save["default"].tables[0].normal_()
        changed_BTV = adapted.eval()(input_ids=ids(1, 5)).logits
    assert not torch.allclose(before_BTV, changed_BTV, atol=0.1)
