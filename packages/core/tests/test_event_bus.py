"""The bus hands every event to every observer and drops the ones that fail."""

import pytest

from stack_core.event_bus import EventBus
from stack_core.events import StepStarted


class Recorder:
    def __init__(self):
        self.seen = []

    def observe(self, event):
        self.seen.append(event)

    def close(self):
        self.seen.append("closed")


class Failing(Recorder):
    def observe(self, event):
        raise OSError("no room")


def test_a_failing_observer_is_named_once_and_left_out():
    recorder = Recorder()
    with EventBus([Failing(), recorder]) as bus:
        with pytest.warns(UserWarning, match="Observer Failing failed and is left out: OSError: no room"):
            bus.emit(StepStarted(1))
        bus.emit(StepStarted(2))
    assert recorder.seen == [StepStarted(1), StepStarted(2), "closed"]
