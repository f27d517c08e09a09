"""LTX-Video: pixels of a video's latents attend to each other and to a text; positions are seconds and image pixels.

It is equivalent to diffusers' `LTXVideoTransformer3DModel`. Videos are [batch, frames, height, width, channels],
latents of `autoencoder_kl_ltx`, each of whose pixels is a token. To begin a video with an image, the tokens of the
first frame are the image's latents at the timestep 0.

Source: HaCohen et al., LTX-Video: Realtime Video Latent Diffusion, 2024 (arXiv:2501.00103).
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from pydantic import PositiveFloat, PositiveInt

from stack_core import ops
from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_core.abi.mesh import constrain
from stack_core.ops.definitions.rope import rotated
from stack_train.diffusion.components import Component
from stack_train.diffusion.denoiser import Condition, Images, Predicted, predicted_halfway, unconditional
from stack_train.diffusion.joint_blocks import WAVES, Embedder, embedder_names, make_linear
from stack_train.diffusion.layers import TOKENS, Heads, Tokens, waves
from stack_train.diffusion.wan import FIRST_FRAME
from stack_train.diffusion.wan_layers import ATTENTION_NAMES, Attention, CrossAttention
from stack_train.models.reader import Reader, Setting
from stack_train.nn.build import Build
from stack_train.nn.linear import FloatName
from stack_train.nn.residual import Norm
from stack_train.nn.stack import RematPolicy, scan_layers

__all__ = ["COMPONENT", "FAMILY", "FRAME_RATE", "TEXT_LENGTHS", "Ltx", "LtxConfig"]

TEXT_LENGTHS: Final = "text_lengths"
"""Condition with the number of tokens of each text that are not padding, [batch]."""

FRAME_RATE: Final = "frame_rate"
"""Condition with the frames per second of each video, [batch]."""

# As in diffusers, without settings: the seconds and pixels that positions of 1 stand for, the largest frequency of
# positions, and the epsilons of the norms of queries and keys and of the last norm.
_SECONDS, _PIXELS, _THETA = 20.0, 2048.0, 10_000.0
_HEADS_EPSILON, _LAST_EPSILON = 1e-5, 1e-6

Modulation = Float[Array, "batch groups rows embed"]
"""Values for the tokens of all frames (one group), or of each frame."""


@config
class LtxConfig:
    """Size and numerics of an LTX-Video. The defaults match the 2B model for 161 frames of 512 x 512 pixels.

    Attributes:
      name: selects this family.
      image_size: height and width of the latents.
      frames: number of frames of the latents: one for the first frame of a video, and one per `frames_per_latent`.
      channels: channels of the latents.
      pixels_per_latent: pixels of a side of a video for each side of a latent; positions are pixels.
      frames_per_latent: frames of a video for each frame of the latents but the first; positions are seconds.
      frame_rate: frames per second of videos whose condition lacks "frame_rate".
      layers: number of blocks.
      heads: number of attention heads.
      head_dim: width of a head, even; the residual stream is heads * head_dim wide.
      text_dim: features of each text token.
      text_tokens: number of tokens in a text.
      norm_epsilon: added to the mean square in the norms of blocks.
      initializer_std: standard deviation of the initial weights.
      dtype: dtype of the activations.
      param_dtype: dtype of the parameters.
      remat: values of each layer that are saved for the backward pass; the others are recomputed. "none" saves all,
        "dots" matrix products, "dots_no_batch" matrix products except attention's, "full" only the layer's input.
      unroll: compiles every layer separately in training instead of a loop, which makes steps faster and compilation
        slower. None does so for up to 32 layers on a single GPU.
    """

    name: Literal["ltx"] = "ltx"
    image_size: PositiveInt = 16
    frames: PositiveInt = 21
    channels: PositiveInt = 128
    pixels_per_latent: PositiveInt = 32
    frames_per_latent: PositiveInt = 8
    frame_rate: PositiveFloat = 25.0
    layers: PositiveInt = 28
    heads: PositiveInt = 32
    head_dim: PositiveInt = 64
    text_dim: PositiveInt = 4096
    text_tokens: PositiveInt = 128
    norm_epsilon: PositiveFloat = 1e-6
    initializer_std: PositiveFloat = 0.02
    dtype: FloatName = "bfloat16"
    param_dtype: FloatName = "float32"
    remat: RematPolicy = "none"
    unroll: bool | None = None

    def __post_init__(self) -> None:
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim}: positions rotate pairs of features. Take an even number.")
        if self.embed < 6:
            raise ConfigError(f"heads={self.heads} times head_dim={self.head_dim} is below 6. Take more.")

    @property
    def embed(self) -> int:
        """Width of the residual stream."""
        return self.heads * self.head_dim

    @property
    def classes(self) -> int:
        """Labels, of which the model takes none."""
        return 0

    @property
    def pooled_dim(self) -> int:
        """Features of a pooled text, of which the model takes none."""
        return 0

    @property
    def zero_unconditional(self) -> bool:
        """Unconditional predictions use the encoded empty prompt, not zeros."""
        return False

    @property
    def reads_text_lengths(self) -> bool:
        """The model ignores the padding of texts."""
        return True

    @property
    def takes_image(self) -> bool:
        """Videos may begin with an image."""
        return True


class Block(nnx.Module):
    """Attention among tokens, attention to a text, and a feed-forward layer; called with the slice of one layer."""

    def __init__(self, config: LtxConfig, build: Build) -> None:
        embed, mlp, self.norm_epsilon = config.embed, 4 * config.embed, config.norm_epsilon
        # Added to the embedded timestep: shift, scale and gate for the attention, and for the feed-forward layer.
        self.table = build.normal((6, embed), (None, None), std=embed**-0.5)
        self.attention = Attention(build.child(), config.heads)
        self.cross_attention = CrossAttention(build.child(), config.heads, reads_image=False)
        self.up = build.linear((embed, mlp), ("embed", "mlp"), bias=True)
        self.down = build.linear((mlp, embed), ("mlp", "embed"), bias=True)

    def __call__(
        self,
        x: Tokens,
        text: Float[Array, "batch text embed"],
        text_lengths: Int[Array, " batch"] | None,
        modulation: Modulation,
        coordinates: Float[Array, "batch seq axes"],
    ) -> Tokens:
        parts = _of_tokens(self.table[...].astype(modulation.dtype) + modulation, x.shape[1])
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = parts
        rotate = partial(_rotate, coordinates=coordinates)
        x = x + gate * self.attention(self._normed(x) * (1 + scale) + shift, rotate)
        x = x + self.cross_attention(x, text, text_lengths=text_lengths)
        normed = self._normed(x) * (1 + mlp_scale) + mlp_shift
        wide = constrain(self.up(normed), "batch", "seq", "act_mlp", name="a block's feed-forward layer")
        return x + mlp_gate * self.down(jax.nn.gelu(wide, approximate=True))

    def _normed(self, x: Tokens) -> Tokens:
        normed: Any = ops.norm(x, epsilon=self.norm_epsilon, axes={"x": TOKENS})
        return normed


def _of_tokens(values: Modulation, tokens: int) -> list[Float[Array, "batch _ embed"]]:
    """Returns the rows of a modulation for each token, or for all tokens if they are in one group."""
    groups = values.shape[1]
    rows = jnp.moveaxis(values, 2, 0)
    return [row if groups == 1 else row.repeat(tokens // groups, axis=1) for row in rows]


def _rotate(x: Heads, coordinates: Float[Array, "batch seq axes"]) -> Heads:
    """Applies rotary embeddings with float positions from 0 to 1, whose frequencies continue from head to head.

    The pair 3 i + axis of all heads together turns by f_i (2 p_axis - 1), f_i = pi / 2 theta^(i / (n - 1)). The
    first pairs, which the three axes do not divide, are not turned.
    """
    batch, seq, heads, head_dim = x.shape
    pairs, axes = heads * head_dim // 2, coordinates.shape[-1]
    # Exponents in float32, as in diffusers: their rounding turns the fastest pairs by some thousandths.
    exponents = np.linspace(0.0, 1.0, pairs // axes, dtype=np.float32)
    frequencies = (_THETA ** exponents.astype(np.float64) * math.pi / 2.0).astype(np.float32)
    angles = frequencies[:, None] * (2.0 * coordinates[:, :, None] - 1.0)
    angles = jnp.pad(angles.reshape(batch, seq, -1), ((0, 0), (0, 0), (pairs % axes, 0)))
    angles = angles.reshape(batch, seq, heads, head_dim // 2)
    return rotated(x, jnp.cos(angles), jnp.sin(angles), interleaved=True)


class Ltx(nnx.Module):
    """A `Denoiser` of videos whose condition is "text", [batch, tokens, text_dim].

    The condition may have `TEXT_LENGTHS`, `FRAME_RATE`, and as `FIRST_FRAME` the latents of an image, [batch, height,
    width, channels], which take the place of the first frame. The prediction of that frame is then to be ignored.
    The last layer starts at 0, so the model predicts 0 at first.
    """

    def __init__(self, config: LtxConfig, *, key: jax.Array) -> None:
        self.config = config
        embed, std = config.embed, config.initializer_std
        keys = jax.random.split(key, 7)
        self.patches = make_linear(config, (config.channels, embed), (None, "embed"), keys[0])
        self.text_in = Embedder(config, config.text_dim, keys[1], activation=partial(jax.nn.gelu, approximate=True))
        self.time = Embedder(config, WAVES, keys[2])
        self.modulation = make_linear(config, (embed, 6 * embed), ("embed", None), keys[3])
        norm = Norm(epsilon=_HEADS_EPSILON)
        self.blocks = Block(config, Build(embed, config.layers, std, std, norm, config.param_dtype, keys[4]))
        values = embed**-0.5 * jax.random.normal(keys[5], (2, embed), config.param_dtype)
        self.last_table = nnx.Param(values, logical_axes=(None, None))
        self.last = make_linear(config, (embed, config.channels), ("embed", None), keys[6], std=0.0)

    def __call__(self, images: Images, timesteps: Float[Array, " batch"], condition: Condition) -> Predicted:
        config, (batch, frames, *_, channels) = self.config, images.shape
        if FIRST_FRAME in condition:
            images = images.at[:, 0].set(condition[FIRST_FRAME].astype(images.dtype))
            timesteps = jnp.broadcast_to(timesteps[:, None], (batch, frames)).at[:, 0].set(0.0).reshape(-1)
        x = self.patches(images.astype(config.dtype).reshape(batch, -1, channels))
        text = self.text_in(condition["text"].astype(config.dtype))
        time = self.time(waves(timesteps, WAVES, last=0).astype(config.dtype))
        modulation = self.modulation(jax.nn.silu(time)).reshape(batch, -1, 6, config.embed)
        lengths, coordinates = condition.get(TEXT_LENGTHS), self._coordinates(images.shape, condition)

        def run(block: Block, x: Tokens, per_row: Any, _: None) -> tuple[Tokens, None]:
            return block(x, *per_row), None

        per_row, options = (text, lengths, modulation, coordinates), {"remat": config.remat, "unroll": config.unroll}
        x, _ = scan_layers(run, [self.blocks], x, [None], per_row=per_row, moves=True, **options)
        table = self.last_table[...].astype(time.dtype)
        shift, scale = _of_tokens(table + time.reshape(batch, -1, 1, config.embed), x.shape[1])
        normed: Any = ops.norm(x, kind="layer", epsilon=_LAST_EPSILON, axes={"x": TOKENS})
        return self.last(normed * (1 + scale) + shift).reshape(images.shape).astype(jnp.float32)

    def _coordinates(self, shape: tuple[int, ...], condition: Condition) -> Float[Array, "batch seq 3"]:
        """Returns the position of each token in seconds, rows and columns of pixels, as fractions of the largest."""
        batch, config = shape[0], self.config
        rate = condition.get(FRAME_RATE, jnp.full(batch, config.frame_rate, jnp.float32))
        grid = jnp.stack(jnp.meshgrid(*map(jnp.arange, shape[1:4]), indexing="ij"), axis=-1).astype(jnp.float32)
        seconds = grid[..., 0].reshape(-1) * (config.frames_per_latent / rate)[:, None] / _SECONDS
        sides = grid[..., 1:].reshape(-1, 2) * (config.pixels_per_latent / _PIXELS)
        return jnp.concatenate([seconds[..., None], jnp.broadcast_to(sides, (batch, *sides.shape))], axis=-1)

    def on_batch(self, batch: Mapping[str, jax.Array]) -> Predicted:
        """See `RunsOnBatches`."""
        return predicted_halfway(self, batch)

    def unconditional(self, condition: Condition) -> Condition:
        """See `unconditional`; guidance changes the text only."""
        return unconditional(condition, shared=(FIRST_FRAME, FRAME_RATE))


class LtxFamily:
    """The `ModelFamily` of LTX-Video."""

    name = "ltx"
    config_class = LtxConfig

    def build(self, config: LtxConfig, *, key: jax.Array) -> Ltx:
        return Ltx(config, key=key)


FAMILY = LtxFamily()

_BLOCK = "transformer_blocks.{layer}."


def _read_channels(reader: Reader) -> dict[str, Any]:
    channels = reader.get("in_channels", default=128)
    if (predicted := reader.get("out_channels", default=128) or channels) != channels:
        reader.problems.append(f"out_channels={predicted}, not in_channels, {channels}")
    # Layers read the projected text, which is as wide as the stream.
    embed = reader.get("num_attention_heads", default=32) * reader.get("attention_head_dim", default=64)
    if (width := reader.get("cross_attention_dim", default=2048)) != embed:
        reader.problems.append(f"cross_attention_dim={width}, not {embed}")
    return {}


COMPONENT = Component(
    class_name="LTXVideoTransformer3DModel",
    family=FAMILY,
    settings=(
        Setting("channels", ("in_channels",), 128),
        Setting("layers", ("num_layers",), 28),
        Setting("heads", ("num_attention_heads",), 32),
        Setting("head_dim", ("attention_head_dim",), 64),
        Setting("text_dim", ("caption_channels",), 4096),
        Setting("norm_epsilon", ("norm_eps",), 1e-6),
    ),
    fixed={
        # diffusers' pipeline makes latents for patches of 1.
        "patch_size": 1,
        "patch_size_t": 1,
        "activation_fn": "gelu-approximate",
        "qk_norm": "rms_norm_across_heads",
        "norm_elementwise_affine": False,
        "attention_bias": True,
        "attention_out_bias": True,
    },
    read_others=_read_channels,
    write_others=lambda config: {"out_channels": config.channels, "cross_attention_dim": config.embed},
    names={
        "patches": "proj_in",
        **embedder_names({"time": "timestep_embedder"}, "time_embed.emb"),
        "text_in/enter": "caption_projection.linear_1",
        "text_in/leave": "caption_projection.linear_2",
        "modulation": "time_embed.linear",
        "blocks/table": _BLOCK + "scale_shift_table",
        **{f"blocks/attention/{ours}": f"{_BLOCK}attn1.{theirs}" for ours, theirs in ATTENTION_NAMES.items()},
        **{f"blocks/cross_attention/{ours}": f"{_BLOCK}attn2.{theirs}" for ours, theirs in ATTENTION_NAMES.items()},
        "blocks/up": _BLOCK + "ff.net.0.proj",
        "blocks/down": _BLOCK + "ff.net.2",
        "last_table": "scale_shift_table",
        "last": "proj_out",
    },
)
