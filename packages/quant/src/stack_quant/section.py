"""The `quant:` section of a run config, and the model transform that quantizes the model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator

from stack_core.abi.config import config
from stack_core.ops.building import is_quantized
from stack_quant.batch_calls import call_on_batches
from stack_quant.errors import QuantError
from stack_quant.methods import method
from stack_quant.model import quantize_model
from stack_quant.recipes import as_rules
from stack_quant.rules import Rule

__all__ = ["QuantConfig", "Quantization"]


def _written_out(rules: Any) -> Any:
    return as_rules(rules, path="quant.rules")


@config
class QuantConfig:
    """Quantization of a run's model.

    Attributes:
      rules: rules in order of precedence; the first rule that matches a parameter applies. A single rule, the name of a
        recipe and the path of a .yaml file are also accepted; a recipe is replaced by its rules when the config is
        parsed.
      method: a name of the registry `methods`: "ptq" quantizes a trained model, "qat" and "qt" train it.
    """

    rules: Annotated[tuple[Rule, ...], BeforeValidator(_written_out)]
    method: str = "ptq"

    def __post_init__(self) -> None:
        method(self.method).check(self.rules)


@dataclass(frozen=True)
class Quantization:
    """The `ModelTransform` of `quant:`. Quantized training draws its stochastic rounding from the call's `key`.

    Attributes:
      recipe: the section of the run config.
      sample_batch: arguments of a call of the model, by name, as arrays or shapes.
    """

    recipe: QuantConfig
    sample_batch: Mapping[str, Any]

    def apply(self, model: Any) -> Any:
        call, method = call_on_batches(model), self.recipe.method
        return quantize_model(model, self.recipe.rules, dict(self.sample_batch), method=method, call=call)

    def call(self, function: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        from stack_quant.nnx_model import run_as_program  # imports Flax, which a model in training needs

        key = kwargs.get("key")
        if key is not None and model.quantization.resolved.method.products is not None:
            model = model.with_key(key)
        return run_as_program(function, model, *args, **kwargs)

    def trained(self, path: tuple[Any, ...], variable: Any) -> bool:
        """Returns whether a variable is trained: every variable that is not stored as codes."""
        return not is_quantized(variable.get_value())

    def input_type(self, model: Any, path: str) -> str | None:
        """Returns the type of the inputs that a parameter multiplies; None for floats.

        Raises:
          QuantError: the inputs have static ranges.
        """
        number = model.quantization.resolved.of_path.get(path)
        rule = None if number is None else self.recipe.rules[number]
        if rule is not None and rule.is_static:
            raise QuantError(
                f"{path} multiplies inputs with static ranges, which belong to a product and not to a parameter. "
                "Quantize again without static_ranges."
            )
        return None if rule is None else rule.activations
