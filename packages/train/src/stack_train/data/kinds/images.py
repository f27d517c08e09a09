"""`data.name: images`: images, labelled by folder or by a field."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Int32

from stack_core.abi.config import config
from stack_core.abi.data import Shapes
from stack_core.abi.errors import ConfigError
from stack_train.data.image_batches import ImageBatches, LabelledImages, check_images
from stack_train.data.image_files import IMAGE_CHANNELS, OnUnreadable, read_images
from stack_train.data.image_settings import SourceSettings, open_image_source

__all__ = ["ImagesData"]

_NAMED = 10


@config
class ImagesData(SourceSettings):
    """Images of any format that Pillow reads; needs stack-train[images].

    Images are cropped to their centre square, scaled to the model's `image_size` and converted to RGB or grey according
    to its `channels`. The results are memory-mapped from the user's cache. For a model with classes, a file's label is
    the index of its folder in the sorted folder names. Datasets have the number of the class, or its name.

    Attributes:
      name: selects this kind of data.
      label_field: column of the classes, by default "label"; of `tar:`, their file extension, by default "cls", or
        "json.KEY" for a key of `.json` members.
      unreadable: policy for files that are not readable images, and for images of a dataset without a class: "error",
        or "skip", which lists the files in a warning.
    """

    name: Literal["images"] = "images"
    label_field: str | None = None
    unreadable: OnUnreadable = "error"

    def spec(self, model: Any) -> Shapes:
        return self.shapes(model.image_size, model.channels, labelled=model.classes > 0)

    def check(self, model: Any) -> None:
        check_images(model, size=None, channels=IMAGE_CHANNELS, classes=0, label="kind images")
        self.check_source()
        if self.label_field is not None and not model.classes:
            raise ConfigError(
                f"model.classes is 0, so data.label_field={self.label_field!r} would have no effect. Leave it out."
            )

    def build(self, *, seed: int, model: Any) -> ImageBatches:
        """Reads the images, or maps them from the cache.

        Raises:
          DataError: Pillow is not installed, a file cannot be read, or no file is an image.
          ConfigError: there are more folders than the model has classes.
        """
        source = open_image_source(self, needs="label" if model.classes else None)
        images = read_images(
            source,
            size=(model.image_size, model.image_size),
            channels=model.channels,
            unreadable=self.unreadable,
            source=self.source,
        )
        labels = None
        if model.classes:
            noun = "folders" if self.scheme is None else "classes"
            labels = _numbers(source.labels(images.names), model.classes, noun)
        return ImageBatches(self, LabelledImages(images.pixels, labels, images.names), seed=seed)


def _numbers(labels: Sequence[str] | Sequence[int], classes: int, noun: str) -> Int32[np.ndarray, " images"]:
    """Returns labels as numbers; a name becomes its index among the sorted names.

    Raises:
      ConfigError: there are more names, or larger numbers, than the model has classes.
    """
    names = sorted({label for label in labels if isinstance(label, str)})
    if len(names) > classes:
        raise ConfigError(
            f"The images have {len(names)} {noun}, {', '.join(names[:_NAMED])}, and model.classes is {classes}. Raise "
            "it, or set it to 0 to learn without labels."
        )
    numbers = [names.index(label) if isinstance(label, str) else label for label in labels]
    if outside := sorted({number for number in numbers if not 0 <= number < classes}):
        raise ConfigError(
            f"The images have the classes {', '.join(map(str, outside[:_NAMED]))}, and model.classes is {classes}. "
            "Classes are numbered from 0. Raise it, or set it to 0 to learn without labels."
        )
    return np.array(numbers, np.int32)
