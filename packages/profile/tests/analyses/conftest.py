"""One real capture of a small training step, for all analyses."""

import jax
import jax.numpy as jnp
import pytest

import stack_profile
from stack_profile.trace import load_trace

LAYERS, BATCH, WIDTH = 10, 64, 128


class Block:
    def __call__(self, x, weights):
        up, down = weights
        with jax.named_scope("mlp"):
            return x + jnp.tanh(x @ up) @ down


def loss(params, x):
    block = jax.checkpoint(Block().__call__)
    x, _ = jax.lax.scan(lambda carry, weights: (block(carry, weights), None), x, params["blocks"])
    return jnp.mean((x @ params["head"]) ** 2)


def step(params, x):
    gradients = jax.grad(loss)(params, x)
    return jax.tree.map(lambda leaf, gradient: leaf - 0.1 * gradient, params, gradients)


def arguments():
    keys = jax.random.split(jax.random.key(0), 4)
    blocks = (
        jax.random.normal(keys[0], (LAYERS, WIDTH, 4 * WIDTH)) * 0.05,
        jax.random.normal(keys[1], (LAYERS, 4 * WIDTH, WIDTH)) * 0.05,
    )
    params = {"blocks": blocks, "head": jax.random.normal(keys[2], (WIDTH, WIDTH))}
    return params, jax.random.normal(keys[3], (BATCH, WIDTH))


@pytest.fixture(scope="session")
def training():
    """The step as it is compiled, and its arguments."""
    params, x = arguments()
    return jax.jit(step, donate_argnums=0).lower(params, x).compile(), params, x


@pytest.fixture(scope="session")
def captured(training, tmp_path_factory):
    """The directory of a capture of four steps."""
    compiled, params, x = training
    params = jax.block_until_ready(compiled(params, x))
    directory = tmp_path_factory.mktemp("capture")
    with stack_profile.capture(directory) as capture:
        for _ in range(4):
            params = compiled(params, x)
    capture.wait()
    return directory


@pytest.fixture(scope="session")
def trace(captured):
    return load_trace(captured)
