"""A trained image-text model as an object: feature vectors of images and texts, and classes by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.traversals import unflatten_mapping
from jaxtyping import Float, UInt8

from stack_core.abi.errors import ArgumentError, ConversionError, DataError
from stack_core.abi.formats import ImportsRuns, StartsRuns
from stack_core.abi.run_directory import RunDirectory
from stack_train.contrastive.dual_encoder import DualEncoder, DualEncoderConfig
from stack_train.conversion import format_of
from stack_train.data.kinds.image_texts import TextRows
from stack_train.data.tokenizer import HuggingFaceTokenizer
from stack_train.diffusion.grid import pillow
from stack_train.run.config import run_config
from stack_train.run.model import abstract_model
from stack_train.variables.model_variables import ModelVariables
from stack_train.variables.weights import read_params
from stack_train.vision.reader import MODES, apply_to_image, decode

__all__ = ["ImageTextModel", "load_image_text"]

# Rows of a call of the compiled model.
_AT_ONCE = 64


def load_image_text(address: str | Path) -> "ImageTextModel":
    """Opens a trained image-text model, such as CLIP: `load_image_text("runs/mine")`, `load_image_text("hf:DIR")`.

    Raises:
      StackError: the address does not contain a model, or another kind of model.
    """
    format_, directory = format_of(str(address), ImportsRuns)
    if format_ is None:
        config, tokenizer = run_config(directory).model, RunDirectory(directory).tokenizer
        _check(address, config)
        params = read_params(directory, config)[0]
    elif isinstance(format_, StartsRuns):
        start = format_.open_start(directory)
        config, tokenizer = start.config, start.tokenizer
        _check(address, config)
        # Indices into lists of modules are integers; the towers have none.
        params = unflatten_mapping({tuple(path.split("/")): jnp.asarray(leaf) for path, leaf in start.leaves()})
    else:
        raise ConversionError(f"{address} holds no image-text model. Give the directory of a run, or hf:DIR.")
    found = tokenizer is not None and (tokenizer / "tokenizer.json").is_file()
    model = ModelVariables.of(abstract_model(config)).merge(params)
    return ImageTextModel(str(address), config, model, HuggingFaceTokenizer.load(tokenizer) if found else None)


def _check(address: str | Path, config: Any) -> None:
    if not isinstance(config, DualEncoderConfig):
        raise ConversionError(
            f"{address} is a model of family {config.name!r}, which does not compare images with texts; clip and "
            "siglip do. Language models are opened by load."
        )


@dataclass(frozen=True, eq=False)
class ImageTextModel:
    """A trained image-text model, opened by `load_image_text`.

    An image is the path or the bytes of a file, an image of Pillow, or an array uint8[height, width, channels].

    Attributes:
      address: address of the model.
      config: config of the model.
      model: the model with its parameters.
      tokenizer: tokenizer of its texts, or None.
    """

    address: str
    config: Any
    model: DualEncoder
    tokenizer: HuggingFaceTokenizer | None

    def image_features(self, images: Sequence[Any]) -> Float[np.ndarray, "images features"]:
        """Returns a feature vector of length 1 per image.

        Raises:
          ArgumentError: `images` is empty.
          DataError: an image cannot be read, or Pillow is not installed.
        """
        if not len(images):
            raise ArgumentError("There are no images. Give a list of one or more.")
        return self._in_batches(self._of_images, np.stack([self._pixels(image) for image in images]))

    def text_features(self, texts: Sequence[str]) -> Float[np.ndarray, "texts features"]:
        """Returns a feature vector of length 1 per text.

        Raises:
          ArgumentError: `texts` is empty, or `texts` is one string.
          DataError: the model has no tokenizer, or a text is too long for the text tower.
        """
        if isinstance(texts, str) or not len(texts):
            raise ArgumentError(f"texts is {texts!r}; a list of one or more strings was expected.")
        if self.tokenizer is None:
            raise DataError(f"{self.address} has no tokenizer.json. Copy the tokenizer of the model there.")
        names = [f"text {text[:60]!r}" for text in texts]
        _, rows = TextRows.of(self.tokenizer, self.config).fitting(names, texts, "error")
        return self._in_batches(self._of_texts, rows)

    def classify(
        self, images: Sequence[Any], labels: Sequence[str], *, template: str = "{}"
    ) -> Float[np.ndarray, "images labels"]:
        """Returns the probability of each label for each image: a softmax of their logits (zero-shot classification).

        Args:
          images: the images.
          labels: names of the classes.
          template: text with "{}" in place of the label, such as "a photo of a {}".

        Raises:
          ArgumentError: an argument is not usable.
          DataError: see `image_features` and `text_features`.
        """
        if "{}" not in template:
            raise ArgumentError(f"template is {template!r}, without {{}} in place of the label.")
        if isinstance(labels, str):
            raise ArgumentError(f"labels is {labels!r}; a list of strings was expected.")
        texts = self.text_features([template.replace("{}", label) for label in labels])
        logits = self.model.logits(jnp.asarray(self.image_features(images)), jnp.asarray(texts))
        return np.asarray(jax.nn.softmax(logits, axis=-1))

    def _pixels(self, image: Any) -> UInt8[np.ndarray, "side side channels"]:
        size, channels = self.config.vision.image_size, self.config.vision.channels

        def scaled(opened: Any) -> np.ndarray:
            found = np.asarray(self.config.scaling(decode(opened, channels), (size, size)), np.uint8)
            return found.reshape(size, size, channels)

        if channels not in MODES:
            raise DataError(f"The model reads images of {channels} channels; image files have 1 or 3.")
        if isinstance(image, np.ndarray):
            image = pillow().fromarray(image)
        if isinstance(image, str | Path):
            try:
                image = Path(image).expanduser().read_bytes()
            except OSError as error:
                raise DataError(f"{image} cannot be read: {error}. Give the path of an image file.") from error
        return apply_to_image(image, scaled) if isinstance(image, bytes) else scaled(image)

    @staticmethod
    def _in_batches(function: Callable[[jax.Array], jax.Array], rows: np.ndarray) -> np.ndarray:
        """Calls a compiled function on a fixed number of rows at a time; the last rows are padded with zeros."""
        found = []
        for first in range(0, len(rows), _AT_ONCE):
            part = rows[first : first + _AT_ONCE]
            # A few rows compile a small program, many rows a program of `_AT_ONCE` rows.
            size = min(len(rows), _AT_ONCE)
            padded = np.pad(part, ((0, size - len(part)), *[(0, 0)] * (part.ndim - 1)))
            found.append(np.asarray(function(jnp.asarray(padded)))[: len(part)])
        return np.concatenate(found)

    @cached_property
    def _of_images(self) -> Callable[[jax.Array], jax.Array]:
        return self._compiled(lambda model, pixels: model.image_features(pixels))

    @cached_property
    def _of_texts(self) -> Callable[[jax.Array], jax.Array]:
        return self._compiled(lambda model, tokens: model.text_features(tokens))

    def _compiled(self, function: Callable[[Any, jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
        graph, state = nnx.split(self.model)
        # The parameters are an argument, since XLA would otherwise compile them into the program as constants.
        compiled = jax.jit(lambda state, rows: function(nnx.merge(graph, state), rows))
        return lambda rows: compiled(state, rows)

    def __repr__(self) -> str:
        count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(self.model)))
        return f"<image-text model {self.address}: {count:,} parameters, family {self.config.name!r}>"
