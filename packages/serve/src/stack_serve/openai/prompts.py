"""Prompts of requests as tokens, checked against the model's maximum length."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stack_core.abi.data import Tokenizer
from stack_core.abi.generation import PromptImage
from stack_serve.http.slices import maybe_in_thread
from stack_serve.llm.truncation import truncated_tokens
from stack_serve.openai.errors import ApiError, bad_request

__all__ = ["Prompt", "Prompts"]


@dataclass(frozen=True)
class Prompt:
    """A prompt; `text` is None if the request has tokens and their text is not needed."""

    tokens: tuple[int, ...]
    text: str | None
    images: tuple[PromptImage, ...] = ()


@dataclass(frozen=True)
class Prompts:
    """Makes prompts for one model.

    Attributes:
      tokenizer: tokenizer of the model, or None.
      max_tokens: maximum length of a prompt with its continuation.
      ending: special tokens that encoders keep at the end of a truncated text; None for language models.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    max_tokens: int
    ending: tuple[int, ...] | None = None

    def needed_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer.

        Raises:
          ApiError: the model lacks a tokenizer.
        """
        if self.tokenizer is None:
            raise bad_request("The model has no tokenizer. Send prompts as token ids to /v1/completions.")
        return self.tokenizer

    async def of_text(self, text: str, *, add_special_tokens: bool) -> Prompt:
        """Encodes a text."""
        (prompt,) = await self._of_texts([text], add_special_tokens=add_special_tokens)
        return prompt

    async def of_field(
        self,
        field: Any,
        *,
        max_prompts: int,
        add_special_tokens: bool,
        param: str = "prompt",
        keep_tokens: int | None = None,
        reserved_tokens: int = 0,
    ) -> list[Prompt]:
        """Reads a field with prompts, such as `prompt` of `/v1/completions`.

        Args:
          max_prompts: prompts that are allowed.
          param: name of the field.
          keep_tokens, reserved_tokens: arguments of `truncated` for each prompt; None keeps the prompts.

        Raises:
          ApiError: it is not of the four forms, or has too many prompts.
        """
        prompts = await maybe_in_thread(_size(field), self._checked, field, max_prompts, param)
        # All prompts or none: mixed lists were rejected.
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        read = [prompt for prompt in prompts if isinstance(prompt, Prompt)]
        if texts:
            read = await self._of_texts(texts, add_special_tokens=add_special_tokens)
        return read if keep_tokens is None else [self.truncated(each, keep_tokens, reserved_tokens) for each in read]

    def truncated(self, prompt: Prompt, keep_tokens: int, reserved_tokens: int = 0) -> Prompt:
        """Returns a part of a prompt, whose text is unknown; see `truncated_tokens`.

        Args:
          keep_tokens: maximum number of tokens; -1 keeps as many as the model takes.
          reserved_tokens: number of tokens of the continuation, for which -1 leaves room.
        """
        count = max(self.max_tokens - reserved_tokens, 1) if keep_tokens < 0 else keep_tokens
        if len(prompt.tokens) <= count:
            return prompt
        if prompt.images:
            raise bad_request("A prompt with images cannot be truncated. Shorten it.", param="truncate_prompt_tokens")
        return Prompt(truncated_tokens(prompt.tokens, count, self.ending), None)

    def _checked(self, field: Any, max_prompts: int, param: str) -> list[Prompt | str]:
        """Prompts of tokens, or texts to encode."""
        prompts: Any = [field] if isinstance(field, str) or _is_tokens(field) else field
        if not isinstance(prompts, list) or not prompts or not all(map(_of_one_form(prompts[0]), prompts)):
            raise bad_request(
                f"{param} is neither a text, nor a list of texts, nor a list of token ids, nor a list of such lists.",
                param=param,
            )
        if len(prompts) > max_prompts:
            raise bad_request(
                f"{len(prompts)} prompts were given; with so many continuations of each, one request takes "
                f"{max_prompts}. Send several requests.",
                param=param,
            )
        if isinstance(prompts[0], str):
            return prompts
        return [Prompt(self.known(tokens, param), None) for tokens in prompts]

    async def _of_texts(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[Prompt]:
        """Encodes texts; much text while other requests are answered."""
        tokenizer = self.needed_tokenizer()

        def encoded() -> list[Prompt]:
            return [
                Prompt(tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens)), text) for text in texts
            ]

        return await maybe_in_thread(_size(texts), encoded)

    def check_lengths(self, prompts: Sequence[Prompt], param: str) -> None:
        """Rejects prompts that are empty, or too long without a continuation.

        Raises:
          ApiError: a prompt is empty or too long.
        """
        for place, prompt in enumerate(prompts):
            where = param if len(prompts) == 1 else f"{param}.{place}"
            if not prompt.tokens:
                raise bad_request(f"{where} has no tokens; at least one is needed.", param=where)
            if len(prompt.tokens) > self.max_tokens:
                raise _too_long(
                    f"This model's maximum context length is {self.max_tokens} tokens. However, {where} has "
                    f"{len(prompt.tokens)} tokens. Shorten it, or set truncate_prompt_tokens: -1.",
                    where,
                )

    def check_room(
        self, prompt: Prompt, max_tokens: int | None, param: str, *, max_tokens_param: str = "max_tokens"
    ) -> None:
        """Rejects a prompt that is empty, or too long for the requested continuation.

        Args:
          param, max_tokens_param: names of the fields with the prompt and `max_tokens`.

        Raises:
          ApiError: the prompt is empty or too long.
        """
        # The engine checks this again, but without OpenAI's error code and the client's field names.
        prompt_tokens = len(prompt.tokens)
        if not prompt_tokens:
            raise bad_request("The prompt has no tokens; a continuation needs at least one to follow.", param=param)
        if prompt_tokens >= self.max_tokens:
            raise _too_long(
                f"This model's maximum context length is {self.max_tokens} tokens, one of which the continuation "
                f"needs. However, your prompt has {prompt_tokens} tokens. Shorten it.",
                param,
            )
        if max_tokens is not None and prompt_tokens + max_tokens > self.max_tokens:
            raise _too_long(
                f"This model's maximum context length is {self.max_tokens} tokens. However, you requested "
                f"{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the prompt, {max_tokens} in the "
                "continuation). Shorten the prompt or the continuation.",
                max_tokens_param,
            )

    def known(self, tokens: Sequence[int], param: str) -> tuple[int, ...]:
        """Returns the tokens after a check against the vocabulary.

        Raises:
          ApiError: a token is outside the vocabulary.
        """
        # min and max run in C, unlike a loop over the tokens.
        if tokens and (min(tokens) < 0 or max(tokens) >= self.vocab_size):
            wrong = min(tokens) if min(tokens) < 0 else max(tokens)
            raise bad_request(f"Token {wrong} is none of the model's {self.vocab_size} tokens.", param=param)
        return tuple(tokens)


def _size(value: Any) -> int:
    """Counts characters and tokens in a list, including nested lists."""
    if not isinstance(value, list):
        return len(value) if isinstance(value, str) else 0
    return len(value) + sum(len(each) for each in value if isinstance(each, (str, list)))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_tokens(value: Any) -> bool:
    # `isinstance` would accept booleans; `map` and `set` run in C, which matters for long prompts.
    return isinstance(value, list) and set(map(type, value)) == {int}


def _of_one_form(first: Any) -> Any:
    return _is_text if isinstance(first, str) else _is_tokens


def _too_long(message: str, param: str) -> ApiError:
    return bad_request(message, param=param, code="context_length_exceeded")
