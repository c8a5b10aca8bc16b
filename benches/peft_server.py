"""PEFT behind HTTP as people write it: every adapter in memory, a lock, `set_adapter`, `generate`; one request after the other.

    python benches/peft_server.py MODEL ADAPTERS NAME ...          bench_server.py runs it

A body with `models`, a list, is one mixed batch of PEFT's own (`adapter_names=`), answered when all of it is done.
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer


class Lines(BaseStreamer):
    """Writes an event for each token."""

    def __init__(self, write: Any, tokenizer: Any) -> None:
        self._write, self._tokenizer = write, tokenizer
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """The prompt, then each token."""
        if self._is_prompt:
            self._is_prompt = False
            return
        text = self._tokenizer.decode(value.flatten().tolist())
        self._write(f"data: {json.dumps({'choices': [{'index': 0, 'text': text}]})}\n\n".encode())

    def end(self) -> None:
        """The end of the answer."""
        self._write(b"data: [DONE]\n\n")


class Handler(BaseHTTPRequestHandler):
    """One request."""

    model: PeftModel
    tokenizer: Any
    turn = threading.Lock()

    def do_GET(self) -> None:
        """There are no metrics."""
        self.send_response(404)
        self.end_headers()

    def do_POST(self) -> None:
        """A completion, streamed; or a batch."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        count = body["max_tokens"]
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        inputs = self.tokenizer([body["prompt"]] * len(body.get("models", "1")), return_tensors="pt")
        with self.turn, torch.no_grad():
            self.send_response(200)
            self.end_headers()
            if "models" in body:
                self.model.generate(**inputs, **options, adapter_names=body["models"])
                self.wfile.write(b"{}")
                return
            self.model.set_adapter(body["model"])
            self.model.generate(**inputs, **options, streamer=Lines(self.wfile.write, self.tokenizer))

    def log_message(self, *args: Any) -> None:
        """Nothing is logged."""


def main(model: str, adapters: str, *names: str) -> None:
    """Load everything, say the port on standard error, and serve."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    served = PeftModel.from_pretrained(base, Path(adapters) / names[0], adapter_name=names[0])
    for name in names[1:]:
        served.load_adapter(Path(adapters) / name, name)
    Handler.model, Handler.tokenizer = served.eval(), AutoTokenizer.from_pretrained(model)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.request_queue_size = 1000
    print(json.dumps({"port": server.server_address[1]}), file=sys.stderr, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
