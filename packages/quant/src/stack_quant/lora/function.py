"""Adapters on a function of parameters, such as a linen module's `apply` or an Equinox module's call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from stack_quant.lora.planning import adapted_treatment, factors_of
from stack_quant.lora.rules import AdapterRules, as_adapter_rules
from stack_quant.model import QuantizedModel
from stack_quant.quantization import Quantization, State, unquantized
from stack_quant.transform.adapted import Factors
from stack_quant.transform.program import Parameters, trace

__all__ = ["AdaptedFunction", "adapt_function"]


def adapt_function(
    fn: Callable[..., Any], params: Any, rules: AdapterRules, sample_args: Sequence[Any], *, key: jax.Array
) -> "tuple[AdaptedFunction, Mapping[str, Factors]]":
    """Puts adapters on the parameters of `fn(params, *args)` by rules on their paths.

    Args:
      fn: traced, never patched; or what `quantize_function` returned, for adapters on its quantized `params`.
      params: a pytree, frozen.
      rules: in order, or one alone, as `AdapterRule`s or mappings.
      sample_args: arguments of a call, arrays or shapes.

    Returns:
      A function `(factors, params, *args)`, and the factors, what is trained: by path, arrays that change nothing yet.

    Raises:
      RuleError: a rule matches nothing.
    """
    quantized = fn if isinstance(fn, QuantizedModel) else QuantizedModel(params, unquantized(), {}, function=fn)
    parameters = Parameters.of(params)
    program = trace(quantized.function, parameters, *sample_args)
    treatment = adapted_treatment(
        as_adapter_rules(rules), program, parameters.arrays, quantized.quantization.treatment, lambda path: True
    )
    adapted = replace(quantized, params=None, quantization=replace(quantized.quantization, treatment=treatment))
    return AdaptedFunction(adapted), factors_of(treatment.adapters, parameters.arrays, key, jnp.float32)


@dataclass(frozen=True)
class AdaptedFunction:
    """A function of factors, parameters and other arguments.

    Attributes:
      function: what is computed and how, without parameters.
    """

    function: QuantizedModel

    def __call__(self, factors: Mapping[str, Factors], params: Any, *args: Any, **kwargs: Any) -> Any:
        quantization: Quantization = self.function.quantization
        state = State(self.function.ranges, self.function.key, factors)
        return quantization.call(self.function.function, params, state, *args, **kwargs)

    def merged(self, factors: Mapping[str, Factors], params: Any) -> Any:
        """The parameters with their adapters in them, which the function without adapters takes."""
        parameters = Parameters.of(params)
        arrays, adapters = parameters.arrays, self.function.quantization.treatment.adapters
        return parameters.with_arrays(
            {
                path: adapter.adapted(arrays[path], factors[path]).merged(arrays[path].dtype)
                for path, adapter in adapters.items()
            }
        )
