"""`data.name: captioned`: captioned images, encoded into latents and text conditions."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int64, UInt64
from pydantic import PositiveInt

from stack_core.abi.config import config
from stack_core.abi.data import Shapes
from stack_core.abi.errors import ConfigError, DataError
from stack_core.abi.user_cache import user_cache_dir
from stack_train.data.cache import cached, digest_of
from stack_train.data.captions import captions_of
from stack_train.data.files import expand_glob, stat_digest
from stack_train.data.image_batches import ImageBatches, ImageSettings
from stack_train.data.image_files import FileImages, OnUnreadable, read_images
from stack_train.diffusion.denoiser import VideosConfig
from stack_train.diffusion.pipeline import Encoders, encoder_files, open_encoders

__all__ = [
    "ENCODERS",
    "CaptionedData",
    "EncoderIdentity",
    "TextConditioned",
    "drops_to_empty_prompt",
    "encoded_batches",
    "encoded_spec",
]

ENCODERS = "encoders.json"
"""Name of the file in a run's directory that identifies the encoders used in training."""

_FORMAT = 1
_LATENTS, _TEXT, _POOLED, _FACTS = "latents.npy", "text.npy", "pooled.npy", "facts.json"
# The standard deviation of latents should be 1. Values outside of this range indicate a wrong scaling_factor.
_LEAST_STD, _MOST_STD = 0.2, 5.0


@runtime_checkable
class TextConditioned(Protocol):
    """The config of a denoiser of latents with text conditions."""

    image_size: int
    channels: int
    text_dim: int
    pooled_dim: int
    text_tokens: int
    dtype: str


def drops_to_empty_prompt(model: Any) -> bool:
    """Checks whether dropped captions of a denoiser are encoded empty ones, rather than 0."""
    return not getattr(model, "zero_unconditional", True)


@config
class CaptionedData(ImageSettings):
    """Captioned image files for text-to-image models; needs stack-train[images].

    The caption of `cat.png` is in the text file `cat.txt`, or in the folder's `metadata.jsonl`. Images are encoded by
    the autoencoder of a diffusers directory, and captions by its text encoders. Both are encoded once and then
    memory-mapped from the user's cache.

    A batch contains "images", the scaled means of the latents; "text", the text condition; "weights"; and, depending on
    the denoiser, "pooled"; "sizes", the original size, crop and target size of uncropped images; and "negative_text"
    and "negative_pooled", the empty caption, which replaces captions that the objective drops.

    Attributes:
      source: glob of image files; `**` matches any number of folders.
      pipeline: diffusers directory with vae, text_encoder and text_encoder_2; a denoiser in it is not read.
      name: selects this kind of data.
      unreadable: policy for files that are not readable images: "error", or "skip", which lists the files in a warning.
      encoded_at_once: batch size of the encoders, in images or captions.
    """

    source: str
    pipeline: str
    name: Literal["captioned"] = "captioned"
    unreadable: OnUnreadable = "error"
    encoded_at_once: PositiveInt = 16

    @property
    def encoders(self) -> str:
        return self.pipeline

    def spec(self, model: Any) -> Shapes:
        return encoded_spec(self, model)

    def check(self, model: Any) -> None:
        if isinstance(model, VideosConfig):
            raise ConfigError("Data of kind captioned are images; a model of videos trains on kind videos.")
        if not isinstance(model, TextConditioned):
            raise ConfigError(
                f"Data of kind captioned is for denoisers with text conditions, not for family {model.name!r}; use "
                "flux, sd3 or unet. An autoencoder trains on kind images."
            )

    def build(self, *, seed: int, model: Any) -> "CaptionedBatches":
        """Reads and encodes the images and captions that are not in the cache.

        Raises:
          DataError: Pillow is not installed, a file cannot be read, a caption is missing, or the latents do not
            have about unit variance.
          ConversionError: `pipeline` lacks an encoder, or an encoder does not fit the model.
        """

        def read(encoders: Encoders) -> FileImages:
            return read_images(
                expand_glob(self.source, self.name),
                size=model.image_size * encoders.autoencoder.config.downsampling,
                channels=encoders.autoencoder.config.channels,
                unreadable=self.unreadable,
                source=self.source,
            )

        return encoded_batches(self, read, self.encoded_at_once, seed=seed, model=model)


