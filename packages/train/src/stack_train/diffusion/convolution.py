"""Layers of autoencoders of images and videos: convolutions and norms of arrays with channels last."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from stack_train.nn.linear import FloatName

__all__ = [
    "CausalConvolution",
    "ChannelNorm",
    "Convolution",
    "EdgeConvolution",
    "Features",
    "FrameCache",
    "GroupNorm",
    "VideoFeatures",
]

Features = Float[Array, "batch _ _ _"]
"""[batch, height, width, channels], of which layers change all but the first."""

VideoFeatures = Float[Array, "batch _ _ _ _"]
"""[batch, frames, height, width, channels]."""


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


class ChannelNorm(nnx.Module):
    """y = gamma sqrt(channels) x / |x|, over the channels of each pixel; computed in float32.

    Args:
      axes: number of axes of length 1 after the channels in gamma's shape, which is the shape in files.
    """

    def __init__(self, channels: int, param_dtype: FloatName, *, axes: int) -> None:
        self.gamma = nnx.Param(jnp.ones((channels, *[1] * axes), param_dtype), logical_axes=(None,) * (1 + axes))

    def __call__(self, x: Float[Array, "batch *pixels channels"]) -> Float[Array, "batch *pixels channels"]:
        gamma, wide = self.gamma[...].astype(jnp.float32).reshape(-1), x.astype(jnp.float32)
        # The bound is torch's, squared.
        squared = jnp.maximum(jnp.square(wide).sum(-1, keepdims=True), 1e-24)
        return (wide * jax.lax.rsqrt(squared) * math.sqrt(x.shape[-1]) * gamma).astype(x.dtype)


class FrameCache:
    """Last input frames of causal layers before a chunk of a video, in the order of their calls.

    Attributes:
      is_first: True for the first chunk, without earlier frames.
      stored: frames for the next chunk.
    """

    def __init__(self, frames: Sequence[Array] | None = None) -> None:
        self.is_first, self.stored = frames is None, list[Array]()
        self._frames = iter(frames or ())

    def prepend(self, x: VideoFeatures, frames: int, *, copies: int | None = None) -> VideoFeatures:
        """Returns x after the last frames of the previous chunk; stores the last `frames` frames of the result.

        Args:
          copies: number of copies of the first frame before the first chunk; None for `frames` frames of zeros.
        """
        if not self.is_first:
            before = next(self._frames)
        elif copies is None:
            before = jnp.zeros((x.shape[0], frames, *x.shape[2:]), x.dtype)
        else:
            before = x[:, :1].repeat(copies, axis=1)
        joined = jnp.concatenate([before, x], axis=1)
        self.stored.append(joined[:, joined.shape[1] - frames :])
        return joined


class CausalConvolution(nnx.Module):
    """A convolution of videos with kernel[frames, side, side, in, out], in which no frame reads a later one.

    Initial values are normal with variance 1 / (frames side^2 in), and the bias starts at zero.
    """

    def __init__(
        self, channels: tuple[int, int], *, frames: int = 3, side: int = 3, param_dtype: FloatName, key: jax.Array
    ) -> None:
        shape = (frames, side, side, *channels)
        values = jax.random.normal(key, shape, param_dtype) / math.sqrt(frames * side * side * channels[0])
        self.kernel = nnx.Param(values.astype(param_dtype), logical_axes=(None,) * 5)
        self.bias = nnx.Param(jnp.zeros(channels[1:], param_dtype), logical_axes=(None,))

    def __call__(self, x: VideoFeatures, cache: FrameCache) -> VideoFeatures:
        """Convolves a chunk of a video after the frames of the previous chunk."""
        frames = self.kernel.shape[0] - 1
        return self.convolve(cache.prepend(x, frames) if frames else x)

    def convolve(self, x: VideoFeatures, strides: tuple[int, int, int] = (1, 1, 1)) -> VideoFeatures:
        """Convolves frames that have all their earlier frames in x.

        Args:
          strides: distances of the outputs in frames, rows and columns.
        """
        padding = self.kernel.shape[1] // 2
        y = jax.lax.conv_general_dilated(
            x,
            self.kernel[...].astype(x.dtype),
            strides,
            ((0, 0), (padding, padding), (padding, padding)),
            dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
        )
        return y + self.bias[...].astype(x.dtype)


class EdgeConvolution(CausalConvolution):
    """A convolution of videos before which the first frame is repeated, instead of zeros.

    Args:
      side: number of frames, rows and columns of the kernel.
      stride: distance of the outputs in frames, rows and columns.
      is_causal: no frame reads a later one. Otherwise, the last frame is repeated after the video, too.
    """

    def __init__(
        self,
        channels: tuple[int, int],
        *,
        side: int = 3,
        stride: int = 1,
        is_causal: bool,
        param_dtype: FloatName,
        key: jax.Array,
    ) -> None:
        super().__init__(channels, frames=side, side=side, param_dtype=param_dtype, key=key)
        self.stride, self.is_causal = stride, is_causal

    def __call__(self, x: VideoFeatures, cache: FrameCache) -> VideoFeatures:
        """Convolves a chunk of a video, or a complete video if the convolution is not causal."""
        frames = self.kernel.shape[0] - 1
        if frames and self.is_causal:
            # The windows of outputs overlap by this many frames.
            x = cache.prepend(x, frames - self.stride + 1, copies=frames)
        elif frames:
            x = jnp.pad(x, ((0, 0), (frames // 2, frames // 2), (0, 0), (0, 0), (0, 0)), mode="edge")
        return self.convolve(x, (self.stride, self.stride, self.stride))
