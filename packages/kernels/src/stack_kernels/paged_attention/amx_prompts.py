"""Attention of a prompt's tokens to pages in AMX tiles, in LLVM IR.

Keys are rows of memory, as tiles want them. The weights are rounded to bf16 for their product with the values, as in
FlashAttention.
"""

from typing import Any, ClassVar

from llvmlite import ir

from stack_kernels.llvm import vectors
from stack_kernels.llvm.code import BYTE, FLOAT, INDEX, INT32, SHORT, vector
from stack_kernels.llvm.host import Processor
from stack_kernels.llvm.tile_registers import TILE_BYTES, TILE_LINE, TILE_ROWS, TileRegisters
from stack_kernels.paged_attention.llvm_call import PagedAttention
from stack_kernels.paged_attention.llvm_prompts import BLOCK_KEYS, PromptTile

__all__ = ["TiledPrompts"]

_KEYS = 32  # the entries of a tile's row
_SCORES, _OF_KEYS = 0, 1  # tile registers
_OUTPUT, _OF_WEIGHTS, _OF_VALUES = 0, 1, 2
_QUERIES = 4
_MOST_HEAD_DIM = _KEYS * 4


class TiledPrompts(PromptTile):
    """For bf16."""

    dtype: ClassVar[str] = "bfloat16"

    @classmethod
    def supports(cls, attention: PagedAttention, processor: Processor) -> bool:
        fits = attention.head_dim % _KEYS == 0 and attention.head_dim <= _MOST_HEAD_DIM
        return processor.has_tiles and fits and super().supports(attention, processor)

    def open(self) -> None:
        code = self.code
        self.weights = code.scratch(BYTE, BLOCK_KEYS // _KEYS * TILE_BYTES)
        self.values = code.scratch(BYTE, BLOCK_KEYS // _KEYS * self.parts * TILE_BYTES)
        self.added = code.scratch(BYTE, TILE_BYTES)
        self.registers = TileRegisters(code)
        self.registers.configure(INDEX(TILE_ROWS), ())
        self._load_queries()

    def _load_queries(self) -> None:
        """Q^T, two entries of a query beside each other, into its tile registers; zero where there is no query."""
        code = self.code
        rows = [self.query_row(row) for row in range(TILE_ROWS)]
        nothing = ir.Constant(vector(INT32, TILE_ROWS), None)
        for number in range(self.attention.head_dim // _KEYS):
            pairs = []
            for place, exists in rows:
                pair = code.load(nothing.type, code.at(place, number * TILE_LINE))
                pairs.append(code.build.select(exists, pair, nothing))
            for at, part in enumerate(vectors.transposed(code, pairs)):
                code.store(part, code.at(self.added, at * TILE_LINE))
            self.registers.load(_QUERIES + number, self.added, INDEX(TILE_LINE))

    def score(self, sixteen: Any, key: Any) -> None:
        code = self.code
        place, stride = self.slot(self.pools[0], key), self.slot_bytes
        self.registers.clear(_SCORES)
        for number in range(self.attention.head_dim // _KEYS):
            self.registers.load(_OF_KEYS, code.at(place, number * TILE_LINE), stride)
            self.registers.multiply(_SCORES, _OF_KEYS, _QUERIES + number)
        self.registers.store(_SCORES, code.at(self.scores, code.times(sixteen, TILE_BYTES)), INDEX(TILE_LINE))

    def add_values(self, start: Any, keys: Any, level: Any) -> None:
        code = self.code
        pairs, sixteens = code.quotient_up(keys, _KEYS), code.over(keys, TILE_ROWS)
        with code.loop(0, pairs) as pair:
            self._pack_values(pair, code.plus(start, code.times(pair, _KEYS)))
            self._weigh(pair, sixteens, level)
        with code.loop(0, self.parts) as part:
            self._add_part(part, pairs)

    def _pack_values(self, pair: Any, key: Any) -> None:
        """V of 32 keys, the entries of two keys beside each other; zero where there is no key."""
        code, wide = self.code, vector(SHORT, _KEYS)
        for half in range(_KEYS // TILE_ROWS):
            first = code.plus(key, half * TILE_ROWS)
            known = code.least(first, code.times(code.over(self.final, TILE_ROWS), TILE_ROWS))
            base = self.slot(self.pools[1], known)
            with code.loop(0, TILE_ROWS, 2) as row:
                line = code.over(code.plus(row, half * TILE_ROWS), 2)
                exists = [
                    code.build.icmp_signed("<=", code.plus(code.plus(first, row), step), self.final) for step in (0, 1)
                ]
                for number in range(self.attention.head_dim // _KEYS):
                    place = code.at(base, code.times(row, self.slot_bytes), number * TILE_LINE)
                    entries = [code.load(wide, place), code.load(wide, code.at(place, self.slot_bytes))]
                    upper, lower = (
                        code.build.select(is_key, entry, ir.Constant(wide, None))
                        for is_key, entry in zip(exists, entries, strict=True)
                    )
                    for part, values in enumerate(vectors.interleaved(code, upper, lower, _KEYS)):
                        tile = code.plus(code.times(pair, self.parts), 2 * number + part)
                        place = code.at(self.values, code.times(tile, TILE_BYTES), code.times(line, TILE_LINE))
                        code.store(values, place)

    def _weigh(self, pair: Any, sixteens: Any, level: Any) -> None:
        """P of 32 keys from their scores, as a tile; the second 16 may not exist."""
        code, build = self.code, self.code.build
        nothing = vectors.constant(float("-inf"), TILE_ROWS)
        columns = []
        for row in range(0, _KEYS, 2):
            sixteen = code.plus(code.times(pair, _KEYS // TILE_ROWS), row // TILE_ROWS)
            exists = build.icmp_signed("<", sixteen, sixteens)
            weights = []
            for step in range(2):
                place = code.at(self.scores, code.times(pair, _KEYS * TILE_LINE), (row + step) * TILE_LINE)
                weights.append(self.weight(build.select(exists, code.load(nothing.type, place), nothing), level))
            rounded = vectors.as_bfloat16(code, *weights)
            together = code.shuffle(rounded, rounded, [lane + half for lane in range(TILE_ROWS) for half in (0, 16)])
            columns.append(build.bitcast(together, vector(INT32, TILE_ROWS)))
        place = code.at(self.weights, code.times(pair, TILE_BYTES))
        for row, part in enumerate(vectors.transposed(code, columns)):
            code.store(part, code.at(place, row * TILE_LINE))

    def _add_part(self, part: Any, pairs: Any) -> None:
        """16 entries of every query's output."""
        code = self.code
        self.registers.clear(_OUTPUT)
        with code.loop(0, pairs) as pair:
            weights = code.at(self.weights, code.times(pair, TILE_BYTES))
            values = code.at(self.values, code.times(code.plus(code.times(pair, self.parts), part), TILE_BYTES))
            self.registers.load(_OF_WEIGHTS, weights, INDEX(TILE_LINE))
            self.registers.load(_OF_VALUES, values, INDEX(TILE_LINE))
            self.registers.multiply(_OUTPUT, _OF_WEIGHTS, _OF_VALUES)
        self.registers.store(_OUTPUT, self.added, INDEX(TILE_LINE))
        kind = vector(FLOAT, TILE_ROWS)
        output = code.at(self.output, code.times(part, TILE_BYTES))
        for row in range(TILE_ROWS):
            place = code.at(output, row * TILE_LINE)
            decay = code.splat(code.load(FLOAT, code.at(self.decay, 4 * row)), TILE_ROWS)
            added = code.load(kind, code.at(self.added, row * TILE_LINE))
            code.store(code.fma(code.load(kind, place), decay, added), place)

    def close(self) -> None:
        self.registers.release()
