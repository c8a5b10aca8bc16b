"""A bounded memory of what was found before."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Recent(Generic[_T]):
    """The last `limit` things that were kept, by key; may be used from any thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._mutex = threading.Lock()
        self._kept: dict[Hashable, _T] = {}

    def get(self, key: Hashable) -> _T | None:
        """What was kept under a key, or None."""
        return self._kept.get(key)

    def __contains__(self, key: Hashable) -> bool:
        """Whether something is kept under a key."""
        return key in self._kept

    def keep(self, key: Hashable, value: _T) -> None:
        """Keep a value, and forget the oldest where there are too many."""
        with self._mutex:
            while len(self._kept) >= self._limit:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = value
