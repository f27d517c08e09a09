"""Quantization methods: a registry of how parameters are stored and how products are computed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stack_core.abi.plugins import registries
from stack_quant.qtypes import qtype
from stack_quant.rules import Rule

__all__ = ["Method", "ProductTypes", "TrainedProducts", "method"]


@dataclass(frozen=True)
class ProductTypes:
    """Types of a product in quantized training. Each is a name of `stack_quant.qtypes`; None leaves an array in float.

    Attributes:
      left, right: types of the operands.
      gradients: type of the cotangent.
      calibrations: calibrations of the left and the right operand.
      range_ends: position of the ends of a range among integer codes, a key of `stack_quant.spec.RANGE_ENDS`.
    """

    left: str | None
    right: str | None
    gradients: str | None
    calibrations: tuple[str, str]
    range_ends: str

    @property
    def multiplies_codes(self) -> bool:
        """True if the operands are multiplied as codes: both are integers, or both are fp8."""
        if self.left is None or self.right is None:
            return False
        return qtype(self.left).is_integer == qtype(self.right).is_integer


@dataclass(frozen=True)
class TrainedProducts:
    """Products of floating operands for quantized training: operands and cotangents are quantized within the product.

    Attributes:
      linear: `(left[..., d_in], right[d_in, d_out], dtype, types, key)`, a result of dtype `dtype`. The key may be
        None.
      convolution: `(left, right, params, types, key)`, with the parameters of the primitive.
      ragged: `(rows[m, k], right[groups, k, n], group_sizes, types, key)`, a result of the dtype of `rows`.
    """

    linear: Callable[..., Any]
    convolution: Callable[..., Any]
    ragged: Callable[..., Any]


@dataclass(frozen=True)
class Method:
    """A method of quantization.

    Attributes:
      name: name in the registry, such as "ptq".
      check: function of the rules that raises RuleError for an unsupported rule.
      parameter: `(array, spec, path)` to the stored form of a parameter: a pytree class with `__stack_qview__`, or a
        floating array. `spec` is the `ArraySpec` derived from the rule and from the uses of the parameter.
      entered: `(stored, spec)` to the form of the parameter in a program.
      activation: `(array, spec, range)` to the form of an activation in a product. If the range is None, it is found
        at run time.
      products: replacements of products of two floating operands, or None.
      keeps_ranges: True if the method uses measured static ranges; other methods find the ranges again at each call.
    """

    name: str
    check: Callable[[Sequence[Rule]], None]
    parameter: Callable[[Any, Any, str], Any]
    entered: Callable[[Any, Any], Any]
    activation: Callable[..., Any]
    products: TrainedProducts | None = None
    keeps_ranges: bool = False

    def __reduce__(self) -> Any:
        return method, (self.name,)  # pickled by name, as closures such as `check` cannot be pickled


def method(name: str) -> Method:
    """Looks up a method by name.

    Raises:
      UnknownName: no plugin registers the method; the message suggests the nearest name and lists all names.
    """
    return registries.methods[name]
