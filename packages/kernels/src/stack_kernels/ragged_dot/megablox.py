"""`ragged_dot` on TPUs: megablox, the grouped product of the jax wheel.

The kernel requires full tiles of rows and does not write the rows after the last group. This adapter pads rows to
tiles, cuts sizes off at the last row, and zeroes the rows after the last group.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from stack_core.abi.ops import OpCall, OpImplementation
from stack_core.chips import Chip
from stack_core.ops.building import BackwardCall, as_backward, is_quantized
from stack_kernels.mesh_types import untyped
from stack_kernels.ragged_dot.groups import cut, padded, zero_after
from stack_kernels.supports import first_problem, takes_no, unquantized

__all__ = ["MEGABLOX", "GroupedTiles", "megablox"]

_DTYPES = ("bfloat16", "float32")
_SUBLANES = 16  # bf16 is laid out in tiles of 16 rows
_SIZES = (1024, 512, 256, 128)
_MAX_ROWS = 512
_VMEM_BYTES = 12 * 2**20  # of the default 16 MiB per kernel on the smallest chip


@dataclass(frozen=True)
class GroupedTiles:
    """Maximum tile sizes along rows, d_in and d_out."""

    rows: int
    d_in: int
    d_out: int


def megablox(*, interpret: Any = False) -> OpImplementation:
    """Builds the implementation; True or `pltpu.InterpretParams` interprets the kernel on any device."""
    return OpImplementation(
        "ragged_dot",
        "megablox",
        lambda **call: _forward(**call, interpret=interpret),
        functools.partial(_backward, interpret=interpret),
        platforms=("tpu",),
        supports=_supports,
        default=lambda call, chip: next(_space(call, chip), None),
        space=_space,
        is_opaque=True,
    )


def _supports(call: OpCall, chip: Chip, config: Any = None) -> bool | str:
    if (plain := unquantized(call, chip)) is not True:
        return plain
    if (refusal := takes_no(call, "bias")) is not True:
        return refusal
    lhs, rhs = call.arrays["lhs"], call.arrays["rhs"]
    problems = {
        f"it takes {' or '.join(_DTYPES)}, not {lhs.dtype.name}": lhs.dtype.name not in _DTYPES,
        f"{config} does not fit into VMEM": config is not None
        and _vmem_bytes(config.rows, config.d_in, config.d_out, lhs.dtype.itemsize) > _VMEM_BYTES,
        "Mosaic does not sum 16-bit numbers over an axis of length one": rhs.shape[1] == 1 and lhs.dtype.itemsize == 2,
    }
    return first_problem(problems)


def _space(call: OpCall, chip: Chip) -> Iterator[GroupedTiles]:
    """Yields tiles that fit into VMEM with double-buffered operands; large and square tiles come first."""
    lhs, rhs = call.arrays["lhs"], call.arrays["rhs"]
    if is_quantized(rhs):
        return
    of_rows, of_in, of_out = (_tile_sizes(size) for size in (lhs.shape[0], *rhs.shape[1:]))
    tiles = [
        GroupedTiles(rows, d_in, d_out)
        for rows in of_rows
        for d_in in of_in
        for d_out in of_out
        if rows <= _MAX_ROWS and _vmem_bytes(rows, d_in, d_out, lhs.dtype.itemsize) <= _VMEM_BYTES
    ]
    yield from sorted(tiles, key=lambda tile: (-tile.rows * tile.d_in * tile.d_out, abs(tile.d_in - tile.d_out)))


def _tile_sizes(size: int) -> list[int]:
    """Returns tile sizes that waste less than half of the last tile; the largest come first."""
    return [of_tile for of_tile in _SIZES if of_tile < 2 * size] or [_SIZES[-1]]


def _vmem_bytes(rows: int, d_in: int, d_out: int, itemsize: int) -> int:
    """Bytes of the larger pass: the gradient of the matrices accumulates d_in x d_out and widens both operands."""
    operands, result = rows * (d_in + d_out), d_in * d_out
    return operands * (2 * itemsize + 4) + result * (2 * itemsize + 4)


def _forward(
    *, lhs: Any, rhs: Any, group_sizes: Any, bias: None, requested: Any, config: GroupedTiles, interpret: Any
) -> tuple[Any, Mapping[str, Any]]:
    del bias, requested
    return _multiply(lhs, rhs, cut(group_sizes, len(lhs)), config, transposed=False, interpret=interpret), {}


@as_backward
def _backward(call: BackwardCall, *, config: GroupedTiles, interpret: Any) -> Mapping[str, Any]:
    lhs, rhs = call.arrays["lhs"], call.arrays["rhs"]
    sizes = cut(call.arrays["group_sizes"], len(lhs))
    found: dict[str, Any] = {}
    if "lhs" in call.requested:
        found["lhs"] = _multiply(call.cotangents, rhs, sizes, config, transposed=True, interpret=interpret)
    if "rhs" in call.requested:
        found["rhs"] = _outer_products(lhs, call.cotangents, sizes, config, interpret=interpret)
    return found


def _multiply(rows: Any, matrices: Any, sizes: Any, config: GroupedTiles, *, transposed: bool, interpret: Any) -> Any:
    """Multiplies each row by the matrix of its group, or by its transpose; zeros after the last group.

    The library asks `jax.devices()` whether the local TPU is older than v4, which cannot multiply bf16. It does so
    before it looks at a dtype, inside the function that builds the kernel, so no cast beforehand helps. The answer is
    also correct for a target that is not attached: every TPU among our `Chip`s multiplies bf16.
    """
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    of_sums, of_results = (config.d_out, config.d_in) if transposed else (config.d_in, config.d_out)
    # The transposed product sums over d_out, so both axes change places.
    widths = matrices.shape[:0:-1] if transposed else matrices.shape[1:]
    tile = _rows_of_tile(len(rows), config)
    product = functools.partial(
        gmm,
        preferred_element_type=rows.dtype,
        tiling=(tile, min(of_sums, widths[0]), min(of_results, widths[1])),
        transpose_rhs=transposed,
        interpret=interpret,
    )
    found = _untyped(product, padded(rows, tile), matrices, sizes)[: len(rows)]
    return zero_after(sizes, found)


def _outer_products(lhs: Any, cotangent: Any, sizes: Any, config: GroupedTiles, *, interpret: Any) -> Any:
    """Computes the gradient of each group's matrix, [groups, d_in, d_out]."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    tile = _rows_of_tile(len(lhs), config)
    product = functools.partial(
        tgmm,
        preferred_element_type=lhs.dtype,
        tiling=(tile, min(config.d_in, lhs.shape[1]), min(config.d_out, cotangent.shape[1])),
        interpret=interpret,
    )
    return _untyped(product, padded(lhs, tile).T, padded(cotangent, tile), sizes)


def _untyped(product: Any, *arrays: Any) -> Any:
    with jax.numpy_dtype_promotion("standard"):  # the library's own arithmetic on tiles
        return untyped(product, *arrays)


def _rows_of_tile(rows: int, config: GroupedTiles) -> int:
    # Few rows take a smaller tile, and less padding.
    return min(config.rows, -(-rows // _SUBLANES) * _SUBLANES)


MEGABLOX = megablox()
