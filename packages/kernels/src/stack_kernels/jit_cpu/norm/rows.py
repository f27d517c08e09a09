"""Normalization of rows in LLVM IR: a row is read from memory once and stays in the L1 cache until it is written."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from stack_kernels.jit_cpu.builder import FLOAT, INDEX, POINTER, TILE, Builder, vector
from stack_kernels.jit_cpu.host import Processor
from stack_kernels.jit_cpu.numbers import BITS, read, write
from stack_kernels.jit_cpu.vectors import total

__all__ = ["RowNorm", "RowTile", "norm_module"]

_TILE_SIZE = 16384


@dataclass(frozen=True)
class RowNorm:
    """y = (h - m) / sqrt(v + epsilon) * scale + offset, for each row h = x + residual.

    The buffers are x[rows, size]; the residual, if present; the scale and the offset, float32[size], if present; and
    epsilon, float32[1]. The results are y and, with a residual, h, both in the dtype of x.

    Attributes:
      dtype: dtype of x, one of `WRITTEN`.
      is_centred: True if m is the mean and v the variance; False if m is 0 and v the mean square.
      has_residual: True if a residual is added.
      has_scale: True if there is a scale.
      has_offset: True if there is an offset.
    """

    dtype: str
    is_centred: bool
    has_residual: bool
    has_scale: bool
    has_offset: bool

    @property
    def buffers(self) -> list[str]:
        is_used = {"x": True, "residual": self.has_residual, "scale": self.has_scale, "offset": self.has_offset}
        return [*(name for name, used in is_used.items() if used), "epsilon"]

    @property
    def name(self) -> str:
        return "_".join(["norm_layer" if self.is_centred else "norm_rms", self.dtype, *self.buffers[1:-1]])


def norm_module(norm: RowNorm, processor: Processor) -> ir.Module:
    """Builds `@tiles` and `@tile`, which processes some rows."""
    module = ir.Module(norm.name)
    builder = Builder(module, "tiles", [POINTER, POINTER], INDEX)
    _, (rows, size) = builder.buffer(builder.parameters[1], 0, 2)
    each = _tile_rows(builder, size)
    builder.close(builder.over(builder.plus(rows, builder.minus(each, 1)), each))
    _Forward(module, norm, processor.lanes)
    return module


def _tile_rows(builder: Builder, size: Any) -> Any:
    return builder.max(builder.over(INDEX(_TILE_SIZE), size), INDEX(1))


class RowTile:
    """Builder of `@tile`, which processes some rows h in order.

    Args:
      module: module to add the function to.
      norm: the normalization.
      lanes: lanes of a vector.
      arguments: names of the buffers, including "epsilon".
    """

    def __init__(self, module: ir.Module, norm: RowNorm, lanes: int, arguments: list[str]) -> None:
        self.builder = builder = Builder(module, "tile", TILE)
        self.norm, self.lanes = norm, lanes
        buffers, self.results, self.number, _ = builder.parameters
        self.buffers = {name: builder.buffer(buffers, at, 0)[0] for at, name in enumerate(arguments)}
        self.y, (self.rows, self.size) = builder.buffer(self.results, 0, 2)
        # Set by subclasses: the rows are an argument, or a result that was written before.
        self.h: Any = None

    def write_rows(self, each: Any, do_row: Callable[[Any], None]) -> None:
        """Loops over the rows of this tile, `each` per tile; `do_row` takes the byte offset of a row."""
        builder = self.builder
        first = builder.times(self.number, each)
        with builder.loop(first, builder.min(builder.plus(first, each), self.rows)) as row:
            do_row(builder.times(builder.times(row, self.size), BITS[self.norm.dtype] // 8))
        builder.close()

    def each(self, body: Callable[[Any, Any], None]) -> None:
        """Calls `body` for the first column of each vector of a row; the last vector may be masked."""
        self.builder.each_vector(INDEX(0), self.size, self.lanes, body)

    def sums(self, count: int, add: Callable[..., list[Any]]) -> list[Any]:
        """Computes sums over a row; `add` takes a column, a mask and the current sums, and returns the new sums."""
        zero = ir.Constant(vector(FLOAT, self.lanes), None)
        found = [self.builder.variable(zero.type, zero) for _ in range(count)]

        def add_vector(column: Any, mask: Any) -> None:
            for variable, value in zip(found, add(column, mask, *(sums.get() for sums in found)), strict=True):
                variable.set(value)

        self.each(add_vector)
        return [total(self.builder, sums.get()) for sums in found]

    def mean(self, start: Any) -> Any:
        """Returns the mean in every lane; None if rows are not centred."""
        if not self.norm.is_centred:
            return None
        build = self.builder.build
        (row_sum,) = self.sums(
            1, lambda column, mask, sums: [build.fadd(self.centred(start, column, mask, None), sums)]
        )
        return self.builder.splat(self.per_column(row_sum), self.lanes)

    def factor(self, squares: Any) -> Any:
        """Computes 1 / sqrt(v + epsilon) from the sum of the squares."""
        build = self.builder.build
        spread = build.fadd(self.per_column(squares), self.builder.load(FLOAT, self.buffers["epsilon"]))
        return build.fdiv(FLOAT(1.0), self.builder.intrinsic("llvm.sqrt.f32", FLOAT, spread))

    def per_column(self, total: Any) -> Any:
        return self.builder.build.fdiv(total, self.builder.build.sitofp(self.size, FLOAT))

    def centred(self, start: Any, column: Any, mask: Any, mean: Any) -> Any:
        """Returns h minus its mean, if centred; 0 in missing columns."""
        builder = self.builder
        h = self.read(self.h, start, column, mask)
        if mean is None:
            return h
        h = builder.build.fsub(h, mean)
        # Missing columns are read as 0, from which the mean is subtracted too.
        return h if mask is None else builder.build.select(mask, h, ir.Constant(h.type, None))

    def read(self, rows: Any, start: Any, column: Any, mask: Any) -> Any:
        return read(self.builder, self.norm.dtype, self._at(rows, start, column), self.lanes, mask, None)

    def write(self, value: Any, rows: Any, start: Any, column: Any, mask: Any) -> None:
        write(self.builder, self.norm.dtype, value, self._at(rows, start, column), mask)

    def of_column(self, name: str, column: Any, mask: Any) -> Any:
        """Reads from a buffer with one float32 per column."""
        place = self.builder.at(self.buffers[name], self.builder.times(column, 4))
        return read(self.builder, "float32", place, self.lanes, mask, None)

    def _at(self, rows: Any, start: Any, column: Any) -> Any:
        return self.builder.at(rows, start, self.builder.times(column, BITS[self.norm.dtype] // 8))


class _Forward(RowTile):
    def __init__(self, module: ir.Module, norm: RowNorm, lanes: int) -> None:
        super().__init__(module, norm, lanes, norm.buffers)
        # With a residual, h is written first and read back: y is the norm of h as returned, rounded to its dtype.
        self.h = self.builder.buffer(self.results, 1, 0)[0] if norm.has_residual else self.buffers["x"]
        self.write_rows(_tile_rows(self.builder, self.size), self._normalize)

    def _normalize(self, start: Any) -> None:
        builder = self.builder
        if self.norm.has_residual:
            self.each(lambda column, mask: self._add(start, column, mask))
        # First the mean, then the squares of centred numbers: the difference of two large means would lose digits.
        mean = self.mean(start)

        def add_square(column: Any, mask: Any, sums: Any) -> list[Any]:
            h = self.centred(start, column, mask, mean)
            return [builder.fma(h, h, sums)]

        factor = builder.splat(self.factor(*self.sums(1, add_square)), self.lanes)
        self.each(lambda column, mask: self._write(start, column, mask, mean, factor))

    def _add(self, start: Any, column: Any, mask: Any) -> None:
        terms = [self.read(self.buffers[name], start, column, mask) for name in ("x", "residual")]
        self.write(self.builder.build.fadd(*terms), self.h, start, column, mask)

    def _write(self, start: Any, column: Any, mask: Any, mean: Any, factor: Any) -> None:
        build = self.builder.build
        y = build.fmul(self.centred(start, column, mask, mean), factor)
        for name, combine in (("scale", build.fmul), ("offset", build.fadd)):
            if name in self.buffers:
                y = combine(y, self.of_column(name, column, mask))
        self.write(y, self.y, start, column, mask)
