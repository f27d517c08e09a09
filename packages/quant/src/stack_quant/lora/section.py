"""The `lora:` section of a run config, and the model transform that adds the adapters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from stack_core.abi.adapters import Adapters
from stack_core.abi.config import config
from stack_quant.batch_calls import call_on_batches
from stack_quant.lora.rules import AdapterRule, as_adapter_rules

__all__ = ["LoRAConfig", "LowRankAdaptation"]


def _rules_of_section(rules: Any) -> Any:
    return as_adapter_rules(rules, path="lora.rules")


@config
class LoRAConfig:
    """Low-rank adapters of a run's model. Only the adapters are trained.

    Attributes:
      rules: rules in order of precedence; the first rule that matches a parameter applies. A single rule is also
        accepted.
      seed: seed of the initial factors.
      dtype: dtype of the factors. Updates of bfloat16 factors are rounded stochastically; their moments are float32.
    """

    rules: Annotated[tuple[AdapterRule, ...], BeforeValidator(_rules_of_section)]
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    dtype: Literal["float32", "bfloat16"] = "float32"


@dataclass(frozen=True)
class LowRankAdaptation:
    """The `ModelTransform` of `lora:`, for models in float and for models quantized by an earlier section.

    It also implements `MergesModel` and `AdaptsModels`.

    Attributes:
      recipe: the section of the run config.
      sample_batch: arguments of a call of the model, by name, as arrays or shapes.
    """

    recipe: LoRAConfig
    sample_batch: Mapping[str, Any]

    def apply(self, model: Any) -> Any:
        # Imports Flax, an optional dependency that is installed if there is an nnx.Module.
        from stack_quant.lora.module import adapt_module

        call, recipe = call_on_batches(model), self.recipe
        return adapt_module(model, recipe.rules, self.sample_batch, call=call, seed=recipe.seed, dtype=recipe.dtype)

    def call(self, function: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        from stack_quant.nnx_model import run_as_program  # as above

        if model.quantization.resolved.rules:  # the section `quant:` runs the program, including the adapters
            return function(model, *args, **kwargs)
        return run_as_program(function, model, *args, **kwargs)

    def trained(self, path: tuple[Any, ...], variable: Any) -> bool:
        """Returns whether a variable is trained: only the factors of the adapters."""
        from stack_quant.nnx_model import is_factor  # as above

        return is_factor(variable)

    def merged(self, model: Any) -> Any:
        from stack_quant.lora.module import merge_module  # as above

        return merge_module(model)

    def adapters(self, model: Any) -> Adapters:
        from stack_quant.lora.exchange import adapters_of  # as above

        return adapters_of(model)

    def with_adapters(self, model: Any, adapters: Adapters) -> Any:
        from stack_quant.lora.exchange import model_with_adapters  # as above

        return model_with_adapters(model, adapters)

    @staticmethod
    def section_of(adapters: Adapters) -> LoRAConfig:
        from stack_quant.lora.exchange import rules_of  # as above

        dtypes = {str(each.down.dtype) for each in adapters.values()}
        return LoRAConfig(rules=tuple(rules_of(adapters)), dtype="bfloat16" if dtypes == {"bfloat16"} else "float32")
