"""Answers to messages as their content, reasoning and tool calls."""

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from stack_core.abi.data import Tokenizer
from stack_core.abi.generation import GenerationUpdate, SamplingParams
from stack_core.abi.plugins import registries
from stack_core.text.message_parsers import MessageDelta, MessageParser, ParserChain, choose_parser
from stack_serve.openai.errors import bad_request
from stack_serve.openai.prompts import Prompt
from stack_serve.openai.schemas import ChatBody

__all__ = ["MessageFormat", "ParsedMessage"]

_ID_CHARACTERS = string.ascii_letters + string.digits


class SpecialTokens:
    """Names of special tokens, each looked up once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._names: dict[int, str] = {}

    def name(self, token: int) -> str:
        """Returns the name of a special token, and "" for other tokens."""
        if token not in self._names:
            is_special = not self._tokenizer.decode([token, token])
            self._names[token] = self._tokenizer.token_bytes(token).decode("utf-8", "replace") if is_special else ""
        return self._names[token]

    def has(self, text: str) -> bool:
        """Returns whether a text is the name of one special token."""
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        return len(tokens) == 1 and self.name(int(tokens[0])) == text


@dataclass
class ParsedMessage:
    """State of an answer during parsing.

    Attributes:
      hidden: returns the name of a special token to remove from the text, "" for other tokens.
      parallel: False reports only the first call.
      has_reasoning: False omits the reasoning.
      calls: id, name and parts of the arguments of each call.
    """

    parser: ParserChain
    hidden: Callable[[int], str]
    parallel: bool
    has_reasoning: bool
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[str, str, list[str]]] = field(default_factory=list)

    def push(self, update: GenerationUpdate) -> list[MessageDelta]:
        """Adds an update of the engine and returns the new deltas."""
        text = update.text
        for token in update.tokens:
            if name := self.hidden(token):
                text = text.replace(name, "", 1)
        deltas = self.parser.feed(text)
        if update.finish_reason is not None:
            deltas += self.parser.finish()
        deltas = [delta for delta in deltas if self._is_reported(delta)]
        for delta in deltas:
            if delta.name is not None:  # Mistral's templates take ids of nine letters and digits only
                self.calls.append(("".join(map(secrets.choice, 9 * (_ID_CHARACTERS,))), delta.name, []))
            part = self.content if delta.kind == "content" else self.reasoning
            (self.calls[delta.call][2] if delta.kind == "call" else part).append(delta.text)
        return deltas

    def _is_reported(self, delta: MessageDelta) -> bool:
        return (delta.kind != "call" or self.parallel or not delta.call) and (
            delta.kind != "reasoning" or self.has_reasoning
        )

    def delta_members(self, deltas: list[MessageDelta]) -> dict[str, Any]:
        """Returns the members of a chunk's delta."""
        members: dict[str, Any] = {}
        content = "".join(delta.text for delta in deltas if delta.kind == "content")
        reasoning = "".join(delta.text for delta in deltas if delta.kind == "reasoning")
        if content:
            members["content"] = content
        if reasoning:
            members |= {"reasoning_content": reasoning, "reasoning": reasoning}
        calls = [self._call_delta(delta) for delta in deltas if delta.kind == "call"]
        return {**members, "tool_calls": calls} if calls else members

    def _call_delta(self, delta: MessageDelta) -> dict[str, Any]:
        function: dict[str, Any] = {"arguments": delta.text}
        if delta.name is None:
            return {"index": delta.call, "function": function}
        call_id = self.calls[delta.call][0]
        return {"index": delta.call, "id": call_id, "type": "function", "function": {"name": delta.name, **function}}

    def message_members(self) -> dict[str, Any]:
        """Returns the members of a complete message."""
        calls = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": "".join(arguments)}}
            for call_id, name, arguments in self.calls
        ]
        reasoning = "".join(self.reasoning) or None
        content = "".join(self.content)
        members = {"content": content or None if calls else content, "reasoning": reasoning}
        return {**members, "reasoning_content": reasoning, **({"tool_calls": calls} if calls else {})}


