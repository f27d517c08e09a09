"""A ring of captures stays within its size, keeps slow steps, and survives a kill."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError
from stack_profile import AnomalyConfig, CaptureError, CaptureWarning, ContinuousConfig, Watch, load_trace
from stack_profile.captures.ring import Ring, stored_captures

KILOBYTE_MB = 1e-3


def stored(out):
    return [each.path.name for each in stored_captures(out)]


def write(ring, name, size=1000, program=b""):
    programs = [("vm.jit_f(1).hlo.pb", program)] if program else []
    folder = ring.out / "plugins" / "profile" / name
    ring.write(folder, [*programs, ("vm.xplane.pb", bytes(size))])
    return folder


def size_of(out):
    return sum({file.stat().st_ino: file.stat().st_size for file in out.rglob("*") if file.is_file()}.values())


@pytest.fixture
def ring(tmp_path):
    with_room = Ring(tmp_path, 3.5 * KILOBYTE_MB, slow_steps=2)
    yield with_room
    with_room.close()


def test_the_oldest_captures_of_normal_steps_are_deleted_first(tmp_path, ring):
    write(ring, "slow_step_1")
    for number in range(5):
        write(ring, f"ring_{number}")
        assert ring.total_bytes <= 3500
    assert stored(tmp_path) == ["slow_step_1", "ring_3", "ring_4"]
    ring.close()
    ring.__init__(tmp_path, 2 * KILOBYTE_MB, slow_steps=2)
    write(ring, "ring_5")
    assert stored(tmp_path) == ["slow_step_1", "ring_5"], "a smaller ring begins with the captures of the last process"


def test_the_normal_steps_before_a_slow_one_are_kept_with_it_and_slow_ones_are_bounded(tmp_path, ring):
    write(ring, "ring_1", size=400)
    for step in (7, 8):
        ring.keep_before(write(ring, f"slow_step_{step}", size=400))
        write(ring, f"ring_{step}", size=400)
    assert stored(tmp_path)[:4] == ["slow_step_7_before", "slow_step_7", "slow_step_8_before", "slow_step_8"]
    write(ring, "slow_step_9", size=400)
    assert stored(tmp_path) == ["slow_step_8_before", "slow_step_8", "ring_8", "slow_step_9"]


def test_equal_programs_of_captures_are_stored_once(tmp_path, ring):
    for number in range(4):
        write(ring, f"ring_{number}", size=100, program=b"p" * 2000)
    assert ring.total_bytes == 2400 and len(stored(tmp_path)) == 4
    write(ring, "ring_4", size=100, program=b"q" * 2000)
    assert (
        ring.total_bytes <= 3500
        and (tmp_path / "plugins/profile/ring_4/vm.jit_f(1).hlo.pb").read_bytes() == b"q" * 2000
    )


def test_a_capture_that_is_larger_than_the_ring_is_an_error_that_names_a_size(tmp_path, ring):
    write(ring, "slow_step_1")
    with pytest.raises(CaptureError, match=r"A capture of 0\.003 MB does not fit .* Set ring_mb to at least 0\.006"):
        write(ring, "ring_1", size=3000)
    assert stored(tmp_path) == ["slow_step_1"] and not (tmp_path / "plugins/profile/ring_1").exists()


def test_a_full_disk_costs_old_captures_and_is_then_an_error(tmp_path, ring, monkeypatch):
    """The disk has room for one capture: a real one of this size cannot be made in a test."""
    limit, whole = 1500, Path.write_bytes

    def write_bytes(path, content):
        if size_of(tmp_path) + len(content) > limit:
            raise OSError(28, "No space left on device")
        return whole(path, content)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    for number in range(3):
        write(ring, f"ring_{number}")
    assert stored(tmp_path) == ["ring_2"]
    limit = 500
    with pytest.raises(CaptureError, match=r"No space left on device\. Free the disk"):
        write(ring, "ring_3")
    assert stored(tmp_path) == [] and list(tmp_path.rglob("*.partial")) == []


def test_a_ring_has_one_writer_and_a_directory_that_can_be_written(tmp_path, ring):
    with pytest.raises(CaptureError, match=f"Process {os.getpid()} writes the ring of captures in .* Name another"):
        Ring(tmp_path, 1.0, 1)
    (tmp_path / "file").touch()
    with pytest.raises(CaptureError, match=r"cannot be written: .*Not a directory.* Name another directory"):
        Watch(tmp_path / "file", continuous=ContinuousConfig())


@pytest.mark.parametrize("wrong", [{"ring_mb": 0}, {"share": 0.2}, {"every_s": -1}, {"stacks_hz": 1e6}])
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        parse(ContinuousConfig, wrong)


@jax.jit
def step(x):
    return jnp.tanh(x @ x)


def run(watch, durations_s):
    """Steps that report other durations than they have, so that no test depends on a quiet machine."""
    x = step(jnp.ones((64, 64))).block_until_ready()
    for duration_s in durations_s:
        with jax.profiler.TraceAnnotation(f"step {watch._last_step + 1}"):
            step(x).block_until_ready()
        watch.finished(watch._last_step + 1, duration_s)
        for captured in watch._normal:
            with contextlib.suppress(CaptureError):
                captured.wait()  # as in the seconds that the steps pretend to take


def test_a_watch_keeps_normal_steps_and_a_slow_one_with_its_neighbours(tmp_path):
    settings = ContinuousConfig(every_s=20.0, ring_mb=8.0)
    anomaly = AnomalyConfig(warmup_steps=0, ratio=5.0)
    with Watch(tmp_path, anomaly, continuous=settings) as watch:
        run(watch, [0.1] * 700)
        while watch._recording is None or watch._steps > 3:  # a recording of eight steps may end before the slow one
            run(watch, [0.1])
        run(watch, [0.1, 1.0, 0.1, 0.1, 0.1])
        slow = watch.captures[0]
        number = load_trace(slow.wait()).about["slow_step"]["step"]
        while watch._writing or watch.cost_s > 0.005 * watch.watched_s:
            run(watch, [0.1])
    names = stored(tmp_path)
    assert 2 <= len([name for name in names if name.startswith("ring_")]) <= 5
    assert {f"slow_step_{number}", f"slow_step_{number}_before"} < set(names)
    trace = load_trace(slow.path)
    marks = {int(name[5:]) for name in trace.host_events.names if name.startswith("step ")}
    assert set(range(number - 1, number + 3)) <= marks
    before = load_trace(slow.path.parent.with_name(f"slow_step_{number}_before"))
    assert before.devices and before.host_stacks[0] is not None, "captures of normal steps have Python stacks"
    figures = trace.about["continuous"]
    assert 0 < figures["cost_s"] <= 0.005 * figures["watched_s"] and figures["recorded_s"] < figures["watched_s"]


def test_a_ring_that_is_too_small_is_named_once_and_the_loop_goes_on(tmp_path):
    watch = Watch(tmp_path, AnomalyConfig(warmup_steps=0), continuous=ContinuousConfig(every_s=1.0, ring_mb=1e-3))
    with watch, pytest.warns(CaptureWarning, match="does not fit into the ring") as warned:
        run(watch, [0.1] * 300)
    assert len(warned) == 1 and stored(tmp_path) == []


KILLED = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from stack_profile import AnomalyConfig, ContinuousConfig, Watch
from stack_profile.captures.ring import stored_captures
step = jax.jit(lambda x: jnp.tanh(x @ x))
x = step(jnp.ones((64, 64)))
settings = ContinuousConfig(every_s=0.0, share=0.1, ring_mb=0.5)
watch = Watch(sys.argv[1], AnomalyConfig(warmup_steps=0), continuous=settings)
number = 0
while True:
    x = step(x).block_until_ready()
    number += 1
    watch.finished(number, 1.0)
    if number % 50 == 0 and stored_captures(Path(sys.argv[1])):
        print(number, flush=True)
"""


def test_a_process_that_is_killed_leaves_a_readable_ring_for_the_next(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    for _ in range(5):
        assert process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    folder = tmp_path / "plugins" / "profile"
    (folder / "ring_9_cut").mkdir()
    (folder / "ring_9_cut" / "vm.xplane.pb.partial").write_bytes(b"cut")
    captures = stored_captures(tmp_path)
    assert captures and all(load_trace(each.path).devices for each in captures)
    ring = Ring(tmp_path, 0.5, 1)
    assert not (folder / "ring_9_cut").exists() and 0 < ring.total_bytes <= 500_000
    ring.close()
