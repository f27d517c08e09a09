"""The source `tar:GLOB` of images: tar archives in the layout of WebDataset.

Source: WebDataset (Aizman et al., 2019, arXiv:2001.01858).
"""

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stack_core.abi.errors import DataError, nearest
from stack_core.abi.user_cache import user_cache_dir
from stack_core.text.json_records import parse_record
from stack_train.data.cache import cached
from stack_train.data.captions import WEIGHTS, Captions
from stack_train.data.files import expand_glob, listing, stat_digest, undecodable, unreadable
from stack_train.data.image_source import ImageFields, NeededField
from stack_train.data.tar import check_end

__all__ = ["TarImages"]

_FORMAT = 1
_INDEX = "index.json"
_IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm")


@dataclass(frozen=True)
class _Member:
    """A file in an archive.

    Attributes:
      shard: path of the archive.
      name: name of the member.
      offset, size: place and number of its bytes in the archive.
    """

    shard: Path
    name: str
    offset: int
    size: int

    def __str__(self) -> str:
        return f"{self.shard}:{self.name}"

    def read(self) -> bytes:
        with self.shard.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


@dataclass(frozen=True)
class _Example:
    """The members with one name up to the first dot.

    Attributes:
      name: "shard:name".
      members: each member by its extension, the part of its name after the first dot.
    """

    name: str
    members: dict[str, _Member] = field(default_factory=dict)


class TarImages:
    """Images in tar archives, as an `ImageSource`; a member is read at its place in the archive.

    Members that share a name up to the first dot are one example: an image, `000.jpg`; its caption, `000.txt` or a key
    of `000.json`; and its class, a number in `000.cls`. Hidden files and names that begin with `__` are skipped. The
    name of an image is "shard:member". The places of the members are cached. Compressed archives are refused.

    Args:
      address: glob of the archives.
      fields: extensions of the members, or "json.KEY"; `weights` is a key of the same `.json` members.
      needs: see `NeededField`.

    Raises:
      DataError: nothing matches, an archive is compressed, or no example has an image or the needed member.
    """

    def __init__(self, address: str, fields: ImageFields, needs: NeededField | None) -> None:
        self._shards, self._fields = expand_glob(address, "tar"), fields
        self.defects: list[str] = []
        self._images: list[_Member] = []
        self._captions: dict[str, Captions] = {}
        self._labels: dict[str, int] = {}
        examples = [example for shard in self._shards for example in self._index(shard)]
        lacking = list[str]()
        for example in examples:
            try:
                image = self._image(example)
                if needs == "caption":
                    self._captions[str(image)] = self._caption(example)
                elif needs == "label":
                    self._labels[str(image)] = self._label(example)
                self._images.append(image)
            except DataError as error:
                lacking.append(str(error))
        if examples and not self._images:
            raise DataError(f"No example of {address!r} can be used:\n  {listing(lacking)}")
        self.defects += lacking

    @property
    def names(self) -> Sequence[str]:
        return [str(image) for image in self._images]

    def open(self, place: int) -> io.BytesIO:
        return io.BytesIO(self._images[place].read())

    def digest(self, places: Sequence[int], settings: Sequence[str]) -> str:
        chosen = [str(self._images[place]) for place in places]
        return stat_digest(((str(path), path) for path in self._shards), ["tar", *settings, *chosen])

    def captions(self, names: Sequence[str]) -> list[Captions]:
        return [self._captions[name] for name in names]

    def labels(self, names: Sequence[str]) -> list[int]:
        return [self._labels[name] for name in names]

    def _index(self, shard: Path) -> list[_Example]:
        """Returns the examples of an archive in order; appends its damage to `defects`."""
        members, damage = _members(shard)
        if damage is not None:
            self.defects.append(f"{shard}: {damage}")
        examples: dict[str, _Example] = {}
        for member in members:
            folder, _, base = member.name.rpartition("/")
            stem, _, extension = base.partition(".")
            if not stem or not extension or stem.startswith("__"):
                continue
            key = f"{folder}/{stem}" if folder else stem
            example = examples.setdefault(key, _Example(f"{shard}:{key}"))
            if extension in example.members:
                self.defects.append(f"{member}: the archive has two members of this name")
            example.members[extension] = member
        return list(examples.values())

    def _image(self, example: _Example) -> _Member:
        wanted = self._fields.image
        found = [each for each in example.members if each == wanted or (wanted is None and each.lower() in _IMAGES)]
        if len(found) == 1:
            return example.members[found[0]]
        have = ", ".join(sorted(example.members))
        if found:
            raise DataError(f"{example.name}: it has several images ({have}). Set data.image_field to one extension.")
        if wanted is None:
            raise DataError(f"{example.name}: it has no image, only {have}")
        raise DataError(f"{example.name}: it has no member {wanted!r} (data.image_field), only {have}")

    def _caption(self, example: _Example) -> Captions:
        name, value, record = self._value(example, self._fields.caption or "txt", "caption_field")
        weights = None
        if isinstance(value, list):
            weights = record.get(self._fields.weights or WEIGHTS)
            if weights is None and self._fields.weights is not None:
                raise DataError(f"{name}: there is no key {self._fields.weights!r} (data.weights_field)")
        found = Captions.parse(name, value, weights)
        if not found.texts:
            raise DataError(f"{name}: the caption is blank")
        return found

    def _label(self, example: _Example) -> int:
        name, value, _ = self._value(example, self._fields.label or "cls", "label_field")
        try:
            return int(value)
        except (ValueError, TypeError):
            raise DataError(f"{name}: {value!r} is not the number of a class") from None

    def _value(self, example: _Example, path: str, setting: str) -> tuple[str, Any, Mapping[str, Any]]:
        """Returns name and value of a text or of a key of a `.json` member, and the record of the key."""
        extension, _, key = path.partition(".")
        if extension != "json" or not key:
            extension, key = path, ""
        member = example.members.get(extension)
        if member is None:
            have, hint = sorted(example.members), nearest(extension, example.members)
            keys = f" Set data.{setting} to 'json.KEY' for a key of the .json members." if "json" in have else ""
            raise DataError(
                f"{example.name}: it has no member {extension!r} (data.{setting}), only {', '.join(have)}.{hint}{keys}"
            )
        name = str(member)
        if not key:
            try:
                return name, member.read().decode("utf-8"), {}
            except UnicodeDecodeError as error:
                raise undecodable(name, error) from error
        record = parse_record(name, member.read())
        if key not in record:
            hint, known = nearest(key, record), ", ".join(map(repr, record))
            raise DataError(f"{name}: there is no key {key!r} (data.{setting}).{hint} Its keys: {known}")
        return name, record[key], record


