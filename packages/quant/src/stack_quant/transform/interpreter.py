"""Interpreter of jaxprs with quantized inputs.

Each value is an array or a quantized array, together with its source parameter. An equation with a handler gets
quantized operands. Operands of any other equation are dequantized, and the report gets a row. Running a jaxpr traces
new operations in the caller's trace; nothing is patched, and no cache of another program is affected.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from stack_core import ops
from stack_core.ops.building import is_quantized
from stack_core.ops.units import unit_of
from stack_core.programs.flops import inner_jaxprs
from stack_quant.methods import Method
from stack_quant.rules import Rule
from stack_quant.spec import ArraySpec
from stack_quant.transform import versions
from stack_quant.transform.adapted import Adapted, Adapter
from stack_quant.transform.coverage import OpRow
from stack_quant.transform.parts import Concatenated
from stack_quant.transform.provenance import Part, Source

__all__ = [
    "ADAPTED_HANDLERS",
    "ENTRY_BY_ENTRY",
    "HANDLERS",
    "Interpreter",
    "Loop",
    "ResolvedRules",
    "Use",
    "Value",
    "has_products",
]

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general", "stack_op"})
_HANDS_ON = frozenset(
    {
        "checkpoint",
        "closed_call",
        "composite",
        "concatenate",
        "cond",
        "core_call",
        "jit",
        "optimization_barrier",
        "pjit",
        "remat2",
        "scan",
        "stack",
        "while",
    }
)
"""Primitives whose handlers pass parameters with adapters on to their inner jaxprs or results."""

# Handlers of these primitives take concatenated parameters in parts; all further primitives get the joined array.
_TAKES_PARTS = frozenset(
    {
        "checkpoint",
        "closed_call",
        "convert_element_type",
        "dot_general",
        "jit",
        "optimization_barrier",
        "pjit",
        "remat2",
        "transpose",
    }
)
# fmt: off
ENTRY_BY_ENTRY = frozenset({
    "abs", "add", "add_any", "and", "clamp", "cos", "div", "eq", "erf", "exp", "exp2", "floor", "ge", "gt",
    "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not",
    "or", "pow", "reduce_precision", "rem", "round", "rsqrt", "select_n", "sign", "sin", "sqrt", "square", "sub",
    "tanh", "xor",
})
# fmt: on


@dataclass(frozen=True)
class Value:
    """The value of a variable of the jaxpr.

    Attributes:
      array: an array, a quantized array, a parameter with adapters, or concatenated parts.
      source: parameter that the value is, or is computed from by elementwise operations; None for values without such
        a parameter and values that also depend on activations.
      from_data: True if the value depends on an input that is not a parameter.
      dtype: dtype of the (dequantized) array.
      made_of: paths of the parameters that the value is computed from, if it no longer counts as one.
      made_by: primitive that computed the value from them.
      known: number that the value equals for all inputs, or None.
    """

    array: Any
    source: Source | None
    from_data: bool
    dtype: Any
    made_of: tuple[str, ...] = ()
    made_by: str = ""
    known: float | None = None

    @property
    def is_quantized(self) -> bool:
        return is_quantized(self.array)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def is_concatenated(self) -> bool:
        return isinstance(self.array, Concatenated)

    @property
    def is_adapted(self) -> bool:
        return isinstance(self.array, Adapted)

    @property
    def parts(self) -> "list[Value]":
        """Parts of a concatenated value."""
        return [
            dataclasses.replace(self, array=array, source=source, made_of=(), made_by="")
            for array, source in zip(self.array.arrays, self.array.sources, strict=True)
        ]

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the parameters, if the value is computed only from parameters."""
        return self.made_of if self.source is None else self.source.paths

    def renamed(self, paths: Mapping[str, str]) -> "Value":
        """Returns the value with its parameters' paths replaced."""
        source = self.source
        if source is not None:
            others = tuple(paths[path] for path in source.others)
            source = dataclasses.replace(source, path=paths[source.path], others=others)
        return dataclasses.replace(self, source=source, made_of=tuple(paths[path] for path in self.made_of))


