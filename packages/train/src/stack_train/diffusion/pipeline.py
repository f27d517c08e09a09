"""A diffusers directory of a model of texts to images or videos: its parts, read, checked and written."""

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from stack_core.abi.errors import ConversionError
from stack_core.runtime.atomic_directory import atomic_directory
from stack_train.diffusion import clip_vision, flux, ltx, sd3, t5, unet, wan
from stack_train.diffusion.clip_vision import (
    IMAGE_PROCESSOR,
    ImageEncoder,
    open_image_encoder,
    write_image_processor,
)
from stack_train.diffusion.components import load_component, open_component, save_component
from stack_train.diffusion.denoiser import Images, VideosConfig
from stack_train.diffusion.flux_gguf import load_denoiser
from stack_train.diffusion.pipeline_classes import (
    BOUNDARY,
    IMAGE_ENCODER,
    PIPELINES,
    SECOND,
    VAE,
    PipelineClass,
    tokenizer_folder,
)
from stack_train.diffusion.prompts import PromptTokenizer, TextEncoder, TextEncoders, load_prompt_tokenizer
from stack_train.diffusion.samplers import SamplerConfig
from stack_train.diffusion.scheduler import Objective, Scheduler, read_scheduler, scheduler_class, write_scheduler
from stack_train.diffusion.tiles import decode_in_tiles
from stack_train.diffusion.two_denoisers import TwoDenoisers

__all__ = [
    "INDEX",
    "Encoders",
    "Pipeline",
    "encoder_files",
    "open_encoders",
    "open_pipeline",
    "save_encoders",
    "save_pipeline",
]

INDEX = "model_index.json"
"""The file that makes a folder a diffusers directory."""

_T5_DIM = 4096
_CLASSES = {name: each for each in PIPELINES for name in (each.name, *each.tasks)}
_TOKENIZER_CONFIG, _MOST_TOKENS = "tokenizer_config.json", "model_max_length"
_NULLS = (None, False, [None, None])
_ZERO_UNCONDITIONAL = "force_zeros_for_empty_prompt"


