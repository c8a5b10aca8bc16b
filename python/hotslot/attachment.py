"""What `attach` puts onto a model, and `detach` takes off again: a hook for each site and a few instance attributes."""

from __future__ import annotations

import copy
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .attached import InstanceForward, remove_inert
from .embedding import EmbeddingHook
from .errors import DeviceError, PoolError
from .hooks import CallGate, SiteHook, checked_rows, generating, token_ids
from .linear import LinearForward
from .moe import ExpertsForward, RouterForward
from .ops import register_site
from .ops.team import borrow_torch_threads
from .routing import current_route
from .shared import share_inputs
from .sites import ModelSite, embedding_of, is_tower

if TYPE_CHECKING:
    from .model import AttachedModel
    from .ops.experts import ExpertSites

_UIDS = itertools.count()
_OWN_ATTRIBUTES = ("forward", "generate", "__deepcopy__")


def check_attachable(model: torch.nn.Module, sites: Sequence[ModelSite]) -> None:
    """Refuse a model that has a pool already, or whose layers are not where the pool will be.

    Raises:
        PoolError: The model, or a part of it, is attached.
        DeviceError: A layer is neither on the CPU nor on a GPU.
    """
    for path, module in model.named_modules():
        hooks = (*module._forward_hooks.values(), module.__dict__.get("forward"))
        if any(isinstance(hook, (SiteHook, InstanceForward)) for hook in hooks):
            raise PoolError(f"{path or type(model).__name__} has a hotslot pool attached; detach it before attaching another")
    for found in sites:
        for parameter in itertools.chain(found.module.parameters(recurse=False), found.module.buffers(recurse=False)):
            if parameter.device.type not in ("cpu", "cuda"):
                raise DeviceError(
                    f"{found.site.path} is on {parameter.device}; models are served on the CPU and on CUDA devices: move it with "
                    "model.to('cpu')",
                    call="attach",
                )
            break


class Attachment:
    """The hooks of one attached model."""

    def __init__(self, lora: AttachedModel, model: torch.nn.Module, sites: Sequence[ModelSite]) -> None:
        remove_inert(model)
        borrow_torch_threads()
        if "torch._dynamo" in sys.modules:
            # A graph compiled before never sees new hooks.
            torch.compiler.reset()
        self._model = model
        self.hooks: list[SiteHook] = []
        """The hook of each site, in the pool's order; also what keeps them findable from compiled graphs."""
        self._handles: list[Any] = []
        self._forwards: list[InstanceForward] = []
        head = embedding_of(model, "get_output_embeddings")
        experts: dict[str, tuple[torch.nn.Module, dict[tuple[int, str], SiteHook]]] = {}
        for index, found in enumerate(sites):
            kind = EmbeddingHook if found.site.kind == "embedding" else SiteHook
            path, module = found.site.path, found.module
            hook = kind(lora, found, index, next(_UIDS), is_tower=is_tower(path), is_head=module is head)
            register_site(hook.uid, hook)
            self.hooks.append(hook)
            if found.expert is not None:
                experts.setdefault(path.rpartition("[")[0], (module, {}))[1][found.expert] = hook
            elif found.site.kind == "router":
                self._forwards.append(RouterForward(lora, module, hook))
            elif _takes_forward(module) and not hook.is_tower:
                self._forwards.append(LinearForward(lora, module, hook))
            else:
                self._handles.append(module.register_forward_hook(hook, with_kwargs=True))
        share_inputs(self.hooks)
        self._forwards += [ExpertsForward(lora, module, path, hooks) for path, (module, hooks) in experts.items()]
        # What somebody put into the instance before comes back on detach.
        self._before = {name: model.__dict__[name] for name in _OWN_ATTRIBUTES if name in model.__dict__}
        generate = getattr(model, "generate", None)
        if callable(generate):
            model.__dict__["generate"] = _Generate(lora, generate)
        model.__dict__["__deepcopy__"] = functools.partial(_copy_unattached, model, self._before)
        model.__dict__["forward"] = CallGate(lora, model.forward, self._forwards)

    def groups(self) -> list[tuple[int, ...]]:
        """The sites that a kernel serves, those together that read the same x; routed experts are in `experts`."""
        served = [hook for hook in self.hooks if hook.kind not in ("embedding", "expert")]
        return list(dict.fromkeys((hook.index,) if hook.shared is None else hook.shared.indices for hook in served))

    def experts(self) -> list[ExpertSites]:
        """The sites of each module of routed experts."""
        return [forward.sites for forward in self._forwards if isinstance(forward, ExpertsForward)]

    def remove(self) -> None:
        """Leave the model as it was before."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for forward in self._forwards:
            forward.remove()
        self._forwards.clear()
        for name in _OWN_ATTRIBUTES:
            self._model.__dict__.pop(name, None)
        self._model.__dict__.update(self._before)
        self.hooks.clear()
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()


def _takes_forward(module: torch.nn.Module) -> bool:
    """Whether a layer's own forward is nn.Linear's, and nobody has put something around it that is to see the base's output."""
    return type(module) is torch.nn.Linear and not module._forward_hooks and "forward" not in module.__dict__


class _Generate:
    """`model.generate` that takes `adapter_names=` and lets beams multiply the rows."""

    def __init__(self, lora: AttachedModel, generate: Callable[..., Any]) -> None:
        functools.update_wrapper(self, generate)
        self._lora = lora
        self._generate = generate

    def __call__(self, *args: Any, adapter_names: Sequence[Any] | None = None, **kwargs: Any) -> Any:
        """What `generate` returns; the prompts must have the route's rows, whatever beams make of them later."""
        if adapter_names is None:
            return self._checked(args, kwargs)
        with self._lora.route(adapter_names):
            return self._checked(args, kwargs)

    def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        route = current_route(self._lora)
        checked_rows(route, args, kwargs, may_multiply=False)
        sequence = None
        if route is not None and route.activation is not None:
            # Once, in the prompt: no later step holds the invocation.
            sequence = route.activation.begin(token_ids(args, kwargs))
        with generating(route, sequence):
            return self._generate(*args, **kwargs)


def _copy_unattached(model: torch.nn.Module, before: dict[str, Any], memo: dict[int, Any]) -> torch.nn.Module:
    """A deepcopy of an attached model: an unattached one."""
    twin = type(model).__new__(type(model))
    memo[id(model)] = twin
    state = {name: value for name, value in model.__dict__.items() if name not in _OWN_ATTRIBUTES}
    twin.__setstate__(copy.deepcopy({**state, **before}, memo))
    remove_inert(twin)
    return twin
