"""Tool calls and reasoning in chat answers, whole and streamed."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stack_core.abi.errors import UnknownName
from stack_core.abi.generation import GenerationRequest, GenerationUpdate, SamplingParams
from stack_serve.client.conversation import Conversation, RemoteModel
from stack_serve.openai.messages import MessageFormat
from stack_serve.openai.prompts import Prompt
from stack_serve.openai.schemas import ChatBody

from .conftest import Served
from .fake_engine import EOS, SPECIAL, ByteTokenizer, FakeEngine, checkpoint

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}]
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    """{% for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", """
    """"arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}{% endfor %}"""
    "{% if add_generation_prompt %}<|assistant|>{{ '<think>' if enable_thinking is defined and enable_thinking }}"
    "{% endif %}{# </think> #}"
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 17}}\n</tool_call>'
ANSWER = f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}\n{CALL.replace('17', '42')}"


def writes(text: str) -> Callable[[GenerationRequest, int], Iterator[int]]:
    return lambda request, index: iter([*text.encode(), EOS])


@pytest.fixture
def calling(serve: Callable[..., Served]) -> Callable[..., Served]:
    def start(text: str = ANSWER, *, template: str = TEMPLATE, **options: Any) -> Served:
        return serve(FakeEngine(writes(text), max_tokens=2000), model=model(template), **options)

    return start


def model(template: str) -> Any:
    return checkpoint(chat_template=template, max_positions=2000)


def prompt_of(server: Served) -> str:
    return b"".join(map(ByteTokenizer().token_bytes, server.engine.submitted[-1].prompt)).decode()


