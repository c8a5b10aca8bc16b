"""The engine for models whose cache cannot be paged (linear attention): cohorts on the cache that `generate` uses.

Sequences that arrive together form a cohort: one left-padded batch with a cache of its own. Cohorts take turns, a step each, so
that a newcomer never waits for the others to end; rows that have ended are cut out of their cohort's cache.
"""

from __future__ import annotations

import inspect
import logging
import queue
import threading
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import DynamicCache

from ..activation import NEVER
from .engine import Engine, EngineLimits, begin, token_selectors
from .problems import Problem
from .sampling import choose

if TYPE_CHECKING:
    from ..model import AttachedModel
    from .sequence import Sequence

_LOG = logging.getLogger("hotslot.server")
_MAX_FAILED_STEPS = 3


class Cohort:
    """Sequences that began in one step.

    Args:
        rows: The sequences.
        config: The model's, for the shape of the cache.
        device: The model's.
    """

    def __init__(self, rows: list[Sequence], config: Any, device: torch.device) -> None:
        self.rows = rows
        self.cache = DynamicCache(config=config)
        longest = max(len(row.prompt) for row in rows)
        self.pads = [longest - len(row.prompt) for row in rows]
        padded = [[0] * pad + row.prompt for pad, row in zip(self.pads, rows, strict=True)]
        self.ids = torch.tensor(padded, device=device)
        self.mask = torch.tensor(
            [[0] * pad + [1] * len(row.prompt) for pad, row in zip(self.pads, rows, strict=True)], device=device
        )

    def inputs(self) -> dict[str, Any]:
        """The arguments of the model's next call, but for the cache."""
        positions = (self.mask.cumsum(dim=-1) - 1).clamp(min=0)[:, -self.ids.shape[1] :]
        return {
            "input_ids": self.ids,
            "attention_mask": self.mask,
            "position_ids": positions,
            "use_cache": True,
        }

    def starts(self) -> list[int | None] | None:
        """Where each row's adapter begins, padding counted; None where all begin with their rows."""
        starts = [row.call.start for row in self.rows]
        if all(start is None for start in starts):
            return None
        return [None if start is None else min(start + pad, NEVER - 1) for start, pad in zip(starts, self.pads, strict=True)]

    def advance(self, tokens: list[int]) -> None:
        """Take the chosen tokens as the next input."""
        self.ids = torch.tensor(tokens, device=self.ids.device)[:, None]
        self.mask = torch.cat([self.mask, self.mask.new_ones((len(tokens), 1))], dim=1)

    def keep(self, kept: list[int]) -> None:
        """Cut the other rows out."""
        if len(kept) == len(self.rows):
            return
        index = torch.tensor(kept, dtype=torch.int64, device=self.ids.device)
        self.rows = [self.rows[at] for at in kept]
        self.pads = [self.pads[at] for at in kept]
        self.ids, self.mask = self.ids[index], self.mask[index]
        if kept:
            # A reorder takes any rows, of linear layers' states too.
            self.cache.reorder_cache(cast("torch.LongTensor", index))


