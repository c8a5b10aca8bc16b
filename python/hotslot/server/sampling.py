"""How the next token of each row is chosen: one function over the rows of a batch, each with its own settings and seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass(frozen=True)
class Sampling:
    """What a request says about choosing tokens.

    Attributes:
        max_tokens: Tokens to generate at most.
        min_tokens: Tokens before which none of the stops ends the row.
        temperature: 0 is greedy.
        top_p, top_k, min_p: What is left of the distribution; 1, 0 and 0 leave all of it.
        seed: Of the request; None for a random one.
        logprobs: How many alternatives are reported beside the chosen token; None for no log probabilities.
        presence_penalty, frequency_penalty: Taken off the logits of generated tokens, once and per occurrence.
        repetition_penalty: Divides positive and multiplies negative logits of tokens of prompt and answer.
        logit_bias: Added to the logits of these tokens.
        stop: Strings that end the row; they are no part of the answer unless `include_stop`.
        stop_token_ids: Tokens that do, beside the model's own end of sequence.
        ignore_eos: Whether the model's own end of sequence does not end the row.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True

    @property
    def is_adjusted(self) -> bool:
        """Whether logits are changed before a token is chosen."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1.0)
        return any(penalties) or bool(self.logit_bias) or self.min_tokens > 0


@dataclass(frozen=True)
class Choice:
    """The token of a row for this step.

    Attributes:
        token: Its id; -1 where the model's output was not finite, -2 where the request rules every token out.
        logprob: Its log probability under the model, before temperature and penalties; None if not asked for.
        top: The most probable tokens with theirs.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Row(Protocol):
    """What the sampler needs of a row."""

    sampling: Sampling
    generator: torch.Generator
    prompt: list[int]
    tokens: list[int]
    end_tokens: frozenset[int]


def choose(logits: torch.Tensor, rows: Sequence[Row]) -> list[Choice]:
    """The next token of each row.

    Args:
        logits: Of the last position of each row, f32 [rows, vocabulary].
        rows: As many.

    Returns:
        One choice per row. A row's choice depends on its logits, settings and generator alone.
    """
    greedy = logits.argmax(dim=-1).tolist()
    # The largest value is not a number if any value is not one.
    finite = torch.isfinite(logits.amax(dim=-1)).tolist()
    return [
        _choose(logits[index], row, token) if is_finite else Choice(-1)
        for index, (row, token, is_finite) in enumerate(zip(rows, greedy, finite, strict=True))
    ]


def _choose(logits: torch.Tensor, row: Row, greedy: int) -> Choice:
    sampling = row.sampling
    if sampling.is_adjusted:
        adjusted = _adjust(logits, row)
        greedy = int(adjusted.argmax())
    else:
        adjusted = logits
    if not torch.isfinite(adjusted.amax()):
        # This row's fault, which must not become the batch's.
        return Choice(-2)
    token = greedy if sampling.temperature == 0.0 else _draw(adjusted, row)
    if sampling.logprobs is None:
        return Choice(token)
    logprobs = torch.log_softmax(logits, dim=-1)
    values, ids = logprobs.topk(min(sampling.logprobs, logprobs.numel())) if sampling.logprobs else (logprobs[:0],) * 2
    return Choice(token, float(logprobs[token]), tuple(zip(map(int, ids.tolist()), values.tolist(), strict=True)))


def _adjust(logits: torch.Tensor, row: Row) -> torch.Tensor:
    sampling = row.sampling
    adjusted = logits.clone()
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*row.prompt, *row.tokens}), device=logits.device)
        values = adjusted[seen]
        adjusted[seen] = torch.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
    if row.tokens and (sampling.presence_penalty or sampling.frequency_penalty):
        ids, counts = torch.tensor(row.tokens, device=logits.device).unique(return_counts=True)
        adjusted[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts.to(adjusted.dtype)
    for token, bias in sampling.logit_bias.items():
        adjusted[token] += bias
    if len(row.tokens) < sampling.min_tokens:
        adjusted[list(row.end_tokens)] = -torch.inf
    return adjusted


def _draw(logits: torch.Tensor, row: Row) -> int:
    """One token by the row's own generator, on the CPU in f64, so that a seed means the same on every machine."""
    sampling = row.sampling
    scaled = logits.to("cpu", torch.float64)
    # The largest becomes 0 first: no temperature, however small, makes an infinity of it.
    scaled = (scaled - scaled.amax()) / sampling.temperature
    if 0 < sampling.top_k < scaled.numel():
        scaled = scaled.masked_fill(scaled < scaled.topk(sampling.top_k).values[-1], -torch.inf)
    probabilities = scaled.softmax(dim=-1)
    if sampling.min_p > 0.0:
        probabilities = probabilities.masked_fill(probabilities < sampling.min_p * probabilities.max(), 0.0)
    if sampling.top_p < 1.0:
        ordered, ids = probabilities.sort(descending=True)
        # A token stays if those before it do not reach top_p yet; the first one always does.
        dropped = ordered.cumsum(dim=-1) - ordered >= sampling.top_p * ordered.sum()
        dropped[0] = False
        probabilities[ids[dropped]] = 0.0
    return int(torch.multinomial(probabilities, 1, generator=row.generator))
