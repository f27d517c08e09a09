"""Predicates that implementations use in `supports`, and the reasons they return."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax

from stack_core.abi.ops import OpCall, QView
from stack_core.chips import Chip
from stack_core.ops.building import QuantizedArray, is_quantized

__all__ = ["abstract_view", "first_problem", "is_beyond", "only_weight_is_quantized", "takes_no", "unquantized"]


def first_problem(conditions: Mapping[str, bool]) -> bool | str:
    """Returns the first reason whose condition holds, or True if none does; the answer of a `supports`."""
    return next((reason for reason, applies in conditions.items() if applies), True)


def is_beyond(config: Any, space: Iterable[Any]) -> bool:
    """Checks whether a config from a tuned table is outside the search space of the call."""
    return config is not None and config not in list(space)


def unquantized(call: OpCall, chip: Chip, config: Any = None) -> bool | str:
    """Implements `supports` for implementations that take any call without quantized operands."""
    quantized = [name for name, array in call.arrays.items() if is_quantized(array)]
    return f"{' and '.join(quantized)} is quantized" if quantized else True


def takes_no(call: OpCall, *names: str) -> bool | str:
    """Returns True if these optional arguments are all unset, else a reason with the names of set ones."""
    arguments = {**call.arrays, **call.options}
    present = [name for name in names if arguments.get(name) is not None]
    return f"it takes no {' and no '.join(present)}" if present else True


def abstract_view(array: QuantizedArray) -> QView:
    """Returns the `QView` of a quantized array, or of a struct of one, with shapes instead of values."""
    known = {}

    def show(array: Any) -> tuple[Any, ...]:
        view = array.__stack_qview__()
        known.update(abi=view.abi, scheme=view.scheme)
        return view.qvalue, view.scale, view.zero_point, view.codebook

    # `eval_shape` returns structs of arrays only; the strings leave `show` through `known`.
    qvalue, scale, zero_point, codebook = jax.eval_shape(show, array)
    return QView(qvalue=qvalue, scale=scale, zero_point=zero_point, codebook=codebook, **known)


def only_weight_is_quantized(call: OpCall) -> bool | str:
    """Checks that the weight of a `linear` call is quantized and x is not."""
    if not is_quantized(call.arrays["weight"]):
        return "the weight is not quantized"
    return "both operands are quantized" if is_quantized(call.arrays["x"]) else True
