"""Quantized `nnx` modules: the same variables, and methods that run as programs on them."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from stack_core.ops.building import is_quantized
from stack_core.protocols import LanguageModel
from stack_quant.errors import QuantError
from stack_quant.measuring import Call
from stack_quant.quantization import Quantization, State, quantized
from stack_quant.rules import Rule
from stack_quant.scales import Range
from stack_quant.transform.program import Parameters

__all__ = ["quantize_module", "run_as_program"]

_RANGES = "static_ranges"
_LANGUAGE_MODEL_INPUTS = ("tokens", "positions", "segment_ids")


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
    """As `quantize_model`, of an `nnx.Module`."""
    taken = (lambda kwargs: kwargs) if call is not None or not isinstance(model, LanguageModel) else _inputs
    if call is None:
        call = _logits if isinstance(model, LanguageModel) else _called
    calls = None if stream is None else ((args, taken(kwargs)) for args, kwargs in stream)
    graph, state = nnx.split(model)
    kinds = {_path(keys): type(variable) for keys, variable in _variables(model)}

    def fn(values: Any, *args: Any, **kwargs: Any) -> Any:
        return call(_merged(graph, state, values), *args, **kwargs)

    parameters = Parameters.of(nnx.to_pure_dict(state))
    arrays, ranges, quantization = quantized(
        fn, parameters, rules, args, taken(kwargs), method, calls, lambda path: issubclass(kinds[path], nnx.Param)
    )
    result = nnx.clone(model)
    _set_values(result, {path: array for path, array in arrays.items() if is_quantized(array)})
    if ranges:
        setattr(result, _RANGES, nnx.Dict({site: _range_variables(span) for site, span in ranges.items()}))
    result.quantization = quantization
    object.__setattr__(result, "__class__", _quantized_class(type(model)))
    return result


class StaticRange(nnx.Variable[Any]):
    """A variable that holds an end of a static range of activations."""


def run_as_program(function: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """`function(model, *args, **kwargs)` of a quantized module, as one program on its parameters."""
    return _as_program("The function", function, type(model).__mro__[1])(model, *args, **kwargs)


def _logits(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model.logits(model(*args, **kwargs))


def _inputs(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: array for name, array in batch.items() if name in _LANGUAGE_MODEL_INPUTS}


def _called(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


def _variables(model: Any) -> Iterator[tuple[Sequence[Any], Any]]:
    return ((keys, node) for keys, node in nnx.iter_graph(model) if isinstance(node, nnx.Variable))


def _path(keys: Sequence[Any]) -> str:
    return "/".join(map(str, keys))


def _merged(graph: Any, state: Any, values: Any) -> Any:
    """The module with other values in its variables."""
    fresh = jax.tree.map(lambda leaf: leaf, state)
    nnx.replace_by_pure_dict(fresh, values)
    return nnx.merge(graph, fresh)


def _range_variables(span: Range) -> Any:
    """The ends of a range `[*layers, tiles]`; what parameters say of their axes, they say of theirs."""
    axes = (*["layers"] * (span.high.ndim - 1), None)
    ends = {name: end for name, end in span._asdict().items() if end is not None}
    return nnx.Dict({name: StaticRange(end, logical_axes=axes) for name, end in ends.items()})


def _set_values(model: Any, arrays: Mapping[str, Any]) -> None:
    for keys, variable in _variables(model):
        if _path(keys) in arrays:
            variable.set_value(arrays[_path(keys)])


@functools.cache
def _quantized_class(cls: type) -> type:
    """A subclass of a module's class whose methods run as programs."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base not in nnx.Module.__mro__:
            found.update({name: value for name, value in vars(base).items() if _is_method(name, value)})
    methods = {name: _as_program(name, function, cls) for name, function in found.items()}
    body = {
        **methods,
        "with_key": _with_key,
        "__module__": cls.__module__,
        "__qualname__": f"Quantized{cls.__qualname__}",
    }
    return type(cls)(f"Quantized{cls.__name__}", (cls,), body)


def _with_key(module: Any, key: jax.Array) -> Any:
    """The module whose gradients are rounded at random, drawn from a key: a new one for each step.

    It holds the same variables, so that what methods assign is assigned in both, and the key as one more.
    """
    twin = object.__new__(type(module))
    vars(twin).update(vars(module))
    twin.rounding_key = nnx.RngKey(key, tag="rounding")
    return twin


def _is_method(name: str, value: Any) -> bool:
    return inspect.isfunction(value) and (name == "__call__" or not name.startswith("__"))


def _as_program(name: str, function: Callable[..., Any], cls: type) -> Callable[..., Any]:
    """A method that runs `function`, whatever it calls its first argument, with the module's quantized parameters."""

    @functools.wraps(function)
    def method(module: Any, /, *args: Any, **kwargs: Any) -> Any:
        key = getattr(module, "rounding_key", None)
        quantization: Quantization = module.quantization
        graph, state = nnx.split(module)
        changed: list[str] = []

        def fn(values: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
            twin = _merged(graph, state, values)
            object.__setattr__(twin, "__class__", cls)
            before = {_path(keys): variable.get_value() for keys, variable in _variables(twin)}
            result = function(twin, *args, **kwargs)
            after = {_path(keys): variable.get_value() for keys, variable in _variables(twin)}
            _check_variables(name, before, after)
            changed[:] = [path for path, value in after.items() if value is not before[path]]
            return result, {path: after[path] for path in changed}

        values = nnx.to_pure_dict(state)
        ends = values.pop(_RANGES, {})
        ranges = {site: Range(found.get("low"), found["high"]) for site, found in ends.items()}
        beside = State(ranges, None if key is None else key[...])
        result, values = quantization.call(fn, values, beside, *args, **kwargs)
        _check_unchanged(name, changed, module)
        _set_values(module, values)
        return result

    return method


def _check_variables(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    if before.keys() != after.keys():
        others = sorted(before.keys() ^ after.keys())
        raise QuantError(
            f"{name} adds or removes variables ({', '.join(others)}), which a quantized module's methods cannot. "
            "Make them before the module is quantized."
        )


def _check_unchanged(name: str, changed: Sequence[str], module: Any) -> None:
    held = {_path(keys): variable.get_value() for keys, variable in _variables(module)}
    quantized = [path for path in changed if is_quantized(held[path])]
    if quantized:
        raise QuantError(f"{name} assigns to {quantized[0]}, which is quantized. Leave it in float by a rule.")
