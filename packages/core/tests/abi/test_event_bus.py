"""The bus hands every event to every observer and drops the ones that fail."""

import threading
import time

import pytest

from stack_core.abi import event_bus
from stack_core.abi.errors import ConfigError
from stack_core.abi.event_bus import EventBus, ObserverContext, observers_from
from stack_core.abi.events import RunFinished, StepStarted
from stack_core.abi.registry import Entry, Registry

FINISHED = RunFinished(9, {"loss": 1.0})


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


class Blocking(Recorder):
    def observe(self, event):
        threading.Event().wait()


class InLoop(Recorder):
    in_loop = True

    def observe(self, event):
        self.seen.append((event, threading.current_thread()))


def emit(bus, events):
    for event in events:
        bus.emit(event)
    bus.flush()


def test_a_failing_observer_is_named_once_and_left_out():
    recorder = Recorder()
    with EventBus([Failing(), recorder]) as bus:
        with pytest.warns(UserWarning, match="Observer Failing failed and is left out: OSError: no room"):
            emit(bus, [StepStarted(1)])
        bus.emit(StepStarted(2))
    assert recorder.seen == [StepStarted(1), StepStarted(2), "closed"]


def test_an_observer_that_blocks_costs_its_limit_and_a_warning(monkeypatch):
    monkeypatch.setattr(event_bus, "_QUEUED_EVENTS", 3)
    # Step events fill its queue; any other is waited for.
    for events, reason in (
        ([StepStarted(step) for step in range(6)], r"3 events behind and handled none of them in 0\.2 s"),
        ([FINISHED], r"kept the run waiting for 0\.2 s"),
    ):
        recorder, began_s = Recorder(), time.monotonic()
        with EventBus([Blocking(), recorder], limit_s=0.2) as bus:
            with pytest.warns(UserWarning, match=f"Observer Blocking failed and is left out: .*{reason}"):
                emit(bus, events)
            assert bus.observers == [recorder]
        assert recorder.seen == [*events, "closed"]
        assert time.monotonic() - began_s < 5


def test_all_but_steps_are_handled_in_turn_before_the_run_goes_on():
    seen = []

    class Slow(Recorder):
        def observe(self, event):
            time.sleep(0.02)
            seen.append(("slow", event))

    class Quick(Recorder):
        def observe(self, event):
            seen.append(("quick", event))

    with EventBus([Slow(), Quick()]) as bus:
        for event in (StepStarted(1), FINISHED):
            bus.emit(event)
        assert [entry for entry in seen if entry[0] == "slow"] == [("slow", StepStarted(1)), ("slow", FINISHED)]
        assert seen.index(("slow", FINISHED)) < seen.index(("quick", FINISHED))
        bus.emit(StepStarted(2))
        bus.flush()
        assert seen[-2:].count(("slow", StepStarted(2))) == 1 == seen[-2:].count(("quick", StepStarted(2)))


def test_an_observer_in_the_loop_is_called_by_its_thread():
    observer = InLoop()
    with EventBus([observer]) as bus:
        bus.emit(StepStarted(1))
        assert observer.seen == [(StepStarted(1), threading.current_thread())]


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


def test_other_processes_have_only_the_observers_of_every_process(tmp_path):
    first, every = Recorder(), Recorder()
    entries = {
        "first": Entry("first", lambda context: first, "p"),
        "every": Entry("every", lambda context: every, "p", {"every_process": True}),
    }
    observers = Registry("observers", lambda: (entries, {}))
    assert observers_from(observers, context(tmp_path)) == [every, first]
    assert observers_from(observers, context(tmp_path), first=False) == [every]


def test_an_observer_may_refuse_the_run(tmp_path):
    def refusing(context):
        raise ConfigError("profile.steps is 0")

    with pytest.raises(ConfigError, match=r"profile\.steps"):
        observers_from(registry(refusing=refusing), context(tmp_path))
