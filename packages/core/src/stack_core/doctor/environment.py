"""Environment variables that change results or speed, with their effects."""

import difflib
from collections.abc import Collection, Iterator, Mapping

from stack_core.abi.errors import nearest
from stack_core.abi.findings import Finding, Status

__all__ = ["check_environment"]

# Boolean switches, without effect if false.
_SWITCHES: Mapping[str, tuple[Status, str]] = {
    "JAX_DISABLE_JIT": ("warning", "nothing is compiled: operations run one by one, 10 to 1000 times slower"),
    "JAX_DEBUG_NANS": ("warning", "every result is checked for NaN, and buffers are not donated: slow"),
    "JAX_DEBUG_INFS": ("warning", "every result is checked for infinities: slow"),
    "JAX_CHECK_TRACER_LEAKS": ("warning", "traced functions are not cached: slow tracing"),
    "JAX_ENABLE_CHECKS": ("warning", "JAX checks its internal invariants: slow tracing"),
    "JAX_ENABLE_X64": ("note", "arrays have 64 bits by default: different results, twice the memory and time"),
    "JAX_NO_EXECUTION": ("warning", "JAX raises instead of running programs"),
    "JAX_LOG_COMPILES": ("note", "every compilation is logged"),
    "CUDA_LAUNCH_BLOCKING": ("warning", "the GPU waits after every kernel: slow"),
    "PYTHONOPTIMIZE": ("note", "assertions are removed"),
}
# Settings that have an effect with any value.
_SETTINGS: Mapping[str, tuple[Status, str]] = {
    "JAX_PLATFORMS": ("note", "JAX uses only these platforms"),
    "JAX_DEFAULT_MATMUL_PRECISION": ("note", "sets the precision, and with it the speed, of float32 products"),
    "JAX_NUMPY_DTYPE_PROMOTION": ("note", "mixed dtypes are promoted by other rules, or rejected"),
    "JAX_NUMPY_RANK_PROMOTION": ("note", "arrays of different rank are broadcast with a warning, or rejected"),
    "JAX_DEFAULT_DTYPE_BITS": ("note", "sets the default number of bits of arrays: different results"),
    "JAX_DEFAULT_PRNG_IMPL": ("note", "random numbers come from another generator"),
    "JAX_THREEFRY_PARTITIONABLE": ("note", "random numbers differ from the default"),
    "JAX_RANDOM_SEED_OFFSET": ("note", "is added to every seed"),
    "JAX_NUM_CPU_DEVICES": ("note", "JAX splits the CPU into this many devices, which share its cores"),
    "JAX_CPU_COLLECTIVES_IMPLEMENTATION": ("note", "sets the implementation of collectives between CPU processes"),
    "JAX_COMPILATION_CACHE_DIR": ("note", "compiled programs are cached there for later runs"),
    "JAX_ENABLE_COMPILATION_CACHE": ("note", "switches the cache of compiled programs on or off"),
    "JAX_EXEC_TIME_OPTIMIZATION_EFFORT": ("note", "sets the compiler's effort for speed"),
    "JAX_MEMORY_FITTING_EFFORT": ("note", "sets the compiler's effort to save memory"),
    "XLA_FLAGS": ("note", "changes how programs are compiled and run"),
    "XLA_PYTHON_CLIENT_PREALLOCATE": ("note", "sets whether GPU memory is allocated at the start or on demand"),
    "XLA_PYTHON_CLIENT_MEM_FRACTION": ("note", "the share of a GPU's memory that JAX allocates"),
    "XLA_CLIENT_MEM_FRACTION": ("note", "the share of a GPU's memory that JAX allocates"),
    "XLA_PYTHON_CLIENT_ALLOCATOR": ("note", "sets the allocator of GPU memory; `platform` is slow"),
    "LIBTPU_INIT_ARGS": ("note", "changes how programs are compiled and run on TPUs"),
    "TPU_VISIBLE_CHIPS": ("note", "JAX sees only these TPU chips"),
    "TPU_VISIBLE_DEVICES": ("note", "JAX sees only these TPU chips"),
    "CUDA_VISIBLE_DEVICES": ("note", "JAX sees only these GPUs"),
    "CUDA_DEVICE_MAX_CONNECTIONS": ("note", "sets how many work queues a GPU has"),
    "NVIDIA_TF32_OVERRIDE": ("note", "0 disables TF32 in NVIDIA's libraries: exact but slow float32 products"),
    "NCCL_ALGO": ("note", "forces an algorithm for communication between GPUs"),
    "NCCL_PROTO": ("note", "forces a protocol for communication between GPUs"),
    "NCCL_P2P_DISABLE": ("note", "disables direct communication between GPUs: slow"),
    "OMP_NUM_THREADS": ("note", "sets the threads of NumPy and PyTorch; XLA uses all usable cores regardless"),
    "OPENBLAS_NUM_THREADS": ("note", "sets the threads of NumPy; XLA uses all usable cores regardless"),
    "MKL_NUM_THREADS": ("note", "sets the threads of NumPy and PyTorch; XLA uses all usable cores regardless"),
    "PYTHONPATH": ("note", "modules there take precedence over installed ones"),
    "STACK_DISABLE_PLUGINS": ("note", "these plugins are not loaded"),
    "STACK_LOAD_PLUGINS": ("note", "only core and these plugins are loaded"),
}
# XLA flags that reduce speed or change the apparent hardware.
_XLA_FLAGS: Mapping[str, tuple[Status, str]] = {
    "--xla_force_host_platform_device_count": ("note", "the CPU acts as this many devices, which share its cores"),
    "--xla_dump_to": ("warning", "every compiled program is written there: slow, and it fills the disk"),
    "--xla_backend_optimization_level": ("warning", "sets how much programs are optimized"),
    "--xla_cpu_enable_fast_math": ("note", "results on the CPU are less exact, and NaN may get lost"),
    "--xla_gpu_deterministic_ops": ("note", "results on a GPU are the same in every run, but slower"),
    "--xla_allow_excess_precision": ("note", "sets whether XLA may skip rounding between operations"),
}
_NO = frozenset({"", "0", "false", "no", "off"})
_OURS = "STACK_"
_THEIRS = ("JAX_", "XLA_", "LIBTPU_")
_TYPO = 0.9  # minimum similarity of a typo, such as JAX_PLATFORM (without effect) for JAX_PLATFORMS


def check_environment(environ: Mapping[str, str], of_packages: Collection[str] = ()) -> Iterator[Finding]:
    """Yields one finding per set variable, and one per variable that looks misspelled.

    Args:
      environ: environment variables.
      of_packages: names of variables that other packages read and check.
    """
    findings = [*_known(environ), *_misspelled(environ, of_packages)]
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
            advice = f"Remove {name} from XLA_FLAGS." if status == "warning" else ""
            yield Finding("XLA_FLAGS", status, f"{flag}: {effect}", advice)


def _misspelled(environ: Mapping[str, str], of_packages: Collection[str]) -> Iterator[Finding]:
    known = [*_SWITCHES, *_SETTINGS, *of_packages]
    for name in sorted(environ.keys() - set(known)):
        if name.startswith(_OURS):
            found = f"is set, but no installed package declares it.{nearest(name, known)}"
            yield Finding(name, "note", found, "Correct its name, unless something else reads it.")
        elif name.upper().startswith(_THEIRS) and (close := difflib.get_close_matches(name.upper(), known, 1, _TYPO)):
            yield Finding(name, "warning", "is set, but JAX may not read it", f"Did you mean {close[0]}?")
