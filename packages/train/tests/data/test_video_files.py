"""Video files that PyAV reads, at the frame rate of the file or at another."""

import struct
import sys

import numpy as np
import pytest
from PIL import Image

from stack_core.abi.errors import DataError
from stack_train.data.kinds.videos import VideosData
from stack_train.data.video_files import find_videos, read_videos
from stack_train.diffusion.autoencoder_kl_wan import AutoencoderKlWanConfig

av = pytest.importorskip("av", reason="needs stack-train[video]")

SIDE, FRAMES, RATE = 8, 9, 30
LEVELS = 20 + 20 * np.arange(FRAMES)
# The codec of each format, its pixels and the largest error of a level.
FORMATS = {"mp4": ("mpeg4", "yuv420p", 4), "webm": ("libvpx-vp9", "yuv420p", 4), "mkv": ("ffv1", "gray", 0)}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(path, frames, codec, pixel_format, sound=False):
    with av.open(str(path), "w") as container:
        if sound:
            stream = container.add_stream("pcm_s16le", rate=8000)
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 160), np.int16), layout="mono")
            silence.sample_rate = 8000
            container.mux(stream.encode(silence))
        else:
            stream = container.add_stream(codec, rate=RATE)
            stream.height, stream.width, stream.pix_fmt = *frames[0].shape, pixel_format
            for frame in frames:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="gray")))
            container.mux(stream.encode())
    return path


def grey(level, side=16):
    return np.full((side, side), level, np.uint8)


def levels(path, frames, frame_rate=None):
    settings = {"size": SIDE, "channels": 1, "unreadable": "error", "source": "videos"}
    settings["frame_rate"] = None if frame_rate is None else float(frame_rate)
    return read_videos(find_videos(str(path)), frames=frames, **settings).pixels[0, :, SIDE // 2, SIDE // 2, 0]


@pytest.mark.parametrize("suffix", FORMATS)
def test_the_first_frames_of_a_file_are_read(suffix, tmp_path):
    codec, pixel_format, error = FORMATS[suffix]
    path = write(tmp_path / f"clip.{suffix}", [grey(level) for level in LEVELS], codec, pixel_format)
    for count in (FRAMES, 4):
        np.testing.assert_allclose(levels(path, count).astype(int), LEVELS[:count], atol=error)
    chosen = {15: [0, 2, 4, 6, 8], 60: np.repeat(np.arange(FRAMES), 2), 24: [0, 1, 2, 3, 5, 6, 7, 8], 30: range(FRAMES)}
    for rate, places in chosen.items():
        expected = LEVELS[list(places)]
        np.testing.assert_allclose(levels(path, len(expected), frame_rate=rate).astype(int), expected, atol=error)
        with pytest.raises(
            DataError, match=f"it has {len(expected)} frames at {rate} frames per second, and the model"
        ):
            levels(path, len(expected) + 1, frame_rate=rate)


@pytest.mark.parametrize("suffix", ["gif", "webp"])
def test_animations_have_the_frames_at_their_times(suffix, tmp_path):
    images, durations_ms = [Image.fromarray(grey(level)) for level in (20, 120, 220)], [40, 100, 60]
    options = {"lossless": True} if suffix == "webp" else {}
    path = tmp_path / f"clip.{suffix}"
    images[0].save(path, save_all=True, append_images=images[1:], duration=durations_ms, **options)
    # Of frames at 0, 40 and 140 ms that end at 200 ms.
    assert levels(path, 10, frame_rate=50).tolist() == [20] * 2 + [120] * 5 + [220] * 3
    assert levels(path, 2, frame_rate=10).tolist() == [20, 120]
    with pytest.raises(DataError, match="it has 2 frames at 10 frames per second"):
        levels(path, 3, frame_rate=10)


def test_a_video_of_a_phone_is_turned_upright(tmp_path):
    frame = np.repeat(np.arange(4, dtype=np.uint8) * 60 + 20, 4)[None].repeat(16, 0)
    path = write(tmp_path / "clip.mp4", [frame], "mpeg4", "yuv420p")
    contents = bytearray(path.read_bytes())
    # The matrix of the track's header, a rotation by 90 degrees clockwise in fixed point.
    one = 1 << 16
    struct.pack_into(">9i", contents, contents.index(b"tkhd") + 44, 0, one, 0, -one, 0, 0, 0, 0, 1 << 30)
    path.write_bytes(contents)
    settings = {"size": 16, "channels": 1, "unreadable": "error", "source": "videos"}
    found = read_videos(find_videos(str(path)), frames=1, **settings).pixels[0, 0, ..., 0]
    np.testing.assert_allclose(found.astype(int), np.rot90(frame, -1), atol=8)


def test_files_that_cannot_be_read_are_named(tmp_path):
    def refused(message, path, **settings):
        with pytest.raises(DataError, match=message):
            levels(path, FRAMES, **settings)

    (tmp_path / "clip.mp4").write_bytes(b"no video")
    refused(r"1 of 1 files cannot be read as videos:(.|\n)*clip.mp4: ValueError: .*Invalid data", tmp_path / "clip.mp4")
    write(tmp_path / "sound.mkv", [], "", "", sound=True)
    refused(r"sound.mkv: ValueError: the file lacks a stream of video", tmp_path / "sound.mkv")
    write(tmp_path / "short.mkv", [grey(20), grey(30)], "ffv1", "gray")
    refused(r"short.mkv: it has 2 frames, and the model reads 9. Lower model.frames", tmp_path / "short.mkv")
    (tmp_path / "frames").mkdir()
    refused(
        r"frames is a folder of frames without times, which data.frame_rate=8 needs", tmp_path / "frames", frame_rate=8
    )


def test_without_the_extra_the_message_has_both_remedies(tmp_path, monkeypatch):
    write(tmp_path / "clip.mkv", [grey(20)], "ffv1", "gray")
    monkeypatch.setitem(sys.modules, "av", None)
    message = r"clip.mkv is read by PyAV: .*\[video\].*Or convert the video: mkdir clip && ffmpeg -i clip.mkv clip/"
    with pytest.raises(DataError, match=message):
        find_videos(f"{tmp_path}/*.mkv")


def test_an_autoencoder_trains_on_the_frames_of_files(tmp_path):
    model = AutoencoderKlWanConfig(image_size=SIDE, frames=5, channels=3)
    for number in range(3):
        write(tmp_path / f"{number}.mkv", [grey(level + 5 * number) for level in LEVELS], "ffv1", "gray")
    section = VideosData(source=f"{tmp_path}/*.mkv", batch_size=3, validation_fraction=0.0, frame_rate=15)
    batch = next(section.build(seed=0, model=model).train_iterator())
    found = np.sort(np.round((batch["images"][:, :, 0, 0, 0] + 1) * 127.5), axis=0)
    np.testing.assert_array_equal(found, LEVELS[None, ::2] + 5 * np.arange(3)[:, None])
