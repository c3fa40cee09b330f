"""The model card of an exported folder, and its publication by huggingface_hub, here to a server of the test."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest
import yaml
from refusals import txl
from small_runs import make_run
from training_runs import letters_corpus

from transformer_xl import RunConfig, TrainConfig, UserError, convert, train
from transformer_xl.integrations.hub import push


class _Hub(BaseHTTPRequestHandler):
    """What of the Hub an upload needs: a repository, whether files are large, and a commit, written to a folder."""

    folder: Path
    token = "Bearer hf_test"
    refuses = False

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        address = f"http://{self.headers['Host']}/me/mine"
        answer: dict = {"url": address}
        if self.headers["Authorization"] != self.token or self.refuses:
            self.send_response(403)
        else:
            self.send_response(200)
            if "preupload" in self.path:
                names = [file["path"] for file in json.loads(body)["files"]]
                answer = {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
            elif "/commit/" in self.path:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        (self.folder / line["value"]["path"]).write_bytes(base64.b64decode(line["value"]["content"]))
                answer = {"commitUrl": f"{address}/commit/1", "commitOid": "1", "success": True}
        content = json.dumps(answer).encode()
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        self.send_response(200)
        content = json.dumps({"id": "me/mine", "sha": "0", "siblings": []}).encode()
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Hub]]:
    handler = type("Hub", (_Hub,), {"folder": tmp_path / "published"})
    handler.folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    yield handler
    server.shutdown()
    server.server_close()


def test_a_model_is_published_with_its_card(tmp_path: Path, hub: type[_Hub]) -> None:
    make_run(tmp_path / "run")
    assert txl("convert", tmp_path / "run", tmp_path / "mine", "--to", "huggingface", "--license", "mit").status == 0
    (tmp_path / "mine" / "secret.pt").write_bytes(b"not for others")
    result = txl("push", tmp_path / "mine", "me/mine", "--json")
    assert (result.status, result.object["address"].split("/")[-2:]) == (0, ["me", "mine"])
    published = {file.name: file.read_bytes() for file in hub.folder.iterdir()}
    folder = {file.name: file.read_bytes() for file in (tmp_path / "mine").iterdir() if file.suffix != ".pt"}
    assert published == folder
    assert yaml.safe_load(published["README.md"].decode().split("---")[1])["license"] == "mit"


def test_what_cannot_be_published_is_refused(tmp_path: Path, hub: type[_Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "mine", to="huggingface")
    for folder, name, message in (
        (run.path, "me/mine", "export it first: txl convert .*run DIR --to huggingface"),
        (tmp_path, "me/mine", "is no exported model"),
        (tmp_path / "mine", "mine", "give a name such as me/mine"),
    ):
        with pytest.raises(UserError, match=message):
            push(folder, name)
    hub.refuses = True
    with pytest.raises(UserError, match=r"publishing .*mine as me/mine: .*403.*; nothing here was changed, try again"):
        push(tmp_path / "mine", "me/mine")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"publishing .*; nothing here was changed, try again"):
        push(tmp_path / "mine", "me/mine")
    assert not list(hub.folder.iterdir())


def test_the_card_has_what_is_known_and_no_path(tmp_path: Path) -> None:
    corpus = letters_corpus(tmp_path / "corpus")
    lengths = {"segment_length": 8, "memory_length": 8, "batch_size": 2, "max_steps": 4, "eval_interval": 2}
    model = {"vocab_size": corpus.tokenizer.vocab_size, "n_layers": 1, "d_model": 8, "n_heads": 1, "d_ff": 8}
    config = RunConfig(model=model, train=TrainConfig(**lengths))
    result = train(config, corpus, tmp_path / "trained", progress=False)
    convert(result.path, tmp_path / "hub", to="huggingface")
    card = (tmp_path / "hub" / "README.md").read_text()
    metadata = yaml.safe_load(card.split("---")[1])
    assert metadata["pipeline_tag"] == "text-generation"
    assert "license" not in metadata
    assert "None was given" in card
    assert f"| train | {corpus.split('train').num_tokens:,} tokens" in card
    assert f"{result.run.weights.used.valid_nats_per_token:.4f} nats per token" in card
    assert "| steps | 4 of 4 |" in card or "| steps | 2 of 4 |" in card
    assert str(tmp_path) not in card
    code = card.split("```python\n")[1].split("```")[0].replace("DIR", str(tmp_path / "hub"))
    exec(compile(code, "README.md", "exec"), {})
    make_run(tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "other", to="huggingface")
    other = (tmp_path / "other" / "README.md").read_text()
    assert "The validation loss is not known." in other
    assert "Not known: the corpus was not recorded" in other
    with pytest.raises(UserError, match=r"license 'Apache 2' is no identifier of the Hub; give one such as apache-2.0"):
        convert(tmp_path / "plain", tmp_path / "third", to="huggingface", license="Apache 2")
    with pytest.raises(UserError, match="license=mit is for to=huggingface; leave it out"):
        convert(tmp_path / "plain", tmp_path / "third", license="mit")
    assert not (tmp_path / "third").exists()
