"""From pieces to answers: a completion or a chat completion, whole or as a stream of events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .protocol import finite, now, usage
from .sampling import Choice
from .sequence import Piece

if TYPE_CHECKING:
    from .sequence import Call


@dataclass
class Collected:
    """What a sequence has given so far."""

    text: str = ""
    choices: list[Choice] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, piece: Piece) -> None:
        """Take a piece."""
        self.text += piece.text
        self.choices += piece.choices
        if piece.finish_reason is not None:
            self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason


class Pieces:
    """The pieces of the calls of one request, from the engine's thread to the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()

    def sink(self, first: int) -> Any:
        """Where a call whose first sequence has the answer's index `first` puts its pieces."""

        def put(piece: Piece) -> None:
            # A loop that is closed has nobody who waits.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._queue.put_nowait, (first + piece.index, piece))

        return put

    async def take(self, num_sequences: int) -> AsyncIterator[tuple[int, Piece]]:
        """All pieces, until as many sequences have ended.

        Raises:
            Problem: A sequence ended by an error.
        """
        left = num_sequences
        while left:
            index, piece = await self._queue.get()
            if piece.problem is not None:
                raise piece.problem
            left -= piece.finish_reason is not None
            yield index, piece


class Answer:
    """The objects of one answer.

    Args:
        answer_id: Its id.
        model: As the request named it.
        calls: Its calls, one per prompt.
        tokenizer: For the text of single tokens.
        is_chat: Which of the two shapes.
        with_token_ids: Whether token ids are shown too.
        echo: The text that stands before each sequence's.
    """

    def __init__(
        self,
        answer_id: str,
        model: str,
        calls: Sequence[Call],
        tokenizer: Any,
        *,
        is_chat: bool,
        with_token_ids: bool,
        echo: Sequence[str] = (),
    ) -> None:
        self.id = answer_id
        self.model = model
        self.calls = calls
        self._tokenizer = tokenizer
        self._is_chat = is_chat
        self._with_ids = with_token_ids
        self._echo = list(echo)
        self._created = now()
        self._offsets: dict[int, int] = {}
        self._begun: set[int] = set()
        self.num_sequences = sum(call.num_sequences for call in calls)

    # --- whole -----------------------------------------------------------------------------------------------------------

    def whole(self, collected: Sequence[Collected]) -> dict[str, Any]:
        """The answer in one object."""
        choices = [self._whole_choice(index, each) for index, each in enumerate(collected)]
        kind = "chat.completion" if self._is_chat else "text_completion"
        return self._object(kind, choices) | {"usage": self.usage()}

    def _whole_choice(self, index: int, each: Collected) -> dict[str, Any]:
        logprobs = self._logprobs(index, each.choices)
        body: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": each.finish_reason}
        body["stop_reason"] = each.stop_reason
        if self._is_chat:
            body["message"] = {"role": "assistant", "content": each.text, "refusal": None}
        else:
            body["text"] = self._echo_of(index) + each.text
        if self._with_ids:
            body["token_ids"] = [choice.token for choice in each.choices]
            body["prompt_token_ids"] = self._call(index).prompt
        return body

    # --- as a stream -----------------------------------------------------------------------------------------------------

    def chunk(self, index: int, piece: Piece, *, with_usage: bool, null_usage: bool) -> list[bytes]:
        """The events for a piece."""
        events = []
        if self._is_chat and index not in self._begun:
            delta = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            events.append(self._event([delta], with_usage=with_usage, null_usage=null_usage))
        text = piece.text
        if not self._is_chat and index not in self._begun:
            text = self._echo_of(index) + text
        self._begun.add(index)
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": self._logprobs(index, piece.choices),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self._is_chat:
            choice["delta"] = {"content": text} if text or piece.finish_reason is None else {}
        else:
            choice["text"] = text
        if self._with_ids:
            choice["token_ids"] = [each.token for each in piece.choices]
        events.append(self._event([choice], with_usage=with_usage, null_usage=null_usage))
        return events

    def last(self, *, with_usage: bool) -> list[bytes]:
        """The events after all pieces."""
        events = []
        if with_usage:
            events.append(self._event([], with_usage=True, null_usage=False))
        return [*events, b"data: [DONE]\n\n"]

    def _event(self, choices: list[dict[str, Any]], *, with_usage: bool, null_usage: bool) -> bytes:
        body = self._object("chat.completion.chunk" if self._is_chat else "text_completion", choices)
        if with_usage:
            body["usage"] = self.usage()
        elif null_usage:
            body["usage"] = None
        return event(body)

    # --- parts -----------------------------------------------------------------------------------------------------------

    def usage(self) -> dict[str, Any]:
        """Tokens so far."""
        prompt = sum(len(call.prompt) for call in self.calls)
        generated = sum(len(sequence.tokens) for call in self.calls for sequence in call.sequences)
        return usage(prompt, generated, sum(call.sequences[0].cached_tokens for call in self.calls))

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self.model, "choices": choices}

    def _call(self, index: int) -> Call:
        return self.calls[index // self.calls[0].num_sequences]

    def _echo_of(self, index: int) -> str:
        return self._echo[index // self.calls[0].num_sequences] if self._echo else ""

    def _logprobs(self, index: int, choices: Sequence[Choice]) -> dict[str, Any] | None:
        asked = self._call(index).sampling.logprobs
        if asked is None:
            return None
        if self._is_chat:
            content = [
                {
                    **self._token(choice.token, choice.logprob),
                    "top_logprobs": [self._token(token, logprob) for token, logprob in choice.top],
                }
                for choice in choices
            ]
            return {"content": content, "refusal": None}
        tokens = [self._text(choice.token) for choice in choices]
        offsets, at = [], self._offsets.get(index, len(self._echo_of(index)))
        for text in tokens:
            offsets.append(at)
            at += len(text)
        self._offsets[index] = at
        top = None
        if asked:
            # The chosen token is shown whether it is among the most probable or not.
            top = [
                {self._text(token): finite(logprob) for token, logprob in (*choice.top, (choice.token, choice.logprob))}
                for choice in choices
            ]
        return {
            "tokens": tokens,
            "token_logprobs": [finite(choice.logprob) for choice in choices],
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode("utf-8", "replace"))}

    def _text(self, token: int) -> str:
        return str(self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"
