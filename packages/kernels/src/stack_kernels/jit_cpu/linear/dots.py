"""The product of a matrix of many rows with a few columns, in LLVM IR: dot products along the rows of the matrix.

For logits of a tied embedding, whose rows are the columns of the head: its transposition would take longer than the
product. A step reads as many rows of the matrix as a vector has lanes, whose sums become one vector of results.
"""

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from stack_kernels.jit_cpu.builder import FLOAT, INDEX, POINTER, TILE, Builder, vector
from stack_kernels.jit_cpu.host import Processor
from stack_kernels.jit_cpu.numbers import BITS, read
from stack_kernels.jit_cpu.vectors import sums

__all__ = ["RowDots", "dots_module"]

_TILE_ROWS = 64
_SMALL = 2**18
"""One thread finishes this many multiplications before another wakes up."""


@dataclass(frozen=True)
class RowDots:
    """y[columns, rows] = x[columns, k] @ matrix[rows, k]^T in float32.

    The buffers are the matrix and x, in float32. There are at least 16 rows, and k is a multiple of 16.

    Attributes:
      matrix: dtype of the matrix, of 16 or 32 bits.
    """

    matrix: str

    @property
    def name(self) -> str:
        return f"linear_dots_{self.matrix}"


def dots_module(product: RowDots, processor: Processor) -> ir.Module:
    """Builds `@tiles`, `@is_small` and `@tile` of a product."""
    module = ir.Module(product.name)
    builder = Builder(module, "tiles", [POINTER, POINTER], INDEX)
    _, (_, rows) = builder.buffer(builder.parameters[1], 0, 2)
    builder.close(builder.ceil_div(rows, _TILE_ROWS))
    builder = Builder(module, "is_small", [POINTER, POINTER], INDEX)
    arguments, results = builder.parameters
    _, (_, depth) = builder.buffer(arguments, 0, 2)
    _, (columns, rows) = builder.buffer(results, 0, 2)
    builder.close(builder.at_most(builder.times(builder.times(rows, depth), columns), _SMALL))
    _write_tile(module, product, processor.lanes)
    return module


def _write_tile(module: ir.Module, product: RowDots, lanes: int) -> None:
    builder = Builder(module, "tile", TILE)
    arguments, results, tile, _ = builder.parameters
    matrix, (rows, depth) = builder.buffer(arguments, 0, 2)
    x, _ = builder.buffer(arguments, 1, 0)
    y, (columns, _) = builder.buffer(results, 0, 2)
    first = builder.times(tile, _TILE_ROWS)
    end = builder.min(builder.plus(first, _TILE_ROWS), rows)
    entry_bytes = BITS[product.matrix] // 8
    with builder.loop(first, builder.plus(end, lanes - 1), lanes) as group:
        # The last vector of rows may overlap the vector before.
        row = builder.min(group, builder.minus(rows, lanes))
        each = [builder.times(builder.times(builder.plus(row, lane), depth), entry_bytes) for lane in range(lanes)]
        starts = [builder.at(matrix, start) for start in each]
        with builder.loop(0, columns) as column:
            found = _dots(builder, product.matrix, lanes, starts, builder.at(x, _floats(builder, column, depth)), depth)
            builder.store(found, builder.at(y, _floats(builder, column, rows), _floats(builder, row, 1)))
    builder.close()


def _dots(builder: Builder, dtype: str, lanes: int, starts: list[Any], x: Any, depth: Any) -> Any:
    """Returns the dot products of x with the rows of the matrix that begin at `starts`."""
    kind = vector(FLOAT, lanes)
    totals = [builder.variable(kind, ir.Constant(kind, None)) for _ in starts]
    with builder.loop(0, depth, lanes) as entry:
        values = builder.load(kind, builder.at(x, builder.times(entry, 4)))
        for start, total in zip(starts, totals, strict=True):
            place = builder.at(start, builder.times(entry, BITS[dtype] // 8))
            total.set(builder.fma(read(builder, dtype, place, lanes, None, None), values, total.get()))
    return sums(builder, [total.get() for total in totals])


def _floats(builder: Builder, number: Any, size: Any) -> Any:
    """Returns the bytes of `number` times `size` numbers of float32."""
    return builder.times(builder.times(number, size), 4)