@dataclass(frozen=True)
class Use:
    """The use of a parameter in an operation.

    Attributes:
      path: path of the parameter.
      op: name of the operation, including the enclosing named scopes.
      contracted: parts of the parameter's axes over which the operation sums, the slowest first.
      free: parts of the axes that the result keeps. The remaining parts are batch axes.
      is_lookup: True if the operation selects entries by index instead of multiplying them.
      derived: True if the operand is computed from the parameter by elementwise operations.
      mixed: primitive that computes the operand from one or several parameters in a way that prevents quantization
        for this use; else "".
    """

    path: str
    op: str
    contracted: tuple[Part, ...]
    free: tuple[Part, ...] = ()
    is_lookup: bool = False
    derived: bool = False
    mixed: str = ""


@dataclass(frozen=True)
class ResolvedRules:
    """Rules, method and plan for the parameters of a program.

    Attributes:
      rules: rules in order of precedence.
      method: method of quantization.
      of_path: index of the rule that applies to a parameter, by path.
      specs: specification of each parameter that is quantized, by path.
      tiles: number of entries that share a scale, by path, if it differs from the rule.
      adapters: adapters by path of the parameter.
    """

    rules: tuple[Rule, ...]
    method: Method
    of_path: Mapping[str, int] = field(default_factory=dict)
    specs: Mapping[str, ArraySpec] = field(default_factory=dict)
    tiles: Mapping[str, int] = field(default_factory=dict)
    adapters: Mapping[str, Adapter] = field(default_factory=dict)

    def entered(self, path: str, array: Any) -> Any:
        """Returns the form in which a stored parameter enters a program."""
        spec = self.specs.get(path)
        return array if spec is None else self.method.entered(array, spec)

    def of_parameter(self, path: str, op: str) -> int | None:
        """Returns the index of the rule for a parameter in an operation; None leaves it in float there."""
        number = self.of_path.get(path)
        return number if number is not None and self.rules[number].matches_op(op) else None

    def of_activations(self, op: str) -> int | None:
        """Returns the index of the rule for a product of two activations, or None."""
        found = (
            number for number, rule in enumerate(self.rules) if rule.path is None and rule.op and rule.matches_op(op)
        )
        return next(found, None)


Handler = Callable[["Interpreter", Any, Sequence[Value]], Sequence[Value]]

HANDLERS: Final[dict[str, Handler]] = {}
"""Handlers of equations by primitive, used if an operand is a parameter or a rule may apply to the equation."""

AdaptedHandler = Callable[["Interpreter", Any, Sequence[Value]], Sequence[Value] | None]

ADAPTED_HANDLERS: Final[dict[str, AdaptedHandler]] = {}
"""Handlers of equations with an operand that has adapters, by primitive. They return None to have it merged."""


@dataclass(frozen=True)
class Loop:
    """A scan with separate static ranges for its iterations.

    Attributes:
      trips: number of iterations.
      trip: index of the current iteration.
      over_parameters: True if each iteration uses a separate slice of some parameters, such as a layer. If False, only
        activations that are multiplied with a parameter have separate ranges.
    """

    trips: int
    trip: Any
    over_parameters: bool


