"""Quantized `nnx` modules, whose methods run as programs on the module's variables."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from stack_core.abi.models import LanguageModel, UntiesHead
from stack_core.ops.building import is_quantized
from stack_quant.algorithms import parse_algorithms
from stack_quant.batch_calls import call_on_batches
from stack_quant.errors import QuantError, RuleError
from stack_quant.measuring import Call
from stack_quant.quantization import Quantization, State, quantized
from stack_quant.rules import Rule
from stack_quant.scales import Range
from stack_quant.transform.coverage import Report
from stack_quant.transform.program import Parameters, Program, trace

__all__ = [
    "FACTORS",
    "IMAGE_INPUTS",
    "ModuleProgram",
    "as_program_class",
    "is_factor",
    "plain_module",
    "quantize_module",
    "run_as_program",
    "untied_for",
    "variables_by_path",
]

_RANGES = "static_ranges"
_KEY = "rounding_key"
FACTORS = "lora"
"""The attribute of a module with the factors of its adapters."""

_LANGUAGE_MODEL_INPUTS = ("tokens", "positions", "segment_ids")
IMAGE_INPUTS = ("pixels", "grids")
"""Arguments of a language model with a tower, which quantization leaves out: a tower stays in float."""


def quantize_module(
    model: Any,
    rules: Sequence[Rule],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    method: str,
    call: Callable[..., Any] | None,
    stream: Iterable[Call] | None,
) -> Any:
    """Quantizes an `nnx.Module`; see `quantize_model`."""
    resolved = model.quantization.resolved if isinstance(getattr(model, "quantization", None), Quantization) else None
    if resolved is not None and resolved.adapters:
        raise QuantError("The model has adapters already, but quantization must precede them: put quant before lora.")
    plain = plain_module(model)
    model = untied_for(plain, [rule.algorithm for rule in rules])
    new = variables_by_path(model).keys() - variables_by_path(plain).keys()
    for path in sorted(new):
        if not any(rule.matches_path(path) for rule in rules):
            raise RuleError(
                f"A rotation of the residual stream unties the head, and no rule matches its parameter {path}. Add a "
                f"rule, such as {{path: {path}, weights: int8}}, or {{path: {path}}} to keep it in float."
            )
    program = ModuleProgram.of(model, args, kwargs, call)
    calls = None if stream is None else ((args, program.taken(kwargs)) for args, kwargs in stream)
    arrays, ranges, quantization = quantized(
        program.fn,
        program.parameters,
        rules,
        program.args,
        program.kwargs,
        method,
        calls,
        lambda path: issubclass(program.kinds[path], nnx.Param),
    )
    result = nnx.clone(model)
    before = program.parameters.arrays
    # Also parameters in float, which a rotation may change.
    changed = {path: array for path, array in arrays.items() if array is not before[path]}
    _set_values(result, changed)
    if ranges:
        setattr(result, _RANGES, nnx.Dict({site: _range_variables(span) for site, span in ranges.items()}))
    result.quantization = dataclasses.replace(quantization, report=_with_new(quantization.report, new))
    as_program_class(result)
    return result


def untied_for(model: Any, algorithms: Iterable[str | None]) -> Any:
    """Returns the model with an untied head if an algorithm rotates the residual stream; otherwise the model itself.

    A rotation moves the scale of the last norm into the head, while the embedding has none.
    """
    steps = [step for text in algorithms if text is not None for step in parse_algorithms(text)]
    is_rotated = any(step.folds and options["stream"] for step, options in steps)
    return model.untied() if is_rotated and isinstance(model, UntiesHead) else model


def _with_new(report: Report, paths: Collection[str]) -> Report:
    """Adds to the rows of parameters that the original model did not have how many bytes they cost."""
    rows = [
        dataclasses.replace(
            row,
            bytes_before=0,
            note="; ".join(filter(None, (row.note, f"untied from the embedding: {row.bytes_after:,} more bytes"))),
        )
        if row.path in paths
        else row
        for row in report.parameters
    ]
    return dataclasses.replace(report, parameters=tuple(rows))


@dataclass(frozen=True)
class ModuleProgram:
    """A call of a module as a function of the values of its variables.

    Attributes:
      fn: the function `(values, *args, **kwargs)`.
      parameters: values of the variables.
      kinds: classes of the variables, by path.
      args, kwargs: arguments of the call.
      taken: function that selects the keyword arguments of a call from a batch.
    """

    fn: Callable[..., Any]
    parameters: Parameters
    kinds: Mapping[str, type]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    taken: Callable[[Mapping[str, Any]], Mapping[str, Any]]

    @classmethod
    def of(
        cls,
        model: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        call: Callable[..., Any] | None = None,
        *,
        images: bool = False,
    ) -> "ModuleProgram":
        """Creates the program of a plain module. Without `call`, a language model also computes logits.

        Args:
          images: True keeps `IMAGE_INPUTS` among the arguments of a language model.
        """
        if call is None and isinstance(model, LanguageModel):
            # A language model with inputs besides its own tokens, such as a source.
            call = call_on_batches(model)
        is_batch = call is None and isinstance(model, LanguageModel)
        used = call or (_logits if is_batch else _called)
        graph, state = nnx.split(model)

        def fn(values: Any, *args: Any, **kwargs: Any) -> Any:
            return used(_merged(graph, state, values), *args, **kwargs)

        kinds = {path: type(variable) for path, variable in variables_by_path(model).items()}
        taken = functools.partial(_inputs, images=images) if is_batch else dict
        return cls(fn, Parameters.of(nnx.to_pure_dict(state)), kinds, args, taken(kwargs), taken)

    def trace(self) -> Program:
        return trace(self.fn, self.parameters, *self.args, **self.kwargs)


def plain_module(model: Any) -> Any:
    """Returns a copy of a quantized or adapted module with its original class and its current variables.

    Static ranges, the key and adapters are dropped. Any other module is returned itself.
    """
    if not isinstance(getattr(model, "quantization", None), Quantization):
        return model
    plain = nnx.clone(model)
    for name in ("quantization", _RANGES, _KEY, FACTORS):
        if hasattr(plain, name):
            delattr(plain, name)
    # `_program_class` makes the original class the first base. `object`'s setter, since nnx tracks assignments.
    object.__setattr__(plain, "__class__", type(model).__mro__[1])
    return plain


def as_program_class(model: Any) -> None:
    """Changes the class of a module in place to a subclass whose methods run as programs."""
    if not issubclass(type(model), _Program):
        object.__setattr__(model, "__class__", _program_class(type(model)))


def is_factor(variable: Any) -> bool:
    """Returns whether a variable is a factor of an adapter."""
    return isinstance(variable, nnx.LoRAParam)


class StaticRange(nnx.Variable[Any]):
    """A variable with the lower or the upper ends of a static range."""


def run_as_program(function: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Computes `function(model, *args, **kwargs)` as one program on the parameters of a quantized module."""
    return _as_program("The function", function, type(model).__mro__[1])(model, *args, **kwargs)


