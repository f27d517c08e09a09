"""Layers of image autoencoders: convolutions and group norms of arrays with channels last."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from stack_train.nn.linear import FloatName

__all__ = ["Convolution", "Features", "GroupNorm"]

Features = Float[Array, "batch _ _ _"]
"""[batch, height, width, channels], of which layers change all but the first."""


class Convolution(nnx.Module):
    """A convolution with kernel[side, side, in, out] cast to the dtype of x.

    Initial values are normal with variance 1 / (side^2 in), and the bias starts at zero.
    """

    def __init__(
        self, channels: tuple[int, int], *, side: int = 3, stride: int = 1, param_dtype: FloatName, key: jax.Array
    ) -> None:
        self.side, self.stride = side, stride
        shape = (side, side, *channels)
        values = jax.random.normal(key, shape, param_dtype) / math.sqrt(side * side * channels[0])
        self.kernel = nnx.Param(values.astype(param_dtype), logical_axes=(None, None, None, None))
        self.bias = nnx.Param(jnp.zeros(channels[1:], param_dtype), logical_axes=(None,))

    def __call__(self, x: Features) -> Features:
        """Keeps the size of images; with a stride of 2, halves it, and pads below and to the right only."""
        # As in diffusers, whose downsampling pads one pixel below and to the right.
        before = 0 if self.stride == 2 else self.side // 2
        padding = (before, self.side // 2)
        y = jax.lax.conv_general_dilated(
            x,
            self.kernel[...].astype(x.dtype),
            (self.stride, self.stride),
            (padding, padding),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return y + self.bias[...].astype(x.dtype)


class GroupNorm(nnx.Module):
    """y = s (x - mean) / sqrt(var + 1e-6) + b, over all pixels of a group of channels; computed in float32.

    Source: Wu and He, Group Normalization, 2018 (arXiv:1803.08494).
    """

    def __init__(self, channels: int, groups: int, param_dtype: FloatName) -> None:
        self.groups = groups
        self.scale = nnx.Param(jnp.ones(channels, param_dtype), logical_axes=(None,))
        self.bias = nnx.Param(jnp.zeros(channels, param_dtype), logical_axes=(None,))

    def __call__(self, x: Float[Array, "batch *pixels channels"]) -> Float[Array, "batch *pixels channels"]:
        grouped = x.astype(jnp.float32).reshape(x.shape[0], -1, self.groups, x.shape[-1] // self.groups)
        centred = grouped - grouped.mean((1, 3), keepdims=True)
        normed = centred * jax.lax.rsqrt(jnp.square(centred).mean((1, 3), keepdims=True) + 1e-6)
        scale, bias = self.scale[...].astype(jnp.float32), self.bias[...].astype(jnp.float32)
        return (normed.reshape(x.shape) * scale + bias).astype(x.dtype)
