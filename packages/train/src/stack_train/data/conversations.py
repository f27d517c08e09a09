"""Conversations as tokens, and which of the tokens the assistant wrote."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32, Int64

from stack_core.abi.errors import ChatTemplateError, DataError
from stack_core.text.chat_template import TEMPLATE_FIELDS, ChatTemplate
from stack_train.data.tokenizer import HuggingFaceTokenizer

__all__ = ["Conversation", "Messages", "Tokenization", "messages_of"]

Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]
Ids = Int32[np.ndarray, " tokens"]
Offsets = Int64[np.ndarray, "tokens begin_and_end"]
Mask = Bool[np.ndarray, " tokens"]


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

        A token is learned if any of its characters is the assistant's: " Paris" of "A: {% generation %}Paris" is one
        token. transformers returns the same mask (`return_assistant_tokens_mask`), with two exceptions: here, a special
        token that ends a turn right behind its block is learned, too, and spaces count although a tokenizer leaves them
        out of its offsets. The template also gets the record's `tools` and `chat_template_kwargs`.

        Raises:
          DataError: the record has another form, or the assistant wrote nothing in it; names it.
          ChatTemplateError: the template does not take its messages; names the record.
        """
        if isinstance(record.get("prompt"), str) and isinstance(record.get("completion"), str):
            if unread := [field for field in TEMPLATE_FIELDS if record.get(field)]:
                raise DataError(
                    f"{name}: {' and '.join(unread)} go to a chat template, which a prompt and a completion that are "
                    "texts do not pass. Write them as lists of messages."
                )
            return self._of_texts(name, record["prompt"], record["completion"])
        prompt, answer = messages_of(name, record)
        if self._template is None:
            raise DataError(
                f"{name} holds messages, but the tokenizer has no chat template. Name one by data.chat_template, or "
                "write prompt and completion as plain texts."
            )
        try:
            options = self._template.options_of(record)
            text, spans = self._spans(name, [*prompt, *answer], options)
            first = len(self._spans(name, prompt, options)[1]) if _has_assistant(prompt) else 0
        except ChatTemplateError as error:
            raise ChatTemplateError(f"{name}: {error}", parameter=error.parameter) from error
        ids, offsets = self._tokenizer.encode_with_offsets(text)
        supervised = np.zeros(len(ids), bool)
        for begin, end in spans[first:]:
            inside = (offsets[:, 0] < end) & (offsets[:, 1] > begin)
            supervised |= inside | self._end_of_turn(ids, offsets, inside, end)
        if not supervised.any():
            raise DataError(f"{name}: the assistant wrote nothing in this conversation. Leave it out.")
        return Conversation(name, ids, supervised)

    def _of_texts(self, name: str, prompt: str, completion: str) -> Conversation:
        eos_id = self._tokenizer.eos_id
        if eos_id is None:
            raise DataError("The tokenizer has no end-of-text token, which ends every completion. Name its eos_token.")
        head, both = self._tokenizer.encode(prompt), self._tokenizer.encode(prompt + completion)
        begins = np.arange(len(both)) >= len(head)
        if both[: len(head)] != head:  # a token spans the end of the prompt
            tail = self._tokenizer.encode(completion, add_special_tokens=False)
            if b"".join(map(self._tokenizer.token_bytes, tail)) == completion.encode():
                both, begins = [*head, *tail], np.arange(len(head) + len(tail)) >= len(head)  # as in generation
            else:  # a tokenizer that puts a space before each text, which the completion does not have
                _, offsets = self._tokenizer.encode_with_offsets(prompt + completion)
                begins = np.append(np.zeros(len(both) - len(offsets), bool), offsets[:, 1] > len(prompt))
        return Conversation(name, np.asarray([*both, eos_id], np.int32), np.append(begins, True))

    def _end_of_turn(self, ids: Ids, offsets: Offsets, inside: Mask, end: int) -> Mask:
        """Marks the special token right after a turn, which a template may write outside of its generation block."""
        found = np.zeros(len(ids), bool)
        places = np.flatnonzero(inside)
        if len(places) and not self._tokenizer.is_special(int(ids[places[-1]])):
            behind = places[-1] + 1
            if behind < len(ids) and offsets[behind, 0] == end and self._tokenizer.is_special(int(ids[behind])):
                found[behind] = True
        return found

    def _spans(self, name: str, messages: Messages, options: Mapping[str, Any]) -> tuple[str, list[Span]]:
        """Renders messages, and finds the begin and end of each of the assistant's turns in the text's characters."""
        assert self._template is not None
        if self._template.marks_generation:
            return self._template.render_spans(messages, **options)
        text = self._template.render(messages, add_generation_prompt=False, **options)
        found = []
        for place, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self._template.render(messages[:place], **options)
            after = self._template.render(messages[: place + 1], add_generation_prompt=False, **options)
            if not (text.startswith(after) and after.startswith(before)):
                raise DataError(
                    f"{name}: the chat template renders a conversation's beginning differently once turn {place} "
                    "follows, so that it is not certain what the assistant wrote. Enclose the assistant's text in "
                    "{% generation %} ... {% endgeneration %}, and name that template by data.chat_template."
                )
            found.append((len(before), len(before) + len(after[len(before) :].rstrip("\n"))))
        return text, found


def messages_of(name: str, record: Mapping[str, Any]) -> tuple[Messages, Messages]:
    """Splits a record's messages into its prompt, of which nothing is learned, and what follows.

    Raises:
      DataError: the record has neither messages nor prompt and completion.
    """
    if _is_messages(record.get("messages")):
        return [], record["messages"]
    prompt, completion = (_as_messages(record.get(field), role) for field, role in _PAIR)
    if prompt is None or completion is None:
        fields = ", ".join(map(repr, record)) or "none"
        raise DataError(
            f"{name}: the record has neither a list 'messages' nor 'prompt' and 'completion', each a text or a list of "
            f"messages. Its fields: {fields}."
        )
    return prompt, completion


def _has_assistant(messages: Messages) -> bool:
    return any(message.get("role") == "assistant" for message in messages)


_PAIR = (("prompt", "user"), ("completion", "assistant"))


def _as_messages(value: Any, role: str) -> Messages | None:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return value if _is_messages(value) else None


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(message, Mapping) for message in value)
