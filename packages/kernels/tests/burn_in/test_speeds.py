"""The order of the measured calls, and calls that fail."""

import time
from typing import Any

import pytest

from stack_core.abi.errors import BenchmarkError, UnsupportedOp
from stack_core.abi.ops import OpCall
from stack_core.ops import ExplainedCall
from stack_kernels.bench.results import Row
from stack_kernels.bench.run import Task
from stack_kernels.burn_in import speeds
from stack_kernels.burn_in.speeds import _Prepared, measure_waves, waves

EXPLAINED = ExplainedCall(
    "norm", {}, {}, UnsupportedOp(), UnsupportedOp(), 1, False, "", OpCall("norm", {}, {}, "forward")
)


def row(task: Task, ran: str) -> Row:
    case = task.case
    own = {"wall_s": (1.0,), "cpu_s": (1.0,), "reference_wall_s": (2.0,), "reference_cpu_s": (2.0,)}
    numbers = {"flops": 1, "traffic_bytes": 1, "bound_s": None, "denominator": None}
    return Row(
        op=case.op,
        model=case.model,
        case=case.name,
        dtype=task.dtype,
        direction=task.direction,
        asked=task.asked,
        ran=ran,
        **own,
        **numbers,
    )


def measure(monkeypatch: pytest.MonkeyPatch, outcomes: dict[str, Any], seconds: float = 60.0) -> tuple[Any, ...]:
    """Measures norm, with `outcomes` by the requested implementation."""

    def prepare(self: object, task: Task) -> Any:
        outcome = outcomes.get(task.asked) or _Prepared(task, EXPLAINED, "mosaic_tpu", print, print)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    timed: list[str] = []

    def time_it(found: Any, arrays: object, budget_s: float, say: object) -> Row:
        timed.append(found.ran)
        return row(found.task, found.ran)

    monkeypatch.setattr(speeds._Programs, "prepare", prepare)
    monkeypatch.setattr(speeds, "_timed", time_it)
    messages: list[Any] = []
    rows: list[Row] = []
    written: list[int] = []
    measure_waves(
        waves(["norm"], "tpu"),
        rows,
        end_s=time.perf_counter() + seconds,
        threads=2,
        say=messages.append,
        write=lambda rows: written.append(len(rows)),
    )
    return rows, timed, messages, written


def test_choices_come_first_and_an_equal_program_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, timed, _, written = measure(monkeypatch, {})
    asked = [each.asked for each in rows]
    assert asked[0] == "" and asked == sorted(asked)
    assert written == list(range(1, len(rows) + 1))
    assert len(timed) == asked.count("")


def test_failures_and_refusals_are_reported_and_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _, messages, _ = measure(monkeypatch, {"": BenchmarkError("mine failed\nwith ValueError")})
    failed = [message for message in messages if "failed" in message]
    assert {message["reason"] for message in failed} == {"mine failed with ValueError"}
    assert len(failed) == len(waves(["norm"], "tpu")[0]) and {each.asked for each in rows} == {"mosaic_tpu"}
    _, _, messages, _ = measure(monkeypatch, {"mosaic_tpu": "odd sizes"})
    assert [m["reason"] for m in messages if "refused" in m] == ["odd sizes"] * len(waves(["norm"], "tpu")[1])


def test_calls_that_the_time_does_not_reach_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, timed, messages, _ = measure(monkeypatch, {}, seconds=-1.0)
    assert not rows and not timed
    names = [str(task) for wave in waves(["norm"], "tpu") for task in wave]
    assert [message["not_reached"] for message in messages] == names


@pytest.mark.slow
def test_real_programs_are_compiled_ahead_and_timed() -> None:
    """Measures the norms of the small model on this CPU."""
    rows: list[Row] = []
    messages: list[Any] = []
    planned = waves(["norm"], "cpu")
    end_s = time.perf_counter() + 120
    measure_waves(planned, rows, end_s=end_s, threads=2, say=messages.append, write=lambda rows: None)
    assert not [message for message in messages if "failed" in message or "not_reached" in message]
    assert len(rows) == sum(map(len, planned))
