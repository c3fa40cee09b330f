"""The clients of OpenAI, for Python and for Node, as their documentation uses them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from transformer_xl import generate, score

HERE = Path(__file__).parent
NODE_MODULES = HERE.parents[1] / ".venv-clients" / "node_modules"
USER = {"role": "user", "content": "the union received an offer"}
of_python = pytest.mark.client("openai")


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


def chat(client: openai.OpenAI, messages: list, **arguments):
    return client.chat.completions.create(
        **{"model": "mine", "messages": messages, "max_tokens": 12, "seed": 3, **arguments}
    )


@of_python
def test_chat_over_three_turns(server, client: openai.OpenAI) -> None:
    """The loop of every tutorial; each prompt has all that was said, as the template writes it."""
    messages: list = [{"role": "system", "content": "be brief"}]
    text = "system: be brief\n"
    for turn in range(3):
        messages.append({"role": "user", "content": f"question {turn}"})
        answer = chat(client, messages)
        messages.append(answer.choices[0].message)
        prompt = f"{text}user: question {turn}\nassistant: "
        expected = generate(server.run, prompt, max_new_tokens=12, seed=3, top_k=None, stop="\n")
        assert answer.choices[0].message.content == expected.text
        assert answer.usage.prompt_tokens == len(prompt.encode())
        text = f"{prompt}{expected.text}\n"
    assert [m["role"] if isinstance(m, dict) else m.role for m in messages[1:]] == ["user", "assistant"] * 3


@of_python
def test_stream(client: openai.OpenAI) -> None:
    whole = chat(client, [USER])
    chunks = list(chat(client, [USER], stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage
    with client.completions.create(model="mine", prompt="the ", max_tokens=400, stream=True) as stream:
        next(iter(stream))  # and goes away, as users do
    assert client.models.list().data[0].id == "mine"


@of_python
def test_stop_and_several_samples(client: openai.OpenAI) -> None:
    arguments = {"model": "mine", "prompt": "the ", "max_tokens": 30, "seed": 5}
    both = client.completions.create(**arguments, n=2)
    first, second = (choice.text for choice in both.choices)
    assert [choice.index for choice in both.choices] == [0, 1]
    assert first != second
    stop = first[10:12]
    stopped = client.completions.create(**arguments, stop=[stop, "\ufffd no such text"])
    assert stopped.choices[0].text == first[: first.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    assert len(chat(client, [USER], n=2).choices) == 2


@of_python
def test_logprobs(server, client: openai.OpenAI) -> None:
    prompt = "the offer was too low"
    answer = client.completions.create(model="mine", prompt=prompt, max_tokens=0, echo=True, logprobs=3)
    (expected,) = score(server.run, prompt)
    assert answer.choices[0].logprobs.token_logprobs == pytest.approx(-expected.nats_K[: len(prompt)], abs=1e-5)
    content = chat(client, [USER], logprobs=True, top_logprobs=3, temperature=0).choices[0].logprobs.content
    assert all(one.top_logprobs[0].logprob == one.logprob for one in content)
    assert all(len(one.top_logprobs) == 3 for one in content)


@of_python
def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-4o'"):
        chat(client, [USER], model="gpt-4o")
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        chat(client, [USER], temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="tools"):
        chat(client, [USER], tools=[{"type": "function", "function": {"name": "f"}}])
    with pytest.raises(openai.NotFoundError, match="no such path") as caught:
        client.embeddings.create(model="mine", input="the offer")
    assert isinstance(caught.value.body, dict)  # OpenAI's form, not a page
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="mine", input="the offer")


@pytest.mark.client("openai for Node", json.loads((HERE / "package.json").read_text())["dependencies"]["openai"])
def test_node(server) -> None:
    """The same loop, stream, samples and errors in JavaScript."""
    if shutil.which("node") is None or not NODE_MODULES.is_dir():
        pytest.skip("node and npm are not installed")
    environment = {**os.environ, "NODE_PATH": str(NODE_MODULES)}
    command = ["node", str(HERE / "chat.cjs"), server.base_url]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert result.returncode == 0, result.stderr
    seen = json.loads(result.stdout)
    text, contents = "", []
    for turn in range(3):
        prompt = f"{text}user: question {turn}\nassistant: "
        reply = generate(server.run, prompt, max_new_tokens=12, seed=3, top_k=None, stop="\n").text
        contents.append(reply)
        text = f"{prompt}{reply}\n"
    assert seen["contents"] == contents
    assert seen["streamed"] == contents[0]
    assert seen["samples"] == 2
    assert seen["errors"] == ["NotFoundError", "BadRequestError", "NotFoundError"]
