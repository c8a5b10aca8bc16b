"""What runs the rows: the interface of both engines, and the choice between them."""

from __future__ import annotations

import inspect
import logging
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..activation import NEVER
from ..errors import LeaseError
from ..routing import BASE

if TYPE_CHECKING:
    from ..model import AttachedModel
    from .sequence import Call, Sequence

_LOG = logging.getLogger("hotslot.server")
_PROBE_TOKENS = 6
_PROBE_SECONDS = 120.0


@dataclass(frozen=True)
class EngineLimits:
    """How much an engine holds at once.

    Attributes:
        max_rows: Sequences in a batch.
        max_batch_tokens: Tokens of one step; longer prompts are processed in parts.
        max_length: Tokens of one sequence, prompt and answer.
        block_size: Tokens of a block of the paged cache; prefixes are shared by whole blocks.
        num_blocks: Blocks of the paged cache.
        share_prefixes: Whether equal prefixes of equal adapters share blocks.
    """

    max_rows: int = 32
    max_batch_tokens: int = 512
    max_length: int = 2048
    block_size: int = 32
    num_blocks: int = 512
    share_prefixes: bool = True


class Engine(ABC):
    """Generates the tokens of sequences on a thread of its own, all of them in one batch.

    Sequences that are submitted hold their adapters already; each is ended by this engine, whatever happens.
    """

    kind: str
    model: Any

    @abstractmethod
    def start(self) -> None:
        """Start the thread."""

    @abstractmethod
    def submit(self, sequence: Sequence) -> None:
        """Take a sequence into the next batches."""

    @abstractmethod
    def cancel(self, sequence: Sequence) -> None:
        """End a sequence before the next step, if it has not ended."""

    @abstractmethod
    def stop(self, timeout: float | None = None) -> None:
        """End what is left, and the thread."""

    @property
    @abstractmethod
    def fault(self) -> str | None:
        """Why the engine does not run; None while it does."""

    def is_down(self) -> bool:
        """Whether the engine does not run."""
        return self.fault is not None

    @property
    @abstractmethod
    def cache_usage(self) -> float:
        """The used share of the key-value cache, 0 to 1."""

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """Steps so far."""


def token_selectors(call: Call, position: int, count: int) -> list[Any]:
    """What routes `count` tokens of a call's row from a position on: its lease, and base before an aLoRA begins.

    Raises:
        LeaseError: The call is for an adapter and holds no lease: it must not run, least of all as base.
    """
    if call.lease is None:
        if call.adapter is not None:
            raise LeaseError(f"{call.id} holds no lease on {call.adapter!r}; a call that has ended must be in no batch")
        return [BASE] * count
    start = 0 if call.start is None else call.start
    before = min(max(start - position, 0), count)
    return [BASE] * before + [call.lease] * (count - before)


def begin(call: Call, lora: AttachedModel) -> None:
    """Find where the leased adapter begins in the prompt; everywhere, but for an aLoRA."""
    if call.lease is None:
        return
    invocation = list(lora._contents.of(call.lease.slot).invocation_tokens)
    if invocation:
        width, prompt = len(invocation), call.prompt
        found = (at for at in range(len(prompt) - width, -1, -1) if prompt[at : at + width] == invocation)
        call.start = next(found, NEVER)


def build(model: Any, lora: AttachedModel, limits: EngineLimits) -> Engine:
    """The running engine for a model: on a paged cache, or on `generate`'s own where it cannot be paged.

    Which models can be paged is not written anywhere that can be trusted, so the paged engine has to show that it gives what the
    model alone gives.
    """
    from .batches import BatchEngine

    reason = why_not_paged(model)
    if reason is None:
        from .paged import PagedEngine

        expected = _alone(model, lora)
        try:
            engine: Engine = PagedEngine(model, lora, limits)
            engine.start()
            found = _probe(engine)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        else:
            if found == expected:
                return engine
            reason = found if isinstance(found, str) else f"it gives tokens {found} where the model alone gives {expected}"
            engine.stop(timeout=10.0)
    _LOG.warning("no paged cache for this model, serving it in batches: %s", reason)
    engine = BatchEngine(model, lora, limits)
    engine.start()
    return engine


def _alone(model: Any, lora: AttachedModel) -> list[int]:
    """The tokens of the probe by the model's own `generate`."""
    import torch

    prompt = torch.tensor([_probe_prompt(model)], device=model.device)
    with torch.no_grad(), lora.route([BASE]):
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=_PROBE_TOKENS,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            eos_token_id=None,
            pad_token_id=0,
        )
    found: list[int] = out[0, prompt.shape[1] :].tolist()
    return found


def _probe(engine: Engine) -> list[int] | str:
    """The same tokens by an engine, or what it says instead."""
    from .sampling import Sampling
    from .sequence import Call

    done = threading.Event()
    pieces: list[Any] = []
    call = Call(
        "probe",
        None,
        _probe_prompt(engine.model),
        Sampling(max_tokens=_PROBE_TOKENS, temperature=0.0),
        1,
        end_tokens=frozenset(),
        tokenizer=_NoText(),
        sink=pieces.append,
    )
    call.on_done = lambda call: done.set()
    call.begin(engine.submit)
    if not done.wait(_PROBE_SECONDS):
        return f"it gave no answer within {_PROBE_SECONDS:g} seconds"
    problem = pieces[-1].problem
    return call.sequences[0].tokens if problem is None else problem.message


def _probe_prompt(model: Any) -> list[int]:
    """Some tokens of any vocabulary."""
    size = model.config.get_text_config().vocab_size
    return [(7 * at + 3) % size for at in range(12)]


class _NoText:
    """A tokenizer for a call whose text nobody reads."""

    def decode(self, tokens: list[int], **options: Any) -> str:
        return ""


def why_not_paged(model: Any) -> str | None:
    """Why transformers' continuous batching cannot serve a model, or None if it can."""
    try:
        from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR, group_layers_by_attn_type
        from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING  # noqa: F401
    except ImportError as error:
        return f"this transformers has another continuous batching than 5.24 has ({error})"
    if not hasattr(model, "init_continuous_batching"):
        return f"{type(model).__name__} has no continuous batching"
    config = model.config.get_text_config()
    try:
        kinds = group_layers_by_attn_type(config)
    except ValueError as error:
        return str(error)
    other = sorted(kinds.keys() - ATTN_TYPE_TO_ALLOCATOR.keys())
    if other:
        return f"layers of {', '.join(other)}"
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder-decoder model"
    # Models with a cache of another shape take the paged cache as `cache`, through their attention's keyword arguments.
    if not getattr(model, "_supports_sdpa", False) and model.config._attn_implementation not in ("eager", "paged|eager"):
        return f"its attention is {model.config._attn_implementation}"
    parameters = inspect.signature(type(model).forward).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return f"{type(model).__name__}.forward takes no further arguments"
    return None
