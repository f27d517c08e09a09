"""Attention of a prompt's tokens to pages in vectors of float32, in LLVM IR.

Each number of a key or a value is multiplied with a vector over all queries.
"""

from typing import Any, ClassVar

from stack_kernels.jit_cpu import vectors
from stack_kernels.jit_cpu.builder import BYTE, FLOAT, INDEX, vector
from stack_kernels.jit_cpu.paged_attention.call import TILE_QUERIES
from stack_kernels.jit_cpu.paged_attention.prompts import LINE, SQUARE, PromptTile

__all__ = ["VectorPrompts"]

_KIND = vector(FLOAT, TILE_QUERIES)
_ENTRY = 4


class VectorPrompts(PromptTile):
    """Prompt tiles in float32; O^T is transposed at the end."""

    dtype: ClassVar[str] = "float32"

    def open(self) -> None:
        """Stores Q^T, one line per entry; zero for missing queries."""
        builder = self.builder
        self.queries = builder.scratch(BYTE, self.parts * SQUARE)
        rows = [self.query_row(row) for row in range(TILE_QUERIES)]
        nothing = vectors.constant(0, TILE_QUERIES)
        for part in range(self.parts):
            entries = [
                builder.build.select(exists, builder.load(_KIND, builder.at(place, part * LINE)), nothing)
                for place, exists in rows
            ]
            for line, values in enumerate(vectors.transposed(builder, entries)):
                builder.store(values, builder.at(self.queries, part * SQUARE + line * LINE))

    def score(self, sixteen: Any, key: Any) -> None:
        builder = self.builder
        place = self.slot(self.pools[0], key)
        rows = [builder.at(place, builder.times(self.slot_bytes, row)) for row in range(TILE_QUERIES)]
        nothing = vectors.constant(0, TILE_QUERIES)
        totals = [builder.variable(_KIND, nothing) for _ in rows]
        for total in totals:
            total.set(nothing)
        with builder.loop(0, self.attention.head_dim) as entry:
            queries = builder.load(_KIND, builder.at(self.queries, builder.times(entry, LINE)))
            for row, total in zip(rows, totals, strict=True):
                number = builder.load(FLOAT, builder.at(row, builder.times(entry, _ENTRY)))
                total.set(builder.fma(builder.splat(number, TILE_QUERIES), queries, total.get()))
        lines = builder.at(self.scores, builder.times(sixteen, SQUARE))
        for row, total in enumerate(totals):
            builder.store(total.get(), builder.at(lines, row * LINE))

    def add_values(self, start: Any, keys: Any, level: Any) -> None:
        builder = self.builder
        with builder.loop(0, keys) as number:
            place = builder.at(self.scores, builder.times(number, LINE))
            # The weights replace the scores, which nothing reads again.
            builder.store(self.weight(builder.load(_KIND, place), level), place)
        decay = builder.load(_KIND, self.decay)
        with builder.loop(0, self.parts) as part:
            output = builder.at(self.output, builder.times(part, SQUARE))
            lines = [builder.at(output, entry * LINE) for entry in range(TILE_QUERIES)]
            totals = [builder.variable(_KIND, decay) for _ in lines]
            for total, line in zip(totals, lines, strict=True):
                total.set(builder.build.fmul(builder.load(_KIND, line), decay))
            with builder.loop(0, builder.over(keys, TILE_QUERIES)) as sixteen:
                key = builder.plus(start, builder.times(sixteen, TILE_QUERIES))
                held = builder.min(builder.plus(builder.minus(self.final, key), 1), INDEX(TILE_QUERIES))
                values = builder.at(self.slot(self.pools[1], key), builder.times(part, TILE_QUERIES * _ENTRY))
                weights = builder.at(self.scores, builder.times(sixteen, SQUARE))
                # Values of missing keys are not read: they may be NaN, which the weight 0 would not remove.
                with builder.loop(0, held) as row:
                    weight = builder.load(_KIND, builder.at(weights, builder.times(row, LINE)))
                    place = builder.at(values, builder.times(row, self.slot_bytes))
                    for entry, total in enumerate(totals):
                        number = builder.load(FLOAT, builder.at(place, entry * _ENTRY))
                        total.set(builder.fma(builder.splat(number, TILE_QUERIES), weight, total.get()))
            for total, line in zip(totals, lines, strict=True):
                builder.store(total.get(), line)

    def close(self) -> None:
        builder = self.builder
        for part in range(self.parts):
            places = [builder.at(self.output, part * SQUARE + line * LINE) for line in range(TILE_QUERIES)]
            columns = [builder.load(_KIND, place) for place in places]
            for place, values in zip(places, vectors.transposed(builder, columns), strict=True):
                builder.store(values, place)
