"""A language model from Python: prompts in, texts out, on an engine of this process."""

import itertools
import queue
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stack_core.abi.adapters import Adapters
from stack_core.abi.config import parse
from stack_core.abi.errors import EngineBusy, GenerationError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.generation import GenerationRequest, GenerationUpdate, SamplingParams, TokenLogprob
from stack_core.abi.model_formats import open_for_generation
from stack_core.text.chat_template import ChatTemplate
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.engine import LLMEngine

__all__ = ["LLM", "Completion", "Output", "Piece"]

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
"""A text, token ids, or messages."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One continuation of a prompt.

    Attributes:
      index: which of the `n` continuations.
      logprobs: one for each token, if they were asked for.
      finish_reason: "stop" or "length"; "abort" where the model was closed meanwhile.
      stop_reason: the stop text or the token that ended it; None for the model's own end tokens.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True, kw_only=True)
class Output:
    """What a prompt gave.

    Attributes:
      prompt: its text, the template's where it was messages; None where it was token ids.
      outputs: its continuations.
      prompt_logprobs: one for each token of the prompt, None for the first, if they were asked for.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: list[Completion]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What became known of a continuation; the last piece of each has a finish reason.

    Attributes:
      prompt: which of the prompts.
      index: which of its continuations.
    """

    prompt: int
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None


class LLM:
    """A model that generates from prompts: a text, token ids or messages, or a list of them.

    Programs are compiled as they are needed, or all at once by `warm_up`. Threads may share it. It lets go of the model
    with `close`, at the end of a `with` block, or when it is forgotten.

    Args:
      model: directory of a run or of a Hugging Face checkpoint, or a checkpoint that is open.
      settings: fields of `EngineConfig`, such as `max_sequences=8` or `adapters={"mine": "runs/lora"}`.

    Raises:
      StackError: the model cannot be opened, or a setting does not fit it.
    """

    def __init__(self, model: str | Path | GenerativeCheckpoint, **settings: Any) -> None:
        config = parse(EngineConfig, settings)
        self._checkpoint = open_for_generation(str(model)) if isinstance(model, str | Path) else model
        self._engine = LLMEngine(self._checkpoint, config)
        self._engine.start()
        self._ids = itertools.count()
        self._close = weakref.finalize(self, self._engine.close)

    def warm_up(self) -> None:
        """Compiles every program that a prompt can need."""
        self._engine.warm_up()

    def load_adapter(self, name: str, adapter: str | Adapters) -> None:
        """Takes up an adapter: a run, a directory of PEFT, or factors; see `LLMEngine.load_adapter`."""
        self._engine.load_adapter(name, adapter)

    def unload_adapter(self, name: str) -> None:
        """Lets go of an adapter."""
        self._engine.unload_adapter(name)

    def close(self) -> None:
        """Ends what is being generated, and lets go of the model."""
        self._close()

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
    ) -> list[Output]:
        """Generates from all prompts at once.

        Args:
          sampling: of all prompts, or one for each; None is what the model's makers recommend.
          adapter: the name of an adapter, of all prompts, or one for each; None is the model without.
          chat_template_kwargs: what the template of messages reads besides, such as `enable_thinking`.

        Returns:
          An output for each prompt, in their order; one for a single prompt.

        Raises:
          GenerationError: the model cannot serve a prompt or a setting, or failed at one.
        """
        requests, texts = self._requests(prompts, sampling, adapter, chat_template_kwargs)
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

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Piece]:
        """Generates from all prompts at once, and yields what is new as it comes; to leave early is to end it.

        Takes and raises what `generate` does.
        """
        requests, _ = self._requests(prompts, sampling, adapter, chat_template_kwargs)
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
    ) -> tuple[list[GenerationRequest], list[str | None]]:
        """The requests that prompts make, all checked, and the texts of their prompts."""
        each: Sequence[Any] = [prompts] if _is_one(prompts) else prompts
        if sampling is None:
            sampling = parse(SamplingParams, self._checkpoint.sampling_defaults)
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
            tokens, text = self._tokens(prompt, variables)
            request = GenerationRequest(
                request_id=f"llm-{next(self._ids)}", prompt=tokens, sampling=wanted, adapter=name
            )
            self._engine.check(request)
            requests.append(request)
            texts.append(text)
        return requests, texts

    def _tokens(self, prompt: Any, variables: Mapping[str, Any] | None) -> tuple[tuple[int, ...], str | None]:
        """The tokens of a prompt and, unless it was given as them, its text."""
        if not isinstance(prompt, str) and prompt and all(isinstance(token, int) for token in prompt):
            return tuple(prompt), None
        if self._checkpoint.tokenizer is None:
            raise GenerationError(f"{self._checkpoint.name} has no tokenizer. Give token ids.", parameter="prompt")
        if isinstance(prompt, str):
            return tuple(self._checkpoint.tokenizer.encode(prompt)), prompt
        if not prompt or not all(isinstance(message, Mapping) for message in prompt):
            raise GenerationError(
                f"{str(prompt)[:100]!r} is no prompt: a text, token ids or messages were expected.", parameter="prompt"
            )
        text = self._template.render(prompt, variables=variables)
        return tuple(self._checkpoint.tokenizer.encode(text, add_special_tokens=False)), text  # it writes its own

    @cached_property
    def _template(self) -> ChatTemplate:
        if self._checkpoint.chat_template is None:
            raise GenerationError(
                f"{self._checkpoint.name} has no chat template: it answers no messages. Give it texts to continue.",
                parameter="prompt",
            )
        return ChatTemplate(self._checkpoint.chat_template, self._checkpoint.special_tokens)

    def _updates(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, GenerationUpdate]]:
        """The updates of requests, each with the number of its request; as many wait as the engine lets wait."""
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
                        if not unfinished:
                            raise
                        break
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


def _is_one(prompts: Any) -> bool:
    """Whether it is one prompt; a list of no items is a list of no prompts."""
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (int, Mapping)))
