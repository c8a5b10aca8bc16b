"""A call and its sequences: what travels from the HTTP request through admission and engine, and back token by token.

A call holds at most one lease on its adapter, taken at admission and returned when its last sequence has ended, whichever way. A
sequence ends exactly once: by its tokens, by being cancelled, or by an error; whoever ends it runs `Call.done` after the last.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from .problems import Problem
from .sampling import Choice, Sampling
from .text import TextStream

if TYPE_CHECKING:
    from ..lease import Lease

FinishReason = Literal["stop", "length", "abort", "error"]

_SEEDS = itertools.count(int(time.time() * 1000) & 0x7FFFFFFF)


@dataclass(frozen=True)
class Piece:
    """What one token, or the end, of a sequence adds.

    Attributes:
        index: Which of the call's sequences.
        text: Certain new text, which may be empty.
        choices: The tokens since the last piece.
        finish_reason: Set on the last piece.
        stop_reason: The stop string or token that ended it, if one did.
        problem: Why it ended, if by an error.
    """

    index: int
    text: str
    choices: tuple[Choice, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    problem: Problem | None = None


class Call:
    """One request for n sequences.

    Args:
        call_id: Its name in logs and answers.
        adapter: The adapter's name, or None for the base model.
        prompt: Token ids.
        sampling: How tokens are chosen.
        num_sequences: How many sequences.
        end_tokens: The model's own ends of sequence.
        tokenizer: For their text.
        sink: Gets every piece; called from the engine's thread.

    Attributes:
        lease: The adapter's, from admission to the end; None for base.
        on_token: Told of each token, with the seconds since the row's last one (None for its first).
        on_done: Told when the last sequence has ended and the lease was returned.
        cache_id: The identity of the content that serves it.
        start: The first token that the adapter acts on (an aLoRA's invocation), or None for all.
    """

    def __init__(
        self,
        call_id: str,
        adapter: str | None,
        prompt: list[int],
        sampling: Sampling,
        num_sequences: int,
        *,
        end_tokens: frozenset[int],
        tokenizer: Any,
        sink: Callable[[Piece], None],
    ) -> None:
        self.id = call_id
        self.adapter = adapter
        self.prompt = prompt
        self.sampling = sampling
        self.tokenizer = tokenizer
        self.sink = sink
        self.end_tokens = end_tokens
        self.created = time.monotonic()
        self.started: float | None = None
        self.lease: Lease | None = None
        self.cache_id = "hs1:base"
        self.start: int | None = None
        self.on_token: Callable[[Call, float | None], None] = _no_token
        self.on_done: Callable[[Call], None] = _nothing
        self.sequences = [Sequence(self, index) for index in range(num_sequences)]
        self._submit: Callable[[Sequence], None] | None = None
        self._mutex = threading.Lock()
        self._left = num_sequences

    @property
    def num_sequences(self) -> int:
        """How many sequences were asked for."""
        return len(self.sequences)

    def begin(self, submit: Callable[[Sequence], None]) -> None:
        """Give the first sequence to an engine; the others follow with its first token, and find its blocks in the cache."""
        self._submit = submit
        submit(self.sequences[0])

    def fail(self, problem: Problem) -> None:
        """End all sequences that have not ended."""
        for sequence in self.sequences:
            sequence.end("error", problem=problem)

    def _first_token(self, sequence: Sequence) -> None:
        if sequence.index == 0 and self._submit is not None:
            for other in self.sequences[1:]:
                self._submit(other)

    def _sequence_ended(self, sequence: Sequence, problem: Problem | None) -> None:
        if sequence.index == 0 and not sequence.tokens and sequence.finish_reason is not None:
            # The others were not begun, and will not be.
            for other in self.sequences[1:]:
                other.end(sequence.finish_reason, problem=problem)
        with self._mutex:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            lease, self.lease = self.lease, None
            if lease is not None:
                lease.release()
            self.on_done(self)


class Sequence:
    """One row: its tokens and text so far. Written by the engine's thread alone, but for the end, which any thread may bring."""

    def __init__(self, call: Call, index: int) -> None:
        self.call = call
        self.index = index
        self.id = f"{call.id}-{index}"
        self.sampling = call.sampling
        self.prompt = call.prompt
        self.end_tokens = call.end_tokens | call.sampling.stop_token_ids
        self.tokens: list[int] = []
        self.cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.next: Choice | None = None
        self.last_token_at: float | None = None
        self.generator = torch.Generator()
        seed = next(_SEEDS) if call.sampling.seed is None else call.sampling.seed
        self.generator.manual_seed((seed + 0x9E3779B97F4A7C15 * index) & 0x7FFFFFFFFFFFFFFF)
        self._text = TextStream(
            call.tokenizer,
            call.sampling.stop,
            skip_special_tokens=call.sampling.skip_special_tokens,
            include_stop=call.sampling.include_stop,
        )
        self._mutex = threading.Lock()

    @property
    def ended(self) -> bool:
        """Whether no token will follow."""
        return self.finish_reason is not None

    def accept(self, choice: Choice) -> bool:
        """Take the next token; whether the sequence has ended with it."""
        if self.ended:
            return True
        if choice.token < 0:
            problem = Problem(500, "the model's output is not finite for this prompt and adapter", code="not_finite")
            if choice.token == -2:
                problem = Problem(
                    400,
                    "min_tokens, stop_token_ids and logit_bias rule every token out; expected to leave one",
                    code="no_token_left",
                )
            self.end("error", problem=problem)
            return True
        self.tokens.append(choice.token)
        self._note_time()
        sampling, count = self.sampling, len(self.tokens)
        can_stop = count > sampling.min_tokens
        is_eos = choice.token in self.call.end_tokens and not sampling.ignore_eos
        if can_stop and (is_eos or choice.token in sampling.stop_token_ids):
            return self.end("stop", choice, stop_reason=None if is_eos else choice.token)
        try:
            text = self._text.add(choice.token, may_stop=can_stop)
        except Exception as error:
            # A tokenizer that cannot decode its own token is the row's misfortune, not the engine's.
            self.end("error", problem=Problem(500, f"the tokenizer failed: {error}", code="tokenizer"))
            return True
        if self._text.stopped is not None:
            return self.end("stop", choice, text=text, stop_reason=self._text.stopped)
        if count >= sampling.max_tokens:
            return self.end("length", choice, text=text)
        self.call.sink(Piece(self.index, text, (choice,)))
        return False

    def end(
        self,
        reason: FinishReason,
        choice: Choice | None = None,
        *,
        text: str = "",
        stop_reason: str | int | None = None,
        problem: Problem | None = None,
    ) -> bool:
        """End the sequence, once; a later call does nothing. True, for `accept`."""
        with self._mutex:
            if self.ended:
                return True
            self.finish_reason = reason
        if reason != "error":
            # Whatever happens to the text, the end must come through: others wait for it.
            with contextlib.suppress(Exception):
                text += self._text.finish()
            if self._text.stopped is not None and reason == "length":
                self.finish_reason = reason = "stop"
                stop_reason = self._text.stopped
        self.call.sink(Piece(self.index, text, () if choice is None else (choice,), reason, stop_reason, problem))
        self.call._sequence_ended(self, problem)
        return True

    def _note_time(self) -> None:
        now = time.monotonic()
        is_first = self.last_token_at is None
        self.call.on_token(self.call, None if self.last_token_at is None else now - self.last_token_at)
        self.last_token_at = now
        if is_first:
            self.call._first_token(self)


def _nothing(call: Call) -> None:
    pass


def _no_token(call: Call, seconds: float | None) -> None:
    pass
