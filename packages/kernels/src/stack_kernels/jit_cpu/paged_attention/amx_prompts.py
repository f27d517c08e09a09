"""Attention of a prompt's tokens to pages in AMX tiles, in LLVM IR.

Keys are rows of memory, which is the layout that tiles need. The weights are rounded to bf16 for their product with the
values, as in FlashAttention.
"""

from typing import Any, ClassVar

from llvmlite import ir

from stack_kernels.jit_cpu import vectors
from stack_kernels.jit_cpu.builder import BYTE, FLOAT, INDEX, INT32, SHORT, vector
from stack_kernels.jit_cpu.host import Processor
from stack_kernels.jit_cpu.paged_attention.call import PagedAttention
from stack_kernels.jit_cpu.paged_attention.prompts import BLOCK_KEYS, PromptTile
from stack_kernels.jit_cpu.tile_registers import TILE_BYTES, TILE_LINE, TILE_ROWS, TileRegisters

__all__ = ["TiledPrompts"]

_KEYS = 32  # entries per tile row
# The queries stay in registers 4 to 7 for all keys of a tile; both products use the other registers.
_SCORES, _OF_KEYS = 0, 1  # tile registers
_OUTPUT, _OF_WEIGHTS, _OF_VALUES = 0, 1, 2
_QUERIES = 4
_MAX_HEAD_DIM = _KEYS * 4


