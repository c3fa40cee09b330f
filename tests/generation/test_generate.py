"""`generate`, `stream`, `beam_search` and `Chat` on texts.

The fixture make_model (tests/conftest.py) makes a small model with random weights. With ByteTokenizer, token ids are
bytes, and the BOS token is the newline (10). The logits processor ForcedTokens makes the model generate given tokens,
and RecordedModel.lengths has the number of tokens of each call of the model.

Shape suffixes: B batch size, T generated tokens, V vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from forced_tokens import ForcedTokens, RecordedModel, assert_same_memory, full_pass
from library_tokenizers import END, byte_level
from model_configs import small_model
from tensors import assert_same_tensors, copied_tensors
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from transformer_xl.config import EvaluationConfig, RunConfig, TrainConfig, UserError
from transformer_xl.evaluation.score import score
from transformer_xl.generation.batch import BatchGenerator
from transformer_xl.generation.beam_search import beam_search, search_token_ids
from transformer_xl.generation.chat import Chat
from transformer_xl.generation.generate import generate, stream
from transformer_xl.generation.generation_config import GenerationConfig
from transformer_xl.model.memory import ContextLimits, Memory
from transformer_xl.run import Run
from transformer_xl.text.tokenizers import ByteTokenizer
from transformer_xl.text.tokenizers.bpe import BPETokenizer
from transformer_xl.text.tokenizers.pre_tokenizer import PreTokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer

LIMITS = ContextLimits(13, attention_window=7, clamp_length=5)  # the evaluation settings of the run below


@pytest.fixture
def run(make_model) -> Run:
    """A run whose evaluation settings differ from its memory length in training, 11."""
    config = RunConfig(
        train=TrainConfig(memory_length=11),
        evaluation=EvaluationConfig(memory_length=13, attention_window=7, clamp_length=5),
    )
    return Run(make_model(vocab_size=256, memory_length=11), ByteTokenizer(), config)


def forced(text: str, **settings: Any) -> dict[str, Any]:
    """Return arguments of `generate` or `stream` that make the model generate this text, one token per byte."""
    token_ids = text.encode()
    return {"max_new_tokens": len(token_ids), "logits_processor": ForcedTokens(token_ids), **settings}


def test_generate_equals_decoded_tokens_of_a_batch_generator(run: Run) -> None:
    """The prompt follows the BOS token; context limits are those of the run's evaluation settings; top-k is 40."""

    def expected_text(context_limits: ContextLimits, prompt: bytes) -> str:
        model = run.inference()
        memory = model.initial_memory(1, context_limits)
        generator = BatchGenerator(model, [prompt], GenerationConfig(top_k=40, seed=3), memory=memory)
        return bytes(generator.step()[0].token_id for _ in range(29)).decode(errors="replace")

    for prompt, encoded in (("caf\u00e9", b"caf\xc3\xa9"), (b"\xff\x00", b"\xff\x00"), (None, b"")):
        completion = generate(run, prompt, max_new_tokens=29, seed=3)
        expected = expected_text(LIMITS, b"\n" + encoded)
        assert (completion.text, completion.prompt, completion.seed) == (expected, prompt, 3)
    completion = generate(run, "ab", max_new_tokens=29, seed=3, memory_length=2)
    assert completion.text == expected_text(ContextLimits(2, attention_window=7, clamp_length=5), b"\nab")
    completion = generate(run, "abcdefghijklmnop", max_new_tokens=29, seed=3, max_prompt_tokens=4)
    assert completion.text == expected_text(LIMITS, b"mnop")


def test_without_bos_token_only_the_prompt_is_read(run: Run) -> None:
    """As generate() of transformers does with TransfoXL; also in a stream, and with beams."""
    greedy = {"max_new_tokens": 9, "greedy": True, "add_bos_token": False}
    expected = generate(run, "he cat", max_new_tokens=9, greedy=True, max_prompt_tokens=6).text  # its last 6 bytes
    assert generate(run, "he cat", **greedy).text == "".join(stream(run, "he cat", **greedy)) == expected
    assert beam_search(run, "he cat", num_beams=1, max_new_tokens=9, add_bos_token=False)[0].text == expected
    with pytest.raises(UserError, match="begins with the BOS token; give a prompt"):
        generate(run, **greedy)


