"""Activations with static ranges: where a program has them, what they span there, and their codes.

A site is one operand of one operation. It is named by the parameter that the activation is multiplied with, so that all
functions of a model find it, whatever the operation is called there; where the parameter is in several products, by
these operations, too. A site of a product of two activations is named by the operation and the operand.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from stack_quant.errors import QuantError
from stack_quant.scales import Range
from stack_quant.spec import ArraySpec
from stack_quant.streams import RangeStatistics, empty_statistics, observe, observed_range
from stack_quant.transform.interpreter import Interpreter

__all__ = ["Site", "SiteKey", "site_names", "static_activation"]


class SiteKey(NamedTuple):
    """Where a site is in one program.

    Attributes:
      path: of the parameter that the activation is multiplied with; None for a product of two activations.
      operand: the names of the operation and the operand.
      place: of the operation, as `Interpreter.place`.
    """

    path: str | None
    operand: str
    place: tuple[int, ...]

    @property
    def base(self) -> str:
        """The name, if no other site has it."""
        return self.operand if self.path is None else self.path


def site_names(keys: Iterable[SiteKey]) -> dict[SiteKey, str]:
    """Names the sites of one program: "path", or "path@operation/operand" of a parameter in several products.

    Sites that are still alike are numbered in the order of the program: "path@operation/operand#2".
    """
    keys = list(keys)
    bases = Counter(key.base for key in keys)
    names = {key: key.base if key.path is None or bases[key.base] == 1 else f"{key.path}@{key.operand}" for key in keys}
    counts, numbers = Counter(names.values()), Counter[str]()
    for key, name in names.items():
        numbers[name] += 1
        names[key] = name if counts[name] == 1 else f"{name}#{numbers[name]}"
    return names


@dataclass(frozen=True)
class Site:
    """A place in a program whose activations share a range.

    Its range has the shape `[*layers, tiles]`.

    Attributes:
      layers: how many trips each of the loops around it has whose trips have ranges of their own, the outermost first.
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


def static_activation(interpreter: Interpreter, key: SiteKey, array: Any, spec: ArraySpec) -> Any:
    """Quantizes an activation by the range of its site; while ranges are measured, returns it as it is.

    Args:
      spec: with one scale for all, or for each tile.

    Raises:
      QuantError: no range was measured there.
    """
    shape = spec.tiling(array.shape).scale_shape
    tiles = max(shape, default=1)
    loops = [loop for loop in interpreter.loops if loop.over_parameters or key.path is not None]
    layers, index = tuple(loop.trips for loop in loops), tuple(loop.trip for loop in loops)
    if interpreter.ranges is None and not interpreter.measured:
        interpreter.sites.setdefault(key, Site(spec, layers, tiles))
        return interpreter.treatment.method.activation(array, spec, None)
    name = interpreter.site_names[key]
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
