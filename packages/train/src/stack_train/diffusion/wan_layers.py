"""Layers of Wan: attention among patches, attention to a text and an image, and the embedding of an image.

LTX-Video has the same attention.

Source: Wan Team, Wan: Open and Advanced Large-Scale Video Generative Models, 2025 (arXiv:2503.20314).
"""

from collections.abc import Callable
from typing import Any, Final

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from stack_core import ops
from stack_core.abi.mesh import constrain
from stack_train.diffusion.joint_blocks import make_linear
from stack_train.diffusion.layers import (
    ATTENTION,
    HEADS,
    TOKENS,
    Heads,
    Tokens,
    modulated,
    split_heads,
    unmasked_attention,
)
from stack_train.nn.build import Build
from stack_train.nn.layer_norm import LayerNorm

__all__ = ["ATTENTION_NAMES", "Attention", "Block", "CrossAttention", "ImageEmbedder"]

ATTENTION_NAMES: Final = {
    "query": "to_q",
    "key": "to_k",
    "value": "to_v",
    "query_norm": "norm_q.weight",
    "key_norm": "norm_k.weight",
    "output": "to_out.0",
}
"""Names of the parts of an attention in diffusers."""

_ALL_HEADS: Final = ("batch", "seq", "act_heads")
_IMAGE_HEADS: Final = ("batch", None, "act_heads")
_IMAGE: Final = (*_IMAGE_HEADS, None)
_IMAGE_ATTENTION: Final = {"query": HEADS, "key": _IMAGE, "value": _IMAGE}
_IMAGE_TOKENS: Final = ("batch", None, None)
_IMAGE_EPSILON: Final = 1e-5  # as in diffusers, without a setting


class Attention(nnx.Module):
    """Attention among patches; queries and keys are normed over all heads."""

    def __init__(self, build: Build, heads: int) -> None:
        embed, self.heads, self.norm = build.embed, heads, build.norm
        self.query = build.linear((embed, embed), ("embed", "heads"), bias=True)
        self.key = build.linear((embed, embed), ("embed", "heads"), bias=True)
        self.value = build.linear((embed, embed), ("embed", "heads"), bias=True)
        self.query_norm, self.key_norm = build.scale(embed, "heads"), build.scale(embed, "heads")
        self.output = build.linear((embed, embed), ("heads", "embed"), bias=True)

    def __call__(self, x: Tokens, rotate: Callable[[Heads], Heads]) -> Tokens:
        query = rotate(self.normed_heads(self.query(x), self.query_norm))
        key = rotate(self.normed_heads(self.key(x), self.key_norm))
        return self.output(unmasked_attention(query, key, split_heads(self.value(x), self.heads, "heads")))

    def normed_heads(self, x: Tokens, scale: Any) -> Heads:
        return split_heads(self.norm(x, scale, _ALL_HEADS), self.heads, "heads")


class CrossAttention(Attention):
    """Attention from patches to a text, plus attention to an image with separate keys and values.

    Args:
      reads_image: adds the projections of an image.
    """

    def __init__(self, build: Build, heads: int, *, reads_image: bool) -> None:
        super().__init__(build, heads)
        shape, axes = (build.embed, build.embed), ("embed", "heads")
        self.image_key = build.linear(shape, axes, bias=True) if reads_image else None
        self.image_value = build.linear(shape, axes, bias=True) if reads_image else None
        self.image_key_norm = build.scale(build.embed, "heads") if reads_image else None

    def __call__(
        self,
        x: Tokens,
        text: Float[Array, "batch text embed"],
        image: Float[Array, "batch image embed"] | None = None,
        *,
        text_lengths: Int[Array, " batch"] | None = None,
    ) -> Tokens:
        """Attends to the first `text_lengths` tokens of each text, by default all, and to the image."""
        query = self.normed_heads(self.query(x), self.query_norm)
        key, value = self.normed_heads(self.key(text), self.key_norm), self.value(text)
        heads = split_heads(value, self.heads, "heads")
        to_text: Any = ops.attention(query, key, heads, kv_lengths=text_lengths, axes=ATTENTION)
        attended = to_text.reshape(x.shape)
        if image is not None and self.image_key is not None and self.image_value is not None:
            key = self.norm(self.image_key(image), self.image_key_norm, _IMAGE_HEADS)
            parts = (self._split_image(x) for x in (key, self.image_value(image)))
            to_image: Any = ops.attention(query, *parts, axes=_IMAGE_ATTENTION)
            attended += to_image.reshape(attended.shape)
        return self.output(attended)

    def _split_image(self, x: Float[Array, "batch image embed"]) -> Float[Array, "batch image heads head_dim"]:
        # Devices that split sequences do not split these few tokens.
        return constrain(x.reshape(*x.shape[:2], self.heads, -1), *_IMAGE, name="the heads of an image")


