"""What workers of the tests run: gradient descent of a small matrix over all processes, saved every few steps."""

import hashlib
import os
import signal
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from stack_core.abi.errors import Interrupted, ShardingError
from stack_core.abi.events import CheckpointSaved, RunStarted, StepFinished, StepStarted
from stack_core.runtime.processes import join
from stack_core.runtime.signals import StopRequest
from stack_core.runtime.worker import current_worker

SAVES_EVERY = 4


def check_rows(rows):
    if rows % jax.device_count():
        raise ShardingError(f"{rows} rows are no multiple of {jax.device_count()}")


def wait_for_file(path):
    while not path.exists():
        time.sleep(0.02)


def descend(folder, steps=12, step_s=0.05, fails_at=None, stops=False, waits=False, rows=16):
    """Goes on from what an earlier formation saved; returns the digest of the last weights.

    With `waits`, a worker that is alone waits for the file "back" before each step.
    """
    worker = current_worker()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    processes = join(worker.order.processes)
    agreed = processes.name("stop")
    saved = Path(folder) / "saved.npz"
    first, weights = 0, np.random.default_rng(1).normal(size=(64, 8)).astype("f4")
    if saved.exists():
        with np.load(saved) as file:
            first, weights = int(file["step"]), file["weights"]
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))

    def put(array, *axes):
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    @jax.jit
    def step(weights, inputs):
        loss = lambda weights: jnp.mean((inputs @ weights - inputs[:, :8]) ** 2)
        value, gradient = jax.value_and_grad(loss)(weights)
        return weights - 0.1 * gradient, value

    check_rows(rows)
    weights = put(weights)
    tell = worker.observe
    tell(
        RunStarted(
            first_step=first,
            steps=steps,
            parameters=512,
            work=("rows", rows),
            flops_per_step=1,
            ideal_step_s=None,
            compile_s=0.0,
            directory=Path(folder),
        )
    )
    stop = StopRequest()
    if stops:
        signal.signal(signal.SIGINT, lambda number, frame: setattr(stop, "received", signal.Signals(number)))
    for number in range(first + 1, steps + 1):
        tell(StepStarted(number))
        if waits and processes.count == 1:
            wait_for_file(Path(folder) / "back")
        if number == fails_at and worker.order.rank == 1:
            raise ValueError("these rows are bad")
        started_s = time.perf_counter()
        inputs = np.random.default_rng(number).normal(size=(rows, 64)).astype("f4")
        weights, loss = step(weights, put(inputs, "data"))
        loss = float(np.asarray(loss.addressable_data(0)))
        time.sleep(step_s)
        tell(StepFinished(number, {"loss": loss}, time.perf_counter() - started_s, 1.0, None))
        if number % SAVES_EVERY == 0 and worker.order.rank == 0:
            partial = saved.with_suffix(".partial.npz")
            np.savez(partial, step=number, weights=np.asarray(weights.addressable_data(0)))
            os.replace(partial, saved)  # noqa: PTH105
            tell(CheckpointSaved(number, saved, 0.0))
        if stops and processes.agree_on_stop(agreed, number, stop):
            raise Interrupted(f"stopped after step {number}")
    return {"digest": hashlib.sha256(np.asarray(weights.addressable_data(0)).tobytes()).hexdigest()}
