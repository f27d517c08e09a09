"""Writes the data of examples/squares.yaml: clips of a moving square, with captions.

    python examples/squares.py [DIRECTORY] [CLIPS]

A clip has ten grey frames of 6 x 6 pixels, in which a bright square moves by one pixel per frame, and a caption, such
as "a square moves left" in `7.txt`. A square that leaves at one side enters at the opposite one.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

SIDE, FRAMES, SQUARE = 6, 10, 3
MOTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/squares-data")
    clips = int(sys.argv[2]) if len(sys.argv) > 2 else 600
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for number in range(clips):
        motion = list(MOTIONS)[number % len(MOTIONS)]
        first, *others = [Image.fromarray(frame) for frame in draw(motion, rng)]
        first.save(directory / f"{number}.gif", save_all=True, append_images=others, duration=60)
        (directory / f"{number}.txt").write_text(caption(motion) + "\n")


def caption(motion: str) -> str:
    return f"a square moves {motion}"


def draw(motion: str, rng: np.random.Generator) -> np.ndarray:
    """Draws the frames of a clip, uint8[frames, side, side]."""
    (top, left), (down, right) = rng.integers(SIDE, size=2), MOTIONS[motion]
    return np.stack([draw_frame(top + number * down, left + number * right) for number in range(FRAMES)])


def draw_frame(top: int, left: int) -> np.ndarray:
    frame = np.zeros((SIDE, SIDE), np.uint8)
    rows, columns = ((start + np.arange(SQUARE)) % SIDE for start in (top, left))
    frame[np.ix_(rows, columns)] = 230
    return frame


if __name__ == "__main__":
    main()
