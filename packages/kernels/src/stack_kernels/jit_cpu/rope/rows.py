"""Rotation of heads in LLVM IR."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from llvmlite import ir

from stack_kernels.jit_cpu.builder import INDEX, POINTER, TILE, Builder
from stack_kernels.jit_cpu.host import Processor
from stack_kernels.jit_cpu.numbers import BITS, read, write

__all__ = ["Turn", "turn_module"]

_TILE_SIZE = 16384


@dataclass(frozen=True)
class Turn:
    """Rotation of the pairs (i, i + r/2) of the first r features of every head; other features are copied.

    The buffers are x[tokens, heads, head_dim] and float32[tokens, r/2] of cosines and of sines; the result is shaped
    like x.

    Attributes:
      dtype: dtype of x, one of `WRITTEN`.
    """

    dtype: str

    @property
    def name(self) -> str:
        return f"rope_{self.dtype}"


def turn_module(turn: Turn, processor: Processor) -> ir.Module:
    """Builds `@tiles` and `@tile`, which processes some tokens."""
    module = ir.Module(turn.name)
    builder = Builder(module, "tiles", [POINTER, POINTER], INDEX)
    _, (tokens, heads, head_dim) = builder.buffer(builder.parameters[1], 0, 3)
    each = _tile_tokens(builder, heads, head_dim)
    builder.close(builder.over(builder.plus(tokens, builder.minus(each, 1)), each))
    _Tile(module, turn, processor.lanes).write()
    return module


def _tile_tokens(builder: Builder, heads: Any, head_dim: Any) -> Any:
    # One token at least, even if its heads have more numbers than a tile should.
    return builder.max(builder.over(INDEX(_TILE_SIZE), builder.times(heads, head_dim)), INDEX(1))


class _Tile:
    """Builder of `@tile`."""

    def __init__(self, module: ir.Module, turn: Turn, lanes: int) -> None:
        self.builder = builder = Builder(module, "tile", TILE)
        self.dtype, self.lanes = turn.dtype, lanes
        arguments, results, self.number, _ = builder.parameters
        self.x, (self.tokens, self.heads, self.head_dim) = builder.buffer(arguments, 0, 3)
        # From the table, because `rotary_dim` may be less than the size of a head.
        self.cosine, (_, self.half) = builder.buffer(arguments, 1, 2)
        self.sine, _ = builder.buffer(arguments, 2, 0)
        self.y, _ = builder.buffer(results, 0, 0)

    def write(self) -> None:
        builder = self.builder
        each = _tile_tokens(builder, self.heads, self.head_dim)
        first = builder.times(self.number, each)
        turned = builder.plus(self.half, self.half)
        stop = builder.min(builder.plus(first, each), self.tokens)
        # Heads inside: all heads of a token read the same row of the tables, which stays in the L1 cache.
        with builder.loop(first, stop) as token, builder.loop(0, self.heads) as head:
            start = builder.times(builder.plus(builder.times(token, self.heads), head), self.head_dim)
            of_token = builder.times(token, self.half)
            builder.each_vector(INDEX(0), self.half, self.lanes, partial(self._turn, start, of_token))
            builder.each_vector(turned, self.head_dim, self.lanes, partial(self._copy, start))
        builder.close()

    def _turn(self, start: Any, of_token: Any, column: Any, mask: Any) -> None:
        builder, build = self.builder, self.builder.build
        places = [builder.plus(start, column), builder.plus(builder.plus(start, column), self.half)]
        first, second = (self._read(self.x, self.dtype, at, mask) for at in places)
        angle = builder.plus(of_token, column)
        cosine, sine = (self._read(table, "float32", angle, mask) for table in (self.cosine, self.sine))
        turned = (
            builder.fma(first, cosine, build.fneg(build.fmul(second, sine))),
            builder.fma(second, cosine, build.fmul(first, sine)),
        )
        for values, at in zip(turned, places, strict=True):
            write(builder, self.dtype, values, self._place(self.y, at), mask)

    def _copy(self, start: Any, column: Any, mask: Any) -> None:
        at = self.builder.plus(start, column)
        write(self.builder, self.dtype, self._read(self.x, self.dtype, at, mask), self._place(self.y, at), mask)

    def _read(self, pointer: Any, dtype: str, at: Any, mask: Any) -> Any:
        place = self.builder.at(pointer, self.builder.times(at, BITS[dtype] // 8))
        return read(self.builder, dtype, place, self.lanes, mask, None)

    def _place(self, pointer: Any, at: Any) -> Any:
        return self.builder.at(pointer, self.builder.times(at, BITS[self.dtype] // 8))
