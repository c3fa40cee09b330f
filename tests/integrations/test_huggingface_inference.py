"""Reading and generating in transformers: what a token sees, and weights that others change.

Shape suffixes: B batch rows, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from integrations.runs import opened
from small_runs import MODELS, SEGMENT, ids, make_run
from torch import Tensor, nn
from transformers import LogitsProcessor

from transformer_xl import score
from transformer_xl.config import UserError
from transformer_xl.inference.fingerprint import Fingerprint
from transformer_xl.integrations.huggingface import MemoryCache, from_run
from transformer_xl.run import Run
from transformer_xl.text.tokenizers import ByteTokenizer, Tokenizer
from transformer_xl.text.tokenizers.integer import IntegerTokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer

CLOSE = {"rtol": 0, "atol": 1e-12}  # in float64
LENGTHS = (3, 40, 75 * SEGMENT + 2)  # of prompts: the last two are longer than the memory
STALE = "this memory holds keys and values of other weights than the model has now; begin with a new MemoryCache"


def logits_after(run: Run, prompt_T: Tensor, new_T: Tensor) -> Tensor:
    """Return the logits (T, V) after a prompt and after each new token, of the run's model with one segment at a time.

    Models that cannot limit what each token sees read 512 tokens at once.
    """
    model, parts = run.model, []
    segment_length = SEGMENT if model.limits_visible else 512
    memory = model.initial_memory(1)
    if not run.config.model.has_memory:
        memory = model.generation_memory(1, segment_length=SEGMENT)
    for part_T in [*prompt_T.split(segment_length), *new_T.split(1)]:
        hidden_BTD, memory = model(part_T[None], memory)
        parts.append(hidden_BTD[0, -1:])
    return model.logits(torch.cat(parts)[-len(new_T) - 1 :][None])[0]


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_prompts_of_generate_are_read_in_segments_from_their_start(name: str, tmp_path: Path) -> None:
    run, model, _ = opened(tmp_path / "run", name)
    prompts = [ids(1, length, seed=length)[0] for length in LENGTHS]
    inputs_BT = torch.zeros(len(prompts), max(LENGTHS), dtype=torch.int64)
    mask_BT = torch.zeros_like(inputs_BT)
    for row, prompt_T in enumerate(prompts):
        inputs_BT[row, -len(prompt_T) :], mask_BT[row, -len(prompt_T) :] = prompt_T, 1
    wanted: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 9}
    made = model.generate(inputs_BT, attention_mask=mask_BT, **wanted)
    logits_BTV = torch.stack(made.logits, dim=1)
    for row, prompt_T in enumerate(prompts):
        expected_TV = logits_after(run, prompt_T, made.sequences[row, max(LENGTHS) : -1])
        torch.testing.assert_close(logits_BTV[row], expected_TV.to(logits_BTV.dtype), rtol=0, atol=2e-6)


@torch.no_grad()
def test_tokens_after_a_cache_begin_a_segment(tmp_path: Path) -> None:
    run, model, _ = opened(tmp_path / "run")
    parts = [ids(2, length, seed=length) for length in (SEGMENT + 3, 2 * SEGMENT + 1, 1, 600)]
    cache, memory = MemoryCache(), run.model.initial_memory(2)
    for part_BT in parts:
        logits_BTV = model(part_BT, past_key_values=cache).logits
        expected = []
        for segment_BT in part_BT.split(SEGMENT, dim=1):
            hidden_BTD, memory = run.model(segment_BT, memory)
            expected.append(run.model.logits(hidden_BTD))
        torch.testing.assert_close(logits_BTV, torch.cat(expected, dim=1), **CLOSE)
        assert cache.memory.length == memory.length


@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_loss_of_a_text_is_that_of_score(name: str, has_gradients: bool, tmp_path: Path) -> None:
    evaluation = {} if name in ("vaswani", "al-rfou") else {"segment_length": 5, "memory_length": 13}
    run = make_run(tmp_path / "run", name, evaluation=evaluation)
    model, tokenizer = from_run(run)
    text = "the cat sat on the mat and looked at the dog, " * 13
    expected = score(run, text)[0].sums.nats / len(text)
    ids_BT = torch.tensor([[tokenizer.own_tokenizer.bos_token_id, *text.encode()]])
    for use_cache in (True, False):
        with torch.set_grad_enabled(has_gradients):
            assert model(ids_BT, labels=ids_BT, use_cache=use_cache).loss.item() == pytest.approx(expected, abs=1e-5)


def adapted(folder: Path) -> tuple[Any, Any]:
    """Return a model with two adapters, of which one is active, and what PEFT made of it."""
    make_run(folder, dropout=0.0)
    model = from_run(folder)[0]
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["q_proj", "v_proj"])
    )
    wrapped.add_adapter("other", peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return model, wrapped.eval()


def step(model: Any, make: Callable[..., torch.optim.Optimizer], **arguments: Any) -> None:
    """Train on a text for a step, as Trainer does."""
    model.requires_grad_(True)
    optimizer = make(model.parameters(), lr=0.1, **arguments)
    ids_BT = ids(2, 31, seed=9)
    model.train()(ids_BT, labels=ids_BT).loss.backward()
    optimizer.step()
    model.eval()


def scaled(model: Any, name: str) -> nn.Parameter:
    parameter = model.model.get_parameter(name)
    return nn.Parameter(parameter.detach() * 1.5)


@torch.no_grad()
def change_an_element(model: Any) -> None:
    model.model.embedding.tables[0][3, 5] += 2  # which is not compared


def replace_data(model: Any) -> None:
    model.model.embedding.tables[0].data = scaled(model, "embedding.tables.0").data


def replace_parameter(model: Any) -> None:
    model.model.layers[0].attention.norm.weight = scaled(model, "layers.0.attention.norm.weight")


def load_weights(model: Any) -> None:
    model.load_state_dict({name: value * 1.1 for name, value in model.state_dict().items()})


def replace_layer(model: Any) -> None:
    model.model.layers[0], model.model.layers[1] = model.model.layers[1], model.model.layers[0]


def scale_adapter(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.set_scale("default", 0.25)


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "SGD": lambda model, _: step(model, torch.optim.SGD),
    "fused AdamW": lambda model, _: step(model, torch.optim.AdamW, fused=True),
    "uncounted": lambda model, _: model.model.embedding.tables[0].data.mul_(1.5),
    "one element": lambda model, _: change_an_element(model),
    "other data": lambda model, _: replace_data(model),
    "other parameter": lambda model, _: replace_parameter(model),
    "load_state_dict": lambda model, _: load_weights(model),
    "other layer": lambda model, _: replace_layer(model),
    "switched": lambda _, wrapped: wrapped.set_adapter("other"),
    "disabled": lambda _, wrapped: wrapped.base_model.disable_adapter_layers(),
    "merged": lambda _, wrapped: wrapped.merge_adapter(),
    "merged and removed": lambda _, wrapped: wrapped.merge_and_unload(),
    "scaled": lambda model, _: scale_adapter(model),
}
DTYPES = {"float32": nullcontext, "bfloat16": lambda: torch.autocast("cpu", torch.bfloat16)}


def logits_of(model: Any, cache: MemoryCache | None = None) -> Tensor:
    """Return the logits of the tokens that are generated, (B, T, V)."""
    made = model.generate(
        ids(2, 23), max_new_tokens=5, past_key_values=cache, output_logits=True, return_dict_in_generate=True
    )
    return torch.stack(made.logits, dim=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_used_and_their_old_caches_refused(change: str, dtype: str, tmp_path: Path) -> None:
    model, wrapped = adapted(tmp_path / "run")
    cache = MemoryCache()
    with DTYPES[dtype]():
        before_BTV = logits_of(model, cache)
    CHANGES[change](model, wrapped)  # autocast keeps the weights that it converted for gradients
    with DTYPES[dtype]():
        after_BTV, expected_BTV = logits_of(model), logits_of(copy.deepcopy(model))
        assert torch.equal(after_BTV, expected_BTV)
        if "merged" not in change:  # merged, the adapter gives the same results but for rounding
            assert not torch.allclose(after_BTV, before_BTV, atol=1e-2)
        for continued in (copy.copy(cache), copy.deepcopy(cache)):
            with pytest.raises(UserError, match=STALE), torch.no_grad():
                model(ids(2, 1), past_key_values=continued)
            with pytest.raises(UserError, match=STALE):
                model.generate(ids(2, 29), max_new_tokens=3, past_key_values=continued)


def test_an_adapter_that_is_put_back_continues_its_cache(tmp_path: Path) -> None:
    """Disabled and enabled, switched there and back, merged and unmerged."""
    wrapped = adapted(tmp_path / "run")[1]
    with torch.no_grad():
        cache, text_BT = MemoryCache(), ids(2, 29)
        wrapped(input_ids=text_BT[:, :23], past_key_values=cache)
        expected_BTV = wrapped(input_ids=text_BT[:, 23:], past_key_values=copy.copy(cache)).logits
        with wrapped.disable_adapter(), pytest.raises(UserError, match=STALE):
            wrapped(input_ids=text_BT[:, 23:], past_key_values=cache)
        wrapped.set_adapter("other")
        wrapped.set_adapter("default")
        actual_BTV = wrapped(input_ids=text_BT[:, 23:], past_key_values=copy.copy(cache)).logits
        assert torch.equal(actual_BTV, expected_BTV)
        wrapped.merge_adapter()
        wrapped.unmerge_adapter()  # which rounds
        with pytest.raises(UserError, match=STALE):
            wrapped(input_ids=text_BT[:, 23:], past_key_values=cache)


def test_a_model_is_prepared_once_for_unchanged_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are compared once in each `generate` and in each call of the model."""
    make_run(tmp_path / "run")
    model, compared = from_run(tmp_path / "run")[0], []
    matches = Fingerprint.matches
    monkeypatch.setattr(Fingerprint, "matches", lambda *args: (compared.append(1), matches(*args))[1])
    cache = MemoryCache()
    made_BT = model.generate(ids(2, 9), max_new_tokens=5, past_key_values=cache)
    preparation = model._shared.preparation
    assert preparation is not None
    assert len(compared) == 0
    made_BT = model.generate(torch.cat([made_BT, ids(2, 3)], dim=1), max_new_tokens=5, past_key_values=cache)
    assert len(compared) == 1
    model.generate(ids(2, 9), max_new_tokens=5, num_beams=2)
    assert len(compared) == 2
    with torch.no_grad():
        model(ids(2, 9))
        for number in range(3):
            model(made_BT[:, :1], past_key_values=cache)
            assert len(compared) == 4 + number
    assert model._shared.preparation is preparation
    # the mode changes no weights, but in training the memory is needed for other things
    model.train()
    assert model._shared.preparation is None
    model.eval()
    with torch.no_grad():
        model(made_BT[:, :1], past_key_values=cache)


