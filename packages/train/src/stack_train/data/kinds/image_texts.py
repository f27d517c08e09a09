"""`data.name: image_texts`: captioned images for image-text models."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Int32, Int64, UInt8, UInt64

from stack_core.abi.config import config
from stack_core.abi.data import Batch, Shapes
from stack_core.abi.errors import ConfigError, DataError
from stack_train.contrastive.dual_encoder import DualEncoderConfig
from stack_train.data.cache import digest_of
from stack_train.data.captions import CaptionRows, Captions
from stack_train.data.examples import TooLong
from stack_train.data.image_batches import ImageBatches
from stack_train.data.image_files import IMAGE_CHANNELS, FileImages, OnUnreadable, read_images
from stack_train.data.image_settings import CaptionSettings, open_image_source
from stack_train.data.kinds.chat import load_tokenizer
from stack_train.data.rows import filled
from stack_train.data.tokenizer import HuggingFaceTokenizer, write_tokenizer

__all__ = ["ImageTextsData", "TextRows"]


@config
class ImageTextsData(CaptionSettings):
    """Captioned images for image-text models such as CLIP and SigLIP; needs stack-train[images].

    Images and captions are read and chosen as in data of kind `captioned`. Images are scaled to the model's size as its
    publisher does and memory-mapped from the user's cache.

    A batch contains "pixels", uint8[batch, height, width, channels]; "tokens", int32[batch, max_positions], padded
    texts; "weights", 1 for rows that count; and "present", 1 for all pairs. The last validation batch is filled with
    pairs of other batches and weight 0: all held-out texts compete with equally many others.

    Attributes:
      name: selects this kind of data.
      tokenizer: directory of the tokenizer, or its `tokenizer.json`; None uses the tokenizer of `run.init_from`.
      too_long: policy for captions too long for the text tower: "error", "drop", or "cut", which keeps the
        beginning and the last special token.
      unreadable: policy for files that are not readable images, and for images of a dataset without a caption: "error",
        or "skip", which lists the files in a warning.
    """

    name: Literal["image_texts"] = "image_texts"
    tokenizer: str | None = None
    too_long: TooLong = "error"
    unreadable: OnUnreadable = "error"

    def work(self) -> tuple[str, int]:
        return "pairs", self.batch_size

    def spec(self, model: Any) -> Shapes:
        rows, side = self.batch_size, model.vision.image_size
        return {
            "pixels": jax.ShapeDtypeStruct((rows, side, side, model.vision.channels), np.uint8),
            "tokens": jax.ShapeDtypeStruct((rows, model.text.max_positions), np.int32),
            "weights": jax.ShapeDtypeStruct((rows,), np.float32),
            "present": jax.ShapeDtypeStruct((rows,), np.float32),
        }

    def check(self, model: Any) -> None:
        if not isinstance(model, DualEncoderConfig):
            raise ConfigError(
                f"Data of kind image_texts is for image-text models, not for family {model.name!r}; use siglip or "
                "clip. Captions for text-to-image models are data of kind captioned."
            )
        self.check_source()
        if self.batch_size < 2:
            raise ConfigError(
                "data.batch_size is 1, and each image is compared with the other texts of its batch. Set it to 2 or "
                "more; hundreds are usual."
            )
        channels = self.spec(model)["pixels"].shape[-1]
        if channels not in IMAGE_CHANNELS:
            raise ConfigError(f"model.vision.channels is {channels}; image files have 1 or 3. Change it.")

    def build(self, *, seed: int, model: Any) -> "ImageTextBatches":
        """Reads the images and tokenizes their captions.

        Raises:
          ConfigError: no tokenizer is configured, or it does not fit the model.
          DataError: Pillow is not installed, a file cannot be read, a caption is missing or too long, or the training
            split is smaller than a batch.
        """
        tokenizer = load_tokenizer(self.tokenizer, self.name, None)
        rows = TextRows.of(tokenizer, model)
        source = open_image_source(self, needs="caption")
        images = read_images(
            source,
            size=(model.vision.image_size, model.vision.image_size),
            channels=model.vision.channels,
            unreadable=self.unreadable,
            source=self.source,
            scaling=model.scaling,
        )
        pairs = _pairs(rows, images, source.captions(images.names), self.too_long)
        return ImageTextBatches(self, pairs, tokenizer, seed=seed)


@dataclass(frozen=True)
class TextRows:
    """Texts as rows of token ids.

    Attributes:
      tokenizer: tokenizer of the texts.
      tokens: number of tokens of a row.
      pad_token: id that fills a row.
      end_token: id that every row must have; None for any row.
    """

    tokenizer: HuggingFaceTokenizer
    tokens: int
    pad_token: int
    end_token: int | None

    @classmethod
    def of(cls, tokenizer: HuggingFaceTokenizer, model: Any) -> "TextRows":
        """Returns the rows of a model's text tower.

        Raises:
          ConfigError: the tokenizer has more tokens than the text tower, or it neither pads nor ends texts.
        """
        if tokenizer.vocab_size > model.text.vocab_size:
            raise ConfigError(
                f"The tokenizer has {tokenizer.vocab_size} tokens, but model.text.vocab_size is "
                f"{model.text.vocab_size}. Set model.text.vocab_size to {tokenizer.vocab_size} or more."
            )
        pad = tokenizer.eos_id if tokenizer.pad_id is None else tokenizer.pad_id
        if pad is None:
            raise ConfigError(
                "The tokenizer has no pad_token and no eos_token, which fill the rows of texts. Name one in its "
                "tokenizer_config.json."
            )
        return cls(tokenizer, model.text.max_positions, pad, model.end_token)

    def fitting(
        self, names: Sequence[str], texts: Sequence[str], too_long: TooLong
    ) -> tuple[Int64[np.ndarray, " kept"], Int32[np.ndarray, "kept tokens"]]:
        """Tokenizes texts; returns the indices of the kept texts, and their rows.

        Args:
          names: names of the texts, for messages.
          texts: the texts.
          too_long: policy for texts of more than `tokens` tokens.

        Raises:
          DataError: a text is too long and `too_long` is "error", every text is dropped, or a text lacks the end token.
        """
        ids = [self.tokenizer.encode_for_encoder(text) for text in texts]
        longer = [place for place, each in enumerate(ids) if len(each) > self.tokens]
        if longer and too_long == "error":
            raise DataError(
                f"{len(longer)} of {len(ids)} texts are longer than the {self.tokens} tokens that the text tower reads "
                f"(model.text.max_positions); that of {names[longer[0]]} has {len(ids[longer[0]])}. Shorten them, or "
                "set data.too_long to drop (leaves the pairs out) or cut (keeps the beginnings of texts)."
            )
        dropped = {*longer} if too_long == "drop" else set[int]()
        kept = np.array([place for place in range(len(ids)) if place not in dropped], np.int64)
        if not len(kept):
            raise DataError(f"None of {len(ids)} texts fits the {self.tokens} tokens of model.text.max_positions.")
        rows = np.full((len(kept), self.tokens), self.pad_token, np.int32)
        for row, place in zip(rows, kept.tolist(), strict=True):
            text = ids[place]
            # The last token ends a text, and CLIP pools there.
            text = text if len(text) <= self.tokens else [*text[: self.tokens - 1], text[-1]]
            row[: len(text)] = text
        if self.end_token is not None and not np.all(lacking := np.any(rows == self.end_token, axis=1)):
            name = names[kept[int(np.argmin(lacking))]]
            raise DataError(
                f"The tokens of {name} have no token {self.end_token} (model.text.end), where the text tower pools. "
                "Add a post-processor to tokenizer.json that ends texts with it, or set model.text.end to the token "
                "that ends texts."
            )
        return kept, rows


@dataclass(frozen=True)
class _Pairs:
    """Pairs of an image and its texts; see `ImageRows`.

    Attributes:
      pixels: uint8 pixels of all images.
      places: index of each pair's image.
      captions: texts of each pair.
      tokens: tokens of each distinct text.
      names: readable name of each pair.
    """

    pixels: UInt8[np.ndarray, "images height width channels"]
    places: Int64[np.ndarray, " pairs"]
    captions: CaptionRows
    tokens: Int32[np.ndarray, "texts tokens"]
    names: Sequence[str]

    @property
    def identity(self) -> Mapping[str, Any]:
        first, captions = self.captions.first(np.arange(len(self.places))), self.captions
        found = {"the pairs (digest)": digest_of(self._digests.tolist(), self.tokens[first].tobytes().hex())}
        if len(captions.rows) > len(self.places):
            choices = captions.starts.tolist(), captions.rows.tolist(), captions.upper.tolist()
            found["the captions (digest)"] = digest_of(*choices, self.tokens.tobytes().hex())
        return found

    def digests(self) -> UInt64[np.ndarray, " pairs"]:
        return self._digests

    @cached_property
    def _digests(self) -> UInt64[np.ndarray, " pairs"]:
        found = [digest_of(self.pixels[place].tobytes().hex())[:16] for place in self.places]
        return np.array([int(each, 16) for each in found], np.uint64)

    def arrays(
        self, places: Int64[np.ndarray, " rows"], captions: Int64[np.ndarray, " rows"] | None = None
    ) -> dict[str, np.ndarray]:
        """Returns the images at some indices with their texts, by default the first text of each."""
        tokens = self.tokens[self.captions.first(places) if captions is None else captions]
        present = np.ones(len(places), np.float32)
        return {"pixels": self.pixels[self.places[places]], "tokens": tokens, "present": present}


def _pairs(rows: TextRows, images: FileImages, captions: Sequence[Captions], too_long: TooLong) -> _Pairs:
    """Tokenizes captions. With `too_long` "drop", long captions are omitted, and images without others."""
    named = [(name, text) for name, each in zip(images.names, captions, strict=True) for text in each.texts]
    kept, tokens = rows.fitting([name for name, _ in named], [text for _, text in named], too_long)
    tokens_of = {named[entry][1]: row for entry, row in zip(kept.tolist(), tokens, strict=True)}
    fitting = [each.subset(tokens_of) for each in captions]
    places = [place for place, each in enumerate(fitting) if each.texts]
    found = CaptionRows.index([fitting[place] for place in places])
    names = [f"{images.names[place]}: {fitting[place]}" for place in places]
    tokens = np.stack([tokens_of[text] for text in found.texts])
    return _Pairs(images.pixels, np.array(places, np.int64), found, tokens, names)


class ImageTextBatches(ImageBatches):
    """Batches of pairs; see `Batches`."""

    def __init__(self, settings: ImageTextsData, pairs: _Pairs, tokenizer: HuggingFaceTokenizer, *, seed: int) -> None:
        super().__init__(settings, pairs, seed=seed)
        self._tokenizer, self._pairs = tokenizer, pairs
        if len(self.training) < settings.batch_size:
            raise DataError(
                f"The training split has {len(self.training)} pairs, fewer than data.batch_size="
                f"{settings.batch_size}, so batches would compare a pair with its copies. Lower data.batch_size, or "
                "add pairs."
            )

    def validation_batches(self) -> Iterator[Batch]:
        """Yields all held-out pairs once with weight 1; see `ImageTextsData`."""
        size, count = self._settings.batch_size, len(self.validation)
        for first in range(0, count, size):
            own = min(size, count - first)
            # The first held-out pairs follow the last ones.
            rows = np.arange(first, first + min(size, count)) % count
            batch = self._batch(self.validation[rows], -1 - rows)
            batch["weights"][own:] = 0.0
            yield {name: filled(values, size, name) for name, values in batch.items()}

    def _arrays(self, places: Int64[np.ndarray, " rows"], row_ids: Int64[np.ndarray, " rows"]) -> dict[str, np.ndarray]:
        return self._pairs.arrays(places, self._pairs.captions.choose(places, row_ids, self._seed))

    def write(self, directory: Path) -> None:
        """Writes the tokenizer into the run's directory."""
        write_tokenizer(self._tokenizer, directory)
