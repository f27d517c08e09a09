"""The CPU's row. Its peaks are measured once per machine, when they are first read, and cached on disk.

A measurement takes one or two seconds: for each dtype, the best of several matrix products of up to three sizes, and
the best of several passes over an array larger than any cache. A measurement from a busy machine is replaced at the
first start while the machine is idle.
"""

import functools
import hashlib
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from stack_core.abi.chips import Chip
from stack_core.abi.errors import HardwareError
from stack_core.abi.user_cache import user_cache_dir
from stack_core.chips import machine

__all__ = ["ChipCacheWarning", "measured_cpu"]

# (operand, accumulator): XLA's fastest narrow products on CPUs accumulate in a wider dtype.
_PRODUCTS = (
    (np.dtype(np.float32), np.dtype(np.float32)),
    (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)),
    (np.dtype(np.int8), np.dtype(np.int32)),
)
_PRODUCT_SIZES = (512, 1024, 2048)
_PRODUCT_BUDGET_S = 0.15
_COPY_BYTES = 256 * 2**20  # more than a last-level cache
_COPY_BUDGET_S = 0.25
_MEASURED = ("peak_flops", "hbm_bandwidth_bytes_s", "provenance")


class ChipCacheWarning(UserWarning):
    """Warning that the CPU's measurement could not be read from the cache or saved."""


class _Cpu(Chip):
    """The CPU of this process, whose peaks are read from the cache, or measured, on first access."""

    def __getattr__(self, name: str) -> Any:
        if name not in _MEASURED:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        for measured, value in _measurement().items():
            object.__setattr__(self, measured, value)
        return self.__dict__[name]

    def __hash__(self) -> int:  # The inherited hash would read the peaks and start the measurement.
        return hash((self.kind, self.model))


@functools.cache
def measured_cpu() -> Chip:
    """Returns the CPU of this process, limited to the cores that it may use. Its peaks are measured on first access.

    Measurements are cached under `$XDG_CACHE_HOME/stack/chips`, in one file per CPU model, number of usable cores,
    version of JAX and `XLA_FLAGS`. A `ChipCacheWarning` is emitted for a file that is damaged or cannot be written.
    Reading a peak raises `HardwareError` if JAX_PLATFORMS excludes JAX's CPU backend.
    """
    # Without a call of the constructor, which would need the measured fields.
    chip = object.__new__(_Cpu)
    known = {
        "kind": "cpu",
        "unit": "chip",
        "hbm_bytes": machine.memory_bytes(),
        "on_chip_bytes": _last_level_cache_bytes(),
        "link_bandwidth_bytes_s": None,
        "model": f"{machine.cpu_model()}, {machine.usable_cores()} cores",
    }
    for name, value in known.items():
        object.__setattr__(chip, name, value)
    return chip


def _measurement() -> dict[str, Any]:
    """Returns the measured fields of the CPU's row, from the cache if it has them."""
    identity = _identity()
    try:
        path = _cache_path(identity)
    except RuntimeError:  # no home directory
        path = None
    busy = _is_busy()
    cached = None if path is None else _read(path, identity)
    if cached is not None and (busy or not cached["busy"]):
        return cached["peaks"]
    peaks = _measure(identity, busy=busy)
    _write(path, {"identity": identity, "busy": busy, "peaks": peaks})
    return peaks


def _monotonic_peaks(peaks: Mapping[str, float]) -> dict[str, float]:
    """Returns peaks in which a narrower dtype is at least as fast as a wider one.

    A product of narrow operands can always be computed in the wider dtype. XLA's own narrow products are slower on CPUs
    without instructions for them, and a peak that kernels exceed would give an MFU above 100%.
    """
    found: dict[str, float] = {}
    highest = 0.0
    for operand, _ in _PRODUCTS:
        if operand.name in peaks:
            highest = max(highest, peaks[operand.name])
            found[operand.name] = highest
    return found


