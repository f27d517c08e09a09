"""Manifold-constrained hyper-connections: several residual streams that layers read, write and mix.

Source: Zhu et al., Hyper-Connections, 2024 (arXiv:2409.19606); Xie et al., mHC: Manifold-Constrained Hyper-Connections,
2025 (arXiv:2512.24880), in the variant of transformers' `DeepseekV4HyperConnection`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from stack_core import ops
from stack_core.ops.building import accurate_dtype
from stack_train.nn.build import Build
from stack_train.nn.linear import Linear
from stack_train.nn.residual import Hidden

__all__ = ["HyperConnections", "StreamHead", "StreamMixer", "StreamWeights", "balanced_matrix"]

Streams = Float[Array, "batch seq features"]
"""The streams of each token side by side, features = streams * embed."""


class StreamWeights(NamedTuple):
    """Weights with which a sublayer's output is added to the streams.

    Attributes:
      output: b, the weight of the output in each stream.
      mix: M, the weight of stream j in the new stream k.
    """

    output: Float[Array, "batch seq streams"]
    mix: Float[Array, "batch seq streams streams"]


def balanced_matrix(
    logits: Float[Array, "*batch rows columns"], iterations: int, epsilon: float
) -> Float[Array, "*batch rows columns"]:
    """Returns an almost doubly stochastic matrix, by Sinkhorn-Knopp iterations from the softmax of each row.

    The first iteration divides columns by their sums; later ones divide rows and then columns. `epsilon` is added to
    the entries of the softmax and to all sums.
    """
    matrix = jax.nn.softmax(logits, axis=-1) + epsilon
    for iteration in range(iterations):
        if iteration:
            matrix = matrix / (jnp.sum(matrix, axis=-1, keepdims=True) + epsilon)
        matrix = matrix / (jnp.sum(matrix, axis=-2, keepdims=True) + epsilon)
    return matrix


@dataclass(frozen=True, kw_only=True)
class HyperConnections:
    """Residual streams x_1 ... x_n of width embed in place of one.

        u   = sum_j a_j x_j                        a = sigmoid(s_1 h_a + c_a) + epsilon
        x_k = b_k f(u) + sum_j M_jk x_j            b = 2 sigmoid(s_2 h_b + c_b)
                                                   M = balanced_matrix(s_3 h_M + c_M)

    f is a sublayer with its norm, and [h_a, h_b, h_M] = norm([x_1 ... x_n]) P with an RMS norm without a scale. P, c
    and s are stored in float32, and the weights are computed in float32.

    Attributes:
      streams: n.
      iterations: number of Sinkhorn-Knopp iterations.
      epsilon: see `balanced_matrix`.
    """

    streams: int
    iterations: int
    epsilon: float

    def build(self, build: Build) -> "StreamMixer":
        return StreamMixer(self, build)


class StreamMixer(nnx.Module):
    """Module of a `HyperConnections` for one sublayer."""

    def __init__(self, spec: HyperConnections, build: Build) -> None:
        self.spec, self.norm_epsilon = spec, build.norm.epsilon
        outputs = spec.streams * (spec.streams + 2)
        self.project = build.linear((spec.streams * build.embed, outputs), (None, None), dtype="float32")
        self.bias = build.full(outputs, None, 0.0, dtype="float32")
        self.scale = build.full(3, None, 1.0, dtype="float32")

    def read(self, x: Streams) -> tuple[Hidden, StreamWeights]:
        """Returns the sublayer's input u and the weights for `write`."""
        count = self.spec.streams
        products = _projected(x, self.project, self.norm_epsilon)
        dtype, bounds = products.dtype, [count, 2 * count]
        parts = (jnp.split(each, bounds, axis=-1) for each in (products, self.bias[...].astype(dtype)))
        scales = jnp.split(self.scale[...].astype(dtype), 3)
        read, output, mix = (s * h + c for s, h, c in zip(scales, *parts, strict=True))
        mix = balanced_matrix(mix.reshape(*mix.shape[:-1], count, count), self.spec.iterations, self.spec.epsilon)
        weights = StreamWeights(2 * jax.nn.sigmoid(output), mix)
        return _weighted_sum(jax.nn.sigmoid(read) + self.spec.epsilon, x), weights

    def write(self, x: Streams, output: Hidden, weights: StreamWeights) -> Streams:
        """Returns the new streams."""
        streams = _separate(x, self.spec.streams)
        dtype = weights.mix.dtype
        mixed = jnp.einsum("bsjk,bsjd->bskd", weights.mix, streams.astype(dtype), precision="highest")
        added = weights.output[..., None] * output[:, :, None].astype(dtype)
        return (mixed + added).astype(x.dtype).reshape(x.shape)


class StreamHead(nnx.Module):
    """Expands embeddings to equal streams, and sums the last streams with weights a; see `HyperConnections`.

    Args:
      spec: number of streams and epsilon.
      build: builder for sizes and initial values of the decoder.
    """

    def __init__(self, spec: HyperConnections, build: Build) -> None:
        self.spec, self.norm_epsilon = spec, build.norm.epsilon
        self.project = Linear(
            (spec.streams * build.embed, spec.streams),
            (None, None),
            use_bias=False,
            std=build.std,
            param_dtype="float32",
            key=build.child().key,
        )
        self.bias = nnx.Param(jnp.zeros(spec.streams, jnp.float32), logical_axes=(None,))
        self.scale = nnx.Param(jnp.ones(1, jnp.float32), logical_axes=(None,))

    def expand(self, x: Hidden) -> Streams:
        return jnp.tile(x, (1, 1, self.spec.streams))

    def collapse(self, x: Streams) -> Hidden:
        products = _projected(x, self.project, self.norm_epsilon)
        logits = products * self.scale[...].astype(products.dtype) + self.bias[...].astype(products.dtype)
        return _weighted_sum(jax.nn.sigmoid(logits) + self.spec.epsilon, x)


def _projected(x: Streams, project: Linear, epsilon: float) -> jax.Array:
    # In float32, like the router of a mixture: the weights of all later layers depend on these few products.
    normed: Any = ops.norm(x.astype(accurate_dtype(x.dtype)), epsilon=epsilon, axes={"x": ("batch", "seq", None)})
    return project(normed)


def _weighted_sum(weights: Float[Array, "batch seq streams"], x: Streams) -> Hidden:
    streams = _separate(x, weights.shape[-1]).astype(weights.dtype)
    return jnp.einsum("bsj,bsjd->bsd", weights, streams, precision="highest").astype(x.dtype)


def _separate(x: Streams, count: int) -> Float[Array, "batch seq streams embed"]:
    return x.reshape(*x.shape[:2], count, -1)
