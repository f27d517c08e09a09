"""Environments that speak in messages, over the protocol that speaks in tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, SupportsFloat, TypeAlias, runtime_checkable

from stack_core.abi.data import Tokenizer
from stack_core.abi.errors import DataError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.text.chat_template import ChatTemplate
from stack_rl.contracts import Action, Observation, Outcome, Verdict

__all__ = ["Conversation", "History", "Message", "MessageEnvironment", "Renderer", "Reply", "renderer_of"]

Message: TypeAlias = Mapping[str, Any]
"""A role, "system", "user", "assistant" or "tool", and its content, a text."""

History = Literal["exact", "as_seen"]
"""What a template that tells earlier turns otherwise means: a failure, or that they stay as the policy saw them."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the world says to a message of the policy's.

    Attributes:
      messages: none ends the conversation.
      reward: of the policy's message.
      verdict, facts: as in an `Outcome`.
    """

    messages: Sequence[Message] = ()
    reward: SupportsFloat = 0.0
    verdict: Verdict | None = None
    facts: Mapping[str, SupportsFloat] = field(default_factory=dict)


@runtime_checkable
class Conversation(Protocol):
    """One conversation of a policy with a world; what it raises is a failure of the environment, and no reward."""

    async def begin(self) -> Sequence[Message]:
        """The messages before the policy's first."""
        ...

    async def reply(self, text: str, *, is_finished: bool, tokens: tuple[int, ...]) -> Reply:
        """Answers what the policy wrote.

        Args:
          text: without the token that ended it.
          is_finished: the policy ended it; False where a limit of tokens did.
        """
        ...

    async def close(self) -> None:
        """Frees what the conversation holds; called once, however it ended."""
        ...


class Renderer:
    """Writes conversations by a model's chat template, or plainly, a message a line, where it has none.

    Raises:
      DataError: there are tools, but the template does not tell the model of any.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        if tools and (template is None or not template.reads_tools):
            raise DataError("The model's chat template has no place for tools. Tell of them in a system message.")
        self._tokenizer, self._template, self._tools = tokenizer, template, tools

    def text(self, messages: Sequence[Message], *, asks: bool = True) -> str:
        """The text of messages, and the begin of the next one if it `asks` the policy for it."""
        if self._template is None:
            return "".join(f"{message['content']}\n" for message in messages if message["role"] != "assistant")
        return self._template.render(messages, add_generation_prompt=asks, tools=self._tools)

    def encode(self, text: str, *, begins: bool) -> tuple[int, ...]:
        """Tokens of a text, which is the prompt's if it `begins`."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=begins and self._template is None))

    def written(self, tokens: Sequence[int]) -> str:
        """The text of tokens, names of special ones included."""
        return b"".join(map(self._tokenizer.token_bytes, tokens)).decode(errors="replace")

    def said(self, tokens: Sequence[int]) -> str:
        """The text of tokens without special ones."""
        return self._tokenizer.decode(tokens)

    @property
    def is_plain(self) -> bool:
        """There is no template, and what was said stays where it is."""
        return self._template is None


def renderer_of(policy: GenerativeCheckpoint, tools: Sequence[Mapping[str, Any]] | None = None) -> Renderer:
    """The renderer of a policy's own tokenizer and template.

    Raises:
      DataError: it has no tokenizer or no end token, or its template has no place for tools.
    """
    if policy.tokenizer is None:
        raise DataError("Messages need a tokenizer: start from a run that has one, by run.init_from.")
    if not policy.end_tokens:
        raise DataError("The tokenizer names no end token, so that no message could end. Name its eos_token.")
    source = policy.chat_template
    template = None if source is None else ChatTemplate(source, policy.special_tokens)
    return Renderer(policy.tokenizer, template, tools=tools)


