"""Where the time of a run goes, by a clock of the test's own."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stack_core.abi.events import CheckpointSaved, EvaluationFinished, RunFinished, RunStarted, StepFinished
from stack_core.runtime.goodput import ACTIVITIES, Goodput, share_of_training, sum_of_sessions

SECONDS = st.floats(0, 1e6)
STEPS = st.lists(st.tuples(st.sampled_from(ACTIVITIES), SECONDS, st.sampled_from(ACTIVITIES), SECONDS), max_size=20)


@given(STEPS, SECONDS)
def test_activities_sum_to_wall_time_whatever_is_moved(
    steps: list[tuple[str, float, str, float]], began: float
) -> None:
    account, now = Goodput(began), began
    for activity, passed, other, moved in steps:
        now += passed
        account.switch(activity, now)
        account.move(moved, activity, other)
        assert all(seconds >= 0 for seconds in account.seconds.values())
    account.switch("ending", now)
    assert sum(account.seconds.values()) == pytest.approx(now - began, rel=1e-9, abs=1e-6)


def test_time_goes_to_the_activity_that_ends() -> None:
    account = Goodput(10.0)
    account.switch("training", 13.0)
    account.switch("ending", 20.0)
    account.move(2.0, "training", "saving")
    account.move(100.0, "starting", "compiling")
    found = {activity: seconds for activity, seconds in account.seconds.items() if seconds}
    assert found == {"compiling": 3.0, "training": 5.0, "saving": 2.0}
    assert share_of_training(account.seconds) == 0.5


def test_a_clock_that_goes_back_takes_nothing_away() -> None:
    account = Goodput(10.0)
    account.switch("training", 9.0)
    account.switch("training", 12.0)
    assert sum(account.seconds.values()) == 2.0


def test_sessions_are_added() -> None:
    assert sum_of_sessions([{"training": 1.0}, {"training": 2.0, "forming": 4.0}])["forming"] == 4.0
    assert share_of_training(sum_of_sessions([{"training": 1.0}, {"training": 2.0, "forming": 3.0}])) == 0.5
    assert share_of_training(sum_of_sessions([])) is None


def started(first_step):
    return RunStarted(
        first_step=first_step,
        steps=9,
        parameters=1,
        work=("tokens", 1),
        flops_per_step=1,
        ideal_step_s=None,
        compile_s=0.0,
        directory=Path("x"),
    )


def step(number, duration_s):
    return StepFinished(number, {"loss": 1.0}, duration_s, 1.0, None)


def test_every_second_is_given_to_one_activity_through_a_failure_and_a_killed_driver():
    account = Goodput(100.0, "starting agents")
    account.switch("forming", 103.0)
    account.observe(started(0), 105.0)
    account.observe(step(1, 2.0), 107.0)
    account.observe(CheckpointSaved(1, Path("c"), 0.5), 107.5)
    account.observe(step(2, 3.0), 110.5)
    account.failed(112.0)  # 1.5 s into step 3
    account.switch("forming", 112.5)
    account.observe(started(1), 115.0)  # step 2 is done again
    account.observe(step(2, 3.0), 118.0)

    account = Goodput.restored(account.saved(), 125.0)
    account.switch("training", 125.0)
    account.observe(EvaluationFinished(2, {"loss": 1.0}, 2.0), 127.0)
    account.observe(RunFinished(2, {}), 127.0)
    account.switch("finishing", 128.0)

    assert account.seconds == pytest.approx(
        {
            "starting agents": 3.0,
            "forming": 2.0 + 2.5,
            "training": 2.0 + 3.0,
            "saving": 0.5,
            "done again": 3.0 + 1.5,
            "ending": 0.5,
            "evaluating": 2.0,
            "unattended": 7.0,
            "finishing": 1.0,
        }
    )
    assert sum(account.seconds.values()) == pytest.approx(28.0)
    assert share_of_training(account.seconds) == pytest.approx(5 / 28)


def test_what_a_failure_loses_is_what_no_checkpoint_holds():
    account = Goodput(0.0)
    account.observe(started(0), 0.0)
    for number in range(1, 6):
        account.observe(step(number, 1.0), float(number))
    account.observe(CheckpointSaved(4, Path("c"), 0.0), 5.0)
    account.failed(5.0)
    account.observe(started(4), 5.0)
    assert account.seconds["done again"] == pytest.approx(1.0) and account.seconds["training"] == pytest.approx(4.0)
