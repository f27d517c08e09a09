"""Quantization of models and of functions of parameters.

Methods with stochastic rounding of gradients draw from a key that the caller passes. Without a key they round to the
nearest value:

    loss, gradients = jax.value_and_grad(lambda model: loss_of(model.with_key(key), batch))(model)
"""

import dataclasses
import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import jax

from stack_core import ops
from stack_core.ops.building import is_quantized
from stack_quant.calibration import STREAM_BATCHES
from stack_quant.errors import QuantError
from stack_quant.quantization import Quantization, State, quantized
from stack_quant.recipes import Rules, as_rules
from stack_quant.transform.coverage import Report
from stack_quant.transform.program import Parameters

__all__ = ["QuantizedModel", "quantize_function", "quantize_model", "report"]

M = TypeVar("M")


def quantize_function(
    fn: Callable[..., Any],
    params: Any,
    rules: Rules,
    sample_args: Sequence[Any],
    *,
    method: str = "ptq",
    stream: Iterable[Sequence[Any]] | None = None,
    stream_batches: int = STREAM_BATCHES,
) -> "QuantizedModel":
    """Quantizes the parameters of `fn(params, *args)` by rules on their paths.

    `quantized(*args)` of the result calls `fn` on the quantized parameters. `quantized.apply(params, *args)` calls it
    on other parameters of the same structure, such as the parameters after a training step. Parameters that are
    already quantized are dequantized first; the new rules then quantize them or leave them in float.

    Args:
      fn: function to quantize, which is traced and never patched. For a linen module pass `module.apply`, with its
        variables as `params`.
      params: pytree of parameters. The keys, indices and attributes of a leaf, joined by "/", are its path.
      rules: one `Rule` or mapping, or a sequence of these in order of precedence; or a recipe, as a name such as "w4a8"
        or as the path of a YAML file.
      sample_args: arguments of one call, as arrays or as shapes. Later calls may have other shapes.
      method: a name of the registry `methods`, such as "qat".
      stream: arguments of the calls over which static ranges are measured. Method "ptq" needs it for rules with static
        ranges.
      stream_batches: maximum number of calls taken from the stream.

    Raises:
      RuleError: a rule matches nothing, or the method does not support a rule.
      ShapeError: a tile size does not divide its axis.
      ArgumentError: a parameter to be quantized contains NaN or infinities.
      UnknownName: the method is not registered.
    """
    parameters = Parameters.of(params)
    calls = None if stream is None else ((args, {}) for args in islice(stream, stream_batches))
    fn = fn.function if isinstance(fn, QuantizedModel) else fn
    arrays, ranges, quantization = quantized(fn, parameters, as_rules(rules), sample_args, {}, method, calls)
    return QuantizedModel(parameters.with_arrays(arrays), quantization, ranges, function=fn)


def quantize_model(
    model: M,
    rules: Rules,
    sample_batch: Any,
    *,
    method: str = "ptq",
    call: Callable[..., Any] | None = None,
    stream: Iterable[Any] | None = None,
    stream_batches: int = STREAM_BATCHES,
) -> M:
    """Quantizes a model by rules on the paths of its parameters.

    For an `nnx.Module` the result is an instance of a subclass of its class. It has the same attributes and variables,
    some of which store quantized arrays, and its methods run as programs on them. The original module is not changed.
    For any other callable pytree, such as an Equinox module, the result is a `QuantizedModel`. A model in training by
    "qat" or "qt" is quantized from its float parameters; a quantized model is dequantized first.

    Args:
      model: an `nnx.Module` or a callable pytree.
      rules: as for `quantize_function`.
      sample_batch: arguments of one call, as arrays or shapes: a tuple of positional arguments, a mapping of keyword
        arguments, or a single argument. A language model uses only the entries that are its inputs.
      method: a name of the registry `methods`, such as "qat".
      call: function `call(model, *args)` or `call(model, **kwargs)` that runs every product the model will be used
        for. By default the model is called, and a language model also computes logits.
      stream: batches in the form of `sample_batch`, of any sizes, over which static ranges are measured; for example a
        Grain iterator. Method "ptq" needs it for rules with static ranges. A module stores the ranges in its attribute
        `static_ranges`.
      stream_batches: maximum number of batches taken from the stream.

    Raises:
      As `quantize_function`, and QuantError: the model is neither an `nnx.Module` nor a callable pytree.
    """
    rules = as_rules(rules)
    args, kwargs = split_arguments(sample_batch)
    calls = None if stream is None else map(split_arguments, islice(stream, stream_batches))
    if is_nnx_module(model):
        from stack_quant.nnx_model import quantize_module

        return quantize_module(model, rules, args, kwargs, method=method, call=call, stream=calls)
    plain: Any = model.params if isinstance(model, QuantizedModel) else model
    parameters = Parameters.of(plain)
    if not callable(plain) or not parameters.arrays:
        raise QuantError(
            f"{type(plain).__name__} is neither an nnx.Module nor a callable pytree with parameters. Give a function "
            "and its parameters to quantize_function: quantize_function(model.apply, variables, ...) of a linen module."
        )
    arrays, ranges, quantization = quantized(call or call_model, parameters, rules, args, kwargs, method, calls)
    return QuantizedModel(parameters.with_arrays(arrays), quantization, ranges)  # pyrefly: ignore


