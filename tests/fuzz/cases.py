"""One case of the reader's fuzzer: the files of an adapter's folder, and what must hold whatever is in them."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import time
import tracemalloc
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotslot.adapter import AdapterFile, read_adapter, resolve
from hotslot.errors import HotslotError
from hotslot.experts import ExpertLayout
from hotslot.extras import FEATURES
from hotslot.inspect import inspect_adapter

CORPUS = Path(__file__).parent / "corpus"
NAMES = ("adapter_config.json", "added_tokens.json", "adapter_model.safetensors")

# What reading may take beside what the files' size accounts for: messages, the host's own tables.
BASE_BYTES = 256 << 10
BYTES_PER_BYTE = 40
# Reading a case takes milliseconds; under tracemalloc on a busy machine it may take many times that.
SECONDS = 30.0
SECONDS_PER_MIB = 30.0


@dataclass(frozen=True)
class Case:
    """The content of the three files; an empty `tokens` means no such file.

    Attributes:
        config: `adapter_config.json`.
        tokens: `added_tokens.json`.
        weights: `adapter_model.safetensors`.
    """

    config: bytes
    tokens: bytes
    weights: bytes

    @property
    def size(self) -> int:
        """All bytes."""
        return len(self.config) + len(self.tokens) + len(self.weights)

    def pack(self) -> bytes:
        """One string of bytes, for fuzzers that know no other form."""
        return struct.pack("<II", len(self.config), len(self.tokens)) + self.config + self.tokens + self.weights

    @classmethod
    def unpack(cls, raw: bytes) -> Case:
        """The case in any string of bytes."""
        first, second = struct.unpack("<II", raw[:8].ljust(8, b"\0"))
        rest = raw[8:]
        first = min(first, len(rest))
        second = min(second, len(rest) - first)
        return cls(rest[:first], rest[first : first + second], rest[first + second :])

    def write(self, folder: Path) -> None:
        """Write the files, over those of an earlier case."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, raw in zip(NAMES, (self.config, self.tokens, self.weights), strict=True):
            if raw or name != "added_tokens.json":
                (folder / name).write_bytes(raw)
            else:
                (folder / name).unlink(missing_ok=True)

    @classmethod
    def read(cls, folder: Path) -> Case:
        """The case in a folder."""
        return cls(*((folder / name).read_bytes() if (folder / name).exists() else b"" for name in NAMES))


class FoundError(AssertionError):
    """A case breaks what must hold."""


class _Hang(BaseException):
    """Not caught by anything on its way."""


@dataclass(frozen=True)
class Site:
    """A site as `resolve` needs it."""

    path: str
    kind: str
    in_features: int
    out_features: int


def _layer(prefix: str, layer: int, fused: bool) -> list[Site]:
    sizes: dict[str, tuple[int, int]] = {"self_attn.o_proj": (8, 8), "mlp.down_proj": (12, 8)}
    if fused:
        sizes |= {"self_attn.qkv_proj": (8, 16), "mlp.gate_up_proj": (8, 24)}
    else:
        sizes |= {"self_attn.q_proj": (8, 8), "self_attn.k_proj": (8, 4), "self_attn.v_proj": (8, 4)}
        sizes |= {"mlp.gate_proj": (8, 12), "mlp.up_proj": (8, 12)}
    return [Site(f"{prefix}layers.{layer}.{name}", "linear", *size) for name, size in sizes.items()]


def _host(prefix: str, *, fused: bool = False, experts: bool = False) -> dict[str, Any]:
    sites = [Site(f"{prefix}embed_tokens", "embedding", 16, 8), *_layer(prefix, 0, fused), *_layer(prefix, 1, fused)]
    sites.append(Site("lm_head", "linear", 8, 16))
    layouts = {}
    if experts:
        for layer in (0, 1):
            sites.append(Site(f"{prefix}layers.{layer}.mlp.gate", "router", 8, 3))
            sites.append(Site(f"{prefix}layers.{layer}.mlp.shared_expert.up_proj", "linear", 8, 6))
            layouts[f"{prefix}layers.{layer}.mlp.experts"] = ExpertLayout(3, {"gate_up_proj": (20, 8), "down_proj": (8, 10)})
    modules = [site.path for site in sites] + [*layouts, f"{prefix}norm", f"{prefix}layers.0.input_layernorm", "visual.blocks.0.q"]
    return {"sites": sites, "host_modules": modules, "experts": layouts, "vocab_size": 16}


