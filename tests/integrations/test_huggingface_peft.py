"""Prompts, prefixes and embeddings that PEFT learns for our models; adapters are in test_huggingface_training.py.

Shape suffixes: B batch rows, T tokens, P tokens of a prefix, N heads, M memory slots, H head width, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from integrations.runs import opened
from small_runs import MEMORY, SEGMENT, ids, make_run
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, DynamicCache

from transformer_xl import convert
from transformer_xl.config import UserError
from transformer_xl.integrations.huggingface import MemoryCache, from_run

CLOSE = {"rtol": 0, "atol": 1e-12}  # in float64
NUM_VIRTUAL = 4
METHODS: dict[str, Any] = {
    "prompt": peft.PromptTuningConfig,
    "p-tuning": peft.PromptEncoderConfig,
    "prefix": peft.PrefixTuningConfig,
}


def learned(method: str, task: str = "CAUSAL_LM") -> Any:
    return METHODS[method](task_type=task, num_virtual_tokens=NUM_VIRTUAL)


@pytest.mark.parametrize(
    "name", ["transformer-xl", "adaptive", "shaw", "attends to empty memory", "lstm", "key offset"]
)
@pytest.mark.parametrize("method", METHODS)
def test_what_is_put_before_a_text_is_learned(method: str, name: str, tmp_path: Path) -> None:
    """Trained alone, saved, opened, and continued by `generate` as by reading the whole text."""
    make_run(tmp_path / "run", name, dropout=0.0)
    convert(tmp_path / "run", tmp_path / "hub", to="huggingface")
    config = learned(method)
    if name == "lstm":
        config.num_attention_heads = 2  # it has none, and PEFT asks
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "hub"), config)
    before = {key: value.clone() for key, value in model.get_base_model().state_dict().items()}
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], lr=0.1)
    rows_BT, losses = ids(3, 2 * SEGMENT + 3), []
    mask_BT = torch.ones_like(rows_BT)
    mask_BT[1, 9:] = 0
    if name == "lstm" and method == "prefix":
        with pytest.raises(UserError, match=r"memory of lstm has no keys and values.* use prompt tuning"):
            model(input_ids=rows_BT, attention_mask=mask_BT)
        return
    if name == "key offset" and method != "prefix":
        with pytest.raises(UserError, match="this model needs token ids"):
            model(input_ids=rows_BT, attention_mask=mask_BT)
        return
    for _ in range(8):
        labels_BT = rows_BT.masked_fill(mask_BT == 0, -100)
        loss = model.train()(input_ids=rows_BT, attention_mask=mask_BT, labels=labels_BT).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.02
    assert all(torch.equal(value, before[key]) for key, value in model.get_base_model().state_dict().items())
    model.eval().save_pretrained(tmp_path / "saved")
    opened_model = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "hub"), str(tmp_path / "saved")
    ).eval()
    prompt_BT = rows_BT[:, :3]
    with torch.no_grad():
        expected_BTV = model(input_ids=prompt_BT).logits
        torch.testing.assert_close(opened_model(input_ids=prompt_BT).logits, expected_BTV)
        made_BT = model.generate(input_ids=prompt_BT, attention_mask=torch.ones_like(prompt_BT), max_new_tokens=3)
    assert torch.equal(made_BT[:, 3], expected_BTV[:, -1].argmax(-1))
    if method == "prompt":  # the same by hand: the prompt is read as embeddings before the text
        virtual_BPD = model.get_prompt(3)
        base = model.get_base_model()
        inputs = torch.cat([virtual_BPD, base.get_input_embeddings()(made_BT[:, :-1])], dim=1)
        with torch.no_grad():
            cache = base(inputs_embeds=inputs[:, : NUM_VIRTUAL + 3], past_key_values=MemoryCache()).past_key_values
            for column in range(3, made_BT.shape[1] - 1):
                logits_BTV = base(made_BT[:, column : column + 1], past_key_values=cache).logits
                assert torch.equal(logits_BTV[:, -1].argmax(-1), made_BT[:, column + 1])


@pytest.mark.parametrize(
    "name", ["transformer-xl", "window", "shaw", "attends to empty memory", "n-grams", "key offset"]
)
def test_a_prefix_of_the_keys_of_tokens_is_their_memory(name: str, tmp_path: Path) -> None:
    """Under gradients and without, with padding on both sides, beyond a segment."""
    _, model, _ = opened(tmp_path / "run", name, dropout=0.0)
    before_BT, after_BT = ids(2, 5), ids(2, 2 * SEGMENT + 4, seed=4)
    with torch.no_grad():
        cache = model(before_BT, past_key_values=MemoryCache()).past_key_values
        expected_BTV = model(after_BT, past_key_values=cache).logits
        memory = model(before_BT, past_key_values=MemoryCache()).past_key_values.memory
    rows = [cache.tensors() for cache in memory.layers]
    num_slots = rows[0]["values"].shape[2]
    prefix = [[one[key][:, :, num_slots - 5 : num_slots].clone() for key in ("keys", "values")] for one in rows]
    if name == "key offset":  # the first token after a prefix sees none before it
        with torch.no_grad():
            whole = {f"keys_{i}": F.pad(one["keys"][:, :, :-1], (0, 0, 0, 1)) for i, one in enumerate(rows)}
            cache = model(before_BT, past_key_values=MemoryCache()).past_key_values
            cache.memory = memory.with_tensors(memory.tensors() | whole)
            of_tokens_BTV, expected_BTV = expected_BTV, model(after_BT, past_key_values=cache).logits
            assert not torch.allclose(of_tokens_BTV, expected_BTV)
    if name == "n-grams":  # they embed the ids of the tokens before, which a prefix has not
        with torch.no_grad():
            assert not torch.allclose(model(after_BT, past_key_values=DynamicCache(prefix)).logits, expected_BTV)
        return
    mask_BT = torch.ones(2, 5 + after_BT.shape[1])
    with torch.no_grad():
        output = model(after_BT, attention_mask=mask_BT, past_key_values=DynamicCache(prefix), use_cache=True)
        torch.testing.assert_close(output.logits, expected_BTV, **CLOSE)
        assert output.past_key_values.get_seq_length() == mask_BT.shape[1]
    model.requires_grad_(False)
    attends_empty = name == "attends to empty memory"
    if not attends_empty:  # which sees other slots then
        mask_BT[0, 5:8] = 0  # padding before one row alone
        shifted_BT = torch.stack([after_BT[0].roll(3), after_BT[1]])
        arguments = {"attention_mask": mask_BT, "use_cache": False}
        leaves = [[one.clone().requires_grad_() for one in pair] for pair in prefix]
        logits_BTV = model(shifted_BT, past_key_values=DynamicCache(leaves), **arguments).logits
        torch.testing.assert_close(logits_BTV[0, 3:], expected_BTV[0, :-3], **CLOSE)
        torch.testing.assert_close(logits_BTV[1], expected_BTV[1], **CLOSE)
    for side in ("left", "right"):
        ids_BT, mask_BT = torch.full((2, after_BT.shape[1] + 3), 256), torch.zeros(2, after_BT.shape[1] + 8)
        columns = slice(3, None) if side == "left" else slice(0, -3)
        ids_BT[:, columns] = after_BT
        mask_BT[:, :5] = mask_BT[:, 5:][:, columns] = 1
        leaves = [[one.clone().requires_grad_() for one in pair] for pair in prefix]
        arguments = {"attention_mask": mask_BT[:, 5:] if side == "right" else mask_BT, "use_cache": False}
        logits_BTV = model(ids_BT, past_key_values=DynamicCache(leaves), **arguments).logits[:, columns]
        # with gradients, models that attend to empty memory too read segments
        compared = slice(SEGMENT if attends_empty else None)
        torch.testing.assert_close(logits_BTV[:, compared], expected_BTV[:, compared], **CLOSE)
        # the memory of the second segment has tokens of the prefix, that of the third has none
        parts = [(SEGMENT, True), (2 * SEGMENT, False)]
        for column, is_seen in parts:
            made = torch.autograd.grad(
                logits_BTV[:, column].square().sum(), [*leaves[0], *leaves[1]], retain_graph=True
            )
            assert [bool(one.any()) for one in made] == [is_seen] * 4


def test_a_prefix_of_another_shape_is_refused(tmp_path: Path) -> None:
    model, _ = from_run(make_run(tmp_path / "run"))

    def prefix(layers: int = 2, length: int = 3, width: int = 5) -> DynamicCache:
        return DynamicCache([(torch.zeros(2, 2, length, width),) * 2 for _ in range(layers)])

    for cache, message in (
        (prefix(layers=3), r"3 layers of shape \(2, 2, 3, 5\), this model 2 of"),
        (prefix(width=7), r"2 layers of shape \(2, 2, 3, 7\), this model 2 of \(2, 2, 3, 5\)"),
        (prefix(length=MEMORY + 1), f"prefix of 12 tokens does not fit a memory of {MEMORY}.* num_virtual_tokens"),
    ):
        with pytest.raises(UserError, match=message):
            model(ids(2, 4), past_key_values=cache)


@pytest.mark.parametrize("method", [*METHODS, "lora"])
def test_classifiers_are_tuned(method: str, tmp_path: Path) -> None:
    make_run(tmp_path / "run", dropout=0.0)
    convert(tmp_path / "run", tmp_path / "hub", to="huggingface")
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hub", num_labels=3)
    config = learned(method, "SEQ_CLS") if method != "lora" else peft.LoraConfig("SEQ_CLS", target_modules="all-linear")
    model = peft.get_peft_model(base, config)
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], lr=0.05)
    rows_BT, labels, losses = ids(3, 2 * SEGMENT), torch.tensor([0, 1, 2]), []
    for _ in range(6):
        output = model.train()(input_ids=rows_BT, attention_mask=torch.ones_like(rows_BT), labels=labels)
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        losses.append(output.loss.item())
    assert losses[-1] < losses[0] - 0.1
    model.eval().save_pretrained(tmp_path / "saved")
    torch.manual_seed(9)
    other = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hub", num_labels=3)
    again = peft.PeftModel.from_pretrained(other, str(tmp_path / "saved")).eval()
    with torch.no_grad():
        arguments = {"input_ids": rows_BT, "attention_mask": torch.ones_like(rows_BT)}
        torch.testing.assert_close(again(**arguments).logits, model(**arguments).logits)


def logits_with(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=ids(1, 5)).logits


@pytest.mark.parametrize("part", ["embedding", "softmax"])
def test_a_copy_of_a_tied_embedding_or_softmax_is_refused(part: str, tmp_path: Path) -> None:
    """Also after it was merged, when the copies would be trained apart."""
    model, _ = from_run(make_run(tmp_path / "run"))
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=[part])
    adapted = peft.get_peft_model(model, config)
    with pytest.raises(UserError, match=rf"the {part} was replaced .* leave {part} out"):
        logits_with(adapted)
    with pytest.warns(UserWarning, match="no longer tied"):
        merged = adapted.merge_and_unload()
    with pytest.raises(UserError, match="was replaced"):
        logits_with(merged)
