"""What processes agree on, with a store in memory in the place of the coordinator's."""

import signal
import threading

import jax
import pytest

from stack_core.abi.errors import ConfigError, DataError, Interrupted, TrainingError
from stack_core.runtime import processes as processes_module
from stack_core.runtime.processes import ALONE, Processes
from stack_core.runtime.signals import StopRequest


class Store:
    """Keys and values as JAX's coordinator keeps them: a key is set once, and what is not there yet is waited for."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value):
        with self.changed:
            if key in self.values:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
            self.values[key] = value
            self.changed.notify_all()

    def key_value_try_get(self, key):
        if key not in self.values:
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
        return self.values[key]

    def blocking_key_value_get(self, key, timeout_ms):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_ms / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.values[key]

    key_value_set_bytes, blocking_key_value_get_bytes = key_value_set, blocking_key_value_get

    def key_value_delete(self, key):
        del self.values[key]


@pytest.fixture
def two(monkeypatch):
    """Two processes; what would end this one is noted instead."""
    monkeypatch.setattr(processes_module.atexit, "register", lambda *call: None)
    store = Store()
    return Processes(0, 2, store), Processes(1, 2, store)


def in_each(processes, function):
    """What a function returns or raises for each, all at once."""
    found = [None] * len(processes)

    def run(place):
        try:
            with processes[place].ending_together():
                found[place] = function(processes[place])
        except BaseException as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(processes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_the_first_goes_before_the_others(two):
    order = []
    in_each(two[::-1], lambda each: each.in_turn("files", lambda: order.append(each.id)))
    assert order == [0, 1]


def test_what_the_first_finds_and_what_each_says_is_known_to_all(two):
    assert in_each(two, lambda each: each.on_first("steps", lambda: [each.id, 7])) == [[0, 7]] * 2
    assert in_each(two, lambda each: each.from_each("problem", each.id * 5)) == [[0, 5]] * 2


def test_byte_strings_of_each_are_known_to_all_and_deleted_two_calls_later(two):
    for number in range(4):
        assert (
            in_each(two, lambda each, n=number: each.bytes_from_each("groups", bytes([each.id, n])))
            == [[bytes([0, number]), bytes([1, number])]] * 2
        )
    assert sorted(two[0]._store.values.values()) == [bytes([0, 3]), bytes([1, 3])]
    assert ALONE.bytes_from_each("groups", b"x") == [b"x"]


def test_a_config_that_differs_is_refused_and_all_end(two):
    first, second = in_each(
        two, lambda each: (each.check_alike("config", {"steps": each.id}), each.from_each("next", 0))
    )
    assert isinstance(second, ConfigError) and "config of process 1" in str(second) and "steps: 1, not 0" in str(second)
    assert isinstance(first, TrainingError) and str(first).startswith("Process 1 of this run failed: ConfigError: The")


def test_all_stop_after_the_same_step_whoever_has_the_signal(two):
    def train(each):
        stop, step, name = StopRequest(), 0, each.name("stop")
        while not each.agree_on_stop(name, step, stop):
            step += 1
            each.from_each("step", step)  # none is a step ahead
            if step == 5 + each.id:
                stop.received = signal.SIGTERM if each.id else signal.SIGINT
        return step, stop.received

    (step, received), other = in_each(two, train)
    assert (step, received) == other and step in (7, 8)


def test_the_first_signal_decides(two):
    names = [each.name("stop") for each in two]
    assert not two[1].agree_on_stop(names[1], 3, StopRequest(signal.SIGTERM))
    late = StopRequest(signal.SIGINT)
    assert not two[0].agree_on_stop(names[0], 4, late)
    assert two[0].agree_on_stop(names[0], 5, late) and late.received is signal.SIGTERM


def test_who_waits_for_one_that_failed_learns_why(two):
    def fail(each):
        if each.id == 0:
            raise DataError("the disk is gone")
        each.until(lambda: False)

    first, second = in_each(two, fail)
    assert isinstance(first, DataError)
    assert str(second) == "Process 0 of this run failed: DataError: the disk is gone"


def test_a_connection_that_broke_says_that_a_process_is_lost(two):
    lost = pytest.raises(TrainingError, match=r"Process 0 has lost another process .* Connection closed by peer")
    with lost, two[0].ending_together():
        raise ValueError("Gloo all-reduce failed: Connection closed by peer")


def test_an_interrupt_of_all_is_no_failure(two):
    with pytest.raises(Interrupted), two[0].ending_together():
        raise Interrupted("Stopped by Ctrl-C")
    assert not two[1]._store.values


def test_what_a_call_raises_is_raised_here(two):
    assert two[0].call(lambda: 3) == 3
    with pytest.raises(OSError, match="full"):
        two[0].call(lambda: (_ for _ in ()).throw(OSError("full")))


def test_one_process_alone_waits_for_nobody():
    stop = StopRequest()
    assert not ALONE.agree_on_stop("stop", 1, stop)
    stop.received = signal.SIGTERM
    assert ALONE.agree_on_stop("stop", 1, stop)
    assert ALONE.in_turn("x", lambda: 1) == ALONE.on_first("x", lambda: 1) == ALONE.call(lambda: 1) == 1
    ALONE.check_alike("config", {"steps": 1})
    with pytest.raises(ZeroDivisionError), ALONE.ending_together():
        raise ZeroDivisionError
