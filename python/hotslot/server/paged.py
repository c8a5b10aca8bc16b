"""The engine on transformers' continuous batching: a paged cache, and one packed batch of all sequences at every step.

What is added to transformers' manager: the slot of each token, filled in when its batch is prepared; blocks of the cache that are
shared by equal content alone; a sampler with settings for each row; and an end for every request, whatever ends it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager, OutputRouter
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler

from .engine import Engine, EngineLimits, begin, token_selectors
from .problems import Problem
from .sampling import choose
from .sequence import Sequence

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

    from ..model import AttachedModel

_LOG = logging.getLogger("hotslot.server")
_SCHEDULER = "hotslot"
# Failing steps in a row after which the fault is the engine's and not a batch's.
_MAX_FAILED_STEPS = 3


class SequenceId(str):
    """A request's name as transformers sees it; wherever it goes, the sequence goes with it."""

    __slots__ = ("sequence",)
    sequence: Sequence

    def __new__(cls, sequence: Sequence) -> SequenceId:
        """The name of a sequence, with the sequence."""
        made = super().__new__(cls, sequence.id)
        made.sequence = sequence
        return made


@dataclass
class SequenceState(RequestState):
    """A request whose tokens go to its sequence, which also says when it has ended."""

    @property
    def sequence(self) -> Sequence:
        """The row."""
        return self.request_id.sequence  # type: ignore[attr-defined, no-any-return]

    def update_and_check_completion(self, token_id: int, logprob: float | None) -> bool:
        """Take the token of a step; whether it was the last."""
        choice = self.sequence.next
        if choice is None:
            raise RuntimeError(f"{self.request_id} got token {token_id} without a choice of its sampler")
        self.sequence.next = None
        self.generated_tokens.append(token_id)
        self.tokens_to_process = [token_id]
        if self.sequence.accept(choice):
            self.status = RequestStatus.FINISHED
            return True
        return False

    def create_equivalent_initial_request(self) -> SequenceState:
        """The same request from the start, with what it generated as a part of its prompt: its blocks were needed elsewhere."""
        return SequenceState(
            request_id=self.request_id,
            initial_tokens=self.initial_tokens + self.generated_tokens,
            max_new_tokens=None,
            _true_initial_tokens=self._true_initial_tokens or len(self.initial_tokens),
        )


class Outputs(OutputRouter):
    """Where transformers delivers: tokens went to their sequences already, so only failures are left."""

    def deliver(self, output: GenerationOutput) -> None:
        """End a sequence that failed."""
        if output.status == RequestStatus.FAILED and isinstance(output.request_id, SequenceId):
            problem = Problem(500, f"the engine failed: {output.error}", code="engine")
            output.request_id.sequence.end("error", problem=problem)

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        """As `deliver`, for each."""
        for output in outputs:
            self.deliver(output)


class SequenceScheduler(FIFOScheduler):
    """The scheduler by arrival; a sequence that is cancelled ends here, between two steps, where no batch holds it."""

    def add_waiting_request(self, state: RequestState) -> None:
        """Take a request, unless it was cancelled on its way."""
        if not (isinstance(state, SequenceState) and state.sequence.ended):
            super().add_waiting_request(state)

    def clear_cancelled_requests(self) -> list[RequestState]:
        """Take cancelled requests out and end their sequences."""
        with self._cancellation_lock:
            cancelled = list(self._requests_to_cancel)
        states = super().clear_cancelled_requests()
        for request_id in cancelled:
            if isinstance(request_id, SequenceId):
                request_id.sequence.end("abort")
        return states


SCHEDULER_MAPPING[_SCHEDULER] = SequenceScheduler


def requests_of(inputs_and_outputs: Any) -> list[Any]:
    """The requests of the batch that was prepared last."""
    found: list[Any] = inputs_and_outputs.requests_in_batch
    return found


class RowSampler(ModelRunner):
    """transformers' runner with a sampler that asks each row."""

    def _sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        rows = [
            future.state.sequence
            for future in requests_of(self.inputs_and_outputs)
            if future.has_new_token and isinstance(future.state, SequenceState)
        ]
        if not rows:
            return
        choices = choose(scores[0, : len(rows)], rows)
        for row, choice in zip(rows, choices, strict=True):
            row.next = choice
        tokens = [max(choice.token, 0) for choice in choices]
        output_ids[0, : len(tokens)] = torch.tensor(tokens, dtype=output_ids.dtype, device=output_ids.device)


