"""Activations with static ranges: where a program has them, what they span there, and their codes.

A site is named by the parameter that the activation is multiplied with, so that all functions of a model find it; one
of a product of two activations, by the operation's name and the operand's.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from stack_quant.errors import QuantError, RuleError
from stack_quant.scales import Range
from stack_quant.spec import ArraySpec
from stack_quant.streams import RangeStatistics, empty_statistics, observe, observed_range
from stack_quant.transform.interpreter import Interpreter

__all__ = ["Site", "static_activation"]


@dataclass(frozen=True)
class Site:
    """A place in a program whose activations share a range.

    Its range has the shape `[*layers, tiles]`.

    Attributes:
      layers: how many layers each of the scans around it runs, the outermost first.
      tiles: how many parts of the contracted axis have ranges of their own.
    """

    spec: ArraySpec
    layers: tuple[int, ...]
    tiles: int

    def empty(self) -> RangeStatistics:
        """The statistics of no batch."""
        one = empty_statistics(ArraySpec(calibration=self.spec.calibration, symmetric=self.spec.symmetric), ())
        low, high = jax.tree.map(lambda end: jnp.zeros((*self.layers, self.tiles), end.dtype), (one.low, one.high))
        return RangeStatistics(low, high, jnp.zeros(self.layers, one.weight.dtype))

    def abstract_range(self) -> Range:
        """The shapes of its range."""
        return jax.eval_shape(lambda: observed_range(self.empty()))


def static_activation(interpreter: Interpreter, name: str, array: Any, spec: ArraySpec) -> Any:
    """An activation as the method has it, by the range of the site `name`; or, while ranges are measured, itself.

    Args:
      spec: with one scale for all, or for each tile.

    Raises:
      QuantError: no range was measured there.
      RuleError: activations of one name are in different loops.
    """
    shape = spec.tiling(array.shape).scale_shape
    tiles = max(shape, default=1)
    layers, index = tuple(count for count, _ in interpreter.layers), tuple(trip for _, trip in interpreter.layers)
    if interpreter.ranges is None and not interpreter.measured:
        found = Site(spec, layers, tiles)
        known = interpreter.sites.setdefault(name, found)
        if (known.layers, known.tiles) != (layers, tiles):
            raise RuleError(
                f"The activation at {name} has ranges of shape {[*known.layers, known.tiles]} in one place and "
                f"{[*layers, tiles]} in another. Give a rule of static ranges an `op` that is in one of them only."
            )
        return interpreter.treatment.method.activation(array, spec, None)
    held: Any = (interpreter.measured or interpreter.ranges or {}).get(name)
    if held is None or held.high.shape != (*layers, tiles):
        _refuse(interpreter, name, None if held is None else held.high.shape, (*layers, tiles))
    here = jax.tree.map(lambda part: part[index], held)
    low, high = None if here.low is None else here.low.reshape(shape), here.high.reshape(shape)
    if not interpreter.measured:
        return interpreter.treatment.method.activation(array, spec, Range(low, high))
    after = observe(RangeStatistics(low, high, here.weight), array, spec)
    interpreter.measured[name] = jax.tree.map(
        lambda all_, part: all_.at[index].set(part.reshape(all_.shape[len(index) :])), held, after
    )
    return array


def _refuse(interpreter: Interpreter, name: str, held: Any, wanted: tuple[int, ...]) -> None:
    known = ", ".join(sorted(interpreter.measured or interpreter.ranges or {}))
    what = "none was measured there" if held is None else f"that measured has {list(held)}"
    raise QuantError(
        f"The activation at {name} needs a static range of shape {list(wanted)}, [*layers, tiles]; {what}. Measured: "
        f"{known or 'none'}. Quantize the model with a `call` that uses it as it is used here."
    )
