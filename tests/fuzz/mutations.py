"""Mutations of adapters that know what a config and a safetensors header are made of."""

from __future__ import annotations

import contextlib
import json
import math
import random
import struct
from collections.abc import Callable
from typing import Any

from .cases import Case

Entries = list[tuple[str, Any]]

NUMBERS: list[Any] = [0, 1, -1, 2, 3, 7, 255, 256, 1 << 31, (1 << 31) - 1, 1 << 48, 1 << 63, (1 << 64) - 1, 1 << 200, 10**400]
NUMBERS += [0.5, -0.0, 1e308, 1e-320, 3e38, math.inf, -math.inf, math.nan, True, False, None]
TEXTS = [
    "",
    "q_proj",
    "a" * 3000,
    "\x1b[31m",
    "\ud800",
    "\U0001f600" * 50,
    "..",
    "model.",
    "\0",
    "none",
    "all",
    "LORA",
    "all-linear",
]
PATTERNS = [
    "q_proj",
    r".*\.q_proj",
    "(a|a)*b",
    "(((((x*)*)*)*)*)*y",
    "(?=a)*",
    "(?P<x>a)",
    "[",
    "a{1,99999}",
    "(.*)*$",
    r"\d+" * 40,
]
PATTERNS += ["^model", "(?i)q", r"(.)\1", "q_proj|" * 100, "(a?){500}a{500}", "((((((((a+)+)+)+)+)+)+)+)+$"]
FIELDS = [
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "target_parameters", "layers_to_transform", "use_dora", "lora_bias", "bias", "modules_to_save", "trainable_token_indices",
    "alora_invocation_tokens", "ensure_weight_tying", "fan_in_fan_out", "base_model_name_or_path", "peft_version",
    "init_lora_weights", "layer_replication", "loftq_config", "eva_config", "arrow_config", "lora_dropout", "unknown",
]  # fmt: skip
DTYPES = ["F32", "F16", "BF16", "F64", "I8", "U8", "BOOL", "F4", "F6_E2M3", "C64", "I64", "F8_E4M3", "X", "", 3, None, ["F32"]]
PARTS = [
    "base_model", "model", "language_model", "layers", "0", "1", "9", "99999999999", "self_attn", "mlp", "q_proj", "k_proj",
    "v_proj", "qkv_proj", "gate_up_proj", "gate_proj", "up_proj", "down_proj", "experts", "shared_expert", "gate", "lora_A",
    "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "trainable_tokens_delta", "token_adapter",
    "base_layer", "modules_to_save", "original_module", "default", "weight", "bias", "lm_head", "embed_tokens", "w1", "w2",
    "block_sparse_moe", "_orig_mod", "visual", "", "\x1b", "\U0001f600", "\u0663", "__metadata__",
]  # fmt: skip


def split(weights: bytes) -> tuple[Entries, bytes] | None:
    """Header entries and data of a file, if it has that form."""
    if len(weights) < 8:
        return None
    (length,) = struct.unpack("<Q", weights[:8])
    try:
        entries = json.loads(weights[8 : 8 + length], object_pairs_hook=lambda pairs: pairs)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entries, list) or not all(isinstance(item, tuple) for item in entries):
        return None
    return [(name, dict(entry) if _is_pairs(entry) else entry) for name, entry in entries], weights[8 + length :]


def _is_pairs(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, tuple) for item in value)


def dumped(entries: Entries) -> bytes:
    """The JSON object of entries, names twice and all."""
    return b"{" + b",".join(json.dumps(name).encode() + b":" + json.dumps(entry).encode() for name, entry in entries) + b"}"


def joined(entries: Entries, data: bytes) -> bytes:
    """The file."""
    raw = dumped(entries)
    return struct.pack("<Q", len(raw)) + raw + data


