"""The `quant:` section of a run, and the transform that applies it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator

from stack_core.abi.config import config
from stack_core.ops.building import is_quantized
from stack_quant.methods import method
from stack_quant.model import quantize_model
from stack_quant.recipes import as_rules
from stack_quant.rules import Rule

__all__ = ["QuantConfig", "Quantization"]


def _written_out(rules: Any) -> Any:
    is_list = isinstance(rules, Sequence) and not isinstance(rules, str)
    return rules if is_list else as_rules(rules)


@config
class QuantConfig:
    """By what the model of a run is quantized.

    Attributes:
      rules: the first that matches a parameter wins; also one alone, the name of a recipe, or the path of a YAML file
        that ends in .yaml, in whose place its rules are kept.
      method: a name of the registry `methods`.
    """

    rules: Annotated[tuple[Rule, ...], BeforeValidator(_written_out)]
    method: str = "ptq"

    def __post_init__(self) -> None:
        method(self.method).check(self.rules)


@dataclass(frozen=True)
class Quantization:
    """The `ModelTransform` of `quant:`; quantized training draws its random rounding from the call's `key`.

    Attributes:
      sample_batch: arrays that the model is called with, or their shapes.
    """

    recipe: QuantConfig
    sample_batch: Mapping[str, Any]

    def apply(self, model: Any) -> Any:
        from stack_quant.nnx_model import call_on_batches  # imports flax, which who has a module has

        call, method = call_on_batches(model), self.recipe.method
        return quantize_model(model, self.recipe.rules, dict(self.sample_batch), method=method, call=call)

    def call(self, function: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        from stack_quant.nnx_model import run_as_program  # as above

        key = kwargs.get("key")
        if key is not None and model.quantization.treatment.method.products is not None:
            model = model.with_key(key)
        return run_as_program(function, model, *args, **kwargs)

    def trained(self, path: tuple[Any, ...], variable: Any) -> bool:
        """All that is not held as codes."""
        return not is_quantized(variable.get_value())
