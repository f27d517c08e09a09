"""Products of bf16 matrices in AMX tiles, in LLVM IR.

A tile register holds 16 rows of 64 bytes. Four of them keep the sums of 32 rows of x and two column tiles of w along k;
each step loads two tiles of x and two of w, of 32 entries along k, and multiplies all pairs. A tile of w needs the
entries of two rows interleaved: a panel of w is packed into that order once for up to 512 rows of x, and meanwhile
stays in the L2 cache. If k is longer than a panel, the sums are stored in fp32 in between.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from llvmlite import ir

from stack_kernels.jit_cpu.activations import ACTIVATIONS
from stack_kernels.jit_cpu.builder import BYTE, FLOAT, INDEX, INT32, POINTER, SHORT, TILE, Builder, vector
from stack_kernels.jit_cpu.host import Processor
from stack_kernels.jit_cpu.tile_registers import TILE_BYTES, TILE_LINE, TILE_ROWS, TileRegisters
from stack_kernels.jit_cpu.vectors import as_bfloat16, from_bfloat16, interleaved, transposed

__all__ = ["GRAIN", "TiledProduct", "tiled_module"]

GRAIN = 32
"""k and the columns are multiples of this."""

_UNIT_ROWS = 512
# Tiles of w in a panel: half a MiB, for the L2 cache.
_PANEL_TILES = 512
_PAIRS = (4, 8, 16, 32, 64)
_MAX_WAITING = 16 * _UNIT_ROWS
"""Maximum of the rows of x times the pairs of tiles of w whose sums are stored."""
_AHEAD = 32
# Tile registers. The sums of x tile i and w tile j are in register 2 i + j.
_OF_X, _OF_W = (4, 5), (6, 7)
_SUMS = ((0, 1), (2, 3))


@dataclass(frozen=True)
class TiledProduct:
    """y[rows, n] = x[rows, k] @ w[k, n] in bf16 with fp32 accumulation.

    The buffers are x, w and y. If gated, they are x, w_gate, w_up and y = f(x w_gate) * (x w_up), followed by the two
    products if `keeps_products`.

    Attributes:
      result: dtype of y; bfloat16 if gated.
      is_transposed: True if the weights are stored as [n, k].
      activation: f, one of `ACTIVATIONS`; None if not gated.
      keeps_products: True to also return the two products.
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
    """Builds `@tiles` and `@tile` of a product."""
    module = ir.Module(product.name)
    builder = Builder(module, "tiles", [POINTER, POINTER], INDEX)
    _, (rows, columns) = builder.buffer(builder.parameters[1], 0, 2)
    size = _Size(builder, product, processor, rows, columns)
    builder.close(builder.times(builder.ceil_div(rows, _UNIT_ROWS), builder.ceil_div(columns, size.columns)))
    _Unit(module, product, processor).write()
    return module


