"""Traced calls of functions of parameters, and their runs with quantized parameters."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stack_core.ops.building import is_quantized
from stack_core.ops.units import as_units
from stack_quant.scales import Range
from stack_quant.streams import RangeStatistics
from stack_quant.transform import adapters, control, core_ops, lookups, products, rearranging, stages
from stack_quant.transform.adapted import Factors
from stack_quant.transform.interpreter import Interpreter, ResolvedRules, Value
from stack_quant.transform.provenance import Source
from stack_quant.transform.sites import Site, site_names
from stack_quant.transform.versions import struct_like

__all__ = ["Parameters", "Program", "trace"]

HANDLED = (adapters, control, core_ops, lookups, products, rearranging, stages)
"""Modules that register the interpreter's handlers on import."""


@dataclass(frozen=True)
class Parameters:
    """A flattened pytree of parameters. Quantized parameters are leaves.

    Attributes:
      leaves: all leaves, including values other than arrays.
      paths: path of each leaf, with "/" between its segments.
      structure: tree structure.
    """

    leaves: tuple[Any, ...]
    paths: tuple[str, ...]
    structure: Any

    @classmethod
    def of(cls, tree: Any) -> "Parameters":
        """Flattens a pytree."""
        # A quantized array is a pytree, and here a single parameter.
        found, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_quantized)
        paths = tuple("/".join(map(_segment, keys)) for keys, _ in found)
        return cls(tuple(leaf for _, leaf in found), paths, structure)

    def tree(self, leaves: Sequence[Any]) -> Any:
        """Returns the pytree with other leaves."""
        return jax.tree.unflatten(self.structure, leaves)

    @property
    def arrays(self) -> dict[str, Any]:
        """Arrays among the leaves, by path."""
        return {path: leaf for path, leaf in zip(self.paths, self.leaves, strict=True) if is_array(leaf)}

    def with_arrays(self, arrays: Mapping[str, Any]) -> Any:
        """Returns the pytree with some arrays replaced, by path."""
        return self.tree([arrays.get(path, leaf) for path, leaf in zip(self.paths, self.leaves, strict=True)])


def _segment(key: Any) -> str:
    # JAX's keys of dicts, sequences and attributes name their content differently.
    for name in ("key", "idx", "name"):
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)


