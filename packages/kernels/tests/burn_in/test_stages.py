"""Stages with children that crash or run out of time."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stack_kernels.burn_in import stages
from stack_kernels.burn_in.children import ChildResult
from stack_kernels.burn_in.device import LocalDevice
from stack_kernels.burn_in.stages import BurnIn
from stack_kernels.burn_in.state import State

DEVICE = LocalDevice("cpu", ("cpu",), "cpu", "today, cpu", "cpu")
Child = tuple[list[dict[str, Any]], ChildResult]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., BurnIn]:
    """Returns a function that runs one stage with children that send messages and end as given."""

    def start(stage: str, children: Sequence[Child]) -> BurnIn:
        waiting = list(children)

        def child(arguments: Any, deadline_s: float, *, log: Path, on_message: Any = None, environment: Any) -> Any:
            messages, ended = waiting.pop(0)
            for message in messages:
                on_message(message)
            return ended

        monkeypatch.setattr(stages, "run_child", child)
        with State(tmp_path, "cpu") as state:
            burn_in = BurnIn(tmp_path, DEVICE, ["norm"], state)
            burn_in.stages[stage](1e12)
        assert not waiting
        return burn_in

    return start


def test_a_call_that_ends_the_process_fails_and_the_rest_is_measured(run: Callable[..., BurnIn]) -> None:
    ahead = [{"started": "a"}, {"started": "b"}]
    found = run(
        "speeds",
        [
            (ahead, ChildResult(-11, "")),  # in several threads: started again with one
            ([*ahead[:1], {"finished": "a"}, *ahead[1:]], ChildResult(-11, "")),
            ([{"refused": "c", "reason": "odd"}, {"not_reached": "d"}], ChildResult(0, "")),
        ],
    ).found
    assert found.failures == ["speeds b: SIGSEGV"]
    assert found.not_applicable == ["speeds c: odd"] and found.not_reached == ["speeds d"]


def test_a_call_that_hangs_is_named_and_not_tried_again(
    run: Callable[..., BurnIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("speeds", [([{"started": "slow"}], ChildResult(None, ""))]).found.failures == []
    monkeypatch.setattr(stages, "_MIN_HANG_S", -1.0)
    found = run("speeds", [([{"started": "a"}], ChildResult(None, ""))]).found
    assert found.failures == ["speeds a: no result when the time budget ended"]
    assert found.not_reached == ["speeds: the time budget ended it"]
    assert run("speeds", [([], ChildResult(0, ""))]).found.failures == found.failures


def test_tuned_calls_are_listed_by_result(run: Callable[..., BurnIn]) -> None:
    messages = [
        {"done": 0, "of": 4, "what": "norm"},
        {"tuned": "norm", "before": "reference", "choice": "mine"},
        {"left_out": "rope", "reason": "nothing else supports it"},
        {"left_out": "linear", "reason": "out of time for 3 of 7"},
        {"left_out": "low_rank", "reason": "the reference failed: no memory"},
    ]
    found = run("tuning", [(messages, ChildResult(0, ""))]).found
    assert found.tuned == [("norm", "reference", "mine")]
    assert found.not_applicable == ["tuning rope: nothing else supports it"]
    assert found.not_reached == ["tuning linear: out of time for 3 of 7"]
    assert found.failures == ["tuning low_rank: the reference failed: no memory"]


def test_a_profile_that_fails_is_named(run: Callable[..., BurnIn], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "registries", SimpleNamespace(commands={"profile run"}))  # tested without stack-profile
    log = "Traceback:\nValueError: no events\nstack: the trace is in t.pb"
    found = run("profile", [([], ChildResult(1, log))]).found
    assert found.failures == ["profile run: exit status 1: ValueError: no events"] and found.profile is None