class MessageFormat:
    """The format of a model's messages.

    Args:
      template: source of the chat template, or None.
      tokenizer: the model's tokenizer, or None.
      tool_parser, reasoning_parser: registered names, "none", or None to let the template decide.

    Raises:
      UnknownName: no parser has this name.
      ConfigError: several parsers match the template.
    """

    def __init__(
        self,
        template: str | None,
        tokenizer: Tokenizer | None,
        *,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        self._tools = choose_parser(registries.tool_parsers, template, tool_parser)
        self._reasoning = choose_parser(registries.reasoning_parsers, template, reasoning_parser)
        self._special = None if tokenizer is None else SpecialTokens(tokenizer)

    @property
    def has_reasoning(self) -> bool:
        """True if a reasoning parser is in use."""
        return self._reasoning is not None

    def has_special_markers(self) -> bool:
        """Returns whether the model marks reasoning or calls by special tokens."""
        found = [parser for parser in (self._reasoning, self._tools) if parser is not None]
        special = self._special
        return special is not None and any(special.has(marker) for parser in found for marker in parser.markers)

    def check_tools(self) -> None:
        """Rejects tools if the model's calls cannot be parsed.

        Raises:
          ApiError: the model lacks a tool parser.
        """
        if self._tools is None:
            known = ", ".join(registries.tool_parsers.names())
            raise bad_request(
                "tools: the format of the model's calls is not known from its chat template, or its parser is turned "
                f"off. Start the server with --tool-parser NAME, which is one of: {known}.",
                param="tools",
            )

    def reasoning_markers(self, body: ChatBody, prompt: Prompt) -> tuple[str | None, str] | None:
        """Returns the markers of reasoning that precedes a constrained answer; see `MessageParser`."""
        if self._reasoning is None or body.reasoning_effort == "none" or body.continue_final_message:
            return None
        return self._reasoning(prompt=prompt.text or "").reasoning_markers()

    def parsing(
        self,
        body: ChatBody,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        make_calls: Callable[[], MessageParser] | None,
        has_reasoning: bool = True,
    ) -> tuple[Callable[[], ParsedMessage] | None, SamplingParams]:
        """Returns a function that starts to parse an answer, or None, and the sampling parameters of its text.

        Markers that are special tokens must be in the text. Other special tokens are then removed here, unless the body
        requests special tokens.

        Args:
          make_calls: makes the parser of calls, as returned by `calls` or for forced calls; None parses no calls.
          has_reasoning: True if the answer may contain reasoning.
        """
        thinks = self._reasoning if has_reasoning else None
        if self._special is None or (thinks is None and make_calls is None):
            return None, sampling
        markers = set(() if thinks is None else thinks.markers)
        markers |= set(() if make_calls is None else make_calls().markers)
        hidden: Callable[[int], str] = _nothing
        if sampling.skip_special_tokens and any(map(self._special.has, markers)):
            sampling = replace(sampling, skip_special_tokens=False)
            hidden = partial(_hidden, self._special, markers)

        def start() -> ParsedMessage:
            reasoning = None if thinks is None else thinks(prompt=prompt.text or "")
            if reasoning is not None and body.continue_final_message:  # the message may end within its reasoning
                reasoning = type(reasoning)()
                content = body.messages[-1].get("content")
                reasoning.feed(content.rstrip() if isinstance(content, str) else "")
            chain = ParserChain(reasoning, None if make_calls is None else make_calls())
            return ParsedMessage(chain, hidden, body.parallel_tool_calls, body.include_reasoning)

        return start, sampling

    def calls(self, tools: Sequence[Mapping[str, Any]] | None) -> Callable[[], MessageParser] | None:
        """Returns a function that makes the parser of the model's own calls, or None."""
        return None if tools is None or self._tools is None else partial(self._tools, tools=tools)


def _nothing(token: int) -> str:
    return ""


def _hidden(special: SpecialTokens, markers: set[str], token: int) -> str:
    name = special.name(token)
    return "" if name in markers else name