def repaired(entries: Entries, data: bytes) -> bytes:
    """The file with offsets and data that fit its shapes, so that what comes after the header is reached."""
    bits = {"F32": 32, "F16": 16, "BF16": 16, "F64": 64, "I8": 8, "U8": 8, "BOOL": 8, "I64": 64, "C64": 64, "F8_E4M3": 8}
    found, end = [], 0
    for name, entry in entries:
        if isinstance(entry, dict) and "shape" in entry:
            shape = entry["shape"]
            is_plain = isinstance(shape, list) and all(isinstance(dim, int) and 0 <= dim < 4096 for dim in shape)
            size = math.prod(shape) * bits.get(str(entry.get("dtype")), 8) // 8 if is_plain else 0
            if size > 1 << 16:
                entry, size = entry | {"shape": [1]}, bits.get(str(entry.get("dtype")), 8) // 8
            found.append((name, entry | {"data_offsets": [end, end + size]}))
            end += size
        else:
            found.append((name, entry))
    return joined(found, (data * (end // max(len(data), 1) + 1))[:end] if data else bytes(end))


class Mutator:
    """Makes cases of cases.

    Args:
        seed: What makes two runs the same.
        pool: Cases to begin with, and to take parts of.
    """

    def __init__(self, seed: int, pool: list[Case]) -> None:
        self.random = random.Random(seed)
        self.pool = pool

    def mutate(self, case: Case) -> Case:
        """A few mutations of a case, of its config, its weights or both."""
        for _ in range(self.random.choice((1, 1, 2, 3, 6))):
            with contextlib.suppress(RecursionError):  # values too deep to be written again
                case = self._mutated(case)
        return case

    def _mutated(self, case: Case) -> Case:
        kind = self.random.random()
        if kind < 0.35:
            return Case(self._config(case.config), case.tokens, case.weights)
        if kind < 0.8:
            return Case(case.config, case.tokens, self._weights(case.weights))
        if kind < 0.85:
            return Case(case.config, self._tokens(), case.weights)
        if kind < 0.95:
            other = self.random.choice(self.pool)
            config, weights = (case.config, other.weights) if kind < 0.9 else (other.config, case.weights)
            return Case(config, case.tokens, weights)
        return Case(self._bytes(case.config), case.tokens, case.weights)

    # Bytes.

    def _bytes(self, raw: bytes) -> bytes:
        if not raw:
            return self.random.randbytes(self.random.randint(0, 40))
        changed = bytearray(raw)
        at = self.random.randrange(len(changed))
        kind = self.random.randrange(5)
        if kind == 0:
            changed[at] = self.random.choice((0, 0x22, 0x5C, 0x7B, 0x5B, 0x80, 0xFF, self.random.randrange(256)))
        elif kind == 1:
            del changed[at:]
        elif kind == 2:
            del changed[at : at + self.random.randint(1, 16)]
        elif kind == 3:
            changed[at:at] = self.random.randbytes(self.random.randint(1, 8))
        else:
            changed[at:at] = changed[at : at + self.random.randint(1, 200)]
        return bytes(changed)

    def _nested(self) -> Any:
        value: Any = 1
        for _ in range(self.random.choice((3, 40, 150))):
            value = [value] if self.random.random() < 0.5 else {"a": value}
        return value

    def _deep(self) -> bytes:
        # About as deep as the interpreter goes: a little less is parsed, and shown in a message later.
        depth = self.random.choice((30_000, *range(900, 1000)))
        return b"[" * depth + b"]" * depth

    def _any(self) -> Any:
        choice = self.random.randrange(9)
        if choice < 3:
            return self.random.choice(NUMBERS)
        if choice < 5:
            return self.random.choice(TEXTS)
        if choice == 5:
            return [self.random.choice(NUMBERS + TEXTS) for _ in range(self.random.choice((0, 1, 2, 5, 500)))]
        if choice == 6:
            return {self.random.choice(PATTERNS): self.random.choice(NUMBERS) for _ in range(self.random.choice((0, 1, 3)))}
        if choice == 7:
            return {f"{self.random.choice(TEXTS)}{index}": index for index in range(self.random.choice((1, 3, 1000)))}
        return self._nested()

    # The config.

    def _config(self, raw: bytes) -> bytes:
        try:
            fields = json.loads(raw)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict) or self.random.random() < 0.1:
            return self._bytes(raw)
        key = self.random.choice([*FIELDS, *fields])
        kind = self.random.randrange(9)
        if kind < 3:
            fields[key] = self._any()
        elif kind == 3:
            fields.pop(key, None)
        elif kind == 4:
            patterns = {self.random.choice(PATTERNS): self.random.choice((1, 2, 4, 4.5)) for _ in range(3)}
            fields[self.random.choice(("rank_pattern", "alpha_pattern"))] = patterns
        elif kind == 5:
            names = [
                ".".join(self.random.choices(PARTS, k=self.random.randint(1, 4))) for _ in range(self.random.choice((1, 4, 300)))
            ]
            fields[self.random.choice(("target_modules", "modules_to_save", "target_parameters", "exclude_modules"))] = names
        elif kind == 6:
            return dumped([*fields.items(), (key, self._any())])
        elif kind == 7:
            return dumped([*fields.items()])[:-1] + b',"x' + self.random.randbytes(1).hex().encode() + b'":' + self._deep() + b"}"
        else:
            fields[self.random.choice(TEXTS) + str(self.random.randrange(3))] = self._any()
        return json.dumps(fields).encode()

    def _tokens(self) -> bytes:
        if self.random.random() < 0.2:
            return self.random.randbytes(20)
        return json.dumps({f"<{index}>": self.random.choice(NUMBERS) for index in range(self.random.randint(0, 4))}).encode()

    # The weights.

    def _weights(self, raw: bytes) -> bytes:
        parsed = split(raw)
        if parsed is None or self.random.random() < 0.15:
            return self._length(raw) if self.random.random() < 0.3 else self._bytes(raw)
        entries, data = parsed
        change: Callable[[Entries], Entries | bytes] = self.random.choice(
            (
                self._rename,
                self._rename,
                self._reshape,
                self._reshape,
                self._retype,
                self._move,
                self._repeat,
                self._drop,
                self._junk,
            )
        )
        changed = change(entries)
        if isinstance(changed, bytes):
            return struct.pack("<Q", len(changed)) + changed + data
        if self.random.random() < 0.8:
            return repaired(changed, data)
        return joined(changed, data)

    def _length(self, raw: bytes) -> bytes:
        length = self.random.choice(
            [number for number in NUMBERS if isinstance(number, int) and 0 <= number < 1 << 64] + [len(raw)]
        )
        return struct.pack("<Q", length + self.random.randint(0, 1) if length < 1 << 63 else length) + raw[8:]

    def _pick(self, entries: Entries) -> int:
        return self.random.randrange(len(entries)) if entries else -1

    def _rename(self, entries: Entries) -> Entries:
        at = self._pick(entries)
        if at < 0:
            return entries
        name, entry = entries[at]
        parts = name.split(".")
        place = self.random.randrange(len(parts))
        kind = self.random.randrange(5)
        if kind == 0:
            parts[place] = self.random.choice(PARTS)
        elif kind == 1:
            parts.insert(place, self.random.choice(PARTS))
        elif kind == 2:
            del parts[place]
        elif kind == 3:
            parts = self.random.choices(PARTS, k=self.random.choice((1, 3, 6, 200)))
        else:
            # The same change everywhere, as a wrapper or another tool would make it.
            old, new = parts[place], self.random.choice(PARTS)
            return [(f".{other}.".replace(f".{old}.", f".{new}.")[1:-1], item) for other, item in entries]
        return [*entries[:at], (".".join(parts), entry), *entries[at + 1 :]]

    def _changed(self, entries: Entries, key: str, value: Any) -> Entries:
        at = self._pick(entries)
        if at < 0 or not isinstance(entries[at][1], dict):
            return entries
        name, entry = entries[at]
        return [*entries[:at], (name, entry | {key: value}), *entries[at + 1 :]]

    def _reshape(self, entries: Entries) -> Entries:
        dims: list[Any] = [0, 1, 2, 3, 4, 6, 8, 12, 16, 20, 24]
        if self.random.random() < 0.3:
            dims += NUMBERS + TEXTS[:3]
        shape = self.random.choices(dims, k=self.random.choice((0, 1, 2, 2, 2, 3, 9, 3000)))
        return self._changed(entries, "shape", shape if self.random.random() < 0.95 else self._any())

    def _retype(self, entries: Entries) -> Entries:
        dtype = self.random.choice(DTYPES)
        if self.random.random() < 0.3:
            return [(name, entry | {"dtype": dtype} if isinstance(entry, dict) else entry) for name, entry in entries]
        return self._changed(entries, "dtype", dtype)

    def _move(self, entries: Entries) -> Entries:
        offsets = [self.random.choice([*NUMBERS, 4, 8, 16, 64]) for _ in range(self.random.choice((2, 2, 2, 1, 3)))]
        return self._changed(entries, "data_offsets", offsets)

    def _repeat(self, entries: Entries) -> Entries:
        at = self._pick(entries)
        if at < 0:
            return entries
        name, entry = entries[at]
        if self.random.random() < 0.5:
            return [*entries, (name, entry)]
        count = self.random.choice((1, 2, 50))
        return entries + [
            (f"{name[:40]}{index}" if self.random.random() < 0.1 else f"{index}.{name}", entry) for index in range(count)
        ]

    def _drop(self, entries: Entries) -> Entries:
        at = self._pick(entries)
        return [item for place, item in enumerate(entries) if place != at] if self.random.random() < 0.8 else entries[:1]

    def _junk(self, entries: Entries) -> Entries | bytes:
        if self.random.random() < 0.3:
            return dumped(entries)[:-1] + b',"x":' + self._deep() + b"}"
        return [*entries, (self.random.choice(("__metadata__", "x", self.random.choice(TEXTS))), self._any())]
