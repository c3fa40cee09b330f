"""A plain server around transformers' `generate`, for `serving.py`: requests that wait become one batch.

    python transformers_server.py RUN [--max-batch 64] [--threads 2]

A thread takes all requests that wait, pads their prompts on the left and calls `generate` once, as long as the longest
of them asks for; each request is answered when the batch is done. Requests that come meanwhile wait for the next batch.
The answers are streams of one chunk, in the form of OpenAI's completions.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from transformer_xl.integrations.huggingface import from_run
from transformer_xl.run import load

_Waiting = tuple[dict[str, Any], "queue.SimpleQueue[list[int]]"]


def generate_batches(run: str, waiting: queue.SimpleQueue[_Waiting], max_batch: int) -> None:
    """Answer requests in batches, for ever."""
    model, _ = from_run(load(run, device="cpu"))
    model.eval()
    while True:
        batch = [waiting.get()]
        while len(batch) < max_batch and not waiting.empty():
            batch.append(waiting.get())
        longest = max(len(body["prompt"]) for body, _ in batch)
        pads = [longest - len(body["prompt"]) for body, _ in batch]
        padding = model.generation_config.pad_token_id or 0
        ids = torch.tensor([[padding] * pad + body["prompt"] for pad, (body, _) in zip(pads, batch, strict=True)])
        mask = (torch.arange(longest) >= torch.tensor(pads)[:, None]).long()
        torch.manual_seed(batch[0][0]["seed"])
        with torch.inference_mode():
            tokens = max(body["max_tokens"] for body, _ in batch)
            made = model.generate(ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=tokens)
        for (body, answer), row in zip(batch, made[:, longest:].tolist(), strict=True):
            answer.put(row[: body["max_tokens"]])


def main() -> None:
    """Answer requests until the process is killed."""
    parser = argparse.ArgumentParser(description="A plain server around transformers' generate.")
    parser.add_argument("run")
    parser.add_argument("--max-batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    waiting: queue.SimpleQueue[_Waiting] = queue.SimpleQueue()
    threading.Thread(target=generate_batches, args=(args.run, waiting, args.max_batch), daemon=True).start()

    class Handler(BaseHTTPRequestHandler):
        """Answers completions."""

        def do_POST(self) -> None:
            """Wait for the text, and send it as one chunk."""
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            answer: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
            waiting.put((body, answer))
            row = answer.get()
            text = bytes(token for token in row if token < 256).decode("utf-8", "replace")
            chunk = {"choices": [{"index": 0, "text": text}], "usage": {"completion_tokens": len(row)}}
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            self.wfile.write(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())

        def log_message(self, *_: Any) -> None:
            """Write no log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(f"serving on http://127.0.0.1:{server.server_port}", file=sys.stderr, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
