"""Conversations as tokens, and which of the tokens the assistant wrote."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32

from stack_core.errors import DataError
from stack_core.text.chat_template import ChatTemplate
from stack_train.data.tokenizer import HuggingFaceTokenizer

__all__ = ["Conversation", "Messages", "Tokenization", "messages_of"]

Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]


@dataclass(frozen=True)
class Conversation:
    """A conversation as tokens.

    Attributes:
      supervised: whether the assistant wrote each token, the one that ends its turn included.
    """

    name: str
    tokens: Int32[np.ndarray, " tokens"]
    supervised: Bool[np.ndarray, " tokens"]


class Tokenization:
    """Makes tokens of conversations, by the tokenizer's chat template.

    The assistant's text is what `{% generation %}` encloses. A template without that block is rendered with and without
    each of the assistant's turns: what a turn adds behind the generation prompt is the assistant's. That holds only
    where a conversation's beginning is rendered alike whatever follows, so other templates are refused.

    Args:
      template: None where conversations are pairs of plain texts alone.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer, self._template = tokenizer, template

    @classmethod
    def by_template_of(cls, tokenizer: HuggingFaceTokenizer) -> "Tokenization":
        """Uses the tokenizer's own chat template, if it has one.

        Raises:
          ChatTemplateError: it is no template.
        """
        source = tokenizer.chat_template
        return cls(tokenizer, None if source is None else ChatTemplate(source, tokenizer.special_tokens))

    def conversation(self, name: str, record: Mapping[str, Any]) -> Conversation:
        """Reads a record: `messages`, or `prompt` and `completion`, each a text or a list of messages.

        Raises:
          DataError: the record has another form, or the assistant wrote nothing in it; names it.
          ChatTemplateError: the template does not take its messages.
        """
        if isinstance(record.get("prompt"), str) and isinstance(record.get("completion"), str):
            return self._of_texts(name, record["prompt"], record["completion"])
        messages, first = messages_of(name, record)
        if self._template is None:
            raise DataError(
                f"{name} holds messages, but the tokenizer has no chat template. Name one by data.chat_template, or "
                "write prompt and completion as plain texts."
            )
        spans = self._spans(name, messages)
        ids, offsets = self._tokenizer.encode_with_offsets(spans.text)
        supervised = np.zeros(len(ids), bool)
        for begin, end in spans.assistant[first:]:
            inside = (offsets[:, 0] >= begin) & (offsets[:, 0] < end)
            supervised |= inside | self._end_of_turn(ids, inside)
        if not supervised.any():
            raise DataError(f"{name}: the assistant wrote nothing in this conversation. Leave it out.")
        return Conversation(name, ids, supervised)

    def _of_texts(self, name: str, prompt: str, completion: str) -> Conversation:
        eos_id = self._tokenizer.eos_id
        if eos_id is None:
            raise DataError("The tokenizer has no end-of-text token, which ends every completion. Name its eos_token.")
        head = self._tokenizer.encode(prompt)
        tail = [*self._tokenizer.encode(completion, add_special_tokens=False), eos_id]
        supervised = np.arange(len(head) + len(tail)) >= len(head)
        return Conversation(name, np.asarray([*head, *tail], np.int32), supervised)

    def _end_of_turn(self, ids: Int32[np.ndarray, " tokens"], inside: Any) -> Bool[np.ndarray, " tokens"]:
        """The special token right behind a turn, which ends it where the template writes it outside of the turn."""
        found = np.zeros(len(ids), bool)
        places = np.flatnonzero(inside)
        if len(places) and not self._tokenizer.is_special(int(ids[places[-1]])):
            behind = places[-1] + 1
            if behind < len(ids) and self._tokenizer.is_special(int(ids[behind])):
                found[behind] = True
        return found

    def _spans(self, name: str, messages: Messages) -> "_Spans":
        assert self._template is not None
        if self._template.marks_generation:
            return _Spans(*self._template.render_spans(messages))
        text = self._template.render(messages, add_generation_prompt=False)
        found = []
        for place, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self._template.render(messages[:place])
            after = self._template.render(messages[: place + 1], add_generation_prompt=False)
            if not (text.startswith(after) and after.startswith(before)):
                raise DataError(
                    f"{name}: the chat template renders a conversation's beginning differently once turn {place} "
                    "follows, so that it is not certain what the assistant wrote. Enclose the assistant's text in "
                    "{% generation %} ... {% endgeneration %}, and name that template by data.chat_template."
                )
            found.append((len(before), len(before) + len(after[len(before) :].rstrip("\n"))))
        return _Spans(text, found)


@dataclass(frozen=True)
class _Spans:
    """A rendered conversation, and where in its characters the assistant's turns lie."""

    text: str
    assistant: list[Span]


def messages_of(name: str, record: Mapping[str, Any]) -> tuple[Messages, int]:
    """The messages of a record, and how many of the assistant's turns belong to its prompt.

    Raises:
      DataError: the record has neither messages nor prompt and completion.
    """
    if _is_messages(record.get("messages")):
        return record["messages"], 0
    prompt, completion = (_as_messages(record.get(field), role) for field, role in _PAIR)
    if prompt is None or completion is None:
        fields = ", ".join(map(repr, record)) or "none"
        raise DataError(
            f"{name}: the record has neither a list 'messages' nor 'prompt' and 'completion', each a text or a list of "
            f"messages. Its fields: {fields}."
        )
    return [*prompt, *completion], sum(message.get("role") == "assistant" for message in prompt)


_PAIR = (("prompt", "user"), ("completion", "assistant"))


def _as_messages(value: Any, role: str) -> Messages | None:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return value if _is_messages(value) else None


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(message, Mapping) for message in value)
