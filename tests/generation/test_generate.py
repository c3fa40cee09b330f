"""Text in, text out: finished completions side by side, streams, beams, and conversations that remember."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest
import torch
from forced_tokens import Scripted, Watched, assert_same_memory, full_pass
from tensors import assert_same_tensors, copied_tensors
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from transformer_xl.config import EvaluationConfig, RunConfig, TrainConfig, UserError
from transformer_xl.generation.batch import BatchGenerator
from transformer_xl.generation.beam_search import beam_search, search_token_ids
from transformer_xl.generation.chat import Chat
from transformer_xl.generation.config import GenerationConfig
from transformer_xl.generation.generate import generate, stream
from transformer_xl.model.memory import ContextLimits, Memory
from transformer_xl.run_folder import Run
from transformer_xl.text.tokenizers import ByteTokenizer
from transformer_xl.text.tokenizers.bpe import BPETokenizer
from transformer_xl.text.tokenizers.pre_tokenizer import PreTokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer

LIMITS = ContextLimits(13, 7, 5)  # the evaluation lengths of the run below


@pytest.fixture
def run(make_model) -> Run:
    config = RunConfig(
        train=TrainConfig(memory_length=11),
        evaluation=EvaluationConfig(memory_length=13, attention_window=7, clamp_length=5),
    )
    return Run(make_model(vocab_size=256, memory_length=11), ByteTokenizer(), config)


def forced(text: str | bytes, **settings: Any) -> dict[str, Any]:
    """Arguments that make the model generate this text."""
    script = text.encode() if isinstance(text, str) else text
    return {"max_new_tokens": len(script), "logits_processor": Scripted(script), **settings}


def test_the_text_is_that_of_the_tokens(run: Run) -> None:
    """After the start token and the prompt, with the run's evaluation lengths and top-k 40."""

    def by_hand(context_limits: ContextLimits, prompt: bytes) -> str:
        memory = run.model.inference_memory(1, context_limits)
        generator = BatchGenerator(run.model, [prompt], GenerationConfig(top_k=40, seed=3), memory=memory)
        return bytes(generator.step()[0].token_id for _ in range(29)).decode(errors="replace")

    for prompt, encoded in (("caf\u00e9", b"caf\xc3\xa9"), (b"\xff\x00", b"\xff\x00"), (None, b"")):
        found = generate(run, prompt, max_new_tokens=29, seed=3)
        assert (found.text, found.prompt, found.seed) == (by_hand(LIMITS, b"\n" + encoded), prompt, 3)
        found = generate(run, prompt, max_new_tokens=29, seed=3, memory_length=2)
        assert found.text == by_hand(ContextLimits(2, 7, 5), b"\n" + encoded)
    found = generate(run, "abcdefghijklmnop", max_new_tokens=29, seed=3, max_prompt_tokens=4)
    assert found.text == by_hand(LIMITS, b"mnop")


def test_a_run_trained_without_memory_generates_from_a_segment(make_model) -> None:
    """As it was trained, and not each token from the one before alone; also where memory_length 0 is asked for."""
    config = RunConfig(train=TrainConfig(memory_length=0, segment_length=20))
    run = Run(make_model(vocab_size=256, memory_length=0), ByteTokenizer(), config)
    found = b"\nthe"
    while len(found) < 20:
        found += bytes([int(full_pass(run.model, list(found), ContextLimits(0))[0][-1].argmax())])
    for memory_length in (None, 0):
        completion = generate(run, "the", max_new_tokens=16, greedy=True, memory_length=memory_length)
        assert bytes(completion.token_ids) == found[4:]


def test_the_seed_decides(run: Run) -> None:
    random_state = torch.get_rng_state()
    first, again, other, default = (
        generate(run, "a", max_new_tokens=29, **settings).text
        for settings in ({"seed": 0}, {"seed": 0}, {"seed": 1}, {})
    )
    assert first == again == default != other
    assert torch.equal(torch.get_rng_state(), random_state)


def test_settings_by_name_replace_those_of_the_config(run: Run) -> None:
    config = GenerationConfig(max_new_tokens=7, seed=3, stop="x")
    assert generate(run, "a", config, seed=4) == generate(run, "a", max_new_tokens=7, seed=4, stop="x")
    with pytest.raises(UserError, match=r"'max_tokens'.*max_new_tokens"):
        generate(run, "a", config, max_tokens=3)


# Side by side.


