"""Prompts from messages, by a model's own Jinja template, as transformers renders it; needs `stack-core[chat]`."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import islice
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

from stack_core.errors import ChatTemplateError

__all__ = ["ChatTemplate"]

_OWN = {"messages", "add_generation_prompt", "tools", "documents", "functions"}
# What clients get in an assistant's message and send back: it adds nothing to the prompt.
_EMPTY: Mapping[str, tuple[Any, ...]] = {
    "annotations": (None, []),
    "audio": (None,),
    "function_call": (None,),
    "reasoning": (None,),
    "reasoning_content": (None,),
    "refusal": (None,),
    "tool_calls": (None, []),
}


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


# Written around what `{% generation %}` encloses: nothing in a prompt, marks where its spans are asked for.
_BEGIN, _END = "__generation_begin", "__generation_end"
_PRIVATE = range(0xF0000, 0xFFFFE)


class ChatTemplate:
    """A compiled template.

    It runs in Jinja's sandbox: it can call nothing but what is handed to it, and changes none of it. Fields and
    variables that it does not read are refused, not dropped.

    Args:
      source: Jinja, as in `tokenizer_config.json`.
      special_tokens: texts that it may name, such as `bos_token`.

    Raises:
      ChatTemplateError: it is not Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            self._tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(
                f"The chat template cannot be read: {error}. Correct it, or name another (--chat-template FILE)."
            ) from error
        self._special_tokens = dict(special_tokens)
        self._globals = frozenset(environment.globals)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Makes a prompt of messages.

        Args:
          continue_final_message: end within the last message, which the model continues.
          variables: what else the template reads, such as `enable_thinking`.
          tools: JSON schemas of functions that the model may call, if the template `reads_tools`.

        Raises:
          ChatTemplateError: the template does not take these messages or variables.
        """
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError(
                "continue_final_message goes on with the last message, add_generation_prompt begins a new one: set "
                "add_generation_prompt to false.",
                parameter="continue_final_message",
            )
        checked = self._checked(messages, variables)
        prompt = self._run(checked, variables or {}, generation_prompt=add_generation_prompt, tools=tools)
        return _cut_after_last(prompt, checked[-1]["content"]) if continue_final_message else prompt

    def render_spans(
        self, messages: Sequence[Mapping[str, Any]], *, variables: Mapping[str, Any] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Renders a whole conversation, and finds what the assistant wrote in it.

        Returns:
          The text that `render` makes without a generation prompt, and the begin and end, in characters of it, of each
          `{% generation %}` block, in order of their ends.

        Raises:
          ChatTemplateError: the template does not take these messages or variables, has no `{% generation %}` blocks,
            or changes their text after it was written (`| trim` around a block), so that no span is certain.
        """
        if not self.marks_generation:
            raise ChatTemplateError(
                "The chat template does not say what the assistant wrote: it has no {% generation %} block. Enclose "
                "the assistant's text, its end token included, in {% generation %} ... {% endgeneration %}."
            )
        checked = self._checked(messages, variables)
        values = {"strftime_now": datetime.now().strftime, **(variables or {})}  # one time for both
        plain = self._run(checked, values)
        begin, end = islice((chr(code) for code in _PRIVATE if chr(code) not in plain), 2)
        marked = self._run(checked, {**values, _BEGIN: begin, _END: end})
        return plain, _spans(marked, plain, begin, end)

    @cached_property
    def marks_generation(self) -> bool:
        """Whether it has `{% generation %}` blocks."""
        return any(node.name == _BEGIN for node in self._tree.find_all(jinja2.nodes.Name))

    @cached_property
    def _variables(self) -> frozenset[str]:
        read = frozenset(jinja2.meta.find_undeclared_variables(self._tree))
        return read - _OWN - self._globals - set(self._special_tokens)

    @cached_property
    def _members(self) -> frozenset[str]:
        """Names that it looks up in messages, or in anything else."""
        attributes = {node.attr for node in self._tree.find_all(jinja2.nodes.Getattr)}
        items = {
            node.arg.value
            for node in self._tree.find_all(jinja2.nodes.Getitem)
            if isinstance(node.arg, jinja2.nodes.Const) and isinstance(node.arg.value, str)
        }
        return frozenset(attributes | items)

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether it goes through the parts of a content, and never asks if that is a text."""
        loops = any(
            "content" in (getattr(each.iter, "attr", None), getattr(getattr(each.iter, "arg", None), "value", None))
            for each in self._tree.find_all(jinja2.nodes.For)
        )
        return loops and all(test.name != "string" for test in self._tree.find_all(jinja2.nodes.Test))

    @cached_property
    def reads_tools(self) -> bool:
        """Whether it tells the model of tools."""
        return "tools" in jinja2.meta.find_undeclared_variables(self._tree)

    def _run(
        self,
        messages: Sequence[Any],
        variables: Mapping[str, Any],
        *,
        generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        own = {"messages": messages, "add_generation_prompt": generation_prompt, "tools": tools, "documents": None}
        try:
            return self._template.render({**own, **self._special_tokens, **variables})
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            # A template may fail in any of these ways on messages in an order that its author did not expect.
            raise ChatTemplateError(
                f"The model's chat template does not take these messages: {error}", parameter="messages"
            ) from None

    def _checked(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None
    ) -> list[dict[str, Any]]:
        self._check_variables(variables or {})
        return [self._message(message, f"messages.{place}") for place, message in enumerate(messages)]

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        for name in variables:
            if name not in self._variables:
                known = ", ".join(sorted(self._variables)) or "none"
                raise ChatTemplateError(
                    f"The model's chat template reads no variable {name[:100]!r}; it reads: {known}.",
                    parameter="chat_template_kwargs",
                )

    def _message(self, message: Mapping[str, Any], where: str) -> dict[str, Any]:
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise ChatTemplateError(f"{where}.role is missing; 'user', for example.", parameter=f"{where}.role")
        text = _text(content, f"{where}.content")
        rest = {name: value for name, value in message.items() if name not in ("role", "content")}
        for name, value in rest.items():
            if name in _EMPTY:
                if value not in _EMPTY[name]:
                    raise ChatTemplateError(f"{where}.{name} is not supported here. Write it as text.", parameter=where)
            elif name not in self._members or not isinstance(value, str):
                raise ChatTemplateError(
                    f"{where}.{name[:100]} is nothing that the model's chat template reads as a text. Leave it out.",
                    parameter=where,
                )
        kept = {name: value for name, value in rest.items() if name not in _EMPTY}
        parts = [{"type": "text", "text": text}] if self._wants_parts else text
        return {"role": role, "content": parts, **kept}


def _text(content: Any, where: str) -> str:
    """A content's text; of several parts, each is on a line of its own."""
    if isinstance(content, str):
        return content
    if content is None:
        raise ChatTemplateError(f"{where} is missing; a text, or a list of text parts, was expected.", parameter=where)
    if not isinstance(content, list) or not content:
        raise ChatTemplateError(f"{where} is neither a text nor a list of text parts.", parameter=where)
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str) or len(part) != 2:
            raise ChatTemplateError(
                f'{where}.{place} is no text part {{"type": "text", "text": ...}}; the model reads nothing else.',
                parameter=f"{where}.{place}",
            )
    return "\n".join(part["text"] for part in content)


