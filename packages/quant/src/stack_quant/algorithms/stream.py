"""Runs of algorithms over the parameters of a function, in one pass over a stream of calls."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stack_core import ops
from stack_core.abi.errors import ShapeError
from stack_core.ops.building import is_quantized
from stack_quant.algorithms import Weight, algorithm
from stack_quant.conversion import fake_quantize
from stack_quant.errors import QuantError, RuleError
from stack_quant.measuring import Call
from stack_quant.qarray import QArray
from stack_quant.scales import Range
from stack_quant.spec import ArraySpec
from stack_quant.transform.interpreter import Interpreter, ResolvedRules
from stack_quant.transform.layout import Layout
from stack_quant.transform.program import Parameters, is_array, trace
from stack_quant.transform.sequential import Product, Replacements, Slice, run_replacing

__all__ = ["run_algorithms"]


def run_algorithms(
    fn: Callable[..., Any],
    parameters: Parameters,
    rounded: Mapping[str, Any],
    resolved: ResolvedRules,
    looked_up: Collection[str],
    calls: Iterable[Call] | None,
) -> dict[str, QArray]:
    """Quantizes the parameters whose rules have an algorithm. Returns them by path.

    The inputs of a product are computed with the parameters quantized before it and with rounded activations. Tables
    without a product stay rounded to the nearest.

    Args:
      parameters: floating parameters; if they are shapes, nothing is computed.
      rounded: all parameters, with the quantized ones rounded to the nearest.
      looked_up: paths of parameters without any product.
      calls: the stream.

    Raises:
      RuleError: an algorithm needs a stream and there is none, or it cannot act on a parameter.
      ShapeError: the calls have different shapes.
      QuantError: inputs of a product contain NaN or infinities.
    """
    arrays = parameters.arrays
    if any(isinstance(array, jax.ShapeDtypeStruct) for array in arrays.values()):
        return {}
    chosen = {
        path: name
        for path in resolved.specs
        if path not in looked_up and (name := resolved.rules[resolved.of_path[path]].algorithm) is not None
    }
    _check_acts(resolved, chosen)
    plain = {path: name for path, name in chosen.items() if not algorithm(name)[0].needs_stream}
    done = {path: _without_stream(path, name, arrays[path], resolved.specs[path]) for path, name in plain.items()}
    streamed = {path: name for path, name in chosen.items() if path not in plain}
    if streamed:
        before = {
            path: arrays[path] if path in streamed else _floats(done.get(path, array))
            for path, array in rounded.items()
        }
        done |= _with_stream(fn, parameters, before, resolved, streamed, list(calls or ()))
    return done


def _floats(array: Any) -> Any:
    return ops.dequantize(array, array.dtype) if is_quantized(array) else array


def _check_acts(resolved: ResolvedRules, chosen: Mapping[str, str]) -> None:
    for number, rule in enumerate(resolved.rules):
        mine = [path for path in resolved.specs if resolved.of_path[path] == number]
        if rule.algorithm is not None and not rule.optional and mine and not any(path in chosen for path in mine):
            raise RuleError(
                f"Rule {number}, {rule}: its parameters are only looked up by index ({', '.join(mine)}), where "
                "each entry is best rounded to the nearest. Leave `algorithm` out of this rule."
            )


def _without_stream(path: str, name: str, array: jax.Array, spec: ArraySpec) -> QArray:
    found, options = algorithm(name)
    # Such an algorithm works on tiles, so the whole parameter is one slice in any arrangement.
    return found.quantize(Weight(path, array, spec, Layout.flat(array.shape)), options)


def _with_stream(
    fn: Callable[..., Any],
    parameters: Parameters,
    before: Mapping[str, jax.Array],
    resolved: ResolvedRules,
    chosen: Mapping[str, str],
    calls: Sequence[Call],
) -> dict[str, QArray]:
    if not calls:
        first = next(iter(chosen))
        raise RuleError(
            f"algorithm={chosen[first]!r} of {first} needs batches of inputs, but none were given. Give some as "
            "`stream`, or use an algorithm without data, such as 'hqq'."
        )
    args, kwargs = calls[0]
    program = trace(fn, parameters, *args, **kwargs)
    inputs = [_arrays(call, calls[0]) for call in calls]
    state = _Moments(before, resolved, chosen)
    new = Replacements(
        wanted=lambda path, op: path in chosen and resolved.of_parameter(path, op) is not None,
        observe=state.observe,
        finish=state.finish,
    )
    # Activations are rounded as at run time, and products stay in float as parameters are replaced by floats.
    method = dataclasses.replace(resolved.method, activation=_rounded_activation, keeps_ranges=False)
    run_replacing(program, before, inputs, Interpreter(dataclasses.replace(resolved, method=method)), new)
    return {path: state.joined(path, new.refused.get(path)) for path in chosen}


def _rounded_activation(array: jax.Array, spec: ArraySpec, span: Range | None) -> jax.Array:
    return fake_quantize(array, spec)


def _arrays(call: Call, first: Call) -> list[Any]:
    leaves, structure = jax.tree.flatten(call)
    expected, wanted = jax.tree.flatten(first)
    shapes = [getattr(leaf, "shape", leaf) for leaf in leaves], [getattr(leaf, "shape", leaf) for leaf in expected]
    if structure != wanted or shapes[0] != shapes[1]:
        raise ShapeError(
            f"The batches of the stream have different shapes: {shapes[1]}, then {shapes[0]}. An algorithm advances "
            "all batches together, so give batches of one shape."
        )
    return [leaf for leaf in leaves if is_array(leaf)]


class _Moments:
    """The second moments of the current products, and the quantized slices.

    Args:
      arrays: floating parameters by path.
      chosen: algorithm of each parameter, by path.
    """

    def __init__(self, arrays: Mapping[str, jax.Array], resolved: ResolvedRules, chosen: Mapping[str, str]) -> None:
        self._arrays, self._resolved, self._chosen = arrays, resolved, chosen
        self._open: dict[Slice, tuple[Layout, jax.Array, int]] = {}
        self._done: dict[Slice, QArray] = {}

    def observe(self, product: Product) -> None:
        """Adds the inputs of one call."""
        batch, _, entries = product.inputs.shape
        _, so_far, rows = self._open.get(product.key, (None, jnp.zeros((batch, entries, entries), jnp.float32), 0))
        self._open[product.key] = (
            product.layout,
            _add_moments(so_far, product.inputs),
            rows + product.inputs.shape[1],
        )

    def finish(self, key: Slice) -> jax.Array:
        """Quantizes a slice by the moments of its product, and returns its values."""
        (path, index), (layout, moments, rows) = key, self._open.pop(key)
        if not jnp.isfinite(moments).all():
            raise QuantError(
                f"The inputs of the product with {path} hold NaN or infinities for some batch of the stream. Correct "
                "the model or the data, or leave this parameter without algorithm."
            )
        found, options = algorithm(self._chosen[path])
        spec = _of_slice(self._resolved.specs[path], len(index))
        weight = Weight(path, self._arrays[path][index], spec, layout, moments / rows)
        self._done[key] = found.quantize(weight, options)
        return _floats(self._done[key])

    def joined(self, path: str, reason: str | None) -> QArray:
        """Joins the slices of a parameter."""
        mine = {index: array for (own, index), array in self._done.items() if own == path}
        lead = self._arrays[path].shape[: len(next(iter(mine), ()))]
        expected = 1
        for size in lead:
            expected *= size
        if reason is not None or len(mine) != expected:
            raise RuleError(
                f"algorithm={self._chosen[path]!r} cannot act on {path}: "
                f"{reason or 'no batch of the stream reached all of its products'}. "
                "Give it a rule of its own without `algorithm`."
            )
        ordered = [mine[index] for index in sorted(mine)]
        if not lead:
            return ordered[0]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves).reshape(*lead, *leaves[0].shape), *ordered)


@jax.jit
def _add_moments(so_far: jax.Array, inputs: jax.Array) -> jax.Array:
    inputs = inputs.astype(jnp.float32)
    return so_far + jnp.einsum("brk,brl->bkl", inputs, inputs, precision="highest")


def _of_slice(spec: ArraySpec, leading: int) -> ArraySpec:
    """Returns the specification of a slice that lacks the leading axes, along which scales are separate."""
    if not leading:
        return spec
    channels = tuple(axis - leading for axis in spec.channel_axes if axis >= leading)
    return dataclasses.replace(
        spec,
        channel_axes=channels,
        tiles={axis - leading: size for axis, size in spec.tile_sizes.items() if axis >= leading},
    )
