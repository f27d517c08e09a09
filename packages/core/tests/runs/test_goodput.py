import pytest
from hypothesis import given
from hypothesis import strategies as st

from stack_core.runs.goodput import ACTIVITIES, Goodput, goodput, sum_of_sessions

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
    assert goodput(account.seconds) == 0.5


def test_a_clock_that_goes_back_takes_nothing_away() -> None:
    account = Goodput(10.0)
    account.switch("training", 9.0)
    account.switch("training", 12.0)
    assert sum(account.seconds.values()) == 2.0


def test_sessions_are_added() -> None:
    assert sum_of_sessions([{"training": 1.0}, {"training": 2.0, "forming": 4.0}])["forming"] == 4.0
    assert goodput(sum_of_sessions([{"training": 1.0}, {"training": 2.0, "forming": 3.0}])) == 0.5
    assert goodput(sum_of_sessions([])) is None