def joined(events: list[Any]) -> dict[str, Any]:
    """The message that the deltas of a stream add up to."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name, "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"])
                    message["tool_calls"].append(call | {"function": dict(call["function"])})
                else:
                    assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                    function = message["tool_calls"][call["index"]]["function"]
                    function["arguments"] += call["function"]["arguments"]
    return message


def test_an_answer_has_its_calls_and_its_reasoning(calling: Callable[..., Served]) -> None:
    server = calling()
    (choice,) = server.chat(tools=TOOLS)["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and choice["stop_reason"] is None
    assert message["content"] == "Let me see." and message["reasoning_content"] == message["reasoning"] == "Hm."
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "add", "arguments": '{"x": 17}'},
        {"name": "add", "arguments": '{"x": 42}'},
    ]
    first, second = (call["id"] for call in message["tool_calls"])
    assert first != second and len(first) == 9 and first.isalnum()
    assert prompt_of(server) == "[add]<|user|>hello<|assistant|>"


def test_a_stream_adds_up_to_the_answer(calling: Callable[..., Served]) -> None:
    server = calling()
    (whole,) = server.chat(tools=TOOLS)["choices"]
    options = {"include_usage": True}
    *events, last = server.events(PATH, messages=MESSAGES, tools=TOOLS, stream_options=options)
    message = joined(events)
    assert message["content"] == whole["message"]["content"]
    assert message["reasoning_content"] == whole["message"]["reasoning_content"]
    assert [call["function"] for call in message["tool_calls"]] == [
        call["function"] for call in whole["message"]["tool_calls"]
    ]
    deltas = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", ())]
    assert len(deltas) >= 8, "arguments are streamed in parts"
    assert [event["choices"][0]["finish_reason"] for event in events[-2:]] == [None, "tool_calls"]
    assert last["usage"]["completion_tokens"] == len(ANSWER) + 1
    assert all(event["choices"][0]["delta"] or event is events[-1] for event in events), "no chunk is empty"


def test_the_result_of_a_call_is_the_next_turn(calling: Callable[..., Served]) -> None:
    server = calling(CALL)
    message = server.chat(tools=TOOLS)["choices"][0]["message"]
    assert message["content"] is None
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "34"}
    server.engine.script = writes("It is 34.")
    answer = server.post(PATH, messages=[*MESSAGES, message, result], tools=TOOLS).json()["choices"][0]
    assert answer["message"]["content"] == "It is 34." and "tool_calls" not in answer["message"]
    assert answer["finish_reason"] == "stop"
    call = '<tool_call>{"name": "add", "arguments": {"x": 17}}</tool_call>'
    assert prompt_of(server) == f"[add]<|user|>hello<|assistant|>{call}<|tool|>34<|assistant|>"


def test_logprobs_are_those_of_all_tokens(calling: Callable[..., Served]) -> None:
    server = calling(CALL)
    (choice,) = server.chat(tools=TOOLS, logprobs=True)["choices"]
    assert "".join(each["token"] for each in choice["logprobs"]["content"][:-1]) == CALL
    events = server.events(PATH, messages=MESSAGES, tools=TOOLS, logprobs=True)
    chunks = [event["choices"][0]["logprobs"] for event in events[1:]]
    assert "".join(chunk["content"][0]["token"] for chunk in chunks[:-1]) == CALL


def test_each_continuation_has_calls_of_its_own(serve: Callable[..., Served]) -> None:
    texts = (CALL, "No call.")
    engine = FakeEngine(lambda request, index: iter([*texts[index].encode(), EOS]), max_tokens=2000)
    server = serve(engine, model=model(TEMPLATE))
    first, second = server.chat(tools=TOOLS, n=2)["choices"]
    assert first["finish_reason"] == "tool_calls" and second["finish_reason"] == "stop"
    assert second["message"]["content"] == "No call." and "tool_calls" not in second["message"]
    events = server.events(PATH, messages=MESSAGES, tools=TOOLS, n=2)
    ends = {event["choices"][0]["index"]: event["choices"][0]["finish_reason"] for event in events}
    assert ends == {0: "tool_calls", 1: "stop"}


def test_a_call_that_is_cut_off_ends_by_length(calling: Callable[..., Served]) -> None:
    server = calling(CALL)
    (choice,) = server.chat(tools=TOOLS, max_tokens=CALL.index("17") + 1)["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"x": 1'


@pytest.mark.parametrize("text", ["It is <tool_c", 'See <tool_call>{"name": 3}</tool_call> ', "<think"])
def test_an_unfinished_marker_and_a_malformed_call_are_text(calling: Callable[..., Served], text: str) -> None:
    server = calling(text)
    (choice,) = server.chat(tools=TOOLS)["choices"]
    assert choice["message"]["content"] == text and choice["finish_reason"] == "stop"
    assert joined(server.events(PATH, messages=MESSAGES, tools=TOOLS))["content"] == text


def test_without_tools_calls_are_text(calling: Callable[..., Served]) -> None:
    server = calling(CALL)
    for body in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        (choice,) = server.chat(**body)["choices"]
        assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"
        assert prompt_of(server) == "<|user|>hello<|assistant|>"


def test_only_the_first_call_if_they_may_not_be_parallel(calling: Callable[..., Served]) -> None:
    server = calling()
    (choice,) = server.chat(tools=TOOLS, parallel_tool_calls=False)["choices"]
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == ['{"x": 17}']
    events = server.events(PATH, messages=MESSAGES, tools=TOOLS, parallel_tool_calls=False)
    assert len(joined(events)["tool_calls"]) == 1


def test_reasoning_begins_in_the_prompt_or_is_continued(calling: Callable[..., Served]) -> None:
    server = calling("Hm.</think>Yes")
    thinking = server.chat(reasoning_effort="high")["choices"][0]["message"]
    assert prompt_of(server).endswith("<|assistant|><think>")
    assert (thinking["content"], thinking["reasoning_content"]) == ("Yes", "Hm.")
    plain = server.chat(reasoning_effort="none")["choices"][0]["message"]
    assert (plain["content"], plain["reasoning_content"]) == ("Hm.</think>Yes", None)
    hidden = server.chat(reasoning_effort="high", include_reasoning=False)["choices"][0]["message"]
    assert (hidden["content"], hidden["reasoning_content"]) == ("Yes", None)
    messages = [*MESSAGES, {"role": "assistant", "content": "<think>So "}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    continued = server.post(PATH, **body).json()["choices"][0]["message"]
    assert (continued["content"], continued["reasoning_content"]) == ("Yes", "Hm.")


def test_stack_chat_shows_the_reasoning_apart_from_the_answer(calling: Callable[..., Served]) -> None:
    server = calling("<think>\nHm.\n</think>\n\nYes")
    shown: list[str] = []
    chat = RemoteModel(
        "http://{}:{}/v1".format(*server.address), model=None, api_key=None, settings={}, show_reasoning=shown.append
    )
    conversation = Conversation(chat)
    assert conversation.say("hello", lambda piece: None) is None
    assert "".join(shown) == "Hm." and conversation.messages[-1] == {"role": "assistant", "content": "Yes"}


def test_an_answer_with_reasoning_can_be_sent_back(calling: Callable[..., Served]) -> None:
    server = calling()
    message = server.chat(tools=TOOLS)["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "1"} for call in message["tool_calls"]]
    answer = server.post(PATH, messages=[*MESSAGES, message, *results], tools=TOOLS)
    assert answer.status_code == 200, answer.text


def test_parsers_are_chosen_by_name(calling: Callable[..., Served]) -> None:
    text = '[TOOL_CALLS]add[ARGS]{"x": 1}'
    server = calling(text, tool_parser="mistral", reasoning_parser="none")
    assert server.chat(tools=TOOLS)["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"x": 1}'
    server = calling(ANSWER, reasoning_parser="none")
    assert server.chat(tools=TOOLS)["choices"][0]["message"]["content"].startswith("<think>\nHm.\n</think>")
    server = calling(tool_parser="none")
    assert "--tool-parser NAME" in server.refused(PATH, messages=MESSAGES, tools=TOOLS)["message"]
    with pytest.raises(UnknownName, match="Did you mean 'hermes'"):
        calling(tool_parser="herms")
    with pytest.raises(UnknownName, match="Did you mean 'qwen3'"):
        calling(reasoning_parser="qwen")


def test_tokens_of_a_prompt_with_tools_are_counted(calling: Callable[..., Served]) -> None:
    server = calling()
    answer = server.post("/tokenize", messages=MESSAGES, tools=TOOLS).json()
    server.chat(tools=TOOLS)
    assert tuple(answer["tokens"]) == server.engine.submitted[-1].prompt


def with_parameters(parameters: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "add", "parameters": parameters}}]


@pytest.mark.parametrize(
    ("body", "param", "problem"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0", "tools.0.function is missing"),
        ({"tools": [{"type": "code"}]}, "tools.0.type", "'code'; only \"function\""),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "'a b'; expected"),
        ({"tools": [*TOOLS, *TOOLS]}, "tools", "'add' twice"),
        ({"tools": with_parameters([])}, "tools.0.function.parameters", "no JSON schema of an object"),
        ({"tools": with_parameters({"type": "string"})}, "tools.0.function.parameters", "no JSON schema of an object"),
        (
            {"tools": with_parameters({"properties": {"x": {"type": "int"}}})},
            "tools.0.function.parameters.properties.x.type",
            "'int' is none of array, boolean",
        ),
        (
            {"tools": with_parameters({"properties": {"x": 3}})},
            "tools.0.function.parameters.properties.x",
            "expected an object",
        ),
        (
            {"tools": with_parameters({"properties": [], "required": "x"})},
            "tools.0.function.parameters.required",
            "expected a list of names",
        ),
        (
            {"tools": with_parameters({"properties": {"x": {"anyOf": {}}}})},
            "tools.0.function.parameters.properties.x.anyOf",
            "expected a list of schemas",
        ),
        ({"tools": TOOLS, "tool_choice": "required"}, "tools", "does not support constraints"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "there are no tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}},
            "tools",
            "does not support constraints",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            "tool_choice",
            "'sub', which is not among the tools",
        ),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "neither"),
        ({"messages": [*MESSAGES, {"role": "tool", "content": "1"}]}, "messages.1.tool_call_id", "is missing"),
        (
            {"messages": [*MESSAGES, {"role": "tool", "tool_call_id": "a", "content": "1"}]},
            "messages.1.tool_call_id",
            "'a', which no tool call",
        ),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "Input should be 'none'"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": True}},
            "reasoning_effort",
            "which chat_template_kwargs sets too",
        ),
    ],
)
def test_bad_tools_are_refused(calling: Callable[..., Served], body: dict[str, Any], param: str, problem: str) -> None:
    server = calling()
    error = server.refused(PATH, **{"messages": MESSAGES, **body})
    assert error["param"] == param and problem in error["message"]
    assert server.engine.submitted == []


def test_what_the_template_lacks_is_refused(server: Served) -> None:
    assert "does not read tools" in server.refused(PATH, messages=MESSAGES, tools=TOOLS)["message"]
    assert server.refused(PATH, messages=MESSAGES, reasoning_effort="low")["param"] == "reasoning_effort"


class Marking(ByteTokenizer):
    """A tokenizer for which the markers of Mistral's calls are special tokens."""

    names = ("[TOOL_CALLS]", "[ARGS]", *SPECIAL[2:])

    def __init__(self) -> None:
        self._longer = {text: 256 + place for place, text in enumerate(self.names)}

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else self.names[token - 256].encode()


