import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from stack_core.abi.generation import Constraint
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.engine import LLMEngine
from stack_serve.openai.bodies import parse
from stack_serve.openai.constraints import constraint_and_field
from stack_serve.openai.errors import ApiError
from stack_serve.openai.restrictions import restriction_and_field
from stack_serve.openai.schemas import ChatBody

from ..llm.constrained import byte_checkpoint
from .conftest import Served, starting
from .fake_engine import EOS, SPECIAL, TEMPLATE, WORDS, ByteTokenizer

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
# Programs are those of `test_constrained_generation`, so JAX's cache has them.
CONFIG = EngineConfig(max_sequences=4, step_tokens=16, page_tokens=4, pages=64)
SCHEMA = {
    "type": "object",
    "properties": {"b": {"type": "string", "maxLength": 6}, "a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["b", "a"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
REGEX = Constraint(regex="[0-9]+")


def constraint_of(**fields: Any) -> tuple[Constraint | None, str | None]:
    return constraint_and_field(parse(ChatBody, {"messages": MESSAGES, **fields}))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
        ({"response_format": NAMED}, {"json_schema": SCHEMA}),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, {"regex": "a"}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"json_object": True}}, {"json_schema": {"type": "object"}}),
        ({"structured_outputs": {"json": SCHEMA, "json_object": False}}, {"json_schema": SCHEMA}),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True, "disable_fallback": True}},
            {"json_schema": SCHEMA, "whitespace": ""},
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}},
            {"json_schema": SCHEMA, "whitespace": " ?"},
        ),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ("a", "b")}),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, {"grammar": 'start: "a"'}),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": ""}, {"json_schema": SCHEMA, "whitespace": ""}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"], "guided_decoding_backend": "auto"}, {"choice": ("a", "b")}),
        ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    ],
)
def test_each_field_of_openai_and_vllm_is_a_constraint(fields: dict[str, Any], expected: dict[str, Any] | None) -> None:
    constraint, field = constraint_of(**fields)
    assert constraint == (None if expected is None else Constraint(**expected))
    assert (field in fields) == (expected is not None)


@pytest.mark.parametrize(
    ("fields", "param", "problem"),
    [
        ({"response_format": NAMED, "guided_regex": "a"}, "guided_regex", "response_format and guided_regex both"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "given: regex, choice"),
        ({"structured_outputs": {"json": {}, "json_object": True}}, "structured_outputs", "json and json_object"),
        ({"structured_outputs": {}}, "structured_outputs", "has none of json, regex"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "has none of json, regex"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "not permitted"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs", "needs json_schema"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}},
            "structured_outputs",
            "give one",
        ),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "needs guided_json"),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"guided_choice": "yes"}, "guided_choice", "valid list"),
        ({"guided_regex": 5}, "guided_regex", "valid string"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'json_schema'"),
        ({"response_format": "json"}, "response_format", "dictionary"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema is missing"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", "is missing"),
        ({"response_format": {**NAMED, "type": "json_object"}}, "response_format", "expected 'json_schema'"),
    ],
)
def test_incomplete_and_contradictory_constraints_are_refused(fields: dict[str, Any], param: str, problem: str) -> None:
    with pytest.raises(ApiError, match=problem) as caught:
        constraint_of(**fields)
    assert caught.value.status == 400 and caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"allowed_token_ids": [7, 5, 6, 9, 9]}, "start: (<[5-7,9]>)*"),
        ({"allowed_token_ids": [0]}, "start: (<[0]>)*"),
        ({"bad_words": ["ab", "a/."]}, r"start: TEXT|TEXT: /(?s:.*)/ & ~/(?s:.*)(ab|a\x{2f}\x{2e})(?s:.*)/"),
        ({"bad_words": []}, None),
    ],
)
def test_restrictions_are_grammars(fields: dict[str, Any], grammar: str | None) -> None:
    body = parse(ChatBody, {"messages": MESSAGES, **fields})
    found, field = restriction_and_field(body, lambda tokens, param: tokens)
    expected = None if grammar is None else Constraint(grammar=grammar.replace("|TEXT", "\nTEXT"))
    assert found == expected and (field in fields) == (grammar is not None)


@pytest.mark.parametrize(
    ("fields", "param", "problem"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids", "is empty"),
        ({"allowed_token_ids": [5, 999]}, "allowed_token_ids", "Token 999"),
        ({"allowed_token_ids": [5], "bad_words": ["a"]}, "bad_words", "both restrict"),
        ({"bad_words": [""]}, "bad_words", "1 to 128 characters"),
        ({"bad_words": 65 * ["a"]}, "bad_words", "up to 64 texts"),
        ({"bad_words": ["a"], "guided_regex": "a"}, "bad_words", "guided_regex and bad_words both constrain"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "greater than or equal to -1"),
    ],
)
def test_bad_restrictions_are_refused(
    constrained_server: Served, fields: dict[str, Any], param: str, problem: str
) -> None:
    for path, prompt in ((CHAT, {"messages": MESSAGES}), (COMPLETE, {"prompt": "x"})):
        error = constrained_server.refused(path, **prompt, **fields)
        assert error["param"] == param and problem in error["message"]


