"""Stop requests are noted, honoured once, and leave no handler behind."""

import os
import signal
import threading

import pytest

from stack_core.runtime.signals import stop_requests


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_becomes_a_request(number):
    before = signal.getsignal(number)
    with stop_requests() as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop and stop.received is number
    assert signal.getsignal(number) is before


def test_a_second_interrupt_is_not_held_back():
    with stop_requests(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_after_sigterm_is_not_held_back():
    with stop_requests() as stop, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.received is signal.SIGTERM


def test_signals_act_at_once_until_they_are_deferred():
    with stop_requests(deferred=False) as stop:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert not stop
        stop.deferred = True
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.received is signal.SIGINT


def test_other_threads_get_an_empty_request():
    seen = []

    def work():
        with stop_requests() as stop:
            seen.append(bool(stop))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
