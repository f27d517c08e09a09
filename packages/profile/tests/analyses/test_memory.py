"""The memory of a program is what XLA says it is, and the peak is made of named arrays."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from stack_core.abi.errors import UnknownName
from stack_profile.analyses.memory import memory, memory_of, schedule_of
from stack_profile.traces.buffers import read_buffers
from stack_profile.traces.hlo import program_of, read_program


@pytest.mark.parametrize("by", ["buffer", "layer", "line", "kind"])
def test_the_rows_of_every_grouping_sum_to_all_memory(trace, by):
    answer = memory(trace, by=by)
    assert answer.facts["program"] == "jit_step"
    assert sum(row.size_bytes for row in answer.rows) == answer.facts["total_bytes"]
    assert sum(row.total_share for row in answer.rows) == pytest.approx(1)


def test_all_memory_is_what_the_executable_reports(training, trace):
    stats = training[0].memory_analysis()
    reported = (
        stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes + stats.temp_size_in_bytes
    )
    for facts in (memory(trace).facts, memory_of(program_of(training[0])).facts):
        assert facts["total_bytes"] - facts["constant_bytes"] == reported
        assert facts["temporary_bytes"] == stats.temp_size_in_bytes


def test_arguments_have_the_names_that_the_program_gave_them(trace):
    rows = {row.name: row for row in memory(trace).rows}
    assert rows["params['head']"].kind == "donated argument"
    assert rows["params['head']"].size_bytes == 128 * 128 * 4
    assert rows["x"].kind == "argument"


def test_what_the_backward_pass_keeps_for_all_layers_is_at_the_peak(trace):
    saved = [row for row in memory(trace).rows if row.kind == "temporary" and row.size_bytes == 10 * 64 * 128 * 4]
    assert saved and all(row.line.rpartition(":")[0].endswith("conftest.py") for row in saved)


def test_a_peak_of_known_buffers_is_their_sum(trace):
    facts = memory(trace).facts
    assert 0.9 * facts["temporary_bytes"] <= facts["peak_live_bytes"] <= facts["temporary_bytes"]


def test_the_schedule_ends_with_nothing_and_reaches_the_peak(trace):
    program = next(program for program in trace.programs if program.name == "jit_step")
    answer = schedule_of(program)
    assert answer.rows[-1].live_bytes == 0
    assert max(row.live_bytes for row in answer.rows) == memory(trace).facts["peak_live_bytes"]
    (schedule,) = read_buffers(program).schedules
    assert [len(moment.live) for moment in schedule.moments()][-1] == 0


def test_an_executable_alone_has_no_schedule_and_says_so():
    program = program_of(jax.jit(lambda x: jnp.sort(x) + 1).lower(jnp.ones((64,))).compile())
    answer = memory_of(program)
    assert answer.facts["peak_live_bytes"] is None
    for text in ("lifetimes are unknown", "scratch"):
        assert any(text in note for note in answer.notes)


def test_without_buffers_or_programs_there_is_no_data(trace, build):
    compiled = jax.jit(lambda x: x + 1).lower(jnp.ones(3)).compile()
    without = dataclasses.replace(program_of(compiled), proto=build.hlo_proto(compiled))
    assert "No data" in memory_of(without).notes[0] and "No data" in schedule_of(without).notes[0]
    assert "No data" in memory(dataclasses.replace(trace, programs=())).notes[0]
    with pytest.raises(UnknownName, match="jit_step"):
        memory(trace, program="jit_stop")


def test_other_memory_spaces_are_not_the_devices_memory(build):
    """A temporary of 64 bytes in main memory, an argument of 100 on the host."""
    parts = [
        (1, build.message((1, 1), (2, 64))),
        (3, build.message((1, 0), (2, 64), (9, build.message((1, 1))))),
        (3, build.message((1, 1), (2, 100), (5, 1), (8, 5), (9, build.message((1, 2))))),
        (4, build.message((1, build.message((1, 0), (2, 2), (4, "copy"))))),
    ]
    module = build.message((1, "jit_f"))
    answer = memory_of(read_program(build.message((1, module), (3, build.message(*parts))), 7))
    assert answer.facts["total_bytes"] == sum(row.size_bytes for row in answer.rows) == 64
    assert answer.facts["elsewhere_bytes"] == 100 and any("100 B" in note for note in answer.notes)
    assert answer.facts["peak_live_bytes"] is None


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_what_is_predicted_is_what_a_process_takes():
    program = Path(__file__).with_name("peak_memory.py")
    environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}  # else freed memory is kept for the next case
    done = subprocess.run([sys.executable, program], env=environ, capture_output=True, text=True, check=True)
    for name, (predicted, measured) in json.loads(done.stdout).items():
        assert measured == pytest.approx(predicted, rel=0.05), name
