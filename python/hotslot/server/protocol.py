"""Requests as OpenAI's and vLLM's clients write them, and the objects that they get back."""

from __future__ import annotations

import json
import re
import time
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from .problems import Problem
from .sampling import Sampling

# Accepted and of no effect here: they say nothing about the answer, or only something about an answer that is refused below.
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
        "session_id",
        "skip_clone",
        "include_reasoning",
        "length_penalty",
        "early_stopping",
        "truncation_side",
        "stream_interval",
        "return_token_offsets",
        "return_mm_kwargs",
        "routed_experts_prompt_start",
    ]
)
# Known to OpenAI's and vLLM's clients, and not done here: refused, but for the values that ask for nothing (null always does).
_REFUSED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "thinking_token_budget": (-1,),
    "verbosity": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "prompt_logprobs": (),
    "logprob_token_ids": (),
    "return_tokens_as_token_ids": (False,),
    "return_prompt_text": (False,),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "repetition_detection": (),
    "watermarking": (False,),
    "cache_salt": (),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "vllm_xargs": ({},),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}
# Of where an error is: fields, and not the branches of a union.
_FIELD = re.compile(r"(?!(?:str|int|float|bool|list|dict)$)[a-z_0-9]+")
# Of fields that have several forms, an error says all of them.
_EXPECTED = {
    "prompt": "text, token ids, or a list of either",
    "stop": "up to 16 texts of 1 to 1024 characters",
    "content": "text, or a list of text parts; images, audio and files are not supported",
}
# What a model prints when a token cannot be: JSON has no infinity, and this is vLLM's stand-in.
_LEAST_LOGPROB = -9999.0

Text: TypeAlias = Annotated[str, Field(max_length=4 << 20)]
TokenId: TypeAlias = Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)]
Prompt: TypeAlias = Text | list[TokenId] | list[Text] | list[list[TokenId]]


class _Strict(BaseModel):
    """Fields have the types that they have in JSON: "3", true and 2.0 are no integers."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")

    @property
    def ignored(self) -> list[str]:
        """The fields that this server does not know; they are ignored, as vLLM does."""
        return sorted(self.model_extra or ())

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: Any) -> Any:
        # Clients write null for what they leave out.
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class _Request(_Strict):
    """What all requests for tokens have."""

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
    def _refuse_what_is_not_done(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {}
        for key, value in data.items():
            if key in cls.model_fields:
                kept[key] = value
            elif key in _REFUSED:
                if value is not None and not any(_is(value, nothing) for nothing in _REFUSED[key]):
                    raise ValueError(f"{key} is not supported by this server; leave it out")
            elif key in _OTHER_KIND and value is not None and not _is(value, False):
                raise ValueError(f"{key} is a field of another kind of request; leave it out")
            elif key not in _WITHOUT_EFFECT and key not in _OTHER_KIND:
                kept[key] = value
        return kept

    @model_validator(mode="after")
    def _options_with_a_stream(self) -> Any:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, value: Any) -> Any:
        if isinstance(value, list) and len(value) > 16:
            raise ValueError(f"{len(value)} stops; expected at most 16")
        return value

    def sampling(self, max_tokens: int, logprobs: int | None, vocab_size: int, end_tokens: frozenset[int]) -> Sampling:
        """How tokens are chosen.

        Args:
            max_tokens: Tokens to generate at most.
            logprobs: As in `Sampling`.
            vocab_size: The model's tokens.
            end_tokens: Its own ends of sequence.

        Raises:
            Problem: A token id is none of the model's, or no token is left.
        """
        if self.min_tokens > max_tokens:
            raise Problem(400, f"min_tokens={self.min_tokens} is above max_tokens={max_tokens}", param="min_tokens")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        ids = frozenset(self.stop_token_ids or ())
        _check_ids(ids, vocab_size, "stop_token_ids")
        if self.min_tokens and len(ids | end_tokens) >= vocab_size:
            raise Problem(
                400,
                f"stop_token_ids and the model's own end hold all {vocab_size} tokens, so min_tokens={self.min_tokens} leaves none",
                param="stop_token_ids",
            )
        bias: dict[int, float] = {}
        for key, value in (self.logit_bias or {}).items():
            if not key.isascii() or not key.isdigit() or len(key) > 12:
                raise Problem(400, f"logit_bias has the key {key[:50]!r}; expected token ids", param="logit_bias")
            bias[int(key)] = value
        _check_ids(bias, vocab_size, "logit_bias")
        return Sampling(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
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


class StreamOptions(_Strict):
    """What a stream has beside its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class CompletionRequest(_Request):
    """POST /v1/completions."""

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    add_special_tokens: bool = True


