"""Sites of activations with static ranges: names, ranges and quantization.

A site is one operand of one operation. Its name is the path of the parameter that multiplies the activation, because
the operation may have different names in the functions of a model. If the parameter is in several products, the name
also contains the operation. The name of a site in a product of two activations consists of the operation and the
operand.
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
    """Location of a site in one program.

    Attributes:
      path: path of the parameter that multiplies the activation; None for a product of two activations.
      operand: names of the operation and the operand.
      place: position of the operation, as `Interpreter.place`.
    """

    path: str | None
    operand: str
    place: tuple[int, ...]

    @property
    def base(self) -> str:
        """The name of the site, if no other site has the same one."""
        return self.operand if self.path is None else self.path


def site_names(keys: Iterable[SiteKey]) -> dict[SiteKey, str]:
    """Names the sites of one program: "path", or "path@operation/operand" for a parameter in several products.

    Sites with the same name are numbered in the order of the program: "path@operation/operand#2".
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
    """A site, with a range of shape [*layers, tiles].

    Attributes:
      spec: specification by which the activation is quantized.
      layers: numbers of iterations of the enclosing loops with a separate range per iteration, the outermost first.
      tiles: number of tiles along the contracted axis, each with its own range.
    """

    spec: ArraySpec
    layers: tuple[int, ...]
    tiles: int

    def empty(self) -> RangeStatistics:
        """Returns the statistics of zero batches."""
        one = empty_statistics(ArraySpec(calibration=self.spec.calibration, symmetric=self.spec.symmetric), ())
        low, high = jax.tree.map(lambda end: jnp.zeros((*self.layers, self.tiles), end.dtype), (one.low, one.high))
        return RangeStatistics(low, high, jnp.zeros(self.layers, one.weight.dtype))

    def abstract_range(self) -> Range:
        """Returns the shapes of the range."""
        return jax.eval_shape(lambda: observed_range(self.empty()))


def static_activation(interpreter: Interpreter, key: SiteKey, array: Any, spec: ArraySpec) -> Any:
    """Quantizes an activation by the static range of its site.

    While sites are collected, the range is found at run time. While ranges are measured, the activation is observed and
    returned unchanged.

    Args:
      spec: specification with one scale for all entries, or one per tile.

    Raises:
      QuantError: the site's range was not measured.
    """
    shape = spec.tiling(array.shape).scale_shape
    # Only the contracted axis may have several static scales.
    tiles = max(shape, default=1)
    loops = [loop for loop in interpreter.loops if loop.over_parameters or key.path is not None]
    layers, index = tuple(loop.trips for loop in loops), tuple(loop.trip for loop in loops)
    if interpreter.ranges is None and not interpreter.measured:
        # A loop's body may be traced several times; the first visit fixes the order of the names.
        interpreter.sites.setdefault(key, Site(spec, layers, tiles))
        return interpreter.resolved.method.activation(array, spec, None)
    name = interpreter.site_names[key]
    held: Any = (interpreter.measured or interpreter.ranges or {}).get(name)
    if held is None or held.high.shape != (*layers, tiles):
        _refuse(interpreter, name, None if held is None else held.high.shape, (*layers, tiles))
    here = jax.tree.map(lambda part: part[index], held)
    low, high = None if here.low is None else here.low.reshape(shape), here.high.reshape(shape)
    if not interpreter.measured:
        return interpreter.resolved.method.activation(array, spec, Range(low, high))
    after = observe(RangeStatistics(low, high, here.weight), array, spec)
    interpreter.measured[name] = jax.tree.map(
        lambda all_, part: all_.at[index].set(part.reshape(all_.shape[len(index) :])), held, after
    )
    return array


def _refuse(interpreter: Interpreter, name: str, measured_shape: Any, needed_shape: tuple[int, ...]) -> None:
    known = ", ".join(sorted(interpreter.measured or interpreter.ranges or {}))
    what = "none was measured" if measured_shape is None else f"the measured range has shape {list(measured_shape)}"
    raise QuantError(
        f"The activation at {name} needs a static range of shape {list(needed_shape)}, [*layers, tiles]; {what}. "
        f"Measured: {known or 'none'}. Quantize the model with a `call` that uses it in the same way as this call."
    )
