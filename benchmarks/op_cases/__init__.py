"""The calls that `ops_vs_peers` compares, one file an op, each with a tuple `CASES`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

__all__ = ["TOLERANCES", "Case", "forward_and_gradient", "normal"]

TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call, as every contender makes it.

    Contenders are functions of the operands by position. They are jitted, and import what not everybody has when they
    are called. "stack" calls the op as models do and "core" names its reference; the others are peers.

    Attributes:
      name: sizes, dtype and options, for people.
      operands: draws the operands, pytrees of arrays, from a generator that is always seeded alike.
      prepare: for a contender that takes operands in a form of its own: what makes them from `operands`, before
        anything is measured.
      stands_for: for a contender whose own form rounds the operands to other values: makes the operands that its form
        stands for, at which `exact` computes what it is compared with. Otherwise `operands`.
      gradient: positions of the operands that gradients are taken of, of the output's product with a fixed cotangent;
        none compares the forward pass alone.
      exact: the function that is right; "core" if it is not given.
      exact_dtype: what `exact` computes in: float32 for calls that take too long in float64.
      tolerance: how far an output or gradient may be off, over its largest entry; by default that of its dtype.
      memory: whether each contender's peak memory is measured as well.
    """

    name: str
    operands: Callable[[np.random.Generator], tuple[Any, ...]]
    contenders: Mapping[str, Callable[..., Any]]
    prepare: Mapping[str, Callable[..., tuple[Any, ...]]] = field(default_factory=dict)
    stands_for: Mapping[str, Callable[..., tuple[Any, ...]]] = field(default_factory=dict)
    gradient: tuple[int, ...] = ()
    exact: Callable[..., Any] | None = None
    exact_dtype: str = "float64"
    tolerance: float | None = None
    memory: bool = False

    def drawn(self) -> tuple[Any, ...]:
        """The operands, on the device."""
        return jax.block_until_ready(jax.device_put(self.operands(np.random.default_rng(0))))

    def prepared(self, contender: str, operands: tuple[Any, ...]) -> tuple[Any, ...]:
        """The operands in the form that a contender takes."""
        return jax.block_until_ready(self.prepare[contender](*operands)) if contender in self.prepare else operands

    def directed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function itself, or one that returns its output and the gradients."""
        if not self.gradient:
            return function

        def output_and_gradients(*operands: Any) -> Any:
            def of_moving(*moving: Any) -> Any:
                given = dict(zip(self.gradient, moving, strict=True))
                return function(*(given.get(i, operand) for i, operand in enumerate(operands)))

            output, vjp = jax.vjp(of_moving, *(operands[i] for i in self.gradient))
            return output, vjp(jax.tree.map(_cotangent, output))

        return output_and_gradients

    def allowed(self, dtype: Any) -> float:
        """The tolerance of an array of that dtype."""
        return TOLERANCES[str(dtype)] if self.tolerance is None else self.tolerance


def _cotangent(output: jax.Array) -> jax.Array:
    """Irregular entries from -1 to 1 that no compiler sees through, so cheap that it may form them at every use.

    They have 8 bits: they are the same in every dtype.
    """
    mixed = (jax.lax.iota(jax.numpy.uint32, output.size) * 1640531527) >> 24
    return (mixed.astype(jax.numpy.float32) * 2.0**-7 - 1).reshape(output.shape).astype(output.dtype)


def forward_and_gradient(case: Case, moving: Sequence[int]) -> list[Case]:
    """The case, and another that takes gradients of the operands at these positions too."""
    return [case, replace(case, gradient=tuple(moving))]


def normal(rng: np.random.Generator, shape: Sequence[int], dtype: str, scale: float = 1.0) -> np.ndarray:
    """Normal deviates of that standard deviation."""
    return np.asarray(scale * rng.standard_normal(shape, np.float32), jax.numpy.dtype(dtype))
