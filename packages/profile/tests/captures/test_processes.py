"""Captures of several processes are one trace, on one clock, and what is missing from it is said."""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from stack_profile import TraceError, load_trace

DAY_NS = 86_400 * 10**9


def write(build, path, *, began_ns, start_us=10, about=None):
    """A process whose one operation lasts 5 us and begins `start_us` after its profiler."""
    plane = build.plane("/host:CPU")
    stats = {"hlo_op": "dot.1", "hlo_module": "jit_step", "program_id": 7, "device_ordinal": 0, "run_id": 1}
    plane.line("tf_XLA", plane.event("dot.1", start_us, 5, **stats), timestamp_ns=0)
    environment = build.plane("Task Environment")
    environment_bytes = environment.build() + build.message((6, environment.stat("profile_start_time", began_ns)))
    environment_bytes += build.message(*((5, entry) for entry in _texts(build, environment)))
    path.write_bytes(build.space(plane) + build.message((1, environment_bytes)))
    if about is not None:
        path.with_name(path.name.replace(".xplane.pb", ".capture.json")).write_text(json.dumps(about))


def _texts(build, plane):
    return [build.message((1, key), (2, build.message((1, key), (2, text)))) for text, key in plane.texts.items()]


def test_processes_of_one_host_keep_their_names_and_their_distance_in_time(build, tmp_path):
    write(build, tmp_path / "vm_0.xplane.pb", began_ns=DAY_NS)
    write(build, tmp_path / "vm_1.xplane.pb", began_ns=DAY_NS + 2_000)
    trace = load_trace(tmp_path)
    assert not trace.problems
    assert {ops.device: ops.start_ps.tolist() for ops in trace.devices} == {
        "vm_0:CPU:0": [10_000_000],
        "vm_1:CPU:0": [12_000_000],
    }


def test_processes_that_never_ran_at_the_same_time_are_named(build, tmp_path):
    write(build, tmp_path / "vm_0.xplane.pb", began_ns=DAY_NS)
    write(build, tmp_path / "vm_1.xplane.pb", began_ns=DAY_NS + 3 * 10**9)
    (problem,) = load_trace(tmp_path).problems
    assert problem.startswith("vm_1.xplane.pb begins 3 s after the end of vm_0.xplane.pb")


def test_traces_months_apart_are_refused(build, tmp_path):
    write(build, tmp_path / "vm_0.xplane.pb", began_ns=DAY_NS)
    write(build, tmp_path / "vm_1.xplane.pb", began_ns=400 * DAY_NS)
    with pytest.raises(TraceError, match="399 days"):
        load_trace(tmp_path)


def test_what_is_partial_or_missing_is_named(build, tmp_path):
    about = {"process": [0, 3], "partial": "the process ended"}
    write(build, tmp_path / "vm_0.xplane.pb", began_ns=DAY_NS, about=about)
    write(build, tmp_path / "vm_1.xplane.pb", began_ns=DAY_NS, about={"process": [1, 3]})
    assert load_trace(tmp_path).problems == (
        "vm_0.xplane.pb is partial: the process ended",
        "The run had 3 processes, and 2 are in the trace.",
    )


TRAIN = """
import sys
import time
from pathlib import Path
import jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]), cluster_detection_method="deactivate")
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from stack_core.abi.events import RunStarted, StepFinished, StepStarted
from stack_profile.captures.observer import ProfileConfig, ProfileObserver

observer = ProfileObserver(ProfileConfig(first_step=3, steps=4), Path(sys.argv[3]))
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
x = jax.make_array_from_callback(
    (64, 64), NamedSharding(mesh, PartitionSpec("data")), lambda index: jnp.ones((32, 64))
)
step = jax.jit(lambda x: jnp.tanh(x @ jnp.ones((64, 64))) + jnp.sum(x) * 1e-3)
for number in range(1, 11):
    observer.observe(StepStarted(number))
    x = step(x).block_until_ready()
    time.sleep(0.02)  # A thread records its last operation after the result is ready; the capture would cut it off.
    observer.observe(StepFinished(number, {}, 0.1, 1.0, None))
observer.close()
"""


def test_the_observers_of_a_distributed_run_make_one_trace(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)
    running = [
        subprocess.Popen(
            [sys.executable, "-c", TRAIN, address, str(index), str(tmp_path)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    errors = [process.communicate(timeout=120)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], errors
    trace = load_trace(tmp_path)
    assert not trace.problems
    assert {path.name for path in (tmp_path / "plugins" / "profile").iterdir()} == {"steps_3_to_6"}
    assert len(trace.devices) == len({ops.device for ops in trace.devices}) == 2
    starts = np.array([[step.start_ps for step in trace.steps[ops.device]] for ops in trace.devices])
    assert starts.shape == (2, 4)
    # A step sums over both processes, so neither can be a step ahead of the other.
    assert (starts[:, :-1].max(axis=0) < starts[:, 1:].min(axis=0)).all()
