"""Child processes that end in every way."""

import time
from pathlib import Path

from stack_kernels.burn_in.children import run_child


def run(tmp_path: Path, program: str, seconds: float = 60.0) -> tuple[list[dict[str, object]], str | None]:
    said: list[dict[str, object]] = []
    ended = run_child(["-c", program], time.monotonic() + seconds, log=tmp_path / "log", on_message=said.append)
    return said, ended.problem


def test_lines_that_are_objects_are_told(tmp_path: Path) -> None:
    assert run(tmp_path, "print('hello'); print('[1]'); print('{\"step\": 3}')") == ([{"step": 3}], None)


def test_a_crash_is_named_and_keeps_what_was_told(tmp_path: Path) -> None:
    program = "import os, signal; print('{\"step\": 1}', flush=True); os.kill(os.getpid(), signal.SIGSEGV)"
    assert run(tmp_path, program) == ([{"step": 1}], "SIGSEGV")


def test_an_exit_status_comes_with_the_last_line_of_the_errors(tmp_path: Path) -> None:
    assert run(tmp_path, "raise SystemExit('no device')") == ([], "exit status 1: no device")


def test_a_child_that_hangs_ends_with_its_children_at_the_deadline(tmp_path: Path) -> None:
    program = "import subprocess; print('{}', flush=True); subprocess.run(['sleep', '60'])"
    started_s = time.monotonic()
    assert run(tmp_path, program, seconds=2.0) == ([{}], "the time budget ended it")
    assert time.monotonic() - started_s < 30
