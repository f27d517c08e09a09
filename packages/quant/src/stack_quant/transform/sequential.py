"""Evaluation of a program over a stream of calls, operation by operation, with replacement of parameters on the way.

All calls advance together. At each product with a parameter to be replaced, the inputs of all calls are available and
depend on the parameters replaced before. A scan over layers runs layer by layer in Python. Peak memory is the
live activations of the calls, one slice of a parameter and its statistics.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from stack_core.ops.units import unit_of
from stack_quant.errors import QuantError
from stack_quant.transform import versions
from stack_quant.transform.control import within
from stack_quant.transform.factors import Factors, factors
from stack_quant.transform.interpreter import Interpreter, Value, has_products
from stack_quant.transform.layout import Layout
from stack_quant.transform.parts import Concatenated
from stack_quant.transform.provenance import Source

__all__ = ["Product", "Replacements", "Slice", "run_replacing"]

Slice = tuple[str, tuple[int, ...]]
"""Path of a parameter, and the indices of its slice along the leading axes that enclosing loops iterate over."""


@dataclass(frozen=True)
class Product:
    """The product of one call with one slice of a parameter.

    Attributes:
      key: the slice.
      layout: arrangement of the slice as matrices.
      inputs: x[batch, rows, d_in], the factors of the matrices.
      float_inputs: the factors of the same call if no parameter is replaced; None unless the run computes them.
    """

    key: Slice
    layout: Layout
    inputs: jax.Array
    float_inputs: jax.Array | None = None


@dataclass
class Replacements:
    """The replaced slices of parameters.

    Attributes:
      wanted: predicate on a path and the name of an operation: True if the product decides the replacement.
      observe: callback for a product whose slice is not replaced yet.
      finish: function from a slice to its new value, after its first product was observed in all calls, or in all
        iterations of a loop over data; its later products use the new value.
      done: new values, by slice.
      refused: reason why a product could not be observed, by path.
    """

    wanted: Callable[[str, str], bool]
    observe: Callable[[Product], None]
    finish: Callable[[Slice], jax.Array]
    done: dict[Slice, jax.Array] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def run_replacing(
    program: Any,
    parameters: Mapping[str, Any],
    calls: Sequence[Sequence[Any]],
    interpreter: Interpreter,
    new: Any,
    *,
    with_float: bool = False,
) -> None:
    """Runs a program on the arguments of several calls, and replaces parameters on the way.

    Args:
      program: a `Program`, whose shapes fit each call.
      parameters: floating parameters by path.
      calls: arrays among the arguments of each call.
      interpreter: interpreter of the operations, with rules whose method keeps parameters in float.
      new: a `Replacements`, which the run fills.
      with_float: run each call a second time with the original parameters, for `Product.float_inputs`.
    """
    replaced = len(calls)
    calls = [*calls, *calls] if with_float else calls
    held: list[list[Value]] = []
    for path in program.paths:
        array = parameters[path]
        source = Source.of(path, array.shape) if jnp.issubdtype(array.dtype, jnp.floating) else None
        held.append([Value(array, source, False, jnp.dtype(array.dtype))] * len(calls))
    held.extend(
        [Value(jnp.asarray(array), None, True, array.dtype) for array in arrays] for arrays in zip(*calls, strict=True)
    )
    _Run(parameters, new, len(calls), replaced).jaxpr(interpreter, program.jaxpr, held, is_needed=False)


@dataclass
class _Run:
    """One evaluation over all calls. The values of a variable are a list with one `Value` per call.

    Attributes:
      parameters: floating parameters by path.
      new: replaced slices.
      calls: number of calls.
      replaced_calls: number of the first calls, which use replaced parameters. Others are the same calls again.
      slices: indices of the current slice of each parameter that enclosing loops iterate over.
      observed: slices whose replacement waits for the end of a loop over data; None outside of such loops.
    """

    parameters: Mapping[str, Any]
    new: Replacements
    calls: int
    replaced_calls: int
    slices: dict[str, tuple[int, ...]] = field(default_factory=dict)
    observed: dict[Slice, None] | None = None
    compiled: dict[Any, Any] = field(default_factory=dict)

    def jaxpr(
        self, interpreter: Interpreter, jaxpr: Any, values: Sequence[list[Value]], *, is_needed: bool = True
    ) -> list[list[Value]]:
        """Runs a jaxpr; the results are empty lists unless `is_needed`, such as the logits of a model."""
        body = versions.equations_of(jaxpr)
        consts = [[interpreter.constant(const)] * self.calls for const in versions.consts_of(jaxpr)]
        known = dict(zip((*body.constvars, *body.invars), (*consts, *values), strict=True))
        last = {
            atom: number
            for number, equation in enumerate(body.eqns)
            for atom in equation.invars
            if not hasattr(atom, "val")
        }
        kept = {atom for atom in body.outvars if is_needed and not hasattr(atom, "val")}

        def read(atom: Any) -> list[Value]:
            return [interpreter.constant(atom.val)] * self.calls if hasattr(atom, "val") else known[atom]

        for number, equation in enumerate(body.eqns):
            used = any(atom in last or atom in kept for atom in equation.outvars)
            results = self.equation(interpreter, equation, list(map(read, equation.invars)), used)
            known.update(zip(equation.outvars, results, strict=True))
            # Activations of all calls are alive at once, so each is dropped after its last use.
            for atom in [one for one in equation.invars if not hasattr(one, "val") and last[one] == number]:
                if atom not in kept:
                    known.pop(atom, None)
        return list(map(read, body.outvars)) if is_needed else [[] for _ in body.outvars]

    def equation(
        self, interpreter: Interpreter, equation: Any, operands: list[list[Value]], is_needed: bool
    ) -> list[list[Value]]:
        name = equation.primitive.name
        if unit_of(equation) is None and has_products(equation):
            inside, inner = within(interpreter, equation), versions.inner(equation)
            loops = {"scan": self.scan, "while": self.while_loop, "cond": self.branch}
            if name in loops:
                return loops[name](inside, equation, operands)
            if inner is not None:
                return self.jaxpr(inside, inner, operands, is_needed=is_needed)
        operands = self.replaced(interpreter, equation, operands)
        if not is_needed:
            return [[] for _ in equation.outvars]
        if all(all(value is held[0] for value in held) for held in operands):
            results = self.evaluate(interpreter, equation, [held[0] for held in operands])
            return [[result] * self.calls for result in results]
        each = [self.evaluate(interpreter, equation, list(one)) for one in zip(*operands, strict=True)]
        return [list(results) for results in zip(*each, strict=True)]

    def evaluate(self, interpreter: Interpreter, equation: Any, operands: list[Value]) -> Sequence[Value]:
        """Evaluates one equation for one call; the operations on activations are compiled."""
        if not any(value.from_data for value in operands):
            return interpreter.evaluate(equation, operands)
        key = (id(equation), tuple(value.source for value in operands))
        if key not in self.compiled:

            def compute(arrays: list[Any]) -> list[Any]:
                values = [
                    dataclasses.replace(value, array=array) for value, array in zip(operands, arrays, strict=True)
                ]
                return [interpreter.plain(result) for result in interpreter.evaluate(equation, values)]

            # Stored with the equation, whose identity is the key.
            self.compiled[key] = (equation, jax.jit(compute))
        arrays = self.compiled[key][1]([value.array for value in operands])
        return [interpreter.new(array, *operands) for array in arrays]

    def scan(self, interpreter: Interpreter, equation: Any, operands: list[list[Value]]) -> list[list[Value]]:
        consts, carried = versions.scan_counts(equation)
        jaxpr, params = equation.params["jaxpr"], equation.params
        fixed, carry, rows = operands[:consts], operands[consts : consts + carried], operands[consts + carried :]
        trips = range(params["length"])
        trips = trips[::-1] if params["reverse"] else trips
        over_parameters = any(held[0].source is not None for held in rows)

        def once() -> list[list[Value]]:
            state: list[list[Value]] = carry
            made: list[list[list[Value]]] = []
            for trip in trips:
                before = dict(self.slices)
                here = [self.row(held, trip) for held in rows]
                results = self.jaxpr(interpreter, jaxpr, [*fixed, *state, *here])
                self.slices = before
                state = results[:carried]
                made.append(results[carried:])
            made = made[::-1] if params["reverse"] else made
            stacked = [
                [
                    interpreter.new(jnp.stack([interpreter.plain(step[place][call]) for step in made]), step_values)
                    for call, step_values in enumerate(made[0][place])
                ]
                for place in range(len(made[0]) if made else 0)
            ]
            return [*state, *stacked]

        if not trips:
            return self.plainly(interpreter, equation, operands)
        return once() if over_parameters else self.after_observing(once)

    def plainly(self, interpreter: Interpreter, equation: Any, operands: list[list[Value]]) -> list[list[Value]]:
        each = [interpreter.evaluate(equation, list(one)) for one in zip(*operands, strict=True)]
        return [list(results) for results in zip(*each, strict=True)]

    def row(self, values: list[Value], trip: int) -> list[Value]:
        """Returns the values of one entry along the first axis. All calls share the entry of a parameter."""
        first = values[0]
        source = first.source
        if source is None:
            if all(value is first for value in values):
                return [dataclasses.replace(first, array=first.array[trip])] * self.calls
            return [dataclasses.replace(value, array=value.array[trip]) for value in values]
        if source.others and not source.axes[0]:
            source = dataclasses.replace(source.without(0), path=source.paths[trip], others=())
        else:
            source = source.without(0)
            self.slices[source.path] = (*self.slices.get(source.path, ()), trip)
        return [dataclasses.replace(first, array=first.array[trip], source=source)] * self.calls

    def after_observing(self, once: Callable[[], list[list[Value]]]) -> list[list[Value]]:
        """Runs a loop over data twice: to observe the products of all iterations, and with the replaced parameters."""
        if self.observed is not None:
            return once()
        self.observed = {}
        once()
        for key in self.observed:
            self.new.done[key] = self.new.finish(key)
        self.observed = None
        return once()

    def while_loop(self, interpreter: Interpreter, equation: Any, operands: list[list[Value]]) -> list[list[Value]]:
        params = equation.params
        of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
        for_cond, fixed = operands[:of_cond], operands[of_cond : of_cond + of_body]

        def once() -> list[list[Value]]:
            state = operands[of_cond + of_body :]
            while True:
                (goes_on,) = self.jaxpr(interpreter, params["cond_jaxpr"], [*for_cond, *state])
                alike = {bool(interpreter.plain(value)) for value in goes_on}
                if len(alike) > 1:
                    raise QuantError(
                        "A loop of the model runs a different number of times in different calls of the stream, which "
                        "advance together. Give a stream of one call, or leave the loop's parameters without algorithm."
                    )
                if not alike.pop():
                    return state
                state = self.jaxpr(interpreter, params["body_jaxpr"], [*fixed, *state])

        return self.after_observing(once)

    def branch(self, interpreter: Interpreter, equation: Any, operands: list[list[Value]]) -> list[list[Value]]:
        index, *given = operands
        branches = equation.params["branches"]
        chosen = {min(max(int(interpreter.plain(value)), 0), len(branches) - 1) for value in index}
        if len(chosen) > 1:
            raise QuantError(
                "A branch of the model is taken in some calls of the stream and not in others, which advance together. "
                "Give a stream of one call, or leave the branch's parameters without algorithm."
            )
        return self.jaxpr(interpreter, branches[chosen.pop()], given)

    def replaced(self, interpreter: Interpreter, equation: Any, operands: list[list[Value]]) -> list[list[Value]]:
        """Returns the operands of an equation with the parameters of its products replaced."""
        found = factors(equation, [held[0] for held in operands])
        if found is None:
            return operands
        name = interpreter.name(equation, found.op)
        after = list(operands)
        for place, (contracted, batch) in found.weights.items():
            value = operands[place][0]
            parts = value.parts if value.is_concatenated else [value]
            arrays = [
                part.array
                if part.source is None or not self.new.wanted(part.source.path, name)
                else self.part(part, contracted, batch, found, operands)
                for part in parts
            ]
            if value.is_concatenated:
                array: Any = Concatenated(tuple(arrays), value.array.axis, value.array.sources, value.array.dtype)
            else:
                (array,) = arrays
            others = operands[place][self.replaced_calls :]
            after[place] = [dataclasses.replace(value, array=array)] * self.replaced_calls + others
        return after

    def part(
        self, value: Value, contracted: Sequence[int], batch: Sequence[int], found: Factors, operands: list[list[Value]]
    ) -> jax.Array:
        """Returns the operand of a product after its parameter was replaced."""
        source = value.source
        assert source is not None, "asked only for parameters"
        path, index = source.path, self.slices.get(source.path, ())
        array = self.parameters[path][index]
        layout = Layout.of(source, array.shape, len(index), batch, contracted)
        free = [axis for axis in range(len(value.shape)) if axis not in {*batch, *contracted}]
        order = [*batch, *contracted, *free]

        def as_operand(matrices: jax.Array) -> jax.Array:
            moved = matrices.reshape([value.shape[axis] for axis in order])
            return moved.transpose([order.index(axis) for axis in range(len(order))]).astype(value.dtype)

        # The arrangement is checked on the numbers, as reversed or repeated entries would not show in the source.
        if source.others or layout is None or not jnp.array_equal(as_operand(layout.arranged(array)), value.array):
            self.new.refused[path] = f"the product takes only a part, or another arrangement, of {path}"
            return value.array
        key = (path, index)
        if key not in self.new.done:
            if found.inputs is None:
                self.new.refused[path] = f"{found.op} with these axes has no matrix product to observe"
                return value.array
            each = [found.inputs([value.array for value in one]) for one in zip(*operands, strict=True)]
            plain = each[self.replaced_calls :] or [None] * self.replaced_calls
            for inputs, float_inputs in zip(each, plain, strict=False):
                self.new.observe(Product(key, layout, inputs, float_inputs))
            if self.observed is not None:
                self.observed[key] = None
                return value.array
            self.new.done[key] = self.new.finish(key)
        return as_operand(layout.arranged(self.new.done[key]))
