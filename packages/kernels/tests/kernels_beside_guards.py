"""Kernels of machine code on buffers beside pages that may not be touched: a step outside of one ends the process.

`test_beside_guards.py` runs this in a process of its own. Every buffer, of arguments, results and scratchpad, ends
where such a page begins, then begins where one ends. Index arrays hold any int32. The argument `all` runs every kernel
in both dtypes on both processors, instead of in another one on each.
"""

import ctypes
import dataclasses
import faulthandler
import mmap
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from llvmlite import ir

from stack_core.testing import Quantized
from stack_kernels.jit_cpu import host
from stack_kernels.jit_cpu.gated_linear_unit.gate import gate_gradients
from stack_kernels.jit_cpu.linear.jit_amx import TILED
from stack_kernels.jit_cpu.linear.jit_x86 import few_rows_product
from stack_kernels.jit_cpu.norm import jit_x86 as norm
from stack_kernels.jit_cpu.paged_attention import jit_x86 as paged_attention
from stack_kernels.jit_cpu.rope import jit_x86 as rope

DTYPES = ("float32", "bfloat16")
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
PROT_NONE = 0
RNG = np.random.default_rng(0)


class Buffer(ctypes.Structure):
    """XLA_FFI_Buffer."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.c_void_p),
    ]


class Guarded:
    """Bytes between two pages that may not be touched."""

    def __init__(self, data: bytes, shape: tuple[int, ...], *, at_end: bool) -> None:
        page, size = mmap.PAGESIZE, len(data)
        held = -(-max(size, 1) // page) * page
        self.memory = mmap.mmap(-1, held + 2 * page)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.address, self.size = base + page + (held - size if at_end else 0), size
        ctypes.memmove(self.address, data, size)
        for guard in (base, base + page + held):
            assert LIBC.mprotect(guard, page, PROT_NONE) == 0
        self.dims = (ctypes.c_int64 * max(len(shape), 1))(*shape)
        self.buffer = Buffer(ctypes.sizeof(Buffer), None, 0, self.address, len(shape), ctypes.addressof(self.dims))

    def bytes(self) -> bytes:
        return ctypes.string_at(self.address, self.size)


@dataclasses.dataclass
class Guards:
    """Stands in for `host.kernel_call`: runs a kernel's functions on guarded buffers, without XLA."""

    at_end: bool
    engines: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(
        self, name: str, build: Callable[..., ir.Module], results: Any, *arguments: Any, flops: int = 0
    ) -> Any:
        processor = host.this_processor()
        assert processor is not None
        key = f"{name}.{processor.name}"
        if key not in self.engines:
            self.engines[key] = host.compiled(build(processor), processor)
        many = results if isinstance(results, (list, tuple)) else [results]
        given = [Guarded(stored(array), array.shape, at_end=self.at_end) for array in arguments]
        # What a kernel leaves out would be read as this, which is NaN in every float.
        written = [Guarded(b"\xff" * one.size * one.dtype.itemsize, one.shape, at_end=self.at_end) for one in many]
        self._run(self.engines[key], given, written)
        found = [
            jnp.asarray(np.frombuffer(part.bytes(), one.dtype).reshape(one.shape))
            for one, part in zip(many, written, strict=True)
        ]
        return found if isinstance(results, (list, tuple)) else found[0]

    def _run(self, engine: Any, given: list[Guarded], written: list[Guarded]) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        tables = [(pointer * len(part))(*(ctypes.addressof(one.buffer) for one in part)) for part in (given, written)]
        buffers = [ctypes.addressof(table) for table in tables]

        def function(name: str, result: Any, *parameters: Any) -> Any:
            return ctypes.CFUNCTYPE(result, pointer, pointer, *parameters)(engine.get_function_address(name))

        size = number.from_address(engine.get_global_value_address("scratch_bytes")).value
        scratch = Guarded(b"\xff" * size, (), at_end=self.at_end)
        function("is_small", number)(*buffers)
        for tile in range(function("tiles", number)(*buffers)):
            function("tile", None, number, pointer)(*buffers, tile, scratch.address)
        function("finish", None)(*buffers)


def stored(array: Any) -> bytes:
    """As XLA stores it: two numbers of 4 bits share a byte."""
    values = np.asarray(array)
    if values.dtype.name not in ("int4", "uint4"):
        return np.ascontiguousarray(values).tobytes()
    codes = values.astype(np.int8).reshape(-1) & 15
    return (codes[::2] | codes[1::2] << 4).astype(np.uint8).tobytes()


def normal(dtype: str, *shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), dtype)


