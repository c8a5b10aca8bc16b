"""Requests as OpenAI's and vLLM's clients write them, and the objects that they get back."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from .problems import Problem
from .sampling import Sampling

# Accepted and of no effect here: they say nothing about the answer.
_WITHOUT_EFFECT = frozenset(
    [
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "priority",
        "request_id",
        "add_generation_prompt",
        "skip_clone",
    ]
)
# These ask for nothing with these values.
_NOTHING: tuple[Any, ...] = (None, False, [], {}, "", "none", 1, "auto")
_ASKS_NOTHING = frozenset(
    [
        "tools",
        "tool_choice",
        "functions",
        "function_call",
        "response_format",
        "suffix",
        "best_of",
        "use_beam_search",
        "modalities",
        "audio",
        "prediction",
        "web_search_options",
        "reasoning_effort",
        "verbosity",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
    ]
)

Text: TypeAlias = Annotated[str, Field(max_length=4 << 20)]
TokenId: TypeAlias = Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)]
Prompt: TypeAlias = Text | list[TokenId] | list[Text] | list[list[TokenId]]


class _Request(BaseModel):
    """What all requests for tokens have."""

    model_config = ConfigDict(extra="forbid")

    model: Annotated[str, Field(min_length=1, max_length=512)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: (
        Annotated[str, Field(min_length=1, max_length=1024)] | list[Annotated[str, Field(min_length=1, max_length=1024)]] | None
    ) = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    return_token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _drop_without_effect(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {}
        for key, value in data.items():
            if key not in cls.model_fields:
                if key in _WITHOUT_EFFECT or value is None:
                    continue
                if key in _ASKS_NOTHING:
                    if value in _NOTHING or value in ({"type": "text"}, ["text"]):
                        continue
                    raise ValueError(f"{key} is not supported by this server; leave it out")
            kept[key] = value
        return kept

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, value: Any) -> Any:
        if isinstance(value, list) and len(value) > 16:
            raise ValueError(f"{len(value)} stops; expected at most 16")
        return value

    def sampling(self, max_tokens: int, logprobs: int | None, vocab_size: int, temperature: float) -> Sampling:
        """How tokens are chosen.

        Raises:
            Problem: A token id is none of the model's.
        """
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        ids = frozenset(self.stop_token_ids or ())
        _check_ids(ids, vocab_size, "stop_token_ids")
        bias: dict[int, float] = {}
        for key, value in (self.logit_bias or {}).items():
            if not key.isascii() or not key.isdigit() or len(key) > 12:
                raise Problem(400, f"logit_bias has the key {key[:50]!r}; expected token ids", param="logit_bias")
            bias[int(key)] = value
        _check_ids(bias, vocab_size, "logit_bias")
        return Sampling(
            max_tokens=max_tokens,
            min_tokens=min(self.min_tokens, max_tokens),
            temperature=temperature if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            seed=None if self.seed is None else self.seed & 0x7FFFFFFFFFFFFFFF,
            logprobs=logprobs,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            logit_bias=bias,
            stop=tuple(stops),
            stop_token_ids=ids,
            ignore_eos=self.ignore_eos,
            include_stop=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
        )


class StreamOptions(BaseModel):
    """What a stream has beside its text."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class CompletionRequest(_Request):
    """POST /v1/completions."""

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    add_special_tokens: bool = True


class TextPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["text"]
    text: Text


class Message(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="ignore")
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Text | list[TextPart] | None = None
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """The message as chat templates take it."""
        content = "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content or ""
        return {"role": self.role, "content": content}


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _logprobs_together(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self


class LoadRequest(BaseModel):
    """POST /v1/load_lora_adapter, with vLLM's fields."""

    model_config = ConfigDict(extra="forbid")
    lora_name: Annotated[str, Field(min_length=1, max_length=512)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False


class UnloadRequest(BaseModel):
    """POST /v1/unload_lora_adapter, with vLLM's fields."""

    model_config = ConfigDict(extra="forbid")
    lora_name: Annotated[str, Field(min_length=1, max_length=512)]
    lora_int_id: int | None = None


_Request.model_rebuild()
CompletionRequest.model_rebuild()
ChatRequest.model_rebuild()


def parse(kind: type[Any], body: bytes) -> Any:
    """A request of a kind from its bytes.

    Raises:
        Problem: 400, with the first field that is wrong.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("function-", "constrained-", "list[")))
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            message = "is no field of this request"
        text = f"{where}: {message}" if where else message
        if first["type"] not in ("missing", "extra_forbidden", "json_invalid", "value_error"):
            text += f"; found {_shown(first['input'])}"
        raise Problem(400, text, param=where or None, code="invalid_request") from None


def prompts_of(prompt: Any) -> list[str | list[int]]:
    """The prompts of a completion request: one or several, as text or as token ids.

    Raises:
        Problem: There is none.
    """
    if isinstance(prompt, list) and (not prompt or not isinstance(prompt[0], int)):
        found: list[str | list[int]] = list(prompt)
    else:
        found = [prompt]
    if not found or any(len(each) == 0 for each in found):
        raise Problem(400, "a prompt is empty; expected text or token ids", param="prompt")
    return found


def check_prompt_ids(ids: list[int], vocab_size: int) -> None:
    """Refuse ids that are none of the model's.

    Raises:
        Problem: 400.
    """
    _check_ids(ids, vocab_size, "prompt")


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """The usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def now() -> int:
    """Seconds, as `created` has them."""
    return int(time.time())


def _check_ids(ids: Any, vocab_size: int, param: str) -> None:
    bad = next((token for token in ids if token >= vocab_size), None)
    if bad is not None:
        raise Problem(400, f"{param} has the token id {bad}; the model's are 0 to {vocab_size - 1}", param=param)


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."
