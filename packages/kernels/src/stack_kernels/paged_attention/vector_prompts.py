"""Attention of a prompt's tokens to pages in vectors of float32, in LLVM IR.

A number of a key or of a value meets a vector of all queries.
"""

from typing import Any, ClassVar

from stack_kernels.llvm import vectors
from stack_kernels.llvm.code import BYTE, FLOAT, INDEX, vector
from stack_kernels.paged_attention.llvm_call import TILE_QUERIES
from stack_kernels.paged_attention.llvm_prompts import LINE, SQUARE, PromptTile

__all__ = ["VectorPrompts"]

_KIND = vector(FLOAT, TILE_QUERIES)
_ENTRY = 4


class VectorPrompts(PromptTile):
    """For float32; O^T is transposed in the end."""

    dtype: ClassVar[str] = "float32"

    def open(self) -> None:
        """Q^T, a line for each entry; zero where there is no query."""
        code = self.code
        self.queries = code.scratch(BYTE, self.parts * SQUARE)
        rows = [self.query_row(row) for row in range(TILE_QUERIES)]
        nothing = vectors.constant(0, TILE_QUERIES)
        for part in range(self.parts):
            entries = [
                code.build.select(exists, code.load(_KIND, code.at(place, part * LINE)), nothing)
                for place, exists in rows
            ]
            for line, values in enumerate(vectors.transposed(code, entries)):
                code.store(values, code.at(self.queries, part * SQUARE + line * LINE))

    def score(self, sixteen: Any, key: Any) -> None:
        code = self.code
        place = self.slot(self.pools[0], key)
        rows = [code.at(place, code.times(self.slot_bytes, row)) for row in range(TILE_QUERIES)]
        nothing = vectors.constant(0, TILE_QUERIES)
        totals = [code.variable(_KIND, nothing) for _ in rows]
        for total in totals:
            total.set(nothing)
        with code.loop(0, self.attention.head_dim) as entry:
            queries = code.load(_KIND, code.at(self.queries, code.times(entry, LINE)))
            for row, total in zip(rows, totals, strict=True):
                number = code.load(FLOAT, code.at(row, code.times(entry, _ENTRY)))
                total.set(code.fma(code.splat(number, TILE_QUERIES), queries, total.get()))
        lines = code.at(self.scores, code.times(sixteen, SQUARE))
        for row, total in enumerate(totals):
            code.store(total.get(), code.at(lines, row * LINE))

    def add_values(self, start: Any, keys: Any, level: Any) -> None:
        code = self.code
        with code.loop(0, keys) as number:
            place = code.at(self.scores, code.times(number, LINE))
            code.store(self.weight(code.load(_KIND, place), level), place)
        decay = code.load(_KIND, self.decay)
        with code.loop(0, self.parts) as part:
            output = code.at(self.output, code.times(part, SQUARE))
            lines = [code.at(output, entry * LINE) for entry in range(TILE_QUERIES)]
            totals = [code.variable(_KIND, decay) for _ in lines]
            for total, line in zip(totals, lines, strict=True):
                total.set(code.build.fmul(code.load(_KIND, line), decay))
            with code.loop(0, code.over(keys, TILE_QUERIES)) as sixteen:
                key = code.plus(start, code.times(sixteen, TILE_QUERIES))
                held = code.least(code.plus(code.minus(self.final, key), 1), INDEX(TILE_QUERIES))
                values = code.at(self.slot(self.pools[1], key), code.times(part, TILE_QUERIES * _ENTRY))
                weights = code.at(self.scores, code.times(sixteen, SQUARE))
                with code.loop(0, held) as row:
                    weight = code.load(_KIND, code.at(weights, code.times(row, LINE)))
                    place = code.at(values, code.times(row, self.slot_bytes))
                    for entry, total in enumerate(totals):
                        number = code.load(FLOAT, code.at(place, entry * _ENTRY))
                        total.set(code.fma(code.splat(number, TILE_QUERIES), weight, total.get()))
            for total, line in zip(totals, lines, strict=True):
                code.store(total.get(), line)

    def close(self) -> None:
        code = self.code
        for part in range(self.parts):
            places = [code.at(self.output, part * SQUARE + line * LINE) for line in range(TILE_QUERIES)]
            columns = [code.load(_KIND, place) for place in places]
            for place, values in zip(places, vectors.transposed(code, columns), strict=True):
                code.store(values, place)
