"""Captions of image files, from a text file per image or from a folder's `metadata.jsonl`."""

from collections.abc import Sequence
from pathlib import Path

from stack_core.abi.errors import DataError
from stack_core.text.json_records import parse_record
from stack_train.data.files import listing, read_text

__all__ = ["METADATA", "captions_of"]

METADATA = "metadata.jsonl"


def captions_of(files: Sequence[str], *, noun: str = "images") -> list[str]:
    """Returns the caption of each image or video, without surrounding whitespace.

    The caption of `cat.png` is the text of `cat.txt`. Without that file, it is the "text" of the line with "file_name"
    `cat.png` in the folder's `metadata.jsonl`, as in Hugging Face's image folders.

    Args:
      files: paths of the images or videos.
      noun: name of the files in messages.

    Raises:
      DataError: a caption is missing, or a file is malformed; the message counts and lists the files.
    """
    tables: dict[Path, dict[str, str]] = {}
    captions: list[str] = []
    missing: list[str] = []
    for name in files:
        path = Path(name)
        if path.parent not in tables:
            tables[path.parent] = _table(path.parent / METADATA)
        beside = path.with_suffix(".txt")
        caption = read_text(beside) if beside.is_file() else tables[path.parent].get(path.name, "")
        if not caption.strip():
            missing.append(name)
        captions.append(caption.strip())
    if missing:
        raise DataError(
            f"{len(missing)} of {len(files)} {noun} have no caption:\n  {listing(missing)}\nWrite each into a .txt "
            f"file of the same name, or into {METADATA} in the folder."
        )
    return captions


def _table(path: Path) -> dict[str, str]:
    """Reads captions by image name; returns an empty dict if the file does not exist."""
    if not path.is_file():
        return {}
    found = {}
    for number, line in enumerate(read_text(path).split("\n"), 1):  # not splitlines: JSON strings may contain U+2028
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
