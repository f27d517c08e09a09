"""`data.name: images`: image files, labelled by folder."""

from pathlib import Path
from typing import Any, Literal

import numpy as np

from stack_core.abi.config import config
from stack_core.abi.data import Shapes
from stack_core.abi.errors import ConfigError
from stack_train.data.files import expand_glob
from stack_train.data.image_batches import ImageBatches, ImageSettings, LabelledImages, check_images
from stack_train.data.image_files import IMAGE_CHANNELS, OnUnreadable, read_images

__all__ = ["ImagesData"]

_NAMED = 10


@config
class ImagesData(ImageSettings):
    """Image files of any format that Pillow reads; needs stack-train[images].

    Images are cropped to their centre square, scaled to the model's `image_size` and converted to RGB or grey according
    to its `channels`. The results are memory-mapped from the user's cache. For a model with classes, an image's label
    is the index of its folder in the sorted folder names.

    Attributes:
      source: glob of image files; `**` matches any number of folders.
      name: selects this kind of data.
      unreadable: policy for files that are not readable images: "error", or "skip", which lists the files in a warning.
    """

    source: str
    name: Literal["images"] = "images"
    unreadable: OnUnreadable = "error"

    def spec(self, model: Any) -> Shapes:
        return self.shapes(model.image_size, model.channels, labelled=model.classes > 0)

    def check(self, model: Any) -> None:
        check_images(model, size=None, channels=IMAGE_CHANNELS, classes=0, label="kind images")

    def build(self, *, seed: int, model: Any) -> ImageBatches:
        """Reads the images, or maps them from the cache.

        Raises:
          DataError: Pillow is not installed, a file cannot be read, or no file is an image.
          ConfigError: there are more folders than the model has classes.
        """
        images = read_images(
            expand_glob(self.source, self.name),
            size=(model.image_size, model.image_size),
            channels=model.channels,
            unreadable=self.unreadable,
            source=self.source,
        )
        folders = sorted({Path(name).parent.name for name in images.names})
        if model.classes and len(folders) > model.classes:
            raise ConfigError(
                f"The images lie in {len(folders)} folders, {', '.join(folders[:_NAMED])}, and model.classes is "
                f"{model.classes}. Raise it, or set it to 0 to learn without labels."
            )
        labels = np.array([folders.index(Path(name).parent.name) for name in images.names], np.int32)
        held = LabelledImages(images.pixels, labels if model.classes else None, images.names)
        return ImageBatches(self, held, seed=seed)
