"""A training step, and twenty lines that make it slower: each is put into the source of one of its functions."""

import importlib.util
import textwrap
from pathlib import Path

import stack_profile
from stack_profile.traces.trace import load_trace

SOURCE = """
import time

import jax
import jax.numpy as jnp
import numpy as np


def block(x, weights, big):
    x = jnp.tanh(x @ weights)
    # BLOCK
    return x


def other(x):
    return jnp.sort(x, axis=0)


def loss(params, x, big):
    for place, weights in enumerate(params):
        with jax.named_scope(f"block_{place}"):
            x = block(x, weights, big)
    # LAYER
    # LOSS
    return jnp.mean(x**2)


@jax.jit
def step(params, x, big):
    gradients = jax.grad(loss)(params, x, big)
    # UPDATE
    return jax.tree.map(lambda leaf, gradient: leaf - 0.1 * gradient, params, gradients)


def arguments():
    keys = jax.random.split(jax.random.key(0), 5)
    params = [jax.random.normal(key, (256, 256)) * 0.05 for key in keys[:3]]
    return params, jax.random.normal(keys[3], (512, 256)), jax.random.normal(keys[4], (4096, 256))


def train(steps, params, x, big):
    for number in range(steps):
        params = step(params, x, big)
        # LOOP
    jax.block_until_ready(params)
"""

LAYER = """
with jax.named_scope("added"):
    x = jnp.tanh(x @ params[0])
    x = jnp.tanh(x @ params[1])
    x = jnp.tanh(x @ params[2])
"""

CALLBACK = "jax.pure_callback(lambda: (time.sleep(0.01), np.float32(0))[1], jax.ShapeDtypeStruct((), jnp.float32))"

# What is slow: where it stands, the lines.
SLOW = {
    "sort": ("BLOCK", "x = jnp.sort(x, axis=0)"),
    "cast": ("LOSS", "x = x + jnp.tile(big, (16, 1)).astype(jnp.float16).astype(jnp.float32).sum(0) * 1e-9"),
    "transpose": (
        "LOSS",
        "x = x + jax.lax.optimization_barrier(jnp.tile(big, (8, 1)).T).reshape(-1, 256).max(0)",
    ),
    "gather": (
        "BLOCK",
        "x = x + jnp.take(big, jnp.arange(1 << 14) % 9, axis=0).reshape(32, 512, 256).sum(0) * 1e-6",
    ),
    "transfer to the host": ("LOOP", "np.asarray(params[0]), [np.sort(np.asarray(big), axis=None) for _ in range(4)]"),
    "recompilation": ("LOOP", "jax.jit(lambda x: jnp.sin(x) @ x)(params[0])"),
    "extra layer": ("LAYER", LAYER),
    "another program": ("LOOP", "jax.jit(other)(big[:256])"),
    "callback": ("LOSS", f"x = x + {CALLBACK}"),
    "top k": ("LOSS", "x = x + jax.lax.top_k(big, 8)[0].sum()"),
    "scatter": ("LOSS", "x = x.at[jnp.arange(1 << 15) % 509].add(1e-3)"),
    "cumulative sum": ("BLOCK", "x = x + jnp.cumsum(big, axis=0)[:512] * 1e-6"),
    "elementwise": ("LOSS", "x = x + jnp.mean(jnp.sin(jnp.tan(jnp.cos(jnp.log1p(big**2))))) * 1e-6"),
    "softmax": ("LOSS", "x = x + jax.nn.softmax(jnp.tile(big, (8, 1)), axis=0)[:512]"),
    "Fourier transform": ("LOSS", "x = x + jnp.fft.fft(big, axis=0).real[:512] * 1e-6"),
    "loop": ("LOSS", "x = jax.lax.fori_loop(0, 30, lambda _, y: jnp.sin(y), x)"),
    "convolution": ("LOSS", "x = x + jax.vmap(lambda row: jnp.convolve(row, big[0, :65], mode='same'))(x) * 1e-6"),
    "random numbers": ("LOSS", "x = x + jax.random.normal(jax.random.key(1), big.shape)[:512]"),
    "factorization": (
        "UPDATE",
        "gradients = [jnp.linalg.cholesky(g @ g.T + jnp.eye(256)) for g in gradients]",
    ),
    "concatenation": ("LOSS", "x = x + jnp.concatenate([jnp.roll(big, by, axis=0) for by in range(8)]).max(axis=0)"),
}

# What names it, where that is not its line.
NAMED = {"transfer to the host": "copied to the host", "another program": "jit_other", "extra layer": "layer added"}


def module(folder, slow=None):
    """The module, with a slow line or without, and the number of that line."""
    place, text = SLOW.get(slow, ("", ""))
    lines, at = [], 0
    for line in SOURCE.strip().splitlines():
        if place and line.strip() == f"# {place}":
            at = len(lines) + 1
            indent = line[: len(line) - len(line.lstrip())]
            lines += textwrap.indent(text.strip(), indent).splitlines()
        else:
            lines.append(line)
    folder.mkdir(parents=True)
    path = Path(folder) / "model.py"
    path.write_text("\n".join(lines) + "\n")
    spec = importlib.util.spec_from_file_location("model", path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found, at


class Steps:
    """The module's steps, with a slow line or without.

    Attributes:
      line: where the slow line is.
    """

    def __init__(self, folder, slow=None):
        self._module, at = module(folder, slow)
        self._out = folder / "out"
        self.line = f"{folder / 'model.py'}:{at}"
        self._arguments = self._module.arguments()
        self._module.train(2, *self._arguments)

    def captured(self, steps):
        with stack_profile.capture(self._out) as capture:
            self._module.train(steps, *self._arguments)
        return load_trace(capture.wait())


def sides(folder, slow, *, captures=3, steps=5):
    """The captures of both sides, which were taken in turns, and the slow line."""
    both = Steps(folder / "base"), Steps(folder / "new", slow)
    traces = [[each.captured(steps) for each in both] for _ in range(captures)]
    return *zip(*traces, strict=True), both[1].line
