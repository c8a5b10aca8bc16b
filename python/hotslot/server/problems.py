"""What a request is answered when it cannot be served: one exception, with the status and OpenAI's fields."""

from __future__ import annotations

from typing import Any

from ..errors import AdapterError, AdapterNotFoundError, HotslotError, PeerError, PoolError


class Problem(Exception):  # noqa: N818 - it is an answer, not a fault
    """An answer with an HTTP status of 400 or more.

    Args:
        status: The HTTP status.
        message: What was found, what was expected, the fix.
        param: The field that it is about.
        code: A word for programs.
        retry_after: Seconds after which the request may do better.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The answer's body, as OpenAI's clients expect it."""
        kinds = {401: "AuthenticationError", 403: "PermissionDeniedError", 404: "NotFoundError", 409: "ConflictError"}
        kinds |= {413: "RequestTooLargeError", 429: "RateLimitError"}
        kind = kinds.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code or self.status}}

    @property
    def headers(self) -> dict[str, str]:
        """Retry-After, the scheme that is asked for, and the end of a connection on which the rest of a body may come."""
        found = {} if self.retry_after is None else {"Retry-After": str(max(1, round(self.retry_after)))}
        if self.status in (408, 413):
            found["Connection"] = "close"
        return found | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def unknown_model(name: str, known: list[str]) -> Problem:
    """404 for a model that is not served, with the names that are."""
    shown = ", ".join(repr(each) for each in known[:20]) + (f" and {len(known) - 20} more" if len(known) > 20 else "")
    return Problem(
        404, f"the model {name[:200]!r} does not exist; served are {shown or 'none'}", param="model", code="model_not_found"
    )


def problem_of(error: BaseException) -> Problem:
    """The answer that an error of a load means: what is wrong with an adapter is the caller's, the rest is ours."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, AdapterNotFoundError):
        return Problem(404, str(error), code="adapter_not_found")
    if isinstance(error, PeerError):
        # What a peer sent and does not fit here is wrong with the adapter; a peer that does not answer may do so later.
        does_not_fit = error.reason == "unsupported"
        return Problem(
            400 if does_not_fit else 503,
            str(error),
            code="invalid_adapter" if does_not_fit else "peer",
            retry_after=None if does_not_fit else 1.0,
        )
    if isinstance(error, AdapterError):
        return Problem(400, str(error), code="invalid_adapter")
    if isinstance(error, PoolError):
        # Room for extras is a property of the adapter; a full or busy pool passes.
        is_room = getattr(error, "needed", None) is not None
        return Problem(400 if is_room else 503, str(error), code="pool", retry_after=None if is_room else 1.0)
    if isinstance(error, HotslotError):
        return Problem(503, str(error), code="unavailable", retry_after=1.0)
    return Problem(500, f"{type(error).__name__}: {error}", code="internal")