_WAYS: tuple[tuple[bool, Collection[str]], ...] = ((False, FEATURES.keys()), (True, FEATURES.keys()), (False, ()))
HOSTS = (_host("model."), _host("model.", fused=True), _host("model.language_model.", experts=True))


def check(case: Case, folder: Path, hosts: Sequence[dict[str, Any]] = HOSTS, base: int = BASE_BYTES) -> frozenset[str]:
    """Write a case, read it in every way against some hosts, and see that what must hold does.

    Returns:
        What came of it, without names and numbers: cases that do something new are worth going on from.

    Raises:
        FoundError: It does not: another error than the package's own, too much time or memory, a message out of bounds.
    """
    case.write(folder)
    limit = SECONDS + SECONDS_PER_MIB * case.size / (1 << 20)
    with _time_limit(limit), _memory_limit(case, base):
        return frozenset(_read(folder, hosts))


def _read(folder: Path, hosts: Sequence[dict[str, Any]]) -> Iterator[str]:
    try:
        with read_adapter(folder) as adapter:
            for host in hosts:
                for strict, supported in _WAYS if len(hosts) > 1 else _WAYS[:1]:
                    yield _resolve(adapter, host, strict, supported)
    except HotslotError as error:
        _check_message(error)
        yield _outline(str(error))
    except FoundError:
        raise
    except Exception as error:
        raise FoundError(f"{type(error).__name__} came through: {error}") from error
    try:
        found = inspect_adapter(folder)
        text = str(found)
        json.dumps(found.to_dict())
    except HotslotError as error:
        _check_message(error)
    except Exception as error:
        raise FoundError(f"{type(error).__name__} came through inspect: {error}") from error
    else:
        if not text.replace("\n", "").isprintable():
            raise FoundError("inspect prints what a terminal would obey")


def _resolve(adapter: AdapterFile, host: dict[str, Any], strict: bool, supported: Collection[str]) -> str:
    try:
        resolved = resolve(adapter, max_rank=16, strict=strict, supported=supported, **host)
    except HotslotError as error:
        _check_message(error)
        return _outline(str(error))
    _check_resolved(resolved, host["sites"])
    return "; ".join(map(_outline, [*resolved.report.modules, *resolved.report.warnings]))


def _outline(text: str) -> str:
    return re.sub(r"'[^']*'|\"[^\"]*\"|[\[(].*?[\])]|\d+", "", text)[:80]


def _check_resolved(resolved: Any, sites: list[Site]) -> None:
    placed = [pair.site_index for pair in resolved.pairs]
    if len(set(placed)) != len(placed):
        raise FoundError(f"two pairs for one site: {placed}")
    for pair in (*resolved.pairs, *resolved.extras.embeddings, *resolved.extras.routers):
        site = sites[pair.site_index]
        shapes = pair.a.to_numpy().shape, pair.b.to_numpy().shape
        if shapes != ((pair.rank, site.in_features), (site.out_features, pair.rank)) or not 0 < pair.rank <= 16:
            raise FoundError(f"{site} got a pair of shapes {shapes}")
    experts = [(pair.module, pair.projection, pair.expert) for pair in resolved.extras.experts]
    if len(set(experts)) != len(experts):
        raise FoundError(f"two pairs for one projection: {experts}")
    if not str(resolved.report).replace("\n", "").isprintable():
        raise FoundError("the report prints what a terminal would obey")
    json.dumps(resolved.report.to_dict())


def _check_message(error: HotslotError) -> None:
    text = str(error)
    if not text.isprintable() or len(text) > 4000:
        raise FoundError(f"{type(error).__name__} has a message of {len(text)} characters that begins {text[:300]!r}") from error


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise _Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    started = time.monotonic()
    try:
        yield
    except _Hang as hang:
        raise FoundError(f"it took more than {seconds:.0f} s") from hang
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if time.monotonic() - started > seconds:
        raise FoundError(f"it took {time.monotonic() - started:.0f} s, more than {seconds:.0f}")


@contextmanager
def _memory_limit(case: Case, base: int) -> Iterator[None]:
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        if not was_tracing:
            tracemalloc.stop()
    allowed = base + BYTES_PER_BYTE * case.size
    if peak - before > allowed:
        raise FoundError(f"it took {peak - before} bytes of memory for files of {case.size}; allowed {allowed}")


def open_files() -> int:
    """How many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))
