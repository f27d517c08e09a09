"""Adapter from conversations of messages to the token protocol of environments."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, SupportsFloat, TypeAlias, runtime_checkable

from stack_core.abi.data import Tokenizer
from stack_core.abi.errors import DataError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.generation import PromptImage
from stack_core.text.chat_template import ChatTemplate
from stack_core.text.images import ImageReader, ReadImage, expand_images, image_reader_of, place_images
from stack_rl.contracts import Action, Observation, StepResult, Verdict
from stack_rl.environments.image_parts import has_parts, read_parts

__all__ = ["Conversation", "History", "Message", "MessageEnvironment", "Renderer", "Reply", "renderer_of"]

Message: TypeAlias = Mapping[str, Any]
"""A mapping with `role` ("system", "user", "assistant" or "tool") and `content`, a text or parts; see `read_parts`."""

History = Literal["exact", "as_seen"]
"""Handling of chat templates that rewrite earlier turns: "exact" fails, "as_seen" keeps what the policy saw."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """Reply of the environment to a message of the policy.

    Attributes:
      messages: next messages; an empty sequence ends the conversation.
      reward: reward of the policy's message.
      verdict, facts, parsed: as in `StepResult`.
    """

    messages: Sequence[Message] = ()
    reward: SupportsFloat = 0.0
    verdict: Verdict | None = None
    facts: Mapping[str, SupportsFloat] = field(default_factory=dict)
    parsed: str | None = None


@runtime_checkable
class Conversation(Protocol):
    """One conversation with a policy. An exception raised by any method fails the episode; it is not a reward."""

    async def begin(self) -> Sequence[Message]:
        """Returns the messages before the policy's first message."""
        ...

    async def reply(self, text: str, *, is_finished: bool, tokens: tuple[int, ...]) -> Reply:
        """Replies to a message of the policy.

        Args:
          text: text of the message, without its end token.
          is_finished: True if the policy ended the message, False if a token limit did.
          tokens: sampled tokens, including the token that ended the message.
        """
        ...

    async def close(self) -> None:
        """Frees the conversation's resources. Called exactly once, also after a failure."""
        ...


class Renderer:
    """Renders conversations with the model's chat template; without one, as plain text with one message per line.

    Args:
      tokenizer: tokenizer of the policy.
      template: chat template of the policy.
      tools: schemas of the tools.
      reader: preprocessing of the policy's images; None for a policy of text.
      max_tokens: maximum number of tokens of an episode, including its images.

    Raises:
      DataError: there are tools, but the template does not support tools.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        reader: ImageReader | None = None,
        max_tokens: int = 0,
    ) -> None:
        if tools and (template is None or not template.reads_tools):
            raise DataError(
                "The model's chat template has no place for tools. Describe them in a system message instead."
            )
        self._tokenizer, self._template, self._tools = tokenizer, template, tools
        self._reader, self._max_tokens = reader, max_tokens

    async def read(self, messages: Sequence[Message]) -> tuple[list[Message], list[ReadImage]]:
        """Reads the images of messages, in another thread; returns the messages for `text`, and the images.

        Raises:
          DataError: there are images, and the policy reads text only or has no chat template.
          ChatTemplateError: a part of a content is not readable.
        """
        if not has_parts(messages):
            return list(messages), []
        found, images = await asyncio.to_thread(read_parts, messages, self._reader, max_tokens=self._max_tokens)
        if images and self._template is None:
            raise DataError("Images need a chat template, which writes their places; the tokenizer has none.")
        return [*found], images

    def text(self, messages: Sequence[Message], images: Sequence[ReadImage] = (), *, asks: bool = True) -> str:
        """Renders messages with their images, followed by the start of the policy's message if `asks`."""
        if self._template is None:
            return "".join(f"{message['content']}\n" for message in messages if message["role"] != "assistant")
        found = self._template.render(messages, add_generation_prompt=asks, tools=self._tools)
        return found if self._reader is None else expand_images(found, self._reader, [each.size for each in images])

    def place(self, tokens: Sequence[int], images: Sequence[ReadImage]) -> tuple[PromptImage, ...]:
        """Returns the places of images among the tokens of their messages."""
        return () if self._reader is None else place_images(tokens, self._reader, images)

    def encode(self, text: str, *, begins: bool) -> tuple[int, ...]:
        """Encodes a text to tokens; `begins` marks the start of the prompt, which may need special tokens."""
        # A chat template writes the special tokens at the start itself.
        return tuple(self._tokenizer.encode(text, add_special_tokens=begins and self._template is None))

    def written(self, tokens: Sequence[int]) -> str:
        """Decodes tokens, including the names of special tokens."""
        return b"".join(map(self._tokenizer.token_bytes, tokens)).decode(errors="replace")

    def display_text(self, tokens: Sequence[int]) -> str:
        """Decodes tokens for display; adjacent image tokens are shown as one."""
        image_token = None if self._reader is None else self._reader.token
        runs = ((token, [*run]) for token, run in itertools.groupby(tokens))
        return self.written([each for token, run in runs for each in (run[:1] if token == image_token else run)])

    def decode(self, tokens: Sequence[int]) -> str:
        """Decodes tokens, without special tokens."""
        return self._tokenizer.decode(tokens)

    @property
    def is_plain(self) -> bool:
        """True without a chat template; earlier turns then never change."""
        return self._template is None