class KeyedPrefixes:
    """Lets requests share blocks of the cache by content and adapter: the chain of block hashes begins with the `cache_id`.

    transformers hashes tokens alone. What it hashes for a request's first block gets the identity in front.
    """

    def __init__(self, cache: Any) -> None:
        self._search = cache.search_prefix_match
        self._current: list[int] = []
        cache.search_prefix_match = self.search
        for allocator in cache.cache_allocators.values():
            match, mark = allocator.match_prefix_blocks, allocator.mark_complete_blocks
            allocator.match_prefix_blocks = lambda ids, match=match: match(_Keyed(ids, self._current))
            allocator.mark_complete_blocks = lambda name, ids, count, mark=mark: mark(name, _Keyed(ids, _key(name)), count)

    def search(self, request_id: str, prompt_ids: list[int]) -> int:
        """Tokens of a prompt whose blocks are shared with the request."""
        self._current = _key(request_id)
        try:
            found: int = self._search(request_id, prompt_ids)
        finally:
            self._current = []
        if isinstance(request_id, SequenceId) and not request_id.sequence.tokens:
            request_id.sequence.cached_tokens = found
        return found


class _Keyed(list[int]):
    """Tokens whose first block reads as if a key stood before it."""

    def __init__(self, tokens: list[int], key: list[int]) -> None:
        super().__init__(tokens)
        self._key = key

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        is_first = isinstance(index, slice) and index.start == 0 and len(found) == index.stop
        return [*self._key, *found] if is_first else found


def _key(request_id: str) -> list[int]:
    """A request's content identity as integers of 32 bits; where an aLoRA begins is a part of it."""
    if not isinstance(request_id, SequenceId):
        return []
    call = request_id.sequence.call
    text = call.cache_id if call.start is None else f"{call.cache_id}@{call.start}"
    raw = text.encode()
    raw += bytes(-len(raw) % 4)
    return [int.from_bytes(raw[at : at + 4], "little", signed=True) for at in range(0, len(raw), 4)]


class _BatchFailedError(Exception):
    """A step raised; its requests have been failed and the loop may go on."""


