"""Names and paths: what may be loaded, by whom, and what a refused load leaves behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import Running, serving, tiny_tokenizer, wait_for
from tiny import peft_alone, tiny_model, write_adapter

from hotslot.errors import PoolError
from hotslot.server.problems import Problem
from hotslot.server.sources import Sources

torch.set_num_threads(1)

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("root")
    model = tiny_model()
    for seed, name in enumerate(("a", "b", "team/c")):
        write_adapter(model, folder / name, seed=seed)
    return folder


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tiny_model(), tmp_path_factory.mktemp("outside") / "secret", seed=9)


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Running]:
    with serving(tiny_model(), adapter_root=str(root), max_loras=2) as running:
        yield running


def state(server: Running) -> Any:
    service = server.service
    slots = [(info.name, info.state, info.ref_count, info.last_used, info.generation) for info in service.lora.slots()]
    return slots, service.sources.all(), service.admission.states(), sorted(service.lora.reports)


BAD_NAMES = [
    "",
    " ",
    "a b",
    "a,b",
    "../a",
    "a/../b",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "a/.",
    "-a",
    "é",
    "a\n",
    "x" * 129,
    "a\0b",
    "hs1:base",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_outside_the_safe_set_are_400_and_change_nothing(server: Running, name: str) -> None:
    before = state(server)
    response = server.load(name, "a")
    assert response.status_code == 400, response.text
    assert "lora_name" in (response.json()["error"]["param"] or response.json()["error"]["message"])
    assert state(server) == before


@pytest.mark.parametrize("path", ["/etc", "..", "../outside", "a/../..", "/", "team/../../x"])
def test_paths_out_of_the_root_are_403(server: Running, path: str) -> None:
    before = state(server)
    response = server.load("x", path)
    assert response.status_code == 403
    assert "out of the adapter root" in response.json()["error"]["message"]
    assert state(server) == before


@pytest.mark.parametrize("path", ["nothing", "a/adapter_config.json", "a\0b", " ", "team", "a" * 300])
def test_paths_that_are_no_adapter_are_400(server: Running, path: str) -> None:
    before = state(server)
    assert server.load("x", path).status_code == 400
    assert state(server) == before


def test_links_out_of_the_root_are_refused_as_folder_and_as_file(server: Running, root: Path, outside: Path) -> None:
    (root / "linked").symlink_to(outside)
    partly = root / "partly"
    partly.mkdir()
    shutil.copy(root / "a" / "adapter_config.json", partly)
    (partly / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    try:
        before = state(server)
        for name in ("linked", "partly"):
            assert server.load("x", name).status_code == 403
        assert server.completion("linked", PROMPT).status_code == 404
        assert server.completion("partly", PROMPT).status_code == 403
        wait_for(lambda: state(server) == before)
    finally:
        (root / "linked").unlink()
        shutil.rmtree(partly)


def test_links_within_the_root_are_followed(server: Running, root: Path) -> None:
    (root / "alias").symlink_to(root / "a")
    try:
        assert server.tokens("alias", PROMPT) == server.tokens("a", PROMPT)
    finally:
        (root / "alias").unlink()


def test_a_folder_that_appears_is_served_and_one_that_goes_is_not(server: Running, root: Path) -> None:
    assert server.completion("late", PROMPT).status_code == 404
    shutil.copytree(root / "b", root / "late")
    assert server.tokens("late", PROMPT) == server.tokens("b", PROMPT)
    assert "late" in [model["id"] for model in server.client.get("/v1/models").json()["data"]]
    shutil.rmtree(root / "late")
    assert server.unload("late").status_code in (200, 404)
    assert server.tokens("a", PROMPT) and server.tokens("b", PROMPT)  # both slots
    assert server.completion("late", PROMPT).status_code == 404


def broken(folder: Path, root: Path, kind: str) -> None:
    """An adapter with something wrong."""
    shutil.copytree(root / "a", folder)
    config = folder / "adapter_config.json"
    weights = folder / "adapter_model.safetensors"
    if kind == "config_is_no_json":
        config.write_text("{")
    elif kind == "no_weights":
        weights.unlink()
    elif kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif kind == "rank_too_large":
        shutil.rmtree(folder)
        write_adapter(tiny_model(), folder, r=16)
    elif kind == "another_model":
        shutil.rmtree(folder)
        write_adapter(tiny_model("qwen3"), folder)
    elif kind == "not_finite":
        raw = bytearray(weights.read_bytes())
        raw[-4:] = b"\x00\x00\xc0\x7f"
        weights.write_bytes(raw)
    elif kind == "another_type":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"peft_type": "IA3"}))
    elif kind == "needs_room":
        shutil.rmtree(folder)
        write_adapter(tiny_model(), folder, use_dora=True)


@pytest.mark.parametrize(
    "kind",
    ["config_is_no_json", "no_weights", "truncated", "rank_too_large", "another_model", "not_finite", "another_type", "needs_room"],
)
@pytest.mark.parametrize("how", ["by_call", "in_place", "on_first_use"])
def test_a_broken_adapter_is_400_with_the_loaders_words_and_leaves_no_trace(
    server: Running, root: Path, kind: str, how: str
) -> None:
    folder = root / "broken"
    broken(folder, root, kind)
    try:
        if how == "in_place":
            assert server.load("victim", "b").status_code == 200
            expected = server.tokens("victim", PROMPT)
        before = state(server)
        if how == "on_first_use":
            response = server.completion("broken", PROMPT)
        else:
            response = server.load("x" if how == "by_call" else "victim", "broken", load_inplace=how == "in_place")
        assert response.status_code == 400, response.text
        assert len(response.json()["error"]["message"]) > 30
        wait_for(server.is_at_rest)
        after = state(server)
        assert after[1:] == before[1:]
        assert [slot[:3] for slot in after[0]] == [slot[:3] for slot in before[0]]
        if how == "in_place":
            assert server.tokens("victim", PROMPT) == expected
            assert server.unload("victim").status_code == 200
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_a_loaded_adapter_can_be_unloaded_and_loaded_again(server: Running) -> None:
    for _ in range(2):
        assert server.load("y", "team/c").status_code == 200
        assert server.load("y", "team/c").status_code == 409
        assert server.tokens("y", PROMPT) == server.tokens("team/c", PROMPT)
        assert server.unload("y").status_code == 200
        response = server.unload("y")
        assert response.status_code == 404
        assert "loaded are" in response.json()["error"]["message"]


def test_a_name_of_the_root_that_was_unloaded_stays_away_until_it_is_loaded_again(server: Running) -> None:
    assert server.tokens("b", PROMPT)
    assert server.unload("b").status_code == 200
    assert server.completion("b", PROMPT).status_code == 404
    assert server.load("b", "b").status_code == 200
    assert server.tokens("b", PROMPT)


def test_the_base_models_name_is_taken(server: Running) -> None:
    assert server.load("tiny", "a").status_code == 409
    with pytest.raises(Problem, match="base model's name"):
        Sources("tiny", {"tiny": "x"}, None)


# --- who may -----------------------------------------------------------------------------------------------------------------


def test_management_is_off_without_an_admin_token(root: Path) -> None:
    with serving(tiny_model(), adapter_root=str(root), admin_token=None) as running:
        for response in (running.load("x", "a"), running.unload("a")):
            assert response.status_code == 403
            assert "--admin-token" in response.json()["error"]["message"]


def test_management_asks_for_the_admin_token_and_not_for_a_key(root: Path) -> None:
    with serving(tiny_model(), adapter_root=str(root), api_keys=("key-one", "key-two")) as running:
        body = {"lora_name": "x", "lora_path": "a"}
        for given in ("", "Bearer", "Bearer key-one", "Basic admin-token", "Bearer admin-token2", "Bearer ADMIN-TOKEN"):
            response = running.client.post("/v1/load_lora_adapter", json=body, headers={"Authorization": given})
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
        assert running.client.post("/v1/load_lora_adapter", json=body).status_code == 200


def test_api_keys_guard_what_tells_or_computes_something(root: Path) -> None:
    with serving(tiny_model(), adapter_root=str(root), api_keys=("key-one", "key-two")) as running:
        paths = [
            ("POST", "/v1/completions"),
            ("POST", "/v1/chat/completions"),
            ("GET", "/v1/models"),
            ("GET", "/v1/models/a"),
            ("GET", "/slots"),
        ]
        for method, path in paths:
            for given in ("", "Bearer nonsense", "Bearer key-on"):
                response = running.client.request(method, path, headers={"Authorization": given})
                assert response.status_code == 401, path
                assert response.json()["error"]["code"] == "invalid_api_key"
        for key in ("key-one", "key-two"):
            assert running.client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        for path in ("/", "/health", "/ready", "/metrics", "/page/page.js"):
            assert running.client.get(path, headers={"Authorization": ""}).status_code == 200


def test_without_a_root_nothing_is_loaded_by_path() -> None:
    with serving(tiny_model()) as running:
        response = running.load("x", "/tmp")
        assert response.status_code == 403
        assert "--adapter-root" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "max-num-seqs is 0; expected an integer, at least 1"),
        ({"max_num_batched_tokens": 4}, "below --max-num-seqs 8"),
        ({"admin_token": "short"}, "at least 8"),
        ({"api_keys": ("",)}, "empty"),
        ({"num_blocks": 4}, "raise --num-blocks"),
        ({"lora_modules": {"a b": "x"}}, "no adapter name"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_at_start(options: dict[str, Any], message: str) -> None:
    with pytest.raises((PoolError, Problem), match=message), serving(tiny_model(), **options):
        pass


def test_an_evicted_adapter_comes_back_from_the_host_tier_with_the_same_answer(root: Path, tmp_path: Path) -> None:
    with serving(tiny_model(), adapter_root=str(root), max_loras=1, host_bytes=1 << 24, disk_cache=str(tmp_path)) as running:
        first = [running.tokens(name, PROMPT) for name in ("a", "b")]
        assert [running.tokens(name, PROMPT) for name in ("a", "b")] == first
        residency = running.service.lora.residency()
        assert residency["resident"] == ["b"]
        assert len(residency["host"]) == 2
    assert any(path.is_file() for path in tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
def test_startup_adapters_that_wait_for_a_slot_have_room_for_all_that_they_hold(root: Path, tmp_path: Path) -> None:
    """Only the first gets a slot of its own; the pool has room for what the other brings: gains, and pairs for the head."""
    model = tiny_model()
    dora = write_adapter(model, tmp_path / "dora", seed=4, use_dora=True, target_modules=["q_proj", "lm_head"])
    modules = {"a": str(root / "a"), "b": str(root / "b"), "dora": str(dora)}
    ids = torch.tensor([tiny_tokenizer()(PROMPT)["input_ids"]])
    expected = peft_alone(model, dora).generate(input_ids=ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    with serving(model, lora_modules=modules, max_loras=2) as server:
        assert [info.pinned for info in server.service.lora.slots()] == [True, False]
        assert server.tokens("dora", PROMPT) == expected[0, ids.shape[1] :].tolist()
    with (
        pytest.raises(PoolError, match="expected at most extras_bytes=16"),
        serving(model, lora_modules=modules, max_loras=2, extras_bytes=16),
    ):
        pass


# --- the root is watched -------------------------------------------------------------------------------------------------------


def test_weights_that_are_replaced_in_the_root_are_served_and_bad_ones_never(tmp_path: Path, root: Path) -> None:
    with serving(tiny_model(), adapter_root=str(tmp_path), max_loras=2) as server:
        shutil.copytree(root / "a", tmp_path / "x")
        old, new = server.tokens("x", PROMPT), None
        (tmp_path / "x" / "adapter_model.safetensors").write_bytes(b"no weights")
        wait_for(lambda: [each["kind"] for each in server.client.get("/slots").json()["events"]].count("refused") == 1)
        assert server.tokens("x", PROMPT) == old
        shutil.copy(root / "b" / "adapter_model.safetensors", tmp_path / "x" / "next")
        (tmp_path / "x" / "next").replace(tmp_path / "x" / "adapter_model.safetensors")
        wait_for(lambda: server.tokens("x", PROMPT) != old)
        new = server.tokens("x", PROMPT)
        shutil.copytree(tmp_path / "x", tmp_path / "y")
        assert server.tokens("y", PROMPT) == new


def test_weights_that_find_no_slot_for_now_are_tried_again(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotslot.server.service._INPLACE_SECONDS", 0)
    shutil.copytree(root / "a", tmp_path / "x")
    with serving(tiny_model(), adapter_root=str(tmp_path), max_loras=1) as server:
        old, tries, replace = server.tokens("x", PROMPT), [], server.service.replace
        monkeypatch.setattr(server.service, "replace", lambda *given: (tries.append(given), replace(*given))[1])
        with server.service.lora.lease("x"):
            shutil.copy(root / "b" / "adapter_model.safetensors", tmp_path / "x" / "next")
            (tmp_path / "x" / "next").replace(tmp_path / "x" / "adapter_model.safetensors")
            wait_for(lambda: len(tries) >= 2)
            assert server.service.lora.weights.slot_of("x") is not None
        wait_for(lambda: server.tokens("x", PROMPT) != old)
        shutil.copytree(tmp_path / "x", tmp_path / "y")
        assert server.tokens("y", PROMPT) == server.tokens("x", PROMPT)


def test_an_adapter_that_is_removed_from_the_root_is_served_no_more_and_running_rows_end(tmp_path: Path, root: Path) -> None:
    shutil.copytree(root / "a", tmp_path / "x")
    with serving(tiny_model(), adapter_root=str(tmp_path), max_loras=2) as server:
        assert server.tokens("x", PROMPT)
        shutil.rmtree(tmp_path / "x")
        wait_for(lambda: server.completion("x", PROMPT).status_code == 404)
        wait_for(lambda: [info.state for info in server.service.lora.slots()] == ["empty", "empty"])