def norms(dtype: str) -> None:
    for kind, residual in (("rms", None), ("layer", normal(dtype, 19, 37))):
        x, scale, offset = normal(dtype, 19, 37), normal("float32", 37), normal("float32", 37)
        options = {"kind": kind, "epsilon": 1e-6, "scale_offset": 0.0, "axis": -1}
        found = norm._normed(x, scale, offset, residual, **options)
        assert all(np.isfinite(np.asarray(part, np.float32)).all() for part in jax.tree.leaves(found))
        arrays = {"x": x, "scale": scale, "offset": offset, "residual": residual}
        backward: Any = norm.JIT_X86.backward
        gradients = backward(arrays, options, found, {}, found, requested=frozenset({"x"}))
        assert all(np.isfinite(np.asarray(part, np.float32)).all() for part in jax.tree.leaves(gradients))


def turns(dtype: str) -> None:
    for heads, head_dim, half in ((3, 20, 7), (1, 64, 32), (2, 84, 40)):
        angles = normal("float32", 5, half)
        rope._rotate(normal(dtype, 5, heads, head_dim), jnp.cos(angles), jnp.sin(angles))


def gates(dtype: str) -> None:
    x = normal(dtype, 5, 67)
    for activation in ("silu", "gelu_tanh"):
        gate_gradients(activation, x, x, x)


def products(dtype: str) -> None:
    for rows, depth, columns in ((1, 64, 8200), (3, 37, 131), (7, 128, 515), (24, 301, 77)):
        few_rows_product(normal(dtype, rows, depth), normal(dtype, depth, columns))


def quantized_products(dtype: str) -> None:
    for rows, depth, columns in ((1, 128, 130), (5, 36, 70)):
        codes = RNG.integers(-7, 8, size=(depth, columns)).astype(np.int8)
        for values in (codes, codes.astype(jnp.int4), codes.astype(jnp.float8_e4m3fn)):
            scale = jnp.ones((4, columns), jnp.float32)
            few_rows_product(normal(dtype, rows, depth), Quantized(jnp.asarray(values), scale))
        x = Quantized(jnp.asarray(RNG.integers(-7, 8, size=(rows, depth)).astype(np.int8)), jnp.ones((rows, 1)))
        few_rows_product(x, Quantized(jnp.asarray(codes), jnp.ones((1, columns), jnp.float32)))


def tiles(dtype: str) -> None:
    processor = host.this_processor()
    if processor is not None and processor.has_tiles and dtype == "bfloat16":
        TILED.times(normal(dtype, 37, 96), normal(dtype, 96, 160), dtype)
        TILED.row_gradient(normal(dtype, 37, 160), normal(dtype, 96, 160), "float32")


def any_pages(dtype: str) -> None:
    for heads, kv_heads, slots, head_dim, tokens in ((6, 2, 5, 20, 9), (4, 2, 16, 64, 70)):
        for draw in range(4):
            layout = ("phsd", "pshd", "hpsd")[draw % 3]
            sizes = {"p": 4, "h": kv_heads, "s": slots, "d": head_dim}
            shape = [sizes[axis] for axis in layout]
            output, _ = paged_attention.JIT_X86.forward(
                query=normal(dtype, tokens, heads, head_dim),
                key_pages=normal(dtype, *shape),
                value_pages=normal(dtype, *shape),
                requested=frozenset(),
                block_tables=any_integers(draw, 3, 4),
                kv_lengths=any_integers(draw, 3),
                query_starts=any_integers(draw, 4),
                layout=layout,
                sinks=None,
                window=(7, 0) if draw == 3 else None,
                softcap=None,
                scale=0.5,
            )
            assert np.isfinite(np.asarray(output, np.float32)).all(), "an output was not written"


def any_integers(draw: int, *shape: int) -> jax.Array:
    """In range, about in range, or of any size."""
    most = (4, 80, 2**31)[draw % 3]
    return jnp.asarray(RNG.integers(-most if draw else 0, most, size=shape), jnp.int32)


def processors() -> Iterator[host.Processor]:
    """This one, and a lesser one that it can stand in for."""
    found = host.this_processor()
    assert found is not None
    yield found
    features = [f"-{word[1:]}" if word[1:].startswith("avx512") else word for word in found.features.split(",")]
    lesser = {"has_bf16_dot": False, "has_int8_dot": False, "has_tiles": False}
    yield dataclasses.replace(found, lanes=8, features=",".join(features), **lesser)


def main() -> None:
    faulthandler.enable()
    kernels = (norms, turns, gates, products, quantized_products, tiles, any_pages)
    for place, processor in enumerate(processors()):
        host.this_processor = lambda processor=processor: processor  # type: ignore[assignment]
        engines: dict[str, Any] = {}
        for at_end in (True, False):
            host.kernel_call = Guards(at_end, engines)  # type: ignore[assignment]
            for number, run in enumerate(kernels):
                for dtype in DTYPES if "all" in sys.argv else [DTYPES[(number + place) % 2]]:
                    sys.stdout.write(f"{processor.name} {run.__name__} {dtype} at_end={at_end}\n")
                    sys.stdout.flush()
                    run(dtype)


if __name__ == "__main__":
    main()
