"""Runs the PTX that NVRTC made, on the CPU: what emulating the source cannot check, the compiler's own work.

A register is an array over the threads of one block; the threads at the lowest instruction go first, and lanes wait for one another
at shuffles and mma. Every access is checked for its bounds and alignment. Small and slow: a few shapes, not a grid of them.
It is no proof of barriers: its order of running hides a missing one (the emulator's fibers find those).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

TYPES = {
    "u8": np.uint8,
    "b8": np.uint8,
    "s8": np.int8,
    "u16": np.uint16,
    "b16": np.uint16,
    "s16": np.int16,
    "u32": np.uint32,
    "b32": np.uint32,
    "s32": np.int32,
    "u64": np.uint64,
    "b64": np.uint64,
    "s64": np.int64,
    "f32": np.float32,
    "f64": np.float64,
    "f16": np.uint16,
    "bf16": np.uint16,
    "pred": np.bool_,
}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# Where the addresses of shared memory begin.
_SHARED = 0x7FFF00000000
_LANES = 32


class PtxError(RuntimeError):
    """What is wrong with a program, or with an access that it made."""


class Kernel:
    """One kernel of a PTX text.

    Attributes:
        parameters: (type, name) of each.
        code: (operation, operands, guard) of each instruction.
    """

    def __init__(self, text: str, name: str) -> None:
        found = re.search(rf"\.visible \.entry {name}\s*\((.*?)\)\s*(?:\.\w+[^\n{{]*\n)*\s*{{(.*?)\n}}", text, re.DOTALL)
        if found is None:
            raise PtxError(f"no kernel {name}")
        parameter = re.compile(r"\.param (?:\.align \d+ )?\.(\w+)(?: \.\w+| \d+)* (\w+_param_\d+)")
        self.name = name
        self.parameters = parameter.findall(found.group(1))
        self.code: list[tuple[list[str], list[str], tuple[str, bool] | None]] = []
        self.labels: dict[str, int] = {}
        self.registers: dict[str, str] = {}
        self.shared: dict[str, int] = {}
        self.shared_bytes = 0
        for statement in re.split(r"[;{}](?![^\[]*\])|(?<=:)\s*\n", _join_vectors(re.sub(r"//[^\n]*", "", found.group(2)))):
            self._add(statement.strip())

    def _add(self, statement: str) -> None:
        while label := re.match(r"(\$\w+):\s*", statement):
            self.labels[label.group(1)] = len(self.code)
            statement = statement[label.end() :]
        if statement.startswith(".reg"):
            kind, stem, count = re.findall(r"\.reg \.(\w+)\s+(%\w+?)(?:<(\d+)>)?$", statement)[0]
            self.registers.update({f"{stem}{i}": kind for i in range(int(count))} if count else {stem: kind})
        elif statement.startswith(".shared"):
            alignment, name, size = re.findall(r"\.shared \.align (\d+) \.b8 (\S+?)\[(\d+)\]", statement)[0]
            self.shared[name] = -(-self.shared_bytes // int(alignment)) * int(alignment)
            self.shared_bytes = self.shared[name] + int(size)
        elif statement and not statement.startswith("."):
            guard = None
            if guarded := re.match(r"@(!?)(%\w+)\s+", statement):
                guard = (guarded.group(2), guarded.group(1) == "!")
                statement = statement[guarded.end() :]
            operation, _, rest = statement.replace("\t", " ").partition(" ")
            operands = re.findall(r"<[^>]*>|\[[^\]]*\]|[^,\s]+", rest)
            self.code.append((operation.split("."), operands, guard))


def _join_vectors(body: str) -> str:
    """`{a, b}` as `<a|b>`, so that braces are left for blocks."""
    return re.sub(r"\{(\s*[%_][^{}]*)\}", lambda found: "<" + "|".join(found.group(1).replace(",", " ").split()) + ">", body)


class Memory:
    """Arrays that a program may touch, and nothing else."""

    def __init__(self) -> None:
        self._arrays: list[tuple[int, int, Array]] = []

    def add(self, array: Array, at: int | None = None) -> int:
        """Make an array's memory known; its address."""
        address = array.ctypes.data if at is None else at
        self._arrays.append((address, array.nbytes, array.reshape(-1).view(np.uint8)))
        return int(address)

    def remove_last(self) -> None:
        """Forget what was added last."""
        self._arrays.pop()

    def load(self, addresses: Array, kind: Any, what: str) -> Array:
        """A value from each address."""
        size = np.dtype(kind).itemsize
        result = np.empty((len(addresses), size), np.uint8)
        for chosen, offsets, content in self._parts(addresses, size, what):
            result[chosen] = content[offsets[:, None] + np.arange(size)]
        return result.view(kind)[:, 0]

    def store(self, addresses: Array, values: Array, what: str) -> None:
        """A value to each address."""
        size = values.dtype.itemsize
        given = np.ascontiguousarray(values).view(np.uint8).reshape(-1, size)
        for chosen, offsets, content in self._parts(addresses, size, what):
            content[offsets[:, None] + np.arange(size)] = given[chosen]

    def _parts(self, addresses: Array, size: int, what: str) -> list[tuple[Array, Array, Array]]:
        if (addresses % np.uint64(size)).any():
            raise PtxError(f"{what}: misaligned access of {size} bytes at {int(addresses[addresses % np.uint64(size) != 0][0]):#x}")
        parts, left = [], np.ones(len(addresses), bool)
        for begin, nbytes, content in self._arrays:
            inside = left & (addresses >= np.uint64(begin)) & (addresses + np.uint64(size) <= np.uint64(begin + nbytes))
            if inside.any():
                parts.append((inside, (addresses[inside] - np.uint64(begin)).astype(np.int64), content))
                left &= ~inside
        if left.any():
            raise PtxError(f"{what}: {size} bytes out of bounds at {int(addresses[left][0]):#x}")
        return parts


