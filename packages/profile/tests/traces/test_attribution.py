"""Instructions without a line of their own find one, and reading a program is one pass over it."""

import subprocess
import sys

import pytest

from stack_profile.traces.hlo import read_program


def chain(build, size, *, located):
    """An HloProto of a computation in which each instruction reads the one before; some have a line."""
    parts = []
    for place in range(size):
        line = build.message((2, "jit(f)/add"), (3, "model.py"), (4, place + 1)) if place in located else b""
        operands = [(36, place)] if place else []
        instruction = build.message((1, f"add.{place}"), (2, "add"), (7, line), (35, place + 1), *operands)
        parts.append(build.message((2, instruction)))
    main = build.message((1, "main"), (5, 9)) + b"".join(parts)
    return build.message((1, build.message((1, "jit_f"), (2, "main"), (3, main))))


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
    read_program(small, 7)  # tests make the checks of annotations in the first call
    grown = calls(lambda: read_program(large, 7)) / calls(lambda: read_program(small, 7))
    assert grown < 2.1


READ = """
import sys, time
from pathlib import Path
from stack_profile.traces.hlo import read_program

proto = Path(sys.argv[1]).read_bytes()
began_s = time.process_time()
print(len(read_program(proto, 7).instructions), time.process_time() - began_s)
"""


@pytest.mark.slow
@pytest.mark.parametrize("located", [{0}, set(range(0, 100_000, 1000))], ids=["one", "few"])
def test_a_hundred_thousand_instructions_are_read_in_five_seconds(build, tmp_path, located):
    """Of the processor, in a process whose types nobody checks, however few of them have a line."""
    (tmp_path / "program").write_bytes(chain(build, 100_000, located=located))
    command = [sys.executable, "-c", READ, str(tmp_path / "program")]
    count, took_s = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    assert int(count) == 100_000 and float(took_s) <= 5.0


def test_the_nearest_line_counts_and_what_is_read_before_what_reads(build):
    instructions = read_program(chain(build, 8, located={2, 7}), 7).instructions
    lines = [each.source().line for each in instructions.values()]
    assert lines == [3, 3, 3, 3, 3, 3, 3, 8]
    assert [each.origin for each in instructions.values()] == ["user"] * 2 + ["own"] + ["operand"] * 4 + ["own"]