def is_array(leaf: Any) -> bool:
    """Returns whether a leaf is an array, a quantized array or the shape of an array."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct) or is_quantized(leaf)


@dataclass(frozen=True)
class Program:
    """A traced call.

    Attributes:
      jaxpr: jaxpr from the arrays of the parameters, followed by the arrays of the arguments, to the result's arrays.
      paths: paths of the parameters, in the order of the inputs.
      arguments: arrays among the arguments.
      result: function that inserts the arrays into the structure of the result.
    """

    jaxpr: Any
    paths: tuple[str, ...]
    arguments: tuple[Any, ...]
    result: Callable[[Sequence[Any]], Any]

    def run(
        self,
        parameters: Mapping[str, Any],
        resolved: ResolvedRules,
        *,
        ranges: Mapping[str, Range] | None = None,
        key: jax.Array | None = None,
        factors: Mapping[str, Factors] | None = None,
    ) -> Any:
        """Computes the result for parameters by path, some of which may be quantized.

        Args:
          ranges: static ranges of activations, by site.
          key: PRNG key of the stochastic rounding of gradients.
          factors: factors of the adapters, by path.
        """
        interpreter = self._interpreter(parameters, resolved, ranges, key, factors)
        return self.result(self._run(parameters, self.arguments, factors or {}, interpreter))

    def assign(
        self,
        parameters: Mapping[str, Any],
        resolved: ResolvedRules,
        *,
        ranges: Mapping[str, Range] | None = None,
        key: jax.Array | None = None,
        factors: Mapping[str, Factors] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Runs a function that returns a result and new values by path; see `run`.

        Quantized and adapted parameters that are returned unchanged are not new values: `nnx.jit`, for instance,
        returns all variables of a module.
        """
        interpreter = self._interpreter(parameters, resolved, ranges, key, factors)
        result, assigned = self.result(self._values(parameters, self.arguments, factors or {}, interpreter))
        changed = {path: value for path, value in assigned.items() if not _is_handed_on(path, value)}
        return jax.tree.map(
            lambda value: interpreter.plain(value) if isinstance(value, Value) else value, (result, changed)
        )

    def survey(
        self, parameters: Mapping[str, Any], resolved: ResolvedRules, factors: Mapping[str, Factors] | None = None
    ) -> Interpreter:
        """Collects the uses of parameters, the rows of the report and the sites of a run, without any computation."""
        interpreter = Interpreter(resolved)
        run = functools.partial(self._run, interpreter=interpreter)
        given = {path: parameters[path] for path in self.paths}
        jax.eval_shape(run, given, list(self.arguments), factors=dict(factors or {}))
        return interpreter

    def measure(
        self,
        statistics: Mapping[str, RangeStatistics],
        parameters: Mapping[str, Any],
        arguments: Sequence[Any],
        resolved: ResolvedRules,
        sites: Mapping[str, Site],
    ) -> Mapping[str, RangeStatistics]:
        """Returns the statistics of all sites after one more call, with floating parameters and other arguments."""
        # Each size of the arguments is another program, whose sites are named anew.
        names = site_names(self.survey(parameters, resolved).sites)
        interpreter = Interpreter(resolved, sites=dict(sites), measured=dict(statistics), site_names=names)
        self._run(parameters, arguments, {}, interpreter)
        return interpreter.measured

    def _interpreter(
        self,
        parameters: Mapping[str, Any],
        resolved: ResolvedRules,
        ranges: Mapping[str, Range] | None,
        key: jax.Array | None,
        factors: Mapping[str, Factors] | None,
    ) -> Interpreter:
        is_static = resolved.method.keeps_ranges and any(rule.is_static for rule in resolved.rules)
        # The names of sites need a survey of the program, which costs a trace.
        names = site_names(self.survey(parameters, resolved, factors).sites) if is_static else {}
        return Interpreter(resolved, key=key, ranges=dict(ranges or {}), site_names=names)

    def _run(
        self,
        parameters: Mapping[str, Any],
        arguments: Sequence[Any],
        factors: Mapping[str, Factors],
        interpreter: Interpreter,
    ) -> list[Any]:
        return list(map(interpreter.plain, self._values(parameters, arguments, factors, interpreter)))

    def _values(
        self,
        parameters: Mapping[str, Any],
        arguments: Sequence[Any],
        factors: Mapping[str, Factors],
        interpreter: Interpreter,
    ) -> list[Value]:
        held = [parameters[path] for path in self.paths]
        entered = map(interpreter.resolved.entered, self.paths, held)
        values = [
            Value(array, Source.of(path, array.shape), False, jnp.dtype(array.dtype))
            # Integers, such as tables of indices, do not count as parameters.
            if jnp.issubdtype(array.dtype, jnp.floating)
            else Value(array, None, False, array.dtype)
            for path, array in zip(self.paths, entered, strict=True)
        ]
        adapters = interpreter.resolved.adapters
        values = [
            dataclasses.replace(value, array=adapters[path].adapted(value.array, factors[path]))
            if path in factors
            else value
            for path, value in zip(self.paths, values, strict=True)
        ]
        values += [Value(array, None, True, array.dtype) for array in arguments]
        return interpreter.run(self.jaxpr, values)


def _is_handed_on(path: str, value: Any) -> bool:
    if not isinstance(value, Value) or not (value.is_quantized or value.is_adapted):
        return False
    # Transposed or sliced, it would keep its path but not its axes.
    return value.source == Source.of(path, value.shape)


def trace(fn: Callable[..., Any], parameters: Parameters, *args: Any, **kwargs: Any) -> Program:
    """Traces `fn(parameters, *args, **kwargs)` in float, with each call of a core op as one equation.

    Args:
      parameters: parameters of the function. Quantized ones are traced as their dequantized arrays.
      args: pytrees; leaves that are not arrays are passed unchanged.
    """
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_quantized)
    places = [place for place, leaf in enumerate(leaves) if is_array(leaf)]
    found: list[Any] = []

    def traced(floats: dict[str, Any], arrays: list[Any]) -> list[Any]:
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        given, named = jax.tree.unflatten(structure, filled)
        outputs, shape = jax.tree.flatten(fn(parameters.with_arrays(floats), *given, **named))
        # A jaxpr returns arrays only; everything else leaves the trace here.
        found[:] = outputs, shape
        return [output for output in outputs if is_array(output)]

    arguments = [leaves[place] for place in places]
    arrays = parameters.arrays
    # A list, as JAX would sort a dict by its keys, and inputs have the order of the parameters.
    floats = [
        struct_like(array, array.shape, array.dtype) if is_quantized(array) else array for array in arrays.values()
    ]
    with as_units():
        jaxpr = jax.make_jaxpr(lambda floats, arrays_: traced(dict(zip(arrays, floats, strict=True)), arrays_))(
            floats, arguments
        )
    outputs, shape = found

    def result(arrays: Sequence[Any]) -> Any:
        filled = iter(arrays)
        return jax.tree.unflatten(shape, [next(filled) if is_array(output) else output for output in outputs])

    return Program(jaxpr, tuple(arrays), tuple(arguments), result)