def _logits(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model.logits(model(*args, **kwargs).hidden)


def _inputs(batch: Mapping[str, Any], *, images: bool) -> Mapping[str, Any]:
    # A batch of training also has labels and weights.
    names = (*_LANGUAGE_MODEL_INPUTS, *IMAGE_INPUTS) if images else _LANGUAGE_MODEL_INPUTS
    return {name: array for name, array in batch.items() if name in names}


def _called(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


def _variables(model: Any) -> Iterator[tuple[Sequence[Any], Any]]:
    return ((keys, node) for keys, node in nnx.iter_graph(model) if isinstance(node, nnx.Variable))


def variables_by_path(model: Any) -> dict[str, Any]:
    """Returns the variables of a module by path, with "/" between the segments."""
    return {_path(keys): variable for keys, variable in _variables(model)}


def _path(keys: Sequence[Any]) -> str:
    return "/".join(map(str, keys))


def _merged(graph: Any, state: Any, values: Any) -> Any:
    """Builds the module with other values in its variables."""
    fresh = jax.tree.map(lambda leaf: leaf, state)  # a copy, as the next line changes it in place
    nnx.replace_by_pure_dict(fresh, values)
    return nnx.merge(graph, fresh)


def _range_variables(span: Range) -> Any:
    """Creates the variables of a range [*layers, tiles], with logical axes like those that parameters carry."""
    axes = (*["layers"] * (span.high.ndim - 1), None)
    ends = {name: end for name, end in span._asdict().items() if end is not None}
    return nnx.Dict({name: StaticRange(end, logical_axes=axes) for name, end in ends.items()})


def _set_values(model: Any, arrays: Mapping[str, Any]) -> None:
    for keys, variable in _variables(model):
        if _path(keys) in arrays:
            variable.set_value(arrays[_path(keys)])


class _Program:
    """Marker base of the classes whose methods run as programs."""


# A new class for each module would give modules of one class different tree structures.
@functools.cache
def _program_class(cls: type) -> type:
    """Creates a subclass of a module's class whose methods run as programs. The module's class is its first base."""
    found: dict[str, Any] = {}
    # Subclasses come last and override; methods of nnx itself stay unchanged.
    for base in reversed(cls.__mro__):
        if base not in nnx.Module.__mro__:
            found.update({name: value for name, value in vars(base).items() if _is_method(name, value)})
    methods = {name: _as_program(name, function, cls) for name, function in found.items()}
    body = {
        **methods,
        "with_key": _with_key,
        "__reduce_ex__": _reduced,
        "__module__": cls.__module__,
        "__qualname__": f"Quantized{cls.__qualname__}",
    }
    return type(cls)(f"Quantized{cls.__name__}", (cls, _Program), body)


def _reduced(module: Any, protocol: Any) -> Any:
    """Implements `__reduce_ex__`: pickle cannot import the created class, so it is created again from its base."""
    _, _, *rest = object.__reduce_ex__(module, protocol)
    return _blank, (type(module).__mro__[1],), *rest


def _blank(cls: type) -> Any:
    return object.__new__(_program_class(cls))


def _with_key(module: Any, key: jax.Array) -> Any:
    """Returns the module with a key for stochastic rounding of gradients. Pass a new key at each step.

    The result shares the variables of the module (a method's assignments change both) and adds the key as a variable.
    """
    twin = object.__new__(type(module))
    vars(twin).update(vars(module))
    setattr(twin, _KEY, nnx.RngKey(key, tag="rounding"))
    return twin


def _is_method(name: str, value: Any) -> bool:
    return inspect.isfunction(value) and (name == "__call__" or not name.startswith("__"))


def _as_program(name: str, function: Callable[..., Any], cls: type) -> Callable[..., Any]:
    """Returns a method that runs `function` with the module's quantized parameters."""

    @functools.wraps(function)
    def method(module: Any, /, *args: Any, **kwargs: Any) -> Any:
        key = getattr(module, _KEY, None)
        quantization: Quantization = module.quantization
        graph, state = nnx.split(module)
        leaves, structure = jax.tree.flatten(state)
        fn = _OnValues(name, function, cls, graph, structure, len(leaves))
        values = nnx.to_pure_dict(state)
        ends, factors = values.pop(_RANGES, {}), values.pop(FACTORS, {})
        ranges = {site: Range(found.get("low"), found["high"]) for site, found in ends.items()}
        beside = State(ranges, None if key is None else key[...], factors)
        result, changed = quantization.assign(fn, values, beside, *args, **kwargs)
        # Before any assignment, so a refused call changes nothing.
        _check_unchanged(name, list(changed), module)
        _set_values(module, changed)
        return result

    return method


@dataclass(frozen=True)
class _OnValues:
    """A method as a function of the values of its module's variables.

    Instances for modules of the same structure are equal, which lets the modules share compiled programs.

    Attributes:
      name: name of the method in messages.
      function: the method.
      cls: class of the module before it became a program.
      graph: graph definition of the module.
      state: tree structure of the variables.
      leaves: number of leaves of this structure.
    """

    name: str
    function: Callable[..., Any]
    cls: type
    graph: Any
    state: Any
    leaves: int

    def __call__(self, values: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Returns the result, and the values assigned to variables by path."""
        blank = jax.tree.unflatten(self.state, [_BLANK] * self.leaves)
        twin = _merged(self.graph, blank, values)
        object.__setattr__(twin, "__class__", self.cls)
        before = {_path(keys): variable.get_value() for keys, variable in _variables(twin)}
        result = self.function(twin, *args, **kwargs)
        after = {_path(keys): variable.get_value() for keys, variable in _variables(twin)}
        _check_variables(self.name, before, after)
        # Identity, because tracers cannot be compared.
        return result, {path: value for path, value in after.items() if value is not before[path]}


_BLANK = jax.ShapeDtypeStruct((), jnp.float32)
"""Placeholder for values that are set later."""


def _check_variables(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    # A traced program returns one value for each variable of its trace.
    if before.keys() != after.keys():
        others = sorted(before.keys() ^ after.keys())
        raise QuantError(
            f"{name} adds or removes variables ({', '.join(others)}), which methods of a quantized module cannot do. "
            "Create them before the module is quantized."
        )


def _check_unchanged(name: str, changed: Sequence[str], module: Any) -> None:
    held = {_path(keys): variable.get_value() for keys, variable in _variables(module)}
    quantized = [path for path in changed if is_quantized(held[path])]
    if quantized:
        raise QuantError(f"{name} assigns to {quantized[0]}, which is quantized. Add a rule that leaves it in float.")
