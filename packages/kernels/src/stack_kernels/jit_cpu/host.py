"""Compiles kernels for the local processor and registers them with XLA."""

import ctypes
import functools
import hashlib
import os
import platform
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import llvmlite
import llvmlite.binding as llvm
import numpy as np
from jax import ffi
from llvmlite import ir

from stack_core.abi.ops import OpCall
from stack_core.chips import Chip
from stack_core.chips.machine import cpu_model
from stack_core.ops.building import vary_alike
from stack_kernels.checks import CPU_KERNELS_VARIABLE
from stack_kernels.jit_cpu import crash_note, objects
from stack_kernels.jit_cpu.builder import BYTE, INDEX, POINTER, Builder
from stack_kernels.jit_cpu.xla_ffi import check_handler, interface_refusal

__all__ = ["Processor", "assembly", "compiled", "kernel_call", "on_this_cpu", "this_processor"]

_REGISTERING = threading.Lock()
# The system call on x86-64, its request for permission to use a processor state, and the state of the tile registers.
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


@dataclass(frozen=True)
class Processor:
    """Properties of the target processor of kernels.

    Attributes:
      count: number of processors that this process may run on.
      lanes: float32 lanes of a vector register.
      has_bf16_dot: it has dot products of bf16 pairs with fp32 accumulation.
      has_int8_dot: it has dot products of four int8 numbers with int32 accumulation.
      has_tiles: it multiplies bf16 tiles of 16 rows (AMX), and the system grants this process their registers.
      features: LLVM's feature list, "+avx2,-avx512f".
    """

    count: int
    lanes: int
    has_bf16_dot: bool
    has_int8_dot: bool
    has_tiles: bool
    features: str

    @property
    def name(self) -> str:
        """Name shared by processors for which the same module may be written."""
        marks = ("bf16", self.has_bf16_dot), ("int8", self.has_int8_dot)
        return "_".join([f"{self.lanes}_lanes", *(mark for mark, is_set in marks if is_set)])


@functools.cache
def this_processor() -> Processor | None:
    """Returns the local processor, or None unless it runs Linux on x86-64 with AVX2 and FMA, which kernels need."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
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
        # Without this, LLVM splits 512-bit vectors on processors that it expects to lower their clock.
        features=",".join((llvm.get_host_cpu_features().flatten(), "-prefer-256-bit")),
    )


def _may_use_tiles() -> bool:
    """Requests the tile registers from Linux; each process has to, because their state is large.

    Source: Linux kernel documentation, Using XSTATE features in user space applications.
    """
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0


def on_this_cpu(call: OpCall, chip: Chip, config: Any = None) -> bool | str:
    """Implements `supports` for code compiled for the local processor and run on all of its cores by one device."""
    if not chip.model.startswith(_cpu_model()):
        return f"it is compiled for the processor at hand, and the target is {chip.model or 'any CPU'}"
    if jax.default_backend() != "cpu" or jax.device_count() > 1:
        return "XLA does not divide it among several CPU devices"
    return _refusal() or True


def _refusal() -> str:
    """Returns why no machine code runs in this process; "" if it does."""
    chosen = os.environ.get(CPU_KERNELS_VARIABLE)
    if chosen == "xla":
        return f"{CPU_KERNELS_VARIABLE} is 'xla'"
    if chosen:
        return f"{CPU_KERNELS_VARIABLE} is {chosen!r}, which is not known; expected 'xla' or nothing"
    if this_processor() is None:
        return "it is for Linux on x86-64 processors with AVX2"
    return interface_refusal()


_cpu_model = functools.cache(cpu_model)


def kernel_call(
    name: str, build: Callable[[Processor], ir.Module], results: Any, *arguments: Any, flops: int = 0
) -> Any:
    """Calls a kernel within the current JAX trace.

    Args:
      name: unique name of the kernel.
      build: builds its module if this process has not compiled it yet.
      results: one `jax.ShapeDtypeStruct` or several.
      arguments: arrays to pass.
      flops: FLOPs of its products if known before it runs, counted for the dtype of the first argument.
    """
    processor = this_processor()
    assert processor is not None, "on_this_cpu refused"
    target = f"stack_kernels.{name}.{processor.name}"
    _register(target, build, processor)
    attributes = {"flops": np.int64(flops), "flops_dtype": arguments[0].dtype.name} if flops else {}
    # Kernels read buffers of fixed rank, so elements mapped by `jax.vmap` are separate calls.
    found = ffi.ffi_call(target, results, vmap_method="sequential")(*arguments, **attributes)
    return vary_alike(found, arguments)[0]  # JAX assumes that results of a foreign function are equal on all devices.


_registered: dict[str, Any] = {}


def _register(target: str, build: Callable[[Processor], ir.Module], processor: Processor) -> None:
    with _REGISTERING:
        if target in _registered:
            return
        engine = _engine(_object_code(target, build, processor), processor)
        address = engine.get_function_address("handler")
        check_handler(address)
        crash_note.install()
        ffi.register_ffi_target(target, ffi.pycapsule(ctypes.c_void_p(address)), platform="cpu")
        _registered[target] = engine  # the engine owns the code


def _object_code(target: str, build: Callable[[Processor], ir.Module], processor: Processor) -> bytes:
    """Returns the object code of a kernel, which is cached if JAX caches programs.

    Otherwise each process would build the module and compile it, which takes LLVM a third of a second per kernel. The
    key has the name, which is unique, and the sources instead of the module: building it takes long, too.
    """
    builder = getattr(build, "func", build)  # of a `functools.partial`
    paths = [_source_path(name) for name in (__name__, OpCall.__module__, builder.__module__)]
    if None in paths:  # interactive code, whose kernels no other process finds
        return _compile(build, processor)
    sources = (_source_digest(path) for path in paths)
    parts = (target, repr(processor), llvm.get_host_cpu_name(), llvmlite.__version__, *sources)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    if (code := objects.load(key)) is None:
        code = _compile(build, processor)
        objects.store(key, code)
    return code


def _compile(build: Callable[[Processor], ir.Module], processor: Processor) -> bytes:
    machine = _target_machine(processor.features)
    return machine.emit_object(_optimized(build(processor), machine))


def _source_path(module: str) -> Path | None:
    """Returns the file of a loaded module's package, or of the module if it has no package; None without a file."""
    package, own = (getattr(sys.modules[name], "__file__", None) for name in (module.partition(".")[0], module))
    path = package or own
    return None if path is None else Path(path)


