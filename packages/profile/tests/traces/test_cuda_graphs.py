"""Kernels of CUDA graphs are joined with instructions: on traces of an H100, and where several programs share a name.

The traces in `tests/h100` are cut from captures of a training step, in which a loop runs 16 layers forward and another
backward, and of decoding with a loop over pages in each layer.
"""

from collections import Counter

import numpy as np
import pytest
from jax._src.lib import hlo

from stack_profile.analyses.ops import ops
from stack_profile.traces.hlo import hlo_proto
from stack_profile.traces.trace import trace_of
from stack_profile.traces.wire import fields
from stack_profile.traces.xplane import Space, read_space


def test_all_kernels_of_a_training_step_have_instructions_and_lines(h100_train):
    (device,) = h100_train.devices
    assert {each.kernel for each in device.operations if each.instruction is None} == {"MemcpyH2D", "MemcpyD2H"}
    assert ops(h100_train).facts["attributed_busy_share"] > 0.999 and not h100_train.problems


def test_steps_of_graphs_are_as_long_as_the_program_measured(h100_train):
    assert [step.number for step in h100_train.steps["GPU:0"]] == [9, 10]
    assert [round(step.duration_ps / 1e9) for step in h100_train.steps["GPU:0"]] == [109, 109]


def test_equal_instructions_share_a_kernel_and_libraries_follow_by_order(h100_train):
    (device,) = h100_train.devices
    found = {each.name: (each.kernel, count) for each, _, count in device.totals()}
    # Each ran in 16 layers of two complete steps and in a few of a third.
    products = [f"gemm_fusion_dot_general.{number}" for number in (7, 8, 9, 10)]
    assert {found[name] for name in products} == {("gemm_fusion_dot_general_8", 37)}
    copies = ("loop_dynamic_slice_fusion.14", "loop_dynamic_update_slice_fusion.39", "loop_dynamic_slice_fusion.27")
    assert [found[name] for name in copies] == [("memcpy32_post", 37), ("memcpy128", 37), ("memcpy128", 32)]
    assert found["mpmd_map.0"] == ("flash_attention_sm90_mosaic_gpu_kernel", 37)
    assert found["dynamic_slice_fusion.1"][0] == found["dynamic_slice_fusion"][0] == "batched_body_mosaic_gpu_kernel"
    assert found["custom-call.2"][0] == "nvjet_sm90_tss_256x128_64x4_1x2_h_bz_coopA_NNT"
    assert {found[f"custom-call.{number}"][1] for number in (0, 1, 4)} == {32}


def test_forward_and_backward_are_told_apart(h100_train):
    (row,) = [row for row in ops(h100_train, by="line").rows if row.name == "stack_train/nn/feed_forward.py:58"]
    # The backward pass of a product has two products.
    assert row.backward_s / row.forward_s == pytest.approx(1.5, abs=0.2) and row.unknown_s == 0


def test_kernels_outside_of_graphs_and_branches_inside_are_joined(h100_decode):
    assert h100_decode["ops"]["attributed_busy_share"] > 0.999 and not h100_decode["problems"]
    opcodes = {row["kernel"]: row["opcode"] for row in h100_decode["rows"]}
    assert opcodes["set_case_condition"] == "conditional"
    shared = {row["name"] for row in h100_decode["rows"] if row["kernel"] == "wrapped_compare_18"}
    assert len(shared) > 16 and "wrapped_compare.12" in shared
    # Loops with a trip count on the device copy their condition to the host.
    assert {row["opcode"] for row in h100_decode["rows"] if row["kernel"] == "MemcpyD2H"} == {"while", "conditional"}


def test_a_file_with_another_number_is_joined_by_name_and_kernels(h100_space):
    plane = next(plane for plane in h100_space.planes if plane.name == "/host:metadata")
    proto = next(plane.event_stats(key)["Hlo Proto"] for key in plane.event_names)
    number, place = next(iter(fields(proto)))
    assert number == 1
    module = proto[slice(*place)] + bytes([5 << 3, 2])  # the module's number
    alone = Space(tuple(each for each in h100_space.planes if each is not plane), h100_space.hosts, ())
    trace = trace_of([alone], extra_programs=[[hlo_proto(module)]])
    assert {each.program.key for each in trace.devices[0].operations if each.program} == {2}
    assert ops(trace).facts["attributed_busy_share"] > 0.999


MODULE = """HloModule jit_f, is_scheduled=true

%fused_a (p: f32[SIZE]) -> f32[SIZE] {
  %p = f32[SIZE]{0} parameter(0)
  ROOT %neg = f32[SIZE]{0} negate(%p), metadata={op_name="jit(f)/one/neg"}
}

%fused_b (p: f32[SIZE]) -> f32[SIZE] {
  %p = f32[SIZE]{0} parameter(0)
  ROOT %exp = f32[SIZE]{0} exponential(%p), metadata={op_name="jit(f)/two/exp"}
}

ENTRY %main (x: f32[SIZE]) -> f32[SIZE] {
  %x = f32[SIZE]{0} parameter(0)
  %loop_negate_fusion = f32[SIZE]{0} fusion(%x), kind=kLoop, calls=%fused_a, metadata={op_name="jit(f)/one/neg"}
  LINES
}
"""
ROOT = """ROOT %OP_fusion.1 = f32[SIZE]{0} fusion(%loop_negate_fusion), kind=kLoop, calls=%fused_b, \
metadata={op_name="jit(f)/two/exp" source_file="model.py" source_line=7}"""