def report(model: Any) -> Report:
    """Returns the report of `quantize_model` or `quantize_function`.

    Raises:
      QuantError: the model is not quantized.
    """
    quantization = getattr(model, "quantization", None)
    if not isinstance(quantization, Quantization):
        kind = type(model).__name__
        raise QuantError(f"{kind} is not quantized. Give what quantize_model or quantize_function returned.")
    return quantization.report


def call_model(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "ranges", "key"],
    meta_fields=["quantization", "function"],
)
@dataclass(frozen=True, eq=False)  # hashed by identity: `jax.jit` hashes the functions that it compiles
class QuantizedModel:
    """A callable pytree with quantized leaves: a model, or a function with its parameters.

    Methods and properties of the wrapped model are available and run as programs. Submodules, read as attributes, have
    dequantized parameters and can be called as usual.

    Attributes:
      params: the model, or the parameters of the function, with quantized leaves.
      quantization: the plan by which programs run, and the report.
      ranges: static ranges of activations, by site.
      key: PRNG key of the stochastic rounding of gradients; None rounds to the nearest.
      function: the computation, `function(params, *args)`. For a model, its `__call__`.
    """

    params: Any
    quantization: Quantization
    ranges: Any
    key: jax.Array | None = None
    function: Callable[..., Any] = call_model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.apply(self.params, *args, **kwargs)

    def apply(self, params: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the function on `params` instead of its own parameters, for instance after a training step."""
        return self.quantization.call(self.function, params, State(self.ranges, self.key), *args, **kwargs)

    def with_key(self, key: jax.Array | None) -> "QuantizedModel":
        """Returns the model with a key for stochastic rounding of gradients. Pass a new key at each step."""
        return dataclasses.replace(self, key=key)

    def __getattr__(self, name: str) -> Any:
        """Returns a method or property of the model as a program, or another attribute with dequantized parameters."""
        if name.startswith("__") or name in ("params", "quantization", "ranges", "key"):
            raise AttributeError(name)  # unpickling reads attributes before it has set these, which would recurse
        found, state = inspect.getattr_static(type(self.params), name, None), State(self.ranges, self.key)
        if inspect.isfunction(found):
            return functools.partial(self.quantization.call, found, self.params, state)
        if isinstance(found, property):
            return self.quantization.call(operator.attrgetter(name), self.params, state)
        if not hasattr(self.params, name):
            raise AttributeError(f"{type(self.params).__name__} has no attribute {name!r}.")
        return jax.tree.map(
            lambda leaf: ops.dequantize(leaf, leaf.dtype) if is_quantized(leaf) else leaf,
            getattr(self.params, name),
            is_leaf=is_quantized,
        )


def split_arguments(sample_batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(sample_batch, Mapping):
        return (), dict(sample_batch)
    return (sample_batch if isinstance(sample_batch, tuple) else (sample_batch,)), {}


def is_nnx_module(model: Any) -> bool:
    flax = sys.modules.get("flax.nnx")  # Flax is optional: if it is not imported, no nnx.Module can exist
    return flax is not None and isinstance(model, flax.Module)
