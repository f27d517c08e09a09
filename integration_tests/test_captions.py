"""The example of captioned pictures: an image-text model is trained, and names new pictures."""

import random
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import stack_train
from stack_core.cli import main

ROOT = Path(__file__).parents[1]


@pytest.mark.slow  # minutes: it trains a model
def test_a_model_learns_to_name_shapes_and_colors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, ROOT / "examples" / "shapes.py"], check=True)
    main(["train", str(ROOT / "examples" / "captions.yaml")])
    example, rng = runpy.run_path(str(ROOT / "examples" / "shapes.py")), random.Random(7)
    labels = [f"{color} {shape}" for color in example["COLORS"] for shape in example["SHAPES"]]
    names = [rng.choice(labels) for _ in range(240)]
    pictures = [example["draw"](shape, example["COLORS"][color], rng) for color, shape in map(str.split, names)]
    found = stack_train.load_image_text("runs/captions").classify(pictures, labels, template="a {}")
    correct = [labels[place] == name for place, name in zip(found.argmax(1), names, strict=True)]
    assert sum(correct) >= 0.95 * len(names), sum(correct)
