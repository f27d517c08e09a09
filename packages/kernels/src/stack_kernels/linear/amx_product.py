"""Products of bf16 matrices in AMX tiles, in LLVM IR.

A tile register holds 16 rows of 64 bytes. The sums of 32 rows of x and two tiles' columns of w stay in four of them
along k; each step loads two tiles of x and two of w, of 32 entries along k, and multiplies each with each. A tile of w
wants the entries of two rows beside each other: a panel of w is brought into that order once for up to 512 rows of x,
and stays in the second cache meanwhile. Where k is longer than a panel, the sums wait in fp32.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from llvmlite import ir

from stack_kernels.llvm.activations import ACTIVATIONS
from stack_kernels.llvm.code import BYTE, FLOAT, INDEX, INT32, POINTER, SHORT, Code, vector
from stack_kernels.llvm.host import Processor
from stack_kernels.llvm.tile_registers import TILE_BYTES, TILE_LINE, TILE_ROWS, TileRegisters
from stack_kernels.llvm.vectors import as_bfloat16, from_bfloat16, interleaved, transposed

__all__ = ["GRAIN", "TiledProduct", "tiled_module"]

GRAIN = 32
"""k and the columns are multiples of this."""

_UNIT_ROWS = 512
_PANEL_TILES = 512
_PAIRS = (4, 8, 16, 32, 64)
_MOST_WAITING = 16 * _UNIT_ROWS
"""Rows of x by pairs of tiles of w whose sums wait."""
_AHEAD = 32
_OF_X, _OF_W = (4, 5), (6, 7)
_SUMS = ((0, 1), (2, 3))


@dataclass(frozen=True)
class TiledProduct:
    """y[rows, n] = x[rows, k] @ w[k, n] of bf16, added up in fp32.

    The buffers are x and w, and y. If gated, they are x, w_gate, w_up, and y = f(x w_gate) * (x w_up), followed by the
    two products if they are kept.

    Attributes:
      result: the dtype of y; bfloat16 if gated.
      is_transposed: the weights lie in memory as [n, k].
      activation: f, one of `ACTIVATIONS`; None if not gated.
    """

    result: Literal["float32", "bfloat16"] = "bfloat16"
    is_transposed: bool = False
    activation: str | None = None
    keeps_products: bool = False

    @property
    def name(self) -> str:
        marks = (
            ("transposed", self.is_transposed),
            (str(self.activation), self.activation),
            ("kept", self.keeps_products),
        )
        return "_".join(("linear_amx", self.result, *(mark for mark, is_set in marks if is_set)))

    @property
    def weights(self) -> int:
        return 1 if self.activation is None else 2


def tiled_module(product: TiledProduct, processor: Processor) -> ir.Module:
    """`@tiles` and `@tile` of a product."""
    module = ir.Module(product.name)
    code = Code(module, "tiles", [POINTER, POINTER], INDEX)
    _, (rows, columns) = code.buffer(code.parameters[1], 0, 2)
    size = _Size(code, product, processor, rows, columns)
    code.close(code.times(code.quotient_up(rows, _UNIT_ROWS), code.quotient_up(columns, size.columns)))
    _Unit(module, product, processor).write()
    return module


class _Size:
    """Of a unit of work: as wide as leaves two units to each processor, and as the sums of its rows fit.

    Where rows are few, it is the way of w from memory that takes the time, and long runs of it come sooner.

    Attributes:
      columns: of y. Two tiles of w make a pair, of one weight or of both.
      steps: along k, of a panel.
    """

    def __init__(self, code: Code, product: TiledProduct, processor: Processor, rows: Any, columns: Any) -> None:
        down = code.quotient_up(rows, _UNIT_ROWS)
        pairs: Any = INDEX(min(_PAIRS))
        of_unit = code.least(rows, INDEX(_UNIT_ROWS))
        for wider in sorted(_PAIRS)[1:]:
            units = code.times(down, code.quotient_up(columns, wider * 2 * TILE_ROWS // product.weights))
            is_enough = code.build.icmp_signed(">=", units, INDEX(2 * processor.count))
            fits = code.build.icmp_signed("<=", code.times(of_unit, wider), INDEX(_MOST_WAITING))
            pairs = code.build.select(code.build.and_(is_enough, fits), INDEX(wider), pairs)
        self.columns = code.times(pairs, 2 * TILE_ROWS // product.weights)
        self.steps = code.over(INDEX(_PANEL_TILES // 2), pairs)


class _Unit:
    """Writes `@tile`: some rows of x times some columns of w."""

    def __init__(self, module: ir.Module, product: TiledProduct, processor: Processor) -> None:
        self.code = code = Code(module, "tile", [POINTER, POINTER, INDEX])
        self.product = product
        arguments, results, unit = code.parameters
        self.x, (self.rows, self.depth) = code.buffer(arguments, 0, 2)
        self.weights = [code.buffer(arguments, 1 + number, 0)[0] for number in range(product.weights)]
        _, (_, self.columns) = code.buffer(results, 0, 2)
        self.results = [code.buffer(results, number, 0)[0] for number in range(3 if product.keeps_products else 1)]
        self.unit = _Size(code, product, processor, self.rows, self.columns)
        across = code.quotient_up(self.columns, self.unit.columns)
        down = code.over(unit, across)
        self.row = code.times(down, _UNIT_ROWS)
        self.column = code.times(code.minus(unit, code.times(down, across)), self.unit.columns)
        self.registers = TileRegisters(code)
        self.tile_rows = code.least(self.rows, INDEX(TILE_ROWS))
        self.panel = code.scratch(BYTE, _PANEL_TILES * TILE_BYTES)
        self.block = code.scratch(BYTE, _PANEL_TILES // min(_PAIRS) * TILE_BYTES)
        self.sums = code.scratch(BYTE, _MOST_WAITING // GRAIN * 4 * TILE_BYTES)

    def write(self) -> None:
        code = self.code
        self.registers.configure(self.tile_rows, {*_OF_X, *itertools.chain(*_SUMS)})
        width = code.least(code.minus(self.columns, self.column), self.unit.columns)
        blocks = code.quotient_up(code.least(code.minus(self.rows, self.row), INDEX(_UNIT_ROWS)), GRAIN)
        pairs = code.over(code.times(width, self.product.weights), 2 * TILE_ROWS)
        steps = code.over(self.depth, GRAIN)
        panels = code.quotient_up(steps, self.unit.steps)
        is_only = code.build.icmp_signed("==", panels, INDEX(1))
        with code.loop(0, panels) as panel:
            first = code.times(panel, self.unit.steps)
            count = code.least(code.minus(steps, first), self.unit.steps)
            is_first = code.build.icmp_signed("==", panel, INDEX(0))
            is_last = code.build.icmp_signed("==", code.plus(panel, 1), panels)
            self._pack(first, count, width)
            with code.loop(0, blocks) as block:
                starts = self._starts(block)
                self._pack_x(starts, first, count)
                with code.loop(0, pairs) as pair:
                    waiting = code.build.select(is_only, INDEX(0), code.plus(code.times(block, pairs), pair))
                    place = code.at(self.sums, code.times(waiting, 4 * TILE_BYTES))
                    self._begin(is_first, place)
                    self._multiply(code.at(self.panel, code.times(code.times(pair, count), 2 * TILE_BYTES)), count)
                    for number in range(4):
                        self.registers.store(number, code.at(place, number * TILE_BYTES), INDEX(TILE_LINE))
                    with code.when(is_last):
                        column = code.plus(self.column, code.times(pair, 2 * TILE_ROWS // self.product.weights))
                        self._finish(starts, column, place)
        self.registers.release()
        code.close()

    def _starts(self, block: Any) -> list[Any]:
        """The first rows of a block's tiles: the last of x begin so that they end with it, and repeat some."""
        code = self.code
        last = code.minus(self.rows, self.tile_rows)
        first = code.plus(self.row, code.times(block, GRAIN))
        return [code.least(code.plus(first, offset), last) for offset in (0, TILE_ROWS)]

    def _pack(self, first: Any, count: Any, width: Any) -> None:
        """Steps of the weights' columns, as pairs of tiles, each pair's steps together."""
        code = self.code
        pack = self._pack_columns if self.product.is_transposed else self._pack_rows
        with code.loop(0, count) as step:
            depth = code.times(code.plus(first, step), GRAIN)
            for number, weight in enumerate(self.weights):
                pack(weight, depth, width, functools.partial(self._packed, number, step, count))

    def _pack_rows(self, weight: Any, depth: Any, width: Any, packed: Callable[..., Any]) -> None:
        """Of w[k, n], the entries of two rows in turn."""
        code, line, wide = self.code, _bytes(self.code, self.columns), vector(SHORT, GRAIN)
        with code.loop(0, GRAIN, 2) as row:
            start = code.at(weight, code.times(code.plus(depth, row), line), _bytes(code, self.column))
            with code.loop(0, width, GRAIN) as column:
                place = code.at(start, _bytes(code, column))
                for ahead in (_AHEAD, _AHEAD + 1):
                    code.prefetch(code.at(place, code.times(line, ahead)))
                upper, lower = code.load(wide, place), code.load(wide, code.at(place, line))
                for half, part in enumerate(interleaved(code, upper, lower, GRAIN)):
                    code.store(part, code.at(packed(column, half), code.times(row, TILE_LINE // 2)))

    def _pack_columns(self, weight: Any, depth: Any, width: Any, packed: Callable[..., Any]) -> None:
        """Of w[n, k], pairs of entries of a row, transposed."""
        code, line, wide = self.code, _bytes(self.code, self.depth), vector(INT32, TILE_ROWS)
        with code.loop(0, width, GRAIN) as column:
            for half in range(2):
                first = code.plus(code.plus(self.column, column), half * TILE_ROWS)
                place = code.at(weight, code.times(first, line), _bytes(code, depth))
                rows = [code.load(wide, code.at(place, code.times(line, row))) for row in range(TILE_ROWS)]
                for row, part in enumerate(transposed(code, rows)):
                    code.store(part, code.at(packed(column, half), row * TILE_LINE))

    def _packed(self, number: int, step: Any, count: Any, column: Any, half: int) -> Any:
        """The place of the tile of a weight that begins at a column, or, its second half, 16 columns on."""
        code = self.code
        tile = code.plus(code.over(column, TILE_ROWS), half)
        pair, slot = (code.over(column, GRAIN), half) if len(self.weights) == 1 else (tile, number)
        return code.at(
            self.panel, code.times(code.plus(code.times(pair, count), step), 2 * TILE_BYTES), slot * TILE_BYTES
        )

    def _begin(self, is_first: Any, place: Any) -> None:
        code = self.code
        with code.build.if_else(is_first) as (then, otherwise):
            with then:
                for number in range(4):
                    self.registers.clear(number)
            with otherwise:
                for number in range(4):
                    self.registers.load(number, code.at(place, number * TILE_BYTES), INDEX(TILE_LINE))

    def _pack_x(self, starts: list[Any], first: Any, count: Any) -> None:
        """Steps of two tiles of x, each step's together: rows of a matrix may all want the same lines of the cache."""
        code, line, wide = self.code, _bytes(self.code, self.depth), vector(SHORT, GRAIN)
        for number, start in enumerate(starts):
            with code.loop(0, self.tile_rows) as row:
                source = code.at(self.x, code.times(code.plus(start, row), line), code.times(first, TILE_LINE))
                target = code.at(self.block, number * TILE_BYTES, code.times(row, TILE_LINE))
                with code.loop(0, count) as step:
                    values = code.load(wide, code.at(source, code.times(step, TILE_LINE)))
                    code.store(values, code.at(target, code.times(step, 2 * TILE_BYTES)))

    def _multiply(self, panel: Any, count: Any) -> None:
        """The tiles of w are loaded past the first cache, where those of x stay."""
        code = self.code
        with code.loop(0, count) as step:
            start = code.times(step, 2 * TILE_BYTES)
            for number, of_w in enumerate(_OF_W):
                self.registers.load(
                    of_w, code.at(panel, start, number * TILE_BYTES), INDEX(TILE_LINE), passes_first_cache=True
                )
            for number, (of_x, sums) in enumerate(zip(_OF_X, _SUMS, strict=True)):
                self.registers.load(of_x, code.at(self.block, start, number * TILE_BYTES), INDEX(TILE_LINE))
                for of_w, total in zip(_OF_W, sums, strict=True):
                    self.registers.multiply(total, of_x, of_w)

    def _finish(self, starts: list[Any], column: Any, place: Any) -> None:
        """Writes a block of sums to the results."""
        code, wide = self.code, vector(FLOAT, TILE_ROWS)
        for sums, start in zip(_SUMS, starts, strict=True):
            with code.loop(0, self.tile_rows) as row:
                halves = [
                    code.load(wide, code.at(place, code.times(row, TILE_LINE), number * TILE_BYTES)) for number in sums
                ]
                self._write(halves, code.plus(code.times(code.plus(start, row), self.columns), column))

    def _write(self, halves: list[Any], at: Any) -> None:
        """A row of two tiles, from an entry of the results on."""
        code, product = self.code, self.product
        if product.activation is None:
            stored = [as_bfloat16(code, *halves)] if product.result == "bfloat16" else halves
            size = 2 if product.result == "bfloat16" else 4
            for number, values in enumerate(stored):
                code.store(values, code.at(self.results[0], code.times(at, size), number * TILE_LINE))
            return
        products = [as_bfloat16(code, half) for half in halves]
        gate, up = (from_bfloat16(code, half) for half in products)
        activated, _ = ACTIVATIONS[product.activation](code, gate)
        gated = as_bfloat16(code, code.build.fmul(activated, up))
        for result, values in zip(self.results, (gated, *products), strict=False):
            code.store(values, code.at(result, _bytes(code, at)))


def _bytes(code: Code, count: Any) -> Any:
    """Of so many bf16 numbers."""
    return code.times(count, 2)
