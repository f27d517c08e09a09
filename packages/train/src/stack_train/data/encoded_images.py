"""Captioned images encoded into latents and text conditions, which a cache holds."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int64, UInt8, UInt64

from stack_core.abi.errors import DataError
from stack_core.abi.user_cache import user_cache_dir
from stack_train.data.cache import digest_of
from stack_train.data.captions import CaptionRows
from stack_train.data.encoded_cache import EncodedRows, encode_once
from stack_train.data.files import stat_digest
from stack_train.diffusion.clip_vision import IMAGE_PROCESSOR
from stack_train.diffusion.ltx import TEXT_LENGTHS
from stack_train.diffusion.pipeline import Encoders, encoder_files
from stack_train.diffusion.pipeline_classes import IMAGE_ENCODER, VAE
from stack_train.diffusion.starts import encode_first_frames
from stack_train.diffusion.wan import FIRST_FRAME, IMAGE_FEATURES

__all__ = ["TEXT_CONDITIONS", "EncodedImages", "Latents", "encode_images", "encode_texts"]

_FORMAT = 2
_IMAGE_PARTS = (IMAGE_ENCODER, IMAGE_PROCESSOR)
_KEY_CHARACTERS = 32
# The standard deviation of latents should be 1. Values outside of this range indicate a wrong scaling_factor.
_MIN_STD, _MAX_STD = 0.2, 5.0
_CHECKED_IMAGES = 256

TEXT_CONDITIONS = ("text", "pooled", TEXT_LENGTHS)
"""Conditions from text encoders; most denoisers lack some."""

Latents = Literal["mean", "sample"]
"""Latents to train on: their means, or new samples of their distribution in each epoch."""


@dataclass(frozen=True)
class EncodedImages:
    """Encoded images and captions as `ImageRows`.

    Attributes:
      latents: latents of each bucket: "mean" and, for samples, "std", both scaled, and for videos that begin with an
        image the conditions of the first frame.
      bucket_of, row_of: bucket of each image, and its row in the latents of the bucket.
      texts: embeddings of the distinct captions, some of `TEXT_CONDITIONS`.
      captions: captions of each image as rows of `texts`.
      empty: embeddings of the empty caption in place of dropped ones; None for zeros.
      sizes: original size, crop and target size of each image; None for denoisers without sizes.
      keys: digest of the pixels of each image.
      names: name and captions of each image.
      encoders: identity of the encoders.
      dtype: dtype of the text conditions.
      controls: control images of each bucket; None without.
    """

    latents: Sequence[EncodedRows]
    bucket_of: Int64[np.ndarray, " images"]
    row_of: Int64[np.ndarray, " images"]
    texts: EncodedRows
    captions: CaptionRows
    empty: EncodedRows | None
    sizes: Float[np.ndarray, "images 6"] | None
    keys: Sequence[str]
    names: Sequence[str]
    encoders: Mapping[str, Any]
    dtype: Any
    controls: Sequence[UInt8[np.ndarray, "_ _ _ 3"]] | None = None

    @property
    def identity(self) -> Mapping[str, Any]:
        found = {"the images and captions (digest)": digest_of(list(self.keys), list(self.names))}
        if self.controls is not None:
            keys = [_digest_of_pixels(image) for images in self.controls for image in images]
            found["the control images (digest)"] = digest_of(keys)
        return found | {
            # The directory may move; `digest` identifies its files.
            f"the encoders' {name}": value
            for name, value in self.encoders.items()
            if name != "directory"
        }

    def digests(self) -> UInt64[np.ndarray, " images"]:
        return np.array([int(key[:16], 16) for key in self.keys], np.uint64)

    def arrays(
        self, places: Int64[np.ndarray, " rows"], captions: Int64[np.ndarray, " rows"] | None = None
    ) -> dict[str, np.ndarray]:
        """Returns the latents and conditions of images of one bucket, and "std" if latents are sampled.

        Args:
          captions: row of `texts` for each image; None takes the first caption of each.
        """
        latents = self.latents[self.bucket_of[places[0]]]
        captions = self.captions.first(places) if captions is None else captions
        found = {"images": latents.take("mean", self.row_of[places])}
        if "std" in latents:
            found["std"] = latents.take("std", self.row_of[places])
        if FIRST_FRAME in latents:
            found[FIRST_FRAME] = latents.take(FIRST_FRAME, self.row_of[places])
        if IMAGE_FEATURES in latents:
            found[IMAGE_FEATURES] = latents.take(IMAGE_FEATURES, self.row_of[places]).astype(self.dtype)
        conditions = [name for name in TEXT_CONDITIONS if name in self.texts]
        found |= {name: self._take_text(self.texts, name, captions) for name in conditions}
        if self.sizes is not None:
            found["sizes"] = self.sizes[places]
        if self.controls is not None:
            found["control"] = self.controls[self.bucket_of[places[0]]][self.row_of[places]]
        if self.empty is not None:
            for name in conditions:
                row = self._take_text(self.empty, name, np.zeros(1, np.int64))
                found[f"negative_{name}"] = np.broadcast_to(row, found[name].shape)
        return found

    def _take_text(self, texts: EncodedRows, name: str, rows: Int64[np.ndarray, " rows"]) -> np.ndarray:
        return texts.take(name, rows).astype(np.int32 if name == TEXT_LENGTHS else self.dtype)


def encode_images(
    encoders: Encoders, pixels: Sequence[UInt8[np.ndarray, "_ *_ channels"]], latents: Latents, at_once: int
) -> tuple[list[EncodedRows], list[str]]:
    """Encodes the images of each bucket that the cache does not hold.

    Args:
      pixels: images of each bucket.

    Returns:
      The latents of each bucket, "mean" and, for samples, "std", with the conditions of the first frame for videos that
      begin with an image, and the digests of all images.

    Raises:
      DataError: the latents do not have about unit variance.
    """
    graph, state = nnx.split(encoders.autoencoder)

    @jax.jit
    def moments(state: Any, images: jax.Array) -> dict[str, jax.Array]:
        mean, std = nnx.merge(graph, state).scaled_moments(images)
        return {"mean": mean, "std": std} if latents == "sample" else {"mean": mean}

    first_frames = encoders.pipeline.begins_with_image
    parts = tuple(f"{part}/" for part in ((VAE, *_IMAGE_PARTS) if first_frames else (VAE,)))
    files = [(name, path) for name, path in encoder_files(encoders.directory) if name.startswith(parts)]
    digest = stat_digest(files, [str(_FORMAT), latents, *([FIRST_FRAME] if first_frames else [])])
    found: list[EncodedRows] = []
    all_keys: list[str] = []
    for images in pixels:
        keys = [_digest_of_pixels(image) for image in images]

        def encode(places: Sequence[int], images: np.ndarray = images) -> Mapping[str, np.ndarray]:
            # The parameters are an argument, since XLA would otherwise compile them into the program as constants.
            rows = np.stack([images[place] for place in places])
            found = moments(state, jnp.asarray(rows, jnp.float32) / 127.5 - 1.0)
            if first_frames:
                found |= encode_first_frames(rows[:, 0], encoders, found["mean"].shape[1])
            return jax.device_get(found)

        folder = user_cache_dir() / "latents" / digest_of(digest, images.shape[1:-1])
        found.append(encode_once(folder, keys, encode, at_once=at_once))
        all_keys += keys
    _check_scale(found, encoders)
    return found, all_keys


def encode_texts(encoders: Encoders, captions: Sequence[str], sizes: Sequence[int], at_once: int) -> EncodedRows:
    """Encodes the captions that the cache does not hold.

    Args:
      sizes: numbers on which the conditions depend besides the encoders' files.

    Returns:
      Some of `TEXT_CONDITIONS` of each caption.
    """
    others = tuple(f"{part}/" for part in (VAE, *_IMAGE_PARTS))
    files = [(name, path) for name, path in encoder_files(encoders.directory) if not name.startswith(others)]
    folder = user_cache_dir() / "texts" / stat_digest(files, [str(_FORMAT), *map(str, sizes)])
    keys = [digest_of(caption)[:_KEY_CHARACTERS] for caption in captions]

    def encode(places: Sequence[int]) -> Mapping[str, np.ndarray]:
        return jax.device_get(encoders.text([captions[place] for place in places]))

    return encode_once(folder, keys, encode, at_once=at_once)


def _digest_of_pixels(image: UInt8[np.ndarray, "*size channels"]) -> str:
    digest = hashlib.sha256(repr(image.shape).encode())
    digest.update(image.tobytes())
    return digest.hexdigest()[:_KEY_CHARACTERS]


def _check_scale(latents: Sequence[EncodedRows], encoders: Encoders) -> None:
    # A sample, because the memory-mapped latents may not fit into memory.
    share = max(1, _CHECKED_IMAGES // len(latents))
    samples = [each.take("mean", np.arange(min(len(each), share))).ravel() for each in latents]
    std, scale = float(np.std(np.concatenate(samples))), encoders.autoencoder.config.scaling_factor
    if _MIN_STD <= std <= _MAX_STD:
        return
    if isinstance(scale, (int, float)):
        name, remedy = (
            f"scaling_factor {scale:g}",
            f"Set scaling_factor in vae/config.json to {scale / max(std, 1e-9):.4g}",
        )
    else:
        name, remedy = "latents_std", "Set latents_mean and latents_std in vae/config.json to those of its channels"
    raise DataError(
        f"The autoencoder in {encoders.directory} gives these images latents with a standard deviation of {std:.3g} "
        f"after its {name}; denoisers are trained on values near 1. Set {remedy}."
    )