def _members(shard: Path) -> tuple[list[_Member], str | None]:
    """Returns the complete files of an archive, from the cache, and its damage or None."""

    def build(folder: Path) -> None:
        found, damage = _scan(shard)
        (folder / _INDEX).write_text(json.dumps({"members": found, "damage": damage}), encoding="utf-8")

    entry = user_cache_dir() / "tar" / stat_digest([(str(shard), shard)], [str(_FORMAT)])
    index = json.loads((cached(entry, build) / _INDEX).read_text(encoding="utf-8"))
    return [_Member(shard, name, offset, size) for name, offset, size in index["members"]], index["damage"]


def _scan(shard: Path) -> tuple[list[tuple[str, int, int]], str | None]:
    """Returns name, offset and size of the complete files of an archive, and its damage or None; reads only headers."""
    found: list[tuple[str, int, int]] = []
    previous: tuple[str, int, int] | None = None
    try:
        with shard.open("rb") as file:
            if file.read(6).startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")):
                raise DataError(
                    f"{str(shard)!r} is compressed, and images are read at their places in an archive. Decompress it; "
                    "images are compressed themselves."
                )
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:") as archive:
                for member in archive:
                    # The next header proves that the previous member is complete.
                    if previous is not None:
                        found.append(previous)
                    previous = None
                    if member.sparse is not None:
                        raise DataError(f"{shard}:{member.name}: the member is sparse. Write it without holes.")
                    if member.isreg():
                        previous = member.name, member.offset_data, member.size
                    setattr(archive, "members", [])  # noqa: B010  it would keep the header of every member
                if previous is not None:
                    found.append(previous)
                previous = None
                check_end(archive)
    except tarfile.TarError as error:
        where = f" in member {previous[0]!r}" if previous is not None else ""
        return found, f"it cannot be read as a tar archive{where}: {error}. Write or copy it again"
    except OSError as error:
        raise unreadable(shard, error) from error
    return found, None
