"""Quantizes models, and functions of parameters.

Methods that round gradients at random do so with a key that the caller hands over, and without one not at random:

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

    The result's `quantized(*args)` calls `fn` on its quantized parameters; `quantized.apply(params, *args)` calls it
    on given ones of the same structure, such as those after a training step. Parameters that are quantized already are
    dequantized first, and by the new rules quantized or left in float.

    Args:
      fn: traced, never patched; a linen module's `apply` with its variables as `params` is one.
      params: a pytree; a parameter's path is made of its keys, indices and attributes, with "/" between.
      rules: in order, or one alone, as `Rule`s or mappings; or a recipe's name, such as "w4a8", or its file.
      sample_args: arguments of a call: arrays, or shapes where no rule needs values. Other calls may have other shapes.
      method: a name of the registry `methods`, such as "qat".
      stream: arguments of calls over which static ranges are measured, where rules ask for these.
      stream_batches: of the stream, at most.

    Raises:
      RuleError: a rule matches nothing, or asks for what the method does not do.
      ShapeError: a tile does not divide the axis that it lies along.
      ArgumentError: a parameter that is to be quantized holds NaN or infinities.
      UnknownName: no such method.
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

    An `nnx.Module` gives one of a subclass of its own class: with the same attributes and variables, of which some hold
    quantized arrays, and with methods that run as programs on these. The module that was given stays as it is. Any
    other callable pytree, such as an Equinox module, gives a `QuantizedModel`. Of a model that was trained by a method
    the parameters are those that were trained; those of a quantized model are dequantized first.

    Args:
      rules: as of `quantize_function`.
      sample_batch: arguments of a call, arrays or shapes: a tuple of them in order, a mapping by name, else the only
        one. Of a language model's batch what the model takes is used.
      method: a name of the registry `methods`, such as "qat".
      call: `call(model, *args)` or `call(model, **kwargs)` uses the model as it will be used, so that all its products
        are seen; by default it is called, and a language model is asked for logits.
      stream: batches like `sample_batch` but of any sizes, such as a Grain iterator, over which static ranges are
        measured, where rules ask for these. The ranges are kept with the parameters: as a variable `static_ranges` of a
        module.
      stream_batches: of the stream, at most.

    Raises:
      As `quantize_function`, and QuantError: the model is neither an `nnx.Module` nor a callable pytree.
    """
    rules = as_rules(rules)
    args, kwargs = _arguments(sample_batch)
    calls = None if stream is None else map(_arguments, islice(stream, stream_batches))
    if _is_nnx_module(model):
        from stack_quant.nnx_model import quantize_module

        return quantize_module(model, rules, args, kwargs, method=method, call=call, stream=calls)
    plain: Any = model.params if isinstance(model, QuantizedModel) else model
    parameters = Parameters.of(plain)
    if not callable(plain) or not parameters.arrays:
        raise QuantError(
            f"{type(plain).__name__} is neither an nnx.Module nor a callable pytree with parameters. Give a function "
            "and its parameters to quantize_function: quantize_function(model.apply, variables, ...) of a linen module."
        )
    arrays, ranges, quantization = quantized(call or _call, parameters, rules, args, kwargs, method, calls)
    return QuantizedModel(parameters.with_arrays(arrays), quantization, ranges)  # pyrefly: ignore


def report(model: Any) -> Report:
    """What `quantize_model` or `quantize_function` did.

    Raises:
      QuantError: the model is not quantized.
    """
    quantization = getattr(model, "quantization", None)
    if not isinstance(quantization, Quantization):
        kind = type(model).__name__
        raise QuantError(f"{kind} is not quantized. Give what quantize_model or quantize_function returned.")
    return quantization.report


def _call(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "ranges", "key"],
    meta_fields=["quantization", "function"],
)
@dataclass(frozen=True, eq=False)  # `jax.jit` hashes the functions that it compiles
class QuantizedModel:
    """A callable pytree with quantized leaves: a model, or a function with its parameters.

    Methods and properties of a model are its own, run as programs. Its submodules, read as attributes, have dequantized
    parameters, and are called as any.

    Attributes:
      params: the model, or the function's parameters, with quantized leaves.
      ranges: the static ranges of activations, by site.
      key: what its gradients are rounded at random with, or None.
      function: `function(params, *args)` is what is computed; of a model, its call.
    """

    params: Any
    quantization: Quantization
    ranges: Any
    key: jax.Array | None = None
    function: Callable[..., Any] = _call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.apply(self.params, *args, **kwargs)

    def apply(self, params: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the function on `params`, which replace its own: those after a training step, for instance."""
        return self.quantization.call(self.function, params, State(self.ranges, self.key), *args, **kwargs)

    def with_key(self, key: jax.Array | None) -> "QuantizedModel":
        """The model whose gradients are rounded at random, drawn from a key: a new one for each step."""
        return dataclasses.replace(self, key=key)

    def __getattr__(self, name: str) -> Any:
        """A method or property of the model, run as a program; or what it holds, parameters dequantized."""
        if name.startswith("__") or name in ("params", "quantization", "ranges", "key"):
            raise AttributeError(name)  # not there yet, as while it is unpickled
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


def _arguments(sample_batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(sample_batch, Mapping):
        return (), dict(sample_batch)
    return (sample_batch if isinstance(sample_batch, tuple) else (sample_batch,)), {}


def _is_nnx_module(model: Any) -> bool:
    flax = sys.modules.get("flax.nnx")  # who has a module has imported it
    return flax is not None and isinstance(model, flax.Module)
