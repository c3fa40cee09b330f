"""LangChain and LlamaIndex, with their classes for servers that know OpenAI's API."""

from __future__ import annotations

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

from transformer_xl import generate

QUESTION, PROMPT = "the union received an offer", "the offer was "
of_langchain = pytest.mark.client("langchain-openai")
of_llama_index = pytest.mark.client("llama-index-llms-openai-like")


def reply(server, *messages: tuple[str, str]) -> str:
    """Return our own reply to messages of roles and contents."""
    text = "".join(f"{role}: {content}\n" for role, content in messages)
    return generate(server.run, f"{text}assistant: ", max_new_tokens=12, seed=3, top_k=None, stop="\n").text


def continuation(server, seed: int = 3) -> str:
    return generate(server.run, PROMPT, max_new_tokens=12, seed=seed, top_k=None).text


@pytest.fixture
def chat_model(server) -> ChatOpenAI:
    settings = {"model": "mine", "temperature": 1, "seed": 3, "max_tokens": 12, "max_retries": 0, "timeout": 60}
    return ChatOpenAI(base_url=server.base_url, api_key="none", **settings)


@of_langchain
def test_chat_model(server, chat_model: ChatOpenAI) -> None:
    expected = reply(server, ("user", QUESTION))
    answer = chat_model.invoke(QUESTION)
    assert isinstance(answer, AIMessage)
    assert answer.content == expected
    assert answer.usage_metadata["output_tokens"] <= 12
    assert "".join(chunk.content for chunk in chat_model.stream(QUESTION)) == expected
    assert [one.content for one in chat_model.batch([QUESTION, "why"])] == [
        *(expected, reply(server, ("user", "why"))),
    ]
    history = [HumanMessage(QUESTION), answer, HumanMessage("why")]
    assert chat_model.invoke(history).content == reply(
        server, ("user", QUESTION), ("assistant", expected), ("user", "why")
    )


@of_langchain
def test_chain_with_a_prompt_template(server, chat_model: ChatOpenAI) -> None:
    template = ChatPromptTemplate.from_messages([("system", "Answer in {language}."), ("human", "{question}")])
    chain = template | chat_model.bind(stop=["\n"]) | StrOutputParser()
    expected = reply(server, ("system", "Answer in French."), ("user", QUESTION))
    assert chain.invoke({"language": "French", "question": QUESTION}) == expected


@of_langchain
def test_completion_model(server) -> None:
    settings = {"model": "mine", "temperature": 1, "seed": 3, "max_tokens": 12, "max_retries": 0}
    model = OpenAI(base_url=server.base_url, api_key="none", **settings)
    expected = continuation(server)
    assert model.invoke(PROMPT) == expected
    assert "".join(model.stream(PROMPT)) == expected
    assert model.batch([PROMPT, PROMPT]) == [expected, continuation(server, seed=4)]  # one request of two prompts


@of_llama_index
def test_llama_index_completes(server) -> None:
    settings = {"model": "mine", "temperature": 1, "max_tokens": 12, "max_retries": 0, "additional_kwargs": {"seed": 3}}
    model = OpenAILike(api_base=server.base_url, api_key="none", **settings)
    expected = continuation(server)
    assert model.complete(PROMPT).text == expected
    parts = list(model.stream_complete(PROMPT))
    assert parts[-1].text == "".join(part.delta for part in parts) == expected


@of_llama_index
def test_llama_index_chats(server) -> None:
    settings = {
        "model": "mine",
        "temperature": 1,
        "max_tokens": 12,
        "max_retries": 0,
        "additional_kwargs": {"seed": 3},
        "is_chat_model": True,
    }
    model = OpenAILike(api_base=server.base_url, api_key="none", **settings)
    messages = [ChatMessage(role="system", content="be brief"), ChatMessage(role="user", content=QUESTION)]
    expected = reply(server, ("system", "be brief"), ("user", QUESTION))
    answer = model.chat(messages)
    assert answer.message.content == expected
    assert "".join(part.delta or "" for part in model.stream_chat(messages)) == expected
    messages += [answer.message, ChatMessage(role="user", content="why")]
    assert model.chat(messages).message.content == reply(
        server, ("system", "be brief"), ("user", QUESTION), ("assistant", expected), ("user", "why")
    )
    assert model.complete(QUESTION).text == reply(server, ("user", QUESTION))
