"""Numbered tasks of conversations: one per record of a list, or one per seed."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np

from stack_rl.contracts import Environment, PlaysItself
from stack_rl.environments.messages import Renderer

__all__ = ["ListedTasks", "SeededTasks"]

R = TypeVar("R")


class ListedTasks(Generic[R]):
    """`Tasks` of conversations about the records of two lists.

    Args:
      training: records of the training tasks.
      evaluation: records of the evaluation tasks.
      start: returns a new episode about a record.
      label: returns the name of a record for messages.
      renderer: renderer of the conversations.
    """

    def __init__(
        self,
        training: Sequence[R],
        evaluation: Sequence[R],
        *,
        start: Callable[[R], Environment | PlaysItself],
        label: Callable[[R], str],
        renderer: Renderer,
    ) -> None:
        self._training, self._evaluation = training, evaluation
        self._start, self._label, self._renderer = start, label, renderer
        self.training, self.held_out = len(training), len(evaluation)

    def episode(self, task: int, *, held_out: bool = False) -> Environment | PlaysItself:
        return self._start((self._evaluation if held_out else self._training)[task])

    def name(self, task: int, *, held_out: bool = False) -> str:
        return self._label((self._evaluation if held_out else self._training)[task])

    def text(self, tokens: tuple[int, ...]) -> str:
        return self._renderer.display_text(tokens)


class SeededTasks:
    """`Tasks` of conversations with generated content, each with a different seed.

    Args:
      seed: seed of the run.
      evaluation: number of evaluation tasks.
      start: returns a new episode with a seed, a number below 2^31.
      label: name of the environment for messages.
      renderer: renderer of the conversations.
    """

    training: int | None = None

    def __init__(
        self, seed: int, evaluation: int, *, start: Callable[[int], Environment], label: str, renderer: Renderer
    ) -> None:
        self._seed, self._start, self._label, self._renderer = seed, start, label, renderer
        self.held_out = evaluation

    def episode(self, task: int, *, held_out: bool = False) -> Environment:
        return self._start(int(np.random.default_rng([self._seed, held_out, task]).integers(1 << 31)))

    def name(self, task: int, *, held_out: bool = False) -> str:
        return f"{self._label} {'held out ' if held_out else ''}{task}"

    def text(self, tokens: tuple[int, ...]) -> str:
        return self._renderer.display_text(tokens)
