"""`ragged_dot` on CPUs: one group at a time, in full tiles of rows and one tile that barely exceeds the remaining rows.

Loops end with the rows of a group, and each matrix is read once per group. The work exceeds the rows by less than a
third of each group's remainder. Such a loop cannot be differentiated, so the gradients are written explicitly. Under
`jax.vmap` it would compute every tile size for every group of all elements, so mapped elements run one by one.
"""

import bisect
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.custom_batching
import jax.numpy as jnp
from jax import lax

from stack_core.abi.ops import OWN, OpCall, OpImplementation
from stack_core.chips import Chip
from stack_core.ops.building import accurate_dtype, contract, differentiated, vary_alike
from stack_kernels.linear.product import transposed
from stack_kernels.supports import takes_no, unquantized

__all__ = ["XLA_CPU"]

_FULL_ROWS = 256
_REST_ROWS = (16, 32, 64, 96, 128, 192, 256)


def _supports(call: OpCall, chip: Chip, config: Any) -> bool | str:
    plain = takes_no(call, "bias")
    return unquantized(call, chip) if plain is True else plain


def _cpu(lhs: Any, rhs: Any, group_sizes: Any, *, bias: None, requested: Any) -> tuple[Any, dict[str, Any]]:
    del bias
    end = jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32)), lhs.shape[0])
    begin = jnp.concatenate([jnp.zeros_like(end[:1]), end[:-1]])
    return _ragged_dot(*vary_alike(lhs, rhs, begin, end)), {}


@jax.custom_vjp
def _ragged_dot(lhs: Any, rhs: Any, begin: Any, end: Any) -> Any:
    return _multiply("rk,kn->rn", lhs, rhs, begin, end)


def _forward(lhs: Any, rhs: Any, begin: Any, end: Any) -> Any:
    return _ragged_dot(lhs, rhs, begin, end), (lhs, rhs, begin, end)


def _backward(operands: Any, cotangent: Any) -> Any:
    lhs, rhs, begin, end = operands
    of_lhs = _multiply("rn,kn->rk", cotangent, rhs, begin, end)
    return of_lhs, _outer_products(lhs, cotangent, begin, end), None, None


_ragged_dot.defvjp(_forward, _backward)


def _multiply(subscripts: str, rows: Any, matrices: Any, begin: Any, end: Any) -> Any:
    """Multiplies each row by the matrix kn of its group; zeros after the last group."""
    return _one_by_one(partial(_multiplied, subscripts), rows, matrices, begin, end)


def _one_by_one(function: Callable[..., Any], *operands: Any) -> Any:
    return jax.custom_batching.sequential_vmap(function)(*operands)


def _multiplied(subscripts: str, rows: Any, matrices: Any, begin: Any, end: Any) -> Any:
    padded = _padded(rows)

    def multiply_group(output: Any, group: Any) -> Any:
        matrix, begin, end = group

        def multiply_tile(size: int, start: Any, output: Any) -> Any:
            tile = lax.dynamic_slice_in_dim(padded, start, size)
            product = contract(subscripts, tile, matrix, rows.dtype)
            # Rows beyond this group are overwritten by the following groups.
            return lax.dynamic_update_slice_in_dim(output, product, start, axis=0)

        return _over_tiles(multiply_tile, begin, end, rows.shape[0], output), None

    width = matrices.shape[2 if subscripts.endswith("n") else 1]
    # As many rows as the padded operand: the last tile may exceed the rows.
    output = jnp.zeros_like(rows, shape=(padded.shape[0], width))
    output, _ = lax.scan(multiply_group, output, (matrices, begin, end))
    return jnp.where(jnp.arange(rows.shape[0])[:, None] < end[-1], output[: rows.shape[0]], 0)


def _outer_products(lhs: Any, cotangent: Any, begin: Any, end: Any) -> Any:
    """Computes the gradient of each group's matrix, [groups, d_in, d_out]."""
    return _one_by_one(_outer_product_sums, lhs, cotangent, begin, end)


def _outer_product_sums(lhs: Any, cotangent: Any, begin: Any, end: Any) -> Any:
    padded = [_padded(x) for x in (lhs, cotangent)]
    accurate = accurate_dtype(lhs.dtype)

    def of_group(group: Any) -> Any:
        begin, end = group

        def add_tile(size: int, start: Any, total: Any) -> Any:
            in_group = (start + jnp.arange(size, dtype=jnp.int32) < end)[:, None]
            # Both are masked, because a row outside all groups may hold anything, including infinities.
            lhs_rows, cotangent_rows = (
                jnp.where(in_group, lax.dynamic_slice_in_dim(x, start, size), 0) for x in padded
            )
            return total + contract("kr,rn->kn", transposed(lhs_rows), cotangent_rows, accurate)

        # The sum over a group's tiles is in fp32 and is rounded once.
        total = jnp.zeros_like(lhs, shape=(lhs.shape[1], cotangent.shape[1]), dtype=accurate)
        return _over_tiles(add_tile, begin, end, lhs.shape[0], total).astype(lhs.dtype)

    return lax.map(of_group, (begin, end))


def _over_tiles(add: Callable[[int, Any, Any], Any], begin: Any, end: Any, rows: int, carry: Any) -> Any:
    """Folds `add(size, start, carry)` over tiles that together cover the rows from `begin` to `end`."""
    # Every size is a branch to compile; none larger than the first that holds all rows is needed.
    fitting_all = bisect.bisect_left(_REST_ROWS, min(rows, _FULL_ROWS))
    sizes = _REST_ROWS[: fitting_all + 1]
    # One row less: the switch below then handles the last tile of every group with rows.
    full = jnp.maximum(end - begin - 1, 0) // _FULL_ROWS
    carry = lax.fori_loop(0, full, lambda i, carry: add(_FULL_ROWS, begin + i * _FULL_ROWS, carry), carry)
    start = begin + full * _FULL_ROWS
    # The default method of searchsorted is a loop.
    fitting = jnp.searchsorted(jnp.array([0, *sizes]), end - start, method="compare_all")
    # Branch 0 is a group without rows.
    branches = [lambda start, carry: carry]
    branches += [lambda start, carry, size=size: add(size, start, carry) for size in sizes]
    return lax.switch(fitting, branches, start, carry)


def _padded(array: Any) -> Any:
    """Pads with a full tile of rows, which lets a tile begin at any row, or after the last."""
    return jnp.pad(array, ((0, _FULL_ROWS), (0, 0)))


_forward_pass, _backward_pass = differentiated(_cpu)

XLA_CPU = OpImplementation(
    op="ragged_dot",
    name="xla_cpu",
    forward=_forward_pass,
    backward=_backward_pass,
    platforms=("cpu",),
    supports=_supports,
    residuals=(OWN,),
)
