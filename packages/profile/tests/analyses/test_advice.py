"""Slow programs with a known cause: the advice names the cause first, with its line and its evidence."""

import time

import jax
import jax.numpy as jnp
import pytest
from jax._src.lib import hlo

import stack_profile
from stack_core.chips.tpus import V5P
from stack_profile.analyses.advice import advice
from stack_profile.analyses.overview import overview
from stack_profile.traces.trace import load_trace, trace_of
from stack_profile.traces.xplane import read_space

STEPS = 5


def captured(folder, run):
    run(0)  # compiles
    with stack_profile.capture(folder) as capture:
        for number in range(1, STEPS + 1):
            run(number)
    capture.wait()
    return load_trace(folder)


def recompiling():
    step = jax.jit(lambda x: jnp.tanh(x @ x.T).sum())
    return lambda number: step(jnp.ones((32 + number, 64))).block_until_ready()


def waiting_for_the_host():
    step = jax.jit(lambda x: jnp.tanh(x @ x))
    x = jnp.ones((256, 256))

    def run(number):
        step(x).block_until_ready()
        time.sleep(0.02)

    return run


def waiting_for_input():
    step = jax.jit(lambda x: jnp.tanh(x @ x))
    x = jnp.ones((256, 256))

    def run(number):
        with jax.profiler.TraceAnnotation("next_batch"):
            time.sleep(0.02)
        step(x).block_until_ready()

    return run


def casting():
    step = jax.jit(lambda weights: [each.astype(jnp.bfloat16) for each in weights])
    weights = [jnp.ones((2048, 2048)) * number for number in range(4)]
    return lambda number: jax.block_until_ready(step(weights))


def transposing():
    step = jax.jit(lambda arrays: [each.swapaxes(0, 1) for each in arrays])
    arrays = [jnp.ones((2048, 1024)) * number for number in range(4)]
    return lambda number: jax.block_until_ready(step(arrays))


def in_float32():
    def step(x, weight):
        for _ in range(4):
            x = jnp.tanh(x @ weight)
        return x

    step, x = jax.jit(step), jnp.ones((1024, 1024))
    return lambda number: step(x, x).block_until_ready()