@dataclass(frozen=True)
class Encoders:
    """The encoders and the autoencoder of a denoiser: prompts to conditions, images to latents and back.

    Attributes:
      directory: source of the encoders.
      pipeline: class of the directory.
      image: encoder of the first frame of videos; None without.
      tile_pixels: side of the tiles in which larger images are decoded; None decodes images at once.
    """

    directory: Path
    autoencoder: Any
    text: TextEncoders
    pipeline: PipelineClass
    image: ImageEncoder | None = None
    tile_pixels: int | None = None

    def encode(self, images: Images) -> jax.Array:
        """Returns the scaled latents of images or videos in [-1, 1]."""
        return self._coders[0](nnx.state(self.autoencoder), images)

    def decode(self, latents: Images) -> jax.Array | np.ndarray:
        """Returns the images or videos of scaled latents."""
        decode, factor = partial(self._coders[1], nnx.state(self.autoencoder)), self.autoencoder.config.downsampling
        if self.tile_pixels is None or max(latents.shape[1:3]) * factor <= self.tile_pixels:
            return decode(latents)
        return decode_in_tiles(decode, latents, tile_pixels=self.tile_pixels, factor=factor)

    @cached_property
    def _coders(self) -> tuple[Any, Any]:
        # Compiled once for each shape. The parameters are an argument of the programs instead of constants.
        graph = nnx.graphdef(self.autoencoder)
        encode = jax.jit(lambda state, images: nnx.merge(graph, state).scaled_latents(images))
        return encode, jax.jit(lambda state, latents: nnx.merge(graph, state).images_of(latents))

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the latents of images or videos that have the sizes in the autoencoder's config, by field."""
        autoencoder = self.autoencoder.config
        sizes = {"image_size": autoencoder.image_size // autoencoder.downsampling}
        if isinstance(autoencoder, VideosConfig):
            sizes["frames"] = self.autoencoder.config.latent_frames(autoencoder.frames)
        return sizes | self._units

    @property
    def _units(self) -> dict[str, int]:
        """Pixels and frames of a latent, for denoisers whose positions are pixels and seconds."""
        if self.pipeline.denoiser is not ltx.COMPONENT:
            return {}
        autoencoder = self.autoencoder.config
        return {"pixels_per_latent": autoencoder.downsampling, "frames_per_latent": autoencoder.frames_per_latent}

    def check(self, model: Any) -> None:
        """Compares with the config of a denoiser.

        Raises:
          ConversionError: the denoiser is of another family, or latents or conditions have other sizes; names each.
        """
        family = self.pipeline.denoiser.family.name
        if model.name != family:
            raise ConversionError(
                f"{self.directory} has the encoders of a {self.pipeline.name}, whose denoiser is of family {family}, "
                f"not {model.name}. Take other encoders, or model.name={family}."
            )
        autoencoder = self.autoencoder.config
        parts: dict[str, Mapping[str, int | None]] = {
            f"{VAE} gives": {"channels": autoencoder.latent_channels, **self._units},
            f"{' + '.join(self.text.encoders)} gives": self.text.sizes(),
        }
        if self.pipeline.denoiser is wan.COMPONENT:
            # The mask and the latents of the first frame.
            extra = autoencoder.frames_per_latent + autoencoder.latent_channels
            reads = self.pipeline.begins_with_image
            parts[f"a {self.pipeline.name} needs"] = {"extra_channels": extra if reads else 0}
            parts[f"{IMAGE_ENCODER} gives"] = {"image_dim": None} if self.image is None else self.image.sizes()
        wrong = [
            f"{name} is {getattr(model, name)}, and {part} {size}"
            for part, sizes in parts.items()
            for name, size in sizes.items()
            if getattr(model, name) != size
        ]
        if wrong:
            raise ConversionError(
                f"The denoiser does not fit the encoders in {self.directory}: its {'; its '.join(wrong)}. Take the "
                "encoders that it was trained with."
            )


@dataclass(frozen=True)
class Pipeline:
    """A model of texts to images or videos: denoiser, encoders, the objective with its noise schedule, and sampler."""

    config: Any
    model: Any
    encoders: Encoders
    objective: Objective
    sampler: SamplerConfig


def open_encoders(directory: Path, *, text_tokens: int | None = None, text_dim: int | None = None) -> Encoders:
    """Reads the autoencoder and the tokenizers of a diffusers directory, and checks its text encoders.

    The tensors of the text encoders are read when the first prompt is encoded.

    Args:
      text_tokens: number of tokens of a text. By default T5 has 512, or 256 in Stable Diffusion 3, and at most its
        tokenizer's `model_max_length`. CLIP has a fixed number; in Stable Diffusion 3 its tokens precede those of T5.
      text_dim: width of the zeros in place of an absent T5, by default the width of T5 XXL.

    Raises:
      ConversionError: the directory has another format, or a component, named in the error, is missing or unsupported.
    """
    pipeline, _ = _read_index(directory)
    parts = pipeline.encoder_folders()
    if missing := [part for part in parts if not (directory / part).is_dir()]:
        raise ConversionError(
            f"{directory} lacks {', '.join(missing)}. A {pipeline.name} needs {', '.join(parts)}; download the whole "
            "directory."
        )
    _, autoencoder = load_component(pipeline.vae, directory / VAE)
    encoders: dict[str, TextEncoder] = {}
    for folder, (component, _) in pipeline.text.items():
        stored = open_component(component, directory / folder)
        config = stored.config
        part = directory / tokenizer_folder(folder)
        if component.family is t5.FAMILY:
            tokens = _count_t5_tokens(pipeline, encoders, text_tokens, part)
        else:
            tokens = config.max_positions
        tokenizer = load_prompt_tokenizer(part, folder, tokens)
        _check_vocabulary(tokenizer, config.vocab_size)
        encoders[folder] = TextEncoder(stored, tokenizer)
    condition = pipeline.condition
    if pipeline.lacks_encoder:
        condition = partial(condition, zeros=(pipeline.t5_tokens, text_dim or _T5_DIM))
    image = None
    if pipeline.image_encoder is not None:
        image = open_image_encoder(directory / IMAGE_ENCODER, directory / IMAGE_PROCESSOR)
    text = TextEncoders(encoders, condition, pipeline.clean, pipeline.counts_tokens)
    return Encoders(directory, autoencoder, text, pipeline, image)


def _count_t5_tokens(
    pipeline: PipelineClass, encoders: Mapping[str, TextEncoder], text_tokens: int | None, tokenizer: Path
) -> int:
    """Returns the number of tokens of T5 in texts of `text_tokens` after the tokens of `encoders`."""
    if text_tokens is None:
        return min(pipeline.t5_tokens, _max_tokens(tokenizer))
    before = encoders["text_encoder"].tokenizer.tokens if pipeline.joins_tokens else 0
    if text_tokens <= before:
        raise ConversionError(
            f"text_tokens={text_tokens} leave none for T5, whose tokens follow the {before} of CLIP. Take more."
        )
    return text_tokens - before


def _check_vocabulary(tokenizer: PromptTokenizer, vocab_size: int) -> None:
    if (tokens := tokenizer.tokenizer.vocab_size) > vocab_size:
        raise ConversionError(
            f"The tokenizer of {tokenizer.name} has {tokens} tokens, and {tokenizer.name} knows {vocab_size}. Take the "
            "tokenizer that it was trained with."
        )


def open_pipeline(directory: Path, *, text_tokens: int | None = None, denoiser: str | None = None) -> Pipeline:
    """Reads a diffusers directory whose class is in `PIPELINES`.

    Args:
      text_tokens: see `open_encoders`; by default, a Flux without guidance has 256.
      denoiser: gguf:FILE with the weights of a Flux, which then has the dtype of the directory's autoencoder; None
        reads the directory's weights.

    Raises:
      ConversionError: a component is missing, unsupported, or does not fit the rest.
    """
    pipeline, index = _read_index(directory)
    boundary = _read_boundary(directory, index) if SECOND in pipeline.index else None
    if denoiser is None:
        config, model = _load_denoiser(pipeline, directory / pipeline.folder)
    else:
        dtype = open_component(pipeline.vae, directory / VAE).config.dtype
        config, model = load_denoiser(pipeline.denoiser, directory / pipeline.folder, denoiser, dtype)
    denoisers = [model] if boundary is None else [model, _load_second(pipeline, directory, config)]
    if pipeline.denoiser is flux.COMPONENT:
        # Defaults of diffusers' pipelines for FLUX.1 dev and schnell.
        most = pipeline.t5_tokens if config.guidance is not None else pipeline.t5_tokens // 2
        text_tokens = text_tokens or min(most, _max_tokens(directory / tokenizer_folder("text_encoder_2")))
    encoders = open_encoders(directory, text_tokens=text_tokens, text_dim=config.text_dim)
    config = replace(config, text_tokens=encoders.text.sizes()["text_tokens"])
    if encoders.image is not None:
        config = replace(config, image_tokens=encoders.image.config.tokens)
    if pipeline.denoiser is not sd3.COMPONENT:  # its default size is in the file of the denoiser, as in diffusers
        config = replace(config, **encoders.sizes)
    if pipeline.denoiser is unet.COMPONENT:
        # diffusers defaults to True. Only Stable Diffusion XL has this setting.
        zero = index.get(_ZERO_UNCONDITIONAL, True) if config.pooled_dim else False
        config = replace(config, zero_unconditional=zero)
    encoders.check(config)
    for each in denoisers:
        # The model reads sizes from its config, and the file of the denoiser lacks these.
        each.config = config
        each.eval()
    scheduler = read_scheduler(directory / "scheduler")
    # A student of consistency distillation has learned the guidance.
    guidance = 1.0 if scheduler.sampler.name == "lcm" else pipeline.guidance
    sampler = replace(scheduler.sampler, guidance=guidance)
    if pipeline.flows and sampler.name != "unipc":  # the spacing is a property of diffusers' pipeline
        sampler = replace(sampler, spacing=pipeline.sampler.spacing)
    model = model if boundary is None else TwoDenoisers(*denoisers, boundary=boundary)
    return Pipeline(config, model, encoders, scheduler.objective, sampler)


def _load_denoiser(pipeline: PipelineClass, directory: Path) -> tuple[Any, Any]:
    if not directory.is_dir():
        raise ConversionError(f"{directory.parent} lacks {directory.name}, the denoiser. Download the whole directory.")
    return load_component(pipeline.denoiser, directory)


def _load_second(pipeline: PipelineClass, directory: Path, config: Any) -> Any:
    """Returns the denoiser of low noise, whose config must be the config of the first one."""
    second, model = _load_denoiser(pipeline, directory / SECOND)
    names = [each.name for each in fields(config) if getattr(second, each.name) != getattr(config, each.name)]
    if names:
        listed = "; ".join(f"{name} is {getattr(second, name)}, not {getattr(config, name)}" for name in names)
        raise ConversionError(
            f"{SECOND} in {directory} differs from {pipeline.folder}: its {listed}. Both denoisers must have one size."
        )
    return model


def _read_boundary(directory: Path, index: Mapping[str, Any]) -> float | None:
    """Returns the fraction of the timesteps below which the second denoiser acts; None for a single denoiser."""
    boundary, has_second = index.get(BOUNDARY), index.get(SECOND) not in _NULLS
    if (boundary is not None) != has_second:
        raise ConversionError(
            f"{directory / INDEX} sets {BOUNDARY}={boundary!r} and {SECOND}={index.get(SECOND)!r}. Set both or neither."
        )
    if boundary is not None and not (isinstance(boundary, (int, float)) and 0.0 < boundary < 1.0):
        raise ConversionError(f"{directory / INDEX} sets {BOUNDARY}={boundary!r}; set it to a number between 0 and 1.")
    return boundary


def _max_tokens(directory: Path) -> int:
    """Returns the number of tokens that a tokenizer's settings allow; unlimited without such a setting."""
    path = directory / _TOKENIZER_CONFIG
    # transformers writes a huge number for tokenizers without a limit.
    return int(_mapping(path).get(_MOST_TOKENS) or sys.maxsize)


def _write_max_tokens(directory: Path, tokens: int) -> None:
    """Records the number of text tokens: the denoiser attends to padding, so another number changes its condition."""
    path = directory / _TOKENIZER_CONFIG
    _write_json(path, {**_mapping(path), _MOST_TOKENS: tokens})


def _mapping(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise ConversionError(f"{path} cannot be read: {error}. Download the directory again.") from error


def _read_index(directory: Path) -> tuple[PipelineClass, Mapping[str, Any]]:
    path = directory / INDEX
    try:
        index = json.loads(path.read_bytes())
        name = index["_class_name"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConversionError(
            f"{path} cannot be read: {type(error).__name__}: {error}. A diffusers directory has one, which names its "
            "_class_name."
        ) from error
    if name not in _CLASSES:
        raise ConversionError(f"{directory} is a {name}; {', '.join(_CLASSES)} are read.")
    pipeline = _CLASSES[name]
    for encoder in pipeline.optional:
        if encoder in index and index[encoder] in (None, [None, None]):
            pipeline = pipeline.without(encoder)
    if pipeline.image_encoder is not None and IMAGE_ENCODER in index and index[IMAGE_ENCODER] in _NULLS:
        pipeline = pipeline.without_image_encoder()
    present = [key for key in pipeline.refused if index.get(key) not in _NULLS]
    if present:
        raise ConversionError(
            f"{path} sets {', '.join(f'{key}={index[key]!r}' for key in present)}, which the {name} here does not "
            "support. Take another model, such as Wan 2.1 or Wan 2.2 A14B."
        )
    return pipeline, index


def encoder_files(directory: Path) -> Iterator[tuple[str, Path]]:
    """Lists the files of a directory's encoders by relative path."""
    for part in _read_index(directory)[0].encoder_folders():
        for path in sorted((directory / part).glob("*")):
            yield f"{part}/{path.name}", path


def save_encoders(directory: Path, encoders: Encoders) -> None:
    """Writes the encoders for training a denoiser to a diffusers directory, atomically.

    Raises:
      ConversionError: `directory` exists.
    """
    with atomic_directory(directory) as partial:
        _write_encoders(partial, encoders)
        _write_index(partial, encoders.pipeline, {})


def save_pipeline(directory: Path, pipeline: Pipeline) -> None:
    """Writes a complete diffusers directory atomically.

    Raises:
      ConversionError: `directory` exists, or the denoiser does not fit the encoders.
    """
    encoders, config = pipeline.encoders, pipeline.config
    encoders.check(config)
    scheduler = Scheduler(pipeline.objective, pipeline.sampler)
    kind = encoders.pipeline
    entries: dict[str, Any] = {"scheduler": ("diffusers", scheduler_class(scheduler))}
    entries[kind.folder] = ("diffusers", kind.denoiser.class_name)
    models = {kind.folder: pipeline.model}
    if isinstance(pipeline.model, TwoDenoisers):
        models = {kind.folder: pipeline.model.high, SECOND: pipeline.model.low}
        entries |= {SECOND: ("diffusers", kind.denoiser.class_name), BOUNDARY: pipeline.model.boundary}
    if kind.denoiser is unet.COMPONENT and config.pooled_dim:
        entries[_ZERO_UNCONDITIONAL] = config.zero_unconditional
    with atomic_directory(directory) as partial:
        _write_encoders(partial, encoders)
        for folder, model in models.items():
            save_component(kind.denoiser, partial / folder, config, model)
        write_scheduler(partial / "scheduler", scheduler)
        _write_index(partial, kind, entries)


def _write_encoders(directory: Path, encoders: Encoders) -> None:
    autoencoder = encoders.autoencoder
    save_component(encoders.pipeline.vae, directory / VAE, autoencoder.config, autoencoder)
    for folder, (component, _) in encoders.pipeline.text.items():
        encoder, part = encoders.text.encoders[folder], tokenizer_folder(folder)
        save_component(component, directory / folder, encoder.model.config, encoder.model)
        if (encoders.directory / part).is_dir():  # byte for byte
            shutil.copytree(encoders.directory / part, directory / part)
        else:
            encoder.tokenizer.tokenizer.save(directory / part)
        if component.family is t5.FAMILY:
            _write_max_tokens(directory / part, encoder.tokenizer.tokens)
    if encoders.image is not None:
        save_component(clip_vision.COMPONENT, directory / IMAGE_ENCODER, encoders.image.config, encoders.image.model)
        if (encoders.directory / IMAGE_PROCESSOR).is_dir():
            shutil.copytree(encoders.directory / IMAGE_PROCESSOR, directory / IMAGE_PROCESSOR)
        else:
            write_image_processor(directory / IMAGE_PROCESSOR, encoders.image.config)


def _write_index(directory: Path, pipeline: PipelineClass, entries: Mapping[str, Any]) -> None:
    parts: dict[str, Any] = {VAE: ("diffusers", pipeline.vae.class_name)}
    for folder, (component, tokenizer) in pipeline.text.items():
        parts[folder] = ("transformers", component.class_name)
        parts[tokenizer_folder(folder)] = ("transformers", tokenizer)
    if pipeline.image_encoder is not None:
        parts[IMAGE_ENCODER] = ("transformers", pipeline.image_encoder.class_name)
        parts[IMAGE_PROCESSOR] = ("transformers", "CLIPImageProcessor")
    _write_json(directory / INDEX, {"_class_name": pipeline.name, **parts, **pipeline.index, **entries})


def _write_json(path: Path, mapping: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(mapping, indent=2) + "\n", encoding="utf-8")