def test_run_trained_without_memory_attends_to_a_segment(make_model) -> None:
    """The context is as long as a segment of training, also if memory_length 0 is given for the generation."""
    config = RunConfig(train=TrainConfig(memory_length=0, segment_length=20))
    run = Run(make_model(vocab_size=256, memory_length=0), ByteTokenizer(), config)
    # expected: each token is predicted from all before it, which are fewer than the segment length, 20
    text = b"\nthe"
    while len(text) < 20:
        text += bytes([int(full_pass(run.model, list(text), ContextLimits(0))[0][-1].argmax())])
    for memory_length in (None, 0):
        completion = generate(run, "the", max_new_tokens=16, greedy=True, memory_length=memory_length)
        assert bytes(completion.token_ids) == text[4:]
    # so does each token of a longer prompt
    prompt, model = b"the cat sat on the mat and looked at the dog", run.inference()
    memory = model.generation_memory(1, segment_length=20)
    for token in b"\n" + prompt:
        hidden_BTD, memory = model([[token]], memory)
    completion = generate(run, prompt, GenerationConfig(max_new_tokens=1, greedy=True, logprobs=True))
    expected = -float(model.nats(hidden_BTD, [completion.token_ids]))
    assert completion.logprob == pytest.approx(expected, abs=1e-10)


def test_seed_determines_the_text(run: Run) -> None:
    random_state = torch.get_rng_state()
    first, again, other, default = (
        generate(run, "a", max_new_tokens=29, **settings).text
        for settings in ({"seed": 0}, {"seed": 0}, {"seed": 1}, {})
    )
    assert first == again == default != other
    assert torch.equal(torch.get_rng_state(), random_state)


def test_keyword_settings_replace_those_of_the_config(run: Run) -> None:
    config = GenerationConfig(max_new_tokens=7, seed=3, stop="x")
    assert generate(run, "a", config, seed=4) == generate(run, "a", max_new_tokens=7, seed=4, stop="x")
    with pytest.raises(UserError, match=r"'max_tokens'.*max_new_tokens"):
        generate(run, "a", config, max_tokens=3)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_ngram": 3, "ngram_buckets": 101, "d_ngram": 7},
        {"architecture": "shaw", "max_relative_positions": 9},
        {"architecture": "lstm"},
    ],
    ids=lambda settings: settings.get("architecture", "n-grams" if settings else "transformer-xl"),
)
def test_probabilities_of_the_next_token_are_those_of_score(settings: dict[str, Any]) -> None:
    """Wherever the prompt ends in its segment, and however much longer than the memory it is; also in a batch."""
    lengths_in_training = RunConfig(train=TrainConfig(segment_length=7, memory_length=11))
    run = Run(small_model(vocab_size=256, **settings), ByteTokenizer(), lengths_in_training)
    text = "the cat sat on the mat and looked at the dog"
    (scored,) = score(run, text)
    lengths = [3, 6, 7, 12, 13, 14, 25, 40]
    config = GenerationConfig(max_new_tokens=1, logprobs=True)
    for length in lengths:
        completion = generate(run, text[:length], config, **forced(text[length]))
        assert completion.logprob == pytest.approx(-scored.nats_K[length], abs=1e-10)
        beams = beam_search(run, text[:length], max_new_tokens=1, num_beams=256)
        (beam,) = [beam for beam in beams if beam.token_ids == (ord(text[length]),)]
        assert beam.logprob == pytest.approx(-scored.nats_K[length], abs=1e-10)

    def force(token_ids_BT: torch.Tensor, logits_BV: torch.Tensor) -> torch.Tensor:
        return logits_BV.scatter(-1, torch.tensor([[ord(text[length])] for length in lengths]), 1e9)

    completions = generate(run, [text[:length] for length in lengths], config, logits_processor=force)
    for length, completion in zip(lengths, completions, strict=True):
        assert completion.text == text[length]
        assert completion.logprob == pytest.approx(-scored.nats_K[length], abs=1e-10)


# Several texts


