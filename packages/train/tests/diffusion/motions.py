"""Videos of a moving square, with captions."""

import json

import numpy as np
from PIL import Image

SIDE, FRAMES = 16, 9
MOTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
_SQUARE = 5


def drawn(motion, rng, *, frames=FRAMES):
    """Grey frames, uint8[frames, side, side], of a bright square that moves by one pixel per frame."""
    moved = np.array(MOTIONS[motion]) * (frames - 1)
    low, high = np.maximum(-moved, 0), SIDE - _SQUARE - np.maximum(moved, 0)
    start = rng.integers(low, high + 1)
    video = np.zeros((frames, SIDE, SIDE), np.uint8)
    for number, frame in enumerate(video):
        top, left = start + np.array(MOTIONS[motion]) * number
        frame[top : top + _SQUARE, left : left + _SQUARE] = 230
    return video


def caption(motion):
    return f"a square moves {motion}"


def write_videos(folder, count, *, seed=0, frames=FRAMES):
    """Videos as GIF files, WebP files and folders of PNG files by turns; captions beside them, or in a table."""
    folder.mkdir(parents=True)
    rng, lines, videos = np.random.default_rng(seed), [], []
    for number in range(count):
        motion = list(MOTIONS)[number % len(MOTIONS)]
        videos.append(drawn(motion, rng, frames=frames))
        images = [Image.fromarray(frame) for frame in videos[-1]]
        name = f"{number:04}{('.gif', '.webp', '')[number % 3]}"
        if number % 3 == 2:
            (folder / name).mkdir()
            for place, image in enumerate(images):
                image.save(folder / name / f"{place:03}.png")
        else:
            options = {"lossless": True} if name.endswith("webp") else {}
            images[0].save(folder / name, save_all=True, append_images=images[1:], duration=60, **options)
        if number % 2:
            (folder / name).with_suffix(".txt").write_text(caption(motion) + "\n")
        else:
            lines.append(json.dumps({"file_name": name, "text": caption(motion)}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return videos
