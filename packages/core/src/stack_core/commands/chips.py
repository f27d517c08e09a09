"""`stack chips`: specifications of known accelerators and CPUs, with the devices of this machine marked."""

import collections
import dataclasses
import json as json_format
import sys
import threading
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from stack_core.abi.errors import HardwareError
from stack_core.abi.plugins import registries
from stack_core.abi.registry import Entry
from stack_core.chips import Chip
from stack_core.chips.devices import row_name
from stack_core.commands.tables import print_table

__all__ = ["chips"]

_QUIET_S = 0.5
_COLUMNS = (
    ("bf16", "TF/s"),
    ("int8", "TO/s"),
    ("fp8", "TF/s"),
    ("memory", "GiB"),
    ("memory", "GB/s"),
    ("on chip", "MiB"),
    ("links", "GB/s"),
)


def chips(*, json: Annotated[bool, Parameter(negative=())] = False) -> None:
    """List chips: dense peaks, memory, bandwidths and their sources. Devices of this machine are marked.

    Rows that need a measurement, such as the CPU's, are measured once per machine, if the device is present.

    Args:
      json: print machine-readable results.
    """
    here = _devices()
    names = {kind: row_name(kind) for kind in here}
    rows = [(entry, _chip(entry, is_local=entry.name in names.values())) for entry in registries.chips.entries()]
    if json:
        devices = [{"kind": kind, "count": count, "chip": names[kind]} for kind, count in here.items()]
        print(json_format.dumps({"devices": devices, "chips": [_record(*row) for row in rows]}, indent=2))
        return
    counts = {name: here[kind] for kind, name in names.items() if name is not None}
    console = Console(soft_wrap=True)
    print_table(_table(rows, counts))
    console.print("All dense peaks in TFLOP/s by operand dtype, with their sources:", highlight=False)
    for row in rows:
        console.print(_line(*row), style="dim", highlight=False)
    for kind in (kind for kind, name in names.items() if name is None):
        console.print(
            f"{here[kind]} x {kind!r} of this machine has no chip row, so its peaks are unknown; "
            "a plugin can add one with `stack_register_chips`.",
            highlight=False,
        )


def _devices() -> dict[str, int]:
    """Counts JAX's devices by kind; prints the error and returns {} if JAX does not start."""
    import jax

    try:
        return dict(collections.Counter(device.device_kind for device in jax.devices()))
    except (RuntimeError, AssertionError) as error:
        reason = f": {error}" if str(error) else "."
        _say(f"JAX finds no device{reason} `stack doctor` shows the cause.")
        return {}


def _chip(entry: Entry, *, is_local: bool) -> Chip | None:
    target = registries.chips[entry.name]
    if callable(target) and is_local:
        hint = threading.Timer(_QUIET_S, _say, [f"measuring {entry.name!r}, once per machine ..."])
        hint.start()
        try:
            target = target()
        finally:
            hint.cancel()
    if callable(target):
        return None
    if not isinstance(target, Chip):
        raise HardwareError(f"The registered chip {entry.name!r} is a {type(target).__name__}; expected a Chip.")
    return target


def _record(entry: Entry, chip: Chip | None) -> dict[str, Any]:
    return {
        "name": entry.name,
        "plugin": entry.provider,
        "device_kinds": list(entry.details.get("device_kinds", (entry.name,))),
        "chip": None if chip is None else dataclasses.asdict(chip),
    }


def _table(rows: list[tuple[Entry, Chip | None]], counts: dict[str, int]) -> Table:
    # Fits into 80 columns without truncated cells.
    table = Table("chip", "here", "unit", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for quantity, unit in _COLUMNS:
        table.add_column(f"{quantity}\n{unit}", justify="right")
    for entry, chip in rows:
        here = str(counts.get(entry.name, ""))
        if chip is None:
            table.add_row(entry.name, here, "", "?")
            continue
        table.add_row(
            entry.name,
            here,
            chip.unit,
            *(_number(chip.peak_flops.get(dtype), 1e12) for dtype in ("bfloat16", "int8", "float8_e4m3fn")),
            _number(chip.hbm_bytes, 2**30),
            _number(chip.hbm_bandwidth_bytes_s, 1e9),
            _number(chip.on_chip_bytes, 2**20),
            _number(chip.link_bandwidth_bytes_s, 1e9),
            style="bold" if here else "",
        )
    return table


def _line(entry: Entry, chip: Chip | None) -> str:
    if chip is None:
        return f"{entry.name}: measured on the machine itself."
    peaks = ", ".join(f"{dtype} {_number(flops, 1e12)}" for dtype, flops in chip.peak_flops.items())
    return f"{entry.name}: {peaks}. {chip.provenance}."


def _say(message: str) -> None:
    print(f"stack: {message}", file=sys.stderr, flush=True)


def _number(amount: int | float | None, unit: int | float) -> str:
    """Formats an amount with at least three digits; "-" means unknown."""
    if amount is None:
        return "-"
    value = amount / unit
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
