"""Text in, text out: streams, many texts side by side, beams, and conversations that remember."""

from __future__ import annotations

import json
from dataclasses import fields
from itertools import islice
from typing import Any

import pytest
import torch
from scripted import Scripted, Watched, assert_same_memory, whole
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from transformer_xl.config import EvaluationConfig, RunConfig, TrainConfig, UserError
from transformer_xl.generation.beams import Beams, beam_search
from transformer_xl.generation.decoding import Completion, Options, Request, complete, generate, search
from transformer_xl.generation.sampling import THE_PAPERS, Sampler
from transformer_xl.generation.writer import BatchGenerator
from transformer_xl.model.memory import ContextLimits, Memory
from transformer_xl.run_folder import Run
from transformer_xl.text.tokenizer import ByteTokenizer
from transformer_xl.text.tokenizers.bpe import BPETokenizer
from transformer_xl.text.tokenizers.words import WordSplitting, WordTokenizer


@pytest.fixture
def run(make_model) -> Run:
    config = RunConfig(
        train=TrainConfig(memory_length=11),
        evaluation=EvaluationConfig(memory_length=13, attention_window=7, clamp_length=5),
    )
    return Run(make_model(vocab_size=256, memory_length=11), ByteTokenizer(), config)


def text_of(run: Run, prompt: str | bytes | None = "a", **options: Any) -> str:
    return "".join(generate(run, prompt, **options))


def told(script: str | bytes, **options: Any) -> dict[str, Any]:
    """Options that make the model say this."""
    said = script.encode() if isinstance(script, str) else script
    return {"tokens": len(said), "sampler": Scripted(list(said)), **options}


def test_generated_text_is_that_of_its_tokens(run: Run) -> None:
    """After the start token and the prompt, with the run's evaluation lengths and the paper's sampler."""

    def by_hand(context_limits: ContextLimits, prompt: bytes) -> str:
        memory = run.model.inference_memory(1, context_limits)
        writer = BatchGenerator(run.model, [[10, *prompt]], Sampler(top_k=40), seed=3, memory=memory)
        return bytes(writer.step()[0].token for _ in range(29)).decode(errors="replace")

    for prompt, as_bytes in (("caf\u00e9", b"caf\xc3\xa9"), (b"\xff\x00", b"\xff\x00"), (None, b"")):
        assert text_of(run, prompt, tokens=29, seed=3) == by_hand(ContextLimits(13, 7, 5), as_bytes)
        assert text_of(run, prompt, tokens=29, seed=3, memory=2) == by_hand(ContextLimits(2, 7, 5), as_bytes)
    assert Sampler(top_k=40) == THE_PAPERS


def test_a_run_trained_without_memory_writes_from_a_segment(make_model) -> None:
    """As it was trained, and not each token from the one before alone; also where memory 0 is asked for."""
    config = RunConfig(train=TrainConfig(memory_length=0, segment_length=20))
    run = Run(make_model(vocab_size=256, memory_length=0), ByteTokenizer(), config)
    found = b"\nthe"
    while len(found) < 20:
        found += bytes([int(whole(run.model, list(found), ContextLimits(0))[0][-1].argmax())])
    for memory in (None, 0):
        (text,) = complete(run, ["the"], tokens=16, sampler=Sampler(0), memory=memory)
        assert bytes(text.tokens) == found[4:]


def test_a_seed_gives_the_same_text_and_another_gives_another(run: Run) -> None:
    random_state = torch.get_rng_state()
    first, again, other, zero = (text_of(run, tokens=29, seed=seed) for seed in (1, 1, 2, 0))
    assert first == again
    assert first != other
    assert zero == text_of(run, tokens=29)
    assert torch.equal(torch.get_rng_state(), random_state)


