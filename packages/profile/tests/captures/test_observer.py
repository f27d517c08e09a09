"""A run's `profile:` section captures the steps that it names."""

import os
import sys
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError
from stack_core.abi.event_bus import EventBus, ObserverContext, observers_from
from stack_core.abi.events import RunFailed, RunStarted, StepFinished, StepStarted
from stack_core.abi.plugins import registries
from stack_profile.captures.attach import address_of, attach, attachable, find_processes
from stack_profile.captures.capture import CaptureWarning
from stack_profile.captures.observer import ProfileConfig
from stack_profile.captures.ring import stored_captures
from stack_profile.errors import CaptureError
from stack_profile.traces.trace import load_trace


@jax.jit
def step(x):
    return jax.lax.fori_loop(0, 20, lambda _, carry: jnp.tanh(carry @ carry), x)


@dataclass(frozen=True)
class Config:
    sections: dict[str, Any]


def context(tmp_path, **section):
    sections = {"profile": parse(registries.sections["profile"], section)} if section else {}
    return ObserverContext(tmp_path, Config(sections), terminal=False)


def train(bus, tmp_path, steps=8, first_step=0, slow=0):
    """A loop that, as the trainer's, keeps the device a step ahead; steps say that they took 10 ms, `slow` one 1 s."""
    started = RunStarted(
        first_step=first_step,
        steps=steps,
        parameters=1,
        work=("tokens", 1),
        flops_per_step=1,
        ideal_step_s=None,
        compile_s=0.0,
        directory=tmp_path,
    )
    bus.emit(started)
    x, pending = step(jnp.ones((64, 64))), None
    for number in range(first_step + 1, steps + 1):
        bus.emit(StepStarted(number))
        x = step(x)
        if pending is not None:
            pending[1].block_until_ready()
            bus.emit(StepFinished(pending[0], {"loss": 1.0}, 1.0 if pending[0] == slow else 0.01, 1.0, None))
        pending = number, x
    x.block_until_ready()
    bus.emit(StepFinished(steps, {"loss": 1.0}, 0.1, 1.0, None))


def observed(tmp_path, **section):
    return EventBus(observers_from(registries.observers, context(tmp_path, **section)))


def test_without_a_section_there_is_no_observer(tmp_path):
    assert registries.observers["profile"](context(tmp_path)) is None


@pytest.mark.parametrize("section", [{"first_step": 3, "steps": 2}, {"first_step": 7, "steps": 9}])
def test_the_steps_of_the_section_are_captured(tmp_path, section):
    with observed(tmp_path, **section) as bus:
        train(bus, tmp_path)
    trace = load_trace(tmp_path / "profile")
    (ops,) = trace.devices
    steps = [each for each in trace.steps[ops.device] if each.program == "jit_step"]
    assert 2 <= len(steps) <= 4


@pytest.mark.usefixtures("memray")
def test_a_section_tracks_the_python_heap_or_ends_the_run_at_its_start(tmp_path, monkeypatch):
    with observed(tmp_path, first_step=2, steps=1, python_heap=True) as bus:
        train(bus, tmp_path, steps=3)
    (heap,) = load_trace(tmp_path / "profile").heaps
    assert heap.peak_bytes == sum(stack.size_bytes for stack in heap.stacks) > 0
    monkeypatch.setitem(sys.modules, "memray", None)
    with pytest.raises(CaptureError, match=r"profile\S*\[memray\]"):
        observed(tmp_path, python_heap=True)


def test_output_names_another_directory(tmp_path):
    with observed(tmp_path, first_step=1, steps=1, output=str(tmp_path / "elsewhere")) as bus:
        train(bus, tmp_path, steps=2)
    assert load_trace(tmp_path / "elsewhere").devices and not (tmp_path / "profile").exists()


def test_a_slow_step_is_kept_beside_those_that_are_named(tmp_path):
    with observed(tmp_path, first_step=45, steps=2, anomaly={"warmup_steps": 5}) as bus:
        train(bus, tmp_path, steps=50, slow=40)
    found = {path.name: path for path in (tmp_path / "profile" / "plugins" / "profile").iterdir()}
    slow = load_trace(found["slow_step_40"]).about["slow_step"]
    assert slow["duration_s"] == 1.0 > slow["threshold_s"]
    assert "steps_45_to_46" in found


def test_a_run_keeps_a_ring_of_captures_and_its_slow_step(tmp_path):
    section = {"steps": 0, "continuous": {"every_s": 0.1, "share": 0.1}, "anomaly": {"warmup_steps": 5}}
    with observed(tmp_path, **section) as bus:
        train(bus, tmp_path, steps=300, slow=200)
    kinds = {each.kind for each in stored_captures(tmp_path / "profile")}
    assert kinds and kinds <= {"normal", "slow", "before"}
    assert load_trace(tmp_path / "profile").about["continuous"]["ring_mb"] == 256
    section["output"] = str(tmp_path / "profile")
    (tmp_path / "again").mkdir()
    with observed(tmp_path, **section), pytest.raises(CaptureError, match="a ring has one writer"):
        observed(tmp_path / "again", **section)


def test_a_run_that_listens_is_captured_on_demand_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with observed(tmp_path, steps=0, listen=True) as bus:
        train(bus, tmp_path, steps=12)
        assert find_processes(str(tmp_path)) == [address_of(os.getpid())]
        (result,) = attach(find_processes(str(tmp_path)), out=tmp_path / "out", duration_s=0.1)
    assert result.problem is None and attachable() == []
    assert not (tmp_path / "profile").exists()


def test_a_run_that_fails_leaves_what_it_captured(tmp_path):
    bus = observed(tmp_path, first_step=1, steps=50)
    train(bus, tmp_path, steps=3)
    bus.emit(RunFailed(KeyboardInterrupt()))
    bus.close()
    assert load_trace(tmp_path / "profile").devices


@pytest.mark.parametrize(("first_step", "steps"), [(0, 5), (20, 30)])
def test_a_section_whose_steps_the_run_does_not_do_is_named(tmp_path, first_step, steps):
    with (
        observed(tmp_path, first_step=10, steps=2) as bus,
        pytest.warns(CaptureWarning, match="profile.first_step is 10"),
    ):
        train(bus, tmp_path, steps=steps, first_step=first_step)


def test_the_section_refuses_what_makes_no_sense():
    with pytest.raises(ConfigError, match="first_step"):
        parse(ProfileConfig, {"first_step": 0})
    with pytest.raises(ConfigError, match="steps"):
        parse(ProfileConfig, {"step": 1})
