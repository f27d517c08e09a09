"""Measurement of the static ranges of a model's activations over a stream of calls."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stack_quant.errors import QuantError, RuleError
from stack_quant.scales import Range
from stack_quant.spec import ArraySpec
from stack_quant.streams import RangeStatistics, observed_range
from stack_quant.transform.interpreter import ResolvedRules
from stack_quant.transform.program import Parameters, Program, is_array, trace
from stack_quant.transform.sites import Site

__all__ = ["Call", "call_arguments", "static_ranges"]

Call = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and keyword arguments of a call."""

_Step = Callable[..., Mapping[str, RangeStatistics]]


def static_ranges(
    fn: Callable[..., Any],
    parameters: Parameters,
    resolved: ResolvedRules,
    sites: Mapping[str, Site],
    stream: Iterable[Call] | None,
) -> dict[str, Range]:
    """Measures the range of each site in floating point, over a stream of calls `fn(params, *args, **kwargs)`.

    If the parameters are shapes, the result is the shapes of the ranges.

    Args:
      parameters: floating parameters.
      sites: sites of activations with static ranges, by name.
      stream: calls of any batch and sequence sizes. The program is compiled once per size.

    Raises:
      RuleError: there are sites but no calls.
      QuantError: activations contain NaN or infinities, or none of the calls reaches a site.
    """
    arrays = parameters.arrays
    if all(isinstance(array, jax.ShapeDtypeStruct) for array in arrays.values()):
        return {name: site.abstract_range() for name, site in sites.items()}
    if not sites:
        return {}
    # Rounded activations would distort the ranges of later operations.
    in_float = dataclasses.replace(resolved, method=dataclasses.replace(resolved.method, activation=_as_it_is))
    statistics: Mapping[str, RangeStatistics] = {name: site.empty() for name, site in sites.items()}
    # A list instead of a dict, because arguments that are not arrays may be unhashable.
    steps: list[tuple[Any, _Step]] = []
    for args, kwargs in stream or ():
        arguments, signature = call_arguments(args, kwargs)
        step = next((step for known, step in steps if known == signature), None)
        if step is None:
            step = _step(trace(fn, parameters, *args, **kwargs), in_float, sites)
            steps.append((signature, step))
        statistics = step(statistics, arrays, arguments)
    if not steps:
        raise RuleError(
            f"Rules require the static ranges of {len(sites)} activations, the first at {next(iter(sites))}, which are "
            "measured over batches, but none were given. Give some as `stream`, or leave out `static_ranges` and "
            "moving averages."
        )
    _check_seen(statistics)
    return _finite({name: observed_range(found) for name, found in statistics.items()})


def _step(program: Program, resolved: ResolvedRules, sites: Mapping[str, Site]) -> _Step:
    return jax.jit(functools.partial(program.measure, resolved=resolved, sites=sites))


def call_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """Returns the arrays among the arguments, and a signature that is equal if the same traced program applies."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    kinds = [(leaf.shape, leaf.dtype) if is_array(leaf) else leaf for leaf in leaves]
    return [leaf for leaf in leaves if is_array(leaf)], (structure, kinds)


def _as_it_is(array: Any, spec: ArraySpec, span: Range | None) -> Any:
    return array


def _check_seen(statistics: Mapping[str, RangeStatistics]) -> None:
    unseen = [name for name, found in statistics.items() if not jnp.all(found.weight > 0)]
    if unseen:
        raise QuantError(
            f"No batch reached the activations at {', '.join(unseen)}, which are in a branch that was not taken. "
            "Give batches that take it as `stream`, or leave these activations in float."
        )


def _finite(ranges: dict[str, Range]) -> dict[str, Range]:
    finite = {name: all(jnp.isfinite(end).all() for end in jax.tree.leaves(span)) for name, span in ranges.items()}
    broken = [name for name, good in finite.items() if not good]
    if broken:
        raise QuantError(
            f"The activations at {', '.join(broken)} hold NaN or infinities for some batch. "
            "Correct the model or the data, or leave these activations in float."
        )
    return ranges
