"""Generated tasks of games whose tokens are symbols, for tiny policies without a tokenizer."""

from collections.abc import Callable, Sequence

import numpy as np

from stack_rl.contracts import Environment

__all__ = ["SymbolTasks"]


class SymbolTasks:
    """`Tasks` with unlimited generated tasks, each a function of the seed, its number and its split.

    Args:
      seed: seed of the run.
      evaluation: number of evaluation tasks.
      start: creates an episode with a generator of random numbers.
      label: name of the game for messages.
      symbols: text of each token id.
    """

    training: int | None = None

    def __init__(
        self,
        seed: int,
        evaluation: int,
        *,
        start: Callable[[np.random.Generator], Environment],
        label: str,
        symbols: Sequence[str],
    ) -> None:
        self._seed, self._start, self._label, self._symbols = seed, start, label, symbols
        self.held_out = evaluation

    def episode(self, task: int, *, held_out: bool = False) -> Environment:
        return self._start(np.random.default_rng([self._seed, held_out, task]))

    def name(self, task: int, *, held_out: bool = False) -> str:
        return f"{self._label} {'held out ' if held_out else ''}{task}"

    def text(self, tokens: tuple[int, ...]) -> str:
        symbols = self._symbols
        return " ".join(symbols[token] if token < len(symbols) else f"<{token}>" for token in tokens)
