"""Runs a jaxpr with some of its inputs quantized.

Each value is an array, or a quantized array that stands for one, and knows whose parameter it is. An equation that has
a handler sees quantized operands as they are; for any other they are dequantized, and a row of the report says so. What
is run is traced by whoever calls: nothing is patched, and no cache of another program is touched.
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

__all__ = ["ADAPTED_HANDLERS", "HANDLERS", "Interpreter", "Loop", "Treatment", "Use", "Value", "has_products"]

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
"""Those whose handlers pass parameters with adapters on to what is inside."""

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
_ENTRY_BY_ENTRY = frozenset({
    "abs", "add", "add_any", "and", "clamp", "cos", "div", "eq", "erf", "exp", "exp2", "floor", "ge", "gt",
    "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not",
    "or", "pow", "reduce_precision", "rem", "round", "rsqrt", "select_n", "sign", "sin", "sqrt", "square", "sub",
    "tanh", "xor",
})
# fmt: on


@dataclass(frozen=True)
class Value:
    """What a variable of the jaxpr holds.

    Attributes:
      array: an array, a quantized one, one with adapters, or several that are concatenated.
      source: which parameter it is, or is computed from entry by entry; None if of none, or of activations too.
      from_data: it depends on an input that is no parameter.
      dtype: of the array, or that the quantized one stands for.
      made_of: the paths of the parameters that it is computed from, where it is no longer one.
      made_by: the primitive that computed it from them.
      known: the number that it is whatever the inputs are, or None.
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
        """What a concatenated value consists of."""
        return [
            dataclasses.replace(self, array=array, source=source, made_of=(), made_by="")
            for array, source in zip(self.array.arrays, self.array.sources, strict=True)
        ]

    @property
    def paths(self) -> tuple[str, ...]:
        """Of the parameters that alone make it up."""
        return self.made_of if self.source is None else self.source.paths

    def renamed(self, paths: Mapping[str, str]) -> "Value":
        """The value of other parameters."""
        source = self.source
        if source is not None:
            others = tuple(paths[path] for path in source.others)
            source = dataclasses.replace(source, path=paths[source.path], others=others)
        return dataclasses.replace(self, source=source, made_of=tuple(paths[path] for path in self.made_of))


@dataclass(frozen=True)
class Use:
    """That a parameter goes into an operation.

    Attributes:
      op: the operation's name, the scopes around it included.
      contracted: the parts of its axes that the operation sums over, the slowest first.
      free: the parts that it keeps, each with results of its own; what is left is mapped over.
      is_lookup: its entries are taken by index, not multiplied.
      derived: what goes in is computed from the parameter.
      mixed: the primitive that makes what goes in of it, alone or with others, so that it cannot be quantized for it.
    """

    path: str
    op: str
    contracted: tuple[Part, ...]
    free: tuple[Part, ...] = ()
    is_lookup: bool = False
    derived: bool = False
    mixed: str = ""


@dataclass(frozen=True)
class Treatment:
    """What the rules say about the program at hand.

    Attributes:
      rules: in order.
      method: what is done where they say so.
      of_path: the place of the rule that each parameter has, for those that have one.
      specs: how each parameter that is quantized is.
      tiles: by path, how many entries share a scale where that is not what the rule says.
      adapters: by path, of the parameters that have one.
    """

    rules: tuple[Rule, ...]
    method: Method
    of_path: Mapping[str, int] = field(default_factory=dict)
    specs: Mapping[str, ArraySpec] = field(default_factory=dict)
    tiles: Mapping[str, int] = field(default_factory=dict)
    adapters: Mapping[str, Adapter] = field(default_factory=dict)

    def entered(self, path: str, array: Any) -> Any:
        """What a program computes with, for what the model holds."""
        spec = self.specs.get(path)
        return array if spec is None else self.method.entered(array, spec)

    def of_parameter(self, path: str, op: str) -> int | None:
        """The rule for a parameter in an operation; None leaves it in float there."""
        number = self.of_path.get(path)
        return number if number is not None and self.rules[number].matches_op(op) else None

    def of_activations(self, op: str) -> int | None:
        """The rule for a product of two activations."""
        found = (
            number for number, rule in enumerate(self.rules) if rule.path is None and rule.op and rule.matches_op(op)
        )
        return next(found, None)


Handler = Callable[["Interpreter", Any, Sequence[Value]], Sequence[Value]]

HANDLERS: Final[dict[str, Handler]] = {}
"""By the name of a primitive: what to do where a parameter is among the operands, or a rule may be for it."""

AdaptedHandler = Callable[["Interpreter", Any, Sequence[Value]], Sequence[Value] | None]

ADAPTED_HANDLERS: Final[dict[str, AdaptedHandler]] = {}
"""Likewise, where a parameter with adapters is among the operands; None asks for it merged."""


@dataclass(frozen=True)
class Loop:
    """A scan whose trips have static ranges of their own.

    Attributes:
      trips: how many there are.
      trip: the number of the trip at hand.
      over_parameters: each trip takes its own part of some parameters, as of layers. Otherwise trips are counted by the
        program alone, and only activations that meet a parameter have ranges of their own.
    """

    trips: int
    trip: Any
    over_parameters: bool