@functools.cache
def _source_digest(path: Path) -> str:
    """Hashes the sources of a package, given its `__init__.py`, or those of one module."""
    files = sorted(path.parent.rglob("*")) if path.name == "__init__.py" else [path]
    digest = hashlib.sha256()
    for file in files:
        if file.suffix in (".py", ".ll"):
            digest.update(b"%s\0%s\0" % (str(file.relative_to(path.parent)).encode(), file.read_bytes()))
    return digest.hexdigest()


def compiled(module: ir.Module, processor: Processor) -> llvm.ExecutionEngine:
    """Compiles the module with XLA's handler to machine code; crash reports show the module's name."""
    machine = _target_machine(processor.features)
    return _engine(machine.emit_object(_optimized(module, machine)), processor)


def _engine(code: bytes, processor: Processor) -> llvm.ExecutionEngine:
    """Loads object code into this process."""
    crash_note.share_note()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine(processor.features))
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


def assembly(module: ir.Module, processor: Processor) -> str:
    """Returns the assembly that `compiled` would produce, for inspection; the processor need not be the local one."""
    target = _target_machine(processor.features)
    return target.emit_assembly(_optimized(module, target))


def _optimized(module: ir.Module, target: llvm.TargetMachine) -> llvm.ModuleRef:
    linked = _linked(module)
    passes = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(linked, passes)
    return linked


def _linked(module: ir.Module) -> llvm.ModuleRef:
    """Links the module with the handler."""
    _complete(module)
    linked = llvm.parse_assembly(_source("xla_call.ll"))
    linked.link_in(llvm.parse_assembly(str(module)))
    linked.verify()
    return linked


@functools.cache
def _source(name: str) -> str:
    return resources.files("stack_kernels.jit_cpu").joinpath(name).read_text()


def _complete(module: ir.Module) -> None:
    """Adds defaults for parts that the module leaves out."""
    if "kernel_name" in module.globals:
        return
    name = bytearray(module.name.encode() + b"\0")
    _constant(module, "kernel_name", ir.Constant(ir.ArrayType(BYTE, len(name)), name))
    if "scratch_bytes" not in module.globals:
        _constant(module, "scratch_bytes", INDEX(0))
    if "finish" not in module.globals:
        Builder(module, "finish", [POINTER, POINTER]).close()
    if "is_small" not in module.globals:
        Builder(module, "is_small", [POINTER, POINTER], INDEX).close(INDEX(0))


def _constant(module: ir.Module, name: str, value: ir.Constant) -> None:
    variable = ir.GlobalVariable(module, value.type, name)
    variable.global_constant, variable.initializer = True, value


def _target_machine(features: str) -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features, opt=3, codemodel="jitdefault"
    )
