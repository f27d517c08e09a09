"""What is expected of ops where they were measured, near it, and where nothing but peaks is known."""

import dataclasses

import jax.numpy as jnp
import pytest

import stack_kernels
from stack_core import ops
from stack_core.abi.errors import ArgumentError, UnknownName
from stack_core.abi.ops import OpImplementation
from stack_core.abi.plugins import registries
from stack_core.chips import Chip
from stack_kernels.expectations import expected
from stack_kernels.tuning.shapes import shape_of
from stack_kernels.tuning.sources import DamagedTableWarning
from stack_kernels.tuning.tables import Case, ChipName, Measurement, Table

CHIP = Chip(
    kind="toy",
    unit="device",
    peak_flops={"bfloat16": 1e12},
    hbm_bytes=None,
    hbm_bandwidth_bytes_s=1e11,
    on_chip_bytes=None,
    link_bandwidth_bytes_s=None,
    provenance="by hand",
)


def shapes(rows):
    return {"x": (rows, 512), "weight": (512, 2048)}


def shape(rows):
    x, weight = (jnp.zeros(size, jnp.bfloat16) for size in shapes(rows).values())
    return shape_of(ops.explain(ops.linear, x, weight)[0].call)


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """Writes a table of the reference's times by number of rows, as the only one."""

    def write(chip=CHIP, **fields):
        def measurement(rows, median_s):
            versions = {"jax": "0.12.0", "jaxlib": "0.12.0"}
            settings = {"outcome": "measured", "rounds": 15, "date": "2026-02-03T00:00:00+00:00", "versions": versions}
            case = Case(shape(rows), "forward")
            kept = {"implementation": "reference", "config": None, **settings, **fields}
            return Measurement(case=case, median_s=median_s, **kept)

        def of(seconds_of_rows):
            found = tuple(measurement(rows, seconds) for rows, seconds in seconds_of_rows.items())
            Table(ChipName.of(chip), found).write(tmp_path / "toy.json")

        return of

    monkeypatch.setenv("STACK_TUNED_TABLES", str(tmp_path))
    return write


def of(name, rows):
    return next(row for row in rows if row.implementation == name)


def test_a_measurement_at_the_same_size_is_what_is_expected(measure):
    measure()({2048: 5e-3, 256: 1e-3})
    row = of("reference", expected("linear", shapes(2049), CHIP))
    assert (row.seconds, row.basis, row.refusal) == (5e-3, "measured", "")
    assert (
        "rows=2048" in row.provenance and "(forward, 15 rounds, jax 0.12.0, 2026-02-03) in toy.json" in row.provenance
    )
    assert str(row).startswith("reference (chosen): takes 5 ms, measured at ")


def test_between_sizes_the_cost_model_predicts(measure):
    measure()({2048: 8e-3, 512: 2e-3})
    row = of("reference", expected("linear", shapes(1024), CHIP))
    assert row.basis == "predicted"
    assert row.seconds == pytest.approx(4e-3, rel=0.1)
    assert "by the cost model from 2 measurements, the nearest measured at" in row.provenance
    assert "about 4" in str(row)


def test_a_prediction_names_measurements_of_the_config_that_it_is_of(measure, tmp_path):
    measure(config={"tile": 2})({800: 4e-2})
    (tmp_path / "toy.json").rename(tmp_path / "slow.json")
    measure(config={"tile": 1})({2048: 8e-3, 512: 2e-3})
    row = of("reference", expected("linear", shapes(1024), CHIP))
    assert (row.basis, row.config) == ("predicted", {"tile": 1})
    assert "the nearest measured at" in row.provenance and "rows=800" not in row.provenance


@pytest.mark.parametrize(
    ("chip", "fields"),
    [
        (dataclasses.replace(CHIP, model="another"), {}),
        (CHIP, {"outcome": "rejected", "reason": "off by 1"}),
        (CHIP, {"implementation": "other"}),
    ],
    ids=["another chip's", "rejected", "another implementation's"],
)
def test_without_a_measurement_there_is_the_bound_of_the_peaks(measure, chip, fields):
    measure(chip, **fields)({2048: 5e-3})
    row = of("reference", expected("linear", shapes(2048), CHIP))
    assert row.basis == "bound"
    assert row.seconds == pytest.approx(2 * 2048 * 512 * 2048 / 1e12)
    assert str(row).startswith(
        "reference (chosen): at least 4.29 ms, by its roofline of 1 TFLOP/s bfloat16; no measure"
    )
    assert "by hand" in row.provenance


