"""Python interface to a language model: batched generation on an engine in this process."""

import itertools
import queue
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from stack_core.abi.adapters import Adapters
from stack_core.abi.config import parse
from stack_core.abi.engines import Pooling
from stack_core.abi.errors import EngineBusy, GenerationError, nearest
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.generation import GenerationRequest, GenerationUpdate, PromptImage, SamplingParams, TokenLogprob
from stack_core.abi.model_formats import open_for_generation
from stack_core.report.document import continuation
from stack_core.report.markup import Markup
from stack_core.text.chat_template import ChatTemplate
from stack_core.text.embeddings import check_generates, embedding_settings_of
from stack_core.text.images import ReadImage, expand_images, image_reader_of, place_images, read_images, take_images
from stack_serve.llm.config import engine_config
from stack_serve.llm.encoder_engine import make_engine
from stack_serve.llm.truncation import encoder_ending, truncated_tokens
from stack_serve.llm.vectors import finished_vectors

__all__ = ["LLM", "Completion", "Output", "Piece"]

_RETRY_S = 0.01  # between two attempts to submit while the engine's queue is full

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
"""A text, token ids, or chat messages."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One continuation of a prompt.

    Attributes:
      index: number of the continuation, from 0 to `n` - 1.
      text: generated text.
      token_ids: generated tokens.
      logprobs: log-probabilities of each token; None if not requested.
      finish_reason: "stop", "length", or "abort" if the model was closed before the end.
      stop_reason: stop text or stop token that ended the continuation; None for end tokens of the model.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True, kw_only=True)
class Output:
    """Result of one prompt.

    Attributes:
      prompt: text of the prompt, with the chat template applied to messages; None for a prompt of token ids.
      prompt_token_ids: tokens of the prompt.
      outputs: continuations of the prompt.
      prompt_logprobs: log-probabilities of each prompt token, None for the first; None if not requested.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: list[Completion]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    @property
    def text(self) -> str:
        """Text of the first continuation."""
        return self.outputs[0].text

    def _repr_html_(self) -> str:
        return "".join(map(self._html_of, self.outputs))

    def _html_of(self, output: Completion) -> Markup:
        counts = f"{len(self.prompt_token_ids):,} tokens of prompt, {len(output.token_ids):,} generated"
        return continuation(self.prompt or "", output.text, f"{counts}, {output.finish_reason}")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """New output of a continuation. The last piece of each continuation has a finish reason.

    Attributes:
      prompt: position of the prompt in the list of prompts.
      index: number of the continuation.
      text: new text.
      token_ids: new tokens.
      finish_reason: finish reason of the continuation as in `Completion`; None before its last piece.
    """

    prompt: int
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None


