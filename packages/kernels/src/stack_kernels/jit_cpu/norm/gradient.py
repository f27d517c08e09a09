"""The gradient of normalized rows, in LLVM IR, in two passes over a row, or three if it is centred.

With r = 1 / sqrt(v + epsilon), n = (h - m) r, the scale s, the cotangent c of y, and the cotangent d of the sum h:

    dh = r (c s - n mean(c s n) - mean(c s)) + d        ds = sum over rows of c n        do = sum over rows of c

The second mean appears if rows are centred, and d with a residual.
"""

from typing import Any

from llvmlite import ir

from stack_kernels.jit_cpu.builder import FLOAT, INDEX, POINTER, Builder, vector
from stack_kernels.jit_cpu.host import Processor
from stack_kernels.jit_cpu.norm.rows import RowNorm, RowTile

__all__ = ["column_gradients", "gradient_module", "gradient_name", "parts"]

_PART_SIZE, _MAX_PARTS = 2**15, 32
"""Each part sums over its rows; there are few parts, because one thread adds them."""


def gradient_name(norm: RowNorm) -> str:
    """Returns a unique name of the kernel."""
    return f"{norm.name}_gradient"


def column_gradients(norm: RowNorm) -> list[str]:
    """Lists the arrays that have a gradient per column."""
    return [name for name in ("scale", "offset") if name in norm.buffers]


def parts(rows: int, size: int) -> int:
    """Returns the number of parts of the rows, each of which sums over its rows."""
    each = -(-rows // max(1, min(rows * size // _PART_SIZE, _MAX_PARTS)))
    return -(-rows // each)


def gradient_module(norm: RowNorm, processor: Processor) -> ir.Module:
    """Builds `@tiles`, `@tile`, which processes a part of the rows, and `@finish`, which adds the sums of the parts.

    The buffers are h and c, [rows, size]; d with a residual; the scale, float32[size], if present; and epsilon,
    float32[1]. The results are dh; then, for each of `column_gradients`, float32[size] and the sums of the parts,
    float32[parts, size].
    """
    module = ir.Module(gradient_name(norm))
    builder = Builder(module, "tiles", [POINTER, POINTER], INDEX)
    _, (rows, size) = builder.buffer(builder.parameters[1], 0, 2)
    builder.close(builder.ceil_div(rows, _part_rows(builder, rows, size)))
    _Gradient(module, norm, processor.lanes)
    _write_finish(module, norm, processor.lanes)
    return module


def _part_rows(builder: Builder, rows: Any, size: Any) -> Any:
    # As in `parts`, from which the shape of the sums comes.
    count = builder.min(builder.over(builder.times(rows, size), _PART_SIZE), INDEX(_MAX_PARTS))
    return builder.ceil_div(rows, builder.max(count, INDEX(1)))


def _write_finish(module: ir.Module, norm: RowNorm, lanes: int) -> None:
    builder, kind = Builder(module, "finish", [POINTER, POINTER]), vector(FLOAT, lanes)
    for number in range(len(column_gradients(norm))):
        gradient, (size,) = builder.buffer(builder.parameters[1], 1 + 2 * number, 1)
        sums, (count, _) = builder.buffer(builder.parameters[1], 2 + 2 * number, 2)
        with builder.loop(0, builder.plus(size, lanes - 1), lanes) as column:
            mask = builder.mask(builder.minus(size, column), lanes)
            total = builder.variable(kind, ir.Constant(kind, None))
            with builder.loop(0, count) as part:
                place = builder.at(sums, builder.times(builder.plus(builder.times(part, size), column), 4))
                total.set(builder.build.fadd(total.get(), builder.masked_load(kind, place, mask)))
            builder.masked_store(total.get(), builder.at(gradient, builder.times(column, 4)), mask)
    builder.close()


class _Gradient(RowTile):
    def __init__(self, module: ir.Module, norm: RowNorm, lanes: int) -> None:
        is_used = {"h": True, "cotangent": True, "of_sum": norm.has_residual, "scale": norm.has_scale, "epsilon": True}
        super().__init__(module, norm, lanes, [name for name, used in is_used.items() if used])
        builder, self.h = self.builder, self.buffers["h"]
        row_bytes = builder.times(self.size, 4)
        self.of_part: dict[str, Any] = {}
        for number, name in enumerate(column_gradients(norm)):
            sums, _ = builder.buffer(self.results, 2 + 2 * number, 0)
            # Each tile has its own row of sums, so threads do not write to the same place.
            self.of_part[name] = builder.at(sums, builder.times(self.number, row_bytes))
            builder.clear(self.of_part[name], row_bytes)
        self.write_rows(_part_rows(builder, self.rows, self.size), self._differentiate)

    def _differentiate(self, start: Any) -> None:
        builder, build = self.builder, self.builder.build
        mean = self.mean(start)

        def add(column: Any, mask: Any, squares: Any, products: Any, plain: Any) -> list[Any]:
            h = self.centred(start, column, mask, mean)
            c = self._scaled(self._cotangent(start, column, mask), column, mask)
            return [builder.fma(h, h, squares), builder.fma(c, h, products), build.fadd(c, plain)]

        # One pass for all sums, because each pass reads two rows.
        squares, products, plain = self.sums(3, add)
        factor = self.factor(squares)
        # n mean(c s n) = (h - m) * slope, with slope = r^2 mean(c s (h - m)).
        slope = build.fmul(build.fmul(self.per_column(products), factor), factor)
        average = self.per_column(plain) if self.norm.is_centred else None
        of_row = [None if x is None else builder.splat(x, self.lanes) for x in (factor, slope, average)]
        self.each(lambda column, mask: self._write(start, column, mask, mean, *of_row))

    def _cotangent(self, start: Any, column: Any, mask: Any) -> Any:
        return self.read(self.buffers["cotangent"], start, column, mask)

    def _scaled(self, cotangent: Any, column: Any, mask: Any) -> Any:
        if not self.norm.has_scale:
            return cotangent
        return self.builder.build.fmul(cotangent, self.of_column("scale", column, mask))

    def _write(self, start: Any, column: Any, mask: Any, mean: Any, factor: Any, slope: Any, average: Any) -> None:
        builder, build = self.builder, self.builder.build
        h, c = self.centred(start, column, mask, mean), self._cotangent(start, column, mask)
        change = self._scaled(c, column, mask)
        if average is not None:
            change = build.fsub(change, average)
        change = build.fmul(factor, builder.fma(build.fneg(slope), h, change))
        if self.norm.has_residual:
            change = build.fadd(change, self.read(self.buffers["of_sum"], start, column, mask))
        self.write(change, self.y, start, column, mask)
        terms = {"scale": lambda: build.fmul(c, build.fmul(h, factor)), "offset": lambda: c}
        for name, sums in self.of_part.items():
            place, kind = builder.at(sums, builder.times(column, 4)), c.type
            # The row of sums is in memory and not in registers: a row may be longer than all registers.
            before = builder.load(kind, place) if mask is None else builder.masked_load(kind, place, mask)
            after = build.fadd(before, terms[name]())
            builder.store(after, place) if mask is None else builder.masked_store(after, place, mask)