class MessageEnvironment:
    """An `Environment` of a conversation: what the policy drew stays as it was drawn, token for token.

    What follows a message of the policy's is what the template writes behind it: the whole conversation is rendered
    again, and has to begin with the very text that the policy saw and wrote. A template that leaves thoughts of earlier
    turns out, for example, breaks that.

    Args:
      max_tokens: of each message of the policy's.
      most_turns: messages of the policy's, at most; the last reply then ends the episode.
      history: a break is a failure ("exact"); or earlier turns stay as the policy saw them, which the fact
        `prefix_breaks` counts ("as_seen").
    """

    def __init__(
        self,
        conversation: Conversation,
        renderer: Renderer,
        *,
        max_tokens: int,
        most_turns: int,
        history: History = "exact",
    ) -> None:
        self._conversation, self._renderer = conversation, renderer
        self._max_tokens, self._most_turns, self._history = max_tokens, most_turns, history
        self._messages: list[Message] = []
        self._seen = ""
        self._turns = self._breaks = 0

    async def reset(self) -> Observation:
        self._messages = list(await self._conversation.begin())
        self._seen = self._renderer.text(self._messages)
        return self._observed(self._renderer.encode(self._seen, begins=True))

    async def step(self, action: Action) -> Outcome:
        is_finished = action.finish_reason == "stop"
        text = self._renderer.said(action.tokens[:-1] if is_finished else action.tokens)
        reply = await self._conversation.reply(text, is_finished=is_finished, tokens=action.tokens)
        self._turns += 1
        facts = {**reply.facts, "turns": float(self._turns)}
        outcome = {"reward": reply.reward, "verdict": reply.verdict}
        if not reply.messages or self._turns >= self._most_turns:
            return Outcome(**outcome, facts={**facts, "prefix_breaks": float(self._breaks)})
        shown = self._renderer.encode(self._behind(action, text, reply.messages), begins=False)
        return Outcome(**outcome, facts=facts, observation=self._observed(shown))

    async def close(self) -> None:
        await self._conversation.close()

    def _observed(self, tokens: tuple[int, ...]) -> Observation:
        return Observation(tokens=tokens, max_tokens=self._max_tokens)

    def _behind(self, action: Action, text: str, replies: Sequence[Message]) -> str:
        """What the template writes behind what the policy wrote.

        Raises:
          ValueError: it tells what was before otherwise than the policy saw it.
        """
        if self._renderer.is_plain:
            return "\n" + self._renderer.text(replies)
        self._messages += [{"role": "assistant", "content": text}, *replies]
        whole = self._renderer.text(self._messages)
        # The end token's text may be what the template writes behind a message, or the message was cut off before it.
        for seen in (self._seen + self._renderer.written(action.tokens), self._seen + text):
            if whole.startswith(seen):
                self._seen = whole
                return whole[len(seen) :]
        if self._history == "exact":
            raise ValueError(_break(self._seen + self._renderer.written(action.tokens), whole))
        self._breaks += 1
        self._seen = whole
        return self._alone(text, action, replies)

    def _alone(self, text: str, action: Action, replies: Sequence[Message]) -> str:
        """What the template writes behind a message, as behind any other."""
        any_other = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        before, after = self._renderer.text(any_other, asks=False), self._renderer.text([*any_other, *replies])
        if not after.startswith(before):
            raise ValueError(_break(before, after))
        ending = before[before.rindex("y") + 1 :]
        written = self._renderer.written(action.tokens).removeprefix(text)
        return ending.removeprefix(written) + after[len(before) :]


def _break(seen: str, whole: str) -> str:
    """The message about a template that changes earlier turns: where, and how."""
    place = next((at for at, pair in enumerate(zip(seen, whole, strict=False)) if pair[0] != pair[1]), len(seen))
    before, after = seen[place : place + 60], whole[place : place + 60]
    return (
        f"the chat template tells earlier turns otherwise than the policy saw them: {before!r} became {after!r}. Use a "
        "template that keeps them, or let them stay as they were seen, by history: as_seen"
    )
