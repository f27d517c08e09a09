"""Why a function was compiled again is told by the programs themselves."""

import jax
import jax.numpy as jnp

import stack_profile
from stack_profile.analyses.compile import compilations
from stack_profile.traces.trace import load_trace, trace_of
from stack_profile.traces.xplane import read_space


def test_shapes_that_made_a_function_compile_again_are_named(tmp_path):
    @jax.jit
    def grown(x, weight):
        return jnp.tanh(x @ weight)

    weight = jnp.ones((8, 8))
    rows = [jnp.ones((count, 8)) for count in (1, 2, 3)]
    with stack_profile.capture(tmp_path) as captured:
        for x in (*rows, rows[0]):
            grown(x, weight)
    answer = compilations(load_trace(captured.wait()))
    (row,) = [row for row in answer.rows if row.name == "jit_grown"]
    assert (row.programs, row.compilations) == (3, 3)
    assert row.why.startswith("x: f32[1,8], f32[2,8], f32[3,8]") and "weight" not in row.why
    assert 0 < row.compile_s <= answer.facts["compile_s"]


def test_a_function_that_was_compiled_before_the_capture_counts_as_loaded_only(trace):
    (row,) = [row for row in compilations(trace).rows if row.name == "jit_step"]
    assert (row.programs, row.compilations, row.compile_s, row.why) == (1, 0, 0, "")


def test_a_trace_without_programs_has_no_data(build):
    plane = build.plane("/host:CPU")
    plane.line("python", plane.event("something", 0, 1))
    assert "No data" in compilations(trace_of([read_space(build.space(plane))])).notes[0]
