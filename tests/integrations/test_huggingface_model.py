"""Our models in transformers: logits, losses and generated texts equal ours.

Shape suffixes: B batch rows, T tokens, D model width, V vocabulary, L layers.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from integrations.runs import opened
from small_runs import MEMORY, MODELS, SEGMENT, ids, make_run, own_logits
from transformers import AutoModelForCausalLM, DynamicCache

from transformer_xl import beam_search, generate
from transformer_xl.config import ARCHITECTURES, UserError
from transformer_xl.integrations.huggingface import (
    MemoryCache,
    PretrainedTransformerXLConfig,
    TransformerXLForCausalLM,
    from_run,
)

CLOSE = {"rtol": 0, "atol": 1e-12}  # in float64
PROMPTS = [b"the cat", b"x", b"a prompt longer than segment and memory together"]
each_model = pytest.mark.parametrize("name", MODELS)
WITH_MEMORY = [
    name
    for name, settings in MODELS.items()
    if ARCHITECTURES[settings.get("architecture", "transformer-xl")].has_memory
]


@each_model
def test_logits_equal_ours(name: str, tmp_path: Path) -> None:
    run, model, _ = opened(tmp_path / "run", name)
    ids_BT = ids(2, 75 * SEGMENT + 3)  # more than are computed at once
    with torch.no_grad():
        for use_cache in (True, False):
            torch.testing.assert_close(model(ids_BT, use_cache=use_cache).logits, own_logits(run, ids_BT), **CLOSE)
    single = make_run(tmp_path / "float32", name)
    ids_BT = ids_BT[:, : 4 * SEGMENT + 3]
    with torch.no_grad():
        logits_BTV = from_run(single)[0](ids_BT).logits
    torch.testing.assert_close(logits_BTV, own_logits(single, ids_BT), rtol=0, atol=4e-6)


def test_settings_of_evaluation_apply_in_evaluation_mode_only(tmp_path: Path) -> None:
    evaluation = {"segment_length": 5, "memory_length": 17, "attention_window": 13, "clamp_length": 3}
    run, model, _ = opened(tmp_path / "run", evaluation=evaluation, dropout=0.0)
    ids_BT = ids(2, 31)
    with torch.no_grad():
        torch.testing.assert_close(model(ids_BT).logits, own_logits(run, ids_BT), **CLOSE)
        assert model(ids_BT).past_key_values.memory.length == 17
        trained_BTV = model.train()(ids_BT).logits
        memory, parts = run.model.initial_memory(2), []
        for part_BT in ids_BT.split(SEGMENT, dim=1):
            hidden_BTD, memory = run.model(part_BT, memory)
            parts.append(run.model.logits(hidden_BTD))
    torch.testing.assert_close(trained_BTV, torch.cat(parts, dim=1), **CLOSE)


@each_model
def test_greedy_texts_of_unequal_prompts_equal_ours(name: str, tmp_path: Path) -> None:
    run, model, tokenizer = opened(tmp_path / "run", name)
    expected = generate(run, PROMPTS, max_new_tokens=23, greedy=True, add_bos_token=False)
    inputs = tokenizer([prompt.decode() for prompt in PROMPTS], return_tensors="pt", padding=True)
    made_BT = model.generate(**inputs, max_new_tokens=23)
    start = inputs["input_ids"].shape[1]
    assert made_BT[:, start:].tolist() == [list(completion.token_ids) for completion in expected]
    single_BT = model.generate(torch.tensor([list(PROMPTS[0])]), max_new_tokens=23)
    assert torch.equal(single_BT[0, len(PROMPTS[0]) :], made_BT[0, start:])
    # without a mask, the padding is found by its id, which no byte has
    assert torch.equal(model.generate(inputs["input_ids"], max_new_tokens=23), made_BT)


@each_model
def test_prompts_are_read_as_ours_without_a_memory_of_evaluation(name: str, tmp_path: Path) -> None:
    """Each token of a prompt sees as many as the generated ones do."""
    run, model, _ = opened(tmp_path / "run", name, evaluation={"memory_length": 0})
    prompt, more = ids(1, 40)[0].tolist(), ids(1, 9, seed=4)[0].tolist()
    for text in (prompt, more):
        expected = generate(run, text, max_new_tokens=9, greedy=True, add_bos_token=False, logprobs=1)
        made = model.generate(torch.tensor([text]), max_new_tokens=9, output_logits=True, return_dict_in_generate=True)
        assert made.sequences[0, len(text) :].tolist() == list(expected.token_ids)
        logprobs = [float(logits_BV[0].log_softmax(-1).max()) for logits_BV in made.logits]
        assert logprobs == pytest.approx(list(expected.logprobs), rel=1e-5)


@each_model
def test_beams_equal_ours(name: str, tmp_path: Path) -> None:
    run, model, _ = opened(tmp_path / "run", name)
    expected = beam_search(run, PROMPTS[0], num_beams=3, max_new_tokens=13, add_bos_token=False)
    prompt_BT = torch.tensor([list(PROMPTS[0])])
    made = model.generate(
        prompt_BT, num_beams=3, num_return_sequences=3, max_new_tokens=13, output_scores=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert made.sequences[:, prompt_BT.shape[1] :].tolist() == [list(beam.token_ids) for beam in expected]
    scores = torch.tensor([sum(beam.logprobs) / 13 for beam in expected])
    torch.testing.assert_close(made.sequences_scores.float(), scores, rtol=0, atol=1e-6)


def test_beams_that_end_equal_ours(tmp_path: Path) -> None:
    """Ended beams are ranked among the others; ours finds more of them than one search of transformers returns."""
    run, model, _ = opened(tmp_path / "run")
    ends = (32, 101, 200, 77)
    for penalty in (0.0, 1.0, 2.0):
        expected = beam_search(
            run, b"the", num_beams=4, max_new_tokens=9, add_bos_token=False, eos_token_ids=ends, length_penalty=penalty
        )
        made_BT = model.generate(
            torch.tensor([list(b"the")]), num_beams=4, max_new_tokens=9, eos_token_id=list(ends), pad_token_id=256,
            length_penalty=penalty, early_stopping="never",
        )  # fmt: skip
        assert [token for token in made_BT[0, 3:].tolist() if token < 256] == list(expected[0].token_ids)


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_generation_continues_from_a_cache(name: str, tmp_path: Path) -> None:
    """With the newest tokens alone, with the whole text so far, and twice from the same memory."""
    _, model, _ = opened(tmp_path / "run", name)
    first_BT, second_BT = ids(2, 9), ids(2, 4, seed=4)
    cache = MemoryCache()
    made_BT = model.generate(first_BT, max_new_tokens=5, past_key_values=cache)
    assert cache.get_seq_length() == made_BT.shape[1] - 1  # the newest token is not read yet
    text_BT = torch.cat([made_BT, second_BT], dim=1)
    other = (copy.copy if name == "lstm" else copy.deepcopy)(cache)
    made_again_BT = model.generate(text_BT, max_new_tokens=6, past_key_values=cache)
    again_BT = model.generate(text_BT, max_new_tokens=6, past_key_values=other)
    assert torch.equal(made_again_BT, again_BT)
    # the same by hand
    with torch.no_grad():
        outputs = model(made_BT[:, :-1])
        outputs = model(text_BT[:, made_BT.shape[1] - 1 :], past_key_values=outputs.past_key_values)
        for token_B in made_again_BT[:, text_BT.shape[1] :].unbind(1):
            assert torch.equal(outputs.logits[:, -1].argmax(-1), token_B)
            outputs = model(token_B[:, None], past_key_values=outputs.past_key_values)


@each_model
def test_padding_changes_no_result(name: str, tmp_path: Path) -> None:
    """Rows of all lengths, padded on the left and on the right.

    They have fewer and more columns than a segment, and more than are computed at once.
    """
    _, model, _ = opened(tmp_path / "run", name)
    for width in (SEGMENT, 4 * SEGMENT + 3, 75 * SEGMENT + 2):
        lengths = [width, width - 3, 1, width // 2 + 1]
        rows = [ids(1, length, seed=length)[0] for length in lengths]
        for side in ("left", "right"):
            pads = [torch.full((width - len(row),), 256) for row in rows]
            ids_BT = torch.stack([
                torch.cat([pad, row] if side == "left" else [row, pad]) for pad, row in zip(pads, rows, strict=True)
            ])  # fmt: skip
            mask_BT = (ids_BT != 256).long()
            with torch.no_grad():
                logits_BTV = model(ids_BT, attention_mask=mask_BT).logits
                for index, row_T in enumerate(rows):
                    expected_TV = model(row_T[None]).logits[0]
                    torch.testing.assert_close(logits_BTV[index, mask_BT[index] == 1], expected_TV, **CLOSE)


def test_new_columns_may_be_padded_after_a_cache(tmp_path: Path) -> None:
    """A second turn of unequal length, as in a conversation."""
    _, model, _ = opened(tmp_path / "run")
    first_BT, second_BT = ids(2, 5), ids(2, 6, seed=4)
    mask_BT = torch.ones(2, 11, dtype=torch.long)
    mask_BT[0, 5:8] = 0
    with torch.no_grad():
        cache = model(first_BT).past_key_values
        logits_BTV = model(second_BT, attention_mask=mask_BT, past_key_values=cache).logits
        expected_BTV = model(torch.cat([first_BT[:1], second_BT[:1, 3:]], dim=1)).logits
    # the segments are cut at other tokens, so only rows that fit the memory are equal
    torch.testing.assert_close(logits_BTV[0, 3:], expected_BTV[0, 5:], **CLOSE)


@each_model
def test_loss_is_that_of_the_next_tokens(name: str, tmp_path: Path) -> None:
    _, model, _ = opened(tmp_path / "run", name)
    ids_BT = ids(2, 3 * SEGMENT + 2)
    labels_BT = ids_BT.clone()
    labels_BT[0, :5] = labels_BT[1, -4:] = -100
    outputs = model(ids_BT, labels=labels_BT)
    flat = outputs.logits[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten()
    expected = F.cross_entropy(*flat)
    torch.testing.assert_close(outputs.loss, expected, **CLOSE)
    shifted_BT = F.pad(labels_BT[:, 1:], (0, 1), value=-100)
    torch.testing.assert_close(model(ids_BT, shift_labels=shifted_BT).loss, expected, **CLOSE)
    total = F.cross_entropy(*flat, reduction="sum")
    torch.testing.assert_close(model(ids_BT, labels=labels_BT, num_items_in_batch=31).loss, total / 31, **CLOSE)
    kept = model(ids_BT, labels=labels_BT, logits_to_keep=2)
    torch.testing.assert_close(kept.loss, expected, **CLOSE)
    assert kept.logits.shape == (2, 2, 256)


@each_model
def test_padding_changes_no_loss(name: str, tmp_path: Path) -> None:
    """The first token of a row has no loss, on whichever side the row is padded."""
    _, model, tokenizer = opened(tmp_path / "run", name)
    texts = [prompt.decode() for prompt in PROMPTS]
    total, count = torch.tensor(0.0, dtype=torch.float64), 0
    for text in texts[::2]:
        single_BT = torch.tensor([list(text.encode())])
        total, count = total + model(single_BT, labels=single_BT).loss * (len(text) - 1), count + len(text) - 1
    for side in ("left", "right"):
        inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side=side)
        labels_BT = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        torch.testing.assert_close(model(**inputs, labels=labels_BT).loss, total / count, **CLOSE)


def test_recurrence_within_a_row_has_the_gradients_of_training(tmp_path: Path) -> None:
    """Gradients stop at the border of segments, as in training, and recomputed activations change none."""
    run, model, _ = opened(tmp_path / "run", dropout=0.0)
    ids_BT = ids(2, 3 * SEGMENT + 1)
    model.train()(ids_BT, labels=ids_BT).loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in run.model.named_parameters()}
    run.model.zero_grad()
    memory, losses = run.model.initial_memory(2), []
    for start in range(0, 3 * SEGMENT, SEGMENT):
        targets_BT = ids_BT[:, start + 1 : start + SEGMENT + 1]
        losses_BT, _, memory = run.model.training_losses(
            ids_BT[:, start : start + SEGMENT], targets_BT, memory, progress=0
        )
        losses.append(losses_BT)
    torch.cat(losses, dim=1).mean().backward()
    for name, parameter in run.model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=1e-10)
    run.model.zero_grad()
    model.activation_checkpointing_enable()
    assert model.is_gradient_checkpointing
    model(ids_BT, labels=ids_BT).loss.backward()
    for name, parameter in run.model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=1e-10)


def test_adaptive_softmax_trains_without_the_logits_of_all_words(tmp_path: Path) -> None:
    _, model, _ = opened(tmp_path / "run", "adaptive", dropout=0.0)
    ids_BT = ids(2, 13)
    expected = model(ids_BT, labels=ids_BT).loss
    trained = model.train()(ids_BT, labels=ids_BT)
    assert trained.logits is None
    torch.testing.assert_close(trained.loss, expected, **CLOSE)


@each_model
def test_embeddings_give_the_results_of_their_ids(name: str, tmp_path: Path) -> None:
    _, model, _ = opened(tmp_path / "run", name)
    ids_BT = ids(2, 2 * SEGMENT + 3)
    embeddings_BTD = model.get_input_embeddings()(ids_BT)
    if name in ("n-grams", "value embeddings", "key offset"):
        with pytest.raises(UserError, match=r"needs token ids \(max_ngram, value_embeddings, key_offset\)"):
            model(inputs_embeds=embeddings_BTD)
        return
    torch.testing.assert_close(model(inputs_embeds=embeddings_BTD).logits, model(ids_BT).logits, **CLOSE)


def test_hidden_states_of_all_layers_are_returned(tmp_path: Path) -> None:
    run, model, _ = opened(tmp_path / "run")
    ids_BT = ids(2, 2 * SEGMENT + 3)
    with torch.no_grad():
        outputs = model(ids_BT, output_hidden_states=True)
        torch.testing.assert_close(run.model.logits(outputs.hidden_states[-1]), outputs.logits, **CLOSE)
        first_BTD = run.model.get_parameter("embedding.tables.0")[ids_BT] * 14**0.5
    torch.testing.assert_close(outputs.hidden_states[0], first_BTD, **CLOSE)
    assert [state.shape for state in outputs.hidden_states] == [(2, 17, 14)] * 3
    assert isinstance(model(ids_BT, return_dict=False), tuple)
    model.config.output_hidden_states = True
    assert len(model(ids_BT).hidden_states) == 3


def test_only_the_logits_that_are_kept_are_computed(tmp_path: Path) -> None:
    run, model, _ = opened(tmp_path / "run", "adaptive")
    ids_BT, widths = ids(2, 13), []
    logits = run.model.softmax.logits
    run.model.softmax.logits = lambda hidden_BTD: (widths.append(hidden_BTD.shape[1]), logits(hidden_BTD))[1]
    with torch.no_grad():
        all_BTV = model(ids_BT).logits
        torch.testing.assert_close(model(ids_BT, logits_to_keep=3).logits, all_BTV[:, -3:], **CLOSE)
        index = torch.tensor([1, 5])
        torch.testing.assert_close(model(ids_BT, logits_to_keep=index).logits, all_BTV[:, index], **CLOSE)
        model.generate(ids_BT, max_new_tokens=2)
    assert widths == [13, 3, 2, 1, 1]


BATCH = ids(2, 5)
MASK = torch.ones(2, 5, dtype=torch.long)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either input_ids or inputs_embeds"),
        ({"input_ids": BATCH, "attention_mask": torch.tensor([[1, 0, 1, 1, 1]] * 2)}, "padding between tokens"),
        ({"input_ids": BATCH, "attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]])}, "different sides"),
        ({"input_ids": BATCH, "attention_mask": MASK[:, :4]}, r"shape \(2, 4\); expected .* 5 columns"),
        ({"input_ids": BATCH, "attention_mask": MASK[:, None]}, r"shape \(2, 1, 5\)"),
        ({"input_ids": BATCH, "attention_mask": MASK[:1]}, r"shape \(1, 5\); expected 2 rows with 5 columns"),
        (
            {"input_ids": BATCH, "attention_mask": MASK * torch.tensor([1, 1, 1, 1, 0]), "use_cache": True},
            "on the left",
        ),
        ({"input_ids": BATCH, "past_key_values": DynamicCache()}, r"DynamicCache; .* MemoryCache\(\)"),
        ({"input_ids": BATCH, "position_ids": BATCH}, "leave position_ids out"),
        ({"input_ids": BATCH, "token_type_ids": BATCH}, "no argument token_type_ids"),
        ({"input_ids": BATCH + 300}, "token id .* is not in the vocabulary of 256"),
        ({"input_ids": BATCH, "labels": BATCH + 300}, "labels: token id .* is not in the vocabulary"),
        ({"input_ids": BATCH, "labels": ids(2, 7)}, r"labels of shape \(2, 7\); expected \(2, 5\)"),
        ({"input_ids": BATCH[0]}, r"input_ids of shape \(5,\); expected \(batch, tokens\)"),
        ({"input_ids": BATCH[:, :0]}, r"shape \(2, 0\).* one token or more .*bos_token_id"),
        ({"inputs_embeds": torch.zeros(2, 14)}, r"expected \(batch, tokens, d_model\)"),
        ({"input_ids": BATCH, "past_key_values": "other rows"}, "memory of batch size 3 for inputs of batch size 2"),
    ],
)
def test_what_the_model_cannot_read_is_refused(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    _, model, _ = opened(tmp_path / "run")
    if arguments.get("past_key_values") == "other rows":
        arguments["past_key_values"] = model(ids(3, 4)).past_key_values
    with pytest.raises(UserError, match=message):
        model(**arguments)


def test_padding_where_a_memory_has_read_is_refused(tmp_path: Path) -> None:
    """A row that ended before the other was filled with padding, which the memory has read as tokens."""
    _, model, _ = opened(tmp_path / "run")
    cache, first_BT = MemoryCache(), ids(2, 6)
    made_BT = model.generate(first_BT, max_new_tokens=8, past_key_values=cache)
    mask_BT = torch.ones(2, 16, dtype=torch.int64)
    mask_BT[1, 10:13] = 0
    again = {"max_new_tokens": 1, "past_key_values": cache}
    with pytest.raises(UserError, match=r"row 1 of attention_mask has padding where .* new MemoryCache\(\)"):
        model.generate(torch.cat([made_BT, ids(2, 2)], 1), attention_mask=mask_BT, **again)
    assert model.generate(torch.cat([made_BT, ids(2, 2)], 1), **again).shape == (2, 17)


def test_a_model_without_memory_continues_without_gradients_alone(tmp_path: Path) -> None:
    _, model, _ = opened(tmp_path / "run", "vaswani")
    with pytest.raises(UserError, match=r"vaswani continues a text by its tokens.* torch\.no_grad\(\)"):
        model(ids(1, 9), past_key_values=MemoryCache())


def test_what_the_model_cannot_do_is_refused(tmp_path: Path) -> None:
    _, model, tokenizer = opened(tmp_path / "run")
    with pytest.raises(UserError, match="vocabulary of 256 tokens is fixed"):
        model.resize_token_embeddings(300)
    with pytest.raises(UserError, match="embedding cannot be replaced"):
        model.set_input_embeddings(torch.nn.Embedding(3, 4))
    with pytest.raises(UserError, match="cannot forget"):
        model(BATCH).past_key_values.crop(1)
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        model.generate(BATCH[:1], assistant_model=model, max_new_tokens=3)
    inputs = tokenizer(["a", "bcd"], return_tensors="pt", padding=True, padding_side="right")
    with pytest.raises(UserError, match="pad on the left"):
        model.generate(**inputs, max_new_tokens=3)
    with pytest.raises(UserError, match="weights are not in memory"):
        model.to("meta")(BATCH)  # where accelerate has put weights elsewhere, parameters look so


def test_windows_of_tokens_have_no_hidden_states(tmp_path: Path) -> None:
    """An architecture without memory reads its last tokens again for each new one."""
    _, model, _ = opened(tmp_path / "run", "vaswani")
    arguments = {"max_new_tokens": 3, "output_hidden_states": True, "return_dict_in_generate": True}
    with pytest.raises(UserError, match=r"vaswani has no memory, .* output_hidden_states; .* use_cache=False"):
        model.generate(BATCH, **arguments)
    assert len(model.generate(BATCH, use_cache=False, **arguments).hidden_states) == 3
    with pytest.raises(UserError, match=r"vaswani has no memory, .* inputs_embeds; leave it out"):
        model.generate(inputs_embeds=model.get_input_embeddings()(BATCH), max_new_tokens=3)


def test_model_is_made_from_a_configuration() -> None:
    torch.manual_seed(3)
    config = PretrainedTransformerXLConfig(vocab_size=23, n_layers=2, d_model=14, n_heads=2, d_ff=19)
    model = AutoModelForCausalLM.from_config(config)
    assert isinstance(model, TransformerXLForCausalLM)
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (14, 2, 2)
    assert 0.01 < model.model.get_parameter("layers.0.attention.q_proj.weight").std() < 0.03
    lstm = AutoModelForCausalLM.from_config(PretrainedTransformerXLConfig(architecture="lstm", hidden_size=14))
    assert (lstm.config.d_model, lstm.model.get_parameter("layers.0.bias")[14:28].tolist()) == (14, [1.0] * 14)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architecture": "gpt"}, "no architecture 'gpt'; known: transformer-xl, xlnet, shaw"),
        ({"architecture": "lstm", "n_heads": 3}, "n_heads is no setting of lstm"),
        ({"n_layers": 0}, "n_layers"),
        ({"d_model": 13}, "d_model"),
        ({"architecture": "vaswani", "memory_length": 5}, "vaswani has no memory"),
        ({"memory_length": -1}, "memory_length -1 is too small"),
        ({"segment_length": 1.5}, "segment_length is 1.5"),
        ({"evaluation_segment_length": "128"}, "evaluation_segment_length is '128'"),
        ({"use_cache": "no"}, "use_cache is 'no'"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        PretrainedTransformerXLConfig(**settings)


def test_memory_has_the_length_of_the_settings_also_after_short_rows(tmp_path: Path) -> None:
    run, model, _ = opened(tmp_path / "run")
    with torch.no_grad():
        cache = model(ids(2, 3)).past_key_values
        assert (cache.memory.length, cache.memory.valid_B.tolist()) == (MEMORY, [3, 3])
        assert model(ids(2, 3), use_cache=False).past_key_values is None
    assert model.train()(ids(2, 3)).past_key_values is None
    model.eval().config.evaluation_memory_length = 50
    with torch.no_grad():
        assert model(ids(2, 3)).past_key_values.memory.length == 50
    assert run.model.context_limits.memory_length == MEMORY
