"""The product of a few rows with a weight, in LLVM IR.

The dominant cost is reading the weight, which happens once. A tile is 128 columns of the weight. They are read in
blocks, along d_in, while the sums of up to 12 rows of x stay in registers and lines 32 rows ahead in the weight are
prefetched. For more rows, processed 6 at a time, the block is wider and is split into parts, which are stored in a
panel in the L1 cache.
"""

import functools
from typing import Any

from llvmlite import ir

from stack_kernels.jit_cpu.builder import INDEX, INT32, POINTER, TILE, Builder
from stack_kernels.jit_cpu.host import Processor
from stack_kernels.jit_cpu.linear.block import PANEL_STEPS, Block, Places, Product
from stack_kernels.jit_cpu.numbers import BITS

__all__ = ["product_module"]

_TILE_COLUMNS = 128
_ROWS_OF_ONE_PASS = 12
_SMALL = 2**18
"""One thread finishes this many multiplications before another wakes up."""


def product_module(product: Product, processor: Processor) -> ir.Module:
    """Builds `@tiles`, `@is_small` and `@tile` of a product."""
    module = ir.Module(product.name)
    _write_tiles(module)
    _write_is_small(module)
    rows = _row_blocks(product, processor)
    vectors = _vectors(product, processor, rows[0])
    whole, rest = (
        _blocks(module, product, processor, rows, width, is_masked)
        for width, is_masked in ((vectors, False), (1, True))
    )
    _Tile(module, product, processor, vectors).write(whole, rest)
    return module


def _blocks(
    module: ir.Module, product: Product, processor: Processor, rows: dict[int, int], vectors: int, is_masked: bool
) -> dict[int, Any]:
    """Builds the function for each pass over a block of columns, by its first row."""

    @functools.cache
    def write(count: int, panel: Any) -> Any:
        return Block(module, product, processor, count, vectors, is_masked=is_masked, panel=panel).write()

    shared = len(rows) > 1
    return {first: write(count, ("read" if first else "written") if shared else None) for first, count in rows.items()}


def _row_blocks(product: Product, processor: Processor) -> dict[int, int]:
    """Returns the number of rows of each pass over a block of columns, by first row; their sums fit the registers."""
    is_narrow = product.x == "int8" or (product.x == "float32" and product.rows > _ROWS_OF_ONE_PASS)
    # AVX2 has 16 vector registers, AVX-512 has 32.
    most = 4 if processor.lanes == 8 else 6 if is_narrow else _ROWS_OF_ONE_PASS
    passes = -(-product.rows // most)
    each = -(-product.rows // passes)
    return {first: min(each, product.rows - first) for first in range(0, product.rows, each)}


def _vectors(product: Product, processor: Processor, rows: int) -> int:
    """Returns the vectors of columns per block: 256 bytes of w, if registers suffice for sums and operands."""
    if product.x == "int8":
        return 4
    sums = 8 if processor.lanes == 8 else 32 if product.x == "bfloat16" and product.rows <= 8 else 24
    most = min(2048 // BITS[product.weight] // processor.lanes, 8, sums // rows)
    # A power of two: full blocks then divide the columns of a tile.
    return max(1 << most.bit_length() - 1, 1 + (product.x == "bfloat16"))


def _write_tiles(module: ir.Module) -> None:
    builder = Builder(module, "tiles", [POINTER, POINTER], INDEX)
    _, (_, columns) = builder.buffer(builder.parameters[1], 0, 2)
    builder.close(builder.ceil_div(columns, _TILE_COLUMNS))


def _write_is_small(module: ir.Module) -> None:
    builder = Builder(module, "is_small", [POINTER, POINTER], INDEX)
    arguments, results = builder.parameters
    _, (rows, depth) = builder.buffer(arguments, 0, 2)
    _, (_, columns) = builder.buffer(results, 0, 2)
    builder.close(builder.at_most(builder.times(builder.times(rows, depth), columns), _SMALL))


class _Tile:
    """Builder of `@tile`: some columns of the product."""

    def __init__(self, module: ir.Module, product: Product, processor: Processor, vectors: int) -> None:
        self.builder = builder = Builder(module, "tile", TILE)
        self.product, self.lanes, self.width = product, processor.lanes, vectors * processor.lanes
        arguments, results, self.tile, _ = builder.parameters
        # Buffers that this product lacks stay null pointers, which blocks do not read.
        found: dict[str, Any] = dict.fromkeys(Places.__dataclass_fields__, ir.Constant(POINTER, None))
        # Without scales, all of k is one tile.
        found["tiles"] = INDEX(1)
        for number, (name, rank) in enumerate(product.buffers.items()):
            found[name], sizes = builder.buffer(arguments, number, rank)
            if name == "x":
                found["depth"] = sizes[1]
            elif name == "scale":
                found["tiles"] = sizes[0]
        found["y"], (_, found["columns"]) = builder.buffer(results, 0, 2)
        self.found = found

    def write(self, blocks: dict[int, Any], vectors: dict[int, Any]) -> None:
        """Writes the function, given the functions for full blocks and for single remaining vectors, by first row."""
        builder, lanes, width = self.builder, self.lanes, self.width
        if len(blocks) > 1:
            self.found["panel"] = builder.scratch(INT32, PANEL_STEPS * width)
        first = builder.times(self.tile, _TILE_COLUMNS)
        end = builder.min(builder.plus(first, _TILE_COLUMNS), self.found["columns"])
        after = builder.plus(first, builder.times(builder.over(builder.minus(end, first), width), width))
        with builder.loop(first, after, width) as column:
            self._multiply(column, blocks)
        # A loop runs only full steps, so its end is raised to include a partial vector.
        with builder.loop(after, builder.plus(end, lanes - 1), lanes) as column:
            self._multiply(column, vectors)
        builder.close()

    def _multiply(self, column: Any, blocks: dict[int, Any]) -> None:
        """Multiplies a block of columns with all rows, by consecutive parts of k."""
        builder, tiles = self.builder, self.found["tiles"]
        depth = builder.over(self.found["depth"], tiles)
        # Without a panel, the sums of a scale tile stay in registers.
        part = INDEX(PANEL_STEPS * self.product.step) if len(blocks) > 1 else depth
        with builder.loop(0, tiles) as tile:
            first = builder.times(tile, depth)
            end = builder.plus(first, depth)
            with builder.loop(0, builder.ceil_div(depth, part)) as number:
                start = builder.plus(first, builder.times(number, part))
                where = {"tile": tile, "start": start, "stop": builder.min(builder.plus(start, part), end)}
                # The first block fills the panel with decoded values of w; the blocks of further rows read the panel.
                for row, block in blocks.items():
                    builder.build.call(block, self._places(row, column, where))

    def _places(self, row: int, column: Any, where: dict[str, Any]) -> list[Any]:
        builder, product, found = self.builder, self.product, self.found
        in_y = builder.plus(builder.times(found["columns"], row), column)
        pointers = {
            "x": builder.at(found["x"], builder.times(found["depth"], row * 4 // product.step)),
            "w": builder.at(found["w"], builder.over(builder.times(column, BITS[product.weight]), 8)),
            "y": builder.at(found["y"], builder.times(in_y, 4)),
            "scale": builder.at(found["scale"], builder.times(column, 4)),
            "x_scale": builder.at(found["x_scale"], builder.times(found["tiles"], 4 * row)),
            "zero_point": builder.at(found["zero_point"], builder.times(column, 4)),
            "x_sum": builder.at(found["x_sum"], builder.times(found["tiles"], 4 * row)),
            "left": builder.minus(found["columns"], column),
        }
        return list((found | pointers | where).values())
