"""Wan 2.1 and 2.2: patches of a video attend to each other and to a text; positions rotate by frame, row and column.

It is equivalent to diffusers' `WanTransformer3DModel` for text to video and image to video. Videos are [batch, frames,
height, width, channels], latents of `autoencoder_kl_wan`. Models of image to video read the encoded first frame in
additional input channels, and in Wan 2.1 they also attend to its features.

Source: Wan Team, Wan: Open and Advanced Large-Scale Video Generative Models, 2025 (arXiv:2503.20314).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from stack_core.abi.config import changed_fields, config
from stack_core.abi.errors import ConfigError
from stack_train.diffusion.components import Component
from stack_train.diffusion.denoiser import Condition, Images, Predicted, predicted_halfway, unconditional
from stack_train.diffusion.joint_blocks import Embedder, embedder_names, make_linear
from stack_train.diffusion.layers import Tokens, modulated, patches_of, rotated, unpatched, waves
from stack_train.diffusion.wan_layers import ATTENTION_NAMES, Block, ImageEmbedder
from stack_train.models.reader import Reader, Setting
from stack_train.nn.build import Build
from stack_train.nn.linear import FloatName
from stack_train.nn.residual import Norm
from stack_train.nn.stack import RematPolicy, scan_layers

__all__ = ["COMPONENT", "FAMILY", "FIRST_FRAME", "IMAGE_FEATURES", "Wan", "WanConfig"]

FIRST_FRAME: Final = "first_frame"
"""Condition with the mask of the first frame and its latents, [batch, frames, height, width, extra_channels]."""

IMAGE_FEATURES: Final = "image_features"
"""Condition with the features of the first frame, [batch, image_tokens, image_dim]."""


@config
class WanConfig:
    """Size and numerics of a Wan. The defaults match Wan 2.1 1.3B for 81 frames of 480 x 480 pixels.

    Attributes:
      name: selects this family.
      image_size: height and width of the latents, a multiple of `patch`.
      frames: number of frames of the latents: one for the first frame of a video, and one per four others.
      channels: channels of the latents.
      extra_channels: additional input channels of image to video: the mask of the first frame, one channel for each
        frame of a latent, and its latents (20 with the autoencoder of Wan 2.1).
      image_dim: features of each image token, which Wan 2.1 reads for image to video; None for a model without them.
      image_tokens: number of image tokens.
      patch: height and width of a patch, which has one frame.
      layers: number of blocks.
      heads: number of attention heads.
      head_dim: width of a head; the residual stream is heads * head_dim wide. Rotary positions of rows and columns use
        2 floor(head_dim / 6) features each, and positions of frames use the rest.
      mlp: hidden width of the feed-forward layers.
      text_dim: features of each text token.
      text_tokens: number of tokens in a text.
      time_features: sines and cosines of an embedded timestep.
      cross_norm: norms the input of the attention to the text.
      max_positions: largest number of frames, and of rows and columns of patches.
      norm_epsilon: added to the variance or the mean square in norms.
      initializer_std: standard deviation of the initial weights.
      dtype: dtype of the activations.
      param_dtype: dtype of the parameters.
      remat: values of each layer that are saved for the backward pass; the others are recomputed. "none" saves all,
        "dots" matrix products, "dots_no_batch" matrix products except attention's, "full" only the layer's input.
      unroll: compiles every layer separately in training instead of a loop, which makes steps faster and compilation
        slower. None does so for up to 32 layers on a single GPU.
    """

    name: Literal["wan"] = "wan"
    image_size: PositiveInt = 60
    frames: PositiveInt = 21
    channels: PositiveInt = 16
    extra_channels: NonNegativeInt = 0
    image_dim: PositiveInt | None = None
    image_tokens: PositiveInt = 257
    patch: PositiveInt = 2
    layers: PositiveInt = 30
    heads: PositiveInt = 12
    head_dim: PositiveInt = 128
    mlp: PositiveInt = 8960
    text_dim: PositiveInt = 4096
    text_tokens: PositiveInt = 512
    time_features: PositiveInt = 256
    cross_norm: bool = True
    max_positions: PositiveInt = 1024
    norm_epsilon: PositiveFloat = 1e-6
    initializer_std: PositiveFloat = 0.02
    dtype: FloatName = "bfloat16"
    param_dtype: FloatName = "float32"
    remat: RematPolicy = "none"
    unroll: bool | None = None

    def __post_init__(self) -> None:
        if self.head_dim % 2 or self.head_dim < 6:
            raise ConfigError(
                f"head_dim={self.head_dim}: frames, rows and columns rotate pairs of features. Take an even "
                "number from 6."
            )
        if self.time_features % 2:
            raise ConfigError(f"time_features={self.time_features} are sines and cosines. Take an even number.")
        if self.image_dim is not None and not self.extra_channels:
            raise ConfigError(
                f"image_dim={self.image_dim} is for image to video, and extra_channels is 0. Set extra_channels to 20."
            )
        if self.image_dim is None and changed_fields(self, ("image_tokens",)):
            raise ConfigError(
                f"image_tokens={self.image_tokens} would have no effect, because image_dim is None. Leave it out."
            )
        if self.frames > self.max_positions:
            raise ConfigError(f"frames={self.frames} exceed max_positions={self.max_positions}. Take fewer frames.")
        self.check_size(self.image_size, self.image_size)

    @property
    def embed(self) -> int:
        """Width of the residual stream."""
        return self.heads * self.head_dim

    @property
    def rope_axes(self) -> tuple[int, int, int]:
        """Features of a head that rotate with the frame, the row and the column."""
        side = 2 * (self.head_dim // 6)
        return self.head_dim - 2 * side, side, side

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

    def check_size(self, height: int, width: int) -> None:
        """Raises a ConfigError if the model does not support latents of this size."""
        if height % self.patch or width % self.patch:
            raise ConfigError(
                f"Latents of {height} x {width} are not multiples of patch={self.patch}. Take other sides (image_size)."
            )
        if max(height, width) > (limit := self.patch * self.max_positions):
            raise ConfigError(
                f"Latents of {height} x {width} exceed {limit}, patch={self.patch} times max_positions="
                f"{self.max_positions}. Take smaller videos."
            )


class Wan(nnx.Module):
    """A `Denoiser` of videos whose condition is "text", [batch, tokens, text_dim].

    Models of image to video also have the condition `FIRST_FRAME`, and with `image_dim` also `IMAGE_FEATURES`.
    The last layer starts at 0, so the model predicts 0 at first.
    """

    def __init__(self, config: WanConfig, *, key: jax.Array) -> None:
        self.config = config
        embed, features, std = config.embed, config.channels * config.patch**2, config.initializer_std
        keys = jax.random.split(key, 7)
        inputs = (config.channels + config.extra_channels) * config.patch**2
        self.patches = make_linear(config, (inputs, embed), (None, "embed"), keys[0])
        self.text_in = Embedder(config, config.text_dim, keys[1], activation=partial(jax.nn.gelu, approximate=True))
        # Its key leaves the keys of a model without images unchanged.
        image_key = jax.random.fold_in(key, 7)
        self.image_in = None if config.image_dim is None else ImageEmbedder(config, image_key)
        self.time = Embedder(config, config.time_features, keys[2])
        self.modulation = make_linear(config, (embed, 6 * embed), ("embed", None), keys[3])
        norm = Norm(epsilon=config.norm_epsilon)
        self.blocks = Block(config, Build(embed, config.layers, std, std, norm, config.param_dtype, keys[4]))
        values = embed**-0.5 * jax.random.normal(keys[5], (1, 2, embed), config.param_dtype)
        self.last_table = nnx.Param(values, logical_axes=(None, None, None))
        self.last = make_linear(config, (embed, features), ("embed", None), keys[6], std=0.0)

    def __call__(self, images: Images, timesteps: Float[Array, " batch"], condition: Condition) -> Predicted:
        config, (batch, frames, height, width, _) = self.config, images.shape
        config.check_size(height, width)
        if frames > config.max_positions:
            raise ConfigError(f"Latents of {frames} frames exceed max_positions={config.max_positions}. Take fewer.")
        x = images if not config.extra_channels else jnp.concatenate([images, condition[FIRST_FRAME]], axis=-1)
        # Patches have one frame each, so frames are cut like images: [batch * frames, rows * columns, features].
        cut = patches_of(x.astype(config.dtype).reshape(-1, height, width, x.shape[-1]), config.patch)
        x = self.patches(cut.reshape(batch, -1, cut.shape[-1]))
        text = self.text_in(condition["text"].astype(config.dtype))
        image = None if self.image_in is None else self.image_in(condition[IMAGE_FEATURES].astype(config.dtype))
        time = self.time(waves(timesteps, config.time_features, last=0).astype(config.dtype))
        modulation = self.modulation(jax.nn.silu(time)).reshape(batch, 6, config.embed)
        places = _places(batch, frames, height // config.patch, width // config.patch)

        def run(block: Block, x: Tokens, per_row: Any, _: None) -> tuple[Tokens, None]:
            text, image, modulation, places = per_row
            return block(x, text, image, modulation, partial(rotated, places=places, axes=config.rope_axes)), None

        per_row, options = (text, image, modulation, places), {"remat": config.remat, "unroll": config.unroll}
        x, _ = scan_layers(run, [self.blocks], x, [None], per_row=per_row, moves=True, **options)
        shift, scale = (self.last_table[...].astype(time.dtype) + time[:, None]).swapaxes(0, 1)
        x = self.last(modulated(x, shift, scale, epsilon=config.norm_epsilon))
        x = x.reshape(batch * frames, -1, x.shape[-1])
        predicted = unpatched(x, config.patch, height, width, channels_last=True)
        return predicted.reshape(images.shape).astype(jnp.float32)

    def on_batch(self, batch: Mapping[str, jax.Array]) -> Predicted:
        """See `RunsOnBatches`."""
        return predicted_halfway(self, batch)

    def unconditional(self, condition: Condition) -> Condition:
        """See `unconditional`; guidance changes the text only."""
        return unconditional(condition, shared=(FIRST_FRAME, IMAGE_FEATURES))


def _places(batch: int, frames: int, rows: int, columns: int) -> Int[Array, "batch seq axes"]:
    """Returns frame, row and column of each patch."""
    grid = jnp.stack(jnp.meshgrid(*map(jnp.arange, (frames, rows, columns)), indexing="ij"), axis=-1)
    return jnp.broadcast_to(grid.reshape(-1, 3), (batch, frames * rows * columns, 3))


class WanFamily:
    """The `ModelFamily` of Wan."""

    name = "wan"
    config_class = WanConfig

    def build(self, config: WanConfig, *, key: jax.Array) -> Wan:
        return Wan(config, key=key)


FAMILY = WanFamily()

_BLOCK = "blocks.{layer}."
_IMAGE_ATTENTION = {"image_key": "add_k_proj", "image_value": "add_v_proj", "image_key_norm": "norm_added_k.weight"}
_IMAGE_NAMES = {"enter_norm": "norm1", "enter": "ff.net.0.proj", "leave": "ff.net.2", "leave_norm": "norm2"}


def _read_patches(reader: Reader) -> dict[str, Any]:
    frames, *sides = reader.get("patch_size", default=[1, 2, 2])
    if frames != 1 or len(set(sides)) != 1:
        reader.problems.append(f"patch_size={[frames, *sides]}, not of one frame and square")
    inputs = reader.get("in_channels", default=16)
    channels = reader.get("out_channels", default=16) or inputs
    if channels > inputs:
        reader.problems.append(f"out_channels={channels}, more than in_channels, {inputs}")
    if (given := reader.get("pos_embed_seq_len")) is not None:
        reader.problems.append(f"pos_embed_seq_len={given!r}, for a first and a last frame, not None")
    # Layers read the projected image, which is as wide as the stream.
    embed = reader.get("num_attention_heads", default=40) * reader.get("attention_head_dim", default=128)
    expected = None if reader.get("image_dim") is None else embed
    if (added := reader.get("added_kv_proj_dim")) != expected:
        reader.problems.append(f"added_kv_proj_dim={added!r}, not {expected!r}")
    # Files lack the sizes of videos.
    patches = reader.get("rope_max_seq_len", default=1024)
    sizes = {"patch": sides[0], "image_size": sides[0] * min(30, patches), "frames": min(21, patches)}
    return {"channels": channels, "extra_channels": max(inputs - channels, 0), **sizes}


COMPONENT = Component(
    class_name="WanTransformer3DModel",
    family=FAMILY,
    settings=(
        Setting("image_dim", ("image_dim",), None),
        Setting("layers", ("num_layers",), 40),
        Setting("heads", ("num_attention_heads",), 40),
        Setting("head_dim", ("attention_head_dim",), 128),
        Setting("mlp", ("ffn_dim",), 13_824),
        Setting("text_dim", ("text_dim",), 4096),
        Setting("time_features", ("freq_dim",), 256),
        Setting("cross_norm", ("cross_attn_norm",), True),
        Setting("max_positions", ("rope_max_seq_len",), 1024),
        Setting("norm_epsilon", ("eps",), 1e-6),
    ),
    fixed={"qk_norm": "rms_norm_across_heads"},
    read_others=_read_patches,
    write_others=lambda config: {
        "patch_size": [1, config.patch, config.patch],
        "in_channels": config.channels + config.extra_channels,
        "out_channels": config.channels,
        "added_kv_proj_dim": None if config.image_dim is None else config.embed,
        "pos_embed_seq_len": None,
    },
    names={
        "patches": "patch_embedding",
        **embedder_names({"time": "time_embedder", "text_in": "text_embedder"}, "condition_embedder"),
        "modulation": "condition_embedder.time_proj",
        "blocks/table": _BLOCK + "scale_shift_table",
        **{f"blocks/attention/{ours}": f"{_BLOCK}attn1.{theirs}" for ours, theirs in ATTENTION_NAMES.items()},
        **{
            f"blocks/cross_attention/{ours}": f"{_BLOCK}attn2.{theirs}"
            for ours, theirs in (ATTENTION_NAMES | _IMAGE_ATTENTION).items()
        },
        **{f"image_in/{ours}": f"condition_embedder.image_embedder.{theirs}" for ours, theirs in _IMAGE_NAMES.items()},
        "blocks/cross_scale": _BLOCK + "norm2.weight",
        "blocks/cross_offset": _BLOCK + "norm2.bias",
        "blocks/up": _BLOCK + "ffn.net.0.proj",
        "blocks/down": _BLOCK + "ffn.net.2",
        "last_table": "scale_shift_table",
        "last": "proj_out",
    },
    squares=lambda config: {
        "patches": (config.channels + config.extra_channels, 1, config.patch, config.patch),
    },
    # Published models of image to video have this norm of queries, which attention does not use.
    redundant=(_BLOCK + "attn2.norm_added_q.weight",),
)
