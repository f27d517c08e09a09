"""Experts of [512, 2048] with even, skewed and empty groups, of a few rows and of many."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from op_cases import Case, forward_and_gradient, normal
from stack_core import ops


def _even(rows: int, groups: int) -> np.ndarray:
    return np.full(groups, rows // groups, np.int32)


def _skewed(rows: int, groups: int) -> np.ndarray:
    """By Zipf's law."""
    weights = 1 / np.arange(1, groups + 1)
    sizes = (rows * weights / weights.sum()).astype(np.int32)
    return sizes + (rows - sizes.sum()) * (np.arange(groups) == 0).astype(np.int32)


def _half_empty(rows: int, groups: int) -> np.ndarray:
    return 2 * _even(rows, groups) * (np.arange(groups) % 2 == 0).astype(np.int32)


SIZES = {
    "2048 rows, 4 even groups": _even(2048, 4),
    "2048 rows, 8 skewed groups": _skewed(2048, 8),
    "2048 rows, 16 groups, half of them empty": _half_empty(2048, 16),
    "4096 rows, 64 even groups": _even(4096, 64),
    "64 rows, 16 even groups": _even(64, 16),
}


def _jnp(lhs: Any, rhs: Any, group_sizes: Any) -> Any:
    end = jnp.cumsum(group_sizes)
    row = jnp.arange(lhs.shape[0])
    output = jnp.zeros((lhs.shape[0], rhs.shape[2]), lhs.dtype)
    for group in range(rhs.shape[0]):
        mine = (row < end[group]) & (row >= end[group] - group_sizes[group])
        output += jnp.where(mine[:, None], lhs, 0) @ rhs[group]
    return output


def _tokamax(lhs: Any, rhs: Any, group_sizes: Any) -> Any:
    import tokamax

    return tokamax.ragged_dot(lhs, rhs, group_sizes)


def _case(sizes: str, dtype: str) -> Case:
    group_sizes = SIZES[sizes]

    def operands(rng: np.random.Generator) -> tuple[Any, ...]:
        rhs = normal(rng, (len(group_sizes), 512, 2048), dtype, 512**-0.5)
        return normal(rng, (group_sizes.sum(), 512), dtype), rhs, group_sizes

    contenders = {
        "stack": ops.ragged_dot,
        "core": partial(ops.ragged_dot, implementation="reference"),
        "lax": jax.lax.ragged_dot,
        "jnp": _jnp,
        "tokamax": _tokamax,
    }
    return Case(name=f"{sizes}, {dtype}", operands=operands, contenders=contenders, exact_dtype="float32")


CASES = tuple(
    case
    for sizes in SIZES
    for dtype in ("float32", "bfloat16")
    for case in forward_and_gradient(_case(sizes, dtype), moving=(0, 1))
)
