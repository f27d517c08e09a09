"""A diffusers directory of a text-to-image model: its parts, read and checked against each other, and written."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from stack_core.abi.errors import ConversionError
from stack_core.runtime.atomic_directory import atomic_directory
from stack_train.diffusion import autoencoder_kl, clip, flux, t5, unet
from stack_train.diffusion.autoencoder_kl import AutoencoderKl
from stack_train.diffusion.components import Component, load_component, save_component
from stack_train.diffusion.denoiser import Condition
from stack_train.diffusion.prompts import PromptTokenizer, TextEncoder, TextEncoders, load_prompt_tokenizer
from stack_train.diffusion.samplers import SamplerConfig
from stack_train.diffusion.scheduler import Objective, Scheduler, read_scheduler, scheduler_class, write_scheduler

__all__ = [
    "INDEX",
    "PIPELINES",
    "Encoders",
    "Pipeline",
    "PipelineClass",
    "encoder_files",
    "open_encoders",
    "open_pipeline",
    "save_encoders",
    "save_pipeline",
]

INDEX = "model_index.json"
"""The file that makes a folder a diffusers directory."""

_T5_TOKENS = 512
_TOKENIZER_CONFIG, _MOST_TOKENS = "tokenizer_config.json", "model_max_length"
_CLIP_TOKENIZER, _T5_TOKENIZER = "CLIPTokenizer", "T5TokenizerFast"
_VAE = "vae"
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
      condition: builds the condition from the encoders' outputs.
      sampler: default sampler of models that were not read with a scheduler.
      flows: True for denoisers trained by flow matching.
      guidance: default guidance of diffusers.
      index: additional entries of its index.
    """

    name: str
    tasks: tuple[str, ...] = ()
    denoiser: Component
    folder: str
    text: Mapping[str, tuple[Component, str]]
    condition: Callable[[Sequence[Any]], Condition]
    sampler: SamplerConfig
    flows: bool = False
    guidance: float = 1.0
    index: Mapping[str, Any] = field(default_factory=dict)

    def encoder_folders(self) -> tuple[str, ...]:
        return (*self.text, *map(tokenizer_folder, self.text), _VAE)


def tokenizer_folder(encoder: str) -> str:
    """Returns the folder of a text encoder's tokenizer."""
    return encoder.replace("text_encoder", "tokenizer")


def _flux_condition(outputs: Sequence[Any]) -> Condition:
    return {"text": outputs[1], "pooled": outputs[0].pooled}


def _sd_condition(outputs: Sequence[Any]) -> Condition:
    return {"text": outputs[0].hidden}


def _xl_condition(outputs: Sequence[Any]) -> Condition:
    text = jnp.concatenate([each.penultimate for each in outputs], axis=-1)
    return {"text": text, "pooled": outputs[1].pooled}


_CLIP = (clip.COMPONENT, _CLIP_TOKENIZER)
# `steps_offset` and the last level match the schedulers of the published directories.
_LEADING: Mapping[str, Any] = {"spacing": "leading", "steps_offset": 1}

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
        text={"text_encoder": _CLIP, "text_encoder_2": (clip.PROJECTED, _CLIP_TOKENIZER)},
        condition=_xl_condition,
        sampler=SamplerConfig(name="euler", **_LEADING),
        guidance=5.0,
    ),
)
_CLASSES = {name: each for each in PIPELINES for name in (each.name, *each.tasks)}
_ZERO_UNCONDITIONAL = "force_zeros_for_empty_prompt"


