"""The CPU is measured once a machine; no damage to the cache, and no place without one, stops a run."""

import dataclasses
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from stack_core import ops
from stack_core.chips import machine, measure, use_chip
from stack_core.chips.measure import ChipCacheWarning, measured_cpu


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Small and quick measurements, a cache of the test's own, and a machine at rest."""
    monkeypatch.setattr(measure, "_PRODUCT_SIZES", (32, 64))
    monkeypatch.setattr(measure, "_PRODUCT_BUDGET_S", 0.001)
    monkeypatch.setattr(measure, "_COPY_BYTES", 2**20)
    monkeypatch.setattr(measure, "_COPY_BUDGET_S", 0.001)
    monkeypatch.setattr(measure, "_is_busy", lambda: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def measured():
    """`measured_cpu` as a new process would call it, once its peaks are read."""
    chip = measured_cpu.__wrapped__()
    assert chip.hbm_bandwidth_bytes_s > 0
    return chip


def test_what_a_cpu_is_costs_no_measurement(measurements):
    chip = measured_cpu.__wrapped__()
    assert (chip.kind, chip.unit, chip.link_bandwidth_bytes_s) == ("cpu", "chip", None)
    assert {chip: 1}[chip] == 1
    assert not measurements
    assert chip.peak_flops == measurements[0]["peak_flops"]
    assert not hasattr(chip, "peak_flaps")
    assert len(measurements) == 1


def test_choosing_for_an_op_measures_nothing(measurements):
    with use_chip(measured_cpu.__wrapped__()):
        ops.explain(ops.norm, jnp.ones((64, 512)))
        ops.explain(lambda x: ops.linear(x, x), jnp.ones((8, 8)))
    assert not measurements


def test_it_can_be_replaced_and_kept_as_any_chip():
    chip = measured()
    assert dataclasses.replace(chip, model="another").peak_flops == chip.peak_flops
    assert dataclasses.asdict(chip)["hbm_bandwidth_bytes_s"] == chip.hbm_bandwidth_bytes_s
    assert pickle.loads(pickle.dumps(chip)) == chip


@pytest.fixture
def measurements(monkeypatch):
    """Counts measurements."""
    made = []
    real = measure._measure

    def counted(*args, **options):
        made.append(real(*args, **options))
        return made[-1]

    monkeypatch.setattr(measure, "_measure", counted)
    return made


def cache_file(tmp_path):
    (path,) = (tmp_path / "stack" / "chips").iterdir()
    return path


def test_the_row_has_what_a_cpu_can_be_asked():
    chip = measured()
    assert (chip.kind, chip.unit) == ("cpu", "chip")
    assert {"float32", "bfloat16", "int8"} >= chip.peak_flops.keys() >= {"float32"}
    assert all(1e6 < peak < 1e16 for peak in chip.peak_flops.values())
    assert chip.hbm_bandwidth_bytes_s > 1e6
    assert chip.hbm_bytes > 2**26
    assert chip.link_bandwidth_bytes_s is None
    assert f"{machine.usable_cores()} cores" in chip.provenance
    assert chip.model == f"{machine.cpu_model()}, {machine.usable_cores()} cores"
    assert jax.__version__ in chip.provenance


def test_it_can_be_measured_while_a_function_is_traced():
    @jax.jit
    def traced(x):
        assert measured().peak_flops["float32"] > 0
        return x + 1

    assert traced(jnp.ones(())) == 2


def test_it_is_measured_once_a_machine(measurements, tmp_path):
    assert measured() == measured()
    assert measured().peak_flops == measurements[0]["peak_flops"]
    assert len(measurements) == 1
    assert json.loads(cache_file(tmp_path).read_text())["identity"]["jax"] == jax.__version__


@pytest.mark.parametrize("part", ["cpu_model", "usable_cores", "XLA_FLAGS", "jax"])
def test_another_machine_version_or_setting_is_measured_anew(measurements, monkeypatch, part):
    measured()
    match part:
        case "cpu_model":
            monkeypatch.setattr(machine, "cpu_model", lambda: "another")
        case "usable_cores":
            monkeypatch.setattr(machine, "usable_cores", lambda: 999)
        case "XLA_FLAGS":
            monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " ")
        case "jax":
            monkeypatch.setattr(jax, "__version__", "0.0.1")
    measured()
    assert len(measurements) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"cores"', '"corps"'),
        lambda text: text.replace('"peak_flops"', '"peak_flaps"'),
        lambda text: text.replace('"float32": ', '"float32": -'),
        lambda text: json.dumps({**json.loads(text), "peaks": {**json.loads(text)["peaks"], "peak_flops": 3}}),
        lambda text: "\udc80",
    ],
    ids=["empty", "cut", "list", "identity", "field", "negative", "type", "bytes"],
)
def test_a_damaged_cache_is_named_and_replaced(measurements, tmp_path, damage):
    measured()
    path = cache_file(tmp_path)
    path.write_text(damage(path.read_text()), errors="surrogateescape")
    with pytest.warns(ChipCacheWarning, match=f"{path.name}' is damaged and is repeated"):
        chip = measured()
    assert measured() == chip
    assert chip.peak_flops == measurements[1]["peak_flops"]
    assert len(measurements) == 2


