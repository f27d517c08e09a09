import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Served
from .fake_engine import ByteTokenizer, FakeEngine, checkpoint

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]


def prompt_of(server: Served) -> str:
    """The last prompt, special tokens shown."""
    return b"".join(map(ByteTokenizer().token_bytes, server.engine.submitted[-1].prompt)).decode()


def test_messages_are_answered(server: Served) -> None:
    answer = server.chat(max_completion_tokens=3)
    (choice,) = answer["choices"]
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    assert choice["message"]["role"] == "assistant" and len(choice["message"]["content"]) == 3
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None
    assert prompt_of(server) == "<s><|user|>hello</s><|assistant|>", "the template's own special tokens, once"
    assert answer["usage"]["prompt_tokens"] == 5


def test_without_a_limit_there_is_room_for_all(server: Served) -> None:
    answer = server.chat()
    assert server.engine.submitted[0].sampling.max_tokens is None
    assert answer["usage"]["total_tokens"] == 256


def test_a_stream_begins_with_the_role(server: Served) -> None:
    events = server.events(PATH, messages=MESSAGES, max_tokens=3, seed=1, n=2)
    whole = server.chat(max_tokens=3, seed=1, n=2)
    for choice in whole["choices"]:
        first, *rest = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        assert first["delta"] == {"role": "assistant", "content": ""} and first["finish_reason"] is None
        assert "".join(chunk["delta"].get("content", "") for chunk in rest) == choice["message"]["content"]
        assert [chunk["finish_reason"] for chunk in rest] == [None, None, "length"]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}


def test_usage_in_a_stream(server: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = server.events(PATH, messages=MESSAGES, max_tokens=2, stream_options=options)
    assert [chunk["usage"]["total_tokens"] for chunk in chunks] == [6, 6, 7]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 2


def test_logprobs_have_text_and_bytes(serve: Callable[..., Served]) -> None:
    server = serve(FakeEngine(lambda request, index: itertools.cycle((98, *"é".encode()))))
    (choice,) = server.chat(logprobs=True, top_logprobs=2, max_tokens=3)["choices"]
    first, second, third = choice["logprobs"]["content"]
    assert first == {
        "token": "b",
        "logprob": -0.5,
        "bytes": [98],
        "top_logprobs": [
            {"token": "a", "logprob": -0.25, "bytes": [97]},
            {"token": "b", "logprob": -0.5, "bytes": [98]},
        ],
    }
    assert second["token"] == third["token"] == "\N{REPLACEMENT CHARACTER}"
    assert bytes(second["bytes"] + third["bytes"]).decode() == "é"
    (choice,) = server.chat(logprobs=True, max_tokens=1)["choices"]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []
    events = server.events(PATH, messages=MESSAGES, logprobs=True, max_tokens=3)
    tokens = [e["choices"][0]["logprobs"]["content"][0]["token"] for e in events[1:]]
    assert tokens == ["b", "\N{REPLACEMENT CHARACTER}", "\N{REPLACEMENT CHARACTER}"]


def test_text_parts_are_joined(server: Served) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    server.post(PATH, messages=[{"role": "user", "content": parts}], max_tokens=1)
    assert prompt_of(server) == "<s><|user|>one\ntwo</s><|assistant|>"


def test_tools_that_may_not_be_chosen_ask_for_nothing(server: Served) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    server.chat(tools=tools, tool_choice="none", max_tokens=1)
    server.chat(functions=[tools[0]["function"]], function_call="none", tool_choice="none", max_tokens=1)
    assert "does not read tools" in server.refused(PATH, messages=MESSAGES, tools=tools)["message"]


def test_the_last_message_can_be_continued(server: Served) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Once upon "}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 1}
    answer = server.post(PATH, **body, add_generation_prompt=False).json()
    assert prompt_of(server) == "<s><|user|>hello</s><|assistant|>Once upon "
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert "add_generation_prompt" in server.refused(PATH, **body)["message"]


def test_variables_of_the_template(server: Served) -> None:
    server.chat(chat_template_kwargs={"quiet": True}, max_tokens=1)
    assert prompt_of(server).endswith("<|assistant|>(quietly) ")
    error = server.refused(PATH, messages=MESSAGES, chat_template_kwargs={"loud": True})
    assert "'loud'" in error["message"] and "quiet" in error["message"]
    assert (
        server.refused(PATH, messages=MESSAGES, chat_template_kwargs={"tools": []})["param"] == "chat_template_kwargs"
    )


def test_an_answer_can_be_sent_back(server: Served) -> None:
    message = server.chat(max_tokens=2)["choices"][0]["message"]
    answer = server.post(PATH, messages=[*MESSAGES, {**message, "tool_calls": []}, *MESSAGES], max_tokens=1)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"content": "x"}, "messages.0.role"),
        ({"role": 3, "content": "x"}, "messages.0.role"),
        ({"role": "user"}, "messages.0.content"),
        ({"role": "user", "content": 3}, "messages.0.content"),
        ({"role": "user", "content": []}, "messages.0.content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages.0.content.0"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "cache": 1}]}, "messages.0.content.0"),
        ({"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}, "messages.0.tool_calls"),
        ({"role": "user", "content": "x", "name": "Ann"}, "messages.0.name"),
    ],
)
def test_messages_that_are_refused(server: Served, message: dict[str, object], named: str) -> None:
    assert named in server.refused(PATH, messages=[message])["message"]


def test_a_name_is_taken_by_a_template_that_reads_it(serve: Callable[..., Served]) -> None:
    template = "{% for message in messages %}{{ message['name'] }}: {{ message.content }}\n{% endfor %}"
    server = serve(model=checkpoint(chat_template=template))
    answer = server.post(PATH, messages=[{"role": "user", "content": "x", "name": "Ann"}], max_tokens=1)
    assert answer.status_code == 200 and prompt_of(server) == "Ann: x\n"


def test_a_model_without_a_template(serve: Callable[..., Served], tmp_path: Path) -> None:
    server = serve(model=checkpoint(chat_template=None))
    assert "--chat-template FILE" in server.refused(PATH, messages=MESSAGES)["message"]
    path = tmp_path / "template.jinja"
    path.write_text("Q: {{ messages[0].content }}\n\nA:", encoding="utf-8")
    server = serve(model=checkpoint(chat_template=None), chat_template=path)
    server.chat(max_tokens=1)
    assert prompt_of(server) == "Q: hello\n\nA:"


def test_a_model_without_a_tokenizer_takes_token_ids(serve: Callable[..., Served]) -> None:
    server = serve(model=checkpoint(tokenizer=None))
    assert "token ids" in server.refused(PATH, messages=MESSAGES)["message"]
    answer = server.complete(prompt=[1, 2], max_tokens=1, return_token_ids=True, logprobs=0)
    assert len(answer["choices"][0]["token_ids"]) == 1
    assert answer["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")


def test_limits_that_contradict_each_other(server: Served) -> None:
    assert server.refused(PATH, messages=MESSAGES, max_tokens=1, max_completion_tokens=2)["param"] == "max_tokens"
    answer = server.post(PATH, messages=MESSAGES, max_tokens=2, max_completion_tokens=2)
    assert answer.status_code == 200
