"""Where names come from: registered sources, of which nothing is loaded yet."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ._core import check_adapter_name
from .errors import AdapterFileError, AdapterNotFoundError, PeerError

Origin: TypeAlias = "str | os.PathLike[str] | tuple[Mapping[str, Any], Any] | Peer | Callable[[], Any]"
"""A PEFT folder, `(tensors, config)`, a `Peer`, or a callable that gives one of the first two."""


@dataclass(frozen=True)
class Peer:
    """An adapter of another process, as a source: `lora.register("sql", hotslot.Peer("10.0.0.7:7070", "sql"))`.

    Attributes:
        address: Where that process serves, `host:port` (`[v6]:port` for IPv6).
        adapter: What it calls the adapter.
    """

    address: str
    adapter: str

    def __post_init__(self) -> None:
        check_address(self.address)
        check_adapter_name(self.adapter)


@dataclass(eq=False)
class Registration:
    """One name's source.

    Attributes:
        name: What requests call it.
        origin: Where it comes from.
        cache_id: Its content, once it was loaded from an origin whose content cannot be told beforehand.
        successor: What the name was registered as after it, if it was.
    """

    name: str
    origin: Origin
    cache_id: str | None = field(default=None)
    successor: Registration | None = field(default=None, repr=False)

    def is_as(self, other: Registration) -> bool:
        """Whether another registration says the same."""
        mine, theirs = self.origin, other.origin
        return mine is theirs or (isinstance(mine, (str, Peer)) and mine == theirs)


class Catalog:
    """The registered names; may be used from any thread."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._known: dict[str, Registration] = {}

    def register(self, name: str, origin: Origin) -> Registration:
        """Say where a name comes from; a name that was registered before comes from there from now on.

        Raises:
            AdapterFileError: `origin` is no source.
            ValueError: `name` is outside the safe set.
        """
        check_adapter_name(name)
        registration = Registration(name, checked(origin))
        with self._mutex:
            before = self._known.get(name)
            self._known[name] = registration
            if before is not None:
                before.successor = registration
        return registration

    def unregister(self, name: str) -> None:
        """Forget where a name comes from.

        Raises:
            AdapterNotFoundError: It is not registered.
        """
        with self._mutex:
            if self._known.pop(name, None) is None:
                raise self._unknown(name)

    def find(self, name: str) -> Registration | None:
        """A name's registration, if there is one."""
        return self._known.get(name)

    def get(self, name: str) -> Registration:
        """A name's registration.

        Raises:
            AdapterNotFoundError: It is not registered.
        """
        found = self._known.get(name)
        if found is None:
            raise self._unknown(name)
        return found

    def names(self) -> list[str]:
        """All registered names, in the order in which they came."""
        with self._mutex:
            return list(self._known)

    def _unknown(self, name: str) -> AdapterNotFoundError:
        known = tuple(self._known)
        listed = ", ".join(known) if known else "none"
        return AdapterNotFoundError(
            f"no adapter named {name!r} is registered; registered are: {listed}; say where it comes from with "
            f"register({name!r}, source)",
            name=name,
            known=known,
        )


def checked(origin: Origin) -> Origin:
    """A source as it may be registered; whether there is an adapter in it is seen when it is loaded.

    Raises:
        AdapterFileError: It is none.
    """
    is_pair = isinstance(origin, tuple) and len(origin) == 2 and isinstance(origin[0], Mapping)
    if is_pair or isinstance(origin, Peer):
        return origin
    if isinstance(origin, (str, os.PathLike)):
        path = os.fspath(origin)
        if not isinstance(path, str) or not path:
            raise AdapterFileError(f"a source is {origin!r}, whose path is {path!r}; expected a PEFT folder's path as text")
        return os.path.abspath(path)  # the working directory may be another when it is loaded
    if inspect.iscoroutinefunction(origin):
        raise AdapterFileError(
            f"{origin!r} is a coroutine function, and sources are called on worker threads without an event loop; expected a plain "
            "callable (inside it, asyncio.run(...) serves)"
        )
    if callable(origin):
        return origin
    raise AdapterFileError(
        f"a source is a PEFT folder's path, (tensors, config), a hotslot.Peer, or a callable that gives one; found "
        f"{type(origin).__name__}"
    )


def is_address(address: object) -> bool:
    """Whether something is `host:port`.

    Example:
        >>> is_address("10.0.0.7:7070"), is_address("[::1]:7070"), is_address("http://10.0.0.7:7070"), is_address("/var/cache")
        (True, True, False, False)
    """
    if not isinstance(address, str):
        return False
    host, colon, port = address.rpartition(":")
    is_v6 = host.startswith("[") and host.endswith("]")
    name = host[1:-1] if is_v6 else host
    is_host = bool(name) and all(c.isascii() and (c.isalnum() or c in (":%.-_" if is_v6 else ".-_")) for c in name)
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536
    return bool(colon) and is_host and is_port


def check_address(address: object) -> None:
    """Refuse what is not `host:port`.

    Raises:
        PeerError: `address` is none.
    """
    if not is_address(address):
        raise PeerError(
            f"peer address {address!r} is not host:port, such as '10.0.0.7:7070' or '[::1]:7070'",
            peer=str(address),
            reason="address",
        )