@dataclass
class Interpreter:
    """One run.

    Attributes:
      uses: what became of each parameter, in the order of the program.
      rows: the operations that a parameter, or two activations, went into.
      stops: by path, the primitives behind which a parameter is none any more.
      scopes: the named scopes around the jaxpr that is run.
      key: what the operations here draw from, each with a number of its own; None if they draw nothing.
      draws: one entry for each draw so far.
      place: where in the program this is: the number of the equation in each of the jaxprs around, the outermost first.
      loops: the loops around whose trips have static ranges of their own, the outermost first.
      ranges: of activations, by the site's name; None while sites are looked for.
      sites: the sites that were found, by their keys; while ranges are measured, by name.
      site_names: the names of the program's sites, by their keys.
      measured: the statistics so far, by site, while ranges are measured; else empty.
      shared: jitted functions that are called again, with what their results are and of which parameters.
    """

    treatment: Treatment
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
        """The outputs of a jaxpr, closed or not, for the values of its inputs."""
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
        """A key that nothing else here has; None without a key."""
        if self.key is None:
            return None
        self.draws.append(None)
        return jax.random.fold_in(self.key, len(self.draws))

    def is_weight(self, value: Value) -> bool:
        """Whether a value is a parameter that a rule quantizes, or floats that stand for it while it is trained."""
        source = value.source
        held = source is not None and not source.derived and source.path in self.treatment.specs
        return value.is_quantized or held

    def constant(self, array: Any) -> Value:
        """What no input changes."""
        dtype = jnp.result_type(array)
        is_number = np.ndim(array) == 0 and isinstance(array, np.ndarray | np.generic | float | int)
        return Value(array, None, False, dtype, known=float(array) if is_number else None)

    def new(self, array: Any, *operands: Value) -> Value:
        """What is computed from operands, and is no parameter any more."""
        return Value(array, None, any(operand.from_data for operand in operands), array.dtype)

    def plain(self, value: Value) -> Any:
        """The array, dequantized if it is quantized, merged if it has adapters."""
        if value.is_concatenated:
            return jax.lax.concatenate(list(map(self.plain, value.parts)), value.array.axis)
        if value.is_adapted:
            return value.array.merged(value.dtype)
        return ops.dequantize(value.array, value.dtype) if value.is_quantized else value.array

    def joined(self, value: Value) -> Value:
        """The value as one array, if it is concatenated."""
        return dataclasses.replace(value, array=self.plain(value)) if value.is_concatenated else value

    def name(self, equation: Any, op: str) -> str:
        """An operation's name: the named scopes around it and its own."""
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
        known = operands[0].known if name == "convert_element_type" else None
        return [
            dataclasses.replace(self.new(result, *operands), made_of=paths, made_by=made_by, known=known)
            for result in results
        ]

    def left(self, equation: Any, operands: Sequence[Value], op: str, reason: str, rule: int | None = None) -> None:
        """Reports that an operation is computed in float."""
        paths = tuple(path for operand in operands if operand.source is not None for path in operand.source.paths)
        computed = "dequantized" if any(operand.is_quantized for operand in operands) else "float"
        kinds = tuple(
            str(operand.array.type if hasattr(operand.array, "type") else operand.dtype) for operand in operands
        )
        self.rows.append(OpRow(op, paths, rule, kinds, computed, reason, versions.source_of(equation)))

    def evaluate(self, equation: Any, operands: Sequence[Value]) -> Sequence[Value]:
        """The results of one equation."""
        with versions.traced_here(equation):
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
        """The value as one array that is computed from a parameter, if it has adapters."""
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
        if handler is not None and (concerned or has_products(equation)):
            return handler(self, equation, operands)
        if any(operand.is_quantized for operand in operands):
            self.left(equation, operands, self.name(equation, name), f"{name} takes no quantized operand")
        return self.as_it_is(equation, operands)

    def _derived(self, equation: Any, operands: Sequence[Value], results: Sequence[Any]) -> Source | None:
        """The source of what is computed entry by entry from a parameter and from nothing that is an input."""
        if equation.primitive.name not in _ENTRY_BY_ENTRY or any(operand.from_data for operand in operands):
            return None
        shape = results[0].shape
        found = (operand.source for operand in operands if operand.source is not None and operand.shape == shape)
        source = next(found, None)
        return None if source is None else source.as_derived(equation.primitive.name)


def has_products(equation: Any) -> bool:
    """Whether an equation is a product, or runs one."""
    if equation.primitive.name in _PRODUCTS:
        return True
    return any(
        has_products(inside) for jaxpr in _inner_jaxprs(equation) for inside in versions.equations_of(jaxpr).eqns
    )


def _inner_jaxprs(equation: Any) -> list[Any]:
    """The jaxprs among its parameters, which may hold them in lists."""
    return list(inner_jaxprs(equation.params.values()))
