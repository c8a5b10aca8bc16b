"""`hotslot serve` as a process: its flags, its models, its signals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from gguf_model import write_gguf
from serving import Running, save_model, settings, wait_for
from tiny import write_adapter

from hotslot.cli import build_parser, main
from hotslot.errors import PoolError
from hotslot.server.serve import listen, lora_modules, settings_of
from hotslot.server.service import Service, load_model

torch.set_num_threads(1)

PROMPT = "Once upon a time"
FLAGS = [
    "--max-model-len",
    "256",
    "--block-size",
    "8",
    "--num-blocks",
    "128",
    "--max-num-seqs",
    "8",
    "--max-num-batched-tokens",
    "64",
    "--max-lora-rank",
    "8",
    "--max-loras",
    "3",
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and two adapters."""
    folder = tmp_path_factory.mktemp("home")
    model = save_model(folder / "model")
    for seed, name in enumerate("ab"):
        write_adapter(model, folder / "adapters" / name, seed=seed)
    return folder


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


def test_sigterm_lets_running_requests_end_takes_no_new_ones_and_a_restart_serves_the_same_set(home: Path) -> None:
    arguments = (str(home / "model"), "--served-model-name", "base", "--lora", f"a={home}/adapters/a", f"b={home}/adapters/b")
    with served(*arguments) as first:
        before = {name: first.tokens(name) for name in ("base", "a", "b")}
        states = {model["id"]: model.get("state") for model in first.client.get("/v1/models").json()["data"]}
        assert states == {"base": None, "a": "resident", "b": "resident"}
        # A second connection, kept open: it is answered while the first drains.
        with httpx.Client(base_url=first.url, timeout=60) as other:
            other.get("/health")
            body = {"model": "a", "prompt": PROMPT, "max_tokens": 230, "ignore_eos": True, "stream": True}
            with first.client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                assert next(lines).startswith("data: ")
                first.process.send_signal(signal.SIGTERM)
                wait_for(lambda: first.fact("draining", "signal") == "SIGTERM", 10)
                ready = other.get("/ready")
                assert (ready.status_code, ready.json()["reason"]) == (503, "draining")
                refused = other.post("/v1/completions", json={"model": "a", "prompt": PROMPT})
                assert refused.status_code == 503 and "retry-after" in refused.headers
                rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert first.process.wait(30) == 0
    with served(*arguments) as second:
        assert {name: second.tokens(name) for name in before} == before
        assert second.end(signal.SIGINT) == 0


def test_secrets_come_from_the_environment_and_a_drain_that_takes_too_long_ends_all_the_same(home: Path) -> None:
    environment = {"HOTSLOT_ADMIN_TOKEN": "from-environment", "HOTSLOT_API_KEY": "the-key"}
    arguments = ("--adapter-root", str(home / "adapters"), "--drain-seconds", "0.2", "--served-model-name", "base")
    with served(str(home / "model"), *arguments, **environment) as process:
        body: dict[str, Any] = {"lora_name": "x", "lora_path": "a"}
        bearer = {"Authorization": "Bearer from-environment"}
        assert process.client.post("/v1/load_lora_adapter", json=body).status_code == 401
        assert process.client.post("/v1/load_lora_adapter", json=body, headers=bearer).status_code == 200
        assert process.client.get("/v1/models").status_code == 401
        body = {"model": "x", "prompt": PROMPT, "max_tokens": 240, "ignore_eos": True, "stream": True, "n": 8}
        with process.client.stream("POST", "/v1/completions", json=body, headers={"Authorization": "Bearer the-key"}) as response:
            lines = response.iter_lines()
            next(lines)
            process.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(httpx.TransportError):
                list(lines)
        assert process.process.wait(30) == 0
        assert "the-key" not in "".join(process.lines) and "from-environment" not in "".join(process.lines)


def test_a_gguf_file_is_served_as_the_model_that_it_was_made_from(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, home / "model")
    modules = {"a": str(home / "adapters" / "a")}
    found = []
    for model in (path, home / "model"):
        running = Running(Service.load(settings(model=str(model), served_model_name="base", lora_modules=modules)))
        found.append({name: running.tokens(name, [5, 6, 7, 8, 9], ignore_eos=True) for name in ("base", "a")})
        running.close()
    assert found[0] == found[1]


BAD = {
    "no_model": (["nowhere"], "cannot be loaded"),
    "no_adapter": (["MODEL", "--lora", "x=nowhere"], "nowhere"),
    "not_name_equals_folder": (["MODEL", "--lora", "justaname"], "expected NAME=FOLDER"),
    "bad_name": (["MODEL", "--lora", "a b=x"], "is no adapter name"),
    "root_missing": (["MODEL", "--adapter-root", "/nowhere"], "/nowhere"),
    "too_small": (["MODEL", "--num-blocks", "2"], "raise --num-blocks"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_served_ends_with_one_line_and_status_2(
    home: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hotslot.server.events.set_up_logging", lambda level: None)  # the tests' own stays
    arguments, message = BAD[name]
    arguments = [str(home / "model") if each == "MODEL" else each for each in arguments]
    flags = [] if name == "too_small" else FLAGS
    assert main(["serve", *arguments, *flags, "--port", "0", "--max-model-len", "256"]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("hotslot: ") and message in last


def test_a_port_that_is_taken_is_found_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hotslot.server.events.set_up_logging", lambda level: None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", "nowhere", "--port", str(taken.getsockname()[1])]) == 2
    assert "choose another --host or --port" in capsys.readouterr().err


def test_the_flags_that_vllm_has_too_have_its_names_and_forms() -> None:
    text = (
        "serve m --host 0.0.0.0 --port 1 --served-model-name s --max-loras 3 --max-lora-rank 32 --max-num-seqs 5 --dtype bfloat16 "
        "--max-model-len 99 --max-num-batched-tokens 77 --block-size 16 --num-gpu-blocks-override 40 --no-enable-prefix-caching "
        "--api-key k1 k2 --lora-modules a=/x"
    )
    given = [*text.split(), '{"name": "b", "path": "/y", "base_model_name": "m"}']
    made = settings_of(build_parser().parse_args(given))
    assert made.lora_modules == {"a": "/x", "b": "/y"}
    assert (made.max_loras, made.max_lora_rank, made.max_num_seqs, made.block_size, made.num_blocks) == (3, 32, 5, 16, 40)
    assert made.api_keys == ("k1", "k2") and not made.enable_prefix_caching and made.base_name == "s"


@pytest.mark.parametrize("given", [["=x"], ["a="], ["a"], ["{"], ['{"name": "a"}'], ['{"name": 5, "path": "x"}'], ["a=x", "a=y"]])
def test_lora_modules_that_are_none_are_refused(given: list[str]) -> None:
    with pytest.raises(PoolError):
        lora_modules(given)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_out_of_range_is_refused(port: int) -> None:
    with pytest.raises(PoolError, match="a port is 0 to 65535"):
        listen("127.0.0.1", port)


def test_a_device_that_there_is_not_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path)
    with pytest.raises(PoolError, match="--device 'foo' cannot be used"):
        load_model(settings(model=str(tmp_path), device="foo"))
