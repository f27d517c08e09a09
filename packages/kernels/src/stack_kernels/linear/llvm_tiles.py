"""The product of a few rows with a weight, in LLVM IR.

Its time is that of reading the weight once, at the speed of memory. A tile is 128 columns of the weight. They are read
in blocks, all the way along d_in, while the sums of up to 12 rows of x stay in registers and lines that are 64 rows of
the weight away are asked for. Further rows of x find the block in the second cache.
"""

import functools
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from stack_kernels.llvm.code import BYTE, FLOAT, INDEX, INT32, POINTER, SHORT, Code, Variable, vector
from stack_kernels.llvm.host import Processor
from stack_kernels.llvm.numbers import BITS, LEVELS, read

__all__ = ["TILE_COLUMNS", "Product", "product_module"]

TILE_COLUMNS = 128
_AHEAD = 64
_X_TYPES = {"float32": FLOAT, "bfloat16": INT32, "int8": INT32}


@dataclass(frozen=True)
class Product:
    """y[rows, n] = x[rows, k] @ w[k, n] in float32, the sum over each tile along k multiplied by its scales.

    The buffers are x; w; if `scaled`, the scales of w, float32[tiles, n]; with integer x the scales of x,
    float32[rows, tiles], and 128 times the sums of x in each tile, int32[rows, tiles]; if `has_codebook`, 16 levels.

    Attributes:
      weight: the dtype of w, one of `BITS`.
      x: "float32"; "bfloat16" or "int8" where w is of that dtype and the processor has such a dot product.
    """

    rows: int
    weight: str
    x: str = "float32"
    scaled: bool = False
    has_codebook: bool = False

    @property
    def name(self) -> str:
        marks = ("scaled", self.scaled), ("codebook", self.has_codebook)
        return "_".join(["linear", str(self.rows), self.x, self.weight, *(mark for mark, is_set in marks if is_set)])

    @property
    def step(self) -> int:
        """The entries along k that one instruction adds up, 4 bytes of x."""
        return {"float32": 1, "bfloat16": 2, "int8": 4}[self.x]

    @property
    def buffers(self) -> dict[str, int]:
        """The rank of each, by name, in order."""
        of_w = {"scale": 2} if self.scaled else {}
        of_x = {"x_scale": 2, "x_offset": 2} if self.x == "int8" else {}
        return {"x": 2, "w": 2} | of_w | of_x | ({"levels": 1} if self.has_codebook else {})


@dataclass(frozen=True)
class _Places:
    """Pointers to the first value of a tile or a block, and sizes."""

    x: Any
    w: Any
    y: Any
    scale: Any
    x_scale: Any
    x_offset: Any
    levels: Any
    depth: Any
    columns: Any
    tiles: Any


def product_module(product: Product, processor: Processor) -> ir.Module:
    """`@tiles` and `@tile` of a product."""
    module = ir.Module(product.name)
    _write_tiles(module)
    rows = _row_blocks(product, processor)
    vectors = _vectors(product, processor, rows[0])

    block = functools.partial(_Block, module, product, processor)
    whole = {count: block(count, vectors, is_masked=False).write() for count in set(rows.values())}
    rest = {count: block(count, 1, is_masked=True).write() for count in set(rows.values())}
    blocks = ({first: functions[count] for first, count in rows.items()} for functions in (whole, rest))
    _write_tile(module, product, processor.lanes, vectors, *blocks)
    return module


