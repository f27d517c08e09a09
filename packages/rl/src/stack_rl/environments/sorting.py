"""`environment.name: sorting`: digits to sort, a task with answers of uneven lengths for a tiny policy from scratch."""

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_rl.contracts import Action, Environment, Observation, StepResult, Tasks
from stack_rl.environments.symbols import SymbolTasks

__all__ = ["SortingConfig"]

_DIGITS = 10
_SEPARATOR, _END = 10, 11
_NAMES = (*map(str, range(_DIGITS)), "|", ".")


@config
class SortingConfig:
    """A row of 1 to `max_digits` different digits; the task is to write them in ascending order and to end the answer.

    The prompt is `3 1 2 |` and the right answer `1 2 3 .`. The reward is the number of tokens before the first
    difference from the right answer, divided by its length with the end token: 1 for the right answer, and less for
    every other one. The model needs 12 tokens: the digits, `|` and the end token `.`.

    Attributes:
      name: selects this environment.
      max_digits: maximum number of digits.
      symbols: number of digits that occur, 0 to `symbols - 1`.
      max_tokens: maximum number of tokens of an answer; more than the right answer needs, so that answers can be too
        long.
      held_out: number of evaluation tasks.
    """

    name: Literal["sorting"] = "sorting"
    max_digits: PositiveInt = 4
    symbols: Annotated[int, Field(ge=2, le=_DIGITS)] = _DIGITS
    max_tokens: PositiveInt = 8
    held_out: NonNegativeInt = 0

    def __post_init__(self) -> None:
        if self.symbols < self.max_digits:
            raise ConfigError(
                f"environment.symbols is {self.symbols}, but a row has up to {self.max_digits} different digits. Raise "
                "it, or lower environment.max_digits."
            )
        if self.max_tokens <= self.max_digits:
            raise ConfigError(
                f"environment.max_tokens is {self.max_tokens}, but sorting {self.max_digits} digits takes "
                f"{self.max_digits + 1} tokens, including the end token. Raise it, or lower environment.max_digits."
            )

    def check(self, model: Any) -> None:
        if model.vocab_size < len(_NAMES):
            raise ConfigError(
                f"model.vocab_size is {model.vocab_size}, but the environment 'sorting' has {len(_NAMES)} tokens."
            )

    def build(self, policy: GenerativeCheckpoint, *, seq_tokens: int, seed: int) -> Tasks:
        needed = self.max_digits + 1 + self.max_tokens
        if seq_tokens < needed:
            raise ConfigError(
                f"data.seq_tokens is {seq_tokens}; an episode of 'sorting' has up to {needed} tokens: "
                f"{self.max_digits} digits, a separator and environment.max_tokens."
            )
        return SymbolTasks(seed, self.held_out, start=self._start, label=self.name, symbols=_NAMES)

    def _start(self, rng: np.random.Generator) -> Environment:
        count = int(rng.integers(1, self.max_digits + 1))
        digits = rng.choice(self.symbols, size=count, replace=False)
        return _Episode(tuple(map(int, digits)), self.max_tokens)


class _Episode:
    def __init__(self, digits: tuple[int, ...], max_tokens: int) -> None:
        self._digits, self._max_tokens = digits, max_tokens

    async def reset(self) -> Observation:
        return Observation(tokens=(*self._digits, _SEPARATOR), max_tokens=self._max_tokens, stop_tokens=(_END,))

    async def step(self, action: Action) -> StepResult:
        right = (*sorted(self._digits), _END)
        same = 0
        while same < min(len(right), len(action.tokens)) and action.tokens[same] == right[same]:
            same += 1
        # An answer ends with its first end token, so no token follows a match of all.
        return StepResult(reward=same / len(right), verdict="correct" if same == len(right) else "wrong")

    async def close(self) -> None: ...
