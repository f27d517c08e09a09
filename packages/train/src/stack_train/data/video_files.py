"""Video files and folders of frames, cropped and scaled to squares of one size and cached."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stack_core.abi.errors import DataError
from stack_core.abi.installing import install_command
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
_FILMS = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi")
_ROUNDING_S = 1e-3  # Matroska and WebM store times in milliseconds


def find_videos(pattern: str) -> tuple[Path, ...]:
    """Returns the videos of a glob, sorted: MP4, WebM, MKV, GIF and WebP files, and folders of PNG files.

    Raises:
      DataError: nothing matches, a file is not a video, or PyAV is not installed; the message has the remedy.
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
        elif path.suffix.lower() in _FILMS:
            _av(path)
            videos.append(path)
        elif not (path.suffix in (".txt", _FRAME) or path.name == METADATA):
            raise DataError(
                f"{path} is not a video of data.source={pattern!r}: MP4, WebM, MKV, GIF and WebP files and folders of "
                f"PNG files are read. Convert it: {_conversion(path)}, or narrow the glob."
            )
    if not videos:
        raise DataError(
            f"data.source={pattern!r} matches no MP4, WebM, MKV, GIF or WebP file and no folder of PNG files; relative "
            f"paths start at {str(Path.cwd())!r}. Correct the path, as in 'videos/*'."
        )
    return tuple(videos)


def read_videos(
    videos: Sequence[Path],
    *,
    size: int,
    frames: int,
    channels: int,
    unreadable: OnUnreadable,
    source: str,
    frame_rate: float | None = None,
) -> FileImages:
    """Reads the first frames of videos into one memory-mapped array: the centre square, scaled to `size` x `size`.

    Encoders of GIF and WebP join equal frames, so a frame with k times the shortest duration counts k times. The array
    is stored in the user's cache.

    Args:
      videos: video files, and folders of PNG files in the order of their names.
      size: side of the resulting frames in pixels.
      frames: number of frames of each video.
      channels: 1 (grey) or 3 (RGB).
      unreadable: policy for unreadable videos and videos with fewer frames.
      source: name of the videos in messages.
      frame_rate: frames per second; frame k is the frame at k / frame_rate seconds. None takes the frames of the files.

    Raises:
      DataError: Pillow is not installed, a video cannot be read or has fewer frames, or all are skipped; or a folder of
        frames, whose times are unknown, is read with a frame rate.
    """
    folder = next((path for path in videos if path.is_dir()), None)
    if frame_rate is not None and folder is not None:
        raise DataError(
            f"{folder} is a folder of frames without times, which data.frame_rate={frame_rate:g} needs. Write a video "
            "file, or leave data.frame_rate out."
        )
    files = [each for path in videos for each in (_numbered(path) if path.is_dir() else [path])]
    rate = () if frame_rate is None else (frame_rate,)
    digest = stat_digest(((str(path), path) for path in files), [digest_of(_FORMAT, size, frames, channels, *rate)])
    entry = user_cache_dir() / "videos" / digest_of(digest, [str(path) for path in videos])
    decoded = ((str(path), _frames_of(path, size, frames, mode_of(channels), frame_rate)) for path in videos)
    read = cached_pixels(entry, decoded, shape=(len(videos), frames, size, size, channels))
    check_read(read.unreadable, len(read.names), unreadable, source, kind="video")
    return read


def _numbered(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{_FRAME}"))


def _frames_of(path: Path, size: int, frames: int, mode: str, frame_rate: float | None) -> np.ndarray | str:
    """Returns the first frames of a video, or the reason why it cannot be read."""
    found: list[np.ndarray] = []
    errors = decoder_errors()
    try:
        for frame in _frames(path, frame_rate):
            found.append(np.asarray(ImageScaling()(frame.convert(mode), (size, size))))
            if len(found) == frames:
                return np.stack(found)
    except errors as error:
        return f"{type(error).__name__}: {error}"
    rate = "" if frame_rate is None else f" at {frame_rate:g} frames per second"
    return f"it has {len(found)} frames{rate}, and the model reads {frames}. Lower model.frames, or give a longer video"


def _frames(path: Path, frame_rate: float | None) -> Iterator[Any]:
    if path.is_dir():
        return _folder_frames(path)
    return (_film_frames if path.suffix.lower() in _FILMS else _animation_frames)(path, frame_rate)


def _folder_frames(folder: Path) -> Iterator[Any]:
    for path in _numbered(folder):
        with pillow().open(path) as opened:
            yield turn_upright(opened)


def _animation_frames(path: Path, frame_rate: float | None) -> Iterator[Any]:
    """Yields the frames of a GIF or WebP file; without a frame rate, the shortest duration counts once."""
    with pillow().open(path) as opened:
        # Images of one frame have neither of these.
        numbers = range(getattr(opened, "n_frames", 1))
        durations_ms = []
        for number in numbers:
            opened.seek(number)
            opened.load()  # WebP has the duration of a frame that is decoded
            durations_ms.append(opened.info.get("duration") or 0)
        if frame_rate is None:
            shortest = min(durations_ms)
            counts = [round(each / shortest) if shortest else 1 for each in durations_ms]
        else:
            ends_s = np.cumsum([0, *durations_ms]) / 1000 - _ROUNDING_S
            counts = np.diff(np.ceil(np.maximum(ends_s, 0) * frame_rate)).astype(int).tolist()
        for number in numbers:
            opened.seek(number)
            for _ in range(counts[number]):
                yield opened


def _film_frames(path: Path, frame_rate: float | None) -> Iterator[Any]:
    """Yields the frames of the first video stream of a file."""
    av = _av(path)
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise ValueError("the file lacks a stream of video")
            frames = container.decode(container.streams.video[0])
            for frame in frames if frame_rate is None else _resampled(frames, frame_rate):
                # Phones store upright videos on their side, with a rotation.
                yield frame.to_image().rotate(frame.rotation, expand=True)
    except av.FFmpegError as error:
        raise ValueError(str(error)) from error


def _resampled(frames: Iterable[Any], frame_rate: float) -> Iterator[Any]:
    """Yields the frames of a stream at 0, 1 / frame_rate, 2 / frame_rate, ... seconds after the first."""
    number, shown, first_s, duration_s = 0, None, 0.0, 0.0
    for frame in frames:
        if frame.time is None:
            raise ValueError("the frames have no times; leave data.frame_rate out")
        if shown is None:
            first_s = frame.time
        else:
            duration_s = frame.time - shown.time
            while number / frame_rate < frame.time - first_s - _ROUNDING_S:
                yield shown
                number += 1
        shown = frame
    # The last frame gets the duration of the previous frame; its end is a sum of three rounded times.
    end_s = 0.0 if shown is None else shown.time + duration_s - first_s - 3 * _ROUNDING_S
    while shown is not None and (number == 0 or number / frame_rate < end_s):
        yield shown
        number += 1


def _av(path: Path) -> Any:
    """Imports and returns PyAV.

    Raises:
      DataError: PyAV is not installed.
    """
    try:
        import av  # an extra
    except ImportError as error:
        raise DataError(
            f"{path} is read by PyAV: {error}. Install it: {install_command('stack-train[video]')}. Or convert the "
            f"video: {_conversion(path)}"
        ) from error
    return av


def _conversion(path: Path) -> str:
    return f"mkdir {path.stem} && ffmpeg -i {path.name} {path.stem}/%05d.png"
