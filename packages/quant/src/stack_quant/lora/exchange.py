"""Conversion of a module's adapter factors to and from core's `Adapters`."""

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
    """Returns the factors of a module adapted by `adapt_module`, which may be abstract.

    Raises:
      QuantError: an adapter's product has several contracted or several kept axes, which `Adapters` cannot represent.
    """
    factors = getattr(model, FACTORS)
    found: dict[str, LowRankFactors] = {}
    for path, adapter in _of_model(model).items():
        if len(adapter.contracted) != 1 or len(adapter.free) != 1:
            raise QuantError(
                f"The adapter of {path} is for a product over several axes, which cannot be exported. Merge it into "
                "the parameter by `stack convert`."
            )
        held = {name: variable.get_value() for name, variable in factors[path].items()}
        found[path] = LowRankFactors(held["down"], held["up"], adapter.scale, held.get("magnitude"))
    return found


def model_with_adapters(model: Any, adapters: Adapters) -> Any:
    """Returns a copy of an adapted module with other factors, cast to the module's dtypes.

    Raises:
      RuleError: the adapters have different parameters, ranks, shapes or scales; the message lists each difference.
    """
    expected = adapters_of(model)
    lines = [f"  {path} has no adapter here" for path in adapters if path not in expected]
    lines += [f"  {path} has no adapter in the given ones" for path in expected if path not in adapters]
    lines += [
        f"  {path}: {_describe(adapters[path])} given, {_describe(wanted)} here"
        for path, wanted in expected.items()
        if path in adapters and _describe(adapters[path]) != _describe(wanted)
    ]
    if lines:
        listing = "\n".join(lines)
        raise RuleError(
            f"The adapters do not fit the rules of lora:\n{listing}\nGive each parameter with an adapter a rule with "
            "its rank and alpha (scale is alpha / rank), in the order of the parameters."
        )
    result = nnx.clone(model)
    for path, given in adapters.items():
        for name, variable in getattr(result, FACTORS)[path].items():
            variable.set_value(getattr(given, name).astype(variable.get_value().dtype))
    return result


def rules_of(adapters: Adapters) -> Sequence[AdapterRule]:
    """Returns rules that give a model these adapters, one rule per parameter.

    Raises:
      RuleError: `adapters` is empty.
    """
    if not adapters:
        raise RuleError("There are no adapters to derive rules from.")
    return [
        # The rule divides alpha by the rank again.
        AdapterRule(
            path=re.escape(path), rank=each.rank, alpha=each.scale * each.rank, magnitude=each.magnitude is not None
        )
        for path, each in adapters.items()
    ]


def _of_model(model: Any) -> dict[str, Adapter]:
    quantization = getattr(model, "quantization", None)
    if not isinstance(quantization, Quantization) or not quantization.resolved.adapters:
        raise QuantError(f"{type(model).__name__} has no adapters.")
    return dict(quantization.resolved.adapters)


def _describe(factors: LowRankFactors) -> str:
    kind = "" if factors.magnitude is None else " with magnitudes"
    shapes = f"{list(factors.down.shape)} and {list(factors.up.shape)}"
    return f"rank {factors.rank}{kind}, scale {factors.scale:.6g}, factors {shapes}"