class LLM:
    """A language model for batched generation from texts, token ids or chat messages, or an encoder for `embed`.

    Programs are compiled on first use, or in advance by `warm_up`. Instances are thread-safe. The model is released by
    `close`, at the end of a `with` block, or when the instance is garbage-collected.

    Args:
      model: directory of a run or of a Hugging Face checkpoint, or an open checkpoint.
      settings: fields of `EngineConfig`, such as `max_sequences=8` or `adapters={"mine": "runs/lora"}`; some also have
        their name in vLLM (`VLLM_NAMES`).

    Raises:
      StackError: the model cannot be opened, or a setting is invalid for the model.
    """

    def __init__(self, model: str | Path | GenerativeCheckpoint, **settings: Any) -> None:
        config = engine_config(settings)
        self._checkpoint = open_for_generation(str(model), encoders=True) if isinstance(model, str | Path) else model
        self._engine = make_engine(self._checkpoint, config)
        self._engine.start()
        self._ids = itertools.count()
        # The callback is bound to the engine: a reference to `self` would keep this object alive for ever.
        self._close = weakref.finalize(self, self._engine.close)

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of a prompt and its continuation together."""
        return self._engine.limits.max_tokens

    def warm_up(self) -> None:
        """Compiles every program that generation may need."""
        self._engine.warm_up()

    def load_adapter(self, name: str, adapter: str | Adapters) -> None:
        """Registers an adapter from a run, a PEFT directory, or factors; see `LLMEngine.load_adapter`."""
        self._engine.load_adapter(name, adapter)

    def unload_adapter(self, name: str) -> None:
        """Removes an adapter."""
        self._engine.unload_adapter(name)

    def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Frees the device memory until `wake_up`; see `Engine.sleep`."""
        self._engine.sleep(level)

    def wake_up(self) -> None:
        """Allocates the memory again."""
        self._engine.wake_up()

    def close(self) -> None:
        """Aborts running generation and releases the model."""
        self._close()

    def __repr__(self) -> str:
        stats, found = self._engine.stats(), self._checkpoint
        return (
            f"<LLM {found.name}: {found.vocab_size:,} tokens in the vocabulary, {found.max_positions:,} positions; "
            f"{stats.running} running, {stats.waiting} waiting>"
        )

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> list[Output]:
        """Generates continuations of all prompts as one batch.

        Args:
          prompts: one prompt or a list of prompts.
          sampling: parameters for all prompts, or one per prompt; None selects the defaults of the model.
          adapter: adapter name for all prompts, or one per prompt; None selects the base model.
          chat_template_kwargs: additional variables of the chat template, such as `enable_thinking`.
          settings: fields of `SamplingParams` for all prompts instead of `sampling`, such as `max_tokens=64`. Others
            keep the defaults of the model.

        Returns:
          A list with one output per prompt, in the order of the prompts.

        Raises:
          GenerationError: a prompt or parameter is invalid, or generation failed.
        """
        requests, texts = self._requests(prompts, sampling, adapter, chat_template_kwargs, settings)
        made = [[list[GenerationUpdate]() for _ in range(request.sampling.n)] for request in requests]
        scores: dict[int, tuple[TokenLogprob | None, ...]] = {}
        for number, update in self._updates(requests):
            made[number][update.index].append(update)
            if update.prompt_logprobs is not None:
                scores[number] = update.prompt_logprobs
        return [
            Output(
                prompt=text,
                prompt_token_ids=request.prompt,
                outputs=list(map(_completion, made[number])),
                prompt_logprobs=scores.get(number),
            )
            for number, (request, text) in enumerate(zip(requests, texts, strict=True))
        ]

    def chat(
        self,
        messages: str | Sequence[Any],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[Output]:
        """Generates the next message of each conversation; `generate` with the chat template.

        Args:
          messages: messages of one conversation, such as `[{"role": "user", "content": "Hello"}]`, a list of
            conversations, or the text of a single user message. A content may be a list of parts: `{"type": "text",
            "text": ...}`, and for models with images `{"type": "image_url", "image_url": {"url": "data:..."}}`.
          sampling: as in `generate`.
          options: other arguments of `generate`, such as `max_tokens=64` or `chat_template_kwargs`.

        Raises:
          GenerationError: the model has no chat template, a message is invalid, or generation failed.
        """
        prompts: Any = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        for conversation in [prompts] if _is_one(prompts) else prompts:
            if isinstance(conversation, str) or not all(isinstance(message, Mapping) for message in conversation):
                raise GenerationError(
                    f"{str(conversation)[:100]!r} is not a conversation; expected messages such as "
                    '{"role": "user", "content": "Hello"}. Use generate to continue a text.',
                    parameter="messages",
                )
        return self.generate(prompts, sampling, **options)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> np.ndarray:
        """Computes an embedding of each prompt from the hidden states of the base model, without generating tokens.

        Args:
          prompts: one prompt or a list of prompts.
          pooling: hidden state of the "last" or the first ("cls") token of a prompt, or the "mean" over its tokens.
            None follows the recommendation of an encoder's directory; for language models, it means "last".
          normalize: True scales each vector to length 1. None follows an encoder's directory, and otherwise means True.
          dimensions: number of first dimensions to return; None returns all.
          truncate_prompt_tokens: maximum number of tokens of a prompt, -1 for the maximum of the model. Encoders keep
            the first tokens and the special token at the end, language models the last tokens. None refuses longer
            prompts.
          chat_template_kwargs: as in `generate`.

        Returns:
          float32[prompts, dimensions], in the order of the prompts.

        Raises:
          GenerationError: a prompt, `pooling` or `dimensions` is invalid.
        """
        each: Sequence[Any] = [prompts] if _is_one(prompts) else prompts
        found = [self._tokens(prompt, chat_template_kwargs) for prompt in each]
        if any(images for *_, images in found):
            raise GenerationError("Embeddings are computed of text only. Leave the images out.", parameter="prompt")
        tokens = [self._truncated(tokens, truncate_prompt_tokens) for tokens, *_ in found]
        settings = embedding_settings_of(self._checkpoint)
        vectors = self._engine.embed(tokens, pooling=settings.pooling if pooling is None else pooling)
        normalize = settings.normalize if normalize is None else normalize
        return finished_vectors(vectors, dimensions=dimensions, normalize=normalize)

    def _truncated(self, tokens: tuple[int, ...], max_tokens: int | None) -> tuple[int, ...]:
        if max_tokens is None:
            return tokens
        if max_tokens < -1 or max_tokens == 0:
            raise GenerationError(
                f"truncate_prompt_tokens={max_tokens}: expected a positive number, or -1 for the maximum of the model.",
                parameter="truncate_prompt_tokens",
            )
        count = self._engine.limits.max_tokens if max_tokens < 0 else max_tokens
        return truncated_tokens(tokens, count, encoder_ending(self._checkpoint))

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Iterator[Piece]:
        """Generates continuations of all prompts as one batch and yields their output incrementally.

        See `generate` for the arguments and errors. Closing the iterator early aborts the generation.
        """
        requests, _ = self._requests(prompts, sampling, adapter, chat_template_kwargs, settings)
        for number, update in self._updates(requests):
            yield Piece(
                prompt=number,
                index=update.index,
                text=update.text,
                token_ids=update.tokens,
                finish_reason=update.finish_reason,
            )

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        adapter: str | Sequence[str | None] | None,
        variables: Mapping[str, Any] | None,
        settings: Mapping[str, Any],
    ) -> tuple[list[GenerationRequest], list[str | None]]:
        """Builds and validates one request per prompt; also returns the prompt texts."""
        check_generates(self._checkpoint)
        each: Sequence[Any] = [prompts] if _is_one(prompts) else prompts
        if sampling is not None and settings:
            raise GenerationError(
                f"{', '.join(settings)} and sampling were given. Set all in SamplingParams, or leave sampling out.",
                parameter="sampling",
            )
        if sampling is None:
            _check_names(settings)
            sampling = parse(SamplingParams, {**self._checkpoint.sampling_defaults, **settings})
        params = [sampling] * len(each) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(params) != len(each):
            raise GenerationError(
                f"{len(params)} SamplingParams were given for {len(each)} prompts. Give one for all, or one for each.",
                parameter="sampling",
            )
        adapters = [adapter] * len(each) if isinstance(adapter, str | None) else list(adapter)
        if len(adapters) != len(each):
            raise GenerationError(
                f"{len(adapters)} adapters were given for {len(each)} prompts. Give one for all, or one for each.",
                parameter="adapter",
            )
        requests, texts = list[GenerationRequest](), list[str | None]()
        for prompt, wanted, name in zip(each, params, adapters, strict=True):
            tokens, text, images = self._tokens(prompt, variables)
            request = GenerationRequest(
                request_id=f"llm-{next(self._ids)}", prompt=tokens, sampling=wanted, adapter=name, images=images
            )
            # Every prompt is checked before the first is submitted, so a bad one starts no work.
            self._engine.check(request)
            requests.append(request)
            texts.append(text)
        return requests, texts

    def _tokens(
        self, prompt: Any, variables: Mapping[str, Any] | None
    ) -> tuple[tuple[int, ...], str | None, tuple[PromptImage, ...]]:
        """Tokenizes a prompt; returns its tokens, its text, which is None for a prompt of token ids, and its images."""
        if not isinstance(prompt, str) and prompt and all(isinstance(token, int) for token in prompt):
            return tuple(prompt), None, ()
        if self._checkpoint.tokenizer is None:
            raise GenerationError(f"{self._checkpoint.name} has no tokenizer. Give token ids.", parameter="prompt")
        if isinstance(prompt, str):
            return tuple(self._checkpoint.tokenizer.encode(prompt)), prompt, ()
        if not prompt or not all(isinstance(message, Mapping) for message in prompt):
            raise GenerationError(
                f"{str(prompt)[:100]!r} is not a prompt; expected a text, token ids or messages.", parameter="prompt"
            )
        reader, images = image_reader_of(self._checkpoint), list[ReadImage]()
        if reader is None:
            text = self._template.render(prompt, variables=variables)
        else:
            messages, files = take_images(prompt)
            text = self._template.render(messages, variables=variables)
            images = read_images(reader, files, self._engine.limits.max_tokens)
            text = expand_images(text, reader, [image.size for image in images])
        # Chat templates write special tokens such as the beginning of the sequence themselves.
        tokens = tuple(self._checkpoint.tokenizer.encode(text, add_special_tokens=False))
        return tokens, text, () if reader is None else place_images(tokens, reader, images)

    @cached_property
    def _template(self) -> ChatTemplate:
        if self._checkpoint.chat_template is None:
            raise GenerationError(
                f"{self._checkpoint.name} has no chat template for messages. Give it a text to continue.",
                parameter="prompt",
            )
        images = image_reader_of(self._checkpoint) is not None
        return ChatTemplate(self._checkpoint.chat_template, self._checkpoint.special_tokens, images=images)

    def _updates(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, GenerationUpdate]]:
        """Submits requests as the engine's queue permits and yields (number of the request, update) pairs."""
        arrived = queue.SimpleQueue[GenerationUpdate]()
        waiting = deque(enumerate(requests))
        unfinished: dict[str, tuple[int, int]] = {}
        try:
            while waiting or unfinished:
                while waiting:
                    number, request = waiting[0]
                    try:
                        self._engine.submit(request, arrived.put)
                    except EngineBusy:
                        if unfinished:
                            break  # an update of these requests makes room
                        time.sleep(_RETRY_S)  # requests of other callers, or of a closed stream, fill the queue
                        continue
                    waiting.popleft()
                    unfinished[request.request_id] = number, request.sampling.n
                update = arrived.get()
                number, continuations = unfinished.pop(update.request_id)
                left = continuations - (update.finish_reason is not None)
                if left:
                    unfinished[update.request_id] = number, left
                if update.finish_reason == "error":
                    raise GenerationError(f"Prompt {number} failed: {update.error}")
                yield number, update
        finally:
            for request_id in unfinished:
                self._engine.abort(request_id)


def _completion(updates: Sequence[GenerationUpdate]) -> Completion:
    first, last = updates[0], updates[-1]
    logprobs = tuple(each for update in updates for each in update.logprobs or ())
    return Completion(
        index=first.index,
        text="".join(update.text for update in updates),
        token_ids=tuple(token for update in updates for token in update.tokens),
        logprobs=None if first.logprobs is None else logprobs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )


def _check_names(settings: Mapping[str, Any]) -> None:
    """Raises a GenerationError for keywords that `SamplingParams` does not know."""
    known = [field.name for field in fields(SamplingParams)]
    for name in settings:
        if name not in known:
            hint = nearest(name, [*known, "sampling", "adapter", "chat_template_kwargs"])
            raise GenerationError(
                f"There is no argument {name!r}.{hint} The fields of SamplingParams are arguments, too: "
                f"{', '.join(known)}.",
                parameter=name,
            )


def _is_one(prompts: Any) -> bool:
    """Returns whether `prompts` is a single prompt. An empty list is a list of zero prompts."""
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (int, Mapping)))