def test_only_the_end_of_the_prompt_is_read_if_so_wanted(run: Run) -> None:
    prompt = "abcdefghijklmnop"
    writer = BatchGenerator(
        run.model, [list(b"mnop")], THE_PAPERS, memory=run.model.inference_memory(1, ContextLimits(13, 7, 5))
    )
    wanted = bytes(writer.step()[0].token for _ in range(9)).decode(errors="replace")
    assert text_of(run, prompt, tokens=9, context=4) == wanted
    assert text_of(run, prompt, tokens=9, context=17) == text_of(run, prompt, tokens=9)


# A stream.


def test_text_appears_as_it_is_made(run: Run) -> None:
    """One, two, three and four bytes long; each character as soon as its last byte is there."""
    options = told("a\u00e9b\u20ac\U0001f600")
    sampler, pieces = options["sampler"], generate(run, "a", **options)
    left = [10, 8, 7, 4, 0]
    assert [(next(pieces), len(sampler.script)) for _ in left] == list(
        zip("a\u00e9b\u20ac\U0001f600", left, strict=True)
    )
    assert pieces.ended == "tokens"
    assert list(pieces) == []


def test_bytes_that_are_no_text_become_signs(run: Run) -> None:
    """A character that never ends, one cut off at the end."""
    assert text_of(run, **told(b"\xc3\x41\xe2\x82")) == "\ufffdA\ufffd"


def test_a_character_begun_in_the_prompt_is_finished(run: Run) -> None:
    assert text_of(run, b"a\xc3", **told(b"\xa9A")) == "\u00e9A"


def test_just_so_many_tokens(run: Run) -> None:
    sampler = Scripted([65] * 99)
    assert text_of(run, tokens=7, sampler=sampler) == "A" * 7
    assert len(sampler.script) == 92


def test_without_end_nothing_is_kept(run: Run) -> None:
    endless = generate(run, "a", tokens=None, logprobs=True)
    assert len(list(islice(endless, 50))) == 50
    assert endless.num_tokens >= 50
    assert (endless.tokens, endless.logprobs, endless.ended) == ((), (), None)


def test_a_stop_string_ends_the_text(run: Run) -> None:
    """It is not shown, and nothing is made after it."""
    options = told("abc\u00e9def", stop="c\u00e9")
    writing = generate(run, "x", **options)
    assert "".join(writing) == "ab"
    assert (writing.ended, writing.tokens) == ("stop", tuple("abc\u00e9".encode()))
    assert len(options["sampler"].script) == 3
    assert text_of(run, **told("abcd", stop=["x", "d", "c"])) == "ab"
    assert text_of(run, **told("abcd", stop="d")) == "abc"
    assert text_of(run, **told("abcd", stop="de")) == "abcd"


def test_a_stop_string_in_the_rest_of_the_last_character(run: Run) -> None:
    writing = generate(run, "a", **told(b"ab\xe2", stop="\ufffd"))
    assert ("".join(writing), writing.ended) == ("ab", "stop")


def test_an_end_token_is_not_shown(run: Run) -> None:
    writing = generate(run, "x", **told("abcd", end_ids=[ord("c"), ord("z")]))
    assert ("".join(writing), writing.ended, writing.tokens) == ("ab", "end", (97, 98, 99))


