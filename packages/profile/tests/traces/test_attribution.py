"""Instructions without a line of their own find one, and reading a program is one pass over it."""

import sys

import pytest

from stack_profile.traces.hlo import read_program


def chain(build, size, *, located):
    """An HloProto of a computation in which each instruction reads the one before; some have a line."""
    parts = []
    for place in range(size):
        line = build.message((2, "jit(f)/add"), (3, "model.py"), (4, place + 1)) if place in located else b""
        operands = [(36, place)] if place else []
        parts.append((2, build.message((1, f"add.{place}"), (2, "add"), (7, line), (35, place + 1), *operands)))
    return build.message((1, build.message((1, "jit_f"), (2, "main"), (3, build.message((1, "main"), (5, 9), *parts)))))


def calls(work):
    """How many functions, of Python's and of C's, some work calls."""
    count = 0

    def counted(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("located", [None, 0, -1], ids=["no line", "the first", "the last"])
def test_the_work_of_reading_grows_with_the_instructions_and_no_faster(build, located):
    small, large = (chain(build, size, located=set() if located is None else {located % size}) for size in (200, 400))
    grown = calls(lambda: read_program(large, 7)) / calls(lambda: read_program(small, 7))
    assert grown < 2.1


def test_the_nearest_line_counts_and_what_is_read_before_what_reads(build):
    instructions = read_program(chain(build, 8, located={2, 7}), 7).instructions
    lines = [each.source().line for each in instructions.values()]
    assert lines == [3, 3, 3, 3, 3, 3, 3, 8]
    assert [each.origin for each in instructions.values()] == ["user"] * 2 + ["own"] + ["operand"] * 4 + ["own"]
