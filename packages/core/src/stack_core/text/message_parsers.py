"""Parsing of generated messages into content, reasoning and tool calls: the contract of a format, and its use.

Formats are registered as `tool_parsers` and `reasoning_parsers` and shared by servers and environments.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from stack_core.abi.errors import ConfigError, PluginError
from stack_core.abi.registry import Registry

__all__ = ["MessageDelta", "MessageParser", "ParserChain", "ToolCall", "choose_parser", "merge_deltas", "parse_calls"]


@dataclass(frozen=True)
class MessageDelta:
    """New part of a message.

    Attributes:
      kind: part of the message that grows.
      text: text to append: to the content, to the reasoning, or to the JSON text of a call's arguments.
      call: number of the tool call in the message, from 0.
      name: name of the function, in the first delta of each call.
    """

    kind: Literal["content", "reasoning", "call"]
    text: str
    call: int = 0
    name: str | None = None


class MessageParser(ABC):
    """Incremental parser of one message; the registered object is the class.

    For each part of the message, the concatenated deltas do not depend on how the text is split over calls of `feed`.
    No text is lost: a call that is malformed before its arguments begin is content as a whole. If the arguments become
    malformed later, the call keeps those before the error, and the text from the error on is content. Only markers, and
    whitespace next to them, are omitted.

    Attributes:
      markers: texts that the parser searches for. They must be part of the text, even if they are special tokens.
    """

    markers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *, tools: Sequence[Mapping[str, Any]] = (), prompt: str = "") -> None:
        """Starts a message.

        Args:
          tools: JSON schemas of the functions that may be called, as in `ChatTemplate.render`.
          prompt: rendered prompt that the message follows. It may already contain a marker that begins the message.
        """
        self._tools, self._prompt = tools, prompt

    def reasoning_markers(self) -> tuple[str | None, str] | None:
        """Returns the markers (begin, end) of the message's reasoning, after which a constraint on the answer begins.

        `begin` is None if the prompt already contains it. Returns None if the format does not put reasoning between
        markers before the answer.
        """
        return None

    @classmethod
    @abstractmethod
    def matches_template(cls, template: str) -> bool:
        """Returns whether the source of a chat template shows that its model writes this format."""

    @abstractmethod
    def feed(self, text: str) -> list[MessageDelta]:
        """Adds generated text and returns the deltas that became certain."""

    @abstractmethod
    def finish(self) -> list[MessageDelta]:
        """Returns the remaining deltas at the end of the text, such as a marker that remained incomplete."""


class ParserChain:
    """The parsers of one message: tool calls are searched for outside of the reasoning.

    Args:
      reasoning, tools: parsers of the message; without one, its markers are ordinary text.
    """

    def __init__(self, reasoning: MessageParser | None, tools: MessageParser | None) -> None:
        self._reasoning, self._tools = reasoning, tools

    def feed(self, text: str) -> list[MessageDelta]:
        """Adds generated text and returns the deltas that became certain, merged where they are adjacent."""
        first = [MessageDelta("content", text)] if self._reasoning is None else self._reasoning.feed(text)
        return merge_deltas(self._behind(first))

    def finish(self) -> list[MessageDelta]:
        """Returns the remaining deltas at the end of the text."""
        first = [] if self._reasoning is None else self._reasoning.finish()
        return merge_deltas([*self._behind(first), *(self._tools.finish() if self._tools is not None else ())])

    def _behind(self, deltas: Sequence[MessageDelta]) -> Iterable[MessageDelta]:
        for delta in deltas:
            if delta.kind == "content" and self._tools is not None:
                yield from self._tools.feed(delta.text)
            else:
                yield delta


def merge_deltas(deltas: Iterable[MessageDelta]) -> list[MessageDelta]:
    """Joins adjacent deltas of the same part of a message, and omits empty ones."""
    merged = list[MessageDelta]()
    for delta in deltas:
        if merged and delta.name is None and (merged[-1].kind, merged[-1].call) == (delta.kind, delta.call):
            merged[-1] = replace(merged[-1], text=merged[-1].text + delta.text)
        elif delta.text or delta.name is not None:
            merged.append(delta)
    return merged


@dataclass(frozen=True)
class ToolCall:
    """A call in a complete message; `arguments` is JSON text as the model wrote it, cut off if it is malformed."""

    name: str
    arguments: str


def parse_calls(parser: MessageParser, text: str) -> tuple[str, list[ToolCall]]:
    """Parses a complete message into its content and its tool calls."""
    calls, content = list[ToolCall](), ""
    for delta in merge_deltas([*parser.feed(text), *parser.finish()]):
        if delta.kind != "call":
            content += delta.text
        elif delta.name is not None:
            calls.append(ToolCall(delta.name, delta.text))
        else:
            calls[delta.call] = replace(calls[delta.call], arguments=calls[delta.call].arguments + delta.text)
    return content, calls


def choose_parser(registry: Registry[Any], template: str | None, name: str | None = None) -> type[MessageParser] | None:
    """Returns the parser of a model's messages.

    Args:
      registry: `registries.tool_parsers` or `registries.reasoning_parsers`.
      template: source of the model's chat template, whose markers decide without a `name`.
      name: registered name, or "none" for no parser.

    Returns:
      The class of the parser; None if `name` is "none", or without a name if no parser matches the template.

    Raises:
      UnknownName: no parser has this name.
      PluginError: a registered object is no parser.
      ConfigError: several parsers match the template.
    """
    if name == "none":
        return None
    if name is not None:
        if name not in registry:
            raise registry.unknown(name, other_names=("none",))
        return _checked(registry, name)
    parsers = {_checked(registry, each): each for each in reversed(registry.names())}
    found = {parser: each for parser, each in parsers.items() if parser.matches_template(template or "")}
    if len(found) > 1:
        names, option = ", ".join(sorted(found.values())), registry.kind.removesuffix("s").replace("_", "-")
        raise ConfigError(f"The chat template matches several {registry.kind}: {names}. Choose one with --{option}.")
    return next(iter(found), None)


def _checked(registry: Registry[Any], name: str) -> type[MessageParser]:
    parser = registry[name]
    if isinstance(parser, type) and issubclass(parser, MessageParser):
        return parser
    raise PluginError(f"{registry.kind} {name!r} is {parser!r}; expected a class derived from MessageParser.")
