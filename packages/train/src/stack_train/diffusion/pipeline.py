"""A diffusers directory of a text-to-image model: its parts, read and checked against each other, and written."""

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stack_core.abi.atomic_directory import atomic_directory
from stack_core.abi.errors import ConversionError
from stack_train.diffusion import autoencoder_kl, clip, flux, t5
from stack_train.diffusion.autoencoder_kl import AutoencoderKl
from stack_train.diffusion.components import Component, load_component, save_component
from stack_train.diffusion.denoiser import Denoiser
from stack_train.diffusion.noise import DynamicShift
from stack_train.diffusion.objectives import FlowMatchingConfig
from stack_train.diffusion.prompts import PromptTokenizer, TextEncoders, load_prompt_tokenizer
from stack_train.diffusion.scheduler import SCHEDULER_CLASS, read_scheduler, write_scheduler

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

_CLASS = "FluxPipeline"
_PARTS: Mapping[str, tuple[str, Component | str]] = {
    "scheduler": ("diffusers", SCHEDULER_CLASS),
    "text_encoder": ("transformers", clip.COMPONENT),
    "text_encoder_2": ("transformers", t5.COMPONENT),
    "tokenizer": ("transformers", "CLIPTokenizer"),
    "tokenizer_2": ("transformers", "T5TokenizerFast"),
    "transformer": ("diffusers", flux.COMPONENT),
    "vae": ("diffusers", autoencoder_kl.COMPONENT),
}
_ENCODERS = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "vae")
_T5_TOKENS = 512
_T5_TOKENIZER, _TOKENIZER_CONFIG, _MOST_TOKENS = "tokenizer_2", "tokenizer_config.json", "model_max_length"


@dataclass(frozen=True)
class Encoders:
    """The encoders of a denoiser: prompts to conditions, and images to latents and back.

    Attributes:
      directory: directory that the encoders were read from.
    """

    directory: Path
    autoencoder: AutoencoderKl
    text: TextEncoders

    @property
    def image_size(self) -> int:
        """Of latents' sides, for images of the size that the autoencoder's config has."""
        return self.autoencoder.config.image_size // self.autoencoder.config.downsampling

    def check(self, model: Any) -> None:
        """Compares with the config of a denoiser.

        Raises:
          ConversionError: latents or conditions have other sizes; names each.
        """
        wrong = [
            f"{name} is {getattr(model, name)}, and {part} gives {size}"
            for name, part, size in (
                ("channels", "vae", self.autoencoder.config.latent_channels),
                ("text_dim", "text_encoder_2", self.text.sizes()["text_dim"]),
                ("pooled_dim", "text_encoder", self.text.sizes()["pooled_dim"]),
            )
            if getattr(model, name) != size
        ]
        if wrong:
            raise ConversionError(
                f"The denoiser does not fit the encoders in {self.directory}: its {'; its '.join(wrong)}. Take the "
                "encoders that it was trained with."
            )


@dataclass(frozen=True)
class Pipeline:
    """A text-to-image model: a denoiser, its encoders, and the objective with its noise schedule."""

    config: Any
    model: Denoiser
    encoders: Encoders
    objective: FlowMatchingConfig


def open_encoders(directory: Path, *, text_tokens: int = _T5_TOKENS) -> Encoders:
    """Reads the autoencoder, the text encoders and their tokenizers of a diffusers directory.

    Args:
      text_tokens: number of tokens for the second text encoder.

    Raises:
      ConversionError: the directory has another format, or a component is missing or unsupported; names it.
    """
    _read_index(directory)
    if missing := [part for part in _ENCODERS if not (directory / part).is_dir()]:
        raise ConversionError(
            f"{directory} lacks {', '.join(missing)}. A text-to-image model needs {', '.join(_ENCODERS)}; download the "
            "whole directory."
        )
    _, autoencoder = load_component(autoencoder_kl.COMPONENT, directory / "vae")
    clip_config, clip_model = load_component(clip.COMPONENT, directory / "text_encoder")
    _, t5_model = load_component(t5.COMPONENT, directory / "text_encoder_2")
    text = TextEncoders(
        clip_model,
        load_prompt_tokenizer(directory / "tokenizer", "text_encoder", clip_config.max_positions),
        t5_model,
        load_prompt_tokenizer(directory / _T5_TOKENIZER, "text_encoder_2", text_tokens),
    )
    for tokenizer, vocab_size in (
        (text.clip_tokenizer, clip_config.vocab_size),
        (text.t5_tokenizer, t5_model.config.vocab_size),
    ):
        _check_vocabulary(tokenizer, vocab_size)
    return Encoders(directory, autoencoder, text)