def run(kernel: Kernel, memory: Memory, grid: Sequence[int], block: Sequence[int], arguments: Sequence[float]) -> set[str]:
    """Run a launch, one block after the other; the operations that it used.

    Raises:
        PtxError: An access is out of bounds or misaligned, lanes never meet, or an operation is unknown.
    """
    if len(arguments) != len(kernel.parameters):
        raise PtxError(f"{kernel.name} has {len(kernel.parameters)} parameters; found {len(arguments)}")
    used: set[str] = set()
    with np.errstate(all="ignore"):
        for z in range(grid[2]):
            for y in range(grid[1]):
                for x in range(grid[0]):
                    used |= _Block(kernel, memory, (x, y, z), grid, block, arguments).run()
    return used


class _Block:
    """The threads of one block."""

    def __init__(
        self,
        kernel: Kernel,
        memory: Memory,
        index: tuple[int, int, int],
        grid: Sequence[int],
        block: Sequence[int],
        arguments: Sequence[float],
    ) -> None:
        self.kernel, self.memory, self.index = kernel, memory, index
        self.size = n = int(np.prod(block))
        kinds = {
            kind: np.bool_ if kind == "pred" else _UNSIGNED[np.dtype(TYPES[kind]).itemsize]
            for kind in set(kernel.registers.values())
        }
        self.registers = {name: np.zeros(n, kinds[kind]) for name, kind in kernel.registers.items()}
        thread = np.arange(n)
        self.special = {"%tid.x": thread % block[0], "%tid.y": thread // block[0] % block[1], "%laneid": thread % _LANES}
        for axis, letter in enumerate("xyz"):
            self.special |= {f"%ctaid.{letter}": np.full(n, index[axis]), f"%ntid.{letter}": np.full(n, block[axis])}
            self.special[f"%nctaid.{letter}"] = np.full(n, grid[axis])
        self.arguments = {name: value for (_, name), value in zip(kernel.parameters, arguments, strict=True)}
        self.pc = np.zeros(n, np.int64)
        self.done, self.at_barrier, self.held = (np.zeros(n, bool) for _ in range(3))
        self.used: set[str] = set()

    def run(self) -> set[str]:
        self.memory.add(np.full(max(self.kernel.shared_bytes, 16), 0xFF, np.uint8), _SHARED)
        try:
            while self._step():
                pass
        finally:
            self.memory.remove_last()
        return self.used

    def _step(self) -> bool:
        live = ~self.done & ~self.at_barrier & ~self.held
        if not live.any():
            if self.done.all():
                return False
            if self.held.any():
                raise PtxError(f"{self.kernel.name} block {self.index}: lanes of a warp never meet")
            if self.done.any():
                raise PtxError(f"{self.kernel.name} block {self.index}: a barrier that some threads have returned before")
            self.at_barrier[:] = False
            return True
        pc = int(self.pc[live].min())
        here = live & (self.pc == pc)
        operation, operands, guard = self.kernel.code[pc]
        self.used.add(".".join(operation))
        active = here if guard is None else here & (self.registers[guard[0]] ^ guard[1])
        self.pc[here] = pc + 1
        if active.any():
            self.where = f"{self.kernel.name} block {self.index}, instruction {pc} {'.'.join(operation)}"
            self._execute(operation, operands, active, pc)
        return True

    def _execute(self, operation: list[str], operands: list[str], active: Array, pc: int) -> None:
        name, kind = operation[0], operation[-1]
        if name == "bra":
            self.pc[active] = self.kernel.labels[operands[0]]
        elif name in ("ret", "exit"):
            self.done |= active
        elif name in ("bar", "barrier"):
            self.at_barrier |= active
        elif name == "ld" and operation[1] == "param":
            value = self.arguments[operands[1][1:-1]]
            self._put(operands[0], np.full(int(active.sum()), value, np.int64).astype(TYPES[kind]), active)
        elif name in ("ld", "st"):
            self._access(operation, operands, active)
        elif name in ("shfl", "mma"):
            self._meet(operation, operands, active, pc)
        elif name == "mov":
            self._move(operands, kind, active)
        elif name == "cvta":
            self._put(operands[0], self._get(operands[1], "u64", active), active)
        elif name == "cvt":
            self._convert(operation, operands, active)
        elif name == "setp":
            first, second = (self._get(operand, kind, active) for operand in operands[1:])
            self._put(operands[0], _COMPARE[operation[1]](first, second), active)
        elif name == "selp":
            first, second = (self._get(operand, kind, active) for operand in operands[1:3])
            self._put(operands[0], np.where(self._get(operands[3], "pred", active), first, second), active)
        elif name == "bfi":
            inserted, base, at, length = (self._get(operand, "u32", active).astype(np.uint64) for operand in operands[1:])
            mask = ((np.uint64(1) << length) - np.uint64(1)) << at
            self._put(operands[0], ((base & ~mask) | (inserted << at & mask)).astype(np.uint32), active)
        else:
            self._compute(operation, operands, active)

    def _compute(self, operation: list[str], operands: list[str], active: Array) -> None:
        name, kind = operation[0], operation[-1]
        if name in ("shl", "shr"):
            value, distance = self._get(operands[1], kind, active), self._get(operands[2], "u32", active).astype(np.int64)
            self._put(operands[0], _shift(value, distance, name), active)
            return
        values = [self._get(operand, kind, active) for operand in operands[1:]]
        if "wide" in operation:
            wide = np.int64 if kind.startswith("s") else np.uint64
            values[:2] = [value.astype(wide) for value in values[:2]]
            if name == "mad":
                values[2] = self._get(operands[3], kind.replace("32", "64"), active)
        if name not in _COMPUTE:
            raise PtxError(f"{self.where}: an unknown operation")
        self._put(operands[0], _COMPUTE[name](*values), active)

    # ---- operands

    def _get(self, operand: str, kind: str, active: Array) -> Array:
        count, target = int(active.sum()), np.dtype(TYPES[kind])
        if operand in self.registers:
            value = self.registers[operand][active]
            if kind == "pred":
                return value
            return (
                value.view(target)
                if value.dtype.itemsize == target.itemsize
                else value.astype(_UNSIGNED[target.itemsize]).view(target)
            )
        if operand in self.special:
            return self.special[operand][active].astype(target)
        if operand in self.kernel.shared:
            return np.full(count, _SHARED * (target.itemsize == 8) + self.kernel.shared[operand], target)
        if operand[:2] in ("0f", "0F"):
            return np.full(count, int(operand[2:], 16), np.uint32).view(np.float32)
        number = int(operand.rstrip("U"), 0)
        return np.full(count, number & (1 << 8 * target.itemsize) - 1, _UNSIGNED[target.itemsize]).view(target)

    def _put(self, operand: str, value: Array, active: Array) -> None:
        if operand == "_":
            return
        register = self.registers[operand]
        if register.dtype == np.bool_:
            register[active] = value
            return
        value = np.ascontiguousarray(value)
        if value.dtype.itemsize != register.dtype.itemsize:
            # A value of another width keeps its sign.
            value = value.astype(np.int64 if value.dtype.kind == "i" else np.uint64).astype(register.dtype)
        register[active] = value.view(register.dtype)

    def _addresses(self, operand: str, active: Array) -> Array:
        base, _, offset = operand[1:-1].partition("+")
        value = (
            self._get(base, "u64", active)
            if base in self.registers or base in self.kernel.shared
            else np.array([int(base)], np.uint64)
        )
        return value + np.uint64(int(offset or 0) & (1 << 64) - 1)

    # ---- memory, lanes, conversions

    def _access(self, operation: list[str], operands: list[str], active: Array) -> None:
        is_load, kind = operation[0] == "ld", operation[-1]
        pointer, named = (operands[1], operands[0]) if is_load else (operands[0], operands[1])
        addresses = self._addresses(pointer, active)
        if operation[1] == "shared":
            addresses = np.where(
                addresses < np.uint64(_SHARED), (addresses & np.uint64(0xFFFFFFFF)) + np.uint64(_SHARED), addresses
            )
        names, size = named.strip("<>").split("|"), np.dtype(TYPES[kind]).itemsize
        if (addresses % np.uint64(size * len(names))).any():
            raise PtxError(f"{self.where}: misaligned access of {size * len(names)} bytes")
        for i, name in enumerate(names):
            at = addresses + np.uint64(i * size)
            if is_load:
                self._put(name, self.memory.load(at, TYPES[kind], self.where), active)
            else:
                self.memory.store(at, self._get(name, kind, active), self.where)

    def _meet(self, operation: list[str], operands: list[str], active: Array, pc: int) -> None:
        """Lanes wait here for the others of their mask, by whatever path those come."""
        present = active | (self.held & (self.pc == pc))
        lanes = np.nonzero(present)[0]
        masks = self._get(operands[4], "u32", present) if operation[0] == "shfl" else np.full(len(lanes), 0xFFFFFFFF, np.uint32)
        going = np.zeros(self.size, bool)
        for lane, mask in zip(lanes.tolist(), masks.tolist(), strict=True):
            first = lane - lane % _LANES
            needed = [first + i for i in range(_LANES) if mask >> i & 1]
            if lane not in needed:
                raise PtxError(f"{self.where}: a lane is not in its own mask")
            going[lane] = present[needed].all()
        self.held |= present & ~going
        self.held &= ~going
        self.pc[present & ~going] = pc
        self.pc[going] = pc + 1
        if going.any():
            (self._shuffle if operation[0] == "shfl" else self._multiply)(operation, operands, going)

    def _shuffle(self, operation: list[str], operands: list[str], going: Array) -> None:
        target, _, is_inside = operands[0].partition("|")
        value, distance, limits = (self._get(operand, "u32", going) for operand in operands[1:4])
        lanes = np.nonzero(going)[0]
        place = {int(lane): i for i, lane in enumerate(lanes)}
        result, inside = value.copy(), np.ones(len(lanes), bool)
        if operation[2] != "bfly":
            raise PtxError(f"{self.where}: an unknown shuffle")
        for i, lane in enumerate(lanes.tolist()):
            source, segment = (lane % _LANES) ^ (int(distance[i]) & 31), int(limits[i]) >> 8 & 31
            inside[i] = source <= ((lane % _LANES) & segment) | (int(limits[i]) & 31 & ~segment)
            if inside[i]:
                result[i] = value[place[lane - lane % _LANES + source]]
        self._put(target, result, going)
        if is_inside:
            self._put(is_inside, inside, going)

    def _multiply(self, operation: list[str], operands: list[str], going: Array) -> None:
        """mma.m16n8k16, bf16, by the manual's layout: fragments to matrices and back."""
        if operation[3:] != ["m16n8k16", "row", "col", "f32", "bf16", "bf16", "f32"]:
            raise PtxError(f"{self.where}: an unknown mma")
        names = [operand.strip("<>").split("|") for operand in operands]
        warps = int(going.sum()) // _LANES
        a, b = (np.stack([self._get(name, "u32", going) for name in names[i]]).reshape(len(names[i]), warps, 8, 4) for i in (1, 2))
        c = np.stack([self._get(name, "f32", going) for name in names[3]]).reshape(4, warps, 8, 4)

        def elements(words: Array) -> Array:  # [..., 2]: low and high
            return np.stack([words << np.uint32(16), words & np.uint32(0xFFFF0000)], -1).view(np.float32).astype(np.float64)

        # a [warp, row, k]: register i has rows g + 8 (i % 2) and columns 2 q + 8 (i / 2). b [warp, column, k].
        left = elements(a).reshape(2, 2, warps, 8, 4, 2).transpose(2, 1, 3, 0, 4, 5).reshape(warps, 16, 16)
        right = elements(b).reshape(2, warps, 8, 4, 2).transpose(1, 2, 0, 3, 4).reshape(warps, 8, 16)
        total = c.reshape(2, 2, warps, 8, 4).transpose(2, 0, 3, 4, 1).reshape(warps, 16, 8).astype(np.float64)
        for k in range(16):
            total = total + left[:, :, None, k] * right[:, None, :, k]
        result = total.astype(np.float32).reshape(warps, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1)
        for i, name in enumerate(names[0]):
            self._put(name, result[i], going)

    def _move(self, operands: list[str], kind: str, active: Array) -> None:
        if operands[0].startswith("<"):
            names = operands[0].strip("<>").split("|")
            value = self._get(operands[1], kind, active)
            width = 8 * value.dtype.itemsize // len(names)
            for i, name in enumerate(names):
                self._put(name, (value >> value.dtype.type(width * i)).astype(_UNSIGNED[width // 8]), active)
        elif operands[1].startswith("<"):
            names, whole = operands[1].strip("<>").split("|"), np.dtype(TYPES[kind])
            width = 8 * whole.itemsize // len(names)
            value = np.zeros(int(active.sum()), _UNSIGNED[whole.itemsize])
            for i, name in enumerate(names):
                value |= self._get(name, f"u{width}", active).astype(value.dtype) << value.dtype.type(width * i)
            self._put(operands[0], value, active)
        else:
            self._put(operands[0], self._get(operands[1], kind, active), active)

    def _convert(self, operation: list[str], operands: list[str], active: Array) -> None:
        target, source = [part for part in operation[1:] if part in TYPES]
        value = self._get(operands[1], source, active)
        if target == "bf16" and source == "f32":
            bits = value.view(np.uint32)
            rounded = ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
            self._put(operands[0], np.where(np.isnan(value), np.uint16(0x7FFF), rounded), active)
        elif target == "f16" and source == "f32":
            self._put(operands[0], np.where(np.isnan(value), np.uint16(0x7FFF), value.astype(np.float16).view(np.uint16)), active)
        elif target == "f32" and source == "f16":
            self._put(operands[0], value.view(np.float16).astype(np.float32), active)
        else:
            self._put(operands[0], value.astype(TYPES[target]), active)


def _shift(value: Array, distance: Array, name: str) -> Array:
    bits = 8 * value.dtype.itemsize
    if name == "shr" and value.dtype.kind == "i":
        return value >> np.minimum(distance, bits - 1).astype(value.dtype)
    near = np.minimum(distance, bits - 1).astype(value.dtype)
    shifted = value << near if name == "shl" else value >> near
    return np.where(distance >= bits, value.dtype.type(0), shifted)


def _fused(a: Array, b: Array, c: Array) -> Array:
    """A * b + c rounded once: the exact product, a sum rounded to odd, and that to f32."""
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64).copy()
    inexact = (lost != 0) & np.isfinite(total) & (bits & 1 == 0)
    bits[inexact] += np.where((lost[inexact] > 0) == (total[inexact] > 0), 1, -1)
    return bits.view(np.float64).astype(np.float32)


def _quotient(a: Array, b: Array) -> Array:
    result: Array = np.trunc(a / b).astype(a.dtype)
    return result


_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "neu": np.not_equal,
}
_COMPUTE: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "min": np.minimum,
    "max": np.maximum,
    "div": _quotient,
    "rem": np.fmod,
    "neg": np.negative,
    "fma": _fused,
    "mad": lambda a, b, c: a * b + c,
    "not": lambda a: ~a,
    "popc": lambda a: np.bitwise_count(a).astype(np.uint32),
}
