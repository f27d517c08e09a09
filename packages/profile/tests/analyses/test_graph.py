"""What an instruction reads, what reads it, and what is fused, in a program that is known by heart."""

from pathlib import Path

import pytest
from jax._src.lib import hlo

from stack_core.abi.errors import UnknownName
from stack_profile.analyses.graph import dot, graph
from stack_profile.errors import ProfileError
from stack_profile.traces.trace import trace_of
from stack_profile.traces.xplane import read_space

HLO = """HloModule jit_f, is_scheduled=true

%fused (p: f32[8,32], q: f32[8,32]) -> f32[8,32] {
  %p = f32[8,32]{1,0} parameter(0)
  %q = f32[8,32]{1,0} parameter(1)
  %tanh.7 = f32[8,32]{1,0} tanh(%p)
  ROOT %add.8 = f32[8,32]{1,0} add(%tanh.7, %q)
}

ENTRY %main (x: f32[8,16], w: f32[16,32], b: f32[8,32]) -> (f32[8,32], f32[8,32]) {
  %x = f32[8,16]{1,0} parameter(0), metadata={op_name="x"}
  %w = f32[16,32]{1,0} parameter(1), metadata={op_name="params['w']"}
  %b = f32[8,32]{1,0} parameter(2), metadata={op_name="b"}
  %two = f32[] constant(2)
  %dot.1 = f32[8,32]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %flat = f32[256]{0} bitcast(%dot.1)
  %back = f32[8,32]{1,0} bitcast(%flat)
  %fusion.2 = f32[8,32]{1,0} fusion(%back, %b), kind=kLoop, calls=%fused
  %copy.3 = f32[8,32]{0,1} copy(%fusion.2)
  ROOT %out = (f32[8,32]{0,1}, f32[8,32]{1,0}) tuple(%copy.3, %fusion.2)
}
"""
CONFTEST = Path(__file__).parents[1] / "conftest.py"
LINE = f"conftest.py:{1 + CONFTEST.read_text().splitlines().index('            return x + jnp.tanh(x @ up) @ down')}"
TOOK_US = {"dot.1": 30, "fusion.2": 60, "copy.3": 10}


@pytest.fixture(scope="module")
def known(build):
    proto = build.message((1, hlo.hlo_module_from_text(HLO).as_serialized_hlo_module_proto()))
    plane = build.plane("/host:CPU")
    at, events = 0, []
    for name, us in TOOK_US.items():
        events.append(plane.event(name, at, us, hlo_op=name, hlo_module="jit_f", program_id=7, run_id=0))
        at += us
    plane.line("worker", *events)
    return trace_of([read_space(build.space(plane, build.metadata_plane([("jit_f", 7, proto)])))])


def rows_of(trace, **options):
    return {row.name: row for row in graph(trace, **options).rows}


def test_the_most_expensive_instruction_is_the_root_of_a_tree(known):
    assert [(row.tree, row.name) for row in graph(known).rows] == [
        ("*", "fusion.2"),
        ("├─ fuses", "tanh.7"),
        ("├─ fuses", "add.8"),
        ("├─ reads", "dot.1"),
        ("│  ├─ reads", "x"),
        ("│  └─ reads", "w"),
        ("├─ reads", "b"),
        ("├─ read by", "copy.3"),
        ("└─ read by", "out"),
    ]


def test_depth_ends_the_tree_and_fusions_can_stay_closed(known):
    assert list(rows_of(known, op="dot.1", depth=0)) == ["dot.1"]
    assert list(rows_of(known, op="dot.1", depth=1, fusions=False)) == ["dot.1", "x", "w", "fusion.2"]
    assert list(rows_of(known, op="jit_f: copy.3", depth=1, fusions=False)) == ["copy.3", "fusion.2", "out"]


def test_an_instruction_has_its_shape_its_costs_and_its_time(known):
    rows = rows_of(known)
    assert rows["copy.3"].shape == "f32[8,32]{0,1}"
    assert rows["dot.1"].flops == 2 * 8 * 16 * 32
    assert rows["dot.1"].traffic_bytes == 4 * (8 * 16 + 16 * 32 + 8 * 32)
    assert rows["dot.1"].self_s == pytest.approx(30e-6) and rows["dot.1"].busy_share == pytest.approx(0.3)
    assert rows["fusion.2"].result_bytes == 4 * 8 * 32
    assert (rows["w"].opcode, rows["w"].self_s) == ("parameter params['w']", None)
    assert rows["out"].shape == "2 arrays"
    assert [rows[name].distance for name in ("x", "dot.1", "tanh.7", "out")] == [-2, -1, 0, 1]


def test_operands_are_the_edges_into_and_out_of_fusions(known):
    rows = rows_of(known)
    assert rows["fusion.2"].operands == ("dot.1", "b")
    assert rows["tanh.7"].operands == ("dot.1",)
    assert (rows["add.8"].operands, rows["add.8"].fusion) == (("tanh.7", "b"), "fusion.2")
    assert rows["tanh.7"].flops == 0 and rows["tanh.7"].traffic_bytes is None


def test_graphviz_gets_every_instruction_and_every_edge(known):
    text = "".join(dot(graph(known)))
    assert text.startswith("digraph {") and text.rstrip().endswith("}") and text.count("{") == text.count("}")
    assert '"dot.1" -> "tanh.7";' in text and '"fusion.2" -> "copy.3";' in text
    assert 'label="fusion.2"' in text
    assert '"params' not in text and "params['w'] f32[16,32]" in text


def test_a_line_stands_for_its_most_expensive_operation(trace):
    rows = rows_of(trace, line=LINE, fusions=False, depth=0)
    (row,) = rows.values()
    assert row.line == f"{CONFTEST.parent}/{LINE}" and row.self_s > 0


def test_values_of_a_loop_are_single_ones_and_not_its_whole_state(trace):
    (looped, *_) = graph(trace, line=LINE, depth=3, fusions=False).rows
    rows = graph(trace, op=looped.name, depth=3, fusions=False).rows
    assert any(row.opcode == "get-tuple-element" for row in rows)
    assert all("[" in row.shape for row in rows if row.distance < 0)


def test_mistakes_are_named(known):
    with pytest.raises(UnknownName, match=r"no instruction 'fusion.3'.*'fusion.2'"):
        graph(known, op="fusion.3")
    with pytest.raises(UnknownName, match=r"no operation of line 'model.py:3'"):
        graph(known, line="model.py:3")
    with pytest.raises(ProfileError, match="depth is -1"):
        graph(known, depth=-1)


def test_without_programs_there_is_no_data(build):
    plane = build.plane("/device:GPU:0")
    plane.line("Stream #1", plane.event("kernel", 0, 5, hlo_op="dot.1", hlo_module="jit_f", program_id=1))
    answer = graph(trace_of([read_space(build.space(plane))]))
    assert answer.rows == () and "No data" in answer.notes[0]