def program(build, key, size, operation):
    text = MODULE.replace("LINES", ROOT).replace("SIZE", str(size)).replace("OP", operation)
    return "jit_f", key, build.message((1, hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()))


def gpu(build, *graphs, number=0):
    """A graph of two kernels per name, launched one after the other, on two streams, and a kernel without a graph."""
    plane = build.plane("/device:GPU:0")
    events = {1: [], 2: []}
    for place, names in enumerate(graphs):
        for node, name in enumerate(names):
            about = {"hlo_op": "command_buffer_3", "hlo_module": "jit_f", "program_id": number}
            about |= {"correlation_id": place, "cuda_graph_node_id": (place << 32) + node}
            events[1 + node % 2].append(plane.event(name, 100 * place + 10 * node, 10, **about))
    for stream, found in events.items():
        plane.line(f"Stream #{stream}(Compute)", *found)
    return plane


def test_programs_of_one_name_and_number_are_told_apart_by_their_kernels(build):
    programs = build.metadata_plane([program(build, 8, 4, "loop_exp"), program(build, 9, 8, "input_exp")])
    graphs = (("loop_negate_fusion", "loop_exp_fusion_1"), ("loop_negate_fusion", "input_exp_fusion_1"))
    (device,) = trace_of([read_space(build.space(programs, gpu(build, *graphs)))]).devices
    found = Counter((each.name, each.program.key) for each in device.operations)
    first = {("loop_negate_fusion", 8): 1, ("loop_exp_fusion.1", 8): 1}
    assert found == first | {("loop_negate_fusion", 9): 1, ("input_exp_fusion.1", 9): 1}
    assert device.run.tolist() == [0, 0, 0, 0]


def test_of_programs_that_fit_equally_none_is_chosen_unless_they_have_the_same_lines(build):
    graph = ("loop_negate_fusion", "loop_exp_fusion_1")
    same = [program(build, 8, 4, "loop_exp"), program(build, 9, 8, "loop_exp")]
    trace = trace_of([read_space(build.space(build.metadata_plane(same), gpu(build, graph)))])
    assert all(each.instruction is not None for each in trace.devices[0].operations) and not trace.problems
    other = (*same[1][:2], same[1][2].replace(b"jit(f)/two", b"jit(f)/six"))
    trace = trace_of([read_space(build.space(build.metadata_plane([same[0], other]), gpu(build, graph)))])
    assert all(each.instruction is None for each in trace.devices[0].operations)
    assert any("2 programs named jit_f fit 2 kernels of CUDA graphs equally well" in each for each in trace.problems)
    # A number decides between them.
    trace = trace_of([read_space(build.space(build.metadata_plane([same[0], other]), gpu(build, graph, number=9)))])
    assert {each.program.key for each in trace.devices[0].operations} == {9}


def test_kernels_that_no_instruction_explains_keep_their_names(build):
    programs = build.metadata_plane([program(build, 8, 4, "loop_exp")])
    graph = ("loop_negate_fusion", "loop_exp_fusion_1", "void cutlass::Kernel2<int>")
    (device,) = trace_of([read_space(build.space(programs, gpu(build, graph)))]).devices
    assert [each.name for each in device.operations if each.instruction is None] == ["void cutlass::Kernel2<int>"]
    assert np.isclose(device.busy_s, 30e-6)


def test_of_several_kernels_of_a_call_the_longest_has_its_costs(build):
    call = """ROOT %OP = (f32[SIZE]{0}, s8[64]{0}) custom-call(%loop_negate_fusion, %x), \
custom_call_target="__cublas$gemm", metadata={op_name="jit(f)/two/dot" source_file="model.py" source_line=7}"""
    text = MODULE.replace("LINES", call).replace("(x: f32[SIZE]) -> f32[SIZE]", "(x: f32[SIZE]) -> (f32[SIZE], s8[64])")
    module = hlo.hlo_module_from_text(text.replace("SIZE", "4").replace("OP", "custom-call.1"))
    proto = build.message((1, module.as_serialized_hlo_module_proto()))
    graph = ("loop_negate_fusion", "nvjet_hsh_64x8", "void cublasLt::splitKreduce_kernel<1>")
    programs = build.metadata_plane([("jit_f", 8, proto)])
    (device,) = trace_of([read_space(build.space(programs, gpu(build, graph)))]).devices
    found = {each.kernel: (each.name, each.extra) for each in device.operations}
    assert found["nvjet_hsh_64x8"] == ("custom-call.1", False)
    assert found["void cublasLt::splitKreduce_kernel<1>"] == ("custom-call.1", True)
