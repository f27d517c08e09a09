"""Methods: what a model holds in the place of a parameter, and how programs compute with it; a registry by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stack_core.abi.plugins import registries
from stack_quant.rules import Rule

__all__ = ["Method", "ProductTypes", "TrainedProducts", "method"]


@dataclass(frozen=True)
class ProductTypes:
    """Types of a product that is trained quantized, names of `stack_quant.qtypes`; None leaves what it is for in float.

    Attributes:
      left, right: of the operands.
      gradients: of the cotangent.
      calibrations: how the ranges of the operands are found.
      range_ends: where integers put the ends of these ranges.
    """

    left: str | None
    right: str | None
    gradients: str | None
    calibrations: tuple[str, str]
    range_ends: str


@dataclass(frozen=True)
class TrainedProducts:
    """Products of two floating operands that are quantized on their way, and whose gradients are such products again.

    Attributes:
      linear: `(left[..., d_in], right[d_in, d_out], dtype, types, key)`, the result as `dtype`; the key may be None.
      convolution: `(left, right, params, types, key)`, with the parameters of the primitive.
      ragged: `(rows[m, k], right[groups, k, n], group_sizes, types, key)`, the result of the rows' dtype.
    """

    linear: Callable[..., Any]
    convolution: Callable[..., Any]
    ragged: Callable[..., Any]


@dataclass(frozen=True)
class Method:
    """A method of quantization.

    Attributes:
      name: "ptq".
      check: raises RuleError where a rule asks for what the method does not do.
      parameter: `(array, spec, path)` to what the model holds in the parameter's place, a pytree class with
        `__stack_qview__` or a floating array; `spec` is the `ArraySpec` that the rule and the parameter's uses give.
      entered: `(held, spec)` to what a program computes with in the place of what the model holds.
      activation: `(array, spec, range)` to what goes into a product in the place of an activation; where the range is
        None, it is found at run time.
      products: what runs in the place of products of two floating operands, or None.
      keeps_ranges: whether it takes ranges that were measured before; others find those of static rules at each call.
    """

    name: str
    check: Callable[[Sequence[Rule]], None]
    parameter: Callable[[Any, Any, str], Any]
    entered: Callable[[Any, Any], Any]
    activation: Callable[..., Any]
    products: TrainedProducts | None = None
    keeps_ranges: bool = False

    def __reduce__(self) -> Any:
        return method, (self.name,)  # it is made of functions, which pickle by where they are only


def method(name: str) -> Method:
    """The method of a name.

    Raises:
      UnknownName: no plugin registers it; names the nearest and all.
    """
    return registries.methods[name]
