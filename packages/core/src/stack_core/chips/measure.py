"""The CPU's row, whose peaks are measured when they are first read, once a machine, and kept in the user's cache.

Measured are the best of several matrix products a dtype, of up to three sizes, and of several passes over an array
that no cache holds. It takes one or two seconds. A measurement that was taken while the machine was busy is replaced
at the first start at which it is not.
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

# Operands and accumulator: narrow products with wide results are the fastest that XLA has on a CPU.
_PRODUCTS = (
    (np.dtype(np.float32), np.dtype(np.float32)),
    (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)),
    (np.dtype(np.int8), np.dtype(np.int32)),
)
_PRODUCT_SIZES = (512, 1024, 2048)
_PRODUCT_BUDGET_S = 0.15
_COPY_BYTES = 256 * 2**20
_COPY_BUDGET_S = 0.25
_MEASURED = ("peak_flops", "hbm_bandwidth_bytes_s", "provenance")


class ChipCacheWarning(UserWarning):
    """The CPU's measurement could not be read from the cache, or not be kept there."""


class _Cpu(Chip):
    """The CPU of this process: its peaks are measured, or read from the cache, when one of them is read."""

    def __getattr__(self, name: str) -> Any:
        if name not in _MEASURED:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        for measured, value in _measurement().items():
            object.__setattr__(self, measured, value)
        return self.__dict__[name]

    def __hash__(self) -> int:
        return hash((self.kind, self.model))


@functools.cache
def measured_cpu() -> Chip:
    """The CPU of this process, with the cores it may use; its peaks are measured once they are read.

    The cache of measurements is one file a CPU model, number of usable cores, version of JAX and `XLA_FLAGS`, under
    `$XDG_CACHE_HOME/stack/chips`. One that is damaged, or cannot be written, is a `ChipCacheWarning`. To read a peak
    raises HardwareError where JAX was told to do without its CPU backend.
    """
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


def _with_wider_products(peaks: Mapping[str, float]) -> dict[str, float]:
    """Returns peaks that a narrower dtype never has below a wider one.

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
    """What a measurement is valid for."""
    return {
        "cpu": machine.cpu_model(),
        "cores": machine.usable_cores(),
        "jax": jax.__version__,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def _is_busy() -> bool:
    """Whether more than half of the cores were in use during the last minute."""
    try:
        return os.getloadavg()[0] > machine.usable_cores() / 2
    except (AttributeError, OSError):  # not every system tells
        return False


def _cache_path(identity: Mapping[str, Any]) -> Path:
    # A core that measures other fields, or in another way, writes separate files.
    content = {"identity": identity, "fields": sorted(_MEASURED), "version": 2}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
    return user_cache_dir() / "chips" / f"cpu-{digest}.json"


def _read(path: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """The cached measurement, or None where there is none that can be used."""
    try:
        content = json.loads(path.read_bytes())
        _check(content, identity)
    except OSError:
        return None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are among them
        warnings.warn(
            f"The CPU's measurement in {str(path)!r} is damaged and is taken again: {error}",
            ChipCacheWarning,
            stacklevel=3,
        )
        return None
    return content


def _check(content: Any, identity: Mapping[str, Any]) -> None:
    """Raises ValueError unless `content` is what `measured_cpu` writes."""
    if not isinstance(content, dict) or content.keys() != {"identity", "busy", "peaks"}:
        raise ValueError("it does not hold one measurement.")
    if content["identity"] != identity:
        raise ValueError(f"it is of {content['identity']}, not of {identity}.")
    peaks = content["peaks"]
    if not isinstance(peaks, dict) or peaks.keys() != set(_MEASURED):
        raise ValueError("its fields are not those that are measured.")
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
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(content, file, indent=2)
            Path(temporary).replace(path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        warnings.warn(
            f"The CPU's measurement cannot be kept and is taken again at every start: {error}. "
            "Set XDG_CACHE_HOME to a folder that can be written.",
            ChipCacheWarning,
            stacklevel=3,
        )


def _measure(identity: Mapping[str, Any], *, busy: bool) -> dict[str, Any]:
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise HardwareError(f"JAX has no CPU to measure: {error} Add cpu to JAX_PLATFORMS.") from error
    # The first call may come from a function that is being traced, where array operations would join the trace.
    with jax.ensure_compile_time_eval(), jax.default_device(device):
        peaks = {operand.name: _product_flops(operand, result) for operand, result in _PRODUCTS}
        bandwidth_bytes_s = _bandwidth_bytes_s()
    state = "busy with other work" if busy else "quiet"
    where = f"{identity['cores']} cores of {identity['cpu']}"
    return {
        "peak_flops": _with_wider_products({dtype: peak for dtype, peak in peaks.items() if peak is not None}),
        "hbm_bandwidth_bytes_s": bandwidth_bytes_s,
        "provenance": f"measured on {where}, {state}, with jax {identity['jax']}",
    }


def _product_flops(operand: np.dtype[Any], result: np.dtype[Any]) -> float | None:
    """The best rate of a square product in FLOP/s, or None where XLA has none for these dtypes."""

    @jax.jit
    def product(x: jax.Array) -> jax.Array:
        return jnp.matmul(x, x, preferred_element_type=result)

    best = 0.0
    for size in _PRODUCT_SIZES:
        flops = 2.0 * size**3
        if best and flops / best > _PRODUCT_BUDGET_S:
            break
        x = jnp.ones((size, size), operand)
        try:
            best = max(best, flops / _best_s(lambda x=x: product(x), _PRODUCT_BUDGET_S))
        except jax.errors.JaxRuntimeError:  # the compiler has no such product; a missing peak says so
            return None
    return best


def _bandwidth_bytes_s() -> float:
    """Bytes read and written per second by the best pass that changes an array in place."""
    increment = jax.jit(lambda x: x + np.float32(1), donate_argnums=0)
    x = jnp.zeros(_COPY_BYTES // 4, np.float32)

    def once() -> jax.Array:
        nonlocal x
        x = increment(x)
        return x

    return 2 * _COPY_BYTES / _best_s(once, _COPY_BUDGET_S)


def _best_s(function: Callable[[], jax.Array], budget_s: float) -> float:
    """The shortest wall time to completion of at least three calls after the first, within about `budget_s`."""
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
