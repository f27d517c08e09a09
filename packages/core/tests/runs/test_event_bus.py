"""The bus hands every event to every observer and drops the ones that fail."""

import pytest

from stack_core.errors import ConfigError
from stack_core.events import StepStarted
from stack_core.registry import Entry, Registry
from stack_core.runs.event_bus import EventBus, ObserverContext, observers_from


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


def context(tmp_path):
    return ObserverContext(tmp_path, config=None, terminal=False)


def registry(**targets):
    return Registry("observers", lambda: ({name: Entry(name, target, "p") for name, target in targets.items()}, {}))


def broken(context):
    raise OSError("no room")


@pytest.mark.parametrize(
    ("target", "reason"),
    [(broken, "OSError: no room"), ("no_such_module:x", "plugin 'p' cannot be loaded from 'no_such_module:x'")],
)
def test_an_observer_that_cannot_be_made_is_named_and_left_out(tmp_path, target, reason):
    recorder = Recorder()
    observers = registry(broken=target, idle=lambda context: None, recorder=lambda context: recorder)
    with pytest.warns(UserWarning, match=f"Observer 'broken' cannot be made and is left out: .*{reason}"):
        assert observers_from(observers, context(tmp_path)) == [recorder]


def test_an_observer_may_refuse_the_run(tmp_path):
    def refusing(context):
        raise ConfigError("profile.steps is 0")

    with pytest.raises(ConfigError, match=r"profile\.steps"):
        observers_from(registry(refusing=refusing), context(tmp_path))