def test_without_peaks_nothing_is_known(measure):
    measure()({})
    row = of("reference", expected("linear", shapes(2048), CHIP, dtype="float32"))
    assert (row.seconds, row.basis) == (None, "unknown")
    assert "supported, time not known: no measurement, and no row of peaks of toy for its dtype" in str(row)


def test_what_does_not_support_the_call_says_why(measure):
    measure()({})
    rows = expected("linear", shapes(2048), "h200")
    assert of("xla_cpu", rows).refusal.startswith("it is for cpu, and the target is gpu")
    assert "xla_cpu: not supported: it is for cpu" in str(rows)
    refused = [bool(row.refusal) for row in rows]
    assert refused == sorted(refused), "they come last"


def test_directions_are_apart(measure, monkeypatch):
    measure()({2048: 5e-3})
    forward_only = OpImplementation("linear", "forward_only", lambda **_: None, priority=-1)
    monkeypatch.setitem(registries.ops._frozen(), "linear/forward_only", _entry(forward_only))
    backward = expected("linear", shapes(2048), CHIP, direction="backward")
    assert of("forward_only", backward).refusal == "has no backward pass of its own"
    assert of("reference", backward).basis == "bound", "its forward pass was measured, this was not"
    assert of("forward_only", expected("linear", shapes(2048), CHIP)).basis == "bound"


def _entry(implementation):
    from stack_core.abi.registry import Entry

    return Entry(f"{implementation.op}/{implementation.name}", implementation, "test")


def test_options_and_integers_are_the_ops(measure):
    measure()({})
    sizes = {"query": (2, 64, 4, 16), "key": (2, 64, 4, 16), "value": (2, 64, 4, 16), "kv_lengths": (2,)}
    causal, full = (of("reference", expected("attention", sizes, CHIP, causal=each)) for each in (True, False))
    assert causal.seconds <= full.seconds
    labels = {"hidden": (8, 16), "weight": (16, 100), "labels": (8,)}
    assert of("reference", expected("linear_cross_entropy", labels, CHIP)).basis == "bound"
    adapters = {"x": (8, 16), "down": (3, 16, 4), "up": (3, 4, 16), "scale": (3,), "rows": (8,)}
    assert of("reference", expected("low_rank", adapters, CHIP)).refusal == ""


def test_a_damaged_table_is_left_out_with_a_warning(tmp_path, monkeypatch):
    (tmp_path / "cut.json").write_text("{")
    monkeypatch.setenv("STACK_TUNED_TABLES", str(tmp_path))
    with pytest.warns(DamagedTableWarning, match=r"cut.json.*It is left out of what is expected"):
        assert of("reference", expected("linear", shapes(8), CHIP)).basis == "bound"


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (("linar", {}, CHIP), {}, UnknownName, "Unknown op 'linar'. Did you mean 'linear'?"),
        (("linear", {}, "h300"), {}, UnknownName, "Unknown name 'h300' among chips"),
        (
            ("linear", {"w": (2, 2)}, CHIP),
            {},
            ArgumentError,
            "linear has no parameter 'w'; its parameters are x, weight",
        ),
        (("linear", shapes(8), CHIP), {"biass": 1}, ArgumentError, "no parameter 'biass'"),
        (("linear", shapes(8), CHIP), {"direction": "up"}, ArgumentError, "expected 'forward' or 'backward'"),
        (("linear", {"x": (2, 2)}, CHIP), {}, ArgumentError, "missing.* Its parameters are x, weight"),
    ],
)
def test_wrong_use_says_what_is_right(arguments, options, error, message):
    with pytest.raises(error, match=message):
        expected(*arguments, **options)


def test_it_is_the_packages_own_name():
    assert stack_kernels.expected is expected
