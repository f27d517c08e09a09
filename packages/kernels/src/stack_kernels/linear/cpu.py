"""`linear` on CPUs: products in the forms that are fast there."""

import functools
import math
from typing import Any

from stack_core.abi import AUTODIFF, OpImplementation
from stack_core.ops.building import accurate_dtype
from stack_kernels.cpu import on_cpu_unquantized
from stack_kernels.linear.product import XLA, Products, product

__all__ = ["CPU", "linear"]


def linear(products: Products, x: Any, weight: Any, *, bias: Any, preferred_dtype: Any) -> Any:
    """The op, by those products."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if bias is None:
        result = product(rows, weight, preferred_dtype, products)
    else:
        result = product(rows, weight, accurate_dtype(x.dtype), products)
        result = (result + bias.astype(result.dtype)).astype(preferred_dtype)
    return result.reshape(*x.shape[:-1], weight.shape[-1])


CPU = OpImplementation(
    op="linear", name="cpu", function=functools.partial(linear, XLA), supports=on_cpu_unquantized, vjp=AUTODIFF
)
