"""The product of one or two rows with a weight of wide numbers, in LLVM IR: to read it as fast as memory can be read.

A tile is some rows of the weight, over 2048 columns, and gives sums of its own. It is read in 8 streams, each an eighth
of the rows, which ask for their next row; the sums stay in the first cache. In the end those of all parts are added.
Runs of memory are what processors fetch ahead; of narrow blocks of columns they fetch less.
"""

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from stack_kernels.llvm.code import FLOAT, INDEX, POINTER, Code, vector
from stack_kernels.llvm.host import Processor
from stack_kernels.llvm.numbers import BITS, read

__all__ = ["SEGMENT_COLUMNS", "STREAMS", "StreamedProduct", "streamed_module"]

STREAMS = 8
SEGMENT_COLUMNS = 2048


@dataclass(frozen=True)
class StreamedProduct:
    """y[rows, n] = x[rows, k] @ w[k, n] in float32, and the sums [parts, rows, n] over each part of k.

    The buffers are x and w. The rows of a part are a multiple of 8.
    """

    rows: int
    weight: str

    @property
    def name(self) -> str:
        return f"linear_streams_{self.rows}_{self.weight}"


def streamed_module(product: StreamedProduct, processor: Processor) -> ir.Module:
    """`@tiles`, `@tile` and `@finish` of a product."""
    module = ir.Module(product.name)
    code = Code(module, "tiles", [POINTER, POINTER], INDEX)
    _, (parts, _, columns) = code.buffer(code.parameters[1], 1, 3)
    code.close(code.times(parts, _segments(code, columns)))
    _Part(module, product, processor).write()
    _write_finish(module, processor.lanes)
    return module


def _segments(code: Code, columns: Any) -> Any:
    return code.over(code.plus(columns, SEGMENT_COLUMNS - 1), SEGMENT_COLUMNS)


def _write_finish(module: ir.Module, lanes: int) -> None:
    """y is the sum of the parts."""
    code = Code(module, "finish", [POINTER, POINTER])
    results, kind = code.parameters[1], vector(FLOAT, lanes)
    y, _ = code.buffer(results, 0, 0)
    sums, (parts, rows, columns) = code.buffer(results, 1, 3)
    count = code.times(rows, columns)
    with code.loop(0, code.plus(count, lanes - 1), lanes) as column:
        mask = code.mask(code.minus(count, column), lanes)
        total = code.variable(kind, ir.Constant(kind, None))
        with code.loop(0, parts) as part:
            place = code.at(sums, code.times(code.plus(code.times(part, count), column), 4))
            total.set(code.build.fadd(total.get(), code.masked_load(kind, place, mask)))
        code.masked_store(total.get(), code.at(y, code.times(column, 4)), mask)
    code.close()


class _Part:
    """Writes `@tile`: the sum over a part of k."""

    def __init__(self, module: ir.Module, product: StreamedProduct, processor: Processor) -> None:
        self.code = code = Code(module, "tile", [POINTER, POINTER, INDEX])
        self.product, self.lanes = product, processor.lanes
        self.line_vectors = 512 // BITS[product.weight] // processor.lanes or 1
        arguments, results, tile = code.parameters
        x, (_, self.depth) = code.buffer(arguments, 0, 2)
        self.weight, _ = code.buffer(arguments, 1, 0)
        sums, (parts, _, self.columns) = code.buffer(results, 1, 3)
        self.part = code.over(tile, _segments(code, self.columns))
        self.segment = code.minus(tile, code.times(self.part, _segments(code, self.columns)))
        self.rows = code.over(self.depth, parts)
        self.first = code.times(self.part, self.rows)
        self.x = code.at(x, code.times(self.first, 4))
        self.sums = code.at(sums, code.times(code.times(self.part, self.columns), 4 * product.rows))
        self.row_bytes = code.over(code.times(self.columns, BITS[product.weight]), 8)

    def write(self) -> None:
        code = self.code
        each = code.over(self.rows, STREAMS)
        start = code.times(self.segment, SEGMENT_COLUMNS)
        end = code.least(code.plus(start, SEGMENT_COLUMNS), self.columns)
        for row in range(self.product.rows):
            code.clear(self._sum(row, start), code.times(code.minus(end, start), 4))
        with code.loop(0, each) as depth:
            self._add_lines([code.plus(code.times(each, stream), depth) for stream in range(STREAMS)], start, end)
        code.close()

    def _sum(self, row: int, column: Any) -> Any:
        code = self.code
        return code.at(self.sums, code.times(code.plus(code.times(self.columns, row), column), 4))

    def _add_lines(self, depths: list[Any], start: Any, end: Any) -> None:
        """A row of the weight from each stream."""
        code, lanes = self.code, self.lanes
        x = [[code.splat(self._x(row, depth), lanes) for depth in depths] for row in range(self.product.rows)]
        lines = [code.at(self.weight, code.times(code.plus(self.first, depth), self.row_bytes)) for depth in depths]
        width = self.line_vectors * lanes
        after = code.plus(start, code.times(code.over(code.minus(end, start), width), width))
        with code.loop(start, after, width) as column:
            for line in lines:
                code.prefetch(code.at(line, self.row_bytes, self._bytes(column)))
            for number in range(self.line_vectors):
                self._add(x, lines, code.plus(column, number * lanes), None)
        with code.loop(after, code.plus(end, lanes - 1), lanes) as column:
            self._add(x, lines, column, code.mask(code.minus(end, column), lanes))

    def _x(self, row: int, depth: Any) -> Any:
        code = self.code
        return code.load(FLOAT, code.at(self.x, code.times(code.plus(code.times(self.depth, row), depth), 4)))

    def _add(self, x: list[list[Any]], lines: list[Any], column: Any, mask: Any) -> None:
        """The products of all rows of x with a vector of columns."""
        code, kind, before = self.code, vector(FLOAT, self.lanes), self._bytes(column)
        weights = [read(code, self.product.weight, code.at(line, before), self.lanes, mask, None) for line in lines]
        for row, values in enumerate(x):
            place = self._sum(row, column)
            total = code.load(kind, place) if mask is None else code.masked_load(kind, place, mask)
            for value, weight in zip(values, weights, strict=True):
                total = code.fma(value, weight, total)
            code.store(total, place) if mask is None else code.masked_store(total, place, mask)

    def _bytes(self, columns: Any) -> Any:
        return self.code.over(self.code.times(columns, BITS[self.product.weight]), 8)
