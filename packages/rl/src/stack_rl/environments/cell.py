"""`environment.name: cell`: a two-turn game with a lookup tool, which a tiny policy learns from scratch."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_rl.contracts import Action, Observation, StepResult, Tasks
from stack_rl.environments.symbols import SymbolTasks

__all__ = ["CellConfig"]

_DIGITS = 10
_SEPARATOR, _NOTHING = 10, 11
_NAMES = (*map(str, range(_DIGITS)), "|", "?")


@config
class CellConfig:
    """A game about a row of hidden digits; the task is to report the digit of one cell.

    The prompt names a cell, `| 3 |`. The policy's first token names a cell to look up, and the observation is that
    cell's digit, or `?` if there is no such cell. The second token is the answer. The reward is 1 for the requested
    digit, else 0, so guessing earns 0.1. Tokens 0 to 9 are digits and cells, 10 is `|`, 11 is `?`.

    Attributes:
      name: selects this environment.
      cells: number of cells.
      held_out: number of tasks reserved for evaluation.
    """

    name: Literal["cell"] = "cell"
    cells: Annotated[int, Field(ge=2, le=_DIGITS)] = 6
    held_out: NonNegativeInt = 256

    def check(self, model: Any) -> None:
        if model.vocab_size < len(_NAMES):
            raise ConfigError(
                f"model.vocab_size is {model.vocab_size}, but the environment 'cell' has {len(_NAMES)} tokens."
            )

    def build(self, policy: GenerativeCheckpoint, *, seq_tokens: int, seed: int) -> Tasks:
        if seq_tokens < 6:
            raise ConfigError(f"data.seq_tokens is {seq_tokens}; an episode of 'cell' has 6 tokens. Raise it.")
        start = lambda rng: _Episode(rng.integers(_DIGITS, size=self.cells).tolist(), int(rng.integers(self.cells)))
        return SymbolTasks(seed, self.held_out, start=start, label=self.name, symbols=_NAMES)


class _Episode:
    def __init__(self, digits: list[int], target: int) -> None:
        self._digits, self._target = digits, target
        self._looked = False

    async def reset(self) -> Observation:
        return Observation(tokens=(_SEPARATOR, self._target, _SEPARATOR), max_tokens=1)

    async def step(self, action: Action) -> StepResult:
        (token,) = action.tokens
        if not self._looked:
            self._looked = True
            shown = self._digits[token] if token < len(self._digits) else _NOTHING
            return StepResult(observation=Observation(tokens=(shown,), max_tokens=1))
        right = token == self._digits[self._target]
        return StepResult(reward=float(right), verdict="correct" if right else "wrong")

    async def close(self) -> None: ...
