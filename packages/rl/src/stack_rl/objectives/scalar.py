"""A head that maps hidden states to scalars, such as values or rewards."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

__all__ = ["ScalarHead"]


class ScalarHead(nnx.Module):
    """v = h w + b, computed in float32 or in the dtype of h if that is wider. Initialized to 0."""

    def __init__(self, model: Any, *, key: jax.Array) -> None:
        """Creates the parameters for a model config with the hidden size `model.embed`."""
        del key  # initialization is not random
        self.kernel = nnx.Param(jnp.zeros(model.embed, jnp.float32), logical_axes=("embed",))
        self.bias = nnx.Param(jnp.zeros((), jnp.float32), logical_axes=())

    def __call__(self, hidden: Float[Array, "*batch embed"]) -> Float[Array, "*batch"]:
        dtype = hidden.dtype if jnp.finfo(hidden.dtype).bits > 32 else jnp.float32
        kernel, bias = self.kernel.get_value().astype(dtype), self.bias.get_value().astype(dtype)
        return jnp.einsum("...e,e->...", hidden.astype(dtype), kernel) + bias