def test_texts_side_by_side_are_each_alone(run: Run) -> None:
    """Unequal prompts with several samples; text i is that of seed + i, generated or streamed alone."""
    prompts: list[str | bytes | None] = ["the cat", None, b"\xffabcdefghijklmnopqrst", "a"]
    config = GenerationConfig(max_new_tokens=19, stop="e", eos_token_ids=(5,), logprobs=True)
    found = generate(run, prompts, config, num_samples=2, seed=7)
    assert [one.prompt for one in found] == [prompt for prompt in prompts for _ in range(2)]
    for index, one in enumerate(found):
        alone = generate(run, prompts[index // 2], config, seed=7 + index)
        assert (one.text, one.token_ids, one.finish_reason, one.seed) == (
            alone.text, alone.token_ids, alone.finish_reason, alone.seed,
        )  # fmt: skip
        assert one.logprobs == pytest.approx(alone.logprobs, abs=1e-10)
        assert one.logprob == pytest.approx(sum(alone.logprobs))
        streamed = stream(run, prompts[index // 2], config, seed=7 + index)
        assert "".join(streamed) == alone.text
        assert (streamed.token_ids, streamed.logprobs, streamed.finish_reason, streamed.num_tokens) == (
            alone.token_ids, alone.logprobs, alone.finish_reason, len(alone.token_ids),
        )  # fmt: skip
    assert generate(run, "a", max_new_tokens=3).logprob is None


def test_each_text_ends_by_itself(run: Run) -> None:
    """One by a stop string, one by its length, one by a token: the others are not affected."""
    texts = {0: b"ab.cd", 1: b"abcde", 2: b"ab!cd"}

    def force(token_ids_BT: torch.Tensor, logits_BV: torch.Tensor) -> torch.Tensor:
        step = token_ids_BT.shape[1]
        active = [index for index in texts if step < 3 or index == 1]
        assert [bytes(row) for row in token_ids_BT.tolist()] == [texts[index][:step] for index in active]
        return logits_BV.scatter(-1, torch.tensor([[texts[index][step]] for index in active]), 1e9)

    found = generate(
        run, ["x", "yy", "z"], max_new_tokens=5, stop=".", eos_token_ids=[ord("!")], logits_processor=force
    )
    assert [(one.text, one.finish_reason) for one in found] == [("ab", "stop"), ("abcde", "length"), ("ab", "eos")]
    assert found[0].token_ids == tuple(b"ab.")


def test_min_new_tokens_and_stop_strings(run: Run) -> None:
    for text, least, wanted in (("a.b.c.d", 4, "a.b"), ("a.b.c.d", 5, "a.b.c"), ("a.b", 3, "a.b")):
        assert generate(run, "x", **forced(text, stop=".", min_new_tokens=least)).text == wanted


def test_memories_of_several_prompts(run: Run) -> None:
    streams = [stream(run, prompt, max_new_tokens=4, seed=3) for prompt in ("ab", "cdefg")]
    memory = Memory.concatenate([one.memory() for one in streams if list(one)])
    found = generate(run, ["x", "yz"], max_new_tokens=7, memory=memory, seed=1)
    for row, prompt in enumerate(("x", "yz")):
        alone = generate(run, prompt, max_new_tokens=7, memory=memory.select([row]), seed=1 + row)
        assert found[row].text == alone.text
        assert alone.text != generate(run, prompt, max_new_tokens=7, seed=1 + row).text
    with pytest.raises(UserError, match=r"memory of .*2 .* 3"):
        generate(run, ["x", "y", "z"], memory=memory)


def test_dtype(run: Run) -> None:
    """Side by side, in a stream and its memory, and by beams."""
    run.model.float()
    settings: dict[str, Any] = {"max_new_tokens": 5, "logprobs": True, "greedy": True}
    exact, rounded = (generate(run, "a", dtype=dtype, **settings) for dtype in ("float32", "bfloat16"))
    assert exact.logprobs[0] != rounded.logprobs[0]
    assert exact.logprobs[0] == pytest.approx(rounded.logprobs[0], abs=0.5)
    streamed = stream(run, "a", dtype="bfloat16", **settings)
    assert "".join(streamed) == rounded.text
    assert streamed.logprobs == rounded.logprobs
    kept = {tensor.dtype for tensor in streamed.memory().tensors().values() if tensor.is_floating_point()}
    assert kept == {torch.bfloat16}
    assert beam_search(run, "a", num_beams=1, max_new_tokens=5, dtype="bfloat16")[0].token_ids == rounded.token_ids
    assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")


# A stream.


def test_text_appears_as_it_is_generated(run: Run) -> None:
    """One, two, three and four bytes long; each character as soon as its last byte is known."""
    arguments = forced("a\u00e9b\u20ac\U0001f600")
    streamed, left = stream(run, "a", **arguments), [10, 8, 7, 4, 0]
    found = [(next(streamed), len(arguments["logits_processor"].script)) for _ in left]
    assert found == list(zip("a\u00e9b\u20ac\U0001f600", left, strict=True))
    assert list(streamed) == []


def test_without_a_limit_nothing_is_kept(run: Run) -> None:
    endless = stream(run, "a", max_new_tokens=None, logprobs=True)
    assert len(list(islice(endless, 50))) == 50
    assert endless.num_tokens >= 50
    assert (endless.token_ids, endless.logprobs, endless.finish_reason) == ((), (), None)


@pytest.mark.parametrize("ending", [{}, {"stop": "\n"}, {"eos_token_ids": [10]}])
def test_memory_continues_without_reading_again(run: Run, ending: dict[str, Any]) -> None:
    """Each turn reads its own prompt alone, and continues as after all that was said; the memory given stays."""
    watched = Watched(run.model)
    run = Run(watched, run.tokenizer, run.config)
    memory: Memory | None = None
    said = b"\n"
    for turn in range(3):
        prompt = f"line {turn}\n"
        before = None if memory is None else copied_tensors(memory)
        given, calls = memory, len(watched.lengths)
        reply = stream(run, prompt, **forced("ok\n", **ending), memory=memory)
        assert "".join(reply).rstrip("\n") == "ok"
        assert watched.lengths[calls:] == [len(prompt) + (turn == 0), 1, 1]
        memory = reply.memory()
        if given is not None:
            assert_same_tensors(given, before)
        said += prompt.encode() + b"ok\n"
        with torch.inference_mode():
            _, wanted = watched.model(torch.tensor([list(said)]), watched.model.inference_memory(1, LIMITS))
        assert_same_memory(memory, wanted)


# A conversation.


@pytest.mark.parametrize(
    ("settings", "end"),
    [({}, "\n"), ({"stop": ("e", "no such text")}, "e"), ({"stop": "no such text"}, "no such text")],
)
def test_a_chat_remembers(run: Run, settings: dict[str, Any], end: str) -> None:
    """A reply that was cut off gets the end it did not reach; reply i is sampled with seed + i."""
    chat, memory, unread = Chat(run, max_new_tokens=40, seed=2, **settings), None, ""
    reasons = []
    for turn, line in enumerate(["the cat", "a", "b"]):
        wanted = stream(
            run, f"{unread}{line}\n", max_new_tokens=40, seed=2 + turn, memory=memory, **{"stop": "\n", **settings}
        )
        assert list(chat.reply(line)) == list(wanted)
        memory, unread = wanted.memory(), end if wanted.finish_reason == "length" else ""
        reasons.append(wanted.finish_reason)
    assert end != "no such text" or reasons == ["length"] * 3


def test_a_chat_ends_replies_with_the_token_of_a_newline(run: Run) -> None:
    """As far as the text goes, this is the same as stopping before the newline."""
    by_token, by_text = Chat(run, stop_at_newline=True), Chat(run)
    for line in ("the cat", "a"):
        assert "".join(by_token.reply(line)) == "".join(by_text.reply(line))


# Beams.


def test_beam_search_gives_the_text_of_its_hypotheses(run: Run) -> None:
    eos = beam_search(run, "the", num_beams=3, max_new_tokens=7)[0].token_ids[2]
    found = beam_search(run, "the", num_beams=3, max_new_tokens=7, eos_token_ids=[eos])
    config = GenerationConfig(num_beams=3, max_new_tokens=7, eos_token_ids=(eos,))
    memory = run.model.inference_memory(1, LIMITS)
    wanted = search_token_ids(run.model, [10, *b"the"], config, memory)
    assert any(one.is_finished for one in wanted)
    for one, other in zip(found, wanted, strict=True):
        shown = other.token_ids[:-1] if other.is_finished else other.token_ids
        assert one.text == bytes(shown).decode(errors="replace")
        assert (one.token_ids, one.logprobs, one.seed) == (other.token_ids, other.logprobs, None)
        assert one.finish_reason == ("eos" if other.is_finished else "length")
    greedy = generate(run, "the", max_new_tokens=7, greedy=True)
    assert beam_search(run, "the", num_beams=1, max_new_tokens=7)[0].text == greedy.text
    assert len(beam_search(run, "the", max_new_tokens=3, length_penalty=0.5)) == 4
    with pytest.raises(UserError, match="leave out seed"):
        beam_search(run, "a", seed=3)


# Tokens of other kinds.


@pytest.fixture
def bpe_with_newlines() -> BPETokenizer:
    """As tokenizers since GPT-4 are: punctuation and the newline after it are one token."""
    alphabet, newline = sorted(pre_tokenizers.ByteLevel.alphabet()), "\u010a"
    vocab = {token: number for number, token in enumerate([*alphabet, ");", f");{newline}"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(")", ";"), (");", newline)]))
    split = pre_tokenizers.Split(Regex(r"\p{L}+| ?[^\s\p{L}]+\n*|\s+"), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    return BPETokenizer.from_json({"kind": "bpe", "tokenizer": json.loads(tokenizer.to_str())})


def test_text_that_shares_a_token_with_the_newline_is_shown(bpe_with_newlines: BPETokenizer, make_model) -> None:
    """The newline is not; the same in a stream, by beams, and where another token is eos."""
    tokenizer = bpe_with_newlines
    run = Run(make_model(vocab_size=tokenizer.vocab_size), tokenizer, RunConfig())
    ids = tokenizer.encode("f(x);\n").tolist()
    assert tokenizer.decode(ids[-1:]) == ");\n"
    for stop, wanted in (("y", ("f(x);", "eos")), (");", ("f(x", "stop"))):
        settings: dict[str, Any] = {"max_new_tokens": 9, "stop_at_newline": True, "stop": stop}
        found = generate(run, "a", logits_processor=Scripted(ids), **settings)
        assert (found.text, found.finish_reason) == wanted
        assert "".join(stream(run, "a", logits_processor=Scripted(ids), **settings)) == wanted[0]

    def force(token_ids_BT: torch.Tensor, logits_BV: torch.Tensor) -> torch.Tensor:
        return logits_BV.index_fill(-1, torch.tensor(ids[min(token_ids_BT.shape[1], len(ids) - 1)]), 1e4)

    found = beam_search(run, "a", num_beams=1, max_new_tokens=9, stop_at_newline=True, logits_processor=force)
    assert found[0].text == "f(x);"
    found = generate(run, "a", max_new_tokens=9, eos_token_ids=ids[:1], logits_processor=Scripted([ids[1], ids[0]]))
    assert found.text == "("


def test_words(make_model) -> None:
    tokenizer = WordTokenizer(("the", "cat", "sat"), None, None, None, PreTokenizer())
    run = Run(make_model(vocab_size=tokenizer.vocab_size), tokenizer, RunConfig())
    with pytest.raises(UserError, match="'dog'"):
        generate(run, "the dog sat")
    with pytest.raises(UserError, match=r"no token that ends a line.*stop"):
        generate(run, "the", stop_at_newline=True)
    assert generate(run, "the cat", max_new_tokens=2, logits_processor=Scripted([2, 0])).text == " sat the"
    streamed = stream(run, "the", max_new_tokens=1)
    list(streamed)
    with pytest.raises(UserError, match="no token in this vocabulary"):
        stream(run, "  ", memory=streamed.memory())


# What is refused.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": b""}, "prompt is empty"),
        ({"prompt": "\ud800"}, "UTF-8"),
        ({"memory_length": -1}, "memory_length"),
        ({"eos_token_ids": [256]}, "eos token id 256"),
        ({"tokens": 3}, "unknown setting 'tokens'"),
    ],
)
def test_wrong_arguments_are_refused_at_once(run: Run, arguments: dict[str, Any], message: str) -> None:
    """When asked, not when the first text is wanted from a stream."""
    settings = {name: value for name, value in arguments.items() if name != "prompt"}
    prompt = arguments.get("prompt", "a")
    for call in (stream, generate, beam_search):
        with pytest.raises(UserError, match=message):
            call(run, prompt, **settings)


def test_what_does_not_fit_the_function_is_refused(run: Run) -> None:
    memory = run.model.inference_memory(1)
    for call, arguments, message in (
        (generate, {"prompts": ["a"], "max_new_tokens": None}, "max_new_tokens.*stream"),
        (generate, {"prompts": "a", "num_samples": 2}, "list"),
        (generate, {"prompts": "a", "num_beams": 2}, "beam_search"),
        (generate, {"prompts": []}, "no prompt was given"),
        (generate, {"memory": memory}, "without a prompt"),
        (stream, {"memory": memory}, "without a prompt"),
        (stream, {"num_samples": 2}, "num_samples"),
        (stream, {"num_beams": 2}, "num_beams"),
    ):
        with pytest.raises(UserError, match=message):
            call(run, **arguments)
