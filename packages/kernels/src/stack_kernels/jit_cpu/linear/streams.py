"""The product of up to eight rows with a weight of wide numbers, in LLVM IR, at the speed of memory reads.

A tile is some rows of the weight, over 8192 columns, with its own sums. It is read in 8 streams, each an eighth of the
rows, which prefetch their next row; the sums of one row stay in the L1 cache. In the end the sums of all parts are
added. Processors prefetch long runs of memory better than narrow blocks of columns. A dot product of bf16 takes the
numbers of two streams at a time and one of int8 takes four, which is a half and a third of the work.
"""

import functools
from dataclasses import dataclass
from typing import Any, Literal

from llvmlite import ir

from stack_kernels.jit_cpu.builder import BYTE, FLOAT, INDEX, INT32, POINTER, SHORT, TILE, Builder, vector
from stack_kernels.jit_cpu.host import Processor
from stack_kernels.jit_cpu.integer_dots import add_fours, added_by_fours, fours
from stack_kernels.jit_cpu.numbers import BITS, read
from stack_kernels.jit_cpu.vectors import interleaved

__all__ = ["SEGMENT_COLUMNS", "STREAMS", "StreamedProduct", "streamed_module"]

STREAMS = 8
SEGMENT_COLUMNS = 8192
_X_TYPES = {"float32": FLOAT, "bfloat16": SHORT, "int8": BYTE}
_TERMS = {"float32": 1, "bfloat16": 2, "int8": 4}
_SMALL_BYTES = {"float32": 2**18, "bfloat16": 2**18, "int8": 2**20}
"""Below these sizes one thread finishes before another wakes up; by dtype of x, which affects the compute time."""


@dataclass(frozen=True)
class StreamedProduct:
    """y[rows, n] = x[rows, k] @ w[k, n] in float32, and the sums [parts, rows, n] over each part of k.

    The buffers are x and w. The rows of a part are a multiple of 8.

    Attributes:
      rows: number of rows of x.
      weight: dtype of w.
      x: "float32"; or "bfloat16" or "int8" if w has that dtype and the processor has its dot products. The sums of int8
        are int32.
    """

    rows: int
    weight: str
    x: Literal["float32", "bfloat16", "int8"]

    @property
    def name(self) -> str:
        return f"linear_streams_{self.rows}_{self.x}_{self.weight}"

    @property
    def of_sums(self) -> ir.Type:
        return INT32 if self.x == "int8" else FLOAT


def streamed_module(product: StreamedProduct, processor: Processor) -> ir.Module:
    """Builds `@tiles`, `@is_small`, `@tile` and `@finish` of a product."""
    module = ir.Module(product.name)
    builder = Builder(module, "tiles", [POINTER, POINTER], INDEX)
    _, (parts, _, columns) = builder.buffer(builder.parameters[1], 1, 3)
    builder.close(builder.times(parts, _segments(builder, columns)))
    _write_is_small(module, product)
    _Part(module, product, processor).write()
    _write_finish(module, processor.lanes, product.of_sums)
    return module


def _write_is_small(module: ir.Module, product: StreamedProduct) -> None:
    builder = Builder(module, "is_small", [POINTER, POINTER], INDEX)
    _, (depth, columns) = builder.buffer(builder.parameters[0], 1, 2)
    bits = builder.times(builder.times(depth, columns), product.rows * BITS[product.weight])
    builder.close(builder.at_most(bits, 8 * _SMALL_BYTES[product.x]))


def _segments(builder: Builder, columns: Any) -> Any:
    return builder.ceil_div(columns, SEGMENT_COLUMNS)


