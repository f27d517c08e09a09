"""Runs of algorithms over the parameters of a function, in one pass over a stream of calls."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stack_core import ops
from stack_core.abi.errors import ShapeError
from stack_core.ops.building import is_quantized
from stack_quant.algorithms import Weight, parse_algorithms
from stack_quant.algorithms.steps import Quantized, choose_codes
from stack_quant.conversion import fake_quantize
from stack_quant.errors import QuantError, RuleError
from stack_quant.measuring import Call
from stack_quant.scales import Range
from stack_quant.spec import ArraySpec
from stack_quant.transform.interpreter import Interpreter, ResolvedRules, Use
from stack_quant.transform.layout import Layout
from stack_quant.transform.program import Parameters, is_array, trace
from stack_quant.transform.sequential import Product, Replacements, Slice, run_replacing
from stack_quant.transformed import InputSpec

__all__ = ["arguments_of", "run_algorithms"]


def run_algorithms(
    fn: Callable[..., Any],
    parameters: Parameters,
    rounded: Mapping[str, Any],
    resolved: ResolvedRules,
    inputs: Mapping[str, InputSpec],
    uses: Sequence[Use],
    calls: Iterable[Call] | None,
) -> dict[str, Quantized]:
    """Quantizes the parameters whose rules have an algorithm. Returns them by path.

    Inputs of a product are computed with the parameters quantized so far and with rounded activations. Activations that
    an algorithm transforms stay in float. Tables without a product stay rounded to the nearest.

    Args:
      parameters: floating parameters; if they are shapes, nothing is computed.
      rounded: all parameters, with the quantized ones rounded to the nearest.
      inputs: form of the transform of the inputs, by path.
      uses: the uses of the parameters.
      calls: the stream.

    Raises:
      RuleError: an algorithm cannot act on a parameter, or needs a stream that is missing.
      ShapeError: the calls have different shapes.
      QuantError: inputs of a product contain NaN or infinities.
    """
    arrays = parameters.arrays
    if any(isinstance(array, jax.ShapeDtypeStruct) for array in arrays.values()):
        return {}
    multiplied = {use.path for use in uses if not use.is_lookup}
    chosen = {
        path: name
        for path in resolved.specs
        if path in multiplied and (name := resolved.rules[resolved.of_path[path]].algorithm) is not None
    }
    _check_acts(resolved, chosen)
    steps = {path: parse_algorithms(name) for path, name in chosen.items()}
    plain = [path for path in chosen if not any(step.needs_stream for step, _ in steps[path])]
    # Such an algorithm works on tiles and blocks, so the parameter is one slice in any arrangement.
    done = {
        path: choose_codes(
            Weight(path, arrays[path], resolved.specs[path], Layout.flat(arrays[path].shape), inputs=inputs.get(path)),
            steps[path],
        )
        for path in plain
    }
    streamed = {path: name for path, name in chosen.items() if path not in done}
    if streamed:
        before = {
            path: arrays[path] if path in streamed else _floats(done.get(path, array))
            for path, array in rounded.items()
        }
        corrected = _corrected([path for path in streamed if any(step.correct for step, _ in steps[path])], uses)
        done |= _with_stream(fn, parameters, before, resolved, inputs, streamed, corrected, list(calls or ()))
    return done


def _floats(array: Any) -> Any:
    return _dequantized(array) if is_quantized(array) else array


@jax.jit
def _dequantized(array: Any) -> jax.Array:
    return ops.dequantize(array, array.dtype)


@jax.jit
def _all_finite(array: jax.Array) -> jax.Array:
    return jnp.isfinite(array).all()


def _check_acts(resolved: ResolvedRules, chosen: Mapping[str, str]) -> None:
    for number, rule in enumerate(resolved.rules):
        mine = [path for path in resolved.specs if resolved.of_path[path] == number]
        if rule.algorithm is not None and not rule.optional and mine and not any(path in chosen for path in mine):
            raise RuleError(
                f"Rule {number}, {rule}: its parameters are only looked up by index ({', '.join(mine)}), where "
                "each entry is best rounded to the nearest. Leave `algorithm` out of this rule."
            )


def _corrected(paths: Sequence[str], uses: Sequence[Use]) -> set[str]:
    """Returns the paths that a correction suits, which fits one product with the same rows in the float model.

    Raises:
      RuleError: it suits none of several paths.
    """
    counts = Counter(use.path for use in uses)
    # Experts get their tokens in the order of the routing, which differs between the two models.
    experts = {use.path for use in uses if use.op.rpartition("/")[2] == "ragged_dot"}
    found = {path for path in paths if counts[path] == 1 and path not in experts}
    if paths and not found:
        raise RuleError(
            f"algorithm 'qep' corrects none of {', '.join(paths)}: it corrects parameters with one product that is no "
            "`ragged_dot`. Leave qep out, as in algorithm='gptq'."
        )
    return found


def _with_stream(
    fn: Callable[..., Any],
    parameters: Parameters,
    before: Mapping[str, jax.Array],
    resolved: ResolvedRules,
    inputs: Mapping[str, InputSpec],
    chosen: Mapping[str, str],
    corrected: Collection[str],
    calls: Sequence[Call],
) -> dict[str, Quantized]:
    if not calls:
        first = next(iter(chosen))
        raise RuleError(
            f"algorithm={chosen[first]!r} of {first} needs batches of inputs, but none were given. Give some as "
            "`stream`, or use an algorithm without data, such as 'hqq'."
        )
    args, kwargs = calls[0]
    program = trace(fn, parameters, *args, **kwargs)
    arguments = [arguments_of(call, calls[0]) for call in calls]
    state = _Moments(before, resolved, inputs, chosen, corrected)
    new = Replacements(
        wanted=lambda path, op: path in chosen and resolved.of_parameter(path, op) is not None,
        observe=state.observe,
        finish=state.finish,
    )
    # Activations are rounded as at run time, and products stay in float as parameters are replaced by floats. These
    # floats do not transform their inputs, whose rounding would therefore be another than at run time.
    activation = _float_activation if inputs else _rounded_activation
    method = dataclasses.replace(resolved.method, activation=activation, keeps_ranges=False)
    interpreter = Interpreter(dataclasses.replace(resolved, method=method))
    run_replacing(program, before, arguments, interpreter, new, with_float=bool(corrected))
    return {path: state.joined(path, new.refused.get(path)) for path in chosen}


def _rounded_activation(array: jax.Array, spec: ArraySpec, span: Range | None) -> jax.Array:
    return fake_quantize(array, spec)


def _float_activation(array: jax.Array, spec: ArraySpec, span: Range | None) -> jax.Array:
    return array


def arguments_of(call: Call, first: Call) -> list[Any]:
    """Returns the arrays of a call; raises a ShapeError if its shapes are not those of the first call."""
    leaves, structure = jax.tree.flatten(call)
    expected, wanted = jax.tree.flatten(first)
    shapes = [getattr(leaf, "shape", leaf) for leaf in leaves], [getattr(leaf, "shape", leaf) for leaf in expected]
    if structure != wanted or shapes[0] != shapes[1]:
        raise ShapeError(
            f"The batches of the stream have different shapes: {shapes[1]}, then {shapes[0]}. All batches advance "
            "together, so give batches of one shape."
        )
    return [leaf for leaf in leaves if is_array(leaf)]


class _Moments:
    """The statistics of the current products, and the quantized slices.

    Args:
      arrays: floating parameters by path.
      inputs: form of the transform of the inputs, by path.
      chosen: algorithm of each parameter, by path.
      corrected: paths whose algorithm reads the cross moments.
    """

    def __init__(
        self,
        arrays: Mapping[str, jax.Array],
        resolved: ResolvedRules,
        inputs: Mapping[str, InputSpec],
        chosen: Mapping[str, str],
        corrected: Collection[str],
    ) -> None:
        self._arrays, self._resolved, self._inputs, self._chosen = arrays, resolved, inputs, chosen
        self._corrected = corrected
        self._open: dict[Slice, tuple[Layout, jax.Array, jax.Array, int]] = {}
        self._cross: dict[Slice, jax.Array] = {}
        self._done: dict[Slice, Quantized] = {}

    def observe(self, product: Product) -> None:
        """Adds the inputs of one call."""
        batch, _, entries = product.inputs.shape
        start = (None, jnp.zeros((batch, entries, entries), jnp.float32), jnp.zeros((batch, entries), jnp.float32), 0)
        _, moments, largest, rows = self._open.get(product.key, start)
        moments, largest = _add_statistics(moments, largest, product.inputs)
        self._open[product.key] = (product.layout, moments, largest, rows + product.inputs.shape[1])
        if product.key[0] in self._corrected:
            before = self._cross.get(product.key, jnp.zeros_like(moments))
            self._cross[product.key] = _add_cross_moments(before, product.inputs, product.float_inputs)

    def finish(self, key: Slice) -> jax.Array:
        """Quantizes a slice by the moments of its product, and returns its values."""
        (path, index), (layout, moments, largest, rows) = key, self._open.pop(key)
        if not _all_finite(moments):
            raise QuantError(
                f"The inputs of the product with {path} hold NaN or infinities for some batch of the stream. Correct "
                "the model or the data, or leave this parameter without algorithm."
            )
        spec, inputs = _of_slice(self._resolved.specs[path], len(index)), self._inputs.get(path)
        inputs = None if inputs is None else inputs.of_slice(len(index))
        cross = self._cross.pop(key) / rows if key in self._cross else None
        weight = Weight(path, self._arrays[path][index], spec, layout, moments / rows, largest, cross, inputs)
        self._done[key] = choose_codes(weight, parse_algorithms(self._chosen[path]))
        return _floats(self._done[key])

    def joined(self, path: str, reason: str | None) -> Quantized:
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
def _add_statistics(moments: jax.Array, largest: jax.Array, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    inputs = inputs.astype(jnp.float32)
    moments = moments + jnp.einsum("brk,brl->bkl", inputs, inputs, precision="highest")
    return moments, jnp.maximum(largest, jnp.max(jnp.abs(inputs), axis=1))


@jax.jit
def _add_cross_moments(cross: jax.Array, inputs: jax.Array, float_inputs: jax.Array) -> jax.Array:
    inputs, float_inputs = inputs.astype(jnp.float32), float_inputs.astype(jnp.float32)
    return cross + jnp.einsum("brk,brl->bkl", inputs, float_inputs - inputs, precision="highest")


def _of_slice(spec: ArraySpec, leading: int) -> ArraySpec:
    """Returns the specification of a slice that lacks the leading axes, along which scales are separate."""
    if not leading:
        return spec
    channels = tuple(axis - leading for axis in spec.channel_axes if axis >= leading)
    return dataclasses.replace(
        spec,
        channel_axes=channels,
        tiles={axis - leading: size for axis, size in spec.tile_sizes.items() if axis >= leading},
        shared_unit_axes=tuple(axis - leading for axis in spec.shared_unit_axes),
    )
