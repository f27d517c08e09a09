"""Settings of data that read images, and the opening of their source."""

import re
from typing import Any

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError, nearest
from stack_train.data.files import expand_glob, matching
from stack_train.data.image_batches import ImageSettings
from stack_train.data.image_source import ImageFields, ImageFiles, ImageSource, NeededField
from stack_train.data.image_tables import open_parquet_images, open_saved_images
from stack_train.data.image_tar import TarImages

__all__ = ["CaptionSettings", "SourceSettings", "open_image_source"]

_FORMATS = {"tar": TarImages, "parquet": open_parquet_images, "datasets": open_saved_images}
_FIELDS = ("image_field", "caption_field", "weights_field", "label_field")


@config
class SourceSettings(ImageSettings):
    """Settings of data that read an `ImageSource`.

    Attributes:
      source: images: a glob of files, where `**` matches any number of folders; `tar:GLOB`, tar files in the layout of
        WebDataset; `parquet:GLOB`; or `datasets:DIRECTORY`, a dataset on disk, with `:SPLIT` if it has several.
      image_field: column of the images, by default "image"; of `tar:`, their file extension, by default any of images.
    """

    source: str
    image_field: str | None = None

    @property
    def scheme(self) -> str | None:
        """Format before the colon of `source`; None for a glob of files."""
        return _split(self.source)[0]

    def check_source(self) -> None:
        """Raises a ConfigError if the scheme is unknown, or if the source ignores a field."""
        changed = [name for name in _FIELDS if getattr(self, name, None) is not None]
        if self.scheme is None:
            if changed:
                raise ConfigError(
                    f"data.source={self.source!r} is a glob of files, for which data.{' and data.'.join(changed)} "
                    "would have no effect. Leave it out."
                )
            return
        if self.scheme not in _FORMATS:
            raise ConfigError(
                f"data.source={self.source!r} has the scheme {self.scheme!r}.{nearest(self.scheme, _FORMATS)} Images "
                f"are read from {', '.join(f'{name}:' for name in _FORMATS)} or from a glob of files without a scheme."
            )
        in_json = (getattr(self, "caption_field", None) or "").startswith("json.")
        if self.scheme == "tar" and "weights_field" in changed and not in_json:
            raise ConfigError(
                "data.weights_field is a key of .json members, and the captions lie in others. Set data.caption_field "
                "to 'json.KEY', or leave data.weights_field out."
            )


@config
class CaptionSettings(SourceSettings):
    """Settings of data that read images with captions.

    Attributes:
      caption_field: column of the captions, by default "text"; of `tar:`, their file extension, by default "txt", or
        "json.KEY" for a key of `.json` members.
      weights_field: column of the weights of lists of captions, by default "weights" if it exists; of `tar:`, a key of
        the `.json` members.
    """

    caption_field: str | None = None
    weights_field: str | None = None


def open_image_source(settings: Any, needs: NeededField | None = None) -> ImageSource:
    """Opens the source of images of a section `data`.

    Args:
      settings: a `SourceSettings` with a `name`, and perhaps `caption_field`, `weights_field` and `label_field`.
      needs: see `NeededField`.

    Raises:
      DataError: nothing matches, a file is damaged, or a field does not exist.
    """
    scheme, address = _split(settings.source)
    if scheme is None:
        return ImageFiles(expand_glob(address, settings.name))
    fields = {name.removesuffix("_field"): getattr(settings, name, None) for name in _FIELDS}
    return _FORMATS[scheme](address, ImageFields(**fields), needs)


def _split(source: str) -> tuple[str | None, str]:
    """Returns the scheme of a source, or None for a glob of files, and the rest."""
    found = re.match(r"([a-z_0-9]{2,}):", source)  # a single letter is a drive of Windows
    if found is None or (found[1] not in _FORMATS and matching(source)):
        return None, source
    return found[1], source[found.end() :]
