import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from stack_core.abi.errors import DeadlineExceeded, EngineBusy, EngineStopped, InferenceError
from stack_serve import bundle
from stack_serve.inference.lane import Lane, LaneRequest, LaneResult, Outcome

from ..bundle.digits import images, params, predict


class Told:
    """What a lane told of its requests, in batches."""

    def __init__(self) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self.told = threading.Condition()

    def __call__(self, outcomes: list[tuple[LaneRequest, Outcome]]) -> None:
        with self.told:
            self.outcomes |= {id(request): outcome for request, outcome in outcomes}
            self.told.notify_all()

    def of(self, request: LaneRequest) -> Outcome:
        with self.told:
            assert self.told.wait_for(lambda: id(request) in self.outcomes, timeout=20)
            return self.outcomes[id(request)]


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def lane(digits: Path, told: Told) -> Iterator[Lane]:
    lane = Lane(bundle.load(digits), max_waiting=40, report=told)
    lane.warm_up()
    yield lane
    lane.drain()


def make(lane: Lane, rows: int, *, deadline_s: float | None = None) -> LaneRequest:
    return lane.request("predict", {"pixels": images(rows, seed=rows)}, deadline_s, lambda request, outcome: None)


def check(outcome: Outcome, rows: int) -> None:
    assert isinstance(outcome, LaneResult), outcome
    expected = predict(params(), images(rows, seed=rows))["probabilities"]
    np.testing.assert_allclose(outcome.outputs[0], expected, rtol=1e-5, atol=1e-6)


def test_requests_that_wait_share_calls_and_each_gets_its_own_rows(lane: Lane, told: Told) -> None:
    requests = [make(lane, rows) for rows in (1, 3, 2, 20, 5)]
    for request in requests:
        lane.submit(request)
    lane.start()
    for request, rows in zip(requests, (1, 3, 2, 20, 5), strict=True):
        check(told.of(request), rows)
    lane.drain()
    counted = lane.statistics
    assert (counted.requests, counted.failed, counted.rows) == (5, 0, 31)
    calls = {size: count for size, (count, _) in counted.calls.items()}
    assert 4 <= sum(calls.values()) < 31 and sum(size * count for size, count in calls.items()) >= 31


def test_the_queue_is_bounded_but_takes_one_that_is_larger_than_it(lane: Lane, told: Told) -> None:
    large = make(lane, 50)
    lane.submit(large)
    with pytest.raises(EngineBusy, match="50 rows wait for 'digits'; 40 may") as caught:
        lane.submit(make(lane, 1))
    assert caught.value.retry_after_s > 0
    lane.start()
    check(told.of(large), 50)
    lane.submit(request := make(lane, 1))
    check(told.of(request), 1)


def test_who_waits_past_a_deadline_hears_of_it_and_costs_nothing(lane: Lane, told: Told) -> None:
    late, early = make(lane, 2, deadline_s=time.monotonic()), make(lane, 3, deadline_s=time.monotonic() + 60)
    lane.submit(late)
    lane.submit(early)
    lane.start()
    check(told.of(early), 3)
    assert isinstance(told.of(late), DeadlineExceeded)
    lane.drain()
    assert (lane.statistics.rows, lane.statistics.failed) == (3, 1)


def test_draining_ends_what_waits_and_takes_no_more(lane: Lane, told: Told) -> None:
    lane.submit(request := make(lane, 30))
    lane.start()
    lane.drain()
    check(told.of(request), 30)
    with pytest.raises(EngineStopped, match="is being unloaded"):
        lane.submit(make(lane, 1))


def test_a_call_that_fails_ends_its_requests_and_no_others(
    lane: Lane, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arrays: np.ndarray) -> Callable[..., None]:
        raise RuntimeError("the device is gone")

    whole = dict(lane._programs)
    monkeypatch.setattr(lane, "_programs", dict.fromkeys(whole, broken))
    lane.submit(request := make(lane, 20))
    lane.start()
    assert isinstance(told.of(request), RuntimeError)
    monkeypatch.setattr(lane, "_programs", whole)
    lane.submit(request := make(lane, 2))
    check(told.of(request), 2)


def test_a_fault_of_the_lane_ends_all_that_wait_and_takes_no_more(
    lane: Lane, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise KeyError("a group")

    monkeypatch.setattr(lane, "_note", broken)
    requests = [make(lane, rows) for rows in (2, 20)]
    for request in requests:
        lane.submit(request)
    lane.start()
    assert [type(told.of(request)) for request in requests] == [KeyError, KeyError]
    assert (lane.waiting_rows, lane.statistics.failed) == (0, 2)
    with pytest.raises(EngineStopped, match="'digits' failed: KeyError"):
        lane.submit(make(lane, 1))


def test_sizes_may_name_axes_in_another_order_than_the_inputs(tmp_path: Path, told: Told) -> None:
    function = bundle.Function(
        lambda params, x: {"double": x * 2},
        inputs={"x": ("float32", ("batch", "height", "width"))},
        sizes={"batch": (2,), "width": (2, 3), "height": (1, 2)},
    )
    bundle.export(tmp_path / "double", {"predict": function}, licence="MIT")
    lane = Lane(bundle.load(tmp_path / "double"), max_waiting=4, report=told)
    lane.warm_up()
    lane.start()
    x = np.arange(6, dtype="f4").reshape(1, 2, 3)
    lane.submit(request := lane.request("predict", {"x": x}, None, lambda request, outcome: None))
    outcome = told.of(request)
    assert isinstance(outcome, LaneResult)
    assert outcome.outputs[0].tolist() == (2 * x).tolist()
    lane.drain()


def test_inputs_are_checked_before_they_wait(lane: Lane) -> None:
    with pytest.raises(InferenceError, match=r"Expected \(pixels"):
        lane.request("predict", {"pixels": images(1)[:, 1:]}, None, lambda request, outcome: None)
