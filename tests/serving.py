"""A small model with a tokenizer and a chat template, in a folder, and a server of it: for the server's tests."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import torch
import uvicorn
from tiny import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hotslot.server.app import build_app
from hotslot.server.connection import configure
from hotslot.server.service import Service
from hotslot.server.settings import Settings

# transformers collects all garbage when an engine stops; what was imported by now is none, and takes it a second each time.
gc.freeze()
atexit.register(gc.unfreeze)

# One token for each; the rest of the 128 are words of their own.
_CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:;!?-_/<>|'\"\n"
FLAGS = [
    *("--max-model-len", "256", "--block-size", "8", "--num-blocks", "128", "--max-num-seqs", "8"),
    *("--max-num-batched-tokens", "64", "--max-lora-rank", "8", "--max-loras", "3"),
]
PROMPT = "Once upon a time"
TEMPLATE = (
    "{% for message in messages %}{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}|{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """128 tokens: three special ones, one for each of some characters, the others for what no text has."""
    words = ["<pad>", "<bos>", "<eos>", *_CHARACTERS]
    words += [chr(0x4E00 + index) for index in range(128 - len(words))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    made.chat_template = TEMPLATE
    return made


def save_model(folder: Path) -> torch.nn.Module:
    """The tiny Llama with its tokenizer in a folder; the model."""
    model = tiny_model()
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


def settings(**options: Any) -> Settings:
    """Small settings for a tiny model."""
    defaults: dict[str, Any] = {
        "model": "tiny",
        "port": 0,
        "max_loras": 2,
        "max_lora_rank": 8,
        "pool_dtype": "float32",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
        "block_size": 8,
        "num_blocks": 128,
        "admin_token": "admin-token",
    }
    return Settings(**(defaults | options))


class Running:
    """A server on a free port of this machine.

    Attributes:
        service: What it serves.
        url: Where.
        client: An HTTP client for it, with the admin token.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server = uvicorn.Server(configure(build_app(service)))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))
        self._thread.start()
        wait_for(lambda: self._server.started or not self._thread.is_alive())
        self.client = httpx.Client(base_url=self.url, timeout=60, headers={"Authorization": "Bearer admin-token"})

    def close(self) -> None:
        """Stop it."""
        self.client.close()
        self._server.should_exit = True
        self._thread.join(60)
        self._socket.close()
        if self._thread.is_alive():
            faulthandler.dump_traceback(all_threads=True)
            raise AssertionError("the server does not stop")

    def completion(self, model: str, prompt: Any, **options: Any) -> httpx.Response:
        """POST /v1/completions, greedy unless asked otherwise."""
        body = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0, "return_token_ids": True} | options
        return self.client.post("/v1/completions", json=body)

    def tokens(self, model: str, prompt: Any, **options: Any) -> list[int]:
        """The token ids of a completion."""
        response = self.completion(model, prompt, **options)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["token_ids"]

    def load(self, name: str, path: Any, **options: Any) -> httpx.Response:
        """POST /v1/load_lora_adapter."""
        return self.client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)} | options)

    def unload(self, name: str) -> httpx.Response:
        """POST /v1/unload_lora_adapter."""
        return self.client.post("/v1/unload_lora_adapter", json={"lora_name": name})

    def is_at_rest(self) -> bool:
        """Whether nothing runs, waits or is held."""
        service = self.service
        return service.admission.is_idle() and all(info.ref_count == 0 for info in service.lora.slots())


@contextlib.contextmanager
def serving(model: torch.nn.Module, **options: Any) -> Iterator[Running]:
    """A running server of a model; stopped, and checked to hold nothing, at the end."""
    running = Running(Service(settings(**options), model, tiny_tokenizer()))
    try:
        yield running
    finally:
        running.close()


def wait_for(condition: Any, seconds: float = 20.0) -> None:
    """Wait until a condition holds.

    Raises:
        AssertionError: It does not.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.005)


class Process:
    """A running `hotslot serve`; its log lines are read as they come."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        command = [sys.executable, "-m", "hotslot", "serve", *arguments, *FLAGS, "--port", "0"]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1", **environment}
        )
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        wait_for(lambda: self.fact("serving", "port") is not None or self.process.poll() is not None, 200)
        assert self.process.poll() is None, self.lines
        self.url = f"http://127.0.0.1:{self.fact('serving', 'port')}"
        self.client = httpx.Client(base_url=self.url, timeout=60)
        wait_for(self._answers, 60)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self.client.get("/ready").status_code == 200
        return False

    def fact(self, message: str, key: str) -> Any:
        for line in self.lines:
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if found.get("message") == message:
                    return found.get(key)
        return None

    def tokens(self, model: str, **options: Any) -> list[int]:
        body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True} | options
        response = self.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["token_ids"]

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.client.close()
        self.process.send_signal(how)
        return self.process.wait(60)


@contextlib.contextmanager
def served(*arguments: str, **environment: str) -> Iterator[Process]:
    made = Process(*arguments, **environment)
    try:
        yield made
    finally:
        made.client.close()
        if made.process.poll() is None:
            made.process.kill()
            made.process.wait(30)
        made.reader.join(10)
        made.process.stderr.close()
