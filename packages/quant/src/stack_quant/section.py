"""The `quant:` section of a run, and the quantizer that applies it."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

from stack_core.config import config
from stack_quant.methods import method
from stack_quant.model import quantize_model, report
from stack_quant.recipes import named_or_read
from stack_quant.rules import Rule
from stack_quant.transform.coverage import Report

__all__ = ["QUANTIZER", "QuantConfig", "RuleQuantizer"]


def _written_out(rules: Any) -> Any:
    return named_or_read(rules) if isinstance(rules, str) else rules


@config
class QuantConfig:
    """By what the model of a run is quantized.

    Attributes:
      rules: the first that matches a parameter wins; also the name of a recipe, or the path of a YAML file that ends in
        .yaml, in whose place its rules are kept.
      method: a name of `stack_quant.methods`.
    """

    rules: Annotated[tuple[Rule, ...], BeforeValidator(_written_out)]
    method: str = "ptq"

    def __post_init__(self) -> None:
        method(self.method).check(self.rules)


class RuleQuantizer:
    """The `Quantizer` of `quant:`; what quantized training rounds at random, it draws from the call's `key`."""

    def apply(self, model: Any, recipe: QuantConfig, sample_batch: Mapping[str, Any]) -> tuple[Any, Report]:
        quantized = quantize_model(model, recipe.rules, dict(sample_batch), method=recipe.method)
        return quantized, report(quantized)

    def call(self, function: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        from stack_quant.nnx_model import run_as_program  # imports flax, which who has a module has

        key = kwargs.get("key")
        if key is not None and model.quantization.report.method == "qt":
            model = model.with_key(key)
        return run_as_program(function, model, *args, **kwargs)


QUANTIZER = RuleQuantizer()
