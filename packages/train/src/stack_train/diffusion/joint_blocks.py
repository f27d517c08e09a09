"""Layers of FLUX and Stable Diffusion 3: streams of text and image with weights of their own and one attention.

Source: Esser et al., Scaling Rectified Flow Transformers, 2024 (arXiv:2403.03206).
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from stack_core.abi.mesh import constrain
from stack_train.diffusion.layers import HEADS, Heads, Tokens, modulated, split_heads, unmasked_attention
from stack_train.nn.build import Build
from stack_train.nn.linear import FloatName, Linear

__all__ = [
    "IMAGE_NAMES",
    "TEXT_NAMES",
    "WAVES",
    "Embedder",
    "HeadsOfStream",
    "JointBlock",
    "Projections",
    "Stream",
    "Streams",
    "embedder_names",
    "make_linear",
]

WAVES: Final = 256
"""Features of an embedded timestep."""

Streams = tuple[Float[Array, "batch text embed"], Float[Array, "batch image embed"]]
HeadsOfStream = tuple[Heads, Heads, Heads]
"""Queries, keys and values."""


class Projections(nnx.Module):
    """Queries, keys and values of one stream.

    Args:
      normed: norm queries and keys head by head.
    """

    def __init__(self, build: Build, heads: int, *, normed: bool = True) -> None:
        embed, self.heads, self.norm = build.embed, heads, build.norm
        self.query = build.linear((embed, embed), ("embed", "heads"), bias=True)
        self.key = build.linear((embed, embed), ("embed", "heads"), bias=True)
        self.value = build.linear((embed, embed), ("embed", "heads"), bias=True)
        self.query_norm = build.scale(embed // heads, "head_dim") if normed else None
        self.key_norm = build.scale(embed // heads, "head_dim") if normed else None

    def __call__(self, x: Tokens) -> HeadsOfStream:
        query, key, value = (
            split_heads(linear(x), self.heads, "heads") for linear in (self.query, self.key, self.value)
        )
        if self.query_norm is None or self.key_norm is None:
            return query, key, value
        return self.norm(query, self.query_norm, HEADS), self.norm(key, self.key_norm, HEADS), value


class Stream(nnx.Module):
    """One stream of a joint block: its layers before and after the joint attention.

    Args:
      normed: see `Projections`.
      modulations: number of vectors that the condition gives; a subclass may take more than six.
    """

    def __init__(self, build: Build, heads: int, *, normed: bool = True, modulations: int = 6) -> None:
        embed, mlp = build.embed, 4 * build.embed
        # Shift, scale and gate of the attention, then of the feed-forward layer.
        self.modulation = build.linear((embed, modulations * embed), ("embed", None), bias=True, residual=True)
        self.projections = Projections(build, heads, normed=normed)
        self.output = build.linear((embed, embed), ("heads", "embed"), bias=True)
        self.up = build.linear((embed, mlp), ("embed", "mlp"), bias=True)
        self.down = build.linear((mlp, embed), ("mlp", "embed"), bias=True)

    def before(self, x: Tokens, condition: Array) -> tuple[HeadsOfStream, list[Array]]:
        """Returns queries, keys and values, and the remaining parts of the modulation."""
        # `after` gets the gate of the attention, and shift, scale and gate of the feed-forward layer.
        shift, scale, *others = jnp.split(self.modulation(condition), 6, axis=-1)
        return self.projections(modulated(x, shift, scale)), others

    def after(self, x: Tokens, attended: Tokens, modulation: list[Array]) -> Tokens:
        gate, shift, scale, gate_mlp = (part[:, None] for part in modulation)
        x = x + gate * self.output(attended)
        wide = constrain(self.up(modulated(x, shift[:, 0], scale[:, 0])), "batch", "seq", "act_mlp", name="a stream")
        return x + gate_mlp * self.down(jax.nn.gelu(wide, approximate=True))


class JointBlock(nnx.Module):
    """Text and image with weights of their own, and one attention; called with the slice of one layer."""

    def __init__(self, text: Any, image: Any) -> None:
        self.text, self.image = text, image

    def __call__(
        self, streams: Streams, condition: Array, rotate: Callable[[Heads], Heads] = lambda heads: heads
    ) -> Streams:
        text, image = streams
        # Text tokens first; the order matters for the split after attention and for positions.
        of_text, text_others = self.text.before(text, condition)
        of_image, image_others = self.image.before(image, condition)
        query, key, value = (jnp.concatenate(parts, axis=1) for parts in zip(of_text, of_image, strict=True))
        attended = unmasked_attention(rotate(query), rotate(key), value)
        text_attended, image_attended = jnp.split(attended, [text.shape[1]], axis=1)
        return self.text.after(text, text_attended, text_others), self.image.after(image, image_attended, image_others)


@runtime_checkable
class Widths(Protocol):
    """The part of a denoiser's config that its layers outside of blocks read."""

    @property
    def embed(self) -> int: ...
    @property
    def initializer_std(self) -> float: ...
    @property
    def param_dtype(self) -> FloatName: ...


class Embedder(nnx.Module):
    """out(activation(in(x))): a number's waves, or a text's features, as wide as the stream."""

    def __init__(
        self, config: Widths, features: int, key: jax.Array, *, activation: Callable[[Array], Array] = jax.nn.silu
    ) -> None:
        self.activation = activation
        first, second = jax.random.split(key)
        self.enter = make_linear(config, (features, config.embed), (None, "embed"), first)
        self.leave = make_linear(config, (config.embed, config.embed), ("embed", None), second)

    def __call__(self, x: Float[Array, "batch *seq features"]) -> Float[Array, "batch *seq embed"]:
        return self.leave(self.activation(self.enter(x)))


def make_linear(
    config: Widths,
    shape: tuple[int, int],
    axes: tuple[str | None, ...],
    key: jax.Array,
    *,
    std: float | None = None,
) -> Linear:
    """Returns a linear layer with a bias, outside of the blocks."""
    std = config.initializer_std if std is None else std
    return Linear(shape, axes, use_bias=True, std=std, param_dtype=config.param_dtype, key=key)


IMAGE_NAMES: Final = {
    "modulation": "norm1.linear",
    "projections/query": "attn.to_q",
    "projections/key": "attn.to_k",
    "projections/value": "attn.to_v",
    "projections/query_norm": "attn.norm_q.weight",
    "projections/key_norm": "attn.norm_k.weight",
    "output": "attn.to_out.0",
    "up": "ff.net.0.proj",
    "down": "ff.net.2",
}
"""Names of an image stream's modules in a block of diffusers."""

TEXT_NAMES: Final = {
    "modulation": "norm1_context.linear",
    "projections/query": "attn.add_q_proj",
    "projections/key": "attn.add_k_proj",
    "projections/value": "attn.add_v_proj",
    "projections/query_norm": "attn.norm_added_q.weight",
    "projections/key_norm": "attn.norm_added_k.weight",
    "output": "attn.to_add_out",
    "up": "ff_context.net.0.proj",
    "down": "ff_context.net.2",
}


def embedder_names(embedders: Mapping[str, str], module: str = "time_text_embed") -> dict[str, str]:
    """Returns the names of layers in diffusers from the names of their embedders in a module."""
    return {
        f"{ours}/{end}": f"{module}.{theirs}.linear_{number}"
        for ours, theirs in embedders.items()
        for number, end in enumerate(("enter", "leave"), 1)
    }
