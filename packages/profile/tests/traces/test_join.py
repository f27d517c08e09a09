"""What ran is joined with its own program, whatever number a compile cache gave it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stack_profile.traces.hlo import outline
from stack_profile.traces.join import Join, Kind, join


def test_programs_of_a_warm_cache_are_joined_by_name_and_operations_together(tmp_path):
    def captured(out, fresh):
        program = Path(__file__).with_name("warm_cache.py")
        command = [sys.executable, str(program), str(tmp_path / "cache"), str(tmp_path / out), str(fresh)]
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)

    cold, warm = captured("cold", 0), captured("warm", 5)
    joined = {f"jit_{name}": [name] for name in ("first", "second", "third", "bucket")}
    scaled = ["doubled.<locals>.scaled", "tripled.<locals>.scaled"]
    assert cold == {"joined": joined | {"jit_scaled": scaled}, "own_numbers": True, "problems": []}
    assert warm["joined"] == joined | {"jit_scaled": []} and not warm["own_numbers"]
    assert warm["problems"] and warm["problems"][0].count("jit_scaled") == 2
    assert "which 2 programs fit" in warm["problems"][0]


@pytest.fixture
def program(build):
    """Makes a program of additions, in a line each."""

    def made(module, key, **lines):
        parts = []
        for place, (name, line) in enumerate(lines.items(), 1):
            place_of = build.message((2, "jit(f)/add"), (3, "model.py"), (4, line))
            parts.append((2, build.message((1, name), (2, "add"), (7, place_of), (35, place))))
        return outline(build.message((1, build.message((1, module), (3, build.message((5, 9), *parts))))), key)

    return made


def joined(programs, *ran):
    """The keys of the programs that operations are joined with, given as (number, module, name)."""
    found = join([Kind(False, *each) for each in ran], {each.key: each for each in programs})
    return [program and program.key for program in found.found.values()], list(found.problems())


def test_a_number_counts_where_name_and_operations_agree(program):
    programs = [program("jit_f", 1, a=1, b=2), program("jit_f", 2, a=3, c=4), program("jit_g", 3, a=5)]
    assert joined(programs, (1, "jit_f", "a"), (2, "jit_f", "a")) == ([1, 2], [])  # both fit both, and numbers decide
    assert joined(programs, (2, "jit_f", "b"))[0] == [1]  # the number is another program's
    assert joined(programs, (1, "jit_g", "a"))[0] == [3]
    assert joined(programs, (7, "jit_f", "b"))[0] == [1]


def test_nothing_is_joined_by_its_name_alone(program):
    programs = [program("jit_f", 1, a=1)]
    expected = "Unknown programs, whose operations have no lines: jit_f (1)"
    assert joined(programs, (1, "jit_f", "a"), (1, "jit_f", "other")) == ([None], [expected])


def test_where_numbers_are_another_process_s_they_do_not_choose_between_programs_that_fit(program):
    programs = [program("jit_f", 1, a=1), program("jit_f", 2, a=2), program("jit_g", 3, a=5)]
    found, problems = joined(programs, (1, "jit_f", "a"), (9, "jit_g", "a"))
    assert found == [None, 3] and "jit_f (1, which 2 programs fit)" in problems[0]


def test_any_of_the_programs_that_ask_for_the_same_lines_will_do(program):
    programs = [program("jit_f", 1, a=1, b=2), program("jit_f", 2, a=1, c=3), program("jit_g", 3, a=5)]
    assert joined(programs, (8, "jit_f", "a")) == ([1], [])
    assert joined(programs, (2, "jit_f", "a"), (9, "jit_g", "a")) == ([2, 3], [])


def test_operations_of_tpus_have_the_program_of_their_number(program):
    assert joined([program("jit_f", 1, a=1)], (1, "", "a"), (1, "", "of the runtime")) == ([1], [])
    assert joined([program("jit_f", 1, a=1)], (2, "", "a")) == ([None], [])


def test_programs_that_did_not_run_are_not_read(program):
    programs = [program("jit_f", 1, a=1), program("jit_g", 2, a=1)]
    assert joined(programs, (1, "jit_f", "a"))[0] == [1]
    assert ["_content" in vars(each) for each in programs] == [True, False]


def test_a_trace_without_programs_has_no_problem_with_them():
    assert list(Join.of({}, {(1, "jit_f"): {"a"}}).problems()) == []
