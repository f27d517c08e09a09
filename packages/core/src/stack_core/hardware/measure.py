"""The CPU's row, measured once a machine and kept in the user's cache.

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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from stack_core import machine
from stack_core.errors import HardwareError
from stack_core.hardware.chips import Chip
from stack_core.user_cache import user_cache_dir

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


class ChipCacheWarning(UserWarning):
    """The CPU's measurement could not be read from the cache, or not be kept there."""


@functools.cache
def measured_cpu() -> Chip:
    """The CPU of this process, with the cores it may use; read from the cache or measured, never at import.

    The cache is one file a CPU model, number of usable cores, version of JAX and `XLA_FLAGS`, under
    `$XDG_CACHE_HOME/stack/chips`. One that is damaged, or cannot be written, is a `ChipCacheWarning`.

    Raises:
      HardwareError: JAX was told to do without its CPU backend.
    """
    identity = _identity()
    try:
        path = _cache_path(identity)
    except RuntimeError:  # no home directory
        path = None
    busy = _is_busy()
    cached = None if path is None else _read(path, identity)
    if cached is not None and (busy or not cached["busy"]):
        return Chip(**cached["chip"])
    chip = _measure(identity, busy=busy)
    _write(path, {"identity": identity, "busy": busy, "chip": asdict(chip)})
    return chip


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
    # A core whose rows have other fields keeps them in files of its own.
    content = {"identity": identity, "fields": sorted(Chip.__dataclass_fields__)}
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
    if not isinstance(content, dict) or content.keys() != {"identity", "busy", "chip"}:
        raise ValueError("it does not hold one measurement.")
    if content["identity"] != identity:
        raise ValueError(f"it is of {content['identity']}, not of {identity}.")
    chip = content["chip"]
    if not isinstance(chip, dict) or chip.keys() != set(Chip.__dataclass_fields__):
        raise ValueError("its fields are not those of a chip.")
    if not isinstance(chip["peak_flops"], dict):
        raise ValueError(f"its peaks are {chip['peak_flops']!r}.")
    rates = [chip["hbm_bandwidth_bytes_s"], *chip["peak_flops"].values()]
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


def _measure(identity: Mapping[str, Any], *, busy: bool) -> Chip:
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise HardwareError(f"JAX has no CPU to measure: {error} Add cpu to JAX_PLATFORMS.") from error
    # The first call may come from a function that is being traced, where array operations would join the trace.
    with jax.ensure_compile_time_eval(), jax.default_device(device):
        peaks = {operand.name: _product_flops(operand, result) for operand, result in _PRODUCTS}
        bandwidth_bytes_s = _bandwidth_bytes_s()
    state = "busy with other work" if busy else "quiet"
    return Chip(
        kind="cpu",
        unit="chip",
        peak_flops={dtype: peak for dtype, peak in peaks.items() if peak is not None},
        hbm_bytes=machine.memory_bytes(),
        hbm_bandwidth_bytes_s=bandwidth_bytes_s,
        on_chip_bytes=_last_level_cache_bytes(),
        link_bandwidth_bytes_s=None,
        model=f"{identity['cpu']}, {identity['cores']} cores",
        provenance=f"measured on {identity['cores']} cores of {identity['cpu']}, {state}, with jax {identity['jax']}",
    )


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
