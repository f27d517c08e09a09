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

    Initial values are normal with variance 1 / (side^2 in), or 0 with `zeros`, and the bias starts at zero.

    Args:
      pads_before: pads above and to the left also if the stride is 2, as in UNets.
    """

    def __init__(
        self,
        channels: tuple[int, int],
        *,
        side: int = 3,
        stride: int = 1,
        pads_before: bool = False,
        zeros: bool = False,
        param_dtype: FloatName,
        key: jax.Array,
    ) -> None:
        self.side, self.stride, self.pads_before = side, stride, pads_before or stride == 1
        shape = (side, side, *channels)
        std = 0.0 if zeros else 1.0 / math.sqrt(side * side * channels[0])
        values = std * jax.random.normal(key, shape, param_dtype)
        self.kernel = nnx.Param(values.astype(param_dtype), logical_axes=(None, None, None, None))
        self.bias = nnx.Param(jnp.zeros(channels[1:], param_dtype), logical_axes=(None,))

    def __call__(self, x: Features) -> Features:
        """Convolves images; a stride of 2 halves their height and width."""
        # To halve an image, diffusers' autoencoders pad one pixel below and to the right; its UNets pad all sides.
        padding = (self.side // 2 if self.pads_before else 0, self.side // 2)
        y = jax.lax.conv_general_dilated(
            x,
            self.kernel[...].astype(x.dtype),
            (self.stride, self.stride),
            (padding, padding),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return y + self.bias[...].astype(x.dtype)


class GroupNorm(nnx.Module):
    """y = s (x - mean) / sqrt(var + epsilon) + b, over all pixels of a group of channels; computed in float32.

    Source: Wu and He, Group Normalization, 2018 (arXiv:1803.08494).
    """

    def __init__(self, channels: int, groups: int, param_dtype: FloatName, *, epsilon: float = 1e-6) -> None:
        self.groups, self.epsilon = groups, epsilon
        self.scale = nnx.Param(jnp.ones(channels, param_dtype), logical_axes=(None,))
        self.bias = nnx.Param(jnp.zeros(channels, param_dtype), logical_axes=(None,))

    def __call__(self, x: Float[Array, "batch *pixels channels"]) -> Float[Array, "batch *pixels channels"]:
        grouped = x.astype(jnp.float32).reshape(x.shape[0], -1, self.groups, x.shape[-1] // self.groups)
        centred = grouped - grouped.mean((1, 3), keepdims=True)
        normed = centred * jax.lax.rsqrt(jnp.square(centred).mean((1, 3), keepdims=True) + self.epsilon)
        scale, bias = self.scale[...].astype(jnp.float32), self.bias[...].astype(jnp.float32)
        return (normed.reshape(x.shape) * scale + bias).astype(x.dtype)
