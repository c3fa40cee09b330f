"""Generation: token by token equals one pass over the whole, in logits and memory; text streams in whole characters."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from transformer_xl.config import EvaluationConfig, RunConfig, TrainConfig, UserError
from transformer_xl.generation import decoding
from transformer_xl.generation.decoding import choose_token, generate, generate_tokens, read_prompt
from transformer_xl.generation.sampling import Sampler
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import Memory, Reach
from transformer_xl.run_folder import Run
from transformer_xl.text.vocabularies.words import WordRules, WordVocabulary
from transformer_xl.text.vocabulary import ByteVocabulary

CLOSE = {"rtol": 0, "atol": 1e-10}
TEXT = [3, 19, 7, 7, 0, 22, 11, 5, 17, 2, 13, 1, 20, 9, 4, 16, 8, 21, 6, 14, 10, 18, 12, 15, 3, 19, 0, 7, 22]


class Scripted(Sampler):
    """Chooses what it was told to, and keeps the scores it was shown."""

    def __init__(self, script: list[int]) -> None:
        object.__setattr__(self, "script", list(script))
        object.__setattr__(self, "seen", [])

    def choose(self, logits_BV: Tensor, generator: torch.Generator | None = None) -> Tensor:
        self.seen.append(logits_BV.clone())
        return torch.tensor([self.script.pop(0)])


class Watched:
    """A model that keeps the memory it gave back last, and how many tokens it was given each time."""

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.lengths = model, []

    def __call__(self, tokens_BT: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        hidden_BTD, self.memory = self.model(tokens_BT, memory)
        self.lengths.append(tokens_BT.shape[1])
        return hidden_BTD, self.memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def decode(
    model: LanguageModel, prompt: list[int], script: list[int], memory: Memory | None = None
) -> tuple[Tensor, Watched]:
    """The scores before each token of the script, and the model with the memory after the last but one."""
    sampler, watched = Scripted(script), Watched(model)
    made = generate_tokens(watched, prompt, sampler, torch.Generator(), memory)
    assert list(islice(made, len(script))) == script
    assert watched.lengths[-len(script) + 1 :] == [1] * (len(script) - 1)
    return torch.cat(sampler.seen), watched


def whole(model: LanguageModel, tokens: list[int], reach: Reach) -> tuple[Tensor, Memory]:
    """The scores after each token, from one pass; and the memory it leaves."""
    with torch.no_grad():
        hidden_BTD, memory = model(torch.tensor([tokens]), model.initial_memory(1, reach))
        return model.logits(hidden_BTD)[0], memory


def assert_same_memory(found: Memory, wanted: Memory) -> None:
    for one, other in zip(found.layers_BMD, wanted.layers_BMD, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    assert (found.valid_B.tolist(), found.position_B.tolist()) == (wanted.valid_B.tolist(), wanted.position_B.tolist())
    assert found.reach == wanted.reach


REACHES = {
    "all of it kept": Reach(31),
    "exactly kept": Reach(28),
    "all kept, distances clamped": Reach(31, clamp_length=5),
    "memory shorter than the prompt, with its window": Reach(5, window=6),
    "memory longer than the window": Reach(13, window=6),
    "one key": Reach(1, window=2),
}


@pytest.mark.parametrize("style", [{}, {"norm": "pre"}, {"kernel": "reference"}])
@pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES)
@pytest.mark.parametrize("prompt_length", [1, 4, 17])
def test_token_by_token_equals_one_pass(make_model, style, reach: Reach, prompt_length: int) -> None:
    """Where memory holds all that a query sees: all there was, or a window. Scores and memory."""
    model = make_model(**style)
    found, watched = decode(model, TEXT[:prompt_length], TEXT[prompt_length:], model.initial_memory(1, reach))
    wanted, _ = whole(model, TEXT[:-1], replace(reach, memory=0))
    torch.testing.assert_close(found, wanted[prompt_length - 1 :], **CLOSE)
    assert_same_memory(watched.memory, whole(model, TEXT[:-1], reach)[1])


def test_a_prompt_longer_than_memory_is_read_whole(make_model) -> None:
    """Without a window the prompt sees all of itself, and what is made sees memory: its end."""
    model = make_model()
    found, _ = decode(model, TEXT[:17], TEXT[17:], model.initial_memory(1, Reach(5)))
    prompt, memory = whole(model, TEXT[:17], Reach(5))
    torch.testing.assert_close(found[0], prompt[-1], **CLOSE)
    for place in range(17, len(TEXT) - 1):
        hidden_BTD, memory = model(torch.tensor([[TEXT[place]]]), memory)
        torch.testing.assert_close(found[place - 16], model.logits(hidden_BTD)[0, 0], **CLOSE)


@pytest.mark.parametrize("part", [1, 3, 5, 16, 17, 18])
@pytest.mark.parametrize("reach", [Reach(31), Reach(5, window=6)])
def test_the_size_of_the_parts_of_a_prompt_changes_nothing(
    make_model, monkeypatch: pytest.MonkeyPatch, part: int, reach: Reach
) -> None:
    model = make_model()
    wanted, kept = read_prompt(model, torch.tensor([TEXT[:17]] * 2), model.initial_memory(2, reach))
    monkeypatch.setattr(decoding, "_PROMPT_SEGMENT", part)
    watched = Watched(model)
    found, memory = read_prompt(watched, torch.tensor([TEXT[:17]] * 2), model.initial_memory(2, reach))
    assert watched.lengths == [part] * (17 // part) + ([17 % part] if 17 % part else [])
    torch.testing.assert_close(found, wanted, **CLOSE)
    assert_same_memory(memory, kept)


@pytest.mark.parametrize("cutoffs", [(), (5, 11)])
@pytest.mark.parametrize(
    "sampler", [Sampler(temperature=0), Sampler(top_k=3), Sampler(0.7, top_k=7), Sampler(top_k=13, top_p=0.6)]
)
def test_candidates_are_drawn_as_from_the_whole_vocabulary(make_model, sampler: Sampler, cutoffs) -> None:
    """Greedy and top-k score no more than they need, and give each token the probability it has among all."""
    model = make_model(cutoffs=cutoffs, tie_weights=False)
    hidden_B1D, _ = read_prompt(model, torch.tensor([TEXT[:5], TEXT[2:7]]), model.initial_memory(2))
    logits_BV = model.logits(hidden_B1D)[:, 0]
    assert sampler.candidates is not None
    scores_B1R, ids_B1R = model.top(hidden_B1D, sampler.candidates)
    if sampler.temperature:
        wanted_BV = sampler.probabilities(logits_BV)
        found_BV = torch.zeros_like(wanted_BV).scatter(-1, ids_B1R[:, 0], sampler.probabilities(scores_B1R[:, 0]))
        torch.testing.assert_close(found_BV, wanted_BV)
    draws = [choose_token(model, hidden_B1D, sampler, torch.Generator().manual_seed(seed)) for seed in range(40)]
    greedy_BV = logits_BV == logits_BV.amax(-1, True)
    allowed_BV = (sampler.probabilities(logits_BV) if sampler.temperature else greedy_BV) > 0
    for row in range(2):
        assert {int(draw[row]) for draw in draws} <= set(allowed_BV[row].nonzero()[:, 0].tolist())


def test_the_whole_vocabulary_is_scored_only_where_needed(make_model, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    monkeypatch.setattr(model, "logits", lambda hidden: pytest.fail("the whole vocabulary was scored"))
    made = generate_tokens(model, TEXT[:3], Sampler(top_k=5), torch.Generator().manual_seed(1))
    assert len(list(islice(made, 7))) == 7
    with pytest.raises(pytest.fail.Exception, match="the whole vocabulary"):
        next(generate_tokens(model, TEXT[:3], Sampler(), torch.Generator().manual_seed(1)))


def test_parts_are_large(make_model) -> None:
    watched = Watched(make_model())
    read_prompt(watched, torch.zeros(1, 1100, dtype=torch.int64), watched.initial_memory(1))
    assert watched.lengths == [512, 512, 76]


@pytest.mark.parametrize("reach", [Reach(31), Reach(5, window=6)])
@pytest.mark.parametrize("first", [3, 7, 16])
def test_memory_goes_on_with_what_was_read_before(make_model, reach: Reach, first: int) -> None:
    """A then B from the memory of A, as in a conversation, is A and B in one; and the memory of A stays as it was."""
    model = make_model()
    wanted, _ = decode(model, TEXT[:17], TEXT[17:], model.initial_memory(1, reach))
    _, memory = whole(model, TEXT[:first], reach)
    before = {name: tensor.clone() for name, tensor in memory.tensors().items()}
    found, _ = decode(model, TEXT[first:17], TEXT[17:], memory)
    torch.testing.assert_close(found, wanted, **CLOSE)
    assert all(torch.equal(tensor, before[name]) for name, tensor in memory.tensors().items())
    forgetful, _ = decode(model, TEXT[first:17], TEXT[17:], model.initial_memory(1, reach))
    assert (forgetful[0] - wanted[0]).abs().max() > 1e-6


def test_without_memory_given_it_is_the_models_own(make_model) -> None:
    model = make_model(memory=5)
    found, watched = decode(model, TEXT[:4], TEXT[4:])
    wanted, _ = decode(model, TEXT[:4], TEXT[4:], model.initial_memory(1, Reach(5)))
    assert torch.equal(found, wanted)
    assert watched.memory.reach == Reach(5)


def test_greedy_is_the_argmax_of_one_pass(make_model) -> None:
    model = make_model()
    made = generate_tokens(model, TEXT[:3], Sampler(0), torch.Generator(), model.initial_memory(1, Reach(31)))
    tokens = list(TEXT[:3])
    for token in islice(made, 19):
        logits_TV, _ = whole(model, tokens, Reach(0))
        assert token == int(logits_TV[-1].argmax())
        tokens.append(token)
    assert len(set(tokens)) > 3


def test_an_empty_prompt_is_refused(make_model) -> None:
    with pytest.raises(UserError, match="the prompt is empty; give at least one token"):
        next(generate_tokens(make_model(), [], Sampler(), torch.Generator()))


# generate: text in, text out.


@pytest.fixture
def run(make_model) -> Run:
    config = RunConfig(train=TrainConfig(memory=11), evaluation=EvaluationConfig(memory=13, window=7, clamp=5))
    return Run(make_model(vocabulary_size=256, memory=11), ByteVocabulary(), config)


def test_generated_text_is_that_of_its_tokens(run: Run) -> None:
    """After the start token and the prompt, with the run's evaluation lengths and the paper's sampler."""

    def by_hand(reach: Reach, prompt: bytes) -> str:
        memory, generator = run.model.initial_memory(1, reach), torch.Generator().manual_seed(3)
        made = generate_tokens(run.model, [10, *prompt], Sampler(top_k=40), generator, memory)
        return bytes(islice(made, 29)).decode(errors="replace")

    for prompt, as_bytes in (("caf\u00e9", b"caf\xc3\xa9"), (b"\xff\x00", b"\xff\x00"), (None, b"")):
        assert "".join(generate(run, prompt, tokens=29, seed=3)) == by_hand(Reach(13, 7, 5), as_bytes)
        assert "".join(generate(run, prompt, tokens=29, seed=3, memory=2)) == by_hand(Reach(2, 7, 5), as_bytes)


def test_a_seed_gives_the_same_text_and_another_gives_another(run: Run) -> None:
    random_state = torch.get_rng_state()
    first, again, other, zero = ("".join(generate(run, "a", tokens=29, seed=seed)) for seed in (1, 1, 2, 0))
    assert first == again
    assert first != other
    assert zero == "".join(generate(run, "a", tokens=29))
    assert torch.equal(torch.get_rng_state(), random_state)


def test_characters_stream_whole(run: Run) -> None:
    """One, two, three and four bytes long; each as soon as its last byte is there, and never half of one."""
    script = list("a\u00e9\u20ac\U0001f600z".encode())
    pieces = generate(run, "a", tokens=len(script), sampler=Scripted(script))
    assert list(pieces) == ["a", "\u00e9", "\u20ac", "\U0001f600", "z"]


def test_text_appears_as_it_is_made(run: Run) -> None:
    sampler = Scripted(list("a\u00e9b".encode()))
    pieces = generate(run, "a", tokens=4, sampler=sampler)
    assert (next(pieces), len(sampler.script)) == ("a", 3)
    assert (next(pieces), len(sampler.script)) == ("\u00e9", 1)
    assert (next(pieces), len(sampler.script)) == ("b", 0)
    assert list(pieces) == []


def test_bytes_that_are_no_text_become_signs(run: Run) -> None:
    """A character that never ends, one cut off at the end."""
    made = "".join(generate(run, "a", tokens=4, sampler=Scripted([0xC3, 0x41, 0xE2, 0x82])))
    assert made == "\ufffdA\ufffd"


@pytest.mark.parametrize("rules", [WordRules(), WordRules(splitting="punctuation")])
@given(ids=st.lists(st.integers(0, 6), min_size=2, max_size=9), cut=st.integers(1, 8))
def test_words_go_on_from_the_prompt(rules: WordRules, ids: list[int], cut: int) -> None:
    """The space between its last word and the first one made is there, and nothing of it is said again."""
    vocabulary = WordVocabulary(("<eos>", "the", "cat", "(", ")", ",", "sat"), None, "<eos>", None, rules)
    prompt, made = ids[:cut], ids[cut:]
    text = "".join(decoding._continuation(iter(made), vocabulary, prompt))
    assert vocabulary.decode(prompt) + text == vocabulary.decode(ids)


def test_what_is_held_back_of_a_prompt_is_not_said_again() -> None:
    words = ("<eos>", "1914", "\u2013", "18", "x")
    vocabulary = WordVocabulary(words, None, "<eos>", None, WordRules(splitting="punctuation"))
    assert "".join(decoding._continuation(iter([4]), vocabulary, [1, 2])) == " x"


def test_a_character_begun_in_the_prompt_is_finished(run: Run) -> None:
    assert "".join(generate(run, b"a\xc3", tokens=2, sampler=Scripted([0xA9, 0x41]))) == "\u00e9A"


def test_just_so_many_tokens(run: Run) -> None:
    sampler = Scripted([65] * 99)
    assert "".join(generate(run, "a", tokens=7, sampler=sampler)) == "A" * 7
    assert len(sampler.script) == 92


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"prompt": ""}, "the prompt is empty; give some text, or no prompt at all to begin a new text"),
        ({"prompt": b""}, "the prompt is empty"),
        ({"prompt": "\ud800"}, r"the text holds '\\ud800' at place 0, which UTF-8 cannot write"),
        ({"tokens": 0}, "0 tokens wanted; give 1 or more"),
        ({"tokens": -5}, "-5 tokens wanted; give 1 or more"),
        ({"memory": -1}, "memory -1 is too small; give 0 or more"),
        ({"seed": -1}, r"seed -1: wanted 0 or more, below 2\*\*63"),
        ({"seed": 2**63}, r"seed 9223372036854775808: wanted 0 or more"),
    ],
)
def test_wrong_words_are_refused_at_once(run: Run, words: dict[str, Any], message: str) -> None:
    """When asked, not when the first piece is drawn."""
    with pytest.raises(UserError, match=message):
        generate(run, **words)
