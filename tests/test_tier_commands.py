"""`hotslot pull`, `ls` and `peer`: what they show, and what they refuse."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_extras import write
from test_tiers import attached, output, without_origin
from tiny import tiny_model, write_adapter

import hotslot
from hotslot import Tiers, copying
from hotslot.cli import main
from hotslot.folder import identity_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_model()


@pytest.fixture(scope="module")
def folders(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("commands")
    embedding = {"modules_to_save": ["lm_head"], "trainable_token_indices": [5, 40, 99]}
    return {
        "plain": write_adapter(model, root / "plain", seed=1),
        "dora": write(model, root / "dora", 2, use_dora=True),
        "saved": write(model, root / "saved", 3, **embedding),
    }


@pytest.fixture
def server(model: torch.nn.Module, folders: dict[str, Path]):
    lora = attached(model, Tiers(host_bytes=64 << 20), max_loras=3)
    for name, folder in folders.items():
        lora.load(folder, name)
        lora.cache_id(name)
    with lora.serve_peers() as server:
        yield lora, server
    lora.detach()


def test_ls_shows_a_peers_tiers_sizes_and_digests(server, capsys) -> None:
    lora, served = server
    assert main(["ls", served.address]) == 0
    shown = capsys.readouterr().out
    for name in ("plain", "dora", "saved"):
        (line,) = [line for line in shown.splitlines() if line.startswith(name)]
        assert lora.cache_id(name)[:16] in line and re.search(r"(device|host) +\d+\.\d", line)
    assert "3 adapters" in shown
    assert main(["ls", served.address, "--json"]) == 0
    told = {it["adapter"]: it for it in json.loads(capsys.readouterr().out)}
    assert told["dora"]["cache_id"] == lora.cache_id("dora") and told["dora"]["layout"] == lora.weights.layout_id


@pytest.mark.parametrize("name", ["plain", "dora", "saved"])
def test_pull_fills_a_cache_that_a_pool_then_loads_from(name: str, server, model, folders, tmp_path: Path, capsys) -> None:
    lora, served = server
    cache = tmp_path / "cache"
    assert main(["pull", served.address, name, "--to", str(cache)]) == 0
    shown = capsys.readouterr().out
    assert lora.cache_id(name) in shown and lora.weights.layout_id in shown and "verified" in shown
    assert main(["ls", str(cache)]) == 0
    assert lora.cache_id(name)[:16] in capsys.readouterr().out
    other = attached(model, Tiers(disk=cache))
    other._digests.remember(identity_of(folders[name]), lora.cache_id(name))
    with without_origin(folders[name]):
        other.load(folders[name], name)
    assert torch.equal(output(other, name), output(lora, name))
    other.detach()


def test_what_cannot_be_done_is_said_and_leaves_nothing(server, tmp_path: Path, capsys) -> None:
    _, served = server
    for arguments, says in {
        ("pull", served.address, "unknown", "--to", str(tmp_path / "cache")): "unknown",
        ("pull", "nonsense", "x", "--to", str(tmp_path / "cache")): "host:port",
        ("pull", served.address, "a b", "--to", str(tmp_path / "cache")): "name",
        ("ls", str(tmp_path / "nowhere")): "neither",
        ("pull", served.address, "x", "--to", str(tmp_path / "cache"), "--disk-bytes", "-5"): "disk_bytes",
        ("pull", served.address, "x", "--to", str(tmp_path / "cache"), "--disk-bytes", "0"): "disk_bytes",
        ("ls", served.address, "--key", "/k"): "--cert",
        ("peer", str(tmp_path), "x=/a", "--client-ca", "/ca"): "--cert",
        ("ls", served.address, "--token-file", str(tmp_path / "nowhere")): "token file",
        ("peer", str(tmp_path), "x=/nowhere"): "config.json",
        ("peer", str(tmp_path), "x=/a", "x=/b"): "two adapters",
    }.items():
        assert main(list(arguments)) == 2, arguments
        said = capsys.readouterr().err
        assert said.startswith("hotslot: ") and says in said, said
    assert not list((tmp_path / "cache").glob("*.packed*")) if (tmp_path / "cache").exists() else True


def test_a_token_of_the_environment_or_a_file_is_presented(model, folders, tmp_path: Path, monkeypatch, capsys) -> None:
    lora = attached(model, Tiers(host_bytes=64 << 20))
    lora.load(folders["plain"], "plain")
    token = tmp_path / "token"
    token.write_text("right\n")
    with lora.serve_peers(token="right") as served:
        assert main(["ls", served.address]) == 2
        assert main(["ls", served.address, "--token-file", str(token)]) == 0
        monkeypatch.setenv("HOTSLOT_PEER_TOKEN", "right")
        assert main(["ls", served.address]) == 0
    assert "right" not in capsys.readouterr().err
    lora.detach()


def test_peer_serves_folders_until_it_is_told_to_end(model, folders, tmp_path: Path, capsys) -> None:
    model.save_pretrained(tmp_path / "base")
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "hotslot",
        "peer",
        str(tmp_path / "base"),
        str(folders["plain"]),
        f"x={folders['dora']}",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        address = lines[-1].rpartition(" ")[2].strip()
        assert lines[0].startswith("plain  ") and "hs1:" in lines[0] and "serving 2 adapters" in lines[-1]
        assert main(["ls", address]) == 0
        assert "2 adapters" in capsys.readouterr().out
        lora = attached(model)
        lora.promote_lora_from_peer(address, "x", "x", hotslot.PeftAdapterConfig(r=4, lora_alpha=8))
        lora.detach()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()


def test_a_long_copy_shows_how_far_it_is(monkeypatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, pause in ((Terminal(), "_TERMINAL_SECONDS"), (io.StringIO(), "_FILE_SECONDS")):
        monkeypatch.setattr(copying, pause, 0.005)
        seen = iter(range(0, 10**9, 10**7))
        with copying.shown("sql", 10**9, lambda seen=seen: next(seen), stream):
            while stream.getvalue().count("MB/s") < 3:
                pass
        assert re.search(r"sql  \d+\.\d of 1000\.0 MB  \d+ %", stream.getvalue())
        assert stream.getvalue().endswith("\x1b[K" if stream.isatty() else "\n")
