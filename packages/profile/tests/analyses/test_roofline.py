"""FLOPs and bytes are those of the mathematics, as often as operations ran."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import stack_profile
from stack_core.chips import Chip
from stack_profile.analyses.roofline import roofline, roofline_of
from stack_profile.traces.hlo import program_of
from stack_profile.traces.trace import load_trace, trace_of
from stack_profile.traces.xplane import read_space

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


def test_the_roof_is_the_slower_of_the_peaks(trace):
    answer = roofline_of(trace, CHIP)
    for row in answer.rows:
        assert row.ideal_s == pytest.approx(max(row.flops / 1e9, row.traffic_bytes / 1e9))
        assert row.ideal_self_share is None or row.ideal_self_share == pytest.approx(row.ideal_s / row.self_s)
        assert row.bound == ("compute" if row.flops > row.traffic_bytes else "memory") or row.ideal_s == 0
    assert answer.facts["ideal_s"] == pytest.approx(sum(row.ideal_s for row in answer.rows))


def test_a_peak_that_is_not_known_makes_the_roof_not_known(trace):
    answer = roofline_of(trace, dataclasses.replace(CHIP, peak_flops={}))
    products = [row for row in answer.rows if row.flops]
    assert products and all(row.ideal_s is None and row.ideal_self_share is None for row in products)
    assert all(row.rate_flops_s > 0 for row in products)


def test_the_cpus_peaks_are_measured_where_the_trace_was_captured(trace):
    about = {**trace.about, "cpu": "another"}
    answer = roofline(dataclasses.replace(trace, about=about))
    assert answer.facts["chip"] is None and "another" in answer.notes[0]
    assert all(row.ideal_self_share is None for row in answer.rows)


def test_a_trace_that_names_no_chip_says_so(build):
    plane = build.plane("/device:GPU:0")
    plane.line("Stream #1", plane.event("kernel", 0, 5, hlo_op="dot.1", hlo_module="jit_f", program_id=1))
    answer = roofline(trace_of([read_space(build.space(plane))]))
    assert answer.facts["chip"] is None and "--chip" in answer.notes[0]
    assert (answer.rows[0].flops, answer.rows[0].category) == (None, "unknown")


def convolve(x, w, stride=(1, 1), padding="SAME", **options):
    names = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, stride, padding, dimension_numbers=names, **options)


# Products of ones: each of their results is the number of multiplications that it took.
PRODUCTS = {
    "matrices": (lambda a, b: a @ b, (63, 31), (31, 47)),
    "vector": (lambda a, b: a @ b, (64, 32), (32,)),
    "batched": (lambda a, b: jnp.einsum("bhij,bhkj->bhik", a, b), (2, 3, 16, 8), (2, 3, 24, 8)),
    "several_axes": (lambda a, b: jnp.einsum("ijk,jkl->il", a, b), (16, 8, 4), (8, 4, 12)),
    "large": (lambda a, b: a @ b, (256, 128), (128, 256)),
    "padded": (convolve, (2, 16, 16, 4), (3, 3, 4, 8)),
    "strided": (lambda x, w: convolve(x, w, (2, 3)), (2, 16, 16, 4), (3, 3, 4, 8)),
    "grouped": (lambda x, w: convolve(x, w, feature_group_count=4), (2, 16, 16, 8), (3, 3, 2, 12)),
    "depthwise": (lambda x, w: convolve(x, w, feature_group_count=8), (2, 16, 16, 8), (3, 3, 1, 8)),
    "batch_grouped": (lambda x, w: convolve(x, w, batch_group_count=2), (4, 16, 16, 4), (3, 3, 4, 8)),
    "dilated": (lambda x, w: convolve(x, w, rhs_dilation=(2, 2)), (2, 16, 16, 4), (3, 3, 4, 8)),
    "transposed": (lambda x, w: jax.lax.conv_transpose(x, w, (2, 2), "SAME"), (2, 8, 8, 4), (3, 3, 4, 8)),
}


def scanned(length, body):
    return lambda x, w: jax.lax.scan(lambda carry, _: (body(carry, w), None), x, None, length=length)[0]


def until_seven(x, w):
    """The compiler cannot know how often this runs."""
    state = (0, x)
    advance = lambda state: (state[0] + 1, jnp.tanh(state[1] @ w))
    return jax.lax.while_loop(lambda state: (state[0] < 7) & (jnp.sum(state[1]) > -1e9), advance, state)[1]


def layer(x, w):
    return jnp.tanh(x @ w)


LOOPS = {
    "ten": (scanned(10, layer), 10),
    "nested": (scanned(4, scanned(3, layer)), 12),
    "until_seven": (until_seven, 7),
}


def renamed(name, function):
    def call(x, w):
        return function(x, w)

    call.__name__ = name
    return jax.jit(call)


def test_products_and_convolutions_count_what_they_multiply(tmp_path):
    calls, expected = {}, {}
    for name, (function, *shapes) in PRODUCTS.items():
        calls[name] = renamed(name, function), [jnp.ones(shape) for shape in shapes]
        expected[name] = 2 * float(jnp.sum(function(*calls[name][1])))
    for name, (function, trips) in LOOPS.items():
        calls[name] = renamed(name, function), [jnp.ones((16, 32)), jnp.full((32, 32), 0.01)]
        expected[name] = trips * 2 * 16 * 32 * 32
    with stack_profile.capture(tmp_path) as captured:
        for function, arguments in calls.values():
            jax.block_until_ready(function(*arguments))
    answer = roofline_of(load_trace(captured.wait()), CHIP)
    counted = {name: sum(row.flops or 0 for row in answer.rows if row.program == f"jit_{name}") for name in calls}
    assert counted == pytest.approx(expected, rel=0.01)
    assert any("data-dependent number of iterations" in note for note in answer.notes)


def test_custom_calls_do_not_say_their_flops(build):
    solve = jax.jit(lambda a, b: jnp.linalg.cholesky(a) @ b)
    compiled = solve.lower(*[jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 2).compile()
    (name,) = [each.name for each in program_of(compiled).instructions.values() if each.opcode == "custom-call"]
    programs = build.metadata_plane([("jit__lambda", 7, build.hlo_proto(compiled))])
    plane = build.plane("/device:GPU:0")
    plane.line("Stream #1", plane.event("kernel", 0, 5, hlo_op=name, hlo_module="jit__lambda", program_id=7))
    answer = roofline_of(trace_of([read_space(build.space(programs, plane))]), CHIP)
    (row,) = answer.rows
    assert row.flops is None and row.ideal_s is None and row.traffic_bytes > 0
    assert any(name in note for note in answer.notes)


def test_a_tpu_says_which_chip_it_is(build):
    plane = build.plane("/device:TPU:0")
    plane.line("XLA Ops", plane.event("dot.1", 0, 5))
    plane.stats.append(plane.stat("device_type_string", "TPU v6 Lite"))
    assert roofline(trace_of([read_space(build.space(plane))])).facts["chip"] == "v6e"


def test_a_gpu_s_trace_names_its_chip_and_counts_asynchronous_copies(h100_train):
    answer = roofline(h100_train)
    # Without the kernels of attention, which report no FLOPs.
    assert answer.facts["chip"] == "h100" and answer.facts["counted_busy_share"] == pytest.approx(0.88, abs=0.01)
    copy = next(row for row in answer.rows if row.name == "loop_dynamic_update_slice_fusion.32")
    # The gate of 8 sequences of 2,048 tokens in bfloat16 is read and written.
    assert copy.traffic_bytes == pytest.approx(copy.occurrences * 2 * 8 * 2048 * 4096 * 2, rel=1e-6)
    assert 0.5 < copy.ideal_self_share < 1


@pytest.mark.parametrize("by", ["kernel", "line", "category", "layer"])
def test_groups_sum_to_the_total_and_have_rates_of_what_is_counted(h100_train, by):
    answer = roofline(h100_train, by=by)
    assert sum(row.self_s for row in answer.rows) == pytest.approx(answer.facts["busy_s"])
    assert sum(row.flops or 0 for row in answer.rows) == answer.facts["flops"]
    if by == "kernel":
        row = next(row for row in answer.rows if row.name == "gemm_fusion_dot_general_11")
        # Gate and up: 16,384 tokens, 1,024 wide, 4,096 hidden features.
        assert row.flops == row.occurrences * 2 * 16384 * 1024 * 4096 and row.bound == "compute"
        assert 600e12 < row.rate_flops_s < 640e12 and row.ideal_self_share == pytest.approx(0.63, abs=0.01)
