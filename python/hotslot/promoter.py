"""Registered names on their way to where they are wanted, and held there once they have arrived."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from .catalog import Catalog, Origin, Registration, checked
from .errors import AdapterNotFoundError, PoolError, SlotBusyError
from .fetch import Wanted
from .promotion import Load, Promotion, Target

if TYPE_CHECKING:
    from .background import Background
    from .lease import Lease
    from .loader import Loader
    from .model import AttachedModel
    from .promotion import Landed

# An adapter that was loaded for a route can be evicted by another load before the route holds it.
_MAX_ATTEMPTS = 100


class Promoter:
    """Starts the background loads of one pool.

    Args:
        lora: The attached model.
        loader: Loads adapters.
        catalog: Where names come from.
        background: Runs loads on worker threads.
    """

    def __init__(self, lora: AttachedModel, loader: Loader, catalog: Catalog, background: Background) -> None:
        self._lora = lora
        self._loader = loader
        self._catalog = catalog
        self._background = background

    def prefetch(self, name: str, target: Target) -> Promotion:
        """Bring a name to a tier, if it is not there.

        Raises:
            AdapterNotFoundError: It is neither there nor registered.
            PoolError: There is no such tier.
        """
        if target not in ("device", "host"):
            raise PoolError(f"tier={target!r}; expected 'device' (a slot) or 'host' (the host tier)")
        if target == "device":
            slot = self._lora.weights.slot_of(name)
            if slot is not None:
                self._lora.weights.touch_slot(slot)
                return self._arrived(name, (slot, None))
            return self._start(self._registered(name), activate=False)
        if not self._loader.has_host_tier:
            raise PoolError("this pool has no host tier; attach with tiers=hotslot.Tiers(host_bytes=...)")
        wanted = self._registered(name)
        return self._background.start((name, "host", wanted.key), name, "host", lambda load: self._loader.keep(wanted, load))

    def promote(self, name: str, origin: Origin | None, activate: bool) -> Promotion:
        """Load a name into a slot from its registered source, or from another."""
        if origin is not None:
            return self._start(Wanted(name, checked(origin)), activate)
        return self._start(self._registered(name), activate)

    def hold(self, names: Iterable[str], held: ExitStack) -> None:
        """Load what is missing of `names`, and hold all of them; in this thread.

        Args:
            names: Adapter names.
            held: Gets a lease on each; they are released when it is closed.

        Raises:
            AdapterNotFoundError: A name is neither resident nor registered; nothing was loaded.
            PoolFullError: There are not slots enough for all of them at once.
        """
        missing = self._hold_residents(names, held)
        for _ in range(_MAX_ATTEMPTS):
            with ExitStack() as handles:
                for handle in self._start_all(missing, handles):
                    self._background.wait(handle)
                    missing = self._hold_residents(missing, held)
            if not missing:
                return
        raise self._chased_away(missing)

    async def ahold(self, names: Iterable[str], held: ExitStack) -> None:
        """As `hold`, without blocking the event loop."""
        missing = self._hold_residents(names, held)
        for _ in range(_MAX_ATTEMPTS):
            with ExitStack() as handles:
                for handle in self._start_all(missing, handles):
                    await handle
                    missing = self._hold_residents(missing, held)
            if not missing:
                return
        raise self._chased_away(missing)

    def _start_all(self, names: Iterable[str], handles: ExitStack) -> list[Promotion]:
        """Loads of all names, or of none; those that have not ended when `handles` is closed are cancelled."""
        wanted = [self._registered(name) for name in names]
        started = []
        for one in wanted:
            handle = self._start(one, activate=False)
            handles.callback(handle.cancel)
            started.append(handle)
        return started

    def _hold_residents(self, names: Iterable[str], held: ExitStack) -> list[str]:
        """Hold those of `names` that are resident, and tell which are not."""
        missing = []
        for name in dict.fromkeys(names):
            lease: Lease | None = None
            try:
                lease = self._lora.lease(name)
            except AdapterNotFoundError:
                missing.append(name)
            except SlotBusyError:  # it is being loaded again; a load of our own waits for that one
                if self._catalog.find(name) is None:
                    raise
                missing.append(name)
            if lease is not None:
                held.callback(lease.release)
        return missing

    def _start(self, wanted: Wanted, activate: bool) -> Promotion:
        if activate:
            self._lora.weights.check_rotation()
        key = (wanted.name, "device", activate, wanted.key)
        return self._background.start(key, wanted.name, "device", lambda load: self._loader.promote(wanted, activate, load))

    def _registered(self, name: str) -> Wanted:
        registration: Registration | None = self._catalog.find(name)
        if registration is None:
            known = (*self._lora.weights.adapter_names(), *self._catalog.names())
            raise AdapterNotFoundError(
                f"no adapter named {name!r} is resident or registered; known are: {', '.join(dict.fromkeys(known)) or 'none'}; say "
                f"where it comes from with register({name!r}, source)",
                name=name,
                known=known,
            )
        return Wanted(name, registration.origin, registration)

    def _arrived(self, name: str, landed: Landed) -> Promotion:
        """A handle of something that is where it is wanted."""
        load = Load(name, "device", lambda _: landed)
        handle = load.join(self._lora._process)
        load.run()
        assert handle is not None  # nobody has stopped it
        return handle

    def _chased_away(self, names: list[str]) -> SlotBusyError:
        return SlotBusyError(
            f"adapter {names[0]!r} was loaded {_MAX_ATTEMPTS} times and evicted by other loads each time before the route held it; "
            "raise max_loras, or route fewer adapters at once",
            name=names[0],
        )
