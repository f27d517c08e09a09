"""`data.name: captioned`: captioned images, encoded into latents and text conditions."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int64
from pydantic import PositiveInt

from stack_core.abi.config import config
from stack_core.abi.data import Shapes
from stack_core.abi.errors import ConfigError, DataError
from stack_train.data.buckets import BucketsConfig, bucket_sizes, check_buckets
from stack_train.data.captions import CaptionRows, Captions
from stack_train.data.control_images import ControlsConfig, read_controls
from stack_train.data.encoded_images import TEXT_CONDITIONS, EncodedImages, Latents, encode_images, encode_texts
from stack_train.data.files import stat_digest
from stack_train.data.image_batches import ImageBatches, ImageSettings
from stack_train.data.image_files import (
    FileImages,
    ImageSize,
    OnUnreadable,
    crop_offset,
    read_bucketed_images,
    read_images,
)
from stack_train.data.image_settings import CaptionSettings, open_image_source
from stack_train.data.image_source import ImageSource
from stack_train.data.prior_images import PriorConfig, PriorPairs, check_prior, join_prior
from stack_train.data.rows import TrainIterator, iterate_batches, row_order
from stack_train.diffusion.denoiser import LOSS_WEIGHTS, LimitsSize, VideosConfig
from stack_train.diffusion.ltx import TEXT_LENGTHS
from stack_train.diffusion.pipeline import Encoders, encoder_files, open_encoders
from stack_train.diffusion.wan import FIRST_FRAME, IMAGE_FEATURES

__all__ = [
    "ENCODERS",
    "CaptionedData",
    "EncoderIdentity",
    "TextConditioned",
    "drops_to_empty_prompt",
    "encode_captioned",
    "encoded_batches",
    "encoded_spec",
    "text_size_settings",
]

ENCODERS = "encoders.json"
"""Name of the file in a run's directory that identifies the encoders used in training."""

_FORMAT = 1


