"""Tool calls through the clients of OpenAI and Anthropic, to `stack serve` of a tiny Llama with forced answers."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from .forced import CALL, MESSAGES, PARAMETERS, SECOND, TOOLS
from .served import KEY, Served


@pytest.fixture(scope="module")
def served(forced_server: Served) -> Served:
    return forced_server


def ask(served: Served, messages: Any = MESSAGES, **options: Any) -> Any:
    options = {"tools": TOOLS, "max_completion_tokens": 64, "temperature": 0, **options}
    return served.openai.chat.completions.create(model=served.model, messages=messages, **options)


def test_calls_and_the_turn_after_them(served: Served) -> None:
    answer = ask(served)
    (choice,) = answer.choices
    first, second = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    assert (first.type, first.function.name, json.loads(first.function.arguments)) == (
        "function",
        "add",
        {"x": 17, "y": 25},
    )
    assert (second.function.name, second.function.arguments) == ("mul", "{}")
    assert answer.usage.completion_tokens == len(CALL) + len(SECOND) + 1
    results = [{"role": "tool", "tool_call_id": call.id, "content": "42"} for call in choice.message.tool_calls]
    (final,) = ask(served, [*MESSAGES, choice.message, *results]).choices
    assert final.message.content == "It is 42." and final.message.tool_calls is None
    assert final.finish_reason == "stop" and final.message.reasoning_content == "All done."


def test_streamed_calls(served: Served) -> None:
    whole = ask(served).choices[0].message
    chunks = list(ask(served, stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [call.function.name for call in calls if call.id] == ["add", "mul"]
    arguments = ["".join(c.function.arguments for c in calls if c.index == index) for index in (0, 1)]
    assert arguments == [call.function.arguments for call in whole.tool_calls]
    assert sum(call.index == 0 and bool(call.function.arguments) for call in calls) == 3, "one delta a token"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.content
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_the_streaming_helper_of_the_client(served: Served) -> None:
    with served.openai.chat.completions.stream(
        model=served.model, messages=MESSAGES, tools=TOOLS, temperature=0, max_completion_tokens=64
    ) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in events
    assert [call.function.name for call in final.choices[0].message.tool_calls or ()] == ["add", "mul"]


def test_bad_tools_are_the_clients_error(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="no JSON schema"):
        ask(served, tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "list"}}}])
    with pytest.raises(openai.BadRequestError, match=r"messages\.1\.tool_call_id is missing"):
        ask(served, [*MESSAGES, {"role": "tool", "content": "42"}])
    with pytest.raises(openai.BadRequestError, match="'sub', which is not among the tools"):
        ask(served, tool_choice={"type": "function", "function": {"name": "sub"}})


# Anthropic's API.
ANTHROPIC_TOOLS: Any = [{"name": name, "description": "x", "input_schema": PARAMETERS} for name in ("add", "mul")]


@pytest.fixture(scope="module")
def claude(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.address, auth_token=KEY, max_retries=0, timeout=180) as client:
        yield client


def send(served: Served, client: anthropic.Anthropic, messages: Any = MESSAGES, **options: Any) -> Any:
    options = {"tools": ANTHROPIC_TOOLS, "max_tokens": 64, "extra_body": {"temperature": 0}, **options}
    return client.messages.create(model=served.model, messages=messages, **options)


def test_anthropics_client_gets_calls_and_the_turn_after_them(served: Served, claude: anthropic.Anthropic) -> None:
    message = send(served, claude)
    text, first, second = message.content
    assert message.stop_reason == "tool_use" and text.text == "Let me see."
    assert (first.type, first.name, first.input) == ("tool_use", "add", {"x": 17, "y": 25})
    assert (second.name, second.input) == ("mul", {})
    assert message.usage.output_tokens == len(CALL) + len(SECOND) + 1
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "42"} for call in (first, second)]
    turns = [*MESSAGES, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    final = send(served, claude, turns, max_tokens=24)
    thinking, answer = final.content
    assert (thinking.type, thinking.thinking, answer.text) == ("thinking", "All done.", "It is 42.")
    assert final.stop_reason == "end_turn"


def test_anthropics_streaming_helper(served: Served, claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(
        model=served.model, messages=MESSAGES, tools=ANTHROPIC_TOOLS, max_tokens=64, extra_body={"temperature": 0}
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    whole = send(served, claude)
    assert [block.model_dump(exclude={"id"}) for block in final.content] == [
        block.model_dump(exclude={"id"}) for block in whole.content
    ]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert kinds.count("input_json") > 3 and kinds[0] == "message_start" and kinds[-1] == "message_stop"


def test_anthropics_client_counts_tokens_and_knows_the_errors(served: Served, claude: anthropic.Anthropic) -> None:
    counted = claude.messages.count_tokens(model=served.model, messages=MESSAGES, tools=ANTHROPIC_TOOLS)
    usage = send(served, claude, max_tokens=1).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        claude.messages.create(model="other", messages=MESSAGES, max_tokens=1)
    with pytest.raises(anthropic.BadRequestError, match="'image', which is not supported"):
        send(served, claude, [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}])


# OpenAI's Responses API.
RESPONSE_TOOLS: Any = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]


def respond(served: Served, field: Any = "17 + 25?", **options: Any) -> Any:
    options = {"tools": RESPONSE_TOOLS, "max_output_tokens": 24, "temperature": 0, **options}
    return served.openai.responses.create(model=served.model, input=field, **options)


def test_responses_have_calls_and_continue(served: Served) -> None:
    response = respond(served)
    text, first, second = response.output
    assert response.status == "completed" and response.output_text == "Let me see." == text.content[0].text
    assert (first.type, first.name, json.loads(first.arguments)) == ("function_call", "add", {"x": 17, "y": 25})
    assert (second.name, second.arguments) == ("mul", "{}")
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "42"} for call in (first, second)]
    final = respond(served, results, previous_response_id=response.id)
    reasoning, _ = final.output
    assert reasoning.content[0].text == "All done." and final.output_text == "It is 42."
    assert final.usage.output_tokens_details.reasoning_tokens > 0
    # The client may send the items of the first response back instead.
    question = {"role": "user", "content": "17 + 25?"}
    items = [item.model_dump(exclude_none=True) for item in response.output]
    assert respond(served, [question, *items, *results], store=False).output_text == "It is 42."
    assert served.openai.responses.retrieve(final.id).output_text == final.output_text
    served.openai.responses.delete(final.id)
    with pytest.raises(openai.NotFoundError, match="There is no response"):
        respond(served, "And?", previous_response_id=final.id)


def test_the_streaming_helper_of_responses(served: Served) -> None:
    with served.openai.responses.stream(
        model=served.model, input="17 + 25?", tools=RESPONSE_TOOLS, max_output_tokens=24, temperature=0
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    whole = respond(served)
    assert final.output_text == whole.output_text
    calls = [[item.arguments for item in each.output if item.type == "function_call"] for each in (final, whole)]
    assert calls[0] == calls[1] and len(calls[0]) == 2
    kinds = [event.type for event in events]
    assert kinds.count("response.function_call_arguments.delta") > 3 and kinds[-1] == "response.completed"
