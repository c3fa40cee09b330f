"""The server of transformers with an exported model, started by examples/transformers_serve.py."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from clients.texts import TOKENIZERS
from small_runs import make_run

from transformer_xl import convert, generate

LAUNCHER = Path(__file__).parents[2] / "examples" / "transformers_serve.py"
PORT = 18_765
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    log_file = tmp_path_factory.mktemp("server") / "log"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(LAUNCHER), "serve", "--port", str(PORT), "--device", "cpu"]
    with log_file.open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        for _ in range(240):
            try:
                httpx.get(f"http://127.0.0.1:{PORT}/health")
                break
            except httpx.TransportError:
                assert server.poll() is None, log_file.read_text()
                time.sleep(0.5)
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none", max_retries=0, timeout=120)
    finally:
        server.terminate()
        server.wait(60)


@pytest.mark.client("transformers")
@pytest.mark.parametrize("kind", ["bytes", "bpe", "words"])
def test_texts_are_those_of_generate(kind: str, tmp_path: Path, client: openai.OpenAI) -> None:
    run = make_run(tmp_path / "run", tokenizer=TOKENIZERS[kind], noise=0.3)
    convert(tmp_path / "run", tmp_path / "hub", to="huggingface")
    (tmp_path / "hub" / "chat_template.jinja").write_text(CHAT)
    model, prompt = str(tmp_path / "hub"), "the offer"
    expected = generate(run, prompt, max_new_tokens=9, greedy=True, add_bos_token=False)
    text = client.completions.create(model=model, prompt=prompt, max_tokens=9, temperature=0).choices[0].text
    assert text.strip() == expected.text.strip()  # of words, the space before the first is left out
    messages = [{"role": "user", "content": prompt}]
    asked = {"model": model, "messages": messages, "max_tokens": 9, "temperature": 0}
    stream = [part.choices[0].delta.content or "" for part in client.chat.completions.create(**asked, stream=True)]
    assert "".join(stream).strip() == text.replace("\ufffd", "").strip()  # a stream withholds incomplete characters
