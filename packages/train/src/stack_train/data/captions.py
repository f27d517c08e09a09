"""Captions of images and videos, and the choice between several captions of one."""

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from stack_core.abi.errors import DataError
from stack_core.text.json_records import parse_record
from stack_train.data.files import listing, read_text

__all__ = ["METADATA", "WEIGHTS", "CaptionRows", "Captions", "captions_of"]

METADATA = "metadata.jsonl"
WEIGHTS = "weights"
"""Default name of the field with the weights of a list of captions."""

_STREAM = 2  # streams 0 and 1 of a seed are the samples of latents


@dataclass(frozen=True)
class Captions:
    """The captions of one image or video.

    Attributes:
      texts: the captions, without surrounding whitespace; empty without a caption.
      shares: probability of each caption; their sum is 1.
    """

    texts: tuple[str, ...]
    shares: tuple[float, ...]

    def __str__(self) -> str:
        if len(self.texts) == 1:
            return repr(self.texts[0])
        return ", ".join(f"{text!r} ({share:.6g})" for text, share in zip(self.texts, self.shares, strict=True))

    @classmethod
    def parse(cls, name: str, value: Any, weights: Any = None) -> "Captions":
        """Returns the captions in a field: a string, or a list of strings with optional weights.

        A blank string and None are empty. Without weights, all captions of a list are equally likely.

        Args:
          name: location for messages.
          value: value of the field of captions.
          weights: value of the field of weights, a positive number for each caption.

        Raises:
          DataError: a caption is not a string, or the weights do not fit the captions.
        """
        if not isinstance(value, list):
            if value is not None and not isinstance(value, str):
                raise DataError(f"{name}: the caption is a {type(value).__name__}; a string or a list was expected.")
            text = (value or "").strip()
            return cls((text,), (1.0,)) if text else cls((), ())
        if wrong := [each for each in value if not isinstance(each, str) or not each.strip()]:
            raise DataError(f"{name}: {wrong[0]!r} is in the list of captions. Each must be a text that is not blank.")
        given = [1.0] * len(value) if weights is None else weights
        if not isinstance(given, list) or len(given) != len(value):
            found = f"{len(given)} weights" if isinstance(given, list) else f"the weights {given!r}"
            raise DataError(f"{name}: there are {len(value)} captions and {found}. Give one weight per caption.")
        for weight in given:
            is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
            if not is_number or not math.isfinite(weight) or weight <= 0:
                raise DataError(f"{name}: {weight!r} is not the weight of a caption. Give a positive number.")
        return cls(tuple(each.strip() for each in value), tuple(each / sum(given) for each in given))

    def subset(self, texts: Container[str]) -> "Captions":
        """Returns the captions that are in `texts`, with their relative weights."""
        pairs = [(text, share) for text, share in zip(self.texts, self.shares, strict=True) if text in texts]
        total = sum(share for _, share in pairs)
        return Captions(tuple(text for text, _ in pairs), tuple(share / total for _, share in pairs))


def captions_of(files: Sequence[str], *, noun: str = "images") -> list[Captions]:
    """Returns the captions of each image or video.

    The caption of `cat.png` is the text of `cat.txt`. Without that file, it is the "text" of the line with "file_name"
    `cat.png` in the folder's `metadata.jsonl`, as in Hugging Face's image folders. There it can be a list of captions,
    with their "weights".

    Args:
      files: paths of the images or videos.
      noun: name of the files in messages.

    Raises:
      DataError: a caption is missing, or a file is malformed; the message counts and lists the files.
    """
    tables: dict[Path, Mapping[str, Captions]] = {}
    found: list[Captions] = []
    for name in files:
        path = Path(name)
        if path.parent not in tables:
            tables[path.parent] = _table(path.parent / METADATA)
        beside = path.with_suffix(".txt")
        if beside.is_file():
            found.append(Captions.parse(str(beside), read_text(beside)))
        else:
            found.append(tables[path.parent].get(path.name, Captions((), ())))
    if missing := [name for name, captions in zip(files, found, strict=True) if not captions.texts]:
        raise DataError(
            f"{len(missing)} of {len(files)} {noun} have no caption:\n  {listing(missing)}\nWrite each into a .txt "
            f"file of the same name, or into {METADATA} in the folder."
        )
    return found


@dataclass(frozen=True)
class CaptionRows:
    """Captions of many images as rows of their distinct texts.

    The captions of image i are the entries starts[i] to starts[i + 1] of `rows` and `upper`.

    Attributes:
      texts: the distinct texts, sorted.
      starts: place of the first caption of each image, and the number of all captions.
      rows: index in `texts` of each caption.
      upper: cumulative probabilities of the captions of each image.
    """

    texts: Sequence[str]
    starts: Int64[np.ndarray, " bounds"]
    rows: Int64[np.ndarray, " captions"]
    upper: Float64[np.ndarray, " captions"]

    @classmethod
    def index(cls, captions: Sequence[Captions]) -> "CaptionRows":
        """Returns the rows of the captions of each image."""
        texts = sorted({text for each in captions for text in each.texts})
        row_of = {text: row for row, text in enumerate(texts)}
        # Rounded sums may stay below 1, which a draw must not reach.
        upper = [[*np.cumsum(each.shares[:-1]).tolist(), 1.0] for each in captions]
        return cls(
            texts,
            np.cumsum([0, *(len(each.texts) for each in captions)], dtype=np.int64),
            np.array([row_of[text] for each in captions for text in each.texts], np.int64),
            np.array([bound for bounds in upper for bound in bounds], np.float64),
        )

    def first(self, places: Int64[np.ndarray, " rows"]) -> Int64[np.ndarray, " rows"]:
        """Returns the row of the first caption of some images."""
        return self.rows[self.starts[places]]

    def choose(
        self, places: Int64[np.ndarray, " rows"], row_ids: Int64[np.ndarray, " rows"], seed: int
    ) -> Int64[np.ndarray, " rows"]:
        """Chooses a caption of each image with its probability; depends only on the seed and the row id.

        Args:
          places: index of each image.
          row_ids: number of each row over all epochs; negative for held-out images.
          seed: seed of the run.

        Returns:
          The row of each chosen caption.
        """
        found = self.first(places)
        for index in np.flatnonzero(self.starts[places + 1] - self.starts[places] > 1).tolist():
            place, row_id = places[index], int(row_ids[index])
            draw = np.random.default_rng([seed, _STREAM + int(row_id < 0), abs(row_id)]).random()
            start, end = self.starts[place], self.starts[place + 1]
            found[index] = self.rows[start + np.searchsorted(self.upper[start:end], draw, side="right")]
        return found


def _table(path: Path) -> Mapping[str, Captions]:
    """Reads captions by image name; returns an empty dict if the file does not exist."""
    if not path.is_file():
        return {}
    found: dict[str, Captions] = {}
    for number, line in enumerate(read_text(path).split("\n"), 1):  # not splitlines: JSON strings may contain U+2028
        if not line.strip():
            continue
        name = f"{path}:{number}"
        try:
            entry = parse_record(name, line.encode())
            file_name, text = entry["file_name"], entry["text"]
        except (DataError, KeyError) as error:
            raise DataError(
                f'Line {number} of {path} is {line[:80]!r}; expected {{"file_name": "cat.png", "text": "a cat"}}.'
            ) from error
        if WEIGHTS in entry and not isinstance(text, list):
            raise DataError(f'{name}: "weights" are of a list of captions, and "text" is {text!r}. Remove them.')
        found[str(file_name)] = Captions.parse(name, text, entry.get(WEIGHTS))
    return found
