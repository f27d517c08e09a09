"""Adapters for `nnx` modules, with one variable per factor."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from flax import nnx

from stack_quant.errors import QuantError
from stack_quant.lora.planning import add_adapters, factors_of
from stack_quant.lora.rules import AdapterRule
from stack_quant.nnx_model import (
    FACTORS,
    IMAGE_INPUTS,
    ModuleProgram,
    as_program_class,
    plain_module,
    variables_by_path,
)
from stack_quant.quantization import Quantization, unquantized
from stack_quant.transform.adapted import Adapter

__all__ = ["adapt_module", "merge_module"]


def adapt_module(
    model: Any,
    rules: Sequence[AdapterRule],
    sample_batch: Mapping[str, Any],
    *,
    call: Callable[..., Any] | None = None,
    seed: int = 0,
    dtype: str = "float32",
) -> Any:
    """Returns a copy of an `nnx.Module` with adapters, an instance of a subclass of its class.

    The attribute `lora` holds the factors by the path of the parameter: down[*lead, *d_in, rank],
    up[*lead, rank, *d_out] and, for DoRA, magnitude[*lead, *d_out]. The lead axes are layers and experts.

    Args:
      model: module with values or shapes; some parameters may be quantized.
      rules: rules in order of precedence.
      sample_batch: keyword arguments of a call, as arrays or shapes.
      call: see `quantize_model`.
      seed: seed of the factors "down".
      dtype: dtype of the factors.

    Raises:
      RuleError: a rule matches nothing.
      QuantError: the model has adapters already.
    """
    held = getattr(model, "quantization", None)
    quantization = held if isinstance(held, Quantization) else unquantized()
    plain = plain_module(model)
    program = ModuleProgram.of(plain, (), sample_batch, call)
    has_images = any(name in sample_batch for name in IMAGE_INPUTS)
    arrays = program.parameters.arrays
    resolved = add_adapters(
        rules,
        program.trace(),
        arrays,
        quantization.resolved,
        lambda path: issubclass(program.kinds[path], nnx.Param),
        with_images=ModuleProgram.of(plain, (), sample_batch, call, images=True).trace() if has_images else None,
    )
    factors = factors_of(resolved.adapters, arrays, jax.random.key(seed), dtype)
    result = nnx.clone(model)
    variables = variables_by_path(model)
    adapters = {
        path: _factor_variables(resolved.adapters[path], found, variables[path].get_metadata().get("logical_axes"))
        for path, found in factors.items()
    }
    setattr(result, FACTORS, nnx.Dict(adapters))
    result.quantization = replace(quantization, resolved=resolved)
    as_program_class(result)
    return result


def merge_module(model: Any) -> Any:
    """Merges the adapters into the parameters, which become floating arrays.

    Raises:
      QuantError: the module does not have adapters.
    """
    quantization = getattr(model, "quantization", None)
    if not isinstance(quantization, Quantization) or not quantization.resolved.adapters:
        raise QuantError(f"{type(model).__name__} has no adapters to merge.")
    resolved, factors = quantization.resolved, nnx.to_pure_dict(nnx.state(getattr(model, FACTORS)))
    # Without quantized parameters, methods need not run as programs.
    is_all_float = not resolved.rules
    result = plain_module(model) if is_all_float else nnx.clone(model)
    if not is_all_float:
        delattr(result, FACTORS)
        result.quantization = replace(quantization, resolved=replace(resolved, adapters={}))
    variables = variables_by_path(result)
    for path, adapter in resolved.adapters.items():
        held = variables[path].get_value()
        base = resolved.entered(path, held)
        variables[path].set_value(adapter.adapted(base, factors[path]).merged(held.dtype))
    return result


def _factor_variables(adapter: Adapter, factors: Mapping[str, Any], axes: Sequence[str | None] | None) -> Any:
    """Creates the variables of one parameter's factors, with the logical axes of the parameter."""
    names = axes if axes is not None else [None] * len(adapter.shape)
    return nnx.Dict(
        {
            name: nnx.LoRAParam(
                factors[name], logical_axes=tuple(None if axis is None else names[axis] for axis in along)
            )
            for name, along in adapter.axes.items()
        }
    )