@pytest.mark.parametrize("skips", [True, False])
def test_markers_that_are_special_tokens_reach_the_parser(skips: bool) -> None:
    tokenizer, sampling = Marking(), SamplingParams(skip_special_tokens=skips)
    body = ChatBody(messages=MESSAGES)
    found = MessageFormat("[TOOL_CALLS]", tokenizer)
    start, changed = found.parsing(body, Prompt((1,), "x"), sampling, make_calls=found.calls(TOOLS))
    assert start is not None and not changed.skip_special_tokens
    text = '<|user|>Hi[TOOL_CALLS]add[ARGS]{"x": 1}'
    message = start()
    for token in tokenizer.encode(text, add_special_tokens=False):
        message.push(GenerationUpdate(request_id="", tokens=(token,), text=tokenizer.token_bytes(token).decode()))
    message.push(GenerationUpdate(request_id="", finish_reason="stop"))
    members = message.message_members()
    assert members["content"] == ("Hi" if skips else "<|user|>Hi")
    assert members["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"x": 1}'}
    ordinary, same = MessageFormat(TEMPLATE, ByteTokenizer()).parsing(
        body, Prompt((1,), "x"), sampling, make_calls=None
    )
    assert ordinary is not None and same is sampling
    nothing = MessageFormat(None, tokenizer)
    assert nothing.calls(TOOLS) is None
    assert nothing.parsing(body, Prompt((1,), "x"), sampling, make_calls=None) == (None, sampling)
    assert json.dumps(members)
