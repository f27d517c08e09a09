"""Costs are read from the program: loops counted as often as they run, every cost on a line, nothing run."""

import jax
import jax.numpy as jnp
import pytest

from stack_core.abi.errors import ArgumentError
from stack_profile.analyses.memory import memory_of
from stack_profile.comparisons.costs import Costs, compiled_costs, costs_of
from stack_profile.errors import ProfileError
from stack_profile.traces.hlo import program_of, read_program

ROWS, WIDTH, TRIPS = 32, 64, 10
ARGUMENTS = (
    jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
    jax.ShapeDtypeStruct((TRIPS, WIDTH, WIDTH), jnp.float32),
)


def layers(x, weights):
    def body(x, weight):
        with jax.named_scope("mlp"):
            return jnp.tanh(x @ weight), None

    return jax.lax.scan(body, x, weights)[0]


@pytest.fixture(scope="module")
def costs():
    return compiled_costs(layers, *ARGUMENTS, compilations=2)


def test_flops_of_a_loop_are_on_their_line_as_often_as_it_runs(costs):
    assert costs.flops == 2 * ROWS * WIDTH * WIDTH * TRIPS
    (row,) = (row for row in costs.rows if row.flops)
    assert (row.flops, row.layer) == (costs.flops, "mlp")
    assert row.line.startswith(f"{__file__}:") and row.function.endswith("body")


@pytest.mark.parametrize("name", ["flops", "traffic_bytes", "memory_bytes", "instructions"])
def test_rows_sum_to_the_program(costs, name):
    assert sum(getattr(row, name) for row in costs.rows) == getattr(costs, name) > 0


def test_memory_is_that_of_the_buffers(costs):
    program = program_of(jax.jit(layers).lower(*ARGUMENTS).compile())
    assert costs.memory_bytes == memory_of(program).facts["total_bytes"] >= 4 * (ROWS + TRIPS * WIDTH) * WIDTH


def test_every_compilation_is_one(costs):
    assert len(costs.compile_s) == 2 and min(costs.compile_s) > 0.001  # what is found in a cache takes microseconds
    with pytest.raises(ProfileError, match="expected at least 1"):
        compiled_costs(layers, *ARGUMENTS, compilations=0)
    with pytest.raises(ArgumentError, match=r"cannot be traced for \(str\): TypeError"):
        compiled_costs(jax.numpy.sin, "x")


def test_they_are_kept_and_read_again(costs, tmp_path):
    costs.write(tmp_path / "base.json")
    assert Costs.read(tmp_path / "base.json") == costs
    with pytest.raises(ProfileError, match="cannot be written"):
        costs.write(tmp_path / "missing" / "base.json")


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": "stack-profile costs 2"}'])
def test_another_file_is_refused(tmp_path, text):
    (tmp_path / "base.json").write_text(text)
    with pytest.raises(ProfileError, match=r"holds no costs of a program(.|\n)*stack profile costs FILE.py:fn --out"):
        Costs.read(tmp_path / "base.json")


def test_memory_that_is_not_known_is_not_zero(build):
    compiled = jax.jit(layers).lower(*ARGUMENTS).compile()
    costs = costs_of(read_program(build.hlo_proto(compiled), 7))
    assert costs.memory_bytes is None and costs.flops == 2 * ROWS * WIDTH * WIDTH * TRIPS
    assert "its memory is unknown" in costs.notes[-1]