class TiledPrompts(PromptTile):
    """Prompt tiles in bf16."""

    dtype: ClassVar[str] = "bfloat16"

    @classmethod
    def supports(cls, attention: PagedAttention, processor: Processor) -> bool:
        fits = attention.head_dim % _KEYS == 0 and attention.head_dim <= _MAX_HEAD_DIM
        return processor.has_tiles and fits and super().supports(attention, processor)

    def open(self) -> None:
        builder = self.builder
        self.weights = builder.scratch(BYTE, BLOCK_KEYS // _KEYS * TILE_BYTES)
        self.values = builder.scratch(BYTE, BLOCK_KEYS // _KEYS * self.parts * TILE_BYTES)
        self.added = builder.scratch(BYTE, TILE_BYTES)
        self.registers = TileRegisters(builder)
        self.registers.configure(INDEX(TILE_ROWS), ())
        self._load_queries()

    def _load_queries(self) -> None:
        """Loads Q^T into its tile registers, two entries of a query adjacent; zero for missing queries."""
        builder = self.builder
        rows = [self.query_row(row) for row in range(TILE_ROWS)]
        nothing = ir.Constant(vector(INT32, TILE_ROWS), None)
        for number in range(self.attention.head_dim // _KEYS):
            pairs = []
            for place, exists in rows:
                pair = builder.load(nothing.type, builder.at(place, number * TILE_LINE))
                pairs.append(builder.build.select(exists, pair, nothing))
            for at, part in enumerate(vectors.transposed(builder, pairs)):
                builder.store(part, builder.at(self.added, at * TILE_LINE))
            self.registers.load(_QUERIES + number, self.added, INDEX(TILE_LINE))

    def score(self, sixteen: Any, key: Any) -> None:
        builder = self.builder
        place, stride = self.slot(self.pools[0], key), self.slot_bytes
        self.registers.clear(_SCORES)
        for number in range(self.attention.head_dim // _KEYS):
            self.registers.load(_OF_KEYS, builder.at(place, number * TILE_LINE), stride)
            self.registers.multiply(_SCORES, _OF_KEYS, _QUERIES + number)
        self.registers.store(_SCORES, builder.at(self.scores, builder.times(sixteen, TILE_BYTES)), INDEX(TILE_LINE))

    def add_values(self, start: Any, keys: Any, level: Any) -> None:
        builder = self.builder
        pairs, sixteens = builder.ceil_div(keys, _KEYS), builder.over(keys, TILE_ROWS)
        with builder.loop(0, pairs) as pair:
            self._pack_values(pair, builder.plus(start, builder.times(pair, _KEYS)))
            self._weigh(pair, sixteens, level)
        with builder.loop(0, self.parts) as part:
            self._add_part(part, pairs)

    def _pack_values(self, pair: Any, key: Any) -> None:
        """Packs V of 32 keys, the entries of two keys interleaved; zero for missing keys."""
        builder, wide = self.builder, vector(SHORT, _KEYS)
        for half in range(_KEYS // TILE_ROWS):
            first = builder.plus(key, half * TILE_ROWS)
            # If the second half is missing, the last 16 known keys are read instead, because its page may not exist.
            known = builder.min(first, builder.times(builder.over(self.final, TILE_ROWS), TILE_ROWS))
            base = self.slot(self.pools[1], known)
            with builder.loop(0, TILE_ROWS, 2) as row:
                line = builder.over(builder.plus(row, half * TILE_ROWS), 2)
                exists = [
                    builder.build.icmp_signed("<=", builder.plus(builder.plus(first, row), step), self.final)
                    for step in (0, 1)
                ]
                for number in range(self.attention.head_dim // _KEYS):
                    place = builder.at(base, builder.times(row, self.slot_bytes), number * TILE_LINE)
                    entries = [builder.load(wide, place), builder.load(wide, builder.at(place, self.slot_bytes))]
                    # Zero: slots beyond the last key may hold NaN, and 0 * NaN is NaN.
                    upper, lower = (
                        builder.build.select(is_key, entry, ir.Constant(wide, None))
                        for is_key, entry in zip(exists, entries, strict=True)
                    )
                    for part, values in enumerate(vectors.interleaved(builder, upper, lower, _KEYS)):
                        tile = builder.plus(builder.times(pair, self.parts), 2 * number + part)
                        place = builder.at(self.values, builder.times(tile, TILE_BYTES), builder.times(line, TILE_LINE))
                        builder.store(values, place)

    def _weigh(self, pair: Any, sixteens: Any, level: Any) -> None:
        """Computes P of 32 keys from their scores, as a tile; the second 16 keys may be missing."""
        builder, build = self.builder, self.builder.build
        nothing = vectors.constant(float("-inf"), TILE_ROWS)
        columns = []
        for row in range(0, _KEYS, 2):
            sixteen = builder.plus(builder.times(pair, _KEYS // TILE_ROWS), row // TILE_ROWS)
            exists = build.icmp_signed("<", sixteen, sixteens)
            weights = []
            for step in range(2):
                place = builder.at(self.scores, builder.times(pair, _KEYS * TILE_LINE), (row + step) * TILE_LINE)
                weights.append(self.weight(build.select(exists, builder.load(nothing.type, place), nothing), level))
            rounded = vectors.as_bfloat16(builder, *weights)
            # Each lane, a query, gets its weights of both keys; transposed, a query becomes a row of the tile.
            together = builder.shuffle(rounded, rounded, [lane + half for lane in range(TILE_ROWS) for half in (0, 16)])
            columns.append(build.bitcast(together, vector(INT32, TILE_ROWS)))
        place = builder.at(self.weights, builder.times(pair, TILE_BYTES))
        for row, part in enumerate(vectors.transposed(builder, columns)):
            builder.store(part, builder.at(place, row * TILE_LINE))

    def _add_part(self, part: Any, pairs: Any) -> None:
        """Adds to 16 entries of every query's output."""
        builder = self.builder
        self.registers.clear(_OUTPUT)
        with builder.loop(0, pairs) as pair:
            weights = builder.at(self.weights, builder.times(pair, TILE_BYTES))
            values = builder.at(
                self.values, builder.times(builder.plus(builder.times(pair, self.parts), part), TILE_BYTES)
            )
            self.registers.load(_OF_WEIGHTS, weights, INDEX(TILE_LINE))
            self.registers.load(_OF_VALUES, values, INDEX(TILE_LINE))
            self.registers.multiply(_OUTPUT, _OF_WEIGHTS, _OF_VALUES)
        # Tiles cannot be scaled: the product starts from zero, and vectors add it to the decayed output.
        self.registers.store(_OUTPUT, self.added, INDEX(TILE_LINE))
        kind = vector(FLOAT, TILE_ROWS)
        output = builder.at(self.output, builder.times(part, TILE_BYTES))
        for row in range(TILE_ROWS):
            place = builder.at(output, row * TILE_LINE)
            decay = builder.splat(builder.load(FLOAT, builder.at(self.decay, 4 * row)), TILE_ROWS)
            added = builder.load(kind, builder.at(self.added, row * TILE_LINE))
            builder.store(builder.fma(builder.load(kind, place), decay, added), place)

    def close(self) -> None:
        self.registers.release()
