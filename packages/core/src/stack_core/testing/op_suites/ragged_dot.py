"""The contract suite of `ragged_dot`."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from stack_core.testing.cases import OpCase, OpSuite, Quantized, dense, in_tiles, integers, spoiled

__all__ = ["SUITE"]


def _ragged_case(
    name: str,
    group_sizes: tuple[int, ...],
    *,
    rows: int | None = None,
    d_in: int,
    d_out: int,
    bias: bool = False,
    in_order: bool = False,
) -> OpCase:
    """Builds a case; `rows` defaults to the sum of the group sizes, whose order is random unless `in_order`."""
    total = sum(group_sizes) if rows is None else rows

    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        return {
            "lhs": rng.normal(size=(total, d_in)),
            "rhs": rng.normal(size=(len(group_sizes), d_in, d_out)),
            "group_sizes": integers(*group_sizes) if in_order else rng.permutation(integers(*group_sizes)),
            **({"bias": rng.normal(size=(len(group_sizes), d_out))} if bias else {}),
        }

    return OpCase("ragged_dot", name, arrays)


def _quantized_case(name: str, scales: tuple[int, int, int], zeros: bool, codebook: bool = False) -> OpCase:
    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        offsets = rng.integers(-4, 5, size=scales).astype(np.int8) if zeros else None
        values = rng.integers(-100, 101, size=(4, 12, 10)).astype(np.int8)
        levels = None
        if codebook:
            values, levels = np.abs(values), rng.uniform(-100, 100, size=101).astype(np.float32)
        rhs = Quantized(values, rng.uniform(0.01, 0.02, size=scales).astype(np.float32), offsets, levels)
        return {"lhs": rng.normal(size=(11, 12)), "rhs": rhs, "group_sizes": rng.permutation(integers(3, 2, 4, 1))}

    return OpCase("ragged_dot", name, arrays, fixed=("rhs",))


_CASES = (
    _ragged_case("plain", (5, 3, 8), d_in=12, d_out=10),
    _ragged_case("one_group", (7,), d_in=5, d_out=9),
    _ragged_case("empty_groups", (0, 9, 0, 0, 4, 0), d_in=8, d_out=4),
    _ragged_case("rows_of_no_group", (3, 2, 0, 1), rows=11, d_in=8, d_out=4),
    _ragged_case("only_rows_of_no_group", (0, 0, 0), rows=5, d_in=8, d_out=4),
    _ragged_case("more_rows_in_groups_than_there_are", (3, 2, 4), rows=5, d_in=8, d_out=4),
    _ragged_case("sizes_out_of_range", (3, -7, 2**31 - 1, -(2**31)), rows=8, d_in=8, d_out=4),
    _ragged_case("empty_rows", (0, 0), d_in=8, d_out=4),
    _ragged_case("more_groups_than_rows", (1, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0), rows=5, d_in=8, d_out=4),
    _ragged_case("one_row_a_group", (1, 1, 1, 1, 1), d_in=8, d_out=4),
    _ragged_case("odd_sizes", (131, 1, 67, 0, 259), rows=461, d_in=37, d_out=19),
    _ragged_case("one_large_group", (300, 1, 0, 0, 2, 0, 0, 0), rows=307, d_in=16, d_out=24),
    _ragged_case("bias", (131, 1, 0, 67), rows=210, d_in=8, d_out=4, bias=True),
    _ragged_case("bias_and_more_rows_in_groups_than_there_are", (3, 2, 4), rows=5, d_in=8, d_out=4, bias=True),
    _quantized_case("quantized_by_channel", (4, 1, 10), zeros=False),
    _quantized_case("quantized_by_tile", (4, 3, 5), zeros=True),
    _quantized_case("quantized_over_groups", (2, 12, 1), zeros=True),
    _quantized_case("quantized_with_a_codebook", (4, 3, 10), zeros=False, codebook=True),
    spoiled(
        _ragged_case("", (5, 3, 8), d_in=12, d_out=10), "not_a_number", lhs=((2, 1), np.nan), rhs=((1, 0, 4), np.nan)
    ),
)


def _tiled(name: str, *group_sizes: int, rows: int | None = None, d_in: int = 128, d_out: int = 256) -> OpCase:
    return _ragged_case(name, group_sizes, rows=rows, d_in=d_in, d_out=d_out, in_order=True)


_FOR_ACCELERATORS = in_tiles(
    _tiled("full", 64, 64, 64, 64),
    _tiled("partial_groups", 100, 0, 37, 63, 1, 55),
    _tiled("empty_first_group", 0, 128, 63, 65),
    _tiled("empty_last_group", 128, 63, 65, 0),
    _tiled("empty_first_and_last_groups", 0, 0, 200, 56, 0, 0),
    _tiled("all_rows_in_the_first_group", 256, 0, 0),
    _tiled("all_rows_in_one_group", 0, 256, 0),
    _tiled("all_rows_in_the_last_group", 0, 0, 256),
    _tiled("only_rows_of_no_group", 0, 0, 0, rows=256),
    _tiled("rows_of_no_group", 50, 0, 70, rows=256),
    _tiled("more_rows_in_groups_than_there_are", 200, 100, 50, rows=256),
    _tiled("odd_rows", 101, 0, 99, 51),
    _tiled("no_rows", 0, 0, rows=0),
    _tiled("deeper_and_narrower", 33, 95, d_in=384, d_out=128),
)


def _oracle(lhs: Any, rhs: Any, group_sizes: Any, *, bias: Any = None) -> Any:
    sizes = np.clip(group_sizes, 0, len(lhs))
    group_of_row = np.repeat(np.arange(len(sizes)), sizes)[: len(lhs)]
    product = jnp.einsum("rk,rkn->rn", lhs[: len(group_of_row)], dense(rhs)[group_of_row])
    if bias is not None:
        product = product + bias[group_of_row]
    return jnp.pad(product, ((0, len(lhs) - len(group_of_row)), (0, 0)))


SUITE = OpSuite(_CASES, _oracle, _FOR_ACCELERATORS)
