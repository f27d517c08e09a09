"""Conversations with a remote or a local model."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import orjson

from stack_core.abi.config import parse
from stack_core.abi.engines import Engine
from stack_core.abi.errors import GenerationError, StackError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.generation import GenerationRequest, SamplingParams
from stack_core.abi.model_formats import open_for_generation
from stack_core.runtime.compile_cache import keep_compiled
from stack_core.text.chat_template import ChatTemplate
from stack_serve.client.endpoint import Endpoint, RequestFailed

__all__ = ["ChatModel", "ChatPrompts", "Conversation", "LocalModel", "Message", "RemoteModel", "local_model"]

Message = dict[str, str]
Write = Callable[[str], None]


@runtime_checkable
class ChatModel(Protocol):
    """A model that continues a conversation."""

    name: str

    def answer(self, messages: list[Message], write: Write) -> str | None:
        """Writes the answer piece by piece; returns why it was cut short, or None.

        Raises:
          StackError: the model gives no answer.
          KeyboardInterrupt: the user stopped the answer; no background work continues.
        """
        ...


class Conversation:
    """Messages of a user and a model, in turns.

    Attributes:
      messages: the system's first, if there is one.
    """

    def __init__(self, model: ChatModel, system: str | None = None) -> None:
        self.messages: list[Message] = []
        self._model = model
        self.reset(system)

    @property
    def system(self) -> str | None:
        """The system instructions at the start."""
        first = self.messages[:1]
        return first[0]["content"] if first and first[0]["role"] == "system" else None

    def reset(self, system: str | None = None) -> None:
        """Begins again."""
        self.messages = [{"role": "system", "content": system}] if system else []

    def say(self, text: str, write: Write) -> str | None:
        """Adds a message and the model's answer, which may be partial; returns why it was cut short, or None.

        A message without an answer is removed again.
        """
        pieces: list[str] = []

        def keep(piece: str) -> None:
            pieces.append(piece)
            write(piece)

        self.messages.append({"role": "user", "content": text})
        try:
            return self._model.answer(list(self.messages), keep)
        except StackError:
            # A failed answer would confuse the model in the next turn.
            pieces.clear()
            raise
        finally:
            if pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.messages.pop()  # a model expects an answer before the next message

    def save(self, path: Path) -> None:
        """Writes the messages as JSON.

        Raises:
          GenerationError: the file cannot be written.
        """
        content = json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1) + "\n"
        try:
            path.write_text(content, encoding="utf-8")
        except OSError as error:
            raise GenerationError(f"The conversation cannot be written to {str(path)!r}: {error}.") from error


class RemoteModel:
    """A model behind an OpenAI interface.

    Args:
      settings: fields of every request, such as `temperature`.
      show_reasoning: receives pieces of the reasoning, which a server may send apart from the answer; it is not part of
        the conversation.

    Raises:
      RequestFailed: the server cannot be reached or serves no model.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None,
        api_key: str | None,
        settings: Mapping[str, Any],
        show_reasoning: Write = lambda piece: None,
    ) -> None:
        self._url, self._api_key, self._settings = url, api_key, dict(settings)
        self._show_reasoning = show_reasoning
        self.name = model or self._first_model()

    def answer(self, messages: list[Message], write: Write) -> str | None:
        """See `ChatModel`; to close the connection is what stops the server."""
        body = {**self._settings, "model": self.name, "messages": messages, "stream": True}
        reason = None

        def receive(data: bytes, arrived_s: float) -> None:
            nonlocal reason
            event = orjson.loads(data)
            if event.get("error"):
                raise RequestFailed(f"The answer broke off: {event['error'].get('message')}", kind="error")
            for choice in event.get("choices", ()):
                delta = choice.get("delta", {})
                # `reasoning_content` is DeepSeek's name, `reasoning` OpenRouter's; some servers send both.
                if piece := delta.get("reasoning_content") or delta.get("reasoning"):
                    self._show_reasoning(piece)
                write(delta.get("content") or "")
                reason = choice.get("finish_reason") or reason

        async def run() -> None:
            async with Endpoint(self._url, api_key=self._api_key) as endpoint:
                await endpoint.stream("/chat/completions", body, receive)

        asyncio.run(run())
        return None if reason == "stop" else reason

    def _first_model(self) -> str:
        async def models() -> list[str]:
            async with Endpoint(self._url, api_key=self._api_key, timeout_s=30.0) as endpoint:
                return await endpoint.models()

        names = asyncio.run(models())
        if not names:
            raise RequestFailed(f"{self._url} lists no model. Name one with --model.", kind="error")
        return names[0]


class ChatPrompts:
    """Renders messages to prompts with a model's chat template and tokenizer.

    Raises:
      GenerationError: the model lacks a tokenizer or a chat template.
    """

    def __init__(self, checkpoint: GenerativeCheckpoint) -> None:
        if checkpoint.tokenizer is None or checkpoint.chat_template is None:
            lacks = "tokenizer" if checkpoint.tokenizer is None else "chat template"
            raise GenerationError(
                f"{checkpoint.name} has no {lacks}: it does not answer messages, but it continues texts. "
                "Use `stack generate`."
            )
        self._tokenizer = checkpoint.tokenizer
        self._template = ChatTemplate(checkpoint.chat_template, checkpoint.special_tokens)

    def tokens(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The prompt.

        Raises:
          GenerationError: the template does not take the messages.
        """
        text = self._template.render(messages)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))  # the template adds the special tokens


class LocalModel:
    """A model on an engine of this process."""

    def __init__(self, name: str, prompts: ChatPrompts, engine: Engine, sampling: SamplingParams) -> None:
        self.name = name
        self._prompts, self._engine, self._sampling = prompts, engine, sampling
        self._answers = 0

    def answer(self, messages: list[Message], write: Write) -> str | None:
        """See `ChatModel`."""
        prompt = self._prompts.tokens(messages)
        self._answers += 1
        request = GenerationRequest(request_id=f"chat-{self._answers}", prompt=prompt, sampling=self._sampling)
        self._engine.submit(request)
        reason = None
        for update in self._engine.stream(request.request_id):
            write(update.text)
            reason = update.finish_reason
            if update.error is not None:
                raise GenerationError(f"The answer broke off: {update.error}")
        return None if reason == "stop" else reason


@contextmanager
def local_model(address: str, settings: Mapping[str, Any], system: str | None = None) -> Iterator[LocalModel]:
    """Opens a model in this process until the end of the block; weights are read after all checks.

    Args:
      address: address of a checkpoint.
      settings: fields of `SamplingParams`.
      system: instructions at the start of each conversation.

    Raises:
      GenerationError: the model cannot chat, or does not accept instructions.
      ConfigError: a setting is out of range.
    """
    from stack_serve.llm.config import EngineConfig  # imports jax, which talking to a server does not need
    from stack_serve.llm.engine import LLMEngine

    keep_compiled()
    checkpoint = open_for_generation(address)
    prompts = ChatPrompts(checkpoint)
    # Some templates reject system messages, which must show before the weights are read.
    if system:
        prompts.tokens([{"role": "system", "content": system}, {"role": "user", "content": "?"}])
    sampling = parse(SamplingParams, {**checkpoint.sampling_defaults, **settings})
    with LLMEngine(checkpoint, EngineConfig(max_sequences=1)) as engine:
        yield LocalModel(checkpoint.name, prompts, engine, sampling)
