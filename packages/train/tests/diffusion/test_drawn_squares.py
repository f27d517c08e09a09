"""The example of captioned clips: a Wan is trained, and judged frame by frame."""

import itertools
import runpy
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.cli import main
from stack_train.diffusion.sampling import open_images

EXAMPLES = Path(__file__).parents[4] / "examples"


class Reader:
    """Reads the motion of clips, or None: each frame must show a square, and all of its steps must be the same.

    A frame shows a square if at most one pixel is wrong after rounding to black and white.
    """

    def __init__(self, example):
        self.side, self.motions = example["SIDE"], example["MOTIONS"]
        places = itertools.product(range(self.side), repeat=2)
        self.squares = np.stack([example["draw_frame"](*place).ravel() > 0 for place in places])

    def __call__(self, clip):
        frames = (clip > 115).reshape(len(clip), 1, -1)
        wrong = (frames != self.squares).sum(-1)
        if wrong.min(1).max() > 1:
            return None
        places = np.stack(np.divmod(wrong.argmin(1), self.side), axis=1)
        steps = {tuple(step) for step in np.diff(places, axis=0) % self.side}
        found = [name for name, step in self.motions.items() if steps == {tuple(np.mod(step, self.side))}]
        return found[0] if found else None


def drawn(example, count, seed):
    """Every motion `count` times, and a clip of each, uint8[clips, frames, height, width, 1]."""
    rng, motions = np.random.default_rng(seed), list(example["MOTIONS"]) * count
    return motions, np.stack([example["draw"](motion, rng) for motion in motions])[..., None]


def test_the_motion_of_clips_is_read_exactly():
    example = runpy.run_path(str(EXAMPLES / "squares.py"))
    read, (motions, clips) = Reader(example), drawn(example, 50, seed=0)
    assert [read(clip) for clip in clips] == motions
    rng, clip = np.random.default_rng(1), clips[0]
    noisy = np.clip(clip + rng.normal(0, 25, clip.shape), 0, 255).astype(np.uint8)
    assert read(noisy) == motions[0] and read(clip[::-1]) == "right" != motions[0]
    jumping, bent = clip[[0, 1, 2, 3, 4, 4, 6, 7, 8, 9]], np.concatenate([clip[:5], clip[4:5].swapaxes(1, 2), clip[6:]])
    two = np.maximum(clip, np.roll(clip, 3, axis=1))
    assert [read(other) for other in (clip[[0] * 10], jumping, bent, two, clip // 4)] == [None] * 5


@pytest.mark.slow  # minutes: it trains a model
def test_a_square_moves_as_its_caption_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for script in ("squares.py", "encoders.py"):
        subprocess.run([sys.executable, EXAMPLES / script], check=True)
    example = runpy.run_path(str(EXAMPLES / "squares.py"))
    autoencoder = runpy.run_path(str(EXAMPLES / "encoders.py"))["video_autoencoder"]()
    asked, clips = drawn(example, 25, seed=0)
    pixels = jnp.asarray(clips[:2] / 127.5 - 1, jnp.float32)
    np.testing.assert_allclose(autoencoder.images_of(autoencoder.scaled_latents(pixels)), pixels, atol=1e-3)
    main(["train", str(EXAMPLES / "squares.yaml")])
    opened, read = open_images("runs/squares"), Reader(example)
    sampler = opened.sampler.changed({"steps": 40})
    found = [read(clip) for clip in opened.images_of([example["caption"](motion) for motion in asked], sampler)]
    assert np.mean([one == other for one, other in zip(found, asked, strict=True)]) >= 0.95
