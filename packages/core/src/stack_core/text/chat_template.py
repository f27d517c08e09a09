"""Prompts rendered from messages by a model's Jinja template, as in transformers; needs `stack-core[chat]`."""

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

from stack_core.abi.errors import ChatTemplateError, nearest
from stack_core.text.histories import one_call_each, other_forms

__all__ = ["TEMPLATE_FIELDS", "ChatTemplate"]

TEMPLATE_FIELDS = ("tools", "chat_template_kwargs")
"""Fields of a dataset record that become variables of the chat template."""

_OWN = {"messages", "add_generation_prompt", "tools", "documents", "functions"}
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
# Fields that clients receive in an assistant's message and send back; they do not change the prompt.
_REASONING = ("reasoning_content", "reasoning", "thinking")  # names of an assistant's reasoning, in order of preference
_EMPTY: Mapping[str, tuple[Any, ...]] = {
    "annotations": (None, []),
    "audio": (None,),
    "function_call": (None,),
    "refusal": (None,),
    "tool_calls": (None, []),
}


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


# Written around `{% generation %}` blocks: "" when rendering a prompt, marker characters when locating spans.
_BEGIN, _END = "__generation_begin", "__generation_end"
_PRIVATE = range(0xF0000, 0xFFFFE)


class ChatTemplate:
    """A compiled chat template.

    It runs in Jinja's sandbox: it can call only functions passed to it, and cannot modify its inputs. Fields and
    variables that the template does not read are rejected instead of dropped.

    Args:
      source: Jinja source, as in `tokenizer_config.json`.
      special_tokens: texts available to the template, such as `bos_token`.
      images: whether contents may have image parts, as returned by `stack_core.text.images.take_images`.

    Raises:
      ChatTemplateError: the source is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, images: bool = False) -> None:
        self._reads_images = images
        environment = _environment()
        try:
            self._tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(
                f"The chat template cannot be read: {error}. Correct it, or use another (--chat-template FILE)."
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
        """Renders messages to a prompt.

        Args:
          add_generation_prompt: whether to end with the header of a new assistant message.
          continue_final_message: whether to end within the last message, which the model continues.
          variables: additional variables of the template, such as `enable_thinking`.
          tools: JSON schemas of functions that the model may call, if the template `reads_tools`.

        Raises:
          ChatTemplateError: the template rejects these messages or variables.
        """
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError(
                "continue_final_message continues the last message, but add_generation_prompt begins a new one: set "
                "add_generation_prompt to false.",
                parameter="continue_final_message",
            )
        checked = self._checked(messages, variables)
        prompt = self._run(checked, variables or {}, generation_prompt=add_generation_prompt, tools=tools)
        return _cut_after_last(prompt, checked[-1]["content"]) if continue_final_message else prompt

    def render_spans(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Renders a complete conversation and locates the assistant's text.

        Args:
          variables, tools: as in `render`.

        Returns:
          The text that `render` returns without a generation prompt, and the spans (begin, end) of the `{% generation
            %}` blocks in characters of the text, ordered by end.

        Raises:
          ChatTemplateError: the template rejects these messages or variables, has no `{% generation %}` blocks, or
            modifies their text afterwards (`| trim` around a block), which makes the spans uncertain.
        """
        if not self.marks_generation:
            raise ChatTemplateError(
                "The chat template does not mark the assistant's text: it has no {% generation %} block. Enclose the "
                "assistant's text, including its end token, in {% generation %} ... {% endgeneration %}."
            )
        checked = self._checked(messages, variables)
        values = {"strftime_now": datetime.now().strftime, **(variables or {})}  # the same time in both renderings
        plain = self._run(checked, values, tools=tools)
        # Private-use characters that the conversation itself lacks.
        begin, end = islice((chr(code) for code in _PRIVATE if chr(code) not in plain), 2)
        marked = self._run(checked, {**values, _BEGIN: begin, _END: end}, tools=tools)
        return plain, _spans(marked, plain, begin, end)

    def options_of(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments `tools` and `variables` of `render` for a dataset record.

        Raises:
          ChatTemplateError: `tools` or `chat_template_kwargs` are malformed, or the template ignores them.
        """
        tools, variables = (record.get(field) or None for field in TEMPLATE_FIELDS)
        if tools is not None:
            if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
                raise ChatTemplateError("tools is not a list of JSON schemas of functions.", parameter="tools")
            if not self.reads_tools:
                raise ChatTemplateError(
                    "The model's chat template does not read tools. Use a template that does, or describe the tools "
                    "in a system message.",
                    parameter="tools",
                )
        if variables is not None:
            if not isinstance(variables, Mapping):
                raise ChatTemplateError(
                    f"chat_template_kwargs is a {type(variables).__name__}; expected an object.",
                    parameter="chat_template_kwargs",
                )
            self._check_variables(variables)
        return {"tools": tools, "variables": variables}

    def effort_variables(self, effort: str) -> dict[str, Any]:
        """Returns the variables of the template that set the effort of reasoning.

        Args:
          effort: "none", "low", "medium" or another word of the template's. Templates that only turn reasoning on or
            off turn it off for "none" and on for others.

        Raises:
          ChatTemplateError: the template has no such variable.
        """
        if "reasoning_effort" in self._variables:
            return {"reasoning_effort": effort}
        for name in ("enable_thinking", "thinking"):
            if name in self._variables:
                return {name: effort != "none"}
        raise ChatTemplateError(
            "The model's chat template has no variable for the effort of reasoning. Leave reasoning_effort out.",
            parameter="reasoning_effort",
        )

    @cached_property
    def marks_generation(self) -> bool:
        """Whether the template has `{% generation %}` blocks."""
        return any(node.name == _BEGIN for node in self._tree.find_all(jinja2.nodes.Name))

    @cached_property
    def _variables(self) -> frozenset[str]:
        read = frozenset(jinja2.meta.find_undeclared_variables(self._tree))
        return read - _OWN - self._globals - set(self._special_tokens)

    @cached_property
    def _members(self) -> frozenset[str]:
        """Names that the template looks up in messages or other objects."""
        attributes = {node.attr for node in self._tree.find_all(jinja2.nodes.Getattr)}
        items = {
            node.arg.value
            for node in self._tree.find_all(jinja2.nodes.Getitem)
            if isinstance(node.arg, jinja2.nodes.Const) and isinstance(node.arg.value, str)
        }
        gets = {
            node.args[0].value
            for node in self._tree.find_all(jinja2.nodes.Call)
            if getattr(node.node, "attr", None) == "get" and node.args and isinstance(node.args[0], jinja2.nodes.Const)
        }
        return frozenset(attributes | items | gets)

    @cached_property
    def _tests_for_none(self) -> bool:
        """Whether the template distinguishes a content that is none, which means a message of calls only."""
        tests = self._tree.find_all(jinja2.nodes.Test)
        return any(test.name == "none" and _member_of(test.node) == "content" for test in tests)

    @cached_property
    def _reads_one_call(self) -> bool:
        """Whether the template reads only the first of a message's tool calls."""
        items = self._tree.find_all(jinja2.nodes.Getitem)
        first = any(_member_of(item.node) == "tool_calls" and _member_of(item) == 0 for item in items)
        iterated = (
            _member_of(node) for loop in self._tree.find_all(jinja2.nodes.For) for node in _with_inner(loop.iter)
        )
        return first and "tool_calls" not in iterated

    @cached_property
    def _roles(self) -> frozenset[str]:
        """The usual roles, and all string constants of the template, which include any other roles."""
        texts = {node.value for node in self._tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}
        return _ROLES | texts

    @cached_property
    def _needs_parts(self) -> bool:
        """True if the template iterates over the parts of a content and never tests for a string."""
        loops = any(
            "content" in (getattr(each.iter, "attr", None), getattr(getattr(each.iter, "arg", None), "value", None))
            for each in self._tree.find_all(jinja2.nodes.For)
        )
        return loops and all(test.name != "string" for test in self._tree.find_all(jinja2.nodes.Test))

    @cached_property
    def reads_tools(self) -> bool:
        """Whether the template describes tools to the model."""
        return "tools" in jinja2.meta.find_undeclared_variables(self._tree)

    def _run(
        self,
        messages: Sequence[Any],
        variables: Mapping[str, Any],
        *,
        generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        own = {"add_generation_prompt": generation_prompt, "tools": tools, "documents": None}
        errors: list[Exception] = []
        for form in (messages, *other_forms(messages)):
            try:
                return self._template.render({"messages": form, **own, **self._special_tokens, **variables})
            except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
                errors.append(error)  # Templates raise any of these for messages that their authors did not expect.
        raise ChatTemplateError(
            f"The model's chat template does not take these messages: {errors[0]}", parameter="messages"
        )

    def _checked(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None
    ) -> list[dict[str, Any]]:
        self._check_variables(variables or {})
        if self._reads_one_call:
            messages = one_call_each(messages)
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
            raise ChatTemplateError(f"{where}.role is missing; set it, e.g. to 'user'.", parameter=f"{where}.role")
        # Many templates drop messages of unknown roles without an error.
        if role not in self._roles:
            raise ChatTemplateError(
                f"{where}.role is {role[:100]!r}, which the model's chat template does not support."
                f"{nearest(role, _ROLES)} Usual roles: {', '.join(sorted(_ROLES))}.",
                parameter=f"{where}.role",
            )
        rest = {name: value for name, value in message.items() if name not in ("role", "content")}
        kept = {name: self._field(name, value, role, where) for name, value in rest.items()}
        kept = {name: value for name, value in kept.items() if value is not None}
        if role == "assistant" and (reasoning := next((rest[name] for name in _REASONING if rest.get(name)), None)):
            kept |= self._reasoning(reasoning, f"{where}.reasoning_content")
        if content is None and "tool_calls" in kept:  # only calls, without text
            return {"role": role, "content": None if self._tests_for_none else "", **kept}
        if self._reads_images and isinstance(content, list) and {"type": "image"} in content:
            for place, part in enumerate(content):
                if part != {"type": "image"}:
                    _text([part], f"{where}.content.{place}")
            return {"role": role, "content": content, **kept}
        text = _text(content, f"{where}.content")
        parts = [{"type": "text", "text": text}] if self._needs_parts else text
        return {"role": role, "content": parts, **kept}

    def _reasoning(self, reasoning: Any, where: str) -> dict[str, str]:
        """Returns the field of earlier reasoning that the template reads, if any; most drop it from the history."""
        if not isinstance(reasoning, str):
            raise ChatTemplateError(f"{where} is not a text.", parameter=where)
        return next(({name: reasoning} for name in _REASONING if name in self._members), {})

    def _field(self, name: str, value: Any, role: str, where: str) -> Any:
        """Returns the value of a field for the template, or None for a field that does not change the prompt."""
        if name in _EMPTY and value in _EMPTY[name]:
            return None
        if name in _REASONING and role == "assistant":
            return None  # see `_reasoning`
        if name == "tool_calls" and name in self._members:
            return _tool_calls(value, f"{where}.{name}")
        if name in self._members and isinstance(value, str):
            return value
        if name in ("tool_call_id", "name") and role == "tool" and isinstance(value, str):
            return None  # identifies the answered call; templates without it rely on the order
        if name in _EMPTY and name not in self._members:
            raise ChatTemplateError(f"{where}.{name} is not supported here. Write it as text.", parameter=where)
        raise ChatTemplateError(
            f"{where}.{name[:100]} is not a text field that the model's chat template reads. Leave it out.",
            parameter=where,
        )


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Checks tool calls; arguments given as JSON text are parsed to an object, as templates expect."""
    if not isinstance(calls, list):
        raise ChatTemplateError(f"{where} is not a list of calls.", parameter=where)
    return [_tool_call(call, f"{where}.{place}") for place, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ChatTemplateError(
            f'{where} is not a call; expected {{"type": "function", "function": {{"name": ..., "arguments": ...}}}}.',
            parameter=where,
        )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        raise ChatTemplateError(f"{where}: the arguments are not a JSON object.", parameter=where)
    whole = {**function, "arguments": arguments}
    return {**call, "function": whole} if "function" in call else whole


def _text(content: Any, where: str) -> str:
    """Returns the text of a content; several parts are joined by newlines."""
    if isinstance(content, str):
        return content
    if content is None:
        raise ChatTemplateError(f"{where} is missing; expected a text or a list of text parts.", parameter=where)
    if not isinstance(content, list) or not content:
        raise ChatTemplateError(f"{where} is neither a text nor a list of text parts.", parameter=where)
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str) or len(part) != 2:
            raise ChatTemplateError(
                f'{where}.{place} is not a text part {{"type": "text", "text": ...}}; the model reads only text.',
                parameter=f"{where}.{place}",
            )
    return "\n".join(part["text"] for part in content)


def _member_of(node: Any) -> Any:
    """Returns the name or index by which an expression looks up its value, or the name of its variable."""
    if isinstance(node, jinja2.nodes.Getitem):
        return getattr(node.arg, "value", None)
    return node.attr if isinstance(node, jinja2.nodes.Getattr) else getattr(node, "name", None)


def _with_inner(node: Any) -> Sequence[Any]:
    return (node, *node.find_all(jinja2.nodes.Expr))


def _spans(marked: str, plain: str, begin: str, end: str) -> list[tuple[int, int]]:
    """Returns the spans of the plain text that are enclosed by marks in the marked text."""
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
            "The chat template changes the text of a {% generation %} block afterwards, by a filter, a test or a jump "
            "out of the block. Apply filters inside the block, and end the block before the jump."
        )
    return spans


def _cut_after_last(prompt: str, content: Any) -> str:
    """Cuts the prompt after the last message's text, whose whitespace the template may have stripped."""
    text: str = content if isinstance(content, str) else content[0]["text"]
    core = text.strip()
    # The last occurrence, because earlier messages may have the same text.
    begin = prompt.rfind(core)
    if not core or begin < 0:
        raise ChatTemplateError(
            "The last message cannot be continued: it is empty, or the model's chat template changes its text.",
            parameter="continue_final_message",
        )
    led = text.lstrip()
    return prompt[: begin + len(led)] if prompt.startswith(led, begin) else prompt[: begin + len(core)]


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Builds the Jinja environment that transformers uses (`chat_template_utils.py`)."""
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
    """The tag `generation`, which encloses the assistant's text between two variables that may mark its span."""

    tags = {"generation"}  # noqa: RUF012, Jinja's own declaration

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        begin, end = (
            jinja2.nodes.Output([jinja2.nodes.Name(name, "load", lineno=line)], lineno=line) for name in (_BEGIN, _END)
        )
        # A scope, because transformers renders the block like a macro, which keeps assignments inside.
        return [begin, jinja2.nodes.Scope(body, lineno=line), end]


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serializes to JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
