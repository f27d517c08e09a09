import threading
import time
from collections.abc import Callable
from typing import Any

from stack_serve.llm.compiled_programs import CompiledPrograms, Key

MAY_COMPILE = threading.Event()
MAY_COMPILE.set()


class Lowered:
    def __init__(self, key: Key) -> None:
        self.key = key

    def compile(self, options: Any) -> Key:
        MAY_COMPILE.wait()
        return self.key


def wait_until(happened: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < until_s
        time.sleep(0.001)


def test_the_background_compiles_a_size_once_a_step_needs_it() -> None:
    programs, sizes = CompiledPrograms(Lowered), (2, 4, 8)
    needed: list[Key] = [("step", 2), ("step", 4)]
    programs.compile_first([("admit",)], [("step", 8)], None, threads=2, if_needed=needed)
    wait_until(lambda: programs.to_compile == 0)
    assert set(programs.programs) == {("admit",), ("step", 8)}
    MAY_COMPILE.clear()
    assert programs.ready_size("step", 2, sizes) == 8
    MAY_COMPILE.set()
    wait_until(lambda: programs.to_compile == 0)
    assert programs.ready_size("step", 2, sizes) == 2 and programs.is_ready("step", 2)
    assert ("step", 4) not in programs.programs
    assert programs["step", 4] == ("step", 4), "a step that cannot run in another program compiles its own"
    programs.stop()
    assert not any(thread.is_alive() for thread in programs._threads)


def test_the_background_ends_with_programs_that_no_step_needed() -> None:
    programs = CompiledPrograms(Lowered)
    programs.compile_first([], [], None, threads=1, if_needed=[("step", 2)])
    programs.stop()
    assert not programs.programs and not programs._threads[0].is_alive()
