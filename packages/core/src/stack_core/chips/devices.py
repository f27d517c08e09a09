"""Chip registry: one row per kind of hardware, and the row of a JAX device.

The hook `stack_register_chips` registers a row with `registry.add("h200", target, device_kinds=("NVIDIA H200*",))`. The
target is a `Chip`, or a function without arguments that measures one. `device_kinds` are shell patterns for JAX's
`device.device_kind`; the default is the row's name.
"""

import fnmatch
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stack_core.abi.chips import Chip
from stack_core.abi.errors import HardwareError
from stack_core.abi.plugins import registries

if TYPE_CHECKING:
    import jax

__all__ = ["chip_of", "count_units", "current_chip", "row_name"]


def current_chip() -> Chip:
    """Returns the chip of the first device of JAX's default backend, as in `chip_of`.

    Raises:
      HardwareError: JAX finds no device, or two rows claim this one.
    """
    import jax

    try:
        device = jax.devices()[0]
    except RuntimeError as error:
        raise HardwareError(
            f"JAX cannot use any device: {error} Correct JAX_PLATFORMS, or install the extra for your hardware: "
            "stack-core[tpu] or stack-core[cuda13]."
        ) from error
    return chip_of(device)


def chip_of(device: "jax.Device") -> Chip:
    """Returns the chip that a device is, or is part of.

    Hardware without a row has no peak rates and no bandwidths. Unknown is not zero: callers that divide by them must
    report them as unknown. The first time that a CPU's peak is read may take one or two seconds, see
    `stack_core.chips.measure`.

    Raises:
      HardwareError: two rows claim the device, or its row is not a `Chip`.
    """
    return _row(device.device_kind) or _unknown(device)


def count_units(chip: Chip, devices: Sequence["jax.Device"]) -> int:
    """Counts the units of `chip` that the devices make up; their total peak is this number times the chip's peak."""
    if chip.unit != "chip":
        return len(devices)
    # All CPU devices of a process are one unit. Devices of one TPU chip share their coordinates.
    return len({(device.process_index, tuple(getattr(device, "coords", ()))) for device in devices})


def row_name(device_kind: str) -> str | None:
    """Returns the name of the row for a kind of device, or None; the row is not measured.

    Raises:
      HardwareError: two rows claim this kind.
    """
    names = [entry.name for entry in registries.chips.entries() if _matches(device_kind, entry.name, entry.details)]
    if len(names) > 1:
        raise HardwareError(
            f"The chips {' and '.join(map(repr, names))} both claim devices of kind {device_kind!r}. "
            "Block the plugin of one with STACK_DISABLE_PLUGINS; `stack plugins` lists them."
        )
    return names[0] if names else None


# A row may be a measurement, and every op asks for the row of its device.
@functools.cache
def _row(device_kind: str) -> Chip | None:
    name = row_name(device_kind)
    if name is None:
        return None
    target = registries.chips[name]
    chip = target() if callable(target) else target
    if not isinstance(chip, Chip):
        raise HardwareError(f"The registered chip {name!r} is a {type(chip).__name__}; expected a Chip.")
    return chip


def _matches(device_kind: str, name: str, details: Mapping[str, Any]) -> bool:
    return any(fnmatch.fnmatchcase(device_kind, pattern) for pattern in details.get("device_kinds", (name,)))


def _unknown(device: "jax.Device") -> Chip:
    statistics = device.memory_stats() or {}
    return Chip(
        kind=device.device_kind,
        unit="device",
        peak_flops={},
        hbm_bytes=statistics.get("bytes_limit"),
        hbm_bandwidth_bytes_s=None,
        on_chip_bytes=None,
        link_bandwidth_bytes_s=None,
        provenance=f"no row is registered for {device.device_kind!r}; memory as JAX reports it",
    )