def test_dynamic_evaluation_continues_while_the_weights_change(tmp_path: Path) -> None:
    """With gradients a cache holds hidden states, which new weights continue."""
    run, model, _ = opened(tmp_path / "run", dropout=0.0)
    other = copy.deepcopy(run.model)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01, fused=True) for one in (model, other)]
    cache, memory = MemoryCache(), other.initial_memory(2)
    for part_BT in ids(2, 5 * SEGMENT).split(SEGMENT, dim=1):
        outputs = model(part_BT, labels=part_BT, past_key_values=cache)
        hidden_BTD, memory = other(part_BT, memory)
        loss = other.nats(hidden_BTD[:, :-1], part_BT[:, 1:]).mean()
        torch.testing.assert_close(outputs.loss, loss, rtol=0, atol=1e-10)
        for optimizer, value in zip(optimizers, (outputs.loss, loss), strict=True):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    made_BT = model.generate(ids(2, 5 * SEGMENT + 2), max_new_tokens=3, past_key_values=cache)
    assert made_BT.shape[1] == 5 * SEGMENT + 5


def test_no_gradients_are_computed_through_keys_and_values(tmp_path: Path) -> None:
    _, model, _ = opened(tmp_path / "run")
    with torch.no_grad():
        cache = model(ids(2, 5)).past_key_values
    with pytest.raises(UserError, match=r"passes no gradient; continue it under torch.no_grad"):
        model(ids(2, 3), past_key_values=cache)