def _write_finish(module: ir.Module, lanes: int, of_sums: ir.Type) -> None:
    """Builds `@finish`, which sums the parts into y."""
    builder = Builder(module, "finish", [POINTER, POINTER])
    results, kind = builder.parameters[1], vector(of_sums, lanes)
    add = builder.build.add if of_sums == INT32 else builder.build.fadd
    y, _ = builder.buffer(results, 0, 0)
    sums, (parts, rows, columns) = builder.buffer(results, 1, 3)
    count = builder.times(rows, columns)
    with builder.loop(0, builder.plus(count, lanes - 1), lanes) as column:
        mask = builder.mask(builder.minus(count, column), lanes)
        total = builder.variable(kind, ir.Constant(kind, None))
        with builder.loop(0, parts) as part:
            place = builder.at(sums, builder.times(builder.plus(builder.times(part, count), column), 4))
            total.set(add(total.get(), builder.masked_load(kind, place, mask)))
        value = builder.build.sitofp(total.get(), vector(FLOAT, lanes)) if of_sums == INT32 else total.get()
        builder.masked_store(value, builder.at(y, builder.times(column, 4)), mask)
    builder.close()


class _Part:
    """Builder of `@tile`: the sum over a part of k."""

    def __init__(self, module: ir.Module, product: StreamedProduct, processor: Processor) -> None:
        self.builder = builder = Builder(module, "tile", TILE)
        self.product, self.lanes = product, processor.lanes
        # Vectors per cache line of the weight, at least one.
        self.line_vectors = 512 // BITS[product.weight] // processor.lanes or 1
        arguments, results, tile, _ = builder.parameters
        x, (_, self.depth) = builder.buffer(arguments, 0, 2)
        self.weight, _ = builder.buffer(arguments, 1, 0)
        sums, (parts, _, self.columns) = builder.buffer(results, 1, 3)
        self.part = builder.over(tile, _segments(builder, self.columns))
        self.segment = builder.minus(tile, builder.times(self.part, _segments(builder, self.columns)))
        self.rows = builder.over(self.depth, parts)
        self.first = builder.times(self.part, self.rows)
        self.terms = _TERMS[product.x]
        self.x_bytes = 4 // self.terms
        self.x = builder.at(x, builder.times(self.first, self.x_bytes))
        # [rows, columns] of this part.
        self.sums = builder.at(sums, builder.times(builder.times(self.part, self.columns), 4 * product.rows))
        self.row_bytes = builder.over(builder.times(self.columns, BITS[product.weight]), 8)

    def write(self) -> None:
        builder = self.builder
        # Stream s reads the rows s * each .. (s + 1) * each - 1 of this part.
        each = builder.over(self.rows, STREAMS)
        start = builder.times(self.segment, SEGMENT_COLUMNS)
        end = builder.min(builder.plus(start, SEGMENT_COLUMNS), self.columns)
        for row in range(self.product.rows):
            self._start_sums(row, start, end)
        with builder.loop(0, each) as depth:
            self._add_lines([builder.plus(builder.times(each, stream), depth) for stream in range(STREAMS)], start, end)
        builder.close()

    def _start_sums(self, row: int, start: Any, end: Any) -> None:
        builder, lanes = self.builder, self.lanes
        if self.product.x != "int8":
            builder.clear(self._sum(row, start), builder.times(builder.minus(end, start), 4))
            return
        too_much = added_by_fours(builder, builder.at(self.x, builder.times(self.depth, row)), self.rows)
        # The excess of `fours` is the same for all columns of a row, so the sums start below zero by that much.
        first = builder.build.neg(too_much)
        with builder.loop(start, builder.plus(end, lanes - 1), lanes) as column:
            builder.masked_store(first, self._sum(row, column), builder.mask(builder.minus(end, column), lanes))

    def _sum(self, row: int, column: Any) -> Any:
        builder = self.builder
        return builder.at(self.sums, builder.times(builder.plus(builder.times(self.columns, row), column), 4))

    def _add_lines(self, depths: list[Any], start: Any, end: Any) -> None:
        """Adds the products with one weight row from each stream."""
        builder, lanes = self.builder, self.lanes
        x = [self._x(row, depths) for row in range(self.product.rows)]
        lines = [
            builder.at(self.weight, builder.times(builder.plus(self.first, depth), self.row_bytes)) for depth in depths
        ]
        width = self.line_vectors * lanes
        after = builder.plus(start, builder.times(builder.over(builder.minus(end, start), width), width))
        with builder.loop(start, after, width) as column:
            for line in lines:
                # The same columns in the next row of the stream.
                builder.prefetch(builder.at(line, self.row_bytes, self._bytes(column)))
            self._add(x, lines, column, self.line_vectors, None)
        with builder.loop(after, builder.plus(end, lanes - 1), lanes) as column:
            self._add(x, lines, column, 1, builder.mask(builder.minus(end, column), lanes))

    def _x(self, row: int, depths: list[Any]) -> list[Any]:
        """Returns x for each term of the sum, in every lane: the numbers of one, two or four streams."""
        builder, kind = self.builder, _X_TYPES[self.product.x]
        starts = [builder.times(builder.plus(builder.times(self.depth, row), depth), self.x_bytes) for depth in depths]
        numbers = [builder.load(kind, builder.at(self.x, start)) for start in starts]
        if self.terms > 1:
            # The numbers of neighboring streams share 4 bytes, the first in the lowest, as in the operands of `_terms`.
            wide = [
                builder.build.shl(builder.build.zext(number, INT32), INT32(8 * self.x_bytes * (at % self.terms)))
                for at, number in enumerate(numbers)
            ]
            numbers = [
                functools.reduce(builder.build.or_, wide[at : at + self.terms]) for at in range(0, STREAMS, self.terms)
            ]
        return [builder.splat(number, self.lanes) for number in numbers]

    def _add(self, x: list[list[Any]], lines: list[Any], column: Any, vectors: int, mask: Any) -> None:
        """Adds the products of all rows of x with some vectors of columns."""
        builder, kind = self.builder, vector(self.product.of_sums, self.lanes)
        for number, terms in enumerate(self._terms(lines, column, vectors, mask)):
            for row, values in enumerate(x):
                place = self._sum(row, builder.plus(column, number * self.lanes))
                total = builder.load(kind, place) if mask is None else builder.masked_load(kind, place, mask)
                for value, term in zip(values, terms, strict=True):
                    total = self._added(value, term, total)
                builder.store(total, place) if mask is None else builder.masked_store(total, place, mask)

    def _added(self, x: Any, weight: Any, total: Any) -> Any:
        builder = self.builder
        if self.product.x == "bfloat16":
            return builder.intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", total.type, total, x, weight)
        if self.product.x == "int8":
            return add_fours(builder, total, weight, x)
        return builder.fma(x, weight, total)

    def _terms(self, lines: list[Any], column: Any, vectors: int, mask: Any) -> list[list[Any]]:
        """Returns the weight's operand of each term, per vector of columns: the numbers of one, two or four streams."""
        builder, lanes = self.builder, self.lanes
        if self.terms == 1:
            starts = [self._bytes(builder.plus(column, number * lanes)) for number in range(vectors)]
            name = self.product.weight
            return [
                [read(builder, name, builder.at(line, start), lanes, mask, None) for line in lines] for start in starts
            ]
        wide, start = vector(_X_TYPES[self.product.x], vectors * lanes), self._bytes(column)
        places = [builder.at(line, start) for line in lines]
        rows = [builder.load(wide, at) if mask is None else builder.masked_load(wide, at, mask) for at in places]
        if self.product.x == "int8":
            joined = [fours(builder, rows[at : at + 4]) for at in range(0, STREAMS, 4)]
        else:
            pairs = [interleaved(builder, *pair, 2 * lanes) for pair in zip(rows[::2], rows[1::2], strict=True)]
            joined = [[builder.build.bitcast(term, vector(INT32, lanes)) for term in terms] for terms in pairs]
        # From [term][vector] to [vector][term].
        return [list(terms) for terms in zip(*joined, strict=True)]

    def _bytes(self, columns: Any) -> Any:
        return self.builder.over(self.builder.times(columns, BITS[self.product.weight]), 8)
