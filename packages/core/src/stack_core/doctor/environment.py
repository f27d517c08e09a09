"""Environment variables that change results or speed, with their effects."""

import difflib
from collections.abc import Iterator, Mapping

from stack_core.abi.errors import nearest
from stack_core.doctor.findings import Finding, Status

__all__ = ["environment_findings"]

# Boolean switches, which have no effect when false.
_SWITCHES: Mapping[str, tuple[Status, str]] = {
    "JAX_DISABLE_JIT": ("warning", "nothing is compiled: every operation runs by itself, 10 to 1000 times slower"),
    "JAX_DEBUG_NANS": ("warning", "every result is searched for NaN, and donated buffers are kept: slow"),
    "JAX_DEBUG_INFS": ("warning", "every result is searched for infinities: slow"),
    "JAX_CHECK_TRACER_LEAKS": ("warning", "caches of traced functions are off: slow to trace"),
    "JAX_ENABLE_CHECKS": ("warning", "JAX checks itself: slow to trace"),
    "JAX_ENABLE_X64": ("note", "arrays are of 64 bits by default: other results, in twice the memory and time"),
    "JAX_NO_EXECUTION": ("warning", "JAX raises instead of running programs"),
    "JAX_LOG_COMPILES": ("note", "every compilation is logged"),
    "CUDA_LAUNCH_BLOCKING": ("warning", "the GPU waits after every kernel: slow"),
    "PYTHONOPTIMIZE": ("note", "assertions are removed"),
}
# Settings that have an effect with any value.
_SETTINGS: Mapping[str, tuple[Status, str]] = {
    "JAX_PLATFORMS": ("note", "JAX may use these platforms alone"),
    "JAX_DEFAULT_MATMUL_PRECISION": ("note", "products of float32 are more exact and slower, or the opposite"),
    "JAX_NUMPY_DTYPE_PROMOTION": ("note", "mixed dtypes are promoted by other rules, or refused"),
    "JAX_NUMPY_RANK_PROMOTION": ("note", "arrays of different rank are broadcast with a warning, or refused"),
    "JAX_DEFAULT_DTYPE_BITS": ("note", "arrays have another size by default: other results"),
    "JAX_DEFAULT_PRNG_IMPL": ("note", "random numbers come from another generator"),
    "JAX_THREEFRY_PARTITIONABLE": ("note", "random numbers are others than the default's"),
    "JAX_RANDOM_SEED_OFFSET": ("note", "every seed is shifted by it"),
    "JAX_NUM_CPU_DEVICES": ("note", "JAX makes that many devices of the CPU, which share its cores"),
    "JAX_CPU_COLLECTIVES_IMPLEMENTATION": ("note", "chooses how processes on CPUs talk"),
    "JAX_COMPILATION_CACHE_DIR": ("note", "compiled programs are kept there between runs"),
    "JAX_ENABLE_COMPILATION_CACHE": ("note", "switches the cache of compiled programs"),
    "JAX_EXEC_TIME_OPTIMIZATION_EFFORT": ("note", "the compiler works more or less on speed"),
    "JAX_MEMORY_FITTING_EFFORT": ("note", "the compiler works more or less on memory"),
    "XLA_FLAGS": ("note", "changes how programs are compiled and run"),
    "XLA_PYTHON_CLIENT_PREALLOCATE": ("note", "whether a GPU's memory is taken at the start or piece by piece"),
    "XLA_PYTHON_CLIENT_MEM_FRACTION": ("note", "the part of a GPU's memory that JAX takes"),
    "XLA_CLIENT_MEM_FRACTION": ("note", "the part of a GPU's memory that JAX takes"),
    "XLA_PYTHON_CLIENT_ALLOCATOR": ("note", "how a GPU's memory is handed out; `platform` is slow"),
    "LIBTPU_INIT_ARGS": ("note", "changes how programs are compiled and run on TPUs"),
    "TPU_VISIBLE_CHIPS": ("note", "JAX sees these TPU chips alone"),
    "TPU_VISIBLE_DEVICES": ("note", "JAX sees these TPU chips alone"),
    "CUDA_VISIBLE_DEVICES": ("note", "JAX sees these GPUs alone"),
    "CUDA_DEVICE_MAX_CONNECTIONS": ("note", "how many streams of work a GPU takes at once"),
    "NVIDIA_TF32_OVERRIDE": ("note", "0 forbids TF32 in NVIDIA's libraries: exact and slow products of float32"),
    "NCCL_ALGO": ("note", "forces an algorithm on communication between GPUs"),
    "NCCL_PROTO": ("note", "forces a protocol on communication between GPUs"),
    "NCCL_P2P_DISABLE": ("note", "GPUs may not talk directly: slow"),
    "OMP_NUM_THREADS": ("note", "threads of NumPy and PyTorch; XLA takes all usable cores whatever it says"),
    "OPENBLAS_NUM_THREADS": ("note", "threads of NumPy; XLA takes all usable cores whatever it says"),
    "MKL_NUM_THREADS": ("note", "threads of NumPy and PyTorch; XLA takes all usable cores whatever it says"),
    "PYTHONPATH": ("note", "modules there come before the installed ones"),
    "STACK_CPU_KERNELS": ("note", "stack-kernels leaves out its machine code on CPUs"),
    "STACK_DISABLE_PLUGINS": ("note", "these plugins are not loaded"),
    "STACK_LOAD_PLUGINS": ("note", "core and these plugins alone are loaded"),
    "STACK_TUNED_TABLES": ("note", "stack-kernels chooses by these tables alone"),
}
# XLA flags that reduce speed or change the apparent hardware.
_XLA_FLAGS: Mapping[str, tuple[Status, str]] = {
    "--xla_force_host_platform_device_count": ("note", "the CPU acts as that many devices, which share its cores"),
    "--xla_dump_to": ("warning", "every compiled program is written there: slow, and it fills the disk"),
    "--xla_backend_optimization_level": ("warning", "programs are optimized less"),
    "--xla_cpu_enable_fast_math": ("note", "results on the CPU are less exact, and NaN may get lost"),
    "--xla_gpu_deterministic_ops": ("note", "the same results in every run on a GPU, more slowly"),
    "--xla_allow_excess_precision": ("note", "whether roundings between operations may be left out"),
}
_NO = frozenset({"", "0", "false", "no", "off"})
_OURS = "STACK_"
_THEIRS = ("JAX_", "XLA_", "LIBTPU_")
_TYPO = 0.9  # similarity of a typo: JAX_PLATFORM, which has no effect, instead of JAX_PLATFORMS


