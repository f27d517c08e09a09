"""A head that gives a number instead of logits: a value, a reward."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

__all__ = ["ScalarHead"]


class ScalarHead(nnx.Module):
    """v = h w + b, in float32 or what h has beyond; 0 everywhere at the start."""

    def __init__(self, model: Any, *, key: jax.Array) -> None:
        """Takes the config of the model whose hidden states it reads."""
        del key  # nothing is drawn
        self.kernel = nnx.Param(jnp.zeros(model.embed, jnp.float32), logical_axes=("embed",))
        self.bias = nnx.Param(jnp.zeros((), jnp.float32), logical_axes=())

    def __call__(self, hidden: Float[Array, "*batch embed"]) -> Float[Array, "*batch"]:
        dtype = hidden.dtype if jnp.finfo(hidden.dtype).bits > 32 else jnp.float32
        kernel, bias = self.kernel.get_value().astype(dtype), self.bias.get_value().astype(dtype)
        return jnp.einsum("...e,e->...", hidden.astype(dtype), kernel) + bias