def _check_vocabulary(tokenizer: PromptTokenizer, vocab_size: int) -> None:
    if (tokens := tokenizer.tokenizer.vocab_size) > vocab_size:
        raise ConversionError(
            f"The tokenizer of {tokenizer.name} has {tokens} tokens, and {tokenizer.name} knows {vocab_size}. Take the "
            "tokenizer that it was trained with."
        )


def open_pipeline(directory: Path, *, text_tokens: int | None = None) -> Pipeline:
    """Reads a diffusers directory of a Flux.

    Args:
      text_tokens: number of tokens for the second text encoder; by default 512, or 256 for a model without guidance,
        and at most its tokenizer's `model_max_length`.

    Raises:
      ConversionError: a component is missing, unsupported, or does not fit the rest.
    """
    _read_index(directory)
    if not (directory / "transformer").is_dir():
        raise ConversionError(f"{directory} lacks transformer, the denoiser. Download the whole directory.")
    config, model = load_component(flux.COMPONENT, directory / "transformer")
    # Defaults of diffusers' pipelines for FLUX.1 dev and schnell.
    most = _T5_TOKENS if config.guidance is not None else _T5_TOKENS // 2
    tokens = text_tokens or min(most, _max_tokens(directory / _T5_TOKENIZER))
    encoders = open_encoders(directory, text_tokens=tokens)
    encoders.check(config)
    config = replace(config, image_size=encoders.image_size, text_tokens=tokens)
    # The model reads sizes from its config, and the file of the transformer lacks these.
    model.config = config
    model.eval()
    return Pipeline(config, model, encoders, read_scheduler(directory / "scheduler"))


def _max_tokens(directory: Path) -> int:
    """The tokens that a tokenizer's settings allow; as many as there are where they do not say."""
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


def _read_index(directory: Path) -> None:
    path = directory / INDEX
    try:
        given = json.loads(path.read_bytes())["_class_name"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConversionError(
            f"{path} cannot be read: {type(error).__name__}: {error}. A diffusers directory has one, which names its "
            "_class_name."
        ) from error
    if given != _CLASS:
        raise ConversionError(f"{directory} is a {given}; text-to-image models of {_CLASS} are read.")


def encoder_files(directory: Path) -> Iterator[tuple[str, Path]]:
    """Lists the files of a directory's encoders by relative path."""
    for part in _ENCODERS:
        for path in sorted((directory / part).glob("*")):
            yield f"{part}/{path.name}", path


def save_encoders(directory: Path, encoders: Encoders) -> None:
    """Writes the encoders for training a denoiser to a diffusers directory, atomically.

    Raises:
      ConversionError: `directory` exists.
    """
    with atomic_directory(directory) as partial:
        _write_encoders(partial, encoders)
        _write_index(partial)


def save_pipeline(directory: Path, config: Any, model: Any, encoders: Encoders, shift: float | DynamicShift) -> None:
    """Writes a complete diffusers directory atomically.

    Raises:
      ConversionError: `directory` exists, or the denoiser does not fit the encoders.
    """
    encoders.check(config)
    with atomic_directory(directory) as partial:
        _write_encoders(partial, encoders)
        _write_max_tokens(partial / _T5_TOKENIZER, encoders.text.t5_tokenizer.tokens)
        save_component(flux.COMPONENT, partial / "transformer", config, model)
        write_scheduler(partial / "scheduler", shift)
        _write_index(partial)


def _write_encoders(directory: Path, encoders: Encoders) -> None:
    text = encoders.text
    autoencoder = encoders.autoencoder
    save_component(autoencoder_kl.COMPONENT, directory / "vae", autoencoder.config, autoencoder)
    save_component(clip.COMPONENT, directory / "text_encoder", text.clip.config, text.clip)
    save_component(t5.COMPONENT, directory / "text_encoder_2", text.t5.config, text.t5)
    for part, tokenizer in (("tokenizer", text.clip_tokenizer), (_T5_TOKENIZER, text.t5_tokenizer)):
        if (encoders.directory / part).is_dir():  # byte for byte
            shutil.copytree(encoders.directory / part, directory / part)
        else:
            tokenizer.tokenizer.save(directory / part)


def _write_index(directory: Path) -> None:
    parts = {
        name: [library, part if isinstance(part, str) else part.class_name]
        for name, (library, part) in _PARTS.items()
        if (directory / name).is_dir()
    }
    _write_json(directory / INDEX, {"_class_name": _CLASS, **parts})


def _write_json(path: Path, mapping: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(mapping, indent=2) + "\n", encoding="utf-8")