@runtime_checkable
class TextConditioned(Protocol):
    """The config of a denoiser of latents with text conditions."""

    name: str
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
class CaptionedData(CaptionSettings):
    """Captioned images for text-to-image models; needs stack-train[images].

    The caption of the file `cat.png` is in the text file `cat.txt`, or in the folder's `metadata.jsonl`. Images are
    encoded by the autoencoder of a diffusers directory, and captions by its text encoders. Both are encoded once and
    then memory-mapped from the user's cache, so steps do not run the encoders.

    An image can have a list of captions, with weights or equally likely. The seed and the number of a row choose its
    caption.

    A batch contains "images", the scaled latents; "text", the text condition; "weights"; and, depending on the
    denoiser, "pooled"; "sizes", the original size, crop and target size; and "negative_text" and "negative_pooled", the
    empty caption, which replaces captions that the objective drops.

    Without `buckets`, images are cropped to their centre square, and "sizes" are those of uncropped images. With
    `buckets`, each batch has images of one size, and the first batch of each size compiles another program. In each
    epoch, the fewer than `batch_size` images of each bucket that do not fill a batch are omitted.

    Attributes:
      pipeline: diffusers directory with vae, text_encoder and text_encoder_2; a denoiser in it is not read.
      name: selects this kind of data.
      unreadable: policy for files that are not readable images, and for images of a dataset without a caption: "error",
        or "skip", which lists the files in a warning.
      encoded_at_once: batch size of the encoders, in images or captions.
      buckets: sizes of images of several ratios; None for squares.
      latents: "mean" trains on the means of the latents, "sample" on a new sample of their distribution in each epoch,
        as in diffusers. The cache holds means, and for samples also standard deviations.
      controls: control images for training a ControlNet (section `controlnet`); batches then contain "control".
      prior: images of the subject's class (DreamBooth), half of each batch; batches then contain "loss_weights".
    """

    pipeline: str
    name: Literal["captioned"] = "captioned"
    unreadable: OnUnreadable = "error"
    encoded_at_once: PositiveInt = 16
    buckets: BucketsConfig | None = None
    latents: Latents = "mean"
    controls: ControlsConfig | None = None
    prior: PriorConfig | None = None

    @property
    def encoders(self) -> str:
        return self.pipeline

    def spec(self, model: Any) -> Shapes:
        shapes = encoded_spec(self, model)
        if self.prior is not None:
            shapes = {**shapes, LOSS_WEIGHTS: jax.ShapeDtypeStruct((self.batch_size,), np.float32)}
        if self.controls is None:
            return shapes
        pixels = model.image_size * self.controls.pixels_per_latent
        return {**shapes, "control": jax.ShapeDtypeStruct((self.batch_size, pixels, pixels, 3), np.uint8)}

    def check(self, model: Any) -> None:
        if isinstance(model, VideosConfig):
            raise ConfigError("Data of kind captioned are images; a model of videos trains on kind videos.")
        if not isinstance(model, TextConditioned):
            raise ConfigError(
                f"Data of kind captioned is for denoisers with text conditions, not for family {model.name!r}; use "
                "flux, sd3 or unet. An autoencoder trains on kind images."
            )
        self.check_source()
        if self.controls is not None and model.name != "unet":
            raise ConfigError(f"data.controls are for ControlNets of family unet, not {model.name!r}. Leave them out.")
        if self.controls is not None and self.scheme is not None:
            raise ConfigError(
                f"data.controls are files with the paths of the images, and data.source={self.source!r} has no files "
                "of images. Unpack them into a folder."
            )
        if self.prior is not None:
            excluded = {"buckets": self.buckets, "controls": self.controls}
            check_prior(self.prior, batch_size=self.batch_size, excluded=excluded)

    def build(self, *, seed: int, model: Any) -> "CaptionedBatches":
        """Reads and encodes the images and captions that are not in the cache.

        Raises:
          DataError: Pillow is not installed, a file cannot be read, a caption is missing, the latents do not have
            about unit variance, or a bucket has fewer images than a batch.
          ConversionError: `pipeline` lacks an encoder, or an encoder does not fit the model.
          ConfigError: the sizes of `buckets` do not fit the autoencoder or the model.
        """
        images = open_image_source(self, needs="caption")
        return encoded_batches(
            self,
            partial(self._read_images, images),
            images.captions,
            seed=seed,
            model=model,
            latents=self.latents,
            buckets=self.buckets,
            controls=self.controls,
            prior=self.prior,
        )

    def _read_images(self, images: ImageSource, encoders: Encoders, model: Any) -> dict[ImageSize, FileImages]:
        """Reads the images of each bucket, or squares without buckets."""
        config = encoders.autoencoder.config
        side = model.image_size * config.downsampling
        options: Any = {"channels": config.channels, "unreadable": self.unreadable, "source": self.source}
        if self.buckets is None:
            return {(side, side): read_images(images, size=(side, side), **options)}
        sizes = bucket_sizes(self.buckets, side=side, factor=config.downsampling * getattr(model, "patch", 1))
        if isinstance(model, LimitsSize):
            for height, width in sizes:
                model.check_size(height // config.downsampling, width // config.downsampling)
        return read_bucketed_images(images, sizes=sizes, **options)


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
    if getattr(model, "reads_text_lengths", False):
        shapes[TEXT_LENGTHS] = jax.ShapeDtypeStruct((rows,), np.int32)
    if getattr(model, "size_features", 0):
        shapes["sizes"] = jax.ShapeDtypeStruct((rows, 6), np.float32)
    if isinstance(model, VideosConfig) and (extra := getattr(model, "extra_channels", 0)):
        shapes[FIRST_FRAME] = jax.ShapeDtypeStruct((*shapes["images"].shape[:-1], extra), np.float32)
        if (image_dim := getattr(model, "image_dim", None)) is not None:
            tokens = getattr(model, "image_tokens", 0)
            shapes[IMAGE_FEATURES] = jax.ShapeDtypeStruct((rows, tokens, image_dim), dtype)
    if drops_to_empty_prompt(model):
        shapes |= {f"negative_{name}": shapes[name] for name in TEXT_CONDITIONS if name in shapes}
    return shapes


def encoded_batches(  # noqa: PLR0913, each is a setting of the data
    settings: Any,
    read_files: Callable[[Encoders, Any], Mapping[ImageSize, FileImages]],
    captions_of: Callable[[Sequence[str]], Sequence[Captions]],
    *,
    seed: int,
    model: Any,
    latents: Latents = "mean",
    buckets: BucketsConfig | None = None,
    controls: ControlsConfig | None = None,
    prior: PriorConfig | None = None,
) -> "CaptionedBatches":
    """Encodes images or videos and their captions with `settings.encoders`; see `CaptionedData.build`.

    Args:
      settings: section `data`, an `ImageSettings` with `source`, `encoders` and `encoded_at_once`.
      read_files: reads the pixels of each size, given the encoders and the model.
      captions_of: returns the captions of each image or video, given their names.
      latents, buckets, controls, prior: see `CaptionedData`; with a prior there is one size.
    """
    directory, at_once = Path((settings.encoders or "").removeprefix("hf:")).expanduser(), settings.encoded_at_once
    encoders = open_encoders(directory, text_tokens=model.text_tokens, text_dim=model.text_dim)
    encoders.check(model)
    _check_controls(controls, encoders)
    read = read_files(encoders, model)
    sizes = list(read)
    names = [name for each in read.values() for name in each.names]
    captions = captions_of(names)
    if prior is not None:
        (size,) = sizes
        channels, unreadable = encoders.autoencoder.config.channels, settings.unreadable
        read = {size: join_prior(read[size], prior, size=size, channels=channels, unreadable=unreadable)}
        of_prior = Captions((prior.caption,), (1.0,))
        captions = [*captions, *[of_prior] * (len(read[size].names) - len(captions))]
    encoded, identity = encode_captioned(encoders, read, captions, model=model, at_once=at_once, latents=latents)
    if controls is not None:
        encoded = replace(encoded, controls=read_controls(read, source=settings.source, folder=controls.folder))
    factor, spec = encoders.autoencoder.config.downsampling, settings.spec(model)
    factors = {"images": factor} if controls is None else {"images": factor, "control": 1}
    shapes = [
        {**spec, **{name: _resized(spec[name], size, factor) for name, factor in factors.items()}} for size in sizes
    ]
    return CaptionedBatches(
        settings,
        encoded,
        seed=seed,
        identity=identity,
        latents=latents,
        buckets=buckets,
        sizes=sizes,
        batch_shapes=shapes,
        prior=None if prior is None else (prior, len(names)),
    )


def encode_captioned(
    encoders: Encoders,
    read: Mapping[ImageSize, FileImages],
    captions: Sequence[Captions],
    *,
    model: Any,
    at_once: int,
    latents: Latents = "mean",
) -> tuple[EncodedImages, "EncoderIdentity"]:
    """Encodes the images of each size and their captions for a denoiser; returns them and the encoders' identity.

    Args:
      captions: captions of each image.
      model: config of the denoiser.
      at_once: batch size of the encoders.
    """
    images = list(read.values())
    names = [name for each in images for name in each.names]
    identity = EncoderIdentity.of(encoders, model.text_tokens)
    # First the latents, whose scale is checked: encoding the captions can take much longer.
    encoded_latents, keys = encode_images(encoders, [each.pixels for each in images], latents, at_once)
    rows = CaptionRows.index(captions)
    text_sizes = text_size_settings(encoders, model.text_tokens)
    counts = [len(each.names) for each in images]
    encoded = EncodedImages(
        latents=encoded_latents,
        bucket_of=np.repeat(np.arange(len(counts)), counts).astype(np.int64),
        row_of=np.concatenate([np.arange(count) for count in counts]).astype(np.int64),
        texts=encode_texts(encoders, rows.texts, text_sizes, at_once),
        captions=rows,
        empty=encode_texts(encoders, [""], text_sizes, at_once) if drops_to_empty_prompt(model) else None,
        sizes=_size_conditions(read) if getattr(model, "size_features", 0) else None,
        keys=keys,
        names=[f"{name}: {each}" for name, each in zip(names, captions, strict=True)],
        encoders=vars(identity),
        dtype=jnp.dtype(model.dtype),
    )
    return encoded, identity


def _check_controls(controls: ControlsConfig | None, encoders: Encoders) -> None:
    factor = encoders.autoencoder.config.downsampling
    if controls is not None and controls.pixels_per_latent != factor:
        raise ConfigError(
            f"data.controls.pixels_per_latent is {controls.pixels_per_latent}, and the autoencoder in "
            f"{encoders.directory} divides sides by {factor}. Set it to {factor}."
        )


def text_size_settings(encoders: Encoders, text_tokens: int) -> list[int]:
    """Returns the numbers on which text conditions depend besides the encoders' files."""
    # Encoders without T5 fill its place by zeros of the denoiser's width.
    return [text_tokens, *([encoders.text.sizes()["text_dim"]] if encoders.pipeline.lacks_encoder else [])]


def _size_conditions(read: Mapping[ImageSize, FileImages]) -> Float[np.ndarray, "images 6"]:
    """Returns the original size, the crop and the target size of each image; squares count as uncropped."""
    rows = [
        (*original, *crop_offset(original, size), *size)
        for size, images in read.items()
        for original in images.originals or [size] * len(images.names)
    ]
    return np.array(rows, np.float32)


def _resized(images: jax.ShapeDtypeStruct, size: ImageSize, factor: int) -> jax.ShapeDtypeStruct:
    shape = (*images.shape[:-3], size[0] // factor, size[1] // factor, images.shape[-1])
    return jax.ShapeDtypeStruct(shape, images.dtype)


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
        sizes = map(str, text_size_settings(encoders, text_tokens))
        digest = stat_digest(encoder_files(directory), [str(_FORMAT), *sizes])
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


class CaptionedBatches(ImageBatches):
    """Batches of latents and conditions; `write` stores the identity of their encoders.

    Attributes:
      batch_shapes: see `VariesShapes`.
    """

    def __init__(  # noqa: PLR0913, it has one caller
        self,
        settings: ImageSettings,
        images: EncodedImages,
        *,
        seed: int,
        identity: EncoderIdentity,
        latents: Latents,
        buckets: BucketsConfig | None,
        sizes: Sequence[ImageSize],
        batch_shapes: Sequence[Shapes],
        prior: tuple[PriorConfig, int] | None = None,
    ) -> None:
        """Splits images; see `ImageBatches`.

        Args:
          prior: settings of the images of the class, and the index of the first.

        Raises:
          DataError: no image of the subject is left to train on.
        """
        super().__init__(settings, images, seed=seed, bucket_of=None if buckets is None else images.bucket_of)
        self._identity, self.batch_shapes, self._encoded = identity, batch_shapes, images
        self._fingerprint |= {"data.latents": latents}
        if buckets is not None:
            check_buckets(sizes, images.bucket_of[self.training], settings.batch_size, buckets)
            self._fingerprint |= {"data.buckets": [list(size) for size in sizes]}
        self._pairs: PriorPairs | None = None
        if prior is not None:
            is_prior = np.arange(len(images.names)) >= prior[1]
            self._pairs = PriorPairs.of(self.training, is_prior, prior[0].weight)
            if not len(self._pairs.subject):
                raise DataError(
                    f"data.validation_fraction={settings.validation_fraction} holds out all {prior[1]} images of "
                    "data.source, so none is left to train on. Set it to 0."
                )
            self.validation = self.validation[~is_prior[self.validation]]
            self._fingerprint |= {"data.prior.weight": prior[0].weight}

    def train_iterator(self) -> TrainIterator:
        pairs = self._pairs
        if pairs is None:
            return super().train_iterator()
        order = int(np.random.SeedSequence([self._seed]).generate_state(1)[0])  # as in `iterate_rows`
        ids = row_order(len(pairs), order).batch(self._settings.batch_size // 2).map(pairs.row_ids)
        prefetched = self._settings.prefetch_batches
        batches = iterate_batches(ids, lambda ids: self._batch(pairs.places(ids), ids), prefetch_batches=prefetched)
        return TrainIterator(batches, self._fingerprint)

    def describe_rows(self, row_ids: Int64[np.ndarray, " rows"]) -> list[str]:
        if self._pairs is None:
            return super().describe_rows(row_ids)
        places = np.where(row_ids < 0, self._validation_places(row_ids), self._pairs.places(row_ids))
        return [self._images.names[place] for place in places.tolist()]

    def _validation_places(self, row_ids: Int64[np.ndarray, " rows"]) -> Int64[np.ndarray, " rows"]:
        """Returns the validation image of each negative row id, and an arbitrary index for others."""
        if not len(self.validation):
            return np.zeros_like(row_ids)
        return self.validation[np.clip(-1 - row_ids, 0, len(self.validation) - 1)]

    def write(self, directory: Path) -> None:
        self._identity.write(directory)

    def _arrays(self, places: Int64[np.ndarray, " rows"], row_ids: Int64[np.ndarray, " rows"]) -> dict[str, np.ndarray]:
        return self._encoded.arrays(places, self._encoded.captions.choose(places, row_ids, self._seed))

    def _batch(self, places: Int64[np.ndarray, " rows"], row_ids: Int64[np.ndarray, " rows"]) -> dict[str, np.ndarray]:
        batch = super()._batch(places, row_ids)
        if self._pairs is not None:
            batch[LOSS_WEIGHTS] = self._pairs.loss_weights(row_ids)
        if (std := batch.pop("std", None)) is not None:
            # Each epoch has other row ids, and therefore other samples. Row ids of held-out images are negative.
            streams = ([self._seed, int(each < 0), abs(each)] for each in row_ids.tolist())
            noise = [np.random.default_rng(stream).standard_normal(std.shape[1:], np.float32) for stream in streams]
            batch["images"] = batch["images"] + std * np.stack(noise)
        return batch