class RoutedManager(ContinuousBatchingManager):
    """transformers' manager, each of whose steps runs under a route of its tokens."""

    def __init__(self, model: Any, lora: AttachedModel, limits: EngineLimits) -> None:
        config = ContinuousBatchingConfig(
            page_size=limits.block_size,
            num_blocks=limits.num_blocks,
            max_batch_tokens=limits.max_batch_tokens,
            max_requests_per_batch=limits.max_rows,
            # The slot ids of a step are known when it is prepared, and its tokens are needed when it ends.
            use_async_batching=False,
            use_cuda_graph=False,
            max_blocks_per_request=0,
            allow_block_sharing=limits.share_prefixes,
            scheduler_type=_SCHEDULER,
            auto_switch_to_flash=model.device.type != "cpu",
        )
        # Everything that could process logits is left to the sampler, which knows the rows.
        super().__init__(model, GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0), config)
        self.output_router = Outputs()
        self.current_batch = 0
        self._lora = lora
        self._failed_steps = 0
        self._has_head_site = any(hook.is_head for hook in lora._attachment.hooks) if lora._attachment else False

    def start(self) -> None:
        """Start the loop, on a thread that does not keep a process alive."""
        self.background_thread_status.clear()
        thread = threading.Thread(target=self._run, name="hotslot-engine", daemon=True)
        self._generation_thread: Any = thread
        thread.start()

    def enqueue(self, sequence: Sequence) -> None:
        """Put a sequence into the next batch."""
        state = SequenceState(request_id=SequenceId(sequence), initial_tokens=list(sequence.prompt), max_new_tokens=None)
        self.input_queue.put(state)
        self._wake_up_loop.set()

    def _run(self) -> None:
        try:
            self._run_generation_loop(use_inference_mode=False)
        finally:
            # Whatever ended the thread, a SystemExit in it too: nobody may wait for a token that will not come.
            if self.background_thread_status.tp_status < self.background_thread_status.FLUSH_AND_STOP:
                error = RuntimeError("the engine's thread ended")
                if self.background_thread_status.fatal_error is None:
                    self.background_thread_status.record_fatal_error(error)
            self._fail_all_remaining_requests(RuntimeError("the engine has stopped"), self.batch_processor)

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        processor = super()._create_batch_processor()
        if not isinstance(processor.model_runner, RowSampler):
            old = processor.model_runner
            processor.model_runner = RowSampler(
                logit_processor=old.logit_processor,
                cb_config=old.cb_config,
                inputs_and_outputs=old.inputs_and_outputs,
                cache=old.cache,
                do_sample=False,
                return_logprobs=False,
            )
            if self._has_head_site:
                # A head that takes adapters must see all tokens, as the route names each of them.
                processor.model_runner._model_supports_logits_to_keep = False
            KeyedPrefixes(processor.cache)
        return processor

    def _generation_loop_body(self, batch_processor: ContinuousBatchProcessor, bootstrapping: bool) -> bool:
        try:
            return super()._generation_loop_body(batch_processor, bootstrapping)
        except _BatchFailedError:
            return True

    def _generation_step(self) -> None:
        processor = self.batch_processor
        if processor is None:
            raise RuntimeError("a step before the batch processor was made")
        try:
            with self._routed(requests_of(processor.inputs_and_outputs)):
                super()._generation_step()
        except Exception as error:
            self._failed_steps += 1
            _LOG.exception("a step failed (%d in a row)", self._failed_steps)
            if self._failed_steps >= _MAX_FAILED_STEPS:
                raise
            processor.handle_batch_error(error)
            raise _BatchFailedError from error
        self._failed_steps = 0

    @contextmanager
    def _routed(self, requests: list[Any]) -> Iterator[None]:
        """The route of a step: the slot of each token, in the order in which the batch lies in memory."""
        selectors: list[Any] = []
        for future in requests:
            # The position was advanced when the batch was prepared.
            first = future.state.position_offset - future.query_length
            selectors += token_selectors(future.state.sequence.call, first, future.query_length)
        with self._lora.route(tokens=selectors):
            yield


class PagedEngine(Engine):
    """The engine for models whose attention can be paged."""

    kind = "paged"

    def __init__(self, model: Any, lora: AttachedModel, limits: EngineLimits) -> None:
        self.model = model
        self._lora = lora
        self._manager = RoutedManager(model, lora, limits)

    def start(self) -> None:
        """Start the thread."""
        self._manager.start()

    def submit(self, sequence: Sequence) -> None:
        """Take a sequence into the next batches."""
        if self.is_down():
            sequence.end("error", problem=Problem(503, f"the engine does not run: {self.fault}", code="engine", retry_after=1.0))
            return
        if sequence.ended:
            return
        begin(sequence.call, self._lora)
        self._manager.enqueue(sequence)
        if self.is_down():  # it may have ended in between, with this one unseen
            self._manager._fail_all_remaining_requests(RuntimeError("the engine has stopped"), None)

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence before the next step."""
        if self.is_down():
            sequence.end("abort")
        else:
            self._manager.cancel_request(SequenceId(sequence))

    def stop(self, timeout: float | None = None) -> None:
        """End what is left, and the thread."""
        if self._manager.is_running():
            self._manager.stop(block=True, timeout=timeout, hard_stop=True)

    @property
    def fault(self) -> str | None:
        """Why the engine does not run; None while it does."""
        status = self._manager.background_thread_status
        error: Any = status.fatal_error
        if error is not None:
            return f"{type(error).__name__}: {error}"
        return None if self._manager.is_running() else "its thread does not run"

    @property
    def cache_usage(self) -> float:
        """The share of the cache that rows hold; what is kept of ended ones gives way to any row, and counts as free."""
        processor = self._manager.batch_processor
        if processor is None:
            return 0.0
        cache = processor.cache
        free = cache.compute_free_capacity(relative=False)
        free += sum(len(it.ledger.cached_blocks) * it.bytes_per_block for it in cache.cache_allocators.values())
        return 1.0 - float(free) / (cache.num_sectors * cache.bytes_per_sector)

    @property
    def num_steps(self) -> int:
        """Steps so far."""
        return self._manager.current_batch