def encoded_spec(settings: ImageSettings, model: Any) -> Shapes:
    """Returns the shapes and dtypes of batches of latents and text conditions."""
    rows, dtype = settings.batch_size, jnp.dtype(model.dtype)
    frames = (model.frames,) if isinstance(model, VideosConfig) else ()
    shapes = {
        "images": jax.ShapeDtypeStruct((rows, *frames, model.image_size, model.image_size, model.channels), np.float32),
        "text": jax.ShapeDtypeStruct((rows, model.text_tokens, model.text_dim), dtype),
        "weights": jax.ShapeDtypeStruct((rows,), np.float32),
    }
    if model.pooled_dim:
        shapes["pooled"] = jax.ShapeDtypeStruct((rows, model.pooled_dim), dtype)
    if getattr(model, "size_features", 0):
        shapes["sizes"] = jax.ShapeDtypeStruct((rows, 6), np.float32)
    if drops_to_empty_prompt(model):
        shapes |= {f"negative_{name}": shapes[name] for name in ("text", "pooled") if name in shapes}
    return shapes


def encoded_batches(
    settings: ImageSettings, read: Callable[[Encoders], FileImages], at_once: int, *, seed: int, model: Any
) -> "CaptionedBatches":
    """Encodes images or videos and their captions with `settings.encoders`; see `CaptionedData.build`.

    Args:
      read: reads the pixels in the size of the encoders.
      at_once: batch size of the encoders, in images or captions.
    """
    directory = Path((settings.encoders or "").removeprefix("hf:")).expanduser()
    encoders = open_encoders(directory, text_tokens=model.text_tokens, text_dim=model.text_dim)
    encoders.check(model)
    images = read(encoders)
    captions = captions_of(images.names)
    identity = EncoderIdentity.of(encoders, model.text_tokens)
    encoded = _encoded(encoders, identity, images.pixels, captions, at_once)
    if drops_to_empty_prompt(model):
        empty = _encoded_texts(encoders, identity, [""], at_once)
        pooled = None if empty.pooled is None else empty.pooled[0]
        encoded = replace(encoded, empty_text=empty.text[0], empty_pooled=pooled)
    if getattr(model, "size_features", 0):
        side = float(images.pixels.shape[1])
        encoded = replace(encoded, sizes=np.array([side, side, 0.0, 0.0, side, side], np.float32))
    names = [f"{name}: {caption!r}" for name, caption in zip(images.names, captions, strict=True)]
    rows = _Rows(encoded, names, jnp.dtype(model.dtype), identity)
    return CaptionedBatches(settings, rows, seed=seed, identity=identity)