class BatchEngine(Engine):
    """The engine on `generate`'s pieces."""

    kind = "batches"

    def __init__(self, model: Any, lora: AttachedModel, limits: EngineLimits) -> None:
        self.model = model.eval()
        self._lora = lora
        self._limits = limits
        parameters = inspect.signature(type(model).forward).parameters
        # What transformers called the cache before 5.24.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._cohorts: list[Cohort] = []
        self._arrivals: queue.SimpleQueue[Sequence] = queue.SimpleQueue()
        self._cancelled: queue.SimpleQueue[Sequence] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._stopping = False
        self._fault: str | None = "it was not started"
        self._thread: threading.Thread | None = None
        self._steps = 0
        self._failed_steps = 0

    def start(self) -> None:
        """Start the thread."""
        self._fault = None
        self._thread = threading.Thread(target=self._run, name="hotslot-engine", daemon=True)
        self._thread.start()

    def submit(self, sequence: Sequence) -> None:
        """Take a sequence into the next batches."""
        if self.is_down():
            sequence.end("error", problem=Problem(503, f"the engine does not run: {self.fault}", code="engine", retry_after=1.0))
            return
        begin(sequence.call, self._lora)
        self._arrivals.put(sequence)
        self._wake.set()
        if self.is_down():
            self._end_all(RuntimeError(self.fault))

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence before the next step."""
        if self.is_down():
            sequence.end("abort")
            return
        self._cancelled.put(sequence)
        self._wake.set()

    def stop(self, timeout: float | None = None) -> None:
        """End what is left, and the thread."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout)

    @property
    def fault(self) -> str | None:
        """Why the engine does not run; None while it does."""
        if self._fault is not None:
            return self._fault
        return None if self._thread is not None and self._thread.is_alive() else "its thread does not run"

    @property
    def cache_usage(self) -> float:
        """The used share of the tokens that all rows may have."""
        used = sum(cohort.mask.shape[1] * len(cohort.rows) for cohort in list(self._cohorts))
        return min(used / (self._limits.max_rows * self._limits.max_length), 1.0)

    @property
    def num_steps(self) -> int:
        """Steps so far, each of one cohort."""
        return self._steps

    def _run(self) -> None:
        error: BaseException = RuntimeError("the engine has stopped")
        try:
            while not self._stopping:
                self._take()
                if not self._cohorts:
                    self._wake.wait(0.1)
                    self._wake.clear()
                    continue
                cohort = self._cohorts[0]
                try:
                    self._step(cohort)
                    self._failed_steps = 0
                except Exception as problem:
                    self._fail(cohort, problem)
                # Only now: whatever ends this thread finds every row in the list.
                self._cohorts = self._cohorts[1:] + ([cohort] if cohort.rows else [])
        except BaseException as found:
            error = found
            raise
        finally:
            self._fault = f"{type(error).__name__}: {error}"
            self._end_all(error)

    def _take(self) -> None:
        """Form a cohort of what has arrived, and cut out what was cancelled."""
        arrived = []
        while not self._arrivals.empty():
            sequence = self._arrivals.get()
            if not sequence.ended:
                arrived.append(sequence)
        cancelled = []
        while not self._cancelled.empty():
            cancelled.append(self._cancelled.get())
        for sequence in cancelled:
            sequence.end("abort")
        if cancelled:
            for cohort in self._cohorts:
                cohort.keep([at for at, row in enumerate(cohort.rows) if not row.ended])
            self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]
        arrived = [sequence for sequence in arrived if not sequence.ended]
        if arrived:
            self._cohorts.insert(0, Cohort(arrived, self.model.config, self.model.device))

    @torch.no_grad()
    def _step(self, cohort: Cohort) -> None:
        selectors = [token_selectors(row.call, 0 if row.call.start is None else row.call.start, 1)[0] for row in cohort.rows]
        with self._lora.route(selectors, starts=cohort.starts()):
            logits = self.model(**cohort.inputs(), **{self._cache_name: cohort.cache}).logits[:, -1].float()
        self._steps += 1
        choices = choose(logits, cohort.rows)
        cohort.advance([max(choice.token, 0) for choice in choices])
        ended = [row.accept(choice) for row, choice in zip(cohort.rows, choices, strict=True)]
        cohort.keep([at for at, has_ended in enumerate(ended) if not has_ended])

    def _fail(self, cohort: Cohort, error: Exception) -> None:
        self._failed_steps += 1
        _LOG.exception("a step failed (%d in a row)", self._failed_steps)
        if self._failed_steps >= _MAX_FAILED_STEPS:
            raise error
        for row in cohort.rows:
            row.end("error", problem=Problem(500, f"the engine failed: {error}", code="engine"))
        cohort.rows = []

    def _end_all(self, error: BaseException) -> None:
        rows = [row for cohort in self._cohorts for row in cohort.rows]
        while not self._arrivals.empty():
            rows.append(self._arrivals.get())
        self._cohorts = []
        for row in rows:
            row.end("error", problem=Problem(500, f"the engine failed: {error}", code="engine"))
        while not self._cancelled.empty():
            self._cancelled.get().end("abort")