class _Size:
    """Size of a unit of work: as wide as possible with two units per processor and room for the sums of its rows.

    If rows are few, reading w from memory dominates, and longer runs of it are faster.

    Attributes:
      columns: columns of y. Two tiles of w make a pair, of one weight or of both.
      steps: steps along k per panel.
    """

    def __init__(self, builder: Builder, product: TiledProduct, processor: Processor, rows: Any, columns: Any) -> None:
        down = builder.ceil_div(rows, _UNIT_ROWS)
        pairs: Any = INDEX(min(_PAIRS))
        of_unit = builder.min(rows, INDEX(_UNIT_ROWS))
        for wider in sorted(_PAIRS)[1:]:
            units = builder.times(down, builder.ceil_div(columns, wider * 2 * TILE_ROWS // product.weights))
            is_enough = builder.build.icmp_signed(">=", units, INDEX(2 * processor.count))
            fits = builder.build.icmp_signed("<=", builder.times(of_unit, wider), INDEX(_MAX_WAITING))
            pairs = builder.build.select(builder.build.and_(is_enough, fits), INDEX(wider), pairs)
        self.columns = builder.times(pairs, 2 * TILE_ROWS // product.weights)
        self.steps = builder.over(INDEX(_PANEL_TILES // 2), pairs)


class _Unit:
    """Builder of `@tile`: some rows of x times some columns of w."""

    def __init__(self, module: ir.Module, product: TiledProduct, processor: Processor) -> None:
        self.builder = builder = Builder(module, "tile", TILE)
        self.product = product
        arguments, results, unit, _ = builder.parameters
        self.x, (self.rows, self.depth) = builder.buffer(arguments, 0, 2)
        self.weights = [builder.buffer(arguments, 1 + number, 0)[0] for number in range(product.weights)]
        _, (_, self.columns) = builder.buffer(results, 0, 2)
        self.results = [builder.buffer(results, number, 0)[0] for number in range(3 if product.keeps_products else 1)]
        self.unit = _Size(builder, product, processor, self.rows, self.columns)
        across = builder.ceil_div(self.columns, self.unit.columns)
        down = builder.over(unit, across)
        self.row = builder.times(down, _UNIT_ROWS)
        self.column = builder.times(builder.minus(unit, builder.times(down, across)), self.unit.columns)
        self.registers = TileRegisters(builder)
        self.tile_rows = builder.min(self.rows, INDEX(TILE_ROWS))
        self.panel = builder.scratch(BYTE, _PANEL_TILES * TILE_BYTES)
        # The narrowest panel has the most steps, each with two tiles of x.
        self.block = builder.scratch(BYTE, _PANEL_TILES // min(_PAIRS) * TILE_BYTES)
        # Four tiles of sums per pair and block of 32 rows.
        self.sums = builder.scratch(BYTE, _MAX_WAITING // GRAIN * 4 * TILE_BYTES)

    def write(self) -> None:
        builder = self.builder
        # If x has fewer than 16 rows, so have its tiles and the sums.
        self.registers.configure(self.tile_rows, {*_OF_X, *itertools.chain(*_SUMS)})
        width = builder.min(builder.minus(self.columns, self.column), self.unit.columns)
        blocks = builder.ceil_div(builder.min(builder.minus(self.rows, self.row), INDEX(_UNIT_ROWS)), GRAIN)
        pairs = builder.over(builder.times(width, self.product.weights), 2 * TILE_ROWS)
        steps = builder.over(self.depth, GRAIN)
        panels = builder.ceil_div(steps, self.unit.steps)
        is_only = builder.build.icmp_signed("==", panels, INDEX(1))
        with builder.loop(0, panels) as panel:
            first = builder.times(panel, self.unit.steps)
            count = builder.min(builder.minus(steps, first), self.unit.steps)
            is_first = builder.build.icmp_signed("==", panel, INDEX(0))
            is_last = builder.build.icmp_signed("==", builder.plus(panel, 1), panels)
            self._pack(first, count, width)
            with builder.loop(0, blocks) as block:
                starts = self._starts(block)
                self._pack_x(starts, first, count)
                with builder.loop(0, pairs) as pair:
                    # The sums of a single panel are final and written at once, so all pairs share one place.
                    waiting = builder.build.select(is_only, INDEX(0), builder.plus(builder.times(block, pairs), pair))
                    place = builder.at(self.sums, builder.times(waiting, 4 * TILE_BYTES))
                    self._begin(is_first, place)
                    self._multiply(
                        builder.at(self.panel, builder.times(builder.times(pair, count), 2 * TILE_BYTES)), count
                    )
                    for number in range(4):
                        self.registers.store(number, builder.at(place, number * TILE_BYTES), INDEX(TILE_LINE))
                    with builder.when(is_last):
                        column = builder.plus(self.column, builder.times(pair, 2 * TILE_ROWS // self.product.weights))
                        self._finish(starts, column, place)
        self.registers.release()
        builder.close()

    def _starts(self, block: Any) -> list[Any]:
        """Returns the first rows of a block's tiles.

        The last tiles are aligned to the end of x and repeat some rows.
        """
        builder = self.builder
        last = builder.minus(self.rows, self.tile_rows)
        first = builder.plus(self.row, builder.times(block, GRAIN))
        return [builder.min(builder.plus(first, offset), last) for offset in (0, TILE_ROWS)]

    def _pack(self, first: Any, count: Any, width: Any) -> None:
        """Packs steps of the weights' columns as pairs of tiles, the steps of each pair contiguous."""
        builder = self.builder
        pack = self._pack_columns if self.product.is_transposed else self._pack_rows
        with builder.loop(0, count) as step:
            depth = builder.times(builder.plus(first, step), GRAIN)
            for number, weight in enumerate(self.weights):
                pack(weight, depth, width, functools.partial(self._packed, number, step, count))

    def _pack_rows(self, weight: Any, depth: Any, width: Any, packed: Callable[..., Any]) -> None:
        """Packs w[k, n] by interleaving the entries of two rows."""
        builder, line, wide = self.builder, _bytes(self.builder, self.columns), vector(SHORT, GRAIN)
        with builder.loop(0, GRAIN, 2) as row:
            start = builder.at(weight, builder.times(builder.plus(depth, row), line), _bytes(builder, self.column))
            with builder.loop(0, width, GRAIN) as column:
                place = builder.at(start, _bytes(builder, column))
                for ahead in (_AHEAD, _AHEAD + 1):
                    builder.prefetch(builder.at(place, builder.times(line, ahead)))
                upper, lower = builder.load(wide, place), builder.load(wide, builder.at(place, line))
                for half, part in enumerate(interleaved(builder, upper, lower, GRAIN)):
                    builder.store(part, builder.at(packed(column, half), builder.times(row, TILE_LINE // 2)))

    def _pack_columns(self, weight: Any, depth: Any, width: Any, packed: Callable[..., Any]) -> None:
        """Packs w[n, k] by transposing pairs of entries of a row."""
        builder, line, wide = self.builder, _bytes(self.builder, self.depth), vector(INT32, TILE_ROWS)
        with builder.loop(0, width, GRAIN) as column:
            for half in range(2):
                first = builder.plus(builder.plus(self.column, column), half * TILE_ROWS)
                place = builder.at(weight, builder.times(first, line), _bytes(builder, depth))
                rows = [builder.load(wide, builder.at(place, builder.times(line, row))) for row in range(TILE_ROWS)]
                for row, part in enumerate(transposed(builder, rows)):
                    builder.store(part, builder.at(packed(column, half), row * TILE_LINE))

    def _packed(self, number: int, step: Any, count: Any, column: Any, half: int) -> Any:
        """Returns the address of the packed tile of a weight for a column; the second half begins 16 columns later."""
        builder = self.builder
        tile = builder.plus(builder.over(column, TILE_ROWS), half)
        pair, slot = (builder.over(column, GRAIN), half) if len(self.weights) == 1 else (tile, number)
        return builder.at(
            self.panel, builder.times(builder.plus(builder.times(pair, count), step), 2 * TILE_BYTES), slot * TILE_BYTES
        )

    def _begin(self, is_first: Any, place: Any) -> None:
        builder = self.builder
        with builder.build.if_else(is_first) as (then, otherwise):
            with then:
                for number in range(4):
                    self.registers.clear(number)
            with otherwise:
                for number in range(4):
                    self.registers.load(number, builder.at(place, number * TILE_BYTES), INDEX(TILE_LINE))

    def _pack_x(self, starts: list[Any], first: Any, count: Any) -> None:
        """Packs steps of two tiles of x contiguously, because rows of a matrix may map to the same cache lines."""
        builder, line, wide = self.builder, _bytes(self.builder, self.depth), vector(SHORT, GRAIN)
        for number, start in enumerate(starts):
            with builder.loop(0, self.tile_rows) as row:
                source = builder.at(
                    self.x, builder.times(builder.plus(start, row), line), builder.times(first, TILE_LINE)
                )
                target = builder.at(self.block, number * TILE_BYTES, builder.times(row, TILE_LINE))
                with builder.loop(0, count) as step:
                    values = builder.load(wide, builder.at(source, builder.times(step, TILE_LINE)))
                    builder.store(values, builder.at(target, builder.times(step, 2 * TILE_BYTES)))

    def _multiply(self, panel: Any, count: Any) -> None:
        """Multiplies the tiles; tiles of w bypass the L1 cache, in which the tiles of x stay."""
        builder = self.builder
        with builder.loop(0, count) as step:
            start = builder.times(step, 2 * TILE_BYTES)
            for number, of_w in enumerate(_OF_W):
                self.registers.load(
                    of_w, builder.at(panel, start, number * TILE_BYTES), INDEX(TILE_LINE), passes_first_cache=True
                )
            for number, (of_x, sums) in enumerate(zip(_OF_X, _SUMS, strict=True)):
                self.registers.load(of_x, builder.at(self.block, start, number * TILE_BYTES), INDEX(TILE_LINE))
                for of_w, total in zip(_OF_W, sums, strict=True):
                    self.registers.multiply(total, of_x, of_w)

    def _finish(self, starts: list[Any], column: Any, place: Any) -> None:
        """Writes a block of sums to the results."""
        builder, wide = self.builder, vector(FLOAT, TILE_ROWS)
        for sums, start in zip(_SUMS, starts, strict=True):
            with builder.loop(0, self.tile_rows) as row:
                halves = [
                    builder.load(wide, builder.at(place, builder.times(row, TILE_LINE), number * TILE_BYTES))
                    for number in sums
                ]
                self._write(halves, builder.plus(builder.times(builder.plus(start, row), self.columns), column))

    def _write(self, halves: list[Any], at: Any) -> None:
        """Writes a row of two tiles to the results, starting at an entry."""
        builder, product = self.builder, self.product
        if product.activation is None:
            stored = [as_bfloat16(builder, *halves)] if product.result == "bfloat16" else halves
            size = 2 if product.result == "bfloat16" else 4
            for number, values in enumerate(stored):
                builder.store(values, builder.at(self.results[0], builder.times(at, size), number * TILE_LINE))
            return
        # f takes the products as rounded to bf16: the same numbers that are returned for the gradient.
        products = [as_bfloat16(builder, half) for half in halves]
        gate, up = (from_bfloat16(builder, half) for half in products)
        activated, _ = ACTIVATIONS[product.activation](builder, gate)
        gated = as_bfloat16(builder, builder.build.fmul(activated, up))
        for result, values in zip(self.results, (gated, *products), strict=False):
            builder.store(values, builder.at(result, _bytes(builder, at)))


def _bytes(builder: Builder, count: Any) -> Any:
    """Returns the bytes of this many bf16 numbers."""
    return builder.times(count, 2)
