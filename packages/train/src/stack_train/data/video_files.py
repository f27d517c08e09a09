"""Video files and folders of frames, cropped and scaled to squares of one size and cached."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stack_core.abi.errors import DataError
from stack_core.abi.user_cache import user_cache_dir
from stack_train.data.cache import digest_of
from stack_train.data.captions import METADATA
from stack_train.data.files import matching, stat_digest
from stack_train.data.image_files import (
    FileImages,
    ImageScaling,
    OnUnreadable,
    cached_pixels,
    check_read,
    decoder_errors,
    mode_of,
)
from stack_train.diffusion.grid import pillow, turn_upright

__all__ = ["find_videos", "read_videos"]

_FORMAT = 1
_ANIMATIONS, _FRAME = (".gif", ".webp"), ".png"


def find_videos(pattern: str) -> tuple[Path, ...]:
    """Returns the videos of a glob, sorted: GIF and WebP files, and folders of PNG files.

    Raises:
      DataError: nothing matches, or a file is not a video, with the remedy for other formats.
    """
    matches = {Path(match).absolute() for match in matching(pattern)}
    parents = {path.parent for path in matches}
    videos: list[Path] = []
    for path in sorted(matches):
        if path.is_dir():
            # Folders around the videos match as well if the pattern has `**`.
            if path not in parents or any(path.glob(f"*{_FRAME}")):
                videos.append(path)
        elif path.suffix in _ANIMATIONS:
            videos.append(path)
        elif not (path.suffix in (".txt", _FRAME) or path.name == METADATA):
            raise DataError(
                f"{path} is not a video of data.source={pattern!r}: GIF and WebP files and folders of PNG files are "
                f"read. Convert it: mkdir {path.stem} && ffmpeg -i {path.name} {path.stem}/%05d.png, or narrow the "
                "glob."
            )
    if not videos:
        raise DataError(
            f"data.source={pattern!r} matches no GIF or WebP file and no folder of PNG files; relative paths start at "
            f"{str(Path.cwd())!r}. Correct the path, as in 'videos/*'."
        )
    return tuple(videos)


def read_videos(
    videos: Sequence[Path], *, size: int, frames: int, channels: int, unreadable: OnUnreadable, source: str
) -> FileImages:
    """Reads the first frames of videos into one memory-mapped array: the centre square, scaled to `size` x `size`.

    Encoders join equal frames, so a frame with k times the shortest duration counts k times. The array is stored in the
    user's cache.

    Args:
      videos: animated files, and folders of PNG files in the order of their names.
      size: side of the resulting frames in pixels.
      frames: number of frames of each video.
      channels: 1 (grey) or 3 (RGB).
      unreadable: policy for unreadable videos and videos with fewer frames.
      source: name of the videos in messages.

    Raises:
      DataError: Pillow is not installed, a video cannot be read or has fewer frames, or all are skipped.
    """
    files = [each for path in videos for each in (_numbered(path) if path.is_dir() else [path])]
    digest = stat_digest(((str(path), path) for path in files), [digest_of(_FORMAT, size, frames, channels)])
    entry = user_cache_dir() / "videos" / digest_of(digest, [str(path) for path in videos])
    decoded = ((str(path), _frames_of(path, size, frames, mode_of(channels))) for path in videos)
    read = cached_pixels(entry, decoded, shape=(len(videos), frames, size, size, channels))
    check_read(read.unreadable, len(read.names), unreadable, source, kind="video")
    return read


def _numbered(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{_FRAME}"))


def _frames_of(path: Path, size: int, frames: int, mode: str) -> np.ndarray | str:
    """Returns the first frames of a video, or the reason why it cannot be read."""
    found: list[np.ndarray] = []
    errors = decoder_errors()
    try:
        for frame in _folder_frames(path) if path.is_dir() else _animation_frames(path):
            found.append(np.asarray(ImageScaling()(frame.convert(mode), (size, size))))
            if len(found) == frames:
                return np.stack(found)
    except errors as error:
        return f"{type(error).__name__}: {error}"
    return f"it has {len(found)} frames, and the model reads {frames}. Lower model.frames, or give a longer video"


def _folder_frames(folder: Path) -> Iterator[Any]:
    for path in _numbered(folder):
        with pillow().open(path) as opened:
            yield turn_upright(opened)


def _animation_frames(path: Path) -> Iterator[Any]:
    with pillow().open(path) as opened:
        # Images of one frame have neither of these.
        numbers = range(getattr(opened, "n_frames", 1))
        durations = []
        for number in numbers:
            opened.seek(number)
            opened.load()  # WebP has the duration of a frame that is decoded
            durations.append(opened.info.get("duration") or 0)
        shortest = min(durations)
        for number in numbers:
            opened.seek(number)
            for _ in range(round(durations[number] / shortest) if shortest else 1):
                yield opened
