"""The row of a device is found by its kind; hardware without a row has unknown peaks, not zero."""

import dataclasses
from dataclasses import dataclass

import jax
import pytest

from stack_core.abi.errors import HardwareError
from stack_core.abi.plugins import registries
from stack_core.abi.registry import Entry, Registry
from stack_core.chips import Chip, chip_of, count_units, current_chip, devices

CHIP = Chip(
    kind="x1",
    unit="device",
    peak_flops={"bfloat16": 1e15},
    hbm_bytes=2**37,
    hbm_bandwidth_bytes_s=3e12,
    on_chip_bytes=2**25,
    link_bandwidth_bytes_s=4e11,
    provenance="made up",
)


@dataclass(frozen=True)
class Device:
    """What chips read of a `jax.Device`."""

    device_kind: str
    process_index: int = 0
    coords: tuple[int, ...] = ()

    def memory_stats(self):
        return {"bytes_limit": 123} if self.device_kind == "GPU with statistics" else None


@pytest.fixture
def register(monkeypatch):
    """Puts rows, as (name, target, details), in the place of the registered ones."""

    def rows(*rows):
        entries = {name: Entry(name, target, "test", details) for name, target, details in rows}
        registry = Registry("chips", lambda: (entries, {}))
        monkeypatch.setitem(registries._by_kind, "chips", registry)
        devices._row.cache_clear()

    yield rows
    devices._row.cache_clear()


def test_a_row_claims_devices_by_its_name_or_by_patterns(register):
    register(
        ("x1", CHIP, {}), ("x2", lambda: dataclasses.replace(CHIP, kind="x2"), {"device_kinds": ("Maker X2*", "X2")})
    )
    assert chip_of(Device("x1")) is CHIP
    assert chip_of(Device("Maker X2 80GB")).kind == chip_of(Device("X2")).kind == "x2"
    assert chip_of(Device("x2")).peak_flops == {}


def test_a_row_is_made_once(register):
    calls = []
    register(("x1", lambda: calls.append(1) or CHIP, {}))
    assert chip_of(Device("x1")) is chip_of(Device("x1"))
    assert calls == [1]


def test_a_device_without_a_row_has_no_peak(register):
    register()
    chip = chip_of(Device("GPU with statistics"))
    assert chip == dataclasses.replace(chip, kind="GPU with statistics", hbm_bytes=123, hbm_bandwidth_bytes_s=None)
    assert chip.peak_flops == {}
    assert "no row is registered" in chip.provenance
    assert chip_of(Device("other")).hbm_bytes is None


def test_two_rows_for_one_device_are_both_named(register):
    register(("x1", CHIP, {}), ("y", CHIP, {"device_kinds": ("x*",)}))
    with pytest.raises(HardwareError, match="'x1' and 'y' both claim devices of kind 'x1'"):
        chip_of(Device("x1"))


def test_a_row_that_is_no_chip_is_an_error(register):
    register(("x1", lambda: {"peak": 1}, {}))
    with pytest.raises(HardwareError, match="chip 'x1' is a dict; expected a Chip"):
        chip_of(Device("x1"))


def test_a_backend_that_does_not_start_says_what_to_do(monkeypatch):
    def devices():
        raise RuntimeError("Unable to initialize backend 'cuda'.")

    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(HardwareError, match=r"Unable to initialize backend 'cuda'\. Correct JAX_PLATFORMS, or install"):
        current_chip()


def test_the_current_chip_is_that_of_the_first_device(register):
    register((jax.devices()[0].device_kind, CHIP, {}))
    assert current_chip() is CHIP


def test_chips_are_values():
    assert hash(CHIP) == hash(dataclasses.replace(CHIP))
    assert dataclasses.replace(CHIP, peak_flops={}) != CHIP


@pytest.mark.parametrize(
    ("unit", "devices", "expected"),
    [
        ("device", [Device("x")] * 4, 4),
        ("core", [Device("x")] * 4, 4),
        ("chip", [Device("cpu")] * 8, 1),
        ("chip", [Device("cpu", 0), Device("cpu", 0), Device("cpu", 1)], 2),
        ("chip", [Device("x", 0, (0, 0)), Device("x", 0, (0, 0)), Device("x", 0, (0, 1)), Device("x", 1, (0, 2))], 3),
    ],
)
def test_units_are_counted_as_the_row_counts_them(unit, devices, expected):
    assert count_units(dataclasses.replace(CHIP, unit=unit), devices) == expected
