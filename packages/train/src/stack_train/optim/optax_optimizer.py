"""Adapter from Optax transformations to the optimizer interface."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import optax

from stack_core.abi.errors import ConfigError
from stack_core.abi.metrics import Metric
from stack_train.optim.axes import AxesTree

__all__ = ["OptaxOptimizer", "Optimizer", "as_optimizer"]


@runtime_checkable
class Optimizer(Protocol):
    """Interface between a trainer and its optimizer; `OptimizerConfig` documents the methods."""

    @property
    def averages(self) -> bool: ...
    def check(self, paths: Sequence[str]) -> None: ...
    def freezes(self, path: str) -> bool: ...
    def build(self, steps: int, axes: AxesTree) -> optax.GradientTransformation: ...
    def evaluation_params(self, params: Any, opt_state: Any) -> Any: ...
    def metrics(self, opt_state: Any, step: jax.Array, steps: int) -> dict[str, Metric]: ...


@dataclass(frozen=True)
class OptaxOptimizer:
    """An `Optimizer` around an Optax transformation, which has its own schedule, clipping and masks.

    Attributes:
      make: returns the transformation for a total number of updates.
    """

    make: Callable[[int], optax.GradientTransformation]
    averages: bool = False

    def check(self, paths: Sequence[str]) -> None:
        """Accepts every model, because an Optax transformation does not have parameter groups."""

    def freezes(self, path: str) -> bool:
        return False

    def build(self, steps: int, axes: AxesTree) -> optax.GradientTransformation:
        return self.make(steps)

    def evaluation_params(self, params: Any, opt_state: Any) -> Any:
        return params

    def metrics(self, opt_state: Any, step: jax.Array, steps: int) -> dict[str, Metric]:
        return {}


def as_optimizer(optimizer: Any) -> Optimizer:
    """Returns a config of `stack_train.optim` unchanged, and wraps others in an `OptaxOptimizer`.

    Args:
      optimizer: a config of `stack_train.optim`, an Optax transformation, or a config whose `build(steps)` returns one.

    Raises:
      ConfigError: `optimizer` is none of these.
    """
    if isinstance(optimizer, optax.GradientTransformation):
        return OptaxOptimizer(lambda steps: optimizer)
    # A class has the methods of the protocol too, but no values of its fields.
    if isinstance(optimizer, Optimizer) and not isinstance(optimizer, type):
        return optimizer
    if callable(build := getattr(optimizer, "build", None)) and not isinstance(optimizer, type):
        return OptaxOptimizer(build)
    raise ConfigError(
        f"The optimizer is {optimizer!r}; expected a config of stack_train.optim, such as "
        "AdamWConfig(learning_rate=3e-4), an Optax transformation such as optax.adamw(3e-4), or a config whose "
        "build(steps) returns one."
    )
