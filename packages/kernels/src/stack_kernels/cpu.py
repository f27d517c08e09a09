"""What the CPU implementations of all ops share."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stack_core.abi import OpCall, QView
from stack_core.hardware import Chip
from stack_core.ops.building import QuantizedArray, is_quantized

__all__ = ["abstract_view", "as_bits", "from_bits", "takes_no", "unquantized"]


def unquantized(call: OpCall, chip: Chip, config: Any = None) -> bool | str:
    """The `supports` of what takes every call without a quantized operand."""
    quantized = [name for name, array in call.arrays.items() if is_quantized(array)]
    return f"{' and '.join(quantized)} is quantized" if quantized else True


def takes_no(call: OpCall, *names: str) -> bool | str:
    """True unless one of these optional arguments is given; then the reason, which names them."""
    arguments = {**call.arrays, **call.options}
    given = [name for name in names if arguments[name] is not None]
    return f"it takes no {' and no '.join(given)}" if given else True


def abstract_view(array: QuantizedArray) -> QView:
    """What a quantized array of arrays, or of `jax.ShapeDtypeStruct`, shows, without values."""
    known = {}

    def show(array: Any) -> tuple[Any, ...]:
        view = array.__stack_qview__()
        known.update(abi=view.abi, scheme=view.scheme)
        return view.qvalue, view.scale, view.zero_point, view.codebook

    qvalue, scale, zero_point, codebook = jax.eval_shape(show, array)
    return QView(qvalue=qvalue, scale=scale, zero_point=zero_point, codebook=codebook, **known)


def as_bits(array: Any) -> Any:
    """bf16 as integers, for what a loop hands on; other dtypes as they are.

    XLA's CPU backend of jax 0.10 keeps the bf16 that loops carry, read and stack in fp32, and rounds all of it again in
    every turn.
    """
    return lax.bitcast_convert_type(array, jnp.uint16) if array.dtype == jnp.bfloat16 else array


def from_bits(array: Any, dtype: Any) -> Any:
    """The inverse of `as_bits`, of an array that was of `dtype`."""
    return lax.bitcast_convert_type(array, dtype) if array.dtype != dtype else array