def _row_blocks(product: Product, processor: Processor) -> dict[int, int]:
    """The rows of each pass over a block of columns, no more than registers can hold the sums of, by the first."""
    most = 4 if processor.lanes == 8 else 6 if product.x == "int8" else 12
    passes = -(-product.rows // most)
    each = -(-product.rows // passes)
    return {first: min(each, product.rows - first) for first in range(0, product.rows, each)}


def _vectors(product: Product, processor: Processor, rows: int) -> int:
    """The vectors of columns in a block: 128 bytes of w, where registers suffice for the sums and what is added."""
    if product.x == "int8":
        return 4
    sums = 8 if processor.lanes == 8 else 32 if product.x == "bfloat16" and product.rows <= 8 else 24
    most = min(1024 // BITS[product.weight] // processor.lanes, 8, sums // rows)
    return max(1 << most.bit_length() - 1, 1 + (product.x == "bfloat16"))


def _write_tiles(module: ir.Module) -> None:
    code = Code(module, "tiles", [POINTER, POINTER], INDEX)
    _, (_, columns) = code.buffer(code.parameters[1], 0, 2)
    code.close(code.over(code.plus(columns, TILE_COLUMNS - 1), TILE_COLUMNS))


def _write_tile(
    module: ir.Module, product: Product, lanes: int, vectors: int, whole: dict[int, Any], rest: dict[int, Any]
) -> None:
    """With the functions for whole blocks of columns, and for one vector of what is left, by their first row."""
    code = Code(module, "tile", [POINTER, POINTER, INDEX])
    arguments, results, tile = code.parameters
    places = _tile_places(code, product, arguments, results)
    first = code.times(tile, TILE_COLUMNS)
    end = code.least(code.plus(first, TILE_COLUMNS), places.columns)
    width = vectors * lanes
    after = code.plus(first, code.times(code.over(code.minus(end, first), width), width))
    with code.loop(first, after, width) as column:
        _call_rows(code, product, places, column, whole)
    with code.loop(after, code.plus(end, lanes - 1), lanes) as column:
        _call_rows(code, product, places, column, rest)
    code.close()


def _tile_places(code: Code, product: Product, arguments: Any, results: Any) -> _Places:
    found: dict[str, Any] = dict.fromkeys(_Places.__dataclass_fields__, ir.Constant(POINTER, None))
    found["tiles"] = INDEX(1)
    for number, (name, rank) in enumerate(product.buffers.items()):
        found[name], sizes = code.buffer(arguments, number, rank)
        if name == "x":
            found["depth"] = sizes[1]
        elif name == "scale":
            found["tiles"] = sizes[0]
    found["y"], (_, found["columns"]) = code.buffer(results, 0, 2)
    return _Places(**found)


def _call_rows(code: Code, product: Product, places: _Places, column: Any, blocks: dict[int, Any]) -> None:
    """One block of columns with each block of rows, by its first row."""
    of_column = {
        "w": code.at(places.w, code.over(code.times(column, BITS[product.weight]), 8)),
        "scale": code.at(places.scale, code.times(column, 4)),
    }
    for row, block in blocks.items():
        in_y = code.plus(code.times(places.columns, row), column)
        of_row = {
            "x": code.at(places.x, code.times(places.depth, row * 4 // product.step)),
            "x_scale": code.at(places.x_scale, code.times(places.tiles, 4 * row)),
            "x_offset": code.at(places.x_offset, code.times(places.tiles, 4 * row)),
            "y": code.at(places.y, code.times(in_y, 4)),
        }
        values = {**vars(places), **of_column, **of_row}
        code.build.call(block, [*values.values(), code.minus(places.columns, column)])


class _Block:
    """Some rows of x times some vectors of columns of w; masked where columns may be missing."""

    def __init__(
        self,
        module: ir.Module,
        product: Product,
        processor: Processor,
        rows: int,
        vectors: int,
        *,
        is_masked: bool,
    ) -> None:
        pointers = [POINTER] * 7
        name = f"block_{rows}_{vectors}{'_masked' * is_masked}"
        self.code = Code(module, name, [*pointers, INDEX, INDEX, INDEX, INDEX])
        self.code.function.linkage = "internal"
        *places, left = self.code.parameters
        self.at = _Places(*places)
        self.product, self.lanes = product, processor.lanes
        self.rows, self.vectors = rows, vectors
        self.mask = self._mask(left) if is_masked else None
        self.levels = self._levels()

    def write(self) -> Any:
        code, product = self.code, self.product
        zero = ir.Constant(vector(FLOAT, self.lanes), None)
        totals = [code.variable(zero.type, zero) for _ in self._cells()] if product.scaled else []
        tile_depth = code.over(self.at.depth, self.at.tiles)
        with code.loop(0, self.at.tiles) as tile:
            start = code.times(tile, tile_depth)
            sums = self._sums(start, code.plus(start, tile_depth))
            if product.scaled:
                for (row, column), total, part in zip(self._cells(), totals, sums, strict=True):
                    total.set(
                        code.fma(self._as_float(part.get(), row, tile), self._scale(row, column, tile), total.get())
                    )
        for (row, column), total in zip(self._cells(), totals or sums, strict=True):
            place = code.at(self.at.y, code.times(self.at.columns, 4 * row), 4 * self.lanes * column)
            if self.mask is None:
                code.store(total.get(), place)
            else:
                code.masked_store(total.get(), place, self.mask)
        code.close()
        return code.function

    def _cells(self) -> list[tuple[int, int]]:
        return [(row, column) for row in range(self.rows) for column in range(self.vectors)]

    def _mask(self, left: Any) -> Any:
        numbers = ir.Constant(vector(INT32, self.lanes), list(range(self.lanes)))
        return self.code.build.icmp_signed(
            "<", numbers, self.code.splat(self.code.build.trunc(left, INT32), self.lanes)
        )

    def _levels(self) -> Any:
        if BITS[self.product.weight] > 4:
            return None
        kind = vector(FLOAT, 16)
        if self.product.has_codebook:
            return self.code.load(kind, self.at.levels)
        return ir.Constant(kind, [float(level) for level in LEVELS[self.product.weight]])

    def _sums(self, start: Any, stop: Any) -> list[Variable]:
        """The sum over k from `start` to `stop`, for each cell."""
        code, product = self.code, self.product
        zero = ir.Constant(vector(INT32 if product.x == "int8" else FLOAT, self.lanes), None)
        sums = [code.variable(zero.type, zero) for _ in self._cells()]
        with code.loop(start, stop, product.step) as depth:
            self._add_lines(sums, depth)
        return sums

    def _add_lines(self, sums: list[Variable], depth: Any) -> None:
        """What one step along k gives, to each cell."""
        code, product = self.code, self.product
        row_bytes = code.over(code.times(self.at.columns, BITS[product.weight]), 8)
        lines = [code.at(self.at.w, code.times(code.plus(depth, line), row_bytes)) for line in range(product.step)]
        self._ask_ahead(depth, row_bytes)
        weights = self._weights(lines)
        for row in range(self.rows):
            x = self._x(row, depth)
            for column in range(self.vectors):
                total = sums[row * self.vectors + column]
                total.set(self._add(total.get(), x, weights[column]))

    def _ask_ahead(self, depth: Any, row_bytes: Any) -> None:
        """For the lines 64 rows on, or, from the end of this block, those at the start of the next one."""
        code, product = self.code, self.product
        width = self.vectors * self.lanes * BITS[product.weight] // 8
        ahead = code.plus(depth, _AHEAD)
        is_inside = code.build.icmp_signed("<", ahead, self.at.depth)
        row = code.build.select(is_inside, ahead, code.minus(ahead, self.at.depth))
        shift = code.build.select(is_inside, INDEX(0), INDEX(width))
        for line in range(product.step):
            place = code.at(self.at.w, code.times(code.plus(row, line), row_bytes), shift)
            for offset in range(0, width, 64):
                code.prefetch(code.at(place, offset))

    def _x(self, row: int, depth: Any) -> Any:
        """4 bytes of x in every lane."""
        code, entry_bytes = self.code, 4 // self.product.step
        place = code.at(self.at.x, code.times(self.at.depth, row * entry_bytes), code.times(depth, entry_bytes))
        return code.splat(code.load(_X_TYPES[self.product.x], place), self.lanes)

    def _add(self, total: Any, x: Any, weights: Any) -> Any:
        code = self.code
        if self.product.x == "bfloat16":
            return code.intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", total.type, total, x, weights)
        if self.product.x == "int8":
            return code.intrinsic("llvm.x86.avx512.vpdpbusd.512", total.type, total, weights, x)
        return code.fma(x, weights, total)

    def _weights(self, lines: list[Any]) -> list[Any]:
        """A vector for each vector of columns: of numbers, or of what the dot products take of each column."""
        product = self.product
        if product.x == "float32":
            width = self.lanes * BITS[product.weight] // 8
            return [
                read(
                    self.code,
                    product.weight,
                    self.code.at(lines[0], width * column),
                    self.lanes,
                    self.mask,
                    self.levels,
                )
                for column in range(self.vectors)
            ]
        joined = self._pairs(lines) if product.x == "bfloat16" else self._fours(lines)
        return [self.code.build.bitcast(part, vector(INT32, self.lanes)) for part in joined]

    def _stored(self, kind: ir.IntType, line: Any, first: int, count: int) -> Any:
        place = self.code.at(line, first * kind.width // 8)
        wide = vector(kind, count)
        return self.code.load(wide, place) if self.mask is None else self.code.masked_load(wide, place, self.mask)

    def _pairs(self, lines: list[Any]) -> list[Any]:
        """Of two bf16 rows, the two values of each column beside each other."""
        count = min(self.vectors, 2) * self.lanes
        parts: list[Any] = []
        for first in range(0, self.vectors * self.lanes, count):
            upper, lower = (self._stored(SHORT, line, first, count) for line in lines)
            parts += _interleaved(self.code, upper, lower, 2 * self.lanes)
        return parts

    def _fours(self, lines: list[Any]) -> list[Any]:
        """Of four int8 rows, the four values of each column beside each other, 128 added to each."""
        code = self.code
        rows = [self._stored(BYTE, line, 0, self.vectors * self.lanes) for line in lines]
        shift = ir.Constant(rows[0].type, [0x80] * rows[0].type.count)
        first, second, third, fourth = (code.build.xor(row, shift) for row in rows)
        size = min(64, 2 * rows[0].type.count)
        parts: list[Any] = []
        halves = (_interleaved(code, *pair, size) for pair in ((first, second), (third, fourth)))
        for pairs in zip(*halves, strict=True):
            upper, lower = (code.build.bitcast(pair, vector(SHORT, size // 2)) for pair in pairs)
            parts += _interleaved(code, upper, lower, 2 * self.lanes)
        return parts

    def _scale(self, row: int, column: int, tile: Any) -> Any:
        code = self.code
        place = code.at(self.at.scale, code.times(code.times(tile, self.at.columns), 4), 4 * self.lanes * column)
        kind = vector(FLOAT, self.lanes)
        scale = code.load(kind, place) if self.mask is None else code.masked_load(kind, place, self.mask)
        if self.product.x != "int8":
            return scale
        return code.build.fmul(scale, self._of_tile(self.at.x_scale, FLOAT, row, tile))

    def _as_float(self, total: Any, row: int, tile: Any) -> Any:
        if self.product.x != "int8":
            return total
        return self.code.build.sitofp(
            self.code.build.sub(total, self._of_tile(self.at.x_offset, INT32, row, tile)), vector(FLOAT, self.lanes)
        )

    def _of_tile(self, values: Any, kind: ir.Type, row: int, tile: Any) -> Any:
        """A number of one row of x and one tile in every lane."""
        code = self.code
        place = code.at(values, code.times(code.plus(code.times(self.at.tiles, row), tile), 4))
        return code.splat(code.load(kind, place), self.lanes)


def _interleaved(code: Code, upper: Any, lower: Any, size: int) -> list[Any]:
    """The elements of two vectors in turn, in vectors of `size`."""
    count = upper.type.count
    order = [at + other for at in range(count) for other in (0, count)]
    return [code.shuffle(upper, lower, order[first : first + size]) for first in range(0, 2 * count, size)]
