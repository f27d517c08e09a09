"""Adapters for functions of parameters, such as the `apply` of a linen module or the call of an Equinox module."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from stack_quant.lora.planning import add_adapters, factors_of
from stack_quant.lora.rules import AdapterRules, as_adapter_rules
from stack_quant.model import QuantizedModel
from stack_quant.quantization import Quantization, State, unquantized
from stack_quant.transform.adapted import Factors
from stack_quant.transform.program import Parameters, trace

__all__ = ["AdaptedFunction", "adapt_function"]


def adapt_function(
    fn: Callable[..., Any], params: Any, rules: AdapterRules, sample_args: Sequence[Any], *, key: jax.Array
) -> "tuple[AdaptedFunction, Mapping[str, Factors]]":
    """Adds adapters to the parameters of `fn(params, *args)` by rules on their paths.

    Args:
      fn: function, which is traced and never patched; or the result of `quantize_function`, for adapters on its
        quantized `params`.
      params: pytree of parameters, which stay frozen.
      rules: one `AdapterRule` or mapping, or a sequence of them in order of precedence.
      sample_args: arguments of one call, as arrays or shapes.
      key: PRNG key of the initial factors.

    Returns:
      A function `(factors, params, *args)`, and the trainable factors by path. The initial factors do not change the
      result.

    Raises:
      RuleError: a rule matches nothing.
    """
    # A plan without rules runs in float, which lets adapters have one implementation.
    quantized = fn if isinstance(fn, QuantizedModel) else QuantizedModel(params, unquantized(), {}, function=fn)
    parameters = Parameters.of(params)
    program = trace(quantized.function, parameters, *sample_args)
    resolved = add_adapters(
        as_adapter_rules(rules), program, parameters.arrays, quantized.quantization.resolved, lambda path: True
    )
    adapted = replace(quantized, params=None, quantization=replace(quantized.quantization, resolved=resolved))
    return AdaptedFunction(adapted), factors_of(resolved.adapters, parameters.arrays, key, jnp.float32)


@dataclass(frozen=True)
class AdaptedFunction:
    """A function of factors, parameters and other arguments.

    Attributes:
      function: the function with its plan, without parameters.
    """

    function: QuantizedModel

    def __call__(self, factors: Mapping[str, Factors], params: Any, *args: Any, **kwargs: Any) -> Any:
        quantization: Quantization = self.function.quantization
        state = State(self.function.ranges, self.function.key, factors)
        return quantization.call(self.function.function, params, state, *args, **kwargs)

    def merged(self, factors: Mapping[str, Factors], params: Any) -> Any:
        """Merges the adapters into the parameters, for calls of the original function."""
        parameters = Parameters.of(params)
        arrays, adapters = parameters.arrays, self.function.quantization.resolved.adapters
        return parameters.with_arrays(
            {
                path: adapter.adapted(arrays[path], factors[path]).merged(arrays[path].dtype)
                for path, adapter in adapters.items()
            }
        )
