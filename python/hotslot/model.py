"""`attach`: a slot pool on a live model, and the calls that load, route, replace and unload its adapters."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from ._core import Capture, LoraWeights, SlotInfo
from .activation import check_starts
from .attachment import Attachment, check_attachable
from .background import Background
from .catalog import Catalog
from .contents import PoolContents
from .devices import CPU, homes_of
from .digests import Digests
from .errors import AdapterNotFoundError, ClosedError, PoolError, RouteError, SlotBusyError
from .fetch import Fetcher
from .hooks import Process
from .lease import Lease
from .loader import Loader, Way
from .ops import DTYPE_CODES
from .pool import PoolLimits, allocate, check_extras, check_limits, listed
from .promoter import Promoter
from .registered import RegisteredAdapters
from .report import LoadReport
from .routing import BASE, Route, StaticRoute, check_lengths, check_rows
from .sites import ModelSite, choose, expert_indices
from .source import Source, SourceReader, wanted_sites
from .tier_stack import TierStack
from .tiers import Tiers

if TYPE_CHECKING:
    from .ops.backend import DeviceBackend

_POLL_SECONDS = 0.002

BASE_CACHE_ID = "hs1:base"
"""The content identity of a row without an adapter."""


def attach(
    model: torch.nn.Module,
    adapters: Mapping[str, Source] | None = None,
    *,
    max_loras: int = 8,
    max_rank: int = 64,
    pool_dtype: Literal["bfloat16", "float32"] = "bfloat16",
    sites: str | Iterable[str] = "auto",
    extras_bytes: int | None = None,
    experts: bool | None = None,
    unrouted: Literal["base", "error"] = "base",
    tiers: Tiers | None = None,
    room_for: Iterable[Source] = (),
) -> AttachedModel:
    """Give `model` a pool of adapter slots, by forward hooks; no module is replaced and no base weight copied.

    Args:
        model: Any torch module, on the CPU or on GPUs: the pool lies where its layers run, a part on each device. A transformers
            model also gets `adapter_names=` on call and `generate`.
        adapters: Startup adapters, name -> PEFT folder or `(tensors, config)`. They take the first slots, are pinned, and the
            first of them is the active adapter.
        max_loras: Slots in the pool.
        max_rank: The largest rank that a slot has room for, 1 to 256.
        pool_dtype: What the weights are stored in; "float32" is exact, "bfloat16" rounds F32 and F16 files (reported).
        sites: Which layers get room: "auto" (the family's attention and MLP projections, and what startup adapters target;
            every linear of an unknown family), "all-linear", or layer names.
        extras_bytes: Bytes per slot for what is neither A nor B of a linear layer: DoRA, biases, saved modules, embeddings, token
            rows, routers and experts. By default what the startup adapters need, together; nothing if they need nothing.
        experts: Whether routers and routed experts take adapters; by default the environment's HOTSLOT_LORA_EXPERTS=1.
        unrouted: What a call outside any route does: run the base model, or raise `RouteError`.
        tiers: Where adapters are looked for before their origin is asked; see `Tiers`. Without it nothing is kept but what is in
            slots.
        room_for: Adapters that are loaded later, folders or `(tensors, config)`: the pool gets room for what they hold, as for
            startup adapters, and one that does not fit is refused now.

    Returns:
        The attached model's adapters. Everything is allocated here and nothing grows with use.

    Raises:
        PoolError: The model is attached already, `max_loras` has no room for the startup adapters, or one thing is where a list or
            a dict belongs.
        RouteError: `sites` names no layer, or one that hooks cannot serve.
        AdapterError: A startup adapter, or one of `room_for`, is refused; the model is left unattached.
        DeviceError: A GPU cannot be used, or some layers run on the CPU and some on a GPU; the model is left unattached.
        KernelCompileError: The GPU's kernels are not there and cannot be compiled; the model is left unattached.
        TierError: The folder of the disk cache cannot be used.

    Example:
        >>> layer = torch.nn.Sequential(torch.nn.Linear(8, 8))
        >>> lora = attach(layer, max_loras=2, max_rank=4)
        >>> [slot.state for slot in lora.slots()]
        ['empty', 'empty']
        >>> lora.detach()
    """
    if not isinstance(model, torch.nn.Module):
        raise PoolError(f"attach takes a torch.nn.Module; found {type(model).__name__}")
    if adapters is not None and not isinstance(adapters, Mapping):
        raise PoolError(f"adapters is a {type(adapters).__name__}; expected a dict, name -> PEFT folder or (tensors, config)")
    startup = dict(adapters or {})
    later = listed("room_for", room_for, "PEFT folders or (tensors, config)")
    check_limits(max_loras, max_rank, pool_dtype, len(startup))
    if unrouted not in ("base", "error"):
        raise RouteError(f"unrouted={unrouted!r}; expected 'base' or 'error'")
    if tiers is not None and not isinstance(tiers, Tiers):
        raise PoolError(f"tiers={tiers!r}; expected a hotslot.Tiers, or None for no tiers")
    with_experts = os.environ.get("HOTSLOT_LORA_EXPERTS") == "1" if experts is None else experts
    check_extras(0 if extras_bytes is None else extras_bytes, with_experts)
    sites = sites if isinstance(sites, str) else listed("sites", sites, "layer names")
    expected = [*startup.values(), *later]
    wanted = wanted_sites(expected, model)
    chosen = choose(model, sites, wanted, extras=wanted.has_extras or bool(extras_bytes), experts=with_experts)
    check_attachable(model, chosen)
    reader = SourceReader(chosen, model, max_rank, experts=with_experts)
    laid_out = [found.site for found in chosen]
    devices, homes = homes_of(chosen)
    needed = reader.place_spec(expected if extras_bytes is None else expected[len(startup) :])
    place = needed if extras_bytes is None else extras_bytes
    if extras_bytes is not None and needed.nbytes(laid_out, pool_dtype) > extras_bytes:
        raise PoolError(
            f"room_for needs {needed.nbytes(laid_out, pool_dtype)} extra bytes per slot; expected at most "
            f"extras_bytes={extras_bytes}: raise it, or leave it out"
        )
    if devices == [CPU]:
        extras = place if isinstance(place, int) else place.nbytes(laid_out, pool_dtype)
        weights = allocate(laid_out, max_loras, max_rank, pool_dtype, pinned=len(startup), extras_bytes=extras)
        lora = AttachedModel(model, weights, chosen, reader, unrouted, tiers or Tiers())
    else:
        from .ops.placed import on_devices

        limits = PoolLimits(max_loras, max_rank, pool_dtype, len(startup))
        weights, backend = on_devices(devices, homes, laid_out, limits, place)
        lora = AttachedModel(model, weights, chosen, reader, unrouted, tiers or Tiers())
        lora.backend, lora.devices = backend, [devices[home] for home in homes]
    for slot, (name, source) in enumerate(startup.items()):
        lora._loader.load(name, source, Way("startup", slot))
    weights.set_lora_weights()
    lora._attachment = Attachment(lora, model, chosen)
    if lora.backend is not None:
        dtypes = {parameter.dtype for found in chosen for parameter in found.module.parameters(recurse=False)}
        try:
            found_dtypes = [dtype for dtype in DTYPE_CODES if dtype in dtypes]
            lora.backend.prepare(lora._attachment.groups(), found_dtypes, lora._attachment.experts())
        except BaseException:
            # Without its kernels no layer may be left hooked.
            lora.detach()
            raise
    return lora


class AttachedModel(RegisteredAdapters):
    """A model's adapters; made by `attach`. All methods may be called from any thread.

    Attributes:
        weights: The `LoraWeights` underneath: slots, tables, counts.
        unrouted: What a call outside any route does, "base" or "error".
        backend: The kernels on the pool's device; None where those of the CPU serve.
        device: That device, if all layers have one backend's.
        devices: The device of each site, where `attach` found them on GPUs.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        weights: LoraWeights,
        sites: Sequence[ModelSite],
        reader: SourceReader,
        unrouted: str,
        tiers: Tiers,
    ) -> None:
        self.weights = weights
        self.unrouted = unrouted
        self.backend: DeviceBackend | None = None
        self.device: torch.device | None = None
        self.devices: Sequence[torch.device] | None = None
        self._model_name = type(model).__name__
        self._reader = reader
        self._contents = PoolContents(weights, expert_indices(sites))
        self._attachment: Attachment | None = None
        self._closed = False
        self._process = Process()
        self._digests = Digests(weights)
        self._tiers = TierStack(weights, reader, tiers)
        self._fetcher = Fetcher(weights, reader, self._digests, self._tiers)
        self._loader = Loader(weights, self._fetcher, self._digests, self._tiers)
        self._catalog = Catalog()
        self._background = Background(tiers.max_loads, self._process)
        self._promoter = Promoter(self, self._loader, self._catalog, self._background)
        self._live = 0  # entered routes
        self._live_mutex = threading.Lock()

    # --- routing ---------------------------------------------------------------------------------------------------------

    def route(
        self,
        rows: Sequence[Any] | None = None,
        *,
        tokens: Sequence[Any] | None = None,
        starts: Sequence[int | None] | None = None,
        lengths: Sequence[int] | None = None,
        load: bool = False,
    ) -> Route:
        """Bind each row of a batch to an adapter, as a context manager.

        Args:
            rows: One selector per row: an adapter's name, a slot >= 0, a lease, None or -1 (the active adapter, or base when
                there is none), `BASE`, or a dict of selectors with weights.
            tokens: Instead of rows: one selector per token of a packed batch.
            starts: The first active token of each row, counted from the start of its sequence (padding and cached tokens
                included); what comes before is base. None for a row whose adapters decide: an aLoRA adapter begins at the last
                occurrence of its invocation tokens, any other with the row.
            lengths: How many tokens of a packed batch each row has, one row after the other: a mixed batch of prompts and decode
                steps. On a GPU a row's bits are then those that it has in a batch of its own.
            load: Load registered names that are missing, on worker threads, before the block is entered; `async with` waits for
                them without blocking the event loop.

        Raises:
            RouteError: No rows, or a selector, start or length that is none. On entering: an empty slot, or DoRA in a weighted row.
            AdapterNotFoundError: On entering: an unknown name (with `load`, one that is not registered either).
            SlotBusyError: On entering: the adapter is being loaded.
            Exception: On entering with `load`: whatever a load raised; nothing is held then.
        """
        self._check_open()
        if rows is not None and lengths is not None and tokens is None and starts is None:
            selectors = check_rows(rows)
            counts = check_lengths(lengths, len(selectors))
            packed = [selector for selector, count in zip(selectors, counts, strict=True) for _ in range(count)]
            return Route(self, packed, per_token=True, lengths=counts, load=load)
        if rows is not None and tokens is None and lengths is None:
            selectors = check_rows(rows)
            return Route(self, selectors, per_token=False, starts=check_starts(starts, len(selectors)), load=load)
        if tokens is not None and rows is None and starts is None and lengths is None:
            return Route(self, check_rows(tokens), per_token=True, load=load)
        raise RouteError(
            "route takes rows (with starts= or lengths=) or tokens=: one selector per row, or one per token of a packed batch"
        )

    def static_route(self, max_tokens: int, max_entries: int = 1) -> StaticRoute:
        """A route whose buffers keep their addresses, for captured graphs; fill it with `set(rows)`."""
        self._check_open()
        return StaticRoute(self, max_tokens, max_entries)

    def lease(self, selector: Any) -> Lease:
        """Hold a reference on an adapter, by name, slot, or None for the active one, until the lease is released.

        Raises:
            AdapterNotFoundError: No slot holds the name.
            RouteError: The slot is empty or out of range, or no adapter is active.
        """
        self._check_open()
        if isinstance(selector, type(BASE)):
            raise RouteError("base needs no lease; lease an adapter by name or slot")
        slot = self._acquire(selector)
        if slot < 0:
            raise RouteError("no adapter is active; lease one by name")
        info = self.weights.slot_info(slot)
        return Lease(self, slot, info.name, info.generation)

    def capturing(self) -> Capture:
        """Inside, a CUDA graph may be captured in this thread: loads, in every thread, pause until it is left.

        Call the model once before, under a `static_route`, so that nothing is left to compile or to allocate.

        Example:
            >>> lora = attach(torch.nn.Sequential(torch.nn.Linear(8, 8)), max_loras=2, max_rank=4)
            >>> with lora.capturing():  # and inside: torch.cuda.graph(...), the model's call
            ...     pass
        """
        return Capture()

    # --- loading ---------------------------------------------------------------------------------------------------------

    def load(self, source: Source, name: str) -> tuple[int, str | None]:
        """Load an adapter into a cache slot without touching the active one.

        Args:
            source: A PEFT folder, or `(tensors, config)`.
            name: What requests call it, `[A-Za-z0-9][A-Za-z0-9_./-]{0,127}`.

        Returns:
            The slot, and the name of the adapter evicted for it (None if a slot was free).

        Raises:
            AdapterError: The source is refused; nothing was changed.
            PoolFullError: Every cache slot has references.
        """
        return self._promote(source, name, activate=False)

    def promote_lora_from_disk(
        self, directory: str | os.PathLike[str], name: str, *, activate: bool = True
    ) -> tuple[int, str | None]:
        """Load an adapter into a cache slot and make it active; see `load` for the rest.

        A resident name with equal content is found where it is; with other content it is replaced (see `replace`).

        Raises:
            SlotBusyError: The active adapter has references, so the rotation is refused before anything is loaded.
        """
        return self._promote(directory, name, activate=activate)

    def swap_lora_from_disk(self, directory: str | os.PathLike[str], name: str, slot: int) -> int:
        """Put an adapter into a given slot; see `ModelAdapters.swap_lora_from_disk`."""
        self._check_open()
        return self._loader.load(name, directory, Way("swap", slot))[0]

    def replace(self, name: str, source: Source) -> int:
        """Give a resident name new weights under load: running requests finish on the old, new ones get the new.

        Args:
            name: A resident adapter.
            source: A PEFT folder, or `(tensors, config)` with torch tensors or arrays (an RL loop's weight sync).

        Returns:
            The slot that holds the new weights.

        Raises:
            AdapterNotFoundError: The name is not resident.
            PoolFullError: No slot is free and the old one is busy.
        """
        self._check_open()
        if self.weights.slot_of(name) is None:
            raise self._not_found(name)
        return self._loader.load(name, source, Way("replace"))[0]

    def set_active_lora(self, name: str) -> int:
        """Make a resident adapter the active one; see `ModelAdapters.set_active_lora`."""
        self._check_open()
        return self.weights.set_active(name)

    def unload(self, name: str, *, wait: bool = False, deferred: bool = False, timeout: float | None = None) -> None:
        """Take an adapter out of its slot.

        Args:
            name: A resident adapter.
            wait: Wait until its references are returned; other calls and all compute go on meanwhile.
            deferred: Take the name away at once and let the slot empty when its last reference is returned.
            timeout: Seconds to wait at most.

        Raises:
            AdapterNotFoundError: The name is not resident.
            SlotBusyError: It has references, and neither `wait` nor `deferred` was given, or the time ran out; nothing changed.
        """
        self._check_open()
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                self._loader.unload(name, deferred)
                return
            except SlotBusyError:
                if not wait or (end is not None and time.monotonic() >= end):
                    raise
            time.sleep(_POLL_SECONDS)

    # --- what there is ---------------------------------------------------------------------------------------------------

    def slots(self) -> list[SlotInfo]:
        """Every slot as it is now: name, state, ref_count, last_used, generation, rank, nbytes, pinned."""
        return self.weights.slot_infos()

    def cache_id(self, selector: Any = None) -> str:
        """The content identity of what a selector names: equal on every replica and after a reload; `hs1:base` for base.

        It is computed once per content, after the load that first brought it; this waits for that.

        Raises:
            AdapterNotFoundError, RouteError: As in `lease`.
        """
        slot = -1 if isinstance(selector, type(BASE)) else self._acquire(selector)
        if slot < 0:
            return BASE_CACHE_ID
        try:
            return self._digests.of_slot(slot)
        finally:
            self._release(slot)

    @property
    def reports(self) -> dict[str, LoadReport]:
        """The report of each name's last load."""
        return self._loader.reports

    @property
    def closed(self) -> bool:
        """Whether `detach` was called."""
        return self._closed

    def detach(self) -> None:
        """Take the pool off the model, which is then bit for bit what it was before. A second call does nothing.

        Loads that are under way end with `ClosedError`; a callable that is working for one is not waited for.

        Raises:
            SlotBusyError: A route is entered or a lease is held.
        """
        with self._live_mutex:
            if self._closed:
                return
            busy = [slot for slot in self.weights.slot_infos() if slot.ref_count]
            if busy and not self._live and sum(slot.ref_count for slot in busy) <= self._tiers.num_leases:
                self._tiers.close()  # only other processes hold them
                busy = [slot for slot in self.weights.slot_infos() if slot.ref_count]
            if self._live or busy:
                names = ", ".join(f"{slot.name} ({slot.ref_count})" for slot in busy) or "base rows only"
                raise SlotBusyError(
                    f"detach with {self._live} routes entered and references on {names}; leave the routes and release the leases"
                )
            self._closed = True
        self._background.close(self._closed_error())
        self._tiers.close()
        if self._attachment is not None:
            self._attachment.remove()
        self._digests.close()
        self.weights.close()

    def adapter_id_for(self, slot: int) -> int:
        """See `ModelAdapters.adapter_id_for`."""
        self._check_open()
        return self.weights.adapter_id_for_slot(slot)

    def acquire_adapter_slot(self, slot: int) -> int:
        """See `ModelAdapters.acquire_adapter_slot`; the raw pair for engines, leases are the safe way."""
        self._check_open()
        return self.weights.acquire_slot(slot)

    def release_adapter_slot(self, resolved: int) -> None:
        """See `ModelAdapters.release_adapter_slot`."""
        self.weights.release_slot(resolved)

    def __repr__(self) -> str:
        if self._closed:
            return f"AttachedModel({self._model_name}, detached)"
        return f"AttachedModel({self._model_name}, {len(self.weights.adapter_names())} of {self.weights.max_loras} slots filled)"

    # --- for routes, leases and hooks ------------------------------------------------------------------------------------

    def _acquire(self, selector: str | int | None) -> int:
        """A counted slot for a name or slot, or the active one for None (-1 where none is active); raises if there is none."""
        if isinstance(selector, str):
            slot = self.weights.acquire_by_name(selector)
            if slot < 0:
                if self._loader.is_replacing(selector):
                    raise SlotBusyError(
                        f"adapter {selector!r} is being loaded again and has no slot meanwhile; try again in a moment",
                        name=selector,
                    )
                raise self._not_found(selector)
            return slot
        if selector is None or selector == -1:
            while True:
                slot = self.weights.acquire_slot(-1)
                if slot >= 0:
                    return slot
                info = self.weights.active_info()
                if info is None:
                    return -1
                if info.state == "loading":
                    raise SlotBusyError(f"the active slot {info.slot} is being loaded; try again when it is ready", slot=info.slot)
        slot = self.weights.acquire_slot(selector)
        if slot < 0:
            held = (
                f"slots 0 to {self.weights.max_loras - 1}" if selector >= self.weights.max_loras else "a slot that holds an adapter"
            )
            raise RouteError(
                f"slot {selector} cannot be routed to: found it empty, loading or out of range; expected {held}", slot=selector
            )
        return slot

    def _release(self, slot: int, streams: Any = None) -> None:
        """Give a reference back; on a GPU, `streams` are those on which the holder's kernels may still run."""
        self.weights.release_slot(slot, streams)

    def device_of(self, site: int) -> torch.device | None:
        """Where a site's kernels run; None for the CPU's."""
        return self.device if self.devices is None else self.devices[site]

    def _route_entered(self) -> None:
        with self._live_mutex:
            self._check_open()
            self._live += 1

    def _route_left(self) -> None:
        with self._live_mutex:
            self._live -= 1

    # --- inside ----------------------------------------------------------------------------------------------------------

    def _promote(self, source: Source, name: str, *, activate: bool) -> tuple[int, str | None]:
        self._check_open()
        if activate:
            self.weights.check_rotation()
        return self._loader.load(name, source, Way("promote", activate=activate))

    def _not_found(self, name: str) -> AdapterNotFoundError:
        known = tuple(self.weights.adapter_names())
        listed = ", ".join(known) if known else "none"
        return AdapterNotFoundError(
            f"no adapter named {name!r} is resident; resident are: {listed}; load it with load(source, {name!r})",
            name=name,
            known=known,
        )

    def _check_open(self) -> None:
        self._process.check()
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> ClosedError:
        return ClosedError(f"the pool of {self._model_name} was detached; attach the model again")
