"""`environment.name: prompts`: single answers to prompts, scored by rewards."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.data import Tokenizer
from stack_core.abi.errors import ChatTemplateError, DataError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.generation import PromptImage
from stack_core.text.images import expand_images, image_reader_of, load_image, place_images, resolve_url, take_images
from stack_rl.contracts import Action, Completion, Environment, Observation, Reward, StepResult, Tasks
from stack_rl.environments.image_parts import require_reader
from stack_rl.environments.records import Record, read_records
from stack_rl.rewards.weighted import ReadsTokens, WeightedReward, as_weighted, check_reward, resolved, total_score

__all__ = ["PromptsConfig"]

_READ_PROMPTS = 64  # cached prompts with images; the attempts of a group share pixels


@config
class PromptsConfig:
    """Prompts from JSONL files: each record has a `prompt`, a text or a list of messages, and fields for the rewards.

    The content of a message is a text or a list of parts, `{"type": "text", "text": ...}` and `{"type": "image_url",
    "image_url": {"url": ...}}`. A URL is a data URL, or the path of a file relative to its JSONL file.

    An episode is one answer, which ends with the model's end token or after `max_tokens`. Its reward is the weighted
    sum of `rewards`; each of them is also reported as a fact under its name.

    Attributes:
      source: glob of the files with training tasks.
      rewards: entries of the registry `rewards`, by name or as a mapping of `name` and settings, or "module:function".
        Each may be wrapped as `reward` with a `weight`.
      name: selects this environment.
      held_out: glob of the files with evaluation tasks; None disables evaluation.
      max_tokens: maximum number of tokens per answer.
      stop: texts that end an answer like the model's end token and are not part of it, such as a line break. The
        tokenizer must encode each as one token.
      too_long: handling of a prompt that leaves no room for an answer: raise an "error" or "drop" it.
    """

    source: str
    rewards: Annotated[tuple[Annotated[WeightedReward, BeforeValidator(as_weighted)], ...], Field(min_length=1)]
    name: Literal["prompts"] = "prompts"
    held_out: str | None = None
    max_tokens: PositiveInt = 128
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    too_long: Literal["error", "drop"] = "error"

    moved_keys: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"overlong_tokens": "objective.overlong: {buffer_fraction: tokens / max_tokens}"}
    )

    def check(self, model: Any) -> None:
        for each in self.rewards:
            check_reward(each.reward)
        self._records()

    def build(self, policy: GenerativeCheckpoint, *, seq_tokens: int, seed: int) -> Tasks:
        tokenizer = policy.tokenizer
        if tokenizer is None:
            raise DataError("Prompts need a tokenizer: start from a run that has one, by run.init_from.")
        if not policy.end_tokens:
            raise DataError("The tokenizer has no end token, so answers could not end. Set its eos_token.")
        rewards = [(*resolved(each.reward), each.weight) for each in self.rewards]
        for _, reward, _ in rewards:
            if isinstance(reward, ReadsTokens):
                reward.check(tokenizer)
        encode = _encoder(policy, tokenizer)
        training, held_out = ([encode(*record) for record in records] for records in self._records())
        fitting = [self._fitting(prompts, seq_tokens) for prompts in (training, held_out)]
        ends = tuple(_stop_token(tokenizer, text) for text in self.stop)
        return _Prompts(tokenizer, rewards, self.max_tokens, ends, *fitting)

    def _records(self) -> tuple[list[Record], list[Record]]:
        held_out = [] if self.held_out is None else read_records(self.held_out, "data.environment.held_out")
        return read_records(self.source, "data.environment.source"), held_out

    def _fitting(self, prompts: "Sequence[_Prompt]", seq_tokens: int) -> "list[_Prompt]":
        longest = max(prompts, key=lambda each: len(each.tokens), default=None)
        if longest is not None and len(longest.tokens) >= seq_tokens and self.too_long == "error":
            raise DataError(
                f"{longest.name}: the prompt has {len(longest.tokens)} tokens, but data.seq_tokens is {seq_tokens}, "
                "which leaves no room for an answer. Raise it, or drop such prompts by "
                "data.environment.too_long: drop."
            )
        return [each for each in prompts if len(each.tokens) < seq_tokens]


@dataclass(frozen=True)
class _Prompt:
    """A tokenized prompt; `images` reads its images."""

    name: str
    text: str
    tokens: tuple[int, ...]
    record: Mapping[str, Any]
    images: Callable[[], tuple[PromptImage, ...]] = tuple


def _stop_token(tokenizer: Tokenizer, text: str) -> int:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if len(tokens) != 1:
        raise DataError(
            f"data.environment.stop: the tokenizer encodes {text!r} as {len(tokens)} tokens, but only a single token "
            "can end an answer."
        )
    return tokens[0]


def _encoder(policy: GenerativeCheckpoint, tokenizer: Tokenizer) -> Callable[[str, Mapping[str, Any]], _Prompt]:
    """Returns a function that encodes a record's prompt, with the chat template if it holds messages."""
    from stack_core.text.chat_template import ChatTemplate  # loads Jinja

    reader, template = image_reader_of(policy), None
    if policy.chat_template is not None:
        template = ChatTemplate(policy.chat_template, policy.special_tokens, images=reader is not None)

    @functools.lru_cache(_READ_PROMPTS)
    def read(urls: tuple[str, ...], tokens: tuple[int, ...]) -> tuple[PromptImage, ...]:
        assert reader is not None
        return place_images(tokens, reader, [reader.read(load_image(url)) for url in urls])

    def encode(name: str, record: Mapping[str, Any]) -> _Prompt:
        rest = {key: value for key, value in record.items() if key != "prompt"}
        prompt = record["prompt"]
        if isinstance(prompt, str):
            return _Prompt(name, prompt, tuple(tokenizer.encode(prompt)), rest)
        if template is None:
            raise DataError(
                f"{name} holds messages, but the tokenizer has no chat template. Write the prompt as a text."
            )
        urls = list[str]()

        def load(url: str) -> bytes:
            urls.append(resolve_url(url, Path(name.rpartition(":")[0]).parent))
            return load_image(urls[-1])

        try:
            messages, files = take_images(prompt, load)
            # Pixels are read again by the episodes, because the images of all prompts may not fit in memory.
            sizes = [require_reader(reader).measure(each) for each in files]
            text = template.render(messages, **template.options_of(record))
            text = expand_images(text, require_reader(reader), sizes) if files else text
        except ChatTemplateError as error:
            raise ChatTemplateError(f"{name}: {error}", parameter=error.parameter) from error
        except DataError as error:
            raise DataError(f"{name}: {error}") from error
        tokens = tuple(tokenizer.encode(text, add_special_tokens=False))
        return _Prompt(name, text, tokens, rest, functools.partial(read, tuple(urls), tokens) if urls else tuple)

    return encode