class TextPart(_Strict):
    """A part of a message."""

    type: Literal["text", "input_text", "output_text"]
    text: Text


class RefusalPart(_Strict):
    """What the model refused with."""

    type: Literal["refusal"]
    refusal: Text


class CalledFunction(_Strict):
    """What was called, with its arguments as JSON text."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Text = ""


class ToolCall(_Strict):
    """A call that an earlier answer made."""

    id: Annotated[str, Field(max_length=256)] = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """The call as chat templates take it: with its arguments as an object."""
        arguments: Any = {}
        if self.function.arguments.strip():
            try:
                arguments = json.loads(self.function.arguments)
            except (ValueError, RecursionError):
                raise Problem(
                    400,
                    f"tool_calls of {self.function.name!r} have arguments that are no JSON; expected a JSON object",
                    param="messages",
                ) from None
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


class Message(_Strict):
    """One message of a chat."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Text | Annotated[list[TextPart | RefusalPart | Text], Field(max_length=4096)] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=256)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_read(cls, data: Any) -> Any:
        for key in ("function_call", "audio", "images", "videos"):
            if isinstance(data, dict) and data.get(key) not in (None, [], {}):
                raise ValueError(f"{key} is not supported by this server; leave it out")
        return data

    def plain(self) -> dict[str, Any]:
        """The message as chat templates take it; parts of text are lines, as in vLLM."""
        content = self.content or ""
        if isinstance(content, list):
            content = "\n".join(
                part if isinstance(part, str) else part.refusal if isinstance(part, RefusalPart) else part.text for part in content
            )
        found: dict[str, Any] = {"role": self.role, "content": content}
        for key in ("name", "tool_call_id", "reasoning_content"):
            value = getattr(self, key)
            if value is not None:
                found[key] = value
        if self.tool_calls:
            found["tool_calls"] = [call.plain() for call in self.tool_calls]
        return found


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _logprobs_together(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message needs add_generation_prompt: false")
        return self


class LoadRequest(_Strict):
    """POST /v1/load_lora_adapter, with vLLM's fields."""

    lora_name: Annotated[str, Field(min_length=1, max_length=512)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False


class UnloadRequest(_Strict):
    """POST /v1/unload_lora_adapter, with vLLM's fields."""

    lora_name: Annotated[str, Field(min_length=1, max_length=512)]
    lora_int_id: int | None = None


_Request.model_rebuild()
CompletionRequest.model_rebuild()
ChatRequest.model_rebuild()
_OTHER_KIND = CompletionRequest.model_fields.keys() ^ ChatRequest.model_fields.keys()

_NAMED = _OTHER_KIND | CompletionRequest.model_fields.keys() | _REFUSED.keys()


def parse(kind: type[Any], body: bytes) -> Any:
    """A request of a kind from its bytes.

    Raises:
        Problem: 400, with the first field that is wrong.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or _FIELD.fullmatch(str(part)))
        message = first["msg"].removeprefix("Value error, ")
        text = f"{where}: {message}" if where else message
        hint = _EXPECTED.get(where.rpartition(".")[2])
        if hint and first["type"] not in ("missing", "value_error"):
            text = f"{where}: expected {hint}"
        if first["type"] not in ("missing", "json_invalid", "value_error"):
            text += f"; found {_shown(first['input'])}"
        named = where or next((field for field in message.split()[:1] if field in _NAMED), None)
        raise Problem(400, text, param=named, code="invalid_request") from None


def finite(logprob: float | None) -> float | None:
    """A log probability as JSON can carry it.

    Example:
        >>> finite(-0.5), finite(float("-inf")), finite(None)
        (-0.5, -9999.0, None)
    """
    return logprob if logprob is None or logprob > _LEAST_LOGPROB else _LEAST_LOGPROB


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


def _is(value: Any, other: Any) -> bool:
    """Equal, and of one type: true is not 1."""
    return type(value) is type(other) and bool(value == other)
