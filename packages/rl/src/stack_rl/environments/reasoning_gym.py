"""`environment.name: reasoning_gym`: generated tasks of reasoning-gym, scored by its own scorers."""

import asyncio
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError, nearest
from stack_core.abi.formats import GenerativeCheckpoint
from stack_rl.contracts import Environment, Tasks
from stack_rl.environments.messages import Message, MessageEnvironment, Reply, renderer_of
from stack_rl.environments.optional import optional_module
from stack_rl.environments.tasks import ListedTasks

__all__ = ["GeneratedTask", "ReasoningGymConfig"]

_CACHED_ENTRIES = 4096


@config
class GeneratedTask:
    """A task generator of reasoning-gym.

    Attributes:
      task: name in reasoning-gym's registry, such as "chain_sum".
      settings: fields of the generator's config, without `seed` and `size`.
    """

    task: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def _generated(task: Any) -> Any:
    return GeneratedTask(task=task) if isinstance(task, str) else task


@config
class ReasoningGymConfig:
    """Questions of reasoning-gym with a single answer each; the reward is the score of the task's own scorer.

    Task numbers alternate between the generators, so each has the same share; for other shares, mix several
    environments. Held-out questions have other numbers of the same generators. Generators with few
    possible questions may repeat a training question there.

    The scorer receives the text of the last `answer_tag`, as in reasoning-gym's own evaluation. If the answer lacks the
    tag, a token limit cut the answer, or the scorer raises, the reward is the score of None and the verdict is
    "unparsed". Scorers run in the trainer's process, without a sandbox.

    Attributes:
      tasks: generators, by name or as a mapping of `task` and `settings`.
      name: selects this environment.
      size: number of training questions per generator.
      held_out: number of evaluation questions per generator.
      seed: seed of the generators; None uses the run's seed.
      system_prompt: name of a system prompt of reasoning-gym ("default", "simple", "direct", ...), a text, or None.
      answer_tag: name of the tag around the answer; None scores the complete text.
      max_tokens: maximum number of tokens per answer.

    Source: Stojanovski et al., Reasoning Gym, 2025 (arXiv:2505.24760).
    """

    tasks: Annotated[tuple[Annotated[GeneratedTask, BeforeValidator(_generated)], ...], Field(min_length=1)]
    name: Literal["reasoning_gym"] = "reasoning_gym"
    size: PositiveInt = 500
    held_out: NonNegativeInt = 64
    seed: NonNegativeInt | None = None
    system_prompt: str | None = "default"
    answer_tag: Annotated[str, Field(min_length=1)] | None = "answer"
    max_tokens: PositiveInt = 512

    def check(self, model: Any) -> None:
        self._datasets(0)

    def build(self, policy: GenerativeCheckpoint, *, seq_tokens: int, seed: int) -> Tasks:
        datasets = self._datasets(seed if self.seed is None else self.seed)
        renderer = renderer_of(policy)
        # All attempts of a group share a question, and some generators are slow.
        entry = functools.lru_cache(_CACHED_ENTRIES)(lambda number, place: datasets[number][place])

        def start(question: tuple[int, int]) -> Environment:
            number, _ = question
            conversation = _Question(self, datasets[number], entry(*question))
            return MessageEnvironment(conversation, renderer, max_tokens=self.max_tokens, max_turns=1)

        def label(question: tuple[int, int]) -> str:
            number, place = question
            return f"{self.tasks[number].task} {place}"

        # The generators alternate, which gives each the same share of consecutive tasks.
        places = [(number, place) for place in range(self.size + self.held_out) for number in range(len(datasets))]
        first = self.size * len(datasets)
        return ListedTasks(places[:first], places[first:], start=start, label=label, renderer=renderer)

    def _datasets(self, seed: int) -> list[Any]:
        """Creates the generators.

        Raises:
          ConfigError: reasoning-gym is not installed, lacks a task, or refuses its settings.
        """
        optional_module("reasoning_gym", environment=self.name, extra="reasoning-gym")
        factory = optional_module("reasoning_gym.factory", environment=self.name, extra="reasoning-gym")
        found = []
        for each in self.tasks:
            if each.task not in factory.DATASETS:
                close = nearest(each.task, factory.DATASETS)
                raise ConfigError(
                    f"reasoning-gym has no task {each.task!r}.{close} `reasoning_gym.factory.DATASETS` lists all "
                    f"{len(factory.DATASETS)}."
                )
            if refused := sorted({"seed", "size"} & set(each.settings)):
                raise ConfigError(
                    f"settings.{refused[0]} of the task {each.task!r} would be overwritten. Set "
                    f"data.environment.{refused[0]} instead."
                )
            # A question depends on the seed plus its index, so the held-out questions are those behind the training's.
            places = {"seed": seed, "size": self.size + self.held_out}
            try:
                found.append(factory.create_dataset(each.task, **each.settings, **places))
            except Exception as error:  # configs of reasoning-gym check themselves by assertions and TypeErrors
                raise ConfigError(
                    f"reasoning-gym refuses the settings {dict(each.settings)!r} of {each.task!r}: "
                    f"{type(error).__name__}: {error}"
                ) from error
        return found


@dataclass
class _Question:
    settings: ReasoningGymConfig
    dataset: Any
    entry: Mapping[str, Any]

    async def begin(self) -> Sequence[Message]:
        from reasoning_gym.utils import SYSTEM_PROMPTS

        system = self.settings.system_prompt
        begin = [] if system is None else [{"role": "system", "content": SYSTEM_PROMPTS.get(system, system)}]
        return [*begin, {"role": "user", "content": self.entry["question"]}]

    async def reply(self, text: str, *, is_finished: bool, tokens: tuple[int, ...]) -> Reply:
        from reasoning_gym.utils import extract_answer

        answer: str | None = text if is_finished else None
        if answer is not None and self.settings.answer_tag is not None:
            answer = extract_answer(answer, tag_name=self.settings.answer_tag)
        score = None if answer is None else await self._score(answer)
        if score is None:
            return Reply(reward=await self._score(None) or 0.0, verdict="unparsed")
        return Reply(reward=score, verdict="correct" if score >= 1 else "wrong")

    async def _score(self, answer: str | None) -> float | None:
        """Returns the scorer's result; None if the scorer cannot parse the answer."""
        # On a thread, because some scorers evaluate the expression of an answer, which may take arbitrarily long.
        try:
            return float(await asyncio.to_thread(self.dataset.score_answer, answer=answer, entry=self.entry))
        except Exception:  # some scorers raise ValueError and others for a text of another form, or for None
            return None

    async def close(self) -> None: ...
