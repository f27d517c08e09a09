"""Measures sampling and training of the same denoisers here, with the weights and schedulers that diffusers wrote."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from work import GUIDANCE, LEARNING_RATE, ROWS, STEPS, conditions, noise, serve

from stack_train.diffusion import dit, unet, wan
from stack_train.diffusion.components import load_component
from stack_train.diffusion.denoiser import image_tokens
from stack_train.diffusion.latents import sample_latents, sampling_table
from stack_train.diffusion.scheduler import read_scheduler
from stack_train.optim import AdamWConfig, ScheduleConfig
from stack_train.step.program import Program, compile_lowered
from stack_train.step.step import make_step
from stack_train.variables.model_variables import stored_values

COMPONENTS = {"unet": unet.COMPONENT, "dit": dit.COMPONENT, "wan": wan.COMPONENT}


def sampling(name: str, model: Any, scheduler: Any) -> Any:
    """Returns a function that samples, as `stack sample` does: one program for all steps."""
    sampler = replace(scheduler.sampler, steps=STEPS, guidance=GUIDANCE)
    if name == "wan":
        sampler = replace(sampler, spacing="linspace")  # as of WanPipeline
    start, given = noise(name), {key: jnp.asarray(each) for key, each in conditions(name).items()}
    given.pop("negative_labels", None)  # known to the model
    table = sampling_table(sampler, scheduler.objective, image_tokens(model, *start.shape[1:-1]))
    graph, state = nnx.split(model)

    @jax.jit
    def run(state: Any, condition: Any, start: jax.Array, key: jax.Array) -> jax.Array:
        options: Any = {"sampler": sampler, "table": table, "key": key}
        return sample_latents(nnx.merge(graph, state), condition, start, **options)

    compiled = compile_lowered(run.lower(state, given, jnp.asarray(start), jax.random.key(0)))
    return lambda: np.asarray(compiled(state, given, jnp.asarray(start), jax.random.key(0)))


def training(name: str, config: Any, values: Any, scheduler: Any) -> Any:
    """Returns a function that makes a step, as `stack train` does."""
    objective = replace(scheduler.objective, condition_dropout=0.0)
    optimizer = AdamWConfig(learning_rate=LEARNING_RATE, schedule=ScheduleConfig(warmup_steps=1))
    program = Program(make_step((COMPONENTS[name].family, config), objective, optimizer, steps=10**6))
    given = {key: each for key, each in conditions(name).items() if not key.startswith("negative_")}
    batch = {"images": noise(name), "weights": np.ones(ROWS, np.float32), **given}
    state = program.init(values, key=jax.random.key(0))
    compiled = program.compile(batch)

    def step() -> None:
        nonlocal state
        placed = jax.device_put(batch, program.batch_shardings(batch))
        state, metrics = compiled(state, placed)
        assert np.isfinite(float(metrics["loss"]))

    return step


def main() -> None:
    name, task, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    config, model = load_component(COMPONENTS[name], folder / "model")
    scheduler = read_scheduler(folder / "scheduler")
    if task == "step":
        # A loop copies what its layers save, as benchmarks/peers/stack_train.yaml says.
        config = replace(config, unroll=True) if hasattr(config, "unroll") else config
        values = stored_values(model)
        del model  # as a run, which has no parameters beside its state
        serve(training(name, config, values, scheduler), None, folder, "stack")
        return
    model.eval()
    work = sampling(name, model, scheduler)
    serve(work, work(), folder, "stack")


if __name__ == "__main__":
    main()
