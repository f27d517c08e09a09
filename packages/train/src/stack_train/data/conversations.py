"""Tokenized conversations with a mask of the assistant's tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32, Int64

from stack_core.abi.errors import ChatTemplateError, DataError
from stack_core.text.chat_template import TEMPLATE_FIELDS, ChatTemplate
from stack_core.text.images import ImageReader, ImageSize, expand_images
from stack_train.data.tokenizer import HuggingFaceTokenizer

__all__ = ["Conversation", "Messages", "Tokenization", "messages_of"]

Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]
Ids = Int32[np.ndarray, " tokens"]
Offsets = Int64[np.ndarray, "tokens begin_and_end"]
Mask = Bool[np.ndarray, " tokens"]


@dataclass(frozen=True)
class Conversation:
    """A tokenized conversation.

    Attributes:
      name: name of the record, for messages.
      tokens: int32 token ids.
      supervised: mask of the assistant's tokens, including tokens that end its turns.
    """

    name: str
    tokens: Int32[np.ndarray, " tokens"]
    supervised: Bool[np.ndarray, " tokens"]

    @property
    def identity(self) -> str:
        """Text that is equal for equal conversations, which go to the same split."""
        return self.tokens.tobytes().hex()


class Tokenization:
    """Tokenizes conversations with a chat template, and finds the assistant's tokens.

    The assistant's text is enclosed in `{% generation %}` blocks. A template without these blocks is rendered with and
    without each assistant turn; the text that a turn adds after the generation prompt is the assistant's. This requires
    that the beginning of a conversation is rendered independently of its continuation. Other templates are rejected.

    Args:
      tokenizer: tokenizer of the rendered text.
      template: chat template; None for conversations that are pairs of plain texts.
      images: preprocessing of images, whose tokens replace the placeholders of the template; None for text.
    """

    def __init__(
        self, tokenizer: HuggingFaceTokenizer, template: ChatTemplate | None, images: ImageReader | None = None
    ) -> None:
        self._tokenizer, self._template, self._images = tokenizer, template, images

    @classmethod
    def by_template_of(cls, tokenizer: HuggingFaceTokenizer, images: ImageReader | None = None) -> "Tokenization":
        """Creates a tokenization with the tokenizer's own chat template, if it has one.

        Raises:
          ChatTemplateError: the template is malformed.
        """
        source = tokenizer.chat_template
        if source is None:
            return cls(tokenizer, None, images)
        return cls(tokenizer, ChatTemplate(source, tokenizer.special_tokens, images=images is not None), images)

    def conversation(self, name: str, record: Mapping[str, Any], image_sizes: Sequence[ImageSize] = ()) -> Conversation:
        """Tokenizes a record with `messages`, or with `prompt` and `completion`, each a text or a list of messages.

        A token is supervised if any of its characters is the assistant's: " Paris" of "A: {% generation %}Paris" is one
        token. The mask is the same as in transformers (`return_assistant_tokens_mask`), with two exceptions: here, a
        special token that ends a turn directly after its block is supervised, and a token's spaces count even if the
        tokenizer leaves them out of its offsets. The template also receives the record's `tools` and
        `chat_template_kwargs`.

        Args:
          name: name of the record, for messages.
          record: the record, whose image parts are `{"type": "image"}`.
          image_sizes: size of each image.

        Raises:
          DataError: the record is malformed, or does not contain any of the assistant's tokens.
          ChatTemplateError: the template rejects the messages.
        """
        if isinstance(record.get("prompt"), str) and isinstance(record.get("completion"), str):
            if unread := [field for field in TEMPLATE_FIELDS if record.get(field)]:
                raise DataError(
                    f"{name}: {' and '.join(unread)} are for a chat template, which is not used if prompt and "
                    "completion are plain texts. Write them as lists of messages."
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
            # Assistant turns of the prompt are not supervised.
            # Rendered separately, because a template decides how many turns it marks.
            first = len(self._spans(name, prompt, options)[1]) if _has_assistant(prompt) else 0
        except ChatTemplateError as error:
            raise ChatTemplateError(f"{name}: {error}", parameter=error.parameter) from error
        if self._images is not None:
            text, spans = _with_images(name, text, spans, self._images, image_sizes)
        ids, offsets = self._tokenizer.encode_with_offsets(text)
        supervised = np.zeros(len(ids), bool)
        for begin, end in spans[first:]:
            inside = (offsets[:, 0] < end) & (offsets[:, 1] > begin)
            supervised |= inside | self._end_of_turn(ids, offsets, inside, end)
        if not supervised.any():
            raise DataError(f"{name}: the conversation has no text by the assistant. Leave it out.")
        return Conversation(name, ids, supervised)

    def _of_texts(self, name: str, prompt: str, completion: str) -> Conversation:
        eos_id = self._tokenizer.eos_id
        if eos_id is None:
            raise DataError("The tokenizer has no end-of-text token, which ends every completion. Name its eos_token.")
        head, both = self._tokenizer.encode(prompt), self._tokenizer.encode(prompt + completion)
        begins = np.arange(len(both)) >= len(head)
        if both[: len(head)] != head:  # a token crosses the end of the prompt
            tail = self._tokenizer.encode(completion, add_special_tokens=False)
            if b"".join(map(self._tokenizer.token_bytes, tail)) == completion.encode():
                # Prompt and completion are tokenized separately, as in generation.
                both, begins = [*head, *tail], np.arange(len(head) + len(tail)) >= len(head)
            else:  # the tokenizer adds a space before each text, which the completion does not have
                _, offsets = self._tokenizer.encode_with_offsets(prompt + completion)
                begins = np.append(np.zeros(len(both) - len(offsets), bool), offsets[:, 1] > len(prompt))
        return Conversation(name, np.asarray([*both, eos_id], np.int32), np.append(begins, True))

    def _end_of_turn(self, ids: Ids, offsets: Offsets, inside: Mask, end: int) -> Mask:
        """Marks the special token directly after a turn, which some templates write outside of the generation block."""
        found = np.zeros(len(ids), bool)
        places = np.flatnonzero(inside)
        # Otherwise the block includes the token that ends the turn.
        if len(places) and not self._tokenizer.is_special(int(ids[places[-1]])):
            behind = places[-1] + 1
            if behind < len(ids) and offsets[behind, 0] == end and self._tokenizer.is_special(int(ids[behind])):
                found[behind] = True
        return found

    def _spans(self, name: str, messages: Messages, options: Mapping[str, Any]) -> tuple[str, list[Span]]:
        """Renders messages, and returns the text with the begin and end of each assistant turn in characters."""
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
                    "follows, so the assistant's text cannot be located. Enclose the assistant's text in "
                    "{% generation %} ... {% endgeneration %}, and set data.chat_template to that template."
                )
            # Templates such as ChatML's put a newline after the token that ends a turn, at which generation stops.
            found.append((len(before), len(before) + len(after[len(before) :].rstrip("\n"))))
        return text, found


def _with_images(
    name: str, text: str, spans: list[Span], reader: ImageReader, sizes: Sequence[ImageSize]
) -> tuple[str, list[Span]]:
    """Replaces the placeholders of images in a rendered conversation, and adjusts the spans.

    Args:
      sizes: size of each image.
    """
    try:
        expanded = expand_images(text, reader, sizes)
    except ChatTemplateError as error:
        raise DataError(f"{name}: {error}") from error
    longer = [len(reader.expansion(size)) - len(reader.placeholder) for size in sizes]

    def shift(place: int) -> int:
        return place + sum(longer[: text[:place].count(reader.placeholder)])

    return expanded, [(shift(begin), shift(end)) for begin, end in spans]


def messages_of(name: str, record: Mapping[str, Any]) -> tuple[Messages, Messages]:
    """Splits a record's messages into the prompt, which is not supervised, and the rest.

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
