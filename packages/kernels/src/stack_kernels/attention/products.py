"""Products for each key head, in the form that keeps bf16 operands narrow.

XLA's CPU backend widens bf16 operands that it transposes on the way, as it does those that come token by token, where
two axes lead: such a product takes three times as long. With one axis it does not.
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
    """What `stack_core.ops.building.by_group` gives."""
    batch, kv_heads, group, rows, _ = left.shape
    product = contract_heads(subscripts, left.reshape(batch, kv_heads, group * rows, left.shape[4]), right)
    return product.reshape(batch, kv_heads, group, rows, product.shape[3])


def contract_heads(subscripts: str, left: Any, right: Any) -> Any:
    """`contract` in fp32 of arrays [batch, kv_heads, _, _]; heads that a mesh divides keep an axis of their own."""
    dtype = accurate_dtype(left.dtype)
    if parts_of("act_heads") > 1:
        return contract(subscripts, left, right, dtype)
    lead = left.shape[:2]
    left, right = (x.reshape(math.prod(lead), *x.shape[2:]) for x in (left, right))
    product = contract(subscripts.replace("bh", "b"), left, right, dtype)
    return product.reshape(*lead, *product.shape[1:])


def merged(x: Any) -> Any:
    """[batch, kv_heads, group, rows, _] in the shape that products have: only in that does XLA fuse them with more."""
    batch, kv_heads, group, rows, size = x.shape
    lead = (batch, kv_heads) if parts_of("act_heads") > 1 else (batch * kv_heads,)
    return x.reshape(*lead, group * rows, size)


def unmixed(products: Any, apart: Callable[[], Any]) -> Any:
    """Products of queries that are as wide as all heads, zero but in their own; `apart` gives the same head by head.

    A key that is NaN or infinite in one head would make the scores of all NaN, times those zeros: then heads are
    multiplied apart.
    """
    return lax.cond(jnp.all(jnp.isfinite(products)), lambda: products, apart)
