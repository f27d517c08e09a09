"""Rows normalized in LLVM IR: a row is read from memory once, and stays in the first cache until it is written."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from stack_kernels.llvm.code import FLOAT, INDEX, POINTER, Code, vector
from stack_kernels.llvm.host import Processor
from stack_kernels.llvm.numbers import BITS, read, write
from stack_kernels.llvm.vectors import total

__all__ = ["RowNorm", "norm_module"]

_TILE_SIZE = 16384


@dataclass(frozen=True)
class RowNorm:
    """y = (h - m) / sqrt(v + epsilon) * scale + offset, of each row h = x + residual.

    The buffers are x[rows, size], the residual if there is one, float32[size] of the scale and the offset as far as
    there are, and epsilon, float32[1]; the results y and, with a residual, h, both of the dtype of x.

    Attributes:
      dtype: of x, one of `WRITTEN`.
      is_centred: m is the mean and v the variance; else m is 0 and v the mean square.
    """

    dtype: str
    is_centred: bool
    has_residual: bool
    has_scale: bool
    has_offset: bool

    @property
    def buffers(self) -> list[str]:
        wanted = {"x": True, "residual": self.has_residual, "scale": self.has_scale, "offset": self.has_offset}
        return [*(name for name, is_wanted in wanted.items() if is_wanted), "epsilon"]

    @property
    def name(self) -> str:
        return "_".join(["norm_layer" if self.is_centred else "norm_rms", self.dtype, *self.buffers[1:-1]])


def norm_module(norm: RowNorm, processor: Processor) -> ir.Module:
    """`@tiles` and `@tile`, which does some rows."""
    module = ir.Module(norm.name)
    code = Code(module, "tiles", [POINTER, POINTER], INDEX)
    _, (rows, size) = code.buffer(code.parameters[1], 0, 2)
    each = _tile_rows(code, size)
    code.close(code.over(code.plus(rows, code.minus(each, 1)), each))
    _Tile(module, norm, processor.lanes).write()
    return module


def _tile_rows(code: Code, size: Any) -> Any:
    return code.most(code.over(INDEX(_TILE_SIZE), size), INDEX(1))


class _Tile:
    """Writes `@tile`."""

    def __init__(self, module: ir.Module, norm: RowNorm, lanes: int) -> None:
        self.code = code = Code(module, "tile", [POINTER, POINTER, INDEX])
        self.norm, self.lanes = norm, lanes
        arguments, results, self.number = code.parameters
        self.buffers = {name: code.buffer(arguments, at, 0)[0] for at, name in enumerate(norm.buffers)}
        self.y, (self.rows, self.size) = code.buffer(results, 0, 2)
        self.summed = code.buffer(results, 1, 0)[0] if norm.has_residual else self.buffers["x"]

    def write(self) -> None:
        code = self.code
        each = _tile_rows(code, self.size)
        first = code.times(self.number, each)
        with code.loop(first, code.least(code.plus(first, each), self.rows)) as row:
            self._normalize(code.times(code.times(row, self.size), self._bytes))
        code.close()

    @property
    def _bytes(self) -> int:
        return BITS[self.norm.dtype] // 8

    def _normalize(self, start: Any) -> None:
        """The row that lies so many bytes from the beginning."""
        code, build = self.code, self.code.build
        size = build.sitofp(self.size, FLOAT)
        if self.norm.has_residual:
            self._each(lambda column, mask: self._add(start, column, mask))
        mean = None
        if self.norm.is_centred:
            mean = code.splat(build.fdiv(self._sum(start, build.fadd), size), self.lanes)
        squares = self._sum(start, lambda h, sums: code.fma(h, h, sums), mean)
        spread = build.fadd(build.fdiv(squares, size), code.load(FLOAT, self.buffers["epsilon"]))
        root = code.intrinsic("llvm.sqrt.f32", FLOAT, spread)
        factor = code.splat(build.fdiv(FLOAT(1.0), root), self.lanes)
        self._each(lambda column, mask: self._write(start, column, mask, mean, factor))

    def _each(self, body: Callable[[Any, Any], None]) -> None:
        """For the first column of each vector of a row; the last one may be masked."""
        code = self.code
        whole = code.times(code.over(self.size, self.lanes), self.lanes)
        with code.loop(0, whole, self.lanes) as column:
            body(column, None)
        rest = code.minus(self.size, whole)
        with code.when(code.build.icmp_signed(">", rest, INDEX(0))):
            body(whole, code.mask(rest, self.lanes))

    def _sum(self, start: Any, add: Callable[[Any, Any], Any], mean: Any = None) -> Any:
        """Of what `add` makes of h, less its mean, and the sums so far."""
        kind = vector(FLOAT, self.lanes)
        sums = self.code.variable(kind, ir.Constant(kind, None))
        sums.set(ir.Constant(kind, None))

        def add_vector(column: Any, mask: Any) -> None:
            sums.set(add(self._centred(start, column, mask, mean), sums.get()))

        self._each(add_vector)
        return total(self.code, sums.get())

    def _centred(self, start: Any, column: Any, mask: Any, mean: Any) -> Any:
        """h, less its mean if it has one; 0 where there is no column."""
        code = self.code
        h = read(code, self.norm.dtype, self._at(self.summed, start, column), self.lanes, mask, None)
        if mean is None:
            return h
        h = code.build.fsub(h, mean)
        return h if mask is None else code.build.select(mask, h, ir.Constant(h.type, None))

    def _add(self, start: Any, column: Any, mask: Any) -> None:
        places = [self._at(self.buffers[name], start, column) for name in ("x", "residual")]
        terms = [read(self.code, self.norm.dtype, place, self.lanes, mask, None) for place in places]
        write(self.code, self.norm.dtype, self.code.build.fadd(*terms), self._at(self.summed, start, column), mask)

    def _write(self, start: Any, column: Any, mask: Any, mean: Any, factor: Any) -> None:
        code, build = self.code, self.code.build
        y = build.fmul(self._centred(start, column, mask, mean), factor)
        for name, combine in (("scale", build.fmul), ("offset", build.fadd)):
            if name in self.buffers:
                place = code.at(self.buffers[name], code.times(column, 4))
                y = combine(y, read(code, "float32", place, self.lanes, mask, None))
        write(code, self.norm.dtype, y, self._at(self.y, start, column), mask)

    def _at(self, pointer: Any, start: Any, column: Any) -> Any:
        return self.code.at(pointer, start, self.code.times(column, self._bytes))
