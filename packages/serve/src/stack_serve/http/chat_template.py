"""Prompts from messages, by a model's own Jinja template, as transformers renders it."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

from stack_core.errors import GenerationError
from stack_serve.http.errors import bad_request

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


_GLOBALS: dict[str, Any] = {
    "raise_exception": _refuse,
    "strftime_now": lambda form: datetime.now().strftime(form),
}


class ChatTemplate:
    """A compiled template.

    It runs in Jinja's sandbox: it can call nothing but what is handed to it, and changes none of it. What it does not
    read is refused instead of dropped.

    Args:
      source: Jinja, as in `tokenizer_config.json`.
      special_tokens: texts that it may name, such as `bos_token`.

    Raises:
      GenerationError: it is not Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            self._tree = environment.parse(source)
            self._template = environment.from_string(source, globals=_GLOBALS)
        except jinja2.TemplateError as error:
            raise GenerationError(
                f"The chat template cannot be read: {error}. Correct it, or serve with --chat-template FILE."
            ) from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt.

        Args:
          continue_final_message: end within the last message, which the model goes on with.
          variables: what the template reads besides, such as `enable_thinking`.

        Raises:
          ApiError: a message, or a combination of them, that the template does not take.
        """
        if continue_final_message and add_generation_prompt:
            raise bad_request(
                "continue_final_message goes on with the last message, add_generation_prompt begins a new one: set "
                "add_generation_prompt to false.",
                param="continue_final_message",
            )
        variables = variables or {}
        self._check_variables(variables)
        checked = [self._message(message, f"messages.{place}") for place, message in enumerate(messages)]
        values = {**self._special_tokens, **variables}
        try:
            prompt = self._template.render(
                messages=checked, add_generation_prompt=add_generation_prompt, tools=None, documents=None, **values
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            # A template may fail in any of these ways on messages in an order that its author did not expect.
            raise bad_request(
                f"The model's chat template does not take these messages: {error}", param="messages"
            ) from None
        return _cut_after_last(prompt, checked[-1]["content"]) if continue_final_message else prompt

    @cached_property
    def _variables(self) -> frozenset[str]:
        return frozenset(jinja2.meta.find_undeclared_variables(self._tree)) - _OWN - set(self._special_tokens)

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

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        for name in variables:
            if name not in self._variables:
                known = ", ".join(sorted(self._variables)) or "none"
                raise bad_request(
                    f"The model's chat template reads no variable {name[:100]!r}; it reads: {known}.",
                    param="chat_template_kwargs",
                )

    def _message(self, message: Mapping[str, Any], where: str) -> dict[str, Any]:
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise bad_request(f"{where}.role is missing; 'user', for example.", param=f"{where}.role")
        text = _text(content, f"{where}.content")
        rest = {name: value for name, value in message.items() if name not in ("role", "content")}
        for name, value in rest.items():
            if name in _EMPTY:
                if value not in _EMPTY[name]:
                    raise bad_request(f"{where}.{name} is not supported here. Write it as text.", param=where)
            elif name not in self._members or not isinstance(value, str):
                raise bad_request(
                    f"{where}.{name[:100]} is nothing that the model's chat template reads as a text. Leave it out.",
                    param=where,
                )
        kept = {name: value for name, value in rest.items() if name not in _EMPTY}
        parts = [{"type": "text", "text": text}] if self._wants_parts else text
        return {"role": role, "content": parts, **kept}


def _text(content: Any, where: str) -> str:
    """A content's text; of several parts, each is on a line of its own."""
    if isinstance(content, str):
        return content
    if content is None:
        raise bad_request(f"{where} is missing; a text, or a list of text parts, was expected.", param=where)
    if not isinstance(content, list) or not content:
        raise bad_request(f"{where} is neither a text nor a list of text parts.", param=where)
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str) or len(part) != 2:
            raise bad_request(
                f'{where}.{place} is no text part {{"type": "text", "text": ...}}; the model reads nothing else.',
                param=f"{where}.{place}",
            )
    return "\n".join(part["text"] for part in content)


def _cut_after_last(prompt: str, content: Any) -> str:
    """The prompt up to the end of the last message's text, which a template may have stripped of its spaces."""
    text: str = content if isinstance(content, str) else content[0]["text"]
    core = text.strip()
    begin = prompt.rfind(core)
    if not core or begin < 0:
        raise bad_request(
            "The last message cannot be continued: the model's chat template changes its text, or it is empty.",
            param="continue_final_message",
        )
    led = text.lstrip()
    return prompt[: begin + len(led)] if prompt.startswith(led, begin) else prompt[: begin + len(core)]


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """What transformers gives templates (`chat_template_utils.py`)."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    return environment


class _Generation(jinja2.ext.Extension):
    """The tag `generation` marks what an assistant wrote, for training; a prompt has it as it is."""

    tags = {"generation"}  # noqa: RUF012, Jinja's own declaration

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes that Jinja's own filter has."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
