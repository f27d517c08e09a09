"""HLO text is read whole, and instructions count as often as they run."""

import jax
import jax.numpy as jnp
import pytest

from stack_core.abi.errors import HardwareError
from stack_core.programs.hlo import ArrayShape, parse_hlo


def executed(function, *args):
    return parse_hlo(jax.jit(function).lower(*args).compile().as_text())


def times(module, opcode):
    return [execution.times for execution in module.executions() if execution.instruction.opcode == opcode]


# As a TPU's compiler prints a loop: no trip count, a counter behind copies, tiled layouts, comments in tuples.
LOOP = """HloModule jit_step, is_scheduled=true, entry_computation_layout={()->f32[8,16]{1,0:T(8,128)}}

%fused (param_0: f32[8,16]) -> f32[8,16] {
  %param_0 = f32[8,16]{1,0:T(8,128)} parameter(0)
  ROOT %negate.1 = f32[8,16]{1,0:T(8,128)S(1)} negate(%param_0)
}

%body (state: (s32[], f32[8,16], /*index=2*/s32[])) -> (s32[], f32[8,16], /*index=2*/s32[]) {
  %one = s32[]{:T(128)} constant(STEP)
  %state = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)}, /*index=2*/s32[]{:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %x = f32[8,16]{1,0:T(8,128)} get-tuple-element(%state), index=1
  %rest = s32[]{:T(128)} get-tuple-element(%state), index=2
  %i.copy = s32[]{:T(128)S(6)} copy(%i)
  %next = s32[]{:T(128)} add(%i.copy, %one)
  %fusion.1 = f32[8,16]{1,0:T(8,128)} fusion(%x), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/neg"}
  ROOT %result = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)}, /*index=2*/s32[]{:T(128)}) tuple(%next, %fusion.1, %rest)
}

%condition (state.1: (s32[], f32[8,16], /*index=2*/s32[])) -> pred[] {
  %bound = s32[]{:T(128)} constant(LAST)
  %state.1 = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)}, /*index=2*/s32[]{:T(128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i.1, %bound), direction=LT
}

ENTRY %main () -> f32[8,16] {
  %zero = s32[]{:T(128)} constant(FIRST)
  %start = s32[]{:T(128)} copy(%zero)
  %x.1 = f32[8,16]{1,0:T(8,128)} broadcast(%zero), dimensions={}
  %tuple = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)}, /*index=2*/s32[]{:T(128)}) tuple(%start, %x.1, %zero)
  %while.7 = (s32[], f32[8,16]{1,0:T(8,128)}, /*index=2*/s32[]) while(%tuple), condition=%condition, body=%body
  ROOT %out = f32[8,16]{1,0:T(8,128)} get-tuple-element(%while.7), index=1
}
"""


def loop(first=0, last=6, step=1):
    return LOOP.replace("FIRST", str(first)).replace("LAST", str(last)).replace("STEP", str(step))


@pytest.mark.parametrize(
    ("limits", "trips"),
    [((0, 6, 1), 6), ((2, 6, 1), 4), ((0, 7, 2), 4), ((9, 6, 1), 0)],
)
def test_trips_follow_from_the_counter_where_xla_does_not_note_them(limits, trips):
    module = parse_hlo(loop(*limits))
    assert times(module, "negate") == [trips]
    assert module.unknown_loops() == ()


def test_loops_around_an_instruction_and_fusions_are_told():
    found = {execution.instruction.name: execution for execution in parse_hlo(loop()).executions()}
    assert found["negate.1"].loops == ("while.7",) and found["negate.1"].fused
    assert not found["fusion.1"].fused
    assert found["while.7"].loops == () and found["while.7"].times == 1
    assert found["fusion.1"].instruction.op_name == "jit(step)/neg"
    assert found["negate.1"].instruction.shapes == (ArrayShape("f32", (8, 16), memory_space=1),)
    assert found["negate.1"].instruction.shapes[0].layout == "1,0:T(8,128)S(1)"
    assert [shape.dims for shape in found["while.7"].instruction.shapes] == [(), (8, 16), ()]


def test_a_noted_trip_count_is_taken_as_it_is():
    noted = loop().replace("body=%body\n", 'body=%body, backend_config={"known_trip_count":{"n":"11"}}\n')
    assert times(parse_hlo(noted), "negate") == [11]


@pytest.mark.parametrize(
    "change",
    [("direction=LT", "direction=NE"), ("add(%i.copy, %one)", "multiply(%i.copy, %one)"), ("tuple(%next", "tuple(%i")],
)
def test_a_loop_whose_trips_do_not_follow_counts_once_and_is_named(change):
    text = loop()
    assert change[0] in text
    module = parse_hlo(text.replace(*change))
    assert times(module, "negate") == [1]
    assert module.unknown_loops() == ("while.7",)


def test_compiled_scans_multiply():
    def nested(x):
        def inner(x, _):
            return jnp.sin(x), None

        def outer(x, _):
            return jax.lax.scan(inner, x @ x, length=3)[0], None

        return jax.lax.scan(outer, x, length=5)[0]

    module = executed(nested, jnp.ones((16, 16)))
    assert times(module, "sine") == [15]
    assert times(module, "dot") == [5]


def test_a_compiled_loop_that_decides_for_itself_is_unknown():
    module = executed(lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ x, x), jnp.ones((16, 16)))
    assert len(module.unknown_loops()) == 1
    assert "while" in module.unknown_loops()[0]


def test_every_branch_of_a_conditional_counts():
    def choose(index, x):
        return jax.lax.switch(index, [jnp.sin, lambda x: x @ x, jnp.tanh], x)

    module = executed(choose, 1, jnp.ones((16, 16)))
    assert [times(module, opcode) for opcode in ("sine", "dot", "tanh")] == [[1], [1], [1]]
    heaviest = module.executions(lambda execution: execution.instruction.opcode == "tanh")
    assert {"sine", "dot", "tanh"} & {execution.instruction.opcode for execution in heaviest} == {"tanh"}


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        (ArrayShape("f32", (3, 5)), 60),
        (ArrayShape("bf16", ()), 2),
        (ArrayShape("pred", (7,)), 7),
        (ArrayShape("s4", (3, 3)), 5),
        (ArrayShape("f8e4m3fn", (4,)), 4),
        (ArrayShape("c64", (2,)), 16),
        (ArrayShape("token", ()), 0),
        (ArrayShape("f32", (0, 5)), 0),
    ],
)
def test_sizes(shape, size):
    assert shape.bytes == size


def test_what_is_no_hlo_is_refused():
    with pytest.raises(HardwareError, match="starts with 'module @jit' and has no entry"):
        parse_hlo("module @jit")
