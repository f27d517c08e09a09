"""Models whose values NumPy draws: a program that draws them would compile as long as the model's own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

__all__ = ["draw_model"]


def draw_model(build: Callable[[], Any], *, scale: float = 0.2, norm: float = 1.0) -> Any:
    """Returns the model of `build` with normally distributed values; scales of norms have the mean `norm`."""
    graph, state = nnx.split(nnx.eval_shape(build))
    rng = np.random.default_rng(0)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = jax.tree_util.keystr(path)
        mean = norm if "norm" in name and "bias" not in name else 0.0
        return jnp.asarray(rng.normal(mean, scale, leaf.shape), leaf.dtype)

    return nnx.merge(graph, jax.tree.map_with_path(draw, state))
