"""Builder of LLVM IR for kernels: pointers in bytes, loops, variables and vectors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

__all__ = ["BYTE", "FLOAT", "HALF", "INDEX", "INT32", "POINTER", "SHORT", "TILE", "Builder", "Variable", "vector"]

BYTE, SHORT, INT32, INDEX = (ir.IntType(bits) for bits in (8, 16, 32, 64))
HALF, FLOAT = ir.HalfType(), ir.FloatType()
POINTER = ir.PointerType()
TILE: list[ir.Type] = [POINTER, POINTER, INDEX, POINTER]
"""Parameters of `@tile`: XLA's arguments and results, the tile's index, and the thread's scratchpad."""
_VOID = ir.VoidType()
_DATA, _DIMS = 24, 40  # in XLA_FFI_Buffer
_LINE_BYTES = 64
_SCRATCH_BYTES = "scratch_bytes"
# A stack frame of several pages then touches each page in order: a stack overflow crashes at once instead of writing
# past the guard page.
_PROBES = '"probe-stack"="inline-asm"'


def vector(kind: ir.Type, lanes: int) -> ir.VectorType:
    """Returns the type of a vector with this many lanes."""
    return ir.VectorType(kind, lanes)


@dataclass(frozen=True)
class Variable:
    """A stack slot, which LLVM promotes to registers if it can."""

    builder: "Builder"
    place: Any
    kind: ir.Type

    def get(self) -> Any:
        return self.builder.load(self.kind, self.place)

    def set(self, value: Any) -> None:
        self.builder.store(value, self.place)


