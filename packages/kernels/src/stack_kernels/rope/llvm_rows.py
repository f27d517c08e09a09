"""Heads turned in LLVM IR."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from stack_kernels.llvm.code import INDEX, POINTER, Code
from stack_kernels.llvm.host import Processor
from stack_kernels.llvm.numbers import BITS, read, write

__all__ = ["Turn", "turn_module"]

_TILE_SIZE = 16384


@dataclass(frozen=True)
class Turn:
    """The pairs (i, i + r/2) of the first r features of every head turned, the rest as it is.

    The buffers are x[tokens, heads, head_dim] and float32[tokens, r/2] of cosines and of sines; the result is like x.

    Attributes:
      dtype: of x, one of `WRITTEN`.
    """

    dtype: str

    @property
    def name(self) -> str:
        return f"rope_{self.dtype}"


def turn_module(turn: Turn, processor: Processor) -> ir.Module:
    """`@tiles` and `@tile`, which does some tokens."""
    module = ir.Module(turn.name)
    code = Code(module, "tiles", [POINTER, POINTER], INDEX)
    _, (tokens, heads, head_dim) = code.buffer(code.parameters[1], 0, 3)
    each = _tile_tokens(code, heads, head_dim)
    code.close(code.over(code.plus(tokens, code.minus(each, 1)), each))
    _Tile(module, turn, processor.lanes).write()
    return module


def _tile_tokens(code: Code, heads: Any, head_dim: Any) -> Any:
    return code.most(code.over(INDEX(_TILE_SIZE), code.times(heads, head_dim)), INDEX(1))


class _Tile:
    """Writes `@tile`."""

    def __init__(self, module: ir.Module, turn: Turn, lanes: int) -> None:
        self.code = code = Code(module, "tile", [POINTER, POINTER, INDEX])
        self.dtype, self.lanes = turn.dtype, lanes
        arguments, results, self.number = code.parameters
        self.x, (self.tokens, self.heads, self.head_dim) = code.buffer(arguments, 0, 3)
        self.cosine, (_, self.half) = code.buffer(arguments, 1, 2)
        self.sine, _ = code.buffer(arguments, 2, 0)
        self.y, _ = code.buffer(results, 0, 0)

    def write(self) -> None:
        code = self.code
        each = _tile_tokens(code, self.heads, self.head_dim)
        first = code.times(self.number, each)
        turned = code.plus(self.half, self.half)
        stop = code.least(code.plus(first, each), self.tokens)
        with code.loop(first, stop) as token, code.loop(0, self.heads) as head:
            start = code.times(code.plus(code.times(token, self.heads), head), self.head_dim)
            for column, mask in self._vectors(INDEX(0), self.half):
                self._turn(start, code.times(token, self.half), column, mask)
            for column, mask in self._vectors(turned, self.head_dim):
                at = code.plus(start, column)
                write(code, self.dtype, self._read(self.x, self.dtype, at, mask), self._place(self.y, at), mask)
        code.close()

    def _vectors(self, start: Any, stop: Any) -> Iterator[tuple[Any, Any]]:
        """The body of a loop over vectors of columns: their first, and which of them there are."""
        with self.code.loop(start, self.code.plus(stop, self.lanes - 1), self.lanes) as column:
            yield column, self.code.mask(self.code.minus(stop, column), self.lanes)

    def _turn(self, start: Any, of_token: Any, column: Any, mask: Any) -> None:
        code, build = self.code, self.code.build
        places = [code.plus(start, column), code.plus(code.plus(start, column), self.half)]
        first, second = (self._read(self.x, self.dtype, at, mask) for at in places)
        angle = code.plus(of_token, column)
        cosine, sine = (self._read(table, "float32", angle, mask) for table in (self.cosine, self.sine))
        turned = (
            code.fma(first, cosine, build.fneg(build.fmul(second, sine))),
            code.fma(second, cosine, build.fmul(first, sine)),
        )
        for values, at in zip(turned, places, strict=True):
            write(code, self.dtype, values, self._place(self.y, at), mask)

    def _read(self, pointer: Any, dtype: str, at: Any, mask: Any) -> Any:
        place = self.code.at(pointer, self.code.times(at, BITS[dtype] // 8))
        return read(self.code, dtype, place, self.lanes, mask, None)

    def _place(self, pointer: Any, at: Any) -> Any:
        return self.code.at(pointer, self.code.times(at, BITS[self.dtype] // 8))
