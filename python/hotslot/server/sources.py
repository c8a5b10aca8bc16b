"""Where adapters come from: the startup set, a folder, calls and peers. Names and paths are checked here."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .problems import Problem, unknown_model

if TYPE_CHECKING:
    from .neighbours import Neighbours, Offer

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,127}")
_FILES = ("adapter_config.json", "adapter_model.safetensors")
# Listing is for people and clients; a resolver of more finds them all the same.
_MAX_LISTED = 1000

Kind = Literal["startup", "loaded", "folder", "peer"]


@dataclass(frozen=True)
class AdapterSource:
    """One adapter's origin.

    Attributes:
        name: What requests call it.
        path: Its folder; of a peer's, `peer://` with address and name.
        kind: Named at start, loaded by call, found in the adapter root, or had by a peer.
        offer: What the peer says of it.
    """

    name: str
    path: str
    kind: Kind
    offer: Offer | None = None


class Sources:
    """The adapters that can be served.

    Args:
        base: The base model's name, which no adapter may have.
        startup: Name -> folder, as named at start; these may lie anywhere.
        root: A folder whose folders are adapters by their relative path, loaded on first use. Paths given by call must lie in it.

    Attributes:
        neighbours: The peers whose adapters are served too, or None.

    Raises:
        Problem: A name is none, or the root is no folder.
    """

    def __init__(self, base: str, startup: dict[str, str], root: str | None) -> None:
        self._base = base
        self.neighbours: Neighbours | None = None
        self._root = None if root is None else Path(root).resolve()
        if self._root is not None and not self._root.is_dir():
            raise Problem(400, f"the adapter root {root!r} is no folder; give an existing one", code="no_root")
        self._mutex = threading.Lock()
        self._known: dict[str, AdapterSource] = {}
        self._changing: set[str] = set()
        self._versions: dict[str, int] = {}
        # Unloaded by call: the folder is in the root still, but the name is not served until it is loaded by call again.
        self._hidden: set[str] = set()
        for name, path in startup.items():
            self.check_name(name)
            self._known[name] = AdapterSource(name, path, "startup")

    def check_name(self, name: str) -> None:
        """Refuse what could be no adapter's name, or means something else.

        Raises:
            Problem: 400.
        """
        if not self.is_name(name) and name != self._base:
            raise Problem(
                400,
                f"{name[:200]!r} is no adapter name; expected 1 to 128 of A-Z a-z 0-9 _ . - /, beginning with a letter or digit, "
                "without empty parts, '.' or '..'",
                param="lora_name",
                code="invalid_name",
            )
        if name == self._base:
            raise Problem(409, f"{name!r} is the base model's name; give the adapter another", param="lora_name", code="name_taken")

    def is_name(self, name: str) -> bool:
        """Whether an adapter may have a name."""
        parts = name.split("/")
        return bool(_NAME.fullmatch(name)) and not any(part in ("", ".", "..") for part in parts) and name != self._base

    def find(self, name: str, *, ask: bool = False) -> AdapterSource | None:
        """The source of a name, or None; peers come last, with what they said, or are asked over the network with `ask`."""
        with self._mutex:
            known = self._known.get(name)
            if known is not None or name in self._hidden:
                return known
        return self._elsewhere(name, ask=ask)

    def source_of(self, name: str, *, ask: bool = False) -> AdapterSource:
        """The source of a name.

        Raises:
            Problem: 404; 403 for a file that leads out of the root.
        """
        found = self.find(name, ask=ask)
        if found is None:
            raise unknown_model(name, self.names())
        if found.kind == "folder":
            self._check_files(Path(found.path))
        return found

    def names(self) -> list[str]:
        """The names that can be served, base first; those of the folder as it is now."""
        return [self._base, *(source.name for source in self.all())]

    def all(self) -> list[AdapterSource]:
        """All sources, those of the folder as it is now, those of peers as they last said."""
        with self._mutex:
            known = dict(self._known)
            hidden = set(self._hidden)
        found = [*known.values()]
        for source in self._scan():
            if source.name not in known and source.name not in hidden:
                found.append(source)
        served = {source.name for source in found} | hidden
        offers = [] if self.neighbours is None else self.neighbours.all()
        return found + [_offered(offer) for offer in offers if offer.name not in served][:_MAX_LISTED]

    def allowed_path(self, path: str) -> str:
        """A path given by call, as the real path of a folder in the adapter root.

        Raises:
            Problem: 400 where it does not exist, 403 where it is not in the root or there is none.
        """
        if self._root is None:
            raise Problem(
                403, "no adapter root was given, so nothing can be loaded by path; start with --adapter-root", param="lora_path"
            )
        if not path or "\0" in path or len(path) > 4096:
            raise Problem(400, "lora_path is empty or no path; expected a folder in the adapter root", param="lora_path")
        try:
            real = (self._root / path).resolve()
            is_folder = real.is_dir()
        except (OSError, RuntimeError, ValueError) as error:
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise Problem(400, f"lora_path {path[:200]!r} cannot be resolved: {reason}", param="lora_path") from None
        # Outside first: whether a path outside exists is nobody's business.
        if real != self._root and self._root not in real.parents:
            raise Problem(
                403, "lora_path leads out of the adapter root; expected a folder in it", param="lora_path", code="outside_root"
            )
        if not is_folder:
            raise Problem(
                400, f"lora_path {path[:200]!r} is no folder in the adapter root; expected one with {_FILES[0]}", param="lora_path"
            )
        self._check_files(real)
        return str(real)

    @contextmanager
    def changing(self, name: str) -> Iterator[AdapterSource | None]:
        """Inside, nobody else changes this name; what it was before.

        Raises:
            Problem: 409 while somebody does.
        """
        with self._mutex:
            if name in self._changing:
                raise Problem(
                    409, f"the adapter {name!r} is being loaded or unloaded; try again", param="lora_name", code="in_progress"
                )
            self._changing.add(name)
            before = self._known.get(name)
        try:
            yield before
        finally:
            with self._mutex:
                self._changing.discard(name)

    def version(self, name: str) -> int:
        """A number that grows with each change by call of what a name means."""
        with self._mutex:
            return self._versions.get(name, 0)

    def register(self, name: str, path: str) -> int:
        """Serve a name from a folder; its new version."""
        with self._mutex:
            old = self._known.get(name)
            self._known[name] = AdapterSource(name, path, "loaded" if old is None else old.kind)
            return self._changed(name)

    def restore(self, name: str, before: AdapterSource | None, version: int) -> None:
        """Serve a name as before a change that failed, unless the name was changed or unloaded since."""
        with self._mutex:
            if self._versions.get(name, 0) != version:
                return
            self._changed(name)
            if before is None:
                self._known.pop(name, None)
            else:
                self._known[name] = before

    def forget(self, name: str) -> bool:
        """Serve a name no more; False if it was not served."""
        elsewhere = self._elsewhere(name, ask=False) is not None
        with self._mutex:
            known = self._known.pop(name, None)
            was_listed = elsewhere and name not in self._hidden
            if elsewhere:
                self._hidden.add(name)
            if known is not None or was_listed:
                self._changed(name)
            return known is not None or was_listed

    def _changed(self, name: str) -> int:
        self._versions[name] = found = self._versions.get(name, 0) + 1
        return found

    def root_folder(self, name: str) -> str | None:
        """Where a name's folder would be in the adapter root, whether it is there or not."""
        return None if self._root is None or not self.is_name(name) else str(self._root / name)

    def _elsewhere(self, name: str, *, ask: bool) -> AdapterSource | None:
        """The source of a name that neither the start nor a call gave: the root, then peers."""
        return self._in_root(name) or self._at_peers(name, ask=ask) if self.is_name(name) else None

    def _in_root(self, name: str) -> AdapterSource | None:
        if self._root is None or not self.is_name(name):
            return None
        folder = self._root / name
        try:
            real = folder.resolve()
            if self._root not in real.parents or not (real / _FILES[0]).is_file():
                return None
        except (OSError, RuntimeError):
            return None
        return AdapterSource(name, str(real), "folder")

    def _at_peers(self, name: str, *, ask: bool) -> AdapterSource | None:
        if self.neighbours is None:
            return None
        offer = self.neighbours.ask(name) if ask else self.neighbours.known(name)
        return None if offer is None else _offered(offer)

    def _check_files(self, folder: Path) -> None:
        """An adapter's files must lie in the root themselves, wherever links lead."""
        if self._root is None:
            return
        for name in _FILES:
            file = folder / name
            if file.exists() and self._root not in file.resolve().parents:
                raise Problem(403, f"{name} of the adapter leads out of the adapter root", param="lora_path", code="outside_root")

    def _scan(self) -> list[AdapterSource]:
        """The adapters in the root, at most two folders deep."""
        if self._root is None:
            return []
        found: list[AdapterSource] = []
        try:
            first = sorted(entry.name for entry in os.scandir(self._root) if entry.is_dir())
        except OSError:
            return []
        for outer in first[:_MAX_LISTED]:
            source = self._in_root(outer)
            if source is not None:
                found.append(source)
                continue
            try:
                second = sorted(entry.name for entry in os.scandir(self._root / outer) if entry.is_dir())
            except OSError:
                continue
            inner = (self._in_root(f"{outer}/{name}") for name in second[:_MAX_LISTED])
            found += [source for source in inner if source is not None]
        return found[:_MAX_LISTED]


def _offered(offer: Offer) -> AdapterSource:
    return AdapterSource(offer.name, f"peer://{offer.address}/{offer.name}", "peer", offer)
