"""A running server for the tests of serving: the real application on a loopback port, in a thread."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import uvicorn
from library_tokenizers import unigram, word_piece
from small_runs import make_run

from transformer_xl.apps.serve.config import ServerConfig
from transformer_xl.apps.serve.requests import RequestRunner
from transformer_xl.apps.serve.served_model import ServedModel
from transformer_xl.apps.serve.server import _listen, guard_settings, guarded_app, uvicorn_settings
from transformer_xl.run import Run
from transformer_xl.text.tokenizers import Tokenizer
from transformer_xl.text.tokenizers.integer import IntegerTokenizer
from transformer_xl.text.tokenizers.library import LibraryTokenizer
from transformer_xl.text.tokenizers.pre_tokenizer import PreTokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer

__all__ = ["LOSSY", "make_run", "running"]

_WORDS = ("<eos>", "<unk>", "the", "cat", "sat", "on", "mat", ",", "'t", "12", "\u2013")
LOSSY: dict[str, Tokenizer] = {
    "word": WordTokenizer(_WORDS, None, "<eos>", "<unk>"),
    "word without eos": WordTokenizer(_WORDS, None, None, "<unk>", PreTokenizer(lowercase=True)),
    "punctuation": WordTokenizer(_WORDS, None, "<eos>", "<unk>", PreTokenizer("punctuation")),
    "moses": WordTokenizer(_WORDS, None, "<eos>", "<unk>", PreTokenizer("moses")),
    "integer": IntegerTokenizer(31),
    "unigram": LibraryTokenizer("tokenizers", json.dumps(unigram())),
    "word piece": LibraryTokenizer("tokenizers", json.dumps(word_piece())),
}
"""Tokenizers that do not restore every text."""


@contextmanager
def running(runs: dict[str, Run], **settings: Any) -> Iterator[tuple[httpx2.Client, RequestRunner]]:
    """Run a server of these runs; yield a client with its address, and what runs the requests."""
    config = ServerConfig(**{"port": 0, **settings})
    runner = RequestRunner([ServedModel(name, run, config) for name, run in runs.items()], config)
    with _listen(config) as listener:
        app = guarded_app(runner, guard_settings(config))
        server = uvicorn.Server(uvicorn_settings(app, config))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        runner.engine.start()
        thread.start()
        while not server.started:
            time.sleep(0.01)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            with httpx2.Client(base_url=address, timeout=60) as client:
                yield client, runner
        finally:
            server.should_exit = True
            thread.join(20)
            runner.engine.stop()
            assert not thread.is_alive()
