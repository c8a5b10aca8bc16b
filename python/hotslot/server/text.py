"""The text of a row, as its tokens come: whole characters only, and nothing that may yet turn out to be a stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# A character may be spread over several tokens; until the last of them a decoder shows this instead.
_UNFINISHED = "\ufffd"


class TextStream:
    """Decodes a row's tokens one by one.

    Args:
        tokenizer: transformers' tokenizer of the model.
        stop: Strings that end the text.
        skip_special_tokens: Whether special tokens have no text.
        include_stop: Whether the stop that was found is a part of the text.

    Attributes:
        text: All that was given out.
        stopped: The stop that was found, or None.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], *, skip_special_tokens: bool, include_stop: bool) -> None:
        self.text = ""
        self.stopped: str | None = None
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._skip_special = skip_special_tokens
        self._include_stop = include_stop
        self._tokens: list[int] = []
        # Text is decoded from `_from`; what the tokens up to `_shown` make is known already.
        self._from = 0
        self._shown = 0
        self._held = ""

    def add(self, token: int, *, may_stop: bool = True) -> str:
        """Take a token; the text that is certain now.

        Args:
            token: Its id.
            may_stop: Whether a stop is looked for yet.
        """
        self._tokens.append(token)
        known = self._decode(self._tokens[self._from : self._shown])
        now = self._decode(self._tokens[self._from :])
        if len(now) > len(known) and not now.endswith(_UNFINISHED):
            self._held += now[len(known) :]
            self._from, self._shown = self._shown, len(self._tokens)
        if not may_stop:
            certain, self._held = self._held, ""
            return self._give(certain)
        return self._give(self._certain())

    def finish(self) -> str:
        """The text that was held back, when no token follows."""
        if self.stopped is not None:
            return ""
        known = self._decode(self._tokens[self._from : self._shown])
        self._held += self._decode(self._tokens[self._from :])[len(known) :]
        self._shown = len(self._tokens)
        certain = self._certain()
        if self.stopped is None:
            certain, self._held = certain + self._held, ""
        return self._give(certain)

    def _certain(self) -> str:
        """Take from what is held all that can be no part of a stop, up to the first stop."""
        found = min(((at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0), default=None)
        if found is not None:
            at, self.stopped = found
            certain, self._held = self._held[: at + (len(self.stopped) if self._include_stop else 0)], ""
            return certain
        keep = max((self._overlap(stop) for stop in self._stop), default=0)
        end = len(self._held) - keep
        certain, self._held = self._held[:end], self._held[end:]
        return certain

    def _overlap(self, stop: str) -> int:
        """How many of the last characters are the beginning of a stop."""
        longest = min(len(stop) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if self._held.endswith(stop[:size])), 0)

    def _give(self, text: str) -> str:
        self.text += text
        return text

    def _decode(self, tokens: list[int]) -> str:
        # Spaces are what the tokens say: no tidying, which would change text that was given out before.
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=self._skip_special, clean_up_tokenization_spaces=False)
        return text
