"""Captions of images in files: a text file beside each, or a line of a folder's `metadata.jsonl`."""

from collections.abc import Sequence
from pathlib import Path

from stack_core.abi.errors import DataError
from stack_core.text.json_records import parse_record
from stack_train.data.files import read_text

__all__ = ["METADATA", "captions_of"]

METADATA = "metadata.jsonl"
_NAMED = 10


def captions_of(images: Sequence[str]) -> list[str]:
    """Returns the caption of each image, without spaces around it.

    It stands in the text file of the same name, `cat.txt` of `cat.png`; or else in the image's folder in
    `metadata.jsonl`, under "text" of the line whose "file_name" is the image's, as in Hugging Face's image folders.

    Raises:
      DataError: images have no caption, or a file is malformed; names and counts them.
    """
    tables: dict[Path, dict[str, str]] = {}
    captions: list[str] = []
    missing: list[str] = []
    for name in images:
        path = Path(name)
        if path.parent not in tables:
            tables[path.parent] = _table(path.parent / METADATA)
        beside = path.with_suffix(".txt")
        caption = read_text(beside) if beside.is_file() else tables[path.parent].get(path.name, "")
        if not caption.strip():
            missing.append(name)
        captions.append(caption.strip())
    if missing:
        listing = "\n  ".join(missing[:_NAMED])
        more = f"\n  and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise DataError(
            f"{len(missing)} of {len(images)} images have no caption:\n  {listing}{more}\nWrite each into a .txt file "
            f"of the image's name, or into {METADATA} in its folder."
        )
    return captions


def _table(path: Path) -> dict[str, str]:
    """Captions by the images' names; of no file, none."""
    if not path.is_file():
        return {}
    found = {}
    for number, line in enumerate(read_text(path).split("\n"), 1):  # JSON may hold other ends of lines in its strings
        if not line.strip():
            continue
        try:
            entry = parse_record(f"{path}:{number}", line.encode())
            found[entry["file_name"]] = str(entry["text"])
        except (DataError, KeyError, TypeError) as error:
            raise DataError(
                f'Line {number} of {path} is {line[:80]!r}; expected {{"file_name": "cat.png", "text": "a cat"}}.'
            ) from error
    return found
