"""What both sides of `recovery` run: small steps over two processes, saved every fifth, each told in a file.

    python recovery_job.py FOLDER STEPS

is Ray's side, in an environment with ray[train] and jax.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

SAVES_EVERY = 5
STEP_S = 0.03


def descend(folder, steps, rank):
    """Gradient descent from where `saved.npz` left it; JAX has joined the processes."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    def tell(**facts):
        with (folder / "log.jsonl").open("a") as file:
            file.write(json.dumps({**facts, "rank": rank, "time": time.time()}) + "\n")

    tell(event="start", pid=os.getpid())
    saved = folder / "saved.npz"
    first, weights = 0, np.random.default_rng(1).normal(size=(256, 32)).astype("f4")
    if saved.exists():
        with np.load(saved) as file:
            first, weights = int(file["step"]), file["weights"]
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))

    def put(array, *axes):
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    @jax.jit
    def step(weights, inputs):
        loss = lambda weights: jnp.mean((inputs @ weights - inputs[:, :32]) ** 2)
        return weights - 0.1 * jax.grad(loss)(weights)

    weights = put(weights)
    for number in range(first + 1, steps + 1):
        weights = step(weights, put(np.random.default_rng(number).normal(size=(64, 256)).astype("f4"), "data"))
        whole = np.asarray(weights.addressable_data(0))
        time.sleep(STEP_S)
        if rank == 0 and number % SAVES_EVERY == 0:
            np.savez(saved.with_suffix(".new.npz"), step=number, weights=whole)
            saved.with_suffix(".new.npz").replace(saved)
        tell(event="step", step=number)
    tell(event="done", digest=hashlib.sha256(np.asarray(weights.addressable_data(0)).tobytes()).hexdigest())


def worker(folder, steps):
    """The side of stack."""
    import jax

    from stack_core.runtime.processes import join
    from stack_core.runtime.worker import current_worker

    keep_programs(jax, folder)
    order = current_worker().order
    join(order.processes)
    descend(Path(folder), steps, order.rank)


def ray_worker(config):
    """The side of Ray."""
    import jax
    from ray import train

    keep_programs(jax, config["folder"])
    descend(Path(config["folder"]), config["steps"], train.get_context().get_world_rank())


def keep_programs(jax, folder):
    """Both sides compile once."""
    jax.config.update("jax_compilation_cache_dir", str(Path(folder) / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def run_on_ray(folder, steps):
    """Ray's own trainer for JAX; its `use_tpu` alone makes it join the processes, on the platform of JAX_PLATFORMS."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxConfig
    from ray.train.v2.jax.jax_trainer import JaxTrainer

    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    JaxTrainer(
        ray_worker,
        train_loop_config={"folder": folder, "steps": steps},
        jax_config=JaxConfig(use_tpu=True),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=-1)),
    ).fit()


if __name__ == "__main__":
    run_on_ray(sys.argv[1], int(sys.argv[2]))