def test_a_cache_that_cannot_be_written_is_named_and_does_not_fail(measurements, monkeypatch, tmp_path):
    (tmp_path / "stack").write_text("a file where the folder should be")
    with pytest.warns(ChipCacheWarning, match=r"cannot be saved and is repeated at every start: .* Set XDG_CACHE_HOME"):
        assert measured().peak_flops == measurements[0]["peak_flops"]


def test_a_user_without_a_home_is_measured_too(monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    with pytest.warns(ChipCacheWarning, match="there is no home directory"):
        assert measured().kind == "cpu"


def test_nothing_but_the_measurement_is_left_in_the_cache(monkeypatch, tmp_path):
    measured()
    cache_file(tmp_path)

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    cache_file(tmp_path).unlink()
    monkeypatch.setattr(json, "dump", full)
    with pytest.warns(ChipCacheWarning, match="No space left on device"):
        measured()
    assert list((tmp_path / "stack" / "chips").iterdir()) == []


def test_what_was_measured_on_a_busy_machine_is_replaced_when_it_is_quiet(measurements, monkeypatch):
    monkeypatch.setattr(measure, "_is_busy", lambda: True)
    assert "busy" in measured().provenance
    measured()
    assert len(measurements) == 1
    monkeypatch.setattr(measure, "_is_busy", lambda: False)
    assert "quiet" in measured().provenance
    measured()
    assert len(measurements) == 2


def test_a_narrow_dtype_has_at_least_the_peak_of_a_wider_one():
    """On a CPU without bfloat16 instructions, XLA's bfloat16 products are slower than its float32 products."""
    assert measure._monotonic_peaks({"float32": 250.0, "bfloat16": 80.0, "int8": 300.0}) == {
        "float32": 250.0,
        "bfloat16": 250.0,
        "int8": 300.0,
    }
    assert measure._monotonic_peaks({"bfloat16": 80.0}) == {"bfloat16": 80.0}


def test_a_product_that_xla_does_not_have_has_no_peak(monkeypatch):
    def refuse(*args, **options):
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: unsupported operand type")

    monkeypatch.setattr(measure, "_best_s", refuse)
    assert measure._product_flops(*measure._PRODUCTS[1]) is None


def test_importing_measures_nothing_and_starts_no_backend():
    code = (
        "import stack_core.chips.measure, jax, os; "
        "jax.config.update('jax_num_cpu_devices', 2); assert jax.device_count() == 2; "
        "assert not os.listdir(os.environ['XDG_CACHE_HOME'])"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})


@pytest.mark.parametrize(("load", "busy"), [(0.4, False), (1.1, True)])
def test_a_machine_is_busy_when_half_of_it_is_in_use(monkeypatch, load, busy):
    monkeypatch.undo()
    monkeypatch.setattr(os, "getloadavg", lambda: (load * machine.usable_cores(), 0.0, 0.0))
    assert measure._is_busy() is busy
