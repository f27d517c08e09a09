"""Worker processes that crash, hang, or do not start."""

import time
from pathlib import Path

import pytest

from stack_core.abi.errors import BenchmarkError
from stack_kernels.burn_in.checks import Check, planned_checks, run_checks
from stack_kernels.burn_in.pool import WorkerPool

# Takes requests as a worker does; the check's name says what becomes of it.
WORKER = """
import json, os, signal, sys, threading, time
print(json.dumps({"ready": True}), flush=True)
def run(request):
    if request["check"].startswith("crash"):
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGSEGV)
    if request["check"].startswith(("crash", "hang")):
        time.sleep(60)
    time.sleep(0.4 * request["check"].startswith("slow"))
    print(json.dumps({"key": request["key"], "outcome": "passed", "reason": "", "seconds": 0.0}), flush=True)
for line in sys.stdin:
    threading.Thread(target=run, args=(json.loads(line),)).start()
"""


def outcomes(tmp_path: Path, *names: str, workers: int, threads: int = 1, limit_s: float = 30.0) -> dict[str, str]:
    found: dict[str, str] = {}
    with WorkerPool(["-c", WORKER], workers=workers, threads=threads, limit_s=limit_s, logs=tmp_path) as pool:
        left = run_checks(
            [Check("norm", "mine", name, 0) for name in names],
            pool,
            deadline_s=time.monotonic() + 40,
            clock=time.monotonic,
            report=lambda each: found.update({each.check.name: f"{each.outcome} {each.reason}".strip()}),
        )
    assert not left
    return found


def test_a_crash_costs_its_own_check(tmp_path: Path) -> None:
    names = ("a", "crash", "b", "c")
    assert outcomes(tmp_path, *names, workers=1) == {
        "a": "passed",
        "crash": "died SIGSEGV",
        "b": "passed",
        "c": "passed",
    }


def test_checks_in_flight_beside_a_crash_are_run_again_one_by_one(tmp_path: Path) -> None:
    names = ("slow-1", "crash", "slow-2", "b")
    found = outcomes(tmp_path, *names, workers=1, threads=3)
    assert found == {"slow-1": "passed", "crash": "died SIGSEGV", "slow-2": "passed", "b": "passed"}


def test_a_check_that_hangs_ends_at_the_limit(tmp_path: Path) -> None:
    found = outcomes(tmp_path, "hang", "a", "b", workers=2, limit_s=2.0)
    assert found == {"hang": "died no result after 2 s", "a": "passed", "b": "passed"}


def test_workers_that_do_not_start_are_an_error(tmp_path: Path) -> None:
    with (
        WorkerPool(["-c", "raise RuntimeError('no device')"], workers=2, limit_s=30.0, logs=tmp_path) as pool,
        pytest.raises(BenchmarkError, match=r"No worker process can use the device\. exit status 1: .*no device"),
    ):
        run_checks(
            [Check("norm", "mine", "a", 0)],
            pool,
            deadline_s=time.monotonic() + 30,
            clock=time.monotonic,
            report=print,
        )


@pytest.mark.slow
def test_real_checks_in_threads_of_one_process(tmp_path: Path) -> None:
    """Runs the contract of rope as on a TPU, whose process traces and compiles several checks at the same time."""
    planned = [check for check in planned_checks("cpu", ["rope", "norm"]) if check.implementation == "reference"]
    found: dict[str, str] = {}
    worker = ["-m", "stack_kernels.burn_in.contracts"]
    with WorkerPool(worker, workers=1, threads=3, limit_s=100.0, logs=tmp_path) as pool:
        left = run_checks(
            planned,
            pool,
            deadline_s=time.monotonic() + 200,
            clock=time.monotonic,
            report=lambda each: found.update({each.check.key: f"{each.outcome} {each.reason}".strip()}),
        )
    assert not left and set(found.values()) == {"passed"} and len(found) == len(planned) > 20
