"""Trains a plain nnx module with Optax and a loss function. Kill it and run it again: it resumes."""

import jax
import numpy as np
import optax
from flax import nnx

from stack_train import CheckpointStore, Program, make_step


class Net(nnx.Module):
    def __init__(self, key):
        rngs = nnx.Rngs(key)
        self.first, self.norm = nnx.Linear(2, 64, rngs=rngs), nnx.BatchNorm(64, rngs=rngs)
        self.last = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.norm(self.first(x))))[:, 0]


def loss(model, batch):
    return optax.losses.sigmoid_binary_cross_entropy(model(batch["x"]), batch["inside"]).mean()


def batch_of(step):
    """Returns points in a square, and whether they are in a circle; a pure function of the step, so it resumes too."""
    x = np.random.default_rng(step).uniform(-1, 1, (256, 2)).astype(np.float32)
    return {"x": x, "inside": (np.linalg.norm(x, axis=1) < 0.7).astype(np.float32)}


program = Program(make_step(Net, loss, optax.adamw(1e-2)))
train = program.compile(batch_of(0))
with CheckpointStore("runs/own-module") as store:
    resumed = store.latest() is not None
    state = store.restore(program.abstract_state).state if resumed else program.init(key=jax.random.key(0))
    for step in range(int(state.step), 1000):
        state, metrics = train(state, batch_of(step))
        if (step + 1) % 100 == 0:
            print(step + 1, f"{float(metrics['loss']):.6f}", flush=True)
            store.save(step + 1, state)
