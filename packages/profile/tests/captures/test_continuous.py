"""Any process keeps a ring of captures, and the slow steps of a server among them."""

import time

import jax
import jax.numpy as jnp
import pytest

from stack_core.runtime.spans import record_span, spans_recorded
from stack_profile import AnomalyConfig, Continuous, ContinuousConfig, load_trace
from stack_profile.analyses.requests import requests
from stack_profile.captures.ring import stored_captures


@jax.jit
def step(x):
    return jnp.tanh(x @ x)


def serve(seconds, durations_s):
    """Engine steps with one row each, and with eight rows and long prompts, that report `durations_s`."""
    x, until_s = step(jnp.ones((64, 64))), time.monotonic() + seconds
    while time.monotonic() < until_s:
        for rows, duration_s in durations_s.items():
            x = step(x).block_until_ready()
            time.sleep(0.002)
            if spans_recorded():
                record_span("engine_step", duration_s, rows=[("a", 0, 100 if rows > 1 else 0, 1)] * rows)


def test_a_script_without_steps_has_captures_of_its_time(tmp_path):
    jax.devices()
    settings = ContinuousConfig(every_s=0.3, share=0.1)
    x = step(jnp.ones((64, 64)))
    with Continuous(tmp_path, settings):
        until_s = time.monotonic() + 6
        while time.monotonic() < until_s and len(stored_captures(tmp_path)) < 2:
            x = step(x).block_until_ready()
            time.sleep(0.002)
    captures = stored_captures(tmp_path)
    assert len(captures) >= 2 and {each.kind for each in captures} == {"normal"}
    trace = load_trace(captures[0].path)
    assert trace.devices and trace.host_stacks[0] is not None


def slow_captures(folder):
    return [each for each in stored_captures(folder) if each.kind == "slow"]


def test_a_slow_step_of_a_server_is_kept_though_steps_of_prompts_take_as_long(tmp_path):
    jax.devices()
    settings = ContinuousConfig(every_s=0.3, share=0.1)
    with Continuous(tmp_path, settings, AnomalyConfig(warmup_steps=0, captures=1)):
        serve(2, {1: 0.01, 8: 0.1})
        assert not slow_captures(tmp_path)
        until_s = time.monotonic() + 60
        while not slow_captures(tmp_path) and time.monotonic() < until_s:
            serve(0.5, {1: 0.1})  # on a busy machine, all of this may be in a pause
    (slow,) = slow_captures(tmp_path)
    trace = load_trace(slow.path)
    about = trace.about["slow_step"]
    assert about["duration_s"] == 0.1 and about["threshold_s"] == pytest.approx(0.02)
    assert requests(trace).rows