def test_texts_of_a_batch_equal_each_text_alone(run: Run) -> None:
    """Text i equals the one generated or streamed alone with seed + i, for prompts of different lengths."""
    prompts: list[str | bytes | None] = ["the cat", None, b"\xffabcdefghijklmnopqrst", "a"]
    config = GenerationConfig(max_new_tokens=19, stop="e", eos_token_ids=(5,), logprobs=True)
    completions = generate(run, prompts, config, num_samples=2, seed=7)
    assert [completion.prompt for completion in completions] == [prompt for prompt in prompts for _ in range(2)]
    for index, completion in enumerate(completions):
        alone = generate(run, prompts[index // 2], config, seed=7 + index)
        assert replace(completion, logprobs=()) == replace(alone, logprobs=())
        assert completion.logprobs == pytest.approx(alone.logprobs, abs=1e-10)
        assert completion.logprob == pytest.approx(sum(alone.logprobs))
        streamed = stream(run, prompts[index // 2], config, seed=7 + index)
        assert "".join(streamed) == alone.text
        assert (streamed.token_ids, streamed.logprobs) == (alone.token_ids, alone.logprobs)
        assert (streamed.finish_reason, streamed.num_tokens) == (alone.finish_reason, len(alone.token_ids))
    assert generate(run, "a", max_new_tokens=3).logprob is None


def test_each_text_ends_independently_of_the_others(run: Run) -> None:
    """Texts end by a stop string, by max_new_tokens and by an EOS token; a finished text is no longer in the batch."""
    texts = {0: b"ab.cd", 1: b"abcde", 2: b"ab!cd"}

    def force(token_ids_BT: torch.Tensor, logits_BV: torch.Tensor) -> torch.Tensor:
        step = token_ids_BT.shape[1]
        active = [index for index in texts if step < 3 or index == 1]
        assert [bytes(row) for row in token_ids_BT.tolist()] == [texts[index][:step] for index in active]
        return logits_BV.scatter(-1, torch.tensor([[texts[index][step]] for index in active]), 1e9)

    settings = {"max_new_tokens": 5, "stop": ".", "eos_token_ids": [ord("!")]}
    completions = generate(run, ["x", "yy", "z"], logits_processor=force, **settings)
    ends = [(completion.text, completion.finish_reason) for completion in completions]
    assert ends == [("ab", "stop"), ("abcde", "length"), ("ab", "eos")]
    assert completions[0].token_ids == tuple(b"ab.")


def test_bfloat16_applies_to_texts_streams_and_beams(run: Run) -> None:
    run.model.float()
    settings: dict[str, Any] = {"max_new_tokens": 5, "logprobs": True, "greedy": True}
    float32, bfloat16 = (generate(run, "a", dtype=dtype, **settings) for dtype in ("float32", "bfloat16"))
    assert float32.logprobs[0] != bfloat16.logprobs[0]
    assert float32.logprobs[0] == pytest.approx(bfloat16.logprobs[0], abs=0.5)
    streamed = stream(run, "a", dtype="bfloat16", **settings)
    assert "".join(streamed) == bfloat16.text
    assert streamed.logprobs == bfloat16.logprobs
    dtypes = {tensor.dtype for tensor in streamed.memory().tensors().values() if tensor.is_floating_point()}
    assert dtypes == {torch.bfloat16}
    assert beam_search(run, "a", num_beams=1, max_new_tokens=5, dtype="bfloat16")[0].token_ids == bfloat16.token_ids
    assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")


# Streams


@pytest.mark.parametrize("settings", [{}, {"stop": "\n"}, {"eos_token_ids": [10]}])
def test_memory_of_a_stream_continues_the_conversation(
    run: Run, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each turn reads only its own prompt, and leaves the memory of the whole conversation."""
    recorded = RecordedModel(run.inference())
    monkeypatch.setattr(Run, "inference", lambda run, dtype: recorded)
    memory: Memory | None = None
    conversation = b"\n"
    for turn in range(3):
        prompt = f"line {turn}\n"
        previous_memory, num_calls = memory, len(recorded.lengths)
        before = None if memory is None else copied_tensors(memory)
        reply = stream(run, prompt, **forced("ok\n", **settings), memory=memory)
        assert "".join(reply).rstrip("\n") == "ok"
        # the prompt (in the first turn with the BOS token), then the first two of the three generated tokens
        assert recorded.lengths[num_calls:] == [len(prompt) + (turn == 0), 1, 1]
        memory = reply.memory()
        if previous_memory is not None:
            assert_same_tensors(previous_memory, before)
        conversation += prompt.encode() + b"ok\n"
        assert_same_memory(memory, full_pass(recorded.recorded, list(conversation), LIMITS)[1])


# Conversations


@pytest.mark.parametrize(
    ("settings", "end"),
    [({}, "\n"), ({"stop": ("e", "no such text")}, "e"), ({"stop": "no such text"}, "no such text")],
)
def test_chat_continues_the_memory_of_earlier_turns(run: Run, settings: dict[str, Any], end: str) -> None:
    """Before the next line, a reply that max_new_tokens truncated gets the newline or stop string that would have ended
    it; reply i is sampled with seed + i."""
    chat, memory, unread = Chat(run, max_new_tokens=40, seed=2, **settings), None, ""
    finish_reasons = []
    for turn, line in enumerate(["the cat", "a", "b"]):
        stream_settings = {"max_new_tokens": 40, "seed": 2 + turn, "stop": "\n", **settings}
        expected = stream(run, f"{unread}{line}\n", memory=memory, **stream_settings)
        assert list(chat.reply(line)) == list(expected)
        memory, unread = expected.memory(), end if expected.finish_reason == "length" else ""
        finish_reasons.append(expected.finish_reason)
    assert end != "no such text" or finish_reasons == ["length"] * 3


def test_chat_does_not_repeat_the_beginning_of_an_end(run: Run) -> None:
    """A reply that max_new_tokens cuts within its stop string gets only what it lacks of that."""
    cut = "".join(stream(run, "the cat\n", max_new_tokens=9, seed=2))
    chat = Chat(run, max_new_tokens=9, seed=2, stop=f"{cut[-2:]}#")
    first = stream(run, "the cat\n", max_new_tokens=9, seed=2)
    assert "".join(chat.reply("the cat")) == "".join(first) == cut
    expected = stream(run, "#a\n", memory=first.memory(), max_new_tokens=9, seed=3, stop=f"{cut[-2:]}#")
    assert list(chat.reply("a")) == list(expected)


def test_chat_with_stop_at_newline_equals_a_stop_string(run: Run) -> None:
    by_token, by_text = (Chat(run, max_new_tokens=100, **settings) for settings in ({"stop_at_newline": True}, {}))
    for line in ("the cat", "a"):
        assert "".join(by_token.reply(line)) == "".join(by_text.reply(line))


# Beams


def test_beam_search_decodes_its_hypotheses(run: Run) -> None:
    # a token that occurs in the best completion, so that it ends some hypotheses
    eos = beam_search(run, "the", num_beams=3, max_new_tokens=7)[0].token_ids[2]
    completions = beam_search(run, "the", num_beams=3, max_new_tokens=7, eos_token_ids=[eos])
    config = GenerationConfig(num_beams=3, max_new_tokens=7, eos_token_ids=(eos,))
    hypotheses = search_token_ids(run.inference(), [10, *b"the"], config, run.inference().initial_memory(1, LIMITS))
    assert any(hypothesis.is_finished for hypothesis in hypotheses)
    for completion, hypothesis in zip(completions, hypotheses, strict=True):
        visible = hypothesis.token_ids[:-1] if hypothesis.is_finished else hypothesis.token_ids
        assert completion.text == bytes(visible).decode(errors="replace")
        assert (completion.token_ids, completion.logprobs) == (hypothesis.token_ids, hypothesis.logprobs)
        assert (completion.seed, completion.finish_reason) == (None, "eos" if hypothesis.is_finished else "length")
    greedy = generate(run, "the", max_new_tokens=7, greedy=True)
    assert beam_search(run, "the", num_beams=1, max_new_tokens=7)[0].text == greedy.text
    # four beams by default
    assert len(beam_search(run, "the", max_new_tokens=3, length_penalty=0.5)) == 4
    with pytest.raises(UserError, match="leave out seed"):
        beam_search(run, "a", seed=3)


# Other tokenizers


@pytest.fixture
def bpe_with_newlines() -> BPETokenizer:
    """Return a tokenizer like those since GPT-4: punctuation and the newline after it are one token."""
    # byte-level BPE writes each byte as a printable character, the newline as U+010A
    alphabet, newline = sorted(pre_tokenizers.ByteLevel.alphabet()), "\u010a"
    vocab = {token: number for number, token in enumerate([*alphabet, ");", f");{newline}"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(")", ";"), (");", newline)]))
    split = pre_tokenizers.Split(Regex(r"\p{L}+| ?[^\s\p{L}]+\n*|\s+"), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    return BPETokenizer.from_json({"kind": "bpe", "tokenizer": json.loads(tokenizer.to_str())})


def test_text_that_shares_a_token_with_a_newline_is_kept(bpe_with_newlines: BPETokenizer, make_model) -> None:
    """Only the newline is omitted; also in a stream and with beams."""
    tokenizer = bpe_with_newlines
    run = Run(make_model(vocab_size=tokenizer.vocab_size), tokenizer, RunConfig())
    ids = tokenizer.encode("f(x);\n").tolist()
    assert tokenizer.decode(ids[-1:]) == ");\n"
    for stop, expected in (("y", ("f(x);", "eos")), (");", ("f(x", "stop"))):
        settings: dict[str, Any] = {"max_new_tokens": 9, "stop_at_newline": True, "stop": stop}
        completion = generate(run, "a", logits_processor=ForcedTokens(ids), **settings)
        assert (completion.text, completion.finish_reason) == expected
        assert "".join(stream(run, "a", logits_processor=ForcedTokens(ids), **settings)) == expected[0]

    def force(token_ids_BT: torch.Tensor, logits_BV: torch.Tensor) -> torch.Tensor:
        return logits_BV.index_fill(-1, torch.tensor(ids[min(token_ids_BT.shape[1], len(ids) - 1)]), 1e4)

    settings = {"num_beams": 1, "max_new_tokens": 9, "stop_at_newline": True}
    assert beam_search(run, "a", logits_processor=force, **settings)[0].text == "f(x);"


def test_word_tokenizer_without_unknown_and_newline_tokens(make_model) -> None:
    tokenizer = WordTokenizer(("the", "cat", "sat"), pre_tokenizer=PreTokenizer())
    run = Run(make_model(vocab_size=tokenizer.vocab_size), tokenizer, RunConfig())
    with pytest.raises(UserError, match="'dog'"):
        generate(run, "the dog sat")
    with pytest.raises(UserError, match=r"no token that ends a line.*stop"):
        generate(run, "the", stop_at_newline=True)
    assert generate(run, "the cat", max_new_tokens=2, logits_processor=ForcedTokens([2, 0])).text == " sat the"
    streamed = stream(run, "the", max_new_tokens=1)
    list(streamed)
    with pytest.raises(UserError, match="no token in this vocabulary"):
        stream(run, "  ", memory=streamed.memory())
    with pytest.raises(UserError, match="memory_length 5 and a memory of 128 slots were both given; leave memory_l"):
        stream(run, "the", memory=streamed.memory(), memory_length=5)


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": "\ud800"}, "UTF-8"),  # half of a surrogate pair, which UTF-8 cannot encode
        ({"eos_token_ids": [256]}, "eos token id 256"),
        ({"tokens": 3}, "no argument 'tokens'"),
    ],
)
def test_invalid_arguments_are_refused_before_generation(run: Run, arguments: dict[str, Any], message: str) -> None:
    """A stream raises when it is made, not when it is iterated."""
    settings = {name: value for name, value in arguments.items() if name != "prompt"}
    prompt = arguments.get("prompt", "a")
    for call in (stream, generate, beam_search):
        with pytest.raises(UserError, match=message):
            call(run, prompt, **settings)


@pytest.mark.parametrize(
    ("eos_token_ids", "expected"), [((), (10, "length")), ((END,), (4, "eos")), (None, (4, "eos"))]
)
def test_document_end_ends_a_text_unless_eos_token_ids_are_given(
    make_model, eos_token_ids: tuple[int, ...] | None, expected: tuple[int, str]
) -> None:
    tokenizer = BPETokenizer.from_json({"tokenizer": byte_level(), "document_end_token": "<|endoftext|>"})
    run = Run(make_model(vocab_size=tokenizer.vocab_size), tokenizer, RunConfig())
    settings: dict[str, Any] = {} if eos_token_ids is None else {"eos_token_ids": eos_token_ids}
    config, by_name = GenerationConfig(max_new_tokens=10, **settings), {"max_new_tokens": 10, **settings}
    for given in ({"config": config}, by_name):
        for prompt in ("hello", ["hello"]):
            forced = ForcedTokens([65, 65, 65, END, *[66] * 6])
            completion = generate(run, prompt, logits_processor=forced, **given)
            completion = completion[0] if isinstance(completion, list) else completion
            assert (len(completion.token_ids), completion.finish_reason) == expected
        streamed = stream(run, "hello", logits_processor=ForcedTokens([65, 65, 65, END, *[66] * 6]), **given)
        list(streamed)
        assert (streamed.num_tokens, streamed.finish_reason) == expected


def test_settings_of_another_function_are_refused(run: Run) -> None:
    memory = run.inference().initial_memory(1)
    for call, arguments, message in (
        (generate, {"prompts": ["a"], "max_new_tokens": None}, "max_new_tokens.*stream"),
        (generate, {"prompts": "a", "num_samples": 2}, "list"),
        (generate, {"prompts": "a", "num_beams": 2}, "beam_search"),
        (generate, {"prompts": []}, "no prompt was given"),
        (generate, {"memory": memory}, "without a prompt"),
        (stream, {"memory": memory}, "without a prompt"),
        (stream, {"num_samples": 2}, "num_samples"),
        (stream, {"num_beams": 2}, "num_beams"),
        (beam_search, {"num_beams": None}, "needs num_beams; give a number"),
        (beam_search, {"config": GenerationConfig(num_beams=None)}, "needs num_beams; give a number"),
    ):
        with pytest.raises(UserError, match=message):
            call(run, **arguments)
