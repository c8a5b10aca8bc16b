"""What stays on a model that it was put onto, and what it becomes in a copy of that model: nothing."""

from __future__ import annotations

import copy
import functools
import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from .model import AttachedModel


class Inert:
    """What the copy of a hook becomes; `remove_inert` takes it out."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""


class Attached:
    """What stays on the model that it was put onto: a deepcopy leaves an `Inert` behind, a pickle is refused."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return Inert()

    def __reduce__(self) -> Any:
        raise TypeError("a model with hotslot attached cannot be pickled; call detach() first, or save its state_dict()")


class InstanceForward(Attached, ABC):
    """A `forward` put onto one module, around the module's own. Nothing of it is part of a state_dict."""

    def __init__(self, lora: AttachedModel, module: torch.nn.Module, path: str) -> None:
        functools.update_wrapper(self, module.forward)
        self.path = path
        self._lora = lora
        self._module = module
        self._before = module.__dict__.get("forward")
        self._own: Callable[..., Any] = module.forward
        module.__dict__["forward"] = self

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns, with the adapters of the current route."""

    @property
    def is_in_place(self) -> bool:
        """Whether the module still has it: what is put over it may leave the adapters out."""
        return self._module.__dict__.get("forward") is self

    def remove(self) -> None:
        """Give the module its own forward back."""
        if self._before is None:
            self._module.__dict__.pop("forward", None)
        else:
            self._module.__dict__["forward"] = self._before

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # The copy of the module is known already, since the module's attributes are copied after it was made.
        if self._before is not None:
            return copy.deepcopy(self._before, memo)
        return types.MethodType(type(self._module).forward, memo[id(self._module)])


def remove_inert(model: torch.nn.Module) -> None:
    """Take out what the hooks and forwards of an attached model became in a copy of it."""
    for module in model.modules():
        hooks = module._forward_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, Inert)]:
            del hooks[key]
            module._forward_hooks_with_kwargs.pop(key, None)
        forward = module.__dict__.get("forward")
        is_own = isinstance(forward, types.MethodType) and forward.__self__ is module and forward.__func__ is type(module).forward
        if is_own or isinstance(forward, Inert):
            del module.__dict__["forward"]