class _Prompts:
    def __init__(
        self,
        tokenizer: Tokenizer,
        rewards: Sequence[tuple[str, Reward, float]],
        max_tokens: int,
        stop_tokens: tuple[int, ...],
        training: Sequence[_Prompt],
        held_out: Sequence[_Prompt],
    ) -> None:
        self._tokenizer, self._rewards = tokenizer, rewards
        self._max_tokens, self._stop_tokens = max_tokens, stop_tokens
        self._training, self._held_out = training, held_out
        self.training, self.held_out = len(training), len(held_out)

    def episode(self, task: int, *, held_out: bool = False) -> Environment:
        prompt = self._prompt(task, held_out=held_out)
        return _Episode(prompt, self._tokenizer, self._rewards, self._max_tokens, self._stop_tokens)

    def name(self, task: int, *, held_out: bool = False) -> str:
        return self._prompt(task, held_out=held_out).name

    def text(self, tokens: tuple[int, ...]) -> str:
        return self._tokenizer.decode(tokens)

    def _prompt(self, task: int, *, held_out: bool) -> _Prompt:
        return (self._held_out if held_out else self._training)[task]


@dataclass
class _Episode:
    prompt: _Prompt
    tokenizer: Tokenizer
    rewards: Sequence[tuple[str, Reward, float]]
    max_tokens: int
    stop_tokens: tuple[int, ...]
    _images: tuple[PromptImage, ...] = ()

    async def reset(self) -> Observation:
        self._images = self.prompt.images()
        return Observation(
            tokens=self.prompt.tokens,
            max_tokens=self.max_tokens,
            stop_tokens=self.stop_tokens,
            images=self._images,
        )

    async def step(self, action: Action) -> StepResult:
        is_finished = action.finish_reason == "stop"
        completion = Completion(
            prompt=self.prompt.text,
            text=self.tokenizer.decode(action.tokens[:-1] if is_finished else action.tokens),
            tokens=action.tokens,
            is_finished=is_finished,
            record=self.prompt.record,
            prompt_tokens=self.prompt.tokens,
            images=self._images,
        )
        score = await total_score(self.rewards, completion)
        return StepResult(reward=score.value, verdict=score.verdict, facts=score.facts, parsed=score.parsed)

    async def close(self) -> None: ...