@dataclass
class Interpreter:
    """One run of a program. Interpreters of inner jaxprs are copies that share the mutable fields.

    Attributes:
      resolved: rules, method and plan.
      uses: uses of parameters, in the order of the program.
      rows: rows of the report for operations on a parameter or on two activations.
      stops: primitives whose results no longer count as the parameter, by path.
      scopes: named scopes around the current jaxpr.
      key: PRNG key of the current jaxpr's operations, each of which folds in its own number; None without one.
      draws: list with one entry per draw so far.
      place: position in the program: the index of the equation in each enclosing jaxpr, the outermost first.
      loops: enclosing loops with separate static ranges per iteration, the outermost first.
      ranges: static ranges of activations by name of the site; None while sites are collected.
      sites: collected sites by key; while ranges are measured, by name.
      site_names: names of the program's sites, by key.
      measured: statistics so far, by name of the site, while ranges are measured; else empty.
      shared: jitted functions for reuse by equal calls, with the values of their results and the paths of the
        parameters of the first call.
    """

    resolved: ResolvedRules
    uses: list[Use] = field(default_factory=list)
    rows: list[OpRow] = field(default_factory=list)
    stops: dict[str, dict[str, None]] = field(default_factory=dict)
    scopes: tuple[str, ...] = ()
    key: jax.Array | None = None
    draws: list[None] = field(default_factory=list)
    place: tuple[int, ...] = ()
    loops: tuple[Loop, ...] = ()
    ranges: Mapping[str, Any] | None = None
    sites: dict[Any, Any] = field(default_factory=dict)
    site_names: Mapping[Any, str] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    shared: dict[Any, tuple[Any, list[Value], tuple[str, ...]]] = field(default_factory=dict)

    def run(self, jaxpr: Any, values: Sequence[Value]) -> list[Value]:
        """Computes the outputs of a jaxpr, closed or not, from the values of its inputs."""
        body = versions.equations_of(jaxpr)
        consts = [self.constant(const) for const in versions.consts_of(jaxpr)]
        known = dict(zip((*body.constvars, *body.invars), (*consts, *values), strict=True))

        def read(atom: Any) -> Value:
            return self.constant(atom.val) if hasattr(atom, "val") else known[atom]

        for number, equation in enumerate(body.eqns):
            operands = [read(atom) for atom in equation.invars]
            here = dataclasses.replace(self, place=(*self.place, number))
            results = here.evaluate(equation, operands)
            known.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in body.outvars]

    def draw(self) -> jax.Array | None:
        """Returns a new key for one operation; None without a key."""
        if self.key is None:
            return None
        # A list, because interpreters of inner jaxprs are copies that must share the count.
        self.draws.append(None)
        return jax.random.fold_in(self.key, len(self.draws))

    def is_weight(self, value: Value) -> bool:
        """Returns whether a value is a quantized parameter, or the floats of one in training."""
        source = value.source
        held = source is not None and not source.derived and source.path in self.resolved.specs
        return value.is_quantized or held

    def constant(self, array: Any) -> Value:
        """Returns the value of a constant."""
        dtype = jnp.result_type(array)
        # Not of a jax.Array: to read it would wait for its device, and fail under a trace.
        is_number = np.ndim(array) == 0 and isinstance(array, np.ndarray | np.generic | float | int)
        return Value(array, None, False, dtype, known=float(array) if is_number else None)

    def new(self, array: Any, *operands: Value) -> Value:
        """Returns the value of a result that no longer counts as a parameter."""
        return Value(array, None, any(operand.from_data for operand in operands), array.dtype)

    def plain(self, value: Value) -> Any:
        """Returns the plain array of a value: dequantized, merged with its adapters and concatenated."""
        if value.is_concatenated:
            return jax.lax.concatenate(list(map(self.plain, value.parts)), value.array.axis)
        if value.is_adapted:
            return value.array.merged(value.dtype)
        return ops.dequantize(value.array, value.dtype) if value.is_quantized else value.array

    def joined(self, value: Value) -> Value:
        """Returns a concatenated value as one plain array; any other value is unchanged."""
        return dataclasses.replace(value, array=self.plain(value)) if value.is_concatenated else value

    def name(self, equation: Any, op: str) -> str:
        """Returns the name of an operation, including the enclosing named scopes."""
        scope = str(equation.source_info.name_stack)
        return "/".join([*self.scopes, *([scope] if scope else []), op])

    def as_it_is(self, equation: Any, operands: Sequence[Value]) -> list[Value]:
        """Runs an equation on floats."""
        results = versions.bind(equation, [self.plain(operand) for operand in operands])
        source, unit = self._derived(equation, operands, results), unit_of(equation)
        name = equation.primitive.name if unit is None else unit.op
        if source is not None:
            return [dataclasses.replace(self.new(result, *operands), source=source) for result in results]
        paths = tuple(dict.fromkeys(path for operand in operands for path in operand.paths))
        for path in paths:
            self.stops.setdefault(path, {})[name] = None
        if any(operand.from_data for operand in operands):
            paths = ()
        made_by = next((operand.made_by for operand in operands if operand.made_by), name) if paths else ""
        # A cast zero must still count as zero when a parameter is padded.
        known = operands[0].known if name == "convert_element_type" else None
        return [
            dataclasses.replace(self.new(result, *operands), made_of=paths, made_by=made_by, known=known)
            for result in results
        ]

    def left(self, equation: Any, operands: Sequence[Value], op: str, reason: str, rule: int | None = None) -> None:
        """Adds a row to the report for an operation that is computed in float."""
        paths = tuple(path for operand in operands if operand.source is not None for path in operand.source.paths)
        computed = "dequantized" if any(operand.is_quantized for operand in operands) else "float"
        kinds = tuple(
            str(operand.array.type if hasattr(operand.array, "type") else operand.dtype) for operand in operands
        )
        self.rows.append(OpRow(op, paths, rule, kinds, computed, reason, versions.source_of(equation)))

    def evaluate(self, equation: Any, operands: Sequence[Value]) -> Sequence[Value]:
        """Computes the results of one equation."""
        with versions.inherit_trace_context(equation):
            name = "stack_op" if unit_of(equation) else equation.primitive.name
            if any(operand.is_adapted for operand in operands) and name not in _HANDS_ON:
                handler = ADAPTED_HANDLERS.get(name)
                results = None if handler is None else handler(self, equation, operands)
                if results is not None:
                    return results
                reason = f"{name} takes no adapters: they are merged"
                self.left(equation, operands, self.name(equation, name), reason)
                operands = [self._merged(operand, name) for operand in operands]
            return self._evaluate(equation, operands)

    def _merged(self, value: Value, primitive: str) -> Value:
        """Merges the adapters of a value, which then counts as computed from its parameter."""
        if not value.is_adapted:
            return value
        return dataclasses.replace(
            value, array=self.plain(value), source=value.source and value.source.as_derived(primitive)
        )

    def _evaluate(self, equation: Any, operands: Sequence[Value]) -> Sequence[Value]:
        name = equation.primitive.name
        concerned = any(operand.source is not None for operand in operands)
        if any(operand.is_concatenated for operand in operands):
            concerned = name in _TAKES_PARTS
            operands = operands if concerned else list(map(self.joined, operands))
        handler = HANDLERS.get("stack_op" if unit_of(equation) else name)
        # Without a parameter among the operands, rules apply only to products.
        if handler is not None and (concerned or has_products(equation)):
            return handler(self, equation, operands)
        if any(operand.is_quantized for operand in operands):
            self.left(equation, operands, self.name(equation, name), f"{name} takes no quantized operand")
        return self.as_it_is(equation, operands)

    def _derived(self, equation: Any, operands: Sequence[Value], results: Sequence[Any]) -> Source | None:
        """Returns the source of an elementwise result of a parameter and of values that do not depend on data."""
        if equation.primitive.name not in ENTRY_BY_ENTRY or any(operand.from_data for operand in operands):
            return None
        # An operand that is broadcast lacks the axes of the result, so it cannot be its source.
        shape = results[0].shape
        found = (operand.source for operand in operands if operand.source is not None and operand.shape == shape)
        source = next(found, None)
        return None if source is None else source.as_derived(equation.primitive.name)


def has_products(equation: Any) -> bool:
    """Returns whether an equation is a product or contains one."""
    if equation.primitive.name in _PRODUCTS:
        return True
    return any(
        has_products(inside) for jaxpr in _inner_jaxprs(equation) for inside in versions.equations_of(jaxpr).eqns
    )


def _inner_jaxprs(equation: Any) -> list[Any]:
    """Returns the jaxprs among the parameters of an equation, including those in lists."""
    return list(inner_jaxprs(equation.params.values()))
