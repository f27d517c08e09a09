"""Images with captions and labels that are read one by one: the interface, and image files."""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from stack_train.data.captions import Captions, captions_of
from stack_train.data.files import stat_digest

__all__ = ["ImageFields", "ImageFiles", "ImageSource", "NeededField"]

NeededField = Literal["caption", "label"]
"""Field that every image of a source must have besides the image."""


@runtime_checkable
class ImageSource(Protocol):
    """Images that are read one by one, in any order.

    Attributes:
      names: unique readable name of each image.
      defects: parts of the data that are not an image with its caption or class, with the reason; `data.unreadable` is
        their policy.
    """

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def defects(self) -> Sequence[str]: ...

    def open(self, place: int) -> BufferedIOBase:
        """Opens the encoded image at an index.

        Raises:
          OSError, ValueError: the image cannot be read.
        """
        ...

    def digest(self, places: Sequence[int], settings: Sequence[str]) -> str:
        """Returns a digest of some images and of `settings`, without reading the images.

        It changes with the sizes and modification times of the files.
        """
        ...

    def captions(self, names: Sequence[str]) -> list[Captions]:
        """Returns the captions of the images with these names; raises a DataError if one is missing."""
        ...

    def labels(self, names: Sequence[str]) -> list[str] | list[int]:
        """Returns the class of each image with these names, by name or by number.

        Raises:
          DataError: an image lacks a class.
        """
        ...


@dataclass(frozen=True)
class ImageFields:
    """Names of the fields of a dataset; None is the default of the format.

    Attributes:
      image: the encoded image.
      caption: the caption, or a list of captions.
      weights: the weights of a list of captions.
      label: the number of the class.
    """

    image: str | None = None
    caption: str | None = None
    weights: str | None = None
    label: str | None = None


@dataclass(frozen=True)
class ImageFiles:
    """Image files as an `ImageSource`; captions are in the same folder, and folders are classes.

    Attributes:
      paths: paths of the files.
    """

    paths: Sequence[Path]
    defects: Sequence[str] = ()

    @property
    def names(self) -> Sequence[str]:
        return [str(path) for path in self.paths]

    def open(self, place: int) -> BufferedIOBase:
        return self.paths[place].open("rb")

    def digest(self, places: Sequence[int], settings: Sequence[str]) -> str:
        return stat_digest(((str(self.paths[place]), self.paths[place]) for place in places), settings)

    def captions(self, names: Sequence[str]) -> list[Captions]:
        return captions_of(names)

    def labels(self, names: Sequence[str]) -> list[str]:
        return [Path(name).parent.name for name in names]
