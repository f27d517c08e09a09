"""A network with the products that training meets: a loop of layers, core's ops, a convolution, a lookup."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from stack_core import ops
from stack_core.ops.building import is_quantized


def network(params: Any, tokens: Any, images: Any) -> Any:
    """[batch, 8] from int32[batch, seq] and [batch, 6, 6, 3]."""
    seen = jax.lax.conv_general_dilated(
        images, params["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    x = params["embedding"][tokens] + jnp.mean(seen, axis=(1, 2))[:, None]

    @jax.checkpoint
    def layer(x: Any, weights: Any) -> Any:
        gated: Any = ops.gated_linear_unit(x, weights["gate"], weights["up"])
        return x + ops.linear(gated, weights["down"]), None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    return jnp.einsum("bse,eo->bo", jax.nn.relu(x), params["head"])


@pytest.fixture
def params() -> Any:
    shapes = {
        "embedding": (12, 16),
        "kernel": (3, 3, 3, 16),
        "layers": {"gate": (2, 16, 32), "up": (2, 16, 32), "down": (2, 32, 16)},
        "head": (16, 8),
    }
    leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    drawn = [jax.random.normal(key, shape) * shape[-2] ** -0.5 for key, shape in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, drawn)


@pytest.fixture
def args() -> Any:
    return jnp.arange(20).reshape(4, 5) % 12, jax.random.normal(jax.random.key(1), (4, 6, 6, 3))


def floats(params: Any) -> Any:
    return jax.tree.map(
        lambda leaf: ops.dequantize(leaf, leaf.dtype) if is_quantized(leaf) else leaf, params, is_leaf=is_quantized
    )


def error(actual: Any, expected: Any) -> float:
    return float(jnp.linalg.norm(actual - expected) / jnp.linalg.norm(expected))
