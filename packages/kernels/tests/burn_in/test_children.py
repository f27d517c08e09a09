"""Child processes that end in every way."""

import subprocess
import sys
import time
from pathlib import Path

from stack_kernels.burn_in.children import problem_of, run_child


def run(tmp_path: Path, program: str, seconds: float = 60.0) -> tuple[list[dict[str, object]], str | None]:
    messages: list[dict[str, object]] = []
    ended = run_child(["-c", program], time.monotonic() + seconds, log=tmp_path / "log", on_message=messages.append)
    return messages, ended.problem


def test_lines_that_are_objects_are_messages(tmp_path: Path) -> None:
    assert run(tmp_path, "print('hello'); print('[1]'); print('{\"step\": 3}')") == ([{"step": 3}], None)


def test_a_crash_is_named_and_keeps_earlier_messages(tmp_path: Path) -> None:
    program = "import os, signal; print('{\"step\": 1}', flush=True); os.kill(os.getpid(), signal.SIGSEGV)"
    assert run(tmp_path, program) == ([{"step": 1}], "SIGSEGV")


def test_an_exit_status_comes_with_the_last_line_of_the_errors(tmp_path: Path) -> None:
    assert run(tmp_path, "raise SystemExit('no device')") == ([], "exit status 1: no device")


def test_the_exception_counts_more_than_later_lines() -> None:
    log = "Traceback:\n  File x\njax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: 9 GiB\nstack: the trace is in t.pb\n"
    assert problem_of(1, log) == "exit status 1: jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: 9 GiB"


def test_a_child_that_hangs_ends_with_its_children_at_the_deadline(tmp_path: Path) -> None:
    program = "import subprocess; print('{}', flush=True); subprocess.run(['sleep', '60'])"
    started_s = time.monotonic()
    assert run(tmp_path, program, seconds=2.0) == ([{}], "the time budget ended it")
    assert time.monotonic() - started_s < 30


def test_a_child_ends_with_a_killed_parent() -> None:
    child = (
        "from stack_kernels.burn_in.children import leave_with_parent as leave; import time; leave(); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(30) == 1


def test_a_child_that_exits_normally_is_not_disturbed_by_the_watch(tmp_path: Path) -> None:
    program = "from stack_kernels.burn_in.children import leave_with_parent as leave; leave(); print('{}')"
    assert run(tmp_path, program) == ([{}], None)
