"""Compilation in threads."""

import threading
import time

from stack_kernels.tuning.ahead import compile_ahead


def test_results_and_errors_by_key() -> None:
    def fail() -> str:
        raise ValueError("no such register")

    found = compile_ahead({"a": lambda: "program", "b": fail}, threads=2, deadline_s=60.0, clock=lambda: 0.0)
    assert found["a"] == "program" and isinstance(found["b"], ValueError)


def test_compilations_run_at_the_same_time() -> None:
    barrier = threading.Barrier(3)
    found = compile_ahead(dict.fromkeys("abc", lambda: barrier.wait(30)), threads=3, deadline_s=60.0, clock=lambda: 0.0)
    assert sorted(found.values()) == [0, 1, 2]


def test_none_starts_after_the_deadline_and_a_slow_one_is_not_awaited() -> None:
    now_s, entered, release = [0.0], threading.Event(), threading.Event()

    def slow() -> str:
        now_s[0] = 100.0
        entered.set()
        release.wait(30)
        return "late"

    def clock() -> float:
        return now_s[0]

    started: list[str] = []
    jobs = {"slow": slow, "never": lambda: started.append("never")}
    assert compile_ahead(jobs, threads=1, deadline_s=0.1, clock=clock) == {} and entered.is_set()
    release.set()
    assert not started


def test_what_runs_at_the_deadline_is_awaited_until_the_end() -> None:
    entered, started = threading.Event(), list[str]()

    def slow() -> str:
        entered.set()
        time.sleep(0.2)
        return "late"

    def clock() -> float:
        return 1.0 if entered.is_set() else 0.0

    jobs = {"slow": slow, "never": lambda: started.append("never")}
    assert compile_ahead(jobs, threads=1, deadline_s=0.5, end_s=60.0, clock=clock) == {"slow": "late"}
    assert not started
