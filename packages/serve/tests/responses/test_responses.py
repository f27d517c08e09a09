"""`POST /v1/responses`, and the responses that are kept."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from stack_serve.openai.errors import ApiError
from stack_serve.responses.store import ResponseStore, StoredResponse

from ..openai.conftest import Served
from ..openai.fake_engine import FakeEngine
from ..openai.test_tools import ANSWER, CALL, PARAMETERS, model, prompt_of, writes
from ..openai.test_tools import TEMPLATE as TOOL_TEMPLATE

PATH = "/v1/responses"
TOOLS = [{"type": "function", "name": "add", "description": "Adds.", "parameters": PARAMETERS, "strict": True}]


@pytest.fixture
def calling(serve: Callable[..., Served]) -> Callable[..., Served]:
    def start(text: str = ANSWER, *, template: str = TOOL_TEMPLATE, **options: Any) -> Served:
        return serve(FakeEngine(writes(text), max_tokens=2000), model=model(template), **options)

    return start


def respond(server: Served, field: Any = "hello", **body: Any) -> Any:
    answer = server.post(PATH, input=field, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(server: Served, field: Any = "hello", **body: Any) -> list[Any]:
    answer = server.post(PATH, input=field, stream=True, **body)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"), answer.text
    events = []
    for each in answer.text.split("\n\n")[:-1]:
        kind, data = each.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {events[-1]['type']}"
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    return events


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        names = ("id", "call_id", "created_at", "item_id")
        return {name: without_ids(each) for name, each in value.items() if name not in names}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


def test_a_response_has_items(calling: Callable[..., Served]) -> None:
    server = calling()
    response = respond(server, tools=TOOLS, model="tiny", metadata={"a": "b"})
    assert response["id"].startswith("resp_") and response["object"] == "response"
    assert (response["status"], response["incomplete_details"], response["error"]) == ("completed", None, None)
    reasoning, message, first, second = response["output"]
    assert reasoning["type"] == "reasoning" and reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["type"] == "message" and message["role"] == "assistant"
    assert message["content"] == [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}]
    assert [(call["type"], call["name"], call["arguments"]) for call in (first, second)] == [
        ("function_call", "add", '{"x": 17}'),
        ("function_call", "add", '{"x": 42}'),
    ]
    assert first["call_id"] != second["call_id"]
    assert len({item["id"] for item in response["output"]}) == 4
    assert {item["status"] for item in response["output"]} == {"completed"}
    usage = response["usage"]
    assert usage["output_tokens"] == len(ANSWER) + 1 and usage["input_tokens_details"]["cached_tokens"] == 1
    assert 3 <= usage["output_tokens_details"]["reasoning_tokens"] <= len("<think>\nHm.\n</think>\n\n")
    assert response["tools"] == TOOLS and response["metadata"] == {"a": "b"} and response["tool_choice"] == "auto"
    assert prompt_of(server) == "[add]<|user|>hello<|assistant|>"


def test_the_events_add_up_to_the_response(calling: Callable[..., Served]) -> None:
    server = calling()
    events = events_of(server, tools=TOOLS)
    kinds = [each["type"] for each in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    items: list[Any] = []
    for each in events[2:-1]:
        kind, index = each["type"].removeprefix("response."), each["output_index"]
        if kind == "output_item.added":
            assert index == len(items) and each["item"]["status"] == "in_progress"
            items.append(each["item"])
        item = items[index]
        assert each.get("item_id", item["id"]) == item["id"]
        if kind == "content_part.added":
            item["content"].append(each["part"])
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            item["content"][each["content_index"]]["text"] += each["delta"]
        elif kind == "function_call_arguments.delta":
            item["arguments"] += each["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert item["content"][0]["text"] == each["text"]
        elif kind == "function_call_arguments.done":
            assert item["arguments"] == each["arguments"]
        elif kind == "content_part.done":
            assert item["content"][0] == each["part"]
        elif kind == "output_item.done":
            assert {**item, "status": "completed"} == each["item"]
            items[index] = each["item"]
    final = events[-1]["response"]
    assert items == final["output"]
    assert without_ids(final) == without_ids(respond(server, tools=TOOLS))
    assert kinds.count("response.function_call_arguments.delta") >= 8


def test_a_response_continues_an_earlier_one(calling: Callable[..., Served]) -> None:
    server = calling(CALL)
    first = respond(server, tools=TOOLS, instructions="Be brief.")
    (call,) = first["output"]
    server.engine.script = writes("<think>Good.</think>It is 34.")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "34"}
    events = events_of(server, [result], tools=TOOLS, previous_response_id=first["id"])
    second = events[-1]["response"]
    assert second["previous_response_id"] == first["id"] and second["output"][1]["content"][0]["text"] == "It is 34."
    written = '<tool_call>{"name": "add", "arguments": {"x": 17}}</tool_call>'
    conversation = f"[add]<|user|>hello<|assistant|>{written}<|tool|>34"
    assert prompt_of(server) == f"{conversation}<|assistant|>", "instructions are not carried over"
    respond(server, "And?", tools=TOOLS, previous_response_id=second["id"])
    assert prompt_of(server) == f"{conversation}<|assistant|>It is 34.<|user|>And?<|assistant|>"
    assert server.client.get(f"{PATH}/{first['id']}").json() == first
    deleted = server.client.delete(f"{PATH}/{first['id']}").json()
    assert deleted == {"id": first["id"], "object": "response", "deleted": True}
    assert server.client.get(f"{PATH}/{first['id']}").status_code == 404


def test_only_what_is_stored_can_be_continued(calling: Callable[..., Served]) -> None:
    server = calling("Yes", stored_responses=1)
    for name in ("resp_x", respond(server, store=False)["id"]):
        error = server.refused(PATH, 404, input="And?", previous_response_id=name)
        assert error["param"] == "previous_response_id" and "keeps the last 1" in error["message"]
    first = respond(server)["id"]
    respond(server)
    assert server.refused(PATH, 404, input="And?", previous_response_id=first)["code"] == "response_not_found"
    none = calling("Yes", stored_responses=0)
    none.refused(PATH, 404, input="And?", previous_response_id=respond(none)["id"])


def test_the_store_is_bounded_in_number_and_size() -> None:
    store = ResponseStore(2)
    stored = StoredResponse({}, [{"content": "x" * 100}])
    for name in ("a", "b"):
        store.put(name, stored)
    store.get("a")
    store.put("c", stored)
    with pytest.raises(ApiError, match="no response 'b'"):
        store.get("b")
    assert store.get("a") is stored
    store = ResponseStore(10, max_bytes=300)
    for name in ("a", "b", "c"):
        store.put(name, stored)
    with pytest.raises(ApiError):
        store.get("a")
    store.delete("b")
    store.put("d", stored)
    store.put("large", StoredResponse({}, [{"content": "x" * 300}]))
    assert store.get("c") is store.get("d") is stored


def test_items_of_earlier_turns_become_messages(calling: Callable[..., Served]) -> None:
    server = calling("It is 34.")
    items = [
        {"role": "developer", "content": "Be."},
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Wait.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "a", "name": "add", "arguments": '{"x": 1}', "id": "fc_1"},
        {"type": "function_call", "call_id": "b", "name": "add", "arguments": '{"x": 2}'},
        {"type": "function_call_output", "call_id": "a", "output": "3"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "4"}]},
    ]
    respond(server, items, tools=TOOLS)
    calls = "".join(f'<tool_call>{{"name": "add", "arguments": {{"x": {x}}}}}</tool_call>' for x in (1, 2))
    expected = f"[add]<|system|>Be.<|user|>hello<|assistant|>Wait.{calls}<|tool|>3<|tool|>4<|assistant|>"
    assert prompt_of(server) == expected


def test_an_answer_that_is_cut_off_is_incomplete(calling: Callable[..., Served]) -> None:
    server = calling("One. Two.")
    response = respond(server, max_output_tokens=4)
    assert response["status"] == response["output"][0]["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["content"][0]["text"] == "One."
    assert events_of(server, max_output_tokens=4)[-1]["type"] == "response.incomplete"


def test_settings_reach_the_engine_and_the_template(calling: Callable[..., Served]) -> None:
    server = calling("Hm.</think>Yes")
    reasoning = {"effort": "high", "summary": "auto"}
    include = ["reasoning.encrypted_content"]
    response = respond(server, temperature=0.5, top_p=0.9, max_output_tokens=50, reasoning=reasoning, include=include)
    sampling = server.engine.submitted[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.9, 50)
    assert (response["temperature"], response["top_p"]) == (0.5, 0.9)
    assert prompt_of(server).endswith("<think>") and response["output"][0]["content"][0]["text"] == "Hm."
    json_schema = {"type": "json_schema", "name": "x", "schema": PARAMETERS}
    error = server.refused(PATH, input="hello", text={"format": json_schema})
    assert error["param"] == "text.format" and "does not support constraints" in error["message"], "the fake has none"


IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]
CALLED = {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "input is missing"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": 3}, "input", "neither a text nor a list of items"),
        ({"input": ["a"]}, "input", "neither a text nor a list of items"),
        ({"input": IMAGE}, "input.0.content.0", "not a text part"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role", "'tool'; expected one of user"),
        ({"input": [{"role": [], "content": "x"}]}, "input.0.role", "[]; expected one of user"),
        ({"input": [{"role": "user"}]}, "input.0.content", "neither a text nor a list"),
        ({"input": [{"type": "web_search_call"}]}, "input.0.type", "'web_search_call'; only messages"),
        ({"input": [{**CALLED, "arguments": 3}]}, "input.0.arguments", "not a text"),
        ({"input": [CALLED, {"type": "function_call_output", "call_id": "b", "output": ""}]}, "input", "'b', which no"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input.0", "cannot be read"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools.0.type", "'web_search'; only"),
        ({"input": "a", "tools": [{"type": "function"}]}, "tools.0.function.name", "None; expected"),
        ({"input": "a", "tools": [{**TOOLS[0], "defer_loading": True}]}, "tools.0", "tools.0.defer_loading"),
        ({"input": "a", "tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice", "neither"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format.schema", "is missing"),
        ({"input": "a", "text": {"format": {"type": "text", "schema": {}}}}, "text.format", "'text'; expected"),
        ({"input": "a", "reasoning": {"summary": "detailed"}}, "reasoning.summary", "'auto'"),
        ({"input": "a", "truncation": "auto"}, "truncation", "'disabled'"),
        ({"input": "a", "background": True}, "background", "False"),
        ({"input": "a", "conversation": "x"}, "conversation", "Use previous_response_id"),
        ({"input": "a", "max_output_tokens": 5000}, "max_output_tokens", "maximum context length is 2000"),
        ({"input": "a" * 3000}, "input", "maximum context length is 2000"),
        ({"input": "a", "n": 2}, "n", "Unrecognized request argument"),
    ],
)
def test_bad_bodies_are_refused(calling: Callable[..., Served], body: dict[str, Any], param: str, message: str) -> None:
    server = calling()
    error = server.refused(PATH, **body)
    assert error["param"] == param and message in error["message"]
    assert server.engine.submitted == []


def test_a_stream_that_fails_ends_with_a_failed_response(serve: Callable[..., Served]) -> None:
    def failing(request: Any, index: int) -> Any:
        yield from b"ab"
        raise ArithmeticError("The device failed.")

    *_, last = events_of(serve(FakeEngine(failing)))
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "The device failed."}
    assert last["response"]["output"][0]["content"][0]["text"] == "ab"
