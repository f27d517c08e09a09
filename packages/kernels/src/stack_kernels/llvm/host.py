"""Compiles kernels for the processor of this computer, and registers them with XLA."""

import ctypes
import functools
import os
import platform
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any

import jax
import llvmlite.binding as llvm
import numpy as np
from jax import ffi
from llvmlite import ir

from stack_core.abi import OpCall
from stack_core.hardware import Chip
from stack_core.machine import cpu_model
from stack_core.ops.building import vary_alike
from stack_kernels.cpu import on_cpu
from stack_kernels.llvm.code import INDEX, POINTER, Code

__all__ = ["Processor", "compiled", "kernel_call", "on_this_cpu", "this_processor"]

_REGISTERING = threading.Lock()
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


@dataclass(frozen=True)
class Processor:
    """What kernels are written for.

    Attributes:
      count: the processors that this process may run on.
      lanes: the float32 numbers of a vector register.
      has_bf16_dot: it multiplies pairs of bf16 numbers and adds them up in fp32.
      has_int8_dot: it multiplies fours of int8 numbers and adds them up in int32.
      has_tiles: it multiplies tiles of 16 rows of bf16 at once, and the system lets this process use their registers.
      features: LLVM's list, "+avx2,-avx512f".
    """

    count: int
    lanes: int
    has_bf16_dot: bool
    has_int8_dot: bool
    has_tiles: bool
    features: str

    @property
    def name(self) -> str:
        """Of those for which the same module may be written."""
        marks = ("bf16", self.has_bf16_dot), ("int8", self.has_int8_dot)
        return "_".join([f"{self.lanes}_lanes", *(mark for mark, is_set in marks if is_set)])


@functools.cache
def this_processor() -> Processor | None:
    """None if kernels are not written for processors of this kind: they want x86-64 with AVX2 and FMA."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    has = dict(llvm.get_host_cpu_features())
    if not (has.get("avx2") and has.get("fma") and has.get("f16c")):
        return None
    wide = all(has.get(name) for name in ("avx512f", "avx512bw", "avx512dq", "avx512vl"))
    return Processor(
        count=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        lanes=16 if wide else 8,
        has_bf16_dot=wide and bool(has.get("avx512bf16")),
        has_int8_dot=wide and bool(has.get("avx512vnni")),
        has_tiles=wide and all(has.get(name) for name in ("amx-tile", "amx-bf16", "avx512bf16")) and _may_use_tiles(),
        # Without this LLVM splits 512-bit vectors where it thinks that they slow the clock.
        features=",".join((llvm.get_host_cpu_features().flatten(), "-prefer-256-bit")),
    )


def _may_use_tiles() -> bool:
    """Asks Linux for the tile registers: their state is large, so that each process has to.

    Source: Linux kernel documentation, Using XSTATE features in user space applications.
    """
    try:
        return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0
    except (AttributeError, OSError):  # not Linux
        return False


def on_this_cpu(call: OpCall, chip: Chip) -> bool | str:
    """The `supports` of what is compiled for the processor at hand, and run on all of it by one device."""
    answer = on_cpu(call, chip)
    if answer is not True:
        return answer
    if not chip.model.startswith(_cpu_model()):
        return f"it is compiled for the processor at hand, and the target is {chip.model or 'any CPU'}"
    if this_processor() is None:
        return "it is for x86-64 processors with AVX2"
    if jax.default_backend() != "cpu" or jax.device_count() > 1:
        return "XLA does not divide it among several CPU devices"
    return True


_cpu_model = functools.cache(cpu_model)


def kernel_call(
    name: str, build: Callable[[Processor], ir.Module], results: Any, *arguments: Any, flops: int = 0
) -> Any:
    """Calls a kernel in whatever JAX is tracing.

    Args:
      name: tells it from all other kernels.
      build: makes its module where this process has not compiled it yet.
      results: one `jax.ShapeDtypeStruct` or several.
      flops: of products, where they are known before it runs; they are of the dtype of the first argument.
    """
    processor = this_processor()
    assert processor is not None, "on_this_cpu refused"
    target = f"stack_kernels.{name}.{processor.name}"
    _register(target, build, processor)
    said = {"flops": np.int64(flops), "flops_dtype": arguments[0].dtype.name} if flops else {}
    found = ffi.ffi_call(target, results, vmap_method="sequential")(*arguments, **said)
    return vary_alike(found, arguments)[0]  # JAX takes what a foreign function gives for the same on all devices.


_registered: dict[str, Any] = {}


def _register(target: str, build: Callable[[Processor], ir.Module], processor: Processor) -> None:
    with _REGISTERING:
        if target in _registered:
            return
        engine = compiled(build(processor), processor)
        handler = ctypes.cast(engine.get_function_address("handler"), ctypes.c_void_p)
        ffi.register_ffi_target(target, ffi.pycapsule(handler), platform="cpu")
        _registered[target] = engine  # which owns the code


def compiled(module: ir.Module, processor: Processor) -> llvm.ExecutionEngine:
    """The module and XLA's handler around it as machine code."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    if "finish" not in module.globals:
        Code(module, "finish", [POINTER, POINTER]).close()
    if "is_small" not in module.globals:
        Code(module, "is_small", [POINTER, POINTER], INDEX).close(INDEX(0))
    linked = llvm.parse_assembly(resources.files("stack_kernels.llvm").joinpath("xla_call.ll").read_text())
    linked.link_in(llvm.parse_assembly(str(module)))
    linked.verify()
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=processor.features, opt=3, codemodel="jitdefault"
    )
    passes = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(linked, passes)
    engine = llvm.create_mcjit_compiler(linked, target)
    engine.finalize_object()
    return engine
