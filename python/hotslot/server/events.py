"""What happened to the slots lately, for the page and for the logs; a log line is one JSON object."""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
from collections import deque
from contextvars import ContextVar
from typing import Any

REQUEST_ID: ContextVar[str] = ContextVar("hotslot_request_id", default="-")
"""The request that a log line belongs to."""

_MAX_EVENTS = 200


class Events:
    """The last events, numbered, so that a page can ask for what is new to it."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._numbers = itertools.count(1)
        self._events: deque[dict[str, Any]] = deque(maxlen=_MAX_EVENTS)

    def add(self, kind: str, **facts: Any) -> None:
        """Keep an event."""
        with self._mutex:
            self._events.append({"number": next(self._numbers), "time": time.time(), "kind": kind, **facts})

    def after(self, number: int) -> list[dict[str, Any]]:
        """The events since one of that number."""
        with self._mutex:
            return [event for event in self._events if event["number"] > number]


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, request id, and what `extra={"facts": ...}` adds."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": REQUEST_ID.get(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up_logging(level: str) -> None:
    """Write JSON lines to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # What transformers says of every start and stop of its loop.
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.WARNING)