def _identity() -> dict[str, str | int]:
    """Returns the settings that a measurement depends on."""
    return {
        "cpu": machine.cpu_model(),
        "cores": machine.usable_cores(),
        "jax": jax.__version__,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def _is_busy() -> bool:
    """Returns whether more than half of the cores were in use during the last minute."""
    try:
        return os.getloadavg()[0] > machine.usable_cores() / 2
    except (AttributeError, OSError):  # Some systems do not report the load.
        return False


def _cache_path(identity: Mapping[str, Any]) -> Path:
    # Versions of stack-core that measure other fields, or in another way, write separate files.
    content = {"identity": identity, "fields": sorted(_MEASURED), "version": 2}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
    return user_cache_dir() / "chips" / f"cpu-{digest}.json"


def _read(path: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the cached measurement; None without a valid one."""
    try:
        content = json.loads(path.read_bytes())
        _check(content, identity)
    except OSError:
        return None
    except ValueError as error:  # includes JSONDecodeError and UnicodeDecodeError
        warnings.warn(
            f"The CPU's measurement in {str(path)!r} is damaged and is repeated: {error}",
            ChipCacheWarning,
            stacklevel=3,
        )
        return None
    return content


def _check(content: Any, identity: Mapping[str, Any]) -> None:
    """Raises ValueError unless `content` has the form that `measured_cpu` writes."""
    if not isinstance(content, dict) or content.keys() != {"identity", "busy", "peaks"}:
        raise ValueError("it does not hold one measurement.")
    if content["identity"] != identity:
        raise ValueError(f"it is of {content['identity']}, not of {identity}.")
    peaks = content["peaks"]
    if not isinstance(peaks, dict) or peaks.keys() != set(_MEASURED):
        raise ValueError("its fields are not the measured ones.")
    if not isinstance(peaks["peak_flops"], dict):
        raise ValueError(f"its peaks are {peaks['peak_flops']!r}.")
    rates = [peaks["hbm_bandwidth_bytes_s"], *peaks["peak_flops"].values()]
    if not all(isinstance(rate, float) and rate > 0 for rate in rates):
        raise ValueError(f"its rates {rates} are not all positive.")


def _write(path: Path | None, content: Mapping[str, Any]) -> None:
    try:
        if path is None:
            raise OSError("there is no home directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        # Renamed once it is complete, because other processes may read the file at any time.
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(content, file, indent=2)
            Path(temporary).replace(path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        warnings.warn(
            f"The CPU's measurement cannot be saved and is repeated at every start: {error}. "
            "Set XDG_CACHE_HOME to a writable folder.",
            ChipCacheWarning,
            stacklevel=3,
        )


def _measure(identity: Mapping[str, Any], *, busy: bool) -> dict[str, Any]:
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise HardwareError(f"JAX has no CPU to measure: {error} Add cpu to JAX_PLATFORMS.") from error
    # The peaks may first be read while a function is traced, where array operations would become part of the trace.
    with jax.ensure_compile_time_eval(), jax.default_device(device):
        peaks = {operand.name: _product_flops(operand, result) for operand, result in _PRODUCTS}
        bandwidth_bytes_s = _bandwidth_bytes_s()
    state = "busy with other work" if busy else "quiet"
    where = f"{identity['cores']} cores of {identity['cpu']}"
    return {
        "peak_flops": _monotonic_peaks({dtype: peak for dtype, peak in peaks.items() if peak is not None}),
        "hbm_bandwidth_bytes_s": bandwidth_bytes_s,
        "provenance": f"measured on {where}, {state}, with jax {identity['jax']}",
    }


def _product_flops(operand: np.dtype[Any], result: np.dtype[Any]) -> float | None:
    """Measures the best rate of a square product in FLOP/s; None for dtypes that XLA does not support."""

    @jax.jit
    def product(x: jax.Array) -> jax.Array:
        return jnp.matmul(x, x, preferred_element_type=result)

    best = 0.0
    for size in _PRODUCT_SIZES:
        flops = 2.0 * size**3
        # The rate of the smaller size shows whether the next one would take too long.
        if best and flops / best > _PRODUCT_BUDGET_S:
            break
        x = jnp.ones((size, size), operand)
        try:
            best = max(best, flops / _best_s(lambda x=x: product(x), _PRODUCT_BUDGET_S))
        except jax.errors.JaxRuntimeError:  # The compiler does not support the product, so its peak stays unknown.
            return None
    return best


def _bandwidth_bytes_s() -> float:
    """Measures the bytes read and written per second by the best pass that updates an array in place."""
    # In place, because new memory would also measure the page faults of its first use.
    increment = jax.jit(lambda x: x + np.float32(1), donate_argnums=0)
    x = jnp.zeros(_COPY_BYTES // 4, np.float32)

    def once() -> jax.Array:
        nonlocal x
        x = increment(x)
        return x

    # Each byte is read and written.
    return 2 * _COPY_BYTES / _best_s(once, _COPY_BUDGET_S)


def _best_s(function: Callable[[], jax.Array], budget_s: float) -> float:
    """Returns the shortest wall time of at least three calls after a warm-up call, within about `budget_s`."""
    function().block_until_ready()
    durations_s: list[float] = []
    while len(durations_s) < 3 or sum(durations_s) < budget_s:
        started_s = time.perf_counter()
        function().block_until_ready()
        durations_s.append(time.perf_counter() - started_s)
    return min(durations_s)


def _last_level_cache_bytes() -> int | None:
    try:
        return os.sysconf("SC_LEVEL3_CACHE_SIZE") or None
    except (AttributeError, OSError, ValueError):
        return None
