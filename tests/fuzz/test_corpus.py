"""Every seed and every case that once broke the reader is read again, and a short run of the fuzzer finds nothing new."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from fuzz.cases import CORPUS, HOSTS, Case, FoundError, check, open_files
from fuzz.mutations import Mutator, joined
from fuzz.seeds import seeds

from hotslot.adapter import read_adapter, resolve
from hotslot.errors import AdapterConfigError, AdapterShapeError
from hotslot.extras import FEATURES

CASES = sorted(folder.name for folder in CORPUS.iterdir() if folder.is_dir())


@pytest.mark.parametrize("name", CASES)
def test_no_case_of_the_corpus_breaks_the_reader(name: str, tmp_path: Path) -> None:
    check(Case.read(CORPUS / name), tmp_path)


@pytest.mark.parametrize("name", seeds())
def test_every_seed_is_in_the_corpus_and_fits_a_host(name: str) -> None:
    assert Case.read(CORPUS / f"seed-{name}") == seeds()[name]
    applied = [0]
    for host in HOSTS:
        with read_adapter(CORPUS / f"seed-{name}") as adapter, suppress(AdapterConfigError, AdapterShapeError):
            applied.append(resolve(adapter, max_rank=16, strict=True, supported=FEATURES, **host).report.applied)
    assert max(applied) > 0


def test_a_case_survives_its_one_string_of_bytes() -> None:
    for case in seeds().values():
        assert Case.unpack(case.pack()) == case
    for raw in (b"", b"\xff" * 7, b"\xff" * 40):
        assert Case.unpack(raw).size <= len(raw)


@pytest.mark.parametrize("seed", range(4))
def test_a_short_run_finds_nothing(seed: int, tmp_path: Path) -> None:
    mutator, files = Mutator(seed, list(seeds().values())), open_files()
    for _ in range(60):
        case = mutator.mutate(mutator.random.choice(mutator.pool))
        try:
            check(case, tmp_path)
        except FoundError:
            case.write(CORPUS / f"found-by-seed-{seed}")
            raise
    assert open_files() == files


# Files that are large in one respect: time and memory must stay in proportion to them.


def dense(names: list[str]) -> bytes:
    """A file of many empty tensors."""
    return joined([(name, {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}) for name in names], b"")


def pairs(modules: int, form: str = "a{}.q_proj") -> bytes:
    """A file of many pairs of one element."""
    entries, end = [], 0
    for index in range(modules):
        for half in "AB":
            name = f"{form.format(index)}.lora_{half}.weight"
            entries.append((name, {"dtype": "F16", "shape": [1, 1], "data_offsets": [end, end + 2]}))
            end += 2
    return joined(entries, bytes(end))


def config(**fields: object) -> bytes:
    return json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1} | fields).encode()


NAMES = [f"n{index}" for index in range(20_000)]
LARGE: dict[str, Callable[[], Case]] = {
    "many tensors of size 0": lambda: Case(config(), b"", dense([f"{index}.lora_A.weight" for index in range(4000)])),
    "many names in no form": lambda: Case(config(), b"", dense(list(map(str, range(8000))))),
    "many pairs": lambda: Case(config(), b"", pairs(1500)),
    "many layers": lambda: Case(config(), b"", pairs(1500, "model.layers.{}.self_attn.q_proj")),
    "many fused layers": lambda: Case(config(), b"", pairs(1500, "model.layers.{}.self_attn.qkv_proj")),
    "many experts": lambda: Case(config(), b"", pairs(1500, "model.layers.0.mlp.experts.{}.gate_proj")),
    "names and pairs": lambda: Case(config(target_modules=NAMES), b"", pairs(1000)),
    "parameters and pairs": lambda: Case(config(target_parameters=NAMES), b"", pairs(1000)),
    "saved modules and biases": lambda: Case(
        config(modules_to_save=NAMES, bias="all"), b"", dense([f"{index}.x.bias" for index in range(4000)])
    ),
    "token rows": lambda: Case(
        config(trainable_token_indices={name: [1] for name in NAMES}),
        b"",
        dense([f"{n}.trainable_tokens_delta" for n in range(4000)]),
    ),
    "patterns": lambda: Case(config(rank_pattern=dict.fromkeys(NAMES, 1)), b"", pairs(10)),
    "patterns and pairs": lambda: Case(
        config(rank_pattern=dict.fromkeys(NAMES[:4000], 1), alpha_pattern=dict.fromkeys(NAMES[:4000], 1)), b"", pairs(1000)
    ),
    "slow patterns and pairs": lambda: Case(config(alpha_pattern={f"((a|n*)*)*{n}": 1 for n in range(400)}), b"", pairs(1000)),
    "a field twice after many": lambda: Case(
        b'{"a":1,' + b",".join(b'"%d":1' % index for index in range(100_000)) + b',"99999":2}', b"", b""
    ),
    "deep names": lambda: Case(
        config(target_modules=[".".join("n" * length) for length in range(1, 500)]),
        b"",
        pairs(200, ".".join("n" * 500) + "{}"),
    ),
    "wide text in the config": lambda: Case(
        json.dumps({"peft_type": "LORA", "unknown": "\U0001f600" * 50_000}, ensure_ascii=False).encode(), b"", b""
    ),
    "objects in the config": lambda: Case(b'{"a":[' + b'{"":{}},' * 50_000 + b"0]}", b"", b""),
    "added tokens": lambda: Case(config(), json.dumps(dict.fromkeys(NAMES, 99)).encode(), pairs(1)),
}


@pytest.mark.parametrize("name", LARGE)
def test_time_and_memory_stay_in_proportion_to_the_files(name: str, tmp_path: Path) -> None:
    # Up to 1024 parsed expressions are kept, for all adapters together.
    check(LARGE[name](), tmp_path, HOSTS[2:], base=(8 << 20) if name == "slow patterns and pairs" else 256 << 10)
