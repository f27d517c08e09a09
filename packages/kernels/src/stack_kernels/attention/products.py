"""Products per key head, in a form that keeps bf16 operands narrow.

XLA's CPU backend widens bf16 operands that it transposes or that arrive token-major with two leading axes, and such a
product takes three times as long. With one leading axis it does not.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from stack_core.abi.mesh import parts_of
from stack_core.ops.building import accurate_dtype, contract

__all__ = ["by_group", "contract_heads", "merged", "unmixed"]


def by_group(subscripts: str, left: Any, right: Any) -> Any:
    """Computes the same as `stack_core.ops.building.by_group`."""
    batch, kv_heads, group, rows, _ = left.shape
    product = contract_heads(subscripts, left.reshape(batch, kv_heads, group * rows, left.shape[4]), right)
    return product.reshape(batch, kv_heads, group, rows, product.shape[3])


def contract_heads(subscripts: str, left: Any, right: Any) -> Any:
    """Computes `contract` in fp32 for arrays [batch, kv_heads, _, _]. Heads split over a mesh keep their own axis."""
    dtype = accurate_dtype(left.dtype)
    if parts_of("act_heads") > 1:
        return contract(subscripts, left, right, dtype)
    lead = left.shape[:2]
    left, right = (x.reshape(math.prod(lead), *x.shape[2:]) for x in (left, right))
    product = contract(subscripts.replace("bh", "b"), left, right, dtype)
    return product.reshape(*lead, *product.shape[1:])


def merged(x: Any) -> Any:
    """Reshapes [batch, kv_heads, group, rows, _] to the shape of the products, which XLA requires for fusion."""
    batch, kv_heads, group, rows, size = x.shape
    lead = (batch, kv_heads) if parts_of("act_heads") > 1 else (batch * kv_heads,)
    return x.reshape(*lead, group * rows, size)


def unmixed(products: Any, apart: Callable[[], Any]) -> Any:
    """Guards products of widened queries against NaN and infinity; `apart` computes them head by head.

    A NaN or infinite key in one head, multiplied by the zeros of the widened queries, makes the scores of all heads
    NaN. In that case the heads are multiplied separately.
    """
    return lax.cond(jnp.all(jnp.isfinite(products)), lambda: products, apart)