class Block(nnx.Module):
    """Attention among patches, attention to text and image, and a feed-forward layer.

    Parameters are stacked, and a call has the slice of one layer.

    Args:
      config: a `WanConfig`.
      build: builder of the parameters.
    """

    def __init__(self, config: Any, build: Build) -> None:
        embed, self.epsilon = config.embed, config.norm_epsilon
        # Added to the embedded timestep: shift, scale and gate for the attention, and for the feed-forward layer.
        self.table = build.normal((1, 6, embed), (None, None, None), std=embed**-0.5)
        self.attention = Attention(build.child(), config.heads)
        self.cross_attention = CrossAttention(build.child(), config.heads, reads_image=config.image_dim is not None)
        self.cross_scale = build.full(embed, None, 1.0) if config.cross_norm else None
        self.cross_offset = build.full(embed, None, 0.0) if config.cross_norm else None
        self.up = build.linear((embed, config.mlp), ("embed", "mlp"), bias=True)
        self.down = build.linear((config.mlp, embed), ("mlp", "embed"), bias=True)

    def __call__(
        self,
        x: Tokens,
        text: Float[Array, "batch text embed"],
        image: Float[Array, "batch image embed"] | None,
        modulation: Float[Array, "batch 6 embed"],
        rotate: Callable[[Heads], Heads],
    ) -> Tokens:
        parts = (self.table[...].astype(modulation.dtype) + modulation).swapaxes(0, 1)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = parts
        normed = modulated(x, shift, scale, epsilon=self.epsilon)
        x = x + gate[:, None] * self.attention(normed, rotate)
        x = x + self.cross_attention(self._cross_normed(x), text, image)
        normed = modulated(x, mlp_shift, mlp_scale, epsilon=self.epsilon)
        wide = constrain(self.up(normed), "batch", "seq", "act_mlp", name="a block's feed-forward layer")
        return x + mlp_gate[:, None] * self.down(jax.nn.gelu(wide, approximate=True))

    def _cross_normed(self, x: Tokens) -> Tokens:
        if self.cross_scale is None or self.cross_offset is None:
            return x
        scale, offset = self.cross_scale[...], self.cross_offset[...]
        normed: Any = ops.norm(x, scale, offset=offset, kind="layer", epsilon=self.epsilon, axes={"x": TOKENS})
        return normed


class ImageEmbedder(nnx.Module):
    """norm(leave(gelu(enter(norm(x))))): the features of an image's patches, as wide as the stream."""

    def __init__(self, config: Any, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        features = config.image_dim
        self.enter = make_linear(config, (features, features), (None, None), first)
        self.leave = make_linear(config, (features, config.embed), (None, "embed"), second)
        options: Any = (_IMAGE_EPSILON, _IMAGE_TOKENS, config.param_dtype)
        self.enter_norm, self.leave_norm = (LayerNorm.single(width, *options) for width in (features, config.embed))

    def __call__(self, x: Float[Array, "batch image features"]) -> Float[Array, "batch image embed"]:
        return self.leave_norm(self.leave(jax.nn.gelu(self.enter(self.enter_norm(x)), approximate=False)))
