"""Classes of text-to-image and text-to-video pipelines in diffusers: their parts, and the denoiser's condition."""

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp

from stack_core.abi.errors import ConversionError
from stack_train.diffusion import (
    autoencoder_kl,
    autoencoder_kl_ltx,
    autoencoder_kl_wan,
    clip,
    clip_vision,
    flux,
    ltx,
    sd3,
    t5,
    unet,
    wan,
)
from stack_train.diffusion.components import Component
from stack_train.diffusion.denoiser import Condition
from stack_train.diffusion.samplers import SamplerConfig

__all__ = ["BOUNDARY", "IMAGE_ENCODER", "PIPELINES", "SECOND", "VAE", "PipelineClass", "tokenizer_folder"]

VAE = "vae"
"""Folder of the autoencoder."""

IMAGE_ENCODER = "image_encoder"
"""Folder of the image encoder."""

SECOND, BOUNDARY = "transformer_2", "boundary_ratio"
"""Folder of the denoiser of low noise, and the fraction of the timesteps below which it acts."""

_CLIP_TOKENIZER, _T5_TOKENIZER = "CLIPTokenizer", "T5TokenizerFast"
_UNREAD = (None, None)


@dataclass(frozen=True, kw_only=True)
class PipelineClass:
    """A class of pipelines in diffusers.

    Attributes:
      name: the class, the `_class_name` of its index.
      tasks: classes with the same parts for other tasks.
      denoiser: component of the denoiser.
      folder: folder of the denoiser.
      text: component and tokenizer class of each text encoder, by folder; the tokenizers' folders are named alike.
      optional: text encoders that a directory may lack, which are null in its index.
      condition: builds the condition from the encoders' outputs; see `_sd3_condition` for optional ones.
      t5_tokens: default number of tokens of T5.
      joins_tokens: True if the tokens of CLIP and T5 are one text, in this order.
      sampler: default sampler of models that were not read with a scheduler.
      flows: True for denoisers trained by flow matching.
      guidance: default guidance of diffusers.
      index: additional entries of its index.
      vae: component of the autoencoder.
      clean: rewrites prompts before they are tokenized.
      video_size: default height, width and frames in diffusers; None for images.
      begins_with_image: True for videos that begin with an image.
      may_begin_with_image: True for videos that begin with an image if one is given.
      counts_tokens: the denoiser reads the number of tokens of a text, without padding.
      image_encoder: component of the image encoder; None without.
      refused: entries of its index that change the function and are not supported.
    """

    name: str
    tasks: tuple[str, ...] = ()
    denoiser: Component
    folder: str
    text: Mapping[str, tuple[Component, str]]
    optional: tuple[str, ...] = ()
    condition: Callable[..., Condition]
    t5_tokens: int = 512
    joins_tokens: bool = False
    sampler: SamplerConfig
    flows: bool = False
    guidance: float = 1.0
    index: Mapping[str, Any] = field(default_factory=dict)
    vae: Component = autoencoder_kl.COMPONENT
    clean: Callable[[str], str] = str
    video_size: tuple[int, int, int] | None = None
    begins_with_image: bool = False
    may_begin_with_image: bool = False
    counts_tokens: bool = False
    image_encoder: Component | None = None
    refused: tuple[str, ...] = ()

    @property
    def lacks_encoder(self) -> bool:
        """True if the directory lacks an optional text encoder."""
        return not set(self.optional) <= self.text.keys()

    def without(self, encoder: str) -> "PipelineClass":
        """Returns the class of a directory without an optional text encoder."""
        text = {folder: part for folder, part in self.text.items() if folder != encoder}
        index = {encoder: _UNREAD, tokenizer_folder(encoder): _UNREAD}
        return replace(self, text=text, index={**self.index, **index})

    def without_image_encoder(self) -> "PipelineClass":
        """Returns the class of a directory whose denoiser reads an image's latents only, as in Wan 2.2."""
        index = {IMAGE_ENCODER: _UNREAD, clip_vision.IMAGE_PROCESSOR: _UNREAD}
        return replace(self, image_encoder=None, index={**self.index, **index})

    def encoder_folders(self) -> tuple[str, ...]:
        image = () if self.image_encoder is None else (IMAGE_ENCODER, clip_vision.IMAGE_PROCESSOR)
        return (*self.text, *map(tokenizer_folder, self.text), *image, VAE)


def tokenizer_folder(encoder: str) -> str:
    """Returns the folder of a text encoder's tokenizer."""
    return encoder.replace("text_encoder", "tokenizer")


def _flux_condition(outputs: Sequence[Any]) -> Condition:
    return {"text": outputs[1], "pooled": outputs[0].pooled}


def _text_condition(outputs: Sequence[Any]) -> Condition:
    return {"text": outputs[0]}


def _sd_condition(outputs: Sequence[Any]) -> Condition:
    return {"text": outputs[0].hidden}


def _xl_condition(outputs: Sequence[Any]) -> Condition:
    text = jnp.concatenate([each.penultimate for each in outputs], axis=-1)
    return {"text": text, "pooled": outputs[1].pooled}


