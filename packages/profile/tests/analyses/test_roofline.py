"""FLOPs and bytes are those of the mathematics, as often as operations ran."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import stack_profile
from stack_core.hardware import Chip
from stack_profile.analyses.roofline import roofline, roofline_of
from stack_profile.trace import load_trace, trace_of
from stack_profile.xplane import read_space

CHIP = Chip(
    kind="test",
    unit="device",
    peak_flops={"float32": 1e9, "bfloat16": 2e9},
    hbm_bytes=None,
    hbm_bandwidth_bytes_s=1e9,
    on_chip_bytes=None,
    link_bandwidth_bytes_s=None,
    provenance="made up",
)


def test_the_flops_of_a_training_step_are_those_of_its_products(trace):
    layers, batch, width = 10, 64, 128
    product = 2 * batch * width * 4 * width
    # Forward two a layer, again in the backward pass one (only the first is needed there), and two derivatives each.
    blocks = layers * product * (2 + 1 + 4)
    head = 2 * batch * width * width * 3
    facts = roofline_of(trace, CHIP).facts
    assert facts["flops"] == pytest.approx(4 * (blocks + head), rel=0.01)
    assert facts["counted_s"] == pytest.approx(facts["busy_s"], rel=0.01)


def test_what_is_in_a_scan_of_ten_counts_ten_times(trace):
    looped = [row for row in roofline_of(trace, CHIP).rows if row.flops and row.runs_expected == 10]
    assert looped and all(row.occurrences == 4 * 10 for row in looped)


def test_a_convolution_counts_what_it_multiplies(tmp_path):
    convolve = jax.jit(lambda x, w: jax.lax.conv(x, w, (1, 1), "VALID"))
    x, w = jnp.ones((2, 3, 20, 20)), jnp.ones((8, 3, 5, 5))
    convolve(x, w).block_until_ready()
    with stack_profile.capture(tmp_path) as captured:
        convolve(x, w).block_until_ready()
    facts = roofline_of(load_trace(captured.wait()), CHIP).facts
    assert facts["flops"] == pytest.approx(2 * 2 * 8 * 16 * 16 * 3 * 5 * 5, rel=0.01)


def test_the_roof_is_the_slower_of_the_peaks(trace):
    answer = roofline_of(trace, CHIP)
    for row in answer.rows:
        assert row.ideal_s == pytest.approx(max(row.flops / 1e9, row.traffic_bytes / 1e9))
        assert row.roof_share is None or row.roof_share == pytest.approx(row.ideal_s / row.self_s)
        assert row.bound == ("compute" if row.flops > row.traffic_bytes else "memory") or row.ideal_s == 0
    assert answer.facts["ideal_s"] == pytest.approx(sum(row.ideal_s for row in answer.rows))


def test_a_peak_that_is_not_known_makes_the_roof_not_known(trace):
    answer = roofline_of(trace, dataclasses.replace(CHIP, peak_flops={}))
    products = [row for row in answer.rows if row.flops]
    assert products and all(row.ideal_s is None and row.roof_share is None for row in products)
    assert all(row.rate_flops_s > 0 for row in products)


def test_the_cpus_peaks_are_measured_where_the_trace_was_captured(trace):
    about = {**trace.about, "cpu": "another"}
    answer = roofline(dataclasses.replace(trace, about=about))
    assert answer.facts["chip"] is None and "another" in answer.notes[0]
    assert all(row.roof_share is None for row in answer.rows)


def test_a_trace_that_names_no_chip_says_so(build):
    plane = build.plane("/device:GPU:0")
    plane.line("Stream #1", plane.event("kernel", 0, 5, hlo_op="dot.1", hlo_module="jit_f", program_id=1))
    answer = roofline(trace_of([read_space(build.space(plane))]))
    assert answer.facts["chip"] is None and "--chip" in answer.notes[0]
    assert (answer.rows[0].flops, answer.rows[0].category) == (None, "unknown")
