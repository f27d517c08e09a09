"""Prompts of images for rollouts: their conditions, and the decoder of the denoiser's latents."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int64, UInt8

from stack_core.abi.errors import DataError
from stack_train.data.encoded_cache import EncodedRows
from stack_train.data.encoded_images import encode_texts
from stack_train.data.files import expand_glob, read_text
from stack_train.data.image_batches import as_pixels
from stack_train.data.kinds.captioned import text_size_settings
from stack_train.diffusion.pipeline import Encoders

__all__ = ["Prompts", "encoded_prompts", "label_prompts", "pixel_decoder", "read_prompts"]


@dataclass(frozen=True)
class Prompts:
    """Prompts and their conditions.

    Attributes:
      texts: the prompts; for models with labels, the labels as text.
      labels: True if the condition is a label, which the text of a prompt is the number of.
      encoded: text conditions of the prompts; None for models without text conditions.
      dtype: dtype of text conditions.
    """

    texts: Sequence[str]
    labels: bool = False
    encoded: EncodedRows | None = None
    dtype: Any = np.float32

    def __len__(self) -> int:
        return len(self.texts)

    def condition(self, places: Int64[np.ndarray, " rows"]) -> dict[str, np.ndarray]:
        """Returns the conditions of some prompts."""
        if self.labels:
            return {"labels": np.array([int(self.texts[place]) for place in places], np.int32)}
        encoded = self.encoded
        if encoded is None:
            return {}
        names = [name for name in ("text", "pooled") if name in encoded]
        return {name: encoded.take(name, places).astype(self.dtype) for name in names}


def label_prompts(classes: int) -> Prompts:
    """Returns all labels of a model as prompts, or an empty prompt for a model without labels."""
    return Prompts([str(label) for label in range(classes)], labels=True) if classes else Prompts([""])


def encoded_prompts(texts: Sequence[str], encoders: Encoders, model: Any, *, at_once: int) -> Prompts:
    """Encodes the prompts that the cache does not hold.

    Args:
      model: config of the denoiser.
      at_once: batch size of the encoders.
    """
    sizes = text_size_settings(encoders, model.text_tokens)
    return Prompts(texts, encoded=encode_texts(encoders, texts, sizes, at_once), dtype=jnp.dtype(model.dtype))


def read_prompts(pattern: str, field: str) -> list[str]:
    """Returns the distinct lines of text files, without blank ones.

    Args:
      pattern: glob of the files.
      field: config key of the glob, for messages.

    Raises:
      DataError: the glob matches no file, a file cannot be read, or the files hold no prompt.
    """
    lines = [line.strip() for path in expand_glob(pattern, field) for line in read_text(path).split("\n")]
    if not (found := list(dict.fromkeys(filter(None, lines)))):
        raise DataError(f"{field} is {pattern!r}, whose files hold no prompt. Write one per line.")
    return found


def pixel_decoder(encoders: Encoders | None, *, at_once: int) -> Callable[[np.ndarray], UInt8[np.ndarray, "_ _ _ _"]]:
    """Returns a function from the denoiser's images or latents to pixels.

    Args:
      encoders: encoders of the denoiser; None for a denoiser of pixels.
      at_once: number of latents that are decoded together.
    """
    if encoders is None:
        return as_pixels

    def pixels(latents: np.ndarray) -> np.ndarray:
        found = []
        for first in range(0, len(latents), at_once):
            part = latents[first : first + at_once]
            # A fixed number of rows compiles once.
            padded = np.pad(part, ((0, at_once - len(part)), *[(0, 0)] * (part.ndim - 1)))
            found.append(as_pixels(encoders.decode(jnp.asarray(padded)))[: len(part)])
        return np.concatenate(found)

    return pixels
