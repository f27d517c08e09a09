"""Preferences and rewards for examples/digits_dpo.yaml and examples/digits_grpo.yaml: digits with more ink.

    python examples/ink.py [DIRECTORY]

writes scikit-learn's digits as image files and `pairs.jsonl`, pairs of two digits of one label, the brighter first.
`ink` is the reward of examples/digits_grpo.yaml.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits


def ink(images: np.ndarray, prompts: Sequence[str]) -> np.ndarray:
    """Returns the mean brightness of each image, from 0 to 1."""
    return images.mean(axis=(1, 2, 3)) / 255


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/ink-data")
    directory.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(directory / f"{number}.png")
    lines = []
    for label in range(10):
        numbers = np.random.default_rng(label).permutation(np.flatnonzero(digits.target == label))
        for pair in zip(numbers[::2], numbers[1::2], strict=False):
            rejected, chosen = sorted(pair, key=lambda number: pixels[number].mean())
            lines.append(json.dumps({"chosen": f"{chosen}.png", "rejected": f"{rejected}.png", "label": label}))
    (directory / "pairs.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
