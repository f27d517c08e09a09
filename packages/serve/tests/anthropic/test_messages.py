"""`POST /v1/messages` and `/v1/messages/count_tokens`."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from ..openai.conftest import Served
from ..openai.fake_engine import FakeEngine
from ..openai.test_tools import ANSWER, CALL, model, prompt_of, writes
from ..openai.test_tools import TEMPLATE as TOOL_TEMPLATE

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
USER = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TOOLS = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
BODY = {"model": "tiny", "max_tokens": 500, "messages": USER}


@pytest.fixture
def calling(serve: Callable[..., Served]) -> Callable[..., Served]:
    def start(text: str = ANSWER, *, template: str = TOOL_TEMPLATE, **options: Any) -> Served:
        return serve(FakeEngine(writes(text), max_tokens=2000), model=model(template), **options)

    return start


def ask(server: Served, **body: Any) -> Any:
    answer = server.post(PATH, **{**BODY, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(server: Served, status: int = 400, path: str = PATH, **body: Any) -> dict[str, str]:
    answer = server.post(path, **body)
    assert answer.status_code == status, answer.text
    assert answer.json()["type"] == "error" and set(answer.json()["error"]) == {"type", "message"}
    return answer.json()["error"]


def events_of(server: Served, **body: Any) -> list[Any]:
    answer = server.post(PATH, **{**BODY, **body}, stream=True)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"), answer.text
    events = []
    for each in answer.text.split("\n\n")[:-1]:
        kind, data = each.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {events[-1]['type']}"
    return events


def joined(events: list[Any]) -> dict[str, Any]:
    """Returns the message of a stream after a check of the order of its events."""
    start, *inner, delta, stop = events
    assert [start["type"], delta["type"], stop["type"]] == ["message_start", "message_delta", "message_stop"]
    message, arguments = start["message"], dict[int, str]()
    is_open = False
    for each in inner:
        kind, index = each["type"], each["index"]
        assert is_open == (kind != "content_block_start"), "blocks follow each other"
        is_open = kind != "content_block_stop"
        if kind == "content_block_start":
            assert index == len(message["content"])
            message["content"].append(each["content_block"])
        elif kind == "content_block_delta":
            assert index == len(message["content"]) - 1
            change = dict(each["delta"])
            ((member, text),) = ((name, value) for name, value in change.items() if name != "type")
            if member == "partial_json":
                arguments[index] = arguments.get(index, "") + text
            else:
                message["content"][index][member] += text
    assert not is_open
    for index, text in arguments.items():
        message["content"][index]["input"] = json.loads(text)
    return {**message, **delta["delta"], "usage": delta["usage"]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {**{name: value for name, value in message.items() if name != "id"}, "content": content}


def test_an_answer_has_its_thinking_text_and_tool_use(calling: Callable[..., Served]) -> None:
    server = calling()
    message = ask(server, tools=TOOLS)
    assert message["id"].startswith("msg_") and message["type"] == "message" and message["role"] == "assistant"
    assert message["model"] == "tiny" and message["stop_reason"] == "tool_use" and message["stop_sequence"] is None
    thinking, text, *calls = message["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert text == {"type": "text", "text": "Let me see."}
    assert [(call["type"], call["name"], call["input"]) for call in calls] == [
        ("tool_use", "add", {"x": 17}),
        ("tool_use", "add", {"x": 42}),
    ]
    assert calls[0]["id"] != calls[1]["id"]
    prompt = len(server.engine.submitted[-1].prompt)
    assert message["usage"] == {
        "input_tokens": prompt - 1,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 1,
        "output_tokens": len(ANSWER) + 1,
    }
    assert server.post(COUNT, model="tiny", messages=USER, tools=TOOLS).json() == {"input_tokens": prompt}


def test_a_stream_adds_up_to_the_answer(calling: Callable[..., Served]) -> None:
    server = calling()
    events = events_of(server, tools=TOOLS)
    assert without_ids(joined(events)) == without_ids(ask(server, tools=TOOLS))
    kinds = [each["delta"]["type"] for each in events if each["type"] == "content_block_delta"]
    assert kinds.count("input_json_delta") >= 8 and kinds[0] == "thinking_delta"


def test_results_and_earlier_blocks_reach_the_template(calling: Callable[..., Served]) -> None:
    server = calling("It is 34.")
    used = {"type": "tool_use", "id": "abc", "name": "add", "input": {"x": 17}}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    said = {"type": "text", "text": "Let me see.", "cache_control": {"type": "ephemeral"}}
    result = {"type": "tool_result", "tool_use_id": "abc", "content": [{"type": "text", "text": "34"}]}
    failed = {**result, "content": "down", "is_error": True}
    text = {"type": "text", "text": "Go on."}
    messages = [*USER, {"role": "assistant", "content": [thought, said, used]}]
    message = ask(server, messages=[*messages, {"role": "user", "content": [result, text]}], tools=TOOLS, system="Be.")
    assert message["content"] == [{"type": "text", "text": "It is 34."}] and message["stop_reason"] == "end_turn"
    call = '<tool_call>{"name": "add", "arguments": {"x": 17}}</tool_call>'
    expected = f"[add]<|system|>Be.<|user|>hello<|assistant|>Let me see.{call}<|tool|>34<|user|>Go on.<|assistant|>"
    assert prompt_of(server) == expected
    ask(server, messages=[*messages, {"role": "user", "content": [failed]}], tools=TOOLS)
    assert prompt_of(server).endswith("<|tool|>Error: down<|assistant|>")


def test_a_last_message_of_the_assistant_is_continued(calling: Callable[..., Served]) -> None:
    server = calling(" is")
    messages = [*USER, {"role": "assistant", "content": "It"}]
    assert ask(server, messages=messages)["content"] == [{"type": "text", "text": " is"}]
    assert prompt_of(server) == "<|user|>hello<|assistant|>It"


def test_stopping(calling: Callable[..., Served]) -> None:
    server = calling("One. Two. Three.")
    message = ask(server, stop_sequences=["Two"])
    assert message["content"] == [{"type": "text", "text": "One. "}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "Two")
    assert joined(events_of(server, stop_sequences=["Two"]))["stop_sequence"] == "Two"
    message = ask(server, max_tokens=3)
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("max_tokens", 3)
    cut = calling(CALL)
    message = ask(cut, tools=TOOLS, max_tokens=CALL.index("17"))
    assert message["content"][0]["input"] == {} and message["stop_reason"] == "max_tokens"


def test_settings_reach_the_engine(server: Served) -> None:
    ask(server, max_tokens=5, temperature=0.5, top_k=3, top_p=0.9, metadata={"user_id": "x"}, service_tier="auto")
    sampling = server.engine.submitted[-1].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (5, 0.5, 3, 0.9)


def test_thinking_is_turned_on_and_off(calling: Callable[..., Served]) -> None:
    server = calling("Hm.</think>Yes")
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    yes = {"type": "text", "text": "Yes"}
    assert ask(server, thinking={"type": "enabled", "budget_tokens": 1024})["content"] == [thought, yes]
    assert ask(server, output_config={"effort": "max"})["content"] == [thought, yes]
    assert ask(server, thinking={"type": "adaptive", "display": "omitted"})["content"] == [yes]
    assert prompt_of(server).endswith("<|assistant|><think>")
    ask(server, thinking={"type": "disabled"})
    assert prompt_of(server).endswith("<|assistant|>")
    plain = calling("Yes", template="{% for m in messages %}{{ m.content }}{% endfor %}")
    assert ask(plain, thinking={"type": "disabled"})["content"] == [yes]
    assert "the model does not reason" in refusal(plain, **BODY, thinking={"type": "adaptive"})["message"]


def test_choices_of_tools(calling: Callable[..., Served]) -> None:
    server = calling()
    once = ask(server, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["type"] for block in once["content"]] == ["thinking", "text", "tool_use"]
    none = ask(server, tools=TOOLS, tool_choice={"type": "none"})
    assert [block["type"] for block in none["content"]] == ["thinking", "text"]
    for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
        error = refusal(server, **BODY, tools=TOOLS, tool_choice=choice)
        assert "does not support constraints" in error["message"], "the fake engine has none"
    json_schema = {"format": {"type": "json_schema", "schema": SCHEMA}}
    assert "does not support constraints" in refusal(server, **BODY, output_config=json_schema)["message"]


BLOCK = {"role": "user", "content": [{"type": "image", "source": {}}]}
USED = {"type": "tool_use", "id": "a", "name": "add", "input": {}}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"model": None}, "model is missing"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages.0.role is 'system'; expected 'user'"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content is neither"),
        ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages.0.name"),
        ({"messages": [BLOCK]}, "messages.0.content.0 is of type 'image'"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0 is not a block"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "content.0.text is not a text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "content.0.tool_use_id is missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "z"}]}]},
            "'z', which no tool call",
        ),
        ({"messages": [*USER, {"role": "assistant", "content": [{**USED, "input": 3}]}]}, "input is not an object"),
        ({"messages": [*USER, {"role": "assistant", "content": [USED]}]}, "ends with a tool_use block"),
        ({"system": 3}, "system is neither"),
        ({"system": [{"type": "document"}]}, "system.0 is of type 'document'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'; only tools"),
        ({"tools": [{"name": "add"}]}, "tools.0.input_schema is missing"),
        ({"tools": [{**TOOLS[0], "input_examples": [{"x": 1}]}]}, "tools.0.input_examples is not supported"),
        ({"tools": [{"name": "add", "input_schema": {"type": "list"}}]}, "no JSON schema of an object"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
        ({"tools": TOOLS, "tool_choice": {"type": "any", "name": "x"}}, 'belongs to the type "tool"'),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "'x', which is not among the tools"),
        ({"temperature": 1.5}, "temperature: Input should be less than or equal to 1"),
        ({"stop_sequences": [""]}, "stop_sequences.0 is empty"),
        ({"container": "x"}, "Unrecognized request argument: 'container'"),
    ],
)
def test_bad_bodies_are_refused_in_anthropics_format(
    calling: Callable[..., Served], body: dict[str, Any], message: str
) -> None:
    server = calling()
    error = refusal(server, **{**BODY, **body})
    assert error["type"] == "invalid_request_error" and message in error["message"]
    assert server.engine.submitted == []


def test_other_errors_have_the_format_too(serve: Callable[..., Served]) -> None:
    server = serve(api_keys=("secret",))
    assert refusal(server, 401, **BODY)["type"] == "authentication_error"
    server.client.headers["x-api-key"] = "secret"
    assert refusal(server, 404, **{**BODY, "model": "other"})["type"] == "not_found_error"
    assert server.client.get(PATH).json()["error"]["type"] == "invalid_request_error"
    assert refusal(server, 404, COUNT, model="other", messages=USER)["type"] == "not_found_error"
    assert ask(server, max_tokens=2)["usage"]["output_tokens"] == 2
    server.client.headers["x-api-key"] = "wrong"
    assert refusal(server, 401, **BODY)["type"] == "authentication_error"


def test_a_stream_that_fails_ends_with_an_error_event(serve: Callable[..., Served]) -> None:
    def failing(request: Any, index: int) -> Any:
        yield from b"ab"
        raise ArithmeticError("The device failed.")

    events = events_of(serve(FakeEngine(failing)), max_tokens=9)
    assert events[-1] == {"type": "error", "error": {"type": "api_error", "message": "The device failed."}}
    assert [each["type"] for each in events[:2]] == ["message_start", "content_block_start"]
