"""Factors of adapters as other packages take and give them."""

import re
from collections.abc import Sequence
from typing import Any

from flax import nnx

from stack_core.abi.adapters import Adapters, LowRankFactors
from stack_quant.errors import QuantError, RuleError
from stack_quant.lora.rules import AdapterRule
from stack_quant.nnx_model import FACTORS
from stack_quant.quantization import Quantization
from stack_quant.transform.adapted import Adapter

__all__ = ["adapters_of", "model_with_adapters", "rules_of"]


def adapters_of(model: Any) -> Adapters:
    """The factors of a module that `adapt_module` gave, abstract or not.

    Raises:
      QuantError: an adapter takes a product over several axes, which others have no word for.
    """
    factors = getattr(model, FACTORS)
    found: dict[str, LowRankFactors] = {}
    for path, adapter in _of_model(model).items():
        if len(adapter.contracted) != 1 or len(adapter.free) != 1:
            raise QuantError(f"The adapter of {path} is of a product over several axes. Merge it: stack convert.")
        held = {name: variable.get_value() for name, variable in factors[path].items()}
        found[path] = LowRankFactors(held["down"], held["up"], adapter.scale, held.get("magnitude"))
    return found


def model_with_adapters(model: Any, adapters: Adapters) -> Any:
    """A module that `adapt_module` gave, with other factors, cast to the dtype that it has.

    Raises:
      RuleError: they are of other parameters, ranks, shapes or scales; names each.
    """
    expected = adapters_of(model)
    lines = [f"  {path} has no adapter here" for path in adapters if path not in expected]
    lines += [f"  {path} has none among those given" for path in expected if path not in adapters]
    lines += [
        f"  {path}: {_described(adapters[path])} given, {_described(wanted)} here"
        for path, wanted in expected.items()
        if path in adapters and _described(adapters[path]) != _described(wanted)
    ]
    if lines:
        listing = "\n".join(lines)
        raise RuleError(
            f"The adapters are not those of the rules of lora:\n{listing}\nGive each parameter that has one a rule of "
            "its rank and alpha (scale is alpha / rank), in the order of the parameters."
        )
    result = nnx.clone(model)
    for path, given in adapters.items():
        for name, variable in getattr(result, FACTORS)[path].items():
            variable.set_value(getattr(given, name).astype(variable.get_value().dtype))
    return result


def rules_of(adapters: Adapters) -> Sequence[AdapterRule]:
    """Rules by which a model gets adapters like these, one for each parameter.

    Raises:
      RuleError: there are none.
    """
    if not adapters:
        raise RuleError("There are no adapters to make rules of.")
    return [
        AdapterRule(
            path=re.escape(path), rank=each.rank, alpha=each.scale * each.rank, magnitude=each.magnitude is not None
        )
        for path, each in adapters.items()
    ]


def _of_model(model: Any) -> dict[str, Adapter]:
    quantization = getattr(model, "quantization", None)
    if not isinstance(quantization, Quantization) or not quantization.treatment.adapters:
        raise QuantError(f"{type(model).__name__} has no adapters.")
    return dict(quantization.treatment.adapters)


def _described(factors: LowRankFactors) -> str:
    kind = "" if factors.magnitude is None else " with magnitudes"
    shapes = f"{list(factors.down.shape)} and {list(factors.up.shape)}"
    return f"rank {factors.rank}{kind}, scale {factors.scale:.6g}, factors {shapes}"