def renderer_of(policy: GenerativeCheckpoint, tools: Sequence[Mapping[str, Any]] | None = None) -> Renderer:
    """Returns a renderer with the policy's tokenizer and chat template.

    Raises:
      DataError: the policy lacks a tokenizer or an end token, or its template does not support tools.
    """
    if policy.tokenizer is None:
        raise DataError("Messages need a tokenizer: start from a run that has one, by run.init_from.")
    if not policy.end_tokens:
        raise DataError("The tokenizer has no end token, so messages could not end. Set its eos_token.")
    source = policy.chat_template
    reader = image_reader_of(policy)
    template = None if source is None else ChatTemplate(source, policy.special_tokens, images=reader is not None)
    return Renderer(policy.tokenizer, template, tools=tools, reader=reader, max_tokens=policy.max_positions)


class MessageEnvironment:
    """An `Environment` for a conversation that keeps the policy's tokens exactly as sampled.

    After each message of the policy, the whole conversation is rendered again. The rendering must start with the exact
    text that the policy saw and wrote; the rest becomes the next observation. Templates that rewrite earlier turns, for
    example by removing their thinking, violate this.

    Args:
      conversation: the other side of the conversation.
      renderer: renders and tokenizes messages.
      max_tokens: maximum number of tokens per message of the policy.
      max_turns: maximum number of messages of the policy; the last reply ends the episode.
      history: "exact" fails if the template rewrites earlier turns. "as_seen" keeps them as the policy saw them and
        counts such breaks in the fact `prefix_breaks`.
    """

    def __init__(
        self,
        conversation: Conversation,
        renderer: Renderer,
        *,
        max_tokens: int,
        max_turns: int,
        history: History = "exact",
    ) -> None:
        self._conversation, self._renderer = conversation, renderer
        self._max_tokens, self._max_turns, self._history = max_tokens, max_turns, history
        self._messages: list[Message] = []
        self._images: list[ReadImage] = []
        self._seen = ""
        self._turns = self._breaks = 0

    async def reset(self) -> Observation:
        self._messages, self._images = await self._renderer.read(list(await self._conversation.begin()))
        self._seen = self._renderer.text(self._messages, self._images)
        return self._observed(self._renderer.encode(self._seen, begins=True), self._images)

    async def step(self, action: Action) -> StepResult:
        is_finished = action.finish_reason == "stop"
        text = self._renderer.decode(action.tokens[:-1] if is_finished else action.tokens)
        reply = await self._conversation.reply(text, is_finished=is_finished, tokens=action.tokens)
        self._turns += 1
        facts = {**reply.facts, "turns": float(self._turns)}
        outcome = {"reward": reply.reward, "verdict": reply.verdict, "parsed": reply.parsed}
        if not reply.messages or self._turns >= self._max_turns:
            return StepResult(**outcome, facts={**facts, "prefix_breaks": float(self._breaks)})
        replies, images = await self._renderer.read(reply.messages)
        shown = self._renderer.encode(self._behind(action, text, replies, images), begins=False)
        return StepResult(**outcome, facts=facts, observation=self._observed(shown, images))

    async def close(self) -> None:
        await self._conversation.close()

    def _observed(self, tokens: tuple[int, ...], images: Sequence[ReadImage]) -> Observation:
        placed = self._renderer.place(tokens, images)
        return Observation(tokens=tokens, max_tokens=self._max_tokens, images=placed)

    def _behind(self, action: Action, text: str, replies: Sequence[Message], images: Sequence[ReadImage]) -> str:
        """Returns the template's text after the policy's message, up to its next one.

        Raises:
          ValueError: the template rewrote earlier turns.
        """
        if self._renderer.is_plain:
            return "\n" + self._renderer.text(replies)
        self._messages += [{"role": "assistant", "content": text}, *replies]
        self._images = [*self._images, *images]
        whole = self._renderer.text(self._messages, self._images)
        # Most templates write the end token after a message, so compare with it included first. Without it, the
        # message was cut off by a token limit, or the template ends messages with other text.
        for seen in (self._seen + self._renderer.written(action.tokens), self._seen + text):
            if whole.startswith(seen):
                self._seen = whole
                return whole[len(seen) :]
        if self._history == "exact":
            raise ValueError(_break(self._seen + self._renderer.written(action.tokens), whole))
        self._breaks += 1
        self._seen = whole
        return self._render_standalone(text, action, replies, images)

    def _render_standalone(
        self, text: str, action: Action, replies: Sequence[Message], images: Sequence[ReadImage]
    ) -> str:
        """Returns the template's text after a message, taken from a short stand-in conversation."""
        any_other = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        before = self._renderer.text(any_other, asks=False)
        after = self._renderer.text([*any_other, *replies], images)
        if not after.startswith(before):
            raise ValueError(_break(before, after))
        # Text that the template writes after the content of a message, such as its end token.
        ending = before[before.rindex("y") + 1 :]
        # The policy may have sampled that end token itself.
        written = self._renderer.written(action.tokens).removeprefix(text)
        return ending.removeprefix(written) + after[len(before) :]


def _break(seen: str, rendered: str) -> str:
    """Formats the error for a template that rewrites earlier turns, with the first difference."""
    place = next((at for at, pair in enumerate(zip(seen, rendered, strict=False)) if pair[0] != pair[1]), len(seen))
    before, after = seen[place : place + 60], rendered[place : place + 60]
    return (
        f"the chat template rewrites earlier turns: {before!r} became {after!r}. Use a template that keeps them, or "
        "keep the turns as the policy saw them by history: as_seen"
    )