def _sd3_condition(outputs: Sequence[Any], *, zeros: tuple[int, int] | None = None) -> Condition:
    """Joins the tokens of CLIP, padded to the width of T5, and the tokens of T5.

    Args:
      zeros: tokens and width of the zeros in place of an absent T5.
    """
    text = jnp.concatenate([each.penultimate for each in outputs[:2]], axis=-1)
    pooled = jnp.concatenate([each.pooled for each in outputs[:2]], axis=-1)
    others = outputs[2] if zeros is None else jnp.zeros((len(text), *zeros), text.dtype)
    if (width := text.shape[-1]) > others.shape[-1]:
        raise ConversionError(
            f"Both CLIPs give {width} features, more than T5 or the denoiser's joint_attention_dim, "
            f"{others.shape[-1]}. Take the encoders that the denoiser was trained with."
        )
    text = jnp.pad(text, ((0, 0), (0, 0), (0, others.shape[-1] - text.shape[-1])))
    return {"text": jnp.concatenate([text, others], axis=1), "pooled": pooled}


def _wan_clean(prompt: str) -> str:
    """Replaces HTML entities, also of entities, and joins whitespace."""
    return " ".join(html.unescape(html.unescape(prompt)).split())


_CLIP = (clip.COMPONENT, _CLIP_TOKENIZER)
_PROJECTED = (clip.PROJECTED, _CLIP_TOKENIZER)
# `steps_offset` and the last level match the schedulers of the published directories.
_LEADING: Mapping[str, Any] = {"spacing": "leading", "steps_offset": 1}

_WAN = PipelineClass(
    name="WanPipeline",
    denoiser=wan.COMPONENT,
    folder="transformer",
    text={"text_encoder": (t5.UMT5, _T5_TOKENIZER)},
    condition=_text_condition,
    sampler=SamplerConfig(spacing="linspace"),
    flows=True,
    guidance=5.0,
    index={SECOND: _UNREAD, BOUNDARY: None, "expand_timesteps": False},
    vae=autoencoder_kl_wan.COMPONENT,
    clean=_wan_clean,
    video_size=(480, 832, 81),
    refused=("expand_timesteps",),  # of Wan 2.2 TI2V 5B
)

PIPELINES = (
    PipelineClass(
        name="FluxPipeline",
        tasks=("FluxImg2ImgPipeline", "FluxInpaintPipeline"),
        denoiser=flux.COMPONENT,
        folder="transformer",
        text={"text_encoder": _CLIP, "text_encoder_2": (t5.COMPONENT, _T5_TOKENIZER)},
        condition=_flux_condition,
        sampler=SamplerConfig(),
        flows=True,
    ),
    PipelineClass(
        name="StableDiffusion3Pipeline",
        tasks=("StableDiffusion3Img2ImgPipeline", "StableDiffusion3InpaintPipeline"),
        denoiser=sd3.COMPONENT,
        folder="transformer",
        text={
            "text_encoder": _PROJECTED,
            "text_encoder_2": _PROJECTED,
            "text_encoder_3": (t5.COMPONENT, _T5_TOKENIZER),
        },
        optional=("text_encoder_3",),
        condition=_sd3_condition,
        t5_tokens=256,
        joins_tokens=True,
        sampler=SamplerConfig(spacing="linspace"),
        flows=True,
        guidance=7.0,
        index={"image_encoder": _UNREAD, "feature_extractor": _UNREAD},
    ),
    PipelineClass(
        name="StableDiffusionPipeline",
        tasks=("StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline"),
        denoiser=unet.COMPONENT,
        folder="unet",
        text={"text_encoder": _CLIP},
        condition=_sd_condition,
        sampler=SamplerConfig(name="plms", final="min", **_LEADING),
        guidance=7.5,
        index={"safety_checker": _UNREAD, "feature_extractor": _UNREAD, "requires_safety_checker": False},
    ),
    PipelineClass(
        name="StableDiffusionXLPipeline",
        tasks=("StableDiffusionXLImg2ImgPipeline", "StableDiffusionXLInpaintPipeline"),
        denoiser=unet.COMPONENT,
        folder="unet",
        text={"text_encoder": _CLIP, "text_encoder_2": _PROJECTED},
        condition=_xl_condition,
        sampler=SamplerConfig(name="euler", **_LEADING),
        guidance=5.0,
    ),
    _WAN,
    replace(_WAN, name="WanImageToVideoPipeline", begins_with_image=True, image_encoder=clip_vision.COMPONENT),
    PipelineClass(
        name="LTXPipeline",
        tasks=("LTXImageToVideoPipeline",),
        denoiser=ltx.COMPONENT,
        folder="transformer",
        text={"text_encoder": (t5.COMPONENT, _T5_TOKENIZER)},
        condition=_text_condition,
        t5_tokens=128,
        sampler=SamplerConfig(),
        flows=True,
        guidance=3.0,
        vae=autoencoder_kl_ltx.COMPONENT,
        video_size=(512, 704, 161),
        may_begin_with_image=True,
        counts_tokens=True,
    ),
)