@pytest.fixture
def signs_with_line_ends() -> BPETokenizer:
    """As tokenizers since GPT-4 are: signs and the line end after them are one token."""
    alphabet, line_end = sorted(pre_tokenizers.ByteLevel.alphabet()), "\u010a"
    tokenizer = {token: number for number, token in enumerate([*alphabet, ");", f");{line_end}"])}
    tokenizer = Tokenizer(models.BPE(vocab=tokenizer, merges=[(")", ";"), (");", line_end)]))
    split = pre_tokenizers.Split(Regex(r"\p{L}+| ?[^\s\p{L}]+\n*|\s+"), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    return BPETokenizer.from_json({"kind": "bpe", "tokenizer": json.loads(tokenizer.to_str())})


def test_signs_that_share_a_token_with_the_line_end_are_shown(signs_with_line_ends: BPETokenizer, make_model) -> None:
    """The line end is not; the same side by side, by beams, and where another token was named as an end."""
    tokenizer = signs_with_line_ends
    run = Run(make_model(vocab_size=tokenizer.vocab_size), tokenizer, RunConfig())
    ids = tokenizer.encode("f(x);\n").tolist()
    assert tokenizer.decode(ids[-1:]) == ");\n"
    ends: Options = {"tokens": 9, "end_ids": tokenizer.is_newline_V.nonzero()[0].tolist()}
    for stop, wanted in (("y", ("f(x);", "end")), (");", ("f(x", "stop"))):
        writing = generate(run, "a", sampler=Scripted(list(ids)), stop=stop, **ends)
        assert ("".join(writing), writing.ended) == wanted
        (found,) = complete(run, ["a"], sampler=Scripted(list(ids)), stop=stop, **ends)
        assert (found.text, found.ended) == wanted

    def says(made_BT: torch.Tensor, logits_BV: torch.Tensor) -> torch.Tensor:
        return logits_BV.index_fill(-1, torch.tensor(ids[min(made_BT.shape[1], len(ids) - 1)]), 1e4)

    assert search(run, "a", beams=1, adjust=says, **ends)[0].text == "f(x);"
    hidden: Options = {"tokens": 9, "end_ids": ids[:1]}
    assert "".join(generate(run, "a", sampler=Scripted([ids[1], ids[0]]), **hidden)) == "("


def test_before_so_many_tokens_no_stop_string_ends_it(run: Run) -> None:
    assert text_of(run, **told("a.b.c.d", stop=".", min_tokens=4)) == "a.b"
    assert text_of(run, **told("a.b.c.d", stop=".", min_tokens=5)) == "a.b.c"
    assert text_of(run, **told("a.b", stop=".", min_tokens=3)) == "a.b"


def test_tokens_and_log_probabilities_of_a_stream(run: Run) -> None:
    writing = generate(run, "x", tokens=9, seed=4, logprobs=True)
    list(writing)
    (whole,) = complete(run, ["x"], tokens=9, seed=4, logprobs=True)
    assert (writing.tokens, writing.logprobs) == (whole.tokens, whole.logprobs)
    assert len(whole.logprobs) == 9
    assert whole.logprob == pytest.approx(sum(whole.logprobs))
    assert complete(run, ["x"], tokens=9, seed=4)[0].logprob is None


# A conversation.


@pytest.mark.parametrize("ending", [{}, {"stop": "\n"}, {"end_ids": [10]}])
def test_a_conversation_remembers_without_reading_again(run: Run, ending: dict[str, Any]) -> None:
    """Each turn reads its own prompt alone, and goes on as after all that was said; the memory handed in stays."""
    watched = Watched(run.model)
    run = Run(watched, run.tokenizer, run.config)
    memory: Any = None
    said = b"\n"
    for turn in range(3):
        prompt = f"line {turn}\n"
        before = {} if memory is None else {name: tensor.clone() for name, tensor in memory.tensors().items()}
        given, already = memory, len(watched.lengths)
        writing = generate(run, prompt, **told("ok\n", **ending), memory=memory)
        assert "".join(writing).rstrip("\n") == "ok"
        assert watched.lengths[already:] == [len(prompt) + (turn == 0), 1, 1]
        memory = writing.memory()
        assert all(torch.equal(tensor, before[name]) for name, tensor in given.tensors().items()) if given else True
        said += prompt.encode() + b"ok\n"
        with torch.inference_mode():
            _, wanted = watched.model(
                torch.tensor([list(said)]), watched.model.inference_memory(1, ContextLimits(13, 7, 5))
            )
        assert_same_memory(memory, wanted)


def test_a_memory_changes_what_is_said(run: Run) -> None:
    writing = generate(run, "abc", tokens=5)
    list(writing)
    assert text_of(run, "x", tokens=9, memory=writing.memory()) != text_of(run, "x", tokens=9)


def test_the_number_format_is_that_wanted(run: Run) -> None:
    """In a stream, side by side, and by beams; a conversation goes on in it."""
    run.model.float()
    options: Options = {"tokens": 5, "logprobs": True, "end_ids": [], "sampler": Sampler(0)}
    exact, rounded = (complete(run, ["a"], precision=precision, **options)[0] for precision in ("float32", "bfloat16"))
    assert exact.logprobs[0] != rounded.logprobs[0]
    assert exact.logprobs[0] == pytest.approx(rounded.logprobs[0], abs=0.5)
    stream = generate(run, "a", precision="bfloat16", **options)
    list(stream)
    assert stream.logprobs == rounded.logprobs
    kept = {tensor.dtype for tensor in stream.memory().tensors().values() if tensor.is_floating_point()}
    assert kept == {torch.bfloat16}
    best = search(run, "a", beams=1, tokens=5, precision="bfloat16")[0]
    assert best.tokens == rounded.tokens
    assert not torch.is_autocast_enabled("cpu")


# Many at once.


def test_texts_side_by_side_are_each_alone(run: Run) -> None:
    """Of unequal prompts, several samples; text r is that of seed + r."""
    prompts: list[str | bytes | None] = ["the cat", None, b"\xffabcdefghijklmnopqrst", "a"]
    found = complete(run, prompts, samples=2, tokens=19, seed=7, stop="e", end_ids=[5], logprobs=True)
    assert len(found) == 8
    for row, one in enumerate(found):
        options: Options = {"tokens": 19, "seed": 7 + row, "stop": "e", "end_ids": [5], "logprobs": True}
        alone = generate(run, prompts[row // 2], **options)
        assert one.text == "".join(alone)
        assert (one.tokens, one.ended) == (alone.tokens, alone.ended)
        assert one.logprobs == pytest.approx(alone.logprobs, abs=1e-10)


def test_each_text_ends_by_itself(run: Run) -> None:
    """One by a stop string, one by a token, one by its length: the others are not touched."""
    made = {0: b"ab.cd", 1: b"abcde", 2: b"ab!cd"}

    def script(made_BT: torch.Tensor, logits_BV: torch.Tensor) -> torch.Tensor:
        alike = [row for row in made if bytes(made[row][: made_BT.shape[1]]) in map(bytes, made_BT.tolist())]
        rows = [row for row in alike if made_BT.shape[1] < 3 or row == 1]
        assert len(rows) == len(made_BT)
        wanted_B1 = torch.tensor([[made[row][made_BT.shape[1]]] for row in rows])
        return logits_BV.scatter(-1, wanted_B1, 1e9)

    found = complete(run, ["x", "yy", "z"], tokens=5, stop=".", end_ids=[ord("!")], adjust=script)
    assert [(one.text, one.ended) for one in found] == [("ab", "stop"), ("abcde", "tokens"), ("ab", "end")]


def test_memory_of_several_rows(run: Run) -> None:
    writings = [generate(run, prompt, tokens=4, seed=3) for prompt in ("ab", "cdefg")]
    for writing in writings:
        list(writing)
    memory = Memory.concatenate([writing.memory() for writing in writings])
    found = complete(run, ["x", "yz"], tokens=7, memory=memory, seed=1)
    for row, prompt in enumerate(("x", "yz")):
        assert found[row].text == text_of(run, prompt, tokens=7, memory=memory.select([row]), seed=1 + row)
    with pytest.raises(UserError, match="memory of 2 rows beside 3 rows of input"):
        complete(run, ["x", "y", "z"], memory=memory)


# Beams.


def test_the_likeliest_texts(run: Run) -> None:
    end = search(run, "the", beams=3, tokens=7)[0].tokens[2]
    found = search(run, "the", beams=3, tokens=7, end_ids=[end])
    memory = run.model.inference_memory(1, ContextLimits(13, 7, 5))
    wanted = beam_search(run.model, [10, *b"the"], Beams(3, 7, end_ids=(end,)), memory)
    assert any(one.ended for one in wanted)
    assert [one.tokens for one in found] == [one.tokens for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        shown = other.tokens[:-1] if other.ended else other.tokens
        ended = "end" if other.ended else "tokens"
        assert one == Completion(bytes(shown).decode(errors="replace"), other.tokens, other.logprobs, ended)
    first = search(run, "the", beams=1, tokens=7)[0]
    assert first.text == text_of(run, "the", tokens=7, sampler=Sampler(0))


@pytest.mark.parametrize("odd", [{"sampler": Sampler(0)}, {"seed": 3}, {"stop": "x"}])
def test_beams_draw_nothing(run: Run, odd: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"nothing is drawn and no stop string read; leave out {next(iter(odd))}"):
        search(run, "a", **odd)


# Words.


def test_unknown_words_are_named(make_model) -> None:
    tokenizer = WordTokenizer(("<eos>", "the", "cat", "sat"), None, "<eos>", None, WordSplitting())
    run = Run(make_model(vocab_size=4), tokenizer, RunConfig())
    with pytest.raises(UserError, match="the word 'dog' is not one of the 4 of this vocabulary, which has none for"):
        generate(run, "the dog sat")
    assert text_of(run, "the cat", tokens=3, sampler=Scripted([3, 0, 1])) == " sat\nthe"
    assert text_of(run, "  ", tokens=1, sampler=Scripted([3])) == "sat"
    writing = generate(run, "the", tokens=1)
    list(writing)
    with pytest.raises(UserError, match="the prompt holds no token of this vocabulary; give some text"):
        generate(run, "  ", memory=writing.memory())


# What cannot be.

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "the prompt is empty; give some text, or no prompt at all to begin a new text"),
    ({"prompt": b""}, "the prompt is empty"),
    ({"prompt": "\ud800"}, r"the text holds '\\ud800' at place 0, which UTF-8 cannot write"),
    ({"tokens": 0}, "0 tokens wanted; give 1 or more"),
    ({"tokens": -5}, "-5 tokens wanted; give 1 or more"),
    ({"memory": -1}, "memory -1 is too small; give 0 or more"),
    ({"seed": -1}, r"seed -1: wanted 0 or more, below 2\*\*63"),
    ({"seed": 2**63}, r"seed 9223372036854775808: wanted 0 or more"),
    ({"context": 0}, "context 0: wanted 1 or more tokens"),
    ({"min_tokens": -1}, "min-tokens -1: wanted from 0 to the 500 tokens to be made"),
    ({"min_tokens": 6, "tokens": 5}, "min-tokens 6: wanted from 0 to the 5 tokens to be made"),
    ({"stop": ""}, "a stop string is empty; give some text, or leave it out"),
    ({"stop": ["a", ""]}, "a stop string is empty"),
    ({"end_ids": [256]}, "end id 256 is not one of the 256 the model knows"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_wrong_words_are_refused_at_once(run: Run, words: dict[str, Any], message: str) -> None:
    """When asked, not when the first piece is drawn; one text, many, or by beams."""
    with pytest.raises(UserError, match=message):
        generate(run, **words)
    prompt, options = words.get("prompt", "a"), {name: word for name, word in words.items() if name != "prompt"}
    with pytest.raises(UserError, match=message):
        complete(run, [prompt], **options)
    if not options.keys() & {"seed", "stop"}:
        with pytest.raises(UserError, match=message):
            search(run, prompt, **options)


def test_what_is_handed_over_whole_needs_an_end(run: Run) -> None:
    with pytest.raises(UserError, match="handed over whole need an end; give a number of tokens"):
        complete(run, ["a"], tokens=None)
    with pytest.raises(UserError, match="beams need an end; give a number of tokens"):
        search(run, "a", tokens=None)
    with pytest.raises(UserError, match="no prompt was given; give at least one"):
        complete(run, [])
    with pytest.raises(UserError, match="0 samples wanted; give 1 or more"):
        complete(run, ["a"], samples=0)


def test_a_memory_needs_a_prompt(run: Run) -> None:
    with pytest.raises(UserError, match="a memory was given without a prompt; give the text that comes next"):
        generate(run, memory=run.model.inference_memory(1))


def test_options_are_those_of_a_request() -> None:
    assert list(Options.__annotations__) == [field.name for field in fields(Request)]