@dataclass(frozen=True)
class Encoders:
    """The text encoders and the autoencoder of a denoiser: prompts to conditions, images to latents and back.

    Attributes:
      directory: source of the encoders.
      pipeline: class of the directory.
    """

    directory: Path
    autoencoder: AutoencoderKl
    text: TextEncoders
    pipeline: PipelineClass

    @property
    def image_size(self) -> int:
        """Side of the latents of images that have the size in the autoencoder's config."""
        return self.autoencoder.config.image_size // self.autoencoder.config.downsampling

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
        channels = {"channels": self.autoencoder.config.latent_channels}
        wrong = [
            f"{name} is {getattr(model, name)}, and {part} gives {size}"
            for part, sizes in ((_VAE, channels), (" + ".join(self.text.encoders), self.text.sizes()))
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
    """A text-to-image model: a denoiser, its encoders, the objective with its noise schedule, and the sampler."""

    config: Any
    model: Any
    encoders: Encoders
    objective: Objective
    sampler: SamplerConfig


def open_encoders(directory: Path, *, text_tokens: int | None = None) -> Encoders:
    """Reads the autoencoder, the text encoders and their tokenizers of a diffusers directory.

    Args:
      text_tokens: number of tokens for T5, by default 512; CLIP has a fixed number.

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
    _, autoencoder = load_component(autoencoder_kl.COMPONENT, directory / _VAE)
    encoders = {}
    for folder, (component, _) in pipeline.text.items():
        config, model = load_component(component, directory / folder)
        tokens = text_tokens or _T5_TOKENS if component is t5.COMPONENT else config.max_positions
        tokenizer = load_prompt_tokenizer(directory / tokenizer_folder(folder), folder, tokens)
        _check_vocabulary(tokenizer, config.vocab_size)
        encoders[folder] = TextEncoder(model, tokenizer)
    return Encoders(directory, autoencoder, TextEncoders(encoders, pipeline.condition), pipeline)


def _check_vocabulary(tokenizer: PromptTokenizer, vocab_size: int) -> None:
    if (tokens := tokenizer.tokenizer.vocab_size) > vocab_size:
        raise ConversionError(
            f"The tokenizer of {tokenizer.name} has {tokens} tokens, and {tokenizer.name} knows {vocab_size}. Take the "
            "tokenizer that it was trained with."
        )


def open_pipeline(directory: Path, *, text_tokens: int | None = None) -> Pipeline:
    """Reads a diffusers directory whose class is in `PIPELINES`.

    Args:
      text_tokens: number of tokens for T5; by default 512, or 256 for a Flux without guidance, and at most its
        tokenizer's `model_max_length`.

    Raises:
      ConversionError: a component is missing, unsupported, or does not fit the rest.
    """
    pipeline, index = _read_index(directory)
    if not (directory / pipeline.folder).is_dir():
        raise ConversionError(f"{directory} lacks {pipeline.folder}, the denoiser. Download the whole directory.")
    config, model = load_component(pipeline.denoiser, directory / pipeline.folder)
    if pipeline.denoiser is flux.COMPONENT:
        # Defaults of diffusers' pipelines for FLUX.1 dev and schnell.
        most = _T5_TOKENS if config.guidance is not None else _T5_TOKENS // 2
        text_tokens = text_tokens or min(most, _max_tokens(directory / tokenizer_folder("text_encoder_2")))
    encoders = open_encoders(directory, text_tokens=text_tokens)
    tokens = encoders.text.sizes()["text_tokens"]
    config = replace(config, image_size=encoders.image_size, text_tokens=tokens)
    if hasattr(config, "zero_unconditional"):
        # diffusers defaults to True. Only Stable Diffusion XL has this setting.
        zero = index.get(_ZERO_UNCONDITIONAL, True) if config.pooled_dim else False
        config = replace(config, zero_unconditional=zero)
    encoders.check(config)
    # The model reads sizes from its config, and the file of the denoiser lacks these.
    model.config = config
    model.eval()
    scheduler = read_scheduler(directory / "scheduler")
    sampler = replace(scheduler.sampler, guidance=pipeline.guidance)
    return Pipeline(config, model, encoders, scheduler.objective, sampler)


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
        raise ConversionError(f"{directory} is a {name}; text-to-image models of {', '.join(_CLASSES)} are read.")
    return _CLASSES[name], index


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
    if getattr(config, "pooled_dim", 0) and hasattr(config, "zero_unconditional"):
        entries[_ZERO_UNCONDITIONAL] = config.zero_unconditional
    with atomic_directory(directory) as partial:
        _write_encoders(partial, encoders)
        save_component(kind.denoiser, partial / kind.folder, config, pipeline.model)
        write_scheduler(partial / "scheduler", scheduler)
        _write_index(partial, kind, entries)


def _write_encoders(directory: Path, encoders: Encoders) -> None:
    autoencoder = encoders.autoencoder
    save_component(autoencoder_kl.COMPONENT, directory / _VAE, autoencoder.config, autoencoder)
    for folder, (component, _) in encoders.pipeline.text.items():
        encoder, part = encoders.text.encoders[folder], tokenizer_folder(folder)
        save_component(component, directory / folder, encoder.model.config, encoder.model)
        if (encoders.directory / part).is_dir():  # byte for byte
            shutil.copytree(encoders.directory / part, directory / part)
        else:
            encoder.tokenizer.tokenizer.save(directory / part)
        if component is t5.COMPONENT:
            _write_max_tokens(directory / part, encoder.tokenizer.tokens)


def _write_index(directory: Path, pipeline: PipelineClass, entries: Mapping[str, Any]) -> None:
    parts: dict[str, Any] = {_VAE: ("diffusers", autoencoder_kl.COMPONENT.class_name)}
    for folder, (component, tokenizer) in pipeline.text.items():
        parts[folder] = ("transformers", component.class_name)
        parts[tokenizer_folder(folder)] = ("transformers", tokenizer)
    _write_json(directory / INDEX, {"_class_name": pipeline.name, **parts, **pipeline.index, **entries})


def _write_json(path: Path, mapping: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(mapping, indent=2) + "\n", encoding="utf-8")