class Forced(LogitsProcessor):
    """Lets `generate` choose given tokens."""

    def __init__(self, token_ids: list[int]) -> None:
        self._remaining = list(token_ids)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor(self._remaining.pop(0)), 0.0)


WORDS = WordTokenizer(("<eos>", "<unk>", "the", "offer", "was", "low"), None, "<eos>", "<unk>")


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "text", "stop", "expected"),
    [
        (ByteTokenizer(), "x", "caf\u00e8 caf\u00e9 au lait", "\u00e9", "caf\u00e8 caf\u00e9"),
        (ByteTokenizer(), "xb,", "aab, aab", ["y", "b,"], "aab,"),
        (ByteTokenizer(), "x", "aab, aab", ["y"], "aab, aab"),
        (WORDS, "offer was", "the offer low offer was low", "offer was", "the offer low offer was"),
        (WORDS, "the", "the low\nwas", ["w\n", "was\n"], "the low\n"),
        (IntegerTokenizer(30), "4 2", "7 4 2 1", "4 2", "7 4 2"),
    ],
)
def test_stop_strings_end_a_text_of_any_tokens(
    tokenizer: Tokenizer, prompt: str, text: str, stop: Any, expected: str, tmp_path: Path
) -> None:
    """Words and integers were refused ("substring not found"), and so were characters of several bytes."""
    model, theirs = from_run(make_run(tmp_path / "run", tokenizer=tokenizer))
    inputs, forced = theirs(prompt, return_tensors="pt"), tokenizer.encode(text).tolist()
    arguments = {"max_new_tokens": len(forced), "logits_processor": [Forced(forced)], "tokenizer": theirs}
    (out_T,) = model.generate(**inputs, stop_strings=stop, **arguments)
    assert theirs.decode(out_T[inputs["input_ids"].shape[1] :]) == expected
