"""What a CUDA graph is, on host memory: torch's operations and emulated launches, recorded once and done again as they were.

No Python of the model runs at a replay, so whatever the host decided while recording stays decided. A read by the host ends the
recording, as it ends a capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hotslot.ops.launcher import Arguments

from . import emulated

# Operations whose result's shape, or a number for the host, depends on what a tensor holds: on a device each is a synchronise.
_READS = {
    "_local_scalar_dense",
    "_unique",
    "_unique2",
    "equal",
    "is_nonzero",
    "item",
    "masked_select",
    "nonzero",
    "nonzero_numpy",
    "unique_consecutive",
    "unique_dim",
}
_METHODS = {"__bool__", "__complex__", "__float__", "__index__", "__int__", "cpu", "item", "numpy", "tolist"}


class HostReadError(RuntimeError):
    """The host asked what a tensor holds."""


class _Operations(TorchDispatchMode):
    def __init__(self, recorded: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]) -> None:
        super().__init__()
        self._recorded = recorded

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = func.overloadpacket.__name__
        is_masked = name.startswith("index") and any(
            isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.bool, torch.uint8) for leaf in tree_leaves(args[1:2])
        )
        # Of tensors without an element per item (a count, not a mask), or a size of its own.
        is_counted = name == "repeat_interleave" and isinstance(args[0], torch.Tensor) and func._overloadname == "Tensor"
        if name in _READS or is_masked or is_counted:
            raise HostReadError(f"aten::{name}{' with a mask' if is_masked else ''}")
        out = func(*args, **(kwargs or {}))
        self._recorded(func, tuple(args), dict(kwargs or {}), out)
        return out


class _Methods(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if getattr(func, "__name__", "") in _METHODS:
            raise HostReadError(f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Inside, whatever would make the host wait for a device's tensors is a `HostReadError`."""
    with _Methods(), _Operations(lambda *_: None):
        yield


class Recorded:
    """The operations and launches of one call of `function`, which is made while they are recorded."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._steps: list[Callable[[], None]] = []
        launch = emulated.EmulatedKernel.launch

        def recorded(
            kernel: Any, grid: tuple[int, int, int], block: tuple[int, int, int], shared: int, stream: int, args: Arguments
        ) -> None:
            # As the driver does, the values of the arguments at this launch.
            copy = Arguments(args.signature, *(value.value for value in args._values))
            self._steps.append(lambda: launch(kernel, grid, block, shared, stream, copy))
            launch(kernel, grid, block, shared, stream, args)

        with ExitStack() as stack:
            stack.callback(setattr, emulated.EmulatedKernel, "launch", launch)
            emulated.EmulatedKernel.launch = recorded  # type: ignore[method-assign]
            stack.enter_context(_Methods())
            stack.enter_context(_Operations(self._record))
            self.out = function()

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if "empty" in func.overloadpacket.__name__:
            return
        kept = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]

        def again() -> None:
            found = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
            for old, new in zip(kept, found, strict=True):
                # Views and operations in place have the memory of before already.
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self._steps.append(again)

    def replay(self) -> Any:
        """Do all of it again, in the same memory; what the call returned then, which holds the new values."""
        with torch.no_grad():
            for step in self._steps:
                step()
        return self.out
