from collections.abc import Iterator
from typing import Any

import pytest

from stack_core.abi.errors import GenerationError, StackError
from stack_core.abi.generation import GenerationRequest, GenerationUpdate, SamplingParams
from stack_serve.client import conversation as module
from stack_serve.client.conversation import ChatPrompts, Conversation, LocalModel, Message, Write, local_model

from ..openai.fake_engine import ByteTokenizer, FakeEngine, checkpoint


class Engine(FakeEngine):
    """Answers "yes", until it is told to do something else."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[GenerationRequest] = []
        self.end = GenerationUpdate(request_id="", text="s", finish_reason="stop")

    def submit(self, request: GenerationRequest, receive: object = None) -> None:
        self.requests.append(request)

    def stream(self, request_id: str) -> Iterator[GenerationUpdate]:
        assert request_id == self.requests[-1].request_id
        yield GenerationUpdate(request_id=request_id, text="ye")
        yield self.end


def opened(**changes: object) -> tuple[Engine, Conversation]:
    engine = Engine()
    prompts = ChatPrompts(checkpoint(**changes))
    return engine, Conversation(LocalModel("tiny", prompts, engine, SamplingParams(temperature=0.0)), "Be brief.")


def test_an_engine_gets_the_rendered_messages() -> None:
    engine, conversation = opened()
    pieces: list[str] = []
    assert conversation.say("hello", pieces.append) is None
    assert pieces == ["ye", "s"]
    conversation.say("and?", pieces.append)
    rendered = "<s><|system|>Be brief.</s><|user|>hello</s><|assistant|>yes</s><|user|>and?</s><|assistant|>"
    assert list(engine.requests[1].prompt) == ByteTokenizer().encode(rendered, add_special_tokens=False)
    assert engine.requests[1].sampling.temperature == 0.0
    assert engine.requests[0].request_id != engine.requests[1].request_id


def test_what_cuts_an_answer_short_is_told() -> None:
    engine, conversation = opened()
    engine.end = GenerationUpdate(request_id="", finish_reason="length")
    assert conversation.say("hello", lambda piece: None) == "length"
    assert conversation.messages[-1] == {"role": "assistant", "content": "ye"}


def test_an_answer_that_failed_leaves_the_conversation_as_it_was() -> None:
    engine, conversation = opened()
    engine.end = GenerationUpdate(request_id="", finish_reason="error", error="out of order")
    with pytest.raises(GenerationError, match="broke off: out of order"):
        conversation.say("hello", lambda piece: None)
    assert [message["role"] for message in conversation.messages] == ["system"]


def test_a_stopped_answer_stays_as_far_as_it_came() -> None:
    class Stopped:
        name = "m"

        def answer(self, messages: list[Message], write: Write) -> str | None:
            if messages[-1]["content"] == "one":
                write("half")
            raise KeyboardInterrupt

    conversation = Conversation(Stopped())
    for text in ("one", "two"):
        with pytest.raises(KeyboardInterrupt):
            conversation.say(text, lambda piece: None)
    assert [message["content"] for message in conversation.messages] == ["one", "half"]


TAKES_NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no instructions') }}{% endif %}"


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"tokenizer": None}, {}, "tiny has no tokenizer.*Use `stack generate`"),
        ({"chat_template": None}, {}, "tiny has no chat template.*Use `stack generate`"),
        ({"chat_template": "{% if %}"}, {}, "template cannot be read"),
        ({"chat_template": TAKES_NO_SYSTEM}, {}, "does not take these messages: no instructions"),
        ({}, {"top_p": 3.0}, "top_p"),
    ],
)
def test_what_cannot_chat_is_refused_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    def load_params(shardings: Any = None) -> None:
        pytest.fail("The weights were read.")

    monkeypatch.setattr(module, "keep_compiled", lambda: None)
    monkeypatch.setattr(module, "open_for_generation", lambda address: checkpoint(load_params=load_params, **changes))
    with pytest.raises(StackError, match=message), local_model("tiny", settings, "Be brief."):
        pass


def test_messages_that_the_template_does_not_take_are_told() -> None:
    _, conversation = opened(chat_template=TAKES_NO_SYSTEM)
    with pytest.raises(GenerationError, match="does not take these messages: no instructions"):
        conversation.say("hello", lambda piece: None)