@dataclass(frozen=True)
class EncoderIdentity:
    """Identity of the encoders used to train a denoiser.

    Attributes:
      directory: absolute path of the diffusers directory.
      text_tokens: number of tokens per prompt; see `open_encoders`.
      channels: number of channels of the latents.
      scaling_factor, shift_factor: scale and shift of the latents, or of each channel, from the autoencoder's config.
      digest: digest of the names, sizes and modification times of the encoders' files.
    """

    directory: str
    text_tokens: int
    channels: int
    scaling_factor: float | list[float]
    shift_factor: float | list[float]
    digest: str

    @classmethod
    def of(cls, encoders: Encoders, text_tokens: int) -> "EncoderIdentity":
        config, directory = encoders.autoencoder.config, encoders.directory.absolute()
        # Encoders without T5 fill its place by zeros of the denoiser's width.
        sizes = [text_tokens]
        if encoders.pipeline.lacks_encoder:
            sizes.append(encoders.text.sizes()["text_dim"])
        digest = stat_digest(encoder_files(directory), [str(_FORMAT), *map(str, sizes)])
        scaling = config.scaling_factor, config.shift_factor
        return cls(str(directory), text_tokens, config.latent_channels, *scaling, digest)

    def check(self, encoders: Encoders) -> None:
        """Checks that a trained denoiser can be used with these encoders.

        Raises:
          DataError: the latents have another scale, shift or number of channels; the message lists the differences.
        """
        config = encoders.autoencoder.config
        pairs = {
            "channels": (self.channels, config.latent_channels),
            "scaling_factor": (self.scaling_factor, config.scaling_factor),
            "shift_factor": (self.shift_factor, config.shift_factor),
        }
        if wrong := [f"{name} {there}, not {ours}" for name, (ours, there) in pairs.items() if ours != there]:
            raise DataError(
                f"The autoencoder in {encoders.directory} is not the one that the denoiser was trained with: "
                f"{', '.join(wrong)}. Restore the directory, or train again."
            )

    def write(self, directory: Path) -> None:
        path = directory / ENCODERS
        # A resumed run keeps the identity from its start, since its weights were trained on those latents.
        if not path.exists():
            # Renamed when it is complete, because a run may be killed at any moment.
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(vars(self), indent=2) + "\n", encoding="utf-8")
            partial.replace(path)

    @classmethod
    def read(cls, run: Path) -> "EncoderIdentity":
        """Loads the identity of a run's encoders; raises a DataError if the file is missing or malformed."""
        try:
            return cls(**json.loads((run / ENCODERS).read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"{run / ENCODERS} cannot be read: {error}. A run on captioned images has one.") from error


@dataclass(frozen=True)
class _Encoded:
    """Encoded images and captions.

    Attributes:
      latents: scaled means of the latents of images or videos.
      text: embeddings of the distinct captions' tokens.
      pooled: pooled embeddings of the distinct captions.
      caption_of: row of `text` and `pooled` for each image; images with equal captions share a row.
      empty_text: embeddings of the empty caption's tokens.
      empty_pooled: pooled embedding of the empty caption.
      sizes: original size, crop and target size of all images.
    """

    latents: Float[np.ndarray, "images *frames height width channels"]
    text: Float[np.ndarray, "captions tokens text_dim"]
    pooled: Float[np.ndarray, "captions pooled_dim"] | None
    caption_of: Int64[np.ndarray, " images"]
    empty_text: Float[np.ndarray, "tokens text_dim"] | None = None
    empty_pooled: Float[np.ndarray, " pooled_dim"] | None = None
    sizes: Float[np.ndarray, " 6"] | None = None


@dataclass(frozen=True)
class _Rows:
    """Encoded images as `ImageRows`."""

    encoded: _Encoded
    names: Sequence[str]
    dtype: Any
    encoders: EncoderIdentity

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"the images and captions (digest)": digest_of(self.digests().tolist(), list(self.names))} | {
            # The directory may move; `digest` identifies its files.
            f"the encoders' {name}": value
            for name, value in vars(self.encoders).items()
            if name != "directory"
        }

    def digests(self) -> UInt64[np.ndarray, " images"]:
        return np.array([int(digest_of(each.tobytes().hex())[:16], 16) for each in self.encoded.latents], np.uint64)

    def arrays(self, places: Int64[np.ndarray, " rows"]) -> dict[str, np.ndarray]:
        encoded, rows = self.encoded, len(places)
        captions = encoded.caption_of[places]
        found = {
            "images": np.asarray(encoded.latents[places]),
            "text": encoded.text[captions].astype(self.dtype),
        }
        if encoded.pooled is not None:
            found["pooled"] = encoded.pooled[captions].astype(self.dtype)
        if encoded.sizes is not None:
            found["sizes"] = np.broadcast_to(encoded.sizes, (rows, 6))
        for name, empty in (("text", encoded.empty_text), ("pooled", encoded.empty_pooled)):
            if empty is not None:
                found[f"negative_{name}"] = np.broadcast_to(empty, found[name].shape).astype(self.dtype)
        return found


class CaptionedBatches(ImageBatches):
    """Batches of latents and conditions; `write` stores the identity of their encoders."""

    def __init__(self, settings: ImageSettings, images: _Rows, *, seed: int, identity: EncoderIdentity) -> None:
        super().__init__(settings, images, seed=seed)
        self._identity = identity

    def write(self, directory: Path) -> None:
        self._identity.write(directory)