@pytest.fixture(scope="module")
def constrained_server() -> Iterator[Served]:
    """A server of a random model."""
    names = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    checkpoint = byte_checkpoint(chat_template=TEMPLATE + names)
    engine = LLMEngine(checkpoint, CONFIG)
    with starting() as start:
        yield start(engine, model=checkpoint)


@pytest.fixture(scope="module")
def client(constrained_server: Served) -> Iterator[openai.OpenAI]:
    host, port = constrained_server.address
    with openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0) as client:
        yield client


class Thing(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    kind: str = pydantic.Field(max_length=5)
    counts: list[int] = pydantic.Field(max_length=2)


# The numbers of a random model would not end.
DIGITS = {str(ord(digit)): -30.0 for digit in "0123456789"}


def test_the_openai_client_parses_whole_answers(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Thing, seed=1, n=2, max_tokens=150, logit_bias=DIGITS
    )
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    assert all(isinstance(choice.message.parsed, Thing) for choice in answer.choices)
    text = client.completions.create(model="tiny", prompt="x", extra_body={"guided_choice": ["left", "right"]})
    assert text.choices[0].text in ("left", "right")


POINT = {"$ref": "#/$defs/Point"}
TOOLS = [
    {"type": "function", "function": {"name": "now"}},
    {"type": "function", "function": {"name": "draw", "parameters": {
        "type": "object", "properties": {"from": POINT, "to": POINT}, "required": ["from", "to"],
        "additionalProperties": False, "$defs": {"Point": {"type": "integer", "minimum": 0, "maximum": 9}}}}},
    {"type": "function", "function": {"name": "write", "parameters": Thing.model_json_schema()}},
]  # fmt: skip
PARAMETERS = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in TOOLS}


def with_parameters(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


def check_calls(calls: Any) -> list[str]:
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS[call.function.name])
    return [call.function.name for call in calls]


def test_a_named_function_gets_its_arguments(client: openai.OpenAI) -> None:
    given = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "seed": 5, "logit_bias": DIGITS, "max_tokens": 150}
    given |= {"tool_choice": {"type": "function", "function": {"name": "write"}}}
    (choice,) = client.chat.completions.create(**given).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert check_calls(choice.message.tool_calls) == ["write"]
    with client.chat.completions.stream(**given) as stream:
        (streamed,) = stream.get_final_completion().choices
    assert check_calls(streamed.message.tool_calls) == ["write"]
    assert streamed.message.tool_calls[0].function.arguments == choice.message.tool_calls[0].function.arguments


@pytest.mark.parametrize("parallel", [False, True])
def test_a_required_call_is_of_any_of_the_tools(client: openai.OpenAI, parallel: bool) -> None:
    names = set()
    for seed in range(6):
        given = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS[1:], "tool_choice": "required", "seed": seed}
        given |= {"parallel_tool_calls": parallel, "max_tokens": 200, "logit_bias": DIGITS | {str(ord(",")): -30.0}}
        (choice,) = client.chat.completions.create(**given).choices
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        found = check_calls(choice.message.tool_calls)
        assert len(found) == 1 or parallel
        names |= set(found)
    assert names == {"draw", "write"}


