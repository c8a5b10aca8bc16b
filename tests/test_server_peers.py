"""Servers that get adapters from one another: two processes, and within one process all that can go wrong."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import PROMPT, Process, Running, save_model, served, serving, wait_for
from tiny import peft_alone, tiny_model, write_adapter

from hotslot.errors import PoolError

torch.set_num_threads(1)

NOBODY = "127.0.0.1:1"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and three adapters."""
    folder = tmp_path_factory.mktemp("home")
    model = save_model(folder / "model")
    for seed, name in enumerate("abc"):
        write_adapter(model, folder / "adapters" / name, seed=seed)
    return folder


@contextmanager
def exporting(home: Path, names: str = "ab", **options: Any) -> Iterator[Running]:
    """A server with adapters that others can read; its address for them is `service.exports.address`."""
    modules = {name: str(home / "adapters" / name) for name in names}
    with serving(tiny_model(), lora_modules=modules, max_loras=3, serve_peers="127.0.0.1:0", **options) as running:
        yield running


def listed(server: Running | Process) -> dict[str, dict[str, Any]]:
    return {model["id"]: model for model in server.client.get("/v1/models").json()["data"]}


def alone(home: Path, name: str, count: int = 8) -> list[int]:
    """The same request alone, through transformers' generate with PEFT."""
    from serving import tiny_tokenizer

    ids = torch.tensor([tiny_tokenizer()(PROMPT)["input_ids"]])
    out = peft_alone(tiny_model(), home / "adapters" / name).generate(
        input_ids=ids, max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return out[0, ids.shape[1] :].tolist()


def test_a_process_without_a_folder_serves_what_another_process_has_and_outlives_it(home: Path) -> None:
    model, token = str(home / "model"), {"HOTSLOT_PEER_TOKEN": "between-us"}
    adapters = [f"{name}={home}/adapters/{name}" for name in "ab"]
    dtype = ("--lora-dtype", "float32", "--served-model-name", "base")
    with served(model, "--lora", *adapters, "--serve-peers", "127.0.0.1:0", *dtype, **token) as first:
        address = first.fact("serving peers", "address")
        # One that is down stands before the one that is up.
        with served(model, "--peer", NOBODY, f"http://{address}", *dtype, **token) as second:
            models = listed(second)
            assert {name: models[name]["source"] for name in "ab"} == {"a": "peer", "b": "peer"}
            assert models["a"]["state"] == "registered" and models["a"]["parent"] == "base"
            assert models["a"]["digest"] == listed(first)["a"]["digest"]
            assert second.tokens("a") == alone(home, "a") != alone(home, "b")
            assert listed(second)["a"]["state"] == "resident"
            missing = second.client.post("/v1/completions", json={"model": "x", "prompt": PROMPT})
            assert missing.status_code == 404 and "'a', 'b'" in missing.json()["error"]["message"]
            peers = second.client.get("/slots").json()["peers"]
            assert [(peer["address"], peer["failure"] is None) for peer in peers] == [(NOBODY, False), (address, True)]
            first.process.send_signal(signal.SIGKILL)
            first.process.wait(30)
            assert second.tokens("a") == alone(home, "a")
            lost = second.client.post("/v1/completions", json={"model": "b", "prompt": PROMPT})
            assert lost.status_code == 503 and "retry-after" in lost.headers and address in lost.json()["error"]["message"]
            assert second.client.get("/health").status_code == second.client.get("/ready").status_code == 200
            assert second.end() == 0


def test_what_was_fetched_comes_back_from_the_nearer_tiers_without_the_peer(home: Path, tmp_path: Path) -> None:
    for tier in ({"host_bytes": 1 << 24}, {"disk_cache": str(tmp_path)}):
        with exporting(home) as first:
            peers = (first.service.exports.address,)
            with serving(tiny_model(), peers=peers, max_loras=1, **tier) as second:
                expected = {name: second.tokens(name, PROMPT) for name in "ab"}
                assert expected == {name: first.tokens(name, PROMPT) for name in "ab"}
                sent = first.service.exports.stats().bytes_sent
                assert second.tokens("a", PROMPT) == expected["a"]  # evicted by b before
                assert first.service.exports.stats().bytes_sent - sent < 10_000  # a manifest, and no weights
                first.close()
                assert [second.tokens(name, PROMPT) for name in "ba"] == [expected["b"], expected["a"]]


def test_an_adapter_that_a_peer_loads_or_replaces_later_is_found_and_is_the_new_one(home: Path) -> None:
    with (
        exporting(home, "a", adapter_root=str(home / "adapters")) as first,
        serving(tiny_model(), peers=(first.service.exports.address,), max_loras=1) as second,
    ):
        assert second.completion("late", PROMPT).status_code == 404
        assert first.load("late", "b").status_code == 200
        assert second.tokens("late", PROMPT) == alone(home, "b", 12)
        assert first.load("late", "c", load_inplace=True).status_code == 200
        assert second.tokens("late", PROMPT) == alone(home, "b", 12)  # resident: as it was
        second.tokens("a", PROMPT)  # takes the only slot
        assert second.tokens("late", PROMPT) == alone(home, "c", 12)


def test_a_name_of_ones_own_comes_before_a_peers_and_an_unloaded_one_stays_away(home: Path) -> None:
    with exporting(home) as first:
        options = {"peers": (first.service.exports.address,), "adapter_root": str(home / "adapters"), "max_loras": 2}
        with serving(tiny_model(), lora_modules={"a": str(home / "adapters" / "c")}, **options) as second:
            assert second.tokens("a", PROMPT) == alone(home, "c", 12)
            assert listed(second)["b"]["source"] == "folder"
        options.pop("adapter_root")
        with serving(tiny_model(), **options) as second:
            assert second.tokens("a", PROMPT)
            assert second.unload("a").status_code == 200
            assert second.completion("a", PROMPT).status_code == 404
            assert "a" not in listed(second) and "b" in listed(second)
            assert second.unload("a").status_code == 404
            assert first.tokens("a", PROMPT)


@pytest.mark.parametrize("peers", [(NOBODY,), ("192.0.2.1:7070",)])
def test_peers_that_are_down_hold_up_nobody(home: Path, peers: tuple[str, ...]) -> None:
    """One refuses connections, the other (an address for documentation) lets packets vanish or has no route."""
    with serving(tiny_model(), peers=peers, adapter_root=str(home / "adapters")) as server:
        assert server.tokens("a", PROMPT) == alone(home, "a", 12)
        response = server.completion("nobody", PROMPT)
        assert response.status_code == 404 and "'a'" in response.json()["error"]["message"]
        assert response.elapsed.total_seconds() < 10


def test_a_peer_wants_its_token_and_tells_nothing_without_it(home: Path) -> None:
    with exporting(home, peer_token="right") as first:
        address = first.service.exports.address
        for token, status in (("right", 200), ("wrong", 404), (None, 404)):
            with serving(tiny_model(), peers=(address,), peer_token=token) as second:
                assert second.completion("a", PROMPT).status_code == status
                assert ("a" in listed(second)) == (status == 200)


def test_an_adapter_that_does_not_fit_here_is_400_and_leaves_no_trace(home: Path) -> None:
    write_adapter(tiny_model(), home / "wide", seed=5, r=8)
    with (
        serving(tiny_model(), lora_modules={"wide": str(home / "wide")}, max_lora_rank=8, serve_peers="127.0.0.1:0") as first,
        serving(tiny_model(), peers=(first.service.exports.address,), max_lora_rank=4) as second,
    ):
        response = second.completion("wide", PROMPT)
        assert response.status_code == 400 and "rank" in response.json()["error"]["message"]
        wait_for(second.is_at_rest)
        assert {info.state for info in second.service.lora.slots()} == {"empty"}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")
def test_with_certificates_only_those_of_the_authority_are_served(home: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=tmp_path, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    (tmp_path / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    run("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ours", "-days", "2")
    run("req", *curve, "-keyout", "own.key", "-out", "own.csr", "-subj", "/CN=peer")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
    run("x509", "-req", "-in", "own.csr", *signed, "-out", "own.pem")
    run("req", "-x509", *curve, "-keyout", "other.key", "-out", "other.pem", "-subj", "/CN=stranger", "-days", "2")
    ours = {f"peer_{part}": str(tmp_path / file) for part, file in (("ca", "ca.pem"), ("cert", "own.pem"), ("key", "own.key"))}
    stranger = ours | {"peer_cert": str(tmp_path / "other.pem"), "peer_key": str(tmp_path / "other.key")}
    with exporting(home, **ours) as first:
        peers = (first.service.exports.address,)
        with serving(tiny_model(), peers=peers, **ours) as second:
            assert second.tokens("a", PROMPT) == first.tokens("a", PROMPT)
        for options in (stranger, {}):
            with serving(tiny_model(), peers=peers, **options) as second:
                assert second.completion("a", PROMPT).status_code == 404


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peers": ("nonsense",)}, "not host:port"),
        ({"serve_peers": "nonsense"}, "expected HOST:PORT"),
        ({"serve_peers": "0.0.0.0:0"}, "nothing keeps strangers off"),
        ({"serve_peers": "[::ffff:10.0.0.7]:0"}, "nothing keeps strangers off"),
        ({"peer_cert": "x"}, "belong together"),
        ({"serve_peers": "127.0.0.1:0", "peer_ca": __file__}, "served without TLS"),
        ({"peers": ("127.0.0.1:1",), "peer_cert": __file__, "peer_key": __file__}, "asked without TLS"),
        ({"peer_ca": "/nowhere"}, "is no file"),
        ({"peer_token": "two words"}, "visible ASCII"),
    ],
)
def test_options_of_peers_that_cannot_be_meant_are_refused_at_start(options: dict[str, Any], message: str) -> None:
    from hotslot.errors import PeerError

    with pytest.raises((PoolError, PeerError), match=message), serving(tiny_model(), **options):
        pass


def test_a_folder_that_appears_in_the_root_takes_the_place_of_what_a_peer_sent(home: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with exporting(home) as first, serving(tiny_model(), peers=(first.service.exports.address,), adapter_root=str(root)) as second:
        assert second.tokens("a", PROMPT, max_tokens=8) == alone(home, "a")
        shutil.copytree(home / "adapters" / "c", tmp_path / "beside")
        (tmp_path / "beside").rename(root / "a")
        wait_for(lambda: second.tokens("a", PROMPT, max_tokens=8) == alone(home, "c") != alone(home, "a"), 30)
        assert second.tokens("b", PROMPT, max_tokens=8) == alone(home, "b")
