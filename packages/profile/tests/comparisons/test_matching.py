"""Operations find each other across compilations that gave them other names, lines and forms."""

import jax
import jax.numpy as jnp
import pytest

from stack_profile.comparisons.matching import match, sites
from stack_profile.traces.hlo import read_program
from stack_profile.traces.operations import Operation

BEFORE = """
import jax
import jax.numpy as jnp

def step(x, weights):
    with jax.named_scope("first"):
        x = jnp.sort(x @ weights[0])
    with jax.named_scope("second"):
        x = jnp.sort(x @ weights[1])
        x = jnp.sort(x @ weights[1])
    return x
"""


@pytest.fixture
def sites_of(build, tmp_path):
    """What identifies the products and sorts of a program, by the text of its source."""

    def found(source, width=8):
        path = tmp_path / str(len(list(tmp_path.iterdir()))) / "model.py"  # each version in a folder of its own
        path.parent.mkdir()
        path.write_text(source)
        module = {}
        exec(compile(source, str(path), "exec"), module)
        arguments = jnp.ones((4, width)), [jnp.ones((width, width))] * 2
        program = read_program(build.hlo_proto(jax.jit(module["step"]).lower(*arguments).compile()), 7)
        operations = [
            Operation(name, program.name, 7, program, instruction)
            for name, instruction in program.instructions.items()
            if instruction.opcodes & {"dot", "sort"} and not instruction.fused
        ]
        return sites(operations)

    return found


def described(before, after):
    """(how, line before, line after) of each match, None for a side without."""
    for each in match(before, after):
        lines = [
            [side[place].line for place in places] for side, places in ((before, each.before), (after, each.after))
        ]
        yield (each.how, *lines)


def test_each_operation_finds_itself(sites_of):
    before = sites_of(BEFORE)
    assert len(set(before)) == len(before) == 6
    assert sorted(described(before, sites_of(BEFORE))) == sorted(
        ("alike", [line], [line]) for line in (7, 7, 9, 9, 10, 10)
    )


def test_an_edit_above_moves_lines_and_not_operations(sites_of):
    moved = sites_of(BEFORE.replace("import jax\n", "import jax\n\n", 1))
    assert sorted(described(sites_of(BEFORE), moved)) == sorted(
        ("moved", [line], [line + 1]) for line in (7, 7, 9, 9, 10, 10)
    )


def test_other_shapes_are_said(sites_of):
    found = list(described(sites_of(BEFORE), sites_of(BEFORE, width=16)))
    assert len(found) == 6 and {how for how, *_ in found} == {"other shapes"}
    assert all(before == after for _, before, after in found)


def test_one_of_several_alike_that_is_gone_leaves_the_others_matched(sites_of):
    fewer = sites_of(BEFORE.replace("        x = jnp.sort(x @ weights[1])\n", "        x = x + 1\n", 1))
    found = list(described(sites_of(BEFORE), fewer))
    assert sorted(each for each in found if each[0] == "alike") == sorted(
        ("alike", [line], [line]) for line in (7, 7, 10, 10)
    )
    assert sorted(each for each in found if each[0] != "alike") == [("disappeared", [9], [])] * 2


def test_what_no_program_is_known_of_is_known_by_its_name():
    before, after = (
        sites([Operation(name, "jit_f", 0, None, None) for name in names])
        for names in (("fusion.1", "fusion.2"), ("fusion.2", "fusion.3"))
    )
    assert [each.how for each in match(before, after)] == ["alike", "disappeared", "appeared"]


def test_every_operation_is_in_one_match(sites_of):
    before, after = (
        sites_of(BEFORE),
        sites_of(BEFORE.replace("jnp.sort(x @ weights[0])", "x @ weights[0] @ weights[1]")),
    )
    found = list(match(before, after))
    assert sorted(place for each in found for place in each.before) == list(range(len(before)))
    assert sorted(place for each in found for place in each.after) == list(range(len(after)))