def test_the_openai_client_reads_streams(client: openai.OpenAI) -> None:
    given = {"model": "tiny", "messages": MESSAGES, "response_format": NAMED, "seed": 3, "max_tokens": 150}
    given |= {"logprobs": True, "top_logprobs": 2}
    chunks = list(client.chat.completions.create(**given, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(text), SCHEMA)
    whole = client.chat.completions.create(**given)
    assert whole.choices[0].message.content == text
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    figures = [each for part in parts for each in part.content or []]
    assert [each.token for each in figures] == [each.token for each in whole.choices[0].logprobs.content]
    assert all(each.logprob <= 0 for each in figures)


@pytest.mark.parametrize(
    ("path", "fields", "param", "problem"),
    [
        (CHAT, {"response_format": {**NAMED, "json_schema": {"name": "x", "schema": {"not": {}}}}},
         "response_format", 'Unimplemented keys: ["not"]'),
        (CHAT, {"structured_outputs": {"regex": "a("}}, "structured_outputs", "unclosed group"),
        (CHAT, {"tools": with_parameters({"type": "object", "not": {}}), "tool_choice": "required"},
         "tools", 'Unimplemented keys: ["not"]'),
        (CHAT, {"tools": TOOLS, "tool_choice": "required", "response_format": NAMED}, "response_format",
         "tool_choice and response_format both"),
        (COMPLETE, {"guided_grammar": "start: x"}, "guided_grammar", "unknown name"),
        (COMPLETE, {"guided_json": "{"}, "guided_json", "guided_json: The json_schema"),
    ],
)  # fmt: skip
def test_what_cannot_be_compiled_is_answered_with_the_reason(
    constrained_server: Served, path: str, fields: dict[str, Any], param: str, problem: str
) -> None:
    usual = {"messages": MESSAGES} if path == CHAT else {"prompt": "x"}
    for stream in (False, True):
        error = constrained_server.refused(path, **usual, **fields, stream=stream)
        assert error["param"] == param and problem in error["message"]


def test_a_client_that_leaves_frees_the_pages(constrained_server: Served) -> None:
    body = {"prompt": "x", "n": 4, "max_tokens": 200, "stream": True, "guided_regex": "[a-z]*", "ignore_eos": True}
    with constrained_server.client.stream("POST", COMPLETE, json=body) as answer:
        assert next(answer.iter_lines()).startswith("data: ")
        assert constrained_server.engine.stats().used_pages
    constrained_server.wait_until(lambda: constrained_server.engine.stats().used_pages == 0)
    assert constrained_server.complete(guided_choice=["yes"], max_tokens=9)["choices"][0]["text"] == "yes"


def test_nothing_is_compiled_for_the_requests_of_a_warm_server(constrained_server: Served) -> None:
    engine = constrained_server.engine
    constrained_server.complete(guided_choice=["yes"])
    constrained_server.wait_until(lambda: engine.stats().programs_to_compile == 0)
    before = engine.stats().compilations
    constrained_server.complete(guided_choice=["yes"])
    assert engine.stats().compilations == before


def test_an_engine_without_constraints_refuses_them(server: Served) -> None:
    error = server.refused(CHAT, messages=MESSAGES, response_format={"type": "json_object"})
    assert error["param"] == "response_format" and "does not support constraints" in error["message"]
    assert server.engine.submitted == []


def test_only_the_allowed_tokens_are_generated(client: openai.OpenAI) -> None:
    given = {"model": "tiny", "prompt": "x", "max_tokens": 30, "seed": 1}
    (choice,) = client.completions.create(**given, extra_body={"allowed_token_ids": [97, 98, 261]}).choices
    assert choice.finish_reason == "length", "the end token is not among them"
    assert len(choice.text) >= 30 and set(choice.text.replace("hello", "")) <= {"a", "b"}
    ending = {"allowed_token_ids": [97, EOS], "logit_bias": {str(EOS): 100}}
    assert client.completions.create(**given, extra_body=ending).choices[0].finish_reason == "stop"


def test_bad_words_are_not_in_the_answer(client: openai.OpenAI) -> None:
    favored = {str(ord(letter)): 40.0 for letter in "ab/"}
    given = {"model": "tiny", "messages": MESSAGES, "max_tokens": 60, "seed": 1, "logit_bias": favored}
    (plain,) = client.chat.completions.create(**given).choices
    assert "ab" in plain.message.content and "/" in plain.message.content
    (choice,) = client.chat.completions.create(**given, extra_body={"bad_words": ["ab", "/"]}).choices
    assert len(choice.message.content) == 60 and set(choice.message.content) <= {"a", "b"}
    assert "ab" not in choice.message.content


class Thinking(ByteTokenizer):
    """A tokenizer with one token for the marker that ends reasoning."""

    words = ("</think>", "<think>", *WORDS[2:])

    def __init__(self) -> None:
        self._longer = {text: 256 + place for place, text in enumerate((*SPECIAL, *self.words))}

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else (*SPECIAL, *self.words)[token - 256].encode()


@pytest.fixture(scope="module")
def thinking_client() -> Iterator[openai.OpenAI]:
    """A client of a random model whose prompts end with the beginning of reasoning, unless it is turned off."""
    ending = (
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>{% else %}<think>{% endif %}"
    )
    names = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    checkpoint = byte_checkpoint(tokenizer=Thinking(), chat_template=names + TEMPLATE + ending)
    engine = LLMEngine(checkpoint, CONFIG)
    with starting() as start:
        host, port = start(engine, model=checkpoint).address
        with openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0) as client:
            yield client


END_OF_THOUGHTS = str(256 + len(SPECIAL))


def test_a_constraint_begins_after_the_reasoning(thinking_client: openai.OpenAI) -> None:
    given: Any = {"model": "tiny", "messages": MESSAGES, "seed": 1, "max_tokens": 120}
    choices = {"guided_choice": ["left", "right"]}
    thoughts = {"logit_bias": {END_OF_THOUGHTS: 7.0}}
    (choice,) = thinking_client.chat.completions.create(**given, **thoughts, extra_body=choices).choices
    message: Any = choice.message
    assert choice.finish_reason == "stop" and message.content in choices["guided_choice"]
    assert message.reasoning_content
    chunks = list(thinking_client.chat.completions.create(**given, **thoughts, extra_body=choices, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content
    options = {"tools": TOOLS[:1], "tool_choice": {"type": "function", "function": {"name": "now"}}}
    (choice,) = thinking_client.chat.completions.create(**{**given, "max_tokens": 60}, **thoughts, **options).choices
    assert [call.function.name for call in choice.message.tool_calls or ()] == ["now"]
    # Without reasoning, the constraint holds from the beginning.
    (choice,) = thinking_client.chat.completions.create(**given, reasoning_effort="none", extra_body=choices).choices
    assert choice.message.content in choices["guided_choice"] and choice.message.model_extra == {"reasoning": None}