def environment_findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields one finding per set variable, and one per variable that looks misspelled."""
    findings = [*_known(environ), *_misspelled(environ)]
    if not findings:
        yield Finding("environment", "ok", "no variable that changes results or speed is set")
    yield from findings


def _known(environ: Mapping[str, str]) -> Iterator[Finding]:
    for name, (status, effect) in {**_SWITCHES, **_SETTINGS}.items():
        value = environ.get(name)
        if value is None or (name in _SWITCHES and value.strip().lower() in _NO):
            continue
        yield Finding(name, status, f"is {value!r}: {effect}", f"Unset {name}." if status == "warning" else "")
    for flag in environ.get("XLA_FLAGS", "").split():
        name = flag.partition("=")[0]
        if name in _XLA_FLAGS:
            status, effect = _XLA_FLAGS[name]
            advice = f"Take {name} out of XLA_FLAGS." if status == "warning" else ""
            yield Finding("XLA_FLAGS", status, f"{flag}: {effect}", advice)


def _misspelled(environ: Mapping[str, str]) -> Iterator[Finding]:
    known = [*_SWITCHES, *_SETTINGS]
    for name in sorted(environ.keys() - set(known)):
        if name.startswith(_OURS):
            found = f"is set, and stack-core reads no such variable.{nearest(name, known)}"
            yield Finding(name, "note", found, "Correct its name, unless a plugin reads it.")
        elif name.upper().startswith(_THEIRS) and (close := difflib.get_close_matches(name.upper(), known, 1, _TYPO)):
            yield Finding(name, "warning", "is set, and JAX may not read it", f"Did you mean {close[0]}?")
