"""Tasks that are listed: one record for each training task and for each evaluation task."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from stack_rl.contracts import Environment
from stack_rl.environments.messages import Renderer

__all__ = ["ListedTasks"]

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
        start: Callable[[R], Environment],
        label: Callable[[R], str],
        renderer: Renderer,
    ) -> None:
        self._training, self._evaluation = training, evaluation
        self._start, self._label, self._renderer = start, label, renderer
        self.training, self.held_out = len(training), len(evaluation)

    def episode(self, task: int, *, held_out: bool = False) -> Environment:
        return self._start((self._evaluation if held_out else self._training)[task])

    def name(self, task: int, *, held_out: bool = False) -> str:
        return self._label((self._evaluation if held_out else self._training)[task])

    def text(self, tokens: tuple[int, ...]) -> str:
        return self._renderer.written(tokens)
