"""The registered rows: each is found by its devices' kinds, and its numbers fit together."""

import json
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from stack_core.abi.plugins import registries
from stack_core.chips import Chip, chip_of, count_units
from stack_core.chips.devices import row_name
from stack_core.plugin import _CHIPS

ACCELERATORS = tuple(name for name in _CHIPS if name != "cpu")
TPUS = tuple(name for name in ACCELERATORS if _CHIPS[name][0].startswith("tpus"))
GPUS = tuple(name for name in ACCELERATORS if _CHIPS[name][0].startswith("gpus"))
GIB = 2**30


class Device:
    """What chips read of a `jax.Device`."""

    def __init__(self, device_kind, coords=(), process_index=0):
        self.device_kind, self.coords, self.process_index = device_kind, coords, process_index

    def memory_stats(self):
        return None


@pytest.mark.parametrize("name", ACCELERATORS)
def test_a_row_is_a_chip_of_its_name_with_every_number(name):
    chip = registries.chips[name]
    assert isinstance(chip, Chip)
    assert chip.kind == name
    assert chip.provenance
    for number in (chip.hbm_bytes, chip.hbm_bandwidth_bytes_s, chip.on_chip_bytes, chip.link_bandwidth_bytes_s):
        assert number > 0


@pytest.mark.parametrize("name", ACCELERATORS)
def test_peaks_are_of_dtypes_that_jax_has_and_narrower_is_not_slower(name):
    peaks = dict(registries.chips[name].peak_flops)
    assert peaks.pop("float32/highest") < peaks["float32"] <= peaks["bfloat16"]
    bits = {dtype: _bits(dtype) for dtype in peaks}
    assert all(peaks[a] >= peaks[b] for a in peaks for b in peaks if bits[a] < bits[b])


def _bits(dtype):
    try:
        return np.dtype(dtype).itemsize * 8
    except TypeError:
        info = ml_dtypes.iinfo if "int" in dtype else ml_dtypes.finfo
        return info(getattr(ml_dtypes, dtype)).bits


@pytest.mark.parametrize("name", GPUS)
def test_gpus_have_the_ratios_of_dense_tensor_cores(name):
    peaks = registries.chips[name].peak_flops
    assert peaks["float16"] == peaks["bfloat16"]
    assert peaks["bfloat16"] / peaks["float32"] == pytest.approx(2, rel=0.03)
    assert peaks["int8"] / peaks["bfloat16"] == pytest.approx(2, rel=0.01)
    assert peaks.get("float8_e4m3fn", peaks["int8"]) == peaks["int8"]
    assert ("float8_e4m3fn" in peaks) is not name.startswith("a100")


@pytest.mark.parametrize("name", TPUS)
def test_tpus_have_the_ratios_of_their_matrix_units(name):
    peaks = registries.chips[name].peak_flops
    assert "float16" not in peaks  # they would have to convert it
    assert peaks["float32/highest"] == peaks["bfloat16"] / 6
    if name not in ("v4", "v7x"):
        assert peaks["int8"] / peaks["bfloat16"] == pytest.approx(2, rel=0.01)
        assert peaks["int4"] / peaks["bfloat16"] == pytest.approx(4, rel=0.01)


@pytest.mark.parametrize(
    ("name", "nominal_gib"),
    [("a100-40gb", 40), ("a100-80gb", 80), ("h100", 80), ("h200", 141), ("b200", 180), ("v5p", 96), ("v7x", 96)],
)
def test_memory_is_what_programs_can_have_of_the_nominal_size(name, nominal_gib):
    assert 0.98 * nominal_gib * GIB <= registries.chips[name].hbm_bytes <= nominal_gib * GIB


def test_a_flop_costs_more_bandwidth_than_any_chip_has():
    """Bytes a bfloat16 FLOP lie between 1/120 and 1/600 for every data-center chip: a wrong unit would stand out."""
    for name in ACCELERATORS:
        chip = registries.chips[name]
        assert 120 < chip.peak_flops["bfloat16"] / chip.hbm_bandwidth_bytes_s < 600
        assert 3 < chip.hbm_bandwidth_bytes_s / chip.link_bandwidth_bytes_s < 70


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, (_, *kinds) in _CHIPS.items() for kind in kinds])
def test_a_device_kind_belongs_to_one_row(name, kind):
    assert row_name(kind) == name
    if name != "cpu":
        assert chip_of(Device(kind)).kind == name


@pytest.mark.parametrize(
    "kind",
    ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H200 NVL", "NVIDIA H100 NVL", "NVIDIA GB200"],
)
def test_a_relative_is_not_taken_for_the_chip_itself(kind):
    assert row_name(kind) is None
    assert chip_of(Device(kind)).peak_flops == {}


def test_the_two_devices_of_a_v7x_chip_are_two_units_of_half_a_chip():
    devices = [Device("TPU7x", (x, 0, 0)) for x in range(4) for _ in range(2)]
    chip = chip_of(devices[0])
    assert count_units(chip, devices) == 8
    assert count_units(chip, devices) * chip.peak_flops["bfloat16"] == 4 * 2307e12
    assert count_units(chip, devices[:1]) * chip.hbm_bytes == 96 * GIB


@pytest.mark.parametrize("name", ["v4", "v5p"])
def test_cores_that_are_devices_of_their_own_share_a_chip(name):
    whole = [Device(_CHIPS[name][1], (x, 0, 0)) for x in range(4)]
    split = [device for device in whole for _ in range(2)]
    assert count_units(chip_of(whole[0]), whole) == count_units(chip_of(split[0]), split) == 4


@pytest.mark.tpu_aot
def test_device_kinds_are_those_of_libtpu():
    topologies = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "v7x": "tpu7x:2x2x1"}
    code = (
        "import json, sys; from jax.experimental import topologies\n"
        "from stack_core.chips import chip_of, count_units\n"
        "for name in sys.argv[1:]:\n"
        "    devices = topologies.get_topology_desc(platform='tpu', topology_name=name).devices\n"
        "    chip = chip_of(devices[0]); print(json.dumps([chip.kind, count_units(chip, devices), len(devices)]))"
    )
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *topologies.values()],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [kind for kind, _, _ in found] == list(topologies)
    assert [units for _, units, _ in found] == [4, 4, 4, 4, 8]
    assert found[-1] == ["v7x", 8, 8]
