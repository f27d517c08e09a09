"""All of the time is put somewhere, once."""

import dataclasses
from pathlib import Path

import pytest

from stack_core.abi.errors import UnknownName
from stack_profile.analyses.ops import ops
from stack_profile.traces.trace import trace_of
from stack_profile.traces.xplane import read_space


@pytest.mark.parametrize("by", ["category", "layer", "scope", "line", "file", "op", "kernel"])
def test_the_rows_of_every_grouping_sum_to_the_union(trace, by):
    answer = ops(trace, by=by)
    (device,) = trace.devices
    assert answer.facts["busy_s"] == pytest.approx(device.union_ps * 1e-12)
    assert sum(row.self_s for row in answer.rows) == pytest.approx(answer.facts["busy_s"], rel=1e-6)
    assert sum(row.busy_share for row in answer.rows) == pytest.approx(1)
    assert sum(row.occurrences for row in answer.rows) == answer.facts["occurrences"] == len(device)
    for row in answer.rows:
        assert row.forward_s + row.backward_s + row.recomputed_s == pytest.approx(row.self_s)


def test_operations_have_lines_and_cover_the_steps(trace):
    answer = ops(trace, by="line")
    assert answer.facts["attributed_s"] >= 0.99 * answer.facts["busy_s"]
    assert answer.facts["attributed_s"] + answer.facts["unattributed_s"] == pytest.approx(answer.facts["busy_s"])
    (device,) = trace.devices
    steps = trace.steps[device.device]
    assert [step.program for step in steps] == ["jit_step"] * 4
    assert device.union_ps >= 0.85 * (steps[-1].end_ps - steps[0].start_ps)


def test_all_passes_belong_to_the_forward_scope(trace):
    rows = {row.name: row for row in ops(trace, by="scope").rows}
    assert rows["mlp"].forward_s > 0 and rows["mlp"].backward_s > 0 and rows["mlp"].recomputed_s > 0
    assert rows["mlp"].busy_share > 0.5


def test_a_folder_moves_lines_to_the_innermost_of_its_own(trace, tmp_path):
    assert ops(trace, by="line", within=tmp_path).facts["attributed_s"] == 0
    tests = Path(__file__).parents[1]
    assert {row.name for row in ops(trace, by="file", within=tests).rows} == {str(tests / "conftest.py")}


def test_times_of_one_to_four_on_two_lines_show_as_such(build):
    plane = build.plane("/host:CPU")
    plane.line(
        "worker",
        *(
            plane.event(name, 100 * run + start, duration, hlo_op=name, hlo_module="jit_f", program_id=1, run_id=run)
            for run in range(3)
            for name, start, duration in (("dot.1", 0, 10), ("dot.2", 12, 40))
        ),
    )
    rows = {row.name: row for row in ops(trace_of([read_space(build.space(plane))])).rows}
    assert rows["jit_f: dot.2"].self_s == pytest.approx(4 * rows["jit_f: dot.1"].self_s)
    assert rows["jit_f: dot.1"].busy_share == pytest.approx(0.2)


def test_operations_in_no_layer_whose_stacks_may_be_cut_off_are_named_with_what_to_do(trace):
    def said(frames):
        notes = ops(dataclasses.replace(trace, about={"stack_frames": frames})).notes
        return [note for note in notes if "JAX_TRACEBACK_IN_LOCATIONS_LIMIT=-1" in note]

    assert len(said(1)) == 1 and "JAX keeps 1 frames" in said(1)[0]
    assert said(100) == said(-1) == []


def test_a_gpu_s_copies_have_categories_and_equal_operations_one_kernel(h100_train, h100_decode):
    found = {row.name: row for row in ops(h100_train, by="category").rows}
    # The residuals of 16 layers, copied into stacked arrays and out of them.
    assert found["copy on device"].self_s == pytest.approx(22.4e-3, rel=0.01)
    assert found["copy from host"].unknown_s == found["copy from host"].self_s > 0
    kernels = {row.name: row for row in ops(h100_train, by="kernel").rows}
    assert kernels["gemm_fusion_dot_general_8"].occurrences == 4 * 37
    assert any("copies and kernels belong to no program" in note for note in ops(h100_train).notes)
    assert h100_decode["categories"]["copy to host"] > 100
    assert "decode/Decoder/Block/FeedForward" in h100_decode["layers"]


def test_outside_of_layers_time_has_the_name_of_a_function(h100_train):
    found = {row.name: row.busy_share for row in ops(h100_train, by="layer").rows}
    assert found["Head.cross_entropy"] == pytest.approx(0.17, abs=0.01)
    assert found[""] < 0.001  # copies between host and device


def test_without_operations_there_is_no_data_which_is_not_zero(build):
    plane = build.plane("/host:CPU")
    plane.line("main", plane.event("PjitFunction(f)", 0, 10))
    answer = ops(trace_of([read_space(build.space(plane))]))
    assert answer.rows == () and "No data" in answer.notes[0]


def test_a_device_that_is_not_there_is_named_with_its_neighbours(trace):
    assert ops(trace, device="CPU:0").facts["devices"] == 1
    with pytest.raises(UnknownName, match="CPU:0"):
        ops(trace, device="CPU:1")
