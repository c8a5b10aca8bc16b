"""OpenAI's and vLLM's API, with the real `openai` client and with raw HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from serving import TEMPLATE, Running, serving, tiny_tokenizer
from tiny import peft_alone, tiny_model, write_adapter

torch.set_num_threads(1)

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of four adapters."""
    folder = tmp_path_factory.mktemp("root")
    model = tiny_model()
    for seed, name in enumerate(("a", "b", "c", "team/d")):
        write_adapter(model, folder / name, seed=seed)
    return folder


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Running]:
    """A server with one startup adapter, and the folder as its root."""
    with serving(tiny_model(), adapter_root=str(root), lora_modules={"a": str(root / "a")}, max_loras=3) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    """The real client."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="admin-token", max_retries=0) as made:
        yield made


def alone(root: Path, adapter: str | None, prompt: str, count: int = 12) -> list[int]:
    """The same request alone, through transformers' generate with PEFT."""
    model = tiny_model() if adapter is None else peft_alone(tiny_model(), root / adapter)
    ids = torch.tensor([tiny_tokenizer()(prompt)["input_ids"]])
    out = model.generate(input_ids=ids, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("adapter", [None, "a", "b", "c", "team/d"])
def test_each_model_answers_as_it_does_alone(server: Running, root: Path, adapter: str | None) -> None:
    response = server.completion(adapter or "tiny", PROMPT)
    choice = response.json()["choices"][0]
    expected = alone(root, adapter, PROMPT)
    assert choice["token_ids"] == expected
    ended = expected[-1] == 2
    assert choice["text"] == tiny_tokenizer().decode(expected[:-1] if ended else expected, skip_special_tokens=True)
    assert choice["finish_reason"] == ("stop" if ended else "length")
    assert response.headers.get("x-lora-adapter") == adapter
    assert response.json()["usage"]["prompt_tokens"] == len(PROMPT)
    assert response.json()["usage"]["completion_tokens"] == len(expected)


def test_the_client_lists_the_base_model_and_every_adapter(client: openai.OpenAI, root: Path) -> None:
    models = {model.id: model.model_dump() for model in client.models.list()}
    assert list(models) == ["tiny", "a", "b", "c", "team/d"]
    assert models["tiny"]["parent"] is None
    assert models["a"]["parent"] == "tiny"
    assert models["a"]["rank"] == 4
    assert models["a"]["state"] == "resident"
    assert models["a"]["digest"].startswith("hs1:")
    assert models["team/d"]["root"] == str(root / "team" / "d")
    assert client.models.retrieve("team/d").id == "team/d"
    with pytest.raises(openai.NotFoundError, match="served are 'tiny', 'a', 'b', 'c', 'team/d'"):
        client.models.retrieve("nobody")


def test_the_client_gets_completions_whole_and_as_a_stream(client: openai.OpenAI, root: Path) -> None:
    whole = client.completions.create(model="b", prompt=PROMPT, max_tokens=12, temperature=0)
    chunks = list(
        client.completions.create(
            model="b", prompt=PROMPT, max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_the_client_gets_chats_whole_and_as_a_stream(client: openai.OpenAI, server: Running) -> None:
    messages: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    whole = client.chat.completions.create(model="a", messages=messages, max_completion_tokens=9, temperature=0)
    chunks = list(client.chat.completions.create(model="a", messages=messages, max_tokens=9, temperature=0, stream=True))
    assert whole.choices[0].message.role == "assistant"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    text = tiny_tokenizer().apply_chat_template(
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert TEMPLATE and whole.choices[0].message.content == server.completion("a", text, max_tokens=9).json()["choices"][0]["text"]


def test_several_prompts_and_sequences_are_indexed_prompt_by_prompt(client: openai.OpenAI) -> None:
    both = client.completions.create(model="a", prompt=["one", "two"], n=3, max_tokens=5, seed=4, temperature=1.0)
    assert [choice.index for choice in both.choices] == list(range(6))
    for prompt, first in (("one", 0), ("two", 3)):
        single = client.completions.create(model="a", prompt=prompt, n=3, max_tokens=5, seed=4, temperature=1.0)
        assert [choice.text for choice in single.choices] == [choice.text for choice in both.choices[first : first + 3]]
    assert len({choice.text for choice in both.choices[:3]}) > 1


def test_token_ids_and_lists_of_them_are_prompts(server: Running) -> None:
    ids = tiny_tokenizer()(PROMPT)["input_ids"]
    assert server.tokens("a", ids) == server.tokens("a", PROMPT) == server.tokens("a", [ids]) == server.tokens("a", [PROMPT])


def test_a_stop_ends_the_text_before_it_wherever_tokens_end(server: Running) -> None:
    text = server.completion("a", PROMPT, max_tokens=30, ignore_eos=True).json()["choices"][0]["text"]
    stop = text[7:10]
    first = text.index(stop)
    for stream in (False, True):
        response = server.completion("a", PROMPT, max_tokens=30, ignore_eos=True, stop=["never!", stop], stream=stream)
        choices = [event["choices"][0] for event in events(response)] if stream else response.json()["choices"]
        assert "".join(choice["text"] for choice in choices) == text[:first]
        assert choices[-1]["finish_reason"] == "stop"
        assert choices[-1]["stop_reason"] == stop
    kept = server.completion("a", PROMPT, max_tokens=30, ignore_eos=True, stop=stop, include_stop_str_in_output=True)
    assert kept.json()["choices"][0]["text"] == text[: first + len(stop)]


def test_what_could_be_a_stop_is_given_out_when_it_is_none(server: Running) -> None:
    text = server.completion("a", PROMPT, max_tokens=10, ignore_eos=True).json()["choices"][0]["text"]
    response = server.completion("a", PROMPT, max_tokens=10, ignore_eos=True, stop=text[-3:] + "and more", stream=True)
    assert "".join(event["choices"][0]["text"] for event in events(response)) == text


def test_stop_token_ids_min_tokens_and_eos_are_obeyed(server: Running) -> None:
    tokens = server.tokens("a", PROMPT, max_tokens=20, ignore_eos=True)
    stop = tokens[4]
    found = server.completion("a", PROMPT, max_tokens=20, ignore_eos=True, stop_token_ids=[stop]).json()["choices"][0]
    assert found["token_ids"] == tokens[: tokens.index(stop) + 1]
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", stop)
    longer = server.tokens("a", PROMPT, max_tokens=20, ignore_eos=True, stop_token_ids=[stop], min_tokens=15)
    assert len(longer) >= 15


def test_a_stop_within_the_first_min_tokens_does_not_end_the_text(server: Running) -> None:
    text = server.completion("a", PROMPT, max_tokens=20, ignore_eos=True).json()["choices"][0]["text"]
    options = {"max_tokens": 20, "ignore_eos": True, "stop": text[0]}
    assert server.tokens("a", PROMPT, **options) == server.tokens("a", PROMPT, max_tokens=20, ignore_eos=True)[:1]
    assert len(server.tokens("a", PROMPT, **options, min_tokens=5)) > 5


def test_the_model_ends_where_its_end_of_sequence_comes(server: Running) -> None:
    found = server.completion("a", PROMPT, max_tokens=20, logit_bias={"2": 100}).json()["choices"][0]
    assert (found["token_ids"], found["text"], found["finish_reason"], found["stop_reason"]) == ([2], "", "stop", None)


def test_logprobs_are_the_models(server: Running, root: Path) -> None:
    ids = tiny_tokenizer()(PROMPT)["input_ids"]
    with torch.no_grad():
        expected = peft_alone(tiny_model(), root / "a")(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    choice = server.completion("a", PROMPT, max_tokens=3, logprobs=2).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"][0] == pytest.approx(expected[choice["token_ids"][0]].item(), abs=1e-4)
    assert logprobs["tokens"] == [tiny_tokenizer().decode([token]) for token in choice["token_ids"]]
    lengths = [len(token) for token in logprobs["tokens"]]
    assert logprobs["text_offset"] == [sum(lengths[:at]) for at in range(3)]
    best = expected.topk(2)
    for token, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
        assert logprobs["top_logprobs"][0][tiny_tokenizer().decode([token])] == pytest.approx(value, abs=1e-4)


def test_chat_logprobs_have_the_shape_of_the_client(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(
        model="a", messages=[{"role": "user", "content": "x"}], max_tokens=3, logprobs=True, top_logprobs=2, temperature=0
    )
    content = found.choices[0].logprobs and found.choices[0].logprobs.content
    assert content is not None and len(content) == found.usage.completion_tokens  # type: ignore[union-attr]
    assert content[0].token == content[0].top_logprobs[0].token
    assert bytes(content[0].bytes or []).decode() == content[0].token


def test_echo_puts_the_prompt_in_front(server: Running) -> None:
    plain = server.completion("a", PROMPT).json()["choices"][0]["text"]
    assert server.completion("a", PROMPT, echo=True).json()["choices"][0]["text"] == PROMPT + plain
    streamed = server.completion("a", PROMPT, echo=True, stream=True)
    assert "".join(event["choices"][0]["text"] for event in events(streamed)) == PROMPT + plain


def test_a_seed_repeats_an_answer_and_another_does_not(server: Running) -> None:
    def ask(seed: int) -> list[int]:
        return server.tokens("a", PROMPT, temperature=1.0, seed=seed)

    assert ask(1) == ask(1) != ask(2)


def test_the_request_id_comes_back_and_is_in_the_answers_id(server: Running) -> None:
    response = server.client.post(
        "/v1/completions", json={"model": "a", "prompt": "x", "max_tokens": 1}, headers={"X-Request-Id": "mine-1"}
    )
    assert response.headers["x-request-id"] == "mine-1"
    assert response.json()["id"].startswith("cmpl-mine-1-")
    other = server.client.get("/health", headers={"X-Request-Id": "not\tsane"})
    assert "not" not in other.headers["x-request-id"]


def test_fields_that_are_not_known_are_ignored_and_named(server: Running) -> None:
    response = server.completion("a", PROMPT, temprature=3, **{"not a name": 1})
    assert response.json()["choices"][0]["token_ids"] == server.tokens("a", PROMPT)
    assert response.headers["x-ignored-fields"] == "temprature"
    assert "x-ignored-fields" not in server.completion("a", PROMPT).headers


def test_a_chat_may_leave_its_last_message_open(server: Running) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}]
    text = tiny_tokenizer().apply_chat_template(messages, tokenize=False, continue_final_message=True)
    body = {"model": "a", "messages": messages, "max_tokens": 5, "temperature": 0}
    options = {"add_generation_prompt": False, "continue_final_message": True}
    found = server.client.post("/v1/chat/completions", json=body | options).json()["choices"][0]["message"]["content"]
    assert found == server.completion("a", text, max_tokens=5).json()["choices"][0]["text"]
    assert found != server.client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]


def test_log_probabilities_of_tokens_that_cannot_be_are_numbers_that_json_has() -> None:
    """A model that rules half its vocabulary out, as those do whose vocabulary is padded."""
    model = tiny_model()

    def rule_out(module: torch.nn.Module, args: Any, logits: torch.Tensor) -> torch.Tensor:
        logits[..., 5:] = -torch.inf
        return logits

    model.lm_head.register_forward_hook(rule_out)
    with serving(model) as running:
        for stream in (False, True):
            body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "logprobs": True}
            response = running.client.post(
                "/v1/chat/completions", json=body | {"top_logprobs": 20, "stream": stream, "ignore_eos": True}
            )
            assert response.status_code == 200 and "Infinity" not in response.text and "NaN" not in response.text
            assert response.text.count("-9999.0") == 30
        top = running.completion("tiny", PROMPT, logprobs=10, max_tokens=1, ignore_eos=True).json()["choices"][0]["logprobs"][
            "top_logprobs"
        ]
        assert sorted(top[0].values())[:5] == [-9999.0] * 5
        # What is left is ruled out by the request: its own fault, and nobody else's.
        refused = running.completion("tiny", PROMPT, stop_token_ids=[0, 1, 2, 3, 4], min_tokens=2, max_tokens=3)
        assert refused.status_code == 400 and "rule every token out" in refused.json()["error"]["message"]
        assert running.tokens("tiny", PROMPT, ignore_eos=True)


def test_fields_that_ask_for_nothing_are_taken(server: Running) -> None:
    extra = {"user": "me", "metadata": {"k": "v"}, "tools": None, "response_format": {"type": "text"}, "best_of": 1, "suffix": None}
    assert server.tokens("a", PROMPT, **extra) == server.tokens("a", PROMPT)


def test_documented_vllm_shapes_are_taken(server: Running) -> None:
    body = {
        "model": "a",
        "prompt": PROMPT,
        "max_tokens": 7,
        "temperature": 0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": [],
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
    }
    assert server.client.post("/v1/completions", json=body).status_code == 200
    assert server.load("vllm-named", "b", load_inplace=False).text == "Success: LoRA adapter 'vllm-named' added successfully."
    assert server.tokens("vllm-named", PROMPT) == server.tokens("b", PROMPT)
    removed = server.client.post("/v1/unload_lora_adapter", json={"lora_name": "vllm-named", "lora_int_id": 3})
    assert removed.text == "Success: LoRA adapter 'vllm-named' removed successfully."
    assert server.completion("vllm-named", PROMPT).status_code == 404


BAD: dict[str, tuple[dict[str, Any], int, str]] = {
    "unknown_model": ({"model": "nobody"}, 404, "'nobody' does not exist; served are 'tiny', 'a'"),
    "no_model": ({"model": None}, 400, "model"),
    "model_is_a_path": ({"model": "../a"}, 404, "does not exist"),
    "empty_prompt": ({"prompt": ""}, 400, "prompt is empty"),
    "no_prompts": ({"prompt": []}, 400, "prompt is empty"),
    "one_empty_prompt": ({"prompt": ["x", ""]}, 400, "prompt is empty"),
    "prompt_is_a_number": ({"prompt": 3}, 400, "prompt"),
    "prompt_is_mixed": ({"prompt": [3, "x"]}, 400, "prompt"),
    "token_beyond_vocabulary": ({"prompt": [3, 128]}, 400, "token id 128; the model's are 0 to 127"),
    "negative_token": ({"prompt": [-1]}, 400, "prompt"),
    "prompt_too_long": ({"prompt": "x" * 256}, 400, "context is 256 tokens"),
    "prompt_far_too_long": ({"prompt": "x" * 100_000}, 400, "context is 256 tokens"),
    "together_too_long": ({"prompt": "x" * 200, "max_tokens": 100}, 400, "200 tokens and max_tokens is 100"),
    "no_tokens": ({"max_tokens": 0}, 400, "max_tokens"),
    "negative_temperature": ({"temperature": -0.1}, 400, "temperature"),
    "hot": ({"temperature": 2.5}, 400, "temperature"),
    "temperature_is_text": ({"temperature": "warm"}, 400, "temperature"),
    "top_p_zero": ({"top_p": 0}, 400, "top_p"),
    "top_p_above_one": ({"top_p": 1.5}, 400, "top_p"),
    "n_zero": ({"n": 0}, 400, "n"),
    "n_above_the_batch": ({"n": 9}, 400, "above 8 sequences"),
    "n_huge": ({"n": 10**9}, 400, "n"),
    "empty_stop": ({"stop": ""}, 400, "stop"),
    "many_stops": ({"stop": ["x"] * 17}, 400, "at most 16"),
    "logprobs_above_limit": ({"logprobs": 21}, 400, "logprobs"),
    "bias_key": ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
    "bias_key_too_long": ({"logit_bias": {"000000000000005": 1}}, 400, "logit_bias"),
    "tiny_repetition_penalty": ({"repetition_penalty": 1e-40}, 400, "repetition_penalty"),
    "bias_beyond_vocabulary": ({"logit_bias": {"999": 1}}, 400, "token id 999"),
    "bias_value": ({"logit_bias": {"3": 1000}}, 400, "logit_bias"),
    "stop_token_beyond_vocabulary": ({"stop_token_ids": [500]}, 400, "token id 500"),
    "seed_is_text": ({"seed": "x"}, 400, "seed"),
    "grammar": ({"guided_regex": "(("}, 400, "guided_regex is not supported"),
    "json_schema": ({"response_format": {"type": "json_object"}}, 400, "response_format is not supported"),
    "tools": ({"tools": [{"type": "function"}]}, 400, "tools is not supported"),
    "best_of": ({"best_of": 3}, 400, "best_of is not supported"),
    "echo_with_logprobs": ({"echo": True, "logprobs": 1}, 400, "echo with logprobs"),
    "surrogate": ({"prompt": "\ud800"}, 400, ""),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input_is_a_clear_4xx_and_leaves_no_trace(server: Running, name: str, stream: bool) -> None:
    changes, status, message = BAD[name]
    before = trace(server)
    body = {"model": "b", "prompt": PROMPT, "max_tokens": 4, "stream": stream} | changes
    response = server.client.post("/v1/completions", content=json.dumps(body))
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert message in error["message"]
    assert {"message", "type", "param", "code"} == error.keys()
    assert trace(server) == before


BAD_BODIES: dict[str, bytes] = {
    "empty": b"",
    "no_json": b"{",
    "a_list": b"[]",
    "not_utf8": b'{"model": "\xff"}',
    "nan": b'{"model": "a", "prompt": "x", "temperature": NaN}',
    "infinity": b'{"model": "a", "prompt": "x", "top_p": Infinity}',
    "deep": b"[" * 100_000,
    "huge_number": b'{"model": "a", "prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_body_that_is_no_request_is_400(server: Running, path: str, name: str) -> None:
    before = trace(server)
    response = server.client.post(path, content=BAD_BODIES[name])
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]
    assert trace(server) == before


BAD_CHATS: dict[str, tuple[dict[str, Any], str]] = {
    "no_messages": ({"messages": []}, "messages"),
    "a_string": ({"messages": "hi"}, "messages"),
    "no_role": ({"messages": [{"content": "hi"}]}, "role"),
    "a_role_that_the_template_refuses": ({"messages": [{"role": "wizard", "content": "hi"}]}, "unknown role wizard"),
    "an_image": ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "content"),
    "top_logprobs_alone": ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
    "template_options": ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    "over_long": ({"messages": [{"role": "user", "content": "x" * 300}]}, "context is 256"),
}


@pytest.mark.parametrize("name", BAD_CHATS)
def test_a_bad_chat_is_400(server: Running, name: str) -> None:
    changes, message = BAD_CHATS[name]
    before = trace(server)
    response = server.client.post(
        "/v1/chat/completions", json={"model": "a", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3} | changes
    )
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert trace(server) == before


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405),
        ("GET", "/nothing", 404),
        ("DELETE", "/v1/models", 405),
        ("GET", "/page/../app.py", 404),
        ("GET", "/page/%2e%2e%2fapp.py", 404),
        ("GET", "/slots?after=x", 400),
    ],
)
def test_other_paths_and_methods_are_answered_in_the_same_shape(server: Running, method: str, path: str, status: int) -> None:
    response = server.client.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["message"]


def test_a_body_above_the_limit_is_413(root: Path) -> None:
    with serving(tiny_model(), max_body_bytes=2000) as running:
        body = json.dumps({"model": "tiny", "prompt": "x" * 3000}).encode()
        assert running.client.post("/v1/completions", content=body).status_code == 413
        assert (
            running.client.post("/v1/completions", content=(body[at : at + 100] for at in range(0, len(body), 100))).status_code
            == 413
        )
        assert running.tokens("tiny", "x")


def trace(server: Running) -> Any:
    """All that a refused request must leave as it was."""
    service = server.service
    slots = [(info.name, info.state, info.ref_count, info.last_used, info.generation) for info in service.lora.slots()]
    sources = sorted((source.name, source.path) for source in service.sources.all())
    admission = (service.admission.num_running, service.admission.num_waiting, service.admission.states())
    return slots, sources, admission, sorted(service.lora.reports)


def events(response: Any) -> list[dict[str, Any]]:
    """The objects of a stream, which ends as streams do."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
