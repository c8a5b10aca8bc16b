"""`hotslot serve` as a process: its flags, its models, its signals."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from gguf_model import write_gguf
from serving import FLAGS, Running, save_model, served, settings, tiny_tokenizer, wait_for
from tiny import tiny_model, write_adapter

from hotslot.cli import build_parser, main
from hotslot.errors import PoolError
from hotslot.server.checkpoint import end_tokens, load_model, locate, model_length, num_tokens
from hotslot.server.serve import listen, lora_modules, settings_of
from hotslot.server.service import Service

torch.set_num_threads(1)

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and two adapters."""
    folder = tmp_path_factory.mktemp("home")
    model = save_model(folder / "model")
    for seed, name in enumerate("ab"):
        write_adapter(model, folder / "adapters" / name, seed=seed)
    write_adapter(tiny_model("qwen3"), folder / "other")
    return folder


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
    "later_adapter_missing": (["MODEL", "--max-loras", "1", "--lora", "a=ADAPTERS/a", "x=nowhere"], "nowhere"),
    "later_adapter_too_wide": (
        ["MODEL", "--max-loras", "1", "--max-lora-rank", "2", "--lora", "x=ADAPTERS/a", "y=ADAPTERS/b"],
        "rank 4",
    ),
    "later_adapter_of_another_model": (["MODEL", "--max-loras", "1", "--lora", "a=ADAPTERS/a", "x=OTHER"], "expected [64, 4]"),
    "longer_than_the_model": (["MODEL", "--max-model-len", "257"], "above the model's own limit of 256 tokens"),
    "no_folder_and_no_hub_id": (["./nowhere"], "there is no such folder, and it is no hub id"),
    "no_model_in_the_folder": (["ADAPTERS"], "no folder with a config.json"),
    "no_gguf": (["nowhere.gguf"], "there is no such file"),
    "cache_beyond_the_machine": (["MODEL", "--num-blocks", "2000000000"], "lower --num-blocks"),
    "nan_seconds": (["MODEL", "--drain-seconds", "nan"], "--drain-seconds is nan"),
    "empty_admin_token": (["MODEL", "--admin-token", ""], "the admin token has 0 characters"),
    "empty_peer_token": (["MODEL", "--peer-token", ""], "token"),
    # Found before the model is looked for.
    "open_to_strangers": (["nowhere", "--serve-peers", "0.0.0.0:0"], "nothing keeps strangers off"),
    "open_to_strangers_v6": (["nowhere", "--serve-peers", "[::]:0"], "nothing keeps strangers off"),
    "root_missing": (["MODEL", "--adapter-root", "/nowhere"], "/nowhere"),
    "too_small": (["MODEL", "--num-blocks", "2"], "raise --num-blocks"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_served_ends_with_one_line_and_status_2(
    home: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hotslot.server.events.set_up_logging", lambda level: None)  # the tests' own stays
    arguments, message = BAD[name]
    for word, folder in (("MODEL", "model"), ("ADAPTERS", "adapters"), ("OTHER", "other")):
        arguments = [each.replace(word, str(home / folder)) for each in arguments]
    flags = ["--max-model-len", "256"] if name == "too_small" else FLAGS
    assert main(["serve", *flags, "--port", "0", *arguments]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("hotslot: ") and message in last


NUMBERS = {
    "port": 65535,
    "max_loras": 65536,
    "max_lora_rank": 256,
    "extras_bytes": (1 << 48) - 1,
    "host_bytes": (1 << 48) - 1,
    "max_num_seqs": 65536,
    "max_num_batched_tokens": 1 << 20,
    "max_model_len": (1 << 31) - 1,
    "block_size": 4096,
    "num_blocks": (1 << 31) - 1,
    "max_queue": 1 << 20,
    "max_queue_per_adapter": 1 << 20,
    "max_body_bytes": 1 << 30,
    "max_n": 128,
    "load_threads": 64,
    "drain_seconds": 86400,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_has_a_range_and_is_refused_beyond_it(name: str) -> None:
    for value in (-1, NUMBERS[name] + 1, float("nan"), float("inf"), True, "1"):
        with pytest.raises(PoolError, match=name.removeprefix("extras_").replace("_", "-")):
            settings(**{name: value})


def test_every_number_that_the_command_line_takes_is_one_of_them() -> None:
    parser = build_parser()
    defaults = vars(parser.parse_args(["serve", "m"]))
    numbers = {name for name, value in defaults.items() if isinstance(value, (int, float)) and not isinstance(value, bool)}
    assert numbers | {"extras_bytes", "max_model_len", "num_blocks"} == NUMBERS.keys()


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 256}, 256),
        ({"n_positions": 1024}, 1024),
        ({}, None),
        ({"max_position_embeddings": 2048, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}, 8192),
        ({"max_position_embeddings": 2048, "rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, 2048),
        (
            {
                "max_position_embeddings": 40960,
                "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
    ],
)
def test_the_models_limit_is_that_of_its_config_stretched_as_its_rope_is(config: dict[str, Any], length: int | None) -> None:
    assert model_length(SimpleNamespace(**config)) == length


def test_a_hub_that_does_not_answer_is_said_at_once_and_a_model_in_the_cache_is_served(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A real connection that is refused; what transformers would do by itself is try again for most of a minute."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:1/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(PoolError, match="cannot be reached"):
        locate("somebody/something")
    kept = tmp_path / "models--somebody--something"
    (kept / "snapshots" / "abc").mkdir(parents=True)
    (kept / "snapshots" / "abc" / "config.json").write_text("{}")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("abc")
    with monkeypatch.context() as inner:
        from huggingface_hub import try_to_load_from_cache

        inner.setattr("huggingface_hub.try_to_load_from_cache", partial(try_to_load_from_cache, cache_dir=tmp_path))
        assert locate("somebody/something") == ("somebody/something", {"local_files_only": True})


def test_an_end_of_sequence_that_the_model_cannot_give_is_none() -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = [2, 5, 128, 100_000, -1]
    assert num_tokens(model) == 128
    assert end_tokens(model, tiny_tokenizer(), 128) == {2, 5}


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


def test_settings_do_not_show_their_secrets() -> None:
    shown = repr(settings(admin_token="secret-token", api_keys=("secret-key",), peer_token="secret-peer"))
    assert "secret" not in shown
