"""Tool calls through the clients of OpenAI and Anthropic, to `stack serve` of a tiny Llama with forced answers."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
from safetensors.numpy import load_file, save_file

from .served import EMBED, Served, write_checkpoint

# Each token of an answer determines the next. The answer depends on the last token of the prompt.
BEGIN, FINAL = "<|assistant|>", "<|final|>"
CALL = [
    "Let me",
    " see.\n",
    '<tool_call>\n{"name": "add", ',
    '"arguments": {"x"',
    ": 17, ",
    '"y": 25}}',
    "\n</tool_call>",
]
SECOND = ['\n<tool_call>\n{"name": "mul", ', '"arguments": {}}', "\n</tool_call>\n"]
ANSWER = ["<think>", "\nAll", " done.\n", "</think>\n\n", "It is", " 42."]
END = "</s>"
CHAINS = [[BEGIN, *CALL, *SECOND, END], [FINAL, *ANSWER, END]]
TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<|user|>{{ m.role }}:{{ m.content or '' }}"
    """{% for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", """
    """"arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}{% endfor %}"""
    "{% if messages[-1].role == 'tool' %}<|final|>{% else %}<|assistant|>{% endif %}{# <think> </think> #}"
)
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("add", "mul")]
MESSAGES: Any = [{"role": "user", "content": "17 + 25?"}]


def write_forced_checkpoint(directory: Path) -> None:
    """Writes a model whose layers add nothing, and whose head maps each token to the next of its chain."""
    write_checkpoint(directory)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    words = list(dict.fromkeys(word for chain in CHAINS for word in chain if word not in (BEGIN, END)))
    # The last pairs of bytes give their places in the vocabulary to the words.
    merges = tokenizer["model"]["merges"]
    del merges[-len(words) :]
    vocab = tokenizer["model"]["vocab"]
    places = sorted(vocab.values())[-len(words) :]
    tokenizer["model"]["vocab"] = {token: place for token, place in vocab.items() if place not in places}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"] += [
        {"id": place, "content": word, "special": word == FINAL, **flags}
        for place, word in zip(places, words, strict=True)
    ]
    path.write_text(json.dumps(tokenizer))
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))

    ids = dict(zip(words, places, strict=True)) | {BEGIN: 3, END: 1}
    tensors = load_file(directory / "model.safetensors")
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")) or "embed_tokens" in name or name == "lm_head.weight":
            tensors[name] = np.zeros_like(tensors[name])
    steps = [pair for chain in CHAINS for pair in itertools.pairwise(chain)]
    assert len(steps) <= EMBED
    for feature, (token, following) in enumerate(steps):
        tensors["model.embed_tokens.weight"][ids[token], feature] = 1
        tensors["lm_head.weight"][ids[following], feature] = 9
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("forced-llama")
    write_forced_checkpoint(directory)
    served = Served(directory, "--max-sequences", "2", "--step-tokens", "64", "--decode-repeats", "1")
    yield served
    assert "Traceback" not in served.stop()


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
    with anthropic.Anthropic(base_url=served.address, api_key="none", max_retries=0, timeout=180) as client:
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
