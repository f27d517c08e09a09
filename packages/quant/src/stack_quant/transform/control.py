"""Handlers of calls, loops and branches, which are rebuilt with quantized arrays among their operands."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stack_core.ops.building import is_quantized, vary_alike
from stack_quant.streams import merged
from stack_quant.transform import versions, views
from stack_quant.transform.adapted import Adapted
from stack_quant.transform.interpreter import HANDLERS, Interpreter, Loop, Value, has_products
from stack_quant.transform.parts import Concatenated

__all__ = ["within"]

_Function = Callable[..., Any]


def _traced(
    interpreter: Interpreter, equation: Any, jaxpr: Any, operands: Sequence[Value]
) -> tuple[_Function, list[Value]]:
    """Returns a function that runs `jaxpr`, and a list that receives the values of the results when it is traced.

    The function takes the measured statistics so far and the arrays of the operands. It returns the new statistics and
    the arrays of the results.
    """
    results: list[Value] = []

    def function(measured: Any, *arrays: Any) -> tuple[Any, list[Any]]:
        values = [dataclasses.replace(operand, array=array) for operand, array in zip(operands, arrays, strict=True)]
        inside = within(interpreter, equation, measured)
        # The list is filled while JAX traces the function: sources of values are not arrays and cannot be returned.
        results[:] = inside.run(jaxpr, values)
        return inside.measured, [result.array for result in results]

    return function, results


def within(interpreter: Interpreter, equation: Any, measured: Any = None, *, part: int | None = None) -> Interpreter:
    """Returns an interpreter for an inner jaxpr of an equation, with its named scope and shared records.

    Args:
      measured: statistics so far, if the inner jaxpr is traced separately.
      part: index of the jaxpr, if the equation has several.
    """
    scope = str(equation.source_info.name_stack)
    if part is not None:
        interpreter = dataclasses.replace(interpreter, place=(*interpreter.place, part))
    if measured is not None:
        interpreter = dataclasses.replace(interpreter, measured=dict(measured))
    return dataclasses.replace(interpreter, scopes=(*interpreter.scopes, scope)) if scope else interpreter


def _called(results: Sequence[Value], arrays: Sequence[Any]) -> list[Value]:
    return [dataclasses.replace(result, array=array) for result, array in zip(results, arrays, strict=True)]


def _jit(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    """Runs a jitted function. Calls that treat their operands in the same way share one function, as in float."""
    paths = _paths(operands)
    alike = _call_key(interpreter, equation, operands, paths)
    found = None if alike is None else interpreter.shared.get(alike)
    if found is None:
        function, results = _traced(interpreter, equation, versions.inner(equation), operands)
        # Profiles and lowered programs show the name of the user's function.
        function.__name__ = equation.params["name"]
        found = jax.jit(function), results, paths
        if alike is not None:
            interpreter.shared[alike] = found
    function, results, first_paths = found
    arrays = _constrained([operand.array for operand in operands], equation.params["in_shardings"])
    measured, arrays = function(interpreter.measured, *arrays)
    interpreter.measured.update(measured)
    renamed = dict(zip(first_paths, paths, strict=True))
    results = [result.renamed(renamed) for result in results]
    return _called(results, _constrained(arrays, equation.params["out_shardings"]))


def _paths(operands: Sequence[Value]) -> tuple[str, ...]:
    """Returns the paths of the parameters from which operands are computed, in order."""
    return tuple(dict.fromkeys(path for operand in operands for path in (*operand.paths, *operand.made_of)))


def _call_key(
    interpreter: Interpreter, equation: Any, operands: Sequence[Value], paths: tuple[str, ...]
) -> Hashable | None:
    """Returns a key that is equal for calls of a jitted function that differ only in the paths of parameters.

    The key is None if calls cannot be shared: while sites are collected or measured, with static ranges (their names
    depend on the parameters), and with a PRNG key (each call splits off a new key).
    """
    if interpreter.ranges != {} or interpreter.measured or interpreter.key is not None:
        return None
    if any(operand.is_concatenated for operand in operands):
        return None
    resolved, numbers = interpreter.resolved, {path: number for number, path in enumerate(paths)}
    # Rules can match operations by scope, so calls in different scopes may be quantized differently.
    by_name = any(rule.op is not None for rule in resolved.rules)
    scopes = (interpreter.scopes, str(equation.source_info.name_stack)) if by_name else None

    def of_operand(operand: Value) -> Hashable:
        source = operand.source
        leaves, structure = jax.tree.flatten(operand.array)
        return (
            structure,
            tuple((leaf.shape, leaf.dtype) for leaf in map(jax.typeof, leaves)),
            None if source is None else (source.axes, source.derived),
            tuple(numbers[path] for path in operand.paths),
            operand.made_by,
            operand.known,
            operand.from_data,
            operand.dtype,
        )

    of_paths = tuple((resolved.of_path.get(path), resolved.specs.get(path), resolved.tiles.get(path)) for path in paths)
    # Calls of one jitted function share the jaxpr object, which the traced program keeps alive.
    return id(equation.params["jaxpr"]), scopes, of_paths, tuple(map(of_operand, operands))


def _constrained(arrays: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """Applies the shardings of a jitted function. Quantized and adapted arrays keep their sharding."""
    return [
        lax.with_sharding_constraint(array, sharding)
        if isinstance(sharding, jax.sharding.Sharding)
        and not is_quantized(array)
        and not isinstance(array, Adapted | Concatenated)
        else array
        for array, sharding in zip(arrays, shardings, strict=True)
    ]


def _remat(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    function, results = _traced(interpreter, equation, versions.inner(equation), operands)
    options = {name: equation.params[name] for name in ("policy", "prevent_cse")}
    arrays = (operand.array for operand in operands)
    # Measured ranges are results, since tracers must not leave the rematerialized function.
    measured, arrays = jax.checkpoint(function, **options)(interpreter.measured, *arrays)
    interpreter.measured.update(measured)
    return _called(results, arrays)


def _inlined(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    return within(interpreter, equation).run(versions.inner(equation), operands)


def _composite(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    """Runs a composite function, which a backend may replace. It stays one unless an operation inside is quantized."""
    # A trial run with records of its own, which are merged only if it is used.
    probe = dataclasses.replace(interpreter, rows=[], stops={}, measured=dict(interpreter.measured))
    results = probe.run(versions.inner(equation), operands)
    if interpreter.ranges is not None and all(row.computed == "float" for row in probe.rows):
        return interpreter.as_it_is(equation, operands)
    interpreter.rows.extend(probe.rows)
    for path, primitives in probe.stops.items():
        interpreter.stops.setdefault(path, {}).update(primitives)
    interpreter.measured.update(probe.measured)
    return results


def _custom(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    """Runs a function with a custom derivative or batching rule, with its operations quantized.

    The derivative stays the custom derivative of the function in float, at the same operands.
    """
    by_rule = any(rule.path is None for rule in interpreter.resolved.rules) and has_products(equation)
    if not by_rule and all(operand.source is None for operand in operands):
        return interpreter.as_it_is(equation, operands)
    probe = dataclasses.replace(interpreter, rows=[], uses=[], shared={}, measured=dict(interpreter.measured))
    has_derivative = equation.primitive.name != "custom_vmap_call" and interpreter.ranges is not None

    def run(*arrays: Any) -> list[Value]:
        values = [dataclasses.replace(operand, array=array) for operand, array in zip(operands, arrays, strict=True)]
        return probe.run(versions.inner(equation), values)

    arrays, results = [operand.array for operand in operands], list[Value]()
    if has_derivative:
        # Traced abstractly, because JAX would differentiate the trial, and some of its equations lack a derivative.
        jax.eval_shape(lambda *arrays: list(map(probe.plain, run(*arrays))), *arrays)
    else:
        results = run(*arrays)
    interpreter.uses.extend(probe.uses)
    interpreter.rows.extend(probe.rows)
    if all(row.computed == "float" for row in probe.rows):
        return interpreter.as_it_is(equation, operands)
    if has_derivative:
        return _with_custom_derivative(interpreter, equation, operands)
    interpreter.measured.update(probe.measured)  # while ranges are measured, nothing is differentiated
    return results


def _with_custom_derivative(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    """Runs an equation with its operations quantized and with the tangents of the equation in float."""

    @jax.custom_jvp
    def function(context: Any, *arrays: Any) -> list[Any]:
        ranges, trips, key = context  # arguments, as the function must not close over values differentiated outside
        inside = dataclasses.replace(
            within(interpreter, equation), ranges=ranges, loops=_at(interpreter, trips), key=key, draws=[]
        )
        values = [dataclasses.replace(operand, array=array) for operand, array in zip(operands, arrays, strict=True)]
        return list(map(inside.plain, inside.run(versions.inner(equation), values)))

    @function.defjvp
    def _(primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        (_, *arrays), (_, *moved) = primals, tangents
        values = [dataclasses.replace(operand, array=array) for operand, array in zip(operands, arrays, strict=True)]
        floats = list(map(interpreter.plain, values))
        places = [
            place
            for place, value in enumerate(values)
            if not value.is_quantized and jnp.issubdtype(value.dtype, jnp.inexact)
        ]

        def in_float(*values: Any) -> list[Any]:
            filled = list(floats)
            for place, array in zip(places, values, strict=True):
                filled[place] = array
            return versions.bind(equation, filled)

        # Straight-through: the primal result is quantized, its tangent that of the float function.
        _, tangent = jax.jvp(in_float, [floats[place] for place in places], [moved[place] for place in places])
        return function(*primals), tangent

    context = (interpreter.ranges, [loop.trip for loop in interpreter.loops], interpreter.draw())
    arrays = function(context, *(operand.array for operand in operands))
    return [interpreter.new(array, *operands) for array in arrays]


def _scan(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    consts, carried = versions.scan_counts(equation)
    jaxpr, params = equation.params["jaxpr"], equation.params
    # As in `lax.scan`: constants, initial carry, and inputs with a leading axis.
    fixed, start, rows = operands[:consts], operands[consts : consts + carried], operands[consts + carried :]
    # Values that every iteration hands on unchanged stay outside of the loop, and can stay quantized.
    kept, same = _passed_on(jaxpr, consts, carried), _rows_passed_on(jaxpr, consts, carried)
    slices = [_one_of(row) for row in rows]
    init = [None if place in kept else _settled(interpreter, equation, value) for place, value in enumerate(start)]
    after: list[Value] = []

    key = interpreter.draw()
    over_parameters = any(row.source is not None for row in rows)
    # The number of iterations over data depends on the size of the data, so these iterations share a range. Any other
    # loop has a separate range per iteration.
    has_own_ranges = interpreter.ranges != {} and (over_parameters or not any(row.from_data for row in rows))

    def body(state: tuple[Any, list[Any]], xs: tuple[Any, list[Any]]) -> tuple[tuple[Any, list[Any]], list[Any]]:
        (measured, carry), (trip, arrays) = state, xs
        carried_in = [
            value if place in kept else dataclasses.replace(value, array=array, source=None, from_data=True)
            for place, (value, array) in enumerate(zip(start, carry, strict=True))
        ]
        row = [dataclasses.replace(value, array=array) for value, array in zip(slices, arrays, strict=True)]
        inside = within(interpreter, equation, measured)
        if key is not None:
            # Another key per iteration; the same rounding noise in each would add up.
            inside = dataclasses.replace(inside, key=jax.random.fold_in(key, trip))
        if has_own_ranges:
            loop = Loop(params["length"], trip, over_parameters)
            inside = dataclasses.replace(inside, loops=(*inside.loops, loop))
        after[:] = inside.run(jaxpr, [*fixed, *carried_in, *row])
        # The carry of `lax.scan` has fixed types, so quantized and adapted values are returned as plain arrays.
        ends = [None if place in kept else inside.plain(value) for place, value in enumerate(after[:carried])]
        made = [
            None if place in same else _settled(inside, equation, value) for place, value in enumerate(after[carried:])
        ]
        return (inside.measured, ends), made

    # Iteration indices are an input only if something depends on them, so other loops stay as they were.
    trips = jnp.arange(params["length"]) if key is not None or has_own_ranges else None
    (measured, last), stacked = lax.scan(
        body,
        (interpreter.measured, init),
        (trips, [value.array for value in slices]),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    interpreter.measured.update(measured)
    ends = [start[place] if place in kept else _plain_value(array) for place, array in enumerate(last)]
    return [
        *ends,
        *(rows[same[place]] if place in same else _plain_value(array) for place, array in enumerate(stacked)),
    ]


def _at(interpreter: Interpreter, trips: Sequence[Any]) -> tuple[Loop, ...]:
    """Returns the enclosing loops with the iteration indices that were passed to a function."""
    return tuple(dataclasses.replace(loop, trip=trip) for loop, trip in zip(interpreter.loops, trips, strict=True))


def _plain_value(array: Any) -> Value:
    return Value(array, None, True, array.dtype)


def _passed_on(jaxpr: Any, consts: int, carried: int) -> frozenset[int]:
    """Returns the indices of the carried values that each iteration returns unchanged."""
    body = versions.equations_of(jaxpr)
    pairs = zip(body.invars[consts : consts + carried], body.outvars[:carried], strict=True)
    return frozenset(place for place, (before, after) in enumerate(pairs) if before is after)


def _rows_passed_on(jaxpr: Any, consts: int, carried: int) -> dict[int, int]:
    """Returns the stacked results of a scan that are unchanged inputs, as a map from result index to input index."""
    body = versions.equations_of(jaxpr)
    rows = body.invars[consts + carried :]
    found = enumerate(next((at for at, row in enumerate(rows) if row is out), -1) for out in body.outvars[carried:])
    return {place: at for place, at in found if at >= 0}


def _one_of(value: Value) -> Value:
    """Returns the value of a slice along the first axis, along which a quantized array gets a scale per entry."""
    array = value.array
    if value.is_adapted:
        array = array.full_along([0])
    if value.is_quantized:
        array = views.sliceable(array)
    # A scan removes the first axis from each slice, so it is removed from the axes of the parameter as well.
    source = None if value.source is None else value.source.without(0)
    return dataclasses.replace(value, array=array, source=source)


def _settled(interpreter: Interpreter, equation: Any, value: Value) -> Any:
    """Returns the plain array of a value that passes through a loop or branch; adds a report row for a parameter."""
    if value.is_quantized or value.is_adapted:
        name = equation.primitive.name
        reason = f"the parameter itself passes through a {name}"
        interpreter.left(equation, [value], interpreter.name(equation, name), reason)
    return interpreter.plain(value)


def _while(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    params = equation.params
    of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
    cond_fixed, fixed, start = operands[:of_cond], operands[of_cond : of_cond + of_body], operands[of_cond + of_body :]
    kept = _passed_on(params["body_jaxpr"], of_body, len(start))

    def values(carry: list[Any]) -> list[Value]:
        return [
            value if place in kept else dataclasses.replace(value, array=array, source=None, from_data=True)
            for place, (value, array) in enumerate(zip(start, carry, strict=True))
        ]

    def cond(state: tuple[Any, list[Any]]) -> Any:
        measured, carry = state
        inside = within(interpreter, equation, measured, part=0)
        (result,) = inside.run(params["cond_jaxpr"], [*cond_fixed, *values(carry)])
        return inside.plain(result)

    def body(state: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
        measured, carry = state
        inside = within(interpreter, equation, measured, part=1)
        results = inside.run(params["body_jaxpr"], [*fixed, *values(carry)])
        return inside.measured, [None if place in kept else inside.plain(value) for place, value in enumerate(results)]

    init = [None if place in kept else _settled(interpreter, equation, value) for place, value in enumerate(start)]
    measured, last = lax.while_loop(cond, body, (interpreter.measured, init))
    interpreter.measured.update(measured)
    return [start[place] if place in kept else _plain_value(array) for place, array in enumerate(last)]


def _cond(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    index, *given = operands
    same = _chosen_alike(equation.params["branches"])

    def branch(number: int, jaxpr: Any) -> _Function:
        def function(measured: Any, *arrays: Any) -> tuple[Any, list[Any]]:
            values = [dataclasses.replace(value, array=array) for value, array in zip(given, arrays, strict=True)]
            inside = within(interpreter, equation, measured, part=number)
            results = inside.run(jaxpr, values)
            settled = [
                None if place in same else _settled(inside, equation, value) for place, value in enumerate(results)
            ]
            return inside.measured, settled

        return function

    branches = [branch(number, jaxpr) for number, jaxpr in enumerate(equation.params["branches"])]
    arrays = (value.array for value in given)
    measured, arrays = lax.switch(interpreter.plain(index), branches, interpreter.measured, *arrays)
    interpreter.measured.update(measured)
    return [given[same[place]] if place in same else _plain_value(array) for place, array in enumerate(arrays)]


def _chosen_alike(branches: Sequence[Any]) -> dict[int, int]:
    """Returns the operands that all branches return unchanged, as a map from result index to operand index."""
    found = []
    for branch in map(versions.equations_of, branches):
        places = {id(variable): place for place, variable in enumerate(branch.invars)}
        found.append([places.get(id(out), -1) for out in branch.outvars])
    return {place: ats[0] for place, ats in enumerate(zip(*found, strict=True)) if set(ats) == {ats[0]} != {-1}}


def _shard_map(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    params = equation.params
    specs = params["in_specs"]
    shown = [_shardable(value, spec, params["mesh"]) for value, spec in zip(operands, specs, strict=True)]
    manual = [name for name in params["mesh"].axis_names if name in params["newly_manual_axes"]]
    whole, sites = jax.sharding.PartitionSpec(), interpreter.sites

    def function(ranges: Any, trips: Any, measured: Any, *arrays: Any) -> tuple[Any, list[Any]]:
        # The carry of an inner loop must vary over the same mesh axes before and after the loop.
        measured, _ = vary_alike(measured, list(map(lax.axis_index, manual)))
        inside = within(interpreter, equation, measured)
        inside = dataclasses.replace(inside, ranges=ranges, loops=_at(interpreter, trips))
        values = [dataclasses.replace(value, array=array) for (value, _), array in zip(shown, arrays, strict=True)]
        results = [_settled(inside, equation, result) for result in inside.run(params["jaxpr"], values)]
        return {name: merged(parts, sites[name].spec, manual) for name, parts in inside.measured.items()}, results

    mapped = jax.shard_map(
        function,
        mesh=params["mesh"],
        in_specs=(whole, whole, whole, *(spec for _, spec in shown)),
        out_specs=(whole, list(params["out_specs"])),
        axis_names=params["newly_manual_axes"],
        check_vma=params["check_vma"],
    )
    trips = [loop.trip for loop in interpreter.loops]
    measured, arrays = mapped(interpreter.ranges, trips, interpreter.measured, *(value.array for value, _ in shown))
    interpreter.measured.update(measured)
    return list(map(_plain_value, arrays))


def _shardable(value: Value, spec: Any, mesh: Any) -> tuple[Value, Any]:
    """Returns a value and its partition specs, by which scales are sharded like their entries."""
    if not value.is_quantized:
        return value, spec
    view = views.view_of(value.array)
    names = [*spec, *[None] * (len(view.shape) - len(spec))]
    counts = [_devices(mesh, name) for name in names]
    # Scales that the devices cannot divide evenly are repeated for each entry first.
    cut = [axis for axis, count in enumerate(counts) if view.scale.shape[axis] > 1 and view.scale.shape[axis] % count]
    view = views.full_along(view, cut)
    of_scale = jax.sharding.PartitionSpec(
        *(None if size == 1 else name for name, size in zip(names, view.scale.shape, strict=True))
    )
    zero_point = None if view.zero_point is None else of_scale
    specs: Any = dataclasses.replace(view)
    return dataclasses.replace(value, array=view), jax.tree.unflatten(
        jax.tree.structure(specs), [spec, of_scale, *([] if zero_point is None else [zero_point])]
    )


def _devices(mesh: Any, names: Any) -> int:
    count = 1
    for name in names if isinstance(names, tuple) else (names,):
        count *= 1 if name is None else mesh.shape[name]
    return count


HANDLERS.update(
    {
        "jit": _jit,
        "pjit": _jit,
        "closed_call": _inlined,
        "core_call": _inlined,
        "remat2": _remat,
        "checkpoint": _remat,
        "composite": _composite,
        "custom_jvp_call": _custom,
        "custom_vjp_call": _custom,
        "custom_vmap_call": _custom,
        "stack_call": _custom,
        "scan": _scan,
        "while": _while,
        "cond": _cond,
        "shard_map": _shard_map,
    }
)