CAUSES = {
    "recompilation": recompiling,
    "host-bound steps": waiting_for_the_host,
    "slow input": waiting_for_input,
    "casts": casting,
    "layout copies": transposing,
    "float32 products": in_float32,
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_slow_program_gets_its_seeded_cause_first(tmp_path, cause):
    trace = captured(tmp_path, CAUSES[cause]())
    # The peaks of a known chip make the advice independent of the machine of the test.
    answer = advice(trace, chip="h100")
    first = answer.rows[0]
    assert first.cause == cause, [(row.cause, row.gain_s, row.evidence) for row in answer.rows]
    assert first.gain_elapsed_share == pytest.approx(first.gain_s / answer.facts["elapsed_s"])
    assert 0.05 < first.gain_elapsed_share <= 1
    assert first.evidence and first.change and first.event
    if cause in ("casts", "layout copies", "float32 products"):
        assert first.line.rpartition(":")[0] == __file__
    assert [row.gain_s for row in answer.rows] == sorted((row.gain_s for row in answer.rows), reverse=True)


def test_causes_on_the_host_share_the_idle_time(tmp_path):
    trace = captured(tmp_path, waiting_for_input())
    gains = {row.cause: row.gain_s for row in advice(trace, min_share=0.0).rows}
    idle_s = gains["slow input"] + gains["host-bound steps"]
    assert idle_s == pytest.approx(overview(trace).facts["idle_s"], rel=1e-6)


def test_nested_events_of_one_name_count_the_idle_time_once(build):
    plane = build.plane("/host:CPU")
    about = {"hlo_op": "fusion", "hlo_module": "jit_f", "program_id": 1}
    plane.line("worker", *(plane.event("fusion", at, 10, run_id=1 + at, **about) for at in (0, 110)))
    # The union of the calls is 60 us, their sum 120 us; the single event is longer than the union.
    plane.line("python", *(plane.event("recursive", 20, length) for length in (60, 40, 20)))
    plane.line("other", plane.event("waiting", 25, 80))
    (row,) = advice(trace_of([read_space(build.space(plane))])).rows
    assert row.cause == "host-bound steps"
    assert row.event == "waiting" and row.evidence.endswith("the longest event meanwhile is waiting, 80 us")


PRODUCTS = """HloModule jit_step, is_scheduled=true

%body (state: (s32[], f32[64,64])) -> (s32[], f32[64,64]) {
  %state = (s32[], f32[64,64]) parameter(0)
  %number = s32[] get-tuple-element(%state), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%number, %one)
  %before = f32[64,64] get-tuple-element(%state), index=1
  %small = f32[64,64] dot(%before, %before), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %result = (s32[], f32[64,64]) tuple(%next, %small)
}

%condition (state: (s32[], f32[64,64])) -> pred[] {
  %state = (s32[], f32[64,64]) parameter(0)
  %number = s32[] get-tuple-element(%state), index=0
  %limit = s32[] constant(20)
  ROOT %more = pred[] compare(%number, %limit), direction=LT
}

ENTRY %main (x: bf16[4096,4096], y: bf16[4096,320], row: bf16[1,4096], z: f32[1000], w: f32[64,64]) -> f32[64,64] {
  %x = bf16[4096,4096] parameter(0)
  %y = bf16[4096,320] parameter(1)
  %row = bf16[1,4096] parameter(2)
  %z = f32[1000] parameter(3)
  %w = f32[64,64] parameter(4)
  %zero = f32[] constant(0)
  %first = s32[] constant(0)
  %full = bf16[4096,4096] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %padded = bf16[4096,320] dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %thin = bf16[1,4096] dot(%row, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %pad = f32[1024] pad(%z, %zero), padding=0_24
  %start = (s32[], f32[64,64]) tuple(%first, %w)
  %loop = (s32[], f32[64,64]) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"20"}}
  ROOT %out = f32[64,64] get-tuple-element(%loop), index=1
}
"""  # noqa: E501 - a line of HLO is a line


def products(build, device="/device:TPU:0"):
    """A run of 2 ms; each operation takes 200 us, and the small product of the loop 20 times 4 us."""
    proto = build.message((1, hlo.hlo_module_from_text(PRODUCTS).as_serialized_hlo_module_proto()))
    plane, names = build.plane(device), ("full", "padded", "thin", "pad")
    for name in (*names, "small"):
        plane.metadata(name, program_id=7)
    plane.line("XLA Modules", plane.event("jit_step(7)", 0, 2000))
    events = [(name, 200 * place, 200) for place, name in enumerate(names)]
    events += [("small", 1000 + 10 * number, 4) for number in range(20)]
    plane.line("XLA Ops", *(plane.event(*event) for event in events))
    space = build.space(build.metadata_plane([("jit_step", 7, proto)]), plane)
    return trace_of([read_space(space)], about={"device_kind": "TPU v5p", "devices": 1})


def rows_of(trace, cause):
    return [row for row in advice(trace, min_share=0.0).rows if row.cause == cause]


def test_padding_is_the_time_of_pads_and_of_the_unused_parts_of_tiles(build):
    (row,) = rows_of(products(build), "padding")  # one row, because no operation has a line
    # 320 of 384 columns are used; the pad's time counts in full.
    assert row.gain_s == pytest.approx(200e-6 * (1 - 320 / 384) + 200e-6)
    assert "4096 x 320 fills 83% of its tiles" in row.evidence and "pads to f32[1024]" in row.evidence
    # The weights bound the product of a single row, and a full product has no unused part.
    assert row.evidence.startswith("padded, pad: 400 us in 2 executions")


def test_the_tiles_of_other_hardware_are_unknown(build):
    (row,) = rows_of(products(build, "/device:GPU:0"), "padding")
    assert row.gain_s == pytest.approx(200e-6) and row.event == "pad"


def test_small_products_gain_the_time_above_the_peaks(build):
    (row,) = rows_of(products(build), "small products")
    traffic_bytes = 3 * 64 * 64 * 4  # the result and both operands
    assert row.event == "small" and "4 us each, 20 times in a run" in row.evidence
    assert row.gain_s == pytest.approx(20 * (4e-6 - traffic_bytes / V5P.hbm_bandwidth_bytes_s))


def test_the_first_compilation_during_the_steps_is_not_a_recompilation(tmp_path):
    def once(x):
        return jnp.sum(x * 2)

    step, other, x = jax.jit(lambda x: jnp.tanh(x @ x)), jax.jit(once), jnp.ones((64, 64))

    def run(number):
        step(x).block_until_ready()
        if number == 2:
            other(x).block_until_ready()

    (row,) = (row for row in advice(captured(tmp_path, run)).rows if row.event == "jit_once")
    assert row.cause == "compilation" and row.gain_s > 0
    assert "1 first compilations took" in row.evidence


def test_exposed_collectives_have_their_time_and_line(tpu_trace):
    (row,) = (row for row in advice(tpu_trace).rows if row.cause == "exposed collectives")
    assert row.gain_s == pytest.approx((2 * 40 + 2 * 35) * 1e-6 / 2)
    assert "all-gather" in row.evidence and "all-reduce" in row.evidence


def test_small_gains_are_left_out_and_nothing_is_no_data(tpu_trace, build):
    assert advice(tpu_trace, min_share=0.99).rows == ()
    assert "No cause takes 99%" in advice(tpu_trace, min_share=0.99).notes[0]
    empty = trace_of([read_space(build.space(build.plane("/host:CPU")))])
    assert advice(empty).rows == () and "No data" in advice(empty).notes[0]


def test_a_training_step_on_a_gpu_stacks_the_residuals_of_its_layers(h100_train):
    found = {(row.cause, row.line): row for row in advice(h100_train, min_share=0.0).rows}
    residuals = found["stacked residuals", "stack_train/nn/stack.py:73"]
    # 16 layers copy 14 arrays each, and each pass fills the stacked arrays first.
    assert residuals.gain_s == pytest.approx(37e-3, rel=0.05) and "fills new arrays" in residuals.evidence
    kernels = next(row for (cause, _), row in found.items() if cause == "element-wise kernels")
    assert kernels.line == "stack_train/objectives.py:56" and " kernels per step" in kernels.evidence
    assert 0 < kernels.gain_s < 20e-3
    assert found["slow products", "stack_train/nn/linear.py:47"].evidence.count("gemm_fusion_dot_general_") == 3
    # The fills read nothing and are no copies into another layout; copies of numbers are left.
    assert found["layout copies", "stack_train/nn/stack.py:73"].gain_s < 1e-5


def test_decoding_on_a_gpu_waits_for_conditions_on_the_host(h100_decode):
    found = {cause: (line, gain_s, evidence) for cause, line, gain_s, evidence in reversed(h100_decode["advice"])}
    line, gain_s, evidence = found["loop conditions on the host"]
    assert (
        line == "stack_serve/llm/cache.py:150" and gain_s > 1e-3 and evidence.startswith("96 copies of conditions (16 ")
    )
    assert "% of the chip's bandwidth" in found["slow products"][2]
    assert "gaps between kernels" in found["host-bound steps"][2]
    # Weights in bfloat16 become float32 only inside of the kernels.
    assert "float32 products" not in found