class Builder:
    """Builds one function; each method appends instructions and returns their value."""

    def __init__(self, module: ir.Module, name: str, parameters: list[ir.Type], result: ir.Type = _VOID) -> None:
        self.module = module
        self.function = ir.Function(module, ir.FunctionType(result, parameters), name)
        set.add(self.function.attributes, _PROBES)  # llvmlite's own `add` rejects attributes with values
        self.parameters = self.function.args
        self._scratch_bytes = 0
        self._entry = self.function.append_basic_block("entry")
        body = self.function.append_basic_block("body")
        self.build = ir.IRBuilder(body)

    def close(self, result: Any = None) -> None:
        """Returns from the function; joins its first block, which holds all variables, to its body."""
        self.build.ret_void() if result is None else self.build.ret(result)
        ir.IRBuilder(self._entry).branch(self.function.blocks[1])
        if self._scratch_bytes:
            _reserve(self.module, self._scratch_bytes)

    def index(self, value: int) -> Any:
        return INDEX(value)

    def variable(self, kind: ir.Type, initial: Any) -> Variable:
        # In the entry block: only there LLVM promotes it to registers, and a loop would enlarge the stack each time.
        variable = Variable(self, ir.IRBuilder(self._entry).alloca(kind), kind)
        variable.set(initial)
        return variable

    def scratch(self, kind: Any, count: int) -> Any:
        """Returns a pointer to `count` values in the thread's scratchpad, aligned to a cache line.

        The scratchpad is the function's last parameter. Functions called with the same scratchpad share its memory.
        """
        place = self.at(self.parameters[-1], self._scratch_bytes)
        size = count * (4 if kind == FLOAT else kind.width // 8)
        self._scratch_bytes += -(-size // _LINE_BYTES) * _LINE_BYTES
        return place

    def load(self, kind: ir.Type, pointer: Any) -> Any:
        """Loads a value; a vector may begin at any of its elements."""
        return self.build.load(pointer, typ=kind, align=_alignment(kind))

    def store(self, value: Any, pointer: Any) -> None:
        self.build.store(value, pointer, align=_alignment(value.type))

    def at(self, pointer: Any, *terms: Any) -> Any:
        """Returns the pointer advanced by the sum of `terms` in bytes, each an index or an int."""
        for term in terms:
            offset = INDEX(term) if isinstance(term, int) else term
            pointer = self.build.gep(pointer, [offset], source_etype=BYTE)
        return pointer

    def times(self, left: Any, right: Any) -> Any:
        return self.build.mul(left, INDEX(right) if isinstance(right, int) else right)

    def plus(self, left: Any, right: Any) -> Any:
        return self.build.add(left, INDEX(right) if isinstance(right, int) else right)

    def minus(self, left: Any, right: Any) -> Any:
        return self.build.sub(left, INDEX(right) if isinstance(right, int) else right)

    def over(self, left: Any, right: Any) -> Any:
        """Divides non-negative numbers, rounding down."""
        return self.build.udiv(left, INDEX(right) if isinstance(right, int) else right)

    def ceil_div(self, left: Any, right: Any) -> Any:
        """Divides a non-negative number by a positive one, rounding up."""
        return self.over(self.plus(left, right - 1 if isinstance(right, int) else self.minus(right, 1)), right)

    def min(self, left: Any, right: Any) -> Any:
        return self.build.select(self.build.icmp_signed("<", left, right), left, right)

    def max(self, left: Any, right: Any) -> Any:
        return self.build.select(self.build.icmp_signed(">", left, right), left, right)

    def at_most(self, value: Any, limit: int) -> Any:
        """Returns 1 if the value is at most the limit, else 0."""
        return self.build.zext(self.build.icmp_signed("<=", value, INDEX(limit)), INDEX)

    @contextmanager
    def loop(self, start: Any, stop: Any, step: int = 1) -> Iterator[Any]:
        """Runs the block for each index from `start` in steps, while a full step is left before `stop`."""
        start, stop = (INDEX(value) if isinstance(value, int) else value for value in (start, stop))
        before = self.build.block
        head, body, after = (self.function.append_basic_block() for _ in range(3))
        self.build.branch(head)
        self.build.position_at_end(head)
        index = self.build.phi(INDEX)
        index.add_incoming(start, before)
        following = self.build.add(index, INDEX(step))
        self.build.cbranch(self.build.icmp_signed("<=", following, stop), body, after)
        self.build.position_at_end(body)
        yield index
        # Not from `body`: its nested loops and conditions end in other blocks.
        index.add_incoming(following, self.build.block)
        self.build.branch(head)
        self.build.position_at_end(after)

    def each_vector(self, start: Any, stop: Any, lanes: int, body: Callable[[Any, Any], None]) -> None:
        """Calls `body` with the first column of each vector and a mask: None, except for a partial last vector.

        Some processors take far longer to store with a mask, even if it is set in all lanes.
        """
        count = self.minus(stop, start)
        vectors_end = self.plus(start, self.times(self.over(count, lanes), lanes))
        with self.loop(start, vectors_end, lanes) as column:
            body(column, None)
        rest = self.minus(stop, vectors_end)
        with self.when(self.build.icmp_signed(">", rest, INDEX(0))):
            body(vectors_end, self.mask(rest, lanes))

    def when(self, condition: Any) -> Any:
        """Runs the block of `with builder.when(condition):` only if the condition holds."""
        return self.build.if_then(condition)

    def buffer(self, buffers: Any, number: int, rank: int) -> tuple[Any, list[Any]]:
        """Returns the data pointer and the sizes of one of XLA's buffers."""
        buffer = self.load(POINTER, self.at(buffers, 8 * number))
        sizes = self.load(POINTER, self.at(buffer, _DIMS))
        return self.load(POINTER, self.at(buffer, _DATA)), [
            self.load(INDEX, self.at(sizes, 8 * axis)) for axis in range(rank)
        ]

    def splat(self, value: Any, lanes: int) -> Any:
        kind = vector(value.type, lanes)
        # LLVM recognizes this pair of instructions as a broadcast.
        first = self.build.insert_element(ir.Constant(kind, ir.Undefined), value, INT32(0))
        return self.build.shuffle_vector(first, first, ir.Constant(vector(INT32, lanes), [0] * lanes))

    def shuffle(self, left: Any, right: Any, lanes: list[int]) -> Any:
        return self.build.shuffle_vector(left, right, ir.Constant(vector(INT32, len(lanes)), lanes))

    def intrinsic(self, name: str, result: ir.Type, *arguments: Any) -> Any:
        declared = self.module.globals.get(name) or ir.Function(
            self.module, ir.FunctionType(result, [argument.type for argument in arguments]), name
        )
        return self.build.call(declared, arguments)

    def fma(self, left: Any, right: Any, addend: Any) -> Any:
        return self.intrinsic(f"llvm.fma.{_suffix(addend.type)}", addend.type, left, right, addend)

    def prefetch(self, pointer: Any) -> None:
        """Prefetches a cache line into the L2 cache."""
        # For reading, with locality 2 of 3 (prefetcht1), of data.
        self.intrinsic("llvm.prefetch.p0", _VOID, pointer, INT32(0), INT32(2), INT32(1))

    def mask(self, count: Any, lanes: int) -> Any:
        """Returns a mask that is set in the first `count` lanes."""
        numbers = ir.Constant(vector(INT32, lanes), list(range(lanes)))
        return self.build.icmp_signed("<", numbers, self.splat(self.build.trunc(count, INT32), lanes))

    def clear(self, pointer: Any, count: Any) -> None:
        """Zeroes `count` bytes."""
        self.intrinsic("llvm.memset.p0.i64", _VOID, pointer, BYTE(0), count, ir.IntType(1)(0))

    def masked_load(self, kind: ir.VectorType, pointer: Any, mask: Any) -> Any:
        """Loads lanes whose mask is set; the other lanes are zero and their memory is not read."""
        name = f"llvm.masked.load.{_suffix(kind)}.p0"
        return self.intrinsic(name, kind, pointer, INT32(1), mask, ir.Constant(kind, None))

    def masked_store(self, value: Any, pointer: Any, mask: Any) -> None:
        self.intrinsic(f"llvm.masked.store.{_suffix(value.type)}.p0", _VOID, value, pointer, INT32(1), mask)


def _reserve(module: ir.Module, size: int) -> None:
    """Enlarges the scratchpad of a module's threads to at least `size` bytes."""
    scratch_size: Any = module.globals.get(_SCRATCH_BYTES)
    if scratch_size is None:
        scratch_size = ir.GlobalVariable(module, INDEX, _SCRATCH_BYTES)
        scratch_size.global_constant, scratch_size.initializer = True, INDEX(0)
    scratch_size.initializer = INDEX(max(size, scratch_size.initializer.constant))


def _alignment(kind: Any) -> int | None:
    return 1 if isinstance(kind, ir.VectorType) else None


def _suffix(kind: Any) -> str:
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{_suffix(kind.element)}"
    return {HALF: "f16", FLOAT: "f32"}.get(kind) or f"i{kind.width}"
