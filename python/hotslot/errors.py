"""Every error that hotslot raises.

    HotslotError
    +-- AdapterError                   one adapter is missing, broken or does not fit
    |   +-- AdapterNotFoundError       (LookupError)  no adapter of that name
    |   +-- AdapterFileError           (OSError)      a file is missing, truncated or malformed
    |   +-- AdapterConfigError         (ValueError)   adapter_config.json, or a feature not supported
    |   +-- AdapterShapeError          (ValueError)   tensors that do not fit the model
    |   +-- RankError                  (ValueError)   a rank above the pool's max_rank
    +-- PoolError                      (RuntimeError) the pool cannot do this now
    |   +-- PoolFullError                             no free slot and none that can be evicted
    |   +-- SlotBusyError                             the slot still has references
    |   +-- LeaseError                                a lease released twice, or of another pool
    +-- RouteError                     (ValueError)   rows that do not fit the batch or the pool
    +-- ClosedError                    (RuntimeError) the pool or the attachment is gone
    +-- TierError                      (RuntimeError) a tier could not take or give a copy
    +-- PeerError                      (RuntimeError) another process could not serve weights
    +-- DeviceError                    (RuntimeError) a device call failed
    +-- KernelCompileError             (RuntimeError) a kernel could not be compiled

A message says what was found, what was expected and the fix. What it says in numbers is also an attribute of the error;
the attributes that a class may carry are declared on it and are None where they do not apply. All errors can be pickled,
so they cross process borders whole.
"""

from __future__ import annotations

__all__ = [
    "AdapterConfigError",
    "AdapterError",
    "AdapterFileError",
    "AdapterNotFoundError",
    "AdapterShapeError",
    "ClosedError",
    "DeviceError",
    "HotslotError",
    "KernelCompileError",
    "LeaseError",
    "PeerError",
    "PoolError",
    "PoolFullError",
    "RankError",
    "RouteError",
    "SlotBusyError",
    "TierError",
]


class HotslotError(Exception):
    """Base of all errors of this package.

    Args:
        message: What was found, what was expected, the fix; lower case.
        **numbers: The facts in the message, one attribute each.

    Example:
        >>> error = RankError("rank 128 is above max_rank 64", rank=128, max_rank=64)
        >>> str(error), error.rank, error.max_rank
        ('rank 128 is above max_rank 64', 128, 64)
    """

    def __init__(self, message: str, **numbers: object) -> None:
        """Keep the message, and each keyword as an attribute."""
        super().__init__(message)
        for key, value in numbers.items():
            setattr(self, key, value)

    @property
    def message(self) -> str:
        """The message alone."""
        return str(self.args[0])

    def __str__(self) -> str:
        """The message, whatever a built-in base class would make of it."""
        return self.message


class AdapterError(HotslotError):
    """One adapter is missing, broken, or does not fit the model.

    Attributes:
        path: The adapter's folder or file, or None for one in memory.
    """

    path: str | None = None


class AdapterNotFoundError(AdapterError, LookupError):
    """No adapter of that name is loaded.

    Attributes:
        name: What was asked for.
        known: The names that would have been found.
    """

    name: str | None = None
    known: tuple[str, ...] = ()


class AdapterFileError(AdapterError, OSError):
    """A file of the adapter is missing, truncated or malformed.

    Attributes:
        tensor: The tensor that the complaint is about, or None.
        found: The number or text found.
        expected: What should have been there.
    """

    tensor: str | None = None
    found: object = None
    expected: object = None


class AdapterConfigError(AdapterError, ValueError):
    """A field of adapter_config.json is wrong, or asks for what is not supported.

    Attributes:
        key: The field, or the feature that is not supported.
        value: What it holds.
        count: How many tensors the complaint covers.
        samples: The first few of their names.
    """

    key: str | None = None
    value: object = None
    count: int | None = None
    samples: tuple[str, ...] = ()


class AdapterShapeError(AdapterError, ValueError):
    """Tensors that do not fit the model: wrong shape, unknown name, half a pair.

    Attributes:
        tensor: The first tensor that does not fit.
        module: The module it belongs to.
        found: The shape found.
        expected: The shape that would fit.
        count: How many tensors do not fit.
        samples: The first few of their names.
    """

    tensor: str | None = None
    module: str | None = None
    found: tuple[int, ...] | None = None
    expected: tuple[int, ...] | None = None
    count: int | None = None
    samples: tuple[str, ...] = ()


class RankError(AdapterError, ValueError):
    """The adapter's rank is above what the pool has room for.

    Attributes:
        rank: The adapter's rank.
        max_rank: The pool's limit.
        module: The first module above the limit.
    """

    rank: int | None = None
    max_rank: int | None = None
    module: str | None = None


class PoolError(HotslotError, RuntimeError):
    """The pool cannot do this now; nothing was changed.

    Attributes:
        needed: Bytes that an adapter's extras need.
        room: Bytes of a slot's place for them.
    """

    needed: int | None = None
    room: int | None = None


class PoolFullError(PoolError):
    """No slot is empty and none can be evicted.

    Attributes:
        max_loras: Slots of the pool.
        pinned: Slots that are never evicted.
        busy: Slots held by requests in flight.
    """

    max_loras: int | None = None
    pinned: int | None = None
    busy: int | None = None


class SlotBusyError(PoolError):
    """The slot has references, so it cannot be written, emptied or rotated away from.

    Attributes:
        slot: The slot.
        name: The adapter in it.
        ref_count: Its references.
    """

    slot: int | None = None
    name: str | None = None
    ref_count: int | None = None


class LeaseError(PoolError):
    """A lease that was released before, or that belongs to another pool.

    Attributes:
        slot: The slot that the lease was for.
    """

    slot: int | None = None


class RouteError(HotslotError, ValueError):
    """The rows of a route do not fit the batch, the module or the pool.

    Attributes:
        found: How many rows or tokens there were.
        expected: How many there should have been.
    """

    found: int | None = None
    expected: int | None = None


class ClosedError(HotslotError, RuntimeError):
    """Used after detach, after close, or in a process that does not own it."""


class TierError(HotslotError, RuntimeError):
    """A tier could not take or give a copy; it is as it was, and a load goes on without it.

    Attributes:
        tier: "host" or "disk".
        needed: Bytes of the copy.
        room: Bytes that could be made free for it.
        path: The file or folder.
        call: What was tried there.
        code: The operating system's error number.
    """

    tier: str | None = None
    needed: int | None = None
    room: int | None = None
    path: str | None = None
    call: str | None = None
    code: int | None = None


class PeerError(HotslotError, RuntimeError):
    """Another process could not serve the weights asked of it, or this one could not begin to serve.

    Attributes:
        peer: The peer's address.
        reason: "disconnected", "gone" (it no longer has it), "timeout", "corrupt" (what came is not what was announced),
            "unsupported" (another protocol or version), "refused" (wrong token or certificate, or it is full), "cancelled",
            "address" (the address is none) or "bind" (a server could not listen).
        found: What was found.
        expected: What was expected.
    """

    peer: str | None = None
    reason: str | None = None
    found: object = None
    expected: object = None


class DeviceError(HotslotError, RuntimeError):
    """A call to the device failed.

    Attributes:
        call: The driver call.
        code: Its result.
    """

    call: str | None = None
    code: int | None = None


class KernelCompileError(HotslotError, RuntimeError):
    """A kernel could not be compiled for this device.

    Attributes:
        arch: The architecture compiled for.
        log: The compiler's own words.
    """

    arch: str | None = None
    log: str | None = None
