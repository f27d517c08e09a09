"""A few rows of x times a block of columns of a weight, in LLVM IR: the innermost loop of a product."""

from dataclasses import dataclass
from typing import Any, Literal

from llvmlite import ir

from stack_kernels.jit_cpu.builder import BYTE, FLOAT, INDEX, INT32, POINTER, SHORT, Builder, Variable, vector
from stack_kernels.jit_cpu.host import Processor
from stack_kernels.jit_cpu.integer_dots import add_fours, added_by_fours, fours
from stack_kernels.jit_cpu.numbers import BITS, LEVELS, read, read_pairs
from stack_kernels.jit_cpu.vectors import interleaved

__all__ = ["PANEL_STEPS", "Block", "Places", "Product"]

PANEL_STEPS = 128
"""Number of steps along k whose values fit in a panel."""

# Number of entries along k between a prefetch and its use.
_AHEAD = 32
_X_TYPES = {"float32": FLOAT, "bfloat16": INT32, "int8": INT32}


@dataclass(frozen=True)
class Product:
    """y[rows, n] = x[rows, k] @ w[k, n] in float32; the sum over each tile along k is multiplied by its scales.

    The buffers are x; w; if `scaled`, the scales of w, float32[tiles, n]; with integer x the scales of x, float32[rows,
    tiles]; if `has_zero_point`, the zero points of w, float32[tiles, n], and the sums of x over each tile,
    float32[rows, tiles]; if `has_codebook`, 16 levels.

    Attributes:
      rows: number of rows of x.
      weight: dtype of w, one of `BITS`.
      x: "float32"; "bfloat16" or "int8" if w has that dtype and the processor has such a dot product.
      scaled: True if w has scales.
      has_codebook: True if the codes of w index a codebook.
      has_zero_point: True if zero points are subtracted from the codes of w before they are scaled; x is float32.
    """

    rows: int
    weight: str
    x: str = "float32"
    scaled: bool = False
    has_codebook: bool = False
    has_zero_point: bool = False

    @property
    def name(self) -> str:
        marks = ("scaled", self.scaled), ("codebook", self.has_codebook), ("zero_point", self.has_zero_point)
        return "_".join(["linear", str(self.rows), self.x, self.weight, *(mark for mark, is_set in marks if is_set)])

    @property
    def step(self) -> int:
        """Number of entries along k that one instruction adds, 4 bytes of x."""
        return {"float32": 1, "bfloat16": 2, "int8": 4}[self.x]

    @property
    def buffers(self) -> dict[str, int]:
        """Rank of each buffer by name, in order."""
        of_w = {"scale": 2} if self.scaled else {}
        of_x = {"x_scale": 2} if self.x == "int8" else {}
        zero_point = {"zero_point": 2, "x_sum": 2} if self.has_zero_point else {}
        return {"x": 2, "w": 2} | of_w | of_x | zero_point | ({"levels": 1} if self.has_codebook else {})


@dataclass(frozen=True)
class Places:
    """Pointers and indices of a tile or a block.

    Attributes:
      x: pointer to the first row of x.
      w: pointer to the block's first column of w.
      y: pointer to the block's first result.
      scale: pointer to the block's scales of w.
      x_scale: pointer to the scales of the first row of x.
      zero_point: pointer to the block's zero points of w.
      x_sum: pointer to the sums of the first row of x.
      levels: pointer to the codebook.
      panel: pointer to the panel.
      depth: k.
      columns: n.
      tiles: number of scale tiles along k.
      start: start of the summed part of k, within one scale tile.
      stop: end of the summed part of k.
      tile: index of the scale tile.
      left: number of columns from the block's first to the end.
    """

    x: Any
    w: Any
    y: Any
    scale: Any
    x_scale: Any
    zero_point: Any
    x_sum: Any
    levels: Any
    panel: Any
    depth: Any
    columns: Any
    tiles: Any
    start: Any
    stop: Any
    tile: Any
    left: Any