def _encoded(
    encoders: Encoders, identity: EncoderIdentity, pixels: np.ndarray, captions: Sequence[str], at_once: int
) -> _Encoded:
    """Encodes images and captions, or maps earlier results from the cache.

    The scale of the latents is checked before the captions are encoded, which can take much longer.
    """
    # Sorted, because the key of the cache must not depend on the order of the images.
    different = sorted(set(captions))
    folder = user_cache_dir() / "encoded"
    images = cached(
        folder / digest_of(identity.digest, [digest_of(image.tobytes().hex()) for image in pixels]),
        lambda entry: _write_latents(entry, encoders, pixels, at_once),
    )
    latents = np.load(images / _LATENTS, mmap_mode="r")
    _check_scale(latents, identity)
    texts = _encoded_texts(encoders, identity, different, at_once)
    places = {caption: place for place, caption in enumerate(different)}
    return _Encoded(latents, texts.text, texts.pooled, np.array([places[caption] for caption in captions], np.int64))


@dataclass(frozen=True)
class _Texts:
    """Encoded captions; see `_Encoded`."""

    text: Float[np.ndarray, "captions tokens text_dim"]
    pooled: Float[np.ndarray, "captions pooled_dim"] | None


def _encoded_texts(encoders: Encoders, identity: EncoderIdentity, captions: Sequence[str], at_once: int) -> _Texts:
    """Encodes captions, or maps earlier results from the cache."""
    folder = cached(
        user_cache_dir() / "encoded" / digest_of(identity.digest, list(captions)),
        lambda entry: _write_texts(entry, encoders, captions, at_once),
    )
    pooled = folder / _POOLED
    return _Texts(np.load(folder / _TEXT, mmap_mode="r"), np.load(pooled, mmap_mode="r") if pooled.exists() else None)


def _write_latents(folder: Path, encoders: Encoders, pixels: np.ndarray, at_once: int) -> None:
    graph, state = nnx.split(encoders.autoencoder)
    # The parameters are an argument, since XLA would otherwise compile them into the program as constants.
    encode = jax.jit(lambda state, images: nnx.merge(graph, state).scaled_latents(images))

    def latents(rows: np.ndarray) -> Mapping[str, np.ndarray]:
        return {_LATENTS: np.asarray(encode(state, jnp.asarray(rows, jnp.float32) / 127.5 - 1.0))}

    _write_parts(folder, pixels, latents, at_once)


def _write_texts(folder: Path, encoders: Encoders, captions: Sequence[str], at_once: int) -> None:
    def conditions(rows: Sequence[str]) -> Mapping[str, np.ndarray]:
        made = encoders.text(list(rows))
        return {file: np.asarray(made[name]) for name, file in (("text", _TEXT), ("pooled", _POOLED)) if name in made}

    _write_parts(folder, captions, conditions, at_once)


def _write_parts(
    folder: Path, inputs: Sequence[Any] | np.ndarray, make: Callable[[Any], Mapping[str, np.ndarray]], at_once: int
) -> None:
    """Writes the results for all inputs to one memory-mapped array per file, `at_once` rows at a time.

    The last batch is padded to `at_once` rows: the encoders are compiled for a single shape.
    """
    files: dict[str, Any] = {}
    for first in range(0, len(inputs), at_once):
        rows = list(inputs[first : first + at_once])
        made = make(_stacked([*rows, *[rows[-1]] * (at_once - len(rows))]))
        for name, values in made.items():
            if name not in files:
                shape = (len(inputs), *values.shape[1:])
                # `.npy` files cannot hold bfloat16.
                files[name] = np.lib.format.open_memmap(folder / name, mode="w+", dtype=np.float32, shape=shape)
            files[name][first : first + len(rows)] = values[: len(rows)]
    for array in files.values():
        array.flush()


def _stacked(rows: list[Any]) -> Any:
    return rows if isinstance(rows[0], str) else np.stack(rows)


def _check_scale(latents: np.ndarray, identity: EncoderIdentity) -> None:
    # A sample, because the memory-mapped latents may not fit into memory.
    std = float(np.std(latents[:256]))
    if _LEAST_STD <= std <= _MOST_STD:
        return
    if isinstance(scaling := identity.scaling_factor, list):
        remedy = "Set latents_mean and latents_std in vae/config.json to those of the channels of such latents"
    else:
        remedy = f"Set scaling_factor in vae/config.json to {scaling / max(std, 1e-9):.4g}"
    name = "latents_std" if isinstance(scaling, list) else f"scaling_factor {scaling:g}"
    raise DataError(
        f"The autoencoder in {identity.directory} gives these images latents with a standard deviation of {std:.3g} "
        f"after its {name}; denoisers are trained on values near 1. {remedy}."
    )
