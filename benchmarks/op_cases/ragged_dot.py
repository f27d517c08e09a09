"""A mixture of experts' products; its groups get from an eighth of their fair share to twice of it."""

from functools import partial
from typing import Any

import jax
import numpy as np

from op_cases import Case, forward_and_gradient, normal
from stack_core import ops

SIZES = ((2048, 512, 2048, 8), (4096, 1024, 512, 64), (16, 2048, 1024, 8))
SHARES = np.array([2, 1.75, 1.5, 1, 0.75, 0.5, 0.375, 0.125]) / 8


def _tokamax(lhs: Any, rhs: Any, group_sizes: Any) -> Any:
    import tokamax

    return tokamax.ragged_dot(lhs, rhs, group_sizes)


def _case(rows: int, d_in: int, d_out: int, groups: int, dtype: str) -> Case:
    def operands(rng: np.random.Generator) -> tuple[Any, ...]:
        sizes = rng.multinomial(rows, np.tile(SHARES, groups // len(SHARES)) * len(SHARES) / groups).astype(np.int32)
        return normal(rng, (rows, d_in), dtype), normal(rng, (groups, d_in, d_out), dtype, d_in**-0.5), sizes

    return Case(
        name=f"{rows} x {d_in} x {d_out} in {groups} groups, {dtype}",
        operands=operands,
        contenders={
            "stack": ops.ragged_dot,
            "core": partial(ops.ragged_dot, implementation="reference"),
            "jax": jax.lax.ragged_dot,
            "tokamax": _tokamax,
        },
    )


CASES = tuple(
    case
    for sizes in SIZES
    for dtype in ("float32", "bfloat16")
    for case in forward_and_gradient(_case(*sizes, dtype), moving=(0, 1))
)