def _spans(marked: str, plain: str, begin: str, end: str) -> list[tuple[int, int]]:
    """Where marks enclose characters of a text that has none."""
    pieces: list[str] = []
    opened: list[int] = []
    spans: list[tuple[int, int]] = []
    characters = 0
    for piece in re.split(f"([{begin}{end}])", marked):
        if piece == begin:
            opened.append(characters)
        elif piece == end and opened:
            spans.append((opened.pop(), characters))
        else:
            pieces.append(piece)
            characters += len(piece)
    if opened or "".join(pieces) != plain:
        raise ChatTemplateError(
            "The chat template changes what it wrote in a {% generation %} block, by a filter, a test or a jump out of "
            "it. Apply filters inside the block, and end the block before the jump."
        )
    return spans


def _cut_after_last(prompt: str, content: Any) -> str:
    """The prompt up to the end of the last message's text, which a template may have stripped of its spaces."""
    text: str = content if isinstance(content, str) else content[0]["text"]
    core = text.strip()
    begin = prompt.rfind(core)
    if not core or begin < 0:
        raise ChatTemplateError(
            "The last message cannot be continued: the model's chat template changes its text, or it is empty.",
            parameter="continue_final_message",
        )
    led = text.lstrip()
    return prompt[: begin + len(led)] if prompt.startswith(led, begin) else prompt[: begin + len(core)]


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """What transformers gives templates (`chat_template_utils.py`)."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    own: dict[str, Any] = {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        _BEGIN: "",
        _END: "",
    }
    environment.globals.update(own)
    return environment


class _Generation(jinja2.ext.Extension):
    """The tag `generation`, which encloses what an assistant wrote: two variables around it may mark where it is."""

    tags = {"generation"}  # noqa: RUF012, Jinja's own declaration

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        begin, end = (
            jinja2.nodes.Output([jinja2.nodes.Name(name, "load", lineno=line)], lineno=line) for name in (_BEGIN, _END)
        )
        return [begin, jinja2.nodes.Scope(body, lineno=line), end]


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes that Jinja's own filter has."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