class Block:
    """A few rows of x times some vectors of columns of w, added to y; masked if columns may be missing.

    Args:
      module: module to add the function to.
      product: the product.
      processor: processor to compile for.
      rows: number of rows.
      vectors: number of vectors of columns.
      is_masked: True if columns may be missing.
      panel: "written" to store the decoded values of w in a panel in the L1 cache, "read" for further rows that load
        them from there; or None.
    """

    def __init__(
        self,
        module: ir.Module,
        product: Product,
        processor: Processor,
        rows: int,
        vectors: int,
        *,
        is_masked: bool,
        panel: Literal["written", "read"] | None,
    ) -> None:
        name = f"block_{rows}_{vectors}{'_masked' * is_masked}_{panel}"
        # In the order of `Places`: 9 pointers, 7 indices.
        self.builder = Builder(module, name, [*[POINTER] * 9, *[INDEX] * 7])
        # Internal functions are inlined or dropped by LLVM once their callers are compiled.
        self.builder.function.linkage = "internal"
        self.at = Places(*self.builder.parameters)
        self.product, self.lanes = product, processor.lanes
        self.rows, self.vectors, self.panel = rows, vectors, panel
        self.mask = self.builder.mask(self.at.left, self.lanes) if is_masked else None
        # Two vectors at a time, of even and of odd columns.
        self.in_pairs = BITS[product.weight] == 4 and vectors % 2 == 0 and not is_masked
        self.levels = self._levels()

    def write(self) -> Any:
        builder = self.builder
        sums = self._in_order([cell.get() for cell in self._sums()])
        self.added = self._added_to_fours()
        # The first part of k overwrites y, which is not initialized; further parts add to it.
        is_first = builder.build.icmp_signed("==", self.at.start, INDEX(0))
        for (row, column), part in zip(self._cells(), sums, strict=True):
            place = builder.at(self.at.y, builder.times(self.at.columns, 4 * row), 4 * self.lanes * column)
            kind = vector(FLOAT, self.lanes)
            before = builder.load(kind, place) if self.mask is None else builder.masked_load(kind, place, self.mask)
            before = builder.build.select(is_first, ir.Constant(kind, None), before)
            after = self._added(before, part, row, column)
            builder.store(after, place) if self.mask is None else builder.masked_store(after, place, self.mask)
        builder.close()
        return builder.function

    def _added_to_fours(self) -> list[Any]:
        """Returns, for each row of integers, the excess of its sums over this part of k."""
        if self.product.x != "int8":
            return []
        builder, at = self.builder, self.at
        rows = [builder.at(at.x, builder.times(at.depth, row), at.start) for row in range(self.rows)]
        return [added_by_fours(builder, row, builder.minus(at.stop, at.start)) for row in rows]

    def _added(self, before: Any, part: Any, row: int, column: int) -> Any:
        """Adds the scaled sum of a part of k to y."""
        if not self.product.scaled:
            return self.builder.build.fadd(before, part)
        part = self._as_float(part, row)
        if self.product.has_zero_point:
            zero_point = self._of_columns(self.at.zero_point, column)
            part = self.builder.fma(self.builder.build.fneg(zero_point), self._of_row(self.at.x_sum, row), part)
        return self.builder.fma(part, self._scale(row, column), before)

    def _in_order(self, sums: list[Any]) -> list[Any]:
        """Returns the cells with their columns in order."""
        if not self.in_pairs:
            return sums
        pairs = zip(sums[::2], sums[1::2], strict=True)
        return [part for even, odd in pairs for part in interleaved(self.builder, even, odd, self.lanes)]

    def _cells(self) -> list[tuple[int, int]]:
        return [(row, column) for row in range(self.rows) for column in range(self.vectors)]

    def _levels(self) -> Any:
        if BITS[self.product.weight] > 4:
            return None
        kind = vector(FLOAT, 16)
        if self.product.has_codebook:
            return self.builder.load(kind, self.at.levels)
        return ir.Constant(kind, [float(level) for level in LEVELS[self.product.weight]])

    def _sums(self) -> list[Variable]:
        """Computes the sum of products over this part of k, for each cell."""
        builder, product = self.builder, self.product
        # Kept in registers during the loop over k, one per cell.
        zero = ir.Constant(vector(INT32 if product.x == "int8" else FLOAT, self.lanes), None)
        sums = [builder.variable(zero.type, zero) for _ in self._cells()]
        with builder.loop(self.at.start, self.at.stop, product.step) as depth:
            # Loaded once per step and used by all rows.
            weights = self._from_panel(depth) if self.panel == "read" else self._from_memory(depth)
            for row in range(self.rows):
                x = self._x(row, depth)
                for column in range(self.vectors):
                    total = sums[row * self.vectors + column]
                    total.set(self._add(total.get(), x, weights[column]))
        return sums

    def _from_memory(self, depth: Any) -> list[Any]:
        """Loads the values of w for one step along k, as one vector per vector of columns."""
        builder, product = self.builder, self.product
        lines = [self._line(builder.plus(depth, line)) for line in range(product.step)]
        self._ask_ahead(depth, _AHEAD // product.step)
        weights = self._weights(lines)
        if self.panel == "written":
            for weight, place in zip(weights, self._places_in_panel(depth), strict=True):
                builder.store(weight, place)
        return weights

    def _from_panel(self, depth: Any) -> list[Any]:
        # This pass reads no line of w: it prefetches the part of k that fills the panel next.
        self._ask_ahead(depth, PANEL_STEPS)
        kind = vector(_X_TYPES[self.product.x], self.lanes)
        return [self.builder.load(kind, place) for place in self._places_in_panel(depth)]

    def _places_in_panel(self, depth: Any) -> list[Any]:
        builder, size = self.builder, 4 * self.lanes
        step = builder.over(builder.minus(depth, self.at.start), self.product.step)
        # The panel is [steps, vectors, lanes], of 4 bytes.
        place = builder.at(self.at.panel, builder.times(step, size * self.vectors))
        return [builder.at(place, size * column) for column in range(self.vectors)]

    def _ask_ahead(self, depth: Any, distance: int) -> None:
        """Prefetches the lines `distance` steps ahead.

        Near the end of this block, the first lines of the next block.
        """
        builder, product = self.builder, self.product
        # Bytes of the block's columns in one line of w.
        width = self.vectors * self.lanes * BITS[product.weight] // 8
        ahead = builder.plus(depth, distance * product.step)
        # Past the end of k the next block begins, at line 0 and `width` bytes to the right.
        is_inside = builder.build.icmp_signed("<", ahead, self.at.depth)
        row = builder.build.select(is_inside, ahead, builder.minus(ahead, self.at.depth))
        shift = builder.build.select(is_inside, INDEX(0), INDEX(width))
        for line in range(product.step):
            place = builder.at(self._line(builder.plus(row, line)), shift)
            # 64 bytes: a cache line.
            for offset in range(0, width, 64):
                builder.prefetch(builder.at(place, offset))

    def _line(self, depth: Any) -> Any:
        builder = self.builder
        return builder.at(
            self.at.w, builder.times(depth, builder.over(builder.times(self.at.columns, BITS[self.product.weight]), 8))
        )

    def _x(self, row: int, depth: Any) -> Any:
        """Broadcasts 4 bytes of x to every lane."""
        builder, entry_bytes = self.builder, 4 // self.product.step
        place = builder.at(
            self.at.x, builder.times(self.at.depth, row * entry_bytes), builder.times(depth, entry_bytes)
        )
        return builder.splat(builder.load(_X_TYPES[self.product.x], place), self.lanes)

    def _add(self, total: Any, x: Any, weights: Any) -> Any:
        builder = self.builder
        if self.product.x == "bfloat16":
            return builder.intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", total.type, total, x, weights)
        if self.product.x == "int8":
            return add_fours(builder, total, weights, x)
        return builder.fma(x, weights, total)

    def _weights(self, lines: list[Any]) -> list[Any]:
        """Returns a vector per vector of columns: numbers, or the dot product's operand for each column."""
        product = self.product
        if self.in_pairs:
            starts = (self.builder.at(lines[0], self.lanes * pair) for pair in range(self.vectors // 2))
            return [part for start in starts for part in self._read_pair(start)]
        if product.x == "float32":
            width = self.lanes * BITS[product.weight] // 8
            return [
                read(
                    self.builder,
                    product.weight,
                    self.builder.at(lines[0], width * column),
                    self.lanes,
                    self.mask,
                    self.levels,
                )
                for column in range(self.vectors)
            ]
        if product.x == "bfloat16":
            return self._pairs(lines)
        return fours(self.builder, [self._stored(BYTE, line, 0, self.vectors * self.lanes) for line in lines])

    def _read_pair(self, start: Any) -> tuple[Any, Any]:
        name = self.product.weight
        # Without AVX-512, a conversion takes fewer instructions than a lookup.
        converts = self.lanes == 8 and not self.product.has_codebook and name in ("int4", "uint4")
        return read_pairs(self.builder, name, start, self.lanes, None if converts else self.levels)

    def _stored(self, kind: ir.IntType, line: Any, first: int, count: int) -> Any:
        place = self.builder.at(line, first * kind.width // 8)
        wide = vector(kind, count)
        return self.builder.load(wide, place) if self.mask is None else self.builder.masked_load(wide, place, self.mask)

    def _pairs(self, lines: list[Any]) -> list[Any]:
        """Interleaves two bf16 rows, making the two values of each column adjacent."""
        # Two vectors of 16-bit numbers fill a register; interleaved with the other row, they fill two.
        count = min(self.vectors, 2) * self.lanes
        parts: list[Any] = []
        for first in range(0, self.vectors * self.lanes, count):
            upper, lower = (self._stored(SHORT, line, first, count) for line in lines)
            parts += interleaved(self.builder, upper, lower, 2 * self.lanes)
        return [self.builder.build.bitcast(part, vector(INT32, self.lanes)) for part in parts]

    def _scale(self, row: int, column: int) -> Any:
        builder = self.builder
        scale = self._of_columns(self.at.scale, column)
        if self.product.x != "int8":
            return scale
        return builder.build.fmul(scale, self._of_row(self.at.x_scale, row))

    def _of_columns(self, first: Any, column: int) -> Any:
        """Loads the numbers of this tile for a vector of columns."""
        builder, kind = self.builder, vector(FLOAT, self.lanes)
        line = builder.times(builder.times(self.at.tile, self.at.columns), 4)
        place = builder.at(first, line, 4 * self.lanes * column)
        return builder.load(kind, place) if self.mask is None else builder.masked_load(kind, place, self.mask)

    def _of_row(self, first: Any, row: int) -> Any:
        """Broadcasts the number of this tile for a row."""
        builder = self.builder
        place = builder.at(first, builder.times(builder.plus(builder.times(self.at.tiles, row), self.at.tile), 4))
        return builder.splat(builder.load(FLOAT, place), self.lanes)

    def _as_float(self, total: Any, row: int) -> Any:
        """Converts integer sums to float, after subtracting the excess of `fours`."""
        if self.product.x != "int8":
            return total
        return self.builder.build.sitofp(self.builder.build.sub(total, self.added[row]), vector(FLOAT, self.lanes))
