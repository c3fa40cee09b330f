"""The API as its users meet it: the openai client, lm_eval's local-completions, and sessions, on a loopback port."""

from __future__ import annotations

import json
import math
import random
import socket
from pathlib import Path

import httpx2
import openai
import pytest
from servers import LOSSY, make_run, running

from transformer_xl.apps.serve import guard
from transformer_xl.apps.serve.config import ServerConfig
from transformer_xl.apps.serve.requests import RequestRunner
from transformer_xl.apps.serve.server import guard_settings
from transformer_xl.config import UserError
from transformer_xl.evaluation.score import score
from transformer_xl.generation.generate import generate
from transformer_xl.run import Run

PROMPT = "Once upon a time, a long text began. "
USER = {"role": "user", "content": "hi"}
KEY, OTHER_KEY = "first-key-of-the-tests", "other-key-of-the-tests"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("runs") / "tiny")


@pytest.fixture(scope="module")
def served(run: Run):
    with running({"tiny": run}, chat_template="plain", max_memory_length=64) as started:
        yield started


@pytest.fixture(scope="module")
def client(served) -> httpx2.Client:
    return served[0]


@pytest.fixture(scope="module")
def gpt(client: httpx2.Client):
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as made:
        yield made


def completion_of(client: httpx2.Client, **body: object) -> dict:
    answer = client.post("/v1/completions", json={"model": "tiny", "seed": 1, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def error_of(client: httpx2.Client, status: int, path: str = "/v1/completions", **body: object) -> str:
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error["message"]


# Completions


def test_completion_equals_generate(run: Run, gpt: openai.OpenAI) -> None:
    prompts = [PROMPT, "another"]
    answer = gpt.completions.create(model="tiny", prompt=prompts, n=2, max_tokens=24, seed=5, temperature=0.9, stop="@")
    expected = generate(run, prompts, num_samples=2, max_new_tokens=24, seed=5, temperature=0.9, top_k=None, stop="@")
    assert [choice.text for choice in answer.choices] == [completion.text for completion in expected]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == sum(map(len, prompts))
    assert answer.usage.completion_tokens == sum(len(completion.token_ids) for completion in expected)


def test_stream_gives_the_same_text_and_tokens(gpt: openai.OpenAI) -> None:
    arguments = {"model": "tiny", "prompt": PROMPT, "max_tokens": 30, "seed": 2, "logprobs": 2, "echo": True}
    whole = gpt.completions.create(**arguments)
    chunks = list(gpt.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert len(choices) >= 3  # the prompt, the first token, and others in pieces of 10 ms
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [item for choice in choices for item in getattr(choice.logprobs, name)]
        assert streamed == getattr(whole.choices[0].logprobs, name)
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
    assert chunks[-1].usage == whole.usage


def test_logprobs_of_echo_are_those_of_score(run: Run, gpt: openai.OpenAI) -> None:
    for memory_length in (None, 0, 40):
        body = {} if memory_length is None else {"memory_length": memory_length}
        answer = gpt.completions.create(
            model="tiny", prompt=PROMPT * 3, max_tokens=0, echo=True, logprobs=3, extra_body=body
        )
        logprobs = answer.choices[0].logprobs
        (expected,) = score(run, PROMPT * 3, **body)
        assert logprobs.token_logprobs == pytest.approx(list(-expected.nats_K), abs=1e-4)
        assert "".join(logprobs.tokens) == answer.choices[0].text == PROMPT * 3
        assert logprobs.text_offset == list(range(len(PROMPT * 3)))
        for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
            assert top[token] == logprob  # the same float
            assert 3 <= len(top) <= 4


def test_token_ids_and_names(run: Run, gpt: openai.OpenAI) -> None:
    """Bytes that are no character have names of their own."""
    ids = list("wörld".encode())
    body = {"return_tokens_as_token_ids": True}
    answer = gpt.completions.create(model="tiny", prompt=ids, max_tokens=0, echo=True, logprobs=0, extra_body=body)
    assert answer.choices[0].logprobs.tokens == [f"token_id:{token_id}" for token_id in ids]
    answer = gpt.completions.create(model="tiny", prompt=[ids, [98]], max_tokens=0, echo=True, logprobs=0)
    assert answer.choices[0].logprobs.tokens == ["w", "bytes:\\xc3", "bytes:\\xb6", "r", "l", "d"]
    assert answer.choices[1].text == "b"


def test_offsets_of_tokens_after_bytes_that_are_no_character(run: Run, client: httpx2.Client) -> None:
    """In the prompt and in what is generated, from random weights; bytes of one character begin where it begins."""
    ids = [0xC3, 0x61, 0xE2, 0x80, 0xA6, 0xF0, 0x80, 0xFF, 0xC3, 0xC3, 0xB6, 0x62]
    body = {"prompt": ids, "max_tokens": 60, "echo": True, "logprobs": 0, "stop": ["\n\n", "aa"]}
    (choice,) = completion_of(client, **body)["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("\ufffda\u2026\ufffd\ufffd\ufffd\ufffd\u00f6b")
    assert logprobs["text_offset"][: len(ids)] == [0, 1, 2, 2, 2, 3, 4, 5, 6, 7, 7, 8]
    seen = [pair for pair in zip(logprobs["tokens"], logprobs["text_offset"], strict=True) if len(pair[0]) == 1]
    assert len(seen) > 15
    assert all(choice["text"].startswith(token, offset) for token, offset in seen)


def test_best_of_returns_the_most_likely_samples(run: Run, gpt: openai.OpenAI) -> None:
    answer = gpt.completions.create(model="tiny", prompt="a", n=2, best_of=6, max_tokens=9, seed=3)
    samples = generate(run, ["a"], num_samples=6, max_new_tokens=9, seed=3, top_k=None, logprobs=True)
    best = sorted(samples, key=lambda sample: sum(sample.logprobs), reverse=True)[:2]
    assert [choice.text for choice in answer.choices] == [sample.text for sample in best]
    assert answer.usage.completion_tokens == 6 * 9


def test_best_of_counts_the_tokens_of_a_stop_string(client: httpx2.Client) -> None:
    """A sample that is cut at its first token is as likely as that token, not certain."""
    body = {"prompt": "a", "max_tokens": 6, "logprobs": 0, "seed": 3}
    samples = [choice["logprobs"] for choice in completion_of(client, n=32, **body)["choices"]]
    best = max(samples, key=lambda sample: math.fsum(sample["token_logprobs"]) / 6)
    firsts = [sample["tokens"][0] for sample in samples]
    stop = next(token for token in firsts if len(token) == 1 and token.isprintable() and token not in best["tokens"])
    answer = completion_of(client, n=1, best_of=32, stop=stop, **body)["choices"][0]["logprobs"]
    assert answer["tokens"] == best["tokens"]
    assert answer["token_logprobs"] == pytest.approx(best["token_logprobs"], abs=1e-5)


def test_greedy_top_k_and_values_that_change_nothing(run: Run, client: httpx2.Client) -> None:
    neutral = {"presence_penalty": 0, "frequency_penalty": 0.0, "user": "me", "logit_bias": {}, "suffix": None}
    answer = completion_of(client, prompt=PROMPT, temperature=0, max_tokens=9, **neutral)
    assert answer["choices"][0]["text"] == generate(run, PROMPT, greedy=True, max_new_tokens=9).text
    answer = completion_of(client, prompt=PROMPT, top_k=5, max_tokens=9)
    assert answer["choices"][0]["text"] == generate(run, PROMPT, top_k=5, seed=1, max_new_tokens=9).text


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tool": []}, "tool is not a field"),
        ({"tools": [{"type": "function"}]}, "tools: not supported; leave it out"),
        ({"response_format": {"type": "json_object"}}, "response_format.type: Input should be 'text'"),
        ({"repetition_penalty": 1.2}, "repetition_penalty: Input should be 1"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias: not supported"),
        ({"suffix": "end"}, "suffix"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"n": 1000}, "n or best_of 1000 is above 64"),
        ({"n": 3, "best_of": 2}, "best_of 2 is below n 3"),
        ({"best_of": 3, "stream": True}, "cannot be streamed"),
        ({"logprobs": 50}, "logprobs"),
        ({"stop": ["a"] * 17}, "stop: expected a text of 1 to 1000 characters, or a list of up to 16 of them"),
        ({"stop": ""}, "stop: expected a text of 1"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": -2}, "seed"),
        ({"prompt": [300]}, "token id 300 is not in this byte vocabulary"),
        ({"prompt": []}, "empty list"),
        (
            {"prompt": [[5], "a"]},
            "prompt: expected text, a list of texts, a list of token ids, or a list of such lists",
        ),
        ({"prompt": ["a"] * 300}, "300 prompts"),
        ({"prompt": "a", "add_special_tokens": False, "max_tokens": 60_000, "n": 60, "logprobs": 20}, "too much"),
        ({"prompt": "", "add_special_tokens": False}, "the prompt is empty"),
        ({"memory_length": 65}, "above 64"),
        ({"stream_options": {"include_usage": True}}, "needs stream"),
        ({"prompt": ["a", "b"], "session": "new"}, "one prompt"),
    ],
)
def test_wrong_values_are_refused_by_name(client: httpx2.Client, body: dict, message: str) -> None:
    assert message in error_of(client, 400, model="tiny", **{"prompt": "a", **body})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 2, "max_completion_tokens": 3}, "are the same; give one"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content is missing"),
        (
            {"messages": [USER, {"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[1].content: expected text",
        ),
        ({"messages": [USER, USER, {**USER, "refusal": "no"}]}, "messages[2].refusal is not a field"),
        ({"messages": [USER, {**USER, "role": ""}]}, "messages[1].role"),
        ({"top_logprobs": 1}, "top_logprobs needs logprobs"),
        ({"modalities": ["text", "audio"]}, "modalities[1]"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_wrong_chats_are_refused_by_the_name_of_the_message(client: httpx2.Client, values: dict, message: str) -> None:
    assert message in error_of(client, 400, "/v1/chat/completions", **{"model": "tiny", "messages": [USER], **values})


NEUTRAL = {
    "tools": [],
    "functions": None,
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "metadata": {"of": "me"},
    "store": False,
    "parallel_tool_calls": True,
    "service_tier": "auto",
    "modalities": ["text"],
    "reasoning_effort": None,
    "ignore_eos": False,
    "repetition_penalty": 1,
    "min_tokens": 0,
    "stop_token_ids": [],
    "skip_special_tokens": True,
    "no_field_at_all": None,
}


def test_fields_that_ask_for_nothing_change_nothing(client: httpx2.Client) -> None:
    chat = {"model": "tiny", "messages": [USER], "seed": 3, "max_tokens": 9}
    for path, body, more in (
        ("/v1/completions", {"model": "tiny", "prompt": PROMPT, "seed": 3, "max_tokens": 9}, {}),
        ("/v1/chat/completions", chat, {"top_logprobs": 0, "max_completion_tokens": 9}),
    ):
        names = client.get("/openapi.json").json()["components"]["schemas"]
        fields = names["CompletionBody" if path == "/v1/completions" else "ChatBody"]["properties"]
        nothing = dict.fromkeys(fields) | {"service_tier": "auto"}
        answers = [client.post(path, json={**values, **body}) for values in ({}, {**NEUTRAL, **more}, nothing)]
        assert [answer.status_code for answer in answers] == [200] * 3, [answer.text for answer in answers]
        assert len({json.dumps(answer.json()["choices"]) for answer in answers}) == 1
    texts = {completion_of(client, prompt="a", seed=-1)["choices"][0]["text"] for _ in range(4)}
    assert len(texts) > 1


def test_head_answers_as_get_without_a_body(client: httpx2.Client) -> None:
    for path in ("/", "/health", "/v1/models", "/v1/models/tiny", "/metrics", "/tokenizer_info", "/openapi.json"):
        answer, got = client.head(path), client.get(path)
        assert (answer.status_code, answer.content) == (200, b""), path
        assert answer.headers["content-type"] == got.headers["content-type"]
    assert client.head("/v1/completions").status_code == 405
    assert client.head("/nothing").status_code == 404


def test_unknown_models_and_paths(client: httpx2.Client) -> None:
    assert "the models are tiny" in error_of(client, 404, model="huge", prompt="a")
    assert client.get("/v1/models/huge").status_code == 404
    assert client.get("/nothing").json()["error"]["message"] == "no such path"
    assert client.get("/v1/completions").status_code == 405


def test_model_list_tokens_and_metrics(run: Run, client: httpx2.Client, gpt: openai.OpenAI) -> None:
    (model,) = gpt.models.list().data
    assert (model.id, model.memory_length, model.max_memory_length) == ("tiny", 11, 64)
    tokens = client.post("/tokenize", json={"prompt": "wö", "add_special_tokens": False}).json()
    assert tokens["tokens"] == list("wö".encode())
    expected = {"prompt": "wö", "token_strs": tokens["token_strs"]}
    assert client.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == expected
    assert client.get("/tokenizer_info").json()["bos_token"] == "\n"
    assert client.get("/health").json() == {"status": "ok"}
    completion_of(client, prompt="a")
    metrics = client.get("/metrics").text
    assert 'txl_responses_total{path="/v1/completions",status="200"}' in metrics
    assert "txl_time_to_first_token_seconds_count" in metrics


@pytest.mark.parametrize("name", LOSSY)
def test_texts_of_tokens_are_the_text_together(name: str, tmp_path: Path) -> None:
    """Those of a text are parts of it as it was given, whatever the tokenizer makes of it."""
    draws, tokenizer = random.Random(5), LOSSY[name]
    parts = [
        "the",
        "Cat",
        "sat",
        " ",
        "  ",
        "\n",
        "\t",
        ",",
        "isn't",
        "12",
        "\u2013",
        "\u4e2d\u6587",
        "caf\u00e9",
        "<unk>",
    ]
    with running({"tiny": make_run(tmp_path / "run", tokenizer=tokenizer)}) as (client, _):
        assert client.get("/v1/models/tiny").json()["is_lossless"] is False
        for _ in range(50):
            text = "".join(draws.choices(parts if tokenizer.is_text else ["7", "30 ", "\n", "  ", " 07"], k=12))
            if not tokenizer.is_text and any(int(number) > 30 for number in text.split()):
                continue
            answer = client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
            assert answer["tokens"] == tokenizer.encode(text).tolist()
            assert len(answer["token_strs"]) == len(answer["tokens"])
            assert "".join(answer["token_strs"]) == text or not answer["tokens"]
            assert "" not in answer["token_strs"][-1:]  # one without a part has that of the next
            answer = client.post("/detokenize", json={"tokens": answer["tokens"]}).json()
            assert "".join(answer["token_strs"]) == answer["prompt"] == tokenizer.decode(tokenizer.encode(text))
        answer = client.post("/detokenize", json={"tokens": tokenizer.encode("3 3").tolist()}).json()
    if name in ("word", "integer"):
        assert answer["token_strs"] == {"word": ["<unk>", " <unk>"], "integer": ["3", " 3"]}[name]


@pytest.mark.parametrize("name", LOSSY)
def test_names_of_tokens_are_the_text_together(name: str, tmp_path: Path) -> None:
    """In log-probabilities of completions and chats, whole and streamed; each token is among the most likely ones."""
    text = "3  07\n 12" if name == "integer" else "the  Cat sat, on\nthe 12 \u2013 12 mat"
    body = {"model": "tiny", "max_tokens": 30, "seed": 3}
    completion = {**body, "prompt": [text, text[:7]], "echo": True, "n": 2, "logprobs": 3}
    chat = {**body, "messages": [{"role": "user", "content": text}], "logprobs": True, "top_logprobs": 2}

    def streamed(path: str, body: dict, part: str) -> list[list]:
        with client.stream("POST", path, json={**body, "stream": True}) as answer:
            chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
        parts = [choice for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
        return [
            [one for choice in parts if choice["index"] == index for one in choice["logprobs"][part]]
            for index in range(max(choice["index"] for choice in parts) + 1)
        ]

    with running({"tiny": make_run(tmp_path / "run", tokenizer=LOSSY[name])}, chat_template="{content}\n") as (
        client,
        _,
    ):
        choices = client.post("/v1/completions", json=completion).json()["choices"]
        for part in ("tokens", "top_logprobs", "text_offset"):
            assert streamed("/v1/completions", completion, part) == [choice["logprobs"][part] for choice in choices]
        for choice in choices:
            logprobs = choice["logprobs"]
            assert "".join(logprobs["tokens"]) == choice["text"]
            for index, token in enumerate(logprobs["tokens"]):
                assert choice["text"].startswith(token, logprobs["text_offset"][index])
                assert logprobs["top_logprobs"][index][token] >= logprobs["token_logprobs"][index]
        (choice,) = client.post("/v1/chat/completions", json=chat).json()["choices"]
        entries = choice["logprobs"]["content"]
        assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == choice["message"]["content"]
        assert streamed("/v1/chat/completions", chat, "content") == [entries]


def test_attention_of_a_token(client: httpx2.Client) -> None:
    body = {"prompt": PROMPT, "position": 20, "memory_length": 32}
    answer = client.post("/attention", json=body).json()
    num_layers, num_heads = client.get("/v1/models/tiny").json()["attention"]
    attention = answer["attention"]
    assert (answer["position"], len(attention), len(attention[0])) == (20, num_layers, num_heads)
    assert len(attention[0][0]) == 1 + 21  # the token that begins a text comes first
    for layer in attention:
        for head in layer:
            assert sum(head) == pytest.approx(1, abs=1e-4)
    ids = list(PROMPT.encode())
    assert client.post("/attention", json={**body, "prompt": ids[:21], "position": None}).json() == answer
    bare = client.post("/attention", json={**body, "add_special_tokens": False}).json()["attention"]
    assert len(bare[0][0]) == 21
    assert "position 40: the prompt has 37 tokens" in error_of(client, 400, "/attention", prompt=PROMPT, position=40)
    assert "above 64" in error_of(client, 400, "/attention", prompt="a", memory_length=65)
    assert "is empty" in error_of(client, 400, "/attention", prompt="")


def test_attention_needs_a_model_that_has_some_and_a_bounded_answer(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformer_xl.apps.serve import requests

    lstm = make_run(tmp_path / "lstm", "lstm")
    with running({"lstm": lstm, "tiny": run}) as (client, _):
        assert "lstm has no attention that can be shown" in error_of(client, 400, "/attention", prompt="a")
        assert client.get("/v1/models/lstm").json()["attention"] is None
        monkeypatch.setattr(requests, "_MAX_ATTENTION", 40)
        message = error_of(client, 400, "/attention", model="tiny", prompt=PROMPT)
        assert "2 x 2 heads to 18 tokens is too much" in message
        assert client.post("/attention", json={"model": "tiny", "prompt": PROMPT, "position": 3}).status_code == 200


# Chat


def test_chat_is_a_completion_of_the_template(run: Run, gpt: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "Be {role}."}, {"role": "user", "content": "hi"}]
    arguments = {
        "model": "tiny",
        "messages": messages,
        "max_tokens": 20,
        "seed": 4,
        "logprobs": True,
        "top_logprobs": 2,
    }
    answer = gpt.chat.completions.create(**arguments)
    prompt = "system: Be {role}.\nuser: hi\nassistant: "
    expected = generate(run, prompt, max_new_tokens=20, seed=4, top_k=None, stop="\n")
    assert answer.choices[0].message.content == expected.text
    assert all(len(token.top_logprobs) == 2 for token in answer.choices[0].logprobs.content)
    chunks = list(gpt.chat.completions.create(**arguments, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    assert chunks[0].choices[0].delta.role == "assistant"


def test_chat_goes_on_with_the_messages_that_it_returned(client: httpx2.Client, gpt: openai.OpenAI) -> None:
    """As objects of the client, as their JSON, and as other servers' messages have it."""
    messages: list = [dict(USER)]
    for convert in (lambda one: one, lambda one: one.model_dump(), lambda one: one.to_dict()):
        answer = gpt.chat.completions.create(model="tiny", messages=messages, max_tokens=5, seed=2)
        messages += [convert(answer.choices[0].message), dict(USER)]
    contents = [m["content"] if isinstance(m, dict) else m.content for m in messages]
    text = "".join(f"{role}: {content}\n" for role, content in zip(["user", "assistant"] * 4, contents, strict=False))
    expected = completion_of(client, prompt=f"{text}assistant: ", max_tokens=5, seed=2, stop="\n")
    answer = gpt.chat.completions.create(model="tiny", messages=messages, max_tokens=5, seed=2)
    assert answer.choices[0].message.content == expected["choices"][0]["text"]
    assert answer.usage.prompt_tokens == expected["usage"]["prompt_tokens"]
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    other = {"content": None, "tool_calls": [call], "function_call": None, "annotations": [], "audio": {"id": "a"}}
    messages = [USER, {"role": "assistant", **other}, {"role": "tool", "content": "5", "tool_call_id": "call_1"}]
    answer = client.post("/v1/chat/completions", json={"model": "tiny", "messages": messages})
    assert answer.status_code == 200, answer.text


def test_stop_of_a_client_adds_to_the_end_of_the_template(client: httpx2.Client) -> None:
    body = {"model": "tiny", "messages": [USER], "max_tokens": 400}
    for seed in range(100):
        plain = client.post("/v1/chat/completions", json={**body, "seed": seed}).json()["choices"]
        if plain[0]["finish_reason"] == "stop":
            own = client.post("/v1/chat/completions", json={**body, "seed": seed, "stop": "no such text"}).json()
            assert own["choices"] == plain
            return
    pytest.fail("no reply was stopped")


@pytest.mark.parametrize("stop", [None, "."])
def test_chat_session_ends_an_unfinished_reply_before_the_next_message(client: httpx2.Client, stop: str | None) -> None:
    """After `length`, and after a stop string that is not the template's end; not after that end."""

    def chat(session: str, content: str, **body: object) -> dict:
        messages = [{"role": "user", "content": content}]
        body = {"model": "tiny", "messages": messages, "session": session, "seed": 1, "stop": stop, **body}
        answer = client.post("/v1/chat/completions", json={**body, "logprobs": True})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def check(cut: dict[str, object], end: str) -> None:
        session = chat("new", "hi", **cut)["session"]
        branch = client.post(f"/v1/sessions/{session}/branch", json={}).json()["id"]
        cut = {"logprobs": 0, "stop": [stop, "\n"] if stop else "\n", **cut}
        plain = completion_of(client, prompt="user: hi\nassistant: ", session="new", **cut)["session"]
        prompt = f"{end}user: and\nassistant: "
        expected = completion_of(client, prompt=prompt, session=plain, **{**cut, "seed": 1, "max_tokens": 4})
        for one in (session, branch):
            reply = chat(one, "and", max_tokens=4)
            assert reply["usage"] == expected["usage"]
            logprobs = [token["logprob"] for token in reply["choices"][0]["logprobs"]["content"]]
            assert logprobs == expected["choices"][0]["logprobs"]["token_logprobs"]

    check({"max_tokens": 3}, "\n")
    for seed in range(100):
        cut = {"max_tokens": 200, "seed": seed}
        reply = chat("new", "hi", **cut)
        if reply["choices"][0]["finish_reason"] != "stop":
            continue
        # with a stop string of its own, the text that it ends must come before the template's end
        free = completion_of(client, prompt="user: hi\nassistant: ", **{**cut, "stop": stop or "\n"})
        is_own = stop is not None and free["choices"][0]["text"] == reply["choices"][0]["message"]["content"]
        assert "\n" not in reply["choices"][0]["message"]["content"]
        if is_own == (stop is not None):
            check(cut, "\n" if is_own else "")
            return
    pytest.fail("no reply was stopped")


def test_chat_session_ends_a_message_with_all_of_its_end(run: Run) -> None:
    """Where the role is in it too."""
    with running({"tiny": run}, chat_template="<{role}>{content}</{role}>\\n") as (client, _):
        body = {"model": "tiny", "messages": [USER], "max_tokens": 3, "seed": 1}
        first = client.post("/v1/chat/completions", json={**body, "session": "new"}).json()
        assert first["choices"][0]["finish_reason"] == "length"
        second = client.post("/v1/chat/completions", json={**body, "session": first["session"]}).json()
        assert second["usage"]["prompt_tokens"] == len("</assistant>\n<user>hi</user>\n<assistant>")


def test_chat_needs_a_template(run: Run) -> None:
    with running({"tiny": run}) as (client, _):
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        assert "--chat-template plain" in error_of(client, 400, "/v1/chat/completions", **body)


# Sessions


def continued(client: httpx2.Client, session: str, prompt: str, **body: object) -> dict:
    return completion_of(client, prompt=prompt, session=session, **{"max_tokens": 12, **body})


def test_session_continues_without_the_earlier_text(run: Run, client: httpx2.Client) -> None:
    """As `generate` with the memory of the first text; and a branch of a snapshot goes on from there again."""
    from transformer_xl.generation.generate import stream

    first = continued(client, "new", PROMPT)
    session = first["session"]
    snapshot = client.post(f"/v1/sessions/{session}/snapshot", json={}).json()["id"]
    second = continued(client, session, "then")
    source = stream(run, PROMPT, max_new_tokens=12, seed=1, top_k=None)
    assert "".join(source) == first["choices"][0]["text"]
    settings = {"max_new_tokens": 12, "seed": 1, "top_k": None, "memory": source.memory(), "add_bos_token": False}
    assert second["choices"][0]["text"] == generate(run, "then", **settings).text
    third = continued(client, session, "then", echo=True, logprobs=0)["choices"][0]["logprobs"]["token_logprobs"]
    branch = client.post(f"/v1/sessions/{snapshot}/branch", json={}).json()
    assert (branch["parent"], branch["tokens"]) == (snapshot, 1 + len(PROMPT) + 12)
    again = continued(client, branch["id"], "then", echo=True, logprobs=0)["choices"][0]
    assert again["text"] == "then" + second["choices"][0]["text"]
    assert again["logprobs"]["token_logprobs"] != third
    assert "is a snapshot" in error_of(client, 409, model="tiny", prompt="a", session=snapshot)


def test_streamed_and_header_sessions_and_reading_only(client: httpx2.Client) -> None:
    session = client.post("/v1/sessions", json={"model": "tiny", "memory_length": 32}).json()["id"]
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 0}
    answer = client.post("/v1/completions", json=body, headers={"x-session": session})
    assert answer.headers["x-session"] == session
    described = client.get(f"/v1/sessions/{session}").json()
    assert (described["tokens"], described["memory_tokens"]) == (1 + len(PROMPT), 32)
    with client.stream(
        "POST", "/v1/completions", json={**body, "max_tokens": 5, "stream": True, "session": session}
    ) as r:
        assert r.read().endswith(b"data: [DONE]\n\n")
    assert client.get(f"/v1/sessions/{session}").json()["tokens"] == 1 + 2 * len(PROMPT) + 5
    listed = client.get("/v1/sessions").json()
    assert listed["data"][0]["id"] == session
    assert listed["bytes"] == sum(entry["bytes"] for entry in listed["data"])
    assert client.delete(f"/v1/sessions/{session}").json()["deleted"]
    assert "no session" in error_of(client, 404, model="tiny", prompt="a", session=session)


def test_second_writer_is_refused(client: httpx2.Client) -> None:
    session = client.post("/v1/sessions", json={"model": "tiny"}).json()["id"]
    body = {"model": "tiny", "prompt": "a", "max_tokens": 5000, "stream": True, "session": session}
    with client.stream("POST", "/v1/completions", json=body) as first:
        lines = first.iter_lines()  # closed with this object, which would close the connection
        next(lines)
        assert "another request is changing" in error_of(client, 409, model="tiny", prompt="b", session=session)
        assert client.delete(f"/v1/sessions/{session}").status_code == 409
    # the client has gone: the session is as it was, and free again
    for _ in range(200):
        answer = client.post("/v1/completions", json={"model": "tiny", "prompt": "b", "session": session})
        if answer.status_code == 200:
            break
    assert client.get(f"/v1/sessions/{session}").json()["tokens"] == 1 + 1 + 16


def test_export_and_import(client: httpx2.Client) -> None:
    session = continued(client, "new", PROMPT)["session"]
    content = client.get(f"/v1/sessions/{session}/export").content
    headers = {"content-type": "application/octet-stream"}
    answer = client.post("/v1/sessions/import", content=content, headers=headers)
    assert answer.status_code == 200, answer.text
    copy = answer.json()["id"]
    assert copy != session
    texts = [continued(client, one, "then")["choices"][0]["text"] for one in (session, copy)]
    assert texts[0] == texts[1]


# lm_eval


def test_lm_eval_scores_as_txl_score(run: Run, client: httpx2.Client) -> None:
    """Its client for old completions, with our tokenizer over HTTP."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    model = LocalCompletionsAPI(
        base_url=f"{client.base_url}/v1/completions", model="tiny", tokenizer_backend="remote", max_length=100_000
    )
    pairs = [("A context", " and what follows"), ("Another", " end")]
    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=index) for index, pair in enumerate(pairs)
    ]
    results = model.loglikelihood(requests)
    for (context, continuation), (logprob, is_greedy) in zip(pairs, results, strict=True):
        (expected,) = score(run, context + continuation)
        assert logprob == pytest.approx(-expected.nats_K[len(context) :].sum(), abs=1e-3)
        assert not is_greedy
    greedy = generate(run, "abc", greedy=True, max_new_tokens=6)
    ids = list(greedy.token_ids)
    if bytes(ids).isascii():
        request = Instance(request_type="loglikelihood", doc={}, arguments=("abc", greedy.text), idx=0)
        assert model.loglikelihood([request])[0][1]


# Who gets in


def test_keys_separate_sessions(run: Run, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{KEY}\n{OTHER_KEY}\n")
    with running({"tiny": run}, api_key_file=str(tmp_path / "keys")) as (client, _):
        body = {"model": "tiny", "prompt": "a", "session": "new"}
        assert client.post("/v1/completions", json=body).status_code == 401
        wrong = client.post("/v1/completions", json=body, headers={"authorization": "Bearer no"})
        assert wrong.json()["error"]["code"] == "invalid_api_key"
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").status_code == client.get("/metrics").status_code == 401
        mine, other = ({"authorization": f"Bearer {key}"} for key in (KEY, OTHER_KEY))
        session = client.post("/v1/completions", json=body, headers=mine).json()["session"]
        for headers, status in ((mine, 200), (other, 404)):
            assert client.get(f"/v1/sessions/{session}", headers=headers).status_code == status
            answer = client.post("/v1/completions", json={**body, "session": session}, headers=headers)
            assert answer.status_code == status
        assert client.get("/v1/sessions", headers=other).json()["data"] == []


def test_file_of_keys_that_everybody_can_read_is_mentioned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    for mode, num_notes in ((0o644, 1), (0o600, 0)):
        keys.chmod(mode)
        assert guard_settings(ServerConfig(api_key_file=str(keys))).keys == [KEY]
        assert capsys.readouterr().err.count("can be read by every user") == num_notes


def test_key_of_the_environment_may_end_in_white_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a secret that was written by echo."""
    for given, keys in ((f"{KEY}\n", [KEY]), ("", [])):
        monkeypatch.setenv("TXL_API_KEY", given)
        assert guard_settings(ServerConfig()).keys == keys
    monkeypatch.setenv("TXL_API_KEY", "\n")
    with pytest.raises(UserError, match="at least"):
        guard_settings(ServerConfig())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"host": "[::1].evil.example"}, 403),
        ({"host": "[::1]:1]"}, 403),
        ({"host": "localhost:1:2"}, 403),
        ({"host": ""}, 403),
        ({"host": "localhost:1"}, 200),
        ({"host": "[::1]:1"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "application/json; charset=utf-8"}, 200),
    ],
)
def test_hosts_origins_and_content_types(client: httpx2.Client, headers: dict[str, str], status: int) -> None:
    content = json.dumps({"model": "tiny", "prompt": "a"})
    answer = client.post("/v1/completions", content=content, headers={"content-type": "application/json", **headers})
    assert answer.status_code == status
    assert "access-control-allow-origin" not in answer.headers


def test_large_bodies_are_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_MAX_BODY_BYTES", 2000)
    with running({"tiny": run}) as (client, _):
        assert "larger than 2,000" in error_of(client, 413, model="tiny", prompt="a" * 3000)

        def chunks():
            for _ in range(100):
                yield b" " * 100

        headers = {"content-type": "application/json"}
        assert client.post("/v1/completions", content=chunks(), headers=headers).status_code == 413


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/sessions/import", "/nothing"])
@pytest.mark.parametrize("framing", ["Content-Length: 30000000", "Transfer-Encoding: chunked"])
def test_error_is_answered_to_a_client_that_sends_all_before_it_reads(
    client: httpx2.Client, path: str, framing: str
) -> None:
    kind = "octet-stream" if "import" in path else "json"
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Type: application/{kind}", "Connection: close"]
    head = "\r\n".join([*lines, framing])
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=60) as connection:
        connection.sendall(f"{head}\r\n\r\n".encode())
        for _ in range(30):
            chunk = b" " * 1_000_000
            connection.sendall(b"f4240\r\n" + chunk + b"\r\n" if "chunked" in framing else chunk)
        connection.sendall(b"0\r\n\r\n" if "chunked" in framing else b"")
        assert connection.recv(2**16).startswith(b"HTTP/1.1 413 ")
        while connection.recv(2**16):
            pass


def test_body_with_two_lengths_is_refused_and_ends_the_connection(client: httpx2.Client) -> None:
    head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked"
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=60) as connection:
        connection.sendall(f"{head}\r\nContent-Length: 4\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\n\r\n".encode())
        received = b""
        while part := connection.recv(2**16):
            received += part
    assert received.startswith(b"HTTP/1.1 400 ")
    assert received.count(b"HTTP/1.1") == 1


def test_queue_answers_429_with_retry_after(run: Run) -> None:
    with running({"tiny": run}, max_batch=1, max_waiting=1) as (client, runner):
        body = {"model": "tiny", "prompt": "a", "max_tokens": 20_000, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            runner.engine.submit(*_waiting(runner))
            refused = client.post("/v1/completions", json={"model": "tiny", "prompt": "b"})
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1


def _waiting(runner: RequestRunner) -> list:
    from transformer_xl.apps.serve.jobs import TextJob
    from transformer_xl.generation.generation_config import GenerationConfig

    return [TextJob(runner.model(None), [1], GenerationConfig(), 1, lambda _: None, owner=guard.owner_of(""))]


def test_requests_without_a_length_get_what_the_server_allows(run: Run) -> None:
    """And a chat template as it is typed in a shell has line ends."""
    with running({"tiny": run}, max_tokens=9, chat_template=r"{role}: {content}\n") as (client, _):
        answer = client.post("/v1/chat/completions", json={"model": "tiny", "messages": [USER]}).json()
        assert answer["usage"]["completion_tokens"] <= 9
        assert answer["usage"]["prompt_tokens"] == len(f"user: {USER['content']}\nassistant: ")
        assert completion_of(client, prompt="a", seed=1)["usage"]["completion_tokens"] == 9
        assert "max_tokens 10 is above 9" in error_of(client, 400, model="tiny", prompt="a", max_tokens=10)


def test_timeout(run: Run) -> None:
    with running({"tiny": run}, timeout=0.3) as (client, runner):
        message = error_of(client, 504, model="tiny", prompt="a", max_tokens=60_000)
        assert "not done in time" in message
        while not runner.engine.is_idle:
            pass
