"""Every field of every request: its type, its range, and what becomes of fields that are not known or not done."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hotslot.server.problems import Problem
from hotslot.server.protocol import ChatRequest, CompletionRequest, LoadRequest, UnloadRequest, finite, parse

KINDS: dict[Any, dict[str, Any]] = {
    CompletionRequest: {"model": "m", "prompt": "x"},
    ChatRequest: {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    LoadRequest: {"lora_name": "a", "lora_path": "a"},
    UnloadRequest: {"lora_name": "a"},
}
WHOLE: list[Any] = ["3", True, 2.0, [], {}]
NUMBER: list[Any] = ["0.5", True, [], {}]
FLAG: list[Any] = ["true", 1, 0, 1.0, []]
TEXT: list[Any] = [5, True, 1.5, {}]
WRONG: dict[str, list[Any]] = {
    "model": [*TEXT, [], "", "x" * 513],
    "prompt": [*TEXT, 3, [3, "x"], [True], [1.0], ["x", None], [[1], [2.5]], [-1], [2**31], [[[1]]]],
    "messages": ["hi", {}, [], [None], ["hi"], [{}], [{"role": "user", "content": 5}]],
    "n": [*WHOLE, 0, -1, 129, 10**30],
    "max_tokens": [*WHOLE, 0, -1, 2**31],
    "max_completion_tokens": [*WHOLE, 0],
    "min_tokens": [*WHOLE, -1],
    "temperature": [*NUMBER, -0.1, 2.1],
    "top_p": [*NUMBER, 0, 1.1, -1],
    "top_k": [*WHOLE, -2, 2**31],
    "min_p": [*NUMBER, -0.1, 1.1],
    "seed": [*WHOLE, 2**63, -(2**63) - 1],
    "presence_penalty": [*NUMBER, 2.1],
    "frequency_penalty": [*NUMBER, -2.1],
    "repetition_penalty": [*NUMBER, 0, 11],
    "logit_bias": [[], "x", 5, {"3": "x"}, {"3": True}, {"3": 101}, {"3": [1]}],
    "stop": [5, True, "", ["x", ""], [5], {"a": 1}, "x" * 1025],
    "stop_token_ids": ["3", 3, ["3"], [True], [1.0], [-1], list(range(129))],
    "stream": FLAG,
    "stream_options": ["x", [], {"include_usage": 1}],
    "ignore_eos": FLAG,
    "skip_special_tokens": FLAG,
    "include_stop_str_in_output": FLAG,
    "return_token_ids": FLAG,
    "echo": FLAG,
    "add_special_tokens": FLAG,
    "add_generation_prompt": FLAG,
    "continue_final_message": FLAG,
    "top_logprobs": [*WHOLE, -1, 21],
    "chat_template_kwargs": ["x", [], 5],
    "lora_name": [*TEXT, [], "", "x" * 513],
    "lora_path": [*TEXT, [], "", "x" * 4097],
    "load_inplace": FLAG,
    "lora_int_id": WHOLE,
}


def fields() -> list[tuple[Any, str]]:
    return [(kind, name) for kind in KINDS for name in kind.model_fields if name != "spaces_between_special_tokens"]


@pytest.mark.parametrize(("kind", "field"), fields())
def test_a_value_of_another_type_or_out_of_range_is_400_with_the_fields_name(kind: Any, field: str) -> None:
    wrong = WRONG[field] if field != "logprobs" else [*FLAG] if kind is ChatRequest else [*WHOLE, -1, 21]
    for value in wrong:
        with pytest.raises(Problem) as caught:
            parse(kind, json.dumps(KINDS[kind] | {field: value}).encode())
        assert caught.value.status == 400
        assert (caught.value.param or "").split(".")[0] == field, caught.value.message
        assert len(caught.value.message) < 500


@pytest.mark.parametrize(("kind", "field"), fields())
def test_null_is_as_left_out(kind: Any, field: str) -> None:
    body = json.dumps(KINDS[kind] | {field: None}).encode()
    if field in KINDS[kind]:
        with pytest.raises(Problem, match=f"{field}: Field required"):
            parse(kind, body)
    else:
        assert parse(kind, body) == parse(kind, json.dumps(KINDS[kind]).encode())


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("response_format", {"type": "json_object"}),
        ("suffix", "x"),
        ("best_of", 2),
        ("best_of", True),
        ("use_beam_search", True),
        ("structured_outputs", {"regex": "x"}),
        ("guided_json", {}),
        ("guided_choice", ["a"]),
        ("allowed_token_ids", [1]),
        ("bad_words", ["x"]),
        ("logits_processors", ["x"]),
        ("prompt_logprobs", 0),
        ("truncate_prompt_tokens", 5),
        ("prompt_embeds", "x"),
        ("return_tokens_as_token_ids", True),
        ("cache_salt", "x"),
        ("documents", [{"text": "x"}]),
        ("chat_template", "{{ x }}"),
        ("reasoning_effort", "high"),
        ("modalities", ["text", "audio"]),
        ("vllm_xargs", {"a": 1}),
        ("kv_transfer_params", {"a": 1}),
        ("repetition_detection", {}),
    ],
)
def test_what_would_change_the_answer_and_is_not_done_is_refused_by_name(kind: Any, field: str, value: Any) -> None:
    with pytest.raises(Problem, match=f"^{field} is not supported by this server") as caught:
        parse(kind, json.dumps(KINDS[kind] | {field: value}).encode())
    assert (caught.value.status, caught.value.param) == (400, field)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [(CompletionRequest, "max_completion_tokens", 5), (CompletionRequest, "top_logprobs", 2), (ChatRequest, "echo", True)],
)
def test_a_field_of_the_other_kind_of_request_is_refused(kind: Any, field: str, value: Any) -> None:
    with pytest.raises(Problem, match=f"{field} is a field of another kind of request"):
        parse(kind, json.dumps(KINDS[kind] | {field: value}).encode())


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_fields_are_ignored_and_known_to_be(kind: Any) -> None:
    found = parse(kind, json.dumps(KINDS[kind] | {"zzz": [1], "a b": 2}).encode())
    assert found.ignored == ["a b", "zzz"]
    assert parse(kind, json.dumps(KINDS[kind]).encode()).ignored == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"{",
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 10_000,
        b'{"n": ' + b"9" * 5000 + b"}",
        b'{"temperature": NaN}',
        b'{"temperature": 1e999}',
        '{"model": "m"}'.encode("utf-16"),
    ],
)
def test_a_body_that_is_no_request_is_a_short_400(kind: Any, body: bytes) -> None:
    with pytest.raises(Problem) as caught:
        parse(kind, body)
    assert caught.value.status == 400 and len(caught.value.message) < 500


@pytest.mark.parametrize(
    ("message", "plain"),
    [
        ({"role": "user"}, {"role": "user", "content": ""}),
        ({"role": "user", "content": []}, {"role": "user", "content": ""}),
        ({"role": "user", "content": ["a", {"type": "text", "text": "b"}]}, {"role": "user", "content": "a\nb"}),
        ({"role": "tool", "content": "4", "tool_call_id": "c1"}, {"role": "tool", "content": "4", "tool_call_id": "c1"}),
        (
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": '{"x": 1}'}}],
            },
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
            },
        ),
    ],
)
def test_messages_reach_the_template_whole(message: dict[str, Any], plain: dict[str, Any]) -> None:
    assert parse(ChatRequest, json.dumps(KINDS[ChatRequest] | {"messages": [message]}).encode()).messages[0].plain() == plain


@pytest.mark.parametrize(
    "changes",
    [
        {"content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"content": [{"type": "text"}]},
        {"content": [None]},
        {"role": ""},
        {"role": 5},
        {"tool_calls": [{}]},
        {"tool_calls": [{"type": "code", "function": {"name": "f"}}]},
        {"function_call": {"name": "f", "arguments": ""}},
        {"name": 5},
    ],
)
def test_a_message_that_cannot_be_shown_to_the_template_is_400(changes: dict[str, Any]) -> None:
    body = KINDS[ChatRequest] | {"messages": [{"role": "user", "content": "x"} | changes]}
    with pytest.raises(Problem) as caught:
        parse(ChatRequest, json.dumps(body).encode())
    assert caught.value.status == 400 and (caught.value.param or "").startswith("messages.0")


def test_arguments_of_a_call_that_are_no_json_are_400() -> None:
    body = KINDS[ChatRequest] | {
        "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{oops"}}]}]
    }
    with pytest.raises(Problem, match="'f' have arguments that are no JSON"):
        parse(ChatRequest, json.dumps(body).encode()).messages[0].plain()


def test_a_log_probability_is_one_that_json_has() -> None:
    values = [-0.5, 0.0, float("-inf"), float("nan"), -1e30, None]
    assert [finite(value) for value in values] == [-0.5, 0.0, -9999.0, -9999.0, -9999.0, None]


def test_sampling_refuses_what_leaves_no_token() -> None:
    asked = parse(CompletionRequest, json.dumps(KINDS[CompletionRequest] | {"stop_token_ids": [0, 1, 3], "min_tokens": 2}).encode())
    assert asked.sampling(4, None, 5, frozenset({2})).min_tokens == 2
    with pytest.raises(Problem, match="hold all 4 tokens") as caught:
        asked.sampling(4, None, 4, frozenset({2}))
    assert caught.value.status == 400
    with pytest.raises(Problem, match="min_tokens=2 is above max_tokens=1"):
        asked.sampling(1, None, 5, frozenset({2}))
